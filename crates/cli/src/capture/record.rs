//! Answers, recorded as they are given: a folder for each.

use super::{Head, PrefixToken, PromptToken, StepLine, VERSION, check_free};
use crate::settings::{KEYS, Settings};
use halo_core::live::LiveView;
use halo_core::replay::{Recorded, Step};
use halo_core::seams::{Piece, SeamError};
use halo_core::token::{Flags, TurnId, Voice};
use halo_engine::record::Recorder;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Records answers in folders within a folder, `turn-1`, `turn-3` and so on.
pub struct Recording {
    folder: PathBuf,
    model: String,
    settings: Value,
    answer: Option<Answer>,
}

/// An answer that is being recorded.
struct Answer {
    folder: PathBuf,
    turn: TurnId,
    head: Head,
    steps: BufWriter<File>,
    count: usize,
}

impl Recording {
    /// Records in this folder.
    #[must_use]
    pub fn new(folder: &Path, model: &str, settings: &Settings) -> Self {
        Self {
            folder: folder.to_owned(),
            model: model.to_owned(),
            settings: recorded(settings),
            answer: None,
        }
    }
}

/// All settings that bear on an answer, by key.
fn recorded(settings: &Settings) -> Value {
    let all = KEYS
        .iter()
        .filter(|key| !key.name.starts_with("server."))
        .filter_map(|key| Some((key.name.to_owned(), settings.get(key.name)?.1)));
    Value::Object(all.collect())
}

fn failed(path: &Path) -> impl Fn(std::io::Error) -> SeamError + '_ {
    move |error| SeamError::new(format!("writing the capture {}", path.display()), error.to_string())
}

impl Recorder for Recording {
    fn begin(&mut self, turn: TurnId, prefix: &[Piece], view: LiveView<'_>) -> Result<(), SeamError> {
        // A tool that is called in between makes two answers of one turn, and so does saying it again.
        let mut names =
            std::iter::once(format!("turn-{}", turn.0)).chain((2..).map(|n| format!("turn-{}.{n}", turn.0)));
        let free = names.find(|name| !self.folder.join(name).exists());
        let folder = self.folder.join(free.unwrap_or_default());
        check_free(&folder).map_err(|why| SeamError::new("recording", why.to_string()))?;
        std::fs::create_dir_all(&folder).map_err(failed(&folder))?;
        let timeline = view.timeline();
        let tokens = view.positions().into_iter().filter_map(|position| timeline.token(position));
        let prompt = tokens.map(|token| {
            let voice = match token.flags {
                flags if flags.has(Flags::TOOL) => Voice::Tool,
                flags if flags.has(Flags::FRAME) => Voice::Frame,
                _ => Voice::Speaker,
            };
            PromptToken::of(&Recorded {
                id: token.id,
                text: token.text.to_owned(),
                position: token.position.0,
                chunk: token.chunk,
                brightness: Some(token.brightness),
                pinned: timeline.chunk(token.chunk).is_some_and(|chunk| chunk.is_pinned()),
                voice,
            })
        });
        let head = Head {
            version: VERSION,
            model: self.model.clone(),
            settings: self.settings.clone(),
            prefix: prefix.iter().map(|p| PrefixToken { id: p.id.0, text: p.text.clone() }).collect(),
            prompt: prompt.collect(),
        };
        let path = folder.join("steps.jsonl");
        let steps = BufWriter::new(File::create(&path).map_err(failed(&path))?);
        self.answer = Some(Answer { folder, turn, head, steps, count: 0 });
        Ok(())
    }

    fn step(&mut self, piece: &Piece, row: Option<&[f32]>) -> Result<(), SeamError> {
        let Some(answer) = &mut self.answer else { return Ok(()) };
        let step = Step {
            id: piece.id,
            text: piece.text.clone(),
            position: None,
            turn: None,
            sentence: None,
            tool: false,
            attention: row.map(|row| Ok(row.to_vec())),
        };
        let line = serde_json::to_string(&StepLine::of(&step)).map_err(std::io::Error::from);
        let written = line.and_then(|line| writeln!(answer.steps, "{line}"));
        answer.count += 1;
        written.map_err(failed(&answer.folder))
    }

    fn end(&mut self) -> Result<Option<(String, String)>, SeamError> {
        let Some(answer) = self.answer.take() else {
            return Err(SeamError::new("recording", "no answer was begun"));
        };
        let Answer { folder, turn, head, steps, count } = answer;
        let file = steps.into_inner().map_err(std::io::IntoInnerError::into_error);
        file.and_then(|file| file.sync_all()).map_err(failed(&folder))?;
        // The head comes last: a folder without it is no capture, so one that is half written is never read.
        let head = serde_json::to_string_pretty(&head).map_err(std::io::Error::from);
        head.and_then(|head| std::fs::write(folder.join("capture.json"), head)).map_err(failed(&folder))?;
        let place = std::path::absolute(&folder).unwrap_or(folder).display().to_string();
        Ok(Some((place, json!({ "turn": turn.0, "steps": count, "model": self.model }).to_string())))
    }
}
