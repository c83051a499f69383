//! Downloads: complete or absent, and resumed after an interruption.

use crate::stub::{StubReply, StubRequest, StubServer};
use halo_core::{Error, ErrorKind};
use halo_remote::{DownloadedFile, download_file};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

fn file_content() -> Vec<u8> {
    (0..300_000u32).flat_map(|i| (i.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()).collect()
}

fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn part_path(to: &Path) -> PathBuf {
    to.with_extension("gguf.part")
}

/// The offset that a request asks for, if it asks for this version of the file.
fn requested_offset(request: &StubRequest, version: &str) -> usize {
    let range = request.header("range").strip_prefix("bytes=").and_then(|r| r.strip_suffix('-'));
    range.filter(|_| request.header("if-range") == version).map_or(0, |from| from.parse().unwrap())
}

/// Sends the file from an offset, but at most `max_bytes` of it.
fn send_range(reply: &mut StubReply, from: usize, version: &str, max_bytes: usize) {
    let content = file_content();
    let (length, rest) = (content.len(), &content[from..]);
    let status = if from > 0 { "206 Partial Content" } else { "200 OK" };
    let range = format!("content-range: bytes {from}-{}/{length}\r\n", length - 1);
    let range = if from > 0 { range.as_str() } else { "" };
    let rest_length = rest.len();
    reply.write_raw(format!(
        "HTTP/1.1 {status}\r\ncontent-length: {rest_length}\r\netag: {version}\r\n{range}\r\n"
    ));
    reply.write_raw(&rest[..rest.len().min(max_bytes)]);
}

/// A server that breaks the first `times` downloads after 100,000 bytes.
fn breaking_server(times: usize, version: &'static str, ranges: bool) -> StubServer {
    let count = AtomicUsize::new(0);
    StubServer::new(move |request, reply| {
        let max_bytes = if count.fetch_add(1, Ordering::SeqCst) < times { 100_000 } else { usize::MAX };
        let from = if ranges { requested_offset(request, version) } else { 0 };
        send_range(reply, from, version, max_bytes);
    })
}

fn download(stub: &StubServer, to: &Path, expect: Option<&str>) -> Result<DownloadedFile, Error> {
    let url = format!("http://127.0.0.1:{}/models/m.gguf?token=secret", stub.port);
    let mut last = (0, None);
    let file = download_file(&url, to, expect, &mut |done, total| {
        assert!(done >= last.0 && total.is_none_or(|total| done <= total));
        last = (done, total);
    });
    if let Ok(file) = &file {
        assert_eq!(last, (file.bytes, Some(file.bytes)), "progress ends at the end");
    }
    file
}

#[test]
fn download_writes_the_whole_file() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    let stub = breaking_server(0, "\"1\"", true);
    let expected = sha256_hex(&file_content());
    let file = download(&stub, &to, Some(&format!("sha256:{}", expected.to_uppercase()))).unwrap();
    assert_eq!(file, DownloadedFile { bytes: 1_200_000, resumed: 0, sha256: expected });
    assert!(fs::read(&to).unwrap() == file_content());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no other file remains");
}

#[test]
fn download_resumes_from_part_file() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    fs::write(&to, "what was there before").unwrap();
    let stub = breaking_server(2, "\"1\"", true);
    for saved in [100_000, 200_000] {
        let error = download(&stub, &to, None).unwrap_err().to_string();
        assert!(error.contains(&format!("{saved} bytes are saved")), "{error}");
        assert!(!error.contains("secret"), "{error}");
        assert_eq!(fs::metadata(part_path(&to)).unwrap().len(), saved);
        assert_eq!(fs::read(&to).unwrap(), b"what was there before");
    }
    let file = download(&stub, &to, Some(&sha256_hex(&file_content()))).unwrap();
    assert_eq!(file.resumed, 200_000);
    assert!(fs::read(&to).unwrap() == file_content() && !part_path(&to).exists());
    let requests = stub.requests("/models/m.gguf?token=secret");
    assert_eq!((requests[1].header("range"), requests[1].header("if-range")), ("bytes=100000-", "\"1\""));
}

#[test]
fn download_restarts_without_range_support() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    let stub = breaking_server(1, "\"1\"", false);
    download(&stub, &to, None).unwrap_err();
    // Nothing of a longer part file may remain.
    fs::write(part_path(&to), vec![7; 2_000_000]).unwrap();
    let file = download(&stub, &to, Some(&sha256_hex(&file_content()))).unwrap();
    assert_eq!((file.resumed, file.bytes), (0, 1_200_000));
    assert!(fs::read(&to).unwrap() == file_content());
}

#[test]
fn download_restarts_when_file_version_changed() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    // The part file is of version 1; the server has version 2, or only a weak ETag.
    let count = AtomicUsize::new(0);
    let stub = StubServer::new(move |request, reply| {
        let broken = count.fetch_add(1, Ordering::SeqCst) == 0;
        let version = if broken { "\"1\"" } else { "\"2\"" };
        send_range(
            reply,
            requested_offset(request, version),
            version,
            if broken { 100_000 } else { usize::MAX },
        );
    });
    download(&stub, &to, None).unwrap_err();
    assert_eq!(download(&stub, &to, Some(&sha256_hex(&file_content()))).unwrap().resumed, 0);
    let stub = breaking_server(1, "W/\"weak\"", true);
    download(&stub, &to, None).unwrap_err();
    assert_eq!(download(&stub, &to, None).unwrap().resumed, 0);
    assert_eq!(stub.requests("/models/m.gguf?token=secret")[1].header("range"), "");
}

#[test]
fn download_accepts_complete_part_file() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    let stub = StubServer::new(|_, reply| {
        reply.respond("416 Range Not Satisfiable", "content-range: bytes */1200000\r\n", "");
    });
    fs::write(part_path(&to), file_content()).unwrap();
    let url = format!("http://127.0.0.1:{}/models/m.gguf?token=secret", stub.port);
    fs::write(
        to.with_extension("gguf.part.json"),
        format!("{{\"url\": \"{url}\", \"version\": \"\\\"1\\\"\"}}"),
    )
    .unwrap();
    let file = download(&stub, &to, Some(&sha256_hex(&file_content()))).unwrap();
    assert_eq!((file.resumed, file.bytes), (1_200_000, 1_200_000));
}

#[test]
fn download_with_wrong_checksum_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    fs::write(&to, "what was there before").unwrap();
    let stub = breaking_server(0, "\"1\"", true);
    let error = download(&stub, &to, Some(&"0".repeat(64))).unwrap_err().to_string();
    assert!(error.contains(&sha256_hex(&file_content())) && error.contains("deleted"), "{error}");
    assert_eq!(fs::read(&to).unwrap(), b"what was there before");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    let error = download(&stub, &to, Some("123")).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidInput);
    assert!(error.message.contains("64 hexadecimal digits"), "{error}");
}

#[test]
fn download_follows_redirects_up_to_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    let stub = StubServer::new(|request, reply| match request.path.as_str() {
        "/models/m.gguf?token=secret" => reply.respond("302 Found", "location: ../cdn/x\r\n", ""),
        "/cdn/x" => reply.respond("307 Temporary Redirect", "location: /file\r\n", ""),
        "/file" => send_range(reply, requested_offset(request, "\"1\""), "\"1\"", usize::MAX),
        _ => reply.not_found(),
    });
    assert_eq!(download(&stub, &to, None).unwrap().bytes, 1_200_000);
    let stub = StubServer::new(|_, reply| reply.respond("302 Found", "location: /again\r\n", ""));
    let error = download(&stub, &to, None).unwrap_err().to_string();
    assert!(error.contains("more than 5 times"), "{error}");
    assert_eq!(stub.requests("/again").len(), 5);
    for location in ["file:///etc/passwd", "http://u:hunter2@127.0.0.1/"] {
        let stub = StubServer::new(move |_, reply| {
            reply.respond("302 Found", &format!("location: {location}\r\n"), "");
        });
        let error = download(&stub, &to, None).unwrap_err().to_string();
        assert!(error.contains("cannot be used") && !error.contains("hunter2"), "{error}");
    }
}

#[test]
fn download_reports_errors_without_secrets() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    let stub = StubServer::new(|_, reply| reply.respond("404 Not Found", "", "no such file"));
    let error = download(&stub, &to, None).unwrap_err().to_string();
    assert!(error.contains("404: no such file") && !to.exists(), "{error}");
    let error = download(&stub, &folder.path().join("no/such/folder.gguf"), None).unwrap_err().to_string();
    assert!(error.contains("check the directory"), "{error}");
    for url in ["file:///etc/passwd", "ftp://h/x", "nothing", "http://u:hunter2@h/x"] {
        let error = download_file(url, &to, None, &mut |_, _| {}).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidInput);
        let error = error.to_string();
        assert!(error.starts_with("downloading ") && !error.contains("hunter2"), "{error}");
    }
    // Two downloads would overwrite each other's part file.
    let locked = fs::File::create(part_path(&to)).unwrap();
    locked.lock().unwrap();
    let error = download(&breaking_server(0, "\"1\"", true), &to, None).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Busy);
    assert!(error.message.contains("another process"), "{error}");
}

/// `/dev/full` stands in for a full disk.
#[cfg(target_os = "linux")]
#[test]
fn download_on_full_disk_keeps_part_file() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("m.gguf");
    std::os::unix::fs::symlink("/dev/full", part_path(&to)).unwrap();
    let error = download(&breaking_server(0, "\"1\"", true), &to, None).unwrap_err().to_string();
    assert!(error.contains("the disk is full; free some space and try again to resume"), "{error}");
    assert!(!to.exists() && part_path(&to).is_symlink());
}
