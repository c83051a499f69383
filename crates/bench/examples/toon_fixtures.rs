//! Runs the conformance cases of the TOON specification on the `toon-format` library and prints each failed case.
//! `scripts/toon` downloads the cases and runs this example.

use serde_json::Value;
use std::path::{Path, PathBuf};
use toon_format::types::{Delimiter, Indent};
use toon_format::{DecodeOptions, EncodeOptions};

enum FixtureResult {
    Passed,
    /// The case needs an option that the library does not have.
    Unsupported,
    Failed(String),
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder =
        std::env::args().nth(1).ok_or("usage: toon_fixtures FOLDER, with encode and decode in it")?;
    let (mut passed, mut unsupported, mut failed) = (0, 0, 0);
    for direction in ["decode", "encode"] {
        let files = std::fs::read_dir(Path::new(&folder).join(direction))?.filter_map(Result::ok);
        let mut files: Vec<PathBuf> = files.map(|file| file.path()).collect();
        files.sort();
        for file in files {
            let text = std::fs::read_to_string(&file)?;
            let fixture: Value = serde_json::from_str(&text)?;
            for case in fixture["tests"].as_array().ok_or("no cases")? {
                match if direction == "decode" { check_decode(case) } else { check_encode(case) } {
                    FixtureResult::Passed => passed += 1,
                    FixtureResult::Unsupported => unsupported += 1,
                    FixtureResult::Failed(reason) => {
                        failed += 1;
                        println!("{direction} {}: {}: {reason}", file.display(), case["name"]);
                    }
                }
            }
        }
    }
    println!("{passed} passed, {failed} failed, {unsupported} unsupported");
    Ok(())
}

fn indent(options: &Value) -> Indent {
    options["indent"].as_u64().map_or_else(Indent::default, |n| Indent::Spaces(n as usize))
}

fn check_decode(case: &Value) -> FixtureResult {
    let options = &case["options"];
    if options["expandPaths"] == "safe" {
        return FixtureResult::Unsupported;
    }
    let decode_options = DecodeOptions::new()
        .with_strict(options["strict"].as_bool().unwrap_or(true))
        .with_indent(indent(options));
    let decoded = toon_format::decode::<Value>(case["input"].as_str().unwrap_or_default(), &decode_options);
    match (decoded, case["shouldError"].as_bool().unwrap_or(false)) {
        (Err(_), true) => FixtureResult::Passed,
        (Ok(value), false) if json_equal(&value, &case["expected"]) => FixtureResult::Passed,
        (Ok(value), false) => FixtureResult::Failed(format!("{value}, but expected {}", case["expected"])),
        (Ok(value), true) => FixtureResult::Failed(format!("{value}, but an error was expected")),
        (Err(error), false) => FixtureResult::Failed(error.to_string()),
    }
}

fn check_encode(case: &Value) -> FixtureResult {
    let options = &case["options"];
    if options["keyFolding"] == "safe" {
        return FixtureResult::Unsupported;
    }
    let delimiter = match options["delimiter"].as_str() {
        Some("\t") => Delimiter::Tab,
        Some("|") => Delimiter::Pipe,
        _ => Delimiter::Comma,
    };
    let encode_options = EncodeOptions::new().with_delimiter(delimiter).with_indent(indent(options));
    match toon_format::encode(&case["input"], &encode_options) {
        Ok(text) if Some(text.as_str()) == case["expected"].as_str() => FixtureResult::Passed,
        Ok(text) => FixtureResult::Failed(format!("{text:?}, but expected {}", case["expected"])),
        Err(error) => FixtureResult::Failed(error.to_string()),
    }
}

/// Compares numbers by value: 1 equals 1.0.
fn json_equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| json_equal(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| json_equal(a, b)))
        }
        (a, b) => a == b,
    }
}
