//! The automatic size of the context window (`context.max_tokens = auto`): what the model prefills in half a minute.
//!
//! A window is prefilled as a whole when its KV cells are gone: after an update of the model, a full disk, or a prune
//! where the model's cells cannot be edited. A person waits for that. So the fastest prefill of the conversation so far
//! decides: the largest power of two that takes at most [`MAX_PREFILL_SECONDS`], from [`MIN_TOKENS`] to [`MAX_TOKENS`],
//! within the model's context. The fastest one, because a slower one says that the machine was busy; powers of two,
//! because a window that changed with every measurement would prune and resurrect for no reason. Until a prefill was
//! measured, the window has [`MIN_TOKENS`].

use crate::conversation::Conversation;
use halo_core::Error;
use halo_core::model::ModelInfo;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The smallest automatic window, unless the model's context is smaller.
pub const MIN_TOKENS: usize = 2048;

/// The largest automatic window: a remote model is sent the whole window with every message, and a local one slows down
/// with it.
pub const MAX_TOKENS: usize = 8192;

/// The longest wait for a window that is prefilled as a whole.
pub const MAX_PREFILL_SECONDS: f64 = 30.0;

/// A prefill of fewer tokens says little about the speed.
const MIN_MEASURED_TOKENS: usize = 32;

/// The key of the measured speed among the settings of a conversation.
const SPEED_KEY: &str = "prefill_speed";

/// The fastest prefill of a model in a conversation, as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillSpeed {
    pub model: String,
    pub tokens_per_second: f64,
}

/// The size of the window for a model with this context and speed.
#[must_use]
pub fn automatic_window(model_context: usize, tokens_per_second: Option<f64>) -> usize {
    let most = model_context.min(MAX_TOKENS);
    let in_time = tokens_per_second.map_or(0, |speed| (speed * MAX_PREFILL_SECONDS) as usize);
    if in_time >= most {
        return most;
    }
    let power_of_two = in_time.checked_ilog2().map_or(0, |log| 1 << log);
    power_of_two.max(MIN_TOKENS).min(most)
}

/// The speed of a prefill, if it was long enough to tell.
pub(crate) fn measured_speed(tokens: usize, duration: Duration) -> Option<f64> {
    let speed = tokens as f64 / duration.as_secs_f64();
    (tokens >= MIN_MEASURED_TOKENS && speed.is_finite()).then_some(speed)
}

/// The stored speed of this model in a conversation.
pub(crate) fn load_speed(conversation: &mut Conversation, model: &ModelInfo) -> Result<Option<f64>, Error> {
    let stored = conversation.setting(SPEED_KEY)?;
    // A record that cannot be read is measured again.
    let stored: Option<PrefillSpeed> = stored.and_then(|stored| serde_json::from_str(&stored).ok());
    let usable = |speed: &f64| speed.is_finite() && *speed > 0.0;
    Ok(stored
        .filter(|stored| stored.model == model.name)
        .map(|stored| stored.tokens_per_second)
        .filter(usable))
}

pub(crate) fn store_speed(
    conversation: &mut Conversation,
    model: &ModelInfo,
    tokens_per_second: f64,
) -> Result<(), Error> {
    let speed = PrefillSpeed { model: model.name.clone(), tokens_per_second };
    let json = serde_json::to_value(&speed).unwrap_or_default().to_string();
    conversation.put_setting(SPEED_KEY, Some(&json))
}

/// The measured speed among the settings of a conversation, if it has one.
#[must_use]
pub fn speed_in_settings(settings: &[halo_core::store::Record]) -> Option<PrefillSpeed> {
    let record = settings.iter().find(|record| record.key == SPEED_KEY)?;
    serde_json::from_str(&record.value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn automatic_window_is_what_is_prefilled_in_half_a_minute() {
        // Context of the model, tokens per second, window.
        let cases = [
            (8192, None, 2048),
            (1024, None, 1024),
            (8192, Some(10.0), 2048),
            (8192, Some(136.0), 2048),
            (8192, Some(137.0), 4096),
            (8192, Some(273.0), 4096),
            (8192, Some(274.0), 8192),
            (8192, Some(9e9), 8192),
            (5000, Some(160.0), 4096),
            (5000, Some(167.0), 5000),
            (128_000, Some(9e9), 8192),
            (512, Some(1.0), 512),
            (0, Some(1.0), 0),
        ];
        for (context, speed, expected) in cases {
            assert_eq!(automatic_window(context, speed), expected, "{context} {speed:?}");
        }
    }

    #[test]
    fn short_prefills_are_not_measured() {
        assert_eq!(measured_speed(31, Duration::from_secs(1)), None);
        assert_eq!(measured_speed(64, Duration::from_millis(500)), Some(128.0));
        assert_eq!(measured_speed(64, Duration::ZERO), None);
    }
}
