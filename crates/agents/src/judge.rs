//! Who finds that two things cannot both be so, and who judges what follows. Both are agents, so anybody can take their
//! place: here are one each that goes by rules, which knows little and is sure of it, and one each that asks a model.

use crate::agent::Agent;
use halo_core::seams::SeamError;
use std::collections::BTreeSet;

/// Something that is taken to be so, and what is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// What is taken to be so.
    pub premise: String,
    /// What is known.
    pub facts: Vec<String>,
}

/// Two things that cannot both be so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The fact that speaks against it.
    pub fact: String,
    /// Why.
    pub explanation: String,
}

/// What a judge is asked: whether a conflict is fatal to a premise, by these principles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// What is taken to be so.
    pub premise: String,
    /// What it is to be judged by.
    pub principles: Vec<String>,
    /// What speaks against it.
    pub conflict: Conflict,
}

/// What a judge says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// The verdict.
    pub verdict: Verdict,
    /// Why.
    pub reason: String,
}

/// Whether a premise may stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may.
    Accept,
    /// It may not.
    Reject,
}

/// Finds contradictions by the words: the same thing said and denied, opposites, one thing given two values.
#[derive(Clone, Copy, Debug, Default)]
pub struct RuleContradict;

impl Agent<Claim> for RuleContradict {
    type Out = Option<Conflict>;

    async fn invoke(&self, claim: Claim) -> Result<Option<Conflict>, SeamError> {
        let found = claim.facts.iter().flat_map(|fact| sentences(fact)).find_map(|fact| {
            let why = contradiction(&claim.premise, fact)?;
            Some(Conflict {
                fact: fact.to_owned(),
                explanation: format!("it was said: “{}” ({})", fact.trim_end_matches(';'), why.words()),
            })
        });
        Ok(found)
    }
}

/// Rejects what a fact denies outright, and lets stand what is merely not the same.
#[derive(Clone, Copy, Debug, Default)]
pub struct RuleJudge;

impl Agent<Case> for RuleJudge {
    type Out = Judgement;

    async fn invoke(&self, case: Case) -> Result<Judgement, SeamError> {
        let fatal = contradiction(&case.premise, &case.conflict.fact).filter(|why| why.is_fatal());
        let by = case.principles.join(" and ");
        Ok(match fatal {
            Some(why) => Judgement { verdict: Verdict::Reject, reason: format!("by {by}: {}", why.words()) },
            None => {
                Judgement { verdict: Verdict::Accept, reason: format!("by {by}: nothing denies it outright") }
            }
        })
    }
}

/// Why two sentences cannot both be so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// One denies what the other says.
    Denied,
    /// One says the opposite.
    Opposite,
    /// What one takes to be there is made up, says the other.
    MadeUp,
    /// One thing has two values.
    OtherValue,
}

impl Why {
    fn words(self) -> &'static str {
        match self {
            Why::Denied => "one denies what the other says",
            Why::Opposite => "one says the opposite of the other",
            Why::MadeUp => "it is made up",
            Why::OtherValue => "the same thing has another value",
        }
    }

    /// Whether a premise falls with it. Another value may be a later one.
    fn is_fatal(self) -> bool {
        self != Why::OtherValue
    }
}

/// Why two sentences cannot both be so, as far as their words tell.
#[must_use]
pub fn contradiction(premise: &str, fact: &str) -> Option<Why> {
    let (said, known) = (Words::of(premise), Words::of(fact));
    if said.content.is_empty() || known.content.is_empty() || fact.trim_end().ends_with('?') {
        return None;
    }
    // That something is there is denied by whatever calls it made up.
    let exists = said.content.iter().any(|w| w == "exist");
    let things: Vec<&String> = said.content.iter().filter(|w| *w != "exist").collect();
    let about = !things.is_empty() && things.iter().all(|w| known.content.contains(*w));
    if exists && about && !said.denies {
        if known.content.iter().any(|w| MADE_UP.iter().any(|word| stem(word) == *w)) && !known.denies {
            return Some(Why::MadeUp);
        }
        // "I have no sister" speaks of nothing else, and of none of mine: "That is not my job" does.
        let alone = known.content.len() == things.len() && !known.possesses;
        return ((known.content.contains("exist") || alone) && known.denies).then_some(Why::Denied);
    }
    let shared = said.content.intersection(&known.content).count();
    // A single word tells something only of whom it is said, and where nothing else is.
    let enough = said.content.len() > 1 || (said.content == known.content && said.person == known.person);
    let most = shared * 5 >= said.content.len() * 3 && enough;
    if most && said.denies != known.denies {
        return Some(Why::Denied);
    }
    for (one, other) in OPPOSITES {
        let (one, other) = (stem(one), stem(other));
        for (here, there) in [(&one, &other), (&other, &one)] {
            let opposed = said.content.contains(here)
                && known.content.contains(there)
                && !said.content.contains(there)
                && !known.content.contains(here);
            let rest: Vec<&String> = said.content.iter().filter(|w| *w != here).collect();
            // "I am single": who says so may be all that the two have in common.
            let same = said.person.is_some() && said.person == known.person;
            let alone = rest.is_empty() && known.content.len() == 1 && same;
            if opposed
                && (!rest.is_empty() || alone)
                && rest.iter().all(|w| known.content.contains(*w))
                && said.denies == known.denies
            {
                return Some(Why::Opposite);
            }
        }
    }
    let (subject, value) = value(premise)?;
    let (other_subject, other_value) = self::value(fact)?;
    let differs = subject == other_subject && value.is_disjoint(&other_value);
    (differs && said.denies == known.denies).then_some(Why::OtherValue)
}

/// Something is so and so: what, and how.
fn value(sentence: &str) -> Option<(BTreeSet<String>, BTreeSet<String>)> {
    let lower = sentence.to_lowercase();
    let (verb, at) = [" is ", " are ", " was ", " were "]
        .iter()
        .filter_map(|v| Some((v, lower.find(*v)?)))
        .min_by_key(|(_, at)| *at)?;
    let subject = Words::of(&lower[..at]).content;
    let value = Words::of(&lower[at + verb.len()..]).content;
    (!subject.is_empty() && !value.is_empty()).then_some((subject, value))
}

/// What a sentence is about, and whether it denies it.
struct Words {
    content: BTreeSet<String>,
    denies: bool,
    /// Whether it speaks of whoever speaks, or of whom is spoken to: the first that it names.
    person: Option<usize>,
    /// Whether it speaks of what is theirs.
    possesses: bool,
}

impl Words {
    fn of(sentence: &str) -> Self {
        let lower = sentence.to_lowercase().replace('’', "'");
        let words = lower.split(|c: char| !c.is_alphanumeric() && c != '\'').filter(|w| !w.is_empty());
        let (mut content, mut denials, mut person, mut possesses) = (BTreeSet::new(), 0, None, false);
        let mut words = words.peekable();
        while let Some(word) = words.next() {
            if DENIALS.contains(&word) || word.ends_with("n't") {
                denials += 1;
                continue;
            }
            let word = word.trim_matches('\'');
            let word = ["'s", "'m", "'re", "'ve", "'d", "'ll"]
                .iter()
                .find_map(|ending| word.strip_suffix(ending))
                .unwrap_or(word);
            let who = PERSONS.iter().position(|words| words.contains(&word));
            person = person.or(who);
            possesses |= ["my", "your", "our"].contains(&word);
            // "Got married" is no more than "married".
            let light = ["get", "got", "gotten"].contains(&word)
                && words.peek().is_some_and(|next| next.ends_with("ed"));
            if !word.is_empty() && !light && !EMPTY.contains(&word) && who.is_none() {
                content.insert(stem(word));
            }
        }
        Self { content, denies: denials % 2 == 1, person, possesses }
    }
}

/// A word without what only bends it.
fn stem(word: &str) -> String {
    let base = IRREGULAR.iter().find(|(_, forms)| forms.split(' ').any(|form| form == word));
    let word = base.map_or(word, |(base, _)| base);
    let ends = |ending: &str| word.strip_suffix(ending).filter(|rest| rest.chars().count() >= 3);
    let rest = ends("ing").or_else(|| ends("ed")).or_else(|| ends("es")).or_else(|| ends("s"));
    let rest = rest.unwrap_or(word).trim_end_matches('e');
    // "stopped" is "stop", and "married" is "marry".
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

fn sentences(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive(['.', '!', '?', '\n', ';']).map(str::trim).filter(|s| !s.is_empty())
}

const DENIALS: [&str; 9] =
    ["not", "no", "never", "none", "nothing", "nobody", "neither", "without", "cannot"];

/// Words that a sentence can have or not without being about anything else.
const EMPTY: [&str; 61] = [
    "a", "an", "the", "is", "are", "was", "were", "be", "been", "being", "am", "do", "does", "did", "has",
    "have", "had", "will", "would", "can", "could", "should", "may", "might", "must", "to", "of", "in", "on",
    "at", "by", "for", "with", "and", "or", "but", "so", "that", "this", "it", "its", "there", "then",
    "than", "as", "from", "ever", "really", "just", "also", "very", "any", "some", "all", "yet", "still",
    "anyone", "anymore", "longer", "now", "actually",
];

/// Words for whoever speaks, for whom is spoken to, and for both.
const PERSONS: [&[&str]; 3] =
    [&["i", "me", "my", "mine", "myself"], &["you", "your", "yours"], &["we", "us", "our", "ours"]];

/// Verbs whose forms no rule tells.
const IRREGULAR: [(&str, &str); 68] = [
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

/// Words that say that something is not there.
const MADE_UP: [&str; 12] = [
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

/// Words of which one is not so where the other is.
const OPPOSITES: [(&str, &str); 15] = [
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

/// Asks a model whether facts speak against a claim.
#[derive(Clone, Debug)]
pub struct ModelContradict<A>(pub A);

impl<A: Agent<String, Out = String>> Agent<Claim> for ModelContradict<A> {
    type Out = Option<Conflict>;

    async fn invoke(&self, claim: Claim) -> Result<Option<Conflict>, SeamError> {
        for fact in &claim.facts {
            let asked = format!(
                "Fact: {fact}\nClaim: {}\nDoes the fact contradict the claim? Answer with one word, yes or no.",
                claim.premise
            );
            if says_yes(&self.0.invoke(asked).await?) {
                let explanation = format!("it was said: “{}”", fact.trim());
                return Ok(Some(Conflict { fact: fact.clone(), explanation }));
            }
        }
        Ok(None)
    }
}

/// Asks a model whether a claim may stand.
#[derive(Clone, Debug)]
pub struct ModelJudge<A>(pub A);

impl<A: Agent<String, Out = String>> Agent<Case> for ModelJudge<A> {
    type Out = Judgement;

    async fn invoke(&self, case: Case) -> Result<Judgement, SeamError> {
        let Case { premise, principles, conflict } = case;
        let asked = format!(
            "Claim: {premise}\nKnown: {}\nJudged by {}, must the claim be rejected? Answer with one word, yes or no.",
            conflict.fact,
            principles.join(" and ")
        );
        let said = self.0.invoke(asked).await?;
        let verdict = if says_yes(&said) { Verdict::Reject } else { Verdict::Accept };
        Ok(Judgement { verdict, reason: said.trim().to_owned() })
    }
}

fn says_yes(said: &str) -> bool {
    let first = said.split(|c: char| !c.is_alphabetic()).find(|word| !word.is_empty());
    first.is_some_and(|word| word.eq_ignore_ascii_case("yes"))
}
