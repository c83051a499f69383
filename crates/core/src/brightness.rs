//! From attention to brightness.
//!
//! While a model generates, a [`Scorer`] holds the brightness of the window in one contiguous row by slot
//! and scores each step in place; when the generation ends it hands over one [`Score`], which the timeline
//! applies. So a step costs one pass over three short arrays, and no half-scored state is ever stored.
//!
//! Two strategies, both complete: magnitude voting (the founding documents' third version) and the v0
//! engine, in [`ttl`](crate::ttl).

use crate::change::{Change, Extent, Leave, Run, Score, Scored, Tally, TallyChange, WhyLeft};
use crate::live::LiveView;
use crate::token::{Brightness, ChunkId, Position, TurnId};
use crate::ttl::Ttl;

/// How attention becomes brightness.
#[derive(Clone, Debug, PartialEq)]
pub enum Strategy {
    /// Votes weighted by how far attention exceeds the step's threshold; a flat decay for the rest.
    Magnitude(Magnitude),
    /// The v0 engine: time to live.
    Ttl(Ttl),
}

impl Strategy {
    /// What a new token starts with.
    #[must_use]
    pub fn birth(&self, source: Source) -> Brightness {
        match self {
            Strategy::Magnitude(m) => m.initial,
            Strategy::Ttl(ttl) => ttl.seeds.of(source),
        }
    }

    /// The most that a token can have: what pinning and calling back by hand give.
    #[must_use]
    pub fn full(&self) -> Brightness {
        match self {
            Strategy::Magnitude(m) => m.cap,
            Strategy::Ttl(ttl) => ttl.max,
        }
    }
}

/// Where a token came from, as far as its first brightness is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The user's words.
    User,
    /// Standing instructions.
    System,
    /// A tool's result.
    Tool,
    /// The model's words.
    Llm,
    /// Anything else.
    Other,
}

impl Source {
    /// The source of a token by its role, or that it is part of a tool's result.
    #[must_use]
    pub fn of(role: crate::token::Role, tool: bool) -> Self {
        use crate::token::Role;
        match role {
            _ if tool => Source::Tool,
            Role::User => Source::User,
            Role::System => Source::System,
            Role::Assistant => Source::Llm,
        }
    }
}

/// The settings of magnitude voting.
#[derive(Clone, Debug, PartialEq)]
pub struct Magnitude {
    /// What a new token starts with: bright, so that it has time to prove itself.
    pub initial: Brightness,
    /// No token is brighter than this. There is no floor.
    pub cap: Brightness,
    /// What a token below the threshold loses: flat, because a proportional decay collapses all to the mean.
    pub decay: f32,
    /// What counts as the attention sink.
    pub sink: Sink,
    /// Whether the tokens of the running turn are scored too.
    pub score_current_turn: bool,
    /// How rows that do not sum to 1 (the largest head instead of the mean) set the threshold.
    pub mass: Mass,
}

impl Default for Magnitude {
    fn default() -> Self {
        Self {
            initial: Brightness(10_000.0),
            cap: Brightness(10_000.0),
            decay: 1.0,
            sink: Sink::First,
            score_current_turn: false,
            mass: Mass::One,
        }
    }
}

/// Which slot is the attention sink, whose share says nothing about meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sink {
    /// The first slot. It is left out of the threshold and of scoring; the threshold is the mean attention
    /// of the other slots that the row covers.
    First,
    /// The largest value, wherever it stands, and nobody is exempt. This is the arithmetic of the original
    /// front end, all of it: the threshold also counts slots that came after the row was made, and zeros
    /// that pad the row count as attention.
    Max,
}

/// What the attention of a row sums to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mass {
    /// One: a mean over heads and layers.
    One,
    /// Whatever it sums to: a maximum over heads or layers.
    Sum,
}

/// Why a row of attention was not used. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// There was none.
    #[error("the step came without attention")]
    Missing,
    /// It does not cover the window.
    #[error("attention for {got} slots, but the window has {expected}")]
    TooShort {
        /// Its length.
        got: usize,
        /// The window's.
        expected: usize,
    },
    /// It goes on, not in zeros, behind the window.
    #[error("attention for {got} slots, but the window has {expected}, and the rest is not padding")]
    TooLong {
        /// Its length.
        got: usize,
        /// The window's.
        expected: usize,
    },
    /// A value that is no probability: not a number, infinite, negative or above 1. Raw logits look like this.
    #[error("attention at slot {slot} is {value}, which is no probability")]
    NotProbability {
        /// Where.
        slot: usize,
        /// What stands there.
        value: f32,
    },
    /// All of it lies on the sink, so no threshold can be drawn.
    #[error("all attention lies on the sink")]
    AllOnSink,
}

/// What one step of scoring did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observed {
    /// Attention above this was a vote.
    pub threshold: f64,
    /// Mean brightness of the scored tokens before the step, rounded down.
    pub mean: f64,
    /// How many tokens were voted for.
    pub votes: usize,
    /// How many slots of zeros the row was padded with.
    pub padding: usize,
}

/// The brightness of a window while a model generates.
#[derive(Clone, Debug)]
pub struct Scorer {
    strategy: Strategy,
    /// Slots before the timeline's own.
    prefix: usize,
    /// By slot, without the prefix.
    brightness: Vec<f32>,
    votes: Vec<f32>,
    mass: Vec<f32>,
    steps: u64,
    /// The first slot, without the prefix, of the running turn.
    current: usize,
    /// Which tokens the slots are, by runs of neighbours in one chunk: chunk, first position, length.
    spans: Vec<(ChunkId, Position, usize)>,
    mean: f64,
}

impl Scorer {
    /// The window as it stands. Tokens of the turn `current` are the running turn's.
    #[must_use]
    pub fn new(strategy: Strategy, view: LiveView<'_>, current: Option<TurnId>) -> Self {
        let n = view.timeline().live_len();
        let mut scorer = Self {
            strategy,
            prefix: view.prefix(),
            brightness: Vec::with_capacity(n),
            votes: vec![0.0; n],
            mass: vec![0.0; n],
            steps: 0,
            current: n,
            spans: Vec::new(),
            mean: f64::NAN,
        };
        for chunk in view.chunks() {
            if Some(chunk.id().turn) == current {
                scorer.current = scorer.current.min(scorer.brightness.len());
            }
            for run in chunk.live_runs() {
                scorer.spans.push((chunk.id(), run.start, run.len as usize));
                scorer.brightness.extend(view.timeline().brightness(run).iter().map(|b| b.0));
            }
        }
        scorer
    }

    /// How many slots the window has now, the prefix included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.prefix + self.brightness.len()
    }

    /// Whether the window is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A token of the running turn joins the window at its end.
    pub fn push(&mut self, chunk: ChunkId, position: Position, brightness: Brightness) {
        match self.spans.last_mut() {
            Some((c, start, len)) if *c == chunk && start.plus(*len) == position => *len += 1,
            _ => self.spans.push((chunk, position, 1)),
        }
        self.brightness.push(brightness.0);
        self.votes.push(0.0);
        self.mass.push(0.0);
    }

    /// The tokens from `position` on belong to `chunk` now: the chunk that held them was cut.
    pub fn split(&mut self, position: Position, chunk: ChunkId) {
        let Some(at) = self.spans.iter().rposition(|s| s.1 <= position) else { return };
        let (_, start, len) = self.spans[at];
        let head = (position.0 - start.0) as usize;
        if head > 0 && head < len {
            self.spans[at].2 = head;
            self.spans.insert(at + 1, (chunk, position, len - head));
        }
        self.spans.iter_mut().filter(|s| s.1 >= position).for_each(|s| s.0 = chunk);
    }

    /// The brightness of the window's tokens as it stands, by slot, without the prefix.
    #[must_use]
    pub fn brightness(&self) -> &[f32] {
        &self.brightness
    }

    /// Mean brightness as the last step found it; before any step, of the window as it stands.
    #[must_use]
    pub fn mean(&self) -> f64 {
        if self.mean.is_nan() { self.mean_now() } else { self.mean }
    }

    /// Scores one step. `row` is the attention by slot, the prefix included, of the forward pass that made
    /// the newest token: it covers the window with that token or without it.
    ///
    /// # Errors
    /// When the row cannot be used; then nothing has changed.
    pub fn observe(&mut self, row: Option<&[f32]>) -> Result<Observed, Fault> {
        let row = row.ok_or(Fault::Missing)?;
        let live = self.len();
        let (used, padding) = covered(row, live)?;
        let row = match &self.strategy {
            Strategy::Magnitude(Magnitude { sink: Sink::Max, .. }) => &row[..row.len().min(live)],
            _ => used,
        };
        self.mean = self.mean_now();
        let (threshold, votes) = match &self.strategy {
            Strategy::Magnitude(m) => {
                let (threshold, from, to) = m.threshold(row, live, self.prefix, self.current)?;
                (threshold, self.vote(row, threshold, from..to))
            }
            Strategy::Ttl(ttl) => {
                let from = self.prefix.min(row.len());
                let n = (row.len() - from).min(self.brightness.len());
                ttl.update(&mut self.brightness[..n], &row[from..from + n]);
                (0.0, 0)
            }
        };
        self.steps += 1;
        Ok(Observed { threshold, mean: self.mean, votes, padding })
    }

    /// v0 only: the dimmest tokens of a full window leave it, at most two a step. Tokens for which
    /// `may_go` is false stay. The change scores them as they leave and prunes them.
    pub fn cull(&mut self, may_go: impl Fn(Position) -> bool) -> Option<Change> {
        let Strategy::Ttl(ttl) = &self.strategy else { return None };
        let live = self.brightness.len();
        let target = ttl.target;
        let going = ttl.cull(&self.brightness, |slot| self.token_at(slot).is_some_and(|(_, p)| may_go(p)));
        let mut score = Score::default();
        let mut leaves: Vec<Leave> = Vec::new();
        for &slot in &going {
            let (chunk, start) = self.token_at(slot)?;
            score.runs.push(Scored { start, brightness: vec![Brightness(self.brightness[slot])] });
            let run = Run { start, len: 1 };
            match leaves.iter_mut().find(|l| l.chunk == chunk) {
                Some(Leave { extent: Extent::Runs(runs), .. }) => runs.push(run),
                _ => {
                    let why = WhyLeft::Culled { live, target };
                    leaves.push(Leave { chunk, extent: Extent::Runs(vec![run]), why });
                }
            }
        }
        for &slot in going.iter().rev() {
            self.remove(slot);
        }
        (!going.is_empty()).then(|| Change::Batch(vec![Change::Score(score), Change::Prune(leaves)]))
    }

    /// The token at a slot, counted without the prefix.
    fn token_at(&self, slot: usize) -> Option<(ChunkId, Position)> {
        let mut inside = slot;
        for &(chunk, start, len) in &self.spans {
            if inside < len {
                return Some((chunk, start.plus(inside)));
            }
            inside -= len;
        }
        None
    }

    /// The token at a slot is no longer in the window.
    fn remove(&mut self, slot: usize) {
        self.brightness.remove(slot);
        self.votes.remove(slot);
        self.mass.remove(slot);
        if slot < self.current {
            self.current -= 1;
        }
        let mut before = 0;
        for i in 0..self.spans.len() {
            let (chunk, start, len) = self.spans[i];
            if slot < before + len {
                let inside = slot - before;
                let tail = (chunk, start.plus(inside + 1), len - inside - 1);
                self.spans[i].2 = inside;
                self.spans.insert(i + 1, tail);
                self.spans.retain(|s| s.2 > 0);
                return;
            }
            before += len;
        }
    }

    /// What has been learned since the start, as a change.
    #[must_use]
    pub fn finish(self) -> Change {
        let mut score = Score::default();
        let mut slot = 0;
        for (chunk, start, len) in self.spans {
            let part = slot..slot + len;
            slot += len;
            score.runs.push(Scored {
                start,
                brightness: self.brightness[part.clone()].iter().map(|&b| Brightness(b)).collect(),
            });
            let votes: f64 = self.votes[part.clone()].iter().map(|&v| f64::from(v)).sum();
            let mass: f64 = self.mass[part].iter().map(|&m| f64::from(m)).sum();
            let steps = self.steps as i64;
            match score.tallies.last_mut() {
                Some((c, t)) if *c == chunk => {
                    t.votes += votes as i64;
                    t.mass += (mass * Tally::UNIT) as i64;
                }
                _ if steps > 0 => {
                    let mass = (mass * Tally::UNIT) as i64;
                    score.tallies.push((chunk, TallyChange { votes: votes as i64, mass, steps }));
                }
                _ => {}
            }
        }
        Change::Score(score)
    }

    fn mean_now(&self) -> f64 {
        let scored = match &self.strategy {
            Strategy::Magnitude(m) if !m.score_current_turn => &self.brightness[..self.current],
            _ => &self.brightness[..],
        };
        if scored.is_empty() {
            return 0.0;
        }
        // Sixteen partial sums: the order of addition is fixed, and the compiler may use wide registers.
        let mut sums = [0.0f64; 16];
        let chunks = scored.chunks_exact(16);
        let rest: f64 = chunks.remainder().iter().map(|&b| f64::from(b)).sum();
        for chunk in chunks {
            for (sum, &b) in sums.iter_mut().zip(chunk) {
                *sum += f64::from(b);
            }
        }
        ((rest + sums.iter().sum::<f64>()) / scored.len() as f64).floor()
    }

    /// Votes for the slots `slots` (the prefix included) whose attention exceeds the threshold; the others
    /// decay. Returns how many were voted for.
    fn vote(&mut self, row: &[f32], threshold: f64, slots: std::ops::Range<usize>) -> usize {
        let Strategy::Magnitude(Magnitude { cap, decay, .. }) = self.strategy else { return 0 };
        let own = slots.start - self.prefix..slots.end - self.prefix;
        let row = &row[slots];
        let mut votes = 0.0;
        let lanes = row.iter().zip(&mut self.brightness[own.clone()]);
        let lanes = lanes.zip(self.votes[own.clone()].iter_mut().zip(&mut self.mass[own]));
        for ((&attention, brightness), (vote, mass)) in lanes {
            let attention64 = f64::from(attention);
            let above = attention64 > threshold;
            let gain = (attention64 / threshold).trunc() as f32;
            let raised = (*brightness + gain).min(cap.0);
            *brightness = if above { raised } else { *brightness - decay };
            let one = if above { 1.0 } else { 0.0 };
            *vote += one;
            votes += one;
            *mass += attention;
        }
        votes as usize
    }
}

impl Magnitude {
    /// The step's threshold, and the slots that are scored.
    fn threshold(
        &self,
        row: &[f32],
        live: usize,
        prefix: usize,
        current: usize,
    ) -> Result<(f64, usize, usize), Fault> {
        let total = match self.mass {
            Mass::One => 1.0,
            Mass::Sum => row.iter().map(|&a| f64::from(a)).sum(),
        };
        let (sink, count, first) = match self.sink {
            Sink::First => (row.first().copied().unwrap_or(0.0), row.len(), prefix.max(1)),
            Sink::Max => (row.iter().fold(0.0, |a, &b| if b > a { b } else { a }), live, prefix),
        };
        let threshold = (total - f64::from(sink)) / (count as f64 - 1.0);
        if threshold <= 0.0 || !threshold.is_finite() {
            return Err(Fault::AllOnSink);
        }
        let end = if self.score_current_turn { row.len() } else { row.len().min(prefix + current) };
        Ok((threshold, first.min(end), end))
    }
}

/// The part of a row that covers a window of `live` slots, and how many zeros it is padded with.
fn covered(row: &[f32], live: usize) -> Result<(&[f32], usize), Fault> {
    let expected = live.saturating_sub(1);
    if row.len() < expected || row.is_empty() {
        return Err(Fault::TooShort { got: row.len(), expected: live });
    }
    let (mut low, mut high, mut number) = ([0.0f32; 16], [0.0f32; 16], [0.0f32; 16]);
    for chunk in row.chunks(16) {
        for (i, &a) in chunk.iter().enumerate() {
            low[i] = if a < low[i] { a } else { low[i] };
            high[i] = if a > high[i] { a } else { high[i] };
            // Zero for every number, not a number for the rest: nothing else survives the sum.
            number[i] += a * 0.0;
        }
    }
    let fits = low.iter().all(|&a| a >= 0.0) && high.iter().all(|&a| a <= CERTAIN) && number.iter().all(|&n| n == 0.0);
    if !fits {
        let wrong = |a: &f32| !(0.0..=CERTAIN).contains(a);
        let slot = row.iter().position(wrong).unwrap_or(0);
        return Err(Fault::NotProbability { slot, value: row[slot] });
    }
    if row.len() <= live {
        return Ok((row, 0));
    }
    if row[live..].iter().any(|&a| a != 0.0) {
        return Err(Fault::TooLong { got: row.len(), expected: live });
    }
    // Zeros behind the window are padding, and then the newest token, which the pass had not seen, is too.
    let used = if row[expected] == 0.0 { expected } else { live };
    Ok((&row[..used], row.len() - used))
}

/// One, and room for the rounding of a sum over heads.
const CERTAIN: f32 = 1.001;
