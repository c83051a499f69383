//! `halo hud`: what an agent sees now. `halo rooms hud` is the same with the world first.

use super::rooms::{find_agent, load_prompts, now_millis, open_agent_models, open_world_read_only};
use crate::env::Env;
use crate::error::not_found;
use crate::output::{print_json, print_notice, print_stdout, sanitize_terminal_text};
use crate::wiring;
use anyhow::{Context, Result, bail};
use halo_core::row_store::RowStore;
use halo_worlds::action;
use halo_worlds::format::HudFormat;
use halo_worlds::hud_renderer::{HudRenderer, HudRequest};
use halo_worlds::prompts::WorldPrompts;
use halo_worlds::world::{RoomId, RoomMessage, WorldModelRef};
use halo_worlds::world_store;
use serde_json::json;
use std::collections::BTreeMap;

#[derive(clap::Args)]
pub struct HudArgs {
    /// Agent, by name or id
    agent: String,
    /// Name of the world [default: the only one]
    #[arg(short, long, value_name = "NAME")]
    world: Option<String>,
    /// HUD format: json, compact_json, toon or toon_positional [default: the agent's]
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<HudFormat>,
}

pub fn parse_format(word: &str) -> Result<HudFormat, String> {
    let formats = || HudFormat::ALL.map(HudFormat::name).join(", ");
    HudFormat::from_name(word).ok_or_else(|| format!("there is no format '{word}': use {}", formats()))
}

pub fn run(options: &HudArgs, env: &Env) -> Result<()> {
    let world = match &options.world {
        Some(world) => world.clone(),
        None => only_world(env)?,
    };
    print_hud(&world, &options.agent, options.format, env)
}

/// The world of a store that has one.
fn only_world(env: &Env) -> Result<String> {
    let worlds = match env.open_store_read_only()? {
        Some(mut store) => store.list_namespaces()?,
        None => Vec::new(),
    };
    match worlds.as_slice() {
        [world] => Ok(world.name.clone()),
        [] => Err(not_found("there are no worlds yet: `halo rooms new NAME` creates one".to_owned())),
        worlds => {
            let names: Vec<&str> = worlds.iter().map(|world| world.name.as_str()).collect();
            bail!("there are several worlds: name one with --world, of {}", names.join(", "))
        }
    }
}

pub fn print_hud(name: &str, agent: &str, format: Option<HudFormat>, env: &Env) -> Result<()> {
    let settings = env.load_settings()?.settings;
    let (mut store, world) = open_world_read_only(name, env)?;
    let who = find_agent(&world, agent)?;
    let agent = world.agent(who).with_context(|| format!("{} has no HUD", world.display_name(who)))?;
    let model_ref = world.header.models.iter().find(|entry| entry.name == agent.model).cloned();
    let model_ref = model_ref.unwrap_or_else(|| WorldModelRef::local(&agent.model));
    let mut open_local = |named: Option<&str>| {
        let mut env = env.clone();
        if let Some(name) = named {
            env.models.name = Some(name.to_owned());
        }
        wiring::open_model(&env, &settings)
    };
    let models = open_agent_models(&[model_ref], env, &settings, &mut open_local)?;
    let model = models.values().next().context("it has no model")?;
    let (renderer, prompts): (&HudRenderer, WorldPrompts) = (&model.renderer, load_prompts(&settings)?);
    let mut found: BTreeMap<RoomId, Vec<RoomMessage>> = BTreeMap::new();
    for room in world.rooms_of(who) {
        let shelf = world_store::build_room_index(&mut store, name, room.id)?;
        found.insert(room.id, world_store::recall_messages(&mut store, name, &world, (room.id, &shelf)));
    }
    let recalled = |room: RoomId| found.get(&room).cloned().unwrap_or_default();
    let now = now_millis().max(world.header.clock);
    let view =
        HudRequest { now, prompts: &prompts, token_limit: model.hud_token_limit(), recalled: &recalled };
    let hud = renderer.render_as(&world, agent, format.unwrap_or(agent.hud_format), &view)?;
    if env.json {
        let formats: serde_json::Map<String, serde_json::Value> = HudFormat::ALL
            .iter()
            .map(|&format| {
                let tokens =
                    renderer.render_as(&world, agent, format, &view).map(|hud| hud.token_usage.total);
                (format.name().to_owned(), json!(tokens.ok()))
            })
            .collect();
        return print_json(&json!({
            "hud": hud.hud,
            "spent": hud.token_usage,
            "budgets": hud.budgets,
            "tokens_by_format": formats,
            "recalled": hud.recalled,
            "left_out": hud.omitted_rooms,
            "actions": action::ACTION_TYPES.len(),
        }));
    }
    print_stdout(&format!("{}\n", sanitize_terminal_text(&hud.text())))?;
    print_notice(&format!("{} of {} tokens", hud.token_usage.total, hud.budgets.total));
    Ok(())
}
