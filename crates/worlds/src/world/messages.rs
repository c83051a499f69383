//! Messages of rooms: sending, typing, delivery.

use super::World;
use super::state::{
    AgentId, LOADED_MESSAGES, MAX_MESSAGE_CHARS, MAX_MESSAGES, MessageDraft, MessageSender, Room, RoomId,
    RoomMessage,
};
use crate::error::Error;
use crate::heartbeat::{self, Millis};
use std::collections::{BTreeMap, VecDeque};

/// Fails for messages that are empty or too long.
pub fn check_message(content: &str) -> Result<(), Error> {
    if content.trim().is_empty() {
        return Err(Error::invalid_input("a message must not be empty"));
    }
    let chars = content.chars().count();
    if chars > MAX_MESSAGE_CHARS {
        return Err(Error::invalid_input(format!(
            "a message has {MAX_MESSAGE_CHARS} characters at most, and this one has {chars}: split it"
        )));
    }
    Ok(())
}

impl World {
    /// Appends a stored message to its room, which has only older ones.
    pub fn load_message(&mut self, message: RoomMessage) {
        if let Some(room) = self.rooms.get_mut(&message.room) {
            room.messages.push_back(message);
        }
    }

    /// Appends a message of the system.
    pub fn announce(&mut self, room: RoomId, content: String, now: Millis) {
        self.append_message(room, MessageSender::System, content, None, now);
    }

    /// Sends a message without a typing time. Returns its number.
    pub fn send_message(
        &mut self,
        room: RoomId,
        sender: AgentId,
        content: impl Into<String>,
        reply_to: Option<u64>,
        now: Millis,
    ) -> Result<u64, Error> {
        let content = content.into();
        if !self.require_room(room)?.members.contains_key(&sender) {
            return Err(Error::conflict(format!("{} is not in room {room}", self.display_name(sender))));
        }
        check_message(&content)?;
        if self.header.next_message > MAX_MESSAGES {
            return Err(Error::conflict(format!(
                "this world has had {MAX_MESSAGES} messages, the most that it can number"
            )));
        }
        self.check_reply_target(room, reply_to)?;
        if let Some(member) = self.room_mut(room).and_then(|room| room.members.get_mut(&sender)) {
            member.last_spoke = Some(now);
        }
        Ok(self.append_message(room, MessageSender::Agent(sender), content, reply_to, now))
    }

    pub(crate) fn check_reply_target(&self, room: RoomId, reply_to: Option<u64>) -> Result<(), Error> {
        let is_missing = |id: &u64| self.room(room).is_none_or(|room| room.message(*id).is_none());
        match reply_to.filter(is_missing) {
            Some(id) => Err(Error::not_found(format!("there is no message {id} in room {room} to reply to"))),
            None => Ok(()),
        }
    }

    fn append_message(
        &mut self,
        room: RoomId,
        sender: MessageSender,
        content: String,
        reply_to: Option<u64>,
        at: Millis,
    ) -> u64 {
        let header = self.header_mut();
        let id = header.next_message;
        header.next_message += 1;
        let message = RoomMessage { id, room, at, sender, content, reply_to, reactions: BTreeMap::new() };
        self.insert_message(message);
        id
    }

    pub(crate) fn insert_message(&mut self, message: RoomMessage) {
        self.unsaved.messages.insert(message.id, message.clone());
        if let Some(room) = self.rooms.get_mut(&message.room) {
            room.messages.push_back(message);
            if room.messages.len() > LOADED_MESSAGES {
                room.messages.pop_front();
            }
        }
    }

    /// Changes a message that is in memory.
    pub(crate) fn update_message<T>(
        &mut self,
        id: u64,
        change: impl FnOnce(&mut RoomMessage) -> T,
    ) -> Option<T> {
        let message = self.rooms.values_mut().find_map(|room| room.message_mut(id))?;
        let changed = change(message);
        let message = message.clone();
        self.unsaved.messages.insert(id, message);
        Some(changed)
    }

    /// A message that is in memory, in one of the rooms of an agent.
    #[must_use]
    pub fn visible_message(&self, agent: AgentId, id: u64) -> Option<&RoomMessage> {
        self.rooms_of(agent).find_map(|room| room.message(id))
    }

    /// Sends a message of an agent: now if its word budget allows it, else as a draft that is delivered when it is typed.
    /// With `split`, each of its paragraphs is a message, and one is typed after the other.
    pub fn submit_message(
        &mut self,
        room: RoomId,
        sender: AgentId,
        (content, split): (&str, ParagraphSplit),
        reply_to: Option<u64>,
        now: Millis,
    ) -> Result<(), Error> {
        let target = self.require_room(room)?;
        let member = target
            .members
            .get(&sender)
            .ok_or_else(|| Error::conflict(format!("you are not in room {room}")))?;
        let content = content.trim();
        if let Some(draft) = &member.draft {
            let seconds = ((draft.due - now).max(0) + 999) / 1000;
            return Err(Error::conflict(format!(
                "you are still writing in room {room}, for {seconds} more seconds"
            )));
        }
        let words = heartbeat::count_words(content);
        let limit = *heartbeat::MESSAGE_WORDS_RANGE.end();
        if words > limit {
            return Err(Error::invalid_input(format!(
                "a message has {limit} words at most, and this one has {words}"
            )));
        }
        check_message(content)?;
        self.check_reply_target(room, reply_to)?;
        let mut rest = split.paragraphs(content);
        let first = rest.pop_front().unwrap_or_default();
        let words = heartbeat::count_words(&first);
        // A second message at the same moment is always typed: the word budget counts from the last message.
        let due = match member.last_spoke {
            Some(at) if at == now => heartbeat::typing_done_at(words, now, target.wpm),
            last => heartbeat::earliest_send_time(words, last, now, target.wpm),
        };
        if due <= now {
            self.send_message(room, sender, first, reply_to, now)?;
            self.begin_next_paragraph(room, sender, rest, now);
        } else {
            self.set_draft(room, sender, MessageDraft { content: first, reply_to, due, rest });
        }
        Ok(())
    }

    fn set_draft(&mut self, room: RoomId, sender: AgentId, draft: MessageDraft) {
        if let Some(member) = self.room_mut(room).and_then(|room| room.members.get_mut(&sender)) {
            member.draft = Some(draft);
        }
    }

    /// Begins to type the next of the remaining paragraphs after one was sent.
    fn begin_next_paragraph(
        &mut self,
        room: RoomId,
        sender: AgentId,
        mut rest: VecDeque<String>,
        sent: Millis,
    ) {
        let (Some(content), Some(wpm)) = (rest.pop_front(), self.room(room).map(|room| room.wpm)) else {
            return;
        };
        let due = heartbeat::typing_done_at(heartbeat::count_words(&content), sent, wpm);
        self.set_draft(room, sender, MessageDraft { content, reply_to: None, due, rest });
    }

    /// Delivers the drafts that are typed by now, in order. Returns the numbers of the messages.
    pub fn deliver_due_drafts(&mut self, now: Millis) -> Vec<u64> {
        let mut delivered = Vec::new();
        // A delivered paragraph may be followed by one that is due too.
        while let Some((at, room, agent)) = self.next_draft().filter(|(due, _, _)| *due <= now) {
            let member = self.room_mut(room).and_then(|room| room.members.get_mut(&agent));
            let Some(draft) = member.and_then(|member| member.draft.take()) else { continue };
            // The message that it replies to may have left memory meanwhile: the draft is delivered without the link.
            let reply_to =
                draft.reply_to.filter(|&id| self.room(room).is_some_and(|r| r.message(id).is_some()));
            let at = at.max(self.last_message_time(room));
            match self.send_message(room, agent, draft.content, reply_to, at) {
                Ok(id) => {
                    delivered.push(id);
                    self.begin_next_paragraph(room, agent, draft.rest, at);
                }
                Err(error) => self.record_refusal(agent, "response", &error.message, now),
            }
        }
        delivered
    }

    fn last_message_time(&self, room: RoomId) -> Millis {
        self.room(room).and_then(|room| room.messages.back()).map_or(Millis::MIN, |message| message.at)
    }

    /// The draft that is delivered next.
    fn next_draft(&self) -> Option<(Millis, RoomId, AgentId)> {
        let members = self
            .rooms()
            .flat_map(|room| room.members.iter().map(move |(agent, member)| (room.id, *agent, member)));
        members.filter_map(|(room, agent, member)| Some((member.draft.as_ref()?.due, room, agent))).min()
    }

    /// When the next draft is delivered.
    #[must_use]
    pub fn next_draft_due(&self) -> Option<Millis> {
        self.next_draft().map(|(due, _, _)| due)
    }

    /// When the last draft of an agent is delivered, with the paragraphs that follow it.
    #[must_use]
    pub fn drafts_done_at(&self, agent: AgentId) -> Option<Millis> {
        let done_at = |room: &Room| {
            let draft = room.members.get(&agent)?.draft.as_ref()?;
            let typed =
                |at, text: &String| heartbeat::typing_done_at(heartbeat::count_words(text), at, room.wpm);
            Some(draft.rest.iter().fold(draft.due, typed))
        };
        self.rooms_of(agent).filter_map(done_at).max()
    }
}

/// Whether the paragraphs of an agent's answer are sent as messages of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ParagraphSplit {
    /// An answer is one message.
    #[default]
    Never,
    /// Each paragraph is a message.
    BlankLines,
}

impl ParagraphSplit {
    fn paragraphs(self, content: &str) -> VecDeque<String> {
        match self {
            Self::Never => [content.to_owned()].into(),
            Self::BlankLines => {
                let lines = content.replace("\r\n", "\n");
                let parts = lines.split("\n\n").map(str::trim).filter(|part| !part.is_empty());
                parts.map(str::to_owned).collect()
            }
        }
    }
}
