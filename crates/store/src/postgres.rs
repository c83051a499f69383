//! PostgreSQL, for stores that several machines share: the same tables in a schema named `halo`.
//!
//! The client is asynchronous, [`SqlConnection`] is not: each call waits on the runtime of the pool. A store has a
//! connection only while a statement or a transaction of it runs. Rows of one statement are pipelined.
//!
//! Nothing outlives a transaction on a connection: no settings, no locks, no prepared statements. So a pooler may stand between,
//! and give every transaction another connection.

use crate::held_leases::Fence;
use crate::postgres_pool::{PostgresPool, PostgresServer, classify_error, error_message};
use crate::postgres_tables::TABLES;
use crate::schema::{self, NEWEST_VERSION, POSTGRES_MIGRATIONS};
use crate::sql::{SqlConnection, SqlError, SqlErrorKind, SqlRow, SqlValue};
use deadpool_postgres::Object;
use futures_util::{StreamExt, future::try_join_all, pin_mut};
use halo_core::store::Durability;
use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_postgres::SimpleQueryMessage;
use tokio_postgres::types::{IsNull, ToSql, Type, private::BytesMut, to_sql_checked};

/// The key of the advisory lock under which programs migrate a database one after the other.
const MIGRATION_LOCK: i64 = 0x6861_6c6f;
/// How long the first new attempt waits after a connection was lost; each further one waits twice as long.
const FIRST_RETRY: Duration = Duration::from_millis(50);

/// An administrator may have switched synchronous commits off. A token that a client has seen must survive a crash of the
/// server; stricter modes than `on` are kept.
const SYNCED_COMMIT: &str = "SELECT set_config('synchronous_commit', 'on', true) \
                             WHERE current_setting('synchronous_commit') = 'off'";

/// From how many rows on a statement is prepared first. That costs a round trip.
const PREPARED_ROWS: usize = 8;

/// How long a transaction without a lease may wait for this program, for example for the file that it imports.
const UNLEASED_IDLE_LIMIT: Duration = Duration::from_secs(300);

/// A store on a server.
pub(crate) struct Postgres {
    pool: Arc<PostgresPool>,
    /// The connection of the transaction that runs.
    transaction: Option<Object>,
    /// The leases under which the last transaction that began writes, and its number.
    fences: Vec<Fence>,
    number: i64,
    /// The leases of this store, each with its epoch; none where another process has taken it over.
    leases: BTreeMap<u64, Option<i64>>,
}

impl Postgres {
    /// Connects and migrates the schema to the newest version. A missing schema is created on demand.
    pub(crate) fn connect(server: &PostgresServer, creates_schema: bool) -> Result<Self, SqlError> {
        let mut postgres = Self {
            pool: server.pool()?,
            transaction: None,
            fences: Vec::new(),
            number: 0,
            leases: BTreeMap::new(),
        };
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
        self.begin_with("BEGIN", &[])?;
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
        // The statements of migrations name no schema.
        self.batch_execute_unlimited("SET LOCAL search_path TO halo")?;
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
        if result.as_ref().is_err_and(SqlError::breaks_connection) {
            PostgresPool::discard(connection);
        }
        result
    }

    /// Begins a transaction that writes under leases. A server that was restarted is waited for: nothing is lost yet.
    fn begin_with(&mut self, begin: &str, leases: &[(u64, i64)]) -> Result<(), SqlError> {
        let (started, mut delay) = (Instant::now(), FIRST_RETRY);
        let begin = format!("{begin}; {}", self.pool.leases().fence_statements(leases));
        loop {
            match self.try_begin(&begin, leases) {
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

    fn try_begin(&mut self, begin: &str, leases: &[(u64, i64)]) -> Result<(), SqlError> {
        let connection = self.pool.acquire()?;
        let cancel = connection.cancel_token();
        let replies = self
            .pool
            .block_on(async { self.pool.within_limit(&cancel, connection.simple_query(begin)).await });
        let fences = replies.map(|replies| replies.iter().filter_map(read_fence).collect::<Vec<_>>());
        let begun = fences.and_then(|fences| {
            match leases.iter().find(|(key, _)| !fences.iter().any(|fence| fence.key == *key)) {
                None => Ok(fences),
                Some(lost) => {
                    self.mark_lost(*lost);
                    Err(SqlError::lease_lost())
                }
            }
        });
        match begun {
            Ok(fences) => (self.transaction, self.fences) = (Some(connection), fences),
            Err(error) if error.breaks_connection() => {
                PostgresPool::discard(connection);
                return Err(error);
            }
            Err(error) => {
                self.transaction = Some(connection);
                self.rollback();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Nothing is written under a lease that was lost until it is taken again.
    fn mark_lost(&mut self, (key, epoch): (u64, i64)) {
        self.pool.leases().forget(key, epoch);
        if let Some(held) = self.leases.get_mut(&key) {
            *held = None;
        }
    }
}

/// A lease that a transaction has found as it was expected.
fn read_fence(reply: &SimpleQueryMessage) -> Option<Fence> {
    let SimpleQueryMessage::Row(row) = reply else { return None };
    let number = |column: usize| row.try_get(column).ok().flatten()?.parse::<i64>().ok();
    (row.len() == 3).then_some(())?;
    Some(Fence { key: number(0)?.cast_unsigned(), epoch: number(1)?, written: number(2)? })
}

/// Parameters with their types: the server need not be asked for them first.
fn typed<'a>(args: &'a [SqlValue<'a>]) -> Vec<(&'a (dyn ToSql + Sync), Type)> {
    let type_of = |cell: &SqlValue<'_>| match cell {
        SqlValue::Int(_) => Type::INT8,
        SqlValue::Text(_) => Type::TEXT,
        SqlValue::Blob(_) => Type::BYTEA,
    };
    args.iter().map(|cell| (cell as &(dyn ToSql + Sync), type_of(cell))).collect()
}

fn untyped<'a>(args: &'a [SqlValue<'a>]) -> Vec<&'a (dyn ToSql + Sync)> {
    args.iter().map(|cell| cell as &(dyn ToSql + Sync)).collect()
}

impl SqlConnection for Postgres {
    fn execute(&mut self, sql: &'static str, args: &[SqlValue<'_>]) -> Result<u64, SqlError> {
        let pool = Arc::clone(&self.pool);
        let statement = pool.qualified(sql);
        self.with_connection(|connection| {
            let cancel = connection.cancel_token();
            pool.block_on(pool.within_limit(&cancel, connection.execute_typed(&statement, &typed(args))))
        })
    }

    fn execute_many(&mut self, sql: &'static str, rows: &[Vec<SqlValue<'_>>]) -> Result<(), SqlError> {
        let pool = Arc::clone(&self.pool);
        let statement = pool.qualified(sql);
        // A statement is prepared for the transaction only: the connection of the next one may be another.
        let prepares = self.transaction.is_some() && rows.len() >= PREPARED_ROWS;
        self.with_connection(|connection| {
            let cancel = connection.cancel_token();
            pool.block_on(async {
                let prepared = match prepares {
                    true => Some(pool.within_limit(&cancel, connection.prepare(&statement)).await?),
                    false => None,
                };
                // A batch hides the latency of the network; its size bounds the memory that it takes.
                for rows in rows.chunks(256) {
                    if let Some(prepared) = &prepared {
                        let params: Vec<_> = rows.iter().map(|row| untyped(row)).collect();
                        let all = params.iter().map(|params| connection.execute(prepared, params));
                        pool.within_limit(&cancel, try_join_all(all)).await?;
                    } else {
                        let params: Vec<_> = rows.iter().map(|row| typed(row)).collect();
                        let all = params.iter().map(|params| connection.execute_typed(&statement, params));
                        pool.within_limit(&cancel, try_join_all(all)).await?;
                    }
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
            if result.as_ref().is_err_and(SqlError::breaks_connection) {
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

    fn begin(&mut self, writes: Option<Durability>, leases: &[u64]) -> Result<(), SqlError> {
        let mut epochs = Vec::new();
        for &key in leases {
            let own = self.leases.get(&key).copied();
            // A lease of another store of this process is one of this process.
            let epoch = own.unwrap_or_else(|| self.pool.leases().epoch(key));
            epochs.push((key, epoch.ok_or_else(SqlError::lease_lost)?));
        }
        let limit = self.pool.statement_limit().as_secs();
        match writes {
            None => {
                let idle = UNLEASED_IDLE_LIMIT.as_secs();
                let begin = format!(
                    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; \
                     SET LOCAL idle_in_transaction_session_timeout = '{idle}s'"
                );
                self.begin_with(&begin, &epochs)
            }
            // Both durabilities are synced: a crash of the server, unlike one of this program, loses what is not.
            Some(Durability::Immediate | Durability::Deferred) => {
                // A process that is paused in a transaction must not keep the rows of its leases locked.
                let idle = if epochs.is_empty() { UNLEASED_IDLE_LIMIT } else { self.pool.lease_length() };
                let begin = format!(
                    "BEGIN; SET LOCAL statement_timeout = '{limit}s'; SET LOCAL lock_timeout = '10s'; \
                     SET LOCAL idle_in_transaction_session_timeout = '{}ms'; {SYNCED_COMMIT}",
                    idle.as_millis()
                );
                self.begin_with(&begin, &epochs)
            }
        }
    }

    fn commit(&mut self) -> Result<(), SqlError> {
        let Some(connection) = self.transaction.take() else { return Ok(()) };
        self.number = self.pool.leases().next_transaction();
        let commit = format!("{}COMMIT", self.pool.leases().commit_statement(&self.fences, self.number));
        let committed = Self::batch_execute(&self.pool, &connection, &commit);
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

    fn was_committed(&mut self) -> Result<bool, SqlError> {
        let Some(before) = self.fences.first().copied() else { return Ok(false) };
        // The server may still be at work on the lost connection: the row is locked until that has ended.
        self.begin_with("BEGIN; SET LOCAL lock_timeout = '10s'", &[(before.key, before.epoch)])?;
        let now = self.fences.first().copied();
        self.rollback();
        Ok(now.is_some_and(|now| now.written == self.number))
    }

    fn take_lease(&mut self, key: u64) -> Result<(), SqlError> {
        if let Some(Some(epoch)) = self.leases.get(&key).copied() {
            if self.pool.extend_lease(key, epoch)? {
                return Ok(());
            }
            self.mark_lost((key, epoch));
        }
        let epoch = self.pool.take_lease(key)?;
        self.leases.insert(key, Some(epoch));
        Ok(())
    }

    fn ensure_lease(&mut self, key: u64) -> Result<bool, SqlError> {
        match self.leases.get(&key) {
            Some(Some(_)) => Ok(false),
            Some(None) => Err(SqlError::lease_lost()),
            None if self.pool.leases().epoch(key).is_some() => Ok(false),
            None => self.take_lease(key).map(|()| true),
        }
    }

    fn is_leased_elsewhere(&mut self, key: u64) -> Result<bool, SqlError> {
        if matches!(self.leases.get(&key), Some(Some(_))) {
            return Ok(false);
        }
        self.pool.lease_holder(key).map(|holder| holder.is_some())
    }

    fn lease_holder(&mut self, key: u64) -> Result<u32, SqlError> {
        self.pool.lease_holder(key).map(Option::unwrap_or_default)
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
        self.begin_with("BEGIN", &[])?;
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

    fn release_all_leases(&mut self) {
        let held = std::mem::take(&mut self.leases);
        let held: Vec<(u64, i64)> = held.into_iter().filter_map(|(key, epoch)| Some((key, epoch?))).collect();
        self.pool.release_leases(&held);
    }

    fn release_lease(&mut self, key: u64) {
        if let Some(Some(epoch)) = self.leases.remove(&key) {
            self.pool.release_leases(&[(key, epoch)]);
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
        self.release_all_leases();
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
    let (cancel, statement) = (connection.cancel_token(), pool.qualified(sql));
    let rows = pool
        .within_limit(&cancel, async { connection.query_typed_raw(&statement, typed(args)).await })
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
