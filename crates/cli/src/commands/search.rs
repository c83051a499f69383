//! `halo search` and `halo index`: search, and the embeddings that it needs.

use super::conversations::{ConversationArgs, open_existing};
use crate::env::Env;
use crate::output::{pluralize, print_json, print_notice, print_stdout, truncate_line};
use crate::progress::Progress;
use crate::settings::Settings;
use crate::wiring::{open_embedder, search_options};
use anyhow::{Result, bail};
use halo_core::embedder::Embedder;
use halo_core::model::StepFlow;
use halo_core::store::{Access, Store};
use halo_core::timeline::Timeline;
use halo_recall::embed::EmbedderHandle;
use halo_recall::rank::{RankedChunk, SearchMode};
use halo_recall::recall::{Recall, SearchOptions};
use halo_store::database::Database;
use serde_json::{Value, json};
use std::fmt::Write;

/// Chunks that are embedded between two commits: stopping in between loses a fraction of a second of work.
const EMBED_BATCH: usize = 8;
/// More missing embeddings than this are announced before they are created.
const EMBED_NOTICE_THRESHOLD: usize = 200;

#[derive(clap::Args)]
pub struct SearchArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Search query: a question or keywords
    #[arg(value_name = "QUERY", required = true)]
    query: Vec<String>,
    /// Maximum number of results
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=100_000))]
    limit: usize,
    /// Do not create missing embeddings first
    #[arg(long)]
    no_index: bool,
}

#[derive(clap::Args)]
pub struct IndexArgs {
    #[command(flatten)]
    conversation: ConversationArgs,
}

fn boxed_embedder(embedder: EmbedderHandle) -> Box<dyn Embedder + Send> {
    Box::new(embedder)
}

pub fn run(options: &SearchArgs, env: &Env) -> Result<()> {
    let settings = env.load_settings()?.settings;
    let (query, name) = (options.query.join(" "), &options.conversation.name);
    if query.trim().is_empty() {
        bail!("the query is empty: write a question or keywords");
    }
    let lexical = settings.recall_mode == SearchMode::Lexical;
    let embedder = if lexical { None } else { open_embedder(env, &settings)? };
    if embedder.is_none() && !lexical {
        print_notice("no embedder is installed: searching by words only; `halo models pull` downloads one");
    }
    let (mut store, timeline) = open_existing(env, name, Access::Read)?;
    let mut recall = Recall::open(&mut store, name, &timeline, embedder.map(boxed_embedder))?;
    if recall.index().missing_vectors() > 0 && !options.no_index {
        // Searching needs read access only; storing embeddings needs write access.
        store = env.open_store()?;
        embed_missing(&mut recall, &mut store, &timeline)?;
    }
    let today = jiff::Zoned::now().date();
    let search_options = search_options(&settings, options.limit);
    let hits = recall.search(&query, Some(today), search_options)?;
    if env.json {
        let missing = recall.index().missing_vectors();
        let hits: Vec<Value> =
            hits.iter().map(|f| hit_json(f, &timeline, &recall, &search_options)).collect();
        let mode = if recall.has_embedder() { settings.recall_mode.to_string() } else { "lexical".into() };
        return print_json(&json!({ "query": query, "mode": mode, "missing": missing, "found": hits }));
    }
    if hits.is_empty() {
        return print_stdout("this conversation is empty\n");
    }
    if hits.iter().all(|hit| hit.matched_terms.is_empty()) {
        print_notice("no text contains these words; these are the nearest results");
    }
    print_stdout(&hits.iter().map(|f| hit_text(f, &timeline, &recall, &search_options)).collect::<String>())
}

/// So many hits are shown within a chat.
const SHOWN_IN_CHAT: usize = 8;

/// The hits in a conversation that is open. What was not embedded yet is found by its words.
pub fn search_page(env: &Env, settings: &Settings, name: &str, query: &str) -> Result<String> {
    if query.trim().is_empty() {
        bail!("write what to search for: /search TEXT");
    }
    let lexical = settings.recall_mode == SearchMode::Lexical;
    let embedder = if lexical { None } else { open_embedder(env, settings)? };
    let (mut store, timeline) = open_existing(env, name, Access::Read)?;
    let mut recall = Recall::open(&mut store, name, &timeline, embedder.map(boxed_embedder))?;
    let options = search_options(settings, SHOWN_IN_CHAT);
    let hits = recall.search(query, Some(jiff::Zoned::now().date()), options)?;
    Ok(hits.iter().map(|f| hit_text(f, &timeline, &recall, &options)).collect())
}

pub fn index(options: &IndexArgs, env: &Env) -> Result<()> {
    let settings = env.load_settings()?.settings;
    let name = &options.conversation.name;
    open_existing(env, name, Access::Read)?;
    let Some(embedder) = open_embedder(env, &settings)? else {
        bail!("no embedder is installed: `halo models pull` downloads one");
    };
    let mut store = env.open_store()?;
    let timeline = store.load(name, Access::Read)?;
    let mut recall = Recall::open(&mut store, name, &timeline, Some(boxed_embedder(embedder)))?;
    let created = embed_missing(&mut recall, &mut store, &timeline)?;
    let (chunks, bytes) = (recall.index().len(), recall.index().memory_bytes());
    if env.json {
        return print_json(
            &json!({ "conversation": name, "chunks": chunks, "made": created, "bytes": bytes }),
        );
    }
    print_stdout(&format!(
        "{} can be found; {} made\n",
        pluralize(chunks as u64, "chunk"),
        pluralize(created as u64, "vector")
    ))
}

/// Creates missing embeddings in batches; stopping it loses at most a second of work.
pub fn embed_missing(recall: &mut Recall, store: &mut dyn Store, timeline: &Timeline) -> Result<usize> {
    let missing = recall.index().missing_vectors();
    if missing > EMBED_NOTICE_THRESHOLD {
        print_notice(&format!(
            "{} to create: stop at any time, finished embeddings are kept and `halo index` resumes",
            pluralize(missing as u64, "vector")
        ));
    }
    let bar = Progress::new("embedding", missing as u64);
    let mut created = 0;
    loop {
        let done = recall.embed_pending(store, timeline, EMBED_BATCH, &mut |n| {
            created += n;
            bar.set_position(created as u64);
            StepFlow::Continue
        })?;
        if done.missing == 0 || done.embedded == 0 {
            return Ok(created);
        }
    }
}

/// Creates the embeddings of imported conversations, if there is an embedder.
pub fn embed_imported(store: &mut Database, names: &[String], env: &Env, settings: &Settings) -> Result<()> {
    // Without an embedder, `halo search` says what is missing.
    let Some(embedder) = open_embedder(env, settings)? else { return Ok(()) };
    for name in names {
        let timeline = store.load(name, Access::Read)?;
        let mut recall = Recall::open(store, name, &timeline, Some(boxed_embedder(embedder.clone())))?;
        embed_missing(&mut recall, store, &timeline)?;
    }
    Ok(())
}

fn hit_json(ranked: &RankedChunk, timeline: &Timeline, recall: &Recall, options: &SearchOptions) -> Value {
    let chunk = timeline.chunk(ranked.hit.chunk);
    let points: serde_json::Map<String, Value> =
        ranked.feature_scores.iter().map(|(scale, points)| (scale.name().into(), json!(points))).collect();
    json!({
        "chunk": ranked.hit.chunk.to_string(),
        "score": ranked.hit.score,
        "relevance": ranked.relevance,
        "below_floor": !options.is_relevant(ranked),
        "live": chunk.is_some_and(|c| c.is_live()),
        "text": recall.index().text(timeline, ranked.hit.chunk),
        "words": ranked.matched_terms,
        "near": ranked.similarity[0],
        "near_in_place": ranked.similarity[1],
        "rank_by_words": ranked.ranks[0],
        "rank_by_meaning": ranked.ranks[1],
        "points": points,
    })
}

fn hit_text(ranked: &RankedChunk, timeline: &Timeline, recall: &Recall, options: &SearchOptions) -> String {
    let id = ranked.hit.chunk;
    let live = timeline.chunk(id).is_some_and(|c| c.is_live());
    let mut out = format!(
        "{:<8} {:>5.2}  {:>3.0} %  {}  {}\n",
        id.to_string(),
        ranked.hit.score,
        100.0 * ranked.relevance,
        if live { "live" } else { "dead" },
        truncate_line(recall.index().text(timeline, id), 160)
    );
    let below = if options.is_relevant(ranked) { "" } else { "below resurrect.floor · " };
    let _ = writeln!(out, "{:<16}{below}{}", "", ranked.explain(4));
    out
}
