//! Random conversations, applied to the timeline and to the [naive timeline](super::naive_timeline) alike, with
//! every invariant checked after every operation. Property tests and the fuzz target use it.

use super::naive_timeline::NaiveTimeline;
use super::naive_token::NaiveToken;
use super::stored_timeline::StoredTimeline;
use crate::apply::ApplyError;
use crate::brightness::{AttentionSink, MagnitudeRules, ScoringStrategy};
use crate::change::{Append, AttentionTally, Change, NewToken};
use crate::manual_edit::{self, ManualEditError};
use crate::prune::{PrunePolicy, PruneRules, RankBy, TieBreak, plan_prune};
use crate::resurrect::{Hit, ResurrectedBrightness, plan_resurrection};
use crate::scorer::Scorer;
use crate::timeline::Timeline;
use crate::token::{Brightness, ChunkId, ContentKind, Position, Role, Slot, TokenId};
use std::collections::BTreeSet;

/// One random operation: which one, the chunk that it concerns, its size, and a number that its details are
/// derived from.
pub type FuzzOp = [u8; 4];

/// From here on, messages are results of tools, and answers are calls.
const FIRST_TOOL_OPERATION: u8 = 240;

/// A timeline and the naive timeline that it is compared with.
#[derive(Clone, Debug, Default)]
pub struct TimelineFuzz {
    /// The timeline under test.
    pub timeline: Timeline,
    /// The naive timeline.
    pub naive: NaiveTimeline,
    /// What a store would have written.
    pub stored: StoredTimeline,
    /// The changes applied so far, without their undos.
    pub changes: Vec<Change>,
}

const MAX_BRIGHTNESS: Brightness = Brightness(10_000.0);

impl TimelineFuzz {
    /// Runs the operations from an empty timeline.
    ///
    /// # Panics
    /// When the two timelines differ or an invariant does not hold.
    pub fn run(ops: &[FuzzOp]) -> Self {
        let mut fuzz = TimelineFuzz::default();
        for op in ops {
            fuzz.step(*op);
            fuzz.check_invariants();
        }
        let mut rebuilt = Timeline::new();
        for change in fuzz.timeline.rebuild_changes() {
            rebuilt.apply(&change).unwrap_or_else(|e| panic!("{e} in {change:?}"));
        }
        assert_eq!(rebuilt.state_hash(), fuzz.timeline.state_hash(), "rebuilt from its own changes");
        fuzz
    }

    /// Runs one operation.
    ///
    /// # Panics
    /// When the two timelines differ.
    pub fn step(&mut self, [operation, target, amount, variation]: FuzzOp) {
        match operation % 12 {
            0 if variation.is_multiple_of(16) => self.append_message(Role::System, amount, variation),
            // Tools have operations of their own, so that recorded sequences without them keep their meaning.
            0 if operation >= FIRST_TOOL_OPERATION => {
                self.append_message(Role::Tool, 1 + amount % 11, variation);
            }
            // A call is followed by its results.
            3 if operation >= FIRST_TOOL_OPERATION => {
                self.generate_answer(amount, variation);
                self.append_message(Role::Tool, 1 + amount % 5, variation | 1);
            }
            0..=2 => self.append_message(Role::User, amount, variation),
            3..=5 => self.generate_answer(amount, variation),
            6 | 7 => self.prune(target, amount, variation),
            8 => self.resurrect(target, amount),
            9 => self.pin(target, variation),
            10 if variation.is_multiple_of(5) => self.split(target, amount),
            10 => self.delete_or_prune(target, variation),
            _ => self.merge(target),
        }
    }

    /// Appends a message of `amount % 12` tokens in several chunks; sometimes to the last turn instead of a new
    /// one.
    fn append_message(&mut self, role: Role, amount: u8, variation: u8) {
        let last = self.timeline.turns().last().copied();
        let continued = last.filter(|t| t.role == role && variation.is_multiple_of(3));
        let turn = continued.map_or(self.timeline.next_turn(), |t| t.id);
        // A turn continues in its last chunk, unless that was merged into another: its index is not used again.
        let next = self.timeline.next_chunk_index(turn);
        let last_chunk = self.timeline.turn_chunks(turn).last().map(|c| c.id().index);
        let mut chunk_index = last_chunk.filter(|&s| s + 1 == next).unwrap_or(next);
        let mut tokens = Vec::new();
        for i in 0..amount % 12 {
            if i > 0 && (variation >> (i % 8)) & 1 == 1 {
                // Captures of a pruned window skip chunk indices.
                chunk_index += 1 + u32::from(variation == 99) * 1000;
            }
            let brightness = Brightness(9_990.0 + f32::from(variation.wrapping_mul(i) % 11));
            let kind = match variation {
                7 => ContentKind::ToolResult,
                // Template tokens open a turn; sometimes it has no others.
                _ if i < 2 && variation % 5 == 3 => ContentKind::Template,
                _ => ContentKind::Message,
            };
            tokens.push(NewToken {
                id: TokenId(u32::from(i)),
                text: "wé".into(),
                chunk_index,
                brightness,
                kind,
            });
        }
        for token in &tokens {
            let chunk = ChunkId::new(role, turn, token.chunk_index);
            let pinned = self.timeline.chunk(chunk).is_some_and(|c| c.is_pinned());
            self.naive.0.push(NaiveToken {
                chunk,
                brightness: token.brightness.0,
                votes: 0,
                mass: 0.0,
                exposures: 0,
                pruned: false,
                deleted: false,
                pinned,
                template: token.kind == ContentKind::Template,
            });
        }
        let at = self.timeline.next_position();
        self.apply_and_undo(&Change::Append(Append { at, turn, role, tokens }));
    }

    /// Appends an answer token by token, each with an attention row; some rows are broken.
    fn generate_answer(&mut self, amount: u8, variation: u8) {
        self.append_message(Role::Assistant, 1 + amount % 11, variation);
        let turn = self.timeline.turns()[self.timeline.turns().len() - 1].id;
        let sink = if variation & 4 == 0 { AttentionSink::First } else { AttentionSink::Max };
        let rules =
            MagnitudeRules { sink, score_current_turn: variation & 8 != 0, ..MagnitudeRules::default() };
        let mut scorer = Scorer::new(
            ScoringStrategy::Magnitude(rules.clone()),
            self.timeline.context_window(0),
            Some(turn),
        );
        let mut seed = u64::from(variation) << 8 | u64::from(amount);
        // Sometimes an answer with more steps than the byte counters of votes can hold.
        let steps = if variation == 200 { 300 } else { u64::from(amount % 5) };
        let answer_start = self.timeline.next_position();
        for step in 0..steps {
            self.append_answer_token(&mut scorer, answer_start, step, variation);
            // The forward pass that produces a token does not include it; some captures have a value for it anyway.
            let mut row = random_attention_row(self.timeline.live_len() - (step % 2) as usize, &mut seed);
            if row.len() < 2 {
                break;
            }
            let broken = (u64::from(variation) + step) % 7;
            match broken {
                0 => row[1] = f32::NAN,
                1 => row.truncate(row.len() / 2 - usize::from(row.len() == 2)),
                _ => self.naive.score(&row, turn, &rules),
            }
            assert_eq!(scorer.observe(Some(&row)).is_err(), broken < 2);
        }
        self.apply_and_undo(&scorer.finish());
    }

    /// Appends a token of the answer, to the open chunk or to a new one; sometimes splits the chunk behind
    /// `answer_start`.
    fn append_answer_token(&mut self, scorer: &mut Scorer, answer_start: Position, step: u64, variation: u8) {
        let turn = self.timeline.turns()[self.timeline.turns().len() - 1].id;
        let next = self.timeline.next_chunk_index(turn);
        let open = self.timeline.turn_chunks(turn).last().map(|c| c.id().index).filter(|s| s + 1 == next);
        let chunk_index = open.filter(|_| !step.is_multiple_of(3)).unwrap_or(next);
        let (at, role) = (self.timeline.next_position(), Role::Assistant);
        let chunk = ChunkId::new(role, turn, chunk_index);
        let pinned = self.timeline.chunk(chunk).is_some_and(|c| c.is_pinned());
        self.naive.0.push(NaiveToken {
            chunk,
            brightness: MAX_BRIGHTNESS.0,
            votes: 0,
            mass: 0.0,
            exposures: 0,
            pruned: false,
            deleted: false,
            pinned,
            template: false,
        });
        let token = NewToken {
            id: TokenId(3),
            text: "x".into(),
            chunk_index,
            brightness: MAX_BRIGHTNESS,
            kind: ContentKind::Message,
        };
        self.apply_and_undo(&Change::Append(Append { at, turn, role, tokens: vec![token] }));
        scorer.push(chunk, at, MAX_BRIGHTNESS);
        let start = self.timeline.chunk(chunk).expect("just appended").start();
        let cut = answer_start.max(start.plus(1));
        if variation & 16 != 0 && step % 4 == 2 && cut <= at {
            let tail_index = self.timeline.next_chunk_index(turn);
            let tally = AttentionTally::default();
            self.apply_and_undo(&Change::Split { chunk, at: cut, tail_index, tally });
            let tail = ChunkId { index: tail_index, ..chunk };
            scorer.split_chunk(cut, tail);
            self.naive.0[cut.0 as usize..].iter_mut().for_each(|t| t.chunk = tail);
        }
    }

    fn prune(&mut self, target: u8, amount: u8, variation: u8) {
        let rank = [RankBy::Peak, RankBy::Mean, RankBy::Top4, RankBy::Votes][usize::from(target % 4)];
        let policy = match variation % 4 {
            0 => PrunePolicy::Fifo,
            1 => PrunePolicy::Window,
            _ => PrunePolicy::Brightness { rank, ties: TieBreak::Dimmer },
        };
        let current = (variation & 64 == 0).then(|| self.timeline.turns().last().map(|t| t.id)).flatten();
        let (budget, sinks, recent) =
            (usize::from(amount % 40), usize::from(target % 3), usize::from(variation % 5));
        let rules = PruneRules { policy, budget, sinks, recent, fill: variation & 32 != 0, current };
        let orphans = self.orphaned_chunks();
        let plan = plan_prune(self.timeline.context_window(0), &rules);
        let expected = self.naive.prune(&rules);
        let pruned: Vec<_> = plan.pruned.iter().map(|p| p.chunk).collect();
        assert_eq!(pruned, expected, "{rules:?}");
        if let Some(change) = plan.change() {
            self.apply_and_undo(&change);
        }
        assert_eq!(plan.after, self.timeline.live_len());
        // The plan reports an exceeded budget if and only if it is exceeded.
        assert_eq!(plan.exceeded.as_ref().map(|e| e.by), plan.after.checked_sub(budget).filter(|&by| by > 0));
        let kept = plan.exceeded.iter().flat_map(|e| &e.kept_by).map(|(_, tokens)| tokens).sum::<usize>();
        assert!(plan.exceeded.is_none() || kept == plan.after, "every remaining token has a reason to stay");
        if policy != PrunePolicy::Window {
            let new_orphans: Vec<_> = self.orphaned_chunks().difference(&orphans).copied().collect();
            assert_eq!(new_orphans, [], "live chunks without their anchors");
        }
    }

    fn resurrect(&mut self, target: u8, amount: u8) {
        let chunks: Vec<_> = self.timeline.chunks().map(|c| c.id()).collect();
        let mut hits: Vec<Hit> = Vec::new();
        for i in 0..usize::from(target % 5).min(chunks.len()) {
            let chunk = chunks[(usize::from(target) * 7 + i * 3) % chunks.len()];
            hits.push(Hit { chunk, score: -(i as f64) });
        }
        let budget = usize::from(amount % 30);
        let plan = plan_resurrection(&self.timeline, &hits, budget, ResurrectedBrightness::Earned);
        let before = self.timeline.live_len();
        self.naive.resurrect(&hits.iter().map(|h| h.chunk).collect::<Vec<_>>(), budget);
        if let Some(change) = plan.change() {
            self.apply_and_undo(&change);
        }
        assert_eq!(self.timeline.live_len() - before, plan.tokens);
        assert!(plan.tokens <= budget, "resurrected {} with a budget of {budget}", plan.tokens);
    }

    /// Changes every token of a chunk of the naive timeline.
    fn for_each_token(&mut self, chunk: ChunkId, change: impl Fn(&mut NaiveToken)) {
        self.naive.0.iter_mut().filter(|t| t.chunk == chunk).for_each(change);
    }

    fn pick_chunk(&self, target: u8) -> Option<ChunkId> {
        let chunks: Vec<_> = self.timeline.chunks().map(|c| c.id()).collect();
        (!chunks.is_empty()).then(|| chunks[usize::from(target) % chunks.len()])
    }

    fn pin(&mut self, target: u8, variation: u8) {
        let Some(chunk) = self.pick_chunk(target) else { return };
        if variation.is_multiple_of(2) {
            let Ok(change) = manual_edit::unpin(&self.timeline, chunk) else { return };
            self.apply_and_undo(&change);
            self.for_each_token(chunk, |t| t.pinned = false);
        } else {
            let Ok(change) = manual_edit::pin(&self.timeline, chunk, MAX_BRIGHTNESS) else { return };
            self.apply_and_undo(&change);
            self.naive.resurrect(&[chunk], usize::MAX);
            self.for_each_token(chunk, |t| {
                (t.pinned, t.brightness) = (true, if t.deleted { t.brightness } else { MAX_BRIGHTNESS.0 });
            });
        }
    }

    fn delete_or_prune(&mut self, target: u8, variation: u8) {
        let Some(chunk) = self.pick_chunk(target) else { return };
        if variation.is_multiple_of(2) {
            let Ok(change) = manual_edit::delete(&self.timeline, chunk) else { return };
            let Change::Delete { chunks, .. } = &change else { panic!("the change deletes") };
            chunks.iter().for_each(|c| self.for_each_token(c.chunk, |t| t.deleted = true));
            assert!(chunks.iter().any(|c| c.chunk == chunk));
            self.apply_and_undo(&change);
        } else {
            match manual_edit::prune(&self.timeline, chunk, None) {
                Ok(change) => {
                    let Change::Prune(pruned) = &change else { panic!("the change prunes") };
                    pruned.iter().for_each(|p| self.for_each_token(p.chunk, |t| t.pruned |= !t.deleted));
                    self.apply_and_undo(&change);
                }
                Err(ManualEditError::PinnedDependent { pinned, .. }) => {
                    assert!(self.timeline.chunk(pinned).is_some_and(|c| c.is_pinned()));
                }
                Err(_) => {}
            }
        }
    }

    /// Splits the last chunk, as the chunker does with one that is too long. Also checks that a change that
    /// fails halfway has no effect.
    fn split(&mut self, target: u8, amount: u8) {
        let Some(chunk) = self.timeline.chunks().last() else { return };
        let (id, start, len) = (chunk.id(), chunk.start(), chunk.len());
        let tail_index = self.timeline.next_chunk_index(id.turn) + u32::from(target % 2);
        let at = start.plus(usize::from(amount) % len);
        let change = Change::Split { chunk: id, at, tail_index, tally: AttentionTally::default() };
        let turn = self.timeline.next_turn();
        let token = NewToken {
            id: TokenId(7),
            text: "é".into(),
            chunk_index: 0,
            brightness: MAX_BRIGHTNESS,
            kind: ContentKind::Message,
        };
        let role = Role::Assistant;
        let append =
            Change::Append(Append { at: self.timeline.next_position(), turn, role, tokens: vec![token] });
        let impossible = Change::Pin { chunk: ChunkId::new(Role::User, turn, 9), pinned: true };
        let batch =
            Change::Batch(vec![append.clone(), Change::Batch(vec![change.clone(), append]), impossible]);
        let before = self.timeline.clone();
        assert!(self.timeline.apply(&batch).is_err());
        assert_eq!(self.timeline, before, "{batch:?} was not rolled back");
        let refused: Result<_, ApplyError> =
            self.timeline.transact(&change, |_| Err(ApplyError::LimitExceeded));
        assert!(refused.is_err());
        assert_eq!(self.timeline, before, "{change:?} was not rolled back");
        self.timeline.check_invariants().expect("the invariants hold");
        let in_last_turn = self.timeline.turns().last().is_some_and(|t| t.id == id.turn);
        if in_last_turn && at > start {
            self.apply_and_undo(&change);
            let tail = ChunkId { index: tail_index, ..id };
            self.naive.0[at.0 as usize..]
                .iter_mut()
                .for_each(|t| (t.chunk, t.votes, t.exposures, t.mass) = (tail, 0, 0, 0.0));
            let tally = self.timeline.chunk(id).expect("the head").tally();
            // The head keeps the whole tally.
            let head = self.naive.0.iter_mut().filter(|t| t.chunk == id);
            head.enumerate().for_each(|(i, t)| {
                let AttentionTally { votes, mass, exposures } =
                    if i == 0 { tally } else { AttentionTally::default() };
                (t.votes, t.exposures, t.mass) = (votes, exposures, mass as f64 / AttentionTally::MASS_UNIT);
            });
        }
    }

    fn merge(&mut self, target: u8) {
        let Some(chunk) = self.pick_chunk(target) else { return };
        let Ok(change) = manual_edit::merge(&self.timeline, chunk) else { return };
        let mut turn =
            self.naive.chunks().into_iter().filter(|c| c.turn == chunk.turn && c.index < chunk.index);
        let into = turn.next_back().expect("something to merge with");
        let pair = |t: &NaiveToken| t.chunk == chunk || t.chunk == into;
        let both: Vec<_> = self.naive.0.iter().filter(|t| pair(t)).cloned().collect();
        let (live, pinned) = (both.iter().any(|t| !t.pruned && !t.deleted), both.iter().any(|t| t.pinned));
        for token in self.naive.0.iter_mut().filter(|t| pair(t)) {
            (token.chunk, token.pinned) = (into, pinned);
            token.pruned = token.pruned && (!live || token.deleted);
        }
        self.apply_and_undo(&change);
    }

    /// Applies a change, undoes it and applies it again. The undo must restore the state before.
    fn apply_and_undo(&mut self, change: &Change) {
        self.changes.push(change.clone());
        self.commit_to_stored(change);
        let before = self.timeline.clone();
        let undo = self.timeline.apply(change).unwrap_or_else(|e: ApplyError| panic!("{e} in {change:?}"));
        let after = self.timeline.state_hash();
        // The stored timeline follows the undo only every third time: that costs more than everything else.
        let check_undo = self.timeline.len().is_multiple_of(3);
        if check_undo {
            self.commit_to_stored(&undo);
        }
        let redo = self.timeline.apply(&undo).expect("an applied change can be undone");
        if matches!(change, Change::Append(_)) {
            // Positions are never reused: undoing an append deletes the tokens but does not remove them.
            assert_eq!(
                self.timeline.context_window(0).positions(),
                before.context_window(0).positions(),
                "undo of {change:?}"
            );
        } else {
            assert_eq!(self.timeline.state_hash(), before.state_hash(), "undo of {change:?}");
            assert_eq!(self.timeline, before, "undo of {change:?}");
        }
        if check_undo {
            self.commit_to_stored(&redo);
        }
        self.timeline.apply(&redo).expect("an undone change can be applied again");
        assert_eq!(self.timeline.state_hash(), after, "redo of {change:?}");
    }

    /// Applies the change to the stored timeline, of which only the live chunks and the bodies that the change
    /// needs are loaded. The result must be the same.
    fn commit_to_stored(&mut self, change: &Change) {
        let hash = self.timeline.state_hash();
        let mut timeline = self.stored.load().expect("the stored timeline loads");
        assert_eq!(timeline.state_hash(), hash, "before {change:?}");
        for chunk in timeline.missing_bodies(change) {
            let body = self.stored.fetch(chunk).expect("the body is stored");
            timeline.insert_body(chunk, body).expect("the body fits its row");
        }
        timeline.apply(change).unwrap_or_else(|e| panic!("{e} in {change:?}"));
        timeline.check_invariants().expect("the invariants hold");
        self.stored.write(change, &timeline).expect("the changed bodies are loaded");
        let hash = timeline.state_hash();
        timeline.unload_pruned();
        timeline.check_invariants().expect("the invariants hold");
        assert_eq!(timeline.state_hash(), hash, "the hash does not depend on which bodies are loaded");
    }

    /// Checks every invariant, and that both timelines are equal.
    ///
    /// # Panics
    /// When an invariant does not hold or the timelines differ.
    pub fn check_invariants(&self) {
        self.timeline.check_invariants().expect("the invariants hold");
        assert_eq!(self.timeline.len(), self.naive.0.len());
        for (i, naive) in self.naive.0.iter().enumerate() {
            let token = self.timeline.token(Position(i as u64)).expect("no token is ever removed");
            let actual = (token.chunk, token.brightness.0, token.flags.is_live());
            assert_eq!(actual, (naive.chunk, naive.brightness, !naive.pruned && !naive.deleted), "token {i}");
        }
        for chunk in self.timeline.chunks() {
            let tokens = self.naive.0.iter().filter(|t| t.chunk == chunk.id());
            let votes: u64 = tokens.clone().map(|t| t.votes).sum();
            let exposures: u64 = tokens.clone().map(|t| t.exposures).sum();
            let pinned = tokens.clone().any(|t| t.pinned);
            let tally = chunk.tally();
            let actual = (tally.votes, tally.exposures, chunk.is_pinned());
            assert_eq!(actual, (votes, exposures, pinned), "{}", chunk.id());
            let mass: f64 = tokens.map(|t| t.mass).sum();
            // The scorer sums attention in single precision.
            let difference = (tally.mass as f64 / AttentionTally::MASS_UNIT - mass).abs();
            assert!(difference < 1e-4 * (1.0 + mass), "mass of {}", chunk.id());
        }
        self.check_slots();
    }

    /// Checks that slots and live positions are one to one, in order.
    fn check_slots(&self) {
        let live = self.naive.live_indices();
        for prefix in [0, 3] {
            let window = self.timeline.context_window(prefix);
            assert_eq!(window.positions(), live.iter().map(|&i| Position(i as u64)).collect::<Vec<_>>());
            assert_eq!(window.len(), prefix + live.len());
            for (n, &i) in live.iter().enumerate() {
                let (slot, position) = (Slot((prefix + n) as u32), Position(i as u64));
                assert_eq!((window.position(slot), window.slot(position)), (Some(position), Some(slot)));
            }
            assert_eq!(window.position(Slot(window.len() as u32)), None);
            assert!(prefix == 0 || window.position(Slot(0)).is_none());
        }
        let window = self.timeline.context_window(0);
        let not_live = (0..self.naive.0.len()).filter(|i| !live.contains(i));
        assert!(not_live.into_iter().all(|i| window.slot(Position(i as u64)).is_none()));
    }

    /// Live chunks whose anchors are not live, with those anchors. The `window` policy and deletions make some;
    /// other pruning must not.
    fn orphaned_chunks(&self) -> BTreeSet<(ChunkId, ChunkId)> {
        let mut orphans = BTreeSet::new();
        for chunk in self.timeline.live_chunks() {
            let anchors = self.naive.anchors(chunk.id());
            let anchors = anchors.into_iter().filter_map(|anchor| self.timeline.chunk(anchor));
            let missing = anchors.filter(|a| !a.is_live());
            orphans.extend(missing.map(|a| (chunk.id(), a.id())));
        }
        orphans
    }
}

/// A random attention row that sums to 1, with a sink in the first slot. The generator is SplitMix64: recorded
/// failures depend on its numbers.
fn random_attention_row(len: usize, seed: &mut u64) -> Vec<f32> {
    let mut next = || {
        *seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = *seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32
    };
    let mut row: Vec<f32> = (0..len).map(|_| next().powi(4) + 1e-6).collect();
    let rest: f32 = row.iter().skip(1).sum::<f32>().max(1e-6);
    row.iter_mut().skip(1).for_each(|a| *a *= 0.7 / rest);
    if let Some(sink) = row.first_mut() {
        *sink = 0.3;
    }
    row
}
