//! Schedules requests to the model. It is used by as many requests at once as the model can batch. The first request of every
//! client comes before the second of any, so a client with ten requests does not hold up one with a single request. A client
//! whose answers took longer than the mean owes the difference to the others (deficit round robin): its next request waits for
//! as many more rounds.
//!
//! Three kinds of work share the model: *requests* of people and programs, *background* work (heartbeats of agents), which
//! makes way when no permit is free for a request, and *idle* work (memories), which makes way for everything.

use halo_core::model::{CancelHandle, StepFlow};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Grants permits to use the model.
pub struct ModelScheduler {
    queue: Mutex<WaitQueue>,
    queue_changed: Condvar,
    /// Places of requests that will wait for the model, but do something else first.
    reserved: Arc<AtomicUsize>,
}

impl Default for ModelScheduler {
    fn default() -> Self {
        Self::new(1)
    }
}

/// The place of a request that will wait for the model. It counts as queued until it is dropped: a request in a
/// conversation waits for the jobs before it there, and then for the model.
pub struct QueuePlace {
    reserved: Arc<AtomicUsize>,
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        self.reserved.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Permits the use of the model until it is dropped.
pub struct ModelPermit<'a> {
    scheduler: &'a ModelScheduler,
    client: String,
    since: Instant,
}

/// Permits the use of the model until somebody else needs it more: that preempts the work, and waits only for its current
/// step.
pub struct IdlePermit<'a> {
    scheduler: &'a ModelScheduler,
    id: u64,
    preempted: Arc<AtomicBool>,
}

impl IdlePermit<'_> {
    /// Whether the work is to make way.
    #[must_use]
    pub fn is_preempted(&self) -> bool {
        self.preempted.load(Ordering::SeqCst)
    }
}

/// The place of a waiting request, which leaves the queue with it: also when its callback panics.
struct WaitingTicket<'a> {
    scheduler: &'a ModelScheduler,
    ticket: u64,
}

impl Drop for WaitingTicket<'_> {
    fn drop(&mut self) {
        self.scheduler.lock().remove(self.ticket);
        self.scheduler.queue_changed.notify_all();
    }
}

/// How easily work is preempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkPriority {
    /// By every request, and by a job of its conversation.
    Idle,
    /// By a request that finds no free permit.
    Background,
}

/// Work that can be preempted.
struct PreemptibleWork {
    id: u64,
    priority: WorkPriority,
    cancel: Option<CancelHandle>,
    preempted: Arc<AtomicBool>,
}

impl PreemptibleWork {
    fn preempt(&self) {
        self.preempted.store(true, Ordering::SeqCst);
        self.cancel.iter().for_each(|cancel| cancel());
    }
}

struct WaitQueue {
    /// The most permits at a time.
    limit: usize,
    /// The clients of the running requests.
    running: Vec<String>,
    preemptible: Vec<PreemptibleWork>,
    last_ticket: u64,
    /// Tickets and clients in the order of arrival.
    waiting: Vec<(u64, String)>,
    /// Clients that were served.
    served: BTreeMap<String, ServedClient>,
    served_count: u64,
    /// The time that a request uses the model, averaged over the latest ones.
    mean_service: Option<Duration>,
}

/// What is remembered of a client that was served.
#[derive(Clone, Copy, Debug, Default)]
struct ServedClient {
    /// When it was last served, counted in requests served.
    last: u64,
    /// Time of the model that it had beyond its share.
    debt: Duration,
}

/// Less is noise: it is no debt.
const SHORTEST_ROUND: Duration = Duration::from_millis(100);

/// The most rounds that a client waits for its debt.
const MAX_DEBT_ROUNDS: u32 = 4;

/// How often a waiting request is asked whether it still waits.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The most clients in `served`.
const MAX_REMEMBERED_CLIENTS: usize = 1024;

/// The weight of the latest request in the mean time of service is one in so many.
const SERVICE_WINDOW: u32 = 8;

impl WaitQueue {
    /// The tickets in the order of service: the first of every client, then the second of every client, and among those the
    /// client that was served least recently. Running requests of a client count, and so do the rounds that it owes.
    fn service_order(&self) -> Vec<u64> {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        self.running.iter().for_each(|client| *counts.entry(client).or_default() += 1);
        let mut order: Vec<(usize, u64, u64)> = Vec::with_capacity(self.waiting.len());
        for (ticket, client) in &self.waiting {
            let served = self.served.get(client).copied().unwrap_or_default();
            let nth = counts.entry(client).or_default();
            order.push((*nth + self.rounds(served.debt), served.last, *ticket));
            *nth += 1;
        }
        order.sort_unstable();
        order.into_iter().map(|(_, _, ticket)| ticket).collect()
    }

    /// A round is as long as a request on average.
    fn round(&self) -> Duration {
        self.mean_service.unwrap_or_default().max(SHORTEST_ROUND)
    }

    /// The whole rounds in a debt.
    fn rounds(&self, debt: Duration) -> usize {
        (debt.as_nanos() / self.round().as_nanos()) as usize
    }

    /// Counts the time that a request used the model. What it had beyond the mean it owes; by each request of another client, it
    /// gets its share of a round back.
    fn settle(&mut self, client: &str, took: Duration) {
        let mean = self.mean_service.unwrap_or(took);
        let round = self.round();
        let mut active: Vec<&str> = self.running.iter().map(String::as_str).collect();
        active.extend(self.waiting.iter().map(|(_, client)| client.as_str()));
        active.push(client);
        active.sort_unstable();
        active.dedup();
        let share = round / u32::try_from(active.len()).unwrap_or(u32::MAX);
        for (other, served) in &mut self.served {
            served.debt = match other == client {
                true => (served.debt + took).saturating_sub(round),
                false => served.debt.saturating_sub(share),
            };
            // A round gets shorter when the others' requests do.
            served.debt = served.debt.min(round * MAX_DEBT_ROUNDS);
        }
        self.mean_service = Some((mean * (SERVICE_WINDOW - 1) + took) / SERVICE_WINDOW);
    }

    fn permits_in_use(&self) -> usize {
        self.running.len() + self.preemptible.len()
    }

    /// Permits that have to be returned before this request is served.
    fn count_ahead(&self, ticket: u64) -> usize {
        let before = self.service_order().iter().position(|&t| t == ticket).unwrap_or(0);
        (before + self.permits_in_use() + 1).saturating_sub(self.limit)
    }

    fn remove(&mut self, ticket: u64) {
        self.waiting.retain(|(t, _)| *t != ticket);
    }

    fn grant(&mut self, ticket: u64, client: &str) {
        self.remove(ticket);
        self.running.push(client.to_owned());
        self.served_count += 1;
        self.served.entry(client.to_owned()).or_default().last = self.served_count;
        if self.served.len() > MAX_REMEMBERED_CLIENTS {
            let oldest =
                self.served.iter().min_by_key(|(_, served)| served.last).map(|(client, _)| client.clone());
            oldest.map(|client| self.served.remove(&client));
        }
    }

    /// Preempts idle work, and as much background work as waiting requests need permits.
    fn preempt_for_requests(&self) {
        let idle = self.preemptible.iter().filter(|work| work.priority == WorkPriority::Idle);
        idle.clone().for_each(PreemptibleWork::preempt);
        let freed = idle.count();
        let missing = (self.waiting.len() + self.permits_in_use()).saturating_sub(self.limit + freed);
        let background = self.preemptible.iter().filter(|work| work.priority == WorkPriority::Background);
        background.take(missing).for_each(PreemptibleWork::preempt);
    }
}

impl ModelScheduler {
    /// A scheduler for a model that generates so many answers at once.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        let queue = WaitQueue {
            limit: limit.max(1),
            running: Vec::new(),
            preemptible: Vec::new(),
            last_ticket: 0,
            waiting: Vec::new(),
            served: BTreeMap::new(),
            served_count: 0,
            mean_service: None,
        };
        Self { queue: Mutex::new(queue), queue_changed: Condvar::new(), reserved: Arc::default() }
    }

    /// Waits for the model. While it waits, `callback` hears how many permits have to be returned before and can give up: then
    /// there is no permit.
    pub fn acquire(
        &self,
        client: &str,
        callback: &mut dyn FnMut(usize) -> StepFlow,
    ) -> Option<ModelPermit<'_>> {
        let mut queue = self.lock();
        queue.last_ticket += 1;
        let ticket = queue.last_ticket;
        queue.waiting.push((ticket, client.to_owned()));
        queue.preempt_for_requests();
        // It locks the queue when it is dropped, so no guard may be alive then.
        let waiting = WaitingTicket { scheduler: self, ticket };
        loop {
            let ahead = queue.count_ahead(ticket);
            if ahead == 0 {
                queue.grant(ticket, client);
                drop(queue);
                // Another permit may be free for the next request: the ticket tells the others.
                drop(waiting);
                return Some(ModelPermit {
                    scheduler: self,
                    client: client.to_owned(),
                    since: Instant::now(),
                });
            }
            drop(queue);
            let flow = callback(ahead);
            if flow != StepFlow::Continue {
                return None;
            }
            queue = self.lock();
            if queue.count_ahead(ticket) > 0 {
                self.queue_changed.wait_for(&mut queue, POLL_INTERVAL);
            }
        }
    }

    /// Permits idle work if nobody uses the model or waits for it. `cancel` stops that work when a request comes.
    pub fn try_acquire_idle(&self, cancel: Option<CancelHandle>) -> Option<IdlePermit<'_>> {
        let queue = self.lock();
        let is_free = queue.permits_in_use() == 0 && queue.waiting.is_empty();
        is_free.then(|| self.grant_preemptible(queue, WorkPriority::Idle, cancel))
    }

    /// Permits background work if a permit is free that no request waits for. `cancel` stops that work when a request needs
    /// the permit. Idle work makes way.
    pub fn try_acquire_background(&self, cancel: Option<CancelHandle>) -> Option<IdlePermit<'_>> {
        let queue = self.lock();
        let idle = queue.preemptible.iter().filter(|work| work.priority == WorkPriority::Idle);
        idle.for_each(PreemptibleWork::preempt);
        let is_free = queue.permits_in_use() < queue.limit && queue.waiting.is_empty();
        is_free.then(|| self.grant_preemptible(queue, WorkPriority::Background, cancel))
    }

    fn grant_preemptible(
        &self,
        mut queue: MutexGuard<'_, WaitQueue>,
        priority: WorkPriority,
        cancel: Option<CancelHandle>,
    ) -> IdlePermit<'_> {
        queue.last_ticket += 1;
        let (id, preempted) = (queue.last_ticket, Arc::<AtomicBool>::default());
        queue.preemptible.push(PreemptibleWork { id, priority, cancel, preempted: Arc::clone(&preempted) });
        IdlePermit { scheduler: self, id, preempted }
    }

    /// Preempts idle work, so that a job of its conversation can run.
    pub fn preempt_idle(&self) {
        let queue = self.lock();
        let idle = queue.preemptible.iter().filter(|work| work.priority == WorkPriority::Idle);
        idle.for_each(PreemptibleWork::preempt);
    }

    /// Requests that wait for the model, or will.
    #[must_use]
    pub fn queue_len(&self) -> usize {
        self.lock().waiting.len() + self.reserved.load(Ordering::SeqCst)
    }

    /// The permits that requests and other work use.
    #[must_use]
    pub fn permits_in_use(&self) -> usize {
        self.lock().permits_in_use()
    }

    /// The most permits at a time.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.lock().limit
    }

    /// How long a new request is likely to wait. None until a request was served.
    #[must_use]
    pub fn expected_wait(&self) -> Option<Duration> {
        let queue = self.lock();
        let queued = queue.waiting.len() + self.reserved.load(Ordering::SeqCst);
        let ahead = (queued + queue.running.len() + 1).saturating_sub(queue.limit);
        let rounds = u32::try_from(ahead.div_ceil(queue.limit)).unwrap_or(u32::MAX);
        queue.mean_service.map(|mean| mean.saturating_mul(rounds))
    }

    /// A place in the queue, if it is shorter than `max`; none if it is full.
    #[must_use]
    pub fn reserve_place(&self, max: usize) -> Option<QueuePlace> {
        let queue = self.lock();
        if queue.waiting.len() + self.reserved.load(Ordering::SeqCst) >= max {
            return None;
        }
        self.reserved.fetch_add(1, Ordering::SeqCst);
        drop(queue);
        Some(QueuePlace { reserved: Arc::clone(&self.reserved) })
    }

    /// Whether the model is in use.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.permits_in_use() > 0
    }

    fn lock(&self) -> MutexGuard<'_, WaitQueue> {
        self.queue.lock()
    }
}

impl Drop for ModelPermit<'_> {
    fn drop(&mut self) {
        let mut queue = self.scheduler.lock();
        if let Some(n) = queue.running.iter().position(|client| *client == self.client) {
            queue.running.swap_remove(n);
        }
        queue.settle(&self.client, self.since.elapsed());
        drop(queue);
        self.scheduler.queue_changed.notify_all();
    }
}

impl Drop for IdlePermit<'_> {
    fn drop(&mut self) {
        self.scheduler.lock().preemptible.retain(|work| work.id != self.id);
        self.scheduler.queue_changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    /// The order in which requests of these clients are served.
    fn serve_all(clients: &[&str]) -> Vec<String> {
        let scheduler = ModelScheduler::default();
        let (sender, served) = channel();
        std::thread::scope(|scope| {
            let first = scheduler.acquire("first", &mut |_| StepFlow::Continue).expect("the queue is empty");
            for (n, client) in clients.iter().enumerate() {
                let (sender, scheduler) = (sender.clone(), &scheduler);
                scope.spawn(move || {
                    let permit = scheduler.acquire(client, &mut |_| StepFlow::Continue);
                    let _permit = permit.expect("the request does not give up");
                    sender.send(format!("{client}{n}")).expect("the test receives");
                });
                while scheduler.queue_len() <= n {
                    std::thread::yield_now();
                }
            }
            drop(first);
        });
        drop(sender);
        served.iter().collect()
    }

    #[test]
    fn scheduler_serves_every_client_before_serving_one_twice() {
        assert_eq!(serve_all(&["a", "a", "a", "b", "c", "b"]), ["a0", "b3", "c4", "a1", "b5", "a2"]);
        assert_eq!(
            serve_all(&["first", "a"]),
            ["a1", "first0"],
            "the client that was served least recently comes first"
        );
    }

    #[test]
    fn scheduler_counts_reserved_places_as_queued() {
        let scheduler = ModelScheduler::default();
        let places: Vec<QueuePlace> = (0..3).filter_map(|_| scheduler.reserve_place(2)).collect();
        assert_eq!((places.len(), scheduler.queue_len()), (2, 2));
        drop(places);
        assert_eq!(scheduler.queue_len(), 0);
        assert!(scheduler.reserve_place(0).is_none());
    }

    #[test]
    fn scheduler_preempts_idle_work() {
        let scheduler = ModelScheduler::default();
        let cancelled = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&cancelled);
        let cancel: CancelHandle = Arc::new(move || flag.store(true, Ordering::SeqCst));
        let idle = scheduler.try_acquire_idle(Some(cancel)).expect("the model is free");
        assert!(scheduler.try_acquire_idle(None).is_none(), "one idle task runs at a time");
        assert!(!idle.is_preempted() && !cancelled.load(Ordering::SeqCst));
        std::thread::scope(|scope| {
            let request = scope.spawn(|| scheduler.acquire("a", &mut |_| StepFlow::Continue).is_some());
            // The request preempts the idle work and cancels its generation.
            while !idle.is_preempted() || !cancelled.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            drop(idle);
            assert!(request.join().expect("the thread does not panic"));
        });
        let permit = scheduler.acquire("a", &mut |_| StepFlow::Continue);
        assert!(scheduler.try_acquire_idle(None).is_none(), "a request uses the model");
        drop(permit);
        let idle = scheduler.try_acquire_idle(None).expect("the model is free again");
        assert!(!idle.is_preempted(), "an earlier request does not preempt new idle work");
        scheduler.preempt_idle();
        assert!(idle.is_preempted());
    }

    #[test]
    fn scheduler_forgets_a_waiting_request_that_panics() {
        let scheduler = ModelScheduler::default();
        let first = scheduler.acquire("a", &mut |_| StepFlow::Continue);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = scheduler.acquire("b", &mut |_| panic!("planted"));
        }));
        assert!(panicked.is_err());
        assert_eq!(scheduler.queue_len(), 0);
        drop(first);
        assert!(scheduler.acquire("c", &mut |_| StepFlow::Stop).is_some());
    }

    #[test]
    fn scheduler_reports_queue_position_and_lets_waiters_give_up() {
        let scheduler = ModelScheduler::default();
        let first = scheduler.acquire("a", &mut |_| StepFlow::Continue);
        let mut positions = Vec::new();
        let permit = scheduler.acquire("b", &mut |ahead| {
            positions.push(ahead);
            if positions.len() < 3 { StepFlow::Continue } else { StepFlow::Stop }
        });
        assert!(permit.is_none());
        assert_eq!((positions, scheduler.queue_len(), scheduler.is_busy()), (vec![1, 1, 1], 0, true));
        drop(first);
        assert!(!scheduler.is_busy());
        assert!(scheduler.acquire("b", &mut |_| StepFlow::Stop).is_some(), "the queue is empty");
    }

    #[test]
    fn scheduler_grants_as_many_permits_as_the_model_batches() {
        let scheduler = ModelScheduler::new(3);
        let mut wait = |_: usize| StepFlow::Stop;
        let first = scheduler.acquire("a", &mut wait);
        let others = [scheduler.acquire("a", &mut wait), scheduler.acquire("b", &mut wait)];
        assert!(first.is_some() && others.iter().all(Option::is_some));
        assert_eq!((scheduler.permits_in_use(), scheduler.limit()), (3, 3));
        let mut ahead = None;
        let refused = scheduler.acquire("c", &mut |n| {
            ahead = Some(n);
            StepFlow::Stop
        });
        assert!(refused.is_none() && ahead == Some(1), "{ahead:?}");
        drop(first);
        assert!(scheduler.acquire("c", &mut wait).is_some());
        assert!(scheduler.expected_wait().is_some());
    }

    /// A client that uses two permits waits behind a client that uses none.
    #[test]
    fn scheduler_counts_running_requests_of_a_client() {
        let mut queue = ModelScheduler::new(2).queue.into_inner();
        queue.running = vec!["a".into(), "a".into()];
        queue.waiting = vec![(1, "a".into()), (2, "b".into()), (3, "b".into())];
        assert_eq!(queue.service_order(), [2, 3, 1]);
        assert_eq!([1, 2, 3].map(|ticket| queue.count_ahead(ticket)), [3, 1, 2]);
    }

    #[test]
    fn scheduler_preempts_background_work_only_when_no_permit_is_free() {
        let scheduler = ModelScheduler::new(2);
        let mut go_on = |_: usize| StepFlow::Stop;
        let idle = scheduler.try_acquire_idle(None).expect("the model is free");
        let first = scheduler.try_acquire_background(None).expect("a permit is free");
        assert!(idle.is_preempted(), "background work preempts idle work");
        assert!(scheduler.try_acquire_background(None).is_none(), "both permits are in use");
        drop(idle);
        assert!(scheduler.try_acquire_idle(None).is_none(), "the model is in use");
        let request = scheduler.acquire("a", &mut go_on);
        assert!(request.is_some() && !first.is_preempted(), "a permit was free");
        assert!(scheduler.acquire("b", &mut go_on).is_none() && first.is_preempted());
    }

    /// A client whose answers take five times the mean is served as often as its share of the time allows.
    #[test]
    fn scheduler_lets_a_client_with_long_answers_wait_longer() {
        let mut queue = ModelScheduler::new(1).queue.into_inner();
        queue.mean_service = Some(Duration::from_secs(2));
        let (mut time, mut served) = (BTreeMap::<&str, u64>::new(), Vec::new());
        queue.waiting = vec![(1, "long".into()), (2, "short".into()), (3, "other".into())];
        queue.last_ticket = 3;
        for _ in 0..60 {
            let ticket = queue.service_order()[0];
            let client = queue.waiting.iter().find(|(t, _)| *t == ticket).map(|(_, client)| client.clone());
            let client = ["long", "short", "other"].into_iter().find(|&name| client.as_deref() == Some(name));
            let client = client.expect("one of the three");
            queue.grant(ticket, client);
            queue.running.clear();
            let took = if client == "long" { 10 } else { 2 };
            // Each client asks again at once.
            queue.last_ticket += 1;
            let ticket = queue.last_ticket;
            queue.waiting.push((ticket, client.to_owned()));
            queue.settle(client, Duration::from_secs(took));
            *time.entry(client).or_default() += took;
            served.push(client);
        }
        let count = |client: &str| served.iter().filter(|&&other| other == client).count();
        assert!(count("long") >= 5, "it is not starved: {served:?}");
        assert_eq!(count("short").abs_diff(count("other")), 0, "{served:?}");
        let share = time["long"] as f64 / time["short"] as f64;
        assert!((1.0..2.5).contains(&share), "5 without debts: {share}");
    }

    /// Short requests of others make rounds shorter, and a debt of long rounds would be one of hundreds.
    #[test]
    fn scheduler_limits_a_debt_when_rounds_get_shorter() {
        let mut queue = ModelScheduler::new(1).queue.into_inner();
        queue.mean_service = Some(Duration::from_secs(20));
        queue.served.insert("long".into(), ServedClient::default());
        queue.settle("long", Duration::from_secs(100));
        for _ in 0..40 {
            queue.settle("short", Duration::from_millis(200));
            let rounds = queue.rounds(queue.served["long"].debt);
            assert!(rounds <= MAX_DEBT_ROUNDS as usize + 1, "{rounds} rounds");
        }
    }
}
