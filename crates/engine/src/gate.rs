//! Many ask and one model answers: who is next. Everybody's first comes before anybody's second, so whoever asks ten things
//! at once holds up nobody who asks one.

use halo_core::seams::{Breaker, Flow};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The one way to the model.
#[derive(Default)]
pub struct Gate {
    line: Mutex<Line>,
    moved: Condvar,
    /// Somebody wants what is used only because nobody did.
    wanted: AtomicBool,
}

/// Leave to use the model, until it is dropped.
pub struct Pass<'a> {
    gate: &'a Gate,
}

/// Leave to use the model while nobody else wants it. Whoever does ends what is being done, and does not wait for more than
/// that.
pub struct Spare<'a> {
    _pass: Pass<'a>,
    wanted: &'a AtomicBool,
}

impl Spare<'_> {
    /// Whether somebody wants the model, or the conversation that is being used.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::SeqCst)
    }
}

#[derive(Default)]
struct Line {
    busy: bool,
    tickets: u64,
    /// Who waits, in the order in which they came.
    waiting: Vec<(u64, String)>,
    /// When each was last served, counted in those served.
    served: BTreeMap<String, u64>,
    services: u64,
    /// What ends that which is done only because nobody wanted anything.
    spare: Option<Option<Breaker>>,
}

/// How often those who wait are asked whether they still do.
const ASKED: Duration = Duration::from_millis(50);

/// How many are remembered to have been served.
const REMEMBERED: usize = 1024;

impl Line {
    /// Those who wait, in the order in which they will be served: everybody's first, then everybody's second, and of
    /// those whoever was served least recently.
    fn order(&self) -> Vec<u64> {
        let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
        let mut order: Vec<(usize, u64, u64)> = Vec::with_capacity(self.waiting.len());
        for (ticket, who) in &self.waiting {
            let nth = seen.entry(who).or_default();
            order.push((*nth, self.served.get(who).copied().unwrap_or(0), *ticket));
            *nth += 1;
        }
        order.sort_unstable();
        order.into_iter().map(|(_, _, ticket)| ticket).collect()
    }

    /// How many are served before.
    fn ahead(&self, ticket: u64) -> usize {
        let before = self.order().iter().position(|&t| t == ticket).unwrap_or(0);
        before + usize::from(self.busy)
    }

    fn leave(&mut self, ticket: u64) {
        self.waiting.retain(|(t, _)| *t != ticket);
    }

    fn serve(&mut self, ticket: u64, who: &str) {
        self.leave(ticket);
        self.busy = true;
        self.services += 1;
        self.served.insert(who.to_owned(), self.services);
        if self.served.len() > REMEMBERED {
            let oldest = self.served.iter().min_by_key(|(_, at)| **at).map(|(who, _)| who.clone());
            oldest.map(|who| self.served.remove(&who));
        }
    }
}

impl Gate {
    /// Waits to be let through. `still` hears how many are ahead, as long as there are any, and can give up: then there is
    /// no pass.
    pub fn pass(&self, who: &str, still: &mut dyn FnMut(usize) -> Flow) -> Option<Pass<'_>> {
        let mut line = self.lock();
        line.tickets += 1;
        let ticket = line.tickets;
        line.waiting.push((ticket, who.to_owned()));
        self.disturb_in(&line);
        loop {
            let ahead = line.ahead(ticket);
            if ahead == 0 {
                line.serve(ticket, who);
                return Some(Pass { gate: self });
            }
            drop(line);
            let flow = still(ahead);
            line = self.lock();
            if flow == Flow::Stop {
                line.leave(ticket);
                drop(line);
                self.moved.notify_all();
                return None;
            }
            if line.ahead(ticket) > 0 {
                line = self.moved.wait_timeout(line, ASKED).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    /// Lets through who wants nothing that could not wait, if nobody uses the model or waits for it.
    pub fn spare(&self, breaker: Option<Breaker>) -> Option<Spare<'_>> {
        let mut line = self.lock();
        if line.busy || !line.waiting.is_empty() {
            return None;
        }
        line.busy = true;
        line.spare = Some(breaker);
        self.wanted.store(false, Ordering::SeqCst);
        Some(Spare { _pass: Pass { gate: self }, wanted: &self.wanted })
    }

    /// Ends what is done only because nobody wanted anything.
    pub fn disturb(&self) {
        self.disturb_in(&self.lock());
    }

    fn disturb_in(&self, line: &Line) {
        if let Some(breaker) = &line.spare {
            self.wanted.store(true, Ordering::SeqCst);
            breaker.iter().for_each(|breaks| breaks());
        }
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.lock().waiting.len()
    }

    /// Whether somebody is being served.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.lock().busy
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut line = self.gate.lock();
        (line.busy, line.spare) = (false, None);
        drop(line);
        self.gate.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    /// Serves everybody who waits, and tells in which order.
    fn served(who: &[&str]) -> Vec<String> {
        let gate = Gate::default();
        let (tell, told) = channel();
        std::thread::scope(|scope| {
            let first = gate.pass("first", &mut |_| Flow::Continue).expect("nobody is before it");
            for (n, who) in who.iter().enumerate() {
                let (tell, gate) = (tell.clone(), &gate);
                scope.spawn(move || {
                    let _pass = gate.pass(who, &mut |_| Flow::Continue).expect("it does not give up");
                    tell.send(format!("{who}{n}")).expect("somebody listens");
                });
                while gate.waiting() <= n {
                    std::thread::yield_now();
                }
            }
            drop(first);
        });
        drop(tell);
        told.iter().collect()
    }

    #[test]
    fn everybodys_first_comes_before_anybodys_second() {
        assert_eq!(served(&["a", "a", "a", "b", "c", "b"]), ["a0", "b3", "c4", "a1", "b5", "a2"]);
        assert_eq!(served(&["first", "a"]), ["a1", "first0"], "whoever was served least recently");
    }

    #[test]
    fn what_nobody_waits_for_gives_way() {
        use std::sync::Arc;
        let gate = Gate::default();
        let broken = Arc::new(AtomicBool::new(false));
        let breaks = Arc::clone(&broken);
        let breaker: Breaker = Arc::new(move || breaks.store(true, Ordering::SeqCst));
        let spare = gate.spare(Some(breaker)).expect("nobody wants anything");
        assert!(gate.spare(None).is_none(), "one at a time");
        assert!(!spare.is_wanted() && !broken.load(Ordering::SeqCst));
        std::thread::scope(|scope| {
            let wants = scope.spawn(|| gate.pass("a", &mut |_| Flow::Continue).is_some());
            // It is wanted, and what it does is ended.
            while !spare.is_wanted() || !broken.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            drop(spare);
            assert!(wants.join().expect("nobody panics"));
        });
        let pass = gate.pass("a", &mut |_| Flow::Continue);
        assert!(gate.spare(None).is_none(), "somebody uses it");
        drop(pass);
        let spare = gate.spare(None).expect("nobody does any more");
        assert!(!spare.is_wanted(), "what was wanted before is over");
        gate.disturb();
        assert!(spare.is_wanted());
    }

    #[test]
    fn those_who_wait_hear_their_place_and_can_give_up() {
        let gate = Gate::default();
        let first = gate.pass("a", &mut |_| Flow::Continue);
        let mut heard = Vec::new();
        let none = gate.pass("b", &mut |ahead| {
            heard.push(ahead);
            if heard.len() < 3 { Flow::Continue } else { Flow::Stop }
        });
        assert!(none.is_none());
        assert_eq!((heard, gate.waiting(), gate.is_busy()), (vec![1, 1, 1], 0, true));
        drop(first);
        assert!(!gate.is_busy());
        assert!(gate.pass("b", &mut |_| Flow::Stop).is_some(), "nobody is ahead");
    }
}
