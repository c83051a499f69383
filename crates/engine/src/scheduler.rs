//! Schedules requests to one model. The first request of every client comes before the second of any, so a client with ten
//! requests does not hold up one with a single request.

use halo_core::model::{CancelHandle, StepFlow};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Grants the model to one request at a time.
#[derive(Default)]
pub struct ModelScheduler {
    queue: Mutex<WaitQueue>,
    queue_changed: Condvar,
    /// Whether a request waits for the model while idle work uses it.
    idle_preempted: AtomicBool,
    /// Places of requests that will wait for the model, but do something else first.
    reserved: Arc<AtomicUsize>,
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
}

/// Permits the use of the model until a request comes: that preempts the idle work, and waits only for its current step.
pub struct IdlePermit<'a> {
    _permit: ModelPermit<'a>,
    preempted: &'a AtomicBool,
}

impl IdlePermit<'_> {
    /// Whether a request waits for the model, or a job for the conversation.
    #[must_use]
    pub fn is_preempted(&self) -> bool {
        self.preempted.load(Ordering::SeqCst)
    }
}

#[derive(Default)]
struct WaitQueue {
    busy: bool,
    last_ticket: u64,
    /// Tickets and clients in the order of arrival.
    waiting: Vec<(u64, String)>,
    /// When each client was last served, counted in requests served.
    last_served: BTreeMap<String, u64>,
    served_count: u64,
    /// Stops the idle work that uses the model.
    idle_cancel: Option<Option<CancelHandle>>,
}

/// How often a waiting request is asked whether it still waits.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The most clients in `last_served`.
const MAX_REMEMBERED_CLIENTS: usize = 1024;

impl WaitQueue {
    /// The tickets in the order of service: the first of every client, then the second of every client, and among those the
    /// client that was served least recently.
    fn service_order(&self) -> Vec<u64> {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        let mut order: Vec<(usize, u64, u64)> = Vec::with_capacity(self.waiting.len());
        for (ticket, client) in &self.waiting {
            let nth = counts.entry(client).or_default();
            order.push((*nth, self.last_served.get(client).copied().unwrap_or(0), *ticket));
            *nth += 1;
        }
        order.sort_unstable();
        order.into_iter().map(|(_, _, ticket)| ticket).collect()
    }

    /// Requests that are served before this one, including the running one.
    fn count_ahead(&self, ticket: u64) -> usize {
        let before = self.service_order().iter().position(|&t| t == ticket).unwrap_or(0);
        before + usize::from(self.busy)
    }

    fn remove(&mut self, ticket: u64) {
        self.waiting.retain(|(t, _)| *t != ticket);
    }

    fn grant(&mut self, ticket: u64, client: &str) {
        self.remove(ticket);
        self.busy = true;
        self.served_count += 1;
        self.last_served.insert(client.to_owned(), self.served_count);
        if self.last_served.len() > MAX_REMEMBERED_CLIENTS {
            let oldest = self.last_served.iter().min_by_key(|(_, at)| **at).map(|(client, _)| client.clone());
            oldest.map(|client| self.last_served.remove(&client));
        }
    }
}

impl ModelScheduler {
    /// Waits for the model. While it waits, `callback` hears how many requests are ahead and can give up: then there is no
    /// permit.
    pub fn acquire(
        &self,
        client: &str,
        callback: &mut dyn FnMut(usize) -> StepFlow,
    ) -> Option<ModelPermit<'_>> {
        let mut queue = self.lock();
        queue.last_ticket += 1;
        let ticket = queue.last_ticket;
        queue.waiting.push((ticket, client.to_owned()));
        self.preempt_idle_locked(&queue);
        loop {
            let ahead = queue.count_ahead(ticket);
            if ahead == 0 {
                queue.grant(ticket, client);
                return Some(ModelPermit { scheduler: self });
            }
            drop(queue);
            let flow = callback(ahead);
            queue = self.lock();
            if flow == StepFlow::Stop {
                queue.remove(ticket);
                drop(queue);
                self.queue_changed.notify_all();
                return None;
            }
            if queue.count_ahead(ticket) > 0 {
                self.queue_changed.wait_for(&mut queue, POLL_INTERVAL);
            }
        }
    }

    /// Permits idle work if no request uses the model or waits for it. `cancel` stops that work when a request comes.
    pub fn try_acquire_idle(&self, cancel: Option<CancelHandle>) -> Option<IdlePermit<'_>> {
        let mut queue = self.lock();
        if queue.busy || !queue.waiting.is_empty() {
            return None;
        }
        queue.busy = true;
        queue.idle_cancel = Some(cancel);
        self.idle_preempted.store(false, Ordering::SeqCst);
        Some(IdlePermit { _permit: ModelPermit { scheduler: self }, preempted: &self.idle_preempted })
    }

    pub fn preempt_idle(&self) {
        self.preempt_idle_locked(&self.lock());
    }

    fn preempt_idle_locked(&self, queue: &WaitQueue) {
        if let Some(cancel) = &queue.idle_cancel {
            self.idle_preempted.store(true, Ordering::SeqCst);
            cancel.iter().for_each(|cancel| cancel());
        }
    }

    /// Requests that wait for the model, or will.
    #[must_use]
    pub fn queue_len(&self) -> usize {
        self.lock().waiting.len() + self.reserved.load(Ordering::SeqCst)
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
        self.lock().busy
    }

    fn lock(&self) -> MutexGuard<'_, WaitQueue> {
        self.queue.lock()
    }
}

impl Drop for ModelPermit<'_> {
    fn drop(&mut self) {
        let mut queue = self.scheduler.lock();
        (queue.busy, queue.idle_cancel) = (false, None);
        drop(queue);
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
}
