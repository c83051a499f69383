//! `halo models`: installed and available models. Downloads are in `pull`.

use crate::env::Env;
use crate::models::{self, InstalledModel};
use crate::output::{print_json, print_stdout, sanitize_terminal_text, truncate_line};
use crate::wiring;
use anyhow::{Result, bail};
use halo_llama::ffi::{AttentionSource, KvKeyType};
use halo_llama::kv_archive::KvArchiveLimits;
use halo_llama::self_test::stored_result;
use halo_llama::source_speed::{SourceSpeeds, stored_speeds};
use halo_llama::system_memory;
use halo_server::fits_memory;
use indicatif::HumanBytes;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::PathBuf;

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
    let machine = MachineFacts::new(env)?;
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
            "models": installed.iter().map(|model| model_json(model, &machine)).collect::<Vec<_>>(),
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
        write_models_table(&installed, &machine, &mut out);
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

/// What this machine knows of models beside their files.
struct MachineFacts {
    memory: Option<u64>,
    self_tests: Option<PathBuf>,
    key_type: KvKeyType,
    /// What the setting `model.attention` says; none for auto.
    chosen: Option<AttentionSource>,
    /// Where attention is probably read, if the model has not been loaded.
    attention: AttentionSource,
}

impl MachineFacts {
    fn new(env: &Env) -> Result<Self> {
        let settings = env.load_settings()?.settings;
        let options = wiring::llama_options(env, &settings, KvArchiveLimits::disabled());
        Ok(Self {
            memory: system_memory::available_bytes(),
            self_tests: env.data_dir().map(|data| data.join("self-tests")),
            key_type: settings.kv_type,
            chosen: options.attention,
            attention: options.attention_source(),
        })
    }

    fn fits(&self, model: &InstalledModel) -> Option<bool> {
        fits_memory(model.memory_bytes, self.memory)
    }

    /// The result of the test of KV edits, once the model was loaded.
    fn self_test(&self, model: &InstalledModel) -> Option<bool> {
        let attention = self.attention_source(model);
        stored_result(self.self_tests.as_deref()?, &model.path, self.key_type, attention)
    }

    /// How fast attention is read from each source, once the model was loaded onto a GPU.
    fn source_speeds(&self, model: &InstalledModel) -> Option<SourceSpeeds> {
        stored_speeds(self.self_tests.as_deref()?, &model.path, self.key_type)
    }

    /// Where attention is read.
    fn attention_source(&self, model: &InstalledModel) -> AttentionSource {
        let measured = || self.source_speeds(model).map(SourceSpeeds::fastest);
        self.chosen.or_else(measured).unwrap_or(self.attention)
    }

    /// Whether attention can be read, and where.
    fn attention(&self, model: &InstalledModel) -> String {
        if model.has_attention { self.attention_source(model).to_string() } else { "no".to_owned() }
    }

    /// Whether KV cells can be edited, in words.
    fn kv_edit(&self, model: &InstalledModel) -> String {
        match (&model.no_kv_edit_reason, self.self_test(model)) {
            (Some(why), _) => format!("no, {why}"),
            (None, Some(true)) => "yes, tested".into(),
            (None, Some(false)) => "no, its test at load failed".into(),
            (None, None) => "yes, to be tested when it is loaded".into(),
        }
    }
}

fn yes_or_no(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}

fn write_models_table(installed: &[InstalledModel], machine: &MachineFacts, out: &mut String) {
    let width = installed.iter().map(|m| truncate_line(&m.name, 48).chars().count() + 2).max().unwrap_or(0);
    let _ = writeln!(
        out,
        "  {:<width$}{:<11}{:>11}{:>11}  {:<6}{:<14}{:>8}  {:<14}{:<10}{:<11}KV edit",
        "name",
        "kind",
        "size",
        "memory",
        "fits",
        "quantisation",
        "context",
        "architecture",
        "template",
        "attention"
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
        let fits = machine.fits(m).map_or("?", yes_or_no);
        let _ = writeln!(
            out,
            "  {name:<width$}{:<11}{size:>11}{:>11}  {fits:<6}{:<14}{:>8}  {:<14}{:<10}{:<11}{}",
            m.kind.name(),
            HumanBytes(m.memory_bytes).to_string(),
            text(&m.quantisation),
            m.context.map_or_else(|| "?".into(), |n| n.to_string()),
            text(&m.architecture),
            yes_or_no(m.has_template),
            machine.attention(m),
            machine.kv_edit(m),
        );
    }
}

fn model_json(m: &InstalledModel, machine: &MachineFacts) -> Value {
    json!({
        "name": m.name,
        "kind": m.kind.name(),
        "path": m.path.display().to_string(),
        "bytes": m.bytes,
        "quantisation": m.quantisation,
        "context": m.context,
        "architecture": m.architecture,
        "template": m.has_template,
        "attention": m.has_attention,
        "attention_source": m.has_attention.then(|| machine.attention_source(m).to_string()),
        "attention_ms": machine.source_speeds(m).map(|speeds| json!({
            "gpu_layers": speeds.gpu_layers,
            "softmax": speeds.softmax_ms,
            "queries": speeds.queries_ms,
        })),
        "memory_bytes": m.memory_bytes,
        "fits": machine.fits(m),
        "self_test": machine.self_test(m),
        "kv_edit": m.no_kv_edit_reason.is_none(),
        "kv_edit_reason": m.no_kv_edit_reason,
        "problem": m.problem,
    })
}
