//! What can be put together of a conversation whose state and log are both damaged: each chunk from its own row,
//! and where that is damaged from the words in the log. One row that cannot be read costs that row, not the rest.

use crate::block;
use crate::rows::{body_of, chunk_id, entry_of, key, keys, place_of};
use crate::sql::{Cell, Sql, SqlError, Trouble};
use halo_core::body::{Body, sum_of};
use halo_core::change::{Change, NewToken};
use halo_core::parts::{BareHead, Parts};
use halo_core::timeline::{Timeline, Turn};
use halo_core::token::{Brightness, ChunkId, TokenId, Voice};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rescued {
    chunks: usize,
    from_log: usize,
    lost_chunks: usize,
    lost_tokens: usize,
}

impl Rescued {
    /// Whether every word is there.
    pub(crate) fn is_whole(&self) -> bool {
        (self.lost_chunks, self.lost_tokens) == (0, 0)
    }
}

impl fmt::Display for Rescued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} chunks, {} of them from the words in the log", self.chunks, self.from_log)?;
        if self.is_whole() {
            f.write_str("; no word is lost, the reasons of what happened are")
        } else {
            write!(f, "; LOST: {} chunks, and {} tokens of others", self.lost_chunks, self.lost_tokens)
        }
    }
}

/// What the log says, entry by entry, as far as it can be read.
#[derive(Default)]
struct Told {
    /// Every token by its position.
    tokens: BTreeMap<u64, NewToken>,
    /// The positions that were first said in a chunk.
    said: BTreeMap<ChunkId, Vec<u64>>,
    pinned: BTreeMap<ChunkId, bool>,
    /// Chunks that were taken back.
    gone: BTreeSet<ChunkId>,
}

impl Told {
    /// A chunk's positions go to the nearest before it in its turn.
    fn merge(&mut self, chunk: ChunkId) {
        let moved = self.said.remove(&chunk).unwrap_or_default();
        let before = self.said.range_mut(..chunk).rev().find(|(c, p)| c.turn == chunk.turn && !p.is_empty());
        match before {
            Some((_, positions)) => positions.extend(moved),
            None => drop(self.said.insert(chunk, moved)),
        }
    }

    /// A chunk's positions from `at` on become another's.
    fn split(&mut self, chunk: ChunkId, at: u64, sentence: u32) {
        let positions = self.said.entry(chunk).or_default();
        let tail = positions.split_off(positions.partition_point(|&p| p < at));
        self.said.entry(ChunkId { sentence, ..chunk }).or_default().extend(tail);
    }
}

/// Asks for one row; nothing where it cannot be read.
fn one<T>(
    sql: &mut dyn Sql,
    select: &'static str,
    key: i64,
    read: impl Fn(&crate::sql::Row<'_>) -> Result<T, SqlError>,
) -> Result<Option<T>, SqlError> {
    let mut found = None;
    let asked = sql.query(select, &[Cell::Int(key)], &mut |row| {
        found = Some(read(&row)?);
        Ok(())
    });
    match asked {
        Err(error) if error.trouble != Trouble::Damaged => Err(error),
        Err(_) => Ok(None),
        Ok(()) => Ok(found),
    }
}

/// The largest key of a table that can be found, as a place or number.
fn last(sql: &mut dyn Sql, select: &'static str, id: i64) -> usize {
    let mut last = 0;
    let _ = sql.query(select, &keys(id), &mut |row| {
        last = place_of(row.int(0)?);
        Ok(())
    });
    last
}

/// How far to look: as far as rows are found, or a count says, unless that is beyond belief.
fn likely(found: usize, counted: Option<u64>) -> usize {
    let counted = counted.map_or(0, |n| usize::try_from(n).unwrap_or(usize::MAX));
    if counted > found.saturating_mul(2) + 4096 { found } else { found.max(counted) }
}

fn told(sql: &mut dyn Sql, id: i64) -> Result<Told, SqlError> {
    let mut told = Told::default();
    let select = "SELECT key, at, sum, change FROM log WHERE key = $1";
    let end = last(sql, "SELECT key FROM log WHERE key BETWEEN $1 AND $2 ORDER BY key DESC LIMIT 1", id);
    let said = one(sql, "SELECT seq FROM conversation WHERE id = $1", id, |row| row.count(0))?;
    for seq in 1..=likely(end, said) {
        let Some(entry) = one(sql, select, key(id, seq), entry_of)? else { continue };
        for change in entry.change.parts() {
            match change {
                Change::Append(append) => {
                    for (token, at) in append.tokens.iter().zip(append.at.0..) {
                        let chunk = ChunkId::new(append.role, append.turn, token.sentence);
                        told.said.entry(chunk).or_default().push(at);
                        told.tokens.insert(at, token.clone());
                    }
                }
                Change::Pin { chunk, pinned } => drop(told.pinned.insert(*chunk, *pinned)),
                Change::Withdraw { parts, .. } => told.gone.extend(parts.iter().map(|p| p.chunk)),
                Change::Restore(parts) => told.gone.retain(|gone| parts.iter().all(|p| p.chunk != *gone)),
                Change::Merge { chunk, .. } => told.merge(*chunk),
                Change::Split { chunk, at, sentence, .. } => told.split(*chunk, at.0, *sentence),
                _ => {}
            }
        }
    }
    Ok(told)
}

/// What the blocks say, up to the first that cannot be read.
fn known(sql: &mut dyn Sql, id: i64) -> Result<Parts, SqlError> {
    let mut parts = Parts::default();
    for n in 0.. {
        let select = "SELECT sum, heads FROM block WHERE key = $1";
        let bytes = one(sql, select, key(id, n), |row| {
            let bytes = row.blob(1)?;
            Ok((sum_of(bytes) == row.int(0)?.cast_unsigned()).then(|| bytes.to_vec()))
        })?;
        let Some(bytes) = bytes.flatten() else { break };
        if block::read(&bytes, &mut parts).is_none() {
            break;
        }
    }
    Ok(parts)
}

/// A chunk that was found.
struct Found {
    name: ChunkId,
    pinned: bool,
    body: Body,
}

/// Puts a conversation together from all that can be read of it.
pub(crate) fn rescue(sql: &mut dyn Sql, id: i64) -> Result<(Timeline, Rescued), SqlError> {
    let (told, known) = (told(sql, id)?, known(sql, id)?);
    let rows =
        last(sql, "SELECT max(key) FROM chunk WHERE key BETWEEN $1 AND $2 HAVING count(*) > 0", id) + 1;
    let mut rescued = Rescued::default();
    let mut found: Vec<Found> = Vec::new();
    let mut at = 0u64;
    for place in 0..rows.max(known.places()) {
        let head = known.head(place);
        let name = one(sql, "SELECT turn, sentence, role FROM chunk WHERE key = $1", key(id, place), |r| {
            chunk_id(r, 0)
        })?;
        let Some(name) = name.or(head.map(|h| h.id)) else {
            rescued.lost_chunks += 1;
            continue;
        };
        let pinned = head.map_or_else(|| told.pinned.get(&name).copied().unwrap_or_default(), |h| h.pinned);
        let select = "SELECT sum, body FROM chunk WHERE key = $1";
        let body = one(sql, select, key(id, place), |row| body_of(&name, row.int(0)?, row.blob(1)?))?;
        let body = match body.filter(|b| head.is_none_or(|h| h.len as usize == b.len())) {
            Some(body) => body,
            None => {
                let positions: Vec<u64> = match head {
                    Some(head) => (at..at + u64::from(head.len)).collect(),
                    None => told.said.get(&name).cloned().unwrap_or_default(),
                };
                let live =
                    one(sql, "SELECT live FROM chunk WHERE key = $1", key(id, place), |row| row.int(0))?;
                let dead = head.map_or(live != Some(1), |h| h.live == 0);
                let gone =
                    head.map_or(told.gone.contains(&name), |h| h.withdrawn > 0 && h.withdrawn == h.len);
                rescued.from_log += 1;
                from_log(&positions, &told, (dead, gone), &mut rescued)
            }
        };
        at += body.len() as u64;
        rescued.chunks += usize::from(!body.is_empty());
        found.push(Found { name, pinned: pinned && !body.is_empty(), body });
    }
    let timeline = assemble(found, &mut rescued).map_err(SqlError::damaged)?;
    // Tokens that were counted and that no chunk claims.
    let counted = one(sql, "SELECT tokens FROM conversation WHERE id = $1", id, |row| row.count(0))?;
    let said = told.tokens.len().max(likely(timeline.len(), counted));
    rescued.lost_tokens += said.saturating_sub(timeline.len());
    Ok((timeline, rescued))
}

/// A chunk's tokens as the log has them; where it has none, nothing is said there.
fn from_log(positions: &[u64], told: &Told, (dead, gone): (bool, bool), rescued: &mut Rescued) -> Body {
    let token = |at: &u64| told.tokens.get(at).cloned();
    let silent = NewToken {
        id: TokenId(u32::MAX),
        text: String::new(),
        sentence: 0,
        brightness: Brightness(0.0),
        voice: Voice::Speaker,
    };
    let tokens: Vec<Option<NewToken>> = positions.iter().map(token).collect();
    rescued.lost_tokens += tokens.iter().filter(|t| t.is_none()).count();
    Body::said(tokens.into_iter().map(|t| t.unwrap_or_else(|| silent.clone())), dead, gone)
}

/// The timeline that these chunks make; one whose name does not come after those before it is lost.
fn assemble(found: Vec<Found>, rescued: &mut Rescued) -> Result<Timeline, String> {
    let mut parts = Parts::default();
    let mut last: Option<ChunkId> = None;
    for Found { name, pinned, body } in found {
        let same_turn = last.is_some_and(|l| (l.turn, l.role) == (name.turn, name.role));
        let after = match last {
            Some(last) if same_turn => last.sentence < name.sentence,
            Some(last) => last.turn < name.turn,
            None => true,
        };
        if !after {
            rescued.lost_chunks += 1;
            continue;
        }
        if !same_turn {
            parts.turn(Turn { id: name.turn, role: name.role, first: parts.places() as u32 })?;
        }
        let ((live, withdrawn), sum) = (body.counts(), body.sum());
        let (sentence, len, place) = (name.sentence, body.len() as u32, parts.places());
        parts.chunk(&BareHead { sentence, pinned, len, live, withdrawn, sum })?;
        if len > 0 {
            parts.body(place, body)?;
        }
        last = Some(name);
    }
    parts.finish()
}
