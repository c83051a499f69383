//! The cells of what has left the window, kept in memory and on disk within a budget.
//!
//! A *piece* is what a run of tokens left behind: its cells as llama.cpp writes them, the tokens, and where they stood.
//! What a cell holds never changes, so a piece is good for ever: a chunk that leaves a second time is not saved again.
//! Pieces go to disk behind the caller's back, and from memory when there is no more room, the least recently useful
//! first; so they do from disk. Nothing here is precious: what is lost, damaged or of another model is computed again.

mod file;
mod writer;

use crate::ffi::{Pos, Token};
use crate::key::Key;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::SystemTime;
use writer::{Work, Writer};
use xxhash_rust::xxh3::xxh3_128;

/// Branches of branches whose pieces are looked through.
const BRANCHES: usize = 32;

/// The most tokens of a piece.
pub const LONGEST: usize = 512;

/// What a run of tokens left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The name of its first token.
    pub start: Key,
    /// Its tokens.
    pub tokens: Vec<Token>,
    /// The model's position of its first token; the others follow.
    pub position: Pos,
    /// The cells, as llama.cpp writes them.
    pub cells: Vec<u8>,
}

impl Piece {
    /// Bytes as a file.
    fn bytes(&self) -> u64 {
        (file::FIXED + self.tokens.len() * 4 + 16 + self.cells.len()) as u64
    }
}

/// How much is kept, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes in memory.
    pub ram: u64,
    /// Bytes on disk.
    pub disk: u64,
    /// The folder; none keeps nothing on disk.
    pub folder: Option<PathBuf>,
}

impl Room {
    /// Nothing is kept.
    #[must_use]
    pub fn none() -> Self {
        Self { ram: 0, disk: 0, folder: None }
    }
}

/// A conversation's name among the pieces: names of people's making never become names of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Whose(u128);

/// What is known of a piece without its cells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The name of its first token.
    pub start: Key,
    /// Its tokens.
    pub tokens: Vec<Token>,
    /// The model's position of its first token.
    pub position: Pos,
}

struct Kept {
    len: usize,
    bytes: u64,
    /// The larger, the more recently useful.
    used: u64,
    /// What it holds; none until its file has been looked into.
    head: Option<Arc<Head>>,
    /// Whether the tokens have been read anew since.
    outdated: bool,
    here: Option<Arc<Piece>>,
    disk: Arc<Disk>,
}

/// Whether a piece is on disk; told by the thread that writes.
struct Disk {
    state: AtomicU8,
}

const NOT_WRITTEN: u8 = 0;
const WRITTEN: u8 = 1;
const REFUSED: u8 = 2;

impl Disk {
    fn new(state: u8) -> Arc<Self> {
        Arc::new(Self { state: AtomicU8::new(state) })
    }

    fn is(&self, state: u8) -> bool {
        self.state.load(Ordering::Acquire) == state
    }
}

/// Where a piece is found: whose it is, and its first token.
type At = (Whose, Key);

/// Saved cells, of all conversations with one model.
pub struct Graveyard {
    room: Room,
    /// What the cells belong to: a model and how it is run.
    mark: u128,
    pieces: BTreeMap<At, Kept>,
    /// Branches: whose pieces serve them too, and up to which position.
    parents: BTreeMap<Whose, (Whose, i64)>,
    /// Files that nobody here will use, of other models or left over: the first to go.
    strangers: Vec<(PathBuf, u64)>,
    /// Bytes in memory.
    ram: u64,
    /// Bytes on disk, or on their way there, or more: what could not be written is found out when it matters.
    disk: u64,
    clock: u64,
    writer: Option<Writer>,
}

impl Graveyard {
    /// The graveyard of a model that is known by `mark`. What is on disk from before is found.
    #[must_use]
    pub fn open(room: Room, mark: u128) -> Self {
        let mut yard = Self {
            room,
            mark,
            pieces: BTreeMap::new(),
            parents: BTreeMap::new(),
            strangers: Vec::new(),
            ram: 0,
            disk: 0,
            clock: 0,
            writer: None,
        };
        if let Some(folder) = yard.room.folder.clone().filter(|_| yard.room.disk > 0) {
            let writer = file::make_private(&folder).and_then(|()| Writer::start());
            match writer {
                Ok(writer) => {
                    yard.find(&folder);
                    yard.writer = Some(writer);
                    yard.shrink();
                }
                Err(error) => {
                    let folder = folder.display();
                    tracing::warn!("the cells of dead chunks stay in memory: cannot use {folder}: {error}");
                }
            }
        }
        yard
    }

    /// Looks through the folder.
    fn find(&mut self, folder: &Path) {
        let own = format!("{:032x}", self.mark);
        let mut found: Vec<(SystemTime, At, Kept, PathBuf)> = Vec::new();
        for model in list(folder) {
            let is_own = model.file_name().is_some_and(|name| name == own.as_str());
            for conversation in list(&model) {
                let whose = name_of(&conversation).and_then(|n| u128::from_str_radix(n, 16).ok()).map(Whose);
                for file in list(&conversation) {
                    let Ok(about) = fs::metadata(&file) else { continue };
                    let bytes = about.len();
                    self.disk += bytes;
                    match (whose, name_of(&file).and_then(parse_name)) {
                        (Some(whose), Some((key, len))) if is_own => {
                            let time = about.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                            let disk = Disk::new(WRITTEN);
                            let kept =
                                Kept { len, bytes, used: 0, head: None, outdated: false, here: None, disk };
                            found.push((time, (whose, key), kept, file));
                        }
                        _ => self.strangers.push((file, bytes)),
                    }
                }
            }
        }
        found.sort_by_key(|(time, at, ..)| (*time, *at));
        for (_, at, mut kept, _) in found {
            self.clock += 1;
            kept.used = self.clock;
            // Of two files that begin with the same token, the later stands.
            if let Some(old) = self.pieces.insert(at, kept)
                && let Some(path) = self.path(at, old.len)
            {
                self.strangers.push((path, old.bytes));
            }
        }
    }

    /// Whether a run is kept as it stands: these tokens from that one on, at that position.
    #[must_use]
    pub fn has(&self, conversation: &str, start: Key, tokens: &[Token], position: Pos) -> bool {
        let end = start.plus(tokens.len().saturating_sub(1));
        self.line_of(whose(conversation), end).any(|whose| {
            let kept = self.pieces.get(&(whose, start)).filter(|kept| !kept.outdated);
            kept.and_then(|kept| kept.head.as_ref())
                .is_some_and(|head| head.position == position && head.tokens.starts_with(tokens))
        })
    }

    /// A conversation branched off another: up to a position, the other's pieces serve both.
    pub fn inherit(&mut self, conversation: &str, parent: &str, positions: u64) {
        let upto = i64::try_from(positions).unwrap_or(i64::MAX);
        let (own, parent) = (whose(conversation), whose(parent));
        if own != parent {
            self.parents.insert(own, (parent, upto));
        }
    }

    /// A conversation, and those that it branched off before a token was said.
    fn line_of(&self, whose: Whose, key: Key) -> impl Iterator<Item = Whose> + '_ {
        let parent = move |own: &Whose| {
            self.parents.get(own).filter(|(_, upto)| key.at < *upto).map(|(parent, _)| *parent)
        };
        std::iter::successors(Some(whose), parent).take(BRANCHES)
    }

    /// Keeps a piece, in the place of one that begins with the same token.
    pub fn put(&mut self, conversation: &str, piece: Piece) {
        let at = (whose(conversation), piece.start);
        let (len, bytes) = (piece.tokens.len(), piece.bytes());
        let old = self.take(at);
        let disk = Disk::new(REFUSED);
        let piece = Arc::new(piece);
        if let (Some(writer), Some(path)) = (&self.writer, self.path(at, len)) {
            if let Some(old) = old.filter(|old| old.len != len).and_then(|old| self.path(at, old.len)) {
                writer.send(Work::Remove(old));
            }
            disk.state.store(NOT_WRITTEN, Ordering::Release);
            writer.send(Work::Write(path, Arc::clone(&piece), self.mark, Arc::clone(&disk)));
            self.disk += bytes;
        }
        self.clock += 1;
        self.ram += bytes;
        let head = Head { start: piece.start, tokens: piece.tokens.clone(), position: piece.position };
        let head = Some(Arc::new(head));
        let kept = Kept { len, bytes, used: self.clock, head, outdated: false, here: Some(piece), disk };
        self.pieces.insert(at, kept);
        self.shrink();
    }

    /// What is kept of a token, without its cells. A file that is damaged is thrown away.
    pub fn head(&mut self, conversation: &str, key: Key) -> Option<Arc<Head>> {
        let at = self.serves(whose(conversation), key)?;
        let kept = self.pieces.get(&at)?;
        if let Some(head) = &kept.head {
            return Some(Arc::clone(head));
        }
        let path = self.path(at, kept.len)?;
        match file::read_head(&path, self.mark, at.1, kept.len) {
            Ok(head) => {
                let head = Arc::new(head);
                self.pieces.get_mut(&at)?.head = Some(Arc::clone(&head));
                Some(head)
            }
            Err(why) => {
                self.damaged(at, &path, &why);
                None
            }
        }
    }

    /// The piece that holds a token, from memory or from disk. A file that is damaged is thrown away.
    pub fn get(&mut self, conversation: &str, key: Key) -> Option<Arc<Piece>> {
        let at = self.serves(whose(conversation), key)?;
        let kept = self.pieces.get(&at)?;
        let piece = match &kept.here {
            Some(piece) => Arc::clone(piece),
            None => {
                let path = self.path(at, kept.len)?;
                match file::read(&path, self.mark, at.1, kept.len) {
                    Ok(piece) => {
                        // The next to look through the folder sees that it was useful.
                        let _ = File::open(&path).and_then(|f| f.set_modified(SystemTime::now()));
                        Arc::new(piece)
                    }
                    Err(why) => {
                        self.damaged(at, &path, &why);
                        return None;
                    }
                }
            }
        };
        self.clock += 1;
        let clock = self.clock;
        if let Some(kept) = self.pieces.get_mut(&at) {
            kept.used = clock;
            let head = || Head { start: piece.start, tokens: piece.tokens.clone(), position: piece.position };
            kept.head.get_or_insert_with(|| Arc::new(head()));
            if kept.here.replace(Arc::clone(&piece)).is_none() {
                self.ram += kept.bytes;
            }
        }
        self.shrink();
        Some(piece)
    }

    /// A token was read anew: the piece that holds it still serves, but is to be replaced by the next.
    pub fn outdate(&mut self, conversation: &str, key: Key) {
        if let Some(at) = self.holds(whose(conversation), key)
            && let Some(kept) = self.pieces.get_mut(&at)
        {
            kept.outdated = true;
        }
    }

    /// Drops a piece that turned out to be useless.
    pub fn discard(&mut self, conversation: &str, start: Key) {
        let own = whose(conversation);
        let holder = self.line_of(own, start).find(|whose| self.pieces.contains_key(&(*whose, start)));
        self.drop_piece((holder.unwrap_or(own), start));
    }

    /// Drops all pieces of a conversation.
    pub fn forget(&mut self, conversation: &str) {
        let whose = whose(conversation);
        self.parents.remove(&whose);
        let range = (whose, Key::ENDS.0)..=(whose, Key::ENDS.1);
        let all: Vec<_> = self.pieces.range(range).map(|(at, _)| *at).collect();
        all.into_iter().for_each(|at| self.drop_piece(at));
        // What was left over of it goes too.
        if let (Some(folder), Some(writer)) = (self.folder(whose), &self.writer) {
            for (path, _) in self.strangers.extract_if(.., |(path, _)| path.starts_with(&folder)) {
                writer.send(Work::Remove(path));
            }
        }
    }

    /// Bytes in memory, and bytes on disk or on their way there.
    #[must_use]
    pub fn size(&self) -> (u64, u64) {
        let disk = self.pieces.values().filter(|k| !k.disk.is(REFUSED)).map(|k| k.bytes).sum::<u64>();
        (self.ram, disk + self.strangers.iter().map(|(_, bytes)| bytes).sum::<u64>())
    }

    /// Waits until all is on disk that will be.
    pub fn flush(&mut self) {
        if let Some(writer) = &self.writer {
            let (done, wait) = sync_channel(1);
            writer.send(Work::Tell(done));
            let _ = wait.recv();
            self.shrink();
        }
    }

    /// The piece that serves a token: the conversation's own, or that of one that it branched off.
    fn serves(&self, whose: Whose, key: Key) -> Option<At> {
        self.line_of(whose, key).find_map(|whose| self.holds(whose, key))
    }

    /// The piece that holds a token. Pieces may overlap: a chunk was cut or joined.
    fn holds(&self, whose: Whose, key: Key) -> Option<At> {
        let near = (whose, Key::said(key.at.saturating_sub(LONGEST as i64)))..=(whose, key);
        let holds = |(at, kept): &(&At, &Kept)| key.from(at.1).is_some_and(|n| n < kept.len);
        self.pieces.range(near).rev().find(holds).map(|(at, _)| *at)
    }

    /// Takes a piece out of the books.
    fn take(&mut self, at: At) -> Option<Kept> {
        let kept = self.pieces.remove(&at)?;
        if kept.here.is_some() {
            self.ram -= kept.bytes;
        }
        if !kept.disk.is(REFUSED) {
            self.disk = self.disk.saturating_sub(kept.bytes);
            // If it waits to be written, it need not be.
            kept.disk.state.store(REFUSED, Ordering::Release);
        }
        Some(kept)
    }

    fn damaged(&mut self, at: At, path: &Path, why: &str) {
        tracing::warn!("saved cells are not used: {}: {why}", path.display());
        self.drop_piece(at);
    }

    fn drop_piece(&mut self, at: At) {
        if let Some(kept) = self.take(at)
            && let (Some(writer), Some(path)) = (&self.writer, self.path(at, kept.len))
        {
            writer.send(Work::Remove(path));
        }
    }

    /// Lets go of what is over the budget, the least recently useful first, and of a tenth more, so that this is not
    /// done every time.
    fn shrink(&mut self) {
        if self.ram > self.room.ram {
            for at in self.oldest(|kept| kept.here.is_some()) {
                if self.ram <= self.room.ram / 10 * 9 {
                    break;
                }
                let Some(kept) = self.pieces.get_mut(&at) else { continue };
                // What is not written yet soon will be; there is never much of that.
                if kept.disk.is(WRITTEN) {
                    kept.here = None;
                    self.ram -= kept.bytes;
                } else if kept.disk.is(REFUSED) {
                    self.take(at);
                }
            }
        }
        if self.disk > self.room.disk && self.writer.is_some() {
            self.disk = self.size().1;
        }
        if self.disk > self.room.disk {
            while self.disk > self.room.disk / 10 * 9
                && let Some((path, bytes)) = self.strangers.pop()
            {
                self.disk = self.disk.saturating_sub(bytes);
                self.writer.iter().for_each(|writer| writer.send(Work::Remove(path.clone())));
            }
            for at in self.oldest(|kept| !kept.disk.is(REFUSED)) {
                if self.disk <= self.room.disk / 10 * 9 {
                    break;
                }
                let Some(kept) = self.pieces.get_mut(&at) else { continue };
                self.disk = self.disk.saturating_sub(kept.bytes);
                kept.disk.state.store(REFUSED, Ordering::Release);
                let (len, gone) = (kept.len, kept.here.is_none());
                if gone {
                    self.pieces.remove(&at);
                }
                if let (Some(writer), Some(path)) = (&self.writer, self.path(at, len)) {
                    writer.send(Work::Remove(path));
                }
            }
        }
    }

    /// Pieces, the least recently useful first.
    fn oldest(&self, which: impl Fn(&Kept) -> bool) -> Vec<At> {
        let mut order: Vec<(u64, At)> =
            self.pieces.iter().filter(|(_, kept)| which(kept)).map(|(at, kept)| (kept.used, *at)).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, at)| at).collect()
    }

    fn folder(&self, whose: Whose) -> Option<PathBuf> {
        let folder = self.room.folder.as_ref()?.join(format!("{:032x}", self.mark));
        Some(folder.join(format!("{:032x}", whose.0)))
    }

    fn path(&self, (whose, key): At, len: usize) -> Option<PathBuf> {
        Some(self.folder(whose)?.join(format!("{:016x}.{:x}-{len}.kv", key.at, key.behind)))
    }
}

fn whose(conversation: &str) -> Whose {
    Whose(xxh3_128(conversation.as_bytes()))
}

/// What lies in the folder of a graveyard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Pieces that are whole.
    pub pieces: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Files that are none, or damaged. They are never used, and whatever they held is computed again.
    pub damaged: Vec<PathBuf>,
}

/// Looks at every file of a graveyard, of all models, to the last byte.
#[must_use]
pub fn examine(folder: &Path) -> Found {
    let mut found = Found::default();
    for model in list(folder) {
        let mark = name_of(&model).and_then(|name| u128::from_str_radix(name, 16).ok());
        for file in list(&model).iter().flat_map(|conversation| list(conversation)) {
            let named = mark.zip(name_of(&file).and_then(parse_name));
            match named.map(|(mark, (key, len))| file::read(&file, mark, key, len)) {
                Some(Ok(piece)) => {
                    found.pieces += 1;
                    found.bytes += piece.bytes();
                }
                _ => found.damaged.push(file),
            }
        }
    }
    found
}

/// Removes all that a graveyard's folder holds, of all models, but for these conversations.
///
/// # Errors
/// When something cannot be removed.
pub fn keep_only(folder: &Path, conversations: &[String]) -> std::io::Result<()> {
    let kept: Vec<String> = conversations.iter().map(|key| format!("{:032x}", whose(key).0)).collect();
    for conversation in list(folder).iter().flat_map(|model| list(model)) {
        let named = |name: &str| kept.iter().any(|kept| kept == name);
        if conversation.is_dir() && !name_of(&conversation).is_some_and(named) {
            fs::remove_dir_all(conversation)?;
        }
    }
    Ok(())
}

fn list(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.filter_map(|e| e.ok().map(|e| e.path())).collect();
    paths.sort_unstable();
    paths
}

fn name_of(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}

/// The first token and the length, from the name of a file.
fn parse_name(name: &str) -> Option<(Key, usize)> {
    let (key, len) = name.strip_suffix(".kv")?.split_once('-')?;
    let (at, behind) = key.split_once('.')?;
    let at = u64::from_str_radix(at, 16).ok()?.cast_signed();
    let key = Key { at, behind: u16::from_str_radix(behind, 16).ok()? };
    Some((key, len.parse().ok().filter(|&len| (1..=LONGEST).contains(&len))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(start: i64, len: usize, size: usize) -> Piece {
        let tokens = (0..len as Token).collect();
        Piece { start: Key::said(start), tokens, position: start as Pos + 7, cells: vec![start as u8; size] }
    }

    fn room(folder: &Path, ram: u64, disk: u64) -> Room {
        Room { ram, disk, folder: Some(folder.to_owned()) }
    }

    #[test]
    fn pieces_are_found_by_any_of_their_tokens() {
        let mut yard = Graveyard::open(Room { ram: 1 << 20, disk: 0, folder: None }, 1);
        yard.put("a", piece(10, 5, 100));
        yard.put("a", piece(15, 5, 100));
        yard.put("b", piece(10, 3, 100));
        let mut starts = |c: &str, k: i64| yard.get(c, Key::said(k)).map(|p| p.start.at);
        assert_eq!(
            [9, 10, 14, 15, 19, 20].map(|k| starts("a", k)),
            [None, Some(10), Some(10), Some(15), Some(15), None]
        );
        assert_eq!([12, 13].map(|k| starts("b", k)), [Some(10), None]);
        let tokens: Vec<Token> = (0..6).collect();
        assert!(
            yard.has("a", Key::said(10), &tokens[..5], 17) && yard.has("a", Key::said(10), &tokens[..3], 17)
        );
        assert!(
            !yard.has("a", Key::said(10), &tokens, 17) && !yard.has("a", Key::said(10), &tokens[..5], 18)
        );
        assert!(!yard.has("a", Key::said(10), &[0, 1, 9], 17), "other tokens");
        yard.outdate("a", Key::said(14));
        yard.outdate("a", Key::said(20));
        assert!(
            !yard.has("a", Key::said(10), &tokens[..5], 17) && yard.has("a", Key::said(15), &tokens[..5], 22)
        );
        assert!(yard.get("a", Key::said(14)).is_some());
        // A short piece within a long one does not hide the rest of it.
        yard.put("a", piece(100, 120, 100));
        yard.put("a", piece(140, 20, 100));
        let starts = [139, 140, 159, 160, 219].map(|k| yard.get("a", Key::said(k)).map(|p| p.start.at));
        assert_eq!(starts, [100, 140, 140, 100, 100].map(Some));
        yard.forget("a");
        assert_eq!((yard.get("a", Key::said(10)), yard.get("b", Key::said(10)).is_some()), (None, true));
    }

    /// Bytes of a piece of five tokens and a hundred bytes of cells.
    const ONE: u64 = 176;

    #[test]
    fn the_least_recently_useful_goes_first() {
        let mut yard = Graveyard::open(Room { ram: 10 * ONE, disk: 0, folder: None }, 1);
        for start in 0..10 {
            yard.put("a", piece(start * 10, 5, 100));
        }
        assert_eq!(yard.size().0, 10 * ONE);
        assert!(yard.get("a", Key::said(0)).is_some());
        yard.put("a", piece(100, 5, 100));
        // One goes because there is no room, one more so that the next need not.
        let here: Vec<i64> = (0..11).filter(|k| yard.get("a", Key::said(k * 10)).is_some()).collect();
        assert_eq!((here, yard.size().0), (vec![0, 3, 4, 5, 6, 7, 8, 9, 10], 9 * ONE));
    }

    /// Bytes in a folder.
    fn on_disk(folder: &Path) -> u64 {
        let size = |path: PathBuf| {
            if path.is_dir() { on_disk(&path) } else { fs::metadata(&path).map_or(0, |m| m.len()) }
        };
        list(folder).into_iter().map(size).sum()
    }

    #[test]
    fn what_leaves_memory_is_on_disk_and_survives() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut yard = Graveyard::open(room(folder.path(), 2 * ONE, 1 << 20), 1);
        for start in [-5, 10, 20] {
            yard.put("a", piece(start, 5, 100));
        }
        yard.flush();
        assert_eq!((yard.size(), on_disk(folder.path())), ((ONE, 3 * ONE), 3 * ONE));
        drop(yard);
        let mut yard = Graveyard::open(room(folder.path(), 1 << 20, 1 << 20), 1);
        for start in [-5, 10, 20] {
            let head = yard.head("a", Key::said(start + 2)).expect("it is there");
            assert_eq!(
                (head.start, head.tokens.len(), head.position),
                (Key::said(start), 5, start as Pos + 7)
            );
            assert_eq!(yard.get("a", Key::said(start)).as_deref(), Some(&piece(start, 5, 100)));
        }
        // A longer piece takes the place of a shorter.
        yard.put("a", piece(10, 8, 100));
        drop(yard);
        let mut yard = Graveyard::open(room(folder.path(), 0, 1 << 20), 1);
        assert_eq!(yard.get("a", Key::said(17)).map(|p| p.tokens.len()), Some(8));
        drop(yard);
        // Another model has nothing of it, and when there is no more room, what nobody uses goes first.
        let mut other = Graveyard::open(room(folder.path(), 0, 1 << 20), 2);
        assert_eq!(other.get("a", Key::said(10)), None);
        drop(other);
        let mut tight = Graveyard::open(room(folder.path(), 0, 4 * ONE), 2);
        tight.put("a", piece(10, 5, 400));
        drop(tight);
        assert!(on_disk(folder.path()) <= 4 * ONE);
        let mut tight = Graveyard::open(room(folder.path(), 0, 4 * ONE), 2);
        assert!(tight.get("a", Key::said(10)).is_some(), "one's own stays");
    }

    /// Two programs with one folder: what the other wrote is found after a start, and nothing stays behind.
    #[test]
    fn a_folder_may_be_shared() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut one, mut two) = (
            Graveyard::open(room(folder.path(), 0, 1 << 20), 1),
            Graveyard::open(room(folder.path(), 0, 1 << 20), 1),
        );
        one.put("a", piece(10, 5, 100));
        two.put("a", piece(10, 9, 100));
        two.put("a", piece(30, 9, 100));
        one.flush();
        two.flush();
        // A file that the other has thrown away is gone, and that is all.
        one.forget("a");
        one.flush();
        assert!(two.get("a", Key::said(30)).is_some());
        drop((one, two));
        let mut after = Graveyard::open(room(folder.path(), 0, 1 << 20), 1);
        after.forget("a");
        drop(after);
        assert_eq!(on_disk(folder.path()), 0);
    }

    #[test]
    fn the_budgets_are_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut yard = Graveyard::open(room(folder.path(), 0, 10 * ONE), 1);
        for start in 0..50 {
            yard.put("a", piece(start * 10, 5, 100));
        }
        yard.flush();
        assert!(on_disk(folder.path()) <= 10 * ONE && yard.size().0 == 0);
        let left: Vec<i64> = (0..50).filter(|&k| yard.get("a", Key::said(k * 10)).is_some()).collect();
        assert!(
            left.len() >= 8 && left == (50 - left.len() as i64..50).collect::<Vec<_>>(),
            "the latest stay: {left:?}"
        );
        // What waits to be written is bounded too: whoever saves waits for the disk.
        let mut yard = Graveyard::open(room(folder.path(), 1 << 20, 1 << 30), 2);
        for start in 0..40 {
            yard.put("a", piece(start * 10, 5, 8 << 20));
            assert!(yard.size().0 <= (1 << 20) + Writer::MOST + (16 << 20), "{}", yard.size().0);
        }
    }

    #[test]
    fn a_folder_that_cannot_be_used_costs_only_the_disk() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("file");
        fs::write(&file, "x").expect("written");
        let mut yard = Graveyard::open(room(&file, 1 << 20, 1 << 20), 1);
        yard.put("a", piece(10, 5, 100));
        assert!(yard.get("a", Key::said(12)).is_some());
    }
}
