//! Worlds of rooms, running: [`realm`] keeps one for ever, [`admit`] lets one in, [`mind`] thinks for its agents, [`house`] lets their hearts beat.

pub mod admit;
pub mod house;
pub mod mind;
pub mod realm;
pub mod shelf;
