//! `halo rooms`: creates, runs, watches and exports worlds of agents.

use super::{forget, hud, import_export};
use crate::env::Env;
use crate::error::not_found;
use crate::file::read_regular_text;
use crate::output::{
    format_time, pluralize, print_json, print_notice, print_stdout, sanitize_terminal_text, truncate_line,
};
use crate::script_model::script_file;
use crate::settings::Settings;
use crate::settings::value::AutoOr;
use crate::wiring;
use anyhow::{Context, Result, bail};
use halo_agents::agent::{AgentExt, BoxedAgent};
use halo_agents::constraint::SummaryConstraint;
use halo_agents::token_counter::{CeilTokenCounter, TokenCounter};
use halo_core::model::{Model, Sampling};
use halo_core::row_store::RowStore;
use halo_engine::agent::CompletionAgent;
use halo_llama::ffi::ModelWeights;
use halo_llama::kv_archive;
use halo_llama::model::Llama;
use halo_worlds::agent_model::{AgentModel, ModelTokenCounter};
use halo_worlds::agent_wrappers::{AgentWrappers, SummaryMethod};
use halo_worlds::format::HudFormat;
use halo_worlds::heartbeat::{HeartbeatJitter, Millis};
use halo_worlds::prompts::{self, WorldPrompts};
use halo_worlds::runner::{HeartbeatReport, RunnerOptions, RunnerStep, WorldRunner};
use halo_worlds::user_command::UserCommand;
use halo_worlds::world::{
    AgentId, MessageSender, ParagraphSplit, RoomId, RoomMessage, World, WorldChanges, WorldModelRef,
    check_message,
};
use halo_worlds::world_file::{self, WorldFile};
use halo_worlds::world_store::{self, WorldStore};
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[derive(clap::Subcommand)]
pub enum RoomsCommand {
    /// Create a world from a file, or the example world
    New {
        /// Name of the world
        name: String,
        /// World file (TOML) with agents and rooms [default: the example, five agents at a harbour]
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// List worlds, or the agents and rooms of one
    List {
        /// Name of the world
        name: Option<String>,
    },
    /// Run a world and print its messages, until Ctrl-C
    Run {
        /// Name of the world
        name: String,
        /// Stop after N heartbeats of all agents
        #[arg(long, value_name = "N")]
        beats: Option<u64>,
        /// Run time N times as fast (0.1 to 100)
        #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = parse_speed)]
        speed: f64,
    },
    /// Post a message to a room, as the Architect (you)
    Say {
        /// Name of the world
        name: String,
        /// Owner of the room: agent name or id
        room: String,
        /// Text of the message
        message: String,
    },
    /// Print new messages of a world that another process runs, until Ctrl-C
    Watch {
        /// Name of the world
        name: String,
        /// Print the last N messages of each room first
        #[arg(long, value_name = "N", default_value_t = 10)]
        last: usize,
        /// Print and exit; do not wait for new messages
        #[arg(long)]
        once: bool,
    },
    /// Print the HUD: what an agent sees
    Hud {
        /// Name of the world
        name: String,
        /// Agent, by name or id
        agent: String,
        /// HUD format: json, compact_json, toon or toon_positional [default: the agent's]
        #[arg(long, value_name = "FORMAT", value_parser = hud::parse_format)]
        format: Option<HudFormat>,
    },
    /// Export a world with all its messages; `halo import` reads it
    Export {
        /// Name of the world
        name: String,
        /// Output file; existing files are not overwritten [default: stdout]
        #[arg(short = 'o', long = "output", value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Print the agents' built-in prompts, as a template for rooms.prompts
    Prompts,
    /// Delete a world and all its messages permanently
    Delete {
        /// Name of the world
        name: String,
        /// Do not ask for confirmation
        #[arg(long, short)]
        yes: bool,
    },
}

pub const EXAMPLE_WORLD: &str = include_str!("../../worlds/harbour.toml");

fn parse_speed(text: &str) -> Result<f64, String> {
    let speed: f64 = text.parse().map_err(|_| "write a number, such as 2 or 0.5".to_owned())?;
    if (0.1..=100.0).contains(&speed) { Ok(speed) } else { Err("the speed must be 0.1 to 100".to_owned()) }
}

pub(super) fn now_millis() -> Millis {
    jiff::Timestamp::now().as_millisecond()
}

pub fn run(what: &RoomsCommand, env: &Env) -> Result<()> {
    match what {
        RoomsCommand::New { name, file } => create_world(name, file.as_ref(), env),
        RoomsCommand::List { name: None } => list_worlds(env),
        RoomsCommand::List { name: Some(name) } => show_world(name, env),
        RoomsCommand::Run { name, beats, speed } => run_world(name, *beats, *speed, env),
        RoomsCommand::Say { name, room, message } => post_message(name, room, message, env),
        RoomsCommand::Watch { name, last, once } => watch_world(name, *last, *once, env),
        RoomsCommand::Hud { name, agent, format } => hud::print_hud(name, agent, *format, env),
        RoomsCommand::Export { name, output } => import_export::export_world(name, output.as_deref(), env),
        RoomsCommand::Prompts => print_stdout(prompts::DEFAULT_PROMPTS_JSON),
        RoomsCommand::Delete { name, yes } => delete_world_if_confirmed(name, *yes, env),
    }
}

/// The largest file with a world.
const MAX_WORLD_BYTES: u64 = 64 << 20;

fn create_world(name: &str, file: Option<&PathBuf>, env: &Env) -> Result<()> {
    world_store::check_world_name(name)?;
    let (text, from) = match file {
        Some(path) => {
            let text = read_regular_text(path, MAX_WORLD_BYTES)
                .with_context(|| format!("cannot read {}", path.display()))?;
            (text, path.display().to_string())
        }
        None => (EXAMPLE_WORLD.to_owned(), "the example".to_owned()),
    };
    let file: WorldFile = toml::from_str(&text).with_context(|| format!("{from} is not a world file"))?;
    let world =
        file.into_world(LOCAL_MODEL_NAME, now_millis()).map_err(|why| anyhow::anyhow!("{from}: {why}"))?;
    let stored = WorldStore::create(Box::new(env.open_store()?), name, world, now_millis())?;
    if env.json {
        return print_json(&world_json(name, &stored.world));
    }
    let agents = pluralize(stored.world.agents().count() as u64, "agent");
    let rooms = pluralize(stored.world.rooms().count() as u64, "room");
    let named = shell_quote(name);
    print_stdout(&format!("{name}: {agents} in {rooms}; `halo rooms run {named}` runs it\n"))
}

/// Quotes a name for a shell.
pub(super) fn shell_quote(name: &str) -> String {
    let plain = name.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c)) && !name.starts_with('-');
    if plain { name.to_owned() } else { format!("'{}'", name.replace('\'', "'\\''")) }
}

/// The name of the program's own model in a world.
const LOCAL_MODEL_NAME: &str = "local";

fn world_json(name: &str, world: &World) -> serde_json::Value {
    let agent = |agent: &halo_worlds::world::AgentState| {
        json!({
            "id": agent.id,
            "name": agent.name,
            "type": agent.kind,
            "model": agent.model,
            "interval": agent.interval.seconds(),
            "beats": agent.heartbeat_count,
            "asleep": agent.sleep_until,
            "paused": agent.paused,
            "can_create_agents": agent.can_create_agents,
        })
    };
    let room = |room: &halo_worlds::world::Room| {
        json!({
            "id": room.id,
            "owner": world.display_name(room.id),
            "members": room.members.keys().map(|id| world.display_name(*id)).collect::<Vec<_>>(),
            "billboard": room.billboard,
            "wpm": room.wpm,
            "requests": room.requests,
        })
    };
    json!({
        "name": name,
        "agents": world.agents().map(agent).collect::<Vec<_>>(),
        "rooms": world.rooms().map(room).collect::<Vec<_>>(),
        "messages": world.header.next_message - 1,
    })
}

fn list_worlds(env: &Env) -> Result<()> {
    let Some(mut store) = env.open_store_read_only()? else {
        return if env.json {
            print_json(&json!([]))
        } else {
            print_stdout("there are no worlds yet: `halo rooms new NAME` creates one\n")
        };
    };
    let worlds = store.list_namespaces()?;
    let mut all = Vec::new();
    let mut out = String::new();
    for entry in &worlds {
        let world = match world_store::load_world_preview(&mut store, &entry.name) {
            Ok(world) => world,
            Err(why) => {
                print_notice(&format!("{why}; `halo rooms delete` deletes it"));
                continue;
            }
        };
        let agents = pluralize(world.agents().count() as u64, "agent");
        let messages = pluralize(world.header.next_message - 1, "message");
        let _ = writeln!(
            out,
            "{}  {agents}, {messages}, since {}",
            sanitize_terminal_text(&entry.name),
            format_time(entry.created)
        );
        all.push(world_json(&entry.name, &world));
    }
    if env.json {
        return print_json(&json!(all));
    }
    print_stdout(if out.is_empty() {
        "there are no worlds yet: `halo rooms new NAME` creates one\n"
    } else {
        &out
    })
}

pub(super) fn open_world_read_only(name: &str, env: &Env) -> Result<(halo_store::database::Database, World)> {
    let store = env.open_store_read_only()?;
    let mut store =
        store.with_context(|| format!("there is no world '{name}': `halo rooms new {name}` creates one"))?;
    let world = world_store::load_world(&mut store, name)?;
    Ok((store, world))
}

fn show_world(name: &str, env: &Env) -> Result<()> {
    let (_, world) = open_world_read_only(name, env)?;
    if env.json {
        return print_json(&world_json(name, &world));
    }
    let mut out = String::new();
    for agent in world.agents() {
        let sleeps = agent
            .sleep_until
            .map(|until| format!(", asleep until {}", format_time(until)))
            .unwrap_or_default();
        let _ = writeln!(
            out,
            "{:>4}  {}  {}, every {} s, model {}{sleeps}{}",
            agent.id,
            sanitize_terminal_text(&agent.name),
            pluralize(agent.heartbeat_count, "heartbeat"),
            agent.interval.seconds(),
            sanitize_terminal_text(&agent.model),
            if agent.paused { ", paused" } else { "" },
        );
    }
    for room in world.rooms() {
        let members: Vec<String> = room.members.keys().map(|id| world.display_name(*id)).collect();
        let board =
            room.billboard.as_ref().map(|text| format!(": {}", truncate_line(text, 60))).unwrap_or_default();
        let _ = writeln!(out, "room {} ({}){board}", room.id, sanitize_terminal_text(&members.join(", ")));
    }
    print_stdout(&out)
}

/// The built-in prompts have 20 KB.
const MAX_PROMPTS_BYTES: u64 = 1 << 20;

/// The agents' prompts: the user's own file, or the built-in ones.
pub fn load_prompts(settings: &Settings) -> Result<WorldPrompts> {
    match &settings.rooms_prompts {
        AutoOr::Auto => Ok(WorldPrompts::default()),
        AutoOr::Value(path) => {
            let text = read_regular_text(Path::new(&path.0), MAX_PROMPTS_BYTES)
                .with_context(|| format!("cannot read rooms.prompts, {}", path.0))?;
            WorldPrompts::parse(&text).map_err(|why| anyhow::anyhow!("rooms.prompts, {}: {why}", path.0))
        }
    }
}

/// Sampling of the agents' answers.
pub fn agent_sampling(settings: &Settings) -> Sampling {
    Sampling {
        max_tokens: settings.rooms_max_tokens.as_usize(),
        repetition_penalty: settings.rooms_repetition.0 as f32,
        ..wiring::conversation_rules(settings).sampling
    }
}

/// How agents are paced, and what is recorded of them.
pub fn runner_options(settings: &Settings) -> RunnerOptions {
    let split = match settings.rooms_split_paragraphs {
        true => ParagraphSplit::BlankLines,
        false => ParagraphSplit::Never,
    };
    let jitter = HeartbeatJitter {
        share: settings.rooms_jitter.0,
        seed: wiring::conversation_rules(settings).sampling.seed,
    };
    RunnerOptions { jitter, split, recorded_heartbeats: settings.rooms_telemetry.as_usize() as u64 }
}

/// Opens a local model, the program's own or one that is named. It is loaded once.
type OpenLocalModel<'a> = dyn FnMut(Option<&str>) -> Result<Box<dyn Model + Send>> + 'a;

/// The models of a world's agents.
pub fn open_agent_models(
    model_refs: &[WorldModelRef],
    env: &Env,
    settings: &Settings,
    open_local: &mut OpenLocalModel<'_>,
) -> Result<BTreeMap<String, AgentModel>> {
    let mut models = BTreeMap::new();
    for model_ref in model_refs {
        let mut env = env.clone();
        if let Some(at) = &model_ref.address {
            env.models.name = Some(at.clone());
        }
        let remote = wiring::uses_remote_model(&env);
        let scripted = env.models.name.as_deref().and_then(script_file).is_some();
        let mut model = || match &model_ref.address {
            Some(_) if remote || scripted => wiring::open_model(&env, settings),
            address => open_local(address.as_deref()),
        };
        // Counting tokens over the network would take a hundred requests per HUD.
        let count: Arc<dyn TokenCounter> =
            if remote { Arc::new(CeilTokenCounter) } else { Arc::new(ModelTokenCounter::new(model()?)) };
        let summarizer = match settings.rooms_summaries.as_option() {
            Some(SummaryMethod::Model) => Some(summarizer(model()?)),
            Some(SummaryMethod::Truncate) | None => None,
        };
        // A script answers in its order.
        let handles = if !scripted && agents_think_together(remote, settings) {
            settings.model_parallel.as_usize()
        } else {
            1
        };
        let others = (1..handles).map(|_| model()).collect::<Result<_>>()?;
        let agent_model = AgentModel::new(model()?, count, agent_sampling(settings), !remote);
        let mut agent_model = agent_model.with_handles(others);
        agent_model.wrappers = AgentWrappers {
            cooling_tokens: Some(settings.rooms_cooling_tokens.as_usize()).filter(|&tokens| tokens > 0),
            summaries: settings.rooms_summaries.as_option().map(|_| SummaryConstraint {
                summarizer: summarizer.clone(),
                ..SummaryConstraint::default()
            }),
            summarizer,
        };
        models.insert(model_ref.name.clone(), agent_model);
    }
    Ok(models)
}

/// Whether agents whose heartbeats fall together think at the same time: with a remote model or on a GPU. On a CPU they think one by one: the cells of all
/// agents are then in one KV cache, so that a heartbeat prefills only what is new in its HUD. With a cache for each agent,
/// the cells of the others are evicted, and whole HUDs are prefilled again.
fn agents_think_together(remote: bool, settings: &Settings) -> bool {
    remote || (wiring::gpu_layers(settings).allows_gpu() && ModelWeights::gpu_is_usable())
}

/// Asks a model to summarize text of agents.
fn summarizer(model: Box<dyn Model + Send>) -> BoxedAgent<String, String> {
    let sampling = Sampling { max_tokens: SUMMARY_TOKENS, temperature: 0.0, ..Sampling::default() };
    CompletionAgent::new(model, "", sampling).boxed()
}

/// The most tokens of a summary.
const SUMMARY_TOKENS: usize = 160;

fn run_world(name: &str, beats: Option<u64>, speed: f64, env: &Env) -> Result<()> {
    let settings = env.load_settings()?.settings;
    let stored = WorldStore::open(Box::new(env.open_store()?), name)?;
    let model_refs = stored.world.header.models.clone();
    let mut loaded: BTreeMap<Option<String>, Llama> = BTreeMap::new();
    let mut open_local = |named: Option<&str>| -> Result<Box<dyn Model + Send>> {
        let mut env = env.clone();
        if let Some(name) = named {
            env.models.name = Some(name.to_owned());
        }
        if wiring::uses_remote_model(&env) || env.models.name.as_deref().and_then(script_file).is_some() {
            return wiring::open_model(&env, &settings);
        }
        let name = named.map(str::to_owned);
        if let Some(llama) = loaded.get(&name) {
            return Ok(Box::new(llama.clone()));
        }
        let one_by_one = !agents_think_together(false, &settings);
        let llama = if one_by_one {
            wiring::open_local_model(&env, &wiring::one_answer_at_a_time(&settings))?
        } else {
            wiring::open_local_model(&env, &settings)?
        };
        loaded.insert(name, llama.clone());
        Ok(Box::new(llama))
    };
    let models = open_agent_models(&model_refs, env, &settings, &mut open_local)?;
    let prompts = (load_prompts(&settings)?, runner_options(&settings));
    let runner = Arc::new(WorldRunner::new(stored, models, prompts, Box::new(now_millis)));
    runner.set_speed(speed);
    let stop_handle = Arc::clone(&runner);
    ctrlc::set_handler(move || stop_handle.stop()).context("cannot listen for Ctrl-C")?;
    if !env.json {
        let named = shell_quote(name);
        print_notice(&format!(
            "{name} is running; `halo rooms say {named} ROOM \"…\"` posts a message (Ctrl-C stops it)"
        ));
    }
    let mut last_printed = runner.store().world.header.next_message - 1;
    let mut done = 0;
    while !runner.is_stopping() && beats.is_none_or(|beats| done < beats) {
        if let Some(beats) = beats {
            runner.set_group_limit(usize::try_from(beats - done).unwrap_or(usize::MAX));
        }
        let next = runner.run_next(None)?;
        for why in runner.take_refusals() {
            print_notice(&format!("a command could not be executed: {why}"));
        }
        match next {
            RunnerStep::Wait(time) => runner.wait(time),
            RunnerStep::Skipped => {}
            RunnerStep::Changed(touched) => print_events(&runner, &touched, None, &mut last_printed, env)?,
            RunnerStep::Heartbeat(beat) => {
                done += 1;
                print_events(&runner, &beat.changes, Some(&beat), &mut last_printed, env)?;
            }
        }
    }
    // Messages of the last heartbeat are printed too.
    if let Some(touched) = runner.apply_pending()? {
        print_events(&runner, &touched, None, &mut last_printed, env)?;
    }
    if !env.json {
        print_notice(&format!("stopped after {}; everything is stored", pluralize(done, "heartbeat")));
    }
    Ok(())
}

fn message_line(world: &World, message: &RoomMessage) -> String {
    let who = match message.sender {
        MessageSender::System => "*".to_owned(),
        MessageSender::Agent(id) => world.display_name(id),
    };
    let room = world.display_name(message.room);
    // Continuation lines of a message are indented.
    let content = sanitize_terminal_text(&message.content).trim_end().replace('\n', "\n    ");
    format!("[{}] {}: {content}\n", sanitize_terminal_text(&room), sanitize_terminal_text(&who))
}

/// Prints events, and the messages after the last one that was `seen`.
fn print_events(
    runner: &WorldRunner,
    touched: &WorldChanges,
    beat: Option<&HeartbeatReport>,
    last_printed: &mut u64,
    env: &Env,
) -> Result<()> {
    let stored = runner.store();
    // Changes of mood alone are not printed.
    let messages: Vec<&RoomMessage> =
        touched.messages.range(*last_printed + 1..).map(|(_, message)| message).collect();
    *last_printed = messages.last().map_or(*last_printed, |message| message.id);
    if env.json {
        let beat = beat.map(heartbeat_json);
        let value = json!({ "messages": messages, "beat": beat });
        return print_stdout(&format!("{value}\n"));
    }
    let mut out: String = messages.iter().map(|message| message_line(&stored.world, message)).collect();
    if let Some(beat) = beat {
        let who = stored.world.display_name(beat.agent);
        match &beat.outcome {
            Err(why) => print_notice(&format!("{who} could not answer: {why}")),
            Ok(outcome) => {
                for why in &outcome.refused {
                    let _ = writeln!(
                        out,
                        "  ({} was refused: {})",
                        sanitize_terminal_text(&who),
                        sanitize_terminal_text(why)
                    );
                }
            }
        }
    }
    print_stdout(&out)
}

fn heartbeat_json(beat: &HeartbeatReport) -> serde_json::Value {
    json!({
        "agent": beat.agent,
        "at": beat.finished_at,
        "repaired": beat.repaired,
        "hud_tokens": beat.generation.as_ref().map(|generation| generation.prompt_tokens),
        "prefilled_tokens": beat.generation.as_ref().map(|generation| generation.prefill_tokens),
        "kept_cells": beat.generation.as_ref().map(|generation| generation.cache_stats.reused),
        "restored_cells": beat.generation.as_ref().map(|generation| generation.cache_stats.restored),
        "shifted_cells": beat.generation.as_ref().map(|generation| generation.cache_stats.shifted),
        "pressure": beat.generation.as_ref().map(|generation| generation.pressure),
        "cooled": beat.generation.as_ref().map(|generation| generation.cooled_messages),
        "summarized": beat.generation.as_ref().map(|generation| generation.summarized_messages),
        "answered": beat.generation.as_ref().map(|generation| generation.answer_tokens),
        "answer": beat.generation.as_ref().map(|generation| &generation.text),
        "said": beat.outcome.as_ref().ok().map(|outcome| outcome.sent),
        "done": beat.outcome.as_ref().ok().map(|outcome| outcome.performed),
        "refused": beat.outcome.as_ref().ok().map(|outcome| &outcome.refused),
        "failed": beat.outcome.as_ref().err().map(ToString::to_string),
    })
}

/// An agent by name or id.
pub(super) fn find_agent(world: &World, who: &str) -> Result<AgentId> {
    world_file::find_agent(world, who).with_context(|| {
        let names: Vec<String> =
            world.agents().map(|agent| format!("{} ({})", agent.name, agent.id)).collect();
        format!("there is no agent '{who}': agents are {}", names.join(", "))
    })
}

fn post_message(name: &str, room: &str, message: &str, env: &Env) -> Result<()> {
    let (_, world) = open_world_read_only(name, env)?;
    let room: RoomId = find_agent(&world, room)?;
    if world.room(room).is_none() {
        bail!("{} has no room", world.display_name(room));
    }
    check_message(message.trim()).map_err(anyhow::Error::new)?;
    let wish = UserCommand::Say { room, message: message.to_owned(), reply_to: None };
    world_store::post_command(&mut env.open_store()?, name, &wish, now_millis())?;
    if env.json {
        return print_json(&json!({ "posted": true, "room": room }));
    }
    print_stdout(&format!(
        "queued for {name}: it is posted when the world runs, after the current heartbeat\n"
    ))
}

fn watch_world(name: &str, last: usize, once: bool, env: &Env) -> Result<()> {
    let (mut store, _) = open_world_read_only(name, env)?;
    let ending = Arc::new(AtomicBool::new(false));
    let stop_handle = Arc::clone(&ending);
    ctrlc::set_handler(move || stop_handle.store(true, Ordering::SeqCst))
        .context("cannot listen for Ctrl-C")?;
    let mut last_printed: BTreeMap<RoomId, u64> = BTreeMap::new();
    let mut before = None;
    while !ending.load(Ordering::SeqCst) {
        // A world without new messages is not loaded.
        let message_count = Some(world_store::message_count(&mut store, name)?);
        if message_count == std::mem::replace(&mut before, message_count) {
            std::thread::sleep(Duration::from_millis(300));
            continue;
        }
        let world = world_store::load_world(&mut store, name)?;
        let mut new: Vec<RoomMessage> = Vec::new();
        for room in world.rooms() {
            let first = last_printed.insert(room.id, room.messages.back().map_or(0, |message| message.id));
            let since =
                first.unwrap_or_else(|| room.messages.iter().rev().nth(last).map_or(0, |message| message.id));
            new.extend(room.messages.iter().filter(|message| message.id > since).cloned());
        }
        new.sort_by_key(|message| message.id);
        for message in &new {
            match env.json {
                true => print_stdout(&format!("{}\n", json!(message)))?,
                false => print_stdout(&message_line(&world, message))?,
            }
        }
        if once {
            break;
        }
    }
    Ok(())
}

/// Deletes a world and the KV cells that models have saved of it.
pub fn delete_world(store: &mut halo_store::database::Database, name: &str, env: &Env) -> Result<()> {
    world_store::lease_world(store, name)?;
    if let Some(data) = env.data_dir() {
        let keys = forget::kv_keys_except(store, None, Some(name))?;
        kv_archive::retain_conversations(&data.join("kv"), &keys)
            .context("the saved KV cells could not be deleted")?;
    }
    Ok(world_store::delete_world(store, name)?)
}

fn delete_world_if_confirmed(name: &str, yes: bool, env: &Env) -> Result<()> {
    let store = env.open_store_read_only()?;
    let mut store = store.with_context(|| format!("there is no world '{name}'"))?;
    if !store.list_namespaces()?.iter().any(|entry| entry.name == name) {
        return Err(not_found(format!("there is no world '{name}'")));
    }
    if !yes {
        // A damaged world can be deleted too.
        let messages = world_store::world_size(&mut store, name).map_or(0, |(_, messages)| messages);
        bail!(
            "this deletes {name} permanently, with {}: add --yes to confirm",
            pluralize(messages, "message")
        );
    }
    drop(store);
    delete_world(&mut env.open_store()?, name, env)?;
    if env.json {
        return print_json(&json!({ "ended": name }));
    }
    print_stdout(&format!("{name} was deleted\n"))
}
