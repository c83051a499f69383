//! What speaks, and what wraps it.
//!
//! Nothing here is a new kind of thing: an agent is wrapped by one that keeps its context small ([`cooled`]), by one that
//! shortens what it says under pressure ([`constraint`]), by one that gives it a window ([`windowed`]); what is to be
//! forgotten for good goes through [`lethe`], and a question whose premise is false is told so by [`mu`]. Wrappers
//! advise: they compress what agents say, never what a person said.
//!
//! Pure: no clock, no file, no thread. What is async is so because an agent may be anywhere.

pub mod agent;
pub mod constraint;
pub mod content;
pub mod cooled;
pub mod count;
pub mod forgetting;
pub mod judge;
pub mod lethe;
pub mod mu;
pub mod proof;
pub mod sketch;
pub mod windowed;
