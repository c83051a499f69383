//! What is found, in which order, and why.
//!
//! Every chunk gets points on a few scales, and the sum decides. The scales that measure (words and meaning, each of
//! the chunk and of what stands around it) are in deviations from the mean of the conversation, so that none of them
//! drowns another; the others say what form an answer has. What each is worth was fitted to questions about real chats
//! (see LOG.md); nothing here knows of any particular conversation.

use crate::form::{Asked, Form};
use crate::index::{Dense, Entry, Index};
use crate::lexical::Query;
use crate::vectors::{Refused, Vectors};
use crate::when::When;
use halo_core::resurrect::Hit;
use halo_core::token::Role;
use jiff::civil::Date;

/// As many chunks, spread over the conversation, tell what is usual in it; and in as many as this all are looked at.
const SAMPLE: usize = 4096;
/// In longer conversations, as many of the best of each scale are looked at.
const BEST: usize = 1024;
/// How far the surroundings reach that are counted in part, and those that are counted in full.
const NEAR: usize = 1;
const AROUND: usize = 4;
/// Of what stands around a chunk, as many of the nearest in meaning count.
const NEAREST: usize = 3;
/// With how much of their voice neighbours are heard.
const SHARE: f32 = 0.5;
/// More words than this make a text no better.
const LONG: u32 = 40;
/// The logarithm of how many chunks a conversation has in which form has its full weight: some four hundred.
const FORMED: f32 = 6.0;

/// What is searched with.
#[derive(Clone, Debug)]
pub struct Ask<'a> {
    /// The query.
    pub text: &'a str,
    /// Its vector, if there is an embedder.
    pub vector: Option<&'a [f32]>,
    /// The day on which it is asked.
    pub today: Option<Date>,
    /// By what.
    pub mode: Mode,
    /// How much the user's own words are raised: 1 is not at all.
    pub user_boost: f64,
    /// How much being like what was found already counts against a chunk, from 0 to 1.
    pub diversity: f64,
    /// How many are found.
    pub most: usize,
}

/// By what is searched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Words and meaning.
    #[default]
    Hybrid,
    /// Meaning alone, as far as there are vectors.
    Dense,
    /// Words alone.
    Lexical,
}

/// A chunk that was found, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Which, and its points in all.
    pub hit: Hit,
    /// Where its points come from, the most first; what gave none is left out.
    pub points: Vec<(Scale, f32)>,
    /// The words of the query that it has, stemmed, the most telling first.
    pub words: Vec<String>,
    /// How near it is in meaning, from −1 to 1: alone, and in its place.
    pub near: [Option<f32>; 2],
    /// Its place by words and by meaning alone, from 0; none where it has none of the words, or no vector.
    pub ranks: [Option<usize>; 2],
}

impl Found {
    /// Why it was found, in words: so many of the scales that gave it most, and its words.
    #[must_use]
    pub fn because(&self, most: usize) -> String {
        let points = self.points.iter().take(most);
        let mut why: Vec<String> =
            points.map(|(scale, points)| format!("{} {points:+.2}", scale.name())).collect();
        if !self.words.is_empty() {
            why.push(format!("words: {}", self.words.join(", ")));
        }
        why.join(" · ")
    }
}

macro_rules! scales {
    ($($(#[$doc:meta])* $name:ident $word:literal $hybrid:literal $dense:literal $lexical:literal),* $(,)?) => {
        /// Where points come from.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Scale { $($(#[$doc])* $name),* }

        impl Scale {
            /// All of them.
            pub const ALL: [Scale; [$(Scale::$name),*].len()] = [$(Scale::$name),*];

            /// In a word or two.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Scale::$name => $word),* }
            }

            /// What a deviation, or a form, is worth.
            #[must_use]
            pub fn weight(self, mode: Mode) -> f32 {
                let [hybrid, dense, lexical] = match self { $(Scale::$name => [$hybrid, $dense, $lexical]),* };
                match mode {
                    Mode::Hybrid => hybrid,
                    Mode::Dense => dense,
                    Mode::Lexical => lexical,
                }
            }
        }
    };
}

impl Scale {
    /// Whether it measures words or meaning; the others are about form.
    fn measures(self) -> bool {
        use Scale::{Meaning, MeaningAround, MeaningInPlace, Words, WordsAround};
        matches!(self, Words | WordsAround | Meaning | MeaningInPlace | MeaningAround)
    }
}

scales! {
    /// The words of the query, here and next to it.
    Words "words" 0.17 0.0 0.33,
    /// The words of the query, around it.
    WordsAround "words around" 0.25 0.0 0.3,
    /// Its meaning.
    Meaning "meaning" 0.65 0.88 0.0,
    /// Its meaning with what it belongs to.
    MeaningInPlace "meaning in place" 0.28 0.49 0.0,
    /// The meaning of what stands around it.
    MeaningAround "meaning around" 0.31 0.59 0.0,
    /// It says something.
    Length "length" 0.74 1.04 0.51,
    /// The one who is asked about speaks.
    Speaker "speaker" 0.4 0.25 0.73,
    /// It asks, and so does not answer.
    Asks "asks" -0.16 -0.18 -0.1,
    /// Somebody tells of themselves.
    Own "first person" 0.67 0.8 0.61,
    /// Somebody is spoken to.
    You "second person" -0.24 -0.24 -0.28,
    /// It names a time.
    Time "a time" 0.34 0.36 0.39,
    /// It names a time, which is asked for.
    TimeAsked "the time asked for" 0.32 0.36 0.4,
    /// It names a number, which is asked for.
    NumberAsked "a number asked for" 0.03 0.03 0.05,
    /// It names a name.
    Name "a name" 0.19 0.18 0.25,
    /// It names a name, which is asked for.
    NameAsked "a name asked for" 0.04 0.03 0.07,
    /// It was said at the time that the query names.
    Said "said at that time" 0.11 0.16 0.1,
}

/// A candidate with its points.
struct Ranked {
    place: usize,
    hit: Hit,
    points: Vec<(Scale, f32)>,
}

impl Index {
    /// What answers best, the best first.
    ///
    /// # Errors
    /// When the query's vector is of other dimensions than the embedder's.
    pub fn search(&self, ask: &Ask<'_>) -> Result<Vec<Found>, Refused> {
        let query = self.lexical.query(ask.text);
        let seen = Seen::new(self, ask, &query)?;
        let question = Question::new(self, ask);
        let rank = |&place: &usize| {
            let entry = self.entry(place);
            let points = seen.points(place, &question, entry);
            let score = points.iter().map(|&(_, points)| f64::from(points)).sum();
            let hit = Hit { chunk: entry.id, score }.raised(ask.user_boost);
            Ranked { place, hit, points }
        };
        let mut ranked: Vec<Ranked> = seen.candidates.iter().map(rank).collect();
        ranked.sort_by(|a, b| b.hit.score.total_cmp(&a.hit.score).then(a.place.cmp(&b.place)));
        if ask.diversity > 0.0 {
            ranked = self.diverse(ranked, ask);
        }
        ranked.truncate(ask.most);
        let near = |place: usize| seen.meaning.as_ref().map_or(f32::NAN, |m| m.alone[place]);
        let ranks = [seen.ranks(|place| seen.words[place]), seen.ranks(near)];
        let explain = |Ranked { place, hit, mut points }: Ranked| {
            points.retain(|&(_, points)| points != 0.0);
            points.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
            let row = self.order.rows()[place];
            Found {
                hit,
                points,
                words: self.lexical.matched(&query, row).into_iter().map(str::to_owned).collect(),
                near: seen.near(place),
                ranks: [0, 1].map(|n| ranks[n].iter().position(|&p| p == place)),
            }
        };
        Ok(ranked.into_iter().map(explain).collect())
    }

    fn entry(&self, place: usize) -> &Entry {
        &self.entries[self.order.rows()[place] as usize]
    }

    /// Takes one after the other, what is like those before it later: λ·score − (1−λ)·likeness.
    fn diverse(&self, mut ranked: Vec<Ranked>, ask: &Ask<'_>) -> Vec<Ranked> {
        /// An unlikeness from 1 to 0 weighs as much as so many points.
        const POINTS: f64 = 10.0;
        let Some(dense) = &self.dense else { return ranked };
        ranked.truncate(ask.most.saturating_mul(2).max(64));
        let vector = |one: &Ranked| dense.alone.vector(self.order.rows()[one.place]).unwrap_or_default();
        let mut vectors: Vec<Vec<f32>> = ranked.iter().map(vector).collect();
        let mut likeness = vec![0.0; ranked.len()];
        let mut chosen = Vec::new();
        while chosen.len() < ask.most && !ranked.is_empty() {
            let value =
                |n: usize| (1.0 - ask.diversity) * ranked[n].hit.score - ask.diversity * POINTS * likeness[n];
            let best = (1..ranked.len()).fold(0, |best, n| if value(n) > value(best) { n } else { best });
            chosen.push(ranked.remove(best));
            likeness.remove(best);
            let taken = vectors.remove(best);
            for (other, like) in vectors.iter().zip(&mut likeness) {
                let dot: f32 = other.iter().zip(&taken).map(|(a, b)| a * b).sum();
                *like = f64::max(*like, f64::from(dot));
            }
        }
        chosen
    }
}

/// What the query is about, beside its words.
struct Question {
    asked: Asked,
    when: When,
    about: About,
}

/// Who is asked about.
enum About {
    Nobody,
    Speaker(String),
    Role(Role),
}

impl Question {
    fn new(index: &Index, ask: &Ask<'_>) -> Self {
        let asked = Asked::of(ask.text);
        let when = ask.today.map_or(When::default(), |today| When::of(ask.text, today));
        let words: Vec<String> = crate::lexical::words(ask.text).map(str::to_lowercase).collect();
        let called = |name: &&String| words.iter().any(|word| is_called(name, word));
        let named: Vec<&String> = index.speakers.iter().filter(called).collect();
        let about = match named.as_slice() {
            [name] => About::Speaker((*name).clone()),
            [] if asked.i && !asked.you => About::Role(Role::User),
            [] if asked.you && !asked.i => About::Role(Role::Assistant),
            _ => About::Nobody,
        };
        Self { asked, when, about }
    }

    fn speaker(&self, entry: &Entry) -> f32 {
        let spoken = match &self.about {
            About::Nobody => return 0.0,
            About::Speaker(name) => entry.told.speaker.as_deref() == Some(name.as_str()),
            About::Role(role) => entry.id.role == *role,
        };
        if spoken { 1.0 } else { -1.0 }
    }
}

/// Whether a speaker is called by a word: by the whole name, or the first of several.
fn is_called(name: &str, word: &str) -> bool {
    let name = name.to_lowercase();
    name == word || name.split_whitespace().next() == Some(word)
}

/// What was looked at, and what is usual here.
struct Seen {
    candidates: Vec<usize>,
    words: Vec<f32>,
    around: Vec<f32>,
    usual: [Usual; 2],
    meaning: Option<Meaning>,
    lengths: Vec<f32>,
    usual_length: f32,
    /// What form is worth here.
    form: f32,
    mode: Mode,
}

/// Nearness in meaning, by place; no number where it was not looked at or there is no vector.
struct Meaning {
    alone: Vec<f32>,
    in_place: Vec<f32>,
    around: Vec<f32>,
    usual: [Usual; 3],
}

/// A mean, and how far from it things usually are.
#[derive(Clone, Copy)]
struct Usual {
    mean: f32,
    deviation: f32,
}

impl Usual {
    fn of(values: impl Iterator<Item = f32> + Clone) -> Self {
        let (mut n, mut sum, mut squares) = (0.0_f64, 0.0_f64, 0.0_f64);
        for value in values.filter(|v| !v.is_nan()).map(f64::from) {
            (n, sum, squares) = (n + 1.0, sum + value, squares + value * value);
        }
        let mean = sum / n.max(1.0);
        let deviation = (squares / n.max(1.0) - mean * mean).max(0.0).sqrt();
        Self { mean: mean as f32, deviation: if deviation > 1e-9 { deviation as f32 } else { 1.0 } }
    }

    /// How unusual a value is. What is unknown is usual.
    fn deviations(self, value: f32) -> f32 {
        if value.is_nan() { 0.0 } else { (value - self.mean) / self.deviation }
    }
}

impl Seen {
    fn new(index: &Index, ask: &Ask<'_>, query: &Query) -> Result<Self, Refused> {
        let order = &index.order;
        let (words, around) = (
            index.lexical.scores(query, order, NEAR, SHARE),
            index.lexical.scores(query, order, AROUND, 1.0),
        );
        let usual = [&words, &around].map(|scores| Usual::of(scores.iter().copied()));
        let places = order.rows().len();
        let sample: Vec<usize> = (0..places).step_by(places.div_ceil(SAMPLE).max(1)).collect();
        let mut candidates = sample.clone();
        let dense = index.dense.as_ref().zip(ask.vector).filter(|_| ask.mode != Mode::Lexical);
        if sample.len() < places {
            candidates = best(&words).chain(best(&around)).collect();
            if let Some((dense, vector)) = dense {
                for vectors in [&dense.alone, &dense.in_place] {
                    let nearest = vectors.search(vector, BEST, |_| true)?;
                    candidates.extend(nearest.iter().filter_map(|&(row, _)| order.place(row)));
                }
            }
            candidates.sort_unstable();
            candidates.dedup();
        }
        let meaning = match dense {
            Some((dense, vector)) => Some(Meaning::new(index, dense, vector, &sample, &candidates)?),
            None => None,
        };
        let length = |&row: &u32| (index.lexical.length(row).min(LONG) as f32).ln_1p();
        let lengths: Vec<f32> = order.rows().iter().map(length).collect();
        // Without vectors there is no meaning to go by.
        let blind = meaning.as_ref().is_none_or(|m| sample.iter().all(|&p| m.alone[p].is_nan()));
        let mode = if blind { Mode::Lexical } else { ask.mode };
        // In a short conversation nothing can be far from what is usual, and form must not drown it.
        let form = ((places as f32).ln_1p() / FORMED).min(1.0);
        let usual_length = Usual::of(lengths.iter().copied()).mean;
        Ok(Self { candidates, words, around, usual, meaning, lengths, usual_length, form, mode })
    }

    fn points(&self, place: usize, question: &Question, entry: &Entry) -> Vec<(Scale, f32)> {
        let Form { asks, i, you, time, number, name } = entry.form;
        let is = |yes: bool| f32::from(u8::from(yes));
        let Asked { time: when, number: how_many, name: who, .. } = question.asked;
        let meaning = |n: usize| {
            self.meaning
                .as_ref()
                .map_or(0.0, |m| m.usual[n].deviations([&m.alone, &m.in_place, &m.around][n][place]))
        };
        let value = |scale| match scale {
            Scale::Words => self.usual[0].deviations(self.words[place]),
            Scale::WordsAround => self.usual[1].deviations(self.around[place]),
            Scale::Meaning => meaning(0),
            Scale::MeaningInPlace => meaning(1),
            Scale::MeaningAround => meaning(2),
            Scale::Length => self.lengths[place] - self.usual_length,
            Scale::Speaker => question.speaker(entry),
            Scale::Asks => is(asks),
            Scale::Own => is(i),
            Scale::You => is(you),
            Scale::Time => is(time),
            Scale::TimeAsked => is(time && when),
            Scale::NumberAsked => is(number && how_many),
            Scale::Name => is(name),
            Scale::NameAsked => is(name && who),
            Scale::Said => entry.told.day.map_or(0.0, |day| question.when.fit(day)),
        };
        let worth = |scale: Scale| scale.weight(self.mode) * if scale.measures() { 1.0 } else { self.form };
        Scale::ALL.into_iter().map(|scale| (scale, worth(scale) * value(scale))).collect()
    }

    fn near(&self, place: usize) -> [Option<f32>; 2] {
        let known = |x: f32| (!x.is_nan()).then_some(x);
        self.meaning.as_ref().map_or([None; 2], |m| [known(m.alone[place]), known(m.in_place[place])])
    }

    /// The candidates that have a score on one scale, the best first.
    fn ranks(&self, score: impl Fn(usize) -> f32) -> Vec<usize> {
        let mut places: Vec<usize> =
            self.candidates.iter().copied().filter(|&p| !score(p).is_nan() && score(p) != 0.0).collect();
        places.sort_by(|&a, &b| score(b).total_cmp(&score(a)).then(a.cmp(&b)));
        places
    }
}

/// The places with the best scores above 0.
fn best(scores: &[f32]) -> impl Iterator<Item = usize> {
    let mut places: Vec<usize> = (0..scores.len()).filter(|&p| scores[p] > 0.0).collect();
    let by = |a: &usize, b: &usize| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b));
    if places.len() > BEST {
        places.select_nth_unstable_by(BEST, by);
        places.truncate(BEST);
    }
    places.into_iter()
}

impl Meaning {
    fn new(
        index: &Index,
        dense: &Dense,
        vector: &[f32],
        sample: &[usize],
        candidates: &[usize],
    ) -> Result<Self, Refused> {
        let rows = index.order.rows();
        let near = |vectors: &Vectors, known: &mut Vec<f32>, place: usize| -> Result<(), Refused> {
            if known[place].is_nan() {
                known[place] = vectors.score(rows[place], vector)?.unwrap_or(f32::NAN);
            }
            Ok(())
        };
        let mut alone = vec![f32::NAN; rows.len()];
        let mut in_place = alone.clone();
        let mut around = alone.clone();
        for &place in sample.iter().chain(candidates) {
            near(&dense.in_place, &mut in_place, place)?;
            let reach = place.saturating_sub(AROUND)..(place + AROUND + 1).min(rows.len());
            for other in reach.clone() {
                near(&dense.alone, &mut alone, other)?;
            }
            around[place] = nearest(&alone[reach]);
        }
        let usual = [&alone, &in_place, &around].map(|known| Usual::of(sample.iter().map(|&p| known[p])));
        Ok(Self { alone, in_place, around, usual })
    }
}

/// The mean of the nearest few.
fn nearest(known: &[f32]) -> f32 {
    let mut known: Vec<f32> = known.iter().copied().filter(|x| !x.is_nan()).collect();
    known.sort_unstable_by(|a, b| b.total_cmp(a));
    known.truncate(NEAREST);
    known.iter().sum::<f32>() / known.len() as f32
}
