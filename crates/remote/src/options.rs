//! Options of remote models.

use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteOptions {
    /// The context length in tokens. For an OpenAI-compatible server this overrides what the server reports; the default
    /// is 8192 where it reports nothing. For KoboldCPP it can only lower what the server reports.
    pub context: Option<usize>,
    /// The limit for establishing a connection.
    pub connect_timeout: Duration,
    /// The limit for a short request, such as for the model's name or for tokens.
    pub request_timeout: Duration,
    /// The longest pause within a response that has begun. Before it begins there is no limit, because the prefill of a
    /// long prompt takes long; the listener can cancel it.
    pub idle_timeout: Duration,
    /// Whether the API key of the environment is sent. Not to an address that a client has chosen: any program may listen there.
    pub send_key: bool,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            context: None,
            connect_timeout: seconds(5),
            request_timeout: seconds(5),
            idle_timeout: seconds(120),
            send_key: true,
        }
    }
}
