//! A loaded model file: its weights, dimensions, vocabulary and tokenizer.

use super::error::LlamaError;
use super::log::{clear_error, first_error, init};
use super::types::{LlamaPos, LlamaToken};
use crate::gguf;
use llama_cpp_sys_2 as sys;
use std::ffi::{CStr, CString};
use std::path::Path;
use std::ptr::NonNull;

/// A `llama_model`. Contexts share it by reference count.
#[derive(Debug)]
pub struct ModelWeights {
    pub(super) model: NonNull<sys::llama_model>,
    vocab: NonNull<sys::llama_vocab>,
    pub header: gguf::GgufHeader,
    /// Whether layers are on a GPU.
    offloaded: bool,
}

// SAFETY: llama.cpp only reads a model after loading it, and supports contexts of one model on several threads.
unsafe impl Send for ModelWeights {}
// SAFETY: all methods take `&self` and call functions that only read the model.
unsafe impl Sync for ModelWeights {}

impl ModelWeights {
    /// Checks and loads a GGUF file. `gpu_layers` layers are offloaded, if the program was built for a GPU.
    pub fn load(path: &Path, gpu_layers: i32) -> Result<Self, LlamaError> {
        Self::load_checked(path, Self::read_header(path)?, gpu_layers)
    }

    /// The header of a file, if llama.cpp may read it.
    pub fn read_header(path: &Path) -> Result<gguf::GgufHeader, LlamaError> {
        gguf::read_header(path).map_err(|why| LlamaError::File { path: path.display().to_string(), why })
    }

    /// Loads a file whose header was checked.
    pub fn load_checked(path: &Path, header: gguf::GgufHeader, gpu_layers: i32) -> Result<Self, LlamaError> {
        init();
        let path_text = path.display().to_string();
        let load_error = |why: String| LlamaError::Load { path: path_text.clone(), why };
        let c_path = CString::new(path.as_os_str().as_encoded_bytes());
        let c_path = c_path.map_err(|_| load_error("the path contains a zero byte".into()))?;
        clear_error();
        // SAFETY: the parameters are llama.cpp's defaults except for two plain values; the path ends with a zero byte.
        let model = unsafe {
            let mut params = sys::llama_model_default_params();
            params.n_gpu_layers = gpu_layers;
            params.check_tensors = true;
            sys::llama_model_load_from_file(c_path.as_ptr(), params)
        };
        let model = NonNull::new(model).ok_or_else(|| load_error(first_error()))?;
        // SAFETY: the model was just loaded; the vocabulary is part of it.
        let vocab = unsafe { sys::llama_model_get_vocab(model.as_ptr()) };
        match NonNull::new(vocab.cast_mut()) {
            Some(vocab) => {
                let offloaded = gpu_layers != 0 && Self::gpu_is_usable();
                Ok(Self { model, vocab, header, offloaded })
            }
            None => {
                // SAFETY: the pointer was not handed out, so nothing uses the model after this.
                unsafe { sys::llama_model_free(model.as_ptr()) };
                Err(load_error("it has no vocabulary".into()))
            }
        }
    }

    /// Whether this program was built for a GPU and has found one.
    #[must_use]
    pub fn gpu_is_usable() -> bool {
        init();
        // SAFETY: the function has no arguments; the backends are initialised.
        unsafe { sys::llama_supports_gpu_offload() }
    }

    /// Whether layers of this model are on a GPU.
    #[must_use]
    pub fn is_offloaded(&self) -> bool {
        self.offloaded
    }

    /// The context length that the model was trained for.
    #[must_use]
    pub fn trained_context(&self) -> u32 {
        // SAFETY: the model is alive.
        unsafe { sys::llama_model_n_ctx_train(self.model.as_ptr()) }.max(0).cast_unsigned()
    }

    #[must_use]
    pub fn layer_count(&self) -> usize {
        // SAFETY: the model is alive.
        unsafe { sys::llama_model_n_layer(self.model.as_ptr()) }.max(0) as usize
    }

    /// Bytes of one cell over all layers: a key and a value of 16-bit floats. An estimate where layers differ.
    #[must_use]
    pub fn cell_bytes(&self) -> u64 {
        let model = self.model.as_ptr();
        // SAFETY: the model is alive; these functions only read it.
        let (embedding, heads, kv_heads) = unsafe {
            (
                sys::llama_model_n_embd(model),
                sys::llama_model_n_head(model),
                sys::llama_model_n_head_kv(model),
            )
        };
        let width = i64::from(embedding) / i64::from(heads.max(1)) * i64::from(kv_heads);
        width.max(0).cast_unsigned() * 4 * self.layer_count() as u64
    }

    /// Attention heads per layer.
    #[must_use]
    pub fn head_count(&self) -> u64 {
        // SAFETY: the model is alive.
        unsafe { sys::llama_model_n_head(self.model.as_ptr()) }.max(0).cast_unsigned().into()
    }

    /// The number of values that the key of one attention head has.
    #[must_use]
    pub fn key_head_size(&self) -> u32 {
        let named = match self.header.arch_value("attention.key_length") {
            Some(gguf::GgufValue::Int(size)) => u32::try_from(*size).ok(),
            _ => None,
        };
        // SAFETY: the model is alive.
        let embedding = unsafe { sys::llama_model_n_embd(self.model.as_ptr()) }.max(0).cast_unsigned();
        named.unwrap_or_else(|| embedding / u32::try_from(self.head_count()).unwrap_or(1).max(1))
    }

    /// The token that every prompt starts with, if the model wants one.
    #[must_use]
    pub fn bos_token(&self) -> Option<LlamaToken> {
        // SAFETY: the vocabulary is alive; these functions only read it.
        let (add_bos, token) = unsafe {
            (sys::llama_vocab_get_add_bos(self.vocab.as_ptr()), sys::llama_vocab_bos(self.vocab.as_ptr()))
        };
        (add_bos && token >= 0).then_some(token)
    }

    pub(super) fn vocab_ptr(&self) -> *const sys::llama_vocab {
        self.vocab.as_ptr()
    }

    #[must_use]
    pub fn vocab_size(&self) -> usize {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { sys::llama_vocab_n_tokens(self.vocab.as_ptr()) }.max(0) as usize
    }

    /// The number of tokens that the sliding layers attend to, if the model has such layers.
    #[must_use]
    pub fn sliding_window(&self) -> Option<LlamaPos> {
        // SAFETY: the model is alive.
        let window = unsafe { sys::llama_model_n_swa(self.model.as_ptr()) };
        (window > 0).then_some(window)
    }

    /// Whether some layers are recurrent and others have KV cells.
    #[must_use]
    pub fn is_hybrid(&self) -> bool {
        // SAFETY: the model is alive.
        unsafe { sys::llama_model_is_hybrid(self.model.as_ptr()) }
    }

    /// Whether the positions of tokens have several parts (M-RoPE), of which those of text are equal. llama.cpp then stores
    /// the other parts beside the position of a cell, accepts gaps between positions, and cannot shift them.
    #[must_use]
    pub fn has_multi_rope(&self) -> bool {
        // SAFETY: the model is alive; this function only reads it.
        let rope = unsafe { sys::llama_model_rope_type(self.model.as_ptr()) };
        [sys::LLAMA_ROPE_TYPE_MROPE, sys::LLAMA_ROPE_TYPE_IMROPE].contains(&rope)
    }

    /// The reason why KV cells of this model cannot be removed and restored one by one, if there is one.
    #[must_use]
    pub fn kv_edit_unsupported(&self) -> Option<&'static str> {
        let model = self.model.as_ptr();
        // SAFETY: the model is alive; these functions only read it.
        let (recurrent, encoder) =
            unsafe { (sys::llama_model_is_recurrent(model), sys::llama_model_has_encoder(model)) };
        match () {
            () if let Some(why) = self.header.kv_edit_unsupported() => Some(why),
            () if recurrent => Some(gguf::RECURRENT_REASON),
            () if self.is_hybrid() && self.sliding_window().is_some() => {
                Some("some of its layers are recurrent and others have a sliding window")
            }
            () if encoder => Some(gguf::ENCODER_REASON),
            () => None,
        }
    }

    /// Tokenizes a text. Names of special tokens become those tokens only if `special` is set.
    #[must_use]
    pub fn tokenize(&self, text: &str, special: bool) -> Vec<LlamaToken> {
        // SAFETY: the vocabulary is alive; this function only reads it.
        let is_bpe = unsafe { sys::llama_vocab_type(self.vocab.as_ptr()) } == sys::LLAMA_VOCAB_TYPE_BPE;
        if !is_bpe {
            return self.tokenize_piece(text, special);
        }
        split_long_runs(text).flat_map(|piece| self.tokenize_piece(piece, special)).collect()
    }

    fn tokenize_piece(&self, text: &str, special: bool) -> Vec<LlamaToken> {
        let Ok(len) = i32::try_from(text.len()) else { return Vec::new() };
        let mut tokens = vec![0; text.len() + 8];
        loop {
            // SAFETY: both lengths are those of the buffers that they are passed with. The text has no long run of characters
            // that one regular expression may match as a whole, which llama.cpp would overflow the stack with.
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
                // A negative number is the buffer size that is needed; `i32::MIN` means that it does not fit an i32.
                Err(_) if n == i32::MIN => return Vec::new(),
                Err(_) => tokens.resize(n.unsigned_abs() as usize, 0),
            }
        }
    }

    /// The bytes of a token. A special token has bytes only if `special` is set.
    #[must_use]
    pub fn token_bytes(&self, token: LlamaToken, special: bool) -> Vec<u8> {
        if !self.contains_token(token) {
            return Vec::new();
        }
        let mut bytes = vec![0u8; 64];
        loop {
            // SAFETY: the token is in the vocabulary, and the length is that of the buffer.
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

    /// Whether a token ends an answer (EOS, EOT and the like).
    #[must_use]
    pub fn is_end_of_generation(&self, token: LlamaToken) -> bool {
        // SAFETY: llama.cpp looks the number up in a set; any number is allowed.
        unsafe { sys::llama_vocab_is_eog(self.vocab.as_ptr(), token) }
    }

    /// Whether a token is a control token such as `<|im_start|>`, not text.
    #[must_use]
    pub fn is_control(&self, token: LlamaToken) -> bool {
        // SAFETY: the token is in the vocabulary, checked first.
        self.contains_token(token) && unsafe { sys::llama_vocab_is_control(self.vocab.as_ptr(), token) }
    }

    /// Whether a token was added to the vocabulary by name. llama.cpp finds such names in every text.
    #[must_use]
    pub fn is_user_defined(&self, token: LlamaToken) -> bool {
        // SAFETY: the token is in the vocabulary, checked first.
        let attributes = || unsafe { sys::llama_vocab_get_attr(self.vocab.as_ptr(), token) };
        self.contains_token(token) && attributes() & sys::LLAMA_TOKEN_ATTR_USER_DEFINED != 0
    }

    fn contains_token(&self, token: LlamaToken) -> bool {
        usize::try_from(token).is_ok_and(|t| t < self.vocab_size())
    }

    /// The Jinja chat template of the file.
    #[must_use]
    pub fn chat_template(&self) -> Option<String> {
        self.named_template(None)
    }

    /// The template for chats with functions, where the file has one beside the other.
    #[must_use]
    pub fn tool_chat_template(&self) -> Option<String> {
        self.named_template(Some(c"tool_use"))
    }

    fn named_template(&self, name: Option<&CStr>) -> Option<String> {
        let name = name.map_or(std::ptr::null(), CStr::as_ptr);
        // SAFETY: the model is alive; a null name asks for the default template; the string lives as long as the model.
        let template = unsafe {
            let text = sys::llama_model_chat_template(self.model.as_ptr(), name);
            (!text.is_null()).then(|| CStr::from_ptr(text))
        };
        template.map(|t| t.to_string_lossy().into_owned())
    }
}

/// Splits a text where white space, or text without white space, goes on for more than [`MAX_RUN_CHARS`] characters.
///
/// llama.cpp splits a text into words with the regular expression of the model before it merges bytes. For most expressions it
/// uses `std::regex`, which recurses once per character of a match: some ten thousand letters without a space overflow the
/// stack of the thread, and end the process. A cut changes the tokens at the cut only, and never the text.
fn split_long_runs(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let end = first_piece_len(rest);
        let (piece, after) = rest.split_at(end);
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

/// With this many characters the recursion takes less than half a megabyte; a thread has two.
const MAX_RUN_CHARS: usize = 1000;

/// A special token whose name begins so many bytes before a cut ends before it.
const MAX_SPECIAL_BYTES: usize = 48;

/// The bytes before the first cut.
fn first_piece_len(text: &str) -> usize {
    let mut run = 0;
    let mut run_is_space = false;
    // The last place in the run where a cut is not in the name of a special token, as far as that can be seen.
    let (mut cut, mut opened) = (0, None);
    for (at, character) in text.char_indices() {
        if run == 0 || character.is_whitespace() != run_is_space {
            (run, run_is_space, cut, opened) = (0, character.is_whitespace(), 0, None);
        } else if run > MAX_RUN_CHARS / 2 && opened.is_none_or(|start: usize| at - start > MAX_SPECIAL_BYTES)
        {
            cut = at;
        }
        if run == MAX_RUN_CHARS {
            return if cut > 0 { cut } else { at };
        }
        run += 1;
        match character {
            '<' | '[' => opened = Some(at),
            '>' | ']' => opened = None,
            _ => {}
        }
    }
    text.len()
}

impl Drop for ModelWeights {
    fn drop(&mut self) {
        // SAFETY: every context holds an `Arc` of the weights, so no context is left.
        unsafe { sys::llama_model_free(self.model.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokenize_splits_only_long_runs() {
        let pieces = |text: &str| split_long_runs(text).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(pieces(""), Vec::<String>::new());
        let words = "word ".repeat(5000);
        assert_eq!(pieces(&words), [words]);
        for run in ["A", ".", " ", "\n", "字", "e\u{301}"] {
            let text = format!("Before {} after", run.repeat(3000));
            let pieces = pieces(&text);
            assert!(pieces.len() >= 3, "{run:?}: {}", pieces.len());
            assert_eq!(pieces.concat(), text);
            let longest = pieces
                .iter()
                .flat_map(|piece| piece.split(|c: char| c.is_whitespace() != run.trim().is_empty()));
            assert!(longest.map(|run| run.chars().count()).max() <= Some(MAX_RUN_CHARS), "{run:?}");
        }
    }

    #[test]
    fn tokenize_does_not_split_names_of_special_tokens() {
        for before in 960..1010 {
            let text = format!("{}<|im_end|>{}", "A".repeat(before), "B".repeat(600));
            let pieces: Vec<&str> = split_long_runs(&text).collect();
            assert!(
                pieces.len() >= 2 && pieces.iter().any(|piece| piece.contains("<|im_end|>")),
                "{before}: {pieces:?}"
            );
        }
    }
}
