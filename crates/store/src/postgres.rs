//! PostgreSQL, for when one machine is not enough: the same tables in a schema of their own, `halo`.
//!
//! The client is asynchronous, the seam is not: each call runs on a small runtime of this connection's own.
//! Statements that go together are sent together, without waiting for each answer.

use crate::sql::{Cell, Row, Sql, SqlError, Trouble};
use futures_util::{StreamExt, future::try_join_all, pin_mut};
use halo_core::seams::Durability;
use std::collections::BTreeMap;
use std::error::Error;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{IsNull, ToSql, Type, private::BytesMut, to_sql_checked};
use tokio_postgres::{Client, Config, NoTls, Statement};

const MIGRATIONS: [&str; 3] = [
    include_str!("../schema/postgres-1.sql"),
    include_str!("../schema/postgres-2.sql"),
    include_str!("../schema/postgres-3.sql"),
];
/// Under which two programs that open an empty database take turns.
const MIGRATION_LOCK: i64 = 0x6861_6c6f;
const TABLES: [&str; 8] =
    ["conversation", "chunk", "block", "log", "mention", "record", "embedding", "message"];
const PATIENCE: Duration = Duration::from_secs(3);

/// A connection to a server.
pub(crate) struct Postgres {
    runtime: Runtime,
    client: Client,
    statements: BTreeMap<&'static str, Statement>,
    claims: Vec<u64>,
    config: Config,
    /// Whether a schema is made where there is none.
    makes: bool,
    /// A connection that breaks within a transaction takes it along; between them a new one does as well.
    within: bool,
    /// What was claimed is not ours any more.
    broken: bool,
}

impl Postgres {
    /// Connects, and brings the schema to this version; `makes` it where there is none.
    pub(crate) fn connect(url: &str, makes: bool) -> Result<Self, SqlError> {
        let mut config: Config = url.parse().map_err(|e: tokio_postgres::Error| {
            SqlError::refused(format!("the address of the PostgreSQL server cannot be read: {}", reason(&e)))
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
        let runtime = runtime.map_err(|e| SqlError::new(Trouble::Unreachable, e.to_string()))?;
        let client = dial(&runtime, &config)?;
        let (statements, claims) = (BTreeMap::new(), Vec::new());
        let mut postgres =
            Self { runtime, client, statements, claims, config, makes, within: false, broken: false };
        postgres.migrate()?;
        Ok(postgres)
    }

    /// Connects anew, and takes again what was claimed; somebody else may have been faster. Until all of it is ours
    /// again, nothing can be done.
    fn redial(&mut self) -> Result<(), SqlError> {
        self.broken = true;
        self.client = dial(&self.runtime, &self.config)?;
        self.statements.clear();
        self.migrate()?;
        let claims = std::mem::take(&mut self.claims);
        let taken = claims.iter().try_for_each(|&key| self.claim(key));
        self.claims = claims;
        taken?;
        self.broken = false;
        Ok(())
    }

    fn batch(&mut self, sql: &str) -> Result<(), SqlError> {
        self.runtime.block_on(self.client.batch_execute(sql)).map_err(|e| explain(&e))
    }

    fn migrate(&mut self) -> Result<(), SqlError> {
        self.batch("BEGIN")?;
        self.within = true;
        let done = self.migrate_within();
        match done {
            Ok(()) => self.commit(),
            Err(error) => {
                self.rollback();
                Err(error)
            }
        }
    }

    fn migrate_within(&mut self) -> Result<(), SqlError> {
        self.run("SELECT pg_advisory_xact_lock($1)", &[Cell::Int(MIGRATION_LOCK)])?;
        let (mut schemas, mut tables) = (0, 0);
        let select = "SELECT (SELECT count(*) FROM information_schema.schemata WHERE schema_name = 'halo'), (SELECT \
                      count(*) FROM information_schema.tables WHERE table_schema = 'halo' AND table_name = 'version')";
        self.query(select, &[], &mut |row| {
            (schemas, tables) = (row.int(0)?, row.int(1)?);
            Ok(())
        })?;
        if tables == 0 && !self.makes {
            return Err(SqlError::refused("nothing of Halo's is kept there yet"));
        }
        // An administrator may have made the schema for a role that may not.
        if schemas == 0 {
            self.batch("CREATE SCHEMA halo")?;
        }
        if tables == 0 {
            self.batch(
                "CREATE TABLE halo.version (version BIGINT NOT NULL); INSERT INTO halo.version VALUES (0)",
            )?;
        }
        self.batch("SET search_path TO halo")?;
        let mut version = 0;
        self.query("SELECT version FROM version", &[], &mut |row| {
            version = row.int(0)?;
            Ok(())
        })?;
        let newest = MIGRATIONS.len() as i64;
        if version > newest {
            let why = format!(
                "the database was written by a newer Halo (its schema is {version}, this program knows \
                 {newest}); it was left untouched: use that Halo"
            );
            return Err(SqlError::new(Trouble::Newer, why));
        }
        for sql in MIGRATIONS.iter().skip(version as usize) {
            self.batch(sql)?;
        }
        if version < newest {
            self.run("UPDATE version SET version = $1", &[Cell::Int(newest)])?;
        }
        Ok(())
    }

    fn prepare(&mut self, sql: &'static str) -> Result<Statement, SqlError> {
        if let Some(statement) = self.statements.get(sql) {
            return Ok(statement.clone());
        }
        let statement = self.runtime.block_on(self.client.prepare(sql)).map_err(|e| explain(&e))?;
        self.statements.insert(sql, statement.clone());
        Ok(statement)
    }
}

fn dial(runtime: &Runtime, config: &Config) -> Result<Client, SqlError> {
    let (client, connection) = runtime.block_on(config.connect(NoTls)).map_err(|e| {
        let how = if e.as_db_error().is_some() { "refuses" } else { "cannot be reached" };
        SqlError::new(Trouble::Unreachable, format!("the PostgreSQL server {how}: {}", reason(&e)))
    })?;
    runtime.spawn(connection);
    Ok(client)
}

/// The arguments as the client wants them.
fn params<'a>(args: &'a [Cell<'a>]) -> Vec<&'a (dyn ToSql + Sync)> {
    args.iter().map(|cell| cell as &(dyn ToSql + Sync)).collect()
}

impl Sql for Postgres {
    fn run(&mut self, sql: &'static str, args: &[Cell<'_>]) -> Result<u64, SqlError> {
        let statement = self.prepare(sql)?;
        self.runtime.block_on(self.client.execute(&statement, &params(args))).map_err(|e| explain(&e))
    }

    fn run_many(&mut self, sql: &'static str, rows: &[Vec<Cell<'_>>]) -> Result<(), SqlError> {
        let statement = self.prepare(sql)?;
        // A few hundred at a time: enough that the way there and back is paid once, little enough to hold.
        for rows in rows.chunks(256) {
            let params: Vec<_> = rows.iter().map(|row| params(row)).collect();
            let all = params.iter().map(|params| self.client.execute(&statement, params));
            self.runtime.block_on(try_join_all(all)).map_err(|e| explain(&e))?;
        }
        Ok(())
    }

    fn query(
        &mut self,
        sql: &'static str,
        args: &[Cell<'_>],
        each: &mut dyn FnMut(Row<'_>) -> Result<(), SqlError>,
    ) -> Result<(), SqlError> {
        // The server is asked whether it is there: a statement that is known already would be sent blindly.
        if !self.within && self.batch("").is_err_and(|e| e.trouble == Trouble::Unreachable) {
            self.redial()?;
        }
        let statement = self.prepare(sql)?;
        let client = &self.client;
        self.runtime.block_on(async {
            let rows = client.query_raw(&statement, params(args)).await.map_err(|e| explain(&e))?;
            pin_mut!(rows);
            while let Some(row) = rows.next().await {
                let row = row.map_err(|e| explain(&e))?;
                let cell = |(i, column): (usize, &tokio_postgres::Column)| {
                    let value = match *column.type_() {
                        Type::INT8 => row.try_get(i).map(Cell::Int),
                        Type::TEXT => row.try_get(i).map(Cell::Text),
                        _ => row.try_get(i).map(Cell::Blob),
                    };
                    value.map_err(|e| SqlError::damaged(reason(&e)))
                };
                let cells: Vec<_> = row.columns().iter().enumerate().map(cell).collect::<Result<_, _>>()?;
                each(Row(&cells))?;
            }
            Ok(())
        })
    }

    fn begin(&mut self, writes: Option<Durability>) -> Result<(), SqlError> {
        let begin = match writes {
            None => "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
            Some(Durability::Now) => "BEGIN; SET LOCAL synchronous_commit = on",
            Some(Durability::Behind) => "BEGIN; SET LOCAL synchronous_commit = off",
        };
        if self.broken {
            self.redial()?;
        }
        match self.batch(begin) {
            Err(error) if error.trouble == Trouble::Unreachable => {
                self.redial()?;
                self.batch(begin)?;
            }
            begun => begun?,
        }
        self.within = true;
        Ok(())
    }

    fn commit(&mut self) -> Result<(), SqlError> {
        self.batch("COMMIT")?;
        self.within = false;
        Ok(())
    }

    fn rollback(&mut self) {
        // If the server is gone, so is the transaction.
        let _ = self.batch("ROLLBACK");
        self.within = false;
    }

    fn claim(&mut self, key: u64) -> Result<(), SqlError> {
        if self.claims.contains(&key) {
            return Ok(());
        }
        let asked = Instant::now();
        loop {
            let mut mine = 0;
            let sql = "SELECT (CASE WHEN pg_try_advisory_lock($1) THEN 1 ELSE 0 END)::BIGINT";
            self.query(sql, &[Cell::Int(key.cast_signed())], &mut |row| {
                mine = row.int(0)?;
                Ok(())
            })?;
            if mine == 1 {
                self.claims.push(key);
                return Ok(());
            }
            if asked.elapsed() > PATIENCE {
                let why = "another Halo is using it: close that one, or wait until it is done";
                return Err(SqlError::new(Trouble::Busy, why));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn is_claimed(&mut self, key: u64) -> Result<bool, SqlError> {
        if self.claims.contains(&key) {
            return Ok(false);
        }
        // Let go of at once: whoever claims it meanwhile tries again.
        let sql = "SELECT (CASE WHEN pg_try_advisory_lock_shared($1) THEN \
                   (CASE WHEN pg_advisory_unlock_shared($1) THEN 0 ELSE 0 END) ELSE 1 END)::BIGINT";
        let mut theirs = 0;
        self.query(sql, &[Cell::Int(key.cast_signed())], &mut |row| {
            theirs = row.int(0)?;
            Ok(())
        })?;
        Ok(theirs == 1)
    }

    fn schema_is_whole(&mut self) -> Result<bool, SqlError> {
        let mut there = Vec::new();
        let select = "SELECT table_name::TEXT FROM information_schema.tables WHERE table_schema = 'halo'";
        self.query(select, &[], &mut |row| {
            there.push(row.text(0)?.to_owned());
            Ok(())
        })?;
        Ok(TABLES.iter().all(|table| there.iter().any(|t| t == table)))
    }

    fn inspect(&mut self) -> Result<Vec<String>, SqlError> {
        // The server looks after its own files.
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
        self.begin(Some(Durability::Now))?;
        let copied = self.batch(&format!("CREATE SCHEMA {name}; {copies}")).and_then(|()| self.commit());
        if copied.is_err() {
            self.rollback();
        }
        copied.map(|()| format!("schema {name}"))
    }

    fn shred(&mut self, _on: bool) -> Result<(), SqlError> {
        Ok(())
    }

    fn scrub(&mut self) -> Result<(), SqlError> {
        TABLES.iter().try_for_each(|table| self.batch(&format!("VACUUM FULL halo.{table}")))
    }

    fn close(&mut self) {}

    fn release(&mut self) {}

    fn release_one(&mut self, key: u64) {
        if let Some(at) = self.claims.iter().position(|&claimed| claimed == key) {
            self.claims.swap_remove(at);
            // A connection that is gone has released it.
            let _ = self.run("SELECT pg_advisory_unlock($1)", &[Cell::Int(key.cast_signed())]);
        }
    }

    fn bytes(&mut self) -> Result<u64, SqlError> {
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

impl ToSql for Cell<'_> {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        match self {
            Cell::Int(n) => n.to_sql(ty, out),
            Cell::Text(text) => text.to_sql(ty, out),
            Cell::Blob(blob) => blob.to_sql(ty, out),
        }
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::INT8 | Type::TEXT | Type::BYTEA)
    }

    to_sql_checked!();
}

/// The innermost reason: what the server said, or the system.
fn reason(error: &tokio_postgres::Error) -> String {
    if let Some(server) = error.as_db_error() {
        return server.message().to_owned();
    }
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// What PostgreSQL's error means to a person.
fn explain(error: &tokio_postgres::Error) -> SqlError {
    let trouble = match error.code() {
        Some(code) if *code == SqlState::DISK_FULL => Trouble::Full,
        Some(code) if *code == SqlState::READ_ONLY_SQL_TRANSACTION => Trouble::ReadOnly,
        Some(code) if [SqlState::DATA_CORRUPTED, SqlState::INDEX_CORRUPTED].contains(code) => {
            Trouble::Damaged
        }
        Some(code) if [SqlState::LOCK_NOT_AVAILABLE, SqlState::T_R_SERIALIZATION_FAILURE].contains(code) => {
            Trouble::Busy
        }
        Some(code) if [SqlState::ADMIN_SHUTDOWN, SqlState::CRASH_SHUTDOWN].contains(code) => {
            Trouble::Unreachable
        }
        // Not the server's word: the way to it is broken.
        None => Trouble::Unreachable,
        _ => Trouble::Other,
    };
    SqlError::new(trouble, format!("PostgreSQL: {}", reason(error)))
}
