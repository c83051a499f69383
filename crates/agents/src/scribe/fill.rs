//! Which messages of its rooms an agent sees: the newest, and older ones that matter.

use super::memo::Text;
use super::{Frame, Scribe};
use crate::hud::MessageView;
use crate::world::{Message, Room};
use std::sync::Arc;

/// The share of a room's messages that may be older ones that were brought back.
const RECALLED: usize = 5;

/// A message as it is shown, and as text.
pub(super) type Said = (Arc<MessageView>, Text);

/// How many tokens the messages of each room may have: its share of what remains, less its head. What a head has beyond its room's
/// share is taken from those that have most.
pub(super) fn divide(remaining: usize, heads: &[usize], rooms: &[(&Room, f64)]) -> Vec<usize> {
    let share = |(n, (_, percent)): (usize, &(&Room, f64))| {
        let budget = (remaining as f64 * percent.clamp(0.0, 100.0) / 100.0) as usize;
        (budget.saturating_sub(heads[n]), heads[n].saturating_sub(budget))
    };
    let (mut messages, short): (Vec<usize>, Vec<usize>) = rooms.iter().enumerate().map(share).unzip();
    let mut missing: usize = short.iter().sum();
    while missing > 0 {
        let Some(most) = messages.iter_mut().max().filter(|most| **most > 0) else { break };
        let taken = missing.min(*most).min((*most / 2).max(1));
        *most -= taken;
        missing -= taken;
    }
    messages
}

impl Scribe {
    fn said(&self, frame: Frame<'_>, message: &Message) -> Said {
        self.memo.said(frame.format, message, |view| frame.writer.message(view))
    }

    /// As much of a message as fits, if that is anything.
    fn beginning(&self, frame: Frame<'_>, message: &Message, budget: usize) -> Option<Said> {
        let between = self.tokens(frame.writer.between_messages());
        let letters: Vec<char> = message.content.chars().collect();
        let mut long = letters.len();
        while long > 20 {
            long = long * 3 / 4;
            let some: String = letters[..long].iter().collect();
            let mut view = MessageView::from(message);
            view.content = format!("{some} […]");
            let text = self.memo.counted(frame.writer.message(&view));
            if text.tokens + between <= budget {
                return Some((Arc::new(view), text));
            }
        }
        None
    }

    /// The messages of a room that fit: from the newest backwards, without holes; where not all do, older ones that matter may
    /// take a share of the place. Then which of them those are.
    pub(super) fn fill(&self, frame: Frame<'_>, room: &Room, budget: usize) -> (Vec<Said>, Vec<u64>) {
        let between = self.tokens(frame.writer.between_messages());
        let mut newest: Vec<Said> = Vec::new();
        let mut spent = 0;
        let mut rest = room.messages.iter().rev().map(|message| self.said(frame, message)).peekable();
        let mut take = |limit: usize, spent: &mut usize, newest: &mut Vec<Said>| {
            while let Some(said) = rest.next_if(|(_, text)| *spent + text.tokens + between <= limit) {
                *spent += said.1.tokens + between;
                newest.push(said);
            }
            rest.peek().is_none()
        };
        let share = budget - budget / RECALLED;
        let all = take(share, &mut spent, &mut newest);
        let mut back: Vec<Said> = Vec::new();
        let oldest = |newest: &[Said]| newest.last().map_or(u64::MAX, |(said, _)| said.id);
        if !all {
            let before = oldest(&newest);
            let candidates = (frame.view.recalled)(room.id);
            for said in candidates.iter().filter(|said| said.id < before && said.room == room.id) {
                let new = back.iter().all(|(known, _)| known.id != said.id);
                let said = self.said(frame, said);
                if new && spent + said.1.tokens + between <= budget {
                    spent += said.1.tokens + between;
                    back.push(said);
                }
            }
            take(budget, &mut spent, &mut newest);
        }
        if newest.is_empty()
            && let Some(beginning) =
                room.messages.back().and_then(|last| self.beginning(frame, last, budget - spent))
        {
            newest.push(beginning);
        }
        let before = oldest(&newest);
        back.retain(|(said, _)| said.id < before);
        back.sort_unstable_by_key(|(said, _)| said.id);
        let recalled = back.iter().map(|(said, _)| said.id).collect();
        back.extend(newest.into_iter().rev());
        (back, recalled)
    }
}
