//! An answer while it is spoken: each token is placed, stored, and scored by what it looked at.

use crate::event::Event;
use halo_core::attention::{AttentionStats, Fault, is_traced};
use halo_core::change::{Append, Change, Extent, NewToken, Tally};
use halo_core::chunk::{Chunker, Placed};
use halo_core::replay::Rules;
use halo_core::scorer::Scorer;
use halo_core::seams::{Durability, Look, Piece, SeamError, Store};
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, Flags, Position, Role, Source, TurnId, Voice};

/// An answer while it is spoken.
pub(crate) struct Speech {
    turn: TurnId,
    chunker: Chunker,
    scorer: Scorer,
    birth: Brightness,
    /// Whether a head's largest value counts, and not the mean of heads.
    largest: bool,
    rules: Rules,
    prefix: usize,
    /// The shape of what was looked at, every so many tokens.
    pub traces: Vec<(u64, AttentionStats)>,
    result_birth: Brightness,
    /// Tokens so far, and what they say.
    pub tokens: usize,
    pub said: String,
    votes: usize,
    faults: u64,
    first_fault: Option<String>,
}

impl Speech {
    /// The answer that the last turn of the timeline is to hold, behind `prefix` tokens of standing instructions.
    pub fn new(timeline: &Timeline, prefix: usize, rules: &Rules, largest: bool) -> Self {
        let strategy = &rules.strategy;
        let turn = timeline.turns().last().map_or(TurnId(0), |turn| turn.id);
        let positions = timeline.turn_chunks(turn).flat_map(|chunk| chunk.run().positions());
        let tokens = positions.filter_map(|position| timeline.token(position));
        let said = tokens.filter(|token| !token.flags.has(Flags::FRAME));
        let said = said.map(|token| (token.chunk.sentence, token.text, token.flags.has(Flags::TOOL)));
        Self {
            turn,
            chunker: Chunker::resume(rules.chunks, said, timeline.next_sentence(turn)),
            scorer: Scorer::new(strategy.clone(), timeline.view(prefix), Some(turn)),
            birth: strategy.birth(Source::Llm),
            result_birth: strategy.birth(Source::Tool),
            largest,
            rules: rules.clone(),
            prefix,
            traces: Vec::new(),
            tokens: 0,
            said: String::new(),
            votes: 0,
            faults: 0,
            first_fault: None,
        }
    }

    /// A row of the window's own attention, as it is read.
    pub fn prompt(&mut self, look: Look<'_>) {
        let row = self.row(look);
        if let Err(fault) = self.scorer.observe_prompt(row) {
            self.fault(&fault);
        }
    }

    /// The next token, on the timeline, in the store, and scored. In v0, others leave for it.
    pub fn token(
        &mut self,
        piece: &Piece,
        look: Option<Look<'_>>,
        conversation: &str,
        timeline: &mut Timeline,
        store: &mut dyn Store,
    ) -> Result<Vec<Event>, SeamError> {
        let placed = self.chunker.push(&piece.text);
        let at = timeline.next_position();
        let mut events = vec![self.place(piece, placed, Voice::Speaker, conversation, timeline, store)?];
        self.said.push_str(&piece.text);
        let row = look.map(|look| self.row(look));
        if is_traced(self.tokens as u64, self.rules.trace_interval) {
            self.traces.extend(row.and_then(AttentionStats::of).map(|stats| (self.tokens as u64, stats)));
        }
        self.tokens += 1;
        match self.scorer.observe(row) {
            Ok(observed) => self.votes += observed.votes,
            // A model without attention has none at any step: that is told once, where it is chosen.
            Err(Fault::Missing) => {}
            Err(fault) => self.fault(&fault),
        }
        let (rules, prefix) = (&self.rules, self.prefix);
        if let Some(culled) = self.scorer.cull(|p| p != at && rules.may_cull(timeline, prefix, p)) {
            store.transact(conversation, timeline, &culled, Durability::Behind)?;
            events.extend(culled.parts().into_iter().flat_map(left));
        }
        Ok(events)
    }

    /// The next token of a tool's result, which stays with its call.
    pub fn result(
        &mut self,
        piece: &Piece,
        conversation: &str,
        timeline: &mut Timeline,
        store: &mut dyn Store,
    ) -> Result<Event, SeamError> {
        let placed = self.chunker.push_result();
        self.place(piece, placed, Voice::Tool, conversation, timeline, store)
    }

    fn place(
        &mut self,
        piece: &Piece,
        placed: Placed,
        voice: Voice,
        conversation: &str,
        timeline: &mut Timeline,
        store: &mut dyn Store,
    ) -> Result<Event, SeamError> {
        let at = timeline.next_position();
        // The token that is one too many is not on the timeline yet; those that move with it are.
        let tail = placed.moved.map_or(0, |moved| u64::from(moved) - 1);
        let cut = (tail > 0).then(|| Position(at.0 - tail));
        let chunk = ChunkId::new(Role::Assistant, self.turn, placed.sentence);
        let brightness = if voice == Voice::Tool { self.result_birth } else { self.birth };
        let (id, text, sentence) = (piece.id, piece.text.clone(), chunk.sentence);
        let token = NewToken { id, text, sentence, brightness, voice };
        let append =
            Change::Append(Append { at, turn: self.turn, role: Role::Assistant, tokens: vec![token] });
        let change = match cut.and_then(|cut| Some((cut, timeline.chunk_of(cut)?.id()))) {
            None => append,
            Some((cut, long)) => {
                let tally = Tally::default();
                let split = Change::Split { chunk: long, at: cut, sentence: chunk.sentence, tally };
                Change::Batch(vec![split, append])
            }
        };
        store.transact(conversation, timeline, &change, Durability::Behind)?;
        if let Some(cut) = cut {
            self.scorer.split(cut, chunk);
        }
        self.scorer.push(chunk, at, brightness);
        Ok(Event::Token { chunk, position: at, text: piece.text.clone() })
    }

    /// What it has taught, as a change and in figures.
    pub fn end(self) -> (Change, Event) {
        let faults = self.first_fault.map(|why| (self.faults, why));
        let (steps, mean) = (self.scorer.steps(), self.scorer.mean());
        (self.scorer.finish(), Event::Scored { steps, votes: self.votes, mean, faults })
    }

    /// What counts of a look.
    pub fn row<'a>(&self, look: Look<'a>) -> &'a [f32] {
        if self.largest && !look.max.is_empty() { look.max } else { look.mean }
    }

    fn fault(&mut self, fault: &Fault) {
        self.faults += 1;
        self.first_fault.get_or_insert_with(|| fault.to_string());
    }
}

/// What left by a change, one by one.
fn left(change: &Change) -> Vec<Event> {
    let Change::Prune(leaves) = change else { return Vec::new() };
    let tokens = |extent: &Extent| match extent {
        Extent::Runs(runs) => runs.iter().map(|run| run.len as usize).sum(),
        Extent::Whole => 0,
    };
    let event = |l: &halo_core::change::Leave| Event::Left {
        chunk: l.chunk,
        tokens: tokens(&l.extent),
        why: l.why.to_string(),
    };
    leaves.iter().map(event).collect()
}
