//! A copy of the memory that is used and thrown away: a second sequence over the same cells. It moves nothing, unless positions run out.

use super::surgery::alike;
use super::{FORK, MAIN, Mirror, MirrorError, Mode, Part, Ready};
use crate::cells::{Cached, Line};
use crate::ffi::Pos;
use crate::key::Key;
use halo_core::seams::{Flow, Seen, Upkeep};

impl Mirror {
    /// A copy of the memory that is thrown away again: as much of `window` as is in memory or can be had without moving
    /// anything; the rest is to be read.
    ///
    /// # Errors
    /// As [`Mirror::follow`].
    pub fn fork(&mut self, conversation: &str, window: &[Seen], answer: usize) -> Result<Ready, MirrorError> {
        let keys = self.names(window)?;
        if self.mode == Mode::Reread {
            return self.follow(conversation, window, answer, &mut |_, _| Flow::Continue);
        }
        self.drop_fork();
        if self.conversation.as_deref() != Some(conversation) {
            self.attend(conversation);
            let parts = self.compare(window, &keys);
            self.place(&parts, window, &keys, 0, None, &mut Upkeep::default())?;
        }
        // Nothing may be half moved when others begin to share it.
        self.turn()?;
        let free = self.cells().saturating_sub(self.main.tokens.len());
        let mut ready = self.share(window, &keys, free, answer)?;
        let cells = free.saturating_sub(ready.upkeep.read + ready.upkeep.returned);
        if ready.room < answer.min(cells) {
            // Positions run out before cells do, and the answer would end in the middle.
            self.compact()?;
            ready = self.share(window, &keys, free, answer)?;
        }
        if ready.room < answer.min(1) {
            self.drop_fork();
            return Err(MirrorError::NoAside { read: ready.upkeep.read, free, cells: self.cells() });
        }
        Ok(ready)
    }

    /// Throws a fork away.
    pub fn drop_fork(&mut self) {
        if self.fork.take().is_some() {
            let _ = self.context.remove(FORK, -1, -1);
        }
    }

    /// Makes a fork: shares with it what it has in common with the line, and puts back into it what was saved and finds
    /// its own place free. What it reads goes into the cells that are `free`.
    fn share(
        &mut self,
        window: &[Seen],
        keys: &[Key],
        free: usize,
        answer: usize,
    ) -> Result<Ready, MirrorError> {
        let mut upkeep = Upkeep::default();
        let mut fork = Line::new(FORK);
        self.fork = Some(Line::new(FORK));
        let same = alike(&self.main.tokens, window, keys);
        let shared = self.main.tokens.iter().copied().zip(same).filter(|(_, same)| *same);
        let shared: Vec<Cached> = shared.map(|(token, _)| token).collect();
        let (mut at, mut here) = (0, 0);
        let end = window.len() - 1;
        while at < end {
            let first = shared.get(here).map_or(0, |t| t.position);
            let run = shared[here..].iter().zip(&keys[at..end]).zip(first..);
            let run = run.take_while(|((t, k), position)| t.key == **k && t.position == *position).count();
            if run > 0 {
                let tokens = &shared[here..here + run];
                self.context.share(MAIN, FORK, tokens[0].position, tokens[run - 1].position + 1);
                fork.tokens.extend_from_slice(tokens);
                (at, here) = (at + run, here + run);
                upkeep.kept += run;
                continue;
            }
            let wall = shared.get(here).map_or(self.limit, |t| t.position);
            let next = shared.get(here).map_or(end, |t| keys.partition_point(|k| *k < t.key)).min(end);
            let mut parts = Vec::new();
            self.look_up(at..next, window, keys, usize::MAX, &mut parts);
            let Some(Part::Returns(range, head)) = parts.into_iter().next() else { break };
            let own = head.position + keys[range.start].from(head.start).unwrap_or(0) as Pos;
            let fits = upkeep.returned + head.tokens.len() <= free;
            if own < fork.end() || own + range.len() as Pos > wall || !fits {
                break;
            }
            let Ok(tokens) = self.put_back(FORK, &head, range.clone(), own, window, keys) else { break };
            upkeep.returned += range.len();
            fork.tokens.extend(tokens);
            at = range.end;
        }
        upkeep.read = window.len() - at;
        let known = (self.limit - fork.end()) as usize;
        let room = answer
            .min(free.saturating_sub(upkeep.read + upkeep.returned))
            .min(known.saturating_sub(upkeep.read));
        self.fork = Some(fork);
        Ok(Ready { from: at, room, upkeep })
    }
}
