//! Which source of attention is the fastest for a model on this machine, measured once.
//!
//! On a CPU the softmax costs nothing, so nothing is measured. On a GPU it needs flash attention off and a copy per head, and the
//! queries are several times faster where the backend computes everything that they need; that is measured, in a small context
//! for each source, at the first load. The result is stored beside those of the self-tests.

use crate::attention::{TapConfig, TapRows};
use crate::ffi::{
    AttentionSource, BatchToken, ContextParams, KvKeyType, LlamaContext, LlamaError, LlamaPos, LlamaToken,
    ModelWeights, SeqId,
};
use crate::fingerprint::fingerprint_file;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Tokens in the context while it is measured.
const PROMPT_TOKENS: usize = 128;
/// Tokens before the timed ones: graphs are built and captured in them.
const WARM_TOKENS: usize = 8;
const TIMED_TOKENS: usize = 16;

/// Milliseconds per generated token with an attention row for each; none where the source does not work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SourceSpeeds {
    /// Layers on the GPU.
    pub gpu_layers: u32,
    pub softmax_ms: Option<f64>,
    pub queries_ms: Option<f64>,
}

impl SourceSpeeds {
    #[must_use]
    pub fn fastest(self) -> AttentionSource {
        match (self.softmax_ms, self.queries_ms) {
            (Some(softmax), Some(queries)) if softmax < queries => AttentionSource::Softmax,
            (Some(_), None) => AttentionSource::Softmax,
            _ => AttentionSource::Queries,
        }
    }

    fn to_line(self) -> String {
        let ms = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.3}"));
        let Self { gpu_layers, softmax_ms, queries_ms } = self;
        format!("1 layers {gpu_layers} softmax {} queries {}\n", ms(softmax_ms), ms(queries_ms))
    }

    fn from_line(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ms = |word: &str| match word {
            "-" => Some(None),
            number => number.parse().ok().filter(|ms: &f64| ms.is_finite() && *ms > 0.0).map(Some),
        };
        match words.as_slice() {
            ["1", "layers", layers, "softmax", softmax, "queries", queries] => Some(Self {
                gpu_layers: layers.parse().ok()?,
                softmax_ms: ms(softmax)?,
                queries_ms: ms(queries)?,
            }),
            _ => None,
        }
    }
}

/// The stored speeds of a model file; none if it has not been loaded onto a GPU with keys of this type.
#[must_use]
pub fn stored_speeds(folder: &Path, model: &Path, key_type: KvKeyType) -> Option<SourceSpeeds> {
    let text = fs::read_to_string(result_path(folder, model, key_type)?).ok()?;
    SourceSpeeds::from_line(&text)
}

fn result_path(folder: &Path, model: &Path, key_type: KvKeyType) -> Option<PathBuf> {
    let file_bytes = fs::metadata(model).ok()?.len();
    let fingerprint = fingerprint_file(model, file_bytes, key_type, AttentionSource::Softmax).ok()?;
    Some(folder.join(format!("attention-{fingerprint:032x}")))
}

/// The fastest source for weights of which so many layers are on the GPU: the stored one, or the one that is measured now.
pub(crate) fn fastest_source_of(
    weights: &Arc<ModelWeights>,
    model: &Path,
    folder: Option<&Path>,
    (threads, key_type, gpu_layers): (i32, KvKeyType, u32),
) -> AttentionSource {
    if gpu_layers == 0 {
        return AttentionSource::Softmax;
    }
    let stored = folder.and_then(|folder| stored_speeds(folder, model, key_type));
    if let Some(stored) = stored.filter(|stored| stored.gpu_layers == gpu_layers) {
        return stored.fastest();
    }
    let time = |source| {
        let measured = ms_per_token(weights, source, threads, key_type);
        measured
            .inspect_err(|error| tracing::debug!("attention from {source} was not measured: {error}"))
            .ok()?
    };
    let (softmax_ms, queries_ms) = (time(AttentionSource::Softmax), time(AttentionSource::Queries));
    let speeds = SourceSpeeds { gpu_layers, softmax_ms, queries_ms };
    if softmax_ms.is_none() && queries_ms.is_none() {
        return speeds.fastest();
    }
    if let Some(folder) = folder
        && let Some(path) = result_path(folder, model, key_type)
        && let Err(error) = fs::create_dir_all(folder).and_then(|()| fs::write(&path, speeds.to_line()))
    {
        tracing::debug!("the speed of attention is not stored in {}: {error}", path.display());
    }
    speeds.fastest()
}

/// None where rows cannot be read from this source.
fn ms_per_token(
    weights: &Arc<ModelWeights>,
    source: AttentionSource,
    threads: i32,
    key_type: KvKeyType,
) -> Result<Option<f64>, LlamaError> {
    let tokens = (PROMPT_TOKENS + WARM_TOKENS + TIMED_TOKENS) as u32;
    let params = ContextParams {
        tokens: tokens.next_multiple_of(256),
        batch: PROMPT_TOKENS as u32,
        threads,
        sequences: 3,
        key_type,
        attention: source,
    };
    let mut context = LlamaContext::new(weights, params)?;
    if context.params().attention != source {
        return Ok(None);
    }
    let vocab_size = weights.vocab_size();
    let item = |n: usize| BatchToken {
        token: ((n * 7919 + 13) % vocab_size) as LlamaToken,
        position: n as LlamaPos,
        logits: n >= PROMPT_TOKENS,
    };
    context.tap().configure(TapConfig::off());
    context.decode(SeqId(0), &(0..PROMPT_TOKENS).map(item).collect::<Vec<_>>())?;
    let mut started = Instant::now();
    for n in 0..WARM_TOKENS + TIMED_TOKENS {
        if n == WARM_TOKENS {
            started = Instant::now();
        }
        context.tap().configure(TapConfig { rows: TapRows::Last, cells: true, ..TapConfig::off() });
        context.decode(SeqId(0), &[item(PROMPT_TOKENS + n)])?;
        std::hint::black_box(context.logits().first());
        if context.tap().take_rows(0).is_empty() {
            return Ok(None);
        }
    }
    Ok(Some(started.elapsed().as_secs_f64() * 1e3 / TIMED_TOKENS as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fastest_source_is_the_one_with_less_time_that_works() {
        let fastest =
            |softmax_ms, queries_ms| SourceSpeeds { gpu_layers: 33, softmax_ms, queries_ms }.fastest();
        assert_eq!(fastest(Some(20.0), Some(4.0)), AttentionSource::Queries);
        assert_eq!(fastest(Some(3.0), Some(4.0)), AttentionSource::Softmax);
        assert_eq!(fastest(Some(20.0), None), AttentionSource::Softmax);
        assert_eq!(fastest(None, Some(4.0)), AttentionSource::Queries);
    }

    #[test]
    fn source_speeds_are_stored_and_damage_is_no_result() {
        for speeds in [
            SourceSpeeds { gpu_layers: 33, softmax_ms: Some(21.5), queries_ms: Some(3.25) },
            SourceSpeeds { gpu_layers: 1, softmax_ms: Some(1.0), queries_ms: None },
        ] {
            assert_eq!(SourceSpeeds::from_line(&speeds.to_line()), Some(speeds));
        }
        let damaged_lines = [
            "",
            "1 layers 2 softmax 2 queries",
            "2 layers 2 softmax 2 queries 3",
            "1 layers x softmax 2 queries 3",
            "1 layers 2 softmax x queries 3",
            "1 layers 2 softmax 2 queries 0",
        ];
        for damaged in damaged_lines {
            assert_eq!(SourceSpeeds::from_line(damaged), None, "{damaged:?}");
        }
    }
}
