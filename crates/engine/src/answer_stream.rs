//! An answer while it is generated: each token is assigned to a chunk, committed, and scored by its attention.

use crate::conversation::Conversation;
use crate::event::{ATTENTION_INTERVAL, Event};
use crate::reasoning::{ReasoningStep, ReasoningTracker};
use halo_core::Error;
use halo_core::attention::{AttentionError, AttentionStats, is_traced};
use halo_core::change::{Append, AttentionTally, Change, Extent, NewToken, Pruned};
use halo_core::chunker::{ChunkAssignment, Chunker};
use halo_core::model::{AttentionRow, ModelToken};
use halo_core::rules::ContextRules;
use halo_core::scorer::Scorer;
use halo_core::store::Durability;
use halo_core::timeline::Timeline;
use halo_core::token::{Brightness, ChunkId, ContentKind, Position, Role, TokenFlags, TokenSource, TurnId};
use halo_core::tool_call::ReasoningFormat;
use std::time::Instant;

/// The most tokens of one [`Event::Attention`].
const MAX_FOCUSED_TOKENS: usize = 24;

/// An answer while it is generated.
pub(crate) struct AnswerStream {
    turn: TurnId,
    chunker: Chunker,
    scorer: Scorer,
    initial_brightness: Brightness,
    /// Whether the maximum over heads counts, and not the mean.
    use_max_head: bool,
    rules: ContextRules,
    system_len: usize,
    /// Statistics of the attention rows, at the trace interval.
    pub traces: Vec<(u64, AttentionStats)>,
    /// The next row is traced: that of the token at the interval, or the first one behind it.
    trace_due: bool,
    tool_brightness: Brightness,
    pub tokens: usize,
    pub text: String,
    reasoning: Option<ReasoningTracker>,
    /// The index of the last chunk of the reasoning, once it is complete.
    pub reasoning_end: Option<u32>,
    votes: usize,
    last_attention_event: Option<Instant>,
    attention_errors: u64,
    first_attention_error: Option<String>,
}

impl AnswerStream {
    /// Continues the last turn of the timeline; `system_len` is the number of tokens of the system prompt.
    pub fn new(
        timeline: &Timeline,
        system_len: usize,
        rules: &ContextRules,
        use_max_head: bool,
        reasoning: Option<ReasoningFormat>,
    ) -> Self {
        let strategy = &rules.strategy;
        let turn = timeline.turns().last().map_or(TurnId(0), |turn| turn.id);
        let positions = timeline.turn_chunks(turn).flat_map(|chunk| chunk.run().positions());
        let tokens = positions.filter_map(|position| timeline.token(position));
        let message = tokens
            .filter(|token| !token.flags.contains(TokenFlags::TEMPLATE))
            .map(|token| (token.chunk.index, token.text, token.flags.contains(TokenFlags::TOOL_RESULT)));
        Self {
            turn,
            chunker: Chunker::resume(rules.chunks, message, timeline.next_chunk_index(turn)),
            scorer: Scorer::new(strategy.clone(), timeline.context_window(system_len), Some(turn)),
            initial_brightness: strategy.initial_brightness(TokenSource::Llm),
            tool_brightness: strategy.initial_brightness(TokenSource::Tool),
            use_max_head,
            rules: rules.clone(),
            system_len,
            traces: Vec::new(),
            trace_due: false,
            tokens: 0,
            text: String::new(),
            reasoning: reasoning.map(|format| ReasoningTracker::new(format, timeline, turn)),
            reasoning_end: None,
            votes: 0,
            last_attention_event: None,
            attention_errors: 0,
            first_attention_error: None,
        }
    }

    /// Scores an attention row of the prefill.
    pub fn score_prompt_row(&mut self, row: AttentionRow<'_>) {
        let row = self.select_row(row);
        if let Err(error) = self.scorer.observe_prompt(row) {
            self.count_attention_error(&error);
        }
    }

    /// Commits and scores the next token. The TTL strategy prunes other tokens for it.
    pub fn push_token(
        &mut self,
        token: &ModelToken,
        row: Option<AttentionRow<'_>>,
        conversation: &mut Conversation,
    ) -> Result<Vec<Event>, Error> {
        let assignment = self.chunker.push(&token.text);
        let at = conversation.timeline().next_position();
        let mut events = vec![self.append_token(token, assignment, ContentKind::Message, conversation)?];
        self.text.push_str(&token.text);
        let step = self.reasoning.as_mut().map(|reasoning| reasoning.push(&token.text, at));
        match step.unwrap_or(ReasoningStep::None) {
            ReasoningStep::None => {}
            ReasoningStep::Begin(first) => self.split_header(first, conversation)?,
            ReasoningStep::End => {
                self.reasoning_end = Some(self.chunker.chunk_index()).filter(|&index| index > 0);
                self.chunker.close_chunk();
            }
        }
        // A step in which the model was not sure of its token does not count, where the rules say so.
        let counts = row.is_none_or(|row| self.rules.strategy.scores_step(row.probability));
        let row = row.map(|row| self.select_row(row));
        self.trace_due |= is_traced(self.tokens as u64, self.rules.trace_interval);
        if let Some(row) = row.filter(|_| std::mem::take(&mut self.trace_due)) {
            self.traces.extend(AttentionStats::from_row(row).map(|stats| (self.tokens as u64, stats)));
        }
        self.tokens += 1;
        match self.scorer.observe(row.filter(|_| counts)) {
            Ok(observed) => self.votes += observed.votes,
            // A model without attention has none at any step: the user was told when it was chosen.
            Err(AttentionError::Missing) => {}
            Err(error) => self.count_attention_error(&error),
        }
        events.extend(row.and_then(|row| self.attention_event(at, row)));
        let (rules, system_len, timeline) = (&self.rules, self.system_len, conversation.timeline());
        if let Some(culled) = self.scorer.cull(|p| p != at && rules.may_cull(timeline, system_len, p)) {
            conversation.commit(&culled, Durability::Deferred)?;
            events.extend(pruned_events(&culled));
        }
        Ok(events)
    }

    /// Moves the reasoning, which begins at a position, from the chunk of the header to a chunk of its own.
    fn split_header(&mut self, first: Position, conversation: &mut Conversation) -> Result<(), Error> {
        let header = conversation.timeline().chunk_of(first).filter(|chunk| chunk.start() < first);
        let Some(chunk) = header.map(|chunk| chunk.id()) else { return Ok(()) };
        let tail_index = self.chunker.move_open_chunk();
        let tally = AttentionTally::default();
        conversation.commit(&Change::Split { chunk, at: first, tail_index, tally }, Durability::Deferred)?;
        self.scorer.split_chunk(first, ChunkId { index: tail_index, ..chunk });
        Ok(())
    }

    /// Where the attention of a token lies, unless the last such event was sent a moment ago.
    fn attention_event(&mut self, position: Position, row: &[f32]) -> Option<Event> {
        let now = Instant::now();
        if self.last_attention_event.is_some_and(|last| now.duration_since(last) < ATTENTION_INTERVAL) {
            return None;
        }
        let focus = self.scorer.focus(row, MAX_FOCUSED_TOKENS)?;
        self.last_attention_event = Some(now);
        Some(Event::Attention { position, focus })
    }

    /// Commits the next token of a tool result, in the chunk of its call.
    pub fn push_tool_token(
        &mut self,
        token: &ModelToken,
        conversation: &mut Conversation,
    ) -> Result<Event, Error> {
        let assignment = self.chunker.push_result();
        self.append_token(token, assignment, ContentKind::ToolResult, conversation)
    }

    fn append_token(
        &mut self,
        token: &ModelToken,
        assignment: ChunkAssignment,
        kind: ContentKind,
        conversation: &mut Conversation,
    ) -> Result<Event, Error> {
        let timeline = conversation.timeline();
        let at = timeline.next_position();
        // A chunk that grew too long is split: its last tokens move to a new chunk with this one, which is not on the
        // timeline yet.
        let moved = assignment.moved_tokens.map_or(0, |moved| u64::from(moved) - 1);
        let cut = (moved > 0).then(|| Position(at.0 - moved));
        let chunk = ChunkId::new(Role::Assistant, self.turn, assignment.chunk_index);
        let brightness =
            if kind == ContentKind::ToolResult { self.tool_brightness } else { self.initial_brightness };
        let (id, text, chunk_index) = (token.id, token.text.clone(), chunk.index);
        let new_token = NewToken { id, text, chunk_index, brightness, kind };
        let append =
            Change::Append(Append { at, turn: self.turn, role: Role::Assistant, tokens: vec![new_token] });
        let change = match cut.and_then(|cut| Some((cut, timeline.chunk_of(cut)?.id()))) {
            None => append,
            Some((cut, long)) => {
                let tally = AttentionTally::default();
                let split = Change::Split { chunk: long, at: cut, tail_index: chunk.index, tally };
                Change::Batch(vec![split, append])
            }
        };
        conversation.commit(&change, Durability::Deferred)?;
        if let Some(cut) = cut {
            self.scorer.split_chunk(cut, chunk);
        }
        self.scorer.push(chunk, at, brightness);
        Ok(Event::Token { chunk, position: at, text: token.text.clone() })
    }

    /// The scores as a change, and the event with their figures.
    pub fn finish(self) -> (Change, Event) {
        let errors = self.first_attention_error.map(|first| (self.attention_errors, first));
        let (steps, mean) = (self.scorer.steps(), self.scorer.mean());
        (self.scorer.finish(), Event::Scored { steps, votes: self.votes, mean, errors })
    }

    /// The row that is scored: the maximum over heads or the mean.
    pub fn select_row<'a>(&self, row: AttentionRow<'a>) -> &'a [f32] {
        if self.use_max_head && !row.max.is_empty() { row.max } else { row.mean }
    }

    fn count_attention_error(&mut self, error: &AttentionError) {
        self.attention_errors += 1;
        self.first_attention_error.get_or_insert_with(|| error.to_string());
    }
}

/// The events of tokens that TTL scoring culls.
pub(crate) fn pruned_events(culled: &Change) -> Vec<Event> {
    let tokens = |extent: &Extent| match extent {
        Extent::Runs(runs) => runs.iter().map(|run| run.len as usize).sum(),
        Extent::Whole => 0,
    };
    let event = |pruned: &Pruned| Event::Pruned {
        chunk: pruned.chunk,
        tokens: tokens(&pruned.extent),
        reason: pruned.reason.to_string(),
    };
    let prunes = culled.flatten().into_iter().filter_map(|change| match change {
        Change::Prune(pruned) => Some(pruned),
        _ => None,
    });
    prunes.flatten().map(event).collect()
}
