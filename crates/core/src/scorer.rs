//! Scores the attention of a generation.
//!
//! A [`Scorer`] holds the brightness of the window in one contiguous array by slot and updates it at each step.
//! At the end of the generation it returns one [`Score`], which the timeline applies. So a step costs a few
//! passes over short arrays, and no intermediate state is stored.

use crate::attention::{
    AttentionError, AttentionFocus, FocusedToken, StepScore, check_probabilities, covered_slots,
};
use crate::brightness::{AttentionSink, MagnitudeRules, ScoringStrategy};
use crate::change::{
    AttentionTally, BrightnessRun, Change, Extent, PruneReason, Pruned, Score, TallyDelta, TokenRun,
};
use crate::context_window::ContextWindow;
use crate::token::{Brightness, ChunkId, Position, TurnId};
use std::ops::Range;

/// The brightness of a window during a generation. The arrays are indexed by slot, without the prefix.
#[derive(Clone, Debug)]
pub struct Scorer {
    strategy: ScoringStrategy,
    /// Slots of the system prompt, which is not on the timeline.
    prefix: usize,
    /// All scored tokens decay alike at every step. So the decay is one number, `pending_decay`, and the value
    /// here is the brightness of a scored token plus that number.
    brightness: Vec<f32>,
    pending_decay: f32,
    votes: Vec<u32>,
    mass: Vec<f32>,
    steps: u64,
    /// How many attention rows ended before each slot, and behind the last one. All rows begin at the first
    /// scored slot.
    rows_ended: Vec<u32>,
    /// The first slot of the running turn.
    current_start: usize,
    /// The tokens of the slots, as runs of neighbours in one chunk: chunk, first position, length.
    spans: Vec<(ChunkId, Position, usize)>,
    mean: f64,
    /// Votes since they were last added to `votes`. Bytes, so that a step touches less memory.
    new_votes: Vec<u8>,
    /// Buffer: 1 for each slot that receives a vote in the current step, else 0.
    above: Vec<u8>,
}

impl Scorer {
    /// The state before the first step. `current` is the running turn.
    #[must_use]
    pub fn new(strategy: ScoringStrategy, window: ContextWindow<'_>, current: Option<TurnId>) -> Self {
        let n = window.timeline().live_len();
        let mut scorer = Self {
            strategy,
            prefix: window.prefix(),
            brightness: Vec::with_capacity(n),
            pending_decay: 0.0,
            votes: vec![0; n],
            mass: vec![0.0; n],
            steps: 0,
            rows_ended: vec![0; n + 1],
            current_start: n,
            spans: Vec::new(),
            mean: f64::NAN,
            new_votes: vec![0; n],
            above: Vec::new(),
        };
        for chunk in window.chunks() {
            if Some(chunk.id().turn) == current {
                scorer.current_start = scorer.current_start.min(scorer.brightness.len());
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

    /// How many slots the window has now, including the prefix.
    #[must_use]
    pub fn len(&self) -> usize {
        self.prefix + self.brightness.len()
    }

    /// Whether the window has no slots.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a token of the running turn at the end of the window.
    pub fn push(&mut self, chunk: ChunkId, position: Position, brightness: Brightness) {
        match self.spans.last_mut() {
            Some((c, start, len)) if *c == chunk && start.plus(*len) == position => *len += 1,
            _ => self.spans.push((chunk, position, 1)),
        }
        let scored = self.scored_slots().end > self.brightness.len();
        self.brightness.push(brightness.0 + if scored { self.pending_decay } else { 0.0 });
        self.votes.push(0);
        self.new_votes.push(0);
        self.mass.push(0.0);
        self.rows_ended.push(0);
    }

    /// Assigns the tokens from `position` on to `chunk`, after their chunk was split.
    pub fn split_chunk(&mut self, position: Position, chunk: ChunkId) {
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

    /// The current brightness of the tokens by slot, without the prefix.
    pub fn brightness(&mut self) -> &[f32] {
        self.apply_decay();
        &self.brightness
    }

    /// The mean brightness before the last step; before any step, the current mean.
    #[must_use]
    pub fn mean(&self) -> f64 {
        if self.mean.is_nan() { self.current_mean() } else { self.mean }
    }

    /// Scores one step. `row` is the attention by slot, including the prefix, of the forward pass that produced
    /// the newest token. It covers the window with that token or without it.
    ///
    /// # Errors
    /// When the row cannot be scored; the state is then unchanged.
    pub fn observe(&mut self, row: Option<&[f32]>) -> Result<StepScore, AttentionError> {
        let row = row.ok_or(AttentionError::Missing)?;
        let (used, padding) = covered_slots(row, self.len())?;
        self.score_row(row, used, self.len(), padding)
    }

    /// Scores an attention row of the prompt: that of the token in the last slot of the row, which sees the
    /// slots up to itself.
    ///
    /// # Errors
    /// When the row cannot be scored; the state is then unchanged.
    pub fn observe_prompt(&mut self, row: &[f32]) -> Result<StepScore, AttentionError> {
        if row.is_empty() {
            return Err(AttentionError::Missing);
        }
        if row.len() > self.len() {
            return Err(AttentionError::TooLong { got: row.len(), expected: self.len() });
        }
        check_probabilities(row)?;
        self.score_row(row, row, row.len(), 0)
    }

    /// Scores a row. `used` is the part that covers the window, which had `live` slots.
    fn score_row(
        &mut self,
        row: &[f32],
        used: &[f32],
        live: usize,
        padding: usize,
    ) -> Result<StepScore, AttentionError> {
        let mean = self.current_mean();
        let (threshold, votes) = match &self.strategy {
            ScoringStrategy::Magnitude(m) => {
                let row = if m.sink == AttentionSink::Max { &row[..row.len().min(live)] } else { used };
                let threshold = m.threshold(row, live)?;
                (threshold, self.vote(row, threshold))
            }
            ScoringStrategy::Ttl(ttl) => {
                let row = used.get(self.prefix..).unwrap_or_default();
                ttl.update(&mut self.brightness[..row.len()], row);
                (0.0, 0)
            }
        };
        self.mean = mean;
        self.steps += 1;
        if self.steps.is_multiple_of(u64::from(u8::MAX)) {
            self.carry_votes();
        }
        Ok(StepScore { threshold, mean, votes, padding })
    }

    /// Where a row lies on the earlier messages, with at most `max_tokens` tokens. None if the row is not a row of this window, or
    /// if it has no attention for them.
    #[must_use]
    pub fn focus(&self, row: &[f32], max_tokens: usize) -> Option<AttentionFocus> {
        let (row, _) = covered_slots(row, self.len()).ok()?;
        let row = row.get(self.prefix..)?;
        let row = &row[..row.len().min(self.current_start)];
        let sink = usize::from(self.prefix == 0);
        let total: f64 = row.iter().skip(sink).map(|&a| f64::from(a)).sum();
        if total <= 0.0 {
            return None;
        }
        let share = |slot: usize| if slot < sink { 0.0 } else { (f64::from(row[slot]) / total) as f32 };
        let (mut chunks, mut tokens): (Vec<(ChunkId, f32)>, Vec<FocusedToken>) = Default::default();
        for (slot, (chunk, position)) in self.tokens().take(row.len()).enumerate() {
            let share = share(slot);
            match chunks.last_mut() {
                Some((last, sum)) if *last == chunk => *sum += share,
                _ => chunks.push((chunk, share)),
            }
            if share > 0.0 {
                tokens.push(FocusedToken { chunk, position, share });
            }
        }
        let strongest_first = |a: &FocusedToken, b: &FocusedToken| {
            b.share.total_cmp(&a.share).then(a.position.cmp(&b.position))
        };
        if tokens.len() > max_tokens {
            tokens.select_nth_unstable_by(max_tokens, strongest_first);
            tokens.truncate(max_tokens);
        }
        tokens.sort_unstable_by(strongest_first);
        Some(AttentionFocus { tokens, chunks })
    }

    /// For [`ttl`](crate::ttl) scoring only: takes the dimmest tokens out of a full window, at most two per
    /// step, except those for which `may_cull` is false. Returns the change that sets their final brightness
    /// and prunes them.
    pub fn cull(&mut self, may_cull: impl Fn(Position) -> bool) -> Option<Change> {
        let ScoringStrategy::Ttl(ttl) = &self.strategy else { return None };
        let count = ttl.cull_count(self.brightness.len());
        self.cull_dimmest(count, may_cull)
    }

    /// For [`ttl`](crate::ttl) scoring only, after the last step of a turn: takes out all that exceeds the target. A
    /// message can be longer than the steps of its answer could make room for.
    pub fn cull_to_target(&mut self, may_cull: impl Fn(Position) -> bool) -> Option<Change> {
        let ScoringStrategy::Ttl(ttl) = &self.strategy else { return None };
        let count = ttl.excess(self.brightness.len());
        self.cull_dimmest(count, may_cull)
    }

    fn cull_dimmest(&mut self, count: usize, may_cull: impl Fn(Position) -> bool) -> Option<Change> {
        let ScoringStrategy::Ttl(ttl) = &self.strategy else { return None };
        if count == 0 {
            return None;
        }
        let live = self.brightness.len();
        let target = ttl.target;
        let tokens: Vec<(ChunkId, Position)> = self.tokens().collect();
        let culled = ttl.dimmest(&self.brightness, count, |slot| may_cull(tokens[slot].1));
        let mut score = Score::default();
        let mut pruned: Vec<Pruned> = Vec::new();
        for &slot in &culled {
            let (chunk, start) = tokens[slot];
            score.runs.push(BrightnessRun { start, brightness: vec![Brightness(self.brightness[slot])] });
            match pruned.iter_mut().find(|p| p.chunk == chunk) {
                Some(Pruned { extent: Extent::Runs(runs), .. }) => push_position(runs, start),
                _ => {
                    let reason = PruneReason::Culled { live, target };
                    let runs = vec![TokenRun { start, len: 1 }];
                    pruned.push(Pruned { chunk, extent: Extent::Runs(runs), reason });
                }
            }
        }
        for &slot in culled.iter().rev() {
            self.remove_slot(slot);
        }
        (!culled.is_empty()).then(|| Change::Batch(vec![Change::Score(score), Change::Prune(pruned)]))
    }

    /// The tokens by slot, without the prefix.
    fn tokens(&self) -> impl Iterator<Item = (ChunkId, Position)> + '_ {
        self.spans.iter().flat_map(|&(chunk, start, len)| (0..len).map(move |i| (chunk, start.plus(i))))
    }

    /// Removes the token at a slot from the window.
    fn remove_slot(&mut self, slot: usize) {
        self.brightness.remove(slot);
        self.votes.remove(slot);
        self.new_votes.remove(slot);
        self.mass.remove(slot);
        let ended = self.rows_ended.remove(slot);
        self.rows_ended[slot] += ended;
        if slot < self.current_start {
            self.current_start -= 1;
        }
        let mut before = 0;
        for i in 0..self.spans.len() {
            let (chunk, start, len) = self.spans[i];
            if slot < before + len {
                let offset = slot - before;
                let tail = (chunk, start.plus(offset + 1), len - offset - 1);
                self.spans[i].2 = offset;
                self.spans.insert(i + 1, tail);
                self.spans.retain(|s| s.2 > 0);
                return;
            }
            before += len;
        }
    }

    /// The score of all steps, as a change.
    #[must_use]
    pub fn finish(mut self) -> Change {
        self.apply_decay();
        self.carry_votes();
        let mut score = Score::default();
        if self.steps == 0 {
            return Change::Score(score);
        }
        let exposures = self.exposures();
        let mut slot = 0;
        for (chunk, start, len) in self.spans {
            let slots = slot..slot + len;
            slot += len;
            score.runs.push(BrightnessRun {
                start,
                brightness: self.brightness[slots.clone()].iter().map(|&b| Brightness(b)).collect(),
            });
            let votes: i64 = self.votes[slots.clone()].iter().map(|&v| i64::from(v)).sum();
            let exposures: i64 = exposures[slots.clone()].iter().map(|&n| i64::from(n)).sum();
            let mass: f64 = self.mass[slots].iter().map(|&m| f64::from(m)).sum();
            let mass = (mass * AttentionTally::MASS_UNIT) as i64;
            match score.tallies.last_mut() {
                Some((c, delta)) if *c == chunk => {
                    delta.votes += votes;
                    delta.mass += mass;
                    delta.exposures += exposures;
                }
                _ => score.tallies.push((chunk, TallyDelta { votes, mass, exposures })),
            }
        }
        Change::Score(score)
    }

    /// How many rows cover each slot.
    fn exposures(&self) -> Vec<u32> {
        let first = self.scored_slots().start;
        let mut rows = self.rows_ended.iter().sum::<u32>();
        let slots = self.rows_ended.iter().enumerate().take(self.brightness.len());
        let exposures = slots.map(|(slot, ended)| {
            rows -= ended;
            if slot < first { 0 } else { rows }
        });
        exposures.collect()
    }

    /// The slots that are scored: without the sink where that is the first slot, and without the running turn
    /// unless the rules include it.
    fn scored_slots(&self) -> Range<usize> {
        match &self.strategy {
            ScoringStrategy::Magnitude(m) => {
                let sink = usize::from(m.sink == AttentionSink::First && self.prefix == 0);
                let end = if m.score_current_turn { usize::MAX } else { self.current_start };
                sink.min(end)..end
            }
            ScoringStrategy::Ttl(_) => 0..0,
        }
    }

    /// How many tokens the mean is taken of: all but those of the running turn, unless the rules include them.
    fn averaged_len(&self) -> usize {
        match &self.strategy {
            ScoringStrategy::Magnitude(m) if !m.score_current_turn => self.current_start,
            _ => self.brightness.len(),
        }
    }

    fn current_mean(&self) -> f64 {
        let n = self.averaged_len();
        let scored = self.scored_slots();
        let decaying = scored.end.min(n).saturating_sub(scored.start) as f64;
        let total = sum_f64(&self.brightness[..n]) - decaying * f64::from(self.pending_decay);
        if n == 0 { 0.0 } else { (total / n as f64).floor() }
    }

    /// Subtracts the pending decay from the scored tokens.
    fn apply_decay(&mut self) {
        let decay = std::mem::take(&mut self.pending_decay);
        if decay != 0.0 {
            let scored = self.scored_slots();
            let end = scored.end.min(self.brightness.len());
            self.brightness[scored.start..end].iter_mut().for_each(|b| *b -= decay);
        }
    }

    /// Raises the scored tokens whose attention exceeds the threshold and lets the others decay. Returns how
    /// many exceed it.
    ///
    /// Few tokens do. So the work is split into simple passes over the row, which the compiler vectorizes, and
    /// one pass with a division over the few.
    fn vote(&mut self, row: &[f32], threshold: f64) -> usize {
        let ScoringStrategy::Magnitude(MagnitudeRules { cap, decay, .. }) = self.strategy else { return 0 };
        let scored = self.scored_slots();
        let row = row.get(self.prefix..).unwrap_or_default();
        let covered = scored.start.min(row.len())..scored.end.min(row.len());
        let row = &row[covered.clone()];
        self.rows_ended[covered.end] += 1;
        let limit = floor_to_f32(threshold);
        if self.pending_decay > 1e4 {
            self.apply_decay();
        }
        self.pending_decay += decay;
        // A token that the row does not cover neither gains nor decays.
        let uncovered = covered.end..scored.end.min(self.brightness.len()).max(covered.end);
        self.brightness[uncovered].iter_mut().for_each(|b| *b += decay);
        let top = cap.0 + self.pending_decay;
        self.above.resize(row.len(), 0);
        mark_above(row, limit, &mut self.above);
        for (mass, attention) in self.mass[covered.clone()].iter_mut().zip(row) {
            *mass += attention;
        }
        let brightness = &mut self.brightness[covered.clone()];
        for (votes, above) in self.new_votes[covered].iter_mut().zip(&self.above) {
            *votes += above;
        }
        let mut count = 0;
        let mut raise = |brightness: &mut f32, attention: f32| {
            let raised = *brightness + decay + (f64::from(attention) / threshold) as i32 as f32;
            *brightness = if raised > top { top } else { raised };
            count += 1;
        };
        let (mark_blocks, _) = self.above.as_chunks::<64>();
        let (row_blocks, row_rest) = row.as_chunks::<64>();
        let (brightness_blocks, brightness_rest) = brightness.as_chunks_mut::<64>();
        for ((marks, row), brightness) in mark_blocks.iter().zip(row_blocks).zip(brightness_blocks) {
            let mut above = pack_bits(marks);
            while above != 0 {
                let i = above.trailing_zeros() as usize;
                above &= above - 1;
                raise(&mut brightness[i], row[i]);
            }
        }
        let rest = brightness_rest.iter_mut().zip(row_rest).filter(|(_, a)| **a > limit);
        rest.for_each(|(brightness, &a)| raise(brightness, a));
        count
    }

    /// Adds the byte counters to `votes` before they can overflow.
    fn carry_votes(&mut self) {
        for (votes, new) in self.votes.iter_mut().zip(&mut self.new_votes) {
            *votes += u32::from(std::mem::take(new));
        }
    }
}

/// Adds a position behind the others: to the last run, if it follows it.
fn push_position(runs: &mut Vec<TokenRun>, position: Position) {
    match runs.last_mut() {
        Some(run) if run.start.plus(run.len as usize) == position => run.len += 1,
        _ => runs.push(TokenRun { start: position, len: 1 }),
    }
}

/// Sets a mark to 1 where the value exceeds the limit, else to 0.
fn mark_above(row: &[f32], limit: f32, marks: &mut [u8]) {
    let (row_blocks, row_rest) = row.as_chunks::<16>();
    let (mark_blocks, mark_rest) = marks.as_chunks_mut::<16>();
    for (marks, block) in mark_blocks.iter_mut().zip(row_blocks) {
        // Integers as wide as the floats first: these the compiler can narrow to bytes sixteen at a time.
        let above: [i32; 16] = std::array::from_fn(|i| i32::from(block[i] > limit));
        *marks = std::array::from_fn(|i| above[i] as u8);
    }
    mark_rest.iter_mut().zip(row_rest).for_each(|(mark, &a)| *mark = u8::from(a > limit));
}

/// Packs sixty-four marks, each 0 or 1, into the bits of one word.
fn pack_bits(marks: &[u8; 64]) -> u64 {
    // The multiplication gathers the lowest bits of eight bytes in its highest byte.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    let byte = |i: usize| {
        let eight: [u8; 8] = std::array::from_fn(|j| marks[i * 8 + j]);
        u64::from_le_bytes(eight).wrapping_mul(GATHER) >> 56
    };
    (0..8).fold(0, |word, i| word | byte(i) << (i * 8))
}

/// The largest `f32` that is not above `threshold`. Then `a > limit` in single precision equals `a > threshold`
/// in double precision.
fn floor_to_f32(threshold: f64) -> f32 {
    let rounded = threshold as f32;
    if f64::from(rounded) > threshold { rounded.next_down() } else { rounded }
}

/// The sum of many values. Single precision in wide registers for 1,024 values at a time, which keeps integers
/// exact, then double precision.
fn sum_f64(values: &[f32]) -> f64 {
    let mut total = 0.0;
    for part in values.chunks(1024) {
        let mut lanes = [0.0f32; 16];
        let (blocks, rest) = part.as_chunks::<16>();
        total += rest.iter().map(|&b| f64::from(b)).sum::<f64>();
        for block in blocks {
            lanes.iter_mut().zip(block).for_each(|(lane, b)| *lane += b);
        }
        total += lanes.iter().map(|&b| f64::from(b)).sum::<f64>();
    }
    total
}
