//! Halo Weave: its exports in the three shapes that it has had, and the backup of its whole database.
//!
//! Tokens come in the order of their positions, grouped into turns. The numbers of the turns are kept if they
//! rise; if they do not, or two roles share one, every turn is numbered anew and the index follows. Within a
//! turn the chunks have to rise as well, which a tool's result, filed under an earlier chunk, breaks: it then
//! joins the chunk before it. Either is counted. `stats` and `sentences` only repeat what the tokens say.

use super::input::{Allowance, Input, json_error};
use super::{Content, Each, Foreign, ForeignToken, ForeignTurn, Format, IndexEntry, Losses, ReadError, Role};
use super::{filled, text};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::io::BufRead;

/// How long an export may be.
const LIMIT: u64 = 1 << 30;

/// What a token starts with.
const BRIGHTNESS: f64 = 10_000.0;

/// Whole numbers up to here are exact in an `f32`; no brightness that was earned is beyond.
const BRIGHTEST: f64 = 16_777_216.0;

#[derive(Deserialize)]
struct File {
    conversation: Option<Conversation>,
    tokens: Option<Vec<Token>>,
    #[serde(rename = "semanticIndex")]
    semantic_index: Option<Index>,
    #[serde(rename = "semanticEntries")]
    semantic_entries: Option<Vec<Entry>>,
    graveyard: Option<Index>,
    notes: Option<Value>,
    metadata: Option<Value>,
}

#[derive(Deserialize)]
struct Conversation {
    tokens: Option<Vec<Token>>,
}

#[derive(Deserialize)]
struct Index {
    entries: Option<Vec<Entry>>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Speaker {
    System,
    User,
    Assistant,
    #[serde(other)]
    Unknown,
}

/// Numbers are read as JavaScript knows them, and judged later.
#[derive(Deserialize)]
struct Token {
    token_id: Option<f64>,
    text: Option<String>,
    position: Option<f64>,
    brightness: Option<f64>,
    brightness_at_deletion: Option<f64>,
    turn_id: Option<f64>,
    sentence_id: Option<f64>,
    role: Option<Speaker>,
    deleted: Option<bool>,
    pinned: Option<bool>,
    #[serde(rename = "isToolResult")]
    tool: Option<bool>,
}

#[derive(Deserialize)]
struct Entry {
    turn_id: Option<f64>,
    sentence_id: Option<f64>,
    role: Option<Speaker>,
    text: Option<String>,
    #[serde(rename = "referenceCount", alias = "resurrection_count")]
    references: Option<f64>,
    embedding: Option<Vec<Option<f32>>>,
}

/// A chunk as the file names it.
type Chunk = (u32, u32, Role);

/// Where the chunks of the file have gone: the turn and the sentence of each.
type Places = HashMap<Chunk, (u32, u32)>;

pub(super) fn read(input: &mut dyn BufRead, each: Each<'_>) -> Result<(), ReadError> {
    let allowance = Allowance::new(LIMIT);
    let input = Input::open(input, &allowance)?;
    let file: File = serde_json::from_reader(input).map_err(|e| json_error(e, 1))?;
    let tokens = file.conversation.and_then(|conversation| conversation.tokens).or(file.tokens);
    let why = "it has no list of 'tokens'";
    let tokens = tokens.ok_or(ReadError::Shape { format: Format::Weave, record: 1, why })?;

    let mut foreign = Foreign::default();
    let (turns, places) = turns(tokens, &mut foreign.lost);
    let prompt = file.metadata.as_ref().and_then(|metadata| filled(text(metadata, "systemPromptText")));
    if let Some(prompt) = prompt.filter(|prompt| !begins_with(&turns, prompt)) {
        foreign.say(Role::System, "", None, prompt);
    }
    foreign.turns.extend(turns);
    let entries =
        [file.semantic_index, file.graveyard].into_iter().flatten().filter_map(|index| index.entries);
    let entries = entries.chain(file.semantic_entries).flatten();
    foreign.index = index(entries, &places, &mut foreign.lost);
    foreign.notes = file.notes.map(notes).filter(|notes| !notes.is_null());
    each(foreign)
}

/// The database keeps the notes as text.
fn notes(notes: Value) -> Value {
    let parsed = notes.as_str().and_then(|text| serde_json::from_str(text).ok());
    parsed.unwrap_or(notes)
}

/// Whether the prompt is among the tokens already, where older versions had it.
fn begins_with(turns: &[ForeignTurn], prompt: &str) -> bool {
    match turns.first() {
        Some(ForeignTurn { role: Role::System, content: Content::Tokens(tokens), .. }) => {
            tokens.iter().map(|token| token.text.as_str()).collect::<String>().contains(prompt)
        }
        _ => false,
    }
}

/// Neighbouring tokens of one turn and role, each with the number of its chunk in the file.
struct Run {
    turn: u32,
    role: Role,
    tokens: Vec<(u32, ForeignToken)>,
}

fn turns(tokens: Vec<Token>, lost: &mut Losses) -> (Vec<ForeignTurn>, Places) {
    let mut runs: Vec<Run> = Vec::new();
    for token in in_order(tokens, lost) {
        let (Some(role), Some(turn)) = (role(token.role), whole(token.turn_id)) else {
            lost.add("tokens without a role or a turn", 1);
            continue;
        };
        if runs.last().is_none_or(|run| (run.turn, run.role) != (turn, role)) {
            runs.push(Run { turn, role, tokens: Vec::new() });
        }
        if let Some(run) = runs.last_mut() {
            let least = run.tokens.last().map_or(0, |(_, token)| token.sentence);
            let sentence = whole(token.sentence_id);
            lost.add("tokens moved to another chunk", usize::from(sentence.is_none_or(|s| s < least)));
            let sentence = sentence.unwrap_or(least);
            run.tokens.push((sentence, convert(token, sentence.max(least), lost)));
        }
    }

    let rising = runs.windows(2).all(|pair| pair[0].turn < pair[1].turn);
    lost.add("turns numbered anew", if rising { 0 } else { runs.len() });
    let mut places = Places::new();
    let mut turns = Vec::with_capacity(runs.len());
    for (fresh, Run { turn, role, tokens }) in (0..).zip(runs) {
        let number = if rising { turn } else { fresh };
        for (sentence, token) in &tokens {
            places.entry((turn, *sentence, role)).or_insert((number, token.sentence));
        }
        let content = Content::Tokens(tokens.into_iter().map(|(_, token)| token).collect());
        turns.push(ForeignTurn { number: Some(number), role, speaker: None, at: None, content });
    }
    (turns, places)
}

/// The tokens by position. One that is there twice, live and dead, as backups have it, is the live one. Two
/// that only share a position both stay, in the order of the file.
fn in_order(mut tokens: Vec<Token>, lost: &mut Losses) -> Vec<Token> {
    let missing = tokens.iter().filter(|token| token.position.is_none()).count();
    lost.add("missing positions (the order of the file counts)", missing);
    if missing > 0 {
        return tokens;
    }
    let place = |token: &Token| token.position.unwrap_or_default();
    tokens.sort_by(|a, b| place(a).total_cmp(&place(b)));
    let before = tokens.len();
    tokens.dedup_by(|later, kept| {
        let key = |t: &Token| (t.position, t.turn_id, t.token_id);
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

fn convert(token: Token, sentence: u32, lost: &mut Losses) -> ForeignToken {
    let dead = token.deleted.unwrap_or(false);
    let at_deletion = token.brightness_at_deletion.filter(|_| dead);
    let brightness = at_deletion.or(token.brightness).unwrap_or(BRIGHTNESS);
    lost.add("brightness out of range", usize::from(brightness.abs() > BRIGHTEST));
    ForeignToken {
        id: whole(token.token_id),
        text: token.text.unwrap_or_default(),
        sentence,
        brightness: brightness.clamp(-BRIGHTEST, BRIGHTEST) as f32,
        dead,
        pinned: token.pinned.unwrap_or(false),
        tool: token.tool.unwrap_or(false),
    }
}

fn index(entries: impl Iterator<Item = Entry>, places: &Places, lost: &mut Losses) -> Vec<IndexEntry> {
    let mut index = Vec::new();
    let mut taken = HashSet::new();
    for entry in entries {
        let chunk = || Some((whole(entry.turn_id)?, whole(entry.sentence_id)?, role(entry.role)?));
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
        index.push(IndexEntry { turn, sentence, role, text, references, embedding: embedding.flatten() });
    }
    index
}

fn role(speaker: Option<Speaker>) -> Option<Role> {
    match speaker? {
        Speaker::System => Some(Role::System),
        Speaker::User => Some(Role::User),
        Speaker::Assistant => Some(Role::Assistant),
        Speaker::Unknown => None,
    }
}

/// A number that counts something.
fn whole(number: Option<f64>) -> Option<u32> {
    number.filter(|n| n.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(n)).map(|n| n as u32)
}
