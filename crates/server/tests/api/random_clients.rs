//! Random clients: whatever they drop, trim, edit, fork, reorder and ask for again, alone or at the same time, every message
//! that was ever acknowledged is found: live, pruned, as a variant, or in a branch.

use crate::fake::Fake;
use halo_core::seams::{Access, Kind, Store};
use halo_core::token::{ChunkId, Role, TurnId};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Value, json};
use std::collections::BTreeSet;

#[derive(Clone, Debug)]
enum Act {
    /// Another chat: by which greeting and which first message.
    Begin { greeting: usize, first: usize },
    /// The next message of a chat, sent in some way.
    GoOn { chat: usize, message: usize, how: How },
    /// The last answer is asked for again.
    Regenerate { chat: usize },
    /// The last message is edited.
    EditLast { chat: usize, message: usize },
    /// Some message of the history is edited, and the chat goes on.
    EditAny { chat: usize, at: usize, message: usize },
    /// The chat goes on from an earlier message, in another chat of the client's.
    Fork { chat: usize, at: usize, message: usize },
    /// Two messages of the history change places.
    Reorder { chat: usize, a: usize, b: usize, message: usize },
}

#[derive(Clone, Copy, Debug)]
enum How {
    Whole,
    Latest(usize),
    WithoutMiddle,
    Trimmed,
    Named,
    Summed,
}

fn act() -> impl Strategy<Value = Act> {
    let (chat, at, message) = (0..4usize, 0..12usize, 0..24usize);
    let how = prop_oneof![
        4 => Just(How::Whole),
        1 => (1..5usize).prop_map(How::Latest),
        1 => Just(How::WithoutMiddle),
        1 => Just(How::Trimmed),
        1 => Just(How::Named),
        1 => Just(How::Summed),
    ];
    prop_oneof![
        2 => (0..3usize, message.clone()).prop_map(|(greeting, first)| Act::Begin { greeting, first }),
        6 => (chat.clone(), message.clone(), how).prop_map(|(chat, message, how)| Act::GoOn { chat, message, how }),
        2 => chat.clone().prop_map(|chat| Act::Regenerate { chat }),
        2 => (chat.clone(), message.clone()).prop_map(|(chat, message)| Act::EditLast { chat, message }),
        1 => (chat.clone(), at.clone(), message.clone()).prop_map(|(chat, at, message)| Act::EditAny { chat, at, message }),
        2 => (chat.clone(), at.clone(), message.clone()).prop_map(|(chat, at, message)| Act::Fork { chat, at, message }),
        1 => (chat, at.clone(), at, message).prop_map(|(chat, a, b, message)| Act::Reorder { chat, a, b, message }),
    ]
}

type Message = (&'static str, String);

/// What is said: short things that anybody says, and long ones that nobody else does.
fn words(n: usize) -> String {
    match n {
        0..4 => ["ok", "Yes.", "Go on.", "Hi"][n].to_owned(),
        n => format!(
            "Message {n}: there is something about the harbour that I have never told anybody, number {}.",
            n * 7
        ),
    }
}

/// The request for an act, and the chat of the client's that it is made in; none where there is nothing to do it with.
fn request(chats: &mut Vec<Vec<Message>>, act: &Act) -> Option<(usize, Vec<Message>, Vec<Message>)> {
    let pick = |chats: &[Vec<Message>], chat: usize| (!chats.is_empty()).then(|| chat % chats.len());
    let user = |n: usize| ("user", words(n));
    match act {
        Act::Begin { greeting, first } => {
            let mut chat: Vec<Message> = Vec::new();
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
        Act::GoOn { chat, message, how } => {
            let n = pick(chats, *chat)?;
            let mut whole = chats[n].clone();
            whole.push(user(*message));
            let mut sent = whole.clone();
            let last = sent.len() - 1;
            match how {
                How::Whole => {}
                How::Latest(most) => drop(sent.drain(..last.saturating_sub(*most))),
                How::WithoutMiddle if last > 4 => drop(sent.drain(2..last - 2)),
                How::Summed if last > 5 => {
                    drop(
                        sent.splice(..last - 2, [("user", "Summary: they talked of a harbour.".to_owned())]),
                    );
                }
                How::Trimmed => {
                    sent.iter_mut().for_each(|(_, text)| *text = format!(" {} \n", text.replace(' ', "  ")));
                }
                How::Named => sent[..last]
                    .iter_mut()
                    .filter(|(role, _)| *role == "user")
                    .for_each(|(_, text)| *text = format!("Anna: {text}")),
                How::WithoutMiddle | How::Summed => {}
            }
            Some((n, sent, whole))
        }
        Act::Regenerate { chat } => {
            let n = pick(chats, *chat)?;
            let mut whole = chats[n].clone();
            while whole.last().is_some_and(|(role, _)| *role == "assistant") {
                whole.pop();
            }
            (!whole.is_empty()).then(|| (n, whole.clone(), whole))
        }
        Act::EditLast { chat, message } => {
            let n = pick(chats, *chat)?;
            let mut whole = chats[n].clone();
            let last = whole.iter().rposition(|(role, _)| *role == "user")?;
            whole.truncate(last);
            whole.push(user(*message));
            Some((n, whole.clone(), whole))
        }
        Act::EditAny { chat, at, message } => {
            let n = pick(chats, *chat)?;
            let mut whole = chats[n].clone();
            let at = at % whole.len();
            whole[at].1 = format!("{} (edited)", words(*message));
            whole.push(user(*message));
            Some((n, whole.clone(), whole))
        }
        Act::Fork { chat, at, message } => {
            let n = pick(chats, *chat)?;
            let mut whole = chats[n][..at % chats[n].len()].to_vec();
            whole.push(user(*message));
            chats.push(whole.clone());
            Some((chats.len() - 1, whole.clone(), whole))
        }
        Act::Reorder { chat, a, b, message } => {
            let n = pick(chats, *chat)?;
            let mut whole = chats[n].clone();
            let len = whole.len();
            whole.swap(a % len, b % len);
            whole.push(user(*message));
            Some((n, whole.clone(), whole))
        }
    }
}

fn body(messages: &[Message]) -> Value {
    let messages: Vec<Value> =
        messages.iter().map(|(role, text)| json!({ "role": role, "content": text })).collect();
    json!({ "messages": messages })
}

fn plain(text: &str) -> String {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    words.strip_prefix("Anna: ").unwrap_or(&words).to_owned()
}

/// All that is found in the store: what stands, what is a variant, and what clients sent in the place of older turns.
fn found(fake: &Fake) -> (BTreeSet<String>, Vec<String>) {
    let mut store = fake.kept.open().expect("it opens");
    let (mut found, mut lost) = (BTreeSet::new(), Vec::new());
    for known in store.conversations().expect("listed") {
        let name = known.name;
        let mut timeline = store.load(&name, Access::Read).expect("it opens");
        let records = |store: &mut dyn Store, kind| -> Vec<Value> {
            let records = store.records(&name, kind).expect("told");
            records.iter().map(|record| serde_json::from_str(&record.value).expect("JSON")).collect()
        };
        // Nothing but the last exchange is ever replaced.
        for variant in records(&mut *store, Kind::Variant) {
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
        let variants: BTreeSet<u64> = (records(&mut *store, Kind::Variant).iter())
            .flat_map(|v| v["turns"].as_array().cloned().unwrap_or_default())
            .filter_map(|turn| turn.as_u64())
            .collect();
        found.extend(records(&mut *store, Kind::Aside).iter().filter_map(|a| a["text"].as_str()).map(plain));
        let turns: Vec<TurnId> = timeline.turns().iter().map(|turn| turn.id).collect();
        for turn in turns {
            let away: Vec<ChunkId> =
                timeline.turn_chunks(turn).filter(|c| !c.is_here()).map(|c| c.id()).collect();
            store.bring(&name, &mut timeline, &away).expect("it is there");
            let text: String = timeline.turn_chunks(turn).map(|chunk| chunk.text().into_owned()).collect();
            let stands = timeline.turn_chunks(turn).any(|chunk| !chunk.is_withdrawn());
            if stands || variants.contains(&u64::from(turn.0)) {
                found.insert(plain(&text));
            } else if !text.trim().is_empty() {
                lost.push(format!("turn {} of '{name}': {text}", turn.0));
            }
        }
    }
    (found, lost)
}

async fn run(steps: &[Vec<Act>]) -> Result<usize, TestCaseError> {
    let fake = Fake::in_memory();
    let mut chats: Vec<Vec<Message>> = Vec::new();
    let mut acknowledged: BTreeSet<String> = BTreeSet::new();
    let mut requests = 0;
    for step in steps {
        let mut asked = Vec::new();
        for act in step {
            asked.extend(request(&mut chats, act));
        }
        let answers = asked.iter().map(|(_, sent, _)| {
            let (fake, body) = (&fake, body(sent));
            async move { fake.chat(&body, None).await }
        });
        let answers: Vec<_> = futures_util::future::join_all(answers).await;
        for ((chat, sent, mut whole), answer) in asked.into_iter().zip(answers) {
            prop_assert_eq!(answer.status, 200, "{}", answer.body);
            requests += 1;
            acknowledged.extend(sent.iter().map(|(_, text)| plain(text)));
            acknowledged.insert(plain(&answer.text()));
            whole.push(("assistant", answer.text()));
            chats[chat] = whole;
        }
        let (found, deleted) = found(&fake);
        let missing: Vec<&String> = acknowledged.iter().filter(|text| !found.contains(*text)).collect();
        prop_assert!(missing.is_empty(), "lost: {missing:?}");
        prop_assert!(deleted.is_empty(), "deleted and no variant: {deleted:?}");
    }
    let app = std::sync::Arc::clone(&fake.app);
    tokio::task::spawn_blocking(move || app.close()).await.expect("it ends");
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
    // One act a step, mostly; now and then several at the same time.
    let step = prop_oneof![3 => act().prop_map(|act| vec![act]), 1 => prop::collection::vec(act(), 2..4)];
    let done = TestRunner::new_with_rng(config, rng).run(&prop::collection::vec(step, 1..14), |steps| {
        requests.set(requests.get() + runtime.block_on(run(&steps))?);
        Ok(())
    });
    eprintln!("{runs} runs, {} requests", requests.get());
    if let Err(why) = done {
        panic!("{why}");
    }
}
