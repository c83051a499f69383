//! `halo`: a context engine for language models. This file reads the command line and calls the command.

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches};
use halo_cli::args::{Cli, CliCommand, ConfigCommand, ModelsCommand};
use halo_cli::{commands, help, startup};
use halo_engine::manual_edit::ManualEdit;
use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    if let Some(status) = startup::prepare_process(&args) {
        return status;
    }
    let command = help::with_command_groups(Cli::command());
    let matches = command.get_matches_from(startup::move_set_flags_last(&args));
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    startup::init_logging(cli.global.quiet, cli.global.verbose);
    startup::finish(dispatch(&cli), cli.command.topic())
}

fn dispatch(cli: &Cli) -> Result<()> {
    let mut env = cli.global.env();
    // A misspelt setting is an error, whether or not the command reads it.
    if !env.settings.set.is_empty() && !matches!(cli.command, CliCommand::Replay(_)) {
        env.load_settings()?;
    }
    env.apply_model_setting();
    match &cli.command {
        CliCommand::Config { command: Some(ConfigCommand::Reference) } => {
            commands::config::print_reference(env.json)
        }
        CliCommand::Config { command: None } => commands::config::print_settings(&env),
        CliCommand::Serve(options) => commands::serve::run(options, &env),
        CliCommand::Key => commands::key::run(&env),
        CliCommand::Licenses => commands::licenses::run(),
        CliCommand::SelfCheck => commands::self_check::run(&env),
        CliCommand::Completions(options) => commands::shell::print_completions(options),
        CliCommand::Man(options) => commands::shell::write_man_pages(options),
        CliCommand::Mcp => commands::serve::run_mcp(&env),
        CliCommand::Chat(options) => commands::chat::run(options, &env),
        CliCommand::Conversations => commands::conversations::list_conversations(&env),
        CliCommand::Rename(options) => commands::conversations::rename(options, &env),
        CliCommand::Show(options) => commands::show::run(options, &env),
        CliCommand::Search(options) => commands::search::run(options, &env),
        CliCommand::Index(options) => commands::search::index(options, &env),
        CliCommand::Extract(options) => commands::extract::run(options, &env),
        CliCommand::Why(options) => commands::show::explain_chunk(options, &env),
        CliCommand::Pin(options) => commands::manual_edit::run(ManualEdit::Pin, options, &env),
        CliCommand::Unpin(options) => commands::manual_edit::run(ManualEdit::Unpin, options, &env),
        CliCommand::Prune(options) => commands::manual_edit::run(ManualEdit::Prune, options, &env),
        CliCommand::Resurrect(options) => commands::manual_edit::run(ManualEdit::Resurrect, options, &env),
        CliCommand::Delete(options) => commands::manual_edit::run(ManualEdit::Delete, options, &env),
        CliCommand::Undelete(options) => commands::manual_edit::run(ManualEdit::Undelete, options, &env),
        CliCommand::Merge(options) => commands::manual_edit::run(ManualEdit::Merge, options, &env),
        CliCommand::Ask(options) => commands::ask::run(options, &env),
        CliCommand::Memories(options) => commands::memories::run(options, &env),
        CliCommand::Forget(options) => commands::forget::run(options, &env),
        CliCommand::Rooms { command: what } => commands::rooms::run(what, &env),
        CliCommand::Hud(options) => commands::hud::run(options, &env),
        CliCommand::Export(options) => commands::import_export::export(options, &env),
        CliCommand::Import(options) => commands::import_export::import(options, &env),
        CliCommand::Doctor(options) => commands::doctor::run(options, &env),
        CliCommand::Models { command: None } => commands::models::list_models(&env),
        CliCommand::Models { command: Some(ModelsCommand::Pull(options)) } => {
            commands::pull::run(options, &env)
        }
        CliCommand::Models { command: Some(ModelsCommand::Path(options)) } => {
            commands::models::print_path(options, &env)
        }
        CliCommand::Stats(options) => commands::stats::run(options, &env),
        CliCommand::Capture(options) => commands::chat::run_capture(options, &env),
        CliCommand::Replay(options) => commands::replay::run(options, &env),
    }
}
