//! `halo models`: what models are here, and what can be fetched. Fetching is in `pull`.

use super::{print, print_json, shorten};
use crate::models::{self, Model, Models};
use crate::{Common, printable};
use anyhow::{Result, bail};
use indicatif::HumanBytes;
use serde_json::{Value, json};
use std::fmt::Write;

/// Which model.
#[derive(clap::Args)]
pub struct PathOptions {
    /// The model, by its name in `halo models` [default: the default chat model]
    #[arg(value_name = "NAME")]
    name: Option<String>,
}

/// Prints the path of a model's file.
pub fn path(options: &PathOptions, common: &Common) -> Result<()> {
    if let Some(name) = options.name.as_deref().filter(|name| models::is_path(name)) {
        bail!("'{name}' is a path and no name: `halo models` lists the names");
    }
    let path = models::find(common, options.name.as_deref())?;
    if common.json {
        return print_json(&json!({ "path": path.display().to_string() }));
    }
    print(&format!("{}\n", path.display()))
}

/// Lists what is here, and what could be.
pub fn list(common: &Common) -> Result<()> {
    let models = Models::of(common)?;
    let here = models.here()?;
    let offers: Vec<Offer> = models
        .catalogue
        .models
        .iter()
        .map(|entry| Offer {
            entry,
            here: here.iter().any(|m| m.name == entry.name && m.problem.is_none()),
            begun: super::pull::begun(&models, entry),
        })
        .collect();
    if common.json {
        return print_json(&json!({
            "folder": models.folder.display().to_string(),
            "models": here.iter().map(as_json).collect::<Vec<_>>(),
            "available": offers.iter().map(Offer::as_json).collect::<Vec<_>>(),
        }));
    }
    let mut out = format!("models in {}\n\n", models.folder.display());
    if here.is_empty() {
        let defaults: Vec<_> = models.catalogue.defaults().map(|e| e.name.as_str()).collect();
        let _ = writeln!(out, "none yet: `halo models pull` fetches {}", defaults.join(" and "));
    } else {
        table(&here, &mut out);
    }
    let missing: Vec<_> = offers.iter().filter(|offer| !offer.here).collect();
    if !missing.is_empty() {
        out.push_str("\n`halo models pull NAME` fetches\n");
        let width = missing.iter().map(|offer| offer.entry.name.len() + 2).max().unwrap_or(0);
        for Offer { entry, begun, .. } in missing {
            let begun = match begun {
                0 => String::new(),
                n => format!(" (begun: {} are here)", HumanBytes(*n)),
            };
            let _ = writeln!(
                out,
                "  {:<width$}{:<11}{:>11}  {} ({}){begun}",
                entry.name,
                entry.kind.name(),
                HumanBytes(entry.bytes()).to_string(),
                entry.about,
                entry.licence
            );
        }
    }
    print(&printable(&out))
}

/// A model of the catalogue, and how much of it is here.
struct Offer<'a> {
    entry: &'a models::catalogue::Entry,
    here: bool,
    begun: u64,
}

impl Offer<'_> {
    fn as_json(&self) -> Value {
        let entry = self.entry;
        json!({
            "name": entry.name,
            "kind": entry.kind.name(),
            "about": entry.about,
            "licence": entry.licence,
            "bytes": entry.bytes(),
            "download_bytes": entry.download(),
            "default": entry.default,
            "here": self.here,
            "begun_bytes": self.begun,
        })
    }
}

fn table(here: &[Model], out: &mut String) {
    let width = here.iter().map(|m| shorten(&m.name, 48).chars().count() + 2).max().unwrap_or(0);
    let _ = writeln!(
        out,
        "  {:<width$}{:<11}{:>11}  {:<14}{:>8}  {:<14}surgery",
        "name", "kind", "size", "quantisation", "context", "architecture"
    );
    for m in here {
        let (name, size) = (shorten(&m.name, 48), HumanBytes(m.bytes).to_string());
        if let Some(problem) = &m.problem {
            let _ = writeln!(out, "  {name:<width$}{:<11}{size:>11}  {}", "unusable", shorten(problem, 200));
            continue;
        }
        let text = |text: &Option<String>| text.as_deref().map_or_else(|| "?".into(), |t| shorten(t, 13));
        let surgery = m.no_surgery.as_deref().map_or_else(|| "yes".into(), |why| format!("no, {why}"));
        let _ = writeln!(
            out,
            "  {name:<width$}{:<11}{size:>11}  {:<14}{:>8}  {:<14}{surgery}",
            m.kind.name(),
            text(&m.quantisation),
            m.context.map_or_else(|| "?".into(), |n| n.to_string()),
            text(&m.architecture),
        );
    }
}

fn as_json(m: &Model) -> Value {
    json!({
        "name": m.name,
        "kind": m.kind.name(),
        "path": m.path.display().to_string(),
        "bytes": m.bytes,
        "quantisation": m.quantisation,
        "context": m.context,
        "architecture": m.architecture,
        "surgery": m.no_surgery.is_none(),
        "why": m.no_surgery,
        "problem": m.problem,
    })
}
