//! Halo Weave: its exports in the three versions of the format, and the backup of its whole database.
//!
//! Tokens are sorted by position and grouped into turns. The numbers of the turns are kept if they rise; if they do not,
//! or two roles share one, all turns are renumbered, also in the index. Within a turn the numbers of the chunks must rise
//! as well. A tool's result with the number of an earlier chunk breaks that, and joins the chunk before it. Both are
//! counted as losses. `stats` and `sentences` are ignored: they only repeat the tokens.

use super::conversation::{
    ConversationCallback, ForeignContent, ForeignConversation, ForeignIndexEntry, ForeignToken, ForeignTurn,
    non_blank,
};
use super::error::ImportError;
use super::format::ImportFormat;
use super::input::{RecordByteLimit, Utf8Reader, json_error};
use super::json::str_field;
use super::losses::ImportLosses;
use halo_core::token::Role;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::io::BufRead;

const MAX_EXPORT_BYTES: u64 = 1 << 30;

const DEFAULT_BRIGHTNESS: f64 = 10_000.0;

/// Integers up to here are exact in an `f32`. Halo Weave computes no larger brightness.
const MAX_BRIGHTNESS: f64 = 16_777_216.0;

#[derive(Deserialize)]
struct WeaveFile {
    conversation: Option<WeaveConversation>,
    tokens: Option<Vec<WeaveToken>>,
    #[serde(rename = "semanticIndex")]
    semantic_index: Option<WeaveIndex>,
    #[serde(rename = "semanticEntries")]
    semantic_entries: Option<Vec<WeaveIndexEntry>>,
    graveyard: Option<WeaveIndex>,
    notes: Option<Value>,
    metadata: Option<Value>,
}

#[derive(Deserialize)]
struct WeaveConversation {
    tokens: Option<Vec<WeaveToken>>,
}

#[derive(Deserialize)]
struct WeaveIndex {
    entries: Option<Vec<WeaveIndexEntry>>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum WeaveRole {
    System,
    User,
    Assistant,
    #[serde(other)]
    Unknown,
}

/// Numbers are those of JavaScript; they are validated when they are converted.
#[derive(Deserialize)]
struct WeaveToken {
    token_id: Option<f64>,
    text: Option<String>,
    position: Option<f64>,
    brightness: Option<f64>,
    brightness_at_deletion: Option<f64>,
    turn_id: Option<f64>,
    sentence_id: Option<f64>,
    role: Option<WeaveRole>,
    deleted: Option<bool>,
    pinned: Option<bool>,
    #[serde(rename = "isToolResult")]
    tool: Option<bool>,
}

#[derive(Deserialize)]
struct WeaveIndexEntry {
    turn_id: Option<f64>,
    sentence_id: Option<f64>,
    role: Option<WeaveRole>,
    text: Option<String>,
    #[serde(rename = "referenceCount", alias = "resurrection_count")]
    references: Option<f64>,
    embedding: Option<Vec<Option<f32>>>,
}

/// Turn, chunk and role as the file numbers them.
type WeaveChunkKey = (u32, u32, Role);

/// The turn and the chunk index that each chunk of the file was converted to.
type WeaveChunkMap = HashMap<WeaveChunkKey, (u32, u32)>;

pub(super) fn read(input: &mut dyn BufRead, each: ConversationCallback<'_>) -> Result<(), ImportError> {
    let byte_limit = RecordByteLimit::new(MAX_EXPORT_BYTES);
    let input = Utf8Reader::open(input, &byte_limit)?;
    let file: WeaveFile = serde_json::from_reader(input).map_err(|e| json_error(e, 1))?;
    let tokens = file.conversation.and_then(|conversation| conversation.tokens).or(file.tokens);
    let why = "it has no list of 'tokens'";
    let tokens = tokens.ok_or(ImportError::WrongFormat { format: ImportFormat::Weave, record: 1, why })?;

    let mut foreign = ForeignConversation::default();
    let (turns, chunk_map) = group_into_turns(tokens, &mut foreign.losses);
    let prompt =
        file.metadata.as_ref().and_then(|metadata| non_blank(str_field(metadata, "systemPromptText")));
    if let Some(prompt) = prompt.filter(|prompt| !contains_system_prompt(&turns, prompt)) {
        foreign.push_turn(Role::System, "", None, prompt);
    }
    foreign.turns.extend(turns);
    let entries =
        [file.semantic_index, file.graveyard].into_iter().flatten().filter_map(|index| index.entries);
    let entries = entries.chain(file.semantic_entries).flatten();
    foreign.index = convert_index(entries, &chunk_map, &mut foreign.losses);
    foreign.notes = file.notes.map(parse_notes).filter(|notes| !notes.is_null());
    each(foreign)
}

/// A database backup has the notes as text.
fn parse_notes(notes: Value) -> Value {
    let parsed = notes.as_str().and_then(|text| serde_json::from_str(text).ok());
    parsed.unwrap_or(notes)
}

/// Whether the tokens contain the system prompt, as those of older versions do.
fn contains_system_prompt(turns: &[ForeignTurn], prompt: &str) -> bool {
    match turns.first() {
        Some(ForeignTurn { role: Role::System, content: ForeignContent::Tokens(tokens), .. }) => {
            tokens.iter().map(|token| token.text.as_str()).collect::<String>().contains(prompt)
        }
        _ => false,
    }
}

/// Neighbouring tokens of one turn and role, each with the number that its chunk has in the file.
struct WeaveTurnRun {
    turn: u32,
    role: Role,
    tokens: Vec<(u32, ForeignToken)>,
}

fn group_into_turns(tokens: Vec<WeaveToken>, losses: &mut ImportLosses) -> (Vec<ForeignTurn>, WeaveChunkMap) {
    let mut runs: Vec<WeaveTurnRun> = Vec::new();
    for token in sort_by_position(tokens, losses) {
        let (Some(role), Some(turn)) = (convert_role(token.role), to_u32(token.turn_id)) else {
            losses.add("tokens without a role or a turn", 1);
            continue;
        };
        if runs.last().is_none_or(|run| (run.turn, run.role) != (turn, role)) {
            runs.push(WeaveTurnRun { turn, role, tokens: Vec::new() });
        }
        if let Some(run) = runs.last_mut() {
            let last_index = run.tokens.last().map_or(0, |(_, token)| token.chunk_index);
            let file_index = to_u32(token.sentence_id);
            losses
                .add("tokens moved to another chunk", usize::from(file_index.is_none_or(|i| i < last_index)));
            let file_index = file_index.unwrap_or(last_index);
            run.tokens.push((file_index, convert_token(token, file_index.max(last_index), losses)));
        }
    }

    let rising = runs.windows(2).all(|pair| pair[0].turn < pair[1].turn);
    losses.add("renumbered turns", if rising { 0 } else { runs.len() });
    let mut chunk_map = WeaveChunkMap::new();
    let mut turns = Vec::with_capacity(runs.len());
    for (counter, WeaveTurnRun { turn, role, tokens }) in (0..).zip(runs) {
        let number = if rising { turn } else { counter };
        for (file_index, token) in &tokens {
            chunk_map.entry((turn, *file_index, role)).or_insert((number, token.chunk_index));
        }
        let content = ForeignContent::Tokens(tokens.into_iter().map(|(_, token)| token).collect());
        turns.push(ForeignTurn { number: Some(number), role, speaker: None, at: None, content });
    }
    (turns, chunk_map)
}

/// The tokens by position. Backups may have a token twice, live and pruned: the live one is kept. Different tokens with
/// the same position are both kept, in the order of the file.
fn sort_by_position(mut tokens: Vec<WeaveToken>, losses: &mut ImportLosses) -> Vec<WeaveToken> {
    let missing = tokens.iter().filter(|token| token.position.is_none()).count();
    losses.add("missing positions (the order of the file is used)", missing);
    if missing > 0 {
        return tokens;
    }
    let position = |token: &WeaveToken| token.position.unwrap_or_default();
    tokens.sort_by(|a, b| position(a).total_cmp(&position(b)));
    let before = tokens.len();
    tokens.dedup_by(|later, earlier| {
        let key = |t: &WeaveToken| (t.position, t.turn_id, t.token_id);
        let copy = key(later) == key(earlier) && later.text == earlier.text;
        if copy && earlier.deleted == Some(true) {
            std::mem::swap(later, earlier);
        }
        copy
    });
    losses.add("copies of a token", before - tokens.len());
    let shared = tokens.windows(2).filter(|pair| pair[0].position == pair[1].position).count();
    losses.add("positions that several tokens share", shared);
    tokens
}

fn convert_token(token: WeaveToken, chunk_index: u32, losses: &mut ImportLosses) -> ForeignToken {
    let pruned = token.deleted.unwrap_or(false);
    let at_deletion = token.brightness_at_deletion.filter(|_| pruned);
    let brightness = at_deletion.or(token.brightness).unwrap_or(DEFAULT_BRIGHTNESS);
    losses.add("brightness out of range", usize::from(brightness.abs() > MAX_BRIGHTNESS));
    ForeignToken {
        id: to_u32(token.token_id),
        text: token.text.unwrap_or_default(),
        chunk_index,
        brightness: brightness.clamp(-MAX_BRIGHTNESS, MAX_BRIGHTNESS) as f32,
        pruned,
        pinned: token.pinned.unwrap_or(false),
        tool: token.tool.unwrap_or(false),
    }
}

fn convert_index(
    entries: impl Iterator<Item = WeaveIndexEntry>,
    chunk_map: &WeaveChunkMap,
    losses: &mut ImportLosses,
) -> Vec<ForeignIndexEntry> {
    let mut index = Vec::new();
    let mut indexed = HashSet::new();
    for entry in entries {
        let chunk = || Some((to_u32(entry.turn_id)?, to_u32(entry.sentence_id)?, convert_role(entry.role)?));
        let chunk = chunk().and_then(|chunk| Some((chunk_map.get(&chunk)?, chunk.2)));
        let Some((&(turn, chunk_index), role)) = chunk.filter(|chunk| indexed.insert(*chunk)) else {
            losses.add("index entries without a chunk of their own", 1);
            continue;
        };
        let embedding = entry.embedding.map(|numbers| {
            let finite = |number: Option<f32>| number.filter(|n| n.is_finite());
            numbers.into_iter().map(finite).collect::<Option<Vec<f32>>>()
        });
        losses.add("unusable embeddings", usize::from(embedding == Some(None)));
        let references = entry.references.unwrap_or_default() as u64;
        let text = entry.text.unwrap_or_default();
        index.push(ForeignIndexEntry {
            turn,
            chunk_index,
            role,
            text,
            references,
            embedding: embedding.flatten(),
        });
    }
    index
}

fn convert_role(role: Option<WeaveRole>) -> Option<Role> {
    match role? {
        WeaveRole::System => Some(Role::System),
        WeaveRole::User => Some(Role::User),
        WeaveRole::Assistant => Some(Role::Assistant),
        WeaveRole::Unknown => None,
    }
}

/// A JavaScript number as an integer, if it is one.
fn to_u32(number: Option<f64>) -> Option<u32> {
    number.filter(|n| n.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(n)).map(|n| n as u32)
}
