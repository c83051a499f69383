//! A life that can be lived twice: the next change follows from a seed, a count and the state, and from nothing
//! else. So one who crashed and one who never did must come to the same state.

use halo_core::change::{Append, Change, NewToken, Score, Scored, TallyChange};
use halo_core::prune::{Policy, PruneRules, Rank, Ties, plan_prune};
use halo_core::resurrect::{Hit, ReturnsWith, plan_returns};
use halo_core::seams::Durability;
use halo_core::signals;
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, Role, TokenId, Voice};

/// Numbers that follow from a seed.
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

impl Dice {
    /// The next number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.roll() % n.max(1)
    }
}

const FULL: Brightness = Brightness(10_000.0);
/// Tokens that the window of such a life may hold.
const WINDOW: usize = 1500;

/// The change that follows as number `count`, and whether it must be safe at once.
#[must_use]
pub fn next(seed: u64, count: u64, timeline: &Timeline) -> (Change, Durability) {
    let mut dice = Dice(seed ^ count.wrapping_mul(0xA076_1D64_78BD_642F));
    let change = match dice.below(20) {
        0..=4 => None,
        5..=10 => Some(speak(&mut dice, timeline)),
        11 | 12 => Some(score(&mut dice, timeline)),
        13 | 14 => prune(&mut dice, timeline),
        15 => resurrect(&mut dice, timeline),
        16 => pick(&mut dice, timeline).and_then(|c| signals::pin(timeline, c, FULL).ok()),
        17 => pick(&mut dice, timeline).and_then(|c| signals::unpin(timeline, c).ok()),
        18 => pick(&mut dice, timeline).and_then(|c| signals::merge(timeline, c).ok()),
        _ => pick(&mut dice, timeline).and_then(|c| signals::delete(timeline, c).ok()),
    };
    let durability = if dice.below(4) == 0 { Durability::Now } else { Durability::Behind };
    match change {
        Some(change) => (change, durability),
        None => (say(&mut dice, timeline), Durability::Now),
    }
}

fn token(dice: &mut Dice, sentence: u32) -> NewToken {
    let words = ["the", " gun", " fires", "\n\n", " 谢谢", "🌱", "", " and", " then", "."];
    let text = words[dice.below(words.len() as u64) as usize].to_owned();
    let id = TokenId(dice.below(50_000) as u32);
    let voice = match dice.below(40) {
        0 => Voice::Tool,
        1 => Voice::Frame,
        _ => Voice::Speaker,
    };
    NewToken { id, text, sentence, brightness: FULL, voice }
}

/// A message of the user.
fn say(dice: &mut Dice, timeline: &Timeline) -> Change {
    let turn = timeline.next_turn();
    let n = 1 + dice.below(120);
    let tokens = (0..n).map(|i| token(dice, (i / 64) as u32)).collect();
    Change::Append(Append { at: timeline.next_position(), turn, role: Role::User, tokens })
}

/// A few more tokens of the answer, or the first ones.
fn speak(dice: &mut Dice, timeline: &Timeline) -> Change {
    let last = timeline.turns().last().filter(|t| t.role == Role::Assistant);
    let turn = last.map_or(timeline.next_turn(), |t| t.id);
    let next = timeline.next_sentence(turn);
    let open = timeline.turn_chunks(turn).last().filter(|c| c.id().sentence + 1 == next && c.len() < 64);
    let sentence = open.map_or(next, |c| c.id().sentence);
    let tokens = (0..1 + dice.below(4)).map(|_| token(dice, sentence)).collect();
    Change::Append(Append { at: timeline.next_position(), turn, role: Role::Assistant, tokens })
}

/// What a generation has taught, and sometimes what left for it.
fn score(dice: &mut Dice, timeline: &Timeline) -> Change {
    let mut score = Score::default();
    for chunk in timeline.live_chunks() {
        for run in chunk.live_runs() {
            let lights = chunk.brightness(run);
            let brightness = lights.iter().map(|b| Brightness(b.0 - dice.below(9) as f32)).collect();
            score.runs.push(Scored { start: run.start, brightness });
        }
        let (votes, mass) = (dice.below(5) as i64, dice.below(1 << 30) as i64);
        score.tallies.push((chunk.id(), TallyChange { votes, mass, looks: 1 }));
    }
    let mut changes = vec![Change::Score(score)];
    changes.extend(prune(dice, timeline).filter(|_| dice.below(2) == 0));
    Change::Batch(changes)
}

fn prune(dice: &mut Dice, timeline: &Timeline) -> Option<Change> {
    let policy = match dice.below(3) {
        0 => Policy::Fifo,
        1 => Policy::Random { seed: dice.roll() },
        _ => Policy::Brightness { rank: Rank::Top4, ties: Ties::Dimmer },
    };
    let budget = WINDOW.min(timeline.live_len().saturating_sub(dice.below(200) as usize));
    let rules = PruneRules { policy, budget, sinks: 4, recent: 100, fill: dice.below(2) == 0, current: None };
    plan_prune(timeline.view(0), &rules).change()
}

fn resurrect(dice: &mut Dice, timeline: &Timeline) -> Option<Change> {
    let hits: Vec<Hit> =
        (0..4).filter_map(|i| Some(Hit { chunk: pick(dice, timeline)?, score: -f64::from(i) })).collect();
    plan_returns(timeline, &hits, 300, ReturnsWith::Earned).change()
}

fn pick(dice: &mut Dice, timeline: &Timeline) -> Option<ChunkId> {
    let places = timeline.places();
    let place = dice.below(places as u64) as usize;
    let head = (place < places).then(|| timeline.heads(place..place + 1).next()).flatten()?;
    (head.len > 0).then_some(head.id)
}
