//! Reads files that settings and flags name.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// The largest settings file.
pub const MAX_SETTINGS_BYTES: u64 = 4 << 20;

/// The content of a regular file of at most `max_bytes`. Reading a pipe or a device could block for ever or never end, so
/// it is not begun.
pub fn read_regular_file(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    // Opening a pipe blocks until somebody writes to it: its type is checked before.
    check_regular(&fs::metadata(path)?)?;
    let file = File::open(path)?;
    check_regular(&file.metadata()?)?;
    let mut bytes = Vec::new();
    file.take(max_bytes + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let why = format!("it is larger than {max_bytes} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(bytes)
}

/// The text of a regular file, which must be UTF-8.
pub fn read_regular_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    let not_text = |_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8 text");
    String::from_utf8(read_regular_file(path, max_bytes)?).map_err(not_text)
}

fn check_regular(metadata: &fs::Metadata) -> io::Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let why =
        if metadata.is_dir() { "it is a folder, not a file" } else { "it is a pipe or a device, not a file" };
    Err(io::Error::new(io::ErrorKind::InvalidInput, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_reader_refuses_what_is_not_a_small_regular_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        fs::write(&path, "12345678").expect("the file is written");
        let read = |path: &Path, max| read_regular_text(path, max).map_err(|e| e.to_string());
        assert_eq!(read(&path, 8), Ok("12345678".into()));
        assert_eq!(read(&path, 7), Err("it is larger than 7 bytes".into()));
        assert_eq!(read(folder.path(), 8), Err("it is a folder, not a file".into()));
        fs::write(&path, [0xff, 0xfe]).expect("the file is written");
        assert_eq!(read(&path, 8), Err("it is not UTF-8 text".into()));
        #[cfg(unix)]
        {
            let pipe = folder.path().join("pipe");
            let made = std::process::Command::new("mkfifo").arg(&pipe).status();
            assert!(made.expect("mkfifo runs").success());
            std::os::unix::fs::symlink(&pipe, folder.path().join("link")).expect("a link");
            for other in [&pipe, &folder.path().join("link"), Path::new("/dev/zero"), Path::new("/dev/null")]
            {
                assert_eq!(read(other, 8), Err("it is a pipe or a device, not a file".into()), "{other:?}");
            }
        }
    }
}
