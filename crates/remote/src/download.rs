//! Downloads of model files. The bytes are written to `FILE.part`, with a note in `FILE.part.json`, so that an
//! interrupted download resumes; the file appears under its own name when it is complete and checked.

use crate::address::{BaseUrl, redact_password};
use crate::http::{RemoteClient, RemoteRequest, RemoteResponse, ignore_steps};
use crate::options::RemoteOptions;
use crate::stream_listener::{StreamEnd, StreamListener};
use halo_core::Error;
use reqwest::header::{self, HeaderValue};
use reqwest::redirect::{Action, Attempt, Policy};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

const MAX_REDIRECTS: usize = 5;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DownloadedFile {
    /// The length of the file.
    pub bytes: u64,
    /// How many of the bytes came from an earlier, interrupted download.
    pub resumed: u64,
    /// The SHA-256 of the file, in hexadecimal.
    pub sha256: String,
}

/// The note beside a part file. A download resumes only the same version of the same file.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct PartialDownload {
    url: String,
    /// The server's strong ETag, or else its `Last-Modified`.
    version: String,
}

/// Downloads a file. `expect` is the expected SHA-256 in hexadecimal; `progress` gets the number of bytes so far and
/// the total, if the server names it. A file that exists at `to` is replaced only by a complete one.
pub fn download_file(
    url: &str,
    to: &Path,
    expect: Option<&str>,
    progress: &mut dyn FnMut(u64, Option<u64>),
) -> Result<DownloadedFile, Error> {
    let operation = format!("downloading {}", redact_password(url.split('?').next().unwrap_or(url)));
    let expect = expect.map(parse_sha256).transpose().map_err(|why| Error::invalid_input(&operation, why))?;
    let base = BaseUrl::parse(url.split('#').next().unwrap_or(url))
        .map_err(|why| Error::invalid_input(&operation, why))?;
    let options = RemoteOptions { idle_timeout: Duration::from_secs(60), ..RemoteOptions::default() };
    let client = RemoteClient::for_downloads(&base, &options, Policy::custom(follow_redirect))?;
    let download = Download {
        operation: &operation,
        url,
        base,
        client,
        part: with_suffix(to, ".part"),
        part_info: with_suffix(to, ".part.json"),
    };
    let file = download.run(expect.as_deref(), progress)?;
    let move_error = |e: io::Error| download.disk_error("moving the complete file", &e);
    fs::rename(&download.part, to).map_err(move_error)?;
    let _ = fs::remove_file(&download.part_info);
    sync_parent_dir(to).map_err(move_error)?;
    Ok(file)
}

/// Follows redirects between http and https hosts, but not from https to http.
fn follow_redirect(attempt: Attempt<'_>) -> Action {
    let was_https = attempt.previous().last().is_some_and(|url| url.scheme() == "https");
    let next = BaseUrl::parse(attempt.url().as_str());
    match next {
        _ if attempt.previous().len() > MAX_REDIRECTS => {
            attempt.error(format!("the server redirects more than {MAX_REDIRECTS} times; check the address"))
        }
        Err(why) => attempt.error(format!("the server redirects to an address that cannot be used: {why}")),
        Ok(next) if was_https && !next.is_https() => attempt
            .error(format!("the server redirects to {next}, which is not encrypted; use another address")),
        Ok(_) => attempt.follow(),
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// A rename survives a power failure only after its directory is synced.
fn sync_parent_dir(file: &Path) -> io::Result<()> {
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if cfg!(unix) { File::open(dir)?.sync_all() } else { Ok(()) }
}

fn parse_sha256(text: &str) -> Result<String, String> {
    let hex = text.strip_prefix("sha256:").unwrap_or(text).to_ascii_lowercase();
    if hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        Ok(hex)
    } else {
        Err(format!("'{text}' is not a SHA-256, which has 64 hexadecimal digits"))
    }
}

struct Download<'a> {
    operation: &'a str,
    url: &'a str,
    base: BaseUrl,
    client: RemoteClient,
    part: PathBuf,
    part_info: PathBuf,
}

/// A response whose body continues the part file at `offset`.
struct DownloadResponse<'a> {
    request: RemoteRequest<'a>,
    response: RemoteResponse,
    offset: u64,
    total: Option<u64>,
}

impl Download<'_> {
    fn run(
        &self,
        expect: Option<&str>,
        progress: &mut dyn FnMut(u64, Option<u64>),
    ) -> Result<DownloadedFile, Error> {
        let open_error = |e: io::Error| self.disk_error("opening the part file", &e);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&self.part)
            .map_err(open_error)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let why = "another process is downloading the same file; wait until it is done";
                return Err(Error::busy(self.operation, why));
            }
            Err(TryLockError::Error(error)) => return Err(self.disk_error("locking the part file", &error)),
        }
        let length = file.metadata().map_err(open_error)?.len();
        let resume = self.resumable_version(length).map(|version| (length, version));
        let mut listen = ignore_steps;
        let mut listener = StreamListener::without_listener(&mut listen);
        self.transfer(resume.as_ref(), &mut file, expect, progress, &mut listener).map_err(|end| {
            let error = end.into_error();
            Error::new(error.kind, self.operation, error.message)
        })
    }

    /// The version of the file that the part file was downloaded from; `None` where the download cannot resume.
    fn resumable_version(&self, length: u64) -> Option<String> {
        let note: PartialDownload = serde_json::from_slice(&fs::read(&self.part_info).ok()?).ok()?;
        (length > 0 && note.url == self.url && !note.version.is_empty()).then_some(note.version)
    }

    fn transfer(
        &self,
        resume: Option<&(u64, String)>,
        file: &mut File,
        expect: Option<&str>,
        progress: &mut dyn FnMut(u64, Option<u64>),
        listener: &mut StreamListener<'_>,
    ) -> Result<DownloadedFile, StreamEnd> {
        let mut source = match self.open(resume, listener)? {
            Some(source) => source,
            // The server cannot continue the part file; a request without a range always has an offset.
            None => self.open(None, listener)?.expect("a request without a range is not resumed"),
        };
        let write_error = |e: io::Error| self.disk_error("writing", &e);
        let mut hasher = Sha256::new();
        self.prepare_part(file, &source, &mut hasher).map_err(write_error)?;
        let done = self.copy_body(&mut source, file, &mut hasher, progress, listener)?;
        if let Some(total) = source.total.filter(|total| *total != done) {
            let why =
                format!("the connection ended after {done} of {total} bytes; try again to resume there");
            return Err(Error::unavailable(self.operation, why).into());
        }
        file.sync_all().map_err(write_error)?;
        let sha256: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        if let Some(expected) = expect.filter(|expected| *expected != sha256) {
            let _ = fs::remove_file(&self.part);
            let _ = fs::remove_file(&self.part_info);
            let why = format!(
                "the SHA-256 of the file is {sha256}, but {expected} was expected; the file was deleted: check the \
                 address and the checksum"
            );
            return Err(Error::unavailable(self.operation, why).into());
        }
        Ok(DownloadedFile { bytes: done, resumed: source.offset, sha256 })
    }

    /// Requests the file, from the end of the part file where there is one; `None` where the server does not send what
    /// follows the part file.
    fn open(
        &self,
        resume: Option<&(u64, String)>,
        listener: &mut StreamListener<'_>,
    ) -> Result<Option<DownloadResponse<'_>>, StreamEnd> {
        let mut request = RemoteRequest::get(self.operation, &self.base, "");
        if let Some((length, version)) = resume
            && let Ok(version) = HeaderValue::from_str(version)
        {
            let range = HeaderValue::from_str(&format!("bytes={length}-")).expect("ASCII is a header value");
            request = request.header(header::RANGE, range).header(header::IF_RANGE, version);
        }
        let response = self.client.send(&request, listener)?;
        let range = parse_content_range(response.header(&header::CONTENT_RANGE));
        let (offset, total) = match (response.status().as_u16(), resume, range) {
            (200, ..) => (0, response.header(&header::CONTENT_LENGTH).parse().ok()),
            (206, Some((length, _)), Some((start, total))) if start == *length => (start, total),
            // Nothing follows the part file: it is complete.
            (416, Some((length, _)), Some((_, Some(total)))) if total == *length => (total, Some(total)),
            (206 | 416, Some(_), _) => return Ok(None),
            // reqwest follows no redirect to a URL that is neither http nor https.
            (301 | 302 | 303 | 307 | 308, ..) => {
                let why = "the server redirects to an address that cannot be used; use another address";
                return Err(Error::unavailable(self.operation, why).into());
            }
            _ => return Err(self.client.status_error(&request, response, listener)),
        };
        Ok(Some(DownloadResponse { request, response, offset, total }))
    }

    /// Writes the body to the part file. Returns the length of the part file.
    fn copy_body(
        &self,
        source: &mut DownloadResponse<'_>,
        file: &mut File,
        hasher: &mut Sha256,
        progress: &mut dyn FnMut(u64, Option<u64>),
        listener: &mut StreamListener<'_>,
    ) -> Result<u64, StreamEnd> {
        let mut done = source.offset;
        progress(done, source.total);
        while source.total != Some(done) || done == 0 {
            match self.client.next_bytes(&source.request, &mut source.response, listener) {
                Ok(None) => break,
                Ok(Some(bytes)) => {
                    file.write_all(&bytes).map_err(|e| self.disk_error("writing", &e))?;
                    hasher.update(&*bytes);
                    done += bytes.len() as u64;
                    progress(done, source.total);
                }
                Err(StreamEnd::Failed(error)) => {
                    let why = format!("{}; {done} bytes are saved, try again to resume there", error.message);
                    return Err(Error::new(error.kind, self.operation, why).into());
                }
                Err(end) => return Err(end),
            }
        }
        Ok(done)
    }

    /// Cuts the part file to the offset, hashes what it holds, and writes the note for a new download.
    fn prepare_part(
        &self,
        file: &mut File,
        source: &DownloadResponse<'_>,
        hasher: &mut Sha256,
    ) -> io::Result<()> {
        let offset = source.offset;
        if file.metadata()?.len() != offset {
            file.set_len(offset)?;
        }
        file.seek(SeekFrom::Start(0))?;
        let mut buffer = vec![0; 1 << 20];
        let mut hashed = 0;
        while hashed < offset {
            match file.read(&mut buffer)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                n => hasher.update(&buffer[..n]),
            }
            hashed = file.stream_position()?;
        }
        if offset == 0 {
            // A weak ETag does not promise the same bytes.
            let etag = Some(source.response.header(&header::ETAG)).filter(|tag| tag.starts_with('"'));
            let version = etag.unwrap_or(source.response.header(&header::LAST_MODIFIED)).to_owned();
            let note = PartialDownload { url: self.url.to_owned(), version };
            fs::write(&self.part_info, serde_json::to_vec(&note)?)?;
        }
        Ok(())
    }

    fn disk_error(&self, action: &str, error: &io::Error) -> Error {
        let why = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                "the disk is full; free some space and try again to resume".to_owned()
            }
            _ => format!("{action}: {error} ({}); check the directory", self.part.display()),
        };
        Error::unavailable(self.operation, why)
    }
}

/// The start of a range and the length of the file: `bytes 100-199/200`, or `bytes */200` where the range is empty.
fn parse_content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.trim().strip_prefix("bytes")?.trim_start().split_once('/')?;
    let start = if range.trim() == "*" { 0 } else { range.split_once('-')?.0.trim().parse().ok()? };
    Some((start, total.trim().parse().ok()))
}
