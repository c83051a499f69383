//! How a conversation from elsewhere becomes one of ours: as changes, like everything that happens here.
//!
//! A file is taken in whole or not at all. Without a model, text is cut into words, which no model has read yet:
//! the first model to open the conversation cuts it into its own tokens. What comes with token ids keeps them
//! where the model agrees; else its text is cut anew, and each token takes over the light of the one that stood
//! where it begins.

use super::foreign::{
    Content, Foreign, ForeignToken, ForeignTurn, Format, Losses, ReadError, detect, is_zip, read,
};
use super::{Arrival, Arrivals, own, taken};
use crate::database::Database;
use crate::rows;
use crate::sql::{Cell, Sql, SqlError};
use crate::worlds;
use halo_core::change::{Append, Change, Extent, Leave, NewToken, WhyLeft};
use halo_core::chunk::{ChunkSize, Chunker};
use halo_core::seams::{Durability, Embedding, Kind, Model, Piece, SeamError, WorldRow};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, Role, TokenId, TurnId, Voice};
use halo_core::told::runs;
use std::collections::{BTreeMap, BTreeSet};
use std::io::BufRead;

/// What a token is called that no model has read yet.
pub const UNREAD: TokenId = TokenId(u32::MAX);

/// How a file is to be taken in.
pub struct Import<'a> {
    /// Its name, which may tell its format.
    pub file_name: &'a str,
    /// Its format, where it is not to be told from the file itself.
    pub format: Option<&'a str>,
    /// What the conversation is to be called; its own name, where the file has one.
    pub name: Option<&'a str>,
    /// How large chunks are.
    pub size: ChunkSize,
    /// What new tokens start with.
    pub brightness: Brightness,
    /// Whose tokens it becomes.
    pub model: Option<&'a mut dyn Model>,
    /// Who says whether the rows of a world of that name come in; where there is nobody, none does.
    pub admit: Option<&'a Admit<'a>>,
}

/// Who says whether a world comes in.
pub type Admit<'a> = dyn Fn(&str, &[WorldRow]) -> Result<(), SeamError> + 'a;

impl Database {
    /// Takes in a file of any known format: all of it, or on an error nothing.
    ///
    /// # Errors
    /// When the format is not known or the file is damaged; the store is then as it was.
    pub fn import(&mut self, input: &mut dyn BufRead, mut import: Import<'_>) -> Result<Arrivals, SeamError> {
        let what = format!("importing {}", import.file_name);
        let head = input.fill_buf().map_err(|e| SeamError::new(&what, e.to_string()))?.to_vec();
        let shape = shape_of(&head, &import).map_err(|e| e.doing(&what))?;
        let done = self.within(Some(Durability::Now), |sql| match shape {
            None => {
                let arrival = own::import(sql, input, &import)?;
                let format = "an export of Halo".to_owned();
                Ok(Arrivals { conversations: vec![arrival], lost: Losses::default(), format })
            }
            Some(format) => take_in(sql, input, format, &mut import),
        });
        done.map_err(|e| e.doing(what))
    }
}

/// The format of a file; none for our own.
fn shape_of(head: &[u8], import: &Import<'_>) -> Result<Option<Format>, SqlError> {
    let names = || Format::ALL.map(Format::name).join(", ");
    match import.format {
        Some("halo") => return Ok(None),
        None | Some("auto") => {}
        Some(name) => {
            let unknown =
                || SqlError::refused(format!("'{name}' is no format; there are auto, halo, {}", names()));
            return Format::from_name(name).map(Some).ok_or_else(unknown);
        }
    }
    if own::is_own(head) {
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
        return Err(SqlError::refused(*why));
    }
    let unknown = || {
        SqlError::refused(format!(
            "its format is not known; if it is one of halo, {}, say so with --format",
            names()
        ))
    };
    detect(head, import.file_name).map(Some).ok_or_else(unknown)
}

/// Takes in what another program wrote, within a transaction of the caller's.
fn take_in(
    sql: &mut dyn Sql,
    input: &mut dyn BufRead,
    format: Format,
    import: &mut Import<'_>,
) -> Result<Arrivals, SqlError> {
    let mut arrivals = Arrivals { format: format.to_string(), ..Arrivals::default() };
    let mut names = BTreeSet::new();
    let done = read(format, input, &mut |foreign| {
        if foreign.turns.is_empty() {
            arrivals.lost.add("conversations in which nothing was said", 1);
            arrivals.lost.merge(&foreign.lost);
            return Ok(());
        }
        let refused = |e: SqlError| ReadError::Stopped(Box::new(e));
        let name = free_name(sql, &foreign, import, &mut names).map_err(refused)?;
        arrivals.lost.merge(&foreign.lost);
        let arrival = settle(sql, &name, foreign, import, &mut arrivals.lost).map_err(refused)?;
        arrivals.conversations.push(arrival);
        Ok(())
    });
    done.map_err(|error| match error {
        ReadError::Stopped(why) => match why.downcast::<SqlError>() {
            Ok(error) => *error,
            Err(why) => SqlError::refused(why.to_string()),
        },
        error => SqlError::refused(error.to_string()),
    })?;
    if arrivals.conversations.is_empty() {
        return Err(SqlError::refused(format!("it is {format} in which nothing was said")));
    }
    Ok(arrivals)
}

/// A name that nobody has: as asked for, or the conversation's own, with a number behind it where needed. What was
/// asked for by name is not renamed, unless the file holds more conversations than one.
fn free_name(
    sql: &mut dyn Sql,
    foreign: &Foreign,
    import: &Import<'_>,
    names: &mut BTreeSet<String>,
) -> Result<String, SqlError> {
    let stem = import.file_name.rsplit(['/', '\\']).next().unwrap_or_default();
    let stem = stem.rsplit_once('.').map_or(stem, |(stem, _)| stem);
    let own = foreign.name.as_deref().unwrap_or(stem);
    let asked = import.name.map_or_else(|| one_line(own), str::to_owned);
    let asked = match worlds::check(&asked) {
        Ok(()) if asked.is_empty() => "imported".to_owned(),
        Ok(()) => asked,
        // Whoever wrote that title did not mean a world of ours.
        Err(_) if import.name.is_none() => format!("imported {asked}"),
        Err(why) => return Err(why),
    };
    for n in 1..10_000 {
        let name = if n == 1 { asked.clone() } else { format!("{asked} ({n})") };
        let free = !names.contains(&name) && rows::find(sql, &name)?.is_none();
        if free {
            names.insert(name.clone());
            return Ok(name);
        }
        if import.name.is_some() && names.is_empty() {
            return Err(taken(&name));
        }
    }
    Err(taken(&asked))
}

/// A title as a name: on one line, and not too long.
fn one_line(title: &str) -> String {
    let words: Vec<_> =
        title.split(|c: char| c.is_control() || c.is_whitespace()).filter(|w| !w.is_empty()).collect();
    let mut name = words.join(" ");
    while name.len() > 180 {
        name.pop();
    }
    name.trim_end().to_owned()
}

/// Writes one conversation.
fn settle(
    sql: &mut dyn Sql,
    name: &str,
    mut foreign: Foreign,
    import: &mut Import<'_>,
    lost: &mut Losses,
) -> Result<Arrival, SqlError> {
    let now = rows::now();
    let created = foreign.created.or_else(|| foreign.turns.iter().find_map(|t| t.at)).unwrap_or(now);
    let used = foreign.turns.iter().filter_map(|t| t.at).max().unwrap_or(now);
    let id = rows::create(sql, name, created)?;
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
        let tokens = cut(turn, import, &mut model)?;
        for change in changes(&timeline, number, role, tokens) {
            timeline.apply(&change).map_err(|e| SqlError::refused(format!("turn {}: {e}", number.0)))?;
            seq += 1;
            rows::insert_entry(sql, rows::key(id, seq as usize), at, &change)?;
            rows::insert_mentions(sql, id, seq.cast_signed(), &change)?;
        }
    }
    keep_beside(sql, id, &foreign, &speakers, shift, &timeline, lost)?;
    rows::write_all(sql, id, seq, &timeline)?;
    rows::set_model(sql, id, model.as_deref().unwrap_or_default())?;
    sql.run("UPDATE conversation SET used = $1 WHERE id = $2", &[Cell::Int(used), Cell::Int(id)])?;
    Ok(Arrival::of(name, &timeline))
}

/// Notes, the search index and the names of who spoke.
fn keep_beside(
    sql: &mut dyn Sql,
    id: i64,
    foreign: &Foreign,
    speakers: &BTreeMap<String, String>,
    shift: u32,
    timeline: &Timeline,
    lost: &mut Losses,
) -> Result<(), SqlError> {
    let now = rows::now();
    let json = |value: &serde_json::Value| value.to_string();
    if let Some(notes) = &foreign.notes {
        rows::put_record(sql, id, Kind::Note, "notes.json", Some(&json(notes)), now)?;
    }
    if !speakers.is_empty() {
        rows::put_record(sql, id, Kind::Setting, "speakers", Some(&json(&serde_json::json!(speakers))), now)?;
    }
    if let Some(model) = &foreign.model {
        rows::put_record(sql, id, Kind::Setting, "imported.model", Some(model), now)?;
    }
    let mut entries = Vec::new();
    for entry in &foreign.index {
        let chunk = ChunkId::new(entry.role, TurnId(entry.turn.saturating_add(shift)), entry.sentence);
        if timeline.chunk(chunk).is_none() {
            lost.add("index entries whose chunk was cut differently", 1);
            continue;
        }
        if let Some(vector) = entry.embedding.as_deref().filter(|v| !v.is_empty()) {
            let embedding = Embedding { chunk, of: 0, vector: vector.to_vec() };
            rows::put_embedding(sql, id, "halo_weave", &embedding, now)?;
        }
        let (name, references) = (chunk.to_string(), entry.references);
        entries.push(serde_json::json!({ "chunk": name, "text": entry.text, "references": references }));
    }
    if !entries.is_empty() {
        let value = json(&serde_json::json!(entries));
        rows::put_record(sql, id, Kind::Setting, "imported.index", Some(&value), now)?;
    }
    Ok(())
}

/// A token on its way in.
#[derive(Clone, Debug)]
struct Arriving {
    token: NewToken,
    dead: bool,
    pinned: bool,
}

/// The tokens of a message. `model` becomes whose they are.
fn cut(
    turn: ForeignTurn,
    import: &mut Import<'_>,
    model: &mut Option<String>,
) -> Result<Vec<Arriving>, SqlError> {
    let has_model = import.model.is_some();
    let mut tokenize = |text: &str, special| -> Result<Vec<Piece>, SqlError> {
        match &mut import.model {
            Some(own) => {
                *model = Some(own.info().name.clone());
                own.tokenize(text, special).map_err(|e| SqlError::refused(e.to_string()))
            }
            None => Ok(words(text)),
        }
    };
    let fresh = |piece: Piece, sentence| Arriving {
        token: NewToken {
            id: piece.id,
            text: piece.text,
            sentence,
            brightness: import.brightness,
            voice: Voice::Speaker,
        },
        dead: false,
        pinned: false,
    };
    match turn.content {
        Content::Text(text) => {
            let mut chunker = Chunker::new(import.size);
            let mut tokens: Vec<Arriving> = Vec::new();
            for piece in tokenize(&text, false)? {
                let placed = chunker.push(&piece.text);
                tokens.push(fresh(piece, placed.sentence));
                let moved = placed.moved.map_or(0, |n| n as usize);
                let from = tokens.len().saturating_sub(moved);
                tokens[from..].iter_mut().for_each(|t| t.token.sentence = placed.sentence);
            }
            Ok(tokens)
        }
        Content::Tokens(old) => {
            if !has_model {
                return Ok(old
                    .iter()
                    .map(|t| kept(t, t.id.map_or(UNREAD, TokenId), t.text.clone()))
                    .collect());
            }
            let text: String = old.iter().map(|t| t.text.as_str()).collect();
            let pieces = tokenize(&text, true)?;
            let agree =
                pieces.len() == old.len() && pieces.iter().zip(&old).all(|(p, t)| Some(p.id.0) == t.id);
            if agree {
                return Ok(old
                    .iter()
                    .map(|t| kept(t, t.id.map_or(UNREAD, TokenId), t.text.clone()))
                    .collect());
            }
            // Each new token takes over from the old one that stood where it begins.
            let (mut at, mut i, mut end) = (0, 0, old[0].text.len());
            let carry = |piece: Piece| {
                while end <= at && i + 1 < old.len() {
                    i += 1;
                    end += old[i].text.len();
                }
                at += piece.text.len();
                kept(&old[i], piece.id, piece.text)
            };
            Ok(pieces.into_iter().map(carry).collect())
        }
    }
}

fn kept(old: &ForeignToken, id: TokenId, text: String) -> Arriving {
    let brightness = Brightness(old.brightness);
    let voice = if old.tool { Voice::Tool } else { Voice::Speaker };
    let token = NewToken { id, text, sentence: old.sentence, brightness, voice };
    Arriving { token, dead: old.dead, pinned: old.pinned }
}

/// A text cut into words, each with the space before it, for as long as no model has read it. What is written
/// without spaces is cut at every character; long words every few.
fn words(text: &str) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut word = 0;
    for c in text.chars() {
        let dense = c >= '\u{2E80}';
        let starts = dense || c.is_whitespace() || word >= 12 || pieces.is_empty();
        if starts {
            pieces.push(Piece { id: UNREAD, text: String::new() });
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
fn changes(timeline: &Timeline, turn: TurnId, role: Role, tokens: Vec<Arriving>) -> Vec<Change> {
    let at = timeline.next_position();
    let (mut pins, mut leaves, mut start) = (Vec::new(), Vec::new(), 0);
    for chunk in tokens.chunk_by(|a, b| a.token.sentence == b.token.sentence) {
        let id = ChunkId::new(role, turn, chunk[0].token.sentence);
        let runs = runs(at.plus(start), chunk, |t| t.dead);
        start += chunk.len();
        if chunk.iter().any(|t| t.pinned) {
            pins.push(Change::Pin { chunk: id, pinned: true });
        }
        if !runs.is_empty() {
            leaves.push(Leave { chunk: id, extent: Extent::Runs(runs), why: WhyLeft::Before });
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
