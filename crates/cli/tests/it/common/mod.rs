//! Runs the real binary without the settings of the user.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Exit status, standard output and standard error of one run of `halo`.
#[allow(dead_code, reason = "not every test uses it")]
pub struct HaloOutput {
    pub status: i32,
    pub out: String,
    pub err: String,
}

impl From<Output> for HaloOutput {
    fn from(output: Output) -> Self {
        Self {
            // There is no exit code after a signal.
            status: output.status.code().unwrap_or(-1),
            out: String::from_utf8(output.stdout).expect("UTF-8"),
            err: String::from_utf8(output.stderr).expect("UTF-8"),
        }
    }
}

/// Runs `halo` on this data folder, without settings from the environment.
#[allow(dead_code, reason = "not every test uses it")]
pub fn run_halo(data: &Path, args: &[&str]) -> HaloOutput {
    run_halo_with_env(data, args, &[])
}

/// The `halo` command with all `HALO_` variables removed.
pub fn halo_command(data: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_halo"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("HALO_") {
            command.env_remove(name);
        }
    }
    // Models that the user has pulled are not those of a test.
    command.env("XDG_DATA_HOME", data.join("platform"));
    command.arg("--data").arg(data).args(args);
    command
}

/// The path in this environment variable, or the model that `scripts/models` downloads.
#[allow(dead_code, reason = "not every test uses it")]
pub fn test_model_path(variable: &str, name: &str) -> PathBuf {
    let configured = std::env::var_os(variable).map(PathBuf::from);
    let path = configured
        .unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/models").join(name));
    path.canonicalize()
        .unwrap_or_else(|_| panic!("{} is missing: `scripts/models` fetches it", path.display()))
}

#[allow(dead_code, reason = "not every test uses it")]
pub fn chat_model() -> PathBuf {
    test_model_path("HALO_TEST_MODEL", "SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// The setting that names the default embedder.
#[allow(dead_code, reason = "not every test uses it")]
pub fn embedder_setting() -> String {
    format!("recall.embedder={}", test_model_path("HALO_TEST_EMBEDDER", "e5-small").display())
}

/// Runs `halo` with these environment variables and no other `HALO_` variables.
#[allow(dead_code, reason = "not every test uses it")]
pub fn run_halo_with_env(data: &Path, args: &[&str], environment: &[(&str, &OsStr)]) -> HaloOutput {
    halo_command(data, args).envs(environment.iter().copied()).output().expect("the binary starts").into()
}

/// Messages without relation to each other.
#[allow(dead_code, reason = "not every test uses it")]
pub const UNRELATED_MESSAGES: [&str; 14] = [
    "My gun is called Betsy and it hangs on the wall above the fire.",
    "The cat sleeps on the sofa all day long, and at night it hunts.",
    "It rains in Lisbon today, and the trams are full of wet people.",
    "My sister plays the cello in an orchestra in the north of Wales.",
    "The train to Rome is late again, because of snow in the passes.",
    "I had soup for lunch, with bread, and a glass of cold water too.",
    "The garden needs water, and somebody should cut the old hedge.",
    "Our neighbour paints boats, and sells them at the Sunday market.",
    "The bakery closes at six, and on Saturdays it closes at noon.",
    "I read a book about bees, and another one about the stars.",
    "The clock in the hall is slow, and nobody dares to mend it.",
    "A letter came from Anna, who lives in a lighthouse by the sea.",
    "The bridge is closed until May, because the ice has damaged it.",
    "We planted apple trees along the road, and two of them died.",
];

/// `halo` with the test models, a fixed seed and one thread.
#[allow(dead_code, reason = "not every test uses it")]
pub fn model_command(data: &Path, args: &[&str]) -> Command {
    let mut command = halo_command(data, args);
    command.arg("--model").arg(chat_model());
    command.args(["--seed", "7", "--threads", "1", "--set", &embedder_setting()]);
    // The prompt contains the date by default, and the answers would change with it.
    command.env("HALO_CHAT_DATES", "false");
    command
}

/// Writes each line to the standard input of a command, which must succeed.
#[allow(dead_code, reason = "not every test uses it")]
pub fn send_lines(command: &mut Command, lines: &[&str]) -> HaloOutput {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("halo starts");
    let mut stdin = child.stdin.take().expect("stdin is piped");
    let text = lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
    let output = HaloOutput::from(child.wait_with_output().expect("halo exits"));
    writer.join().expect("the writer does not panic").expect("halo reads stdin");
    assert_eq!(output.status, 0, "{}", output.err);
    output
}

/// Sends one message with `halo chat`; returns what it wrote to standard error.
#[allow(dead_code, reason = "not every test uses it")]
pub fn chat_once(data: &Path, flags: &[&str], message: &str) -> String {
    let mut command = halo_command(data, &["chat", "--set", "generation.max_tokens=2"]);
    send_lines(command.args(flags), &[message]).err
}

#[allow(dead_code, reason = "not every test uses it")]
pub fn temp_dir() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// The number of iterations in this environment variable, or the default.
#[allow(dead_code, reason = "not every test uses it")]
pub fn iterations(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

/// The files below a folder that match, by their path and their bytes.
#[allow(dead_code, reason = "not every test uses it")]
pub fn files_with(folder: &Path, matches: impl Fn(&Path, &[u8]) -> bool + Copy) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder").filter_map(Result::ok) {
        let path = entry.path();
        if path.is_dir() {
            files.extend(files_with(&path, matches));
        } else if matches(&path, &std::fs::read(&path).expect("the file is readable")) {
            files.push(path);
        }
    }
    files
}
