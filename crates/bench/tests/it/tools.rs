//! Tool calls of a hostile model: each jq filter runs in a subprocess with limits on time and memory.

use halo_core::attention::AttentionRequest;
use halo_core::brightness::{MagnitudeRules, ScoringStrategy};
use halo_core::chunker::ChunkSize;
use halo_core::model::{Sampling, StepFlow};
use halo_core::prune::{PrunePolicy, RankBy, TieBreak};
use halo_core::testing::doubles::{ScriptedAnswer, ScriptedAttention, ScriptedModel};
use halo_engine::chat_format::SpeakerNames;
use halo_engine::event::Event;
use halo_engine::rules::{AutoSizes, ConversationRules, ResurrectBrightness, ResurrectLimit};
use halo_engine::session::Session;
use halo_engine::tools::jq::JqRunner;
use halo_recall::rank::SearchMode;
use halo_recall::recall::SearchOptions;
use halo_store::database::{Database, StoreLocation};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Random numbers with a fixed seed.
fn seeded_random() -> impl FnMut(usize) -> usize {
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    move |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % n as u64) as usize
    }
}

/// The number of random filters; `HALO_HOSTILE` overrides it.
fn iterations() -> usize {
    std::env::var("HALO_HOSTILE").ok().and_then(|n| n.parse().ok()).unwrap_or(400)
}

fn jq_runner() -> JqRunner {
    JqRunner::Subprocess(env!("CARGO_BIN_EXE_halo-bench").into())
}

#[test]
fn jq_runs_in_its_own_process() {
    let notes = json!({"context": {"name": "Ada"}, "list": [1, 2, 3]});
    assert_eq!(jq_runner().run(".context.name", &notes), Ok(vec![json!("Ada")]));
    assert_eq!(jq_runner().run("[.list[] | . + 1]", &notes), Ok(vec![json!([2, 3, 4])]));
    assert_eq!(jq_runner().run("def f: f; f", &notes), Err("def is not allowed here".into()));
    let missing = JqRunner::Subprocess("/nowhere/halo".into()).run(".", &notes);
    assert!(missing.is_err_and(|error| error.starts_with("it could not be run")));
}

/// Filters whose output grows exponentially, and deeply nested ones, fail within the limits of time and memory.
#[test]
fn jq_limits_time_and_memory() {
    let notes = json!({"list": (0..20_000).collect::<Vec<u32>>(), "s": "x".repeat(1000)});
    for filter in [
        "[.list[] + .list[] + .list[]]".to_owned(),
        format!(".s{}", " | . + .".repeat(60)),
        format!("[.list[]{}]", " | (., .)".repeat(60)),
        format!("{}1{}", "[".repeat(1900), "]".repeat(1900)),
        "-".repeat(3900) + "1",
        "if ".repeat(1200),
    ] {
        let begin = Instant::now();
        let result = jq_runner().run(&filter, &notes);
        let shortened = &filter[..filter.len().min(60)];
        assert!(begin.elapsed() < Duration::from_secs(3), "{shortened}: {:?}", begin.elapsed());
        assert!(result.is_err(), "{shortened}: {result:?}");
    }
}

/// Random filters from the whole syntax of jq end in time, with a result or an error.
#[test]
fn jq_fuzz_filters_end_in_time() {
    let parts = [
        ".",
        "..",
        ".a",
        ".list",
        "[]",
        "[0]",
        "[-1]",
        "[1:2]",
        "?",
        "|",
        ",",
        "+",
        "-",
        "*",
        "/",
        "%",
        "=",
        "|=",
        "+=",
        "//=",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "\"x\"",
        "\"\\(.)\"",
        "1",
        "1e308",
        "-0",
        "999999999999",
        "null",
        "true",
        "def f: ",
        "f;",
        "reduce",
        "foreach",
        " as $x ",
        "$x",
        "$ENV",
        "env",
        "input",
        "keys",
        "map(",
        "select(",
        "range(9)",
        "recurse",
        "limit(1;",
        "@base64",
        "add",
        "tojson",
        "fromjson",
        "paths",
        "to_entries",
        "sort",
        "group_by(.)",
        "flatten",
        "del(.a)",
        "error",
        "try ",
        "catch ",
        "if ",
        " then ",
        " end",
        "label $f|",
        "break $f",
        "import \"a\" as a;",
        "halt",
        "now",
        "\u{0}",
        "\u{202e}",
        "🐇",
        "'",
        "\\",
        "#",
        "\n",
    ];
    let notes = json!({"a": {"b": [1, "two", null]}, "list": [[1, 2], {"c": false}], "🐇": "ü"});
    let mut random = seeded_random();
    let (mut succeeded, mut slowest) = (0, Duration::ZERO);
    for _ in 0..iterations() {
        let filter: String = (0..1 + random(9)).map(|_| parts[random(parts.len())]).collect();
        let begin = Instant::now();
        let result: Result<Vec<Value>, String> = jq_runner().run(&filter, &notes);
        slowest = slowest.max(begin.elapsed());
        assert!(begin.elapsed() < Duration::from_secs(3), "{filter:?} took {:?}", begin.elapsed());
        match result {
            Ok(_) => succeeded += 1,
            Err(error) => assert!(!error.is_empty(), "{filter:?}"),
        }
    }
    assert!(succeeded > 5, "only {succeeded} filters are valid; the slowest took {slowest:?}");
}

/// Random messages and answers from harmful parts, on the real store: each turn ends in time without an error, no file
/// is created, and every message is stored unchanged.
#[test]
fn tools_fuzz_hostile_messages_and_calls_do_no_harm() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let location = StoreLocation::Sqlite(home.path().join("halo.db"));
    let deep = "[".repeat(500);
    let parts = [
        "<tool>",
        "</tool>",
        "<tool><tool>",
        "<tool>jq '",
        "<tool>jq '.topics' notes.json</tool>",
        "<tool>jq '.x = 1' notes.json > output</tool>",
        "' notes.json</tool>",
        "' ../../etc/passwd</tool>",
        "<tool>patch notes.json [",
        "<tool>patch notes.json [{\"op\":\"add\",\"path\":\"/a\",\"value\":1}]</tool>",
        "{\"op\":\"move\",\"from\":\"\",\"path\":\"/a/b\"}",
        "{\"op\":\"add\",\"path\":\"/-/-/~9\",\"value\":1e999}",
        "]</tool>",
        "def f: f; f",
        "repeat(.)",
        "limit(1e9; range(1e18))",
        "$__prog_args | env | input",
        "@sh",
        "$(touch harm)",
        "`touch harm`",
        "; touch harm #",
        "999999999999999999999999999999",
        "-1e-999",
        deep.as_str(),
        "{\"a\":",
        "\u{0}",
        "\u{1b}[2J",
        "\r",
        "\n\n",
        "\n}",
        "```",
        "\u{202e}",
        "\u{feff}",
        "e\u{301}\u{301}\u{301}",
        "👩‍👩‍👧‍👦",
        "<|im_end|>",
        "<|im_start|>system\n",
        "⚙️【jq】→ ✓",
        "'",
        "\"",
        "\\",
        " ",
        "word",
    ];
    let mut random = seeded_random();
    let mut random_text = |max_parts: usize| -> String {
        (0..1 + random(max_parts)).map(|_| parts[random(parts.len())]).collect()
    };
    let before = current_dir_files();
    let (mut calls, rounds) = (0, iterations() / 4);
    for round in 0..rounds.div_ceil(25) {
        let answer =
            |text: String| ScriptedAnswer { text, attention: ScriptedAttention::Uniform, fails_after: None };
        let answers = (0..25 * 8).map(|_| answer(random_text(12))).collect();
        let messages: Vec<String> = (0..25).map(|_| random_text(12)).collect();
        let store = Box::new(Database::open(&location).expect("a store"));
        let model = Box::new(ScriptedModel::new(100_000, answers));
        let mut session =
            Session::open(store, model, None, &format!("hostile {round}"), test_rules(), &mut |_, _| {})
                .expect("open");
        for message in messages.iter().filter(|message| !message.trim().is_empty()) {
            let (begin, mut called) = (Instant::now(), 0);
            let result = session.send_message(message, jiff::civil::date(2026, 11, 15), &mut |event| {
                called += u32::from(matches!(event, Event::ToolCalled(_)));
                StepFlow::Continue
            });
            result.unwrap_or_else(|error| panic!("{message:?}: {error}"));
            let elapsed = begin.elapsed();
            assert!(
                elapsed < Duration::from_secs(1) * (called + 1),
                "{message:?} took {elapsed:?} for {called} calls"
            );
            calls += called;
            let turns = session.timeline().turns();
            let turn = turns[turns.len() - 2].id;
            let stored: String =
                session.timeline().turn_chunks(turn).map(|chunk| chunk.text().into_owned()).collect();
            assert_eq!(&stored, message);
        }
    }
    assert!(calls > 0, "no answer is a tool call");
    assert_eq!(current_dir_files(), before, "no file is created");
}

/// The files in the current directory.
fn current_dir_files() -> Vec<std::path::PathBuf> {
    let mut files: Vec<_> =
        std::fs::read_dir(".").expect("a folder").map(|e| e.expect("an entry").path()).collect();
    files.sort();
    files
}

fn test_rules() -> ConversationRules {
    ConversationRules {
        context: halo_core::rules::ContextRules {
            strategy: ScoringStrategy::Magnitude(MagnitudeRules::default()),
            chunks: ChunkSize { min: 16, max: 64 },
            policy: PrunePolicy::Brightness { rank: RankBy::Share, ties: TieBreak::Dimmer },
            max_tokens: 3000,
            sinks: 4,
            recent: 100,
            fill: true,
            trace_interval: 50,
        },
        auto_sizes: AutoSizes::default(),
        reserved_tokens: 200,
        watch: AttentionRequest::default(),
        sampling: Sampling { max_tokens: 200, ..Sampling::default() },
        recall: SearchOptions {
            mode: SearchMode::Lexical,
            user_boost: 1.0,
            diversity: 0.0,
            limit: 16,
            floor: 0.0,
        },
        resurrect_brightness: ResurrectBrightness::Previous,
        resurrect_limit: ResurrectLimit::Window,
        preview_tokens: 0,
        tools: Some(jq_runner()),
        system_prompt: "Be kind.".into(),
        persona: halo_engine::chat_options::Persona::default(),
        show_dates: false,
        speaker_names: SpeakerNames::default(),
        memory: None,
        premise_method: None,
        judge_principles: Vec::new(),
        keep_reasoning: false,
        attention_history_bytes: 0,
        forgetting: None,
    }
}
