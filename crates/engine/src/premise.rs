//! Mu in a conversation: what a question takes for granted is held against what was said, as recall finds it. Whoever asked is
//! told, and answered all the same.

use crate::agent::{Speaker, at_once};
use crate::session::Session;
use halo_agents::agent::Agent;
use halo_agents::judge::{ModelContradict, ModelJudge, RuleContradict, RuleJudge};
use halo_agents::mu::{ModelPremises, PremiseResult, check_premises, premises};
use halo_core::seams::{Model, Sampling, SeamError};
use halo_core::token::ChunkId;

/// Who holds premises against what is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Premises {
    /// Rules, which go by words.
    Rules,
    /// The model itself.
    Model,
}

/// How much of what was said is taken for known, at most.
const FACTS: usize = 12;

impl Session {
    /// Whether a question takes something for granted that was said not to be so.
    ///
    /// # Errors
    /// When a part fails.
    pub fn check_premise(&mut self, question: &str, by: Premises) -> Result<PremiseResult, SeamError> {
        let drawn = premises(question);
        // A model may see more in a question than its form tells; in what is no question there is nothing to see.
        if drawn.is_empty() && (by == Premises::Rules || !question.contains('?')) {
            return Ok(PremiseResult::valid());
        }
        let found = self.recall.search(question, None, self.rules.recall)?;
        let chunks: Vec<ChunkId> = found.iter().map(|found| found.hit.chunk).take(FACTS).collect();
        let away = chunks.iter().copied().filter(|&id| self.timeline.chunk(id).is_some_and(|c| !c.is_here()));
        let away: Vec<ChunkId> = away.collect();
        self.store.bring(&self.name, &mut self.timeline, &away)?;
        let said = |&id: &ChunkId| self.timeline.chunk(id).map(|chunk| chunk.text().trim().to_owned());
        // What is asked now is not known by being asked.
        let facts: Vec<String> =
            chunks.iter().filter_map(said).filter(|text| text != question.trim()).collect();
        self.timeline.release_dead();
        match by {
            Premises::Rules => at_once(check_premises(drawn, &facts, &RuleContradict, &RuleJudge)),
            Premises::Model => {
                let sampling = Sampling { max_tokens: 48, temperature: 0.0, ..Sampling::default() };
                let model: &mut (dyn Model + Send) = &mut *self.model;
                let mut speaker = Speaker::new(model, "", sampling);
                speaker.beside.clone_from(&self.key);
                let speaker = std::sync::Arc::new(speaker);
                let asks = || std::sync::Arc::clone(&speaker);
                at_once(async {
                    let drawn = ModelPremises(asks()).invoke(question.to_owned()).await?;
                    check_premises(drawn, &facts, &ModelContradict(asks()), &ModelJudge(asks())).await
                })
            }
        }
    }
}
