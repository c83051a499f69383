//! Messages of rooms: sending, typing, delivery.

use super::World;
use super::state::{
    AgentId, LOADED_MESSAGES, MAX_MESSAGE_CHARS, MAX_MESSAGES, MessageDraft, MessageSender, RoomId,
    RoomMessage,
};
use crate::error::Error;
use crate::heartbeat::{self, Millis};
use std::collections::BTreeMap;

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
    pub fn submit_message(
        &mut self,
        room: RoomId,
        sender: AgentId,
        content: &str,
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
        // A second message at the same moment is always typed: the word budget counts from the last message.
        let due = match member.last_spoke {
            Some(at) if at == now => heartbeat::typing_done_at(words, now, target.wpm),
            last => heartbeat::earliest_send_time(words, last, now, target.wpm),
        };
        if due <= now {
            return self.send_message(room, sender, content, reply_to, now).map(drop);
        }
        if let Some(member) = self.room_mut(room).and_then(|room| room.members.get_mut(&sender)) {
            member.draft = Some(MessageDraft { content: content.to_owned(), reply_to, due });
        }
        Ok(())
    }

    /// Delivers the drafts that are typed by now, in order. Returns the numbers of the messages.
    pub fn deliver_due_drafts(&mut self, now: Millis) -> Vec<u64> {
        let mut due: Vec<(Millis, RoomId, AgentId)> = self
            .rooms()
            .flat_map(|room| room.members.iter().map(move |(agent, member)| (room.id, *agent, member)))
            .filter_map(|(room, agent, member)| member.draft.as_ref().map(|draft| (draft.due, room, agent)))
            .filter(|(due, _, _)| *due <= now)
            .collect();
        due.sort_unstable();
        let mut delivered = Vec::new();
        for (at, room, agent) in due {
            let member = self.room_mut(room).and_then(|room| room.members.get_mut(&agent));
            let Some(draft) = member.and_then(|member| member.draft.take()) else { continue };
            // The message that it replies to may have left memory meanwhile: the draft is delivered without the link.
            let reply_to =
                draft.reply_to.filter(|&id| self.room(room).is_some_and(|r| r.message(id).is_some()));
            let at = at.max(self.last_message_time(room));
            match self.send_message(room, agent, draft.content, reply_to, at) {
                Ok(id) => delivered.push(id),
                Err(error) => self.record_refusal(agent, "response", &error.message, now),
            }
        }
        delivered
    }

    fn last_message_time(&self, room: RoomId) -> Millis {
        self.room(room).and_then(|room| room.messages.back()).map_or(Millis::MIN, |message| message.at)
    }

    /// When the next draft is delivered.
    #[must_use]
    pub fn next_draft_due(&self) -> Option<Millis> {
        let drafts =
            self.rooms().flat_map(|room| room.members.values()).filter_map(|member| member.draft.as_ref());
        drafts.map(|draft| draft.due).min()
    }

    /// When the last draft of an agent is delivered.
    #[must_use]
    pub fn drafts_done_at(&self, agent: AgentId) -> Option<Millis> {
        let drafts = self.rooms_of(agent).filter_map(|room| room.members.get(&agent)?.draft.as_ref());
        drafts.map(|draft| draft.due).max()
    }
}
