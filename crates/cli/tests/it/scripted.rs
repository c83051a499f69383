//! `scripted:FILE` in a chat, a server and a world, and `halo hud`.

use crate::common::{HaloOutput, halo_command, run_halo, send_lines, temp_dir};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};

fn write_script(folder: &Path, answers: &[&str]) -> String {
    let file = folder.join("answers.txt");
    std::fs::write(&file, answers.join("\n---\n")).expect("the file is written");
    format!("scripted:{}", file.display())
}

fn run_ok(folder: &Path, args: &[&str]) -> String {
    let HaloOutput { status, out, err } = run_halo(folder, args);
    assert_eq!(status, 0, "{args:?}: {err}");
    out
}

#[test]
fn scripted_model_answers_a_chat_in_order() {
    let folder = temp_dir();
    let model = write_script(folder.path(), &["The lamp burns.", "The sea\n\nis calm."]);
    let ask = |question: &str| run_ok(folder.path(), &["ask", "--model", &model, question]);
    // Each process begins at the first answer.
    assert_eq!(ask("Does the lamp burn?"), "The lamp burns.\n");
    // A question of several lines comes from a pipe.
    let mut piped = halo_command(folder.path(), &["ask", "--json", "--model", &model]);
    let report: Value =
        serde_json::from_str(&send_lines(&mut piped, &["Does the lamp", "burn?"]).out).expect("JSON");
    assert_eq!(
        (&report["question"], &report["finish"]),
        (&json!("Does the lamp\nburn?"), &json!("end")),
        "{report}"
    );
    let empty = run_halo(folder.path(), &["ask", "--model", &model]);
    assert!(empty.status != 0 && empty.err.contains("the message is empty"), "{}", empty.err);
    let mut chat = halo_command(folder.path(), &["chat", "--model", &model]);
    let text = send_lines(&mut chat, &["One?", "Two?", "Three?"]).out;
    let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("no {part} in {text}"));
    assert!(at("The lamp burns.") < at("is calm."), "{text}");
    assert_eq!(text.matches("The lamp burns.").count(), 2, "after the last answer comes the first: {text}");
    // What was said is scored: the question has the words of the answer.
    let shown: Value = serde_json::from_str(&run_ok(folder.path(), &["show", "--json"])).expect("JSON");
    assert!(shown.to_string().contains("Does the lamp burn?"), "{shown}");
    for (name, message) in [
        ("scripted:/nowhere.txt", "cannot read the script /nowhere.txt"),
        (&*write_script(folder.path(), &["", " "]), "has no answers"),
    ] {
        let run = run_halo(folder.path(), &["ask", "--model", name, "Hello?"]);
        assert!(run.status != 0 && run.err.contains(message), "{name}: {}", run.err);
    }
    let run = run_halo(folder.path(), &["models", "path", "scripted:x"]);
    assert!(run.status != 0, "{}", run.out);
}

struct RunningServer(Child);

impl Drop for RunningServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn scripted_model_answers_clients_of_a_server() {
    let folder = temp_dir();
    let model = write_script(folder.path(), &["First answer.", "Second answer."]);
    let mut child = halo_command(folder.path(), &["serve", "--listen", "127.0.0.1:0", "--model", &model])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("halo starts");
    let mut lines = BufReader::new(child.stderr.take().expect("stderr")).lines();
    let _server = RunningServer(child);
    let address = lines
        .by_ref()
        .map_while(Result::ok)
        .find_map(|line| Some(line.split("http://").nth(1)?.split_whitespace().next()?.to_owned()))
        .expect("the server says where it listens");
    let post = |path: &str, body: &Value| -> Value {
        let body = body.to_string();
        let mut stream = TcpStream::connect(&address).expect("the server listens");
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .expect("the request is sent");
        let mut response = String::new();
        stream.read_to_string(&mut response).expect("the response is read");
        let (_, body) = response.split_once("\r\n\r\n").expect("a body");
        let json = body.find('{').map(|at| &body[at..=body.rfind('}').unwrap_or(at)]);
        serde_json::from_str(json.unwrap_or(body)).unwrap_or_else(|error| panic!("{error}: {response}"))
    };
    let ask = |text: &str| {
        let answer =
            post("/v1/chat/completions", &json!({ "messages": [{ "role": "user", "content": text }] }));
        answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
    };
    // All conversations of the server share the script.
    assert_eq!(ask("One?"), "First answer.");
    assert_eq!(ask("Another conversation?"), "Second answer.");
    assert_eq!(ask("And again?"), "First answer.");
}

const TWO_AGENTS: &str = r#"
    [[agents]]
    name = "Mara"
    seed = "You are Mara, the harbour master."
    interval = 1.0

    [[agents]]
    name = "Otto"
    seed = "You are Otto, who keeps the tavern."
    interval = 1.0

    [[rooms]]
    owner = "Otto"
    members = ["Mara"]
"#;

fn new_world(folder: &Path, name: &str) {
    let file = folder.join("world.toml");
    std::fs::write(&file, TWO_AGENTS).expect("the file is written");
    run_ok(folder, &["rooms", "new", name, "--file", &file.display().to_string()]);
}

#[test]
fn scripted_model_answers_for_agents() {
    let folder = temp_dir();
    let folder = folder.path();
    new_world(folder, "harbour");
    let answers = [
        r#"{"messages": [{"room_id": 2, "message": "The lamp burns.\n\nCome and see."}]}"#,
        r#"{"responses": [], "actions": [{"type": "set", "path": "people.'Dr. No'.trust", "value": 0.1}]}"#,
        r#"{"actions": []}"#,
    ];
    let model = write_script(folder, &answers);
    let set = ["--set", "rooms.jitter=0"];
    let run = run_ok(
        folder,
        &[
            &["rooms", "run", "harbour", "--beats", "6", "--speed", "100", "--json", "--model", &model][..],
            &set,
        ]
        .concat(),
    );
    let beats: Vec<Value> = run
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON")["beat"].clone())
        .filter(|beat| !beat.is_null())
        .collect();
    assert_eq!(beats.len(), 6, "{run}");
    assert!(beats.iter().all(|beat| beat["failed"].is_null() && beat["refused"] == json!([])), "{run}");
    // The paragraphs of Mara's answer are two messages.
    let watched = run_ok(folder, &["rooms", "watch", "harbour", "--once", "--json"]);
    let messages = watched.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let by_mara: Vec<Value> = messages
        .filter(|message| message["sender"] == json!({ "agent": 1 }))
        .map(|message| message["content"].clone())
        .collect();
    assert_eq!(by_mara, ["The lamp burns.", "Come and see."], "{watched}");
    // Otto has written a name with a dot in it.
    let hud = |args: &[&str]| -> Value {
        serde_json::from_str(&run_ok(folder, &[args, &["--json", "--model", &model]].concat())).expect("JSON")
    };
    let otto = hud(&["hud", "Otto"]);
    assert_eq!(otto["hud"]["self"]["knowledge"], json!({ "people": { "Dr. No": { "trust": 0.1 } } }));
    assert_eq!(otto["hud"]["self"]["identity"]["name"], "Otto");
}

#[test]
fn hud_prints_what_rooms_hud_prints() {
    let folder = temp_dir();
    let folder = folder.path();
    let model = write_script(folder, &["{}"]);
    let run = |args: &[&str]| run_halo(folder, &[args, &["--model", &model]].concat());
    let missing = run(&["hud", "Mara"]);
    assert!(missing.status != 0 && missing.err.contains("there are no worlds yet"), "{}", missing.err);
    new_world(folder, "harbour");
    for format in ["json", "compact_json", "toon", "toon_positional"] {
        // The HUD shows the time since a member spoke, which is never here.
        let short = run(&["hud", "mara", "--format", format]);
        let long = run(&["rooms", "hud", "harbour", "Mara", "--format", format]);
        assert_eq!((short.status, &short.out), (0, &long.out), "{format}: {}", short.err);
        assert!(short.out.contains("You are Mara"), "{}", short.out);
    }
    new_world(folder, "tavern");
    let which = run(&["hud", "Mara"]);
    assert!(which.status != 0 && which.err.contains("--world, of harbour, tavern"), "{}", which.err);
    let chosen = run(&["hud", "-w", "tavern", "2"]);
    assert!(chosen.status == 0 && chosen.out.contains("You are Otto"), "{} {}", chosen.out, chosen.err);
    let nobody = run(&["hud", "-w", "tavern", "Nobody"]);
    assert!(nobody.status != 0 && nobody.err.contains("agents are Mara (1)"), "{}", nobody.err);
}

/// A meeting on another day is rejected by consistency and by no other principle, and the verdict names it.
#[test]
fn premises_are_judged_by_the_principles_of_the_setting() {
    let folder = temp_dir();
    let model = write_script(folder.path(), &["Noted.", "Because it is."]);
    let mut chat = halo_command(folder.path(), &["chat", "--model", &model]);
    send_lines(&mut chat, &["The meeting is Friday."]);
    for (principles, verdict) in [
        ("accuracy,honesty", None),
        ("consistency", Some("consistency")),
        ("accuracy,consistency", Some("consistency")),
    ] {
        let setting = format!("premise.principles={principles}");
        let mut chat = halo_command(folder.path(), &["chat", "--model", &model]);
        chat.args(["--set", "premise.check=rules", "--set", &setting]);
        send_lines(&mut chat, &["Why is the meeting Tuesday?"]);
        let turns: Value =
            serde_json::from_str(&run_ok(folder.path(), &["stats", "-n", "1", "--json"])).expect("JSON");
        let premise = turns[0]["premise"].as_str();
        assert_eq!(premise.is_some(), verdict.is_some(), "{principles}: {turns:#}");
        let named = premise.is_none_or(|premise| premise.contains(verdict.unwrap_or_default()));
        assert!(
            named && premise.is_none_or(|premise| premise.contains("tuesday")),
            "{principles}: {premise:?}"
        );
    }
    let run = run_halo(folder.path(), &["stats", "--set", "premise.principles=beauty"]);
    assert!(run.status != 0 && run.err.contains("'beauty' is no principle"), "{}", run.err);
}

/// Under pressure, the model of an agent summarizes what it says: the summary is what the room gets. Without the setting the
/// room gets the message, and with `truncate` its beginning.
#[test]
fn agents_messages_are_summarized_by_their_model_under_pressure() {
    let long = "The boats came in late, and everybody was tired of the wind. ".repeat(4);
    let past: String = (0..150)
        .map(|n| format!("\n[[rooms.messages]]\nsender = \"Otto\"\ncontent = \"{n}. {}\"\n", long.repeat(2)))
        .collect();
    let world = format!(
        "[[agents]]\nname = \"Mara\"\nseed = \"You are Mara.\"\n\n[[agents]]\nname = \"Otto\"\nseed = \"You are Otto.\"\n\
         \n[[rooms]]\nowner = \"Mara\"\nmembers = [\"Otto\"]\n{past}\n[[rooms]]\nowner = \"Otto\"\nmembers = [\"Mara\"]\n{past}"
    );
    let answer = json!({ "responses": [{ "room_id": 1, "message": long.trim() }] }).to_string();
    for (setting, summarized) in [("off", 0), ("truncate", 1), ("model", 1)] {
        let folder = temp_dir();
        let folder = folder.path();
        let file = folder.join("world.toml");
        std::fs::write(&file, &world).expect("the file is written");
        run_ok(folder, &["rooms", "new", "w", "--file", &file.display().to_string()]);
        let model = write_script(folder, &[&answer]);
        let setting_flag = format!("rooms.summaries={setting}");
        let run = ["rooms", "run", "w", "--json", "--beats", "1", "--model", &model, "--set", &setting_flag];
        let out = run_ok(folder, &run);
        let rows = out.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let beat =
            rows.map(|row| row["beat"].clone()).find(|beat| beat["pressure"].is_f64()).expect("a beat");
        assert!(beat["pressure"].as_f64() > Some(0.8), "{beat}");
        assert_eq!(beat["summarized"], summarized, "{setting}: {beat}");
        run_ok(folder, &["rooms", "run", "w", "--beats", "0", "--model", &model]);
        let watched = run_ok(folder, &["rooms", "watch", "w", "--once", "--last", "1000", "--json"]);
        let said: Vec<String> = watched
            .lines()
            .filter_map(|line| {
                serde_json::from_str::<Value>(line).ok()?["content"].as_str().map(str::to_owned)
            })
            .filter(|text| !text.starts_with(|first: char| first.is_ascii_digit()))
            .collect();
        let expected = match setting {
            "off" => long.trim().to_owned(),
            // The summarizer reads the script from its beginning.
            "model" => answer.clone(),
            _ => format!("{}...", &long[..long.trim().len() / 5]),
        };
        assert_eq!(said, [expected], "{setting}");
    }
}

/// For models that report no attention: what has no names, questions or lists is pruned first.
#[test]
fn salience_of_the_text_decides_what_is_pruned_by_setting() {
    const NAMED: &str = "My sister Anna Lindqvist keeps bees in Lyon, and you should ask me about them.";
    let folder = temp_dir();
    let model = write_script(folder.path(), &["so it is, and so it will be for some time to come."]);
    let settings =
        ["prune.policy=salience", "context.max_tokens=400", "generation.max_tokens=32", "chunk.min_tokens=8"];
    let mut chat = halo_command(folder.path(), &["chat", "--model", &model, "--set", "recall.mode=lexical"]);
    chat.args(settings.iter().flat_map(|setting| ["--set", setting]));
    let filler = "it rains again today and the streets are wet, so nobody goes out before the evening.";
    let lines = [&[NAMED][..], &[filler; 24]].concat();
    send_lines(&mut chat, &lines);
    let shown: Value =
        serde_json::from_str(&run_ok(folder.path(), &["show", "--all", "--json"])).expect("JSON");
    let chunks = shown.as_array().expect("chunks");
    let first = chunks.iter().find(|chunk| chunk["chunk"] == "u0.0").expect("the first message");
    assert_eq!((&first["text"], &first["live"]), (&NAMED.into(), &true.into()), "{first}");
    let pruned: Vec<&Value> = chunks.iter().filter(|chunk| chunk["live"] == false).collect();
    assert!(pruned.len() >= 10, "{shown:#}");
    for chunk in pruned {
        let why = chunk["why"].as_str().unwrap_or_default();
        assert!(why.contains("salience of its text 0."), "{chunk}");
    }
}
