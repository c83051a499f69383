//! `halo chat` with the real binary and the real model. Each line from the pipe is one message.

use crate::common::{model_command, send_lines};
use serde_json::{Value, json};
use std::io::{BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Stdio};

fn spawn_chat(data: &Path, args: &[&str]) -> Child {
    let mut command = model_command(data, &[&["chat"], args].concat());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("halo starts")
}

/// Sends each line as a message and returns standard output.
pub fn chat_lines(data: &Path, args: &[&str], lines: &[String]) -> String {
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    send_lines(&mut model_command(data, &[&["chat"], args].concat()), &lines).out
}

pub fn run_json(data: &Path, args: &[&str]) -> Value {
    let output = model_command(data, &[args, &["--json"]].concat()).output().expect("halo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// The same seed and messages give the same answers, byte for byte, also when the program exits after every turn.
#[test]
fn chat_is_deterministic_for_same_seed_and_messages() {
    let args = [
        "--set",
        "context.max_tokens=300",
        "--set",
        "generation.max_tokens=24",
        "--set",
        "chunk.min_tokens=16",
    ];
    let lines: Vec<String> =
        ["Hello there.", "Tell me of the sea.", "And of ships?", "What of the gun?", "Good night."]
            .map(str::to_owned)
            .into();
    let [first, second, restarted] = [(); 3].map(|()| crate::common::temp_dir());
    let output = chat_lines(first.path(), &args, &lines);
    let chunks = run_json(first.path(), &["show", "--all"]);
    let answers = chunks.as_array().expect("chunks").iter().filter(|chunk| chunk["role"] == "assistant");
    let mut rest = output.as_str();
    for answer in answers {
        let text = answer["text"].as_str().unwrap_or_default().trim();
        assert!(!text.is_empty(), "{chunks:#}");
        let at = rest.find(text).unwrap_or_else(|| panic!("{text} is not in {rest}"));
        rest = &rest[at + text.len()..];
    }
    assert_eq!(rest.trim(), "", "stdout contains only answers");
    assert_eq!(chat_lines(second.path(), &args, &lines), output);
    let restarted_output: String =
        lines.iter().map(|line| chat_lines(restarted.path(), &args, std::slice::from_ref(line))).collect();
    assert_eq!(restarted_output, output, "a restart after every turn changes nothing");
    let states = [&first, &second, &restarted].map(|home| {
        let chunks = run_json(home.path(), &["show", "--all"]);
        serde_json::to_string(&chunks).expect("JSON")
    });
    assert!(states[0] == states[1] && states[1] == states[2]);
}

/// After a kill in the middle of an answer, every printed token is stored, and the next start reports that the answer
/// was cut off.
#[test]
fn crash_keeps_every_token_already_printed() {
    let home = crate::common::temp_dir();
    let (mut kills, mut cut_off) = (0, 0);
    while kills < crate::common::iterations("HALO_KILLS", 6) {
        // Each kill has its own conversation: after cut-off answers this small model generates few tokens.
        let name = format!("kill {kills}");
        let args = ["--set", "generation.max_tokens=200", "-c", &name];
        chat_lines(home.path(), &args, &["Hello there.".to_owned()]);
        kill_mid_answer(home.path(), &args, &name, kills % 3);
        kills += 1;
        let mut child = spawn_chat(home.path(), &args);
        drop(child.stdin.take());
        let stderr = child.wait_with_output().expect("halo exits").stderr;
        let stderr = String::from_utf8_lossy(&stderr).into_owned();
        let turns = run_json(home.path(), &["stats", "-c", &name]);
        let finishes: Vec<&str> =
            turns.as_array().expect("turns").iter().filter_map(|t| t["finish"].as_str()).collect();
        assert_eq!(finishes.len(), 2, "{turns:#}");
        let interrupted = finishes[1] == "interrupted";
        assert_eq!(
            stderr.contains("the answer of turn 3 was cut off"),
            interrupted,
            "{finishes:?}: {stderr}"
        );
        cut_off += usize::from(interrupted);
    }
    assert!(2 * cut_off > kills, "{cut_off} of {kills} kills interrupted an answer");
}

/// Sends a message and kills the program after the first bytes of the answer.
fn kill_mid_answer(data: &Path, args: &[&str], name: &str, round: usize) {
    let mut child = spawn_chat(data, args);
    let mut stdin = child.stdin.take().expect("stdin is piped");
    writeln!(stdin, "Tell me a long story.").expect("halo reads stdin");
    // End of input: when the answer is shorter than the bytes awaited below, the program exits and the read returns.
    drop(stdin);
    let mut out = BufReader::new(child.stdout.take().expect("stdout is piped"));
    let mut printed = Vec::new();
    out.by_ref().take(4 + 4 * round as u64).read_to_end(&mut printed).expect("stdout is readable");
    child.kill().expect("the process is killed");
    child.wait().expect("the process exits");
    // The bytes left in the pipe were printed before the kill.
    out.read_to_end(&mut printed).expect("stdout is readable");
    let chunks = run_json(data, &["show", "--all", "-c", name]);
    let chunks = chunks.as_array().expect("chunks");
    let last_turn = chunks.last().expect("an answer")["turn"].clone();
    let stored: String =
        chunks.iter().filter(|c| c["turn"] == last_turn).filter_map(|c| c["text"].as_str()).collect();
    let printed = String::from_utf8_lossy(&printed).into_owned();
    // The program prints a line break after a complete answer; it is not part of the answer.
    let printed = printed.trim_end_matches('\u{fffd}').trim_end_matches('\n');
    assert!(stored.starts_with(printed), "printed {printed:?}, stored {stored:?}");
    let user_messages: Vec<&str> =
        chunks.iter().filter(|c| c["role"] == "user").filter_map(|c| c["text"].as_str()).collect();
    assert_eq!(user_messages, ["Hello there.", "Tell me a long story."]);
}

/// An imported conversation is retokenized when it is first opened, and continues.
#[test]
fn import_is_retokenized_and_continues() {
    let home = crate::common::temp_dir();
    let file = home.path().join("conversation.md");
    std::fs::write(&file, "**User:** The gun is called Betsy.\n\n**Assistant:** Noted.\n")
        .expect("the file is written");
    let import =
        model_command(home.path(), &["import", "-c", "main"]).arg(&file).output().expect("halo runs");
    assert!(import.status.success(), "{}", String::from_utf8_lossy(&import.stderr));
    let args = ["--set", "generation.max_tokens=8"];
    let answer = chat_lines(home.path(), &args, &["What is the gun called?".to_owned()]);
    assert!(!answer.trim().is_empty());
    let names = run_json(home.path(), &["conversations"]);
    let names: Vec<&str> =
        names.as_array().expect("a list").iter().filter_map(|c| c["name"].as_str()).collect();
    assert_eq!(names, ["main", "main (original)"]);
    let chunks = run_json(home.path(), &["show"]);
    let texts: Vec<&str> =
        chunks.as_array().expect("chunks").iter().filter_map(|c| c["text"].as_str()).collect();
    assert_eq!(&texts[..3], ["The gun is called Betsy.", "Noted.", "What is the gun called?"]);
}

/// Paragraphs of an imported message are cut where they end: before a model has seen them, and after the first one has
/// tokenized them. No byte is lost.
#[test]
fn import_cuts_paragraphs_where_they_end() {
    let home = crate::common::temp_dir();
    let paragraphs = [
        format!("{}fills the room below.\n\n", "The heat of the ovens rises and ".repeat(12)),
        format!("Bread is another matter.\r\n{}\n\n\n", "It rests and rises on its board. ".repeat(12)),
        "```sh\nls\n\nrm crumbs\n```".to_owned(),
        "\nThat is all.".to_owned(),
    ];
    let file = home.path().join("bakery.json");
    let messages = json!({ "messages": [
        { "role": "user", "content": "Tell me of the bakery." },
        { "role": "assistant", "content": paragraphs.concat() },
    ]});
    std::fs::write(&file, messages.to_string()).expect("the file is written");
    let size = ["--set", "chunk.min_tokens=8", "--set", "chunk.max_tokens=200"];
    let import = model_command(home.path(), &["import", "-c", "main"]).args(size).arg(&file).output();
    let import = import.expect("halo runs");
    assert!(import.status.success(), "{}", String::from_utf8_lossy(&import.stderr));
    let answer_chunks = || -> Vec<String> {
        let shown = run_json(home.path(), &["show"]);
        let shown = shown.as_array().expect("chunks");
        let texts =
            shown.iter().filter(|chunk| chunk["chunk"].as_str().is_some_and(|c| c.starts_with("a1.")));
        texts.filter_map(|chunk| chunk["text"].as_str()).map(str::to_owned).collect()
    };
    let without_model = answer_chunks();
    assert_eq!(without_model, paragraphs);
    chat_lines(home.path(), &["--set", "generation.max_tokens=2"], &["What is another matter?".to_owned()]);
    assert_eq!(answer_chunks(), without_model);
}

/// `halo extract` prints sentences of the conversation, word for word and in its order.
#[test]
fn extract_prints_sentences_word_for_word() {
    let home = crate::common::temp_dir();
    let lines = [
        "The gun on the wall is called Betsy. It rains in Lisbon today. My sister plays the cello.",
        "What is the gun on the wall called? I had soup for lunch.",
        "And what is my sister called?",
    ];
    let lines = lines.map(str::to_owned);
    chat_lines(home.path(), &["--set", "generation.max_tokens=16"], &lines);
    let chunks = run_json(home.path(), &["show", "--all"]);
    let text_of = |chunk: &Value| {
        let found = chunks.as_array().expect("chunks").iter().find(|other| other["chunk"] == *chunk);
        found.and_then(|found| found["text"].as_str()).unwrap_or_default().to_owned()
    };
    let extract = run_json(home.path(), &["extract", "-n", "3"]);
    let sentences = extract.as_array().expect("sentences");
    assert_eq!(sentences.len(), 3, "{extract}");
    for sentence in sentences {
        let text = sentence["text"].as_str().expect("a text");
        assert!(!text.is_empty() && text_of(&sentence["chunk"]).contains(text), "{sentence}");
        assert!(sentence["brightness"].as_f64().is_some_and(|brightness| brightness >= 0.0), "{sentence}");
    }
    let positions: Vec<u64> = sentences.iter().filter_map(|sentence| sentence["position"].as_u64()).collect();
    assert!(positions.is_sorted(), "{extract}");
    assert_eq!(
        run_json(home.path(), &["extract"]),
        run_json(home.path(), &["extract"]),
        "the same every time"
    );
}

/// Standard output contains only answers. Errors are reported on standard error.
#[test]
fn chat_reports_errors_on_stderr_and_keeps_data() {
    let home = crate::common::temp_dir();
    let run = |args: &[&str], text: &str| {
        let mut child = spawn_chat(home.path(), args);
        child.stdin.take().expect("stdin is piped").write_all(text.as_bytes()).expect("halo reads stdin");
        let output = child.wait_with_output().expect("halo exits");
        let [out, err] = [&output.stdout, &output.stderr].map(|b| String::from_utf8_lossy(b).into_owned());
        (output.status.code(), out, err)
    };
    assert_eq!(run(&[], "\n  \n"), (Some(0), String::new(), String::new()));
    let long = format!("{}\n", "word ".repeat(9000));
    let (code, out, err) = run(&["--set", "model.context=512", "--set", "generation.max_tokens=50"], &long);
    assert_eq!((code, out.trim()), (Some(1), ""), "{err}");
    assert!(
        err.contains("context length exceeded: 9071 tokens do not fit in 512")
            && err.contains("shorten the message"),
        "{err}"
    );
    let conversations = run_json(home.path(), &["conversations"]);
    assert_eq!(conversations.as_array().map(Vec::len), Some(0), "{conversations}");
    assert!(
        err.starts_with("halo: line 1: ") && err.ends_with("halo: 1 line could not be answered\n"),
        "{err}"
    );
}

/// Replaying the capture of an answer gives the same brightness as the conversation had, and `halo stats` lists every
/// turn with its attention traces and times.
#[test]
fn capture_replays_to_same_brightness() {
    let home = crate::common::temp_dir();
    let captures = home.path().join("captures");
    let record = |line: &str| {
        let mut command = model_command(home.path(), &["capture", "--set", "generation.max_tokens=12"]);
        command.arg("-o").arg(&captures).args(["--set", "trace.interval=5"]);
        send_lines(&mut command, &[line]);
    };
    record("The gun on the wall is called Betsy.");
    let replayed = run_json(home.path(), &["replay", &captures.join("turn-1").display().to_string()]);
    let history = run_json(home.path(), &["why", "u0.0"]);
    assert_eq!(replayed["chunks"][0]["chunk"], "u0.0");
    assert_eq!(replayed["chunks"][0]["votes"], history["votes"]);
    assert_ne!(history["votes"], 0);
    record("What is the gun on the wall called?");
    let replayed = run_json(home.path(), &["replay", &captures.join("turn-3").display().to_string()]);
    let chunks = run_json(home.path(), &["show"]);
    let peaks = |chunks: &Value| -> Vec<(Value, f64)> {
        let peak = |c: &Value| (c["chunk"].clone(), c["peak"].as_f64().unwrap_or(-1.0));
        chunks.as_array().expect("chunks").iter().map(peak).collect()
    };
    assert_eq!(peaks(&replayed["chunks"]), peaks(&chunks));

    let output = model_command(home.path(), &["replay"]).arg(&captures).output().expect("halo runs");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && stderr.contains("holds 2 captures"), "{stderr}");

    let turns = run_json(home.path(), &["stats"]);
    let turns = turns.as_array().expect("turns");
    assert_eq!(turns.iter().map(|t| t["turn"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(3)]);
    for turn in turns {
        let steps: Vec<u64> =
            turn["attention"].as_array().expect("traces").iter().filter_map(|t| t["step"].as_u64()).collect();
        let tokens = turn["tokens"].as_u64().expect("a number");
        assert_eq!(steps, (0..tokens).step_by(5).collect::<Vec<_>>(), "{turn:#}");
        assert!(turn["ms"]["generate"].as_f64() > Some(0.0), "{turn:#}");
        for trace in turn["attention"].as_array().expect("traces") {
            let bins: Vec<u64> =
                trace["histogram"].as_array().expect("bins").iter().filter_map(Value::as_u64).collect();
            assert_eq!(bins.len(), 16, "{trace}");
            assert!(bins.iter().sum::<u64>() > 20, "every token of the window is counted: {trace}");
            let max = trace["max"].as_f64().expect("a number");
            let last = bins.iter().rposition(|&count| count > 0).expect("a token");
            let edge = |bin: usize| (bin as f64 - 16.0).exp2();
            assert!((edge(last)..edge(last + 1) + 0.001).contains(&max), "{trace}");
        }
    }
    let table = model_command(home.path(), &["stats"]).output().expect("halo runs");
    let table = String::from_utf8(table.stdout).expect("UTF-8");
    let rows = table.lines().skip_while(|line| !line.starts_with("attention in turn 3")).skip(2);
    let rows: Vec<&str> = rows.take_while(|line| !line.starts_with("distribution:")).collect();
    assert_eq!(rows.len() as u64, turns[1]["tokens"].as_u64().expect("a number").div_ceil(5), "{table}");
    assert!(rows.iter().all(|row| row.ends_with(['·', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'])), "{table}");
}

/// The first engine keeps its window over ten turns: the target of 120 tokens and the system prompt.
#[test]
fn v0_preset_keeps_its_window_over_ten_turns() {
    let home = crate::common::temp_dir();
    let settings = ["preset=halo_v0", "ttl.target=120", "generation.max_tokens=24", "trace.interval=10"];
    let args: Vec<&str> = settings.into_iter().flat_map(|setting| ["--set", setting]).collect();
    let lines = [
        "My gun is called Betsy. Remember that.",
        "The cat sleeps on the sofa and dreams of the mice in the barn behind the house.",
        "It rains in Lisbon today.",
        "My sister plays the cello in the orchestra of the town.",
        "What is my gun called?",
        "The train to Rome is late.",
        "I had soup for lunch, with bread and a little cheese from the market.",
        "The garden needs water.",
        "Which animal sleeps on the sofa?",
        "What is my gun called?",
    ];
    chat_lines(home.path(), &args, &lines.map(str::to_owned));
    let turns = run_json(home.path(), &["stats"]);
    let live: Vec<u64> =
        turns.as_array().expect("turns").iter().filter_map(|turn| turn["live"].as_u64()).collect();
    assert_eq!(live.len(), 10, "{turns:#}");
    // The system prompt has 9 tokens with its template.
    assert!(live.iter().all(|&live| live <= 120 + 9), "{live:?}");
    assert!(live[2..].iter().all(|&live| live >= 119 + 9), "{live:?}");
    for turn in turns.as_array().expect("turns") {
        let traces = turn["attention"].as_array().expect("traces");
        let steps: Vec<u64> = traces.iter().filter_map(|trace| trace["step"].as_u64()).collect();
        let tokens = turn["tokens"].as_u64().expect("a number");
        assert_eq!(steps, (0..tokens).step_by(10).collect::<Vec<_>>(), "{turn:#}");
        for trace in traces {
            let bins = trace["histogram"].as_array().expect("a distribution");
            let slots: u64 = bins.iter().filter_map(Value::as_u64).sum();
            assert!(bins.len() == 16 && slots > 20 && slots <= 120 + 9 + 30, "{trace}");
        }
    }
}
