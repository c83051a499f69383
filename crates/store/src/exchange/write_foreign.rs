//! Conversations of other programs as changes of a timeline, like everything that happens to a conversation here.
//!
//! Without a model, text is split into words, which have no token ids: the first model that opens the conversation
//! retokenizes them. Tokens that have ids keep them if the model tokenizes the text in the same way. If it does not, the
//! text is retokenized, and each new token takes the state of the old token at its first character.

use super::importers::{ForeignContent, ForeignConversation, ForeignToken, ForeignTurn, ImportLosses};
use super::report::ImportedConversation;
use super::request::ImportRequest;
use crate::rows;
use crate::sql::{SqlConnection, SqlError};
use halo_core::change::{Append, Change, Extent, NewToken, PruneReason, Pruned};
use halo_core::chunker::Chunker;
use halo_core::conversation_copy::runs_where;
use halo_core::model::ModelToken;
use halo_core::store::{Embedding, RecordKind};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, ContentKind, Role, TokenId, TurnId};
use std::collections::BTreeMap;

/// The longest message that is imported, in bytes. A token takes many times its text while it is imported, and no model has
/// a context that comes near this.
const MAX_MESSAGE_BYTES: usize = 4 << 20;

/// The longest word that becomes one token, in characters.
const MAX_WORD_CHARS: usize = 12;

pub(super) fn write_conversation(
    sql: &mut dyn SqlConnection,
    name: &str,
    mut foreign: ForeignConversation,
    import: &mut ImportRequest<'_>,
    losses: &mut ImportLosses,
) -> Result<ImportedConversation, SqlError> {
    let now = rows::now_ms();
    let created = foreign.created.or_else(|| foreign.turns.iter().find_map(|t| t.at)).unwrap_or(now);
    let used = foreign.turns.iter().filter_map(|t| t.at).max().unwrap_or(now);
    let id = rows::create_conversation(sql, name, created)?;
    // A system prompt without a number becomes turn 0, and the numbers of all turns after it rise by one.
    let shift =
        u32::from(foreign.turns[0].number.is_none() && foreign.turns.iter().any(|t| t.number.is_some()));
    let mut timeline = Timeline::new();
    let (mut seq, mut speakers) = (0u64, BTreeMap::new());
    let mut model = None;
    for (n, turn) in std::mem::take(&mut foreign.turns).into_iter().enumerate() {
        check_message_size(name, n, &turn)?;
        let number = match turn.number {
            Some(n) => TurnId(n.saturating_add(shift)).max(timeline.next_turn()),
            None => timeline.next_turn(),
        };
        let (at, role) = (turn.at.unwrap_or(now), turn.role);
        if let Some(speaker) = &turn.speaker {
            speakers.insert(number.0.to_string(), speaker.clone());
        }
        let tokens = tokenize_turn(turn, import, &mut model)?;
        for change in turn_changes(&timeline, number, role, tokens) {
            timeline
                .apply(&change)
                .map_err(|e| SqlError::invalid_input(format!("turn {}: {e}", number.0)))?;
            seq += 1;
            rows::insert_log_entry(sql, rows::row_key(id, seq as usize), at, &change)?;
            rows::insert_mentions(sql, id, seq.cast_signed(), &change)?;
        }
    }
    write_side_records(sql, id, &foreign, &speakers)?;
    write_index(sql, id, &foreign, shift, &timeline, losses)?;
    rows::write_whole_state(sql, id, seq, &timeline)?;
    rows::set_model(sql, id, model.as_deref().unwrap_or_default())?;
    rows::set_last_used(sql, id, used)?;
    Ok(ImportedConversation::new(name, &timeline))
}

fn check_message_size(conversation: &str, index: usize, turn: &ForeignTurn) -> Result<(), SqlError> {
    let bytes = match &turn.content {
        ForeignContent::Text(text) => text.len(),
        ForeignContent::Tokens(tokens) => tokens.iter().map(|token| token.text.len() + 1).sum(),
    };
    if bytes <= MAX_MESSAGE_BYTES {
        return Ok(());
    }
    let why = format!(
        "message {} of '{conversation}' has {} MiB, and a message may have {} MiB; split or shorten it in the file",
        index + 1,
        bytes.div_ceil(1 << 20),
        MAX_MESSAGE_BYTES >> 20
    );
    Err(SqlError::invalid_input(why))
}

/// Writes the notes, the names of the speakers by turn, and the name of the model.
fn write_side_records(
    sql: &mut dyn SqlConnection,
    id: i64,
    foreign: &ForeignConversation,
    speakers: &BTreeMap<String, String>,
) -> Result<(), SqlError> {
    let now = rows::now_ms();
    if let Some(notes) = &foreign.notes {
        rows::put_record(sql, id, RecordKind::Note.name(), "notes.json", Some(&notes.to_string()), now)?;
    }
    if !speakers.is_empty() {
        let value = serde_json::json!(speakers).to_string();
        rows::put_record(sql, id, RecordKind::Setting.name(), "speakers", Some(&value), now)?;
    }
    if let Some(model) = &foreign.model {
        rows::put_record(sql, id, RecordKind::Setting.name(), "imported.model", Some(model), now)?;
    }
    Ok(())
}

/// Writes the search index, as a record and as embeddings.
fn write_index(
    sql: &mut dyn SqlConnection,
    id: i64,
    foreign: &ForeignConversation,
    shift: u32,
    timeline: &Timeline,
    losses: &mut ImportLosses,
) -> Result<(), SqlError> {
    let now = rows::now_ms();
    let mut entries = Vec::new();
    for entry in &foreign.index {
        let chunk = ChunkId::new(entry.role, TurnId(entry.turn.saturating_add(shift)), entry.chunk_index);
        if timeline.chunk(chunk).is_none() {
            losses.add("index entries whose chunk does not exist here", 1);
            continue;
        }
        if let Some(vector) = entry.embedding.as_deref().filter(|v| !v.is_empty()) {
            let embedding = Embedding { chunk, text_hash: 0, vector: vector.to_vec() };
            rows::put_embedding(sql, id, "halo_weave", &embedding, now)?;
        }
        let (name, references) = (chunk.to_string(), entry.references);
        entries.push(serde_json::json!({ "chunk": name, "text": entry.text, "references": references }));
    }
    if !entries.is_empty() {
        let value = serde_json::json!(entries).to_string();
        rows::put_record(sql, id, RecordKind::Setting.name(), "imported.index", Some(&value), now)?;
    }
    Ok(())
}

/// A token that is imported, with its state.
#[derive(Clone, Debug)]
struct ImportToken {
    token: NewToken,
    pruned: bool,
    pinned: bool,
}

/// The tokens of a message. Sets `model` to the name of the model that tokenized it.
fn tokenize_turn(
    turn: ForeignTurn,
    import: &mut ImportRequest<'_>,
    model: &mut Option<String>,
) -> Result<Vec<ImportToken>, SqlError> {
    match turn.content {
        ForeignContent::Text(text) => {
            let tokens = tokenize(&text, import, model)?.unwrap_or_else(|| split_words(&text));
            Ok(split_into_chunks(tokens, import))
        }
        ForeignContent::Tokens(old) => {
            let text: String = old.iter().map(|t| t.text.as_str()).collect();
            let tokens = tokenize(&text, import, model)?;
            let same_ids = |new: &Vec<ModelToken>| {
                new.len() == old.len() && new.iter().zip(&old).all(|(new, old)| Some(new.id.0) == old.id)
            };
            Ok(match tokens {
                Some(new) if !same_ids(&new) => carry_over_state(&old, new),
                _ => old.iter().map(keep_token).collect(),
            })
        }
    }
}

/// The tokens of the model; none without a model. The name of a special token in a message stays text.
fn tokenize(
    text: &str,
    import: &mut ImportRequest<'_>,
    model_name: &mut Option<String>,
) -> Result<Option<Vec<ModelToken>>, SqlError> {
    let Some(model) = &mut import.model else { return Ok(None) };
    *model_name = Some(model.info().name.clone());
    let tokens = model.tokenize(text, false).map_err(|e| SqlError::invalid_input(e.to_string()))?;
    Ok(Some(tokens))
}

fn split_into_chunks(tokens: Vec<ModelToken>, import: &ImportRequest<'_>) -> Vec<ImportToken> {
    let mut chunker = Chunker::new(import.chunk_size);
    let mut chunked: Vec<ImportToken> = Vec::new();
    for ModelToken { id, text } in tokens {
        let placed = chunker.push(&text);
        let (chunk_index, brightness, kind) =
            (placed.chunk_index, import.initial_brightness, ContentKind::Message);
        let token = NewToken { id, text, chunk_index, brightness, kind };
        chunked.push(ImportToken { token, pruned: false, pinned: false });
        let moved = placed.moved_tokens.map_or(0, |n| n as usize);
        let first_moved = chunked.len().saturating_sub(moved);
        chunked[first_moved..].iter_mut().for_each(|t| t.token.chunk_index = chunk_index);
    }
    chunked
}

/// The new tokens, each with the state of the old token at its first character. There is at least one old token.
fn carry_over_state(old: &[ForeignToken], new: Vec<ModelToken>) -> Vec<ImportToken> {
    let (mut at, mut index, mut end) = (0, 0, old[0].text.len());
    let carry = |token: ModelToken| {
        while end <= at && index + 1 < old.len() {
            index += 1;
            end += old[index].text.len();
        }
        at += token.text.len();
        with_state_of(&old[index], token.id, token.text)
    };
    new.into_iter().map(carry).collect()
}

fn keep_token(token: &ForeignToken) -> ImportToken {
    with_state_of(token, token.id.map_or(TokenId::UNTOKENIZED, TokenId), token.text.clone())
}

fn with_state_of(old: &ForeignToken, id: TokenId, text: String) -> ImportToken {
    let brightness = Brightness(old.brightness);
    let kind = if old.tool { ContentKind::ToolResult } else { ContentKind::Message };
    let token = NewToken { id, text, chunk_index: old.chunk_index, brightness, kind };
    ImportToken { token, pruned: old.pruned, pinned: old.pinned }
}

/// Splits text into words, each with the space before it, to be retokenized by the first model. Line breaks in a row are
/// one word of their own: a chunk ends with the word that completes an empty line, so that word must not contain text of
/// the next paragraph. Scripts without spaces are split at every character, long words after [`MAX_WORD_CHARS`].
fn split_words(text: &str) -> Vec<ModelToken> {
    let mut words: Vec<ModelToken> = Vec::new();
    let mut word_chars = 0;
    let mut after_break = false;
    for c in text.chars() {
        // Chinese, Japanese and Korean scripts begin here.
        let without_spaces = c >= '\u{2E80}';
        let line_break = matches!(c, '\n' | '\r');
        let full = word_chars >= MAX_WORD_CHARS;
        let begins_word = match (after_break, line_break) {
            (true, true) => full,
            (true, false) => true,
            (false, _) => without_spaces || c.is_whitespace() || full,
        };
        after_break = line_break;
        if begins_word || words.is_empty() {
            words.push(ModelToken { id: TokenId::UNTOKENIZED, text: String::new() });
            word_chars = 0;
        }
        word_chars = if without_spaces { MAX_WORD_CHARS } else { word_chars + 1 };
        if let Some(last) = words.last_mut() {
            last.text.push(c);
        }
    }
    words
}

/// The changes that append a message and give its chunks their state.
fn turn_changes(timeline: &Timeline, turn: TurnId, role: Role, tokens: Vec<ImportToken>) -> Vec<Change> {
    let at = timeline.next_position();
    let (mut pins, mut pruned, mut start) = (Vec::new(), Vec::new(), 0);
    for chunk in tokens.chunk_by(|a, b| a.token.chunk_index == b.token.chunk_index) {
        let id = ChunkId::new(role, turn, chunk[0].token.chunk_index);
        let runs = runs_where(at.plus(start), chunk, |t| t.pruned);
        start += chunk.len();
        if chunk.iter().any(|t| t.pinned) {
            pins.push(Change::Pin { chunk: id, pinned: true });
        }
        if !runs.is_empty() {
            pruned.push(Pruned { chunk: id, extent: Extent::Runs(runs), reason: PruneReason::BeforeImport });
        }
    }
    let tokens = tokens.into_iter().map(|t| t.token).collect();
    let mut changes = vec![Change::Append(Append { at, turn, role, tokens })];
    changes.append(&mut pins);
    if !pruned.is_empty() {
        changes.push(Change::Prune(pruned));
    }
    changes
}
