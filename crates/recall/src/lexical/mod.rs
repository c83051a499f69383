//! The lexical index: which rows share words with a query, and how telling those words are.
//!
//! Rows are numbered by the caller and may come, change and go in any order: what is found afterwards is what an index
//! built from nothing would find, to the last bit. The weight is BM25's: rare words tell more, a word said twice tells
//! a little more, and long texts are not better for being long.

mod terms;

use crate::order::Order;
use std::collections::HashMap;
pub use terms::Analyser;
pub(crate) use terms::words;

/// How soon a word said again tells nothing new.
const SATURATION: f32 = 1.2;
/// How far a long text is discounted for its length.
const LENGTH: f32 = 0.75;

/// Words and where they are.
#[derive(Default)]
pub struct Lexical {
    analyser: Analyser,
    numbers: HashMap<Box<str>, u32>,
    /// By number of the term: the rows that have it, in order, and how often.
    postings: Vec<Vec<Posting>>,
    rows: Vec<Row>,
    /// Rows that have any term.
    filled: usize,
}

#[derive(Clone, Copy)]
struct Posting {
    row: u32,
    times: u32,
}

#[derive(Clone, Default)]
struct Row {
    length: u32,
    terms: Box<[u32]>,
}

/// What a query asks for: its terms, once each, and how much each tells.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Query {
    /// The terms, as the index knows them, with their weights; those that nobody has said are left out.
    pub terms: Vec<(String, f32)>,
    numbers: Vec<u32>,
}

impl Lexical {
    /// Notes what a row says, in the place of what it said.
    pub fn put(&mut self, row: u32, text: &str) {
        self.remove(row);
        let (numbers, postings) = (&mut self.numbers, &mut self.postings);
        let (mut said, mut length) = (Vec::new(), 0);
        self.analyser.terms(text, &mut |term, telling| {
            length += u32::from(telling);
            let number = numbers.get(term).copied().unwrap_or_else(|| {
                let number = postings.len() as u32;
                numbers.insert(term.into(), number);
                postings.push(Vec::new());
                number
            });
            said.push(number);
        });
        said.sort_unstable();
        for same in said.chunk_by(|a, b| a == b) {
            let list = &mut self.postings[same[0] as usize];
            // Rows mostly come in order.
            let at = list.last().map_or(0, |last| {
                if last.row < row { list.len() } else { list.partition_point(|p| p.row < row) }
            });
            list.insert(at, Posting { row, times: same.len() as u32 });
        }
        said.dedup();
        if self.rows.len() <= row as usize {
            self.rows.resize(row as usize + 1, Row::default());
        }
        self.rows[row as usize] = Row { length, terms: said.into() };
        self.filled += usize::from(!self.rows[row as usize].terms.is_empty());
    }

    /// Forgets what a row says.
    pub fn remove(&mut self, row: u32) {
        let Some(gone) = self.rows.get_mut(row as usize).map(std::mem::take) else { return };
        for &term in &gone.terms {
            let list = &mut self.postings[term as usize];
            let at = list.partition_point(|p| p.row < row);
            list.remove(at);
        }
        self.filled -= usize::from(!gone.terms.is_empty());
    }

    /// How many terms of a row tell something, repeated ones too.
    #[must_use]
    pub fn length(&self, row: u32) -> u32 {
        self.rows.get(row as usize).map_or(0, |r| r.length)
    }

    /// A query in words.
    #[must_use]
    pub fn query(&self, text: &str) -> Query {
        let mut query = Query::default();
        for term in self.analyser.query(text) {
            let Some(&number) = self.numbers.get(term.as_str()) else { continue };
            let rows = self.postings[number as usize].len();
            if rows > 0 && !query.numbers.contains(&number) {
                query.terms.push((term, rarity(self.filled, rows)));
                query.numbers.push(number);
            }
        }
        query
    }

    /// How well the query is matched around each row: as if each said what it says, and its neighbours up to `reach`
    /// places away said it with `share` of their voice. In the order of `rows`, which is who is whose neighbour.
    #[must_use]
    pub fn scores(&self, query: &Query, rows: &Order, reach: usize, share: f32) -> Vec<f32> {
        let lengths = rows.spread(reach, share, |row| self.length(row) as f32);
        let mean = lengths.iter().sum::<f32>() / lengths.len().max(1) as f32;
        let mut scores = vec![0.0; lengths.len()];
        // How often the term is said around each place, and where it is said at all.
        let mut times = vec![0.0_f32; lengths.len()];
        let mut around: Vec<usize> = Vec::new();
        for &term in &query.numbers {
            for posting in &self.postings[term as usize] {
                let Some(place) = rows.place(posting.row) else { continue };
                for near in place.saturating_sub(reach)..(place + reach + 1).min(times.len()) {
                    if times[near] == 0.0 {
                        around.push(near);
                    }
                    times[near] += posting.times as f32 * if near == place { 1.0 } else { share };
                }
            }
            let weight = rarity(lengths.len(), around.len());
            for place in around.drain(..) {
                let times = std::mem::take(&mut times[place]);
                let discount =
                    SATURATION * (1.0 - LENGTH + LENGTH * lengths[place] / mean.max(f32::MIN_POSITIVE));
                scores[place] += weight * times * (SATURATION + 1.0) / (times + discount);
            }
        }
        scores
    }

    /// The terms of a query that a row has, the most telling first.
    #[must_use]
    pub fn matched<'a>(&self, query: &'a Query, row: u32) -> Vec<&'a str> {
        let Some(row) = self.rows.get(row as usize) else { return Vec::new() };
        let mut matched: Vec<_> = query
            .terms
            .iter()
            .zip(&query.numbers)
            .filter(|(_, number)| row.terms.binary_search(number).is_ok())
            .map(|((term, weight), _)| (term.as_str(), *weight))
            .collect();
        matched.sort_by(|a, b| b.1.total_cmp(&a.1));
        matched.into_iter().map(|(term, _)| term).collect()
    }

    /// Bytes in memory.
    #[must_use]
    pub fn memory(&self) -> usize {
        let words: usize = self.numbers.keys().map(|k| k.len() + 32).sum();
        let postings: usize = self.postings.iter().map(|p| p.capacity() * size_of::<Posting>() + 24).sum();
        let rows: usize = self.rows.iter().map(|r| r.terms.len() * 4 + size_of::<Row>()).sum();
        words + postings + rows
    }
}

/// How much a term tells that `rows` of `all` have.
fn rarity(all: usize, rows: usize) -> f32 {
    let (all, rows) = (all as f32, rows as f32);
    (1.0 + (all - rows + 0.5) / (rows + 0.5)).ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn index(texts: &[(u32, &str)]) -> Lexical {
        let mut index = Lexical::default();
        texts.iter().for_each(|(row, text)| index.put(*row, text));
        index
    }

    fn best(index: &Lexical, query: &str) -> Vec<u32> {
        let scores = index.scores(&index.query(query), &Order::new(0..4), 0, 0.0);
        let mut rows: Vec<u32> = (0..scores.len() as u32).filter(|&r| scores[r as usize] > 0.0).collect();
        rows.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
        rows
    }

    #[test]
    fn rare_words_tell_more() {
        let index = index(&[
            (0, "We went to the museum."),
            (1, "We went to the beach."),
            (2, "We went, and went, and went home."),
            (3, "The museums were closed, so we went swimming."),
        ]);
        assert_eq!(best(&index, "When did you go to the museum?"), [0, 3]);
        assert_eq!(best(&index, "swim at the beach"), [1, 3]);
        assert_eq!(best(&index, "elephants"), [0_u32; 0]);
        assert_eq!(index.matched(&index.query("which museum was closed, museum?"), 3), ["close", "museum"]);
    }

    #[test]
    fn any_script_is_found() {
        let index = index(&[
            (0, "昨日、東京に行きました。"),
            (1, "Wir fuhren über die Brücke nach Köln."),
            (2, "call getUserName(id) before max_tokens is read"),
            (3, "Вчера мы были в Москве"),
        ]);
        for (query, row) in [
            ("東京", 0),
            ("bruecke? die brucke!", 1),
            ("KÖLN", 1),
            ("user name", 2),
            ("MaxTokens", 2),
            ("москва", 3),
        ] {
            assert_eq!(best(&index, query).first(), Some(&row), "{query}");
        }
    }

    const WORDS: [&str; 8] = ["museum", "beach", "went", "dogs", "dog", "max_tokens", "東京", "the"];

    proptest! {
        /// Whatever came, changed and went: what is left is found as in an index built of that alone.
        #[test]
        fn a_life_ends_as_if_built_from_nothing(
            life in proptest::collection::vec(
                (0_u32..12, proptest::option::of(proptest::collection::vec(0..WORDS.len(), 0..6))),
                0..60,
            ),
            query in proptest::collection::vec(0..WORDS.len(), 1..5),
        ) {
            let say = |words: &[usize]| words.iter().map(|&w| WORDS[w]).collect::<Vec<_>>().join(" ");
            let mut lived = Lexical::default();
            let mut left = std::collections::BTreeMap::new();
            for (row, words) in &life {
                match words {
                    Some(words) => { lived.put(*row, &say(words)); left.insert(*row, say(words)); }
                    None => { lived.remove(*row); left.remove(row); }
                }
            }
            let mut fresh = Lexical::default();
            left.iter().for_each(|(row, text)| fresh.put(*row, text));
            let query = say(&query);
            let order = Order::new(left.keys().copied());
            let scores = |index: &Lexical, reach| {
                let scores = index.scores(&index.query(&query), &order, reach, 0.5);
                scores.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            for reach in 0..3 {
                prop_assert_eq!(scores(&lived, reach), scores(&fresh, reach));
            }
        }
    }
}
