//! Worlds: their agents and rooms, and the user's commands.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use crate::app::App;
use crate::error::{ApiError, ApiResult, ErrorResponse, JsonBody, PathParams, QueryParams, spawn_blocking};
use crate::wire::{
    ApiAgentMind, ApiClockUpdate, ApiHeartbeatTelemetry, ApiNewWorld, ApiRenderedHud, ApiRoomMessage,
    ApiUserCommand, ApiWorld, ApiWorldEvent, ApiWorldSummary,
};
use crate::world_loop::{self, publish_world_change, publish_world_event};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use halo_core::ErrorKind;
use halo_core::row_store::RowStore;
use halo_worlds::format::HudFormat;
use halo_worlds::runner::WorldRunner;
use halo_worlds::world::{AgentId, WorldChanges};
use halo_worlds::world_file::WorldFile;
use halo_worlds::world_store::{self, WorldStore};
use serde::Deserialize;
use std::sync::Arc;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list_worlds, create_world))
        .routes(routes!(get_world, delete_world))
        .routes(routes!(list_room_messages))
        .routes(routes!(get_agent_mind))
        .routes(routes!(get_telemetry))
        .routes(routes!(run_user_command))
        .routes(routes!(set_clock))
}

/// How many messages of a room one response has.
const MESSAGES_PER_PAGE: usize = 100;

fn open_world_view(name: String, runner: &WorldRunner) -> ApiWorld {
    let (clock, now) = (runner.world_clock(), runner.now());
    ApiWorld::new(name, &runner.store().world, Some((clock, now)))
}

/// A world that this server does not run, as it is stored.
fn stored_world_view(app: &App, name: String) -> ApiResult<ApiWorld> {
    let mut store = app.backend.open_worlds()?;
    check_world_exists(&mut *store, &name)?;
    let world = world_store::load_world_preview(&mut *store, &name)?;
    let runs_elsewhere = store.is_namespace_leased(&name)?;
    Ok(ApiWorld { runs_elsewhere, ..ApiWorld::new(name, &world, None) })
}

fn open_world(app: &Arc<App>, name: &str) -> ApiResult<Arc<WorldRunner>> {
    if let Some(runner) = app.worlds.get(name) {
        return Ok(runner);
    }
    check_world_exists(&mut *app.backend.open_worlds()?, name)?;
    Ok(world_loop::open_world(app, name)?)
}

fn check_world_exists(store: &mut dyn RowStore, name: &str) -> ApiResult<()> {
    match store.list_namespaces()?.iter().any(|world| world.name == name) {
        true => Ok(()),
        false => Err(ErrorResponse::not_found(format!("there is no world '{name}'"))),
    }
}

/// Lists the worlds in the store
#[utoipa::path(get, path = "/worlds", responses((status = 200, body = Vec<ApiWorldSummary>)))]
async fn list_worlds(State(app): State<Arc<App>>) -> ApiResult<Json<Vec<ApiWorldSummary>>> {
    spawn_blocking(move || {
        let mut store = app.backend.open_worlds()?;
        let mut all = Vec::new();
        for stored in store.list_namespaces()? {
            let open = app.worlds.peek(&stored.name);
            let (agents, messages) = match &open {
                Some(runner) => {
                    let store = runner.store();
                    (store.world.agents().count(), store.world.header.next_message - 1)
                }
                // A damaged world is listed too, so that it can be deleted.
                None => world_store::world_size(&mut *store, &stored.name).unwrap_or_else(|e| {
                    tracing::warn!("the world created at {} cannot be read: {:?}", stored.created, e.kind);
                    (0, 0)
                }),
            };
            all.push(ApiWorldSummary {
                name: stored.name,
                created: stored.created,
                agents,
                messages,
                open: open.is_some(),
            });
        }
        Ok(Json(all))
    })
    .await
}

#[utoipa::path(post, path = "/worlds", request_body = ApiNewWorld,
    responses((status = 201, body = ApiWorld), (status = 400, body = ApiError), (status = 409, body = ApiError), (status = 422, body = ApiError)))]
async fn create_world(
    State(app): State<Arc<App>>,
    JsonBody(new): JsonBody<ApiNewWorld>,
) -> ApiResult<(StatusCode, Json<ApiWorld>)> {
    spawn_blocking(move || {
        world_store::check_world_name(&new.name)
            .map_err(|e| ErrorResponse::bad_request(format!("name: {}", e.message)))?;
        let file = new.file.unwrap_or_else(|| app.backend.example_world().to_owned());
        let file: WorldFile = app.backend.parse_world_file(&file)?;
        let now = jiff::Timestamp::now().as_millisecond();
        check_world_models(&app, &file)?;
        let world =
            file.into_world("local", now).map_err(|error| ErrorResponse::bad_request(error.message))?;
        drop(WorldStore::create(app.backend.open_worlds()?, &new.name, world, now)?);
        publish_world_event(
            &app,
            ApiWorldEvent { name: new.name.clone(), worlds_changed: true, ..ApiWorldEvent::default() },
        );
        let runner = open_world(&app, &new.name).map_err(|e| {
            let message =
                format!("the world '{}' was created, but it cannot be opened now: {}", new.name, e.message());
            ErrorResponse::new(e.status(), message)
        })?;
        Ok((StatusCode::CREATED, Json(open_world_view(new.name, &runner))))
    })
    .await
}

/// A client must not choose which other hosts this server talks to, nor with which key.
fn check_world_models(app: &App, file: &WorldFile) -> ApiResult<()> {
    let mut addresses = file.models.iter().filter_map(|model| model.address.as_ref());
    match addresses.find(|address| !app.backend.is_world_model_allowed(address)) {
        None => Ok(()),
        Some(address) => Err(ErrorResponse::bad_request(format!(
            "a world that a client creates may not use the model '{address}': add it to the setting rooms.models, or create \
             the world on the command line"
        ))),
    }
}

/// A world with its agents and rooms
#[utoipa::path(get, path = "/worlds/{world}", params(("world" = String, Path)),
    responses((status = 200, body = ApiWorld), (status = 404, body = ApiError)))]
async fn get_world(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<ApiWorld>> {
    spawn_blocking(move || {
        Ok(Json(match app.worlds.peek(&name) {
            Some(runner) => open_world_view(name, &runner),
            None => stored_world_view(&app, name)?,
        }))
    })
    .await
}

/// Deletes a world with all its messages
#[utoipa::path(delete, path = "/worlds/{world}", params(("world" = String, Path)),
    responses((status = 204), (status = 404, body = ApiError)))]
async fn delete_world(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<StatusCode> {
    spawn_blocking(move || {
        check_world_exists(&mut *app.backend.open_worlds()?, &name)?;
        app.worlds.close_then(&name, || app.backend.delete_world(&name))?;
        publish_world_event(&app, ApiWorldEvent { name, worlds_changed: true, ..ApiWorldEvent::default() });
        Ok(StatusCode::NO_CONTENT)
    })
    .await
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct RoomMessagesQuery {
    /// Only messages before this id
    before: Option<u64>,
}

/// Messages of a room, 100 at a time: the latest, or those before one
#[utoipa::path(get, path = "/worlds/{world}/rooms/{room}/messages", params(("world" = String, Path), ("room" = u32, Path), RoomMessagesQuery),
    responses((status = 200, body = Vec<ApiRoomMessage>), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn list_room_messages(
    State(app): State<Arc<App>>,
    PathParams((name, room)): PathParams<(String, u32)>,
    QueryParams(query): QueryParams<RoomMessagesQuery>,
) -> ApiResult<Json<Vec<ApiRoomMessage>>> {
    spawn_blocking(move || {
        let (room, before) = (AgentId(room), query.before.unwrap_or(u64::MAX));
        let missing = || ErrorResponse::not_found(format!("there is no room {room}"));
        if let Some(runner) = app.worlds.peek(&name) {
            let mut store = runner.store();
            store.world.any_room(room).ok_or_else(missing)?;
            let messages = store.messages_before(room, before, MESSAGES_PER_PAGE)?;
            let messages = messages.iter().map(|message| ApiRoomMessage::new(&store.world, message));
            return Ok(Json(messages.collect()));
        }
        let mut store = app.backend.open_worlds()?;
        check_world_exists(&mut *store, &name)?;
        let world = world_store::load_world_preview(&mut *store, &name)?;
        world.any_room(room).ok_or_else(missing)?;
        let messages = world_store::messages_before(&mut *store, &name, room, before, MESSAGES_PER_PAGE)?;
        Ok(Json(messages.iter().map(|message| ApiRoomMessage::new(&world, message)).collect()))
    })
    .await
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct HudQuery {
    /// json, compact_json, toon or toon_positional; none: the format of the agent
    format: Option<String>,
}

/// An agent's knowledge, recent actions and HUD
#[utoipa::path(get, path = "/worlds/{world}/agents/{agent}/hud", params(("world" = String, Path), ("agent" = u32, Path), HudQuery),
    responses((status = 200, body = ApiAgentMind), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn get_agent_mind(
    State(app): State<Arc<App>>,
    PathParams((name, agent)): PathParams<(String, u32)>,
    QueryParams(query): QueryParams<HudQuery>,
) -> ApiResult<Json<ApiAgentMind>> {
    spawn_blocking(move || {
        let runner = open_world(&app, &name)?;
        let id = AgentId(agent);
        let agent = runner.store().world.agent(id).cloned();
        let agent = agent.ok_or_else(|| ErrorResponse::not_found(format!("there is no agent {id}")))?;
        let format = match query.format {
            None => agent.hud_format,
            Some(name) => HudFormat::from_name(&name).ok_or_else(|| {
                let names = HudFormat::ALL.map(HudFormat::name).join(", ");
                ErrorResponse::bad_request(format!("there is no format '{name}'; use one of {names}"))
            })?,
        };
        let rendered = runner.render_hud(id, Some(format));
        let tokens = |format| runner.render_hud(id, Some(format)).ok().map(|hud| hud.token_usage.total);
        let formats = HudFormat::ALL.into_iter();
        Ok(Json(ApiAgentMind {
            own_format: agent.hud_format.name(),
            tokens_by_format: formats.map(|format| (format.name(), tokens(format))).collect(),
            knowledge: serde_json::Value::Object(agent.knowledge.entries().clone()),
            recent_actions: ApiAgentMind::recent_actions(&agent),
            hud: rendered.as_ref().ok().map(|rendered| ApiRenderedHud::new(format, rendered)),
            error: rendered.err().map(|e| e.to_string()),
        }))
    })
    .await
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct TelemetryQuery {
    /// Only heartbeats of this agent
    agent: Option<u32>,
    /// The most heartbeats; the latest are returned
    limit: Option<usize>,
}

/// The most heartbeats in one response, and how many there are if a client does not say.
const MAX_HEARTBEATS: usize = 10_000;
const DEFAULT_HEARTBEATS: usize = 100;

/// Tokens of the heartbeats by section and by format, over time
#[utoipa::path(get, path = "/worlds/{world}/telemetry", params(("world" = String, Path), TelemetryQuery),
    responses((status = 200, body = ApiHeartbeatTelemetry), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn get_telemetry(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<TelemetryQuery>,
) -> ApiResult<Json<ApiHeartbeatTelemetry>> {
    spawn_blocking(move || {
        let (agent, limit) = (query.agent.map(AgentId), query.limit.unwrap_or(DEFAULT_HEARTBEATS));
        if !(1..=MAX_HEARTBEATS).contains(&limit) {
            return Err(ErrorResponse::bad_request(format!("limit must be from 1 to {MAX_HEARTBEATS}")));
        }
        let records = match app.worlds.peek(&name) {
            Some(runner) => runner.store().heartbeat_records(agent, limit)?,
            None => {
                let mut store = app.backend.open_worlds()?;
                check_world_exists(&mut *store, &name)?;
                world_store::heartbeat_records(&mut *store, &name, agent, limit)?
            }
        };
        Ok(Json(ApiHeartbeatTelemetry::new(&records)))
    })
    .await
}

/// Runs a command of the user, by the field `command`: say, react, join, leave, grant, deny, attend, wake, pause, resume, create, alter, invite, remove or retire
#[utoipa::path(post, path = "/worlds/{world}/commands", params(("world" = String, Path)), request_body = Object,
    responses((status = 200, body = ApiWorld), (status = 202, body = ApiWorld), (status = 400, body = ApiError),
        (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn run_user_command(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(ApiUserCommand(command)): JsonBody<ApiUserCommand>,
) -> ApiResult<(StatusCode, Json<ApiWorld>)> {
    spawn_blocking(move || {
        let runner = match open_world(&app, &name) {
            // Another program runs the world: it runs the command when no agent is thinking.
            Err(e) if e.kind() == ErrorKind::Busy => {
                let now = jiff::Timestamp::now().as_millisecond();
                world_store::post_command(&mut *app.backend.open_worlds()?, &name, &command, now)?;
                let world = ApiWorld { queued: true, ..stored_world_view(&app, name)? };
                return Ok((StatusCode::ACCEPTED, Json(world)));
            }
            runner => runner?,
        };
        let changes = runner.execute_command(command).map_err(|e| e.with_kind(ErrorKind::InvalidInput))?;
        publish_world_change(&app, &name, &changes, None);
        Ok((StatusCode::OK, Json(open_world_view(name, &runner))))
    })
    .await
}

/// Pauses or runs the world, runs one heartbeat, or sets the speed of its clock
#[utoipa::path(put, path = "/worlds/{world}/clock", params(("world" = String, Path)), request_body = ApiClockUpdate,
    responses((status = 200, body = ApiWorld), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn set_clock(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(new): JsonBody<ApiClockUpdate>,
) -> ApiResult<Json<ApiWorld>> {
    spawn_blocking(move || {
        if new.speed.is_some_and(|speed| !(0.1..=100.0).contains(&speed)) {
            return Err(ErrorResponse::bad_request("speed must be from 0.1 to 100"));
        }
        let runner = open_world(&app, &name)?;
        if let Some(speed) = new.speed {
            runner.set_speed(speed);
        }
        if let Some(paused) = new.paused {
            runner.set_paused(paused);
        }
        if new.step {
            runner.step();
        }
        publish_world_change(&app, &name, &WorldChanges::default(), None);
        Ok(Json(open_world_view(name, &runner)))
    })
    .await
}
