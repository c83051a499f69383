//! A thousand random steps on the real model's memory: chunks are said, leave, return, are forked from. After each, the
//! table of cells is what llama.cpp says, attention sums to one with nothing on dead cells, and the guess is that of a
//! fresh memory that is given the same cells.

mod common;

use common::{chunks, context, guess, looking, mirror, read};
use halo_core::seams::Seen;
use halo_core::testing::guesses::differ;
use halo_core::token::Position;
use halo_llama::ffi::{Item, Seq};
use std::collections::BTreeMap;

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides.max(1)
    }
}

const WORDS: &str = "the old gun on the wall above the fireplace was never fired before the last act of the play, and when the \
                     rain came the guests stood in the hall and spoke of the will, of the sea, of the brother who had gone, \
                     谢谢, naïve 🌱, fn main() { println!(\"{}\", 1 + 2); }, 3.1415 and 1789, one after the other";

#[test]
fn a_thousand_lives() {
    const STEPS: usize = 1000;
    const MOST: usize = 260;
    let mut dice = Dice(11);
    let words = chunks(&[WORDS]).remove(0);
    let mut mirror = mirror(512);
    let mut fresh = context(512);
    let (mut said, mut live): (Vec<Vec<Seen>>, Vec<bool>) = (Vec::new(), Vec::new());
    let mut born: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    let mut done: BTreeMap<&str, usize> = BTreeMap::new();
    let mut compared = 0;
    // All cells taken, the n-th by a token at position n.
    let filling: Vec<Item> = (0..512).map(|n| Item { token: 5, position: n, logits: false }).collect();
    filling.chunks(256).for_each(|part| fresh.decode(Seq(2), part).expect("read"));
    let rubbish = fresh.save(Seq(2));
    let say = |said: &mut Vec<Vec<Seen>>, len: usize, from: usize| {
        let position = said.iter().map(Vec::len).sum::<usize>() as u64;
        let seen = |n: usize| Seen {
            position: Some(Position(position + n as u64)),
            begins: n == 0,
            ..words[(from + n) % words.len()]
        };
        said.push((0..len).map(seen).collect());
    };
    say(&mut said, 12, 0);
    live.push(true);
    for step in 0..STEPS {
        let count: usize = said.iter().zip(&live).filter(|(_, l)| **l).map(|(c, _)| c.len()).sum();
        let some = |live: &[bool], which: bool, dice: &mut Dice| {
            // The first chunk holds the sink, the last one is being said.
            let all: Vec<usize> = (1..live.len().saturating_sub(1)).filter(|&n| live[n] == which).collect();
            if all.is_empty() { None } else { Some(all[dice.roll(all.len())]) }
        };
        let what = match dice.roll(4) {
            0 if count < MOST => {
                say(&mut said, 3 + dice.roll(18), dice.roll(words.len()));
                live.push(true);
                "append"
            }
            1 => {
                for _ in 0..=dice.roll(3) {
                    if let Some(n) =
                        some(&live, false, &mut dice).filter(|&n| count + 3 * said[n].len() < MOST)
                    {
                        live[n] = true;
                    }
                }
                "return"
            }
            2 => "fork",
            _ => {
                for _ in 0..=dice.roll(3) {
                    if let Some(n) = some(&live, true, &mut dice) {
                        live[n] = false;
                    }
                }
                "prune"
            }
        };
        *done.entry(what).or_default() += 1;
        let window: Vec<Seen> =
            said.iter().zip(&live).filter(|(_, l)| **l).flat_map(|(c, _)| c.clone()).collect();
        if what == "fork" {
            let mut aside = window.clone();
            say(&mut said, 5, dice.roll(words.len()));
            aside.extend(said.pop().expect("just said"));
            // Some of the window is left out, and what is dead may be there.
            let (start, len) = (1 + dice.roll(aside.len() / 2), dice.roll(9));
            aside.drain(start..(start + len).min(aside.len() - 2));
            let before = mirror.line().tokens.clone();
            let ready = mirror.fork("main", &aside, 4).expect("forked");
            let row = read(&mut mirror, &aside, ready.from).expect("read");
            let sum: f32 = row.mean.iter().sum();
            assert!((sum - 1.0).abs() < 1e-5 && row.mean.len() == aside.len(), "step {step}: {sum}");
            mirror.drop_fork();
            assert_eq!(mirror.line().tokens, before);
        }
        if step % 3 == 0 {
            mirror.settle("main", &window).expect("settled");
        }
        // The table is checked within, as are the rows: nothing on dead cells.
        let (ready, row, _) = guess(&mut mirror, &window).expect("read");
        assert_eq!(
            (ready.upkeep.moved, ready.upkeep.reread),
            (0, 0),
            "step {step}: there is room, and nothing is lost"
        );
        assert!((row.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        let line = mirror.line().tokens.clone();
        assert!(
            line.iter().zip(&window).all(|(t, s)| t.key.at.cast_unsigned() == s.position.expect("one").0)
        );
        assert_eq!(line.len(), window.len());

        // The last token alone, here and in a fresh memory that is given the same cells.
        let last = line[line.len() - 1];
        assert!(mirror.context().remove(Seq(0), last.position, -1));
        let cells = mirror.context().save(Seq(0));
        let item = Item { token: last.token, position: last.position, logits: true };
        mirror.context().tap().want(looking());
        mirror.context().decode(Seq(0), &[item]).expect("read");
        let cell_of_last = mirror.context().tap().cells()[0] as i32;
        // Cells are handed out in order, so only those that are taken here are left free there: then each token goes to
        // the same cell, and sums are added up in the same order.
        assert!(fresh.remove(Seq(0), -1, -1));
        fresh.restore(Seq(2), &rubbish).expect("the same shape");
        let others: Vec<i32> =
            line[..line.len() - 1].iter().map(|t| t.cell.expect("all are known") as i32).collect();
        others.iter().for_each(|&cell| assert!(fresh.remove(Seq(2), cell, cell + 1)));
        fresh.restore(Seq(0), &cells).expect("the same shape");
        assert!(fresh.remove(Seq(2), others.iter().copied().fold(cell_of_last, i32::max) + 1, -1));
        assert!(fresh.remove(Seq(2), cell_of_last, cell_of_last + 1));
        fresh.tap().want(looking());
        fresh.decode(Seq(0), &[item]).expect("read");
        assert_eq!(fresh.tap().cells(), [i64::from(cell_of_last)]);
        let (most, kl, _) = differ(fresh.guess(), mirror.context().guess());
        assert_eq!((most, kl), (0.0, 0.0), "step {step} ({what}): not the guess of a fresh memory");

        // What a chunk left in its cells when it was said is in them for ever.
        let here: Vec<usize> = (0..said.len() - 1).filter(|&n| live[n]).collect();
        if let Some(&n) = here.get(dice.roll(here.len())) {
            let first = said[n][0].position.expect("one").0.cast_signed();
            let at = line.iter().position(|t| t.key.at == first).expect("it is live");
            let (start, end) = (line[at].position, line[at].position + said[n].len() as i32);
            mirror.context().share(Seq(0), Seq(1), start, end);
            let cells = mirror.context().save(Seq(1));
            assert!(mirror.context().remove(Seq(1), -1, -1));
            // Cells are written in order of the cells; only where that is the order of the tokens, bytes can be compared.
            let position = |n: usize| {
                i32::from_le_bytes(cells[16 + n * 12..20 + n * 12].try_into().expect("four bytes"))
            };
            if (1..said[n].len()).all(|n| position(n - 1) < position(n)) {
                compared += usize::from(born.contains_key(&n));
                assert!(
                    born.entry(n).or_insert_with(|| cells.clone()) == &cells,
                    "step {step}: chunk {n} has changed"
                );
            }
        }
    }
    println!("{done:?}; {compared} times a chunk was found as it was");
    assert!(compared > 100 && done.values().all(|&n| n > 150));
}
