//! A conversation that is open: its timeline, and the mirrors that follow it.

use crate::anew::Reader;
use crate::board::{Board, Standing};
use crate::branch;
use crate::frame::{self, Frame};
use crate::memory::segment::{self, Shown, shown};
use crate::memory::stand::Stand;
use crate::memory::{self, Memory};
use crate::record::{Purpose, Recorder, Recorders};
use crate::rules::Rules;
use crate::signal::{Sent, Signal};
use crate::tools;
use halo_core::change::{Append, Change};
use halo_core::seams::{
    Access, Durability, Embedder, Kind, Message, Model, Piece, SeamError, Seen, Store, Summary,
};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, Role, TurnId, Voice};
use halo_recall::recall::Recall;
use jiff::civil::Date;
use serde_json::json;
use std::sync::Arc;

/// What is kept of the template that a conversation was framed with.
pub const TEMPLATE: &str = "template";

/// The standing instructions of one conversation, where they are its own.
pub const SYSTEM: &str = "system";

/// The client's number for the last message.
pub const MESSAGE_ID: &str = "message.id";

/// Which turn is being answered, while it is.
pub(crate) const RUNNING: &str = "running";

/// A conversation that is open.
pub struct Session {
    pub(crate) name: String,
    /// What the model keeps its memory of this conversation under: never the same for two.
    pub(crate) key: String,
    pub(crate) store: Box<dyn Store + Send>,
    pub(crate) model: Box<dyn Model + Send>,
    pub(crate) recall: Recall,
    pub(crate) timeline: Timeline,
    pub(crate) rules: Rules,
    pub(crate) frame: Frame,
    /// The standing instructions, as tokens.
    pub(crate) prefix: Vec<Piece>,
    /// The day on which the user last spoke.
    pub(crate) day: Option<Date>,
    /// Who keeps a record of answers.
    pub(crate) recorders: Recorders,
    /// Where all who look can see how it stands.
    board: Option<Arc<Board>>,
    /// Standing instructions that are of this conversation alone, and are to be kept when it begins.
    own_system: Option<String>,
    /// What the user should know of how it was opened.
    pub(crate) notices: Vec<String>,
    /// What the model remembers, and how far.
    pub(crate) memories: Vec<Memory>,
    pub(crate) formed: (u32, u32),
    /// The memories that stand in the window.
    pub(crate) stands: Vec<Stand>,
    /// The client's number for the message that is said next.
    pub(crate) message_id: Option<String>,
    /// The last turn whose message key is kept.
    pub(crate) keyed: Option<TurnId>,
    /// Why nothing can be changed at the moment: another program has the conversation.
    refused: Option<SeamError>,
}

impl Session {
    /// Opens a conversation; one that is not there begins with its first message. The order is that of the documents:
    /// what is known of it, its index, what is live, and only then the model. What is of another model's tokens is read
    /// anew, and `progress` hears how many messages have been, and of how many.
    ///
    /// # Errors
    /// When a part fails.
    pub fn open(
        store: Box<dyn Store + Send>,
        model: Box<dyn Model + Send>,
        embedder: Option<Box<dyn Embedder + Send>>,
        name: &str,
        rules: Rules,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, SeamError> {
        Self::open_as(store, model, embedder, name, rules, Access::Write, progress)
    }

    /// Opens a conversation to look at it: nothing is claimed and nothing is written, so it cannot be changed. What no model
    /// has tokenized yet is shown as it came.
    ///
    /// # Errors
    /// When a part fails.
    pub fn open_to_read(
        store: Box<dyn Store + Send>,
        model: Box<dyn Model + Send>,
        embedder: Option<Box<dyn Embedder + Send>>,
        name: &str,
        rules: Rules,
    ) -> Result<Self, SeamError> {
        Self::open_as(store, model, embedder, name, rules, Access::Read, &mut |_, _| {})
    }

    fn open_as(
        mut store: Box<dyn Store + Send>,
        mut model: Box<dyn Model + Send>,
        embedder: Option<Box<dyn Embedder + Send>>,
        name: &str,
        mut rules: Rules,
        access: Access,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, SeamError> {
        let mut timeline = store.load(name, access)?;
        let info = model.info().clone();
        let mut notices = Vec::new();
        // One that has not begun has nothing of its own yet.
        if !timeline.is_empty()
            && let Some(own) = setting(&mut *store, name, SYSTEM)?
        {
            rules.system = own;
        }
        let system = instructions(&mut *store, name, &rules)?;
        let frame = Frame { template: info.template, system, dates: rules.dates, names: rules.names.clone() };
        let mut known = store.find(name)?;
        if !timeline.is_empty() {
            let was = known.as_ref().map(|known| known.model.clone()).filter(|was| !was.is_empty());
            let framed = setting(&mut *store, name, TEMPLATE)?;
            let same = was.as_deref() == Some(info.name.as_str())
                && framed.as_deref() == Some(Frame::fingerprint(&frame.template).as_str());
            if !same && access == Access::Read {
                notices.push(format!(
                    "{} reads this for the first time when the next message is sent",
                    info.name
                ));
            } else if !same {
                let reader = Reader::new(&mut *model, &frame, &rules.context.strategy);
                let messages = timeline.turns().len();
                let kept_as = read_anew(&mut *store, name, reader, was.as_deref(), messages, progress)?;
                notices.push(match was {
                    Some(was) => format!(
                        "this was written with {was}; {} has read it anew, and what was known of each word was carried \
                         over. As it was, it is kept as '{kept_as}'",
                        info.name
                    ),
                    None => format!("{} has read this for the first time; as it came, it is kept as '{kept_as}'", info.name),
                });
                timeline = store.load(name, access)?;
                known = store.find(name)?;
            }
        }
        let interrupted = match access {
            Access::Write => end_interrupted(&mut *store, name)?,
            Access::Read => None,
        };
        if let Some(turn) = interrupted {
            notices.push(format!("the answer of turn {} was cut off when the program ended", turn.0));
        }
        let recall = Recall::open(&mut *store, name, &timeline, embedder)?;
        let spoken = timeline.turns().iter().rev().find(|turn| turn.role == Role::User);
        let day = spoken.and_then(|turn| recall.day(turn.id));
        let key = known.map(|known| key(&mut *store, &known)).transpose()?.unwrap_or_default();
        if let Some(parent) = branch::parent(&mut *store, name)? {
            model.inherit(&key, &parent.key, parent.tokens);
        }
        let keyed = store.message_keys(name, 1)?.last().map(|key| key.turn);
        let memories = memory::memories(&mut *store, name)?;
        let formed = memory::formed_until(&mut *store, name)?;
        let name = name.to_owned();
        let mut session = Self {
            name,
            key,
            store,
            model,
            recall,
            timeline,
            rules,
            frame,
            prefix: Vec::new(),
            day,
            recorders: Recorders::default(),
            board: None,
            own_system: None,
            notices,
            memories,
            formed,
            stands: Vec::new(),
            message_id: None,
            keyed,
            refused: None,
        };
        let before_all = session.frame.before_all();
        session.prefix = session.model.tokenize(&before_all, true)?;
        session.follow_memories();
        session.stands = session.wanted_stands()?;
        if access == Access::Write {
            session.key_messages()?;
        }
        Ok(session)
    }

    /// Brings the model's memory in line with the window, from disk where it is there, so that the next answer need
    /// not wait for that.
    ///
    /// # Errors
    /// When the model fails.
    pub fn warm(&mut self) -> Result<(), SeamError> {
        let window = self.window();
        if window.is_empty() || self.key.is_empty() {
            return Ok(());
        }
        self.model.settle(&self.key, &window)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The conversation.
    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// What it goes by.
    #[must_use]
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// The store, for what does not change the timeline.
    pub fn store(&mut self) -> &mut dyn Store {
        &mut *self.store
    }

    /// Gives the conversation standing instructions of its own. All that is in the window is read again.
    ///
    /// # Errors
    /// When the store or the model fails.
    pub fn instruct(&mut self, system: &str) -> Result<(), SeamError> {
        if self.rules.system == system {
            return Ok(());
        }
        system.clone_into(&mut self.rules.system);
        self.frame.system = instructions(&mut *self.store, &self.name, &self.rules)?;
        self.prefix = self.model.tokenize(&self.frame.before_all(), true)?;
        if self.key.is_empty() {
            self.own_system = Some(system.to_owned());
        } else {
            self.keep_system(system)?;
        }
        self.show();
        Ok(())
    }

    /// The system prompt is that of this conversation from the next turn on; the versions before it stay on record.
    fn keep_system(&mut self, system: &str) -> Result<(), SeamError> {
        let turn = format!("{:010}", self.timeline.next_turn().0);
        self.store.put_record(&self.name, Kind::System, &turn, Some(system))?;
        self.store.put_record(&self.name, Kind::Setting, SYSTEM, Some(system))
    }

    /// From now on answers are recorded for a purpose, instead of how they were recorded for it before; with none, not any
    /// more.
    pub fn record(&mut self, purpose: Purpose, recorder: Option<Box<dyn Recorder>>) {
        self.recorders.set(purpose, recorder);
        self.show();
    }

    /// What the user should know of how it was opened: told once.
    pub fn notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }

    /// How many tokens the model sees.
    #[must_use]
    pub fn live(&self) -> usize {
        self.timeline.view(self.prefix.len()).len() + self.standing()
    }

    /// How many tokens may be in the window.
    #[must_use]
    pub fn limit(&self) -> usize {
        let context = self.model.info().context;
        match self.rules.context.max_tokens {
            0 => context,
            max => max.min(context),
        }
    }

    /// What the model sees: the standing instructions, then what is live, and memories where they stand.
    #[must_use]
    pub fn window(&self) -> Vec<Seen> {
        segment::window(&self.prefix, &self.timeline, &self.stands)
    }

    /// The same, as text.
    #[must_use]
    pub fn window_text(&self) -> String {
        self.render().text()
    }

    /// Where the mirrors of the conversation disagree with it, in words: what is stored, what the model has in memory, what
    /// search goes through. Between turns they never do.
    ///
    /// # Errors
    /// When one of them cannot be looked at.
    pub fn disagreements(&mut self) -> Result<Vec<String>, SeamError> {
        let mut found = Vec::new();
        found.extend(self.timeline.check().err().map(|why| format!("the timeline: {why}")));
        let stored = self.store.load(&self.name, Access::Read)?;
        if stored.state_hash() != self.timeline.state_hash() {
            found.push("the store holds another state".to_owned());
        } else if stored.view(0).text() != self.timeline.view(0).text() {
            found.push("the store holds other words in the window".to_owned());
        }
        let window = self.window();
        if !self.key.is_empty() && !window.is_empty() {
            let memory = self.model.disagreement(&self.key, &window)?;
            found.extend(memory.map(|why| format!("the model's memory: {why}")));
        }
        let new = self.recall.follow(&mut *self.store, &self.timeline)?;
        if new > 0 {
            found.push(format!("{new} chunks were not in the index"));
        }
        Ok(found)
    }

    /// Does a change: on the timeline and in the store, or in neither.
    ///
    /// # Errors
    /// When the store fails, or the change does not fit.
    pub fn change(&mut self, change: &Change, durability: Durability) -> Result<Change, SeamError> {
        self.check_held()?;
        let undo = self.store.transact(&self.name, &mut self.timeline, change, durability)?;
        if !self.memories.is_empty() && !matches!(change, Change::Append(_) | Change::Score(_)) {
            self.follow_memories();
        }
        self.show();
        Ok(undo)
    }

    /// From now on, all who look at the board see how it stands. So many events have been told before.
    pub fn watched(&mut self, events: u64) -> Arc<Board> {
        let board = Arc::new(Board::new(Standing::of(self), events));
        self.board = Some(Arc::clone(&board));
        board
    }

    /// Whether others look at it, and may wait for it.
    pub(crate) fn is_watched(&self) -> bool {
        self.board.is_some()
    }

    /// The same board again, for a conversation that was opened again.
    pub(crate) fn watched_on(&mut self, board: &Arc<Board>) {
        self.board = Some(Arc::clone(board));
        self.show();
    }

    /// Gives up the right to change the conversation until [`Session::hold`], so that other programs can.
    pub(crate) fn release(&mut self) {
        self.store.release(&self.name);
    }

    /// Takes the right to change the conversation again. Returns false where another program has changed it meanwhile: then
    /// it must be opened again. Where another program has it, every change fails with the reason until the next try.
    pub(crate) fn hold(&mut self) -> bool {
        let revision = self.timeline.revision();
        match self.store.hold(&self.name, revision) {
            Ok(same) => {
                self.refused = None;
                same
            }
            Err(why) => {
                self.refused = Some(why);
                true
            }
        }
    }

    /// Nothing can be changed until the next [`Session::hold`].
    pub(crate) fn refuse(&mut self, why: SeamError) {
        self.refused = Some(why);
    }

    pub(crate) fn check_held(&self) -> Result<(), SeamError> {
        self.refused.clone().map_or(Ok(()), Err)
    }

    /// Those who look see what has changed.
    pub(crate) fn show(&self) {
        if let Some(board) = &self.board {
            board.show(Standing::of(self));
        }
    }

    /// Does what the user wants done to chunks: to all of them, or on an error to none.
    ///
    /// # Errors
    /// When it cannot be done, or the store fails.
    pub fn signal(&mut self, signal: Signal, chunks: &[ChunkId]) -> Result<Sent, SeamError> {
        let full = self.rules.context.strategy.full();
        self.check_held()?;
        let sent = signal.send(chunks, full, &self.name, &mut self.timeline, &mut *self.store)?;
        self.recall.follow(&mut *self.store, &self.timeline)?;
        if signal == Signal::Restore {
            // Memories that waited to be forgotten with it are back.
            self.memories = memory::memories(&mut *self.store, &self.name)?;
        }
        self.follow_memories();
        self.show();
        Ok(sent)
    }

    /// Takes back what was done by hand.
    ///
    /// # Errors
    /// When something has happened since that it does not fit any more, or the store fails.
    pub fn undo(&mut self, undo: &Change) -> Result<(), SeamError> {
        let away = self.timeline.away(undo);
        self.store.bring(&self.name, &mut self.timeline, &away)?;
        let gone = |id: &ChunkId| self.timeline.chunk(*id).is_some_and(|chunk| chunk.is_forgotten());
        if let Some(gone) = undo.names().into_iter().find(gone) {
            return Err(SeamError::asked(
                "undoing",
                format!("{gone} was forgotten for good: nothing is left of it"),
            ));
        }
        self.change(undo, Durability::Now)?;
        self.recall.follow(&mut *self.store, &self.timeline)?;
        self.show();
        Ok(())
    }

    /// The tokens of a new turn: its frame, then what is said.
    pub(crate) fn written(
        &mut self,
        role: Role,
        text: &str,
        day: Option<Date>,
    ) -> Result<Vec<(Piece, Voice)>, SeamError> {
        let before = self.said().next().map(|(_, role)| role);
        let opening = self.frame.opening(role, before, day);
        let framed = self.model.tokenize(&opening, true)?.into_iter().map(|piece| (piece, Voice::Frame));
        let mut written: Vec<_> = framed.collect();
        if !text.is_empty() {
            let said = self.model.tokenize(text, false)?;
            written.extend(said.into_iter().map(|piece| (piece, Voice::Speaker)));
        }
        Ok(written)
    }

    /// The turns in which something is said that was not taken back, the latest first.
    pub(crate) fn said(&self) -> impl Iterator<Item = (TurnId, Role)> + '_ {
        let stands = |turn: TurnId| self.timeline.turn_chunks(turn).any(|chunk| !chunk.is_withdrawn());
        self.timeline.turns().iter().rev().filter(move |t| stands(t.id)).map(|t| (t.id, t.role))
    }

    /// What opens the answer to a message.
    pub(crate) fn opening(&mut self) -> Result<Vec<Piece>, SeamError> {
        let opening = self.frame.opening(Role::Assistant, Some(Role::User), None);
        self.model.tokenize(&opening, true)
    }

    /// A turn's tokens as a change.
    pub(crate) fn append(&self, role: Role, written: Vec<(Piece, Voice)>) -> Append {
        frame::append(&self.timeline, role, written, &self.rules.context)
    }

    /// The first commit of a conversation: from here on it has a key.
    pub(crate) fn began(&mut self) -> Result<(), SeamError> {
        if self.key.is_empty() {
            let fingerprint = Frame::fingerprint(&self.frame.template);
            self.store.put_record(&self.name, Kind::Setting, TEMPLATE, Some(&fingerprint))?;
            self.store.set_model(&self.name, &self.model.info().name)?;
            if let Some(own) = self.own_system.take() {
                self.keep_system(&own)?;
            }
            let known = self.store.find(&self.name)?;
            self.key = match known {
                Some(known) => key(&mut *self.store, &known)?,
                None => self.name.clone(),
            };
        }
        Ok(())
    }
}

/// What the model sees, as messages.
pub(crate) fn messages(system: &str, timeline: &Timeline, stands: &[Stand]) -> Vec<Message> {
    let mut messages: Vec<(Option<TurnId>, Message)> = Vec::new();
    if !system.trim().is_empty() {
        messages.push((None, Message { role: Role::System, text: system.trim().to_owned() }));
    }
    for shown in shown(timeline, stands) {
        let chunk = match shown {
            Shown::Chunk(chunk) => chunk,
            Shown::Memory(stand) => {
                messages.push((None, Message { role: Role::System, text: stand.text() }));
                continue;
            }
        };
        let (turn, role) = (Some(chunk.id().turn), chunk.id().role);
        if messages.last().is_none_or(|(last, _)| *last != turn) {
            messages.push((turn, Message { role, text: String::new() }));
        }
        if let Some((_, message)) = messages.last_mut() {
            message.text.push_str(&chunk.live_text());
        }
    }
    messages.into_iter().map(|(_, message)| message).collect()
}

/// The standing instructions: the user's, and what there is to say of tools, with what has been noted so far. They are
/// made when a conversation is opened: if they changed with every note, all would have to be read again.
fn instructions(store: &mut dyn Store, name: &str, rules: &Rules) -> Result<String, SeamError> {
    if rules.tools.is_none() {
        return Ok(rules.system.clone());
    }
    let notes = store.records(name, Kind::Note)?.into_iter().find(|record| record.key == tools::notes::FILE);
    let notes: Option<serde_json::Value> = notes.and_then(|notes| serde_json::from_str(&notes.value).ok());
    Ok(format!("{}\n\n{}", rules.system.trim(), tools::instructions(notes.as_ref())))
}

fn setting(store: &mut dyn Store, name: &str, key: &str) -> Result<Option<String>, SeamError> {
    let records = store.records(name, Kind::Setting)?;
    Ok(records.into_iter().find(|record| record.key == key).map(|record| record.value))
}

/// How often something of a conversation was forgotten for good.
pub const FORGOTTEN: &str = "lethe.times";

/// What the model keeps its memory of a conversation under. A name can be given anew, so the time of birth counts too; and what
/// it has in memory of words that were forgotten since is of another.
///
/// # Errors
/// When the store fails.
pub fn key(store: &mut dyn Store, known: &Summary) -> Result<String, SeamError> {
    let forgotten = setting(store, &known.name, FORGOTTEN)?;
    let forgotten = forgotten.map_or(String::new(), |times| format!("\0{times}"));
    Ok(format!("{}\0{}{forgotten}", known.created, known.name))
}

/// Reads a conversation anew. Returns the name under which it is kept as it was.
fn read_anew(
    store: &mut dyn Store,
    name: &str,
    mut reader: Reader<'_>,
    was: Option<&str>,
    messages: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<String, SeamError> {
    let model = reader.model.info().name.clone();
    let fingerprint = Frame::fingerprint(&reader.frame.template);
    let taken: Vec<String> = store.conversations()?.into_iter().map(|known| known.name).collect();
    let free = |wanted: String| {
        let numbered = (2..).map(|n| format!("{wanted} {n}"));
        std::iter::once(wanted.clone()).chain(numbered).find(|name| !taken.contains(name)).unwrap_or(wanted)
    };
    let anew = free(format!("{name} (being read by {model})"));
    let mut done = 0;
    store.retell(name, &anew, &model, &mut |told| {
        done += 1;
        progress(done, messages);
        reader.read(told).map(Some)
    })?;
    store.put_record(&anew, Kind::Setting, TEMPLATE, Some(&fingerprint))?;
    let kept_as = free(was.map_or_else(|| format!("{name} (as it came)"), |was| format!("{name} ({was})")));
    store.rename(name, &kept_as)?;
    store.rename(&anew, name)?;
    Ok(kept_as)
}

/// A turn that was running when the program ended is marked as cut off. Returns it.
fn end_interrupted(store: &mut dyn Store, name: &str) -> Result<Option<TurnId>, SeamError> {
    let Some(turn) = setting(store, name, RUNNING)? else { return Ok(None) };
    store.put_record(name, Kind::Turn, &turn, Some(&json!({ "finish": "interrupted" }).to_string()))?;
    store.put_record(name, Kind::Setting, RUNNING, None)?;
    Ok(turn.parse().ok().map(TurnId))
}
