//! The cells of what has left the window, kept in memory and on disk within a budget.
//!
//! A *piece* is what a run of tokens left behind: its cells as llama.cpp writes them, the tokens, and where they stood.
//! What a cell holds never changes, so a piece is good for ever: a chunk that leaves a second time is not saved again.
//! Pieces go to disk behind the caller's back, and from memory when there is no more room, the least recently useful
//! first; so they do from disk. Nothing here is precious: what is lost, damaged or of another model is computed again.

use crate::ffi::{Pos, Token};
use crate::key::Key;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

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
    /// The name behind its last token.
    #[must_use]
    pub fn end(&self) -> Key {
        Key(self.start.0 + self.tokens.len() as i64)
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

/// What is known of a piece.
struct Kept {
    len: usize,
    bytes: u64,
    /// The larger, the more recently useful.
    used: u64,
    /// Where it stood, if that is known without looking into the file.
    position: Option<Pos>,
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

/// Saved cells, of all conversations with one model.
pub struct Graveyard {
    room: Room,
    /// What the cells belong to: a model and how it is run.
    mark: u128,
    pieces: BTreeMap<(Whose, Key), Kept>,
    /// Files of other models, which nobody here will use: the first to go.
    strangers: Vec<(PathBuf, u64)>,
    clock: u64,
    writer: Option<Writer>,
}

impl Graveyard {
    /// The graveyard of a model that is known by `mark`. What is on disk from before is found.
    #[must_use]
    pub fn open(room: Room, mark: u128) -> Self {
        let mut yard =
            Self { room, mark, pieces: BTreeMap::new(), strangers: Vec::new(), clock: 0, writer: None };
        if let Some(folder) = yard.room.folder.clone().filter(|_| yard.room.disk > 0) {
            match make_private(&folder).map(|()| yard.find(&folder)) {
                Ok(()) => yard.writer = Some(Writer::start()),
                Err(error) => {
                    tracing::warn!(
                        "the cells of dead chunks stay in memory: cannot use {}: {error}",
                        folder.display()
                    );
                }
            }
        }
        yard
    }

    /// Looks through the folder.
    fn find(&mut self, folder: &Path) {
        let own = format!("{:032x}", self.mark);
        let mut found: Vec<(SystemTime, (Whose, Key), Kept)> = Vec::new();
        for model in list(folder) {
            let is_own = model.file_name().is_some_and(|name| name == own.as_str());
            for conversation in list(&model) {
                let whose = name_of(&conversation).and_then(|n| u128::from_str_radix(n, 16).ok()).map(Whose);
                for file in list(&conversation) {
                    let Ok(about) = fs::metadata(&file) else { continue };
                    match (whose, name_of(&file).and_then(parse_name)) {
                        (Some(whose), Some((key, len))) if is_own => {
                            let time = about.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                            let (bytes, disk) = (about.len(), Disk::new(WRITTEN));
                            let kept = Kept { len, bytes, used: 0, position: None, here: None, disk };
                            found.push((time, (whose, key), kept));
                        }
                        _ => self.strangers.push((file, about.len())),
                    }
                }
            }
        }
        found.sort_by_key(|(time, at, _)| (*time, *at));
        for (_, at, mut kept) in found {
            self.clock += 1;
            kept.used = self.clock;
            // Of two files of one piece, the later stands.
            self.pieces.insert(at, kept);
        }
    }

    /// Whether a run is kept as it stands: so many tokens from that one on, at that position.
    #[must_use]
    pub fn has(&self, conversation: &str, start: Key, len: usize, position: Pos) -> bool {
        let kept = self.pieces.get(&(whose(conversation), start));
        kept.is_some_and(|k| k.len >= len && k.position == Some(position))
    }

    /// Keeps a piece, in the place of one that begins with the same token.
    pub fn put(&mut self, conversation: &str, piece: Piece) {
        let at = (whose(conversation), piece.start);
        let old = self.pieces.get(&at).map(|k| k.len);
        let (len, bytes) = (piece.tokens.len(), piece.cells.len() as u64);
        self.clock += 1;
        let disk = Disk::new(NOT_WRITTEN);
        let piece = Arc::new(piece);
        let path = self.path(at, len);
        if let (Some(writer), Some(path)) = (&self.writer, path) {
            if let Some(old) = old.filter(|&old| old != len).and_then(|old| self.path(at, old)) {
                writer.send(Work::Remove(old));
            }
            writer.send(Work::Write(path, Arc::clone(&piece), self.mark, Arc::clone(&disk)));
        } else {
            disk.state.store(REFUSED, Ordering::Release);
        }
        let position = Some(piece.position);
        let kept = Kept { len, bytes, used: self.clock, position, here: Some(piece), disk };
        self.pieces.insert(at, kept);
        self.shrink();
    }

    /// The piece that holds a token, from memory or from disk. A file that is damaged is thrown away.
    pub fn get(&mut self, conversation: &str, key: Key) -> Option<Arc<Piece>> {
        let whose = whose(conversation);
        let (&at, kept) = self.pieces.range((whose, Key(i64::MIN))..=(whose, key)).next_back()?;
        if at.1.0 + kept.len as i64 <= key.0 {
            return None;
        }
        let found = match &kept.here {
            Some(piece) => Some(Arc::clone(piece)),
            None => self.path(at, kept.len).and_then(|path| match read(&path, self.mark, at.1) {
                Ok(piece) => {
                    // The next to look through the folder sees that it was useful.
                    let _ = File::open(&path).and_then(|f| f.set_modified(SystemTime::now()));
                    Some(Arc::new(piece))
                }
                Err(why) => {
                    tracing::warn!("saved cells are not used: {}: {why}", path.display());
                    None
                }
            }),
        };
        let Some(piece) = found else {
            self.drop_piece(at);
            return None;
        };
        self.clock += 1;
        let clock = self.clock;
        if let Some(kept) = self.pieces.get_mut(&at) {
            kept.used = clock;
            kept.position = Some(piece.position);
            kept.here = Some(Arc::clone(&piece));
        }
        self.shrink();
        Some(piece)
    }

    /// A token was read anew: the piece that holds it still serves, but is to be replaced by the next.
    pub fn outdate(&mut self, conversation: &str, key: Key) {
        let whose = whose(conversation);
        let before = self.pieces.range_mut((whose, Key(i64::MIN))..=(whose, key)).next_back();
        if let Some((_, kept)) = before.filter(|(at, kept)| at.1.0 + kept.len as i64 > key.0) {
            kept.position = None;
        }
    }

    /// Drops a piece that turned out to be useless.
    pub fn discard(&mut self, conversation: &str, start: Key) {
        self.drop_piece((whose(conversation), start));
    }

    /// Drops all pieces of a conversation.
    pub fn forget(&mut self, conversation: &str) {
        let whose = whose(conversation);
        let range = (whose, Key(i64::MIN))..=(whose, Key(i64::MAX));
        let all: Vec<_> = self.pieces.range(range).map(|(at, _)| *at).collect();
        all.into_iter().for_each(|at| self.drop_piece(at));
    }

    /// Bytes in memory, and bytes on disk or on their way there.
    #[must_use]
    pub fn size(&self) -> (u64, u64) {
        let ram = self.pieces.values().filter(|k| k.here.is_some()).map(|k| k.bytes).sum();
        let disk = self.pieces.values().filter(|k| !k.disk.is(REFUSED)).map(|k| k.bytes).sum::<u64>();
        (ram, disk + self.strangers.iter().map(|(_, bytes)| bytes).sum::<u64>())
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

    fn drop_piece(&mut self, at: (Whose, Key)) {
        if let Some(kept) = self.pieces.remove(&at)
            && let (Some(writer), Some(path)) = (&self.writer, self.path(at, kept.len))
        {
            writer.send(Work::Remove(path));
        }
    }

    /// Lets go of what is over the budget, the least recently useful first.
    fn shrink(&mut self) {
        let (mut ram, mut disk) = self.size();
        if ram > self.room.ram {
            let mut order: Vec<(u64, (Whose, Key))> =
                self.pieces.iter().filter(|(_, k)| k.here.is_some()).map(|(at, k)| (k.used, *at)).collect();
            order.sort_unstable();
            for (_, at) in order {
                if ram <= self.room.ram {
                    break;
                }
                let Some(kept) = self.pieces.get_mut(&at) else { continue };
                if kept.disk.is(NOT_WRITTEN) {
                    // Soon; there are never many of those.
                    continue;
                }
                ram -= kept.bytes;
                if kept.disk.is(REFUSED) {
                    self.pieces.remove(&at);
                } else {
                    kept.here = None;
                }
            }
        }
        let Some(writer) = &self.writer else { return };
        while disk > self.room.disk {
            let Some((path, bytes)) = self.strangers.pop() else { break };
            disk -= bytes;
            writer.send(Work::Remove(path));
        }
        if disk > self.room.disk {
            let mut order: Vec<(u64, (Whose, Key))> = self
                .pieces
                .iter()
                .filter(|(_, k)| !k.disk.is(REFUSED))
                .map(|(at, k)| (k.used, *at))
                .collect();
            order.sort_unstable();
            for (_, at) in order {
                if disk <= self.room.disk {
                    break;
                }
                let Some(kept) = self.pieces.get_mut(&at) else { continue };
                disk -= kept.bytes;
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

    fn path(&self, (whose, key): (Whose, Key), len: usize) -> Option<PathBuf> {
        let folder = self.room.folder.as_ref()?.join(format!("{:032x}", self.mark));
        Some(folder.join(format!("{:032x}", whose.0)).join(format!("{:016x}-{len}.kv", key.0)))
    }
}

fn whose(conversation: &str) -> Whose {
    Whose(xxh3_128(conversation.as_bytes()))
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
    let key = u64::from_str_radix(key, 16).ok()?.cast_signed();
    Some((Key(key), len.parse().ok()?))
}

fn make_private(folder: &Path) -> std::io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// What a file of cells begins with.
const MAGIC: &[u8; 8] = b"HALO-KV1";

/// A piece as a file: the mark, what it is a piece of, its tokens, its cells, and a sum over all of it.
fn write(path: &Path, piece: &Piece, mark: u128) -> std::io::Result<()> {
    let mut head = Vec::with_capacity(64 + piece.tokens.len() * 4);
    head.extend_from_slice(MAGIC);
    head.extend_from_slice(&mark.to_le_bytes());
    head.extend_from_slice(&piece.start.0.to_le_bytes());
    head.extend_from_slice(&piece.position.to_le_bytes());
    head.extend_from_slice(&(piece.tokens.len() as u32).to_le_bytes());
    piece.tokens.iter().for_each(|t| head.extend_from_slice(&t.to_le_bytes()));
    let sum = [xxh3_64(&head).to_le_bytes(), xxh3_64(&piece.cells).to_le_bytes()].concat();
    let folder = path.parent().ok_or(std::io::ErrorKind::InvalidInput)?;
    make_private(folder)?;
    let part = path.with_extension("part");
    let mut file = File::create(&part)?;
    let written =
        file.write_all(&head).and_then(|()| file.write_all(&sum)).and_then(|()| file.write_all(&piece.cells));
    match written.and_then(|()| fs::rename(&part, path)) {
        Ok(()) => Ok(()),
        Err(error) => {
            let _ = fs::remove_file(&part);
            Err(error)
        }
    }
}

fn read(path: &Path, mark: u128, start: Key) -> Result<Piece, String> {
    let bytes = fs::read(path).map_err(|error| error.to_string())?;
    parse(&bytes, mark, start).ok_or_else(|| "it is damaged".into())
}

fn parse(bytes: &[u8], mark: u128, start: Key) -> Option<Piece> {
    let (fixed, rest) = bytes.split_at_checked(40)?;
    let (magic, fixed) = fixed.split_at(8);
    let of: [u8; 16] = fixed[..16].try_into().ok()?;
    let key = i64::from_le_bytes(fixed[16..24].try_into().ok()?);
    let position = Pos::from_le_bytes(fixed[24..28].try_into().ok()?);
    let len = u32::from_le_bytes(fixed[28..32].try_into().ok()?) as usize;
    let (tokens, rest) = rest.split_at_checked(len.checked_mul(4)?)?;
    let (sum, cells) = rest.split_at_checked(16)?;
    let head = bytes.get(..40 + tokens.len())?;
    let whole = [xxh3_64(head).to_le_bytes(), xxh3_64(cells).to_le_bytes()].concat() == sum;
    if magic != MAGIC || of != mark.to_le_bytes() || key != start.0 || !whole || position < 0 {
        return None;
    }
    let token = |t: &[u8]| Token::from_le_bytes([t[0], t[1], t[2], t[3]]);
    let tokens = tokens.chunks_exact(4).map(token).collect();
    Some(Piece { start, tokens, position, cells: cells.to_vec() })
}

enum Work {
    Write(PathBuf, Arc<Piece>, u128, Arc<Disk>),
    Remove(PathBuf),
    Tell(SyncSender<()>),
}

/// The thread that writes, so that nobody waits for a disk.
struct Writer {
    work: Option<SyncSender<Work>>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Pieces that may wait: beyond that, whoever saves waits too.
    const QUEUE: usize = 64;

    fn start() -> Self {
        let (work, todo) = sync_channel::<Work>(Self::QUEUE);
        let run = move || {
            let mut told: Option<SystemTime> = None;
            for work in todo {
                match work {
                    // It was let go of before its turn came.
                    Work::Write(_, _, _, disk) if disk.is(REFUSED) => {}
                    Work::Write(path, piece, mark, disk) => match write(&path, &piece, mark) {
                        Ok(()) => {
                            let written = (NOT_WRITTEN, WRITTEN);
                            let order = (Ordering::AcqRel, Ordering::Acquire);
                            if disk.state.compare_exchange(written.0, written.1, order.0, order.1).is_err() {
                                let _ = fs::remove_file(&path);
                            }
                        }
                        Err(error) => {
                            disk.state.store(REFUSED, Ordering::Release);
                            // Once a minute is enough.
                            let now = SystemTime::now();
                            let long = Duration::from_secs(60);
                            if told.is_none_or(|t| now.duration_since(t).is_ok_and(|d| d > long)) {
                                told = Some(now);
                                tracing::warn!(
                                    "the cells of dead chunks cannot be written to {}: {error}; they will be computed again when they are needed",
                                    path.display()
                                );
                            }
                        }
                    },
                    Work::Remove(path) => {
                        let _ = fs::remove_file(&path);
                        // The folder goes with its last file.
                        let _ = path.parent().map(fs::remove_dir);
                    }
                    Work::Tell(done) => {
                        let _ = done.send(());
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("halo-kv".into()).spawn(run);
        Self { work: Some(work), thread: thread.ok() }
    }

    fn send(&self, work: Work) {
        if let Some(queue) = &self.work {
            let _ = queue.send(work);
        }
    }
}

impl Drop for Writer {
    /// What was to be written is, before this returns.
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(start: i64, len: usize, size: usize) -> Piece {
        let tokens = (0..len as Token).collect();
        Piece { start: Key(start), tokens, position: start as Pos + 7, cells: vec![start as u8; size] }
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
        let mut starts = |c: &str, k: i64| yard.get(c, Key(k)).map(|p| p.start.0);
        assert_eq!(
            [9, 10, 14, 15, 19, 20].map(|k| starts("a", k)),
            [None, Some(10), Some(10), Some(15), Some(15), None]
        );
        assert_eq!([12, 13].map(|k| starts("b", k)), [Some(10), None]);
        assert!(
            yard.has("a", Key(10), 5, 17) && !yard.has("a", Key(10), 6, 17) && !yard.has("a", Key(10), 5, 18)
        );
        yard.outdate("a", Key(14));
        yard.outdate("a", Key(20));
        assert!(
            !yard.has("a", Key(10), 5, 17)
                && yard.has("a", Key(15), 5, 22)
                && yard.get("a", Key(14)).is_some()
        );
        yard.forget("a");
        assert_eq!((yard.get("a", Key(10)), yard.get("b", Key(10)).is_some()), (None, true));
    }

    #[test]
    fn the_least_recently_useful_goes_first() {
        let mut yard = Graveyard::open(Room { ram: 300, disk: 0, folder: None }, 1);
        for start in [0, 10, 20] {
            yard.put("a", piece(start, 5, 100));
        }
        assert!(yard.get("a", Key(0)).is_some());
        yard.put("a", piece(30, 5, 100));
        let here = [0, 10, 20, 30].map(|k| yard.get("a", Key(k)).is_some());
        assert_eq!((here, yard.size().0), ([true, false, true, true], 300));
    }

    #[test]
    fn what_leaves_memory_is_on_disk_and_survives() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut yard = Graveyard::open(room(folder.path(), 150, 1 << 20), 1);
        for start in [-5, 10, 20] {
            yard.put("a", piece(start, 5, 100));
        }
        yard.flush();
        assert_eq!(yard.size(), (100, 300));
        drop(yard);
        let mut yard = Graveyard::open(room(folder.path(), 1 << 20, 1 << 20), 1);
        for start in [-5, 10, 20] {
            assert_eq!(yard.get("a", Key(start)).as_deref(), Some(&piece(start, 5, 100)));
        }
        // A longer piece takes the place of a shorter.
        yard.put("a", piece(10, 8, 100));
        drop(yard);
        let mut yard = Graveyard::open(room(folder.path(), 0, 1 << 20), 1);
        assert_eq!(yard.get("a", Key(17)).map(|p| p.tokens.len()), Some(8));
        // Another model has nothing of it, and when there is no more room, what nobody uses goes first.
        drop(yard);
        let mut other = Graveyard::open(room(folder.path(), 0, 1 << 20), 2);
        assert_eq!(other.get("a", Key(10)), None);
        drop(other);
        let mut tight = Graveyard::open(room(folder.path(), 0, 500), 2);
        tight.put("a", piece(10, 5, 400));
        assert!(tight.size().1 <= 500);
        drop(tight);
        let mut yard = Graveyard::open(room(folder.path(), 0, 1 << 20), 1);
        let left = [-5, 10, 20].iter().filter(|&&k| yard.get("a", Key(k)).is_some()).count();
        assert!(left < 3, "something had to go");
    }

    #[test]
    fn the_budget_of_the_disk_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut yard = Graveyard::open(room(folder.path(), 0, 1000), 1);
        for start in 0..50 {
            yard.put("a", piece(start * 10, 5, 100));
        }
        assert!(yard.size().1 <= 1000);
        yard.flush();
        let left: Vec<i64> = (0..50).filter(|&k| yard.get("a", Key(k * 10)).is_some()).collect();
        assert_eq!(left, (40..50).collect::<Vec<_>>(), "the latest stay");
    }

    #[test]
    fn damage_is_seen_at_every_byte() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("x.kv");
        write(&path, &piece(10, 5, 60), 1).expect("written");
        let good = fs::read(&path).expect("read");
        assert_eq!(parse(&good, 1, Key(10)), Some(piece(10, 5, 60)));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert_eq!(parse(&bad, 1, Key(10)), None, "byte {at}");
            assert_eq!(parse(&good[..at], 1, Key(10)), None, "cut at {at}");
        }
        assert_eq!((parse(&good, 2, Key(10)), parse(&good, 1, Key(11))), (None, None));
    }

    #[test]
    fn a_folder_that_cannot_be_used_costs_only_the_disk() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("file");
        fs::write(&file, "x").expect("written");
        let mut yard = Graveyard::open(room(&file, 1 << 20, 1 << 20), 1);
        yard.put("a", piece(10, 5, 100));
        assert!(yard.get("a", Key(12)).is_some());
    }
}
