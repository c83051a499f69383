//! `scripts/program`, which chooses what `make run` starts: a prebuilt archive of the very same sources, or a build.

use crate::common::temp_dir;
use crate::requirements::repository_root;
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const PREBUILT: &str = "target/prebuilt/bin/halo";
const BUILT: &str = "target/release/halo";

/// A source tree with the scripts of this one. Its build needs no compiler.
struct SourceTree {
    folder: tempfile::TempDir,
}

impl SourceTree {
    fn new() -> Self {
        let tree = Self { folder: temp_dir() };
        for script in ["scripts/program", "packaging/install.sh"] {
            let target = tree.path(script);
            fs::create_dir_all(target.parent().expect("a folder")).expect("it is created");
            fs::copy(repository_root().join(script), target).expect("it is copied");
        }
        for file in ["Cargo.lock", "rust-toolchain.toml", "THIRD_PARTY_LICENSES.md"] {
            tree.write(file, "");
        }
        tree.write("Cargo.toml", "[workspace.package]\nversion = \"7.8.9\"\n");
        tree.write("crates/cli/src/main.rs", "fn main() {}\n");
        tree.write("crates/cli/tests/it/main.rs", "");
        tree.write("docs/README.md", "");
        tree.write("web/index.html", "");
        tree.write(
            "Makefile",
            "build:\n\t@echo compiling\n\t@mkdir -p target/release && touch target/release/halo\n",
        );
        tree
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("it is created");
        fs::write(path, text).expect("it is written");
    }

    fn program(&self, args: &[&str]) -> Output {
        Command::new(self.path("scripts/program")).args(args).output().expect("the script runs")
    }

    /// The program that is chosen, and what is said about it.
    fn chosen(&self, args: &[&str]) -> (String, String) {
        let output = self.program(args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        (String::from_utf8_lossy(&output.stdout).trim_end().to_owned(), said)
    }

    fn sources(&self) -> String {
        self.chosen(&["--sources"]).0
    }

    /// Packs a program that prints its version into an archive, as scripts/dist does; returns its path.
    fn pack(&self, folder: &str, sources: &str, script: &str) -> PathBuf {
        let machine = Command::new("uname").arg("-m").output().expect("uname runs").stdout;
        let machine = String::from_utf8(machine).expect("UTF-8").trim().to_owned();
        let name = format!("halo-7.8.9-linux-{machine}");
        let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
        let files = [
            ("bin/halo", script, 0o755),
            ("lib/halo/libggml.so", "", 0o644),
            ("share/halo/machine", &machine, 0o644),
            ("share/halo/sources", &format!("{sources}\n"), 0o644),
        ];
        for (file, text, mode) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(mode);
            tar.append_data(&mut header, format!("{name}/{file}"), text.as_bytes()).expect("it is packed");
        }
        let bytes = tar.into_inner().and_then(GzEncoder::finish).expect("it is packed");
        let digest: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        let archive = self.path(folder).join(format!("{name}.tar.gz"));
        fs::create_dir_all(archive.parent().expect("a folder")).expect("it is created");
        fs::write(&archive, bytes).expect("it is written");
        let sums = archive.with_file_name("SHA256SUMS");
        fs::write(sums, format!("{digest}  {name}.tar.gz\n")).expect("it is written");
        archive
    }
}

const RUNS: &str = "#!/bin/sh\necho halo 7.8.9\n";

fn damage(archive: &Path) {
    let mut bytes = fs::read(archive).expect("the archive");
    *bytes.last_mut().expect("a byte") ^= 1;
    fs::write(archive, bytes).expect("it is written");
}

#[test]
fn prebuilt_of_the_same_sources_is_run() {
    for folder in ["target/dist", "."] {
        let tree = SourceTree::new();
        tree.pack(folder, &tree.sources(), RUNS);
        let (program, said) = tree.chosen(&[]);
        assert_eq!(program, PREBUILT, "{said}");
        assert!(said.contains("instead of a build") && !tree.path(BUILT).exists(), "{said}");
        let mode = tree.path(PREBUILT).metadata().expect("it is installed").permissions().mode();
        assert_eq!(mode & 0o111, 0o111);
        // The second time it is there already. A test is not compiled into the program.
        tree.write("crates/cli/tests/it/main.rs", "mod chat;");
        let before = fs::metadata(tree.path(PREBUILT)).and_then(|file| file.modified()).expect("a time");
        assert_eq!(tree.chosen(&[]).0, PREBUILT);
        let after = fs::metadata(tree.path(PREBUILT)).and_then(|file| file.modified()).expect("a time");
        assert_eq!(before, after);
    }
}

/// Whatever is changed, added or removed: what was built of the sources before is not run.
#[test]
fn prebuilt_of_other_sources_is_not_run_but_built() {
    let tree = SourceTree::new();
    tree.pack("target/dist", &tree.sources(), RUNS);
    let changes: [(&str, &str); 5] = [
        ("crates/cli/src/main.rs", "fn main() { panic!() }\n"),
        ("crates/cli/src/new.rs", ""),
        ("Cargo.lock", "version = 4\n"),
        ("docs/README.md", "Read this.\n"),
        ("web/index.html", "<p>"),
    ];
    assert_eq!(tree.chosen(&[]).0, PREBUILT);
    for (file, text) in changes {
        let before = fs::read_to_string(tree.path(file)).ok();
        tree.write(file, text);
        let (program, said) = tree.chosen(&[]);
        assert_eq!(program, BUILT, "{file}");
        assert!(said.contains("it is of other sources") && said.contains("compiling"), "{file}: {said}");
        match before {
            Some(text) => tree.write(file, &text),
            None => fs::remove_file(tree.path(file)).expect("it is removed"),
        }
    }
    assert_eq!(tree.chosen(&[]).0, PREBUILT);
    fs::remove_file(tree.path("web/index.html")).expect("it is removed");
    assert_eq!(tree.chosen(&[]).0, BUILT);
}

#[test]
fn prebuilt_that_is_damaged_or_does_not_run_is_built() {
    let tree = SourceTree::new();
    assert_eq!(tree.chosen(&[]).0, BUILT, "there is no archive");
    let archive = tree.pack("target/dist", &tree.sources(), RUNS);
    damage(&archive);
    let (program, said) = tree.chosen(&[]);
    assert!(program == BUILT && said.contains("its checksum is not that of SHA256SUMS"), "{program}: {said}");
    fs::remove_file(archive.with_file_name("SHA256SUMS")).expect("it is removed");
    assert_eq!(tree.chosen(&[]).0, BUILT, "without a checksum");
    // As on a system with an older glibc.
    tree.pack("target/dist", &tree.sources(), "#!/bin/sh\nexit 1\n");
    let (program, said) = tree.chosen(&[]);
    assert!(program == BUILT && said.contains("it does not run here"), "{program}: {said}");
}

#[test]
fn prebuilt_that_is_named_is_run_or_refused_with_the_reason() {
    let tree = SourceTree::new();
    let archive = tree.pack("elsewhere", "of another folder", RUNS);
    let name = archive.to_str().expect("UTF-8");
    let (program, said) = tree.chosen(&[name]);
    assert!(
        program == PREBUILT && said.contains("is of other sources than this folder"),
        "{program}: {said}"
    );
    let refused = |args: &[&str], reason: &str| {
        let output = tree.program(args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(reason), "{said}");
        assert_eq!(output.stdout, b"");
    };
    damage(&archive);
    refused(&[name], "the checksum of");
    refused(&["elsewhere/halo-7.8.8-linux-x86_64.tar.gz"], "is not halo-7.8.9-linux-");
    refused(&["--source"], "there is no option --source");
}

#[test]
fn make_run_and_chat_start_the_program_that_is_chosen() {
    let tree = SourceTree::new();
    fs::copy(repository_root().join("Makefile"), tree.path("Makefile")).expect("it is copied");
    tree.pack("target/dist", &tree.sources(), "#!/bin/sh\necho \"ran $*\"\n");
    let make = |args: &[&str]| {
        let output =
            Command::new("make").arg("-C").arg(tree.folder.path()).args(args).output().expect("make runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        said.lines().filter(|line| line.starts_with("ran ")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(
        make(&["run", "LISTEN=127.0.0.1:5002"]),
        ["ran models pull", "ran serve --listen 127.0.0.1:5002"]
    );
    assert_eq!(make(&["chat"]), ["ran models pull", "ran chat"]);
    assert!(!tree.path(BUILT).exists());
}
