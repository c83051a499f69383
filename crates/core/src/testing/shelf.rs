//! A timeline as a store keeps it: turns, heads, and bodies as bytes, written only where a change has touched
//! them. What comes back from it must be what went in, whatever was forgotten in between.

use crate::body::Body;
use crate::change::Change;
use crate::parts::{BareHead, Parts};
use crate::timeline::{Head, Timeline, Turn};
use crate::token::ChunkId;

/// The parts of one timeline.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shelf {
    turns: Vec<Turn>,
    heads: Vec<Head>,
    bodies: Vec<Vec<u8>>,
}

impl Shelf {
    /// Writes what `change`, which led to `after`, has touched.
    ///
    /// # Errors
    /// When the tokens that it touched are not in memory.
    pub fn write(&mut self, change: &Change, after: &Timeline) -> Result<(), String> {
        let touched = after.touched(change);
        let old = self.heads.len();
        self.turns = after.turns().to_vec();
        self.heads.truncate(after.places());
        self.bodies.truncate(after.places());
        self.heads.extend(after.heads(self.heads.len()..after.places()));
        self.bodies.resize(after.places(), Vec::new());
        for place in touched.heads.into_iter().filter(|&p| p < old.min(after.places())) {
            self.heads[place] = after.heads(place..place + 1).next().expect("it is there");
        }
        for place in touched.bodies {
            let bytes = &mut self.bodies[place];
            bytes.clear();
            match after.body_at(place) {
                Some(body) => body.write(bytes),
                None if self.heads[place].len == 0 => {}
                None => return Err(format!("the tokens of {} are not in memory", self.heads[place].id)),
            }
        }
        Ok(())
    }

    /// The timeline, with the bodies of what is live.
    ///
    /// # Errors
    /// When the parts do not fit.
    pub fn load(&self) -> Result<Timeline, String> {
        let mut parts = Parts::default();
        self.turns.iter().try_for_each(|&turn| parts.turn(turn))?;
        for head in &self.heads {
            let Head { id, pinned, len, live, withdrawn, sum } = *head;
            let sum = sum.unwrap_or_default();
            parts.chunk(&BareHead { sentence: id.sentence, pinned, len, live, withdrawn, sum })?;
        }
        for place in (0..self.heads.len()).filter(|&place| self.heads[place].live > 0) {
            parts.body(place, Body::read(&self.bodies[place]).map_err(|e| e.to_string())?)?;
        }
        parts.finish()
    }

    /// The body of one chunk.
    ///
    /// # Errors
    /// When there is none, or it is damaged.
    pub fn fetch(&self, chunk: ChunkId) -> Result<Body, String> {
        let place = self.heads.iter().position(|h| h.id == chunk).ok_or(format!("there is no {chunk}"))?;
        Body::read(&self.bodies[place]).map_err(|e| e.to_string())
    }
}
