//! The connections of a process to a PostgreSQL server: a bounded pool for statements and transactions, and one session that
//! holds the locks of conversations. All stores of the process share them.
//!
//! Every wait has a limit. A server that accepts a connection and then does not answer looks to the network like one that
//! thinks, so the limits are kept here and not by the network or the server alone.

use crate::sql::{SqlError, SqlErrorKind};
use deadpool_postgres::{
    Hook, HookError, Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod, Runtime as PoolRuntime,
};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::error::Error as _;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tokio_postgres::error::SqlState;
use tokio_postgres::{CancelToken, Client, Config, NoTls};

/// How long a lock is waited for that another process has.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);

/// The longest time between two signs of life of the lock session.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Sent when a connection is opened. The server detects a client that lost its power by keepalives.
const SESSION_OPTIONS: &str = "-c search_path=halo -c tcp_keepalives_idle=15 -c tcp_keepalives_interval=5 \
                               -c tcp_keepalives_count=3 -c idle_in_transaction_session_timeout=300000";

/// The server ends the lock session of a process that is paused for longer than some heartbeats, and other processes can
/// take its locks. Servers before version 14 lack the setting.
fn lock_session_setup(lease: Duration) -> String {
    let seconds = lease.as_secs();
    format!(
        "SELECT set_config('idle_session_timeout', '{seconds}s', false) \
         WHERE current_setting('server_version_num')::int >= 140000"
    )
}

/// An administrator may have switched synchronous commits off. A token that a client has seen must survive a crash of the
/// server; stricter modes than `on` are kept.
const SESSION_SETUP: &str = "SELECT set_config('synchronous_commit', 'on', false) \
                             WHERE current_setting('synchronous_commit') = 'off'";

/// A server with the connections of this process to it. Clones share the connections.
#[derive(Clone)]
pub struct PostgresServer {
    url: String,
    pool: Arc<OnceLock<Arc<PostgresPool>>>,
}

impl PostgresServer {
    pub(crate) fn new(url: &str) -> Self {
        Self { url: url.to_owned(), pool: Arc::default() }
    }

    /// The address without user, password and parameters.
    pub(crate) fn public_url(&self) -> String {
        let (scheme, rest) = self.url.split_once("://").unwrap_or(("postgres", ""));
        let rest = rest.split('?').next().unwrap_or_default();
        let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
        format!("{scheme}://{host}")
    }

    pub(crate) fn pool(&self) -> Result<Arc<PostgresPool>, SqlError> {
        if let Some(pool) = self.pool.get() {
            return Ok(Arc::clone(pool));
        }
        let pool = Arc::new(PostgresPool::new(&self.url)?);
        // Another thread may have been faster; its pool is used then.
        Ok(Arc::clone(self.pool.get_or_init(|| pool)))
    }
}

impl PartialEq for PostgresServer {
    fn eq(&self, other: &Self) -> bool {
        self.url == other.url
    }
}

impl Eq for PostgresServer {}

impl fmt::Debug for PostgresServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.public_url())
    }
}

/// Limits from the parameters of the URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PoolLimits {
    /// `connection_limit`: the most connections at once, without the lock session.
    connections: usize,
    /// `pool_timeout`: how long a free connection, and a server that restarts, are waited for.
    wait: Duration,
    /// `statement_timeout`: how long a statement may make no progress.
    statement: Duration,
    /// `lease_timeout`: how long a process that is paused, or cut off, keeps its locks.
    lease: Duration,
}

impl Default for PoolLimits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { connections: 8, wait: seconds(10), statement: seconds(30), lease: seconds(45) }
    }
}

impl PoolLimits {
    /// Takes the parameters that are Halo's own out of a URL.
    fn split_from(url: &str) -> Result<(Self, String), SqlError> {
        let mut limits = Self::default();
        let Some((address, query)) = url.split_once('?') else { return Ok((limits, url.to_owned())) };
        let mut others = Vec::new();
        for pair in query.split('&') {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let number = || {
                let number = value.parse::<u32>().ok().filter(|n| *n > 0);
                number.ok_or_else(|| {
                    let why = format!(
                        "the parameter {name} of the PostgreSQL address must be a positive whole number"
                    );
                    SqlError::invalid_input(why)
                })
            };
            match name {
                "connection_limit" => limits.connections = number()? as usize,
                "pool_timeout" => limits.wait = Duration::from_secs(u64::from(number()?)),
                "statement_timeout" => limits.statement = Duration::from_secs(u64::from(number()?)),
                "lease_timeout" => limits.lease = Duration::from_secs(u64::from(number()?)),
                _ => others.push(pair),
            }
        }
        let url =
            if others.is_empty() { address.to_owned() } else { format!("{address}?{}", others.join("&")) };
        Ok((limits, url))
    }
}

/// The connections of a process to a server.
pub(crate) struct PostgresPool {
    /// Runs the connections. Taken when the pool is dropped.
    runtime: Option<Runtime>,
    connections: Pool,
    config: Config,
    limits: PoolLimits,
    locks: Arc<Mutex<LockSession>>,
}

/// The session that holds the locks of this process.
#[derive(Default)]
struct LockSession {
    client: Option<Arc<Client>>,
    /// Counts the sessions: a lock of an earlier one was released with it.
    generation: u64,
    held: BTreeSet<u64>,
    /// When a server did not answer, and what the error was. Those that have waited meanwhile do not try again one after the
    /// other. A server that refuses at once is asked again, because it may be back.
    failed: Option<(Instant, SqlError)>,
}

/// How long a connection that was not answered stands for the next ones.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(1);

/// A connection that fails sooner was refused.
const REFUSAL: Duration = Duration::from_millis(250);

impl LockSession {
    fn live_client(&self) -> Option<Arc<Client>> {
        self.client.clone().filter(|client| !client.is_closed())
    }
}

impl PostgresPool {
    fn new(url: &str) -> Result<Self, SqlError> {
        let (limits, url) = PoolLimits::split_from(url)?;
        let mut config: Config = url.parse().map_err(|e: tokio_postgres::Error| {
            let why = format!("the address of the PostgreSQL server cannot be parsed: {}", error_message(&e));
            SqlError::invalid_input(why)
        })?;
        if let Ok(password) = std::env::var("PGPASSWORD")
            && config.get_password().is_none()
        {
            config.password(password);
        }
        // What the user writes comes last, so it overrides.
        let options = format!("{SESSION_OPTIONS} {}", config.get_options().unwrap_or_default());
        config.options(options.trim_end());
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(limits.wait);
        }
        if config.get_tcp_user_timeout().is_none() {
            config.tcp_user_timeout(limits.statement);
        }
        config.keepalives_idle(Duration::from_secs(15)).keepalives_interval(Duration::from_secs(5));
        config.keepalives_retries(3);
        if config.get_application_name().is_none() {
            config.application_name("halo");
        }
        let runtime =
            Builder::new_multi_thread().worker_threads(1).thread_name("halo-postgres").enable_all().build();
        let runtime = runtime.map_err(|e| SqlError::unavailable(e.to_string()))?;
        let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let connections = Pool::builder(Manager::from_config(config.clone(), NoTls, recycling))
            .max_size(limits.connections)
            .runtime(PoolRuntime::Tokio1)
            .wait_timeout(Some(limits.wait))
            .create_timeout(Some(limits.wait))
            .recycle_timeout(Some(limits.wait))
            .post_create(Hook::async_fn(|client, _| {
                Box::pin(async move { client.batch_execute(SESSION_SETUP).await.map_err(HookError::Backend) })
            }))
            .build()
            .map_err(|e| SqlError::unavailable(e.to_string()))?;
        let locks = Arc::new(Mutex::new(LockSession::default()));
        // Some signs of life may come late, or not at all.
        runtime.spawn(send_heartbeats(Arc::clone(&locks), HEARTBEAT.min(limits.lease / 4)));
        Ok(Self { runtime: Some(runtime), connections, config, limits, locks })
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("the runtime is only taken when the pool is dropped")
    }

    /// Waits for `work` without a limit.
    pub(crate) fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime().block_on(work)
    }

    /// Waits for one statement of a connection, or for the next row. A server that does not answer in time is asked to
    /// cancel the statement; its connection must not be used again.
    pub(crate) async fn within_limit<T>(
        &self,
        cancel: &CancelToken,
        work: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, SqlError> {
        match tokio::time::timeout(self.limits.statement, work).await {
            Ok(result) => result.map_err(|e| classify_error(&e)),
            Err(_) => {
                let (cancel, limit) = (cancel.clone(), self.limits.wait);
                tokio::spawn(async move { tokio::time::timeout(limit, cancel.cancel_query(NoTls)).await });
                let seconds = self.limits.statement.as_secs();
                let why = format!(
                    "the PostgreSQL server has not answered for {seconds} s: check that it is running and not overloaded"
                );
                Err(SqlError::new(SqlErrorKind::Timeout, why))
            }
        }
    }

    /// A connection that nobody else uses until it is dropped.
    pub(crate) fn acquire(&self) -> Result<Object, SqlError> {
        self.block_on(self.connections.get()).map_err(|error| match error {
            PoolError::Backend(e) | PoolError::PostCreateHook(HookError::Backend(e)) => connection_error(&e),
            PoolError::Timeout(deadpool_postgres::TimeoutType::Wait) => SqlError::unavailable(format!(
                "all {} connections to the PostgreSQL server are in use: try again later, or raise connection_limit \
                 in the address of the store",
                self.limits.connections
            )),
            PoolError::Timeout(_) => {
                let seconds = self.limits.wait.as_secs();
                let why = format!("the PostgreSQL server cannot be reached: it has not answered for {seconds} s");
                SqlError::unavailable(why)
            }
            other => SqlError::unavailable(other.to_string()),
        })
    }

    /// Removes a connection that failed from the pool.
    pub(crate) fn discard(connection: Object) {
        drop(Object::take(connection));
    }

    /// How long a server that restarts is waited for.
    pub(crate) fn restart_wait(&self) -> Duration {
        self.limits.wait
    }

    pub(crate) fn connection_limit(&self) -> usize {
        self.limits.connections
    }

    pub(crate) fn statement_limit(&self) -> Duration {
        self.limits.statement
    }

    /// The generation of the lock session; none while there is no session, and so no lock is held.
    pub(crate) fn lock_generation(&self) -> Option<u64> {
        let session = self.locks.lock();
        session.live_client().map(|_| session.generation)
    }

    /// Takes a lock, and returns the generation of the session that holds it.
    pub(crate) fn lock(&self, key: u64) -> Result<u64, SqlError> {
        let started = Instant::now();
        loop {
            if let Some(generation) = self.try_lock(key)? {
                return Ok(generation);
            }
            if started.elapsed() > LOCK_TIMEOUT {
                let why = "another Halo is using it: close that one, or wait until it is done";
                return Err(SqlError::new(SqlErrorKind::Busy, why));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn try_lock(&self, key: u64) -> Result<Option<u64>, SqlError> {
        let mut session = self.locks.lock();
        let client = self.lock_client(&mut session)?;
        // A session may take a lock twice, so locks of other stores of this process are compared here.
        if session.held.contains(&key)
            || !self.query_lock(&mut session, &client, "SELECT pg_try_advisory_lock($1)", key)?
        {
            return Ok(None);
        }
        session.held.insert(key);
        Ok(Some(session.generation))
    }

    /// Releases a lock. If this fails, the session is lost, and the lock with it.
    pub(crate) fn unlock(&self, key: u64, generation: u64) {
        let mut session = self.locks.lock();
        if session.generation != generation || !session.held.remove(&key) {
            return;
        }
        if let Some(client) = session.live_client() {
            let _ = self.query_lock(&mut session, &client, "SELECT pg_advisory_unlock($1)", key);
        }
    }

    /// Whether another store has a lock, of this process or of another.
    pub(crate) fn is_locked(&self, key: u64) -> Result<bool, SqlError> {
        let mut session = self.locks.lock();
        let client = self.lock_client(&mut session)?;
        if session.held.contains(&key) {
            return Ok(true);
        }
        // The shared lock is released at once: a program that wants the lock meanwhile tries again.
        let sql = "SELECT CASE WHEN pg_try_advisory_lock_shared($1) THEN NOT pg_advisory_unlock_shared($1) ELSE true END";
        self.query_lock(&mut session, &client, sql, key)
    }

    /// Asks the lock session. A session that fails or does not answer is given up: it may hold a lock that nobody knows of.
    fn query_lock(
        &self,
        session: &mut MutexGuard<'_, LockSession>,
        client: &Client,
        sql: &str,
        key: u64,
    ) -> Result<bool, SqlError> {
        self.query_flag(client, sql, key).inspect_err(|_| session.client = None)
    }

    /// The client of the lock session. A new session holds no locks.
    fn lock_client(&self, session: &mut MutexGuard<'_, LockSession>) -> Result<Arc<Client>, SqlError> {
        if let Some(client) = session.live_client() {
            return Ok(client);
        }
        session.client = None;
        if let Some((_, error)) = session.failed.as_ref().filter(|(at, _)| at.elapsed() < RECONNECT_INTERVAL)
        {
            return Err(error.clone());
        }
        let started = Instant::now();
        let client = self.open_lock_session().inspect_err(|error| {
            session.failed = (started.elapsed() > REFUSAL).then(|| (Instant::now(), error.clone()));
        })?;
        session.client = Some(Arc::clone(&client));
        session.generation += 1;
        session.held.clear();
        session.failed = None;
        Ok(client)
    }

    fn open_lock_session(&self) -> Result<Arc<Client>, SqlError> {
        let connected = self.block_on(async {
            let connect = async {
                let (client, connection) = self.config.connect(NoTls).await?;
                tokio::spawn(connection);
                client.batch_execute(&lock_session_setup(self.limits.lease)).await?;
                Ok::<_, tokio_postgres::Error>(client)
            };
            tokio::time::timeout(self.limits.wait, connect).await
        });
        match connected {
            Ok(client) => client.map(Arc::new).map_err(|e| connection_error(&e)),
            Err(_) => {
                let seconds = self.limits.wait.as_secs();
                let why =
                    format!("the PostgreSQL server cannot be reached: it has not answered for {seconds} s");
                Err(SqlError::unavailable(why))
            }
        }
    }

    fn query_flag(&self, client: &Client, sql: &str, key: u64) -> Result<bool, SqlError> {
        self.block_on(async {
            let row = self
                .within_limit(&client.cancel_token(), client.query_one(sql, &[&key.cast_signed()]))
                .await?;
            row.try_get(0).map_err(|e| classify_error(&e))
        })
    }
}

impl Drop for PostgresPool {
    fn drop(&mut self) {
        self.connections.close();
        // The last store may be dropped where blocking is not allowed.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Keeps the lock session alive. A session whose server does not answer is given up, so that the next lock opens another.
///
/// A thread that holds the mutex waits for the runtime, whose only worker runs this: waiting for the mutex here would stop both.
async fn send_heartbeats(locks: Arc<Mutex<LockSession>>, interval: Duration) {
    loop {
        tokio::time::sleep(interval).await;
        // A session that is in use needs no sign of life.
        let Some(client) = locks.try_lock().and_then(|session| session.live_client()) else { continue };
        let alive =
            tokio::time::timeout(interval.max(Duration::from_secs(2)), client.batch_execute("")).await;
        if matches!(alive, Ok(Ok(()))) {
            continue;
        }
        loop {
            if let Some(mut session) = locks.try_lock() {
                if session.client.as_ref().is_some_and(|current| Arc::ptr_eq(current, &client)) {
                    session.client = None;
                }
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn connection_error(error: &tokio_postgres::Error) -> SqlError {
    let problem = if error.as_db_error().is_some() { "refuses the connection" } else { "cannot be reached" };
    SqlError::unavailable(format!("the PostgreSQL server {problem}: {}", error_message(error)))
}

/// The innermost cause: the message of the server, or of the system.
pub(crate) fn error_message(error: &tokio_postgres::Error) -> String {
    if let Some(server) = error.as_db_error() {
        return server.message().to_owned();
    }
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// The kind of a PostgreSQL error.
pub(crate) fn classify_error(error: &tokio_postgres::Error) -> SqlError {
    let kind = match error.code() {
        // An error without a code is not from the server: the connection is broken.
        None => SqlErrorKind::Unavailable,
        Some(code) if *code == SqlState::DISK_FULL => SqlErrorKind::DiskFull,
        Some(code) if *code == SqlState::READ_ONLY_SQL_TRANSACTION => SqlErrorKind::ReadOnly,
        Some(code) if [SqlState::DATA_CORRUPTED, SqlState::INDEX_CORRUPTED].contains(code) => {
            SqlErrorKind::Damaged
        }
        Some(code)
            if [
                SqlState::LOCK_NOT_AVAILABLE,
                SqlState::T_R_SERIALIZATION_FAILURE,
                SqlState::T_R_DEADLOCK_DETECTED,
                SqlState::QUERY_CANCELED,
            ]
            .contains(code) =>
        {
            SqlErrorKind::Busy
        }
        Some(code)
            if [
                SqlState::ADMIN_SHUTDOWN,
                SqlState::CRASH_SHUTDOWN,
                SqlState::CANNOT_CONNECT_NOW,
                SqlState::TOO_MANY_CONNECTIONS,
                SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT,
                SqlState::IDLE_SESSION_TIMEOUT,
            ]
            .contains(code) =>
        {
            SqlErrorKind::Unavailable
        }
        Some(_) => SqlErrorKind::Other,
    };
    SqlError::new(kind, format!("PostgreSQL: {}", error_message(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn postgres_limits_are_taken_out_of_the_url() {
        let url = "postgres://me@host/db?connection_limit=3&connect_timeout=4&pool_timeout=5&statement_timeout=6&lease_timeout=7";
        let (limits, rest) = PoolLimits::split_from(url).expect("the parameters are valid");
        assert_eq!(rest, "postgres://me@host/db?connect_timeout=4");
        let seconds = Duration::from_secs;
        let expected =
            PoolLimits { connections: 3, wait: seconds(5), statement: seconds(6), lease: seconds(7) };
        assert_eq!(limits, expected);
        let (limits, rest) = PoolLimits::split_from("postgres://host/db?pool_timeout=9").expect("valid");
        assert_eq!((limits.wait, rest.as_str()), (seconds(9), "postgres://host/db"));
        for wrong in [
            "lease_timeout=0",
            "connection_limit=0",
            "pool_timeout=-1",
            "statement_timeout=soon",
            "connection_limit",
        ] {
            let error = PoolLimits::split_from(&format!("postgres://host/db?{wrong}")).expect_err(wrong);
            assert_eq!(error.kind, SqlErrorKind::InvalidInput);
        }
    }

    /// A machine that loses its network or its power is noticed from both sides: by this one through `TCP_USER_TIMEOUT` and
    /// keepalives, by the server through the keepalives that the session asks for.
    #[test]
    fn postgres_connections_notice_a_dead_network() {
        let pool =
            PostgresPool::new("postgres://me@host/db?statement_timeout=6&pool_timeout=5").expect("valid");
        let (config, seconds) = (&pool.config, Duration::from_secs);
        assert_eq!(config.get_tcp_user_timeout(), Some(&seconds(6)));
        assert_eq!(config.get_connect_timeout(), Some(&seconds(5)));
        assert!(config.get_keepalives());
        assert_eq!(
            (config.get_keepalives_idle(), config.get_keepalives_interval(), config.get_keepalives_retries()),
            (seconds(15), Some(seconds(5)), Some(3))
        );
        let options = config.get_options().expect("options");
        for option in ["tcp_keepalives_idle=15", "tcp_keepalives_interval=5", "tcp_keepalives_count=3"] {
            assert!(options.contains(option), "{option}: {options}");
        }
        let own = PostgresPool::new(
            "postgres://me@host/db?tcp_user_timeout=9&options=-c%20tcp_keepalives_idle%3D7",
        );
        let own = own.expect("valid");
        assert_eq!(own.config.get_tcp_user_timeout(), Some(&seconds(9)));
        assert!(
            own.config.get_options().is_some_and(|options| options.ends_with("-c tcp_keepalives_idle=7"))
        );
    }
}
