//! A prepared store: a conversation with everything that the routes show, and a world. It is built once per process; each server
//! gets a copy, so that a test may change it.

use crate::chat::chat_body;
use crate::fake::{FakeCaptures, FakeOptions, FakeServer};
use halo_core::store::{RecordKind, Store};
use halo_server::ServerLimits;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::OnceLock;
use tempfile::TempDir;

/// The conversation `main`, by turn:
///
/// | turns | text | state |
/// |---|---|---|
/// | 0, 1 | I live in Lindau on the lake. / What a lovely town. | `u0.0` and `a1.0` are pruned |
/// | 2, 3 | My cat is called Mitzi. / A fine name. | `u2.0` and `a3.0` are deleted |
/// | 4, 5 | My secret number is 4711. / I see. | `u4.0` is pending deletion |
/// | 6 | Tell me about tea. | live |
/// | 7 | Tea is brewed. | a variant |
/// | 8 | Tea comes from China. | live, and recorded as a capture |
///
/// It has 37 tokens, a memory of the turns 0 and 1, and notes. The world is called `village`.
struct PreparedFiles {
    files: Vec<(String, Vec<u8>)>,
    captures: FakeCaptures,
    capture: String,
}

/// A server on a copy of the prepared store.
pub struct PreparedServer {
    pub fake: FakeServer,
    pub captures: FakeCaptures,
    /// The id of the capture of turn 8.
    pub capture: String,
    /// Deleted with the server.
    _folder: TempDir,
}

pub fn prepared_server() -> PreparedServer {
    prepared_server_with(ServerLimits::default())
}

pub fn prepared_server_with(limits: ServerLimits) -> PreparedServer {
    static PREPARED: OnceLock<PreparedFiles> = OnceLock::new();
    // A test runs on a runtime already, so another one needs a thread of its own.
    let prepared =
        PREPARED.get_or_init(|| std::thread::spawn(prepare_files).join().expect("the store can be prepared"));
    let folder = tempfile::tempdir().expect("a folder");
    for (name, content) in &prepared.files {
        std::fs::write(folder.path().join(name), content).expect("a file is written");
    }
    let captures = prepared.captures.copy();
    let fake = FakeServer::with_options(FakeOptions { limits, ..options(folder.path(), &captures) });
    PreparedServer { fake, captures, capture: prepared.capture.clone(), _folder: folder }
}

fn options(folder: &Path, captures: &FakeCaptures) -> FakeOptions {
    FakeOptions {
        embedder: true,
        attention: true,
        captures: captures.clone(),
        ..FakeOptions::in_folder(folder)
    }
}

fn prepare_files() -> PreparedFiles {
    let folder = tempfile::tempdir().expect("a folder");
    let captures = FakeCaptures::default();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let capture = runtime.expect("a runtime").block_on(prepare_store(folder.path(), &captures));
    let files = std::fs::read_dir(folder.path()).expect("a folder").filter_map(Result::ok);
    // The folder of the leases is empty again.
    let files = files.filter(|file| file.path().is_file()).map(|file| {
        let content = std::fs::read(file.path()).expect("a file is read");
        (file.file_name().to_string_lossy().into_owned(), content)
    });
    PreparedFiles { files: files.collect(), captures, capture }
}

/// Returns the id of the capture.
async fn prepare_store(folder: &Path, captures: &FakeCaptures) -> String {
    let exchanges = [
        ("u I live in Lindau on the lake.", "a What a lovely town."),
        ("u My cat is called Mitzi.", "a A fine name."),
        ("u My secret number is 4711.", "a I see."),
        ("u Tell me about tea.", "a Tea is brewed."),
    ];
    let history: Vec<&str> = exchanges.iter().flat_map(|(question, answer)| [*question, *answer]).collect();
    let question = chat_body(&history[..7]);

    let fake = FakeServer::with_options(options(folder, captures));
    fake.script_answers(&exchanges.map(|(_, answer)| &answer[2..]));
    for end in [1, 3, 5, 7] {
        let response = fake.chat(&chat_body(&history[..end]), Some("main")).await;
        assert_eq!(response.status, 200, "{}", response.body);
    }
    fake.app.shutdown();
    drop(fake);
    // An open conversation would not see the memory.
    let memory = json!({
        "from": [0, 0], "to": [1, 0], "text": "They live in Lindau on the lake.", "model": "scripted", "formed": 3, "at": 1000,
    });
    let options = options(folder, captures);
    let mut store = options.store.open_database().expect("the store opens");
    store
        .put_record("main", RecordKind::Memory, "00000001", Some(&memory.to_string()))
        .expect("the memory is written");
    drop(store);

    let fake = FakeServer::with_options(options);
    let send = async |method: &str, path: &str, body: Value, expected: u16| {
        let (status, result) = fake.halo_api(method, path, Some(&body)).await;
        assert_eq!(status, expected, "{method} {path}: {result}");
    };
    send("PUT", "/conversations/main/recording", json!({ "recording": true }), 204).await;
    fake.script_answers(&["Tea comes from China."]);
    let response = fake.chat(&question, Some("main")).await;
    assert_eq!(response.text(), "Tea comes from China.", "{}", response.body);
    send("PUT", "/conversations/main/recording", json!({ "recording": false }), 204).await;
    let edits = "/conversations/main/edits";
    send("POST", edits, json!({ "edit": "prune", "chunks": ["u0.0"] }), 200).await;
    send("POST", edits, json!({ "edit": "delete", "chunks": ["u2.0"] }), 200).await;
    let notes = json!({ "file": "notes.json", "text": "{\"town\":\"Lindau\"}" });
    send("PUT", "/conversations/main/notes", notes, 204).await;
    send("POST", "/conversations/main/forget", json!({ "chunks": ["u4.0"] }), 200).await;
    send("POST", "/worlds", json!({ "name": "village" }), 201).await;
    let (_, list) = fake.halo_api("GET", "/conversations/main/captures", None).await;
    fake.app.shutdown();
    list["captures"][0]["id"].as_str().unwrap_or_else(|| panic!("no capture in {list}")).to_owned()
}
