//! How a conversation from elsewhere becomes one of ours: as changes, like everything that happens here.
//!
//! A file is taken in whole or not at all. Without a model, text is cut into words, which no model has read yet:
//! the first model to open the conversation cuts it into its own tokens. What comes with token ids keeps them
//! where the model agrees; else its text is cut anew, and each token takes over the light of the one that stood
//! where it begins.

use super::importers::{
    ForeignContent, ForeignConversation, ForeignToken, ForeignTurn, ImportError, ImportFormat, ImportLosses,
    detect_format, is_zip, read,
};
use super::{ImportReport, ImportedConversation, name_taken, native};
use crate::database::Database;
use crate::row_store;
use crate::rows;
use crate::sql::{SqlConnection, SqlError, SqlValue};
use halo_core::Error;
use halo_core::change::{Append, Change, Extent, NewToken, PruneReason, Pruned};
use halo_core::chunker::{ChunkSize, Chunker};
use halo_core::conversation_copy::runs_where;
use halo_core::model::{Model, ModelToken};
use halo_core::row_store::Row;
use halo_core::store::{Durability, Embedding, RecordKind};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, ContentKind, Role, TokenId, TurnId};
use std::collections::{BTreeMap, BTreeSet};
use std::io::BufRead;

/// What a token is called that no model has read yet.
pub const UNTOKENIZED: TokenId = TokenId(u32::MAX);

/// How a file is to be taken in.
pub struct ImportRequest<'a> {
    /// Its name, which may tell its format.
    pub file_name: &'a str,
    /// Its format, where it is not to be told from the file itself.
    pub format: Option<&'a str>,
    /// What the conversation is to be called; its own name, where the file has one.
    pub name: Option<&'a str>,
    /// How large chunks are.
    pub chunk_size: ChunkSize,
    /// What new tokens start with.
    pub initial_brightness: Brightness,
    /// Whose tokens it becomes.
    pub model: Option<&'a mut dyn Model>,
    /// Validates the rows of a namespace before they are written; without it, exports of namespaces are refused.
    pub validate_rows: Option<&'a RowValidator<'a>>,
}

/// Takes the name and the rows of a namespace, and fails if they do not belong together.
pub type RowValidator<'a> = dyn Fn(&str, &[Row]) -> Result<(), Error> + 'a;

impl Database {
    /// Takes in a file of any known format: all of it, or on an error nothing.
    pub fn import(
        &mut self,
        input: &mut dyn BufRead,
        mut import: ImportRequest<'_>,
    ) -> Result<ImportReport, Error> {
        let what = format!("importing {}", import.file_name);
        let head = input.fill_buf().map_err(|e| Error::unavailable(&what, e.to_string()))?.to_vec();
        let shape = resolve_format(&head, &import).map_err(|e| e.with_context(&what))?;
        let done = self.in_transaction(Some(Durability::Immediate), |sql| match shape {
            None => {
                let arrival = native::read_export(sql, input, &import)?;
                let format = "an export of Halo".to_owned();
                Ok(ImportReport { conversations: vec![arrival], losses: ImportLosses::default(), format })
            }
            Some(format) => import_foreign(sql, input, format, &mut import),
        });
        done.map_err(|e| e.with_context(what))
    }
}

/// The format of a file; none for our own.
fn resolve_format(head: &[u8], import: &ImportRequest<'_>) -> Result<Option<ImportFormat>, SqlError> {
    let names = || ImportFormat::ALL.map(ImportFormat::name).join(", ");
    match import.format {
        Some("halo") => return Ok(None),
        None | Some("auto") => {}
        Some(name) => {
            let unknown = || {
                SqlError::invalid_input(format!("'{name}' is no format; there are auto, halo, {}", names()))
            };
            return ImportFormat::from_name(name).map(Some).ok_or_else(unknown);
        }
    }
    if native::is_halo_export(head) {
        return Ok(None);
    }
    let packed: [(bool, &str); 5] = [
        (head.is_empty(), "it is empty"),
        (is_zip(head), "it is a zip archive: unpack it and import the conversations.json inside"),
        (head.starts_with(&[0x1f, 0x8b]), "it is packed with gzip: unpack it first"),
        (
            head.starts_with(&[0xff, 0xfe]) || head.starts_with(&[0xfe, 0xff]),
            "it is UTF-16: save it as UTF-8",
        ),
        (head.starts_with(b"SQLite format 3"), "it is a database: `--store sqlite:FILE` opens one of Halo's"),
    ];
    if let Some((_, why)) = packed.iter().find(|(is, _)| *is) {
        return Err(SqlError::invalid_input(*why));
    }
    let unknown = || {
        SqlError::invalid_input(format!(
            "its format is not known; if it is one of halo, {}, say so with --format",
            names()
        ))
    };
    detect_format(head, import.file_name).map(Some).ok_or_else(unknown)
}

/// Takes in what another program wrote, within a transaction of the caller's.
fn import_foreign(
    sql: &mut dyn SqlConnection,
    input: &mut dyn BufRead,
    format: ImportFormat,
    import: &mut ImportRequest<'_>,
) -> Result<ImportReport, SqlError> {
    let mut arrivals = ImportReport { format: format.to_string(), ..ImportReport::default() };
    let mut names = BTreeSet::new();
    let done = read(format, input, &mut |foreign| {
        if foreign.turns.is_empty() {
            arrivals.losses.add("conversations in which nothing was said", 1);
            arrivals.losses.merge(&foreign.losses);
            return Ok(());
        }
        let refused = |e: SqlError| ImportError::Aborted(Box::new(e));
        let name = choose_free_name(sql, &foreign, import, &mut names).map_err(refused)?;
        arrivals.losses.merge(&foreign.losses);
        let arrival =
            write_conversation(sql, &name, foreign, import, &mut arrivals.losses).map_err(refused)?;
        arrivals.conversations.push(arrival);
        Ok(())
    });
    done.map_err(|error| match error {
        ImportError::Aborted(why) => match why.downcast::<SqlError>() {
            Ok(error) => *error,
            Err(why) => SqlError::invalid_input(why.to_string()),
        },
        error => SqlError::invalid_input(error.to_string()),
    })?;
    if arrivals.conversations.is_empty() {
        return Err(SqlError::invalid_input(format!("it is {format} in which nothing was said")));
    }
    Ok(arrivals)
}

/// A name that nobody has: as asked for, or the conversation's own, with a number behind it where needed. What was
/// asked for by name is not renamed, unless the file holds more conversations than one.
fn choose_free_name(
    sql: &mut dyn SqlConnection,
    foreign: &ForeignConversation,
    import: &ImportRequest<'_>,
    names: &mut BTreeSet<String>,
) -> Result<String, SqlError> {
    let stem = import.file_name.rsplit(['/', '\\']).next().unwrap_or_default();
    let stem = stem.rsplit_once('.').map_or(stem, |(stem, _)| stem);
    let own = foreign.name.as_deref().unwrap_or(stem);
    let asked = import.name.map_or_else(|| title_to_name(own), str::to_owned);
    let asked = match row_store::check_conversation_name(&asked) {
        Ok(()) if asked.is_empty() => "imported".to_owned(),
        Ok(()) => asked,
        // A title in another program's file does not name a namespace of this store.
        Err(_) if import.name.is_none() => format!("imported {asked}"),
        Err(why) => return Err(why),
    };
    for n in 1..10_000 {
        let name = if n == 1 { asked.clone() } else { format!("{asked} ({n})") };
        let free = !names.contains(&name) && rows::find_conversation_id(sql, &name)?.is_none();
        if free {
            names.insert(name.clone());
            return Ok(name);
        }
        if import.name.is_some() && names.is_empty() {
            return Err(name_taken(&name));
        }
    }
    Err(name_taken(&asked))
}

/// A title as a name: on one line, and not too long.
fn title_to_name(title: &str) -> String {
    let words: Vec<_> =
        title.split(|c: char| c.is_control() || c.is_whitespace()).filter(|w| !w.is_empty()).collect();
    let mut name = words.join(" ");
    while name.len() > 180 {
        name.pop();
    }
    name.trim_end().to_owned()
}

fn write_conversation(
    sql: &mut dyn SqlConnection,
    name: &str,
    mut foreign: ForeignConversation,
    import: &mut ImportRequest<'_>,
    lost: &mut ImportLosses,
) -> Result<ImportedConversation, SqlError> {
    let now = rows::now_ms();
    let created = foreign.created.or_else(|| foreign.turns.iter().find_map(|t| t.at)).unwrap_or(now);
    let used = foreign.turns.iter().filter_map(|t| t.at).max().unwrap_or(now);
    let id = rows::create_conversation(sql, name, created)?;
    // What has no number stands in front, and everything else moves behind it.
    let shift =
        u32::from(foreign.turns[0].number.is_none() && foreign.turns.iter().any(|t| t.number.is_some()));
    let mut timeline = Timeline::new();
    let (mut seq, mut speakers) = (0u64, BTreeMap::new());
    let mut model = None;
    for turn in std::mem::take(&mut foreign.turns) {
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
    write_side_records(sql, id, &foreign, &speakers, shift, &timeline, lost)?;
    rows::write_whole_state(sql, id, seq, &timeline)?;
    rows::set_model(sql, id, model.as_deref().unwrap_or_default())?;
    sql.execute(
        "UPDATE conversation SET used = $1 WHERE id = $2",
        &[SqlValue::Int(used), SqlValue::Int(id)],
    )?;
    Ok(ImportedConversation::new(name, &timeline))
}

/// Notes, the search index and the names of who spoke.
fn write_side_records(
    sql: &mut dyn SqlConnection,
    id: i64,
    foreign: &ForeignConversation,
    speakers: &BTreeMap<String, String>,
    shift: u32,
    timeline: &Timeline,
    lost: &mut ImportLosses,
) -> Result<(), SqlError> {
    let now = rows::now_ms();
    let json = |value: &serde_json::Value| value.to_string();
    if let Some(notes) = &foreign.notes {
        rows::put_record(sql, id, RecordKind::Note.name(), "notes.json", Some(&json(notes)), now)?;
    }
    if !speakers.is_empty() {
        rows::put_record(
            sql,
            id,
            RecordKind::Setting.name(),
            "speakers",
            Some(&json(&serde_json::json!(speakers))),
            now,
        )?;
    }
    if let Some(model) = &foreign.model {
        rows::put_record(sql, id, RecordKind::Setting.name(), "imported.model", Some(model), now)?;
    }
    let mut entries = Vec::new();
    for entry in &foreign.index {
        let chunk = ChunkId::new(entry.role, TurnId(entry.turn.saturating_add(shift)), entry.chunk_index);
        if timeline.chunk(chunk).is_none() {
            lost.add("index entries whose chunk was cut differently", 1);
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
        let value = json(&serde_json::json!(entries));
        rows::put_record(sql, id, RecordKind::Setting.name(), "imported.index", Some(&value), now)?;
    }
    Ok(())
}

/// A token on its way in.
#[derive(Clone, Debug)]
struct ImportToken {
    token: NewToken,
    pruned: bool,
    pinned: bool,
}

/// The tokens of a message. `model` becomes whose they are.
fn tokenize_turn(
    turn: ForeignTurn,
    import: &mut ImportRequest<'_>,
    model: &mut Option<String>,
) -> Result<Vec<ImportToken>, SqlError> {
    let has_model = import.model.is_some();
    let mut tokenize = |text: &str, special| -> Result<Vec<ModelToken>, SqlError> {
        match &mut import.model {
            Some(own) => {
                *model = Some(own.info().name.clone());
                own.tokenize(text, special).map_err(|e| SqlError::invalid_input(e.to_string()))
            }
            None => Ok(split_words(text)),
        }
    };
    let fresh = |piece: ModelToken, sentence| ImportToken {
        token: NewToken {
            id: piece.id,
            text: piece.text,
            chunk_index: sentence,
            brightness: import.initial_brightness,
            kind: ContentKind::Message,
        },
        pruned: false,
        pinned: false,
    };
    match turn.content {
        ForeignContent::Text(text) => {
            let mut chunker = Chunker::new(import.chunk_size);
            let mut tokens: Vec<ImportToken> = Vec::new();
            for piece in tokenize(&text, false)? {
                let placed = chunker.push(&piece.text);
                tokens.push(fresh(piece, placed.chunk_index));
                let moved = placed.moved_tokens.map_or(0, |n| n as usize);
                let from = tokens.len().saturating_sub(moved);
                tokens[from..].iter_mut().for_each(|t| t.token.chunk_index = placed.chunk_index);
            }
            Ok(tokens)
        }
        ForeignContent::Tokens(old) => {
            if !has_model {
                return Ok(old
                    .iter()
                    .map(|t| carry_over_token(t, t.id.map_or(UNTOKENIZED, TokenId), t.text.clone()))
                    .collect());
            }
            let text: String = old.iter().map(|t| t.text.as_str()).collect();
            let pieces = tokenize(&text, true)?;
            let agree =
                pieces.len() == old.len() && pieces.iter().zip(&old).all(|(p, t)| Some(p.id.0) == t.id);
            if agree {
                return Ok(old
                    .iter()
                    .map(|t| carry_over_token(t, t.id.map_or(UNTOKENIZED, TokenId), t.text.clone()))
                    .collect());
            }
            // Each new token takes over from the old one that stood where it begins.
            let (mut at, mut i, mut end) = (0, 0, old[0].text.len());
            let carry = |piece: ModelToken| {
                while end <= at && i + 1 < old.len() {
                    i += 1;
                    end += old[i].text.len();
                }
                at += piece.text.len();
                carry_over_token(&old[i], piece.id, piece.text)
            };
            Ok(pieces.into_iter().map(carry).collect())
        }
    }
}

fn carry_over_token(old: &ForeignToken, id: TokenId, text: String) -> ImportToken {
    let brightness = Brightness(old.brightness);
    let voice = if old.tool { ContentKind::ToolResult } else { ContentKind::Message };
    let token = NewToken { id, text, chunk_index: old.chunk_index, brightness, kind: voice };
    ImportToken { token, pruned: old.pruned, pinned: old.pinned }
}

/// A text cut into words, each with the space before it, for as long as no model has read it. What is written
/// without spaces is cut at every character; long words every few.
fn split_words(text: &str) -> Vec<ModelToken> {
    let mut pieces: Vec<ModelToken> = Vec::new();
    let mut word = 0;
    for c in text.chars() {
        let dense = c >= '\u{2E80}';
        let starts = dense || c.is_whitespace() || word >= 12 || pieces.is_empty();
        if starts {
            pieces.push(ModelToken { id: UNTOKENIZED, text: String::new() });
            word = 0;
        }
        word = if dense { 12 } else { word + 1 };
        if let Some(last) = pieces.last_mut() {
            last.text.push(c);
        }
    }
    pieces
}

/// What happened when a message was spoken, and since.
fn turn_changes(timeline: &Timeline, turn: TurnId, role: Role, tokens: Vec<ImportToken>) -> Vec<Change> {
    let at = timeline.next_position();
    let (mut pins, mut leaves, mut start) = (Vec::new(), Vec::new(), 0);
    for chunk in tokens.chunk_by(|a, b| a.token.chunk_index == b.token.chunk_index) {
        let id = ChunkId::new(role, turn, chunk[0].token.chunk_index);
        let runs = runs_where(at.plus(start), chunk, |t| t.pruned);
        start += chunk.len();
        if chunk.iter().any(|t| t.pinned) {
            pins.push(Change::Pin { chunk: id, pinned: true });
        }
        if !runs.is_empty() {
            leaves.push(Pruned { chunk: id, extent: Extent::Runs(runs), reason: PruneReason::BeforeImport });
        }
    }
    let said = tokens.into_iter().map(|t| t.token).collect();
    let mut changes = vec![Change::Append(Append { at, turn, role, tokens: said })];
    changes.append(&mut pins);
    if !leaves.is_empty() {
        changes.push(Change::Prune(leaves));
    }
    changes
}
