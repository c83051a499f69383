//! A model of the BERT family, from a folder: `model.onnx`, `tokenizer.json` and `config.json`; where the pooling is not
//! the mean, `1_Pooling/config.json`; and where texts are to be told from queries, `config_sentence_transformers.json`,
//! as sentence encoders are published. What `config.json` names as `quantization_config.modules_to_not_convert` is
//! computed in floats.
//!
//! The same text gives the same vector, to the last bit, whatever it is embedded with. So only texts of the same number
//! of tokens are run together: nothing is padded, and rows of a product do not know of each other. A model whose
//! activations are quantised is another matter, because a whole batch shares one scale: whether this one's texts change
//! each other is tried when it is loaded, and if so they are run one by one.

use super::onnx;
use super::tokenizer::{MAX_TOKENS, Tokenizer};
use super::worker::{self, Encode};
use halo_core::seams::{Embedder, EmbedderInfo, SeamError};
use rten::{Model, ModelOptions, NodeId, RunOptions, ThreadPool, ValueView};
use serde_json::Value;
use std::fmt::Display;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Goes into every embedder's name, and changes when the same files would give other vectors than before.
const VERSION: u8 = 1;

/// A sentence encoder, loaded.
pub struct Encoder {
    model: Model,
    tokenizer: Tokenizer,
    inputs: Vec<(NodeId, Input)>,
    output: NodeId,
    pooling: Pooling,
    info: EmbedderInfo,
    together: bool,
    threads: Arc<ThreadPool>,
    one_thread: Arc<ThreadPool>,
}

/// Tokens from which on several threads are worth it. For less they wait for each other longer than they work, and they wait
/// by looking: a question of ten words took four times the processor's time that it takes on one.
const SHORT: usize = 48;

/// What a model is told of its tokens.
#[derive(Clone, Copy)]
enum Input {
    /// Their numbers.
    Tokens,
    /// That all of them count.
    Mask,
    /// That all are of the first of two texts.
    Kinds,
}

/// How the vectors of a text's tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pooling {
    Mean,
    /// That of the first token, which is there for nothing else.
    First,
}

impl Encoder {
    /// Loads a model, to be run on so many threads.
    ///
    /// # Errors
    /// When a file is missing, or is not what it should be.
    pub fn open(folder: &Path, threads: u32) -> Result<Self, SeamError> {
        let (bytes, words) = (read(folder, "model.onnx")?, read(folder, "tokenizer.json")?);
        let config = json(folder, "config.json", &read(folder, "config.json")?)?;
        let positions = config["max_position_embeddings"].as_u64().unwrap_or(u64::MAX);
        let max_tokens = usize::try_from(positions).unwrap_or(usize::MAX).clamp(2, MAX_TOKENS);
        let pooling = Pooling::told(folder)?;
        let tokenizer = Tokenizer::parse(&words).map_err(|why| unusable(folder, "tokenizer.json", why))?;
        if !onnx::is_whole(&bytes) {
            return Err(unusable(folder, "model.onnx", "it is cut off or damaged"));
        }
        let exact = &config["quantization_config"]["modules_to_not_convert"];
        let exact: Option<Vec<String>> = serde_json::from_value(exact.clone())
            .map_err(|why| unusable(folder, "config.json", format!("modules_to_not_convert: {why}")))?;
        let exact = exact.unwrap_or_default();
        let bytes = match exact.is_empty() {
            true => bytes,
            false => onnx::unquantised(&bytes, &exact).map_err(|why| unusable(folder, "model.onnx", why))?,
        };

        let prompts = optional(folder, "config_sentence_transformers.json")?;
        let prompt = |of: &str| prompts["prompts"][of].as_str().unwrap_or_default().to_owned();
        let (query, passage) = (prompt("query"), prompt("passage"));

        let mut sum = Xxh3::new();
        sum.update(&[VERSION, pooling as u8]);
        sum.update(&(max_tokens as u64).to_le_bytes());
        for part in [query.as_bytes(), passage.as_bytes(), &words, &bytes] {
            sum.update(&(part.len() as u64).to_le_bytes());
            sum.update(part);
        }
        let called = folder.file_name().map_or("embedder".into(), |name| name.to_string_lossy());
        let name = format!("{called}-{:012x}", sum.digest() >> 16);
        let info = EmbedderInfo { name, dimensions: 0, max_tokens, query, passage };

        // With its weights packed once for all, a model reads a short text twice as fast.
        let model = ModelOptions::with_all_ops().prepack_weights(true).load(bytes);
        let model = model.map_err(|why| unusable(folder, "model.onnx", why))?;
        let inputs = inputs(&model).map_err(|why| unusable(folder, "model.onnx", why))?;
        let output = model.output_ids().first().copied();
        let output = output.ok_or_else(|| unusable(folder, "model.onnx", "it has no output"))?;
        let threads = Arc::new(ThreadPool::with_num_threads(threads.max(1) as usize));
        let one_thread = Arc::new(ThreadPool::with_num_threads(1));
        let together = false;
        let mut encoder =
            Self { model, tokenizer, inputs, output, pooling, info, together, threads, one_thread };
        encoder.try_out().map_err(|why| unusable(folder, "model.onnx", why.why))?;
        Ok(encoder)
    }

    /// The tokens of a text, as many as are read.
    #[must_use]
    pub fn tokenize(&self, text: &str) -> Vec<i32> {
        self.tokenizer.tokenize(text, self.info.max_tokens)
    }

    /// Finds out what only a run can tell: how long the vectors are, and whether texts change each other's.
    fn try_out(&mut self) -> Result<(), SeamError> {
        let texts = ["The gun on the wall", "ÉCLAIR 42", "=> { x += 1; }", "不 or not"].map(|text| {
            let mut tokens = self.tokenize(text);
            tokens.resize(8, tokens[0]);
            tokens
        });
        let alone = self.encode(&texts[..1])?;
        // Some were made for one text at a time, and fail with several.
        self.together = self.encode(&texts).is_ok_and(|together| together[0] == alone[0]);
        self.info.dimensions = alone[0].len();
        Ok(())
    }
}

impl Encode for Encoder {
    fn info(&self) -> &EmbedderInfo {
        &self.info
    }

    fn together(&self) -> bool {
        self.together
    }

    fn tokenize(&self, text: &str) -> Vec<i32> {
        self.tokenize(text)
    }

    fn encode(&self, texts: &[Vec<i32>]) -> Result<Vec<Vec<f32>>, SeamError> {
        let shape = [texts.len(), texts.first().map_or(0, Vec::len)];
        let tokens = texts.concat();
        let (ones, zeros) = (vec![1; tokens.len()], vec![0; tokens.len()]);
        let mut inputs = Vec::new();
        for &(node, input) in &self.inputs {
            let numbers = match input {
                Input::Tokens => &tokens,
                Input::Mask => &ones,
                Input::Kinds => &zeros,
            };
            inputs.push((node, ValueView::from_shape(shape, numbers.as_slice()).map_err(failed)?.into()));
        }
        let threads = if tokens.len() < SHORT { &self.one_thread } else { &self.threads };
        let options = RunOptions::default().with_thread_pool(Some(Arc::clone(threads)));
        let [output] = self.model.run_n(inputs, [self.output], Some(options)).map_err(failed)?;
        let ([texts, tokens, dimensions], numbers) = output.into_shape_vec::<f32, 3>().map_err(failed)?;
        if [texts, tokens] != shape || numbers.is_empty() {
            return Err(failed(format!(
                "it gave {texts} × {tokens} × {dimensions} numbers for {shape:?} tokens"
            )));
        }
        let pooled = numbers.chunks_exact(tokens * dimensions).map(|rows| self.pooling.of(rows, dimensions));
        pooled
            .map(|vector| vector.ok_or_else(|| failed("it gave what is no number, or nothing but 0")))
            .collect()
    }
}

impl Embedder for Encoder {
    fn info(&mut self) -> Result<EmbedderInfo, SeamError> {
        Ok(self.info.clone())
    }

    fn embed(&mut self, texts: &[&str]) -> Result<Vec<Vec<f32>>, SeamError> {
        worker::embed(self, texts)
    }
}

impl Pooling {
    /// As the folder says; where it says nothing, the mean.
    fn told(folder: &Path) -> Result<Self, SeamError> {
        const FILE: &str = "1_Pooling/config.json";
        let told = optional(folder, FILE)?;
        let set = |mode: &str| told[format!("pooling_mode_{mode}")].as_bool().unwrap_or(false);
        match (set("cls_token"), set("mean_tokens")) {
            (true, false) => Ok(Self::First),
            (false, true) => Ok(Self::Mean),
            (false, false) if told.is_null() => Ok(Self::Mean),
            _ => Err(unusable(folder, FILE, "only the mean or the first token is understood")),
        }
    }

    /// One vector of length 1 out of those of a text's tokens; none where there is nothing to give a direction.
    fn of(self, rows: &[f32], dimensions: usize) -> Option<Vec<f32>> {
        let mut rows = rows.chunks_exact(dimensions);
        let mut vector = rows.next()?.to_vec();
        if self == Self::Mean {
            // A sum points where the mean does.
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

/// What the model asks for, by the names that such models have for it.
fn inputs(model: &Model) -> Result<Vec<(NodeId, Input)>, String> {
    let input = |&node: &NodeId| {
        let about = model.node_info(node);
        let name = about.as_ref().and_then(|about| about.name()).unwrap_or_default();
        let input = match name {
            "input_ids" => Input::Tokens,
            "attention_mask" => Input::Mask,
            "token_type_ids" => Input::Kinds,
            _ => return Err(format!("it asks for '{name}', and no sentence encoder does")),
        };
        Ok((node, input))
    };
    model.input_ids().iter().map(input).collect()
}

fn read(folder: &Path, file: &str) -> Result<Vec<u8>, SeamError> {
    std::fs::read(folder.join(file)).map_err(|error| {
        let why = format!("{}: {error}; `halo models pull` fetches one", folder.join(file).display());
        SeamError::new("loading the embedder", why)
    })
}

/// A file that need not be there.
fn optional(folder: &Path, file: &str) -> Result<Value, SeamError> {
    match std::fs::read(folder.join(file)) {
        Ok(bytes) => json(folder, file, &bytes),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Value::Null),
        Err(error) => Err(unusable(folder, file, error)),
    }
}

fn json(folder: &Path, file: &str, bytes: &[u8]) -> Result<Value, SeamError> {
    serde_json::from_slice(bytes).map_err(|error| unusable(folder, file, error))
}

fn unusable(folder: &Path, file: &str, why: impl Display) -> SeamError {
    let (path, name) = (folder.join(file), folder.file_name().unwrap_or_default().to_string_lossy());
    let again = format!("if it was pulled, `halo models pull {name} --force` fetches it anew");
    let why = format!("{} cannot be used: {why}; {again}", path.display());
    SeamError::new("loading the embedder", why)
}

fn failed(why: impl Display) -> SeamError {
    SeamError::new("running the embedder", why.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_or_the_first_is_made_one_long() {
        let rows = [3.0, 0.0, 3.0, 8.0];
        assert_eq!(Pooling::Mean.of(&rows, 2), Some(vec![0.6, 0.8]));
        assert_eq!(Pooling::First.of(&rows, 2), Some(vec![1.0, 0.0]));
        for none in [vec![], vec![0.0; 4], vec![f32::NAN, 1.0], vec![f32::INFINITY, 1.0]] {
            assert_eq!(Pooling::Mean.of(&none, 2), None, "{none:?}");
        }
    }

    #[test]
    fn a_folder_says_how_it_pools() {
        let folder = tempfile::tempdir().expect("made");
        let path = folder.path();
        assert_eq!(Pooling::told(path), Ok(Pooling::Mean), "where nothing is said");
        std::fs::create_dir(path.join("1_Pooling")).expect("made");
        let told = |text: &str| {
            std::fs::write(path.join("1_Pooling/config.json"), text).expect("written");
            Pooling::told(path).map_err(|e| e.to_string())
        };
        assert_eq!(
            told(r#"{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}"#),
            Ok(Pooling::Mean)
        );
        assert_eq!(told(r#"{"pooling_mode_cls_token": true}"#), Ok(Pooling::First));
        for other in ["{", "{}", r#"{"pooling_mode_max_tokens": true}"#] {
            assert!(told(other).is_err_and(|e| e.contains("config.json cannot be used")), "{other}");
        }
    }
}
