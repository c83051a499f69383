//! The real model behind the seam: it speaks, stops, keeps to a form, and remembers.

mod common;

use common::file;
use halo_core::attention::{Layers, PromptRows, Watch};
use halo_core::seams::{Finish, Flow, Form, Model, ModelStep, Prompt, Sampling, Seen, Template, Upkeep};
use halo_core::token::Position;
use halo_llama::graveyard::Room;
use halo_llama::mirror::Mode;
use halo_llama::model::{Llama, Options};
use std::path::Path;

fn open(room: Room, mode: Mode) -> Llama {
    let options = Options { context: Some(1024), room, mode, ..Options::default() };
    Llama::open(&file(), &options).expect("it loads")
}

fn memory() -> Room {
    Room { ram: 1 << 30, disk: 0, folder: None }
}

fn greedy(max_tokens: usize) -> Sampling {
    Sampling { max_tokens, temperature: 0.0, ..Sampling::default() }
}

/// A window of texts, one chunk each.
fn window(model: &mut Llama, texts: &[&str]) -> Vec<Seen> {
    let mut window = Vec::new();
    for text in texts {
        for (n, piece) in model.tokenize(text, true).expect("tokens").into_iter().enumerate() {
            let position = Some(Position(window.len() as u64));
            window.push(Seen { position, behind: 0, id: piece.id, begins: n == 0 });
        }
    }
    window
}

const QUESTION: [&str; 3] = [
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
    "<|im_start|>user\nWhich city is the capital of France? Answer in one sentence.<|im_end|>\n",
    "<|im_start|>assistant\n",
];

#[derive(Debug, Default, PartialEq)]
struct Heard {
    text: String,
    texts: Vec<String>,
    ids: Vec<u32>,
    rows: Vec<Option<usize>>,
    prompt_rows: usize,
    upkeep: Option<Upkeep>,
    readings: usize,
}

/// Asks, and stops after so many steps of any kind.
fn ask(
    model: &mut Llama,
    window: &[Seen],
    sampling: &Sampling,
    watch: &Watch,
    aside: bool,
    stop_after: usize,
) -> (Result<Finish, String>, Heard) {
    let next = Position(window.len() as u64 + 100);
    let prompt = Prompt { conversation: "main", window, messages: &Vec::new, next, aside };
    let (mut heard, mut steps) = (Heard::default(), 0);
    let end = model.generate(&prompt, sampling, watch, &mut |step| {
        match step {
            ModelStep::Reading { .. } => heard.readings += 1,
            ModelStep::Ready(upkeep) => heard.upkeep = Some(upkeep),
            ModelStep::Prompt(look) => {
                assert!((look.mean.iter().sum::<f32>() - 1.0).abs() < 1e-5);
                heard.prompt_rows += 1;
            }
            ModelStep::Token(piece, look) => {
                if let Some(look) = look
                    && watch.layers != Layers::Max
                {
                    let sum: f32 = look.mean.iter().sum();
                    assert!((sum - 1.0).abs() < 1e-5, "{sum}");
                    assert!(look.max.iter().zip(look.mean).all(|(max, mean)| max >= mean));
                }
                heard.rows.push(look.map(|l| l.mean.len()));
                heard.text.push_str(&piece.text);
                heard.texts.push(piece.text.clone());
                heard.ids.push(piece.id.0);
            }
        }
        steps += 1;
        if steps >= stop_after { Flow::Stop } else { Flow::Continue }
    });
    (end.map_err(|e| e.to_string()), heard)
}

const NEVER: usize = usize::MAX;

#[test]
fn it_answers_the_same_every_time() {
    let mut model = open(memory(), Mode::Keep);
    assert_eq!(model.info().template, Template::chatml());
    assert_eq!((model.info().context, model.info().attention, model.rereads()), (1024, true, None));
    let question = window(&mut model, &QUESTION);
    let (end, first) = ask(&mut model, &question, &greedy(24), &Watch::default(), false, NEVER);
    assert_eq!(end, Ok(Finish::End));
    assert!(first.text.contains("Paris"), "{}", first.text);
    assert_eq!(first.upkeep.map(|u| u.read), Some(question.len()));
    let lengths: Vec<Option<usize>> = (0..first.ids.len()).map(|n| Some(question.len() + n)).collect();
    assert_eq!(first.rows, lengths, "each row covers what was there before its token");
    // Watched or not, it says the same; and nothing has to be read but the last token.
    let (_, again) = ask(&mut model, &question, &greedy(24), &Watch::nothing(), false, NEVER);
    assert_eq!(
        (&again.text, again.upkeep.map(|u| (u.kept, u.read))),
        (&first.text, Some((question.len() - 1, 1)))
    );
    assert!(again.rows.iter().all(Option::is_none));
    // Lots that are drawn: the same seed, the same answer; another seed, another.
    let drawn = |seed| Sampling { seed, temperature: 1.5, top_p: 1.0, top_k: 0, ..greedy(24) };
    let mut say = |seed| ask(&mut model, &question, &drawn(seed), &Watch::nothing(), false, NEVER).1.text;
    let (one, two, other) = (say(7), say(7), say(8));
    assert_eq!(one, two);
    assert_ne!(one, other);
    // The likeliest alone is left: as good as greedy.
    for narrow in [
        Sampling { top_k: 1, ..drawn(3) },
        Sampling { top_p: 0.0, ..drawn(3) },
        Sampling { min_p: 1.0, ..drawn(3) },
    ] {
        let (_, heard) = ask(&mut model, &question, &narrow, &Watch::nothing(), false, NEVER);
        assert_eq!(heard.text, again.text, "{narrow:?}");
    }
    // What repeats itself is made to stop.
    let loops = window(&mut model, &["la la la la la la la la la la la la la la la la la"]);
    let (_, sings) = ask(&mut model, &loops, &greedy(8), &Watch::nothing(), false, NEVER);
    let bored = Sampling { repetition: 10.0, ..greedy(8) };
    let (_, stops) = ask(&mut model, &loops, &bored, &Watch::nothing(), false, NEVER);
    let repeats = |heard: &Heard| heard.ids.iter().enumerate().any(|(n, id)| heard.ids[..n].contains(id));
    assert!(repeats(&sings) && !repeats(&stops), "{} / {}", sings.text, stops.text);
}

#[test]
fn attention_comes_as_it_is_asked_for() {
    let mut model = open(memory(), Mode::Keep);
    let long = "It rained from morning on, and nobody came. ".repeat(40);
    let question = window(&mut model, &[QUESTION[0], &long, QUESTION[2]]);
    assert!(question.len() > 256);
    let mut count = |prompt: PromptRows, conversation_is_new: bool| {
        if conversation_is_new {
            model.forget("main").expect("forgotten");
        }
        let watch = Watch { prompt, max: true, ..Watch::default() };
        let (_, heard) = ask(&mut model, &question, &greedy(2), &watch, false, NEVER);
        (heard.prompt_rows, heard.rows, heard.readings)
    };
    let (batches, n) = ((question.len() - 1).div_ceil(256), question.len());
    // The row of the last token comes with the token that it made.
    assert_eq!(count(PromptRows::Last, true), (batches - 1, vec![Some(n), Some(n + 1)], batches + 1));
    assert_eq!(count(PromptRows::All, true), (n - 1, vec![Some(n), Some(n + 1)], batches + 1));
    assert_eq!(count(PromptRows::Off, true), (0, vec![None, Some(n + 1)], batches + 1));
    assert_eq!(count(PromptRows::All, false), (0, vec![Some(n), Some(n + 1)], 1));
    let prompt = Prompt {
        conversation: "main",
        window: &question,
        messages: &Vec::new,
        next: Position(999),
        aside: false,
    };
    let watch = Watch { full: true, ..Watch::default() };
    let mut shapes = Vec::new();
    let end = model.generate(&prompt, &greedy(3), &watch, &mut |step| {
        if let ModelStep::Token(_, Some(look)) = step {
            // Thirty layers of nine heads, of which the row is the mean.
            assert_eq!(look.full.len(), 30 * 9 * look.mean.len());
            let mean =
                |slot: usize| look.full.iter().skip(slot).step_by(look.mean.len()).sum::<f32>() / 270.0;
            for slot in [0, 1, look.mean.len() / 2, look.mean.len() - 1] {
                assert!((mean(slot) - look.mean[slot]).abs() < 1e-6);
            }
            shapes.push(look.mean.len());
        }
        Flow::Continue
    });
    assert_eq!((end, shapes), (Ok(Finish::Length), vec![n, n + 1, n + 2]));
}

#[test]
fn it_stops_when_it_is_to() {
    let mut model = open(memory(), Mode::Keep);
    let question = window(&mut model, &QUESTION);
    let (end, whole) = ask(&mut model, &question, &greedy(24), &Watch::nothing(), false, NEVER);
    assert_eq!(end, Ok(Finish::End));
    // At its length; behind a stop sequence, which is told; at any token.
    let (end, short) = ask(&mut model, &question, &greedy(3), &Watch::nothing(), false, NEVER);
    assert_eq!((end, short.ids.len()), (Ok(Finish::Length), 3));
    let stop = Sampling { stop: vec!["capital of".into(), "never".into()], ..greedy(24) };
    let (end, stopped) = ask(&mut model, &question, &stop, &Watch::nothing(), false, NEVER);
    assert_eq!(end, Ok(Finish::Stop));
    assert!(
        stopped.text.ends_with("capital of") && whole.text.starts_with(&stopped.text),
        "{}",
        stopped.text
    );
    for steps in 1..5 {
        let (end, cut) = ask(&mut model, &question, &greedy(24), &Watch::default(), false, steps);
        assert_eq!((end, whole.text.starts_with(&cut.text)), (Ok(Finish::Aborted), true));
        assert_eq!(
            cut.ids.len(),
            steps.saturating_sub(2),
            "nothing is told after the listener has heard enough"
        );
    }
    // While it reads: a long text is given up in the middle, and the next answer is as good as ever.
    let long = window(&mut model, &["All work and no play makes Jack a dull boy. "; 80]);
    let (end, heard) = ask(&mut model, &long, &greedy(24), &Watch::default(), false, 2);
    assert_eq!((end, heard.ids.len()), (Ok(Finish::Aborted), 0));
    let (end, again) = ask(&mut model, &question, &greedy(24), &Watch::default(), false, NEVER);
    assert_eq!((end, again.text), (Ok(Finish::End), whole.text));
    // What does not fit is refused, and loses nothing.
    let much = window(&mut model, &["word ".repeat(1100).as_str()]);
    let (end, _) = ask(&mut model, &much, &greedy(1), &Watch::default(), false, NEVER);
    assert!(
        end.as_ref().is_err_and(|why| why.contains("no room for an answer") && why.contains("1024")),
        "{end:?}"
    );
    let mut jumbled = question.clone();
    jumbled.swap(3, 4);
    let (end, _) = ask(&mut model, &jumbled, &greedy(1), &Watch::default(), false, NEVER);
    assert!(end.is_err_and(|why| why.contains("not in order")));
}

#[test]
fn characters_arrive_whole() {
    let mut model = open(memory(), Mode::Keep);
    let emoji = "🌱🎉👩‍👩‍👧谢谢";
    let pieces = model.tokenize(emoji, false).expect("tokens");
    assert_eq!(pieces.iter().map(|p| p.text.as_str()).collect::<String>(), emoji);
    assert!(pieces.len() > emoji.chars().count(), "a character of several tokens");
    let song = window(&mut model, &["🌱🎉🌱🎉🌱🎉🌱🎉🌱🎉🌱🎉🌱"]);
    let (_, heard) = ask(&mut model, &song, &greedy(16), &Watch::nothing(), false, NEVER);
    assert!(
        heard.text.chars().any(|c| c > '\u{1f000}') && !heard.text.contains('\u{fffd}'),
        "{}",
        heard.text
    );
    assert!(
        heard.texts.iter().any(String::is_empty),
        "a token that completes nothing has no text: {:?}",
        heard.texts
    );
    assert_eq!(heard.ids.len(), 16, "but every one is told");
    let special = model.tokenize("<|im_end|>", true).expect("tokens");
    let plain = model.tokenize("<|im_end|>", false).expect("tokens");
    assert_eq!((special.len(), special[0].text.as_str()), (1, "<|im_end|>"));
    assert!(plain.len() > 1);
}

#[test]
fn answers_keep_to_a_form() {
    let mut model = open(memory(), Mode::Keep);
    let question =
        window(&mut model, &[QUESTION[0], "<|im_start|>user\nTell me of a city.<|im_end|>\n", QUESTION[2]]);
    let schema = r#"{"type":"object","properties":{"name":{"type":"string","maxLength":12},"people":{"type":"integer"},
        "kind":{"enum":["town","city"]}},"required":["name","people","kind"],"additionalProperties":false}"#;
    for temperature in [0.0, 1.0] {
        let sampling = Sampling { temperature, form: Some(Form::Schema(schema.into())), ..greedy(120) };
        let (end, heard) = ask(&mut model, &question, &sampling, &Watch::nothing(), false, NEVER);
        assert_eq!(end, Ok(Finish::End), "{}", heard.text);
        assert!(
            heard.text.starts_with("{\"name\":") && heard.text.ends_with("\"}"),
            "no blanks: {}",
            heard.text
        );
        let value: serde_json::Value = serde_json::from_str(&heard.text).expect("JSON");
        assert!(
            value["name"].is_string() && value["people"].is_i64() && value["kind"].is_string(),
            "{value}"
        );
    }
    // A grammar of somebody's own: nothing else can be said.
    let grammar = "start: \"cities[1]{name,people}:\\n  \" NAME \",\" PEOPLE\nNAME: /\"[A-Z][a-z]{2,8}\"/\nPEOPLE: /[1-9][0-9]{0,5}/\n";
    let sampling = Sampling { form: Some(Form::Grammar(grammar.into())), ..greedy(60) };
    let (end, heard) = ask(&mut model, &question, &sampling, &Watch::nothing(), false, NEVER);
    assert!(
        end == Ok(Finish::End) && heard.text.starts_with("cities[1]{name,people}:\n  \""),
        "{}",
        heard.text
    );
    let sampling = Sampling { form: Some(Form::Grammar("no grammar".into())), ..greedy(9) };
    let (end, _) = ask(&mut model, &question, &sampling, &Watch::nothing(), false, NEVER);
    assert!(end.is_err_and(|why| why.contains("keeping to the schema")));
    for (bad, why) in [("{", "no JSON"), (r#"{"type":"unheard of"}"#, "")] {
        let sampling = Sampling { form: Some(Form::Schema(bad.into())), ..greedy(9) };
        let (end, _) = ask(&mut model, &question, &sampling, &Watch::nothing(), false, NEVER);
        assert!(
            end.as_ref().is_err_and(|e| e.contains("keeping to the schema") && e.contains(why)),
            "{end:?}"
        );
    }
}

#[test]
fn what_is_said_aside_is_forgotten() {
    let mut model = open(memory(), Mode::Keep);
    let question = window(&mut model, &QUESTION);
    let (_, expected) = ask(&mut model, &question, &greedy(24), &Watch::default(), false, NEVER);
    let mut with_aside = open(memory(), Mode::Keep);
    let (end, _) =
        ask(&mut with_aside, &question[..question.len() - 4], &greedy(1), &Watch::default(), false, NEVER);
    assert_eq!(end, Ok(Finish::Length));
    let aside = [question.clone(), window(&mut model, &["Not a word of"])].concat();
    let aside: Vec<Seen> = aside
        .into_iter()
        .enumerate()
        .map(|(n, s)| Seen { position: Some(Position(n as u64)), ..s })
        .collect();
    let (end, heard) = ask(&mut with_aside, &aside, &greedy(5), &Watch::default(), true, NEVER);
    assert!(
        matches!(end, Ok(Finish::Length | Finish::End)) && heard.rows[0] == Some(aside.len()),
        "{heard:?}"
    );
    let (_, after) = ask(&mut with_aside, &question, &greedy(24), &Watch::default(), false, NEVER);
    assert_eq!(after.text, expected.text);
    assert_eq!(after.upkeep.map(|u| u.read), Some(4), "what was said aside is not there");
}

fn in_folder(folder: &Path) -> Room {
    Room { ram: 1 << 20, disk: 1 << 30, folder: Some(folder.to_owned()) }
}

/// The program ends and starts again: nothing is read twice, and the answer is the same to the last row.
#[test]
fn it_remembers_after_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut model = open(in_folder(folder.path()), Mode::Keep);
    let mut texts = vec![QUESTION[0]];
    texts.extend(
        ["<|im_start|>user\nIt rained from morning on, and the guests came late and wet.<|im_end|>\n"; 6],
    );
    let past = window(&mut model, &texts);
    let next = [&texts[..], &QUESTION[1..]].concat();
    let question = window(&mut model, &next);
    let (_, _) = ask(&mut model, &past, &greedy(1), &Watch::nothing(), false, NEVER);
    model.settle("main", &past).expect("settled");
    let (_, expected) = ask(&mut model, &question, &greedy(12), &Watch::default(), false, NEVER);
    drop(model);
    let mut model = open(in_folder(folder.path()), Mode::Keep);
    let (_, heard) = ask(&mut model, &question, &greedy(12), &Watch::default(), false, NEVER);
    assert_eq!((&heard.text, heard.upkeep.map(|u| u.reread)), (&expected.text, Some(0)));
    assert!(heard.upkeep.is_some_and(|u| u.returned >= past.len()), "{:?}", heard.upkeep);
    // Killed without a word: what was settled is there.
    model.settle("main", &question).expect("settled");
    model.flush().expect("written");
    std::mem::forget(model);
    let mut model = open(in_folder(folder.path()), Mode::Keep);
    let (_, heard) = ask(&mut model, &question, &greedy(12), &Watch::default(), false, NEVER);
    assert_eq!(
        (heard.text, heard.upkeep.map(|u| (u.returned, u.read))),
        (expected.text, Some((question.len() - 1, 1)))
    );
    // Forgotten is forgotten.
    model.forget("main").expect("forgotten");
    model.flush().expect("written");
    let files = |folder: &Path| {
        let mut folders = vec![folder.to_owned()];
        let mut files = 0;
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
                if entry.path().is_dir() { folders.push(entry.path()) } else { files += 1 }
            }
        }
        files
    };
    let left = files(folder.path());
    let (_, heard) = ask(&mut model, &question, &greedy(1), &Watch::default(), false, NEVER);
    assert_eq!((heard.upkeep.map(|u| u.read), left), (Some(question.len()), 0));
}

const VARIABLE: &str = "HALO_TEST_FOLDER";

/// A long past, and the question after it.
fn past_and_question(model: &mut Llama) -> (Vec<Seen>, Vec<Seen>) {
    let mut texts = vec![QUESTION[0]];
    texts.extend(["<|im_start|>user\nIt rained, and the guests came late and wet.<|im_end|>\n"; 5]);
    let past = window(model, &texts);
    (past, window(model, &[&texts[..], &QUESTION[1..]].concat()))
}

/// What the process does that is killed.
#[test]
fn live_and_be_killed() {
    let Some(folder) = std::env::var_os(VARIABLE) else { return };
    let mut model = open(in_folder(Path::new(&folder)), Mode::Keep);
    let (past, _) = past_and_question(&mut model);
    let (end, _) = ask(&mut model, &past, &greedy(1), &Watch::nothing(), false, NEVER);
    assert!(end.is_ok());
    model.settle("main", &past).expect("settled");
    model.flush().expect("written");
    // It ends here, with nothing tidied up.
    std::process::abort();
}

/// One process lives the past and is killed, another is asked: every row of its attention is what it would have been.
#[test]
fn another_process_goes_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let this = std::env::current_exe().expect("this test");
    let mut child = std::process::Command::new(this);
    child.args(["--exact", "live_and_be_killed"]).env(VARIABLE, folder.path());
    let child = child.output().expect("it starts");
    assert!(!child.status.success(), "it was killed");
    let rows = |model: &mut Llama, question: &[Seen]| {
        let prompt = Prompt {
            conversation: "main",
            window: question,
            messages: &Vec::new,
            next: Position(9999),
            aside: false,
        };
        let (mut rows, mut upkeep) = (Vec::new(), Upkeep::default());
        let end = model.generate(&prompt, &greedy(8), &Watch::default(), &mut |step| {
            match step {
                ModelStep::Token(piece, Some(look)) => rows.push((piece.id, look.mean.to_vec())),
                ModelStep::Ready(done) => upkeep = done,
                _ => {}
            }
            Flow::Continue
        });
        assert!(end.is_ok() && rows.len() > 2);
        (rows, upkeep)
    };
    let mut model = open(memory(), Mode::Keep);
    let (past, question) = past_and_question(&mut model);
    ask(&mut model, &past, &greedy(1), &Watch::nothing(), false, NEVER).0.expect("read");
    let (expected, _) = rows(&mut model, &question);
    let mut other = open(in_folder(folder.path()), Mode::Keep);
    let (got, upkeep) = rows(&mut other, &question);
    assert_eq!((upkeep.returned, upkeep.reread), (past.len(), 0), "nothing of the past is read again");
    assert!(expected == got, "to the last bit");
}

/// Read again instead: the same answers, the old way.
#[test]
fn rereading_answers_the_same() {
    let mut keeps = open(memory(), Mode::Keep);
    let mut rereads = open(Room::none(), Mode::Reread);
    let question = window(&mut keeps, &QUESTION);
    let (_, one) = ask(&mut keeps, &question, &greedy(24), &Watch::default(), false, NEVER);
    let (_, two) = ask(&mut rereads, &question, &greedy(24), &Watch::default(), false, NEVER);
    assert_eq!((one.text, one.rows), (two.text, two.rows));
}

/// Many ask at once; each gets an answer, and cutting text into tokens does not wait for any.
#[test]
fn many_ask_at_once() {
    let mut model = open(memory(), Mode::Keep);
    let question = window(&mut model, &QUESTION);
    let (_, expected) = ask(&mut model, &question, &greedy(24), &Watch::default(), false, NEVER);
    std::thread::scope(|scope| {
        let askers: Vec<_> = (0..3)
            .map(|_| {
                let (mut model, question) = (model.clone(), question.clone());
                scope.spawn(move || {
                    ask(&mut model, &question, &greedy(24), &Watch::default(), false, NEVER).1.text
                })
            })
            .collect();
        // One that goes away in the middle does not harm the others.
        let (mut rude, question) = (model.clone(), question.clone());
        let gone = scope.spawn(move || ask(&mut rude, &question, &greedy(24), &Watch::default(), false, 3).0);
        assert!(model.clone().tokenize("meanwhile", false).is_ok());
        for asker in askers {
            assert_eq!(asker.join().expect("no panic"), expected.text);
        }
        assert_eq!(gone.join().expect("no panic"), Ok(Finish::Aborted));
    });
}
