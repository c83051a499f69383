//! Models behind HTTP, through the same seam as the one in this process: KoboldCPP (with attention, where the server is
//! the fork that streams it) and whatever speaks as OpenAI does. And downloads, for model files.
//!
//! Everything blocks; sockets are asynchronous inside, on a small runtime of each model's own, which runs only within
//! a call and never while a listener does. So a listener may do what it likes, a database with a runtime of its own
//! included; but a model must not be called from within an asynchronous task.

mod address;
mod align;
mod attention;
mod fetch;
mod http;
mod kobold;
mod openai;
mod pieces;
mod post;
mod sse;
mod stream;
mod tokens;
mod wire;

pub use address::may_carry_key;
pub use fetch::{Fetched, fetch};
pub use openai::{Key, key_from_environment};
pub use pieces::cut;
pub use post::Poster;
pub use sse::{Sse, TooLong};

use address::{Address, Protocol};
use halo_core::attention::Watch;
use halo_core::seams::{Finish, Flow, Form, Model, ModelInfo, ModelStep, Piece, Prompt, Sampling, SeamError};
use kobold::Kobold;
use openai::OpenAi;
use std::time::Duration;

/// What may be chosen about a model behind HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How many tokens it can see. A server that speaks as OpenAI does may not tell, and is then taken to see 8192;
    /// what is said here goes before what it tells. KoboldCPP knows, so here it can only be made less.
    pub context: Option<usize>,
    /// How long a connection may take to stand.
    pub connect: Duration,
    /// How long a small question (about the model, or for tokens) may take.
    pub quick: Duration,
    /// How long nothing may arrive within an answer that has begun. Until it begins there is no limit: a long prompt
    /// takes as long as it takes, and the listener is asked meanwhile.
    pub idle: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { context: None, connect: seconds(5), quick: seconds(5), idle: seconds(120) }
    }
}

/// A model behind HTTP.
#[derive(Debug)]
pub struct Remote(Speaker);

#[derive(Debug)]
enum Speaker {
    Kobold(Box<Kobold>),
    OpenAi(Box<OpenAi>),
}

impl Remote {
    /// Whether that is the address of such a model: `kobold+http://HOST:PORT` or `openai+https://HOST/v1#MODEL`.
    #[must_use]
    pub fn is_address(address: &str) -> bool {
        address::protocol(address).is_some()
    }

    /// Asks the server what it is, and is then ready to speak.
    ///
    /// # Errors
    /// When the address cannot be read, the server cannot be reached, or it is not what the address says.
    pub fn connect(address: &str, options: &Options) -> Result<Self, SeamError> {
        let address = Address::parse(address)?;
        Ok(Self(match address.protocol {
            Protocol::Kobold => Speaker::Kobold(Box::new(Kobold::connect(address.base, options)?)),
            Protocol::OpenAi => {
                Speaker::OpenAi(Box::new(OpenAi::connect(address, key_from_environment(), options)?))
            }
        }))
    }
}

impl Model for Remote {
    fn info(&self) -> &ModelInfo {
        match &self.0 {
            Speaker::Kobold(kobold) => kobold.info(),
            Speaker::OpenAi(openai) => openai.info(),
        }
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<Piece>, SeamError> {
        match &mut self.0 {
            Speaker::Kobold(kobold) => kobold.tokenize(text, special),
            Speaker::OpenAi(_) => Ok(cut(text)),
        }
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &Watch,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError> {
        match &mut self.0 {
            Speaker::Kobold(kobold) => kobold.generate(prompt, sampling, watch, listen),
            Speaker::OpenAi(openai) => openai.generate(prompt, sampling, listen),
        }
    }
}

/// The schema that an answer is to keep to.
///
/// # Errors
/// When it is another form, which no server far away knows.
pub(crate) fn schema(form: &Form) -> Result<&str, SeamError> {
    match form {
        Form::Schema(schema) => Ok(schema),
        Form::Grammar(_) => Err(SeamError::asked(
            "generating",
            "a model far away keeps to JSON schemas, and to no other grammar",
        )),
    }
}
