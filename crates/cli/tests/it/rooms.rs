//! `halo rooms` with the real binary and the real small model, also killed during a heartbeat.

use crate::common::{chat_model, halo_command, temp_dir};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// A world of two agents, one of them with TOON as its format.
const TEST_WORLD: &str = r#"
    [[agents]]
    name = "Mara"
    seed = "You are Mara, the harbour master."
    interval = 1.0

    [[agents]]
    name = "Otto"
    seed = "You are Otto, who keeps the tavern."
    interval = 1.0
    input_format = "toon"
    output_format = "toon"

    [[rooms]]
    owner = "Otto"
    members = ["Mara"]
    billboard = "The tavern"

    [[rooms.messages]]
    sender = "Otto"
    content = "Is the lamp ready?"
"#;

fn halo_in(folder: &Path) -> Command {
    halo_command(folder, &[])
}

fn json_lines(text: &[u8]) -> Vec<Value> {
    text.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

fn run_world_command(folder: &Path) -> Command {
    let mut command = halo_in(folder);
    command
        .args(["rooms", "run", "w", "--json", "--set", "rooms.max_tokens=64", "--seed", "3", "--model"])
        .arg(chat_model());
    command
}

/// The number of heartbeats of all agents, and the messages by id.
fn stored_world(folder: &Path) -> (u64, BTreeMap<u64, Value>) {
    let listed = halo_in(folder).args(["rooms", "list", "w", "--json"]).output().expect("halo runs");
    let listed: Value = serde_json::from_slice(&listed.stdout).expect("JSON");
    let beats = listed["agents"]
        .as_array()
        .expect("agents")
        .iter()
        .map(|agent| agent["beats"].as_u64().expect("a number"));
    let watched = halo_in(folder)
        .args(["rooms", "watch", "w", "--once", "--last", "1000", "--json"])
        .output()
        .expect("halo runs");
    let messages = json_lines(&watched.stdout)
        .into_iter()
        .map(|message| (message["id"].as_u64().expect("a number"), message));
    (beats.sum(), messages.collect())
}

#[test]
fn rooms_lose_nothing_when_killed_during_heartbeat() {
    let folder = temp_dir();
    let folder = folder.path();
    let file = folder.join("world.toml");
    std::fs::write(&file, TEST_WORLD).expect("the file is written");
    let created =
        halo_in(folder).args(["rooms", "new", "w", "--file"]).arg(&file).output().expect("halo runs");
    assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
    let run = run_world_command(folder).args(["--beats", "3"]).output().expect("halo runs");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let output_lines = json_lines(&run.stdout);
    let beats: Vec<&Value> =
        output_lines.iter().map(|line| &line["beat"]).filter(|beat| !beat.is_null()).collect();
    assert_eq!(beats.len(), 3);
    for beat in &beats {
        assert!(beat["failed"].is_null(), "every answer can be parsed: {beat}");
    }
    // The second heartbeat of an agent prefills only the new part of its HUD.
    let prefill_share = |beat: &Value| {
        beat["prefilled_tokens"].as_f64().expect("a number") / beat["hud_tokens"].as_f64().expect("a number")
    };
    let second = beats.iter().rposition(|beat| beat["agent"] == beats[0]["agent"]).expect("an agent");
    assert!(
        second > 0 && prefill_share(beats[second]) < 0.5 * prefill_share(beats[0]),
        "{} of {}",
        prefill_share(beats[second]),
        prefill_share(beats[0])
    );
    // The program is killed during a heartbeat; everything it printed before is stored.
    let mut child = run_world_command(folder).stdout(Stdio::piped()).spawn().expect("halo runs");
    let mut out = BufReader::new(child.stdout.take().expect("stdout is piped"));
    let mut line = String::new();
    out.read_line(&mut line).expect("a line of output");
    child.kill().expect("the process is killed");
    child.wait().expect("the process exits");
    let last: Value = serde_json::from_str(&line).expect("JSON");
    let (stored_beats, messages) = stored_world(folder);
    assert!(stored_beats >= 4 - u64::from(last["beat"].is_null()), "{stored_beats} heartbeats are stored");
    for message in
        output_lines.iter().chain([&last]).flat_map(|line| line["messages"].as_array().expect("messages"))
    {
        let id = message["id"].as_u64().expect("a number");
        assert_eq!(messages.get(&id).map(|stored| &stored["content"]), Some(&message["content"]));
    }
    // A posted message is delivered when the world continues, and a watcher prints it.
    let mut watcher = halo_in(folder)
        .args(["rooms", "watch", "w", "--last", "1", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("halo runs");
    let (sender, watched_lines) = mpsc::channel();
    let watcher_stdout = BufReader::new(watcher.stdout.take().expect("stdout is piped"));
    std::thread::spawn(move || {
        watcher_stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    let wait_for_line = |part: &str| {
        let next = || watched_lines.recv_timeout(Duration::from_mins(2)).expect("the watcher prints a line");
        while !next().contains(part) {}
    };
    wait_for_line("\"id\"");
    let post =
        halo_in(folder).args(["rooms", "say", "w", "Otto", "I am here too."]).output().expect("halo runs");
    assert!(post.status.success());
    let run = run_world_command(folder).args(["--beats", "1"]).output().expect("halo runs");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let (_, messages) = stored_world(folder);
    assert!(messages.values().any(|message| message["content"] == "I am here too."));
    wait_for_line("I am here too.");
    watcher.kill().expect("the process is killed");
    watcher.wait().expect("the process exits");
}

/// The output of `rooms list` without the name, and the messages of `rooms watch`.
fn world_listing(folder: &Path, world: &str) -> (Value, Vec<Value>) {
    let out = |arguments: &[&str]| halo_in(folder).args(arguments).output().expect("halo runs").stdout;
    let mut listed: Value = serde_json::from_slice(&out(&["rooms", "list", world, "--json"])).expect("JSON");
    listed["name"].take();
    (listed, json_lines(&out(&["rooms", "watch", world, "--once", "--last", "1000", "--json"])))
}

#[test]
fn rooms_world_export_import_round_trips() {
    let (here, there) = (temp_dir(), temp_dir());
    let (here, there) = (here.path(), there.path());
    let run_ok = |folder: &Path, arguments: &[&str]| {
        let output = halo_in(folder).args(arguments).output().expect("halo runs");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let run_err = |folder: &Path, arguments: &[&str], message: &str| {
        let output = halo_in(folder).args(arguments).output().expect("halo runs");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && stderr.contains(message), "{arguments:?}: {stderr}");
    };
    let world = here.join("world.toml");
    std::fs::write(&world, TEST_WORLD).expect("the file is written");
    run_ok(here, &["rooms", "new", "the harbour", "--file", &world.display().to_string()]);
    run_ok(here, &["rooms", "say", "the harbour", "Otto", "Left, and not heard yet."]);
    let [file, cut, edited, conversation_file] = ["w.jsonl", "cut.jsonl", "edited.jsonl", "talk.jsonl"]
        .map(|name| here.join(name).display().to_string());
    let out = run_ok(here, &["rooms", "export", "the harbour", "-o", &file]);
    assert!(out.starts_with("exported the world 'the harbour' to "), "{out}");
    run_err(here, &["rooms", "export", "the harbour", "-o", &file], "exists already");
    run_err(here, &["rooms", "export", "none", "-o", &cut], "there is no world of that name");
    for name in ["world:the harbour", "the harbour"] {
        run_err(here, &["export", "-c", name, "-o", &cut], "is a world: use `halo rooms export`");
    }
    // The imported world equals the exported one, also under another name. Export to stdout gives the same bytes.
    let out = run_ok(there, &["import", &file]);
    assert!(out.starts_with("the world 'the harbour': 2 agents, 1 message\n"), "{out}");
    assert_eq!(world_listing(there, "the harbour"), world_listing(here, "the harbour"));
    run_err(
        there,
        &["import", &file],
        "there is a world 'the harbour' already: choose another name\nhalo: hint: `halo import FILE -c NAME`",
    );
    run_ok(there, &["import", &file, "-c", "again"]);
    let body = |text: &str| {
        let lines: Vec<&str> = text.lines().collect();
        lines[1..lines.len() - 1].join("\n")
    };
    let text = std::fs::read_to_string(&file).expect("the file is readable");
    assert_eq!(body(&run_ok(there, &["rooms", "export", "again"])), body(&text), "only the name differs");
    assert_eq!(
        run_ok(here, &["rooms", "export", "the harbour"]),
        std::fs::read_to_string(&file).expect("the file is readable")
    );
    // The export contains messages that are not delivered yet.
    let undelivered =
        |folder, world: &str| run_ok(folder, &["rooms", "export", world]).matches("not heard yet").count();
    assert_eq!((undelivered(here, "the harbour"), undelivered(there, "again")), (1, 1));
    // Truncated and edited files are rejected, and so are names that are too long or reserved.
    std::fs::write(&cut, &text[..text.len() - 200]).expect("the file is written");
    run_err(there, &["import", &cut, "-c", "cut"], "cut short");
    std::fs::write(&edited, text.replace("Is the lamp ready?", "Is the lamp broken?"))
        .expect("the file is written");
    run_err(there, &["import", &edited, "-c", "edited"], "the checksum does not match");
    for name in [&"x".repeat(61), "world:x"] {
        run_err(there, &["import", &file, "-c", name], "1 to 60 characters");
    }
    // A world file may name only remote models that the settings allow.
    let [far, far_export] = ["far.toml", "far.jsonl"].map(|name| here.join(name).display().to_string());
    let address = "openai+http://127.0.0.1:9/v1";
    let models = format!("[[models]]\nname = 'far'\nat = '{address}'\n{TEST_WORLD}");
    std::fs::write(&far, models).expect("the file is written");
    run_ok(here, &["rooms", "new", "far", "--file", &far]);
    run_ok(here, &["rooms", "export", "far", "-o", &far_export]);
    run_err(there, &["import", &far_export], "name it in the setting rooms.models");
    let conversation = r#"{"messages": [{"role": "user", "content": "hello"}]}"#;
    std::fs::write(&conversation_file, conversation).expect("the file is written");
    run_err(there, &["import", &conversation_file, "-c", "world:mine", "--no-index"], "belong to worlds");
    let title = there.join("title.json");
    let chat = r#"[{"uuid": "a", "name": "world:building", "chat_messages": [{"sender": "human", "text": "hello"}]}]"#;
    std::fs::write(&title, chat).expect("the file is written");
    let out = run_ok(there, &["import", &title.display().to_string(), "--no-index"]);
    assert!(out.starts_with("'imported world:building': 1 turn"), "{out}");
    let worlds: Value = serde_json::from_str(&run_ok(there, &["rooms", "list", "--json"])).expect("JSON");
    let names: Vec<&Value> = worlds.as_array().expect("a list").iter().map(|world| &world["name"]).collect();
    assert_eq!(names, ["again", "the harbour"]);
    run_ok(there, &["import", &far_export, "--set", &format!("rooms.models={address}")]);
    run_ok(there, &["rooms", "delete", "far", "--yes"]);
    // A conversation cannot take a name that belongs to worlds.
    run_err(there, &["rename", "imported world:building", "world:building"], "belong to worlds");
    let out = run_ok(there, &["doctor"]);
    assert!(out.contains("1 conversation, 2 worlds"), "{out}");
    // Exporting everything includes worlds.
    let all = there.join("all");
    let out = run_ok(there, &["export", "--all", "-o", &all.display().to_string(), "--json"]);
    let written: Vec<Value> = serde_json::from_str(&out).expect("JSON");
    let kinds: Vec<(Option<&str>, Option<&str>)> =
        written.iter().map(|row| (row["conversation"].as_str(), row["world"].as_str())).collect();
    let expected =
        [(Some("imported world:building"), None), (None, Some("again")), (None, Some("the harbour"))];
    assert_eq!(kinds, expected);
    // A world that exists is not replaced; the other files are imported.
    let third = temp_dir();
    run_ok(third.path(), &["rooms", "new", "again"]);
    let files: Vec<String> =
        (1..=3).map(|n| all.join(format!("{n:05}.jsonl")).display().to_string()).collect();
    let files: Vec<&str> =
        ["import", "--no-index"].into_iter().chain(files.iter().map(String::as_str)).collect();
    run_err(third.path(), &files, "1 file could not be imported; all others were");
    assert_eq!(world_listing(third.path(), "the harbour"), world_listing(here, "the harbour"));
    assert_eq!(world_listing(third.path(), "again").0["agents"].as_array().map(Vec::len), Some(5));
    assert!(run_ok(third.path(), &["show", "-c", "imported world:building"]).contains("hello"));
}

#[test]
fn rooms_errors_say_why() {
    let folder = temp_dir();
    let folder = folder.path();
    let run_err = |arguments: &[&str], message: &str| {
        let output = halo_in(folder).args(["rooms"]).args(arguments).output().expect("halo runs");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && stderr.contains(message), "{arguments:?}: {stderr}");
    };
    run_err(
        &["run", "none"],
        "there is no world of that name\nhalo: hint: `halo rooms list` lists the worlds",
    );
    run_err(&["hud", "none", "Mara"], "there is no world of that name");
    assert!(halo_in(folder).args(["rooms", "new", "w"]).status().expect("halo runs").success());
    run_err(&["new", "w"], "a world of that name exists");
    run_err(&["new", "w"], "hint: `halo rooms list` lists the worlds, and `halo rooms delete` deletes one");
    run_err(&["new", " "], "1 to 60 characters");
    run_err(&["new", "x", "--file", "/nowhere.toml"], "cannot read");
    let file = folder.join("bad.toml");
    for (text, message) in [
        ("", "the world has no agents"),
        ("[[agents]]\nname = 'A'\ninterval = -5.0", "an interval is 1 to 10 seconds, not -5"),
        ("[[agents]]\nname = 'A'\n[[rooms]]\nowner = 'Bob'", "the room of Bob: there is no agent 'Bob'"),
        ("agents = 3", "is not a world file"),
    ] {
        std::fs::write(&file, text).expect("the file is written");
        run_err(&["new", "x", "--file", &file.display().to_string()], message);
    }
    run_err(&["run", "w", "--speed", "0"], "the speed must be 0.1 to 100");
    run_err(&["say", "w", "Nobody", "hello"], "there is no agent 'Nobody': agents are Mara (1)");
    run_err(&["say", "w", "Mara", " "], "a message must not be empty");
    run_err(&["delete", "w"], "add --yes");
    let listed = halo_in(folder).args(["rooms", "list", "w"]).output().expect("halo runs");
    assert!(String::from_utf8_lossy(&listed.stdout).contains("Mara"));
    assert!(
        halo_in(folder)
            .args(["rooms", "say", "w", "otto", "The Zwiebelturm burns."])
            .status()
            .expect("halo runs")
            .success()
    );
    assert!(halo_in(folder).args(["rooms", "delete", "w", "--yes"]).status().expect("halo runs").success());
    for file in
        std::fs::read_dir(folder).expect("a folder").filter_map(|file| std::fs::read(file.ok()?.path()).ok())
    {
        let contains = |word: &str| file.windows(word.len()).any(|part| part == word.as_bytes());
        assert!(
            !contains("Zwiebelturm") && !contains("harbour master"),
            "no file contains text of a deleted world"
        );
    }
    run_err(&["list", "w"], "there is no world of that name");
    let prompts = halo_in(folder).args(["rooms", "prompts"]).output().expect("halo runs");
    assert!(serde_json::from_slice::<Value>(&prompts.stdout).is_ok());
}

/// With the settings, a HUD above the limit shows shorter messages of agents, and what agents say under pressure is cut. Both
/// are reported with the heartbeat, and without the settings neither happens.
#[test]
fn agents_are_cooled_and_summarized_by_setting() {
    let long = "The boats came in late, and everybody was tired of the wind. ".repeat(12);
    let messages: String = (0..8)
        .map(|n| {
            let sender = if n % 2 == 0 { "Otto" } else { "Mara" };
            format!("\n[[rooms.messages]]\nsender = \"{sender}\"\ncontent = \"{long}\"\n")
        })
        .collect();
    let mut sizes: Vec<Vec<u64>> = Vec::new();
    for (settings, cooled) in
        [(&[][..], false), (&["rooms.cooling_tokens=1500", "rooms.summaries=truncate"][..], true)]
    {
        let folder = temp_dir();
        let folder = folder.path();
        let (file, script) = (folder.join("world.toml"), folder.join("answers.txt"));
        std::fs::write(&file, format!("{TEST_WORLD}{messages}")).expect("the file is written");
        std::fs::write(&script, r#"{"responses":[]}"#).expect("the file is written");
        let created =
            halo_in(folder).args(["rooms", "new", "w", "--file"]).arg(&file).output().expect("halo runs");
        assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
        let mut run = halo_in(folder);
        run.args(["rooms", "run", "w", "--json", "--beats", "2"]);
        run.args(["--model", &format!("scripted:{}", script.display())]);
        run.args(settings.iter().flat_map(|setting| ["--set", setting]));
        let run = run.output().expect("halo runs");
        let rows = json_lines(&run.stdout);
        let beats = rows.iter().map(|row| &row["beat"]).filter(|beat| beat["hud_tokens"].is_u64());
        let beats: Vec<&Value> = beats.collect();
        assert_eq!(beats.len(), 2, "{}", String::from_utf8_lossy(&run.stderr));
        for beat in &beats {
            assert!(beat["pressure"].as_f64().is_some_and(|pressure| pressure > 0.0), "{beat}");
            assert_eq!(beat["cooled"].as_u64() > Some(0), cooled, "{beat}");
            assert!(beat["summarized"].is_u64(), "{beat}");
        }
        sizes.push(beats.iter().filter_map(|beat| beat["hud_tokens"].as_u64()).collect());
    }
    for (whole, cooled) in sizes[0].iter().zip(&sizes[1]) {
        assert!(*whole > 1_500 && 4 * cooled < 3 * whole, "{sizes:?}");
    }
}
