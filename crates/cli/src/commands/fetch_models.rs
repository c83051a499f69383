//! The default models are fetched on first use: after a question in a terminal, or as `model.fetch` says.

use super::pull;
use crate::env::Env;
use crate::models::ModelLibrary;
use crate::models::catalogue::{CatalogueEntry, ModelKind};
use crate::output::print_notice;
use crate::settings::Settings;
use crate::settings::persist::write_setting;
use crate::settings::value::FetchModels;
use anyhow::Result;
use halo_llama::system_memory;
use halo_recall::rank::SearchMode;
use indicatif::HumanBytes;
use std::io::{IsTerminal, Write};

/// Fetches the default models that are missing and that nothing replaces. Without them, a chat model is an error of the
/// command that needs it, and without an embedder search goes by words. Returns the environment with the model that the user
/// has chosen in place of the default one.
pub fn fetch_missing_models(env: &Env, settings: &Settings) -> Result<Env> {
    let mut env = env.clone();
    if settings.model_fetch == FetchModels::Never {
        return Ok(env);
    }
    let models = env.model_library()?;
    let mut missing = missing_defaults(&models, &env, settings)?;
    if missing.is_empty() {
        return Ok(env);
    }
    if settings.model_fetch == FetchModels::Ask {
        if !can_ask(&env) {
            return Ok(env);
        }
        let default = missing.iter().position(|entry| entry.kind == ModelKind::Chat);
        let better = models.catalogue.best_chat_model(system_memory::available_bytes());
        match (default, better) {
            (Some(at), Some(better)) => match read_choice(better, missing[at])? {
                ModelOffer::Nothing => return Ok(env),
                ModelOffer::Default => {}
                ModelOffer::Better => {
                    if pull_better_model(&mut env, &models, better) {
                        missing.remove(at);
                    }
                }
            },
            _ if !ask_for_download(&missing)? => return Ok(env),
            _ => {}
        }
    }
    for entry in missing {
        match pull::pull_catalogue_entry(&models, entry) {
            Ok(path) => print_notice(&format!("{} is installed: {}", entry.name, path.display())),
            Err(error) if entry.kind == ModelKind::Embedding => {
                print_notice(&format!("{} was not downloaded, search goes by words: {error:#}", entry.name));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(env)
}

/// What the user wants where a better model than the default one fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ModelOffer {
    Better,
    Default,
    Nothing,
}

fn parse_choice(answer: &str) -> Option<ModelOffer> {
    match answer.trim().to_lowercase().as_str() {
        "" | "1" | "y" | "yes" => Some(ModelOffer::Better),
        "2" => Some(ModelOffer::Default),
        "n" | "no" => Some(ModelOffer::Nothing),
        _ => None,
    }
}

fn read_choice(better: &CatalogueEntry, default: &CatalogueEntry) -> Result<ModelOffer> {
    let size = |entry: &CatalogueEntry| HumanBytes(entry.download_bytes());
    eprintln!("No chat model is installed. These fit the memory of this machine:");
    eprintln!("  1  {} ({}): {}", better.name, size(better), better.about);
    eprintln!("  2  {} ({}): {}", default.name, size(default), default.about);
    loop {
        eprint!("Which one to download, or n for none? [1] ");
        std::io::stderr().flush()?;
        let mut answer = String::new();
        if std::io::stdin().read_line(&mut answer)? == 0 {
            return Ok(ModelOffer::Nothing);
        }
        if let Some(choice) = parse_choice(&answer) {
            return Ok(choice);
        }
    }
}

/// Downloads a model and makes it the model of the program. If it cannot be downloaded, a notice says so, and the small one
/// is used.
fn pull_better_model(env: &mut Env, models: &ModelLibrary, entry: &CatalogueEntry) -> bool {
    match pull::pull_catalogue_entry(models, entry) {
        Ok(path) => print_notice(&format!("{} is installed: {}", entry.name, path.display())),
        Err(error) => {
            print_notice(&format!(
                "{} was not downloaded, the small default model is used: {error:#}",
                entry.name
            ));
            return false;
        }
    }
    env.models.name = Some(entry.name.clone());
    let stored = env.settings_path().map(|file| write_setting(&file, "model.path", Some(&entry.name)));
    if let Some(Err(error)) = stored {
        print_notice(&format!("it is used this time only: model.path cannot be stored: {error:#}"));
    }
    true
}

fn missing_defaults<'a>(
    models: &'a ModelLibrary,
    env: &Env,
    settings: &Settings,
) -> Result<Vec<&'a CatalogueEntry>> {
    let installed = models.installed()?;
    let is_missing = |entry: &&CatalogueEntry| !installed.iter().any(|model| model.name == entry.name);
    let needs_chat_model = env.models.name.is_none();
    let needs_embedder =
        settings.recall_embedder.as_text().is_none() && settings.recall_mode != SearchMode::Lexical;
    let chat_model = models.catalogue.default_chat_model().filter(|_| needs_chat_model);
    let embedder = models.catalogue.default_embedder().filter(|_| needs_embedder);
    Ok(chat_model.into_iter().chain(embedder).filter(is_missing).collect())
}

/// Whether there is a terminal: elsewhere nobody can answer.
fn can_ask(env: &Env) -> bool {
    !env.json && std::io::stdin().is_terminal() && std::io::stderr().is_terminal()
}

fn ask_for_download(missing: &[&CatalogueEntry]) -> Result<bool> {
    let sizes: Vec<String> = missing
        .iter()
        .map(|entry| format!("{} ({})", entry.name, HumanBytes(entry.download_bytes())))
        .collect();
    let verb = if missing.len() == 1 { "is" } else { "are" };
    eprint!("{} {verb} not installed. Download now? [Y/n] ", sizes.join(" and "));
    std::io::stderr().flush()?;
    let mut answer = String::new();
    // No answer at all is the end of the input, not a yes.
    let answered = std::io::stdin().read_line(&mut answer)? > 0;
    Ok(answered && is_yes(&answer))
}

/// Return alone is a yes.
fn is_yes(answer: &str) -> bool {
    matches!(answer.trim().to_lowercase().as_str(), "" | "y" | "yes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fetch_offers_better_model_first() {
        use ModelOffer::{Better, Default, Nothing};
        let answers = ["\n", "1\n", "Y\n", "2\n", "n\n", "No\n", "3\n", "maybe\n"];
        let expected =
            [Some(Better), Some(Better), Some(Better), Some(Default), Some(Nothing), Some(Nothing)];
        let expected: Vec<_> = expected.into_iter().chain([None, None]).collect();
        assert_eq!(answers.map(parse_choice).to_vec(), expected);
    }

    /// Where the hub cannot be reached, the small model is used, and nothing is stored.
    #[test]
    fn fetch_goes_on_with_small_model_without_the_hub() {
        let folder = tempfile::tempdir().expect("a folder");
        let models = ModelLibrary::open(folder.path(), None).expect("the folder");
        let mut env = Env::for_tests(folder.path());
        let mut entry_text = String::from("[[model]]\nname = \"far\"\nkind = \"chat\"\nabout = \"x\"\n");
        entry_text += "licence = \"x\"\n[[model.file]]\nname = \"far.gguf\"\nbytes = 1\nsha256 = \"";
        entry_text += &"0".repeat(64);
        entry_text += "\"\nsources = [\"http://127.0.0.1:9/far.gguf\"]\n";
        let catalogue: crate::models::catalogue::Catalogue = toml::from_str(&entry_text).expect("valid");
        assert!(!pull_better_model(&mut env, &models, &catalogue.models[0]));
        assert_eq!(env.models.name, None);
        assert!(!folder.path().join("config.toml").exists());
    }

    #[test]
    fn fetch_is_confirmed_by_return_or_yes() {
        for (answer, expected) in
            [("\n", true), ("y\n", true), ("YES\n", true), ("n\n", false), ("no", false), ("later\n", false)]
        {
            assert_eq!(is_yes(answer), expected, "{answer:?}");
        }
    }
}
