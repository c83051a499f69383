//! Scores chunks for a query and explains the scores.
//!
//! The score is a weighted sum of features. Similarity features (words and meaning, of the chunk and of its neighbours)
//! are z-scores over the conversation, so that none outweighs the others by its scale. Form features (person, question,
//! time, name) describe what an answer looks like. The weights were fitted to questions about real chats (LOG.md).

use crate::index::{DenseIndex, IndexedChunk, RecallIndex};
use crate::lexical::LexicalQuery;
use crate::query_dates::QueryDates;
use crate::relevance::{RelevanceBasis, RelevanceFeatures};
use crate::text_features::{QueryIntent, TextFeatures};
use crate::vector_index::{VectorError, VectorIndex};
use halo_core::resurrect::Hit;
use halo_core::token::Role;
use jiff::civil::Date;

/// Means and deviations are computed over this many chunks, spread over the conversation. In a shorter conversation all
/// chunks are scored.
const SAMPLE_CHUNKS: usize = 4096;
/// In a longer conversation, this many of the best by each similarity are scored.
const CANDIDATES_PER_FEATURE: usize = 1024;
/// Neighbours within this distance count for [`RankFeature::Lexical`], times [`NEIGHBOUR_WEIGHT`].
const NEAR_RADIUS: usize = 1;
/// Neighbours within this distance count for the features of the surroundings.
const CONTEXT_RADIUS: usize = 4;
/// Of the neighbours, this many of the most similar count for [`RankFeature::SemanticNearby`].
const NEAREST_COUNTED: usize = 3;
const NEIGHBOUR_WEIGHT: f32 = 0.5;
/// More terms than this do not raise [`RankFeature::Length`].
const MAX_COUNTED_TERMS: u32 = 40;
/// Form features have their full weight when the logarithm of the number of chunks is this: about 400 chunks.
const FULL_WEIGHT_LOG_CHUNKS: f32 = 6.0;

#[derive(Clone, Debug)]
pub struct SearchQuery<'a> {
    pub text: &'a str,
    /// The embedding of the text, if there is an embedder.
    pub vector: Option<&'a [f32]>,
    /// Dates in the query ("yesterday") are relative to this day.
    pub today: Option<Date>,
    pub mode: SearchMode,
    /// The factor on scores of the user's chunks; 1 changes nothing.
    pub user_boost: f64,
    /// The weight of similarity to better hits (MMR), from 0 to 1.
    pub diversity: f64,
    /// The largest number of hits.
    pub limit: usize,
}

#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "snake_case")]
pub enum SearchMode {
    #[default]
    Hybrid,
    /// Meaning alone, if there are vectors.
    Dense,
    Lexical,
}

/// A hit, and how its score came about.
#[derive(Clone, Debug, PartialEq)]
pub struct RankedChunk {
    pub hit: Hit,
    /// The summands of the score, the largest magnitude first, without those that are 0.
    pub feature_scores: Vec<(RankFeature, f32)>,
    /// The stemmed terms of the query that it has, the rarest first.
    pub matched_terms: Vec<String>,
    /// The cosine similarity of its two vectors: alone, and in context.
    pub similarity: [Option<f32>; 2],
    /// The share of the query's terms that it and its direct neighbours have; see [`LexicalIndex::term_share`].
    ///
    /// [`LexicalIndex::term_share`]: crate::lexical::LexicalIndex::term_share
    pub term_share: f32,
    /// The probability that it answers the query, from 0 to 1. Unlike the score, it can be compared between queries and
    /// conversations.
    pub relevance: f64,
    /// Its rank by words alone and by meaning alone, from 0. None if it has none of the words, or no vector.
    pub ranks: [Option<usize>; 2],
}

impl RankedChunk {
    /// The `max_features` largest summands and the matched terms, as one line.
    #[must_use]
    pub fn explain(&self, max_features: usize) -> String {
        let features = self.feature_scores.iter().take(max_features);
        let mut parts: Vec<String> =
            features.map(|(feature, score)| format!("{} {score:+.2}", feature.name())).collect();
        if !self.matched_terms.is_empty() {
            parts.push(format!("words: {}", self.matched_terms.join(", ")));
        }
        parts.join(" · ")
    }
}

macro_rules! rank_features {
    ($($(#[$doc:meta])* $name:ident $word:literal $hybrid:literal $dense:literal $lexical:literal),* $(,)?) => {
        /// A summand of the score.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum RankFeature { $($(#[$doc])* $name),* }

        impl RankFeature {
            pub const ALL: [RankFeature; [$(RankFeature::$name),*].len()] = [$(RankFeature::$name),*];

            /// The name that users see.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(RankFeature::$name => $word),* }
            }

            /// The weight of one standard deviation, or of a form feature that holds.
            #[must_use]
            pub fn weight(self, mode: SearchMode) -> f32 {
                let [hybrid, dense, lexical] = match self { $(RankFeature::$name => [$hybrid, $dense, $lexical]),* };
                match mode {
                    SearchMode::Hybrid => hybrid,
                    SearchMode::Dense => dense,
                    SearchMode::Lexical => lexical,
                }
            }
        }
    };
}

impl RankFeature {
    /// Whether it is a similarity feature, not a form feature.
    fn is_similarity(self) -> bool {
        use RankFeature::{Lexical, LexicalNearby, Semantic, SemanticInContext, SemanticNearby};
        matches!(self, Lexical | LexicalNearby | Semantic | SemanticInContext | SemanticNearby)
    }
}

rank_features! {
    /// BM25 of the chunk and its direct neighbours.
    Lexical "words" 0.17 0.0 0.33,
    /// BM25 of the surroundings.
    LexicalNearby "words nearby" 0.25 0.0 0.3,
    /// Similarity of the chunk's own vector.
    Semantic "meaning" 0.65 0.88 0.0,
    /// Similarity of the chunk's vector in context.
    SemanticInContext "meaning in context" 0.28 0.49 0.0,
    /// Similarity of the surroundings.
    SemanticNearby "meaning nearby" 0.31 0.59 0.0,
    Length "length" 0.74 1.04 0.51,
    /// The speaker is the one that the query is about; negative for others.
    Speaker "speaker" 0.4 0.25 0.73,
    /// A question does not answer one.
    IsQuestion "is a question" -0.16 -0.18 -0.1,
    FirstPerson "first person" 0.67 0.8 0.61,
    SecondPerson "second person" -0.24 -0.24 -0.28,
    MentionsTime "mentions a time" 0.34 0.36 0.39,
    /// It mentions a time, and the query asks for one.
    AnswersTime "answers when" 0.32 0.36 0.4,
    /// It mentions a number, and the query asks for one.
    AnswersNumber "answers how many" 0.03 0.03 0.05,
    MentionsName "mentions a name" 0.19 0.18 0.25,
    /// It mentions a name, and the query asks for one.
    AnswersName "answers who or where" 0.04 0.03 0.07,
    /// Its turn began at the date that the query names.
    DateMatch "date" 0.11 0.16 0.1,
}

struct RankedCandidate {
    ordinal: usize,
    hit: Hit,
    feature_scores: Vec<(RankFeature, f32)>,
}

impl RecallIndex {
    /// The best hits of a query, the best first.
    pub fn search(&self, query: &SearchQuery<'_>) -> Result<Vec<RankedChunk>, VectorError> {
        let lexical_query = self.lexical.parse_query(query.text);
        let scores = QueryScores::new(self, query, &lexical_query)?;
        let analysis = QueryAnalysis::new(self, query);
        let rank = |&ordinal: &usize| {
            let entry = self.entry(ordinal);
            let feature_scores = scores.feature_scores(ordinal, &analysis, entry);
            let score = feature_scores.iter().map(|&(_, score)| f64::from(score)).sum();
            let hit = Hit { chunk: entry.id, score }.boosted(query.user_boost);
            RankedCandidate { ordinal, hit, feature_scores }
        };
        let mut ranked: Vec<RankedCandidate> = scores.candidates.iter().map(rank).collect();
        ranked.sort_by(|a, b| b.hit.score.total_cmp(&a.hit.score).then(a.ordinal.cmp(&b.ordinal)));
        if query.diversity > 0.0 {
            ranked = self.rerank_mmr(ranked, query);
        }
        ranked.truncate(query.limit);
        let similarity =
            |ordinal: usize| scores.semantic.as_ref().map_or(f32::NAN, |m| m.chunk_only[ordinal]);
        let ranks = [scores.rank_by(|ordinal| scores.lexical[ordinal]), scores.rank_by(similarity)];
        let explain = |candidate: RankedCandidate| {
            let RankedCandidate { ordinal, hit, mut feature_scores } = candidate;
            feature_scores.retain(|&(_, score)| score != 0.0);
            feature_scores.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
            let matched_terms = self.lexical.matched_terms(&lexical_query, self.order.rows()[ordinal]);
            let similarity = scores.similarity(ordinal);
            let term_share = self.lexical.term_share(&lexical_query, self.order.around(ordinal, NEAR_RADIUS));
            let evidence = RelevanceFeatures {
                score: feature_scores.iter().map(|&(_, score)| f64::from(score)).sum(),
                similarity,
                term_share: f64::from(term_share),
                chunks: self.order.rows().len(),
                basis: match &self.dense {
                    _ if scores.mode == SearchMode::Lexical => RelevanceBasis::Words,
                    Some(dense) => RelevanceBasis::of_embedder(dense.embedder_name()),
                    None => RelevanceBasis::Words,
                },
            };
            RankedChunk {
                hit,
                relevance: evidence.relevance(),
                feature_scores,
                matched_terms: matched_terms.into_iter().map(str::to_owned).collect(),
                similarity,
                term_share,
                ranks: [0, 1].map(|n| ranks[n].iter().position(|&other| other == ordinal)),
            }
        };
        Ok(ranked.into_iter().map(explain).collect())
    }

    fn entry(&self, ordinal: usize) -> &IndexedChunk {
        &self.entries[self.order.rows()[ordinal] as usize]
    }

    /// Maximal marginal relevance: takes one hit after the other, each by its score minus its largest similarity to those
    /// before it.
    fn rerank_mmr(&self, mut ranked: Vec<RankedCandidate>, query: &SearchQuery<'_>) -> Vec<RankedCandidate> {
        /// Scales a cosine similarity to the range of scores.
        const SIMILARITY_WEIGHT: f64 = 10.0;
        let Some(dense) = &self.dense else { return ranked };
        ranked.truncate(query.limit.saturating_mul(2).max(64));
        let vector = |candidate: &RankedCandidate| {
            dense.chunk_only.vector(self.order.rows()[candidate.ordinal]).unwrap_or_default()
        };
        let mut vectors: Vec<Vec<f32>> = ranked.iter().map(vector).collect();
        let mut similarity_to_chosen = vec![0.0; ranked.len()];
        let mut chosen = Vec::new();
        while chosen.len() < query.limit && !ranked.is_empty() {
            let value = |n: usize| {
                (1.0 - query.diversity) * ranked[n].hit.score
                    - query.diversity * SIMILARITY_WEIGHT * similarity_to_chosen[n]
            };
            let best = (1..ranked.len()).fold(0, |best, n| if value(n) > value(best) { n } else { best });
            chosen.push(ranked.remove(best));
            similarity_to_chosen.remove(best);
            let chosen_vector = vectors.remove(best);
            for (other, similarity) in vectors.iter().zip(&mut similarity_to_chosen) {
                let dot: f32 = other.iter().zip(&chosen_vector).map(|(a, b)| a * b).sum();
                *similarity = f64::max(*similarity, f64::from(dot));
            }
        }
        chosen
    }
}

/// What the query asks for, apart from words and meaning.
struct QueryAnalysis {
    intent: QueryIntent,
    dates: QueryDates,
    subject: QuerySubject,
}

/// Whose statements the query asks for.
enum QuerySubject {
    Unspecified,
    Speaker(String),
    Role(Role),
}

impl QueryAnalysis {
    fn new(index: &RecallIndex, query: &SearchQuery<'_>) -> Self {
        let intent = QueryIntent::parse(query.text);
        let dates = query.today.map_or(QueryDates::default(), |today| QueryDates::parse(query.text, today));
        let words: Vec<String> = crate::lexical::words(query.text).map(str::to_lowercase).collect();
        let is_named = |name: &&String| words.iter().any(|word| matches_name(name, word));
        let named: Vec<&String> = index.speakers.iter().filter(is_named).collect();
        let subject = match named.as_slice() {
            [name] => QuerySubject::Speaker((*name).clone()),
            [] if intent.first_person && !intent.second_person => QuerySubject::Role(Role::User),
            [] if intent.second_person && !intent.first_person => QuerySubject::Role(Role::Assistant),
            _ => QuerySubject::Unspecified,
        };
        Self { intent, dates, subject }
    }

    fn speaker_match(&self, entry: &IndexedChunk) -> f32 {
        let matches = match &self.subject {
            QuerySubject::Unspecified => return 0.0,
            QuerySubject::Speaker(name) => entry.turn_meta.speaker.as_deref() == Some(name.as_str()),
            QuerySubject::Role(role) => entry.id.role == *role,
        };
        if matches { 1.0 } else { -1.0 }
    }
}

/// Whether a word is the name of a speaker, or the first of several names.
fn matches_name(name: &str, word: &str) -> bool {
    let name = name.to_lowercase();
    name == word || name.split_whitespace().next() == Some(word)
}

/// The similarities of a query to all chunks, by ordinal.
struct QueryScores {
    /// Ordinals of the chunks that are scored.
    candidates: Vec<usize>,
    lexical: Vec<f32>,
    lexical_nearby: Vec<f32>,
    lexical_stats: [MeanDeviation; 2],
    semantic: Option<SemanticScores>,
    lengths: Vec<f32>,
    mean_length: f32,
    /// The factor on form features.
    form_weight: f32,
    mode: SearchMode,
}

/// Cosine similarities by ordinal; NaN where there is no vector, or it was not needed.
struct SemanticScores {
    chunk_only: Vec<f32>,
    in_context: Vec<f32>,
    nearby: Vec<f32>,
    stats: [MeanDeviation; 3],
}

/// Mean and standard deviation.
#[derive(Clone, Copy)]
struct MeanDeviation {
    mean: f32,
    deviation: f32,
}

impl MeanDeviation {
    fn from_values(values: impl Iterator<Item = f32> + Clone) -> Self {
        let (mut n, mut sum, mut squares) = (0.0_f64, 0.0_f64, 0.0_f64);
        for value in values.filter(|v| !v.is_nan()).map(f64::from) {
            (n, sum, squares) = (n + 1.0, sum + value, squares + value * value);
        }
        let mean = sum / n.max(1.0);
        let deviation = (squares / n.max(1.0) - mean * mean).max(0.0).sqrt();
        Self { mean: mean as f32, deviation: if deviation > 1e-9 { deviation as f32 } else { 1.0 } }
    }

    /// The distance from the mean in standard deviations; 0 for NaN.
    fn z_score(self, value: f32) -> f32 {
        if value.is_nan() { 0.0 } else { (value - self.mean) / self.deviation }
    }
}

impl QueryScores {
    fn new(
        index: &RecallIndex,
        query: &SearchQuery<'_>,
        lexical_query: &LexicalQuery,
    ) -> Result<Self, VectorError> {
        let order = &index.order;
        let lexical = index.lexical.scores(lexical_query, order, NEAR_RADIUS, NEIGHBOUR_WEIGHT);
        let lexical_nearby = index.lexical.scores(lexical_query, order, CONTEXT_RADIUS, 1.0);
        let lexical_stats =
            [&lexical, &lexical_nearby].map(|scores| MeanDeviation::from_values(scores.iter().copied()));
        let count = order.rows().len();
        let sample: Vec<usize> = (0..count).step_by(count.div_ceil(SAMPLE_CHUNKS).max(1)).collect();
        let mut candidates = sample.clone();
        let dense = index.dense.as_ref().zip(query.vector).filter(|_| query.mode != SearchMode::Lexical);
        if sample.len() < count {
            candidates = top_candidates(&lexical).chain(top_candidates(&lexical_nearby)).collect();
            if let Some((dense, vector)) = dense {
                for vectors in [&dense.chunk_only, &dense.in_context] {
                    let nearest = vectors.search(vector, CANDIDATES_PER_FEATURE, |_| true)?;
                    candidates.extend(nearest.iter().filter_map(|&(row, _)| order.index_of(row)));
                }
            }
            candidates.sort_unstable();
            candidates.dedup();
        }
        let semantic = match dense {
            Some((dense, vector)) => Some(SemanticScores::new(index, dense, vector, &sample, &candidates)?),
            None => None,
        };
        let length = |&row: &u32| (index.lexical.term_count(row).min(MAX_COUNTED_TERMS) as f32).ln_1p();
        let lengths: Vec<f32> = order.rows().iter().map(length).collect();
        let no_vectors = semantic
            .as_ref()
            .is_none_or(|m: &SemanticScores| sample.iter().all(|&ordinal| m.chunk_only[ordinal].is_nan()));
        let mode = if no_vectors { SearchMode::Lexical } else { query.mode };
        // In a short conversation z-scores are small, and form features must not outweigh them.
        let form_weight = ((count as f32).ln_1p() / FULL_WEIGHT_LOG_CHUNKS).min(1.0);
        let mean_length = MeanDeviation::from_values(lengths.iter().copied()).mean;
        Ok(Self {
            candidates,
            lexical,
            lexical_nearby,
            lexical_stats,
            semantic,
            lengths,
            mean_length,
            form_weight,
            mode,
        })
    }

    fn feature_scores(
        &self,
        ordinal: usize,
        analysis: &QueryAnalysis,
        entry: &IndexedChunk,
    ) -> Vec<(RankFeature, f32)> {
        let TextFeatures {
            is_question,
            first_person,
            second_person,
            mentions_time,
            mentions_number,
            mentions_name,
        } = entry.features;
        let QueryIntent { wants_time, wants_number, wants_name, .. } = analysis.intent;
        let flag = |holds: bool| f32::from(u8::from(holds));
        let semantic = |n: usize| {
            self.semantic.as_ref().map_or(0.0, |m| {
                let values = [&m.chunk_only, &m.in_context, &m.nearby][n];
                m.stats[n].z_score(values[ordinal])
            })
        };
        let value = |feature| match feature {
            RankFeature::Lexical => self.lexical_stats[0].z_score(self.lexical[ordinal]),
            RankFeature::LexicalNearby => self.lexical_stats[1].z_score(self.lexical_nearby[ordinal]),
            RankFeature::Semantic => semantic(0),
            RankFeature::SemanticInContext => semantic(1),
            RankFeature::SemanticNearby => semantic(2),
            RankFeature::Length => self.lengths[ordinal] - self.mean_length,
            RankFeature::Speaker => analysis.speaker_match(entry),
            RankFeature::IsQuestion => flag(is_question),
            RankFeature::FirstPerson => flag(first_person),
            RankFeature::SecondPerson => flag(second_person),
            RankFeature::MentionsTime => flag(mentions_time),
            RankFeature::AnswersTime => flag(mentions_time && wants_time),
            RankFeature::AnswersNumber => flag(mentions_number && wants_number),
            RankFeature::MentionsName => flag(mentions_name),
            RankFeature::AnswersName => flag(mentions_name && wants_name),
            RankFeature::DateMatch => entry.turn_meta.day.map_or(0.0, |day| analysis.dates.match_score(day)),
        };
        let weight = |feature: RankFeature| {
            feature.weight(self.mode) * if feature.is_similarity() { 1.0 } else { self.form_weight }
        };
        RankFeature::ALL.into_iter().map(|feature| (feature, weight(feature) * value(feature))).collect()
    }

    fn similarity(&self, ordinal: usize) -> [Option<f32>; 2] {
        let number = |x: f32| (!x.is_nan()).then_some(x);
        self.semantic
            .as_ref()
            .map_or([None; 2], |m| [number(m.chunk_only[ordinal]), number(m.in_context[ordinal])])
    }

    /// The candidates with a score other than 0 and NaN, the best first.
    fn rank_by(&self, score: impl Fn(usize) -> f32) -> Vec<usize> {
        let mut ordinals: Vec<usize> =
            self.candidates.iter().copied().filter(|&o| !score(o).is_nan() && score(o) != 0.0).collect();
        ordinals.sort_by(|&a, &b| score(b).total_cmp(&score(a)).then(a.cmp(&b)));
        ordinals
    }
}

/// The ordinals of the best scores above 0.
fn top_candidates(scores: &[f32]) -> impl Iterator<Item = usize> {
    let mut ordinals: Vec<usize> = (0..scores.len()).filter(|&o| scores[o] > 0.0).collect();
    let best_first = |a: &usize, b: &usize| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b));
    if ordinals.len() > CANDIDATES_PER_FEATURE {
        ordinals.select_nth_unstable_by(CANDIDATES_PER_FEATURE, best_first);
        ordinals.truncate(CANDIDATES_PER_FEATURE);
    }
    ordinals.into_iter()
}

impl SemanticScores {
    fn new(
        index: &RecallIndex,
        dense: &DenseIndex,
        vector: &[f32],
        sample: &[usize],
        candidates: &[usize],
    ) -> Result<Self, VectorError> {
        let rows = index.order.rows();
        let fill = |vectors: &VectorIndex, scores: &mut [f32], ordinal: usize| -> Result<(), VectorError> {
            if scores[ordinal].is_nan() {
                scores[ordinal] = vectors.score(rows[ordinal], vector)?.unwrap_or(f32::NAN);
            }
            Ok(())
        };
        let mut chunk_only = vec![f32::NAN; rows.len()];
        let mut in_context = chunk_only.clone();
        let mut nearby = chunk_only.clone();
        for &ordinal in sample.iter().chain(candidates) {
            fill(&dense.in_context, &mut in_context, ordinal)?;
            let end = (ordinal + CONTEXT_RADIUS + 1).min(rows.len());
            let neighbours = ordinal.saturating_sub(CONTEXT_RADIUS)..end;
            for neighbour in neighbours.clone() {
                fill(&dense.chunk_only, &mut chunk_only, neighbour)?;
            }
            nearby[ordinal] = mean_of_nearest(&chunk_only[neighbours]);
        }
        let stats = [&chunk_only, &in_context, &nearby]
            .map(|scores| MeanDeviation::from_values(sample.iter().map(|&ordinal| scores[ordinal])));
        Ok(Self { chunk_only, in_context, nearby, stats })
    }
}

/// The mean of the [`NEAREST_COUNTED`] largest similarities.
fn mean_of_nearest(similarities: &[f32]) -> f32 {
    let mut nearest: Vec<f32> = similarities.iter().copied().filter(|x| !x.is_nan()).collect();
    nearest.sort_unstable_by(|a, b| b.total_cmp(a));
    nearest.truncate(NEAREST_COUNTED);
    nearest.iter().sum::<f32>() / nearest.len() as f32
}
