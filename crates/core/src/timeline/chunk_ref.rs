//! Read access to one chunk of a timeline.

use super::{Chunk, Timeline};
use crate::change::{AttentionTally, TokenRun};
use crate::chunk_body::ChunkBody;
use crate::token::{Brightness, ChunkId, Position, TokenFlags, TokenId};
use std::borrow::Cow;
use std::ops::Range;

/// One token of a timeline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenRef<'a> {
    /// Its index on the timeline.
    pub position: Position,
    /// Its number in the vocabulary of the model.
    pub id: TokenId,
    /// The text that it adds; empty while a character is incomplete.
    pub text: &'a str,
    /// How much attention it has received; for a pruned token, the value at the time of pruning.
    pub brightness: Brightness,
    /// Whether it is pruned or deleted, and what kind of content it is.
    pub flags: TokenFlags,
    /// The chunk that holds it.
    pub chunk: ChunkId,
}

/// A chunk of a timeline, by reference.
///
/// The text, brightness, flags and tally of a chunk are in its body. While any token of the chunk is live, the body
/// is loaded; before these are read of another chunk, the store loads the body
/// ([`Store::load_bodies`](crate::store::Store::load_bodies)).
#[derive(Clone, Copy, Debug)]
pub struct ChunkRef<'a> {
    pub(super) timeline: &'a Timeline,
    pub(super) row_index: usize,
}

impl<'a> ChunkRef<'a> {
    fn row(self) -> &'a Chunk {
        &self.timeline.chunks[self.row_index]
    }

    /// Its row number in the timeline, counting the empty rows of merged chunks.
    #[must_use]
    pub fn row_index(self) -> usize {
        self.row_index
    }

    /// Whether its tokens are in memory; always so while any of them is live.
    #[must_use]
    pub fn is_loaded(self) -> bool {
        self.row().loaded_body().is_some()
    }

    /// Its tokens, in columns.
    ///
    /// # Panics
    /// When the body is not loaded. So do all methods here that read the text, brightness, flags or tally.
    #[must_use]
    pub fn body(self) -> &'a ChunkBody {
        self.row().loaded_body().unwrap_or_else(|| panic!("the body of {} is not loaded", self.id()))
    }

    /// The index of a token in the body.
    pub(super) fn token_index(self, position: Position) -> usize {
        (position.0 - self.start().0) as usize
    }

    /// The indices of a run of its tokens in the body.
    pub(crate) fn body_range(self, run: TokenRun) -> Range<usize> {
        let start = self.token_index(run.start);
        start..start + run.len as usize
    }

    /// The vocabulary ids of a run of its tokens.
    #[must_use]
    pub fn ids(self, run: TokenRun) -> &'a [TokenId] {
        &self.body().ids[self.body_range(run)]
    }

    /// The brightness of a run of its tokens.
    #[must_use]
    pub fn brightness(self, run: TokenRun) -> &'a [Brightness] {
        &self.body().brightness[self.body_range(run)]
    }

    /// The text of a run of its tokens.
    #[must_use]
    pub fn text_of(self, run: TokenRun) -> &'a str {
        self.body().text(self.body_range(run))
    }

    /// Its id: role, turn and index in the turn.
    #[must_use]
    pub fn id(self) -> ChunkId {
        self.row().id
    }

    /// The position of its first token.
    #[must_use]
    pub fn start(self) -> Position {
        self.row().start
    }

    /// All its tokens as one run.
    #[must_use]
    pub fn run(self) -> TokenRun {
        TokenRun { start: self.row().start, len: self.row().len }
    }

    /// How many tokens it has: live, pruned and deleted.
    #[must_use]
    pub fn len(self) -> usize {
        self.row().len as usize
    }

    /// Whether it has no tokens. Only the row of a merged chunk is empty, and the accessors of a timeline skip it.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.row().len == 0
    }

    /// How many of its tokens are live.
    #[must_use]
    pub fn live_len(self) -> usize {
        self.row().live as usize
    }

    /// How many of its tokens are deleted.
    #[must_use]
    pub fn deleted_len(self) -> usize {
        self.row().deleted as usize
    }

    /// How many of its tokens are pruned and not deleted: what resurrecting it would cost.
    #[must_use]
    pub fn pruned_len(self) -> usize {
        self.len() - self.live_len() - self.deleted_len()
    }

    /// Whether its text was erased for good. False while the body is not loaded.
    #[must_use]
    pub fn is_forgotten(self) -> bool {
        self.is_loaded() && self.body().ids.contains(&TokenId::FORGOTTEN)
    }

    /// Whether any of its tokens is live.
    #[must_use]
    pub fn is_live(self) -> bool {
        self.row().live > 0
    }

    /// Whether all its tokens are deleted.
    #[must_use]
    pub fn is_deleted(self) -> bool {
        self.row().deleted == self.row().len
    }

    /// Whether it is protected from pruning.
    #[must_use]
    pub fn is_pinned(self) -> bool {
        self.row().pinned
    }

    /// The attention that it has received so far.
    #[must_use]
    pub fn tally(self) -> AttentionTally {
        self.body().tally
    }

    /// The text of its live tokens, without chat template tokens.
    #[must_use]
    pub fn live_text(self) -> Cow<'a, str> {
        let body = self.body();
        if body.flags.iter().all(|f| f.is_live() && !f.contains(TokenFlags::TEMPLATE)) {
            return body.text.as_str().into();
        }
        self.runs_where(|f| f.is_live() && !f.contains(TokenFlags::TEMPLATE))
            .map(|run| self.text_of(run))
            .collect()
    }

    /// The text of its live and pruned tokens, without chat template tokens. Deleted tokens are left out, unless all
    /// are deleted: then the text is that of all of them.
    #[must_use]
    pub fn text(self) -> Cow<'a, str> {
        let body = self.body();
        let all = self.deleted_len() == 0 || self.is_deleted();
        if all && !body.flags.iter().any(|f| f.contains(TokenFlags::TEMPLATE)) {
            return body.text.as_str().into();
        }
        let included =
            |f: TokenFlags| !f.contains(TokenFlags::TEMPLATE) && (all || !f.contains(TokenFlags::DELETED));
        self.runs_where(included).map(|run| self.text_of(run)).collect()
    }

    /// The brightness of its live tokens, or of all tokens where none is live, as slices. Chat template tokens are
    /// left out where there are others: they receive attention for their place, not for what they say.
    pub fn brightness_runs(self) -> impl Iterator<Item = &'a [Brightness]> {
        let live = self.is_live();
        let counts = move |f: TokenFlags| f.is_live() || !live;
        let flags = &self.body().flags;
        let has_template = flags.iter().any(|f| f.contains(TokenFlags::TEMPLATE));
        let skip_template =
            has_template && flags.iter().any(|&f| counts(f) && !f.contains(TokenFlags::TEMPLATE));
        let all = !skip_template && (!live || self.live_len() == self.len());
        let some = (!all).then(|| {
            self.runs_where(move |f| counts(f) && !(skip_template && f.contains(TokenFlags::TEMPLATE)))
        });
        let runs = all.then(|| self.run()).into_iter().chain(some.into_iter().flatten());
        runs.map(move |run| self.brightness(run))
    }

    /// The brightness of its brightest token, among those of [`brightness_runs`](Self::brightness_runs).
    #[must_use]
    pub fn peak(self) -> Brightness {
        let brighter = |a: f32, b: &Brightness| if b.0 > a { b.0 } else { a };
        // Sixteen independent maxima, so that the compiler can use wide registers.
        let mut lanes = [f32::NEG_INFINITY; 16];
        let mut peak = f32::NEG_INFINITY;
        for brightness in self.brightness_runs() {
            let blocks = brightness.chunks_exact(16);
            peak = blocks.remainder().iter().fold(peak, brighter);
            for block in blocks {
                lanes.iter_mut().zip(block).for_each(|(lane, b)| *lane = brighter(*lane, b));
            }
        }
        Brightness(lanes.iter().fold(peak, |a, &b| if b > a { b } else { a }))
    }

    /// The runs of tokens whose flags satisfy `predicate`, in order.
    pub(crate) fn runs_where(self, predicate: impl Fn(TokenFlags) -> bool) -> impl Iterator<Item = TokenRun> {
        let start = self.start();
        let flags = &self.body().flags;
        let mut at = 0;
        std::iter::from_fn(move || {
            at += flags[at..].iter().position(|&f| predicate(f))?;
            let len = flags[at..].iter().position(|&f| !predicate(f)).unwrap_or(flags.len() - at);
            let run = TokenRun { start: start.plus(at), len: len as u32 };
            at += len;
            Some(run)
        })
    }

    /// Its live tokens as runs, in order.
    pub fn live_runs(self) -> impl Iterator<Item = TokenRun> + use<'a> {
        let all = self.live_len() == self.len();
        let some = (!all).then(|| self.runs_where(TokenFlags::is_live));
        all.then(|| self.run()).into_iter().chain(some.into_iter().flatten())
    }

    /// The position of its `n`-th live token, counted from 0.
    pub(crate) fn live_position(self, n: usize) -> Option<Position> {
        if self.live_len() == self.len() {
            return (n < self.len()).then(|| self.start().plus(n));
        }
        let flags = &self.body().flags;
        let (i, _) = flags.iter().enumerate().filter(|(_, f)| f.is_live()).nth(n)?;
        Some(self.start().plus(i))
    }

    /// How many live tokens of the chunk come before `position`; none where that token is not live.
    pub(crate) fn live_rank(self, position: Position) -> Option<usize> {
        let i = self.token_index(position);
        if self.live_len() == self.len() {
            return Some(i);
        }
        if !self.is_live() {
            return None;
        }
        let flags = &self.body().flags;
        flags[i].is_live().then(|| flags[..i].iter().filter(|f| f.is_live()).count())
    }
}
