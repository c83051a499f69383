//! Synthetic conversations of any length: each message and answer is on the timeline and in the store, without a
//! model.

use halo_core::Error;
use halo_core::change::Change;
use halo_core::embedder::{Embedder, EmbedderInfo};
use halo_core::model::{Model, ModelToken, StepFlow};
use halo_core::prune::plan_prune;
use halo_core::store::{Access, Durability, RecordKind, Store};
use halo_core::token::{ContentKind, Role};
use halo_engine::chat_format::{self, ChatFormatter, SpeakerNames};
use halo_engine::rules::ConversationRules;
use halo_engine::session::TEMPLATE_KEY;
use halo_recall::recall::Recall;

pub(crate) const CONVERSATION: &str = "bench";

/// Tokens above the budget before pruning is planned: planning every turn would only take time.
const PRUNE_SLACK: usize = 4000;

/// Creates a conversation of so many tokens from these messages and answers. Chunks are pruned by the policy of the
/// rules.
pub(crate) fn build_history(
    store: &mut dyn Store,
    model: &mut dyn Model,
    rules: &ConversationRules,
    messages: impl Iterator<Item = (String, String)>,
    tokens: usize,
    progress: &mut dyn FnMut(u64),
) -> Result<(), Error> {
    let frame = ChatFormatter {
        template: model.info().template.clone(),
        system_prompt: rules.system_prompt.clone(),
        show_dates: false,
        names: SpeakerNames::default(),
    };
    let prefix = frame.preamble().tokenize(model)?.len();
    let budget = rules.token_budget(model.info().context).unwrap_or(model.info().context);
    let mut timeline = store.load(CONVERSATION, Access::Write)?;
    let mut before = None;
    for (message, answer) in messages {
        for (role, text) in [(Role::User, &message), (Role::Assistant, &answer)] {
            let opening = frame.turn_header(role, before, None).tokenize(model)?;
            let content = model.tokenize(text, false)?;
            let with_kind =
                |pieces: Vec<ModelToken>, kind| pieces.into_iter().map(move |piece| (piece, kind));
            let written = with_kind(opening, ContentKind::Template)
                .chain(with_kind(content, ContentKind::Message))
                .collect();
            let append = chat_format::plan_append(&timeline, role, written, &rules.context);
            store.transact(CONVERSATION, &mut timeline, &Change::Append(append), Durability::Deferred)?;
            before = Some(role);
        }
        let over = timeline.live_len() + prefix > budget + PRUNE_SLACK.min(budget);
        let last = timeline.len() >= tokens;
        if over || last {
            let plan = plan_prune(timeline.context_window(prefix), &rules.context.prune_rules(budget, None));
            if let Some(change) = plan.change() {
                store.transact(CONVERSATION, &mut timeline, &change, Durability::Deferred)?;
                timeline.unload_pruned();
            }
        }
        progress(timeline.len() as u64);
        if last {
            break;
        }
    }
    store.set_model(CONVERSATION, &model.info().name)?;
    store.put_record(
        CONVERSATION,
        RecordKind::Setting,
        TEMPLATE_KEY,
        Some(&ChatFormatter::fingerprint(&frame.template)),
    )
}

pub(crate) fn embed_history(
    store: &mut dyn Store,
    embedder: Box<dyn Embedder + Send>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), Error> {
    let timeline = store.load(CONVERSATION, Access::Read)?;
    let mut recall = Recall::open(store, CONVERSATION, &timeline, Some(embedder))?;
    let all = recall.index().missing_vectors() as u64;
    let mut made = 0;
    while recall.index().missing_vectors() > 0 {
        recall.embed_pending(store, &timeline, 64, &mut |n| {
            made += n as u64;
            progress(made, all);
            StepFlow::Continue
        })?;
    }
    Ok(())
}

/// An embedder that takes time for a query, and none for stored chunks: their vectors are random.
#[derive(Clone)]
pub(crate) struct RandomPassageEmbedder<E>(pub E);

impl<E: Embedder> Embedder for RandomPassageEmbedder<E> {
    fn count_tokens(&mut self, texts: &[&str]) -> Result<Vec<usize>, Error> {
        self.0.count_tokens(texts)
    }

    fn info(&mut self) -> Result<EmbedderInfo, Error> {
        self.0.info()
    }

    fn embed(&mut self, texts: &[&str]) -> Result<Vec<Vec<f32>>, Error> {
        self.0.embed(texts)
    }

    fn embed_in_background(
        &mut self,
        texts: Vec<String>,
        listen: &mut dyn FnMut(usize, Vec<f32>) -> StepFlow,
    ) -> Result<(), Error> {
        let dimensions = self.info()?.dimensions;
        for (number, text) in texts.iter().enumerate() {
            let mut dice = crate::random_changes::BenchRng(xxhash_rust::xxh3::xxh3_64(text.as_bytes()));
            let mut vector: Vec<f32> = (0..dimensions).map(|_| dice.below(2001) as f32 - 1000.0).collect();
            let norm = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
            vector.iter_mut().for_each(|x| *x /= norm);
            if listen(number, vector) == StepFlow::Stop {
                break;
            }
        }
        Ok(())
    }
}
