//! Everything that can happen to a conversation, at random, in a memory that is too small for comfort: chunks are said,
//! grow, leave, return, are cut, joined and undone, the system prompt changes, programs end and are killed, other
//! conversations come between, answers are stopped. After every step the memory is the window.

mod common;

use common::{STORY, chunks, context, guess, read};
use halo_core::seams::{Flow, Seen};
use halo_core::token::{Position, TokenId};
use halo_llama::graveyard::{Graveyard, Room};
use halo_llama::mirror::{Mirror, Mode};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const CELLS: u32 = 256;
/// Tokens that the window may have.
const MOST: usize = 200;

struct Said {
    start: u64,
    ids: Vec<u32>,
    live: bool,
}

struct Life {
    state: u64,
    words: Vec<u32>,
    system: Vec<u32>,
    said: Vec<Said>,
    /// How often memories were told otherwise.
    edition: usize,
}

impl Life {
    fn roll(&mut self, sides: usize) -> usize {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) as usize % sides.max(1)
    }

    fn some_words(&mut self, count: usize) -> Vec<u32> {
        let from = self.roll(self.words.len());
        (0..count).map(|n| self.words[(from + n) % self.words.len()]).collect()
    }

    fn live(&self) -> usize {
        self.system.len() + self.said.iter().filter(|s| s.live).map(|s| s.ids.len()).sum::<usize>()
    }

    fn end(&self) -> u64 {
        self.said.last().map_or(0, |s| s.start + s.ids.len() as u64)
    }

    /// Something happens; returns what.
    fn step(&mut self) -> &'static str {
        let live = self.live();
        self.edition += usize::from(self.roll(12) == 0);
        let n = self.roll(self.said.len());
        match self.roll(11) {
            0..=2 => {
                let count = 2 + self.roll(25);
                let (start, ids) = (self.end(), self.some_words(count));
                if live + count < MOST {
                    self.said.push(Said { start, ids, live: true });
                }
                "said"
            }
            3 | 4 => {
                for _ in 0..=self.roll(3) {
                    let n = self.roll(self.said.len());
                    self.said.get_mut(n).into_iter().for_each(|s| s.live = false);
                }
                "left"
            }
            5 | 6 => {
                let fits = self.said.get(n).is_some_and(|s| live + s.ids.len() < MOST);
                self.said.get_mut(n).into_iter().for_each(|s| s.live |= fits);
                "returned"
            }
            7 if self.roll(4) == 0 => {
                let count = 4 + self.roll(12);
                self.system = self.some_words(count);
                "told otherwise"
            }
            8 => {
                // Its positions are used again.
                if self.said.len() > 1 {
                    self.said.pop();
                }
                "undone"
            }
            9 if self.said.get(n).is_some_and(|s| s.ids.len() > 4) => {
                let cut = 1 + self.roll(self.said[n].ids.len() - 2);
                let ids = self.said[n].ids.split_off(cut);
                let (start, live) = (self.said[n].start + cut as u64, self.said[n].live);
                self.said.insert(n + 1, Said { start, ids, live });
                "cut"
            }
            9 | 7 => {
                if n + 1 < self.said.len() && self.said[n].live == self.said[n + 1].live {
                    let next = self.said.remove(n + 1);
                    self.said[n].ids.extend(next.ids);
                }
                "joined"
            }
            _ => {
                let count = 1 + self.roll(5);
                let more = self.some_words(count);
                if live < MOST - 60 {
                    self.said.last_mut().into_iter().for_each(|s| {
                        s.ids.extend(&more);
                        s.live = true;
                    });
                }
                "grew"
            }
        }
    }

    fn window(&self) -> Vec<Seen> {
        let seen = |position: Option<u64>, id: u32, begins| Seen {
            position: position.map(Position),
            behind: 0,
            id: TokenId(id),
            begins,
        };
        let system = self.system.iter().enumerate().map(|(n, &id)| seen(None, id, n == 0));
        let mut room = 15;
        let said = self.said.iter().flat_map(move |s| {
            let token = move |(n, &id): (usize, &u32)| seen(Some(s.start + n as u64), id, n == 0);
            // A memory stands where some of the dead were.
            let of = if !s.live && s.start.is_multiple_of(3) { s.ids.len().min(5).min(room) } else { 0 };
            room -= of;
            let memory = (1..=of).map(move |n| Seen {
                behind: n as u16,
                ..seen(
                    Some(s.start),
                    self.words
                        [(s.start as usize + n + if n == 3 { self.edition } else { 0 }) % self.words.len()],
                    n == 1,
                )
            });
            let said = if s.live { &s.ids[..] } else { &[] };
            said.iter().enumerate().map(token).chain(memory)
        });
        system.chain(said).collect()
    }
}

fn open(folder: &Path, limit: i32) -> Mirror {
    let room = Room { ram: 2 << 20, disk: 60 << 20, folder: Some(folder.to_owned()) };
    Mirror::new(context(CELLS), Graveyard::open(room, 1), Mode::Keep).with_limit(limit)
}

fn live_through(seed: u64, steps: usize, limit: i32) -> BTreeMap<String, usize> {
    let folder = tempfile::tempdir().expect("a folder");
    let words: Vec<u32> = chunks(&STORY).concat().iter().map(|s| s.id.0).collect();
    let system = words[..8].to_vec();
    let mut life = Life { state: seed, words, system, said: Vec::new(), edition: 0 };
    let mut mirror = open(folder.path(), limit);
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut count = |what: &str, n: usize| *counts.entry(what.to_owned()).or_default() += n;
    for step in 0..steps {
        count(life.step(), 1);
        let window = life.window();
        match life.roll(16) {
            0 => {
                mirror.clear();
                mirror = open(folder.path(), limit);
                count("ended", 1);
            }
            1 => {
                mirror.graveyard().flush();
                std::mem::forget(std::mem::replace(&mut mirror, open(folder.path(), limit)));
                count("killed", 1);
            }
            2 => {
                let other = [Seen { position: None, behind: 0, id: TokenId(5), begins: true }];
                mirror.follow("other", &other, 1, &mut |_, _| Flow::Continue).expect("followed");
                count("another", 1);
            }
            3 | 4 => {
                // Often at once, so that some are stopped on the fastest machine too.
                let wait = if life.roll(2) == 0 { 0 } else { life.roll(20_000) as u64 };
                let halt = Arc::clone(mirror.context().halt());
                halt.begin(9 + step as u64);
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_micros(wait));
                        halt.halt(9 + step as u64);
                    });
                    count("stopped", usize::from(guess(&mut mirror, &window).is_err()));
                });
                halt.begin(0);
            }
            5 | 6 => {
                let mut aside = window.clone();
                let end = life.end();
                let more = life.some_words(5).into_iter().zip(end + 100..);
                aside.extend(more.map(|(id, p)| Seen {
                    position: Some(Position(p)),
                    behind: 0,
                    id: TokenId(id),
                    begins: false,
                }));
                let (from, gap) = (life.roll(aside.len() - 6), life.roll(8));
                aside.drain(from..(from + gap).min(aside.len() - 5));
                let before = mirror.line().tokens.len();
                match mirror.fork("main", &aside, 4) {
                    Err(_) => count("no room aside", 1),
                    Ok(ready) => {
                        let row = read(&mut mirror, &aside, ready.from).expect("read");
                        assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5, "step {step}");
                        mirror.drop_fork();
                        count("aside", 1);
                        assert!(before == 0 || mirror.line().tokens.len() >= before.min(1));
                    }
                }
            }
            7..=9 => {
                mirror.settle("main", &window).expect("settled");
            }
            _ => {}
        }
        let (ready, row, _) = guess(&mut mirror, &window).unwrap_or_else(|why| panic!("step {step}: {why}"));
        let upkeep = ready.upkeep;
        assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5, "step {step}");
        assert_eq!(
            upkeep.kept + upkeep.returned + upkeep.reread + upkeep.read,
            window.len(),
            "step {step}: {upkeep:?}"
        );
        for (what, n) in [("moves", upkeep.moved), ("returns", upkeep.returned), ("rereads", upkeep.reread)] {
            count(what, usize::from(n > 0));
        }
        let line = &mirror.line().tokens;
        assert!(
            line.iter().map(|t| t.token.cast_unsigned()).eq(window.iter().map(|s| s.id.0)),
            "step {step}"
        );
        assert!(line.windows(2).all(|two| two[0].key < two[1].key && two[0].position < two[1].position));
        assert!(line.last().is_some_and(|t| t.position < limit), "step {step}");
    }
    counts
}

#[test]
fn the_memory_is_the_window_whatever_happens() {
    for (seed, limit) in [(1, 8192), (2, 240), (3, 215)] {
        let counts = live_through(seed, 200, limit);
        println!("{limit} positions: {counts:?}");
        assert!(counts["returns"] > 20 && counts["stopped"] > 0 && counts["aside"] > 5);
        assert!(limit == 8192 || counts["moves"] > 5, "there was not room enough to stay in place");
    }
}
