//! Damage in the write-ahead log of an SQLite file. SQLite reads the log up to the first frame whose checksum does not match
//! and takes that for the end: commits behind it are lost without an error. Here they are counted, and the log is kept.

use crate::files::{create_private, io_error, unused_sibling_path};
use halo_core::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

const HEADER_BYTES: usize = 32;
const FRAME_HEADER_BYTES: usize = 24;
/// The header begins with one of two numbers that differ in the last bit: the byte order of the checksums.
const MAGIC: u32 = 0x377f_0682;

/// Frames that SQLite does not read because one before them is damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WalDamage {
    /// The first damaged frame, counted from 1; 0: the header of the log.
    pub frame: usize,
    /// How many frames of the same log follow it.
    pub lost_frames: usize,
    /// How many of those end a transaction.
    pub lost_commits: usize,
}

/// Looks for damage in the write-ahead log of a database that was not opened yet: opening overwrites the evidence.
pub fn find_wal_damage(database: &Path) -> Result<Option<WalDamage>, Error> {
    let wal = wal_path(database);
    let read = || match fs::read(&wal) {
        Ok(bytes) => Ok(scan(&bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error(&error, &wal).with_context("checking the write-ahead log")),
    };
    let first = read()?;
    if first.is_none() {
        return Ok(None);
    }
    // Another program may be writing the log: a frame that was read half is whole a moment later.
    std::thread::sleep(Duration::from_millis(50));
    Ok(read()?.filter(|second| Some(second.frame) == first.map(|first| first.frame)))
}

/// Copies the write-ahead log, and returns the path of the copy.
pub fn keep_wal(database: &Path) -> Result<PathBuf, Error> {
    let copy = PathBuf::from(format!("{}-wal", unused_sibling_path(database, "damaged").display()));
    let kept = create_private(&copy)
        .and_then(|()| fs::copy(wal_path(database), &copy).map_err(|e| io_error(&e, &copy)));
    kept.map(|_| copy).map_err(|e| e.with_context("keeping the write-ahead log"))
}

fn wal_path(database: &Path) -> PathBuf {
    PathBuf::from(format!("{}-wal", database.display()))
}

/// The checksum of SQLite's log: two running sums over pairs of words.
#[derive(Clone, Copy)]
struct WalChecksum {
    big_endian: bool,
    sums: (u32, u32),
}

impl WalChecksum {
    fn add(&mut self, bytes: &[u8]) {
        for pair in bytes.chunks_exact(8) {
            let word = |at: usize| {
                let word = [pair[at], pair[at + 1], pair[at + 2], pair[at + 3]];
                if self.big_endian { u32::from_be_bytes(word) } else { u32::from_le_bytes(word) }
            };
            self.sums.0 = self.sums.0.wrapping_add(word(0)).wrapping_add(self.sums.1);
            self.sums.1 = self.sums.1.wrapping_add(word(4)).wrapping_add(self.sums.0);
        }
    }
}

fn be_word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn scan(bytes: &[u8]) -> Option<WalDamage> {
    if bytes.len() < HEADER_BYTES {
        return None;
    }
    let (header, body) = bytes.split_at(HEADER_BYTES);
    let page_bytes = be_word(header, 8) as usize;
    let mut checksum = WalChecksum { big_endian: be_word(header, 0) & 1 == 1, sums: (0, 0) };
    checksum.add(&header[..24]);
    let header_is_whole = be_word(header, 0) & !1 == MAGIC
        && page_bytes.is_power_of_two()
        && (512..=65536).contains(&page_bytes)
        && checksum.sums == (be_word(header, 24), be_word(header, 28));
    // With a damaged header, the first frame tells which frames belong together. Halo's pages have this size.
    let page_bytes = if header_is_whole { page_bytes } else { 4096 };
    let frames: Vec<&[u8]> = body.chunks_exact(FRAME_HEADER_BYTES + page_bytes).collect();
    let salts = |frame: &[u8]| (be_word(frame, 8), be_word(frame, 12));
    let own_salts =
        if header_is_whole { (be_word(header, 16), be_word(header, 20)) } else { salts(frames.first()?) };
    let is_whole = |frame: &&&[u8]| {
        checksum.add(&frame[..8]);
        checksum.add(&frame[FRAME_HEADER_BYTES..]);
        salts(frame) == own_salts && checksum.sums == (be_word(frame, 16), be_word(frame, 20))
    };
    let whole = if header_is_whole { frames.iter().take_while(is_whole).count() } else { 0 };
    // Frames of an earlier log, whose space this one uses again, have other salts. The damaged frame itself may be one that
    // a power cut has torn: only frames behind it show that something was lost.
    let behind = frames.iter().skip(whole + usize::from(header_is_whole));
    let lost: Vec<_> = behind.filter(|frame| salts(frame) == own_salts).collect();
    let lost_commits = lost.iter().filter(|frame| be_word(frame, 4) != 0).count();
    (!lost.is_empty()).then_some(WalDamage {
        frame: if header_is_whole { whole + 1 } else { 0 },
        lost_frames: lost.len(),
        lost_commits,
    })
}
