//! The tokens of one chunk, in columns, and their binary form.
//!
//! The row of a chunk (id, position, counts) stays in memory. The body of a chunk without live tokens may be
//! unloaded; the row then keeps the checksum of the body, so that two timelines can be compared whichever
//! bodies each has loaded.

use crate::change::{AttentionTally, NewToken};
use crate::token::{Brightness, TokenFlags, TokenId};
use std::borrow::Cow;
use std::ops::Range;

/// The tokens of a chunk and its attention tally.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChunkBody {
    pub(crate) ids: Vec<TokenId>,
    pub(crate) brightness: Vec<Brightness>,
    pub(crate) flags: Vec<TokenFlags>,
    /// The end of each token's text in `text`, in bytes.
    pub(crate) ends: Vec<u32>,
    pub(crate) text: String,
    pub(crate) tally: AttentionTally,
}

/// Why bytes are not the binary form of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ChunkBodyError(&'static str);

impl ChunkBody {
    /// The body of a chunk with these tokens, all of them pruned or not and deleted or not.
    #[must_use]
    pub fn from_tokens(tokens: impl IntoIterator<Item = NewToken>, pruned: bool, deleted: bool) -> Self {
        let mut body = Self::default();
        tokens.into_iter().for_each(|token| body.push(&token));
        body.flags
            .iter_mut()
            .for_each(|f| *f = f.with(TokenFlags::PRUNED, pruned).with(TokenFlags::DELETED, deleted));
        body
    }

    /// How many tokens it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether it has no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// How many of its tokens are live, and how many are deleted.
    #[must_use]
    pub fn live_and_deleted(&self) -> (u32, u32) {
        let live = self.flags.iter().filter(|f| f.is_live()).count() as u32;
        (live, self.flags.iter().filter(|f| f.contains(TokenFlags::DELETED)).count() as u32)
    }

    /// Its text without deleted tokens and without chat template tokens.
    #[must_use]
    pub fn message_text(&self) -> Cow<'_, str> {
        let excluded = |f: &TokenFlags| f.contains(TokenFlags::DELETED) || f.contains(TokenFlags::TEMPLATE);
        if !self.flags.iter().any(excluded) {
            return self.text.as_str().into();
        }
        let included = (0..self.len()).filter(|&n| !excluded(&self.flags[n]));
        included.map(|n| self.text(n..n + 1)).collect()
    }

    /// The text of a range of its tokens.
    pub(crate) fn text(&self, tokens: Range<usize>) -> &str {
        let end = |n: usize| n.checked_sub(1).map_or(0, |last| self.ends[last] as usize);
        &self.text[end(tokens.start)..end(tokens.end)]
    }

    pub(crate) fn push(&mut self, token: &NewToken) {
        self.ids.push(token.id);
        self.brightness.push(token.brightness);
        self.flags.push(token.kind.flags());
        self.text.push_str(&token.text);
        self.ends.push(self.text.len() as u32);
    }

    /// Keeps only the first `len` tokens.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.text.truncate(len.checked_sub(1).map_or(0, |last| self.ends[last] as usize));
        self.ids.truncate(len);
        self.brightness.truncate(len);
        self.flags.truncate(len);
        self.ends.truncate(len);
    }

    /// Removes and returns the tokens from `at` on. The tally stays.
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
            tally: AttentionTally::default(),
        }
    }

    /// Adds the tokens of `other` at the end. The tally stays as it is.
    pub(crate) fn append(&mut self, other: &Self) {
        let text_len = self.text.len() as u32;
        self.ids.extend_from_slice(&other.ids);
        self.brightness.extend_from_slice(&other.brightness);
        self.flags.extend_from_slice(&other.flags);
        self.ends.extend(other.ends.iter().map(|end| end + text_len));
        self.text.push_str(&other.text);
    }

    /// Its memory in bytes: ids and text, and everything else.
    pub(crate) fn memory_bytes(&self) -> (usize, usize) {
        let content = self.ids.capacity() * size_of::<TokenId>() + self.text.capacity();
        let columns = self.brightness.capacity() * size_of::<Brightness>()
            + self.flags.capacity() * size_of::<TokenFlags>()
            + self.ends.capacity() * size_of::<u32>();
        (content, columns + size_of::<Self>())
    }

    /// Appends the binary form to `out`. Stores write it and checksums are computed of it, so it must not
    /// change.
    ///
    /// Column by column: token count, tally (votes, mass, exposures), ids, brightness, flags, text lengths,
    /// text. Numbers are little-endian; the count and the lengths are varints.
    pub fn encode(&self, out: &mut Vec<u8>) {
        write_varint(out, self.len() as u64);
        for n in [self.tally.votes, self.tally.mass, self.tally.exposures] {
            out.extend_from_slice(&n.to_le_bytes());
        }
        self.ids.iter().for_each(|id| out.extend_from_slice(&id.0.to_le_bytes()));
        // Adding 0.0 turns -0.0 into 0.0: equal values have equal bytes.
        self.brightness.iter().for_each(|b| out.extend_from_slice(&(b.0 + 0.0).to_bits().to_le_bytes()));
        out.extend(self.flags.iter().map(|f| f.bits()));
        let mut start = 0;
        for &end in &self.ends {
            write_varint(out, u64::from(end - start));
            start = end;
        }
        out.extend_from_slice(self.text.as_bytes());
    }

    /// Reads the form that [`encode`](Self::encode) writes.
    ///
    /// # Errors
    /// When the bytes are anything else. Every length and value is checked before it is used.
    pub fn decode(bytes: &[u8]) -> Result<Self, ChunkBodyError> {
        let mut input = bytes;
        let short = || ChunkBodyError("the bytes end too early");
        let len = usize::try_from(read_varint(&mut input).ok_or_else(short)?).map_err(|_| short())?;
        // Every token takes at least ten bytes; a larger count would only make the allocations below fail.
        if len.checked_mul(10).is_none_or(|min_bytes| min_bytes > input.len()) {
            return Err(short());
        }
        let mut word = || take_array::<8>(&mut input).map(u64::from_le_bytes).ok_or_else(short);
        let tally = AttentionTally { votes: word()?, mass: word()?, exposures: word()? };
        let mut column = |width: usize| input.split_off(..len * width).ok_or_else(short);
        let ids = four_byte_groups(column(4)?).map(|b| TokenId(u32::from_le_bytes(b))).collect();
        let brightness: Vec<_> =
            four_byte_groups(column(4)?).map(|b| Brightness(f32::from_bits(u32::from_le_bytes(b)))).collect();
        if brightness.iter().any(|b| !b.0.is_finite()) {
            return Err(ChunkBodyError("a brightness is not finite"));
        }
        let flags: Option<_> = column(1)?.iter().map(|&b| TokenFlags::from_bits(b)).collect();
        let flags = flags.ok_or(ChunkBodyError("a token has unknown flags"))?;
        let (mut ends, mut end) = (Vec::with_capacity(len), 0u64);
        for _ in 0..len {
            end = end.checked_add(read_varint(&mut input).ok_or_else(short)?).ok_or_else(short)?;
            ends.push(u32::try_from(end).map_err(|_| short())?);
        }
        if end != input.len() as u64 {
            return Err(ChunkBodyError("the text is not as long as its tokens"));
        }
        let text = str::from_utf8(input).map_err(|_| ChunkBodyError("the text is not UTF-8"))?.to_owned();
        if ends.iter().any(|&end| !text.is_char_boundary(end as usize)) {
            return Err(ChunkBodyError("a token ends within a character"));
        }
        Ok(Self { ids, brightness, flags, ends, text, tally })
    }

    /// The checksum of the binary form. It is the same on every machine and in every later version.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        let mut bytes = Vec::with_capacity(32 + self.len() * 12 + self.text.len());
        self.encode(&mut bytes);
        checksum_bytes(&bytes)
    }
}

/// The checksum of a body in its binary form (XXH3, 64 bits).
#[must_use]
pub fn checksum_bytes(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// Appends a number in groups of seven bits, the lowest first (LEB128).
pub fn write_varint(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// Removes a number in groups of seven bits from the front of `input`; none where it is cut off, too large or
/// longer than necessary.
pub fn read_varint(input: &mut &[u8]) -> Option<u64> {
    let mut n = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = *input.split_off_first()?;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return None;
        }
        n |= bits << shift;
        if byte < 0x80 {
            // A number has only one form, so that equal bodies have equal bytes: no trailing zero groups.
            return (byte != 0 || shift == 0).then_some(n);
        }
    }
    None
}

fn take_array<const N: usize>(input: &mut &[u8]) -> Option<[u8; N]> {
    input.split_off(..N)?.try_into().ok()
}

fn four_byte_groups(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    bytes.as_chunks::<4>().0.iter().copied()
}
