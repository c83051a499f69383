//! A loaded model: what it is, and its vocabulary.

use super::{LlamaError, Token, clear_error, init, last_error};
use crate::gguf;
use llama_cpp_sys_2 as sys;
use std::ffi::{CStr, CString};
use std::path::Path;
use std::ptr::NonNull;

/// A model that is loaded.
#[derive(Debug)]
pub struct Weights {
    pub(super) model: NonNull<sys::llama_model>,
    vocab: NonNull<sys::llama_vocab>,
    /// What the file says of itself.
    pub header: gguf::Header,
}

// SAFETY: after loading, llama.cpp only reads a model; it is made to be shared by contexts on several threads.
unsafe impl Send for Weights {}
// SAFETY: as above.
unsafe impl Sync for Weights {}

impl Weights {
    /// Loads a model; `gpu_layers` of it go to a graphics card, if this program was built for one.
    ///
    /// # Errors
    /// When the file is no model, or none that llama.cpp can run.
    pub fn load(path: &Path, gpu_layers: i32) -> Result<Self, LlamaError> {
        init();
        let shown = path.display().to_string();
        let header = gguf::read(path).map_err(|why| LlamaError::File { path: shown.clone(), why })?;
        let refused = |why: String| LlamaError::Load { path: shown.clone(), why };
        let name = CString::new(path.as_os_str().as_encoded_bytes());
        let name = name.map_err(|_| refused("its name holds a zero".into()))?;
        clear_error();
        // SAFETY: the parameters are llama.cpp's own defaults but for a number; the name ends with a zero.
        let model = unsafe {
            let mut params = sys::llama_model_default_params();
            params.n_gpu_layers = gpu_layers;
            params.check_tensors = true;
            sys::llama_model_load_from_file(name.as_ptr(), params)
        };
        let model = NonNull::new(model).ok_or_else(|| refused(last_error()))?;
        // SAFETY: the model was just loaded; its vocabulary lives as long.
        let vocab = unsafe { sys::llama_model_get_vocab(model.as_ptr()) };
        match NonNull::new(vocab.cast_mut()) {
            Some(vocab) => Ok(Self { model, vocab, header }),
            None => {
                // SAFETY: nobody else knows of it.
                unsafe { sys::llama_model_free(model.as_ptr()) };
                Err(refused("it has no vocabulary".into()))
            }
        }
    }

    /// How many tokens it was trained to see.
    #[must_use]
    pub fn trained_context(&self) -> u32 {
        // SAFETY: the model lives.
        unsafe { sys::llama_model_n_ctx_train(self.model.as_ptr()) }.max(0).cast_unsigned()
    }

    /// How many layers it has.
    #[must_use]
    pub fn layers(&self) -> usize {
        // SAFETY: the model lives.
        unsafe { sys::llama_model_n_layer(self.model.as_ptr()) }.max(0) as usize
    }

    /// How many bytes one cell takes, of all layers; an estimate where layers differ.
    #[must_use]
    pub fn cell_bytes(&self) -> u64 {
        let model = self.model.as_ptr();
        // SAFETY: the model lives; these only read.
        let (embedding, heads, groups) = unsafe {
            (
                sys::llama_model_n_embd(model),
                sys::llama_model_n_head(model),
                sys::llama_model_n_head_kv(model),
            )
        };
        let width = i64::from(embedding) / i64::from(heads.max(1)) * i64::from(groups);
        // A key and a value of two bytes a number.
        width.max(0).cast_unsigned() * 4 * self.layers() as u64
    }

    /// How many heads a layer has.
    #[must_use]
    pub fn heads(&self) -> u64 {
        // SAFETY: the model lives.
        unsafe { sys::llama_model_n_head(self.model.as_ptr()) }.max(0).cast_unsigned().into()
    }

    /// The token that every text begins with, where the model wants one.
    #[must_use]
    pub fn first(&self) -> Option<Token> {
        // SAFETY: the vocabulary lives; these only read.
        let (wanted, token) = unsafe {
            (sys::llama_vocab_get_add_bos(self.vocab.as_ptr()), sys::llama_vocab_bos(self.vocab.as_ptr()))
        };
        (wanted && token >= 0).then_some(token)
    }

    /// How many tokens its vocabulary has.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { sys::llama_vocab_n_tokens(self.vocab.as_ptr()) }.max(0) as usize
    }

    /// Why its cells cannot be taken out and put back, if they cannot.
    #[must_use]
    pub fn no_surgery(&self) -> Option<&'static str> {
        let model = self.model.as_ptr();
        // SAFETY: the model lives; these only read.
        let (recurrent, hybrid, window, rope, encoder) = unsafe {
            (
                sys::llama_model_is_recurrent(model),
                sys::llama_model_is_hybrid(model),
                sys::llama_model_n_swa(model) > 0,
                sys::llama_model_rope_type(model),
                sys::llama_model_has_encoder(model),
            )
        };
        let many = [sys::LLAMA_ROPE_TYPE_MROPE, sys::LLAMA_ROPE_TYPE_IMROPE, sys::LLAMA_ROPE_TYPE_VISION];
        match () {
            () if let Some(why) = self.header.no_surgery() => Some(why),
            () if recurrent => Some("it is recurrent: it has no cells"),
            () if hybrid => Some("it is partly recurrent: only some of its layers have cells"),
            () if window => Some("its attention slides: a cell is not seen from afar"),
            () if many.contains(&rope) => Some("its positions have several parts"),
            () if encoder => Some("it reads with an encoder"),
            () => None,
        }
    }

    /// Cuts a text into tokens; the names of special tokens become those tokens where `special` is set.
    #[must_use]
    pub fn tokenize(&self, text: &str, special: bool) -> Vec<Token> {
        let Ok(len) = i32::try_from(text.len()) else { return Vec::new() };
        let mut tokens = vec![0; text.len() + 8];
        loop {
            // SAFETY: text and tokens are as long as is said.
            let n = unsafe {
                sys::llama_tokenize(
                    self.vocab.as_ptr(),
                    text.as_ptr().cast(),
                    len,
                    tokens.as_mut_ptr(),
                    tokens.len() as i32,
                    false,
                    special,
                )
            };
            match usize::try_from(n) {
                Ok(n) => {
                    tokens.truncate(n);
                    return tokens;
                }
                // It needs more room, and says how much; the very least number means that it is beyond counting.
                Err(_) if n == i32::MIN => return Vec::new(),
                Err(_) => tokens.resize(n.unsigned_abs() as usize, 0),
            }
        }
    }

    /// The bytes that a token stands for; those of a special one only where `special` is set.
    #[must_use]
    pub fn bytes(&self, token: Token, special: bool) -> Vec<u8> {
        if usize::try_from(token).is_ok_and(|t| t >= self.vocabulary()) || token < 0 {
            return Vec::new();
        }
        let mut bytes = vec![0u8; 64];
        loop {
            // SAFETY: the token is one of the vocabulary's, and the buffer is as long as is said.
            let n = unsafe {
                let buffer = bytes.as_mut_ptr().cast();
                sys::llama_token_to_piece(self.vocab.as_ptr(), token, buffer, bytes.len() as i32, 0, special)
            };
            match usize::try_from(n) {
                Ok(n) => {
                    bytes.truncate(n);
                    return bytes;
                }
                Err(_) => bytes.resize(n.unsigned_abs() as usize, 0),
            }
        }
    }

    /// Whether a token ends what is being said.
    #[must_use]
    pub fn ends(&self, token: Token) -> bool {
        // SAFETY: llama.cpp looks the token up in a set.
        unsafe { sys::llama_vocab_is_eog(self.vocab.as_ptr(), token) }
    }

    /// Whether a token is one of the model's marks, and not text.
    #[must_use]
    pub fn is_mark(&self, token: Token) -> bool {
        let known = usize::try_from(token).is_ok_and(|t| t < self.vocabulary());
        // SAFETY: the token is one of the vocabulary's.
        known && unsafe { sys::llama_vocab_is_control(self.vocab.as_ptr(), token) }
    }

    /// The template that a chat is written in, as the file has it.
    #[must_use]
    pub fn template(&self) -> Option<String> {
        // SAFETY: the model lives; no name asks for the usual one; the text lives as long as the model.
        let template = unsafe {
            let text = sys::llama_model_chat_template(self.model.as_ptr(), std::ptr::null());
            (!text.is_null()).then(|| CStr::from_ptr(text))
        };
        template.map(|t| t.to_string_lossy().into_owned())
    }
}

impl Drop for Weights {
    fn drop(&mut self) {
        // SAFETY: contexts hold the weights by reference count, so none is left.
        unsafe { sys::llama_model_free(self.model.as_ptr()) };
    }
}
