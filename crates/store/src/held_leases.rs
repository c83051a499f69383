//! The leases that the stores of this process hold on a PostgreSQL server: their epochs, the statements by which transactions check
//! them, and their renewal.

use crate::lease_owner::LeaseOwner;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

/// The time of the database in milliseconds since 1970.
macro_rules! now_ms {
    () => {
        "(extract(epoch FROM clock_timestamp()) * 1000)::BIGINT"
    };
}

pub(crate) use now_ms;

/// A row that is locked is being written under, and extended by that.
const RENEW: &str = concat!(
    "UPDATE halo.lease SET until = ",
    now_ms!(),
    " + $4 FROM (SELECT l.key FROM halo.lease l JOIN unnest($1, $2) AS held (key, epoch) ON l.key = held.key AND \
     l.epoch = held.epoch WHERE l.owner = $3 FOR NO KEY UPDATE OF l SKIP LOCKED) mine WHERE lease.key = mine.key"
);
/// The leases that the stores of a process hold, by their keys.
pub(crate) struct HeldLeases {
    owner: String,
    length: Duration,
    /// No epoch: a store is just taking it.
    epochs: Mutex<BTreeMap<u64, Option<i64>>>,
    transactions: (RandomState, AtomicU64),
}

/// A lease as a transaction has found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fence {
    pub key: u64,
    pub epoch: i64,
    /// The number of the last transaction that was committed under it.
    pub written: i64,
}

pub(crate) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

impl HeldLeases {
    pub(crate) fn new(length: Duration) -> Self {
        Self {
            owner: LeaseOwner::new_here().to_string(),
            length,
            epochs: Mutex::default(),
            transactions: (RandomState::new(), AtomicU64::new(0)),
        }
    }

    /// The epoch of a lease that this process holds.
    pub(crate) fn epoch(&self, key: u64) -> Option<i64> {
        self.epochs.lock().get(&key).copied().flatten()
    }

    /// Keeps other stores of this process from taking a lease. Returns whether none of them has it.
    pub(crate) fn reserve(&self, key: u64) -> bool {
        match self.epochs.lock().entry(key) {
            Entry::Vacant(free) => {
                free.insert(None);
                true
            }
            Entry::Occupied(_) => false,
        }
    }

    /// Ends a reservation: with the epoch of a lease that was taken, or without.
    pub(crate) fn end_reservation(&self, key: u64, epoch: Option<i64>) {
        let mut epochs = self.epochs.lock();
        match epoch {
            Some(epoch) => drop(epochs.insert(key, Some(epoch))),
            None => drop(epochs.remove(&key)),
        }
    }

    pub(crate) fn owner(&self) -> &String {
        &self.owner
    }

    pub(crate) fn length(&self) -> Duration {
        self.length
    }

    /// A lease that was lost, or is given up, is not renewed.
    pub(crate) fn forget(&self, key: u64, epoch: i64) {
        let mut epochs = self.epochs.lock();
        if epochs.get(&key) == Some(&Some(epoch)) {
            epochs.remove(&key);
        }
    }

    pub(crate) fn length_ms(&self) -> i64 {
        i64::try_from(self.length.as_millis()).unwrap_or(i64::MAX)
    }

    /// A number for a transaction that no other one has.
    pub(crate) fn next_transaction(&self) -> i64 {
        self.transactions.0.hash_one(self.transactions.1.fetch_add(1, Ordering::Relaxed)).cast_signed()
    }

    /// Statements that lock the rows of leases and return key, epoch and last transaction of those that are still held with
    /// these epochs.
    pub(crate) fn fence_statements(&self, leases: &[(u64, i64)]) -> String {
        let statement = |(key, epoch): &(u64, i64)| {
            let (key, owner) = (key.cast_signed(), &self.owner);
            format!(
                "SELECT key, epoch, written FROM halo.lease WHERE key = {key} AND owner = '{owner}' AND epoch = {epoch} \
                 FOR NO KEY UPDATE;"
            )
        };
        leases.iter().map(statement).collect()
    }

    /// The statement that marks a transaction as committed under leases, and extends them; empty where there are none.
    pub(crate) fn commit_statement(&self, fences: &[Fence], transaction: i64) -> String {
        if fences.is_empty() {
            return String::new();
        }
        let keys: Vec<String> = fences.iter().map(|fence| fence.key.cast_signed().to_string()).collect();
        let (now, length) = (now_ms!(), self.length_ms());
        format!(
            "UPDATE halo.lease SET written = {transaction}, until = {now} + {length} WHERE key IN ({});",
            keys.join(", ")
        )
    }
}

/// Renews the leases of this process every third of their length, on a connection that no statement keeps busy.
pub(crate) async fn renew_leases<C>(leases: Arc<HeldLeases>, mut connect: impl FnMut() -> C)
where
    C: Future<Output = Result<Client, tokio_postgres::Error>>,
{
    let interval = leases.length / 3;
    let mut client: Option<Client> = None;
    let mut wait = interval;
    loop {
        tokio::time::sleep(wait).await;
        wait = interval;
        let (keys, epochs): (Vec<i64>, Vec<i64>) = {
            let held = leases.epochs.lock();
            held.iter().filter_map(|(key, epoch)| epoch.map(|epoch| (key.cast_signed(), epoch))).unzip()
        };
        if keys.is_empty() {
            continue;
        }
        let renew = async {
            let current = match client.take().filter(|client| !client.is_closed()) {
                Some(client) => client,
                None => connect().await?,
            };
            let length = leases.length_ms();
            let arguments: [Parameter<'_>; 4] = [
                (&keys, Type::INT8_ARRAY),
                (&epochs, Type::INT8_ARRAY),
                (&leases.owner, Type::TEXT),
                (&length, Type::INT8),
            ];
            current.execute_typed(RENEW, &arguments).await?;
            Ok::<_, tokio_postgres::Error>(current)
        };
        match tokio::time::timeout(interval, renew).await {
            Ok(Ok(current)) => client = Some(current),
            // A write under the lease renews it as well, so nothing is lost yet.
            Ok(Err(_)) | Err(_) => wait = interval / 8,
        }
    }
}
