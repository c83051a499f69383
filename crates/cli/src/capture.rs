//! Captures on disk: what a model was given, and each step that followed with its attention.
//!
//! A capture is a folder with `capture.json` and `steps.jsonl`; folders of the Halo Weave front end
//! (`metadata.json`, `token_%05d_meta.json`, `token_%05d_attn.bin`) are read too. Steps are read one at a
//! time, so a capture may be larger than memory.

use crate::settings::Settings;
use crate::settings::value::{Heads, Layers};
use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use halo_core::replay::{Recorded, Step};
use halo_core::token::{Brightness, ChunkId, Role, TokenId, TurnId};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

/// The newest version of the format that this program reads and writes.
const VERSION: u32 = 1;

/// How layers and heads are reduced, where a capture holds all of them.
#[derive(Clone, Debug)]
pub struct Reduction {
    layers: Layers,
    heads: Heads,
}

impl Default for Reduction {
    fn default() -> Self {
        Self::of(&Settings::default())
    }
}

impl Reduction {
    /// As the settings say.
    #[must_use]
    pub fn of(settings: &Settings) -> Self {
        Self { layers: settings.layers.clone(), heads: settings.heads }
    }
}

/// A capture that is open.
pub struct Capture {
    /// The model that was recorded.
    pub model: String,
    /// The settings at the time, as they were written.
    pub settings: serde_json::Value,
    /// What the model was given.
    pub prompt: Vec<Recorded>,
    steps: Steps,
    reduction: Reduction,
}

enum Steps {
    Lines { path: PathBuf, lines: std::io::Lines<BufReader<File>>, number: usize },
    Files { folder: PathBuf, names: std::vec::IntoIter<String> },
}

#[derive(Serialize, Deserialize)]
struct Head {
    #[serde(default = "first_version")]
    version: u32,
    #[serde(default)]
    model: String,
    #[serde(default)]
    settings: serde_json::Value,
    prompt: Vec<PromptToken>,
}

fn first_version() -> u32 {
    VERSION
}

#[derive(Serialize, Deserialize)]
struct PromptToken {
    id: u32,
    text: String,
    position: u64,
    turn: u32,
    sentence: u32,
    role: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    brightness: Option<f32>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pinned: bool,
}

#[derive(Serialize, Deserialize)]
struct StepLine {
    token: StepToken,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attention: Option<Vec<Option<f32>>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attention_b64: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct StepToken {
    id: u32,
    text: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    position: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    turn: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sentence: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    role: Option<String>,
}

impl Capture {
    /// Opens the capture in `folder`, in either format.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn open(folder: &Path) -> Result<Self> {
        let (own, weave) = (folder.join("capture.json"), folder.join("metadata.json"));
        if own.is_file() {
            Self::open_own(&own, &folder.join("steps.jsonl"))
        } else if weave.is_file() {
            Self::open_weave(&weave, folder)
        } else {
            let what = if folder.is_dir() {
                "holds neither capture.json nor metadata.json"
            } else {
                "is not a folder"
            };
            bail!(
                "{} {what}: a capture is a folder with capture.json and steps.jsonl, or one that Halo Weave wrote",
                folder.display()
            )
        }
    }

    fn open_own(head: &Path, steps: &Path) -> Result<Self> {
        let head_text = read(head)?;
        let head: Head = parse(head, &head_text)?;
        ensure!(
            head.version <= VERSION,
            "this capture is of version {}, and this halo reads up to version {VERSION}: use a newer halo",
            head.version
        );
        let prompt =
            head.prompt.into_iter().enumerate().map(|(i, t)| t.recorded(i)).collect::<Result<_>>()?;
        let file = File::open(steps).with_context(|| format!("cannot open {}", steps.display()))?;
        let steps = Steps::Lines { path: steps.to_owned(), lines: BufReader::new(file).lines(), number: 0 };
        Ok(Self {
            model: head.model,
            settings: head.settings,
            prompt,
            steps,
            reduction: Reduction::default(),
        })
    }

    /// How attention of all layers and heads is to be reduced.
    pub fn reduce_by(&mut self, reduction: Reduction) {
        self.reduction = reduction;
    }

    /// The settings at the time, key by key; tables within tables are written with dots.
    pub fn recorded_settings(&self) -> Vec<(String, String)> {
        fn flatten(prefix: &str, value: &serde_json::Value, out: &mut Vec<(String, String)>) {
            match value {
                serde_json::Value::Object(table) => {
                    for (key, value) in table {
                        let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                        flatten(&key, value, out);
                    }
                }
                serde_json::Value::Null => {}
                serde_json::Value::String(text) => out.push((prefix.to_owned(), text.clone())),
                other => out.push((prefix.to_owned(), other.to_string())),
            }
        }
        let mut out = Vec::new();
        flatten("", &self.settings, &mut out);
        out
    }

    /// The next step, or none at the end.
    ///
    /// # Errors
    /// When it cannot be read; the error says which.
    pub fn next_step(&mut self) -> Result<Option<Step>> {
        match &mut self.steps {
            Steps::Lines { path, lines, number } => loop {
                *number += 1;
                let place = || format!("{}:{number}", path.display());
                let Some(line) = lines.next() else { return Ok(None) };
                let line = line.with_context(place)?;
                if line.trim().is_empty() {
                    continue;
                }
                let step: StepLine = serde_json::from_str(&line).with_context(place)?;
                return step.step().with_context(place).map(Some);
            },
            Steps::Files { folder, names } => {
                let Some(name) = names.next() else { return Ok(None) };
                weave_step(folder, &name, &self.reduction).map(Some)
            }
        }
    }

    /// Writes this capture, with the steps that are still to come, as a folder of Halo's own format.
    ///
    /// # Errors
    /// When the folder holds a capture already, or cannot be written.
    pub fn save(mut self, folder: &Path) -> Result<usize> {
        let head_path = folder.join("capture.json");
        ensure!(!head_path.exists(), "{} holds a capture already: name another folder", folder.display());
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let prompt = self.prompt.iter().map(PromptToken::of).collect();
        let head =
            Head { version: VERSION, model: self.model.clone(), settings: self.settings.clone(), prompt };
        let steps = folder.join("steps.jsonl");
        let wrong = || format!("cannot write {}", steps.display());
        let mut out = BufWriter::new(File::create(&steps).with_context(wrong)?);
        let mut count = 0;
        while let Some(step) = self.next_step()? {
            serde_json::to_writer(&mut out, &StepLine::of(&step)).with_context(wrong)?;
            out.write_all(b"\n").with_context(wrong)?;
            count += 1;
        }
        out.into_inner().map_err(|e| e.into_error()).and_then(|f| f.sync_all()).with_context(wrong)?;
        // The head is written last: a folder without it is no capture, so a half-written one is never read.
        let head = serde_json::to_string_pretty(&head)?;
        std::fs::write(&head_path, head).with_context(|| format!("cannot write {}", head_path.display()))?;
        Ok(count)
    }

    fn open_weave(head: &Path, folder: &Path) -> Result<Self> {
        let text = read(head)?;
        let meta: WeaveHead = parse(head, &text)?;
        let token = |(i, t): (usize, WeavePrompt)| {
            let token = PromptToken {
                id: t.token_id,
                text: t.text,
                position: t.position,
                turn: t.turn_id,
                sentence: t.sentence_id,
                role: t.message_role,
                brightness: None,
                pinned: false,
            };
            token.recorded(i)
        };
        let prompt = meta.prompt_tokens.into_iter().enumerate().map(token).collect::<Result<_>>()?;
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let number = name.strip_prefix("token_").and_then(|n| n.strip_suffix("_meta.json"));
            names.extend(number.filter(|n| n.bytes().all(|b| b.is_ascii_digit())).map(str::to_owned));
        }
        names.sort_by_key(|n| (n.len(), n.clone()));
        let steps = Steps::Files { folder: folder.to_owned(), names: names.into_iter() };
        let model = meta.model.as_str().map_or_else(|| meta.model.to_string(), str::to_owned);
        let settings = serde_json::json!({});
        Ok(Self { model, settings, prompt, steps, reduction: Reduction::default() })
    }
}

impl PromptToken {
    fn recorded(self, i: usize) -> Result<Recorded> {
        let role = role(&self.role).with_context(|| format!("token {i} of the prompt"))?;
        Ok(Recorded {
            id: TokenId(self.id),
            text: self.text,
            position: self.position,
            chunk: ChunkId::new(role, TurnId(self.turn), self.sentence),
            brightness: self.brightness.map(Brightness),
            pinned: self.pinned,
        })
    }

    fn of(token: &Recorded) -> Self {
        Self {
            id: token.id.0,
            text: token.text.clone(),
            position: token.position,
            turn: token.chunk.turn.0,
            sentence: token.chunk.sentence,
            role: token.chunk.role.name().into(),
            brightness: token.brightness.map(|b| b.0),
            pinned: token.pinned,
        }
    }
}

impl StepLine {
    fn step(self) -> Result<Step> {
        let attention = match (self.attention, self.attention_b64) {
            (Some(_), Some(_)) => bail!("it has both attention and attention_b64: one is enough"),
            // JSON has no way to write what is no number but null; scoring will report it.
            (Some(row), None) => Some(row.into_iter().map(|a| a.unwrap_or(f32::NAN)).collect()),
            (None, Some(text)) => {
                let bytes = base64::engine::general_purpose::STANDARD.decode(text);
                Some(floats(&bytes.context("attention_b64 is not base64")?)?)
            }
            (None, None) => None,
        };
        let StepToken { id, text, position, turn, sentence, role: name } = self.token;
        let turn = match (turn, name) {
            (Some(turn), Some(name)) => Some((TurnId(turn), role(&name)?)),
            (None, None) => None,
            _ => bail!("turn and role go together: give both or neither"),
        };
        Ok(Step { id: TokenId(id), text, position, turn, sentence, attention })
    }

    fn of(step: &Step) -> Self {
        let encode = |row: &Vec<f32>| {
            let bytes: Vec<u8> = row.iter().flat_map(|a| a.to_le_bytes()).collect();
            base64::engine::general_purpose::STANDARD.encode(bytes)
        };
        let token = StepToken {
            id: step.id.0,
            text: step.text.clone(),
            position: step.position,
            turn: step.turn.map(|(turn, _)| turn.0),
            sentence: step.sentence,
            role: step.turn.map(|(_, role)| role.name().into()),
        };
        Self { token, attention: None, attention_b64: step.attention.as_ref().map(encode) }
    }
}

#[derive(Deserialize)]
struct WeaveHead {
    #[serde(default)]
    model: serde_json::Value,
    prompt_tokens: Vec<WeavePrompt>,
}

#[derive(Deserialize)]
struct WeavePrompt {
    token_id: u32,
    text: String,
    position: u64,
    turn_id: u32,
    message_role: String,
    sentence_id: u32,
}

#[derive(Deserialize)]
struct WeaveStep {
    token_id: u32,
    text: String,
    #[serde(default)]
    position: Option<u64>,
    #[serde(default)]
    attention_shape: Option<Vec<usize>>,
}

fn weave_step(folder: &Path, number: &str, reduction: &Reduction) -> Result<Step> {
    let path = folder.join(format!("token_{number}_meta.json"));
    let text = read(&path)?;
    let meta: WeaveStep = parse(&path, &text)?;
    let path = folder.join(format!("token_{number}_attn.bin"));
    let attention = if path.is_file() {
        let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let values = floats(&bytes).with_context(|| path.display().to_string())?;
        let row = reduce(&values, meta.attention_shape.as_deref(), reduction);
        Some(row.with_context(|| path.display().to_string())?)
    } else {
        None
    };
    let (id, text, position) = (TokenId(meta.token_id), meta.text, meta.position);
    Ok(Step { id, text, position, turn: None, sentence: None, attention })
}

/// Reduces attention of shape `[layers, heads, slots]` to one row.
fn reduce(values: &[f32], shape: Option<&[usize]>, reduction: &Reduction) -> Result<Vec<f32>> {
    let (layers, heads, slots) = match shape {
        None | Some([] | [_]) => return Ok(values.to_vec()),
        Some(&[layers, heads, slots]) => (layers, heads, slots),
        Some(other) => bail!("attention of shape {other:?}: [slots] or [layers, heads, slots] is known"),
    };
    let expected = layers.checked_mul(heads).and_then(|n| n.checked_mul(slots));
    ensure!(
        expected == Some(values.len()),
        "{} values do not fill the shape {layers} × {heads} × {slots}",
        values.len()
    );
    ensure!(layers * heads * slots > 0, "attention of shape {layers} × {heads} × {slots} is empty");
    let chosen: Vec<usize> = match &reduction.layers {
        Layers::Mean | Layers::Max => (0..layers).collect(),
        Layers::Last => vec![layers - 1],
        Layers::List(list) => list.iter().map(|&l| l as usize).collect(),
    };
    if let Some(layer) = chosen.iter().find(|&&l| l >= layers) {
        bail!("brightness.layers names layer {layer}, but the capture has layers 0 to {}", layers - 1);
    }
    // Sums in single precision, in the order of the heads, then one product: the original's arithmetic.
    let mean = reduction.heads == Heads::Mean && reduction.layers != Layers::Max;
    let share = (1.0 / (chosen.len() * heads) as f64) as f32;
    let row_of = |layer: usize, head: usize| &values[(layer * heads + head) * slots..][..slots];
    let mut out = vec![0.0f32; slots];
    for &layer in &chosen {
        let mut of_layer = vec![0.0f32; slots];
        for head in 0..heads {
            for (sum, &a) in of_layer.iter_mut().zip(row_of(layer, head)) {
                match reduction.heads {
                    Heads::Mean => *sum += a,
                    Heads::Max => *sum = sum.max(a),
                }
            }
        }
        for (sum, a) in out.iter_mut().zip(of_layer) {
            match reduction.layers {
                Layers::Max => {
                    *sum = sum.max(if reduction.heads == Heads::Mean { a / heads as f32 } else { a });
                }
                _ => *sum += a,
            }
        }
    }
    if mean {
        out.iter_mut().for_each(|a| *a *= share);
    } else if reduction.layers != Layers::Max {
        out.iter_mut().for_each(|a| *a /= chosen.len() as f32);
    }
    Ok(out)
}

fn role(name: &str) -> Result<Role> {
    Role::from_name(name).with_context(|| format!("'{name}' is no role: system, user and assistant are"))
}

fn floats(bytes: &[u8]) -> Result<Vec<f32>> {
    let (values, rest) = bytes.as_chunks::<4>();
    ensure!(rest.is_empty(), "{} bytes are no whole number of 32-bit floats", bytes.len());
    Ok(values.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn parse<'a, T: Deserialize<'a>>(path: &Path, text: &'a str) -> Result<T> {
    serde_json::from_str(text).with_context(|| path.display().to_string())
}
