//! PostgreSQL servers that run for a test and can be crashed and frozen.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A PostgreSQL server in a temporary folder, on a free port, which stops when the tests end.
pub struct PostgresTestServer {
    url: String,
    /// The folder of a server that the test started; none for one that was running before.
    folder: Option<PathBuf>,
    port: u16,
    settings: Vec<String>,
}

/// Starts the server, and a loop that stops the server when the test process has ended: a static is never dropped.
const START_SCRIPT: &str = r#"
me=$1 folder=$2; shift 2
"$@" >>"$folder/log" 2>&1 &
server=$!
(while kill -0 "$me" 2>/dev/null && kill -0 $server 2>/dev/null; do sleep 0.2; done
kill -0 "$me" 2>/dev/null || { kill -CONT $server; kill -INT $server; wait $server; sleep 1; rm -rf "$folder"; }) >/dev/null 2>&1 &
"#;

impl PostgresTestServer {
    /// Starts a server with settings such as `max_connections=40`.
    pub fn start(settings: &[&str]) -> Self {
        if let Ok(url) = std::env::var("HALO_TEST_POSTGRES")
            && settings.is_empty()
        {
            return Self { url, folder: None, port: 0, settings: Vec::new() };
        }
        let folder =
            tempfile::Builder::new().prefix("halo-postgres-").tempdir().expect("a temporary folder").keep();
        give_to_server_user(&folder);
        let port = free_port();
        let server = Self {
            url: format!("postgres://halo@127.0.0.1:{port}/postgres"),
            folder: Some(folder.clone()),
            port,
            settings: settings.iter().map(|setting| (*setting).to_owned()).collect(),
        };
        let initialized = server
            .program("initdb")
            .args(["--username=halo", "--auth=trust", "--encoding=UTF8", "--locale=C", "-D"])
            .arg(folder.join("data"))
            .output()
            .expect("initdb runs");
        assert!(initialized.status.success(), "{}", String::from_utf8_lossy(&initialized.stderr));
        server.launch();
        server
    }

    fn folder(&self) -> &PathBuf {
        self.folder.as_ref().expect("the test started this server")
    }

    /// A program of the server. It refuses to run as root; the user `postgres`, which its package creates, runs it instead.
    fn program(&self, name: &str) -> Command {
        self.as_server_user(&find_postgres_programs().join(name))
    }

    fn as_server_user(&self, program: &Path) -> Command {
        if !is_root() {
            return Command::new(program);
        }
        let mut command = Command::new("setpriv");
        command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]).arg(program);
        command.current_dir(self.folder());
        command
    }

    /// Starts the server on its folder, and waits until it answers.
    pub fn launch(&self) {
        let folder = self.folder();
        let mut server = self.program("postgres");
        server.arg("-D").arg(folder.join("data")).args(["-p", &self.port.to_string()]);
        server.args(["-c", "listen_addresses=127.0.0.1", "-c"]);
        server.arg(format!("unix_socket_directories={}", folder.display()));
        for setting in &self.settings {
            server.args(["-c", setting]);
        }
        start_beside_tests(&server, folder);
        let started_at = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err() || !accepts_queries(&self.url) {
            assert!(started_at.elapsed() < Duration::from_secs(60), "the PostgreSQL server does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The process ids of the server: the first is the parent of the others.
    fn process_ids(&self) -> Vec<String> {
        let file =
            std::fs::read_to_string(self.folder().join("data/postmaster.pid")).expect("the server runs");
        let parent = file.lines().next().expect("a process id").to_owned();
        let children = Command::new("pgrep").args(["-P", &parent]).output().expect("pgrep runs").stdout;
        let children = String::from_utf8_lossy(&children).lines().map(str::to_owned).collect::<Vec<_>>();
        [vec![parent], children].concat()
    }

    fn signal(&self, signal: &str, processes: &[String]) {
        // A process may have ended meanwhile.
        drop(Command::new("kill").arg(format!("-{signal}")).args(processes).output());
    }

    /// Ends the server without a checkpoint, as a crash does, and starts it again.
    pub fn crash_and_restart(&self) {
        self.crash();
        self.launch();
    }

    /// Ends the server without a checkpoint, as a crash does.
    pub fn crash(&self) {
        let parent = self.process_ids().swap_remove(0);
        self.signal("QUIT", &[parent]);
        let crashed_at = Instant::now();
        while self.folder().join("data/postmaster.pid").exists() {
            assert!(crashed_at.elapsed() < Duration::from_secs(30), "the server does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Stops every process of the server without ending it: connections stay open and nothing answers.
    pub fn freeze(&self) {
        self.signal("STOP", &self.process_ids());
    }

    pub fn thaw(&self) {
        self.signal("CONT", &self.process_ids());
    }

    /// A database as text: its tables with all rows.
    #[allow(dead_code, reason = "not every test uses it")]
    pub fn dump(&self, url: &str) -> String {
        let dump = self.program("pg_dump").arg(url).output().expect("pg_dump runs");
        assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
        let text = String::from_utf8_lossy(&dump.stdout).into_owned();
        assert!(text.contains("COPY halo."), "the dump has no table of the store");
        text
    }

    /// Starts a PgBouncer before the server that gives every transaction any of `connections` connections, and returns the
    /// address of a database through it.
    #[allow(dead_code, reason = "not every test uses it")]
    pub fn start_pooler(&self, database_url: &str, connections: usize) -> String {
        let (folder, port) = (self.folder().join(format!("pooler-{}", free_port())), free_port());
        std::fs::create_dir(&folder).expect("a folder");
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={} user=halo\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\n\
             default_pool_size = {connections}\nserver_round_robin = 1\nmax_client_conn = 200\n",
            self.port
        );
        let file = folder.join("pgbouncer.ini");
        std::fs::write(&file, settings).expect("the settings are written");
        // Debian installs it in a folder that is in PATH for root only.
        let installed = Path::new("/usr/sbin/pgbouncer");
        let program = if installed.exists() { installed } else { Path::new("pgbouncer") };
        let mut pooler = self.as_server_user(program);
        pooler.arg(&file);
        start_beside_tests(&pooler, &folder);
        let (_, database) = database_url.rsplit_once('/').expect("the address ends with a database");
        let url = format!("postgres://halo@127.0.0.1:{port}/{database}");
        let started_at = Instant::now();
        while !accepts_queries(&url) {
            assert!(
                started_at.elapsed() < Duration::from_secs(20),
                "PgBouncer does not answer: `scripts/setup` installs it"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        url
    }

    /// The address of a new, empty database.
    pub fn new_database(&self) -> String {
        static NEXT_DATABASE_NUMBER: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("t{}_{}", std::process::id(), NEXT_DATABASE_NUMBER.fetch_add(1, Ordering::Relaxed));
        execute_sql(&self.url, &format!("CREATE DATABASE {name}")).expect("the server creates a database");
        let (server, _) = self.url.rsplit_once('/').expect("the address ends with a database");
        format!("{server}/{name}")
    }
}

/// Starts a program that ends with the tests.
fn start_beside_tests(program: &Command, folder: &Path) {
    let start_status = Command::new("sh")
        .args(["-c", START_SCRIPT, "sh", &std::process::id().to_string()])
        .arg(folder)
        .arg(program.get_program())
        .args(program.get_args())
        .stdin(Stdio::null())
        .status();
    assert!(start_status.expect("the shell runs").success());
}

/// The server may read this, and nobody else.
pub fn give_to_server_user(path: &Path) {
    if is_root() {
        let chown_status = Command::new("chown").arg("-R").arg("postgres").arg(path).status();
        assert!(
            chown_status.expect("chown runs").success(),
            "{} cannot be given to the server",
            path.display()
        );
    }
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.starts_with(b"0\n"))
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

/// The first column of every row of a query, which is text.
#[allow(dead_code, reason = "not every test uses it")]
pub fn query_texts(url: &str, sql: &str) -> Vec<String> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("the runtime starts");
    runtime.block_on(async {
        let (client, connection) =
            tokio_postgres::connect(url, tokio_postgres::NoTls).await.expect("the server answers");
        tokio::spawn(connection);
        let rows = client.query(sql, &[]).await.expect("the query runs");
        rows.iter().map(|row| row.get(0)).collect()
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
    // A link to one of the programs is not beside links to all of them.
    let linked_from = |bin: PathBuf| bin.join("initdb").canonicalize().ok()?.parent().map(Path::to_owned);
    bins.pop().and_then(linked_from).expect("no PostgreSQL server found: `scripts/setup` installs it, or set HALO_TEST_POSTGRES to a server's address")
}
