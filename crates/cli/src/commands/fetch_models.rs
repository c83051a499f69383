//! The default models are fetched on first use: after a question in a terminal, or as `model.fetch` says.

use super::pull;
use crate::env::Env;
use crate::models::ModelLibrary;
use crate::models::catalogue::{CatalogueEntry, ModelKind};
use crate::output::print_notice;
use crate::settings::Settings;
use crate::settings::value::FetchModels;
use anyhow::Result;
use halo_recall::rank::SearchMode;
use indicatif::HumanBytes;
use std::io::{IsTerminal, Write};

/// Fetches the default models that are missing and that nothing replaces. Without them, a chat model is an error of the
/// command that needs it, and without an embedder search goes by words.
pub fn fetch_missing_models(env: &Env, settings: &Settings) -> Result<()> {
    if settings.model_fetch == FetchModels::Never {
        return Ok(());
    }
    let models = env.model_library()?;
    let missing = missing_defaults(&models, env, settings)?;
    if missing.is_empty() || (settings.model_fetch == FetchModels::Ask && !ask_for_download(env, &missing)?) {
        return Ok(());
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
    Ok(())
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

/// Asks in a terminal; elsewhere nobody can answer.
fn ask_for_download(env: &Env, missing: &[&CatalogueEntry]) -> Result<bool> {
    if env.json || !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return Ok(false);
    }
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
    fn fetch_is_confirmed_by_return_or_yes() {
        for (answer, expected) in
            [("\n", true), ("y\n", true), ("YES\n", true), ("n\n", false), ("no", false), ("later\n", false)]
        {
            assert_eq!(is_yes(answer), expected, "{answer:?}");
        }
    }
}
