//! `halo completions` and `halo man`: what shells and `man` need to know of the command line.

use crate::args::Cli;
use crate::help::with_command_groups;
use crate::output::print_stdout;
use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct CompletionsArgs {
    /// The shell that the script is for
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

#[derive(clap::Args)]
pub struct ManArgs {
    /// Folder for a page per command; without it, the page of `halo` itself is printed
    #[arg(value_name = "DIR")]
    folder: Option<PathBuf>,
}

pub fn print_completions(options: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut Cli::command(), "halo", &mut script);
    print_stdout(&String::from_utf8_lossy(&script))
}

pub fn write_man_pages(options: &ManArgs) -> Result<()> {
    let Some(folder) = &options.folder else {
        let mut page = Vec::new();
        clap_mangen::Man::new(with_command_groups(Cli::command())).render(&mut page)?;
        return print_stdout(&String::from_utf8_lossy(&page));
    };
    let failed = || format!("cannot write man pages to {}", folder.display());
    std::fs::create_dir_all(folder).with_context(failed)?;
    clap_mangen::generate_to(Cli::command(), folder).with_context(failed)
}
