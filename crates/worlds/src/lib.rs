//! Rooms of agents.
//!
//! A world is a set of agents, each with a room of its own. On every heartbeat an agent is shown a HUD, a model answers
//! for it, and the answer changes the world.
//!
//! The rules are pure: they know no thread, clock or store, and time comes in as an argument.
//! - [`world`]: agents, rooms, messages; [`heartbeat`]: time; [`knowledge`]: what an agent has stored.
//! - [`action`]: what agents may do; [`user_command`]: what the user may do; [`answer`]: what a model wrote.
//! - [`hud`]: what an agent sees; [`hud_renderer`]: cuts it to its token budget; [`format`]: writes and reads it as text.
//! - [`prompts`] and [`world_file`]: files that users write.
//!
//! The modules around the rules run a world: [`world_store`] loads and saves it, [`import`] validates one that comes
//! from an export, [`room_index`] finds older messages, [`agent_model`] generates answers, [`agent_wrappers`] manages the
//! context of agents, [`runner`] runs heartbeats through the scheduler of the engine, and [`telemetry`] counts their
//! tokens. No rule imports one of these. `clippy.toml` keeps clocks, files and threads out
//! of the whole crate; the one exception is marked where it stands.

pub mod action;
pub mod agent_model;
pub mod agent_wrappers;
pub mod answer;
mod error;
pub mod format;
pub mod heartbeat;
pub mod hud;
mod hud_format;
pub mod hud_renderer;
pub mod import;
pub mod knowledge;
pub mod prompts;
pub mod room_index;
pub mod runner;
pub mod telemetry;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod text;
pub mod user_command;
pub mod world;
pub mod world_file;
pub mod world_store;

pub use error::Error;
