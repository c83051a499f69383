//! Errors at the command line: the kind behind an error, its exit status, and the hint that is printed below it. The
//! library crates do not know the commands of this program, so every hint that names one is here.

use crate::settings::load::SettingsError;
use halo_core::ErrorKind;
use std::fmt;

/// An error of a command itself.
#[derive(Debug)]
pub struct CommandError {
    pub kind: ErrorKind,
    pub message: String,
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for CommandError {}

/// An [`ErrorKind::NotFound`] with this message.
pub fn not_found(message: impl Into<String>) -> anyhow::Error {
    CommandError { kind: ErrorKind::NotFound, message: message.into() }.into()
}

/// What a command works on: with the kind of an error, this decides the hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandTopic {
    Conversation,
    Import,
    Memory,
    Search,
    World,
    Other,
}

/// The kind of the error behind an `anyhow` error, where it has one.
pub fn error_kind(error: &anyhow::Error) -> Option<ErrorKind> {
    error.chain().find_map(|cause| {
        let library = cause.downcast_ref::<halo_core::Error>().map(|error| error.kind);
        let command = || cause.downcast_ref::<CommandError>().map(|error| error.kind);
        let settings = || cause.downcast_ref::<SettingsError>().map(|_| ErrorKind::InvalidInput);
        library.or_else(command).or_else(settings)
    })
}

/// An error for people. The message of a library error is complete: what is behind it says the same again.
pub fn error_text(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&cause.to_string());
        if cause.is::<halo_core::Error>() {
            break;
        }
    }
    text
}

/// The exit status of a kind of error. 2 is wrong usage, as in clap.
pub fn exit_status(kind: Option<ErrorKind>) -> u8 {
    match kind {
        None | Some(ErrorKind::Internal) => 1,
        Some(ErrorKind::InvalidInput | ErrorKind::Forbidden | ErrorKind::ContextLengthExceeded) => 2,
        Some(ErrorKind::NotFound) => 3,
        Some(ErrorKind::Conflict) => 4,
        Some(ErrorKind::Busy) => 5,
        Some(ErrorKind::Unavailable) => 6,
        Some(ErrorKind::Damaged) => 7,
        Some(ErrorKind::Cancelled) => 130,
    }
}

/// The command that helps after an error of this kind.
pub fn hint_for(kind: ErrorKind, topic: CommandTopic) -> Option<&'static str> {
    match (kind, topic) {
        (ErrorKind::Damaged, _) => {
            Some("`halo doctor` examines the store, and `halo doctor --fix` repairs it after a backup")
        }
        (ErrorKind::NotFound, CommandTopic::Conversation | CommandTopic::Search) => {
            Some("`halo conversations` lists the conversations")
        }
        (ErrorKind::Conflict, CommandTopic::Import) => {
            Some("`halo import FILE -c NAME` imports under another name")
        }
        (ErrorKind::NotFound, CommandTopic::Memory) => {
            Some("`halo memories` lists the memories, `halo conversations` the conversations")
        }
        (ErrorKind::NotFound, CommandTopic::World) => {
            Some("`halo rooms list` lists the worlds, and `halo rooms new` creates one")
        }
        (ErrorKind::Conflict, CommandTopic::World) => {
            Some("`halo rooms list` lists the worlds, and `halo rooms delete` deletes one permanently")
        }
        (ErrorKind::Unavailable, CommandTopic::Search) => Some(
            "if files of the embedder are missing or damaged, `halo models pull NAME --force` downloads them again",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_kind_is_found_behind_context() {
        let library = anyhow::Error::from(halo_core::Error::busy("opening 'main'", "it is in use"));
        let command = not_found("there is no conversation 'x'");
        let settings = anyhow::Error::from(SettingsError(Vec::new()));
        for (error, kind, status) in [
            (library, Some(ErrorKind::Busy), 5),
            (command, Some(ErrorKind::NotFound), 3),
            (settings, Some(ErrorKind::InvalidInput), 2),
            (anyhow::anyhow!("the disk is full"), None, 1),
        ] {
            let error = error.context("while answering");
            assert_eq!((error_kind(&error), exit_status(error_kind(&error))), (kind, status), "{error:#}");
        }
    }

    #[test]
    fn error_text_stops_at_library_error() {
        let disk = std::io::Error::other("the disk is full");
        let error = halo_core::Error::unavailable("writing the log", "the disk is full").with_source(disk);
        let text = error_text(&anyhow::Error::from(error).context("turn 3"));
        assert_eq!(text, "turn 3: writing the log: the disk is full");
        let error = anyhow::anyhow!("permission denied").context("cannot read x");
        assert_eq!(error_text(&error), "cannot read x: permission denied");
    }

    #[test]
    fn exit_status_is_never_success() {
        assert!(ErrorKind::ALL.into_iter().all(|kind| exit_status(Some(kind)) > 0));
    }

    #[test]
    fn hint_names_the_command_for_the_topic() {
        for (kind, topic, command) in [
            (ErrorKind::NotFound, CommandTopic::Conversation, "`halo conversations`"),
            (ErrorKind::NotFound, CommandTopic::Search, "`halo conversations`"),
            (ErrorKind::NotFound, CommandTopic::Memory, "`halo memories`"),
            (ErrorKind::NotFound, CommandTopic::World, "`halo rooms list`"),
            (ErrorKind::Conflict, CommandTopic::World, "`halo rooms delete`"),
            (ErrorKind::Conflict, CommandTopic::Import, "`halo import FILE -c NAME`"),
            (ErrorKind::Damaged, CommandTopic::Other, "`halo doctor --fix`"),
            (ErrorKind::Unavailable, CommandTopic::Search, "`halo models pull NAME --force`"),
        ] {
            assert!(hint_for(kind, topic).is_some_and(|hint| hint.contains(command)), "{kind:?} {topic:?}");
        }
        assert_eq!(hint_for(ErrorKind::NotFound, CommandTopic::Other), None);
        assert_eq!(hint_for(ErrorKind::Busy, CommandTopic::Conversation), None);
    }
}
