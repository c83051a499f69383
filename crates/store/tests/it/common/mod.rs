//! The databases that the tests run on.

pub mod postgres_server;

use halo_store::database::{Database, StoreLocation};
use postgres_server::{PostgresTestServer, execute_sql, query_texts};
use std::path::Path;
use std::sync::LazyLock;

/// A separate database for one test.
pub struct TestDatabase {
    pub location: StoreLocation,
    /// The address of a PostgreSQL database; empty for SQLite.
    pub url: String,
    folder: tempfile::TempDir,
}

impl TestDatabase {
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn open(&self) -> Database {
        Database::open(&self.location).expect("the database opens")
    }

    /// The database as another process opens it: with connections of its own.
    pub fn open_elsewhere(&self) -> Database {
        let location = match &self.location {
            StoreLocation::Sqlite(_) => self.location.clone(),
            StoreLocation::Postgres(_) => {
                format!("{}?pool_timeout=9", self.url).parse().expect("a valid address")
            }
        };
        Database::open(&location).expect("the database opens")
    }

    /// The key of the lease of a conversation.
    pub fn lease_key(name: &str) -> i64 {
        xxhash_rust::xxh3::xxh3_64(name.as_bytes()).cast_signed()
    }

    /// Ends the lease of an owner that does not answer: on a server it expires, and a network file system loses the lock.
    pub fn end_lease(&self, name: &str) {
        let key = Self::lease_key(name);
        match &self.location {
            StoreLocation::Sqlite(path) => {
                // It may have been taken away before.
                let _ =
                    std::fs::remove_file(format!("{}-locks/{:016x}", path.display(), key.cast_unsigned()));
            }
            StoreLocation::Postgres(_) => {
                let end = format!("UPDATE halo.lease SET until = 1 WHERE key = {key}");
                execute_sql(&self.url, &end).expect("the statement runs");
            }
        }
    }

    /// Owner and epoch of a lease.
    pub fn stored_lease(&self, name: &str) -> Option<(String, i64)> {
        let key = Self::lease_key(name);
        match &self.location {
            StoreLocation::Sqlite(path) => {
                let connection = rusqlite::Connection::open(path).expect("the file opens");
                let select = "SELECT owner, epoch FROM lease WHERE key = ?1";
                connection.query_row(select, [key], |row| Ok((row.get(0)?, row.get(1)?))).ok()
            }
            StoreLocation::Postgres(_) => {
                let select = format!("SELECT owner || ',' || epoch FROM halo.lease WHERE key = {key}");
                let row = query_texts(&self.url, &select).pop()?;
                let (owner, epoch) = row.rsplit_once(',')?;
                Some((owner.to_owned(), epoch.parse().ok()?))
            }
        }
    }
}

/// A new SQLite file.
pub fn sqlite() -> TestDatabase {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let location = StoreLocation::Sqlite(folder.path().join("halo.db"));
    TestDatabase { location, url: String::new(), folder }
}

/// A new database on a PostgreSQL server that runs for these tests alone.
pub fn postgres() -> TestDatabase {
    static SERVER: LazyLock<PostgresTestServer> = LazyLock::new(|| PostgresTestServer::start(&[]));
    let url = SERVER.new_database();
    let location = url.parse().expect("a valid address");
    TestDatabase { location, url, folder: tempfile::tempdir().expect("a temporary folder") }
}
