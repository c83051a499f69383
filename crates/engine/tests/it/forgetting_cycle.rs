//! The forgetting cycle on a real database: window, retention and memories in one go.

use crate::common::test_rules;
use halo_agents::forgetting::ForgettingAction;
use halo_agents::lethe::{DAY_MILLIS, RetentionPolicy};
use halo_core::Error;
use halo_core::model::{ChatTemplate, StepFlow};
use halo_core::store::{Access, EraseStore, Store};
use halo_core::testing::doubles::{ScriptedAnswer, ScriptedModel};
use halo_core::token::ChunkId;
use halo_engine::forget::{CaptureDeletion, ForgetBackend, ForgetService, StoreRetention};
use halo_engine::forgetting_record::ForgettingRecord;
use halo_engine::memory::{MemoryEdit, MemoryRules};
use halo_engine::rules::{ConversationRules, ForgettingRules};
use halo_engine::session::Session;
use halo_store::database::{Database, StoreLocation};
use jiff::civil::Date;
use std::path::PathBuf;
use std::time::Duration;

const TODAY: Date = jiff::civil::date(2026, 11, 15);

struct FolderBackend(PathBuf);

impl FolderBackend {
    fn database(&self) -> Database {
        Database::open(&StoreLocation::Sqlite(self.0.join("halo.db"))).expect("the store opens")
    }
}

impl ForgetBackend for FolderBackend {
    fn open_reader(&self) -> Result<Option<Box<dyn Store + Send>>, Error> {
        Ok(Some(Box::new(self.database())))
    }

    fn open_writer(&self) -> Result<Box<dyn EraseStore + Send>, Error> {
        Ok(Box::new(self.database()))
    }

    fn data_dir(&self) -> Result<PathBuf, Error> {
        Ok(self.0.clone())
    }

    fn grace_period(&self) -> Result<Duration, Error> {
        Ok(Duration::ZERO)
    }

    fn delete_saved_kv(&self, _: &str) -> Result<(), Error> {
        Ok(())
    }

    fn delete_capture(&self, _: &str) -> Result<CaptureDeletion, Error> {
        Ok(CaptureDeletion::Deleted)
    }
}

/// The whole window is used, so that its pressure is high after a turn.
fn full_window_rules() -> ConversationRules {
    let memory = MemoryRules {
        range_tokens: 20,
        max_range_tokens: 120,
        max_tokens: 12,
        delay_answers: 1,
        window_share: 0.5,
        overlap_tokens: 0,
        reflection: None,
    };
    ConversationRules {
        reserved_tokens: 0,
        memory: Some(memory),
        forgetting: Some(ForgettingRules::default()),
        ..test_rules(130)
    }
}

fn open_session(backend: &FolderBackend, name: &str, answers: &[&str]) -> Session {
    let answer = |text: &&str| ScriptedAnswer { text: (*text).into(), ..ScriptedAnswer::default() };
    let model = ScriptedModel::new(4096, answers.iter().map(answer).collect());
    let model = Box::new(model.with_template(ChatTemplate::plain()));
    let session =
        Session::open(Box::new(backend.database()), model, None, name, full_window_rules(), &mut |_, _| {});
    session.unwrap_or_else(|error| panic!("the session does not open: {error}"))
}

fn send(session: &mut Session, message: &str) {
    let result = session.send_message(message, TODAY, &mut |_| StepFlow::Continue);
    result.unwrap_or_else(|error| panic!("{message}: {error}"));
}

const LONG_MESSAGE: &str = "The old house by the river has seven rooms and a cellar full of apples that we \
                            picked in the autumn before the first snow came down from Norway again";

#[test]
fn forgetting_cycle_prunes_window_applies_retention_and_disables_memories() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let backend = FolderBackend(folder.path().to_owned());
    send(&mut open_session(&backend, "old", &["Noted."]), "The safe opens with 1234");
    let answers = ["Yes.", "It told of apples.", "No.", "It told of Norway.", "Well.", "So.", "Thus."];
    let mut session = open_session(&backend, "main", &answers);
    let service = ForgetService::new(&backend);
    let now = jiff::Timestamp::now().as_millisecond();
    let in_two_years = now + 800 * DAY_MILLIS;
    let policy = Some(RetentionPolicy::default());
    for _ in 0..2 {
        send(&mut session, LONG_MESSAGE);
        assert!(session.run_idle_memory_work(&|| false, &mut |_| {}).expect("a memory is formed"));
    }
    session.edit_memory(2, MemoryEdit::SetText("Your trip to Norway.".into())).expect("the memory exists");
    assert!(!session.is_under_pressure(), "{}", session.pressure());
    let mut retention = StoreRetention::new(&service, policy, in_two_years).without("main");
    let early = session.run_forgetting_cycle(&mut retention).expect("the cycle succeeds");
    assert_eq!((early, retention.report.chunks), (None, 0), "no cycle runs below the threshold");
    send(&mut session, LONG_MESSAGE);
    assert!(session.pressure() > 0.8, "{}", session.pressure());
    let cycle = session.run_forgetting_cycle(&mut retention).expect("the cycle succeeds");
    let cycle = cycle.expect("the pressure is high");
    assert!(cycle.final_pressure <= 0.8 && cycle.final_pressure < cycle.initial_pressure, "{cycle:?}");
    // Window, then retention, then memories: the first one is old, names nothing and nobody.
    let [ForgettingAction::WindowPrune(pruned), ForgettingAction::LetheCycle(erased), rest @ ..] =
        &cycle.actions[..]
    else {
        panic!("{cycle:?}")
    };
    assert!(*pruned >= 1 && *erased == 2, "{cycle:?}");
    assert_eq!(rest, [ForgettingAction::MemoryDeactivate(1)]);
    let disabled: Vec<bool> = session.memories().iter().map(|memory| memory.disabled).collect();
    assert_eq!(disabled, [true, false]);
    let mut reader = backend.database();
    let mut old = reader.load("old", Access::Read).expect("the conversation");
    let chunks: Vec<ChunkId> = old.chunks().map(|chunk| chunk.id()).collect();
    reader.load_bodies("old", &mut old, &chunks).expect("the bodies load");
    assert!(old.chunks().all(|chunk| chunk.is_forgotten()), "the retention erases");
    assert_eq!(service.proofs().expect("the proofs are readable").proofs.len(), 2);
    let record = ForgettingRecord::load(session.store(), "main").expect("readable").expect("a cycle ran");
    assert_eq!((record.runs, record.pruned, record.forgotten), (1, *pruned, 2));
    assert_eq!(record.disabled_memories, [1]);
    drop(session);
    // Without a policy nothing is erased, however old it is.
    let mut retention = StoreRetention::new(&service, None, in_two_years);
    assert_eq!(retention.apply().expect("the retention succeeds"), 0);
    let timeline = backend.database().load("main", Access::Read).expect("the conversation");
    assert!(timeline.chunks().all(|chunk| !chunk.is_deleted()));
}
