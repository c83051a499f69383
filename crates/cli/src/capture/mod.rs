//! Attention recordings (captures) on disk: the prompt, and each generated token with its attention.
//!
//! A capture is a folder with `capture.json` and `steps.jsonl`; folders of the Halo Weave front end
//! (`metadata.json`, `token_%05d_meta.json`, `token_%05d_attn.bin`) are read too. Steps are read one at a
//! time, so a capture may be larger than memory.

mod location;
mod recorder;

pub use location::{CaptureLocation, has_capture, locate_capture};
pub use recorder::CaptureRecorder;

use crate::settings::Settings;
use crate::settings::value::{HeadReduction, SettingValue as _};
use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use halo_core::attention::LayerReduction;
use halo_core::replay::{RecordedStep, RecordedToken};
use halo_core::token::{Brightness, ChunkId, ContentKind, Role, TokenId, TurnId};
use halo_server::{AttentionCapture, CaptureSegment, CaptureStep};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

/// The newest version of the format that this program reads and writes.
const FORMAT_VERSION: u32 = 1;

/// How attention is reduced over layers and heads, where a capture contains all of them.
#[derive(Clone, Debug)]
pub struct AttentionReduction {
    layers: LayerReduction,
    heads: HeadReduction,
}

impl Default for AttentionReduction {
    fn default() -> Self {
        Self::from_settings(&Settings::default())
    }
}

impl AttentionReduction {
    #[must_use]
    pub fn from_settings(settings: &Settings) -> Self {
        Self { layers: settings.brightness_layers.clone(), heads: settings.brightness_heads }
    }
}

/// Files of a capture folder, in either format; none is ever overwritten.
const CAPTURE_FILES: [&str; 3] = ["capture.json", "steps.jsonl", "metadata.json"];

pub struct Capture {
    pub model: String,
    /// The settings at the time of the recording, as written.
    pub settings: serde_json::Value,
    /// Tokens before the conversation: the system prompt.
    pub prefix: Vec<CapturePrefixToken>,
    pub prompt: Vec<RecordedToken>,
    steps: CaptureSteps,
    reduction: AttentionReduction,
    /// Oddities to report to the user.
    pub warnings: Vec<String>,
}

enum CaptureSteps {
    Jsonl { path: PathBuf, lines: std::io::Lines<BufReader<File>>, number: usize },
    WeaveFiles { folder: PathBuf, names: std::vec::IntoIter<String> },
}

#[derive(Serialize, Deserialize)]
#[serde(expecting = "an object with version, model, settings and prompt")]
struct CaptureHeader {
    #[serde(default = "default_version")]
    version: u32,
    #[serde(default)]
    model: String,
    #[serde(default)]
    settings: serde_json::Value,
    /// Tokens before the conversation: the system prompt.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    prefix: Vec<CapturePrefixToken>,
    prompt: Vec<CapturePromptToken>,
}

/// A token of the system prompt.
#[derive(Clone, Serialize, Deserialize)]
#[serde(expecting = "an object with id and text")]
pub struct CapturePrefixToken {
    id: u32,
    text: String,
}

fn default_version() -> u32 {
    FORMAT_VERSION
}

#[derive(Serialize, Deserialize)]
#[serde(expecting = "an object with id, text, position, turn, sentence and role")]
struct CapturePromptToken {
    id: u32,
    text: String,
    position: u64,
    turn: u32,
    #[serde(rename = "sentence")]
    chunk_index: u32,
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
struct CaptureStepLine {
    token: CaptureStepToken,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attention: Option<Vec<Option<f32>>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attention_b64: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(expecting = "an object with id and text")]
struct CaptureStepToken {
    id: u32,
    text: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    position: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    turn: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "sentence")]
    chunk_index: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    role: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    tool: bool,
}

impl Capture {
    /// Opens a capture folder in either format.
    pub fn open(folder: &Path) -> Result<Self> {
        let (halo_header, weave_header) = (folder.join("capture.json"), folder.join("metadata.json"));
        if halo_header.is_file() {
            Self::open_halo(&halo_header, &folder.join("steps.jsonl"))
        } else if weave_header.is_file() {
            Self::open_weave(&weave_header, folder)
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

    fn open_halo(path: &Path, steps: &Path) -> Result<Self> {
        let text = read_text_file(path)?;
        let head: CaptureHeader = parse_json_file(path, &text)?;
        ensure!(
            head.version <= FORMAT_VERSION,
            "{} has version {}, and this program reads versions up to {FORMAT_VERSION}: use a newer halo",
            path.display(),
            head.version
        );
        let table = head.settings.is_object() || head.settings.is_null();
        ensure!(table, "{}: settings must be an object of keys and values", path.display());
        let prompt = prompt_to_recorded(path, head.prompt)?;
        let file = File::open(steps).with_context(|| format!("cannot open {}", steps.display()))?;
        let steps =
            CaptureSteps::Jsonl { path: steps.to_owned(), lines: BufReader::new(file).lines(), number: 0 };
        let (model, settings, reduction) = (head.model, head.settings, AttentionReduction::default());
        Ok(Self { model, settings, prefix: head.prefix, prompt, steps, reduction, warnings: Vec::new() })
    }

    pub fn set_reduction(&mut self, reduction: AttentionReduction) {
        self.reduction = reduction;
    }

    /// Whether each step has a single row, so that nothing is left to reduce.
    pub fn is_reduced(&self) -> bool {
        matches!(self.steps, CaptureSteps::Jsonl { .. })
    }

    /// The recorded settings by key; nested tables become dotted keys.
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

    /// The next step; none at the end.
    pub fn next_step(&mut self) -> Result<Option<RecordedStep>> {
        match &mut self.steps {
            CaptureSteps::Jsonl { path, lines, number } => loop {
                *number += 1;
                let place = || format!("{}:{number}", path.display());
                let Some(line) = lines.next() else { return Ok(None) };
                let line = line.with_context(place)?;
                let line = if *number == 1 { line.trim_start_matches('\u{feff}') } else { &line };
                if line.trim().is_empty() {
                    continue;
                }
                let step: CaptureStepLine =
                    serde_json::from_str(line).map_err(|_| step_line_error(line)).with_context(place)?;
                return step.into_step().with_context(place).map(Some);
            },
            CaptureSteps::WeaveFiles { folder, names } => {
                let Some(name) = names.next() else { return Ok(None) };
                read_weave_step(folder, &name, &self.reduction).map(Some)
            }
        }
    }

    /// Each step's attention, summed per segment: the system prompt, the chunks of the prompt, the answer.
    pub fn attention_by_chunk(mut self) -> Result<AttentionCapture> {
        let instructions = self.prefix.iter().map(|token| token.text.as_str()).collect();
        let mut parts = vec![CaptureSegment { chunk: String::new(), text: instructions }];
        let mut part_of = vec![0; self.prefix.len()];
        for chunk in self.prompt.chunk_by(|one, next| one.chunk == next.chunk) {
            part_of.extend(std::iter::repeat_n(parts.len(), chunk.len()));
            let said = chunk.iter().filter(|token| token.kind != ContentKind::Template);
            let text = said.map(|token| token.text.as_str()).collect();
            parts.push(CaptureSegment { chunk: chunk[0].chunk.to_string(), text });
        }
        // Template tokens before the first word of the answer belong to the answer.
        if parts.len() > 1 && parts.last().is_some_and(|part| part.text.is_empty()) {
            parts.pop();
        }
        let answer = parts.len();
        parts.push(CaptureSegment { chunk: String::new(), text: String::new() });
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
            steps.push(CaptureStep { text: step.text, shares });
        }
        Ok(AttentionCapture { segments: parts, steps })
    }

    /// Writes this capture, with its remaining steps, in Halo's own format.
    pub fn save(mut self, folder: &Path) -> Result<usize> {
        let head_path = folder.join("capture.json");
        ensure_no_capture(folder)?;
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        if let (CaptureSteps::WeaveFiles { .. }, Some(settings)) =
            (&self.steps, self.settings.as_object_mut())
        {
            // One row per step is written, so how it was reduced is recorded with it.
            settings.insert("brightness.layers".into(), self.reduction.layers.to_json());
            settings.insert("brightness.heads".into(), self.reduction.heads.to_json());
        }
        let prompt = self.prompt.iter().map(CapturePromptToken::from_recorded).collect();
        let head = CaptureHeader {
            version: FORMAT_VERSION,
            model: self.model.clone(),
            settings: self.settings.clone(),
            prefix: self.prefix.clone(),
            prompt,
        };
        let steps = folder.join("steps.jsonl");
        let write_error = || format!("cannot write {}", steps.display());
        let mut out = BufWriter::new(File::create(&steps).with_context(write_error)?);
        let mut count = 0;
        while let Some(step) = self.next_step()? {
            serde_json::to_writer(&mut out, &CaptureStepLine::from_step(&step)).with_context(write_error)?;
            out.write_all(b"\n").with_context(write_error)?;
            count += 1;
        }
        out.into_inner().map_err(|e| e.into_error()).and_then(|f| f.sync_all()).with_context(write_error)?;
        // The header is written last: a folder without it is no capture, so an incomplete one is never read.
        let head = serde_json::to_string_pretty(&head)?;
        std::fs::write(&head_path, head).with_context(|| format!("cannot write {}", head_path.display()))?;
        Ok(count)
    }

    fn open_weave(head: &Path, folder: &Path) -> Result<Self> {
        let text = read_text_file(head)?;
        let meta: WeaveCaptureHeader = parse_json_file(head, &text)?;
        let token = |t: WeaveCapturePromptToken| CapturePromptToken {
            id: t.token_id,
            text: t.text,
            position: t.position,
            turn: t.turn_id,
            chunk_index: t.sentence_id,
            role: t.message_role,
            brightness: None,
            pinned: false,
            tool: false,
            frame: false,
        };
        let prompt = prompt_to_recorded(head, meta.prompt_tokens.into_iter().map(token).collect())?;
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
        let steps = CaptureSteps::WeaveFiles { folder: folder.to_owned(), names: names.into_iter() };
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
            reduction: AttentionReduction::default(),
            warnings: notes,
        })
    }
}

/// Whether a capture can be written to a folder without overwriting anything.
pub fn ensure_no_capture(folder: &Path) -> Result<()> {
    for name in CAPTURE_FILES {
        let taken = folder.join(name).exists();
        ensure!(!taken, "{} holds a capture already ({name}): name another folder", folder.display());
    }
    Ok(())
}

fn prompt_to_recorded(path: &Path, prompt: Vec<CapturePromptToken>) -> Result<Vec<RecordedToken>> {
    let token = |(i, token): (usize, CapturePromptToken)| {
        token.into_recorded().with_context(|| format!("{}: token {} of the prompt", path.display(), i + 1))
    };
    prompt.into_iter().enumerate().map(token).collect()
}

impl CapturePromptToken {
    fn into_recorded(self) -> Result<RecordedToken> {
        let role = parse_role(&self.role)?;
        let finite = self.brightness.is_none_or(f32::is_finite);
        ensure!(finite, "its brightness is not a finite number");
        Ok(RecordedToken {
            id: TokenId(self.id),
            text: self.text,
            position: self.position,
            chunk: ChunkId::new(role, TurnId(self.turn), self.chunk_index),
            brightness: self.brightness.map(Brightness),
            pinned: self.pinned,
            kind: match (self.tool, self.frame) {
                (true, _) => ContentKind::ToolResult,
                (_, true) => ContentKind::Template,
                _ => ContentKind::Message,
            },
        })
    }

    fn from_recorded(token: &RecordedToken) -> Self {
        Self {
            id: token.id.0,
            text: token.text.clone(),
            position: token.position,
            turn: token.chunk.turn.0,
            chunk_index: token.chunk.index,
            role: token.chunk.role.name().into(),
            brightness: token.brightness.map(|b| b.0),
            pinned: token.pinned,
            tool: token.kind == ContentKind::ToolResult,
            frame: token.kind == ContentKind::Template,
        }
    }
}

impl CaptureStepLine {
    fn into_step(self) -> Result<RecordedStep> {
        let attention = match (self.attention, self.attention_b64) {
            (Some(_), Some(_)) => bail!("it has both attention and attention_b64: one is enough"),
            // JSON has only null for values that are no number; scoring reports it.
            (Some(row), None) => Some(Ok(row.into_iter().map(|a| a.unwrap_or(f32::NAN)).collect())),
            (None, Some(text)) => {
                let bytes = base64::engine::general_purpose::STANDARD.decode(text);
                let bytes = bytes.map_err(|e| format!("attention_b64 is not base64: {e}"));
                Some(bytes.and_then(|bytes| decode_f32_le(&bytes)))
            }
            (None, None) => None,
        };
        let CaptureStepToken { id, text, position, turn, chunk_index: sentence, role: name, tool } =
            self.token;
        let turn = match (turn, name) {
            (Some(turn), Some(name)) => Some((TurnId(turn), parse_role(&name)?)),
            (None, None) => None,
            _ => bail!("turn and role go together: give both or neither"),
        };
        Ok(RecordedStep {
            id: TokenId(id),
            text,
            position,
            turn,
            chunk_index: sentence,
            tool_result: tool,
            attention,
        })
    }

    fn from_step(step: &RecordedStep) -> Self {
        // An unreadable row is written as one that scoring will report.
        let row = step.attention.as_ref().map(|row| row.clone().unwrap_or_else(|_| vec![f32::NAN]));
        let encode = |row: Vec<f32>| {
            let bytes: Vec<u8> = row.iter().flat_map(|a| a.to_le_bytes()).collect();
            base64::engine::general_purpose::STANDARD.encode(bytes)
        };
        let token = CaptureStepToken {
            id: step.id.0,
            text: step.text.clone(),
            position: step.position,
            turn: step.turn.map(|(turn, _)| turn.0),
            chunk_index: step.chunk_index,
            role: step.turn.map(|(_, role)| role.name().into()),
            tool: step.tool_result,
        };
        Self { token, attention: None, attention_b64: row.map(encode) }
    }
}

#[derive(Deserialize)]
struct WeaveCaptureHeader {
    #[serde(default)]
    model: serde_json::Value,
    prompt_tokens: Vec<WeaveCapturePromptToken>,
}

#[derive(Deserialize)]
struct WeaveCapturePromptToken {
    token_id: u32,
    text: String,
    position: u64,
    turn_id: u32,
    message_role: String,
    sentence_id: u32,
}

#[derive(Deserialize)]
struct WeaveCaptureStep {
    token_id: u32,
    text: String,
    #[serde(default)]
    position: Option<u64>,
    #[serde(default)]
    attention_shape: Option<Vec<usize>>,
}

fn read_weave_step(folder: &Path, number: &str, reduction: &AttentionReduction) -> Result<RecordedStep> {
    let path = folder.join(format!("token_{number}_meta.json"));
    let text = read_text_file(&path)?;
    let meta: WeaveCaptureStep = parse_json_file(&path, &text)?;
    let path = folder.join(format!("token_{number}_attn.bin"));
    let attention = if path.is_file() {
        let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let shape = meta.attention_shape.as_deref();
        Some(decode_f32_le(&bytes).and_then(|values| reduce_attention(&values, shape, reduction)))
    } else {
        None
    };
    let (id, text, position) = (TokenId(meta.token_id), meta.text, meta.position);
    Ok(RecordedStep { id, text, position, turn: None, chunk_index: None, tool_result: false, attention })
}

/// Reduces attention of shape `[layers, heads, slots]` to one row.
fn reduce_attention(
    values: &[f32],
    shape: Option<&[usize]>,
    reduction: &AttentionReduction,
) -> Result<Vec<f32>, String> {
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
    // A maximum would hide invalid values, so all of them are checked first.
    if let Some(i) = values.iter().position(|a| !(0.0..=1.001).contains(a)) {
        let (row, slot) = (i / slots, i % slots);
        let (layer, head) = (row / heads, row % heads);
        let what = format!("attention of layer {layer}, head {head} at slot {slot}");
        return Err(format!("{what} is {}, which is no probability", values[i]));
    }
    let chosen: Vec<usize> = match &reduction.layers {
        LayerReduction::Mean | LayerReduction::Max => (0..layers).collect(),
        LayerReduction::Last => vec![layers - 1],
        LayerReduction::Selected(layers) => layers.clone(),
    };
    if let Some(layer) = chosen.iter().find(|&&l| l >= layers) {
        return Err(format!(
            "brightness.layers names layer {layer}, but the capture has layers 0 to {}",
            layers - 1
        ));
    }
    // Sums in single precision, in the order of the heads, then one product: the arithmetic of Halo Weave.
    let mean = reduction.heads == HeadReduction::Mean && reduction.layers != LayerReduction::Max;
    let share = (1.0 / (chosen.len() * heads) as f64) as f32;
    let row_of = |layer: usize, head: usize| &values[(layer * heads + head) * slots..][..slots];
    let mut out = vec![0.0f32; slots];
    for &layer in &chosen {
        let mut of_layer = vec![0.0f32; slots];
        for head in 0..heads {
            for (sum, &a) in of_layer.iter_mut().zip(row_of(layer, head)) {
                match reduction.heads {
                    HeadReduction::Mean => *sum += a,
                    HeadReduction::Max => *sum = sum.max(a),
                }
            }
        }
        for (sum, a) in out.iter_mut().zip(of_layer) {
            match reduction.layers {
                LayerReduction::Max => {
                    *sum = sum.max(if reduction.heads == HeadReduction::Mean { a / heads as f32 } else { a });
                }
                _ => *sum += a,
            }
        }
    }
    if mean {
        out.iter_mut().for_each(|a| *a *= share);
    } else if reduction.layers != LayerReduction::Max {
        out.iter_mut().for_each(|a| *a /= chosen.len() as f32);
    }
    Ok(out)
}

fn parse_role(name: &str) -> Result<Role> {
    Role::from_name(name)
        .with_context(|| format!("'{name}' is not a role: use system, user, assistant or tool"))
}

fn decode_f32_le(bytes: &[u8]) -> Result<Vec<f32>, String> {
    let (values, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(format!("{} bytes of attention are not a whole number of 32-bit floats", bytes.len()));
    }
    Ok(values.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

fn read_text_file(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

fn parse_json_file<'a, T: Deserialize<'a>>(path: &Path, text: &'a str) -> Result<T> {
    serde_json::from_str(text).with_context(|| path.display().to_string())
}

/// Why a line of `steps.jsonl` is no step. serde_json counts lines within the text that it parses, and a step is one line:
/// the column is the part of its position that means something in the file.
fn step_line_error(line: &str) -> anyhow::Error {
    match serde_json::from_str::<serde_json::Value>(line) {
        Err(error) if error.is_eof() => anyhow::anyhow!("the line is cut short"),
        Err(error) => anyhow::anyhow!("column {}: the line is not JSON", error.column()),
        Ok(value) => match CaptureStepLine::deserialize(value) {
            Err(error) => error.into(),
            Ok(_) => anyhow::anyhow!("the line is no step"),
        },
    }
}
