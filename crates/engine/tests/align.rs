//! Which conversation a client's history belongs to, on every case of `tests/histories/cases.toml`.

use halo_core::token::{Role, TurnId};
use halo_engine::align::{
    Candidate, KnownMessage, SentMessage, Variant, Verdict, align, extend_prefix, message_key, similar,
};
use std::collections::BTreeMap;

#[derive(serde::Deserialize)]
struct Cases {
    case: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
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

fn cases() -> Vec<Case> {
    let text = include_str!("../../../tests/histories/cases.toml");
    toml::from_str::<Cases>(text).expect("the table is TOML").case
}

fn message(line: &str) -> (Role, &str) {
    let role = match &line[..1] {
        "u" => Role::User,
        "a" => Role::Assistant,
        _ => Role::System,
    };
    (role, &line[2..])
}

/// Stored messages have even turns; a variant has the odd turn behind the message that it follows.
fn verdict(case: &Case) -> String {
    let mut texts: BTreeMap<TurnId, String> = BTreeMap::new();
    let (mut messages, mut variants, mut path) = (Vec::new(), Vec::new(), 0);
    for (n, line) in (0u32..).zip(&case.stored) {
        let (role, text) = message(line);
        let key = message_key(TurnId(2 * n), role, text, path);
        path = extend_prefix(path, &key);
        texts.insert(key.turn, text.to_owned());
        messages.push(KnownMessage { key, stands: true });
        for (_, line) in case.variants.iter().filter(|(after, _)| *after == n) {
            let (role, text) = message(line);
            let turn = TurnId(2 * n + 1);
            messages.push(KnownMessage { key: message_key(turn, role, text, path), stands: false });
            variants.push(Variant { after: Some(TurnId(2 * n)), turns: vec![turn] });
        }
    }
    let mut system = String::new();
    let mut sent: Vec<SentMessage> = Vec::new();
    for (role, text) in case.sent.iter().map(|line| message(line)) {
        match role {
            Role::System if sent.is_empty() => system = format!("{system}{text}"),
            role => sent.push(SentMessage::new(role, text.to_owned())),
        }
    }
    let candidate = Candidate {
        messages: &messages,
        variants: &variants,
        from_start: true,
        same_system: similar(&system, &case.system),
        unique: &messages.iter().map(|message| message.key.loose).collect(),
        named: false,
    };
    let aligned = align(&candidate, &sent, &mut |turn| texts.get(&turn).cloned());
    match aligned.map(|aligned| aligned.verdict) {
        None => "new".into(),
        Some(Verdict::Continue { .. }) => "continue".into(),
        Some(Verdict::Regenerate { .. }) => "regenerate".into(),
        Some(Verdict::EditLast { .. }) => "edit".into(),
        Some(Verdict::ChooseVariant { .. }) => "variant".into(),
        Some(Verdict::Branch { through, .. }) => {
            let shared = messages.iter().filter(|m| m.stands && m.key.turn <= through).count();
            format!("branch {shared}")
        }
    }
}

#[test]
fn align_gives_the_verdict_of_every_recorded_history() {
    let cases = cases();
    assert!(cases.len() >= 60, "the table has {} cases", cases.len());
    let wrong: Vec<String> = cases
        .iter()
        .map(|case| (case, verdict(case)))
        .filter(|(case, got)| *got != case.verdict)
        .map(|(case, got)| format!("{}: {}: {got}, not {}", case.client, case.what, case.verdict))
        .collect();
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}
