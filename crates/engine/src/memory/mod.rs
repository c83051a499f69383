//! Memories: summaries that the model writes of ranges of the conversation.
//!
//! When a range has enough tokens, a fork of the model's state at its end is asked to write down what matters. The memory is
//! stored at once and used later: when chunks of its range were pruned, it is placed at their position. User messages are
//! quoted in it, never paraphrased. Everything stays on the timeline, and when a chunk of the range is resurrected, the
//! memory is hidden.
//!
//! [`segment`] describes the context window in segments with their origin; [`range`] chooses what is summarized;
//! [`formation`] asks the model; [`placement`] decides which memories are placed where; [`manager`] owns the memories of one
//! conversation; [`carry`] takes memories into other conversations; [`conflict`] resolves contradictions; [`trace`] tells
//! where every byte of a memory comes from.

pub(crate) mod attention;
pub mod carry;
pub mod conflict;
pub mod edit;
pub mod formation;
pub mod manager;
pub mod placement;
pub mod range;
pub mod record;
pub mod rules;
pub mod segment;
pub mod source;
pub mod trace;

pub use carry::{CarryMode, MemoryReference, carry_memories};
pub use conflict::{ConflictDecision, MemoryConflict, open_conflicts, resolve_conflict};
pub use edit::{MemoryEdit, apply_memory_edit, rank_memories};
pub use record::{Memory, load_all_memories, load_memories, lower_formed_until, set_pending_forget};
pub use rules::{MemoryRules, ReflectionRules};
