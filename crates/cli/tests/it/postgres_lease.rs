//! The real program on PostgreSQL, paused: it loses its conversation to another process, and does not write over it.

use crate::common::{halo_command, run_halo, temp_dir};
use crate::postgres_server::PostgresTestServer;
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Seconds after which a paused process loses its locks.
const LEASE: u64 = 4;

fn signal(process: &Child, name: &str) {
    let sent = Command::new("kill").arg(format!("-{name}")).arg(process.id().to_string()).status();
    assert!(sent.expect("kill runs").success());
}

/// The text of the conversation, pruned text too.
fn stored_text(data: &Path, store: &str) -> String {
    let run = run_halo(data, &["show", "-c", "main", "--all", "--json", "--store", store]);
    if run.status != 0 {
        return String::new();
    }
    let chunks: Value = serde_json::from_str(&run.out).expect("JSON");
    chunks.as_array().expect("chunks").iter().filter_map(|chunk| chunk["text"].as_str()).collect()
}

#[test]
fn paused_process_loses_its_lease_on_postgres() {
    let (server, home) = (PostgresTestServer::start(&[]), temp_dir());
    let data = home.path();
    let store = format!("{}?lease_timeout={LEASE}", server.new_database());
    let script = data.join("answers.txt");
    std::fs::write(&script, "The lamp burns.\n---\nThe sea is calm.").expect("the file is written");
    let model = format!("scripted:{}", script.display());
    let flags = ["-c", "main", "--store", &store, "--model", &model];
    let mut paused = halo_command(data, &[&["chat"], &flags[..]].concat())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("halo starts");
    let mut typed = paused.stdin.take().expect("stdin is piped");
    typed.write_all(b"First of all.\n").expect("it is typed");
    let wait_until = |done: &dyn Fn() -> bool, what: &str| {
        let started = Instant::now();
        while !done() {
            assert!(started.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(100));
        }
        started.elapsed()
    };
    wait_until(&|| stored_text(data, &store).contains("The lamp burns."), "the first message is answered");
    let ask = || run_halo(data, &[&["ask"], &flags[..], &["From elsewhere."]].concat());
    // A process that runs keeps its lease, although it does nothing for longer than that.
    std::thread::sleep(Duration::from_secs(LEASE + 2));
    let refused = ask();
    assert!(refused.status != 0 && refused.err.contains("another Halo is using it"), "{}", refused.err);

    signal(&paused, "STOP");
    let taken = wait_until(&|| ask().status == 0, "the lease of a paused process ends");
    assert!(taken < Duration::from_secs(3 * LEASE + 5), "{taken:?}");
    signal(&paused, "CONT");
    typed.write_all(b"After the pause.\n").expect("it is typed");
    drop(typed);
    let ended = paused.wait_with_output().expect("halo ends");
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    let text = stored_text(data, &store);
    let count = |part: &str| text.matches(part).count();
    assert_eq!((count("First of all."), count("From elsewhere.")), (1, 1), "{text}");
    // It is refused, or goes on behind what it has missed.
    assert!(count("After the pause.") <= 1, "{text}");
    match text.find("After the pause.") {
        None => assert!(!ended.status.success() || !said.is_empty(), "a refused message is told: {said}"),
        Some(at) => assert!(text.find("From elsewhere.").is_some_and(|before| before < at), "{text}"),
    }
    let doctor = run_halo(data, &["doctor", "--store", &store]);
    assert_eq!(doctor.status, 0, "{}{}", doctor.out, doctor.err);
}
