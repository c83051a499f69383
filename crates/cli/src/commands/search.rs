//! `halo search` and `halo index`: what was said, and the vectors that find it by its meaning.

use super::progress::Progress;
use super::show::{Which, existing};
use super::{count, print, print_json, shorten};
use crate::settings::Settings;
use crate::settings::value::RecallMode;
use crate::{Common, models, say};
use anyhow::{Result, bail};
use halo_core::seams::{Access, Embedder, Flow, Store};
use halo_core::timeline::Timeline;
use halo_recall::embed::Embeddings;
use halo_recall::rank::{Found, Mode};
use halo_recall::recall::{Manner, Recall};
use halo_store::database::Database;
use serde_json::{Value, json};
use std::fmt::Write;

/// As many chunks are embedded between two commits: what is lost by stopping in between is a fraction of a second's work.
const BITE: usize = 8;
/// So many vectors are made without asking; more are told of first.
const FEW: usize = 200;

/// What to search for.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    which: Which,
    /// What is searched for: a question, words, anything
    #[arg(value_name = "QUERY", required = true)]
    query: Vec<String>,
    /// How many chunks to find
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=100_000))]
    most: usize,
    /// Searches with the vectors that are there, and makes no others
    #[arg(long)]
    as_is: bool,
}

/// What to index.
#[derive(clap::Args)]
pub struct IndexOptions {
    #[command(flatten)]
    which: Which,
}

/// How the settings have it searched.
pub fn manner(settings: &Settings, most: usize) -> Manner {
    Manner {
        mode: match settings.recall_mode {
            RecallMode::Hybrid => Mode::Hybrid,
            RecallMode::Dense => Mode::Dense,
            RecallMode::Lexical => Mode::Lexical,
        },
        user_boost: settings.user_boost.0,
        diversity: settings.recall_diversity.0,
        most,
    }
}

/// The embedder, if it is here.
pub fn embedder(common: &Common, settings: &Settings) -> Result<Option<Embeddings>> {
    let folder = models::embedder(common, settings.recall_embedder.text())?;
    Ok(folder.map(|folder| Embeddings::new(folder, common.threads())).transpose()?)
}

fn boxed(embedder: Embeddings) -> Box<dyn Embedder + Send> {
    Box::new(embedder)
}

/// Searches a conversation.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    let (query, name) = (options.query.join(" "), &options.which.name);
    if query.trim().is_empty() {
        bail!("there is nothing to search for: write a question, or some words");
    }
    let lexical = settings.recall_mode == RecallMode::Lexical;
    let embedder = if lexical { None } else { embedder(common, &settings)? };
    if embedder.is_none() && !lexical {
        say("no embedder is here: this goes by words alone; `halo models pull` fetches one");
    }
    let (mut store, timeline) = existing(common, name, Access::Read)?;
    let mut recall = Recall::open(&mut store, name, &timeline, embedder.map(boxed))?;
    if recall.index().missing() > 0 && !options.as_is {
        // To look at a conversation needs no more than reading; to keep vectors does.
        store = common.open_store()?;
        embed(&mut recall, &mut store, &timeline)?;
    }
    let today = jiff::Zoned::now().date();
    let found = recall.search(&query, Some(today), manner(&settings, options.most))?;
    if common.json {
        let missing = recall.index().missing();
        let hits: Vec<Value> = found.iter().map(|f| as_json(f, &timeline, &recall)).collect();
        let mode = if recall.has_meaning() { settings.recall_mode.to_string() } else { "lexical".into() };
        return print_json(&json!({ "query": query, "mode": mode, "missing": missing, "found": hits }));
    }
    if found.is_empty() {
        return print("nothing was said in this conversation yet\n");
    }
    if found.iter().all(|found| found.words.is_empty()) {
        say("nothing that was said has these words; this is what comes nearest");
    }
    print(&found.iter().map(|f| line(f, &timeline, &recall)).collect::<String>())
}

/// Makes the vectors that are missing.
pub fn index(options: &IndexOptions, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    let name = &options.which.name;
    existing(common, name, Access::Read)?;
    let Some(embedder) = embedder(common, &settings)? else {
        bail!("no embedder is here: `halo models pull` fetches one");
    };
    let mut store = common.open_store()?;
    let timeline = store.load(name, Access::Read)?;
    let mut recall = Recall::open(&mut store, name, &timeline, Some(boxed(embedder)))?;
    let made = embed(&mut recall, &mut store, &timeline)?;
    let (chunks, bytes) = (recall.index().len(), recall.index().memory());
    if common.json {
        return print_json(&json!({ "conversation": name, "chunks": chunks, "made": made, "bytes": bytes }));
    }
    print(&format!("{} can be found; {} made\n", count(chunks as u64, "chunk"), count(made as u64, "vector")))
}

/// Makes the vectors that are missing, a few at a time; whoever stops it loses a second's work.
pub fn embed(recall: &mut Recall, store: &mut dyn Store, timeline: &Timeline) -> Result<usize> {
    let missing = recall.index().missing();
    if missing > FEW {
        say(&format!(
            "{} to make: stop it whenever you like, what is made is kept and `halo index` goes on",
            count(missing as u64, "vector")
        ));
    }
    let bar = Progress::new("embedding", missing as u64);
    let mut made = 0;
    loop {
        let done = recall.embed_some(store, timeline, BITE, &mut |n| {
            made += n;
            bar.at(made as u64);
            Flow::Continue
        })?;
        if done.missing == 0 || done.made == 0 {
            return Ok(made);
        }
    }
}

/// Makes the vectors of conversations that have just come in, if there is an embedder.
pub fn embed_arrivals(
    store: &mut Database,
    names: &[String],
    common: &Common,
    settings: &Settings,
) -> Result<()> {
    // Who has none is told what is missing when they search.
    let Some(embedder) = embedder(common, settings)? else { return Ok(()) };
    for name in names {
        let timeline = store.load(name, Access::Read)?;
        let mut recall = Recall::open(store, name, &timeline, Some(boxed(embedder.clone())))?;
        embed(&mut recall, store, &timeline)?;
    }
    Ok(())
}

fn as_json(found: &Found, timeline: &Timeline, recall: &Recall) -> Value {
    let chunk = timeline.chunk(found.hit.chunk);
    let points: serde_json::Map<String, Value> =
        found.points.iter().map(|(scale, points)| (scale.name().into(), json!(points))).collect();
    json!({
        "chunk": found.hit.chunk.to_string(),
        "score": found.hit.score,
        "live": chunk.is_some_and(|c| c.is_live()),
        "text": recall.index().text(timeline, found.hit.chunk),
        "words": found.words,
        "near": found.near[0],
        "near_in_place": found.near[1],
        "rank_by_words": found.ranks[0],
        "rank_by_meaning": found.ranks[1],
        "points": points,
    })
}

fn line(found: &Found, timeline: &Timeline, recall: &Recall) -> String {
    let id = found.hit.chunk;
    let live = timeline.chunk(id).is_some_and(|c| c.is_live());
    let mut out = format!(
        "{:<8} {:>5.2}  {}  {}\n",
        id.to_string(),
        found.hit.score,
        if live { "live" } else { "dead" },
        shorten(recall.index().text(timeline, id), 160)
    );
    let _ = writeln!(out, "{:<16}{}", "", found.because(4));
    out
}
