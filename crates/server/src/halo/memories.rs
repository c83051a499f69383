//! What the model remembers, and the user's hand on it.

// The macro that writes the API down qualifies what it need not.
#![allow(unused_qualifications)]

use super::talk::within;
use crate::answer::{Answer, Body, Named, Refusal, Words, Wrong, aside};
use crate::app::App;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use halo_engine::memory::{self, Memory, Order};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(memories)).routes(routes!(change)).routes(routes!(delete))
}

/// What is remembered of a conversation.
#[derive(Serialize, ToSchema)]
struct Memories {
    /// Whether memories are formed.
    enabled: bool,
    /// Those that there are: the latest first, or those that were asked for, the best first.
    memories: Vec<Remembered>,
}

/// A memory.
#[derive(Serialize, ToSchema)]
struct Remembered {
    /// Its number.
    id: u64,
    /// The first turn that it is of.
    from: u32,
    /// The last.
    to: u32,
    /// What it says.
    text: String,
    /// The model that wrote it.
    model: String,
    /// When, in milliseconds since 1970.
    at: i64,
    /// Whether it looks back over everything, and so stands in nothing's place.
    reflection: bool,
    /// Whether it stands before others.
    pinned: bool,
    /// Whether it is kept and not used.
    resting: bool,
    /// Whether it was changed by hand.
    edited: bool,
    /// Whether it stands in the window now.
    stands: bool,
    /// Memories that it contradicts.
    conflicts: Vec<u64>,
}

/// What a memory is to be; what is left out stays as it is.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Changed {
    /// What it is to say.
    text: Option<String>,
    /// Whether it is to stand before others.
    pinned: Option<bool>,
    /// Whether it is to be kept and not used.
    resting: Option<bool>,
}

#[derive(Deserialize, IntoParams)]
struct Asked {
    /// Only those that have to do with these words
    q: Option<String>,
}

/// What is remembered
#[utoipa::path(get, path = "/conversations/{name}/memories", params(("name" = String, Path), Asked),
    responses((status = 200, body = Memories), (status = 404, body = Wrong)))]
async fn memories(
    State(app): State<Arc<App>>,
    Named(name): Named<String>,
    Words(asked): Words<Asked>,
) -> Answer<Json<Memories>> {
    aside(move || {
        let standing = app.look(&name)?.seen.standing;
        let told = |memory: &Memory| Remembered {
            id: memory.id,
            from: memory.span.from.0,
            to: memory.span.to.0,
            text: memory.text.clone(),
            model: memory.model.clone(),
            at: memory.at,
            reflection: memory.reflection,
            pinned: memory.pinned,
            resting: memory.resting,
            edited: memory.edited,
            stands: standing.stands.iter().any(|stand| stand.id == memory.id),
            conflicts: memory.conflicts.iter().copied().collect(),
        };
        let asked = asked.q.filter(|words| !words.trim().is_empty());
        let memories = match asked {
            None => standing.memories.iter().rev().map(told).collect(),
            Some(words) => {
                let found = super::find(&app, &standing, &words, standing.manner.most)?;
                let hits: Vec<_> = found.iter().map(|found| (found.hit.chunk, found.hit.score)).collect();
                let ranked = memory::rank(&standing.memories, &words, &hits);
                ranked.iter().map(|(_, memory)| told(memory)).collect()
            }
        };
        Ok(Json(Memories { enabled: standing.remembers, memories }))
    })
    .await
}

/// Changes a memory: what it says, whether it stands before others, whether it is used
#[utoipa::path(put, path = "/conversations/{name}/memories/{memory}", params(("name" = String, Path), ("memory" = u64, Path)), request_body = Changed,
    responses((status = 204), (status = 400, body = Wrong), (status = 404, body = Wrong), (status = 422, body = Wrong)))]
async fn change(
    State(app): State<Arc<App>>,
    Named((name, memory)): Named<(String, u64)>,
    Body(changed): Body<Changed>,
) -> Answer<StatusCode> {
    let Changed { text, pinned, resting } = changed;
    let orders = [text.map(Order::Edit), pinned.map(Order::Pin), resting.map(Order::Rest)];
    order(&app, name, memory, orders.into_iter().flatten().collect()).await
}

/// Deletes a memory; what it is of stays
#[utoipa::path(delete, path = "/conversations/{name}/memories/{memory}", params(("name" = String, Path), ("memory" = u64, Path)),
    responses((status = 204), (status = 404, body = Wrong)))]
async fn delete(
    State(app): State<Arc<App>>,
    Named((name, memory)): Named<(String, u64)>,
) -> Answer<StatusCode> {
    order(&app, name, memory, vec![Order::Delete]).await
}

async fn order(app: &Arc<App>, name: String, memory: u64, orders: Vec<Order>) -> Answer<StatusCode> {
    let opener = Arc::clone(app);
    let desk = aside(move || opener.desk(&name)).await?;
    within(&desk, move |session| {
        if !session.memories().iter().any(|known| known.id == memory) {
            return Err(Refusal::missing(format!("there is no memory {memory}")));
        }
        for order in orders {
            session.order_memory(memory, order)?;
        }
        Ok(((), Some(("remembered", Vec::new()))))
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}
