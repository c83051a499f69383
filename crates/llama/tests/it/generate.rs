//! The real model through the `Model` trait: sampling, stopping, attention rows, grammars, forks and the KV archive.

use crate::common::{model_path, on_gpu};
use halo_core::attention::{AttentionRequest, LayerReduction, PromptRows};
use halo_core::model::{
    CacheStats, ChatTemplate, FinishReason, Model, ModelStep, OutputConstraint, Prompt, Sampling, StepFlow,
    TokenLogprobs, WindowToken,
};
use halo_core::token::Position;
use halo_core::{Error, ErrorKind};
use halo_llama::kv_archive::KvArchiveLimits;
use halo_llama::kv_cache::KvCacheMode;
use halo_llama::model::{Llama, LlamaOptions};
use std::path::Path;

pub fn open_model(kv_archive: KvArchiveLimits, kv_mode: KvCacheMode) -> Llama {
    let options = LlamaOptions { context: Some(1024), kv_archive, kv_mode, ..LlamaOptions::default() };
    Llama::open(&model_path(), &options).expect("the model loads")
}

/// A model that generates several answers at once.
pub fn open_parallel_model(kv_archive: KvArchiveLimits, parallel: u32) -> Llama {
    let options = LlamaOptions { context: Some(1024), parallel, kv_archive, ..LlamaOptions::default() };
    Llama::open(&model_path(), &options).expect("the model loads")
}

pub fn ram_only() -> KvArchiveLimits {
    KvArchiveLimits { ram: 1 << 30, disk: 0, folder: None }
}

pub fn greedy(max_tokens: usize) -> Sampling {
    Sampling { max_tokens, temperature: 0.0, ..Sampling::default() }
}

/// A window with one chunk per text.
pub fn tokenize_window(model: &mut Llama, texts: &[&str]) -> Vec<WindowToken> {
    let mut window = Vec::new();
    for text in texts {
        for (n, token) in model.tokenize(text, true).expect("tokens").into_iter().enumerate() {
            let position = Some(Position(window.len() as u64));
            window.push(WindowToken { position, offset: 0, id: token.id, chunk_start: n == 0 });
        }
    }
    window
}

pub const QUESTION: [&str; 3] = [
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
    "<|im_start|>user\nWhich city is the capital of France? Answer in one sentence.<|im_end|>\n",
    "<|im_start|>assistant\n",
];

/// What the listener of one answer received.
#[derive(Debug, Default, PartialEq)]
pub struct GeneratedSteps {
    pub text: String,
    texts: Vec<String>,
    pub ids: Vec<u32>,
    pub logprobs: Vec<TokenLogprobs>,
    /// The length of each token's attention row.
    pub rows: Vec<Option<usize>>,
    prompt_rows: usize,
    pub stats: Option<CacheStats>,
    prefill_steps: usize,
}

/// Generates, and stops after a number of steps of any kind.
pub fn generate(
    model: &mut Llama,
    window: &[WindowToken],
    sampling: &Sampling,
    attention: &AttentionRequest,
    ephemeral: bool,
    stop_after: usize,
) -> (Result<FinishReason, Error>, GeneratedSteps) {
    let next_position = Position(window.len() as u64 + 100);
    let prompt = Prompt { conversation: "main", window, messages: &Vec::new, next_position, ephemeral };
    let (mut received, mut steps) = (GeneratedSteps::default(), 0);
    let finish = model.generate(&prompt, sampling, attention, &mut |step| {
        match step {
            ModelStep::Prefill { .. } => received.prefill_steps += 1,
            ModelStep::Cooled(_) => panic!("a local model is never cooled"),
            ModelStep::PrefillDone(stats) => received.stats = Some(stats),
            ModelStep::PromptAttention(row) => {
                assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
                received.prompt_rows += 1;
            }
            ModelStep::Logprobs(logprobs) => received.logprobs.push(logprobs.clone()),
            ModelStep::Token(token, row) => {
                if let Some(row) = row
                    && attention.layers != LayerReduction::Max
                {
                    let sum: f32 = row.mean.iter().sum();
                    assert!((sum - 1.0).abs() < 1e-5, "{sum}");
                    assert!(row.max.iter().zip(row.mean).all(|(max, mean)| max >= mean));
                }
                received.rows.push(row.map(|row| row.mean.len()));
                received.text.push_str(&token.text);
                received.texts.push(token.text.clone());
                received.ids.push(token.id.0);
            }
        }
        steps += 1;
        if steps >= stop_after { StepFlow::Stop } else { StepFlow::Continue }
    });
    (finish, received)
}

pub const NEVER: usize = usize::MAX;

#[test]
fn generate_is_deterministic_for_window_and_seed() {
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    assert_eq!(model.info().template, ChatTemplate::chatml());
    assert_eq!(
        (model.info().context, model.info().attention, model.kv_edit_unsupported()),
        (1024, true, None)
    );
    let question = tokenize_window(&mut model, &QUESTION);
    let (end, first) =
        generate(&mut model, &question, &greedy(24), &AttentionRequest::default(), false, NEVER);
    assert_eq!(end, Ok(FinishReason::EndOfText));
    assert!(first.text.contains("Paris"), "{}", first.text);
    assert_eq!(first.stats.map(|s| s.prefilled), Some(question.len()));
    let lengths: Vec<Option<usize>> = (0..first.ids.len()).map(|n| Some(question.len() + n)).collect();
    assert_eq!(first.rows, lengths, "each row covers the tokens before its own");
    // Attention rows do not change the answer, and only the last token of the window is prefilled again.
    let (_, again) = generate(&mut model, &question, &greedy(24), &AttentionRequest::none(), false, NEVER);
    assert_eq!(
        (&again.text, again.stats.map(|s| (s.reused, s.prefilled))),
        (&first.text, Some((question.len() - 1, 1)))
    );
    assert!(again.rows.iter().all(Option::is_none));
    // Random sampling: the same seed gives the same answer, another seed another.
    let random = |seed| Sampling { seed, temperature: 1.5, top_p: 1.0, top_k: 0, ..greedy(24) };
    let mut answer =
        |seed| generate(&mut model, &question, &random(seed), &AttentionRequest::none(), false, NEVER).1.text;
    let (first, second, other) = (answer(7), answer(7), answer(8));
    assert_eq!(first, second);
    assert_ne!(first, other);
    // Where only the most likely token is left, sampling is greedy.
    for narrow in [
        Sampling { top_k: 1, ..random(3) },
        Sampling { top_p: 0.0, ..random(3) },
        Sampling { min_p: 1.0, ..random(3) },
    ] {
        let (_, received) = generate(&mut model, &question, &narrow, &AttentionRequest::none(), false, NEVER);
        assert_eq!(received.text, again.text, "{narrow:?}");
    }
    // The repetition penalty ends a loop.
    let loops = tokenize_window(&mut model, &["la la la la la la la la la la la la la la la la la"]);
    let (_, looping) = generate(&mut model, &loops, &greedy(8), &AttentionRequest::none(), false, NEVER);
    let penalized = Sampling { repetition_penalty: 10.0, ..greedy(8) };
    let (_, broken) = generate(&mut model, &loops, &penalized, &AttentionRequest::none(), false, NEVER);
    let repeats =
        |steps: &GeneratedSteps| steps.ids.iter().enumerate().any(|(n, id)| steps.ids[..n].contains(id));
    assert!(repeats(&looping) && !repeats(&broken), "{} / {}", looping.text, broken.text);
}

#[test]
fn attention_rows_follow_the_request() {
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    let long = "It rained from morning on, and nobody came. ".repeat(40);
    let question = tokenize_window(&mut model, &[QUESTION[0], &long, QUESTION[2]]);
    assert!(question.len() > 256);
    let mut count = |prompt: PromptRows, clear_cache: bool| {
        if clear_cache {
            model.delete_kv("main").expect("deleted");
        }
        let attention = AttentionRequest { prompt, max: true, ..AttentionRequest::default() };
        let (_, received) = generate(&mut model, &question, &greedy(2), &attention, false, NEVER);
        (received.prompt_rows, received.rows, received.prefill_steps)
    };
    let (batches, n) = ((question.len() - 1).div_ceil(256), question.len());
    // The row of the last token comes with the token that it produces.
    assert_eq!(count(PromptRows::Last, true), (batches - 1, vec![Some(n), Some(n + 1)], batches + 1));
    assert_eq!(count(PromptRows::All, true), (n - 1, vec![Some(n), Some(n + 1)], batches + 1));
    assert_eq!(count(PromptRows::Off, true), (0, vec![None, Some(n + 1)], batches + 1));
    assert_eq!(count(PromptRows::All, false), (0, vec![Some(n), Some(n + 1)], 1));
    let every_third = AttentionRequest { stride: 3, ..AttentionRequest::default() };
    let (_, received) = generate(&mut model, &question, &greedy(7), &every_third, false, NEVER);
    assert_eq!(received.rows, [Some(n), None, None, Some(n + 3), None, None, Some(n + 6)]);
    let prompt = Prompt {
        conversation: "main",
        window: &question,
        messages: &Vec::new,
        next_position: Position(999),
        ephemeral: false,
    };
    let attention = AttentionRequest { per_head: true, ..AttentionRequest::default() };
    let mut lengths = Vec::new();
    let finish = model.generate(&prompt, &greedy(3), &attention, &mut |step| {
        if let ModelStep::Token(_, Some(row)) = step {
            // Thirty layers of nine heads; the row is their mean.
            assert_eq!(row.per_head.len(), 30 * 9 * row.mean.len());
            let mean =
                |slot: usize| row.per_head.iter().skip(slot).step_by(row.mean.len()).sum::<f32>() / 270.0;
            for slot in [0, 1, row.mean.len() / 2, row.mean.len() - 1] {
                assert!((mean(slot) - row.mean[slot]).abs() < 1e-6);
            }
            lengths.push(row.mean.len());
        }
        StepFlow::Continue
    });
    assert_eq!((finish, lengths), (Ok(FinishReason::Length), vec![n, n + 1, n + 2]));
}

#[test]
fn generate_stops_at_length_stop_sequence_and_cancel() {
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    let question = tokenize_window(&mut model, &QUESTION);
    let (end, full) = generate(&mut model, &question, &greedy(24), &AttentionRequest::none(), false, NEVER);
    assert_eq!(end, Ok(FinishReason::EndOfText));
    // At the length limit; after a stop sequence, which is part of the answer; at any token.
    let (end, short) = generate(&mut model, &question, &greedy(3), &AttentionRequest::none(), false, NEVER);
    assert_eq!((end, short.ids.len()), (Ok(FinishReason::Length), 3));
    let stop = Sampling { stop: vec!["capital of".into(), "never".into()], ..greedy(24) };
    let (end, stopped) = generate(&mut model, &question, &stop, &AttentionRequest::none(), false, NEVER);
    assert_eq!(end, Ok(FinishReason::StopSequence));
    assert!(stopped.text.ends_with("capital of") && full.text.starts_with(&stopped.text), "{}", stopped.text);
    for steps in 1..5 {
        let (end, cut) =
            generate(&mut model, &question, &greedy(24), &AttentionRequest::default(), false, steps);
        assert_eq!((end, full.text.starts_with(&cut.text)), (Ok(FinishReason::Cancelled), true));
        assert_eq!(cut.ids.len(), steps.saturating_sub(2), "no step is sent after the listener stopped");
    }
    // During prefill: a long window is cancelled halfway, and the next answer is not affected.
    let long = tokenize_window(&mut model, &["All work and no play makes Jack a dull boy. "; 80]);
    let (end, received) = generate(&mut model, &long, &greedy(24), &AttentionRequest::default(), false, 2);
    assert_eq!((end, received.ids.len()), (Ok(FinishReason::Cancelled), 0));
    let (end, again) =
        generate(&mut model, &question, &greedy(24), &AttentionRequest::default(), false, NEVER);
    assert_eq!((end, again.text), (Ok(FinishReason::EndOfText), full.text));
    // A window that does not fit is refused.
    let large = tokenize_window(&mut model, &["word ".repeat(1100).as_str()]);
    let (end, _) = generate(&mut model, &large, &greedy(1), &AttentionRequest::default(), false, NEVER);
    let error = end.expect_err("too large");
    assert_eq!(error.kind, ErrorKind::ContextLengthExceeded);
    assert!(
        error.message.starts_with("context length exceeded: ") && error.message.contains("1,024"),
        "{error}"
    );
    let mut unordered = question.clone();
    unordered.swap(3, 4);
    let (end, _) = generate(&mut model, &unordered, &greedy(1), &AttentionRequest::default(), false, NEVER);
    assert!(end.is_err_and(|error| error.message.contains("not in ascending order")));
}

#[test]
fn generate_streams_whole_utf8_characters() {
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    let emoji = "🌱🎉👩‍👩‍👧谢谢";
    let tokens = model.tokenize(emoji, false).expect("tokens");
    assert_eq!(tokens.iter().map(|t| t.text.as_str()).collect::<String>(), emoji);
    assert!(tokens.len() > emoji.chars().count(), "a character of several tokens");
    let window = tokenize_window(&mut model, &["🌱🎉🌱🎉🌱🎉🌱🎉🌱🎉🌱🎉🌱"]);
    let (_, received) = generate(&mut model, &window, &greedy(16), &AttentionRequest::none(), false, NEVER);
    assert!(
        received.text.chars().any(|c| c > '\u{1f000}') && !received.text.contains('\u{fffd}'),
        "{}",
        received.text
    );
    assert!(
        received.texts.iter().any(String::is_empty),
        "a token that completes no character has no text: {:?}",
        received.texts
    );
    assert_eq!(received.ids.len(), 16, "every token is a step");
    let special = model.tokenize("<|im_end|>", true).expect("tokens");
    let plain = model.tokenize("<|im_end|>", false).expect("tokens");
    assert_eq!((special.len(), special[0].text.as_str()), (1, "<|im_end|>"));
    assert!(plain.len() > 1);
}

#[test]
fn grammar_constrains_answers() {
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    let question = tokenize_window(
        &mut model,
        &[QUESTION[0], "<|im_start|>user\nTell me of a city.<|im_end|>\n", QUESTION[2]],
    );
    let schema = r#"{"type":"object","properties":{"name":{"type":"string","maxLength":12},"people":{"type":"integer"},
        "kind":{"enum":["town","city"]}},"required":["name","people","kind"],"additionalProperties":false}"#;
    for temperature in [0.0, 1.0] {
        let sampling = Sampling {
            temperature,
            constraint: Some(OutputConstraint::JsonSchema(schema.into())),
            ..greedy(120)
        };
        let (end, received) =
            generate(&mut model, &question, &sampling, &AttentionRequest::none(), false, NEVER);
        assert_eq!(end, Ok(FinishReason::EndOfText), "{}", received.text);
        assert!(
            received.text.starts_with("{\"name\":") && received.text.ends_with("\"}"),
            "no whitespace: {}",
            received.text
        );
        let value: serde_json::Value = serde_json::from_str(&received.text).expect("JSON");
        assert!(
            value["name"].is_string() && value["people"].is_i64() && value["kind"].is_string(),
            "{value}"
        );
    }
    let grammar = "start: \"cities[1]{name,people}:\\n  \" NAME \",\" PEOPLE\nNAME: /\"[A-Z][a-z]{2,8}\"/\nPEOPLE: /[1-9][0-9]{0,5}/\n";
    let sampling = Sampling { constraint: Some(OutputConstraint::LarkGrammar(grammar.into())), ..greedy(60) };
    let (end, received) = generate(&mut model, &question, &sampling, &AttentionRequest::none(), false, NEVER);
    assert!(
        end == Ok(FinishReason::EndOfText) && received.text.starts_with("cities[1]{name,people}:\n  \""),
        "{}",
        received.text
    );
    let sampling =
        Sampling { constraint: Some(OutputConstraint::LarkGrammar("not a grammar".into())), ..greedy(9) };
    let (end, _) = generate(&mut model, &question, &sampling, &AttentionRequest::none(), false, NEVER);
    assert_eq!(end.expect_err("not a grammar").kind, ErrorKind::InvalidInput);
    for (bad, message) in [("{", "not JSON"), (r#"{"type":"unheard of"}"#, "")] {
        let sampling = Sampling { constraint: Some(OutputConstraint::JsonSchema(bad.into())), ..greedy(9) };
        let (end, _) = generate(&mut model, &question, &sampling, &AttentionRequest::none(), false, NEVER);
        let error = end.expect_err("not a schema");
        assert!(error.kind == ErrorKind::InvalidInput && error.message.contains(message), "{error:?}");
        // The check before a generation gives the same error.
        let checked = model.check_constraint(&OutputConstraint::JsonSchema(bad.into()));
        assert_eq!(checked, Err(error));
    }
    assert_eq!(model.check_constraint(&OutputConstraint::JsonSchema(r#"{"type":"object"}"#.into())), Ok(()));
}

#[test]
fn fork_generation_leaves_no_trace() {
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    let question = tokenize_window(&mut model, &QUESTION);
    let (_, expected) =
        generate(&mut model, &question, &greedy(24), &AttentionRequest::default(), false, NEVER);
    let mut forked = open_model(ram_only(), KvCacheMode::EditCells);
    let (end, _) = generate(
        &mut forked,
        &question[..question.len() - 4],
        &greedy(1),
        &AttentionRequest::default(),
        false,
        NEVER,
    );
    assert_eq!(end, Ok(FinishReason::Length));
    let fork = [question.clone(), tokenize_window(&mut model, &["Not a word of"])].concat();
    let fork: Vec<WindowToken> = fork
        .into_iter()
        .enumerate()
        .map(|(n, token)| WindowToken { position: Some(Position(n as u64)), ..token })
        .collect();
    let (end, received) = generate(&mut forked, &fork, &greedy(5), &AttentionRequest::default(), true, NEVER);
    assert!(
        matches!(end, Ok(FinishReason::Length | FinishReason::EndOfText))
            && received.rows[0] == Some(fork.len()),
        "{received:?}"
    );
    let (_, after) =
        generate(&mut forked, &question, &greedy(24), &AttentionRequest::default(), false, NEVER);
    // On a GPU four tokens are read by other kernels than a whole window, and one of two likely tokens may win.
    assert!(on_gpu() || after.text == expected.text, "{} is not {}", after.text, expected.text);
    assert_eq!(after.stats.map(|s| s.prefilled), Some(4), "the cache holds nothing of the fork");
}

fn ram_and_disk(folder: &Path) -> KvArchiveLimits {
    KvArchiveLimits { ram: 1 << 20, disk: 1 << 30, folder: Some(folder.to_owned()) }
}

/// After a restart the cells are restored, nothing is recomputed, and the answer is the same.
#[test]
fn kv_archive_restores_conversation_after_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut model = open_model(ram_and_disk(folder.path()), KvCacheMode::EditCells);
    let mut texts = vec![QUESTION[0]];
    texts.extend(
        ["<|im_start|>user\nIt rained from morning on, and the guests came late and wet.<|im_end|>\n"; 6],
    );
    let history = tokenize_window(&mut model, &texts);
    let next = [&texts[..], &QUESTION[1..]].concat();
    let question = tokenize_window(&mut model, &next);
    let (_, _) = generate(&mut model, &history, &greedy(1), &AttentionRequest::none(), false, NEVER);
    model.persist_kv("main", &history).expect("persisted");
    let (_, expected) =
        generate(&mut model, &question, &greedy(12), &AttentionRequest::default(), false, NEVER);
    drop(model);
    let mut model = open_model(ram_and_disk(folder.path()), KvCacheMode::EditCells);
    let (_, received) =
        generate(&mut model, &question, &greedy(12), &AttentionRequest::default(), false, NEVER);
    assert_eq!((&received.text, received.stats.map(|s| s.recomputed)), (&expected.text, Some(0)));
    assert!(received.stats.is_some_and(|s| s.restored >= history.len()), "{:?}", received.stats);
    // After a kill, the persisted cells are restored.
    model.persist_kv("main", &question).expect("persisted");
    model.flush().expect("written");
    std::mem::forget(model);
    let mut model = open_model(ram_and_disk(folder.path()), KvCacheMode::EditCells);
    let (_, received) =
        generate(&mut model, &question, &greedy(12), &AttentionRequest::default(), false, NEVER);
    assert_eq!(
        (received.text, received.stats.map(|s| (s.restored, s.prefilled))),
        (expected.text, Some((question.len() - 1, 1)))
    );
    // Deleted conversations leave no file.
    model.delete_kv("main").expect("deleted");
    model.flush().expect("written");
    let files = |folder: &Path| {
        let mut folders = vec![folder.to_owned()];
        let mut files = 0;
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
                if entry.path().is_dir() { folders.push(entry.path()) } else { files += 1 }
            }
        }
        files
    };
    let remaining = files(folder.path());
    let (_, received) =
        generate(&mut model, &question, &greedy(1), &AttentionRequest::default(), false, NEVER);
    assert_eq!((received.stats.map(|s| s.prefilled), remaining), (Some(question.len()), 0));
}

const FOLDER_VARIABLE: &str = "HALO_TEST_FOLDER";

/// The window of a history, and the same with a question after it.
fn history_and_question(model: &mut Llama) -> (Vec<WindowToken>, Vec<WindowToken>) {
    let mut texts = vec![QUESTION[0]];
    texts.extend(["<|im_start|>user\nIt rained, and the guests came late and wet.<|im_end|>\n"; 5]);
    let history = tokenize_window(model, &texts);
    (history, tokenize_window(model, &[&texts[..], &QUESTION[1..]].concat()))
}

/// The child process: persists the KV cells of a history, then dies without cleaning up.
#[test]
#[ignore = "helper: kv_archive_is_read_by_another_process runs it in a child process; it aborts"]
fn kv_archive_child_process_aborts() {
    let folder = std::env::var_os(FOLDER_VARIABLE).expect("the parent process sets the folder");
    let mut model = open_model(ram_and_disk(Path::new(&folder)), KvCacheMode::EditCells);
    let (history, _) = history_and_question(&mut model);
    let (end, _) = generate(&mut model, &history, &greedy(1), &AttentionRequest::none(), false, NEVER);
    assert!(end.is_ok());
    model.persist_kv("main", &history).expect("persisted");
    model.flush().expect("written");
    std::process::abort();
}

/// One process persists a history and is killed; another one continues with the same attention rows, to the last bit.
#[test]
fn kv_archive_is_read_by_another_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let test_binary = std::env::current_exe().expect("the path of this test");
    let mut child = std::process::Command::new(test_binary);
    child
        .args(["--ignored", "--exact", "generate::kv_archive_child_process_aborts"])
        .env(FOLDER_VARIABLE, folder.path());
    let child = child.output().expect("the child process starts");
    let stdout = String::from_utf8_lossy(&child.stdout);
    assert!(
        !child.status.success() && stdout.contains("running 1 test"),
        "the child process was killed: {stdout}"
    );
    let rows = |model: &mut Llama, question: &[WindowToken]| {
        let prompt = Prompt {
            conversation: "main",
            window: question,
            messages: &Vec::new,
            next_position: Position(9999),
            ephemeral: false,
        };
        let (mut rows, mut stats) = (Vec::new(), CacheStats::default());
        let end = model.generate(&prompt, &greedy(8), &AttentionRequest::default(), &mut |step| {
            match step {
                ModelStep::Token(token, Some(row)) => rows.push((token.id, row.mean.to_vec())),
                ModelStep::PrefillDone(done) => stats = done,
                _ => {}
            }
            StepFlow::Continue
        });
        assert!(end.is_ok() && rows.len() > 2);
        (rows, stats)
    };
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    let (history, question) = history_and_question(&mut model);
    generate(&mut model, &history, &greedy(1), &AttentionRequest::none(), false, NEVER).0.expect("prefilled");
    let (expected, _) = rows(&mut model, &question);
    let mut other = open_model(ram_and_disk(folder.path()), KvCacheMode::EditCells);
    let (actual, stats) = rows(&mut other, &question);
    assert_eq!((stats.restored, stats.recomputed), (history.len(), 0), "the history is restored");
    assert!(expected == actual, "the rows differ");
}

#[test]
fn kv_cache_recompute_mode_gives_the_same_answer() {
    let mut editing = open_model(ram_only(), KvCacheMode::EditCells);
    let mut recomputing = open_model(KvArchiveLimits::disabled(), KvCacheMode::Recompute);
    let question = tokenize_window(&mut editing, &QUESTION);
    let (_, one) = generate(&mut editing, &question, &greedy(24), &AttentionRequest::default(), false, NEVER);
    let (_, two) =
        generate(&mut recomputing, &question, &greedy(24), &AttentionRequest::default(), false, NEVER);
    assert_eq!((one.text, one.rows), (two.text, two.rows));
}

/// Concurrent callers each get their answer, and tokenizing waits for none of them.
#[test]
fn generate_serves_concurrent_callers() {
    let mut model = open_model(ram_only(), KvCacheMode::EditCells);
    let question = tokenize_window(&mut model, &QUESTION);
    let (_, expected) =
        generate(&mut model, &question, &greedy(24), &AttentionRequest::default(), false, NEVER);
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..3)
            .map(|_| {
                let (mut model, question) = (model.clone(), question.clone());
                scope.spawn(move || {
                    generate(&mut model, &question, &greedy(24), &AttentionRequest::default(), false, NEVER)
                        .1
                        .text
                })
            })
            .collect();
        // A caller that stops early does not affect the others.
        let (mut stopping, question) = (model.clone(), question.clone());
        let stopped = scope.spawn(move || {
            generate(&mut stopping, &question, &greedy(24), &AttentionRequest::default(), false, 3).0
        });
        assert!(model.clone().tokenize("meanwhile", false).is_ok());
        for caller in callers {
            assert_eq!(caller.join().expect("no panic"), expected.text);
        }
        assert_eq!(stopped.join().expect("no panic"), Ok(FinishReason::Cancelled));
    });
}
