//! Halo Weave: its exports in the three shapes that it has had, and the backup of its whole database.
//!
//! Tokens come in the order of their positions, grouped into turns. The numbers of the turns are kept if they
//! rise; if they do not, or two roles share one, every turn is numbered anew and the index follows. Within a
//! turn the chunks have to rise as well, which a tool's result, filed under an earlier chunk, breaks: it then
//! joins the chunk before it. Either is counted. `stats` and `sentences` only repeat what the tokens say.

use super::input::{RecordByteLimit, Utf8Reader, json_error};
use super::{
    ConversationCallback, ForeignContent, ForeignConversation, ForeignIndexEntry, ForeignToken, ForeignTurn,
    ImportError, ImportFormat, ImportLosses, Role,
};
use super::{non_blank, str_field};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::io::BufRead;

/// How long an export may be.
const MAX_EXPORT_BYTES: u64 = 1 << 30;

/// What a token starts with.
const DEFAULT_BRIGHTNESS: f64 = 10_000.0;

/// Whole numbers up to here are exact in an `f32`; no brightness that was earned is beyond.
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

/// Numbers are read as JavaScript knows them, and judged later.
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

/// A chunk as the file names it.
type WeaveChunkKey = (u32, u32, Role);

/// Where the chunks of the file have gone: the turn and the sentence of each.
type WeaveChunkMap = HashMap<WeaveChunkKey, (u32, u32)>;

pub(super) fn read(input: &mut dyn BufRead, each: ConversationCallback<'_>) -> Result<(), ImportError> {
    let allowance = RecordByteLimit::new(MAX_EXPORT_BYTES);
    let input = Utf8Reader::open(input, &allowance)?;
    let file: WeaveFile = serde_json::from_reader(input).map_err(|e| json_error(e, 1))?;
    let tokens = file.conversation.and_then(|conversation| conversation.tokens).or(file.tokens);
    let why = "it has no list of 'tokens'";
    let tokens = tokens.ok_or(ImportError::WrongFormat { format: ImportFormat::Weave, record: 1, why })?;

    let mut foreign = ForeignConversation::default();
    let (turns, places) = group_into_turns(tokens, &mut foreign.losses);
    let prompt =
        file.metadata.as_ref().and_then(|metadata| non_blank(str_field(metadata, "systemPromptText")));
    if let Some(prompt) = prompt.filter(|prompt| !contains_system_prompt(&turns, prompt)) {
        foreign.push_turn(Role::System, "", None, prompt);
    }
    foreign.turns.extend(turns);
    let entries =
        [file.semantic_index, file.graveyard].into_iter().flatten().filter_map(|index| index.entries);
    let entries = entries.chain(file.semantic_entries).flatten();
    foreign.index = convert_index(entries, &places, &mut foreign.losses);
    foreign.notes = file.notes.map(parse_notes).filter(|notes| !notes.is_null());
    each(foreign)
}

/// The database keeps the notes as text.
fn parse_notes(notes: Value) -> Value {
    let parsed = notes.as_str().and_then(|text| serde_json::from_str(text).ok());
    parsed.unwrap_or(notes)
}

/// Whether the prompt is among the tokens already, where older versions had it.
fn contains_system_prompt(turns: &[ForeignTurn], prompt: &str) -> bool {
    match turns.first() {
        Some(ForeignTurn { role: Role::System, content: ForeignContent::Tokens(tokens), .. }) => {
            tokens.iter().map(|token| token.text.as_str()).collect::<String>().contains(prompt)
        }
        _ => false,
    }
}

/// Neighbouring tokens of one turn and role, each with the number of its chunk in the file.
struct WeaveTurnRun {
    turn: u32,
    role: Role,
    tokens: Vec<(u32, ForeignToken)>,
}

fn group_into_turns(tokens: Vec<WeaveToken>, lost: &mut ImportLosses) -> (Vec<ForeignTurn>, WeaveChunkMap) {
    let mut runs: Vec<WeaveTurnRun> = Vec::new();
    for token in sort_by_position(tokens, lost) {
        let (Some(role), Some(turn)) = (convert_role(token.role), to_u32(token.turn_id)) else {
            lost.add("tokens without a role or a turn", 1);
            continue;
        };
        if runs.last().is_none_or(|run| (run.turn, run.role) != (turn, role)) {
            runs.push(WeaveTurnRun { turn, role, tokens: Vec::new() });
        }
        if let Some(run) = runs.last_mut() {
            let least = run.tokens.last().map_or(0, |(_, token)| token.chunk_index);
            let sentence = to_u32(token.sentence_id);
            lost.add("tokens moved to another chunk", usize::from(sentence.is_none_or(|s| s < least)));
            let sentence = sentence.unwrap_or(least);
            run.tokens.push((sentence, convert_token(token, sentence.max(least), lost)));
        }
    }

    let rising = runs.windows(2).all(|pair| pair[0].turn < pair[1].turn);
    lost.add("turns numbered anew", if rising { 0 } else { runs.len() });
    let mut places = WeaveChunkMap::new();
    let mut turns = Vec::with_capacity(runs.len());
    for (fresh, WeaveTurnRun { turn, role, tokens }) in (0..).zip(runs) {
        let number = if rising { turn } else { fresh };
        for (sentence, token) in &tokens {
            places.entry((turn, *sentence, role)).or_insert((number, token.chunk_index));
        }
        let content = ForeignContent::Tokens(tokens.into_iter().map(|(_, token)| token).collect());
        turns.push(ForeignTurn { number: Some(number), role, speaker: None, at: None, content });
    }
    (turns, places)
}

/// The tokens by position. One that is there twice, live and dead, as backups have it, is the live one. Two
/// that only share a position both stay, in the order of the file.
fn sort_by_position(mut tokens: Vec<WeaveToken>, lost: &mut ImportLosses) -> Vec<WeaveToken> {
    let missing = tokens.iter().filter(|token| token.position.is_none()).count();
    lost.add("missing positions (the order of the file counts)", missing);
    if missing > 0 {
        return tokens;
    }
    let place = |token: &WeaveToken| token.position.unwrap_or_default();
    tokens.sort_by(|a, b| place(a).total_cmp(&place(b)));
    let before = tokens.len();
    tokens.dedup_by(|later, kept| {
        let key = |t: &WeaveToken| (t.position, t.turn_id, t.token_id);
        let copy = key(later) == key(kept) && later.text == kept.text;
        if copy && kept.deleted == Some(true) {
            std::mem::swap(later, kept);
        }
        copy
    });
    lost.add("copies of a token", before - tokens.len());
    let shared = tokens.windows(2).filter(|pair| pair[0].position == pair[1].position).count();
    lost.add("places of tokens that share one with another", shared);
    tokens
}

fn convert_token(token: WeaveToken, sentence: u32, lost: &mut ImportLosses) -> ForeignToken {
    let dead = token.deleted.unwrap_or(false);
    let at_deletion = token.brightness_at_deletion.filter(|_| dead);
    let brightness = at_deletion.or(token.brightness).unwrap_or(DEFAULT_BRIGHTNESS);
    lost.add("brightness out of range", usize::from(brightness.abs() > MAX_BRIGHTNESS));
    ForeignToken {
        id: to_u32(token.token_id),
        text: token.text.unwrap_or_default(),
        chunk_index: sentence,
        brightness: brightness.clamp(-MAX_BRIGHTNESS, MAX_BRIGHTNESS) as f32,
        pruned: dead,
        pinned: token.pinned.unwrap_or(false),
        tool: token.tool.unwrap_or(false),
    }
}

fn convert_index(
    entries: impl Iterator<Item = WeaveIndexEntry>,
    places: &WeaveChunkMap,
    lost: &mut ImportLosses,
) -> Vec<ForeignIndexEntry> {
    let mut index = Vec::new();
    let mut taken = HashSet::new();
    for entry in entries {
        let chunk = || Some((to_u32(entry.turn_id)?, to_u32(entry.sentence_id)?, convert_role(entry.role)?));
        let chunk = chunk().and_then(|chunk| Some((places.get(&chunk)?, chunk.2)));
        let Some((&(turn, sentence), role)) = chunk.filter(|chunk| taken.insert(*chunk)) else {
            lost.add("index entries without a chunk of their own", 1);
            continue;
        };
        let embedding = entry.embedding.map(|numbers| {
            let finite = |number: Option<f32>| number.filter(|n| n.is_finite());
            numbers.into_iter().map(finite).collect::<Option<Vec<f32>>>()
        });
        lost.add("unusable embeddings", usize::from(embedding == Some(None)));
        let references = entry.references.unwrap_or_default() as u64;
        let text = entry.text.unwrap_or_default();
        index.push(ForeignIndexEntry {
            turn,
            chunk_index: sentence,
            role,
            text,
            references,
            embedding: embedding.flatten(),
        });
    }
    index
}

fn convert_role(speaker: Option<WeaveRole>) -> Option<Role> {
    match speaker? {
        WeaveRole::System => Some(Role::System),
        WeaveRole::User => Some(Role::User),
        WeaveRole::Assistant => Some(Role::Assistant),
        WeaveRole::Unknown => None,
    }
}

/// A number that counts something.
fn to_u32(number: Option<f64>) -> Option<u32> {
    number.filter(|n| n.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(n)).map(|n| n as u32)
}
