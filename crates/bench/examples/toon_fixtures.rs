//! TOON's own conformance cases, through the library that writes and reads TOON here: `scripts/toon` fetches them and runs this.
//! Each case that does not come out as it should is named.

use serde_json::Value;
use std::path::{Path, PathBuf};
use toon_format::types::{Delimiter, Indent};
use toon_format::{DecodeOptions, EncodeOptions};

/// What came of a case.
enum FixtureResult {
    Passed,
    /// It is about what the library does not have.
    Unsupported,
    Failed(String),
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder =
        std::env::args().nth(1).ok_or("name the folder of the cases, with encode and decode in it")?;
    let (mut out, mut unknown, mut wrong) = (0, 0, 0);
    for way in ["decode", "encode"] {
        let files = std::fs::read_dir(Path::new(&folder).join(way))?.filter_map(Result::ok);
        let mut files: Vec<PathBuf> = files.map(|file| file.path()).collect();
        files.sort();
        for file in files {
            let text = std::fs::read_to_string(&file)?;
            let told: Value = serde_json::from_str(&text)?;
            for case in told["tests"].as_array().ok_or("no cases")? {
                match if way == "decode" { check_decode(case) } else { check_encode(case) } {
                    FixtureResult::Passed => out += 1,
                    FixtureResult::Unsupported => unknown += 1,
                    FixtureResult::Failed(what) => {
                        wrong += 1;
                        println!("{way} {}: {}: {what}", file.display(), case["name"]);
                    }
                }
            }
        }
    }
    println!("{out} as they should be, {wrong} not, {unknown} of what the library does not have");
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
    let how = DecodeOptions::new()
        .with_strict(options["strict"].as_bool().unwrap_or(true))
        .with_indent(indent(options));
    let read = toon_format::decode::<Value>(case["input"].as_str().unwrap_or_default(), &how);
    match (read, case["shouldError"].as_bool().unwrap_or(false)) {
        (Err(_), true) => FixtureResult::Passed,
        (Ok(value), false) if json_equal(&value, &case["expected"]) => FixtureResult::Passed,
        (Ok(value), false) => FixtureResult::Failed(format!("{value} for {}", case["expected"])),
        (Ok(value), true) => FixtureResult::Failed(format!("{value} where it should fail")),
        (Err(why), false) => FixtureResult::Failed(why.to_string()),
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
    let how = EncodeOptions::new().with_delimiter(delimiter).with_indent(indent(options));
    match toon_format::encode(&case["input"], &how) {
        Ok(text) if Some(text.as_str()) == case["expected"].as_str() => FixtureResult::Passed,
        Ok(text) => FixtureResult::Failed(format!("{text:?} for {}", case["expected"])),
        Err(why) => FixtureResult::Failed(why.to_string()),
    }
}

/// Numbers are equal when they are the same number.
fn json_equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
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
