//! An in-memory disk for SQLite that loses writes that were not synced, in any order and in part, and that can be
//! full. Files are known by name.

use crate::random_changes::BenchRng;
use parking_lot::{Mutex, MutexGuard};
use sqlite_plugin::flags::{AccessFlags, LockLevel, OpenOpts};
use sqlite_plugin::vars;
use sqlite_plugin::vfs::{RegisterOpts, Vfs, VfsHandle, VfsResult, register_static};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Arc, OnceLock};

/// The name under which SQLite knows this VFS.
pub const VFS_NAME: &str = "halo-faulty";

/// The size of a sector: larger writes can be torn.
const SECTOR_BYTES: usize = 512;

/// The contents of a file, and what would survive a power cut.
#[derive(Clone, Debug, Default)]
struct FaultyFile {
    /// The contents as the program sees them.
    current: Vec<u8>,
    /// The contents at the last sync.
    synced: Vec<u8>,
    /// Operations since the last sync.
    unsynced: Vec<UnsyncedOp>,
}

#[derive(Clone, Debug)]
enum UnsyncedOp {
    Write(usize, Vec<u8>),
    Truncate(usize),
}

fn write_at(file: &mut Vec<u8>, offset: usize, data: &[u8]) {
    if file.len() < offset + data.len() {
        file.resize(offset + data.len(), 0);
    }
    file[offset..offset + data.len()].copy_from_slice(data);
}

#[derive(Debug, Default)]
struct FaultyDisk {
    files: BTreeMap<String, FaultyFile>,
    /// Writes that still succeed; then the disk is full.
    writes_left: Option<u64>,
    /// Writes since the count was last read.
    writes: u64,
}

/// The one disk of this process; tests take turns.
fn shared_disk() -> &'static Arc<Mutex<FaultyDisk>> {
    static DISK: OnceLock<Arc<Mutex<FaultyDisk>>> = OnceLock::new();
    DISK.get_or_init(|| {
        let disk = Arc::new(Mutex::new(FaultyDisk::default()));
        let name = CString::new(VFS_NAME).expect("no zeros");
        let layer = FaultyVfs(Arc::clone(&disk));
        register_static(name, layer, RegisterOpts { make_default: false }).expect("SQLite takes the layer");
        disk
    })
}

fn lock_disk() -> MutexGuard<'static, FaultyDisk> {
    shared_disk().lock()
}

/// Empties the disk and removes the limit on writes.
pub fn reset_disk() {
    *lock_disk() = FaultyDisk::default();
}

/// Only so many more writes succeed; none: all do.
pub fn set_writes_left(room: Option<u64>) {
    lock_disk().writes_left = room;
}

/// The number of writes since the last call.
#[must_use]
pub fn take_write_count() -> u64 {
    std::mem::take(&mut lock_disk().writes)
}

/// Cuts the power: any part of the unsynced writes survives, in any order, torn at any sector.
pub fn lose_power(dice: &mut BenchRng) {
    for file in lock_disk().files.values_mut() {
        let mut survived = std::mem::take(&mut file.synced);
        let mut since = std::mem::take(&mut file.unsynced);
        // All writes, none, or random ones; in order, or shuffled.
        let share = dice.below(5);
        if dice.below(2) == 0 {
            (1..since.len()).rev().for_each(|i| since.swap(i, dice.below(i as u64 + 1) as usize));
        }
        for deed in since {
            if share == 0 || (share < 4 && dice.below(4) < share) {
                continue;
            }
            match deed {
                UnsyncedOp::Truncate(size) => survived.truncate(size),
                UnsyncedOp::Write(offset, data) => {
                    let sectors = data.len().div_ceil(SECTOR_BYTES) as u64;
                    let torn = dice.below(3) == 0;
                    let part =
                        if torn { dice.below(sectors + 1) as usize * SECTOR_BYTES } else { data.len() };
                    let end = part.min(data.len());
                    let start = if dice.below(4) == 0 {
                        (dice.below(sectors) as usize * SECTOR_BYTES).min(end)
                    } else {
                        0
                    };
                    write_at(&mut survived, offset + start, &data[start..end]);
                }
            }
        }
        *file = FaultyFile { current: survived.clone(), synced: survived, unsynced: Vec::new() };
    }
}

struct FaultyVfs(Arc<Mutex<FaultyDisk>>);

struct FaultyVfsHandle {
    name: String,
    temporary: bool,
}

impl VfsHandle for FaultyVfsHandle {
    fn readonly(&self) -> bool {
        false
    }

    fn in_memory(&self) -> bool {
        false
    }
}

impl FaultyVfs {
    fn lock_disk(&self) -> MutexGuard<'_, FaultyDisk> {
        self.0.lock()
    }

    fn with_file<T>(&self, handle: &FaultyVfsHandle, work: impl FnOnce(&mut FaultyFile) -> T) -> T {
        work(self.lock_disk().files.entry(handle.name.clone()).or_default())
    }
}

impl Vfs for FaultyVfs {
    type Handle = FaultyVfsHandle;

    fn open(&self, path: Option<&str>, _opts: OpenOpts) -> VfsResult<FaultyVfsHandle> {
        let temporary = path.is_none();
        let name = path.map_or_else(|| format!("temporary {}", self.lock_disk().files.len()), str::to_owned);
        self.lock_disk().files.entry(name.clone()).or_default();
        Ok(FaultyVfsHandle { name, temporary })
    }

    fn delete(&self, path: &str) -> VfsResult<()> {
        self.lock_disk().files.remove(path);
        Ok(())
    }

    fn access(&self, path: &str, _flags: AccessFlags) -> VfsResult<bool> {
        Ok(self.lock_disk().files.contains_key(path))
    }

    fn file_size(&self, handle: &mut FaultyVfsHandle) -> VfsResult<usize> {
        Ok(self.with_file(handle, |f| f.current.len()))
    }

    fn truncate(&self, handle: &mut FaultyVfsHandle, size: usize) -> VfsResult<()> {
        self.with_file(handle, |f| {
            f.current.truncate(size);
            f.unsynced.push(UnsyncedOp::Truncate(size));
        });
        Ok(())
    }

    fn write(&self, handle: &mut FaultyVfsHandle, offset: usize, data: &[u8]) -> VfsResult<usize> {
        let mut disk = self.lock_disk();
        disk.writes += 1;
        match &mut disk.writes_left {
            Some(0) => return Err(vars::SQLITE_FULL),
            Some(room) => *room -= 1,
            None => {}
        }
        let file = disk.files.entry(handle.name.clone()).or_default();
        write_at(&mut file.current, offset, data);
        file.unsynced.push(UnsyncedOp::Write(offset, data.to_vec()));
        Ok(data.len())
    }

    fn read(&self, handle: &mut FaultyVfsHandle, offset: usize, data: &mut [u8]) -> VfsResult<usize> {
        Ok(self.with_file(handle, |f| {
            let from = offset.min(f.current.len());
            let part = &f.current[from..(from + data.len()).min(f.current.len())];
            data[..part.len()].copy_from_slice(part);
            part.len()
        }))
    }

    fn lock(&self, _handle: &mut FaultyVfsHandle, _level: LockLevel) -> VfsResult<()> {
        Ok(())
    }

    fn unlock(&self, _handle: &mut FaultyVfsHandle, _level: LockLevel) -> VfsResult<()> {
        Ok(())
    }

    fn check_reserved_lock(&self, _handle: &mut FaultyVfsHandle) -> VfsResult<bool> {
        Ok(false)
    }

    fn sync(&self, handle: &mut FaultyVfsHandle) -> VfsResult<()> {
        self.with_file(handle, |f| {
            f.unsynced.clear();
            f.synced.clone_from(&f.current);
        });
        Ok(())
    }

    fn close(&self, handle: FaultyVfsHandle) -> VfsResult<()> {
        if handle.temporary {
            self.lock_disk().files.remove(&handle.name);
        }
        Ok(())
    }

    fn sector_size(&self, _handle: &mut FaultyVfsHandle) -> VfsResult<i32> {
        Ok(SECTOR_BYTES as i32)
    }

    /// The most pessimistic characteristics: writes are not atomic, and neighbouring sectors may be damaged.
    fn device_characteristics(&self, _handle: &mut FaultyVfsHandle) -> VfsResult<i32> {
        Ok(0)
    }
}
