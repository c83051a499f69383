//! The real binary searches: with the real embedder, and without any.

use crate::common::{run_halo, temp_dir};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

struct SearchTestHome(tempfile::TempDir);

impl SearchTestHome {
    /// A data folder into which this conversation has come, without vectors.
    fn with_conversation(name: &str, messages: &[(&str, &str)]) -> Self {
        let home = Self(temp_dir());
        let list: Vec<_> = messages
            .iter()
            .map(|(role, text)| serde_json::json!({ "role": role, "content": text }))
            .collect();
        let file = home.0.path().join("in.json");
        std::fs::write(&file, serde_json::to_string(&list).expect("JSON")).expect("written");
        home.run_ok(&["import", &file.display().to_string(), "-c", name, "--no-index"]);
        home
    }

    fn data_dir(&self) -> PathBuf {
        self.0.path().join("data")
    }

    fn run(&self, args: &[&str]) -> crate::common::HaloOutput {
        run_halo(&self.data_dir(), args)
    }

    fn run_ok(&self, args: &[&str]) -> String {
        let run = self.run(args);
        assert_eq!(run.status, 0, "{args:?}: {}", run.err);
        run.out
    }

    fn run_json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.run_ok(&[args, &["--json"]].concat())).expect("JSON alone")
    }
}

const CONVERSATION: [(&str, &str); 8] = [
    ("user", "My grandmother left me a blue bicycle. I still ride it to the harbour."),
    ("assistant", "That is a fine thing to have. Does it need repairs?"),
    ("user", "The chain broke in March, and a man called Iñigo mended it for nothing."),
    ("assistant", "How kind of him."),
    ("user", "What should I cook tonight? There is only rice and an egg."),
    ("assistant", "Fry the egg, put it on the rice, and add soy sauce."),
    ("user", "昨日、東京で猫を見ました。"),
    ("assistant", "A cat in Tokyo! What was it like?"),
];

fn first_hit(found: &Value) -> &str {
    found["found"][0]["chunk"].as_str().expect("something was found")
}

#[test]
fn search_is_lexical_without_embedder() {
    let home = SearchTestHome::with_conversation("main", &CONVERSATION);
    let run = home.run(&["search", "who", "mended", "the", "chain"]);
    assert_eq!(run.status, 0, "{}", run.err);
    assert!(run.err.contains("searching by words only; `halo models pull` downloads"), "{}", run.err);
    assert!(run.out.starts_with("u2.0"), "{}", run.out);
    assert!(run.out.contains("words: mend, chain") || run.out.contains("words: chain, mend"), "{}", run.out);
    let found = home.run_json(&["search", "東京", "-n", "2", "--set", "recall.mode=lexical"]);
    assert_eq!((first_hit(&found), found["mode"].as_str()), ("u6.0", Some("lexical")));
    assert_eq!(found["found"].as_array().map(Vec::len), Some(2));
    assert!(found["found"][0]["near"].is_null());
    // What was deleted is gone; what was pruned is there.
    home.run_ok(&["prune", "u2.0"]);
    assert_eq!(
        first_hit(&home.run_json(&["search", "inigo", "--no-index"])),
        "u2.0",
        "dead, and without its accent"
    );
    home.run_ok(&["delete", "u2.0"]);
    assert!(!home.run_ok(&["search", "Iñigo"]).contains("Iñigo"));
    for (status, args, why) in [
        (1, ["search", "  "].as_slice(), "the query is empty"),
        (3, &["search", "x", "-c", "nobody"], "there is no conversation 'nobody'"),
        (1, &["search", "x", "--set", "recall.embedder=/nowhere"], "/nowhere"),
        (1, &["index"], "no embedder is installed: `halo models pull`"),
    ] {
        let run = home.run(args);
        assert_eq!((run.status, run.out.as_str()), (status, ""), "{args:?}");
        assert!(run.err.contains(why), "{args:?}: {}", run.err);
    }
}

#[test]
fn search_by_embedding_finds_text_without_shared_words() {
    let home = SearchTestHome::with_conversation("main", &CONVERSATION);
    let embedder = crate::common::embedder_setting();
    let found = home.run_json(&["search", "Which present did I inherit from my family?", "--set", &embedder]);
    assert_eq!(first_hit(&found), "u0.0");
    let best = &found["found"][0];
    assert_eq!((found["missing"].as_u64(), best["live"].as_bool()), (Some(0), Some(true)));
    assert_eq!(best["words"], serde_json::json!([]), "not one word in common");
    assert!(best["near"].as_f64().is_some_and(|near| near > 0.7), "{best}");
    assert!(best["points"]["meaning"].as_f64().is_some_and(|points| points > 0.0), "{best}");
    assert!(best["text"].as_str().is_some_and(|text| text.contains("blue bicycle")));
    // The vectors were kept: nothing is left to make.
    assert_eq!(home.run_json(&["index", "--set", &embedder])["made"], 0);
}

/// Killed while it makes vectors, it goes on where it was.
#[test]
fn index_resumes_after_kill() {
    let texts: Vec<String> = (0..300)
        .map(|n| format!("Note {n}: the {n}th lamp of the harbour was lit at dusk, as ever."))
        .collect();
    let messages: Vec<(&str, &str)> = texts.iter().map(|text| ("user", text.as_str())).collect();
    let home = SearchTestHome::with_conversation("lamps", &messages);
    let embedder = crate::common::embedder_setting();
    let missing = || {
        home.run_json(&["search", "-c", "lamps", "lamp", "--no-index", "--set", &embedder])["missing"]
            .as_u64()
    };
    let all = missing().expect("a number");
    assert_eq!(all, 600, "two vectors for each");
    let mut halo = Command::new(env!("CARGO_BIN_EXE_halo"))
        .args(["index", "-c", "lamps", "--threads", "1", "--set", &embedder, "--data"])
        .arg(home.data_dir())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let begin = Instant::now();
    let left = loop {
        let left = missing().expect("a number");
        if left < all {
            break left;
        }
        assert!(begin.elapsed() < Duration::from_secs(300), "it makes vectors");
        assert!(halo.try_wait().expect("known").is_none(), "it does not end before it has made any");
    };
    halo.kill().expect("killed");
    halo.wait().expect("gone");
    let left = missing().expect("a number").min(left);
    let made =
        home.run_json(&["index", "-c", "lamps", "--set", &embedder])["made"].as_u64().expect("a number");
    assert_eq!(made, left, "what was made before is not made again");
    assert!(
        home.run_ok(&["search", "-c", "lamps", "the 42nd lamp: note 42", "--set", &embedder])
            .starts_with("u42.0")
    );
}
