//! Lookup, eviction and persistence of the KV archive.

use super::archive::{KvArchive, KvArchiveLimits};
use super::entry::KvArchiveEntry;
use super::folder::list_dir;
use super::writer::KvArchiveWriter;
use crate::ffi::{LlamaPos, LlamaToken};
use crate::token_key::TokenKey;
use std::fs;
use std::path::{Path, PathBuf};

fn entry(start: i64, len: usize, size: usize) -> KvArchiveEntry {
    let tokens = (0..len as LlamaToken).collect();
    KvArchiveEntry {
        start: TokenKey::at_position(start),
        tokens,
        position: start as LlamaPos + 7,
        cells: vec![start as u8; size],
        prefix: None,
    }
}

fn limits(folder: &Path, ram: u64, disk: u64) -> KvArchiveLimits {
    KvArchiveLimits { ram, disk, folder: Some(folder.to_owned()) }
}

#[test]
fn kv_archive_finds_entry_by_any_of_its_tokens() {
    let mut archive = KvArchive::open(KvArchiveLimits { ram: 1 << 20, disk: 0, folder: None }, 1);
    archive.insert("a", entry(10, 5, 100));
    archive.insert("a", entry(15, 5, 100));
    archive.insert("b", entry(10, 3, 100));
    let mut starts = |c: &str, k: i64| archive.get(c, TokenKey::at_position(k)).map(|e| e.start.timeline_pos);
    assert_eq!(
        [9, 10, 14, 15, 19, 20].map(|k| starts("a", k)),
        [None, Some(10), Some(10), Some(15), Some(15), None]
    );
    assert_eq!([12, 13].map(|k| starts("b", k)), [Some(10), None]);
    let tokens: Vec<LlamaToken> = (0..6).collect();
    assert!(
        archive.contains("a", TokenKey::at_position(10), &tokens[..5], 17)
            && archive.contains("a", TokenKey::at_position(10), &tokens[..3], 17)
    );
    assert!(
        !archive.contains("a", TokenKey::at_position(10), &tokens, 17)
            && !archive.contains("a", TokenKey::at_position(10), &tokens[..5], 18)
    );
    assert!(!archive.contains("a", TokenKey::at_position(10), &[0, 1, 9], 17), "other tokens");
    archive.mark_stale("a", TokenKey::at_position(14));
    archive.mark_stale("a", TokenKey::at_position(20));
    assert!(
        !archive.contains("a", TokenKey::at_position(10), &tokens[..5], 17)
            && archive.contains("a", TokenKey::at_position(15), &tokens[..5], 22)
    );
    assert!(archive.get("a", TokenKey::at_position(14)).is_some());
    // A short entry within a long one does not hide the rest of the long one.
    archive.insert("a", entry(100, 120, 100));
    archive.insert("a", entry(140, 20, 100));
    let starts = [139, 140, 159, 160, 219]
        .map(|k| archive.get("a", TokenKey::at_position(k)).map(|e| e.start.timeline_pos));
    assert_eq!(starts, [100, 140, 140, 100, 100].map(Some));
    archive.forget("a");
    assert_eq!(
        (archive.get("a", TokenKey::at_position(10)), archive.get("b", TokenKey::at_position(10)).is_some()),
        (None, true)
    );
}

/// Bytes of an entry of five tokens and a hundred bytes of cells.
const ENTRY_BYTES: u64 = 176;

#[test]
fn kv_archive_evicts_least_recently_used() {
    let mut archive = KvArchive::open(KvArchiveLimits { ram: 10 * ENTRY_BYTES, disk: 0, folder: None }, 1);
    for start in 0..10 {
        archive.insert("a", entry(start * 10, 5, 100));
    }
    assert_eq!(archive.usage().0, 10 * ENTRY_BYTES);
    assert!(archive.get("a", TokenKey::at_position(0)).is_some());
    archive.insert("a", entry(100, 5, 100));
    // Eviction goes down to 90 % of the limit: two entries.
    let in_ram: Vec<i64> =
        (0..11).filter(|k| archive.get("a", TokenKey::at_position(k * 10)).is_some()).collect();
    assert_eq!((in_ram, archive.usage().0), (vec![0, 3, 4, 5, 6, 7, 8, 9, 10], 9 * ENTRY_BYTES));
}

fn folder_bytes(folder: &Path) -> u64 {
    let size = |path: PathBuf| {
        if path.is_dir() { folder_bytes(&path) } else { fs::metadata(&path).map_or(0, |m| m.len()) }
    };
    list_dir(folder).into_iter().map(size).sum()
}

#[test]
fn kv_archive_entries_evicted_from_ram_survive_on_disk() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut archive = KvArchive::open(limits(folder.path(), 2 * ENTRY_BYTES, 1 << 20), 1);
    for start in [-5, 10, 20] {
        archive.insert("a", entry(start, 5, 100));
    }
    archive.flush();
    assert_eq!(
        (archive.usage(), folder_bytes(folder.path())),
        ((ENTRY_BYTES, 3 * ENTRY_BYTES), 3 * ENTRY_BYTES)
    );
    drop(archive);
    let mut archive = KvArchive::open(limits(folder.path(), 1 << 20, 1 << 20), 1);
    for start in [-5, 10, 20] {
        let header = archive.header("a", TokenKey::at_position(start + 2)).expect("the entry is archived");
        assert_eq!(
            (header.start, header.tokens.len(), header.position),
            (TokenKey::at_position(start), 5, start as LlamaPos + 7)
        );
        assert_eq!(archive.get("a", TokenKey::at_position(start)).as_deref(), Some(&entry(start, 5, 100)));
    }
    // A longer entry replaces a shorter one with the same first token.
    archive.insert("a", entry(10, 8, 100));
    drop(archive);
    let mut archive = KvArchive::open(limits(folder.path(), 0, 1 << 20), 1);
    assert_eq!(archive.get("a", TokenKey::at_position(17)).map(|e| e.tokens.len()), Some(8));
    drop(archive);
    // Another model finds nothing, and when the disk limit is reached, the files of other models are evicted first.
    let mut other = KvArchive::open(limits(folder.path(), 0, 1 << 20), 2);
    assert_eq!(other.get("a", TokenKey::at_position(10)), None);
    drop(other);
    let mut tight = KvArchive::open(limits(folder.path(), 0, 4 * ENTRY_BYTES), 2);
    tight.insert("a", entry(10, 5, 400));
    drop(tight);
    assert!(folder_bytes(folder.path()) <= 4 * ENTRY_BYTES);
    let mut tight = KvArchive::open(limits(folder.path(), 0, 4 * ENTRY_BYTES), 2);
    assert!(tight.get("a", TokenKey::at_position(10)).is_some(), "the entry of this model stays");
}

/// Entries of another process are found after a restart, and no file is left over when all are deleted.
#[test]
fn kv_archive_folder_can_be_shared_by_processes() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut one, mut two) = (
        KvArchive::open(limits(folder.path(), 0, 1 << 20), 1),
        KvArchive::open(limits(folder.path(), 0, 1 << 20), 1),
    );
    one.insert("a", entry(10, 5, 100));
    two.insert("a", entry(10, 9, 100));
    two.insert("a", entry(30, 9, 100));
    one.flush();
    two.flush();
    // A file that another process deleted is missing, and nothing else.
    one.forget("a");
    one.flush();
    assert!(two.get("a", TokenKey::at_position(30)).is_some());
    drop((one, two));
    let mut after = KvArchive::open(limits(folder.path(), 0, 1 << 20), 1);
    after.forget("a");
    drop(after);
    assert_eq!(folder_bytes(folder.path()), 0);
}

#[test]
fn kv_archive_keeps_ram_and_disk_limits() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut archive = KvArchive::open(limits(folder.path(), 0, 10 * ENTRY_BYTES), 1);
    for start in 0..50 {
        archive.insert("a", entry(start * 10, 5, 100));
    }
    archive.flush();
    assert!(folder_bytes(folder.path()) <= 10 * ENTRY_BYTES && archive.usage().0 == 0);
    let remaining: Vec<i64> =
        (0..50).filter(|&k| archive.get("a", TokenKey::at_position(k * 10)).is_some()).collect();
    assert!(
        remaining.len() >= 8 && remaining == (50 - remaining.len() as i64..50).collect::<Vec<_>>(),
        "the latest entries stay: {remaining:?}"
    );
    // The write queue is bounded too: a save waits for the disk.
    let mut archive = KvArchive::open(limits(folder.path(), 1 << 20, 1 << 30), 2);
    for start in 0..40 {
        archive.insert("a", entry(start * 10, 5, 8 << 20));
        assert!(
            archive.usage().0 <= (1 << 20) + KvArchiveWriter::MAX_QUEUED_BYTES + (16 << 20),
            "{}",
            archive.usage().0
        );
    }
}

#[test]
fn kv_archive_falls_back_to_ram_without_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    fs::write(&file, "x").expect("written");
    let mut archive = KvArchive::open(limits(&file, 1 << 20, 1 << 20), 1);
    archive.insert("a", entry(10, 5, 100));
    assert!(archive.get("a", TokenKey::at_position(12)).is_some());
}

/// The archive leaves a reserve of the disk free: it deletes its oldest files when the disk fills up from elsewhere, and
/// writes nothing on a disk that has no more than the reserve.
#[test]
fn kv_archive_leaves_a_reserve_of_the_disk_free() {
    use super::disk_space::DiskSpace;
    use std::sync::atomic::{AtomicU64, Ordering};
    static FREE: AtomicU64 = AtomicU64::new(0);
    let space = |_: &Path| Some(DiskSpace { free: FREE.load(Ordering::SeqCst), total: 1 << 30 });
    let reserve = DiskSpace { free: 0, total: 1 << 30 }.reserve();
    assert_eq!(reserve, 64 << 20);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut archive = KvArchive::open_on_disk(limits(folder.path(), 1 << 20, 1 << 30), 1, space);
    FREE.store(reserve + (1 << 20), Ordering::SeqCst);
    for n in 0..8 {
        archive.insert("a", entry(n * 10, 5, 10_000));
    }
    archive.flush();
    let on_disk = archive.usage().1;
    assert!(on_disk > 80_000, "{on_disk}");
    // Something else has used the disk: the archive gives back what the reserve lacks.
    FREE.store(reserve - 40_000, Ordering::SeqCst);
    archive.flush();
    assert!((1..=on_disk - 40_000).contains(&archive.usage().1), "{}", archive.usage().1);
    FREE.store(reserve / 2, Ordering::SeqCst);
    archive.insert("a", entry(200, 5, 10_000));
    archive.flush();
    assert_eq!(archive.usage().1, 0);
    assert!(archive.get("a", TokenKey::at_position(200)).is_some(), "it is in RAM");
    assert_eq!(files(folder.path()), Vec::<PathBuf>::new());
}

/// The store needs space: the least recently used files are deleted first, of all models, and nothing else.
#[test]
fn kv_archive_files_are_deleted_when_space_is_needed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for model in 1..=2 {
        let mut archive = KvArchive::open(limits(folder.path(), 1 << 20, 1 << 30), model);
        for n in 0..5 {
            archive.insert("a", entry(n * 10, 5, 10_000));
        }
        archive.flush();
    }
    let elsewhere = folder.path().join("note.txt");
    fs::write(&elsewhere, "kept").expect("the file is written");
    let before = files(folder.path()).len();
    let freed = super::free_disk_space(folder.path(), 25_000);
    assert!((25_000..40_000).contains(&freed), "{freed}");
    assert_eq!(files(folder.path()).len(), before - 3);
    let mut archive = KvArchive::open(limits(folder.path(), 1 << 20, 1 << 30), 1);
    let found = (0..5).filter(|n| archive.get("a", TokenKey::at_position(n * 10)).is_some()).count();
    assert_eq!(found, 2, "the files of the first model are the oldest");
    assert!(super::free_disk_space(folder.path(), u64::MAX) > 0);
    assert_eq!(super::free_disk_space(folder.path(), u64::MAX), 0);
    assert!(elsewhere.exists());
}

/// The entry files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let conversations = list_dir(folder).into_iter().flat_map(|model| list_dir(&model));
    conversations.flat_map(|conversation| list_dir(&conversation)).collect()
}

/// Archives of two models in one folder stay within the limits together; neither takes the files of the other for lost.
#[test]
fn kv_archive_shares_limits_with_archives_of_other_models() {
    let folder = tempfile::tempdir().expect("a folder");
    let limits = limits(folder.path(), 20 * ENTRY_BYTES, 20 * ENTRY_BYTES);
    let fill = |archive: &mut KvArchive, entries: std::ops::Range<i64>| {
        entries.for_each(|n| archive.insert("a", entry(n * 10, 5, 100)));
        archive.flush();
    };
    let on_disk = || super::verify_folder(folder.path());
    let mut first = KvArchive::open(limits.clone(), 1);
    fill(&mut first, 0..20);
    assert_eq!(first.usage(), (20 * ENTRY_BYTES, 20 * ENTRY_BYTES), "alone it may use everything");
    let mut second = KvArchive::open(limits.clone(), 2);
    fill(&mut second, 0..20);
    let half = 10 * ENTRY_BYTES;
    let (ram, disk) = second.usage();
    assert!(ram <= half && disk <= half && disk >= half / 2, "{ram} {disk}");
    fill(&mut first, 20..21);
    let (ram, disk) = first.usage();
    assert!(ram <= half && disk <= half && disk >= half / 2, "{ram} {disk}");
    second.flush();
    let stored = on_disk();
    assert_eq!(stored.bytes, first.usage().1 + second.usage().1);
    assert!(stored.damaged.is_empty() && stored.bytes <= 20 * ENTRY_BYTES, "{stored:?}");
    // The files of a model that was unloaded are the first to go.
    drop(second);
    fill(&mut first, 21..39);
    let stored = on_disk();
    assert!(stored.bytes <= 20 * ENTRY_BYTES && first.usage().1 == stored.bytes, "{stored:?}");
    assert!(first.usage().0 > half, "it may use everything again");
}
