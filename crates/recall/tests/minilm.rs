//! The real models, which `scripts/models` fetches: all-MiniLM-L6-v2, and where it counts e5-small.
//!
//! `minilm.json` has texts that are hard to cut, with the tokens that the Python library `tokenizers` 0.23.3 makes of
//! them (truncation 256, no padding), and for some the vector: the weights of the file, a BERT in numpy, 64-bit floats.

use halo_core::seams::{Embedder, Flow};
use halo_recall::embed::{Embeddings, Encoder, MAX_TOKENS};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    fetched("HALO_TEST_MINILM", "minilm")
}

/// Where a model lies: where the variable says, else where `scripts/models` brings it.
fn fetched(variable: &str, name: &str) -> PathBuf {
    let named = std::env::var_os(variable).map(PathBuf::from);
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/models").join(name);
    let path = named.unwrap_or(fetched);
    assert!(path.join("model.onnx").exists(), "{} is missing: `scripts/models` fetches it", path.display());
    path.canonicalize().expect("it is there")
}

fn open(threads: u32) -> Encoder {
    Encoder::open(&folder(), threads).expect("it loads")
}

struct Golden {
    text: String,
    tokens: Vec<i32>,
    vector: Option<Vec<f32>>,
}

fn golden() -> Vec<Golden> {
    let rows: Vec<Value> = serde_json::from_str(include_str!("minilm.json")).expect("sound");
    let read = |row: &Value| Golden {
        text: row["text"].as_str().expect("a text").to_owned(),
        tokens: serde_json::from_value(row["tokens"].clone()).expect("numbers"),
        vector: serde_json::from_value(row["vector"].clone()).expect("numbers or none"),
    };
    rows.iter().map(read).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}

#[test]
fn tokens_are_those_of_the_library() {
    let encoder = open(1);
    for Golden { text, tokens, .. } in golden() {
        assert_eq!(encoder.tokenize(&text), tokens, "{text:?}");
    }
}

#[test]
fn vectors_are_those_of_the_weights() {
    let mut encoder = open(1);
    let info = Embedder::info(&mut encoder).expect("loaded");
    assert_eq!((info.dimensions, info.max_tokens), (384, MAX_TOKENS));
    let mut compared = 0;
    for Golden { text, vector, .. } in golden() {
        let Some(vector) = vector else { continue };
        let ours = encoder.embed(&[&text]).expect("it runs").remove(0);
        assert!((dot(&ours, &ours) - 1.0).abs() < 1e-6, "{text:?}");
        let alike = dot(&ours, &vector) / dot(&vector, &vector).sqrt();
        assert!(alike > 0.999_999, "{alike} {text:?}");
        compared += 1;
    }
    assert_eq!(compared, 6);
}

#[test]
fn a_text_gives_the_same_bits_in_any_company() {
    // The second one is quantised by what is read, and would give others.
    for folder in [folder(), fetched("HALO_TEST_EMBEDDER", "e5-small")] {
        let texts: Vec<String> = golden().into_iter().map(|golden| golden.text).collect();
        let all: Vec<&str> = texts.iter().chain(&texts[..20]).map(String::as_str).collect();
        let [mut one, mut two] = [1, 2].map(|threads| Encoder::open(&folder, threads).expect("it loads"));
        let together = one.embed(&all).expect("it runs");
        assert_eq!(together, two.embed(&all).expect("it runs"), "on two threads");
        for (n, text) in all.iter().enumerate() {
            assert_eq!(one.embed(&[text]).expect("it runs"), [together[n].clone()], "{text:?} alone");
        }
        let mut handle = Embeddings::new(folder, 1).expect("a thread");
        let mut told = 0;
        let mut listen = |number: usize, vector: Vec<f32>| {
            assert_eq!(vector, together[number], "{:?} behind", texts[number]);
            told += 1;
            Flow::Continue
        };
        handle.embed_behind(texts.clone(), &mut listen).expect("it runs");
        assert_eq!(told, texts.len());
    }
}

#[test]
fn what_means_the_same_is_near() {
    let mut embedder = open(1);
    let question = "Is there a weapon in the house?";
    let vectors = embedder.embed(&[
        question,
        "A gun hangs on the wall above the fireplace.",
        "It rained from morning on, and the guests came late.",
    ]);
    let vectors = vectors.expect("it runs");
    assert!(dot(&vectors[0], &vectors[1]) > dot(&vectors[0], &vectors[2]) + 0.1);
}

#[test]
fn folders_are_told_apart_and_what_is_wrong_is_said() {
    let home = tempfile::tempdir().expect("made");
    let place = home.path().join("mine");
    let mut handle = Embeddings::new(place.clone(), 1).expect("a thread");
    let mut told = || handle.embed(&["halo"]).map_err(|error| error.to_string());
    for _ in 0..2 {
        let missing = told().expect_err("nothing is there");
        assert!(missing.starts_with("loading the embedder: "), "{missing}");
        assert!(missing.contains("model.onnx") && missing.contains("`halo models pull`"), "{missing}");
    }
    fs::create_dir(&place).expect("made");
    for file in ["model.onnx", "tokenizer.json", "config.json"] {
        fs::copy(folder().join(file), place.join(file)).expect("copied");
    }
    let vector = told().expect("now it is there");
    let name = |place: &Path| {
        let mut encoder = Encoder::open(place, 1).expect("it loads");
        Embedder::info(&mut encoder).expect("loaded").name
    };
    let (mine, theirs) = (name(&place), name(&folder()));
    assert_eq!(mine.strip_prefix("mine-"), theirs.strip_prefix("minilm-"), "the same files");

    fs::create_dir(place.join("1_Pooling")).expect("made");
    fs::write(place.join("1_Pooling/config.json"), r#"{"pooling_mode_cls_token": true}"#).expect("written");
    assert_ne!(name(&place), mine, "other vectors, another name");
    fs::write(place.join("config_sentence_transformers.json"), r#"{"prompts": {"passage": "p: "}}"#)
        .expect("written");
    let told_apart = Encoder::open(&place, 1).expect("it loads").info().expect("loaded");
    assert!(told_apart.passage == "p: " && told_apart.query.is_empty() && told_apart.name != mine);
    fs::remove_file(place.join("config_sentence_transformers.json")).expect("removed");
    assert_eq!(told().expect("it is loaded"), vector, "until it is opened anew");
    let first = Encoder::open(&place, 1).expect("it loads").embed(&["halo"]).expect("it runs");
    assert!(dot(&first[0], &vector[0]) < 0.999);

    let whole = fs::read(place.join("model.onnx")).expect("read");
    let error = || Encoder::open(&place, 1).err().map(|error| error.to_string()).unwrap_or_default();
    for damaged in [&whole[..whole.len() / 2], &b""[..], b"no model", &[0xff; 4096]] {
        fs::write(place.join("model.onnx"), damaged).expect("written");
        assert!(error().contains("model.onnx cannot be used: "), "{}", error());
        assert!(error().contains("`halo models pull mine --force`"), "{}", error());
    }
    fs::write(place.join("tokenizer.json"), "{}").expect("written");
    assert!(error().contains("tokenizer.json cannot be used: its normalizer is none"), "{}", error());
    fs::write(place.join("config.json"), "x").expect("written");
    assert!(error().contains("config.json cannot be used: "), "{}", error());
}
