//! The memory of one conversation: its index, the embedder behind it, and the store that both come from.
//!
//! Opening it reads texts and vectors; nothing is embedded then. What has no vector yet is found by its words, and gets
//! one when there is time: [`Recall::embed_some`] takes a bite, keeps it, and says what is left, so that whoever calls
//! can show progress, stop at any time, and go on another day where it was.

use crate::index::{Fetch, Index, Told, View, Wanted};
use crate::rank::{Ask, Found, Mode};
use halo_core::seams::{Embedder, EmbedderInfo, Embedding, Flow, Kind, SeamError, Store};
use halo_core::timeline::Timeline;
use halo_core::token::TurnId;
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A conversation that can be asked what was said.
pub struct Recall {
    conversation: String,
    /// Others may search it meanwhile; only this changes it.
    index: Arc<RwLock<Index>>,
    embedder: Option<(Box<dyn Embedder + Send>, EmbedderInfo)>,
    speakers: BTreeMap<TurnId, String>,
    days: BTreeMap<TurnId, Date>,
}

/// How a search is done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Manner {
    /// By what.
    pub mode: Mode,
    /// How much the user's own words are raised: 1 is not at all.
    pub user_boost: f64,
    /// How much being like what was found already counts against a chunk, from 0 to 1.
    pub diversity: f64,
    /// How many are found.
    pub most: usize,
}

/// How far embedding has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// Vectors that were made now.
    pub made: usize,
    /// Vectors that are still missing.
    pub missing: usize,
}

impl Recall {
    /// Opens the memory of a conversation. An embedder that cannot be loaded is an error, here and not later; without
    /// one, search goes by words.
    ///
    /// # Errors
    /// When the store cannot be read or the embedder not loaded.
    pub fn open(
        store: &mut dyn Store,
        conversation: &str,
        timeline: &Timeline,
        embedder: Option<Box<dyn Embedder + Send>>,
    ) -> Result<Self, SeamError> {
        let embedder = match embedder {
            Some(mut embedder) => {
                let info = embedder.info()?;
                Some((embedder, info))
            }
            None => None,
        };
        let index = Arc::new(RwLock::new(Index::new(embedder.as_ref().map(|(_, info)| info.clone()))));
        let (speakers, days) = (BTreeMap::new(), BTreeMap::new());
        let mut recall = Self { conversation: conversation.to_owned(), index, embedder, speakers, days };
        recall.follow(store, timeline)?;
        if let Some((_, info)) = &recall.embedder {
            for view in View::ALL {
                let kept = store.embeddings(conversation, &view.kept_as(&info.name))?;
                // A vector of other dimensions cannot be of this embedder; it is made again.
                let kept: Vec<Embedding> =
                    kept.into_iter().filter(|e| e.vector.len() == info.dimensions).collect();
                recall.index_mut().admit(view, &kept, timeline).map_err(refused)?;
            }
        }
        Ok(recall)
    }

    /// Becomes the memory of the conversation as it is now. Returns how many chunks were taken in.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn follow(&mut self, store: &mut dyn Store, timeline: &Timeline) -> Result<usize, SeamError> {
        let newest = timeline.turns().last().map(|turn| turn.id);
        if newest.is_some_and(|turn| !self.days.contains_key(&turn)) {
            let known = self.days.last_key_value().map(|(&turn, _)| turn);
            match known {
                // What has come since it was opened was said just now.
                Some(known) => {
                    let today = Timestamp::now().to_zoned(TimeZone::system()).date();
                    let new =
                        timeline.turns().iter().rev().map(|turn| turn.id).take_while(|&turn| turn > known);
                    self.days.extend(new.map(|turn| (turn, today)));
                }
                None => {
                    let zone = TimeZone::system();
                    let day =
                        |at| Timestamp::from_millisecond(at).ok().map(|at| at.to_zoned(zone.clone()).date());
                    let times = store.times(&self.conversation)?;
                    self.days = times.into_iter().filter_map(|(turn, at)| Some((turn, day(at)?))).collect();
                    self.speakers = speakers(store, &self.conversation)?;
                }
            }
        }
        let told = |turn: TurnId| Told {
            speaker: self.speakers.get(&turn).cloned(),
            day: self.days.get(&turn).copied(),
        };
        let conversation = self.conversation.clone();
        let fetch: &mut Fetch<'_> = &mut |chunks| store.fetch(&conversation, chunks);
        self.index_mut().follow(timeline, &told, fetch)
    }

    /// The day on which a turn began, if it is known.
    #[must_use]
    pub fn day(&self, turn: TurnId) -> Option<Date> {
        self.days.get(&turn).copied()
    }

    /// The index itself.
    pub fn index(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn index_mut(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The index, for those who search while the conversation goes on.
    #[must_use]
    pub fn shared(&self) -> Arc<RwLock<Index>> {
        Arc::clone(&self.index)
    }

    /// Whether there is an embedder.
    #[must_use]
    pub fn has_meaning(&self) -> bool {
        self.embedder.is_some()
    }

    /// Makes the vectors of up to `most` chunks, and keeps them. `listen` hears of each text, and can stop it: then
    /// those that were made are kept.
    ///
    /// # Errors
    /// When the embedder fails or the store cannot be written; what was kept before stays.
    pub fn embed_some(
        &mut self,
        store: &mut dyn Store,
        timeline: &Timeline,
        most: usize,
        listen: &mut dyn FnMut(usize) -> Flow,
    ) -> Result<Left, SeamError> {
        let Some((embedder, info)) = &mut self.embedder else { return Ok(Left { made: 0, missing: 0 }) };
        let index = || self.index.write().unwrap_or_else(PoisonError::into_inner);
        let wanted = index().wanted(timeline, most);
        let texts = wanted.iter().map(|w| format!("{}{}", info.passage, w.text)).collect();
        let mut made: [Vec<Embedding>; 2] = [Vec::new(), Vec::new()];
        let done = embedder.embed_behind(texts, &mut |number, vector| {
            let Wanted { of, targets, .. } = &wanted[number];
            for &(view, chunk) in targets {
                made[view as usize].push(Embedding { chunk, of: *of, vector: vector.clone() });
            }
            listen(targets.len())
        });
        let mut count = 0;
        for (view, made) in View::ALL.into_iter().zip(&made) {
            store.put_embeddings(&self.conversation, &view.kept_as(&info.name), made)?;
            count += index().admit(view, made, timeline).map_err(refused)?;
        }
        done?;
        Ok(Left { made: count, missing: self.index().missing() })
    }

    /// What answers a query best, the best first.
    ///
    /// # Errors
    /// When the embedder fails.
    pub fn search(
        &mut self,
        text: &str,
        today: Option<Date>,
        manner: Manner,
    ) -> Result<Vec<Found>, SeamError> {
        let embedder = self.embedder.as_mut().map(|(embedder, _)| &mut **embedder as &mut dyn Embedder);
        search(&self.index, embedder, text, today, manner)
    }
}

/// Asks an index, and the embedder that it was made with: what answers a query best, the best first. The index is held
/// only while it is looked through, not while the query is turned into a vector.
///
/// # Errors
/// When the embedder fails.
pub fn search(
    index: &RwLock<Index>,
    embedder: Option<&mut dyn Embedder>,
    text: &str,
    today: Option<Date>,
    manner: Manner,
) -> Result<Vec<Found>, SeamError> {
    let Manner { mode, user_boost, diversity, most } = manner;
    let vector = match embedder.filter(|_| mode != Mode::Lexical) {
        Some(embedder) => {
            let query = embedder.info()?.query;
            embedder.embed(&[&format!("{query}{text}")])?.pop()
        }
        None => None,
    };
    let ask = Ask { text, vector: vector.as_deref(), today, mode, user_boost, diversity, most };
    index.read().unwrap_or_else(PoisonError::into_inner).search(&ask).map_err(refused)
}

/// Who spoke, by turn, where names were told.
fn speakers(store: &mut dyn Store, conversation: &str) -> Result<BTreeMap<TurnId, String>, SeamError> {
    let records = store.records(conversation, Kind::Setting)?;
    let Some(record) = records.into_iter().find(|record| record.key == "speakers") else {
        return Ok(BTreeMap::new());
    };
    // Somebody else's mistake in this must not keep anyone from searching.
    let names: BTreeMap<String, String> = serde_json::from_str(&record.value).unwrap_or_default();
    Ok(names.into_iter().filter_map(|(turn, name)| Some((TurnId(turn.parse().ok()?), name))).collect())
}

fn refused(error: crate::vectors::Refused) -> SeamError {
    SeamError::new("comparing vectors", format!("{error}; another embedder made it, or it was damaged"))
}
