//! Embedding speed, and accuracy against reference vectors.
//!
//! The reference vectors beside this file: for `e5-small` made by onnxruntime 1.31 from the weights of the same file,
//! without quantization of activations; for `minilm` from the unquantized weights, in 64-bit floats. They show
//! whether this program computes the model correctly, and what quantization costs. Each text was embedded alone, and none is
//! longer than the references read (256 tokens).

use crate::synthetic_text;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use halo_core::Error;
use halo_core::embedder::Embedder;
use serde_json::Value;
use std::time::{Duration, Instant};

/// Texts and vectors, by the name of the model's folder.
const REFERENCES: [(&str, &str); 2] =
    [("e5-small", include_str!("embed/e5-small.json")), ("minilm", include_str!("embed/minilm.json"))];

#[derive(Clone, Debug)]
pub struct EmbedBenchReport {
    pub name: String,
    /// Milliseconds from loading to the first vector.
    pub load_ms: f64,
    /// The lowest cosine similarity to a reference; none if there are no references for this model.
    pub min_cosine: Option<f64>,
    pub references: usize,
    /// Milliseconds to embed one chunk of so many words.
    pub ms_per_chunk: Vec<(usize, f64)>,
}

/// Measures an embedder that has not been used yet.
pub fn measure(embedder: &mut dyn Embedder, least: Duration) -> Result<EmbedBenchReport, Error> {
    let begin = Instant::now();
    let info = embedder.info()?;
    embedder.embed(&["The gun on the wall"])?;
    let load_ms = begin.elapsed().as_secs_f64() * 1e3;
    let called = info.name.rsplit_once('-').map_or(info.name.as_str(), |(called, _)| called);
    let references =
        REFERENCES.iter().find(|(name, _)| *name == called).map(|(_, json)| parse_references(json));
    let mut min_cosine = None;
    for (text, reference) in references.iter().flatten() {
        let vectors = embedder.embed(&[text])?;
        let cosine = vectors.first().map_or(0.0, |vector| cosine_similarity(vector, reference));
        min_cosine = Some(min_cosine.map_or(cosine, |least: f64| least.min(cosine)));
    }
    let mut ms = Vec::new();
    for words in [48, 200] {
        let chunks = synthetic_text::passages(words, 64);
        let (begin, mut times) = (Instant::now(), Vec::new());
        for chunk in chunks.iter().cycle() {
            let one = Instant::now();
            embedder.embed(&[&format!("{}{chunk}", info.passage_prefix)])?;
            times.push(one.elapsed().as_secs_f64() * 1e3);
            if times.len() >= 15 && begin.elapsed() > least {
                break;
            }
        }
        ms.push((words, times.iter().sum::<f64>() / times.len() as f64));
    }
    Ok(EmbedBenchReport {
        name: info.name,
        load_ms,
        min_cosine,
        references: references.map_or(0, |r| r.len()),
        ms_per_chunk: ms,
    })
}

fn parse_references(json: &str) -> Vec<(String, Vec<f64>)> {
    let rows: Vec<Value> = serde_json::from_str(json).expect("it ships with the program");
    let read = |row: &Value| {
        let bytes = BASE64_STANDARD
            .decode(row["vector"].as_str().unwrap_or_default())
            .expect("it ships with the program");
        let (pairs, _) = bytes.as_chunks::<2>();
        let numbers = pairs.iter().map(|&pair| f16_to_f64(u16::from_le_bytes(pair))).collect();
        (row["text"].as_str().unwrap_or_default().to_owned(), numbers)
    };
    rows.iter().map(read).collect()
}

fn f16_to_f64(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let size = match exponent {
        0 => fraction * 2f64.powi(-24),
        _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
    };
    if bits >> 15 == 1 { -size } else { size }
}

fn cosine_similarity(vector: &[f32], reference: &[f64]) -> f64 {
    if vector.len() != reference.len() {
        return 0.0;
    }
    let dot: f64 = vector.iter().zip(reference).map(|(&a, b)| f64::from(a) * b).sum();
    let length = |sum: f64| sum.sqrt();
    let own = length(vector.iter().map(|&a| f64::from(a) * f64::from(a)).sum());
    dot / (own * length(reference.iter().map(|b| b * b).sum()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_recall::embed::EmbedderHandle;
    use std::path::{Path, PathBuf};

    #[test]
    fn embed_vectors_match_references() {
        let fetched = std::env::var_os("HALO_TEST_EMBEDDER").map(PathBuf::from);
        let fetched = fetched
            .unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/models/e5-small"));
        let mut embedder = EmbedderHandle::new(fetched, 2).expect("a thread");
        let report = measure(&mut embedder, Duration::ZERO).expect("it runs: `scripts/models` fetches it");
        assert!(report.references == 23 && report.min_cosine >= Some(0.998), "{report:?}");
    }

    #[test]
    fn embed_references_f16_values_are_decoded() {
        for (bits, value) in
            [(0x3c00, 1.0), (0xc000, -2.0), (0x3555, 0.333_251_953_125), (1, 2f64.powi(-24)), (0, 0.0)]
        {
            assert_eq!(f16_to_f64(bits), value);
        }
    }

    #[test]
    fn embed_references_are_unit_vectors() {
        for (name, json) in REFERENCES {
            let all = parse_references(json);
            assert_eq!(all.len(), 23, "{name}");
            for (text, vector) in all {
                let length: f64 = vector.iter().map(|x| x * x).sum();
                assert!(vector.len() == 384 && (length - 1.0).abs() < 1e-3, "{name}: {text}: {length}");
            }
        }
    }
}
