//! A conversation goes on with another model: its text is cut into that model's tokens and framed in its way. Each token
//! takes over what was known of the one that stood where it begins: its light, its chunk, and whether it is live.

use crate::frame::Frame;
use halo_core::brightness::Strategy;
use halo_core::change::NewToken;
use halo_core::seams::{Model, Piece, SeamError};
use halo_core::token::{Role, Source, Voice};
use halo_core::told::{Told, ToldToken};
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

/// Whoever reads a conversation anew, message by message.
pub(crate) struct Reader<'a> {
    pub model: &'a mut dyn Model,
    pub frame: &'a Frame,
    pub strategy: &'a Strategy,
    before: Option<Role>,
    day: Option<Date>,
}

impl<'a> Reader<'a> {
    pub fn new(model: &'a mut dyn Model, frame: &'a Frame, strategy: &'a Strategy) -> Self {
        Self { model, frame, strategy, before: None, day: None }
    }

    /// The next message.
    pub fn read(&mut self, told: Told) -> Result<Told, SeamError> {
        let said: Vec<ToldToken> =
            told.tokens.into_iter().filter(|t| t.token.voice != Voice::Frame).collect();
        let text: String = said.iter().map(|t| t.token.text.as_str()).collect();
        let day = Timestamp::from_millisecond(told.at).ok().map(|at| at.to_zoned(TimeZone::system()).date());
        let new_day = day.filter(|_| told.role == Role::User && self.day != day);
        let opening = self.frame.opening(told.role, self.before, new_day);
        // What opens a turn lives and leaves with its first words.
        let (dead, withdrawn) = said.first().map_or((false, false), |first| (first.dead, first.withdrawn));
        let sentence = said.first().map_or(0, |first| first.token.sentence);
        let brightness = self.strategy.birth(Source::of(told.role, false));
        let framed = self.model.tokenize(&opening, true)?.into_iter().map(|Piece { id, text }| ToldToken {
            token: NewToken { id, text, sentence, brightness, voice: Voice::Frame },
            dead,
            withdrawn,
        });
        let mut tokens: Vec<ToldToken> = framed.collect();
        if !text.is_empty() {
            tokens.extend(carried(&said, self.model.tokenize(&text, false)?));
        }
        if tokens.iter().any(|t| !t.withdrawn) {
            self.before = Some(told.role);
            self.day = if told.role == Role::User { day } else { self.day };
        }
        Ok(Told { tokens, ..told })
    }
}

/// The pieces, each with what was known of the token that stood where it begins.
fn carried(said: &[ToldToken], pieces: Vec<Piece>) -> Vec<ToldToken> {
    let (mut at, mut old) = (0, 0);
    let mut end = said[0].token.text.len();
    let carry = |Piece { id, text }: Piece| {
        while end <= at && old + 1 < said.len() {
            old += 1;
            end += said[old].token.text.len();
        }
        at += text.len();
        let ToldToken { token, dead, withdrawn } = &said[old];
        ToldToken { token: NewToken { id, text, ..token.clone() }, dead: *dead, withdrawn: *withdrawn }
    };
    pieces.into_iter().map(carry).collect()
}
