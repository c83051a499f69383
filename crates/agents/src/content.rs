//! Input and output of agents as wrappers see it: segments of text, each with its author. Text of the user passes every
//! wrapper unchanged, byte for byte.

/// Who wrote a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TextAuthor {
    /// The user: never shortened.
    User,
    /// An agent, a tool or a document.
    Agent,
}

/// A value that consists of segments of text.
pub trait AuthoredContent: Sized {
    /// The segments, in order.
    fn segments(&self) -> Vec<(TextAuthor, &str)>;

    /// The same value with other texts, one for each segment.
    #[must_use]
    fn with_texts(self, texts: Vec<String>) -> Self;
}

/// A message with its author.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthoredMessage {
    /// Who wrote it.
    pub author: TextAuthor,
    /// The text.
    pub text: String,
}

impl AuthoredMessage {
    /// A message of the user.
    pub fn user(text: impl Into<String>) -> Self {
        Self { author: TextAuthor::User, text: text.into() }
    }

    /// A message of an agent.
    pub fn agent(text: impl Into<String>) -> Self {
        Self { author: TextAuthor::Agent, text: text.into() }
    }
}

/// A plain string counts as text of an agent.
impl AuthoredContent for String {
    fn segments(&self) -> Vec<(TextAuthor, &str)> {
        vec![(TextAuthor::Agent, self)]
    }

    fn with_texts(self, texts: Vec<String>) -> Self {
        texts.into_iter().next().unwrap_or(self)
    }
}

impl AuthoredContent for AuthoredMessage {
    fn segments(&self) -> Vec<(TextAuthor, &str)> {
        vec![(self.author, &self.text)]
    }

    fn with_texts(self, texts: Vec<String>) -> Self {
        Self { author: self.author, text: self.text.with_texts(texts) }
    }
}

impl AuthoredContent for Vec<AuthoredMessage> {
    fn segments(&self) -> Vec<(TextAuthor, &str)> {
        self.iter().map(|message| (message.author, message.text.as_str())).collect()
    }

    fn with_texts(self, texts: Vec<String>) -> Self {
        self.into_iter().zip(texts).map(|(message, text)| AuthoredMessage { text, ..message }).collect()
    }
}
