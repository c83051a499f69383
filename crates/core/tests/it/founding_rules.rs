//! Rules of the founding documents by which chunks are scored and pruned, as the preset `halo_weave` has them.

use halo_core::brightness::{MagnitudeRules, ScoringStrategy};
use halo_core::notation;
use halo_core::prune::{PrunePolicy, PruneRules, RankBy, TieBreak, plan_prune};
use halo_core::scorer::Scorer;
use halo_core::token::{TokenSource, TurnId};

fn peak_rules(budget: usize) -> PruneRules {
    PruneRules {
        policy: PrunePolicy::Brightness { rank: RankBy::Peak, ties: TieBreak::Dimmer },
        budget,
        sinks: 0,
        recent: 0,
        current: None,
        fill: false,
    }
}

/// The names of the chunks that are pruned to a budget, in order, and the tokens that are left.
fn pruned(timeline: &str, budget: usize) -> (Vec<String>, usize) {
    let timeline = notation::read(timeline).expect("a timeline");
    let plan = plan_prune(timeline.context_window(0), &peak_rules(budget));
    (plan.pruned.iter().map(|pruned| pruned.chunk.to_string()).collect(), plan.after)
}

/// One bright token saves its chunk, however dim the others are; the mean does not count.
#[test]
fn peak_of_one_bright_token_saves_its_chunk() {
    let timeline = "u0.0 a1.0 a1.1[9000,1,1,1] a1.2[900,900,900,900] a1.3[8000,8000,8000,8000]";
    assert_eq!(pruned(timeline, 10), (vec!["a1.2".to_owned()], 10));
    assert_eq!(pruned(timeline, 9), (vec!["a1.2".to_owned(), "a1.3".to_owned()], 6));
}

/// The lowest peak goes first, until the window fits its budget and no further.
#[test]
fn pruning_by_peak_stops_at_the_budget() {
    let timeline = "u0.0 a1.0 a1.1:4*500 a1.2:4*100 a1.3:4*300 a1.4:4*700";
    let order = ["a1.2", "a1.3", "a1.1", "a1.4"];
    for (budget, count, left) in [(18, 0, 18), (17, 1, 14), (14, 1, 14), (13, 2, 10), (6, 3, 6), (5, 4, 2)] {
        let expected: Vec<String> = order[..count].iter().map(|&name| name.to_owned()).collect();
        assert_eq!(pruned(timeline, budget), (expected, left), "budget {budget}");
    }
}

/// New tokens begin at 10,000, for every source.
#[test]
fn magnitude_initial_brightness_is_the_cap() {
    let rules = MagnitudeRules::default();
    assert_eq!((rules.initial.0, rules.cap.0, rules.decay), (10_000.0, 10_000.0, 1.0));
    let strategy = ScoringStrategy::Magnitude(rules);
    for source in [TokenSource::User, TokenSource::System, TokenSource::Tool, TokenSource::Llm] {
        assert_eq!(strategy.initial_brightness(source).0, 10_000.0);
    }
}

/// The mean brightness is that of the tokens before the running turn.
#[test]
fn mean_brightness_leaves_out_the_running_turn() {
    let timeline = notation::read("u0.0:2*400 a1.0:2*600 u2.0:4*10000").expect("a timeline");
    let strategy = ScoringStrategy::Magnitude(MagnitudeRules::default());
    let mean =
        |current: Option<TurnId>| Scorer::new(strategy.clone(), timeline.context_window(0), current).mean();
    assert_eq!(mean(Some(TurnId(2))), 500.0);
    assert_eq!(mean(None), 5250.0);
}

/// A step of a token that the model was unsure of is left out where the rules say so; a step without a probability counts.
#[test]
fn min_confidence_leaves_out_unsure_steps() {
    let strategy = |min_confidence| {
        ScoringStrategy::Magnitude(MagnitudeRules { min_confidence, ..MagnitudeRules::default() })
    };
    for (min_confidence, probability, scored) in [
        (0.0, Some(0.0), true),
        (0.5, Some(0.5), true),
        (0.5, Some(0.49), false),
        (0.5, Some(f32::NAN), false),
        (0.5, None, true),
    ] {
        assert_eq!(
            strategy(min_confidence).scores_step(probability),
            scored,
            "{min_confidence} {probability:?}"
        );
    }
}
