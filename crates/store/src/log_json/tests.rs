//! The stored words. A line here that no longer matches means that old logs and exports cannot be read.

use super::{from_json, to_json};
use halo_core::change::{
    Append, AttentionTally, Change, ChunkSelection, DeleteReason, Extent, Measure, NewToken, PrunePairing,
    PruneReason, Pruned, ResurrectReason, Resurrected, TokenRun,
};
use halo_core::token::{Brightness, ChunkId, ContentKind, Position, Role, TokenId, TurnId};

fn assert_stored_as(change: &Change, json: &str) {
    assert_eq!(to_json(change), json);
    assert_eq!(from_json(json).expect("the stored words can be read"), *change);
}

fn chunk() -> ChunkId {
    "a1.2".parse().expect("a chunk id")
}

fn prune(reason: PruneReason) -> Change {
    Change::Prune(vec![Pruned { chunk: chunk(), extent: Extent::Whole, reason }])
}

#[test]
fn log_json_keeps_the_words_of_measures() {
    let measures = [
        (Measure::Peak, "peak"),
        (Measure::Mean, "mean"),
        (Measure::Top4, "top4"),
        (Measure::Votes, "votes"),
        (Measure::Attention, "attention"),
        (Measure::Share, "share"),
        (Measure::Age, "age"),
        (Measure::Random, "lot"),
        (Measure::Salience, "salience"),
    ];
    for (measure, word) in measures {
        let (value, peak, pairing) = (0.5, Brightness(9.0), PrunePairing::TookPartner(chunk()));
        let reason = PruneReason::Ranked { order: 0, measure, value, peak, live: 7, budget: 6, pairing };
        let json = format!(
            r#"[{{"prune":[{{"chunk":"a1.2","why":{{"ranked":{{"order":0,"by":"{word}","value":0.5,"peak":9,"live":7,"budget":6,"pair":{{"takes":"a1.2"}}}}}}}}]}}]"#
        );
        assert_stored_as(&prune(reason), &json);
    }
}

#[test]
fn log_json_keeps_the_words_of_delete_reasons() {
    let reasons = [
        (DeleteReason::UserRegenerated, "user_regenerated"),
        (DeleteReason::UserEdited, "user_edited"),
        (DeleteReason::ClientRegenerated, "client_regenerated"),
        (DeleteReason::ClientEdited, "client_edited"),
        (DeleteReason::VariantChosen, "variant_chosen"),
        (DeleteReason::NoAnswer, "no_answer"),
        (DeleteReason::CallsRewritten, "calls_rewritten"),
        (DeleteReason::Forget, "forget"),
        (DeleteReason::Undo, "undo"),
    ];
    let selection = || vec![ChunkSelection { chunk: chunk(), extent: Extent::Whole }];
    for (reason, word) in reasons {
        let json = format!(r#"[{{"withdraw":{{"chunks":[{{"chunk":"a1.2"}}],"reason":"{word}"}}}}]"#);
        assert_stored_as(&Change::Delete { chunks: selection(), reason }, &json);
    }
    let by_user = Change::Delete { chunks: selection(), reason: DeleteReason::User };
    assert_stored_as(&by_user, r#"[{"withdraw":[{"chunk":"a1.2"}]}]"#);
    assert_stored_as(&Change::Undelete(selection()), r#"[{"restore":[{"chunk":"a1.2"}]}]"#);
}

#[test]
fn log_json_keeps_the_words_of_prune_and_resurrect_reasons() {
    let reasons = [
        (PruneReason::Culled { live: 9, target: 5 }, r#"{"culled":{"live":9,"target":5}}"#),
        (PruneReason::Manual, r#""manual""#),
        (PruneReason::ManualDependent(chunk()), r#"{"manual_with":"a1.2"}"#),
        (PruneReason::Client, r#""client""#),
        (PruneReason::Reasoning, r#""reasoning""#),
        (PruneReason::BeforeImport, r#""before""#),
        (PruneReason::Undo, r#""undo""#),
    ];
    for (reason, json) in reasons {
        assert_stored_as(&prune(reason), &format!(r#"[{{"prune":[{{"chunk":"a1.2","why":{json}}}]}}]"#));
    }
    let reasons = [
        (ResurrectReason::SearchHit { rank: 1, score: 0.5 }, r#"{"found":{"rank":1,"score":0.5}}"#),
        (ResurrectReason::OpensTurnOf(chunk()), r#"{"opens_turn_of":"a1.2"}"#),
        (ResurrectReason::PairOf(chunk()), r#"{"pair_of":"a1.2"}"#),
        (ResurrectReason::Manual, r#""manual""#),
        (ResurrectReason::Merged, r#""merged""#),
        (ResurrectReason::Undo, r#""undo""#),
    ];
    for (reason, json) in reasons {
        let extent = Extent::Runs(vec![TokenRun { start: Position(4), len: 2 }]);
        let brightness = Some(Brightness(0.5));
        let change = Change::Resurrect(vec![Resurrected { chunk: chunk(), extent, brightness, reason }]);
        let json =
            format!(r#"[{{"resurrect":[{{"chunk":"a1.2","runs":[[4,2]],"brightness":0.5,"why":{json}}}]}}]"#);
        assert_stored_as(&change, &json);
    }
}

#[test]
fn log_json_keeps_the_words_of_other_changes() {
    let token = |id, text: &str, kind| NewToken {
        id: TokenId(id),
        text: text.into(),
        chunk_index: 0,
        brightness: Brightness(10_000.0),
        kind,
    };
    let tokens = vec![
        token(1, "a", ContentKind::Message),
        token(2, "b", ContentKind::Message),
        token(3, "c", ContentKind::ToolResult),
        token(4, "d", ContentKind::Template),
    ];
    let append = Append { at: Position(5), turn: TurnId(1), role: Role::Assistant, tokens };
    let pin = Change::Pin { chunk: chunk(), pinned: true };
    let merge = Change::Merge { chunk: chunk(), frees_id: false };
    let tally = AttentionTally { votes: 1, mass: 2, exposures: 3 };
    let split = Change::Split { chunk: chunk(), at: Position(6), tail_index: 3, tally };
    assert_stored_as(
        &Change::Batch(vec![Change::Append(append), pin, merge, split]),
        concat!(
            r#"[{"append":{"at":5,"turn":1,"role":"assistant","parts":["#,
            r#"{"sentence":0,"brightness":10000,"tokens":[[1,"a"],[2,"b"]]},"#,
            r#"{"sentence":0,"brightness":10000,"tool":true,"tokens":[[3,"c"]]},"#,
            r#"{"sentence":0,"brightness":10000,"frame":true,"tokens":[[4,"d"]]}]}},"#,
            r#"{"pin":{"chunk":"a1.2","pinned":true}},"#,
            r#"{"merge":{"chunk":"a1.2","frees_name":false}},"#,
            r#"{"split":{"chunk":"a1.2","at":6,"sentence":3,"tally":[1,2,3]}}]"#
        ),
    );
}
