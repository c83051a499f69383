//! What is said to an agent, as its wrappers see it: parts of text, each a person's or not. What is a person's passes every
//! wrapper as it is, to the last byte.

/// Whose words something is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Whose {
    /// A person's: never compressed.
    User,
    /// An agent's, a tool's, a document's.
    Agent,
}

/// Something that has parts of text, and can be made anew from others.
pub trait Content: Sized {
    /// Its parts, in order.
    fn parts(&self) -> Vec<(Whose, &str)>;

    /// The same with other texts, one for each part.
    #[must_use]
    fn rebuilt(self, texts: Vec<String>) -> Self;
}

/// Something that was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// By whom.
    pub whose: Whose,
    /// What.
    pub text: String,
}

impl Said {
    /// A person's words.
    pub fn user(text: impl Into<String>) -> Self {
        Self { whose: Whose::User, text: text.into() }
    }

    /// An agent's words.
    pub fn agent(text: impl Into<String>) -> Self {
        Self { whose: Whose::Agent, text: text.into() }
    }
}

/// Text of which nobody says that a person wrote it.
impl Content for String {
    fn parts(&self) -> Vec<(Whose, &str)> {
        vec![(Whose::Agent, self)]
    }

    fn rebuilt(self, texts: Vec<String>) -> Self {
        texts.into_iter().next().unwrap_or(self)
    }
}

impl Content for Said {
    fn parts(&self) -> Vec<(Whose, &str)> {
        vec![(self.whose, &self.text)]
    }

    fn rebuilt(self, texts: Vec<String>) -> Self {
        Self { whose: self.whose, text: self.text.rebuilt(texts) }
    }
}

impl Content for Vec<Said> {
    fn parts(&self) -> Vec<(Whose, &str)> {
        self.iter().map(|said| (said.whose, said.text.as_str())).collect()
    }

    fn rebuilt(self, texts: Vec<String>) -> Self {
        self.into_iter().zip(texts).map(|(said, text)| Said { text, ..said }).collect()
    }
}
