//! What was forgotten, one proof a line, in a file that only grows; and the key that they are sealed with.

use super::Wish;
use anyhow::{Context, Result, bail};
use halo_agents::proof::{Gone as Words, Key, Proof, hex, unhex};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The file of proofs.
const LOG: &str = "forgotten.jsonl";
/// The key.
const KEY: &str = "lethe.key";

/// Where proofs are kept.
pub struct Audit {
    log: PathBuf,
    key: Key,
}

impl Audit {
    /// The proofs of a data folder; its key is made where there is none.
    pub fn open(data: &Path) -> Result<Self> {
        let key = match read_key(data)? {
            Some(key) => key,
            None => make_key(data)?,
        };
        Ok(Self { log: data.join(LOG), key })
    }

    /// Seals that something is forgotten, and writes it down.
    pub fn note(&self, subject: &str, text: &str, tokens: usize, wish: &Wish) -> Result<()> {
        let mut salt = [0; 16];
        getrandom::fill(&mut salt).map_err(|e| anyhow::anyhow!("no random numbers: {e}"))?;
        let words = Words { subject, by: wish.by, text, tokens: tokens as u64 };
        let Proof { subject, by, at, tokens, salt, content, seal } =
            Proof::seal(&self.key, salt, words, wish.now);
        let line = json!({
            "subject": subject, "by": by, "at": at, "tokens": tokens, "salt": salt, "content": content, "seal": seal,
        });
        let mut file = private(OpenOptions::new().append(true).create(true)).open(&self.log)?;
        file.write_all(format!("{line}\n").as_bytes()).and_then(|()| file.sync_all())?;
        Ok(())
    }
}

/// All proofs, and whether each is sound.
pub fn proofs(data: &Path) -> Result<Vec<(Proof, bool)>> {
    let text = match std::fs::read_to_string(data.join(LOG)) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {LOG}")),
    };
    let key = read_key(data)?;
    let mut proofs = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let told: Value =
            serde_json::from_str(line).with_context(|| format!("line {} of {LOG} is damaged", n + 1))?;
        let field = |name: &str| told[name].as_str().unwrap_or_default().to_owned();
        let proof = Proof {
            subject: field("subject"),
            by: field("by"),
            at: told["at"].as_i64().unwrap_or(0),
            tokens: told["tokens"].as_u64().unwrap_or(0),
            salt: field("salt"),
            content: field("content"),
            seal: field("seal"),
        };
        let sound = key.is_some_and(|key| proof.verify(&key));
        proofs.push((proof, sound));
    }
    Ok(proofs)
}

fn read_key(data: &Path) -> Result<Option<Key>> {
    match std::fs::read_to_string(data.join(KEY)) {
        Ok(text) => match unhex(text.trim()).and_then(|bytes| Key::try_from(bytes).ok()) {
            Some(key) => Ok(Some(key)),
            None => bail!("{KEY} in {} is not a key: 64 hexadecimal digits", data.display()),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {KEY}")),
    }
}

fn make_key(data: &Path) -> Result<Key> {
    let mut key = Key::default();
    getrandom::fill(&mut key).map_err(|e| anyhow::anyhow!("no random numbers: {e}"))?;
    let mut file: File = private(OpenOptions::new().write(true).create_new(true)).open(data.join(KEY))?;
    file.write_all(format!("{}\n", hex(&key)).as_bytes()).and_then(|()| file.sync_all())?;
    Ok(key)
}

/// A file for its owner's eyes alone.
fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    options
}
