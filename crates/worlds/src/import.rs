//! Validates the rows of an imported world: every row has the key that its content says, and every number is below the
//! counters of the header.

use crate::telemetry::HeartbeatRecord;
use crate::user_command::UserCommand;
use crate::world::{
    ARCHITECT, AgentId, AgentState, MAX_AGENTS, MAX_MESSAGES, Room, RoomMessage, World, WorldHeader,
};
use crate::world_store::{
    AGENT_KIND, COMMAND_KIND, HEADER_KEY, HEADER_KIND, HEARTBEAT_KIND, MESSAGE_KIND, ROOM_KIND, ROW_KINDS,
    agent_key, check_world_name, heartbeat_key, message_key, parse_row,
};
use halo_core::Error;
use halo_core::row_store::{Row, RowKind};
use std::collections::BTreeSet;

/// The world that the rows describe, without its messages.
pub fn world_from_rows(name: &str, rows: &[Row]) -> Result<World, Error> {
    check_world_name(name)?;
    let rows = WorldRows { name, rows };
    if let Some(row) = rows.rows.iter().find(|row| !ROW_KINDS.contains(&row.kind)) {
        return Err(rows.invalid(format!("a world has no rows of the kind '{}'", row.kind)));
    }
    let header = rows.header()?;
    let agents = rows.agents(&header)?;
    let agent_ids: BTreeSet<AgentId> = agents.iter().map(|agent| agent.id).chain([ARCHITECT]).collect();
    let rooms = rows.rooms(&header, &agent_ids)?;
    let room_ids: BTreeSet<AgentId> = rooms.iter().map(|room| room.id).collect();
    rows.check_messages(&header, &room_ids)?;
    rows.check_commands()?;
    rows.check_heartbeats(&agent_ids)?;
    Ok(World::from_stored(header, agents, rooms))
}

struct WorldRows<'a> {
    name: &'a str,
    rows: &'a [Row],
}

impl<'a> WorldRows<'a> {
    fn invalid(&self, reason: String) -> Error {
        Error::invalid_input(format!("importing the world '{}'", self.name), reason)
    }

    fn of_kind(&self, kind: RowKind) -> impl Iterator<Item = (&'a str, &'a str)> {
        let rows = self.rows.iter().filter(move |row| row.kind == kind);
        rows.map(|row| (row.key.as_str(), row.value.as_str()))
    }

    fn header(&self) -> Result<WorldHeader, Error> {
        let headers: Vec<(&str, &str)> = self.of_kind(HEADER_KIND).collect();
        let [(HEADER_KEY, header)] = headers[..] else {
            return Err(self.invalid(format!("it has {} headers, and a world has one", headers.len())));
        };
        let header: WorldHeader = parse_row("the header of the world", header)?;
        let in_range = (1..=MAX_AGENTS + 1).contains(&header.next_agent)
            && (1..=MAX_MESSAGES + 1).contains(&header.next_message)
            && header.next_request > 0;
        if in_range {
            Ok(header)
        } else {
            Err(self.invalid("a counter of its header is out of range".to_owned()))
        }
    }

    fn agents(&self, header: &WorldHeader) -> Result<Vec<AgentState>, Error> {
        let mut agents = Vec::new();
        for (key, value) in self.of_kind(AGENT_KIND) {
            let agent: AgentState = parse_row("an agent", value)?;
            if key != agent_key(agent.id.0) || !(1..header.next_agent).contains(&agent.id.0) {
                return Err(self.invalid(format!(
                    "agent {} has another key, or a number that was not assigned",
                    agent.id
                )));
            }
            agents.push(agent);
        }
        Ok(agents)
    }

    fn rooms(&self, header: &WorldHeader, agents: &BTreeSet<AgentId>) -> Result<Vec<Room>, Error> {
        let mut rooms = Vec::new();
        for (key, value) in self.of_kind(ROOM_KIND) {
            let room: Room = parse_row("a room", value)?;
            if key != agent_key(room.id.0) || room.id == ARCHITECT || !agents.contains(&room.id) {
                return Err(self.invalid(format!("room {} has another key, or no owner", room.id)));
            }
            let requesters = room.requests.iter().map(|request| &request.requester);
            if let Some(unknown) = room.members.keys().chain(requesters).find(|id| !agents.contains(id)) {
                return Err(
                    self.invalid(format!("room {} names agent {unknown}, which does not exist", room.id))
                );
            }
            if let Some(request) = room.requests.iter().find(|request| request.id >= header.next_request) {
                return Err(
                    self.invalid(format!("request {} has a number that was not assigned", request.id))
                );
            }
            rooms.push(room);
        }
        Ok(rooms)
    }

    fn check_messages(&self, header: &WorldHeader, rooms: &BTreeSet<AgentId>) -> Result<(), Error> {
        for (key, value) in self.of_kind(MESSAGE_KIND) {
            let message: RoomMessage = parse_row("a message", value)?;
            let is_assigned = (1..header.next_message).contains(&message.id);
            if key != message_key(message.room, message.id) || !rooms.contains(&message.room) || !is_assigned
            {
                return Err(self.invalid(format!(
                    "message {} has another key, no room, or a number that was not assigned",
                    message.id
                )));
            }
        }
        Ok(())
    }

    fn check_heartbeats(&self, agents: &BTreeSet<AgentId>) -> Result<(), Error> {
        for (key, value) in self.of_kind(HEARTBEAT_KIND) {
            let record: HeartbeatRecord = parse_row("a heartbeat", value)?;
            if key != heartbeat_key(record.agent, record.beat) || !agents.contains(&record.agent) {
                return Err(self.invalid(format!(
                    "heartbeat {} of agent {} has another key, or no agent",
                    record.beat, record.agent
                )));
            }
        }
        Ok(())
    }

    fn check_commands(&self) -> Result<(), Error> {
        for (key, value) in self.of_kind(COMMAND_KIND) {
            let _: UserCommand = parse_row("a posted command", value)?;
            if key.len() != 20 || !key.bytes().all(|digit| digit.is_ascii_digit()) {
                return Err(self.invalid(format!("a posted command has the key '{key}', not 20 digits")));
            }
        }
        Ok(())
    }
}
