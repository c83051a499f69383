//! `halo doctor`: checks the store, the models, the search index and the KV archive for damage, and repairs it.

use crate::disk::free_space;
use crate::env::{Env, store_exists};
use crate::output::{pluralize, print_json, print_notice, print_stdout, sanitize_terminal_text};
use crate::progress::Progress;
use crate::settings::Settings;
use crate::wiring;
use anyhow::{Result, bail};
use halo_core::ErrorKind;
use halo_core::row_store::RowStore;
use halo_core::store::{Access, Store};
use halo_llama::kv_archive::{self, KvArchiveReport};
use halo_recall::recall::Recall;
use halo_store::database::{Database, StoreLocation};
use halo_store::doctor::Finding;
use halo_store::wal_check::WalDamage;
use halo_worlds::world_store;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct DoctorArgs {
    /// Repair damage, after a backup
    #[arg(long)]
    fix: bool,
}

/// Less free disk space than this is reported.
const LOW_DISK_BYTES: u64 = 1 << 30;

/// A context window with more tokens than this is reported: pruning removes too little.
const OVERSIZED_WINDOW_TOKENS: u64 = 50_000;

const FIRST_PAGE_REPAIR: &str = "rebuilds the first page of the file";

pub fn run(options: &DoctorArgs, env: &Env) -> Result<()> {
    let location = env.store_location()?;
    if let StoreLocation::Sqlite(path) = &location
        && !store_exists(path)?
    {
        return report_no_store(&location, env);
    }
    if let StoreLocation::Sqlite(path) = &location {
        let removed = Database::remove_repair_leftovers(path)?;
        if !removed.is_empty() {
            let files = pluralize(removed.len() as u64, "unfinished file");
            print_notice(&format!("{files} of an interrupted repair removed"));
        }
    }
    let mut repairs = Repairs { wal_damage: env.check_wal(&location)?, ..Repairs::default() };
    check_first_page(&location, options.fix, &mut repairs, env)?;
    let (mut store, mut report) = StoreReport::check(&location, options.fix, &mut repairs)?;
    let mut other = OtherReport::check(env, options.fix)?;
    if report.findings.is_empty() {
        other.check_index(env, &mut store, &report.conversations)?;
    }
    report.check_worlds(&mut store);
    if env.json {
        print_json(&report_json(&report, &repairs, &other))?;
    } else {
        print_stdout(&report.to_text(&repairs))?;
        print_stdout(&other.to_text())?;
    }
    report.verdict(options.fix)
}

fn report_no_store(location: &StoreLocation, env: &Env) -> Result<()> {
    if env.json {
        return print_json(&json!({ "store": location.to_string(), "conversations": 0, "findings": [] }));
    }
    print_stdout("there is no store yet: nothing to check\n")
}

/// What was repaired, and the copy of the store that was made before.
#[derive(Default)]
struct Repairs {
    done: Vec<String>,
    backup: Option<String>,
    /// Damage in the write-ahead log, and where the log is kept.
    wal_damage: Option<(WalDamage, PathBuf)>,
}

/// A store whose first page is damaged cannot be opened, so it is checked before everything else.
fn check_first_page(location: &StoreLocation, fix: bool, repairs: &mut Repairs, env: &Env) -> Result<()> {
    let StoreLocation::Sqlite(path) = location else { return Ok(()) };
    let Some(error) = Database::open(location).err().filter(|error| error.kind == ErrorKind::Damaged) else {
        return Ok(());
    };
    if fix {
        repairs.backup = Some(Database::rebuild_first_page(path)?.display().to_string());
        repairs.done.push("the first page of the file was rebuilt".into());
        return Ok(());
    }
    if env.json {
        let finding = json!({ "conversation": null, "what": error.to_string(), "fix": FIRST_PAGE_REPAIR });
        let free = free_space(path);
        print_json(&json!({ "store": location.to_string(), "free_bytes": free, "findings": [finding] }))?;
    }
    bail!("{error}; `halo doctor --fix` {FIRST_PAGE_REPAIR}, after a backup")
}

/// The state of the store.
struct StoreReport {
    location: StoreLocation,
    bytes: u64,
    free_bytes: Option<u64>,
    conversations: Vec<String>,
    worlds: usize,
    findings: Vec<Finding>,
    /// Worlds that cannot be opened, and why.
    damaged_worlds: Vec<(String, String)>,
    /// Conversations with very many tokens in the context window.
    oversized_windows: Vec<(String, u64)>,
}

/// Repairs that undo each other end after so many rounds.
const MAX_REPAIR_ROUNDS: usize = 10;

impl StoreReport {
    fn check(location: &StoreLocation, fix: bool, repairs: &mut Repairs) -> Result<(Database, Self)> {
        let mut store = Database::open(location)?;
        let bytes = store.size_on_disk()?;
        let bar = Progress::new("checking the store", 1);
        let mut findings =
            store.check_integrity(&mut |done, all| bar.set_progress(done as u64, all as u64))?;
        drop(bar);
        // A repair can make more damage visible, so it is repeated until it changes nothing.
        for _ in 0..MAX_REPAIR_ROUNDS {
            if !fix || findings.is_empty() {
                break;
            }
            let (backup, done) = store.repair(&findings)?;
            repairs.backup = repairs.backup.take().or(backup);
            repairs.done.extend(done);
            drop(store);
            store = Database::open(location)?;
            let before = std::mem::replace(&mut findings, store.check_integrity(&mut |_, _| {})?);
            if findings == before {
                break;
            }
        }
        let conversations = store.list_conversations().unwrap_or_default();
        let oversized = conversations.iter().filter(|one| one.live > OVERSIZED_WINDOW_TOKENS);
        let report = Self {
            location: location.clone(),
            bytes,
            free_bytes: match location {
                StoreLocation::Sqlite(path) => free_space(path),
                StoreLocation::Postgres(_) => None,
            },
            oversized_windows: oversized.map(|one| (one.name.clone(), one.live)).collect(),
            conversations: conversations.into_iter().map(|one| one.name).collect(),
            worlds: 0,
            findings,
            damaged_worlds: Vec::new(),
        };
        Ok((store, report))
    }

    fn check_worlds(&mut self, store: &mut Database) {
        let worlds = store.list_namespaces().unwrap_or_default();
        self.worlds = worlds.len();
        for world in worlds {
            if let Err(error) = world_store::load_world(store, &world.name) {
                self.damaged_worlds.push((world.name, error.message));
            }
        }
    }

    fn to_text(&self, repairs: &Repairs) -> String {
        let mut out = String::new();
        let conversations = pluralize(self.conversations.len() as u64, "conversation");
        let worlds = match self.worlds {
            0 => String::new(),
            n => format!(", {}", pluralize(n as u64, "world")),
        };
        let size = indicatif::HumanBytes(self.bytes);
        let _ = writeln!(out, "store  {}: {conversations}{worlds}, {size}", self.location);
        if let Some(free) = self.free_bytes {
            let low = if free < LOW_DISK_BYTES { ": low" } else { "" };
            let _ = writeln!(out, "disk   {} free{low}", indicatif::HumanBytes(free));
        }
        if let Some((damage, kept)) = &repairs.wal_damage {
            let _ = writeln!(
                out,
                "warn   the write-ahead log was damaged at frame {}: {} in {} after it could not be read, so the last words \
                 may be missing; the log is kept as {}",
                damage.frame,
                pluralize(damage.lost_commits as u64, "commit"),
                pluralize(damage.lost_frames as u64, "frame"),
                kept.display()
            );
        }
        for line in &repairs.done {
            let _ = writeln!(out, "fixed  {}", sanitize_terminal_text(line));
        }
        if let Some(backup) = &repairs.backup {
            let _ = writeln!(out, "backup {backup}");
        }
        for finding in &self.findings {
            let subject =
                finding.conversation.as_ref().map_or_else(|| "the store".into(), |name| format!("'{name}'"));
            let _ = writeln!(
                out,
                "error  {}: {}\n       --fix {}",
                sanitize_terminal_text(&subject),
                sanitize_terminal_text(&finding.problem),
                finding.repair
            );
        }
        if self.findings.is_empty() {
            out.push_str("ok     checksums, names and logs of all conversations\n");
        }
        for (name, reason) in &self.damaged_worlds {
            let _ = writeln!(
                out,
                "error  the world '{}': {}\n       restore a backup, or delete it with `halo rooms delete`",
                sanitize_terminal_text(name),
                sanitize_terminal_text(reason)
            );
        }
        for (name, live) in &self.oversized_windows {
            let _ = writeln!(
                out,
                "warn   '{}' has {live} tokens in the context window, more than {OVERSIZED_WINDOW_TOKENS}: lower \
                 context.max_tokens",
                sanitize_terminal_text(name)
            );
        }
        out
    }

    fn verdict(&self, fix: bool) -> Result<()> {
        let problems = |n: usize| pluralize(n as u64, "problem");
        match (self.findings.len(), self.damaged_worlds.len()) {
            (0, 0) => Ok(()),
            (0, worlds) => bail!("{} cannot be opened", pluralize(worlds as u64, "world")),
            (findings, _) if fix => bail!("{} could not be repaired", problems(findings)),
            (findings, _) => bail!(
                "{} found: `halo doctor --fix` makes a backup and repairs what it can",
                problems(findings)
            ),
        }
    }
}

/// The state of everything outside the store: the model, the embedder, the search index and the KV archive.
#[derive(Default)]
struct OtherReport {
    model: Option<String>,
    model_error: Option<String>,
    /// Whether the model reports attention, and if not, why not.
    attention: Option<Result<(), String>>,
    embedder: Option<String>,
    /// By conversation: chunks without an embedding.
    unindexed_chunks: Vec<(String, usize)>,
    kv: KvArchiveReport,
    removed_kv_files: usize,
}

impl OtherReport {
    fn check(env: &Env, fix: bool) -> Result<Self> {
        let mut report = Self::default();
        let settings = env.load_settings()?.settings;
        report.check_model(env, &settings);
        let library = env.model_library();
        let folder = library.and_then(|library| library.find_embedder(settings.recall_embedder.as_text()));
        report.embedder = folder.ok().flatten().map(|folder| folder.display().to_string());
        if let Some(data) = env.data_dir() {
            let _bar = Progress::new("checking the KV archive", 0);
            report.kv = kv_archive::verify_folder(&data.join("kv"));
        }
        if fix {
            let removed = report.kv.damaged.iter().filter(|file| std::fs::remove_file(file).is_ok());
            report.removed_kv_files = removed.count();
        }
        Ok(report)
    }

    /// Pruning by attention needs a model that reports it: a local one whose KV cells can be read, or a server that sends it.
    fn check_model(&mut self, env: &Env, settings: &Settings) {
        if wiring::uses_remote_model(env) {
            self.model.clone_from(&env.models.name);
            match wiring::open_model(env, settings) {
                Ok(model) if model.info().attention => self.attention = Some(Ok(())),
                Ok(_) => self.attention = Some(Err("this server does not send it".into())),
                Err(error) => self.model_error = Some(error.to_string()),
            }
            return;
        }
        let path = match env.model_file() {
            Ok(path) => path,
            Err(error) => return self.model_error = Some(error.to_string()),
        };
        self.model = Some(path.display().to_string());
        match halo_llama::gguf::read_header(&path) {
            Ok(header) => {
                self.attention =
                    Some(header.attention_unsupported().map_or(Ok(()), |why| Err(why.to_owned())));
            }
            Err(error) => self.model_error = Some(error.to_string()),
        }
    }

    fn check_index(&mut self, env: &Env, store: &mut Database, conversations: &[String]) -> Result<()> {
        let settings = env.load_settings()?.settings;
        let Some(embedder) = wiring::open_embedder(env, &settings)? else { return Ok(()) };
        for name in conversations {
            let timeline = store.load(name, Access::Read)?;
            // A clone of the handle shares one embedder, which is loaded at its first use.
            let recall = Recall::open(store, name, &timeline, Some(Box::new(embedder.clone())))?;
            let missing = recall.index().missing_vectors();
            if missing > 0 {
                self.unindexed_chunks.push((name.clone(), missing));
            }
        }
        Ok(())
    }

    fn to_text(&self) -> String {
        let mut out = String::new();
        let _ = match (&self.model, &self.model_error) {
            (Some(path), None) => writeln!(out, "model  {path}"),
            (Some(path), Some(error)) => {
                writeln!(
                    out,
                    "error  the model {path}: {error}\n       `halo models pull` downloads it again, or --model names another"
                )
            }
            (None, error) => {
                let error = error.as_deref().unwrap_or("`halo models pull` downloads one");
                writeln!(out, "model  none: {error}")
            }
        };
        let _ = match &self.attention {
            Some(Ok(())) => writeln!(out, "       it reports attention: pruning keeps what it attends to"),
            Some(Err(why)) => writeln!(
                out,
                "warn   the model reports no attention: {why}; brightness does not change, and the oldest chunks are pruned \
                 first"
            ),
            None => Ok(()),
        };
        let _ = match &self.embedder {
            Some(path) => writeln!(out, "search by embeddings and words, with {path}"),
            None => writeln!(out, "search by words only: `halo models pull` downloads an embedder"),
        };
        for (name, missing) in &self.unindexed_chunks {
            let _ = writeln!(
                out,
                "       {} of '{}' without an embedding: `halo index` creates them",
                pluralize(*missing as u64, "chunk"),
                sanitize_terminal_text(name)
            );
        }
        let entries = match self.kv.entries {
            1 => "1 entry".to_owned(),
            n => format!("{n} entries"),
        };
        let _ = writeln!(out, "kv     {entries} in the archive, {}", indicatif::HumanBytes(self.kv.bytes));
        if self.removed_kv_files > 0 {
            let files = pluralize(self.removed_kv_files as u64, "damaged file");
            let _ = writeln!(out, "fixed  {files} removed: their chunks are prefilled again");
        } else if !self.kv.damaged.is_empty() {
            let files = pluralize(self.kv.damaged.len() as u64, "damaged file");
            let _ = writeln!(
                out,
                "       {files}: not used, their chunks are prefilled again; --fix removes them"
            );
        }
        out
    }
}

fn report_json(report: &StoreReport, repairs: &Repairs, other: &OtherReport) -> Value {
    let finding = |f: &Finding| json!({ "conversation": f.conversation, "what": f.problem, "fix": f.repair });
    json!({
        "store": report.location.to_string(),
        "conversations": report.conversations.len(),
        "worlds": report.worlds,
        "worlds_damaged": report.damaged_worlds.iter().cloned().collect::<BTreeMap<_, _>>(),
        "bytes": report.bytes,
        "free_bytes": report.free_bytes,
        "findings": report.findings.iter().map(finding).collect::<Vec<_>>(),
        "wal_damage": repairs.wal_damage.as_ref().map(|(damage, kept)| json!({
            "frame": damage.frame,
            "lost_frames": damage.lost_frames,
            "lost_commits": damage.lost_commits,
            "kept_as": kept.display().to_string(),
        })),
        "fixed": repairs.done,
        "backup": repairs.backup,
        "model": other.model,
        "attention": other.attention.as_ref().map(Result::is_ok),
        "embedder": other.embedder,
        "index_missing": other.unindexed_chunks.iter().cloned().collect::<BTreeMap<_, _>>(),
        "oversized_windows": report.oversized_windows.iter().cloned().collect::<BTreeMap<_, _>>(),
        "kv": {
            "entries": other.kv.entries,
            "bytes": other.kv.bytes,
            "damaged": other.kv.damaged.len(),
            "removed": other.removed_kv_files,
        },
    })
}
