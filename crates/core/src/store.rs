//! The trait of conversation stores. `halo-store` implements it on SQLite and PostgreSQL, and
//! [`testing`](crate::testing) in memory.

use crate::change::Change;
use crate::chunk_body::{ChunkBody, checksum_bytes};
use crate::conversation_copy::TurnCopy;
use crate::error::Error;
use crate::timeline::Timeline;
use crate::token::{ChunkId, Role, TurnId};

/// When a commit survives a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// When the call returns: for the user's messages and the end of a turn.
    Immediate,
    /// At the latest with the next [`Durability::Immediate`] commit, in order: for tokens while they stream.
    Deferred,
}

/// The properties of a conversation that a store reports without loading it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConversationSummary {
    /// Identifies the conversation where its name must not be: in metrics, traces, logs, file names and proofs. It contains
    /// no word and stays when the conversation is renamed.
    pub id: String,
    /// The name of the conversation.
    pub name: String,
    /// The model whose vocabulary its tokens are of; empty before the first tokenization.
    pub model: String,
    /// When it was created, in milliseconds since 1970.
    pub created: i64,
    /// When it last changed, in milliseconds since 1970.
    pub updated: i64,
    /// How many changes were committed.
    pub changes: u64,
    /// How many turns it has.
    pub turns: u64,
    /// How many tokens it has.
    pub tokens: u64,
    /// How many of them are live.
    pub live: u64,
}

/// The [id](ConversationSummary::id) of a conversation, from the number of its row and the time of its creation. A number can
/// be used again after its conversation was erased, so it does not identify a conversation alone.
#[must_use]
pub fn conversation_id(row: u64, created: i64) -> String {
    let bytes = [row.to_le_bytes(), created.to_le_bytes()].concat();
    format!("{:012x}", checksum_bytes(&bytes) >> 16)
}

/// Setting of a conversation that was kept when it was retokenized: the [id](ConversationSummary::id) of the one with the same
/// messages that took its place.
pub const ORIGINAL_OF_KEY: &str = "original_of";

/// Why a write was refused: another process has taken over the lease of the conversation or world, and nothing was written.
/// It is the source of an error of the kind [`Busy`](crate::ErrorKind::Busy); what it was about must be opened again. See
/// [`Error::is_lease_lost`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("another process has taken over the lease")]
pub struct LeaseLost;

/// What a conversation is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading; another program may be writing.
    Read,
    /// Writing; the store takes the lease, so that no other program can write. Every write carries the epoch of the lease.
    Write,
}

/// One entry of a conversation's log.
#[derive(Clone, Debug, PartialEq)]
pub struct LogEntry {
    /// The sequence number; ascends without reuse.
    pub seq: u64,
    /// When it was committed, in milliseconds since 1970.
    pub committed_at: i64,
    /// The committed change.
    pub change: Change,
}

/// The key of the setting that names what is to be forgotten in a conversation.
pub const PENDING_FORGET_KEY: &str = "lethe.pending";

/// The kind of a record that a store keeps beside a timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RecordKind {
    /// The model's own notes, by file name.
    Note,
    /// A setting of this conversation.
    Setting,
    /// A recording of attention, by folder.
    Capture,
    /// A memory that was formed of a range.
    Memory,
    /// How a turn went, by its number.
    Turn,
    /// Messages that were set aside for others, by the number of their first turn.
    Variant,
    /// A version of the system prompt, by the number of the first turn that was said with it.
    SystemPrompt,
    /// A message that a client sent in the place of older turns, by its hash.
    ClientSummary,
    /// A response of OpenAI's Responses API, by its id: which turn it is, without its text.
    Response,
    /// What the tokens of an answer attended to, by the number of its turn: positions and shares, without text.
    Attention,
}

impl RecordKind {
    /// All of them.
    pub const ALL: [RecordKind; 10] = [
        RecordKind::Note,
        RecordKind::Setting,
        RecordKind::Capture,
        RecordKind::Memory,
        RecordKind::Turn,
        RecordKind::Variant,
        RecordKind::SystemPrompt,
        RecordKind::ClientSummary,
        RecordKind::Response,
        RecordKind::Attention,
    ];

    /// The word that stores and exports use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RecordKind::Note => "note",
            RecordKind::Setting => "setting",
            RecordKind::Capture => "capture",
            RecordKind::Memory => "memory",
            RecordKind::Turn => "turn",
            RecordKind::Variant => "variant",
            RecordKind::SystemPrompt => "system",
            RecordKind::ClientSummary => "aside",
            RecordKind::Response => "response",
            RecordKind::Attention => "attention",
        }
    }
}

/// A record that a store keeps beside a timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The key, unique within its kind.
    pub key: String,
    /// The value, in a format that the kind defines.
    pub value: String,
    /// When it was last written, in milliseconds since 1970.
    pub updated_at: i64,
}

/// The embedding of one chunk.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    /// The chunk.
    pub chunk: ChunkId,
    /// The hash of the embedded text. If the text of the chunk has another hash now, the vector is stale.
    pub text_hash: u64,
    /// The vector.
    pub vector: Vec<f32>,
}

/// The hashes of a message, by which a chat history that a client sends again is recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageKey {
    /// The turn of the message.
    pub turn: TurnId,
    /// Who wrote it.
    pub role: Role,
    /// Hash of the trimmed text.
    pub exact_hash: u64,
    /// Hash of the text without a speaker's name in front, and with white space collapsed.
    pub loose_hash: u64,
    /// Hash of the speaker's name in front of the text; 0 for none.
    pub name_hash: u64,
    /// Characters of the text that `loose_hash` is the hash of.
    pub length: u32,
    /// Hash of this message and of all messages before it.
    pub prefix_hash: u64,
}

/// A record that is written, as with [`put_record`](Store::put_record).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordChange {
    /// The kind of the record.
    pub kind: RecordKind,
    /// Its key.
    pub key: String,
    /// Its new value; none deletes it.
    pub value: Option<String>,
}

/// What the next commit of a conversation writes in its own transaction, beside the change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StagedRecords {
    /// The model whose vocabulary the tokens of the conversation are of, as with
    /// [`set_model`](Store::set_model).
    pub model: Option<String>,
    /// Kind, key and value of records, as with [`put_record`](Store::put_record).
    pub records: Vec<(RecordKind, String, String)>,
}

impl StagedRecords {
    /// Whether there is nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.model.is_none() && self.records.is_empty()
    }
}

/// Which hash a message is looked up by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageLookup {
    /// By [`MessageKey::prefix_hash`].
    Prefix(u64),
    /// By [`MessageKey::loose_hash`].
    Loose(u64),
}

/// Stores conversations.
///
/// Every method fails when the store cannot be read or written or its data is damaged. A failed method has
/// written nothing. A method that writes a conversation fails when another process has its lease, or has taken it over. The
/// error sections below list further causes.
pub trait Store {
    /// Summaries of all conversations, by name.
    ///
    /// # Errors
    /// Only those of every method.
    fn list_conversations(&mut self) -> Result<Vec<ConversationSummary>, Error>;

    /// The last committed state of a conversation, with the bodies of chunks that have live tokens. A name
    /// without a conversation gives an empty timeline.
    ///
    /// # Errors
    /// When `access` is [`Access::Write`] and another program holds the lease.
    fn load(&mut self, conversation: &str, access: Access) -> Result<Timeline, Error>;

    /// The bodies of chunks, in the order of `chunks`.
    ///
    /// # Errors
    /// When there is no such chunk.
    fn fetch_bodies(&mut self, conversation: &str, chunks: &[ChunkId]) -> Result<Vec<ChunkBody>, Error>;

    /// Writes a change. `after` is the timeline after the change; the store writes its changed rows. Called
    /// within [`Timeline::transact`], which rolls the change back if this fails.
    ///
    /// # Errors
    /// When the conversation was not loaded for writing, or another program has changed it since, or has
    /// [taken over its lease](LeaseLost).
    fn commit(
        &mut self,
        conversation: &str,
        change: &Change,
        after: &Timeline,
        durability: Durability,
    ) -> Result<(), Error>;

    /// The log entries that name a chunk, except scores, the oldest first.
    ///
    /// # Errors
    /// Only those of every method.
    fn chunk_history(&mut self, conversation: &str, chunk: ChunkId) -> Result<Vec<LogEntry>, Error>;

    /// The conversation as it was at the end of a turn, before the pruning that followed: what the model saw,
    /// and what it generated. The brightness of tokens is not restored.
    ///
    /// # Errors
    /// When there is no such turn.
    fn load_as_of(&mut self, conversation: &str, turn: TurnId) -> Result<Timeline, Error>;

    /// When each turn began, in milliseconds since 1970, in order.
    ///
    /// # Errors
    /// Only those of every method.
    fn turn_times(&mut self, conversation: &str) -> Result<Vec<(TurnId, i64)>, Error>;

    /// All records of a kind, by key.
    ///
    /// # Errors
    /// Only those of every method.
    fn records(&mut self, conversation: &str, kind: RecordKind) -> Result<Vec<Record>, Error>;

    /// The record of a kind with a key.
    ///
    /// # Errors
    /// Only those of every method.
    fn record(&mut self, conversation: &str, kind: RecordKind, key: &str) -> Result<Option<Record>, Error> {
        Ok(self.records(conversation, kind)?.into_iter().find(|record| record.key == key))
    }

    /// The conversation that has a record of a kind with a key, and the record; of several the one that was used
    /// last.
    ///
    /// # Errors
    /// Only those of every method.
    fn find_record(&mut self, kind: RecordKind, key: &str) -> Result<Option<(String, Record)>, Error> {
        let mut conversations = self.list_conversations()?;
        conversations.sort_by_key(|summary| std::cmp::Reverse(summary.updated));
        for summary in conversations {
            if let Some(record) = self.record(&summary.name, kind, key)? {
                return Ok(Some((summary.name, record)));
            }
        }
        Ok(None)
    }

    /// The records of a kind with a key, with the names of their conversations.
    ///
    /// # Errors
    /// Only those of every method.
    fn records_with_key(&mut self, kind: RecordKind, key: &str) -> Result<Vec<(String, Record)>, Error> {
        let mut found = Vec::new();
        for summary in self.list_conversations()? {
            found.extend(self.record(&summary.name, kind, key)?.map(|record| (summary.name, record)));
        }
        Ok(found)
    }

    /// Writes a record, replacing that with the same key; without a value, deletes it.
    ///
    /// # Errors
    /// Only those of every method.
    fn put_record(
        &mut self,
        conversation: &str,
        kind: RecordKind,
        key: &str,
        value: Option<&str>,
    ) -> Result<(), Error>;

    /// All embeddings of an embedder, by chunk.
    ///
    /// # Errors
    /// Only those of every method.
    fn embeddings(&mut self, conversation: &str, embedder: &str) -> Result<Vec<Embedding>, Error>;

    /// Writes embeddings, replacing those of the same chunks; an empty vector deletes one.
    ///
    /// # Errors
    /// Only those of every method.
    fn put_embeddings(
        &mut self,
        conversation: &str,
        embedder: &str,
        embeddings: &[Embedding],
    ) -> Result<(), Error>;

    /// Records which model's vocabulary the tokens of the conversation are of.
    ///
    /// # Errors
    /// Only those of every method.
    fn set_model(&mut self, conversation: &str, model: &str) -> Result<(), Error>;

    /// Copies the conversation `from` as `to`, with tokens of `model`. `convert` gets each message and returns
    /// it as the copy should have it; the copy ends at the first message for which it returns none. Records
    /// that fit the copy are copied too. `from` is unchanged.
    ///
    /// # Errors
    /// When there is a conversation `to`, or `convert` fails.
    fn copy_conversation(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
    ) -> Result<(), Error> {
        self.copy_with_records(from, to, model, convert, &mut Vec::new)
    }

    /// Copies a conversation as [`copy_conversation`](Self::copy_conversation) does, with changes to the records of
    /// the copy. `records` is called when all messages are converted. All of it is one transaction.
    ///
    /// # Errors
    /// Those of [`copy_conversation`](Self::copy_conversation).
    fn copy_with_records(
        &mut self,
        from: &str,
        to: &str,
        model: &str,
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
        records: &mut dyn FnMut() -> Vec<RecordChange>,
    ) -> Result<(), Error>;

    /// Replaces a conversation by a copy with tokens of `model`, as
    /// [`copy_conversation`](Self::copy_conversation) makes it, and settings of its own. The original is
    /// kept as `kept_as`. All of it is one transaction.
    ///
    /// # Errors
    /// When there is a conversation `kept_as`, or `convert` fails.
    fn replace_by_copy(
        &mut self,
        conversation: &str,
        kept_as: &str,
        model: &str,
        settings: &[(&str, &str)],
        convert: &mut dyn FnMut(TurnCopy) -> Result<Option<TurnCopy>, Error>,
    ) -> Result<(), Error>;

    /// Records that the next commit of the conversation writes in its own transaction. They replace those
    /// that are staged already; a commit that fails discards them.
    fn stage_records(&mut self, conversation: &str, staged: StagedRecords);

    /// Renames a conversation.
    ///
    /// # Errors
    /// When there is a conversation `to`.
    fn rename(&mut self, from: &str, to: &str) -> Result<(), Error>;

    /// The summary of one conversation.
    ///
    /// # Errors
    /// Only those of every method.
    fn find_conversation(&mut self, conversation: &str) -> Result<Option<ConversationSummary>, Error> {
        Ok(self.list_conversations()?.into_iter().find(|summary| summary.name == conversation))
    }

    /// The message keys of the last `last` turns that have one, by turn.
    ///
    /// # Errors
    /// Only those of every method.
    fn message_keys(&mut self, conversation: &str, last: usize) -> Result<Vec<MessageKey>, Error>;

    /// Writes message keys, replacing those of the same turns.
    ///
    /// # Errors
    /// Only those of every method.
    fn put_message_keys(&mut self, conversation: &str, keys: &[MessageKey]) -> Result<(), Error>;

    /// Conversations and turns with a message, at most `limit`, the newest conversations first.
    ///
    /// # Errors
    /// Only those of every method.
    fn find_messages(&mut self, lookup: MessageLookup, limit: usize) -> Result<Vec<(String, TurnId)>, Error>;

    /// Releases the lease, so that another program can write the conversation.
    /// [`reacquire_lease`](Self::reacquire_lease) takes it again.
    fn release_lease(&mut self, conversation: &str) {
        let _ = conversation;
    }

    /// The process that holds the lease of a conversation, 0 where its number is unknown; none where nothing holds it but this
    /// store.
    ///
    /// # Errors
    /// Only those of every method.
    fn lease_holder(&mut self, conversation: &str) -> Result<Option<u32>, Error> {
        let _ = conversation;
        Ok(None)
    }

    /// Takes the lease again. Returns false, and takes nothing, where another program has changed the
    /// conversation since `revision`: then it must be loaded again.
    ///
    /// # Errors
    /// Those of [`load`](Self::load).
    fn reacquire_lease(&mut self, conversation: &str, revision: u64) -> Result<bool, Error> {
        let _ = (conversation, revision);
        Ok(true)
    }

    /// Applies and commits changes, each with its own log entry: all of them or none.
    ///
    /// # Errors
    /// Those of [`transact`](Self::transact).
    fn transact_all(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        changes: &[Change],
    ) -> Result<(), Error>;

    /// Loads the bodies of chunks into a timeline.
    ///
    /// # Errors
    /// When a body does not fit the timeline: it is damaged, or another program has changed the conversation.
    fn load_bodies(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        chunks: &[ChunkId],
    ) -> Result<(), Error> {
        if chunks.is_empty() {
            return Ok(());
        }
        let bodies = self.fetch_bodies(conversation, chunks)?;
        for (&chunk, body) in chunks.iter().zip(bodies) {
            timeline.insert_body(chunk, body).map_err(|error| {
                let message =
                    format!("{error}; if another program has changed it, open the conversation again");
                Error::damaged(format!("loading {chunk} of '{conversation}'"), message).with_source(error)
            })?;
        }
        Ok(())
    }

    /// Applies and commits a change, or neither. Loads the bodies that the change needs. Returns the inverse.
    ///
    /// # Errors
    /// When the change does not fit the timeline.
    fn transact(
        &mut self,
        conversation: &str,
        timeline: &mut Timeline,
        change: &Change,
        durability: Durability,
    ) -> Result<Change, Error> {
        let missing = timeline.missing_bodies(change);
        self.load_bodies(conversation, timeline, &missing)?;
        timeline.transact(change, |after| self.commit(conversation, change, after, durability))
    }
}

/// A store that can also erase text permanently: from the log, the search index and all derived rows.
pub trait EraseStore: Store {
    /// Erases the text of chunks, and memories by their keys: all of them, or on an error none. The positions stay, so that
    /// nothing else moves.
    ///
    /// # Errors
    /// Also when there is no such chunk, or somebody else is writing the conversation.
    fn erase_chunks(
        &mut self,
        conversation: &str,
        chunks: &[ChunkId],
        memory_keys: &[String],
    ) -> Result<(), Error>;

    /// Erases a whole conversation, including its name.
    ///
    /// # Errors
    /// Also when there is no such conversation, or somebody else is writing it.
    fn erase_conversation(&mut self, conversation: &str) -> Result<(), Error>;
}
