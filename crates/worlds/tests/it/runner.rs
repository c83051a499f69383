//! The runner on a real database, with a scripted model and a clock that the test sets.

use halo_agents::constraint::SummaryConstraint;
use halo_agents::token_counter::{CeilTokenCounter, TokenCounter};
use halo_core::Error;
use halo_core::attention::AttentionRequest;
use halo_core::chunker::ChunkSize;
use halo_core::model::{FinishReason, Model, ModelInfo, ModelStep, ModelToken, Prompt, Sampling, StepFlow};
use halo_core::row_store::{Row, RowKind, RowStore};
use halo_core::testing::doubles::{ScriptedAnswer, ScriptedModel};
use halo_core::token::Brightness;
use halo_store::database::{Database, StoreLocation};
use halo_store::exchange::ImportRequest;
use halo_worlds::action::{Action, ActionContext};
use halo_worlds::agent_model::AgentModel;
use halo_worlds::agent_wrappers::AgentWrappers;
use halo_worlds::format::HudFormat;
use halo_worlds::heartbeat::{HeartbeatJitter, Millis};
use halo_worlds::hud_renderer::HudRenderer;
use halo_worlds::import;
use halo_worlds::prompts::WorldPrompts;
use halo_worlds::runner::{HeartbeatReport, RunnerOptions, RunnerStep, WorldRunner};
use halo_worlds::testing::{self, RandomWorldSize, START_TIME, WorldRng};
use halo_worlds::user_command::UserCommand;
use halo_worlds::world::{ARCHITECT, AgentId, MessageSender, ParagraphSplit, Reaction, RoomMessage, World};
use halo_worlds::world_file::WorldFile;
use halo_worlds::world_store::{
    self, AGENT_KIND, COMMAND_KIND, HEADER_KIND, HEARTBEAT_KIND, MESSAGE_KIND, ROOM_KIND, WorldStore,
};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

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
    Box::new(Database::open(&StoreLocation::Sqlite(folder.join("halo.db"))).expect("the store opens"))
}

fn test_world() -> World {
    toml::from_str::<WorldFile>(WORLD_TOML)
        .expect("a valid world file")
        .into_world("local", START_TIME)
        .expect("a valid world")
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

/// A runner without options, whose model answers with these texts in turn, and its wall clock.
fn scripted_runner(store: WorldStore, answers: &[&str]) -> (WorldRunner, Arc<AtomicI64>) {
    runner_with_options(store, RunnerOptions::default(), answers)
}

/// A runner with options, whose model answers with these texts in turn, and its wall clock.
fn runner_with_options(
    store: WorldStore,
    options: RunnerOptions,
    answers: &[impl AsRef<str>],
) -> (WorldRunner, Arc<AtomicI64>) {
    let clock_time = Arc::new(AtomicI64::new(START_TIME));
    let clock = Arc::clone(&clock_time);
    let models = BTreeMap::from([("local".to_owned(), scripted_agent_model(answers))]);
    let prompts = (WorldPrompts::default(), options);
    (WorldRunner::new(store, models, prompts, Box::new(move || clock.load(Ordering::SeqCst))), clock_time)
}

/// Advances the clock to the next heartbeat and runs it.
fn run_to_next_heartbeat(runner: &WorldRunner, clock_time: &AtomicI64) -> HeartbeatReport {
    for _ in 0..10_000 {
        match runner.run_next(None).expect("the step succeeds") {
            RunnerStep::Heartbeat(report) => return *report,
            RunnerStep::Wait(time) => {
                clock_time.fetch_add(time.as_millis() as Millis, Ordering::SeqCst);
            }
            RunnerStep::Changed(_) | RunnerStep::Skipped => {}
        }
    }
    panic!("no heartbeat");
}

fn messages_in_room(world: &World, room: u32) -> Vec<(String, String)> {
    let messages = world.room(AgentId(room)).expect("the room exists").messages.iter();
    messages.map(|message| (message.sender.to_string(), message.content.clone())).collect()
}

#[test]
fn heartbeat_results_are_stored() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = WorldStore::create(open_store(folder.path()), "w", test_world(), START_TIME)
        .expect("the world is created");
    let answers = [
        r#"{"responses": [{"room_id": 1, "message": "Hello, Ben."}], "actions": [{"type": "set", "path": "mood", "value": "calm"}]}"#,
        "responses[1]{room_id,message}:\n  1,Hello to you\nactions[1]{type,message_id,reaction}:\n  react,1,thumbs_up",
        "I have nothing to say.",
        r#"{"responses": [{"room_id": 1, "message": "[no response]"}], "actions": [{"type": "fly"}]}"#,
    ];
    let (runner, clock_time) = scripted_runner(store, &answers);
    let reports: Vec<HeartbeatReport> = (0..4).map(|_| run_to_next_heartbeat(&runner, &clock_time)).collect();
    let agents: Vec<u32> = reports.iter().map(|report| report.agent.0).collect();
    assert_eq!(agents, [1, 2, 1, 2], "each agent has its own interval");
    // Ada's interval is 2 s, 0.1 s more after each heartbeat and 0.5 s less after Ben's thumbs-up.
    assert_eq!(reports[2].finished_at - reports[0].finished_at, 2_100);
    assert_eq!(reports[3].finished_at - reports[1].finished_at, 3_100);
    assert!(reports[2].outcome.is_err(), "an answer that cannot be parsed is an error");
    let world = runner.store().world.clone();
    assert_eq!(
        messages_in_room(&world, 1),
        [("1".into(), "Hello, Ben.".into()), ("2".into(), "Hello to you".into())]
    );
    let ada = world.agent(AgentId(1)).expect("the agent exists");
    assert_eq!(ada.knowledge.get("mood"), Ok(Some("calm".into())));
    assert_eq!(ada.interval.seconds(), 1.7, "2.0 + 0.1 - 0.5 + 0.1");
    let refused: Vec<&str> = ada.recent_actions.iter().filter_map(|one| one.refused.as_deref()).collect();
    assert_eq!(refused, ["the answer is neither JSON nor TOON with 'responses' and 'actions'"]);
    let ben = world.agent(AgentId(2)).expect("the agent exists");
    assert_eq!(
        ben.recent_actions.back().and_then(|one| one.refused.as_deref()),
        Some("there is no action 'fly'")
    );
    // The world is leased while it runs, and unchanged when it is opened again.
    assert!(
        WorldStore::open(open_store(folder.path()), "w")
            .is_err_and(|error| error.to_string().contains("another Halo"))
    );
    drop(runner);
    let reopened = WorldStore::open(open_store(folder.path()), "w").expect("the world is stored");
    assert_eq!(reopened.world, world);
}

/// The tokens of each heartbeat are stored, by section and by format, and the oldest are deleted.
#[test]
fn heartbeat_telemetry_is_stored_and_limited() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = WorldStore::create(open_store(folder.path()), "w", test_world(), START_TIME)
        .expect("the world is created");
    let say =
        |n: usize| json!({"responses": [{"room_id": 1, "message": format!("Number {n}.")}]}).to_string();
    let answers: Vec<String> = (0..12).map(say).collect();
    let options = RunnerOptions { recorded_heartbeats: 4, ..RunnerOptions::default() };
    let (runner, clock_time) = runner_with_options(store, options, &answers);
    let reports: Vec<HeartbeatReport> =
        (0..12).map(|_| run_to_next_heartbeat(&runner, &clock_time)).collect();
    let ada: Vec<&HeartbeatReport> = reports.iter().filter(|report| report.agent == AgentId(1)).collect();
    assert!(ada.len() > 5, "{} heartbeats of Ada", ada.len());
    let records = runner.store().heartbeat_records(Some(AgentId(1)), 100).expect("the records are read");
    assert_eq!(records.len(), 4, "the last four heartbeats stay");
    for (record, report) in records.iter().zip(&ada[ada.len() - 4..]) {
        let generation = report.generation.as_ref().expect("the model answered");
        assert_eq!((record.at, record.format), (report.finished_at, HudFormat::Json));
        assert_eq!(
            (record.prompt_tokens, record.prefill_tokens, record.answer_tokens),
            (generation.prompt_tokens, generation.prefill_tokens, generation.answer_tokens)
        );
        let usage = &record.hud;
        let sections = usage.shared + usage.me + usage.recent_actions + usage.rooms.values().sum::<usize>();
        assert!(sections <= usage.total && usage.total - sections < 20, "{usage:?}");
        assert_eq!(record.formats[&HudFormat::Json], usage.total);
        assert!(record.formats[&HudFormat::CompactJson] < usage.total, "{:?}", record.formats);
        assert!(record.formats[&HudFormat::Toon] < usage.total, "{:?}", record.formats);
    }
    assert_eq!(records.last().map(|record| record.beat), Some(ada.len() as u64));
    assert!(records.windows(2).all(|pair| pair[0].beat + 1 == pair[1].beat), "oldest first");
    let rooms = |n: usize| records[n].hud.rooms[&AgentId(1)];
    assert!(rooms(3) > rooms(0), "a room with more messages takes more tokens");
    let all = runner.store().heartbeat_records(None, 5).expect("the records are read");
    assert_eq!(all.len(), 5);
    assert!(all.is_sorted_by_key(|record| record.at) && all.iter().any(|record| record.agent == AgentId(2)));
    assert!(
        all.iter().filter(|record| record.agent == AgentId(2)).all(|record| record.format == HudFormat::Toon)
    );
    // They survive the process, an export and an import.
    drop(runner);
    let mut store = open_store(folder.path());
    let stored =
        world_store::heartbeat_records(&mut *store, "w", Some(AgentId(1)), 100).expect("they are stored");
    assert_eq!(stored, records);
    let rows: Vec<Row> = world_store::ROW_KINDS
        .iter()
        .flat_map(|kind| {
            store.load_rows("w", kind, "0".."9".repeat(22).as_str(), 100).expect("the rows are read")
        })
        .collect();
    import::world_from_rows("w", &rows).expect("a valid world");
    let mut moved = rows;
    let row = moved.iter_mut().find(|row| row.kind == HEARTBEAT_KIND).expect("a heartbeat is stored");
    row.key = format!("0009{}", &row.key[4..]);
    let error = import::world_from_rows("w", &moved).expect_err("the key is wrong").to_string();
    assert!(error.contains("has another key, or no agent"), "{error}");
}

/// Heartbeats deviate from their interval by up to a fifth, and the same seed gives the same times.
#[test]
fn heartbeat_jitter_is_the_same_for_the_same_seed() {
    let times = |share: f64, seed: u64| -> Vec<Millis> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let store = WorldStore::create(open_store(folder.path()), "w", test_world(), START_TIME)
            .expect("the world is created");
        let options = RunnerOptions { jitter: HeartbeatJitter { share, seed }, ..RunnerOptions::default() };
        let (runner, clock_time) = runner_with_options(store, options, &["{\"actions\": []}"; 20]);
        let reports = (0..20).map(|_| run_to_next_heartbeat(&runner, &clock_time));
        let ada: Vec<Millis> =
            reports.filter(|report| report.agent == AgentId(1)).map(|report| report.finished_at).collect();
        ada.windows(2).map(|pair| pair[1] - pair[0]).collect()
    };
    let exact = times(0.0, 1);
    assert_eq!(exact[..3], [2_100, 2_200, 2_300]);
    let spread = times(0.2, 1);
    assert_eq!(spread, times(0.2, 1));
    assert_ne!(spread, times(0.2, 2));
    for (n, time) in spread.iter().enumerate() {
        let interval = 2_100 + 100 * n as Millis;
        assert!((time - interval).abs() <= interval / 5 + 1, "{time} for {interval}");
    }
    assert!(spread.iter().zip(&exact).any(|(spread, exact)| spread < exact));
    assert!(spread.iter().zip(&exact).any(|(spread, exact)| spread > exact));
}

#[test]
fn message_is_prerendered_once_per_format() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut world = test_world();
    world.execute_command(UserCommand::Join { room: AgentId(1) }, START_TIME).expect("the user joins");
    let store =
        WorldStore::create(open_store(folder.path()), "w", world, START_TIME).expect("the world is created");
    let counted: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = Arc::clone(&counted);
    let count = move |text: &str| {
        log.lock().expect("the lock is not poisoned").push(text.to_owned());
        CeilTokenCounter.count_tokens(text)
    };
    let empty_answer = r#"{"responses": [], "actions": []}"#;
    let mut model = scripted_agent_model(&[
        r#"{"responses": [{"room_id": 1, "message": "from an agent"}], "actions": []}"#,
        empty_answer,
    ]);
    model.renderer = Arc::new(HudRenderer::new(Arc::new(count)));
    let clock_time = Arc::new(AtomicI64::new(START_TIME));
    let clock = Arc::clone(&clock_time);
    let models = BTreeMap::from([("local".to_owned(), model)]);
    let runner = WorldRunner::new(
        store,
        models,
        (WorldPrompts::default(), RunnerOptions::default()),
        Box::new(move || clock.load(Ordering::SeqCst)),
    );
    // How often a message was counted after it was sent, and after two agents have seen it.
    let counts_before_and_after = |text: &str| {
        let times_counted = || {
            counted
                .lock()
                .expect("the lock is not poisoned")
                .iter()
                .filter(|counted_text| counted_text.contains(text))
                .count()
        };
        assert!(
            messages_in_room(&runner.store().world, 1).iter().any(|(_, content)| content == text),
            "{text} was sent"
        );
        let before = times_counted();
        for (agent_id, format) in [(1, HudFormat::Json), (2, HudFormat::Toon)] {
            assert_eq!(
                runner.store().world.agent(AgentId(agent_id)).map(|agent| agent.hud_format),
                Some(format)
            );
            let rendered = runner.render_hud(AgentId(agent_id), None).expect("the HUD is rendered");
            assert!(rendered.text().contains(text), "{agent_id} sees {text}");
        }
        (before, times_counted())
    };
    let say = |text: &str| UserCommand::Say { room: AgentId(1), message: text.into(), reply_to: None };
    runner.execute_command(say("from the user")).expect("the message is sent");
    assert_eq!(counts_before_and_after("from the user"), (2, 2), "once in each format");
    world_store::post_command(&mut *open_store(folder.path()), "w", &say("from outside"), START_TIME)
        .expect("the command is posted");
    runner.apply_pending().expect("the pending command runs");
    assert_eq!(counts_before_and_after("from outside"), (2, 2));
    run_to_next_heartbeat(&runner, &clock_time);
    clock_time.fetch_add(60_000, Ordering::SeqCst);
    runner.apply_pending().expect("the draft is delivered");
    assert_eq!(counts_before_and_after("from an agent"), (2, 2));
    // A reaction changes the text of the message.
    let message =
        runner.store().world.room(AgentId(1)).and_then(|room| room.messages.back()).map(|last| last.id);
    let react = UserCommand::React {
        message: message.expect("the room has a message"),
        reaction: Reaction::ThumbsUp,
    };
    runner.execute_command(react).expect("the reaction is stored");
    assert_eq!(counts_before_and_after("from an agent"), (4, 4));
}

#[test]
fn user_command_runs_live_and_posted() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = WorldStore::create(open_store(folder.path()), "w", test_world(), START_TIME)
        .expect("the world is created");
    // Another process posts commands.
    let posted = UserCommand::Say { room: AgentId(1), message: "Is anybody there?".into(), reply_to: None };
    world_store::post_command(&mut *open_store(folder.path()), "w", &posted, START_TIME)
        .expect("the command is posted");
    let invalid = UserCommand::Say { room: AgentId(77), message: "x".into(), reply_to: None };
    world_store::post_command(&mut *open_store(folder.path()), "w", &invalid, START_TIME)
        .expect("the command is posted");
    assert!(world_store::post_command(&mut *open_store(folder.path()), "none", &posted, START_TIME).is_err());
    let (runner, _) = scripted_runner(store, &[]);
    runner.set_paused(true);
    assert!(matches!(runner.run_next(None).expect("the step succeeds"), RunnerStep::Changed(_)));
    assert_eq!(runner.take_refusals(), ["there is no room 77"]);
    assert!(
        matches!(runner.run_next(None).expect("the step succeeds"), RunnerStep::Wait(_)),
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
        .expect("the room has a message");
    let own_reaction = runner.execute_command(UserCommand::React { message: id, reaction: Reaction::Heart });
    assert!(own_reaction.is_err_and(|error| error.to_string().contains("own message")));
    runner.execute_command(UserCommand::Join { room: AgentId(2) }).expect("the user needs no key");
    assert!(runner.execute_command(UserCommand::Join { room: AgentId(2) }).is_err(), "once");
    runner.execute_command(UserCommand::Leave { room: AgentId(2) }).expect("the user leaves");
    runner
        .execute_command(UserCommand::SetAttention {
            agent: AgentId(2),
            room: AgentId(1),
            value: "70%".into(),
        })
        .expect("the attention is set");
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
            model: None,
            can_create_agents: false,
        })
        .expect("the agent is created");
    runner.execute_command(UserCommand::Pause { agent: AgentId(3) }).expect("the agent is paused");
    assert!(runner.store().world.agent(AgentId(3)).expect("the agent exists").paused);
    runner.execute_command(UserCommand::Retire { agent: AgentId(3) }).expect("the agent is retired");
    assert!(runner.execute_command(UserCommand::Wake { agent: AgentId(3) }).is_err());
    assert!(runner.store().world.share_room(ARCHITECT, AgentId(2)));
    assert_eq!(
        runner.render_hud(AgentId(2), Some(HudFormat::Toon)).expect("the HUD is rendered").hud.rooms.len(),
        2
    );
}

#[test]
fn world_clock_pauses_steps_and_changes_speed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = WorldStore::create(open_store(folder.path()), "w", test_world(), START_TIME)
        .expect("the world is created");
    let (runner, clock_time) = scripted_runner(store, &["{\"actions\": []}"; 8]);
    runner.set_paused(true);
    let begin = runner.now();
    clock_time.fetch_add(60_000, Ordering::SeqCst);
    assert!(matches!(runner.run_next(None), Ok(RunnerStep::Wait(_))));
    let run_heartbeat = |runner: &WorldRunner| match runner.run_next(None) {
        Ok(RunnerStep::Heartbeat(report)) => report.agent.0,
        other => panic!("{other:?}"),
    };
    // Each step runs the next heartbeat; world time jumps to it.
    for (agent, passed) in [(1, 0), (2, 0), (1, 2_100), (2, 3_100), (1, 4_300)] {
        runner.step();
        assert_eq!(run_heartbeat(&runner), agent);
        assert_eq!(runner.now() - begin, passed, "world time does not advance between steps");
        assert!(matches!(runner.run_next(None), Ok(RunnerStep::Wait(_))), "one step is one heartbeat");
    }
    // A woken agent is next.
    runner.execute_command(UserCommand::Wake { agent: AgentId(1) }).expect("the agent wakes");
    runner.step();
    assert_eq!((run_heartbeat(&runner), runner.now() - begin), (1, 4_300));
    // A step while all agents are paused has no effect later.
    for agent in [AgentId(1), AgentId(2)] {
        runner.execute_command(UserCommand::Pause { agent }).expect("the agent is paused");
    }
    runner.step();
    assert!(matches!(runner.run_next(None), Ok(RunnerStep::Wait(_))));
    for agent in [AgentId(1), AgentId(2)] {
        runner.execute_command(UserCommand::Resume { agent }).expect("the agent is resumed");
    }
    assert!(matches!(runner.run_next(None), Ok(RunnerStep::Wait(_))));
    // World time continues at the new speed without a jump.
    runner.set_speed(10.0);
    assert_eq!(runner.now() - begin, 4_300);
    runner.set_paused(false);
    clock_time.fetch_add(200, Ordering::SeqCst);
    assert_eq!(runner.now() - begin, 6_300);
    assert_eq!(run_heartbeat(&runner), 2);
    assert!(matches!(runner.run_next(None), Ok(RunnerStep::Wait(_))));
    assert!(runner.store().world.header.clock >= begin, "world time never decreases");
}

/// Three answers of Ada, with silent answers of Ben between them.
fn three_answers(long: &str) -> Vec<String> {
    let say = |text: &str| json!({"responses": [{"room_id": 1, "message": text}], "actions": []}).to_string();
    let empty_answer = || r#"{"actions": []}"#.to_owned();
    vec![say("First."), empty_answer(), say(long), empty_answer(), say("Last."), empty_answer()]
}

fn refusals(world: &World) -> Vec<String> {
    world
        .all_agents()
        .flat_map(|agent| agent.recent_actions.iter().filter_map(|one| one.refused.clone()))
        .collect()
}

#[test]
fn step_delivers_drafts_of_its_heartbeat() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = WorldStore::create(open_store(folder.path()), "w", test_world(), START_TIME)
        .expect("the world is created");
    let long = "word ".repeat(40);
    let answers = three_answers(&long);
    let (runner, _) = scripted_runner(store, &answers.iter().map(String::as_str).collect::<Vec<_>>());
    runner.set_paused(true);
    for _ in 0..5 {
        runner.step();
        while !matches!(runner.run_next(None).expect("the step succeeds"), RunnerStep::Wait(_)) {}
    }
    let texts: Vec<String> =
        messages_in_room(&runner.store().world, 1).into_iter().map(|(_, text)| text).collect();
    assert_eq!(texts, ["First.", long.trim(), "Last."]);
    assert_eq!(refusals(&runner.store().world), Vec::<String>::new());
}

/// A draft that is typed while the model generates is delivered before the answer, at any speed of the model.
#[test]
fn draft_is_delivered_before_the_next_answer() {
    let mut answers = three_answers(&"word ".repeat(40));
    let last = answers[4].clone();
    answers.extend(std::iter::repeat_n(last, 30));
    for seconds in 1..=10 {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let store = WorldStore::create(open_store(folder.path()), "w", test_world(), START_TIME)
            .expect("the world is created");
        let clock_time = AtomicI64::new(START_TIME);
        // Every read of the clock advances it.
        let clock = move || clock_time.fetch_add(seconds * 1_000, Ordering::SeqCst);
        let models = BTreeMap::from([("local".to_owned(), scripted_agent_model(&answers))]);
        let runner = WorldRunner::new(
            store,
            models,
            (WorldPrompts::default(), RunnerOptions::default()),
            Box::new(clock),
        );
        let mut reports = 0;
        while reports < 30 {
            reports += usize::from(matches!(
                runner.run_next(None).expect("the step succeeds"),
                RunnerStep::Heartbeat(_)
            ));
        }
        let refused = refusals(&runner.store().world);
        assert!(
            !refused.iter().any(|reason| reason.contains("0 more seconds")),
            "{seconds} s per reading: {refused:?}"
        );
    }
}

#[test]
fn recall_finds_old_messages_in_the_store() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut world = test_world();
    world
        .send_message(
            AgentId(1),
            AgentId(1),
            "The key to the lighthouse lies under the blue stone.",
            None,
            START_TIME,
        )
        .expect("the message is sent");
    for n in 0..2_500 {
        world
            .send_message(
                AgentId(1),
                AgentId(2),
                format!("Number {n}: nets, boats and the price of herring."),
                None,
                START_TIME,
            )
            .expect("the message is sent");
    }
    world
        .send_message(
            AgentId(1),
            AgentId(2),
            "Who knows where the key to the lighthouse is?",
            None,
            START_TIME,
        )
        .expect("the message is sent");
    drop(
        WorldStore::create(open_store(folder.path()), "w", world, START_TIME).expect("the world is created"),
    );
    let mut store = WorldStore::open(open_store(folder.path()), "w").expect("the world is stored");
    assert!(
        store.world.room(AgentId(1)).expect("the room exists").message(1).is_none(),
        "the first message is not in memory"
    );
    let older: Vec<RoomMessage> = store.messages_before(AgentId(1), 3, 10).expect("the messages are read");
    assert_eq!(older.iter().map(|message| message.id).collect::<Vec<_>>(), [1, 2]);
    let (runner, _) = scripted_runner(store, &[]);
    let rendered = runner.render_hud(AgentId(2), None).expect("the HUD is rendered");
    let first = &rendered.hud.rooms[0].messages[0];
    assert_eq!((first.id, first.sender.as_str()), (1, "1"), "the recalled message comes first");
    assert!(first.content.contains("blue stone") && rendered.recalled.contains(&1));
    assert!(rendered.token_usage.total <= 10_000);
}

#[test]
fn world_store_property_random_worlds_roundtrip() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for seed in 0..40 {
        let mut rng = WorldRng::new(seed);
        let (world, now) =
            testing::random_world(&mut rng, RandomWorldSize { agents: 4, messages: 6, words: 10 });
        let name = format!("w{seed}");
        let mut store =
            WorldStore::create(open_store(folder.path()), &name, world, now).expect("the world is created");
        for _ in 0..15 {
            let ids: Vec<AgentId> = store.world.agents().map(|agent| agent.id).collect();
            let Some(&who) = ids.get(rng.below(ids.len())) else { break };
            let action = testing::random_action(&mut rng, &store.world, who);
            let context = ActionContext {
                now,
                counter: &CeilTokenCounter,
                knowledge_budget: 3_000,
                split: ParagraphSplit::Never,
            };
            let _ = store.world.perform_action(who, action, context);
            store.world.finish_heartbeat(who, now, HeartbeatJitter::NONE);
            store.save().expect("the world is saved");
        }
        let before = store.world.clone();
        drop(store);
        let reopened = WorldStore::open(open_store(folder.path()), &name).expect("the world is stored");
        assert_eq!(reopened.world, before, "seed {seed}");
        assert!(
            reopened
                .world
                .rooms()
                .all(|room| room.messages.iter().all(|m| m.sender != MessageSender::Agent(AgentId(999))))
        );
    }
    let mut store = open_store(folder.path());
    assert_eq!(store.list_namespaces().expect("the worlds are listed").len(), 40);
    world_store::delete_world(&mut *store, "w7").expect("the world is deleted");
    assert_eq!(store.list_namespaces().expect("the worlds are listed").len(), 39);
    assert!(world_store::delete_world(&mut *store, "w7").is_err());
}

#[test]
fn world_import_rejects_inconsistent_rows() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut world = test_world();
    let request = Action::RequestAccess { room_id: AgentId(1), key: "open".into() };
    let context = ActionContext {
        now: START_TIME,
        counter: &CeilTokenCounter,
        knowledge_budget: 3_000,
        split: ParagraphSplit::Never,
    };
    world.send_message(AgentId(1), AgentId(1), "Hello.", None, START_TIME).expect("the message is sent");
    world
        .perform_action(AgentId(2), Action::LeaveRoom { room_id: AgentId(1) }, context)
        .expect("the agent leaves");
    world.perform_action(AgentId(2), request, context).expect("the request is stored");
    let store =
        WorldStore::create(open_store(folder.path()), "w", world, START_TIME).expect("the world is created");
    let expected = store.world.clone();
    drop(store);
    let command = UserCommand::Say { room: AgentId(1), message: "Hello?".into(), reply_to: None };
    world_store::post_command(&mut *open_store(folder.path()), "w", &command, START_TIME)
        .expect("the command is posted");
    let mut store = open_store(folder.path());
    let rows: Vec<Row> = world_store::ROW_KINDS
        .iter()
        .flat_map(|kind| {
            store.load_rows("w", kind, "0".."9".repeat(22).as_str(), 100).expect("the rows are read")
        })
        .collect();
    let imported = import::world_from_rows("w", &rows).expect("a valid world");
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
    for (kind, key, old, new, expected_error) in cases {
        let mut rows = rows.clone();
        let row = rows.iter_mut().find(|row| row.kind == kind).expect("a row of the kind exists");
        row.key = key.map_or_else(|| row.key.clone(), str::to_owned);
        assert!(row.value.contains(old), "{kind} has {old}: {}", row.value);
        row.value = row.value.replacen(old, new, 1);
        let error = import::world_from_rows("w", &rows).expect_err(expected_error).to_string();
        assert!(error.contains(expected_error), "{kind} {old} {new}: {error}");
    }
    let other = Row { kind: RowKind::from_static("setting"), key: "0".into(), value: "{}".into() };
    let error = import::world_from_rows("w", &[rows.as_slice(), &[other]].concat())
        .expect_err("the kind of row is unknown")
        .to_string();
    assert!(error.contains("no rows of the kind 'setting'"), "{error}");
}

/// An export has the rows of a world by kind, and an imported world has the same export under the same name.
#[test]
fn world_export_is_identical_after_import() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut world = test_world();
    world.send_message(AgentId(1), AgentId(1), "Hello.", None, START_TIME).expect("the message is sent");
    drop(
        WorldStore::create(open_store(folder.path()), "w", world, START_TIME).expect("the world is created"),
    );
    let command = UserCommand::Join { room: AgentId(2) };
    world_store::post_command(&mut *open_store(folder.path()), "w", &command, START_TIME)
        .expect("the command is posted");
    let export = |file: &str| {
        let mut store =
            Database::open(&StoreLocation::Sqlite(folder.path().join(file))).expect("the store opens");
        let mut out = Vec::new();
        store.export_namespace("w", &world_store::ROW_KINDS, &mut out).expect("the world is exported");
        String::from_utf8(out).expect("the export is UTF-8")
    };
    let exported = export("halo.db");
    let mut kinds: Vec<&str> = exported
        .lines()
        .filter_map(|line| line.strip_prefix(r#"{"record":{"kind":""#)?.split('"').next())
        .collect();
    kinds.dedup();
    assert_eq!(kinds, ["world", "agent", "room", "said", "post"]);
    let mut other =
        Database::open(&StoreLocation::Sqlite(folder.path().join("other.db"))).expect("the store opens");
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
    other.import(&mut exported.as_bytes(), request).expect("the world is imported");
    drop(other);
    assert_eq!(export("other.db"), exported);
}

/// A HUD above the limit shows shorter messages of other agents; those of the person are whole. What the agent says is cut to
/// a fifth when its HUD is nearly full. Without wrappers, both stay as they are.
#[test]
fn heartbeat_is_cooled_and_summarized_by_wrappers() {
    let long_said = format!("Listen, {}.", "the boats are in the harbour ".repeat(40).trim());
    let long_asked = format!("Question: {}?", "what did the old lighthouse keeper say ".repeat(30).trim());
    let answer = r#"{"responses": [{"room_id": 1, "message": "We should all listen more often at night."}]}"#;
    let run = |wrappers: AgentWrappers| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut world = test_world();
        world.join_room(AgentId(1), ARCHITECT, START_TIME);
        for (n, sender) in [AgentId(2), ARCHITECT, AgentId(2)].into_iter().enumerate() {
            let text = if sender == ARCHITECT { &long_asked } else { &long_said };
            world
                .send_message(AgentId(1), sender, text.clone(), None, START_TIME + n as Millis)
                .expect("the message is sent");
        }
        let store = WorldStore::create(open_store(folder.path()), "w", world, START_TIME).expect("a world");
        let scripted = model_with(&[answer]);
        let prompts = Arc::clone(&scripted.prompts);
        let sampling = Sampling { max_tokens: 1_000, ..Sampling::default() };
        let mut model = AgentModel::new(Box::new(scripted), Arc::new(CeilTokenCounter), sampling, true);
        model.wrappers = wrappers;
        let runner = WorldRunner::new(
            store,
            BTreeMap::from([("local".to_owned(), model)]),
            (WorldPrompts::default(), RunnerOptions::default()),
            Box::new(|| START_TIME + 60_000),
        );
        let report = loop {
            match runner.run_next(None).expect("the step succeeds") {
                RunnerStep::Heartbeat(report) => break *report,
                RunnerStep::Wait(_) => runner.step(),
                RunnerStep::Changed(_) | RunnerStep::Skipped => {}
            }
        };
        let prompt = prompts.lock().expect("the lock is not poisoned").remove(0);
        let prompt: String = prompt.messages.into_iter().map(|message| message.text).collect();
        let said = runner.store().world.room(AgentId(1)).and_then(|room| {
            let own = room.messages.iter().filter(|said| said.sender == MessageSender::Agent(AgentId(1)));
            own.map(|said| said.content.clone()).next_back()
        });
        (report.generation.expect("the model answers"), prompt, said.unwrap_or_default())
    };
    let (plain, prompt, said) = run(AgentWrappers::default());
    assert_eq!((plain.cooled_messages, plain.summarized_messages), (0, 0));
    assert!(prompt.contains(&long_said) && prompt.contains(&long_asked));
    assert_eq!(said, "We should all listen more often at night.");
    assert!(plain.pressure > 0.0 && plain.pressure < 0.8, "{plain:?}");

    let limit = CeilTokenCounter.count_tokens(&prompt) - 200;
    let (cooled, prompt, _) = run(AgentWrappers { cooling_tokens: Some(limit), ..AgentWrappers::default() });
    assert_eq!(cooled.cooled_messages, 2, "both messages of the other agent");
    assert!(!prompt.contains(&long_said) && prompt.contains("Listen, the boats"), "{prompt}");
    assert!(prompt.contains(&long_asked), "the person's message is whole");
    assert!(
        CeilTokenCounter.count_tokens(&prompt) <= limit + 8,
        "{}",
        CeilTokenCounter.count_tokens(&prompt)
    );
    assert!(cooled.prompt_tokens < plain.prompt_tokens);

    let always = SummaryConstraint { pressure_threshold: 0.0, ..SummaryConstraint::default() };
    let (short, _, said) = run(AgentWrappers { summaries: Some(always), ..AgentWrappers::default() });
    assert_eq!((short.summarized_messages, said.as_str()), (1, "We shoul..."));
    let (whole, _, said) =
        run(AgentWrappers { summaries: Some(SummaryConstraint::default()), ..AgentWrappers::default() });
    assert_eq!((whole.summarized_messages, said.as_str()), (0, "We should all listen more often at night."));
}

fn model_with(answers: &[&str]) -> ScriptedModel {
    let answer = |text: &&str| ScriptedAnswer { text: (*text).into(), ..ScriptedAnswer::default() };
    ScriptedModel::new(100_000, answers.iter().map(answer).collect())
}

/// How many models generate at the moment, and the most that ever did.
#[derive(Default)]
struct Meeting(Mutex<(usize, usize)>, Condvar);

/// A scripted model that waits for others before it answers, but not forever, and notes the KV caches that it is asked for.
struct MeetingModel {
    inner: ScriptedModel,
    meeting: Arc<Meeting>,
    expected: usize,
    caches: Arc<Mutex<Vec<String>>>,
    /// How many heartbeats were announced, for a model that answers only when it hears that the others have ended.
    announced: Option<Arc<(Mutex<usize>, Condvar)>>,
}

impl Model for MeetingModel {
    fn info(&self) -> &ModelInfo {
        self.inner.info()
    }

    fn tokenize(&mut self, text: &str, special: bool) -> Result<Vec<ModelToken>, Error> {
        self.inner.tokenize(text, special)
    }

    fn generate(
        &mut self,
        prompt: &Prompt<'_>,
        sampling: &Sampling,
        attention: &AttentionRequest,
        listener: &mut dyn FnMut(ModelStep<'_>) -> StepFlow,
    ) -> Result<FinishReason, Error> {
        self.caches.lock().expect("no panic").push(prompt.conversation.to_owned());
        let Meeting(count, changed) = &*self.meeting;
        let mut present = count.lock().expect("no panic");
        present.0 += 1;
        present.1 = present.1.max(present.0);
        changed.notify_all();
        let patience = Duration::from_secs(5);
        let (mut present, _) = changed
            .wait_timeout_while(present, patience, |(_, most)| *most < self.expected)
            .expect("no panic");
        present.0 -= 1;
        drop(present);
        if let Some((announced, changed)) = self.announced.as_deref() {
            let announced = announced.lock().expect("no panic");
            let others = self.expected - 1;
            let (announced, waited) =
                changed.wait_timeout_while(announced, patience, |count| *count < others).expect("no panic");
            assert!(!waited.timed_out(), "{announced} of {others} heartbeats were announced");
        }
        self.inner.generate(prompt, sampling, attention, listener)
    }
}

/// A world of five agents whose heartbeats fall together, on a model with so many handles. Returns the agents in the order of
/// their heartbeats, how many thought at the same time at most, and the names of their KV caches.
fn run_together(handles: usize, expected: usize, beats: usize) -> (Vec<u32>, usize, Vec<String>, World) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let agents: String = (1..=5)
        .map(|n| format!("[[agents]]\nname = \"Agent {n}\"\nseed = \"You are {n}.\"\ninterval = 4.0\n"))
        .collect();
    let members = "[[rooms]]\nowner = \"Agent 1\"\nmembers = [\"Agent 2\", \"Agent 3\", \"Agent 4\", \"Agent 5\"]\nkeys = [\"open\"]\n";
    let world = toml::from_str::<WorldFile>(&format!("{agents}{members}"))
        .expect("a valid world file")
        .into_world("local", START_TIME)
        .expect("a valid world");
    let store = WorldStore::create(open_store(folder.path()), "w", world, START_TIME).expect("a world");
    let (meeting, caches) = (Arc::<Meeting>::default(), Arc::<Mutex<Vec<String>>>::default());
    let announced = Arc::<(Mutex<usize>, Condvar)>::default();
    let model = |slow: bool| {
        let text = r#"{"responses": [{"room_id": 1, "message": "Hello."}]}"#.to_owned();
        let answers = vec![ScriptedAnswer { text, ..ScriptedAnswer::default() }; beats];
        Box::new(MeetingModel {
            inner: ScriptedModel::new(100_000, answers),
            meeting: Arc::clone(&meeting),
            expected,
            caches: Arc::clone(&caches),
            announced: slow.then(|| Arc::clone(&announced)),
        }) as Box<dyn Model + Send>
    };
    let sampling = Sampling { max_tokens: 1_000, ..Sampling::default() };
    let agent_model = AgentModel::new(model(true), Arc::new(CeilTokenCounter), sampling, true)
        .with_handles((1..handles).map(|_| model(false)).collect());
    // All heartbeats are overdue.
    let runner = WorldRunner::new(
        store,
        BTreeMap::from([("local".to_owned(), agent_model)]),
        (WorldPrompts::default(), RunnerOptions::default()),
        Box::new(|| START_TIME + 600_000),
    );
    let counter = Arc::clone(&announced);
    runner.set_heartbeat_listener(Box::new(move |_| {
        *counter.0.lock().expect("no panic") += 1;
        counter.1.notify_all();
    }));
    let mut order = Vec::new();
    while order.len() < beats {
        match runner.run_next(None).expect("the step succeeds") {
            RunnerStep::Heartbeat(report) => {
                assert!(report.outcome.is_ok(), "{:?}", report.outcome);
                order.push(report.agent.0);
            }
            RunnerStep::Changed(_) | RunnerStep::Skipped => {}
            RunnerStep::Wait(_) => panic!("a heartbeat is due"),
        }
    }
    assert_eq!(runner.world_clock().thinking_agent, None);
    assert_eq!(*announced.0.lock().expect("no panic"), beats, "each heartbeat is announced once");
    let most = meeting.0.lock().expect("no panic").1;
    let caches = caches.lock().expect("no panic").clone();
    let world = runner.store().world.clone();
    let keys = world_store::world_kv_keys(&mut *open_store(folder.path()), "w", runner.store().created());
    let keys = keys.expect("the keys are read");
    assert!(
        caches.iter().all(|cache| keys.contains(cache)),
        "{caches:?} are deleted with the world: {keys:?}"
    );
    (order, most, caches, world)
}

#[test]
fn agents_whose_heartbeats_fall_together_think_at_the_same_time() {
    let (order, most, caches, world) = run_together(4, 4, 5);
    assert_eq!(most, 4, "as many as the model has handles");
    let mut first: Vec<u32> = order[..4].to_vec();
    first.sort_unstable();
    assert_eq!((first, order[4]), (vec![1, 2, 3, 4], 5), "in the order of their heartbeats");
    let mut own = caches.clone();
    own.sort();
    own.dedup();
    assert_eq!(own.len(), 5, "each has a KV cache of its own: {caches:?}");
    let faults = testing::rule_violations(&world);
    assert!(faults.is_empty(), "{faults:?}");
    let mut senders: Vec<String> =
        messages_in_room(&world, 1).into_iter().map(|(sender, _)| sender).collect();
    senders.sort();
    senders.dedup();
    assert_eq!(senders.len(), 5, "each answer is applied: {senders:?}");
}

#[test]
fn agents_think_one_by_one_where_the_model_has_one_handle() {
    let (order, most, caches, _) = run_together(1, 1, 5);
    assert_eq!((order, most), (vec![1, 2, 3, 4, 5], 1));
    assert!(caches.iter().all(|cache| *cache == caches[0]), "they share one KV cache: {caches:?}");
}

/// A world that another process has taken over, because this one did not answer for longer than its lease: the write is refused,
/// and the runner ends.
#[test]
fn runner_ends_when_its_lease_is_lost() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = WorldStore::create(open_store(folder.path()), "w", test_world(), START_TIME)
        .expect("the world is created");
    let (runner, _) = scripted_runner(store, &["unused"]);
    // The file system has lost the lock.
    std::fs::remove_dir_all(folder.path().join("halo.db-locks")).expect("the folder of the locks is deleted");
    let other = WorldStore::open(open_store(folder.path()), "w").expect("the world can be leased");
    let (other, _) = scripted_runner(other, &["unused"]);
    other.execute_command(UserCommand::Join { room: AgentId(1) }).expect("the new owner writes");
    let error =
        runner.execute_command(UserCommand::Join { room: AgentId(2) }).expect_err("the lease is lost");
    assert!(error.is_lease_lost(), "{error}");
    assert!(runner.is_stopping());
}
