//! How important a text is, judged from the text alone: for models without attention, and for agents' memories.

/// The weights of the parts of a salience score. They should sum to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SalienceWeights {
    /// A newer text is more important.
    pub recency: f64,
    /// The text names a registered entity.
    pub entity: f64,
    /// The text refers to the user, or is addressed to them.
    pub user_reference: f64,
    /// The text is a heading or code, and not a mere separator.
    pub structural: f64,
}

impl Default for SalienceWeights {
    fn default() -> Self {
        Self { recency: 0.3, entity: 0.3, user_reference: 0.2, structural: 0.2 }
    }
}

/// The recency of a text whose position is unknown.
pub const UNKNOWN_RECENCY: f64 = 0.5;

const USER_MARKERS: [&str; 4] = ["you asked", "your", "user:", "human:"];

/// Scores texts from 0 (may be dropped) to 1 (should stay).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SalienceScorer {
    weights: SalienceWeights,
    /// In lower case.
    entities: Vec<String>,
}

impl SalienceScorer {
    /// A scorer without entities.
    #[must_use]
    pub fn new(weights: SalienceWeights) -> Self {
        Self { weights, entities: Vec::new() }
    }

    /// Adds a name that makes a text more important. A blank name is ignored: every text would contain it.
    pub fn register_entity(&mut self, entity: &str) {
        let entity = entity.trim().to_lowercase();
        if !entity.is_empty() && !self.entities.contains(&entity) {
            self.entities.push(entity);
        }
    }

    /// Adds the names in a text: words with a capital letter that do not begin a sentence.
    pub fn register_names_in(&mut self, text: &str) {
        let mut begins_sentence = true;
        for word in text.split_whitespace() {
            let name = word.trim_matches(|c: char| !c.is_alphanumeric());
            let name = name.strip_suffix("'s").or(name.strip_suffix("’s")).unwrap_or(name);
            let is_capital = name.chars().next().is_some_and(char::is_uppercase);
            if is_capital && !begins_sentence && name.chars().count() > 1 {
                self.register_entity(name);
            }
            begins_sentence = word.ends_with(['.', '!', '?', ':']) || (begins_sentence && name.is_empty());
        }
    }

    /// The score of a text; `recency` is 0 for the oldest text and 1 for the newest.
    #[must_use]
    pub fn score(&self, text: &str, recency: f64) -> f64 {
        let lower = text.to_lowercase();
        let names_entity = self.entities.iter().any(|e| lower.contains(e));
        let refers_to_user = USER_MARKERS.iter().any(|m| lower.contains(m));
        self.weights.recency * recency.clamp(0.0, 1.0)
            + self.weights.entity * f64::from(u8::from(names_entity))
            + self.weights.user_reference * f64::from(u8::from(refers_to_user))
            + self.weights.structural * structure_score(text)
    }
}

/// 1 for a heading or a code fence, 0 for a separator, else 0.3.
fn structure_score(text: &str) -> f64 {
    match text.trim() {
        _ if text.starts_with('#') || text.starts_with("```") => 1.0,
        "" | "---" | "***" => 0.0,
        _ => 0.3,
    }
}

/// The recency of the `index`-th of `count` texts: 0 for the first, 1 for the last.
#[must_use]
pub fn recency(index: usize, count: usize) -> f64 {
    if count < 2 { 1.0 } else { index as f64 / (count - 1) as f64 }
}
