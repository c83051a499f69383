//! What the tools do.

use super::McpServer;
use super::tools::{McpTool, ToolArguments};
use crate::app::App;
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use crate::search::{chunk_texts, search_index};
use crate::session_job::run_in_session;
use halo_core::model::StepFlow;
use halo_core::store::{ConversationSummary, RecordKind};
use halo_core::token::{ChunkId, Role, TurnId};
use halo_engine::event::ChangeAction;
use halo_engine::manual_edit::ManualEdit;
use halo_engine::tools::notes;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The result of a tool: for people, and for programs.
pub(super) struct ToolResult {
    pub text: String,
    pub structured: Value,
}

impl ToolResult {
    /// A result that is read by programs: its text is the JSON.
    fn data(structured: Value) -> Self {
        Self { text: structured.to_string(), structured }
    }
}

/// How long one search in all conversations takes, since each has to be loaded. The next search continues behind it.
const SEARCH_TIME: Duration = Duration::from_secs(10);

impl McpServer {
    pub(super) async fn run_tool(&self, tool: McpTool, values: &ToolArguments<'_>) -> ApiResult<ToolResult> {
        let (app, name) = (Arc::clone(&self.app), values.conversation());
        let (query, most) = (values.text("query"), values.number("most", 5));
        match tool {
            McpTool::Recall => spawn_blocking(move || recall(&app, &name, &query, most)).await,
            McpTool::RecallEverywhere => {
                let offset = values.number("offset", 0);
                spawn_blocking(move || recall_everywhere(&app, &query, most, offset)).await
            }
            McpTool::ListConversations => {
                let most = values.number("most", 50);
                spawn_blocking(move || list_conversations(&app, most)).await
            }
            McpTool::ReadChunk => {
                let chunk = parse_chunk(&values.text("chunk"))?;
                spawn_blocking(move || read_chunk(&app, &name, chunk)).await
            }
            McpTool::Remember => append_text(app, name, values.text("text")).await,
            McpTool::Pin => edit_chunk(app, name, ManualEdit::Pin, &values.text("chunk")).await,
            McpTool::Resurrect => edit_chunk(app, name, ManualEdit::Resurrect, &values.text("chunk")).await,
            McpTool::Notes => match values.optional_text("text") {
                Some(text) => write_notes(app, name, text).await,
                None => spawn_blocking(move || read_notes(&app, &name)).await,
            },
        }
    }
}

fn parse_chunk(chunk: &str) -> ApiResult<ChunkId> {
    chunk.parse().map_err(|e| ErrorResponse::bad_request(format!("{e}")))
}

fn recall(app: &App, name: &str, query: &str, most: usize) -> ApiResult<ToolResult> {
    let hits = find_hits(app, name, query, most)?;
    Ok(ToolResult::data(json!({ "hits": hits.into_iter().map(|(_, hit)| hit).collect::<Vec<_>>() })))
}

/// All conversations, the latest first.
pub(super) fn latest_conversations(app: &App) -> ApiResult<Vec<ConversationSummary>> {
    let mut conversations = app.with_reader(|store| store.list_conversations())?;
    conversations.sort_by_key(|conversation| std::cmp::Reverse(conversation.updated));
    Ok(conversations)
}

/// Searches all conversations, the latest first, as far as the time allows. The scores of different conversations can be compared: they are of the same query and the same
/// ranking.
fn recall_everywhere(app: &App, query: &str, most: usize, offset: usize) -> ApiResult<ToolResult> {
    let started = Instant::now();
    let conversations = latest_conversations(app)?;
    let (mut hits, mut searched) = (Vec::new(), 0);
    for conversation in conversations.iter().skip(offset) {
        if searched > 0 && started.elapsed() > SEARCH_TIME {
            break;
        }
        hits.extend(find_hits(app, &conversation.name, query, most)?);
        searched += 1;
    }
    hits.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let hits: Vec<Value> = hits.into_iter().take(most).map(|(_, hit)| hit).collect();
    let of = conversations.len();
    Ok(ToolResult::data(json!({ "hits": hits, "offset": offset, "searched": searched, "of": of })))
}

/// The chunks that have words of a query or are related enough to be resurrected, with their scores.
fn find_hits(app: &App, name: &str, query: &str, most: usize) -> ApiResult<Vec<(f64, Value)>> {
    if query.trim().is_empty() {
        return Err(ErrorResponse::bad_request("the query is empty"));
    }
    let state = app.view_conversation(name)?.snapshot.state;
    let mut ranked = search_index(app, &state, query, most)?;
    // In a short conversation a word says little, and the score of a chunk that has it can be below 0.
    ranked.retain(|ranked| state.search_options.is_relevant(ranked) || !ranked.matched_terms.is_empty());
    if ranked.is_empty() {
        return Ok(Vec::new());
    }
    let chunks: Vec<ChunkId> = ranked.iter().map(|ranked| ranked.hit.chunk).collect();
    let texts = chunk_texts(app, name, &state.timeline, &chunks)?;
    let times = turn_times(app, name)?;
    let hit = |(ranked, (text, live)): (&halo_recall::rank::RankedChunk, (String, bool))| {
        let hit = json!({
            "conversation": name,
            "chunk": ranked.hit.chunk.to_string(),
            "said_by": ranked.hit.chunk.role.name(),
            "when": times.get(&ranked.hit.chunk.turn),
            "in_window": live,
            "score": ranked.hit.score,
            "relevance": ranked.relevance,
            "reason": ranked.explain(3),
            "text": text,
        });
        (ranked.hit.score, hit)
    };
    Ok(ranked.iter().zip(texts).map(hit).collect())
}

/// When each turn was said.
fn turn_times(app: &App, name: &str) -> ApiResult<BTreeMap<TurnId, String>> {
    let times = app.with_reader(|store| store.turn_times(name))?;
    Ok(times.into_iter().map(|(turn, at)| (turn, timestamp(at))).collect())
}

/// A time in milliseconds since 1970, as RFC 3339.
pub(super) fn timestamp(millis: i64) -> String {
    jiff::Timestamp::from_millisecond(millis).map(|at| at.to_string()).unwrap_or_default()
}

fn list_conversations(app: &App, most: usize) -> ApiResult<ToolResult> {
    let conversations = latest_conversations(app)?;
    let of = conversations.len();
    let listed: Vec<Value> = (conversations.iter().take(most))
        .map(|conversation| {
            json!({
                "name": conversation.name,
                "turns": conversation.turns,
                "tokens": conversation.tokens,
                "in_window": conversation.live,
                "created": timestamp(conversation.created),
                "updated": timestamp(conversation.updated),
            })
        })
        .collect();
    Ok(ToolResult::data(json!({ "conversations": listed, "of": of })))
}

fn read_chunk(app: &App, name: &str, id: ChunkId) -> ApiResult<ToolResult> {
    let state = app.view_nonempty_conversation(name)?.snapshot.state;
    let missing = || ErrorResponse::not_found(format!("there is no paragraph {id} in '{name}'"));
    let chunk = state.timeline.chunk(id).filter(|chunk| !chunk.is_deleted()).ok_or_else(missing)?;
    let pinned = chunk.is_pinned();
    let message: Vec<String> = (state.timeline.turn_chunks(id.turn))
        .filter(|chunk| !chunk.is_deleted())
        .map(|chunk| chunk.id().to_string())
        .collect();
    let (text, live) = chunk_texts(app, name, &state.timeline, &[id])?.pop().unwrap_or_default();
    let when = turn_times(app, name)?.remove(&id.turn).unwrap_or_default();
    Ok(ToolResult::data(json!({
        "conversation": name,
        "chunk": id.to_string(),
        "said_by": id.role.name(),
        "when": when,
        "in_window": live,
        "pinned": pinned,
        "text": text,
        "message": message,
    })))
}

/// Stores a text as one message. The chunker cuts it into chunks, and what does not fit the context window is pruned.
async fn append_text(app: Arc<App>, name: String, text: String) -> ApiResult<ToolResult> {
    if text.trim().is_empty() {
        return Err(ErrorResponse::bad_request("the text is empty"));
    }
    let opened = name.clone();
    let handle = spawn_blocking(move || app.open_or_create_conversation("conversation", &opened)).await?;
    run_in_session(&handle, move |session| {
        session.append_messages(&[(Role::User, text)], &mut || StepFlow::Continue)?;
        let timeline = session.timeline();
        let turn = timeline.turns().last().map_or(TurnId(0), |turn| turn.id);
        let chunks: Vec<String> = timeline.turn_chunks(turn).map(|chunk| chunk.id().to_string()).collect();
        let text = format!("kept, in turn {}", turn.0);
        let structured = json!({ "conversation": name, "turn": turn.0, "chunks": chunks });
        Ok((ToolResult { text, structured }, Some((ChangeAction::MessagesAppended, Vec::new()))))
    })
    .await
}

async fn edit_chunk(app: Arc<App>, name: String, edit: ManualEdit, chunk: &str) -> ApiResult<ToolResult> {
    let chunk = parse_chunk(chunk)?;
    let opened = name.clone();
    let handle = spawn_blocking(move || app.open_conversation(&opened)).await?;
    run_in_session(&handle, move |session| {
        let result = session.apply_edit(edit, &[chunk])?;
        let chunks: Vec<ChunkId> = result.change.named_chunks().into_iter().collect();
        let names: Vec<String> = chunks.iter().map(ToString::to_string).collect();
        let text = format!("{}: {}", edit.result_text(), names.join(" "));
        let structured = json!({ "conversation": name, "chunks": names });
        Ok((ToolResult { text, structured }, Some((edit.action(), chunks))))
    })
    .await
}

fn read_notes(app: &App, name: &str) -> ApiResult<ToolResult> {
    app.view_conversation(name)?;
    let records = app.with_reader(|store| store.records(name, RecordKind::Note))?;
    let note = records.into_iter().find(|note| note.key == notes::NOTES_FILE);
    let text = note.map_or_else(|| "{}".to_owned(), |note| note.value);
    let structured = json!({ "conversation": name, "notes": text });
    Ok(ToolResult { text, structured })
}

async fn write_notes(app: Arc<App>, name: String, text: String) -> ApiResult<ToolResult> {
    if let Err(e) = serde_json::from_str::<Value>(&text) {
        return Err(ErrorResponse::bad_request(format!("the notes are not valid JSON: {e}")));
    }
    notes::check_size(&text)?;
    let opened = name.clone();
    let handle = spawn_blocking(move || app.open_conversation(&opened)).await?;
    run_in_session(&handle, move |session| {
        session.store().put_record(&name, RecordKind::Note, notes::NOTES_FILE, Some(&text))?;
        let result = ToolResult {
            text: "noted".to_owned(),
            structured: json!({ "conversation": name, "notes": text }),
        };
        Ok((result, Some((ChangeAction::NotesWritten, Vec::new()))))
    })
    .await
}
