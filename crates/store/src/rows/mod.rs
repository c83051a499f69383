//! Row access: how each table is written and read. When rows are written is decided by the callers.

mod columns;
mod conversations;
mod embeddings;
mod log;
mod records;
mod state;
mod vector_bytes;

pub(crate) use columns::{
    chunk_id_values, now_ms, read_chunk_id, role_value, row_index, row_key, row_key_range,
};
pub(crate) use conversations::{
    conversation_seq, create_conversation, creation_time, find_conversation_id, no_such_conversation,
    rename_conversation, set_last_used, set_model,
};
pub(crate) use embeddings::{embedders, for_each_embedding, put_embedding};
pub(crate) use log::{
    add_turn_starts, fill_log_turns, for_each_log_entry, insert_continuation, insert_log_entry,
    insert_mentions, insert_rebuilt_log, last_log_seq, last_mentions, last_score_entry, read_log_entry,
    rebuild_log_indexes, replay_log, replay_log_through_turn, rewrite_log_entry, turn_starts,
};
pub(crate) use records::{
    find_record, insert_record, put_record, read_record, record, record_kinds, records, records_with_key,
};
pub(crate) use state::{
    decode_body, read_state, update_bodies, upsert_blocks, upsert_bodies, write_whole_state,
};
