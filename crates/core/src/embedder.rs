//! The trait of embedding models.

use crate::error::Error;
use crate::model::StepFlow;

/// The properties of an embedder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EmbedderInfo {
    /// Identifies the vector space: two embedders have the same name only if their vectors can be compared.
    /// Stores keep vectors by this name.
    pub name: String,
    /// The length of the vectors.
    pub dimensions: usize,
    /// How many tokens the embedder reads at once, counted with its own tokenizer. A longer text is embedded in
    /// pieces, and its vector is the mean of theirs.
    pub max_tokens: usize,
    /// The text that the embedder expects before a query.
    pub query_prefix: String,
    /// The text that the embedder expects before a passage.
    pub passage_prefix: String,
}

/// Turns texts into vectors of length 1. The same text always gives the same vector, whichever other texts are
/// in its batch.
pub trait Embedder {
    /// The properties of the embedder.
    ///
    /// # Errors
    /// When the model cannot be loaded.
    fn info(&mut self) -> Result<EmbedderInfo, Error>;

    /// How many tokens each text has, by the embedder's own tokenizer. A text with more than
    /// [`max_tokens`](EmbedderInfo::max_tokens) is embedded in pieces.
    ///
    /// # Errors
    /// When the model cannot be loaded.
    fn count_tokens(&mut self, texts: &[&str]) -> Result<Vec<usize>, Error>;

    /// One vector per text, in order. For callers that wait for the result.
    ///
    /// # Errors
    /// When the model cannot be loaded or run.
    fn embed(&mut self, texts: &[&str]) -> Result<Vec<Vec<f32>>, Error>;

    /// Embeds many texts for a caller that does not wait. `listen` gets each vector with the index of its text,
    /// in any order, and can stop the work. An implementation lets calls of [`embed`](Self::embed) go first.
    ///
    /// # Errors
    /// When the model cannot be loaded or run; vectors that `listen` already has are valid.
    fn embed_in_background(
        &mut self,
        texts: Vec<String>,
        listen: &mut dyn FnMut(usize, Vec<f32>) -> StepFlow,
    ) -> Result<(), Error> {
        for (index, text) in texts.iter().enumerate() {
            for vector in self.embed(&[text])? {
                if listen(index, vector) != StepFlow::Continue {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}
