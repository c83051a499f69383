//! Several conversations in one KV cache, and several answers in one batch.

use crate::common::{TinyModel, rounding_kl, tap_last_row};
use crate::generate::{GeneratedSteps, QUESTION, greedy, open_parallel_model, ram_only, tokenize_window};
use crate::kv_cache_property::{KvPropertyConversation, check_against_fresh, filler_states};
use halo_core::attention::{AttentionRequest, PromptRows};
use halo_core::model::{FinishReason, Model, ModelStep, Prompt, StepFlow, WindowToken};
use halo_core::testing::logits::compare_logits;
use halo_core::token::Position;
use halo_llama::attention::TapConfig;
use halo_llama::cells::CellEntry;
use halo_llama::kv_cache::{InputToken, KvCache, KvCacheError, LaneBatch, LaneId, WindowSync};
use halo_llama::model::Llama;
use halo_llama::token_key::token_keys;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

const CONVERSATIONS: usize = 4;
/// Cells for two or three of the conversations: the others are evicted.
const CELLS: u32 = 700;

struct InterleavedRun {
    model: TinyModel,
    cache: KvCache,
    conversations: Vec<KvPropertyConversation>,
    restored: usize,
    batched: usize,
}

fn name(conversation: usize) -> String {
    format!("conversation {conversation}")
}

impl InterleavedRun {
    /// Syncs a conversation and prefills all but the last token of its window, which is returned.
    fn prefill(&mut self, conversation: usize) -> (LaneId, InputToken, Vec<WindowToken>) {
        let window = self.conversations[conversation].window();
        let sync = self
            .cache
            .sync_window(&name(conversation), &window, 1, &mut |_, _| StepFlow::Continue)
            .expect("there is room for two");
        assert_eq!((sync.stats.shifted, sync.stats.recomputed), (0, 0), "nothing is lost");
        self.restored += sync.stats.restored;
        self.cache.reserve_lane(sync.cells);
        let keys = token_keys(&window).expect("in order");
        let tokens: Vec<InputToken> =
            (sync.prefill_from..window.len()).map(|n| InputToken::new(keys[n], &window[n])).collect();
        let (last, others) = tokens.split_last().expect("the last token is always decoded");
        for slice in others.chunks(256) {
            self.cache.decode(slice, TapConfig::off()).expect("decoded");
        }
        (self.cache.selected_lane(), *last, window)
    }

    /// Decodes the last tokens of two windows in one batch, and checks the rows and tables of both.
    fn decode_together(&mut self, pair: [usize; 2]) -> [(LaneId, Vec<CellEntry>); 2] {
        let prefilled = pair.map(|conversation| self.prefill(conversation));
        let batches = [&prefilled[0], &prefilled[1]].map(|(lane, last, _)| LaneBatch {
            lane: *lane,
            tokens: std::slice::from_ref(last),
            config: tap_last_row(),
        });
        let decoded = self.cache.decode_lanes(&batches).expect("decoded");
        self.batched += 1;
        let mut tables = prefilled.iter().zip(decoded).map(|((lane, _, window), decoded)| {
            let row = &decoded.rows[0];
            assert!(self.model.is_right_sum(row) && row.mean.len() == window.len());
            self.cache.select_lane(*lane);
            let cached = self.cache.sequence().entries.clone();
            let same = |(entry, token): (&CellEntry, &WindowToken)| {
                entry.key.timeline_pos.cast_unsigned() == token.position.expect("a position").0
                    && entry.token.cast_unsigned() == token.id.0
            };
            assert!(cached.len() == window.len() && cached.iter().zip(window).all(same));
            (*lane, cached)
        });
        [tables.next().expect("the first"), tables.next().expect("the second")]
    }
}

/// Four conversations are pruned, resurrected and extended in turn, two of them decode in one batch, and others are evicted for
/// them. After each step the next logits of both are those of a fresh context with the same cells.
fn check_interleaved_steps(model: TinyModel, steps: usize) {
    let conversations: Vec<_> =
        (0..CONVERSATIONS).map(|n| KvPropertyConversation::new(n as u64 + 5)).collect();
    let cache = model.kv_cache_with_lanes(CELLS, CONVERSATIONS as u32);
    let mut run = InterleavedRun { model, cache, conversations, restored: 0, batched: 0 };
    let mut fresh = model.context(CELLS);
    let filler = filler_states(&mut fresh);
    let mut rng = fastrand::Rng::with_seed(3);
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    run.conversations.iter_mut().for_each(|conversation| conversation.append(12, 0));
    for step in 0..steps {
        let first = rng.usize(..CONVERSATIONS);
        let second = (first + rng.usize(1..CONVERSATIONS)) % CONVERSATIONS;
        for n in [first, second] {
            *counts.entry(run.conversations[n].random_step()).or_default() += 1;
        }
        for (lane, cached) in run.decode_together([first, second]) {
            run.cache.select_lane(lane);
            let difference = check_against_fresh(&mut run.cache, &cached, &mut fresh, &filler, None);
            assert_eq!(difference, (0.0, 0.0), "step {step}: not the logits of a fresh context");
            run.cache.release_lane();
        }
        if step % 3 == 0 {
            let window = run.conversations[first].window();
            run.cache.persist(&name(first), &window).expect("persisted");
            assert_eq!(run.cache.find_mismatch(&name(first), &window), None);
        }
    }
    println!("{model:?}: {counts:?}, {} batches, {} tokens restored", run.batched, run.restored);
    assert!(run.restored > steps && counts.values().all(|&n| n > steps / 7));
}

#[test]
fn batch_of_interleaved_conversations_equals_fresh_contexts() {
    let thorough = std::env::var_os("HALO_TEST_THOROUGH").is_some();
    check_interleaved_steps(TinyModel::Llama, if thorough { 1000 } else { 400 });
}

#[test]
fn batch_of_interleaved_conversations_equals_fresh_contexts_with_sliding_window() {
    let thorough = std::env::var_os("HALO_TEST_THOROUGH").is_some();
    check_interleaved_steps(TinyModel::Gemma3, if thorough { 1000 } else { 150 });
}

/// Lanes with a running answer are neither evicted nor given to others.
#[test]
fn batch_lanes_are_not_evicted_while_reserved() {
    let mut run = InterleavedRun {
        model: TinyModel::Llama,
        cache: TinyModel::Llama.kv_cache_with_lanes(CELLS, 2),
        conversations: (0..3).map(KvPropertyConversation::new).collect(),
        restored: 0,
        batched: 0,
    };
    run.conversations.iter_mut().for_each(|conversation| conversation.append(40, 0));
    let (first, _, _) = run.prefill(0);
    let (second, _, _) = run.prefill(1);
    assert_ne!(first, second);
    let window = run.conversations[2].window();
    let busy = run.cache.sync_window(&name(2), &window, 1, &mut |_, _| StepFlow::Continue);
    assert!(matches!(busy, Err(KvCacheError::AllLanesBusy)), "{busy:?}");
    run.cache.select_lane(first);
    run.cache.release_lane();
    assert_eq!(run.prefill(2).0, first, "the released lane is used");
    assert_eq!(run.cache.find_mismatch(&name(1), &run.conversations[1].window()), None);
}

impl InterleavedRun {
    /// Three conversations that begin with the same 40 tokens.
    fn with_common_beginning(model: TinyModel) -> Self {
        let mut conversations: Vec<_> = (0..3).map(KvPropertyConversation::new).collect();
        for (n, conversation) in conversations.iter_mut().enumerate() {
            conversation.append(40, 0);
            conversation.append(10, 50 + 7 * n);
        }
        let cache = model.kv_cache_with_lanes(CELLS, 3);
        Self { model, cache, conversations, restored: 0, batched: 0 }
    }

    /// Decodes the last token of a conversation; returns its logits.
    fn logits(&mut self, conversation: usize) -> Vec<f32> {
        let (lane, last, _) = self.prefill(conversation);
        let (config, tokens) = (tap_last_row(), std::slice::from_ref(&last));
        let decoded = self.cache.decode_lanes(&[LaneBatch { lane, tokens, config }]).expect("decoded");
        self.cache.context().logits_at(decoded[0].logits_index).to_vec()
    }

    fn sync(&mut self, conversation: usize, window: &[WindowToken]) -> WindowSync {
        let sync = self.cache.sync_window(&name(conversation), window, 1, &mut |_, _| StepFlow::Continue);
        sync.expect("there is room")
    }
}

/// A conversation uses the cells of another one that begins with the same tokens, also after the other one is gone, and gets
/// copies before they are shifted.
fn check_common_beginning(model: TinyModel) {
    let expected = InterleavedRun::with_common_beginning(model).logits(1);
    let mut run = InterleavedRun::with_common_beginning(model);
    let mut fresh = model.context(CELLS);
    let filler = filler_states(&mut fresh);
    let first = run.logits(0);
    let window = run.conversations[1].window();
    let sync = run.sync(1, &window);
    assert_eq!((sync.prefill_from, sync.stats.reused, sync.stats.prefilled), (40, 40, 10), "{model:?}");
    let shared = run.logits(1);
    let (_, divergence, same) = compare_logits(&expected, &shared);
    assert!(divergence < rounding_kl() && same, "{model:?}: {divergence} from the logits without company");
    for (lane, cached) in run.decode_together([0, 1]) {
        run.cache.select_lane(lane);
        let difference = check_against_fresh(&mut run.cache, &cached, &mut fresh, &filler, None);
        assert_eq!(difference, (0.0, 0.0), "{model:?}: not the logits of a fresh context");
    }
    // A system prompt moves what follows it.
    let system = run.conversations[1].sample[60..68].iter();
    let system: Vec<WindowToken> = system.map(|token| WindowToken { position: None, ..*token }).collect();
    let sync = run.sync(1, &[system, window].concat());
    assert!(sync.stats.shifted >= 40, "{model:?}: {sync:?}");
    run.cache.release_lane();
    let (_, divergence, same) = compare_logits(&first, &run.logits(0));
    assert!(
        divergence < rounding_kl() && same,
        "{model:?}: the other conversation's cells were shifted, {divergence}"
    );
    // The cells stay when the conversation that computed them is evicted.
    let third = run.conversations[2].window();
    assert_eq!(run.sync(2, &third).stats.reused, 40, "{model:?}");
    run.cache.reserve_lane(60);
    run.cache.select_lane(LaneId(0));
    run.cache.release_lane();
    run.cache.evict_idle_lanes(&name(2));
    let (_, last, _) = run.prefill(2);
    let lane = run.cache.selected_lane();
    let (config, tokens) = (tap_last_row(), std::slice::from_ref(&last));
    run.cache.decode_lanes(&[LaneBatch { lane, tokens, config }]).expect("decoded");
    let cached = run.cache.sequence().entries.clone();
    let difference = check_against_fresh(&mut run.cache, &cached, &mut fresh, &filler, None);
    assert_eq!(difference, (0.0, 0.0), "{model:?}: evicted with the conversation that computed them");
}

#[test]
fn batch_stores_a_common_beginning_once() {
    check_common_beginning(TinyModel::Llama);
    check_common_beginning(TinyModel::Gemma3);
}

/// A conversation that is not in use shares nothing: what is computed alone is the same whatever was computed before.
#[test]
fn batch_conversation_alone_shares_nothing() {
    let mut run = InterleavedRun::with_common_beginning(TinyModel::Llama);
    run.logits(0);
    run.cache.release_lane();
    let window = run.conversations[1].window();
    assert_eq!(run.sync(1, &window).stats.reused, 0);
}

/// What one caller of a model with four lanes receives.
fn ask(
    model: &mut Llama,
    conversation: &str,
    texts: &[&str],
    max_tokens: usize,
) -> (FinishReason, GeneratedSteps) {
    ask_until(model, conversation, texts, max_tokens, usize::MAX)
}

fn ask_until(
    model: &mut Llama,
    conversation: &str,
    texts: &[&str],
    max_tokens: usize,
    stop_after: usize,
) -> (FinishReason, GeneratedSteps) {
    let window = tokenize_window(model, texts);
    let next_position = Position(window.len() as u64);
    let prompt =
        Prompt { conversation, window: &window, messages: &Vec::new, next_position, ephemeral: false };
    let attention = AttentionRequest { prompt: PromptRows::Last, ..AttentionRequest::default() };
    let mut received = GeneratedSteps::default();
    let sampling = greedy(max_tokens);
    let finish = model.generate(&prompt, &sampling, &attention, &mut |step| {
        if let ModelStep::Token(token, row) = step {
            let row = row.expect("attention is requested");
            assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
            assert_eq!(row.mean.len(), window.len() + received.ids.len());
            received.ids.push(token.id.0);
            received.text.push_str(&token.text);
        }
        if received.ids.len() >= stop_after { StepFlow::Stop } else { StepFlow::Continue }
    });
    (finish.expect("an answer"), received)
}

const CITIES: [&str; 6] = ["France", "Spain", "Italy", "Norway", "Poland", "Greece"];

fn question(country: &str) -> [String; 3] {
    [QUESTION[0].into(), QUESTION[1].replace("France", country), QUESTION[2].into()]
}

/// Six callers share four lanes. Each gets its own answer, with attention to its own window; one stops early.
#[test]
fn batch_serves_more_callers_than_lanes() {
    let model = open_parallel_model(ram_only(), 4);
    let answers: Vec<_> = std::thread::scope(|scope| {
        let callers: Vec<_> = CITIES
            .iter()
            .enumerate()
            .map(|(n, country)| {
                let mut model = model.clone();
                scope.spawn(move || {
                    let texts = question(country);
                    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                    let stop_after = if n == 2 { 3 } else { usize::MAX };
                    ask_until(&mut model, country, &texts, 20, stop_after)
                })
            })
            .collect();
        callers.into_iter().map(|caller| caller.join().expect("no panic")).collect()
    });
    for (n, ((finish, received), country)) in answers.iter().zip(CITIES).enumerate() {
        if n == 2 {
            assert_eq!((*finish, received.ids.len()), (FinishReason::Cancelled, 3));
        } else {
            assert!(received.text.contains(country), "{country}: {}", received.text);
            assert!(matches!(finish, FinishReason::EndOfText | FinishReason::Length), "{finish:?}");
        }
    }
    // Alone on the model again: the same answer twice.
    let mut model = model.clone();
    assert_eq!(ask(&mut model, "alone", &QUESTION, 20), ask(&mut model, "alone", &QUESTION, 20));
}

/// An answer goes on while the long window of another conversation is prefilled.
#[test]
fn batch_prefill_does_not_stall_a_running_answer() {
    let model = open_parallel_model(ram_only(), 2);
    let long = "The sea was calm, and nobody spoke of the storm that had taken the boats. ".repeat(45);
    let answered = AtomicUsize::new(0);
    let (before, during) = std::thread::scope(|scope| {
        let (mut answering, answered) = (model.clone(), &answered);
        let answer = scope.spawn(move || {
            let window = tokenize_window(&mut answering, &QUESTION);
            let next_position = Position(window.len() as u64);
            let prompt = Prompt {
                conversation: "answer",
                window: &window,
                messages: &Vec::new,
                next_position,
                ephemeral: false,
            };
            let sampling = halo_core::model::Sampling { ignore_end: true, ..greedy(200) };
            let _ = answering.generate(&prompt, &sampling, &AttentionRequest::none(), &mut |step| {
                if matches!(step, ModelStep::Token(..)) {
                    answered.fetch_add(1, Ordering::SeqCst);
                }
                StepFlow::Continue
            });
        });
        let started = Instant::now();
        while answered.load(Ordering::SeqCst) < 3 && started.elapsed() < Duration::from_secs(60) {
            std::thread::yield_now();
        }
        let before = answered.load(Ordering::SeqCst);
        let mut reading = model.clone();
        let (finish, _) = ask(&mut reading, "reading", &[QUESTION[0], &long], 1);
        assert_eq!(finish, FinishReason::Length);
        let during = answered.load(Ordering::SeqCst) - before;
        answer.join().expect("no panic");
        (before, during)
    });
    assert!(before >= 3 && during >= 5, "{during} tokens while the other window was prefilled");
}

/// A panic on the thread of the model ends the running answers with an error, and the next ones are answered. Optimized builds have
/// no planted panics.
#[cfg(debug_assertions)]
#[test]
fn batch_goes_on_after_a_panic() {
    let model = open_parallel_model(ram_only(), 2);
    let ends: Vec<_> = std::thread::scope(|scope| {
        let callers: Vec<_> = ["panics", "beside"]
            .map(|conversation| {
                let mut model = model.clone();
                scope.spawn(move || {
                    let window = tokenize_window(&mut model, &QUESTION);
                    let next_position = Position(window.len() as u64);
                    let prompt = Prompt {
                        conversation,
                        window: &window,
                        messages: &Vec::new,
                        next_position,
                        ephemeral: false,
                    };
                    let sampling = halo_core::model::Sampling { ignore_end: true, ..greedy(300) };
                    let mut tokens = 0;
                    let end = model.generate(&prompt, &sampling, &AttentionRequest::none(), &mut |step| {
                        tokens += usize::from(matches!(step, ModelStep::Token(..)));
                        if conversation == "panics" && tokens == 30 {
                            halo_llama::planted::plant_panic("panics");
                        }
                        StepFlow::Continue
                    });
                    end.map_err(|error| error.kind)
                })
            })
            .into_iter()
            .collect();
        callers.into_iter().map(|caller| caller.join().expect("no panic here")).collect()
    });
    assert_eq!(ends, [Err(halo_core::ErrorKind::Internal); 2]);
    let mut model = model.clone();
    assert_eq!(ask(&mut model, "panics", &QUESTION, 20), ask(&mut model, "panics", &QUESTION, 20));
}

/// A window that was prefilled for an answer stays while another answer starts.
#[test]
fn batch_keeps_a_prefilled_window_for_its_answer() {
    let mut model = open_parallel_model(ram_only(), 2);
    let window = tokenize_window(&mut model, &QUESTION);
    let next_position = Position(window.len() as u64);
    let prompt = |ephemeral| Prompt {
        conversation: "prefilled",
        window: &window,
        messages: &Vec::new,
        next_position,
        ephemeral,
    };
    model.prefill(&prompt(false), &mut |_| StepFlow::Continue).expect("prefilled");
    ask(&mut model.clone(), "other", &QUESTION, 1);
    let mut stats = None;
    let generated = model.generate(&prompt(true), &greedy(1), &AttentionRequest::none(), &mut |step| {
        if let ModelStep::PrefillDone(done) = step {
            stats = Some(done);
        }
        StepFlow::Continue
    });
    generated.expect("an answer");
    let stats = stats.expect("the window is prefilled");
    assert_eq!((stats.reused, stats.restored, stats.prefilled), (window.len() - 1, 0, 1));
}

/// A window whose long beginning is being prefilled for another answer waits for it, and shares it.
#[test]
fn batch_prefills_a_common_beginning_once() {
    let model = open_parallel_model(ram_only(), 2);
    let long = "The sea was calm, and nobody spoke of the storm that had taken the boats. ".repeat(20);
    let (began, first_began) = sync_channel(1);
    // The first answer is long, so that its cells are in use however late the second one comes.
    let read = |mut model: Llama, conversation: &str, question: &str, began: Option<SyncSender<()>>| {
        let answer = if began.is_some() { 48 } else { 2 };
        let window = tokenize_window(&mut model, &[&long, question]);
        let next_position = Position(window.len() as u64);
        let prompt =
            Prompt { conversation, window: &window, messages: &Vec::new, next_position, ephemeral: false };
        let mut stats = None;
        let generated = model.generate(&prompt, &greedy(answer), &AttentionRequest::none(), &mut |step| {
            match step {
                ModelStep::Prefill { .. } => drop(began.as_ref().map(|began| began.try_send(()))),
                ModelStep::PrefillDone(done) => stats = Some(done),
                _ => {}
            }
            StepFlow::Continue
        });
        generated.expect("an answer");
        (window.len(), stats.expect("the window is prefilled"))
    };
    let ((_, first), (tokens, second)) = std::thread::scope(|scope| {
        let first = scope.spawn(|| read(model.clone(), "first", "Who has seen it?", Some(began)));
        first_began.recv().expect("the first one begins");
        let second = read(model.clone(), "second", "What is the sea?", None);
        (first.join().expect("no panic"), second)
    });
    assert_eq!(first.reused, 0);
    assert!(second.reused > 250 && second.reused + second.prefilled == tokens, "{second:?} of {tokens}");
}
