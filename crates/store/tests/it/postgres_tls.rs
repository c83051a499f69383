//! TLS to a real server: what each `sslmode` encrypts and checks.

use crate::common::postgres_server::{PostgresTestServer, give_to_server_user, query_texts};
use halo_core::ErrorKind;
use halo_core::store::{Access, Store};
use halo_store::database::Database;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

fn openssl(arguments: &[&str], folder: &Path) {
    let made = Command::new("openssl").args(arguments).current_dir(folder).output().expect("openssl runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

/// An authority, and a certificate of it for a name and an address.
struct Authority {
    folder: tempfile::TempDir,
}

impl Authority {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let key = ["-newkey", "rsa:2048", "-nodes", "-days", "30"];
        let own = ["req", "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=Test authority"];
        openssl(&[&own[..], &key[..]].concat(), folder.path());
        Self { folder }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Signs a certificate for names such as `DNS:localhost`.
    fn sign(&self, names: &str) -> (PathBuf, PathBuf) {
        let folder = self.folder.path();
        std::fs::write(self.file("names"), format!("subjectAltName={names}\nbasicConstraints=CA:FALSE"))
            .expect("the file is written");
        let request = ["req", "-newkey", "rsa:2048", "-nodes", "-keyout", "server.key", "-out", "server.csr"];
        openssl(&[&request[..], &["-subj", "/CN=server"]].concat(), folder);
        let sign =
            ["x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"];
        openssl(&[&sign[..], &["-out", "server.pem", "-days", "30", "-extfile", "names"]].concat(), folder);
        (self.file("server.pem"), self.file("server.key"))
    }
}

/// A server with a certificate. It reads copies of its own.
fn start_server(certificate: &Path, key: &Path) -> (PostgresTestServer, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (from, to) in [(certificate, "server.pem"), (key, "server.key")] {
        let copy = folder.path().join(to);
        std::fs::copy(from, &copy).expect("the file is copied");
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&copy, private).expect("the file is private");
    }
    give_to_server_user(folder.path());
    let setting = |name: &str, file: &str| format!("{name}={}", folder.path().join(file).display());
    let settings =
        ["ssl=on".to_owned(), setting("ssl_cert_file", "server.pem"), setting("ssl_key_file", "server.key")];
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    (PostgresTestServer::start(&settings), folder)
}

/// Whether the connections with these parameters are encrypted; an error if there are none.
fn is_encrypted(url: &str, parameters: &str) -> Result<bool, halo_core::Error> {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let name = format!("tls{}", NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    let address = format!("{url}?{parameters}&application_name={name}&pool_timeout=3");
    let mut store = Database::open(&address.parse()?)?;
    store.load("c", Access::Write)?;
    let select = format!(
        "SELECT ssl::text FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = '{name}'"
    );
    let states = query_texts(&format!("{url}?sslmode=disable"), &select);
    assert!(!states.is_empty() && states.iter().all(|state| *state == states[0]), "{states:?}");
    Ok(states[0] == "true")
}

#[test]
fn tls_modes_encrypt_and_check_as_libpq_does() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let (certificate, key) = authority.sign("DNS:localhost");
    let (server, _files) = start_server(&certificate, &key);
    // The certificate is for the name and not for the address.
    let by_address = server.new_database();
    let by_name = by_address.replace("127.0.0.1", "localhost");
    let (own, other) = (authority.file("ca.pem"), stranger.file("ca.pem"));
    let (own, other) = (own.display(), other.display());
    let cases: [(&str, String, Option<bool>); 13] = [
        (&by_address, "sslmode=disable".into(), Some(false)),
        (&by_address, "connection_limit=2".into(), Some(true)),
        (&by_address, "sslmode=prefer".into(), Some(true)),
        (&by_address, "sslmode=require".into(), Some(true)),
        // With a file of authorities, libpq checks the certificate.
        (&by_address, format!("sslmode=require&sslrootcert={own}"), Some(true)),
        (&by_address, format!("sslmode=require&sslrootcert={other}"), None),
        (&by_address, format!("sslmode=verify-ca&sslrootcert={own}"), Some(true)),
        (&by_address, format!("sslmode=verify-ca&sslrootcert={other}"), None),
        (&by_address, "sslmode=verify-ca&sslrootcert=system".into(), None),
        (&by_name, format!("sslmode=verify-full&sslrootcert={own}"), Some(true)),
        (&by_name, format!("sslmode=verify-full&sslrootcert={other}"), None),
        (&by_address, format!("sslmode=verify-full&sslrootcert={own}"), None),
        (&by_address, "sslmode=verify-full&sslrootcert=/no/such/file".into(), None),
    ];
    for (url, parameters, expected) in cases {
        let encrypted = is_encrypted(url, &parameters);
        match expected {
            Some(expected) => assert_eq!(encrypted, Ok(expected), "{parameters}"),
            None => {
                let refused = encrypted.expect_err(&parameters);
                let kinds = [ErrorKind::Unavailable, ErrorKind::InvalidInput];
                assert!(kinds.contains(&refused.kind), "{parameters}: {refused}");
            }
        }
    }
}

/// The certificate of a server that has signed it itself is its own authority.
#[test]
fn tls_accepts_a_self_signed_certificate_that_is_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let request =
        ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-keyout", "key", "-out", "pem"];
    let names = ["-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1"];
    openssl(&[&request[..], &names[..]].concat(), folder.path());
    let (server, _files) = start_server(&folder.path().join("pem"), &folder.path().join("key"));
    let url = server.new_database();
    let file = folder.path().join("pem");
    for mode in ["verify-ca", "verify-full"] {
        let parameters = format!("sslmode={mode}&sslrootcert={}", file.display());
        assert_eq!(is_encrypted(&url, &parameters), Ok(true), "{mode}");
    }
    let by_name = url.replace("127.0.0.1", "localhost");
    let refused = is_encrypted(&by_name, &format!("sslmode=verify-full&sslrootcert={}", file.display()));
    assert_eq!(refused.expect_err("it is for another name").kind, ErrorKind::Unavailable);
}

/// A server without TLS: what must be encrypted is refused, what may be is not.
#[test]
fn tls_is_refused_by_a_server_without_it() {
    let server = PostgresTestServer::start(&["max_connections=20"]);
    let url = server.new_database();
    assert_eq!(is_encrypted(&url, "sslmode=prefer"), Ok(false));
    for mode in ["require", "verify-ca&sslrootcert=system", "verify-full&sslrootcert=system"] {
        let refused = is_encrypted(&url, &format!("sslmode={mode}")).expect_err(mode);
        assert_eq!(refused.kind, ErrorKind::Unavailable, "{mode}: {refused}");
    }
}

/// Leases are renewed over TLS, too.
#[test]
fn tls_renews_leases() {
    let authority = Authority::new();
    let (certificate, key) = authority.sign("IP:127.0.0.1");
    let (server, _files) = start_server(&certificate, &key);
    let url = server.new_database();
    let file = authority.file("ca.pem");
    let address = format!("{url}?sslmode=verify-full&sslrootcert={}&lease_timeout=1", file.display());
    let mut store = Database::open(&address.parse().expect("an address")).expect("the store opens");
    store.load("c", Access::Write).expect("a new conversation");
    std::thread::sleep(Duration::from_secs(2));
    let other = format!("{url}?sslmode=require&pool_timeout=9");
    let mut other = Database::open(&other.parse().expect("an address")).expect("the store opens");
    assert_eq!(other.load("c", Access::Write).expect_err("it is renewed").kind, ErrorKind::Busy);
}
