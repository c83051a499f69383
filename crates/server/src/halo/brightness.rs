//! The brightest tokens of the context window.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use crate::app::App;
use crate::error::{ApiError, ApiResult, PathParams, QueryParams, spawn_blocking};
use crate::wire::ApiWindowBrightness;
use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use std::sync::Arc;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(get_brightness))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct BrightnessQuery {
    /// The part of the range from the dimmest to the brightest token, from 0 to 1: 0.2 lists the tokens in the top fifth
    #[serde(default = "one_fifth")]
    part: f64,
}

fn one_fifth() -> f64 {
    0.2
}

/// The brightest tokens of the context window, by chunk
#[utoipa::path(get, path = "/conversations/{name}/brightness", params(("name" = String, Path), BrightnessQuery),
    responses((status = 200, body = ApiWindowBrightness), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn get_brightness(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<BrightnessQuery>,
) -> ApiResult<Json<ApiWindowBrightness>> {
    spawn_blocking(move || {
        let timeline = &app.view_nonempty_conversation(&name)?.snapshot.state.timeline;
        Ok(Json(ApiWindowBrightness::new(timeline, query.part)))
    })
    .await
}
