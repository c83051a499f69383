//! The databases that the tests run on.

use halo_store::database::{Database, StoreLocation};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// A separate database for one test.
pub struct TestDatabase {
    pub location: StoreLocation,
    folder: tempfile::TempDir,
}

impl TestDatabase {
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn open(&self) -> Database {
        Database::open(&self.location).expect("the database opens")
    }
}

/// A new SQLite file.
pub fn sqlite() -> TestDatabase {
    let folder = tempfile::tempdir().expect("a temporary folder");
    TestDatabase { location: StoreLocation::Sqlite(folder.path().join("halo.db")), folder }
}

/// A new database on a PostgreSQL server that runs for these tests alone.
pub fn postgres() -> TestDatabase {
    static SERVER: LazyLock<PostgresTestServer> = LazyLock::new(PostgresTestServer::start);
    let url = SERVER.new_database();
    let location = url.parse().expect("a valid address");
    TestDatabase { location, folder: tempfile::tempdir().expect("a temporary folder") }
}

/// A PostgreSQL server in a temporary folder, on a free port, which stops when the tests end.
struct PostgresTestServer {
    url: String,
}

/// Starts the server, and a loop that stops the server when the test process has ended: a static is never dropped.
const START_SCRIPT: &str = r#"
me=$1 folder=$2; shift 2
"$@" >"$folder/log" 2>&1 &
server=$!
(while kill -0 "$me" 2>/dev/null; do sleep 0.2; done; kill -INT $server; wait $server; sleep 1; rm -rf "$folder") >/dev/null 2>&1 &
"#;

impl PostgresTestServer {
    fn start() -> Self {
        if let Ok(url) = std::env::var("HALO_TEST_POSTGRES") {
            return Self { url };
        }
        let bin = find_postgres_programs();
        let folder =
            tempfile::Builder::new().prefix("halo-postgres-").tempdir().expect("a temporary folder").keep();
        let data = folder.join("data");
        // The server refuses to run as root; the user `postgres`, which its package creates, runs it instead.
        let root = Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout.starts_with(b"0\n"));
        if root {
            let chown_status = Command::new("chown").arg("postgres").arg(&folder).status();
            assert!(
                chown_status.expect("chown runs").success(),
                "the folder of the server cannot be given to its user"
            );
        }
        let program = |name: &str| {
            if !root {
                return Command::new(bin.join(name));
            }
            let mut command = Command::new("setpriv");
            command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]).arg(bin.join(name));
            command.current_dir(&folder);
            command
        };
        let initialized = program("initdb")
            .args(["--username=halo", "--auth=trust", "--encoding=UTF8", "--locale=C", "-D"])
            .arg(&data)
            .output()
            .expect("initdb runs");
        assert!(initialized.status.success(), "{}", String::from_utf8_lossy(&initialized.stderr));
        let port = free_port();
        let mut server = program("postgres");
        server.arg("-D").arg(&data).args(["-p", &port.to_string(), "-c", "listen_addresses=127.0.0.1", "-c"]);
        server.arg(format!("unix_socket_directories={}", folder.display()));
        let start_status = Command::new("sh")
            .args(["-c", START_SCRIPT, "sh", &std::process::id().to_string()])
            .arg(&folder)
            .arg(server.get_program())
            .args(server.get_args())
            .stdin(Stdio::null())
            .status();
        assert!(start_status.expect("the shell runs").success());
        let url = format!("postgres://halo@127.0.0.1:{port}/postgres");
        let started_at = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() || !accepts_queries(&url) {
            assert!(started_at.elapsed() < Duration::from_secs(60), "the PostgreSQL server does not answer");
            std::thread::sleep(Duration::from_millis(100));
        }
        Self { url }
    }

    fn new_database(&self) -> String {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static NEXT_DATABASE_NUMBER: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("t{}_{}", std::process::id(), NEXT_DATABASE_NUMBER.fetch_add(1, Ordering::Relaxed));
        execute_sql(&self.url, &format!("CREATE DATABASE {name}")).expect("the server creates a database");
        let (server, _) = self.url.rsplit_once('/').expect("the address ends with a database");
        format!("{server}/{name}")
    }
}

fn accepts_queries(url: &str) -> bool {
    execute_sql(url, "SELECT 1").is_ok()
}

/// Runs a statement on the server without the store.
pub fn execute_sql(url: &str, sql: &str) -> Result<(), tokio_postgres::Error> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("the runtime starts");
    runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
        let connection = tokio::spawn(connection);
        let result = client.batch_execute(sql).await;
        drop(client);
        let _ = connection.await;
        result
    })
}

fn free_port() -> u16 {
    let socket = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    socket.local_addr().expect("the socket has an address").port()
}

/// The folder of the server's programs. Debian installs them by version, in a folder that is not in PATH.
fn find_postgres_programs() -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut bins: Vec<_> =
        versions.map(|v| v.path().join("bin")).filter(|b| b.join("initdb").exists()).collect();
    bins.sort();
    let path = std::env::var_os("PATH").unwrap_or_default();
    bins.extend(std::env::split_paths(&path).filter(|b| b.join("initdb").exists()));
    bins.pop().expect("no PostgreSQL server found: `scripts/setup` installs it, or set HALO_TEST_POSTGRES to a server's address")
}
