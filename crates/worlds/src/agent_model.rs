//! Generates the answers of agents with a model.
//!
//! Each fragment of a HUD has a fixed position in the model's KV cache, and the shared section has the same position for
//! all agents of a kind: a heartbeat prefills only fragments that changed since the agent's last one. Cells of other agents
//! are moved to the KV archive and restored unchanged. Where agents think at the same time, each has a KV cache of its own.

use crate::agent_wrappers::{AgentWrappers, CoolableHud};
use crate::answer::AgentAnswer;
use crate::error;
use crate::format::{AnswerFormat, FragmentKey, HudFormat, HudSection, LAST_ITEM};
use crate::hud_renderer::{HudRenderer, RenderedHud};
use crate::world::AgentId;
use halo_agents::agent::{Agent, AgentExt, agent_fn};
use halo_agents::constraint::{SummaryConstraint, SummaryLayer};
use halo_agents::content::{AuthoredContent, TextAuthor};
use halo_agents::cooled::CoolingLayer;
use halo_agents::token_counter::TokenCounter;
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::budget;
use halo_core::model::{
    CacheStats, CancelHandle, FinishReason, Model, ModelStep, ModelToken, OutputConstraint, Prompt,
    PromptMessage, Sampling, StepFlow, WindowToken,
};
use halo_core::token::{Position, Role};
use halo_engine::agent::poll_ready;
use parking_lot::Mutex;
use std::sync::Arc;

pub struct AgentModel {
    model: Box<dyn Model + Send>,
    /// Further handles to the model.
    others: Vec<Box<dyn Model + Send>>,
    /// Counts tokens as the model does.
    pub renderer: Arc<HudRenderer>,
    pub sampling: Sampling,
    /// Whether a schema constrains the generated answers.
    pub constrained: bool,
    /// The context management around the agents.
    pub wrappers: AgentWrappers,
}

/// Tokens of a model's context that are reserved for the chat template around a HUD.
const TEMPLATE_TOKENS: usize = 64;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentGeneration {
    pub text: String,
    /// Whether the answer reached its token limit.
    pub truncated: bool,
    pub prompt_tokens: usize,
    /// The tokens of the prompt that were computed, not found in the KV cache.
    pub prefill_tokens: usize,
    pub answer_tokens: usize,
    pub cache_stats: CacheStats,
    /// How full the HUD was: its tokens divided by its budget.
    pub pressure: f64,
    /// Messages of other agents that were shortened in the HUD.
    pub cooled_messages: usize,
    /// Messages of the agent that were shortened under pressure.
    pub summarized_messages: usize,
}

/// What an agent is shown on a heartbeat, and in which formats it reads and answers.
pub struct HeartbeatPrompt<'a> {
    /// Names the KV cache of the world, or that of the agent.
    pub kv_key: &'a str,
    pub agent: AgentId,
    pub hud: RenderedHud,
    pub formats: (HudFormat, AnswerFormat),
    pub constraint: Option<OutputConstraint>,
}

/// What a model generated on a heartbeat, and the answer that was parsed from it.
pub type ParsedGeneration = (AgentGeneration, Result<AgentAnswer, error::Error>);

/// The answer of a model on a heartbeat, as the wrappers see it; none if it was stopped.
struct HeartbeatAnswer(Option<ParsedGeneration>);

impl HeartbeatAnswer {
    fn answer(&self) -> Option<&AgentAnswer> {
        self.0.as_ref().and_then(|(_, answer)| answer.as_ref().ok())
    }
}

impl AuthoredContent for HeartbeatAnswer {
    fn segments(&self) -> Vec<(TextAuthor, &str)> {
        self.answer().map(AuthoredContent::segments).unwrap_or_default()
    }

    fn with_texts(self, texts: Vec<String>) -> Self {
        let changed = self.segments().iter().zip(&texts).filter(|((_, text), new)| text != new).count();
        Self(self.0.map(|(mut generation, answer)| {
            generation.summarized_messages = changed;
            (generation, answer.map(|answer| answer.with_texts(texts)))
        }))
    }
}

/// Counts tokens with the tokenizer of a model.
pub struct ModelTokenCounter(Mutex<Box<dyn Model + Send>>);

impl ModelTokenCounter {
    /// `model` should tokenize without a network request.
    #[must_use]
    pub fn new(model: Box<dyn Model + Send>) -> Self {
        Self(Mutex::new(model))
    }
}

impl TokenCounter for ModelTokenCounter {
    fn count_tokens(&self, text: &str) -> usize {
        let mut model = self.0.lock();
        // If the tokenizer fails, the number of bytes is an upper bound: a budget is never exceeded.
        model.count_tokens(text).unwrap_or(text.len())
    }
}

impl AgentModel {
    #[must_use]
    pub fn new(
        model: Box<dyn Model + Send>,
        counter: Arc<dyn TokenCounter>,
        sampling: Sampling,
        constrained: bool,
    ) -> Self {
        Self {
            model,
            others: Vec::new(),
            renderer: Arc::new(HudRenderer::new(counter)),
            sampling,
            constrained,
            wrappers: AgentWrappers::default(),
        }
    }

    /// Adds further handles to the model: as many agents can think at the same time.
    #[must_use]
    pub fn with_handles(mut self, others: Vec<Box<dyn Model + Send>>) -> Self {
        self.others.extend(others);
        self
    }

    /// One agent model for each handle. They share the renderer.
    pub(crate) fn into_handles(mut self) -> Vec<Self> {
        let others = std::mem::take(&mut self.others);
        let mut handles: Vec<Self> = others
            .into_iter()
            .map(|model| Self {
                model,
                others: Vec::new(),
                renderer: Arc::clone(&self.renderer),
                sampling: self.sampling.clone(),
                constrained: self.constrained,
                wrappers: self.wrappers.clone(),
            })
            .collect();
        handles.push(self);
        handles
    }

    /// The most tokens of a HUD: the context length without the chat template and an answer.
    #[must_use]
    pub fn hud_token_limit(&self) -> usize {
        let context = self.model.info().context;
        context.saturating_sub(TEMPLATE_TOKENS + self.sampling.max_tokens.min(context / 4))
    }

    /// Cancels a running generation from another thread, if the model supports it.
    #[must_use]
    pub fn cancel_handle(&self) -> Option<CancelHandle> {
        self.model.cancel_handle()
    }

    /// Shows a HUD to an agent through its wrappers, and parses its answer. None if `on_step` stopped it.
    pub fn run_heartbeat(
        &mut self,
        prompt: HeartbeatPrompt<'_>,
        on_step: &mut (dyn FnMut() -> StepFlow + Send),
    ) -> Result<Option<ParsedGeneration>, Error> {
        let HeartbeatPrompt { kv_key, agent, hud, formats: (hud_format, answer_format), constraint } = prompt;
        let AgentWrappers { cooling_tokens, summaries, summarizer } = self.wrappers.clone();
        let pressure = budget::pressure(hud.token_usage.total, hud.budgets.total);
        let (before, renderer) = (hud, Arc::clone(&self.renderer));
        let state = Mutex::new((self, on_step));
        let inner = agent_fn(|hud: CoolableHud| {
            let mut state = state.lock();
            let (model, on_step) = &mut *state;
            let answer = model.answer_hud(kv_key, agent, hud, &before, constraint.clone(), *on_step);
            let answer = answer.map(|generation| {
                HeartbeatAnswer(generation.map(|generation| {
                    let (text, truncated) = (&generation.text, generation.truncated);
                    let answer = AgentAnswer::parse(text, answer_format, truncated);
                    (AgentGeneration { pressure, ..generation }, answer)
                }))
            });
            std::future::ready(answer)
        });
        let cooled = inner.with_layer(CoolingLayer {
            threshold: cooling_tokens.unwrap_or(usize::MAX),
            summarizer,
            counter: Arc::new(move |text: &str| renderer.count_tokens(text)),
        });
        // Without summaries no pressure reaches the threshold.
        let constraint = summaries.unwrap_or(SummaryConstraint {
            pressure_threshold: f64::INFINITY,
            ..SummaryConstraint::default()
        });
        let wrapped = cooled.with_layer(SummaryLayer { constraint, pressure: Arc::new(move || pressure) });
        Ok(poll_ready(wrapped.invoke(CoolableHud::new(before.clone(), hud_format)))?.0)
    }

    /// Generates the answer to a HUD that the wrappers may have shortened.
    fn answer_hud(
        &mut self,
        kv_key: &str,
        agent: AgentId,
        mut hud: CoolableHud,
        before: &RenderedHud,
        constraint: Option<OutputConstraint>,
        on_step: &mut (dyn FnMut() -> StepFlow + Send),
    ) -> Result<Option<AgentGeneration>, Error> {
        let cooled_messages = hud.count_changed(before);
        if cooled_messages > 0 {
            hud.count_tokens(self.renderer.counter());
        }
        let generation = self.generate_answer(kv_key, agent, &hud.hud, constraint, on_step)?;
        Ok(generation.map(|generation| AgentGeneration { cooled_messages, ..generation }))
    }

    /// Generates an answer to a HUD. `kv_key` names the KV cache. None if `on_step` stopped it.
    pub fn generate_answer(
        &mut self,
        kv_key: &str,
        agent: AgentId,
        hud: &RenderedHud,
        constraint: Option<OutputConstraint>,
        on_step: &mut dyn FnMut() -> StepFlow,
    ) -> Result<Option<AgentGeneration>, Error> {
        let window = self.context_window(agent, hud)?;
        let messages = || vec![PromptMessage { role: Role::User, text: hud.text() }];
        let next_position = Position(1 << 47);
        let prompt = |ephemeral| Prompt {
            conversation: kv_key,
            window: &window,
            messages: &messages,
            next_position,
            ephemeral,
        };
        let mut generation = AgentGeneration { prompt_tokens: window.len(), ..AgentGeneration::default() };
        // The prefill stays in the KV cache; the answer is generated in a fork that is discarded.
        let mut stopped = false;
        let finish = self.model.prefill(&prompt(false), &mut |step| {
            if let ModelStep::PrefillDone(stats) = step {
                generation.cache_stats = stats;
            }
            let flow = on_step();
            stopped |= flow == StepFlow::Stop;
            flow
        })?;
        if stopped || finish == FinishReason::Cancelled {
            return Ok(None);
        }
        let constraint = constraint.filter(|_| self.constrained);
        let sampling = Sampling { constraint, ..self.sampling.clone() };
        let finish =
            self.model.generate(&prompt(true), &sampling, &AttentionRequest::none(), &mut |step| {
                if let ModelStep::Token(token, _) = step {
                    generation.text.push_str(&token.text);
                    generation.answer_tokens += 1;
                }
                on_step()
            })?;
        generation.truncated = finish == FinishReason::Length;
        generation.prefill_tokens = generation.cache_stats.prefilled + generation.cache_stats.recomputed;
        Ok((finish != FinishReason::Cancelled).then_some(generation))
    }

    /// A HUD as the model's context window, each fragment at its own position.
    fn context_window(&mut self, agent: AgentId, hud: &RenderedHud) -> Result<Vec<WindowToken>, Error> {
        let template = self.model.info().template.clone();
        let prefix = format!("{}{}", template.start, template.user.prefix);
        let suffix = format!("{}{}", template.user.suffix, template.assistant.prefix);
        let mut window: Vec<WindowToken> = Vec::with_capacity(hud.token_usage.total + TEMPLATE_TOKENS);
        let mut push = |position: u64, tokens: Vec<ModelToken>| {
            for (n, token) in tokens.into_iter().enumerate() {
                window.push(WindowToken {
                    position: Some(Position(position)),
                    offset: u16::try_from(n + 1).unwrap_or(u16::MAX),
                    id: token.id,
                    chunk_start: n == 0,
                });
            }
        };
        for fragment in &hud.fragments {
            let position = match fragment.key.section {
                HudSection::Shared => {
                    push(0, self.model.tokenize(&prefix, true)?);
                    shared_position(&fragment.text)
                }
                _ => fragment_position(agent, fragment.key),
            };
            push(position, self.model.tokenize(&fragment.text, false)?);
        }
        let end = FragmentKey { section: HudSection::End, item: LAST_ITEM };
        push(fragment_position(agent, end), self.model.tokenize(&suffix, true)?);
        let key = |token: &WindowToken| (token.position, token.offset);
        if !window.windows(2).all(|pair| key(&pair[0]) < key(&pair[1])) {
            // A fragment has more tokens than offsets, or a number is too large: then tokens are numbered in order, and
            // this HUD shares nothing with others.
            for (n, token) in window.iter_mut().enumerate() {
                (token.position, token.offset) = (Some(Position(n as u64)), 0);
            }
        }
        Ok(window)
    }
}

/// The ranges of positions: shared fragments first, then those of each agent.
const SHARED_BASE: u64 = 1;
const AGENT_BASE: u64 = 1 << 36;

/// Equal texts have equal positions, so that all agents of a kind share their cells.
fn shared_position(text: &str) -> u64 {
    SHARED_BASE + xxhash_rust::xxh3::xxh3_64(text.as_bytes()) % (AGENT_BASE - SHARED_BASE)
}

/// The position of a fragment: agent, then section (the agent itself, its rooms, the end), then item.
fn fragment_position(agent: AgentId, key: FragmentKey) -> u64 {
    let section = match key.section {
        HudSection::Shared | HudSection::Agent => 0,
        HudSection::Room(room) => u64::from(room.0) + 1,
        HudSection::OwnRoom(_) => 0xffe,
        HudSection::End => 0xfff,
    };
    (u64::from(agent.0) << 36) | (section << 24) | key.item.min(LAST_ITEM)
}
