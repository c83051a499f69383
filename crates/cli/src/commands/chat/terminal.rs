//! The conversation on a screen: what is said streams in, what leaves and returns is told, and a line says how things
//! stand.

use super::orders::{Outcome, obey};
use super::paint::Paint;
use crate::commands::count;
use crate::{Common, printable};
use anyhow::Result;
use halo_agents::mu;
use halo_core::seams::{Finish, Flow, SeamError};
use halo_engine::event::{Event, Stage, Summary};
use halo_engine::session::Session;
use halo_engine::turn::AskedBy;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};
use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Talks until the user leaves.
pub fn run(session: &mut Session, common: &Common) -> Result<()> {
    let settings = common.load(Vec::new())?.settings;
    let paint = Paint::of_environment();
    let halted = Arc::new(AtomicUsize::new(0));
    let heard = Arc::clone(&halted);
    // The first stops the answer; the second does not wait for that. Whatever was on the screen is stored.
    ctrlc::set_handler(move || {
        if heard.fetch_add(1, Ordering::SeqCst) > 0 {
            println!();
            std::process::exit(130);
        }
    })?;
    let mut editor = DefaultEditor::with_config(Config::builder().auto_add_history(true).build())?;
    let history = common.data_folder().map(|data| data.join(super::HISTORY));
    if let Some(history) = &history {
        let _ = editor.load_history(history);
    }
    println!("{}", paint.dim(&greeting(session)));
    for notice in session.notices() {
        println!("{}", paint.returned(&printable(&notice)));
    }
    let (mut begun, mut leaving, mut ahead) = (String::new(), false, VecDeque::new());
    loop {
        ahead.extend(typed_ahead());
        let read = match ahead.pop_front() {
            Some(line) => {
                println!("› {}", printable(&line));
                let _ = editor.add_history_entry(&line);
                Ok(line)
            }
            None => meanwhile(session, || editor.readline_with_initial("› ", (&begun, ""))),
        };
        let line = match read {
            Ok(line) => line,
            Err(ReadlineError::Eof) => break,
            // Once drops the line, twice leaves.
            Err(ReadlineError::Interrupted) if !std::mem::replace(&mut leaving, true) => continue,
            Err(ReadlineError::Interrupted) => break,
            Err(error) => return Err(error.into()),
        };
        begun.clear();
        leaving = false;
        if line.trim().is_empty() {
            continue;
        }
        halted.store(0, Ordering::SeqCst);
        let today = jiff::Zoned::now().date();
        let mut screen = Screen { paint, halted: &halted, open: false };
        let done = match obey(&line, session, &settings, paint) {
            Ok(None) => {
                let message = line.strip_prefix('/').filter(|rest| rest.starts_with('/')).unwrap_or(&line);
                Some(session.say(message, today, &mut |event| screen.show(event)))
            }
            Ok(Some(Outcome::Again)) => {
                Some(session.say_again(AskedBy::User, today, &mut |event| screen.show(event)))
            }
            Ok(Some(Outcome::Say(text))) => Some(session.say(&text, today, &mut |event| screen.show(event))),
            Ok(Some(Outcome::Edit(text))) => {
                begun = text;
                None
            }
            Ok(Some(Outcome::Page(page))) => {
                print!("{page}");
                None
            }
            Ok(Some(Outcome::Leave)) => break,
            Err(error) => {
                println!("{}", paint.wrong(&printable(&format!("{error:#}"))));
                None
            }
        };
        screen.close();
        if done.is_some() {
            println!();
        }
        match done {
            Some(Ok(summary)) => println!("{}", paint.dim(&status(session, &summary))),
            Some(Err(error)) => println!("{}", paint.wrong(&failed(&error))),
            None => {}
        }
        if let Some(history) = &history {
            let _ = editor.save_history(history);
        }
    }
    Ok(())
}

/// While somebody types, memories are formed; what they send ends that at once.
fn meanwhile<T>(session: &mut Session, read: impl FnOnce() -> T) -> T {
    if session.rules().memory.is_none() {
        return read();
    }
    let breaker = session.model().breaker();
    let wanted = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // What fails is tried again after the next answer.
        scope.spawn(
            || while session.quiet(&|| wanted.load(Ordering::SeqCst), &mut |_| {}).unwrap_or(false) {},
        );
        let read = read();
        wanted.store(true, Ordering::SeqCst);
        breaker.iter().for_each(|breaks| breaks());
        read
    })
}

/// The lines that were typed while an answer came: the editor would take the first of them and drop the rest.
#[cfg(unix)]
fn typed_ahead() -> Vec<String> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let stdin = rustix::stdio::stdin();
    let (mut typed, mut buffer) = (Vec::new(), [0; 4096]);
    let waiting = || {
        let mut one = [PollFd::new(&stdin, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut one, Some(&now)).is_ok_and(|n| n > 0)
    };
    // The terminal gives whole lines as long as nobody edits one.
    while typed.len() < 1 << 20 && waiting() {
        match rustix::io::read(stdin, &mut buffer) {
            Ok(n) if n > 0 => typed.extend_from_slice(&buffer[..n]),
            _ => break,
        }
    }
    String::from_utf8_lossy(&typed).lines().map(str::to_owned).collect()
}

/// Elsewhere the editor sees all that is typed.
#[cfg(not(unix))]
fn typed_ahead() -> Vec<String> {
    Vec::new()
}

fn greeting(session: &Session) -> String {
    let (timeline, name) = (session.timeline(), printable(session.name()));
    let model = printable(&session.model().info().name);
    if timeline.is_empty() {
        return format!("{model} · a new conversation, '{name}' · /help lists what can be asked for");
    }
    let messages = count(timeline.turns().len() as u64, "message");
    let (live, all) = (grouped(timeline.live_len()), grouped(timeline.len()));
    format!(
        "{model} · '{name}': {messages}, {live} of {all} tokens in the window · /help lists what can be asked for"
    )
}

fn failed(error: &SeamError) -> String {
    let told = printable(&error.to_string());
    // What is wrong with an order or a message is no matter of answering once more.
    let ours = ["answering again", "making room for the message", "reading the message"];
    if ours.contains(&error.what.as_str()) {
        told
    } else {
        format!("{told}\nthe message is kept; /again answers it")
    }
}

/// `window 1,412/2,000 · 3 left · 1 returned · 78 tok/s`.
fn status(session: &Session, summary: &Summary) -> String {
    let mut parts = vec![format!("window {}/{}", grouped(summary.live), grouped(session.limit()))];
    parts.extend((summary.left > 0).then(|| format!("{} left", summary.left)));
    parts.extend((summary.returned > 0).then(|| format!("{} returned", summary.returned)));
    parts.push(format!("{:.0} tok/s", summary.pace()));
    parts.push(format!("first token after {:.1} s", first(summary)));
    match summary.finish {
        Finish::Length => parts.push("cut at generation.max_tokens".into()),
        Finish::Aborted => parts.push("stopped".into()),
        Finish::End | Finish::Stop => {}
    }
    parts.join(" · ")
}

/// From Enter to the first token, in seconds.
fn first(summary: &Summary) -> f64 {
    let before = [Stage::Preview, Stage::Recall, Stage::Store, Stage::Read];
    before.iter().map(|&stage| summary.took(stage).as_secs_f64()).sum()
}

fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().filter_map(|group| str::from_utf8(group).ok()).collect();
    groups.join(",")
}

/// What is on the screen while an answer comes.
struct Screen<'a> {
    paint: Paint,
    halted: &'a AtomicUsize,
    /// The last line has not ended.
    open: bool,
}

impl Screen<'_> {
    fn show(&mut self, event: Event) -> Flow {
        match event {
            Event::Returned { chunk, tokens, why } => {
                self.close();
                let told = format!("↩ {chunk} is back ({}): {why}", count(tokens as u64, "token"));
                println!("{}", self.paint.returned(&printable(&told)));
            }
            Event::Reading { done, of } if of > 64 => {
                print!("\r{}", self.paint.dim(&format!("reading {done}/{of} ")));
                self.open = true;
            }
            Event::Token { text, .. } => {
                if self.open {
                    // What was read is told no more.
                    print!("\r\x1b[K");
                    self.open = false;
                }
                print!("{}", printable(&text));
            }
            Event::Exceeded(why) => {
                self.close();
                print!("\n{}", self.paint.wrong(&printable(&why)));
            }
            Event::Premise { premise, reason, suggestion } => {
                let told = mu::told(&premise, &reason, &suggestion);
                println!("{}", self.paint.wrong(&printable(&told)));
            }
            Event::Notice(text) => println!("{}", self.paint.dim(&printable(&text))),
            Event::Scored { faults: Some((steps, why)), .. } => {
                let told = format!("{} whose attention could not be used: {why}", count(steps, "step"));
                print!("\n{}", self.paint.wrong(&told));
            }
            _ => {}
        }
        let _ = std::io::stdout().flush();
        if self.halted.load(Ordering::SeqCst) > 0 { Flow::Stop } else { Flow::Continue }
    }

    /// Ends a line that was begun.
    fn close(&mut self) {
        if std::mem::take(&mut self.open) {
            print!("\r\x1b[K");
        }
    }
}
