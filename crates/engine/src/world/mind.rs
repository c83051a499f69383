//! What thinks for agents: a model that is shown a HUD and answers.
//!
//! Each piece of a HUD has a place of its own in the model's memory, and what agents of a kind are told is the same for all of
//! them: a heartbeat reads what is new since the agent's last one, and nothing else. What belongs to other agents leaves the
//! memory meanwhile and comes back as it was.

use halo_agents::count::Count;
use halo_agents::format::{LAST, Part, Place};
use halo_agents::scribe::{Scribe, Shown};
use halo_agents::world::AgentId;
use halo_core::attention::Watch;
use halo_core::seams::{
    Finish, Flow, Form, Message, Model, ModelStep, Prompt, Sampling, SeamError, Seen, Upkeep,
};
use halo_core::token::{Position, Role};
use std::sync::{Arc, Mutex, PoisonError};

/// A model that thinks for agents.
pub struct Mind {
    model: Box<dyn Model + Send>,
    /// Writes HUDs, and counts as the model does.
    pub scribe: Arc<Scribe>,
    /// How answers are drawn.
    pub sampling: Sampling,
    /// Whether answers are held to their form as they are drawn.
    pub held: bool,
}

/// How many tokens of a model's context are kept for what stands around a HUD.
const AROUND: usize = 64;

/// What came of a heartbeat's thinking.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thought {
    /// What was answered.
    pub text: String,
    /// Whether it was cut off there.
    pub cut: bool,
    /// Tokens of what was shown.
    pub shown: usize,
    /// Those of it that had to be read now.
    pub read: usize,
    /// Tokens of the answer.
    pub answered: usize,
    /// What the model's memory had to do.
    pub upkeep: Upkeep,
}

/// A model's own way of counting.
pub struct ModelCount(Mutex<Box<dyn Model + Send>>);

impl ModelCount {
    /// Counts as a model does, which cuts texts without being asked over a wire.
    #[must_use]
    pub fn new(model: Box<dyn Model + Send>) -> Self {
        Self(Mutex::new(model))
    }
}

impl Count for ModelCount {
    fn tokens(&self, text: &str) -> usize {
        let mut model = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Who cannot be asked is guessed, and rather too much than too little.
        model.count(text).unwrap_or(text.len())
    }
}

impl Mind {
    /// A model, and how its tokens are counted.
    #[must_use]
    pub fn new(model: Box<dyn Model + Send>, count: Arc<dyn Count>, sampling: Sampling, held: bool) -> Self {
        Self { model, scribe: Arc::new(Scribe::new(count)), sampling, held }
    }

    /// How many tokens a HUD may have: what the model holds, less an answer.
    #[must_use]
    pub fn room(&self) -> usize {
        let context = self.model.info().context;
        context.saturating_sub(AROUND + self.sampling.max_tokens.min(context / 4))
    }

    /// What ends its thinking from elsewhere, where that can be.
    #[must_use]
    pub fn breaker(&self) -> Option<halo_core::seams::Breaker> {
        self.model.breaker()
    }

    /// Thinks. `world` is what the model keeps it by. None when `listen` stopped it.
    ///
    /// # Errors
    /// When the model fails.
    pub fn think(
        &mut self,
        world: &str,
        who: AgentId,
        shown: &Shown,
        form: Option<Form>,
        listen: &mut dyn FnMut() -> Flow,
    ) -> Result<Option<Thought>, SeamError> {
        let window = self.window(who, shown)?;
        let messages = || vec![Message { role: Role::User, text: shown.text() }];
        let next = Position(1 << 47);
        let prompt =
            |aside| Prompt { conversation: world, window: &window, messages: &messages, next, aside };
        let mut thought = Thought { shown: window.len(), ..Thought::default() };
        // First it reads, and keeps that; then it answers aside, and keeps nothing.
        let mut stopped = false;
        let end = self.model.read_in(&prompt(false), &mut |step| {
            if let ModelStep::Ready(upkeep) = step {
                thought.upkeep = upkeep;
            }
            let flow = listen();
            stopped |= flow == Flow::Stop;
            flow
        })?;
        if stopped || end == Finish::Aborted {
            return Ok(None);
        }
        let sampling = Sampling { form: form.filter(|_| self.held), ..self.sampling.clone() };
        let end = self.model.generate(&prompt(true), &sampling, &Watch::nothing(), &mut |step| {
            if let ModelStep::Token(piece, _) = step {
                thought.text.push_str(&piece.text);
                thought.answered += 1;
            }
            listen()
        })?;
        thought.cut = end == Finish::Length;
        thought.read = thought.upkeep.read + thought.upkeep.reread;
        Ok((end != Finish::Aborted).then_some(thought))
    }

    /// A HUD as the model's window: piece by piece, each at its place.
    fn window(&mut self, who: AgentId, shown: &Shown) -> Result<Vec<Seen>, SeamError> {
        let template = self.model.info().template.clone();
        let before = format!("{}{}", template.start, template.user.before);
        let behind = format!("{}{}", template.user.after, template.assistant.before);
        let mut window: Vec<Seen> = Vec::with_capacity(shown.spent.total + AROUND);
        let mut put = |place: u64, pieces: Vec<halo_core::seams::Piece>| {
            for (n, piece) in pieces.into_iter().enumerate() {
                let behind = u16::try_from(n + 1).unwrap_or(u16::MAX);
                window.push(Seen { position: Some(Position(place)), behind, id: piece.id, begins: n == 0 });
            }
        };
        for piece in &shown.pieces {
            let place = match piece.place.part {
                // The same for all who are told the same.
                Part::Shared => SHARED + xxhash_rust::xxh3::xxh3_64(piece.text.as_bytes()) % (OWN - SHARED),
                _ => place(who, piece.place),
            };
            if piece.place.part == Part::Shared {
                put(0, self.model.tokenize(&before, true)?);
            }
            put(place, self.model.tokenize(&piece.text, false)?);
        }
        put(place(who, Place { part: Part::End, item: LAST }), self.model.tokenize(&behind, true)?);
        let name = |seen: &Seen| (seen.position, seen.behind);
        if !window.windows(2).all(|pair| name(&pair[0]) < name(&pair[1])) {
            // So much has happened that places run out: it is read as it stands.
            for (n, seen) in window.iter_mut().enumerate() {
                (seen.position, seen.behind) = (Some(Position(n as u64)), 0);
            }
        }
        Ok(window)
    }
}

/// Where places begin that all agents share, and those of the first agent.
const SHARED: u64 = 1;
const OWN: u64 = 1 << 36;

/// Where a piece stands in the memory: agents one behind the other, and in each its own, its rooms, and the end.
fn place(who: AgentId, place: Place) -> u64 {
    let part = match place.part {
        Part::Shared | Part::Own => 0,
        Part::Room(room) => u64::from(room.0) + 1,
        Part::End => 0xfff,
    };
    (u64::from(who.0) << 36) | (part << 24) | place.item.min(LAST)
}
