//! Stop sequences, for clients that must not see them: text is withheld while it could be the start of one.

#[derive(Debug, Default)]
pub(crate) struct StopSequenceFilter {
    stops: Vec<String>,
    pending: String,
}

impl StopSequenceFilter {
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Self { stops, pending: String::new() }
    }

    /// Adds generated text and returns the text that can be sent.
    pub fn push(&mut self, text: &str) -> String {
        self.pending.push_str(text);
        if let Some(at) = self.stop_position() {
            // The stop sequence and everything after it are withheld.
            let safe = self.pending[..at].to_owned();
            self.pending = self.pending.split_off(at);
            return safe;
        }
        let begins = |at: usize| self.stops.iter().any(|stop| stop.starts_with(&self.pending[at..]));
        let at = self
            .pending
            .char_indices()
            .map(|(at, _)| at)
            .find(|&at| begins(at))
            .unwrap_or(self.pending.len());
        let rest = self.pending.split_off(at);
        std::mem::replace(&mut self.pending, rest)
    }

    /// Ends the text and returns what was withheld and is no stop sequence.
    pub fn finish(self) -> String {
        let end = self.stop_position().unwrap_or(self.pending.len());
        self.pending[..end].to_owned()
    }

    fn stop_position(&self) -> Option<usize> {
        self.stops.iter().filter_map(|stop| self.pending.find(stop.as_str())).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filtered(stops: &[&str], tokens: &[&str]) -> Vec<String> {
        let stops: Vec<String> = stops.iter().map(|&s| s.to_owned()).collect();
        let mut filter = StopSequenceFilter::new(&stops);
        let mut sent: Vec<String> = tokens.iter().map(|token| filter.push(token)).collect();
        sent.push(filter.finish());
        sent
    }

    #[test]
    fn stop_sequences_are_withheld_and_other_text_is_kept() {
        assert_eq!(filtered(&["END"], &["a ", "E", "ND"]), ["a ", "", "", ""]);
        assert_eq!(filtered(&["END"], &["a ", "E", "NOUGH"]), ["a ", "", "ENOUGH", ""]);
        assert_eq!(
            filtered(&["END"], &["a E", "EN"]),
            ["a ", "E", "EN"],
            "a partial stop sequence at the end is sent"
        );
        assert_eq!(filtered(&["\nUser:", "\n\n"], &["ja\n", "\nnein"]), ["ja", "", ""]);
        assert_eq!(filtered(&["é"], &["caf", "é", "!"]), ["caf", "", "", ""]);
        assert_eq!(filtered(&[], &["x", "y"]), ["x", "y", ""]);
    }
}
