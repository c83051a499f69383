//! What was said in a room, by words: older messages that matter now are found here.

use halo_agents::world::Message;
use halo_recall::lexical::Lexical;
use halo_recall::order::Order;

/// What was said in a room.
#[derive(Default)]
pub struct Shelf {
    words: Lexical,
    /// By row: the number of the message.
    ids: Vec<u64>,
}

/// How many are found.
const FOUND: usize = 8;

impl Shelf {
    /// Something was said, after all that is here.
    pub(super) fn put(&mut self, message: &Message) {
        if self.ids.last().is_some_and(|&last| last >= message.id) {
            return;
        }
        self.words.put(self.ids.len() as u32, &message.content);
        self.ids.push(message.id);
    }

    /// Messages before a number that share telling words with a text, the best first.
    pub(super) fn find(&self, text: &str, before: u64) -> Vec<u64> {
        let end = self.ids.partition_point(|&id| id < before);
        let query = self.words.query(text);
        if end == 0 || query.terms.is_empty() {
            return Vec::new();
        }
        let order = Order::new(0..end as u32);
        let scores = self.words.scores(&query, &order, 0, 0.0);
        let mut found: Vec<(usize, f32)> =
            scores.into_iter().enumerate().filter(|(_, score)| *score > 0.0).collect();
        found.sort_by(|a, b| b.1.total_cmp(&a.1).then(b.0.cmp(&a.0)));
        found.into_iter().take(FOUND).map(|(row, _)| self.ids[row]).collect()
    }
}
