//! The file format of one entry: a header and the cells, each with its own xxh3 checksum.
//!
//! ```text
//! 8  magic "HALO-KV2"          2  number of tokens
//! 16 model fingerprint         2  key of the first token: offset
//! 8  key: timeline position    4  each token
//! 4  position                  8  checksum of all of the above
//!                              8  checksum of the cells, then the cells
//! ```
//!
//! All numbers are little-endian. A file with any wrong bit is not used. The header has a checksum of its own so that
//! planning a restore reads a few hundred bytes and not megabytes of cells.

use super::entry::{KvArchiveEntry, KvArchiveHeader};
use crate::ffi::{LlamaPos, LlamaToken};
use crate::token_key::TokenKey;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"HALO-KV2";

/// Bytes before the tokens.
const FIXED_HEADER_BYTES: usize = 40;

/// Bytes that an entry takes on disk.
pub(super) fn file_bytes(entry: &KvArchiveEntry) -> u64 {
    (FIXED_HEADER_BYTES + entry.tokens.len() * 4 + 16 + entry.cells.len()) as u64
}

pub(super) fn write_entry(
    path: &Path,
    entry: &KvArchiveEntry,
    model_fingerprint: u128,
) -> std::io::Result<()> {
    let mut header = Vec::with_capacity(64 + entry.tokens.len() * 4);
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(&model_fingerprint.to_le_bytes());
    header.extend_from_slice(&entry.start.timeline_pos.to_le_bytes());
    header.extend_from_slice(&entry.position.to_le_bytes());
    header.extend_from_slice(&(entry.tokens.len() as u16).to_le_bytes());
    header.extend_from_slice(&entry.start.offset.to_le_bytes());
    entry.tokens.iter().for_each(|t| header.extend_from_slice(&t.to_le_bytes()));
    let checksums = [xxh3_64(&header).to_le_bytes(), xxh3_64(&entry.cells).to_le_bytes()].concat();
    let folder = path.parent().ok_or(std::io::ErrorKind::InvalidInput)?;
    create_private_dir(folder)?;
    // The process id keeps two processes from writing to the same temporary file.
    let part = path.with_extension(format!("{}.part", std::process::id()));
    let mut file = File::create(&part)?;
    let written = file
        .write_all(&header)
        .and_then(|()| file.write_all(&checksums))
        .and_then(|()| file.write_all(&entry.cells));
    match written.and_then(|()| fs::rename(&part, path)) {
        Ok(()) => Ok(()),
        Err(error) => {
            let _ = fs::remove_file(&part);
            Err(error)
        }
    }
}

pub(super) fn read_entry(
    path: &Path,
    model_fingerprint: u128,
    start: TokenKey,
    len: usize,
) -> Result<KvArchiveEntry, String> {
    let bytes = fs::read(path).map_err(|error| error.to_string())?;
    parse_entry(&bytes, model_fingerprint, start, len).ok_or_else(|| "it is damaged".into())
}

/// Reads and checks the header alone.
pub(super) fn read_header(
    path: &Path,
    model_fingerprint: u128,
    start: TokenKey,
    len: usize,
) -> Result<KvArchiveHeader, String> {
    let mut bytes = vec![0; FIXED_HEADER_BYTES + len * 4 + 8];
    let mut file = File::open(path).map_err(|error| error.to_string())?;
    file.read_exact(&mut bytes).map_err(|error| error.to_string())?;
    let parsed = parse_header(&bytes, model_fingerprint, start, len);
    parsed.map(|(header, _)| header).ok_or_else(|| "it is damaged".into())
}

/// The header and the bytes that follow it and its checksum.
fn parse_header(
    bytes: &[u8],
    model_fingerprint: u128,
    start: TokenKey,
    len: usize,
) -> Option<(KvArchiveHeader, &[u8])> {
    let (header, rest) = bytes.split_at_checked(FIXED_HEADER_BYTES.checked_add(len.checked_mul(4)?)?)?;
    let (checksum, rest) = rest.split_at_checked(8)?;
    let (magic, fixed) = header.split_at(8);
    let fingerprint: [u8; 16] = fixed[..16].try_into().ok()?;
    let timeline_pos = i64::from_le_bytes(fixed[16..24].try_into().ok()?);
    let position = LlamaPos::from_le_bytes(fixed[24..28].try_into().ok()?);
    let token_count = usize::from(u16::from_le_bytes(fixed[28..30].try_into().ok()?));
    let offset = u16::from_le_bytes(fixed[30..32].try_into().ok()?);
    let as_expected = magic == MAGIC
        && fingerprint == model_fingerprint.to_le_bytes()
        && TokenKey { timeline_pos, offset } == start
        && token_count == len;
    if !as_expected || position < 0 || xxh3_64(header).to_le_bytes() != checksum {
        return None;
    }
    let token = |t: &[u8]| LlamaToken::from_le_bytes([t[0], t[1], t[2], t[3]]);
    let tokens = header[FIXED_HEADER_BYTES..].chunks_exact(4).map(token).collect();
    Some((KvArchiveHeader { start, tokens, position, prefix: None }, rest))
}

fn parse_entry(bytes: &[u8], model_fingerprint: u128, start: TokenKey, len: usize) -> Option<KvArchiveEntry> {
    let (header, rest) = parse_header(bytes, model_fingerprint, start, len)?;
    let KvArchiveHeader { start, tokens, position, prefix } = header;
    let (checksum, cells) = rest.split_at_checked(8)?;
    (xxh3_64(cells).to_le_bytes() == checksum).then(|| KvArchiveEntry {
        start,
        tokens,
        position,
        cells: cells.to_vec(),
        prefix,
    })
}

/// Creates a folder that only its owner can read.
pub(super) fn create_private_dir(folder: &Path) -> std::io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> KvArchiveEntry {
        KvArchiveEntry {
            start: TokenKey::at_position(10),
            tokens: (0..5).collect(),
            position: 17,
            cells: vec![10; 60],
            prefix: None,
        }
    }

    #[test]
    fn kv_archive_file_detects_damage_at_every_byte() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("x.kv");
        write_entry(&path, &entry(), 1).expect("written");
        let good = fs::read(&path).expect("read");
        assert_eq!(parse_entry(&good, 1, TokenKey::at_position(10), 5), Some(entry()));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert_eq!(parse_entry(&bad, 1, TokenKey::at_position(10), 5), None, "byte {at}");
            assert_eq!(parse_entry(&good[..at], 1, TokenKey::at_position(10), 5), None, "cut at {at}");
        }
        assert_eq!(
            (
                parse_entry(&good, 2, TokenKey::at_position(10), 5),
                parse_entry(&good, 1, TokenKey::at_position(11), 5)
            ),
            (None, None)
        );
    }
}
