//! The grace period: text is hidden at once, erased at the end, and until then it can be cancelled.

use super::backend::ForgetBackend;
use super::erase::{ErasedText, erase_now};
use super::pending::{PendingForget, cancel_pending, load_pending, remove_from_pending, save_pending};
use super::scheduled_report::ScheduledForgetReport;
use super::target::{
    ForgetItems, ForgetRequest, ForgetScope, ForgetSelection, ForgetTarget, has_any_chunk, load_existing,
    no_such_conversation, still_hidden,
};
use crate::conversation::Conversation;
use crate::memory::record::{Memory, load_all_memories, set_pending_forget};
use halo_core::Error;
use halo_core::change::{Change, ChunkSelection, DeleteReason, Extent};
use halo_core::store::{Access, Durability, Store};
use halo_core::token::ChunkId;

/// What is hidden in one conversation until its grace period ends.
#[derive(Clone, Debug)]
pub struct PendingForgetItem {
    pub conversation: String,
    /// The end of the grace period, in milliseconds since 1970.
    pub due_at: i64,
    pub chunks: Vec<(ChunkId, String)>,
    pub memories: Vec<u64>,
    /// How many texts beside the timeline are erased then, the name of the conversation among them. These are not hidden.
    pub other_texts: usize,
    pub whole_conversation: bool,
}

/// How much is kept after a cancellation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CancelledForget {
    pub chunks: usize,
    pub memories: usize,
}

/// A conversation that must exist, open for changes.
fn open_for_write(backend: &dyn ForgetBackend, name: &str) -> Result<Conversation, Error> {
    let mut store = backend.open_writer()?;
    if store.find_conversation(name)?.is_none() {
        return Err(no_such_conversation(name));
    }
    Conversation::open(store, name, Access::Write)
}

/// Hides a target now, to be erased when it is due.
pub(super) fn schedule(backend: &dyn ForgetBackend, target: &ForgetTarget, due_at: i64) -> Result<(), Error> {
    let mut conversation = open_for_write(backend, &target.conversation)?;
    let whole_conversation = target.is_whole_conversation();
    let (store, name, timeline) = conversation.body_loader();
    let items = target.resolve(store, timeline)?;
    let ids = |memories: &[Memory]| memories.iter().map(|memory| memory.id).collect::<Vec<u64>>();
    let (mut chunks, mut memories, mut named_memories) =
        (items.chunks, ids(&items.derived_memories), ids(&items.matched_memories));
    let before = load_pending(store, name)?;
    if !whole_conversation {
        // What is pending already keeps its earlier date.
        chunks.retain(|id| !before.iter().any(|entry| entry.chunks.contains(id)));
        let is_pending = |id: &u64| before.iter().any(|entry| entry.all_memories().contains(id));
        memories.retain(|id| !is_pending(id));
        named_memories.retain(|id| !is_pending(id));
    }
    let is_visible = |id: &ChunkId| timeline.chunk(*id).is_some_and(|chunk| !chunk.is_deleted());
    let visible: Vec<ChunkId> = chunks.iter().copied().filter(is_visible).collect();
    let hidden_before: Vec<ChunkId> = before.iter().flat_map(|entry| entry.newly_hidden.clone()).collect();
    let is_newly_hidden = |id: &ChunkId| visible.contains(id) || hidden_before.contains(id);
    let entry = PendingForget {
        due_at,
        newly_hidden: chunks.iter().copied().filter(is_newly_hidden).collect(),
        chunks,
        memories,
        named_memories,
        records: items.records,
        name: items.name,
        whole_conversation,
        started: false,
    };
    let memory_ids = entry.all_memories();
    let others = remove_from_pending(before, &entry.chunks, &memory_ids);
    // Recorded before it is hidden: a chunk that is hidden and not recorded would only be deleted.
    save_pending(store, name, &[others.as_slice(), &[entry]].concat())?;
    if !visible.is_empty() {
        let delete = Change::Delete { chunks: whole_chunks(&visible), reason: DeleteReason::Forget };
        conversation.commit(&delete, Durability::Immediate)?;
    }
    let (store, name, _) = conversation.body_loader();
    set_pending_forget(store, name, &memory_ids, true)
}

fn whole_chunks(chunks: &[ChunkId]) -> Vec<ChunkSelection> {
    chunks.iter().map(|&chunk| ChunkSelection { chunk, extent: Extent::Whole }).collect()
}

/// Cancels what is pending in a conversation: all of it, or what is selected.
pub(super) fn cancel(
    backend: &dyn ForgetBackend,
    name: &str,
    selection: &ForgetSelection,
) -> Result<CancelledForget, Error> {
    let mut store = backend.open_reader()?.ok_or_else(|| no_such_conversation(name))?;
    let timeline = load_existing(&mut *store, name, Access::Read)?;
    let selected = selection.resolve(name, &timeline)?;
    let pending = load_pending(&mut *store, name)?;
    drop(store);
    if let Some(selected) = &selected
        && !pending.iter().any(|entry| has_any_chunk(entry, selected))
    {
        let chunks: Vec<String> = selected.iter().take(5).map(ToString::to_string).collect();
        let message = format!("nothing of {} is pending", chunks.join(", "));
        return Err(Error::not_found(format!("cancelling in '{name}'"), message));
    }
    // The lease is taken only where there is something to cancel.
    if pending.iter().all(|entry| entry.started) {
        return Ok(CancelledForget::default());
    }
    let mut conversation = open_for_write(backend, name)?;
    let (store, name, timeline) = conversation.body_loader();
    let is_selected = |id: &ChunkId| selected.as_ref().is_none_or(|selected| selected.contains(id));
    let pending = load_pending(store, name)?;
    let cancellable = pending.iter().filter(|entry| !entry.started);
    let hidden = cancellable.flat_map(|entry| entry.newly_hidden.clone()).filter(is_selected).collect();
    let chunks = still_hidden(store, name, timeline, hidden)?;
    if !chunks.is_empty() {
        conversation.commit(&Change::Undelete(whole_chunks(&chunks)), Durability::Immediate)?;
    }
    let (store, name, _) = conversation.body_loader();
    let memories = cancel_pending(store, name, selected.as_deref())?;
    Ok(CancelledForget { chunks: chunks.len(), memories })
}

/// What is pending in a conversation.
pub(super) fn list_pending(backend: &dyn ForgetBackend, name: &str) -> Result<Vec<PendingForgetItem>, Error> {
    let mut store = backend.open_reader()?.ok_or_else(|| no_such_conversation(name))?;
    let mut timeline = load_existing(&mut *store, name, Access::Read)?;
    let mut items = Vec::new();
    for entry in load_pending(&mut *store, name)? {
        let memories = entry.all_memories();
        let other_texts = entry.records.len() + usize::from(entry.name);
        let chunks = still_hidden(&mut *store, name, &mut timeline, entry.chunks)?;
        let text = |&id: &ChunkId| Some((id, timeline.chunk(id)?.text().into_owned()));
        let chunks: Vec<(ChunkId, String)> = chunks.iter().filter_map(text).collect();
        if !chunks.is_empty() || !memories.is_empty() || other_texts > 0 {
            items.push(PendingForgetItem {
                conversation: name.to_owned(),
                due_at: entry.due_at,
                chunks,
                memories,
                other_texts,
                whole_conversation: entry.whole_conversation,
            });
        }
    }
    Ok(items)
}

/// Erases what is due, in all conversations. An error in one conversation does not keep the others.
pub(super) fn erase_due(backend: &dyn ForgetBackend, now: i64) -> Result<ScheduledForgetReport, Error> {
    let mut report = ScheduledForgetReport::default();
    let Some(mut store) = backend.open_reader()? else { return Ok(report) };
    for summary in store.list_conversations()? {
        erase_due_in(backend, &mut *store, &summary.name, now, &mut report)?;
    }
    Ok(report)
}

/// Whether the grace period of something in a conversation has ended.
pub(super) fn has_due(store: &mut dyn Store, name: &str, now: i64) -> Result<bool, Error> {
    Ok(load_pending(store, name)?.iter().any(|entry| entry.due_at <= now))
}

/// Erases what is due in one conversation. Returns its name, which is a new one if the old one was forgotten.
pub(super) fn erase_due_in(
    backend: &dyn ForgetBackend,
    store: &mut dyn Store,
    name: &str,
    now: i64,
    report: &mut ScheduledForgetReport,
) -> Result<String, Error> {
    let mut name = name.to_owned();
    let pending = load_pending(store, &name)?;
    for entry in pending.into_iter().filter(|entry| entry.due_at <= now) {
        match erase_pending(backend, &name, &entry, now) {
            Ok(done) => {
                let new_name = done.new_name.clone();
                report.add(&name, done);
                name = new_name.unwrap_or(name);
            }
            Err(error) => report.error = Some(error),
        }
    }
    Ok(name)
}

/// Erases what is still hidden of a pending request.
fn erase_pending(
    backend: &dyn ForgetBackend,
    name: &str,
    entry: &PendingForget,
    now: i64,
) -> Result<ErasedText, Error> {
    let request = ForgetRequest::by_user(now);
    let mut store = backend.open_writer()?;
    let store_ref = &mut *store;
    let mut timeline = load_existing(store_ref, name, Access::Write)?;
    let existing: Vec<ChunkId> =
        entry.chunks.iter().copied().filter(|&id| timeline.chunk(id).is_some()).collect();
    // If messages came since, or chunks were undeleted, the rest is no longer the whole conversation.
    let is_whole = timeline.chunks().all(|chunk| chunk.is_deleted() && entry.chunks.contains(&chunk.id()));
    if entry.whole_conversation && (is_whole || entry.started) {
        drop(store);
        let target = ForgetTarget { conversation: name.to_owned(), scope: ForgetScope::WholeConversation };
        return erase_now(backend, &target, &request);
    }
    // An erasure that has begun is finished; of one that is only pending, chunks may have been undeleted.
    let chunks = match entry.started {
        true => existing,
        false => still_hidden(store_ref, name, &mut timeline, existing)?,
    };
    let memories = load_all_memories(store_ref, name)?;
    let find =
        |ids: &[u64]| memories.iter().filter(|m| ids.contains(&m.id)).cloned().collect::<Vec<Memory>>();
    // If the chunks that a memory may mention were undeleted, it is kept.
    let (derived_memories, kept): (Vec<_>, Vec<_>) =
        find(&entry.memories).into_iter().partition(|memory| entry.started || memory.may_mention(&chunks));
    let kept: Vec<u64> = kept.iter().map(|memory| memory.id).collect();
    set_pending_forget(store_ref, name, &kept, false)?;
    let items = ForgetItems {
        chunks,
        derived_memories,
        matched_memories: find(&entry.named_memories),
        records: entry.records.clone(),
        name: entry.name,
    };
    if items.is_empty() {
        let others =
            remove_from_pending(load_pending(store_ref, name)?, &entry.chunks, &entry.all_memories());
        save_pending(store_ref, name, &others)?;
        return Ok(ErasedText::default());
    }
    drop(store);
    let target = ForgetTarget { conversation: name.to_owned(), scope: ForgetScope::Selected(items) };
    erase_now(backend, &target, &request)
}
