//! How messages are written for a model: what stands before a turn, and before everything.
//!
//! A turn opens by closing the one before it. So whatever leaves the window or comes back, what is left is well formed:
//! nothing that closes a turn can leave without what opens the next, and a turn's first chunk stays for as long as any
//! other of the turn does.

use halo_core::change::{Append, NewToken};
use halo_core::chunk::Chunker;
use halo_core::replay::Rules;
use halo_core::seams::{Piece, Template};
use halo_core::timeline::Timeline;
use halo_core::token::{Role, Source, Voice};
use jiff::civil::Date;
use xxhash_rust::xxh3::xxh3_64;

/// How messages are written for a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The model's own way.
    pub template: Template,
    /// The standing instructions; empty: none.
    pub system: String,
    /// Whether the day is told at the first message of a day.
    pub dates: bool,
    /// What the user and the model are called.
    pub names: Names,
}

/// What the user and the model are called before each of their messages; empty: nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// The user.
    pub user: String,
    /// The model.
    pub assistant: String,
}

impl Frame {
    /// What stands before the timeline. It is not closed: the first turn does that.
    #[must_use]
    pub fn before_all(&self) -> String {
        let Template { start, system, .. } = &self.template;
        match self.system.trim() {
            "" => start.clone(),
            told => format!("{start}{}{told}", system.before),
        }
    }

    /// The same without the system prompt's own text, for who tokenizes that apart.
    #[must_use]
    pub fn before_system(&self) -> String {
        let Template { start, system, .. } = &self.template;
        match self.system.trim() {
            "" => start.clone(),
            _ => format!("{start}{}", system.before),
        }
    }

    /// What opens a turn behind one of `before`, or behind the standing instructions. `day` is told where it is given.
    #[must_use]
    pub fn opening(&self, role: Role, before: Option<Role>, day: Option<Date>) -> String {
        let instructed = (!self.system.trim().is_empty()).then_some(Role::System);
        let closing = before.or(instructed).map_or("", |role| &self.template.around(role).after);
        let day = day
            .filter(|_| self.dates)
            .map_or(String::new(), |day| day.strftime("[%A, %-d %B %Y] ").to_string());
        let name = match role {
            Role::User => self.names.user.trim(),
            Role::Assistant => self.names.assistant.trim(),
            Role::System => "",
        };
        // A word begins with the space before it, so a model goes on from the colon.
        let name = match (name, role) {
            ("", _) => String::new(),
            (name, Role::Assistant) => format!("{name}:"),
            (name, _) => format!("{name}: "),
        };
        format!("{closing}{}{day}{name}", self.template.around(role).before)
    }

    /// Another value for a template that writes turns in another way: what was framed by one cannot be read by another.
    #[must_use]
    pub fn fingerprint(template: &Template) -> String {
        let Template { start: _, system, user, assistant } = template;
        let parts = [system, user, assistant].map(|wrap| format!("{}\0{}", wrap.before, wrap.after));
        format!("{:016x}", xxh3_64(parts.join("\0").as_bytes()))
    }
}

/// A new turn of a timeline, in chunks: what is said in it, and what frames that.
#[must_use]
pub fn append(timeline: &Timeline, role: Role, written: Vec<(Piece, Voice)>, rules: &Rules) -> Append {
    let mut chunker = Chunker::new(rules.chunks);
    let birth = rules.strategy.birth(Source::of(role, false));
    let mut tokens: Vec<NewToken> = Vec::with_capacity(written.len());
    for (Piece { id, text }, voice) in written {
        let sentence = match voice {
            Voice::Frame => 0,
            _ => {
                let placed = chunker.push(&text);
                let moved = placed.moved.map_or(0, |n| n as usize - 1);
                let from = tokens.len() - moved;
                tokens[from..].iter_mut().for_each(|token| token.sentence = placed.sentence);
                placed.sentence
            }
        };
        tokens.push(NewToken { id, text, sentence, brightness: birth, voice });
    }
    Append { at: timeline.next_position(), turn: timeline.next_turn(), role, tokens }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiff::civil::date;

    #[test]
    fn a_turn_opens_by_closing_the_one_before_it() {
        let frame = Frame {
            template: Template::chatml(),
            system: " Be kind.\n".into(),
            dates: true,
            names: Names::default(),
        };
        assert_eq!(frame.before_all(), "<|im_start|>system\nBe kind.");
        let first = frame.opening(Role::User, None, Some(date(2026, 11, 5)));
        assert_eq!(first, "<|im_end|>\n<|im_start|>user\n[Thursday, 5 November 2026] ");
        let answer = frame.opening(Role::Assistant, Some(Role::User), None);
        assert_eq!(answer, "<|im_end|>\n<|im_start|>assistant\n");
        let names = Names { user: "Ada".into(), assistant: "Halo".into() };
        let named = Frame { names, ..frame.clone() };
        let first = named.opening(Role::User, None, Some(date(2026, 11, 5)));
        assert_eq!(first, "<|im_end|>\n<|im_start|>user\n[Thursday, 5 November 2026] Ada: ");
        let answer = named.opening(Role::Assistant, Some(Role::User), None);
        assert_eq!(answer, "<|im_end|>\n<|im_start|>assistant\nHalo:");
        let bare = Frame { system: String::new(), dates: false, ..frame };
        assert_eq!(bare.before_all(), "");
        assert_eq!(bare.opening(Role::User, None, Some(date(2026, 11, 5))), "<|im_start|>user\n");
    }

    #[test]
    fn another_template_is_known_by_its_fingerprint() {
        let [chatml, plain] = [Template::chatml(), Template::plain()].map(|t| Frame::fingerprint(&t));
        assert_ne!(chatml, plain);
        let started = Template { start: "<s>".into(), ..Template::chatml() };
        assert_eq!(
            chatml,
            Frame::fingerprint(&started),
            "what stands before everything is no matter of turns"
        );
    }
}
