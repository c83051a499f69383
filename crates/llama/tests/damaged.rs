//! Whole model files that lie: in every number of the header, and in bytes at random. Each is loaded in a process of its
//! own, which must end by itself, with an error or with a model that can be asked.

mod common;

use common::file;
use halo_llama::ffi::{Context, Item, Seq, Shape, Weights};
use halo_llama::gguf::{self, Value};
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

const VARIABLE: &str = "HALO_TEST_LOAD";

/// What the processes do.
#[test]
fn load_what_is_named() {
    let Some(path) = std::env::var_os(VARIABLE) else { return };
    let Ok(weights) = Weights::load(Path::new(&path), 0) else { return };
    let weights = Arc::new(weights);
    let _ = halo_llama::text::pieces(&weights, "Hi, 谢谢", true);
    let shape = Shape { tokens: 64.min(weights.trained_context()), batch: 8, threads: 1, sequences: 3 };
    let Ok(mut context) = Context::new(&weights, shape) else { return };
    let _ = context.decode(Seq(0), &[Item { token: 1, position: 0, logits: true }]);
}

/// Where in a file the numbers of its header stand.
fn numbers(bytes: &[u8]) -> Vec<(String, usize, usize)> {
    let header = gguf::read(&file()).expect("it is whole");
    let mut found = Vec::new();
    for (key, value) in &header.values {
        let named = [&(key.len() as u64).to_le_bytes()[..], key.as_bytes()].concat();
        let at =
            bytes.windows(named.len()).position(|w| w == named).expect("it stands there") + named.len() + 4;
        let width = match (value, bytes[at - 4]) {
            (Value::Int(_), 7) => 1,
            (Value::Int(_) | Value::Float(_), _) => 4,
            _ => continue,
        };
        found.push((key.clone(), at, width));
    }
    found
}

/// Bytes that stand somewhere instead of others.
type Change = (usize, Vec<u8>);

#[test]
fn no_lie_ends_the_process() {
    let good = std::fs::read(file()).expect("there");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, &good).expect("written");
    let mut state = 5u64;
    let mut dice = |sides: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % sides
    };
    let mut lies: Vec<(String, Vec<Change>)> = Vec::new();
    for (key, at, width) in numbers(&good[..1 << 21]) {
        for lie in [0u32, 1, 7, 1000, 0x7fc0_0000, u32::MAX] {
            lies.push((format!("{key} = {lie}"), vec![(at, lie.to_le_bytes()[..width].to_vec())]));
        }
    }
    // A word twice, a vocabulary of another kind, a list of halves.
    let at = |what: &[u8]| good.windows(what.len()).position(|w| w == what).expect("it stands there");
    let word = at(b"<|im_end|>");
    lies.push(("a word twice".into(), vec![(word, b"<|im_end|}".to_vec())]));
    lies.push(("another word twice".into(), vec![(word - 8 - 12, good[word - 8..word + 4].to_vec())]));
    lies.push(("no vocabulary".into(), vec![(at(b"gpt2"), b"none".to_vec())]));
    let norm = at(b"blk.0.attn_norm.weight") + 22 + 4 + 8;
    for kind in [1u32, 8, 24, 26, 30, 40] {
        lies.push((format!("a norm of type {kind}"), vec![(norm, kind.to_le_bytes().to_vec())]));
    }
    let thorough = std::env::var_os("HALO_TEST_THOROUGH").is_some();
    let rounds = if thorough { 400 } else { 60 };
    let tensors = 1_769_507;
    for n in 0..rounds {
        let region = [24..1100, 1100..763_530, 763_530..960_183, tensors..tensors + 20_000][n % 4].clone();
        let flips =
            (0..=dice(3)).map(|_| (region.start + dice(region.len()), vec![dice(256) as u8])).collect();
        lies.push((format!("bytes {region:?}, {n}"), flips));
    }
    if !thorough {
        lies = lies.into_iter().enumerate().filter(|(n, _)| n % 2 == 0).map(|(_, lie)| lie).collect();
    }
    let write = |at: usize, bytes: &[u8]| -> std::io::Result<()> {
        let mut file: File = OpenOptions::new().write(true).open(&path)?;
        file.seek(SeekFrom::Start(at as u64))?;
        file.write_all(bytes)
    };
    let mut ended = Vec::new();
    for (name, flips) in &lies {
        flips.iter().for_each(|(at, bytes)| write(*at, bytes).expect("written"));
        let mut child = Command::new(std::env::current_exe().expect("this test"));
        let output =
            child.args(["--exact", "load_what_is_named"]).env(VARIABLE, &path).output().expect("it starts");
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let why = said
                .lines()
                .rev()
                .find(|l| l.contains("ASSERT") || l.contains("rror") || l.contains("panicked"));
            ended.push(format!("{name}: {:?} {}", output.status, why.unwrap_or("")));
        }
        flips.iter().for_each(|(at, bytes)| write(*at, &good[*at..*at + bytes.len()]).expect("written"));
    }
    assert!(ended.is_empty(), "{} of {} ended the process:\n{}", ended.len(), lies.len(), ended.join("\n"));
}
