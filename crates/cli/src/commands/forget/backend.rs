//! What forgetting needs from this program: its stores, its data folder and its settings.

use super::HISTORY_FILE;
use crate::env::Env;
use crate::error::error_kind;
use halo_core::row_store::RowStore;
use halo_core::store::{EraseStore, Store};
use halo_core::{Error, ErrorKind};
use halo_engine::forget::ForgetBackend;
use halo_engine::session;
use halo_llama::kv_archive;
use halo_store::database::{Database, StoreLocation};
use halo_worlds::world_store;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An `anyhow` error with the kind of the error behind it.
fn with_kind(operation: &'static str) -> impl Fn(anyhow::Error) -> Error {
    move |error| {
        Error::new(error_kind(&error).unwrap_or(ErrorKind::Internal), operation, format!("{error:#}"))
    }
}

impl ForgetBackend for Env {
    fn open_reader(&self) -> Result<Option<Box<dyn Store + Send>>, Error> {
        let store = self.open_store_read_only().map_err(with_kind("opening the store"))?;
        Ok(store.map(|store| Box::new(store) as Box<dyn Store + Send>))
    }

    fn open_writer(&self) -> Result<Box<dyn EraseStore + Send>, Error> {
        Ok(Box::new(self.open_store().map_err(with_kind("opening the store"))?))
    }

    fn data_dir(&self) -> Result<PathBuf, Error> {
        let missing = || Error::invalid_input("finding the data folder", "the system has none: set --data");
        Env::data_dir(self).ok_or_else(missing)
    }

    fn grace_period(&self) -> Result<Duration, Error> {
        let loaded = self.load_settings().map_err(with_kind("loading the settings"))?;
        let days = u64::try_from(loaded.settings.lethe_grace_days.0).unwrap_or(0);
        Ok(Duration::from_secs(days * 24 * 60 * 60))
    }

    fn delete_saved_kv(&self, conversation: &str) -> Result<(), Error> {
        let Some(mut store) = self.open_store_read_only().map_err(with_kind("opening the store"))? else {
            return Ok(());
        };
        let keys = kv_keys_except(&mut store, Some(conversation), None)?;
        let folder = ForgetBackend::data_dir(self)?.join("kv");
        kv_archive::retain_conversations(&folder, &keys).map_err(|error| {
            let message = format!("saved KV cells of the conversation were not deleted: {error}");
            Error::unavailable(format!("clearing {}", folder.display()), message).with_source(error)
        })
    }

    /// The files of the recording, and the folder if nothing else is in it.
    fn delete_capture(&self, folder: &str) -> Result<(), Error> {
        let folder = Path::new(folder);
        for file in ["capture.json", "steps.jsonl"] {
            let _ = std::fs::remove_file(folder.join(file));
        }
        let _ = std::fs::remove_dir(folder);
        Ok(())
    }

    fn input_history(&self) -> Option<PathBuf> {
        Env::data_dir(self).map(|data| data.join(HISTORY_FILE))
    }

    fn store_backups(&self) -> Result<Vec<PathBuf>, Error> {
        let StoreLocation::Sqlite(path) = self.store_location().map_err(with_kind("finding the store"))?
        else {
            return Ok(Vec::new());
        };
        let (Some(folder), Some(file)) = (path.parent(), path.file_name().and_then(|name| name.to_str()))
        else {
            return Ok(Vec::new());
        };
        let is_backup =
            |name: &str| name.starts_with(file) && (name.contains(".backup-") || name.contains(".damaged-"));
        let entries = std::fs::read_dir(folder).map_err(|error| {
            Error::unavailable(format!("listing {}", folder.display()), error.to_string()).with_source(error)
        })?;
        let backups = entries.filter_map(Result::ok);
        let backups = backups.filter(|entry| entry.file_name().to_str().is_some_and(is_backup));
        Ok(backups.map(|entry| entry.path()).collect())
    }
}

/// The KV keys of all conversations and worlds except one of either.
pub fn kv_keys_except(
    store: &mut Database,
    conversation: Option<&str>,
    world: Option<&str>,
) -> Result<Vec<String>, Error> {
    let mut keys = Vec::new();
    for summary in store.list_conversations()? {
        if Some(summary.name.as_str()) != conversation {
            keys.push(session::kv_cache_key(store, &summary)?);
        }
    }
    let worlds = store.list_namespaces()?.into_iter().filter(|known| Some(known.name.as_str()) != world);
    keys.extend(worlds.map(|known| world_store::world_kv_key(&known.name, known.created)));
    Ok(keys)
}
