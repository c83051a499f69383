//! Real sentence encoders, which `scripts/models` downloads: all-MiniLM-L6-v2 and e5-small.
//!
//! `minilm.json` has texts that are hard to tokenize, with the tokens of the Python library `tokenizers` 0.23.3 (truncation
//! at 256 tokens, no padding), and for some the vector of a BERT in numpy with the weights of the file and 64-bit floats.

use halo_core::embedder::Embedder;
use halo_core::model::StepFlow;
use halo_core::{Error, ErrorKind};
use halo_recall::embed::{EmbedderHandle, MAX_TOKENS, OnnxEncoder};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

fn minilm_folder() -> PathBuf {
    model_folder("HALO_TEST_MINILM", "minilm")
}

/// The folder of a model: the environment variable, else where `scripts/models` downloads it.
fn model_folder(variable: &str, name: &str) -> PathBuf {
    let configured = std::env::var_os(variable).map(PathBuf::from);
    let downloaded = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/models").join(name);
    let path = configured.unwrap_or(downloaded);
    assert!(path.join("model.onnx").exists(), "{} is missing: `scripts/models` downloads it", path.display());
    path.canonicalize().expect("the folder exists")
}

fn open_encoder(threads: u32) -> OnnxEncoder {
    OnnxEncoder::open(&minilm_folder(), threads).expect("the model loads")
}

/// The references are truncated to this number of tokens; Halo truncates nothing.
const REFERENCE_TOKENS: usize = 256;

struct MinilmReference {
    text: String,
    tokens: Vec<i32>,
    vector: Option<Vec<f32>>,
}

fn load_references() -> Vec<MinilmReference> {
    let rows: Vec<Value> = serde_json::from_str(include_str!("../minilm.json")).expect("JSON");
    let parse = |row: &Value| MinilmReference {
        text: row["text"].as_str().expect("a text").to_owned(),
        tokens: serde_json::from_value(row["tokens"].clone()).expect("numbers"),
        vector: serde_json::from_value(row["vector"].clone()).expect("numbers or none"),
    };
    rows.iter().map(parse).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}

#[test]
fn minilm_tokens_match_huggingface_tokenizers() {
    let encoder = open_encoder(1);
    for MinilmReference { text, tokens, .. } in load_references() {
        let mut ours = encoder.tokenize(&text);
        if tokens.len() == REFERENCE_TOKENS && ours.len() > REFERENCE_TOKENS {
            ours.truncate(REFERENCE_TOKENS - 1);
            ours.extend(tokens.last());
        }
        assert_eq!(ours, tokens, "{text:?}");
    }
}

#[test]
fn minilm_vectors_match_reference_weights() {
    let mut encoder = open_encoder(1);
    let info = Embedder::info(&mut encoder).expect("loaded");
    assert_eq!((info.dimensions, info.max_tokens), (384, MAX_TOKENS));
    let mut compared = 0;
    for MinilmReference { text, vector, .. } in load_references() {
        let Some(vector) = vector else { continue };
        // The reference vector of a longer text is that of its first tokens.
        if encoder.tokenize(&text).len() > REFERENCE_TOKENS {
            continue;
        }
        let ours = encoder.embed(&[&text]).expect("the encoder runs").remove(0);
        assert!((dot(&ours, &ours) - 1.0).abs() < 1e-6, "{text:?}");
        let similarity = dot(&ours, &vector) / dot(&vector, &vector).sqrt();
        assert!(similarity > 0.999_999, "{similarity} {text:?}");
        compared += 1;
    }
    assert_eq!(compared, 5);
}

#[test]
fn embed_is_bit_identical_alone_and_in_batches() {
    // The second model quantizes activations, so batches would change its vectors.
    for folder in [minilm_folder(), model_folder("HALO_TEST_EMBEDDER", "e5-small")] {
        let texts: Vec<String> =
            load_references().into_iter().map(|reference| reference.text).step_by(4).collect();
        let all: Vec<&str> = texts.iter().chain(&texts[..5]).map(String::as_str).collect();
        let [mut one, mut two] =
            [1, 2].map(|threads| OnnxEncoder::open(&folder, threads).expect("the model loads"));
        let batched = one.embed(&all).expect("the encoder runs");
        assert_eq!(batched, two.embed(&all).expect("the encoder runs"), "on two threads");
        for (n, text) in all.iter().enumerate() {
            assert_eq!(one.embed(&[text]).expect("the encoder runs"), [batched[n].clone()], "{text:?} alone");
        }
        let mut handle = EmbedderHandle::new(folder, 1).expect("the thread starts");
        let mut received = 0;
        let mut listener = |index: usize, vector: Vec<f32>| {
            assert_eq!(vector, batched[index], "{:?} in the background", texts[index]);
            received += 1;
            StepFlow::Continue
        };
        handle.embed_in_background(texts.clone(), &mut listener).expect("the encoder runs");
        assert_eq!(received, texts.len());
    }
}

#[test]
fn minilm_similar_texts_are_near() {
    let mut embedder = open_encoder(1);
    let question = "Is there a weapon in the house?";
    let vectors = embedder.embed(&[
        question,
        "A gun hangs on the wall above the fireplace.",
        "It rained from morning on, and the guests came late.",
    ]);
    let vectors = vectors.expect("the encoder runs");
    assert!(dot(&vectors[0], &vectors[1]) > dot(&vectors[0], &vectors[2]) + 0.1);
}

#[test]
fn encoder_folder_errors_and_names_are_reported() {
    let parent = tempfile::tempdir().expect("the folder is created");
    let folder = parent.path().join("mine");
    let mut handle = EmbedderHandle::new(folder.clone(), 1).expect("the thread starts");
    let mut embed = || handle.embed(&["halo"]);
    for _ in 0..2 {
        let missing = embed().expect_err("the folder does not exist");
        assert_eq!((missing.kind, missing.operation.as_str()), (ErrorKind::NotFound, "loading the embedder"));
        assert!(missing.message.contains("model.onnx") && missing.message.contains("download"), "{missing}");
    }
    fs::create_dir(&folder).expect("the folder is created");
    for file in ["model.onnx", "tokenizer.json", "config.json"] {
        fs::copy(minilm_folder().join(file), folder.join(file)).expect("copied");
    }
    let vector = embed().expect("the files exist now");
    let name = |folder: &Path| {
        let mut encoder = OnnxEncoder::open(folder, 1).expect("the model loads");
        Embedder::info(&mut encoder).expect("loaded").name
    };
    let (copy_name, original_name) = (name(&folder), name(&minilm_folder()));
    assert_eq!(copy_name.strip_prefix("mine-"), original_name.strip_prefix("minilm-"), "the same files");

    fs::create_dir(folder.join("1_Pooling")).expect("the folder is created");
    fs::write(folder.join("1_Pooling/config.json"), r#"{"pooling_mode_cls_token": true}"#).expect("written");
    assert_ne!(name(&folder), copy_name, "another pooling gives another name");
    fs::write(folder.join("config_sentence_transformers.json"), r#"{"prompts": {"passage": "p: "}}"#)
        .expect("written");
    let with_prefix = OnnxEncoder::open(&folder, 1).expect("the model loads").info().expect("loaded");
    assert!(
        with_prefix.passage_prefix == "p: "
            && with_prefix.query_prefix.is_empty()
            && with_prefix.name != copy_name
    );
    fs::remove_file(folder.join("config_sentence_transformers.json")).expect("removed");
    assert_eq!(embed().expect("the encoder is loaded"), vector, "a loaded encoder does not change");
    let with_cls =
        OnnxEncoder::open(&folder, 1).expect("the model loads").embed(&["halo"]).expect("the encoder runs");
    assert!(dot(&with_cls[0], &vector[0]) < 0.999);

    let intact = fs::read(folder.join("model.onnx")).expect("read");
    let error = || OnnxEncoder::open(&folder, 1).err().expect("the model does not load");
    for damaged in [&intact[..intact.len() / 2], &b""[..], b"no model", &[0xff; 4096]] {
        fs::write(folder.join("model.onnx"), damaged).expect("written");
        let Error { kind, message, .. } = error();
        assert_eq!(kind, ErrorKind::Damaged);
        assert!(message.contains("model.onnx cannot be used: "), "{message}");
        assert!(message.contains("download mine again"), "{message}");
    }
    fs::write(folder.join("tokenizer.json"), "{}").expect("written");
    let unsupported = error();
    assert_eq!(unsupported.kind, ErrorKind::InvalidInput);
    assert!(
        unsupported.message.contains("tokenizer.json cannot be used: its normalizer is none"),
        "{unsupported}"
    );
    fs::write(folder.join("config.json"), "x").expect("written");
    assert!(error().message.contains("config.json cannot be used: "), "{}", error());
}

/// An embedder reads 512 tokens at once. A longer text is embedded in pieces: a word at its end changes the vector too.
#[test]
fn embed_reads_every_token_of_a_long_text() {
    assert_eq!(MAX_TOKENS, 512);
    for folder in [minilm_folder(), model_folder("HALO_TEST_EMBEDDER", "e5-small")] {
        let mut encoder = OnnxEncoder::open(&folder, 2).expect("the model loads");
        let words = |count: usize, changed: usize| -> String {
            (0..count).map(|n| if n == changed { "harpoon " } else { "tea " }).collect()
        };
        let mut embed = |count: usize, changed: usize| {
            encoder.embed(&[&words(count, changed)]).expect("the encoder runs").remove(0)
        };
        for (count, changes) in [(400, &[399][..]), (600, &[0, 300, 599])] {
            let plain = embed(count, usize::MAX);
            assert!((dot(&plain, &plain) - 1.0).abs() < 1e-5, "{count} words");
            for &changed in changes {
                assert_ne!(embed(count, changed), plain, "{}: word {changed} of {count}", folder.display());
            }
        }
        let texts = [words(600, usize::MAX), words(5, usize::MAX)];
        let counted = encoder.count_tokens(&[&texts[0], &texts[1]]).expect("counted");
        assert_eq!(counted, [602, 7], "{}", folder.display());
    }
}
