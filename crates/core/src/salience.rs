//! How much a piece of text matters, judged from the text alone: for models that give no attention, and for
//! agents' memories.

/// What counts, and how much. The weights of a perfect score sum to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// Newer matters more.
    pub recency: f64,
    /// It names something known.
    pub entity: f64,
    /// It speaks of the user or to them.
    pub user_reference: f64,
    /// It is a heading or code, and no mere separator.
    pub structural: f64,
}

impl Default for Weights {
    fn default() -> Self {
        Self { recency: 0.3, entity: 0.3, user_reference: 0.2, structural: 0.2 }
    }
}

/// Recency where the position is unknown.
pub const UNKNOWN_RECENCY: f64 = 0.5;

const USER_MARKERS: [&str; 4] = ["you asked", "your", "user:", "human:"];

/// Scores text from 0 (may go) to 1 (must stay).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Salience {
    weights: Weights,
    /// In lower case.
    entities: Vec<String>,
}

impl Salience {
    /// A scorer that knows no names yet.
    #[must_use]
    pub fn new(weights: Weights) -> Self {
        Self { weights, entities: Vec::new() }
    }

    /// From now on, text that names `entity` matters more. Blank names are passed over: they would be
    /// found in everything.
    pub fn register_entity(&mut self, entity: &str) {
        let entity = entity.trim().to_lowercase();
        if !entity.is_empty() && !self.entities.contains(&entity) {
            self.entities.push(entity);
        }
    }

    /// The score of a text; `recency` goes from 0, the oldest, to 1, the newest.
    #[must_use]
    pub fn score(&self, text: &str, recency: f64) -> f64 {
        let Weights { recency: r, entity, user_reference, structural } = self.weights;
        let lower = text.to_lowercase();
        let names = self.entities.iter().any(|e| lower.contains(e));
        let speaks = USER_MARKERS.iter().any(|m| lower.contains(m));
        r * recency.clamp(0.0, 1.0)
            + entity * f64::from(u8::from(names))
            + user_reference * f64::from(u8::from(speaks))
            + structural * structure(text)
    }
}

/// 1 for a heading or a code fence, 0 for a separator, else 0.3.
fn structure(text: &str) -> f64 {
    match text.trim() {
        _ if text.starts_with('#') || text.starts_with("```") => 1.0,
        "" | "---" | "***" => 0.0,
        _ => 0.3,
    }
}

/// The recency of the `index`-th of `count` pieces, from 0 for the first to 1 for the last.
#[must_use]
pub fn recency(index: usize, count: usize) -> f64 {
    if count < 2 { 1.0 } else { index as f64 / (count - 1) as f64 }
}
