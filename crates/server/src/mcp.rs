//! The Model Context Protocol: other programs' models remember and recall through Halo, over HTTP or standard input and output.

use crate::app::App;
use crate::error::{ApiResult, ErrorResponse};
use crate::halo::{chunk_texts, run_in_session, search_index};
use axum::Router;
use halo_core::Error;
use halo_core::model::StepFlow;
use halo_core::store::RecordKind;
use halo_core::token::{ChunkId, Role};
use halo_engine::event::ChangeAction;
use halo_engine::manual_edit::ManualEdit;
use halo_engine::tools::notes;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation, InitializeResult,
    JsonObject, ListToolsResult, PaginatedRequestParams, ServerCapabilities, Tool, ToolAnnotations,
};
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, RoleServer, ServerHandler, ServiceExt};
use serde_json::{Value, json};
use std::sync::Arc;

/// What a client of the protocol talks to.
#[derive(Clone)]
struct McpServer {
    app: Arc<App>,
}

pub(crate) fn routes(app: &Arc<App>) -> Router<Arc<App>> {
    let memory = McpServer { app: Arc::clone(app) };
    // Hosts and origins are looked at before anything comes here.
    let config = StreamableHttpServerConfig::default()
        .disable_allowed_hosts()
        .with_max_request_body_bytes(app.limits.max_body_bytes)
        .with_json_response(true)
        .with_legacy_session_mode(false);
    let sessions = Arc::new(LocalSessionManager::default());
    let service = StreamableHttpService::new(move || Ok(memory.clone()), sessions, config);
    Router::new().route_service("/mcp", service)
}

/// Speaks the protocol on standard input and output, until the other side has heard enough.
pub fn serve_mcp_stdio(app: &Arc<App>) -> Result<(), Error> {
    let failed = |what: &str, why: String| Error::internal(what, why);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|e| failed("starting", e.to_string()))?;
    let done = runtime.block_on(async {
        let memory = McpServer { app: Arc::clone(app) };
        let served = memory.serve(rmcp::transport::stdio()).await.map_err(|e| e.to_string())?;
        served.waiting().await.map_err(|e| e.to_string()).map(drop)
    });
    app.shutdown();
    runtime.shutdown_background();
    done.map_err(|why| failed("speaking the Model Context Protocol", why))
}

/// The tools: name, what it does, whether it only looks, and what it takes, with which of that must be there.
type McpToolSpec = (
    &'static str,
    &'static str,
    bool,
    &'static [(&'static str, &'static str, &'static str)],
    &'static [&'static str],
);

const CONVERSATION_ARGUMENT: (&str, &str, &str) =
    ("conversation", "string", "Which conversation; 'main' if none is named");

const TOOLS: [McpToolSpec; 5] = [
    (
        "recall",
        "Finds what was said in a conversation, by meaning and by words, however long ago, and says why it was found.",
        true,
        &[
            ("query", "string", "What to look for"),
            CONVERSATION_ARGUMENT,
            ("most", "integer", "How many paragraphs at most, 1 to 50; 5 if it is not said"),
        ],
        &["query"],
    ),
    (
        "remember",
        "Keeps a text in a conversation, word for word, so that it can be recalled and comes back when it matters.",
        false,
        &[("text", "string", "What to keep"), CONVERSATION_ARGUMENT],
        &["text"],
    ),
    (
        "pin",
        "Makes a paragraph as bright as can be, so that it never leaves the window of the conversation.",
        false,
        &[("chunk", "string", "Its name, such as u4.0, as recall tells it"), CONVERSATION_ARGUMENT],
        &["chunk"],
    ),
    (
        "resurrect",
        "Calls a paragraph that has left the window back to its own place, pinned, with what it belongs to.",
        false,
        &[("chunk", "string", "Its name, such as u4.0, as recall tells it"), CONVERSATION_ARGUMENT],
        &["chunk"],
    ),
    (
        "notes",
        "Reads the notes of a conversation, a JSON document; with 'text', writes them.",
        false,
        &[("text", "string", "The new notes, as JSON"), CONVERSATION_ARGUMENT],
        &[],
    ),
];

fn tool_list() -> Vec<Tool> {
    let described = |(name, about, looks, takes, must): &McpToolSpec| {
        let properties: JsonObject = takes
            .iter()
            .map(|(name, kind, about)| ((*name).to_owned(), json!({ "type": kind, "description": about })))
            .collect();
        let schema = json!({ "type": "object", "properties": properties, "required": must });
        let schema = schema.as_object().cloned().unwrap_or_default();
        let mut tool = Tool::new(*name, *about, Arc::new(schema));
        let mut hints = ToolAnnotations::new();
        hints.read_only_hint = Some(*looks);
        hints.destructive_hint = Some(false);
        hints.open_world_hint = Some(false);
        tool.annotations = Some(hints);
        tool
    };
    TOOLS.iter().map(described).collect()
}

impl ServerHandler for McpServer {
    fn get_info(&self) -> InitializeResult {
        InitializeResult::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("halo", env!("CARGO_PKG_VERSION")))
            .with_instructions(
                "A memory that keeps every word. Recall before you answer what may have been spoken of before; remember what \
                 must not be lost.",
            )
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(tool_list()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let values = request.arguments.unwrap_or_default();
        let known = TOOLS.iter().find(|(name, ..)| *name == request.name);
        let Some((name, _, _, _, must)) = known else {
            let names: Vec<&str> = TOOLS.iter().map(|(name, ..)| *name).collect();
            let why = format!("there is no tool '{}': there are {}", request.name, names.join(", "));
            return Err(ErrorData::invalid_params(why, None));
        };
        if let Some(missing) = must.iter().find(|wanted| !values.get(**wanted).is_some_and(Value::is_string))
        {
            return Err(ErrorData::invalid_params(format!("{name} needs '{missing}', a text"), None));
        }
        let done = match self.run_tool(name, &values).await {
            Ok(told) => CallToolResult::success(vec![ContentBlock::text(told)]),
            Err(why) => CallToolResult::error(vec![ContentBlock::text(why.message())]),
        };
        Ok(done.into())
    }
}

impl McpServer {
    async fn run_tool(&self, tool: &str, values: &JsonObject) -> ApiResult<String> {
        let text = |key: &str| values.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let name =
            Some(text("conversation")).filter(|name| !name.is_empty()).unwrap_or_else(|| "main".into());
        match tool {
            "recall" => {
                let most = values.get("most").and_then(Value::as_u64).unwrap_or(5).clamp(1, 50) as usize;
                self.recall(name, text("query"), most).await
            }
            "remember" => self.append_text(name, text("text")).await,
            "pin" => self.edit_chunk(name, ManualEdit::Pin, &text("chunk")).await,
            "resurrect" => self.edit_chunk(name, ManualEdit::Resurrect, &text("chunk")).await,
            _ => {
                self.read_or_write_notes(name, values.get("text").and_then(Value::as_str).map(str::to_owned))
                    .await
            }
        }
    }

    async fn recall(&self, name: String, query: String, most: usize) -> ApiResult<String> {
        let app = Arc::clone(&self.app);
        crate::error::spawn_blocking(move || {
            if query.trim().is_empty() {
                return Err(ErrorResponse::bad_request("say what to look for"));
            }
            let standing = app.view_conversation(&name)?.snapshot.state;
            let found = search_index(&app, &standing, &query, most)?;
            let chunks: Vec<ChunkId> = found.iter().map(|found| found.hit.chunk).collect();
            let texts = chunk_texts(&app, &name, &standing.timeline, &chunks)?;
            let told: Vec<Value> = (found.iter().zip(texts))
                .map(|(found, (text, live))| {
                    json!({
                        "chunk": found.hit.chunk.to_string(),
                        "said_by": found.hit.chunk.role.name(),
                        "in_window": live,
                        "score": found.hit.score,
                        "text": text,
                    })
                })
                .collect();
            Ok(json!(told).to_string())
        })
        .await
    }

    async fn append_text(&self, name: String, text: String) -> ApiResult<String> {
        let app = Arc::clone(&self.app);
        let desk = crate::error::spawn_blocking(move || app.open_or_create_conversation(&name)).await?;
        run_in_session(&desk, move |session| {
            if text.trim().is_empty() {
                return Err(ErrorResponse::bad_request("the text is empty: say what to keep"));
            }
            session.append_messages(&[(Role::User, text)], &mut || StepFlow::Continue)?;
            let turn = session.timeline().turns().last().map_or(0, |turn| turn.id.0);
            Ok((format!("kept, in turn {turn}"), Some((ChangeAction::MessagesAppended, Vec::new()))))
        })
        .await
    }

    async fn edit_chunk(&self, name: String, signal: ManualEdit, chunk: &str) -> ApiResult<String> {
        let chunk: ChunkId = chunk.parse().map_err(|e| ErrorResponse::bad_request(format!("{e}")))?;
        let app = Arc::clone(&self.app);
        let desk = crate::error::spawn_blocking(move || app.open_conversation(&name)).await?;
        run_in_session(&desk, move |session| {
            let sent = session.apply_edit(signal, &[chunk])?;
            let chunks: Vec<ChunkId> = sent.change.named_chunks().into_iter().collect();
            let names: Vec<String> = chunks.iter().map(ToString::to_string).collect();
            Ok((format!("{}: {}", signal.result_text(), names.join(" ")), Some((signal.action(), chunks))))
        })
        .await
    }

    async fn read_or_write_notes(&self, name: String, text: Option<String>) -> ApiResult<String> {
        if let Some(why) = text.as_ref().and_then(|text| serde_json::from_str::<Value>(text).err()) {
            return Err(ErrorResponse::bad_request(format!("the notes are no JSON: {why}")));
        }
        let (app, named) = (Arc::clone(&self.app), name.clone());
        let Some(text) = text else {
            return crate::error::spawn_blocking(move || {
                app.view_conversation(&named)?;
                let kept = app.with_reader(|store| store.records(&named, RecordKind::Note))?;
                let note = kept.into_iter().find(|note| note.key == notes::NOTES_FILE);
                Ok(note.map_or_else(|| "{}".to_owned(), |note| note.value))
            })
            .await;
        };
        let desk = crate::error::spawn_blocking(move || app.open_conversation(&named)).await?;
        run_in_session(&desk, move |session| {
            session.store().put_record(&name, RecordKind::Note, notes::NOTES_FILE, Some(&text))?;
            Ok(("noted".to_owned(), Some((ChangeAction::NotesWritten, Vec::new()))))
        })
        .await
    }
}
