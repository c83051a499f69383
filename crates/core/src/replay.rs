//! A recorded conversation, run again through scoring and pruning without a model.
//!
//! The same capture and the same rules give the same outcome, always: this is how every change to scoring is
//! checked. It does what a turn does (append, score each step, prune once at the end), and nothing else.

use crate::attention::{AttentionStats, Fault, check_probabilities, is_traced};
use crate::brightness::{Mass, Strategy};
use crate::change::{Append, Change, Extent, Leave, NewToken, Tally};
use crate::chunk::{ChunkSize, Chunker};
use crate::prune::{Policy, PruneRules, plan_prune};
use crate::scorer::Scorer;
use crate::timeline::Timeline;
use crate::token::{Brightness, ChunkId, Flags, Position, Role, Source, TokenId, TurnId, Voice};

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
    /// Whether what fits after all stays.
    pub fill: bool,
    /// Every how many steps the shape of the attention is kept; 0 is never.
    pub trace_interval: u64,
}

impl Rules {
    /// The rules of one pruning, down to `budget` tokens.
    #[must_use]
    pub fn prune(&self, budget: usize, current: Option<TurnId>) -> PruneRules {
        let Self { policy, sinks, recent, fill, .. } = *self;
        PruneRules { policy, budget, sinks, recent, fill, current }
    }

    /// v0: whether a token may leave while an answer is being spoken, behind `prefix` slots of standing instructions. The
    /// running turn may, or an answer without end could not be held.
    #[must_use]
    pub fn may_cull(&self, timeline: &Timeline, prefix: usize, position: Position) -> bool {
        let sinks = self.sinks.saturating_sub(prefix) as u64;
        let recent = timeline.len().saturating_sub(self.recent) as u64;
        let chunk = timeline.chunk_of(position);
        let free = chunk.is_some_and(|c| !c.is_pinned() && !timeline.is_system_prompt(c.id()));
        (sinks..recent).contains(&position.0) && free
    }
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
    /// Whose words it is.
    pub voice: Voice,
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
    /// Whether it is part of a tool's result.
    pub tool: bool,
    /// By slot; or why it cannot be read; or nothing where there was none.
    pub attention: Option<Result<Vec<f32>, String>>,
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
    /// Mean brightness as the last step found it; none where no step could be scored.
    pub mean: Option<f64>,
}

/// One answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Round {
    /// The turn.
    pub turn: TurnId,
    /// Its steps.
    pub steps: u64,
    /// Votes in all.
    pub votes: usize,
    /// Steps whose attention could not be used, and why. Steps are counted from 1, over the whole capture.
    pub faults: Vec<(u64, String)>,
    /// Steps whose attention is scored but sums to something else than 1, and to what.
    pub sums: Vec<(u64, f64)>,
    /// Steps whose attention was padded.
    pub padded: u64,
    /// The shape of the attention, every so many steps.
    pub traces: Vec<(u64, AttentionStats)>,
    /// What left, in order.
    pub left: Vec<Left>,
    /// Tokens in the window at the end.
    pub live: usize,
    /// The budget could not be kept, in words.
    pub exceeded: Option<String>,
}

/// A chunk that left the window, or some of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// The chunk.
    pub chunk: ChunkId,
    /// How many of its tokens.
    pub tokens: usize,
    /// Why.
    pub why: String,
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
    /// Slots before the timeline's own.
    prefix: usize,
    timeline: Timeline,
    positions: Vec<u64>,
    chunker: Chunker,
    round: Option<(Scorer, Round)>,
    rounds: Vec<Round>,
    mean: Option<f64>,
    steps: u64,
    /// The chunker has not followed the last tokens, because those were recorded with their chunks.
    behind: bool,
}

impl<'a> Replay<'a> {
    /// Begins with what the model was given, behind `prefix` slots of standing instructions.
    ///
    /// # Errors
    /// When the recorded tokens contradict each other.
    pub fn begin(prefix: usize, prompt: &[Recorded], rules: &'a Rules) -> Result<Self, ReplayError> {
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
            behind: true,
        };
        for (i, token) in prompt.iter().enumerate() {
            replay
                .prompt(token)
                .map_err(|why| ReplayError { place: format!("token {} of the prompt", i + 1), why })?;
        }
        Ok(replay)
    }

    /// One more step.
    ///
    /// # Errors
    /// When it contradicts what was recorded before it.
    pub fn step(&mut self, step: &Step) -> Result<(), ReplayError> {
        self.steps += 1;
        let place = format!("step {}", self.steps);
        self.take(step).map_err(|why| ReplayError { place, why })
    }

    /// The capture is at its end.
    ///
    /// # Errors
    /// When what was recorded last contradicts what came before it.
    pub fn finish(mut self) -> Result<Outcome, ReplayError> {
        self.end_round().map_err(|why| ReplayError { place: "the end".into(), why })?;
        let Self { timeline, positions, rounds, mean, .. } = self;
        Ok(Outcome { timeline, positions, rounds, mean })
    }

    fn prompt(&mut self, token: &Recorded) -> Result<(), String> {
        let birth = self.rules.strategy.birth(Source::of(token.chunk.role, token.voice == Voice::Tool));
        let brightness = token.brightness.unwrap_or(birth);
        self.append(token.chunk, token.id, &token.text, token.position, brightness, token.voice)?;
        if token.pinned && self.timeline.chunk(token.chunk).is_some_and(|c| !c.is_pinned()) {
            self.apply(&Change::Pin { chunk: token.chunk, pinned: true })?;
        }
        Ok(())
    }

    fn take(&mut self, step: &Step) -> Result<(), String> {
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
        let sentence = match step.sentence {
            Some(sentence) => {
                self.behind = true;
                sentence
            }
            None => self.place(turn, role, step)?,
        };
        let chunk = ChunkId::new(role, turn, sentence);
        let next = self.positions.last().map_or(0, |p| p.saturating_add(1));
        let brightness = self.rules.strategy.birth(Source::of(role, step.tool));
        let place = self.timeline.next_position();
        let voice = if step.tool { Voice::Tool } else { Voice::Speaker };
        self.append(chunk, step.id, &step.text, step.position.unwrap_or(next), brightness, voice)?;
        if role == Role::Assistant {
            self.score(chunk, place, brightness, step.attention.as_ref())?;
        }
        Ok(())
    }

    /// The chunk that the next token of a turn goes to. One that outgrows the limit is cut.
    fn place(&mut self, turn: TurnId, role: Role, step: &Step) -> Result<u32, String> {
        if self.behind || self.timeline.turns().last().is_none_or(|t| t.id != turn) {
            let tokens = self.timeline.turn_chunks(turn).flat_map(|c| c.run().positions());
            let tokens = tokens.filter_map(|p| self.timeline.token(p)).filter(|t| !t.flags.has(Flags::FRAME));
            let tokens = tokens.map(|t| (t.chunk.sentence, t.text, t.flags.has(Flags::TOOL)));
            self.chunker = Chunker::resume(self.rules.chunks, tokens, self.timeline.next_sentence(turn));
            self.behind = false;
        }
        let placed = if step.tool { self.chunker.push_result() } else { self.chunker.push(&step.text) };
        // The token that is one too many is not on the timeline yet; those that move with it are.
        let tail = placed.moved.map_or(0, |moved| moved as u64 - 1);
        if tail > 0 {
            let sentence = placed.sentence;
            let at = Position(self.timeline.next_position().0 - tail);
            let chunk = self.timeline.chunk_of(at).ok_or("nothing is there to be cut")?.id();
            self.apply(&Change::Split { chunk, at, sentence, tally: Tally::default() })?;
            if let Some((scorer, _)) = &mut self.round {
                scorer.split(at, ChunkId::new(role, turn, sentence));
            }
        }
        Ok(placed.sentence)
    }

    fn append(
        &mut self,
        chunk: ChunkId,
        id: TokenId,
        text: &str,
        position: u64,
        brightness: Brightness,
        voice: Voice,
    ) -> Result<(), String> {
        if let Some(last) = self.positions.last().filter(|&&last| position <= last) {
            return Err(format!("its position {position} does not follow {last}"));
        }
        let token = NewToken { id, text: text.to_owned(), sentence: chunk.sentence, brightness, voice };
        let (at, turn, role) = (self.timeline.next_position(), chunk.turn, chunk.role);
        self.apply(&Change::Append(Append { at, turn, role, tokens: vec![token] }))?;
        self.positions.push(position);
        Ok(())
    }

    fn begin_round(&mut self, turn: TurnId) {
        let scorer = Scorer::new(self.rules.strategy.clone(), self.timeline.view(self.prefix), Some(turn));
        let round = Round {
            turn,
            steps: 0,
            votes: 0,
            faults: Vec::new(),
            sums: Vec::new(),
            padded: 0,
            traces: Vec::new(),
            left: Vec::new(),
            live: 0,
            exceeded: None,
        };
        self.round = Some((scorer, round));
    }

    /// A recorded row as the window of this replay would have it; none where it is that already. Where tokens
    /// have left that the recorded model still saw, their attention is shared among the rest: what it would have
    /// been cannot be known.
    fn project(&self, row: &[f32]) -> Result<Option<Vec<f32>>, String> {
        let (recorded, live) = (self.prefix + self.timeline.len(), self.prefix + self.timeline.live_len());
        // Without the zeros that may pad it, a row over all recorded tokens ends with the last or the one before.
        let seen = row.iter().rposition(|&a| a != 0.0).map_or(0, |last| last + 1);
        if live == recorded || seen > recorded || seen + 1 < recorded {
            return Ok(None);
        }
        check_probabilities(row).map_err(|fault| fault.to_string())?;
        let positions = self.timeline.view(self.prefix).positions();
        let slots = (0..self.prefix).chain(positions.iter().map(|p| self.prefix + p.index()));
        let mut kept: Vec<f32> = slots.filter_map(|slot| row.get(slot).copied()).collect();
        let (all, rest) = (sum(row), sum(&kept));
        if rest == 0.0 {
            return Err("all its attention lies on tokens that have left".into());
        }
        if self.rules.shares_one() {
            kept.iter_mut().for_each(|a| *a = (f64::from(*a) * all / rest) as f32);
        }
        Ok(Some(kept))
    }

    fn score(
        &mut self,
        chunk: ChunkId,
        position: Position,
        brightness: Brightness,
        attention: Option<&Result<Vec<f32>, String>>,
    ) -> Result<(), String> {
        let step = self.steps;
        let projected = match attention {
            Some(Ok(row)) => self.project(row),
            _ => Ok(None),
        };
        let (row, damage) = match (&projected, attention) {
            (Err(why), _) | (_, Some(Err(why))) => (None, Some(why)),
            (Ok(Some(row)), _) | (Ok(None), Some(Ok(row))) => (Some(row.as_slice()), None),
            (Ok(None), None) => (None, None),
        };
        let Some((scorer, round)) = &mut self.round else { return Ok(()) };
        scorer.push(chunk, position, brightness);
        match scorer.observe(row) {
            // The first token comes out of the prompt's own batch: that it has no attention is no fault.
            Err(Fault::Missing) if round.steps == 0 && damage.is_none() => {}
            Err(fault) => round.faults.push((step, damage.map_or_else(|| fault.to_string(), Clone::clone))),
            Ok(observed) => {
                round.votes += observed.votes;
                round.padded += u64::from(observed.padding > 0);
                let sum = row.map_or(1.0, sum);
                if self.rules.shares_one() && (sum - 1.0).abs() > OFF {
                    round.sums.push((step, sum));
                }
            }
        }
        if is_traced(round.steps, self.rules.trace_interval) {
            round.traces.extend(row.and_then(AttentionStats::of).map(|stats| (step, stats)));
        }
        round.steps += 1;
        let timeline = &self.timeline;
        let (rules, prefix) = (self.rules, self.prefix);
        if let Some(culled) = scorer.cull(|p| p != position && rules.may_cull(timeline, prefix, p)) {
            if let Change::Batch(parts) = &culled {
                round.left.extend(parts.iter().flat_map(|part| left(timeline, part)));
            }
            self.apply(&culled)?;
        }
        Ok(())
    }

    fn end_round(&mut self) -> Result<(), String> {
        let Some((scorer, mut round)) = self.round.take() else { return Ok(()) };
        self.behind = true;
        if scorer.steps() > 0 {
            self.mean = Some(scorer.mean());
        }
        let score = scorer.finish();
        self.apply(&score)?;
        match &self.rules.strategy {
            Strategy::Ttl(ttl) => {
                let over = self.timeline.live_len().saturating_sub(ttl.target);
                let why = "at most two tokens leave at each step";
                round.exceeded = (over > 0).then(|| format!("over the target by {over}: {why}"));
            }
            Strategy::Magnitude(_) if self.rules.max_tokens == 0 => {}
            Strategy::Magnitude(_) => {
                let rules = self.rules.prune(self.rules.max_tokens, Some(round.turn));
                let plan = plan_prune(self.timeline.view(self.prefix), &rules);
                if let Some(change) = plan.change() {
                    round.left.extend(left(&self.timeline, &change));
                    self.apply(&change)?;
                }
                round.exceeded = plan.exceeded.map(|e| e.to_string());
            }
        }
        round.live = self.timeline.live_len();
        self.rounds.push(round);
        Ok(())
    }

    fn apply(&mut self, change: &Change) -> Result<(), String> {
        self.timeline.apply(change).map(drop).map_err(|e| e.to_string())
    }
}

/// How far from 1 a row may sum before it is worth telling: captures round their numbers.
const OFF: f64 = 0.1;

fn sum(row: &[f32]) -> f64 {
    row.iter().map(|&a| f64::from(a)).sum()
}

/// What leaves by a change, with the reason.
fn left(timeline: &Timeline, change: &Change) -> Vec<Left> {
    let Change::Prune(leaves) = change else { return Vec::new() };
    let tokens = |leave: &Leave| match &leave.extent {
        Extent::Whole => timeline.chunk(leave.chunk).map_or(0, |c| c.live_len()),
        Extent::Runs(runs) => runs.iter().map(|r| r.len as usize).sum(),
    };
    leaves.iter().map(|l| Left { chunk: l.chunk, tokens: tokens(l), why: l.why.to_string() }).collect()
}

impl Rules {
    /// Whether rows of attention are shares of one whole under these rules.
    fn shares_one(&self) -> bool {
        !matches!(&self.strategy, Strategy::Magnitude(m) if m.mass == Mass::Sum)
    }
}
