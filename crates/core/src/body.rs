//! The tokens of one chunk, in columns, and the bytes that they are kept and compared by.
//!
//! A chunk's place on the timeline, its name and its counts stay in memory for ever; its body may be away, in a
//! store, while none of its tokens is live. What is away is known by its sum, so that two timelines can be
//! compared whatever each of them holds in memory.

use crate::change::{NewToken, Tally};
use crate::token::{Brightness, Flags, TokenId};
use std::borrow::Cow;
use std::ops::Range;

/// The tokens of a chunk, and what it has gathered in its life.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Body {
    pub(crate) ids: Vec<TokenId>,
    pub(crate) brightness: Vec<Brightness>,
    pub(crate) flags: Vec<Flags>,
    /// Where each token's text ends in `text`.
    pub(crate) ends: Vec<u32>,
    pub(crate) text: String,
    pub(crate) tally: Tally,
}

/// Why bytes are not a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadBody(&'static str);

impl Body {
    /// The body of a chunk in which these were said, and which is live, dead or taken back as a whole.
    #[must_use]
    pub fn said(tokens: impl IntoIterator<Item = NewToken>, dead: bool, gone: bool) -> Self {
        let mut body = Self::default();
        tokens.into_iter().for_each(|token| body.push(&token));
        body.flags.iter_mut().for_each(|f| *f = f.with(Flags::DEAD, dead).with(Flags::WITHDRAWN, gone));
        body
    }

    /// How many tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// How many of its tokens are live, and how many withdrawn.
    #[must_use]
    pub fn counts(&self) -> (u32, u32) {
        let live = self.flags.iter().filter(|f| f.is_live()).count() as u32;
        (live, self.flags.iter().filter(|f| f.has(Flags::WITHDRAWN)).count() as u32)
    }

    /// What it says: its text without what the user took back, and without what only frames it for the model.
    #[must_use]
    pub fn said_text(&self) -> Cow<'_, str> {
        let left_out = |f: &Flags| f.has(Flags::WITHDRAWN) || f.has(Flags::FRAME);
        if !self.flags.iter().any(left_out) {
            return self.text.as_str().into();
        }
        let kept = (0..self.len()).filter(|&n| !left_out(&self.flags[n]));
        kept.map(|n| self.text(n..n + 1)).collect()
    }

    /// The text of some of its tokens.
    pub(crate) fn text(&self, tokens: Range<usize>) -> &str {
        let end = |n: usize| n.checked_sub(1).map_or(0, |last| self.ends[last] as usize);
        &self.text[end(tokens.start)..end(tokens.end)]
    }

    pub(crate) fn push(&mut self, token: &NewToken) {
        self.ids.push(token.id);
        self.brightness.push(token.brightness);
        self.flags.push(token.voice.flags());
        self.text.push_str(&token.text);
        self.ends.push(self.text.len() as u32);
    }

    /// Only the first `len` tokens are left.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.text.truncate(len.checked_sub(1).map_or(0, |last| self.ends[last] as usize));
        self.ids.truncate(len);
        self.brightness.truncate(len);
        self.flags.truncate(len);
        self.ends.truncate(len);
    }

    /// Takes the tokens from `at` on away. The tally stays.
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        let text_at = at.checked_sub(1).map_or(0, |last| self.ends[last]);
        let mut ends = self.ends.split_off(at);
        ends.iter_mut().for_each(|end| *end -= text_at);
        Self {
            ids: self.ids.split_off(at),
            brightness: self.brightness.split_off(at),
            flags: self.flags.split_off(at),
            ends,
            text: self.text.split_off(text_at as usize),
            tally: Tally::default(),
        }
    }

    /// Takes another's tokens behind its own. The tally stays.
    pub(crate) fn join(&mut self, other: &Self) {
        let text = self.text.len() as u32;
        self.ids.extend_from_slice(&other.ids);
        self.brightness.extend_from_slice(&other.brightness);
        self.flags.extend_from_slice(&other.flags);
        self.ends.extend(other.ends.iter().map(|end| end + text));
        self.text.push_str(&other.text);
    }

    /// Bytes in memory: ids and text, and the rest.
    pub(crate) fn memory(&self) -> (usize, usize) {
        let content = self.ids.capacity() * size_of::<TokenId>() + self.text.capacity();
        let columns = self.brightness.capacity() * size_of::<Brightness>()
            + self.flags.capacity() * size_of::<Flags>()
            + self.ends.capacity() * size_of::<u32>();
        (content, columns + size_of::<Self>())
    }

    /// Writes the body behind `out`: the one form in which it is stored and summed. Whole columns lie one after
    /// the other: count, tally, ids, brightness, flags, lengths of the texts, text; numbers little-endian, the
    /// count and the lengths in groups of seven bits.
    pub fn write(&self, out: &mut Vec<u8>) {
        put_varint(out, self.len() as u64);
        for n in [self.tally.votes, self.tally.mass, self.tally.looks] {
            out.extend_from_slice(&n.to_le_bytes());
        }
        self.ids.iter().for_each(|id| out.extend_from_slice(&id.0.to_le_bytes()));
        // Minus zero is zero.
        self.brightness.iter().for_each(|b| out.extend_from_slice(&(b.0 + 0.0).to_bits().to_le_bytes()));
        out.extend(self.flags.iter().map(|f| f.bits()));
        let mut start = 0;
        for &end in &self.ends {
            put_varint(out, u64::from(end - start));
            start = end;
        }
        out.extend_from_slice(self.text.as_bytes());
    }

    /// Reads what [`Body::write`] wrote.
    ///
    /// # Errors
    /// When the bytes are anything else: no bytes are trusted.
    pub fn read(bytes: &[u8]) -> Result<Self, BadBody> {
        let mut input = bytes;
        let short = || BadBody("it ends too early");
        let len = usize::try_from(take_varint(&mut input).ok_or_else(short)?).map_err(|_| short())?;
        // Every token has at least ten bytes: no length is believed that the bytes do not bear.
        if len.checked_mul(10).is_none_or(|least| least > input.len()) {
            return Err(short());
        }
        let mut word = || take::<8>(&mut input).map(u64::from_le_bytes).ok_or_else(short);
        let tally = Tally { votes: word()?, mass: word()?, looks: word()? };
        let mut column = |width: usize| input.split_off(..len * width).ok_or_else(short);
        let ids = quads(column(4)?).map(|b| TokenId(u32::from_le_bytes(b))).collect();
        let brightness: Vec<_> =
            quads(column(4)?).map(|b| Brightness(f32::from_bits(u32::from_le_bytes(b)))).collect();
        if brightness.iter().any(|b| !b.0.is_finite()) {
            return Err(BadBody("a brightness in it is no number"));
        }
        let flags: Option<_> = column(1)?.iter().map(|&b| Flags::from_bits(b)).collect();
        let flags = flags.ok_or(BadBody("a flag in it means nothing"))?;
        let (mut ends, mut end) = (Vec::with_capacity(len), 0u64);
        for _ in 0..len {
            end = end.checked_add(take_varint(&mut input).ok_or_else(short)?).ok_or_else(short)?;
            ends.push(u32::try_from(end).map_err(|_| short())?);
        }
        if end != input.len() as u64 {
            return Err(BadBody("its text is not as long as its tokens say"));
        }
        let text = str::from_utf8(input).map_err(|_| BadBody("its text is not UTF-8"))?.to_owned();
        if ends.iter().any(|&end| !text.is_char_boundary(end as usize)) {
            return Err(BadBody("a token in it ends within a character"));
        }
        Ok(Self { ids, brightness, flags, ends, text, tally })
    }

    /// What is known of a body that is away: two that differ have, as far as anyone will ever see, different
    /// sums. The same on every machine and in every later version.
    #[must_use]
    pub fn sum(&self) -> u64 {
        let mut bytes = Vec::with_capacity(32 + self.len() * 12 + self.text.len());
        self.write(&mut bytes);
        sum_of(&bytes)
    }
}

/// The sum of a body's bytes.
#[must_use]
pub fn sum_of(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// Writes a number in groups of seven bits, the lowest first.
pub fn put_varint(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// Takes such a number off the front; nothing where there is none.
pub fn take_varint(input: &mut &[u8]) -> Option<u64> {
    let mut n = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = *input.split_off_first()?;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return None;
        }
        n |= bits << shift;
        if byte < 0x80 {
            // One number has one form: no zeros behind its end.
            return (byte != 0 || shift == 0).then_some(n);
        }
    }
    None
}

fn take<const N: usize>(input: &mut &[u8]) -> Option<[u8; N]> {
    input.split_off(..N)?.try_into().ok()
}

fn quads(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    bytes.as_chunks::<4>().0.iter().copied()
}
