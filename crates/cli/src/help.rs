//! `halo --help`: the commands under headings, which clap does not know for subcommands.

use clap::Command;
use std::fmt::Write;

/// In the template, and not in clap's long help: a long help would print every option on several lines.
const DESCRIPTION: &str = "\
Halo scores every token by the attention that it gets, prunes the paragraphs (chunks) that get the
least, keeps their KV cache, and resurrects them at their original position when they become
relevant again.";

/// The headings of `halo --help`, and the commands below each.
const COMMAND_GROUPS: &[(&str, &[&str])] = &[
    ("Chat", &["chat", "ask"]),
    ("Conversations", &["conversations", "show", "rename", "search", "extract", "index", "memories"]),
    ("Context", &["pin", "unpin", "prune", "resurrect", "merge", "delete", "undelete", "why"]),
    ("Models", &["models"]),
    ("Server", &["serve", "key", "mcp"]),
    ("Rooms of agents", &["rooms", "hud"]),
    ("Data", &["export", "import", "forget"]),
    ("Diagnostics", &["config", "stats", "self-check", "doctor", "capture", "replay"]),
    ("Installation", &["completions", "man", "licenses"]),
];

/// The command with its subcommands listed by group.
pub fn with_command_groups(command: Command) -> Command {
    let template = help_template(&command);
    command.help_template(template)
}

fn help_template(command: &Command) -> String {
    let header = command.get_styles().get_header();
    let literal = command.get_styles().get_literal();
    let mut template = format!("{{about-with-newline}}\n{DESCRIPTION}\n\n{{usage-heading}} {{usage}}\n");
    for (heading, names) in COMMAND_GROUPS {
        let _ = write!(template, "\n{header}{heading}:{header:#}\n");
        for name in *names {
            let about = command.find_subcommand(name).and_then(Command::get_about);
            let about = about.map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(template, "  {literal}{name:<15}{literal:#}{about}");
        }
    }
    let _ = write!(template, "\n{header}Global options:{header:#}\n{{options}}\n\n");
    template.push_str("`halo COMMAND --help` describes a command.");
    template
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::CommandFactory;
    use std::collections::BTreeSet;

    #[test]
    fn help_lists_every_command_once() {
        let command = Cli::command();
        let all: BTreeSet<&str> = command.get_subcommands().map(Command::get_name).collect();
        let listed: Vec<&str> = COMMAND_GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        assert_eq!(listed.iter().copied().collect::<BTreeSet<_>>(), all);
        assert_eq!(listed.len(), all.len(), "a command is listed once");
    }

    #[test]
    fn help_fits_eighty_columns_of_text() {
        for command in Cli::command().get_subcommands() {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            assert!((1..=82).contains(&about.chars().count()), "{}: {about}", command.get_name());
        }
    }
}
