//! A disk that forgets what was not synced, in any order and in part, and one that is full: for SQLite to write
//! to. Everything is in memory; files are known by name.

use crate::lives::Dice;
use sqlite_plugin::flags::{AccessFlags, LockLevel, OpenOpts};
use sqlite_plugin::vars;
use sqlite_plugin::vfs::{RegisterOpts, Vfs, VfsHandle, VfsResult, register_static};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// The name by which SQLite knows the disk.
pub const VFS: &str = "halo-faulty";

/// A sector: the most that is written as a whole.
const SECTOR: usize = 512;

/// What files hold, and what of it would survive.
#[derive(Clone, Debug, Default)]
struct File {
    /// As the program sees it.
    now: Vec<u8>,
    /// As it was at the last sync.
    safe: Vec<u8>,
    /// What was done since.
    since: Vec<Deed>,
}

#[derive(Clone, Debug)]
enum Deed {
    Write(usize, Vec<u8>),
    Truncate(usize),
}

fn write_at(file: &mut Vec<u8>, offset: usize, data: &[u8]) {
    if file.len() < offset + data.len() {
        file.resize(offset + data.len(), 0);
    }
    file[offset..offset + data.len()].copy_from_slice(data);
}

/// What is on the disk, and what befalls it.
#[derive(Debug, Default)]
struct Disk {
    files: BTreeMap<String, File>,
    /// Writes that still succeed; then the disk is full.
    room: Option<u64>,
    /// Writes since the count was last asked for.
    writes: u64,
}

/// The one disk of this process; tests take turns.
fn disk() -> &'static Arc<Mutex<Disk>> {
    static DISK: OnceLock<Arc<Mutex<Disk>>> = OnceLock::new();
    DISK.get_or_init(|| {
        let disk = Arc::new(Mutex::new(Disk::default()));
        let name = CString::new(VFS).expect("no zeros");
        let layer = Layer(Arc::clone(&disk));
        register_static(name, layer, RegisterOpts { make_default: false }).expect("SQLite takes the layer");
        disk
    })
}

fn held() -> MutexGuard<'static, Disk> {
    disk().lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// An empty disk with all the room in the world.
pub fn new_disk() {
    *held() = Disk::default();
}

/// Only so many more writes succeed; none: all do.
pub fn set_room(room: Option<u64>) {
    held().room = room;
}

/// How many writes there were since this was last asked.
#[must_use]
pub fn writes() -> u64 {
    std::mem::take(&mut held().writes)
}

/// The power goes: of what was not synced, any part is there, in any order, torn at any sector.
pub fn lose_power(dice: &mut Dice) {
    for file in held().files.values_mut() {
        let mut survived = std::mem::take(&mut file.safe);
        let mut since = std::mem::take(&mut file.since);
        // All, none, or by lot; in order, or mixed.
        let share = dice.below(5);
        if dice.below(2) == 0 {
            (1..since.len()).rev().for_each(|i| since.swap(i, dice.below(i as u64 + 1) as usize));
        }
        for deed in since {
            if share == 0 || (share < 4 && dice.below(4) < share) {
                continue;
            }
            match deed {
                Deed::Truncate(size) => survived.truncate(size),
                Deed::Write(offset, data) => {
                    let sectors = data.len().div_ceil(SECTOR) as u64;
                    let torn = dice.below(3) == 0;
                    let part = if torn { dice.below(sectors + 1) as usize * SECTOR } else { data.len() };
                    let end = part.min(data.len());
                    let start =
                        if dice.below(4) == 0 { (dice.below(sectors) as usize * SECTOR).min(end) } else { 0 };
                    write_at(&mut survived, offset + start, &data[start..end]);
                }
            }
        }
        *file = File { now: survived.clone(), safe: survived, since: Vec::new() };
    }
}

struct Layer(Arc<Mutex<Disk>>);

struct Handle {
    name: String,
    temporary: bool,
}

impl VfsHandle for Handle {
    fn readonly(&self) -> bool {
        false
    }

    fn in_memory(&self) -> bool {
        false
    }
}

impl Layer {
    fn disk(&self) -> MutexGuard<'_, Disk> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn with<T>(&self, handle: &Handle, work: impl FnOnce(&mut File) -> T) -> T {
        work(self.disk().files.entry(handle.name.clone()).or_default())
    }
}

impl Vfs for Layer {
    type Handle = Handle;

    fn open(&self, path: Option<&str>, _opts: OpenOpts) -> VfsResult<Handle> {
        let temporary = path.is_none();
        let name = path.map_or_else(|| format!("temporary {}", self.disk().files.len()), str::to_owned);
        self.disk().files.entry(name.clone()).or_default();
        Ok(Handle { name, temporary })
    }

    fn delete(&self, path: &str) -> VfsResult<()> {
        self.disk().files.remove(path);
        Ok(())
    }

    fn access(&self, path: &str, _flags: AccessFlags) -> VfsResult<bool> {
        Ok(self.disk().files.contains_key(path))
    }

    fn file_size(&self, handle: &mut Handle) -> VfsResult<usize> {
        Ok(self.with(handle, |f| f.now.len()))
    }

    fn truncate(&self, handle: &mut Handle, size: usize) -> VfsResult<()> {
        self.with(handle, |f| {
            f.now.truncate(size);
            f.since.push(Deed::Truncate(size));
        });
        Ok(())
    }

    fn write(&self, handle: &mut Handle, offset: usize, data: &[u8]) -> VfsResult<usize> {
        let mut disk = self.disk();
        disk.writes += 1;
        match &mut disk.room {
            Some(0) => return Err(vars::SQLITE_FULL),
            Some(room) => *room -= 1,
            None => {}
        }
        let file = disk.files.entry(handle.name.clone()).or_default();
        write_at(&mut file.now, offset, data);
        file.since.push(Deed::Write(offset, data.to_vec()));
        Ok(data.len())
    }

    fn read(&self, handle: &mut Handle, offset: usize, data: &mut [u8]) -> VfsResult<usize> {
        Ok(self.with(handle, |f| {
            let from = offset.min(f.now.len());
            let part = &f.now[from..(from + data.len()).min(f.now.len())];
            data[..part.len()].copy_from_slice(part);
            part.len()
        }))
    }

    fn lock(&self, _handle: &mut Handle, _level: LockLevel) -> VfsResult<()> {
        Ok(())
    }

    fn unlock(&self, _handle: &mut Handle, _level: LockLevel) -> VfsResult<()> {
        Ok(())
    }

    fn check_reserved_lock(&self, _handle: &mut Handle) -> VfsResult<bool> {
        Ok(false)
    }

    fn sync(&self, handle: &mut Handle) -> VfsResult<()> {
        self.with(handle, |f| {
            f.since.clear();
            f.safe.clone_from(&f.now);
        });
        Ok(())
    }

    fn close(&self, handle: Handle) -> VfsResult<()> {
        if handle.temporary {
            self.disk().files.remove(&handle.name);
        }
        Ok(())
    }

    fn sector_size(&self, _handle: &mut Handle) -> VfsResult<i32> {
        Ok(SECTOR as i32)
    }

    /// Nothing is promised: not that writes are whole, nor that neighbours are left alone.
    fn device_characteristics(&self, _handle: &mut Handle) -> VfsResult<i32> {
        Ok(0)
    }
}
