//! What a model may do with its notes, when it means harm: the real program runs each filter in a process of its own.

use halo_engine::tools::jq::Runner;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn runner() -> Runner {
    Runner::Program(env!("CARGO_BIN_EXE_halo").into())
}

#[test]
fn a_filter_runs_in_a_process_of_its_own() {
    let notes = json!({"context": {"name": "Ada"}, "list": [1, 2, 3]});
    assert_eq!(runner().run(".context.name", &notes), Ok(vec![json!("Ada")]));
    assert_eq!(runner().run("[.list[] | . + 1]", &notes), Ok(vec![json!([2, 3, 4])]));
    assert_eq!(runner().run("def f: f; f", &notes), Err("def is not allowed here".into()));
    let gone = Runner::Program("/nowhere/halo".into()).run(".", &notes);
    assert!(gone.is_err_and(|why| why.starts_with("it could not be run")));
}

/// A few harmless steps can multiply for ever: time and memory end it.
#[test]
fn what_grows_without_end_is_ended() {
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
        let ended = runner().run(&filter, &notes);
        let short = &filter[..filter.len().min(60)];
        assert!(begin.elapsed() < Duration::from_secs(3), "{short}: {:?}", begin.elapsed());
        assert!(ended.is_err(), "{short}: {ended:?}");
    }
}

/// Filters put together by lot from everything that jq knows: each ends, in time, with a result or a reason.
#[test]
fn filters_by_lot_end_in_time() {
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
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    let mut draw = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % n as u64) as usize
    };
    let (mut good, mut slowest) = (0, Duration::ZERO);
    for _ in 0..400 {
        let filter: String = (0..1 + draw(9)).map(|_| parts[draw(parts.len())]).collect();
        let begin = Instant::now();
        let ended: Result<Vec<Value>, String> = runner().run(&filter, &notes);
        slowest = slowest.max(begin.elapsed());
        assert!(begin.elapsed() < Duration::from_secs(3), "{filter:?} took {:?}", begin.elapsed());
        match ended {
            Ok(_) => good += 1,
            Err(why) => assert!(!why.is_empty(), "{filter:?}"),
        }
    }
    assert!(good > 5, "some of them are filters: {good}; the slowest took {slowest:?}");
}
