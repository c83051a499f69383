//! The log of proofs that text was forgotten, one a line in a file that is appended to, and the key that signs them.

use super::private_file::{
    create_private_dir, file_error, owner_only, replace_file, sync_folder, write_beside,
};
use super::target::ForgetRequest;
use halo_agents::proof::{ForgetProof, ForgottenContent, ProofKey, from_hex, to_hex};
use halo_core::Error;
use halo_core::store::ConversationSummary;
use serde_json::{Value, json};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

const PROOF_LOG_FILE: &str = "forgotten.jsonl";
const PROOF_KEY_FILE: &str = "lethe.key";

/// The proofs of a data folder.
#[derive(Clone, Debug, Default)]
pub struct ForgetProofList {
    /// The file that they are in.
    pub path: PathBuf,
    /// Each with whether its signature is valid.
    pub proofs: Vec<(ForgetProof, bool)>,
    /// The numbers of lines that are no proof: writing them was interrupted, or they were changed.
    pub unreadable_lines: Vec<usize>,
}

/// Appends proofs to the log of a data folder.
pub(super) struct ForgetProofLog {
    log: PathBuf,
    key: ProofKey,
}

impl ForgetProofLog {
    /// Opens the log; creates the key where there is none.
    pub fn open(data_dir: &Path) -> Result<Self, Error> {
        create_private_dir(data_dir)?;
        let key = match read_key(data_dir)? {
            Some(key) => key,
            None => create_key(data_dir)?,
        };
        Ok(Self { log: data_dir.join(PROOF_LOG_FILE), key })
    }

    /// Signs that a text is forgotten, and appends the proof.
    pub fn append_proof(
        &self,
        subject: &str,
        text: &str,
        tokens: usize,
        request: &ForgetRequest,
    ) -> Result<(), Error> {
        let mut salt = [0; 16];
        fill_random(&mut salt)?;
        let content =
            ForgottenContent { subject, requested_by: request.requested_by, text, tokens: tokens as u64 };
        let line = proof_line(&ForgetProof::sign(&self.key, salt, content, request.now));
        self.append_line(&line).map_err(|error| file_error("writing", &self.log, error))
    }

    fn append_line(&self, line: &str) -> std::io::Result<()> {
        let mut file = owner_only(OpenOptions::new().read(true).append(true).create(true)).open(&self.log)?;
        // After a line that was not written to its end, a new one begins.
        let separator = if ends_within_line(&mut file)? { "\n" } else { "" };
        file.write_all(format!("{separator}{line}\n").as_bytes())?;
        file.sync_all()
    }

    /// Replaces the name of a conversation in the subjects of its proofs. Earlier versions wrote the name there, and a name can
    /// be made of forgotten words. A proof that was valid is signed again; all else about it stays.
    pub fn replace_name(&self, name: &str, subject: &str) -> Result<(), Error> {
        let content = match fs::read(&self.log) {
            Ok(content) => content,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(file_error("reading", &self.log, error)),
        };
        let mut lines = Vec::with_capacity(content.len());
        let mut any = false;
        for line in content.split_inclusive(|&byte| byte == b'\n') {
            let renamed = parse_proof(line).and_then(|proof| {
                let item = subject_item(&proof.subject, name)?.to_owned();
                let was_valid = proof.verify(&self.key);
                let mut proof = ForgetProof { subject: format!("{subject} {item}"), ..proof };
                if was_valid {
                    proof.sign_again(&self.key);
                }
                Some(proof)
            });
            match renamed {
                Some(proof) => {
                    lines.extend(format!("{}\n", proof_line(&proof)).into_bytes());
                    any = true;
                }
                None => lines.extend_from_slice(line),
            }
        }
        if any { replace_file(&self.log, &lines) } else { Ok(()) }
    }
}

/// What a subject names in a conversation: `u4.0`, or `memory 3`.
pub fn subject_item<'a>(subject: &'a str, conversation: &str) -> Option<&'a str> {
    let item = subject.strip_prefix(conversation)?.strip_prefix(' ')?;
    (item.starts_with("memory ") || !item.contains(' ')).then_some(item)
}

fn ends_within_line(file: &mut File) -> std::io::Result<bool> {
    if file.metadata()?.len() == 0 {
        return Ok(false);
    }
    let mut last = [0];
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    Ok(last != *b"\n")
}

fn proof_line(proof: &ForgetProof) -> String {
    json!({
        "subject": proof.subject, "by": proof.requested_by, "at": proof.forgotten_at, "tokens": proof.tokens,
        "salt": proof.salt, "content": proof.content_hash, "seal": proof.signature,
    })
    .to_string()
}

fn parse_proof(line: &[u8]) -> Option<ForgetProof> {
    let value: Value = serde_json::from_slice(line).ok()?;
    let field = |name: &str| value[name].as_str().map(str::to_owned);
    Some(ForgetProof {
        subject: field("subject")?,
        requested_by: field("by")?,
        forgotten_at: value["at"].as_i64()?,
        tokens: value["tokens"].as_u64()?,
        salt: field("salt")?,
        content_hash: field("content")?,
        signature: field("seal")?,
    })
}

/// All proofs of a data folder.
pub(super) fn read_proofs(data_dir: &Path) -> Result<ForgetProofList, Error> {
    let path = data_dir.join(PROOF_LOG_FILE);
    let content = match fs::read(&path) {
        Ok(content) => content,
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(file_error("reading", &path, error)),
    };
    let key = read_key(data_dir)?;
    let mut list = ForgetProofList { path, ..ForgetProofList::default() };
    for (number, line) in (1..).zip(content.split(|&byte| byte == b'\n')) {
        match parse_proof(line) {
            Some(proof) => {
                let is_valid = key.is_some_and(|key| proof.verify(&key));
                list.proofs.push((proof, is_valid));
            }
            None if line.trim_ascii().is_empty() => {}
            None => list.unreadable_lines.push(number),
        }
    }
    Ok(list)
}

/// The key; none where there is no file, or an empty one: versions that wrote the file in place left that on a full disk.
fn read_key(data_dir: &Path) -> Result<Option<ProofKey>, Error> {
    let path = data_dir.join(PROOF_KEY_FILE);
    match fs::read_to_string(&path) {
        Ok(text) if text.trim().is_empty() => Ok(None),
        Ok(text) => {
            let key = from_hex(text.trim()).and_then(|bytes| ProofKey::try_from(bytes).ok());
            let invalid = || {
                let message = "it must have 64 hexadecimal digits; restore it from a backup, or delete it: then a new key \
                               is created, and the proofs so far cannot be verified";
                Error::damaged(format!("reading the key {}", path.display()), message)
            };
            key.map(Some).ok_or_else(invalid)
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(file_error("reading", &path, error)),
    }
}

fn create_key(data_dir: &Path) -> Result<ProofKey, Error> {
    let mut key = ProofKey::default();
    fill_random(&mut key)?;
    let path = data_dir.join(PROOF_KEY_FILE);
    let part = write_beside(&path, format!("{}\n", to_hex(&key)).as_bytes())?;
    // A link, unlike a rename, does not replace the key that another process has created meanwhile.
    let is_empty = fs::metadata(&path).is_ok_and(|metadata| metadata.len() < 64);
    let published = match fs::hard_link(&part, &path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists && !is_empty => Ok(()),
        Err(_) => fs::rename(&part, &path),
        Ok(()) => Ok(()),
    };
    published.map_err(|error| file_error("writing", &path, error))?;
    let _ = fs::remove_file(&part);
    sync_folder(&path)?;
    let missing =
        || Error::unavailable(format!("reading {}", path.display()), "another program has deleted it");
    read_key(data_dir)?.ok_or_else(missing)
}

fn fill_random(bytes: &mut [u8]) -> Result<(), Error> {
    let failed = |error: getrandom::Error| {
        Error::unavailable("signing a proof", format!("the system has no random numbers: {error}"))
    };
    getrandom::fill(bytes).map_err(failed)
}

/// What the proofs of a conversation begin with.
pub(super) fn proof_subject(summary: &ConversationSummary) -> String {
    format!("conversation {}", summary.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append(data: &Path, subject: &str) {
        let log = ForgetProofLog::open(data).expect("the log opens");
        log.append_proof(subject, "some text", 2, &ForgetRequest::by_user(5)).expect("the proof is written");
    }

    fn subjects(list: &ForgetProofList) -> Vec<(&str, bool)> {
        list.proofs.iter().map(|(proof, is_valid)| (proof.subject.as_str(), *is_valid)).collect()
    }

    #[test]
    fn proof_log_takes_an_empty_key_file_for_none() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let data = home.path();
        for content in ["", "\n"] {
            fs::write(data.join(PROOF_KEY_FILE), content).expect("the file is written");
            append(data, "one");
            let list = read_proofs(data).expect("the log is read");
            assert_eq!(subjects(&list).last(), Some(&("one", true)));
            fs::remove_file(data.join(PROOF_LOG_FILE)).expect("the log is removed");
        }
        assert!(!data.join("lethe.key.part").exists());
        fs::write(data.join(PROOF_KEY_FILE), "abc").expect("the file is written");
        let error = ForgetProofLog::open(data).err().expect("no key").to_string();
        assert!(error.contains("lethe.key") && error.contains("64 hexadecimal digits"), "{error}");
    }

    /// `/dev/full` refuses every write as a full disk does.
    #[cfg(target_os = "linux")]
    #[test]
    fn proof_log_works_again_after_a_full_disk() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let data = home.path();
        let link = |name: &str| {
            std::os::unix::fs::symlink("/dev/full", data.join(name)).expect("the link is made");
        };
        link("lethe.key.part");
        let error = ForgetProofLog::open(data).err().expect("the disk is full").to_string();
        assert!(error.contains("lethe.key.part") && error.contains("No space left"), "{error}");
        assert!(!data.join(PROOF_KEY_FILE).exists(), "no half key is left");
        link(PROOF_LOG_FILE);
        let log = ForgetProofLog::open(data).expect("the log opens");
        let error =
            log.append_proof("one", "text", 1, &ForgetRequest::by_user(5)).expect_err("the disk is full");
        assert!(error.to_string().contains(PROOF_LOG_FILE), "{error}");
        fs::remove_file(data.join(PROOF_LOG_FILE)).expect("the link is removed");
        append(data, "two");
        assert_eq!(subjects(&read_proofs(data).expect("the log is read")), [("two", true)]);
    }

    #[test]
    fn proof_log_skips_and_reports_torn_lines() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let data = home.path();
        append(data, "one");
        let path = data.join(PROOF_LOG_FILE);
        let whole = fs::read(&path).expect("the log is read");
        let mut torn = whole.clone();
        torn.extend_from_slice(&whole[..whole.len() / 2]);
        fs::write(&path, &torn).expect("the log is written");
        let list = read_proofs(data).expect("the log is read");
        assert_eq!((subjects(&list), &list.unreadable_lines), (vec![("one", true)], &vec![2]));
        append(data, "two");
        let mut content = fs::read(&path).expect("the log is read");
        content.extend_from_slice(b"\xff\xfe\n[]\n\n{\"subject\":\"three\"}\n");
        fs::write(&path, content).expect("the log is written");
        let list = read_proofs(data).expect("the log is read");
        assert_eq!(subjects(&list), [("one", true), ("two", true)]);
        assert_eq!(list.unreadable_lines, [2, 4, 5, 7]);
    }

    #[test]
    fn proof_log_replaces_a_name_and_signs_again() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let data = home.path();
        for subject in ["My secret u0.0", "My secret memory 3", "My secret plan u0.0", "My secret u1.0"] {
            append(data, subject);
        }
        let path = data.join(PROOF_LOG_FILE);
        // The last proof is changed: it must not become valid.
        let content = fs::read_to_string(&path).expect("the log is read");
        let (first, last) = content.trim_end().rsplit_once('\n').expect("lines");
        let changed = format!("{first}\n{}\n", last.replace("\"tokens\":2", "\"tokens\":3"));
        assert_ne!(content, changed);
        fs::write(&path, format!("{changed}{{torn")).expect("the log is written");
        let log = ForgetProofLog::open(data).expect("the log opens");
        log.replace_name("My secret", "conversation 12ab").expect("the log is rewritten");
        let list = read_proofs(data).expect("the log is read");
        assert_eq!(
            subjects(&list),
            [
                ("conversation 12ab u0.0", true),
                ("conversation 12ab memory 3", true),
                ("My secret plan u0.0", true),
                ("conversation 12ab u1.0", false),
            ]
        );
        assert_eq!(list.unreadable_lines, [5]);
        assert!(list.proofs[0].0.matches_text("some text") && list.proofs[0].0.forgotten_at == 5);
    }
}
