//! Random clients drop, trim, edit, branch, reorder and regenerate, alone or concurrently. Every acknowledged message is found
//! afterwards: live, pruned, as a variant, or in a branch.

use crate::fake::FakeServer;
use halo_core::store::{Access, RecordKind, Store};
use halo_core::token::{ChunkId, Role, TurnId};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Value, json};
use std::collections::BTreeSet;

#[derive(Clone, Debug)]
enum ClientAction {
    /// A new chat with a greeting and a first message.
    Begin { greeting: usize, first: usize },
    /// The next message of a chat, with its history in some form.
    Continue { chat: usize, message: usize, form: SentHistory },
    /// Another answer to the last message.
    Regenerate { chat: usize },
    /// The last message is edited.
    EditLast { chat: usize, message: usize },
    /// A message of the history is edited, and the chat continues.
    EditAny { chat: usize, at: usize, message: usize },
    /// Another chat continues from an earlier message.
    Branch { chat: usize, at: usize, message: usize },
    /// Two messages of the history are swapped.
    Reorder { chat: usize, a: usize, b: usize, message: usize },
}

#[derive(Clone, Copy, Debug)]
enum SentHistory {
    Full,
    Latest(usize),
    WithoutMiddle,
    Reformatted,
    NamePrefixed,
    Summarized,
}

fn client_action() -> impl Strategy<Value = ClientAction> {
    let (chat, at, message) = (0..4usize, 0..12usize, 0..24usize);
    let form = prop_oneof![
        4 => Just(SentHistory::Full),
        1 => (1..5usize).prop_map(SentHistory::Latest),
        1 => Just(SentHistory::WithoutMiddle),
        1 => Just(SentHistory::Reformatted),
        1 => Just(SentHistory::NamePrefixed),
        1 => Just(SentHistory::Summarized),
    ];
    prop_oneof![
        2 => (0..3usize, message.clone()).prop_map(|(greeting, first)| ClientAction::Begin { greeting, first }),
        6 => (chat.clone(), message.clone(), form).prop_map(|(chat, message, form)| ClientAction::Continue { chat, message, form }),
        2 => chat.clone().prop_map(|chat| ClientAction::Regenerate { chat }),
        2 => (chat.clone(), message.clone()).prop_map(|(chat, message)| ClientAction::EditLast { chat, message }),
        1 => (chat.clone(), at.clone(), message.clone()).prop_map(|(chat, at, message)| ClientAction::EditAny { chat, at, message }),
        2 => (chat.clone(), at.clone(), message.clone()).prop_map(|(chat, at, message)| ClientAction::Branch { chat, at, message }),
        1 => (chat, at.clone(), at, message).prop_map(|(chat, a, b, message)| ClientAction::Reorder { chat, a, b, message }),
    ]
}

type ClientMessage = (&'static str, String);

/// Short messages that are common, and long ones that are unique.
fn message_text(n: usize) -> String {
    match n {
        0..4 => ["ok", "Yes.", "Go on.", "Hi"][n].to_owned(),
        n => format!(
            "Message {n}: there is something about the harbour that I have never told anybody, number {}.",
            n * 7
        ),
    }
}

/// The index of the chat, the messages of the request, and the history of the client; none if the action does not apply.
fn apply_action(
    chats: &mut Vec<Vec<ClientMessage>>,
    action: &ClientAction,
) -> Option<(usize, Vec<ClientMessage>, Vec<ClientMessage>)> {
    let pick = |chats: &[Vec<ClientMessage>], chat: usize| (!chats.is_empty()).then(|| chat % chats.len());
    let user = |n: usize| ("user", message_text(n));
    match action {
        ClientAction::Begin { greeting, first } => {
            let mut chat: Vec<ClientMessage> = Vec::new();
            if *greeting > 0 {
                chat.push((
                    "assistant",
                    format!("*Greeting {greeting}.* Welcome, traveller, to the glade of the old healer!"),
                ));
            }
            chat.push(user(*first));
            chats.push(chat.clone());
            Some((chats.len() - 1, chat.clone(), chat))
        }
        ClientAction::Continue { chat, message, form } => {
            let n = pick(chats, *chat)?;
            let mut history = chats[n].clone();
            history.push(user(*message));
            let mut sent = history.clone();
            let last = sent.len() - 1;
            match form {
                SentHistory::Full => {}
                SentHistory::Latest(most) => drop(sent.drain(..last.saturating_sub(*most))),
                SentHistory::WithoutMiddle if last > 4 => drop(sent.drain(2..last - 2)),
                SentHistory::Summarized if last > 5 => {
                    drop(
                        sent.splice(..last - 2, [("user", "Summary: they talked of a harbour.".to_owned())]),
                    );
                }
                SentHistory::Reformatted => {
                    sent.iter_mut().for_each(|(_, text)| *text = format!(" {} \n", text.replace(' ', "  ")));
                }
                SentHistory::NamePrefixed => sent[..last]
                    .iter_mut()
                    .filter(|(role, _)| *role == "user")
                    .for_each(|(_, text)| *text = format!("Anna: {text}")),
                SentHistory::WithoutMiddle | SentHistory::Summarized => {}
            }
            Some((n, sent, history))
        }
        ClientAction::Regenerate { chat } => {
            let n = pick(chats, *chat)?;
            let mut history = chats[n].clone();
            while history.last().is_some_and(|(role, _)| *role == "assistant") {
                history.pop();
            }
            (!history.is_empty()).then(|| (n, history.clone(), history))
        }
        ClientAction::EditLast { chat, message } => {
            let n = pick(chats, *chat)?;
            let mut history = chats[n].clone();
            let last = history.iter().rposition(|(role, _)| *role == "user")?;
            history.truncate(last);
            history.push(user(*message));
            Some((n, history.clone(), history))
        }
        ClientAction::EditAny { chat, at, message } => {
            let n = pick(chats, *chat)?;
            let mut history = chats[n].clone();
            let at = at % history.len();
            history[at].1 = format!("{} (edited)", message_text(*message));
            history.push(user(*message));
            Some((n, history.clone(), history))
        }
        ClientAction::Branch { chat, at, message } => {
            let n = pick(chats, *chat)?;
            let mut history = chats[n][..at % chats[n].len()].to_vec();
            history.push(user(*message));
            chats.push(history.clone());
            Some((chats.len() - 1, history.clone(), history))
        }
        ClientAction::Reorder { chat, a, b, message } => {
            let n = pick(chats, *chat)?;
            let mut history = chats[n].clone();
            let len = history.len();
            history.swap(a % len, b % len);
            history.push(user(*message));
            Some((n, history.clone(), history))
        }
    }
}

fn chat_body(messages: &[ClientMessage]) -> Value {
    let messages: Vec<Value> =
        messages.iter().map(|(role, text)| json!({ "role": role, "content": text })).collect();
    json!({ "messages": messages })
}

fn normalized(text: &str) -> String {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    words.strip_prefix("Anna: ").unwrap_or(&words).to_owned()
}

/// All texts of the store (current turns, variants and clients' summaries), and the texts that were lost.
fn stored_texts(fake: &FakeServer) -> (BTreeSet<String>, Vec<String>) {
    let mut store = fake.store.open().expect("the store opens");
    let (mut texts, mut lost) = (BTreeSet::new(), Vec::new());
    for conversation in store.list_conversations().expect("listed") {
        let name = conversation.name;
        let mut timeline = store.load(&name, Access::Read).expect("the conversation loads");
        let records = |store: &mut dyn Store, kind| -> Vec<Value> {
            let records = store.records(&name, kind).expect("the records are read");
            records.iter().map(|record| serde_json::from_str(&record.value).expect("JSON")).collect()
        };
        // Nothing but the last exchange is ever replaced.
        for variant in records(&mut *store, RecordKind::Variant) {
            let turns = variant["turns"].as_array().cloned().unwrap_or_default();
            let is_user = |turn: &Value| {
                timeline
                    .turns()
                    .iter()
                    .any(|t| Some(u64::from(t.id.0)) == turn.as_u64() && t.role == Role::User)
            };
            if turns.iter().filter(|turn| is_user(turn)).count() > 1 {
                lost.push(format!("more than one exchange of '{name}' was replaced: {variant}"));
            }
        }
        let variants: BTreeSet<u64> = (records(&mut *store, RecordKind::Variant).iter())
            .flat_map(|v| v["turns"].as_array().cloned().unwrap_or_default())
            .filter_map(|turn| turn.as_u64())
            .collect();
        texts.extend(
            records(&mut *store, RecordKind::ClientSummary)
                .iter()
                .filter_map(|summary| summary["text"].as_str())
                .map(normalized),
        );
        let turns: Vec<TurnId> = timeline.turns().iter().map(|turn| turn.id).collect();
        for turn in turns {
            let unloaded: Vec<ChunkId> =
                timeline.turn_chunks(turn).filter(|c| !c.is_loaded()).map(|c| c.id()).collect();
            store.load_bodies(&name, &mut timeline, &unloaded).expect("the bodies load");
            let text: String = timeline.turn_chunks(turn).map(|chunk| chunk.text().into_owned()).collect();
            let is_current = timeline.turn_chunks(turn).any(|chunk| !chunk.is_deleted());
            if is_current || variants.contains(&u64::from(turn.0)) {
                texts.insert(normalized(&text));
            } else if !text.trim().is_empty() {
                lost.push(format!("turn {} of '{name}': {text}", turn.0));
            }
        }
    }
    (texts, lost)
}

async fn run_clients(steps: &[Vec<ClientAction>]) -> Result<usize, TestCaseError> {
    let fake = FakeServer::in_memory();
    let mut chats: Vec<Vec<ClientMessage>> = Vec::new();
    let mut acknowledged: BTreeSet<String> = BTreeSet::new();
    let mut requests = 0;
    for step in steps {
        let mut requests_of_step = Vec::new();
        for action in step {
            requests_of_step.extend(apply_action(&mut chats, action));
        }
        let answers = requests_of_step.iter().map(|(_, sent, _)| {
            let (fake, body) = (&fake, chat_body(sent));
            async move { fake.chat(&body, None).await }
        });
        let answers: Vec<_> = futures_util::future::join_all(answers).await;
        for ((chat, sent, mut history), answer) in requests_of_step.into_iter().zip(answers) {
            prop_assert_eq!(answer.status, 200, "{}", answer.body);
            requests += 1;
            acknowledged.extend(sent.iter().map(|(_, text)| normalized(text)));
            acknowledged.insert(normalized(&answer.text()));
            history.push(("assistant", answer.text()));
            chats[chat] = history;
        }
        let (stored, lost) = stored_texts(&fake);
        let missing: Vec<&String> = acknowledged.iter().filter(|text| !stored.contains(*text)).collect();
        prop_assert!(missing.is_empty(), "lost: {missing:?}");
        prop_assert!(lost.is_empty(), "deleted and no variant: {lost:?}");
    }
    let app = std::sync::Arc::clone(&fake.app);
    tokio::task::spawn_blocking(move || app.shutdown()).await.expect("the shutdown ends");
    Ok(requests)
}

#[test]
fn align_random_clients_lose_no_message() {
    let runs = std::env::var("HALO_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(200);
    let config = Config { cases: runs, failure_persistence: None, ..Config::default() };
    let seed = std::env::var("HALO_SEED").ok().and_then(|seed| seed.parse::<u64>().ok()).unwrap_or(23);
    let rng =
        TestRng::from_seed(RngAlgorithm::ChaCha, &[seed.to_le_bytes(), [7; 8], [1; 8], [0; 8]].concat());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let requests = std::cell::Cell::new(0);
    // Mostly one action per step; sometimes several at the same time.
    let step = prop_oneof![3 => client_action().prop_map(|action| vec![action]), 1 => prop::collection::vec(client_action(), 2..4)];
    let result = TestRunner::new_with_rng(config, rng).run(&prop::collection::vec(step, 1..14), |steps| {
        requests.set(requests.get() + runtime.block_on(run_clients(&steps))?);
        Ok(())
    });
    eprintln!("{runs} runs, {} requests", requests.get());
    if let Err(e) = result {
        panic!("{e}");
    }
}
