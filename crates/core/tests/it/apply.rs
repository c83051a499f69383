//! How a timeline applies changes: an invalid change has no effect, and every change can be undone.

use halo_core::Error;
use halo_core::change::{
    Append, AttentionTally, BrightnessRun, Change, ChunkSelection, DeleteReason, Extent, NewToken,
    PruneReason, Pruned, Score, TallyDelta, TokenRun,
};
use halo_core::chunk_body::ChunkBody;
use halo_core::chunker::{ChunkSize, Chunker};
use halo_core::notation;
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, ContentKind, Position, Role, TokenId, TurnId};

#[test]
fn apply_rejects_invalid_changes_without_effect() {
    let mut timeline = notation::read("u0.0:3*5 ~a1.0:3*5 a1.1:3*5!").expect("a valid timeline");
    let before = timeline.state_hash();
    let id = |name: &str| name.parse::<ChunkId>().expect("a chunk id");
    let prune = |name: &str, extent| Pruned { chunk: id(name), extent, reason: PruneReason::Manual };
    let run = |start, len| Extent::Runs(vec![TokenRun { start: Position(start), len }]);
    let append = |at, turn, role, chunk_index| {
        let token = NewToken {
            id: TokenId(1),
            text: "w".into(),
            chunk_index,
            brightness: Brightness(1.0),
            kind: ContentKind::Message,
        };
        Change::Append(Append { at: Position(at), turn: TurnId(turn), role, tokens: vec![token] })
    };
    let score = |start, b| BrightnessRun { start: Position(start), brightness: vec![Brightness(b)] };
    let tally = |name: &str, votes| (id(name), TallyDelta { votes, mass: 0, exposures: 0 });
    let cases: Vec<(Change, &str)> = vec![
        (append(8, 2, Role::User, 0), "cannot append tokens at position 8: the next position is 9"),
        (append(9, 0, Role::User, 0), "cannot append to turn 0 (user): the last turn is 1 (assistant)"),
        (append(9, 1, Role::User, 2), "cannot append to turn 1 (user): the last turn is 1 (assistant)"),
        (
            append(9, 1, Role::Assistant, 0),
            "cannot append to a1.0: its turn has a later chunk, or a1.0 was merged into another",
        ),
        (Change::Prune(vec![prune("u9.0", Extent::Whole)]), "there is no chunk u9.0"),
        (
            Change::Prune(vec![prune("a1.0", Extent::Whole)]),
            "cannot prune a1.0: its token at position 3 is pruned",
        ),
        (
            Change::Prune(vec![prune("u0.0", run(2, 2))]),
            "the token runs of u0.0 are outside of the chunk, overlap or are out of order",
        ),
        (
            Change::Prune(vec![prune("u0.0", Extent::Whole), prune("u0.0", Extent::Whole)]),
            "u0.0 is named twice in one change",
        ),
        (
            Change::Prune(vec![prune("u0.0", Extent::Whole), prune("a1.1", run(u64::MAX, 1))]),
            "the token runs of a1.1 are outside of the chunk, overlap or are out of order",
        ),
        (
            Change::Score(Score {
                runs: vec![],
                tallies: vec![tally("u0.0", 3), tally("u0.0", -2), tally("a1.0", -5)],
            }),
            "the tally of a1.0 would fall below zero or overflow",
        ),
        (
            Change::Score(Score { runs: vec![], tallies: vec![tally("u0.0", 1), tally("a1.0", i64::MIN)] }),
            "the tally of a1.0 would fall below zero or overflow",
        ),
        (
            Change::Batch(vec![
                append(9, 1, Role::Assistant, 7),
                append(10, 2, Role::User, 0),
                append(9, 3, Role::User, 0),
            ]),
            "cannot append tokens at position 9: the next position is 11",
        ),
        (Change::Pin { chunk: id("a1.1"), pinned: true }, "a1.1 is pinned already"),
        (
            Change::Merge { chunk: id("a1.1"), frees_id: false },
            "cannot merge a1.1: no earlier chunk of its turn is pinned as well",
        ),
        (
            Change::Split {
                chunk: id("u0.0"),
                at: Position(0),
                tail_index: 1,
                tally: AttentionTally::default(),
            },
            "cannot split u0.0 at position 0: the position is not inside the chunk",
        ),
        (
            Change::Split {
                chunk: id("u0.0"),
                at: Position(1),
                tail_index: 1,
                tally: AttentionTally::default(),
            },
            "cannot split u0.0 at position 1: the index of the tail must be a free one behind the chunk",
        ),
        (
            Change::Split {
                chunk: id("a1.0"),
                at: Position(4),
                tail_index: 1,
                tally: AttentionTally::default(),
            },
            "cannot split a1.0 at position 4: the index of the tail is in use",
        ),
        (
            Change::Split {
                chunk: id("a1.0"),
                at: Position(4),
                tail_index: 2,
                tally: AttentionTally::default(),
            },
            "cannot split a1.0 at position 4: another chunk lies between the chunk and its tail",
        ),
        (
            Change::Split {
                chunk: id("a1.1"),
                at: Position(7),
                tail_index: 2,
                tally: AttentionTally { votes: 1, ..AttentionTally::default() },
            },
            "cannot split a1.1 at position 7: the tail takes more of the tally than the chunk has",
        ),
        (
            Change::Score(Score { runs: vec![score(9, 1.0)], tallies: vec![] }),
            "the brightness for position 9 is not finite, or the timeline has no such position",
        ),
        (
            Change::Score(Score { runs: vec![score(0, f32::NAN)], tallies: vec![] }),
            "the brightness for position 0 is not finite, or the timeline has no such position",
        ),
        (
            Change::Score(Score {
                runs: vec![score(0, 7.0)],
                tallies: vec![tally("u0.0", 3), tally("u0.0", -4)],
            }),
            "the tally of u0.0 would fall below zero or overflow",
        ),
        (
            Change::Batch(vec![
                Change::Prune(vec![prune("u0.0", Extent::Whole)]),
                append(0, 0, Role::User, 0),
            ]),
            "cannot append tokens at position 0: the next position is 9",
        ),
    ];
    for (change, expected) in cases {
        let error = timeline.apply(&change).expect_err(expected);
        assert_eq!(error.to_string(), expected);
        assert_eq!(timeline.state_hash(), before, "{expected}");
    }
}

/// One change has several deltas of one chunk. Undone in any order but the reverse one, an intermediate tally would fall
/// below zero.
#[test]
fn tally_undo_runs_in_reverse() {
    let mut timeline = notation::read("u0.0:3").expect("a valid timeline");
    let before = timeline.state_hash();
    let chunk = "u0.0".parse().expect("a chunk id");
    let tally = |votes| (chunk, TallyDelta { votes, mass: 0, exposures: 0 });
    let undo = timeline.apply(&Change::Score(Score { runs: vec![], tallies: vec![tally(3), tally(-2)] }));
    timeline.apply(&undo.expect("the change applies")).expect("the inverse applies");
    assert_eq!(timeline.state_hash(), before);
}

/// The index of a merged chunk is not used again; the turn continues with the next index.
#[test]
fn merge_retires_merged_chunk_id() {
    let mut timeline = notation::read("u0.0:3 u0.1:3").expect("a valid timeline");
    let merge = halo_core::manual_edit::merge(&timeline, "u0.1".parse().expect("a chunk id"))
        .expect("the turn has two chunks");
    timeline.apply(&merge).expect("the change applies");
    assert_eq!(timeline.next_chunk_index(TurnId(0)), 2);
    let append = |chunk_index| {
        let token = NewToken {
            id: TokenId(1),
            text: "w".into(),
            chunk_index,
            brightness: Brightness(1.0),
            kind: ContentKind::Message,
        };
        Change::Append(Append { at: Position(6), turn: TurnId(0), role: Role::User, tokens: vec![token] })
    };
    for used in [0, 1] {
        let error = timeline.apply(&append(used)).expect_err("the index is in use").to_string();
        assert!(error.contains("cannot append to"), "{error}");
    }
    let tokens: Vec<_> =
        timeline.chunks().flat_map(|c| c.run().positions()).filter_map(|p| timeline.token(p)).collect();
    let tokens = tokens.iter().map(|t| (t.chunk.index, t.text, false));
    let mut chunker = Chunker::resume(ChunkSize::default(), tokens, timeline.next_chunk_index(TurnId(0)));
    assert_eq!(chunker.push("w").chunk_index, 2);
    timeline.apply(&append(2)).expect("the next index is free");
    assert_eq!(notation::write(&timeline), "u0.0:6 u0.2*1");
}

/// An empty turn follows the turn of the chunk: the tail must not become a chunk of the empty turn.
#[test]
fn split_adds_chunks_only_to_last_turn() {
    let mut timeline = notation::read("u0.0:10").expect("a valid timeline");
    let empty = Append { at: Position(10), turn: TurnId(1), role: Role::Assistant, tokens: vec![] };
    timeline.apply(&Change::Append(empty)).expect("an empty turn can be appended");
    let chunk = "u0.0".parse().expect("a chunk id");
    let split = Change::Split { chunk, at: Position(5), tail_index: 1, tally: AttentionTally::default() };
    assert!(timeline.apply(&split).is_err());
    timeline.check_invariants().expect("the invariants hold");
}

/// The empty row of a merged chunk may receive other tokens than it had before the merge.
#[test]
fn split_can_reuse_merged_chunk_id() {
    let mut timeline = notation::read("u0.0:5 u0.1:3 u0.2:2 a1.0").expect("a valid timeline");
    for name in ["u0.1", "u0.2"] {
        let merge = Change::Merge { chunk: name.parse().expect("a chunk id"), frees_id: false };
        timeline.apply(&merge).expect("the change applies");
    }
    let chunk = "u0.0".parse().expect("a chunk id");
    timeline
        .apply(&Change::Split { chunk, at: Position(9), tail_index: 1, tally: AttentionTally::default() })
        .expect("the id u0.1 is free");
    timeline.check_invariants().expect("the invariants hold");
    assert_eq!(notation::write(&timeline), "u0.0:9 u0.1 a1.0");
    assert_eq!(timeline.token(Position(8)).map(|t| t.chunk), Some(chunk));
}

/// Deleted tokens are not part of the text that search reads.
#[test]
fn delete_excludes_tokens_from_chunk_text() {
    let timeline = notation::read("u0.0[1,x2,3] xu2.0:2").expect("a valid timeline");
    let texts: Vec<_> = timeline.chunks().map(|c| c.text().into_owned()).collect();
    assert_eq!(texts, ["w w ", "w w "]);
}

#[test]
fn notation_rejects_invalid_text() {
    for (text, expected) in [
        ("u0.0!é", "use : * [ ] ^ $ and ! only"),
        ("u0.0[1]é", "use : * [ ] ^ $ and ! only"),
        ("u0.0:0:5", ": takes a number of tokens, from 1 to 10000000"),
        ("u0.0:99999999999999999", ": takes a number of tokens, from 1 to 10000000"),
        ("u0.0[1,2", "a list of brightness ends with ]"),
        ("u0.0*x", "* takes a brightness"),
        ("u0", "write role, turn and index, such as u4.0"),
        ("u0.0*inf", "the brightness for position 0 is not finite, or the timeline has no such position"),
        ("u1.0 u0.0", "cannot append to turn 0 (user): the last turn is 1 (user)"),
    ] {
        let error = notation::read(text).expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

/// The batch is undone in reverse order, across an empty turn.
#[test]
fn split_before_empty_turn_can_be_undone() {
    let mut timeline = notation::read("u0.0:10").expect("a valid timeline");
    let chunk = "u0.0".parse().expect("a chunk id");
    let split = Change::Split { chunk, at: Position(5), tail_index: 1, tally: AttentionTally::default() };
    let empty = Append { at: Position(10), turn: TurnId(1), role: Role::Assistant, tokens: vec![] };
    let undo =
        timeline.apply(&Change::Batch(vec![split, Change::Append(empty)])).expect("the change applies");
    let redo = timeline.apply(&undo).expect("the inverse applies");
    timeline.check_invariants().expect("the invariants hold");
    assert_eq!(notation::write(&timeline), "u0.0:10");
    timeline.apply(&redo).expect("the undone change applies again");
    timeline.check_invariants().expect("the invariants hold");
    assert_eq!(notation::write(&timeline), "u0.0:5 u0.1:5");
    assert_eq!((timeline.next_chunk_index(TurnId(1)), timeline.question_of(TurnId(1))), (0, Some(TurnId(0))));
}

/// A change that the store refuses has no effect, nested batches included.
#[test]
fn transact_rolls_back_when_commit_fails() {
    let mut timeline = notation::read("u0.0:5 u0.1:5").expect("a valid timeline");
    let before = timeline.clone();
    let token = NewToken {
        id: TokenId(1),
        text: "w".into(),
        chunk_index: 0,
        brightness: Brightness(1.0),
        kind: ContentKind::Message,
    };
    let merge = Change::Merge { chunk: "u0.1".parse().expect("a chunk id"), frees_id: true };
    let append = Append { at: Position(10), turn: TurnId(1), role: Role::Assistant, tokens: vec![token] };
    let batch = Change::Batch(vec![merge, Change::Batch(vec![Change::Append(append)])]);
    let result = timeline.transact(&batch, |after| {
        assert_eq!(notation::write(after), "u0.0:10 a1.0*1");
        Err(Error::internal("writing", "the disk is full"))
    });
    assert_eq!(result, Err(Error::internal("writing", "the disk is full")));
    assert_eq!(timeline, before);
}

/// Chat template tokens are in the window but not in the text of a chunk.
#[test]
fn template_tokens_are_in_window_but_not_in_text() {
    let mut timeline = Timeline::new();
    let token = |text: &str, kind| NewToken {
        id: TokenId(1),
        text: text.into(),
        chunk_index: 0,
        brightness: Brightness(1.0),
        kind,
    };
    let tokens = vec![
        token("<user>", ContentKind::Template),
        token("Hello", ContentKind::Message),
        token("!", ContentKind::ToolResult),
    ];
    let append = Append { at: Position(0), turn: TurnId(0), role: Role::User, tokens };
    timeline.apply(&Change::Append(append)).expect("the change applies");
    let id = ChunkId::new(Role::User, TurnId(0), 0);
    let chunk = timeline.chunk(id).expect("the chunk exists");
    assert_eq!(timeline.context_window(0).text(), "<user>Hello!");
    assert_eq!((chunk.text().as_ref(), chunk.live_text().as_ref()), ("Hello!", "Hello!"));
    assert_eq!(chunk.body().message_text(), "Hello!");
    let selection =
        ChunkSelection { chunk: id, extent: Extent::Runs(vec![TokenRun { start: Position(1), len: 1 }]) };
    timeline
        .apply(&Change::Delete { chunks: vec![selection], reason: DeleteReason::User })
        .expect("the change applies");
    let chunk = timeline.chunk(id).expect("the chunk exists");
    assert_eq!((chunk.text().as_ref(), chunk.live_text().as_ref()), ("!", "!"));
    let mut bytes = Vec::new();
    chunk.body().encode(&mut bytes);
    assert_eq!(ChunkBody::decode(&bytes).as_ref(), Ok(chunk.body()), "decoding restores the content kinds");
}
