//! The window's brightness while a model generates.
//!
//! A [`Scorer`] holds the brightness of the window in one contiguous row by slot and scores each step in
//! place; when the generation ends it hands over one [`Score`], which the timeline applies. So a step costs a
//! few passes over short arrays, and no half-scored state is ever stored.

use crate::attention::{Fault, Observed, check_probabilities, covered};
use crate::brightness::{Magnitude, Sink, Strategy};
use crate::change::{Change, Extent, Leave, Run, Score, Scored, Tally, TallyChange, WhyLeft};
use crate::live::LiveView;
use crate::token::{Brightness, ChunkId, Position, TurnId};
use std::ops::Range;

/// The brightness of a window while a model generates.
#[derive(Clone, Debug)]
pub struct Scorer {
    strategy: Strategy,
    /// Slots before the timeline's own.
    prefix: usize,
    /// By slot, without the prefix. All scored tokens decay alike at every step, so that is one number,
    /// `decayed`: what is stored for a token of `scored` is its brightness plus that.
    brightness: Vec<f32>,
    decayed: f32,
    votes: Vec<u32>,
    mass: Vec<f32>,
    steps: u64,
    /// How many rows of attention ended before each slot, without the prefix, and behind the last; they all began at the
    /// first that is scored.
    ends: Vec<u32>,
    /// The first slot, without the prefix, of the running turn.
    current: usize,
    /// Which tokens the slots are, by runs of neighbours in one chunk: chunk, first position, length.
    spans: Vec<(ChunkId, Position, usize)>,
    mean: f64,
    /// Votes since the last carry.
    new_votes: Vec<u8>,
    /// Scratch: 1 for each slot that is voted for in a step.
    above: Vec<u8>,
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
            decayed: 0.0,
            votes: vec![0; n],
            mass: vec![0.0; n],
            steps: 0,
            ends: vec![0; n + 1],
            current: n,
            spans: Vec::new(),
            mean: f64::NAN,
            new_votes: vec![0; n],
            above: Vec::new(),
        };
        for chunk in view.chunks() {
            if Some(chunk.id().turn) == current {
                scorer.current = scorer.current.min(scorer.brightness.len());
            }
            for run in chunk.live_runs() {
                scorer.spans.push((chunk.id(), run.start, run.len as usize));
                scorer.brightness.extend(chunk.brightness(run).iter().map(|b| b.0));
            }
        }
        scorer
    }

    /// How many steps were scored.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
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
        let scored = self.scored().end > self.brightness.len();
        self.brightness.push(brightness.0 + if scored { self.decayed } else { 0.0 });
        self.votes.push(0);
        self.new_votes.push(0);
        self.mass.push(0.0);
        self.ends.push(0);
    }

    /// The tokens from `position` on belong to `chunk` now: the chunk that held them was cut.
    pub fn split(&mut self, position: Position, chunk: ChunkId) {
        if let Some(at) = self.spans.iter().rposition(|s| s.1 <= position) {
            let (_, start, len) = self.spans[at];
            let head = (position.0 - start.0) as usize;
            if head > 0 && head < len {
                self.spans[at].2 = head;
                self.spans.insert(at + 1, (chunk, position, len - head));
            }
        }
        self.spans.iter_mut().filter(|s| s.1 >= position).for_each(|s| s.0 = chunk);
    }

    /// The brightness of the window's tokens as it stands, by slot, without the prefix.
    pub fn brightness(&mut self) -> &[f32] {
        self.settle();
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
        let (used, padding) = covered(row, self.len())?;
        self.score(row, used, self.len(), padding)
    }

    /// Scores a row of the prompt's own attention: that of the token in its last slot, which saw the slots up
    /// to itself and none behind.
    ///
    /// # Errors
    /// When the row cannot be used; then nothing has changed.
    pub fn observe_prompt(&mut self, row: &[f32]) -> Result<Observed, Fault> {
        if row.is_empty() {
            return Err(Fault::Missing);
        }
        if row.len() > self.len() {
            return Err(Fault::TooLong { got: row.len(), expected: self.len() });
        }
        check_probabilities(row)?;
        self.score(row, row, row.len(), 0)
    }

    /// Scores a row of which `used` is what covers the window, which had `live` slots.
    fn score(&mut self, row: &[f32], used: &[f32], live: usize, padding: usize) -> Result<Observed, Fault> {
        let mean = self.mean_now();
        let (threshold, votes) = match &self.strategy {
            Strategy::Magnitude(m) => {
                let row = if m.sink == Sink::Max { &row[..row.len().min(live)] } else { used };
                let threshold = m.threshold(row, live)?;
                (threshold, self.vote(row, threshold))
            }
            Strategy::Ttl(ttl) => {
                let own = used.get(self.prefix..).unwrap_or_default();
                ttl.update(&mut self.brightness[..own.len()], own);
                (0.0, 0)
            }
        };
        self.mean = mean;
        self.steps += 1;
        if self.steps.is_multiple_of(u64::from(u8::MAX)) {
            self.carry_votes();
        }
        Ok(Observed { threshold, mean, votes, padding })
    }

    /// v0 only: the dimmest tokens of a full window leave it, at most two a step. Tokens for which
    /// `may_go` is false stay. The change scores them as they leave and prunes them.
    pub fn cull(&mut self, may_go: impl Fn(Position) -> bool) -> Option<Change> {
        let Strategy::Ttl(ttl) = &self.strategy else { return None };
        let live = self.brightness.len();
        let target = ttl.target;
        let token =
            |&(chunk, start, len): &(ChunkId, Position, usize)| (0..len).map(move |i| (chunk, start.plus(i)));
        let tokens: Vec<(ChunkId, Position)> = self.spans.iter().flat_map(token).collect();
        let going = ttl.cull(&self.brightness, |slot| may_go(tokens[slot].1));
        let mut score = Score::default();
        let mut leaves: Vec<Leave> = Vec::new();
        for &slot in &going {
            let (chunk, start) = tokens[slot];
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

    /// The token at a slot is no longer in the window.
    fn remove(&mut self, slot: usize) {
        self.brightness.remove(slot);
        self.votes.remove(slot);
        self.new_votes.remove(slot);
        self.mass.remove(slot);
        let ended = self.ends.remove(slot);
        self.ends[slot] += ended;
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
    pub fn finish(mut self) -> Change {
        self.settle();
        self.carry_votes();
        let mut score = Score::default();
        if self.steps == 0 {
            return Change::Score(score);
        }
        let looks = self.looks();
        let mut slot = 0;
        for (chunk, start, len) in self.spans {
            let part = slot..slot + len;
            slot += len;
            score.runs.push(Scored {
                start,
                brightness: self.brightness[part.clone()].iter().map(|&b| Brightness(b)).collect(),
            });
            let votes: i64 = self.votes[part.clone()].iter().map(|&v| i64::from(v)).sum();
            let looks: i64 = looks[part.clone()].iter().map(|&n| i64::from(n)).sum();
            let mass: f64 = self.mass[part].iter().map(|&m| f64::from(m)).sum();
            match score.tallies.last_mut() {
                Some((c, t)) if *c == chunk => {
                    t.votes += votes;
                    t.mass += (mass * Tally::UNIT) as i64;
                    t.looks += looks;
                }
                _ => {
                    let mass = (mass * Tally::UNIT) as i64;
                    score.tallies.push((chunk, TallyChange { votes, mass, looks }));
                }
            }
        }
        Change::Score(score)
    }

    /// How many rows could have looked at each slot, without the prefix.
    fn looks(&self) -> Vec<u32> {
        let first = self.scored().start;
        let mut rows = self.ends.iter().sum::<u32>();
        let slots = self.ends.iter().enumerate().take(self.brightness.len());
        let looks = slots.map(|(slot, ended)| {
            rows -= ended;
            if slot < first { 0 } else { rows }
        });
        looks.collect()
    }

    /// The slots, without the prefix, that are scored: never the sink where that is the first slot, and the
    /// running turn's only where that is asked for.
    fn scored(&self) -> Range<usize> {
        match &self.strategy {
            Strategy::Magnitude(m) => {
                let sink = usize::from(m.sink == Sink::First && self.prefix == 0);
                let end = if m.score_current_turn { usize::MAX } else { self.current };
                sink.min(end)..end
            }
            Strategy::Ttl(_) => 0..0,
        }
    }

    /// How many tokens the mean is of: all but the running turn's, unless those are scored too.
    fn averaged(&self) -> usize {
        match &self.strategy {
            Strategy::Magnitude(m) if !m.score_current_turn => self.current,
            _ => self.brightness.len(),
        }
    }

    fn mean_now(&self) -> f64 {
        let n = self.averaged();
        let scored = self.scored();
        let decaying = scored.end.min(n).saturating_sub(scored.start) as f64;
        let total = sum(&self.brightness[..n]) - decaying * f64::from(self.decayed);
        if n == 0 { 0.0 } else { (total / n as f64).floor() }
    }

    /// Takes what has decayed off the scored tokens.
    fn settle(&mut self) {
        let decayed = std::mem::take(&mut self.decayed);
        if decayed != 0.0 {
            let scored = self.scored();
            let end = scored.end.min(self.brightness.len());
            self.brightness[scored.start..end].iter_mut().for_each(|b| *b -= decayed);
        }
    }

    /// Votes for the scored tokens whose attention exceeds the threshold; the others decay. Returns how many
    /// were voted for.
    ///
    /// Few tokens are voted for, so the work is split: simple passes over the row, which run in wide
    /// registers, and one that divides, for the few.
    fn vote(&mut self, row: &[f32], threshold: f64) -> usize {
        let Strategy::Magnitude(Magnitude { cap, decay, .. }) = self.strategy else { return 0 };
        let scored = self.scored();
        let row = row.get(self.prefix..).unwrap_or_default();
        let own = scored.start.min(row.len())..scored.end.min(row.len());
        let row = &row[own.clone()];
        self.ends[own.end] += 1;
        let limit = not_above(threshold);
        if self.decayed > 1e4 {
            self.settle();
        }
        self.decayed += decay;
        // A token that came after the row was made neither gains nor decays.
        let unseen = own.end..scored.end.min(self.brightness.len()).max(own.end);
        self.brightness[unseen].iter_mut().for_each(|b| *b += decay);
        let top = cap.0 + self.decayed;
        self.above.resize(row.len(), 0);
        mark_above(row, limit, &mut self.above);
        for (mass, attention) in self.mass[own.clone()].iter_mut().zip(row) {
            *mass += attention;
        }
        let brightness = &mut self.brightness[own.clone()];
        for (votes, above) in self.new_votes[own].iter_mut().zip(&self.above) {
            *votes += above;
        }
        let mut count = 0;
        let mut raise = |light: &mut f32, attention: f32| {
            let raised = *light + decay + (f64::from(attention) / threshold) as i32 as f32;
            *light = if raised > top { top } else { raised };
            count += 1;
        };
        let (marks, _) = self.above.as_chunks::<64>();
        let (blocks, rest) = row.as_chunks::<64>();
        let (lights, last) = brightness.as_chunks_mut::<64>();
        for ((marks, row), lights) in marks.iter().zip(blocks).zip(lights) {
            let mut above = bits(marks);
            while above != 0 {
                let i = above.trailing_zeros() as usize;
                above &= above - 1;
                raise(&mut lights[i], row[i]);
            }
        }
        last.iter_mut().zip(rest).filter(|(_, a)| **a > limit).for_each(|(light, &a)| raise(light, a));
        count
    }

    /// Votes are counted in bytes and carried over before those are full.
    fn carry_votes(&mut self) {
        for (votes, new) in self.votes.iter_mut().zip(&mut self.new_votes) {
            *votes += u32::from(std::mem::take(new));
        }
    }
}

/// Marks with 1 what exceeds the limit, and the rest with 0.
fn mark_above(row: &[f32], limit: f32, marks: &mut [u8]) {
    let (blocks, rest) = row.as_chunks::<16>();
    let (marked, last) = marks.as_chunks_mut::<16>();
    for (marks, block) in marked.iter_mut().zip(blocks) {
        // Whole numbers of the floats' own width first: those the compiler packs sixteen at a time.
        let above: [i32; 16] = std::array::from_fn(|i| i32::from(block[i] > limit));
        *marks = std::array::from_fn(|i| above[i] as u8);
    }
    last.iter_mut().zip(rest).for_each(|(mark, &a)| *mark = u8::from(a > limit));
}

/// Sixty-four marks, each 0 or 1, as the bits of one word.
fn bits(marks: &[u8; 64]) -> u64 {
    // The product gathers the eight lowest bits of eight bytes in its highest byte.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    let byte = |i: usize| {
        let eight: [u8; 8] = std::array::from_fn(|j| marks[i * 8 + j]);
        u64::from_le_bytes(eight).wrapping_mul(GATHER) >> 56
    };
    (0..8).fold(0, |word, i| word | byte(i) << (i * 8))
}

/// The largest `f32` that is not above `threshold`: then `a > threshold` in full precision is `a > limit`.
fn not_above(threshold: f64) -> f32 {
    let near = threshold as f32;
    if f64::from(near) > threshold { near.next_down() } else { near }
}

/// The sum of many values: in wide registers for a stretch that keeps whole numbers exact, then in `f64`.
fn sum(values: &[f32]) -> f64 {
    let mut total = 0.0;
    for stretch in values.chunks(1024) {
        let mut lanes = [0.0f32; 16];
        let (blocks, rest) = stretch.as_chunks::<16>();
        total += rest.iter().map(|&b| f64::from(b)).sum::<f64>();
        for block in blocks {
            lanes.iter_mut().zip(block).for_each(|(lane, b)| *lane += b);
        }
        total += lanes.iter().map(|&b| f64::from(b)).sum::<f64>();
    }
    total
}
