//! What forgetting needs from this program: its stores, its data folder and its settings.

use crate::capture::{CaptureLocation, has_capture, locate_capture};
use crate::env::Env;
use crate::error::error_kind;
use halo_core::row_store::RowStore;
use halo_core::store::{ConversationSummary, EraseStore, RecordKind, Store};
use halo_core::{Error, ErrorKind};
use halo_engine::forget::{CaptureDeletion, ForgetBackend};
use halo_engine::session;
use halo_llama::kv_archive;
use halo_store::database::{Database, StoreLocation};
use halo_worlds::world_store;
use std::collections::BTreeSet;
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

    fn delete_capture(&self, folder: &str) -> Result<CaptureDeletion, Error> {
        match locate_capture(folder, &ForgetBackend::data_dir(self)?) {
            CaptureLocation::Own(folder) => delete_capture_files(&folder).map(|()| CaptureDeletion::Deleted),
            CaptureLocation::Outside(folder) if has_capture(&folder) => Ok(CaptureDeletion::Outside(folder)),
            CaptureLocation::Outside(_) => Ok(CaptureDeletion::Deleted),
        }
    }

    fn delete_unfinished_captures(&self, conversation: &ConversationSummary) -> Result<(), Error> {
        let captures = ForgetBackend::data_dir(self)?.join("captures");
        let folders = halo_server::capture_folder_names(conversation).map(|name| captures.join(name));
        let entries = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten();
        let recorded: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        if recorded.is_empty() {
            return Ok(());
        }
        let noted = self.noted_captures()?;
        let is_noted = |folder: &&PathBuf| folder.canonicalize().is_ok_and(|folder| noted.contains(&folder));
        let unfinished = recorded.iter().filter(|folder| !is_noted(folder));
        unfinished.map(PathBuf::as_path).try_for_each(delete_capture_files)
    }

    fn input_history(&self) -> Option<PathBuf> {
        self.input_history_file()
    }

    fn store_backups(&self) -> Result<Vec<PathBuf>, Error> {
        let StoreLocation::Sqlite(path) = self.store_location().map_err(with_kind("finding the store"))?
        else {
            return Ok(Vec::new());
        };
        // They are unfinished copies of the text, and nobody needs them.
        Database::remove_repair_leftovers(&path)?;
        let (Some(folder), Some(file)) = (path.parent(), path.file_name().and_then(|name| name.to_str()))
        else {
            return Ok(Vec::new());
        };
        let is_backup = |name: &str| {
            let rest = name.strip_prefix(file).and_then(|rest| rest.strip_prefix('.'));
            rest.is_some_and(|rest| COPY_NAMES.iter().any(|copy| rest.starts_with(&format!("{copy}-"))))
        };
        let entries = std::fs::read_dir(folder).map_err(|error| {
            Error::unavailable(format!("listing {}", folder.display()), error.to_string()).with_source(error)
        })?;
        let backups = entries.filter_map(Result::ok);
        let backups = backups.filter(|entry| entry.file_name().to_str().is_some_and(is_backup));
        let backups = backups.map(|entry| entry.path()).filter(|path| path.is_file());
        let mut backups: Vec<PathBuf> = backups.collect();
        backups.sort();
        Ok(backups)
    }

    fn has_server_log(&self) -> Result<bool, Error> {
        let location = self.store_location().map_err(with_kind("finding the store"))?;
        Ok(matches!(location, StoreLocation::Postgres(_)))
    }
}

/// What the names of copies begin with that repairs leave beside a store, those of earlier versions included.
const COPY_NAMES: [&str; 6] = ["backup", "damaged", "mended", "repaired", "template", "trial"];

impl Env {
    /// The folders of all captures that a conversation has a record of, without links: a record may name the data folder by
    /// another path.
    fn noted_captures(&self) -> Result<BTreeSet<PathBuf>, Error> {
        let data_dir = ForgetBackend::data_dir(self)?;
        let mut folders = BTreeSet::new();
        let Some(mut store) = self.open_reader()? else { return Ok(folders) };
        for summary in store.list_conversations()? {
            let records = store.records(&summary.name, RecordKind::Capture)?;
            let located = records.iter().map(|record| locate_capture(&record.key, &data_dir));
            folders.extend(located.filter_map(|location| location.folder().canonicalize().ok()));
        }
        Ok(folders)
    }
}

/// Deletes the files of a capture, and its folder if nothing else is in it.
fn delete_capture_files(folder: &Path) -> Result<(), Error> {
    for file in ["capture.json", "steps.jsonl"].map(|file| folder.join(file)) {
        match std::fs::remove_file(&file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                let operation = format!("deleting {}", file.display());
                return Err(Error::unavailable(operation, error.to_string()).with_source(error));
            }
            _ => {}
        }
    }
    let _ = std::fs::remove_dir(folder);
    Ok(())
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
    for known in worlds.collect::<Vec<_>>() {
        keys.extend(world_store::world_kv_keys(store, &known.name, known.created)?);
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::GlobalArgs;
    use clap::Parser;

    #[derive(Parser)]
    struct TestArgs {
        #[command(flatten)]
        global: GlobalArgs,
    }

    #[test]
    fn forget_knows_that_a_server_has_a_log() {
        for (store, has_log) in
            [("postgres://halo@127.0.0.1:9/halo", true), ("sqlite:/nowhere/halo.db", false)]
        {
            let args = TestArgs::parse_from(["halo", "--data", "/nowhere", "--store", store]);
            assert_eq!(args.global.env().has_server_log().expect("a location"), has_log, "{store}");
        }
        let warning = halo_engine::forget::ForgetWarning::ServerLog.to_string();
        assert!(warning.contains("write-ahead log") && warning.contains("CHECKPOINT"), "{warning}");
    }
}
