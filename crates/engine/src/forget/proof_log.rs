//! The log of proofs that text was forgotten, one a line in a file that is only appended to, and the key that signs them.

use super::target::ForgetRequest;
use halo_agents::proof::{ForgetProof, ForgottenContent, ProofKey, from_hex, to_hex};
use halo_core::Error;
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

const PROOF_LOG_FILE: &str = "forgotten.jsonl";
const PROOF_KEY_FILE: &str = "lethe.key";

/// Appends proofs to the log of a data folder.
pub(super) struct ForgetProofLog {
    log: PathBuf,
    key: ProofKey,
}

impl ForgetProofLog {
    /// Opens the log; creates the key where there is none.
    pub fn open(data_dir: &Path) -> Result<Self, Error> {
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
        let proof = ForgetProof::sign(&self.key, salt, content, request.now);
        let line = json!({
            "subject": proof.subject, "by": proof.requested_by, "at": proof.forgotten_at, "tokens": proof.tokens,
            "salt": proof.salt, "content": proof.content_hash, "seal": proof.signature,
        });
        let append = || -> std::io::Result<()> {
            let mut file = owner_only(OpenOptions::new().append(true).create(true)).open(&self.log)?;
            file.write_all(format!("{line}\n").as_bytes())?;
            file.sync_all()
        };
        append().map_err(|error| file_error("writing", &self.log, error))
    }
}

/// All proofs, and whether the signature of each is valid.
pub(super) fn read_proofs(data_dir: &Path) -> Result<Vec<(ForgetProof, bool)>, Error> {
    let path = data_dir.join(PROOF_LOG_FILE);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(file_error("reading", &path, error)),
    };
    let key = read_key(data_dir)?;
    let mut proofs = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let value: Value = serde_json::from_str(line).map_err(|error| {
            Error::damaged(
                format!("reading {}", path.display()),
                format!("line {} is no proof: {error}", n + 1),
            )
        })?;
        let field = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
        let proof = ForgetProof {
            subject: field("subject"),
            requested_by: field("by"),
            forgotten_at: value["at"].as_i64().unwrap_or(0),
            tokens: value["tokens"].as_u64().unwrap_or(0),
            salt: field("salt"),
            content_hash: field("content"),
            signature: field("seal"),
        };
        let is_valid = key.is_some_and(|key| proof.verify(&key));
        proofs.push((proof, is_valid));
    }
    Ok(proofs)
}

fn read_key(data_dir: &Path) -> Result<Option<ProofKey>, Error> {
    let path = data_dir.join(PROOF_KEY_FILE);
    match std::fs::read_to_string(&path) {
        Ok(text) => {
            let key = from_hex(text.trim()).and_then(|bytes| ProofKey::try_from(bytes).ok());
            let invalid = || {
                let message = "it must have 64 hexadecimal digits";
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
    let create = || -> std::io::Result<()> {
        let mut file = owner_only(OpenOptions::new().write(true).create_new(true)).open(&path)?;
        file.write_all(format!("{}\n", to_hex(&key)).as_bytes())?;
        file.sync_all()
    };
    create().map_err(|error| file_error("writing", &path, error))?;
    Ok(key)
}

fn fill_random(bytes: &mut [u8]) -> Result<(), Error> {
    let failed = |error: getrandom::Error| {
        Error::unavailable("signing a proof", format!("the system has no random numbers: {error}"))
    };
    getrandom::fill(bytes).map_err(failed)
}

fn file_error(operation: &str, path: &Path, error: std::io::Error) -> Error {
    Error::unavailable(format!("{operation} {}", path.display()), error.to_string()).with_source(error)
}

/// Only the owner of the file may read it.
fn owner_only(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    options
}
