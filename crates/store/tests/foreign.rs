//! One sample file for each shape, what comes in of it, and what damage to it may do: nothing but an error.
//!
//! `UPDATE_EXPECTED=1 cargo test` writes the expected texts anew; read them before you keep them.

use halo_store::exchange::foreign::{Content, Foreign, Format, Losses, ReadError, detect, is_zip, read};
use std::fmt::Write;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

const SAMPLES: [(&str, Format); 17] = [
    ("chatgpt-wrapped.json", Format::ChatGpt),
    ("chatgpt.json", Format::ChatGpt),
    ("claude.json", Format::Claude),
    ("markdown-bold.md", Format::Markdown),
    ("markdown-headings.md", Format::Markdown),
    ("markdown-plain.txt", Format::Markdown),
    ("markdown-said.md", Format::Markdown),
    ("openai-finetune.jsonl", Format::OpenAi),
    ("openai-lines.jsonl", Format::OpenAi),
    ("openai-messages.json", Format::OpenAi),
    ("openai-request.json", Format::OpenAi),
    ("sillytavern-group.jsonl", Format::SillyTavern),
    ("sillytavern.jsonl", Format::SillyTavern),
    ("weave-backup.json", Format::Weave),
    ("weave-export.json", Format::Weave),
    ("weave-flat.json", Format::Weave),
    ("weave-graveyard.json", Format::Weave),
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exchange")
}

fn sample(name: &str) -> Vec<u8> {
    std::fs::read(folder().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn all(format: Format, input: &mut dyn BufRead) -> Result<Vec<Foreign>, ReadError> {
    let mut found = Vec::new();
    read(format, input, &mut |foreign| {
        found.push(foreign);
        Ok(())
    })?;
    Ok(found)
}

fn error(format: Format, bytes: &[u8]) -> String {
    match all(format, &mut &bytes[..]) {
        Ok(found) => panic!("read {} conversations instead of an error", found.len()),
        Err(e) => e.to_string(),
    }
}

/// A conversation as a reader of the test would write it down.
fn render(foreign: &Foreign) -> String {
    let mut out = String::new();
    let or = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let time = |at: Option<i64>| at.map_or("-".to_owned(), |at| at.to_string());
    let _ = writeln!(out, "== {} | {} | {}", or(&foreign.name), or(&foreign.model), time(foreign.created));
    for turn in &foreign.turns {
        let number = turn.number.map_or("-".to_owned(), |number| number.to_string());
        let _ = write!(out, "{number} {:?} {} {}:", turn.role, or(&turn.speaker), time(turn.at));
        match &turn.content {
            Content::Text(text) => {
                let _ = writeln!(out, " {text:?}");
            }
            Content::Tokens(tokens) => {
                for token in tokens {
                    let id = token.id.map_or("-".to_owned(), |id| id.to_string());
                    let flag = |on: bool, mark: &'static str| if on { mark } else { "" };
                    let flags =
                        [flag(token.dead, "~"), flag(token.pinned, "!"), flag(token.tool, "t")].concat();
                    let _ = write!(
                        out,
                        "\n  {flags}{id}.{}*{} {:?}",
                        token.sentence, token.brightness, token.text
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
            entry.turn, entry.sentence, entry.role, entry.text, entry.references, entry.embedding
        );
    }
    if let Some(notes) = &foreign.notes {
        let _ = writeln!(out, "notes {notes}");
    }
    for (kind, count) in foreign.lost.iter() {
        let _ = writeln!(out, "lost {kind}: {count}");
    }
    out
}

fn render_all(format: Format, input: &mut dyn BufRead) -> String {
    match all(format, input) {
        Ok(found) => found.iter().map(render).collect::<Vec<_>>().join("\n"),
        Err(e) => format!("error: {e}\n"),
    }
}

#[test]
fn samples_come_in_as_expected() {
    for (name, format) in SAMPLES {
        let bytes = sample(name);
        let rendered = render_all(format, &mut &bytes[..]);
        let path = folder().join(format!("{name}.expected"));
        if std::env::var_os("UPDATE_EXPECTED").is_some() {
            std::fs::write(&path, &rendered).unwrap();
        }
        let expected = std::fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(rendered, expected, "{name}");
        assert_eq!(detect(&bytes, name), Some(format), "{name}");
        for size in [1, 3, 4096] {
            let mut pieces = BufReader::with_capacity(size, &bytes[..]);
            assert_eq!(render_all(format, &mut pieces), expected, "{name} in pieces of {size}");
        }
    }
}

#[test]
fn every_sample_is_listed() {
    let mut found: Vec<String> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.ends_with(".expected"))
        .collect();
    let mut listed: Vec<String> = SAMPLES.iter().map(|(name, _)| (*name).to_owned()).collect();
    found.sort();
    listed.sort();
    assert_eq!(found, listed);
}

#[test]
fn detection_needs_only_the_head() {
    for (name, format) in SAMPLES {
        let bytes = sample(name);
        let half = &bytes[..bytes.len().min(600)];
        assert_eq!(detect(half, name), Some(format), "{name}");
    }
    assert_eq!(detect(b"PK\x03\x04rest", "export.zip"), None);
    assert!(is_zip(b"PK\x03\x04rest") && !is_zip(b"[]"));
    assert_eq!(detect(b"", "empty.json"), None);
    assert_eq!(detect(b"[]", "conversations.json"), None);
    assert_eq!(detect(br#"{"title": "mapping", "list": [{"mapping": {}}]}"#, "a.json"), None);
    assert_eq!(detect(b"Dear diary,\n\nnothing happened.\n", "diary.txt"), None);
    assert_eq!(detect(b"Dear diary,\n\nnothing happened.\n", "diary.md"), Some(Format::Markdown));
    assert_eq!(detect(b"User: a\0b", "x.bin"), None);
    let mut long = br#"{"conversation": {"tokens": [""#.to_vec();
    long.resize(100_000, b'{');
    assert_eq!(detect(&long, "x"), Some(Format::Weave));
    for format in Format::ALL {
        assert_eq!(Format::from_name(format.name()), Some(format));
    }
    assert_eq!(Format::from_name("pdf"), None);
}

#[test]
fn errors_say_where_and_what_to_do() {
    let broken = error(Format::SillyTavern, b"{\"user_name\":\"a\"}\n{\"mes\":\"b\"}\n{\"mes\":\"c");
    assert!(broken.starts_with("record 3 cannot be read: "), "{broken}");
    assert!(broken.contains("at line 3 column 9"), "{broken}");
    assert!(broken.ends_with("export it again"), "{broken}");

    let wrong = error(Format::ChatGpt, br#"[{"mapping":{}},{"chat_messages":[]}]"#);
    assert!(wrong.starts_with("record 2 is not part of a ChatGPT export: it has no 'mapping'"), "{wrong}");
    assert!(error(Format::Claude, b"[{}]").contains("chat_messages"));
    assert!(error(Format::OpenAi, b"[{\"content\":\"x\"}]").contains("'messages'"));
    assert!(error(Format::SillyTavern, b"{}").contains("'mes'"));
    assert!(error(Format::Weave, b"{}").contains("'tokens'"));
    assert!(error(Format::Weave, br#"{"tokens":[{"brightness":1e999}]}"#).contains("out of range"));
    assert!(error(Format::Markdown, b"Nobody speaks.\n").contains("## User"));
    assert!(error(Format::OpenAi, b"42").contains("an object or an array"));

    for format in Format::ALL {
        let bad = error(format, b"{\"a\":\n\"caf\xe9\"}");
        assert!(bad.contains("byte 10, in line 2"), "{bad}");
        let cut = error(format, "{\"a\":\"é".as_bytes().split_last().unwrap().1);
        assert!(cut.contains("byte 6, in line 1"), "{cut}");
        let marked = error(format, b"\xef\xbb\xbf\xff");
        assert!(marked.contains("byte 3, in line 1"), "{marked}");
    }
}

#[test]
fn depth_is_bounded() {
    for format in [Format::Weave, Format::SillyTavern, Format::ChatGpt, Format::Claude, Format::OpenAi] {
        for opening in ["[", "{\"mes\":", "{\"mapping\":{\"a\":", "{\"tokens\":[", "{\"conversations\":["] {
            let deep = opening.repeat(200_000);
            error(format, deep.as_bytes());
        }
    }
    let quotes = "> ".repeat(200_000) + "\nUser: hi\n" + &"#".repeat(200_000) + &"*".repeat(200_000);
    assert_eq!(all(Format::Markdown, &mut quotes.as_bytes()).unwrap()[0].turns.len(), 1);
}

/// Fails when its bytes are used up.
struct Torn<'a>(&'a [u8]);

impl Read for Torn<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self.0.read(out)? {
            0 => Err(io::Error::other("the cable was pulled")),
            n => Ok(n),
        }
    }
}

#[test]
fn conversations_come_before_the_file_ends() {
    let one =
        r#"{"title":"t","mapping":{"a":{"message":{"author":{"role":"user"},"content":{"parts":["hi"]}}}}},"#;
    let bytes = "[".to_owned() + &one.repeat(5000);
    let mut count = 0;
    let outcome = read(Format::ChatGpt, &mut BufReader::new(Torn(bytes.as_bytes())), &mut |foreign| {
        assert_eq!(foreign.turns.len(), 1);
        count += 1;
        Ok(())
    });
    assert_eq!(count, 5000);
    assert!(outcome.unwrap_err().to_string().contains("the cable was pulled"));

    count = 0;
    let outcome = read(Format::ChatGpt, &mut bytes.as_bytes(), &mut |_| {
        count += 1;
        if count == 3 { Err(ReadError::Stopped("enough".into())) } else { Ok(()) }
    });
    assert_eq!((count, outcome.unwrap_err().to_string()), (3, "enough".to_owned()));
}

#[test]
fn dates_in_every_spelling() {
    let at = |date: &str| {
        let line = format!("{{\"mes\":\"x\",\"send_date\":{date}}}");
        let chat = all(Format::SillyTavern, &mut line.as_bytes()).unwrap().remove(0);
        (chat.turns[0].at, chat.lost.iter().map(|(_, n)| n).sum::<u64>())
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
    for nothing in ["null", "\"\"", "\" \""] {
        assert_eq!(at(nothing), (None, 0), "{nothing}");
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
fn losses_add_up() {
    let found = all(Format::ChatGpt, &mut &sample("chatgpt.json")[..]).unwrap();
    let mut sum = Losses::default();
    assert!(sum.is_empty());
    for foreign in &found {
        sum.merge(&foreign.lost);
    }
    let each: u64 = found.iter().flat_map(|foreign| foreign.lost.iter()).map(|(_, n)| n).sum();
    assert_eq!(sum.iter().map(|(_, n)| n).sum::<u64>(), each);
    assert!(!sum.is_empty());
}

/// A small generator, so that a failure can be repeated.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides.max(1) as u64) as usize
    }
}

fn mutate(bytes: &mut Vec<u8>, dice: &mut Dice) {
    let len = bytes.len();
    let (a, b) = (dice.roll(len + 1), dice.roll(len + 1));
    let range = a.min(b)..a.max(b).min(a.min(b) + 200);
    let insert = |bytes: &mut Vec<u8>, what: &[u8]| {
        bytes.splice(a..a, what.iter().copied());
    };
    match dice.roll(9) {
        0 if a < len => bytes[a] ^= 1 << dice.roll(8),
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
            if let Some(at) = digits.get(dice.roll(digits.len())) {
                let number = numbers[dice.roll(numbers.len())];
                bytes.splice(*at..*at + 1, number.bytes());
            }
        }
        6 => insert(bytes, "[{\"a\":".repeat(1 + dice.roll(3000)).as_bytes()),
        7 => insert(bytes, &[0xf0, 0x9f, 0x90, 0x87][..1 + dice.roll(4)]),
        _ => {
            let words =
                ["\"", "\\", "}", "]", ",", "\n", "\r", "\n## User\n", "\n```\n", "**", "---\n", "null"];
            insert(bytes, words[dice.roll(words.len())].as_bytes());
        }
    }
}

#[test]
fn damage_never_panics() {
    let mut good = 0;
    for (name, format) in SAMPLES {
        let original = sample(name);
        for seed in 0..300 {
            let mut dice = Dice(0x9e37_79b9_7f4a_7c15 ^ (seed + 1));
            let mut bytes = original.clone();
            for _ in 0..=dice.roll(4) {
                mutate(&mut bytes, &mut dice);
            }
            let _ = detect(&bytes, name);
            for format in [format, Format::ALL[dice.roll(6)]] {
                let Ok(found) = all(format, &mut &bytes[..]) else { continue };
                good += 1;
                found.iter().for_each(|foreign| keeps_its_word(foreign, name, seed));
            }
        }
    }
    assert!(good > 500, "only {good} damaged files could be read; the damage is too heavy to test anything");
}

/// What the types promise about every conversation that comes in.
fn keeps_its_word(foreign: &Foreign, name: &str, seed: u64) {
    let numbers: Vec<u32> = foreign.turns.iter().filter_map(|turn| turn.number).collect();
    assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "{name} {seed}: {numbers:?}");
    let mut chunks = std::collections::HashSet::new();
    for turn in &foreign.turns {
        match &turn.content {
            Content::Text(text) => assert!(!text.is_empty(), "{name} {seed}"),
            Content::Tokens(tokens) => {
                assert!(!tokens.is_empty(), "{name} {seed}");
                assert!(tokens.windows(2).all(|pair| pair[0].sentence <= pair[1].sentence), "{name} {seed}");
                assert!(tokens.iter().all(|token| token.brightness.is_finite()), "{name} {seed}");
                chunks.extend(tokens.iter().map(|token| (turn.number, token.sentence, turn.role)));
            }
        }
    }
    for entry in &foreign.index {
        assert!(chunks.remove(&(Some(entry.turn), entry.sentence, entry.role)), "{name} {seed}: {entry:?}");
        assert!(entry.embedding.iter().flatten().all(|n| n.is_finite()), "{name} {seed}");
    }
}
