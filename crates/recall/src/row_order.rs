//! The rows that have a chunk, in timeline order: which chunks are neighbours.

/// Rows in ascending order. The *ordinal* of a row is its index among them: rows of deleted chunks are skipped, so chunks
/// with consecutive ordinals are neighbours in the conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowOrder {
    rows: Vec<u32>,
    /// The ordinal of each row; `u32::MAX` for a row without chunk.
    ordinals: Vec<u32>,
}

impl RowOrder {
    /// `rows` must be ascending.
    #[must_use]
    pub fn new(rows: impl IntoIterator<Item = u32>) -> Self {
        let rows: Vec<u32> = rows.into_iter().collect();
        let mut ordinals = vec![u32::MAX; rows.last().map_or(0, |&last| last as usize + 1)];
        (0..).zip(&rows).for_each(|(ordinal, &row)| ordinals[row as usize] = ordinal);
        Self { rows, ordinals }
    }

    /// The rows by ordinal.
    #[must_use]
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// The ordinal of a row.
    #[must_use]
    pub fn index_of(&self, row: u32) -> Option<usize> {
        self.ordinals
            .get(row as usize)
            .filter(|&&ordinal| ordinal != u32::MAX)
            .map(|&ordinal| ordinal as usize)
    }

    /// The row of an ordinal and its neighbours within `radius`.
    #[must_use]
    pub fn around(&self, ordinal: usize, radius: usize) -> &[u32] {
        &self.rows[ordinal.saturating_sub(radius)..(ordinal + radius + 1).min(self.rows.len())]
    }

    /// For each ordinal the sum of its own value and the values of its neighbours within `radius`, times `weight`.
    pub(crate) fn sum_neighbours(&self, radius: usize, weight: f32, value: impl Fn(u32) -> f32) -> Vec<f32> {
        let values: Vec<f32> = self.rows.iter().map(|&row| value(row)).collect();
        let sum = |ordinal: usize| {
            let near = &values[ordinal.saturating_sub(radius)..(ordinal + radius + 1).min(values.len())];
            values[ordinal] + weight * (near.iter().sum::<f32>() - values[ordinal])
        };
        (0..values.len()).map(sum).collect()
    }
}
