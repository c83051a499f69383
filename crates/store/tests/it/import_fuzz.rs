//! Ten thousand files that nobody wrote: exports of ours and of others, damaged. Whatever they hold, the answer is
//! a conversation or an error, and after an error the store is as it was.

use halo_core::chunker::ChunkSize;
use halo_core::store::{Access, Store};
use halo_core::token::Brightness;
use halo_store::database::Database;
use halo_store::exchange::{ImportReport, ImportRequest};
use std::path::Path;

struct ImportFuzzRng(u64);

impl ImportFuzzRng {
    fn below(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides.max(1)
    }
}

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

fn mutate(bytes: &mut Vec<u8>, dice: &mut ImportFuzzRng) {
    let at = dice.below(bytes.len() + 1);
    let some = dice.below(80).min(bytes.len() - at);
    match dice.below(7) {
        0 if at < bytes.len() => bytes[at] ^= 1 << dice.below(8),
        1 => bytes.truncate(at),
        2 => drop(bytes.drain(at..at + some)),
        3 => {
            let copy = bytes[at..at + some].to_vec();
            bytes.splice(at..at, copy);
        }
        4 => {
            let numbers = ["-1", "1e999", "4294967295", "18446744073709551615", "0.1", "null", "\"x\"", "[]"];
            let digits: Vec<usize> = (0..bytes.len()).filter(|&i| bytes[i].is_ascii_digit()).collect();
            if let Some(&digit) = digits.get(dice.below(digits.len())) {
                bytes.splice(digit..=digit, numbers[dice.below(numbers.len())].bytes());
            }
        }
        5 => drop(bytes.splice(at..at, "[{\"a\":".repeat(dice.below(500)).into_bytes())),
        _ => {
            let words =
                ["\"", "\\u0000", "}", "]", ",", "\n", "\r\n## User\r\n", "\u{202e}", "{\"mes\":\"x\"}\n"];
            drop(bytes.splice(at..at, words[dice.below(words.len())].bytes()));
        }
    }
}

#[test]
fn import_fuzz_leaves_store_intact() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exchange");
    let mut samples: Vec<(String, Vec<u8>)> = std::fs::read_dir(folder)
        .expect("samples")
        .map(|entry| entry.expect("a file"))
        .map(|entry| (entry.file_name().into_string().expect("a name"), entry.path()))
        .filter(|(name, _)| !name.ends_with(".expected"))
        .map(|(name, path)| (name, std::fs::read(path).expect("readable")))
        .collect();
    samples.sort();
    let place = crate::common::sqlite();
    let mut store = place.open();
    import(
        &mut store,
        "weave.json",
        &samples.iter().find(|(n, _)| n == "weave-export.json").expect("there").1,
        Some("kept"),
    )
    .expect("it comes in");
    let hash = |store: &mut Database| store.load("kept", Access::Read).expect("it opens").state_hash();
    let kept = hash(&mut store);
    let mut own = Vec::new();
    store.export("kept", &mut own, &mut |_, _| {}).expect("it goes out");
    samples.push(("own.jsonl".into(), own.clone()));
    let (mut came, mut refused, mut dice) = (0, 0, ImportFuzzRng(11));
    for n in 0..10_000 {
        let (name, original) = &samples[n % samples.len()];
        let mut bytes = original.clone();
        for _ in 0..=dice.below(3) {
            mutate(&mut bytes, &mut dice);
        }
        let before = store.list_conversations().expect("listed");
        match import(&mut store, name, &bytes, (name == "own.jsonl").then_some("copy")) {
            Ok(arrived) => {
                came += 1;
                for arrival in arrived.conversations {
                    let timeline = store.load(&arrival.name, Access::Read).expect("it opens");
                    timeline.check_invariants().expect("sound");
                    assert_eq!((timeline.len(), timeline.live_len()), (arrival.tokens, arrival.live));
                }
                // An export of ours bears its sum: only one that is as it was comes in.
                assert!(name != "own.jsonl" || bytes == *original, "a damaged export came in");
            }
            Err(why) => {
                refused += 1;
                assert!(why.starts_with(&format!("importing {name}: ")), "{why}");
                assert_eq!(store.list_conversations().expect("listed"), before, "{name}: {why}");
            }
        }
        if n % 500 == 499 {
            assert_eq!(hash(&mut store), kept);
            assert_eq!(store.check_integrity(&mut |_, _| {}).expect("it can be examined"), []);
            // A new store now and then: the old one fills up with what came in.
            std::fs::remove_dir_all(place.folder()).expect("gone");
            std::fs::create_dir(place.folder()).expect("made");
            store = place.open();
            import(&mut store, "own.jsonl", &own, None).expect("it comes back");
        }
    }
    assert!(came > 1_000 && refused > 4_000, "{came} came in, {refused} were refused");
}
