//! Extracts: the brightest sentences, word for word.

use halo_core::change::{Append, AttentionTally, Change, NewToken, Score, TallyDelta};
use halo_core::extract::brightest_sentences;
use halo_core::manual_edit;
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, ContentKind, Role, TokenId, TurnId};

/// A turn of one chunk: words with their brightness, and the share of attention of the chunk.
type ExtractTurn<'a> = (Role, &'a [(&'a str, f32)], Option<f64>);

fn timeline(turns: &[ExtractTurn<'_>]) -> Timeline {
    let mut timeline = Timeline::new();
    for (turn, (role, words, share)) in (0..).zip(turns) {
        let token = |(text, brightness): &(&str, f32)| NewToken {
            id: TokenId(1),
            text: (*text).to_owned(),
            chunk_index: 0,
            brightness: Brightness(*brightness),
            kind: if text.starts_with('<') { ContentKind::Template } else { ContentKind::Message },
        };
        let (at, turn, role) = (timeline.next_position(), TurnId(turn), *role);
        let append = Append { at, turn, role, tokens: words.iter().map(token).collect() };
        timeline.apply(&Change::Append(append)).expect("appended");
        if let Some(share) = share {
            let mass = (share * 1000.0 * AttentionTally::MASS_UNIT) as i64;
            let delta = TallyDelta { votes: 1, mass, exposures: 1000 };
            let tallies = vec![(ChunkId::new(role, turn, 0), delta)];
            timeline.apply(&Change::Score(Score { tallies, ..Score::default() })).expect("scored");
        }
    }
    timeline
}

fn texts(timeline: &Timeline, limit: usize) -> Vec<String> {
    brightest_sentences(timeline, limit, |_| true).into_iter().map(|sentence| sentence.text).collect()
}

#[test]
fn extract_takes_brightest_sentences_in_order_of_the_timeline() {
    let story: &[ExtractTurn<'_>] = &[
        (
            Role::User,
            &[("<user>", 9.0), ("The gun", 900.0), (" is called Betsy.", 800.0), (" It rains.", 10.0)],
            Some(0.5),
        ),
        (
            Role::Assistant,
            &[("Noted!", 5.0), ("\n\n---\n\n", 5.0), ("Version 1.5", 4.0), (" is out", 4.0)],
            Some(0.1),
        ),
        (Role::User, &[("天气好。", 7.0), ("再见", 3.0)], Some(0.3)),
        (Role::Assistant, &[("Nobody has attended to this.", 9000.0)], None),
    ];
    let timeline = timeline(story);
    assert_eq!(texts(&timeline, 1), ["The gun is called Betsy."]);
    assert_eq!(texts(&timeline, 2), ["The gun is called Betsy.", "天气好。"]);
    assert_eq!(
        texts(&timeline, 99),
        ["The gun is called Betsy.", "It rains.", "Noted!", "Version 1.5 is out", "天气好。", "再见"],
        "a line of dashes is no sentence, the template is no text, and what was never attended to is left out"
    );
    assert_eq!(texts(&timeline, 0), [""; 0]);
    assert_eq!(brightest_sentences(&timeline, 9, |chunk| chunk.id().turn == TurnId(2)).len(), 2);
}

#[test]
fn extract_leaves_out_deleted_text_and_keeps_pruned_text() {
    let story: &[ExtractTurn<'_>] =
        &[(Role::User, &[("One.", 5.0)], Some(0.5)), (Role::Assistant, &[("Two.", 5.0)], Some(0.4))];
    let mut timeline = timeline(story);
    let [first, second] = ["u0.0", "a1.0"].map(|name| name.parse::<ChunkId>().expect("a chunk"));
    let prune = manual_edit::prune(&timeline, first, None).expect("it can be pruned");
    timeline.apply(&prune).expect("pruned");
    assert_eq!(texts(&timeline, 9), ["One.", "Two."]);
    let delete = manual_edit::delete(&timeline, second).expect("it can be deleted");
    timeline.apply(&delete).expect("deleted");
    assert_eq!(texts(&timeline, 9), ["One."]);
}
