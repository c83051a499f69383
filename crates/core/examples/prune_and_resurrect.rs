//! A timeline without a model: messages are appended, the dimmest is pruned, and a search result brings it back at its own position.
//!
//!     cargo run -p halo-core --example prune_and_resurrect

#![expect(clippy::disallowed_macros, reason = "an example prints")]

use halo_core::change::{Append, Change, NewToken};
use halo_core::prune::{PrunePolicy, PruneRules, RankBy, TieBreak, plan_prune};
use halo_core::resurrect::{Hit, ResurrectedBrightness, plan_resurrection};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, ContentKind, Role, TokenId, TurnId};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let mut timeline = Timeline::new();
    let messages = [
        (Role::User, "My sister Anna lives in Lindau.", 20.0),
        (Role::Assistant, "I will remember that.", 20.0),
        (Role::User, "How are lighthouses built?", 900.0),
        (Role::Assistant, "On rock, with thick walls.", 900.0),
    ];
    for (role, text, brightness) in messages {
        timeline.apply(&append(&timeline, role, text, brightness))?;
    }
    print_window("said", &timeline);

    let policy = PrunePolicy::Brightness { rank: RankBy::Mean, ties: TieBreak::Older };
    let rules = PruneRules { policy, budget: 10, sinks: 0, recent: 0, fill: true, current: None };
    let plan = plan_prune(timeline.context_window(0), &rules);
    for pruned in &plan.pruned {
        println!("pruned {}: {}", pruned.chunk, pruned.reason);
    }
    if let Some(change) = plan.change() {
        timeline.apply(&change)?;
    }
    print_window("pruned", &timeline);

    // A search has found the first message.
    let found = Hit { chunk: ChunkId { role: Role::User, turn: TurnId(0), index: 0 }, score: 0.9 };
    let plan = plan_resurrection(&timeline, &[found], 20, ResurrectedBrightness::Earned);
    if let Some(change) = plan.change() {
        timeline.apply(&change)?;
    }
    print_window("resurrected", &timeline);
    Ok(())
}

/// A message as a change; each word is a token.
fn append(timeline: &Timeline, role: Role, text: &str, brightness: f32) -> Change {
    let tokens = text.split_inclusive(' ').enumerate().map(|(n, word)| NewToken {
        id: TokenId(n as u32),
        text: word.into(),
        chunk_index: 0,
        brightness: Brightness(brightness),
        kind: ContentKind::Message,
    });
    let (at, turn) = (timeline.next_position(), timeline.next_turn());
    Change::Append(Append { at, turn, role, tokens: tokens.collect() })
}

fn print_window(title: &str, timeline: &Timeline) {
    let live = timeline.live_chunks().map(|chunk| format!("{} “{}”", chunk.id(), chunk.text()));
    println!("{title}: {}", live.collect::<Vec<_>>().join(", "));
}
