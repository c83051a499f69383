//! Files on a model hub, `hf:OWNER/REPO/FILE`: their address, and the checksum that the hub has of them.

use crate::address::BaseUrl;
use crate::http::{RemoteClient, RemoteRequest, ignore_steps};
use crate::options::RemoteOptions;
use crate::stream_listener::{StreamEnd, StreamListener};
use halo_core::Error;
use reqwest::header::HeaderName;
use reqwest::redirect::Policy;
use std::time::Duration;

/// The hub that `hf:` means.
pub const HUB_ENDPOINT: &str = "https://huggingface.co";

const PREFIX: &str = "hf:";

/// The headers in which the hub names the SHA-256 and the size of a large file.
const LINKED_ETAG: HeaderName = HeaderName::from_static("x-linked-etag");
const LINKED_SIZE: HeaderName = HeaderName::from_static("x-linked-size");

/// A file of a repository on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubAddress {
    repository: String,
    /// The path in the repository.
    file: String,
}

/// What the hub says of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubFile {
    /// Where it is downloaded from.
    pub url: String,
    /// Its SHA-256 in hexadecimal; none if the hub does not name it.
    pub sha256: Option<String>,
    pub bytes: Option<u64>,
}

impl HubAddress {
    /// Whether a text is meant as an address of the hub.
    #[must_use]
    pub fn is_hub_address(text: &str) -> bool {
        text.starts_with(PREFIX)
    }

    /// # Errors
    /// When the address is not of the form `hf:OWNER/REPO/FILE`.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let parts: Vec<&str> = text.strip_prefix(PREFIX).unwrap_or(text).split('/').collect();
        let is_name = |part: &&str| {
            !part.is_empty()
                && !part.starts_with('.')
                && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+'))
        };
        match parts.as_slice() {
            [owner, repository, file @ ..] if !file.is_empty() && parts.iter().all(is_name) => {
                Ok(Self { repository: format!("{owner}/{repository}"), file: file.join("/") })
            }
            _ => Err(Error::invalid_input(
                "reading the address",
                format!(
                    "'{text}' is not of the form hf:OWNER/REPO/FILE, such as hf:ggml-org/gemma-3-4b-it-GGUF/gemma-3-4b-it-Q4_K_M.gguf"
                ),
            )),
        }
    }

    /// The name of the file, without its folders.
    #[must_use]
    pub fn file_name(&self) -> &str {
        self.file.rsplit('/').next().unwrap_or(&self.file)
    }

    /// Asks the hub for the checksum and the size of the file. The hub names them in the response that redirects to the
    /// file, so the redirect is not followed.
    ///
    /// # Errors
    /// When the hub does not answer, or does not have the file.
    pub fn find(&self, endpoint: &str) -> Result<HubFile, Error> {
        let operation = format!("asking the hub for {}/{}", self.repository, self.file);
        let url =
            format!("{}/{}/resolve/main/{}", endpoint.trim_end_matches('/'), self.repository, self.file);
        let base = BaseUrl::parse(&url).map_err(|why| Error::invalid_input(&operation, why))?;
        let options = RemoteOptions { request_timeout: Duration::from_secs(30), ..RemoteOptions::default() };
        let client = RemoteClient::for_downloads(&base, &options, Policy::none())?;
        let mut listen = ignore_steps;
        let mut listener = StreamListener::without_listener(&mut listen);
        let request = RemoteRequest::get(&operation, &base, "").with_timeout(options.request_timeout);
        let response = client.send(&request, &mut listener).map_err(StreamEnd::into_error)?;
        match response.status().as_u16() {
            200 | 301 | 302 | 303 | 307 | 308 => {
                let tag = response.header(&LINKED_ETAG).trim_start_matches("W/").trim_matches('"');
                let is_sha256 = tag.len() == 64 && tag.bytes().all(|byte| byte.is_ascii_hexdigit());
                Ok(HubFile {
                    url,
                    sha256: is_sha256.then(|| tag.to_ascii_lowercase()),
                    bytes: response.header(&LINKED_SIZE).parse().ok(),
                })
            }
            404 => Err(Error::not_found(
                operation,
                "the hub has no such file: check the owner, the repository and the file",
            )),
            401 | 403 => {
                let why = "the hub wants a login for it: accept its licence there, download it in a browser, and run \
                           `halo models pull FILE`";
                Err(Error::invalid_input(operation, why))
            }
            _ => Err(client.status_error(&request, response, &mut listener).into_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    #[test]
    fn hub_addresses_are_checked() {
        let address =
            HubAddress::parse("hf:ggml-org/gemma-3-4b-it-GGUF/gemma-3-4b-it-Q4_K_M.gguf").expect("right");
        assert_eq!(
            (address.repository.as_str(), address.file_name()),
            ("ggml-org/gemma-3-4b-it-GGUF", "gemma-3-4b-it-Q4_K_M.gguf")
        );
        let nested = HubAddress::parse("hf:a/b/Q4/model.gguf").expect("right");
        assert_eq!((nested.file.as_str(), nested.file_name()), ("Q4/model.gguf", "model.gguf"));
        for wrong in [
            "hf:",
            "hf:a",
            "hf:a/b",
            "hf:a/b/",
            "hf:a//c",
            "hf:a/b/../c",
            "hf:a/b/c?x=1",
            "hf:a/b/c#d",
            "hf:a/b/c d",
        ] {
            assert!(HubAddress::parse(wrong).is_err(), "{wrong}");
        }
    }

    /// A hub that gives one response to one request, and the line of the request.
    fn hub(response: String) -> (String, std::thread::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let served = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a request");
            let mut request = [0; 4096];
            let n = stream.read(&mut request).expect("a request");
            stream.write_all(response.as_bytes()).expect("a response");
            String::from_utf8_lossy(&request[..n]).lines().next().unwrap_or_default().to_owned()
        });
        (endpoint, served)
    }

    #[test]
    fn hub_names_checksum_and_size() {
        let sha256 = "ab".repeat(32);
        let address = HubAddress::parse("hf:owner/repo/model.gguf").expect("right");
        let moved = format!(
            "HTTP/1.1 302 Found\r\nx-linked-etag: \"{sha256}\"\r\nx-linked-size: 1234\r\nlocation: http://127.0.0.1:9/x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
        let (endpoint, served) = hub(moved);
        let file = address.find(&endpoint).expect("the hub has it");
        assert_eq!((file.sha256, file.bytes), (Some(sha256), Some(1234)));
        assert_eq!(file.url, format!("{endpoint}/owner/repo/resolve/main/model.gguf"));
        assert_eq!(served.join().expect("served"), "GET /owner/repo/resolve/main/model.gguf HTTP/1.1");
        for (status, kind) in [
            ("404 Not Found", halo_core::ErrorKind::NotFound),
            ("401 Unauthorized", halo_core::ErrorKind::InvalidInput),
            ("500 Internal Server Error", halo_core::ErrorKind::Unavailable),
        ] {
            let (endpoint, _) =
                hub(format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"));
            assert_eq!(address.find(&endpoint).expect_err(status).kind, kind, "{status}");
        }
    }
}
