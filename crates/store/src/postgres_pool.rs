//! The connections of a process to a PostgreSQL server: a bounded pool for statements and transactions, and one that renews
//! the [leases](crate::postgres_lease) of conversations. All stores of the process share them.
//!
//! Every wait has a limit. A server that accepts a connection and then does not answer looks to the network like one that
//! thinks, so the limits are kept here and not by the network or the server alone.

use crate::held_leases::{HeldLeases, renew_leases};
use crate::postgres_tables::qualify;
use crate::postgres_tls::{PostgresTls, TlsMode, TlsParameters};
use crate::sql::{SqlError, SqlErrorKind};
use deadpool_postgres::{
    Hook, HookError, Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod,
    Runtime as PoolRuntime, Timeouts,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::error::Error as _;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{CancelToken, Config, Row};

/// Sent when a connection is opened: the server detects a client that lost its power by keepalives. Behind a pooler it affects
/// connections of the pooler, and nothing relies on it. What an administrator or the address has set stays.
const SESSION_SETUP: &str = "SELECT set_config(wanted.name, wanted.value, false) FROM (VALUES \
                             ('tcp_keepalives_idle', '15'), ('tcp_keepalives_interval', '5'), \
                             ('tcp_keepalives_count', '3')) AS wanted (name, value) \
                             JOIN pg_settings USING (name) WHERE source = 'default'";

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
    /// `connection_limit`: the most connections at once, without the one that renews leases.
    connections: usize,
    /// `pool_timeout`: how long a free connection, and a server that restarts, are waited for.
    wait: Duration,
    /// `statement_timeout`: how long a statement may make no progress.
    statement: Duration,
    /// `lease_timeout`: how long a process that is paused, or cut off, keeps its leases.
    lease: Duration,
}

impl Default for PoolLimits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { connections: 8, wait: seconds(10), statement: seconds(30), lease: seconds(15) }
    }
}

impl PoolLimits {
    /// Takes the parameters that are Halo's own out of a URL.
    fn split_from(url: &str) -> Result<(Self, TlsParameters, String), SqlError> {
        let (mut limits, mut tls) = (Self::default(), TlsParameters::default());
        let Some((address, query)) = url.split_once('?') else { return Ok((limits, tls, url.to_owned())) };
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
                "sslmode" => tls.mode = TlsMode::parse(value)?,
                "sslrootcert" => tls.root_certificates = Some(decode_percent(value)?),
                _ => others.push(pair),
            }
        }
        let url =
            if others.is_empty() { address.to_owned() } else { format!("{address}?{}", others.join("&")) };
        Ok((limits, tls, url))
    }
}

/// The connections of a process to a server.
pub(crate) struct PostgresPool {
    /// Runs the connections. Taken when the pool is dropped.
    runtime: Option<Runtime>,
    connections: Pool,
    tls: PostgresTls,
    limits: PoolLimits,
    leases: Arc<HeldLeases>,
    statements: Mutex<HashMap<&'static str, Arc<str>>>,
}

impl PostgresPool {
    fn new(url: &str) -> Result<Self, SqlError> {
        let (limits, config, tls) = parse_address(url)?;
        let runtime =
            Builder::new_multi_thread().worker_threads(1).thread_name("halo-postgres").enable_all().build();
        let runtime = runtime.map_err(|e| SqlError::unavailable(e.to_string()))?;
        let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let connections = Pool::builder(Manager::from_config(config.clone(), tls.clone(), recycling))
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
        let leases = Arc::new(HeldLeases::new(limits.lease));
        let connect = {
            let tls = tls.clone();
            move || {
                let (config, tls) = (config.clone(), tls.clone());
                async move {
                    let (client, connection) = config.connect(tls).await?;
                    tokio::spawn(connection);
                    Ok(client)
                }
            }
        };
        runtime.spawn(renew_leases(Arc::clone(&leases), connect));
        let statements = Mutex::default();
        Ok(Self { runtime: Some(runtime), connections, tls, limits, leases, statements })
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
                let (cancel, limit, tls) = (cancel.clone(), self.limits.wait, self.tls.clone());
                tokio::spawn(async move { tokio::time::timeout(limit, cancel.cancel_query(tls)).await });
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
        self.block_on(self.connect_within(self.limits.wait))
    }

    async fn connect_within(&self, limit: Duration) -> Result<Object, SqlError> {
        let timeouts = Timeouts { wait: Some(limit), create: Some(limit), recycle: Some(limit) };
        self.connections.timeout_get(&timeouts).await.map_err(|error| match error {
            PoolError::Backend(e) | PoolError::PostCreateHook(HookError::Backend(e)) => connection_error(&e),
            PoolError::Timeout(deadpool_postgres::TimeoutType::Wait) => SqlError::unavailable(format!(
                "all {} connections to the PostgreSQL server are in use: try again later, or raise connection_limit \
                 in the address of the store",
                self.limits.connections
            )),
            PoolError::Timeout(_) => {
                let seconds = limit.as_secs();
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

    /// How long a statement may take, with the wait for a connection.
    pub(crate) fn answer_limit(&self) -> Duration {
        self.limits.wait + self.limits.statement
    }

    /// A statement with the schema before each table. Statements name tables as SQLite does; a search path would be a property
    /// of a connection, and a pooler gives every transaction another one.
    pub(crate) fn qualified(&self, sql: &'static str) -> Arc<str> {
        Arc::clone(self.statements.lock().entry(sql).or_insert_with(|| qualify(sql).into()))
    }

    pub(crate) fn lease_length(&self) -> Duration {
        self.limits.lease
    }

    /// The leases that the stores of this process hold.
    pub(crate) fn leases(&self) -> &HeldLeases {
        &self.leases
    }

    /// Runs one statement on any connection, within a limit. It runs again if the connection was lost: pooled connections may
    /// be lost without anybody noticing. The pool has no more than the limit of lost ones.
    pub(crate) fn query_typed(
        &self,
        sql: &str,
        arguments: &[(&(dyn ToSql + Sync), Type)],
        limit: Duration,
    ) -> Result<Vec<Row>, SqlError> {
        let query = async {
            let mut attempts_left = self.connection_limit();
            loop {
                let connection = self.connect_within(self.limits.wait.min(limit)).await?;
                let cancel = connection.cancel_token();
                let rows = self.within_limit(&cancel, connection.query_typed(sql, arguments)).await;
                match rows {
                    Err(error) if error.breaks_connection() => {
                        Self::discard(connection);
                        if error.kind != SqlErrorKind::Unavailable || attempts_left == 0 {
                            return Err(error);
                        }
                        attempts_left -= 1;
                    }
                    rows => return rows,
                }
            }
        };
        self.block_on(async {
            let timed_out =
                || SqlError::new(SqlErrorKind::Timeout, "the PostgreSQL server has not answered in time");
            tokio::time::timeout(limit, query).await.map_err(|_| timed_out())?
        })
    }
}

/// The limits of the pool, and how its connections are opened.
fn parse_address(url: &str) -> Result<(PoolLimits, Config, PostgresTls), SqlError> {
    let (limits, tls, url) = PoolLimits::split_from(url)?;
    let (ssl_mode, tls) = tls.connector()?;
    let mut config: Config = url.parse().map_err(|e: tokio_postgres::Error| {
        let why = format!("the address of the PostgreSQL server cannot be parsed: {}", error_message(&e));
        SqlError::invalid_input(why)
    })?;
    if let Ok(password) = std::env::var("PGPASSWORD")
        && config.get_password().is_none()
    {
        config.password(password);
    }
    config.ssl_mode(ssl_mode);
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
    Ok((limits, config, tls))
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

/// The text of a parameter of a URL.
fn decode_percent(value: &str) -> Result<String, SqlError> {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let [first, tail @ ..] = rest {
        let hex = tail.get(..2).filter(|_| *first == b'%').and_then(|hex| str::from_utf8(hex).ok());
        let escaped = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { &tail[2..] } else { tail };
    }
    let invalid = |_| SqlError::invalid_input("a parameter of the PostgreSQL address is not UTF-8");
    String::from_utf8(bytes).map_err(invalid)
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
            if [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED].contains(code) =>
        {
            SqlErrorKind::Serialization
        }
        Some(code) if [SqlState::LOCK_NOT_AVAILABLE, SqlState::QUERY_CANCELED].contains(code) => {
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
        let (limits, tls, rest) = PoolLimits::split_from(url).expect("the parameters are valid");
        assert_eq!(tls, TlsParameters::default());
        assert_eq!(rest, "postgres://me@host/db?connect_timeout=4");
        let seconds = Duration::from_secs;
        let expected =
            PoolLimits { connections: 3, wait: seconds(5), statement: seconds(6), lease: seconds(7) };
        assert_eq!(limits, expected);
        let (limits, _, rest) = PoolLimits::split_from("postgres://host/db?pool_timeout=9").expect("valid");
        assert_eq!((limits.wait, rest.as_str()), (seconds(9), "postgres://host/db"));
        let url = "postgres://host/db?sslmode=verify-full&sslrootcert=/etc/my%20ca%2epem&application_name=x";
        let (_, tls, rest) = PoolLimits::split_from(url).expect("valid");
        let expected =
            TlsParameters { mode: TlsMode::VerifyFull, root_certificates: Some("/etc/my ca.pem".into()) };
        assert_eq!((tls, rest.as_str()), (expected, "postgres://host/db?application_name=x"));
        for wrong in [
            "lease_timeout=0",
            "connection_limit=0",
            "pool_timeout=-1",
            "statement_timeout=soon",
            "connection_limit",
            "sslmode=maybe",
        ] {
            let error = PoolLimits::split_from(&format!("postgres://host/db?{wrong}")).expect_err(wrong);
            assert_eq!(error.kind, SqlErrorKind::InvalidInput);
        }
    }

    /// A machine that loses its network or its power is noticed from both sides: by this one through `TCP_USER_TIMEOUT` and
    /// keepalives, by the server through the keepalives that the session asks for.
    #[test]
    fn postgres_connections_notice_a_dead_network() {
        let seconds = Duration::from_secs;
        let (_, config, _) =
            parse_address("postgres://me@host/db?statement_timeout=6&pool_timeout=5").expect("valid");
        assert_eq!(config.get_tcp_user_timeout(), Some(&seconds(6)));
        assert_eq!(config.get_connect_timeout(), Some(&seconds(5)));
        assert!(config.get_keepalives());
        assert_eq!(
            (config.get_keepalives_idle(), config.get_keepalives_interval(), config.get_keepalives_retries()),
            (seconds(15), Some(seconds(5)), Some(3))
        );
        for setting in ["tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count"] {
            assert!(SESSION_SETUP.contains(setting), "{setting}");
        }
        assert_eq!(config.get_options(), None, "a pooler refuses options");
        let own =
            parse_address("postgres://me@host/db?tcp_user_timeout=9&options=-c%20tcp_keepalives_idle%3D7");
        let (_, own, _) = own.expect("valid");
        assert_eq!(own.get_tcp_user_timeout(), Some(&seconds(9)));
        assert_eq!(own.get_options(), Some("-c tcp_keepalives_idle=7"));
    }
}
