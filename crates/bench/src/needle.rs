//! Needle in a haystack: is a fact from the beginning resurrected at its own position when it is asked for, and does
//! the model use it.

use crate::synthetic_history::{self, CONVERSATION};
use crate::synthetic_text;
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::embedder::Embedder;
use halo_core::model::{
    ChatTemplate, FinishReason, MessageWrap, Model, ModelInfo, ModelStep, ModelToken, Prompt, Sampling,
    StepFlow, WindowToken,
};
use halo_core::prune::PrunePolicy;
use halo_core::token::{ChunkId, Role, TurnId};
use halo_engine::event::Event;
use halo_engine::rules::ConversationRules;
use halo_engine::session::Session;
use halo_store::database::{Database, StoreLocation};
use jiff::civil::{Date, date};
use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;

/// A fact, the question for it, and the word that a correct answer contains.
struct Needle {
    fact: &'static str,
    question: &'static str,
    answer: &'static str,
}

/// Simple facts: the benchmark measures whether they are in the window, not how well the model reads.
const NEEDLES: [Needle; 8] = [
    Needle {
        fact: "The gun on the wall is called Betsy.",
        question: "What is the gun on the wall called?",
        answer: "Betsy",
    },
    Needle {
        fact: "The parrot of my sister is called Bismarck.",
        question: "What is the parrot of my sister called?",
        answer: "Bismarck",
    },
    Needle {
        fact: "The boat in the harbour is called Esmeralda.",
        question: "What is the boat in the harbour called?",
        answer: "Esmeralda",
    },
    Needle {
        fact: "My violin teacher is called Kowalski.",
        question: "What is my violin teacher called?",
        answer: "Kowalski",
    },
    Needle {
        fact: "The dog of the baker is called Pumpernickel.",
        question: "What is the dog of the baker called?",
        answer: "Pumpernickel",
    },
    Needle {
        fact: "The ship to Lisbon is called Santa Clara.",
        question: "What is the ship to Lisbon called?",
        answer: "Santa Clara",
    },
    Needle {
        fact: "The street behind the church is called Foxglove Lane.",
        question: "What is the street behind the church called?",
        answer: "Foxglove Lane",
    },
    Needle {
        fact: "The horse of the postman is called Thunderbolt.",
        question: "What is the horse of the postman called?",
        answer: "Thunderbolt",
    },
];

/// A pruning policy, and whether chunks are resurrected.
#[derive(Clone, Debug)]
pub struct NeedlePolicy {
    pub name: &'static str,
    pub policy: PrunePolicy,
    pub recall: bool,
}

/// How many questions had each result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NeedleBenchReport {
    pub questions: usize,
    /// The fact was pruned.
    pub pruned: usize,
    /// The fact was in the window when the question was answered.
    pub resurrected: usize,
    /// The fact was at its original position.
    pub own_position: usize,
    /// The answer contains it.
    pub answered: usize,
    /// The answer contains it in a conversation without anything else.
    pub answered_oracle: usize,
}

const TODAY: Date = date(2026, 11, 15);

/// Up to this length the model answers every message and attention is scored. Longer histories are synthetic.
pub const MAX_GENERATED_HISTORY: usize = 10_000;

/// How messages are framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptForm {
    /// By the model's own chat template.
    ChatTemplate,
    /// As questions and answers in plain text, which a model continues that was not trained to chat.
    BaseModel,
}

fn base_template(start: &str) -> ChatTemplate {
    let wrap = |prefix: &str, suffix: &str| MessageWrap { prefix: prefix.into(), suffix: suffix.into() };
    ChatTemplate {
        start: start.to_owned(),
        system: wrap("", "\n\n"),
        user: wrap("User: ", "\n"),
        assistant: wrap("Answer:", "\n\n"),
        ..ChatTemplate::default()
    }
}

/// A conversation of `history` tokens, and questions at its end.
pub fn measure<E: Embedder + Clone + Send + 'static>(
    model: &(impl Model + Clone + Send + 'static),
    embedder: &E,
    rules: &ConversationRules,
    way: &NeedlePolicy,
    form: PromptForm,
    history: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<NeedleBenchReport, Error> {
    let folder = tempfile::tempdir().map_err(|e| Error::internal("creating a folder", e.to_string()))?;
    let mut rules = ConversationRules { show_dates: false, ..rules.clone() };
    rules.context.policy = way.policy;
    let boxed = || Box::new(embedder.clone()) as Box<dyn Embedder + Send>;
    let shown = Arc::new(Mutex::new(Vec::new()));
    let mut info = model.info().clone();
    if form == PromptForm::BaseModel {
        info.template = base_template(&info.template.start);
    }
    let model = WindowRecorder { model: model.clone(), info, last_window: Arc::clone(&shown) };
    let open = |name: &str, path: &Path, rules: &ConversationRules| {
        let store = Box::new(Database::open(&StoreLocation::Sqlite(path.to_owned()))?);
        Session::open(store, Box::new(model.clone()), Some(boxed()), name, rules.clone(), &mut |_, _| {})
    };
    let path = folder.path().join("halo.db");
    let mut report = NeedleBenchReport { questions: NEEDLES.len(), ..NeedleBenchReport::default() };
    for needle in &NEEDLES {
        let mut alone = open(needle.answer, &path, &rules)?;
        alone.send_message(needle.fact, TODAY, &mut |_| StepFlow::Continue)?;
        report.answered_oracle += usize::from(answers_needle(&mut alone, needle)?);
    }
    if history > MAX_GENERATED_HISTORY {
        let mut store = Database::open(&StoreLocation::Sqlite(path.clone()))?;
        let first = NEEDLES.iter().map(|needle| (needle.fact.to_owned(), format!("Noted: {}", needle.fact)));
        let all = history as u64;
        let made = &mut |done| progress(done, all);
        synthetic_history::build_history(
            &mut store,
            &mut model.clone(),
            &rules,
            first.chain(synthetic_text::fact_messages()),
            history,
            made,
        )?;
        if way.recall {
            synthetic_history::embed_history(&mut store, boxed(), progress)?;
        }
    }
    if !way.recall {
        // Without search hits nothing is resurrected.
        rules.recall.limit = 0;
    }
    let mut session = open(CONVERSATION, &path, &rules)?;
    if history <= MAX_GENERATED_HISTORY {
        for needle in &NEEDLES {
            session.send_message(needle.fact, TODAY, &mut |_| StepFlow::Continue)?;
        }
        for (message, _) in synthetic_text::fact_messages() {
            if session.timeline().len() >= history {
                break;
            }
            session.send_message(&message, TODAY, &mut |_| StepFlow::Continue)?;
            progress(session.timeline().len() as u64, history as u64);
        }
    }
    for (n, needle) in NEEDLES.iter().enumerate() {
        progress(n as u64, NEEDLES.len() as u64);
        // Each message is followed by an answer.
        let chunk = ChunkId::new(Role::User, TurnId(2 * n as u32), 0);
        let fact = session.timeline().chunk(chunk).map(|chunk| (chunk.run(), chunk.is_live()));
        let (run, live) = fact.ok_or_else(|| Error::internal("asking", "the fact is not on the timeline"))?;
        report.pruned += usize::from(!live);
        report.answered += usize::from(answers_needle(&mut session, needle)?);
        let window = shown.lock().clone();
        let needed = run.start..run.start.plus(run.len as usize);
        let in_window = window.iter().filter(|token| token.position.is_some_and(|p| needed.contains(&p)));
        let returned = in_window.count() == run.len as usize;
        report.resurrected += usize::from(returned);
        let in_order = window.iter().map(|token| token.position).is_sorted();
        report.own_position += usize::from(returned && in_order);
    }
    Ok(report)
}

fn answers_needle(session: &mut Session, needle: &Needle) -> Result<bool, Error> {
    let mut answer = String::new();
    session.send_message(needle.question, TODAY, &mut |event| {
        if let Event::Token { text, .. } = event {
            answer.push_str(&text);
        }
        StepFlow::Continue
    })?;
    Ok(answer.to_lowercase().contains(&needle.answer.to_lowercase()))
}

/// A model that records the window that it was given last.
#[derive(Clone)]
struct WindowRecorder<M> {
    model: M,
    info: ModelInfo,
    last_window: Arc<Mutex<Vec<WindowToken>>>,
}

impl<M: Model> Model for WindowRecorder<M> {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error> {
        self.model.tokenize(text, special)
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        prompt.window.clone_into(&mut self.last_window.lock());
        self.model.generate(prompt, sampling, watch, listen)
    }

    fn persist_kv(&mut self, conversation: &str, window: &[WindowToken]) -> Result<(), Error> {
        self.model.persist_kv(conversation, window)
    }
}
