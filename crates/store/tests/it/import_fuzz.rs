//! Ten thousand damaged files: exports of Halo and of other programs. The result is a conversation or an error, and after
//! an error the store is unchanged.

use halo_core::chunker::ChunkSize;
use halo_core::store::{Access, Store};
use halo_core::token::Brightness;
use halo_store::database::Database;
use halo_store::exchange::{ImportReport, ImportRequest};
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
