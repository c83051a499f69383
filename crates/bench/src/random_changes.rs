//! A reproducible history: the next change follows from a seed, a count and the state only. So a history that crashed
//! and one that did not must reach the same state.

use halo_core::change::{Append, BrightnessRun, Change, NewToken, Score, TallyDelta};
use halo_core::manual_edit;
use halo_core::prune::{PrunePolicy, PruneRules, RankBy, TieBreak, plan_prune};
use halo_core::resurrect::{Hit, ResurrectedBrightness, plan_resurrection};
use halo_core::store::Durability;
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, ContentKind, Role, TokenId};

#[derive(Clone, Debug)]
pub struct BenchRng(pub u64);

impl BenchRng {
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next_u64() % n.max(1)
    }
}

const FULL_BRIGHTNESS: Brightness = Brightness(10_000.0);
/// Tokens in the context window of such a history.
const WINDOW_TOKENS: usize = 1500;

/// Change number `count`, and whether it must be synced.
#[must_use]
pub fn next_change(seed: u64, count: u64, timeline: &Timeline) -> (Change, Durability) {
    let mut dice = BenchRng(seed ^ count.wrapping_mul(0xA076_1D64_78BD_642F));
    let change = match dice.below(20) {
        0..=4 => None,
        5..=10 => Some(append_answer_tokens(&mut dice, timeline)),
        11 | 12 => Some(random_score(&mut dice, timeline)),
        13 | 14 => random_prune(&mut dice, timeline),
        15 => random_resurrect(&mut dice, timeline),
        16 => random_chunk(&mut dice, timeline)
            .and_then(|c| manual_edit::pin(timeline, c, FULL_BRIGHTNESS).ok()),
        17 => random_chunk(&mut dice, timeline).and_then(|c| manual_edit::unpin(timeline, c).ok()),
        18 => random_chunk(&mut dice, timeline).and_then(|c| manual_edit::merge(timeline, c).ok()),
        _ => random_chunk(&mut dice, timeline).and_then(|c| manual_edit::delete(timeline, c).ok()),
    };
    let durability = if dice.below(4) == 0 { Durability::Immediate } else { Durability::Deferred };
    match change {
        Some(change) => (change, durability),
        None => (append_user_message(&mut dice, timeline), Durability::Immediate),
    }
}

fn random_token(dice: &mut BenchRng, sentence: u32) -> NewToken {
    let words = ["the", " gun", " fires", "\n\n", " 谢谢", "🌱", "", " and", " then", "."];
    let text = words[dice.below(words.len() as u64) as usize].to_owned();
    let id = TokenId(dice.below(50_000) as u32);
    let voice = match dice.below(40) {
        0 => ContentKind::ToolResult,
        1 => ContentKind::Template,
        _ => ContentKind::Message,
    };
    NewToken { id, text, chunk_index: sentence, brightness: FULL_BRIGHTNESS, kind: voice }
}

fn append_user_message(dice: &mut BenchRng, timeline: &Timeline) -> Change {
    let turn = timeline.next_turn();
    let n = 1 + dice.below(120);
    let tokens = (0..n).map(|i| random_token(dice, (i / 64) as u32)).collect();
    Change::Append(Append { at: timeline.next_position(), turn, role: Role::User, tokens })
}

/// A few more tokens of the answer, or the first ones.
fn append_answer_tokens(dice: &mut BenchRng, timeline: &Timeline) -> Change {
    let last = timeline.turns().last().filter(|t| t.role == Role::Assistant);
    let turn = last.map_or(timeline.next_turn(), |t| t.id);
    let next = timeline.next_chunk_index(turn);
    let open = timeline.turn_chunks(turn).last().filter(|c| c.id().index + 1 == next && c.len() < 64);
    let sentence = open.map_or(next, |c| c.id().index);
    let tokens = (0..1 + dice.below(4)).map(|_| random_token(dice, sentence)).collect();
    Change::Append(Append { at: timeline.next_position(), turn, role: Role::Assistant, tokens })
}

/// Scores, and sometimes a prune.
fn random_score(dice: &mut BenchRng, timeline: &Timeline) -> Change {
    let mut score = Score::default();
    for chunk in timeline.live_chunks() {
        for run in chunk.live_runs() {
            let scores = chunk.brightness(run);
            let brightness = scores.iter().map(|b| Brightness(b.0 - dice.below(9) as f32)).collect();
            score.runs.push(BrightnessRun { start: run.start, brightness });
        }
        let (votes, mass) = (dice.below(5) as i64, dice.below(1 << 30) as i64);
        score.tallies.push((chunk.id(), TallyDelta { votes, mass, exposures: 1 }));
    }
    let mut changes = vec![Change::Score(score)];
    changes.extend(random_prune(dice, timeline).filter(|_| dice.below(2) == 0));
    Change::Batch(changes)
}

fn random_prune(dice: &mut BenchRng, timeline: &Timeline) -> Option<Change> {
    let policy = match dice.below(3) {
        0 => PrunePolicy::Fifo,
        1 => PrunePolicy::Random { seed: dice.next_u64() },
        _ => PrunePolicy::Brightness { rank: RankBy::Top4, ties: TieBreak::Dimmer },
    };
    let budget = WINDOW_TOKENS.min(timeline.live_len().saturating_sub(dice.below(200) as usize));
    let rules = PruneRules { policy, budget, sinks: 4, recent: 100, fill: dice.below(2) == 0, current: None };
    plan_prune(timeline.context_window(0), &rules).change()
}

fn random_resurrect(dice: &mut BenchRng, timeline: &Timeline) -> Option<Change> {
    let hits: Vec<Hit> = (0..4)
        .filter_map(|i| Some(Hit { chunk: random_chunk(dice, timeline)?, score: -f64::from(i) }))
        .collect();
    plan_resurrection(timeline, &hits, 300, ResurrectedBrightness::Earned).change()
}

fn random_chunk(dice: &mut BenchRng, timeline: &Timeline) -> Option<ChunkId> {
    let places = timeline.row_count();
    let place = dice.below(places as u64) as usize;
    let head = (place < places).then(|| timeline.chunk_headers(place..place + 1).next()).flatten()?;
    (head.len > 0).then_some(head.id)
}
