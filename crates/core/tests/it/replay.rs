//! Replays of small captures. The command-line tests replay whole captures from files.

use halo_core::apply::ApplyError;
use halo_core::brightness::{MagnitudeRules, ScoringStrategy};
use halo_core::chunker::ChunkSize;
use halo_core::notation;
use halo_core::prune::{PrunePolicy, RankBy, TieBreak};
use halo_core::replay::{
    RecordedStep, RecordedToken, Replay, ReplayError, ReplayMismatch, ReplayOutcome, ReplayPlace,
};
use halo_core::rules::ContextRules;
use halo_core::token::{Brightness, ContentKind, Role, TokenId, TurnId};

fn rules(max_tokens: usize) -> ContextRules {
    ContextRules {
        strategy: ScoringStrategy::Magnitude(MagnitudeRules::default()),
        chunks: ChunkSize { min: 2, max: 4 },
        policy: PrunePolicy::Brightness { rank: RankBy::Peak, ties: TieBreak::Dimmer },
        max_tokens,
        sinks: 0,
        recent: 0,
        fill: false,
        trace_interval: 0,
    }
}

fn prompt_token(position: u64, chunk: &str, brightness: f32) -> RecordedToken {
    RecordedToken {
        id: TokenId(1),
        text: "w ".into(),
        position,
        chunk: chunk.parse().expect("a chunk id"),
        brightness: Some(Brightness(brightness)),
        pinned: false,
        kind: ContentKind::Message,
    }
}

fn step(attention: Option<Result<Vec<f32>, String>>) -> RecordedStep {
    RecordedStep {
        id: TokenId(2),
        text: "x ".into(),
        position: None,
        turn: None,
        chunk_index: None,
        tool_result: false,
        attention,
    }
}

fn run(
    rules: &ContextRules,
    prompt: &[RecordedToken],
    steps: &[RecordedStep],
) -> Result<ReplayOutcome, ReplayError> {
    let mut replay = Replay::begin(0, prompt, rules)?;
    steps.iter().try_for_each(|step| replay.step(step))?;
    replay.finish()
}

#[test]
fn replay_scores_steps_and_prunes_at_end_of_answer() {
    let prompt =
        [("u0.0", 50.0), ("a1.0", 60.0), ("u2.0", 70.0)].map(|(chunk, brightness)| (chunk, brightness));
    let prompt: Vec<_> = prompt.iter().zip(0..).map(|(&(c, b), at)| prompt_token(at, c, b)).collect();
    let steps = [
        step(None),
        step(Some(Ok(vec![0.25, 0.125, 0.5, 0.125]))),
        step(Some(Err("attention_b64 is not base64".into()))),
    ];
    let outcome = run(&rules(4), &prompt, &steps).expect("a valid capture");
    let round = &outcome.rounds[0];
    assert_eq!((round.turn, round.steps, round.votes), (TurnId(3), 3, 1));
    assert_eq!(round.attention_errors, [(3, "attention_b64 is not base64".to_owned())]);
    let pruned: Vec<_> = round.pruned.iter().map(|p| p.chunk.to_string()).collect();
    assert_eq!(pruned, ["u0.0", "a1.0"]);
    assert_eq!(notation::write(&outcome.timeline), "~u0.0*50 ~a1.0*59$0.125 u2.0*72^1$0.5 a3.0:3");
    assert_eq!(run(&rules(4), &prompt, &steps), Ok(outcome), "the same capture gives the same outcome");
}

#[test]
fn replay_reports_the_record_that_does_not_fit() {
    let prompt = [prompt_token(5, "u0.0", 1.0), prompt_token(5, "u0.0", 1.0)];
    let error = run(&rules(0), &prompt, &[]).expect_err("the positions do not ascend");
    assert_eq!(error.place, ReplayPlace::PromptToken(2));
    assert_eq!(error.reason, ReplayMismatch::PositionOrder { position: 5, last: 5 });
    let earlier_turn = RecordedStep { turn: Some((TurnId(0), Role::Assistant)), ..step(None) };
    let error = run(&rules(0), &prompt[..1], &[earlier_turn]).expect_err("the turn is the user's");
    assert_eq!(error.place, ReplayPlace::Step(1));
    assert!(matches!(error.reason, ReplayMismatch::Apply(ApplyError::NotLastTurn { .. })), "{error}");
}
