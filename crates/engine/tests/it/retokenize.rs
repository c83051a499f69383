//! Texts that were imported without a model, opened by the first one.

use crate::common::test_rules;
use halo_core::change::{Append, Change, Extent, NewToken, PruneReason, Pruned};
use halo_core::store::{Access, Durability, Store};
use halo_core::testing::doubles::{InMemoryStore, ScriptedModel};
use halo_core::testing::shared_store::SharedStore;
use halo_core::token::{Brightness, ChunkId, ContentKind, Role, TokenId, TurnId};
use halo_engine::session::Session;

fn open_session(store: &SharedStore<InMemoryStore>) -> Session {
    let model = Box::new(ScriptedModel::new(4096, Vec::new()));
    let session = Session::open(Box::new(store.clone()), model, None, "main", test_rules(0), &mut |_, _| {});
    session.unwrap_or_else(|error| panic!("the session does not open: {error}"))
}

/// Appends a message as an import of an earlier version did: words with the white space before them, cut into chunks
/// behind the word that completes an empty line.
fn append_imported(store: &SharedStore<InMemoryStore>, chunks: &[&[&str]], edits: &[Change]) {
    let mut store = store.clone();
    let mut timeline = store.load("main", Access::Write).expect("the conversation loads");
    let token = |chunk_index: usize, text: &str| NewToken {
        id: TokenId::UNTOKENIZED,
        text: text.to_owned(),
        chunk_index: chunk_index as u32,
        brightness: Brightness(10_000.0),
        kind: ContentKind::Message,
    };
    let words = |(index, words): (usize, &&[&str])| -> Vec<NewToken> {
        words.iter().map(|word| token(index, word)).collect()
    };
    let tokens = chunks.iter().enumerate().flat_map(words).collect();
    let (at, turn, role) = (timeline.next_position(), timeline.next_turn(), Role::Assistant);
    let append = Change::Append(Append { at, turn, role, tokens });
    for change in std::iter::once(&append).chain(edits) {
        store
            .transact("main", &mut timeline, change, Durability::Immediate)
            .expect("the change is committed");
    }
}

/// The first model that opens a text which was imported before moves each word to its paragraph, and loses nothing: no
/// byte, no pin, no pruned chunk.
#[test]
fn retokenize_moves_late_words_of_earlier_imports_to_their_paragraph() {
    type Chunks<'a> = &'a [&'a [&'a str]];
    let cases: &[(&str, Chunks<'_>, &[&str])] = &[
        (
            "a paragraph",
            &[&["Ovens", " heat", ".", "\n", "\nBread"], &[" is", " another", " matter."]],
            &["Ovens heat.\n", "\nBread is another matter."],
        ),
        (
            "line breaks of Windows",
            &[&["Ovens.", "\r", "\n", "\r", "\nBread"], &[" is", " one."]],
            &["Ovens.\r\n\r", "\nBread is one."],
        ),
        (
            "an opening fence",
            &[&["Run", "\n", "\n```sh"], &["\nls", "\n```"], &["\nDone."]],
            &["Run\n", "\n```sh\nls\n```", "\nDone."],
        ),
        (
            "a closing fence behind an empty line",
            &[&["```", "\nls", "\n", "\n```"], &["\nDone."]],
            &["```\nls\n\n```", "\nDone."],
        ),
        ("a closing brace", &[&["f {", "\nx", "\n}"], &["\ng"]], &["f {\nx\n}", "\ng"]),
        ("a chunk of one word", &[&["\nBread"], &[" is"]], &["\nBread", " is"]),
        ("an import of today", &[&["Ovens.", "\n\n"], &["Bread", " is."]], &["Ovens.\n", "\nBread is."]),
    ];
    for (case, chunks, expected) in cases {
        let store = SharedStore::new(InMemoryStore::default());
        append_imported(&store, chunks, &[]);
        let session = open_session(&store);
        let texts: Vec<String> = session.timeline().chunks().map(|chunk| chunk.text().into_owned()).collect();
        assert_eq!(texts, *expected, "{case}");
        let bytes: String = chunks.iter().flat_map(|words| words.iter().copied()).collect();
        assert_eq!(texts.concat(), bytes, "{case}");
    }

    let mut store = SharedStore::new(InMemoryStore::default());
    let [first, second, third] = [0, 1, 2].map(|index| ChunkId::new(Role::Assistant, TurnId(0), index));
    let pruned = Pruned { chunk: second, extent: Extent::Whole, reason: PruneReason::BeforeImport };
    append_imported(
        &store,
        &[&["One", "\n", "\nTwo"], &[" twos", "\n", "\nThree"], &[" threes"]],
        &[Change::Pin { chunk: first, pinned: true }, Change::Prune(vec![pruned])],
    );
    let session = open_session(&store);
    let mut timeline = session.timeline().clone();
    store.load_bodies("main", &mut timeline, &[first, second, third]).expect("the bodies load");
    let state: Vec<_> = timeline
        .chunks()
        .map(|chunk| (chunk.id(), chunk.text().into_owned(), chunk.is_pinned(), chunk.is_live()))
        .collect();
    assert_eq!(
        state,
        [
            (first, "One\n".to_owned(), true, true),
            (second, "\nTwo twos\n".to_owned(), false, false),
            (third, "\nThree threes".to_owned(), false, true),
        ]
    );
}
