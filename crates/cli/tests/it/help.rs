//! Compares `--help` of every command with the files in tests/help. `HALO_UPDATE_HELP=1 cargo test -p halo help`
//! updates the files.

use crate::common::{run_halo, temp_dir};
use clap::{Command, CommandFactory};
use std::collections::BTreeMap;
use std::path::Path;

/// Collects the arguments of every command and subcommand; `[]` is `halo` itself.
fn command_paths(command: &Command, path: &[String], paths: &mut Vec<Vec<String>>) {
    paths.push(path.to_vec());
    for subcommand in command.get_subcommands().filter(|subcommand| subcommand.get_name() != "help") {
        let path = [path, &[subcommand.get_name().to_owned()]].concat();
        command_paths(subcommand, &path, paths);
    }
}

#[test]
fn help_of_every_command_matches_snapshot() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/help");
    let data = temp_dir();
    let mut paths = Vec::new();
    command_paths(&halo_cli::args::Cli::command(), &[], &mut paths);
    let mut printed = BTreeMap::new();
    for path in paths {
        let name = [&["halo".to_owned()], path.as_slice()].concat().join("-") + ".txt";
        let mut args: Vec<&str> = path.iter().map(String::as_str).collect();
        args.push("--help");
        let run = run_halo(data.path(), &args);
        assert_eq!((run.status, run.err.as_str()), (0, ""), "{args:?}");
        let lines: Vec<&str> = run.out.lines().map(str::trim_end).collect();
        printed.insert(name, lines.join("\n") + "\n");
    }
    if std::env::var_os("HALO_UPDATE_HELP").is_some() {
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).expect("the folder is created");
        for (name, text) in &printed {
            std::fs::write(folder.join(name), text).expect("the file is written");
        }
    }
    let files = std::fs::read_dir(&folder)
        .expect("tests/help")
        .map(|file| file.expect("the folder is readable").path());
    let stored: BTreeMap<String, String> = files
        .map(|file| {
            let name = file.file_name().expect("a name").to_string_lossy().into_owned();
            (name, std::fs::read_to_string(&file).expect("UTF-8"))
        })
        .collect();
    let update = "is stale: HALO_UPDATE_HELP=1 cargo test -p halo help";
    assert_eq!(stored.keys().collect::<Vec<_>>(), printed.keys().collect::<Vec<_>>(), "tests/help {update}");
    for (name, text) in &printed {
        assert_eq!(&stored[name], text, "tests/help/{name} {update}");
    }
}
