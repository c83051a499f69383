//! Copying with a SHA-256 checksum.

use crate::disk::io_error_with_advice;
use crate::progress::Progress;
use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::path::Path;

#[derive(Default)]
pub struct HashingCopy {
    hash: Sha256,
    pub bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error("cannot read it: {0}")]
    Read(std::io::Error),
    #[error("cannot write it: {0}")]
    Write(std::io::Error),
}

impl HashingCopy {
    /// Copies all of `input`; longer than `most` is an error.
    pub fn copy_all(
        &mut self,
        input: &mut dyn Read,
        output: &mut dyn Write,
        most: u64,
    ) -> Result<(), CopyError> {
        let mut buffer = vec![0; 1 << 18];
        let mut left = most;
        loop {
            let n = match input.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(n) => n,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(CopyError::Read(error)),
            };
            left = left.checked_sub(n as u64).ok_or_else(|| {
                CopyError::Read(std::io::Error::new(ErrorKind::InvalidData, "it is longer than expected"))
            })?;
            output.write_all(&buffer[..n]).map_err(CopyError::Write)?;
            self.hash.update(&buffer[..n]);
            self.bytes += n as u64;
        }
    }

    /// The SHA-256 of everything copied, in hexadecimal.
    pub fn sha256(&self) -> String {
        self.hash.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

pub fn sha256_of_text(text: &str) -> String {
    let mut copy = HashingCopy::default();
    copy.hash.update(text);
    copy.sha256()
}

pub fn sha256_of_file(path: &Path, bar: &Progress) -> Result<String> {
    let file = File::open(path).map_err(|e| io_error_with_advice(e, "read", path))?;
    let mut copy = HashingCopy::default();
    copy.copy_all(&mut bar.wrap_reader(file), &mut std::io::sink(), u64::MAX)
        .with_context(|| format!("checking {}", path.display()))?;
    Ok(copy.sha256())
}

/// Fails if a file does not have the expected SHA-256.
pub fn check_sha256(what: &str, expected: &str, actual: &str) -> Result<()> {
    if expected != actual {
        bail!(
            "{what} has a wrong checksum: its SHA-256 is {actual}, expected {expected}; it was not installed. If this happens \
             again, the file was changed at its source: do not use it"
        );
    }
    Ok(())
}
