//! Addresses of remote models: protocol, server and model.

use halo_core::Error;
use reqwest::Url;
use std::fmt;
use std::net::IpAddr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemoteProtocol {
    Kobold,
    OpenAi,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RemoteAddress {
    pub protocol: RemoteProtocol,
    pub base: BaseUrl,
    /// The name of the model; `None` selects the server's only one.
    pub model: Option<String>,
}

/// The URL that the paths of all requests to a server are appended to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BaseUrl(Url);

/// The protocol that an address begins with.
pub(crate) fn parse_protocol(address: &str) -> Option<RemoteProtocol> {
    let protocols = [("kobold+", RemoteProtocol::Kobold), ("openai+", RemoteProtocol::OpenAi)];
    let (name, protocol) = protocols.into_iter().find(|(name, _)| address.starts_with(name))?;
    let rest = &address[name.len()..];
    (rest.starts_with("http://") || rest.starts_with("https://")).then_some(protocol)
}

impl RemoteAddress {
    pub fn parse(address: &str) -> Result<Self, Error> {
        let operation = || format!("reading the address '{}'", redact_password(address));
        let forms = "write kobold+http://HOST:PORT or openai+https://HOST/v1#MODEL";
        let protocol = parse_protocol(address).ok_or_else(|| Error::invalid_input(operation(), forms))?;
        let url = address.split_once('+').map_or("", |(_, url)| url);
        let (url, model) = url.split_once('#').map_or((url, None), |(url, model)| (url, Some(model)));
        let mut base = BaseUrl::parse(url)
            .map_err(|why| Error::invalid_input(operation(), format!("{why}; {forms}")))?;
        if base.0.query().is_some() {
            return Err(Error::invalid_input(operation(), format!("the address has a query; {forms}")));
        }
        // 5001 is KoboldCPP's default port.
        if protocol == RemoteProtocol::Kobold && base.0.scheme() == "http" && !has_port(url) {
            base.0.set_port(Some(5001)).expect("an http URL has a port");
        }
        let model = model.filter(|m| !m.is_empty()).map(str::to_owned);
        Ok(Self { protocol, base, model })
    }
}

/// Whether a URL, or a host without a scheme, names a port.
#[must_use]
pub fn has_port(url: &str) -> bool {
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest).split('/').next().unwrap_or("");
    port_part(authority).is_some()
}

/// The text after the colon that follows a host.
fn port_part(authority: &str) -> Option<&str> {
    let (host, port) = authority.rsplit_once(':')?;
    // The colons within the brackets of an IPv6 address separate no port.
    (!host.starts_with('[') || host.ends_with(']')).then_some(port)
}

/// The address as errors may show it: the text before an `@` may be a password.
pub(crate) fn redact_password(address: &str) -> String {
    match (address.find("://"), address.rfind('@')) {
        (Some(scheme), Some(at)) if scheme < at => format!("{}…{}", &address[..scheme + 3], &address[at..]),
        _ => address.to_owned(),
    }
}

impl BaseUrl {
    pub fn parse(url: &str) -> Result<Self, String> {
        // The parser of international names that the dependencies are built with panics on some of them.
        if !url.is_ascii() {
            return Err(
                "the URL has characters that are not ASCII: write the host in punycode (xn--…)".into()
            );
        }
        let url = Url::parse(url).map_err(|e| format!("the URL is not valid ({e})"))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err("only http and https URLs are supported".into());
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("a user name or password in a URL is not accepted".into());
        }
        if url.port() == Some(0) {
            return Err("the port is not a number from 1 to 65535".into());
        }
        Ok(Self(url))
    }

    /// The URL of a path on this server; of the base itself where the path is empty.
    pub fn join(&self, path: &str) -> Url {
        let mut url = self.0.clone();
        if !path.is_empty() {
            url.set_path(&format!("{}{path}", self.0.path().trim_end_matches('/')));
        }
        url
    }

    pub fn is_https(&self) -> bool {
        self.0.scheme() == "https"
    }

    pub fn may_send_key(&self) -> bool {
        self.is_https() || self.is_loopback()
    }

    pub fn host(&self) -> &str {
        self.0.host_str().unwrap_or("")
    }

    pub fn port(&self) -> Option<u16> {
        self.0.port_or_known_default()
    }

    pub fn is_loopback(&self) -> bool {
        is_loopback(self.0.host_str().unwrap_or(""))
    }
}

impl fmt::Display for BaseUrl {
    /// Leaves out path and query, which may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.origin().ascii_serialization())
    }
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Whether an API key may be sent to a host: only over https or within this machine, where nobody else can read it.
#[must_use]
pub fn may_send_key(https: bool, host: &str) -> bool {
    https || is_loopback(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_to_string(address: &str) -> String {
        match RemoteAddress::parse(address) {
            Err(error) => format!("error {error}"),
            Ok(RemoteAddress { protocol, base, model }) => {
                let model = model.unwrap_or_default();
                let url = &base.0;
                let (host, port) = (url.host_str().unwrap(), url.port_or_known_default().unwrap());
                format!("{protocol:?} {} {host} {port} {} {model}", base.is_https(), base.join("/x").path())
            }
        }
    }

    #[test]
    fn address_parses_known_forms() {
        let cases = [
            ("kobold+http://127.0.0.1:5001", "Kobold false 127.0.0.1 5001 /x "),
            ("kobold+http://box", "Kobold false box 5001 /x "),
            ("kobold+https://box", "Kobold true box 443 /x "),
            ("kobold+http://[::1]:80/", "Kobold false [::1] 80 /x "),
            ("openai+http://h:8000/v1#a/b#c", "OpenAi false h 8000 /v1/x a/b#c"),
            ("openai+https://api.example.org/v1/#m", "OpenAi true api.example.org 443 /v1/x m"),
            ("openai+https://h/v1#", "OpenAi true h 443 /v1/x "),
        ];
        for (address, expected) in cases {
            assert_eq!(parse_to_string(address), expected, "{address}");
        }
        for invalid in [
            "",
            "http://h",
            "kobold+ftp://h",
            "kobold+http://",
            "kobold+http://h:0",
            "kobold+http://h:99999",
            "openai+https://h/v1?key=1#m",
            "openai+https://a b/v1#m",
        ] {
            assert!(
                parse_to_string(invalid).starts_with("error reading the address"),
                "{invalid}: {}",
                parse_to_string(invalid)
            );
        }
    }

    #[test]
    fn address_with_password_is_refused_and_not_echoed() {
        let error = parse_to_string("openai+https://me:hunter2@h/v1#m");
        assert!(error.contains("not accepted") && !error.contains("hunter2"), "{error}");
    }

    #[test]
    fn address_with_characters_outside_ascii_is_refused() {
        for url in ["http://bücher.example", "http://\u{36b7b}\u{3998f}.example", "http://a/\u{6521}"] {
            let why = BaseUrl::parse(url).expect_err(url);
            assert!(why.contains("not ASCII"), "{why}");
        }
    }
}
