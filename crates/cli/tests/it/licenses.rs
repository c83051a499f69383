//! The licences of third-party code, and the software bill of materials.

use crate::common::{run_halo, temp_dir};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn repository_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read_file(name: &str) -> String {
    std::fs::read_to_string(repository_root().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Names, versions and checksums of the packages in Cargo.lock that are not part of the workspace.
fn locked_packages() -> Vec<(String, String, String)> {
    let lock: toml::Table = read_file("Cargo.lock").parse().expect("Cargo.lock is TOML");
    let packages = lock["package"].as_array().expect("packages").iter();
    let text = |package: &toml::Value, key: &str| {
        package.get(key).and_then(toml::Value::as_str).unwrap_or_default().to_owned()
    };
    let foreign = packages.filter(|package| package.get("source").is_some());
    foreign
        .map(|package| (text(package, "name"), text(package, "version"), text(package, "checksum")))
        .collect()
}

#[test]
fn licenses_name_every_package_of_the_lock_file() {
    let text = read_file("THIRD_PARTY_LICENSES.md");
    let (_, table) = text.split_once("\n## Packages\n").expect("the table of packages");
    let (table, _) = table.split_once("\n## ").expect("the end of the table");
    let listed: BTreeSet<(String, String)> = table
        .lines()
        .skip(3)
        .filter_map(|line| {
            let mut cells = line.trim_matches('|').split('|').map(str::trim);
            let (name, version, licence) = (cells.next()?, cells.next()?, cells.next()?);
            assert!(!licence.is_empty(), "{line}");
            Some((name.to_owned(), version.to_owned()))
        })
        .collect();
    let locked: BTreeSet<(String, String)> =
        locked_packages().into_iter().map(|(name, version, _)| (name, version)).collect();
    let missing: Vec<_> = locked.difference(&listed).collect();
    let stale: Vec<_> = listed.difference(&locked).collect();
    assert!(
        missing.is_empty() && stale.is_empty(),
        "THIRD_PARTY_LICENSES.md is stale (scripts/licenses writes it): without {missing:?}, with {stale:?}"
    );
}

#[test]
fn licenses_are_printed_with_their_texts() {
    let run = run_halo(temp_dir().path(), &["licenses"]);
    assert_eq!((run.status, run.err.as_str()), (0, ""));
    assert!(run.out == read_file("THIRD_PARTY_LICENSES.md"), "it prints the file");
    for text in [
        "| llama.cpp |",
        "| ggml |",
        "| SQLite |",
        "Copyright (c) 2023-2026 The ggml authors",
        "Permission is hereby granted, free of charge",
        "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION",
        "Mozilla Public License",
        "Models are not part of the program",
    ] {
        assert!(run.out.contains(text), "{text}");
    }
    assert!(!run.out.contains("GNU GENERAL PUBLIC LICENSE"), "nothing is used under the GPL");
    assert!(run.out.len() < 300_000, "larger than 300 KB, it is to be compressed: {}", run.out.len());
}

#[test]
fn sbom_is_valid_cyclonedx() {
    let make = || {
        let output = Command::new("python3").arg(repository_root().join("scripts/sbom")).output();
        let output = output.expect("python3 runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let text = make();
    assert!(text == make(), "the same sources give the same bytes");
    let bom: Value = serde_json::from_slice(&text).expect("JSON");
    assert_eq!(
        (&bom["bomFormat"], &bom["specVersion"], &bom["version"]),
        (&"CycloneDX".into(), &"1.5".into(), &1.into())
    );
    let serial = bom["serialNumber"].as_str().and_then(|serial| serial.strip_prefix("urn:uuid:"));
    assert_eq!(serial.map(str::len), Some(36), "{}", bom["serialNumber"]);
    let program = &bom["metadata"]["component"];
    assert_eq!((&program["type"], &program["name"]), (&"application".into(), &"halo".into()));
    assert_eq!(program["version"], env!("CARGO_PKG_VERSION"));
    let components = bom["components"].as_array().expect("components");
    let mut references = BTreeSet::from([program["bom-ref"].as_str().expect("a reference")]);
    let libraries: Vec<Value> = serde_json::from_str(&read_file("web/vendor/vendor.json")).expect("JSON");
    let page: BTreeSet<(String, String, String)> = libraries
        .iter()
        .map(|library| ["name", "version", "sha256"].map(|key| library[key].as_str().expect(key).to_owned()))
        .map(|[name, version, checksum]| (name, version, checksum))
        .collect();
    let mut checksums: BTreeSet<(String, String, String)> = locked_packages().into_iter().collect();
    checksums.extend(page.iter().cloned());
    let mut described = BTreeSet::new();
    for component in components {
        let field = |name: &str| component[name].as_str().unwrap_or_else(|| panic!("no {name}: {component}"));
        assert_eq!(field("type"), "library");
        assert!(references.insert(field("bom-ref")), "a reference is unique: {component}");
        let (name, version) = (field("name"), field("version"));
        assert!(
            field("purl").starts_with("pkg:")
                && field("purl").replace("%2B", "+").ends_with(&format!("@{version}")),
            "{component}"
        );
        let licence = &component["licenses"][0];
        let licence = licence["expression"].as_str().or(licence["license"]["id"].as_str());
        assert!(licence.is_some_and(|licence| !licence.is_empty()), "{component}");
        if let Some(hash) = component["hashes"][0]["content"].as_str() {
            assert_eq!(component["hashes"][0]["alg"], "SHA-256");
            let key = (name.to_owned(), version.to_owned(), hash.to_owned());
            assert!(checksums.contains(&key), "{component}");
            described.insert(key);
        } else {
            assert!(
                name.starts_with("halo") || ["llama.cpp", "ggml", "SQLite"].contains(&name),
                "{component}"
            );
        }
    }
    assert!(page.len() >= 4 && page.is_subset(&described), "the libraries of the page: {page:?}");
    for name in ["llama.cpp", "ggml", "SQLite", "llama-cpp-sys-2", "libsqlite3-sys", "axum", "halo-server"] {
        assert!(components.iter().any(|component| component["name"] == name), "{name}");
    }
    assert!(!components.iter().any(|component| component["name"] == "halo-bench"), "it is another program");
    let nodes = bom["dependencies"].as_array().expect("dependencies");
    assert_eq!(nodes.len(), references.len());
    for node in nodes {
        let targets = node["dependsOn"].as_array().expect("a list").iter().chain([&node["ref"]]);
        for target in targets {
            assert!(target.as_str().is_some_and(|target| references.contains(target)), "{target}");
        }
    }
}

/// `scripts/deny` allows what is there, and refuses each thing that deny.toml does not allow.
#[test]
fn deny_refuses_licences_crates_and_settings() {
    let folder = temp_dir();
    let allowed = read_file("deny.toml");
    let check = |text: &str| {
        let file = folder.path().join("deny.toml");
        std::fs::write(&file, text).expect("the file is written");
        let output = Command::new("python3")
            .arg(repository_root().join("scripts/deny"))
            .arg("--deny")
            .arg(file)
            .env("CARGO_NET_OFFLINE", "true")
            .output()
            .expect("python3 runs");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    // One target is enough here.
    let (before, rest) = allowed.split_once("targets = [").expect("the targets");
    let (_, rest) = rest.split_once(']').expect("their end");
    let one = format!("{before}targets = [\"x86_64-unknown-linux-gnu\"]{rest}");
    assert_eq!(check(&one), (true, String::new()));
    for (from, to, expected) in [
        ("    \"BSL-1.0\",\n", "", "has the licence"),
        ("openssl-sys", "serde_json", "is banned: TLS is rustls"),
        ("unknown-git = \"deny\"", "unknown-git = \"deny\"\nrequired-git-spec = \"rev\"", "does not know"),
    ] {
        assert!(one.contains(from), "{from}");
        let (passed, said) = check(&one.replacen(from, to, 1));
        assert!(!passed && said.contains(expected), "{from}: {said}");
    }
}

/// The files in web/vendor are those that were published, and every one of them is listed with its licence.
#[test]
fn page_libraries_match_their_checksums() {
    let libraries: Vec<Value> = serde_json::from_str(&read_file("web/vendor/vendor.json")).expect("JSON");
    let licences = read_file("THIRD_PARTY_LICENSES.md");
    let text = |library: &Value, key: &str| library[key].as_str().expect(key).to_owned();
    let mut listed = BTreeSet::new();
    for library in &libraries {
        let (name, file) = (text(library, "name"), text(library, "file"));
        let content = read_file(&format!("web/vendor/{file}"));
        let checksum: String =
            Sha256::digest(content.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(checksum, text(library, "sha256"), "{file}");
        let row = format!("| {name} | {} | web/vendor/{file} |", text(library, "version"));
        assert!(licences.contains(&row), "{row}");
        assert!(read_file(&format!("web/vendor/{}", text(library, "license_text"))).len() > 500, "{name}");
        listed.insert(file);
    }
    let folder = std::fs::read_dir(repository_root().join("web/vendor")).expect("web/vendor");
    let names = folder.filter_map(Result::ok).map(|entry| entry.file_name().to_string_lossy().into_owned());
    let scripts: BTreeSet<String> = names.filter(|name| name.ends_with(".js")).collect();
    assert_eq!(scripts, listed);
}
