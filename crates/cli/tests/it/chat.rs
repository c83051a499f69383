//! `halo chat`, the real binary with the real model: lines from a pipe are messages.

use serde_json::Value;
use std::io::{BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

fn model_command(data: &Path, args: &[&str]) -> Command {
    let mut command = crate::common::halo_command(data, args);
    command.arg("--model").arg(crate::common::chat_model());
    command.args(["--seed", "7", "--threads", "1", "--set", &crate::common::embedder_setting()]);
    // What the model says depends on the day that it is told; tests do not.
    command.env("HALO_CHAT_DATES", "false");
    command
}

fn spawn_chat(data: &Path, args: &[&str]) -> Child {
    let mut command = model_command(data, &[&["chat"], args].concat());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("it starts")
}

/// Says all lines, and hears what comes back on standard output.
fn chat_lines(data: &Path, args: &[&str], lines: &[String]) -> String {
    let mut child = spawn_chat(data, args);
    let mut stdin = child.stdin.take().expect("piped");
    let text = lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
    let output = child.wait_with_output().expect("it ends");
    writer.join().expect("written").expect("written");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8(output.stdout).expect("text")
}

fn run_json(data: &Path, args: &[&str]) -> Value {
    let output = model_command(data, &[args, &["--json"]].concat()).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// The gun of the first turn: it leaves a window of a thousand tokens, and when turn 80 asks for it, it is back at its
/// own place and the model says its name. By what the model looks at it would never leave, so here the oldest do.
#[test]
fn resurrect_brings_turn_one_back_at_turn_eighty() {
    let home = crate::common::temp_dir();
    let small = ["context.max_tokens=1000", "generation.max_tokens=16", "generation.temperature=0"];
    let set = |setting| ["--set", setting];
    let args: Vec<&str> = small.into_iter().chain(["prune.policy=fifo"]).flat_map(set).collect();
    let things = [
        "The cat sleeps on the sofa.",
        "It rains in Lisbon today.",
        "My sister plays the cello.",
        "The train to Rome is late.",
        "I had soup for lunch.",
        "The garden needs water.",
        "Our neighbour paints boats.",
        "The bakery closes at six.",
        "I read a book about bees.",
        "The clock in the hall is slow.",
    ];
    let mut lines = vec!["My gun is called Betsy. Remember that.".to_owned()];
    lines.extend((1..40).map(|n| things[n % 10].to_owned()));
    chat_lines(home.path(), &args, &lines);
    let shown = run_json(home.path(), &["show", "--all"]);
    let chunk = |page: &Value, name: &str| {
        let all = page.as_array().expect("chunks").iter();
        all.clone()
            .find(|c| c["chunk"] == name)
            .cloned()
            .unwrap_or_else(|| panic!("{name} is not in {page:#}"))
    };
    let gone = chunk(&shown, "u0.0");
    assert_eq!((&gone["live"], &gone["position"]), (&Value::Bool(false), &Value::from(0)));
    assert!(gone["why"].as_str().is_some_and(|why| why.starts_with("pruned: ")), "{gone:#}");
    assert_eq!(gone["text"], lines[0].as_str());

    let answer = chat_lines(home.path(), &args, &["What is my gun called?".to_owned()]);
    assert!(answer.contains("Betsy"), "{answer}");
    let why = run_json(home.path(), &["why", "u0.0"]);
    let events = why["events"].as_array().expect("events");
    let returned = events.iter().rfind(|e| e["what"] == "resurrected").expect("it came back");
    let told = returned["why"].as_str().unwrap_or_default();
    assert!(told.starts_with("found by search, hit 1") || told.contains("a1.0"), "{why:#}");
    let all = run_json(home.path(), &["show", "--all"]);
    assert_eq!(chunk(&all, "u0.0")["position"], 0, "at its own place");
    assert_eq!(chunk(&all, "u80.0")["turn"], 80);
}

/// The same seed and the same words give the same answers, byte for byte, also when the program was closed in between.
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
    let [one, two, three] = [(); 3].map(|()| crate::common::temp_dir());
    let through = chat_lines(one.path(), &args, &lines);
    let shown = run_json(one.path(), &["show", "--all"]);
    let answers = shown.as_array().expect("chunks").iter().filter(|chunk| chunk["role"] == "assistant");
    let mut rest = through.as_str();
    for answer in answers {
        let text = answer["text"].as_str().unwrap_or_default().trim();
        assert!(!text.is_empty(), "{shown:#}");
        let at = rest.find(text).unwrap_or_else(|| panic!("{text} is not in {rest}"));
        rest = &rest[at + text.len()..];
    }
    assert_eq!(rest.trim(), "", "answers, and nothing else");
    assert_eq!(chat_lines(two.path(), &args, &lines), through);
    let parts: String =
        lines.iter().map(|line| chat_lines(three.path(), &args, std::slice::from_ref(line))).collect();
    assert_eq!(parts, through, "closed and opened after every turn");
    let hashes = [&one, &two, &three].map(|home| {
        let shown = run_json(home.path(), &["show", "--all"]);
        serde_json::to_string(&shown).expect("JSON")
    });
    assert!(hashes[0] == hashes[1] && hashes[1] == hashes[2]);
}

/// Killed in the middle of an answer, it has every token that was on the screen, and says that the answer was cut off.
#[test]
fn crash_keeps_every_token_already_printed() {
    let home = crate::common::temp_dir();
    let (mut kills, mut cut_off) = (0, 0);
    while kills < crate::common::iterations("HALO_KILLS", 6) {
        // Each in a conversation of its own: behind answers that were cut off this small model has little to say.
        let name = format!("kill {kills}");
        let args = ["--set", "generation.max_tokens=200", "-c", &name];
        chat_lines(home.path(), &args, &["Hello there.".to_owned()]);
        kill_mid_answer(home.path(), &args, &name, kills % 3);
        kills += 1;
        let mut child = spawn_chat(home.path(), &args);
        drop(child.stdin.take());
        let told = child.wait_with_output().expect("it ends").stderr;
        let told = String::from_utf8_lossy(&told).into_owned();
        let turns = run_json(home.path(), &["stats", "-c", &name]);
        let ends: Vec<&str> =
            turns.as_array().expect("turns").iter().filter_map(|t| t["finish"].as_str()).collect();
        assert_eq!(ends.len(), 2, "{turns:#}");
        let interrupted = ends[1] == "interrupted";
        assert_eq!(told.contains("the answer of turn 3 was cut off"), interrupted, "{ends:?}: {told}");
        cut_off += usize::from(interrupted);
    }
    assert!(2 * cut_off > kills, "{cut_off} of {kills} were killed in the middle");
}

/// Says something, and kills the program when the first words of the answer are there.
fn kill_mid_answer(data: &Path, args: &[&str], name: &str, round: usize) {
    let mut child = spawn_chat(data, args);
    let mut stdin = child.stdin.take().expect("piped");
    writeln!(stdin, "Tell me a long story.").expect("written");
    // There are no more lines: an answer that is shorter than what is waited for ends the program.
    drop(stdin);
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    let mut seen = Vec::new();
    out.by_ref().take(4 + 4 * round as u64).read_to_end(&mut seen).expect("it speaks");
    child.kill().expect("killed");
    child.wait().expect("it is gone");
    // What was still in the pipe had been on its way to the screen.
    out.read_to_end(&mut seen).expect("the rest");
    let shown = run_json(data, &["show", "--all", "-c", name]);
    let chunks = shown.as_array().expect("chunks");
    let last = chunks.last().expect("an answer")["turn"].clone();
    let said: String =
        chunks.iter().filter(|c| c["turn"] == last).filter_map(|c| c["text"].as_str()).collect();
    let seen = String::from_utf8_lossy(&seen).into_owned();
    // Behind an answer that has ended comes a line break of nobody's.
    let seen = seen.trim_end_matches('\u{fffd}').trim_end_matches('\n');
    assert!(said.starts_with(seen), "seen {seen:?}, kept {said:?}");
    // Nothing that was there before is gone.
    let asked: Vec<&str> =
        chunks.iter().filter(|c| c["role"] == "user").filter_map(|c| c["text"].as_str()).collect();
    assert_eq!(asked, ["Hello there.", "Tell me a long story."]);
}

/// What another program wrote is read by the model when it is first opened, and the conversation goes on.
#[test]
fn import_is_retokenized_and_continues() {
    let home = crate::common::temp_dir();
    let file = home.path().join("talk.md");
    std::fs::write(&file, "**User:** The gun is called Betsy.\n\n**Assistant:** Noted.\n").expect("written");
    let import = model_command(home.path(), &["import", "-c", "main"]).arg(&file).output().expect("it runs");
    assert!(import.status.success(), "{}", String::from_utf8_lossy(&import.stderr));
    let args = ["--set", "generation.max_tokens=8"];
    let answer = chat_lines(home.path(), &args, &["What is the gun called?".to_owned()]);
    assert!(!answer.trim().is_empty());
    let names = run_json(home.path(), &["conversations"]);
    let names: Vec<&str> =
        names.as_array().expect("a list").iter().filter_map(|c| c["name"].as_str()).collect();
    assert_eq!(names, ["main", "main (original)"]);
    let shown = run_json(home.path(), &["show"]);
    let texts: Vec<&str> =
        shown.as_array().expect("chunks").iter().filter_map(|c| c["text"].as_str()).collect();
    assert_eq!(&texts[..3], ["The gun is called Betsy.", "Noted.", "What is the gun called?"]);
}

/// Nothing but answers goes to standard output, and what is wrong is said on standard error.
#[test]
fn chat_reports_errors_on_stderr_and_keeps_data() {
    let home = crate::common::temp_dir();
    let run = |args: &[&str], text: &str| {
        let mut child = spawn_chat(home.path(), args);
        child.stdin.take().expect("piped").write_all(text.as_bytes()).expect("written");
        let output = child.wait_with_output().expect("it ends");
        let [out, err] = [&output.stdout, &output.stderr].map(|b| String::from_utf8_lossy(b).into_owned());
        (output.status.code(), out, err)
    };
    assert_eq!(run(&[], "\n  \n"), (Some(0), String::new(), String::new()));
    let long = format!("{}\n", "word ".repeat(9000));
    let (code, out, err) = run(&["--set", "model.context=512"], &long);
    assert_eq!((code, out.trim()), (Some(1), ""), "{err}");
    assert!(
        err.contains("context length exceeded: 9071 tokens do not fit in 512")
            && err.contains("shorten the message"),
        "{err}"
    );
    let none = run_json(home.path(), &["conversations"]);
    assert_eq!(none.as_array().map(Vec::len), Some(0), "{none}");
    assert!(
        err.starts_with("halo: line 1: ") && err.ends_with("halo: 1 line could not be answered\n"),
        "{err}"
    );
}

/// What is recorded of an answer, replayed, comes to the same brightness as the conversation itself did; and every turn is on
/// record with what it took.
#[test]
fn capture_replays_to_same_brightness() {
    let home = crate::common::temp_dir();
    let captures = home.path().join("captures");
    let record = |line: &str| {
        let mut command = model_command(home.path(), &["capture", "--set", "generation.max_tokens=12"]);
        command.arg("-o").arg(&captures).args(["--set", "trace.interval=5"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        child.stdin.take().expect("piped").write_all(line.as_bytes()).expect("written");
        assert!(child.wait_with_output().expect("it ends").status.success());
    };
    record("The gun on the wall is called Betsy.\n");
    let replayed = run_json(home.path(), &["replay", &captures.join("turn-1").display().to_string()]);
    let why = run_json(home.path(), &["why", "u0.0"]);
    assert_eq!(replayed["chunks"][0]["chunk"], "u0.0");
    assert_eq!(replayed["chunks"][0]["votes"], why["votes"]);
    assert_ne!(why["votes"], 0);
    record("What is the gun on the wall called?\n");
    let replayed = run_json(home.path(), &["replay", &captures.join("turn-3").display().to_string()]);
    let shown = run_json(home.path(), &["show"]);
    let peaks = |list: &Value| -> Vec<(Value, f64)> {
        let peak = |c: &Value| (c["chunk"].clone(), c["peak"].as_f64().unwrap_or(-1.0));
        list.as_array().expect("chunks").iter().map(peak).collect()
    };
    assert_eq!(peaks(&replayed["chunks"]), peaks(&shown));

    let all = model_command(home.path(), &["replay"]).arg(&captures).output().expect("it runs");
    let told = String::from_utf8_lossy(&all.stderr).into_owned();
    assert!(!all.status.success() && told.contains("holds 2 captures"), "{told}");

    let turns = run_json(home.path(), &["stats"]);
    let turns = turns.as_array().expect("turns");
    assert_eq!(turns.iter().map(|t| t["turn"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(3)]);
    for turn in turns {
        let steps: Vec<u64> =
            turn["attention"].as_array().expect("traces").iter().filter_map(|t| t["step"].as_u64()).collect();
        let tokens = turn["tokens"].as_u64().expect("a number");
        assert_eq!(steps, (0..tokens).step_by(5).collect::<Vec<_>>(), "{turn:#}");
        assert!(turn["ms"]["generate"].as_f64() > Some(0.0), "{turn:#}");
    }
}
