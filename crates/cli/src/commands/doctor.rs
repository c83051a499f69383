//! `halo doctor`: what is wrong, how to mend it, and mending it.

use super::progress::Progress;
use super::{count, print, print_json, search};
use crate::disk::free_space;
use crate::{Common, models, printable, there};
use anyhow::{Result, bail};
use halo_core::seams::{Access, Store, Worlds};
use halo_engine::world::realm;
use halo_llama::graveyard::{self, Found};
use halo_recall::recall::Recall;
use halo_store::database::{Database, Location};
use halo_store::doctor::Finding;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write;

/// How far to go.
#[derive(clap::Args)]
pub struct Options {
    /// Mends what is wrong, after a copy of how it was
    #[arg(long)]
    fix: bool,
}

/// Less free space than this is worth a word.
const LITTLE: u64 = 1 << 30;

/// More tokens than this in a window mean that too little leaves it.
const CROWDED: u64 = 50_000;

/// Examines the store, and mends it where that is asked for.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    let location = common.location()?;
    let free = match &location {
        Location::Sqlite(path) => free_space(path),
        Location::Postgres(_) => None,
    };
    let (mut mended, mut backup): (Vec<String>, Option<String>) = (Vec::new(), None);
    if let Location::Sqlite(path) = &location {
        if !there(path)? {
            let nothing = json!({ "store": location.to_string(), "conversations": 0, "findings": [] });
            return if common.json {
                print_json(&nothing)
            } else {
                print("nothing was kept yet: all is well\n")
            };
        }
        let damaged =
            Database::open(&location).err().map(|e| e.to_string()).filter(|e| e.contains("`halo doctor`"));
        match damaged {
            Some(_) if options.fix => {
                backup = Some(Database::revive(path)?.display().to_string());
                mended.push("the first page of the file was made anew".into());
            }
            Some(why) => {
                let why = why.split("; `halo doctor`").next().unwrap_or_default();
                if common.json {
                    let finding = json!({ "conversation": null, "what": why, "mending": "makes the first page anew, if that helps" });
                    print_json(
                        &json!({ "store": location.to_string(), "free_bytes": free, "findings": [finding] }),
                    )?;
                }
                bail!(
                    "{why}; `halo doctor --fix` makes its first page anew, if that helps, and keeps the old file"
                );
            }
            None => {}
        }
    }
    let mut store = Database::open(&location)?;
    let bytes = store.bytes()?;
    let bar = Progress::new("examining", 1);
    let mut findings = store.examine(&mut |done, all| bar.of(done as u64, all as u64))?;
    drop(bar);
    if options.fix && !findings.is_empty() {
        let (copy, done) = store.mend(&findings)?;
        backup = backup.or(copy);
        mended.extend(done);
        drop(store);
        store = Database::open(&location)?;
        findings = store.examine(&mut |_, _| {})?;
    }
    let known = store.conversations().unwrap_or_default();
    let names: Vec<String> = known.iter().map(|one| one.name.clone()).collect();
    let conversations = names.len();
    let mut beside = Beside::look(common, options.fix)?;
    let crowded = known.into_iter().filter(|one| one.live > CROWDED);
    beside.crowded = crowded.map(|one| (one.name, one.live)).collect();
    if findings.is_empty() {
        beside.look_at_index(common, &mut store, &names)?;
    }
    let worlds = store.worlds().unwrap_or_default();
    for world in &worlds {
        let why = realm::look(&mut store, &world.name).err();
        beside.worlds.extend(why.map(|why| (world.name.clone(), why.why)));
    }
    if common.json {
        let found = findings
            .iter()
            .map(|f| json!({ "conversation": f.conversation, "what": f.what, "mending": f.mending }));
        print_json(&json!({
            "store": location.to_string(),
            "conversations": conversations,
            "worlds": worlds.len(),
            "worlds_damaged": beside.worlds.iter().cloned().collect::<BTreeMap<_, _>>(),
            "bytes": bytes,
            "free_bytes": free,
            "findings": found.collect::<Vec<_>>(),
            "mended": mended,
            "backup": backup,
            "model": beside.model,
            "embedder": beside.embedder,
            "index_missing": beside.missing.iter().cloned().collect::<BTreeMap<_, _>>(),
            "crowded": beside.crowded.iter().cloned().collect::<BTreeMap<_, _>>(),
            "kv": {
                "pieces": beside.kv.pieces,
                "bytes": beside.kv.bytes,
                "damaged": beside.kv.damaged.len(),
                "removed": beside.removed,
            },
        }))?;
    } else {
        let kept = (conversations, worlds.len());
        print(&told(&location, kept, bytes, free, &findings, &mended, backup.as_deref()))?;
        print(&beside.told())?;
    }
    match findings.len() {
        0 if !beside.worlds.is_empty() => {
            bail!("{} cannot be opened", count(beside.worlds.len() as u64, "world"))
        }
        0 => Ok(()),
        n if options.fix => bail!("{} could not be mended", count(n as u64, "fault")),
        n => bail!(
            "{} found: `halo doctor --fix` makes a copy and mends what can be mended",
            count(n as u64, "fault")
        ),
    }
}

/// What stands beside the store: the models, what search goes through, and what models keep of the dead.
#[derive(Default)]
struct Beside {
    /// The file of the model that would speak, or why there is none.
    model: Option<String>,
    model_fault: Option<String>,
    /// The folder of the embedder.
    embedder: Option<String>,
    /// By conversation: chunks that search cannot find by their meaning yet.
    missing: Vec<(String, usize)>,
    /// Worlds that cannot be opened, and why.
    worlds: Vec<(String, String)>,
    /// And those with very much in the window.
    crowded: Vec<(String, u64)>,
    kv: Found,
    removed: usize,
}

impl Beside {
    fn look(common: &Common, fix: bool) -> Result<Self> {
        let mut beside = Self::default();
        match models::find(common, common.model.as_deref()) {
            Ok(path) => {
                beside.model = Some(path.display().to_string());
                beside.model_fault = halo_llama::gguf::read(&path).err().map(|why| why.to_string());
            }
            Err(why) => beside.model_fault = Some(why.to_string()),
        }
        let settings = common.load(Vec::new())?.settings;
        let folder = models::embedder(common, settings.recall_embedder.text()).ok().flatten();
        beside.embedder = folder.map(|folder| folder.display().to_string());
        if let Some(data) = common.data_folder() {
            let bar = Progress::new("examining the KV graveyard", 0);
            beside.kv = graveyard::examine(&data.join("kv"));
            drop(bar);
        }
        if fix {
            beside.removed =
                beside.kv.damaged.iter().filter(|file| std::fs::remove_file(file).is_ok()).count();
        }
        Ok(beside)
    }

    fn look_at_index(&mut self, common: &Common, store: &mut Database, names: &[String]) -> Result<()> {
        let settings = common.load(Vec::new())?.settings;
        // One embedder for all of them: it is loaded when it is first asked.
        let Some(embedder) = search::embedder(common, &settings)? else { return Ok(()) };
        for name in names {
            let timeline = store.load(name, Access::Read)?;
            let recall = Recall::open(store, name, &timeline, Some(Box::new(embedder.clone())))?;
            self.missing.extend(Some(recall.index().missing()).filter(|&n| n > 0).map(|n| (name.clone(), n)));
        }
        Ok(())
    }

    fn told(&self) -> String {
        let mut out = String::new();
        match (&self.model, &self.model_fault) {
            (Some(path), None) => drop(writeln!(out, "model  {path}")),
            (Some(path), Some(why)) => {
                let _ = writeln!(
                    out,
                    "wrong  the model {path}: {why}\n       `halo models pull` brings it again"
                );
            }
            (None, why) => {
                let _ = writeln!(
                    out,
                    "model  none: {}",
                    why.as_deref().unwrap_or("`halo models pull` brings one")
                );
            }
        }
        match &self.embedder {
            Some(path) => drop(writeln!(out, "search by meaning and words, with {path}")),
            None => out.push_str("search by words alone: `halo models pull` brings an embedder\n"),
        }
        for (name, missing) in &self.missing {
            let missing = count(*missing as u64, "chunk");
            let _ = writeln!(
                out,
                "       {missing} of '{}' cannot be found by meaning yet: `halo index` mends that",
                printable(name)
            );
        }
        for (name, why) in &self.worlds {
            let _ = writeln!(
                out,
                "wrong  the world '{}': {}\n       bring back a copy of it, if there is one; `halo rooms end` ends it",
                printable(name),
                printable(why)
            );
        }
        for (name, live) in &self.crowded {
            let _ = writeln!(
                out,
                "       '{}' has {live} tokens in the window, more than {CROWDED}: too little leaves it; a lower \
                 context.max_tokens mends that",
                printable(name)
            );
        }
        let Found { pieces, bytes, damaged } = &self.kv;
        let pieces = count(*pieces as u64, "piece");
        let _ = writeln!(out, "kv     {pieces} of what has left, {}", indicatif::HumanBytes(*bytes));
        if self.removed > 0 {
            let _ = writeln!(
                out,
                "mended {} removed: what they held is computed again",
                count(self.removed as u64, "damaged file")
            );
        } else if !damaged.is_empty() {
            let damaged = count(damaged.len() as u64, "damaged file");
            let _ = writeln!(
                out,
                "       {damaged}: never used, and what they held is computed again; --fix removes them"
            );
        }
        out
    }
}

fn told(
    location: &Location,
    (conversations, worlds): (usize, usize),
    bytes: u64,
    free: Option<u64>,
    findings: &[Finding],
    mended: &[String],
    backup: Option<&str>,
) -> String {
    let mut out = String::new();
    let size = indicatif::HumanBytes(bytes);
    let conversations = count(conversations as u64, "conversation");
    let worlds = if worlds == 0 { String::new() } else { format!(", {}", count(worlds as u64, "world")) };
    let _ = writeln!(out, "store  {location}: {conversations}{worlds}, {size}");
    if let Some(free) = free {
        let word = if free < LITTLE { ": that is little" } else { "" };
        let _ = writeln!(out, "disk   {} free{word}", indicatif::HumanBytes(free));
    }
    for line in mended {
        let _ = writeln!(out, "mended {}", printable(line));
    }
    if let Some(backup) = backup {
        let _ = writeln!(out, "as it was: {backup}");
    }
    for f in findings {
        let whose = f.conversation.as_ref().map_or_else(|| "the store".into(), |c| format!("'{c}'"));
        let _ =
            writeln!(out, "wrong  {}: {}\n       --fix {}", printable(&whose), printable(&f.what), f.mending);
    }
    if findings.is_empty() {
        out.push_str("all is well: every sum, every name, and each log leads to its state\n");
    }
    out
}
