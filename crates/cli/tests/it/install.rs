//! What an installation has beside the program, and what `halo self-check` says of a machine.

use crate::common::{chat_model, halo_command, run_halo, temp_dir};
use clap::CommandFactory;
use serde_json::Value;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

/// Each script completes every command, and bash accepts its own.
#[test]
fn completions_name_every_command() {
    let data = temp_dir();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let run = run_halo(data.path(), &["completions", shell]);
        assert_eq!((run.status, run.err.as_str()), (0, ""), "{shell}");
        for command in halo_cli::args::Cli::command().get_subcommands() {
            assert!(run.out.contains(command.get_name()), "{shell}: {}", command.get_name());
        }
    }
    let script = run_halo(data.path(), &["completions", "bash"]).out;
    let complete = "COMP_WORDS=(halo resu); COMP_CWORD=1; _halo halo resu halo; echo \"${COMPREPLY[@]}\"";
    let file = data.path().join("completions");
    std::fs::write(&file, format!("{script}\n{complete}\n")).expect("the file is written");
    let run = Command::new("bash").arg(&file).output().expect("bash runs");
    assert_eq!(String::from_utf8_lossy(&run.stdout).trim(), "resurrect");
}

#[test]
fn man_pages_are_written_for_every_command() {
    let folder = temp_dir();
    let pages = folder.path().join("man1");
    let run = run_halo(folder.path(), &["man", pages.to_str().expect("UTF-8")]);
    assert_eq!((run.status, run.out.as_str(), run.err.as_str()), (0, "", ""));
    for command in halo_cli::args::Cli::command().get_subcommands().filter(|c| c.get_name() != "help") {
        let page = pages.join(format!("halo-{}.1", command.get_name()));
        let text = std::fs::read_to_string(&page).unwrap_or_else(|e| panic!("{}: {e}", page.display()));
        assert!(text.contains(".SH SYNOPSIS"), "{}", page.display());
    }
    let page = run_halo(folder.path(), &["man"]).out;
    assert!(page.contains(".TH halo 1") && page.contains(".SH DESCRIPTION"), "{page}");
}

#[test]
fn install_script_puts_everything_below_the_prefix() {
    let prefix = temp_dir();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let install = || {
        let mut command = Command::new(root.join("scripts/install"));
        command.arg(prefix.path()).env("HALO_BINARY", env!("CARGO_BIN_EXE_halo"));
        command.stderr(Stdio::inherit()).output().expect("the script runs")
    };
    // The second time, the program is replaced.
    for _ in 0..2 {
        assert!(install().status.success());
    }
    let version = Command::new(prefix.path().join("bin/halo")).arg("--version").output().expect("halo runs");
    assert_eq!(
        String::from_utf8_lossy(&version.stdout).trim(),
        format!("halo {}", env!("CARGO_PKG_VERSION"))
    );
    for file in [
        "share/bash-completion/completions/halo",
        "share/zsh/site-functions/_halo",
        "share/fish/vendor_completions.d/halo.fish",
        "share/man/man1/halo.1",
        "share/man/man1/halo-chat.1",
    ] {
        assert!(prefix.path().join(file).metadata().is_ok_and(|file| file.len() > 100), "{file}");
    }
}

fn self_check(data: &Path, args: &[&str]) -> (i32, Value) {
    let args = [args, &["self-check", "--json"]].concat();
    // No test depends on the network.
    let mut command = halo_command(data, &args);
    let output = command.env("HF_ENDPOINT", "http://127.0.0.1:9").output().expect("halo runs");
    let report = serde_json::from_slice(&output.stdout).expect("JSON");
    (output.status.code().unwrap_or(-1), report)
}

fn state_of(report: &Value, check: &str) -> (String, String) {
    let checks = report["checks"].as_array().expect("checks");
    let one = checks.iter().find(|one| one["check"] == check).unwrap_or_else(|| panic!("{check}: {report}"));
    let text = |key: &str| one[key].as_str().unwrap_or_default().to_owned();
    (text("state"), text("text"))
}

#[test]
fn self_check_says_what_is_missing() {
    let data = temp_dir();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let listen = format!("server.listen={}", taken.local_addr().expect("an address"));
    let (status, report) = self_check(data.path(), &["--model", "nosuchmodel", "--set", &listen]);
    assert_eq!((status, &report["ready"]), (1, &Value::Bool(false)), "{report}");
    let (state, text) = state_of(&report, "model");
    assert!(state == "missing" && text.contains("halo models pull"), "{report}");
    for check in ["network", "server"] {
        assert_eq!(state_of(&report, check).0, "warn", "{check}: {report}");
    }
    assert_eq!(state_of(&report, "store"), ("ok".into(), "none yet: the first message creates it".into()));

    // The folder of the conversations is not for others.
    let folder = data.path().join("new");
    self_check(&folder, &[]);
    let mode = std::os::unix::fs::PermissionsExt::mode(&folder.metadata().expect("a folder").permissions());
    assert_eq!(mode & 0o777, 0o700);

    let model = chat_model();
    let (status, report) = self_check(data.path(), &["--model", model.to_str().expect("UTF-8")]);
    assert_eq!((status, &report["ready"]), (0, &Value::Bool(true)), "{report}");
    assert!(state_of(&report, "model").1.contains("of memory"), "{report}");
}
