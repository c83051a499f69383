//! All routes outside of Halo's own API, read from the code that registers them, so that a new route is in the tests of requests and of
//! access from its first day. The routes of Halo's own API are those of its OpenAPI document.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Files that register routes of other APIs, with the prefixes of their paths that begin with `/` and name no API.
const FILES: [(&str, &[&str]); 7] = [
    ("kobold/mod.rs", &["/api/v1", "/api/latest"]),
    ("kobold_info.rs", &["/api/v1", "/api/latest"]),
    ("ollama/mod.rs", &[]),
    ("openai/mod.rs", &[]),
    ("openai/responses/mod.rs", &[]),
    ("llama_server/mod.rs", &[]),
    ("mcp/mod.rs", &[]),
];

/// Files that register the routes of Halo's own API, of the page and of monitoring.
const OTHER_FILES: [&str; 3] = ["page.rs", "monitoring.rs", "halo/"];

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The patterns of all paths: `/v1/models/{model}`.
pub fn route_patterns() -> BTreeSet<String> {
    let mut patterns = BTreeSet::new();
    for (file, prefixes) in FILES {
        let code = std::fs::read_to_string(source().join(file)).expect("the file is read");
        for literal in path_literals(&code) {
            let is_relative = !prefixes.is_empty()
                && !["/api/", "/sdapi/"].iter().any(|prefix| literal.starts_with(prefix));
            match (is_relative, literal.strip_prefix("{version}")) {
                (_, Some(path)) => patterns.extend(prefixes.iter().map(|prefix| format!("{prefix}{path}"))),
                (true, None) => patterns.extend(prefixes.iter().map(|prefix| format!("{prefix}{literal}"))),
                (false, None) if prefixes.contains(&literal.as_str()) => {}
                (false, None) => drop(patterns.insert(literal)),
            }
        }
    }
    patterns
}

/// The texts of the code that are paths.
fn path_literals(code: &str) -> Vec<String> {
    let code = code.split("#[cfg(test)]").next().unwrap_or_default();
    // Characters in single quotes and comments have no double quotes here.
    let literals = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let literals = literals.flat_map(|line| line.split('"').skip(1).step_by(2));
    let is_path =
        |text: &&str| (text.starts_with('/') || text.starts_with("{version}/")) && !text.contains(' ');
    literals.filter(is_path).map(str::to_owned).collect()
}

/// Whether a path, in which `{}` is a parameter, is one of a pattern.
pub fn matches_pattern(path: &str, pattern: &str) -> bool {
    let path = path.split('?').next().unwrap_or_default();
    let (path, pattern): (Vec<&str>, Vec<&str>) = (path.split('/').collect(), pattern.split('/').collect());
    path.len() == pattern.len()
        && path
            .iter()
            .zip(pattern)
            .all(|(step, pattern)| *step == pattern || (pattern.starts_with('{') && *step == "{}"))
}

#[test]
fn all_routes_are_registered_in_known_files() {
    fn visit(folder: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).expect("a folder").filter_map(Result::ok) {
            let path = entry.path();
            if path.is_dir() {
                visit(&path, found);
            } else if std::fs::read_to_string(&path).expect("a file").contains(".route") {
                found.push(path.strip_prefix(source()).expect("a file of the crate").display().to_string());
            }
        }
    }
    let mut found = Vec::new();
    visit(&source(), &mut found);
    let is_known = |file: &String| {
        FILES.iter().any(|(known, _)| file == known)
            || OTHER_FILES.iter().any(|known| file.starts_with(known))
    };
    let unknown: Vec<&String> = found.iter().filter(|file| !is_known(file)).collect();
    // These read the route of a request, and register none.
    assert!(unknown.iter().all(|file| file.as_str() == "request_log.rs"), "{unknown:?}");
    let patterns = route_patterns();
    for known in [
        "/api/latest/generate",
        "/api/v1/config/soft_prompt",
        "/v1/responses/{id}",
        "/mcp",
        "/sdapi/v1/txt2img",
    ] {
        assert!(patterns.contains(known), "{known}: {patterns:?}");
    }
}
