//! A recorded conversation (a capture), scored and pruned again without a model.
//!
//! The same capture and the same rules always give the same outcome; changes to scoring are checked with it. A
//! replay does what a turn does: it appends tokens, scores each step, and prunes once at the end of each
//! answer.

use crate::apply::ApplyError;
use crate::attention::{AttentionError, AttentionStats, check_probabilities, is_traced};
use crate::brightness::ScoringStrategy;
use crate::change::{Append, AttentionTally, Change, Extent, NewToken, Pruned};
use crate::chunker::Chunker;
use crate::prune::plan_prune;
use crate::rules::ContextRules;
use crate::scorer::Scorer;
use crate::timeline::Timeline;
use crate::token::{
    Brightness, ChunkId, ContentKind, Position, Role, TokenFlags, TokenId, TokenSource, TurnId,
};
use std::borrow::Cow;
use std::fmt;

/// A token of the recorded prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedToken {
    /// Its number in the vocabulary of the model.
    pub id: TokenId,
    /// The text that it adds.
    pub text: String,
    /// Its position. Positions that are left out belong to tokens that were pruned.
    pub position: u64,
    /// Its chunk.
    pub chunk: ChunkId,
    /// Its brightness, if it was recorded.
    pub brightness: Option<Brightness>,
    /// Whether its chunk was pinned.
    pub pinned: bool,
    /// Message text, tool result or chat template.
    pub kind: ContentKind,
}

/// A recorded token behind the prompt, and the attention row of the forward pass that produced it.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedStep {
    /// Its number in the vocabulary of the model.
    pub id: TokenId,
    /// The text that it adds.
    pub text: String,
    /// Its position, if it was recorded.
    pub position: Option<u64>,
    /// Its turn and role, if they were recorded. Without them, it continues the answer or begins one.
    pub turn: Option<(TurnId, Role)>,
    /// The index of its chunk in the turn, if it was recorded. Without it, the chunker decides.
    pub chunk_index: Option<u32>,
    /// Whether it is part of a tool result.
    pub tool_result: bool,
    /// The attention row by slot; or why the recorded row cannot be read; or none where no row was recorded.
    pub attention: Option<Result<Vec<f32>, String>>,
}

/// The result of a replay.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayOutcome {
    /// The timeline at the end.
    pub timeline: Timeline,
    /// The recorded position of each token of the timeline.
    pub positions: Vec<u64>,
    /// One entry per answer.
    pub rounds: Vec<ReplayRound>,
    /// The mean brightness before the last scored step; none where no step was scored.
    pub mean: Option<f64>,
}

/// The replay of one answer.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayRound {
    /// The turn of the answer.
    pub turn: TurnId,
    /// How many steps it has.
    pub steps: u64,
    /// Votes of all its steps.
    pub votes: usize,
    /// Steps whose attention could not be scored, with the reason. Steps count from 1 over the whole capture.
    pub attention_errors: Vec<(u64, String)>,
    /// Steps whose attention was scored but does not sum to 1, with the sum.
    pub off_sums: Vec<(u64, f64)>,
    /// How many attention rows were padded with zeros.
    pub padded_rows: u64,
    /// Statistics of attention rows, by step; see [`ContextRules::trace_interval`].
    pub traces: Vec<(u64, AttentionStats)>,
    /// The chunks that were pruned, in order.
    pub pruned: Vec<ReplayedPrune>,
    /// Tokens in the window at the end, without the prefix.
    pub live: usize,
    /// Why the window exceeds its budget, as text.
    pub exceeded: Option<String>,
}

/// A chunk that a replay has pruned, completely or in part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayedPrune {
    /// The chunk.
    pub chunk: ChunkId,
    /// How many of its tokens were pruned.
    pub tokens: usize,
    /// Why, as text.
    pub reason: String,
}

/// A record of a capture that contradicts those before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place} does not fit what was recorded before it: {reason}")]
pub struct ReplayError {
    /// The record that does not fit.
    pub place: ReplayPlace,
    /// Why it does not fit.
    pub reason: ReplayMismatch,
}

/// A record of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayPlace {
    /// A token of the prompt, counted from 1.
    PromptToken(usize),
    /// A step, counted from 1 over the whole capture.
    Step(u64),
    /// The end of the capture, where the last answer is scored and pruned.
    End,
}

impl fmt::Display for ReplayPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReplayPlace::PromptToken(number) => write!(f, "token {number} of the prompt"),
            ReplayPlace::Step(number) => write!(f, "step {number}"),
            ReplayPlace::End => f.write_str("the end"),
        }
    }
}

/// Why a record does not fit those before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayMismatch {
    /// Positions must ascend.
    #[error("its position {position} does not follow {last}")]
    PositionOrder {
        /// The recorded position.
        position: u64,
        /// The recorded position before it.
        last: u64,
    },
    /// The chunker splits a chunk at a position that no chunk holds.
    #[error("there is no chunk to split at position {}", .0.0)]
    NothingToSplit(Position),
    /// The timeline refuses the change.
    #[error(transparent)]
    Apply(#[from] ApplyError),
}

/// A running replay.
#[derive(Debug)]
pub struct Replay<'a> {
    rules: &'a ContextRules,
    /// Slots of the system prompt, which is not on the timeline.
    prefix: usize,
    timeline: Timeline,
    positions: Vec<u64>,
    chunker: Chunker,
    round: Option<(Scorer, ReplayRound)>,
    rounds: Vec<ReplayRound>,
    mean: Option<f64>,
    steps: u64,
    /// The chunker has not read the last tokens: they were recorded with their chunk indices, or another turn
    /// has begun.
    chunker_stale: bool,
}

impl<'a> Replay<'a> {
    /// Begins with the recorded prompt, behind a system prompt of `prefix` tokens.
    ///
    /// # Errors
    /// When the recorded tokens contradict each other.
    pub fn begin(
        prefix: usize,
        prompt: &[RecordedToken],
        rules: &'a ContextRules,
    ) -> Result<Self, ReplayError> {
        let mut replay = Self {
            rules,
            prefix,
            timeline: Timeline::new(),
            positions: Vec::new(),
            chunker: Chunker::new(rules.chunks),
            round: None,
            rounds: Vec::new(),
            mean: None,
            steps: 0,
            chunker_stale: true,
        };
        for (i, token) in prompt.iter().enumerate() {
            let place = ReplayPlace::PromptToken(i + 1);
            replay.append_prompt_token(token).map_err(|reason| ReplayError { place, reason })?;
        }
        Ok(replay)
    }

    /// Replays one step.
    ///
    /// # Errors
    /// When the step contradicts the records before it.
    pub fn step(&mut self, step: &RecordedStep) -> Result<(), ReplayError> {
        self.steps += 1;
        let place = ReplayPlace::Step(self.steps);
        self.apply_step(step).map_err(|reason| ReplayError { place, reason })
    }

    /// Ends the replay: scores and prunes the last answer.
    ///
    /// # Errors
    /// When the last answer contradicts the records before it.
    pub fn finish(mut self) -> Result<ReplayOutcome, ReplayError> {
        self.end_round().map_err(|reason| ReplayError { place: ReplayPlace::End, reason })?;
        let Self { timeline, positions, rounds, mean, .. } = self;
        Ok(ReplayOutcome { timeline, positions, rounds, mean })
    }

    fn append_prompt_token(&mut self, token: &RecordedToken) -> Result<(), ReplayMismatch> {
        let source = TokenSource::from_role(token.chunk.role, token.kind == ContentKind::ToolResult);
        let new_token = NewToken {
            id: token.id,
            text: token.text.clone(),
            chunk_index: token.chunk.index,
            brightness: token.brightness.unwrap_or(self.rules.strategy.initial_brightness(source)),
            kind: token.kind,
        };
        self.append(token.chunk, new_token, token.position)?;
        if token.pinned && self.timeline.chunk(token.chunk).is_some_and(|c| !c.is_pinned()) {
            self.apply(&Change::Pin { chunk: token.chunk, pinned: true })?;
        }
        Ok(())
    }

    fn apply_step(&mut self, step: &RecordedStep) -> Result<(), ReplayMismatch> {
        let last = self.timeline.turns().last().map(|t| (t.id, t.role));
        let (turn, role) = step.turn.unwrap_or_else(|| match last {
            Some((turn, Role::Assistant)) => (turn, Role::Assistant),
            Some((turn, _)) => (turn.next(), Role::Assistant),
            None => (TurnId(0), Role::Assistant),
        });
        if last != Some((turn, role)) {
            self.end_round()?;
        }
        if role == Role::Assistant && self.round.is_none() {
            self.begin_round(turn);
        }
        let chunk_index = match step.chunk_index {
            Some(chunk_index) => {
                self.chunker_stale = true;
                chunk_index
            }
            None => self.assign_chunk(turn, role, step)?,
        };
        let chunk = ChunkId::new(role, turn, chunk_index);
        let next_recorded = self.positions.last().map_or(0, |p| p.saturating_add(1));
        let brightness =
            self.rules.strategy.initial_brightness(TokenSource::from_role(role, step.tool_result));
        let position = self.timeline.next_position();
        let kind = if step.tool_result { ContentKind::ToolResult } else { ContentKind::Message };
        let token = NewToken { id: step.id, text: step.text.clone(), chunk_index, brightness, kind };
        self.append(chunk, token, step.position.unwrap_or(next_recorded))?;
        if role == Role::Assistant {
            self.score(chunk, position, brightness, step.attention.as_ref())?;
        }
        Ok(())
    }

    /// The index of the chunk that the next token of a turn goes to. Splits a chunk that exceeds its maximum
    /// size.
    fn assign_chunk(&mut self, turn: TurnId, role: Role, step: &RecordedStep) -> Result<u32, ReplayMismatch> {
        if self.chunker_stale || self.timeline.turns().last().is_none_or(|t| t.id != turn) {
            let tokens = self.timeline.turn_chunks(turn).flat_map(|c| c.run().positions());
            let tokens = tokens
                .filter_map(|p| self.timeline.token(p))
                .filter(|t| !t.flags.contains(TokenFlags::TEMPLATE));
            let tokens = tokens.map(|t| (t.chunk.index, t.text, t.flags.contains(TokenFlags::TOOL_RESULT)));
            self.chunker = Chunker::resume(self.rules.chunks, tokens, self.timeline.next_chunk_index(turn));
            self.chunker_stale = false;
        }
        let assigned =
            if step.tool_result { self.chunker.push_result() } else { self.chunker.push(&step.text) };
        // The newest of the moved tokens is not on the timeline yet.
        let moved = assigned.moved_tokens.map_or(0, |moved| u64::from(moved) - 1);
        if moved > 0 {
            let tail_index = assigned.chunk_index;
            let at = Position(self.timeline.next_position().0 - moved);
            let chunk = self.timeline.chunk_of(at).ok_or(ReplayMismatch::NothingToSplit(at))?.id();
            self.apply(&Change::Split { chunk, at, tail_index, tally: AttentionTally::default() })?;
            if let Some((scorer, _)) = &mut self.round {
                scorer.split_chunk(at, ChunkId::new(role, turn, tail_index));
            }
        }
        Ok(assigned.chunk_index)
    }

    /// Appends a token that was recorded at `position`.
    fn append(&mut self, chunk: ChunkId, token: NewToken, position: u64) -> Result<(), ReplayMismatch> {
        if let Some(&last) = self.positions.last().filter(|&&last| position <= last) {
            return Err(ReplayMismatch::PositionOrder { position, last });
        }
        let (at, turn, role) = (self.timeline.next_position(), chunk.turn, chunk.role);
        self.apply(&Change::Append(Append { at, turn, role, tokens: vec![token] }))?;
        self.positions.push(position);
        Ok(())
    }

    fn begin_round(&mut self, turn: TurnId) {
        let scorer =
            Scorer::new(self.rules.strategy.clone(), self.timeline.context_window(self.prefix), Some(turn));
        let round = ReplayRound {
            turn,
            steps: 0,
            votes: 0,
            attention_errors: Vec::new(),
            off_sums: Vec::new(),
            padded_rows: 0,
            traces: Vec::new(),
            pruned: Vec::new(),
            live: 0,
            exceeded: None,
        };
        self.round = Some((scorer, round));
    }

    /// A recorded row reduced to the window of this replay; none where it covers that window already. The recorded
    /// model also saw tokens that the replay has pruned. Their attention is distributed over the other tokens in
    /// proportion: where it would have gone is unknown.
    fn project_row(&self, row: &[f32]) -> Result<Option<Vec<f32>>, AttentionError> {
        let (recorded, live) = (self.prefix + self.timeline.len(), self.prefix + self.timeline.live_len());
        // Without padding, a row over all recorded tokens ends with the last token or the one before it.
        let covered = row.iter().rposition(|&a| a != 0.0).map_or(0, |last| last + 1);
        if live == recorded || covered > recorded || covered + 1 < recorded {
            return Ok(None);
        }
        check_probabilities(row)?;
        let positions = self.timeline.context_window(self.prefix).positions();
        let slots = (0..self.prefix).chain(positions.iter().map(|p| self.prefix + p.index()));
        let mut projected: Vec<f32> = slots.filter_map(|slot| row.get(slot).copied()).collect();
        let (row_total, projected_total) = (row_sum(row), row_sum(&projected));
        if projected_total == 0.0 {
            return Err(AttentionError::AllOnPruned);
        }
        if self.rules.rows_sum_to_one() {
            projected.iter_mut().for_each(|a| *a = (f64::from(*a) * row_total / projected_total) as f32);
        }
        Ok(Some(projected))
    }

    fn score(
        &mut self,
        chunk: ChunkId,
        position: Position,
        brightness: Brightness,
        attention: Option<&Result<Vec<f32>, String>>,
    ) -> Result<(), ReplayMismatch> {
        let step = self.steps;
        let (row, unusable) = match attention {
            None => (None, None),
            Some(Err(reason)) => (None, Some(reason.clone())),
            Some(Ok(row)) => match self.project_row(row) {
                Err(error) => (None, Some(error.to_string())),
                Ok(Some(projected)) => (Some(Cow::Owned(projected)), None),
                Ok(None) => (Some(Cow::Borrowed(row.as_slice())), None),
            },
        };
        let row = row.as_deref();
        let Some((scorer, round)) = &mut self.round else { return Ok(()) };
        scorer.push(chunk, position, brightness);
        match scorer.observe(row) {
            // The first token comes from the last forward pass of the prefill, which may have no attention row.
            Err(AttentionError::Missing) if round.steps == 0 && unusable.is_none() => {}
            Err(error) => round.attention_errors.push((step, unusable.unwrap_or_else(|| error.to_string()))),
            Ok(scored) => {
                round.votes += scored.votes;
                round.padded_rows += u64::from(scored.padding > 0);
                let sum = row.map_or(1.0, row_sum);
                if self.rules.rows_sum_to_one() && (sum - 1.0).abs() > ROW_SUM_TOLERANCE {
                    round.off_sums.push((step, sum));
                }
            }
        }
        if is_traced(round.steps, self.rules.trace_interval) {
            round.traces.extend(row.and_then(AttentionStats::from_row).map(|stats| (step, stats)));
        }
        round.steps += 1;
        let timeline = &self.timeline;
        let (rules, prefix) = (self.rules, self.prefix);
        if let Some(culled) = scorer.cull(|p| p != position && rules.may_cull(timeline, prefix, p)) {
            let prunes = culled.flatten().into_iter().flat_map(|change| replayed_prunes(timeline, change));
            round.pruned.extend(prunes);
            self.apply(&culled)?;
        }
        Ok(())
    }

    fn end_round(&mut self) -> Result<(), ReplayMismatch> {
        let Some((scorer, mut round)) = self.round.take() else { return Ok(()) };
        self.chunker_stale = true;
        if scorer.steps() > 0 {
            self.mean = Some(scorer.mean());
        }
        let score = scorer.finish();
        self.apply(&score)?;
        match &self.rules.strategy {
            ScoringStrategy::Ttl(ttl) => {
                let over = self.timeline.live_len().saturating_sub(ttl.target);
                let reason = "at most two tokens are culled per step";
                round.exceeded = (over > 0).then(|| format!("over the target by {over}: {reason}"));
            }
            ScoringStrategy::Magnitude(_) if self.rules.max_tokens == 0 => {}
            ScoringStrategy::Magnitude(_) => {
                let rules = self.rules.prune_rules(self.rules.max_tokens, Some(round.turn));
                let plan = plan_prune(self.timeline.context_window(self.prefix), &rules);
                if let Some(change) = plan.change() {
                    round.pruned.extend(replayed_prunes(&self.timeline, &change));
                    self.apply(&change)?;
                }
                round.exceeded = plan.exceeded.map(|e| e.to_string());
            }
        }
        round.live = self.timeline.live_len();
        self.rounds.push(round);
        Ok(())
    }

    fn apply(&mut self, change: &Change) -> Result<(), ReplayMismatch> {
        self.timeline.apply(change)?;
        Ok(())
    }
}

/// How far the sum of a row may be from 1 before the replay reports it: captures round their numbers.
const ROW_SUM_TOLERANCE: f64 = 0.1;

fn row_sum(row: &[f32]) -> f64 {
    row.iter().map(|&a| f64::from(a)).sum()
}

/// The chunks that a change prunes; `timeline` is the state before the change.
fn replayed_prunes(timeline: &Timeline, change: &Change) -> Vec<ReplayedPrune> {
    let Change::Prune(pruned) = change else { return Vec::new() };
    let tokens = |pruned: &Pruned| match &pruned.extent {
        Extent::Whole => timeline.chunk(pruned.chunk).map_or(0, |c| c.live_len()),
        Extent::Runs(runs) => runs.iter().map(|r| r.len as usize).sum(),
    };
    pruned
        .iter()
        .map(|p| ReplayedPrune { chunk: p.chunk, tokens: tokens(p), reason: p.reason.to_string() })
        .collect()
}
