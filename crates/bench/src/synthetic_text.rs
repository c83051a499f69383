//! Text of any length that is the same on every machine: sentences that are neither certain nor random to a model.

/// So many paragraphs of about a hundred tokens.
#[must_use]
pub fn paragraphs(count: usize) -> Vec<String> {
    let mut dice = 0x5eed_u64;
    let mut pick = |from: &[&str]| -> String {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        from[(dice >> 33) as usize % from.len()].to_owned()
    };
    let mut sentence = || {
        let (who, did, what) = (pick(&SUBJECTS), pick(&VERBS), pick(&OBJECTS));
        let (place, time) = (pick(&PLACES), pick(&TIMES));
        format!("{time} {who} {did} {what} {place}.")
    };
    (0..count).map(|_| (0..6).map(|_| sentence()).collect::<Vec<_>>().join(" ") + "\n\n").collect()
}

/// An endless sequence of messages and answers that name things, and sometimes ask for a name.
pub fn fact_messages() -> impl Iterator<Item = (String, String)> {
    let mut dice = crate::random_changes::BenchRng(0xD411);
    (1..).flat_map(move |house| {
        let thing = ANIMALS[dice.below(ANIMALS.len() as u64) as usize];
        let name = ANIMAL_NAMES[dice.below(ANIMAL_NAMES.len() as u64) as usize];
        let what = format!("the {thing} in house {house}");
        let statement =
            (format!("T{} is called {name}.", &what[1..]), format!("Noted: {what} is called {name}."));
        let question = (format!("What is {what} called?"), format!("T{} is called {name}.", &what[1..]));
        std::iter::once(statement).chain((house % 2 == 0).then_some(question))
    })
}

const ANIMALS: [&str; 10] =
    ["cat", "goat", "donkey", "canary", "tortoise", "rabbit", "cow", "pony", "goose", "hamster"];
const ANIMAL_NAMES: [&str; 16] = [
    "Mimi", "Rosa", "Oscar", "Felix", "Luna", "Hugo", "Bella", "Max", "Nora", "Otto", "Ida", "Paul", "Greta",
    "Emil", "Clara", "Anton",
];

/// So many texts of so many words.
#[must_use]
pub fn passages(words: usize, count: usize) -> Vec<String> {
    let text = paragraphs(words * count / 50 + 1).concat();
    let all: Vec<&str> = text.split_whitespace().collect();
    all.chunks_exact(words).take(count).map(|words| words.join(" ")).collect()
}

const SUBJECTS: [&str; 12] = [
    "the brother",
    "an old sailor",
    "my neighbour Anna",
    "the mayor",
    "a stranger in a grey coat",
    "the youngest of the three sisters",
    "Doctor Weiss",
    "the man from the post office",
    "our teacher",
    "a child with red shoes",
    "the cook",
    "somebody whom nobody knew",
];
const VERBS: [&str; 10] = [
    "looked for",
    "forgot",
    "sold",
    "hid",
    "found",
    "described",
    "asked about",
    "broke",
    "carried away",
    "painted",
];
const OBJECTS: [&str; 12] = [
    "the key to the cellar",
    "seven letters",
    "the gun above the fireplace",
    "a map of the harbour",
    "the blue bicycle",
    "thirty-two silver spoons",
    "the will",
    "a photograph of the war",
    "the clock that had stopped at ten past four",
    "the recipe for plum cake",
    "the dog's collar",
    "an unpaid bill",
];
const PLACES: [&str; 10] = [
    "behind the church",
    "in the kitchen of the old house",
    "on the bridge",
    "under the stairs",
    "at the railway station",
    "in front of all the guests",
    "near the lighthouse",
    "in the garden",
    "on the second floor",
    "by the sea",
];
const TIMES: [&str; 8] = [
    "In the morning",
    "Long before the wedding",
    "When the rain had ended,",
    "On the last day of May",
    "Without a word,",
    "Years later",
    "That same evening",
    "While the others slept,",
];
