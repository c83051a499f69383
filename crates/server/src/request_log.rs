//! One log line for each mistake of a client, so that the person who runs the server can find out why a front end shows an error.
//! A line has no text of a request: no path, no name, no message.

use crate::error::ErrorLabel;
use axum::extract::MatchedPath;
use axum::http::Method;
use axum::response::Response;
use halo_core::ErrorKind;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

/// What is known of a request before it is handled. It is an extension of the request.
#[derive(Clone, Debug)]
pub(crate) struct RequestLabel {
    method: Method,
    /// The pattern of the route: the path itself may have the name of a conversation.
    route: Option<MatchedPath>,
    client: Option<IpAddr>,
}

impl RequestLabel {
    pub fn new(method: &Method, route: Option<&MatchedPath>, client: Option<IpAddr>) -> Self {
        Self { method: method.clone(), route: route.cloned(), client }
    }

    /// Logs a response that is an error, and labels one that is a stream. `is_page` says that the path belongs to the page: a browser asks for files that are not there, and only what is sent to such a
    /// path is a mistake, mostly a wrong base URL.
    pub fn log_response(self, response: &Response, is_page: bool) {
        if let Some(stream) = response.extensions().get::<StreamLabel>() {
            let _ = stream.0.set(self);
            return;
        }
        let is_reading = self.method == Method::GET || self.method == Method::HEAD;
        if !response.status().is_client_error() || (is_page && is_reading) {
            return;
        }
        let status = response.status().as_u16();
        let label = response.extensions().get::<ErrorLabel>();
        let kind = label.map_or_else(|| "-".to_owned(), |label| format!("{:?}", label.kind));
        let param = label.and_then(|label| label.param.as_deref()).unwrap_or("-");
        let (endpoint, client) = (self.endpoint(), client_name(Some(&self)));
        tracing::warn!("request refused: {endpoint}: {status} {kind}, parameter {param}, client {client}");
    }

    fn endpoint(&self) -> String {
        let route = self.route.as_ref().map_or("an unknown route", MatchedPath::as_str);
        format!("{} {route}", self.method)
    }
}

/// The address of the client; `-` where it is not known.
fn client_name(label: Option<&RequestLabel>) -> String {
    let client = label.and_then(|label| label.client);
    client.map_or_else(|| "-".to_owned(), |client| client.to_string())
}

/// Logs a request of MCP that was refused: the HTTP status of these is 200. `what` has no words of the client.
pub(crate) fn log_mcp_mistake(what: &str, kind: ErrorKind, label: Option<&RequestLabel>) {
    tracing::warn!("MCP request refused: {what}: {kind:?}, client {}", client_name(label));
}

/// The request that a stream answers: an extension of its response, which is labelled when it leaves the routes.
#[derive(Clone, Debug, Default)]
pub(crate) struct StreamLabel(Arc<OnceLock<RequestLabel>>);

impl StreamLabel {
    /// Logs a failure after the headers, when the status cannot tell it any more.
    pub fn log_failure(&self, kind: ErrorKind) {
        let label = self.0.get();
        let endpoint = label.map_or_else(|| "-".to_owned(), RequestLabel::endpoint);
        let client = client_name(label);
        tracing::warn!("a stream failed after its headers: {endpoint}: {kind:?}, client {client}");
    }
}
