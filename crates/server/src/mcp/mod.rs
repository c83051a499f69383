//! The Model Context Protocol, over HTTP or standard input and output: tools with which other programs store and recall text,
//! conversations as resources, and prompts.

mod calls;
mod prompts;
mod resources;
mod tools;

use crate::app::App;
use crate::error::{ErrorResponse, spawn_blocking};
use crate::request_log::{RequestLabel, log_mcp_mistake};
use axum::Router;
use axum::http::StatusCode;
use axum::http::request::Parts;
use halo_core::{Error, ErrorKind};
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, GetPromptRequestParams,
    GetPromptResponse, Implementation, InitializeResult, ListPromptsResult, ListResourceTemplatesResult,
    ListResourcesResult, ListToolsResult, PaginatedRequestParams, ReadResourceRequestParams,
    ReadResourceResponse, ReadResourceResult, ServerCapabilities,
};
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, RoleServer, ServerHandler, ServiceExt};
use std::sync::Arc;
use tools::{McpToolSpec, TOOLS, ToolArguments};

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

/// An error of the protocol. A client that asks for something that does not exist is told so by the code.
fn protocol_error(error: &ErrorResponse) -> ErrorData {
    let message = error.message().to_owned();
    match error.status() {
        StatusCode::NOT_FOUND => ErrorData::resource_not_found(message, None),
        status if status.is_client_error() => ErrorData::invalid_params(message, None),
        _ => ErrorData::internal_error(message, None),
    }
}

/// One line for each mistake of a client. On standard input there is no HTTP request, and so no address.
fn log_mistake(what: &str, kind: ErrorKind, context: &RequestContext<RoleServer>) {
    let label = context.extensions.get::<Parts>().and_then(|parts| parts.extensions.get::<RequestLabel>());
    log_mcp_mistake(what, kind, label);
}

impl ServerHandler for McpServer {
    fn get_info(&self) -> InitializeResult {
        let capabilities =
            ServerCapabilities::builder().enable_tools().enable_resources().enable_prompts().build();
        InitializeResult::new(capabilities)
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
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let values = request.arguments.unwrap_or_default();
        let Some(tool) = TOOLS.iter().find(|tool| tool.kind.name() == request.name) else {
            let names = TOOLS.map(|tool| tool.kind.name()).join(", ");
            let message = format!("there is no tool '{}'; use one of {names}", request.name);
            log_mistake("an unknown tool", ErrorKind::NotFound, &context);
            return Err(ErrorData::invalid_params(message, None));
        };
        let name = tool.kind.name();
        let arguments = ToolArguments::check(tool, &values).map_err(|message| {
            log_mistake(name, ErrorKind::InvalidInput, &context);
            ErrorData::invalid_params(message, None)
        })?;
        let result = match self.run_tool(tool.kind, &arguments).await {
            Ok(result) => {
                let mut success = CallToolResult::success(vec![ContentBlock::text(result.text)]);
                success.structured_content = Some(result.structured);
                success
            }
            Err(e) => {
                log_mistake(name, e.kind(), &context);
                CallToolResult::error(vec![ContentBlock::text(e.message())])
            }
        };
        Ok(result.into())
    }

    async fn list_resources(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let app = Arc::clone(&self.app);
        let listed = spawn_blocking(move || resources::list(&app)).await;
        listed.map(ListResourcesResult::with_all_items).map_err(|e| protocol_error(&e))
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(ListResourceTemplatesResult::with_all_items(vec![resources::template()]))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let app = Arc::clone(&self.app);
        let read = spawn_blocking(move || resources::read(&app, &request.uri)).await;
        let contents = read.map_err(|e| {
            log_mistake("resources/read", e.kind(), &context);
            protocol_error(&e)
        })?;
        Ok(ReadResourceResult::new(vec![contents]).into())
    }

    async fn list_prompts(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        Ok(ListPromptsResult::with_all_items(prompts::list()))
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        let prompt = prompts::get(&request.name, &request.arguments.unwrap_or_default());
        prompt.map(Into::into).map_err(|message| {
            log_mistake("prompts/get", ErrorKind::InvalidInput, &context);
            ErrorData::invalid_params(message, None)
        })
    }
}
