//! A recorded conversation, run again through scoring and pruning without a model.
//!
//! The same capture and the same rules give the same outcome, always: this is how every change to scoring is
//! checked. It does what a turn does (append, score each step, prune once at the end), and nothing else.

use crate::attention::{AttentionStats, Fault, is_traced};
use crate::brightness::Strategy;
use crate::change::{Append, Change, NewToken, Tally};
use crate::chunk::{ChunkSize, Chunker};
use crate::prune::{Exceeded, Policy, PruneRules, plan_prune};
use crate::scorer::Scorer;
use crate::timeline::Timeline;
use crate::token::{Brightness, ChunkId, Position, Role, Source, TokenId, TurnId};

/// The rules of a conversation, as far as scoring and pruning go.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// How attention becomes brightness.
    pub strategy: Strategy,
    /// How messages are cut.
    pub chunks: ChunkSize,
    /// How the chunks that leave are chosen.
    pub policy: Policy,
    /// How many tokens the window may hold; 0 is no limit.
    pub max_tokens: usize,
    /// How many of the first tokens never leave.
    pub sinks: usize,
    /// How many of the latest tokens never leave.
    pub recent: usize,
    /// Every how many steps the shape of the attention is kept; 0 is never.
    pub trace_interval: u64,
}

/// A token of the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// Its number in the vocabulary.
    pub id: TokenId,
    /// What it says.
    pub text: String,
    /// Its birth index; gaps are tokens that were dead.
    pub position: u64,
    /// Its chunk.
    pub chunk: ChunkId,
    /// What it shone with, if known.
    pub brightness: Option<Brightness>,
    /// Whether it was pinned.
    pub pinned: bool,
}

/// A token that came after the prompt, and the attention of the pass that made it.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Its number in the vocabulary.
    pub id: TokenId,
    /// What it says.
    pub text: String,
    /// Its birth index, if recorded.
    pub position: Option<u64>,
    /// Its turn and role, if recorded: captures of several turns say so.
    pub turn: Option<(TurnId, Role)>,
    /// Its chunk of that turn, if recorded.
    pub sentence: Option<u32>,
    /// By slot.
    pub attention: Option<Vec<f32>>,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The conversation at the end.
    pub timeline: Timeline,
    /// The recorded birth index of each of its tokens.
    pub positions: Vec<u64>,
    /// One for each answer.
    pub rounds: Vec<Round>,
    /// Mean brightness as the last step found it.
    pub mean: f64,
}

/// One answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Round {
    /// The turn.
    pub turn: TurnId,
    /// Steps that brought attention, good or bad.
    pub steps: u64,
    /// Votes in all.
    pub votes: usize,
    /// Steps whose attention could not be used, by the round's steps.
    pub faults: Vec<(u64, Fault)>,
    /// Steps whose attention was padded.
    pub padded: u64,
    /// The shape of the attention, every so many steps.
    pub traces: Vec<(u64, AttentionStats)>,
    /// Chunks (in v0: tokens' chunks) that left, in order, with the reason in words.
    pub left: Vec<(ChunkId, String)>,
    /// Tokens in the window at the end.
    pub live: usize,
    /// The budget could not be kept.
    pub exceeded: Option<Exceeded>,
}

/// Why a capture cannot be replayed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place} does not fit what was recorded before it: {why}")]
pub struct ReplayError {
    place: String,
    why: String,
}

/// A capture that is being run, step by step.
#[derive(Debug)]
pub struct Replay<'a> {
    rules: &'a Rules,
    timeline: Timeline,
    positions: Vec<u64>,
    chunker: Chunker,
    round: Option<(Scorer, Round)>,
    rounds: Vec<Round>,
    mean: f64,
    steps: usize,
}

impl<'a> Replay<'a> {
    /// Begins with what the model was given.
    ///
    /// # Errors
    /// When the recorded tokens contradict each other.
    pub fn begin(prompt: &[Recorded], rules: &'a Rules) -> Result<Self, ReplayError> {
        let mut replay = Self {
            rules,
            timeline: Timeline::new(),
            positions: Vec::new(),
            chunker: Chunker::new(rules.chunks),
            round: None,
            rounds: Vec::new(),
            mean: 0.0,
            steps: 0,
        };
        for (i, token) in prompt.iter().enumerate() {
            replay
                .prompt(token)
                .map_err(|why| ReplayError { place: format!("token {i} of the prompt"), why })?;
        }
        replay.continue_prompt();
        Ok(replay)
    }

    /// One more step.
    ///
    /// # Errors
    /// When it contradicts what was recorded before it.
    pub fn step(&mut self, step: &Step) -> Result<(), ReplayError> {
        let place = format!("step {}", self.steps);
        self.steps += 1;
        self.take(step).map_err(|why| ReplayError { place, why })
    }

    /// The capture is at its end.
    #[must_use]
    pub fn finish(mut self) -> Outcome {
        self.end_round();
        let Self { timeline, positions, rounds, mean, .. } = self;
        Outcome { timeline, positions, rounds, mean }
    }

    fn prompt(&mut self, token: &Recorded) -> Result<(), String> {
        let birth = self.rules.strategy.birth(Source::of(token.chunk.role, false));
        let brightness = token.brightness.unwrap_or(birth);
        self.append(token.chunk, token.id, &token.text, token.position, brightness)?;
        if token.pinned && self.timeline.chunk(token.chunk).is_some_and(|c| !c.is_pinned()) {
            self.apply(&Change::Pin { chunk: token.chunk, pinned: true });
        }
        Ok(())
    }

    /// The prompt may end inside the answer; then the answer goes on in that chunk.
    fn continue_prompt(&mut self) {
        let Some(last) = self.timeline.turns().last() else { return };
        let tokens = self.timeline.turn_chunks(last.id).flat_map(|c| c.run().positions());
        let tokens = tokens.filter_map(|p| self.timeline.token(p)).map(|t| (t.chunk.sentence, t.text));
        self.chunker = Chunker::resume(self.rules.chunks, tokens);
    }

    fn take(&mut self, step: &Step) -> Result<(), String> {
        let last = self.timeline.turns().last().map(|t| (t.id, t.role));
        let (turn, role) = step.turn.unwrap_or_else(|| match last {
            Some((turn, Role::Assistant)) => (turn, Role::Assistant),
            Some((turn, _)) => (turn.next(), Role::Assistant),
            None => (TurnId(0), Role::Assistant),
        });
        if last != Some((turn, role)) {
            self.end_round();
            self.chunker = Chunker::new(self.rules.chunks);
        }
        if role == Role::Assistant && self.round.is_none() {
            self.begin_round(turn);
        }
        let placed = self.chunker.push(&step.text);
        if let (None, Some(moved)) = (step.sentence, placed.moved) {
            self.cut(turn, role, placed.sentence, moved);
        }
        let chunk = ChunkId::new(role, turn, step.sentence.unwrap_or(placed.sentence));
        let position = step.position.unwrap_or_else(|| self.positions.last().map_or(0, |p| p + 1));
        let brightness = self.rules.strategy.birth(Source::of(role, false));
        let place = self.timeline.next_position();
        self.append(chunk, step.id, &step.text, position, brightness)?;
        if role == Role::Assistant {
            self.score(chunk, place, brightness, step.attention.as_deref());
        }
        Ok(())
    }

    /// The open chunk outgrew the limit: its last tokens but the one that is coming become the next.
    fn cut(&mut self, turn: TurnId, role: Role, sentence: u32, moved: u32) {
        let old = ChunkId::new(role, turn, sentence - 1);
        let tail = moved as usize - 1;
        if tail == 0 {
            return;
        }
        let at = Position(self.timeline.next_position().0 - tail as u64);
        self.apply(&Change::Split { chunk: old, at, sentence, tally: Tally::default() });
        if let Some((scorer, _)) = &mut self.round {
            scorer.split(at, ChunkId { sentence, ..old });
        }
    }

    fn append(
        &mut self,
        chunk: ChunkId,
        id: TokenId,
        text: &str,
        position: u64,
        brightness: Brightness,
    ) -> Result<(), String> {
        if self.positions.last().is_some_and(|&last| position <= last) {
            return Err(format!(
                "its position {position} does not follow {}",
                self.positions[self.positions.len() - 1]
            ));
        }
        let token = NewToken { id, text: text.to_owned(), sentence: chunk.sentence, brightness, tool: false };
        let (at, turn, role) = (self.timeline.next_position(), chunk.turn, chunk.role);
        let append = Append { at, turn, role, tokens: vec![token] };
        self.timeline.apply(&Change::Append(append)).map_err(|e| e.to_string())?;
        self.positions.push(position);
        Ok(())
    }

    fn begin_round(&mut self, turn: TurnId) {
        let scorer = Scorer::new(self.rules.strategy.clone(), self.timeline.view(0), Some(turn));
        let round = Round {
            turn,
            steps: 0,
            votes: 0,
            faults: Vec::new(),
            padded: 0,
            traces: Vec::new(),
            left: Vec::new(),
            live: 0,
            exceeded: None,
        };
        self.round = Some((scorer, round));
    }

    /// A recorded row as the window of this replay would have it. Where tokens have left that the recorded
    /// model still saw, their attention is shared among the rest: what it would have been cannot be known.
    fn project(&self, row: &[f32]) -> Option<Vec<f32>> {
        let (recorded, live) = (self.timeline.len(), self.timeline.live_len());
        let fits = row.len() == live || row.len() + 1 == live;
        if live == recorded
            || fits
            || row.len() + 1 < recorded
            || row.iter().skip(recorded).any(|&a| a != 0.0)
        {
            return None;
        }
        let seen = self.timeline.view(0).positions();
        let mut kept: Vec<f32> = seen.iter().filter_map(|p| row.get(p.index()).copied()).collect();
        let all: f64 = row.iter().map(|&a| f64::from(a)).sum();
        let rest: f64 = kept.iter().map(|&a| f64::from(a)).sum();
        if rest > 0.0 && rest.is_finite() {
            kept.iter_mut().for_each(|a| *a = (f64::from(*a) * all / rest) as f32);
        }
        Some(kept)
    }

    fn score(&mut self, chunk: ChunkId, position: Position, brightness: Brightness, row: Option<&[f32]>) {
        let projected = row.and_then(|row| self.project(row));
        let row = projected.as_deref().or(row);
        let Some((scorer, round)) = &mut self.round else { return };
        scorer.push(chunk, position, brightness);
        let step = round.steps;
        match scorer.observe(row) {
            // The first token comes out of the prompt's own batch: that it has no attention is no fault.
            Err(Fault::Missing) if step == 0 => {}
            Err(fault) => round.faults.push((step, fault)),
            Ok(observed) => {
                round.votes += observed.votes;
                round.padded += u64::from(observed.padding > 0);
            }
        }
        if is_traced(step, self.rules.trace_interval) {
            round.traces.extend(row.and_then(AttentionStats::of).map(|stats| (step, stats)));
        }
        round.steps += 1;
        let timeline = &self.timeline;
        let sinks = self.rules.sinks as u64;
        let may_go = |p: Position| {
            p.0 >= sinks && timeline.chunk_of(p).is_some_and(|c| !c.is_pinned()) && p != position
        };
        if let Some(culled) = scorer.cull(may_go) {
            if let Change::Batch(parts) = &culled {
                round.left.extend(parts.iter().flat_map(left));
            }
            self.apply(&culled);
        }
    }

    fn end_round(&mut self) {
        let Some((scorer, mut round)) = self.round.take() else { return };
        self.mean = scorer.mean();
        let score = scorer.finish();
        self.apply(&score);
        if self.rules.max_tokens > 0 && matches!(self.rules.strategy, Strategy::Magnitude(_)) {
            let rules = PruneRules {
                policy: self.rules.policy,
                budget: self.rules.max_tokens,
                sinks: self.rules.sinks,
                recent: self.rules.recent,
                current: Some(round.turn),
            };
            let plan = plan_prune(self.timeline.view(0), &rules);
            if let Some(change) = plan.change() {
                round.left.extend(left(&change));
                self.apply(&change);
            }
            round.exceeded = plan.exceeded;
        }
        round.live = self.timeline.live_len();
        self.rounds.push(round);
    }

    fn apply(&mut self, change: &Change) {
        self.timeline.apply(change).expect("planned on this very timeline");
    }
}

/// The chunks that leave by a change, with the reason.
fn left(change: &Change) -> Vec<(ChunkId, String)> {
    match change {
        Change::Prune(leaves) => leaves.iter().map(|l| (l.chunk, l.why.to_string())).collect(),
        _ => Vec::new(),
    }
}
