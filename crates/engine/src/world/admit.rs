//! Whether what comes from elsewhere is a world: everything where it says that it is, and nothing that was not counted.

use super::realm::{HEAD, agent_key, check_name, read, said_key};
use halo_agents::wish::Wish;
use halo_agents::world::{
    ARCHITECT, AgentId, AgentState, Head, MOST_AGENTS, MOST_MESSAGES, Message, Room, World,
};
use halo_core::seams::{Kind, SeamError, WorldRow};
use std::collections::BTreeSet;

/// The world that these rows are, without what was said there.
///
/// # Errors
/// In words, when they are none.
pub fn admit(name: &str, rows: &[WorldRow]) -> Result<World, SeamError> {
    check_name(name)?;
    let wrong = |why: String| Err(SeamError::asked(format!("taking in the world '{name}'"), why));
    let of = |kind: Kind| {
        let rows = rows.iter().filter(move |row| row.kind == kind);
        rows.map(|row| (row.key.as_str(), row.value.as_deref().unwrap_or_default()))
    };
    let known = [Kind::World, Kind::Agent, Kind::Room, Kind::Said, Kind::Post];
    if let Some(row) = rows.iter().find(|row| !known.contains(&row.kind)) {
        return wrong(format!("a world has no records of the kind '{}'", row.kind.name()));
    }
    let heads: Vec<(&str, &str)> = of(Kind::World).collect();
    let [(HEAD, head)] = heads[..] else {
        return wrong(format!("it has {} first rows, and a world has one", heads.len()));
    };
    let head: Head = read("what is true of the world", head)?;
    let agents_fit = (1..=MOST_AGENTS + 1).contains(&head.next_agent);
    if !agents_fit || !(1..=MOST_MESSAGES + 1).contains(&head.next_message) || head.next_request == 0 {
        return wrong("it counts more than there can be, or less than nothing".to_owned());
    }
    let (mut agents, mut rooms) = (Vec::new(), Vec::new());
    for (key, value) in of(Kind::Agent) {
        let agent: AgentState = read("an agent", value)?;
        if key != agent_key(agent.id.0) || !(1..head.next_agent).contains(&agent.id.0) {
            return wrong(format!("agent {} is not where it says, or was never counted", agent.id));
        }
        agents.push(agent);
    }
    let alive: BTreeSet<AgentId> = agents.iter().map(|agent| agent.id).chain([ARCHITECT]).collect();
    for (key, value) in of(Kind::Room) {
        let room: Room = read("a room", value)?;
        if key != agent_key(room.id.0) || room.id == ARCHITECT || !alive.contains(&room.id) {
            return wrong(format!("room {} is not where it says, or is nobody's", room.id));
        }
        let asking = room.requests.iter().map(|request| &request.requester);
        if let Some(stranger) = room.members.keys().chain(asking).find(|who| !alive.contains(who)) {
            return wrong(format!("there is no agent {stranger}, who is in room {}", room.id));
        }
        if let Some(request) = room.requests.iter().find(|request| request.id >= head.next_request) {
            return wrong(format!("request {} was never counted", request.id));
        }
        rooms.push(room);
    }
    let there: BTreeSet<AgentId> = rooms.iter().map(|room| room.id).collect();
    for (key, value) in of(Kind::Said) {
        let said: Message = read("a message", value)?;
        let counted = (1..head.next_message).contains(&said.id);
        if key != said_key(said.room, said.id) || !there.contains(&said.room) || !counted {
            return wrong(format!("message {} is not where it says, or was never counted", said.id));
        }
    }
    for (key, value) in of(Kind::Post) {
        let _: Wish = read("what was left for it", value)?;
        if key.len() != 20 || !key.bytes().all(|digit| digit.is_ascii_digit()) {
            return wrong("what was left for it is not where it should be".to_owned());
        }
    }
    Ok(World::kept(head, agents, rooms))
}
