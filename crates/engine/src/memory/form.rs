//! A memory is formed by the model that lived it, in the state in which it did: a fork of that state at the end of the range
//! is told to write down what matters, and is thrown away.
//!
//! The instruction stands at the end of the range, and names where it began. A mark before the range would make every token
//! behind it another one: the state would not be the one that lived it. A model that is spoken to in messages keeps no
//! state, so it is shown the marks where they belong.

use super::range::{Span, due, unremembered};
use super::segment::{Rendered, Segment, Shown, push_chunk, render, shown};
use super::{Memory, conflicts, mark_conflicts};
use crate::event::Event;
use crate::session::{Session, messages};
use halo_core::attention::Watch;
use halo_core::seams::{Finish, Flow, Kind, Message, ModelStep, Prompt, Sampling, SeamError, Seen};
use halo_core::token::{ChunkId, Flags, Role, TurnId};
use std::collections::{BTreeMap, BTreeSet};

/// What a memory is to be formed of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// What the model sees, in parts.
    pub segments: Vec<Segment>,
    /// What it said last.
    pub agent_response: String,
    /// What it did in the range: its calls of tools, and what came of each.
    pub agent_operations: Vec<String>,
    /// The first turn of the range.
    pub compress_from: TurnId,
    /// The last.
    pub compress_to: TurnId,
}

/// What the model is told at the end of a range.
#[must_use]
pub fn instruction(span: Span, first: &str, tokens: usize) -> String {
    let (from, to) = (span.from.0, span.to.0);
    let words = tokens * 2 / 3;
    // Short, and in the user's place: small models do nothing else that they are told.
    format!(
        "<memory_formation_end sequence=\"{to}\"/> Summarize what we have said since \
         <memory_formation_start sequence=\"{from}\"/> (“{first}”): names, numbers, what was decided, what is still \
         open, in at most {words} words."
    )
}

/// What the model is told when it looks back over everything.
const REFLECTION: &str = "Look back over our whole conversation: what have you learned about me and what I want, what is \
                          still open, and what would you do differently? Answer in at most 100 words.";

/// No thought of the model's is cut off by what it writes around it.
const STOPS: [&str; 3] = ["<memory", "</memory", "<|im_start|>"];

impl Session {
    /// The range that is to be remembered next, if there is one.
    #[must_use]
    pub fn memory_due(&self) -> Option<Span> {
        let rules = self.memory_rules()?;
        due(&self.timeline, self.formed, &rules).filter(|_| !self.key.is_empty())
    }

    /// Why nothing is to be remembered now, for whoever asks.
    #[must_use]
    pub fn why_none_due(&self) -> String {
        let Some(rules) = self.memory_rules() else {
            return "no memories are formed here: memory.enabled is false, or nothing leaves this window whole \
                    (context.max_tokens is 0, or brightness.strategy takes token by token)"
                .to_owned();
        };
        let waiting: usize = unremembered(&self.timeline, self.formed).iter().map(|(_, tokens)| tokens).sum();
        let since = match self.formed {
            (0, 0) => "so far".to_owned(),
            (turn, _) => format!("since turn {turn}"),
        };
        format!(
            "{waiting} tokens were said {since} that the model has seen and not yet remembered: a memory is formed of \
             {} or more (memory.range_tokens)",
            rules.range
        )
    }

    /// What a memory of a range is formed of.
    ///
    /// # Errors
    /// When the store fails.
    pub fn memory_request(&mut self, span: Span) -> Result<Request, SeamError> {
        let operations = self.operations(span)?;
        let last = self.said().find(|(_, role)| *role == Role::Assistant).map(|(turn, _)| turn);
        let agent_response = last.map(|turn| self.text_of(turn)).transpose()?.unwrap_or_default();
        self.timeline.release_dead();
        Ok(Request {
            segments: self.render().segments,
            agent_response,
            agent_operations: operations,
            compress_from: TurnId(span.from.0),
            compress_to: TurnId(span.to.0),
        })
    }

    /// What the model sees, in parts that know where they come from.
    #[must_use]
    pub fn render(&self) -> Rendered {
        render(&self.prefix, &self.timeline, &self.stands)
    }

    /// Forms the memory of a range. Returns whether something was done; when it was left because somebody wanted something,
    /// it is begun again another time.
    ///
    /// # Errors
    /// When a part fails.
    pub fn form(
        &mut self,
        span: Span,
        wanted: &dyn Fn() -> bool,
        listen: &mut dyn FnMut(Event),
    ) -> Result<bool, SeamError> {
        let Some(rules) = self.memory_rules() else { return Ok(false) };
        let first = self.first_words(span)?;
        let told = instruction(span, &first, rules.tokens);
        let Some(text) = self.think(Some(span), &told, rules.tokens, wanted)? else { return Ok(true) };
        let operations = self.operations(span)?;
        // The place is noted even where nothing came of it: it would be the same the next time.
        self.note_formed((span.to.0, span.to.1 + 1))?;
        if !text.is_empty() {
            let id = self.remember_as(span, false, text, operations)?;
            listen(Event::Memory { id, what: "formed" });
        }
        Ok(true)
    }

    /// Looks back over everything. Returns the memory of it; none when it was left, or nothing came of it.
    ///
    /// # Errors
    /// When a part fails.
    pub fn reflect(&mut self, wanted: &dyn Fn() -> bool) -> Result<Option<u64>, SeamError> {
        let Some(rules) = self.memory_rules() else { return Ok(None) };
        let Some(last) = self.timeline.chunks().next_back().map(|chunk| chunk.id()) else { return Ok(None) };
        let since = self.memories.iter().rev().find(|memory| memory.reflection);
        let from = since.map_or((0, 0), |memory| (memory.span.to.0 + 1, 0));
        let span = Span { from, to: (last.turn.0, last.sentence) };
        match self.think(None, REFLECTION, rules.tokens, wanted)? {
            Some(text) if !text.is_empty() => self.remember_as(span, true, text, Vec::new()).map(Some),
            _ => Ok(None),
        }
    }

    /// How many messages came since it last looked back.
    #[must_use]
    pub fn unreflected(&self) -> usize {
        let since =
            self.memories.iter().rev().find(|memory| memory.reflection).map(|memory| memory.span.to.0);
        self.timeline
            .turns()
            .iter()
            .rev()
            .take_while(|turn| since.is_none_or(|last| turn.id.0 > last))
            .count()
    }

    fn remember_as(
        &mut self,
        span: Span,
        reflection: bool,
        text: String,
        operations: Vec<String>,
    ) -> Result<u64, SeamError> {
        // No two have the same number, nor has one that waits to be forgotten that of another.
        let known = self.store.records(&self.name, Kind::Memory)?;
        let known = known.iter().filter_map(|record| record.key.parse::<u64>().ok());
        let id = known.chain(self.memories.iter().map(|memory| memory.id)).max().unwrap_or(0) + 1;
        let others: Vec<&Memory> = self.memories.iter().collect();
        let conflicts = conflicts(&text, &others);
        let dead = span.chunks(&self.timeline).filter(|chunk| !chunk.is_live()).map(|chunk| chunk.id());
        let memory = Memory {
            id,
            span,
            reflection,
            text,
            model: self.model.info().name.clone(),
            formed: self.timeline.turns().last().map_or(TurnId(0), |turn| turn.id),
            at: jiff::Timestamp::now().as_millisecond(),
            pinned: false,
            resting: false,
            edited: false,
            leaving: false,
            conflicts: conflicts.clone(),
            operations,
            left: dead.collect(),
        };
        self.memories.push(memory);
        self.keep_memory(self.memories.len() - 1)?;
        mark_conflicts(&mut *self.store, &self.name, &mut self.memories, id, &conflicts)?;
        self.show();
        Ok(id)
    }

    /// What the model has to say to an instruction, in a fork of its state at the end of a range, or of its state now; none if
    /// it was left.
    fn think(
        &mut self,
        span: Option<Span>,
        told: &str,
        tokens: usize,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Option<String>, SeamError> {
        // What has left since the range was lived was there then.
        let range: Vec<ChunkId> = match span {
            Some(span) => span.chunks(&self.timeline).map(|chunk| chunk.id()).collect(),
            None => Vec::new(),
        };
        self.store.bring(&self.name, &mut self.timeline, &range)?;
        let last =
            range.last().copied().or_else(|| self.timeline.live_chunks().last().map(|chunk| chunk.id()));
        let asked = [
            self.frame.opening(Role::User, last.map(|chunk| chunk.role), None),
            told.to_owned(),
            self.frame.opening(Role::Assistant, Some(Role::User), None),
        ];
        let mut window = if range.is_empty() { self.window() } else { self.window_until(&range) };
        let after =
            range.last().copied().and_then(|last| self.timeline.chunk(last)).map(|c| c.start().plus(c.len()));
        let mut next = after.unwrap_or_else(|| self.timeline.next_position());
        for (n, text) in asked.iter().enumerate() {
            for piece in self.model.tokenize(text, n != 1)? {
                // Names of what stands behind nothing that was said: the fork is thrown away with them.
                window.push(Seen { position: Some(next), behind: 0, id: piece.id, begins: false });
                next = next.plus(1);
            }
        }
        let sampling = Sampling {
            max_tokens: tokens,
            temperature: 0.0,
            repetition: 1.1,
            stop: STOPS.map(str::to_owned).to_vec(),
            form: None,
            ..self.rules.sampling.clone()
        };
        let Self { model, timeline, frame, key, stands, .. } = self;
        let all = Span { from: (0, 0), to: (u32::MAX, u32::MAX) };
        let span = span.unwrap_or(all);
        let messages = || marked(messages(&frame.system, timeline, stands), timeline, stands, span, told);
        let prompt = Prompt { conversation: key, window: &window, messages: &messages, next, aside: true };
        let mut text = String::new();
        let finish = model.generate(&prompt, &sampling, &Watch::nothing(), &mut |step| {
            if let ModelStep::Token(piece, _) = step {
                text.push_str(&piece.text);
            }
            if wanted() { Flow::Stop } else { Flow::Continue }
        })?;
        self.timeline.release_dead();
        if finish == Finish::Aborted {
            return Ok(None);
        }
        let end = STOPS.iter().filter_map(|stop| text.find(stop)).min().unwrap_or(text.len());
        let text = text[..end].trim();
        // A sentence that was cut off is no sentence.
        let whole = text.rfind(['.', '!', '?']).map_or(text, |end| &text[..=end]);
        Ok(Some(if finish == Finish::Length { whole } else { text }.to_owned()))
    }

    /// What the model saw at the end of a range: what is live up to there, and all of the range.
    fn window_until(&self, range: &[ChunkId]) -> Vec<Seen> {
        let end = range.last().and_then(|&last| self.timeline.chunk(last)).map(|chunk| chunk.start());
        let range: BTreeSet<ChunkId> = range.iter().copied().collect();
        let before =
            |piece: &halo_core::seams::Piece| Seen { position: None, behind: 0, id: piece.id, begins: false };
        let mut window: Vec<Seen> = self.prefix.iter().map(before).collect();
        let mut dead =
            range.iter().filter_map(|&id| self.timeline.chunk(id)).filter(|c| !c.is_live()).peekable();
        for shown in shown(&self.timeline, &self.stands) {
            let at = match &shown {
                Shown::Chunk(chunk) => chunk.start(),
                Shown::Memory(stand) => stand.at,
            };
            while let Some(chunk) = dead.next_if(|chunk| chunk.start() < at) {
                push_chunk(&mut window, chunk, std::iter::once(chunk.run()));
            }
            match shown {
                Shown::Chunk(chunk) if end.is_none_or(|end| chunk.start() <= end) => {
                    push_chunk(&mut window, chunk, chunk.live_runs());
                }
                // A memory of what is shown itself is not.
                Shown::Memory(stand) if range.iter().any(|id| stand.frames.contains(&id.turn)) => {}
                Shown::Memory(stand) if end.is_none_or(|end| stand.at <= end) => window.extend(stand.seen()),
                _ => {}
            }
        }
        dead.for_each(|chunk| push_chunk(&mut window, chunk, std::iter::once(chunk.run())));
        window
    }

    /// The first words of a range, so that it can be told where it began.
    fn first_words(&mut self, span: Span) -> Result<String, SeamError> {
        let first: Vec<ChunkId> = span.chunks(&self.timeline).take(1).map(|chunk| chunk.id()).collect();
        self.store.bring(&self.name, &mut self.timeline, &first)?;
        let text =
            first.first().and_then(|&id| self.timeline.chunk(id)).map(|chunk| chunk.text().into_owned());
        let text = text.unwrap_or_default();
        Ok(text.split_whitespace().take(8).collect::<Vec<_>>().join(" "))
    }

    /// What tools have done in a range, each thing as it was left: the later result of two for the same place counts.
    fn operations(&mut self, span: Span) -> Result<Vec<String>, SeamError> {
        let chunks: Vec<ChunkId> = span.chunks(&self.timeline).map(|chunk| chunk.id()).collect();
        self.store.bring(&self.name, &mut self.timeline, &chunks)?;
        let mut net: BTreeMap<String, (usize, String)> = BTreeMap::new();
        let results = chunks.iter().filter_map(|&id| self.timeline.chunk(id)).flat_map(|chunk| {
            let tokens = chunk.run().positions().filter_map(|position| self.timeline.token(position));
            let result: String = tokens.filter(|t| t.flags.has(Flags::TOOL)).map(|t| t.text).collect();
            result.lines().map(str::to_owned).collect::<Vec<_>>()
        });
        for (n, line) in results.enumerate() {
            // ⚙️【command】→ ✓ place = value
            let Some((_, done)) = line.split_once("✓") else { continue };
            let done = done.trim();
            if !done.is_empty() {
                let place = done.split_once(" = ").map_or(done, |(place, _)| place);
                net.insert(place.to_owned(), (n, done.to_owned()));
            }
        }
        let mut net: Vec<(usize, String)> = net.into_values().collect();
        net.sort();
        Ok(net.into_iter().map(|(_, done)| done).collect())
    }
}

/// Messages with the marks where they belong, up to the end of the range, and the instruction behind it.
fn marked(
    messages: Vec<Message>,
    timeline: &halo_core::timeline::Timeline,
    stands: &[super::stand::Stand],
    span: Span,
    told: &str,
) -> Vec<Message> {
    let mark = |text: String| Message { role: Role::System, text };
    let asks = |text: String| Message { role: Role::User, text };
    // Which turn each message is of, as they were made.
    let mut turns: Vec<Option<TurnId>> = Vec::new();
    for shown in shown(timeline, stands) {
        match shown {
            Shown::Memory(_) => turns.push(None),
            Shown::Chunk(chunk) if turns.last() == Some(&Some(chunk.id().turn)) => {}
            Shown::Chunk(chunk) => turns.push(Some(chunk.id().turn)),
        }
    }
    let mut out: Vec<Message> = Vec::new();
    let instructed = messages.len() - turns.len().min(messages.len());
    let mut began = false;
    for (n, message) in messages.into_iter().enumerate() {
        let turn = n.checked_sub(instructed).and_then(|n| turns[n]);
        if turn.is_some_and(|turn| turn.0 > span.to.0) {
            break;
        }
        if !began && turn.is_some_and(|turn| turn.0 >= span.from.0) {
            began = true;
            out.push(mark(format!("<memory_formation_start sequence=\"{}\"/>", span.from.0)));
        }
        out.push(message);
    }
    out.push(asks(told.to_owned()));
    out
}
