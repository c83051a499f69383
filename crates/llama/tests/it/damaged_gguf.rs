//! Damaged GGUF files: wrong values in the header, and random bytes. Each file is loaded in a child process, which must
//! end with an error or a working model, not with an abort inside llama.cpp.

use crate::common::TinyModel;
use halo_llama::ffi::{
    AttentionSource, BatchToken, ContextParams, KvKeyType, LlamaContext, ModelWeights, SeqId,
};
use halo_llama::gguf::{self, GgufValue};
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

const MODEL_PATH_VARIABLE: &str = "HALO_TEST_LOAD";

/// The child process: loads the file and decodes one token.
#[test]
#[ignore = "helper: gguf_damaged_values_never_abort_the_process runs it in a child process"]
fn gguf_load_in_child_process() {
    let path = std::env::var_os(MODEL_PATH_VARIABLE).expect("the parent process sets the path");
    let Ok(weights) = ModelWeights::load(Path::new(&path), 0) else { return };
    let weights = Arc::new(weights);
    let _ = halo_llama::token_text::tokenize_with_text(&weights, "Hi, 谢谢", true);
    let params = ContextParams {
        tokens: 64.min(weights.trained_context()),
        batch: 8,
        threads: 1,
        sequences: 3,
        key_type: KvKeyType::F16,
        attention: AttentionSource::Softmax,
    };
    let Ok(mut context) = LlamaContext::new(&weights, params) else { return };
    let _ = context.decode(SeqId(0), &[BatchToken { token: 1, position: 0, logits: true }]);
}

/// Key, offset and width of each number in the header.
fn header_number_offsets(bytes: &[u8]) -> Vec<(String, usize, usize)> {
    let header = gguf::read_header(&TinyModel::Llama.path()).expect("an intact header");
    let mut offsets = Vec::new();
    for (key, value) in &header.metadata {
        let encoded_key = [&(key.len() as u64).to_le_bytes()[..], key.as_bytes()].concat();
        let at = bytes.windows(encoded_key.len()).position(|w| w == encoded_key).expect("the key is there")
            + encoded_key.len()
            + 4;
        let width = match (value, bytes[at - 4]) {
            (GgufValue::Int(_), 7) => 1,
            (GgufValue::Int(_) | GgufValue::Float(_), _) => 4,
            _ => continue,
        };
        offsets.push((key.clone(), at, width));
    }
    offsets
}

/// An offset and the bytes that replace those there.
type BytePatch = (usize, Vec<u8>);

/// A name for the failure message, and what is changed in the file.
type DamagedFile = (String, Vec<BytePatch>);

/// Damage with a known effect: header values, a duplicate token, no vocabulary, norms of unsupported types.
fn targeted_damage(good: &[u8]) -> Vec<DamagedFile> {
    let mut files: Vec<DamagedFile> = Vec::new();
    for (key, offset, width) in header_number_offsets(&good[..1 << 21]) {
        for value in [0u32, 1, 7, 1000, 0x7fc0_0000, u32::MAX] {
            let patch = (offset, value.to_le_bytes()[..width].to_vec());
            files.push((format!("{key} = {value}"), vec![patch]));
        }
    }
    let find =
        |bytes: &[u8]| good.windows(bytes.len()).position(|w| w == bytes).expect("the file has these bytes");
    let token = find(b"<|im_end|>");
    files.push(("a changed token".into(), vec![(token, b"<|im_end|}".to_vec())]));
    files.push(("a duplicate token".into(), vec![(token - 8 - 12, good[token - 8..token + 4].to_vec())]));
    // llama.cpp reads tokens as C strings.
    let repo = find(b"<repo_name>");
    files.push(("a token that is a duplicate up to a zero".into(), vec![(repo, b"<|im_end|>\0".to_vec())]));
    files.push(("no vocabulary".into(), vec![(find(b"gpt2"), b"none".to_vec())]));
    let norm = find(b"blk.0.attn_norm.weight") + 22 + 4 + 8;
    for tensor_type in [1u32, 8, 24, 26, 30, 40] {
        let patch = (norm, tensor_type.to_le_bytes().to_vec());
        files.push((format!("a norm of type {tensor_type}"), vec![patch]));
    }
    files
}

/// Random bytes in metadata, vocabulary, merges and tensor descriptions.
fn random_damage(rounds: usize) -> Vec<DamagedFile> {
    let mut state = 5u64;
    let mut next_below = |limit: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % limit
    };
    let tensors = 1_769_507;
    let damage = |n: usize| {
        let region = [24..1100, 1100..763_530, 763_530..960_183, tensors..tensors + 20_000][n % 4].clone();
        let patches = (0..=next_below(3))
            .map(|_| (region.start + next_below(region.len()), vec![next_below(256) as u8]))
            .collect();
        (format!("bytes {region:?}, {n}"), patches)
    };
    (0..rounds).map(damage).collect()
}

/// Loads a file in a child process. The error says how the process ended.
fn load_in_child(path: &Path) -> Result<(), String> {
    let mut child = Command::new(std::env::current_exe().expect("the path of this test"));
    let output = child
        .args(["--ignored", "--exact", "damaged_gguf::gguf_load_in_child_process"])
        .env(MODEL_PATH_VARIABLE, path)
        .output()
        .expect("the child process starts");
    let ran = String::from_utf8_lossy(&output.stdout).contains("running 1 test");
    if output.status.success() && ran {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let is_cause =
        |line: &&str| ["ASSERT", "rror", "panicked", "xception"].iter().any(|word| line.contains(word));
    Err(format!("{:?} {}", output.status, stderr.lines().rev().find(is_cause).unwrap_or("")))
}

/// The model with another kind of tokenizer. Another text is shortened or extended, so that all offsets stay.
fn with_tokenizer(good: &[u8], kind: &str) -> Vec<u8> {
    let find = |part: &str| good.windows(part.len()).position(|w| w == part.as_bytes()).expect("these bytes");
    let with_length = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let (filler, model) = (find("8k-lc100k-mix1-ep2"), find("gpt2"));
    let new_filler = "x".repeat(18 + 4 - kind.len());
    let parts = [
        &good[..filler - 8],
        &with_length(&new_filler),
        &good[filler + 18..model - 8],
        &with_length(kind),
        &good[model + 4..],
    ];
    parts.concat()
}

/// The model with some tokens of the type "byte", which their texts are not.
fn with_byte_types(good: &[u8]) -> Vec<u8> {
    let key = b"tokenizer.ggml.token_type";
    let types = good.windows(key.len()).position(|w| w == key).expect("the key") + key.len() + 4 + 4 + 8;
    let mut bytes = good.to_vec();
    for token in [5usize, 40, 300] {
        bytes[types + 4 * token..][..4].copy_from_slice(&6u32.to_le_bytes());
    }
    bytes
}

/// A tokenizer that does not fit the vocabulary is an error, and not an exception of C++ that ends the process.
#[test]
fn gguf_tokenizer_kind_must_fit_vocabulary() {
    let good = std::fs::read(TinyModel::Llama.path()).expect("the model");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let mut aborted = Vec::new();
    for kind in [
        "gpt2",
        "llama",
        "bert",
        "t5",
        "rwkv",
        "test",
        "plamo2",
        "gemma4",
        "hybriddna",
        "whitespace",
        "x",
        "",
    ] {
        std::fs::write(&path, with_tokenizer(&good, kind)).expect("written");
        aborted.extend(load_in_child(&path).err().map(|why| format!("{kind}: {why}")));
        let byte_types = with_byte_types(&with_tokenizer(&good, kind));
        let byte_path = folder.path().join("bytes.gguf");
        std::fs::write(&byte_path, byte_types).expect("written");
        aborted.extend(load_in_child(&byte_path).err().map(|why| format!("{kind} with byte tokens: {why}")));
        let refused = match (kind, gguf::read_header(&path)) {
            ("llama", Err(error)) => {
                error.to_string().contains("'llama', and tokenizer.ggml.scores is missing")
            }
            ("t5" | "test", Err(error)) => error.to_string().contains("such a tokenizer is not supported"),
            ("llama" | "t5" | "test", Ok(_)) => false,
            (_, header) => header.is_ok(),
        };
        assert!(refused, "{kind}: {:?}", gguf::read_header(&path).map(drop));
    }
    assert!(aborted.is_empty(), "{} ended the process:\n{}", aborted.len(), aborted.join("\n"));
}

#[test]
fn gguf_damaged_values_never_abort_the_process() {
    let good = std::fs::read(TinyModel::Llama.path()).expect("the model");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, &good).expect("written");
    let thorough = std::env::var_os("HALO_TEST_THOROUGH").is_some();
    let mut files = targeted_damage(&good);
    files.extend(random_damage(if thorough { 400 } else { 60 }));
    if !thorough {
        files = files.into_iter().step_by(2).collect();
    }
    let write = |offset: usize, bytes: &[u8]| -> std::io::Result<()> {
        let mut file: File = OpenOptions::new().write(true).open(&path)?;
        file.seek(SeekFrom::Start(offset as u64))?;
        file.write_all(bytes)
    };
    let mut aborted = Vec::new();
    for (name, patches) in &files {
        patches.iter().for_each(|(offset, bytes)| write(*offset, bytes).expect("written"));
        aborted.extend(load_in_child(&path).err().map(|why| format!("{name}: {why}")));
        let restore = |(offset, bytes): &BytePatch| write(*offset, &good[*offset..*offset + bytes.len()]);
        patches.iter().for_each(|patch| restore(patch).expect("written"));
    }
    let (n, total) = (aborted.len(), files.len());
    assert!(aborted.is_empty(), "{n} of {total} ended the process:\n{}", aborted.join("\n"));
}
