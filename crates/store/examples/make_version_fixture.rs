//! Makes the test database of the current schema version:
//! `cargo run -p halo-store --example make_version_fixture -- FILE`. The file of a released version is never made again.

use halo_core::change::{Append, BrightnessRun, Change, NewToken, Score, TallyDelta};
use halo_core::manual_edit;
use halo_core::store::{Access, Durability, Embedding, RecordKind, Store};
use halo_core::token::{Brightness, ContentKind, Position, Role, TokenId, TurnId};
use halo_store::database::{Database, StoreLocation};
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = PathBuf::from(std::env::args().nth(1).ok_or("give the path of the file to make")?);
    let mut store = Database::open(&StoreLocation::Sqlite(path.clone()))?;
    let mut timeline = store.load("main", Access::Write)?;
    let messages = [
        (Role::User, "What hangs there?"),
        (Role::Assistant, "On the wall hangs a gun: remember the gun on the wall. 谢谢 🌱"),
        (Role::User, "Thanks!"),
        (Role::Assistant, "You are welcome."),
    ];
    for (turn, (role, text)) in (0..).zip(messages) {
        let token = |(i, word): (usize, &str)| NewToken {
            id: TokenId(i as u32),
            text: word.to_owned(),
            chunk_index: u32::from(i >= 4),
            brightness: Brightness(10_000.0),
            kind: ContentKind::Message,
        };
        let tokens = text.split_inclusive(' ').enumerate().map(token).collect();
        let append = Append { at: timeline.next_position(), turn: TurnId(turn), role, tokens };
        store.transact("main", &mut timeline, &Change::Append(append), Durability::Immediate)?;
    }
    let tally = TallyDelta { votes: 3, mass: 1 << 30, exposures: 2 };
    let score = Score {
        runs: vec![BrightnessRun { start: Position(0), brightness: vec![Brightness(9_000.5); 6] }],
        tallies: vec![("a1.1".parse()?, tally)],
    };
    store.transact("main", &mut timeline, &Change::Score(score), Durability::Immediate)?;
    let full = Brightness(10_000.0);
    let change = manual_edit::pin(&timeline, "a1.1".parse()?, full)?;
    store.transact("main", &mut timeline, &change, Durability::Immediate)?;
    let change = manual_edit::prune(&timeline, "u2.0".parse()?, None)?;
    store.transact("main", &mut timeline, &change, Durability::Immediate)?;
    let change = manual_edit::delete(&timeline, "a1.1".parse()?)?;
    store.transact("main", &mut timeline, &change, Durability::Immediate)?;
    let change = manual_edit::undelete(&timeline, "a1.1".parse()?)?;
    store.transact("main", &mut timeline, &change, Durability::Immediate)?;
    store.put_record("main", RecordKind::Note, "notes.json", Some("{}"))?;
    store.put_embeddings(
        "main",
        "kept",
        &[Embedding { chunk: "u0.0".parse()?, text_hash: 7, vector: vec![0.6, 0.8] }],
    )?;
    store.set_model("main", "kept")?;
    let mut hash_path = path.into_os_string();
    hash_path.push(".hash");
    std::fs::write(hash_path, format!("{}\n", timeline.state_hash()))?;
    Ok(())
}
