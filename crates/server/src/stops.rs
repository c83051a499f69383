//! Stop sequences, for clients that must not see them: text is held back as long as it could be the beginning of one.

/// What has been said and not yet passed on.
#[derive(Debug, Default)]
pub(crate) struct Held {
    stops: Vec<String>,
    held: String,
}

impl Held {
    /// Holds back these.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Self { stops, held: String::new() }
    }

    /// Text comes; what can be passed on is returned.
    pub fn push(&mut self, text: &str) -> String {
        self.held.push_str(text);
        if let Some(at) = self.stopped_at() {
            // All that follows belongs to it.
            let safe = self.held[..at].to_owned();
            self.held = self.held.split_off(at);
            return safe;
        }
        let begins = |at: usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[at..]));
        let at = self.held.char_indices().map(|(at, _)| at).find(|&at| begins(at)).unwrap_or(self.held.len());
        let rest = self.held.split_off(at);
        std::mem::replace(&mut self.held, rest)
    }

    /// Nothing more comes; what was held back for nothing is returned.
    pub fn end(self) -> String {
        let end = self.stopped_at().unwrap_or(self.held.len());
        self.held[..end].to_owned()
    }

    fn stopped_at(&self) -> Option<usize> {
        self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(stops: &[&str], pieces: &[&str]) -> Vec<String> {
        let stops: Vec<String> = stops.iter().map(|&s| s.to_owned()).collect();
        let mut held = Held::new(&stops);
        let mut all: Vec<String> = pieces.iter().map(|piece| held.push(piece)).collect();
        all.push(held.end());
        all
    }

    #[test]
    fn a_stop_is_never_passed_on_and_nothing_else_is_lost() {
        assert_eq!(heard(&["END"], &["a ", "E", "ND"]), ["a ", "", "", ""]);
        assert_eq!(heard(&["END"], &["a ", "E", "NOUGH"]), ["a ", "", "ENOUGH", ""]);
        assert_eq!(heard(&["END"], &["a E", "EN"]), ["a ", "E", "EN"], "the end decides");
        assert_eq!(heard(&["\nUser:", "\n\n"], &["ja\n", "\nnein"]), ["ja", "", ""]);
        assert_eq!(heard(&["é"], &["caf", "é", "!"]), ["caf", "", "", ""]);
        assert_eq!(heard(&[], &["x", "y"]), ["x", "y", ""]);
    }
}
