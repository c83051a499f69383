//! The test doubles: a model, an embedder and stores that tests of other crates rely on.

use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::change::{Append, Change, NewToken};
use halo_core::embedder::Embedder;
use halo_core::model::{FinishReason, Model, ModelStep, Prompt, Sampling, StepFlow, WindowToken};
use halo_core::store::{Access, Durability, Store};
use halo_core::testing::doubles::{
    FailingStore, HashEmbedder, InMemoryStore, ScriptedAnswer, ScriptedAttention, ScriptedModel,
};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ContentKind, Position, Role, TokenFlags, TokenId, TurnId};

fn sampling(max_tokens: usize) -> Sampling {
    Sampling { max_tokens, temperature: 0.0, stop: vec!["</tool>".into()], ..Sampling::default() }
}

#[test]
fn scripted_model_plays_answers_with_attention() {
    let answer = |text: &str, attention| ScriptedAnswer { text: text.into(), attention, fails_after: None };
    let answers = vec![
        answer("the gun fires", ScriptedAttention::OnWord("gun".into())),
        answer("one two three four", ScriptedAttention::Missing),
        answer("<tool>x</tool> and more", ScriptedAttention::Uniform),
        ScriptedAnswer { fails_after: Some(1), ..answer("half an answer", ScriptedAttention::Uniform) },
    ];
    let mut model = ScriptedModel::new(64, answers);
    let tokens = model.tokenize("a gun hangs\non the wall", false).expect("the double tokenizes every text");
    assert_eq!(tokens.iter().map(|t| t.text.as_str()).collect::<String>(), "a gun hangs\non the wall");
    let window: Vec<WindowToken> = tokens
        .iter()
        .map(|t| WindowToken { position: None, offset: 0, id: t.id, chunk_start: false })
        .collect();
    let prompt = Prompt {
        conversation: "main",
        window: &window,
        messages: &Vec::new,
        next_position: Position(6),
        ephemeral: false,
    };
    let mut rows = Vec::new();
    let finish = model.generate(&prompt, &sampling(9), &AttentionRequest::default(), &mut |step| {
        let ModelStep::Token(token, row) = step else { panic!("no prompt rows are scripted") };
        rows.push((token.text.clone(), row.expect("the step has attention").mean.to_vec()));
        StepFlow::Continue
    });
    assert_eq!((finish, rows.len()), (Ok(FinishReason::EndOfText), 3));
    assert!(
        rows.iter().all(|(_, row)| (row.iter().sum::<f32>() - 1.0).abs() < 1e-5 && row[1] > 0.3),
        "{rows:?}"
    );
    assert_eq!((rows[0].1.len(), rows[2].1.len()), (6, 8), "each row covers the window before its token");
    let generate = |model: &mut ScriptedModel, max, stop_after: usize| {
        let mut steps = 0;
        let finish = model.generate(&prompt, &sampling(max), &AttentionRequest::default(), &mut |_| {
            steps += 1;
            if steps == stop_after { StepFlow::Stop } else { StepFlow::Continue }
        });
        (finish.map_err(|e| e.to_string()), steps)
    };
    assert_eq!(generate(&mut model, 3, 9), (Ok(FinishReason::Length), 3));
    assert_eq!(generate(&mut model, 9, 9), (Ok(FinishReason::StopSequence), 1));
    assert_eq!(generate(&mut model, 9, 9), (Err("generating: the script breaks down here".into()), 1));
    assert_eq!(generate(&mut model, 9, 9), (Err("generating: the script has no more answers".into()), 0));
    assert_eq!(
        generate(&mut model, 60, 9),
        (Err("generating: 6 tokens and an answer do not fit 64".into()), 0)
    );
}

#[test]
fn hash_embedder_places_shared_words_nearby() {
    let mut embedder = HashEmbedder;
    let vectors = embedder
        .embed(&["the red gun", "a gun, red", "blue sky above", ""])
        .expect("the double embeds every text");
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
    let info = embedder.info().expect("the double has info");
    assert!(vectors.iter().all(|vector| vector.len() == info.dimensions) && info.max_tokens == 256);
    assert!(
        (dot(&vectors[0], &vectors[0]) - 1.0).abs() < 1e-5
            && dot(&vectors[0], &vectors[1]) > dot(&vectors[0], &vectors[2])
    );
    let texts: Vec<String> = ["the red gun", "a gun, red", "blue sky above"].map(str::to_owned).into();
    let mut received = Vec::new();
    let mut listen = |number: usize, vector: Vec<f32>| {
        received.push((number, vector == vectors[number]));
        if number == 1 { StepFlow::Stop } else { StepFlow::Continue }
    };
    embedder.embed_in_background(texts, &mut listen).expect("the double embeds every text");
    assert_eq!(received, [(0, true), (1, true)], "no vector after the stop");
}

fn append_word(timeline: &Timeline) -> Change {
    let token = NewToken {
        id: TokenId(1),
        text: "w".into(),
        chunk_index: 0,
        brightness: Brightness(9.0),
        kind: ContentKind::ToolResult,
    };
    let at = timeline.next_position();
    Change::Append(Append { at, turn: TurnId(0), role: Role::User, tokens: vec![token] })
}

/// A store that fails before writing changes nothing; a store that fails after writing has stored the change. A
/// crash loses only deferred commits.
#[test]
fn failing_store_fails_after_given_calls() {
    let mut store = FailingStore::new(InMemoryStore::default(), 3);
    let mut timeline = store.load("c", Access::Write).expect("the first call succeeds");
    let mut append = |store: &mut FailingStore<InMemoryStore>, durability| {
        let change = append_word(&timeline);
        store.transact("c", &mut timeline, &change, durability)?;
        Ok::<_, Error>(timeline.len())
    };
    assert_eq!(append(&mut store, Durability::Immediate), Ok(1));
    assert_eq!(append(&mut store, Durability::Deferred), Ok(2));
    let failed = append(&mut store, Durability::Immediate).map_err(|e| e.to_string());
    assert_eq!(failed, Err("using the store: the test double fails here".into()), "no calls are left");
    store.calls_left = 1;
    assert_eq!(append(&mut store, Durability::Deferred), Ok(3), "the refused change was rolled back");
    store.fails_after_write = true;
    assert!(append(&mut store, Durability::Deferred).is_err());
    assert_eq!(
        store.inner().load("c", Access::Read).expect("the inner store loads").len(),
        4,
        "the store wrote before it failed"
    );
    store.inner().simulate_crash();
    let loaded = store.inner().load("c", Access::Read).expect("the inner store loads");
    assert_eq!(loaded.len(), 1, "only the immediate commit is stored");
    assert!(
        loaded
            .token(Position(0))
            .is_some_and(|t| t.flags.contains(TokenFlags::TOOL_RESULT) && t.flags.is_live())
    );
}
