//! Addresses of stores.

use crate::postgres_pool::PostgresServer;
use halo_core::Error;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Where a store is: `sqlite:PATH` or `postgres://…`.
#[derive(Clone, PartialEq, Eq)]
pub enum StoreLocation {
    Sqlite(PathBuf),
    /// A server. Its URL may contain a password: `Display` and `Debug` leave that out.
    Postgres(PostgresServer),
}

impl FromStr for StoreLocation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if let Some(path) = text.strip_prefix("sqlite:").filter(|p| !p.is_empty()) {
            if path.starts_with('~') {
                let why =
                    format!("'{text}': ~ is not expanded here; write the path of the home folder instead");
                return Err(Error::invalid_input("opening the store", why));
            }
            // SQLite gives some names a meaning (:memory:, file:…); an absolute path has none but its own.
            let path = std::path::absolute(path)
                .map_err(|e| Error::unavailable("opening the store", e.to_string()).with_source(e))?;
            return Ok(StoreLocation::Sqlite(path));
        }
        if text.starts_with("postgres://") || text.starts_with("postgresql://") {
            return Ok(StoreLocation::Postgres(PostgresServer::new(text)));
        }
        // Only the scheme is shown: the rest may contain a password.
        let scheme = text.split_once(':').map_or(text, |(scheme, _)| scheme);
        let why = format!(
            "'{scheme}:…' is not the address of a store: write sqlite:PATH or postgres://USER@HOST/DATABASE"
        );
        Err(Error::invalid_input("opening the store", why))
    }
}

impl fmt::Display for StoreLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreLocation::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            StoreLocation::Postgres(server) => f.write_str(&server.public_url()),
        }
    }
}

impl fmt::Debug for StoreLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
