//! What a conversation has of its own instead of the settings: its system prompt, values of sampling, and who talks.

// utoipa's macro generates qualified paths.
#![allow(unused_qualifications)]

use crate::app::{App, check_conversation_name};
use crate::error::{ApiError, ApiResult, JsonBody, PathParams, spawn_blocking};
use crate::session_job::run_in_session;
use axum::Json;
use axum::extract::State;
use halo_engine::chat_options::{ChatOptions, Persona, SamplingOverrides};
use halo_engine::event::ChangeAction;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(get_chat_options))
        .routes(routes!(update_chat_options))
        .routes(routes!(choose_model))
}

/// The options of a conversation. What is null follows the settings.
#[derive(Default, Serialize, Deserialize, ToSchema)]
#[schema(as = ChatOptions)]
#[serde(default, deny_unknown_fields)]
struct ApiChatOptions {
    system_prompt: Option<String>,
    sampling: ApiSamplingOverrides,
    persona: ApiPersona,
}

/// Who talks in a conversation. What is set becomes part of the system prompt; in it, `{{user}}` and `{{char}}` stand for the
/// names.
#[derive(Default, Serialize, Deserialize, ToSchema)]
#[schema(as = Persona)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ApiPersona {
    user_name: String,
    model_name: String,
    /// What the model should know of the user.
    about_user: String,
}

/// Values of sampling that replace those of the settings.
#[derive(Default, Serialize, Deserialize, ToSchema)]
#[schema(as = SamplingOverrides)]
#[serde(default, deny_unknown_fields)]
struct ApiSamplingOverrides {
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    max_tokens: Option<usize>,
}

/// The options of a conversation, and what holds without them.
#[derive(Serialize, ToSchema)]
#[schema(as = ChatOptionsView)]
struct ApiChatOptionsView {
    own: ApiChatOptions,
    defaults: ApiChatOptions,
    /// Its own model; null: the one that the program was started with.
    model: Option<String>,
}

/// The model of a conversation.
#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = ModelChoice)]
#[serde(deny_unknown_fields)]
struct ApiModelChoice {
    /// The name of an installed model, or the address of a model server; null: the model that the program was started with.
    model: Option<String>,
}

impl From<ChatOptions> for ApiChatOptions {
    fn from(options: ChatOptions) -> Self {
        let SamplingOverrides { temperature, top_k, top_p, min_p, repetition_penalty, max_tokens } =
            options.sampling;
        let sampling =
            ApiSamplingOverrides { temperature, top_k, top_p, min_p, repetition_penalty, max_tokens };
        Self { system_prompt: options.system_prompt, sampling, persona: options.persona.into() }
    }
}

impl From<Persona> for ApiPersona {
    fn from(Persona { user_name, model_name, about_user }: Persona) -> Self {
        Self { user_name, model_name, about_user }
    }
}

impl From<ApiChatOptions> for ChatOptions {
    fn from(options: ApiChatOptions) -> Self {
        let ApiSamplingOverrides { temperature, top_k, top_p, min_p, repetition_penalty, max_tokens } =
            options.sampling;
        let sampling = SamplingOverrides { temperature, top_k, top_p, min_p, repetition_penalty, max_tokens };
        let ApiPersona { user_name, model_name, about_user } = options.persona;
        let persona = Persona { user_name, model_name, about_user };
        Self { system_prompt: options.system_prompt, sampling, persona, model: None }
    }
}

/// The system prompt and the sampling of a conversation, and those of the settings
#[utoipa::path(get, path = "/conversations/{name}/options", params(("name" = String, Path)),
    responses((status = 200, body = ApiChatOptionsView)))]
async fn get_chat_options(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
) -> ApiResult<Json<ApiChatOptionsView>> {
    spawn_blocking(move || {
        let own = app.with_reader(|store| ChatOptions::load(store, &name))?;
        let rules = app.backend.rules();
        let defaults = ChatOptions {
            system_prompt: Some(rules.system_prompt),
            sampling: SamplingOverrides {
                temperature: Some(rules.sampling.temperature),
                top_k: Some(rules.sampling.top_k),
                top_p: Some(rules.sampling.top_p),
                min_p: Some(rules.sampling.min_p),
                repetition_penalty: Some(rules.sampling.repetition_penalty),
                max_tokens: Some(rules.sampling.max_tokens),
            },
            persona: Persona::default(),
            model: None,
        };
        let model = own.model.clone();
        Ok(Json(ApiChatOptionsView { own: own.into(), defaults: defaults.into(), model }))
    })
    .await
}

/// Replaces the options of a conversation. Those of a new conversation are stored with its first message
#[utoipa::path(put, path = "/conversations/{name}/options", params(("name" = String, Path)), request_body = ApiChatOptions,
    responses((status = 200, body = ApiChatOptions), (status = 400, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn update_chat_options(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(options): JsonBody<ApiChatOptions>,
) -> ApiResult<Json<ApiChatOptions>> {
    let options = ChatOptions::from(options);
    // Nothing is opened for values that are refused.
    options.check()?;
    let opener = Arc::clone(&app);
    let handle = spawn_blocking(move || opener.open_or_create_conversation("name", &name)).await?;
    let options = run_in_session(&handle, move |session| {
        session.set_chat_options(&options)?;
        Ok((options, Some((ChangeAction::OptionsChanged, Vec::new()))))
    })
    .await?;
    Ok(Json(options.into()))
}

/// Sets the model of a conversation. It is loaded first: a model that cannot be loaded changes nothing. The text of the
/// conversation is tokenized for it with the next message, and none of it is lost
#[utoipa::path(put, path = "/conversations/{name}/model", params(("name" = String, Path)), request_body = ApiModelChoice,
    responses((status = 200, body = ApiModelChoice), (status = 400, body = ApiError), (status = 403, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError), (status = 422, body = ApiError), (status = 503, body = ApiError)))]
async fn choose_model(
    State(app): State<Arc<App>>,
    PathParams(name): PathParams<String>,
    JsonBody(choice): JsonBody<ApiModelChoice>,
) -> ApiResult<Json<ApiModelChoice>> {
    check_conversation_name("name", &name)?;
    spawn_blocking(move || {
        let model = choice.model.as_deref().map(str::trim);
        if let Some(model) = model {
            app.backend.load_model(model)?;
        }
        app.host.close_unused(&name)?;
        app.backend.choose_model(&name, model)?;
        app.drop_snapshot(&name);
        Ok(Json(ApiModelChoice { model: model.map(str::to_owned) }))
    })
    .await
}
