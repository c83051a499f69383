//! A piece as a file: a head with a sum of its own, then the cells with theirs. What is not right to the last bit is no
//! piece.

use super::{Head, Piece};
use crate::ffi::{Pos, Token};
use crate::key::Key;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

/// What a file of cells begins with.
const MAGIC: &[u8; 8] = b"HALO-KV2";

/// A piece as a file: the mark, what it is a piece of, its tokens, its cells, and a sum over all of it.
pub(super) fn write(path: &Path, piece: &Piece, mark: u128) -> std::io::Result<()> {
    let mut head = Vec::with_capacity(64 + piece.tokens.len() * 4);
    head.extend_from_slice(MAGIC);
    head.extend_from_slice(&mark.to_le_bytes());
    head.extend_from_slice(&piece.start.at.to_le_bytes());
    head.extend_from_slice(&piece.position.to_le_bytes());
    head.extend_from_slice(&(piece.tokens.len() as u16).to_le_bytes());
    head.extend_from_slice(&piece.start.behind.to_le_bytes());
    piece.tokens.iter().for_each(|t| head.extend_from_slice(&t.to_le_bytes()));
    let sum = [xxh3_64(&head).to_le_bytes(), xxh3_64(&piece.cells).to_le_bytes()].concat();
    let folder = path.parent().ok_or(std::io::ErrorKind::InvalidInput)?;
    make_private(folder)?;
    // Another program may be writing the same.
    let part = path.with_extension(format!("{}.part", std::process::id()));
    let mut file = File::create(&part)?;
    let written =
        file.write_all(&head).and_then(|()| file.write_all(&sum)).and_then(|()| file.write_all(&piece.cells));
    match written.and_then(|()| fs::rename(&part, path)) {
        Ok(()) => Ok(()),
        Err(error) => {
            let _ = fs::remove_file(&part);
            Err(error)
        }
    }
}

/// Bytes of a file before its tokens.
pub(super) const FIXED: usize = 40;

pub(super) fn read(path: &Path, mark: u128, start: Key, len: usize) -> Result<Piece, String> {
    let bytes = fs::read(path).map_err(|error| error.to_string())?;
    parse(&bytes, mark, start, len).ok_or_else(|| "it is damaged".into())
}

/// What a file says of itself, checked by its own sum; its cells are not looked at.
pub(super) fn read_head(path: &Path, mark: u128, start: Key, len: usize) -> Result<Head, String> {
    let mut bytes = vec![0; FIXED + len * 4 + 8];
    let mut file = File::open(path).map_err(|error| error.to_string())?;
    file.read_exact(&mut bytes).map_err(|error| error.to_string())?;
    parse_head(&bytes, mark, start, len).map(|(head, _)| head).ok_or_else(|| "it is damaged".into())
}

/// The head of a file, and what comes behind it and its sum.
fn parse_head(bytes: &[u8], mark: u128, start: Key, len: usize) -> Option<(Head, &[u8])> {
    let (head, rest) = bytes.split_at_checked(FIXED.checked_add(len.checked_mul(4)?)?)?;
    let (sum, rest) = rest.split_at_checked(8)?;
    let (magic, fixed) = head.split_at(8);
    let of: [u8; 16] = fixed[..16].try_into().ok()?;
    let at = i64::from_le_bytes(fixed[16..24].try_into().ok()?);
    let position = Pos::from_le_bytes(fixed[24..28].try_into().ok()?);
    let tokens = usize::from(u16::from_le_bytes(fixed[28..30].try_into().ok()?));
    let behind = u16::from_le_bytes(fixed[30..32].try_into().ok()?);
    let named = at == start.at && behind == start.behind;
    let right = magic == MAGIC && of == mark.to_le_bytes() && named && tokens == len;
    if !right || position < 0 || xxh3_64(head).to_le_bytes() != sum {
        return None;
    }
    let token = |t: &[u8]| Token::from_le_bytes([t[0], t[1], t[2], t[3]]);
    let tokens = head[FIXED..].chunks_exact(4).map(token).collect();
    Some((Head { start, tokens, position }, rest))
}

fn parse(bytes: &[u8], mark: u128, start: Key, len: usize) -> Option<Piece> {
    let (Head { start, tokens, position }, rest) = parse_head(bytes, mark, start, len)?;
    let (sum, cells) = rest.split_at_checked(8)?;
    (xxh3_64(cells).to_le_bytes() == sum).then(|| Piece { start, tokens, position, cells: cells.to_vec() })
}

/// Makes a folder for its owner's eyes alone.
pub(super) fn make_private(folder: &Path) -> std::io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece() -> Piece {
        Piece { start: Key::said(10), tokens: (0..5).collect(), position: 17, cells: vec![10; 60] }
    }

    #[test]
    fn damage_is_seen_at_every_byte() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("x.kv");
        write(&path, &piece(), 1).expect("written");
        let good = fs::read(&path).expect("read");
        assert_eq!(parse(&good, 1, Key::said(10), 5), Some(piece()));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert_eq!(parse(&bad, 1, Key::said(10), 5), None, "byte {at}");
            assert_eq!(parse(&good[..at], 1, Key::said(10), 5), None, "cut at {at}");
        }
        assert_eq!((parse(&good, 2, Key::said(10), 5), parse(&good, 1, Key::said(11), 5)), (None, None));
    }
}
