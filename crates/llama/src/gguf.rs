//! Reads and checks the header of a GGUF file before llama.cpp opens it.
//!
//! llama.cpp trusts the header: some invalid values make it abort the process. So every length, type and offset is
//! checked here first, against the size of the file. A header that passes may still be of a model that llama.cpp does
//! not support; then llama.cpp returns an error. Tensor data is not read.

use halo_core::ErrorKind;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::Path;

#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// An integer of any width, or a boolean.
    Int(i128),
    Float(f64),
    Text(String),
    /// The length of an array. The elements are not stored, because vocabularies are long.
    Array(u64),
}

impl GgufValue {
    #[must_use]
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            GgufValue::Int(n) => Some(*n as f64),
            GgufValue::Float(n) => Some(*n),
            GgufValue::Text(_) | GgufValue::Array(_) => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct GgufHeader {
    pub version: u32,
    pub metadata: BTreeMap<String, GgufValue>,
    pub tensor_count: u64,
    pub file_bytes: u64,
    /// The key-value heads of each layer, where the file lists them: layers of a hybrid without attention have 0.
    pub kv_heads: Vec<u64>,
    /// Bytes of the weights of each block (layer).
    pub block_bytes: Vec<u64>,
    /// Bytes of the other weights that are computed behind the blocks: the output layer.
    pub output_bytes: u64,
}

impl GgufHeader {
    /// The value of an architecture's key: `context_length` is looked up as `llama.context_length` for a llama.
    #[must_use]
    pub fn arch_value(&self, key: &str) -> Option<&GgufValue> {
        self.metadata.get(&format!("{}.{key}", self.architecture()?))
    }

    #[must_use]
    pub fn architecture(&self) -> Option<&str> {
        match self.metadata.get("general.architecture") {
            Some(GgufValue::Text(name)) => Some(name),
            _ => None,
        }
    }

    fn number(&self, key: &str) -> Option<u64> {
        match self.arch_value(key) {
            Some(GgufValue::Int(n)) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    /// The context length that the model was trained for.
    #[must_use]
    pub fn trained_context(&self) -> Option<u64> {
        self.number("context_length")
    }

    /// Whether the file has a chat template.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        matches!(self.metadata.get("tokenizer.chat_template"), Some(GgufValue::Text(_)))
    }

    /// Bytes of one KV cell over all layers: a key and a value of 16-bit floats. An estimate; 0 for a recurrent model.
    #[must_use]
    pub fn cell_bytes(&self) -> u64 {
        if self.is_recurrent() {
            return 0;
        }
        let heads = self.number("attention.head_count").unwrap_or(0).max(1);
        let layers = self.number("block_count").unwrap_or(0);
        let kv_heads = match self.kv_heads.as_slice() {
            [] => layers.saturating_mul(self.number("attention.head_count_kv").unwrap_or(heads)),
            listed => listed.iter().fold(0u64, |sum, heads| sum.saturating_add(*heads)),
        };
        let size = self.number("embedding_length").unwrap_or(0) / heads;
        let key = self.number("attention.key_length").unwrap_or(size);
        let value = self.number("attention.value_length").unwrap_or(size);
        kv_heads.saturating_mul(key.saturating_add(value)).saturating_mul(2)
    }

    fn pre_tokenizer(&self) -> Option<&str> {
        match self.metadata.get("tokenizer.ggml.pre") {
            Some(GgufValue::Text(name)) => Some(name),
            _ => None,
        }
    }

    /// The reason why KV cells of this model cannot be removed and restored one by one, as far as the header tells.
    #[must_use]
    pub fn kv_edit_unsupported(&self) -> Option<&'static str> {
        match () {
            () if self.is_recurrent() => Some(RECURRENT_REASON),
            () if self.is_encoder() => Some(ENCODER_REASON),
            () if self.arch_value("attention.kv_lora_rank").is_some() => Some(MLA_REASON),
            () if self.arch_value("attention.indexer.head_count").is_some() => Some(INDEXER_REASON),
            () => None,
        }
    }

    /// The reason why attention cannot be read by cell, as far as the header tells.
    #[must_use]
    pub fn attention_unsupported(&self) -> Option<&'static str> {
        match () {
            () if self.is_recurrent() => Some(RECURRENT_REASON),
            () if self.arch_value("attention.indexer.head_count").is_some() => Some(INDEXER_REASON),
            () => None,
        }
    }

    /// Whether tokens attend to later ones (BERT and other embedding models), or an encoder reads the prompt (T5).
    fn is_encoder(&self) -> bool {
        self.arch_value("attention.causal") == Some(&GgufValue::Int(0))
            || self.arch_value("decoder_start_token_id").is_some()
    }

    /// Whether all layers are recurrent (RWKV, Mamba). A hybrid has attention layers too, with keys and values.
    fn is_recurrent(&self) -> bool {
        let kv_heads = self.arch_value("attention.head_count_kv");
        let has_kv_heads = match kv_heads.or_else(|| self.arch_value("attention.head_count")) {
            Some(GgufValue::Int(heads)) => *heads > 0,
            Some(GgufValue::Array(_)) => true,
            _ => false,
        };
        let is_state_space = self.arch_value("ssm.state_size").is_some() && !has_kv_heads;
        is_state_space || self.arch_value("wkv.head_size").is_some()
    }
}

pub(crate) const RECURRENT_REASON: &str = "it is recurrent: it has no KV cells";
const MLA_REASON: &str = "its KV cells are compressed (MLA): attention cannot be read by cell";
const INDEXER_REASON: &str = "its attention is sparse: an indexer chooses the cells that it reads";
pub(crate) const ENCODER_REASON: &str = "it has an encoder";

/// The messages have the file as their subject; callers put its path before them.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error("it cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("it is not a GGUF file")]
    NotGguf,
    #[error("it has GGUF version {0}; only versions 2 and 3 are supported")]
    Version(u32),
    #[error("it is cut short: {0} is beyond the end of the file; download it again")]
    Truncated(String),
    #[error("it is damaged: {0}; download it again")]
    Damaged(String),
}

impl GgufError {
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Io(error) if error.kind() == std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            Self::Io(_) => ErrorKind::Unavailable,
            Self::NotGguf | Self::Version(_) => ErrorKind::InvalidInput,
            Self::Truncated(_) | Self::Damaged(_) => ErrorKind::Damaged,
        }
    }
}

// No model has more than these, and headers within them do not exhaust memory.
const MAX_METADATA_VALUES: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 16;
const MAX_STRING_BYTES: u64 = 1 << 24;
const MAX_ARRAY_LEN: u64 = 1 << 26;
const MAX_LAYERS: u64 = 512;

/// Elements and bytes per block of each `ggml_type`; None for removed and unassigned numbers.
const TENSOR_TYPES: [Option<(u64, u64)>; 43] = [
    Some((1, 4)),   // F32
    Some((1, 2)),   // F16
    Some((32, 18)), // Q4_0
    Some((32, 20)), // Q4_1
    None,
    None,
    Some((32, 22)),   // Q5_0
    Some((32, 24)),   // Q5_1
    Some((32, 34)),   // Q8_0
    Some((32, 36)),   // Q8_1
    Some((256, 84)),  // Q2_K
    Some((256, 110)), // Q3_K
    Some((256, 144)), // Q4_K
    Some((256, 176)), // Q5_K
    Some((256, 210)), // Q6_K
    Some((256, 292)), // Q8_K
    Some((256, 66)),  // IQ2_XXS
    Some((256, 74)),  // IQ2_XS
    Some((256, 98)),  // IQ3_XXS
    Some((256, 50)),  // IQ1_S
    Some((32, 18)),   // IQ4_NL
    Some((256, 110)), // IQ3_S
    Some((256, 82)),  // IQ2_S
    Some((256, 136)), // IQ4_XS
    Some((1, 1)),     // I8
    Some((1, 2)),     // I16
    Some((1, 4)),     // I32
    Some((1, 8)),     // I64
    Some((1, 8)),     // F64
    Some((256, 56)),  // IQ1_M
    Some((1, 2)),     // BF16
    None,
    None,
    None,
    Some((256, 54)), // TQ1_0
    Some((256, 66)), // TQ2_0
    None,
    None,
    None,
    Some((32, 17)),  // MXFP4
    Some((64, 36)),  // NVFP4
    Some((128, 18)), // Q1_0
    Some((64, 18)),  // Q2_0
];

pub fn read_header(path: &Path) -> Result<GgufHeader, GgufError> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let inner = BufReader::with_capacity(1 << 16, file);
    let mut input =
        GgufReader { inner, offset: 0, size, vocabulary: VocabularyScan::default(), kv_heads: Vec::new() };
    parse_header(&mut input)
}

struct GgufReader<R> {
    inner: R,
    offset: u64,
    size: u64,
    vocabulary: VocabularyScan,
    kv_heads: Vec<u64>,
}

/// What is remembered of the vocabulary, to check whether the tokenizer can work with it.
#[derive(Default)]
struct VocabularyScan {
    /// The bytes that have a token of their own: `<0x0A>`, or the byte itself.
    byte_tokens: BTreeSet<u8>,
    /// Whether a token has the type "byte".
    has_byte_type: bool,
}

/// The type "byte" in `tokenizer.ggml.token_type`.
const BYTE_TOKEN_TYPE: u32 = 6;

impl VocabularyScan {
    fn add_token(&mut self, token: &[u8]) {
        let hex = |digits: &[u8; 2]| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok();
        match token {
            &[byte] => self.byte_tokens.extend([byte]),
            [b'<', b'0', b'x', digits @ .., b'>'] => {
                // llama.cpp looks for capital letters.
                let capital = digits.iter().all(|digit| !digit.is_ascii_lowercase());
                let byte = digits.try_into().ok().filter(|_| capital).and_then(hex);
                self.byte_tokens.extend(byte);
            }
            _ => {}
        }
    }

    /// Why llama.cpp would abort the process, or throw an exception across the FFI, with this tokenizer.
    fn find_misfit(&self, header: &GgufHeader) -> Option<String> {
        let Some(GgufValue::Text(kind)) = header.metadata.get("tokenizer.ggml.model") else { return None };
        let lacks = |key: &str| {
            let key = format!("tokenizer.ggml.{key}");
            let missing = !matches!(header.metadata.get(&key), Some(GgufValue::Array(_)));
            missing.then(|| format!("tokenizer.ggml.model is '{kind}', and {key} is missing"))
        };
        let why = match kind.as_str() {
            "none" | "no_vocab" => return Some("it has no vocabulary".to_owned()),
            "llama" if let Some(missing) = lacks("scores") => return Some(missing),
            "gpt2" | "gemma4" if header.pre_tokenizer() != Some("kimi-k2") => return lacks("merges"),
            "llama" if self.byte_tokens.len() < 256 => "the vocabulary has no token for some bytes",
            "bert" if self.has_byte_type => "the vocabulary has tokens of the type byte",
            "t5" | "test" => "such a tokenizer is not supported",
            _ => return None,
        };
        Some(format!("tokenizer.ggml.model is '{kind}', but {why}"))
    }
}

impl<R: Read> GgufReader<R> {
    fn read_bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        self.check_remaining(N as u64, what)?;
        let mut bytes = [0; N];
        self.inner.read_exact(&mut bytes)?;
        self.offset += N as u64;
        Ok(bytes)
    }

    fn check_remaining(&self, len: u64, what: &str) -> Result<(), GgufError> {
        if len > self.size - self.offset { Err(GgufError::Truncated(what.to_owned())) } else { Ok(()) }
    }

    fn read_u32(&mut self, what: &str) -> Result<u32, GgufError> {
        self.read_bytes(what).map(u32::from_le_bytes)
    }

    fn read_u64(&mut self, what: &str) -> Result<u64, GgufError> {
        self.read_bytes(what).map(u64::from_le_bytes)
    }

    fn read_string(&mut self, what: &str) -> Result<String, GgufError> {
        // Tokens of a vocabulary may be invalid UTF-8; keys with invalid UTF-8 match no known key.
        let bytes = self.read_string_bytes(what)?;
        Ok(String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
    }

    fn read_string_bytes(&mut self, what: &str) -> Result<Vec<u8>, GgufError> {
        let len = self.read_u64(what)?;
        if len > MAX_STRING_BYTES {
            return Err(GgufError::Damaged(format!("{what} is {len} bytes long")));
        }
        self.check_remaining(len, what)?;
        let mut bytes = vec![0; len as usize];
        self.inner.read_exact(&mut bytes)?;
        self.offset += len;
        Ok(bytes)
    }

    fn skip(&mut self, len: u64, what: &str) -> Result<(), GgufError> {
        self.check_remaining(len, what)?;
        std::io::copy(&mut (&mut self.inner).take(len), &mut std::io::sink())?;
        self.offset += len;
        Ok(())
    }
}

fn parse_header<R: Read>(input: &mut GgufReader<R>) -> Result<GgufHeader, GgufError> {
    if input.size < 4 || &input.read_bytes::<4>("the magic number")? != b"GGUF" {
        return Err(GgufError::NotGguf);
    }
    let version = input.read_u32("the version")?;
    if !(2..=3).contains(&version) {
        return Err(GgufError::Version(version));
    }
    let (tensors, count) = (input.read_u64("the tensor count")?, input.read_u64("the metadata count")?);
    if tensors > MAX_TENSORS || count > MAX_METADATA_VALUES {
        return Err(GgufError::Damaged(format!(
            "the header has {tensors} tensors and {count} metadata values"
        )));
    }
    let mut metadata = BTreeMap::new();
    for n in 0..count {
        let key = input.read_string(&format!("the key of metadata value {n}"))?;
        let kind = input.read_u32(&key)?;
        let value = parse_value(input, kind, &key, 0)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(GgufError::Damaged(format!("the key {key} is duplicated")));
        }
    }
    let align = match metadata.get("general.alignment") {
        None => 32,
        Some(GgufValue::Int(n)) if (8..=1 << 16).contains(n) && (*n as u64).is_power_of_two() => *n as u64,
        Some(other) => return Err(GgufError::Damaged(format!("general.alignment is {other:?}"))),
    };
    let mut end = 0u64;
    let mut names = BTreeSet::new();
    let mut weights = WeightBytes::default();
    for n in 0..tensors {
        let name = input.read_string(&format!("the name of tensor {n}"))?;
        let tensor = parse_tensor(input, &name, align)?;
        end = end.max(tensor.end);
        weights.add(&name, tensor.end - tensor.start);
        if !names.insert(name.clone()) {
            return Err(GgufError::Damaged(format!("the tensor {name} is duplicated")));
        }
    }
    let data = input.offset.next_multiple_of(align);
    if data.checked_add(end).is_none_or(|end| end > input.size) {
        return Err(GgufError::Truncated("the end of the tensor data".into()));
    }
    let kv_heads = std::mem::take(&mut input.kv_heads);
    let header = GgufHeader {
        version,
        metadata,
        tensor_count: tensors,
        file_bytes: input.size,
        kv_heads,
        output_bytes: weights.output_bytes(),
        block_bytes: weights.blocks,
    };
    match find_invalid_value(&header).or_else(|| input.vocabulary.find_misfit(&header)) {
        Some(why) => Err(GgufError::Damaged(why)),
        None => Ok(header),
    }
}

/// Finds a metadata value for which llama.cpp would abort the process.
fn find_invalid_value(header: &GgufHeader) -> Option<String> {
    let number = |key: &str| match header.arch_value(key) {
        Some(GgufValue::Int(n)) => Some(*n),
        _ => None,
    };
    let outside = |key: &str, min: i128, max: i128| {
        let n = number(key).filter(|n| !(min..=max).contains(n))?;
        Some(format!("{key} is {n}"))
    };
    let prefix = format!("{}.", header.architecture()?);
    let arch_values = header.metadata.iter().filter(|(key, _)| key.starts_with(&prefix));
    let float = arch_values.clone().find_map(|(key, value)| match value {
        GgufValue::Float(n) if !n.is_finite() || (*n < 0.0 && key.ends_with("epsilon")) => {
            Some(format!("{key} is {n}"))
        }
        _ => None,
    });
    let experts = number("expert_count").unwrap_or(0);
    let groups = number("expert_group_count").unwrap_or(0);
    let scaling = match header.arch_value("rope.scaling.type") {
        Some(GgufValue::Text(name)) if !["none", "linear", "yarn", "longrope"].contains(&name.as_str()) => {
            Some(format!("rope.scaling.type is '{name}', which is unknown"))
        }
        _ => None,
    };
    float
        .or(scaling)
        .or_else(|| outside("block_count", 1, i128::from(MAX_LAYERS)))
        .or_else(|| outside("nextn_predict_layers", 0, number("block_count").unwrap_or(0)))
        .or_else(|| outside("context_length", 64, 1 << 30))
        .or_else(|| outside("expert_count", 0, 1024))
        .or_else(|| outside("expert_used_count", i128::from(experts > 0), experts))
        .or_else(|| outside("expert_group_count", 0, (experts - 1).max(0)))
        .or_else(|| outside("expert_group_used_count", i128::from(groups > 0), (groups - 1).max(0)))
        .or_else(|| {
            (groups > 0 && experts % groups != 0)
                .then(|| format!("{experts} experts cannot be divided into {groups} groups"))
        })
}

fn parse_value<R: Read>(
    input: &mut GgufReader<R>,
    kind: u32,
    key: &str,
    depth: u32,
) -> Result<GgufValue, GgufError> {
    Ok(match kind {
        0 => GgufValue::Int(i128::from(u8::from_le_bytes(input.read_bytes(key)?))),
        1 => GgufValue::Int(i128::from(i8::from_le_bytes(input.read_bytes(key)?))),
        2 => GgufValue::Int(i128::from(u16::from_le_bytes(input.read_bytes(key)?))),
        3 => GgufValue::Int(i128::from(i16::from_le_bytes(input.read_bytes(key)?))),
        4 => GgufValue::Int(i128::from(input.read_u32(key)?)),
        5 => GgufValue::Int(i128::from(i32::from_le_bytes(input.read_bytes(key)?))),
        6 => GgufValue::Float(f64::from(f32::from_le_bytes(input.read_bytes(key)?))),
        7 => GgufValue::Int(i128::from(u8::from_le_bytes(input.read_bytes(key)?) != 0)),
        8 => GgufValue::Text(input.read_string(key)?),
        9 => return parse_array(input, key, depth),
        10 => GgufValue::Int(i128::from(input.read_u64(key)?)),
        11 => GgufValue::Int(i128::from(i64::from_le_bytes(input.read_bytes(key)?))),
        12 => GgufValue::Float(f64::from_le_bytes(input.read_bytes(key)?)),
        other => return Err(GgufError::Damaged(format!("{key} has the unknown type {other}"))),
    })
}

/// Checks the elements of an array and returns its length.
fn parse_array<R: Read>(input: &mut GgufReader<R>, key: &str, depth: u32) -> Result<GgufValue, GgufError> {
    let (kind, len) = (input.read_u32(key)?, input.read_u64(key)?);
    if len > MAX_ARRAY_LEN || depth > 0 {
        return Err(GgufError::Damaged(format!("{key} is an array of {len} elements, or of arrays")));
    }
    let width = match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        _ => 0,
    };
    if key == "tokenizer.ggml.token_type" && width == 4 {
        for _ in 0..len {
            let token_type = input.read_u32(key)?;
            input.vocabulary.has_byte_type |= token_type == BYTE_TOKEN_TYPE;
        }
    } else if key.ends_with(".attention.head_count_kv") && width == 4 && len <= MAX_LAYERS {
        for _ in 0..len {
            let heads = input.read_u32(key)?;
            input.kv_heads.push(heads.into());
        }
    } else if width > 0 {
        input.skip(len * width, key)?;
    } else if key == "tokenizer.ggml.tokens" && kind == 8 {
        parse_tokens(input, key, len)?;
    } else if kind == 8 {
        for _ in 0..len {
            input.read_string_bytes(key)?;
        }
    } else {
        for _ in 0..len {
            parse_value(input, kind, key, depth + 1)?;
        }
    }
    Ok(GgufValue::Array(len))
}

/// Checks the tokens of a vocabulary: llama.cpp aborts if two are equal. It reads them as C strings, and names empty ones by
/// their number.
fn parse_tokens<R: Read>(input: &mut GgufReader<R>, key: &str, len: u64) -> Result<(), GgufError> {
    let mut tokens = std::collections::HashSet::new();
    for n in 0..len {
        let mut token = input.read_string_bytes(key)?;
        let end = token.iter().position(|&byte| byte == 0).unwrap_or(token.len());
        token.truncate(end);
        if token.is_empty() {
            token = format!("[EMPTY_{n}]").into_bytes();
        }
        input.vocabulary.add_token(&token);
        let name = String::from_utf8_lossy(&token).into_owned();
        if !tokens.insert(token) {
            return Err(GgufError::Damaged(format!("the token {name:?} is duplicated in the vocabulary")));
        }
    }
    Ok(())
}

/// Bytes of the weights by where llama.cpp computes with them.
#[derive(Default)]
struct WeightBytes {
    blocks: Vec<u64>,
    /// The embedding of the tokens, which stays in the memory of the machine.
    embedding: u64,
    has_output: bool,
    others: u64,
}

impl WeightBytes {
    fn add(&mut self, name: &str, bytes: u64) {
        let block = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<u64>().ok());
        match block.filter(|&block| block < MAX_LAYERS) {
            Some(block) => {
                let block = block as usize;
                if self.blocks.len() <= block {
                    self.blocks.resize(block + 1, 0);
                }
                self.blocks[block] = self.blocks[block].saturating_add(bytes);
            }
            None if name == "token_embd.weight" => self.embedding = bytes,
            None => {
                self.has_output |= name == "output.weight";
                self.others = self.others.saturating_add(bytes);
            }
        }
    }

    /// Without weights of its own, the output layer has a copy of the embedding.
    fn output_bytes(&self) -> u64 {
        self.others.saturating_add(if self.has_output { 0 } else { self.embedding })
    }
}

/// Checks the description of a tensor; returns where it is in the tensor data.
fn parse_tensor<R: Read>(input: &mut GgufReader<R>, name: &str, align: u64) -> Result<Range<u64>, GgufError> {
    let invalid = |why: String| GgufError::Damaged(format!("the tensor {name} {why}"));
    let dimensions = input.read_u32(name)?;
    if !(1..=4).contains(&dimensions) {
        return Err(invalid(format!("has {dimensions} dimensions")));
    }
    let mut elements = 1u64;
    let mut row = 0;
    for d in 0..dimensions {
        let n = input.read_u64(name)?;
        row = if d == 0 { n } else { row };
        let product = elements.checked_mul(n).filter(|&p| n > 0 && p < 1 << 48);
        elements = product.ok_or_else(|| invalid("has an impossible size".into()))?;
    }
    let kind = input.read_u32(name)?;
    let block_size = TENSOR_TYPES.get(kind as usize).copied().flatten();
    let (block, bytes) = block_size.ok_or_else(|| invalid(format!("has the unknown type {kind}")))?;
    if !row.is_multiple_of(block) {
        return Err(invalid(format!("has rows of {row} elements, not a multiple of the block size {block}")));
    }
    if dimensions == 1 && kind != 0 {
        return Err(invalid("has one dimension and is not F32, which llama.cpp cannot run".into()));
    }
    let offset = input.read_u64(name)?;
    if !offset.is_multiple_of(align) {
        return Err(invalid("has an unaligned offset".into()));
    }
    let end = offset.checked_add(elements / block * bytes);
    Ok(offset..end.ok_or_else(|| invalid("ends beyond 64 bits".into()))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    }

    fn header_without_values() -> GgufHeader {
        GgufHeader {
            version: 3,
            metadata: BTreeMap::new(),
            tensor_count: 0,
            file_bytes: 0,
            kv_heads: Vec::new(),
            block_bytes: Vec::new(),
            output_bytes: 0,
        }
    }

    #[test]
    fn gguf_weights_are_counted_by_layer() {
        let count = |tensors: &[(&str, u64)]| {
            let mut weights = WeightBytes::default();
            tensors.iter().for_each(|(name, bytes)| weights.add(name, *bytes));
            (weights.output_bytes(), weights.blocks)
        };
        let blocks = [("blk.0.attn_q.weight", 5), ("blk.1.attn_q.weight", 6), ("blk.0.ffn_up.weight", 7)];
        let tied = [&blocks[..], &[("token_embd.weight", 100), ("output_norm.weight", 1)]].concat();
        assert_eq!(count(&tied), (101, vec![12, 6]));
        let own = [&tied[..], &[("output.weight", 50)]].concat();
        assert_eq!(count(&own), (51, vec![12, 6]));
        // A number that no model has is no reason to allocate for it.
        assert_eq!(count(&[("blk.99999999.x", 1), ("blk.x.y", 2)]), (3, Vec::new()));
    }

    /// A header with a SentencePiece tokenizer and these tokens, and without tensors.
    fn sentencepiece_header(tokens: &[String], scores: bool) -> Result<GgufHeader, GgufError> {
        let entry = |key: &str, kind: u32| [text(key), kind.to_le_bytes().to_vec()].concat();
        let array = |kind: u32, len: usize| [&kind.to_le_bytes()[..], &(len as u64).to_le_bytes()].concat();
        let mut values = vec![
            [entry("general.architecture", 8), text("llama")].concat(),
            [entry("tokenizer.ggml.model", 8), text("llama")].concat(),
            [
                entry("tokenizer.ggml.tokens", 9),
                array(8, tokens.len()),
                tokens.iter().flat_map(|token| text(token)).collect(),
            ]
            .concat(),
        ];
        if scores {
            let numbers = vec![0; 4 * tokens.len()];
            values.push([entry("tokenizer.ggml.scores", 9), array(6, tokens.len()), numbers].concat());
        }
        let head =
            [&b"GGUF"[..], &3u32.to_le_bytes(), &0u64.to_le_bytes(), &(values.len() as u64).to_le_bytes()];
        let bytes = [head.concat(), values.concat(), vec![0; 32]].concat();
        let size = bytes.len() as u64;
        parse_header(&mut GgufReader {
            inner: &bytes[..],
            offset: 0,
            size,
            vocabulary: VocabularyScan::default(),
            kv_heads: Vec::new(),
        })
    }

    #[test]
    fn gguf_header_tells_whether_kv_cells_can_be_edited() {
        use GgufValue::{Array, Int};
        type HeaderCase<'a> = (&'a str, &'a [(&'a str, GgufValue)], Option<&'a str>);
        let cases: &[HeaderCase<'_>] = &[
            ("llama", &[("attention.head_count", Int(9)), ("attention.head_count_kv", Int(3))], None),
            ("mamba2", &[("ssm.state_size", Int(128)), ("attention.head_count", Int(0))], Some("recurrent")),
            ("rwkv7", &[("wkv.head_size", Int(64)), ("attention.head_count", Int(0))], Some("recurrent")),
            ("granitehybrid", &[("ssm.state_size", Int(128)), ("attention.head_count_kv", Array(40))], None),
            ("falcon-h1", &[("ssm.state_size", Int(128)), ("attention.head_count_kv", Int(2))], None),
            ("lfm2", &[("shortconv.l_cache", Int(3)), ("attention.head_count_kv", Array(16))], None),
            ("kimi-linear", &[("attention.kv_lora_rank", Int(512))], Some("MLA")),
            ("qwen4exp", &[("attention.indexer.head_count", Int(4))], Some("indexer")),
            ("qwen2vl", &[("rope.dimension_sections", Array(4)), ("attention.head_count", Int(12))], None),
            (
                "qwen35",
                &[
                    ("rope.dimension_sections", Array(4)),
                    ("ssm.state_size", Int(128)),
                    ("attention.head_count_kv", Array(24)),
                ],
                None,
            ),
            ("t5", &[("decoder_start_token_id", Int(0))], Some("encoder")),
            ("nomic-bert", &[("attention.causal", Int(0))], Some("encoder")),
            ("modern-bert-causal", &[("attention.causal", Int(1))], None),
        ];
        for (architecture, values, expected) in cases {
            let name = ("general.architecture".to_owned(), GgufValue::Text((*architecture).to_owned()));
            let values = values.iter().map(|(key, value)| (format!("{architecture}.{key}"), value.clone()));
            let metadata = values.chain([name]).collect();
            let header = GgufHeader { metadata, ..header_without_values() };
            let reason = header.kv_edit_unsupported();
            let as_expected = reason.is_some() == expected.is_some()
                && reason.zip(*expected).is_none_or(|(reason, expected)| reason.contains(expected));
            assert!(as_expected, "{architecture}: {reason:?}");
        }
    }

    #[test]
    fn gguf_header_counts_bytes_of_kv_cells() {
        use GgufValue::{Array, Int};
        let header = |values: &[(&str, GgufValue)], kv_heads: &[u64]| {
            let name = ("general.architecture".to_owned(), GgufValue::Text("x".into()));
            let values = values.iter().map(|(key, value)| (format!("x.{key}"), value.clone()));
            let metadata = values.chain([name]).collect();
            GgufHeader { metadata, kv_heads: kv_heads.to_vec(), ..header_without_values() }
        };
        // SmolLM2-135M: 30 layers, 3 key-value heads of 64.
        let smollm2 = [
            ("block_count", Int(30)),
            ("attention.head_count", Int(9)),
            ("attention.head_count_kv", Int(3)),
            ("embedding_length", Int(576)),
        ];
        assert_eq!(header(&smollm2, &[]).cell_bytes(), 30 * 3 * (64 + 64) * 2);
        let mut hybrid = smollm2.to_vec();
        hybrid[2].1 = Array(30);
        assert_eq!(header(&hybrid, &[0, 3, 0, 3]).cell_bytes(), 6 * (64 + 64) * 2);
        let mut long_keys = smollm2.to_vec();
        long_keys.extend([("attention.key_length", Int(256)), ("attention.value_length", Int(128))]);
        assert_eq!(header(&long_keys, &[]).cell_bytes(), 30 * 3 * (256 + 128) * 2);
        let mamba = [("block_count", Int(24)), ("ssm.state_size", Int(16)), ("attention.head_count", Int(0))];
        assert_eq!(header(&mamba, &[]).cell_bytes(), 0);
    }

    #[test]
    fn gguf_sentencepiece_vocabulary_needs_scores_and_all_bytes() {
        let mut tokens: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
        tokens.extend(["<unk>", "▁the", "the"].map(str::to_owned));
        assert!(sentencepiece_header(&tokens, true).is_ok());
        let error = |tokens: &[String], scores| {
            sentencepiece_header(tokens, scores).expect_err("refused").to_string()
        };
        assert!(error(&tokens, false).contains("tokenizer.ggml.scores is missing"));
        let lower: Vec<String> = tokens.iter().map(|token| token.replace("<0x0A>", "<0x0a>")).collect();
        assert!(error(&lower, true).contains("the vocabulary has no token for some bytes"));
        // llama.cpp also accepts the byte itself.
        let plain: Vec<String> = tokens.iter().map(|token| token.replace("<0x0A>", "\n")).collect();
        assert!(sentencepiece_header(&plain, true).is_ok());
        for duplicate in ["the", "the\0x", ""] {
            let mut tokens = tokens.clone();
            tokens.extend([duplicate.to_owned(), format!("[EMPTY_{}]", tokens.len())]);
            assert!(error(&tokens, true).contains("is duplicated in the vocabulary"), "{duplicate:?}");
        }
    }
}
