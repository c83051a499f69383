//! Reads an answer as a client gets it: without stop sequences, and split into reasoning, text and calls.

use super::call_gate::CallGate;
use super::chat_request::ParsedChatRequest;
use crate::stop_sequences::StopSequenceFilter;
use halo_core::answer_parser::{AnswerDelta, AnswerMarkers, AnswerParser, AnswerParts};
use halo_core::model::{ChatTemplate, FinishReason, OutputConstraint};
use halo_engine::chat_format::AnswerOpening;

/// Reads the tokens of an answer.
pub(super) struct AnswerReader {
    filter: StopSequenceFilter,
    parser: AnswerParser,
    /// Where calls are checked.
    gate: Option<CallGate>,
    answer: AnswerParts,
    reasoning_tokens: usize,
}

impl AnswerReader {
    pub fn new(request: &ParsedChatRequest, template: &ChatTemplate) -> Self {
        let opening = AnswerOpening::new(
            template,
            &request.sampling,
            request.skip_reasoning,
            !request.prefill.is_empty(),
        );
        let options = match &request.sampling.constraint {
            Some(OutputConstraint::ToolCalls(options)) => Some(options),
            _ => None,
        };
        let markers = AnswerMarkers {
            reasoning: template.reasoning.clone(),
            starts_in_reasoning: opening == AnswerOpening::Reasoning,
            calls: options.map(|options| options.format.clone()),
            functions: options.map(|options| options.allowed().map(|tool| tool.name.clone()).collect()),
        };
        Self {
            filter: StopSequenceFilter::new(&request.sampling.stop),
            parser: AnswerParser::new(markers),
            gate: options.and_then(|options| CallGate::new(options)),
            answer: AnswerParts::default(),
            reasoning_tokens: 0,
        }
    }

    /// Whether the answer has all that it may have: its only call, whose last token was read, or calls after which something else
    /// begins.
    pub fn is_complete(&self) -> bool {
        let Some(gate) = &self.gate else { return false };
        let has_only_call = gate.is_satisfied() && (self.parser.is_call_closed() || self.parser.calls() > 1);
        has_only_call || (gate.calls() > 0 && self.parser.are_calls_over())
    }

    /// What a token adds.
    pub fn push(&mut self, token: &str) -> Vec<AnswerDelta> {
        let text = self.filter.push(token);
        let deltas = self.parser.push(&text);
        self.reasoning_tokens += usize::from(matches!(deltas.as_slice(), [AnswerDelta::Reasoning(_), ..]));
        self.collect(deltas)
    }

    /// How many tokens were reasoning, without its markers.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// What is left at the end.
    pub fn finish(&mut self) -> Vec<AnswerDelta> {
        let filter = std::mem::replace(&mut self.filter, StopSequenceFilter::new(&[]));
        let mut deltas = self.parser.push(&filter.finish());
        deltas.extend(self.parser.finish());
        let mut deltas = self.collect(deltas);
        let held = self.gate.as_mut().map_or_else(Vec::new, CallGate::release);
        held.iter().cloned().for_each(|delta| self.answer.push(delta));
        deltas.extend(held);
        deltas
    }

    pub fn answer(self) -> AnswerParts {
        self.answer
    }

    fn collect(&mut self, deltas: Vec<AnswerDelta>) -> Vec<AnswerDelta> {
        let deltas = match &mut self.gate {
            Some(gate) => gate.push(deltas),
            None => deltas,
        };
        deltas.iter().cloned().for_each(|delta| self.answer.push(delta));
        deltas
    }
}

/// OpenAI's finish reason of an answer with so many calls.
pub(super) fn finish_name(finish: FinishReason, calls: usize, legacy: bool) -> &'static str {
    match (finish, calls) {
        (FinishReason::Length, _) => "length",
        (_, 0) => "stop",
        (_, _) if legacy => "function_call",
        (_, _) => "tool_calls",
    }
}
