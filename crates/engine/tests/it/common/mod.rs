//! Helpers of the tests of this crate.

use halo_core::attention::AttentionRequest;
use halo_core::brightness::{MagnitudeRules, ScoringStrategy};
use halo_core::chunker::ChunkSize;
use halo_core::model::Sampling;
use halo_core::prune::{PrunePolicy, RankBy, TieBreak};
use halo_engine::chat_format::SpeakerNames;
use halo_engine::chat_options::Persona;
use halo_engine::rules::{AutoSizes, ConversationRules, ResurrectBrightness, ResurrectLimit};
use halo_recall::rank::SearchMode;
use halo_recall::recall::SearchOptions;

/// Conversation rules for a small window.
pub fn test_rules(max_tokens: usize) -> ConversationRules {
    ConversationRules {
        context: halo_core::rules::ContextRules {
            strategy: ScoringStrategy::Magnitude(MagnitudeRules::default()),
            chunks: ChunkSize { min: 2, max: 64 },
            policy: PrunePolicy::Brightness { rank: RankBy::Top4, ties: TieBreak::Dimmer },
            max_tokens,
            sinks: 0,
            recent: 0,
            fill: true,
            trace_interval: 0,
        },
        auto_sizes: AutoSizes::default(),
        reserved_tokens: 20,
        watch: AttentionRequest::default(),
        sampling: Sampling { max_tokens: 8, temperature: 0.0, ..Sampling::default() },
        recall: SearchOptions {
            mode: SearchMode::Hybrid,
            user_boost: 1.0,
            diversity: 0.0,
            limit: 32,
            floor: 0.0,
        },
        resurrect_brightness: ResurrectBrightness::Previous,
        resurrect_limit: ResurrectLimit::Window,
        preview_tokens: 0,
        tools: None,
        system_prompt: "Be brief.".into(),
        persona: Persona::default(),
        show_dates: false,
        speaker_names: SpeakerNames::default(),
        memory: None,
        premise_method: None,
        judge_principles: halo_agents::principle::JudgePrinciple::DEFAULT.to_vec(),
        keep_reasoning: false,
        attention_history_bytes: 1 << 20,
        forgetting: None,
    }
}
