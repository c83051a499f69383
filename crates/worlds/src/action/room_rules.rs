//! The rules of actions in rooms: billboard, speed, keys, access, attention.

use crate::error::Error;
use crate::heartbeat::{Millis, WPM_RANGE};
use crate::text::check_length;
use crate::world::{AccessRequest, AgentId, Room, RoomAttention, RoomId, World};

pub(crate) const MAX_BILLBOARD_CHARS: usize = 500;
pub(crate) const MAX_KEY_CHARS: usize = 64;
pub(crate) const MAX_KEYS: usize = 20;
/// Open access requests of a room.
const MAX_REQUESTS: usize = 50;

impl World {
    fn own_room(&mut self, agent: AgentId) -> Result<&mut Room, Error> {
        self.room_mut(agent).ok_or_else(|| Error::not_found("you have no room"))
    }

    pub(super) fn check_membership(&self, agent: AgentId, room: RoomId) -> Result<(), Error> {
        if self.require_room(room)?.members.contains_key(&agent) {
            Ok(())
        } else {
            Err(Error::conflict(format!("you are not in room {room}")))
        }
    }

    pub(super) fn set_billboard(&mut self, agent: AgentId, message: &str) -> Result<(), Error> {
        check_length("a billboard", message, MAX_BILLBOARD_CHARS)?;
        let message = message.trim();
        if message.is_empty() {
            return Err(Error::invalid_input("a billboard must not be empty: clear_billboard removes it"));
        }
        self.own_room(agent)?.billboard = Some(message.to_owned());
        Ok(())
    }

    pub(super) fn clear_billboard(&mut self, agent: AgentId) -> Result<(), Error> {
        match self.own_room(agent)?.billboard.take() {
            Some(_) => Ok(()),
            None => Err(Error::conflict("there is no billboard in your room")),
        }
    }

    pub(super) fn set_wpm(&mut self, agent: AgentId, wpm: u64) -> Result<(), Error> {
        let (least, most) = WPM_RANGE.into_inner();
        let allowed = u32::try_from(wpm).ok().filter(|wpm| WPM_RANGE.contains(wpm)).ok_or_else(|| {
            Error::invalid_input(format!("words per minute are {least} to {most}, not {wpm}"))
        })?;
        self.own_room(agent)?.wpm = allowed;
        Ok(())
    }

    pub(super) fn create_key(&mut self, agent: AgentId, key: &str) -> Result<(), Error> {
        check_length("a key", key, MAX_KEY_CHARS)?;
        let room = self.own_room(agent)?;
        if key.is_empty() {
            return Err(Error::invalid_input("a key has at least one character"));
        }
        if room.keys.iter().any(|other| other == key) {
            return Err(Error::conflict("your room has this key already"));
        }
        if room.keys.len() >= MAX_KEYS {
            return Err(Error::conflict(format!("a room has {MAX_KEYS} keys at most: revoke one first")));
        }
        room.keys.push(key.to_owned());
        Ok(())
    }

    pub(super) fn revoke_key(&mut self, agent: AgentId, key: &str) -> Result<(), Error> {
        let room = self.own_room(agent)?;
        let before = room.keys.len();
        room.keys.retain(|other| other != key);
        if room.keys.len() == before {
            return Err(Error::not_found("your room has no such key"));
        }
        Ok(())
    }

    pub(super) fn request_access(
        &mut self,
        agent: AgentId,
        room: RoomId,
        key: &str,
        now: Millis,
    ) -> Result<(), Error> {
        let target = self.require_room(room)?;
        if target.members.contains_key(&agent) {
            return Err(Error::conflict(format!("you are in room {room} already")));
        }
        if !target.keys.iter().any(|other| other == key) {
            return Err(Error::invalid_input(format!("that key does not open room {room}")));
        }
        if target.requests.iter().any(|request| request.requester == agent) {
            return Err(Error::conflict(format!(
                "you have requested access to room {room} already: wait for the owner"
            )));
        }
        if target.requests.len() >= MAX_REQUESTS {
            return Err(Error::conflict(format!(
                "room {room} has {MAX_REQUESTS} open requests: try again later"
            )));
        }
        let header = self.header_mut();
        let id = header.next_request;
        header.next_request += 1;
        if let Some(room) = self.room_mut(room) {
            room.requests.push(AccessRequest { id, requester: agent, key: key.to_owned() });
        }
        self.announce(room, format!("{} ({agent}) asks to come in.", self.display_name(agent)), now);
        Ok(())
    }

    pub(super) fn grant_access(&mut self, owner: AgentId, request: u64, now: Millis) -> Result<(), Error> {
        let request = self.take_request(owner, request)?;
        self.join_room(owner, request.requester, now);
        Ok(())
    }

    /// Removes and returns an access request of the owner's room.
    pub(crate) fn take_request(&mut self, owner: AgentId, id: u64) -> Result<AccessRequest, Error> {
        let room = self.own_room(owner)?;
        let index = room
            .requests
            .iter()
            .position(|request| request.id == id)
            .ok_or_else(|| Error::not_found(format!("there is no access request {id} for this room")))?;
        Ok(room.requests.remove(index))
    }

    pub(super) fn leave_other_room(
        &mut self,
        agent: AgentId,
        room: RoomId,
        now: Millis,
    ) -> Result<(), Error> {
        if room == agent {
            return Err(Error::conflict("you cannot leave your own room"));
        }
        self.check_membership(agent, room)?;
        self.leave_room(room, agent, now);
        Ok(())
    }

    pub(crate) fn set_attention_from_text(
        &mut self,
        agent: AgentId,
        room: RoomId,
        value: &str,
    ) -> Result<(), Error> {
        self.check_membership(agent, room)?;
        self.set_attention(agent, room, RoomAttention::parse(value)?)
    }

    /// Sets a member's attention for a room. Its fixed shares never add up to more than 100 %.
    pub(crate) fn set_attention(
        &mut self,
        agent: AgentId,
        room: RoomId,
        attention: RoomAttention,
    ) -> Result<(), Error> {
        if let RoomAttention::Fixed(percent) = attention {
            let fixed: f64 = self
                .rooms_of(agent)
                .filter(|other| other.id != room)
                .filter_map(|other| match other.members.get(&agent)?.attention {
                    RoomAttention::Fixed(percent) => Some(percent),
                    RoomAttention::Dynamic => None,
                })
                .sum();
            if fixed + percent > 100.0 {
                return Err(Error::conflict(format!(
                    "your other rooms have {fixed}% already, so {percent}% would be more than all of your attention"
                )));
            }
        }
        if let Some(member) = self.room_mut(room).and_then(|room| room.members.get_mut(&agent)) {
            member.attention = attention;
        }
        Ok(())
    }

    /// Closes the room of an agent that retires. Members who were writing there are told that it was not delivered.
    pub(super) fn close_room(&mut self, room: RoomId, now: Millis) {
        let notice = format!("{} ({room}) is retired, and this room is closed.", self.display_name(room));
        self.announce(room, notice, now);
        let Some(state) = self.room_mut(room) else { return };
        state.closed = true;
        state.requests.clear();
        let mut writers = Vec::new();
        for (id, member) in &mut state.members {
            if member.draft.take().is_some() && *id != room {
                writers.push(*id);
            }
        }
        for writer in writers {
            let reason = format!("room {room} was closed before it was written");
            self.record_refusal(writer, "response", &reason, now);
        }
    }

    /// Drops the access request of an agent that the user has let into a room.
    pub(crate) fn drop_request(&mut self, room: RoomId, agent: AgentId) {
        if let Some(room) = self.room_mut(room) {
            room.requests.retain(|request| request.requester != agent);
        }
    }

    /// Drops the access requests of an agent that retires.
    pub(super) fn drop_requests_of(&mut self, agent: AgentId) {
        let is_from = |request: &AccessRequest| request.requester == agent;
        let rooms: Vec<RoomId> =
            self.rooms().filter(|room| room.requests.iter().any(is_from)).map(|room| room.id).collect();
        for room in rooms {
            if let Some(room) = self.room_mut(room) {
                room.requests.retain(|request| !is_from(request));
            }
        }
    }
}
