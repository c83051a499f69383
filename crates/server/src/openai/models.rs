//! The list of models, which has one.

use super::protocol::OpenAiResult;
use crate::app::App;
use crate::error::ErrorResponse;
use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) async fn list_models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [model_object(&app.backend.model_info().name)] }))
}

fn model_object(name: &str) -> Value {
    json!({ "id": name, "object": "model", "created": 0, "owned_by": "halo" })
}

pub(super) async fn get_model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> OpenAiResult<Json<Value>> {
    let loaded = app.backend.model_info().name;
    if name != loaded {
        let message = format!("there is no model '{name}'; this server has {loaded}");
        return Err(ErrorResponse::not_found(message).into());
    }
    Ok(Json(model_object(&loaded)))
}
