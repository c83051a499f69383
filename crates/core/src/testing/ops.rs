//! Random lives of a conversation, done to the timeline and to its naive [twin](super::twin) alike, with
//! every invariant checked after every step. Property tests and the fuzz target both come here.

use super::record::Tok;
use super::shelf::Shelf;
use super::twin::Twin;
use crate::apply::ApplyError;
use crate::brightness::{Magnitude, Sink, Strategy};
use crate::change::{Append, Change, NewToken, Tally};
use crate::prune::{Policy, PruneRules, Rank, Ties, plan_prune};
use crate::resurrect::{Hit, ReturnsWith, plan_returns};
use crate::scorer::Scorer;
use crate::signals::{self, SignalError};
use crate::timeline::Timeline;
use crate::token::{Brightness, ChunkId, Position, Role, Slot, TokenId, Voice};
use std::collections::BTreeSet;

/// One thing that happens: what, to whom, how much, and the dice.
pub type Op = [u8; 4];

/// A timeline and its twin.
#[derive(Clone, Debug, Default)]
pub struct World {
    /// The real one.
    pub timeline: Timeline,
    /// The naive one.
    pub twin: Twin,
    /// What a store would have of it.
    pub shelf: Shelf,
    /// What happened, in order.
    pub changes: Vec<Change>,
}

const FULL: Brightness = Brightness(10_000.0);

impl World {
    /// Lives through `ops`.
    ///
    /// # Panics
    /// When the two disagree or an invariant breaks: that is what it is for.
    pub fn live(ops: &[Op]) -> Self {
        let mut world = World::default();
        for op in ops {
            world.step(*op);
            world.check();
        }
        let mut told = Timeline::new();
        for change in world.timeline.retell() {
            told.apply(&change).unwrap_or_else(|e| panic!("{e} in {change:?}"));
        }
        assert_eq!(told.state_hash(), world.timeline.state_hash(), "told anew");
        world
    }

    /// One thing happens.
    pub fn step(&mut self, [what, whom, much, dice]: Op) {
        match what % 12 {
            0 if dice.is_multiple_of(16) => self.say(Role::System, much, dice),
            0..=2 => self.say(Role::User, much, dice),
            3..=5 => self.answer(much, dice),
            6 | 7 => self.prune(whom, much, dice),
            8 => self.resurrect(whom, much),
            9 => self.pin(whom, dice),
            10 if dice.is_multiple_of(5) => self.split(whom, much),
            10 => self.delete_or_send(whom, dice),
            _ => self.merge(whom),
        }
    }

    /// A message of `much % 12` tokens, cut by lot; sometimes an answer goes on instead of a new turn.
    fn say(&mut self, role: Role, much: u8, dice: u8) {
        let last = self.timeline.turns().last().copied();
        let goes_on = last.filter(|t| t.role == role && dice.is_multiple_of(3));
        let turn = goes_on.map_or(self.timeline.next_turn(), |t| t.id);
        // A turn goes on in its last chunk, unless that was merged away: its name is spent.
        let next = self.timeline.next_sentence(turn);
        let last_chunk = self.timeline.turn_chunks(turn).last().map(|c| c.id().sentence);
        let mut sentence = last_chunk.filter(|&s| s + 1 == next).unwrap_or(next);
        let mut tokens = Vec::new();
        for i in 0..much % 12 {
            if i > 0 && (dice >> (i % 8)) & 1 == 1 {
                // Captures of a pruned window leave numbers out.
                sentence += 1 + u32::from(dice == 99) * 1000;
            }
            let brightness = Brightness(9_990.0 + f32::from(dice.wrapping_mul(i) % 11));
            let voice = match dice {
                7 => Voice::Tool,
                // What opens a turn; now and then nothing else is said.
                _ if i < 2 && dice % 5 == 3 => Voice::Frame,
                _ => Voice::Speaker,
            };
            tokens.push(NewToken {
                id: TokenId(u32::from(i)),
                text: "wé".into(),
                sentence,
                brightness,
                voice,
            });
        }
        for token in &tokens {
            let chunk = ChunkId::new(role, turn, token.sentence);
            let pinned = self.timeline.chunk(chunk).is_some_and(|c| c.is_pinned());
            self.twin.0.push(Tok {
                chunk,
                brightness: token.brightness.0,
                votes: 0,
                mass: 0.0,
                looks: 0,
                dead: false,
                gone: false,
                pinned,
                frame: token.voice == Voice::Frame,
            });
        }
        let at = self.timeline.next_position();
        self.apply(&Change::Append(Append { at, turn, role, tokens }));
    }

    /// An answer, token by token, each with a row of attention; some rows are broken.
    fn answer(&mut self, much: u8, dice: u8) {
        self.say(Role::Assistant, 1 + much % 11, dice);
        let turn = self.timeline.turns()[self.timeline.turns().len() - 1].id;
        let sink = if dice & 4 == 0 { Sink::First } else { Sink::Max };
        let rules = Magnitude { sink, score_current_turn: dice & 8 != 0, ..Magnitude::default() };
        let mut scorer = Scorer::new(Strategy::Magnitude(rules.clone()), self.timeline.view(0), Some(turn));
        let mut state = u64::from(dice) << 8 | u64::from(much);
        // Once in a while an answer that is longer than votes are counted in one byte.
        let steps = if dice == 200 { 300 } else { u64::from(much % 5) };
        let born = self.timeline.next_position();
        for step in 0..steps {
            self.stream(&mut scorer, born, step, dice);
            // The pass that made a token saw all but it; some recorders write its own share down too.
            let mut row = random_row(self.timeline.live_len() - (step % 2) as usize, &mut state);
            if row.len() < 2 {
                break;
            }
            let broken = (u64::from(dice) + step) % 7;
            match broken {
                0 => row[1] = f32::NAN,
                1 => row.truncate(row.len() / 2 - usize::from(row.len() == 2)),
                _ => self.twin.score(&row, turn, &rules),
            }
            assert_eq!(scorer.observe(Some(&row)).is_err(), broken < 2);
        }
        self.apply(&scorer.finish());
    }

    /// One more token of the answer, in the open chunk or a new one; now and then what was said since `born` is
    /// cut in two.
    fn stream(&mut self, scorer: &mut Scorer, born: Position, step: u64, dice: u8) {
        let turn = self.timeline.turns()[self.timeline.turns().len() - 1].id;
        let next = self.timeline.next_sentence(turn);
        let open = self.timeline.turn_chunks(turn).last().map(|c| c.id().sentence).filter(|s| s + 1 == next);
        let sentence = open.filter(|_| !step.is_multiple_of(3)).unwrap_or(next);
        let (at, role) = (self.timeline.next_position(), Role::Assistant);
        let chunk = ChunkId::new(role, turn, sentence);
        let pinned = self.timeline.chunk(chunk).is_some_and(|c| c.is_pinned());
        let (brightness, votes, mass) = (FULL.0, 0, 0.0);
        self.twin.0.push(Tok {
            chunk,
            brightness,
            votes,
            mass,
            looks: 0,
            dead: false,
            gone: false,
            pinned,
            frame: false,
        });
        let token =
            NewToken { id: TokenId(3), text: "x".into(), sentence, brightness: FULL, voice: Voice::Speaker };
        self.apply(&Change::Append(Append { at, turn, role, tokens: vec![token] }));
        scorer.push(chunk, at, FULL);
        let start = self.timeline.chunk(chunk).expect("just said").start();
        let cut = born.max(start.plus(1));
        if dice & 16 != 0 && step % 4 == 2 && cut <= at {
            let sentence = self.timeline.next_sentence(turn);
            self.apply(&Change::Split { chunk, at: cut, sentence, tally: Tally::default() });
            let tail = ChunkId { sentence, ..chunk };
            scorer.split(cut, tail);
            self.twin.0[cut.0 as usize..].iter_mut().for_each(|t| t.chunk = tail);
        }
    }

    fn prune(&mut self, whom: u8, much: u8, dice: u8) {
        let rank = [Rank::Peak, Rank::Mean, Rank::Top4, Rank::Votes][usize::from(whom % 4)];
        let policy = match dice % 4 {
            0 => Policy::Fifo,
            1 => Policy::Window,
            _ => Policy::Brightness { rank, ties: Ties::Dimmer },
        };
        let current = (dice & 64 == 0).then(|| self.timeline.turns().last().map(|t| t.id)).flatten();
        let (budget, sinks, recent) = (usize::from(much % 40), usize::from(whom % 3), usize::from(dice % 5));
        let rules = PruneRules { policy, budget, sinks, recent, fill: dice & 32 != 0, current };
        let orphans = self.orphans();
        let plan = plan_prune(self.timeline.view(0), &rules);
        let expected = self.twin.prune(&rules);
        let left: Vec<_> = plan.leaves.iter().map(|l| l.chunk).collect();
        assert_eq!(left, expected, "{rules:?}");
        if let Some(change) = plan.change() {
            self.apply(&change);
        }
        assert_eq!(plan.after, self.timeline.live_len());
        // No overrun without its event, and no event without an overrun.
        assert_eq!(plan.exceeded.as_ref().map(|e| e.by), plan.after.checked_sub(budget).filter(|&by| by > 0));
        let held = plan.exceeded.iter().flat_map(|e| &e.held).map(|(_, tokens)| tokens).sum::<usize>();
        assert!(
            plan.exceeded.is_none() || held == plan.after,
            "every token that is left is held by something"
        );
        if policy != Policy::Window {
            let left_behind: Vec<_> = self.orphans().difference(&orphans).copied().collect();
            assert_eq!(left_behind, [], "chunks that survive without their anchors");
        }
    }

    fn resurrect(&mut self, whom: u8, much: u8) {
        let chunks: Vec<_> = self.timeline.chunks().map(|c| c.id()).collect();
        let mut hits: Vec<Hit> = Vec::new();
        for i in 0..usize::from(whom % 5).min(chunks.len()) {
            let chunk = chunks[(usize::from(whom) * 7 + i * 3) % chunks.len()];
            hits.push(Hit { chunk, score: -(i as f64) });
        }
        let budget = usize::from(much % 30);
        let plan = plan_returns(&self.timeline, &hits, budget, ReturnsWith::Earned);
        let before = self.timeline.live_len();
        self.twin.resurrect(&hits.iter().map(|h| h.chunk).collect::<Vec<_>>(), budget);
        if let Some(change) = plan.change() {
            self.apply(&change);
        }
        assert_eq!(self.timeline.live_len() - before, plan.tokens);
        assert!(plan.tokens <= budget, "returned {} with a budget of {budget}", plan.tokens);
    }

    /// Does something to every token of a chunk of the twin.
    fn each(&mut self, chunk: ChunkId, change: impl Fn(&mut Tok)) {
        self.twin.0.iter_mut().filter(|t| t.chunk == chunk).for_each(change);
    }

    fn pick(&self, whom: u8) -> Option<ChunkId> {
        let chunks: Vec<_> = self.timeline.chunks().map(|c| c.id()).collect();
        (!chunks.is_empty()).then(|| chunks[usize::from(whom) % chunks.len()])
    }

    fn pin(&mut self, whom: u8, dice: u8) {
        let Some(chunk) = self.pick(whom) else { return };
        if dice.is_multiple_of(2) {
            let Ok(change) = signals::unpin(&self.timeline, chunk) else { return };
            self.apply(&change);
            self.each(chunk, |t| t.pinned = false);
        } else {
            let Ok(change) = signals::pin(&self.timeline, chunk, FULL) else { return };
            self.apply(&change);
            self.twin.resurrect(&[chunk], usize::MAX);
            self.each(chunk, |t| {
                (t.pinned, t.brightness) = (true, if t.gone { t.brightness } else { FULL.0 });
            });
        }
    }

    fn delete_or_send(&mut self, whom: u8, dice: u8) {
        let Some(chunk) = self.pick(whom) else { return };
        if dice.is_multiple_of(2) {
            let Ok(change) = signals::delete(&self.timeline, chunk) else { return };
            let Change::Withdraw { parts, .. } = &change else { panic!("a deletion withdraws") };
            parts.iter().for_each(|p| self.each(p.chunk, |t| t.gone = true));
            assert!(parts.iter().any(|p| p.chunk == chunk));
            self.apply(&change);
        } else {
            match signals::prune(&self.timeline, chunk, None) {
                Ok(change) => {
                    let Change::Prune(leaves) = &change else { panic!("it prunes") };
                    leaves.iter().for_each(|l| {
                        self.twin
                            .0
                            .iter_mut()
                            .filter(|t| t.chunk == l.chunk && !t.gone)
                            .for_each(|t| t.dead = true);
                    });
                    self.apply(&change);
                }
                Err(SignalError::HeldByPin { pinned, .. }) => {
                    assert!(self.timeline.chunk(pinned).is_some_and(|c| c.is_pinned()));
                }
                Err(_) => {}
            }
        }
    }

    /// The last chunk is cut, as when it has grown too long; and a change that fails halfway leaves no trace.
    fn split(&mut self, whom: u8, much: u8) {
        let Some(chunk) = self.timeline.chunks().last() else { return };
        let (id, start, len) = (chunk.id(), chunk.start(), chunk.len());
        let sentence = self.timeline.next_sentence(id.turn) + u32::from(whom % 2);
        let at = start.plus(usize::from(much) % len);
        let (change, turn) =
            (Change::Split { chunk: id, at, sentence, tally: Tally::default() }, self.timeline.next_turn());
        let token = NewToken {
            id: TokenId(7),
            text: "é".into(),
            sentence: 0,
            brightness: FULL,
            voice: Voice::Speaker,
        };
        let role = Role::Assistant;
        let append =
            Change::Append(Append { at: self.timeline.next_position(), turn, role, tokens: vec![token] });
        let impossible = Change::Pin { chunk: ChunkId::new(Role::User, turn, 9), pinned: true };
        let batch =
            Change::Batch(vec![append.clone(), Change::Batch(vec![change.clone(), append]), impossible]);
        let before = self.timeline.clone();
        assert!(self.timeline.apply(&batch).is_err());
        assert_eq!(self.timeline, before, "{batch:?} leaves no trace");
        let refused: Result<_, ApplyError> = self.timeline.transact(&change, |_| Err(ApplyError::Full));
        assert!(refused.is_err());
        assert_eq!(self.timeline, before, "{change:?} leaves no trace");
        self.timeline.check().expect("sound");
        let last_turn = self.timeline.turns().last().is_some_and(|t| t.id == id.turn);
        if last_turn && at > start {
            self.apply(&change);
            let new = ChunkId { sentence, ..id };
            self.twin.0[at.0 as usize..]
                .iter_mut()
                .for_each(|t| (t.chunk, t.votes, t.looks, t.mass) = (new, 0, 0, 0.0));
            let gathered = self.timeline.chunk(id).expect("the head").tally();
            // The head keeps all that the chunk had gathered.
            let head = self.twin.0.iter_mut().filter(|t| t.chunk == id);
            head.enumerate().for_each(|(i, t)| {
                let Tally { votes, mass, looks } = if i == 0 { gathered } else { Tally::default() };
                (t.votes, t.looks, t.mass) = (votes, looks, mass as f64 / Tally::UNIT);
            });
        }
    }

    fn merge(&mut self, whom: u8) {
        let Some(chunk) = self.pick(whom) else { return };
        let Ok(change) = signals::merge(&self.timeline, chunk) else { return };
        let mut turn =
            self.twin.chunks().into_iter().filter(|c| c.turn == chunk.turn && c.sentence < chunk.sentence);
        let into = turn.next_back().expect("something to merge with");
        let pair = |t: &Tok| t.chunk == chunk || t.chunk == into;
        let both: Vec<_> = self.twin.0.iter().filter(|t| pair(t)).cloned().collect();
        let (live, pinned) = (both.iter().any(|t| !t.dead && !t.gone), both.iter().any(|t| t.pinned));
        for token in self.twin.0.iter_mut().filter(|t| pair(t)) {
            (token.chunk, token.pinned) = (into, pinned);
            token.dead = token.dead && (!live || token.gone);
        }
        self.apply(&change);
    }

    /// Applies a change, undoes it and does it again: the state must come and go exactly.
    fn apply(&mut self, change: &Change) {
        self.changes.push(change.clone());
        self.commit(change);
        let before = self.timeline.clone();
        let undo = self.timeline.apply(change).unwrap_or_else(|e: ApplyError| panic!("{e} in {change:?}"));
        let after = self.timeline.state_hash();
        // Every third time is enough for what the store would have: it costs more than all the rest.
        let also_kept = self.timeline.len().is_multiple_of(3);
        if also_kept {
            self.commit(&undo);
        }
        let redo = self.timeline.apply(&undo).expect("what was done can be undone");
        if matches!(change, Change::Append(_)) {
            // Positions are never reused: an undone append is out of sight, not unmade.
            assert_eq!(self.timeline.view(0).positions(), before.view(0).positions(), "undo of {change:?}");
        } else {
            assert_eq!(self.timeline.state_hash(), before.state_hash(), "undo of {change:?}");
            assert_eq!(self.timeline, before, "undo of {change:?}");
        }
        if also_kept {
            self.commit(&redo);
        }
        self.timeline.apply(&redo).expect("what was undone can be done again");
        assert_eq!(self.timeline.state_hash(), after, "redo of {change:?}");
    }

    /// Does the change to what a store would have, which holds in memory only what is live and what the change
    /// asks for; it must come to the same.
    fn commit(&mut self, change: &Change) {
        let hash = self.timeline.state_hash();
        let mut kept = self.shelf.load().expect("it can be loaded");
        assert_eq!(kept.state_hash(), hash, "before {change:?}");
        for chunk in kept.away(change) {
            kept.admit(chunk, self.shelf.fetch(chunk).expect("it is there")).expect("it fits");
        }
        kept.apply(change).unwrap_or_else(|e| panic!("{e} in {change:?}"));
        kept.check().expect("sound");
        self.shelf.write(change, &kept).expect("what changed is in memory");
        let all_here = kept.state_hash();
        kept.release_dead();
        kept.check().expect("sound");
        assert_eq!(kept.state_hash(), all_here, "what is away counts as before");
    }

    /// Everything that must always be true.
    ///
    /// # Panics
    /// When it is not.
    pub fn check(&self) {
        self.timeline.check().expect("sound");
        assert_eq!(self.timeline.len(), self.twin.0.len());
        for (i, twin) in self.twin.0.iter().enumerate() {
            let token = self.timeline.token(Position(i as u64)).expect("no token is ever lost");
            let real = (token.chunk, token.brightness.0, token.flags.is_live());
            assert_eq!(real, (twin.chunk, twin.brightness, !twin.dead && !twin.gone), "token {i}");
        }
        for chunk in self.timeline.chunks() {
            let of = self.twin.0.iter().filter(|t| t.chunk == chunk.id());
            let (votes, looks, pinned) =
                of.clone().fold((0, 0, false), |(v, l, p), t| (v + t.votes, l + t.looks, p || t.pinned));
            let Tally { votes: v, looks: l, .. } = chunk.tally();
            assert_eq!((v, l, chunk.is_pinned()), (votes, looks, pinned), "{}", chunk.id());
            let mass: f64 = of.map(|t| t.mass).sum();
            // Within a generation attention is added up in single precision.
            let off = (chunk.tally().mass as f64 / Tally::UNIT - mass).abs();
            assert!(off < 1e-4 * (1.0 + mass), "mass of {}", chunk.id());
        }
        self.check_slots();
    }

    /// Slots and live positions are one to one, in order.
    fn check_slots(&self) {
        let live = self.twin.live();
        for prefix in [0, 3] {
            let view = self.timeline.view(prefix);
            assert_eq!(view.positions(), live.iter().map(|&i| Position(i as u64)).collect::<Vec<_>>());
            assert_eq!(view.len(), prefix + live.len());
            for (n, &i) in live.iter().enumerate() {
                let (slot, position) = (Slot((prefix + n) as u32), Position(i as u64));
                assert_eq!((view.position(slot), view.slot(position)), (Some(position), Some(slot)));
            }
            assert_eq!(view.position(Slot(view.len() as u32)), None);
            assert!(prefix == 0 || view.position(Slot(0)).is_none());
        }
        let dead = (0..self.twin.0.len()).filter(|i| !live.contains(i));
        assert!(dead.into_iter().all(|i| self.timeline.view(0).slot(Position(i as u64)).is_none()));
    }

    /// Live chunks and the anchors that they live without. The plain `window` policy makes some, and so does a
    /// user who deletes; pruning by rank never adds one.
    fn orphans(&self) -> BTreeSet<(ChunkId, ChunkId)> {
        let mut orphans = BTreeSet::new();
        for chunk in self.timeline.live_chunks() {
            let own = self.timeline.chunk(ChunkId { sentence: 0, ..chunk.id() });
            let question =
                (chunk.id().role == Role::Assistant).then(|| self.timeline.partner(chunk.id())).flatten();
            let missing = [own, question].into_iter().flatten().filter(|a| !a.is_live());
            orphans.extend(missing.map(|a| (chunk.id(), a.id())));
        }
        orphans
    }
}

/// A row of attention that sums to 1, the first slot a sink.
fn random_row(len: usize, state: &mut u64) -> Vec<f32> {
    let mut next = || {
        *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = *state;
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
