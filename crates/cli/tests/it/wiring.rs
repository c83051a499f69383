//! What only the whole program connects: the KV archive to a full disk of the store, a server to the lock of its store.

use crate::common::{halo_command, run_halo, temp_dir};
use halo_store::database::{Database, StoreLocation};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// On a disk of 16 MiB, fills what is left with a file but for 400 kB, and creates a world of more than that.
const FILL_DISK: &str = r#"
set -eu
halo=$1 data=$2 world=$3 filler=$4
mount -t tmpfs -o size=16m none "$data"
"$halo" --data "$data" rooms new small >/dev/null
mkdir -p "$(dirname "$data/$filler")"
head -c 400000 /dev/zero >"$data/spacer"
cat /dev/zero >"$data/$filler" 2>/dev/null || true
rm "$data/spacer"
status=0
"$halo" --data "$data" rooms new large --file "$world" || status=$?
[ -e "$data/$filler" ] && echo "the filler is there" || echo "the filler is gone"
"$halo" --data "$data" rooms list --json
exit $status
"#;

fn create_world_on_full_disk(filler: &str) -> (bool, String) {
    let (data, other) = (temp_dir(), temp_dir());
    let world = other.path().join("world.toml");
    let mut text =
        "[[agents]]\nname = \"Mara\"\nseed = \"You keep the harbour.\"\n\n[[rooms]]\nowner = \"Mara\"\n"
            .to_owned();
    for n in 0..800 {
        let content = format!("{n} {}", "the lamp is lit and the boats are in ".repeat(30));
        text += &format!("\n[[rooms.messages]]\nsender = \"Mara\"\ncontent = \"{content}\"\n");
    }
    std::fs::write(&world, text).expect("the file is written");
    let namespace: &[&str] =
        match Command::new("id").arg("-u").output().expect("id runs").stdout.starts_with(b"0\n") {
            true => &["--mount"],
            false => &["--user", "--map-root-user", "--mount"],
        };
    let output = Command::new("unshare")
        .args(namespace)
        .args(["sh", "-c", FILL_DISK, "sh", env!("CARGO_BIN_EXE_halo")])
        .args([data.path(), &world, Path::new(filler)])
        .env("XDG_DATA_HOME", other.path())
        .output()
        .expect("unshare runs");
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

/// The program's own stores delete saved KV cells for the words that are to be stored, and nothing else.
#[cfg(target_os = "linux")]
#[test]
fn full_disk_deletes_saved_kv_cells_of_the_program() {
    let entry = format!("kv/{}/{}/0000000000000000.0-1.kv", "0".repeat(32), "1".repeat(32));
    let (succeeded, said) = create_world_on_full_disk(&entry);
    assert!(succeeded && said.contains("the filler is gone") && said.contains("\"large\""), "{said}");
    let (succeeded, said) = create_world_on_full_disk("ballast");
    assert!(!succeeded && said.contains("full") && said.contains("the filler is there"), "{said}");
    assert!(!said.contains("\"large\"") && said.contains("\"small\""), "{said}");
}

struct ServerWithStore(Child);

impl Drop for ServerWithStore {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server with nothing open holds its store, so that a repair does not replace the file under it.
#[test]
fn serve_keeps_repairs_away_from_its_store() {
    let home = temp_dir();
    let data = home.path();
    let script = data.join("answers.txt");
    std::fs::write(&script, "The lamp burns.").expect("the file is written");
    let model = format!("scripted:{}", script.display());
    let asked = run_halo(data, &["ask", "--model", &model, "Does it burn?"]);
    assert_eq!(asked.status, 0, "{}", asked.err);
    let mut child = halo_command(data, &["serve", "--listen", "127.0.0.1:0", "--model", &model])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("halo starts");
    let mut lines = BufReader::new(child.stderr.take().expect("stderr is piped")).lines();
    let server = ServerWithStore(child);
    assert!(lines.by_ref().map_while(Result::ok).any(|line| line.contains("http://")), "it listens");
    std::thread::spawn(move || lines.for_each(drop));
    let path = data.join("halo.db");
    let mut damaged = std::fs::read(&path).expect("the file is read");
    damaged[..16].fill(b'x');
    std::fs::write(&path, &damaged).expect("the file is written");
    let refused = run_halo(data, &["doctor", "--fix"]);
    assert!(
        refused.status != 0 && refused.err.contains("another Halo is using the store"),
        "{}",
        refused.err
    );
    assert!(std::fs::read(&path).is_ok_and(|bytes| bytes == damaged), "the file is as it was");
    drop(server);
    let started = Instant::now();
    let repaired = run_halo(data, &["doctor", "--fix"]);
    assert_eq!(repaired.status, 0, "{}{}", repaired.out, repaired.err);
    assert!(started.elapsed() < Duration::from_secs(60));
    assert!(Database::open(&StoreLocation::Sqlite(path)).is_ok(), "it can be opened again");
}
