//! A timeline in one line of text, for tests, logs and bug reports.
//!
//! ```text
//! u0.0:5*900! a1.0:3*7 ~a1.1[9,8,~3] xu2.0^4
//! ```
//! Each word is a chunk:
//! - `~` for pruned or `x` for deleted, then the chunk id
//! - `:5`, the number of tokens (default 1)
//! - `*900`, the brightness of each (default 10000), or `[9,8,~3]` token by token
//! - `^4`, the votes, and `$0.5`, the sum of the attention received
//! - `!` for pinned

use crate::change::{
    Append, AttentionTally, Change, ChunkSelection, DeleteReason, Extent, NewToken, PruneReason, Pruned,
    Score, TallyDelta, TokenRun,
};
use crate::timeline::{ChunkRef, Timeline, TokenRef};
use crate::token::{Brightness, ChunkId, ContentKind, TokenFlags, TokenId};
use std::fmt::Write;

/// Why a text is not the notation of a timeline.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read the chunk '{word}': {reason}")]
pub struct NotationError {
    word: String,
    reason: String,
}

/// One word of the notation, parsed.
struct NotationChunk {
    chunk: ChunkId,
    /// Brightness and flags of each token.
    tokens: Vec<(f32, TokenFlags)>,
    votes: i64,
    mass: f64,
    pinned: bool,
}

/// Parses a timeline. The text of each token is `w` and a space; the vocabulary ids count from 0.
///
/// # Errors
/// When a word is not a chunk, or the chunks are out of order.
pub fn read(text: &str) -> Result<Timeline, NotationError> {
    let mut timeline = Timeline::new();
    for word in text.split_whitespace() {
        let bad = |reason: String| NotationError { word: word.to_owned(), reason };
        let parsed = parse_chunk(word).map_err(|reason| bad(reason.to_owned()))?;
        let changes = build_change(&timeline, &parsed);
        timeline.apply(&changes).map_err(|e| bad(e.to_string()))?;
    }
    Ok(timeline)
}

/// Writes a timeline so that [`read`] restores it, except for what the notation does not have: text and ids of
/// tokens, content kinds, whether a deleted token was pruned before, and exposures.
#[must_use]
pub fn write(timeline: &Timeline) -> String {
    timeline.chunks().map(|c| write_chunk(timeline, c)).collect::<Vec<_>>().join(" ")
}

fn write_chunk(timeline: &Timeline, chunk: ChunkRef<'_>) -> String {
    let tokens: Vec<_> = chunk.run().positions().filter_map(|p| timeline.token(p)).collect();
    let state = |f: TokenFlags| match (f.contains(TokenFlags::DELETED), f.contains(TokenFlags::PRUNED)) {
        (true, _) => "x",
        (false, true) => "~",
        (false, false) => "",
    };
    let uniform = tokens.windows(2).all(|w| state(w[0].flags) == state(w[1].flags));
    let mut out = String::new();
    if uniform {
        out.push_str(state(tokens[0].flags));
    }
    let _ = write!(out, "{}", chunk.id());
    if uniform && tokens.windows(2).all(|w| w[0].brightness == w[1].brightness) {
        if tokens.len() > 1 {
            let _ = write!(out, ":{}", tokens.len());
        }
        if tokens[0].brightness.0 != DEFAULT_BRIGHTNESS {
            let _ = write!(out, "*{}", tokens[0].brightness);
        }
    } else {
        let write_token =
            |t: &TokenRef<'_>| format!("{}{}", if uniform { "" } else { state(t.flags) }, t.brightness);
        let _ = write!(out, "[{}]", tokens.iter().map(write_token).collect::<Vec<_>>().join(","));
    }
    let tally = chunk.tally();
    if tally.votes > 0 {
        let _ = write!(out, "^{}", tally.votes);
    }
    if tally.mass > 0 {
        let _ = write!(out, "${}", tally.mass as f64 / AttentionTally::MASS_UNIT);
    }
    if chunk.is_pinned() {
        out.push('!');
    }
    out
}

const DEFAULT_BRIGHTNESS: f32 = 10_000.0;

fn parse_chunk(word: &str) -> Result<NotationChunk, &'static str> {
    let (state, rest) = split_state(word);
    let end = rest.find([':', '*', '[', '^', '$', '!']).unwrap_or(rest.len());
    let chunk = rest[..end].parse().map_err(|_| "write role, turn and index, such as u4.0")?;
    let mut rest = &rest[end..];
    let mut parsed = NotationChunk {
        chunk,
        tokens: vec![(DEFAULT_BRIGHTNESS, state)],
        votes: 0,
        mass: 0.0,
        pinned: false,
    };
    while let Some(mark) = rest.chars().next() {
        rest = &rest[mark.len_utf8()..];
        if mark == '!' {
            parsed.pinned = true;
            continue;
        }
        if mark == '[' {
            let (list, after) = rest.split_once(']').ok_or("a list of brightness ends with ]")?;
            parsed.tokens = list.split(',').map(|t| parse_token(t, state)).collect::<Result<_, _>>()?;
            rest = after;
            continue;
        }
        let end = rest.find([':', '*', '[', '^', '$', '!']).unwrap_or(rest.len());
        let number = &rest[..end];
        rest = &rest[end..];
        match mark {
            ':' => {
                let n = number.parse().ok().filter(|n| (1..=10_000_000).contains(n));
                let n: usize = n.ok_or(": takes a number of tokens, from 1 to 10000000")?;
                parsed.tokens = vec![parsed.tokens[0]; n];
            }
            '*' => {
                let b = number.parse().map_err(|_| "* takes a brightness")?;
                parsed.tokens.iter_mut().for_each(|t| t.0 = b);
            }
            '^' => parsed.votes = number.parse().map_err(|_| "^ takes a number of votes")?,
            '$' => parsed.mass = number.parse().map_err(|_| "$ takes an amount of attention")?,
            _ => return Err("use : * [ ] ^ $ and ! only"),
        }
    }
    if parsed.tokens.is_empty() { Err("a chunk has at least one token") } else { Ok(parsed) }
}

fn split_state(word: &str) -> (TokenFlags, &str) {
    if let Some(rest) = word.strip_prefix('~') {
        (TokenFlags::PRUNED, rest)
    } else if let Some(rest) = word.strip_prefix('x') {
        (TokenFlags::DELETED, rest)
    } else {
        (TokenFlags::default(), word)
    }
}

fn parse_token(text: &str, chunk_state: TokenFlags) -> Result<(f32, TokenFlags), &'static str> {
    let (state, number) = split_state(text.trim());
    let flags = if state == TokenFlags::default() { chunk_state } else { state };
    Ok((number.parse().map_err(|_| "a list holds brightness, with ~ or x before it")?, flags))
}

fn build_change(timeline: &Timeline, word: &NotationChunk) -> Change {
    let (chunk, start) = (word.chunk, timeline.next_position());
    let new_token = |(i, &(b, _)): (usize, &(f32, TokenFlags))| NewToken {
        id: TokenId(start.plus(i).0 as u32),
        text: "w ".into(),
        chunk_index: chunk.index,
        brightness: Brightness(b),
        kind: ContentKind::Message,
    };
    let tokens = word.tokens.iter().enumerate().map(new_token).collect();
    let mut changes = vec![Change::Append(Append { at: start, turn: chunk.turn, role: chunk.role, tokens })];
    let runs_with = |flag: TokenFlags| -> Vec<TokenRun> {
        let flagged = word.tokens.iter().enumerate().filter(|(_, t)| t.1.contains(flag));
        flagged.map(|(i, _)| TokenRun { start: start.plus(i), len: 1 }).collect()
    };
    let (pruned, deleted) = (runs_with(TokenFlags::PRUNED), runs_with(TokenFlags::DELETED));
    if !pruned.is_empty() {
        changes.push(Change::Prune(vec![Pruned {
            chunk,
            extent: Extent::Runs(pruned),
            reason: PruneReason::Manual,
        }]));
    }
    if !deleted.is_empty() {
        changes.push(Change::Delete {
            chunks: vec![ChunkSelection { chunk, extent: Extent::Runs(deleted) }],
            reason: DeleteReason::User,
        });
    }
    if word.votes != 0 || word.mass != 0.0 {
        let mass = (word.mass * AttentionTally::MASS_UNIT) as i64;
        // The notation has no exposures: attention counts as that of one step.
        let exposures = if mass == 0 { 0 } else { word.tokens.len() as i64 };
        let tally = TallyDelta { votes: word.votes, mass, exposures };
        changes.push(Change::Score(Score { runs: Vec::new(), tallies: vec![(chunk, tally)] }));
    }
    if word.pinned {
        changes.push(Change::Pin { chunk, pinned: true });
    }
    Change::Batch(changes)
}
