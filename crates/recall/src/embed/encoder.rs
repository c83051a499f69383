//! A sentence encoder of the BERT family, run with rten from a folder as sentence encoders are published:
//!
//! - `model.onnx`, `tokenizer.json`, `config.json`;
//! - `1_Pooling/config.json`, where the pooling is not the mean;
//! - `config_sentence_transformers.json`, where queries and passages have different prefixes.
//!
//! The matrix products that `config.json` lists in `quantization_config.modules_to_not_convert` are computed in floats.
//!
//! The same text gives the same vector, to the last bit, alone or in a batch: vectors are stored, and must not depend on
//! what was embedded with them. So a batch has only texts of equal length, and nothing is padded. A model that quantizes
//! activations shares one scale over a batch, which changes the vectors. Whether a model does is tested when it is
//! loaded; if so, its texts are run one by one.

use super::onnx;
use super::pieces::cut_into_pieces;
use super::tokenizer::{MAX_TOKENS, WordPieceTokenizer};
use super::worker::{self, SentenceEncoder};
use halo_core::embedder::{Embedder, EmbedderInfo};
use halo_core::{Error, ErrorKind};
use rten::{Model, ModelOptions, NodeId, RunOptions, ThreadPool, ValueView};
use serde_json::Value;
use std::fmt::Display;
use std::io;
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Part of the checksum in the name of an embedder. Increase it when the same files give other vectors than before.
const ENCODER_VERSION: u8 = 2;

const ONNX_FILE: &str = "model.onnx";
const TOKENIZER_FILE: &str = "tokenizer.json";
const CONFIG_FILE: &str = "config.json";

/// The operation in errors of [`OnnxEncoder::open`].
const LOADING: &str = "loading the embedder";

/// A loaded sentence encoder.
pub struct OnnxEncoder {
    model: Model,
    tokenizer: WordPieceTokenizer,
    inputs: Vec<(NodeId, EncoderInput)>,
    output: NodeId,
    pooling: Pooling,
    info: EmbedderInfo,
    can_batch: bool,
    threads: Arc<ThreadPool>,
    one_thread: Arc<ThreadPool>,
}

/// Batches with fewer tokens run on one thread: rten's threads spin while they wait, and a query of ten words took four
/// times the CPU time of a single thread.
const MULTITHREAD_MIN_TOKENS: usize = 48;

#[derive(Clone, Copy)]
enum EncoderInput {
    TokenIds,
    /// 1 for every token: nothing is padded.
    AttentionMask,
    /// 0 for every token: there is no second text.
    TokenTypes,
}

/// How the vectors of a text's tokens become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pooling {
    Mean,
    /// The vector of the first token, `[CLS]`.
    Cls,
}

impl OnnxEncoder {
    /// Loads the encoder in a folder.
    pub fn open(folder: &Path, threads: u32) -> Result<Self, Error> {
        let (onnx, tokenizer_json) = (read_file(folder, ONNX_FILE)?, read_file(folder, TOKENIZER_FILE)?);
        let config = parse_json(folder, CONFIG_FILE, &read_file(folder, CONFIG_FILE)?)?;
        let positions = config["max_position_embeddings"].as_u64().unwrap_or(u64::MAX);
        // Where the authors of a model give a limit below the number of its positions, it was trained on texts of that length.
        let trained = read_optional_json(folder, "sentence_bert_config.json")?["max_seq_length"].as_u64();
        let max_tokens = positions.min(trained.unwrap_or(u64::MAX));
        let max_tokens = usize::try_from(max_tokens).unwrap_or(usize::MAX).clamp(3, MAX_TOKENS);
        let pooling = Pooling::from_folder(folder)?;
        let tokenizer = WordPieceTokenizer::parse(&tokenizer_json)
            .map_err(|why| unsupported_file_error(folder, TOKENIZER_FILE, why))?;
        let onnx = prepare_onnx(folder, onnx, &config)?;
        let prompts = read_optional_json(folder, "config_sentence_transformers.json")?;
        let prefix = |kind: &str| prompts["prompts"][kind].as_str().unwrap_or_default().to_owned();
        let (query_prefix, passage_prefix) = (prefix("query"), prefix("passage"));

        let mut checksum = Xxh3::new();
        checksum.update(&[ENCODER_VERSION, pooling as u8]);
        checksum.update(&(max_tokens as u64).to_le_bytes());
        for part in [query_prefix.as_bytes(), passage_prefix.as_bytes(), &tokenizer_json, &onnx] {
            checksum.update(&(part.len() as u64).to_le_bytes());
            checksum.update(part);
        }
        let folder_name = folder.file_name().map_or("embedder".into(), |name| name.to_string_lossy());
        let name = format!("{folder_name}-{:012x}", checksum.digest() >> 16);
        let info = EmbedderInfo { name, dimensions: 0, max_tokens, query_prefix, passage_prefix };

        // Prepacked weights make short texts twice as fast.
        let model = ModelOptions::with_all_ops().prepack_weights(true).load(onnx);
        let model = model.map_err(|why| damaged_file_error(folder, ONNX_FILE, why))?;
        let inputs = model_inputs(&model).map_err(|why| unsupported_file_error(folder, ONNX_FILE, why))?;
        let output = model.output_ids().first().copied();
        let output =
            output.ok_or_else(|| unsupported_file_error(folder, ONNX_FILE, "the model has no output"))?;
        let mut encoder = Self {
            model,
            tokenizer,
            inputs,
            output,
            pooling,
            info,
            can_batch: false,
            threads: Arc::new(ThreadPool::with_num_threads(threads.max(1) as usize)),
            one_thread: Arc::new(ThreadPool::with_num_threads(1)),
        };
        encoder.probe().map_err(|error| damaged_file_error(folder, ONNX_FILE, error.message))?;
        Ok(encoder)
    }

    /// The tokens of a whole text, however long it is.
    #[must_use]
    pub fn tokenize(&self, text: &str) -> Vec<i32> {
        self.tokenizer.tokenize(text, usize::MAX)
    }

    /// How many tokens of a text are its prefix, which says whether it is a query or a passage.
    fn prefix_len(&self, text: &str) -> usize {
        let prefixes = [&self.info.passage_prefix, &self.info.query_prefix];
        let prefix = prefixes.into_iter().find(|prefix| !prefix.is_empty() && text.starts_with(*prefix));
        prefix.map_or(0, |prefix| self.tokenize(prefix).len() - 2)
    }

    /// Runs the model to learn the number of dimensions, and whether texts can be batched.
    fn probe(&mut self) -> Result<(), Error> {
        let texts = ["The gun on the wall", "ÉCLAIR 42", "=> { x += 1; }", "不 or not"].map(|text| {
            let mut tokens = self.tokenize(text);
            tokens.resize(8, tokens[0]);
            tokens
        });
        let alone = self.encode(&texts[..1])?;
        // Some models accept one text only and fail with several.
        self.can_batch = self.encode(&texts).is_ok_and(|batch| batch[0] == alone[0]);
        self.info.dimensions = alone[0].len();
        Ok(())
    }
}

impl SentenceEncoder for OnnxEncoder {
    fn info(&self) -> &EmbedderInfo {
        &self.info
    }

    fn can_batch(&self) -> bool {
        self.can_batch
    }

    fn tokenize(&self, text: &str) -> Vec<Vec<i32>> {
        let tokens = self.tokenize(text);
        if tokens.len() <= self.info.max_tokens {
            return vec![tokens];
        }
        cut_into_pieces(tokens, self.prefix_len(text), self.info.max_tokens)
    }

    fn count_tokens(&self, text: &str) -> usize {
        self.tokenize(text).len()
    }

    fn encode(&self, texts: &[Vec<i32>]) -> Result<Vec<Vec<f32>>, Error> {
        let shape = [texts.len(), texts.first().map_or(0, Vec::len)];
        let tokens = texts.concat();
        let (ones, zeros) = (vec![1; tokens.len()], vec![0; tokens.len()]);
        let mut inputs = Vec::new();
        for &(node, input) in &self.inputs {
            let values = match input {
                EncoderInput::TokenIds => &tokens,
                EncoderInput::AttentionMask => &ones,
                EncoderInput::TokenTypes => &zeros,
            };
            inputs.push((node, ValueView::from_shape(shape, values.as_slice()).map_err(run_error)?.into()));
        }
        let threads = if tokens.len() < MULTITHREAD_MIN_TOKENS { &self.one_thread } else { &self.threads };
        let options = RunOptions::default().with_thread_pool(Some(Arc::clone(threads)));
        let [output] = self.model.run_n(inputs, [self.output], Some(options)).map_err(run_error)?;
        let ([texts, tokens, dimensions], values) = output.into_shape_vec::<f32, 3>().map_err(run_error)?;
        if [texts, tokens] != shape || values.is_empty() {
            return Err(run_error(format!(
                "the model returned {texts} × {tokens} × {dimensions} values for {shape:?} tokens"
            )));
        }
        let pooled = values.chunks_exact(tokens * dimensions).map(|rows| self.pooling.pool(rows, dimensions));
        pooled
            .map(|vector| {
                vector.ok_or_else(|| run_error("the model returned NaN, infinity or a zero vector"))
            })
            .collect()
    }
}

impl Embedder for OnnxEncoder {
    fn info(&mut self) -> Result<EmbedderInfo, Error> {
        Ok(self.info.clone())
    }

    fn count_tokens(&mut self, texts: &[&str]) -> Result<Vec<usize>, Error> {
        Ok(texts.iter().map(|text| self.tokenize(text).len()).collect())
    }

    fn embed(&mut self, texts: &[&str]) -> Result<Vec<Vec<f32>>, Error> {
        worker::embed_texts(self, texts)
    }
}

impl Pooling {
    /// The pooling that the folder configures; the mean, where it has no configuration.
    fn from_folder(folder: &Path) -> Result<Self, Error> {
        const FILE: &str = "1_Pooling/config.json";
        let config = read_optional_json(folder, FILE)?;
        let enabled = |mode: &str| config[format!("pooling_mode_{mode}")].as_bool().unwrap_or(false);
        match (enabled("cls_token"), enabled("mean_tokens")) {
            (true, false) => Ok(Self::Cls),
            (false, true) => Ok(Self::Mean),
            (false, false) if config.is_null() => Ok(Self::Mean),
            _ => Err(unsupported_file_error(folder, FILE, "only mean and CLS pooling are supported")),
        }
    }

    /// The vector of length 1 of a text, from the vectors of its tokens. None if it has no direction.
    fn pool(self, rows: &[f32], dimensions: usize) -> Option<Vec<f32>> {
        let mut rows = rows.chunks_exact(dimensions);
        let mut vector = rows.next()?.to_vec();
        if self == Self::Mean {
            // The sum has the direction of the mean; the length is normalized below.
            for row in rows {
                vector.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
        }
        let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
        if !length.is_normal() {
            return None;
        }
        vector.iter_mut().for_each(|x| *x /= length);
        Some(vector)
    }
}

/// The inputs of the model, by the names that BERT models use.
fn model_inputs(model: &Model) -> Result<Vec<(NodeId, EncoderInput)>, String> {
    let input = |&node: &NodeId| {
        let node_info = model.node_info(node);
        let name = node_info.as_ref().and_then(|info| info.name()).unwrap_or_default();
        let input = match name {
            "input_ids" => EncoderInput::TokenIds,
            "attention_mask" => EncoderInput::AttentionMask,
            "token_type_ids" => EncoderInput::TokenTypes,
            _ => return Err(format!("the model has the unknown input '{name}'")),
        };
        Ok((node, input))
    };
    model.input_ids().iter().map(input).collect()
}

/// The bytes of the model after the integrity check, with the configured matrix products in floats.
fn prepare_onnx(folder: &Path, onnx: Vec<u8>, config: &Value) -> Result<Vec<u8>, Error> {
    if !onnx::is_intact(&onnx) {
        return Err(damaged_file_error(folder, ONNX_FILE, "it is cut off or damaged"));
    }
    let names = &config["quantization_config"]["modules_to_not_convert"];
    let names: Option<Vec<String>> = serde_json::from_value(names.clone()).map_err(|why| {
        unsupported_file_error(folder, CONFIG_FILE, format!("modules_to_not_convert: {why}"))
    })?;
    match names.as_deref().unwrap_or_default() {
        [] => Ok(onnx),
        names => onnx::dequantize_matmuls(&onnx, names)
            .map_err(|why| unsupported_file_error(folder, ONNX_FILE, why)),
    }
}

fn read_file(folder: &Path, file: &str) -> Result<Vec<u8>, Error> {
    let path = folder.join(file);
    read_regular_file(&path).map_err(|error| {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            _ => ErrorKind::Unavailable,
        };
        let why =
            format!("{}: {error}; download the model, or set recall.embedder to another", path.display());
        Error::new(kind, LOADING, why).with_source(error)
    })
}

/// The largest file of an embedding model that is read into memory.
const MAX_FILE_BYTES: u64 = 4 << 30;

/// The content of a file that is neither a pipe nor a device: reading those could block for ever, or never end.
fn read_regular_file(path: &Path) -> io::Result<Vec<u8>> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    if metadata.len() > MAX_FILE_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it is larger than {MAX_FILE_BYTES} bytes"),
        ));
    }
    std::fs::read(path)
}

/// The JSON of a file; null where there is no such file.
fn read_optional_json(folder: &Path, file: &str) -> Result<Value, Error> {
    let path = folder.join(file);
    match read_regular_file(&path) {
        Ok(bytes) => parse_json(folder, file, &bytes),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Value::Null),
        Err(error) => {
            Err(Error::unavailable(LOADING, format!("{}: {error}", path.display())).with_source(error))
        }
    }
}

fn parse_json(folder: &Path, file: &str, bytes: &[u8]) -> Result<Value, Error> {
    serde_json::from_slice(bytes).map_err(|error| damaged_file_error(folder, file, error))
}

fn damaged_file_error(folder: &Path, file: &str, why: impl Display) -> Error {
    let (path, name) = (folder.join(file), folder.file_name().unwrap_or_default().to_string_lossy());
    Error::damaged(LOADING, format!("{} cannot be used: {why}; download {name} again", path.display()))
}

fn unsupported_file_error(folder: &Path, file: &str, why: impl Display) -> Error {
    let path = folder.join(file);
    let why = format!("{} cannot be used: {why}; use another embedding model", path.display());
    Error::invalid_input(LOADING, why)
}

fn run_error(why: impl Display) -> Error {
    Error::internal("running the embedder", why.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pooling_normalizes_mean_or_cls() {
        let rows = [3.0, 0.0, 3.0, 8.0];
        assert_eq!(Pooling::Mean.pool(&rows, 2), Some(vec![0.6, 0.8]));
        assert_eq!(Pooling::Cls.pool(&rows, 2), Some(vec![1.0, 0.0]));
        for invalid in [vec![], vec![0.0; 4], vec![f32::NAN, 1.0], vec![f32::INFINITY, 1.0]] {
            assert_eq!(Pooling::Mean.pool(&invalid, 2), None, "{invalid:?}");
        }
    }

    #[test]
    fn encoder_refuses_files_that_are_not_regular() {
        let folder = tempfile::tempdir().expect("the folder is created");
        std::fs::create_dir(folder.path().join(CONFIG_FILE)).expect("the folder is created");
        std::fs::write(folder.path().join(ONNX_FILE), "onnx").expect("written");
        assert_eq!(read_file(folder.path(), ONNX_FILE), Ok(b"onnx".to_vec()));
        let mut refused = vec![CONFIG_FILE];
        #[cfg(unix)]
        {
            let pipe = folder.path().join(TOKENIZER_FILE);
            assert!(std::process::Command::new("mkfifo").arg(pipe).status().expect("mkfifo").success());
            std::os::unix::fs::symlink("/dev/zero", folder.path().join("zero")).expect("a link");
            refused.extend([TOKENIZER_FILE, "zero"]);
        }
        for file in refused {
            let path = folder.path().join(file).display().to_string();
            let error = read_file(folder.path(), file).expect_err(file);
            assert!(error.message.contains(&path) && error.message.contains("regular file"), "{error}");
            assert!(read_optional_json(folder.path(), file).is_err(), "{file}");
        }
    }

    #[test]
    fn pooling_is_read_from_model_folder() {
        let folder = tempfile::tempdir().expect("the folder is created");
        let path = folder.path();
        assert_eq!(Pooling::from_folder(path), Ok(Pooling::Mean), "the default");
        std::fs::create_dir(path.join("1_Pooling")).expect("the folder is created");
        let pooling = |json: &str| {
            std::fs::write(path.join("1_Pooling/config.json"), json).expect("written");
            Pooling::from_folder(path).map_err(|e| e.to_string())
        };
        assert_eq!(
            pooling(r#"{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}"#),
            Ok(Pooling::Mean)
        );
        assert_eq!(pooling(r#"{"pooling_mode_cls_token": true}"#), Ok(Pooling::Cls));
        for invalid in ["{", "{}", r#"{"pooling_mode_max_tokens": true}"#] {
            assert!(pooling(invalid).is_err_and(|e| e.contains("config.json cannot be used")), "{invalid}");
        }
    }
}
