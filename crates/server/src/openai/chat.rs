//! Chat. The conversation is named by a header, or known again by its history; only what is new of a request is said in it.

use super::place::{End, Placed, Plan, place};
use super::{Asked, Drawn, Told, error_event, now, reason, unique, usage};
use crate::answer::{Answer, Refusal, aside};
use crate::app::App;
use crate::kobold::whole;
use crate::raw::{self, Ask};
use crate::stops::Held;
use crate::stream::{channel, streamed};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use halo_core::attention::Watch;
use halo_core::change::DeleteReason;
use halo_core::seams::{Flow, Message, ModelStep, Sampling, SeamError};
use halo_core::token::{Role, TokenId};
use halo_engine::align::SentMessage;
use halo_engine::event::{Event, Summary};
use halo_engine::frame::Frame;
use halo_engine::host::{Desk, Teller};
use halo_engine::session::Session;
use halo_engine::turn::{AskedBy, Say};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Which conversation, where a client says so.
const NAMED: &str = "x-halo-conversation";

/// The name that stands for none: the request is answered, and nothing is stored.
const NOT_STORED: &str = "none";

#[derive(Deserialize)]
pub(super) struct Chat {
    messages: Vec<ChatMessage>,
    tool_choice: Option<Value>,
    /// Whether the request is to be stored; OpenAI's clients say so where it is not.
    store: Option<bool>,
    #[serde(flatten)]
    drawn: Drawn,
}

#[derive(Deserialize)]
struct ChatMessage {
    role: String,
    content: Option<Content>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    r#type: String,
    text: Option<String>,
}

/// What is wanted: the system prompt, if there is one, and what was said, the last of it now.
#[derive(Clone)]
pub(super) struct Wanted {
    pub system: Option<String>,
    pub messages: Vec<SentMessage>,
    /// System messages behind the last message: they are for the next answer.
    pub notes: Vec<SentMessage>,
    pub sampling: Sampling,
}

impl Wanted {
    /// Whether the last message is to be said, and not only known: then nothing stands behind it.
    fn says_last(&self) -> bool {
        self.notes.is_empty()
    }
}

impl Chat {
    fn wanted(&self, usual: &Sampling, most: usize) -> Answer<Wanted> {
        if self.tool_choice.as_ref().is_some_and(|choice| *choice == json!("required") || choice.is_object())
        {
            return Err(Refusal::bad(
                "the model cannot be made to call a function here: leave tool_choice out",
            ));
        }
        if self.messages.len() > most {
            let why =
                format!("a request holds at most {most} messages, and this has {}", self.messages.len());
            return Err(Refusal::bad(why));
        }
        let (mut system, mut messages): (Vec<String>, Vec<SentMessage>) = (Vec::new(), Vec::new());
        for (n, message) in self.messages.iter().enumerate() {
            let text = match &message.content {
                None => String::new(),
                Some(Content::Text(text)) => text.clone(),
                Some(Content::Parts(parts)) => {
                    if let Some(other) = parts.iter().find(|part| part.r#type != "text") {
                        let what = &other.r#type;
                        return Err(Refusal::bad(format!(
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
                    return Err(Refusal::bad(why));
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
            _ => return Err(Refusal::bad("the last message must be the user's, and say something")),
        }
        let system = (!system.is_empty()).then(|| system.join("\n\n"));
        Ok(Wanted { system, messages, notes, sampling: self.drawn.sampling(usual)? })
    }
}

pub(super) async fn completions(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Asked(chat): Asked<Chat>,
) -> Told<Response> {
    let wanted = chat.wanted(&app.parts.rules().sampling, app.limits.messages)?;
    app.room_in_line()?;
    let named = match headers.get(NAMED).map(|name| name.to_str()) {
        None => None,
        Some(Ok(name)) => Some(percent_decoded(name)),
        Some(Err(_)) => {
            return Err(Refusal::bad(format!("{NAMED} must be plain text, or percent-encoded")).into());
        }
    };
    if named.as_deref() == Some(NOT_STORED) || chat.store == Some(false) {
        return once(app, &chat, wanted).await;
    }
    let finder = Arc::clone(&app);
    let (desk, placed, wanted) = aside(move || {
        let placed = place(&finder, named.as_deref(), &wanted)?;
        Ok((finder.desk_or_new(&placed.name)?, placed, wanted))
    })
    .await?;
    let name = placed.name.clone();
    let (id, created, model) = (unique("chatcmpl"), now(), app.parts.info().name);
    if chat.drawn.stream {
        let counted = chat.drawn.stream_options.as_ref().is_some_and(|options| options.include_usage);
        let (out, ended, response) = channel(error_event);
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
                out.event(None, &told(json!({ "role": "assistant", "content": "" }), None));
            }
            if text.is_empty() {
                return out.flow();
            }
            out.event(None, &told(json!({ "content": text }), None))
        };
        say(&app, &desk, placed, wanted, hear, move |done| {
            let done = done.map(|Said { summary, prompt, rest, .. }| {
                if !rest.is_empty() {
                    end.event(None, &last(json!({ "content": rest }), None));
                }
                let mut finished = last(json!({}), Some(reason(summary.finish)));
                end.event(None, &finished);
                if counted {
                    finished["choices"] = json!([]);
                    finished["usage"] = usage(prompt, summary.tokens);
                    end.event(None, &finished);
                }
                end.line(None, "[DONE]");
            });
            let _ = ended.send(done);
        })?;
        let mut response = response.await?;
        tell_name(&mut response, &name);
        return Ok(response);
    }
    let (done, heard) = tokio::sync::oneshot::channel();
    // Dropped with this future: then whoever asked has gone.
    let alive = Alive(Arc::new(AtomicBool::new(true)));
    let there = Arc::clone(&alive.0);
    let hear = move |_: Option<&str>| if there.load(Ordering::SeqCst) { Flow::Continue } else { Flow::Stop };
    say(&app, &desk, placed, wanted, hear, move |told| drop(done.send(told)))?;
    let told =
        heard.await.map_err(|_| Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "the program is ending"))?;
    let Said { summary, prompt, text, .. } = told?;
    let message = json!({ "role": "assistant", "content": text, "refusal": null });
    let choice =
        json!({ "index": 0, "message": message, "logprobs": null, "finish_reason": reason(summary.finish) });
    let told = json!({
        "id": id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage(prompt, summary.tokens),
    });
    let mut response = Json(told).into_response();
    tell_name(&mut response, &name);
    Ok(response)
}

struct Alive(Arc<AtomicBool>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Tells the client which conversation it was.
fn tell_name(response: &mut Response, name: &str) {
    let plain: String = name.bytes().map(encoded).collect();
    if let Ok(value) = plain.parse() {
        response.headers_mut().insert(NAMED, value);
    }
}

fn encoded(byte: u8) -> String {
    match byte {
        b'%' => "%25".to_owned(),
        b' '..=b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    }
}

/// Text in which `%E2%82%AC` is `€`; what is no such thing is left as it is.
fn percent_decoded(text: &str) -> String {
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
async fn once(app: Arc<App>, chat: &Chat, wanted: Wanted) -> Told<Response> {
    let (preparing, sampling) = (Arc::clone(&app), wanted.sampling.clone());
    let ask = aside(move || {
        let mut model = preparing.parts.model()?;
        let rules = preparing.parts.rules();
        let system = wanted.system.unwrap_or(rules.system);
        let frame = Frame {
            template: model.info().template.clone(),
            system: system.clone(),
            dates: false,
            names: rules.names,
        };
        let mut ids: Vec<TokenId> = Vec::new();
        let mut read = |text: &str, special: bool| -> Result<(), SeamError> {
            ids.extend(model.tokenize(text, special)?.iter().map(|piece| piece.id));
            Ok(())
        };
        read(&frame.before_system(), true)?;
        read(system.trim(), false)?;
        let (mut before, mut messages) = (None, Vec::new());
        if !system.trim().is_empty() {
            messages.push(Message { role: Role::System, text: system.trim().to_owned() });
        }
        for SentMessage { role, text, .. } in wanted.messages.iter().chain(&wanted.notes) {
            read(&frame.opening(*role, before, None), true)?;
            read(text, false)?;
            before = Some(*role);
            messages.push(Message { role: *role, text: text.clone() });
        }
        read(&frame.opening(Role::Assistant, before, None), true)?;
        let (text, who) = (String::new(), "once".to_owned());
        Ok(Ask { ids, text, messages, sampling, watch: Watch::nothing(), who, aside: true })
    })
    .await?;
    let (id, created, model, prompt) = (unique("chatcmpl"), now(), app.parts.info().name, ask.ids.len());
    let told = move |kind: &str, what: Value, finish: Option<&str>| {
        let (object, key) = match kind {
            "delta" => ("chat.completion.chunk", "delta"),
            _ => ("chat.completion", "message"),
        };
        let choice = json!({ "index": 0, key: what, "logprobs": null, "finish_reason": finish });
        json!({ "id": id, "object": object, "created": created, "model": model, "choices": [choice] })
    };
    let mut response = if chat.drawn.stream {
        let counted = chat.drawn.stream_options.as_ref().is_some_and(|options| options.include_usage);
        let streaming = streamed(error_event, move |out| {
            let mut held = Held::new(&ask.sampling.stop);
            let mut tokens = 0;
            let finish = raw::ask(&app, &ask, &mut |_| out.flow(), &mut |step| {
                let ModelStep::Token(piece, _) = step else { return out.flow() };
                if tokens == 0 {
                    out.event(None, &told("delta", json!({ "role": "assistant", "content": "" }), None));
                }
                tokens += 1;
                match held.push(&piece.text) {
                    text if text.is_empty() => out.flow(),
                    text => out.event(None, &told("delta", json!({ "content": text }), None)),
                }
            })?;
            let rest = held.end();
            if !rest.is_empty() {
                out.event(None, &told("delta", json!({ "content": rest }), None));
            }
            let mut finished = told("delta", json!({}), Some(reason(finish)));
            out.event(None, &finished);
            if counted {
                finished["choices"] = json!([]);
                finished["usage"] = usage(prompt, tokens);
                out.event(None, &finished);
            }
            out.line(None, "[DONE]");
            Ok(())
        });
        streaming.await?
    } else {
        let (text, finish, tokens) = whole(app, ask, true).await?;
        let message = json!({ "role": "assistant", "content": text, "refusal": null });
        let mut answer = told("message", message, Some(reason(finish)));
        answer["usage"] = usage(prompt, tokens);
        Json(answer).into_response()
    };
    tell_name(&mut response, NOT_STORED);
    Ok(response)
}

/// What came of a turn.
struct Said {
    /// How it went.
    summary: Summary,
    /// How many tokens the model went on from.
    prompt: usize,
    /// All that was said, without what stops it.
    text: String,
    /// The end of it, which was held back until it was clear that it stops nothing.
    rest: String,
}

/// Says what is new, in the conversation's own thread. `hear` is given what may be passed on at each token, and nothing at
/// whatever else happens.
fn say(
    app: &Arc<App>,
    desk: &Desk,
    placed: Placed,
    wanted: Wanted,
    mut hear: impl FnMut(Option<&str>) -> Flow + Send + 'static,
    done: impl FnOnce(Answer<Said>) + Send + 'static,
) -> Answer<()> {
    let app = Arc::clone(app);
    let job = move |session: &mut Session, teller: &Teller<'_>| {
        let Placed { name, plan, on_its_way } = placed;
        let told = prepare(session, &wanted, &plan, &mut || match teller.is_stopped() {
            true => Flow::Stop,
            false => hear(None),
        });
        // Open pages show what the client has sent.
        teller.changed("told", Vec::new());
        let said = told.and_then(|()| {
            let mut held = Held::new(&wanted.sampling.stop);
            let (mut text, mut prompt) = (String::new(), 0);
            let mut asker = |event: &Event| match event {
                Event::Token { text: more, .. } => {
                    let more = held.push(more);
                    text.push_str(&more);
                    hear(Some(&more))
                }
                Event::Ready(upkeep) => {
                    prompt = upkeep.kept + upkeep.returned + upkeep.reread + upkeep.read;
                    hear(None)
                }
                _ => hear(None),
            };
            let who = (name, Some(wanted.sampling.clone()));
            let summary =
                teller.turn_after(session, who, &mut asker, |session| begin(session, &wanted, &plan))?;
            let rest = held.end();
            text.push_str(&rest);
            Ok(Said { summary, prompt, text, rest })
        });
        let said = said.map_err(Refusal::from);
        if let Ok(Said { summary, text, .. }) = &said {
            app.metrics.turn(&Ok(summary.clone()));
            if let Err(why) = session.key_answer(summary.turn, text) {
                tracing::warn!("the conversation may not be found again by its history: {why}");
            }
        }
        drop(on_its_way);
        done(said);
    };
    Ok(desk.send(job)?)
}

/// Brings a conversation to where the client is, as far as that replaces nothing and needs no model: its system prompt, and
/// messages that it has not heard. All of them are one commit.
fn prepare(
    session: &mut Session,
    wanted: &Wanted,
    plan: &Plan,
    go_on: &mut dyn FnMut() -> Flow,
) -> Result<(), SeamError> {
    let asides: Vec<&SentMessage> = plan.asides.iter().filter_map(|&n| wanted.messages.get(n)).collect();
    session.keep_asides(&asides)?;
    if let Some(system) = &wanted.system {
        session.instruct(system)?;
    }
    match plan.end {
        End::GoesOn if wanted.says_last() => tell_new(session, wanted, plan, go_on),
        _ => Ok(()),
    }
}

/// Appends the messages that are new, but for a last one that is to be said.
fn tell_new(
    session: &mut Session,
    wanted: &Wanted,
    plan: &Plan,
    go_on: &mut dyn FnMut() -> Flow,
) -> Result<(), SeamError> {
    let end = wanted.messages.len() - usize::from(wanted.says_last());
    let known = plan.known.min(end);
    let new = wanted.messages[known..end].iter().chain(&wanted.notes);
    let new: Vec<(Role, String)> = new.map(|message| (message.role, message.text.clone())).collect();
    if session.timeline().turns().iter().any(|turn| turn.role == Role::System) {
        let sent = wanted.messages[..known].iter().filter(|message| message.role == Role::System);
        let still: Vec<&str> = sent.map(|message| message.text.as_str()).collect();
        session.prune_system_messages(&still)?;
    }
    session.tell(&new, go_on)
}

/// What is said once the model is free: the end of the conversation is set aside only now, and only if it is still what the
/// client has seen.
fn begin(session: &mut Session, wanted: &Wanted, plan: &Plan) -> Result<Say, SeamError> {
    let message = wanted.messages.last().map(|message| message.text.clone()).unwrap_or_default();
    let still = match &plan.end {
        End::GoesOn => true,
        End::AnsweredAgain(turns) | End::Edited(turns) => session.ends_with(turns),
        End::Variant { replaces, .. } => session.ends_with(replaces),
    };
    let end = if still { &plan.end } else { &End::GoesOn };
    if wanted.says_last() {
        return match end {
            End::GoesOn => Ok(Say::Message(message)),
            End::AnsweredAgain(_) => Ok(Say::Again(AskedBy::Client)),
            End::Edited(_) => Ok(Say::Instead(message, AskedBy::Client)),
            End::Variant { chosen, replaces } => {
                session.choose_variant(chosen, replaces)?;
                tell_new(session, wanted, plan, &mut || Flow::Continue)?;
                Ok(Say::Message(message))
            }
        };
    }
    // The last message is appended with the system messages behind it, and all of that is answered.
    let mut known = plan.known;
    match end {
        End::GoesOn => {}
        End::AnsweredAgain(turns) => {
            session.set_aside(turns, DeleteReason::ClientRegenerated)?;
            known = wanted.messages.len();
        }
        End::Edited(turns) => session.set_aside(turns, DeleteReason::ClientEdited)?,
        End::Variant { chosen, replaces } => session.choose_variant(chosen, replaces)?,
    }
    let plan = Plan { known, ..plan.clone() };
    tell_new(session, wanted, &plan, &mut || Flow::Continue)?;
    Ok(Say::Nothing)
}
