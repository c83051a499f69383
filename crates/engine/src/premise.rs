//! Mu: checks whether a question presupposes something that the conversation contradicts. The user is told, and the question
//! is answered all the same.

use crate::agent::{CompletionAgent, poll_ready};
use crate::chat_model::ChatModel;
use crate::conversation::{Conversation, unloaded_chunks};
use halo_agents::agent::Agent;
use halo_agents::judge::{ModelContradictionDetector, ModelJudge, RuleContradictionDetector, RuleJudge};
use halo_agents::mu::{ModelPremiseExtractor, PremiseResult, check_premises, extract_premises};
use halo_agents::principle::JudgePrinciple;
use halo_core::Error;
use halo_core::model::{Model, Sampling};
use halo_core::token::ChunkId;
use halo_recall::recall::{Recall, SearchOptions};
use std::sync::Arc;

/// What compares the premises of a question with the conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum PremiseMethod {
    /// Rules over words: no model is asked.
    Rules,
    Model,
}

/// The most chunks that a premise is compared with.
const MAX_FACTS: usize = 12;

/// Checks the premises of questions in one conversation.
pub(crate) struct PremiseChecker {
    /// How messages are checked; none: they are not.
    pub method: Option<PremiseMethod>,
    /// The principles that premises are judged by.
    pub principles: Vec<JudgePrinciple>,
    pub search_options: SearchOptions,
}

impl PremiseChecker {
    /// Compares the premises of a question with the chunks that search finds for it.
    pub fn check(
        &self,
        question: &str,
        method: PremiseMethod,
        conversation: &mut Conversation,
        recall: &mut Recall,
        model: &mut ChatModel,
    ) -> Result<PremiseResult, Error> {
        let premises = extract_premises(question);
        // A model may find premises that the form of a question does not show; a statement has none to look for.
        if premises.is_empty() && (method == PremiseMethod::Rules || !question.contains('?')) {
            return Ok(PremiseResult::valid());
        }
        let facts = self.find_facts(question, conversation, recall)?;
        match method {
            PremiseMethod::Rules => poll_ready(check_premises(
                premises,
                &facts,
                &self.principles,
                &RuleContradictionDetector,
                &RuleJudge,
            )),
            PremiseMethod::Model => {
                let sampling = Sampling { max_tokens: 48, temperature: 0.0, ..Sampling::default() };
                let model: &mut (dyn Model + Send) = &mut *model.model;
                let mut agent = CompletionAgent::new(model, "", sampling);
                agent.conversation = conversation.kv_key().to_owned();
                let agent = Arc::new(agent);
                poll_ready(async {
                    let extractor = ModelPremiseExtractor(Arc::clone(&agent));
                    let premises = extractor.invoke(question.to_owned()).await?;
                    let detector = ModelContradictionDetector(Arc::clone(&agent));
                    let judge = ModelJudge(Arc::clone(&agent));
                    check_premises(premises, &facts, &self.principles, &detector, &judge).await
                })
            }
        }
    }

    /// The chunks that search finds for a question, as text. The question itself is on the timeline already, and is no fact.
    fn find_facts(
        &self,
        question: &str,
        conversation: &mut Conversation,
        recall: &mut Recall,
    ) -> Result<Vec<String>, Error> {
        let hits = recall.search(question, None, self.search_options)?;
        let chunks: Vec<ChunkId> = hits.iter().map(|found| found.hit.chunk).take(MAX_FACTS).collect();
        let unloaded = unloaded_chunks(conversation.timeline(), &chunks);
        conversation.load_bodies(&unloaded)?;
        let text =
            |&id: &ChunkId| conversation.timeline().chunk(id).map(|chunk| chunk.text().trim().to_owned());
        let facts = chunks.iter().filter_map(text).filter(|text| text != question.trim()).collect();
        conversation.unload_pruned();
        Ok(facts)
    }
}
