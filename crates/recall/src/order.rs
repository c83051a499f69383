//! Which rows there are to find, in the order in which they were said: who is whose neighbour.

/// Rows in order; a row's *place* is its number among those that are there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Order {
    rows: Vec<u32>,
    /// By row: its place, or none.
    places: Vec<u32>,
}

impl Order {
    /// These rows; they come in order.
    #[must_use]
    pub fn new(rows: impl IntoIterator<Item = u32>) -> Self {
        let rows: Vec<u32> = rows.into_iter().collect();
        let mut places = vec![u32::MAX; rows.last().map_or(0, |&last| last as usize + 1)];
        (0..).zip(&rows).for_each(|(place, &row)| places[row as usize] = place);
        Self { rows, places }
    }

    /// The rows, by place.
    #[must_use]
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// The place of a row.
    #[must_use]
    pub fn place(&self, row: u32) -> Option<usize> {
        self.places.get(row as usize).filter(|&&place| place != u32::MAX).map(|&place| place as usize)
    }

    /// For each place a sum: its own, and a share of each neighbour's up to `reach` places away.
    pub(crate) fn spread(&self, reach: usize, share: f32, of: impl Fn(u32) -> f32) -> Vec<f32> {
        let own: Vec<f32> = self.rows.iter().map(|&row| of(row)).collect();
        let around = |place: usize| {
            let near = &own[place.saturating_sub(reach)..(place + reach + 1).min(own.len())];
            own[place] + share * (near.iter().sum::<f32>() - own[place])
        };
        (0..own.len()).map(around).collect()
    }
}
