//! One log line for each mistake of a client, so that the person who runs the server can find out why a front end shows an error.
//! A line has no text of a request: no path, no name, no message.

use crate::error::ErrorLabel;
use axum::extract::MatchedPath;
use axum::http::Method;
use axum::response::Response;
use std::net::IpAddr;

/// What is known of a request before it is handled.
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

    /// `is_page` says that the path belongs to the page: a browser asks for files that are not there, and only what is sent to such a
    /// path is a mistake, mostly a wrong base URL.
    pub fn log_client_error(&self, response: &Response, is_page: bool) {
        let is_reading = self.method == Method::GET || self.method == Method::HEAD;
        if !response.status().is_client_error() || (is_page && is_reading) {
            return;
        }
        let (method, status) = (&self.method, response.status().as_u16());
        let route = self.route.as_ref().map_or("an unknown route", MatchedPath::as_str);
        let label = response.extensions().get::<ErrorLabel>();
        let kind = label.map_or_else(|| "-".to_owned(), |label| format!("{:?}", label.kind));
        let param = label.and_then(|label| label.param.as_deref()).unwrap_or("-");
        let client = self.client.map_or_else(|| "-".to_owned(), |client| client.to_string());
        tracing::warn!(
            "request refused: {method} {route}: {status} {kind}, parameter {param}, client {client}"
        );
    }
}
