//! What is known of 128 chunks beside their tokens, and of the turns that begin among them, in a kilobyte or two.
//!
//! Ten million tokens are some 150,000 chunks: a row for each would take longer to read than all the rest of
//! opening a conversation. Packed, they are read in a millisecond or two.

use halo_core::chunk_body::{ChunkBody, read_varint, write_varint};
use halo_core::timeline::{Timeline, Turn};
use halo_core::timeline_builder::{PackedChunkHeader, TimelineBuilder};
use halo_core::token::{Role, TurnId};
use std::ops::Range;

/// Chunks in a block.
pub(crate) const CHUNKS_PER_BLOCK: usize = 128;

const PINNED: u8 = 1;
/// All of it is live, or, where this is not set and the next neither, none of it.
const LIVE: u8 = 2;
const SOME_LIVE: u8 = 4;
const DELETED: u8 = 8;
const SOME_DELETED: u8 = 16;

/// The places of a block's chunks.
fn chunk_range(block: usize, end: usize) -> Range<usize> {
    (block * CHUNKS_PER_BLOCK).min(end)..((block + 1) * CHUNKS_PER_BLOCK).min(end)
}

/// The blocks that hold anything, of a list of chunks and turns that is so long.
pub(crate) fn block_count(timeline: &Timeline) -> usize {
    // A turn in which nothing was said yet stands one behind the last chunk.
    let last_turn = timeline.turns().last().map_or(0, |t| t.first_row as usize + 1);
    timeline.row_count().max(last_turn).div_ceil(CHUNKS_PER_BLOCK)
}

pub(crate) fn encode(timeline: &Timeline, block: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(2048);
    let (start, places) = (block * CHUNKS_PER_BLOCK, chunk_range(block, timeline.row_count()));
    let all = timeline.turns();
    let turns = all.partition_point(|t| (t.first_row as usize) < start)
        ..all.partition_point(|t| (t.first_row as usize) < start + CHUNKS_PER_BLOCK);
    write_varint(&mut out, turns.len() as u64);
    for turn in &all[turns] {
        write_varint(&mut out, u64::from(turn.id.0));
        out.push(turn.role.letter() as u8);
        write_varint(&mut out, (turn.first_row as usize - start) as u64);
    }
    write_varint(&mut out, places.len() as u64);
    for head in timeline.chunk_headers(places) {
        let share = |n: u32, all: u8, some: u8| match n {
            0 => 0,
            n if n == head.len => all,
            _ => some,
        };
        let flags = (u8::from(head.pinned) * PINNED)
            | share(head.live, LIVE, SOME_LIVE)
            | share(head.deleted, DELETED, SOME_DELETED);
        out.push(flags);
        write_varint(&mut out, u64::from(head.id.index));
        write_varint(&mut out, u64::from(head.len));
        if flags & SOME_LIVE != 0 {
            write_varint(&mut out, u64::from(head.live));
        }
        if flags & SOME_DELETED != 0 {
            write_varint(&mut out, u64::from(head.deleted));
        }
        if let Some(sum) = head.checksum.filter(|_| head.len > 0) {
            out.extend_from_slice(&sum.to_le_bytes());
        }
    }
    out
}

/// Takes the next block of a conversation; nothing where it cannot be one, or does not fit those before it.
pub(crate) fn decode(bytes: &[u8], parts: &mut TimelineBuilder) -> Option<()> {
    let mut input = bytes;
    let small = |input: &mut &[u8]| u32::try_from(read_varint(input)?).ok();
    let start = u32::try_from(parts.row_count()).ok()?;
    // All blocks but the last are full.
    if !start.is_multiple_of(CHUNKS_PER_BLOCK as u32) {
        return None;
    }
    for _ in 0..small(&mut input)? {
        let id = TurnId(small(&mut input)?);
        let role = Role::from_letter(char::from(*input.split_off_first()?))?;
        let first = start.checked_add(small(&mut input)?)?;
        parts.push_turn(Turn { id, role, first_row: first }).ok()?;
    }
    for _ in 0..small(&mut input)? {
        let flags = *input.split_off_first()?;
        let sentence = small(&mut input)?;
        let len = small(&mut input)?;
        let mut share = |all: u8, some: u8| match flags & (all | some) {
            0 => Some(0),
            set if set == all => Some(len),
            _ => small(&mut input),
        };
        let (live, withdrawn) = (share(LIVE, SOME_LIVE)?, share(DELETED, SOME_DELETED)?);
        let sum = match (live, len) {
            (_, 0) => ChunkBody::default().checksum(),
            (0, _) => u64::from_le_bytes(input.split_off(..8)?.try_into().ok()?),
            _ => 0,
        };
        let pinned = flags & PINNED != 0;
        parts
            .push_chunk(&PackedChunkHeader {
                index: sentence,
                pinned,
                len,
                live,
                deleted: withdrawn,
                checksum: sum,
            })
            .ok()?;
    }
    input.is_empty().then_some(())
}
