//! Records answers as they are generated, one capture folder each.

use super::location::capture_note;
use super::{
    CaptureHeader, CapturePrefixToken, CapturePromptToken, CaptureStepLine, FORMAT_VERSION, ensure_no_capture,
};
use crate::settings::{KEYS, Settings};
use halo_core::Error;
use halo_core::context_window::ContextWindow;
use halo_core::model::ModelToken;
use halo_core::replay::{RecordedStep, RecordedToken};
use halo_core::token::{ContentKind, TokenFlags, TurnId};
use halo_engine::recorder::AnswerRecorder;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Records each answer in a folder of its own: `turn-1`, `turn-3` and so on.
pub struct CaptureRecorder {
    folder: PathBuf,
    data_dir: Option<PathBuf>,
    model: String,
    settings: Value,
    current: Option<AnswerRecording>,
}

struct AnswerRecording {
    folder: PathBuf,
    turn: TurnId,
    header: CaptureHeader,
    steps: BufWriter<File>,
    count: usize,
}

impl CaptureRecorder {
    #[must_use]
    pub fn new(folder: &Path, data_dir: Option<PathBuf>, model: &str, settings: &Settings) -> Self {
        Self {
            folder: folder.to_owned(),
            data_dir,
            model: model.to_owned(),
            settings: settings_to_record(settings),
            current: None,
        }
    }
}

/// The settings that affect an answer, by key.
fn settings_to_record(settings: &Settings) -> Value {
    let all = KEYS
        .iter()
        .filter(|key| !key.name.starts_with("server."))
        .filter_map(|key| Some((key.name.to_owned(), settings.get(key.name)?.1)));
    Value::Object(all.collect())
}

fn write_error(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    move |error| Error::unavailable(format!("writing the capture {}", path.display()), error.to_string())
}

impl AnswerRecorder for CaptureRecorder {
    fn begin_answer(
        &mut self,
        turn: TurnId,
        prefix: &[ModelToken],
        view: ContextWindow<'_>,
    ) -> Result<(), Error> {
        // A tool call in between, and regenerating, give one turn several answers.
        let mut names =
            std::iter::once(format!("turn-{}", turn.0)).chain((2..).map(|n| format!("turn-{}.{n}", turn.0)));
        let free = names.find(|name| !self.folder.join(name).exists());
        let folder = self.folder.join(free.unwrap_or_default());
        ensure_no_capture(&folder).map_err(|why| Error::conflict("recording", why.to_string()))?;
        std::fs::create_dir_all(&folder).map_err(write_error(&folder))?;
        let timeline = view.timeline();
        let tokens = view.positions().into_iter().filter_map(|position| timeline.token(position));
        let prompt = tokens.map(|token| {
            let voice = match token.flags {
                flags if flags.contains(TokenFlags::TOOL_RESULT) => ContentKind::ToolResult,
                flags if flags.contains(TokenFlags::TEMPLATE) => ContentKind::Template,
                _ => ContentKind::Message,
            };
            CapturePromptToken::from_recorded(&RecordedToken {
                id: token.id,
                text: token.text.to_owned(),
                position: token.position.0,
                chunk: token.chunk,
                brightness: Some(token.brightness),
                pinned: timeline.chunk(token.chunk).is_some_and(|chunk| chunk.is_pinned()),
                kind: voice,
            })
        });
        let head = CaptureHeader {
            version: FORMAT_VERSION,
            model: self.model.clone(),
            settings: self.settings.clone(),
            prefix: prefix.iter().map(|p| CapturePrefixToken { id: p.id.0, text: p.text.clone() }).collect(),
            prompt: prompt.collect(),
        };
        let path = folder.join("steps.jsonl");
        let steps = BufWriter::new(File::create(&path).map_err(write_error(&path))?);
        self.current = Some(AnswerRecording { folder, turn, header: head, steps, count: 0 });
        Ok(())
    }

    fn record_token(&mut self, piece: &ModelToken, row: Option<&[f32]>) -> Result<(), Error> {
        let Some(answer) = &mut self.current else { return Ok(()) };
        let step = RecordedStep {
            id: piece.id,
            text: piece.text.clone(),
            position: None,
            turn: None,
            chunk_index: None,
            tool_result: false,
            attention: row.map(|row| Ok(row.to_vec())),
        };
        let line = serde_json::to_string(&CaptureStepLine::from_step(&step)).map_err(std::io::Error::from);
        let written = line.and_then(|line| writeln!(answer.steps, "{line}"));
        answer.count += 1;
        written.map_err(write_error(&answer.folder))
    }

    fn end_answer(&mut self) -> Result<Option<(String, String)>, Error> {
        let Some(answer) = self.current.take() else {
            return Err(Error::internal("recording", "no answer was begun"));
        };
        let AnswerRecording { folder, turn, header: head, steps, count } = answer;
        let file = steps.into_inner().map_err(std::io::IntoInnerError::into_error);
        file.and_then(|file| file.sync_all()).map_err(write_error(&folder))?;
        // The header is written last: a folder without it is no capture, so an incomplete one is never read.
        let head = serde_json::to_string_pretty(&head).map_err(std::io::Error::from);
        head.and_then(|head| std::fs::write(folder.join("capture.json"), head))
            .map_err(write_error(&folder))?;
        let note = capture_note(&folder, self.data_dir.as_deref());
        Ok(Some((note, json!({ "turn": turn.0, "steps": count, "model": self.model }).to_string())))
    }
}
