//! The time of grace, at the user's hand: it begins, what waits is listed and taken back, and it ends.

use super::{Goes, Options, Target, USER, Wish, away, counted, day, forget, selected, told, words::excerpt};
use crate::commands::show::existing;
use crate::commands::{print, print_json};
use crate::{Common, printable, say};
use anyhow::{Result, bail};
use halo_core::change::{Change, DeleteReason, Extent, Part};
use halo_core::seams::{Access, Durability, Store};
use halo_core::timeline::Timeline;
use halo_core::token::ChunkId;
use halo_engine::grace::{Wait, put, strike, waits, without};
use halo_engine::memory;
use halo_store::database::Database;
use serde_json::{Value, json};

/// What to say instead of what a chunk says that waits.
pub fn instead(due: i64) -> String {
    format!("[to be forgotten, on {}; `halo forget --keep` takes it back]", day(due))
}

/// Out of sight now, gone later.
pub(super) fn begin(common: &Common, target: &Target, due: i64) -> Result<()> {
    let name = &target.name;
    let (mut store, mut timeline) = existing(common, name, Access::Write)?;
    let goes = target.parts(&mut store, &timeline)?;
    let ids = |all: &[memory::Memory]| all.iter().map(|memory| memory.id).collect::<Vec<u64>>();
    let (mut chunks, mut memories, mut named) = (goes.chunks, ids(&goes.tell), ids(&goes.named));
    let all = matches!(target.what, Goes::Everything);
    let before = waits(&mut store, name)?;
    if !all {
        // What waits already goes when it was to go.
        chunks.retain(|id| !before.iter().any(|wait| wait.chunks.contains(id)));
        let waits = |id: &u64| before.iter().any(|w| w.memories.contains(id) || w.named.contains(id));
        memories.retain(|id| !waits(id));
        named.retain(|id| !waits(id));
    }
    let seen = |id: &ChunkId| timeline.chunk(*id).is_some_and(|chunk| !chunk.is_withdrawn());
    let hidden: Vec<ChunkId> = chunks.iter().copied().filter(seen).collect();
    let earlier: Vec<ChunkId> = before.iter().flat_map(|wait| wait.hidden.clone()).collect();
    // Noted before it is hidden: what is hidden and not noted would be no more than deleted.
    let noted = Wait {
        due,
        hidden: chunks.iter().copied().filter(|id| hidden.contains(id) || earlier.contains(id)).collect(),
        chunks,
        memories,
        named,
        all,
        begun: false,
    };
    let both = [noted.memories.as_slice(), &noted.named].concat();
    let rest = without(before, &noted.chunks, &both);
    put(&mut store, name, &[rest.as_slice(), &[noted]].concat())?;
    if !hidden.is_empty() {
        let withdraw = Change::Withdraw { parts: whole(&hidden), reason: DeleteReason::Forget };
        store.transact(name, &mut timeline, &withdraw, Durability::Now)?;
    }
    Ok(memory::hide(&mut store, name, &both, true)?)
}

fn whole(chunks: &[ChunkId]) -> Vec<Part> {
    chunks.iter().map(|&chunk| Part { chunk, extent: Extent::Whole }).collect()
}

/// Those of some chunks that are there, out of sight, and not forgotten yet: others were restored, or are gone.
fn waiting(
    store: &mut Database,
    name: &str,
    timeline: &mut Timeline,
    chunks: Vec<ChunkId>,
) -> Result<Vec<ChunkId>> {
    let missing = away(timeline, &chunks);
    store.bring(name, timeline, &missing)?;
    let waits = |id: &ChunkId| timeline.chunk(*id).is_some_and(|c| c.is_withdrawn() && !c.is_forgotten());
    Ok(chunks.into_iter().filter(waits).collect())
}

/// Takes back what waits: all of it, or what is named.
pub(super) fn take_back(options: &Options, common: &Common, names: &[String]) -> Result<()> {
    let (mut paragraphs, mut memories) = (0, 0);
    for name in names {
        let (mut store, timeline) = existing(common, name, Access::Read)?;
        let named = selected(options, name, &timeline)?;
        let noted = waits(&mut store, name)?;
        drop(store);
        if let Some(named) = &named
            && !noted.iter().any(|wait| wait.chunks.iter().any(|chunk| named.contains(chunk)))
        {
            let list: Vec<String> = named.iter().take(5).map(ToString::to_string).collect();
            bail!(
                "nothing of {} waits to be forgotten in '{}': --waiting lists what does",
                list.join(", "),
                printable(name)
            );
        }
        // Who only looks does not have to wait for who writes there.
        if !noted.iter().all(|wait| wait.begun) {
            let kept = keep(common, name, named.as_deref())?;
            (paragraphs, memories) = (paragraphs + kept.0, memories + kept.1);
        }
    }
    told(
        common,
        &json!({ "kept": paragraphs, "memories": memories }),
        &format!("{} taken back\n", counted(paragraphs, memories)),
    )
}

/// Takes back what waits in a conversation. Returns how many paragraphs and memories that were.
fn keep(common: &Common, name: &str, only: Option<&[ChunkId]>) -> Result<(usize, usize)> {
    let (mut store, mut timeline) = existing(common, name, Access::Write)?;
    let noted = waits(&mut store, name)?;
    let wanted = |id: &ChunkId| only.is_none_or(|only| only.contains(id));
    let noted = noted.iter().filter(|wait| !wait.begun);
    let hidden = noted.flat_map(|wait| wait.hidden.clone()).filter(wanted).collect();
    let chunks = waiting(&mut store, name, &mut timeline, hidden)?;
    if !chunks.is_empty() {
        store.transact(name, &mut timeline, &Change::Restore(whole(&chunks)), Durability::Now)?;
    }
    let memories = strike(&mut store, name, only)?;
    Ok((chunks.len(), memories))
}

/// Lists what waits.
pub(super) fn list(common: &Common, names: &[String]) -> Result<()> {
    let (mut rows, mut out) = (Vec::new(), String::new());
    for name in names {
        let (mut store, mut timeline) = existing(common, name, Access::Read)?;
        for wait in waits(&mut store, name)? {
            let chunks = waiting(&mut store, name, &mut timeline, wait.chunks.clone())?;
            let texts: Vec<(ChunkId, String)> =
                chunks.iter().filter_map(|&id| Some((id, timeline.chunk(id)?.text().into_owned()))).collect();
            let memories = [wait.memories.as_slice(), &wait.named].concat();
            if texts.is_empty() && memories.is_empty() {
                continue;
            }
            let names: Vec<String> = texts.iter().map(|(id, _)| id.to_string()).collect();
            rows.push(json!({
                "conversation": name, "due": wait.due, "chunks": names, "memories": memories, "all": wait.all,
            }));
            let what = counted(texts.len(), memories.len());
            out += &format!("{}: {what} until {}\n", printable(name), day(wait.due));
            for (id, text) in texts.iter().take(20) {
                out += &format!("    {id}  {}\n", excerpt(text, None));
            }
        }
    }
    match (common.json, out.is_empty()) {
        (true, _) => print_json(&Value::Array(rows)),
        (false, true) => print("nothing waits to be forgotten\n"),
        (false, false) => print(&out),
    }
}

/// Forgets what has come to the end of its time of grace, everywhere. What cannot be done in one conversation keeps no other.
pub(super) fn due(common: &Common, now: i64) -> Result<usize> {
    let Some(mut store) = common.look_at_store()? else { return Ok(0) };
    let names: Vec<String> = store.conversations()?.into_iter().map(|known| known.name).collect();
    let (mut done, mut failed) = (0, None);
    for name in names {
        let ripe: Vec<Wait> = waits(&mut store, &name)?.into_iter().filter(|wait| wait.due <= now).collect();
        for wait in ripe {
            match ripen(common, &name, &wait, now) {
                Ok(gone) => done += gone,
                Err(why) => failed = Some(why),
            }
        }
    }
    match failed {
        Some(why) if done == 0 => Err(why),
        Some(why) => {
            say(&format!("not all that was to be forgotten could be: {why:#}"));
            Ok(done)
        }
        None => Ok(done),
    }
}

/// Forgets what waited in one conversation and still does.
fn ripen(common: &Common, name: &str, wait: &Wait, now: i64) -> Result<usize> {
    let wish = Wish { by: USER, now };
    let (mut store, mut timeline) = existing(common, name, Access::Write)?;
    let there: Vec<ChunkId> =
        wait.chunks.iter().copied().filter(|&id| timeline.chunk(id).is_some()).collect();
    // Where something was said since, or taken back, the rest is no longer the whole conversation.
    let whole = timeline.chunks().all(|chunk| chunk.is_withdrawn() && wait.chunks.contains(&chunk.id()));
    if wait.all && (whole || wait.begun) {
        drop(store);
        return forget(common, &Target { name: name.to_owned(), what: Goes::Everything }, &wish);
    }
    // What was begun is finished; what only waited may have been restored since.
    let chunks = if wait.begun { there } else { waiting(&mut store, name, &mut timeline, there)? };
    let known = memory::all(&mut store, name)?;
    let known = |ids: &[u64]| known.iter().filter(|m| ids.contains(&m.id)).cloned().collect::<Vec<_>>();
    // Where what they may tell of was taken back, memories are too.
    let (tell, back): (Vec<_>, Vec<_>) =
        known(&wait.memories).into_iter().partition(|memory| wait.begun || memory.tells(&chunks));
    let back: Vec<u64> = back.iter().map(|memory| memory.id).collect();
    memory::hide(&mut store, name, &back, false)?;
    let named = known(&wait.named);
    if chunks.is_empty() && tell.is_empty() && named.is_empty() {
        let both = [wait.memories.as_slice(), &wait.named].concat();
        let rest = without(waits(&mut store, name)?, &wait.chunks, &both);
        put(&mut store, name, &rest)?;
        return Ok(0);
    }
    drop(store);
    forget(common, &Target { name: name.to_owned(), what: Goes::Some { chunks, tell, named } }, &wish)
}
