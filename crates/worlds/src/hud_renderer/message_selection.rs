//! Which messages of its rooms an agent sees: the newest, and older ones that are relevant.

use super::context::RenderContext;
use super::render_cache::{RenderCache, RenderedMessage};
use crate::hud::HudMessage;
use crate::world::{Room, RoomMessage};
use std::iter::Peekable;
use std::sync::Arc;

/// One part in this many of a room's message budget may go to recalled messages.
const RECALLED_SHARE: usize = 5;

/// The message budget of each room: its share of what remains, less its header. Shares that add up to less than 100 %
/// divide all of it in their proportion. Where a header exceeds the share of its room, the excess is taken from the rooms
/// with the largest budgets.
pub(super) fn divide_message_budget(
    remaining: usize,
    headers: &[usize],
    rooms: &[(&Room, f64)],
) -> Vec<usize> {
    let total: f64 = rooms.iter().map(|(_, percent)| percent.clamp(0.0, 100.0)).sum();
    // Shares of dynamic rooms are quotients: a sum that is 100 % but for rounding must not be scaled.
    let whole = if total > 0.0 && total < 99.999 { total } else { 100.0 };
    let share = |(n, (_, percent)): (usize, &(&Room, f64))| {
        let budget = (remaining as f64 * percent.clamp(0.0, 100.0) / whole) as usize;
        (budget.saturating_sub(headers[n]), headers[n].saturating_sub(budget))
    };
    let (mut budgets, excess): (Vec<usize>, Vec<usize>) = rooms.iter().enumerate().map(share).unzip();
    let mut missing: usize = excess.iter().sum();
    while missing > 0 {
        let Some(largest) = budgets.iter_mut().max().filter(|largest| **largest > 0) else { break };
        let taken = missing.min(*largest).min((*largest / 2).max(1));
        *largest -= taken;
        missing -= taken;
    }
    budgets
}

fn render_message(cache: &RenderCache, context: RenderContext<'_>, message: &RoomMessage) -> RenderedMessage {
    cache.message(context.format, message, |view| context.writer.message_row(view))
}

/// The beginning of a message that is too long for the budget of its room; none if not even 20 characters fit.
fn truncate_message(
    cache: &RenderCache,
    context: RenderContext<'_>,
    message: &RoomMessage,
    budget: usize,
) -> Option<RenderedMessage> {
    let separator = cache.count_tokens(context.writer.message_separator());
    let chars: Vec<char> = message.content.chars().collect();
    let mut length = chars.len();
    while length > 20 {
        length = length * 3 / 4;
        let beginning: String = chars[..length].iter().collect();
        let mut view = HudMessage::from(message);
        view.content = format!("{beginning} […]");
        let text = cache.counted_text_uncached(context.writer.message_row(&view));
        if text.tokens + separator <= budget {
            return Some((Arc::new(view), text));
        }
    }
    None
}

/// The messages that are taken within a budget.
struct Selection {
    spent: usize,
    /// Tokens between two messages.
    separator: usize,
    /// Without gaps, newest first.
    newest: Vec<RenderedMessage>,
    recalled: Vec<RenderedMessage>,
}

impl Selection {
    fn fits(&self, message: &RenderedMessage, limit: usize) -> bool {
        self.spent + message.1.tokens + self.separator <= limit
    }

    /// Takes messages from the newest backwards, without gaps, up to a limit. Returns whether all are taken.
    fn take_newest(
        &mut self,
        messages: &mut Peekable<impl Iterator<Item = RenderedMessage>>,
        limit: usize,
    ) -> bool {
        while let Some(message) = messages.next_if(|message| self.fits(message, limit)) {
            self.spent += message.1.tokens + self.separator;
            self.newest.push(message);
        }
        messages.peek().is_none()
    }

    fn take_recalled(&mut self, message: RenderedMessage, limit: usize) {
        let is_new = self.recalled.iter().all(|(other, _)| other.id != message.0.id);
        if is_new && self.fits(&message, limit) {
            self.spent += message.1.tokens + self.separator;
            self.recalled.push(message);
        }
    }

    /// The number of the oldest message that was taken without gaps.
    fn oldest(&self) -> u64 {
        self.newest.last().map_or(u64::MAX, |(message, _)| message.id)
    }
}

/// The messages of a room that fit, oldest first, and the numbers of those that were recalled. If not all messages fit,
/// recalled ones may take a share of the budget.
pub(super) fn select_messages(
    cache: &RenderCache,
    context: RenderContext<'_>,
    room: &Room,
    budget: usize,
) -> (Vec<RenderedMessage>, Vec<u64>) {
    let separator = cache.count_tokens(context.writer.message_separator());
    let mut selection = Selection { spent: 0, separator, newest: Vec::new(), recalled: Vec::new() };
    let mut messages =
        room.messages.iter().rev().map(|message| render_message(cache, context, message)).peekable();
    let all_fit = selection.take_newest(&mut messages, budget - budget / RECALLED_SHARE);
    if !all_fit {
        let before = selection.oldest();
        let candidates = (context.request.recalled)(room.id);
        for message in candidates.iter().filter(|message| message.id < before && message.room == room.id) {
            selection.take_recalled(render_message(cache, context, message), budget);
        }
        selection.take_newest(&mut messages, budget);
    }
    if selection.newest.is_empty()
        && let Some(last) = room.messages.back()
    {
        selection.newest.extend(truncate_message(cache, context, last, budget - selection.spent));
    }
    // The second pass may have reached recalled messages.
    let before = selection.oldest();
    let Selection { mut recalled, newest, .. } = selection;
    recalled.retain(|(message, _)| message.id < before);
    recalled.sort_unstable_by_key(|(message, _)| message.id);
    let recalled_ids = recalled.iter().map(|(message, _)| message.id).collect();
    recalled.extend(newest.into_iter().rev());
    (recalled, recalled_ids)
}
