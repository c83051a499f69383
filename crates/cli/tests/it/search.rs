//! `halo search` and `halo index` with the real binary, with and without the real embedder.

use crate::common::{run_halo, temp_dir};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

struct SearchTestHome(tempfile::TempDir);

impl SearchTestHome {
    /// A data folder with this conversation, imported without embeddings.
    fn with_conversation(name: &str, messages: &[(&str, &str)]) -> Self {
        let home = Self(temp_dir());
        let list: Vec<_> = messages
            .iter()
            .map(|(role, text)| serde_json::json!({ "role": role, "content": text }))
            .collect();
        let file = home.0.path().join("in.json");
        std::fs::write(&file, serde_json::to_string(&list).expect("JSON")).expect("the file is written");
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
        serde_json::from_str(&self.run_ok(&[args, &["--json"]].concat())).expect("stdout is JSON only")
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

fn first_hit(result: &Value) -> &str {
    result["found"][0]["chunk"].as_str().expect("a hit")
}

#[test]
fn search_is_lexical_without_embedder() {
    let home = SearchTestHome::with_conversation("main", &CONVERSATION);
    let run = home.run(&["search", "who", "mended", "the", "chain"]);
    assert_eq!(run.status, 0, "{}", run.err);
    assert!(run.err.contains("searching by words only; `halo models pull` downloads"), "{}", run.err);
    assert!(run.out.starts_with("u2.0"), "{}", run.out);
    assert!(run.out.contains("words: mend, chain") || run.out.contains("words: chain, mend"), "{}", run.out);
    let result = home.run_json(&["search", "東京", "-n", "2", "--set", "recall.mode=lexical"]);
    assert_eq!((first_hit(&result), result["mode"].as_str()), ("u6.0", Some("lexical")));
    assert_eq!(result["found"].as_array().map(Vec::len), Some(2));
    assert!(result["found"][0]["near"].is_null());
    // Search finds pruned chunks, but not deleted ones.
    home.run_ok(&["prune", "u2.0"]);
    assert_eq!(
        first_hit(&home.run_json(&["search", "inigo", "--no-index"])),
        "u2.0",
        "a pruned chunk is found, also without the accent"
    );
    home.run_ok(&["delete", "u2.0"]);
    assert!(!home.run_ok(&["search", "Iñigo"]).contains("Iñigo"));
    for (status, args, message) in [
        (1, ["search", "  "].as_slice(), "the query is empty"),
        (3, &["search", "x", "-c", "nobody"], "there is no conversation 'nobody'"),
        (1, &["search", "x", "--set", "recall.embedder=/nowhere"], "/nowhere"),
        (1, &["index"], "no embedder is installed: `halo models pull`"),
    ] {
        let run = home.run(args);
        assert_eq!((run.status, run.out.as_str()), (status, ""), "{args:?}");
        assert!(run.err.contains(message), "{args:?}: {}", run.err);
    }
}

#[test]
fn search_by_embedding_finds_text_without_shared_words() {
    let home = SearchTestHome::with_conversation("main", &CONVERSATION);
    let embedder = crate::common::embedder_setting();
    let result =
        home.run_json(&["search", "Which present did I inherit from my family?", "--set", &embedder]);
    assert_eq!(first_hit(&result), "u0.0");
    let best = &result["found"][0];
    assert_eq!((result["missing"].as_u64(), best["live"].as_bool()), (Some(0), Some(true)));
    assert_eq!(best["words"], serde_json::json!([]), "the query and the text share no word");
    assert!(best["near"].as_f64().is_some_and(|near| near > 0.7), "{best}");
    assert!(best["points"]["meaning"].as_f64().is_some_and(|points| points > 0.0), "{best}");
    assert!(best["text"].as_str().is_some_and(|text| text.contains("blue bicycle")));
    // The search stored the embeddings, so that none is missing.
    assert_eq!(home.run_json(&["index", "--set", &embedder])["made"], 0);
}

/// After a kill, `halo index` computes only the missing embeddings.
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
    let total = missing().expect("a number");
    assert_eq!(total, 600, "each message has two embeddings");
    let mut halo = Command::new(env!("CARGO_BIN_EXE_halo"))
        .args(["index", "-c", "lamps", "--threads", "1", "--set", &embedder, "--data"])
        .arg(home.data_dir())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("halo starts");
    let begin = Instant::now();
    let left = loop {
        let left = missing().expect("a number");
        if left < total {
            break left;
        }
        assert!(begin.elapsed() < Duration::from_secs(300), "halo index stores no embedding");
        assert!(halo.try_wait().expect("a status").is_none(), "halo index exited before the kill");
    };
    halo.kill().expect("the process is killed");
    halo.wait().expect("the process exits");
    let left = missing().expect("a number").min(left);
    let made =
        home.run_json(&["index", "-c", "lamps", "--set", &embedder])["made"].as_u64().expect("a number");
    assert_eq!(made, left, "stored embeddings are not computed again");
    assert!(
        home.run_ok(&["search", "-c", "lamps", "the 42nd lamp: note 42", "--set", &embedder])
            .starts_with("u42.0")
    );
}
