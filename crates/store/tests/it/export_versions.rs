//! An export of every version of the format is kept and must be read, with its text, its state and its index.
//!
//! `tests/versions/export-1.jsonl` was written from `tests/versions/1.db`, the database of the first version, and is never
//! written again. A new version of the format adds a file.

use halo_core::store::{Access, Store};
use halo_core::token::Brightness;
use halo_store::database::{Database, StoreLocation};
use halo_store::exchange::ImportRequest;
use std::fs;
use std::path::{Path, PathBuf};

fn versions_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/versions")
}

fn import(bytes: &[u8], name: &str, store: &mut Database) {
    let request = ImportRequest {
        file_name: "export.jsonl",
        format: None,
        name: Some(name),
        chunk_size: halo_core::chunker::ChunkSize::default(),
        initial_brightness: Brightness(10_000.0),
        model: None,
        validate_rows: None,
    };
    let report = store.import(&mut &bytes[..], request).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(report.losses.iter().count(), 0, "{name}: nothing is lost");
    assert_eq!(report.conversations.len(), 1, "{name}");
}

/// The exports that are kept, each with the database that it was made from.
const EXPORTS: [(&str, &str); 1] = [("export-1.jsonl", "1.db")];

#[test]
fn exports_of_every_version_are_read() {
    for (file, database) in EXPORTS {
        let bytes = fs::read(versions_folder().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let folder = tempfile::tempdir().expect("a folder");
        let location = StoreLocation::Sqlite(folder.path().join("halo.db"));
        let mut store = Database::open(&location).expect("the store opens");
        import(&bytes, "main", &mut store);
        let mut timeline = store.load("main", Access::Read).expect("the conversation loads");
        let hash = fs::read_to_string(versions_folder().join(format!("{database}.hash"))).expect("the hash");
        assert_eq!(timeline.state_hash().to_string(), hash.trim(), "{file}");
        assert!(timeline.context_window(0).text().contains("the gun on the wall"), "{file}");
        let pruned: Vec<_> = timeline.chunks().filter(|c| !c.is_live()).map(|c| c.id()).collect();
        assert!(!pruned.is_empty(), "{file}");
        store.load_bodies("main", &mut timeline, &pruned).expect("the bodies of pruned chunks are there");
        // The index of the export is of its time: a vector without the checksum of its text.
        let embeddings = store.embeddings("main", "kept").expect("the embeddings are read");
        assert_eq!(embeddings.iter().map(|e| e.text_hash).collect::<Vec<_>>(), [0], "{file}");
        assert_eq!(store.check_integrity(&mut |_, _| {}).expect("the check runs"), [], "{file}");

        // What is exported today is read as well, and is the same conversation.
        let mut again = Vec::new();
        store.export("main", &mut again, &mut |_, _| {}).expect("exported");
        import(&again, "again", &mut store);
        let copy = store.load("again", Access::Read).expect("the copy loads");
        assert_eq!(copy.state_hash(), timeline.state_hash(), "{file}");
    }
}
