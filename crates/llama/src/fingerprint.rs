//! The fingerprint of a model file.

use crate::ENGINE_VERSION;
use crate::ffi::{AttentionSource, KvKeyType, ModelWeights};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// Identifies the model and the format of its KV cells: saved cells are restored only for the same fingerprint. It is a
/// hash over samples of the file, because hashing gigabytes would take minutes.
pub(crate) fn model_fingerprint(
    path: &Path,
    weights: &ModelWeights,
    key_type: KvKeyType,
    attention: AttentionSource,
) -> std::io::Result<u128> {
    fingerprint_file(path, weights.header.file_bytes, key_type, attention)
}

/// The fingerprint of a file that need not be loaded.
pub(crate) fn fingerprint_file(
    path: &Path,
    size: u64,
    key_type: KvKeyType,
    attention: AttentionSource,
) -> std::io::Result<u128> {
    const SAMPLES: u64 = 64;
    const SAMPLE_BYTES: u64 = 1 << 16;
    let mut file = std::fs::File::open(path)?;
    let mut hash = Xxh3::new();
    hash.update(&size.to_le_bytes());
    // The state format depends on the version of llama.cpp and on how the context is created.
    let flash_attention = match attention {
        AttentionSource::Softmax => "no flash attention",
        // Values are laid out in another way.
        AttentionSource::Queries | AttentionSource::Nowhere => "flash attention",
    };
    hash.update(format!("{ENGINE_VERSION}, {key_type}, {flash_attention}").as_bytes());
    for n in 0..SAMPLES {
        file.seek(SeekFrom::Start(size.saturating_sub(SAMPLE_BYTES) / SAMPLES * n))?;
        let mut bytes = Vec::new();
        (&mut file).take(SAMPLE_BYTES).read_to_end(&mut bytes)?;
        hash.update(&bytes);
    }
    Ok(hash.digest128())
}
