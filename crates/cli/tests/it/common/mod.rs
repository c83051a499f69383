//! Runs the real binary, away from the user's own settings.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What a run of `halo` gave: exit status, standard output, standard error.
#[allow(dead_code, reason = "some tests talk with it instead")]
pub struct HaloOutput {
    pub status: i32,
    pub out: String,
    pub err: String,
}

/// Runs `halo` with an empty data folder and no settings from the environment.
#[allow(dead_code, reason = "some tests give it variables, all the time")]
pub fn run_halo(data: &Path, args: &[&str]) -> HaloOutput {
    run_halo_with_env(data, args, &[])
}

/// `halo`, with no variables of its own.
pub fn halo_command(data: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_halo"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("HALO_") {
            command.env_remove(name);
        }
    }
    command.arg("--data").arg(data).args(args);
    command
}

/// A model that `scripts/models` fetches, or the one that a variable names.
#[allow(dead_code, reason = "some tests need none")]
pub fn test_model_path(variable: &str, name: &str) -> PathBuf {
    let named = std::env::var_os(variable).map(PathBuf::from);
    let path =
        named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/models").join(name));
    path.canonicalize()
        .unwrap_or_else(|_| panic!("{} is missing: `scripts/models` fetches it", path.display()))
}

#[allow(dead_code, reason = "some tests need none")]
pub fn chat_model() -> PathBuf {
    test_model_path("HALO_TEST_MODEL", "SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// The setting that names the default embedder.
#[allow(dead_code, reason = "some tests need none")]
pub fn embedder_setting() -> String {
    format!("recall.embedder={}", test_model_path("HALO_TEST_EMBEDDER", "e5-small").display())
}

/// Runs `halo` with these variables and no others of its own.
#[allow(dead_code, reason = "some tests talk with it instead")]
pub fn run_halo_with_env(data: &Path, args: &[&str], environment: &[(&str, &OsStr)]) -> HaloOutput {
    let output =
        halo_command(data, args).envs(environment.iter().copied()).output().expect("the binary runs");
    HaloOutput {
        // None: a signal ended it.
        status: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).expect("UTF-8"),
        err: String::from_utf8(output.stderr).expect("UTF-8"),
    }
}

#[allow(dead_code, reason = "some tests have homes of their own")]
pub fn temp_dir() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// How often something is done: some times always, and as often as anybody asks for by the environment.
#[allow(dead_code, reason = "some tests do everything once")]
pub fn iterations(name: &str, usually: usize) -> usize {
    std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(usually)
}
