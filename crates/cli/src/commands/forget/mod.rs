//! `halo forget`: Lethe. What is forgotten here is gone for good: from the store and its log, from search, from the model's
//! saved memory, from memories and recordings, and so from everything that is exported later. What remains is a proof that
//! something was, and when it went.

mod audit;
mod policy;

use super::show::{Which, existing};
use super::{count, print, print_json};
use crate::settings::Settings;
use crate::{Common, printable, say};
use anyhow::{Context, Result, bail};
use audit::Audit;
use halo_agents::lethe::DAY;
use halo_core::change::{Change, Extent, Part};
use halo_core::seams::{Access, Durability, Kind, Store, Worlds};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, TurnId};
use halo_engine::session;
use halo_engine::world::realm;
use halo_llama::graveyard;
use halo_store::database::{Database, Location};
use halo_store::forget::Gone;
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::path::Path;

/// What is to be forgotten.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    which: Which,
    /// Chunks: role, turn and sentence, such as u4.0
    #[arg(value_name = "CHUNK")]
    chunks: Vec<ChunkId>,
    /// A turn, all of it
    #[arg(long, value_name = "N")]
    turn: Vec<u32>,
    /// Turns from one to another, both included, such as 4-9
    #[arg(long, value_name = "FROM-TO", value_parser = range)]
    turns: Option<(u32, u32)>,
    /// Every paragraph that has these words, in any case
    #[arg(long, value_name = "WORDS")]
    matching: Option<String>,
    /// The whole conversation, its name included
    #[arg(long)]
    all: bool,
    /// In every conversation, not in one
    #[arg(long)]
    everywhere: bool,
    /// What is too old, by the settings lethe.hot_days, lethe.warm_days and lethe.compost_days
    #[arg(long, conflicts_with_all = ["chunks", "turn", "turns", "matching", "all"])]
    by_age: bool,
    /// Shows what would be forgotten, and forgets nothing
    #[arg(long)]
    dry_run: bool,
    /// Does not ask
    #[arg(long, short = 'y')]
    yes: bool,
    /// At once, without the time of grace (lethe.grace_days) in which --keep takes it back
    #[arg(long)]
    now: bool,
    /// Takes back what is still in its time of grace
    #[arg(long, conflicts_with_all = ["by_age", "now", "due", "proofs"])]
    keep: bool,
    /// Forgets what has come to the end of its time of grace; `halo chat` and `halo serve` do so when they begin
    #[arg(long)]
    due: bool,
    /// What was forgotten, and whether the proof of each is sound
    #[arg(long)]
    proofs: bool,
}

fn range(text: &str) -> Result<(u32, u32), String> {
    let ends = text.split_once('-').and_then(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)));
    ends.filter(|(from, to)| from <= to).ok_or_else(|| format!("'{text}' is not FROM-TO, such as 4-9"))
}

/// Where it is noted what waits to be forgotten.
const PENDING: &str = "lethe.pending";

/// Chunks of one conversation that are to go, or all of it.
struct Target {
    name: String,
    what: Goes,
}

enum Goes {
    Chunks(Vec<ChunkId>),
    Everything,
}

/// What goes at one wish.
#[derive(Clone)]
pub(crate) struct Wish {
    /// At whose.
    by: &'static str,
    /// Now, in milliseconds since 1970.
    now: i64,
}

const USER: &str = "the user's wish";
const POLICY: &str = "its age";

/// Forgets, or shows what would be forgotten.
pub fn run(options: &Options, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    let now = jiff::Timestamp::now().as_millisecond();
    if options.proofs {
        return proofs(common);
    }
    if options.due {
        let done = due(common, now)?;
        return told(
            common,
            &json!({ "forgotten": done }),
            &format!("{} forgotten for good\n", count(done as u64, "paragraph")),
        );
    }
    if options.by_age {
        if !options.dry_run && !options.yes {
            policy::show(&settings, common, now)?;
            be_sure()?;
        }
        return match options.dry_run {
            true => policy::show(&settings, common, now),
            false => policy::run(&settings, common, now),
        };
    }
    let names = names(options, common)?;
    if options.keep {
        let kept: usize = names.iter().map(|name| keep(common, name)).sum::<Result<usize>>()?;
        return told(
            common,
            &json!({ "kept": kept }),
            &format!("{} taken back\n", count(kept as u64, "paragraph")),
        );
    }
    let targets = targets(options, common, &names)?;
    let mut store = common.look_at_store()?.context("nothing was ever kept here")?;
    let shown = show(&mut store, &targets)?;
    drop(store);
    if shown.is_empty() {
        bail!("nothing matches: nothing would be forgotten");
    }
    if options.dry_run {
        return list(common, &shown, "would be forgotten");
    }
    if !options.yes {
        list(common, &shown, "would be forgotten")?;
        be_sure()?;
    }
    let wish = Wish { by: USER, now };
    let grace = settings.lethe_grace.0 * DAY;
    for target in &targets {
        if options.now || grace == 0 {
            forget(common, target, &wish)?;
        } else {
            later(common, target, now + grace)?;
        }
    }
    let (tokens, paragraphs) = (shown.iter().map(|(_, gone)| gone.tokens).sum::<usize>(), shown.len());
    let when = if options.now || grace == 0 {
        warn_of_copies(common, &shown);
        "is forgotten for good; `halo forget --proofs` shows that it was".to_owned()
    } else {
        let date =
            jiff::Timestamp::from_millisecond(now + grace).map(|at| at.strftime("%-d %B %Y").to_string());
        format!(
            "is out of sight, and gone for good after {}; until then `halo forget --keep` takes it back, and --now does not wait",
            date.unwrap_or_default()
        )
    };
    let words = format!("{}, {tokens} tokens: that {when}\n", count(paragraphs as u64, "paragraph"));
    told(
        common,
        &json!({ "paragraphs": paragraphs, "tokens": tokens, "now": options.now || grace == 0 }),
        &words,
    )
}

/// What is due is forgotten, by wish and, where that is turned on, by age: for programs that begin.
pub fn tidy(common: &Common, settings: &Settings) {
    let now = jiff::Timestamp::now().as_millisecond();
    let tidied = due(common, now).and_then(|gone| {
        let old = if settings.lethe { policy::apply(settings, common, now)? } else { 0 };
        Ok(gone + old)
    });
    match tidied {
        Ok(0) => {}
        Ok(gone) => say(&format!(
            "{} forgotten for good, as was wished (halo forget --proofs)",
            count(gone as u64, "paragraph")
        )),
        Err(why) => say(&format!("what was to be forgotten is still there: {why:#}")),
    }
}

fn told(common: &Common, as_json: &Value, words: &str) -> Result<()> {
    if common.json { print_json(as_json) } else { print(words) }
}

fn names(options: &Options, common: &Common) -> Result<Vec<String>> {
    if !options.everywhere {
        return Ok(vec![options.which.name.clone()]);
    }
    let store = common.look_at_store()?.map(|mut store| store.conversations()).transpose()?;
    Ok(store.unwrap_or_default().into_iter().map(|known| known.name).collect())
}

fn targets(options: &Options, common: &Common, names: &[String]) -> Result<Vec<Target>> {
    let nothing = options.chunks.is_empty() && options.turn.is_empty() && options.turns.is_none();
    if nothing && options.matching.is_none() && !options.all {
        bail!(
            "say what is to be forgotten: chunks such as u4.0, --turn, --turns, --matching, --all or --by-age"
        );
    }
    if options.everywhere && (!nothing || options.all) {
        bail!("--everywhere goes with --matching: turns and chunks are of one conversation");
    }
    let mut targets = Vec::new();
    for name in names {
        let (mut store, mut timeline) = existing(common, name, Access::Read)?;
        if options.all {
            targets.push(Target { name: name.clone(), what: Goes::Everything });
            continue;
        }
        let mut chunks = options.chunks.clone();
        let (from, to) = options.turns.unwrap_or((1, 0));
        let wanted = |turn: TurnId| options.turn.contains(&turn.0) || (from..=to).contains(&turn.0);
        let turns = timeline.turns().iter().map(|turn| turn.id);
        let missing = options.turn.iter().find(|&&n| !timeline.turns().iter().any(|turn| turn.id.0 == n));
        if let Some(missing) = missing {
            bail!("there is no turn {missing} in '{}'", printable(name));
        }
        chunks.extend(turns.filter(|&t| wanted(t)).flat_map(|t| timeline.turn_chunks(t)).map(|c| c.id()));
        if let Some(words) = &options.matching {
            chunks.extend(matching(&mut store, name, &mut timeline, words)?);
        }
        chunks.sort();
        chunks.dedup();
        // What is forgotten already is not forgotten again.
        let missing = away(&timeline, &chunks);
        store.bring(name, &mut timeline, &missing)?;
        chunks.retain(|&id| timeline.chunk(id).is_none_or(|chunk| !chunk.is_forgotten()));
        if !chunks.is_empty() {
            targets.push(Target { name: name.clone(), what: Goes::Chunks(chunks) });
        }
    }
    Ok(targets)
}

fn away(timeline: &Timeline, chunks: &[ChunkId]) -> Vec<ChunkId> {
    let away = |id: &ChunkId| timeline.chunk(*id).is_some_and(|chunk| !chunk.is_here());
    chunks.iter().copied().filter(away).collect()
}

/// The chunks that say something, in any case.
fn matching(store: &mut Database, name: &str, timeline: &mut Timeline, words: &str) -> Result<Vec<ChunkId>> {
    let wanted = words.trim().to_lowercase();
    if wanted.is_empty() {
        bail!("--matching needs words");
    }
    let all: Vec<ChunkId> = timeline.chunks().map(|chunk| chunk.id()).collect();
    let mut found = Vec::new();
    for some in all.chunks(512) {
        let missing = away(timeline, some);
        store.bring(name, timeline, &missing)?;
        let says =
            |id: &ChunkId| timeline.chunk(*id).is_some_and(|c| c.text().to_lowercase().contains(&wanted));
        found.extend(some.iter().copied().filter(says));
        timeline.release_dead();
    }
    Ok(found)
}

/// What would go, in words.
fn show(store: &mut Database, targets: &[Target]) -> Result<Vec<(String, Gone)>> {
    let mut shown = Vec::new();
    for target in targets {
        let chunks = match &target.what {
            Goes::Chunks(chunks) => chunks.clone(),
            Goes::Everything => {
                store.load(&target.name, Access::Read)?.chunks().map(|chunk| chunk.id()).collect()
            }
        };
        shown.extend(store.words(&target.name, &chunks)?.into_iter().map(|gone| (target.name.clone(), gone)));
    }
    Ok(shown)
}

fn list(common: &Common, shown: &[(String, Gone)], what: &str) -> Result<()> {
    let line = |text: &str| {
        let first: String = text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(70).collect();
        printable(&first)
    };
    if common.json {
        let rows = shown.iter().map(|(name, gone)| {
            json!({ "conversation": name, "chunk": gone.chunk.to_string(), "tokens": gone.tokens, "text": gone.text })
        });
        return print_json(&Value::Array(rows.collect()));
    }
    for (name, gone) in shown.iter().take(50) {
        print(&format!("{}  {}  {}\n", printable(name), gone.chunk, line(&gone.text)))?;
    }
    if shown.len() > 50 {
        print(&format!("… and {} more\n", shown.len() - 50))?;
    }
    let tokens: usize = shown.iter().map(|(_, gone)| gone.tokens).sum();
    print(&format!("{}, {tokens} tokens {what}\n", count(shown.len() as u64, "paragraph")))
}

/// Asks whoever is there to ask; what nobody is sure of is not done.
fn be_sure() -> Result<()> {
    if std::io::stdin().is_terminal() && sure()? {
        return Ok(());
    }
    bail!("nothing was forgotten: add --yes to forget this, --dry-run only to look")
}

fn sure() -> Result<bool> {
    eprint!("Forget this for good? Write yes: ");
    std::io::stderr().flush()?;
    let mut said = String::new();
    std::io::stdin().read_line(&mut said)?;
    Ok(said.trim().eq_ignore_ascii_case("yes"))
}

/// Forgets now. Returns how many paragraphs that were.
///
/// The wish is noted first and struck out last: what fails halfway is finished the next time.
fn forget(common: &Common, target: &Target, wish: &Wish) -> Result<usize> {
    let data = common.data_folder().context("this system names no data folder: give one with --data")?;
    let audit = Audit::open(&data)?;
    let name = &target.name;
    let (mut store, mut timeline) = existing(common, name, Access::Write)?;
    let (chunks, all): (Vec<ChunkId>, bool) = match &target.what {
        Goes::Chunks(chunks) => (chunks.clone(), false),
        Goes::Everything => (timeline.chunks().map(|chunk| chunk.id()).collect(), true),
    };
    if let Some(missing) = chunks.iter().find(|&&id| timeline.chunk(id).is_none()) {
        bail!("there is no chunk {missing} in '{}'", printable(name));
    }
    let rest = without(pending(&mut store, name)?, &chunks);
    let names: Vec<String> = chunks.iter().map(ToString::to_string).collect();
    let noted = json!({ "due": wish.now, "chunks": names, "hidden": [], "all": all });
    put_pending(&mut store, name, &[rest.as_slice(), &[noted]].concat())?;

    // Caches and recordings first: they are found by what is still there.
    let times =
        store.records(name, Kind::Setting)?.into_iter().find(|record| record.key == session::FORGOTTEN);
    let times = times.and_then(|record| record.value.parse::<u64>().ok()).unwrap_or(0) + 1;
    store.put_record(name, Kind::Setting, session::FORGOTTEN, Some(&times.to_string()))?;
    let keys = saved_but_for(&mut store, Some(name), None)?;
    graveyard::keep_only(&data.join("kv"), &keys).context("what the model had saved of it is still there")?;
    let from = chunks.iter().map(|id| id.turn.0).min().unwrap_or(0);
    for record in store.records(name, Kind::Capture)? {
        // What was recorded since may show it.
        let told: Value = serde_json::from_str(&record.value).unwrap_or_default();
        if told["turn"].as_u64().is_none_or(|turn| turn >= u64::from(from)) {
            remove_capture(Path::new(&record.key));
            store.put_record(name, Kind::Capture, &record.key, None)?;
        }
    }
    let missing = away(&timeline, &chunks);
    store.bring(name, &mut timeline, &missing)?;
    let still = |id: &&ChunkId| timeline.chunk(**id).is_some_and(|chunk| !chunk.is_forgotten());
    let still: Vec<ChunkId> = chunks.iter().filter(still).copied().collect();
    let gone = store.words(name, &still)?;
    unwrite(&data.join(crate::commands::chat::HISTORY), &gone)?;
    for gone in &gone {
        // Of a conversation that is forgotten with its name, the name is not told either.
        audit.note(if all { "a conversation" } else { name }, gone, wish)?;
    }
    tell_of_notes(&mut store, name, &gone)?;
    if all {
        store.forget_all(name)?;
    } else {
        store.forget(name, &chunks)?;
        store.load(name, Access::Write)?;
        put_pending(&mut store, name, &rest)?;
    }
    Ok(gone.len())
}

/// What waits to be forgotten, without some chunks.
fn without(pending: Vec<Value>, chunks: &[ChunkId]) -> Vec<Value> {
    let gone: Vec<String> = chunks.iter().map(ToString::to_string).collect();
    let rest = |list: &Value| -> Vec<Value> {
        let list = list.as_array().into_iter().flatten();
        list.filter(|name| !gone.iter().any(|gone| *name == gone)).cloned().collect()
    };
    let one = |one: Value| {
        let (chunks, hidden) = (rest(&one["chunks"]), rest(&one["hidden"]));
        (!chunks.is_empty())
            .then(|| json!({ "due": one["due"], "chunks": chunks, "hidden": hidden, "all": one["all"] }))
    };
    pending.into_iter().filter_map(one).collect()
}

/// Takes lines out of what the terminal has kept of what was typed.
fn unwrite(history: &Path, gone: &[Gone]) -> Result<()> {
    let Ok(text) = std::fs::read_to_string(history) else { return Ok(()) };
    let says = |line: &str| {
        let line = line.trim();
        !line.is_empty()
            && gone.iter().any(|gone| gone.text.contains(line) || line.contains(gone.text.trim()))
    };
    let kept: String = text.lines().filter(|line| !says(line)).map(|line| format!("{line}\n")).collect();
    if kept != text {
        std::fs::write(history, kept).with_context(|| format!("cannot write {}", history.display()))?;
    }
    Ok(())
}

/// The model's notes are its own words, and stay; where they repeat what goes, the user is told.
fn tell_of_notes(store: &mut Database, name: &str, gone: &[Gone]) -> Result<()> {
    for note in store.records(name, Kind::Note)? {
        let words = gone.iter().flat_map(|gone| gone.text.split(|c: char| !c.is_alphanumeric()));
        let mut shared: Vec<&str> =
            words.filter(|w| w.chars().count() >= 5 && note.value.contains(*w)).collect();
        shared.sort_unstable();
        shared.dedup();
        if !shared.is_empty() {
            let words = printable(&shared.join(", "));
            say(&format!(
                "the model's notes of '{}' speak of the same ({words}): look at them on the page, or with /notes",
                printable(name)
            ));
        }
    }
    Ok(())
}

/// Removes a recording: the files that it is made of, and the folder if nothing else is in it.
fn remove_capture(folder: &Path) {
    for file in ["capture.json", "steps.jsonl"] {
        let _ = std::fs::remove_file(folder.join(file));
    }
    let _ = std::fs::remove_dir(folder);
}

/// Out of sight now, gone later.
fn later(common: &Common, target: &Target, due: i64) -> Result<()> {
    let (mut store, mut timeline) = existing(common, &target.name, Access::Write)?;
    let (chunks, all): (Vec<ChunkId>, bool) = match &target.what {
        Goes::Chunks(chunks) => (chunks.clone(), false),
        Goes::Everything => (timeline.chunks().map(|chunk| chunk.id()).collect(), true),
    };
    let parts = chunks.iter().filter(|&&id| timeline.chunk(id).is_some_and(|c| !c.is_withdrawn()));
    let parts: Vec<Part> = parts.map(|&chunk| Part { chunk, extent: Extent::Whole }).collect();
    let hidden: Vec<String> = parts.iter().map(|part| part.chunk.to_string()).collect();
    if !parts.is_empty() {
        store.transact(&target.name, &mut timeline, &Change::Withdraw(parts), Durability::Now)?;
    }
    let mut pending = pending(&mut store, &target.name)?;
    let names: Vec<String> = chunks.iter().map(ToString::to_string).collect();
    pending.push(json!({ "due": due, "chunks": names, "hidden": hidden, "all": all }));
    put_pending(&mut store, &target.name, &pending)
}

fn pending(store: &mut Database, name: &str) -> Result<Vec<Value>> {
    let records = store.records(name, Kind::Setting)?;
    let found = records.into_iter().find(|record| record.key == PENDING);
    Ok(found.and_then(|record| serde_json::from_str(&record.value).ok()).unwrap_or_default())
}

fn put_pending(store: &mut Database, name: &str, pending: &[Value]) -> Result<()> {
    let value = (!pending.is_empty()).then(|| Value::Array(pending.to_vec()).to_string());
    Ok(store.put_record(name, Kind::Setting, PENDING, value.as_deref())?)
}

fn named(list: &Value) -> Vec<ChunkId> {
    let names = list.as_array().into_iter().flatten().filter_map(Value::as_str);
    names.filter_map(|name| name.parse().ok()).collect()
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

/// Takes back what waits to be forgotten in a conversation.
fn keep(common: &Common, name: &str) -> Result<usize> {
    let (mut store, mut timeline) = existing(common, name, Access::Write)?;
    let hidden: Vec<ChunkId> =
        pending(&mut store, name)?.iter().flat_map(|one| named(&one["hidden"])).collect();
    let chunks = waiting(&mut store, name, &mut timeline, hidden)?;
    let parts: Vec<Part> = chunks.iter().map(|&chunk| Part { chunk, extent: Extent::Whole }).collect();
    if !parts.is_empty() {
        store.transact(name, &mut timeline, &Change::Restore(parts), Durability::Now)?;
    }
    put_pending(&mut store, name, &[])?;
    Ok(chunks.len())
}

/// Forgets what has come to the end of its time of grace, everywhere. What cannot be done in one conversation keeps no other.
fn due(common: &Common, now: i64) -> Result<usize> {
    let Some(mut store) = common.look_at_store()? else { return Ok(0) };
    let names: Vec<String> = store.conversations()?.into_iter().map(|known| known.name).collect();
    let (mut done, mut failed) = (0, None);
    for name in names {
        let ripe = |one: &Value| one["due"].as_i64().is_some_and(|due| due <= now);
        let ripe: Vec<Value> = pending(&mut store, &name)?.into_iter().filter(ripe).collect();
        for one in ripe {
            match ripen(common, &name, &one, now) {
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
fn ripen(common: &Common, name: &str, one: &Value, now: i64) -> Result<usize> {
    let wish = Wish { by: USER, now };
    let begun = one["hidden"].as_array().is_some_and(Vec::is_empty);
    if one["all"].as_bool().unwrap_or(false) {
        return forget(common, &Target { name: name.to_owned(), what: Goes::Everything }, &wish);
    }
    let (mut store, mut timeline) = existing(common, name, Access::Write)?;
    let wanted = named(&one["chunks"]);
    let there: Vec<ChunkId> = wanted.iter().copied().filter(|&id| timeline.chunk(id).is_some()).collect();
    // What was begun is finished; what only waited may have been restored since.
    let chunks = if begun { there } else { waiting(&mut store, name, &mut timeline, there)? };
    if chunks.is_empty() {
        let rest = without(pending(&mut store, name)?, &wanted);
        put_pending(&mut store, name, &rest)?;
        return Ok(0);
    }
    drop(store);
    forget(common, &Target { name: name.to_owned(), what: Goes::Chunks(chunks) }, &wish)
}

/// The same words may be elsewhere: in a branch, in what another model has read anew, in a copy that was made before mending.
fn warn_of_copies(common: &Common, shown: &[(String, Gone)]) {
    let warn = || -> Result<()> {
        let Some(mut store) = common.look_at_store()? else { return Ok(()) };
        let names: Vec<String> = store.conversations()?.into_iter().map(|known| known.name).collect();
        for name in names {
            let mut timeline = store.load(&name, Access::Read)?;
            for (_, gone) in shown.iter().filter(|(_, gone)| gone.text.trim().chars().count() >= 12) {
                let there = matching(&mut store, &name, &mut timeline, &gone.text)?;
                if let Some(chunk) = there.first() {
                    let name = printable(&name);
                    say(&format!(
                        "the same words are in {chunk} of '{name}': --everywhere --matching forgets them there too"
                    ));
                }
            }
        }
        if let Location::Sqlite(path) = common.location()?
            && let (Some(folder), Some(file)) = (path.parent(), path.file_name().and_then(|n| n.to_str()))
        {
            for entry in std::fs::read_dir(folder)?.filter_map(Result::ok) {
                let other = entry.file_name();
                let is_copy =
                    |n: &str| n.starts_with(file) && (n.contains(".backup-") || n.contains(".damaged-"));
                if other.to_str().is_some_and(is_copy) {
                    say(&format!(
                        "a copy of the store from before is still there: {}",
                        entry.path().display()
                    ));
                }
            }
        }
        Ok(())
    };
    if let Err(why) = warn() {
        say(&format!("whether there are copies could not be found out: {why:#}"));
    }
}

/// What was forgotten, and whether each proof is sound.
fn proofs(common: &Common) -> Result<()> {
    let data = common.data_folder().context("this system names no data folder: give one with --data")?;
    let proofs = audit::proofs(&data)?;
    if common.json {
        let rows = proofs.iter().map(|(proof, sound)| {
            json!({
                "subject": proof.subject, "by": proof.by, "at": proof.at, "tokens": proof.tokens, "salt": proof.salt,
                "content": proof.content, "seal": proof.seal, "sound": sound,
            })
        });
        return print_json(&Value::Array(rows.collect()));
    }
    if proofs.is_empty() {
        say("nothing was ever forgotten for good here");
    }
    for (proof, sound) in proofs {
        let at = jiff::Timestamp::from_millisecond(proof.at).map(|at| at.strftime("%F %T").to_string());
        let sound = if sound { "sound" } else { "NOT SOUND: it was changed, or made with another key" };
        let subject = printable(&proof.subject);
        print(&format!(
            "{}  {subject}  {} tokens, by {}  {sound}\n",
            at.unwrap_or_default(),
            proof.tokens,
            proof.by
        ))?;
    }
    Ok(())
}

/// What models keep everything by, all conversations and worlds, but for one of either.
pub fn saved_but_for(
    store: &mut Database,
    conversation: Option<&str>,
    world: Option<&str>,
) -> Result<Vec<String>> {
    let mut keys = Vec::new();
    for known in store.conversations()?.iter().filter(|known| Some(known.name.as_str()) != conversation) {
        keys.push(session::key(store, known)?);
    }
    let worlds = store.worlds()?;
    let others = worlds.iter().filter(|known| Some(known.name.as_str()) != world);
    keys.extend(others.map(|known| realm::key(&known.name, known.created)));
    Ok(keys)
}
