//! README.md and the pages are true: the demonstration reproduces, and the commands and figures exist.

use crate::common::{chat_model, halo_command, temp_dir, test_model_path};
use crate::requirements::repository_root;
use clap::CommandFactory;
use halo_cli::models::catalogue::{Catalogue, CatalogueEntry, ModelKind};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn readme() -> String {
    fs::read_to_string(repository_root().join("README.md")).expect("README.md")
}

/// README.md, CONTRIBUTING.md and the pages of docs/, each with its name.
fn pages() -> Vec<(String, String)> {
    fn add(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder").filter_map(Result::ok) {
            let path = entry.path();
            // A recorded conversation, and the requirements in the words of others.
            if path.is_dir() && !path.ends_with("transcripts") {
                add(&path, found);
            } else if path.extension().is_some_and(|end| end == "md") && !path.ends_with("REQUIREMENTS.md") {
                found.push(path);
            }
        }
    }
    let root = repository_root();
    let mut found = vec![root.join("README.md"), root.join("CONTRIBUTING.md")];
    add(&root.join("docs"), &mut found);
    let read = |path: &PathBuf| fs::read_to_string(path).expect("a page");
    found.iter().map(|path| (path.display().to_string(), read(path))).collect()
}

/// The commands of a page: what is between backticks, and the lines of shell blocks.
fn commands(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut block = None;
    for line in page.lines() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            block = if block.is_some() { None } else { Some(language.to_owned()) };
        } else if block.as_deref() == Some("sh") {
            found.push(line.split(" #").next().unwrap_or_default().trim().to_owned());
        } else if block.is_none() {
            found.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    found
}

/// The first shell session of a page.
fn session_text(page: &str) -> &str {
    let start = page.find("```text\n$ ").expect("a session") + "```text\n".len();
    &page[start..start + page[start..].find("```").expect("its end")]
}

/// The commands of a session, each with the output that is printed below it.
fn session(page: &str) -> Vec<(String, String)> {
    let mut commands: Vec<(String, String)> = Vec::new();
    for line in session_text(page).lines() {
        if let Some(command) = line.strip_prefix("$ ") {
            commands.push((command.to_owned(), String::new()));
            continue;
        }
        let (command, output) = commands.last_mut().expect("a command comes first");
        if command.ends_with('\\') {
            command.push('\n');
            command.push_str(line);
        } else {
            output.push_str(line);
            output.push('\n');
        }
    }
    commands
}

#[test]
fn readme_demonstration_reproduces_byte_for_byte() {
    let readme = readme();
    let session = session(&readme);
    assert!(session.len() >= 4, "{session:?}");
    let page = fs::read_to_string(repository_root().join("docs/getting-started.md")).expect("a page");
    assert!(page.contains(session_text(&readme)), "docs/getting-started.md has the same session");
    let data = temp_dir();
    let binaries = Path::new(env!("CARGO_BIN_EXE_halo")).parent().expect("a folder");
    let path = std::env::join_paths(
        std::iter::once(binaries.to_owned())
            .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
    );
    let mut exports = String::new();
    for (line, expected) in &session {
        // Without the settings of the user, and with the models that `scripts/models` has.
        let environment = halo_command(data.path(), &[]);
        let mut command = Command::new("sh");
        for (name, value) in environment.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env("PATH", path.as_ref().expect("a path")).env("HALO_DATA", data.path());
        command.env("HALO_MODEL_PATH", chat_model());
        command.env("HALO_RECALL_EMBEDDER", test_model_path("HALO_TEST_EMBEDDER", "e5-small"));
        let output = command.args(["-c", &format!("{exports}{line}")]).output().expect("sh runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {said}");
        assert_eq!(&String::from_utf8_lossy(&output.stdout), expected, "{line}\n{said}");
        if line.starts_with("export ") {
            exports = format!("{line}\n");
        }
    }
}

#[test]
fn readme_is_at_most_150_lines() {
    let lines = readme().lines().count();
    assert!(lines <= 150, "README.md has {lines} lines");
}

#[test]
fn pages_name_only_commands_and_scripts_that_exist() {
    let root = repository_root();
    let makefile = fs::read_to_string(root.join("Makefile")).expect("the Makefile");
    let mut problems = Vec::new();
    let mut count = 0;
    for (page, text) in pages() {
        for command in commands(&text) {
            let mut words = command.split_whitespace();
            let Some(program) = words.next() else { continue };
            let problem = match program {
                "make" => {
                    let target = words.find(|word| !word.contains('=') && !word.starts_with('-'));
                    target
                        .filter(|target| !makefile.contains(&format!("\n{target}:")))
                        .map(|_| "no such target")
                }
                "halo" | "target/release/halo" => unknown_argument(words),
                _ if program.starts_with("scripts/") => {
                    (!root.join(program).exists()).then_some("there is no such script")
                }
                _ => continue,
            };
            count += 1;
            problems.extend(problem.map(|problem| format!("{page}: {command}: {problem}")));
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
    assert!(count > 200, "{count} commands are checked");
}

/// What is wrong with the arguments of `halo` on a page: a command or an option that it does not have.
fn unknown_argument<'a>(words: impl Iterator<Item = &'a str>) -> Option<&'static str> {
    let mut command = halo_cli::args::Cli::command();
    command.build();
    let mut current = &command;
    for word in words {
        // What follows is another program, or an argument in words.
        if ["|", ">", "<", "…", "&&", ";", "or"].contains(&word) {
            break;
        }
        if let Some(option) = word.strip_prefix("--") {
            let name = option.split('=').next().unwrap_or_default();
            let known = |command: &clap::Command| {
                let mut names = command.get_arguments().filter_map(clap::Arg::get_long_and_visible_aliases);
                names.any(|all| all.contains(&name))
            };
            if !name.is_empty() && !["help", "version"].contains(&name) && !known(current) {
                return Some("there is no such option");
            }
        } else if let Some(found) = current.find_subcommand(word) {
            current = found;
        } else if current.get_name() == "halo"
            && word.chars().all(|c| c.is_ascii_lowercase() || c == '-')
            && !word.starts_with('-')
        {
            return Some("there is no such command");
        }
    }
    None
}

/// Figures in README.md that are written down or computed elsewhere.
#[test]
fn readme_figures_are_those_of_their_sources() {
    let readme = readme();
    let root = repository_root();
    let benchmarks = fs::read_to_string(root.join("docs/benchmarks.md")).expect("the benchmarks");
    for figure in ["1,459", "1,713", "0.99"] {
        assert!(readme.contains(figure) && benchmarks.contains(figure), "{figure}");
    }
    let version = env!("CARGO_PKG_RUST_VERSION");
    assert!(readme.contains(&format!("Rust {version} or newer")), "{version}");
    let catalogue = Catalogue::load().expect("the catalogue");
    let chat_models = || catalogue.models.iter().filter(|model| model.kind == ModelKind::Chat);
    let smallest = chat_models().map(CatalogueEntry::size_bytes).min().expect("a model") >> 20;
    let largest = chat_models().map(CatalogueEntry::size_bytes).max().expect("a model") / 1_000_000_000;
    assert!(readme.contains(&format!("from {smallest} MB to {largest} GB")), "{smallest} MB, {largest} GB");
    let rows = fs::read_to_string(root.join("docs/REQUIREMENTS.md")).expect("the requirements");
    let rows = rows.lines().filter(|line| line.starts_with("| S")).count();
    assert!(readme.contains(&format!("[{rows} requirements")), "{rows}");
}
