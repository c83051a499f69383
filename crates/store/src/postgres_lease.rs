//! Leases of conversations and worlds on PostgreSQL: one row each, with its owner, its epoch and its end.
//!
//! Who takes a lease raises its epoch. Every transaction that writes under it checks the epoch while it holds a lock on the
//! row, so a process that was paused, or cut off, for longer than its lease changes nothing afterwards. Time is that of the
//! database alone. Nothing depends on a connection: a pooler may give every transaction another one.

use crate::held_leases::{Parameter, now_ms};
use crate::lease_owner::LeaseOwner;
use crate::postgres_pool::PostgresPool;
use crate::sql::SqlError;
use std::time::{Duration, Instant};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

/// How long a lease is waited for whose owner is alive.
const WAIT: Duration = Duration::from_secs(3);

/// How long a lease is waited for between two attempts.
const POLL: Duration = Duration::from_millis(50);

/// How long giving up a lease may take: it ends by itself.
const RELEASE_LIMIT: Duration = Duration::from_secs(2);

/// A row that is locked is in use: its owner is writing, or another process is just taking it.
const TAKE: &str = concat!(
    "UPDATE halo.lease SET owner = $2, epoch = lease.epoch + 1, until = ",
    now_ms!(),
    " + $3 FROM (SELECT key FROM halo.lease WHERE key = $1 AND until < ",
    now_ms!(),
    " FOR NO KEY UPDATE SKIP LOCKED) free WHERE lease.key = free.key RETURNING lease.epoch"
);
const READ: &str =
    concat!("SELECT owner, epoch, until, until - ", now_ms!(), " FROM halo.lease WHERE key = $1");
const INSERT: &str = concat!(
    "INSERT INTO halo.lease (key, owner, epoch, until, written) VALUES ($1, $2, 1, ",
    now_ms!(),
    " + $3, 0) ON CONFLICT (key) DO NOTHING RETURNING epoch"
);
const TAKE_FROM_DEAD: &str = concat!(
    "UPDATE halo.lease SET owner = $2, epoch = epoch + 1, until = ",
    now_ms!(),
    " + $3 WHERE key = $1 AND owner = $4 AND epoch = $5 RETURNING epoch"
);
const EXTEND: &str = concat!(
    "UPDATE halo.lease SET until = ",
    now_ms!(),
    " + $3 WHERE key = $1 AND owner = $2 AND epoch = $4 RETURNING epoch"
);
const RELEASE: &str = "UPDATE halo.lease SET until = 0 FROM unnest($1, $2) AS held (key, epoch) \
                       WHERE lease.key = held.key AND lease.epoch = held.epoch AND lease.owner = $3";

/// A lease as it is stored.
pub(crate) struct StoredLease {
    owner: String,
    epoch: i64,
    until: i64,
    left_ms: i64,
}

impl PostgresPool {
    /// Takes a lease, and returns its epoch. That of a process which has ended without giving it up is taken when that is
    /// proved or when it has expired.
    pub(crate) fn take_lease(&self, key: u64) -> Result<i64, SqlError> {
        let leases = self.leases();
        let (started, mut first_seen) = (Instant::now(), None);
        loop {
            let mut owner_is_alive = true;
            if leases.reserve(key) {
                match self.try_take(key) {
                    Ok(Ok(epoch)) => {
                        leases.end_reservation(key, Some(epoch));
                        return Ok(epoch);
                    }
                    taken => {
                        leases.end_reservation(key, None);
                        if let Some(lease) = taken?.err().flatten() {
                            let seen = (lease.epoch, lease.until);
                            // Only a process that runs renews its lease.
                            owner_is_alive = *first_seen.get_or_insert(seen) != seen
                                || LeaseOwner::is_this_process(&lease.owner);
                        }
                    }
                }
            }
            let limit = if owner_is_alive { WAIT } else { leases.length() + WAIT };
            if started.elapsed() > limit {
                return Err(SqlError::leased(""));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Takes a lease that is free, or returns who has it, if that is known.
    fn try_take(&self, key: u64) -> Result<Result<i64, Option<StoredLease>>, SqlError> {
        let (leases, id) = (self.leases(), key.cast_signed());
        let length = leases.length_ms();
        let arguments: [Parameter<'_>; 3] =
            [(&id, Type::INT8), (leases.owner(), Type::TEXT), (&length, Type::INT8)];
        if let Some(epoch) = self.query_epoch(TAKE, &arguments)? {
            return Ok(Ok(epoch));
        }
        let Some(lease) = self.stored_lease(key)? else {
            return Ok(self.query_epoch(INSERT, &arguments)?.ok_or(None));
        };
        // A reply of the server may have been lost when this process took it.
        if lease.owner != *leases.owner() && !LeaseOwner::has_ended(&lease.owner) {
            return Ok(Err(Some(lease)));
        }
        let [key, owner, length] = arguments;
        let arguments = [key, owner, length, (&lease.owner, Type::TEXT), (&lease.epoch, Type::INT8)];
        Ok(self.query_epoch(TAKE_FROM_DEAD, &arguments)?.ok_or(Some(lease)))
    }

    /// Extends a lease. Returns false if another process has taken it over.
    pub(crate) fn extend_lease(&self, key: u64, epoch: i64) -> Result<bool, SqlError> {
        let (leases, id) = (self.leases(), key.cast_signed());
        let length = leases.length_ms();
        let arguments: [Parameter<'_>; 4] =
            [(&id, Type::INT8), (leases.owner(), Type::TEXT), (&length, Type::INT8), (&epoch, Type::INT8)];
        Ok(self.query_epoch(EXTEND, &arguments)?.is_some())
    }

    /// Gives up leases. If that fails, they expire.
    pub(crate) fn release_leases(&self, held: &[(u64, i64)]) {
        if held.is_empty() {
            return;
        }
        let leases = self.leases();
        held.iter().for_each(|(key, epoch)| leases.forget(*key, *epoch));
        let (keys, epochs): (Vec<i64>, Vec<i64>) =
            held.iter().map(|(key, epoch)| (key.cast_signed(), *epoch)).unzip();
        let arguments: [Parameter<'_>; 3] =
            [(&keys, Type::INT8_ARRAY), (&epochs, Type::INT8_ARRAY), (leases.owner(), Type::TEXT)];
        let _ = self.query_typed(RELEASE, &arguments, RELEASE_LIMIT);
    }

    /// The process that has a lease: its number, or 0 where it runs on another machine.
    pub(crate) fn lease_holder(&self, key: u64) -> Result<Option<u32>, SqlError> {
        let lease = self.stored_lease(key)?;
        let held = lease.filter(|lease| lease.left_ms > 0 && !LeaseOwner::has_ended(&lease.owner));
        Ok(held.map(|lease| LeaseOwner::local_process(&lease.owner).unwrap_or(0)))
    }

    fn stored_lease(&self, key: u64) -> Result<Option<StoredLease>, SqlError> {
        let rows = self.query_typed(READ, &[(&key.cast_signed(), Type::INT8)], self.answer_limit())?;
        let read = |row: &Row| {
            Ok(StoredLease {
                owner: row.try_get(0)?,
                epoch: row.try_get(1)?,
                until: row.try_get(2)?,
                left_ms: row.try_get(3)?,
            })
        };
        rows.first()
            .map(read)
            .transpose()
            .map_err(|e: tokio_postgres::Error| SqlError::damaged(e.to_string()))
    }

    fn query_epoch(&self, sql: &str, arguments: &[Parameter<'_>]) -> Result<Option<i64>, SqlError> {
        let rows = self.query_typed(sql, arguments, self.answer_limit())?;
        let epoch = rows.first().map(|row| row.try_get(0)).transpose();
        epoch.map_err(|e: tokio_postgres::Error| SqlError::damaged(e.to_string()))
    }
}
