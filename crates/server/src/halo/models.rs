//! Which models this program can use, and whether a model server answers.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use crate::app::App;
use crate::error::{ApiError, ApiResult, ErrorResponse, JsonBody, spawn_blocking};
use crate::model_choice::{ModelChoices, ModelServerReport};
use crate::wire::{ApiEventKind, ApiModelDownload};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(list_models))
        .routes(routes!(test_model_server))
        .routes(routes!(download_model))
}

/// The model in use, the model files of this machine, and the models that can be downloaded
#[utoipa::path(get, path = "/models", responses((status = 200, body = ModelChoices)))]
async fn list_models(State(app): State<Arc<App>>) -> ApiResult<Json<ModelChoices>> {
    spawn_blocking(move || Ok(Json(app.backend.model_choices()?))).await
}

/// The address of a model server.
#[derive(Deserialize, ToSchema)]
#[schema(as = ModelServerAddress)]
struct ApiModelServerAddress {
    /// The address of the server, such as `http://127.0.0.1:11434`.
    address: String,
}

/// Asks a model server for its models. Only addresses are tested that the setting `model.servers` allows: by
/// default those of this machine
#[utoipa::path(post, path = "/models/test", request_body = ApiModelServerAddress,
    responses((status = 200, body = ModelServerReport), (status = 400, body = ApiError), (status = 403, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn test_model_server(
    State(app): State<Arc<App>>,
    JsonBody(request): JsonBody<ApiModelServerAddress>,
) -> ApiResult<Json<ModelServerReport>> {
    spawn_blocking(move || Ok(Json(app.backend.test_model_server(request.address.trim())?))).await
}

/// A model of the catalogue.
#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = CatalogueModel)]
#[serde(deny_unknown_fields)]
struct ApiCatalogueModel {
    /// Its name in the catalogue, such as `smollm2`.
    name: String,
}

/// The models that are being downloaded.
#[derive(Default)]
pub(crate) struct RunningDownloads(Mutex<BTreeSet<String>>);

/// Begins to download a model of the catalogue, as `halo models pull` does; events tell its progress and its end. A download that
/// was interrupted is resumed
#[utoipa::path(post, path = "/models/download", request_body = ApiCatalogueModel,
    responses((status = 202, body = ApiCatalogueModel), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError)))]
async fn download_model(
    State(app): State<Arc<App>>,
    JsonBody(model): JsonBody<ApiCatalogueModel>,
) -> ApiResult<(StatusCode, Json<ApiCatalogueModel>)> {
    spawn_blocking(move || {
        let name = model.name.clone();
        let choices = app.backend.model_choices()?;
        let mut offered = choices.downloadable.iter().chain(&choices.downloadable_embedder);
        if !offered.any(|choice| choice.name == name) {
            let message =
                format!("there is no model {name} to download; /models lists those of the catalogue");
            return Err(ErrorResponse::not_found(message));
        }
        if !app.downloads.0.lock().insert(name.clone()) {
            return Err(ErrorResponse::new(
                StatusCode::CONFLICT,
                format!("{name} is being downloaded already"),
            ));
        }
        let failed = |e: std::io::Error| ErrorResponse::new(StatusCode::INTERNAL_SERVER_ERROR, e.to_string());
        let running = RunningDownload { app, name };
        std::thread::Builder::new().name("download".into()).spawn(move || running.run()).map_err(failed)?;
        Ok((StatusCode::ACCEPTED, Json(model)))
    })
    .await
}

/// A download, which is no longer listed as running when it is dropped: also when it panics, or is not started.
struct RunningDownload {
    app: Arc<App>,
    name: String,
}

impl RunningDownload {
    fn run(self) {
        let result =
            self.app.backend.download_model(&self.name, &|done, all| self.publish(done, all, false, None));
        self.app.downloads.0.lock().remove(&self.name);
        self.publish(0, 0, true, result.err().map(|error| error.to_string()));
    }

    fn publish(&self, done: u64, all: u64, finished: bool, error: Option<String>) {
        let download = ApiModelDownload { name: self.name.clone(), done, all, finished, error };
        self.app.events.publish("", self.app.host.next_event_number(), ApiEventKind::ModelDownload(download));
    }
}

impl Drop for RunningDownload {
    fn drop(&mut self) {
        self.app.downloads.0.lock().remove(&self.name);
    }
}
