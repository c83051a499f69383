//! llama.cpp behind types that cannot be misused: all `unsafe` of this program is in this folder.
//!
//! A [`Weights`] is a loaded model, a [`Context`] its memory and its calculator, a [`Sampler`] what chooses the next
//! token. Sequences, positions and cells are llama.cpp's own words: a *cell* holds the key and value of one token, a
//! *position* is the number that its rotation is made of, and a *sequence* is a set of cells that see each other. What
//! the rest of the program makes of them is the business of this crate's other files.

mod context;
mod node;
mod sampler;
mod weights;

pub use context::{Context, Halt, Item, Shape};
pub(crate) use node::Node;
pub use sampler::Sampler;
pub use weights::Weights;

use crate::gguf::BadGguf;
use llama_cpp_sys_2 as sys;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Once;

/// A token's number in llama.cpp.
pub type Token = i32;

/// A position in llama.cpp.
pub type Pos = i32;

/// One of the sequences of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seq(pub i32);

/// Why a model cannot be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum LlamaError {
    /// The file is no model.
    #[error("{path}: {why}")]
    File {
        /// Which.
        path: String,
        /// What is wrong with it.
        why: BadGguf,
    },
    /// llama.cpp does not take it.
    #[error("{path} cannot be loaded: {why}")]
    Load {
        /// Which.
        path: String,
        /// What llama.cpp says.
        why: String,
    },
    /// The context asked for is larger than the model's.
    #[error("a context of {asked} tokens is more than the model was trained for ({most}): ask for less")]
    TooLong {
        /// Tokens asked for.
        asked: u32,
        /// Tokens that it can do.
        most: u32,
    },
    /// The context asked for is of no use.
    #[error("a context of {asked} tokens is too small: ask for {least} or more")]
    TooShort {
        /// Tokens asked for.
        asked: u32,
        /// Tokens that it must have.
        least: u32,
    },
    /// There is not enough memory, or the context cannot be made.
    #[error("a context of {0} tokens cannot be made: there may not be enough memory; ask for a smaller one")]
    Context(u32),
    /// There is not enough memory.
    #[error(
        "{need} MiB of memory are needed, and {free} MiB are free: close something, or ask for a smaller context or model"
    )]
    Memory {
        /// Needed, in MiB.
        need: u64,
        /// Free, in MiB.
        free: u64,
    },
    /// The listener asked for it.
    #[error("it was stopped")]
    Stopped,
    /// A batch was refused.
    #[error("the model cannot go on: {0}")]
    Decode(String),
    /// Saved cells do not fit this context.
    #[error("saved cells do not fit: {0}")]
    State(&'static str),
}

fn init() {
    static INIT: Once = Once::new();
    INIT.call_once(|| {
        // SAFETY: called once, before any other call; the callback below lives for ever and keeps no state.
        unsafe {
            sys::llama_log_set(Some(log), std::ptr::null_mut());
            sys::llama_backend_init();
        }
    });
}

/// What llama.cpp has to say goes to `tracing`.
unsafe extern "C" fn log(level: sys::ggml_log_level, text: *const c_char, _data: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: llama.cpp hands over a text that ends with a zero and lives as long as this call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let text = text.trim_end();
    if level == sys::GGML_LOG_LEVEL_ERROR && QUIET.get() {
        // It was to be expected.
    } else if level == sys::GGML_LOG_LEVEL_ERROR {
        LAST_ERROR.with_borrow_mut(|last| *last = text.to_owned());
        tracing::error!(target: "llama", "{text}");
    } else if level == sys::GGML_LOG_LEVEL_WARN {
        tracing::warn!(target: "llama", "{text}");
    } else {
        tracing::debug!(target: "llama", "{text}");
    }
}

thread_local! {
    /// The last thing that llama.cpp complained of on this thread.
    static LAST_ERROR: std::cell::RefCell<String> = const { std::cell::RefCell::new(String::new()) };
}

thread_local! {
    /// Whether complaints are expected on this thread.
    static QUIET: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// While it lives, what llama.cpp complains of on this thread is nobody's business.
struct Quiet;

impl Quiet {
    fn begin() -> Self {
        QUIET.set(true);
        Self
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        QUIET.set(false);
    }
}

/// What was complained of before is no explanation of what comes.
fn clear_error() {
    LAST_ERROR.take();
}

fn last_error() -> String {
    let said = LAST_ERROR.take();
    if said.is_empty() { "llama.cpp does not say why".into() } else { said }
}
