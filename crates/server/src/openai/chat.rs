//! Chat. The conversation is named by a header, or known again by its history; only what is new of a request is said in it.

use super::align::{self, COMPARED, HEARD, Heard, sum};
use super::{Asked, Drawn, Told, now, reason, unique, usage};
use crate::answer::{Answer, Refusal, aside};
use crate::app::App;
use crate::stops::Held;
use crate::stream::channel;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use halo_core::seams::{Flow, Kind, Sampling, SeamError};
use halo_core::token::{Role, TurnId};
use halo_engine::event::{Event, Summary};
use halo_engine::host::{Desk, Teller};
use halo_engine::session::Session;
use halo_engine::turn::Say;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Which conversation, where a client says so.
const NAMED: &str = "x-halo-conversation";

#[derive(Deserialize)]
pub(super) struct Chat {
    messages: Vec<Message>,
    tool_choice: Option<Value>,
    #[serde(flatten)]
    drawn: Drawn,
}

#[derive(Deserialize)]
struct Message {
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

/// What is wanted: the instructions, if there are any, and what was said, the last of it now.
struct Wanted {
    system: Option<String>,
    messages: Vec<(Role, String)>,
    sampling: Sampling,
}

impl Chat {
    fn wanted(&self, usual: &Sampling) -> Answer<Wanted> {
        if self.tool_choice.as_ref().is_some_and(|choice| *choice == json!("required") || choice.is_object())
        {
            return Err(Refusal::bad(
                "the model cannot be made to call a function here: leave tool_choice out",
            ));
        }
        let (mut system, mut messages): (Vec<String>, Vec<(Role, String)>) = (Vec::new(), Vec::new());
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
            match message.role.as_str() {
                "system" | "developer" => system.push(text),
                "user" | "tool" | "function" => messages.push((Role::User, text)),
                "assistant" => messages.push((Role::Assistant, text)),
                other => {
                    let why = format!(
                        "messages[{n}]: the role cannot be '{other}': system, user, assistant or tool"
                    );
                    return Err(Refusal::bad(why));
                }
            }
        }
        messages.retain(|(_, text)| !text.trim().is_empty());
        match messages.last() {
            Some((Role::User, _)) => {}
            _ => return Err(Refusal::bad("the last message must be the user's, and say something")),
        }
        let system = (!system.is_empty()).then(|| system.join("\n\n"));
        Ok(Wanted { system, messages, sampling: self.drawn.sampling(usual)? })
    }
}

pub(super) async fn completions(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Asked(chat): Asked<Chat>,
) -> Told<Response> {
    let wanted = chat.wanted(&app.parts.rules().sampling)?;
    app.room_in_line()?;
    let named = match headers.get(NAMED).map(|name| name.to_str()) {
        None => None,
        Some(Ok(name)) => Some(percent_decoded(name)),
        Some(Err(_)) => {
            return Err(Refusal::bad(format!("{NAMED} must be plain text, or percent-encoded")).into());
        }
    };
    let finder = Arc::clone(&app);
    let (desk, name, wanted) = aside(move || {
        let name = match named {
            Some(name) => name,
            None => which(&finder, &wanted)?,
        };
        Ok((finder.desk_or_new(&name)?, name, wanted))
    })
    .await?;
    let (id, created, model) = (unique("chatcmpl"), now(), app.parts.info().name);
    if chat.drawn.stream {
        let counted = chat.drawn.stream_options.as_ref().is_some_and(|options| options.include_usage);
        let (out, failed, response) = channel();
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
        say(&app, &desk, &name, wanted, hear, move |done| match done {
            Err(why) => drop(failed.send(why)),
            Ok(Said { summary, prompt, rest, .. }) => {
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
            }
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
    say(&app, &desk, &name, wanted, hear, move |told| drop(done.send(told)))?;
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

/// The conversation that a request goes on with, or the name of a new one.
fn which(app: &App, wanted: &Wanted) -> Answer<String> {
    let system = wanted.system.as_deref().map_or(0, |system| sum(Role::System, system));
    let sent: Vec<u64> = wanted.messages.iter().map(|(role, text)| sum(*role, text)).collect();
    let (best, taken) = app.read(|store| {
        let (mut best, mut taken) = (None, Vec::new());
        for known in store.conversations()? {
            let records = store.records(&known.name, Kind::Setting)?;
            let heard = records.iter().find(|record| record.key == HEARD);
            let heard: Option<Heard> = heard.and_then(|record| serde_json::from_str(&record.value).ok());
            if let Some(heard) = heard.filter(|heard| heard.system == system) {
                let sums: Vec<u64> = heard.messages.iter().map(|(_, sum)| *sum).collect();
                let fit = align::fit(&sums, &sent);
                let key = fit.map(|fit| (fit.compared, std::cmp::Reverse(fit.after), known.used));
                if key.is_some() && best.as_ref().is_none_or(|(other, _)| *other < key) {
                    best = Some((key, known.name.clone()));
                }
            }
            taken.push(known.name);
        }
        Ok((best, taken))
    })?;
    if let Some((_, name)) = best {
        return Ok(name);
    }
    let words: String = wanted.messages[0].1.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let words: String = words.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(48).collect();
    let numbered = (2..).map(|n| format!("{words} {n}"));
    let name = std::iter::once(words.clone()).chain(numbered).find(|name| !taken.contains(name));
    Ok(name.unwrap_or(words))
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
    name: &str,
    wanted: Wanted,
    mut hear: impl FnMut(Option<&str>) -> Flow + Send + 'static,
    done: impl FnOnce(Answer<Said>) + Send + 'static,
) -> Answer<()> {
    let (app, name) = (Arc::clone(app), name.to_owned());
    let job = move |session: &mut Session, teller: &Teller<'_>| {
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
        let spoken = teller.turn_after(session, who, &mut asker, |session| {
            let say = begin(session, &wanted)?;
            // Whoever looks sees what the client has told and taken back.
            teller.changed("told", Vec::new());
            Ok(say)
        });
        let told = spoken.map_err(Refusal::from).map(|summary| {
            let rest = held.end();
            text.push_str(&rest);
            Said { summary, prompt, text, rest }
        });
        if let Ok(Said { summary, text, .. }) = &told {
            app.metrics.turn(&Ok(summary.clone()));
            if let Err(why) = remember(session, &wanted, summary.turn, text) {
                tracing::warn!("the conversation may not be known again: {why}");
            }
        }
        done(told);
    };
    Ok(desk.send(job)?)
}

/// Brings a conversation to where the client is: what it has not heard is told, what the client has taken back is taken back.
/// Returns what is to be said.
fn begin(session: &mut Session, wanted: &Wanted) -> Result<Say, SeamError> {
    if let Some(system) = &wanted.system {
        session.instruct(system)?;
    }
    let sent: Vec<u64> = wanted.messages.iter().map(|(role, text)| sum(*role, text)).collect();
    let known = known(session)?;
    let sums: Vec<u64> = known.iter().map(|(_, _, sum)| *sum).collect();
    let fit = align::fit(&sums, &sent);
    let (from, after) = match fit {
        Some(fit) => (fit.known, fit.after),
        // A named conversation goes on with the message alone, whatever the client has sent before it.
        None if !known.is_empty() => (wanted.messages.len() - 1, 0),
        None => (0, 0),
    };
    let [new @ .., (_, message)] = &wanted.messages[from..] else {
        return Err(SeamError::asked("reading the message", "there is none"));
    };
    if after > 0 {
        // The client has gone back: what it has no more is taken back, and can be restored.
        let gone: Vec<TurnId> = known[known.len() - after..].iter().map(|(turn, _, _)| *turn).collect();
        let again = after == 2 && new.is_empty() && sums[sums.len() - 2] == *sent.last().unwrap_or(&0);
        if again {
            return Ok(Say::Again);
        }
        session.take_back(&gone)?;
    }
    for (role, text) in new {
        session.hear(*role, text, &mut |_| Flow::Continue)?;
    }
    Ok(Say::Message(message.clone()))
}

/// The latest messages of a conversation, as the client has them where that is known.
fn known(session: &mut Session) -> Result<Vec<(TurnId, Role, u64)>, SeamError> {
    let heard = heard(session)?;
    let latest = session.latest(COMPARED)?;
    let told = |turn: TurnId| heard.messages.iter().find(|(t, _)| *t == turn.0).map(|(_, sum)| *sum);
    Ok(latest
        .into_iter()
        .map(|(turn, role, text)| (turn, role, told(turn).unwrap_or_else(|| sum(role, &text))))
        .collect())
}

fn heard(session: &mut Session) -> Result<Heard, SeamError> {
    let name = session.name().to_owned();
    let records = session.store().records(&name, Kind::Setting)?;
    let record = records.iter().find(|record| record.key == HEARD);
    Ok(record.and_then(|record| serde_json::from_str(&record.value).ok()).unwrap_or_default())
}

/// Keeps what the client will send when it comes again.
fn remember(session: &mut Session, wanted: &Wanted, turn: TurnId, text: &str) -> Result<(), SeamError> {
    let mut messages: Vec<(u32, u64)> =
        known(session)?.into_iter().map(|(turn, _, sum)| (turn.0, sum)).collect();
    if let Some(last) = messages.iter_mut().find(|(t, _)| *t == turn.0) {
        last.1 = sum(Role::Assistant, text);
    }
    let system = wanted.system.as_deref().map_or(0, |system| sum(Role::System, system));
    let heard = serde_json::to_string(&Heard { system, messages }).unwrap_or_default();
    let name = session.name().to_owned();
    session.store().put_record(&name, Kind::Setting, HEARD, Some(&heard))
}
