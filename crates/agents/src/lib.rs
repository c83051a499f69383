//! What speaks, and what wraps it.
//!
//! Nothing here is a new kind of thing: an agent is wrapped by one that keeps its context small ([`cooled`]), by one that
//! shortens what it says under pressure ([`constraint`]), by one that gives it a window ([`windowed`]); what is to be
//! forgotten for good goes through [`lethe`], and a question whose premise is false is told so by [`mu`]. Wrappers
//! advise: they compress what agents say, never what a person said.
//!
//! Where many of them meet is a [`world`]: they own rooms, do what [`action`] allows, and see a [`hud`], which a
//! [`scribe`] writes, on every [`heartbeat`].
//!
//! Pure: no clock, no file, no thread. What is async is so because an agent may be anywhere.

pub mod action;
pub mod agent;
pub mod answer;
pub mod constraint;
pub mod content;
pub mod cooled;
pub mod count;
pub mod forgetting;
pub mod format;
pub mod heartbeat;
pub mod hud;
pub mod judge;
pub mod knowledge;
pub mod lethe;
pub mod mu;
pub mod prompts;
pub mod proof;
pub mod scribe;
pub mod sketch;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod windowed;
pub mod wish;
pub mod world;
pub mod world_file;
