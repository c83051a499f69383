//! llama.cpp behind types that cannot be misused: all `unsafe` of this program is in this file.
//!
//! A [`Weights`] is a loaded model, a [`Context`] its memory and its calculator. Sequences, positions and cells are
//! llama.cpp's own words: a *cell* holds the key and value of one token, a *position* is the number that its
//! rotation is made of, and a *sequence* is a set of cells that see each other. What the rest of the program makes of
//! them is the business of this crate's other files.

use crate::attention::Tap;
use crate::gguf::{self, BadGguf};
use llama_cpp_sys_2 as sys;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Once};

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
    /// There is not enough memory, or the context cannot be made.
    #[error("a context of {0} tokens cannot be made: there may not be enough memory; ask for a smaller one")]
    Context(u32),
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
    if level == sys::GGML_LOG_LEVEL_ERROR {
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

fn last_error() -> String {
    let said = LAST_ERROR.take();
    if said.is_empty() { "llama.cpp does not say why".into() } else { said }
}

/// A model that is loaded.
#[derive(Debug)]
pub struct Weights {
    model: NonNull<sys::llama_model>,
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
        let many = rope == sys::LLAMA_ROPE_TYPE_MROPE || rope == sys::LLAMA_ROPE_TYPE_VISION;
        match () {
            () if recurrent => Some("it is recurrent: it has no cells"),
            () if hybrid => Some("it is partly recurrent: only some of its layers have cells"),
            () if window => Some("its attention slides: a cell is not seen from afar"),
            () if many => Some("its positions have several parts"),
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

/// What a context is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Cells, and the largest position.
    pub tokens: u32,
    /// Tokens that are read at once.
    pub batch: u32,
    /// Threads.
    pub threads: i32,
    /// Sequences: the conversation, and some to spare.
    pub sequences: u32,
}

/// A model's memory and calculator.
pub struct Context {
    context: NonNull<sys::llama_context>,
    /// What looks at the graph while it is computed. llama.cpp holds a pointer to it.
    tap: NonNull<Tap>,
    weights: Arc<Weights>,
    shape: Shape,
}

// SAFETY: a context may be used from any thread, by one at a time; it is not `Sync`, so it is.
unsafe impl Send for Context {}

/// A token that is read: what, where, for whom, and whether what follows it is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The token.
    pub token: Token,
    /// Its position.
    pub position: Pos,
    /// Whether the model's guess at the next token is wanted.
    pub logits: bool,
}

impl Context {
    /// Makes the memory of a model.
    ///
    /// # Errors
    /// When it is larger than the model's, or than there is room for.
    pub fn new(weights: &Arc<Weights>, shape: Shape) -> Result<Self, LlamaError> {
        let most = weights.trained_context();
        if shape.tokens > most {
            return Err(LlamaError::TooLong { asked: shape.tokens, most });
        }
        let tap = NonNull::from(Box::leak(Box::new(Tap::new(weights.layers()))));
        // SAFETY: defaults but for numbers, and a callback whose data lives until this context is dropped.
        let context = unsafe {
            let mut params = sys::llama_context_default_params();
            params.n_ctx = shape.tokens;
            params.n_batch = shape.batch;
            params.n_ubatch = shape.batch;
            params.n_seq_max = shape.sequences;
            params.n_threads = shape.threads;
            params.n_threads_batch = shape.threads;
            params.flash_attn_type = sys::LLAMA_FLASH_ATTN_TYPE_DISABLED;
            params.kv_unified = true;
            params.no_perf = true;
            params.cb_eval = Some(look);
            params.cb_eval_user_data = tap.as_ptr().cast();
            sys::llama_init_from_model(weights.model.as_ptr(), params)
        };
        let Some(context) = NonNull::new(context) else {
            // SAFETY: it was leaked above, and nobody else knows of it.
            drop(unsafe { Box::from_raw(tap.as_ptr()) });
            return Err(LlamaError::Context(shape.tokens));
        };
        Ok(Self { context, tap, weights: Arc::clone(weights), shape })
    }

    /// The model.
    #[must_use]
    pub fn weights(&self) -> &Arc<Weights> {
        &self.weights
    }

    /// What it was made as.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// What has been seen of the graph.
    pub fn tap(&mut self) -> &mut Tap {
        // SAFETY: llama.cpp touches it only within `decode`, which borrows this context as a whole.
        unsafe { self.tap.as_mut() }
    }

    fn memory(&self) -> sys::llama_memory_t {
        // SAFETY: the context lives.
        unsafe { sys::llama_get_memory(self.context.as_ptr()) }
    }

    /// Reads tokens into a sequence. No more than a batch at once.
    ///
    /// # Errors
    /// When there is no room, or llama.cpp refuses.
    pub fn decode(&mut self, seq: Seq, items: &[Item]) -> Result<(), LlamaError> {
        if items.is_empty() || items.len() > self.shape.batch as usize {
            return Err(LlamaError::Decode(format!("{} tokens are none or too many at once", items.len())));
        }
        let vocabulary = self.weights.vocabulary();
        if let Some(bad) = items.iter().find(|i| usize::try_from(i.token).map_or(true, |t| t >= vocabulary)) {
            return Err(LlamaError::Decode(format!("token {} is not in its vocabulary", bad.token)));
        }
        let mut tokens: Vec<Token> = items.iter().map(|i| i.token).collect();
        let mut positions: Vec<Pos> = items.iter().map(|i| i.position).collect();
        let mut counts = vec![1i32; items.len()];
        let mut own = [seq.0];
        let mut sequences = vec![own.as_mut_ptr(); items.len()];
        let mut logits: Vec<i8> = items.iter().map(|i| i8::from(i.logits)).collect();
        let batch = sys::llama_batch {
            n_tokens: items.len() as i32,
            token: tokens.as_mut_ptr(),
            embd: std::ptr::null_mut(),
            pos: positions.as_mut_ptr(),
            n_seq_id: counts.as_mut_ptr(),
            seq_id: sequences.as_mut_ptr(),
            logits: logits.as_mut_ptr(),
        };
        // SAFETY: every array of the batch is as long as it says and lives beyond the call.
        let code = unsafe { sys::llama_decode(self.context.as_ptr(), batch) };
        match code {
            0 => Ok(()),
            1 => Err(LlamaError::Decode("its memory is full".into())),
            2 => Err(LlamaError::Decode("it was stopped".into())),
            _ => Err(LlamaError::Decode(last_error())),
        }
    }

    /// The model's guess at what follows the `n`-th token of the last batch, which asked for it.
    #[must_use]
    pub fn logits(&self, n: usize) -> &[f32] {
        // SAFETY: llama.cpp gives nothing, or as many numbers as the vocabulary has, which stay until the next batch.
        unsafe {
            let logits = sys::llama_get_logits_ith(self.context.as_ptr(), n as i32);
            if logits.is_null() { &[] } else { std::slice::from_raw_parts(logits, self.weights.vocabulary()) }
        }
    }

    /// Takes cells out of a sequence: those from `start` up to `end`.
    #[must_use]
    pub fn remove(&mut self, seq: Seq, start: Pos, end: Pos) -> bool {
        // SAFETY: the memory lives as long as the context; any range is allowed.
        unsafe { sys::llama_memory_seq_rm(self.memory(), seq.0, start, end) }
    }

    /// Lets a second sequence see cells of a first.
    pub fn share(&mut self, from: Seq, to: Seq, start: Pos, end: Pos) {
        // SAFETY: as above; both are sequences of this context.
        unsafe { sys::llama_memory_seq_cp(self.memory(), from.0, to.0, start, end) };
    }

    /// Moves cells to other positions; only where [`Context::can_move`].
    pub fn shift(&mut self, seq: Seq, start: Pos, end: Pos, by: Pos) {
        if self.can_move() {
            // SAFETY: as above; the kinds of models for which this would abort are ruled out.
            unsafe { sys::llama_memory_seq_add(self.memory(), seq.0, start, end, by) };
        }
    }

    /// Whether cells can be moved.
    #[must_use]
    pub fn can_move(&self) -> bool {
        // SAFETY: the memory lives.
        self.weights.no_surgery().is_none() && unsafe { sys::llama_memory_can_shift(self.memory()) }
    }

    /// The last position of a sequence; none where it is empty.
    #[must_use]
    pub fn last(&self, seq: Seq) -> Option<Pos> {
        // SAFETY: the memory lives.
        let last = unsafe { sys::llama_memory_seq_pos_max(self.memory(), seq.0) };
        (last >= 0).then_some(last)
    }

    /// All cells of a sequence, as bytes.
    #[must_use]
    pub fn save(&mut self, seq: Seq) -> Vec<u8> {
        // SAFETY: the buffer is as long as llama.cpp says that it must be.
        unsafe {
            let size = sys::llama_state_seq_get_size(self.context.as_ptr(), seq.0);
            let mut bytes = vec![0u8; size];
            let written =
                sys::llama_state_seq_get_data(self.context.as_ptr(), bytes.as_mut_ptr(), size, seq.0);
            bytes.truncate(written);
            bytes
        }
    }

    /// Puts saved cells into a sequence, in the place of what was there.
    ///
    /// # Errors
    /// When they do not fit this context. They must be what [`Context::save`] gave: the caller has checked their sum.
    pub fn restore(&mut self, seq: Seq, bytes: &[u8]) -> Result<(), LlamaError> {
        // SAFETY: llama.cpp reads no more than it is given, and throws what does not fit back at us as a zero.
        let read = unsafe {
            sys::llama_state_seq_set_data(self.context.as_ptr(), bytes.as_ptr(), bytes.len(), seq.0)
        };
        if read == bytes.len() {
            Ok(())
        } else {
            Err(LlamaError::State("they are of another model or context"))
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once; the tap after the context that points to it.
        unsafe {
            sys::llama_free(self.context.as_ptr());
            drop(Box::from_raw(self.tap.as_ptr()));
        }
    }
}

/// Called for every node of the graph: asked first whether it is wanted, then, if it is, shown it.
unsafe extern "C" fn look(node: *mut sys::ggml_tensor, ask: bool, data: *mut c_void) -> bool {
    // SAFETY: llama.cpp hands over a node that lives through the call, and the pointer that `new` gave it, which is a
    // tap that nobody else touches meanwhile: `decode` borrows the context as a whole.
    let (node, tap) = unsafe { (&*node, &mut *data.cast::<Tap>()) };
    if ask {
        return tap.wants(&Node(node));
    }
    tap.see(&Node(node));
    // Anything else would end the computation here.
    true
}

/// A node of the graph.
pub(crate) struct Node<'a>(&'a sys::ggml_tensor);

impl Node<'_> {
    /// Its name.
    pub(crate) fn name(&self) -> &[u8] {
        let name = &self.0.name;
        let end = name.iter().position(|&c| c == 0).unwrap_or(name.len());
        // SAFETY: both are arrays of bytes.
        unsafe { std::slice::from_raw_parts(name.as_ptr().cast(), end) }
    }

    /// The name of what it is a view of.
    pub(crate) fn view_of(&self) -> Option<Node<'_>> {
        // SAFETY: nodes of a graph live as long as it does.
        unsafe { self.0.view_src.as_ref() }.map(Node)
    }

    /// One of the nodes that it is made from.
    pub(crate) fn source(&self, n: usize) -> Option<Node<'_>> {
        // SAFETY: as above.
        self.0.src.get(n).and_then(|&src| unsafe { src.as_ref() }).map(Node)
    }

    /// Whether it sets rows of a table.
    pub(crate) fn sets_rows(&self) -> bool {
        self.0.op == sys::GGML_OP_SET_ROWS
    }

    /// Its extent.
    pub(crate) fn extent(&self) -> [usize; 4] {
        self.0.ne.map(|n| usize::try_from(n).unwrap_or(0))
    }

    /// One row of 32-bit floats: that of a token and a head.
    pub(crate) fn row(&self, token: usize, head: usize, into: &mut Vec<f32>) -> bool {
        let [cells, tokens, heads, _] = self.extent();
        let plain = self.0.type_ == sys::GGML_TYPE_F32 && self.0.nb[0] == 4;
        if !plain || token >= tokens || head >= heads {
            return false;
        }
        let start = token * self.0.nb[1] + head * self.0.nb[2];
        // SAFETY: the question is asked of a node that was just computed.
        if start + cells * 4 > unsafe { sys::ggml_nbytes(self.0) } {
            return false;
        }
        into.resize(cells, 0.0);
        // SAFETY: the range lies within the node, and the buffer holds as much; any bits are floats.
        unsafe { sys::ggml_backend_tensor_get(self.0, into.as_mut_ptr().cast(), start, cells * 4) };
        true
    }

    /// Its numbers, if they are 64-bit integers.
    pub(crate) fn integers(&self, into: &mut Vec<i64>) -> bool {
        let len: usize = self.extent().iter().product();
        // SAFETY: as above.
        if self.0.type_ != sys::GGML_TYPE_I64 || unsafe { sys::ggml_nbytes(self.0) } != len * 8 {
            return false;
        }
        into.resize(len, 0);
        // SAFETY: as above.
        unsafe { sys::ggml_backend_tensor_get(self.0, into.as_mut_ptr().cast(), 0, len * 8) };
        true
    }
}
