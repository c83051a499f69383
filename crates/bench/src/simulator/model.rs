//! The double of the model: words from the seed, attention that is sometimes unusable, failures in mid-answer.

use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::model::{
    AttentionRow, FinishReason, Model, ModelInfo, ModelStep, ModelToken, Prompt, Sampling, StepFlow,
};
use halo_core::testing::doubles::ScriptedModel;

const WORDS: [&str; 12] =
    [" the", " gun", " hangs", " on", " wall", ".", "\n\n", " Anna", " bees", " 谢谢", " keeps", " lamp"];

pub(super) struct SimulatedModel {
    info: ModelInfo,
    tokenizer: ScriptedModel,
    rng: fastrand::Rng,
}

impl SimulatedModel {
    pub fn new(seed: u64) -> Self {
        let tokenizer = ScriptedModel::new(256, Vec::new());
        Self { info: tokenizer.info().clone(), tokenizer, rng: fastrand::Rng::with_seed(seed) }
    }

    /// A distribution over the slots; sometimes none, or one that must be rejected.
    fn attention(&mut self, slots: usize) -> Option<Vec<f32>> {
        let mut row: Vec<f32> = (0..slots).map(|_| self.rng.f32() + 0.001).collect();
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|share| *share /= sum);
        match self.rng.u32(..40) {
            0 => return None,
            1 => row.truncate(slots / 2),
            2 => row.fill(f32::NAN),
            _ => {}
        }
        Some(row)
    }
}

impl Model for SimulatedModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error> {
        self.tokenizer.tokenize(text, special)
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        _: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        let positions: Vec<_> = prompt.window.iter().filter_map(|token| token.position).collect();
        // An error would look like one of the model's own, which clients expect.
        assert!(positions.is_sorted(), "the window is not in the order of the timeline: {positions:?}");
        assert!(
            prompt.window.len() <= self.info.context,
            "the window has {} tokens, and the model's context {}",
            prompt.window.len(),
            self.info.context
        );
        let len = self.rng.usize(..sampling.max_tokens.max(1) + 3);
        let fails_at = (self.rng.u32(..12) == 0).then(|| self.rng.usize(..len + 1));
        for n in 0..len {
            if fails_at == Some(n) {
                return Err(Error::unavailable("generating", "the model server is gone"));
            }
            if n == sampling.max_tokens {
                return Ok(FinishReason::Length);
            }
            let word = WORDS[self.rng.usize(..WORDS.len())];
            let token = self.tokenizer.tokenize(word, false)?.remove(0);
            let row = self.attention(prompt.window.len() + n);
            let row = row.as_deref().map(AttentionRow::from_mean);
            if listen(ModelStep::Token(&token, row)) == StepFlow::Stop {
                return Ok(FinishReason::Cancelled);
            }
        }
        Ok(FinishReason::EndOfText)
    }
}
