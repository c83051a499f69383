//! How a timeline takes changes: what does not fit leaves no trace, and odd ones are undone soundly.

use halo_core::body::Body;
use halo_core::change::{
    Append, Change, DeleteReason, Extent, Leave, NewToken, Part, Run, Score, Scored, Tally, TallyChange,
    WhyLeft,
};
use halo_core::chunk::{ChunkSize, Chunker};
use halo_core::notation;
use halo_core::seams::SeamError;
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, Position, Role, TokenId, TurnId, Voice};

#[test]
fn a_change_that_does_not_fit_changes_nothing() {
    let mut timeline = notation::read("u0.0:3*5 ~a1.0:3*5 a1.1:3*5!").expect("a timeline");
    let before = timeline.state_hash();
    let id = |name: &str| name.parse::<ChunkId>().expect("a chunk");
    let leave = |name: &str, extent| Leave { chunk: id(name), extent, why: WhyLeft::Manual };
    let run = |start, len| Extent::Runs(vec![Run { start: Position(start), len }]);
    let append = |at, turn, role, sentence| {
        let token = NewToken {
            id: TokenId(1),
            text: "w".into(),
            sentence,
            brightness: Brightness(1.0),
            voice: Voice::Speaker,
        };
        Change::Append(Append { at: Position(at), turn: TurnId(turn), role, tokens: vec![token] })
    };
    let score = |start, b| Scored { start: Position(start), brightness: vec![Brightness(b)] };
    let tally = |name: &str, votes| (id(name), TallyChange { votes, mass: 0, looks: 0 });
    let cases: Vec<(Change, &str)> = vec![
        (append(8, 2, Role::User, 0), "tokens for position 8 cannot be appended: the next position is 9"),
        (append(9, 0, Role::User, 0), "turn 0 (user) cannot be continued: the last turn is 1 (assistant)"),
        (append(9, 1, Role::User, 2), "turn 1 (user) cannot be continued: the last turn is 1 (assistant)"),
        (
            append(9, 1, Role::Assistant, 0),
            "a1.0 cannot be continued: a later chunk of its turn exists already",
        ),
        (Change::Prune(vec![leave("u9.0", Extent::Whole)]), "there is no chunk u9.0"),
        (Change::Prune(vec![leave("a1.0", Extent::Whole)]), "a1.0 cannot be pruned: the token at 3 is dead"),
        (
            Change::Prune(vec![leave("u0.0", run(2, 2))]),
            "the tokens named for u0.0 are not tokens of it, in order",
        ),
        (
            Change::Prune(vec![leave("u0.0", Extent::Whole), leave("u0.0", Extent::Whole)]),
            "u0.0 is named twice in one change",
        ),
        (
            Change::Prune(vec![leave("u0.0", Extent::Whole), leave("a1.1", run(u64::MAX, 1))]),
            "the tokens named for a1.1 are not tokens of it, in order",
        ),
        (
            Change::Score(Score {
                runs: vec![],
                tallies: vec![tally("u0.0", 3), tally("u0.0", -2), tally("a1.0", -5)],
            }),
            "the tally of a1.0 cannot be changed like that",
        ),
        (
            Change::Score(Score { runs: vec![], tallies: vec![tally("u0.0", 1), tally("a1.0", i64::MIN)] }),
            "the tally of a1.0 cannot be changed like that",
        ),
        (
            Change::Batch(vec![
                append(9, 1, Role::Assistant, 7),
                append(10, 2, Role::User, 0),
                append(9, 3, Role::User, 0),
            ]),
            "tokens for position 9 cannot be appended: the next position is 11",
        ),
        (Change::Pin { chunk: id("a1.1"), pinned: true }, "a1.1 is pinned already"),
        (
            Change::Merge { chunk: id("a1.1"), frees_name: false },
            "a1.1 cannot be merged: no earlier chunk in its turn is pinned like it",
        ),
        (
            Change::Split { chunk: id("u0.0"), at: Position(0), sentence: 1, tally: Tally::default() },
            "u0.0 cannot be split at 0: no token inside the chunk stands there",
        ),
        (
            Change::Split { chunk: id("u0.0"), at: Position(1), sentence: 1, tally: Tally::default() },
            "u0.0 cannot be split at 1: the new chunk's number must be a free one behind it",
        ),
        (
            Change::Split { chunk: id("a1.0"), at: Position(4), sentence: 1, tally: Tally::default() },
            "a1.0 cannot be split at 4: that number is taken",
        ),
        (
            Change::Split { chunk: id("a1.0"), at: Position(4), sentence: 2, tally: Tally::default() },
            "a1.0 cannot be split at 4: another chunk stands between",
        ),
        (
            Change::Split {
                chunk: id("a1.1"),
                at: Position(7),
                sentence: 2,
                tally: Tally { votes: 1, ..Tally::default() },
            },
            "a1.1 cannot be split at 7: it has gathered less than the tail is to take",
        ),
        (
            Change::Score(Score { runs: vec![score(9, 1.0)], tallies: vec![] }),
            "the score for position 9 is no number, or no token stands there",
        ),
        (
            Change::Score(Score { runs: vec![score(0, f32::NAN)], tallies: vec![] }),
            "the score for position 0 is no number, or no token stands there",
        ),
        (
            Change::Score(Score {
                runs: vec![score(0, 7.0)],
                tallies: vec![tally("u0.0", 3), tally("u0.0", -4)],
            }),
            "the tally of u0.0 cannot be changed like that",
        ),
        (
            Change::Batch(vec![
                Change::Prune(vec![leave("u0.0", Extent::Whole)]),
                append(0, 0, Role::User, 0),
            ]),
            "tokens for position 0 cannot be appended: the next position is 9",
        ),
    ];
    for (change, expected) in cases {
        let error = timeline.apply(&change).expect_err(expected);
        assert_eq!(error.to_string(), expected);
        assert_eq!(timeline.state_hash(), before, "{expected}");
    }
}

/// An answer that took a while: votes of one chunk may be added and taken off in any order that stays sound.
#[test]
fn tallies_are_undone_in_reverse() {
    let mut timeline = notation::read("u0.0:3").expect("a timeline");
    let before = timeline.state_hash();
    let chunk = "u0.0".parse().expect("a chunk");
    let tally = |votes| (chunk, TallyChange { votes, mass: 0, looks: 0 });
    let undo = timeline.apply(&Change::Score(Score { runs: vec![], tallies: vec![tally(3), tally(-2)] }));
    timeline.apply(&undo.expect("it fits")).expect("it can be undone");
    assert_eq!(timeline.state_hash(), before);
}

/// A name that was merged away is spent; the next chunk takes the next one, and a turn goes on there.
#[test]
fn a_merged_name_is_not_used_again() {
    let mut timeline = notation::read("u0.0:3 u0.1:3").expect("a timeline");
    let merge = halo_core::signals::merge(&timeline, "u0.1".parse().expect("a chunk")).expect("two chunks");
    timeline.apply(&merge).expect("it fits");
    assert_eq!(timeline.next_sentence(TurnId(0)), 2);
    let append = |sentence| {
        let token = NewToken {
            id: TokenId(1),
            text: "w".into(),
            sentence,
            brightness: Brightness(1.0),
            voice: Voice::Speaker,
        };
        Change::Append(Append { at: Position(6), turn: TurnId(0), role: Role::User, tokens: vec![token] })
    };
    for spent in [0, 1] {
        let error = timeline.apply(&append(spent)).expect_err("spent").to_string();
        assert!(error.contains("cannot be continued"), "{error}");
    }
    let tokens: Vec<_> =
        timeline.chunks().flat_map(|c| c.run().positions()).filter_map(|p| timeline.token(p)).collect();
    let tokens = tokens.iter().map(|t| (t.chunk.sentence, t.text, false));
    let mut chunker = Chunker::resume(ChunkSize::default(), tokens, timeline.next_sentence(TurnId(0)));
    assert_eq!(chunker.push("w").sentence, 2);
    timeline.apply(&append(2)).expect("the next one");
    assert_eq!(notation::write(&timeline), "u0.0:6 u0.2*1");
}

/// An empty turn behind it does not let a chunk be cut into the wrong turn.
#[test]
fn only_the_last_turn_gets_new_chunks() {
    let mut timeline = notation::read("u0.0:10").expect("a timeline");
    let empty = Append { at: Position(10), turn: TurnId(1), role: Role::Assistant, tokens: vec![] };
    timeline.apply(&Change::Append(empty)).expect("an empty turn");
    let chunk = "u0.0".parse().expect("a chunk");
    let split = Change::Split { chunk, at: Position(5), sentence: 1, tally: Tally::default() };
    assert!(timeline.apply(&split).is_err());
    timeline.check().expect("sound");
}

/// A freed name may be taken by another part of the chunk, out of the order in which names were freed.
#[test]
fn a_freed_name_can_be_split_anew() {
    let mut timeline = notation::read("u0.0:5 u0.1:3 u0.2:2 a1.0").expect("a timeline");
    for name in ["u0.1", "u0.2"] {
        let merge = Change::Merge { chunk: name.parse().expect("a chunk"), frees_name: false };
        timeline.apply(&merge).expect("it fits");
    }
    let chunk = "u0.0".parse().expect("a chunk");
    timeline
        .apply(&Change::Split { chunk, at: Position(9), sentence: 1, tally: Tally::default() })
        .expect("free");
    timeline.check().expect("sound");
    assert_eq!(notation::write(&timeline), "u0.0:9 u0.1 a1.0");
    assert_eq!(timeline.token(Position(8)).map(|t| t.chunk), Some(chunk));
}

/// What was taken back of a chunk is not part of what search reads of it.
#[test]
fn text_is_without_what_was_taken_back() {
    let timeline = notation::read("u0.0[1,x2,3] xu2.0:2").expect("a timeline");
    let texts: Vec<_> = timeline.chunks().map(|c| c.text().into_owned()).collect();
    assert_eq!(texts, ["w w ", "w w "]);
}

#[test]
fn notation_refuses_what_it_cannot_read() {
    for (text, why) in [
        ("u0.0!é", "use : * [ ] ^ $ and ! only"),
        ("u0.0[1]é", "use : * [ ] ^ $ and ! only"),
        ("u0.0:0:5", ": takes a number of tokens, from 1 to 10000000"),
        ("u0.0:99999999999999999", ": takes a number of tokens, from 1 to 10000000"),
        ("u0.0[1,2", "a list of brightness ends with ]"),
        ("u0.0*x", "* takes a brightness"),
        ("u0", "write role, turn and sentence, such as u4.0"),
        ("u0.0*inf", "the score for position 0 is no number, or no token stands there"),
        ("u1.0 u0.0", "turn 0 (user) cannot be continued: the last turn is 1 (user)"),
    ] {
        let error = notation::read(text).expect_err(text).to_string();
        assert!(error.contains(why), "{text}: {error}");
    }
}

/// Undone in the order in which it was done, last first, with an empty turn in between.
#[test]
fn a_split_behind_an_empty_turn_is_undone_soundly() {
    let mut timeline = notation::read("u0.0:10").expect("a timeline");
    let chunk = "u0.0".parse().expect("a chunk");
    let split = Change::Split { chunk, at: Position(5), sentence: 1, tally: Tally::default() };
    let empty = Append { at: Position(10), turn: TurnId(1), role: Role::Assistant, tokens: vec![] };
    let undo = timeline.apply(&Change::Batch(vec![split, Change::Append(empty)])).expect("it fits");
    let redo = timeline.apply(&undo).expect("it can be undone");
    timeline.check().expect("sound");
    assert_eq!(notation::write(&timeline), "u0.0:10");
    timeline.apply(&redo).expect("it can be done again");
    timeline.check().expect("sound");
    assert_eq!(notation::write(&timeline), "u0.0:5 u0.1:5");
    assert_eq!((timeline.next_sentence(TurnId(1)), timeline.question_of(TurnId(1))), (0, Some(TurnId(0))));
}

/// What a store refuses leaves no trace, whatever is in the batch.
#[test]
fn a_refused_change_leaves_no_trace() {
    let mut timeline = notation::read("u0.0:5 u0.1:5").expect("a timeline");
    let before = timeline.clone();
    let token = NewToken {
        id: TokenId(1),
        text: "w".into(),
        sentence: 0,
        brightness: Brightness(1.0),
        voice: Voice::Speaker,
    };
    let merge = Change::Merge { chunk: "u0.1".parse().expect("a chunk"), frees_name: true };
    let append = Append { at: Position(10), turn: TurnId(1), role: Role::Assistant, tokens: vec![token] };
    let batch = Change::Batch(vec![merge, Change::Batch(vec![Change::Append(append)])]);
    let refused = timeline.transact(&batch, |after| {
        assert_eq!(notation::write(after), "u0.0:10 a1.0*1");
        Err(SeamError::new("writing", "the disk is full"))
    });
    assert_eq!(refused, Err(SeamError::new("writing", "the disk is full")));
    assert_eq!(timeline, before);
}

/// What only frames a message for the model is in the window, and in nobody's words.
#[test]
fn a_frame_is_shown_to_the_model_and_said_by_nobody() {
    let mut timeline = Timeline::new();
    let token = |text: &str, voice| NewToken {
        id: TokenId(1),
        text: text.into(),
        sentence: 0,
        brightness: Brightness(1.0),
        voice,
    };
    let tokens = vec![token("<user>", Voice::Frame), token("Hello", Voice::Speaker), token("!", Voice::Tool)];
    let append = Append { at: Position(0), turn: TurnId(0), role: Role::User, tokens };
    timeline.apply(&Change::Append(append)).expect("it fits");
    let id = ChunkId::new(Role::User, TurnId(0), 0);
    let chunk = timeline.chunk(id).expect("it is there");
    assert_eq!(timeline.view(0).text(), "<user>Hello!");
    assert_eq!((chunk.text().as_ref(), chunk.live_text().as_ref()), ("Hello!", "Hello!"));
    assert_eq!(chunk.body().said_text(), "Hello!");
    let part = Part { chunk: id, extent: Extent::Runs(vec![Run { start: Position(1), len: 1 }]) };
    timeline.apply(&Change::Withdraw { parts: vec![part], reason: DeleteReason::User }).expect("it fits");
    let chunk = timeline.chunk(id).expect("it is there");
    assert_eq!((chunk.text().as_ref(), chunk.live_text().as_ref()), ("!", "!"));
    let mut bytes = Vec::new();
    chunk.body().write(&mut bytes);
    assert_eq!(Body::read(&bytes).as_ref(), Ok(chunk.body()), "its voice is kept");
}
