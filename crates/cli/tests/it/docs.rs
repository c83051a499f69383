//! Documents that must name what the code has, or what the founding documents ask for.

use std::path::Path;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The text of a section, up to the next heading.
fn section<'a>(document: &'a str, heading: &str) -> &'a str {
    let start = document.find(&format!("## {heading}\n")).unwrap_or_else(|| panic!("no section {heading}"));
    let rest = &document[start + 3..];
    rest.find("\n## ").map_or(rest, |end| &rest[..end])
}

fn numbered_items(section: &str) -> usize {
    (1..).take_while(|n| section.contains(&format!("\n{n}. "))).count()
}

/// The founding document has 13 changes that need approval, 14 questions, five rules for a new feature, and kinds of
/// changes that are always safe. Each has its subject in CONTRIBUTING.md.
#[test]
fn contributing_has_the_approvals_and_questions() {
    let contributing = read("CONTRIBUTING.md");
    let approvals = section(&contributing, "Ask first");
    assert_eq!(numbered_items(approvals), 13);
    for subject in [
        "token",
        "brightness",
        "decay",
        "model server",
        "setting",
        "index entry",
        "export",
        "schema",
        "migration",
        "live context",
        "embedded",
        "anchors",
        "store comes first",
        "pinned",
    ] {
        assert!(approvals.contains(subject), "{subject} needs approval");
    }
    let questions = section(&contributing, "Questions for a review");
    assert_eq!(numbered_items(questions), 14);
    for subject in [
        "position",
        "deleted",
        "gaps",
        "malformed",
        "one model",
        "dependency",
        "setting",
        "exported",
        "migration",
        "context window",
        "embedding",
        "anchors",
        "stored",
        "pinned",
    ] {
        assert!(questions.contains(subject), "a question asks about {subject}");
    }
    assert_eq!(numbered_items(section(&contributing, "A new feature")), 5);
    let safe = section(&contributing, "Always safe");
    for subject in ["calculation", "error handling", "missing", "style sheets", "documentation"] {
        assert!(safe.contains(subject), "{subject} is always safe");
    }
}

/// docs/api/koboldcpp.md names every route of the KoboldCPP API, and every strategy and ranking of chunks.
#[test]
fn kobold_page_names_every_route_and_strategy() {
    let page = read("docs/api/koboldcpp.md");
    let source = read("crates/server/src/kobold/mod.rs");
    let routes: Vec<&str> =
        source.split(".route(\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert!(routes.len() >= 16, "{routes:?}");
    for route in routes {
        let path = if route.starts_with("/api/") { route.to_owned() } else { format!("/api/v1{route}") };
        assert!(page.contains(&path), "docs/api/koboldcpp.md does not name {path}");
    }
    for word in ["`magnitude`", "`ttl`", "`share`", "`peak`", "`top4`", "`mean`", "`votes`", "`sum`"] {
        assert!(page.contains(word), "docs/api/koboldcpp.md does not explain {word}");
    }
}

/// docs/troubleshooting.md has what the founding document lists.
#[test]
fn troubleshooting_covers_the_founding_list() {
    let page = read("docs/troubleshooting.md");
    for heading in [
        "No attention: nothing gets brighter or dimmer",
        "Tokens do not get dimmer",
        "The page differs from what is stored",
        "A conversation is not there after a restart",
        "Slow with a million tokens",
    ] {
        assert!(section(&page, heading).lines().count() > 3, "{heading}");
    }
}
