//! Ten thousand damaged files: exports of Halo and of other programs. The result is a conversation or an error, and after
//! an error the store is unchanged.

use halo_core::chunker::ChunkSize;
use halo_core::store::{Access, PENDING_FORGET_KEY, RecordKind, Store};
use halo_core::token::Brightness;
use halo_store::database::Database;
use halo_store::exchange::{ImportReport, ImportRequest};
use serde_json::{Value, json};
use std::path::Path;

fn import(
    store: &mut Database,
    file_name: &str,
    bytes: &[u8],
    name: Option<&str>,
) -> Result<ImportReport, String> {
    let (size, brightness) = (ChunkSize { min: 8, max: 32 }, Brightness(10_000.0));
    let import = ImportRequest {
        file_name,
        format: None,
        name,
        chunk_size: size,
        initial_brightness: brightness,
        model: None,
        validate_rows: None,
    };
    store.import(&mut &*bytes, import).map_err(|e| e.to_string())
}

fn mutate(bytes: &mut Vec<u8>, rng: &mut fastrand::Rng) {
    let at = rng.usize(..bytes.len() + 1);
    let len = rng.usize(..80).min(bytes.len() - at);
    match rng.usize(..7) {
        0 if at < bytes.len() => bytes[at] ^= 1 << rng.usize(..8),
        1 => bytes.truncate(at),
        2 => drop(bytes.drain(at..at + len)),
        3 => {
            let copy = bytes[at..at + len].to_vec();
            bytes.splice(at..at, copy);
        }
        4 => {
            let numbers = ["-1", "1e999", "4294967295", "18446744073709551615", "0.1", "null", "\"x\"", "[]"];
            let digits: Vec<usize> = (0..bytes.len()).filter(|&i| bytes[i].is_ascii_digit()).collect();
            if let Some(&digit) = digits.get(rng.usize(..digits.len().max(1))) {
                bytes.splice(digit..=digit, numbers[rng.usize(..numbers.len())].bytes());
            }
        }
        5 => drop(bytes.splice(at..at, "[{\"a\":".repeat(rng.usize(..500)).into_bytes())),
        _ => {
            let words =
                ["\"", "\\u0000", "}", "]", ",", "\n", "\r\n## User\r\n", "\u{202e}", "{\"mes\":\"x\"}\n"];
            drop(bytes.splice(at..at, words[rng.usize(..words.len())].bytes()));
        }
    }
}

#[test]
fn import_fuzz_leaves_store_intact() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exchange");
    let mut samples: Vec<(String, Vec<u8>)> = std::fs::read_dir(folder)
        .expect("the folder of samples exists")
        .map(|entry| entry.expect("a folder entry"))
        .map(|entry| (entry.file_name().into_string().expect("a UTF-8 file name"), entry.path()))
        .filter(|(name, _)| !name.ends_with(".expected"))
        .map(|(name, path)| (name, std::fs::read(path).expect("the sample is read")))
        .collect();
    samples.sort();
    let database = crate::common::sqlite();
    let mut store = database.open();
    import(
        &mut store,
        "weave.json",
        &samples.iter().find(|(n, _)| n == "weave-export.json").expect("the sample exists").1,
        Some("original"),
    )
    .expect("the file is imported");
    let hash = |store: &mut Database| {
        store.load("original", Access::Read).expect("the conversation loads").state_hash()
    };
    let original_hash = hash(&mut store);
    let mut export = Vec::new();
    store.export("original", &mut export, &mut |_, _| {}).expect("the conversation is exported");
    samples.push(("own.jsonl".into(), export.clone()));
    let (mut imported, mut rejected, mut rng) = (0, 0, fastrand::Rng::with_seed(11));
    for n in 0..10_000 {
        let (name, original) = &samples[n % samples.len()];
        let mut bytes = original.clone();
        for _ in 0..=rng.usize(..3) {
            mutate(&mut bytes, &mut rng);
        }
        let before = store.list_conversations().expect("the conversations are listed");
        match import(&mut store, name, &bytes, (name == "own.jsonl").then_some("copy")) {
            Ok(report) => {
                imported += 1;
                for conversation in report.conversations {
                    let timeline =
                        store.load(&conversation.name, Access::Read).expect("the conversation loads");
                    timeline.check_invariants().expect("the invariants hold");
                    let counts = (conversation.tokens, conversation.live);
                    assert_eq!((timeline.len(), timeline.live_len()), counts);
                }
                // An export of Halo has a checksum: only an undamaged one is imported.
                assert!(name != "own.jsonl" || bytes == *original, "a damaged export was imported");
            }
            Err(error) => {
                rejected += 1;
                assert!(error.starts_with(&format!("importing {name}: ")), "{error}");
                assert_eq!(
                    store.list_conversations().expect("the conversations are listed"),
                    before,
                    "{name}: {error}"
                );
            }
        }
        if n % 500 == 499 {
            assert_eq!(hash(&mut store), original_hash);
            assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
            // A new store every 500 imports, because imports fill the store.
            std::fs::remove_dir_all(database.folder()).expect("the folder is deleted");
            std::fs::create_dir(database.folder()).expect("the folder is created");
            store = database.open();
            import(&mut store, "own.jsonl", &export, None).expect("the file is imported");
        }
    }
    assert!(imported > 1_000 && rejected > 4_000, "{imported} imported, {rejected} rejected");
}

/// The number of hostile exports; `HALO_HOSTILE` overrides it.
fn hostile_runs() -> usize {
    std::env::var("HALO_HOSTILE").ok().and_then(|n| n.parse().ok()).unwrap_or(300)
}

/// Writes the number of lines and the checksum of an export again, as somebody does who means harm.
fn reseal(lines: &mut Vec<Value>) -> Vec<u8> {
    let mut end = lines.pop().expect("an end");
    let mut bytes: Vec<u8> = lines.iter().flat_map(|line| format!("{line}\n").into_bytes()).collect();
    end["end"]["lines"] = lines.len().into();
    end["end"]["sum"] = format!("{:032x}", xxhash_rust::xxh3::xxh3_128(&bytes)).into();
    bytes.extend(format!("{end}\n").into_bytes());
    bytes
}

/// A line that no export of a well-meaning person has.
fn hostile_line(rng: &mut fastrand::Rng) -> Value {
    let record = |kind: &str, key: &str, value: String| json!({ "record": { "kind": kind, "key": key, "value": value, "at": 7 } });
    let paths = ["/", "/etc", "../../..", "..", "", "captures/../../x", "C:\\", "\u{0}", "~"];
    match rng.usize(..8) {
        0 => record("capture", paths[rng.usize(..paths.len())], "{\"turn\":0}".into()),
        1 => {
            let pending =
                json!([{ "due": rng.i64(..), "chunks": ["u0.0"], "all": rng.bool(), "begun": rng.bool() }]);
            record("setting", "lethe.pending", pending.to_string())
        }
        2 => {
            let memory = json!({ "from": [0, 0], "to": [u32::MAX, u32::MAX], "text": "x", "formed": rng.u32(..), "leaving": true });
            record("memory", &rng.u64(..).to_string(), memory.to_string())
        }
        3 => record("note", "notes.json", json!({ "a": "x".repeat(rng.usize(..1 << 20)) }).to_string()),
        4 => record("turn", "x", "[".repeat(rng.usize(..10_000))),
        5 => record(["namespace", "", "Setting"][rng.usize(..3)], "x", "x".into()),
        _ => {
            let numbers = [3e38f32, -3e38, 1e-45, 0.0, f32::NAN, f32::INFINITY, 1e20];
            let vector: Vec<u8> =
                (0..rng.usize(..8)).flat_map(|_| numbers[rng.usize(..numbers.len())].to_le_bytes()).collect();
            let vector = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, vector);
            json!({ "embedding": { "embedder": "e", "chunk": "u1.0", "at": 7, "of": "ff", "vector": vector } })
        }
    }
}

/// Exports with hostile lines and a right checksum: refused, or imported without recordings and without anything that is to
/// be forgotten.
#[test]
fn hostile_export_fuzz_imports_nothing_that_deletes() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exchange");
    let database = crate::common::sqlite();
    let mut store = database.open();
    let weave = std::fs::read(folder.join("weave-export.json")).expect("the sample is read");
    import(&mut store, "weave.json", &weave, Some("original")).expect("the file is imported");
    let mut export = Vec::new();
    store.export("original", &mut export, &mut |_, _| {}).expect("the conversation is exported");
    let lines = export.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    let lines: Vec<Value> = lines.map(|line| serde_json::from_slice(line).expect("JSON")).collect();
    assert!(import(&mut store, "own.jsonl", &reseal(&mut lines.clone()), Some("resealed")).is_ok());
    let (mut imported, mut rejected, mut rng) = (0, 0, fastrand::Rng::with_seed(12));
    for n in 0..hostile_runs() {
        let mut hostile = lines.clone();
        for _ in 0..=rng.usize(..2) {
            let at = 1 + rng.usize(..hostile.len() - 1);
            hostile.insert(at, hostile_line(&mut rng));
        }
        let name = format!("copy {n}");
        match import(&mut store, "own.jsonl", &reseal(&mut hostile), Some(&name)) {
            Ok(_) => {
                imported += 1;
                store
                    .load(&name, Access::Read)
                    .expect("it loads")
                    .check_invariants()
                    .expect("the invariants hold");
                assert_eq!(store.records(&name, RecordKind::Capture).expect("read"), []);
                let settings = store.records(&name, RecordKind::Setting).expect("read");
                assert!(settings.iter().all(|setting| setting.key != PENDING_FORGET_KEY), "{settings:?}");
                let memories = store.records(&name, RecordKind::Memory).expect("read");
                assert!(
                    memories.iter().all(|memory| !memory.value.contains("\"leaving\":true")),
                    "{memories:?}"
                );
            }
            Err(error) => {
                rejected += 1;
                assert!(error.starts_with("importing own.jsonl: line "), "{error}");
            }
        }
    }
    assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), []);
    assert!(imported > hostile_runs() / 10 && rejected > hostile_runs() / 10, "{imported} and {rejected}");
}
