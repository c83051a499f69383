//! The lexical index of a room's messages, which finds older messages for the HUD.

use crate::world::RoomMessage;
use halo_recall::lexical::LexicalIndex;
use halo_recall::row_order::RowOrder;

#[derive(Default)]
pub struct RoomIndex {
    lexical: LexicalIndex,
    /// The number of the message in each row of the index.
    message_ids: Vec<u64>,
}

const MAX_RESULTS: usize = 8;

impl RoomIndex {
    /// Adds a message. A message that is not newer than the last is in the index already.
    pub(crate) fn insert(&mut self, message: &RoomMessage) {
        if self.message_ids.last().is_some_and(|&last| last >= message.id) {
            return;
        }
        self.lexical.insert(self.message_ids.len() as u32, &message.content);
        self.message_ids.push(message.id);
    }

    /// The numbers of messages before `before` that share rare words with a text, best first.
    pub(crate) fn search(&self, text: &str, before: u64) -> Vec<u64> {
        let end = self.message_ids.partition_point(|&id| id < before);
        let query = self.lexical.parse_query(text);
        if end == 0 || query.terms.is_empty() {
            return Vec::new();
        }
        let order = RowOrder::new(0..end as u32);
        let scores = self.lexical.scores(&query, &order, 0, 0.0);
        let mut matches: Vec<(usize, f32)> =
            scores.into_iter().enumerate().filter(|(_, score)| *score > 0.0).collect();
        matches.sort_by(|a, b| b.1.total_cmp(&a.1).then(b.0.cmp(&a.0)));
        matches.into_iter().take(MAX_RESULTS).map(|(row, _)| self.message_ids[row]).collect()
    }
}
