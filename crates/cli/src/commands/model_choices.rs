//! What the page offers as models: files of the models folder, the catalogue, and servers that are tested by their address.

use super::pull;
use crate::env::Env;
use crate::models::InstalledModel;
use crate::models::catalogue::{CatalogueEntry, ModelKind};
use crate::settings::value::FetchModels;
use anyhow::{Context, Result};
use halo_core::{Error, ErrorKind};
use halo_llama::system_memory;
use halo_remote::probe_server;
use halo_server::{
    DownloadableModelChoice, InstalledModelChoice, ModelChoices, ModelServerReport, RemoteModelChoice,
    fits_memory,
};
use std::time::Instant;

/// The chat models of this machine and of the catalogue.
pub fn list(env: &Env, current: String) -> Result<ModelChoices> {
    let library = env.model_library()?;
    let installed = library.installed()?;
    let source = env.models.name.clone();
    let current_file = library.find_model_file(source.as_deref()).ok();
    let current_bytes = installed.iter().find(|model| Some(&model.path) == current_file.as_ref());
    // The memory of the model in use is free when another one is used instead.
    let freed = current_bytes.map_or(0, |model| model.memory_bytes);
    let memory_bytes = system_memory::available_bytes().map(|free| free + freed);
    let is_chat = |model: &&InstalledModel| model.kind == ModelKind::Chat;
    let choice = |model: &InstalledModel| InstalledModelChoice {
        name: model.name.clone(),
        bytes: model.bytes,
        quantization: model.quantisation.clone(),
        context: model.context,
        memory_bytes: model.memory_bytes,
        fits: fits_memory(model.memory_bytes, memory_bytes),
        current: Some(&model.path) == current_file.as_ref(),
        problem: model.problem.clone(),
    };
    let is_offered = |entry: &&CatalogueEntry| {
        entry.kind == ModelKind::Chat && !installed.iter().any(|model| model.name == entry.name)
    };
    let offer = |entry: &CatalogueEntry| DownloadableModelChoice {
        name: entry.name.clone(),
        about: entry.about.clone(),
        license: entry.licence.clone(),
        bytes: entry.size_bytes(),
        download_bytes: entry.download_bytes(),
        fits: fits_memory(entry.memory_estimate(), memory_bytes),
    };
    let embedder = library.catalogue.default_embedder();
    let has_embedder = embedder.is_none_or(|entry| installed.iter().any(|model| model.name == entry.name));
    Ok(ModelChoices {
        current,
        current_source: source,
        installed: installed.iter().filter(is_chat).map(choice).collect(),
        downloadable: library.catalogue.models.iter().filter(is_offered).map(offer).collect(),
        downloadable_embedder: embedder.filter(|_| !has_embedder).map(offer),
        memory_bytes,
        pull_command: format!("halo models pull{} MODEL", env.data_flag()),
        command: format!("halo serve{} --model MODEL", env.data_flag()),
    })
}

/// Downloads a model of the catalogue, and nothing else.
pub fn download(env: &Env, name: &str, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<()> {
    if env.load_settings()?.settings.model_fetch == FetchModels::Never {
        let why = "the setting model.fetch is never: download it by hand with `halo models pull`, or change the setting";
        return Err(Error::new(ErrorKind::Forbidden, "downloading the model", why).into());
    }
    let library = env.model_library()?;
    let entry = library.catalogue.get(name).filter(|entry| entry.name == name);
    let entry = entry.with_context(|| format!("there is no model {name} in the catalogue"))?;
    pull::pull_with_progress(&library, entry, progress).map(drop)
}

/// Asks a model server for its models.
pub fn test_server(address: &str) -> Result<ModelServerReport, Error> {
    let start = Instant::now();
    let probe = probe_server(address)?;
    let models = probe.models.into_iter().map(|(name, address)| RemoteModelChoice { name, address });
    Ok(ModelServerReport {
        kind: probe.kind.to_owned(),
        milliseconds: u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX),
        models: models.collect(),
    })
}
