//! Retention, proofs of deletion, forgetting cycles, and premise checks.

use halo_agents::agent::{Agent, AgentExt, agent_fn};
use halo_agents::contradiction::{ContradictionReason, find_contradiction};
use halo_agents::forgetting::{
    ActiveMemories, ActiveMemory, ApplyRetention, DEACTIVATION_SALIENCE, ForgettingAction, ForgettingResult,
    PRESSURE_THRESHOLD, WindowWithMemories, coordinated_forgetting_cycle,
};
use halo_agents::judge::{
    ModelContradictionDetector, ModelJudge, PremiseClaim, RuleContradictionDetector, RuleJudge,
};
use halo_agents::lethe::{CompostStats, DAY_MILLIS, RetentionPolicy, RetentionStage};
use halo_agents::mu::{
    ModelPremiseExtractor, PremiseResult, SUGGESTION, check_premise, check_premises, extract_premises,
    premise_notice,
};
use halo_agents::principle::{JudgePrinciple, attributed_statement};
use halo_agents::proof::{ForgetProof, ForgottenContent, from_hex, to_hex};
use halo_agents::sketch::QuantileSketch;
use halo_core::Error;
use halo_core::salience::SalienceScorer;
use halo_core::sliding_window::{SlidingWindow, WindowSize};
use pollster::block_on;
use proptest::prelude::*;

#[test]
fn retention_stages_follow_age() {
    let policy = RetentionPolicy::default();
    let days = [0, 29, 30, 364, 365, 729, 730, 100_000];
    let stages = days.map(|day| policy.stage_for_age(day * DAY_MILLIS));
    use RetentionStage::{Compost, Forgotten, Hot, Warm};
    assert_eq!(stages, [Hot, Hot, Warm, Warm, Compost, Compost, Forgotten, Forgotten]);
    assert_eq!(policy.stage_for_age(30 * DAY_MILLIS - 1), Hot, "the limit is exact to the millisecond");
    assert_eq!(policy.stage_for_age(-5 * DAY_MILLIS), Hot, "a clock that was set back causes no deletion");
    assert!(policy.is_ordered() && !RetentionPolicy { hot: 400, ..policy }.is_ordered());
    // Each item passes every stage once, in order.
    let mut items = vec![("a", 0, Hot), ("b", 10 * DAY_MILLIS, Hot), ("c", 700 * DAY_MILLIS, Hot)];
    let mut transitions = Vec::new();
    for day in 0..1500 {
        for (name, to) in policy.due_transitions(items.clone(), day * DAY_MILLIS) {
            transitions.push((day, name, to));
            items.iter_mut().filter(|t| t.0 == name).for_each(|t| t.2 = to);
        }
    }
    let expected = [
        (30, "a", Warm),
        (40, "b", Warm),
        (365, "a", Compost),
        (375, "b", Compost),
        (730, "a", Forgotten),
        (730, "c", Warm),
        (740, "b", Forgotten),
        (1065, "c", Compost),
        (1430, "c", Forgotten),
    ];
    assert_eq!(transitions, expected);
    for stage in [Hot, Warm, Compost, Forgotten] {
        assert_eq!(RetentionStage::from_name(stage.name()), Some(stage));
    }
}

#[test]
fn forget_proof_verifies_only_with_its_key() {
    let key = [7; 32];
    let content = ForgottenContent {
        subject: "main u4.0",
        requested_by: "the user's wish",
        text: "The gun is called Betsy.",
        tokens: 9,
    };
    let proof = ForgetProof::sign(&key, [1; 16], content, 1_700_000_000_000);
    assert!(proof.verify(&key) && !proof.verify(&[8; 32]));
    assert!(
        proof.matches_text("The gun is called Betsy.") && !proof.matches_text("The gun is called Bertha.")
    );
    assert_ne!(
        proof.content_hash,
        ForgetProof::sign(&key, [2; 16], content, 1_700_000_000_000).content_hash,
        "salted"
    );
    let forgeries = [
        ForgetProof { forgotten_at: proof.forgotten_at + 1, ..proof.clone() },
        ForgetProof { tokens: 8, ..proof.clone() },
        ForgetProof { subject: "main u4.1".into(), ..proof.clone() },
        ForgetProof { requested_by: "a policy".into(), ..proof.clone() },
        ForgetProof { content_hash: "00".repeat(32), ..proof.clone() },
        ForgetProof { salt: "00".repeat(16), ..proof.clone() },
        ForgetProof { signature: "00".repeat(32), ..proof.clone() },
        ForgetProof { signature: "not hexadecimal".into(), ..proof.clone() },
        // The same bytes, divided differently between two fields.
        ForgetProof { subject: "main u4.0t".into(), requested_by: "he user's wish".into(), ..proof.clone() },
    ];
    assert!(forgeries.iter().all(|forgery| !forgery.verify(&key)));
    assert!(!format!("{proof:?}").contains("Betsy"));
    assert_eq!(from_hex(&to_hex(&[0, 15, 255])), Some(vec![0, 15, 255]));
}

struct FixedRetention(usize);

impl ApplyRetention for FixedRetention {
    async fn apply_retention_policy(&mut self) -> Result<usize, Error> {
        Ok(std::mem::take(&mut self.0))
    }
}

struct ListedMemories(Vec<(ActiveMemory, bool)>);

impl ActiveMemories for ListedMemories {
    async fn list_active(&mut self) -> Result<Vec<ActiveMemory>, Error> {
        Ok(self.0.iter().filter(|(_, active)| *active).map(|(memory, _)| memory.clone()).collect())
    }

    async fn deactivate(&mut self, id: u64) -> Result<(), Error> {
        self.0.iter_mut().filter(|(memory, _)| memory.id == id).for_each(|(_, active)| *active = false);
        Ok(())
    }
}

#[test]
fn forgetting_cycle_prunes_window_and_deactivates_memories() {
    assert_eq!((PRESSURE_THRESHOLD, DEACTIVATION_SALIENCE), (0.8, 0.3));
    let mut scorer = SalienceScorer::default();
    scorer.register_entity("Rufus");
    let mut window = SlidingWindow::new(WindowSize { window: 20, sink: 2, recent: 4 }, Some(scorer.clone()));
    for n in 0..15 {
        window.push(format!("w{n}"), 1);
    }
    let memory = |id, text: &str| (ActiveMemory { id, text: text.into() }, true);
    // The oldest memory has a salience of 0.06; Rufus is a known entity; the last memory is recent.
    let mut memories = ListedMemories(vec![
        memory(1, "it rained"),
        memory(2, "Rufus is a fox"),
        memory(3, "bread was bought"),
    ]);
    let mut lethe = FixedRetention(5);
    let mut cycle = |window: &mut SlidingWindow| {
        let mut subject = WindowWithMemories { window, memories: &mut memories };
        block_on(coordinated_forgetting_cycle(&mut subject, &scorer, &mut lethe, PRESSURE_THRESHOLD))
    };
    let without_pressure = cycle(&mut window).expect("the cycle succeeds");
    assert_eq!(
        without_pressure,
        ForgettingResult { initial_pressure: 0.75, final_pressure: 0.75, actions: vec![] }
    );
    window.push("two more", 2);
    let under_pressure = cycle(&mut window).expect("the cycle succeeds");
    assert_eq!((under_pressure.initial_pressure, under_pressure.final_pressure), (0.85, 0.8));
    assert_eq!(
        under_pressure.actions,
        [
            ForgettingAction::WindowPrune(1),
            ForgettingAction::LetheCycle(5),
            ForgettingAction::MemoryDeactivate(1)
        ]
    );
    let names: Vec<&str> = under_pressure.actions.iter().map(|action| action.name()).collect();
    assert_eq!(names, ["window_prune", "lethe_cycle", "memory_deactivate"]);
    let counts = (under_pressure.pruned(), under_pressure.forgotten(), under_pressure.deactivated());
    assert_eq!(counts, (1, 5, vec![1]));
    assert!(under_pressure.has_run() && !without_pressure.has_run());
    window.push("x", 1);
    let second = cycle(&mut window).expect("the cycle succeeds");
    assert_eq!(
        second.actions,
        [
            ForgettingAction::WindowPrune(1),
            ForgettingAction::LetheCycle(0),
            ForgettingAction::MemoryDeactivate(2)
        ][..2]
    );
}

#[test]
fn premise_extraction_follows_question_form() {
    let cases = [
        ("Why did the server crash?", vec!["the server crash"]),
        ("why did the server crash", vec!["the server crash"]),
        ("How do I fix the leak?", vec!["there is a problem with the leak"]),
        ("What is the capital of Atlantis?", vec!["atlantis exists"]),
        ("Why is the door open?", vec!["the door is open"]),
        ("When did Anna leave Berlin?", vec!["anna leave berlin"]),
        ("When did I get married?", vec!["i get married"]),
        ("How long have I been married?", vec!["i been married"]),
        ("When was the bridge built?", vec!["the bridge was built"]),
        ("What is my sister's name?", vec!["my sister exists"]),
        ("My cat sleeps.", vec![]),
        ("Is it raining?", vec![]),
        ("When will the shop open?", vec![]),
        ("When does the shop open?", vec![]),
        ("Hello there.", vec![]),
        ("Why did ?", vec![]),
        ("Warum? Why did it rain? How do I fix it?", vec!["it rain", "there is a problem with it"]),
    ];
    for (question, expected) in cases {
        assert_eq!(extract_premises(question), expected, "{question}");
    }
}

#[test]
fn contradiction_is_found_by_words() {
    use ContradictionReason::{DifferentValue, Fictional, Negated, Opposite};
    let cases = [
        ("the server crash", "The server did not crash; it was restarted.", Some(Negated)),
        ("the server crash", "The server has never crashed.", Some(Negated)),
        ("the server crash", "The server crashed at noon.", None),
        ("the server did not crash", "The server crashed at noon.", Some(Negated)),
        ("the server crash", "The cat did not eat.", None),
        ("the server crash", "Did the server not crash?", None),
        ("atlantis exists", "Atlantis is a myth.", Some(Fictional)),
        ("atlantis exists", "Atlantis doesn't exist.", Some(Negated)),
        ("atlantis exists", "Atlantis is not a myth.", None),
        ("atlantis exists", "Berlin is a city.", None),
        ("the door is open", "The door is closed.", Some(Opposite)),
        ("the cat is alive", "The cat is dead.", Some(Opposite)),
        ("the cat is alive", "The dog is dead.", None),
        ("the meeting is tuesday", "The meeting is friday.", Some(DifferentValue)),
        ("the bell rang before noon", "The bell rang after noon.", Some(Opposite)),
        ("the shop is online", "The shop is offline.", Some(Opposite)),
        ("i get married", "I never got married.", Some(Negated)),
        ("i get married", "I'm not married.", Some(Negated)),
        ("i been married", "I have been single.", Some(Opposite)),
        ("i get married", "Anna is single.", None),
        ("i get married", "We got married in May.", None),
        ("i buy the blue car", "You never bought the blue car.", Some(Negated)),
        ("my cat die", "My cat has not died.", Some(Negated)),
        ("my sister exists", "I have no sister.", Some(Negated)),
        ("my sister exists", "I don't have any sisters.", Some(Negated)),
        ("my sister exists", "My sister does not like tea.", None),
        ("my sister exists", "My sister is called Ida.", None),
        ("i get married", "The married couple next door did not like the noise.", None),
        // Everyday sentences that contradict nothing.
        ("you know", "I don't know.", None),
        ("my keys exists", "I don't have my keys.", None),
        ("my job exists", "That's not my job.", None),
        ("i take the pills before or after meals", "Take the pills before meals.", None),
        ("", "The server did not crash.", None),
    ];
    for (premise, fact, expected) in cases {
        assert_eq!(
            find_contradiction(premise, fact.split(';').next().unwrap_or(fact)),
            expected,
            "{premise} / {fact}"
        );
    }
}

#[test]
fn premise_check_reports_false_premise() {
    let facts = |facts: &[&str]| facts.iter().map(|fact| (*fact).to_owned()).collect::<Vec<_>>();
    let check = |question: &str, known_facts: &[&str]| {
        block_on(check_premise(question, &facts(known_facts), &RuleContradictionDetector, &RuleJudge))
            .expect("the premise check succeeds")
    };
    assert_eq!(check("Why did the server crash?", &[]), PremiseResult::valid(), "no facts");
    assert!(check("Why did the server crash?", &["The server crashed at noon."]).valid);
    let mu = check("What is the capital of Atlantis?", &["We spoke of Greece. Atlantis is a myth."]);
    assert_eq!((mu.valid, mu.invalid_premise.as_deref()), (false, Some("atlantis exists")));
    assert_eq!(mu.suggestion.as_deref(), Some("Please verify the premise of your question."));
    assert_eq!(mu.suggestion.as_deref(), Some(SUGGESTION));
    assert!(mu.reason.is_some_and(|reason| reason.contains("Atlantis is a myth.")));
    assert_eq!(mu.principle, Some(JudgePrinciple::Accuracy));
    assert!(
        check("Why is the meeting tuesday?", &["The meeting is friday."]).valid,
        "a different value may be an update"
    );
}

/// Each principle has its own rule, and the verdict names the one that rejected the premise.
#[test]
fn judge_rejects_by_named_principle() {
    use JudgePrinciple::{Accuracy, Consistency, Honesty};
    type PrincipleCase<'a> = (&'a str, &'a str, &'a [JudgePrinciple], Option<JudgePrinciple>);
    let cases: &[PrincipleCase<'_>] = &[
        ("the server crash", "The server did not crash.", &[Accuracy, Honesty], Some(Accuracy)),
        ("the server crash", "The server did not crash.", &[Honesty], None),
        ("the meeting is tuesday", "The meeting is friday.", &[Accuracy, Honesty], None),
        ("the meeting is tuesday", "The meeting is friday.", &[Accuracy, Consistency], Some(Consistency)),
        ("you say the meeting is tuesday", "The meeting is friday.", &[Accuracy, Honesty], Some(Honesty)),
        ("you say the meeting is tuesday", "The meeting is friday.", &[Accuracy], None),
        ("i told you that the door is open", "The door is closed.", &[Honesty], Some(Honesty)),
        ("the door is open", "The door is closed.", &[Consistency, Accuracy], Some(Consistency)),
        ("the door is open", "The door is closed.", &[], None),
        ("it rains", "It rains in Rome.", &JudgePrinciple::ALL, None),
    ];
    for (premise, fact, principles, expected) in cases {
        let result = block_on(check_premises(
            vec![(*premise).to_owned()],
            &[(*fact).to_owned()],
            principles,
            &RuleContradictionDetector,
            &RuleJudge,
        ));
        let result = result.expect("the premise check succeeds");
        assert_eq!((result.principle, result.valid), (*expected, expected.is_none()), "{premise} / {fact}");
    }
    assert_eq!(attributed_statement("You promised me that the boat is new"), Some("the boat is new"));
    assert_eq!(attributed_statement("the saying is old"), None);
    assert_eq!(attributed_statement("you walk home"), None);
    for principle in JudgePrinciple::ALL {
        assert_eq!(JudgePrinciple::from_name(principle.name()), Some(principle));
        assert!(principle.question().contains(principle.name()));
    }
    assert_eq!(JudgePrinciple::from_name("beauty"), None);
    let notice = premise_notice("i like tea", "it was said: “No.”", Some(Accuracy), SUGGESTION);
    assert!(notice.contains("“I like tea”. But it was said: “No.”, judged by accuracy. Please"), "{notice}");
}

#[test]
fn premise_check_accepts_model_judges() {
    let yes_if = |part: &'static str| {
        agent_fn(move |prompt: String| async move {
            Ok(if prompt.contains(part) { "Yes, it does.".to_owned() } else { "no".to_owned() })
        })
        .boxed()
    };
    let facts = ["Tea is served.".to_owned(), "It snowed.".to_owned()];
    let (contradict, judge) =
        (ModelContradictionDetector(yes_if("It snowed")), ModelJudge(yes_if("Judged by honesty")));
    let mu =
        block_on(check_premise("Why did it rain?", &facts, &contradict, &judge)).expect("the agents answer");
    assert_eq!(mu.reason.as_deref(), Some("it was said: “It snowed.”"));
    assert_eq!(mu.principle, Some(JudgePrinciple::Honesty), "accuracy was asked first and accepted");
    let lenient = ModelJudge(yes_if("nothing of the kind"));
    let valid = block_on(check_premise("Why did it rain?", &facts, &contradict, &lenient))
        .expect("the agents answer");
    assert!(valid.valid, "the judge accepts the premise");
    let lists =
        agent_fn(|_: String| async { Ok("1. it was wet\n- It Rain\n\n* there were clouds".to_owned()) });
    let premises = block_on(ModelPremiseExtractor(lists.boxed()).invoke("Why did it rain?".into()))
        .expect("the agents answer");
    assert_eq!(premises, ["it rain", "it was wet", "there were clouds"]);
    let claim = PremiseClaim { premise: "tea".into(), facts: vec![] };
    assert_eq!(block_on(contradict.invoke(claim)), Ok(None));
}

proptest! {
    /// Quantiles are within one percent, a merged sketch equals a sketch of all numbers, and a sketch can be read from its
    /// text form.
    #[test]
    fn sketch_keeps_counts_and_quantiles(numbers in prop::collection::vec(0.5f64..1e6, 1..300), share in 0.0f64..=1.0) {
        let sketch = |numbers: &[f64]| numbers.iter().fold(QuantileSketch::default(), |mut s, &n| { s.add(n); s });
        let all = sketch(&numbers);
        let mut sorted = numbers.clone();
        sorted.sort_by(f64::total_cmp);
        let exact = sorted[(share * (sorted.len() - 1) as f64).floor() as usize];
        let quantile = all.quantile(share).expect("the sketch has numbers");
        prop_assert!((quantile / exact - 1.0).abs() <= 0.0101, "{quantile} for {exact}");
        let (a, b) = numbers.split_at(numbers.len() / 3);
        let mut merged = sketch(a);
        merged.merge(&sketch(b));
        prop_assert_eq!((merged.count(), merged.quantile(share)), (all.count(), all.quantile(share)));
        prop_assert_eq!(QuantileSketch::parse(&all.to_line()), Some(all));
    }

    /// No text panics, and no sentence negates itself.
    #[test]
    fn contradiction_fuzz_accepts_any_text(premise in "\\PC{0,80}", fact in "\\PC{0,80}") {
        let _ = find_contradiction(&premise, &fact);
        let _ = extract_premises(&premise);
        let _ = QuantileSketch::parse(&premise);
        prop_assert_eq!(find_contradiction(&premise, &premise).filter(|reason| *reason == ContradictionReason::Negated), None);
    }
}

#[test]
fn compost_stats_merge() {
    let mut stats = CompostStats::default();
    let mut other =
        CompostStats { user_messages: 2, assistant_messages: 1, tokens: 90, ..CompostStats::default() };
    (0..3).for_each(|n| other.lengths.add(f64::from(n) * 30.0));
    stats.merge(&other);
    stats.merge(&other);
    assert_eq!(
        (stats.user_messages, stats.assistant_messages, stats.tokens, stats.lengths.count()),
        (4, 2, 180, 6)
    );
    assert_eq!(stats.lengths.quantile(0.0), Some(0.0));
    assert!((stats.lengths.mean().unwrap_or_default() - 30.0).abs() < 1e-9);
}
