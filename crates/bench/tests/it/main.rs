//! All integration tests of this crate in one binary, which links faster than one binary per file.

mod alone;
mod crash;
mod figures;
mod hud;
mod program;
mod simulator;
mod tools;
