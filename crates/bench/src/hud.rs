//! What agents see: how long it takes to write, whether it ever is too long, whether every format comes back as it was, and how
//! many tokens each has.

use crate::prose;
use halo_agents::action::{Action, Bounds};
use halo_agents::count::{Count, QuarterUp};
use halo_agents::format::{self, Format, Output};
use halo_agents::heartbeat::Millis;
use halo_agents::prompts::Prompts;
use halo_agents::scribe::{HudError, Scribe, Shown, View};
use halo_agents::testing::{self, BEGIN, Lot, Size};
use halo_agents::world::{AgentId, Brain, Message, Newcomer, RoomId, World};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What was measured of one format.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// How long each HUD took.
    pub took: Vec<Duration>,
    /// HUDs that were longer than they may be.
    pub overruns: usize,
}

/// What so many of a hundred took at most, in milliseconds.
#[must_use]
pub fn percentile(took: &[Duration], percent: usize) -> f64 {
    let mut took = took.to_vec();
    took.sort_unstable();
    let at = (took.len() * percent / 100).min(took.len().saturating_sub(1));
    took.get(at).map_or(0.0, |took| took.as_secs_f64() * 1e3)
}

/// What was measured of everybody.
#[derive(Clone, Debug, Default)]
pub struct Everybody {
    /// HUDs, by their format.
    pub huds: BTreeMap<Format, Figures>,
    /// How long each message took that was said, to be written and counted for all who would see it.
    pub said: Vec<Duration>,
}

/// Words without end.
struct Prose {
    words: Vec<String>,
    at: usize,
}

impl Prose {
    fn new(from: usize) -> Self {
        let text = prose::paragraphs(500).concat();
        Self { words: text.split_whitespace().map(str::to_owned).collect(), at: from }
    }

    fn words(&mut self, count: usize) -> String {
        let from = self.at;
        self.at += count;
        (from..from + count).map(|n| self.words[n % self.words.len()].as_str()).collect::<Vec<_>>().join(" ")
    }
}

/// A world of many agents in a few rooms, with much said and much known.
#[must_use]
pub fn crowd(agents: usize, rooms: usize) -> World {
    let (mut world, mut lot, mut prose) = (World::default(), Lot::new(7), Prose::new(7));
    world.head.most_agents = u32::try_from(agents).unwrap_or(u32::MAX);
    world.head.models = vec![Brain::here("local")];
    let bounds = Bounds { now: BEGIN, count: &QuarterUp, knowledge: 3_000 };
    let ids: Vec<AgentId> = (0..agents)
        .filter_map(|n| {
            let new = Newcomer {
                name: Some(format!("Agent {n}")),
                model: "local".into(),
                prompt: prose.words(30),
                formats: (Format::ALL[n % 4], Output::Json),
                ..Newcomer::default()
            };
            let id = world.create(new, BEGIN).ok()?;
            for part in 0..25 {
                let path = format!("notes.topic_{}.n{part}", part % 5);
                let _ = world.act(id, Action::Set { path, value: json!(prose.words(8)), w: None }, bounds);
            }
            Some(id)
        })
        .collect();
    let halls: Vec<RoomId> = ids.iter().copied().take(rooms.max(1)).collect();
    for (n, &id) in ids.iter().enumerate() {
        for hop in 0..3 {
            world.join(halls[(n + hop * 17) % halls.len()], id, BEGIN);
        }
    }
    for round in 0..200 {
        for &hall in &halls {
            let members: Vec<AgentId> =
                world.room(hall).map(|room| room.members.keys().copied().collect()).unwrap_or_default();
            let words = 10 + lot.below(50);
            let _ = world.say(hall, *lot.of(&members), prose.words(words), None, BEGIN + round * 1_000);
        }
    }
    world
}

/// Writes a HUD for everybody, in everybody's own format, so many times; between the times something is said in every room.
pub fn everybody(world: &mut World, count: &Arc<dyn Count>, rounds: usize) -> Everybody {
    let (scribe, prompts) = (Scribe::new(Arc::clone(count)), Prompts::default());
    let mut prose = Prose::new(11);
    let mut all = Everybody::default();
    let ids: Vec<AgentId> = world.agents().map(|agent| agent.id).collect();
    for round in 0..=rounds {
        let now = BEGIN + 300_000 + (round as Millis) * 10_000;
        for id in world.rooms().map(|room| room.id).collect::<Vec<_>>() {
            let Ok(said) = world.say(id, id, prose.words(30), None, now) else { continue };
            let Some(message) = world.room(id).and_then(|room| room.message(said)) else { continue };
            let start = Instant::now();
            world.read_in(id).into_iter().for_each(|(_, format)| scribe.foresee(message, format));
            all.said.push(start.elapsed());
        }
        for &id in &ids {
            let view = View { now, prompts: &prompts, room: usize::MAX, recalled: &|_| Vec::new() };
            let start = Instant::now();
            let shown = scribe.show(world, id, &view);
            let took = start.elapsed();
            let Ok(shown) = shown else { continue };
            let format = world.agent(id).map(|agent| agent.input).unwrap_or_default();
            let figures = all.huds.entry(format).or_default();
            // The first time everything is counted for the first time.
            if round > 0 {
                figures.took.push(took);
            }
            let counted: usize = shown.pieces.iter().map(|piece| scribe.tokens(&piece.text)).sum();
            figures.overruns += usize::from(counted > world.head.budgets.total);
        }
    }
    all
}

/// How many tokens the same HUDs have in each format, and in JSON without a space.
pub fn tokens(world: &World, count: &Arc<dyn Count>, most: usize) -> (f64, BTreeMap<Format, f64>) {
    let (scribe, prompts) = (Scribe::new(Arc::clone(count)), Prompts::default());
    let (mut minified, mut by, mut huds) = (0usize, BTreeMap::new(), 0usize);
    for agent in world.agents().take(most) {
        let now = BEGIN + 300_000;
        let view = View { now, prompts: &prompts, room: usize::MAX, recalled: &|_| Vec::new() };
        // As much as fits where it takes most.
        let Ok(shown) = scribe.show_as(world, agent, Format::Json, &view) else { continue };
        minified += count.tokens(&serde_json::to_string(&shown.hud).unwrap_or_default());
        for format in Format::ALL {
            *by.entry(format).or_insert(0usize) += count.tokens(&format::write(&shown.hud, format));
        }
        huds += 1;
    }
    let mean = |tokens: usize| tokens as f64 / huds.max(1) as f64;
    (mean(minified), by.into_iter().map(|(format, tokens)| (format, mean(tokens))).collect())
}

/// What became of HUDs by lot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByLot {
    /// How many there were.
    pub huds: u64,
    /// Longer than they may be.
    pub overruns: u64,
    /// Other than they were when they were read back.
    pub changed: u64,
    /// What an agent must see did not fit: told so, and nothing shown.
    pub refused: u64,
}

/// HUDs of worlds by lot, with names and messages that no format likes, each in every format and back.
pub fn by_lot(huds: u64, seed: u64, progress: &mut dyn FnMut(u64)) -> ByLot {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let prompts = Prompts::default();
    let mut all = ByLot::default();
    let mut from = seed;
    while all.huds < huds {
        // Always as many worlds at once, so that the same lot gives the same figures everywhere.
        let part = |thread| (from..from + AT_ONCE).filter(move |seed| seed % threads == thread);
        std::thread::scope(|scope| {
            let (part, prompts) = (&part, &prompts);
            let one = |thread| scope.spawn(move || part(thread).map(|seed| of_one(seed, prompts)).sum());
            let working: Vec<_> = (0..threads).map(one).collect();
            for sums in working {
                let sums: ByLot = sums.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                all = all + sums;
            }
        });
        from += AT_ONCE;
        progress(all.huds);
    }
    all
}

/// How many worlds by lot are looked at before it is asked whether that is enough.
const AT_ONCE: u64 = 64;

/// HUDs of one world by lot.
fn of_one(seed: u64, prompts: &Prompts) -> ByLot {
    let (mut all, mut lot) = (ByLot::default(), Lot::new(seed));
    let (world, now) = testing::world(&mut lot, Size::default());
    let scribe = Scribe::new(Arc::new(QuarterUp));
    for agent in world.agents() {
        let room = if lot.one_in(3) { 1_200 + lot.below(4_000) } else { usize::MAX };
        let recalled = |room: RoomId| -> Vec<Message> {
            world.room(room).map(|room| room.messages.iter().take(5).cloned().collect()).unwrap_or_default()
        };
        let view = View { now, prompts, room, recalled: &recalled };
        for format in Format::ALL {
            match scribe.show_as(&world, agent, format, &view) {
                Ok(shown) => {
                    all.huds += 1;
                    all.overruns += u64::from(is_over(&shown, &world, room));
                    all.changed += u64::from(format::read(&shown.text(), format).as_ref() != Ok(&shown.hud));
                }
                Err(HudError::TooSmall { .. } | HudError::Nobody(_)) => all.refused += 1,
            }
        }
    }
    all
}

impl std::ops::Add for ByLot {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self {
            huds: self.huds + more.huds,
            overruns: self.overruns + more.overruns,
            changed: self.changed + more.changed,
            refused: self.refused + more.refused,
        }
    }
}

impl std::iter::Sum for ByLot {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| sum + one)
    }
}

fn is_over(shown: &Shown, world: &World, room: usize) -> bool {
    let counted: usize = shown.pieces.iter().map(|piece| QuarterUp.tokens(&piece.text)).sum();
    let whole = QuarterUp.tokens(&shown.text());
    counted.max(whole) > world.head.budgets.within(room).total
}
