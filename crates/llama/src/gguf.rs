//! What a GGUF file says of itself, read before llama.cpp is let near it.
//!
//! llama.cpp trusts a file more than it should: some lies abort the process. So every length, type and offset of
//! the header is checked here first, against the size of the file. What is refused here is told in words; what
//! passes can still be no model that this program can run, and llama.cpp says so without harm.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

/// A value of the header, as far as anyone asks for it.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any whole number, or a truth value.
    Int(i128),
    /// A number with a fraction.
    Float(f64),
    /// Text.
    Text(String),
    /// A list, of which only the length is kept: vocabularies are long.
    List(u64),
}

impl Value {
    /// It as a number, if it is one.
    #[must_use]
    pub fn number(&self) -> Option<f64> {
        match self {
            Value::Int(n) => Some(*n as f64),
            Value::Float(n) => Some(*n),
            Value::Text(_) | Value::List(_) => None,
        }
    }
}

/// The header of a model file.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// The version of the format.
    pub version: u32,
    /// What the file says of the model, by key.
    pub values: BTreeMap<String, Value>,
    /// How many tensors it holds.
    pub tensors: u64,
    /// Bytes in all.
    pub size: u64,
}

impl Header {
    /// The value of a key that belongs to the model's kind, such as `context_length`.
    #[must_use]
    pub fn of_kind(&self, key: &str) -> Option<&Value> {
        self.values.get(&format!("{}.{key}", self.architecture()?))
    }

    /// What kind of model it is.
    #[must_use]
    pub fn architecture(&self) -> Option<&str> {
        match self.values.get("general.architecture") {
            Some(Value::Text(name)) => Some(name),
            _ => None,
        }
    }

    /// Why the cells of such a model cannot be taken out and put back, as far as its header tells.
    #[must_use]
    pub fn no_surgery(&self) -> Option<&'static str> {
        /// Kinds that have no cells, or only in some layers.
        const RECURRENT: [&str; 19] = [
            "mamba",
            "rwkv",
            "arwkv",
            "jamba",
            "bamba",
            "lfm2",
            "granitehybrid",
            "falcon-h1",
            "plamo2",
            "nemotron_h",
            "qwen3next",
            "qwen35",
            "qwen4exp",
            "deepseek4",
            "minimax-01",
            "bailingmoe3",
            "kimi-linear",
            "kimi-k3",
            "glm5-next",
        ];
        const ENCODERS: [&str; 9] = [
            "bert",
            "nomic-bert",
            "jina-bert",
            "neo-bert",
            "modern-bert",
            "eurobert",
            "gemma-embedding",
            "llama-embed",
            "t5",
        ];
        /// Kinds whose attention slides though the header may not say so.
        const SLIDING: [&str; 3] = ["gemma2", "llama4", "step35"];
        let kind = self.architecture().unwrap_or_default();
        let positive = |key: &str| matches!(self.of_kind(key), Some(Value::Int(n)) if *n > 0);
        match () {
            () if RECURRENT.iter().any(|r| kind.starts_with(r))
                || self.of_kind("ssm.state_size").is_some() =>
            {
                Some("it is recurrent: at least some of its layers have no cells")
            }
            () if ENCODERS.iter().any(|e| kind.starts_with(e)) => Some("it reads with an encoder"),
            // Phi 3 says how far it would slide; llama.cpp does not let it.
            () if (positive("attention.sliding_window") && kind != "phi3") || SLIDING.contains(&kind) => {
                Some("its attention slides: a cell is not seen from afar")
            }
            () if self.of_kind("attention.kv_lora_rank").is_some() => {
                Some("its cells are compressed (MLA): they cannot be looked into")
            }
            () if self.of_kind("rope.dimension_sections").is_some() => {
                Some("its positions have several parts (M-RoPE)")
            }
            () => None,
        }
    }
}

/// Why a file is no model.
#[derive(Debug, thiserror::Error)]
pub enum BadGguf {
    /// It cannot be read.
    #[error("it cannot be read: {0}")]
    Io(#[from] std::io::Error),
    /// It is something else.
    #[error("it is not a GGUF file")]
    NotGguf,
    /// Of a version that is not known.
    #[error("it is GGUF of version {0}; versions 2 and 3 can be read")]
    Version(u32),
    /// It ends too early.
    #[error("it is cut short: {0} lies behind its end; fetch it again")]
    Short(String),
    /// It contradicts itself.
    #[error("it is damaged: {0}; fetch it again")]
    Damaged(String),
}

/// More than any model has, and less than would fill memory.
const MOST_VALUES: u64 = 1 << 16;
const MOST_TENSORS: u64 = 1 << 16;
const LONGEST_TEXT: u64 = 1 << 24;
const LONGEST_LIST: u64 = 1 << 26;

/// Elements to a block and bytes to a block, by the number of the tensor's type; nothing where a number means nothing
/// any more or yet.
const TYPES: [Option<(u64, u64)>; 43] = [
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

/// Reads and checks the header of a file.
///
/// # Errors
/// When it is no model, or not a whole one.
pub fn read(path: &Path) -> Result<Header, BadGguf> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut input = Input { inner: BufReader::with_capacity(1 << 16, file), at: 0, size };
    header(&mut input)
}

struct Input<R> {
    inner: R,
    at: u64,
    size: u64,
}

impl<R: Read> Input<R> {
    fn take<const N: usize>(&mut self, what: &str) -> Result<[u8; N], BadGguf> {
        self.fits(N as u64, what)?;
        let mut bytes = [0; N];
        self.inner.read_exact(&mut bytes)?;
        self.at += N as u64;
        Ok(bytes)
    }

    fn fits(&self, len: u64, what: &str) -> Result<(), BadGguf> {
        if len > self.size - self.at { Err(BadGguf::Short(what.to_owned())) } else { Ok(()) }
    }

    fn u32(&mut self, what: &str) -> Result<u32, BadGguf> {
        self.take(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, BadGguf> {
        self.take(what).map(u64::from_le_bytes)
    }

    fn text(&mut self, what: &str) -> Result<String, BadGguf> {
        let len = self.u64(what)?;
        if len > LONGEST_TEXT {
            return Err(BadGguf::Damaged(format!("{what} is {len} bytes long")));
        }
        self.fits(len, what)?;
        let mut bytes = vec![0; len as usize];
        self.inner.read_exact(&mut bytes)?;
        self.at += len;
        // Vocabularies hold bytes that are no text; keys and names must be.
        Ok(String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
    }

    fn skip(&mut self, len: u64, what: &str) -> Result<(), BadGguf> {
        self.fits(len, what)?;
        std::io::copy(&mut (&mut self.inner).take(len), &mut std::io::sink())?;
        self.at += len;
        Ok(())
    }
}

fn header<R: Read>(input: &mut Input<R>) -> Result<Header, BadGguf> {
    if input.size < 4 || &input.take::<4>("its mark")? != b"GGUF" {
        return Err(BadGguf::NotGguf);
    }
    let version = input.u32("its version")?;
    if !(2..=3).contains(&version) {
        return Err(BadGguf::Version(version));
    }
    let (tensors, count) = (input.u64("the number of tensors")?, input.u64("the number of values")?);
    if tensors > MOST_TENSORS || count > MOST_VALUES {
        return Err(BadGguf::Damaged(format!("it claims {tensors} tensors and {count} values")));
    }
    let mut values = BTreeMap::new();
    for n in 0..count {
        let key = input.text(&format!("the name of value {n}"))?;
        let kind = input.u32(&key)?;
        let value = value(input, kind, &key, 0)?;
        if values.insert(key.clone(), value).is_some() {
            return Err(BadGguf::Damaged(format!("{key} stands in it twice")));
        }
    }
    let align = match values.get("general.alignment") {
        None => 32,
        Some(Value::Int(n)) if (8..=1 << 16).contains(n) && (*n as u64).is_power_of_two() => *n as u64,
        Some(other) => return Err(BadGguf::Damaged(format!("its alignment is {other:?}"))),
    };
    let mut end = 0u64;
    let mut names = std::collections::BTreeSet::new();
    for n in 0..tensors {
        let name = input.text(&format!("the name of tensor {n}"))?;
        let last = tensor(input, &name, align)?;
        end = end.max(last);
        if !names.insert(name.clone()) {
            return Err(BadGguf::Damaged(format!("the tensor {name} stands in it twice")));
        }
    }
    let data = input.at.next_multiple_of(align);
    if data.checked_add(end).is_none_or(|last| last > input.size) {
        return Err(BadGguf::Short("the end of its tensors".into()));
    }
    let header = Header { version, values, tensors, size: input.size };
    match lie(&header) {
        Some(lie) => Err(BadGguf::Damaged(lie)),
        None => Ok(header),
    }
}

/// What the header claims that cannot be, of all that llama.cpp would stop the process for.
fn lie(header: &Header) -> Option<String> {
    let number = |key: &str| match header.of_kind(key) {
        Some(Value::Int(n)) => Some(*n),
        _ => None,
    };
    let within = |key: &str, least: i128, most: i128| {
        let n = number(key).filter(|n| !(least..=most).contains(n))?;
        Some(format!("its {key} is {n}"))
    };
    let prefix = format!("{}.", header.architecture()?);
    let own = header.values.iter().filter(|(key, _)| key.starts_with(&prefix));
    let numbers = own.clone().find_map(|(key, value)| match value {
        Value::Float(n) if !n.is_finite() || (*n < 0.0 && key.ends_with("epsilon")) => {
            Some(format!("{key} is {n}"))
        }
        _ => None,
    });
    let vocabulary = match header.values.get("tokenizer.ggml.model") {
        Some(Value::Text(name)) if name == "none" || name == "no_vocab" => {
            Some("it has no vocabulary".to_owned())
        }
        _ => None,
    };
    let experts = number("expert_count").unwrap_or(0);
    let groups = number("expert_group_count").unwrap_or(0);
    let scaling = match header.of_kind("rope.scaling.type") {
        Some(Value::Text(name)) if !["none", "linear", "yarn", "longrope"].contains(&name.as_str()) => {
            Some(format!("its positions are scaled by '{name}', which is not known"))
        }
        _ => None,
    };
    numbers
        .or(scaling)
        .or(vocabulary)
        .or_else(|| within("block_count", 1, 512))
        .or_else(|| within("nextn_predict_layers", 0, number("block_count").unwrap_or(0)))
        .or_else(|| within("context_length", 64, 1 << 30))
        .or_else(|| within("expert_count", 0, 1024))
        .or_else(|| within("expert_used_count", i128::from(experts > 0), experts))
        .or_else(|| within("expert_group_count", 0, (experts - 1).max(0)))
        .or_else(|| within("expert_group_used_count", i128::from(groups > 0), (groups - 1).max(0)))
        .or_else(|| {
            (groups > 0 && experts % groups != 0).then(|| format!("{experts} experts are in {groups} groups"))
        })
}

fn value<R: Read>(input: &mut Input<R>, kind: u32, key: &str, depth: u32) -> Result<Value, BadGguf> {
    Ok(match kind {
        0 => Value::Int(i128::from(u8::from_le_bytes(input.take(key)?))),
        1 => Value::Int(i128::from(i8::from_le_bytes(input.take(key)?))),
        2 => Value::Int(i128::from(u16::from_le_bytes(input.take(key)?))),
        3 => Value::Int(i128::from(i16::from_le_bytes(input.take(key)?))),
        4 => Value::Int(i128::from(input.u32(key)?)),
        5 => Value::Int(i128::from(i32::from_le_bytes(input.take(key)?))),
        6 => Value::Float(f64::from(f32::from_le_bytes(input.take(key)?))),
        7 => Value::Int(i128::from(u8::from_le_bytes(input.take(key)?) != 0)),
        8 => Value::Text(input.text(key)?),
        9 => return list(input, key, depth),
        10 => Value::Int(i128::from(input.u64(key)?)),
        11 => Value::Int(i128::from(i64::from_le_bytes(input.take(key)?))),
        12 => Value::Float(f64::from_le_bytes(input.take(key)?)),
        other => return Err(BadGguf::Damaged(format!("{key} is of the unknown type {other}"))),
    })
}

/// A list; its elements are looked at and not kept.
fn list<R: Read>(input: &mut Input<R>, key: &str, depth: u32) -> Result<Value, BadGguf> {
    let (kind, len) = (input.u32(key)?, input.u64(key)?);
    if len > LONGEST_LIST || depth > 0 {
        return Err(BadGguf::Damaged(format!("{key} is a list of {len} elements, or of lists")));
    }
    let width = match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        _ => 0,
    };
    if width > 0 {
        input.skip(len * width, key)?;
    } else if kind == 8 {
        // Of words that a vocabulary has twice, llama.cpp would not say which is meant, and stop.
        let mut words = std::collections::HashSet::new();
        for _ in 0..len {
            let word = input.text(key)?;
            if key == "tokenizer.ggml.tokens" && !words.insert(word.clone()) {
                return Err(BadGguf::Damaged(format!("{word:?} stands in its vocabulary twice")));
            }
        }
    } else {
        for _ in 0..len {
            value(input, kind, key, depth + 1)?;
        }
    }
    Ok(Value::List(len))
}

/// Checks what is said of a tensor; returns where it ends, from the start of the data.
fn tensor<R: Read>(input: &mut Input<R>, name: &str, align: u64) -> Result<u64, BadGguf> {
    let wrong = |why: String| BadGguf::Damaged(format!("the tensor {name} {why}"));
    let dimensions = input.u32(name)?;
    if !(1..=4).contains(&dimensions) {
        return Err(wrong(format!("has {dimensions} dimensions")));
    }
    let mut elements = 1u64;
    let mut row = 0;
    for d in 0..dimensions {
        let n = input.u64(name)?;
        row = if d == 0 { n } else { row };
        let product = elements.checked_mul(n).filter(|&p| n > 0 && p < 1 << 48);
        elements = product.ok_or_else(|| wrong("has a size that cannot be".into()))?;
    }
    let kind = input.u32(name)?;
    let known = TYPES.get(kind as usize).copied().flatten();
    let (block, bytes) = known.ok_or_else(|| wrong(format!("is of the unknown type {kind}")))?;
    if !row.is_multiple_of(block) {
        return Err(wrong(format!("has rows of {row} that do not fill blocks of {block}")));
    }
    if dimensions == 1 && kind != 0 {
        return Err(wrong("is a list of numbers that are not whole 32-bit ones, which cannot be run".into()));
    }
    let offset = input.u64(name)?;
    if !offset.is_multiple_of(align) {
        return Err(wrong("does not stand where one can".into()));
    }
    offset.checked_add(elements / block * bytes).ok_or_else(|| wrong("ends nowhere".into()))
}
