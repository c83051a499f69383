//! Conversations of any length, made by rote: each message and answer is on the timeline and in the store as if it had
//! been spoken, and no model had to read it.

use halo_core::change::Change;
use halo_core::prune::plan_prune;
use halo_core::seams::{
    Access, Durability, Embedder, EmbedderInfo, Flow, Kind, Model, Piece, SeamError, Store,
};
use halo_core::token::{Role, Voice};
use halo_engine::frame::{self, Frame, Names};
use halo_engine::rules::Rules;
use halo_engine::session::TEMPLATE;
use halo_recall::recall::Recall;

/// What the conversation is called.
pub(crate) const NAME: &str = "bench";

/// How many tokens more than may stay there are before some leave: a plan a turn would only take time.
const SLACK: usize = 4000;

/// Makes a conversation of so many tokens of these messages and answers. What the window cannot hold has left by the rules'
/// own policy.
pub(crate) fn make(
    store: &mut dyn Store,
    model: &mut dyn Model,
    rules: &Rules,
    said: impl Iterator<Item = (String, String)>,
    tokens: usize,
    progress: &mut dyn FnMut(u64),
) -> Result<(), SeamError> {
    let frame = Frame {
        template: model.info().template.clone(),
        system: rules.system.clone(),
        dates: false,
        names: Names::default(),
    };
    let prefix = model.tokenize(&frame.before_all(), true)?.len();
    let budget = rules.budget().unwrap_or(model.info().context);
    let mut timeline = store.load(NAME, Access::Write)?;
    let mut before = None;
    for (message, answer) in said {
        for (role, text) in [(Role::User, &message), (Role::Assistant, &answer)] {
            let opening = model.tokenize(&frame.opening(role, before, None), true)?;
            let said = model.tokenize(text, false)?;
            let voiced = |pieces: Vec<Piece>, voice| pieces.into_iter().map(move |piece| (piece, voice));
            let written = voiced(opening, Voice::Frame).chain(voiced(said, Voice::Speaker)).collect();
            let append = frame::append(&timeline, role, written, &rules.context);
            store.transact(NAME, &mut timeline, &Change::Append(append), Durability::Behind)?;
            before = Some(role);
        }
        let over = timeline.live_len() + prefix > budget + SLACK.min(budget);
        let last = timeline.len() >= tokens;
        if over || last {
            let plan = plan_prune(timeline.view(prefix), &rules.context.prune(budget, None));
            if let Some(change) = plan.change() {
                store.transact(NAME, &mut timeline, &change, Durability::Behind)?;
                timeline.release_dead();
            }
        }
        progress(timeline.len() as u64);
        if last {
            break;
        }
    }
    store.set_model(NAME, &model.info().name)?;
    store.put_record(NAME, Kind::Setting, TEMPLATE, Some(&Frame::fingerprint(&frame.template)))
}

/// Makes all vectors that are missing.
pub(crate) fn index(
    store: &mut dyn Store,
    embedder: Box<dyn Embedder + Send>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), SeamError> {
    let timeline = store.load(NAME, Access::Read)?;
    let mut recall = Recall::open(store, NAME, &timeline, Some(embedder))?;
    let all = recall.index().missing() as u64;
    let mut made = 0;
    while recall.index().missing() > 0 {
        recall.embed_some(store, &timeline, 64, &mut |n| {
            made += n as u64;
            progress(made, all);
            Flow::Continue
        })?;
    }
    Ok(())
}

/// An embedder that takes its time for a query, and none for what only has to be searched through: those vectors are
/// drawn by lot.
#[derive(Clone)]
pub(crate) struct Quick<E>(pub E);

impl<E: Embedder> Embedder for Quick<E> {
    fn info(&mut self) -> Result<EmbedderInfo, SeamError> {
        self.0.info()
    }

    fn embed(&mut self, texts: &[&str]) -> Result<Vec<Vec<f32>>, SeamError> {
        self.0.embed(texts)
    }

    fn embed_behind(
        &mut self,
        texts: Vec<String>,
        listen: &mut dyn FnMut(usize, Vec<f32>) -> Flow,
    ) -> Result<(), SeamError> {
        let dimensions = self.info()?.dimensions;
        for (number, text) in texts.iter().enumerate() {
            let mut dice = crate::lives::Dice(xxhash_rust::xxh3::xxh3_64(text.as_bytes()));
            let mut vector: Vec<f32> = (0..dimensions).map(|_| dice.below(2001) as f32 - 1000.0).collect();
            let norm = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
            vector.iter_mut().for_each(|x| *x /= norm);
            if listen(number, vector) == Flow::Stop {
                break;
            }
        }
        Ok(())
    }
}
