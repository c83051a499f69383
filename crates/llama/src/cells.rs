//! Which token is in which cell. llama.cpp hands cells out as it likes and uses freed ones again, so this is never
//! assumed: it is taken from the graph, token by token, or from the mask and the head of a saved state together.

use crate::ffi::{Pos, Seq, Token};
use crate::key::Key;
use std::collections::{BTreeMap, BTreeSet};

/// A token whose key and value are in the model's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cached {
    /// Its name.
    pub key: Key,
    /// What it is.
    pub token: Token,
    /// Whether a chunk begins with it.
    pub begins: bool,
    /// The model's position.
    pub position: Pos,
    /// The cell, once it is known.
    pub cell: Option<u32>,
}

/// The tokens of one sequence, in the order of the window: the n-th is the one in slot n.
#[derive(Clone, Debug)]
pub struct Line {
    /// The sequence.
    pub seq: Seq,
    /// Its tokens. Names and positions rise.
    pub tokens: Vec<Cached>,
}

impl Line {
    /// An empty sequence.
    #[must_use]
    pub fn new(seq: Seq) -> Self {
        Self { seq, tokens: Vec::new() }
    }

    /// The position behind the last token.
    #[must_use]
    pub fn end(&self) -> Pos {
        self.tokens.last().map_or(0, |t| t.position + 1)
    }

    /// Takes in tokens at their place.
    pub fn insert(&mut self, tokens: &[Cached]) {
        let Some(first) = tokens.first() else { return };
        let at = self.tokens.partition_point(|t| t.key < first.key);
        self.tokens.splice(at..at, tokens.iter().copied());
    }

    /// Whether every cell is known.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.tokens.iter().all(|t| t.cell.is_some())
    }

    /// Learns the cells from what the last token could see and from the positions in order of the cells. Says what is
    /// wrong if they do not agree with each other, or with what was known.
    ///
    /// # Errors
    /// A sentence for the log.
    pub fn learn(&mut self, visible: &[u32], positions: &[Pos]) -> Result<(), String> {
        if visible.len() != self.tokens.len() || positions.len() != visible.len() {
            let (seen, told, known) = (visible.len(), positions.len(), self.tokens.len());
            return Err(format!(
                "{seen} cells can be seen and {told} have positions, but {known} tokens are known"
            ));
        }
        let cells: BTreeMap<Pos, u32> = positions.iter().copied().zip(visible.iter().copied()).collect();
        for token in &mut self.tokens {
            let cell = cells.get(&token.position).copied();
            match (cell, token.cell) {
                (None, _) => return Err(format!("no cell has the position {}", token.position)),
                (Some(cell), Some(known)) if cell != known => {
                    return Err(format!("position {} is in cell {cell}, not in {known}", token.position));
                }
                (Some(cell), _) => token.cell = Some(cell),
            }
        }
        Ok(())
    }

    /// Whether a row that came by cell has exactly nothing on cells that are not of this line.
    #[must_use]
    pub fn is_blind_to_others(&self, row: &[f32]) -> bool {
        let own: BTreeSet<u32> = self.tokens.iter().filter_map(|t| t.cell).collect();
        row.iter().enumerate().all(|(cell, &a)| a == 0.0 || own.contains(&(cell as u32)))
    }

    /// Puts a row that came by cell in order of slots, up to a token; none while a cell is unknown.
    #[must_use]
    pub fn by_slot(&self, row: &[f32], up_to: usize) -> Option<Vec<f32>> {
        let cell = |t: &Cached| row.get(t.cell? as usize).copied();
        self.tokens.get(..=up_to)?.iter().map(cell).collect()
    }
}

/// Runs of tokens whose names and positions follow each other directly, as ranges.
#[must_use]
pub fn runs(tokens: &[Cached]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (n, token) in tokens.iter().enumerate() {
        let follows = n > 0 && {
            let last = &tokens[n - 1];
            last.key.plus(1) == token.key && last.position + 1 == token.position
        };
        match runs.last_mut() {
            Some(run) if follows => run.end = n + 1,
            _ => runs.push(n..n + 1),
        }
    }
    runs
}

/// The same, cut where chunks begin and where a run is longer than `most`: what is saved together.
#[must_use]
pub fn pieces(tokens: &[Cached], most: usize) -> Vec<std::ops::Range<usize>> {
    let mut pieces: Vec<std::ops::Range<usize>> = Vec::new();
    for run in runs(tokens) {
        let mut start = run.start;
        for n in run.clone() {
            if n > start && (tokens[n].begins || n - start == most) {
                pieces.push(start..n);
                start = n;
            }
        }
        pieces.push(start..run.end);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(key: i64, position: Pos, begins: bool) -> Cached {
        Cached { key: Key::said(key), token: 0, begins, position, cell: None }
    }

    #[test]
    fn runs_and_pieces() {
        let tokens = [
            token(0, 0, true),
            token(1, 1, false),
            token(2, 2, true),
            token(3, 9, false),
            token(5, 10, false),
            token(6, 11, false),
            token(7, 12, false),
        ];
        assert_eq!(runs(&tokens), [0..3, 3..4, 4..7]);
        assert_eq!(pieces(&tokens, 2), [0..2, 2..3, 3..4, 4..6, 6..7]);
        assert!(runs(&[]).is_empty() && pieces(&[], 2).is_empty());
    }

    #[test]
    fn cells_are_learned_and_doubted() {
        let mut line = Line::new(Seq(0));
        line.insert(&[token(5, 10, false)]);
        line.insert(&[token(0, 0, true), token(1, 1, false)]);
        assert_eq!(
            (line.end(), line.tokens.iter().map(|t| t.key.at).collect::<Vec<_>>()),
            (11, vec![0, 1, 5])
        );
        assert!(line.learn(&[3, 4, 8], &[10, 0, 1]).is_ok() && line.is_known());
        let row = [0.0, 0.0, 0.0, 0.5, 0.2, 0.0, 0.0, 0.0, 0.3];
        assert_eq!(
            (line.by_slot(&row, 2), line.by_slot(&row, 0)),
            (Some(vec![0.2, 0.3, 0.5]), Some(vec![0.2]))
        );
        assert_eq!((line.by_slot(&row[..4], 2), line.by_slot(&row, 3)), (None, None));
        let wrong: [(&[u32], &[Pos]); 4] = [
            (&[3, 4], &[10, 0, 1]),
            (&[3, 4, 8], &[10, 0]),
            (&[3, 4, 8], &[10, 0, 2]),
            (&[3, 4, 9], &[10, 0, 1]),
        ];
        for (visible, positions) in wrong {
            assert!(line.learn(visible, positions).is_err(), "{visible:?} {positions:?}");
        }
    }
}
