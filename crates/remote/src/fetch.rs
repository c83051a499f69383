//! Downloads: a file by http or https, to where it belongs or nowhere. What has come is kept beside it until it is
//! whole, so that the next attempt goes on from there.

use crate::Options;
use crate::address::{Base, without_password};
use crate::http::{Client, Request, nobody};
use crate::stream::{Halt, Teller};
use crate::wire::Answer;
use halo_core::seams::SeamError;
use hyper::header::{self, HeaderValue};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How many redirections are followed.
const REDIRECTIONS: usize = 5;

/// A file that has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// How long it is.
    pub bytes: u64,
    /// How much of it had come before.
    pub resumed: u64,
    /// Its SHA-256, in hexadecimal.
    pub sha256: String,
}

/// What is known of a part, so that the rest can be told to be of the same file.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    url: String,
    /// The server's name for this very version of the file, or when that was made.
    version: String,
}

/// Downloads a file. `expect` is its SHA-256 in hexadecimal, if that is known; `progress` hears how many bytes have
/// come, and of how many. Until the file is whole it is `FILE.part`, with a note in `FILE.part.json`; at `to` there is
/// the whole file or what was there before.
///
/// # Errors
/// When the address cannot be read or reached, the connection breaks, the disk is full (then the part is kept, and the
/// same call goes on from there), or the checksum is another (then the part is thrown away).
pub fn fetch(
    url: &str,
    to: &Path,
    expect: Option<&str>,
    progress: &mut dyn FnMut(u64, Option<u64>),
) -> Result<Fetched, SeamError> {
    let what = format!("downloading {}", without_password(url.split('?').next().unwrap_or(url)));
    let expect = expect.map(checksum).transpose().map_err(|why| SeamError::new(&what, why))?;
    let base = Base::parse(url.split('#').next().unwrap_or(url)).map_err(|why| SeamError::new(&what, why))?;
    let client = Client::new(&Options { idle: Duration::from_secs(60), ..Options::default() })?;
    let download =
        Download { what: &what, url, client, part: beside(to, ".part"), note: beside(to, ".part.json") };
    let fetched = download.run(base, expect.as_deref(), progress)?;
    fs::rename(&download.part, to).map_err(|e| download.disk("moving it to its place", &e))?;
    let _ = fs::remove_file(&download.note);
    sync_folder(to).map_err(|e| download.disk("moving it to its place", &e))?;
    Ok(fetched)
}

fn beside(to: &Path, ending: &str) -> PathBuf {
    let mut name = to.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

/// What a folder holds is safe when the folder is.
fn sync_folder(file: &Path) -> io::Result<()> {
    let folder = file.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

fn checksum(text: &str) -> Result<String, String> {
    let hex = text.strip_prefix("sha256:").unwrap_or(text).to_ascii_lowercase();
    if hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        Ok(hex)
    } else {
        Err(format!("'{text}' is no SHA-256: that has 64 hexadecimal digits"))
    }
}

struct Download<'a> {
    what: &'a str,
    url: &'a str,
    client: Client,
    part: PathBuf,
    note: PathBuf,
}

impl Download<'_> {
    fn run(
        &self,
        base: Base,
        expect: Option<&str>,
        progress: &mut dyn FnMut(u64, Option<u64>),
    ) -> Result<Fetched, SeamError> {
        let opening = |e: &io::Error| self.disk("opening its part", e);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&self.part)
            .map_err(|e| opening(&e))?;
        if file.try_lock().is_err() {
            return Err(SeamError::new(self.what, "somebody else is doing that already; wait for them"));
        }
        let length = file.metadata().map_err(|e| opening(&e))?.len();
        let known = fs::read(&self.note).ok().and_then(|note| serde_json::from_slice::<Note>(&note).ok());
        let known = known.filter(|note| length > 0 && note.url == self.url && !note.version.is_empty());
        let resume = known.map(|note| (length, note.version));
        let mut listen = nobody;
        let mut teller = Teller::nobody(&mut listen);
        let taken = self.take(base, resume.as_ref(), &mut file, expect, progress, &mut teller);
        taken.map_err(|halt| SeamError::new(self.what, halt.error().why))
    }

    /// Asks for the file, from where the part ends if there is one, and writes what comes.
    fn take(
        &self,
        base: Base,
        resume: Option<&(u64, String)>,
        file: &mut File,
        expect: Option<&str>,
        progress: &mut dyn FnMut(u64, Option<u64>),
        teller: &mut Teller<'_>,
    ) -> Result<Fetched, Halt> {
        let (base, mut answer) = self.follow(base, resume, teller)?;
        let request = Request::get(self.what, &base, "");
        let (from, total) = match (answer.status.as_u16(), resume) {
            (200, _) => (0, answer.header(&header::CONTENT_LENGTH).parse().ok()),
            (206, Some((length, _))) => match range(answer.header(&header::CONTENT_RANGE)) {
                Some((from, total)) if from == *length => (from, total),
                // It sends something else than what it was asked for.
                _ => return self.take(base, None, file, expect, progress, teller),
            },
            (416, Some((length, _))) => match range(answer.header(&header::CONTENT_RANGE)) {
                // There is no rest: the part is the whole.
                Some((_, Some(total))) if total == *length => (total, Some(total)),
                _ => return self.take(base, None, file, expect, progress, teller),
            },
            _ => return Err(self.client.refusal(&request, answer, teller)),
        };
        let mut sum = Sha256::new();
        self.start(file, from, &answer, &mut sum).map_err(|e| self.disk("writing", &e))?;
        let mut done = from;
        progress(done, total);
        while total != Some(done) || done == 0 {
            match self.client.chunk(&request, &mut answer, teller) {
                Ok(None) => break,
                Ok(Some(bytes)) => {
                    file.write_all(&bytes).map_err(|e| self.disk("writing", &e))?;
                    sum.update(&bytes);
                    done += bytes.len() as u64;
                    progress(done, total);
                }
                Err(Halt::Failed(error)) => {
                    let why =
                        format!("{}; {done} bytes have come and are kept: the same again goes on", error.why);
                    return Err(SeamError::new(self.what, why).into());
                }
                Err(ended) => return Err(ended),
            }
        }
        if let Some(total) = total.filter(|total| *total != done) {
            let why = format!("{done} bytes came of {total}; they are kept: the same again goes on");
            return Err(SeamError::new(self.what, why).into());
        }
        file.sync_all().map_err(|e| self.disk("writing", &e))?;
        let sha256: String = sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        if let Some(expected) = expect.filter(|expected| *expected != sha256) {
            let _ = fs::remove_file(&self.part);
            let _ = fs::remove_file(&self.note);
            let why = format!(
                "its SHA-256 is {sha256}, but {expected} was expected; it was thrown away: check both"
            );
            return Err(SeamError::new(self.what, why).into());
        }
        Ok(Fetched { bytes: done, resumed: from, sha256 })
    }

    /// Follows redirections to the file. Once the way is safe, it stays so.
    fn follow(
        &self,
        mut base: Base,
        resume: Option<&(u64, String)>,
        teller: &mut Teller<'_>,
    ) -> Result<(Base, Answer), Halt> {
        for _ in 0..=REDIRECTIONS {
            let mut request = Request::get(self.what, &base, "");
            if let Some((length, version)) = resume
                && let Ok(version) = HeaderValue::from_str(version)
            {
                request = request
                    .header(
                        header::RANGE,
                        HeaderValue::from_str(&format!("bytes={length}-")).expect("plain text"),
                    )
                    .header(header::IF_RANGE, version);
            }
            let answer = self.client.open(&request, teller)?;
            if !matches!(answer.status.as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok((base, answer));
            }
            let next = base.join(answer.header(&header::LOCATION)).map_err(|why| {
                SeamError::new(self.what, format!("{base} points to somewhere that cannot be read: {why}"))
            })?;
            if base.https && !next.https {
                let why = format!("{base} points to {next}, which is not safe; use another address");
                return Err(SeamError::new(self.what, why).into());
            }
            base = next;
        }
        let why = format!("it is pointed on more than {REDIRECTIONS} times; check the address");
        Err(SeamError::new(self.what, why).into())
    }

    /// Makes the part ready to be gone on with at `from`, and notes what it is a part of.
    fn start(&self, file: &mut File, from: u64, answer: &Answer, sum: &mut Sha256) -> io::Result<()> {
        if file.metadata()?.len() != from {
            file.set_len(from)?;
        }
        file.seek(SeekFrom::Start(0))?;
        let mut buffer = vec![0; 1 << 20];
        let mut summed = 0;
        while summed < from {
            match file.read(&mut buffer)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                n => sum.update(&buffer[..n]),
            }
            summed = file.stream_position()?;
        }
        if from == 0 {
            // Only what names a version exactly can be gone on with.
            let tag = Some(answer.header(&header::ETAG)).filter(|tag| tag.starts_with('"'));
            let version = tag.unwrap_or(answer.header(&header::LAST_MODIFIED)).to_owned();
            let note = Note { url: self.url.to_owned(), version };
            fs::write(&self.note, serde_json::to_vec(&note)?)?;
        }
        Ok(())
    }

    fn disk(&self, doing: &str, error: &io::Error) -> SeamError {
        let why = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                "the disk is full; make room, and the same again goes on".to_owned()
            }
            _ => format!("{doing}: {error} ({}); check the folder", self.part.display()),
        };
        SeamError::new(self.what, why)
    }
}

/// Where a range begins, and how long the whole is: `bytes 100-199/200`, or `bytes */200` where there is no such range.
fn range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.trim().strip_prefix("bytes")?.trim_start().split_once('/')?;
    let from = if range.trim() == "*" { 0 } else { range.split_once('-')?.0.trim().parse().ok()? };
    Some((from, total.trim().parse().ok()))
}
