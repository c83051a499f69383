//! The lexical index: BM25 over stemmed terms.
//!
//! Rows are numbered by the caller and can be inserted, replaced and removed in any order. The scores are the same, to
//! the last bit, as those of an index that is built from scratch.

mod analyzer;

use crate::row_order::RowOrder;
pub use analyzer::TermAnalyzer;
pub(crate) use analyzer::words;
use std::collections::HashMap;

/// BM25: how fast the weight of repeated terms saturates.
const BM25_K1: f32 = 1.2;
/// BM25: how much a long text is discounted.
const BM25_B: f32 = 0.75;

/// An inverted index from terms to rows.
#[derive(Default)]
pub struct LexicalIndex {
    analyzer: TermAnalyzer,
    term_ids: HashMap<Box<str>, u32>,
    /// By term id: the rows that have the term, in ascending order.
    postings: Vec<Vec<Posting>>,
    rows: Vec<LexicalRow>,
    /// The number of rows with at least one term.
    nonempty_rows: usize,
}

#[derive(Clone, Copy)]
struct Posting {
    row: u32,
    count: u32,
}

#[derive(Clone, Default)]
struct LexicalRow {
    /// Content words, repeated ones too.
    term_count: u32,
    /// Ids of all terms, sorted, each once.
    terms: Box<[u32]>,
}

/// The terms of a query, each once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LexicalQuery {
    /// The terms that occur in the index, with their inverse document frequency.
    pub terms: Vec<(String, f32)>,
    term_ids: Vec<u32>,
    /// The sum of the inverse document frequencies of all terms, also of those that do not occur in the index.
    total_weight: f32,
}

impl LexicalIndex {
    /// Sets the text of a row.
    pub fn insert(&mut self, row: u32, text: &str) {
        self.remove(row);
        let (ids, postings) = (&mut self.term_ids, &mut self.postings);
        let (mut terms, mut term_count) = (Vec::new(), 0);
        self.analyzer.terms(text, &mut |term, is_content| {
            term_count += u32::from(is_content);
            let id = ids.get(term).copied().unwrap_or_else(|| {
                let id = postings.len() as u32;
                ids.insert(term.into(), id);
                postings.push(Vec::new());
                id
            });
            terms.push(id);
        });
        terms.sort_unstable();
        for same in terms.chunk_by(|a, b| a == b) {
            let list = &mut self.postings[same[0] as usize];
            // Rows are mostly inserted in ascending order.
            let at = list.last().map_or(0, |last| {
                if last.row < row { list.len() } else { list.partition_point(|p| p.row < row) }
            });
            list.insert(at, Posting { row, count: same.len() as u32 });
        }
        terms.dedup();
        if self.rows.len() <= row as usize {
            self.rows.resize(row as usize + 1, LexicalRow::default());
        }
        self.rows[row as usize] = LexicalRow { term_count, terms: terms.into() };
        self.nonempty_rows += usize::from(!self.rows[row as usize].terms.is_empty());
    }

    /// Removes the text of a row.
    pub fn remove(&mut self, row: u32) {
        let Some(removed) = self.rows.get_mut(row as usize).map(std::mem::take) else { return };
        for &term in &removed.terms {
            let list = &mut self.postings[term as usize];
            let at = list.partition_point(|p| p.row < row);
            list.remove(at);
        }
        self.nonempty_rows -= usize::from(!removed.terms.is_empty());
    }

    /// The number of content words of a row, repeated ones too.
    #[must_use]
    pub fn term_count(&self, row: u32) -> u32 {
        self.rows.get(row as usize).map_or(0, |r| r.term_count)
    }

    #[must_use]
    pub fn parse_query(&self, text: &str) -> LexicalQuery {
        let mut query = LexicalQuery::default();
        let mut unknown: Vec<String> = Vec::new();
        for term in self.analyzer.query_terms(text) {
            let id = self.term_ids.get(term.as_str()).copied();
            let rows = id.map_or(0, |id| self.postings[id as usize].len());
            match id.filter(|_| rows > 0) {
                Some(id) if query.term_ids.contains(&id) => {}
                Some(id) => {
                    query.terms.push((term, idf(self.nonempty_rows, rows)));
                    query.term_ids.push(id);
                }
                None if unknown.contains(&term) => {}
                None => unknown.push(term),
            }
        }
        let known: f32 = query.terms.iter().map(|(_, weight)| weight).sum();
        query.total_weight = known + unknown.len() as f32 * idf(self.nonempty_rows, 0);
        query
    }

    /// The BM25 score of each row, by ordinal. A row also counts the terms of its neighbours within `radius`, times
    /// `neighbour_weight`, as if they were part of its text.
    #[must_use]
    pub fn scores(
        &self,
        query: &LexicalQuery,
        rows: &RowOrder,
        radius: usize,
        neighbour_weight: f32,
    ) -> Vec<f32> {
        let lengths = rows.sum_neighbours(radius, neighbour_weight, |row| self.term_count(row) as f32);
        let mean = lengths.iter().sum::<f32>() / lengths.len().max(1) as f32;
        let mut scores = vec![0.0; lengths.len()];
        // The frequency of the term by ordinal, and the ordinals where it is not 0.
        let mut frequencies = vec![0.0_f32; lengths.len()];
        let mut matched: Vec<usize> = Vec::new();
        for &term in &query.term_ids {
            for posting in &self.postings[term as usize] {
                let Some(ordinal) = rows.index_of(posting.row) else { continue };
                for near in ordinal.saturating_sub(radius)..(ordinal + radius + 1).min(frequencies.len()) {
                    if frequencies[near] == 0.0 {
                        matched.push(near);
                    }
                    let weight = if near == ordinal { 1.0 } else { neighbour_weight };
                    frequencies[near] += posting.count as f32 * weight;
                }
            }
            let weight = idf(lengths.len(), matched.len());
            for ordinal in matched.drain(..) {
                let frequency = std::mem::take(&mut frequencies[ordinal]);
                let discount =
                    BM25_K1 * (1.0 - BM25_B + BM25_B * lengths[ordinal] / mean.max(f32::MIN_POSITIVE));
                scores[ordinal] += weight * frequency * (BM25_K1 + 1.0) / (frequency + discount);
            }
        }
        scores
    }

    /// The terms of a query that a row has, the rarest first.
    #[must_use]
    pub fn matched_terms<'a>(&self, query: &'a LexicalQuery, row: u32) -> Vec<&'a str> {
        let Some(row) = self.rows.get(row as usize) else { return Vec::new() };
        let mut matched: Vec<_> = query
            .terms
            .iter()
            .zip(&query.term_ids)
            .filter(|(_, id)| row.terms.binary_search(id).is_ok())
            .map(|((term, weight), _)| (term.as_str(), *weight))
            .collect();
        matched.sort_by(|a, b| b.1.total_cmp(&a.1));
        matched.into_iter().map(|(term, _)| term).collect()
    }

    /// The share of a query's terms that at least one of the rows has, weighted by inverse document frequency: from 0 to 1.
    /// A term that occurs nowhere in the index counts as missing. 0 for a query without terms.
    #[must_use]
    pub fn term_share(&self, query: &LexicalQuery, rows: &[u32]) -> f32 {
        let has = |id: &u32| {
            let mut rows = rows.iter().filter_map(|&row| self.rows.get(row as usize));
            rows.any(|row| row.terms.binary_search(id).is_ok())
        };
        let matched = query.terms.iter().zip(&query.term_ids).filter(|(_, id)| has(id));
        let weight: f32 = matched.map(|((_, weight), _)| weight).sum();
        if query.total_weight > 0.0 { weight / query.total_weight } else { 0.0 }
    }

    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let words: usize = self.term_ids.keys().map(|k| k.len() + 32).sum();
        let postings: usize = self.postings.iter().map(|p| p.capacity() * size_of::<Posting>() + 24).sum();
        let rows: usize = self.rows.iter().map(|r| r.terms.len() * 4 + size_of::<LexicalRow>()).sum();
        words + postings + rows
    }
}

/// The inverse document frequency of a term that `rows` of `total` rows have.
fn idf(total: usize, rows: usize) -> f32 {
    let (total, rows) = (total as f32, rows as f32);
    (1.0 + (total - rows + 0.5) / (rows + 0.5)).ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lexical_index(texts: &[(u32, &str)]) -> LexicalIndex {
        let mut index = LexicalIndex::default();
        texts.iter().for_each(|(row, text)| index.insert(*row, text));
        index
    }

    fn best_rows(index: &LexicalIndex, query: &str) -> Vec<u32> {
        let scores = index.scores(&index.parse_query(query), &RowOrder::new(0..4), 0, 0.0);
        let mut rows: Vec<u32> = (0..scores.len() as u32).filter(|&r| scores[r as usize] > 0.0).collect();
        rows.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
        rows
    }

    #[test]
    fn lexical_ranks_rare_words_higher() {
        let index = lexical_index(&[
            (0, "We went to the museum."),
            (1, "We went to the beach."),
            (2, "We went, and went, and went home."),
            (3, "The museums were closed, so we went swimming."),
        ]);
        assert_eq!(best_rows(&index, "When did you go to the museum?"), [0, 3]);
        assert_eq!(best_rows(&index, "swim at the beach"), [1, 3]);
        assert_eq!(best_rows(&index, "elephants"), [0_u32; 0]);
        assert_eq!(
            index.matched_terms(&index.parse_query("which museum was closed, museum?"), 3),
            ["close", "museum"]
        );
    }

    #[test]
    fn lexical_finds_any_script() {
        let index = lexical_index(&[
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
            assert_eq!(best_rows(&index, query).first(), Some(&row), "{query}");
        }
    }

    const WORDS: [&str; 8] = ["museum", "beach", "went", "dogs", "dog", "max_tokens", "東京", "the"];

    proptest! {
        /// After any inserts, replacements and removals, scores equal those of an index built from the remaining texts.
        #[test]
        fn lexical_index_equals_one_built_from_scratch(
            operations in proptest::collection::vec(
                (0_u32..12, proptest::option::of(proptest::collection::vec(0..WORDS.len(), 0..6))),
                0..60,
            ),
            query in proptest::collection::vec(0..WORDS.len(), 1..5),
        ) {
            let text = |words: &[usize]| words.iter().map(|&w| WORDS[w]).collect::<Vec<_>>().join(" ");
            let mut updated = LexicalIndex::default();
            let mut texts = std::collections::BTreeMap::new();
            for (row, words) in &operations {
                match words {
                    Some(words) => { updated.insert(*row, &text(words)); texts.insert(*row, text(words)); }
                    None => { updated.remove(*row); texts.remove(row); }
                }
            }
            let mut fresh = LexicalIndex::default();
            texts.iter().for_each(|(row, text)| fresh.insert(*row, text));
            let query = text(&query);
            let order = RowOrder::new(texts.keys().copied());
            let scores = |index: &LexicalIndex, radius| {
                let scores = index.scores(&index.parse_query(&query), &order, radius, 0.5);
                scores.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            for radius in 0..3 {
                prop_assert_eq!(scores(&updated, radius), scores(&fresh, radius));
            }
        }
    }
}
