//! Captures on disk: what a model was given, and each step that followed with its attention.
//!
//! A capture is a folder with `capture.json` and `steps.jsonl`; folders of the Halo Weave front end
//! (`metadata.json`, `token_%05d_meta.json`, `token_%05d_attn.bin`) are read too. Steps are read one at a
//! time, so a capture may be larger than memory.

mod record;

pub use record::Recording;

use crate::settings::Settings;
use crate::settings::value::{Heads, Layers, Value as _};
use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use halo_core::replay::{Recorded, Step};
use halo_core::token::{Brightness, ChunkId, Role, TokenId, TurnId, Voice};
use halo_server::{Captured, CapturedPart, CapturedStep};
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

/// What a capture folder may hold, in either format; none of it is ever overwritten.
const FILES: [&str; 3] = ["capture.json", "steps.jsonl", "metadata.json"];

/// A capture that is open.
pub struct Capture {
    /// The model that was recorded.
    pub model: String,
    /// The settings at the time, as they were written.
    pub settings: serde_json::Value,
    /// What stood before the conversation.
    pub prefix: Vec<PrefixToken>,
    /// What the model was given.
    pub prompt: Vec<Recorded>,
    steps: Steps,
    reduction: Reduction,
    /// What is odd about it, for the user to know.
    pub notes: Vec<String>,
}

enum Steps {
    Lines { path: PathBuf, lines: std::io::Lines<BufReader<File>>, number: usize },
    Files { folder: PathBuf, names: std::vec::IntoIter<String> },
}

#[derive(Serialize, Deserialize)]
#[serde(expecting = "an object with version, model, settings and prompt")]
struct Head {
    #[serde(default = "first_version")]
    version: u32,
    #[serde(default)]
    model: String,
    #[serde(default)]
    settings: serde_json::Value,
    /// What stood before the conversation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    prefix: Vec<PrefixToken>,
    prompt: Vec<PromptToken>,
}

/// A token of the standing instructions.
#[derive(Clone, Serialize, Deserialize)]
#[serde(expecting = "an object with id and text")]
pub struct PrefixToken {
    id: u32,
    text: String,
}

fn first_version() -> u32 {
    VERSION
}

#[derive(Serialize, Deserialize)]
#[serde(expecting = "an object with id, text, position, turn, sentence and role")]
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
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    tool: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    frame: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(expecting = "an object with token and attention")]
struct StepLine {
    token: StepToken,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attention: Option<Vec<Option<f32>>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attention_b64: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(expecting = "an object with id and text")]
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
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    tool: bool,
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
            let mut within: Vec<String> = std::fs::read_dir(folder).map_or_else(
                |_| Vec::new(),
                |all| {
                    let captures = all.flatten().filter(|e| e.path().join("capture.json").is_file());
                    captures.map(|e| e.path().display().to_string()).collect()
                },
            );
            within.sort_by_key(|name| (name.len(), name.clone()));
            if let [first, ..] = within.as_slice() {
                bail!(
                    "{} holds {} captures: name one of them, such as {first}",
                    folder.display(),
                    within.len()
                );
            }
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

    fn open_own(path: &Path, steps: &Path) -> Result<Self> {
        let text = read(path)?;
        let head: Head = parse(path, &text)?;
        ensure!(
            head.version <= VERSION,
            "{} is of version {}, and this halo reads up to version {VERSION}: use a newer halo",
            path.display(),
            head.version
        );
        let table = head.settings.is_object() || head.settings.is_null();
        ensure!(table, "{}: settings must be an object of keys and values", path.display());
        let prompt = recorded(path, head.prompt)?;
        let file = File::open(steps).with_context(|| format!("cannot open {}", steps.display()))?;
        let steps = Steps::Lines { path: steps.to_owned(), lines: BufReader::new(file).lines(), number: 0 };
        let (model, settings, reduction) = (head.model, head.settings, Reduction::default());
        Ok(Self { model, settings, prefix: head.prefix, prompt, steps, reduction, notes: Vec::new() })
    }

    /// How attention of all layers and heads is to be reduced.
    pub fn reduce_by(&mut self, reduction: Reduction) {
        self.reduction = reduction;
    }

    /// Whether its steps hold one row each, so that there is nothing left to reduce.
    pub fn is_reduced(&self) -> bool {
        matches!(self.steps, Steps::Lines { .. })
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
                let line = if *number == 1 { line.trim_start_matches('\u{feff}') } else { &line };
                if line.trim().is_empty() {
                    continue;
                }
                let step: StepLine = serde_json::from_str(line).map_err(|e| {
                    // It is one line, whose number stands in front already.
                    let text = e.to_string().replace("at line 1 column", "at column");
                    anyhow::anyhow!("{}: {text}", place())
                })?;
                return step.step().with_context(place).map(Some);
            },
            Steps::Files { folder, names } => {
                let Some(name) = names.next() else { return Ok(None) };
                weave_step(folder, &name, &self.reduction).map(Some)
            }
        }
    }

    /// What each step looked at, part by part: the standing instructions, the chunks of the prompt, the answer itself.
    ///
    /// # Errors
    /// When a step cannot be read.
    pub fn by_part(mut self) -> Result<Captured> {
        let instructions = self.prefix.iter().map(|token| token.text.as_str()).collect();
        let mut parts = vec![CapturedPart { chunk: String::new(), text: instructions }];
        let mut part_of = vec![0; self.prefix.len()];
        for chunk in self.prompt.chunk_by(|one, next| one.chunk == next.chunk) {
            part_of.extend(std::iter::repeat_n(parts.len(), chunk.len()));
            let said = chunk.iter().filter(|token| token.voice != Voice::Frame);
            let text = said.map(|token| token.text.as_str()).collect();
            parts.push(CapturedPart { chunk: chunk[0].chunk.to_string(), text });
        }
        // What stands before the first word of an answer is its beginning.
        if parts.len() > 1 && parts.last().is_some_and(|part| part.text.is_empty()) {
            parts.pop();
        }
        let answer = parts.len();
        parts.push(CapturedPart { chunk: String::new(), text: String::new() });
        let mut steps = Vec::new();
        while let Some(step) = self.next_step()? {
            let mut shares = Vec::new();
            if let Some(Ok(row)) = &step.attention {
                shares.resize(parts.len(), 0.0);
                for (slot, share) in row.iter().enumerate() {
                    shares[part_of.get(slot).copied().unwrap_or(answer)] += share;
                }
            }
            parts[answer].text.push_str(&step.text);
            steps.push(CapturedStep { text: step.text, shares });
        }
        Ok(Captured { parts, steps })
    }

    /// Writes this capture, with the steps that are still to come, as a folder of Halo's own format.
    ///
    /// # Errors
    /// When the folder holds a capture already, or cannot be written.
    pub fn save(mut self, folder: &Path) -> Result<usize> {
        let head_path = folder.join("capture.json");
        check_free(folder)?;
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        if let (Steps::Files { .. }, Some(settings)) = (&self.steps, self.settings.as_object_mut()) {
            // One row a step is written: how it came about is part of what was recorded.
            settings.insert("brightness.layers".into(), self.reduction.layers.json());
            settings.insert("brightness.heads".into(), self.reduction.heads.json());
        }
        let prompt = self.prompt.iter().map(PromptToken::of).collect();
        let head = Head {
            version: VERSION,
            model: self.model.clone(),
            settings: self.settings.clone(),
            prefix: self.prefix.clone(),
            prompt,
        };
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
        let token = |t: WeavePrompt| PromptToken {
            id: t.token_id,
            text: t.text,
            position: t.position,
            turn: t.turn_id,
            sentence: t.sentence_id,
            role: t.message_role,
            brightness: None,
            pinned: false,
            tool: false,
            frame: false,
        };
        let prompt = recorded(head, meta.prompt_tokens.into_iter().map(token).collect())?;
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let number = name.strip_prefix("token_").and_then(|n| n.strip_suffix("_meta.json"));
            names.extend(number.filter(|n| n.bytes().all(|b| b.is_ascii_digit())).map(str::to_owned));
        }
        names.sort_by_key(|n| (n.len(), n.clone()));
        let mut notes = Vec::new();
        let numbers: Vec<u64> = names.iter().filter_map(|n| n.parse().ok()).collect();
        for gap in numbers.windows(2).filter(|w| w[1].saturating_sub(w[0]) > 1) {
            notes.push(format!("steps {} to {} are missing from the capture", gap[0] + 1, gap[1] - 1));
        }
        let steps = Steps::Files { folder: folder.to_owned(), names: names.into_iter() };
        let model = match meta.model {
            serde_json::Value::Null => String::new(),
            serde_json::Value::String(name) => name,
            other => other.to_string(),
        };
        let settings = serde_json::json!({});
        Ok(Self {
            model,
            settings,
            prefix: Vec::new(),
            prompt,
            steps,
            reduction: Reduction::default(),
            notes,
        })
    }
}

/// Whether a capture can be written to a folder without touching anything that is there.
///
/// # Errors
/// When the folder holds a capture, or a part of one.
pub fn check_free(folder: &Path) -> Result<()> {
    for name in FILES {
        let taken = folder.join(name).exists();
        ensure!(!taken, "{} holds a capture already ({name}): name another folder", folder.display());
    }
    Ok(())
}

fn recorded(path: &Path, prompt: Vec<PromptToken>) -> Result<Vec<Recorded>> {
    let token = |(i, token): (usize, PromptToken)| {
        token.recorded().with_context(|| format!("{}: token {} of the prompt", path.display(), i + 1))
    };
    prompt.into_iter().enumerate().map(token).collect()
}

impl PromptToken {
    fn recorded(self) -> Result<Recorded> {
        let role = role(&self.role)?;
        let finite = self.brightness.is_none_or(f32::is_finite);
        ensure!(finite, "its brightness is larger than any number that can be kept");
        Ok(Recorded {
            id: TokenId(self.id),
            text: self.text,
            position: self.position,
            chunk: ChunkId::new(role, TurnId(self.turn), self.sentence),
            brightness: self.brightness.map(Brightness),
            pinned: self.pinned,
            voice: match (self.tool, self.frame) {
                (true, _) => Voice::Tool,
                (_, true) => Voice::Frame,
                _ => Voice::Speaker,
            },
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
            tool: token.voice == Voice::Tool,
            frame: token.voice == Voice::Frame,
        }
    }
}

impl StepLine {
    fn step(self) -> Result<Step> {
        let attention = match (self.attention, self.attention_b64) {
            (Some(_), Some(_)) => bail!("it has both attention and attention_b64: one is enough"),
            // JSON has no way to write what is no number but null; scoring will report it.
            (Some(row), None) => Some(Ok(row.into_iter().map(|a| a.unwrap_or(f32::NAN)).collect())),
            (None, Some(text)) => {
                let bytes = base64::engine::general_purpose::STANDARD.decode(text);
                let bytes = bytes.map_err(|e| format!("attention_b64 is not base64: {e}"));
                Some(bytes.and_then(|bytes| floats(&bytes)))
            }
            (None, None) => None,
        };
        let StepToken { id, text, position, turn, sentence, role: name, tool } = self.token;
        let turn = match (turn, name) {
            (Some(turn), Some(name)) => Some((TurnId(turn), role(&name)?)),
            (None, None) => None,
            _ => bail!("turn and role go together: give both or neither"),
        };
        Ok(Step { id: TokenId(id), text, position, turn, sentence, tool, attention })
    }

    fn of(step: &Step) -> Self {
        // What could not be read is written as a row that says so when it is scored.
        let row = step.attention.as_ref().map(|row| row.clone().unwrap_or_else(|_| vec![f32::NAN]));
        let encode = |row: Vec<f32>| {
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
            tool: step.tool,
        };
        Self { token, attention: None, attention_b64: row.map(encode) }
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
        let shape = meta.attention_shape.as_deref();
        Some(floats(&bytes).and_then(|values| reduce(&values, shape, reduction)))
    } else {
        None
    };
    let (id, text, position) = (TokenId(meta.token_id), meta.text, meta.position);
    Ok(Step { id, text, position, turn: None, sentence: None, tool: false, attention })
}

/// Reduces attention of shape `[layers, heads, slots]` to one row.
fn reduce(values: &[f32], shape: Option<&[usize]>, reduction: &Reduction) -> Result<Vec<f32>, String> {
    let (layers, heads, slots) = match shape {
        None | Some([] | [_]) => return Ok(values.to_vec()),
        Some(&[layers, heads, slots]) => (layers, heads, slots),
        Some(other) => {
            return Err(format!("attention of shape {other:?}: [slots] or [layers, heads, slots] is known"));
        }
    };
    let expected = layers.checked_mul(heads).and_then(|n| n.checked_mul(slots)).filter(|&n| n > 0);
    if expected != Some(values.len()) {
        return Err(format!("{} values do not fill the shape {layers} × {heads} × {slots}", values.len()));
    }
    // A maximum would hide what is no probability, so all of it is looked at first.
    if let Some(i) = values.iter().position(|a| !(0.0..=1.001).contains(a)) {
        let (row, slot) = (i / slots, i % slots);
        let (layer, head) = (row / heads, row % heads);
        let what = format!("attention of layer {layer}, head {head} at slot {slot}");
        return Err(format!("{what} is {}, which is no probability", values[i]));
    }
    let chosen: Vec<usize> = match &reduction.layers {
        Layers::Mean | Layers::Max => (0..layers).collect(),
        Layers::Last => vec![layers - 1],
        Layers::List(list) => list.iter().map(|&l| l as usize).collect(),
    };
    if let Some(layer) = chosen.iter().find(|&&l| l >= layers) {
        return Err(format!(
            "brightness.layers names layer {layer}, but the capture has layers 0 to {}",
            layers - 1
        ));
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
    let hint = if name == "tool" { "; a tool's result is the assistant's, with \"tool\": true" } else { "" };
    Role::from_name(name)
        .with_context(|| format!("'{name}' is no role: system, user and assistant are{hint}"))
}

fn floats(bytes: &[u8]) -> Result<Vec<f32>, String> {
    let (values, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(format!("{} bytes of attention are no whole number of 32-bit floats", bytes.len()));
    }
    Ok(values.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

fn read(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

fn parse<'a, T: Deserialize<'a>>(path: &Path, text: &'a str) -> Result<T> {
    serde_json::from_str(text).with_context(|| path.display().to_string())
}
