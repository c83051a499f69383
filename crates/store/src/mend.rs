//! How what the [doctor](crate::doctor) found is mended. Nothing is, without a copy of how it was.

use crate::database::{Database, Location};
use crate::doctor::{Cure, Finding, SWEEP, last_seq, listed, nameless, readable_state, seq_of};
use crate::files::{beside, create_private, lock_out, remove};
use crate::rescue::rescue;
use crate::rows;
use crate::sql::{Cell, Sql, SqlError};
use halo_core::body::sum_of;
use halo_core::change::Change;
use halo_core::seams::{Durability, Embedding, Entry, Kind, SeamError};
use halo_core::timeline::Timeline;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

impl Database {
    /// Mends what was found, after a copy of how it was (a file beside it, on a server another schema); returns where
    /// that is, and what was done, in words.
    ///
    /// # Errors
    /// When somebody else is using it, or it cannot be written.
    pub fn mend(&mut self, findings: &[Finding]) -> Result<(Option<String>, Vec<String>), SeamError> {
        let what = "mending the store";
        for name in findings.iter().filter_map(|f| f.conversation.as_deref()) {
            self.claim(name).map_err(|e| e.doing(what))?;
            self.forget_open(name);
        }
        if let Location::Sqlite(path) = self.location().clone()
            && findings.iter().any(|f| f.cure == Cure::FirstPage)
        {
            self.sql.close();
            let kept = revive(&path).map_err(|e| e.doing(what))?;
            let mut revived = Database::open(self.location())?;
            let more = revived.examine(&mut |_, _| {})?;
            let mut done = vec!["the first page of the file was made anew".to_owned()];
            if !more.is_empty() {
                done.extend(revived.mend(&more)?.1);
            }
            return Ok((Some(kept.display().to_string()), done));
        }
        if findings.iter().any(|f| f.cure == Cure::Salvage) {
            return self.salvage().map_err(|e| e.doing(what));
        }
        if findings.iter().all(|f| f.cure == Cure::None) {
            return Ok((None, Vec::new()));
        }
        let backup = Some(self.sql.backup().map_err(|e| e.doing("copying the store before mending"))?);
        let cures: BTreeSet<(Option<&str>, Cure)> =
            findings.iter().map(|f| (f.conversation.as_deref(), f.cure)).collect();
        let mut done = Vec::new();
        for (name, cure) in cures {
            let mended = self.within(Some(Durability::Now), |sql| cured(sql, name, cure));
            done.extend(mended.map_err(|e| e.doing(what))?);
        }
        Ok((backup, done))
    }

    /// Moves all that can be read to a new file, which takes the place of this one.
    fn salvage(&mut self) -> Result<(Option<String>, Vec<String>), SqlError> {
        let Location::Sqlite(path) = self.location().clone() else {
            return Err(SqlError::refused("a server looks after its own files"));
        };
        let fresh_path = beside(&path, "mended");
        self.sql.release();
        let _out = lock_out(&path)?;
        let done = self.salvage_to(&path, &fresh_path);
        if done.is_err() {
            remove(&fresh_path);
        }
        done
    }

    fn salvage_to(
        &mut self,
        path: &Path,
        fresh_path: &Path,
    ) -> Result<(Option<String>, Vec<String>), SqlError> {
        let mut fresh = Database::open(&Location::Sqlite(fresh_path.to_owned()))
            .map_err(|e| SqlError::refused(e.to_string()))?;
        let mut done = Vec::new();
        let (mut all, _) = listed(&mut *self.sql)?;
        let known = all.iter().map(|(id, ..)| *id).collect();
        let nameless = nameless(&mut *self.sql, &known)?;
        all.extend(nameless);
        for (id, name) in all {
            let (timeline, how) = match readable_state(&mut *self.sql, id) {
                Ok(timeline) => (timeline, None),
                Err(_) => match whole_replay(&mut *self.sql, id) {
                    Ok(timeline) => (timeline, Some(None)),
                    Err(_) => rescue(&mut *self.sql, id).map(|(t, rescued)| (t, Some(Some(rescued))))?,
                },
            };
            let log = whole_log(&mut *self.sql, id, &timeline);
            done.push(match (&how, &log) {
                (None, Some(_)) => format!("'{name}': all of it could be read"),
                (None, None) => format!("'{name}': no word is lost, the reasons of what happened are"),
                (Some(None), _) => format!("'{name}': made again from its log, nothing is lost"),
                (Some(Some(rescued)), _) => format!("'{name}': put together again: {rescued}"),
            });
            let old = &mut *self.sql;
            fresh.within(Some(Durability::Now), |new| move_over(old, new, id, &name, &timeline, log))?;
        }
        let kept = beside(path, "damaged");
        drop(fresh);
        self.sql.close();
        let swap = || -> std::io::Result<()> {
            std::fs::rename(path, &kept)?;
            for end in ["-wal", "-shm"] {
                let with = |p: &Path| PathBuf::from(format!("{}{end}", p.display()));
                if with(path).exists() {
                    std::fs::rename(with(path), with(&kept))?;
                }
            }
            std::fs::rename(fresh_path, path)
        };
        swap().map_err(|e| SqlError::refused(format!("the mended file cannot take its place: {e}")))?;
        Ok((Some(kept.display().to_string()), done))
    }

    /// Makes the first page of a file anew, where that alone keeps it from opening; the file as it was is kept
    /// beside it, and named.
    ///
    /// # Errors
    /// When that does not help; the file is then as it was.
    pub fn revive(path: &Path) -> Result<PathBuf, SeamError> {
        revive(path).map_err(|e| e.doing("mending the store"))
    }
}

/// Mends one conversation, or the store; says what was done.
fn cured(sql: &mut dyn Sql, name: Option<&str>, cure: Cure) -> Result<Option<String>, SqlError> {
    let Some(name) = name else {
        if cure == Cure::Adopt {
            return adopt(sql).map(Some);
        }
        for [_, delete] in SWEEP {
            sql.run(delete, &[])?;
        }
        return Ok(Some("took the rows that belong to nothing out".into()));
    };
    let id = rows::find(sql, name)?.ok_or_else(|| rows::no_conversation(name))?;
    let seq = seq_of(sql, id)?;
    let done = match cure {
        Cure::State => {
            let timeline = rows::replay(sql, id)?;
            let last = last_seq(sql, id)?;
            rows::write_all(sql, id, seq.max(last), &timeline)?;
            note_mentions(sql, id)?;
            "made again from its log"
        }
        Cure::Log => {
            let timeline = readable_state(sql, id)?;
            retell(sql, id, seq, &timeline)?;
            "its log was told anew; the reasons of what happened are lost"
        }
        Cure::Rescue => {
            let (timeline, rescued) = rescue(sql, id)?;
            retell(sql, id, seq, &timeline)?;
            return Ok(Some(format!("'{name}': put together again: {rescued}")));
        }
        Cure::Accept => {
            accept_records(sql, id)?;
            "its records are kept as they stand"
        }
        Cure::Mentions => {
            note_mentions(sql, id)?;
            "noted anew which entries name which chunk"
        }
        Cure::Drop => {
            drop_embeddings(sql, id)?;
            "dropped embeddings that cannot be read"
        }
        Cure::Sweep | Cure::Adopt | Cure::Salvage | Cure::FirstPage | Cure::None => return Ok(None),
    };
    Ok(Some(format!("'{name}': {done}")))
}

/// Gives conversations that have lost their name another, and makes them again from their log.
fn adopt(sql: &mut dyn Sql) -> Result<String, SqlError> {
    let known = listed(sql)?.0.into_iter().map(|(id, _)| id).collect();
    let nameless = nameless(sql, &known)?;
    for (&id, name) in &nameless {
        let insert = "INSERT INTO conversation (id, name, model, created, used, seq, turns, places, tokens, live) \
                      VALUES ($1, $2, '', $3, $4, 0, 0, 0, 0, 0)";
        let now = Cell::Int(rows::now());
        sql.run(insert, &[Cell::Int(id), Cell::Text(name), now, now])?;
        let last = last_seq(sql, id)?;
        let state = readable_state(sql, id);
        match (rows::replay(sql, id), state) {
            (Ok(told), Ok(state)) if told.state_hash() == state.state_hash() => {
                rows::write_all(sql, id, last, &state)?;
            }
            // Where the log may have lost its end, the state is what was last seen.
            (_, Ok(state)) => retell(sql, id, last, &state)?,
            (Ok(told), Err(_)) => rows::write_all(sql, id, last, &told)?,
            (Err(_), Err(_)) => {
                let (timeline, _) = rescue(sql, id)?;
                retell(sql, id, last, &timeline)?;
            }
        }
        note_mentions(sql, id)?;
    }
    let names: Vec<_> = nameless.values().map(|name| format!("'{name}'")).collect();
    Ok(format!("found again, under other names: {}", names.join(", ")))
}

/// Which entries name which chunk, noted anew.
fn note_mentions(sql: &mut dyn Sql, id: i64) -> Result<(), SqlError> {
    sql.run("DELETE FROM mention WHERE conversation = $1", &[Cell::Int(id)])?;
    let mut named = Vec::new();
    rows::entries(sql, id, &mut |entry| {
        named.push((entry.seq, entry.change));
        Ok(())
    })?;
    named.iter().try_for_each(|(seq, change)| rows::insert_mentions(sql, id, seq.cast_signed(), change))
}

fn drop_embeddings(sql: &mut dyn Sql, id: i64) -> Result<(), SqlError> {
    let mut bad = Vec::new();
    let select = "SELECT turn, sentence, role, embedder, sum, vector FROM embedding WHERE conversation = $1";
    sql.query(select, &[Cell::Int(id)], &mut |row| {
        if sum_of(row.blob(5)?) != row.int(4)?.cast_unsigned() {
            bad.push((row.text(3)?.to_owned(), rows::chunk_id(&row, 0)?));
        }
        Ok(())
    })?;
    bad.iter().try_for_each(|(embedder, chunk)| {
        rows::put_embedding(sql, id, embedder, &Embedding { chunk: *chunk, of: 0, vector: vec![] }, 0)
    })
}

/// Sums records anew, as they stand.
fn accept_records(sql: &mut dyn Sql, id: i64) -> Result<(), SqlError> {
    let mut all = Vec::new();
    let select = "SELECT kind, key, value, at FROM record WHERE conversation = $1";
    sql.query(select, &[Cell::Int(id)], &mut |row| {
        all.push((row.text(0)?.to_owned(), row.text(1)?.to_owned(), row.text(2)?.to_owned(), row.int(3)?));
        Ok(())
    })?;
    for (kind, key, value, at) in all {
        if let Some(kind) = Kind::ALL.into_iter().find(|k| k.name() == kind) {
            rows::put_record(sql, id, kind, &key, Some(&value), at)?;
        }
    }
    Ok(())
}

/// Puts a log that leads to the state in the place of the one that is there.
fn retell(sql: &mut dyn Sql, id: i64, seq: u64, timeline: &Timeline) -> Result<(), SqlError> {
    let after = seq.max(last_seq(sql, id).unwrap_or(0));
    sql.run("DELETE FROM log WHERE key BETWEEN $1 AND $2", &rows::keys(id))?;
    let last = write_log(sql, id, after, &timeline.retell())?;
    rows::write_all(sql, id, last, timeline)?;
    note_mentions(sql, id)
}

/// Writes entries behind `after`; numbers are never used twice.
fn write_log(sql: &mut dyn Sql, id: i64, after: u64, changes: &[Change]) -> Result<u64, SqlError> {
    let (mut seq, now) = (after, rows::now());
    // Even where nothing is left, the log ends with the conversation's own number.
    let nothing = [Change::Batch(Vec::new())];
    for change in if changes.is_empty() { &nothing[..] } else { changes } {
        seq += 1;
        rows::insert_entry(sql, rows::key(id, seq as usize), now, change)?;
    }
    Ok(seq)
}

/// The state that the log leads to, if the log has its end.
fn whole_replay(sql: &mut dyn Sql, id: i64) -> Result<Timeline, SqlError> {
    let timeline = rows::replay(sql, id)?;
    // Of a conversation that has lost its row, the end is not known.
    let seq = seq_of(sql, id).unwrap_or_default();
    if last_seq(sql, id)? < seq {
        return Err(SqlError::damaged("its log has lost its end"));
    }
    Ok(timeline)
}

type Log = Vec<Entry>;

/// The log, if it can be read and leads to the state.
fn whole_log(sql: &mut dyn Sql, id: i64, timeline: &Timeline) -> Option<Log> {
    let (mut log, mut told) = (Vec::new(), Timeline::new());
    let read = rows::entries(sql, id, &mut |entry| {
        told.apply(&entry.change).map_err(|e| SqlError::damaged(e.to_string()))?;
        log.push(entry);
        Ok(())
    });
    (read.is_ok() && told.state_hash() == timeline.state_hash()).then_some(log)
}

/// Writes a conversation, and what can be read beside it, into another database.
fn move_over(
    old: &mut dyn Sql,
    new: &mut dyn Sql,
    id: i64,
    name: &str,
    timeline: &Timeline,
    log: Option<Log>,
) -> Result<(), SqlError> {
    let (mut model, mut created, mut seq) = (String::new(), rows::now(), 0);
    let select = "SELECT seq, created, model FROM conversation WHERE id = $1";
    // What cannot be read of these is not worth more than a guess.
    let _ = old.query(select, &[Cell::Int(id)], &mut |row| {
        seq = row.count(0)?;
        created = row.int(1)?;
        model = row.text(2)?.to_owned();
        Ok(())
    });
    let to = rows::create(new, name, created)?;
    let last = match log.filter(|log| log.last().is_some_and(|e| e.seq >= seq)) {
        Some(log) => {
            for entry in &log {
                rows::insert_entry(new, rows::key(to, entry.seq as usize), entry.at, &entry.change)?;
            }
            log.last().map_or(seq, |e| e.seq.max(seq))
        }
        None => write_log(new, to, seq, &timeline.retell())?,
    };
    rows::write_all(new, to, last, timeline)?;
    rows::set_model(new, to, &model)?;
    note_mentions(new, to)?;
    move_records(old, new, id, to)?;
    // Embeddings can be made again: those that cannot be read are left behind.
    let (mut after, select) = (
        String::new(),
        "SELECT embedder FROM embedding WHERE conversation = $1 AND embedder > $2 \
                                               ORDER BY embedder LIMIT 1",
    );
    loop {
        let mut embedder = None;
        let asked = old.query(select, &[Cell::Int(id), Cell::Text(&after)], &mut |row| {
            embedder = Some(row.text(0)?.to_owned());
            Ok(())
        });
        let (Ok(()), Some(next)) = (asked, embedder) else { break };
        let _ = rows::embeddings(old, id, &next, &mut |e, at| rows::put_embedding(new, to, &next, &e, at));
        after = next;
    }
    Ok(())
}

/// Makes the first page of a file anew. It holds the file's header and the schema; both are the same in every
/// file of a version, but for a few counts, which are set so that nothing is taken for free. Only where this lets
/// conversations be read is the file touched at all.
fn revive(path: &Path) -> Result<PathBuf, SqlError> {
    let out = lock_out(path)?;
    let trial = beside(path, "trial");
    let revived = create_private(&trial).and_then(|()| revive_as(path, &trial));
    let done = revived.and_then(|()| {
        let kept = beside(path, "damaged");
        let swap = std::fs::rename(path, &kept).and_then(|()| std::fs::rename(&trial, path));
        swap.map_err(|e| SqlError::refused(format!("{}: {e}", path.display())))?;
        Ok(kept)
    });
    remove(&trial);
    if done.is_err() {
        // What is not ours is left without a trace; a folder that others use stays.
        drop(out);
        let locks = PathBuf::from(format!("{}-locks", path.display()));
        let _ = std::fs::remove_file(locks.join("in-use")).and_then(|()| std::fs::remove_dir(&locks));
    }
    done
}

fn revive_as(path: &Path, trial: &Path) -> Result<(), SqlError> {
    const PAGE: usize = 4096;
    let failed = |e: std::io::Error| SqlError::refused(format!("{}: {e}", path.display()));
    let pattern = beside(path, "pattern");
    drop(Database::open(&Location::Sqlite(pattern.clone())).map_err(|e| SqlError::refused(e.to_string()))?);
    let first = std::fs::read(&pattern).map_err(failed);
    remove(&pattern);
    let (first, mut bytes) = (first?, std::fs::read(path).map_err(failed)?);
    let hopeless = || {
        let why =
            "nothing of Halo's can be read in it; it was left as it was: bring back a copy, if there is one";
        SqlError::refused(why)
    };
    if bytes.len() < PAGE || first.len() < PAGE {
        return Err(hopeless());
    }
    // Every table has its root among the first pages, or none of them can be read.
    bytes.resize(bytes.len().max(first.len()).next_multiple_of(PAGE), 0);
    bytes[..PAGE].copy_from_slice(&first[..PAGE]);
    let pages = u32::try_from(bytes.len() / PAGE).map_err(|_| SqlError::refused("the file is too large"))?;
    bytes[28..32].copy_from_slice(&pages.to_be_bytes());
    // Where the size is to be believed, the counter of changes must be the one beside it.
    bytes.copy_within(24..28, 92);
    bytes[32..40].fill(0);
    std::fs::write(trial, &bytes).map_err(failed)?;
    let mut store = Database::open(&Location::Sqlite(trial.to_owned())).map_err(|_| hopeless())?;
    let (named, _) = listed(&mut *store.sql)?;
    let nameless = nameless(&mut *store.sql, &BTreeSet::new())?;
    if named.is_empty() && nameless.is_empty() { Err(hopeless()) } else { Ok(()) }
}

/// Moves records over one by one; one that is damaged comes as it stands, one that cannot be read stays behind.
fn move_records(old: &mut dyn Sql, new: &mut dyn Sql, id: i64, to: i64) -> Result<(), SqlError> {
    for kind in Kind::ALL {
        let mut after = String::new();
        loop {
            let mut found = None;
            let select = "SELECT key, value, at FROM record WHERE conversation = $1 AND kind = $2 AND key > $3 \
                          ORDER BY key LIMIT 1";
            let args = [Cell::Int(id), Cell::Text(kind.name()), Cell::Text(&after)];
            let asked = old.query(select, &args, &mut |row| {
                found = Some((row.text(0)?.to_owned(), row.text(1)?.to_owned(), row.int(2)?));
                Ok(())
            });
            let (Ok(()), Some((key, value, at))) = (asked, found) else { break };
            rows::put_record(new, to, kind, &key, Some(&value), at)?;
            after = key;
        }
    }
    Ok(())
}
