//! One file out of a tar archive, read as it streams by. Nothing is unpacked: the names in an archive are compared with
//! the one that is wanted, and never lead anywhere.

use std::io::{Error, ErrorKind, Read, Result, Take};

/// Headers come in blocks of this length, and contents are filled up to one.
const BLOCK: usize = 512;

/// How far an archive is looked through: a small one can be made to unfold without end.
const FAR: u64 = 1 << 30;

/// Reads on to the file of that name; what is left to read then is its contents and nothing more. Names of more than
/// 100 bytes are written in other ways, and not found.
///
/// # Errors
/// When there is no such file, or this is no tar archive.
pub fn entry<R: Read>(archive: R, name: &str) -> Result<Take<R>> {
    let mut archive = archive.take(FAR);
    loop {
        let mut header = [0; BLOCK];
        archive.read_exact(&mut header).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => wrong(format!("it ends before {name}")),
            _ => error,
        })?;
        if header == [0; BLOCK] {
            return Err(wrong(format!("there is no {name} in it")));
        }
        let bytes = size(&header).ok_or_else(|| wrong("it is no tar archive".into()))?;
        // Links and folders have names too, and no contents.
        if text(&header[..100]) == name.as_bytes() && matches!(header[156], b'0' | 0) {
            archive.set_limit(bytes);
            return Ok(archive);
        }
        let passed = archive.by_ref().take(bytes.next_multiple_of(BLOCK as u64));
        std::io::copy(&mut { passed }, &mut std::io::sink())?;
    }
}

/// How long the contents are, if this is a header.
fn size(header: &[u8; BLOCK]) -> Option<u64> {
    let digits = std::str::from_utf8(text(&header[124..136])).ok()?;
    let bytes = u64::from_str_radix(digits.trim_matches(' '), 8).ok()?;
    header[257..].starts_with(b"ustar").then_some(bytes)
}

/// A field of a header, which ends at the first 0.
fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn wrong(why: String) -> Error {
    Error::new(ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header and contents, as `tar` writes them.
    fn packed(name: &str, kind: u8, size: &str, contents: &[u8]) -> Vec<u8> {
        let mut block = vec![0; BLOCK];
        block[..name.len()].copy_from_slice(name.as_bytes());
        block[124..124 + size.len()].copy_from_slice(size.as_bytes());
        block[156] = kind;
        block[257..263].copy_from_slice(b"ustar ");
        block.extend(contents);
        block.resize(block.len().next_multiple_of(BLOCK), 0);
        block
    }

    fn read(archive: &[u8], name: &str) -> std::result::Result<Vec<u8>, String> {
        let mut contents = Vec::new();
        let mut found = entry(archive, name).map_err(|e| e.to_string())?;
        found.read_to_end(&mut contents).expect("slices can be read");
        Ok(contents)
    }

    #[test]
    fn the_one_that_is_named_is_read() {
        let long = [7; 700];
        let archive = [
            packed("b", b'5', "00000000000", b""),
            packed("b", b'2', "00000000000", b""),
            packed("a", b'0', "00000001274", &long),
            packed("b", 0, " 3 ", b"two"),
            packed("b", b'0', "1", b"x"),
            vec![0; 2 * BLOCK],
        ]
        .concat();
        assert_eq!(read(&archive, "a"), Ok(long.to_vec()));
        assert_eq!(read(&archive, "b"), Ok(b"two".to_vec()), "the first that has contents");
        for other in ["c", "", "a\0", "./a"] {
            assert_eq!(read(&archive, other), Err(format!("there is no {other} in it")));
        }
    }

    #[test]
    fn what_is_no_archive_is_told() {
        let whole = packed("a", b'0', "3", b"one");
        for (archive, says) in [
            (&b""[..], "it ends before b"),
            (&whole[..100], "it ends before b"),
            (&whole[..600], "it ends before b"),
            (&whole, "it ends before b"),
            (&[b'x'; BLOCK], "it is no tar archive"),
            (&packed("a", b'0', "9", b""), "it is no tar archive"),
            (&packed("a", b'0', "-1", b""), "it is no tar archive"),
            (&packed("a", b'0', "", b""), "it is no tar archive"),
            (&packed("a", b'0', "\u{80}123456", b""), "it is no tar archive"),
            (&packed("a", b'0', "777777777777", b""), "it ends before b"),
        ] {
            assert_eq!(read(archive, "b"), Err(says.to_owned()));
        }
    }

    #[test]
    fn an_archive_without_end_is_left() {
        let first = packed("a", b'0', "777777777777", b"");
        let endless = first.chain(std::io::repeat(0));
        assert_eq!(entry(endless, "b").err().map(|e| e.to_string()).as_deref(), Some("it ends before b"));
    }
}
