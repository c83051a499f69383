//! What agents may do. A refused action changes nothing, and the agent sees the reason among its recent actions.

mod agent_rules;
mod catalog;
mod read;
mod room_rules;
mod rules;
mod types;

pub use catalog::available_actions;
pub use rules::ActionContext;
pub use types::{ACTION_TYPES, Action, InvalidAction};

pub(crate) use agent_rules::{AgentChanges, MAX_PROMPT_CHARS, parse_agent_name, parse_interval};
pub(crate) use read::value_as_text;
pub(crate) use room_rules::{MAX_BILLBOARD_CHARS, MAX_KEY_CHARS, MAX_KEYS};
