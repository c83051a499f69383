//! What a turn takes, part by part; whether that grows with what was ever said; and what of it is not the model's.

use crate::history::{self, NAME, Quick};
use crate::kv::middle;
use crate::lives::Dice;
use crate::prose;
use halo_core::attention::Watch;
use halo_core::seams::{
    Embedder, Finish, Flow, Look, Model, ModelInfo, ModelStep, Piece, Prompt, Sampling, SeamError,
};
use halo_core::testing::doubles::ScriptedModel;
use halo_engine::event::{Event, Stage, Summary};
use halo_engine::rules::Rules;
use halo_engine::session::Session;
use halo_store::database::{Database, Location};
use jiff::civil::{Date, date};
use std::time::Instant;

/// What was measured at one length of the past.
#[derive(Clone, Debug)]
pub struct Report {
    /// Tokens ever spoken before.
    pub history: usize,
    /// Tokens in the window before the turns.
    pub live: usize,
    /// From Enter to the first token of the answer.
    pub first_token_ms: f64,
    /// Tokens of an answer.
    pub tokens: f64,
    /// Chunks that came back with a message.
    pub returned: f64,
    /// By part: what it takes in a turn.
    pub stages: Vec<(Stage, f64)>,
}

impl Report {
    /// All of a turn.
    #[must_use]
    pub fn turn_ms(&self) -> f64 {
        self.stages.iter().map(|(_, ms)| ms).sum()
    }

    /// All of a turn but the model's reading and speaking.
    #[must_use]
    pub fn own_ms(&self) -> f64 {
        let own = |stage: &Stage| !matches!(stage, Stage::Read | Stage::Speak | Stage::Preview);
        self.stages.iter().filter(|(stage, _)| own(stage)).map(|(_, ms)| ms).sum()
    }

    /// A part, in a turn.
    #[must_use]
    pub fn stage(&self, stage: Stage) -> f64 {
        self.stages.iter().filter(|(s, _)| *s == stage).map(|(_, ms)| ms).sum()
    }

    /// What is done for a token of the answer beside making it.
    #[must_use]
    pub fn own_ms_per_token(&self) -> f64 {
        self.stage(Stage::Attend) / self.tokens.max(1.0)
    }

    /// What the model takes for a token.
    #[must_use]
    pub fn model_ms_per_token(&self) -> f64 {
        self.stage(Stage::Speak) / self.tokens.max(1.0)
    }
}

/// Turns that are measured. As many messages as there are come before: in a conversation that was lived, the model has
/// read what returns once, and its memory of that was saved.
const TURNS: usize = 10;

const TODAY: Date = date(2026, 11, 15);

/// A conversation of `history` tokens, and some turns of it.
///
/// # Errors
/// When a part fails.
pub fn measure<E: Embedder + Clone + Send + 'static>(
    model: &(impl Model + Clone + Send + 'static),
    embedder: Option<&E>,
    rules: &Rules,
    history: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Report, SeamError> {
    let folder = tempfile::tempdir().map_err(|e| SeamError::new("making a folder", e.to_string()))?;
    let location = Location::Sqlite(folder.path().join("halo.db"));
    let embedder = || embedder.map(|e| Box::new(Quick(e.clone())) as Box<dyn Embedder + Send>);
    let rules = Rules { dates: false, ..rules.clone() };
    {
        let mut store = Database::open(&location)?;
        let all = history as u64;
        let paragraphs = prose::paragraphs(history / 60 + 2);
        let two = |two: &[String]| (two[0].trim_end().to_owned(), two[1].trim_end().to_owned());
        let said = paragraphs.chunks_exact(2).map(two);
        history::make(&mut store, &mut model.clone(), &rules, said, history, &mut |done| {
            progress(done, all);
        })?;
    }
    let mut store = Database::open(&location)?;
    if let Some(embedder) = embedder() {
        history::index(&mut store, embedder, progress)?;
    }
    drop(store);
    let store = Box::new(Database::open(&location)?);
    let mut session = Session::open(store, Box::new(model.clone()), embedder(), NAME, rules, &mut |_, _| {})?;
    let live = session.live();
    let (mut first, mut done) = (Vec::new(), Vec::new());
    for turn in 0..MESSAGES.len() + TURNS {
        progress(turn as u64, (MESSAGES.len() + TURNS) as u64);
        let message = MESSAGES[turn % MESSAGES.len()];
        let begin = Instant::now();
        let mut heard = None;
        let summary = session.say(message, TODAY, &mut |event| {
            if matches!(event, Event::Token { .. }) {
                heard.get_or_insert_with(|| begin.elapsed().as_secs_f64() * 1e3);
            }
            Flow::Continue
        })?;
        if turn >= MESSAGES.len() {
            first.extend(heard);
            done.push(summary);
        }
    }
    let per_turn = |of: &dyn Fn(&Summary) -> f64| middle(&mut done.iter().map(of).collect::<Vec<_>>());
    Ok(Report {
        history,
        live,
        first_token_ms: middle(&mut first),
        tokens: per_turn(&|s| s.tokens as f64),
        returned: per_turn(&|s| s.returned as f64),
        stages: Stage::ALL.map(|stage| (stage, per_turn(&|s| s.took(stage).as_secs_f64() * 1e3))).to_vec(),
    })
}

/// What is asked, of what was said by rote.
const MESSAGES: [&str; 5] = [
    "What did the man from the post office bring?",
    "Who was the stranger in the grey coat?",
    "Tell me more about Doctor Weiss.",
    "Where did my neighbour Anna go in the end?",
    "Did the youngest of the three sisters say why?",
];

/// A model that takes no time: it says words by rote, and looks at a window as real ones do, at a few tokens much and at
/// most of them hardly.
#[derive(Clone)]
pub struct Rote {
    words: ScriptedModel,
    /// What it looks at, by slot, and the sums of that.
    weights: Vec<f32>,
    sums: Vec<f32>,
}

impl Rote {
    /// One that sees so many tokens.
    #[must_use]
    pub fn new(context: usize) -> Self {
        let mut dice = Dice(11);
        // One token in twelve lies above the mean.
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
        Self { words: ScriptedModel::new(context, Vec::new()), weights, sums }
    }
}

impl Model for Rote {
    fn info(&self) -> &ModelInfo {
        self.words.info()
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<Piece>, SeamError> {
        self.words.tokenize(text, special)
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        _watch: &Watch,
        listen: &mut dyn FnMut(ModelStep<'_>) -> Flow,
    ) -> Result<Finish, SeamError> {
        let text = prose::paragraphs(sampling.max_tokens / 50 + 1).concat();
        let pieces = self.words.tokenize(&text, false)?;
        for (step, piece) in pieces.iter().take(sampling.max_tokens).enumerate() {
            let seen = prompt.window.len() + step;
            let sum = self.sums[seen - 1];
            let row: Vec<f32> = self.weights[..seen].iter().map(|weight| weight / sum).collect();
            if listen(ModelStep::Token(piece, Some(Look::of(&row)))) == Flow::Stop {
                return Ok(Finish::Aborted);
            }
        }
        Ok(Finish::Length)
    }
}
