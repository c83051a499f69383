//! `halo forget`: flags, confirmation and output. [`ForgetService`] does the work.

mod backend;

pub use backend::kv_keys_except;

use super::conversations::{DEFAULT_CONVERSATION, open_existing};
use super::rooms::shell_quote;
use crate::env::Env;
use crate::output::{format_day, pluralize, print_json, print_notice, print_stdout, sanitize_terminal_text};
use crate::settings::Settings;
use anyhow::{Result, bail};
use halo_agents::forgetting::ForgettingResult;
use halo_agents::lethe::RetentionPolicy;
use halo_core::Error;
use halo_core::row_store::RowStore;
use halo_core::store::{Access, Store};
use halo_core::token::ChunkId;
use halo_engine::forget::{
    CancelledForget, ForgetPlan, ForgetPreviewRow, ForgetProofList, ForgetQuery, ForgetReport,
    ForgetSelection, ForgetService, ForgetSubject, ForgetTiming, ForgetWarning, ScheduledForgetReport,
    StoreRetention, WholeWordMatcher, subject_item,
};
use halo_engine::session::Session;
use halo_worlds::world_store;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};

#[derive(clap::Args)]
pub struct ForgetArgs {
    /// Conversation name [default: main; with --cancel, --pending and --proofs: all]
    #[arg(short = 'c', long = "conversation", value_name = "NAME")]
    conversation: Option<String>,
    /// Chunks to erase: role, turn and paragraph, such as u4.0
    #[arg(value_name = "CHUNK")]
    chunks: Vec<ChunkId>,
    /// Erase a whole turn
    #[arg(long, value_name = "N")]
    turn: Vec<u32>,
    /// Erase a range of turns, inclusive, such as 4-9
    #[arg(long, value_name = "FROM-TO", value_parser = parse_turn_range)]
    turns: Option<(u32, u32)>,
    /// Erase every paragraph and memory that contains these words (whole words, case-insensitive); with chunks or turns,
    /// only among those
    #[arg(long, value_name = "WORDS")]
    matching: Option<String>,
    /// Erase the whole conversation, including its name
    #[arg(long)]
    all: bool,
    /// Search all conversations (with --matching)
    #[arg(long, conflicts_with = "conversation")]
    everywhere: bool,
    /// Erase what is too old, as set by lethe.hot_days, lethe.warm_days and lethe.compost_days
    #[arg(long, conflicts_with_all = ["chunks", "turn", "turns", "matching", "all", "conversation", "everywhere", "now"])]
    by_age: bool,
    /// Print what would be erased, including memories, and erase nothing
    #[arg(long)]
    dry_run: bool,
    /// Skip the confirmation prompt
    #[arg(long, short = 'y')]
    yes: bool,
    /// Erase immediately, without the grace period (lethe.grace_days)
    #[arg(long)]
    now: bool,
    /// Cancel pending erasures: all, or those of the given chunks and turns
    #[arg(long, conflicts_with_all = ["by_age", "now", "due", "proofs", "all", "matching", "dry_run"])]
    cancel: bool,
    /// List pending erasures and their dates
    #[arg(long, conflicts_with_all = ["by_age", "now", "due", "proofs", "cancel", "all", "matching", "chunks", "turn", "turns", "dry_run"])]
    pending: bool,
    /// Erase what has reached the end of its grace period; `halo chat` and `halo serve` do so at start
    #[arg(long, conflicts_with_all = ["by_age", "now", "proofs", "all", "matching", "chunks", "turn", "turns", "dry_run", "conversation", "everywhere"])]
    due: bool,
    /// List proofs of erasure and verify them
    #[arg(long, conflicts_with_all = ["by_age", "now", "all", "matching", "chunks", "turn", "turns", "dry_run", "everywhere"])]
    proofs: bool,
}

fn parse_turn_range(text: &str) -> Result<(u32, u32), String> {
    let ends = text.split_once('-').and_then(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)));
    ends.filter(|(from, to)| from <= to).ok_or_else(|| format!("'{text}' is not FROM-TO, such as 4-9"))
}

impl ForgetArgs {
    fn selection(&self) -> ForgetSelection {
        ForgetSelection { chunks: self.chunks.clone(), turns: self.turn.clone(), turn_range: self.turns }
    }

    fn query(&self) -> Result<ForgetQuery> {
        let selection = self.selection();
        let is_part = !selection.is_empty() || self.matching.is_some();
        if !is_part && !self.all {
            bail!(
                "nothing is selected: name chunks such as u4.0, or use --turn, --turns, --matching, --all or --by-age"
            );
        }
        if self.all && is_part {
            bail!("--all erases everything: leave out the chunks, turns and words, or leave out --all");
        }
        if self.everywhere && (!selection.is_empty() || self.all) {
            bail!("--everywhere goes with --matching: turns and chunks belong to one conversation");
        }
        if self.all {
            return Ok(ForgetQuery::All);
        }
        let matching = self.matching.as_deref().map(WholeWordMatcher::new).transpose()?;
        Ok(ForgetQuery::Part { selection, matching })
    }

    /// The conversations that are searched, each of which must exist.
    fn conversations(&self, env: &Env) -> Result<Vec<String>> {
        let all_pending = (self.cancel || self.pending) && self.selection().is_empty();
        if !self.everywhere && (self.conversation.is_some() || !all_pending) {
            let name = self.conversation.as_deref().unwrap_or(DEFAULT_CONVERSATION);
            open_existing(env, name, Access::Read)?;
            return Ok(vec![name.to_owned()]);
        }
        let summaries =
            env.open_store_read_only()?.map(|mut store| store.list_conversations()).transpose()?;
        Ok(summaries.unwrap_or_default().into_iter().map(|summary| summary.name).collect())
    }
}

fn now_millis() -> i64 {
    jiff::Timestamp::now().as_millisecond()
}

pub fn run(args: &ForgetArgs, env: &Env) -> Result<()> {
    let service = ForgetService::new(env);
    if args.proofs {
        return print_proofs(&service, env, args.conversation.as_deref());
    }
    if args.due {
        let erased = erase_due(&service)?;
        return print_erased(env, erased);
    }
    if args.by_age {
        return forget_by_age(args, env, &service);
    }
    if args.cancel && args.everywhere && !args.selection().is_empty() {
        bail!("chunks and turns belong to one conversation: leave out --everywhere, or name none");
    }
    if args.cancel || args.pending {
        let names = args.conversations(env)?;
        return match args.cancel {
            true => cancel(args, env, &service, &names),
            false => print_pending(env, &service, &names),
        };
    }
    let query = args.query()?;
    let names = args.conversations(env)?;
    let plans: Vec<ForgetPlan> =
        names.iter().map(|name| service.plan(name, &query)).collect::<Result<_, _>>()?;
    if let ForgetQuery::Part { matching: Some(words), .. } = &query
        && args.everywhere
    {
        warn_of_worlds(env, words)?;
    }
    let longer: BTreeSet<&str> =
        plans.iter().flat_map(|plan| &plan.longer_words).map(String::as_str).collect();
    let longer = longer.into_iter().take(20).map(sanitize_terminal_text).collect::<Vec<_>>().join(", ");
    let plans: Vec<ForgetPlan> = plans.into_iter().filter(|plan| !plan.rows.is_empty()).collect();
    if plans.is_empty() {
        if let ForgetQuery::Part { matching: Some(words), .. } = &query
            && args.everywhere
            && args.yes
            && !args.dry_run
        {
            let lines = service.forget_typed_lines(words)?;
            if lines > 0 {
                let text = format!("{} of the input history erased\n", pluralize(lines as u64, "line"));
                return print_result(env, &json!({ "typed_lines": lines }), &text);
            }
        }
        match longer.as_str() {
            "" => bail!("nothing matches: nothing would be forgotten"),
            longer => bail!("no text contains that as whole words; longer words contain it: {longer}"),
        }
    }
    if args.dry_run || !args.yes {
        let matcher = match &query {
            ForgetQuery::Part { matching, .. } => matching.as_ref(),
            ForgetQuery::All => None,
        };
        print_preview(env, &plans, matcher)?;
        if !longer.is_empty() {
            print_notice(&format!("longer words contain it too and do not match: {longer}"));
        }
        if args.dry_run {
            return Ok(());
        }
        require_confirmation()?;
    }
    let timing = if args.now { ForgetTiming::Now } else { ForgetTiming::AfterGrace };
    let report = service.forget(&plans, timing, now_millis())?;
    print_report(env, &plans, &report)
}

/// Says which worlds contain words: single messages of a world cannot be erased.
fn warn_of_worlds(env: &Env, words: &WholeWordMatcher) -> Result<()> {
    let Some(mut store) = env.open_store_read_only()? else { return Ok(()) };
    for world in store.list_namespaces()? {
        let mut rows = usize::from(words.find(&world.name).is_some());
        for kind in world_store::ROW_KINDS {
            let found = store.load_rows(&world.name, &kind, world_store::ALL_KEYS, usize::MAX)?;
            rows += found.iter().filter(|row| has_words(&row.value, words)).count();
        }
        if rows > 0 {
            let name = sanitize_terminal_text(&world.name);
            print_notice(&format!(
                "the world '{name}' contains that in {}, which are not erased: `halo rooms delete {} --yes` deletes \
                 all of the world",
                pluralize(rows as u64, "place"),
                shell_quote(&world.name)
            ));
        }
    }
    Ok(())
}

/// Whether a text or a key of a row contains words. A row that is no JSON is one text.
fn has_words(row: &str, words: &WholeWordMatcher) -> bool {
    fn find(value: &Value, words: &WholeWordMatcher) -> bool {
        match value {
            Value::String(text) => words.find(text).is_some(),
            Value::Array(all) => all.iter().any(|value| find(value, words)),
            Value::Object(map) => {
                map.iter().any(|(key, value)| words.find(key).is_some() || find(value, words))
            }
            Value::Number(number) => words.find(&number.to_string()).is_some(),
            Value::Null | Value::Bool(_) => false,
        }
    }
    let value = serde_json::from_str(row).unwrap_or_else(|_| Value::String(row.to_owned()));
    find(&value, words)
}

/// Erases what is due, by request and, where that is turned on, by age: for programs that start.
pub fn run_scheduled_forgetting(env: &Env, settings: &Settings) {
    let service = ForgetService::new(env);
    let mut retention = StoreRetention::new(&service, enabled_policy(settings), now_millis());
    let erased = retention.apply();
    match erased.and_then(|erased| report_errors(&mut retention.report, erased)) {
        Ok(0) => {}
        Ok(erased) => print_notice(&format!(
            "{} erased permanently, as scheduled (`halo forget --proofs` lists them)",
            pluralize(erased as u64, "paragraph")
        )),
        Err(error) => print_notice(&format!("text that is due was not erased: {error:#}")),
    }
}

/// Runs a forgetting cycle in an open conversation, if its context pressure is high.
pub fn relieve_pressure(session: &mut Session, env: &Env, settings: &Settings) {
    if !session.is_under_pressure() {
        return;
    }
    let service = ForgetService::new(env);
    let retention = StoreRetention::new(&service, enabled_policy(settings), now_millis());
    let mut retention = retention.without(session.name());
    match session.run_forgetting_cycle(&mut retention) {
        Ok(Some(result)) => {
            count_erased(&retention.report);
            print_notice(&cycle_text(&result));
        }
        Ok(None) => {}
        Err(error) => print_notice(&format!("the forgetting cycle failed: {error}")),
    }
}

/// `context pressure 92 %, now 79 %: 3 paragraphs pruned, 0 erased, 1 memory disabled`.
fn cycle_text(result: &ForgettingResult) -> String {
    let percent = |pressure: f64| (pressure * 100.0).round();
    let disabled = list_counts(0, result.deactivated().len(), 0);
    let disabled = if result.deactivated().is_empty() { "no memory".to_owned() } else { disabled };
    format!(
        "context pressure {} %, now {} %: {} pruned, {} erased, {disabled} disabled",
        percent(result.initial_pressure),
        percent(result.final_pressure),
        pluralize(result.pruned() as u64, "paragraph"),
        result.forgotten(),
    )
}

/// The chunks that were erased, after printing what went wrong elsewhere; an error where nothing was erased.
fn report_errors(report: &mut ScheduledForgetReport, erased: usize) -> Result<usize, Error> {
    match report.error.take() {
        Some(error) if erased == 0 => return Err(error),
        Some(error) => print_notice(&format!("not all text that is due was erased: {error}")),
        None => {}
    }
    Ok(count_erased(report))
}

/// The ages at which text is erased, if that is turned on.
pub fn enabled_policy(settings: &Settings) -> Option<RetentionPolicy> {
    settings.lethe_enabled.then(|| retention_policy(settings))
}

fn erase_due(service: &ForgetService<'_>) -> Result<usize> {
    let mut report = service.erase_due(now_millis())?;
    let erased = report.chunks;
    Ok(report_errors(&mut report, erased)?)
}

/// Prints the warnings of a report, and returns how many chunks were erased.
fn count_erased(report: &ScheduledForgetReport) -> usize {
    print_warnings(&report.warnings, &report.new_names);
    report.chunks
}

fn retention_policy(settings: &Settings) -> RetentionPolicy {
    let days = |n: i64| u32::try_from(n).unwrap_or(u32::MAX);
    RetentionPolicy {
        hot: days(settings.lethe_hot_days.0),
        warm: days(settings.lethe_warm_days.0),
        compost: days(settings.lethe_compost_days.0),
    }
}

fn forget_by_age(args: &ForgetArgs, env: &Env, service: &ForgetService<'_>) -> Result<()> {
    let policy = retention_policy(&env.load_settings()?.settings);
    let now = now_millis();
    if args.dry_run || !args.yes {
        print_by_age(env, service, &policy, now)?;
        if args.dry_run {
            return Ok(());
        }
        require_confirmation()?;
    }
    print_erased(env, count_erased(&service.forget_by_age(&policy, now)?))
}

fn cancel(args: &ForgetArgs, env: &Env, service: &ForgetService<'_>, names: &[String]) -> Result<()> {
    let mut total = CancelledForget::default();
    for name in names {
        let cancelled = service.cancel(name, &args.selection())?;
        total.chunks += cancelled.chunks;
        total.memories += cancelled.memories;
    }
    let text = format!("{} kept\n", list_counts(total.chunks, total.memories, 0));
    print_result(env, &json!({ "kept": total.chunks, "memories": total.memories }), &text)
}

fn require_confirmation() -> Result<()> {
    if std::io::stdin().is_terminal() && ask_confirmation()? {
        return Ok(());
    }
    bail!("nothing was forgotten: add --yes to confirm, or --dry-run to look only")
}

fn ask_confirmation() -> Result<bool> {
    eprint!("Erase this permanently? Type yes: ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(answer.trim().eq_ignore_ascii_case("yes"))
}

// Output.

/// `3 paragraphs and 1 memory`.
fn list_counts(paragraphs: usize, memories: usize, other_texts: usize) -> String {
    let memories = match memories {
        0 => None,
        1 => Some("1 memory".to_owned()),
        n => Some(format!("{n} memories")),
    };
    let others = (other_texts > 0).then(|| pluralize(other_texts as u64, "other text"));
    let rest: Vec<String> = memories.into_iter().chain(others).collect();
    let paragraphs = (paragraphs > 0 || rest.is_empty()).then(|| pluralize(paragraphs as u64, "paragraph"));
    paragraphs.into_iter().chain(rest).collect::<Vec<_>>().join(" and ")
}

/// Some words of a text: those around a match, or the first.
fn excerpt(text: &str, matcher: Option<&WholeWordMatcher>) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let at = matcher.and_then(|matcher| matcher.find(&line)).unwrap_or(0);
    let from = at.saturating_sub(25);
    let part: String = line.chars().skip(from).take(70).collect();
    let before = if from > 0 { "…" } else { "" };
    let after = if line.chars().count() > from + 70 { "…" } else { "" };
    sanitize_terminal_text(&format!("{before}{part}{after}"))
}

fn print_result(env: &Env, as_json: &Value, text: &str) -> Result<()> {
    if env.json { print_json(as_json) } else { print_stdout(text) }
}

fn print_erased(env: &Env, chunks: usize) -> Result<()> {
    let text = format!("{} erased permanently\n", pluralize(chunks as u64, "paragraph"));
    print_result(env, &json!({ "forgotten": chunks }), &text)
}

fn print_warnings(warnings: &[ForgetWarning], new_names: &[(String, String)]) {
    for warning in warnings {
        let hint = match warning {
            ForgetWarning::Notes { .. } => {
                "; look at them on the page, or with /notes; --matching erases them"
            }
            ForgetWarning::ClientSummaries { .. } => "; --matching erases them",
            ForgetWarning::Copies { .. } => "; --everywhere --matching erases it there too",
            ForgetWarning::StoreBackup(_) | ForgetWarning::CaptureOutside(_) => "; delete it yourself",
            ForgetWarning::ServerLog | ForgetWarning::NotSearched(_) => "",
        };
        print_notice(&format!("{warning}{hint}"));
    }
    for (_, new_name) in new_names {
        print_notice(&format!("a conversation was named after the erased text: it is '{new_name}' now"));
    }
}

fn print_report(env: &Env, plans: &[ForgetPlan], report: &ForgetReport) -> Result<()> {
    print_warnings(&report.warnings, &report.new_names);
    let ForgetReport { due_at, chunks, memories, other_texts, tokens, .. } = report;
    let what = format!("{}, {tokens} tokens", list_counts(*chunks, *memories, *other_texts));
    let text = match due_at {
        None => format!(
            "{what}: erased permanently; `halo forget --proofs` lists the proofs. Files that you exported are not changed\n"
        ),
        Some(due_at) => {
            let conversation = match plans {
                [only] => format!(" -c '{}'", sanitize_terminal_text(&only.target.conversation)),
                _ => String::new(),
            };
            format!(
                "{what}: hidden now, and erased permanently on {}; until then `halo forget --cancel{conversation}` keeps \
                 it, --pending lists it, and --now does not wait\n",
                format_day(*due_at)
            )
        }
    };
    let as_json = json!({
        "paragraphs": chunks, "memories": memories, "other_texts": other_texts, "tokens": tokens,
        "now": due_at.is_none(),
    });
    print_result(env, &as_json, &text)
}

fn print_preview(env: &Env, plans: &[ForgetPlan], matcher: Option<&WholeWordMatcher>) -> Result<()> {
    let rows: Vec<&ForgetPreviewRow> = plans.iter().flat_map(|plan| &plan.rows).collect();
    if env.json {
        let values = rows.iter().map(|row| match &row.subject {
            ForgetSubject::Chunk(chunk) => json!({
                "conversation": row.conversation, "chunk": chunk.to_string(), "tokens": row.tokens, "text": row.text,
            }),
            ForgetSubject::Memory(memory) => json!({
                "conversation": row.conversation, "memory": memory.id, "text": row.text,
                "pinned": memory.pinned, "edited": memory.edited,
            }),
            ForgetSubject::Record(record) => json!({
                "conversation": row.conversation, "record": record.describe(), "text": row.text,
            }),
            ForgetSubject::Name => json!({ "conversation": row.conversation, "name": row.text }),
        });
        return print_json(&Value::Array(values.collect()));
    }
    for row in rows.iter().take(50) {
        let subject = match &row.subject {
            ForgetSubject::Chunk(chunk) => chunk.to_string(),
            ForgetSubject::Memory(memory) => {
                let pinned = if memory.pinned { " (pinned)" } else { "" };
                let edited = if memory.edited { " (edited)" } else { "" };
                format!("memory {}{pinned}{edited}", memory.id)
            }
            ForgetSubject::Record(record) => record.describe().to_owned(),
            ForgetSubject::Name => "name".to_owned(),
        };
        let conversation = sanitize_terminal_text(&row.conversation);
        print_stdout(&format!("{conversation}  {subject}  {}\n", excerpt(&row.text, matcher)))?;
    }
    if rows.len() > 50 {
        print_stdout(&format!("… and {} more\n", rows.len() - 50))?;
    }
    let tokens: usize = rows.iter().map(|row| row.tokens).sum();
    let memories = rows.iter().filter(|row| row.subject.is_memory()).count();
    let chunks = rows.iter().filter(|row| row.subject.is_chunk()).count();
    print_stdout(&format!(
        "{}, {tokens} tokens would be erased\n",
        list_counts(chunks, memories, rows.len() - chunks - memories)
    ))
}

fn print_pending(env: &Env, service: &ForgetService<'_>, names: &[String]) -> Result<()> {
    let (mut rows, mut text) = (Vec::new(), String::new());
    for name in names {
        for item in service.list_pending(name)? {
            let chunks: Vec<String> = item.chunks.iter().map(|(id, _)| id.to_string()).collect();
            rows.push(json!({
                "conversation": name, "due": item.due_at, "chunks": chunks, "memories": item.memories,
                "other_texts": item.other_texts, "all": item.whole_conversation,
            }));
            let what = list_counts(item.chunks.len(), item.memories.len(), item.other_texts);
            text += &format!("{}: {what} until {}\n", sanitize_terminal_text(name), format_day(item.due_at));
            for (id, chunk_text) in item.chunks.iter().take(20) {
                text += &format!("    {id}  {}\n", excerpt(chunk_text, None));
            }
        }
    }
    let text = if text.is_empty() { "nothing is pending\n".to_owned() } else { text };
    print_result(env, &Value::Array(rows), &text)
}

fn print_by_age(env: &Env, service: &ForgetService<'_>, policy: &RetentionPolicy, now: i64) -> Result<()> {
    let previews = service.preview_by_age(policy, now)?;
    if env.json {
        let rows = previews.iter().map(|preview| {
            json!({
                "conversation": preview.conversation, "turns": preview.turns.iter().map(|turn| turn.0).collect::<Vec<_>>(),
                "recordings": preview.captures, "saved_memory": preview.saved_kv, "months": preview.months,
                "memories": preview.memories,
            })
        });
        return print_json(&Value::Array(rows.collect()));
    }
    if previews.is_empty() {
        return print_stdout("there are no conversations\n");
    }
    for preview in previews {
        let memories = match preview.memories {
            0 => String::new(),
            1 => " and 1 memory".to_owned(),
            n => format!(" and {n} memories"),
        };
        print_stdout(&format!(
            "{}: the text of {}{memories} would be erased\n",
            sanitize_terminal_text(&preview.conversation),
            pluralize(preview.turns.len() as u64, "turn")
        ))?;
    }
    Ok(())
}

fn print_proofs(service: &ForgetService<'_>, env: &Env, conversation: Option<&str>) -> Result<()> {
    let ForgetProofList { path, mut proofs, unreadable_lines } = service.proofs()?;
    if let Some(name) = conversation {
        let found = env.open_store_read_only()?.map(|mut store| store.find_conversation(name)).transpose()?;
        // Earlier versions wrote the name.
        let id = found.flatten().map(|summary| format!("conversation {}", summary.id));
        let is_of = |subject: &str| {
            subject_item(subject, name).is_some()
                || id.as_ref().is_some_and(|id| subject_item(subject, id).is_some())
        };
        proofs.retain(|(proof, _)| is_of(&proof.subject));
    }
    for line in unreadable_lines {
        print_notice(&format!(
            "line {line} of {} is no proof: writing it was interrupted, or it was changed",
            path.display()
        ));
    }
    if env.json {
        let rows = proofs.iter().map(|(proof, is_valid)| {
            json!({
                "subject": proof.subject, "by": proof.requested_by, "at": proof.forgotten_at, "tokens": proof.tokens, "salt": proof.salt,
                "content": proof.content_hash, "seal": proof.signature, "sound": is_valid,
            })
        });
        return print_json(&Value::Array(rows.collect()));
    }
    if proofs.is_empty() {
        print_notice("nothing was ever erased permanently here");
    }
    for (proof, is_valid) in proofs {
        let at =
            jiff::Timestamp::from_millisecond(proof.forgotten_at).map(|at| at.strftime("%F %T").to_string());
        let validity =
            if is_valid { "valid" } else { "NOT VALID: it was changed, or signed with another key" };
        print_stdout(&format!(
            "{}  {}  {} tokens, by {}  {validity}\n",
            at.unwrap_or_default(),
            sanitize_terminal_text(&proof.subject),
            proof.tokens,
            proof.requested_by
        ))?;
    }
    Ok(())
}
