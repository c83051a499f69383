//! Agents and the wrappers around them.
//!
//! An [`Agent`](agent::Agent) takes an input and returns an answer: a model, a plain function, or another agent inside
//! a wrapper. A wrapper limits the input ([`cooled`]), shortens answers under context pressure ([`constraint`]), or adds
//! earlier messages ([`windowed`]). [`mu`] checks the premises of a question with the detectors and judges of
//! [`judge`] by the principles of [`principle`]. [`lethe`] decides by age what is deleted for good, [`forgetting`] runs one cycle of it, and [`proof`] signs
//! that something was deleted. Wrappers change only text that an agent wrote; text of a user passes unchanged.
//!
//! The crate is pure: it reads no clock and no file and starts no thread. `clippy.toml` enforces this. Agents are
//! async because a model may run on another machine.

#![warn(missing_docs)]

pub mod agent;
pub mod constraint;
pub mod content;
pub mod contradiction;
pub mod cooled;
pub mod forgetting;
pub mod judge;
pub mod lethe;
pub mod mu;
pub mod principle;
pub mod proof;
pub mod sketch;
pub mod token_counter;
pub mod windowed;
