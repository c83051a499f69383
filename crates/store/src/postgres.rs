//! PostgreSQL, for stores that several machines share: the same tables in a schema named `halo`.
//!
//! The client is asynchronous, [`SqlConnection`] is not: each call runs on a runtime that belongs to the connection.
//! Rows of one statement are pipelined.

use crate::schema::{self, NEWEST_VERSION, POSTGRES_MIGRATIONS};
use crate::sql::{SqlConnection, SqlError, SqlErrorKind, SqlRow, SqlValue};
use futures_util::{StreamExt, future::try_join_all, pin_mut};
use halo_core::store::Durability;
use std::collections::BTreeMap;
use std::error::Error;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{IsNull, ToSql, Type, private::BytesMut, to_sql_checked};
use tokio_postgres::{Client, Config, NoTls, Statement};

/// The key of the advisory lock under which programs migrate a database one after the other.
const MIGRATION_LOCK: i64 = 0x6861_6c6f;
const TABLES: [&str; 8] =
    ["conversation", "chunk", "block", "log", "mention", "record", "embedding", "message"];
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);

/// A connection to a server.
pub(crate) struct Postgres {
    runtime: Runtime,
    client: Client,
    statements: BTreeMap<&'static str, Statement>,
    locks: Vec<u64>,
    config: Config,
    /// Whether a missing schema is created.
    creates_schema: bool,
    /// A connection that is lost within a transaction loses the transaction; outside of one it can be replaced.
    in_transaction: bool,
    /// The server has released the locks with the lost connection, and they are not all taken again.
    locks_lost: bool,
}

impl Postgres {
    /// Connects and migrates the schema to the newest version.
    pub(crate) fn connect(url: &str, creates_schema: bool) -> Result<Self, SqlError> {
        let mut config: Config = url.parse().map_err(|e: tokio_postgres::Error| {
            SqlError::invalid_input(format!(
                "the address of the PostgreSQL server cannot be parsed: {}",
                error_message(&e)
            ))
        })?;
        if let Ok(password) = std::env::var("PGPASSWORD")
            && config.get_password().is_none()
        {
            config.password(password);
        }
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(Duration::from_secs(10));
        }
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| SqlError::new(SqlErrorKind::Unavailable, e.to_string()))?;
        let client = open_client(&runtime, &config)?;
        let mut postgres = Self {
            runtime,
            client,
            statements: BTreeMap::new(),
            locks: Vec::new(),
            config,
            creates_schema,
            in_transaction: false,
            locks_lost: false,
        };
        postgres.migrate()?;
        Ok(postgres)
    }

    /// Opens a new connection and takes the locks again. Another program may have taken one meanwhile: until all locks
    /// are held again, every transaction fails.
    fn reconnect(&mut self) -> Result<(), SqlError> {
        self.locks_lost = true;
        self.client = open_client(&self.runtime, &self.config)?;
        self.statements.clear();
        self.migrate()?;
        let keys = std::mem::take(&mut self.locks);
        let locked = keys.iter().try_for_each(|&key| self.lock(key));
        self.locks = keys;
        locked?;
        self.locks_lost = false;
        Ok(())
    }

    fn batch_execute(&mut self, sql: &str) -> Result<(), SqlError> {
        self.runtime.block_on(self.client.batch_execute(sql)).map_err(|e| classify_error(&e))
    }

    fn migrate(&mut self) -> Result<(), SqlError> {
        self.batch_execute("BEGIN")?;
        self.in_transaction = true;
        match self.migrate_in_transaction() {
            Ok(()) => self.commit(),
            Err(error) => {
                self.rollback();
                Err(error)
            }
        }
    }

    fn migrate_in_transaction(&mut self) -> Result<(), SqlError> {
        self.execute("SELECT pg_advisory_xact_lock($1)", &[SqlValue::Int(MIGRATION_LOCK)])?;
        let (mut schemas, mut tables) = (0, 0);
        let select = "SELECT (SELECT count(*) FROM information_schema.schemata WHERE schema_name = 'halo'), (SELECT \
                      count(*) FROM information_schema.tables WHERE table_schema = 'halo' AND table_name = 'version')";
        self.query(select, &[], &mut |row| {
            (schemas, tables) = (row.int(0)?, row.int(1)?);
            Ok(())
        })?;
        if tables == 0 && !self.creates_schema {
            return Err(SqlError::not_found("the database has no store of Halo"));
        }
        // An administrator may have created the schema for a role that may not create one.
        if schemas == 0 {
            self.batch_execute("CREATE SCHEMA halo")?;
        }
        if tables == 0 {
            self.batch_execute(
                "CREATE TABLE halo.version (version BIGINT NOT NULL); INSERT INTO halo.version VALUES (0)",
            )?;
        }
        self.batch_execute("SET search_path TO halo")?;
        let mut version = 0;
        self.query("SELECT version FROM version", &[], &mut |row| {
            version = row.int(0)?;
            Ok(())
        })?;
        if version > NEWEST_VERSION {
            let why = format!(
                "the database was written by a newer Halo (schema version {version}, this program supports \
                 {NEWEST_VERSION}); it was not changed: use the newer Halo"
            );
            return Err(SqlError::new(SqlErrorKind::NewerSchema, why));
        }
        for sql in POSTGRES_MIGRATIONS.iter().skip(version as usize) {
            self.batch_execute(sql)?;
        }
        if version < NEWEST_VERSION {
            schema::fill_new_columns(self, version)?;
            self.execute("UPDATE version SET version = $1", &[SqlValue::Int(NEWEST_VERSION)])?;
        }
        Ok(())
    }

    fn prepare(&mut self, sql: &'static str) -> Result<Statement, SqlError> {
        if let Some(statement) = self.statements.get(sql) {
            return Ok(statement.clone());
        }
        let statement = self.runtime.block_on(self.client.prepare(sql)).map_err(|e| classify_error(&e))?;
        self.statements.insert(sql, statement.clone());
        Ok(statement)
    }
}

fn open_client(runtime: &Runtime, config: &Config) -> Result<Client, SqlError> {
    let (client, connection) = runtime.block_on(config.connect(NoTls)).map_err(|e| {
        let problem = if e.as_db_error().is_some() { "refuses the connection" } else { "cannot be reached" };
        SqlError::unavailable(format!("the PostgreSQL server {problem}: {}", error_message(&e)))
    })?;
    runtime.spawn(connection);
    Ok(client)
}

/// Parameters in the type that the client takes.
fn params<'a>(args: &'a [SqlValue<'a>]) -> Vec<&'a (dyn ToSql + Sync)> {
    args.iter().map(|cell| cell as &(dyn ToSql + Sync)).collect()
}

impl SqlConnection for Postgres {
    fn execute(&mut self, sql: &'static str, args: &[SqlValue<'_>]) -> Result<u64, SqlError> {
        let statement = self.prepare(sql)?;
        self.runtime.block_on(self.client.execute(&statement, &params(args))).map_err(|e| classify_error(&e))
    }

    fn execute_many(&mut self, sql: &'static str, rows: &[Vec<SqlValue<'_>>]) -> Result<(), SqlError> {
        let statement = self.prepare(sql)?;
        // A batch hides the latency of the network; its size bounds the memory that it takes.
        for rows in rows.chunks(256) {
            let params: Vec<_> = rows.iter().map(|row| params(row)).collect();
            let all = params.iter().map(|params| self.client.execute(&statement, params));
            self.runtime.block_on(try_join_all(all)).map_err(|e| classify_error(&e))?;
        }
        Ok(())
    }

    fn query(
        &mut self,
        sql: &'static str,
        args: &[SqlValue<'_>],
        each: &mut dyn FnMut(SqlRow<'_>) -> Result<(), SqlError>,
    ) -> Result<(), SqlError> {
        // An empty statement detects a lost connection while it can still be replaced.
        if !self.in_transaction && self.batch_execute("").is_err_and(|e| e.kind == SqlErrorKind::Unavailable)
        {
            self.reconnect()?;
        }
        let statement = self.prepare(sql)?;
        let client = &self.client;
        self.runtime.block_on(async {
            let rows = client.query_raw(&statement, params(args)).await.map_err(|e| classify_error(&e))?;
            pin_mut!(rows);
            while let Some(row) = rows.next().await {
                let row = row.map_err(|e| classify_error(&e))?;
                let cell = |(i, column): (usize, &tokio_postgres::Column)| {
                    let value = match *column.type_() {
                        Type::INT8 => row.try_get(i).map(SqlValue::Int),
                        Type::TEXT => row.try_get(i).map(SqlValue::Text),
                        _ => row.try_get(i).map(SqlValue::Blob),
                    };
                    value.map_err(|e| SqlError::damaged(error_message(&e)))
                };
                let cells: Vec<_> = row.columns().iter().enumerate().map(cell).collect::<Result<_, _>>()?;
                each(SqlRow(&cells))?;
            }
            Ok(())
        })
    }

    fn begin(&mut self, writes: Option<Durability>) -> Result<(), SqlError> {
        let begin = match writes {
            None => "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
            Some(Durability::Immediate) => "BEGIN; SET LOCAL synchronous_commit = on",
            Some(Durability::Deferred) => "BEGIN; SET LOCAL synchronous_commit = off",
        };
        if self.locks_lost {
            self.reconnect()?;
        }
        match self.batch_execute(begin) {
            Err(error) if error.kind == SqlErrorKind::Unavailable => {
                self.reconnect()?;
                self.batch_execute(begin)?;
            }
            begun => begun?,
        }
        self.in_transaction = true;
        Ok(())
    }

    fn commit(&mut self) -> Result<(), SqlError> {
        self.batch_execute("COMMIT")?;
        self.in_transaction = false;
        Ok(())
    }

    fn rollback(&mut self) {
        // If the connection is lost, the server has rolled back.
        let _ = self.batch_execute("ROLLBACK");
        self.in_transaction = false;
    }

    fn lock(&mut self, key: u64) -> Result<(), SqlError> {
        if self.locks.contains(&key) {
            return Ok(());
        }
        let started = Instant::now();
        loop {
            let mut locked = 0;
            let sql = "SELECT (CASE WHEN pg_try_advisory_lock($1) THEN 1 ELSE 0 END)::BIGINT";
            self.query(sql, &[SqlValue::Int(key.cast_signed())], &mut |row| {
                locked = row.int(0)?;
                Ok(())
            })?;
            if locked == 1 {
                self.locks.push(key);
                return Ok(());
            }
            if started.elapsed() > LOCK_TIMEOUT {
                let why = "another Halo is using it: close that one, or wait until it is done";
                return Err(SqlError::new(SqlErrorKind::Busy, why));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn is_locked_elsewhere(&mut self, key: u64) -> Result<bool, SqlError> {
        if self.locks.contains(&key) {
            return Ok(false);
        }
        // The shared lock is released at once: a program that wants the lock meanwhile tries again.
        let sql = "SELECT (CASE WHEN pg_try_advisory_lock_shared($1) THEN \
                   (CASE WHEN pg_advisory_unlock_shared($1) THEN 0 ELSE 0 END) ELSE 1 END)::BIGINT";
        let mut locked_elsewhere = 0;
        self.query(sql, &[SqlValue::Int(key.cast_signed())], &mut |row| {
            locked_elsewhere = row.int(0)?;
            Ok(())
        })?;
        Ok(locked_elsewhere == 1)
    }

    fn has_current_schema(&mut self) -> Result<bool, SqlError> {
        let mut tables = Vec::new();
        let select = "SELECT table_name::TEXT FROM information_schema.tables WHERE table_schema = 'halo'";
        self.query(select, &[], &mut |row| {
            tables.push(row.text(0)?.to_owned());
            Ok(())
        })?;
        Ok(TABLES.iter().all(|table| tables.iter().any(|t| t == table)))
    }

    fn integrity_check(&mut self) -> Result<Vec<String>, SqlError> {
        // The server checks its own files.
        Ok(Vec::new())
    }

    fn backup(&mut self) -> Result<String, SqlError> {
        let mut last = 0;
        let select = "SELECT schema_name::TEXT FROM information_schema.schemata";
        self.query(select, &[], &mut |row| {
            let number = row.text(0)?.strip_prefix("halo_backup_").and_then(|n| n.parse::<u32>().ok());
            last = last.max(number.unwrap_or(0));
            Ok(())
        })?;
        let name = format!("halo_backup_{}", last + 1);
        let copies: String =
            TABLES.iter().map(|t| format!("CREATE TABLE {name}.{t} AS TABLE halo.{t};")).collect();
        self.begin(Some(Durability::Immediate))?;
        let copied =
            self.batch_execute(&format!("CREATE SCHEMA {name}; {copies}")).and_then(|()| self.commit());
        if copied.is_err() {
            self.rollback();
        }
        copied.map(|()| format!("schema {name}"))
    }

    fn set_secure_delete(&mut self, _on: bool) -> Result<(), SqlError> {
        Ok(())
    }

    fn vacuum(&mut self) -> Result<(), SqlError> {
        // The statistics of the planner contain frequent values: they are computed again.
        let vacuum = |table: &&str| format!("VACUUM (FULL, ANALYZE) halo.{table}");
        TABLES.iter().try_for_each(|table| self.batch_execute(&vacuum(table)))
    }

    fn close(&mut self) {}

    fn unlock_all(&mut self) {}

    fn unlock(&mut self, key: u64) {
        if let Some(at) = self.locks.iter().position(|&held| held == key) {
            self.locks.swap_remove(at);
            // If this fails, the connection is lost, and the lock with it.
            let _ = self.execute("SELECT pg_advisory_unlock($1)", &[SqlValue::Int(key.cast_signed())]);
        }
    }

    fn size_on_disk(&mut self) -> Result<u64, SqlError> {
        let mut bytes = 0;
        let sql = "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::BIGINT FROM pg_class c \
                   JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'halo' AND c.relkind = 'r'";
        self.query(sql, &[], &mut |row| {
            bytes = row.count(0)?;
            Ok(())
        })?;
        Ok(bytes)
    }
}

impl ToSql for SqlValue<'_> {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        match self {
            SqlValue::Int(n) => n.to_sql(ty, out),
            SqlValue::Text(text) => text.to_sql(ty, out),
            SqlValue::Blob(blob) => blob.to_sql(ty, out),
        }
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::INT8 | Type::TEXT | Type::BYTEA)
    }

    to_sql_checked!();
}

/// The innermost cause: the message of the server, or of the system.
fn error_message(error: &tokio_postgres::Error) -> String {
    if let Some(server) = error.as_db_error() {
        return server.message().to_owned();
    }
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// The kind of a PostgreSQL error.
fn classify_error(error: &tokio_postgres::Error) -> SqlError {
    let kind = match error.code() {
        Some(code) if *code == SqlState::DISK_FULL => SqlErrorKind::DiskFull,
        Some(code) if *code == SqlState::READ_ONLY_SQL_TRANSACTION => SqlErrorKind::ReadOnly,
        Some(code) if [SqlState::DATA_CORRUPTED, SqlState::INDEX_CORRUPTED].contains(code) => {
            SqlErrorKind::Damaged
        }
        Some(code) if [SqlState::LOCK_NOT_AVAILABLE, SqlState::T_R_SERIALIZATION_FAILURE].contains(code) => {
            SqlErrorKind::Busy
        }
        Some(code) if [SqlState::ADMIN_SHUTDOWN, SqlState::CRASH_SHUTDOWN].contains(code) => {
            SqlErrorKind::Unavailable
        }
        // An error without a code is not from the server: the connection is broken.
        None => SqlErrorKind::Unavailable,
        _ => SqlErrorKind::Other,
    };
    SqlError::new(kind, format!("PostgreSQL: {}", error_message(error)))
}
