//! Rendering of agents' HUDs: time, budget, round trips through every format, and tokens per format.

use crate::synthetic_text;
use halo_agents::token_counter::{CeilTokenCounter, TokenCounter};
use halo_worlds::action::{Action, ActionContext};
use halo_worlds::format::{self, AnswerFormat, HudFormat};
use halo_worlds::heartbeat::Millis;
use halo_worlds::hud_renderer::{HudError, HudRenderer, HudRequest, RenderedHud};
use halo_worlds::prompts::WorldPrompts;
use halo_worlds::testing::{self, RandomWorldSize, START_TIME, WorldRng};
use halo_worlds::world::{AgentId, NewAgent, ParagraphSplit, RoomId, RoomMessage, World, WorldModelRef};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Clone, Debug, Default)]
pub struct HudBenchFigures {
    /// The time of each HUD.
    pub render_times: Vec<Duration>,
    /// HUDs that exceeded their token budget.
    pub overruns: usize,
}

/// A percentile of the times, in milliseconds.
#[must_use]
pub fn percentile_ms(took: &[Duration], percent: usize) -> f64 {
    let mut took = took.to_vec();
    took.sort_unstable();
    let at = (took.len() * percent / 100).min(took.len().saturating_sub(1));
    took.get(at).map_or(0.0, |took| took.as_secs_f64() * 1e3)
}

#[derive(Clone, Debug, Default)]
pub struct HudBenchReport {
    pub huds: BTreeMap<HudFormat, HudBenchFigures>,
    /// The time of each new message: rendering and counting it for all readers.
    pub message_times: Vec<Duration>,
}

struct WordStream {
    words: Vec<String>,
    at: usize,
}

impl WordStream {
    fn new(from: usize) -> Self {
        let text = synthetic_text::paragraphs(500).concat();
        Self { words: text.split_whitespace().map(str::to_owned).collect(), at: from }
    }

    fn next_words(&mut self, count: usize) -> String {
        let from = self.at;
        self.at += count;
        (from..from + count).map(|n| self.words[n % self.words.len()].as_str()).collect::<Vec<_>>().join(" ")
    }
}

/// A world of many agents in a few rooms, with many messages and memories.
#[must_use]
pub fn build_world(agents: usize, rooms: usize) -> World {
    let (mut world, mut lot, mut prose) = (World::default(), WorldRng::new(7), WordStream::new(7));
    world.header.max_agents = u32::try_from(agents).unwrap_or(u32::MAX);
    world.header.models = vec![WorldModelRef::local("local")];
    let bounds = ActionContext {
        now: START_TIME,
        counter: &CeilTokenCounter,
        knowledge_budget: 3_000,
        split: ParagraphSplit::Never,
    };
    let ids: Vec<AgentId> = (0..agents)
        .filter_map(|n| {
            let new = NewAgent {
                name: Some(format!("Agent {n}")),
                model: "local".into(),
                prompt: prose.next_words(30),
                formats: (HudFormat::ALL[n % 4], AnswerFormat::Json),
                ..NewAgent::default()
            };
            let id = world.create_agent(new, START_TIME).ok()?;
            for part in 0..25 {
                let path = format!("notes.topic_{}.n{part}", part % 5);
                let _ = world.perform_action(
                    id,
                    Action::Set { path, value: json!(prose.next_words(8)), w: None },
                    bounds,
                );
            }
            Some(id)
        })
        .collect();
    let halls: Vec<RoomId> = ids.iter().copied().take(rooms.max(1)).collect();
    for (n, &id) in ids.iter().enumerate() {
        for hop in 0..3 {
            world.join_room(halls[(n + hop * 17) % halls.len()], id, START_TIME);
        }
    }
    for round in 0..200 {
        for &hall in &halls {
            let members: Vec<AgentId> =
                world.room(hall).map(|room| room.members.keys().copied().collect()).unwrap_or_default();
            let words = 10 + lot.below(50);
            let _ = world.send_message(
                hall,
                *lot.choose(&members),
                prose.next_words(words),
                None,
                START_TIME + round * 1_000,
            );
        }
    }
    world
}

/// Renders a HUD for every agent in its own format, `rounds` times; between rounds every room gets a message.
pub fn render_all(world: &mut World, count: &Arc<dyn TokenCounter>, rounds: usize) -> HudBenchReport {
    let (scribe, prompts) = (HudRenderer::new(Arc::clone(count)), WorldPrompts::default());
    let mut prose = WordStream::new(11);
    let mut all = HudBenchReport::default();
    let ids: Vec<AgentId> = world.agents().map(|agent| agent.id).collect();
    for round in 0..=rounds {
        let now = START_TIME + 300_000 + (round as Millis) * 10_000;
        for id in world.rooms().map(|room| room.id).collect::<Vec<_>>() {
            let Ok(said) = world.send_message(id, id, prose.next_words(30), None, now) else { continue };
            let Some(message) = world.room(id).and_then(|room| room.message(said)) else { continue };
            let start = Instant::now();
            world
                .room_formats(id)
                .into_iter()
                .for_each(|(_, format)| scribe.prerender_message(message, format));
            all.message_times.push(start.elapsed());
        }
        for &id in &ids {
            let view =
                HudRequest { now, prompts: &prompts, token_limit: usize::MAX, recalled: &|_| Vec::new() };
            let start = Instant::now();
            let rendered = scribe.render(world, id, &view);
            let took = start.elapsed();
            let Ok(rendered) = rendered else { continue };
            let format = world.agent(id).map(|agent| agent.hud_format).unwrap_or_default();
            let figures = all.huds.entry(format).or_default();
            // The first round is not measured: it fills the caches.
            if round > 0 {
                figures.render_times.push(took);
            }
            let counted: usize =
                rendered.fragments.iter().map(|piece| scribe.count_tokens(&piece.text)).sum();
            figures.overruns += usize::from(counted > world.header.budgets.total);
        }
    }
    all
}

/// Tokens of the same HUDs in each format, and in JSON without spaces.
pub fn tokens_by_format(
    world: &World,
    count: &Arc<dyn TokenCounter>,
    most: usize,
) -> (f64, BTreeMap<HudFormat, f64>) {
    let (scribe, prompts) = (HudRenderer::new(Arc::clone(count)), WorldPrompts::default());
    let (mut minified, mut by, mut huds) = (0usize, BTreeMap::new(), 0usize);
    for agent in world.agents().take(most) {
        let now = START_TIME + 300_000;
        let view = HudRequest { now, prompts: &prompts, token_limit: usize::MAX, recalled: &|_| Vec::new() };
        // As much as fits in the format that takes most.
        let Ok(rendered) = scribe.render_as(world, agent, HudFormat::Json, &view) else { continue };
        minified += count.count_tokens(&serde_json::to_string(&rendered.hud).unwrap_or_default());
        for format in HudFormat::ALL {
            *by.entry(format).or_insert(0usize) += count.count_tokens(&format::render(&rendered.hud, format));
        }
        huds += 1;
    }
    let mean = |tokens: usize| tokens as f64 / huds.max(1) as f64;
    (mean(minified), by.into_iter().map(|(format, tokens)| (format, mean(tokens))).collect())
}

/// Results of HUDs of random worlds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RandomHudReport {
    pub huds: u64,
    /// HUDs that exceeded their token budget.
    pub overruns: u64,
    /// HUDs that were different when they were parsed back.
    pub roundtrip_errors: u64,
    /// HUDs whose mandatory parts did not fit: an error, and no HUD.
    pub refused: u64,
}

/// HUDs of random worlds, with names and messages that are hard to format, each in every format and back.
pub fn check_random_huds(huds: u64, seed: u64, progress: &mut dyn FnMut(u64)) -> RandomHudReport {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let prompts = WorldPrompts::default();
    let mut all = RandomHudReport::default();
    let mut from = seed;
    while all.huds < huds {
        // A fixed number of worlds at once, so that the same seed gives the same figures on every machine.
        let part = |thread| (from..from + WORLDS_PER_ROUND).filter(move |seed| seed % threads == thread);
        std::thread::scope(|scope| {
            let (part, prompts) = (&part, &prompts);
            let one = |thread| {
                scope.spawn(move || part(thread).map(|seed| check_random_world(seed, prompts)).sum())
            };
            let working: Vec<_> = (0..threads).map(one).collect();
            for sums in working {
                let sums: RandomHudReport =
                    sums.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                all = all + sums;
            }
        });
        from += WORLDS_PER_ROUND;
        progress(all.huds);
    }
    all
}

/// Random worlds per batch, before the target is checked.
const WORLDS_PER_ROUND: u64 = 64;

/// HUDs of one random world.
fn check_random_world(seed: u64, prompts: &WorldPrompts) -> RandomHudReport {
    let (mut all, mut lot) = (RandomHudReport::default(), WorldRng::new(seed));
    let (world, now) = testing::random_world(&mut lot, RandomWorldSize::default());
    let scribe = HudRenderer::new(Arc::new(CeilTokenCounter));
    for agent in world.agents() {
        let room = if lot.one_in(3) { 1_200 + lot.below(4_000) } else { usize::MAX };
        let recalled = |room: RoomId| -> Vec<RoomMessage> {
            world.room(room).map(|room| room.messages.iter().take(5).cloned().collect()).unwrap_or_default()
        };
        let view = HudRequest { now, prompts, token_limit: room, recalled: &recalled };
        for format in HudFormat::ALL {
            match scribe.render_as(&world, agent, format, &view) {
                Ok(rendered) => {
                    all.huds += 1;
                    all.overruns += u64::from(exceeds_budget(&rendered, &world, room));
                    all.roundtrip_errors +=
                        u64::from(format::parse(&rendered.text(), format).as_ref() != Ok(&rendered.hud));
                }
                Err(HudError::BudgetTooSmall { .. } | HudError::UnknownAgent(_)) => all.refused += 1,
            }
        }
    }
    all
}

impl std::ops::Add for RandomHudReport {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self {
            huds: self.huds + more.huds,
            overruns: self.overruns + more.overruns,
            roundtrip_errors: self.roundtrip_errors + more.roundtrip_errors,
            refused: self.refused + more.refused,
        }
    }
}

impl std::iter::Sum for RandomHudReport {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| sum + one)
    }
}

fn exceeds_budget(rendered: &RenderedHud, world: &World, room: usize) -> bool {
    let counted: usize =
        rendered.fragments.iter().map(|piece| CeilTokenCounter.count_tokens(&piece.text)).sum();
    let total_tokens = CeilTokenCounter.count_tokens(&rendered.text());
    counted.max(total_tokens) > world.header.budgets.scaled_to(room).total
}
