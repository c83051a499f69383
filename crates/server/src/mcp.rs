//! The Model Context Protocol, over HTTP or standard input and output: tools with which other programs store and recall text.

use crate::app::App;
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use crate::search::{chunk_texts, search_index};
use crate::session_job::run_in_session;
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

#[derive(Clone)]
struct McpServer {
    app: Arc<App>,
}

pub(crate) fn routes(app: &Arc<App>) -> Router<Arc<App>> {
    let server = McpServer { app: Arc::clone(app) };
    // Access control has checked the host and the origin.
    let config = StreamableHttpServerConfig::default()
        .disable_allowed_hosts()
        .with_max_request_body_bytes(app.limits.max_body_bytes)
        .with_json_response(true)
        .with_legacy_session_mode(false);
    let sessions = Arc::new(LocalSessionManager::default());
    let service = StreamableHttpService::new(move || Ok(server.clone()), sessions, config);
    Router::new().route_service("/mcp", service)
}

/// Serves on standard input and output until the client closes them.
pub fn serve_mcp_stdio(app: &Arc<App>) -> Result<(), Error> {
    let failed = |operation: &str, message: String| Error::internal(operation, message);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|e| failed("starting the MCP server", e.to_string()))?;
    let result = runtime.block_on(async {
        let server = McpServer { app: Arc::clone(app) };
        let service = server.serve(rmcp::transport::stdio()).await.map_err(|e| e.to_string())?;
        service.waiting().await.map_err(|e| e.to_string()).map(drop)
    });
    app.shutdown();
    runtime.shutdown_background();
    result.map_err(|message| failed("serving the Model Context Protocol", message))
}

struct McpToolSpec {
    name: &'static str,
    description: &'static str,
    effect: ToolEffect,
    arguments: &'static [McpArgument],
    required: &'static [&'static str],
}

/// What a tool does to what is stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ToolEffect {
    Reads,
    Adds,
    /// It changes flags of text; a second call changes nothing.
    Marks,
    /// What was there before is lost.
    Replaces,
}

struct McpArgument {
    name: &'static str,
    kind: &'static str,
    description: &'static str,
}

const fn argument(name: &'static str, kind: &'static str, description: &'static str) -> McpArgument {
    McpArgument { name, kind, description }
}

const CONVERSATION: McpArgument =
    argument("conversation", "string", "Name of the conversation; default 'main'");
const CHUNK: McpArgument =
    argument("chunk", "string", "Id of the paragraph, such as u4.0, as recall returns it");

const TOOLS: [McpToolSpec; 5] = [
    McpToolSpec {
        name: "recall",
        description: "Searches a conversation by meaning and by words, in and out of the context window.",
        effect: ToolEffect::Reads,
        arguments: &[
            argument("query", "string", "What to search for"),
            CONVERSATION,
            argument("most", "integer", "Maximum number of paragraphs, 1 to 50; default 5"),
        ],
        required: &["query"],
    },
    McpToolSpec {
        name: "remember",
        description: "Stores a text in a conversation, word for word, so that it can be recalled later.",
        effect: ToolEffect::Adds,
        arguments: &[argument("text", "string", "The text to store"), CONVERSATION],
        required: &["text"],
    },
    McpToolSpec {
        name: "pin",
        description: "Pins a paragraph, so that it is never pruned from the context window of the conversation.",
        effect: ToolEffect::Marks,
        arguments: &[CHUNK, CONVERSATION],
        required: &["chunk"],
    },
    McpToolSpec {
        name: "resurrect",
        description: "Puts a pruned paragraph back at its own position in the context window, pinned, with the paragraphs that it \
                      depends on.",
        effect: ToolEffect::Marks,
        arguments: &[CHUNK, CONVERSATION],
        required: &["chunk"],
    },
    McpToolSpec {
        name: "notes",
        description: "Reads the notes of a conversation, a JSON document; with 'text', replaces them.",
        effect: ToolEffect::Replaces,
        arguments: &[argument("text", "string", "The new notes, as JSON"), CONVERSATION],
        required: &[],
    },
];

impl McpToolSpec {
    fn tool(&self) -> Tool {
        let property = |argument: &McpArgument| {
            let schema = json!({ "type": argument.kind, "description": argument.description });
            (argument.name.to_owned(), schema)
        };
        let properties: JsonObject = self.arguments.iter().map(property).collect();
        let schema = json!({ "type": "object", "properties": properties, "required": self.required });
        let schema = schema.as_object().cloned().unwrap_or_default();
        let mut tool = Tool::new(self.name, self.description, Arc::new(schema));
        let mut hints = ToolAnnotations::new();
        hints.read_only_hint = Some(self.effect == ToolEffect::Reads);
        hints.destructive_hint = Some(self.effect == ToolEffect::Replaces);
        hints.idempotent_hint = Some(self.effect != ToolEffect::Adds);
        hints.open_world_hint = Some(false);
        tool.annotations = Some(hints);
        tool
    }
}

impl ServerHandler for McpServer {
    fn get_info(&self) -> InitializeResult {
        InitializeResult::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("halo", env!("CARGO_PKG_VERSION")))
            .with_instructions(
                "A memory that stores every word. Call recall before you answer questions about earlier conversations; call \
                 remember for what must not be lost.",
            )
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(TOOLS.iter().map(McpToolSpec::tool).collect()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let values = request.arguments.unwrap_or_default();
        let Some(tool) = TOOLS.iter().find(|tool| tool.name == request.name) else {
            let names = TOOLS.map(|tool| tool.name).join(", ");
            let message = format!("there is no tool '{}'; use one of {names}", request.name);
            return Err(ErrorData::invalid_params(message, None));
        };
        let is_missing = |name: &&&str| !values.get(**name).is_some_and(Value::is_string);
        if let Some(missing) = tool.required.iter().find(is_missing) {
            let message = format!("{} needs the argument '{missing}', a string", tool.name);
            return Err(ErrorData::invalid_params(message, None));
        }
        let result = match self.run_tool(tool.name, &values).await {
            Ok(text) => CallToolResult::success(vec![ContentBlock::text(text)]),
            Err(e) => CallToolResult::error(vec![ContentBlock::text(e.message())]),
        };
        Ok(result.into())
    }
}

impl McpServer {
    async fn run_tool(&self, tool: &str, values: &JsonObject) -> ApiResult<String> {
        let text = |key: &str| values.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let name =
            Some(text("conversation")).filter(|name| !name.is_empty()).unwrap_or_else(|| "main".into());
        match tool {
            "recall" => {
                let limit = values.get("most").and_then(Value::as_u64).unwrap_or(5).clamp(1, 50) as usize;
                self.recall(name, text("query"), limit).await
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

    async fn recall(&self, name: String, query: String, limit: usize) -> ApiResult<String> {
        let app = Arc::clone(&self.app);
        spawn_blocking(move || {
            if query.trim().is_empty() {
                return Err(ErrorResponse::bad_request("the query is empty"));
            }
            let state = app.view_conversation(&name)?.snapshot.state;
            let ranked = search_index(&app, &state, &query, limit)?;
            let chunks: Vec<ChunkId> = ranked.iter().map(|ranked| ranked.hit.chunk).collect();
            let texts = chunk_texts(&app, &name, &state.timeline, &chunks)?;
            let results: Vec<Value> = (ranked.iter().zip(texts))
                .map(|(ranked, (text, live))| {
                    json!({
                        "chunk": ranked.hit.chunk.to_string(),
                        "said_by": ranked.hit.chunk.role.name(),
                        "in_window": live,
                        "score": ranked.hit.score,
                        "text": text,
                    })
                })
                .collect();
            Ok(json!(results).to_string())
        })
        .await
    }

    async fn append_text(&self, name: String, text: String) -> ApiResult<String> {
        let app = Arc::clone(&self.app);
        let handle = spawn_blocking(move || app.open_or_create_conversation("conversation", &name)).await?;
        run_in_session(&handle, move |session| {
            if text.trim().is_empty() {
                return Err(ErrorResponse::bad_request("the text is empty"));
            }
            session.append_messages(&[(Role::User, text)], &mut || StepFlow::Continue)?;
            let turn = session.timeline().turns().last().map_or(0, |turn| turn.id.0);
            Ok((format!("kept, in turn {turn}"), Some((ChangeAction::MessagesAppended, Vec::new()))))
        })
        .await
    }

    async fn edit_chunk(&self, name: String, edit: ManualEdit, chunk: &str) -> ApiResult<String> {
        let chunk: ChunkId = chunk.parse().map_err(|e| ErrorResponse::bad_request(format!("{e}")))?;
        let app = Arc::clone(&self.app);
        let handle = spawn_blocking(move || app.open_conversation(&name)).await?;
        run_in_session(&handle, move |session| {
            let result = session.apply_edit(edit, &[chunk])?;
            let chunks: Vec<ChunkId> = result.change.named_chunks().into_iter().collect();
            let names: Vec<String> = chunks.iter().map(ToString::to_string).collect();
            Ok((format!("{}: {}", edit.result_text(), names.join(" ")), Some((edit.action(), chunks))))
        })
        .await
    }

    async fn read_or_write_notes(&self, name: String, text: Option<String>) -> ApiResult<String> {
        if let Some(e) = text.as_ref().and_then(|text| serde_json::from_str::<Value>(text).err()) {
            return Err(ErrorResponse::bad_request(format!("the notes are not valid JSON: {e}")));
        }
        text.as_deref().map_or(Ok(()), notes::check_size)?;
        let app = Arc::clone(&self.app);
        let Some(text) = text else {
            return spawn_blocking(move || {
                app.view_conversation(&name)?;
                let records = app.with_reader(|store| store.records(&name, RecordKind::Note))?;
                let note = records.into_iter().find(|note| note.key == notes::NOTES_FILE);
                Ok(note.map_or_else(|| "{}".to_owned(), |note| note.value))
            })
            .await;
        };
        let opened_name = name.clone();
        let handle = spawn_blocking(move || app.open_conversation(&opened_name)).await?;
        run_in_session(&handle, move |session| {
            session.store().put_record(&name, RecordKind::Note, notes::NOTES_FILE, Some(&text))?;
            Ok(("noted".to_owned(), Some((ChangeAction::NotesWritten, Vec::new()))))
        })
        .await
    }
}
