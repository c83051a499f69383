//! Worlds of rooms: what is there, what agents see, and the person's hand.

// The macro that writes the API down qualifies what it need not.
#![allow(unused_qualifications)]

use crate::answer::{Answer, Body, Named, Refusal, Words, Wrong, aside};
use crate::app::App;
use crate::halo::wire::WorldNews;
use crate::worlds::{send, tell};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use halo_agents::format::Format;
use halo_agents::heartbeat;
use halo_agents::scribe::Shown;
use halo_agents::wish::Wish;
use halo_agents::world::{AgentId, Message, Room, Sender, World};
use halo_agents::world_file::WorldFile;
use halo_core::seams::{Fault, Worlds};
use halo_engine::world::house::{House, Pace};
use halo_engine::world::realm::{self, Realm};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(worlds, create))
        .routes(routes!(world, end))
        .routes(routes!(messages))
        .routes(routes!(hud))
        .routes(routes!(wish))
        .routes(routes!(pace))
}

/// A world in a list.
#[derive(Serialize, ToSchema)]
struct Listed {
    /// Its name.
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

/// A new world.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct New {
    /// What it is called.
    name: String,
    /// Who lives there and which rooms they have, as TOML; none: the example.
    file: Option<String>,
}

/// A world.
#[derive(Serialize, ToSchema)]
struct Whole {
    /// Its name.
    name: String,
    /// Whether it is open here: else this is how it was last kept.
    open: bool,
    /// Whether another program runs it.
    elsewhere: bool,
    /// Whether what was asked was left for the program that runs it.
    left: bool,
    /// What time it is there, in milliseconds since 1970.
    now: i64,
    /// Whether time stands still here.
    paused: bool,
    /// How fast time goes by.
    speed: f64,
    /// Who thinks now.
    thinking: Option<u32>,
    /// Who lives there.
    agents: Vec<AgentView>,
    /// The rooms that are open.
    rooms: Vec<RoomView>,
}

/// An agent.
#[derive(Serialize, ToSchema)]
struct AgentView {
    /// Its number.
    id: u32,
    /// Its name.
    name: String,
    /// persona or bot.
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

/// A room.
#[derive(Serialize, ToSchema)]
struct RoomView {
    /// Its number: its owner's.
    id: u32,
    /// What its owner is called.
    owner: String,
    /// Who is in it.
    members: Vec<MemberView>,
    /// What hangs on the wall.
    billboard: Option<String>,
    /// What lets others ask to come in.
    keys: Vec<String>,
    /// Who does.
    requests: Vec<RequestView>,
    /// Words in a minute.
    wpm: u32,
    /// The number of what was said last; 0: nothing was.
    last: u64,
}

/// Somebody in a room.
#[derive(Serialize, ToSchema)]
struct MemberView {
    /// Its number.
    id: u32,
    /// Its name.
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
struct RequestView {
    /// The request's number.
    id: u64,
    /// Who.
    who: u32,
    /// What that one is called.
    name: String,
    /// With which key.
    key: String,
}

/// Something that was said.
#[derive(Serialize, ToSchema)]
struct Said {
    /// Its number.
    id: u64,
    /// When, in milliseconds since 1970.
    at: i64,
    /// By whom, by number; none: by the world itself.
    by: Option<u32>,
    /// What that one is called.
    name: String,
    /// What.
    text: String,
    /// What it answers.
    reply_to: Option<u64>,
    /// Who feels what about it.
    reactions: BTreeMap<&'static str, Vec<String>>,
}

/// How many messages of a room are told at a time.
const SHOWN: usize = 100;

fn said(world: &World, message: &Message) -> Said {
    let (by, name) = match message.sender {
        Sender::Agent(id) => (Some(id.0), world.name(id)),
        Sender::System => (None, "System".to_owned()),
    };
    let names = |who: &std::collections::BTreeSet<AgentId>| who.iter().map(|id| world.name(*id)).collect();
    Said {
        id: message.id,
        at: message.at,
        by,
        name,
        text: message.content.clone(),
        reply_to: message.reply_to,
        reactions: message.reactions.iter().map(|(reaction, who)| (reaction.name(), names(who))).collect(),
    }
}

fn room_view(world: &World, room: &Room) -> RoomView {
    let member = |(id, member): (&AgentId, &halo_agents::world::Member)| MemberView {
        id: id.0,
        name: world.name(*id),
        attention: member.attention.to_string(),
        share: world.shares(*id).get(&room.id).copied().unwrap_or(0.0),
        writing: member.writing.as_ref().map(|draft| draft.due),
    };
    let request = |request: &halo_agents::world::Request| RequestView {
        id: request.id,
        who: request.requester.0,
        name: world.name(request.requester),
        key: request.key.clone(),
    };
    RoomView {
        id: room.id.0,
        owner: world.name(room.id),
        members: room.members.iter().map(member).collect(),
        billboard: room.billboard.clone(),
        keys: room.keys.clone(),
        requests: room.requests.iter().map(request).collect(),
        wpm: room.wpm,
        last: room.messages.back().map_or(0, |message| message.id),
    }
}

/// A world that is open.
fn whole(name: String, house: &House) -> Whole {
    let (pace, now) = (house.pace(), house.now());
    view(name, &house.realm().world, Some((pace, now)))
}

/// A world as it was last kept.
fn kept(app: &App, name: String) -> Answer<Whole> {
    let mut store = app.parts.worlds()?;
    exists(&mut *store, &name)?;
    let world = realm::glance(&mut *store, &name)?;
    let elsewhere = store.is_world_held(&name)?;
    Ok(Whole { elsewhere, ..view(name, &world, None) })
}

fn view(name: String, world: &World, open: Option<(Pace, i64)>) -> Whole {
    let now =
        open.map_or_else(|| jiff::Timestamp::now().as_millisecond().max(world.head.clock), |(_, now)| now);
    let pace = open.map(|(pace, _)| pace);
    let agent = |agent: &halo_agents::world::AgentState| AgentView {
        id: agent.id.0,
        name: agent.name.clone(),
        kind: match agent.kind {
            halo_agents::world::AgentKind::Persona => "persona".to_owned(),
            halo_agents::world::AgentKind::Bot => "bot".to_owned(),
        },
        model: agent.model.clone(),
        prompt: agent.prompt.clone(),
        interval: agent.interval.seconds(),
        next: agent.next,
        beats: agent.beats,
        asleep: agent.asleep.filter(|until| *until > now),
        paused: agent.paused,
        can_create_agents: agent.can_create_agents,
    };
    Whole {
        name,
        open: open.is_some(),
        elsewhere: false,
        left: false,
        now,
        paused: pace.is_none_or(|pace| pace.paused),
        speed: pace.map_or(1.0, |pace| pace.speed),
        thinking: pace.and_then(|pace| pace.thinking).map(|who| who.0),
        agents: world.agents().map(agent).collect(),
        rooms: world.rooms().map(|room| room_view(world, room)).collect(),
    }
}

/// The world of that name, open.
fn house(app: &Arc<App>, name: &str) -> Answer<Arc<House>> {
    if let Some(house) = app.worlds.find(name) {
        return Ok(house);
    }
    exists(&mut *app.parts.worlds()?, name)?;
    Ok(app.worlds.open(app, name)?)
}

fn exists(store: &mut dyn Worlds, name: &str) -> Answer<()> {
    match store.worlds()?.iter().any(|known| known.name == name) {
        true => Ok(()),
        false => Err(Refusal::missing(format!("there is no world '{name}'"))),
    }
}

/// The worlds that there are
#[utoipa::path(get, path = "/worlds", responses((status = 200, body = Vec<Listed>)))]
async fn worlds(State(app): State<Arc<App>>) -> Answer<Json<Vec<Listed>>> {
    aside(move || {
        let mut store = app.parts.worlds()?;
        let mut all = Vec::new();
        for known in store.worlds()? {
            let open = app.worlds.look(&known.name);
            let (agents, messages) = match &open {
                Some(house) => {
                    let realm = house.realm();
                    (realm.world.agents().count(), realm.world.head.next_message - 1)
                }
                // One that is damaged is listed all the same: it can be ended.
                None => realm::size(&mut *store, &known.name).unwrap_or_else(|why| {
                    tracing::warn!("{why}");
                    (0, 0)
                }),
            };
            all.push(Listed {
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

/// Makes a world
#[utoipa::path(post, path = "/worlds", request_body = New,
    responses((status = 201, body = Whole), (status = 400, body = Wrong), (status = 422, body = Wrong)))]
async fn create(State(app): State<Arc<App>>, Body(new): Body<New>) -> Answer<(StatusCode, Json<Whole>)> {
    aside(move || {
        let file = new.file.unwrap_or_else(|| app.parts.example().to_owned());
        let file: WorldFile = app.parts.read_world(&file)?;
        let now = jiff::Timestamp::now().as_millisecond();
        // Whoever writes to this program does not say whom it speaks to, and with whose key.
        if let Some(at) = file.models.iter().filter_map(|model| model.at.as_ref()).find(|at| !app.parts.may_think(at)) {
            return Err(Refusal::bad(format!(
                "a world that comes over the network may not think with '{at}': name it in the setting rooms.models, in the \
                 settings file or when the program is started, or make the world with `halo rooms new`"
            )));
        }
        let world = file.begin("local", now).map_err(Refusal::bad)?;
        drop(Realm::found(app.parts.worlds()?, &new.name, world, now)?);
        send(&app, WorldNews { name: new.name.clone(), listed: true, ..WorldNews::default() });
        let house = house(&app, &new.name).map_err(|why| {
            let made = format!("the world '{}' is made, and cannot be opened now: {}", new.name, why.what());
            Refusal::new(why.status(), made)
        })?;
        Ok((StatusCode::CREATED, Json(whole(new.name, &house))))
    })
    .await
}

/// A world: who lives there, and the rooms
#[utoipa::path(get, path = "/worlds/{world}", params(("world" = String, Path)),
    responses((status = 200, body = Whole), (status = 404, body = Wrong)))]
async fn world(State(app): State<Arc<App>>, Named(name): Named<String>) -> Answer<Json<Whole>> {
    aside(move || {
        Ok(Json(match app.worlds.look(&name) {
            Some(house) => whole(name, &house),
            None => kept(&app, name)?,
        }))
    })
    .await
}

/// Ends a world for good, with all that was said there
#[utoipa::path(delete, path = "/worlds/{world}", params(("world" = String, Path)),
    responses((status = 204), (status = 404, body = Wrong)))]
async fn end(State(app): State<Arc<App>>, Named(name): Named<String>) -> Answer<StatusCode> {
    aside(move || {
        exists(&mut *app.parts.worlds()?, &name)?;
        app.worlds.end(&name, || app.parts.end_world(&name))?;
        send(&app, WorldNews { name, listed: true, ..WorldNews::default() });
        Ok(StatusCode::NO_CONTENT)
    })
    .await
}

#[derive(Deserialize, IntoParams)]
struct Before {
    /// Only those before this number
    before: Option<u64>,
}

/// Messages of a room, a hundred at a time: the latest, or those before one
#[utoipa::path(get, path = "/worlds/{world}/rooms/{room}/messages", params(("world" = String, Path), ("room" = u32, Path), Before),
    responses((status = 200, body = Vec<Said>), (status = 404, body = Wrong)))]
async fn messages(
    State(app): State<Arc<App>>,
    Named((name, room)): Named<(String, u32)>,
    Words(asked): Words<Before>,
) -> Answer<Json<Vec<Said>>> {
    aside(move || {
        let (room, before) = (AgentId(room), asked.before.unwrap_or(u64::MAX));
        let missing = || Refusal::missing(format!("there is no room {room}"));
        if let Some(house) = app.worlds.look(&name) {
            let mut realm = house.realm();
            realm.world.any_room(room).ok_or_else(missing)?;
            let found = realm.older(room, before, SHOWN)?;
            return Ok(Json(found.iter().map(|message| said(&realm.world, message)).collect()));
        }
        let mut store = app.parts.worlds()?;
        exists(&mut *store, &name)?;
        let world = realm::glance(&mut *store, &name)?;
        world.any_room(room).ok_or_else(missing)?;
        let found = realm::messages(&mut *store, &name, room, before, SHOWN)?;
        Ok(Json(found.iter().map(|message| said(&world, message)).collect()))
    })
    .await
}

#[derive(Deserialize, IntoParams)]
struct How {
    /// json, compact_json, toon or toon_positional; none: the agent's own
    format: Option<String>,
}

/// What is in an agent's mind.
#[derive(Serialize, ToSchema)]
struct Mind {
    /// The agent's own format.
    own_format: &'static str,
    /// How many tokens its HUD has in each; none where it does not fit.
    by_format: BTreeMap<&'static str, Option<usize>>,
    /// All that the agent has written down.
    #[schema(value_type = Object)]
    known: serde_json::Value,
    /// What it did last.
    #[schema(value_type = Vec<Object>)]
    recent: Vec<serde_json::Value>,
    /// What it sees.
    seen: Option<Sees>,
    /// Why it sees nothing.
    wrong: Option<String>,
}

/// What an agent sees.
#[derive(Serialize, ToSchema)]
struct Sees {
    /// In which format.
    format: &'static str,
    /// As text.
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

impl Sees {
    fn new(format: Format, shown: &Shown) -> Self {
        Self {
            format: format.name(),
            text: shown.text(),
            tokens: shown.spent.total,
            budget: shown.budgets.total,
            fixed: shown.spent.fixed,
            knowledge: (shown.spent.knowledge, shown.budgets.knowledge),
            rooms: shown.spent.rooms.iter().map(|(room, tokens)| (room.0, *tokens)).collect(),
            notice: shown.hud.me.notice.clone(),
            recalled: shown.recalled.clone(),
        }
    }
}

/// What an agent sees now
#[utoipa::path(get, path = "/worlds/{world}/agents/{agent}/hud", params(("world" = String, Path), ("agent" = u32, Path), How),
    responses((status = 200, body = Mind), (status = 400, body = Wrong), (status = 404, body = Wrong), (status = 422, body = Wrong)))]
async fn hud(
    State(app): State<Arc<App>>,
    Named((name, agent)): Named<(String, u32)>,
    Words(asked): Words<How>,
) -> Answer<Json<Mind>> {
    aside(move || {
        let house = house(&app, &name)?;
        let who = AgentId(agent);
        let found = house.realm().world.agent(who).cloned();
        let agent = found.ok_or_else(|| Refusal::missing(format!("there is no agent {agent}")))?;
        let format = match asked.format {
            None => agent.input,
            Some(word) => Format::named(&word).ok_or_else(|| {
                let known = Format::ALL.map(Format::name).join(", ");
                Refusal::bad(format!("there is no format '{word}': there is {known}"))
            })?,
        };
        let shown = house.show(who, Some(format));
        let tokens = |format| house.show(who, Some(format)).ok().map(|shown| shown.spent.total);
        let by_format = Format::ALL.into_iter().map(|format| (format.name(), tokens(format))).collect();
        let recent = agent.recent.iter().map(|one| {
            let mut told = serde_json::to_value(&one.with).unwrap_or_default();
            told["type"] = one.kind.clone().into();
            told["timestamp"] = heartbeat::shown(one.at).into();
            if let Some(why) = &one.refused {
                told["refused"] = why.clone().into();
            }
            told
        });
        Ok(Json(Mind {
            own_format: agent.input.name(),
            by_format,
            known: serde_json::Value::Object(agent.knowledge.all().clone()),
            recent: recent.collect(),
            seen: shown.as_ref().ok().map(|shown| Sees::new(format, shown)),
            wrong: shown.err().map(|why| why.to_string()),
        }))
    })
    .await
}

/// Does what the person wants: say, react, join, leave, grant, deny, attend, wake, pause, resume, create or retire
#[utoipa::path(post, path = "/worlds/{world}/wishes", params(("world" = String, Path)), request_body = Object,
    responses((status = 200, body = Whole), (status = 202, body = Whole), (status = 400, body = Wrong),
        (status = 404, body = Wrong), (status = 422, body = Wrong)))]
async fn wish(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Body(wish): Body<Wish>,
) -> Answer<(StatusCode, Json<Whole>)> {
    aside(move || {
        let house = match house(&app, &name) {
            // Somebody else runs it, and does it when nobody thinks there.
            Err(why) if why.status() == StatusCode::SERVICE_UNAVAILABLE => {
                let now = jiff::Timestamp::now().as_millisecond();
                realm::post(&mut *app.parts.worlds()?, &name, &wish, now)?;
                let whole = Whole { left: true, ..kept(&app, name)? };
                return Ok((StatusCode::ACCEPTED, Json(whole)));
            }
            house => house?,
        };
        let touched = house.wish(wish).map_err(|why| why.by(Fault::Asked))?;
        tell(&app, &name, &touched, None);
        Ok((StatusCode::OK, Json(whole(name, &house))))
    })
    .await
}

/// How time is to go by; what is left out stays as it is.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct NewPace {
    /// Whether time is to stand still.
    paused: Option<bool>,
    /// How fast, from 0.1 to 100.
    speed: Option<f64>,
    /// Whether one heart is to beat now.
    #[serde(default)]
    step: bool,
}

/// Stops time, lets it go on, goes on to the next heartbeat, or lets time go by faster
#[utoipa::path(put, path = "/worlds/{world}/pace", params(("world" = String, Path)), request_body = NewPace,
    responses((status = 200, body = Whole), (status = 400, body = Wrong), (status = 404, body = Wrong)))]
async fn pace(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Body(new): Body<NewPace>,
) -> Answer<Json<Whole>> {
    aside(move || {
        if new.speed.is_some_and(|speed| !(0.1..=100.0).contains(&speed)) {
            return Err(Refusal::bad("time goes by 0.1 to 100 times as fast"));
        }
        let house = house(&app, &name)?;
        if let Some(speed) = new.speed {
            house.set_speed(speed);
        }
        if let Some(paused) = new.paused {
            house.pause(paused);
        }
        if new.step {
            house.step();
        }
        tell(&app, &name, &halo_agents::world::Touched::default(), None);
        Ok(Json(whole(name, &house)))
    })
    .await
}
