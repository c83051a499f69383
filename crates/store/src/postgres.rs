//! PostgreSQL, for stores that several machines share: the same tables in a schema named `halo`.
//!
//! The client is asynchronous, [`SqlConnection`] is not: each call waits on the runtime of the pool. A store has a
//! connection only while a statement or a transaction of it runs. Rows of one statement are pipelined.

use crate::postgres_pool::{PostgresPool, PostgresServer, classify_error, error_message};
use crate::schema::{self, NEWEST_VERSION, POSTGRES_MIGRATIONS};
use crate::sql::{SqlConnection, SqlError, SqlErrorKind, SqlRow, SqlValue};
use deadpool_postgres::Object;
use futures_util::{StreamExt, future::try_join_all, pin_mut};
use halo_core::store::Durability;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_postgres::types::{IsNull, ToSql, Type, private::BytesMut, to_sql_checked};

/// The key of the advisory lock under which programs migrate a database one after the other.
const MIGRATION_LOCK: i64 = 0x6861_6c6f;
const TABLES: [&str; 8] =
    ["conversation", "chunk", "block", "log", "mention", "record", "embedding", "message"];

/// How long the first new attempt waits after a connection was lost; each further one waits twice as long.
const FIRST_RETRY: Duration = Duration::from_millis(50);

/// A store on a server.
pub(crate) struct Postgres {
    pool: Arc<PostgresPool>,
    /// The connection of the transaction that runs.
    transaction: Option<Object>,
    /// The locks of this store, each with the generation of the session that took it.
    locks: Vec<(u64, u64)>,
}

impl Postgres {
    /// Connects and migrates the schema to the newest version. A missing schema is created on demand.
    pub(crate) fn connect(server: &PostgresServer, creates_schema: bool) -> Result<Self, SqlError> {
        let mut postgres = Self { pool: server.pool()?, transaction: None, locks: Vec::new() };
        if postgres.schema_version()? != Some(NEWEST_VERSION) {
            postgres.migrate(creates_schema)?;
        }
        Ok(postgres)
    }

    /// The version of the schema; none where there is no schema, or not all of it.
    fn schema_version(&mut self) -> Result<Option<i64>, SqlError> {
        let mut version = None;
        let read = self.query("SELECT version FROM version", &[], &mut |row| {
            version = Some(row.int(0)?);
            Ok(())
        });
        match read {
            // The table is missing.
            Err(error) if error.kind == SqlErrorKind::Other => Ok(None),
            read => read.map(|()| version),
        }
    }

    fn migrate(&mut self, creates_schema: bool) -> Result<(), SqlError> {
        self.begin_with("BEGIN", false)?;
        let migrated = self.migrate_in_transaction(creates_schema).and_then(|()| self.commit());
        if migrated.is_err() {
            self.rollback();
        }
        migrated
    }

    fn migrate_in_transaction(&mut self, creates_schema: bool) -> Result<(), SqlError> {
        self.execute("SELECT pg_advisory_xact_lock($1)", &[SqlValue::Int(MIGRATION_LOCK)])?;
        let (mut schemas, mut tables) = (0, 0);
        let select = "SELECT (SELECT count(*) FROM information_schema.schemata WHERE schema_name = 'halo'), (SELECT \
                      count(*) FROM information_schema.tables WHERE table_schema = 'halo' AND table_name = 'version')";
        self.query(select, &[], &mut |row| {
            (schemas, tables) = (row.int(0)?, row.int(1)?);
            Ok(())
        })?;
        if tables == 0 && !creates_schema {
            return Err(SqlError::not_found("the database has no store of Halo"));
        }
        // An administrator may have created the schema for a role that may not create one.
        if schemas == 0 {
            self.batch_execute_unlimited("CREATE SCHEMA halo")?;
        }
        if tables == 0 {
            self.batch_execute_unlimited(
                "CREATE TABLE halo.version (version BIGINT NOT NULL); INSERT INTO halo.version VALUES (0)",
            )?;
        }
        let version = self.schema_version()?.unwrap_or(0);
        if version > NEWEST_VERSION {
            let why = format!(
                "the database was written by a newer Halo (schema version {version}, this program supports \
                 {NEWEST_VERSION}); it was not changed: use the newer Halo"
            );
            return Err(SqlError::new(SqlErrorKind::NewerSchema, why));
        }
        for sql in POSTGRES_MIGRATIONS.iter().skip(version as usize) {
            self.batch_execute_unlimited(sql)?;
        }
        if version < NEWEST_VERSION {
            schema::fill_new_columns(self, version)?;
            self.execute("UPDATE version SET version = $1", &[SqlValue::Int(NEWEST_VERSION)])?;
        }
        Ok(())
    }

    /// Runs statements that may take long, such as migrations.
    fn batch_execute_unlimited(&mut self, sql: &str) -> Result<(), SqlError> {
        let pool = Arc::clone(&self.pool);
        self.with_connection(|connection| {
            pool.block_on(connection.batch_execute(sql)).map_err(|e| classify_error(&e))
        })
    }

    /// Runs statements that are expected to be fast.
    fn batch_execute(pool: &PostgresPool, connection: &Object, sql: &str) -> Result<(), SqlError> {
        let cancel = connection.cancel_token();
        pool.block_on(async { pool.within_limit(&cancel, connection.batch_execute(sql)).await })
    }

    /// Runs `work` on the connection of the transaction, or on any.
    fn with_connection<T>(
        &mut self,
        work: impl FnOnce(&Object) -> Result<T, SqlError>,
    ) -> Result<T, SqlError> {
        if let Some(connection) = &self.transaction {
            return work(connection);
        }
        let connection = self.pool.acquire()?;
        let result = work(&connection);
        // After a timeout, the answer to this statement could be taken for that to the next one.
        if result.as_ref().is_err_and(is_broken) {
            PostgresPool::discard(connection);
        }
        result
    }

    /// Begins a transaction. A server that was restarted is waited for: nothing is lost yet.
    fn begin_with(&mut self, begin: &str, writes: bool) -> Result<(), SqlError> {
        let (started, mut delay) = (Instant::now(), FIRST_RETRY);
        loop {
            match self.try_begin(begin, writes) {
                Err(error)
                    if error.kind == SqlErrorKind::Unavailable
                        && started.elapsed() + delay < self.pool.restart_wait() =>
                {
                    std::thread::sleep(delay);
                    delay *= 2;
                }
                begun => return begun,
            }
        }
    }

    fn try_begin(&mut self, begin: &str, writes: bool) -> Result<(), SqlError> {
        if writes {
            self.retake_lost_locks()?;
        }
        let connection = self.pool.acquire()?;
        match Self::batch_execute(&self.pool, &connection, begin) {
            Ok(()) => self.transaction = Some(connection),
            Err(error) => {
                PostgresPool::discard(connection);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes locks again that were released with their session. Another program may have taken one meanwhile: until all
    /// are held again, every transaction fails.
    fn retake_lost_locks(&mut self) -> Result<(), SqlError> {
        for held in &mut self.locks {
            if self.pool.lock_generation() != Some(held.1) {
                held.1 = self.pool.lock(held.0)?;
            }
        }
        Ok(())
    }
}

/// Whether the connection on which an error occurred cannot be used again.
fn is_broken(error: &SqlError) -> bool {
    [SqlErrorKind::Unavailable, SqlErrorKind::Timeout].contains(&error.kind)
}

/// Parameters in the type that the client takes.
fn params<'a>(args: &'a [SqlValue<'a>]) -> Vec<&'a (dyn ToSql + Sync)> {
    args.iter().map(|cell| cell as &(dyn ToSql + Sync)).collect()
}

impl SqlConnection for Postgres {
    fn execute(&mut self, sql: &'static str, args: &[SqlValue<'_>]) -> Result<u64, SqlError> {
        let pool = Arc::clone(&self.pool);
        self.with_connection(|connection| {
            let cancel = connection.cancel_token();
            pool.block_on(pool.within_limit(&cancel, async {
                let statement = connection.prepare_cached(sql).await?;
                connection.execute(&statement, &params(args)).await
            }))
        })
    }

    fn execute_many(&mut self, sql: &'static str, rows: &[Vec<SqlValue<'_>>]) -> Result<(), SqlError> {
        let pool = Arc::clone(&self.pool);
        self.with_connection(|connection| {
            let cancel = connection.cancel_token();
            pool.block_on(async {
                let statement = pool.within_limit(&cancel, connection.prepare_cached(sql)).await?;
                // A batch hides the latency of the network; its size bounds the memory that it takes.
                for rows in rows.chunks(256) {
                    let params: Vec<_> = rows.iter().map(|row| params(row)).collect();
                    let all = params.iter().map(|params| connection.execute(&statement, params));
                    pool.within_limit(&cancel, try_join_all(all)).await?;
                }
                Ok(())
            })
        })
    }

    fn query(
        &mut self,
        sql: &'static str,
        args: &[SqlValue<'_>],
        each: &mut dyn FnMut(SqlRow<'_>) -> Result<(), SqlError>,
    ) -> Result<(), SqlError> {
        let pool = Arc::clone(&self.pool);
        if let Some(connection) = &self.transaction {
            return pool.block_on(query_rows(&pool, connection, sql, args, each));
        }
        // Pooled connections may be lost without anybody noticing: the query then runs again on another, unless the caller
        // has seen a row of it. The pool has no more than the limit of lost ones.
        let (mut has_rows, mut attempts_left) = (false, pool.connection_limit());
        loop {
            let connection = pool.acquire()?;
            let result = pool.block_on(query_rows(&pool, &connection, sql, args, &mut |row| {
                has_rows = true;
                each(row)
            }));
            if result.as_ref().is_err_and(is_broken) {
                PostgresPool::discard(connection);
            }
            match result {
                Err(error) if error.kind == SqlErrorKind::Unavailable && !has_rows && attempts_left > 0 => {
                    attempts_left -= 1;
                }
                result => return result,
            }
        }
    }

    fn begin(&mut self, writes: Option<Durability>) -> Result<(), SqlError> {
        let limit = self.pool.statement_limit().as_secs();
        match writes {
            None => self.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", false),
            // Both durabilities are synced: a crash of the server, unlike one of this program, loses what is not.
            Some(Durability::Immediate | Durability::Deferred) => {
                let limits =
                    format!("SET LOCAL statement_timeout = '{limit}s'; SET LOCAL lock_timeout = '10s'");
                self.begin_with(&format!("BEGIN; {limits}"), true)
            }
        }
    }

    fn commit(&mut self) -> Result<(), SqlError> {
        let Some(connection) = self.transaction.take() else { return Ok(()) };
        let committed = Self::batch_execute(&self.pool, &connection, "COMMIT");
        if committed.is_err() {
            PostgresPool::discard(connection);
        }
        committed
    }

    fn rollback(&mut self) {
        // If the connection is lost, the server has rolled back. A connection that does not answer is closed, and the
        // server rolls back when it notices.
        if let Some(connection) = self.transaction.take()
            && Self::batch_execute(&self.pool, &connection, "ROLLBACK").is_err()
        {
            PostgresPool::discard(connection);
        }
    }

    fn reconnects(&self) -> bool {
        true
    }

    fn lock(&mut self, key: u64) -> Result<(), SqlError> {
        self.retake_lost_locks()?;
        if !self.locks.iter().any(|held| held.0 == key) {
            self.locks.push((key, self.pool.lock(key)?));
        }
        Ok(())
    }

    fn is_locked_elsewhere(&mut self, key: u64) -> Result<bool, SqlError> {
        if self.locks.iter().any(|held| held.0 == key) {
            return Ok(false);
        }
        self.pool.is_locked(key)
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
        self.begin_with("BEGIN", false)?;
        let copied = self
            .batch_execute_unlimited(&format!("CREATE SCHEMA {name}; {copies}"))
            .and_then(|()| self.commit());
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
        TABLES.iter().try_for_each(|table| self.batch_execute_unlimited(&vacuum(table)))
    }

    fn close(&mut self) {}

    fn keep_in_use(&mut self) -> Result<(), SqlError> {
        // A server repairs its own files.
        Ok(())
    }

    fn unlock_all(&mut self) {
        for (key, generation) in std::mem::take(&mut self.locks) {
            self.pool.unlock(key, generation);
        }
    }

    fn unlock(&mut self, key: u64) {
        if let Some(at) = self.locks.iter().position(|held| held.0 == key) {
            let (key, generation) = self.locks.swap_remove(at);
            self.pool.unlock(key, generation);
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

impl Drop for Postgres {
    fn drop(&mut self) {
        self.rollback();
        self.unlock_all();
    }
}

/// Runs a query and calls `each` with every row.
async fn query_rows(
    pool: &PostgresPool,
    connection: &Object,
    sql: &'static str,
    args: &[SqlValue<'_>],
    each: &mut dyn FnMut(SqlRow<'_>) -> Result<(), SqlError>,
) -> Result<(), SqlError> {
    let cancel = connection.cancel_token();
    let rows = pool
        .within_limit(&cancel, async {
            let statement = connection.prepare_cached(sql).await?;
            connection.query_raw(&statement, params(args)).await
        })
        .await?;
    pin_mut!(rows);
    while let Some(row) = pool.within_limit(&cancel, async { rows.next().await.transpose() }).await? {
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
