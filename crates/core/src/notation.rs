//! A timeline in one line of text, for tests, logs and questions to the maintainers.
//!
//! ```text
//! u0.0:5*900! a1.0:3*7 ~a1.1[9,8,~3] xu2.0^4
//! ```
//! Each word is a chunk: `~` dead or `x` deleted, the name, `:5` how many tokens (1 if not said), `*900` how
//! bright each is (10000 if not said) or `[9,8,~3]` token by token, `^4` its votes, `$0.5` the attention it
//! received, `!` pinned.

use crate::change::{
    Append, Change, DeleteReason, Extent, Leave, NewToken, Part, Run, Score, Tally, TallyChange, WhyLeft,
};
use crate::timeline::{ChunkRef, Timeline};
use crate::token::{Brightness, ChunkId, Flags, TokenId, Voice};
use std::fmt::Write;

/// Why a text is not a timeline.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{word}' is not a chunk of a timeline: {why}")]
pub struct BadNotation {
    word: String,
    why: String,
}

/// What one word says.
struct Word {
    chunk: ChunkId,
    /// Brightness and flags of each token.
    tokens: Vec<(f32, Flags)>,
    votes: i64,
    mass: f64,
    pinned: bool,
}

/// Reads a timeline. Its tokens are all the word `w` with a space, and their ids count from 0.
///
/// # Errors
/// When a word is none, or the chunks are out of order.
pub fn read(text: &str) -> Result<Timeline, BadNotation> {
    let mut timeline = Timeline::new();
    for word in text.split_whitespace() {
        let bad = |why: String| BadNotation { word: word.to_owned(), why };
        let parsed = parse(word).map_err(|why| bad(why.to_owned()))?;
        let changes = build(&timeline, &parsed);
        timeline.apply(&changes).map_err(|e| bad(e.to_string()))?;
    }
    Ok(timeline)
}

/// Writes a timeline; [`read`] gives it back, but for what a line cannot hold: the tokens' text and ids, whether
/// they are a tool's, whether a withdrawn one was dead before, and how often a chunk could have been looked at.
#[must_use]
pub fn write(timeline: &Timeline) -> String {
    timeline.chunks().map(|c| write_chunk(timeline, c)).collect::<Vec<_>>().join(" ")
}

fn write_chunk(timeline: &Timeline, chunk: ChunkRef<'_>) -> String {
    let tokens: Vec<_> = chunk.run().positions().filter_map(|p| timeline.token(p)).collect();
    let state = |f: Flags| match (f.has(Flags::WITHDRAWN), f.has(Flags::DEAD)) {
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
        if tokens[0].brightness.0 != DEFAULT {
            let _ = write!(out, "*{}", tokens[0].brightness);
        }
    } else {
        let part = |t: &crate::timeline::TokenRef<'_>| {
            format!("{}{}", if uniform { "" } else { state(t.flags) }, t.brightness)
        };
        let _ = write!(out, "[{}]", tokens.iter().map(part).collect::<Vec<_>>().join(","));
    }
    let tally = chunk.tally();
    if tally.votes > 0 {
        let _ = write!(out, "^{}", tally.votes);
    }
    if tally.mass > 0 {
        let _ = write!(out, "${}", tally.mass as f64 / Tally::UNIT);
    }
    if chunk.is_pinned() {
        out.push('!');
    }
    out
}

const DEFAULT: f32 = 10_000.0;

fn parse(word: &str) -> Result<Word, &'static str> {
    let (state, rest) = split_state(word);
    let end = rest.find([':', '*', '[', '^', '$', '!']).unwrap_or(rest.len());
    let chunk = rest[..end].parse().map_err(|_| "write role, turn and sentence, such as u4.0")?;
    let mut rest = &rest[end..];
    let mut parsed = Word { chunk, tokens: vec![(DEFAULT, state)], votes: 0, mass: 0.0, pinned: false };
    while let Some(mark) = rest.chars().next() {
        rest = &rest[mark.len_utf8()..];
        if mark == '!' {
            parsed.pinned = true;
            continue;
        }
        if mark == '[' {
            let (list, after) = rest.split_once(']').ok_or("a list of brightness ends with ]")?;
            parsed.tokens = list.split(',').map(|t| token(t, state)).collect::<Result<_, _>>()?;
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

fn split_state(word: &str) -> (Flags, &str) {
    if let Some(rest) = word.strip_prefix('~') {
        (Flags::DEAD, rest)
    } else if let Some(rest) = word.strip_prefix('x') {
        (Flags::WITHDRAWN, rest)
    } else {
        (Flags::default(), word)
    }
}

fn token(text: &str, whole: Flags) -> Result<(f32, Flags), &'static str> {
    let (state, number) = split_state(text.trim());
    let flags = if state == Flags::default() { whole } else { state };
    Ok((number.parse().map_err(|_| "a list holds brightness, with ~ or x before it")?, flags))
}

fn build(timeline: &Timeline, word: &Word) -> Change {
    let (chunk, start) = (word.chunk, timeline.next_position());
    let new = |(i, &(b, _)): (usize, &(f32, Flags))| NewToken {
        id: TokenId(start.plus(i).0 as u32),
        text: "w ".into(),
        sentence: chunk.sentence,
        brightness: Brightness(b),
        voice: Voice::Speaker,
    };
    let tokens = word.tokens.iter().enumerate().map(new).collect();
    let mut changes = vec![Change::Append(Append { at: start, turn: chunk.turn, role: chunk.role, tokens })];
    let with = |flag: Flags| -> Vec<Run> {
        let of = word.tokens.iter().enumerate().filter(|(_, t)| t.1.has(flag));
        of.map(|(i, _)| Run { start: start.plus(i), len: 1 }).collect()
    };
    let (dead, gone) = (with(Flags::DEAD), with(Flags::WITHDRAWN));
    if !dead.is_empty() {
        changes.push(Change::Prune(vec![Leave { chunk, extent: Extent::Runs(dead), why: WhyLeft::Manual }]));
    }
    if !gone.is_empty() {
        changes.push(Change::Withdraw {
            parts: vec![Part { chunk, extent: Extent::Runs(gone) }],
            reason: DeleteReason::User,
        });
    }
    if word.votes != 0 || word.mass != 0.0 {
        let mass = (word.mass * Tally::UNIT) as i64;
        // As if one step had looked at it.
        let looks = if mass == 0 { 0 } else { word.tokens.len() as i64 };
        let tally = TallyChange { votes: word.votes, mass, looks };
        changes.push(Change::Score(Score { runs: Vec::new(), tallies: vec![(chunk, tally)] }));
    }
    if word.pinned {
        changes.push(Change::Pin { chunk, pinned: true });
    }
    Change::Batch(changes)
}
