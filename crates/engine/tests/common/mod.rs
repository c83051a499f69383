//! What the tests of this crate share.

use halo_core::attention::Watch;
use halo_core::brightness::{Magnitude, Strategy};
use halo_core::chunk::ChunkSize;
use halo_core::prune::{Policy, Rank, Ties};
use halo_core::seams::Sampling;
use halo_engine::frame::Names;
use halo_engine::rules::{ReturnLight, Rules};
use halo_recall::rank::Mode;
use halo_recall::recall::Manner;

/// Rules for small windows.
pub fn rules(max_tokens: usize) -> Rules {
    Rules {
        context: halo_core::replay::Rules {
            strategy: Strategy::Magnitude(Magnitude::default()),
            chunks: ChunkSize { min: 2, max: 64 },
            policy: Policy::Brightness { rank: Rank::Top4, ties: Ties::Dimmer },
            max_tokens,
            sinks: 0,
            recent: 0,
            fill: true,
            trace_interval: 0,
        },
        room: 20,
        watch: Watch::default(),
        sampling: Sampling { max_tokens: 8, temperature: 0.0, ..Sampling::default() },
        recall: Manner { mode: Mode::Hybrid, user_boost: 1.0, diversity: 0.0, most: 32 },
        returns: ReturnLight::Earned,
        preview: 0,
        tools: None,
        system: "Be brief.".into(),
        dates: false,
        names: Names::default(),
        memory: None,
        premises: None,
    }
}
