//! Downloads: whole or not at all, and never twice what has come once.

mod stub;

use halo_remote::{Fetched, fetch};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use stub::{Asked, Reply, Stub};

fn content() -> Vec<u8> {
    (0..300_000u32).flat_map(|i| (i.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()).collect()
}

fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn part(to: &Path) -> PathBuf {
    to.with_extension("gguf.part")
}

/// Where a request wants to begin, if it is of that version.
fn wanted(asked: &Asked, version: &str) -> usize {
    let range = asked.header("range").strip_prefix("bytes=").and_then(|r| r.strip_suffix('-'));
    range.filter(|_| asked.header("if-range") == version).map_or(0, |from| from.parse().unwrap())
}

/// Sends a file from where it is wanted, but only so much of it.
fn send(reply: &mut Reply, from: usize, version: &str, most: usize) {
    let content = content();
    let (length, rest) = (content.len(), &content[from..]);
    let status = if from > 0 { "206 Partial Content" } else { "200 OK" };
    let range = format!("content-range: bytes {from}-{}/{length}\r\n", length - 1);
    let range = if from > 0 { range.as_str() } else { "" };
    let rest_length = rest.len();
    reply
        .raw(format!("HTTP/1.1 {status}\r\ncontent-length: {rest_length}\r\netag: {version}\r\n{range}\r\n"));
    reply.raw(&rest[..rest.len().min(most)]);
}

/// A server that breaks the first so many downloads after 100 000 bytes.
fn breaking(times: usize, version: &'static str, ranges: bool) -> Stub {
    let count = AtomicUsize::new(0);
    Stub::new(move |asked, reply| {
        let most = if count.fetch_add(1, Ordering::SeqCst) < times { 100_000 } else { usize::MAX };
        let from = if ranges { wanted(asked, version) } else { 0 };
        send(reply, from, version, most);
    })
}

fn get(stub: &Stub, to: &Path, expect: Option<&str>) -> Result<Fetched, String> {
    let url = format!("http://127.0.0.1:{}/models/m.gguf?token=secret", stub.port);
    let mut last = (0, None);
    let fetched = fetch(&url, to, expect, &mut |done, total| {
        assert!(done >= last.0 && total.is_none_or(|total| done <= total));
        last = (done, total);
    });
    if let Ok(fetched) = &fetched {
        assert_eq!(last, (fetched.bytes, Some(fetched.bytes)), "progress ends at the end");
    }
    fetched.map_err(|e| e.to_string())
}

#[test]
fn a_file_comes() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    let stub = breaking(0, "\"1\"", true);
    let expected = sum(&content());
    let fetched = get(&stub, &to, Some(&format!("sha256:{}", expected.to_uppercase()))).unwrap();
    assert_eq!(fetched, Fetched { bytes: 1_200_000, resumed: 0, sha256: expected });
    assert!(fs::read(&to).unwrap() == content());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
}

#[test]
fn what_has_come_is_not_fetched_again() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    fs::write(&to, "what was there before").unwrap();
    let stub = breaking(2, "\"1\"", true);
    for had in [100_000, 200_000] {
        let error = get(&stub, &to, None).unwrap_err();
        assert!(error.contains(&format!("{had} bytes have come and are kept")), "{error}");
        assert!(!error.contains("secret"), "{error}");
        assert_eq!(fs::metadata(part(&to)).unwrap().len(), had);
        assert_eq!(fs::read(&to).unwrap(), b"what was there before");
    }
    let fetched = get(&stub, &to, Some(&sum(&content()))).unwrap();
    assert_eq!(fetched.resumed, 200_000);
    assert!(fs::read(&to).unwrap() == content() && !part(&to).exists());
    let asked = stub.asked("/models/m.gguf?token=secret");
    assert_eq!((asked[1].header("range"), asked[1].header("if-range")), ("bytes=100000-", "\"1\""));
}

#[test]
fn a_server_without_ranges_begins_anew() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    let stub = breaking(1, "\"1\"", false);
    get(&stub, &to, None).unwrap_err();
    // Nothing may be left of a part that was longer.
    fs::write(part(&to), vec![7; 2_000_000]).unwrap();
    let fetched = get(&stub, &to, Some(&sum(&content()))).unwrap();
    assert_eq!((fetched.resumed, fetched.bytes), (0, 1_200_000));
    assert!(fs::read(&to).unwrap() == content());
}

#[test]
fn a_part_of_another_version_is_not_gone_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    // The part is of version 1; the file has become version 2, or has no version that can be relied on.
    let count = AtomicUsize::new(0);
    let stub = Stub::new(move |asked, reply| {
        let broken = count.fetch_add(1, Ordering::SeqCst) == 0;
        let version = if broken { "\"1\"" } else { "\"2\"" };
        send(reply, wanted(asked, version), version, if broken { 100_000 } else { usize::MAX });
    });
    get(&stub, &to, None).unwrap_err();
    assert_eq!(get(&stub, &to, Some(&sum(&content()))).unwrap().resumed, 0);
    let stub = breaking(1, "W/\"weak\"", true);
    get(&stub, &to, None).unwrap_err();
    assert_eq!(get(&stub, &to, None).unwrap().resumed, 0);
    assert_eq!(stub.asked("/models/m.gguf?token=secret")[1].header("range"), "");
}

#[test]
fn a_part_that_is_whole_is_enough() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    let stub = Stub::new(|_, reply| {
        reply.answer("416 Range Not Satisfiable", "content-range: bytes */1200000\r\n", "");
    });
    fs::write(part(&to), content()).unwrap();
    let url = format!("http://127.0.0.1:{}/models/m.gguf?token=secret", stub.port);
    fs::write(
        to.with_extension("gguf.part.json"),
        format!("{{\"url\": \"{url}\", \"version\": \"\\\"1\\\"\"}}"),
    )
    .unwrap();
    let fetched = get(&stub, &to, Some(&sum(&content()))).unwrap();
    assert_eq!((fetched.resumed, fetched.bytes), (1_200_000, 1_200_000));
}

#[test]
fn a_wrong_checksum_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    fs::write(&to, "what was there before").unwrap();
    let stub = breaking(0, "\"1\"", true);
    let error = get(&stub, &to, Some(&"0".repeat(64))).unwrap_err();
    assert!(error.contains(&sum(&content())) && error.contains("thrown away"), "{error}");
    assert_eq!(fs::read(&to).unwrap(), b"what was there before");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    let error = get(&stub, &to, Some("123")).unwrap_err();
    assert!(error.contains("64 hexadecimal digits"), "{error}");
}

#[test]
fn redirections_are_followed_but_not_for_ever() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    let stub = Stub::new(|asked, reply| match asked.path.as_str() {
        "/models/m.gguf?token=secret" => reply.answer("302 Found", "location: ../cdn/x\r\n", ""),
        "/models/../cdn/x" => reply.answer("307 Temporary Redirect", "location: /file\r\n", ""),
        "/file" => send(reply, wanted(asked, "\"1\""), "\"1\"", usize::MAX),
        _ => reply.not_found(),
    });
    assert_eq!(get(&stub, &to, None).unwrap().bytes, 1_200_000);
    let stub = Stub::new(|_, reply| reply.answer("302 Found", "location: /again\r\n", ""));
    let error = get(&stub, &to, None).unwrap_err();
    assert!(error.contains("more than 5 times"), "{error}");
    assert_eq!(stub.asked("/again").len(), 5);
    let stub = Stub::new(|_, reply| reply.answer("302 Found", "location: file:///etc/passwd\r\n", ""));
    assert!(get(&stub, &to, None).unwrap_err().contains("cannot be read"));
}

#[test]
fn what_cannot_be_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    let stub = Stub::new(|_, reply| reply.answer("404 Not Found", "", "no such file"));
    let error = get(&stub, &to, None).unwrap_err();
    assert!(error.contains("404: no such file") && !to.exists(), "{error}");
    let error = get(&stub, &folder.path().join("no/such/folder.gguf"), None).unwrap_err();
    assert!(error.contains("check the folder"), "{error}");
    for url in ["file:///etc/passwd", "ftp://h/x", "nothing", "http://u:hunter2@h/x"] {
        let error = fetch(url, &to, None, &mut |_, _| {}).unwrap_err().to_string();
        assert!(error.starts_with("downloading ") && !error.contains("hunter2"), "{error}");
    }
    // Two at once would spoil each other's part.
    let held = fs::File::create(part(&to)).unwrap();
    held.lock().unwrap();
    let error = get(&breaking(0, "\"1\"", true), &to, None).unwrap_err();
    assert!(error.contains("somebody else"), "{error}");
}

/// A device that is always full stands in for a disk that has become so.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_said_and_the_part_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    std::os::unix::fs::symlink("/dev/full", part(&to)).unwrap();
    let error = get(&breaking(0, "\"1\"", true), &to, None).unwrap_err();
    assert!(error.contains("the disk is full; make room, and the same again goes on"), "{error}");
    assert!(!to.exists() && part(&to).is_symlink());
}
