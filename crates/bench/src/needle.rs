//! Something said at the very beginning and asked for at the end: whether it comes back, to its own place, and whether the
//! model can use it.

use crate::synthetic_history::{self, CONVERSATION};
use crate::synthetic_text;
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::embedder::Embedder;
use halo_core::model::{
    FinishReason, Model, ModelInfo, ModelStep, ModelToken, Prompt, Sampling, StepFlow, WindowToken,
};
use halo_core::prune::PrunePolicy;
use halo_core::token::{ChunkId, Role, TurnId};
use halo_engine::event::Event;
use halo_engine::rules::ConversationRules;
use halo_engine::session::Session;
use halo_store::database::{Database, StoreLocation};
use jiff::civil::{Date, date};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Something that is told, asked for later, and known by a word.
struct Needle {
    fact: &'static str,
    question: &'static str,
    answer: &'static str,
}

/// Plain words: what is measured is whether they are there, not how well a model reads.
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

/// How a conversation is kept small, and what may come back.
#[derive(Clone, Debug)]
pub struct NeedlePolicy {
    /// What it is called.
    pub name: &'static str,
    pub policy: PrunePolicy,
    /// Whether anything comes back.
    pub recall: bool,
}

/// How many of the questions went how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NeedleBenchReport {
    pub questions: usize,
    /// What they ask for had left.
    pub pruned: usize,
    /// It was in the window when they were answered.
    pub resurrected: usize,
    /// It stood at the place where it was said.
    pub own_position: usize,
    /// The answer names it.
    pub answered: usize,
    /// The answer names it where nothing else was ever said.
    pub answered_oracle: usize,
}

const TODAY: Date = date(2026, 11, 15);

/// Up to this length all of it is lived: every message is answered by the model, and scored. Beyond, it is made by rote.
pub const MAX_GENERATED_HISTORY: usize = 10_000;

/// A conversation of `history` tokens, and what is asked at its end.
pub fn measure<E: Embedder + Clone + Send + 'static>(
    model: &(impl Model + Clone + Send + 'static),
    embedder: &E,
    rules: &ConversationRules,
    way: &NeedlePolicy,
    history: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<NeedleBenchReport, Error> {
    let folder = tempfile::tempdir().map_err(|e| Error::internal("making a folder", e.to_string()))?;
    let mut rules = ConversationRules { show_dates: false, ..rules.clone() };
    rules.context.policy = way.policy;
    let boxed = || Box::new(embedder.clone()) as Box<dyn Embedder + Send>;
    let shown = Arc::new(Mutex::new(Vec::new()));
    let model = WindowRecorder { model: model.clone(), last_window: Arc::clone(&shown) };
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
        // Nothing comes back where nothing is found.
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
        // Each message has an answer behind it.
        let chunk = ChunkId::new(Role::User, TurnId(2 * n as u32), 0);
        let told = session.timeline().chunk(chunk).map(|chunk| (chunk.run(), chunk.is_live()));
        let (run, live) = told.ok_or_else(|| Error::internal("asking", "it was never told"))?;
        report.pruned += usize::from(!live);
        report.answered += usize::from(answers_needle(&mut session, needle)?);
        let window = shown.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let needed = run.start..run.start.plus(run.len as usize);
        let told = window.iter().filter(|token| token.position.is_some_and(|p| needed.contains(&p)));
        let returned = told.count() == run.len as usize;
        report.resurrected += usize::from(returned);
        let in_order = window.iter().map(|token| token.position).is_sorted();
        report.own_position += usize::from(returned && in_order);
    }
    Ok(report)
}

/// Whether the answer names it.
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

/// A model that lets others know what it was last shown.
#[derive(Clone)]
struct WindowRecorder<M> {
    model: M,
    last_window: Arc<Mutex<Vec<WindowToken>>>,
}

impl<M: Model> Model for WindowRecorder<M> {
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
        watch: &AttentionRequest,
        listen: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        prompt.window.clone_into(&mut self.last_window.lock().unwrap_or_else(PoisonError::into_inner));
        self.model.generate(prompt, sampling, watch, listen)
    }

    fn persist_kv(&mut self, conversation: &str, window: &[WindowToken]) -> Result<(), Error> {
        self.model.persist_kv(conversation, window)
    }
}
