//! The doubles of the seams: a model, an embedder and stores that later tests will rely on.

use halo_core::attention::Watch;
use halo_core::change::{Append, Change, NewToken};
use halo_core::seams::{
    Access, Durability, Embedder, Finish, Flow, Model, ModelStep, Prompt, Sampling, SeamError, Seen, Store,
};
use halo_core::testing::doubles::{
    Attention, FailingStore, HashEmbedder, MemoryStore, ScriptedAnswer, ScriptedModel,
};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, Flags, Position, Role, TokenId, TurnId, Voice};

fn sampling(max_tokens: usize) -> Sampling {
    Sampling { max_tokens, temperature: 0.0, stop: vec!["</tool>".into()], ..Sampling::default() }
}

#[test]
fn the_scripted_model_speaks() {
    let say = |text: &str, attention| ScriptedAnswer { text: text.into(), attention, fails_after: None };
    let answers = vec![
        say("the gun fires", Attention::On("gun".into())),
        say("one two three four", Attention::Missing),
        say("<tool>x</tool> and more", Attention::Even),
        ScriptedAnswer { fails_after: Some(1), ..say("half an answer", Attention::Even) },
    ];
    let mut model = ScriptedModel::new(64, answers);
    let pieces = model.tokenize("a gun hangs\non the wall", false).expect("words");
    assert_eq!(pieces.iter().map(|p| p.text.as_str()).collect::<String>(), "a gun hangs\non the wall");
    let window: Vec<Seen> =
        pieces.iter().map(|p| Seen { position: None, behind: 0, id: p.id, begins: false }).collect();
    let prompt = Prompt {
        conversation: "main",
        window: &window,
        messages: &Vec::new,
        next: Position(6),
        aside: false,
    };
    let mut rows = Vec::new();
    let finish = model.generate(&prompt, &sampling(9), &Watch::default(), &mut |step| {
        let ModelStep::Token(piece, row) = step else { panic!("no prompt rows are scripted") };
        rows.push((piece.text.clone(), row.expect("attention").mean.to_vec()));
        Flow::Continue
    });
    assert_eq!((finish, rows.len()), (Ok(Finish::End), 3));
    assert!(
        rows.iter().all(|(_, row)| (row.iter().sum::<f32>() - 1.0).abs() < 1e-5 && row[1] > 0.3),
        "{rows:?}"
    );
    assert_eq!((rows[0].1.len(), rows[2].1.len()), (6, 8), "each row covers what was there before its token");
    let go = |model: &mut ScriptedModel, max, stop_after: usize| {
        let mut said = 0;
        let finish = model.generate(&prompt, &sampling(max), &Watch::default(), &mut |_| {
            said += 1;
            if said == stop_after { Flow::Stop } else { Flow::Continue }
        });
        (finish.map_err(|e| e.to_string()), said)
    };
    assert_eq!(go(&mut model, 3, 9), (Ok(Finish::Length), 3));
    assert_eq!(go(&mut model, 9, 9), (Ok(Finish::Stop), 1));
    assert_eq!(go(&mut model, 9, 9), (Err("generating: the script breaks down here".into()), 1));
    assert_eq!(go(&mut model, 9, 9), (Err("generating: the script is at its end".into()), 0));
    assert_eq!(go(&mut model, 60, 9), (Err("generating: 6 tokens and an answer do not fit 64".into()), 0));
}

#[test]
fn the_hash_embedder_finds_shared_words_near() {
    let mut embedder = HashEmbedder;
    let v = embedder.embed(&["the red gun", "a gun, red", "blue sky above", ""]).expect("always");
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
    let info = embedder.info().expect("always");
    assert!(v.iter().all(|v| v.len() == info.dimensions) && info.max_tokens == 256);
    assert!((dot(&v[0], &v[0]) - 1.0).abs() < 1e-5 && dot(&v[0], &v[1]) > dot(&v[0], &v[2]));
    let texts: Vec<String> = ["the red gun", "a gun, red", "blue sky above"].map(str::to_owned).into();
    let mut told = Vec::new();
    let mut listen = |number: usize, vector: Vec<f32>| {
        told.push((number, vector == v[number]));
        if number == 1 { Flow::Stop } else { Flow::Continue }
    };
    embedder.embed_behind(texts, &mut listen).expect("always");
    assert_eq!(told, [(0, true), (1, true)], "until it was stopped");
}

fn word(timeline: &Timeline) -> Change {
    let token = NewToken {
        id: TokenId(1),
        text: "w".into(),
        sentence: 0,
        brightness: Brightness(9.0),
        voice: Voice::Tool,
    };
    let at = timeline.next_position();
    Change::Append(Append { at, turn: TurnId(0), role: Role::User, tokens: vec![token] })
}

/// A store that fails leaves what was there; one that fails after the fact has written. A crash takes what
/// was written behind, and nothing that was acknowledged as safe.
#[test]
fn the_failing_store_fails_on_demand() {
    let mut store = FailingStore::new(MemoryStore::default(), 3);
    let mut timeline = store.load("c", Access::Write).expect("first call");
    let mut say = |store: &mut FailingStore<MemoryStore>, durability| {
        let change = word(&timeline);
        store.transact("c", &mut timeline, &change, durability)?;
        Ok::<_, SeamError>(timeline.len())
    };
    assert_eq!(say(&mut store, Durability::Now), Ok(1));
    assert_eq!(say(&mut store, Durability::Behind), Ok(2));
    let failed = say(&mut store, Durability::Now).map_err(|e| e.to_string());
    assert_eq!(failed, Err("using the store: it was told to fail".into()), "no call is left");
    store.calls_left = 1;
    assert_eq!(
        say(&mut store, Durability::Behind),
        Ok(3),
        "what the store refused has left no trace here either"
    );
    store.after_the_fact = true;
    assert!(say(&mut store, Durability::Behind).is_err());
    assert_eq!(
        store.inner().load("c", Access::Read).expect("underneath").len(),
        4,
        "it had written before it failed"
    );
    store.inner().crash();
    let loaded = store.inner().load("c", Access::Read).expect("underneath");
    assert_eq!(loaded.len(), 1, "only what was safe is left");
    assert!(loaded.token(Position(0)).is_some_and(|t| t.flags.has(Flags::TOOL) && t.flags.is_live()));
}
