//! `halo doctor`: what is wrong, how to mend it, and mending it.

use super::progress::Progress;
use super::{count, print, print_json};
use crate::disk::free_space;
use crate::{Common, printable, there};
use anyhow::{Result, bail};
use halo_core::seams::Store;
use halo_store::database::{Database, Location};
use halo_store::doctor::Finding;
use serde_json::json;
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
    let conversations = store.conversations().map_or(0, |all| all.len());
    if common.json {
        let found = findings
            .iter()
            .map(|f| json!({ "conversation": f.conversation, "what": f.what, "mending": f.mending }));
        print_json(&json!({
            "store": location.to_string(),
            "conversations": conversations,
            "bytes": bytes,
            "free_bytes": free,
            "findings": found.collect::<Vec<_>>(),
            "mended": mended,
            "backup": backup,
        }))?;
    } else {
        print(&told(&location, conversations, bytes, free, &findings, &mended, backup.as_deref()))?;
    }
    match findings.len() {
        0 => Ok(()),
        n if options.fix => bail!("{} could not be mended", count(n as u64, "fault")),
        n => bail!(
            "{} found: `halo doctor --fix` makes a copy and mends what can be mended",
            count(n as u64, "fault")
        ),
    }
}

fn told(
    location: &Location,
    conversations: usize,
    bytes: u64,
    free: Option<u64>,
    findings: &[Finding],
    mended: &[String],
    backup: Option<&str>,
) -> String {
    let mut out = String::new();
    let size = indicatif::HumanBytes(bytes);
    let _ = writeln!(out, "store  {location}: {}, {size}", count(conversations as u64, "conversation"));
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
