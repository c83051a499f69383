//! The databases that the tests run on.

pub mod postgres_server;

use halo_store::database::{Database, StoreLocation};
use postgres_server::PostgresTestServer;
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
