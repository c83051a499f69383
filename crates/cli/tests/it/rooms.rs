//! Rooms as their user has them: the real program, the real small model, killed in the middle of a thought.

use crate::common::{chat_model, halo_command, temp_dir};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Two who think with the real model, and say little.
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

/// What there is: agents' heartbeats, and messages by number.
fn stored_world(folder: &Path) -> (u64, BTreeMap<u64, Value>) {
    let listed = halo_in(folder).args(["rooms", "list", "w", "--json"]).output().expect("it runs");
    let listed: Value = serde_json::from_slice(&listed.stdout).expect("JSON");
    let beats = listed["agents"]
        .as_array()
        .expect("agents")
        .iter()
        .map(|agent| agent["beats"].as_u64().expect("a number"));
    let told = halo_in(folder)
        .args(["rooms", "watch", "w", "--once", "--last", "1000", "--json"])
        .output()
        .expect("it runs");
    let messages = json_lines(&told.stdout)
        .into_iter()
        .map(|message| (message["id"].as_u64().expect("a number"), message));
    (beats.sum(), messages.collect())
}

#[test]
fn rooms_lose_nothing_when_killed_during_heartbeat() {
    let folder = temp_dir();
    let folder = folder.path();
    let file = folder.join("world.toml");
    std::fs::write(&file, TEST_WORLD).expect("written");
    let made = halo_in(folder).args(["rooms", "new", "w", "--file"]).arg(&file).output().expect("it runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let done = run_world_command(folder).args(["--beats", "3"]).output().expect("it runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let told = json_lines(&done.stdout);
    let beats: Vec<&Value> = told.iter().map(|line| &line["beat"]).filter(|beat| !beat.is_null()).collect();
    assert_eq!(beats.len(), 3);
    for beat in &beats {
        assert!(beat["failed"].is_null(), "every answer is in form: {beat}");
    }
    // What was read before is not read again, but for what is new.
    let share = |beat: &Value| {
        beat["prefilled_tokens"].as_f64().expect("a number") / beat["hud_tokens"].as_f64().expect("a number")
    };
    let again = beats.iter().rposition(|beat| beat["agent"] == beats[0]["agent"]).expect("somebody");
    assert!(
        again > 0 && share(beats[again]) < 0.5 * share(beats[0]),
        "{} of {}",
        share(beats[again]),
        share(beats[0])
    );
    // It is killed while it thinks; what it has told of is there.
    let mut child = run_world_command(folder).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    out.read_line(&mut line).expect("it says something");
    child.kill().expect("killed");
    child.wait().expect("gone");
    let last: Value = serde_json::from_str(&line).expect("JSON");
    let (counted, messages) = stored_world(folder);
    assert!(counted >= 4 - u64::from(last["beat"].is_null()), "{counted} heartbeats were kept");
    for message in told.iter().chain([&last]).flat_map(|line| line["messages"].as_array().expect("messages"))
    {
        let id = message["id"].as_u64().expect("a number");
        assert_eq!(messages.get(&id).map(|kept| &kept["content"]), Some(&message["content"]));
    }
    // A posted message is delivered when the world continues, and a watcher prints it.
    let mut watches = halo_in(folder)
        .args(["rooms", "watch", "w", "--last", "1", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let (sees, seen) = mpsc::channel();
    let sight = BufReader::new(watches.stdout.take().expect("piped"));
    std::thread::spawn(move || sight.lines().map_while(Result::ok).try_for_each(|line| sees.send(line)));
    let saw = |part: &str| {
        let next = || seen.recv_timeout(Duration::from_mins(2)).expect("something is seen");
        while !next().contains(part) {}
    };
    saw("\"id\"");
    let said =
        halo_in(folder).args(["rooms", "say", "w", "Otto", "I am here too."]).output().expect("it runs");
    assert!(said.status.success());
    let done = run_world_command(folder).args(["--beats", "1"]).output().expect("it runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let (_, messages) = stored_world(folder);
    assert!(messages.values().any(|message| message["content"] == "I am here too."));
    saw("I am here too.");
    watches.kill().expect("killed");
    watches.wait().expect("gone");
}

/// All that a listing and a watcher tell of a world.
fn world_listing(folder: &Path, world: &str) -> (Value, Vec<Value>) {
    let out = |arguments: &[&str]| halo_in(folder).args(arguments).output().expect("it runs").stdout;
    let mut listed: Value = serde_json::from_slice(&out(&["rooms", "list", world, "--json"])).expect("JSON");
    listed["name"].take();
    (listed, json_lines(&out(&["rooms", "watch", world, "--once", "--last", "1000", "--json"])))
}

#[test]
fn rooms_world_export_import_round_trips() {
    let (here, there) = (temp_dir(), temp_dir());
    let (here, there) = (here.path(), there.path());
    let does = |folder: &Path, arguments: &[&str]| {
        let done = halo_in(folder).args(arguments).output().expect("it runs");
        assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8_lossy(&done.stdout).into_owned()
    };
    let fails = |folder: &Path, arguments: &[&str], part: &str| {
        let done = halo_in(folder).args(arguments).output().expect("it runs");
        let why = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(!done.status.success() && why.contains(part), "{arguments:?}: {why}");
    };
    let world = here.join("world.toml");
    std::fs::write(&world, TEST_WORLD).expect("written");
    does(here, &["rooms", "new", "the harbour", "--file", &world.display().to_string()]);
    does(here, &["rooms", "say", "the harbour", "Otto", "Left, and not heard yet."]);
    let [file, cut, edited, talk] = ["w.jsonl", "cut.jsonl", "edited.jsonl", "talk.jsonl"]
        .map(|name| here.join(name).display().to_string());
    let out = does(here, &["rooms", "export", "the harbour", "-o", &file]);
    assert!(out.starts_with("exported the world 'the harbour' to "), "{out}");
    fails(here, &["rooms", "export", "the harbour", "-o", &file], "exists already");
    fails(here, &["rooms", "export", "none", "-o", &cut], "there is no world of that name");
    for name in ["world:the harbour", "the harbour"] {
        fails(here, &["export", "-c", name, "-o", &cut], "is a world: use `halo rooms export`");
    }
    // It comes in as what it was, also under another name, and to a pipe and back.
    let out = does(there, &["import", &file]);
    assert!(out.starts_with("the world 'the harbour': 2 agents, 1 message\n"), "{out}");
    assert_eq!(world_listing(there, "the harbour"), world_listing(here, "the harbour"));
    fails(
        there,
        &["import", &file],
        "there is a world 'the harbour' already: choose another name\nhalo: hint: `halo import FILE -c NAME`",
    );
    does(there, &["import", &file, "-c", "again"]);
    let inside = |text: &str| {
        let lines: Vec<&str> = text.lines().collect();
        lines[1..lines.len() - 1].join("\n")
    };
    let text = std::fs::read_to_string(&file).expect("read");
    assert_eq!(inside(&does(there, &["rooms", "export", "again"])), inside(&text), "all but its name");
    assert_eq!(
        does(here, &["rooms", "export", "the harbour"]),
        std::fs::read_to_string(&file).expect("read")
    );
    // What was left for it is not lost on the way.
    let posts =
        |folder, world: &str| does(folder, &["rooms", "export", world]).matches("not heard yet").count();
    assert_eq!((posts(here, "the harbour"), posts(there, "again")), (1, 1));
    // Nothing comes in by halves, and nothing as what it is not.
    std::fs::write(&cut, &text[..text.len() - 200]).expect("written");
    fails(there, &["import", &cut, "-c", "cut"], "cut short");
    std::fs::write(&edited, text.replace("Is the lamp ready?", "Is the lamp broken?")).expect("written");
    fails(there, &["import", &edited, "-c", "edited"], "the checksum does not match");
    for name in [&"x".repeat(61), "world:x"] {
        fails(there, &["import", &file, "-c", name], "1 to 60 characters");
    }
    // Nobody's file says whom the program speaks to.
    let [far, elsewhere] = ["far.toml", "far.jsonl"].map(|name| here.join(name).display().to_string());
    let address = "openai+http://127.0.0.1:9/v1";
    let models = format!("[[models]]\nname = 'far'\nat = '{address}'\n{TEST_WORLD}");
    std::fs::write(&far, models).expect("written");
    does(here, &["rooms", "new", "far", "--file", &far]);
    does(here, &["rooms", "export", "far", "-o", &elsewhere]);
    fails(there, &["import", &elsewhere], "name it in the setting rooms.models");
    let said = r#"{"messages": [{"role": "user", "content": "hello"}]}"#;
    std::fs::write(&talk, said).expect("written");
    fails(there, &["import", &talk, "-c", "world:mine", "--no-index"], "belong to worlds");
    let title = there.join("title.json");
    let chat = r#"[{"uuid": "a", "name": "world:building", "chat_messages": [{"sender": "human", "text": "hello"}]}]"#;
    std::fs::write(&title, chat).expect("written");
    let out = does(there, &["import", &title.display().to_string(), "--no-index"]);
    assert!(out.starts_with("'imported world:building': 1 turn"), "{out}");
    let worlds: Value = serde_json::from_str(&does(there, &["rooms", "list", "--json"])).expect("JSON");
    let names: Vec<&Value> = worlds.as_array().expect("a list").iter().map(|world| &world["name"]).collect();
    assert_eq!(names, ["again", "the harbour"]);
    does(there, &["import", &elsewhere, "--set", &format!("rooms.models={address}")]);
    does(there, &["rooms", "delete", "far", "--yes"]);
    // No conversation hides among the worlds.
    fails(there, &["rename", "imported world:building", "world:building"], "belong to worlds");
    let out = does(there, &["doctor"]);
    assert!(out.contains("1 conversation, 2 worlds"), "{out}");
    // Exporting everything includes worlds.
    let all = there.join("all");
    let out = does(there, &["export", "--all", "-o", &all.display().to_string(), "--json"]);
    let written: Vec<Value> = serde_json::from_str(&out).expect("JSON");
    let kinds: Vec<(Option<&str>, Option<&str>)> =
        written.iter().map(|one| (one["conversation"].as_str(), one["world"].as_str())).collect();
    let expected =
        [(Some("imported world:building"), None), (None, Some("again")), (None, Some("the harbour"))];
    assert_eq!(kinds, expected);
    // What is there already stays, and the others come in.
    let third = temp_dir();
    does(third.path(), &["rooms", "new", "again"]);
    let files: Vec<String> =
        (1..=3).map(|n| all.join(format!("{n:05}.jsonl")).display().to_string()).collect();
    let files: Vec<&str> =
        ["import", "--no-index"].into_iter().chain(files.iter().map(String::as_str)).collect();
    fails(third.path(), &files, "1 file could not be imported; all others were");
    assert_eq!(world_listing(third.path(), "the harbour"), world_listing(here, "the harbour"));
    assert_eq!(world_listing(third.path(), "again").0["agents"].as_array().map(Vec::len), Some(5));
    assert!(does(third.path(), &["show", "-c", "imported world:building"]).contains("hello"));
}

#[test]
fn rooms_errors_say_why() {
    let folder = temp_dir();
    let folder = folder.path();
    let fails = |arguments: &[&str], part: &str| {
        let done = halo_in(folder).args(["rooms"]).args(arguments).output().expect("it runs");
        let why = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(!done.status.success() && why.contains(part), "{arguments:?}: {why}");
    };
    fails(&["run", "none"], "there is no world of that name\nhalo: hint: `halo rooms list` lists the worlds");
    fails(&["hud", "none", "Mara"], "there is no world of that name");
    assert!(halo_in(folder).args(["rooms", "new", "w"]).status().expect("it runs").success());
    fails(&["new", "w"], "a world of that name exists");
    fails(&["new", "w"], "hint: `halo rooms list` lists the worlds, and `halo rooms delete` deletes one");
    fails(&["new", " "], "1 to 60 characters");
    fails(&["new", "x", "--file", "/nowhere.toml"], "cannot read");
    let file = folder.join("bad.toml");
    for (text, part) in [
        ("", "the world has no agents"),
        ("[[agents]]\nname = 'A'\ninterval = -5.0", "an interval is 1 to 10 seconds, not -5"),
        ("[[agents]]\nname = 'A'\n[[rooms]]\nowner = 'Bob'", "the room of Bob: there is no agent 'Bob'"),
        ("agents = 3", "is not a world file"),
    ] {
        std::fs::write(&file, text).expect("written");
        fails(&["new", "x", "--file", &file.display().to_string()], part);
    }
    fails(&["run", "w", "--speed", "0"], "the speed must be 0.1 to 100");
    fails(&["say", "w", "Nobody", "hello"], "there is no agent 'Nobody': agents are Mara (1)");
    fails(&["say", "w", "Mara", " "], "a message must not be empty");
    fails(&["delete", "w"], "add --yes");
    let listed = halo_in(folder).args(["rooms", "list", "w"]).output().expect("it runs");
    assert!(String::from_utf8_lossy(&listed.stdout).contains("Mara"));
    assert!(
        halo_in(folder)
            .args(["rooms", "say", "w", "otto", "The Zwiebelturm burns."])
            .status()
            .expect("it runs")
            .success()
    );
    assert!(halo_in(folder).args(["rooms", "delete", "w", "--yes"]).status().expect("it runs").success());
    for file in
        std::fs::read_dir(folder).expect("a folder").filter_map(|file| std::fs::read(file.ok()?.path()).ok())
    {
        let has = |word: &str| file.windows(word.len()).any(|part| part == word.as_bytes());
        assert!(!has("Zwiebelturm") && !has("harbour master"), "what is ended is gone from every file");
    }
    fails(&["list", "w"], "there is no world of that name");
    let prompts = halo_in(folder).args(["rooms", "prompts"]).output().expect("it runs");
    assert!(serde_json::from_slice::<Value>(&prompts.stdout).is_ok());
}
