//! Measures what conversations cost a store: rows, bytes and time by table, for docs/design/scale.md:
//! `cargo run --release -p halo-store --example measure_rows -- ADDRESS [CONVERSATIONS]`. The store must be empty.
//!
//! A conversation has ten exchanges: a message of 40 tokens, an answer of 200 tokens that are committed one by one, a score of
//! the whole window after it, the records and keys that the engine writes, and a vector of 384 numbers for each chunk.

use halo_core::change::{Append, BrightnessRun, Change, NewToken, Score};
use halo_core::store::{Access, Durability, Embedding, MessageKey, RecordKind, StagedRecords, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ContentKind, Position, Role, TokenId, TurnId};
use halo_store::database::{Database, StoreLocation};
use std::time::{Duration, Instant};

const EXCHANGES: u32 = 10;
const QUESTION: usize = 40;
const ANSWER: usize = 200;
const TOKENS_PER_CHUNK: usize = 40;
const VECTOR: usize = 384;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().ok_or("give the address of an empty store")?;
    let conversations = arguments.next().map_or(Ok(20), |n| n.parse::<usize>())?;
    let location: StoreLocation = address.parse()?;
    let mut times = Times::default();
    let mut store = Database::open(&location)?;
    for n in 0..conversations {
        write_conversation(&mut store, &format!("conversation {n}"), &mut times)?;
    }
    let bytes = store.size_on_disk()?;
    let turns = conversations * 2 * EXCHANGES as usize;
    let tokens = conversations * EXCHANGES as usize * (QUESTION + ANSWER);
    println!("{conversations} conversations, {turns} turns, {tokens} tokens: {bytes} bytes");
    println!(
        "{:.0} bytes a conversation, {:.1} bytes a token",
        ratio(bytes, conversations),
        ratio(bytes, tokens)
    );
    times.print("token of an answer", |times| &mut times.tokens);
    times.print("message", |times| &mut times.messages);
    times.print("end of a turn", |times| &mut times.ends);
    times.print("opening for writing", |times| &mut times.opens);
    Ok(())
}

fn ratio(bytes: u64, count: usize) -> f64 {
    bytes as f64 / count as f64
}

#[derive(Default)]
struct Times {
    opens: Vec<Duration>,
    messages: Vec<Duration>,
    tokens: Vec<Duration>,
    ends: Vec<Duration>,
}

impl Times {
    fn print(&mut self, what: &str, of: impl Fn(&mut Self) -> &mut Vec<Duration>) {
        let times = of(self);
        times.sort();
        let at = |share: usize| times.get(times.len() * share / 100).copied().unwrap_or_default();
        println!("{what}: median {:?}, p99 {:?}", at(50), at(99));
    }
}

fn timed<T, E>(times: &mut Vec<Duration>, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let started = Instant::now();
    let result = work()?;
    times.push(started.elapsed());
    Ok(result)
}

fn append(timeline: &Timeline, turn: u32, role: Role, range: std::ops::Range<usize>) -> Change {
    let token = |n: usize| NewToken {
        id: TokenId(n as u32),
        text: format!(" word{}", n % 10),
        chunk_index: (n / TOKENS_PER_CHUNK) as u32,
        brightness: Brightness(10_000.0),
        kind: ContentKind::Message,
    };
    let (at, tokens) = (timeline.next_position(), range.map(token).collect());
    Change::Append(Append { at, turn: TurnId(turn), role, tokens })
}

fn write_conversation(
    store: &mut Database,
    name: &str,
    times: &mut Times,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut timeline = timed(&mut times.opens, || store.load(name, Access::Write))?;
    for exchange in 0..EXCHANGES {
        let (question, answer) = (2 * exchange, 2 * exchange + 1);
        let staged =
            vec![(RecordKind::Setting, "message.id".to_owned(), format!("client message {question}"))];
        store.stage_records(name, StagedRecords { model: None, records: staged });
        let change = append(&timeline, question, Role::User, 0..QUESTION);
        timed(&mut times.messages, || store.transact(name, &mut timeline, &change, Durability::Immediate))?;
        for n in 0..ANSWER {
            let change = append(&timeline, answer, Role::Assistant, n..n + 1);
            timed(&mut times.tokens, || store.transact(name, &mut timeline, &change, Durability::Deferred))?;
        }
        timed(&mut times.ends, || end_turn(store, name, &mut timeline, answer))?;
    }
    store.release_lease(name);
    Ok(())
}

/// What the engine writes after an answer.
fn end_turn(
    store: &mut Database,
    name: &str,
    timeline: &mut Timeline,
    answer: u32,
) -> Result<(), halo_core::Error> {
    let brightness = vec![Brightness(9_000.5); timeline.len()];
    let score = Score { runs: vec![BrightnessRun { start: Position(0), brightness }], tallies: Vec::new() };
    store.transact(name, timeline, &Change::Score(score), Durability::Immediate)?;
    let record =
        format!("{{\"model\":\"m\",\"prompt_tokens\":{},\"answer_tokens\":{ANSWER}}}", timeline.len());
    store.put_record(name, RecordKind::Turn, &answer.to_string(), Some(&record))?;
    store.put_record(name, RecordKind::Attention, &format!("{answer:010}"), Some(&"x".repeat(2_000)))?;
    let chunks = timeline.chunks().filter(|chunk| chunk.id().turn.0 + 1 >= answer);
    let vector = |chunk| Embedding { chunk, text_hash: 7, vector: vec![0.25; VECTOR] };
    let embeddings: Vec<Embedding> = chunks.map(|chunk| vector(chunk.id())).collect();
    store.put_embeddings(name, "embedder", &embeddings)?;
    let key = |turn: u32, role| MessageKey {
        turn: TurnId(turn),
        role,
        exact_hash: u64::from(turn),
        loose_hash: u64::from(turn),
        name_hash: 0,
        length: 200,
        prefix_hash: u64::from(turn),
    };
    store.put_message_keys(name, &[key(answer - 1, Role::User), key(answer, Role::Assistant)])
}
