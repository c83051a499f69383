//! A turn by stage, for growing histories, and the part of it that is not the model's.

use crate::kv::median;
use crate::random_changes::BenchRng;
use crate::synthetic_history::{self, CONVERSATION, RandomPassageEmbedder};
use crate::synthetic_text;
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::embedder::Embedder;
use halo_core::model::{
    AttentionRow, FinishReason, Model, ModelInfo, ModelStep, ModelToken, Prompt, Sampling, StepFlow,
};
use halo_core::testing::doubles::ScriptedModel;
use halo_engine::event::{Event, TurnStage, TurnSummary};
use halo_engine::rules::ConversationRules;
use halo_engine::session::Session;
use halo_store::database::{Database, StoreLocation};
use jiff::civil::{Date, date};
use std::time::Instant;

/// Results for one length of the history.
#[derive(Clone, Debug)]
pub struct TurnBenchReport {
    /// Tokens of the history before the measured turns.
    pub history: usize,
    /// Tokens in the context window before the turns.
    pub live: usize,
    /// Time from sending to the first token of the answer.
    pub first_token_ms: f64,
    pub tokens: f64,
    /// Chunks resurrected per message.
    pub resurrected: f64,
    /// Time per turn, by stage.
    pub stages: Vec<(TurnStage, f64)>,
}

impl TurnBenchReport {
    #[must_use]
    pub fn turn_ms(&self) -> f64 {
        self.stages.iter().map(|(_, ms)| ms).sum()
    }

    /// The time of a turn outside the model's prefill and generation.
    #[must_use]
    pub fn overhead_ms(&self) -> f64 {
        let own = |stage: &TurnStage| {
            !matches!(stage, TurnStage::Prefill | TurnStage::Generate | TurnStage::Preview)
        };
        self.stages.iter().filter(|(stage, _)| own(stage)).map(|(_, ms)| ms).sum()
    }

    /// The time of a stage per turn.
    #[must_use]
    pub fn stage_ms(&self, stage: TurnStage) -> f64 {
        self.stages.iter().filter(|(s, _)| *s == stage).map(|(_, ms)| ms).sum()
    }

    /// Time per token of the answer outside the model.
    #[must_use]
    pub fn overhead_ms_per_token(&self) -> f64 {
        self.stage_ms(TurnStage::Score) / self.tokens.max(1.0)
    }

    /// Time of the model per token.
    #[must_use]
    pub fn model_ms_per_token(&self) -> f64 {
        self.stage_ms(TurnStage::Generate) / self.tokens.max(1.0)
    }
}

/// Measured turns. As many messages come before: in a real conversation the model has prefilled the resurrected
/// chunks once, and their KV cells are saved.
const MEASURED_TURNS: usize = 10;

const TODAY: Date = date(2026, 11, 15);

/// A conversation of `history` tokens, and some turns.
pub fn measure<E: Embedder + Clone + Send + 'static>(
    model: &(impl Model + Clone + Send + 'static),
    embedder: Option<&E>,
    rules: &ConversationRules,
    history: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<TurnBenchReport, Error> {
    let folder = tempfile::tempdir().map_err(|e| Error::internal("creating a folder", e.to_string()))?;
    let location = StoreLocation::Sqlite(folder.path().join("halo.db"));
    let embedder =
        || embedder.map(|e| Box::new(RandomPassageEmbedder(e.clone())) as Box<dyn Embedder + Send>);
    let rules = ConversationRules { show_dates: false, ..rules.clone() };
    {
        let mut store = Database::open(&location)?;
        let all = history as u64;
        let paragraphs = synthetic_text::paragraphs(history / 60 + 2);
        let two = |two: &[String]| (two[0].trim_end().to_owned(), two[1].trim_end().to_owned());
        let messages = paragraphs.chunks_exact(2).map(two);
        synthetic_history::build_history(
            &mut store,
            &mut model.clone(),
            &rules,
            messages,
            history,
            &mut |done| {
                progress(done, all);
            },
        )?;
    }
    let mut store = Database::open(&location)?;
    if let Some(embedder) = embedder() {
        synthetic_history::embed_history(&mut store, embedder, progress)?;
    }
    drop(store);
    let store = Box::new(Database::open(&location)?);
    let mut session =
        Session::open(store, Box::new(model.clone()), embedder(), CONVERSATION, rules, &mut |_, _| {})?;
    let live = session.live_tokens();
    let (mut first, mut done) = (Vec::new(), Vec::new());
    for turn in 0..MESSAGES.len() + MEASURED_TURNS {
        progress(turn as u64, (MESSAGES.len() + MEASURED_TURNS) as u64);
        let message = MESSAGES[turn % MESSAGES.len()];
        let begin = Instant::now();
        let mut first_token = None;
        let summary = session.send_message(message, TODAY, &mut |event| {
            if matches!(event, Event::Token { .. }) {
                first_token.get_or_insert_with(|| begin.elapsed().as_secs_f64() * 1e3);
            }
            StepFlow::Continue
        })?;
        if turn >= MESSAGES.len() {
            first.extend(first_token);
            done.push(summary);
        }
    }
    let per_turn = |of: &dyn Fn(&TurnSummary) -> f64| median(&mut done.iter().map(of).collect::<Vec<_>>());
    Ok(TurnBenchReport {
        history,
        live,
        first_token_ms: median(&mut first),
        tokens: per_turn(&|s| s.tokens as f64),
        resurrected: per_turn(&|s| s.resurrected as f64),
        stages: TurnStage::ALL
            .map(|stage| (stage, per_turn(&|s| s.stage_duration(stage).as_secs_f64() * 1e3)))
            .to_vec(),
    })
}

/// A question about the synthetic history.
const MESSAGES: [&str; 5] = [
    "What did the man from the post office bring?",
    "Who was the stranger in the grey coat?",
    "Tell me more about Doctor Weiss.",
    "Where did my neighbour Anna go in the end?",
    "Did the youngest of the three sisters say why?",
];

/// A model that takes no time: it generates fixed words, and its attention is shaped like a real one, high on a few
/// tokens and low on most.
#[derive(Clone)]
pub struct ScriptedAttentionModel {
    model: ScriptedModel,
    /// Attention by slot, and its prefix sums.
    weights: Vec<f32>,
    prefix_sums: Vec<f32>,
}

impl ScriptedAttentionModel {
    #[must_use]
    pub fn new(context: usize) -> Self {
        let mut dice = BenchRng(11);
        // One token in twelve is above the mean.
        let mut weight = |_| {
            if dice.below(12) == 0 { 10.0 + dice.below(90) as f32 } else { dice.below(100) as f32 / 50.0 }
        };
        let weights: Vec<f32> = (0..context).map(&mut weight).collect();
        let mut sum = 0.0;
        let add = |weight: &f32| {
            sum += weight;
            sum
        };
        let sums = weights.iter().map(add).collect();
        Self { model: ScriptedModel::new(context, Vec::new()), weights, prefix_sums: sums }
    }
}

impl Model for ScriptedAttentionModel {
    fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error> {
        self.model.tokenize(text, special)
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        _watch: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        let text = synthetic_text::paragraphs(sampling.max_tokens / 50 + 1).concat();
        let pieces = self.model.tokenize(&text, false)?;
        for (step, piece) in pieces.iter().take(sampling.max_tokens).enumerate() {
            let slots = prompt.window.len() + step;
            let sum = self.prefix_sums[slots - 1];
            let row: Vec<f32> = self.weights[..slots].iter().map(|weight| weight / sum).collect();
            if listen(ModelStep::Token(piece, Some(AttentionRow::from_mean(&row)))) == StepFlow::Stop {
                return Ok(FinishReason::Cancelled);
            }
        }
        Ok(FinishReason::Length)
    }
}
