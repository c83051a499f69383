//! Where a model is: which protocol, which server, which model of it.

use halo_core::seams::SeamError;
use hyper::Uri;
use std::fmt;
use std::net::IpAddr;

/// How a server is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Kobold,
    OpenAi,
}

/// An address, read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub protocol: Protocol,
    pub base: Base,
    /// Which of the server's models; none: its only one.
    pub model: Option<String>,
}

/// A server, and what all paths on it begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Base {
    pub https: bool,
    /// Without the brackets of an IPv6 address.
    pub host: String,
    pub port: u16,
    /// Without a slash at its end, and with its query, where there is one.
    pub path: String,
}

/// The protocol that an address begins with.
pub(crate) fn protocol(address: &str) -> Option<Protocol> {
    let known = [("kobold+", Protocol::Kobold), ("openai+", Protocol::OpenAi)];
    let (name, protocol) = known.into_iter().find(|(name, _)| address.starts_with(name))?;
    let rest = &address[name.len()..];
    (rest.starts_with("http://") || rest.starts_with("https://")).then_some(protocol)
}

impl Address {
    pub fn parse(address: &str) -> Result<Self, SeamError> {
        let what = || format!("reading the address '{}'", without_password(address));
        let forms = "write kobold+http://HOST:PORT or openai+https://HOST/v1#MODEL";
        let protocol = protocol(address).ok_or_else(|| SeamError::new(what(), forms))?;
        let url = address.split_once('+').map_or("", |(_, url)| url);
        let (url, model) = url.split_once('#').map_or((url, None), |(url, model)| (url, Some(model)));
        let mut base = Base::parse(url).map_err(|why| SeamError::new(what(), format!("{why}; {forms}")))?;
        if base.path.contains('?') {
            return Err(SeamError::new(what(), format!("it has a query; {forms}")));
        }
        base.path.truncate(base.path.trim_end_matches('/').len());
        // KoboldCPP listens at 5001 unless it is told otherwise.
        if protocol == Protocol::Kobold && !base.https && !names_port(url) {
            base.port = 5001;
        }
        let model = model.filter(|m| !m.is_empty()).map(str::to_owned);
        Ok(Self { protocol, base, model })
    }
}

fn names_port(url: &str) -> bool {
    let authority = url.split_once("://").map_or("", |(_, rest)| rest).split('/').next().unwrap_or("");
    behind_host(authority).is_some()
}

/// What stands behind the colon that follows a host.
fn behind_host(authority: &str) -> Option<&str> {
    let (host, port) = authority.rsplit_once(':')?;
    // An IPv6 address has colons of its own, within brackets.
    (!host.starts_with('[') || host.ends_with(']')).then_some(port)
}

/// What may be shown of an address: whatever stands before an `@` may be a password.
pub(crate) fn without_password(address: &str) -> String {
    match (address.find("://"), address.rfind('@')) {
        (Some(scheme), Some(at)) if scheme < at => format!("{}…{}", &address[..scheme + 3], &address[at..]),
        _ => address.to_owned(),
    }
}

impl Base {
    /// Reads `http://host:port/path`, or https.
    pub fn parse(url: &str) -> Result<Self, String> {
        let uri: Uri = url.parse().map_err(|e| format!("it is no address of the web ({e})"))?;
        let https = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err("only http and https are spoken here".into()),
        };
        let authority = uri.authority().map_or("", |a| a.as_str());
        if authority.contains('@') {
            return Err("a name or password in an address is not accepted".into());
        }
        let host = uri.host().unwrap_or("").trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err("it names no host".into());
        }
        let port = match behind_host(authority).map(str::parse) {
            None => [80, 443][usize::from(https)],
            Some(Ok(port)) if port > 0 => port,
            Some(_) => return Err("its port is no number from 1 to 65535".into()),
        };
        let path = uri.path_and_query().map_or("/", |p| p.as_str()).to_owned();
        Ok(Self { https, host: host.to_owned(), port, path })
    }

    /// The same server with another path, or whatever server a redirection names.
    pub fn join(&self, location: &str) -> Result<Self, String> {
        if location.contains("://") {
            return Self::parse(location.split('#').next().unwrap_or(location));
        }
        let location = location.split('#').next().unwrap_or(location);
        if let Some(rest) = location.strip_prefix("//") {
            return Self::parse(&format!("{}://{rest}", self.scheme()));
        }
        let path = if location.starts_with('/') {
            location.to_owned()
        } else {
            let here = self.path.split('?').next().unwrap_or("/");
            let folder = here.rfind('/').map_or("/", |slash| &here[..=slash]);
            format!("{folder}{location}")
        };
        Self::parse(&format!("{}://{}{path}", self.scheme(), self.authority()))
    }

    pub fn scheme(&self) -> &'static str {
        if self.https { "https" } else { "http" }
    }

    /// As the header `Host` wants it.
    pub fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        let usual = [80, 443][usize::from(self.https)];
        if self.port == usual { host } else { format!("{host}:{}", self.port) }
    }

    /// Whether a key may be sent there.
    pub fn may_carry_key(&self) -> bool {
        may_carry_key(self.https, &self.host)
    }
}

impl fmt::Display for Base {
    /// Without path and query, which may hold what others should not read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme(), self.authority())
    }
}

/// Whether a key may be sent to a host: where nobody can read it on the way, so over https, or within this machine.
#[must_use]
pub fn may_carry_key(https: bool, host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    https || host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(address: &str) -> String {
        match Address::parse(address) {
            Err(error) => format!("error {error}"),
            Ok(Address { protocol, base, model }) => {
                let model = model.unwrap_or_default();
                format!("{protocol:?} {} {} {} {} {model}", base.https, base.host, base.port, base.path)
            }
        }
    }

    #[test]
    fn addresses_are_read() {
        let cases = [
            ("kobold+http://127.0.0.1:5001", "Kobold false 127.0.0.1 5001  "),
            ("kobold+http://box", "Kobold false box 5001  "),
            ("kobold+https://box", "Kobold true box 443  "),
            ("kobold+http://[::1]:80/", "Kobold false ::1 80  "),
            ("openai+http://h:8000/v1#a/b#c", "OpenAi false h 8000 /v1 a/b#c"),
            ("openai+https://api.example.org/v1/#m", "OpenAi true api.example.org 443 /v1 m"),
            ("openai+https://h/v1#", "OpenAi true h 443 /v1 "),
        ];
        for (address, expected) in cases {
            assert_eq!(read(address), expected, "{address}");
        }
        for wrong in [
            "",
            "http://h",
            "kobold+ftp://h",
            "kobold+http://",
            "kobold+http://h:0",
            "kobold+http://h:99999",
            "openai+https://h/v1?key=1#m",
            "openai+https://a b/v1#m",
        ] {
            assert!(read(wrong).starts_with("error reading the address"), "{wrong}: {}", read(wrong));
        }
    }

    #[test]
    fn a_password_in_an_address_is_refused_and_not_repeated() {
        let error = read("openai+https://me:hunter2@h/v1#m");
        assert!(error.contains("not accepted") && !error.contains("hunter2"), "{error}");
    }

    #[test]
    fn redirections_are_joined() {
        let base = Base::parse("https://h:8443/a/b?c=1").unwrap();
        let joined = |to: &str| base.join(to).map(|b| format!("{b}{}", b.path));
        assert_eq!(joined("/x?y").unwrap(), "https://h:8443/x?y");
        assert_eq!(joined("x").unwrap(), "https://h:8443/a/x");
        assert_eq!(joined("//other/x").unwrap(), "https://other/x");
        assert_eq!(joined("http://other:81/x#part").unwrap(), "http://other:81/x");
        assert!(joined("file:///etc/passwd").is_err());
    }
}
