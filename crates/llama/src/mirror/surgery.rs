//! What is done to the model's memory: cells are saved and freed, put back, moved and computed anew. Every step leaves a
//! table that is true, so that whatever fails in between, what is in memory is known.

use super::{FORK, MAIN, Mirror, MirrorError, Mode, SPARE};
use crate::attention::Want;
use crate::cells::{Cached, pieces, runs};
use crate::ffi::{Item, LlamaError, Pos, Seq, Token};
use crate::graveyard::{Head, LONGEST, Piece};
use crate::key::Key;
use halo_core::seams::{Flow, Seen, Upkeep};
use std::ops::Range;
use std::sync::Arc;

impl Mirror {
    /// Saves and frees what is in memory and not in the window.
    pub(super) fn free(
        &mut self,
        window: &[Seen],
        keys: &[Key],
        upkeep: &mut Upkeep,
    ) -> Result<(), MirrorError> {
        let gone: Vec<usize> = match self.mode {
            Mode::Keep => {
                let stays = alike(&self.main.tokens, window, keys);
                (0..self.main.tokens.len()).filter(|&n| !stays[n]).collect()
            }
            Mode::Reread => {
                // From the first difference on.
                let same = |(t, (k, s)): &(&Cached, (&Key, &Seen))| {
                    t.key == **k && s.id.0 == t.token.cast_unsigned()
                };
                let same = self.main.tokens.iter().zip(keys.iter().zip(window)).take_while(same).count();
                let movable = self.context.can_move();
                // What cannot be taken apart is thrown away as a whole.
                let same = if same < self.main.tokens.len() && !movable { 0 } else { same };
                (same..self.main.tokens.len()).collect()
            }
        };
        if gone.is_empty() {
            return Ok(());
        }
        if self.mode == Mode::Keep {
            // What was replaced by another token at its place will not return.
            let dead: Vec<usize> = gone
                .iter()
                .copied()
                .filter(|&n| keys.binary_search(&self.main.tokens[n].key).is_err())
                .collect();
            self.bury(&dead)?;
        }
        upkeep.left += gone.len();
        let leaving: Vec<Cached> = gone.iter().map(|&n| self.main.tokens[n]).collect();
        if leaving.len() == self.main.tokens.len() {
            let _ = self.context.remove(MAIN, -1, -1);
            self.main.tokens.clear();
            self.turning = false;
            return Ok(());
        }
        for run in runs(&leaving) {
            let (start, end) = (leaving[run.start].position, leaving[run.end - 1].position + 1);
            if !self.context.remove(MAIN, start, end) {
                return Err(LlamaError::Decode("cells cannot be taken out of its memory".into()).into());
            }
        }
        let mut gone = gone.into_iter().peekable();
        let mut n = 0;
        self.main.tokens.retain(|_| {
            let leaves = gone.next_if_eq(&n).is_some();
            n += 1;
            !leaves
        });
        Ok(())
    }

    /// Saves tokens of the line that are not saved as they stand.
    pub(super) fn bury(&mut self, which: &[usize]) -> Result<(), MirrorError> {
        let Some(conversation) = self.conversation.clone() else { return Ok(()) };
        let tokens: Vec<Cached> = which.iter().map(|&n| self.main.tokens[n]).collect();
        for piece in pieces(&tokens, LONGEST) {
            let tokens = &tokens[piece];
            let (first, end) = (tokens[0], tokens[tokens.len() - 1].position + 1);
            let ids: Vec<Token> = tokens.iter().map(|t| t.token).collect();
            if self.yard.has(&conversation, first.key, &ids, first.position) {
                continue;
            }
            self.turn()?;
            self.context.share(MAIN, SPARE, first.position, end);
            let cells = self.context.save(SPARE);
            let _ = self.context.remove(SPARE, -1, -1);
            if cells.is_empty() {
                continue;
            }
            self.yard
                .put(&conversation, Piece { start: first.key, tokens: ids, position: first.position, cells });
        }
        Ok(())
    }

    /// Has llama.cpp turn what was moved: it does so when it reads, so it reads a token that nobody needs. Nobody can
    /// stop it then: half of it turned, the next time would turn that half again.
    pub(super) fn turn(&mut self) -> Result<(), MirrorError> {
        if self.turning {
            self.context.tap().want(Want::nothing());
            let halt = Arc::clone(self.context.halt());
            let read =
                halt.deaf(|| self.context.decode(SPARE, &[Item { token: 0, position: 0, logits: false }]));
            let _ = self.context.remove(SPARE, -1, -1);
            read?;
            self.turning = false;
        }
        Ok(())
    }

    /// Moves runs of the line to other positions; returns how many tokens moved.
    pub(super) fn shift(&mut self, moves: &[(Range<usize>, Pos)]) -> usize {
        let by = |(run, start): &(Range<usize>, Pos)| *start - self.main.tokens[run.start].position;
        let moves: Vec<(Range<usize>, Pos)> =
            moves.iter().map(|m| (m.0.clone(), by(m))).filter(|(_, by)| *by != 0).collect();
        // Nothing may pass over what has not moved yet: downward from the front, upward from the back.
        let down = moves.iter().filter(|(_, by)| *by < 0);
        let up = moves.iter().rev().filter(|(_, by)| *by > 0);
        let mut moved = 0;
        for (run, by) in down.chain(up) {
            let tokens = &mut self.main.tokens[run.clone()];
            let (start, end) = (tokens[0].position, tokens[tokens.len() - 1].position + 1);
            self.context.shift(MAIN, start, end, *by);
            tokens.iter_mut().for_each(|t| t.position += by);
            moved += tokens.len();
            self.turning = true;
        }
        moved
    }

    /// Puts saved cells into a sequence, at a position.
    pub(super) fn put_back(
        &mut self,
        seq: Seq,
        head: &Head,
        range: Range<usize>,
        start: Pos,
        window: &[Seen],
        keys: &[Key],
    ) -> Result<Vec<Cached>, MirrorError> {
        let conversation = self.conversation.clone().unwrap_or_default();
        let piece = self.yard.get(&conversation, keys[range.start]);
        let same = |piece: &Piece| {
            piece.start == head.start && piece.tokens == head.tokens && piece.position == head.position
        };
        let Some(piece) = piece.filter(|piece| same(piece)) else {
            self.yard.discard(&conversation, head.start);
            return Err(LlamaError::State("they are damaged").into());
        };
        let own = piece.position + keys[range.start].from(piece.start).unwrap_or(0) as Pos;
        if let Err(why) = self.context.restore(SPARE, &piece.cells) {
            let _ = self.context.remove(SPARE, -1, -1);
            self.yard.discard(&conversation, piece.start);
            return Err(why.into());
        }
        let end = own + range.len() as Pos;
        let last = piece.position + piece.tokens.len() as Pos;
        // What is not wanted goes again.
        if piece.position < own {
            let _ = self.context.remove(SPARE, piece.position, own);
        }
        if end < last {
            let _ = self.context.remove(SPARE, end, last);
        }
        if own != start {
            self.context.shift(SPARE, own, end, start - own);
            self.turning = true;
        }
        self.context.share(SPARE, seq, -1, -1);
        let _ = self.context.remove(SPARE, -1, -1);
        let tokens = new_tokens(range, start, window, keys);
        if seq == MAIN {
            self.main.insert(&tokens);
        }
        Ok(tokens)
    }

    /// Computes what is lost, over what stands before it, in a sequence of its own.
    pub(super) fn compute(
        &mut self,
        range: Range<usize>,
        start: Pos,
        window: &[Seen],
        keys: &[Key],
        go_on: &mut dyn FnMut(usize) -> Flow,
    ) -> Result<(), MirrorError> {
        self.turn()?;
        let tokens = new_tokens(range, start, window, keys);
        let end = start + tokens.len() as Pos;
        self.context.share(MAIN, FORK, 0, start);
        let batch = self.context.shape().batch as usize;
        let mut read = Ok(());
        for (n, tokens) in tokens.chunks(batch).enumerate() {
            if go_on(n * batch) == Flow::Stop {
                read = Err(LlamaError::Stopped);
                break;
            }
            let items: Vec<Item> =
                tokens.iter().map(|t| Item { token: t.token, position: t.position, logits: false }).collect();
            self.context.tap().want(Want::nothing());
            read = self.context.decode(FORK, &items);
            if read.is_err() {
                break;
            }
        }
        if read.is_ok() {
            self.context.share(FORK, MAIN, start, end);
            self.main.insert(&tokens);
        }
        let _ = self.context.remove(FORK, -1, -1);
        Ok(read?)
    }

    /// Closes all holes: everything stands one behind the other.
    ///
    /// # Errors
    /// When llama.cpp fails.
    pub fn compact(&mut self) -> Result<(), MirrorError> {
        self.drop_fork();
        let moves = runs(&self.main.tokens).into_iter().map(|run| (run.clone(), run.start as Pos));
        self.shift(&moves.collect::<Vec<_>>());
        self.turn()
    }
}

/// Which tokens of a line are those of a window. What was said never changes; what stands beside it does, and is the same only
/// as far as all of it before is.
pub(super) fn alike(line: &[Cached], window: &[Seen], keys: &[Key]) -> Vec<bool> {
    let mut alike: Vec<bool> = Vec::with_capacity(line.len());
    for (n, token) in line.iter().enumerate() {
        let same =
            keys.binary_search(&token.key).is_ok_and(|at| window[at].id.0 == token.token.cast_unsigned());
        let begun = token.key.behind <= 1
            || n.checked_sub(1).is_some_and(|before| alike[before] && line[before].key.plus(1) == token.key);
        alike.push(same && begun);
    }
    alike
}

/// Tokens of a window, from a position on.
fn new_tokens(range: Range<usize>, start: Pos, window: &[Seen], keys: &[Key]) -> Vec<Cached> {
    let token = |(n, position): (usize, Pos)| Cached {
        key: keys[n],
        token: window[n].id.0.cast_signed(),
        begins: window[n].begins,
        position,
        cell: None,
    };
    range.zip(start..).map(token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::token::{Position, TokenId};

    /// A memory that was changed in its middle is another from there on, though its end says the same.
    #[test]
    fn what_stands_beside_is_the_same_as_far_as_it_is_from_its_beginning() {
        let seen = |at: u64, behind: u16, id: u32| Seen {
            position: Some(Position(at)),
            behind,
            id: TokenId(id),
            begins: false,
        };
        let window =
            |middle: u32| [seen(3, 0, 9), seen(3, 1, 1), seen(3, 2, middle), seen(3, 3, 3), seen(4, 0, 8)];
        let names = |window: &[Seen]| crate::key::keys(window).expect("in order");
        let old = window(2);
        let token = |(seen, key): (&Seen, Key)| Cached {
            key,
            token: seen.id.0.cast_signed(),
            begins: false,
            position: 0,
            cell: None,
        };
        let line: Vec<Cached> = old.iter().zip(names(&old)).map(token).collect();
        assert_eq!(alike(&line, &old, &names(&old)), [true; 5]);
        let new = window(7);
        assert_eq!(alike(&line, &new, &names(&new)), [true, true, false, false, true]);
    }
}
