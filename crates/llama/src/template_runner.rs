//! Runs the chat template of a model file in a process of its own.
//!
//! A template is a program: a few harmless steps can double a text without end. The number of steps is limited where it is
//! rendered, but not how much memory one step takes. So the program starts itself as a worker with limits on memory and
//! processor time.

use crate::chat_template::infer_template;
use halo_core::Error;
use halo_core::model::{ChatTemplate, MessageWrap};
use halo_core::tool_call::{CallFormat, ReasoningFormat, ToolFormat, ToolSection};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Where chat templates are rendered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TemplateRunner {
    /// In this process: for tests and trusted files only.
    #[default]
    InProcess,
    /// In a process of its own: this program with [`SUBPROCESS_ARG`].
    Subprocess(PathBuf),
}

/// The argument with which the program infers one template from standard input and exits.
pub const SUBPROCESS_ARG: &str = "__template";

/// The longest time to wait for the worker. Its processor time has a limit of its own: this one is only reached where the
/// machine is overloaded.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The most bytes that are exchanged with the worker. The source of a template is far smaller.
const MAX_MESSAGE_BYTES: u64 = 1 << 20;

const OPERATION: &str = "reading the chat template of the model";

impl TemplateRunner {
    /// Infers the wraps of all roles. The inner error is the fault of the template; the outer one is that of an overloaded
    /// machine.
    pub fn infer(
        &self,
        source: &str,
        bos: &str,
        end_tokens: &[String],
    ) -> Result<Result<ChatTemplate, String>, Error> {
        match self {
            Self::InProcess => Ok(infer_template(source, bos, end_tokens)),
            Self::Subprocess(program) => {
                let job = json!({ "source": source, "bos": bos, "end_tokens": end_tokens }).to_string();
                if job.len() as u64 > MAX_MESSAGE_BYTES {
                    return Ok(Err(format!("it has {} bytes", source.len())));
                }
                let Some(output) = run_worker(program, job)? else {
                    // A template that could not be rendered for such a reason must not change the conversations.
                    tracing::warn!("{} cannot be started as a worker", program.display());
                    return Ok(infer_template(source, bos, end_tokens));
                };
                // Without an answer, the worker has exceeded its limits.
                let answer: Option<Value> = serde_json::from_slice(&output).ok();
                Ok(answer.map_or_else(
                    || Err("it needs too much memory or time".into()),
                    |answer| parse_answer(&answer),
                ))
            }
        }
    }
}

/// What the worker writes before it looks at the template: then its limits hold.
const READY: &[u8] = b"ready\n";

/// The variables with which the loader of the system finds the libraries of the program.
const LIBRARY_PATHS: [&str; 2] = ["LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"];

fn inherited(name: &&'static str) -> Option<(&'static str, OsString)> {
    std::env::var_os(name).map(|value| (*name, value))
}

/// The answer of the worker to a job, which is empty if it has exceeded its limits. None if it could not be started.
fn run_worker(program: &Path, job: String) -> Result<Option<Vec<u8>>, Error> {
    let mut command = Command::new(program);
    // The environment may have keys.
    command.arg(SUBPROCESS_ARG).env_clear().envs(LIBRARY_PATHS.iter().filter_map(inherited));
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let Ok(mut child) = command.stderr(Stdio::null()).spawn() else { return Ok(None) };
    let (input, output) = (child.stdin.take(), child.stdout.take());
    let reader = std::thread::spawn(move || {
        let mut answer = Vec::new();
        let _ = output.map(|output| output.take(MAX_MESSAGE_BYTES).read_to_end(&mut answer));
        answer
    });
    // A worker that does not read, or exits early, is recognized by its output.
    let writer = std::thread::spawn(move || input.map(|mut input| input.write_all(job.as_bytes())));
    let start = Instant::now();
    let ended = loop {
        match child.try_wait() {
            Ok(None) if start.elapsed() > TIMEOUT => break false,
            Ok(None) => std::thread::sleep(Duration::from_millis(2)),
            Ok(Some(_)) | Err(_) => break true,
        }
    };
    if !ended {
        let _ = child.kill();
        let _ = child.wait();
    }
    let _ = writer.join();
    let answer = reader.join().unwrap_or_default();
    if ended {
        return Ok(answer.strip_prefix(READY).map(<[u8]>::to_vec));
    }
    let message = format!("it took longer than {} seconds; is the machine overloaded?", TIMEOUT.as_secs());
    Err(Error::unavailable(OPERATION, message))
}

/// The worker: reads one job, and writes the template or the error.
pub fn serve_subprocess(input: &mut dyn Read, output: &mut dyn Write) -> std::io::Result<()> {
    output.write_all(READY)?;
    output.flush()?;
    let mut job = Vec::new();
    input.take(MAX_MESSAGE_BYTES).read_to_end(&mut job)?;
    let job: Value = serde_json::from_slice(&job).unwrap_or_default();
    let text = |key: &str| job[key].as_str().unwrap_or_default();
    let end_tokens = job["end_tokens"].as_array().into_iter().flatten();
    let end_tokens: Vec<String> = end_tokens.filter_map(|token| token.as_str().map(str::to_owned)).collect();
    let answer = match infer_template(text("source"), text("bos"), &end_tokens) {
        Ok(template) => write_template(&template),
        Err(error) => json!({ "error": error }),
    };
    output.write_all(answer.to_string().as_bytes())?;
    output.flush()
}

fn parse_answer(answer: &Value) -> Result<ChatTemplate, String> {
    if let Some(error) = answer["error"].as_str() {
        return Err(error.to_owned());
    }
    read_template(answer).ok_or_else(|| "the worker failed".into())
}

fn write_template(template: &ChatTemplate) -> Value {
    let ChatTemplate { start, system, user, assistant, tools, reasoning } = template;
    let wrap = |wrap: &MessageWrap| json!([wrap.prefix, wrap.suffix]);
    let section = tools.section.as_ref().map(|s| {
        json!({
            "tools_first": s.tools_first, "head": s.head, "gap": s.gap, "separator": s.separator, "tail": s.tail,
            "bare_function": s.bare_function, "indent": s.indent,
        })
    });
    let CallFormat { open, separator, close, arguments_key } = &tools.call;
    json!({
        "start": start,
        "wraps": [wrap(system), wrap(user), wrap(assistant), wrap(&tools.result)],
        "section": section,
        "call": [open, separator, close, arguments_key],
        "result_separator": tools.result_separator,
        "reasoning": reasoning.as_ref().map(|r| json!([r.open, r.close, r.prompt, r.skip])),
    })
}

fn read_template(answer: &Value) -> Option<ChatTemplate> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let wrap = |n: usize| {
        let wrap = &answer["wraps"][n];
        Some(MessageWrap { prefix: text(&wrap[0])?, suffix: text(&wrap[1])? })
    };
    let read_section = |section: &Value| {
        Some(ToolSection {
            tools_first: section["tools_first"].as_bool()?,
            head: text(&section["head"])?,
            gap: text(&section["gap"])?,
            separator: text(&section["separator"])?,
            tail: text(&section["tail"])?,
            bare_function: section["bare_function"].as_bool()?,
            indent: section["indent"].as_u64().and_then(|indent| usize::try_from(indent).ok()),
        })
    };
    let read_reasoning = |format: &Value| {
        let [open, close, prompt] = [0, 1, 2].map(|n| text(&format[n]));
        Some(ReasoningFormat { open: open?, close: close?, prompt: prompt?, skip: text(&format[3]) })
    };
    let optional = |value: &'_ Value| (!value.is_null()).then(|| value.clone());
    let call = &answer["call"];
    Some(ChatTemplate {
        start: text(&answer["start"])?,
        system: wrap(0)?,
        user: wrap(1)?,
        assistant: wrap(2)?,
        tools: ToolFormat {
            section: optional(&answer["section"]).as_ref().and_then(read_section),
            call: CallFormat {
                open: text(&call[0])?,
                separator: text(&call[1])?,
                close: text(&call[2])?,
                arguments_key: text(&call[3])?,
            },
            result: wrap(3)?,
            result_separator: text(&answer["result_separator"]),
        },
        reasoning: optional(&answer["reasoning"]).as_ref().and_then(read_reasoning),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_worker_passes_templates_and_errors_on() {
        let serve = |job: &Value| {
            let mut answer = Vec::new();
            serve_subprocess(&mut job.to_string().as_bytes(), &mut answer).expect("written");
            let answer = answer.strip_prefix(READY).expect("it is ready");
            parse_answer(&serde_json::from_slice(answer).expect("JSON"))
        };
        let source = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}";
        let job = json!({ "source": source, "bos": "", "end_tokens": ["<|im_end|>"] });
        assert_eq!(serve(&job), Ok(ChatTemplate::chatml()));
        let mut full = ChatTemplate::chatml();
        full.tools.section = Some(ToolSection { indent: Some(4), ..ToolSection::generic("<s>") });
        full.reasoning = Some(ReasoningFormat {
            open: "<think>".into(),
            close: "</think>".into(),
            prompt: "<think>\n".into(),
            skip: Some("<think></think>".into()),
        });
        assert_eq!(read_template(&write_template(&full)), Some(full));
        assert!(serve(&json!({ "source": "the same always" })).is_err());
        assert!(serve(&json!(7)).is_err());
    }

    /// The worker runs what a model file says: it does not get the keys of the environment.
    #[cfg(unix)]
    #[test]
    fn template_worker_gets_no_environment() {
        use std::os::unix::fs::PermissionsExt;
        assert!(std::env::var_os("PATH").is_some(), "there is something to pass on");
        let folder = std::env::temp_dir().join(format!("halo-template-worker-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let program = folder.join("worker");
        std::fs::write(&program, "#!/bin/sh\necho ready\nenv\n").expect("written");
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).expect("it can be run");
        let answer = run_worker(&program, String::new());
        std::fs::remove_dir_all(&folder).expect("it is removed");
        let answer = String::from_utf8(answer.expect("it ends").expect("it starts")).expect("text");
        let own = ["PWD=", "OLDPWD=", "SHLVL=", "_=", "LD_LIBRARY_PATH=", "DYLD_LIBRARY_PATH="];
        let foreign: Vec<&str> =
            answer.lines().filter(|line| !own.iter().any(|start| line.starts_with(start))).collect();
        assert_eq!(foreign, [] as [&str; 0]);
        assert!(answer.contains("PWD="), "the shell has an environment: {answer}");
    }
}
