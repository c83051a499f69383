//! Chat. The conversation is named by a header, or known again by its history; only what is new of a request is said in it.

use super::dispatch::{DispatchPlan, DispatchedChat, TailAction, dispatch_chat};
use super::{
    OpenAiJson, OpenAiResult, SamplingParams, error_event, finish_reason, response_id, unix_seconds, usage,
};
use crate::app::App;
use crate::completion::{self, CompletionRequest};
use crate::error::{ApiResult, ErrorResponse, spawn_blocking};
use crate::kobold::complete_text;
use crate::sse::{spawn_sse_stream, sse_channel};
use crate::stop_sequences::StopSequenceFilter;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::change::DeleteReason;
use halo_core::model::{ModelStep, PromptMessage, Sampling, StepFlow};
use halo_core::token::{Role, TokenId};
use halo_engine::align::SentMessage;
use halo_engine::chat_format::ChatFormatter;
use halo_engine::event::{ChangeAction, Event, TurnSummary};
use halo_engine::host::{ConversationHandle, JobContext};
use halo_engine::session::Session;
use halo_engine::turn::{EditAuthor, TurnInput};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Which conversation, where a client says so.
const CONVERSATION_HEADER: &str = "x-halo-conversation";

/// The name that stands for none: the request is answered, and nothing is stored.
const NOT_STORED: &str = "none";

#[derive(Deserialize)]
pub(super) struct OpenAiChatRequest {
    messages: Vec<OpenAiChatMessage>,
    tool_choice: Option<Value>,
    /// Whether the request is to be stored; OpenAI's clients say so where it is not.
    store: Option<bool>,
    #[serde(flatten)]
    params: SamplingParams,
}

#[derive(Deserialize)]
struct OpenAiChatMessage {
    role: String,
    content: Option<OpenAiChatContent>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OpenAiChatContent {
    Text(String),
    Parts(Vec<OpenAiContentPart>),
}

#[derive(Deserialize)]
struct OpenAiContentPart {
    r#type: String,
    text: Option<String>,
}

/// What is wanted: the system prompt, if there is one, and what was said, the last of it now.
#[derive(Clone)]
pub(super) struct ParsedChatRequest {
    pub system: Option<String>,
    pub messages: Vec<SentMessage>,
    /// System messages behind the last message: they are for the next answer.
    pub trailing_system: Vec<SentMessage>,
    pub sampling: Sampling,
}

impl ParsedChatRequest {
    /// Whether the last message is to be said, and not only known: then nothing stands behind it.
    fn appends_last_message(&self) -> bool {
        self.trailing_system.is_empty()
    }
}

impl OpenAiChatRequest {
    fn parse(&self, usual: &Sampling, most: usize) -> ApiResult<ParsedChatRequest> {
        if self.tool_choice.as_ref().is_some_and(|choice| *choice == json!("required") || choice.is_object())
        {
            return Err(ErrorResponse::bad_request(
                "the model cannot be made to call a function here: leave tool_choice out",
            ));
        }
        if self.messages.len() > most {
            let why =
                format!("a request holds at most {most} messages, and this has {}", self.messages.len());
            return Err(ErrorResponse::bad_request(why));
        }
        let (mut system, mut messages): (Vec<String>, Vec<SentMessage>) = (Vec::new(), Vec::new());
        for (n, message) in self.messages.iter().enumerate() {
            let text = match &message.content {
                None => String::new(),
                Some(OpenAiChatContent::Text(text)) => text.clone(),
                Some(OpenAiChatContent::Parts(parts)) => {
                    if let Some(other) = parts.iter().find(|part| part.r#type != "text") {
                        let what = &other.r#type;
                        return Err(ErrorResponse::bad_request(format!(
                            "messages[{n}]: this model reads text, and no {what}"
                        )));
                    }
                    parts.iter().filter_map(|part| part.text.as_deref()).collect()
                }
            };
            let role = match message.role.as_str() {
                "system" | "developer" => Role::System,
                "user" | "tool" | "function" => Role::User,
                "assistant" => Role::Assistant,
                other => {
                    let why = format!(
                        "messages[{n}]: the role cannot be '{other}': system, user, assistant or tool"
                    );
                    return Err(ErrorResponse::bad_request(why));
                }
            };
            if text.trim().is_empty() {
                continue;
            }
            // What stands before everything is the system prompt; a system message further on stays where it is.
            match role {
                Role::System if messages.is_empty() => system.push(text),
                role => messages.push(SentMessage::new(role, text)),
            }
        }
        let end =
            messages.iter().rposition(|message| message.role != Role::System).map_or(0, |last| last + 1);
        let notes = messages.split_off(end);
        match messages.last() {
            Some(SentMessage { role: Role::User, .. }) => {}
            // Somebody else is to speak next, as in a group: a system message says who.
            Some(_) if !notes.is_empty() => {}
            _ => {
                return Err(ErrorResponse::bad_request(
                    "the last message must be the user's, and say something",
                ));
            }
        }
        let system = (!system.is_empty()).then(|| system.join("\n\n"));
        Ok(ParsedChatRequest {
            system,
            messages,
            trailing_system: notes,
            sampling: self.params.sampling(usual)?,
        })
    }
}

pub(super) async fn completions(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    OpenAiJson(chat): OpenAiJson<OpenAiChatRequest>,
) -> OpenAiResult<Response> {
    let wanted = chat.parse(&app.backend.rules().sampling, app.limits.max_messages)?;
    app.check_queue_capacity()?;
    let named = match headers.get(CONVERSATION_HEADER).map(|name| name.to_str()) {
        None => None,
        Some(Ok(name)) => Some(percent_decode(name)),
        Some(Err(_)) => {
            return Err(ErrorResponse::bad_request(format!(
                "{CONVERSATION_HEADER} must be plain text, or percent-encoded"
            ))
            .into());
        }
    };
    if named.as_deref() == Some(NOT_STORED) || chat.store == Some(false) {
        return complete_unstored(app, &chat, wanted).await;
    }
    let finder = Arc::clone(&app);
    let (desk, placed, wanted) = spawn_blocking(move || {
        let placed = dispatch_chat(&finder, named.as_deref(), &wanted)?;
        Ok((finder.open_or_create_conversation(&placed.name)?, placed, wanted))
    })
    .await?;
    let name = placed.name.clone();
    let (id, created, model) = (response_id("chatcmpl"), unix_seconds(), app.backend.model_info().name);
    if chat.params.stream {
        let counted = chat.params.stream_options.as_ref().is_some_and(|options| options.include_usage);
        let (out, ended, response) = sse_channel(error_event);
        let told = move |delta: Value, finish: Option<&str>| {
            let choice = json!({ "index": 0, "delta": delta, "logprobs": null, "finish_reason": finish });
            json!({ "id": id, "object": "chat.completion.chunk", "created": created, "model": model, "choices": [choice] })
        };
        let out = Arc::new(out);
        let (end, last) = (Arc::clone(&out), told.clone());
        let mut begun = false;
        let hear = move |text: Option<&str>| {
            let Some(text) = text else { return out.flow() };
            if !std::mem::replace(&mut begun, true) {
                out.send_json(None, &told(json!({ "role": "assistant", "content": "" }), None));
            }
            if text.is_empty() {
                return out.flow();
            }
            out.send_json(None, &told(json!({ "content": text }), None))
        };
        run_chat_turn(&app, &desk, placed, wanted, hear, move |done| {
            let done =
                done.map(|ChatTurnResult { summary, prompt_tokens: prompt, withheld: rest, .. }| {
                    if !rest.is_empty() {
                        end.send_json(None, &last(json!({ "content": rest }), None));
                    }
                    let mut finished = last(json!({}), Some(finish_reason(summary.finish)));
                    end.send_json(None, &finished);
                    if counted {
                        finished["choices"] = json!([]);
                        finished["usage"] = usage(prompt, summary.tokens);
                        end.send_json(None, &finished);
                    }
                    end.send_text(None, "[DONE]");
                });
            let _ = ended.send(done);
        })?;
        let mut response = response.await?;
        set_conversation_header(&mut response, &name);
        return Ok(response);
    }
    let (done, heard) = tokio::sync::oneshot::channel();
    // Dropped with this future: then whoever asked has gone.
    let alive = DisconnectGuard(Arc::new(AtomicBool::new(true)));
    let there = Arc::clone(&alive.0);
    let hear =
        move |_: Option<&str>| if there.load(Ordering::SeqCst) { StepFlow::Continue } else { StepFlow::Stop };
    run_chat_turn(&app, &desk, placed, wanted, hear, move |told| drop(done.send(told)))?;
    let told = heard
        .await
        .map_err(|_| ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "the program is ending"))?;
    let ChatTurnResult { summary, prompt_tokens: prompt, text, .. } = told?;
    let message = json!({ "role": "assistant", "content": text, "refusal": null });
    let choice = json!({ "index": 0, "message": message, "logprobs": null, "finish_reason": finish_reason(summary.finish) });
    let told = json!({
        "id": id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage(prompt, summary.tokens),
    });
    let mut response = Json(told).into_response();
    set_conversation_header(&mut response, &name);
    Ok(response)
}

struct DisconnectGuard(Arc<AtomicBool>);

impl Drop for DisconnectGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Tells the client which conversation it was.
fn set_conversation_header(response: &mut Response, name: &str) {
    let plain: String = name.bytes().map(percent_encode_byte).collect();
    if let Ok(value) = plain.parse() {
        response.headers_mut().insert(CONVERSATION_HEADER, value);
    }
}

fn percent_encode_byte(byte: u8) -> String {
    match byte {
        b'%' => "%25".to_owned(),
        b' '..=b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    }
}

/// Text in which `%E2%82%AC` is `€`; what is no such thing is left as it is.
fn percent_decode(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let [first, more @ ..] = rest {
        let digits = more.get(..2).and_then(|two| str::from_utf8(two).ok());
        match digits.filter(|_| *first == b'%').and_then(|two| u8::from_str_radix(two, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &more[2..];
            }
            None => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

/// Answers without a conversation: nothing is stored, and nothing is kept of it afterwards.
async fn complete_unstored(
    app: Arc<App>,
    chat: &OpenAiChatRequest,
    wanted: ParsedChatRequest,
) -> OpenAiResult<Response> {
    let (preparing, sampling) = (Arc::clone(&app), wanted.sampling.clone());
    let ask = spawn_blocking(move || {
        let mut model = preparing.backend.model()?;
        let rules = preparing.backend.rules();
        let system = wanted.system.unwrap_or(rules.system_prompt);
        let frame = ChatFormatter {
            template: model.info().template.clone(),
            system_prompt: system.clone(),
            show_dates: false,
            names: rules.speaker_names,
        };
        let mut ids: Vec<TokenId> = Vec::new();
        let mut read = |text: &str, special: bool| -> Result<(), Error> {
            ids.extend(model.tokenize(text, special)?.iter().map(|piece| piece.id));
            Ok(())
        };
        read(&frame.system_header(), true)?;
        read(system.trim(), false)?;
        let (mut before, mut messages) = (None, Vec::new());
        if !system.trim().is_empty() {
            messages.push(PromptMessage { role: Role::System, text: system.trim().to_owned() });
        }
        for SentMessage { role, text, .. } in wanted.messages.iter().chain(&wanted.trailing_system) {
            read(&frame.turn_header(*role, before, None), true)?;
            read(text, false)?;
            before = Some(*role);
            messages.push(PromptMessage { role: *role, text: text.clone() });
        }
        read(&frame.turn_header(Role::Assistant, before, None), true)?;
        let (text, who) = (String::new(), "once".to_owned());
        Ok(CompletionRequest {
            ids,
            text,
            messages,
            sampling,
            attention: AttentionRequest::none(),
            client: who,
            ephemeral: true,
        })
    })
    .await?;
    let (id, created, model, prompt) =
        (response_id("chatcmpl"), unix_seconds(), app.backend.model_info().name, ask.ids.len());
    let told = move |kind: &str, what: Value, finish: Option<&str>| {
        let (object, key) = match kind {
            "delta" => ("chat.completion.chunk", "delta"),
            _ => ("chat.completion", "message"),
        };
        let choice = json!({ "index": 0, key: what, "logprobs": null, "finish_reason": finish });
        json!({ "id": id, "object": object, "created": created, "model": model, "choices": [choice] })
    };
    let mut response = if chat.params.stream {
        let counted = chat.params.stream_options.as_ref().is_some_and(|options| options.include_usage);
        let streaming = spawn_sse_stream(error_event, move |out| {
            let mut held = StopSequenceFilter::new(&ask.sampling.stop);
            let mut tokens = 0;
            let finish = completion::complete(&app, &ask, &mut |_| out.flow(), &mut |step| {
                let ModelStep::Token(piece, _) = step else { return out.flow() };
                if tokens == 0 {
                    out.send_json(None, &told("delta", json!({ "role": "assistant", "content": "" }), None));
                }
                tokens += 1;
                match held.push(&piece.text) {
                    text if text.is_empty() => out.flow(),
                    text => out.send_json(None, &told("delta", json!({ "content": text }), None)),
                }
            })?;
            let rest = held.finish();
            if !rest.is_empty() {
                out.send_json(None, &told("delta", json!({ "content": rest }), None));
            }
            let mut finished = told("delta", json!({}), Some(finish_reason(finish)));
            out.send_json(None, &finished);
            if counted {
                finished["choices"] = json!([]);
                finished["usage"] = usage(prompt, tokens);
                out.send_json(None, &finished);
            }
            out.send_text(None, "[DONE]");
            Ok(())
        });
        streaming.await?
    } else {
        let (text, finish, tokens) = complete_text(app, ask, true).await?;
        let message = json!({ "role": "assistant", "content": text, "refusal": null });
        let mut answer = told("message", message, Some(finish_reason(finish)));
        answer["usage"] = usage(prompt, tokens);
        Json(answer).into_response()
    };
    set_conversation_header(&mut response, NOT_STORED);
    Ok(response)
}

/// What came of a turn.
struct ChatTurnResult {
    summary: TurnSummary,
    /// How many tokens the model went on from.
    prompt_tokens: usize,
    /// All that was said, without what stops it.
    text: String,
    /// The end of it, which was held back until it was clear that it stops nothing.
    withheld: String,
}

/// Says what is new, in the conversation's own thread. `hear` is given what may be passed on at each token, and nothing at
/// whatever else happens.
fn run_chat_turn(
    app: &Arc<App>,
    desk: &ConversationHandle,
    placed: DispatchedChat,
    wanted: ParsedChatRequest,
    mut hear: impl FnMut(Option<&str>) -> StepFlow + Send + 'static,
    done: impl FnOnce(ApiResult<ChatTurnResult>) + Send + 'static,
) -> ApiResult<()> {
    let app = Arc::clone(app);
    let job = move |session: &mut Session, teller: &JobContext<'_>| {
        let DispatchedChat { name, plan, in_flight: on_its_way } = placed;
        let told = sync_history(session, &wanted, &plan, &mut || match teller.is_cancelled() {
            true => StepFlow::Stop,
            false => hear(None),
        });
        // Open pages show what the client has sent.
        teller.announce_change(ChangeAction::MessagesAppended, Vec::new());
        let said = told.and_then(|()| {
            let mut held = StopSequenceFilter::new(&wanted.sampling.stop);
            let (mut text, mut prompt) = (String::new(), 0);
            let mut asker = |event: &Event| match event {
                Event::Token { text: more, .. } => {
                    let more = held.push(more);
                    text.push_str(&more);
                    hear(Some(&more))
                }
                Event::Prefilled(upkeep) => {
                    prompt = upkeep.reused + upkeep.restored + upkeep.recomputed + upkeep.prefilled;
                    hear(None)
                }
                _ => hear(None),
            };
            let who = (name, Some(wanted.sampling.clone()));
            let summary = teller
                .run_turn_with(session, who, &mut asker, |session| begin_turn(session, &wanted, &plan))?;
            let rest = held.finish();
            text.push_str(&rest);
            Ok(ChatTurnResult { summary, prompt_tokens: prompt, text, withheld: rest })
        });
        let said = said.map_err(ErrorResponse::from);
        if let Ok(ChatTurnResult { summary, text, .. }) = &said {
            app.metrics.record_turn(&Ok(summary.clone()));
            if let Err(why) = session.store_answer_key(summary.turn, text) {
                tracing::warn!("the conversation may not be found again by its history: {why}");
            }
        }
        drop(on_its_way);
        done(said);
    };
    Ok(desk.submit(job)?)
}

/// Brings a conversation to where the client is, as far as that replaces nothing and needs no model: its system prompt, and
/// messages that it has not heard. All of them are one commit.
fn sync_history(
    session: &mut Session,
    wanted: &ParsedChatRequest,
    plan: &DispatchPlan,
    go_on: &mut dyn FnMut() -> StepFlow,
) -> Result<(), Error> {
    let asides: Vec<&SentMessage> = plan.substitutes.iter().filter_map(|&n| wanted.messages.get(n)).collect();
    session.store_summaries(&asides)?;
    if let Some(system) = &wanted.system {
        session.set_system_prompt(system)?;
    }
    match plan.tail {
        TailAction::Continue if wanted.appends_last_message() => {
            append_new_messages(session, wanted, plan, go_on)
        }
        _ => Ok(()),
    }
}

/// Appends the messages that are new, but for a last one that is to be said.
fn append_new_messages(
    session: &mut Session,
    wanted: &ParsedChatRequest,
    plan: &DispatchPlan,
    go_on: &mut dyn FnMut() -> StepFlow,
) -> Result<(), Error> {
    let end = wanted.messages.len() - usize::from(wanted.appends_last_message());
    let known = plan.known_messages.min(end);
    let new = wanted.messages[known..end].iter().chain(&wanted.trailing_system);
    let new: Vec<(Role, String)> = new.map(|message| (message.role, message.text.clone())).collect();
    if session.timeline().turns().iter().any(|turn| turn.role == Role::System) {
        let sent = wanted.messages[..known].iter().filter(|message| message.role == Role::System);
        let still: Vec<&str> = sent.map(|message| message.text.as_str()).collect();
        session.prune_system_messages(&still)?;
    }
    session.append_messages(&new, go_on)
}

/// What is said once the model is free: the end of the conversation is set aside only now, and only if it is still what the
/// client has seen.
fn begin_turn(
    session: &mut Session,
    wanted: &ParsedChatRequest,
    plan: &DispatchPlan,
) -> Result<TurnInput, Error> {
    let message = wanted.messages.last().map(|message| message.text.clone()).unwrap_or_default();
    let still = match &plan.tail {
        TailAction::Continue => true,
        TailAction::Regenerate(turns) | TailAction::EditLast(turns) => session.ends_with_turns(turns),
        TailAction::ChooseVariant { replaces, .. } => session.ends_with_turns(replaces),
    };
    let end = if still { &plan.tail } else { &TailAction::Continue };
    if wanted.appends_last_message() {
        return match end {
            TailAction::Continue => Ok(TurnInput::Message(message)),
            TailAction::Regenerate(_) => Ok(TurnInput::Regenerate(EditAuthor::Client)),
            TailAction::EditLast(_) => Ok(TurnInput::EditLast(message, EditAuthor::Client)),
            TailAction::ChooseVariant { chosen, replaces } => {
                session.choose_variant(chosen, replaces)?;
                append_new_messages(session, wanted, plan, &mut || StepFlow::Continue)?;
                Ok(TurnInput::Message(message))
            }
        };
    }
    // The last message is appended with the system messages behind it, and all of that is answered.
    let mut known = plan.known_messages;
    match end {
        TailAction::Continue => {}
        TailAction::Regenerate(turns) => {
            session.move_to_variant(turns, DeleteReason::ClientRegenerated)?;
            known = wanted.messages.len();
        }
        TailAction::EditLast(turns) => session.move_to_variant(turns, DeleteReason::ClientEdited)?,
        TailAction::ChooseVariant { chosen, replaces } => session.choose_variant(chosen, replaces)?,
    }
    let plan = DispatchPlan { known_messages: known, ..plan.clone() };
    append_new_messages(session, wanted, &plan, &mut || StepFlow::Continue)?;
    Ok(TurnInput::AnswerLast)
}
