//! One sample file for each format and its variants, the expected result of its import, and damaged copies, which must
//! give an error or a valid conversation.
//!
//! `UPDATE_EXPECTED=1 cargo test` writes the expected texts; read them before you commit them.

use halo_store::exchange::importers::{
    ForeignContent, ForeignConversation, ImportError, ImportFormat, ImportLosses, detect_format, is_zip, read,
};
use std::fmt::Write;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

const SAMPLES: [(&str, ImportFormat); 17] = [
    ("chatgpt-wrapped.json", ImportFormat::ChatGpt),
    ("chatgpt.json", ImportFormat::ChatGpt),
    ("claude.json", ImportFormat::Claude),
    ("markdown-bold.md", ImportFormat::Markdown),
    ("markdown-headings.md", ImportFormat::Markdown),
    ("markdown-plain.txt", ImportFormat::Markdown),
    ("markdown-said.md", ImportFormat::Markdown),
    ("openai-finetune.jsonl", ImportFormat::OpenAi),
    ("openai-lines.jsonl", ImportFormat::OpenAi),
    ("openai-messages.json", ImportFormat::OpenAi),
    ("openai-request.json", ImportFormat::OpenAi),
    ("sillytavern-group.jsonl", ImportFormat::SillyTavern),
    ("sillytavern.jsonl", ImportFormat::SillyTavern),
    ("weave-backup.json", ImportFormat::Weave),
    ("weave-export.json", ImportFormat::Weave),
    ("weave-flat.json", ImportFormat::Weave),
    ("weave-graveyard.json", ImportFormat::Weave),
];

fn samples_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exchange")
}

fn read_sample(name: &str) -> Vec<u8> {
    std::fs::read(samples_folder().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn read_all(format: ImportFormat, input: &mut dyn BufRead) -> Result<Vec<ForeignConversation>, ImportError> {
    let mut conversations = Vec::new();
    read(format, input, &mut |foreign| {
        conversations.push(foreign);
        Ok(())
    })?;
    Ok(conversations)
}

fn read_error(format: ImportFormat, bytes: &[u8]) -> String {
    match read_all(format, &mut &bytes[..]) {
        Ok(conversations) => panic!("read {} conversations instead of an error", conversations.len()),
        Err(e) => e.to_string(),
    }
}

/// A conversation as text, in the notation of the expected files.
fn render_conversation(foreign: &ForeignConversation) -> String {
    let mut out = String::new();
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let time = |at: Option<i64>| at.map_or("-".to_owned(), |at| at.to_string());
    let _ = writeln!(
        out,
        "== {} | {} | {}",
        or_dash(&foreign.name),
        or_dash(&foreign.model),
        time(foreign.created)
    );
    for turn in &foreign.turns {
        let number = turn.number.map_or("-".to_owned(), |number| number.to_string());
        let _ = write!(out, "{number} {:?} {} {}:", turn.role, or_dash(&turn.speaker), time(turn.at));
        match &turn.content {
            ForeignContent::Text(text) => {
                let _ = writeln!(out, " {text:?}");
            }
            ForeignContent::Tokens(tokens) => {
                for token in tokens {
                    let id = token.id.map_or("-".to_owned(), |id| id.to_string());
                    let flag = |on: bool, mark: &'static str| if on { mark } else { "" };
                    let flags =
                        [flag(token.pruned, "~"), flag(token.pinned, "!"), flag(token.tool, "t")].concat();
                    let _ = write!(
                        out,
                        "\n  {flags}{id}.{}*{} {:?}",
                        token.chunk_index, token.brightness, token.text
                    );
                }
                out.push('\n');
            }
        }
    }
    for entry in &foreign.index {
        let _ = writeln!(
            out,
            "index {}.{} {:?} {:?} x{} {:?}",
            entry.turn, entry.chunk_index, entry.role, entry.text, entry.references, entry.embedding
        );
    }
    if let Some(notes) = &foreign.notes {
        let _ = writeln!(out, "notes {notes}");
    }
    for (kind, count) in foreign.losses.iter() {
        let _ = writeln!(out, "lost {kind}: {count}");
    }
    out
}

fn render_all(format: ImportFormat, input: &mut dyn BufRead) -> String {
    match read_all(format, input) {
        Ok(conversations) => conversations.iter().map(render_conversation).collect::<Vec<_>>().join("\n"),
        Err(e) => format!("error: {e}\n"),
    }
}

#[test]
fn import_samples_match_expected_output() {
    for (name, format) in SAMPLES {
        let bytes = read_sample(name);
        let rendered = render_all(format, &mut &bytes[..]);
        let path = samples_folder().join(format!("{name}.expected"));
        if std::env::var_os("UPDATE_EXPECTED").is_some() {
            std::fs::write(&path, &rendered).unwrap();
        }
        let expected = std::fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(rendered, expected, "{name}");
        assert_eq!(detect_format(&bytes, name), Some(format), "{name}");
        for size in [1, 3, 4096] {
            let mut pieces = BufReader::with_capacity(size, &bytes[..]);
            assert_eq!(render_all(format, &mut pieces), expected, "{name} in pieces of {size}");
        }
    }
}

#[test]
fn import_samples_are_all_listed() {
    let mut files: Vec<String> = std::fs::read_dir(samples_folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.ends_with(".expected"))
        .collect();
    let mut listed: Vec<String> = SAMPLES.iter().map(|(name, _)| (*name).to_owned()).collect();
    files.sort();
    listed.sort();
    assert_eq!(files, listed);
}

#[test]
fn detect_format_needs_only_first_bytes() {
    for (name, format) in SAMPLES {
        let bytes = read_sample(name);
        let first_bytes = &bytes[..bytes.len().min(600)];
        assert_eq!(detect_format(first_bytes, name), Some(format), "{name}");
    }
    assert_eq!(detect_format(b"PK\x03\x04rest", "export.zip"), None);
    assert!(is_zip(b"PK\x03\x04rest") && !is_zip(b"[]"));
    assert_eq!(detect_format(b"", "empty.json"), None);
    assert_eq!(detect_format(b"[]", "conversations.json"), None);
    assert_eq!(detect_format(br#"{"title": "mapping", "list": [{"mapping": {}}]}"#, "a.json"), None);
    assert_eq!(detect_format(b"Dear diary,\n\nnothing happened.\n", "diary.txt"), None);
    assert_eq!(
        detect_format(b"Dear diary,\n\nnothing happened.\n", "diary.md"),
        Some(ImportFormat::Markdown)
    );
    assert_eq!(detect_format(b"User: a\0b", "x.bin"), None);
    let mut long = br#"{"conversation": {"tokens": [""#.to_vec();
    long.resize(100_000, b'{');
    assert_eq!(detect_format(&long, "x"), Some(ImportFormat::Weave));
    for format in ImportFormat::ALL {
        assert_eq!(ImportFormat::from_name(format.name()), Some(format));
    }
    assert_eq!(ImportFormat::from_name("pdf"), None);
}

#[test]
fn import_errors_name_location_and_remedy() {
    let broken =
        read_error(ImportFormat::SillyTavern, b"{\"user_name\":\"a\"}\n{\"mes\":\"b\"}\n{\"mes\":\"c");
    assert!(broken.starts_with("record 3 cannot be read: "), "{broken}");
    assert!(broken.contains("at line 3 column 9"), "{broken}");
    assert!(broken.ends_with("export it again"), "{broken}");

    let wrong = read_error(ImportFormat::ChatGpt, br#"[{"mapping":{}},{"chat_messages":[]}]"#);
    assert!(wrong.starts_with("record 2 is not part of a ChatGPT export: it has no 'mapping'"), "{wrong}");
    assert!(read_error(ImportFormat::Claude, b"[{}]").contains("chat_messages"));
    assert!(read_error(ImportFormat::OpenAi, b"[{\"content\":\"x\"}]").contains("'messages'"));
    assert!(read_error(ImportFormat::SillyTavern, b"{}").contains("'mes'"));
    assert!(read_error(ImportFormat::Weave, b"{}").contains("'tokens'"));
    assert!(
        read_error(ImportFormat::Weave, br#"{"tokens":[{"brightness":1e999}]}"#).contains("out of range")
    );
    assert!(read_error(ImportFormat::Markdown, b"Nobody speaks.\n").contains("## User"));
    assert!(read_error(ImportFormat::OpenAi, b"42").contains("an object or an array"));

    for format in ImportFormat::ALL {
        let not_utf8 = read_error(format, b"{\"a\":\n\"caf\xe9\"}");
        assert!(not_utf8.contains("byte 10, in line 2"), "{not_utf8}");
        let truncated = read_error(format, "{\"a\":\"é".as_bytes().split_last().unwrap().1);
        assert!(truncated.contains("byte 6, in line 1"), "{truncated}");
        let with_bom = read_error(format, b"\xef\xbb\xbf\xff");
        assert!(with_bom.contains("byte 3, in line 1"), "{with_bom}");
    }
}

#[test]
fn import_bounds_nesting_depth() {
    for format in [
        ImportFormat::Weave,
        ImportFormat::SillyTavern,
        ImportFormat::ChatGpt,
        ImportFormat::Claude,
        ImportFormat::OpenAi,
    ] {
        for opening in ["[", "{\"mes\":", "{\"mapping\":{\"a\":", "{\"tokens\":[", "{\"conversations\":["] {
            let deep = opening.repeat(200_000);
            read_error(format, deep.as_bytes());
        }
    }
    let quotes = "> ".repeat(200_000) + "\nUser: hi\n" + &"#".repeat(200_000) + &"*".repeat(200_000);
    assert_eq!(read_all(ImportFormat::Markdown, &mut quotes.as_bytes()).unwrap()[0].turns.len(), 1);
}

/// A reader that fails after its last byte.
struct FailingReader<'a>(&'a [u8]);

impl Read for FailingReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self.0.read(out)? {
            0 => Err(io::Error::other("the cable was pulled")),
            n => Ok(n),
        }
    }
}

#[test]
fn import_streams_conversations_before_end_of_file() {
    let one =
        r#"{"title":"t","mapping":{"a":{"message":{"author":{"role":"user"},"content":{"parts":["hi"]}}}}},"#;
    let bytes = "[".to_owned() + &one.repeat(5000);
    let mut count = 0;
    let outcome =
        read(ImportFormat::ChatGpt, &mut BufReader::new(FailingReader(bytes.as_bytes())), &mut |foreign| {
            assert_eq!(foreign.turns.len(), 1);
            count += 1;
            Ok(())
        });
    assert_eq!(count, 5000);
    assert!(outcome.unwrap_err().to_string().contains("the cable was pulled"));

    count = 0;
    let outcome = read(ImportFormat::ChatGpt, &mut bytes.as_bytes(), &mut |_| {
        count += 1;
        if count == 3 { Err(ImportError::Aborted("enough".into())) } else { Ok(()) }
    });
    assert_eq!((count, outcome.unwrap_err().to_string()), (3, "enough".to_owned()));
}

#[test]
fn import_parses_dates_in_every_format() {
    let at = |date: &str| {
        let line = format!("{{\"mes\":\"x\",\"send_date\":{date}}}");
        let chat = read_all(ImportFormat::SillyTavern, &mut line.as_bytes()).unwrap().remove(0);
        (chat.turns[0].at, chat.losses.iter().map(|(_, n)| n).sum::<u64>())
    };
    let (day, minute, second) = (1_687_132_800_000, 60_000, 1000);
    let time = |h: i64, m: i64, s: i64, ms: i64| (Some(day + (h * 60 + m) * minute + s * second + ms), 0);
    assert_eq!(at("\"June 19, 2023 2:20pm\""), time(14, 20, 0, 0));
    assert_eq!(at("\"june 19, 2023 12:05AM\""), time(0, 5, 0, 0));
    assert_eq!(at("\"2023-6-19 @14h 20m 32s 123ms\""), time(14, 20, 32, 123));
    assert_eq!(at("\"2023-06-19 @04h 02m 03s 07ms\""), time(4, 2, 3, 7));
    assert_eq!(at("\"2023-06-19@14h20m32s\""), time(14, 20, 32, 0));
    assert_eq!(at("\"2023-06-19@14h20m32s123ms\""), time(14, 20, 32, 123));
    assert_eq!(at("\"2023-06-19T14:20:32.123456Z\""), time(14, 20, 32, 123));
    assert_eq!(at("\"2023-06-19T16:20:32+02:00\""), time(14, 20, 32, 0));
    assert_eq!(at("\"2023-06-19T14:20\""), time(14, 20, 0, 0));
    assert_eq!(at("\"2023-06-19 14:20:32\""), time(14, 20, 32, 0));
    assert_eq!(at("\"2023-06-19\""), time(0, 0, 0, 0));
    assert_eq!(at("1687184432123"), time(14, 20, 32, 123));
    assert_eq!(at("\"1687184432123\""), time(14, 20, 32, 123));
    assert_eq!(at("1687184432.123"), time(14, 20, 32, 123));
    for empty in ["null", "\"\"", "\" \""] {
        assert_eq!(at(empty), (None, 0), "{empty}");
    }
    for unreadable in [
        "\"soon\"",
        "true",
        "1e300",
        "-1e18",
        "\"99999999999999999999999\"",
        "\"2023-13-19@14h20m32s\"",
        "\"2023-6-19 @14h 20m 32s 32767ms\"",
        "\"@\"",
        "\"1-2-3@hms\"",
        "\"June 31, 2023 2:20pm\"",
        "[]",
    ] {
        assert_eq!(at(unreadable), (None, 1), "{unreadable}");
    }
}

#[test]
fn import_losses_are_summed() {
    let conversations = read_all(ImportFormat::ChatGpt, &mut &read_sample("chatgpt.json")[..]).unwrap();
    let mut sum = ImportLosses::default();
    assert!(sum.is_empty());
    for foreign in &conversations {
        sum.merge(&foreign.losses);
    }
    let expected: u64 = conversations.iter().flat_map(|foreign| foreign.losses.iter()).map(|(_, n)| n).sum();
    assert_eq!(sum.iter().map(|(_, n)| n).sum::<u64>(), expected);
    assert!(!sum.is_empty());
}

/// A random number generator with a fixed seed, so that a failure can be repeated.
fn mutate(bytes: &mut Vec<u8>, rng: &mut fastrand::Rng) {
    let len = bytes.len();
    let (a, b) = (rng.usize(..len + 1), rng.usize(..len + 1));
    let range = a.min(b)..a.max(b).min(a.min(b) + 200);
    let insert = |bytes: &mut Vec<u8>, what: &[u8]| {
        bytes.splice(a..a, what.iter().copied());
    };
    match rng.usize(..9) {
        0 if a < len => bytes[a] ^= 1 << rng.usize(..8),
        1 => bytes.truncate(a),
        2 => {
            let copy = bytes[range.clone()].to_vec();
            bytes.splice(range.end..range.end, copy);
        }
        3 => {
            bytes.drain(range);
        }
        4 if a < len && b < len => bytes.swap(a, b),
        5 => {
            let digits: Vec<usize> = (0..len).filter(|i| bytes[*i].is_ascii_digit()).collect();
            let numbers =
                ["1e308", "-1e308", "1e999", "18446744073709551616", "-1", "0.5", "null", "99999999999"];
            if let Some(at) = digits.get(rng.usize(..digits.len().max(1))) {
                let number = numbers[rng.usize(..numbers.len())];
                bytes.splice(*at..*at + 1, number.bytes());
            }
        }
        6 => insert(bytes, "[{\"a\":".repeat(1 + rng.usize(..3000)).as_bytes()),
        7 => insert(bytes, &[0xf0, 0x9f, 0x90, 0x87][..1 + rng.usize(..4)]),
        _ => {
            let words =
                ["\"", "\\", "}", "]", ",", "\n", "\r", "\n## User\n", "\n```\n", "**", "---\n", "null"];
            insert(bytes, words[rng.usize(..words.len())].as_bytes());
        }
    }
}

#[test]
fn import_fuzz_never_panics() {
    let mut readable = 0;
    for (name, format) in SAMPLES {
        let original = read_sample(name);
        for seed in 0..300 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut bytes = original.clone();
            for _ in 0..=rng.usize(..4) {
                mutate(&mut bytes, &mut rng);
            }
            let _ = detect_format(&bytes, name);
            for format in [format, ImportFormat::ALL[rng.usize(..6)]] {
                let Ok(conversations) = read_all(format, &mut &bytes[..]) else { continue };
                readable += 1;
                conversations.iter().for_each(|foreign| assert_invariants(foreign, name, seed));
            }
        }
    }
    assert!(
        readable > 500,
        "only {readable} damaged files could be read; the damage is too heavy to test anything"
    );
}

/// The invariants of every imported conversation.
fn assert_invariants(foreign: &ForeignConversation, name: &str, seed: u64) {
    let numbers: Vec<u32> = foreign.turns.iter().filter_map(|turn| turn.number).collect();
    assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "{name} {seed}: {numbers:?}");
    let mut chunks = std::collections::HashSet::new();
    for turn in &foreign.turns {
        match &turn.content {
            ForeignContent::Text(text) => assert!(!text.is_empty(), "{name} {seed}"),
            ForeignContent::Tokens(tokens) => {
                assert!(!tokens.is_empty(), "{name} {seed}");
                assert!(
                    tokens.windows(2).all(|pair| pair[0].chunk_index <= pair[1].chunk_index),
                    "{name} {seed}"
                );
                assert!(tokens.iter().all(|token| token.brightness.is_finite()), "{name} {seed}");
                chunks.extend(tokens.iter().map(|token| (turn.number, token.chunk_index, turn.role)));
            }
        }
    }
    for entry in &foreign.index {
        assert!(
            chunks.remove(&(Some(entry.turn), entry.chunk_index, entry.role)),
            "{name} {seed}: {entry:?}"
        );
        assert!(entry.embedding.iter().flatten().all(|n| n.is_finite()), "{name} {seed}");
    }
}
