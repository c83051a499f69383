//! Something said at the very beginning and asked for at the end: whether it comes back, to its own place, and whether the
//! model can use it.

use crate::history::{self, NAME};
use crate::prose;
use halo_core::attention::Watch;
use halo_core::prune::Policy;
use halo_core::seams::{
    Embedder, Finish, Flow, Model, ModelInfo, ModelStep, Piece, Prompt, Sampling, SeamError, Seen,
};
use halo_core::token::{ChunkId, Role, TurnId};
use halo_engine::event::Event;
use halo_engine::rules::Rules;
use halo_engine::session::Session;
use halo_store::database::{Database, Location};
use jiff::civil::{Date, date};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Something that is told, asked for later, and known by a word.
struct Needle {
    told: &'static str,
    asked: &'static str,
    word: &'static str,
}

/// Plain words: what is measured is whether they are there, not how well a model reads.
const NEEDLES: [Needle; 8] = [
    Needle {
        told: "The gun on the wall is called Betsy.",
        asked: "What is the gun on the wall called?",
        word: "Betsy",
    },
    Needle {
        told: "The parrot of my sister is called Bismarck.",
        asked: "What is the parrot of my sister called?",
        word: "Bismarck",
    },
    Needle {
        told: "The boat in the harbour is called Esmeralda.",
        asked: "What is the boat in the harbour called?",
        word: "Esmeralda",
    },
    Needle {
        told: "My violin teacher is called Kowalski.",
        asked: "What is my violin teacher called?",
        word: "Kowalski",
    },
    Needle {
        told: "The dog of the baker is called Pumpernickel.",
        asked: "What is the dog of the baker called?",
        word: "Pumpernickel",
    },
    Needle {
        told: "The ship to Lisbon is called Santa Clara.",
        asked: "What is the ship to Lisbon called?",
        word: "Santa Clara",
    },
    Needle {
        told: "The street behind the church is called Foxglove Lane.",
        asked: "What is the street behind the church called?",
        word: "Foxglove Lane",
    },
    Needle {
        told: "The horse of the postman is called Thunderbolt.",
        asked: "What is the horse of the postman called?",
        word: "Thunderbolt",
    },
];

/// How a conversation is kept small, and what may come back.
#[derive(Clone, Debug)]
pub struct Way {
    /// What it is called.
    pub name: &'static str,
    /// What leaves.
    pub policy: Policy,
    /// Whether anything comes back.
    pub recall: bool,
}

/// How many of the questions went how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Questions.
    pub asked: usize,
    /// What they ask for had left.
    pub had_left: usize,
    /// It was in the window when they were answered.
    pub returned: usize,
    /// It stood at the place where it was said.
    pub own_position: usize,
    /// The answer names it.
    pub answered: usize,
    /// The answer names it where nothing else was ever said.
    pub answered_oracle: usize,
}

const TODAY: Date = date(2026, 11, 15);

/// Up to this length all of it is lived: every message is answered by the model, and scored. Beyond, it is made by rote.
pub const LIVED: usize = 10_000;

/// A conversation of `history` tokens, and what is asked at its end.
///
/// # Errors
/// When a part fails.
pub fn measure<E: Embedder + Clone + Send + 'static>(
    model: &(impl Model + Clone + Send + 'static),
    embedder: &E,
    rules: &Rules,
    way: &Way,
    history: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Report, SeamError> {
    let folder = tempfile::tempdir().map_err(|e| SeamError::new("making a folder", e.to_string()))?;
    let mut rules = Rules { dates: false, ..rules.clone() };
    rules.context.policy = way.policy;
    let boxed = || Box::new(embedder.clone()) as Box<dyn Embedder + Send>;
    let shown = Arc::new(Mutex::new(Vec::new()));
    let model = Watched { model: model.clone(), shown: Arc::clone(&shown) };
    let open = |name: &str, path: &Path, rules: &Rules| {
        let store = Box::new(Database::open(&Location::Sqlite(path.to_owned()))?);
        Session::open(store, Box::new(model.clone()), Some(boxed()), name, rules.clone(), &mut |_, _| {})
    };
    let path = folder.path().join("halo.db");
    let mut report = Report { asked: NEEDLES.len(), ..Report::default() };
    for needle in &NEEDLES {
        let mut alone = open(needle.word, &path, &rules)?;
        alone.say(needle.told, TODAY, &mut |_| Flow::Continue)?;
        report.answered_oracle += usize::from(ask(&mut alone, needle)?);
    }
    if history > LIVED {
        let mut store = Database::open(&Location::Sqlite(path.clone()))?;
        let first = NEEDLES.iter().map(|needle| (needle.told.to_owned(), format!("Noted: {}", needle.told)));
        let all = history as u64;
        let made = &mut |done| progress(done, all);
        history::make(&mut store, &mut model.clone(), &rules, first.chain(prose::drill()), history, made)?;
        if way.recall {
            history::index(&mut store, boxed(), progress)?;
        }
    }
    if !way.recall {
        // Nothing comes back where nothing is found.
        rules.recall.most = 0;
    }
    let mut session = open(NAME, &path, &rules)?;
    if history <= LIVED {
        for needle in &NEEDLES {
            session.say(needle.told, TODAY, &mut |_| Flow::Continue)?;
        }
        for (message, _) in prose::drill() {
            if session.timeline().len() >= history {
                break;
            }
            session.say(&message, TODAY, &mut |_| Flow::Continue)?;
            progress(session.timeline().len() as u64, history as u64);
        }
    }
    for (n, needle) in NEEDLES.iter().enumerate() {
        progress(n as u64, NEEDLES.len() as u64);
        // Each message has an answer behind it.
        let chunk = ChunkId::new(Role::User, TurnId(2 * n as u32), 0);
        let told = session.timeline().chunk(chunk).map(|chunk| (chunk.run(), chunk.is_live()));
        let (run, live) = told.ok_or_else(|| SeamError::new("asking", "it was never told"))?;
        report.had_left += usize::from(!live);
        report.answered += usize::from(ask(&mut session, needle)?);
        let window = shown.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let needed = run.start..run.start.plus(run.len as usize);
        let told = window.iter().filter(|token| token.position.is_some_and(|p| needed.contains(&p)));
        let returned = told.count() == run.len as usize;
        report.returned += usize::from(returned);
        let in_order = window.iter().map(|token| token.position).is_sorted();
        report.own_position += usize::from(returned && in_order);
    }
    Ok(report)
}

/// Whether the answer names it.
fn ask(session: &mut Session, needle: &Needle) -> Result<bool, SeamError> {
    let mut answer = String::new();
    session.say(needle.asked, TODAY, &mut |event| {
        if let Event::Token { text, .. } = event {
            answer.push_str(&text);
        }
        Flow::Continue
    })?;
    Ok(answer.to_lowercase().contains(&needle.word.to_lowercase()))
}

/// A model that lets others know what it was last shown.
#[derive(Clone)]
struct Watched<M> {
    model: M,
    shown: Arc<Mutex<Vec<Seen>>>,
}

impl<M: Model> Model for Watched<M> {
    fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<Piece>, SeamError> {
        self.model.tokenize(text, special)
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        watch: &Watch,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError> {
        prompt.window.clone_into(&mut self.shown.lock().unwrap_or_else(PoisonError::into_inner));
        self.model.generate(prompt, sampling, watch, listen)
    }

    fn settle(&mut self, conversation: &str, window: &[Seen]) -> Result<(), SeamError> {
        self.model.settle(conversation, window)
    }
}
