//! The usage, the timings and the fingerprint of a response.

use crate::app::App;
use crate::generation_usage::GenerationUsage;
use serde_json::{Value, json};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// The object `usage` of OpenAI, with the cached tokens.
pub(super) fn usage(usage: &GenerationUsage) -> Value {
    let (prompt, completion) = (usage.prompt_tokens, usage.completion_tokens);
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": { "cached_tokens": usage.cached_tokens },
    })
}

/// The `timings` of llama-server. Clients show speeds from it.
pub(crate) fn timings(usage: &GenerationUsage) -> Value {
    let processed = usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens);
    let (prompt_ms, predicted_ms) = (millis(usage.prefill_time), millis(usage.generate_time));
    json!({
        "cache_n": usage.cached_tokens,
        "prompt_n": processed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": ratio(prompt_ms, processed as f64),
        "prompt_per_second": ratio(processed as f64 * 1000.0, prompt_ms),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": ratio(predicted_ms, usage.completion_tokens as f64),
        "predicted_per_second": ratio(usage.completion_tokens as f64 * 1000.0, predicted_ms),
    })
}

fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// 0 instead of a division by zero, which JSON has no number for.
fn ratio(value: f64, by: f64) -> f64 {
    if by > 0.0 { value / by } else { 0.0 }
}

/// Changes with the model and with the version of Halo: the same seed may give another text then.
pub(super) fn system_fingerprint(app: &App) -> String {
    let model = app.backend.model_info().name;
    let identity = format!("{model}\0{}", env!("CARGO_PKG_VERSION"));
    format!("fp_{:012x}", xxh3_64(identity.as_bytes()) >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timings_have_speeds_and_no_division_by_zero() {
        let measured = GenerationUsage {
            prompt_tokens: 30,
            cached_tokens: 10,
            completion_tokens: 4,
            prefill_time: Duration::from_millis(200),
            generate_time: Duration::from_millis(100),
        };
        let json = timings(&measured);
        assert_eq!((&json["cache_n"], &json["prompt_n"]), (&json!(10), &json!(20)));
        assert_eq!((&json["prompt_per_second"], &json["prompt_per_token_ms"]), (&json!(100.0), &json!(10.0)));
        assert_eq!(
            (&json["predicted_per_second"], &json["predicted_per_token_ms"]),
            (&json!(40.0), &json!(25.0))
        );
        let nothing = timings(&GenerationUsage::default());
        assert_eq!(
            (&nothing["prompt_per_second"], &nothing["predicted_per_token_ms"]),
            (&json!(0.0), &json!(0.0))
        );
    }
}
