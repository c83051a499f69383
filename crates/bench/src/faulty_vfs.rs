//! In-memory disks for SQLite that lose writes that were not synced, in any order and in part, and that can be full. Each
//! folder is a disk of its own.

use crate::random_changes::BenchRng;
use parking_lot::{Mutex, MutexGuard};
use sqlite_plugin::flags::{AccessFlags, LockLevel, OpenOpts};
use sqlite_plugin::vars;
use sqlite_plugin::vfs::{RegisterOpts, Vfs, VfsHandle, VfsResult, register_static};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
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
    /// Counts the programs that used the disk and are gone: what they had open does nothing any more.
    generation: u64,
}

type FaultyDisks = BTreeMap<String, FaultyDisk>;

/// The disks of this process by their folder.
fn shared_disks() -> &'static Arc<Mutex<FaultyDisks>> {
    static DISKS: OnceLock<Arc<Mutex<FaultyDisks>>> = OnceLock::new();
    DISKS.get_or_init(|| {
        let disks = Arc::new(Mutex::new(FaultyDisks::default()));
        let name = CString::new(VFS_NAME).expect("no zeros");
        let layer = FaultyVfs(Arc::clone(&disks));
        register_static(name, layer, RegisterOpts { make_default: false }).expect("SQLite takes the layer");
        disks
    })
}

/// The folder of a file: the name of its disk.
fn folder_of(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// A disk by its folder. Its files are gone with this handle.
#[derive(Debug)]
pub struct FaultyVolume(String);

impl FaultyVolume {
    #[must_use]
    pub fn new() -> Self {
        static VOLUMES: AtomicU64 = AtomicU64::new(0);
        let volume = Self(format!("/{}", VOLUMES.fetch_add(1, Ordering::Relaxed)));
        volume.with(|disk| *disk = FaultyDisk::default());
        volume
    }

    /// A database on it.
    #[must_use]
    pub fn database_path(&self) -> PathBuf {
        PathBuf::from(format!("{}/halo.db", self.0))
    }

    fn with<T>(&self, work: impl FnOnce(&mut FaultyDisk) -> T) -> T {
        work(shared_disks().lock().entry(self.0.clone()).or_default())
    }

    /// Only so many more writes succeed; none: all do.
    pub fn set_writes_left(&self, room: Option<u64>) {
        self.with(|disk| disk.writes_left = room);
    }

    /// The number of writes since the last call.
    #[must_use]
    pub fn take_write_count(&self) -> u64 {
        self.with(|disk| std::mem::take(&mut disk.writes))
    }

    /// The program that has files open is killed: its writes stay, and it makes no more.
    pub fn kill_program(&self) {
        self.with(|disk| disk.generation += 1);
    }

    /// Cuts the power: any part of the unsynced writes survives, in any order, torn at any sector.
    pub fn lose_power(&self, dice: &mut BenchRng) {
        self.with(|disk| {
            disk.generation += 1;
            lose_unsynced(disk, dice);
        });
    }
}

impl Drop for FaultyVolume {
    fn drop(&mut self) {
        shared_disks().lock().remove(&self.0);
    }
}

fn lose_unsynced(disk: &mut FaultyDisk, dice: &mut BenchRng) {
    for file in disk.files.values_mut() {
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

struct FaultyVfs(Arc<Mutex<FaultyDisks>>);

struct FaultyVfsHandle {
    name: String,
    temporary: bool,
    /// That of the disk when the file was opened.
    generation: u64,
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
    fn lock_disks(&self) -> MutexGuard<'_, FaultyDisks> {
        self.0.lock()
    }

    /// Fails where the program that opened the file is gone.
    fn with_disk<T>(
        &self,
        handle: &FaultyVfsHandle,
        work: impl FnOnce(&mut FaultyDisk) -> VfsResult<T>,
    ) -> VfsResult<T> {
        let mut disks = self.lock_disks();
        let disk = disks.get_mut(folder_of(&handle.name)).ok_or(vars::SQLITE_IOERR)?;
        if disk.generation == handle.generation { work(disk) } else { Err(vars::SQLITE_IOERR) }
    }

    fn with_file<T>(
        &self,
        handle: &FaultyVfsHandle,
        work: impl FnOnce(&mut FaultyFile) -> T,
    ) -> VfsResult<T> {
        self.with_disk(handle, |disk| Ok(work(disk.files.entry(handle.name.clone()).or_default())))
    }
}

impl Vfs for FaultyVfs {
    type Handle = FaultyVfsHandle;

    fn open(&self, path: Option<&str>, _opts: OpenOpts) -> VfsResult<FaultyVfsHandle> {
        static TEMPORARY_FILES: AtomicU64 = AtomicU64::new(0);
        let temporary = path.is_none();
        let unnamed = || format!("temporary {}", TEMPORARY_FILES.fetch_add(1, Ordering::Relaxed));
        let name = path.map_or_else(unnamed, str::to_owned);
        let mut disks = self.lock_disks();
        let disk = disks.entry(folder_of(&name).to_owned()).or_default();
        disk.files.entry(name.clone()).or_default();
        Ok(FaultyVfsHandle { name, temporary, generation: disk.generation })
    }

    fn delete(&self, path: &str) -> VfsResult<()> {
        if let Some(disk) = self.lock_disks().get_mut(folder_of(path)) {
            disk.files.remove(path);
        }
        Ok(())
    }

    fn access(&self, path: &str, _flags: AccessFlags) -> VfsResult<bool> {
        Ok(self.lock_disks().get(folder_of(path)).is_some_and(|disk| disk.files.contains_key(path)))
    }

    fn file_size(&self, handle: &mut FaultyVfsHandle) -> VfsResult<usize> {
        self.with_file(handle, |f| f.current.len())
    }

    fn truncate(&self, handle: &mut FaultyVfsHandle, size: usize) -> VfsResult<()> {
        self.with_file(handle, |f| {
            f.current.truncate(size);
            f.unsynced.push(UnsyncedOp::Truncate(size));
        })
    }

    fn write(&self, handle: &mut FaultyVfsHandle, offset: usize, data: &[u8]) -> VfsResult<usize> {
        self.with_disk(handle, |disk| {
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
        })
    }

    fn read(&self, handle: &mut FaultyVfsHandle, offset: usize, data: &mut [u8]) -> VfsResult<usize> {
        self.with_file(handle, |f| {
            let from = offset.min(f.current.len());
            let part = &f.current[from..(from + data.len()).min(f.current.len())];
            data[..part.len()].copy_from_slice(part);
            part.len()
        })
    }

    fn lock(&self, handle: &mut FaultyVfsHandle, _level: LockLevel) -> VfsResult<()> {
        self.with_disk(handle, |_| Ok(()))
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
        })
    }

    fn close(&self, handle: FaultyVfsHandle) -> VfsResult<()> {
        if handle.temporary
            && let Some(disk) = self.lock_disks().get_mut(folder_of(&handle.name))
        {
            disk.files.remove(&handle.name);
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
