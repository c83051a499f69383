//! The memory of the real model as a mirror of the window: what leaves and returns leaves no trace.

mod common;

use common::{STORY, chunks, context, guess, mirror, read};
use halo_core::seams::{Flow, Seen};
use halo_core::testing::guesses::differ;
use halo_core::token::Position;
use halo_llama::graveyard::{Graveyard, Room};
use halo_llama::mirror::{Mirror, Mode};

fn joined(chunks: &[Vec<Seen>], which: &[usize]) -> Vec<Seen> {
    which.iter().flat_map(|&n| chunks[n].clone()).collect()
}

/// The guess of one that read all and then the question, and from which nothing ever left.
fn untouched(all: &[Seen], question: &[Seen]) -> Vec<f32> {
    let mut mirror = mirror(512);
    guess(&mut mirror, all).expect("read");
    guess(&mut mirror, question).expect("read").2
}

const ALL: [usize; 6] = [0, 1, 2, 3, 4, 5];
const WITHOUT: [usize; 4] = [0, 1, 2, 5];

/// Leaves and returns at once: to the last bit as if it had never left.
#[test]
fn a_chunk_that_leaves_and_returns_leaves_no_trace() {
    let chunks = chunks(&STORY);
    let (all, without) = (joined(&chunks, &ALL), joined(&chunks, &WITHOUT));
    let question = [all.clone(), chunks[6].clone()].concat();
    let mut untouched = mirror(512);
    guess(&mut untouched, &all).expect("read");
    let (_, row, expected) = guess(&mut untouched, &question).expect("read");
    assert_eq!(row.mean.len(), question.len());

    let mut touched = mirror(512);
    guess(&mut touched, &all).expect("read");
    let gone = touched.settle("main", &without).expect("pruned");
    assert_eq!((gone.left, touched.line().tokens.len()), (all.len() - without.len(), without.len()));
    let back = touched.settle("main", &all).expect("returned");
    assert_eq!((back.returned, back.moved, back.reread), (gone.left, 0, 0));
    let (ready, _, logits) = guess(&mut touched, &question).expect("read");
    assert_eq!((ready.upkeep.read, ready.upkeep.kept), (chunks[6].len(), all.len()));
    assert_eq!(differ(&expected, &logits), (0.0, 0.0, true));
    assert!(expected.iter().zip(&logits).all(|(a, b)| a.to_bits() == b.to_bits()), "bit by bit");
}

/// The same with something said in between, which takes the cells that became free: the positions are the same, the
/// cells are not, so sums are added up in another order.
#[test]
fn a_chunk_returns_to_its_place_when_others_took_its_cells() {
    let chunks = chunks(&STORY);
    let (all, without) = (joined(&chunks, &ALL), joined(&chunks, &WITHOUT));
    let mut touched = mirror(512);
    guess(&mut touched, &all).expect("read");
    let (_, row, _) = guess(&mut touched, &[without, chunks[6].clone()].concat()).expect("read");
    assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    let question = [all.clone(), chunks[6].clone()].concat();
    let (ready, row, logits) = guess(&mut touched, &question).expect("read");
    assert_eq!(
        (ready.upkeep.returned, ready.upkeep.read, ready.upkeep.moved),
        (chunks[3].len() + chunks[4].len(), 1, 0)
    );
    assert_eq!(row.mean.len(), question.len());
    assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    // What was said in between was said without it, so this is not the guess of one who had it all along.
    let expected = untouched(&all, &question);
    let (_, kl, _) = differ(&expected, &logits);
    assert!(kl < 0.5, "{kl}");
}

/// After a compaction a chunk returns with a shift, and so does what stands behind it.
#[test]
fn a_chunk_returns_after_a_compaction() {
    let chunks = chunks(&STORY);
    let (all, without) = (joined(&chunks, &ALL), joined(&chunks, &WITHOUT));
    let question = [all.clone(), chunks[6].clone()].concat();
    let expected = untouched(&all, &question);
    let mut touched = mirror(512);
    guess(&mut touched, &all).expect("read");
    touched.settle("main", &without).expect("pruned");
    touched.compact().expect("compacted");
    assert_eq!(touched.line().end() as usize, without.len(), "no hole is left");
    let back = touched.settle("main", &all).expect("returned");
    assert_eq!((back.returned, back.reread), (all.len() - without.len(), 0));
    assert_eq!(back.moved, chunks[5].len(), "it finds its own place; what stood behind it made room");
    let (_, row, logits) = guess(&mut touched, &question).expect("read");
    assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    let (most, kl, same) = differ(&expected, &logits);
    println!("after a compaction: largest difference {most}, KL {kl:e}");
    assert!(same && kl <= 1e-3, "largest difference {most}, KL {kl}");
}

/// Near the last position all holes are closed, once; what was saved before returns with a shift.
#[test]
fn positions_do_not_run_out() {
    let chunks = chunks(&STORY);
    let (all, without) = (joined(&chunks, &ALL), joined(&chunks, &WITHOUT));
    let end = [without.clone(), chunks[6].clone()].concat();
    let mut open = mirror(512);
    guess(&mut open, &all).expect("read");
    let (_, _, expected) = guess(&mut open, &end).expect("read");
    let mut tight = mirror(512).with_limit(all.len() as i32 + 2);
    guess(&mut tight, &all).expect("read");
    let (ready, row, logits) = guess(&mut tight, &end).expect("read");
    assert_eq!(ready.upkeep.moved, chunks[5].len(), "what stood behind the hole");
    assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    // To the model a hole of fifty tokens is a distance, so closing it is no mere matter of rounding.
    let (most, kl, same) = differ(&expected, &logits);
    println!("a hole open and closed: largest difference {most}, KL {kl:e}");
    assert!(same && kl <= 1e-2, "largest difference {most}, KL {kl}");

    // A chunk of the hole returns: what stands behind it makes room.
    let some = [joined(&chunks, &[0, 1, 2, 3, 5]), chunks[6].clone()].concat();
    let (ready, _, _) = guess(&mut tight, &some).expect("read");
    assert_eq!((ready.upkeep.returned, ready.upkeep.reread), (chunks[3].len(), 0));
    assert!(ready.upkeep.moved > 0);
    // Then it has a place of its own again: it leaves and returns without moving anything.
    tight.settle("main", &end).expect("pruned");
    let back = tight.settle("main", &some).expect("returned");
    assert_eq!((back.returned, back.moved), (chunks[3].len(), 0));
    // More than fits is refused, and what is there stays.
    let before = tight.line().tokens.clone();
    assert!(guess(&mut tight, &[all, chunks[6].clone()].concat()).is_err());
    let there = |n: &usize| tight.line().tokens.iter().any(|t| t.key == before[*n].key);
    assert!((0..before.len() - 1).all(|n| there(&n)), "{}", tight.line().tokens.len());
}

/// A process ends, another opens the conversation: nothing is read again, and the next guess is the same.
#[test]
fn a_restart_changes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = || {
        let room = Room { ram: 1 << 20, disk: 1 << 30, folder: Some(folder.path().to_owned()) };
        Mirror::new(context(512), Graveyard::open(room, 1), Mode::Keep)
    };
    let chunks = chunks(&STORY);
    let (all, without) = (joined(&chunks, &ALL), joined(&chunks, &WITHOUT));
    let question = [all.clone(), chunks[6].clone()].concat();
    let expected = untouched(&all, &question);
    let mut before = open();
    guess(&mut before, &all).expect("read");
    before.settle("main", &without).expect("pruned");
    before.clear();
    drop(before);
    let mut after = open();
    let (ready, row, logits) = guess(&mut after, &question).expect("restored");
    let upkeep = ready.upkeep;
    assert_eq!(
        (upkeep.returned, upkeep.reread, upkeep.read, upkeep.moved),
        (all.len(), 0, chunks[6].len(), 0)
    );
    assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    assert_eq!(differ(&expected, &logits), (0.0, 0.0, true));

    // Files that are damaged or gone are computed again, over what stands before them.
    drop(after);
    let mut files = Vec::new();
    let mut folders = vec![folder.path().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    assert_eq!(files.len(), 6, "one for each chunk: {files:?}");
    std::fs::remove_file(&files[1]).expect("removed");
    let mut bytes = std::fs::read(&files[3]).expect("read");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&files[3], bytes).expect("written");
    let mut after = open();
    let (ready, row, logits) = guess(&mut after, &question).expect("restored");
    assert_eq!(ready.upkeep.reread, chunks[1].len() + chunks[3].len());
    assert_eq!(ready.upkeep.returned, all.len() - ready.upkeep.reread);
    assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    let (most, kl, same) = differ(&expected, &logits);
    println!("two chunks computed again: largest difference {most}, KL {kl:e}");
    assert!(same && kl <= 1e-3, "largest difference {most}, KL {kl}");
}

/// A fork sees what it is given and leaves the original as it was.
#[test]
fn a_fork_leaves_no_trace() {
    let chunks = chunks(&STORY);
    let all = joined(&chunks, &ALL);
    let question = [all.clone(), chunks[6].clone()].concat();
    let mut plain = mirror(512);
    guess(&mut plain, &all).expect("read");
    let (_, _, expected) = guess(&mut plain, &question).expect("read");
    let mut forked = mirror(512);
    guess(&mut forked, &all).expect("read");
    let line = forked.line().clone();
    // The whole with something behind it; a part of it; a part with a hole in it; something else altogether.
    let short = joined(&chunks, &[0, 1, 2]);
    let holed = [joined(&chunks, &[0, 1, 4]), chunks[6].clone()].concat();
    let mut other = joined(&chunks, &[5, 0]);
    for (n, seen) in other.iter_mut().enumerate() {
        seen.position = Some(Position(n as u64));
    }
    for (window, kept) in [
        (&question, all.len()),
        (&short, short.len() - 1),
        (&holed, holed.len() - chunks[6].len()),
        (&other, 1),
    ] {
        let ready = forked.fork("main", window, 8).expect("forked");
        assert_eq!((ready.upkeep.kept, ready.from), (kept, kept));
        let row = read(&mut forked, window, ready.from).expect("read");
        assert_eq!(row.mean.len(), window.len());
        assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        forked.drop_fork();
        assert_eq!(forked.line().tokens, line.tokens);
    }
    let (ready, _, logits) = guess(&mut forked, &question).expect("read");
    assert_eq!((ready.upkeep.kept, ready.upkeep.read), (all.len(), chunks[6].len()));
    assert_eq!(differ(&expected, &logits), (0.0, 0.0, true));
}

/// Two conversations take turns; each finds itself as it was.
#[test]
fn conversations_take_turns() {
    let chunks = chunks(&STORY);
    let (one, two) = (joined(&chunks, &ALL), joined(&chunks, &[0, 3, 4]));
    let two: Vec<Seen> =
        two.into_iter().enumerate().map(|(n, s)| Seen { position: Some(Position(n as u64)), ..s }).collect();
    let mut mirror = mirror(512);
    let mut go = |name: &str, window: &[Seen]| {
        let ready = mirror.follow(name, window, 1, &mut |_, _| Flow::Continue).expect("followed");
        let row = read(&mut mirror, window, ready.from).expect("read");
        assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        (ready.upkeep, mirror.context().guess().to_vec())
    };
    let (_, first) = go("one", &one);
    let (_, second) = go("two", &two);
    let (upkeep, again) = go("one", &one);
    assert_eq!((upkeep.returned, upkeep.read, upkeep.reread), (one.len() - 1, 1, 0));
    // A single token is computed otherwise than one among many: this model's own noise.
    let (_, kl, same) = differ(&first, &again);
    assert!(same && kl < 1e-2, "{kl}");
    let (upkeep, again) = go("two", &two);
    assert_eq!((upkeep.returned, upkeep.read), (two.len() - 1, 1));
    let (_, kl, same) = differ(&second, &again);
    assert!(same && kl < 1e-2, "{kl}");
}

/// Read again, the old way: from the first difference on.
#[test]
fn rereading_is_the_old_way() {
    let chunks = chunks(&STORY);
    let (all, without) = (joined(&chunks, &ALL), joined(&chunks, &WITHOUT));
    let mut mirror = Mirror::new(context(512), Graveyard::open(Room::none(), 1), Mode::Reread);
    guess(&mut mirror, &all).expect("read");
    let (ready, row, logits) = guess(&mut mirror, &without).expect("read");
    let same = joined(&chunks, &[0, 1, 2]).len();
    assert_eq!((ready.upkeep.kept, ready.upkeep.read), (same, without.len() - same));
    assert_eq!(row.mean.len(), without.len());
    let mut fresh = Mirror::new(context(512), Graveyard::open(Room::none(), 1), Mode::Reread);
    guess(&mut fresh, &joined(&chunks, &[0, 1, 2])).expect("read");
    let (_, _, expected) = guess(&mut fresh, &without).expect("read");
    let (_, kl, top) = differ(&expected, &logits);
    assert!(top && kl < 1e-3, "{kl}");
    assert!(
        matches!(mirror.settle("main", &all), Ok(upkeep) if upkeep == halo_core::seams::Upkeep::default())
    );
}

/// What is moved is turned when llama.cpp next reads. Whoever stops that reading does not stop the turning: half of it
/// turned, the next reading would turn that half again.
#[test]
fn stopping_does_not_stop_what_is_being_turned() {
    let chunks = chunks(&STORY);
    let (all, without) = (joined(&chunks, &ALL), joined(&chunks, &WITHOUT));
    let question = [all.clone(), chunks[6].clone()].concat();
    let turned = |stopped: Option<u64>| {
        let mut mirror = mirror(2048);
        guess(&mut mirror, &all).expect("read");
        mirror.settle("main", &without).expect("pruned");
        mirror.compact().expect("compacted");
        if let Some(micros) = stopped {
            let halt = std::sync::Arc::clone(mirror.context().halt());
            halt.begin(1);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(std::time::Duration::from_micros(micros));
                    halt.halt(1);
                });
                let _ = guess(&mut mirror, &question);
            });
            halt.begin(0);
        }
        guess(&mut mirror, &question).expect("read").2
    };
    let expected = turned(None);
    for micros in [0, 500, 2_000, 10_000, 30_000] {
        let (_, kl, same) = differ(&expected, &turned(Some(micros)));
        assert!(same && kl < 1e-5, "stopped after {micros} µs: KL {kl}");
    }
}

/// A fork that does not find room says so or reads; it takes nothing from the original, nor from what is saved of it.
#[test]
fn a_fork_with_little_room_does_no_harm() {
    let texts = [STORY[0], &"The rain fell on the sea and on the old house. ".repeat(40), STORY[5], STORY[6]];
    let chunks = chunks(&texts);
    let (all, without) = (joined(&chunks, &[0, 1, 2]), joined(&chunks, &[0, 2]));
    let long = chunks[1].len();
    let mut mirror = mirror(all.len() as u32 + 8);
    guess(&mut mirror, &all).expect("read");
    mirror.settle("main", &without).expect("pruned");
    let before = mirror.line().tokens.clone();
    let filler = "and then ".repeat(long / 2 - 10);
    let filler: Vec<Seen> = common::chunks(&[&filler])[0]
        .iter()
        .enumerate()
        .map(|(n, s)| Seen { position: Some(Position(9000 + n as u64)), ..*s })
        .collect();
    guess(&mut mirror, &[without.clone(), filler].concat()).expect("read");
    // What is dead does not fit beside what is live now.
    assert!(mirror.fork("main", &all, 4).is_err());
    // Other tokens where the dead ones stood are no reason to forget those.
    let mut other = all.clone();
    other[chunks[0].len() + 3].id.0 += 1;
    let _ = mirror.fork("main", &other, 4);
    mirror.drop_fork();
    mirror.adapt("main", &without).expect("pruned");
    let back = mirror.adapt("main", &all).expect("returned");
    assert_eq!((back.returned, back.moved), (long, 0), "it was still there");
    assert!(
        before.iter().all(|t| mirror
            .line()
            .tokens
            .iter()
            .any(|l| (l.key, l.position) == (t.key, t.position)))
    );
    // A long answer aside moves nothing as long as there are positions.
    mirror.adapt("main", &without).expect("pruned");
    let positions = |m: &Mirror| m.line().tokens.iter().map(|t| t.position).collect::<Vec<_>>();
    let before = positions(&mirror);
    mirror.fork("main", &without, 100_000).expect("forked");
    mirror.drop_fork();
    assert_eq!(positions(&mirror), before);
    // Nor does a long answer close holes that need not be closed.
    let ready = mirror.follow("main", &without, 100_000, &mut |_, _| Flow::Continue).expect("followed");
    assert_eq!(ready.upkeep.moved, 0);
    assert!(mirror.fork("main", &[], 4).is_err() && mirror.adapt("main", &[]).is_ok());
}

/// Where positions run out while cells are free, holes are closed: an answer aside does not end in the middle.
#[test]
fn an_answer_aside_is_not_cut_short_by_holes() {
    let chunks = chunks(&STORY);
    let (all, without) = (joined(&chunks, &ALL), joined(&chunks, &WITHOUT));
    assert!(all.len() - without.len() > 20);
    let mut mirror = mirror(512).with_limit(all.len() as i32 + 6);
    guess(&mut mirror, &all).expect("read");
    mirror.settle("main", &without).expect("pruned");
    let ready = mirror.fork("main", &without, 20).expect("forked");
    assert_eq!((ready.room, ready.upkeep.read), (20, 1));
    mirror.drop_fork();
}

/// Lost chunks are computed batch by batch: whoever waits is told, and can stop it.
#[test]
fn computing_what_is_lost_can_be_stopped() {
    let long = "It rained from morning on, and nobody came to the old house by the sea. ".repeat(30);
    let texts = [STORY[0], &long, STORY[5]];
    let chunks = chunks(&texts);
    let (all, without) = (joined(&chunks, &[0, 1, 2]), joined(&chunks, &[0, 2]));
    let mut mirror = Mirror::new(context(1024), Graveyard::open(Room::none(), 1), Mode::Keep);
    guess(&mut mirror, &without).expect("read");
    let mut told = Vec::new();
    let stopped = mirror.follow("main", &all, 1, &mut |done, of| {
        told.push((done, of));
        if done > 0 { Flow::Stop } else { Flow::Continue }
    });
    assert!(stopped.is_err());
    assert_eq!(told, [(0, chunks[1].len() + 1), (256, chunks[1].len() + 1)]);
    let (ready, row, _) = guess(&mut mirror, &all).expect("read");
    assert_eq!((ready.upkeep.reread, row.mean.len()), (chunks[1].len(), all.len()));
}
