//! Asks a server what it is: which program, and which models it has.

use crate::address::{BaseUrl, RemoteAddress, RemoteProtocol, has_port, redact_password};
use crate::error_text::sanitize;
use crate::http::{RemoteClient, RemoteRequest};
use crate::options::RemoteOptions;
use crate::stream_listener::{StreamEnd, StreamListener};
use halo_core::Error;
use halo_core::model::{ModelStep, StepFlow};
use serde_json::Value;
use std::net::IpAddr;
use std::time::Duration;

/// What a model server said of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerProbe {
    /// The program: KoboldCPP, Ollama, LM Studio, llama-server, vLLM or OpenAI-compatible.
    pub kind: &'static str,
    /// The names of its models, each with the address that selects it.
    pub models: Vec<(String, String)>,
}

/// The longest list of models that is returned.
const MAX_MODELS: usize = 200;

/// The server of an address, without the protocol of Halo, the model and the path of the OpenAI API.
fn server_url(address: &str) -> Result<BaseUrl, Error> {
    let operation = || format!("reading the address '{}'", redact_password(address));
    // The port that the model is connected to, which is another one than that of the URL for KoboldCPP.
    if let Ok(remote) = RemoteAddress::parse(address)
        && remote.protocol == RemoteProtocol::Kobold
    {
        return Ok(remote.base);
    }
    let url = address.strip_prefix("kobold+").or(address.strip_prefix("openai+")).unwrap_or(address);
    let url = url.split('#').next().unwrap_or(url);
    let url = if url.ends_with("://") { url } else { url.trim_end_matches('/') };
    let url = url.strip_suffix("/v1").unwrap_or(url);
    let url = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    BaseUrl::parse(&url).map_err(|why| {
        Error::invalid_input(operation(), format!("{why}; write one such as http://127.0.0.1:11434"))
    })
}

/// Whether an address leads to one of these servers. A server is a host, for all of its ports, or a host with a port;
/// `localhost` is every loopback address. Names are compared and not resolved: a name that is not listed can lead anywhere,
/// and elsewhere a moment later.
pub fn is_listed_address(address: &str, servers: &[String]) -> Result<bool, Error> {
    let base = server_url(address)?;
    Ok(servers.iter().any(|server| is_address_of(&base, server)))
}

fn is_address_of(base: &BaseUrl, server: &str) -> bool {
    let Ok(listed) = server_url(server) else { return false };
    if has_port(server) && listed.port() != base.port() {
        return false;
    }
    match (host_address(base), host_address(&listed)) {
        (Some(ip), _) if is_localhost(&listed) => ip.is_loopback(),
        (Some(ip), Some(other)) => ip == other,
        (None, None) => base.host().eq_ignore_ascii_case(listed.host()),
        (None, Some(_)) | (Some(_), None) => is_localhost(base) && is_localhost(&listed),
    }
}

fn is_localhost(base: &BaseUrl) -> bool {
    base.host().eq_ignore_ascii_case("localhost")
}

/// The IP address that is the host; the IPv4 address of one that is mapped to IPv6.
fn host_address(base: &BaseUrl) -> Option<IpAddr> {
    let host = base.host().trim_start_matches('[').trim_end_matches(']');
    host.parse::<IpAddr>().ok().map(|ip| ip.to_canonical())
}

/// Asks the server of an address for its program and its models. No key is sent.
pub fn probe_server(address: &str) -> Result<ServerProbe, Error> {
    let base = server_url(address)?;
    let seconds = Duration::from_secs;
    let options = RemoteOptions {
        connect_timeout: seconds(2),
        request_timeout: seconds(3),
        ..RemoteOptions::default()
    };
    let client = RemoteClient::new(&base, &options)?;
    let ask = |path: &str| -> Result<Option<Value>, Error> {
        let mut listen = |_: ModelStep<'_>| StepFlow::Continue;
        let request = RemoteRequest::get("asking the server for its models", &base, path)
            .with_timeout(options.request_timeout);
        let response = client.fetch_json(&request, &mut StreamListener::without_listener(&mut listen));
        response.map_err(StreamEnd::into_error)
    };
    // The first request says whether anything answers there. Later ones fail where a server answers an unknown path with an
    // error or a page, which is the same as not having it.
    let version = match ask("/api/extra/version") {
        Ok(version) => version,
        Err(error) => match ask("/v1/models") {
            Ok(_) => None,
            Err(_) => return Err(error),
        },
    };
    let url = base.to_string();
    let ask_more = |path: &str| ask(path).ok().flatten().unwrap_or_default();
    if version.is_some_and(|version| version["result"].is_string()) {
        let model = ask_more("/api/v1/model");
        let name = model["result"].as_str().map_or_else(|| "the model of KoboldCPP".to_owned(), sanitize);
        return Ok(ServerProbe { kind: "KoboldCPP", models: vec![(name, format!("kobold+{url}"))] });
    }
    let listed = ask_more("/v1/models");
    let entries = || listed["data"].as_array().into_iter().flatten();
    let is_ollama = ask_more("/api/version")["version"].is_string();
    let kind = if is_ollama {
        "Ollama"
    } else if entries().any(|model| model["owned_by"] == "vllm") {
        "vLLM"
    } else if entries().any(|model| model["owned_by"] == "llamacpp") {
        "llama-server"
    } else if ask_more("/api/v0/models")["data"].is_array() {
        "LM Studio"
    } else if listed["data"].is_array() {
        "OpenAI-compatible"
    } else {
        let why = "a server answers there, but it lists no models; check the address and its path";
        return Err(Error::unavailable(format!("asking {base} for its models"), why));
    };
    let names = entries().filter_map(|model| model["id"].as_str()).take(MAX_MODELS);
    let names = names.map(sanitize);
    let models = names.map(|name| (name.clone(), format!("openai+{url}/v1#{name}"))).collect();
    Ok(ServerProbe { kind, models })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_listed(address: &str, servers: &[&str]) -> bool {
        let servers: Vec<String> = servers.iter().map(|server| (*server).to_owned()).collect();
        is_listed_address(address, &servers).expect(address)
    }

    #[test]
    fn loopback_addresses_are_told_from_others() {
        for (address, expected) in [
            ("http://127.0.0.1:11434", true),
            ("127.0.0.1:5001", true),
            ("localhost:1234", true),
            ("LOCALHOST", true),
            ("http://[::1]:11434", true),
            ("http://[::ffff:127.0.0.1]:80", true),
            ("http://2130706433", true),
            ("openai+http://127.1.2.3/v1#model", true),
            ("http://192.168.1.7:8080/v1", false),
            ("kobold+http://10.0.0.2:5001", false),
            ("openai+http://172.16.4.4/v1#model", false),
            ("http://[fd00::1]:11434", false),
            ("http://[::ffff:192.168.0.1]:80", false),
            ("http://169.254.169.254", false),
            ("http://8.8.8.8", false),
            ("https://example.org", false),
            ("http://localhost.example.org", false),
            ("http://127.0.0.1.nip.io", false),
            ("http://0.0.0.0:80", false),
        ] {
            assert_eq!(is_listed(address, &["localhost"]), expected, "{address}");
            assert!(!is_listed(address, &[]), "{address}");
        }
        for wrong in ["", "http://", "ftp://127.0.0.1", "http://user:secret@127.0.0.1", "http://127.0.0.1:0"]
        {
            let error = is_listed_address(wrong, &["localhost".into()]).expect_err(wrong).to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn listed_servers_are_compared_by_host_and_port() {
        let servers = ["192.168.1.7:5001", "10.0.0.2", "models.lan:8000", "[fd00::1]:80", "", "http://"];
        for (address, expected) in [
            ("http://192.168.1.7:5001", true),
            ("kobold+http://192.168.1.7:5001", true),
            ("http://[::ffff:192.168.1.7]:5001", true),
            ("http://192.168.1.7", false),
            ("http://192.168.1.7:5002", false),
            ("http://10.0.0.2", true),
            ("10.0.0.2:65535", true),
            ("http://10.0.0.20", false),
            ("http://models.lan:8000/v1", true),
            ("http://MODELS.lan:8000/v1", true),
            ("http://models.lan", false),
            ("http://models.lan.example.org:8000", false),
            ("http://[fd00:0::1]", true),
            ("http://[fd00::1]:81", false),
            ("http://127.0.0.1:5001", false),
            ("http://localhost", false),
        ] {
            assert_eq!(is_listed(address, &servers), expected, "{address}");
        }
    }
}
