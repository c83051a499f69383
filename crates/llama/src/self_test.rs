//! A test of KV cell editing on the loaded model.
//!
//! llama.cpp has more than a hundred architectures, and new ones come with every version. Whether cells can be removed and
//! restored without a trace is not guessed from their names: a few cells are removed and restored, and the next logits
//! compared. It takes one prefill of 64 tokens, once per model: the result is stored in a file that is named by the
//! fingerprint of the model, which also changes with the version of llama.cpp.

use crate::attention::TapConfig;
use crate::ffi::{
    AttentionSource, BatchToken, KvKeyType, LlamaContext, LlamaError, LlamaPos, LlamaToken, SeqId,
};
use crate::fingerprint::fingerprint_file;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const MAIN_SEQ: SeqId = SeqId(0);
const SCRATCH_SEQ: SeqId = SeqId(1);
const FORK_SEQ: SeqId = SeqId(2);

/// Why cells are not edited, if the test fails.
pub const SELF_TEST_FAILED: &str =
    "a test at load failed: after KV cells are removed and restored, the model computes other logits";

/// Why cells are not edited, if the model could not compute the test.
pub const SELF_TEST_ERROR: &str = "a test at load could not be computed: llama.cpp returned an error";

/// The most tokens of the test.
const TEST_TOKENS: usize = 64;

/// The results of this process, by model fingerprint.
static RESULTS: Mutex<BTreeMap<u128, bool>> = Mutex::new(BTreeMap::new());

const PASSED: &[u8] = b"1 passed\n";
const FAILED: &[u8] = b"1 failed\n";

/// The reason why KV cells of this model cannot be edited, if the test finds one. A result is read from the folder or stored in
/// it. The context must be empty, and is empty afterwards.
pub(crate) fn find_kv_edit_failure(
    context: &mut LlamaContext,
    folder: Option<&Path>,
    model_fingerprint: u128,
) -> Option<&'static str> {
    let stored = folder.and_then(|folder| read_result(folder, model_fingerprint));
    let known = stored.or_else(|| RESULTS.lock().get(&model_fingerprint).copied());
    let passed = match known {
        Some(passed) => passed,
        None => {
            let tested = test_kv_edits(context, SelfTestRestore::Exact);
            for seq in [MAIN_SEQ, SCRATCH_SEQ, FORK_SEQ] {
                let _ = context.seq_rm(seq, -1, -1);
            }
            match tested {
                Ok(passed) => passed,
                // Not stored: memory may have been short.
                Err(error) => {
                    tracing::warn!("the test of KV cell editing failed: {error}");
                    return Some(SELF_TEST_ERROR);
                }
            }
        }
    };
    if stored.is_none() {
        if let Some(folder) = folder {
            write_result(folder, model_fingerprint, passed);
        }
        RESULTS.lock().insert(model_fingerprint, passed);
    }
    (!passed).then_some(SELF_TEST_FAILED)
}

/// The stored result of a model file; none if it has not been loaded with keys of this type.
#[must_use]
pub fn stored_result(
    folder: &Path,
    model: &Path,
    key_type: KvKeyType,
    attention: AttentionSource,
) -> Option<bool> {
    let file_bytes = fs::metadata(model).ok()?.len();
    read_result(folder, fingerprint_file(model, file_bytes, key_type, attention).ok()?)
}

/// What the test restores. Only the tests of this module restore anything else than what was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelfTestRestore {
    Exact,
    /// The cells are not put back.
    Nothing,
    /// The cells that were saved, with one bit of a key or a value flipped.
    FlippedBit,
    /// The cells of other tokens, at the same positions.
    OtherTokens,
}

/// Runs the test and restores what `restore` says, to show that the test finds damage. The context must be empty.
///
/// # Errors
/// When the model cannot compute.
pub fn test_with_damage(context: &mut LlamaContext, restore: SelfTestRestore) -> Result<bool, LlamaError> {
    let tested = test_kv_edits(context, restore);
    for seq in [MAIN_SEQ, SCRATCH_SEQ, FORK_SEQ] {
        let _ = context.seq_rm(seq, -1, -1);
    }
    tested
}

/// Whether the model passed. None if it was not tested, or the file is damaged.
fn read_result(folder: &Path, model_fingerprint: u128) -> Option<bool> {
    match fs::read(folder.join(format!("{model_fingerprint:032x}"))).ok()?.as_slice() {
        PASSED => Some(true),
        FAILED => Some(false),
        _ => None,
    }
}

/// Stores a result. If that fails, the next start tests again.
fn write_result(folder: &Path, model_fingerprint: u128, passed: bool) {
    let path = folder.join(format!("{model_fingerprint:032x}"));
    let result = if passed { PASSED } else { FAILED };
    if let Err(error) = fs::create_dir_all(folder).and_then(|()| fs::write(&path, result)) {
        tracing::debug!("the result of the self-test is not stored in {}: {error}", path.display());
    }
}

/// Whether logits are the same after cells in the middle were removed and restored.
fn test_kv_edits(context: &mut LlamaContext, restore: SelfTestRestore) -> Result<bool, LlamaError> {
    let params = context.params();
    let len = TEST_TOKENS.min(params.tokens as usize - 8);
    let vocab_size = context.weights().vocab_size();
    let token = |n: usize| ((n * 7919 + 13) % vocab_size) as LlamaToken;
    let items: Vec<BatchToken> =
        (0..len).map(|n| BatchToken { token: token(n), position: n as LlamaPos, logits: false }).collect();
    context.tap().configure(TapConfig::off());
    for batch in items.chunks(params.batch as usize) {
        context.decode(MAIN_SEQ, batch)?;
    }
    let next = BatchToken { token: token(len), position: len as LlamaPos, logits: true };
    let expected = fork_logits(context, next)?;
    // Some GPU kernels do not add in the same order each time.
    let noise = max_difference(&expected, &fork_logits(context, next)?);

    let (start, end) = (len as LlamaPos / 4, len as LlamaPos / 2);
    context.seq_cp(MAIN_SEQ, SCRATCH_SEQ, start, end);
    let mut cells = context.save_state(SCRATCH_SEQ);
    match restore {
        SelfTestRestore::FlippedBit => {
            // In the middle of the state are values, not the header.
            let middle = (cells.len() / 2) | 1;
            if let Some(byte) = cells.get_mut(middle) {
                *byte ^= 0x40;
            }
        }
        SelfTestRestore::OtherTokens => {
            // From position 0: recurrent layers cannot begin in the middle.
            let other = |n: LlamaPos| BatchToken { token: token(n as usize + 1), position: n, logits: false };
            let others: Vec<BatchToken> = (0..end).map(other).collect();
            for batch in others.chunks(params.batch as usize) {
                context.decode(FORK_SEQ, batch)?;
            }
            let _ = context.seq_rm(SCRATCH_SEQ, -1, -1);
            context.seq_cp(FORK_SEQ, SCRATCH_SEQ, start, end);
            let _ = context.seq_rm(FORK_SEQ, -1, -1);
            cells = context.save_state(SCRATCH_SEQ);
        }
        SelfTestRestore::Exact | SelfTestRestore::Nothing => {}
    }
    let removed = context.seq_rm(SCRATCH_SEQ, -1, -1) && context.seq_rm(MAIN_SEQ, start, end);
    if !removed || cells.is_empty() {
        return Ok(false);
    }
    let without = fork_logits(context, next)?;
    if context.restore_state(SCRATCH_SEQ, &cells).is_err() {
        return Ok(false);
    }
    if restore != SelfTestRestore::Nothing {
        context.seq_cp(SCRATCH_SEQ, MAIN_SEQ, -1, -1);
    }
    let _ = context.seq_rm(SCRATCH_SEQ, -1, -1);
    let restored = fork_logits(context, next)?;
    let has_effect = max_difference(&expected, &without) > noise;
    Ok(has_effect && max_difference(&expected, &restored) <= 4.0 * noise)
}

/// The logits after a token that is decoded in a fork of the main sequence.
fn fork_logits(context: &mut LlamaContext, next: BatchToken) -> Result<Vec<f32>, LlamaError> {
    context.seq_cp(MAIN_SEQ, FORK_SEQ, -1, -1);
    context.copy_recurrent(MAIN_SEQ, FORK_SEQ);
    context.decode(FORK_SEQ, &[next])?;
    let logits = context.logits().to_vec();
    let _ = context.seq_rm(FORK_SEQ, -1, -1);
    Ok(logits)
}

/// Infinite if one of them is not a number.
fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    let difference = |(a, b): (&f32, &f32)| {
        let difference = (a - b).abs();
        if difference.is_nan() { f32::INFINITY } else { difference }
    };
    a.iter().zip(b).map(difference).fold(0.0, f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn self_test_result_is_stored_per_model_and_damage_is_no_result() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().join("self-tests");
        assert_eq!(read_result(&folder, 7), None);
        write_result(&folder, 7, true);
        write_result(&folder, 8, false);
        assert_eq!([7, 8, 9].map(|model| read_result(&folder, model)), [Some(true), Some(false), None]);
        fs::write(folder.join(format!("{:032x}", 7)), b"1 pass").expect("written");
        assert_eq!(read_result(&folder, 7), None);
    }
}
