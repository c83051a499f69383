//! Blocks: the headers of 128 chunks and of the turns that begin among them, packed into one or two kilobytes.
//!
//! Ten million tokens are about 150,000 chunks. Reading a row for each would take longer than everything else that
//! opening a conversation does; packed headers are read in a few milliseconds.

use halo_core::chunk_body::{ChunkBody, read_varint, write_varint};
use halo_core::timeline::{Timeline, Turn};
use halo_core::timeline_builder::{PackedChunkHeader, TimelineBuilder};
use halo_core::token::{Role, TurnId};
use std::ops::Range;

pub(crate) const CHUNKS_PER_BLOCK: usize = 128;

const PINNED: u8 = 1;
/// All tokens are live. Without this flag and the next, none is.
const LIVE: u8 = 2;
const SOME_LIVE: u8 = 4;
const DELETED: u8 = 8;
const SOME_DELETED: u8 = 16;

/// The rows of the chunks of a block.
fn chunk_range(block: usize, end: usize) -> Range<usize> {
    (block * CHUNKS_PER_BLOCK).min(end)..((block + 1) * CHUNKS_PER_BLOCK).min(end)
}

/// How many blocks the chunks and turns of a timeline fill.
pub(crate) fn block_count(timeline: &Timeline) -> usize {
    // The first row of an empty last turn is one after the last chunk.
    let last_turn = timeline.turns().last().map_or(0, |t| t.first_row as usize + 1);
    timeline.row_count().max(last_turn).div_ceil(CHUNKS_PER_BLOCK)
}

pub(crate) fn encode(timeline: &Timeline, block: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(2048);
    let (start, rows) = (block * CHUNKS_PER_BLOCK, chunk_range(block, timeline.row_count()));
    let all_turns = timeline.turns();
    let turns_before = |row: usize| all_turns.partition_point(|t| (t.first_row as usize) < row);
    let turns = turns_before(start)..turns_before(start + CHUNKS_PER_BLOCK);
    write_varint(&mut out, turns.len() as u64);
    for turn in &all_turns[turns] {
        write_varint(&mut out, u64::from(turn.id.0));
        out.push(turn.role.letter() as u8);
        write_varint(&mut out, (turn.first_row as usize - start) as u64);
    }
    write_varint(&mut out, rows.len() as u64);
    for header in timeline.chunk_headers(rows) {
        let flag = |count: u32, all: u8, some: u8| match count {
            0 => 0,
            n if n == header.len => all,
            _ => some,
        };
        let flags = (u8::from(header.pinned) * PINNED)
            | flag(header.live, LIVE, SOME_LIVE)
            | flag(header.deleted, DELETED, SOME_DELETED);
        out.push(flags);
        write_varint(&mut out, u64::from(header.id.index));
        write_varint(&mut out, u64::from(header.len));
        if flags & SOME_LIVE != 0 {
            write_varint(&mut out, u64::from(header.live));
        }
        if flags & SOME_DELETED != 0 {
            write_varint(&mut out, u64::from(header.deleted));
        }
        if let Some(checksum) = header.checksum.filter(|_| header.len > 0) {
            out.extend_from_slice(&checksum.to_le_bytes());
        }
    }
    out
}

/// Adds the next block of a conversation; none where its bytes are invalid or do not fit the blocks before it.
pub(crate) fn decode(bytes: &[u8], builder: &mut TimelineBuilder) -> Option<()> {
    let mut input = bytes;
    let read_u32 = |input: &mut &[u8]| u32::try_from(read_varint(input)?).ok();
    let start = u32::try_from(builder.row_count()).ok()?;
    // Every block but the last is full.
    if !start.is_multiple_of(CHUNKS_PER_BLOCK as u32) {
        return None;
    }
    for _ in 0..read_u32(&mut input)? {
        let id = TurnId(read_u32(&mut input)?);
        let role = Role::from_letter(char::from(*input.split_off_first()?))?;
        let first_row = start.checked_add(read_u32(&mut input)?)?;
        builder.push_turn(Turn { id, role, first_row }).ok()?;
    }
    for _ in 0..read_u32(&mut input)? {
        let flags = *input.split_off_first()?;
        let index = read_u32(&mut input)?;
        let len = read_u32(&mut input)?;
        let mut count = |all: u8, some: u8| match flags & (all | some) {
            0 => Some(0),
            set if set == all => Some(len),
            _ => read_u32(&mut input),
        };
        let (live, deleted) = (count(LIVE, SOME_LIVE)?, count(DELETED, SOME_DELETED)?);
        let checksum = match (live, len) {
            (_, 0) => ChunkBody::default().checksum(),
            (0, _) => u64::from_le_bytes(input.split_off(..8)?.try_into().ok()?),
            _ => 0,
        };
        let pinned = flags & PINNED != 0;
        builder.push_chunk(&PackedChunkHeader { index, pinned, len, live, deleted, checksum }).ok()?;
    }
    input.is_empty().then_some(())
}
