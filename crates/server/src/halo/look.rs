//! Looking: nothing here waits for an answer that is being given, or changes anything.

// The macro that writes the API down qualifies what it need not.
#![allow(unused_qualifications)]

use super::wire::{
    self, Attended, AttendedToken, Chunk, Close, Conversation, Found, Graveyard, Note, Past, Stood,
    TurnRecord, Word,
};
use crate::answer::{Answer, Named, Refusal, Words, Wrong, aside};
use crate::app::{App, Looked};
use axum::Json;
use axum::extract::State;
use halo_core::change::Tally;
use halo_core::prune::Rank;
use halo_core::seams::{Kind, SeamError, Store};
use halo_core::signals;
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Position, TurnId, Voice};
use halo_engine::board::Standing;
use halo_engine::grace;
use halo_engine::history;
use halo_engine::variant;
use halo_recall::rank;
use halo_recall::recall::{self, Manner};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(conversations))
        .routes(routes!(state))
        .routes(routes!(chunk))
        .routes(routes!(graveyard))
        .routes(routes!(deleted))
        .routes(routes!(variants))
        .routes(routes!(search))
        .routes(routes!(turns))
        .routes(routes!(past))
        .routes(routes!(looks))
        .routes(routes!(notes))
}

/// The conversations, the last used first
#[utoipa::path(get, path = "/conversations", responses((status = 200, body = Vec<Conversation>)))]
async fn conversations(State(app): State<Arc<App>>) -> Answer<Json<Vec<Conversation>>> {
    aside(move || {
        let mut known = app.read(|store| store.conversations())?;
        known.sort_by_key(|known| std::cmp::Reverse(known.used));
        Ok(Json(known.into_iter().map(Conversation::from).collect()))
    })
    .await
}

/// A conversation: what is in the window, and how it stands
#[utoipa::path(get, path = "/conversations/{name}", params(("name" = String, Path)),
    responses((status = 200, body = wire::State), (status = 404, body = Wrong)))]
async fn state(State(app): State<Arc<App>>, Named(name): Named<String>) -> Answer<Json<wire::State>> {
    let told = |looked: Looked, stood: Arc<Stood>| {
        let Looked { seen, notices } = looked;
        let (events, running) = (seen.events, seen.running.as_deref().map(Into::into));
        Ok(Json(wire::State { stood, events, notices, running }))
    };
    // While an answer is given, many may look: where it is in words already, there is nothing to wait for.
    if let Some(desk) = app.host.find(&name) {
        let looked = Looked { seen: desk.board().look(), notices: desk.notices().to_vec() };
        if looked.seen.running.is_some()
            && let Some(stood) = app.shown.known(&looked.seen)
        {
            return told(looked, stood);
        }
    }
    aside(move || {
        let looked = app.look(&name)?;
        let stood = app.shown.of(&looked.seen, || stood(&app, &looked.seen.standing))?;
        told(looked, stood)
    })
    .await
}

/// How a conversation stands, with what the store knows of it.
fn stood(app: &App, standing: &Standing) -> Answer<Stood> {
    let mut stood = Stood::of(standing);
    if stood.tokens == 0 {
        // Its first message waits for the model: the store does not know of it yet.
        return Ok(stood);
    }
    let name = &standing.name;
    let (times, records) = app.read(|store| Ok((store.times(name)?, store.records(name, Kind::Turn)?)))?;
    let shown: std::collections::BTreeSet<u32> = stood.chunks.iter().map(|chunk| chunk.turn).collect();
    stood.times =
        times.into_iter().map(|(turn, at)| (turn.0, at)).filter(|(turn, _)| shown.contains(turn)).collect();
    for record in records {
        let Ok(turn) = record.key.parse::<u32>() else { continue };
        let told: serde_json::Value = serde_json::from_str(&record.value).unwrap_or_default();
        if let Some(premise) = told["premise"].as_str().filter(|_| shown.contains(&turn)) {
            stood.premises.insert(turn, premise.to_owned());
        }
        let finish = told["finish"].as_str().unwrap_or("end");
        if shown.contains(&turn) && !["end", "stop"].contains(&finish) {
            stood.ends.insert(turn, finish.to_owned());
        }
    }
    Ok(stood)
}

/// All that is known of a chunk: its tokens, how bright each is, and what happened to it
#[utoipa::path(get, path = "/conversations/{name}/chunks/{chunk}",
    params(("name" = String, Path), ("chunk" = String, Path, description = "Role, turn and sentence, such as u4.0")),
    responses((status = 200, body = Close), (status = 400, body = Wrong), (status = 404, body = Wrong)))]
async fn chunk(
    State(app): State<Arc<App>>,
    Named((name, chunk)): Named<(String, String)>,
) -> Answer<Json<Close>> {
    let id: ChunkId = chunk.parse().map_err(|e| Refusal::bad(format!("{e}")))?;
    aside(move || {
        let mut timeline = app.look_at_begun(&name)?.seen.standing.timeline.clone();
        let (history, hidden) = app.read(|store| {
            bring(store, &name, &mut timeline, &[id])?;
            Ok((history::of(store, &name, id)?, grace::hidden(store, &name)?))
        })?;
        if hidden.contains_key(&id) && timeline.chunk(id).is_some_and(|chunk| chunk.is_withdrawn()) {
            let why = format!(
                "{id} is to be forgotten, and nobody is shown it; `halo forget --keep` takes it back"
            );
            return Err(Refusal::missing(why));
        }
        let chunk = timeline.chunk(id);
        let chunk = chunk.ok_or_else(|| Refusal::missing(format!("there is no chunk {id} in '{name}'")))?;
        let positions = chunk.run().positions();
        let tokens = positions.filter_map(|position| Some((position, timeline.token(position)?)));
        let words = tokens.map(|(position, token)| Word {
            position: position.0,
            id: token.id.0,
            text: token.text.to_owned(),
            light: token.brightness.0,
            live: token.flags.is_live(),
            frame: token.flags.voice() == Voice::Frame,
        });
        let tally = chunk.tally();
        let along = signals::delete(&timeline, id).map(|change| change.names()).unwrap_or_default();
        let along: Vec<ChunkId> = along.into_iter().filter(|&other| other != id).collect();
        Ok(Json(Close {
            words: words.collect(),
            votes: tally.votes,
            attention: tally.mass as f64 / Tally::UNIT,
            share: tally.share(),
            history: history.into_iter().map(Into::into).collect(),
            pair: timeline.partner(id).map(|pair| pair.id().to_string()),
            goes_along: texts(&app, &name, &timeline, &along)?,
            chunk: Chunk::of(chunk, &timeline, 0),
        }))
    })
    .await
}

/// Chunks with what they say.
fn texts(app: &App, name: &str, timeline: &Timeline, chunks: &[ChunkId]) -> Answer<Vec<Chunk>> {
    let mut timeline = timeline.clone();
    app.read(|store| bring(store, name, &mut timeline, chunks))?;
    let found = chunks.iter().filter_map(|&id| timeline.chunk(id));
    Ok(found.map(|chunk| Chunk::of(chunk, &timeline, 0)).collect())
}

/// Which of what has left.
#[derive(Deserialize, IntoParams)]
struct Which {
    /// Words, or what is meant: only what fits, the best first
    #[serde(default)]
    q: String,
    /// In which order
    #[serde(default)]
    #[param(inline)]
    sort: Sort,
    /// How many of them are left out before the first
    #[serde(default)]
    from: usize,
    /// How many are wanted, at most 200
    #[serde(default = "fifty")]
    most: usize,
}

#[derive(Clone, Copy, Default, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
enum Sort {
    #[default]
    Newest,
    Oldest,
    Brightest,
    Dimmest,
    Longest,
}

fn fifty() -> usize {
    50
}

/// What has left the window and can come back, and why it left
#[utoipa::path(get, path = "/conversations/{name}/graveyard", params(("name" = String, Path), Which),
    responses((status = 200, body = Graveyard), (status = 400, body = Wrong), (status = 404, body = Wrong)))]
async fn graveyard(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Words(which): Words<Which>,
) -> Answer<Json<Graveyard>> {
    aside(move || {
        let standing = app.look(&name)?.seen.standing;
        let mut timeline = standing.timeline.clone();
        let dead: Vec<ChunkId> = if which.q.trim().is_empty() {
            let mut dead: Vec<_> = timeline.chunks().filter(|c| wire::is_dead(*c)).collect();
            match which.sort {
                Sort::Newest => dead.reverse(),
                Sort::Oldest => {}
                Sort::Brightest => dead.sort_by(|a, b| b.peak().0.total_cmp(&a.peak().0)),
                Sort::Dimmest => dead.sort_by(|a, b| a.peak().0.total_cmp(&b.peak().0)),
                Sort::Longest => dead.sort_by_key(|c| std::cmp::Reverse(c.len())),
            }
            dead.iter().map(|c| c.id()).collect()
        } else {
            let found = find(&app, &standing, &which.q, 1000)?;
            let hits = found.iter().map(|found| found.hit.chunk);
            hits.filter(|&id| timeline.chunk(id).is_some_and(wire::is_dead)).collect()
        };
        let most = which.most.min(200);
        let shown: Vec<ChunkId> = dead.iter().skip(which.from).take(most).copied().collect();
        let whys: BTreeMap<ChunkId, String> = app.read(|store| {
            bring(store, &name, &mut timeline, &shown)?;
            let mut whys = BTreeMap::new();
            for &id in &shown {
                let left = history::of(store, &name, id)?.into_iter().rev().find(|h| h.what == "left");
                whys.extend(left.map(|left| (id, left.why)));
            }
            Ok(whys)
        })?;
        let rows = shown.iter().filter_map(|&id| timeline.chunk(id)).map(|chunk| {
            let why = whys.get(&chunk.id()).cloned();
            Chunk { why, ..Chunk::of(chunk, &timeline, 0) }
        });
        Ok(Json(Graveyard { of: dead.len(), chunks: rows.collect() }))
    })
    .await
}

/// Which of what was deleted.
#[derive(Deserialize, IntoParams)]
struct Page {
    /// How many of them are left out before the first
    #[serde(default)]
    from: usize,
    /// How many are wanted, at most 200
    #[serde(default = "fifty")]
    most: usize,
}

/// What was deleted, by hand or as a variant, and why, the latest first. All of it can be restored until it is forgotten
#[utoipa::path(get, path = "/conversations/{name}/deleted", params(("name" = String, Path), Page),
    responses((status = 200, body = Graveyard), (status = 400, body = Wrong), (status = 404, body = Wrong)))]
async fn deleted(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Words(page): Words<Page>,
) -> Answer<Json<Graveyard>> {
    aside(move || {
        let mut timeline = app.look(&name)?.seen.standing.timeline.clone();
        if timeline.is_empty() {
            return Ok(Json(Graveyard { of: 0, chunks: Vec::new() }));
        }
        let gone = |c: &halo_core::timeline::ChunkRef<'_>| c.withdrawn_len() > 0 && !c.is_forgotten();
        let all: Vec<ChunkId> = timeline.chunks().filter(gone).map(|c| c.id()).collect();
        app.read(|store| {
            let hidden = grace::hidden(store, &name)?;
            let all: Vec<ChunkId> = all.into_iter().rev().filter(|id| !hidden.contains_key(id)).collect();
            // An answer that ended before its first token says nothing.
            bring(store, &name, &mut timeline, &all)?;
            let says = |id: &ChunkId| timeline.chunk(*id).is_some_and(|c| !c.text().trim().is_empty());
            let all: Vec<ChunkId> = all.into_iter().filter(says).collect();
            let mut rows = Vec::new();
            for &id in all.iter().skip(page.from).take(page.most.min(200)) {
                let happened = history::of(store, &name, id)?.into_iter().rev().find(|h| h.what == "deleted");
                let Some(chunk) = timeline.chunk(id) else { continue };
                rows.push(Chunk { why: happened.map(|h| h.why), ..Chunk::of(chunk, &timeline, 0) });
            }
            Ok(Graveyard { of: all.len(), chunks: rows })
        })
        .map(Json)
        .map_err(Refusal::from)
    })
    .await
}

/// The answers, or versions of the last exchange, that can be chosen from; empty where there is only one
#[utoipa::path(get, path = "/conversations/{name}/variants", params(("name" = String, Path)),
    responses((status = 200, body = Vec<wire::Variant>), (status = 404, body = Wrong)))]
async fn variants(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
) -> Answer<Json<Vec<wire::Variant>>> {
    aside(move || {
        let mut timeline = app.look(&name)?.seen.standing.timeline.clone();
        let choices = app.read(|store| variant::choices(store, &name, &mut timeline))?;
        Ok(Json(choices.into_iter().map(Into::into).collect()))
    })
    .await
}

/// What to look for.
#[derive(Deserialize, IntoParams)]
struct Asked {
    /// Words, or what is meant
    q: String,
    /// How many are wanted, at most 100
    #[serde(default = "ten")]
    most: usize,
}

fn ten() -> usize {
    10
}

/// Finds what was said, live or not, and says why
#[utoipa::path(get, path = "/conversations/{name}/search", params(("name" = String, Path), Asked),
    responses((status = 200, body = Vec<Found>), (status = 400, body = Wrong), (status = 404, body = Wrong)))]
async fn search(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Words(asked): Words<Asked>,
) -> Answer<Json<Vec<Found>>> {
    aside(move || {
        if asked.q.trim().is_empty() {
            return Err(Refusal::bad("say what to look for: ?q=…"));
        }
        let standing = app.look(&name)?.seen.standing;
        let mut timeline = standing.timeline.clone();
        let found = find(&app, &standing, &asked.q, asked.most.min(100))?;
        let chunks: Vec<ChunkId> = found.iter().map(|found| found.hit.chunk).collect();
        app.read(|store| bring(store, &name, &mut timeline, &chunks))?;
        let rows = found.iter().filter_map(|found| {
            let chunk = timeline.chunk(found.hit.chunk)?;
            Some(Found {
                chunk: Chunk::of(chunk, &timeline, 0),
                score: found.hit.score,
                because: found.because(3),
            })
        });
        Ok(Json(rows.collect()))
    })
    .await
}

/// What answers a query best in a conversation as it stands.
pub(crate) fn find(app: &App, standing: &Standing, text: &str, most: usize) -> Answer<Vec<rank::Found>> {
    let manner = Manner { most, ..standing.manner };
    let mut embedder = app.parts.embedder();
    let embedder = embedder.as_mut().map(|embedder| &mut **embedder as &mut dyn halo_core::seams::Embedder);
    let today = Some(jiff::Zoned::now().date());
    Ok(recall::search(&standing.index, embedder, text, today, manner)?)
}

/// What chunks say, and whether each is in the window.
pub(crate) fn texts_of(
    app: &App,
    name: &str,
    timeline: &Timeline,
    chunks: &[ChunkId],
) -> Answer<Vec<(String, bool)>> {
    let mut timeline = timeline.clone();
    app.read(|store| bring(store, name, &mut timeline, chunks))?;
    let text = |&id: &ChunkId| timeline.chunk(id).map(|chunk| (chunk.text().into_owned(), chunk.is_live()));
    Ok(chunks.iter().map(|id| text(id).unwrap_or_default()).collect())
}

/// Brings the tokens of chunks into memory, where they are not.
fn bring(
    store: &mut dyn Store,
    name: &str,
    timeline: &mut Timeline,
    chunks: &[ChunkId],
) -> Result<(), SeamError> {
    let away = chunks.iter().filter(|&&id| timeline.chunk(id).is_some_and(|c| !c.is_here()));
    let away: Vec<ChunkId> = away.copied().collect();
    store.bring(name, timeline, &away)
}

/// How each turn went: what came and left, what each part took, and the shape of the attention
#[utoipa::path(get, path = "/conversations/{name}/turns", params(("name" = String, Path)),
    responses((status = 200, body = Vec<TurnRecord>), (status = 404, body = Wrong)))]
async fn turns(State(app): State<Arc<App>>, Named(name): Named<String>) -> Answer<Json<Vec<TurnRecord>>> {
    aside(move || {
        app.look_at_begun(&name)?;
        let records = app.read(|store| store.records(&name, Kind::Turn))?;
        let mut turns: Vec<TurnRecord> = records
            .into_iter()
            .filter_map(|record| {
                let told: serde_json::Value = serde_json::from_str(&record.value).ok()?;
                Some(TurnRecord { turn: record.key.parse().ok()?, at: record.at, record: told })
            })
            .collect();
        turns.sort_by_key(|turn| turn.turn);
        Ok(Json(turns))
    })
    .await
}

/// What the model saw when it had said a turn, and what it said: the window as it was then
#[utoipa::path(get, path = "/conversations/{name}/past/{turn}", params(("name" = String, Path), ("turn" = u32, Path)),
    responses((status = 200, body = Past), (status = 400, body = Wrong), (status = 404, body = Wrong)))]
async fn past(State(app): State<Arc<App>>, Named((name, turn)): Named<(String, u32)>) -> Answer<Json<Past>> {
    aside(move || {
        let standing = app.look_at_begun(&name)?.seen.standing;
        if !standing.timeline.turns().iter().any(|known| known.id == TurnId(turn)) {
            return Err(Refusal::missing(format!("there is no turn {turn} in '{name}'")));
        }
        let (then, hidden) =
            app.read(|store| Ok((store.as_of(&name, TurnId(turn))?, grace::hidden(store, &name)?)))?;
        let live_now = |id: ChunkId| standing.timeline.chunk(id).is_some_and(|chunk| chunk.is_live());
        let gone =
            then.live_chunks().filter(|chunk| !live_now(chunk.id())).map(|chunk| chunk.id().to_string());
        Ok(Json(Past {
            turn,
            live: then.live_len() + standing.instructions.len(),
            gone: gone.collect(),
            chunks: wire::window(&then, Rank::Peak)
                .into_iter()
                .filter(|chunk| !hidden.keys().any(|id| id.to_string() == chunk.chunk))
                .collect(),
        }))
    })
    .await
}

/// What a token of the latest answer looked at when it was made: which paragraphs, and which words
#[utoipa::path(get, path = "/conversations/{name}/looks/{position}", params(("name" = String, Path), ("position" = u64, Path)),
    responses((status = 200, body = Attended), (status = 400, body = Wrong), (status = 404, body = Wrong)))]
async fn looks(
    State(app): State<Arc<App>>,
    Named((name, position)): Named<(String, u64)>,
) -> Answer<Json<Attended>> {
    aside(move || {
        let standing = app.look_at_begun(&name)?.seen.standing;
        let missing = "only what the latest answer looked at is kept, since the program was started";
        let look = app.looks.of(&name, Position(position)).ok_or_else(|| Refusal::missing(missing))?;
        let timeline = &standing.timeline;
        let tokens = look.tokens.iter().map(|&(position, share)| {
            let chunk = timeline.chunk_of(position);
            let here = chunk.is_some_and(|chunk| chunk.is_here());
            let text = timeline.token(position).filter(|_| here).map(|token| token.text.to_owned());
            AttendedToken {
                position: position.0,
                chunk: chunk.map(|chunk| chunk.id().to_string()).unwrap_or_default(),
                text: text.unwrap_or_default(),
                share,
            }
        });
        Ok(Json(Attended {
            turn: look.turn,
            text: look.text.clone(),
            instructions: look.instructions,
            itself: look.itself,
            chunks: look.chunks.iter().map(|(chunk, share)| (chunk.to_string(), *share)).collect(),
            tokens: tokens.collect(),
        }))
    })
    .await
}

/// The model's notes
#[utoipa::path(get, path = "/conversations/{name}/notes", params(("name" = String, Path)),
    responses((status = 200, body = Vec<Note>), (status = 404, body = Wrong)))]
async fn notes(State(app): State<Arc<App>>, Named(name): Named<String>) -> Answer<Json<Vec<Note>>> {
    aside(move || {
        app.look_at_begun(&name)?;
        let notes = app.read(|store| store.records(&name, Kind::Note))?;
        Ok(Json(notes.into_iter().map(|note| Note { file: note.key, text: note.value }).collect()))
    })
    .await
}
