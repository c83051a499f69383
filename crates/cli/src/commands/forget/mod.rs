//! `halo forget`: Lethe. What is forgotten here is gone for good: from the store and its log, from search, from the model's
//! saved memory, from memories and recordings, and so from everything that is exported later. What remains is a proof that
//! something was, and when it went.

mod audit;
pub mod grace;
mod policy;
mod words;

use super::show::{MAIN, existing};
use super::{count, print, print_json};
use crate::settings::Settings;
use crate::{Common, printable, say};
use anyhow::{Context, Result, bail};
use audit::Audit;
use halo_agents::lethe::DAY;
use halo_core::seams::{Access, Kind, Store, Worlds};
use halo_core::timeline::Timeline;
use halo_core::token::{ChunkId, TurnId};
use halo_engine::grace::{self as waiting, Wait};
use halo_engine::memory::{self, Memory};
use halo_engine::session;
use halo_engine::world::realm;
use halo_llama::graveyard;
use halo_store::database::{Database, Location};
use halo_store::forget::Gone;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};
use std::path::Path;
use words::{Matcher, excerpt};

/// What is to be forgotten.
#[derive(clap::Args)]
pub struct Options {
    /// The conversation [default: main; with --keep, --waiting and --proofs: all]
    #[arg(short = 'c', long = "conversation", value_name = "NAME")]
    conversation: Option<String>,
    /// Chunks: role, turn and sentence, such as u4.0
    #[arg(value_name = "CHUNK")]
    chunks: Vec<ChunkId>,
    /// A turn, all of it
    #[arg(long, value_name = "N")]
    turn: Vec<u32>,
    /// Turns from one to another, both included, such as 4-9
    #[arg(long, value_name = "FROM-TO", value_parser = range)]
    turns: Option<(u32, u32)>,
    /// Every paragraph and memory that has these words, as whole words and in any case; with chunks or turns, only those
    /// of them that have
    #[arg(long, value_name = "WORDS")]
    matching: Option<String>,
    /// The whole conversation, its name included
    #[arg(long)]
    all: bool,
    /// In every conversation, not in one
    #[arg(long, conflicts_with = "conversation")]
    everywhere: bool,
    /// What is too old, by the settings lethe.hot_days, lethe.warm_days and lethe.compost_days
    #[arg(long, conflicts_with_all = ["chunks", "turn", "turns", "matching", "all", "conversation", "everywhere", "now"])]
    by_age: bool,
    /// Shows what would be forgotten, memories of it included, and forgets nothing
    #[arg(long)]
    dry_run: bool,
    /// Does not ask
    #[arg(long, short = 'y')]
    yes: bool,
    /// At once, without the time of grace (lethe.grace_days) in which --keep takes it back
    #[arg(long)]
    now: bool,
    /// Takes back what is still in its time of grace: all of it, or the chunks and turns that are named
    #[arg(long, conflicts_with_all = ["by_age", "now", "due", "proofs", "all", "matching", "dry_run"])]
    keep: bool,
    /// What is in its time of grace, and until when
    #[arg(long, conflicts_with_all = ["by_age", "now", "due", "proofs", "keep", "all", "matching", "chunks", "turn", "turns", "dry_run"])]
    waiting: bool,
    /// Forgets what has come to the end of its time of grace; `halo chat` and `halo serve` do so when they begin
    #[arg(long, conflicts_with_all = ["by_age", "now", "proofs", "all", "matching", "chunks", "turn", "turns", "dry_run", "conversation", "everywhere"])]
    due: bool,
    /// What was forgotten, and whether the proof of each is sound
    #[arg(long, conflicts_with_all = ["by_age", "now", "all", "matching", "chunks", "turn", "turns", "dry_run", "everywhere"])]
    proofs: bool,
}

fn range(text: &str) -> Result<(u32, u32), String> {
    let ends = text.split_once('-').and_then(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)));
    ends.filter(|(from, to)| from <= to).ok_or_else(|| format!("'{text}' is not FROM-TO, such as 4-9"))
}

/// What is to go of one conversation, or all of it.
struct Target {
    name: String,
    what: Goes,
}

enum Goes {
    Some {
        chunks: Vec<ChunkId>,
        /// Memories that may tell of them.
        tell: Vec<Memory>,
        /// Memories that go for what they say themselves.
        named: Vec<Memory>,
    },
    Everything,
}

/// What that comes to.
struct Parts {
    chunks: Vec<ChunkId>,
    tell: Vec<Memory>,
    named: Vec<Memory>,
}

impl Target {
    fn parts(&self, store: &mut Database, timeline: &Timeline) -> Result<Parts> {
        Ok(match &self.what {
            Goes::Some { chunks, tell, named } => {
                Parts { chunks: chunks.clone(), tell: tell.clone(), named: named.clone() }
            }
            Goes::Everything => Parts {
                chunks: timeline.chunks().map(|chunk| chunk.id()).collect(),
                tell: memory::all(store, &self.name)?,
                named: Vec::new(),
            },
        })
    }
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
        return proofs(common, options.conversation.as_deref());
    }
    if options.due {
        let done = grace::due(common, now)?;
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
    if options.keep && options.everywhere && selects(options) {
        bail!("chunks and turns are of one conversation: leave out --everywhere, or name none");
    }
    if options.waiting {
        return grace::list(common, &names);
    }
    if options.keep {
        return grace::take_back(options, common, &names);
    }
    let (targets, longer) = targets(options, common, &names)?;
    let matcher = options.matching.as_deref().map(Matcher::new).transpose()?;
    let mut store = common.look_at_store()?.context("nothing was ever kept here")?;
    let shown = show(&mut store, &targets)?;
    drop(store);
    if shown.is_empty() {
        match longer.as_slice() {
            [] => bail!("nothing matches: nothing would be forgotten"),
            words => bail!("nothing has that as whole words; longer words have it: {}", words.join(", ")),
        }
    }
    if options.dry_run || !options.yes {
        list(common, &shown, matcher.as_ref())?;
        if !longer.is_empty() {
            say(&format!("longer words have it too, and stay: {}", longer.join(", ")));
        }
        if options.dry_run {
            return Ok(());
        }
        be_sure()?;
    }
    let wish = Wish { by: USER, now };
    let grace = settings.lethe_grace.0 * DAY;
    let at_once = options.now || grace == 0;
    for target in &targets {
        if at_once {
            forget(common, target, &wish)?;
        } else {
            grace::begin(common, target, now + grace)?;
        }
    }
    let memories = shown.iter().filter(|row| row.memory.is_some()).count();
    let (tokens, paragraphs) = (shown.iter().map(|row| row.tokens).sum::<usize>(), shown.len() - memories);
    let when = if at_once {
        warn_of_copies(common, &shown);
        "is forgotten for good; `halo forget --proofs` shows that it was. Files that you exported are yours to delete"
            .to_owned()
    } else {
        let of = match targets.as_slice() {
            [only] => format!(" -c '{}'", printable(&only.name)),
            _ => String::new(),
        };
        format!(
            "is out of sight, and gone for good after {}; until then `halo forget --keep{of}` takes it back, --waiting \
             lists it, and --now does not wait",
            day(now + grace)
        )
    };
    let words = format!("{}, {tokens} tokens: that {when}\n", counted(paragraphs, memories));
    let done = json!({ "paragraphs": paragraphs, "memories": memories, "tokens": tokens, "now": at_once });
    told(common, &done, &words)
}

/// A day, for people.
fn day(at: i64) -> String {
    jiff::Timestamp::from_millisecond(at).map(|at| at.strftime("%-d %B %Y").to_string()).unwrap_or_default()
}

/// `3 paragraphs and 1 memory`.
fn counted(paragraphs: usize, memories: usize) -> String {
    let memories = match memories {
        0 => None,
        1 => Some("1 memory".to_owned()),
        n => Some(format!("{n} memories")),
    };
    let paragraphs = (paragraphs > 0 || memories.is_none()).then(|| count(paragraphs as u64, "paragraph"));
    paragraphs.into_iter().chain(memories).collect::<Vec<_>>().join(" and ")
}

/// What is due is forgotten, by wish and, where that is turned on, by age: for programs that begin.
pub fn tidy(common: &Common, settings: &Settings) {
    let now = jiff::Timestamp::now().as_millisecond();
    let tidied = grace::due(common, now).and_then(|gone| {
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
    if let Some(name) = &options.conversation {
        return Ok(vec![name.clone()]);
    }
    // What waits is looked for wherever it is, unless it is named by where it stood.
    if !options.everywhere && (selects(options) || !(options.keep || options.waiting)) {
        return Ok(vec![MAIN.to_owned()]);
    }
    let store = common.look_at_store()?.map(|mut store| store.conversations()).transpose()?;
    Ok(store.unwrap_or_default().into_iter().map(|known| known.name).collect())
}

/// What is to go, and the longer words that have what is looked for within them.
fn targets(options: &Options, common: &Common, names: &[String]) -> Result<(Vec<Target>, Vec<String>)> {
    let nothing = !selects(options);
    if nothing && options.matching.is_none() && !options.all {
        bail!(
            "say what is to be forgotten: chunks such as u4.0, --turn, --turns, --matching, --all or --by-age"
        );
    }
    if options.all && !(nothing && options.matching.is_none()) {
        bail!("--all is everything: leave out the chunks, turns or words, or leave out --all");
    }
    if options.everywhere && (!nothing || options.all) {
        bail!("--everywhere goes with --matching: turns and chunks are of one conversation");
    }
    let matcher = options.matching.as_deref().map(Matcher::new).transpose()?;
    let (mut targets, mut longer) = (Vec::new(), BTreeSet::new());
    for name in names {
        let (mut store, mut timeline) = existing(common, name, Access::Read)?;
        if options.all {
            targets.push(Target { name: name.clone(), what: Goes::Everything });
            continue;
        }
        let listed = selected(options, name, &timeline)?;
        let known = memory::all(&mut store, name)?;
        let (mut chunks, mut named) = (listed.clone().unwrap_or_default(), Vec::new());
        if let Some(matcher) = &matcher {
            let says = |text: &str| {
                longer.extend(matcher.longer(text));
                matcher.find(text).is_some()
            };
            chunks = saying(&mut store, name, &mut timeline, listed.as_deref(), says)?;
            // A memory may say what nothing else does any more: somebody has edited it.
            if listed.is_none() {
                let says = known.iter().filter(|memory| matcher.find(&memory.text).is_some());
                named.extend(says.cloned());
            }
        }
        // What is forgotten already is not forgotten again.
        let missing = away(&timeline, &chunks);
        store.bring(name, &mut timeline, &missing)?;
        chunks.retain(|&id| timeline.chunk(id).is_none_or(|chunk| !chunk.is_forgotten()));
        if !chunks.is_empty() || !named.is_empty() {
            let is_named = |memory: &Memory| named.iter().any(|named: &Memory| named.id == memory.id);
            let tells = |memory: &&Memory| memory.tells(&chunks) && !is_named(memory);
            let tell = known.iter().filter(tells).cloned().collect();
            targets.push(Target { name: name.clone(), what: Goes::Some { chunks, tell, named } });
        }
    }
    Ok((targets, longer.into_iter().take(20).collect()))
}

/// Whether chunks or turns are named.
fn selects(options: &Options) -> bool {
    !options.chunks.is_empty() || !options.turn.is_empty() || options.turns.is_some()
}

/// The chunks and turns that are named; none if there are none.
fn selected(options: &Options, name: &str, timeline: &Timeline) -> Result<Option<Vec<ChunkId>>> {
    if !selects(options) {
        return Ok(None);
    }
    let known = |n: u32| timeline.turns().iter().any(|turn| turn.id.0 == n);
    if let Some(missing) = options.turn.iter().find(|&&n| !known(n)) {
        bail!("there is no turn {missing} in '{}'", printable(name));
    }
    if let Some(missing) = options.chunks.iter().find(|&&id| timeline.chunk(id).is_none()) {
        bail!("there is no chunk {missing} in '{}'", printable(name));
    }
    let (from, to) = options.turns.unwrap_or((1, 0));
    let wanted = |turn: TurnId| options.turn.contains(&turn.0) || (from..=to).contains(&turn.0);
    let turns = timeline.turns().iter().map(|turn| turn.id).filter(|&turn| wanted(turn));
    let mut chunks = options.chunks.clone();
    chunks.extend(turns.flat_map(|turn| timeline.turn_chunks(turn)).map(|chunk| chunk.id()));
    chunks.sort();
    chunks.dedup();
    Ok(Some(chunks))
}

fn away(timeline: &Timeline, chunks: &[ChunkId]) -> Vec<ChunkId> {
    let away = |id: &ChunkId| timeline.chunk(*id).is_some_and(|chunk| !chunk.is_here());
    chunks.iter().copied().filter(away).collect()
}

/// The chunks, all or some, that say something.
fn saying(
    store: &mut Database,
    name: &str,
    timeline: &mut Timeline,
    among: Option<&[ChunkId]>,
    mut says: impl FnMut(&str) -> bool,
) -> Result<Vec<ChunkId>> {
    let all: Vec<ChunkId> = match among {
        Some(some) => some.to_vec(),
        None => timeline.chunks().map(|chunk| chunk.id()).collect(),
    };
    let mut found = Vec::new();
    for some in all.chunks(512) {
        let missing = away(timeline, some);
        store.bring(name, timeline, &missing)?;
        found.extend(some.iter().filter(|&&id| timeline.chunk(id).is_some_and(|c| says(&c.text()))));
        timeline.release_dead();
    }
    Ok(found)
}

/// Something that goes, in words.
struct Row {
    conversation: String,
    /// A chunk, or `memory 3`.
    subject: String,
    text: String,
    tokens: usize,
    /// If it is a memory: its number, and what the user has done to it.
    memory: Option<Memory>,
}

/// What would go, in words.
fn show(store: &mut Database, targets: &[Target]) -> Result<Vec<Row>> {
    let mut shown = Vec::new();
    for target in targets {
        let name = &target.name;
        let timeline = store.load(name, Access::Read)?;
        let goes = target.parts(store, &timeline)?;
        shown.extend(store.words(name, &goes.chunks)?.into_iter().map(|gone| Row {
            conversation: name.clone(),
            subject: gone.chunk.to_string(),
            text: gone.text,
            tokens: gone.tokens,
            memory: None,
        }));
        shown.extend(goes.tell.into_iter().chain(goes.named).map(|memory| Row {
            conversation: name.clone(),
            subject: format!("memory {}", memory.id),
            text: memory.text.clone(),
            tokens: 0,
            memory: Some(memory),
        }));
    }
    Ok(shown)
}

fn list(common: &Common, shown: &[Row], matcher: Option<&Matcher>) -> Result<()> {
    if common.json {
        let rows = shown.iter().map(|row| match &row.memory {
            None => json!({
                "conversation": row.conversation, "chunk": row.subject, "tokens": row.tokens, "text": row.text,
            }),
            Some(memory) => json!({
                "conversation": row.conversation, "memory": memory.id, "text": row.text,
                "pinned": memory.pinned, "edited": memory.edited,
            }),
        });
        return print_json(&Value::Array(rows.collect()));
    }
    for row in shown.iter().take(50) {
        let marks = row.memory.iter().flat_map(|memory| {
            [(memory.pinned, "pinned"), (memory.edited, "edited")].into_iter().filter(|(is, _)| *is)
        });
        let marks: String = marks.map(|(_, mark)| format!(" ({mark})")).collect();
        let text = excerpt(&row.text, matcher);
        print(&format!("{}  {}{marks}  {text}\n", printable(&row.conversation), row.subject))?;
    }
    if shown.len() > 50 {
        print(&format!("… and {} more\n", shown.len() - 50))?;
    }
    let tokens: usize = shown.iter().map(|row| row.tokens).sum();
    let memories = shown.iter().filter(|row| row.memory.is_some()).count();
    print(&format!("{}, {tokens} tokens would be forgotten\n", counted(shown.len() - memories, memories)))
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
    let all = matches!(target.what, Goes::Everything);
    let Parts { chunks, tell, named } = target.parts(&mut store, &timeline)?;
    // What is left of the ranges of those that go with the words may be remembered again, by who never saw what is gone.
    let again = tell.iter().filter(|memory| !memory.reflection).map(|memory| memory.span.from).min();
    let memories = [tell, named].concat();
    if let Some(missing) = chunks.iter().find(|&&id| timeline.chunk(id).is_none()) {
        bail!("there is no chunk {missing} in '{}'", printable(name));
    }
    let ids: Vec<u64> = memories.iter().map(|memory| memory.id).collect();
    let rest = waiting::without(waiting::waits(&mut store, name)?, &chunks, &ids);
    let noted =
        Wait { due: wish.now, chunks: chunks.clone(), memories: ids, all, begun: true, ..Wait::default() };
    waiting::put(&mut store, name, &[rest.as_slice(), &[noted]].concat())?;

    // Caches and recordings first: they are found by what is still there.
    let times =
        store.records(name, Kind::Setting)?.into_iter().find(|record| record.key == session::FORGOTTEN);
    let times = times.and_then(|record| record.value.parse::<u64>().ok()).unwrap_or(0) + 1;
    store.put_record(name, Kind::Setting, session::FORGOTTEN, Some(&times.to_string()))?;
    let keys = saved_but_for(&mut store, Some(name), None)?;
    graveyard::keep_only(&data.join("kv"), &keys).context("what the model had saved of it is still there")?;
    let told = memories.iter().map(|memory| memory.span.from.0);
    let from = chunks.iter().map(|id| id.turn.0).chain(told).min().unwrap_or(0);
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
    // Of a conversation that is forgotten with its name, the name is not told either.
    let of = if all { "a conversation" } else { name };
    for gone in &gone {
        audit.note(&format!("{of} {}", gone.chunk), &gone.text, gone.tokens, wish)?;
    }
    for memory in &memories {
        let tokens = memory.text.chars().count().div_ceil(4);
        audit.note(&format!("{of} memory {}", memory.id), &memory.text, tokens, wish)?;
    }
    tell_of_notes(&mut store, name, &gone)?;
    if all {
        store.forget_all(name)?;
    } else {
        if let Some(first) = again.filter(|_| !chunks.is_empty()) {
            memory::form_again(&mut store, name, first)?;
        }
        let keys: Vec<String> = memories.iter().map(Memory::key).collect();
        store.forget(name, &chunks, &keys)?;
        store.load(name, Access::Write)?;
        waiting::put(&mut store, name, &rest)?;
    }
    Ok(gone.len())
}

/// So many characters are hardly said by chance.
const LONG: usize = 12;

/// Takes lines out of what the terminal has kept of what was typed.
fn unwrite(history: &Path, gone: &[Gone]) -> Result<()> {
    let Ok(text) = std::fs::read_to_string(history) else { return Ok(()) };
    let says = |line: &str| {
        let line = line.trim();
        // A short text is said by many lines that have nothing to do with it.
        let of = |text: &str| {
            line == text
                || (text.chars().count() >= LONG && line.contains(text))
                || (line.chars().count() >= LONG && text.contains(line))
        };
        !line.is_empty() && gone.iter().map(|gone| gone.text.trim()).any(|text| !text.is_empty() && of(text))
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

/// The same words may be elsewhere: in a branch, in what another model has read anew, in a copy that was made before mending.
fn warn_of_copies(common: &Common, shown: &[Row]) {
    let long = |row: &&Row| row.memory.is_none() && row.text.trim().chars().count() >= LONG;
    let texts: Vec<String> = shown.iter().filter(long).map(|row| row.text.trim().to_lowercase()).collect();
    let warn = || -> Result<()> {
        let Some(mut store) = common.look_at_store()? else { return Ok(()) };
        let names: Vec<String> = store.conversations()?.into_iter().map(|known| known.name).collect();
        for name in names {
            let mut timeline = store.load(&name, Access::Read)?;
            let there = saying(&mut store, &name, &mut timeline, None, |said| {
                let said = said.to_lowercase();
                texts.iter().any(|text| said.contains(text))
            })?;
            if let Some(first) = there.first() {
                let more =
                    if there.len() > 1 { format!(" and {} more", there.len() - 1) } else { String::new() };
                say(&format!(
                    "the same words are in {first}{more} of '{}': --everywhere --matching forgets them there too",
                    printable(&name)
                ));
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
fn proofs(common: &Common, conversation: Option<&str>) -> Result<()> {
    let data = common.data_folder().context("this system names no data folder: give one with --data")?;
    let mut proofs = audit::proofs(&data)?;
    if let Some(name) = conversation {
        let of = |subject: &str| {
            let what = subject.strip_prefix(name).and_then(|rest| rest.strip_prefix(' '));
            what.is_some_and(|what| what.starts_with("memory ") || !what.contains(' '))
        };
        proofs.retain(|(proof, _)| of(&proof.subject));
    }
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
