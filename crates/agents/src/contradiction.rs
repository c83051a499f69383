//! Contradictions between two sentences, by their words: negation, antonyms, and two values of one subject.

use std::collections::BTreeSet;

/// Why two sentences contradict each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContradictionReason {
    /// One negates the other.
    Negated,
    /// They use antonyms.
    Opposite,
    /// One presupposes what the other calls fictional.
    Fictional,
    /// They give one subject two values.
    DifferentValue,
}

impl ContradictionReason {
    /// The reason in words.
    #[must_use]
    pub fn description(self) -> &'static str {
        match self {
            ContradictionReason::Negated => "one denies what the other says",
            ContradictionReason::Opposite => "one says the opposite of the other",
            ContradictionReason::Fictional => "it is made up",
            ContradictionReason::DifferentValue => "the same thing has another value",
        }
    }
}

/// Compares two sentences by their words.
#[must_use]
pub fn find_contradiction(premise: &str, fact: &str) -> Option<ContradictionReason> {
    let (claim, known_fact) = (SentenceTerms::parse(premise), SentenceTerms::parse(fact));
    if claim.stems.is_empty() || known_fact.stems.is_empty() || fact.trim_end().ends_with('?') {
        return None;
    }
    // "X exists" contradicts any sentence that calls X fictional.
    let claims_existence = claim.stems.iter().any(|w| w == "exist");
    let subjects: Vec<&String> = claim.stems.iter().filter(|w| *w != "exist").collect();
    let is_about = !subjects.is_empty() && subjects.iter().all(|w| known_fact.stems.contains(*w));
    if claims_existence && is_about && !claim.negated {
        if known_fact.stems.iter().any(|w| FICTION_WORDS.iter().any(|word| stem(word) == *w))
            && !known_fact.negated
        {
            return Some(ContradictionReason::Fictional);
        }
        // "I have no sister" is about nothing else; "That is not my job" does not deny that I have a job.
        let is_only_subject = known_fact.stems.len() == subjects.len() && !known_fact.possessive;
        return ((known_fact.stems.contains("exist") || is_only_subject) && known_fact.negated)
            .then_some(ContradictionReason::Negated);
    }
    let shared = claim.stems.intersection(&known_fact.stems).count();
    // A sentence of one content word is compared only with the same word about the same person.
    let is_specific =
        claim.stems.len() > 1 || (claim.stems == known_fact.stems && claim.person == known_fact.person);
    let overlaps = shared * 5 >= claim.stems.len() * 3 && is_specific;
    if overlaps && claim.negated != known_fact.negated {
        return Some(ContradictionReason::Negated);
    }
    for (one, other) in ANTONYMS {
        let (one, other) = (stem(one), stem(other));
        for (here, there) in [(&one, &other), (&other, &one)] {
            let opposed = claim.stems.contains(here)
                && known_fact.stems.contains(there)
                && !claim.stems.contains(there)
                && !known_fact.stems.contains(here);
            let rest: Vec<&String> = claim.stems.iter().filter(|w| *w != here).collect();
            // "I am single" and "I am married" share only the person.
            let same_person = claim.person.is_some() && claim.person == known_fact.person;
            let shares_only_person = rest.is_empty() && known_fact.stems.len() == 1 && same_person;
            if opposed
                && (!rest.is_empty() || shares_only_person)
                && rest.iter().all(|w| known_fact.stems.contains(*w))
                && claim.negated == known_fact.negated
            {
                return Some(ContradictionReason::Opposite);
            }
        }
    }
    let (subject, value) = subject_and_value(premise)?;
    let (other_subject, other_value) = subject_and_value(fact)?;
    let differs = subject == other_subject && value.is_disjoint(&other_value);
    (differs && claim.negated == known_fact.negated).then_some(ContradictionReason::DifferentValue)
}

/// Subject and value of a sentence such as "X is Y".
fn subject_and_value(sentence: &str) -> Option<(BTreeSet<String>, BTreeSet<String>)> {
    let lower = sentence.to_lowercase();
    let (verb, at) = [" is ", " are ", " was ", " were "]
        .iter()
        .filter_map(|v| Some((v, lower.find(*v)?)))
        .min_by_key(|(_, at)| *at)?;
    let subject = SentenceTerms::parse(&lower[..at]).stems;
    let value = SentenceTerms::parse(&lower[at + verb.len()..]).stems;
    (!subject.is_empty() && !value.is_empty()).then_some((subject, value))
}

/// The content words of a sentence, and whether it is negated.
struct SentenceTerms {
    stems: BTreeSet<String>,
    negated: bool,
    /// The grammatical person of its first pronoun, as an index of [`PRONOUNS`].
    person: Option<usize>,
    /// Whether it has a possessive pronoun.
    possessive: bool,
}

impl SentenceTerms {
    fn parse(sentence: &str) -> Self {
        let lower = sentence.to_lowercase().replace('’', "'");
        let words = lower.split(|c: char| !c.is_alphanumeric() && c != '\'').filter(|w| !w.is_empty());
        let (mut stems, mut negations, mut person, mut possessive) = (BTreeSet::new(), 0, None, false);
        let mut words = words.peekable();
        while let Some(word) = words.next() {
            if NEGATIONS.contains(&word) || word.ends_with("n't") {
                negations += 1;
                continue;
            }
            let word = word.trim_matches('\'');
            let word = ["'s", "'m", "'re", "'ve", "'d", "'ll"]
                .iter()
                .find_map(|ending| word.strip_suffix(ending))
                .unwrap_or(word);
            let pronoun = PRONOUNS.iter().position(|words| words.contains(&word));
            person = person.or(pronoun);
            possessive |= ["my", "your", "our"].contains(&word);
            // "Got married" means "married".
            let is_auxiliary = ["get", "got", "gotten"].contains(&word)
                && words.peek().is_some_and(|next| next.ends_with("ed"));
            if !word.is_empty() && !is_auxiliary && !STOP_WORDS.contains(&word) && pronoun.is_none() {
                stems.insert(stem(word));
            }
        }
        Self { stems, negated: negations % 2 == 1, person, possessive }
    }
}

/// A word without its inflection.
fn stem(word: &str) -> String {
    let base = IRREGULAR_FORMS.iter().find(|(_, forms)| forms.split(' ').any(|form| form == word));
    let word = base.map_or(word, |(base, _)| base);
    let ends = |ending: &str| word.strip_suffix(ending).filter(|rest| rest.chars().count() >= 3);
    let rest = ends("ing").or_else(|| ends("ed")).or_else(|| ends("es")).or_else(|| ends("s"));
    let rest = rest.unwrap_or(word).trim_end_matches('e');
    // "stopped" becomes "stop", and "married" becomes "marry".
    let mut letters: Vec<char> = rest.chars().collect();
    if rest.len() < word.len()
        && letters.len() > 3
        && letters[letters.len() - 1] == letters[letters.len() - 2]
        && !"aeiouls".contains(letters[letters.len() - 1])
    {
        letters.pop();
    }
    if let Some(last @ 'i') = letters.last_mut() {
        *last = 'y';
    }
    letters.into_iter().collect()
}

/// The sentences of a text.
pub(crate) fn sentences(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive(['.', '!', '?', '\n', ';']).map(str::trim).filter(|s| !s.is_empty())
}

const NEGATIONS: [&str; 9] =
    ["not", "no", "never", "none", "nothing", "nobody", "neither", "without", "cannot"];

/// Words without content.
const STOP_WORDS: [&str; 61] = [
    "a", "an", "the", "is", "are", "was", "were", "be", "been", "being", "am", "do", "does", "did", "has",
    "have", "had", "will", "would", "can", "could", "should", "may", "might", "must", "to", "of", "in", "on",
    "at", "by", "for", "with", "and", "or", "but", "so", "that", "this", "it", "its", "there", "then",
    "than", "as", "from", "ever", "really", "just", "also", "very", "any", "some", "all", "yet", "still",
    "anyone", "anymore", "longer", "now", "actually",
];

/// Pronouns of the first person, of the second, and of the first in plural.
const PRONOUNS: [&[&str]; 3] =
    [&["i", "me", "my", "mine", "myself"], &["you", "your", "yours"], &["we", "us", "our", "ours"]];

/// Irregular forms, by their base form.
const IRREGULAR_FORMS: [(&str, &str); 68] = [
    ("become", "became"),
    ("begin", "began begun"),
    ("break", "broke"),
    ("bring", "brought"),
    ("build", "built"),
    ("buy", "bought"),
    ("catch", "caught"),
    ("choose", "chose chosen"),
    ("come", "came"),
    ("die", "died dying"),
    ("draw", "drew drawn"),
    ("drink", "drank drunk"),
    ("drive", "drove driven"),
    ("eat", "ate eaten"),
    ("fall", "fell fallen"),
    ("feel", "felt"),
    ("fight", "fought"),
    ("find", "found"),
    ("fly", "flew flown"),
    ("forget", "forgot forgotten"),
    ("get", "got gotten"),
    ("give", "gave given"),
    ("go", "went gone goes"),
    ("grow", "grew grown"),
    ("hear", "heard"),
    ("hide", "hid hidden"),
    ("hold", "held"),
    ("keep", "kept"),
    ("know", "knew known"),
    ("lead", "led"),
    ("leave", "left"),
    ("lend", "lent"),
    ("lie", "lied lying"),
    ("lose", "lost"),
    ("make", "made"),
    ("mean", "meant"),
    ("meet", "met"),
    ("pay", "paid"),
    ("ride", "rode ridden"),
    ("ring", "rang rung"),
    ("rise", "rose risen"),
    ("run", "ran"),
    ("say", "said"),
    ("see", "saw seen"),
    ("sell", "sold"),
    ("send", "sent"),
    ("sing", "sang sung"),
    ("sink", "sank sunk"),
    ("sit", "sat"),
    ("sleep", "slept"),
    ("speak", "spoke spoken"),
    ("spend", "spent"),
    ("stand", "stood"),
    ("steal", "stole stolen"),
    ("swim", "swam swum"),
    ("take", "took taken"),
    ("teach", "taught"),
    ("tell", "told"),
    ("think", "thought"),
    ("throw", "threw thrown"),
    ("tie", "tied tying"),
    ("understand", "understood"),
    ("wake", "woke woken"),
    ("wear", "wore worn"),
    ("win", "won"),
    ("write", "wrote written"),
    ("child", "children"),
    ("person", "people"),
];

/// Words that say that something does not exist.
const FICTION_WORDS: [&str; 12] = [
    "fictional",
    "fiction",
    "myth",
    "mythical",
    "imaginary",
    "legend",
    "legendary",
    "nonexistent",
    "invented",
    "unreal",
    "fantasy",
    "made-up",
];

/// Pairs of words that exclude each other.
const ANTONYMS: [(&str, &str); 15] = [
    ("alive", "dead"),
    ("open", "closed"),
    ("true", "false"),
    ("win", "lose"),
    ("pass", "fail"),
    ("succeed", "fail"),
    ("start", "stop"),
    ("before", "after"),
    ("hot", "cold"),
    ("full", "empty"),
    ("married", "single"),
    ("broken", "intact"),
    ("guilty", "innocent"),
    ("present", "absent"),
    ("online", "offline"),
];
