//! Many conversations and one model. Each conversation that is open has a thread of its own, so that nothing waits but for
//! its own kind: what changes a conversation waits for the answer that is being given there, an answer waits for the model,
//! and whoever only looks waits for nothing.

use crate::board::{Board, Running};
use crate::event::{Event, Summary};
use crate::gate::Gate;
use crate::session::Session;
use crate::turn::Say;
use halo_core::seams::{Fault, Flow, Sampling, SeamError};
use halo_core::token::ChunkId;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How a conversation is opened; the second is told how far reading it anew has come.
pub type Opener =
    dyn Fn(&str, &mut dyn FnMut(usize, usize)) -> Result<Session, SeamError> + Send + Sync + 'static;

/// Whoever hears of everything, in every conversation. It must not wait for anything.
pub trait Audience: Send + Sync {
    /// Something has happened. The board shows it already; numbers count up, through all conversations.
    fn hear(&self, conversation: &str, number: u64, event: &Event, board: &Board);
}

/// The conversations that are open.
pub struct Host {
    shared: Arc<Shared>,
}

type Opened = Result<Arc<Desk>, SeamError>;

/// How long conversations stay open, and how many.
#[derive(Clone, Copy, Debug)]
pub struct HostLimits {
    /// How long one stays open that nobody wants anything of.
    pub idle: Duration,
    /// How many are open at once; the least recently used one is closed for another.
    pub open: usize,
}

/// How long a conversation waits for another one to be closed.
const FULL: Duration = Duration::from_secs(30);

struct Shared {
    desks: Mutex<BTreeMap<String, Arc<OnceLock<Opened>>>>,
    limits: HostLimits,
    open: Box<Opener>,
    gate: Gate,
    audience: Arc<dyn Audience>,
    /// Everything is to end.
    ending: AtomicBool,
    /// How many events have been told, in all conversations.
    events: AtomicU64,
    /// How often a conversation was used.
    uses: AtomicU64,
}

/// A conversation that is open, for those who want something of it.
pub struct Desk {
    jobs: Mutex<Option<Sender<Job>>>,
    board: Arc<Board>,
    halt: Arc<AtomicBool>,
    notices: Vec<String>,
    /// Jobs that are on their way.
    pending: Arc<AtomicUsize>,
    /// Jobs that are on their way or being done.
    unfinished: AtomicUsize,
    /// When it was last used, counted in uses.
    used: AtomicU64,
    shared: Arc<Shared>,
}

type Job = Box<dyn FnOnce(&mut Session, &Teller<'_>) + Send>;

/// Tells everybody what happens in one conversation.
pub struct Teller<'a> {
    name: &'a str,
    shared: &'a Shared,
    board: &'a Arc<Board>,
    halt: &'a AtomicBool,
    pending: &'a AtomicUsize,
}

/// Something to say, and how it is to be answered.
pub struct Request {
    /// What is said.
    pub say: Say,
    /// On whose behalf: those who ask much wait behind those who ask little.
    pub who: String,
    /// How the answer is drawn, where it is not as the settings have it.
    pub sampling: Option<Sampling>,
    /// A number of the client's for the message, kept with it: a message that is sent again is known by it.
    pub id: Option<String>,
}

/// Whoever asked: hears of each event, and can stop it.
pub type Asker = Box<dyn FnMut(&Event) -> Flow + Send>;

impl Host {
    /// A host that opens conversations in that way, and closes those that nobody has used for a while.
    #[must_use]
    pub fn new(open: Box<Opener>, audience: Arc<dyn Audience>, limits: HostLimits) -> Self {
        let shared = Arc::new(Shared {
            desks: Mutex::default(),
            limits: HostLimits { open: limits.open.max(1), ..limits },
            open,
            gate: Gate::default(),
            audience,
            ending: AtomicBool::new(false),
            events: AtomicU64::new(0),
            uses: AtomicU64::new(0),
        });
        Self { shared }
    }

    /// The way to the model, for those who use it without a conversation.
    #[must_use]
    pub fn gate(&self) -> &Gate {
        &self.shared.gate
    }

    /// The number of the last event.
    #[must_use]
    pub fn last_event(&self) -> u64 {
        self.shared.events.load(Ordering::SeqCst)
    }

    /// The next number for an event that is of no conversation.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.shared.events.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// The conversation of that name: opens it, unless it is.
    ///
    /// # Errors
    /// When it cannot be opened; the next try begins anew.
    pub fn desk(&self, name: &str) -> Result<Arc<Desk>, SeamError> {
        let asked = Instant::now();
        loop {
            let Some(place) = self.place(name) else {
                if asked.elapsed() > FULL {
                    let why = format!(
                        "{} conversations are open and all of them are busy: try again later",
                        self.shared.limits.open
                    );
                    return Err(SeamError::new("opening the conversation", why).by(Fault::Again));
                }
                std::thread::sleep(Duration::from_millis(10));
                continue;
            };
            let opened = place.get_or_init(|| self.open(name)).clone();
            // While this is held, none is closed that somebody has got.
            let mut desks = self.shared.lock();
            if let Ok(desk) = &opened
                && desk.is_open()
            {
                desk.used.store(self.shared.uses.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
                return opened;
            }
            // It failed, or was closed; whoever comes next finds no trace of it.
            if desks.get(name).is_some_and(|there| Arc::ptr_eq(there, &place)) {
                desks.remove(name);
            }
            drop(desks);
            opened?;
        }
    }

    /// A place for a conversation; none while as many are open as may be, and all of them are used.
    fn place(&self, name: &str) -> Option<Arc<OnceLock<Opened>>> {
        let mut desks = self.shared.lock();
        if let Some(place) = desks.get(name) {
            return Some(Arc::clone(place));
        }
        if desks.len() >= self.shared.limits.open {
            let unused = (desks.iter())
                .filter_map(|(name, place)| {
                    let desk = place.get()?.as_ref().ok()?;
                    desk.is_unused().then(|| (desk.used.load(Ordering::SeqCst), name.clone()))
                })
                .min()?;
            if let Some(Ok(desk)) = desks.remove(&unused.1).and_then(|place| place.get().cloned()) {
                desk.close();
                self.shared.gate.disturb();
            }
        }
        Some(Arc::clone(desks.entry(name.to_owned()).or_default()))
    }

    /// The conversation of that name, if it is open.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<Arc<Desk>> {
        let desks = self.shared.lock();
        let desk = desks.get(name)?.get()?.clone().ok()?;
        desk.is_open().then_some(desk)
    }

    /// Those that are open.
    #[must_use]
    pub fn open_now(&self) -> Vec<(String, Arc<Desk>)> {
        let desks = self.shared.lock();
        let open = desks.iter().filter_map(|(name, desk)| Some((name.clone(), desk.get()?.clone().ok()?)));
        open.filter(|(_, desk)| desk.is_open()).collect()
    }

    /// Closes a conversation, after what it has been asked to do; the next who wants it opens it again.
    pub fn close(&self, name: &str) {
        let desk = self.shared.lock().remove(name);
        if let Some(Ok(desk)) = desk.and_then(|desk| desk.get().cloned()) {
            desk.close();
            // What it does because nobody wanted anything is not waited for.
            self.shared.gate.disturb();
        }
    }

    /// Ends every answer, stores what was said of it, and closes all; what was still waiting is not begun.
    pub fn close_all(&self) {
        self.shared.ending.store(true, Ordering::SeqCst);
        let names: Vec<String> = self.shared.lock().keys().cloned().collect();
        let desks: Vec<Arc<Desk>> = self.open_now().into_iter().map(|(_, desk)| desk).collect();
        desks.iter().for_each(|desk| desk.stop());
        self.shared.gate.disturb();
        names.iter().for_each(|name| self.close(name));
        // The thread owns the session: when its channel is gone, so is it.
        for desk in desks {
            while !desk.is_gone() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    fn open(&self, name: &str) -> Opened {
        let (jobs, todo) = channel();
        let (opened, wait) = channel();
        let (shared, named) = (Arc::clone(&self.shared), name.to_owned());
        let work = move || {
            let session = catch_unwind(AssertUnwindSafe(|| (shared.open)(&named, &mut |_, _| {})));
            let mut session = match session.unwrap_or_else(|_| Err(mistake())) {
                Ok(session) => session,
                Err(why) => return drop(opened.send(Err(why))),
            };
            let board = session.watched(shared.events.load(Ordering::SeqCst));
            let desk = Desk {
                jobs: Mutex::new(Some(jobs)),
                board: Arc::clone(&board),
                halt: Arc::default(),
                notices: session.notices(),
                pending: Arc::default(),
                unfinished: AtomicUsize::new(0),
                used: AtomicU64::new(shared.uses.fetch_add(1, Ordering::SeqCst)),
                shared: Arc::clone(&shared),
            };
            let desk = Arc::new(desk);
            let (halt, pending) = (Arc::clone(&desk.halt), Arc::clone(&desk.pending));
            if opened.send(Ok(Arc::clone(&desk))).is_ok() {
                let teller =
                    Teller { name: &named, shared: &shared, board: &board, halt: &halt, pending: &pending };
                attend(session, &todo, &teller, &desk);
            }
        };
        let started = std::thread::Builder::new().name("halo-talk".into()).spawn(work);
        started.map_err(|e| SeamError::new("opening the conversation", e.to_string()))?;
        wait.recv().unwrap_or_else(|_| Err(mistake()))
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Arc<OnceLock<Opened>>>> {
        self.desks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What became of a quiet moment.
enum Lull {
    /// Something was done, or begun and left: there may be more.
    Used,
    /// The model was wanted elsewhere.
    Busy,
    /// There was nothing to do, or it failed and is not tried again until something has happened.
    Empty,
}

/// How long one waits for a model that is wanted elsewhere.
const ELSEWHERE: Duration = Duration::from_millis(500);

/// Vectors that are made between two looks at what is wanted.
const EMBEDDED_AT_ONCE: usize = 4;

/// Does what is done while nobody wants anything of the model.
fn lull(session: &mut Session, teller: &Teller<'_>, quiet: Duration) -> Lull {
    let pending = || teller.pending.load(Ordering::SeqCst) > 0;
    if !pending() && !teller.shared.ending.load(Ordering::SeqCst) {
        match session.embed_some(EMBEDDED_AT_ONCE) {
            // An answer that is being generated has the processor.
            Ok(true) => return if teller.shared.gate.is_busy() { Lull::Busy } else { Lull::Used },
            Ok(false) => {}
            Err(why) => {
                teller.tell(&Event::Notice(format!("nothing is embedded: {why}")), |_| {});
                return Lull::Empty;
            }
        }
    }
    let Some(rules) = session.rules.memory else { return Lull::Empty };
    let Some(spare) = teller.shared.gate.spare(session.model.breaker()) else { return Lull::Busy };
    // What is on its way came before the model was taken, or ends what it does.
    let wanted = || spare.is_wanted() || pending() || teller.shared.ending.load(Ordering::SeqCst);
    let tell = |event: Event| teller.tell(&event, |_| {});
    let used = session.quiet(&wanted, &mut |event| tell(event)).and_then(|used| {
        let due = rules.reflect.is_some_and(|r| quiet >= r.after && session.unreflected() >= r.messages);
        if used || !due {
            return Ok(used);
        }
        let formed = session.reflect(&wanted)?;
        formed.into_iter().for_each(|id| tell(Event::Memory { id, what: "formed" }));
        Ok(wanted())
    });
    match used {
        Ok(true) => Lull::Used,
        Ok(false) => Lull::Empty,
        Err(why) => {
            tell(Event::Notice(format!("a memory was not formed: {why}")));
            Lull::Empty
        }
    }
}

/// Does one job after the other, until nobody wants anything any more.
fn attend(mut session: Session, todo: &Receiver<Job>, teller: &Teller<'_>, desk: &Arc<Desk>) {
    let idle = teller.shared.limits.idle;
    let (mut used, mut restless, mut held) = (Instant::now(), true, true);
    let reflects = session.rules.memory.and_then(|rules| rules.reflect).map(|reflects| reflects.after);
    loop {
        let quiet = catch_unwind(AssertUnwindSafe(|| {
            let due = restless && (held || take(&mut session, teller));
            held |= due;
            due.then(|| lull(&mut session, teller, used.elapsed()))
        }));
        let Ok(quiet) = quiet else {
            desk.close();
            return;
        };
        let wait = match quiet {
            Some(Lull::Used) => Duration::ZERO,
            Some(Lull::Busy) => ELSEWHERE,
            Some(Lull::Empty) | None => {
                restless = false;
                let quiet = used.elapsed();
                let looks_back = reflects.and_then(|after| after.checked_sub(quiet));
                looks_back.unwrap_or(idle).min(idle.saturating_sub(quiet))
            }
        };
        // Nothing is being done here: other programs may use the conversation.
        if held && !restless && teller.pending.load(Ordering::SeqCst) == 0 {
            session.release();
            held = false;
        }
        let job = match todo.recv_timeout(wait) {
            Ok(job) => job,
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) if restless || used.elapsed() < idle => {
                // It has been quiet for as long as it takes to look back.
                restless |= reflects.is_some_and(|after| used.elapsed() >= after);
                continue;
            }
            Err(RecvTimeoutError::Timeout) => {
                let mut desks = teller.shared.lock();
                if desk.is_unused() {
                    desk.close();
                    if desks
                        .get(teller.name)
                        .and_then(|place| place.get())
                        .is_some_and(|opened| opened.as_ref().is_ok_and(|there| Arc::ptr_eq(there, desk)))
                    {
                        desks.remove(teller.name);
                    }
                    return;
                }
                drop(desks);
                used = Instant::now();
                continue;
            }
        };
        teller.pending.fetch_sub(1, Ordering::SeqCst);
        if teller.shared.ending.load(Ordering::SeqCst) {
            return;
        }
        let done = catch_unwind(AssertUnwindSafe(|| {
            if !held {
                held = take(&mut session, teller);
            }
            teller.halt.store(false, Ordering::SeqCst);
            job(&mut session, teller);
        }));
        desk.unfinished.fetch_sub(1, Ordering::SeqCst);
        if done.is_err() {
            // What is stored is whole; what is in memory may not be.
            teller.tell(&Event::Failed(mistake().to_string()), |running| *running = None);
            desk.close();
            return;
        }
        (used, restless) = (Instant::now(), true);
    }
}

/// Takes the right to change a conversation again, and opens it again where another program has changed it meanwhile. Returns
/// whether that right is there; without it, every change says why it cannot be done.
fn take(session: &mut Session, teller: &Teller<'_>) -> bool {
    if session.hold() {
        return session.check_held().is_ok();
    }
    match (teller.shared.open)(teller.name, &mut |_, _| {}) {
        Ok(mut again) => {
            again.recorders = std::mem::take(&mut session.recorders);
            again.watched_on(teller.board);
            *session = again;
            teller.changed("changed by another program", Vec::new());
            true
        }
        Err(why) => {
            session.refuse(why);
            false
        }
    }
}

fn mistake() -> SeamError {
    SeamError::new(
        "talking",
        "a mistake in this program; what was said is stored, and the conversation can be opened again",
    )
}

fn closed() -> SeamError {
    SeamError::new("asking for the conversation", "it was closed just now; ask again").by(Fault::Again)
}

impl Desk {
    /// How the conversation stands.
    #[must_use]
    pub fn board(&self) -> &Board {
        &self.board
    }

    /// What the user should know of how it was opened.
    #[must_use]
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Does something with the conversation, after what is being done there.
    ///
    /// # Errors
    /// When it has been closed meanwhile.
    pub fn send(
        &self,
        job: impl FnOnce(&mut Session, &Teller<'_>) + Send + 'static,
    ) -> Result<(), SeamError> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let jobs = jobs.as_ref().ok_or_else(closed)?;
        self.pending.fetch_add(1, Ordering::SeqCst);
        self.unfinished.fetch_add(1, Ordering::SeqCst);
        jobs.send(Box::new(job)).map_err(|_| closed())?;
        self.shared.gate.disturb();
        Ok(())
    }

    /// Says something; `asker` hears of all that follows, and `done` what came of it.
    ///
    /// # Errors
    /// When it has been closed meanwhile.
    pub fn ask(
        &self,
        request: Request,
        mut asker: Asker,
        done: impl FnOnce(Result<Summary, SeamError>) + Send + 'static,
    ) -> Result<(), SeamError> {
        self.send(move |session, teller| done(teller.turn(session, request, &mut *asker)))
    }

    /// Stops the answer that is being given; what was said of it stays.
    pub fn stop(&self) {
        self.halt.store(true, Ordering::SeqCst);
    }

    fn is_open(&self) -> bool {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Whether nobody has got it, beside the host and its own thread, nothing is to be done, and its answers are not recorded.
    fn is_unused(self: &Arc<Self>) -> bool {
        let recorded = self.board.look().standing.recording;
        self.unfinished.load(Ordering::SeqCst) == 0 && Arc::strong_count(self) <= 2 && !recorded
    }

    /// Whether its thread has let go of it.
    fn is_gone(&self) -> bool {
        Arc::strong_count(&self.board) == 1
    }

    fn close(&self) {
        *self.jobs.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Teller<'_> {
    /// Tells everybody of something that was done.
    pub fn changed(&self, what: &'static str, chunks: Vec<ChunkId>) {
        self.tell(&Event::Changed { what, chunks }, |_| {});
    }

    /// Whether what is being done here is to be stopped: somebody asked for that, or the program ends.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.halt.load(Ordering::SeqCst) || self.shared.ending.load(Ordering::SeqCst)
    }

    fn tell(&self, event: &Event, change: impl FnOnce(&mut Option<Running>)) {
        let number = self.board.count(change, || self.shared.events.fetch_add(1, Ordering::SeqCst) + 1);
        self.shared.audience.hear(self.name, number, event, self.board);
    }

    /// One turn, when the model is free for it; `asker` hears of everything, and can stop it.
    ///
    /// # Errors
    /// When it was stopped before its turn came, or a part fails.
    pub fn turn(
        &self,
        session: &mut Session,
        request: Request,
        asker: &mut dyn FnMut(&Event) -> Flow,
    ) -> Result<Summary, SeamError> {
        let Request { say, who, sampling, id } = request;
        session.message_id = id;
        self.turn_after(session, (who, sampling), asker, |_| Ok(say))
    }

    /// The same, for what is only known when the model is free: whoever gives up before has changed nothing.
    ///
    /// # Errors
    /// As above, or as `before` says.
    pub fn turn_after(
        &self,
        session: &mut Session,
        (who, sampling): (String, Option<Sampling>),
        asker: &mut dyn FnMut(&Event) -> Flow,
        before: impl FnOnce(&mut Session) -> Result<Say, SeamError>,
    ) -> Result<Summary, SeamError> {
        let mut last = None;
        let pass = self.shared.gate.pass(&who, &mut |ahead| {
            let event = Event::Waiting { ahead };
            if last.replace(ahead) != Some(ahead) {
                self.tell(&event, |running| running.get_or_insert_default().ahead = ahead);
            }
            let flow = asker(&event);
            if self.halt.load(Ordering::SeqCst) { Flow::Stop } else { flow }
        });
        let Some(_pass) = pass else {
            self.tell(&Event::Failed("stopped while it waited for the model".into()), |running| {
                *running = None;
            });
            return Err(SeamError::new(
                "waiting for the model",
                "stopped before its turn came; nothing was stored",
            )
            .by(Fault::Stopped));
        };
        let usual = session.rules.sampling.clone();
        session.rules.sampling = sampling.unwrap_or_else(|| usual.clone());
        let today = jiff::Zoned::now().date();
        let done = before(session).and_then(|say| {
            session.turn(say, today, &mut |event| {
                self.tell(&event, |running| note(&event, running));
                let flow = asker(&event);
                if self.halt.load(Ordering::SeqCst) { Flow::Stop } else { flow }
            })
        });
        session.rules.sampling = usual;
        if let Err(why) = &done {
            self.tell(&Event::Failed(why.to_string()), |running| *running = None);
        }
        done
    }
}

/// What an event says of the answer that is being given.
fn note(event: &Event, running: &mut Option<Running>) {
    match event {
        Event::Said { .. } | Event::Ready(_) | Event::Reading { .. } => {
            running.get_or_insert_default().ahead = 0;
        }
        Event::Token { chunk, position, text } => {
            let running = running.get_or_insert_default();
            running.turn = Some(chunk.turn);
            running.tokens.push((*chunk, *position, text.clone()));
        }
        Event::Done(_) => *running = None,
        _ => {}
    }
}
