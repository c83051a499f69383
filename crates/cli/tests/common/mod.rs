//! Runs the real binary, away from the user's own settings.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// What a run of `halo` gave: exit status, standard output, standard error.
pub struct Run {
    pub status: i32,
    pub out: String,
    pub err: String,
}

/// Runs `halo` with an empty data folder and no settings from the environment.
#[allow(dead_code, reason = "some tests give it variables, all the time")]
pub fn halo(data: &Path, args: &[&str]) -> Run {
    halo_with(data, args, &[])
}

/// Runs `halo` with these variables and no others of its own.
pub fn halo_with(data: &Path, args: &[&str], environment: &[(&str, &OsStr)]) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_halo"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("HALO_") {
            command.env_remove(name);
        }
    }
    command.envs(environment.iter().copied());
    let output = command.arg("--data").arg(data).args(args).output().expect("the binary runs");
    Run {
        // None: a signal ended it.
        status: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).expect("UTF-8"),
        err: String::from_utf8(output.stderr).expect("UTF-8"),
    }
}

/// An empty folder.
pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}
