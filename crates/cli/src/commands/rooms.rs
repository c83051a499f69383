//! `halo rooms`: worlds of agents, made, run, watched and spoken to.

use super::{count, exchange, forget, print, print_json, shorten, time};
use crate::settings::Settings;
use crate::settings::value::Auto;
use crate::{Common, printable, say, wiring};
use anyhow::{Context, Result, bail};
use halo_agents::action;
use halo_agents::count::{Count, QuarterUp};
use halo_agents::format::Format;
use halo_agents::heartbeat::Millis;
use halo_agents::prompts::{self, Prompts};
use halo_agents::scribe::{Scribe, View};
use halo_agents::wish::Wish;
use halo_agents::world::{AgentId, Brain, Message, RoomId, Sender, Touched, World, check_message};
use halo_agents::world_file::{self, WorldFile};
use halo_core::seams::{Model, Sampling, Worlds};
use halo_engine::world::house::{Beat, House, Next};
use halo_engine::world::mind::{Mind, ModelCount};
use halo_engine::world::realm::{self, Realm};
use halo_llama::graveyard;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What to do with worlds.
#[derive(clap::Subcommand)]
pub enum What {
    /// Makes a world, from a file or as the example has it
    New {
        /// What it is called
        name: String,
        /// Who lives there and which rooms they have [default: five who live at a harbour]
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Lists the worlds, or the agents and rooms of one
    List {
        /// Which
        name: Option<String>,
    },
    /// Lets hearts beat, and prints what is said, until Ctrl-C
    Run {
        /// Which
        name: String,
        /// Ends after so many heartbeats
        #[arg(long, value_name = "N")]
        beats: Option<u64>,
        /// Lets time go by so many times as fast
        #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = speed)]
        speed: f64,
    },
    /// Says something in a room, as the Architect
    Say {
        /// In which world
        name: String,
        /// In whose room: a name or a number
        room: String,
        /// What
        message: String,
    },
    /// Prints what is said while somebody else runs the world, until Ctrl-C
    Watch {
        /// Which
        name: String,
        /// Prints so many messages of each room first
        #[arg(long, value_name = "N", default_value_t = 10)]
        last: usize,
        /// Does not wait for more
        #[arg(long)]
        once: bool,
    },
    /// Prints what an agent sees
    Hud {
        /// In which world
        name: String,
        /// Whose: a name or a number
        agent: String,
        /// json, compact_json, toon or toon_positional [default: the agent's own]
        #[arg(long, value_name = "FORMAT", value_parser = format)]
        format: Option<Format>,
    },
    /// Writes a world out, with all that was said there; `halo import` takes it in
    Export {
        /// Which
        name: String,
        /// The file; nothing is ever written over [default: standard output]
        #[arg(short = 'o', long = "output", value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Prints what agents are told, to be changed and named by rooms.prompts
    Prompts,
    /// Ends a world for good, with all that was said there
    End {
        /// Which
        name: String,
        /// Does not ask
        #[arg(long, short)]
        yes: bool,
    },
}

/// The example.
pub const EXAMPLE: &str = include_str!("../../worlds/harbour.toml");

fn format(word: &str) -> Result<Format, String> {
    let known = || Format::ALL.map(Format::name).join(", ");
    Format::named(word).ok_or_else(|| format!("there is no format '{word}': there is {}", known()))
}

fn speed(text: &str) -> Result<f64, String> {
    let speed: f64 = text.parse().map_err(|_| "write a number, such as 2 or 0.5".to_owned())?;
    if (0.1..=100.0).contains(&speed) {
        Ok(speed)
    } else {
        Err("time goes by 0.1 to 100 times as fast".to_owned())
    }
}

fn now() -> Millis {
    jiff::Timestamp::now().as_millisecond()
}

/// Does it.
pub fn run(what: &What, common: &Common) -> Result<()> {
    match what {
        What::New { name, file } => new(name, file.as_ref(), common),
        What::List { name: None } => list(common),
        What::List { name: Some(name) } => list_one(name, common),
        What::Run { name, beats, speed } => run_world(name, *beats, *speed, common),
        What::Say { name, room, message } => speak(name, room, message, common),
        What::Watch { name, last, once } => watch(name, *last, *once, common),
        What::Hud { name, agent, format } => hud(name, agent, *format, common),
        What::Export { name, output } => exchange::export_world(name, output.as_deref(), common),
        What::Prompts => print(prompts::USUAL),
        What::End { name, yes } => end(name, *yes, common),
    }
}

fn new(name: &str, file: Option<&PathBuf>, common: &Common) -> Result<()> {
    realm::check_name(name)?;
    let (text, from) = match file {
        Some(path) => {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            (text, path.display().to_string())
        }
        None => (EXAMPLE.to_owned(), "the example".to_owned()),
    };
    let file: WorldFile = toml::from_str(&text).with_context(|| format!("{from} is no world"))?;
    let world = file.begin(LOCAL, now()).map_err(|why| anyhow::anyhow!("{from}: {why}"))?;
    let realm = Realm::found(Box::new(common.open_store()?), name, world, now())?;
    if common.json {
        return print_json(&about(name, &realm.world));
    }
    let agents = count(realm.world.agents().count() as u64, "agent");
    let rooms = count(realm.world.rooms().count() as u64, "room");
    let named = quoted(name);
    print(&format!("{name}: {agents} in {rooms}; `halo rooms run {named}` lets their hearts beat\n"))
}

/// A name as a shell takes it.
fn quoted(name: &str) -> String {
    let plain = name.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c)) && !name.starts_with('-');
    if plain { name.to_owned() } else { format!("'{}'", name.replace('\'', "'\\''")) }
}

/// What the program's own model is called in a world.
const LOCAL: &str = "local";

fn about(name: &str, world: &World) -> serde_json::Value {
    let agent = |agent: &halo_agents::world::AgentState| {
        json!({
            "id": agent.id,
            "name": agent.name,
            "type": agent.kind,
            "model": agent.model,
            "interval": agent.interval.seconds(),
            "beats": agent.beats,
            "asleep": agent.asleep,
            "paused": agent.paused,
            "can_create_agents": agent.can_create_agents,
        })
    };
    let room = |room: &halo_agents::world::Room| {
        json!({
            "id": room.id,
            "owner": world.name(room.id),
            "members": room.members.keys().map(|id| world.name(*id)).collect::<Vec<_>>(),
            "billboard": room.billboard,
            "wpm": room.wpm,
            "requests": room.requests,
        })
    };
    json!({
        "name": name,
        "agents": world.agents().map(agent).collect::<Vec<_>>(),
        "rooms": world.rooms().map(room).collect::<Vec<_>>(),
        "messages": world.head.next_message - 1,
    })
}

fn list(common: &Common) -> Result<()> {
    let Some(mut store) = common.look_at_store()? else {
        return if common.json {
            print_json(&json!([]))
        } else {
            print("there are no worlds yet: `halo rooms new NAME` makes one\n")
        };
    };
    let worlds = store.worlds()?;
    let mut all = Vec::new();
    let mut out = String::new();
    for known in &worlds {
        let world = match realm::glance(&mut store, &known.name) {
            Ok(world) => world,
            Err(why) => {
                say(&format!("{why}; `halo rooms end` ends it"));
                continue;
            }
        };
        let agents = count(world.agents().count() as u64, "agent");
        let messages = count(world.head.next_message - 1, "message");
        let _ =
            writeln!(out, "{}  {agents}, {messages}, since {}", printable(&known.name), time(known.created));
        all.push(about(&known.name, &world));
    }
    if common.json {
        return print_json(&json!(all));
    }
    print(if out.is_empty() { "there are no worlds yet: `halo rooms new NAME` makes one\n" } else { &out })
}

fn looked_at(name: &str, common: &Common) -> Result<(halo_store::database::Database, World)> {
    let store = common.look_at_store()?;
    let mut store =
        store.with_context(|| format!("there is no world '{name}': `halo rooms new {name}` makes one"))?;
    let world = realm::look(&mut store, name)?;
    Ok((store, world))
}

fn list_one(name: &str, common: &Common) -> Result<()> {
    let (_, world) = looked_at(name, common)?;
    if common.json {
        return print_json(&about(name, &world));
    }
    let mut out = String::new();
    for agent in world.agents() {
        let sleeps = agent.asleep.map(|until| format!(", asleep until {}", time(until))).unwrap_or_default();
        let _ = writeln!(
            out,
            "{:>4}  {}  {}, one each {} s, thinks with {}{sleeps}{}",
            agent.id,
            printable(&agent.name),
            count(agent.beats, "heartbeat"),
            agent.interval.seconds(),
            printable(&agent.model),
            if agent.paused { ", paused" } else { "" },
        );
    }
    for room in world.rooms() {
        let members: Vec<String> = room.members.keys().map(|id| world.name(*id)).collect();
        let board =
            room.billboard.as_ref().map(|text| format!(": {}", shorten(text, 60))).unwrap_or_default();
        let _ = writeln!(out, "room {} ({}){board}", room.id, printable(&members.join(", ")));
    }
    print(&out)
}

/// What agents are told: the user's own file, or the program's.
pub fn prompts(settings: &Settings) -> Result<Prompts> {
    match &settings.rooms_prompts {
        Auto::Auto => Ok(Prompts::default()),
        Auto::Set(path) => {
            let text = std::fs::read_to_string(&path.0)
                .with_context(|| format!("cannot read rooms.prompts, {}", path.0))?;
            Prompts::read(&text).map_err(|why| anyhow::anyhow!("rooms.prompts, {}: {why}", path.0))
        }
    }
}

/// How agents' answers are drawn.
pub fn sampling(settings: &Settings) -> Sampling {
    Sampling {
        max_tokens: settings.rooms_tokens.count(),
        repetition: settings.rooms_repetition.0 as f32,
        ..wiring::rules(settings).sampling
    }
}

/// What thinks for the agents of a world. `own` is the program's model, each time anew.
pub fn minds(
    brains: &[Brain],
    common: &Common,
    settings: &Settings,
    own: &mut dyn FnMut() -> Result<Box<dyn Model + Send>>,
) -> Result<BTreeMap<String, Mind>> {
    let mut minds = BTreeMap::new();
    for brain in brains {
        let mut common = common.clone();
        if let Some(at) = &brain.at {
            common.model = Some(at.clone());
        }
        let far = wiring::is_remote(&common);
        // A model of this machine is opened once, and thinks and counts.
        let here = (!far && brain.at.is_some()).then(|| wiring::local(&common, settings)).transpose()?;
        let mut model = || match (&here, &brain.at) {
            (Some(here), _) => Ok(Box::new(here.clone()) as Box<dyn Model + Send>),
            (None, None) => own(),
            (None, Some(_)) => wiring::model(&common, settings),
        };
        // Who is asked over a wire how long a text is would be asked a hundred times for each HUD.
        let count: Arc<dyn Count> =
            if far { Arc::new(QuarterUp) } else { Arc::new(ModelCount::new(model()?)) };
        minds.insert(brain.name.clone(), Mind::new(model()?, count, sampling(settings), !far));
    }
    Ok(minds)
}

fn run_world(name: &str, beats: Option<u64>, speed: f64, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    let realm = Realm::open(Box::new(common.open_store()?), name)?;
    let brains = realm.world.head.models.clone();
    let llama = std::cell::OnceCell::new();
    let mut own = || -> Result<Box<dyn Model + Send>> {
        if wiring::is_remote(common) {
            return wiring::model(common, &settings);
        }
        if llama.get().is_none() {
            let _ = llama.set(wiring::local(common, &settings)?);
        }
        llama.get().map(|llama| Box::new(llama.clone()) as Box<dyn Model + Send>).context("there is no model")
    };
    let minds = minds(&brains, common, &settings, &mut own)?;
    let house = Arc::new(House::new(realm, minds, prompts(&settings)?, Box::new(now)));
    house.set_speed(speed);
    let ends = Arc::clone(&house);
    ctrlc::set_handler(move || ends.end()).context("cannot listen for Ctrl-C")?;
    if !common.json {
        let named = quoted(name);
        say(&format!("{name} is running; `halo rooms say {named} ROOM \"…\"` speaks to it (Ctrl-C ends it)"));
    }
    let mut seen = house.realm().world.head.next_message - 1;
    let mut done = 0;
    while !house.is_ending() && beats.is_none_or(|beats| done < beats) {
        let next = house.next(None)?;
        for why in house.take_refused() {
            say(&format!("what was asked from outside could not be done: {why}"));
        }
        match next {
            Next::Wait(time) => house.wait(time),
            Next::Broken => {}
            Next::Changed(touched) => tell(&house, &touched, None, &mut seen, common)?,
            Next::Beat(beat) => {
                done += 1;
                tell(&house, &beat.touched, Some(&beat), &mut seen, common)?;
            }
        }
    }
    // What came during the last heartbeat is heard too.
    if let Some(touched) = house.catch_up()? {
        tell(&house, &touched, None, &mut seen, common)?;
    }
    if !common.json {
        say(&format!("ended after {}; all of it is stored", count(done, "heartbeat")));
    }
    Ok(())
}

fn line(world: &World, message: &Message) -> String {
    let who = match message.sender {
        Sender::System => "*".to_owned(),
        Sender::Agent(id) => world.name(id),
    };
    let room = world.name(message.room);
    // What goes on in another line belongs to it.
    let content = printable(&message.content).trim_end().replace('\n', "\n    ");
    format!("[{}] {}: {content}\n", printable(&room), printable(&who))
}

/// Prints what has happened, of messages those behind the last that was `seen`.
fn tell(
    house: &House,
    touched: &Touched,
    beat: Option<&Beat>,
    seen: &mut u64,
    common: &Common,
) -> Result<()> {
    let realm = house.realm();
    // What somebody feels about something else is no news.
    let said: Vec<&Message> = touched.messages.range(*seen + 1..).map(|(_, message)| message).collect();
    *seen = said.last().map_or(*seen, |message| message.id);
    if common.json {
        let beat = beat.map(told);
        let value = json!({ "messages": said, "beat": beat });
        return print(&format!("{value}\n"));
    }
    let mut out: String = said.iter().map(|message| line(&realm.world, message)).collect();
    if let Some(beat) = beat {
        let who = realm.world.name(beat.who);
        match &beat.outcome {
            Err(why) => say(&format!("{who} could not answer: {why}")),
            Ok(outcome) => {
                for why in &outcome.refused {
                    let _ = writeln!(out, "  ({} was refused: {})", printable(&who), printable(why));
                }
            }
        }
    }
    print(&out)
}

/// A heartbeat as JSON.
fn told(beat: &Beat) -> serde_json::Value {
    json!({
        "agent": beat.who,
        "at": beat.at,
        "repaired": beat.repaired,
        "shown": beat.thought.as_ref().map(|thought| thought.shown),
        "read": beat.thought.as_ref().map(|thought| thought.read),
        "kept": beat.thought.as_ref().map(|thought| thought.upkeep.kept),
        "returned": beat.thought.as_ref().map(|thought| thought.upkeep.returned),
        "moved": beat.thought.as_ref().map(|thought| thought.upkeep.moved),
        "answered": beat.thought.as_ref().map(|thought| thought.answered),
        "answer": beat.thought.as_ref().map(|thought| &thought.text),
        "said": beat.outcome.as_ref().ok().map(|outcome| outcome.said),
        "done": beat.outcome.as_ref().ok().map(|outcome| outcome.done),
        "refused": beat.outcome.as_ref().ok().map(|outcome| &outcome.refused),
        "failed": beat.outcome.as_ref().err(),
    })
}

/// Whom a word means.
fn find(world: &World, who: &str) -> Result<AgentId> {
    world_file::find(world, who).with_context(|| {
        let known: Vec<String> =
            world.agents().map(|agent| format!("{} ({})", agent.name, agent.id)).collect();
        format!("nobody is called '{who}': there is {}", known.join(", "))
    })
}

fn speak(name: &str, room: &str, message: &str, common: &Common) -> Result<()> {
    let (_, world) = looked_at(name, common)?;
    let room: RoomId = find(&world, room)?;
    if world.room(room).is_none() {
        bail!("{} has no room", world.name(room));
    }
    check_message(message.trim()).map_err(anyhow::Error::msg)?;
    let wish = Wish::Say { room, message: message.to_owned(), reply_to: None };
    realm::post(&mut common.open_store()?, name, &wish, now())?;
    if common.json {
        return print_json(&json!({ "posted": true, "room": room }));
    }
    print(&format!(
        "left for {name}: it is said when somebody runs it, or if somebody does, when whoever thinks now is done\n"
    ))
}

fn watch(name: &str, last: usize, once: bool, common: &Common) -> Result<()> {
    let (mut store, _) = looked_at(name, common)?;
    let ending = Arc::new(AtomicBool::new(false));
    let ends = Arc::clone(&ending);
    ctrlc::set_handler(move || ends.store(true, Ordering::SeqCst)).context("cannot listen for Ctrl-C")?;
    let mut seen: BTreeMap<RoomId, u64> = BTreeMap::new();
    let mut before = None;
    while !ending.load(Ordering::SeqCst) {
        // Nothing is read where nothing was said.
        let said = Some(realm::said(&mut store, name)?);
        if said == std::mem::replace(&mut before, said) {
            std::thread::sleep(Duration::from_millis(300));
            continue;
        }
        let world = realm::look(&mut store, name)?;
        let mut new: Vec<Message> = Vec::new();
        for room in world.rooms() {
            let first = seen.insert(room.id, room.messages.back().map_or(0, |message| message.id));
            let since =
                first.unwrap_or_else(|| room.messages.iter().rev().nth(last).map_or(0, |message| message.id));
            new.extend(room.messages.iter().filter(|message| message.id > since).cloned());
        }
        new.sort_by_key(|message| message.id);
        for message in &new {
            match common.json {
                true => print(&format!("{}\n", json!(message)))?,
                false => print(&line(&world, message))?,
            }
        }
        if once {
            break;
        }
    }
    Ok(())
}

fn hud(name: &str, agent: &str, format: Option<Format>, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    let (mut store, world) = looked_at(name, common)?;
    let who = find(&world, agent)?;
    let agent = world.agent(who).with_context(|| format!("{} has no HUD", world.name(who)))?;
    let brain = world.head.models.iter().find(|known| known.name == agent.model).cloned();
    let brain = brain.unwrap_or_else(|| Brain::here(&agent.model));
    let mut own = || wiring::model(common, &settings);
    let minds = minds(&[brain], common, &settings, &mut own)?;
    let mind = minds.values().next().context("nothing thinks for it")?;
    let (scribe, prompts): (&Scribe, Prompts) = (&mind.scribe, prompts(&settings)?);
    let mut found: BTreeMap<RoomId, Vec<Message>> = BTreeMap::new();
    for room in world.rooms_of(who) {
        let shelf = realm::shelf(&mut store, name, room.id)?;
        found.insert(room.id, realm::recalled(&mut store, name, &world, (room.id, &shelf)));
    }
    let recalled = |room: RoomId| found.get(&room).cloned().unwrap_or_default();
    let now = now().max(world.head.clock);
    let view = View { now, prompts: &prompts, room: mind.room(), recalled: &recalled };
    let shown = scribe.show_as(&world, agent, format.unwrap_or(agent.input), &view)?;
    if common.json {
        let formats: serde_json::Map<String, serde_json::Value> = Format::ALL
            .iter()
            .map(|&format| {
                let tokens = scribe.show_as(&world, agent, format, &view).map(|shown| shown.spent.total);
                (format.name().to_owned(), json!(tokens.ok()))
            })
            .collect();
        return print_json(&json!({
            "hud": shown.hud,
            "spent": shown.spent,
            "budgets": shown.budgets,
            "tokens_by_format": formats,
            "recalled": shown.recalled,
            "left_out": shown.left_out,
            "actions": action::KINDS.len(),
        }));
    }
    print(&format!("{}\n", printable(&shown.text())))?;
    say(&format!("{} of {} tokens", shown.spent.total, shown.budgets.total));
    Ok(())
}

/// Ends a world for good, with what models had saved of it.
pub fn end_world(store: &mut halo_store::database::Database, name: &str, common: &Common) -> Result<()> {
    store.hold_world(name)?;
    if let Some(data) = common.data_folder() {
        let keys = forget::saved_but_for(store, None, Some(name))?;
        graveyard::keep_only(&data.join("kv"), &keys)
            .context("what the model had saved of it is still there")?;
    }
    Ok(store.end_world(name)?)
}

fn end(name: &str, yes: bool, common: &Common) -> Result<()> {
    let store = common.look_at_store()?;
    let mut store = store.with_context(|| format!("there is no world '{name}'"))?;
    if !store.worlds()?.iter().any(|known| known.name == name) {
        bail!("there is no world '{name}': `halo rooms list` shows those that there are");
    }
    if !yes {
        // One that is damaged can be ended too.
        let messages = realm::size(&mut store, name).map_or(0, |(_, messages)| messages);
        bail!(
            "this ends {name} for good, with {}: add --yes if that is what you want",
            count(messages, "message")
        );
    }
    drop(store);
    end_world(&mut common.open_store()?, name, common)?;
    if common.json {
        return print_json(&json!({ "ended": name }));
    }
    print(&format!("{name} is no more\n"))
}
