//! The tests that the built test programs of the workspace list. A name in a source file alone proves nothing: the file may
//! not be compiled, or a `cfg` may leave the test out. Tests in Python are those that pytest collects.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

/// Whether a test program lists a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestLookup {
    Listed,
    /// Its program is built and does not have it.
    Missing,
    /// It is listed and does not run by default.
    Ignored,
    /// Its program is not built: only some crates are tested.
    NotBuilt,
}

/// The test programs in the build folder, by the root of their source.
pub struct BuiltTests {
    programs: BTreeMap<String, (SystemTime, PathBuf)>,
    /// The tests of a program and whether each is ignored, once they are asked for.
    lists: BTreeMap<String, BTreeMap<String, bool>>,
    /// The tests in Python, once one is asked for.
    python: Option<Option<BTreeSet<String>>>,
}

impl BuiltTests {
    /// The programs in the folder of the running test. Of several builds the newest counts.
    pub fn beside_this_test() -> Self {
        let this = std::env::current_exe().expect("the path of this program");
        let folder = this.parent().expect("the folder of this program");
        let mut programs: BTreeMap<String, (SystemTime, PathBuf)> = BTreeMap::new();
        for entry in std::fs::read_dir(folder).expect("the build folder").filter_map(Result::ok) {
            let dependencies = entry.path();
            if dependencies.extension().is_none_or(|extension| extension != "d") {
                continue;
            }
            let program = dependencies.with_extension("");
            let Ok(built) = program.metadata().and_then(|about| about.modified()) else { continue };
            let Some(root) = source_root(&dependencies, &program) else { continue };
            let newest = programs.get(&root).is_none_or(|(before, _)| *before < built);
            if newest {
                programs.insert(root, (built, program));
            }
        }
        Self { programs, lists: BTreeMap::new(), python: None }
    }

    /// Looks up a test that is named `FILE::NAME`.
    pub fn find(&mut self, test: &str) -> TestLookup {
        let Some((file, name)) = test.split_once("::") else { return TestLookup::Missing };
        if file.ends_with(".py") {
            return self.find_python(file, name);
        }
        let (roots, module) = roots_and_module(file);
        let mut found = TestLookup::NotBuilt;
        for root in roots {
            let Some((_, program)) = self.programs.get(&root) else { continue };
            let list = self.lists.entry(root).or_insert_with(|| list_tests(program));
            let matches = |path: &str| {
                path.rsplit("::").next() == Some(name)
                    && (module.is_empty()
                        || path.strip_prefix(&module).is_some_and(|rest| rest.starts_with("::")))
            };
            let ignored: Vec<bool> =
                list.iter().filter(|(path, _)| matches(path)).map(|(_, ignored)| *ignored).collect();
            found = match (found, ignored.is_empty()) {
                (TestLookup::NotBuilt, true) => TestLookup::Missing,
                (found, true) => found,
                (_, false) if ignored.contains(&false) => TestLookup::Listed,
                (_, false) => TestLookup::Ignored,
            };
            if found == TestLookup::Listed {
                break;
            }
        }
        found
    }

    fn find_python(&mut self, file: &str, name: &str) -> TestLookup {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let collected = self.python.get_or_insert_with(|| collect_python_tests(&root));
        let source = std::fs::read_to_string(root.join(file)).unwrap_or_default();
        match collected {
            None => TestLookup::NotBuilt,
            Some(tests) if !tests.contains(&format!("{file}::{name}")) => TestLookup::Missing,
            Some(_) if may_be_skipped(&source, name) => TestLookup::Ignored,
            Some(_) => TestLookup::Listed,
        }
    }
}

/// The tests that pytest collects, as `FILE::NAME`; none where its virtual environment is not made.
fn collect_python_tests(root: &Path) -> Option<BTreeSet<String>> {
    let python = root.join("target/venv/bin/python");
    if !python.exists() {
        return None;
    }
    let mut command = Command::new(python);
    command.args(["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]);
    let output = command.current_dir(root).output().expect("pytest runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    // A test with parameters is listed once for each of them.
    let without_parameters = |line: &str| line.split('[').next().unwrap_or(line).trim().to_owned();
    Some(text.lines().filter(|line| line.contains(".py::")).map(without_parameters).collect())
}

/// Whether a test in Python may be skipped: by a mark of its own or of its file, or by its own code.
pub fn may_be_skipped(source: &str, name: &str) -> bool {
    if source.lines().any(|line| line.starts_with("pytestmark") && line.contains("skip")) {
        return true;
    }
    let Some(at) = source.find(&format!("\ndef {name}(")) else { return false };
    let before = source[..at].lines().rev().take_while(|line| !line.trim().is_empty());
    let body =
        source[at + 1..].lines().skip(1).take_while(|line| line.is_empty() || line.starts_with([' ', ')']));
    before
        .chain(body)
        .any(|line| ["mark.skip", "mark.xfail", "pytest.skip("].iter().any(|mark| line.contains(mark)))
}

/// The first source file of a program, relative to the workspace.
fn source_root(dependencies: &Path, program: &Path) -> Option<String> {
    let text = std::fs::read_to_string(dependencies).ok()?;
    let name = program.file_name()?.to_str()?;
    let rule = text.lines().find_map(|line| {
        let (target, sources) = line.split_once(": ")?;
        (Path::new(target).file_name()?.to_str()? == name).then_some(sources)
    })?;
    // The linter lists its settings among the sources.
    let first = rule.split_whitespace().find(|source| source.ends_with(".rs"))?;
    let relative = first.find("crates/").map_or(first, |at| &first[at..]);
    Some(relative.to_owned())
}

/// The roots of the programs that may contain the tests of a file, and the path of its module.
fn roots_and_module(file: &str) -> (Vec<String>, String) {
    let module = |path: &str| {
        let path = path.trim_end_matches(".rs").trim_end_matches("/mod");
        if matches!(path, "lib" | "main") { String::new() } else { path.replace('/', "::") }
    };
    if let Some((package, path)) = file.split_once("/tests/it/") {
        return (vec![format!("{package}/tests/it/main.rs")], module(path));
    }
    match file.split_once("/src/") {
        // The root of a program, `src/main.rs`, is also that of the program without its tests.
        Some((package, path)) => (vec![format!("{package}/src/lib.rs")], module(path)),
        None => (vec![file.to_owned()], String::new()),
    }
}

/// The tests of a program, each with whether it is ignored.
fn list_tests(program: &Path) -> BTreeMap<String, bool> {
    let list = |flags: &[&str]| -> Vec<String> {
        let output = Command::new(program).arg("--list").args(flags).output().expect("the test program runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
    };
    let ignored = list(&["--ignored"]);
    list(&[]).into_iter().map(|test| (test.clone(), ignored.contains(&test))).collect()
}
