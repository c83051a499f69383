//! A world in a store. The store keeps it as rows whose kinds and keys are defined here; a change is written in one
//! transaction before it is announced.

use crate::heartbeat::Millis;
use crate::room_index::RoomIndex;
use crate::telemetry::HeartbeatRecord;
use crate::user_command::UserCommand;
use crate::world::{
    AgentId, AgentState, LOADED_MESSAGES, Room, RoomId, RoomMessage, World, WorldChanges, WorldHeader,
};
use halo_core::Error;
use halo_core::name::is_invisible_control;
use halo_core::row_store::{NamespaceSummary, Row, RowKind, RowStore};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

/// The header of a world. The words of all kinds are part of the stored format.
pub const HEADER_KIND: RowKind = RowKind::from_static("world");
/// An agent, by its number.
pub const AGENT_KIND: RowKind = RowKind::from_static("agent");
/// A room, by the number of its owner.
pub const ROOM_KIND: RowKind = RowKind::from_static("room");
/// A message, by its room and its number.
pub const MESSAGE_KIND: RowKind = RowKind::from_static("said");
/// A command of the user for the process that runs the world, by time.
pub const COMMAND_KIND: RowKind = RowKind::from_static("post");
/// The tokens of a heartbeat, by its agent and its number.
pub const HEARTBEAT_KIND: RowKind = RowKind::from_static("beat");

/// All kinds, in the order of an export.
pub const ROW_KINDS: [RowKind; 6] =
    [HEADER_KIND, AGENT_KIND, ROOM_KIND, MESSAGE_KIND, COMMAND_KIND, HEARTBEAT_KIND];

/// The key of the header.
pub(crate) const HEADER_KEY: &str = "0";
/// Longer than any key of digits.
pub const ALL_KEYS: std::ops::Range<&str> = "0".."9999999999999999999999";

/// Messages that are read at a time to build the index of a room.
const PAGE_SIZE: usize = 4_096;

/// A world that this process has leased.
pub struct WorldStore {
    name: String,
    /// When it was created: logs name a world by it, because its name is text of the user.
    created: Millis,
    kv_key: String,
    store: Box<dyn RowStore + Send>,
    /// Changes are written by [`WorldStore::save`].
    pub world: World,
    room_indexes: BTreeMap<RoomId, RoomIndex>,
    /// The keys of executed commands: their rows are deleted in the same transaction that writes their effects.
    executed_commands: Vec<String>,
    /// Rows of heartbeats that the next save writes, and those that it deletes.
    heartbeat_rows: (Vec<Row>, Vec<String>),
}

pub(crate) fn heartbeat_key(agent: AgentId, beat: u64) -> String {
    format!("{:04}{beat:010}", agent.0)
}

pub(crate) fn agent_key(id: u32) -> String {
    format!("{id:04}")
}

pub(crate) fn message_key(room: RoomId, id: u64) -> String {
    format!("{:04}{id:08}", room.0)
}

fn to_row(kind: RowKind, key: String, value: &impl Serialize) -> Result<Row, Error> {
    let value = serde_json::to_string(value)
        .map_err(|error| Error::internal(format!("writing a row of kind '{kind}'"), error.to_string()))?;
    Ok(Row { kind, key, value })
}

/// `what` names the row with its article: "an agent".
pub(crate) fn parse_row<T: DeserializeOwned>(what: &str, value: &str) -> Result<T, Error> {
    serde_json::from_str(value).map_err(|error| {
        Error::damaged(
            format!("reading {what}"),
            format!("{error}; it may have been written by a newer Halo"),
        )
    })
}

/// The key under which models keep the KV cache of a world. A new world with the name of a deleted one has another key.
#[must_use]
pub fn world_kv_key(name: &str, created: Millis) -> String {
    format!("world:{name}:{created}")
}

/// The key under which models keep the KV cache of an agent that can think at the same time as others.
pub(crate) fn agent_kv_key(world: &str, agent: AgentId) -> String {
    format!("{world}/{}", agent.0)
}

/// All keys under which models may keep KV caches of a world: its own and those of its agents, retired ones too.
///
/// # Errors
/// When the store cannot be read.
pub fn world_kv_keys(store: &mut dyn RowStore, name: &str, created: Millis) -> Result<Vec<String>, Error> {
    let world = world_kv_key(name, created);
    let agents = store.load_rows(name, &AGENT_KIND, ALL_KEYS, usize::MAX)?;
    let ids = agents.iter().filter_map(|row| row.key.parse().ok());
    let mut keys: Vec<String> = ids.map(|id| agent_kv_key(&world, AgentId(id))).collect();
    keys.push(world);
    Ok(keys)
}

pub fn check_world_name(name: &str) -> Result<(), Error> {
    let is_invalid = name.trim() != name
        || name.is_empty()
        || name.chars().count() > 60
        || name.starts_with("world:")
        || name.chars().any(is_invisible_control);
    if is_invalid {
        let reason = "a world's name has 1 to 60 characters on one line, without space at its ends and invisible control \
                      characters, and does not begin with 'world:'";
        return Err(Error::invalid_input(format!("naming a world '{name}'"), reason));
    }
    Ok(())
}

impl WorldStore {
    /// Creates a world and leases it.
    pub fn create(
        mut store: Box<dyn RowStore + Send>,
        name: &str,
        world: World,
        now: Millis,
    ) -> Result<Self, Error> {
        check_world_name(name)?;
        if find_summary(&mut *store, name)?.is_some() {
            let reason = "a world of that name exists; choose another name, or delete that world";
            return Err(Error::conflict(format!("creating the world '{name}'"), reason));
        }
        lease_world(&mut *store, name)?;
        let mut created = Self::with_world(store, name, world, now);
        created.world.advance_clock(now);
        created.save()?;
        // The store has set the time of creation.
        let summary = find_summary(&mut *created.store, name)?;
        created.created = summary.map_or(now, |summary| summary.created);
        created.kv_key = world_kv_key(name, created.created);
        Ok(created)
    }

    /// Opens a world and leases it.
    pub fn open(mut store: Box<dyn RowStore + Send>, name: &str) -> Result<Self, Error> {
        let summary = require_summary(&mut *store, name)?;
        lease_world(&mut *store, name)?;
        let world = load_rows(&mut *store, name, LOADED_MESSAGES)?;
        let mut opened = Self::with_world(store, name, world, summary.created);
        opened.index_all_messages()?;
        Ok(opened)
    }

    fn with_world(store: Box<dyn RowStore + Send>, name: &str, world: World, created: Millis) -> Self {
        let mut store = Self {
            name: name.to_owned(),
            created,
            kv_key: world_kv_key(name, created),
            store,
            world,
            room_indexes: BTreeMap::new(),
            executed_commands: Vec::new(),
            heartbeat_rows: <(Vec<Row>, Vec<String>)>::default(),
        };
        store.index_changed_messages();
        store
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// When the world was created.
    #[must_use]
    pub fn created(&self) -> Millis {
        self.created
    }

    /// The key under which models keep the KV cache of this world.
    #[must_use]
    pub fn kv_key(&self) -> &str {
        &self.kv_key
    }

    /// Writes all changes in one transaction.
    pub fn save(&mut self) -> Result<(), Error> {
        self.index_changed_messages();
        let changes = self.world.unsaved_changes();
        let (new_heartbeats, old_heartbeats) = &self.heartbeat_rows;
        if changes.is_empty() && self.executed_commands.is_empty() && new_heartbeats.is_empty() {
            return Ok(());
        }
        let mut rows = new_heartbeats.clone();
        if changes.header {
            rows.push(to_row(HEADER_KIND, HEADER_KEY.to_owned(), &self.world.header)?);
        }
        for agent in changes.agents.iter().filter_map(|id| self.world.any_agent(*id)) {
            rows.push(to_row(AGENT_KIND, agent_key(agent.id.0), agent)?);
        }
        for room in changes.rooms.iter().filter_map(|id| self.world.any_room(*id)) {
            rows.push(to_row(ROOM_KIND, agent_key(room.id.0), room)?);
        }
        for message in changes.messages.values() {
            rows.push(to_row(MESSAGE_KIND, message_key(message.room, message.id), message)?);
        }
        let executed = self.executed_commands.iter().map(|key| (COMMAND_KIND, key.clone()));
        let deleted: Vec<(RowKind, String)> =
            executed.chain(old_heartbeats.iter().map(|key| (HEARTBEAT_KIND, key.clone()))).collect();
        self.store.put_rows(&self.name, &rows, &deleted)?;
        self.world.mark_saved();
        self.executed_commands.clear();
        self.heartbeat_rows = <(Vec<Row>, Vec<String>)>::default();
        Ok(())
    }

    /// Adds the tokens of a heartbeat to the next save. Of each agent the last `keep` heartbeats stay stored.
    pub fn record_heartbeat(&mut self, record: &HeartbeatRecord, keep: u64) -> Result<(), Error> {
        let (first, end) = (0, (record.beat + 1).saturating_sub(keep));
        let (first, end) = (heartbeat_key(record.agent, first), heartbeat_key(record.agent, end));
        let old =
            self.store.load_rows(&self.name, &HEARTBEAT_KIND, first.as_str()..end.as_str(), usize::MAX)?;
        self.heartbeat_rows.1.extend(old.into_iter().map(|row| row.key));
        let key = heartbeat_key(record.agent, record.beat);
        self.heartbeat_rows.0.push(to_row(HEARTBEAT_KIND, key, record)?);
        Ok(())
    }

    /// The last stored heartbeats of an agent or of all, oldest first.
    pub fn heartbeat_records(
        &mut self,
        agent: Option<AgentId>,
        limit: usize,
    ) -> Result<Vec<HeartbeatRecord>, Error> {
        heartbeat_records(&mut *self.store, &self.name, agent, limit)
    }

    fn index_changed_messages(&mut self) {
        for message in self.world.unsaved_changes().messages.values() {
            self.room_indexes.entry(message.room).or_default().insert(message);
        }
    }

    fn index_all_messages(&mut self) -> Result<(), Error> {
        let rooms: Vec<RoomId> = self.world.rooms().map(|room| room.id).collect();
        for room in rooms {
            self.room_indexes.insert(room, build_room_index(&mut *self.store, &self.name, room)?);
        }
        Ok(())
    }

    /// The last `limit` messages of a room before a number, oldest first.
    pub fn messages_before(
        &mut self,
        room: RoomId,
        before: u64,
        limit: usize,
    ) -> Result<Vec<RoomMessage>, Error> {
        messages_before(&mut *self.store, &self.name, room, before, limit)
    }

    /// Older messages of a room that share rare words with its latest, best first.
    pub fn recall_messages(&mut self, room: RoomId) -> Vec<RoomMessage> {
        match self.room_indexes.get(&room) {
            Some(index) => recall_messages(&mut *self.store, &self.name, &self.world, (room, index)),
            None => Vec::new(),
        }
    }

    /// Executes the commands that other processes posted. Returns what changed, and the reasons of refused commands.
    pub fn apply_posted_commands(&mut self, now: Millis) -> Result<(WorldChanges, Vec<String>), Error> {
        let mut rows = self.store.load_rows(&self.name, &COMMAND_KIND, ALL_KEYS, usize::MAX)?;
        // A failed save leaves the rows of executed commands in the store: they are not executed twice.
        rows.retain(|row| !self.executed_commands.contains(&row.key));
        let mut refused = Vec::new();
        for row in rows {
            let now = self.world.advance_clock(now);
            let reason = match serde_json::from_str::<UserCommand>(&row.value) {
                Ok(command) => self.world.execute_command(command, now).err().map(|error| error.message),
                Err(error) => Some(error.to_string()),
            };
            refused.extend(reason);
            self.executed_commands.push(row.key);
        }
        let changes = self.world.unsaved_changes().clone();
        self.save()?;
        Ok((changes, refused))
    }
}

/// How many of the latest messages of a room are the query for older ones.
const QUERY_MESSAGES: usize = 3;

/// Leases a world to this process until the store is closed.
pub fn lease_world(store: &mut dyn RowStore, name: &str) -> Result<(), Error> {
    store
        .lease_namespace(name)
        .map_err(|error| Error { operation: format!("opening the world '{name}'"), ..error })
}

fn world_not_found(name: &str) -> Error {
    Error::not_found(format!("opening the world '{name}'"), "there is no world of that name")
}

fn find_summary(store: &mut dyn RowStore, name: &str) -> Result<Option<NamespaceSummary>, Error> {
    Ok(store.list_namespaces()?.into_iter().find(|summary| summary.name == name))
}

fn require_summary(store: &mut dyn RowStore, name: &str) -> Result<NamespaceSummary, Error> {
    find_summary(store, name)?.ok_or_else(|| world_not_found(name))
}

pub fn check_world_exists(store: &mut dyn RowStore, name: &str) -> Result<(), Error> {
    require_summary(store, name).map(drop)
}

/// Deletes a world. The caller has its lease.
pub fn delete_world(store: &mut dyn RowStore, name: &str) -> Result<(), Error> {
    require_summary(store, name)?;
    store.delete_namespace(name)
}

/// A world as it was last saved, without a lease: another process may be running it.
pub fn load_world(store: &mut dyn RowStore, name: &str) -> Result<World, Error> {
    require_summary(store, name)?;
    load_rows(store, name, LOADED_MESSAGES)
}

/// A world with only the last message of each room.
pub fn load_world_preview(store: &mut dyn RowStore, name: &str) -> Result<World, Error> {
    require_summary(store, name)?;
    load_rows(store, name, 1)
}

/// The number of agents, including retired ones, and of messages.
pub fn world_size(store: &mut dyn RowStore, name: &str) -> Result<(usize, u64), Error> {
    let agents = store.load_rows(name, &AGENT_KIND, ALL_KEYS, usize::MAX)?;
    Ok((agents.len(), message_count(store, name)?))
}

pub fn message_count(store: &mut dyn RowStore, name: &str) -> Result<u64, Error> {
    let Some(row) = store.load_rows(name, &HEADER_KIND, ALL_KEYS, 1)?.into_iter().next() else {
        require_summary(store, name)?;
        return Err(missing_header(name));
    };
    let header: WorldHeader = parse_row("the header of the world", &row.value)?;
    Ok(header.next_message.saturating_sub(1))
}

fn missing_header(name: &str) -> Error {
    Error::damaged(format!("opening the world '{name}'"), "its header is missing")
}

/// The last `limit` messages of a room before a number, oldest first.
pub fn messages_before(
    store: &mut dyn RowStore,
    name: &str,
    room: RoomId,
    before: u64,
    limit: usize,
) -> Result<Vec<RoomMessage>, Error> {
    let (first, end) = (message_key(room, 0), message_key(room, before.min(99_999_999)));
    let rows = store.load_rows(name, &MESSAGE_KIND, first.as_str()..end.as_str(), limit)?;
    rows.iter().map(|row| parse_row("a message", &row.value)).collect()
}

/// The last stored heartbeats of an agent or of all, oldest first.
pub fn heartbeat_records(
    store: &mut dyn RowStore,
    name: &str,
    agent: Option<AgentId>,
    limit: usize,
) -> Result<Vec<HeartbeatRecord>, Error> {
    let parse = |row: &Row| parse_row("a heartbeat", &row.value);
    let Some(agent) = agent else {
        let rows = store.load_rows(name, &HEARTBEAT_KIND, ALL_KEYS, usize::MAX)?;
        let mut all: Vec<HeartbeatRecord> = rows.iter().map(parse).collect::<Result<_, _>>()?;
        all.sort_by_key(|record| (record.at, record.agent, record.beat));
        all.drain(..all.len().saturating_sub(limit));
        return Ok(all);
    };
    let (first, end) = (heartbeat_key(agent, 0), heartbeat_key(agent, 9_999_999_999));
    store.load_rows(name, &HEARTBEAT_KIND, first.as_str()..end.as_str(), limit)?.iter().map(parse).collect()
}

pub fn build_room_index(store: &mut dyn RowStore, name: &str, room: RoomId) -> Result<RoomIndex, Error> {
    let (mut pages, mut before) = (Vec::new(), u64::MAX);
    loop {
        let page = messages_before(store, name, room, before, PAGE_SIZE)?;
        // A damaged number must not make this loop endless: every page begins before the last.
        let Some(first) = page.first().map(|message| message.id).filter(|first| *first < before) else {
            break;
        };
        before = first;
        pages.push(page);
    }
    let mut index = RoomIndex::default();
    pages.iter().rev().flatten().for_each(|message| index.insert(message));
    Ok(index)
}

/// Older messages of a room that share rare words with its latest, best first.
pub fn recall_messages(
    store: &mut dyn RowStore,
    name: &str,
    world: &World,
    (room, index): (RoomId, &RoomIndex),
) -> Vec<RoomMessage> {
    let Some(state) = world.room(room) else { return Vec::new() };
    let latest = || state.messages.iter().rev().take(QUERY_MESSAGES);
    let query: Vec<&str> = latest().map(|message| message.content.as_str()).collect();
    // The latest messages are in the HUD anyway.
    let before = latest().next_back().map_or(0, |message| message.id);
    let ids = index.search(&query.join("\n"), before);
    let load = |id: u64| match state.message(id) {
        Some(message) => Some(message.clone()),
        None => {
            messages_before(store, name, room, id + 1, 1).ok()?.into_iter().find(|message| message.id == id)
        }
    };
    ids.into_iter().filter_map(load).collect()
}

/// Posts a command to a world that another process may be running: that process executes it when it next looks.
pub fn post_command(
    store: &mut dyn RowStore,
    name: &str,
    command: &UserCommand,
    now: Millis,
) -> Result<(), Error> {
    require_summary(store, name)?;
    #[expect(
        clippy::disallowed_types,
        reason = "the clock makes the keys of two processes differ; no rule reads it"
    )]
    let clock = std::time::SystemTime::now();
    let unique = xxhash_rust::xxh3::xxh3_64(format!("{command:?}{clock:?}").as_bytes());
    let key = format!("{now:014}{:06}", unique % 1_000_000);
    store.post_row(name, &to_row(COMMAND_KIND, key, command)?)
}

/// Loads a world with the last `messages` messages of each room.
fn load_rows(store: &mut dyn RowStore, name: &str, messages: usize) -> Result<World, Error> {
    let header = store.load_rows(name, &HEADER_KIND, ALL_KEYS, usize::MAX)?;
    let header = header.first().ok_or_else(|| missing_header(name))?;
    let header: WorldHeader = parse_row("the header of the world", &header.value)?;
    let agents: Vec<AgentState> = store
        .load_rows(name, &AGENT_KIND, ALL_KEYS, usize::MAX)?
        .iter()
        .map(|row| parse_row("an agent", &row.value))
        .collect::<Result<_, _>>()?;
    let rooms: Vec<Room> = store
        .load_rows(name, &ROOM_KIND, ALL_KEYS, usize::MAX)?
        .iter()
        .map(|row| parse_row("a room", &row.value))
        .collect::<Result<_, _>>()?;
    let ids: Vec<RoomId> = rooms.iter().map(|room| room.id).collect();
    let mut world = World::from_stored(header, agents, rooms);
    for room in ids {
        for message in messages_before(store, name, room, u64::MAX, messages)? {
            world.load_message(message);
        }
    }
    Ok(world)
}
