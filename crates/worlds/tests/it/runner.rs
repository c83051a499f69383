//! The runner on a real database, with a scripted model and a clock that the test sets.

use halo_agents::token_counter::{CeilTokenCounter, TokenCounter};
use halo_core::chunker::ChunkSize;
use halo_core::model::Sampling;
use halo_core::row_store::{Row, RowKind, RowStore};
use halo_core::testing::doubles::{ScriptedAnswer, ScriptedModel};
use halo_core::token::Brightness;
use halo_store::database::{Database, StoreLocation};
use halo_store::exchange::ImportRequest;
use halo_worlds::action::{Action, ActionContext};
use halo_worlds::agent_model::AgentModel;
use halo_worlds::format::HudFormat;
use halo_worlds::heartbeat::Millis;
use halo_worlds::hud_renderer::HudRenderer;
use halo_worlds::import;
use halo_worlds::prompts::WorldPrompts;
use halo_worlds::runner::{HeartbeatReport, RunnerStep, WorldRunner};
use halo_worlds::testing::{self, RandomWorldSize, START_TIME, WorldRng};
use halo_worlds::user_command::UserCommand;
use halo_worlds::world::{ARCHITECT, AgentId, MessageSender, Reaction, RoomMessage, World};
use halo_worlds::world_file::WorldFile;
use halo_worlds::world_store::{
    self, AGENT_KIND, COMMAND_KIND, HEADER_KIND, MESSAGE_KIND, ROOM_KIND, WorldStore,
};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

const WORLD_TOML: &str = r#"
    [[agents]]
    name = "Ada"
    seed = "You are Ada."
    interval = 2.0

    [[agents]]
    name = "Ben"
    seed = "You are Ben."
    interval = 3.0
    input_format = "toon"
    output_format = "toon"

    [[rooms]]
    owner = "Ada"
    members = ["Ben"]
    keys = ["open"]
"#;

fn open_store(folder: &Path) -> Box<dyn RowStore + Send> {
    Box::new(Database::open(&StoreLocation::Sqlite(folder.join("halo.db"))).expect("a store"))
}

fn test_world() -> World {
    toml::from_str::<WorldFile>(WORLD_TOML).expect("a file").into_world("local", START_TIME).expect("a world")
}

/// A model that answers with these texts in turn.
fn scripted_agent_model(answers: &[impl AsRef<str>]) -> AgentModel {
    let answers = answers
        .iter()
        .map(|text| ScriptedAnswer { text: text.as_ref().into(), ..ScriptedAnswer::default() })
        .collect();
    let model = Box::new(ScriptedModel::new(100_000, answers));
    let sampling = Sampling { max_tokens: 1_000, ..Sampling::default() };
    AgentModel::new(model, Arc::new(CeilTokenCounter), sampling, true)
}

/// A runner whose model answers with these texts in turn, and its wall clock.
fn scripted_runner(store: WorldStore, answers: &[&str]) -> (WorldRunner, Arc<AtomicI64>) {
    let clock_time = Arc::new(AtomicI64::new(START_TIME));
    let clock = Arc::clone(&clock_time);
    let models = BTreeMap::from([("local".to_owned(), scripted_agent_model(answers))]);
    let runner = WorldRunner::new(
        store,
        models,
        WorldPrompts::default(),
        Box::new(move || clock.load(Ordering::SeqCst)),
    );
    (runner, clock_time)
}

/// Advances the clock to the next heartbeat and runs it.
fn run_to_next_heartbeat(runner: &WorldRunner, clock_time: &AtomicI64) -> HeartbeatReport {
    for _ in 0..10_000 {
        match runner.run_next(None).expect("a step") {
            RunnerStep::Heartbeat(report) => return *report,
            RunnerStep::Wait(time) => {
                clock_time.fetch_add(time.as_millis() as Millis, Ordering::SeqCst);
            }
            RunnerStep::Changed(_) | RunnerStep::Preempted => {}
        }
    }
    panic!("no heartbeat");
}

fn messages_in_room(world: &World, room: u32) -> Vec<(String, String)> {
    let messages = world.room(AgentId(room)).expect("a room").messages.iter();
    messages.map(|message| (message.sender.to_string(), message.content.clone())).collect()
}

#[test]
fn heartbeat_results_are_stored() {
    let folder = tempfile::tempdir().expect("a folder");
    let store =
        WorldStore::create(open_store(folder.path()), "w", test_world(), START_TIME).expect("a world");
    let answers = [
        r#"{"responses": [{"room_id": 1, "message": "Hello, Ben."}], "actions": [{"type": "set", "path": "mood", "value": "calm"}]}"#,
        "responses[1]{room_id,message}:\n  1,Hello to you\nactions[1]{type,message_id,reaction}:\n  react,1,thumbs_up",
        "I have nothing to say.",
        r#"{"responses": [{"room_id": 1, "message": "[no response]"}], "actions": [{"type": "fly"}]}"#,
    ];
    let (runner, clock_time) = scripted_runner(store, &answers);
    let reports: Vec<HeartbeatReport> = (0..4).map(|_| run_to_next_heartbeat(&runner, &clock_time)).collect();
    let who: Vec<u32> = reports.iter().map(|report| report.agent.0).collect();
    assert_eq!(who, [1, 2, 1, 2], "by their own time");
    // Ada's interval is 2 s, 0.1 s more after each heartbeat and 0.5 s less after Ben's thumbs-up.
    assert_eq!(reports[2].finished_at - reports[0].finished_at, 2_100);
    assert_eq!(reports[3].finished_at - reports[1].finished_at, 3_100);
    assert!(reports[2].outcome.is_err(), "an answer that cannot be parsed is an error");
    let world = runner.store().world.clone();
    assert_eq!(
        messages_in_room(&world, 1),
        [("1".into(), "Hello, Ben.".into()), ("2".into(), "Hello to you".into())]
    );
    let ada = world.agent(AgentId(1)).expect("alive");
    assert_eq!(ada.knowledge.get("mood"), Ok(Some("calm".into())));
    assert_eq!(ada.interval.seconds(), 1.7, "2.0 + 0.1 - 0.5 + 0.1");
    let refused: Vec<&str> = ada.recent_actions.iter().filter_map(|one| one.refused.as_deref()).collect();
    assert_eq!(refused, ["the answer is neither JSON nor TOON with 'responses' and 'actions'"]);
    let ben = world.agent(AgentId(2)).expect("alive");
    assert_eq!(
        ben.recent_actions.back().and_then(|one| one.refused.as_deref()),
        Some("there is no action 'fly'")
    );
    // The world is leased while it runs, and unchanged when it is opened again.
    assert!(
        WorldStore::open(open_store(folder.path()), "w")
            .is_err_and(|why| why.to_string().contains("another Halo"))
    );
    drop(runner);
    let again = WorldStore::open(open_store(folder.path()), "w").expect("stored");
    assert_eq!(again.world, world);
}

#[test]
fn message_is_prerendered_once_per_format() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = test_world();
    world.execute_command(UserCommand::Join { room: AgentId(1) }, START_TIME).expect("the user joins");
    let store = WorldStore::create(open_store(folder.path()), "w", world, START_TIME).expect("a world");
    let counted: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = Arc::clone(&counted);
    let count = move |text: &str| {
        log.lock().expect("one at a time").push(text.to_owned());
        CeilTokenCounter.count_tokens(text)
    };
    let quiet = r#"{"responses": [], "actions": []}"#;
    let mut model = scripted_agent_model(&[
        r#"{"responses": [{"room_id": 1, "message": "from an agent"}], "actions": []}"#,
        quiet,
    ]);
    model.renderer = Arc::new(HudRenderer::new(Arc::new(count)));
    let clock_time = Arc::new(AtomicI64::new(START_TIME));
    let clock = Arc::clone(&clock_time);
    let models = BTreeMap::from([("local".to_owned(), model)]);
    let runner = WorldRunner::new(
        store,
        models,
        WorldPrompts::default(),
        Box::new(move || clock.load(Ordering::SeqCst)),
    );
    // How often a message was counted after it was sent, and after two agents have seen it.
    let times = |what: &str| {
        let times =
            || counted.lock().expect("one at a time").iter().filter(|text| text.contains(what)).count();
        assert!(
            messages_in_room(&runner.store().world, 1).iter().any(|(_, said)| said == what),
            "{what} was sent"
        );
        let before = times();
        for (who, format) in [(1, HudFormat::Json), (2, HudFormat::Toon)] {
            assert_eq!(runner.store().world.agent(AgentId(who)).map(|agent| agent.hud_format), Some(format));
            let shown = runner.render_hud(AgentId(who), None).expect("it fits");
            assert!(shown.text().contains(what), "{who} sees {what}");
        }
        (before, times())
    };
    let say = |what: &str| UserCommand::Say { room: AgentId(1), message: what.into(), reply_to: None };
    runner.execute_command(say("from the user")).expect("said");
    assert_eq!(times("from the user"), (2, 2), "once in each format");
    world_store::post_command(&mut *open_store(folder.path()), "w", &say("from outside"), START_TIME)
        .expect("posted");
    runner.apply_pending().expect("a step");
    assert_eq!(times("from outside"), (2, 2));
    run_to_next_heartbeat(&runner, &clock_time);
    clock_time.fetch_add(60_000, Ordering::SeqCst);
    runner.apply_pending().expect("delivered");
    assert_eq!(times("from an agent"), (2, 2));
    // A reaction changes the text of the message.
    let message =
        runner.store().world.room(AgentId(1)).and_then(|room| room.messages.back()).map(|last| last.id);
    let react = UserCommand::React { message: message.expect("a message"), reaction: Reaction::ThumbsUp };
    runner.execute_command(react).expect("reacted");
    assert_eq!(times("from an agent"), (4, 4));
}

#[test]
fn user_command_runs_live_and_posted() {
    let folder = tempfile::tempdir().expect("a folder");
    let store =
        WorldStore::create(open_store(folder.path()), "w", test_world(), START_TIME).expect("a world");
    // Another process posts commands.
    let outside = UserCommand::Say { room: AgentId(1), message: "Is anybody there?".into(), reply_to: None };
    world_store::post_command(&mut *open_store(folder.path()), "w", &outside, START_TIME).expect("posted");
    let bad = UserCommand::Say { room: AgentId(77), message: "x".into(), reply_to: None };
    world_store::post_command(&mut *open_store(folder.path()), "w", &bad, START_TIME).expect("posted");
    assert!(
        world_store::post_command(&mut *open_store(folder.path()), "none", &outside, START_TIME).is_err()
    );
    let (runner, _) = scripted_runner(store, &[]);
    runner.set_paused(true);
    assert!(matches!(runner.run_next(None).expect("a step"), RunnerStep::Changed(_)));
    assert_eq!(runner.take_refusals(), ["there is no room 77"]);
    assert!(
        matches!(runner.run_next(None).expect("a step"), RunnerStep::Wait(_)),
        "each command runs once, and a paused world has no heartbeats"
    );
    let messages = messages_in_room(&runner.store().world, 1);
    assert_eq!(messages.last(), Some(&("The Architect".into(), "Is anybody there?".into())));
    let id = runner
        .store()
        .world
        .room(AgentId(1))
        .and_then(|room| room.messages.back())
        .map(|m| m.id)
        .expect("said");
    let own = runner.execute_command(UserCommand::React { message: id, reaction: Reaction::Heart });
    assert!(own.is_err_and(|why| why.to_string().contains("own message")));
    runner.execute_command(UserCommand::Join { room: AgentId(2) }).expect("the user needs no key");
    assert!(runner.execute_command(UserCommand::Join { room: AgentId(2) }).is_err(), "once");
    runner.execute_command(UserCommand::Leave { room: AgentId(2) }).expect("left");
    runner
        .execute_command(UserCommand::SetAttention {
            agent: AgentId(2),
            room: AgentId(1),
            value: "70%".into(),
        })
        .expect("turned");
    assert_eq!(
        runner.store().world.attention_shares(AgentId(2)),
        BTreeMap::from([(AgentId(1), 70.0), (AgentId(2), 30.0)])
    );
    runner
        .execute_command(UserCommand::Create {
            name: "Cy".into(),
            prompt: "x".into(),
            kind: Default::default(),
            room: Some(AgentId(1)),
        })
        .expect("made");
    runner.execute_command(UserCommand::Pause { agent: AgentId(3) }).expect("paused");
    assert!(runner.store().world.agent(AgentId(3)).expect("alive").paused);
    runner.execute_command(UserCommand::Retire { agent: AgentId(3) }).expect("retired");
    assert!(runner.execute_command(UserCommand::Wake { agent: AgentId(3) }).is_err());
    assert!(runner.store().world.share_room(ARCHITECT, AgentId(2)));
    assert_eq!(runner.render_hud(AgentId(2), Some(HudFormat::Toon)).expect("a HUD").hud.rooms.len(), 2);
}

#[test]
fn world_clock_pauses_steps_and_changes_speed() {
    let folder = tempfile::tempdir().expect("a folder");
    let store =
        WorldStore::create(open_store(folder.path()), "w", test_world(), START_TIME).expect("a world");
    let (runner, clock_time) = scripted_runner(store, &["{\"actions\": []}"; 8]);
    runner.set_paused(true);
    let begin = runner.now();
    clock_time.fetch_add(60_000, Ordering::SeqCst);
    assert!(matches!(runner.run_next(None), Ok(RunnerStep::Wait(_))));
    let beaten = |runner: &WorldRunner| match runner.run_next(None) {
        Ok(RunnerStep::Heartbeat(report)) => report.agent.0,
        other => panic!("{other:?}"),
    };
    // Each step runs the next heartbeat; world time jumps to it.
    for (who, passed) in [(1, 0), (2, 0), (1, 2_100), (2, 3_100), (1, 4_300)] {
        runner.step();
        assert_eq!(beaten(&runner), who);
        assert_eq!(runner.now() - begin, passed, "world time stands still");
        assert!(matches!(runner.run_next(None), Ok(RunnerStep::Wait(_))), "one step is one heartbeat");
    }
    // A woken agent is next.
    runner.execute_command(UserCommand::Wake { agent: AgentId(1) }).expect("awake");
    runner.step();
    assert_eq!((beaten(&runner), runner.now() - begin), (1, 4_300));
    // A step is not saved up when all agents are paused.
    for agent in [AgentId(1), AgentId(2)] {
        runner.execute_command(UserCommand::Pause { agent }).expect("paused");
    }
    runner.step();
    assert!(matches!(runner.run_next(None), Ok(RunnerStep::Wait(_))));
    for agent in [AgentId(1), AgentId(2)] {
        runner.execute_command(UserCommand::Resume { agent }).expect("resumed");
    }
    assert!(matches!(runner.run_next(None), Ok(RunnerStep::Wait(_))));
    // World time continues at the new speed without a jump.
    runner.set_speed(10.0);
    assert_eq!(runner.now() - begin, 4_300);
    runner.set_paused(false);
    clock_time.fetch_add(200, Ordering::SeqCst);
    assert_eq!(runner.now() - begin, 6_300);
    assert_eq!(beaten(&runner), 2);
    assert!(matches!(runner.run_next(None), Ok(RunnerStep::Wait(_))));
    assert!(runner.store().world.header.clock >= begin, "world time never goes back");
}

/// Three answers of Ada, with silent answers of Ben between them.
fn three_answers(long: &str) -> Vec<String> {
    let say = |text: &str| json!({"responses": [{"room_id": 1, "message": text}], "actions": []}).to_string();
    let nothing = || r#"{"actions": []}"#.to_owned();
    vec![say("First."), nothing(), say(long), nothing(), say("Last."), nothing()]
}

fn refusals(world: &World) -> Vec<String> {
    world
        .all_agents()
        .flat_map(|agent| agent.recent_actions.iter().filter_map(|one| one.refused.clone()))
        .collect()
}

#[test]
fn step_delivers_drafts_of_its_heartbeat() {
    let folder = tempfile::tempdir().expect("a folder");
    let store =
        WorldStore::create(open_store(folder.path()), "w", test_world(), START_TIME).expect("a world");
    let long = "word ".repeat(40);
    let answers = three_answers(&long);
    let (runner, _) = scripted_runner(store, &answers.iter().map(String::as_str).collect::<Vec<_>>());
    runner.set_paused(true);
    for _ in 0..5 {
        runner.step();
        while !matches!(runner.run_next(None).expect("a step"), RunnerStep::Wait(_)) {}
    }
    let words: Vec<String> =
        messages_in_room(&runner.store().world, 1).into_iter().map(|(_, text)| text).collect();
    assert_eq!(words, ["First.", long.trim(), "Last."]);
    assert_eq!(refusals(&runner.store().world), Vec::<String>::new());
}

/// A draft that is typed while the model generates is delivered before the answer, at any speed of the model.
#[test]
fn draft_is_delivered_before_the_next_answer() {
    let mut answers = three_answers(&"word ".repeat(40));
    let last = answers[4].clone();
    answers.extend(std::iter::repeat_n(last, 30));
    for seconds in 1..=10 {
        let folder = tempfile::tempdir().expect("a folder");
        let store =
            WorldStore::create(open_store(folder.path()), "w", test_world(), START_TIME).expect("a world");
        let clock_time = AtomicI64::new(START_TIME);
        // Every look at the clock advances it.
        let clock = move || clock_time.fetch_add(seconds * 1_000, Ordering::SeqCst);
        let models = BTreeMap::from([("local".to_owned(), scripted_agent_model(&answers))]);
        let runner = WorldRunner::new(store, models, WorldPrompts::default(), Box::new(clock));
        let mut reports = 0;
        while reports < 30 {
            reports +=
                usize::from(matches!(runner.run_next(None).expect("a step"), RunnerStep::Heartbeat(_)));
        }
        let refused = refusals(&runner.store().world);
        assert!(!refused.iter().any(|why| why.contains("0 more seconds")), "{seconds}: {refused:?}");
    }
}

#[test]
fn recall_finds_old_messages_in_the_store() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = test_world();
    world
        .send_message(
            AgentId(1),
            AgentId(1),
            "The key to the lighthouse lies under the blue stone.",
            None,
            START_TIME,
        )
        .expect("said");
    for n in 0..2_500 {
        world
            .send_message(
                AgentId(1),
                AgentId(2),
                format!("Number {n}: nets, boats and the price of herring."),
                None,
                START_TIME,
            )
            .expect("said");
    }
    world
        .send_message(
            AgentId(1),
            AgentId(2),
            "Who knows where the key to the lighthouse is?",
            None,
            START_TIME,
        )
        .expect("said");
    drop(WorldStore::create(open_store(folder.path()), "w", world, START_TIME).expect("a world"));
    let mut store = WorldStore::open(open_store(folder.path()), "w").expect("stored");
    assert!(store.world.room(AgentId(1)).expect("a room").message(1).is_none(), "it is not in memory");
    let older: Vec<RoomMessage> = store.messages_before(AgentId(1), 3, 10).expect("read");
    assert_eq!(older.iter().map(|message| message.id).collect::<Vec<_>>(), [1, 2]);
    let (runner, _) = scripted_runner(store, &[]);
    let shown = runner.render_hud(AgentId(2), None).expect("a HUD");
    let first = &shown.hud.rooms[0].messages[0];
    assert_eq!((first.id, first.sender.as_str()), (1, "1"), "before all others");
    assert!(first.content.contains("blue stone") && shown.recalled.contains(&1));
    assert!(shown.token_usage.total <= 10_000);
}

#[test]
fn world_store_property_random_worlds_roundtrip() {
    let folder = tempfile::tempdir().expect("a folder");
    for seed in 0..40 {
        let mut rng = WorldRng::new(seed);
        let (world, now) =
            testing::random_world(&mut rng, RandomWorldSize { agents: 4, messages: 6, words: 10 });
        let name = format!("w{seed}");
        let mut store = WorldStore::create(open_store(folder.path()), &name, world, now).expect("a world");
        for _ in 0..15 {
            let ids: Vec<AgentId> = store.world.agents().map(|agent| agent.id).collect();
            let Some(&who) = ids.get(rng.below(ids.len())) else { break };
            let action = testing::random_action(&mut rng, &store.world, who);
            let context = ActionContext { now, counter: &CeilTokenCounter, knowledge_budget: 3_000 };
            let _ = store.world.perform_action(who, action, context);
            store.world.finish_heartbeat(who, now);
            store.save().expect("kept");
        }
        let before = store.world.clone();
        drop(store);
        let again = WorldStore::open(open_store(folder.path()), &name).expect("stored");
        assert_eq!(again.world, before, "seed {seed}");
        assert!(
            again
                .world
                .rooms()
                .all(|room| room.messages.iter().all(|m| m.sender != MessageSender::Agent(AgentId(999))))
        );
    }
    let mut store = open_store(folder.path());
    assert_eq!(store.list_namespaces().expect("listed").len(), 40);
    world_store::delete_world(&mut *store, "w7").expect("deleted");
    assert_eq!(store.list_namespaces().expect("listed").len(), 39);
    assert!(world_store::delete_world(&mut *store, "w7").is_err());
}

#[test]
fn world_import_rejects_inconsistent_rows() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = test_world();
    let ask = Action::RequestAccess { room_id: AgentId(1), key: "open".into() };
    let context = ActionContext { now: START_TIME, counter: &CeilTokenCounter, knowledge_budget: 3_000 };
    world.send_message(AgentId(1), AgentId(1), "Hello.", None, START_TIME).expect("said");
    world.perform_action(AgentId(2), Action::LeaveRoom { room_id: AgentId(1) }, context).expect("gone");
    world.perform_action(AgentId(2), ask, context).expect("asked");
    let store = WorldStore::create(open_store(folder.path()), "w", world, START_TIME).expect("a world");
    let expected = store.world.clone();
    drop(store);
    let command = UserCommand::Say { room: AgentId(1), message: "Hello?".into(), reply_to: None };
    world_store::post_command(&mut *open_store(folder.path()), "w", &command, START_TIME).expect("posted");
    let mut from = open_store(folder.path());
    let rows: Vec<Row> = world_store::ROW_KINDS
        .iter()
        .flat_map(|kind| from.load_rows("w", kind, "0".."9".repeat(22).as_str(), 100).expect("rows"))
        .collect();
    let imported = import::world_from_rows("w", &rows).expect("a world");
    assert_eq!((&imported.header, imported.agents().count()), (&expected.header, 2));
    assert_eq!(imported.room(AgentId(1)).map(|room| &room.requests).map(Vec::len), Some(1));
    // One change in the first row of a kind: its key, or a part of its value.
    let cases = [
        (
            HEADER_KIND,
            None,
            "\"next_message\":4",
            "\"next_message\":0",
            "counter of its header is out of range",
        ),
        (HEADER_KIND, None, "\"next_message\":4", "\"next_message\":3", "message 3 has another key"),
        (
            HEADER_KIND,
            None,
            "\"next_message\":4",
            "\"next_message\":99999999",
            "counter of its header is out of range",
        ),
        (HEADER_KIND, None, "\"next_agent\":3", "\"next_agent\":2", "agent 2 has another key"),
        (
            HEADER_KIND,
            None,
            "\"next_request\":2",
            "\"next_request\":1",
            "request 1 has a number that was not assigned",
        ),
        (HEADER_KIND, Some("1"), "", "", "a world has one"),
        (AGENT_KIND, Some("0003"), "", "", "agent 1 has another key"),
        (AGENT_KIND, None, "\"id\":1", "\"id\":7", "agent 7 has another key"),
        (AGENT_KIND, None, "{", "{{", "it may have been written by a newer Halo"),
        (ROOM_KIND, Some("0002"), "", "", "room 1 has another key"),
        (ROOM_KIND, None, "\"requester\":2", "\"requester\":9", "names agent 9, which does not exist"),
        (MESSAGE_KIND, Some("000100000009"), "", "", "has another key"),
        (MESSAGE_KIND, None, "\"room\":1", "\"room\":2", "has another key"),
        (COMMAND_KIND, Some("x"), "", "", "not 20 digits"),
        (COMMAND_KIND, None, "say", "fly", "reading a posted command"),
    ];
    for (kind, key, from, to, why) in cases {
        let mut rows = rows.clone();
        let row = rows.iter_mut().find(|row| row.kind == kind).expect("there is one");
        row.key = key.map_or_else(|| row.key.clone(), str::to_owned);
        assert!(row.value.contains(from), "{kind} has {from}: {}", row.value);
        row.value = row.value.replacen(from, to, 1);
        let error = import::world_from_rows("w", &rows).expect_err(why).to_string();
        assert!(error.contains(why), "{kind} {from} {to}: {error}");
    }
    let other = Row { kind: RowKind::from_static("setting"), key: "0".into(), value: "{}".into() };
    let error =
        import::world_from_rows("w", &[rows.as_slice(), &[other]].concat()).expect_err("a kind").to_string();
    assert!(error.contains("no rows of the kind 'setting'"), "{error}");
}

/// An export has the rows of a world by kind, and an imported world has the same export under the same name.
#[test]
fn world_export_is_identical_after_import() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = test_world();
    world.send_message(AgentId(1), AgentId(1), "Hello.", None, START_TIME).expect("sent");
    drop(WorldStore::create(open_store(folder.path()), "w", world, START_TIME).expect("a world"));
    let command = UserCommand::Join { room: AgentId(2) };
    world_store::post_command(&mut *open_store(folder.path()), "w", &command, START_TIME).expect("posted");
    let export = |file: &str| {
        let mut store = Database::open(&StoreLocation::Sqlite(folder.path().join(file))).expect("a store");
        let mut out = Vec::new();
        store.export_namespace("w", &world_store::ROW_KINDS, &mut out).expect("an export");
        String::from_utf8(out).expect("UTF-8")
    };
    let exported = export("halo.db");
    let mut kinds: Vec<&str> = exported
        .lines()
        .filter_map(|line| line.strip_prefix(r#"{"record":{"kind":""#)?.split('"').next())
        .collect();
    kinds.dedup();
    assert_eq!(kinds, ["world", "agent", "room", "said", "post"]);
    let mut other = Database::open(&StoreLocation::Sqlite(folder.path().join("other.db"))).expect("a store");
    let validate = |name: &str, rows: &[Row]| import::world_from_rows(name, rows).map(drop);
    let request = ImportRequest {
        file_name: "w.halo",
        format: None,
        name: None,
        chunk_size: ChunkSize::default(),
        initial_brightness: Brightness(0.0),
        model: None,
        validate_rows: Some(&validate),
    };
    other.import(&mut exported.as_bytes(), request).expect("imported");
    drop(other);
    assert_eq!(export("other.db"), exported);
}
