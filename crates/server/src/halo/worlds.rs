//! Worlds of rooms: what is there, what agents see, and the person's hand.

// The macro that writes the API down qualifies what it need not.
#![allow(unused_qualifications)]

use crate::app::App;
use crate::error::{ApiError, ApiResult, ErrorResponse, JsonBody, PathParams, QueryParams, spawn_blocking};
use crate::halo::wire::ApiWorldEvent;
use crate::worlds::{publish_world_change, publish_world_event};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use halo_core::ErrorKind;
use halo_core::row_store::RowStore;
use halo_worlds::format::HudFormat;
use halo_worlds::heartbeat;
use halo_worlds::hud_renderer::RenderedHud;
use halo_worlds::runner::{WorldClock, WorldRunner};
use halo_worlds::user_command::UserCommand;
use halo_worlds::world::{AgentId, MessageSender, Room, RoomMessage, World};
use halo_worlds::world_file::WorldFile;
use halo_worlds::world_store::{self, WorldStore};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list_worlds, create_world))
        .routes(routes!(get_world, delete_world))
        .routes(routes!(list_room_messages))
        .routes(routes!(get_agent_mind))
        .routes(routes!(run_user_command))
        .routes(routes!(set_clock))
}

/// A world in a list.
#[derive(Serialize, ToSchema)]
#[schema(as = WorldSummary)]
struct ApiWorldSummary {
    name: String,
    /// When it began, in milliseconds since 1970.
    created: i64,
    /// How many live there.
    agents: usize,
    /// How much was ever said.
    messages: u64,
    /// Whether it is open here.
    open: bool,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = NewWorld)]
#[serde(deny_unknown_fields)]
struct ApiNewWorld {
    /// What it is called.
    name: String,
    /// Who lives there and which rooms they have, as TOML; none: the example.
    file: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = World)]
struct ApiWorld {
    name: String,
    /// Whether it is open here: else this is how it was last kept.
    open: bool,
    /// Whether another program runs it.
    runs_elsewhere: bool,
    /// Whether what was asked was left for the program that runs it.
    queued: bool,
    /// What time it is there, in milliseconds since 1970.
    now: i64,
    /// Whether time stands still here.
    paused: bool,
    /// How fast time goes by.
    speed: f64,
    thinking: Option<u32>,
    agents: Vec<ApiAgent>,
    /// The rooms that are open.
    rooms: Vec<ApiRoom>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Agent)]
struct ApiAgent {
    id: u32,
    name: String,
    kind: String,
    /// What thinks for it.
    model: String,
    /// Where it comes from, or what it does.
    prompt: String,
    /// Seconds from heartbeat to heartbeat.
    interval: f64,
    /// When its heart beats next.
    next: i64,
    /// How often it has.
    beats: u64,
    /// Until when it sleeps.
    asleep: Option<i64>,
    /// Whether it does nothing for now.
    paused: bool,
    /// Whether it may make others.
    can_create_agents: bool,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Room)]
struct ApiRoom {
    /// Its number: its owner's.
    id: u32,
    /// What its owner is called.
    owner: String,
    /// Who is in it.
    members: Vec<ApiRoomMember>,
    /// What hangs on the wall.
    billboard: Option<String>,
    /// What lets others ask to come in.
    keys: Vec<String>,
    requests: Vec<ApiJoinRequest>,
    /// Words in a minute.
    wpm: u32,
    /// The number of what was said last; 0: nothing was.
    last_message: u64,
}

/// Somebody in a room.
#[derive(Serialize, ToSchema)]
#[schema(as = RoomMember)]
struct ApiRoomMember {
    id: u32,
    name: String,
    /// How much of its attention the room gets: `30%` or `%*`.
    attention: String,
    /// And what that comes to, in hundredths.
    share: f64,
    /// Until when it is writing something.
    writing: Option<i64>,
}

/// Somebody wants to come in.
#[derive(Serialize, ToSchema)]
#[schema(as = JoinRequest)]
struct ApiJoinRequest {
    id: u64,
    agent: u32,
    /// What that one is called.
    name: String,
    key: String,
}

/// Something that was said.
#[derive(Serialize, ToSchema)]
#[schema(as = RoomMessage)]
struct ApiRoomMessage {
    id: u64,
    /// When, in milliseconds since 1970.
    at: i64,
    /// By whom, by number; none: by the world itself.
    by: Option<u32>,
    /// What that one is called.
    name: String,
    text: String,
    reply_to: Option<u64>,
    /// Who feels what about it.
    reactions: BTreeMap<&'static str, Vec<String>>,
}

/// How many messages of a room are told at a time.
const MESSAGES_PER_PAGE: usize = 100;

fn api_message(world: &World, message: &RoomMessage) -> ApiRoomMessage {
    let (by, name) = match message.sender {
        MessageSender::Agent(id) => (Some(id.0), world.display_name(id)),
        MessageSender::System => (None, "System".to_owned()),
    };
    let names =
        |who: &std::collections::BTreeSet<AgentId>| who.iter().map(|id| world.display_name(*id)).collect();
    ApiRoomMessage {
        id: message.id,
        at: message.at,
        by,
        name,
        text: message.content.clone(),
        reply_to: message.reply_to,
        reactions: message.reactions.iter().map(|(reaction, who)| (reaction.name(), names(who))).collect(),
    }
}

fn api_room(world: &World, room: &Room) -> ApiRoom {
    let member = |(id, member): (&AgentId, &halo_worlds::world::RoomMember)| ApiRoomMember {
        id: id.0,
        name: world.display_name(*id),
        attention: member.attention.to_string(),
        share: world.attention_shares(*id).get(&room.id).copied().unwrap_or(0.0),
        writing: member.draft.as_ref().map(|draft| draft.due),
    };
    let request = |request: &halo_worlds::world::AccessRequest| ApiJoinRequest {
        id: request.id,
        agent: request.requester.0,
        name: world.display_name(request.requester),
        key: request.key.clone(),
    };
    ApiRoom {
        id: room.id.0,
        owner: world.display_name(room.id),
        members: room.members.iter().map(member).collect(),
        billboard: room.billboard.clone(),
        keys: room.keys.clone(),
        requests: room.requests.iter().map(request).collect(),
        wpm: room.wpm,
        last_message: room.messages.back().map_or(0, |message| message.id),
    }
}

/// A world that is open.
fn open_world_view(name: String, house: &WorldRunner) -> ApiWorld {
    let (pace, now) = (house.world_clock(), house.now());
    world_view(name, &house.store().world, Some((pace, now)))
}

/// A world as it was last kept.
fn stored_world_view(app: &App, name: String) -> ApiResult<ApiWorld> {
    let mut store = app.backend.open_worlds()?;
    check_world_exists(&mut *store, &name)?;
    let world = world_store::load_world_preview(&mut *store, &name)?;
    let elsewhere = store.is_namespace_leased(&name)?;
    Ok(ApiWorld { runs_elsewhere: elsewhere, ..world_view(name, &world, None) })
}

fn world_view(name: String, world: &World, open: Option<(WorldClock, i64)>) -> ApiWorld {
    let now =
        open.map_or_else(|| jiff::Timestamp::now().as_millisecond().max(world.header.clock), |(_, now)| now);
    let pace = open.map(|(pace, _)| pace);
    let agent = |agent: &halo_worlds::world::AgentState| ApiAgent {
        id: agent.id.0,
        name: agent.name.clone(),
        kind: match agent.kind {
            halo_worlds::world::AgentKind::Persona => "persona".to_owned(),
            halo_worlds::world::AgentKind::Bot => "bot".to_owned(),
        },
        model: agent.model.clone(),
        prompt: agent.prompt.clone(),
        interval: agent.interval.seconds(),
        next: agent.next_heartbeat,
        beats: agent.heartbeat_count,
        asleep: agent.sleep_until.filter(|until| *until > now),
        paused: agent.paused,
        can_create_agents: agent.can_create_agents,
    };
    ApiWorld {
        name,
        open: open.is_some(),
        runs_elsewhere: false,
        queued: false,
        now,
        paused: pace.is_none_or(|pace| pace.paused),
        speed: pace.map_or(1.0, |pace| pace.speed),
        thinking: pace.and_then(|pace| pace.thinking_agent).map(|who| who.0),
        agents: world.agents().map(agent).collect(),
        rooms: world.rooms().map(|room| api_room(world, room)).collect(),
    }
}

/// The world of that name, open.
fn open_world(app: &Arc<App>, name: &str) -> ApiResult<Arc<WorldRunner>> {
    if let Some(house) = app.worlds.get(name) {
        return Ok(house);
    }
    check_world_exists(&mut *app.backend.open_worlds()?, name)?;
    Ok(app.worlds.open(app, name)?)
}

fn check_world_exists(store: &mut dyn RowStore, name: &str) -> ApiResult<()> {
    match store.list_namespaces()?.iter().any(|known| known.name == name) {
        true => Ok(()),
        false => Err(ErrorResponse::not_found(format!("there is no world '{name}'"))),
    }
}

/// The worlds that there are
#[utoipa::path(get, path = "/worlds", responses((status = 200, body = Vec<ApiWorldSummary>)))]
async fn list_worlds(State(app): State<Arc<App>>) -> ApiResult<Json<Vec<ApiWorldSummary>>> {
    spawn_blocking(move || {
        let mut store = app.backend.open_worlds()?;
        let mut all = Vec::new();
        for known in store.list_namespaces()? {
            let open = app.worlds.peek(&known.name);
            let (agents, messages) = match &open {
                Some(house) => {
                    let realm = house.store();
                    (realm.world.agents().count(), realm.world.header.next_message - 1)
                }
                // One that is damaged is listed all the same: it can be ended.
                None => world_store::world_size(&mut *store, &known.name).unwrap_or_else(|why| {
                    tracing::warn!("{why}");
                    (0, 0)
                }),
            };
            all.push(ApiWorldSummary {
                name: known.name,
                created: known.created,
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
        let file = new.file.unwrap_or_else(|| app.backend.example_world().to_owned());
        let file: WorldFile = app.backend.parse_world_file(&file)?;
        let now = jiff::Timestamp::now().as_millisecond();
        // Whoever writes to this program does not say whom it speaks to, and with whose key.
        if let Some(at) = file.models.iter().filter_map(|model| model.address.as_ref()).find(|at| !app.backend.is_world_model_allowed(at)) {
            return Err(ErrorResponse::bad_request(format!(
                "a world that comes over the network may not think with '{at}': add it to the setting rooms.models in the settings \
                 file or at start, or create the world on the command line"
            )));
        }
        let world = file.into_world("local", now).map_err(|error| ErrorResponse::bad_request(error.message))?;
        drop(WorldStore::create(app.backend.open_worlds()?, &new.name, world, now)?);
        publish_world_event(&app, ApiWorldEvent { name: new.name.clone(), worlds_changed: true, ..ApiWorldEvent::default() });
        let house = open_world(&app, &new.name).map_err(|why| {
            let made = format!("the world '{}' is made, and cannot be opened now: {}", new.name, why.message());
            ErrorResponse::new(why.status(), made)
        })?;
        Ok((StatusCode::CREATED, Json(open_world_view(new.name, &house))))
    })
    .await
}

/// A world: who lives there, and the rooms
#[utoipa::path(get, path = "/worlds/{world}", params(("world" = String, Path)),
    responses((status = 200, body = ApiWorld), (status = 404, body = ApiError)))]
async fn get_world(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<ApiWorld>> {
    spawn_blocking(move || {
        Ok(Json(match app.worlds.peek(&name) {
            Some(house) => open_world_view(name, &house),
            None => stored_world_view(&app, name)?,
        }))
    })
    .await
}

/// Ends a world for good, with all that was said there
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
struct RoomMessagesQuery {
    /// Only those before this number
    before: Option<u64>,
}

/// Messages of a room, a hundred at a time: the latest, or those before one
#[utoipa::path(get, path = "/worlds/{world}/rooms/{room}/messages", params(("world" = String, Path), ("room" = u32, Path), RoomMessagesQuery),
    responses((status = 200, body = Vec<ApiRoomMessage>), (status = 404, body = ApiError)))]
async fn list_room_messages(
    State(app): State<Arc<App>>,
    PathParams((name, room)): PathParams<(String, u32)>,
    QueryParams(asked): QueryParams<RoomMessagesQuery>,
) -> ApiResult<Json<Vec<ApiRoomMessage>>> {
    spawn_blocking(move || {
        let (room, before) = (AgentId(room), asked.before.unwrap_or(u64::MAX));
        let missing = || ErrorResponse::not_found(format!("there is no room {room}"));
        if let Some(house) = app.worlds.peek(&name) {
            let mut realm = house.store();
            realm.world.any_room(room).ok_or_else(missing)?;
            let found = realm.messages_before(room, before, MESSAGES_PER_PAGE)?;
            return Ok(Json(found.iter().map(|message| api_message(&realm.world, message)).collect()));
        }
        let mut store = app.backend.open_worlds()?;
        check_world_exists(&mut *store, &name)?;
        let world = world_store::load_world_preview(&mut *store, &name)?;
        world.any_room(room).ok_or_else(missing)?;
        let found = world_store::messages_before(&mut *store, &name, room, before, MESSAGES_PER_PAGE)?;
        Ok(Json(found.iter().map(|message| api_message(&world, message)).collect()))
    })
    .await
}

#[derive(Deserialize, IntoParams)]
struct HudQuery {
    /// json, compact_json, toon or toon_positional; none: the agent's own
    format: Option<String>,
}

/// What is in an agent's mind.
#[derive(Serialize, ToSchema)]
#[schema(as = AgentMind)]
struct ApiAgentMind {
    /// The agent's own format.
    own_format: &'static str,
    /// How many tokens its HUD has in each; none where it does not fit.
    tokens_by_format: BTreeMap<&'static str, Option<usize>>,
    /// All that the agent has written down.
    #[schema(value_type = Object)]
    knowledge: serde_json::Value,
    /// What it did last.
    #[schema(value_type = Vec<Object>)]
    recent_actions: Vec<serde_json::Value>,
    hud: Option<ApiRenderedHud>,
    /// Why it sees nothing.
    error: Option<String>,
}

/// What an agent sees.
#[derive(Serialize, ToSchema)]
#[schema(as = RenderedHud)]
struct ApiRenderedHud {
    format: &'static str,
    text: String,
    /// How many tokens that has.
    tokens: usize,
    /// How many it may have.
    budget: usize,
    /// Tokens of what does not come from rooms.
    fixed: usize,
    /// Tokens of what the agent has written down, and how many it may have.
    knowledge: (usize, usize),
    /// Tokens of each room.
    rooms: BTreeMap<u32, usize>,
    /// What it is told about what it sees.
    notice: Option<String>,
    /// Messages that were brought back because they matter now.
    recalled: Vec<u64>,
}

impl ApiRenderedHud {
    fn new(format: HudFormat, shown: &RenderedHud) -> Self {
        Self {
            format: format.name(),
            text: shown.text(),
            tokens: shown.token_usage.total,
            budget: shown.budgets.total,
            fixed: shown.token_usage.fixed,
            knowledge: (shown.token_usage.knowledge, shown.budgets.knowledge),
            rooms: shown.token_usage.rooms.iter().map(|(room, tokens)| (room.0, *tokens)).collect(),
            notice: shown.hud.me.notice.clone(),
            recalled: shown.recalled.clone(),
        }
    }
}

/// What an agent sees now
#[utoipa::path(get, path = "/worlds/{world}/agents/{agent}/hud", params(("world" = String, Path), ("agent" = u32, Path), HudQuery),
    responses((status = 200, body = ApiAgentMind), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn get_agent_mind(
    State(app): State<Arc<App>>,
    PathParams((name, agent)): PathParams<(String, u32)>,
    QueryParams(asked): QueryParams<HudQuery>,
) -> ApiResult<Json<ApiAgentMind>> {
    spawn_blocking(move || {
        let house = open_world(&app, &name)?;
        let who = AgentId(agent);
        let found = house.store().world.agent(who).cloned();
        let agent = found.ok_or_else(|| ErrorResponse::not_found(format!("there is no agent {agent}")))?;
        let format = match asked.format {
            None => agent.hud_format,
            Some(word) => HudFormat::from_name(&word).ok_or_else(|| {
                let known = HudFormat::ALL.map(HudFormat::name).join(", ");
                ErrorResponse::bad_request(format!("there is no format '{word}': there is {known}"))
            })?,
        };
        let shown = house.render_hud(who, Some(format));
        let tokens = |format| house.render_hud(who, Some(format)).ok().map(|shown| shown.token_usage.total);
        let by_format = HudFormat::ALL.into_iter().map(|format| (format.name(), tokens(format))).collect();
        let recent = agent.recent_actions.iter().map(|one| {
            let mut told = serde_json::to_value(&one.args).unwrap_or_default();
            told["type"] = one.kind.clone().into();
            told["timestamp"] = heartbeat::format_time(one.at).into();
            if let Some(why) = &one.refused {
                told["refused"] = why.clone().into();
            }
            told
        });
        Ok(Json(ApiAgentMind {
            own_format: agent.hud_format.name(),
            tokens_by_format: by_format,
            knowledge: serde_json::Value::Object(agent.knowledge.entries().clone()),
            recent_actions: recent.collect(),
            hud: shown.as_ref().ok().map(|shown| ApiRenderedHud::new(format, shown)),
            error: shown.err().map(|why| why.to_string()),
        }))
    })
    .await
}

/// A command of the person. The tag is `command` here; pending commands are stored with the tag `wish`.
struct ApiUserCommand(UserCommand);

impl<'de> Deserialize<'de> for ApiUserCommand {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = serde_json::Map::deserialize(deserializer)?;
        if fields.contains_key(STORED_COMMAND_TAG) {
            return Err(D::Error::custom(format!("unknown field `{STORED_COMMAND_TAG}`")));
        }
        let command = fields.remove("command").ok_or_else(|| D::Error::missing_field("command"))?;
        fields.insert(STORED_COMMAND_TAG.to_owned(), command);
        serde_json::from_value(fields.into()).map(Self).map_err(D::Error::custom)
    }
}

const STORED_COMMAND_TAG: &str = "wish";

/// Does what the person wants: say, react, join, leave, grant, deny, attend, wake, pause, resume, create or retire
#[utoipa::path(post, path = "/worlds/{world}/commands", params(("world" = String, Path)), request_body = Object,
    responses((status = 200, body = ApiWorld), (status = 202, body = ApiWorld), (status = 400, body = ApiError),
        (status = 404, body = ApiError), (status = 422, body = ApiError)))]
async fn run_user_command(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(ApiUserCommand(command)): JsonBody<ApiUserCommand>,
) -> ApiResult<(StatusCode, Json<ApiWorld>)> {
    spawn_blocking(move || {
        let house = match open_world(&app, &name) {
            // Somebody else runs it, and does it when nobody thinks there.
            Err(why) if why.kind() == ErrorKind::Busy => {
                let now = jiff::Timestamp::now().as_millisecond();
                world_store::post_command(&mut *app.backend.open_worlds()?, &name, &command, now)?;
                let whole = ApiWorld { queued: true, ..stored_world_view(&app, name)? };
                return Ok((StatusCode::ACCEPTED, Json(whole)));
            }
            house => house?,
        };
        let touched = house.execute_command(command).map_err(|why| why.with_kind(ErrorKind::InvalidInput))?;
        publish_world_change(&app, &name, &touched, None);
        Ok((StatusCode::OK, Json(open_world_view(name, &house))))
    })
    .await
}

/// How time is to go by; what is left out stays as it is.
#[derive(Deserialize, ToSchema)]
#[schema(as = ClockUpdate)]
#[serde(deny_unknown_fields)]
struct ApiClockUpdate {
    /// Whether time is to stand still.
    paused: Option<bool>,
    /// How fast, from 0.1 to 100.
    speed: Option<f64>,
    /// Whether one heart is to beat now.
    #[serde(default)]
    step: bool,
}

/// Stops time, lets it go on, goes on to the next heartbeat, or lets time go by faster
#[utoipa::path(put, path = "/worlds/{world}/clock", params(("world" = String, Path)), request_body = ApiClockUpdate,
    responses((status = 200, body = ApiWorld), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn set_clock(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(new): JsonBody<ApiClockUpdate>,
) -> ApiResult<Json<ApiWorld>> {
    spawn_blocking(move || {
        if new.speed.is_some_and(|speed| !(0.1..=100.0).contains(&speed)) {
            return Err(ErrorResponse::bad_request("time goes by 0.1 to 100 times as fast"));
        }
        let house = open_world(&app, &name)?;
        if let Some(speed) = new.speed {
            house.set_speed(speed);
        }
        if let Some(paused) = new.paused {
            house.set_paused(paused);
        }
        if new.step {
            house.step();
        }
        publish_world_change(&app, &name, &halo_worlds::world::WorldChanges::default(), None);
        Ok(Json(open_world_view(name, &house)))
    })
    .await
}
