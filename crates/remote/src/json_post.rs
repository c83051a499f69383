//! JSON for a server whose response has no content, such as a trace collector.

use crate::address::{BaseUrl, redact_password};
use crate::http::{RemoteClient, RemoteRequest, ignore_steps};
use crate::options::RemoteOptions;
use crate::stream_listener::{StreamEnd, StreamListener};
use halo_core::Error;
use serde_json::Value;

/// Sends JSON to one path of a server.
#[derive(Debug)]
pub struct JsonPoster {
    client: RemoteClient,
    base: BaseUrl,
    path: &'static str,
    options: RemoteOptions,
}

impl JsonPoster {
    /// `server` is a URL such as `http://127.0.0.1:4318`.
    pub fn new(server: &str, path: &'static str) -> Result<Self, Error> {
        let base = BaseUrl::parse(server).map_err(|why| {
            Error::invalid_input(format!("reading the address '{}'", redact_password(server)), why)
        })?;
        let options = RemoteOptions::default();
        Ok(Self { client: RemoteClient::new(&base, &options)?, base, path, options })
    }

    /// Sends a value; of the response only the status counts.
    pub fn post(&self, operation: &str, body: &Value) -> Result<(), Error> {
        let request = RemoteRequest::post(operation, &self.base, self.path, body)
            .with_timeout(self.options.request_timeout);
        let mut listen = ignore_steps;
        let mut listener = StreamListener::without_listener(&mut listen);
        let response = self.client.send(&request, &mut listener).map_err(StreamEnd::into_error)?;
        if !response.status().is_success() {
            return Err(self.client.status_error(&request, response, &mut listener).into_error());
        }
        Ok(())
    }
}
