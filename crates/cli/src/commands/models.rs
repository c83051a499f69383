//! `halo models`: installed and available models. Downloads are in `pull`.

use crate::env::Env;
use crate::models::{self, InstalledModel};
use crate::output::{print_json, print_stdout, sanitize_terminal_text, truncate_line};
use anyhow::{Result, bail};
use indicatif::HumanBytes;
use serde_json::{Value, json};
use std::fmt::Write;

#[derive(clap::Args)]
pub struct ModelPathArgs {
    /// Model name from `halo models` [default: the default chat model]
    #[arg(value_name = "NAME")]
    name: Option<String>,
}

pub fn print_path(options: &ModelPathArgs, env: &Env) -> Result<()> {
    if let Some(name) = options.name.as_deref().filter(|name| models::is_path(name)) {
        bail!("'{name}' is a path, not a name: `halo models` lists the names");
    }
    let path = env.model_library()?.find_model_file(options.name.as_deref())?;
    if env.json {
        return print_json(&json!({ "path": path.display().to_string() }));
    }
    print_stdout(&format!("{}\n", path.display()))
}

pub fn list_models(env: &Env) -> Result<()> {
    let models = env.model_library()?;
    let installed = models.installed()?;
    let offers: Vec<DownloadableModel> = models
        .catalogue
        .models
        .iter()
        .map(|entry| DownloadableModel {
            entry,
            installed: installed.iter().any(|m| m.name == entry.name && m.problem.is_none()),
            partial_bytes: super::pull::partial_bytes(&models, entry),
        })
        .collect();
    if env.json {
        return print_json(&json!({
            "folder": models.folder.display().to_string(),
            "installed_folder": models.installed_folder.as_ref().map(|folder| folder.display().to_string()),
            "models": installed.iter().map(model_json).collect::<Vec<_>>(),
            "available": offers.iter().map(DownloadableModel::to_json).collect::<Vec<_>>(),
        }));
    }
    let mut out = format!("models in {}", models.folder.display());
    // The second folder is named where a model of it is listed.
    let other = models.installed_folder.as_ref();
    if let Some(other) = other.filter(|other| installed.iter().any(|model| model.path.starts_with(other))) {
        let _ = write!(out, " and {}", other.display());
    }
    out.push_str("\n\n");
    if installed.is_empty() {
        let defaults: Vec<_> = models.catalogue.defaults().map(|e| e.name.as_str()).collect();
        let _ = writeln!(out, "none yet: `halo models pull` downloads {}", defaults.join(" and "));
    } else {
        write_models_table(&installed, &mut out);
    }
    let missing: Vec<_> = offers.iter().filter(|offer| !offer.installed).collect();
    if !missing.is_empty() {
        out.push_str("\navailable with `halo models pull NAME`\n");
        let width = missing.iter().map(|offer| offer.entry.name.len() + 2).max().unwrap_or(0);
        for DownloadableModel { entry, partial_bytes: partial, .. } in missing {
            let partial = match partial {
                0 => String::new(),
                n => format!(" (partly downloaded: {})", HumanBytes(*n)),
            };
            let _ = writeln!(
                out,
                "  {:<width$}{:<11}{:>11}  {} ({}){partial}",
                entry.name,
                entry.kind.name(),
                HumanBytes(entry.size_bytes()).to_string(),
                entry.about,
                entry.licence
            );
        }
    }
    print_stdout(&sanitize_terminal_text(&out))
}

/// A model of the catalogue, and how much of it is downloaded.
struct DownloadableModel<'a> {
    entry: &'a models::catalogue::CatalogueEntry,
    installed: bool,
    partial_bytes: u64,
}

impl DownloadableModel<'_> {
    fn to_json(&self) -> Value {
        let entry = self.entry;
        json!({
            "name": entry.name,
            "kind": entry.kind.name(),
            "about": entry.about,
            "licence": entry.licence,
            "bytes": entry.size_bytes(),
            "download_bytes": entry.download_bytes(),
            "default": entry.default,
            "installed": self.installed,
            "partial_bytes": self.partial_bytes,
        })
    }
}

fn write_models_table(installed: &[InstalledModel], out: &mut String) {
    let width = installed.iter().map(|m| truncate_line(&m.name, 48).chars().count() + 2).max().unwrap_or(0);
    let _ = writeln!(
        out,
        "  {:<width$}{:<11}{:>11}  {:<14}{:>8}  {:<14}KV edit",
        "name", "kind", "size", "quantisation", "context", "architecture"
    );
    for m in installed {
        let (name, size) = (truncate_line(&m.name, 48), HumanBytes(m.bytes).to_string());
        if let Some(problem) = &m.problem {
            let _ = writeln!(
                out,
                "  {name:<width$}{:<11}{size:>11}  {}",
                "unusable",
                truncate_line(problem, 200)
            );
            continue;
        }
        let text =
            |text: &Option<String>| text.as_deref().map_or_else(|| "?".into(), |t| truncate_line(t, 13));
        let kv_edit = m.no_kv_edit_reason.as_deref().map_or_else(|| "yes".into(), |why| format!("no, {why}"));
        let _ = writeln!(
            out,
            "  {name:<width$}{:<11}{size:>11}  {:<14}{:>8}  {:<14}{kv_edit}",
            m.kind.name(),
            text(&m.quantisation),
            m.context.map_or_else(|| "?".into(), |n| n.to_string()),
            text(&m.architecture),
        );
    }
}

fn model_json(m: &InstalledModel) -> Value {
    json!({
        "name": m.name,
        "kind": m.kind.name(),
        "path": m.path.display().to_string(),
        "bytes": m.bytes,
        "quantisation": m.quantisation,
        "context": m.context,
        "architecture": m.architecture,
        "kv_edit": m.no_kv_edit_reason.is_none(),
        "kv_edit_reason": m.no_kv_edit_reason,
        "problem": m.problem,
    })
}
