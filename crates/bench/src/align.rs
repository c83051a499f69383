//! Finding the conversation that a client's history belongs to, among many, beside reading a record of every one of them.

use halo_core::chunk::ChunkSize;
use halo_core::seams::{Kind, SeamError, Store};
use halo_core::token::{Brightness, Role, TurnId};
use halo_engine::align::{SentMessage, extend_prefix, message_key};
use halo_engine::find::find_conversation;
use halo_store::database::Database;
use halo_store::exchange::Import;
use std::time::Instant;

/// One kind of request.
#[derive(Clone, Debug)]
pub struct Figure {
    /// What the client sends.
    pub name: &'static str,
    /// The time that half of the requests stay below.
    pub p50_ms: f64,
    /// The time that 99 of 100 requests stay below.
    pub p99_ms: f64,
    /// Whether every one was told right.
    pub right: bool,
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct Report {
    /// By kind of request.
    pub figures: Vec<Figure>,
    /// Reading one record of every conversation.
    pub records_ms: f64,
}

const GREETING: &str = "*You wake with a start.* Welcome to my glade, traveller.";
const SYSTEM: &str = "You are a helpful assistant.";

/// The messages of conversation `n`: all of them open with the same words.
fn messages(n: usize) -> Vec<(Role, String)> {
    vec![
        (Role::Assistant, GREETING.into()),
        (Role::User, "Hello".into()),
        (
            Role::Assistant,
            format!("Hello! I am assistant number {n}, and I remember everything that you tell me."),
        ),
        (Role::User, format!("My number is {n}, and my favourite colour has the number {}.", n * 7)),
        (Role::Assistant, format!("Noted: {n}, and {}.", n * 7)),
    ]
}

fn sent(messages: &[(Role, String)]) -> Vec<SentMessage> {
    messages.iter().map(|(role, text)| SentMessage::new(*role, text.clone())).collect()
}

/// Fills an empty store with conversations.
///
/// # Errors
/// When the store fails.
pub fn fill(
    store: &mut Database,
    conversations: usize,
    progress: &mut dyn FnMut(usize),
) -> Result<(), SeamError> {
    for first in (0..conversations).step_by(1000) {
        let last = (first + 1000).min(conversations);
        let turn =
            |(role, text): &(Role, String)| serde_json::json!({ "role": role.name(), "content": text });
        for n in first..last {
            let all: Vec<serde_json::Value> = messages(n).iter().map(turn).collect();
            let text = serde_json::json!({ "messages": all }).to_string();
            let name = format!("conversation {n}");
            let import = Import {
                file_name: "chat.json",
                format: None,
                name: Some(&name),
                size: ChunkSize { min: 16, max: 512 },
                brightness: Brightness(10_000.0),
                model: None,
                admit: None,
            };
            store.import(&mut text.as_bytes(), import)?;
            let mut path = 0;
            let keys: Vec<_> = (0..)
                .zip(messages(n))
                .map(|(turn, (role, text))| {
                    let key = message_key(TurnId(turn), role, &text, path);
                    path = extend_prefix(path, &key);
                    key
                })
                .collect();
            store.put_message_keys(&name, &keys)?;
        }
        progress(last);
    }
    Ok(())
}

/// Measures requests of each kind.
///
/// # Errors
/// When the store fails.
pub fn run(store: &mut Database, conversations: usize, requests: usize) -> Result<Report, SeamError> {
    type Make = fn(usize) -> Vec<(Role, String)>;
    let next = || (Role::User, "And what else do you know of me?".to_owned());
    let kinds: [(&'static str, Make, bool); 4] = [
        ("the whole history and the next message", |n| messages(n), true),
        ("the last exchange and the next message", |n| messages(n)[3..].to_vec(), true),
        ("the first exchange, the rest forked", |n| messages(n)[..3].to_vec(), true),
        ("a new chat: the greeting, and nothing else", |_| messages(0)[..1].to_vec(), false),
    ];
    let mut figures = Vec::new();
    for (name, make, known) in kinds {
        let (mut took, mut right) = (Vec::with_capacity(requests), true);
        for k in 0..requests {
            // Spread over all of them.
            let n = k.wrapping_mul(7919) % conversations;
            let mut history = make(n);
            history.push(next());
            let request = sent(&history);
            let begin = Instant::now();
            let found = find_conversation(store, &request, Some(SYSTEM), SYSTEM)?;
            took.push(begin.elapsed().as_secs_f64() * 1e3);
            right &= found.map(|found| found.name) == known.then(|| format!("conversation {n}"));
        }
        took.sort_by(f64::total_cmp);
        let at = |share: f64| took[((took.len() as f64 * share) as usize).min(took.len() - 1)];
        figures.push(Figure { name, p50_ms: at(0.5), p99_ms: at(0.99), right });
    }
    let begin = Instant::now();
    for known in store.conversations()? {
        store.records(&known.name, Kind::Setting)?;
    }
    Ok(Report { figures, records_ms: begin.elapsed().as_secs_f64() * 1e3 })
}
