//! Models behind HTTP, with the same trait as the local one: KoboldCPP (with attention, where the server is the fork that
//! streams it) and OpenAI-compatible servers. Also downloads of model files.
//!
//! All calls block. Each model has a small tokio runtime for its sockets. The listener is never called inside of that
//! runtime, so it may use one of its own, such as a database client's; but a model must not be called from within an
//! asynchronous task. Proxies are taken from `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`; servers on this
//! machine are always reached directly.

mod address;
mod align;
mod approx_tokenizer;
mod attention;
mod download;
mod error_text;
mod http;
mod hub;
mod json_post;
mod kobold;
mod kobold_tokenizer;
mod openai;
mod options;
mod probe;
mod sampling;
mod schema;
mod sse;
mod stream_listener;
mod tool_messages;

pub use address::{has_port, may_send_key};
pub use approx_tokenizer::approximate_tokens;
pub use download::{DownloadedFile, download_file};
pub use hub::{HUB_ENDPOINT, HubAddress, HubFile};
pub use json_post::JsonPoster;
pub use openai::{OpenAiKey, openai_key_from_env};
pub use options::RemoteOptions;
pub use probe::{ServerProbe, is_listed_address, probe_server};
pub use sse::{SseParser, SseTooLong};

use address::{RemoteAddress, RemoteProtocol};
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    FinishReason, Model, ModelInfo, ModelStep, ModelToken, OutputConstraint, Prompt, Sampling,
    SamplingParameter, StepFlow,
};
use kobold::KoboldModel;
use openai::OpenAiModel;

/// A model on an HTTP server.
#[derive(Debug)]
pub struct RemoteModel(RemoteBackend);

#[derive(Debug)]
enum RemoteBackend {
    Kobold(Box<KoboldModel>),
    OpenAi(Box<OpenAiModel>),
}

impl RemoteModel {
    /// Whether this is the address of a remote model: `kobold+http://HOST:PORT` or `openai+https://HOST/v1#MODEL`.
    #[must_use]
    pub fn is_address(address: &str) -> bool {
        address::parse_protocol(address).is_some()
    }

    /// Connects to a server and asks for the model's name, context length and capabilities.
    pub fn connect(address: &str, options: &RemoteOptions) -> Result<Self, Error> {
        let address = RemoteAddress::parse(address)?;
        Ok(Self(match address.protocol {
            RemoteProtocol::Kobold => {
                RemoteBackend::Kobold(Box::new(KoboldModel::connect(address.base, options)?))
            }
            RemoteProtocol::OpenAi => RemoteBackend::OpenAi(Box::new(OpenAiModel::connect(
                address,
                openai_key_from_env().filter(|_| options.send_key),
                options,
            )?)),
        }))
    }
}

impl Model for RemoteModel {
    fn info(&self) -> &ModelInfo {
        match &self.0 {
            RemoteBackend::Kobold(kobold) => kobold.info(),
            RemoteBackend::OpenAi(openai) => openai.info(),
        }
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error> {
        match &mut self.0 {
            RemoteBackend::Kobold(kobold) => kobold.tokenize(text, special),
            RemoteBackend::OpenAi(_) => Ok(approximate_tokens(text)),
        }
    }

    fn check_constraint(&mut self, constraint: &OutputConstraint) -> Result<(), Error> {
        match (&self.0, constraint) {
            // KoboldCPP checks the grammar itself.
            (RemoteBackend::Kobold(_), OutputConstraint::GbnfGrammar(_)) => Ok(()),
            (_, constraint) => schema::parse_schema(constraint).map(drop),
        }
    }

    fn supports(&self, parameter: SamplingParameter) -> bool {
        match &self.0 {
            RemoteBackend::Kobold(_) => sampling::kobold_supports(parameter),
            RemoteBackend::OpenAi(_) => sampling::openai_supports(parameter),
        }
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        match &mut self.0 {
            RemoteBackend::Kobold(kobold) => kobold.generate(prompt, sampling, watch, listen),
            RemoteBackend::OpenAi(openai) => openai.generate(prompt, sampling, listen),
        }
    }
}
