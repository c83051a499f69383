//! The verdict of `align` for every client history of `tests/histories/cases.toml`.

use halo_core::token::{Role, TurnId};
use halo_engine::align::{
    AlignCandidate, AlignVerdict, KnownMessage, SentMessage, TurnVariant, align, extend_prefix,
    is_similar_prompt, message_key,
};
use std::collections::BTreeMap;

#[derive(serde::Deserialize)]
struct AlignCaseFile {
    case: Vec<AlignCase>,
}

#[derive(serde::Deserialize)]
struct AlignCase {
    client: String,
    what: String,
    stored: Vec<String>,
    #[serde(default)]
    system: String,
    #[serde(default)]
    variants: Vec<(u32, String)>,
    sent: Vec<String>,
    verdict: String,
}

fn load_cases() -> Vec<AlignCase> {
    let text = include_str!("../../../../tests/histories/cases.toml");
    toml::from_str::<AlignCaseFile>(text).expect("the table is TOML").case
}

fn parse_message(line: &str) -> (Role, &str) {
    let role = match &line[..1] {
        "u" => Role::User,
        "a" => Role::Assistant,
        "t" => Role::Tool,
        _ => Role::System,
    };
    (role, &line[2..])
}

/// Stored messages have even turns; a variant has the odd turn after the message that it follows.
fn align_case(case: &AlignCase) -> String {
    let mut texts: BTreeMap<TurnId, String> = BTreeMap::new();
    let (mut messages, mut variants, mut path) = (Vec::new(), Vec::new(), 0);
    for (n, line) in (0u32..).zip(&case.stored) {
        let (role, text) = parse_message(line);
        let key = message_key(TurnId(2 * n), role, text, path);
        path = extend_prefix(path, &key);
        texts.insert(key.turn, text.to_owned());
        messages.push(KnownMessage { key, on_path: true });
        for (_, line) in case.variants.iter().filter(|(after, _)| *after == n) {
            let (role, text) = parse_message(line);
            let turn = TurnId(2 * n + 1);
            messages.push(KnownMessage { key: message_key(turn, role, text, path), on_path: false });
            variants.push(TurnVariant { after: Some(TurnId(2 * n)), turns: vec![turn] });
        }
    }
    let mut system = String::new();
    let mut sent: Vec<SentMessage> = Vec::new();
    for (role, text) in case.sent.iter().map(|line| parse_message(line)) {
        match role {
            Role::System if sent.is_empty() => system = format!("{system}{text}"),
            role => sent.push(SentMessage::new(role, text.to_owned())),
        }
    }
    let candidate = AlignCandidate {
        messages: &messages,
        variants: &variants,
        from_start: true,
        same_system: is_similar_prompt(&system, &case.system),
        unique_hashes: &messages.iter().map(|message| message.key.loose_hash).collect(),
        named: false,
    };
    let aligned = align(&candidate, &sent, &mut |turn| texts.get(&turn).cloned());
    match aligned.map(|aligned| aligned.verdict) {
        None => "new".into(),
        Some(AlignVerdict::Continue { .. }) => "continue".into(),
        Some(AlignVerdict::Regenerate { .. }) => "regenerate".into(),
        Some(AlignVerdict::EditLast { .. }) => "edit".into(),
        Some(AlignVerdict::ChooseVariant { .. }) => "variant".into(),
        Some(AlignVerdict::Branch { last_shared_turn, .. }) => {
            let shared = messages.iter().filter(|m| m.on_path && m.key.turn <= last_shared_turn).count();
            format!("branch {shared}")
        }
    }
}

#[test]
fn align_gives_the_verdict_of_every_recorded_history() {
    let cases = load_cases();
    assert!(cases.len() >= 60, "the table has {} cases", cases.len());
    let mismatches: Vec<String> = cases
        .iter()
        .map(|case| (case, align_case(case)))
        .filter(|(case, verdict)| *verdict != case.verdict)
        .map(|(case, verdict)| format!("{}: {}: {verdict}, not {}", case.client, case.what, case.verdict))
        .collect();
    assert!(
        mismatches.is_empty(),
        "{} of {} differ:\n{}",
        mismatches.len(),
        cases.len(),
        mismatches.join("\n")
    );
}

/// Calls are compared by their meaning, and results of functions are answered as messages of the user are.
#[test]
fn align_recognizes_calls_and_results() {
    const QUESTION: &str = "u How is the weather in Lindau on the lake today?";
    const CALL: &str =
        "a <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"town\": \"Lindau\"}}\n</tool_call>";
    const SAME_CALL: &str = "a {\"name\": \"weather\", \"parameters\": {\"town\":\"Lindau\"}}";
    let cases: [(&[&str], &[&str], &str); 7] = [
        (&[QUESTION, CALL], &[QUESTION, SAME_CALL, "t sunny"], "continue"),
        (&[QUESTION, CALL], &[QUESTION, SAME_CALL, "t sunny", "t noon"], "continue"),
        (&[QUESTION, CALL, "t sunny", "a Sunny."], &[QUESTION, CALL, "t sunny"], "regenerate"),
        (
            &[QUESTION, CALL, "t sunny", "t noon", "a Both."],
            &[QUESTION, CALL, "t sunny", "t noon"],
            "regenerate",
        ),
        (&[QUESTION, CALL, "t sunny", "a Sunny."], &[QUESTION, CALL, "t rainy"], "edit"),
        (
            &[QUESTION, CALL, "t sunny", "a Sunny."],
            &[QUESTION, CALL, "t sunny", "a Sunny.", "u Thanks."],
            "continue",
        ),
        (
            &[QUESTION, CALL, "t sunny", "a Sunny.", "u Thanks.", "a Welcome."],
            &[QUESTION, CALL, "t rainy", "a Rainy.", "u Thanks."],
            "branch 2",
        ),
    ];
    for (stored, sent, verdict) in cases {
        let lines = |lines: &[&str]| lines.iter().map(|&line| line.to_owned()).collect();
        let case = AlignCase {
            client: "any".into(),
            what: "functions".into(),
            stored: lines(stored),
            system: String::new(),
            variants: Vec::new(),
            sent: lines(sent),
            verdict: verdict.into(),
        };
        assert_eq!(align_case(&case), verdict, "{sent:?}");
    }
}
