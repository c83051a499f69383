//! Matching a client's message history to its conversation among many, compared with reading one record of each
//! conversation.

use halo_core::Error;
use halo_core::chunker::ChunkSize;
use halo_core::store::{RecordKind, Store};
use halo_core::token::{Brightness, Role, TurnId};
use halo_engine::align::{SentMessage, extend_prefix, message_key};
use halo_engine::lookup::find_conversation;
use halo_store::database::Database;
use halo_store::exchange::ImportRequest;
use std::time::Instant;

/// One kind of request.
#[derive(Clone, Debug)]
pub struct AlignBenchFigure {
    /// What the client sends.
    pub name: &'static str,
    /// Median of the times.
    pub p50_ms: f64,
    /// 99th percentile of the times.
    pub p99_ms: f64,
    /// Whether every request was matched correctly.
    pub correct: bool,
}

#[derive(Clone, Debug)]
pub struct AlignBenchReport {
    pub figures: Vec<AlignBenchFigure>,
    /// Time to read one record of every conversation.
    pub read_records_ms: f64,
}

const GREETING: &str = "*You wake with a start.* Welcome to my glade, traveller.";
const SYSTEM: &str = "You are a helpful assistant.";

/// The messages of conversation `n`: all conversations open with the same words.
fn sample_messages(n: usize) -> Vec<(Role, String)> {
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

fn to_sent_messages(messages: &[(Role, String)]) -> Vec<SentMessage> {
    messages.iter().map(|(role, text)| SentMessage::new(*role, text.clone())).collect()
}

pub fn fill_store(
    store: &mut Database,
    conversations: usize,
    progress: &mut dyn FnMut(usize),
) -> Result<(), Error> {
    for first in (0..conversations).step_by(1000) {
        let last = (first + 1000).min(conversations);
        let turn =
            |(role, text): &(Role, String)| serde_json::json!({ "role": role.name(), "content": text });
        for n in first..last {
            let all: Vec<serde_json::Value> = sample_messages(n).iter().map(turn).collect();
            let text = serde_json::json!({ "messages": all }).to_string();
            let name = format!("conversation {n}");
            let import = ImportRequest {
                file_name: "chat.json",
                format: None,
                name: Some(&name),
                chunk_size: ChunkSize { min: 16, max: 512 },
                initial_brightness: Brightness(10_000.0),
                model: None,
                validate_rows: None,
            };
            store.import(&mut text.as_bytes(), import)?;
            let mut path = 0;
            let keys: Vec<_> = (0..)
                .zip(sample_messages(n))
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

pub fn run(store: &mut Database, conversations: usize, requests: usize) -> Result<AlignBenchReport, Error> {
    type MakeHistory = fn(usize) -> Vec<(Role, String)>;
    let next = || (Role::User, "And what else do you know of me?".to_owned());
    let kinds: [(&'static str, MakeHistory, bool); 4] = [
        ("the whole history and the next message", |n| sample_messages(n), true),
        ("the last exchange and the next message", |n| sample_messages(n)[3..].to_vec(), true),
        ("the first exchange, the rest forked", |n| sample_messages(n)[..3].to_vec(), true),
        ("a new chat: the greeting, and nothing else", |_| sample_messages(0)[..1].to_vec(), false),
    ];
    let mut figures = Vec::new();
    for (name, make, known) in kinds {
        let (mut took, mut right) = (Vec::with_capacity(requests), true);
        for k in 0..requests {
            // The requests are spread over all conversations.
            let n = k.wrapping_mul(7919) % conversations;
            let mut history = make(n);
            history.push(next());
            let request = to_sent_messages(&history);
            let begin = Instant::now();
            let found = find_conversation(store, &request, Some(SYSTEM), SYSTEM)?;
            took.push(begin.elapsed().as_secs_f64() * 1e3);
            right &= found.map(|found| found.name) == known.then(|| format!("conversation {n}"));
        }
        took.sort_by(f64::total_cmp);
        let at = |share: f64| took[((took.len() as f64 * share) as usize).min(took.len() - 1)];
        figures.push(AlignBenchFigure { name, p50_ms: at(0.5), p99_ms: at(0.99), correct: right });
    }
    let begin = Instant::now();
    for known in store.list_conversations()? {
        store.records(&known.name, RecordKind::Setting)?;
    }
    Ok(AlignBenchReport { figures, read_records_ms: begin.elapsed().as_secs_f64() * 1e3 })
}
