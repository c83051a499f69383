//! A world that is kept: what changes is written before anybody is told, all of it or nothing.

use super::shelf::Shelf;
use halo_agents::heartbeat::Millis;
use halo_agents::wish::Wish;
use halo_agents::world::{AT_HAND, AgentState, Head, Message, Room, RoomId, Touched, World};
use halo_core::seams::{Fault, Kind, SeamError, WorldRow, Worlds};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

/// The key of what is true of a whole world.
pub(super) const HEAD: &str = "0";
/// Before and behind all keys.
const ALL: std::ops::Range<&str> = "0".."9999999999999999999999";

/// How many messages are read at a time while a world is opened.
const PAGE: usize = 4_096;

/// A world that is kept.
pub struct Realm {
    name: String,
    /// What a model keeps of it, it keeps by this.
    key: String,
    store: Box<dyn Worlds + Send>,
    /// The world. Whatever is changed in it is kept by [`Realm::save`].
    pub world: World,
    shelves: BTreeMap<RoomId, Shelf>,
    /// What was asked from outside and has been done: it goes with what came of it.
    answered: Vec<String>,
}

pub(super) fn agent_key(id: u32) -> String {
    format!("{id:04}")
}

pub(super) fn said_key(room: RoomId, id: u64) -> String {
    format!("{:04}{id:08}", room.0)
}

fn row(kind: Kind, key: String, value: &impl Serialize) -> WorldRow {
    WorldRow { kind, key, value: serde_json::to_string(value).ok() }
}

pub(super) fn read<T: DeserializeOwned>(what: &str, value: &str) -> Result<T, SeamError> {
    serde_json::from_str(value).map_err(|why| {
        SeamError::new(format!("reading {what}"), format!("{why}; it may have been written by a newer Halo"))
    })
}

/// What models keep a world by that began then.
#[must_use]
pub fn key(name: &str, created: Millis) -> String {
    format!("world:{name}:{created}")
}

/// Whether a world can be called that.
///
/// # Errors
/// In words, when it cannot.
pub fn check_name(name: &str) -> Result<(), SeamError> {
    let wrong = name.trim() != name
        || name.is_empty()
        || name.chars().count() > 60
        || name.starts_with("world:")
        || name.chars().any(char::is_control);
    if wrong {
        let why = "a world's name has 1 to 60 characters on one line, without space at its ends, and does not begin with 'world:'";
        return Err(SeamError::asked(format!("naming a world '{name}'"), why));
    }
    Ok(())
}

impl Realm {
    /// A new world.
    ///
    /// # Errors
    /// When there is one of that name, or it cannot be kept.
    pub fn found(
        mut store: Box<dyn Worlds + Send>,
        name: &str,
        world: World,
        now: Millis,
    ) -> Result<Self, SeamError> {
        check_name(name)?;
        if store.worlds()?.iter().any(|known| known.name == name) {
            let why =
                "there is one already; `halo rooms list` shows all, and `halo rooms end` ends one for good";
            return Err(SeamError::asked(format!("making the world '{name}'"), why));
        }
        store.hold_world(name)?;
        let mut realm = Self::around(store, name, world, now);
        realm.world.tick(now);
        realm.save()?;
        // It is known by when the store says that it began.
        let began = realm.store.worlds()?.into_iter().find(|known| known.name == name);
        realm.key = key(name, began.map_or(now, |known| known.created));
        Ok(realm)
    }

    fn around(store: Box<dyn Worlds + Send>, name: &str, world: World, created: Millis) -> Self {
        let key = key(name, created);
        let mut realm =
            Self { name: name.to_owned(), key, store, world, shelves: BTreeMap::new(), answered: Vec::new() };
        realm.shelve_touched();
        realm
    }

    /// A world that was kept. Nobody else can run it meanwhile.
    ///
    /// # Errors
    /// When there is none of that name, somebody else runs it, or it is damaged.
    pub fn open(mut store: Box<dyn Worlds + Send>, name: &str) -> Result<Self, SeamError> {
        let known = store.worlds()?.into_iter().find(|known| known.name == name);
        let known = known.ok_or_else(|| missing(name))?;
        store.hold_world(name)?;
        let world = load(&mut *store, name, AT_HAND)?;
        let mut realm = Self::around(store, name, world, known.created);
        realm.shelve_all()?;
        Ok(realm)
    }

    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What a model keeps of it, it keeps by this.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Keeps what has changed. When this returns, it is safe.
    ///
    /// # Errors
    /// When it cannot be: then it is tried again the next time.
    pub fn save(&mut self) -> Result<(), SeamError> {
        self.shelve_touched();
        let touched = self.world.touched();
        if touched.is_empty() && self.answered.is_empty() {
            return Ok(());
        }
        let mut rows = Vec::new();
        if touched.head {
            rows.push(row(Kind::World, HEAD.to_owned(), &self.world.head));
        }
        let agents = touched.agents.iter().filter_map(|id| self.world.any_agent(*id));
        rows.extend(agents.map(|agent| row(Kind::Agent, agent_key(agent.id.0), agent)));
        let rooms = touched.rooms.iter().filter_map(|id| self.world.any_room(*id));
        rows.extend(rooms.map(|room| row(Kind::Room, agent_key(room.id.0), room)));
        let said = touched.messages.values();
        rows.extend(said.map(|message| row(Kind::Said, said_key(message.room, message.id), message)));
        let posts = self.answered.iter().cloned();
        rows.extend(posts.map(|key| WorldRow { kind: Kind::Post, key, value: None }));
        self.store.put_world_rows(&self.name, &rows)?;
        self.world.is_kept();
        self.answered.clear();
        Ok(())
    }

    fn shelve_touched(&mut self) {
        for message in self.world.touched().messages.values() {
            self.shelves.entry(message.room).or_default().put(message);
        }
    }

    /// Puts all that was ever said on its shelf.
    fn shelve_all(&mut self) -> Result<(), SeamError> {
        let rooms: Vec<RoomId> = self.world.rooms().map(|room| room.id).collect();
        for room in rooms {
            self.shelves.insert(room, shelf(&mut *self.store, &self.name, room)?);
        }
        Ok(())
    }

    /// Messages of a room before a number: the last so many.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn older(&mut self, room: RoomId, before: u64, most: usize) -> Result<Vec<Message>, SeamError> {
        messages(&mut *self.store, &self.name, room, before, most)
    }

    /// Older messages of a room that matter now, the best first: those that share telling words with what was said last.
    pub fn recalled(&mut self, room: RoomId) -> Vec<Message> {
        match self.shelves.get(&room) {
            Some(shelf) => recalled(&mut *self.store, &self.name, &self.world, (room, shelf)),
            None => Vec::new(),
        }
    }

    /// Does what was asked from outside, while it ran or before. Returns what changed, and what was refused.
    ///
    /// # Errors
    /// When it cannot be read or kept.
    pub fn take_posts(&mut self, now: Millis) -> Result<(Touched, Vec<String>), SeamError> {
        let posts = self.store.world_rows(&self.name, Kind::Post, ALL, usize::MAX)?;
        let mut refused = Vec::new();
        // What was done and could not be struck out yet is not done again.
        for post in posts.into_iter().filter(|post| !self.answered.contains(&post.key)).collect::<Vec<_>>() {
            let now = self.world.tick(now);
            let done = match serde_json::from_str::<Wish>(&post.value) {
                Ok(wish) => self.world.wish(wish, now),
                Err(why) => Err(why.to_string()),
            };
            refused.extend(done.err());
            self.answered.push(post.key);
        }
        let touched = self.world.touched().clone();
        self.save()?;
        Ok((touched, refused))
    }
}

/// How many of the latest messages say what matters now.
const LATEST: usize = 3;

fn missing(name: &str) -> SeamError {
    let why = "there is none of that name; `halo rooms list` shows those that there are, `halo rooms new` makes one";
    SeamError::asked(format!("opening the world '{name}'"), why).by(Fault::Asked)
}

/// A world as it was last kept, to look at; somebody may be running it.
///
/// # Errors
/// When there is none of that name, or it is damaged.
pub fn look(store: &mut dyn Worlds, name: &str) -> Result<World, SeamError> {
    exists(store, name)?;
    load(store, name, AT_HAND)
}

/// The same, with no more than what was said last in each room.
///
/// # Errors
/// As above.
pub fn glance(store: &mut dyn Worlds, name: &str) -> Result<World, SeamError> {
    exists(store, name)?;
    load(store, name, 1)
}

fn exists(store: &mut dyn Worlds, name: &str) -> Result<(), SeamError> {
    if store.worlds()?.iter().any(|known| known.name == name) { Ok(()) } else { Err(missing(name)) }
}

/// How many live in a world, and how much was said there.
///
/// # Errors
/// When it is damaged.
pub fn size(store: &mut dyn Worlds, name: &str) -> Result<(usize, u64), SeamError> {
    let agents = store.world_rows(name, Kind::Agent, ALL, usize::MAX)?;
    Ok((agents.len(), said(store, name)?))
}

/// How much was said in a world.
///
/// # Errors
/// When there is none of that name, or it is damaged.
pub fn said(store: &mut dyn Worlds, name: &str) -> Result<u64, SeamError> {
    let Some(head) = store.world_rows(name, Kind::World, ALL, 1)?.into_iter().next() else {
        let is_there = store.worlds()?.iter().any(|known| known.name == name);
        let damaged = || SeamError::new(format!("opening the world '{name}'"), "its first row is missing");
        return Err(if is_there { damaged() } else { missing(name) });
    };
    let head: Head = read("what is true of the world", &head.value)?;
    Ok(head.next_message.saturating_sub(1))
}

/// Messages of a room before a number: the last so many.
///
/// # Errors
/// When they cannot be read.
pub fn messages(
    store: &mut dyn Worlds,
    name: &str,
    room: RoomId,
    before: u64,
    most: usize,
) -> Result<Vec<Message>, SeamError> {
    let (first, last) = (said_key(room, 0), said_key(room, before.min(99_999_999)));
    let rows = store.world_rows(name, Kind::Said, first.as_str()..last.as_str(), most)?;
    rows.iter().map(|row| read("a message", &row.value)).collect()
}

/// All that was ever said in a room, by its words.
///
/// # Errors
/// When it cannot be read.
pub fn shelf(store: &mut dyn Worlds, name: &str, room: RoomId) -> Result<Shelf, SeamError> {
    let (mut pages, mut before) = (Vec::new(), u64::MAX);
    loop {
        let page = messages(store, name, room, before, PAGE)?;
        // Whatever is written there, it goes on from page to page.
        let Some(first) = page.first().map(|message| message.id).filter(|first| *first < before) else {
            break;
        };
        before = first;
        pages.push(page);
    }
    let mut shelf = Shelf::default();
    pages.iter().rev().flatten().for_each(|message| shelf.put(message));
    Ok(shelf)
}

/// Older messages of a room that matter now, the best first: those that share telling words with what was said last.
pub fn recalled(
    store: &mut dyn Worlds,
    name: &str,
    world: &World,
    (room, shelf): (RoomId, &Shelf),
) -> Vec<Message> {
    let Some(inside) = world.room(room) else { return Vec::new() };
    let last: Vec<&str> = inside.messages.iter().rev().take(LATEST).map(|m| m.content.as_str()).collect();
    // What was said last is seen anyway.
    let before = inside.messages.iter().rev().take(LATEST).next_back().map_or(0, |message| message.id);
    let found = shelf.find(&last.join("\n"), before);
    let message = |id: u64| match inside.message(id) {
        Some(message) => Some(message.clone()),
        // It is only in the store any more.
        None => messages(store, name, room, id + 1, 1).ok()?.into_iter().find(|message| message.id == id),
    };
    found.into_iter().filter_map(message).collect()
}

/// Asks something of a world that somebody else may be running: it is done when that one looks.
///
/// # Errors
/// When there is none of that name, or it cannot be kept.
pub fn post(store: &mut dyn Worlds, name: &str, wish: &Wish, now: Millis) -> Result<(), SeamError> {
    exists(store, name)?;
    // Two at the same moment have keys of their own.
    let mark = xxhash_rust::xxh3::xxh3_64(format!("{wish:?}{:?}", std::time::SystemTime::now()).as_bytes());
    let key = format!("{now:014}{:06}", mark % 1_000_000);
    store.put_world_rows(name, &[row(Kind::Post, key, wish)])
}

fn load(store: &mut dyn Worlds, name: &str, at_hand: usize) -> Result<World, SeamError> {
    let rows = |store: &mut dyn Worlds, kind| store.world_rows(name, kind, ALL, usize::MAX);
    let head: Option<Head> = rows(store, Kind::World)?
        .first()
        .map(|row| read("what is true of the world", &row.value))
        .transpose()?;
    let head = head
        .ok_or_else(|| SeamError::new(format!("opening the world '{name}'"), "its first row is missing"))?;
    let agents: Vec<AgentState> =
        rows(store, Kind::Agent)?.iter().map(|row| read("an agent", &row.value)).collect::<Result<_, _>>()?;
    let rooms: Vec<Room> =
        rows(store, Kind::Room)?.iter().map(|row| read("a room", &row.value)).collect::<Result<_, _>>()?;
    let ids: Vec<RoomId> = rooms.iter().map(|room| room.id).collect();
    let mut world = World::kept(head, agents, rooms);
    for room in ids {
        messages(store, name, room, u64::MAX, at_hand)?
            .into_iter()
            .for_each(|message| world.recollect(message));
    }
    Ok(world)
}
