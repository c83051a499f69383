//! The body of a chat request, and its checks.

use super::protocol::SamplingParams;
use super::reasoning_params::ReasoningParams;
use super::tools::{ToolParams, is_function_name};
use crate::app::App;
use crate::client_address::ClientNetwork;
use crate::error::{ApiResult, ErrorResponse};
use crate::sampling::{LogprobBuffer, RequestedParameters, RequestedSampling};
use halo_core::model::{ChatTemplate, OutputConstraint, Sampling};
use halo_core::token::Role;
use halo_core::tool_call::{CallFormat, FunctionCall, ToolDefinition};
use halo_engine::align::SentMessage;
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
#[serde(expecting = "an object with messages")]
pub(super) struct OpenAiChatRequest {
    messages: Vec<OpenAiChatMessage>,
    #[serde(flatten)]
    reasoning: ReasoningParams,
    /// OpenAI's parameter; with `false` nothing is stored.
    pub store: Option<bool>,
    #[serde(flatten)]
    pub tools: ToolParams,
    #[serde(flatten)]
    pub params: SamplingParams,
}

#[derive(Deserialize)]
#[serde(expecting = "an object with role and content")]
struct OpenAiChatMessage {
    role: String,
    content: Option<OpenAiChatContent>,
    tool_calls: Option<Vec<OpenAiToolCall>>,
    /// The old form of `tool_calls`.
    function_call: Option<OpenAiFunctionCall>,
    tool_call_id: Option<String>,
    /// The speaker, or the function of a result.
    name: Option<String>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object with id, type and function")]
struct OpenAiToolCall {
    id: Option<String>,
    function: OpenAiFunctionCall,
}

#[derive(Deserialize)]
#[serde(expecting = "an object with name and arguments")]
struct OpenAiFunctionCall {
    name: String,
    arguments: Option<Value>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "content must be a text, or a list of parts with type and text")]
enum OpenAiChatContent {
    Text(String),
    Parts(Vec<OpenAiContentPart>),
}

#[derive(Deserialize)]
struct OpenAiContentPart {
    r#type: String,
    text: Option<String>,
}

/// A chat request after its checks.
#[derive(Clone, Default)]
pub(super) struct ParsedChatRequest {
    pub system: Option<String>,
    /// Ends with the message to answer, or with the results of functions.
    pub messages: Vec<SentMessage>,
    /// System messages after the last message: they apply to the next answer.
    pub trailing_system: Vec<SentMessage>,
    /// The beginning of the answer, which the client has written and the model continues.
    pub prefill: String,
    /// The functions that the model may call.
    pub tools: Vec<ToolDefinition>,
    /// Whether the client wants no reasoning.
    pub skip_reasoning: bool,
    pub sampling: Sampling,
    /// The sampling parameters that the request names.
    pub parameters: RequestedParameters,
    pub choice_count: usize,
    /// Who may stop the answer.
    pub client: ClientNetwork,
    /// The log-probabilities of the answer.
    pub logprobs: LogprobBuffer,
    /// The conversation whose model and system prompt an answer has that is not stored; none: those of the settings.
    pub answers_as: Option<String>,
}

/// What a chat request is parsed with.
pub(super) struct ChatParseContext {
    /// The sampling of the settings.
    pub sampling: Sampling,
    max_messages: usize,
    template: ChatTemplate,
}

impl ChatParseContext {
    pub fn new(app: &App) -> Self {
        Self {
            sampling: app.backend.rules().sampling,
            max_messages: app.limits.max_messages,
            template: app.backend.model_info().template,
        }
    }
}

/// A message of a request before it is checked with the others.
pub(super) struct InputMessage {
    pub message: SentMessage,
    /// The ids of its calls, or of the call that it is the result of.
    pub ids: Vec<String>,
    /// Who speaks, or the function whose result it is.
    pub name: Option<String>,
}

impl InputMessage {
    pub fn new(message: SentMessage, ids: Vec<String>) -> Self {
        Self { message, ids, name: None }
    }
}

impl ParsedChatRequest {
    /// Whether the last message is the input of the turn. Otherwise it is appended before the turn: system messages come after
    /// it, or it is the result of a function.
    pub fn appends_last_message(&self) -> bool {
        let is_user = self.messages.last().is_some_and(|message| message.role == Role::User);
        self.trailing_system.is_empty() && is_user
    }

    /// Orders the messages of a request by their meaning, and checks that there is something to answer.
    pub fn from_messages(
        input: Vec<InputMessage>,
        mut instructions: Vec<String>,
        context: &ChatParseContext,
    ) -> ApiResult<Self> {
        let (count, max) = (input.len(), context.max_messages);
        if count > max {
            let message = format!("{count} messages; a request may have at most {max} messages");
            return Err(ErrorResponse::bad_request(message));
        }
        let mut messages: Vec<SentMessage> = Vec::new();
        for message in sort_results(name_speakers(input)) {
            // System messages before all others are the system prompt; later ones keep their position.
            match message.role {
                _ if message.is_empty() => {}
                Role::System if messages.is_empty() => instructions.push(message.text),
                _ => messages.push(message),
            }
        }
        let last = messages.iter().rposition(|message| message.role != Role::System);
        let trailing_system = messages.split_off(last.map_or(0, |last| last + 1));
        let mut prefill = String::new();
        if trailing_system.is_empty()
            && let Some(last) = messages.pop_if(|last| last.role == Role::Assistant)
        {
            if !last.calls.is_empty() {
                let message = "the last message calls functions; send their results after it";
                return Err(ErrorResponse::bad_request(message));
            }
            prefill = last.text;
        }
        let system = (!instructions.is_empty()).then(|| instructions.join("\n\n"));
        if messages.is_empty() && system.is_none() && trailing_system.is_empty() && prefill.is_empty() {
            let message =
                "the last message must be a user message with text; no message of the request has text";
            return Err(ErrorResponse::bad_request(message));
        }
        Ok(Self { system, messages, trailing_system, prefill, ..Self::default() })
    }

    /// Adds the functions of the request, and how the answer is sampled.
    pub fn with_options(
        self,
        tools: &ToolParams,
        requested: RequestedSampling,
        context: &ChatParseContext,
    ) -> ApiResult<Self> {
        let RequestedSampling { mut sampling, parameters } = requested;
        let options = tools.parse(&context.template.tools.call)?;
        let definitions = options.as_ref().map(|options| options.tools.clone()).unwrap_or_default();
        if let Some(mut options) = options {
            options.answer_schema = match sampling.constraint.take() {
                None => None,
                Some(OutputConstraint::JsonSchema(schema)) => Some(schema),
                Some(_) => {
                    let name = parameters.constraint_name().unwrap_or("grammar");
                    let message = format!(
                        "{name} and tools are both set; an answer can follow only one of them: leave {name} out, or set \
                         tool_choice to none"
                    );
                    return Err(ErrorResponse::invalid_parameter(name, message));
                }
            };
            sampling.constraint = Some(OutputConstraint::ToolCalls(Box::new(options)));
        }
        let logprobs = LogprobBuffer::new(sampling.logprobs.is_some());
        Ok(Self { tools: definitions, sampling, parameters, logprobs, choice_count: 1, ..self })
    }

    /// Sets how the model that answers writes calls.
    pub fn set_call_format(&mut self, format: &CallFormat) {
        if let Some(OutputConstraint::ToolCalls(options)) = &mut self.sampling.constraint {
            options.format = format.clone();
        }
    }

    /// The request of another choice: its seed differs, and its log-probabilities are its own.
    pub fn for_choice(&self, choice: usize) -> Self {
        let mut request = self.clone();
        request.sampling.seed = request.sampling.seed.wrapping_add(choice as u64);
        request.logprobs = LogprobBuffer::new(request.sampling.logprobs.is_some());
        request
    }
}

/// Writes the names of speakers before their messages, as chat templates have no place for them: the person speaks as somebody, or a
/// group does. A model that speaks for itself alone gets no name, because its next answer would not have it.
fn name_speakers(mut input: Vec<InputMessage>) -> Vec<InputMessage> {
    let of_role = |role: Role| input.iter().filter(move |message| message.message.role == role);
    let mut assistants: Vec<&str> =
        of_role(Role::Assistant).filter_map(|message| message.name.as_deref()).collect();
    let all_named = of_role(Role::User).chain(of_role(Role::Assistant)).all(|message| message.name.is_some());
    assistants.sort_unstable();
    assistants.dedup();
    let is_group = assistants.len() > 1 || all_named;
    for InputMessage { message, name, .. } in &mut input {
        let is_named = match message.role {
            Role::User | Role::System => true,
            Role::Assistant => is_group,
            Role::Tool => false,
        };
        let Some(name) = name.as_deref().map(str::trim).filter(|name| is_named && !name.is_empty()) else {
            continue;
        };
        let has_name = message.text.strip_prefix(name).is_some_and(|rest| rest.starts_with(':'));
        if has_name || message.text.trim().is_empty() {
            continue;
        }
        let text = format!("{name}: {}", message.text);
        *message = match message.calls.is_empty() {
            true => SentMessage::new(message.role, text),
            false => SentMessage::with_calls(text, std::mem::take(&mut message.calls)),
        };
    }
    input
}

/// The results of functions in the order of their calls: a client may send them in any order. A result without the id of its call
/// belongs to the first call of its function that has none yet.
fn sort_results(mut input: Vec<InputMessage>) -> Vec<SentMessage> {
    let mut start = 0;
    while start < input.len() {
        let is_result = |message: &InputMessage| message.message.role == Role::Tool;
        let count = input[start..].iter().take_while(|message| is_result(message)).count();
        let results = start..start + count;
        match start.checked_sub(1).filter(|_| count > 1) {
            Some(caller) => {
                let places = result_places(&input[caller], &input[results.clone()]);
                let mut sorted: Vec<(usize, InputMessage)> =
                    places.into_iter().zip(input.drain(results)).collect();
                sorted.sort_by_key(|(place, _)| *place);
                let sorted: Vec<InputMessage> = sorted.into_iter().map(|(_, result)| result).collect();
                input.splice(start..start, sorted);
            }
            // The calls are in the previous response, whose ids end with their number.
            None => input[results].sort_by_key(|result| {
                let id = result.ids.first().map_or("", String::as_str);
                id.rsplit_once('_').and_then(|(_, number)| number.parse().ok()).unwrap_or(usize::MAX)
            }),
        }
        start += count.max(1);
    }
    let message = |input: InputMessage| SentMessage { call_ids: input.ids, ..input.message };
    input.into_iter().map(message).collect()
}

/// The number of the call of each result. A result of no known call comes last.
fn result_places(caller: &InputMessage, results: &[InputMessage]) -> Vec<usize> {
    let calls = &caller.message.calls;
    let by_id = |result: &InputMessage| {
        let id = result.ids.first()?;
        caller.ids.iter().position(|call| call == id)
    };
    let mut places: Vec<Option<usize>> = results.iter().map(by_id).collect();
    for (n, result) in results.iter().enumerate() {
        if places[n].is_none() {
            let is_free = |call: &usize| !places.contains(&Some(*call));
            let has_name = |call: &usize| result.name.as_ref() == Some(&calls[*call].name);
            places[n] = (0..calls.len()).filter(is_free).find(has_name);
        }
    }
    places.into_iter().map(|place| place.unwrap_or(calls.len())).collect()
}

/// What a function without output returned.
const NO_OUTPUT: &str = "(no output)";

/// The result of a function. A function may return nothing, and the model must hear of that too.
pub(super) fn result_message(text: String) -> SentMessage {
    let text = if text.trim().is_empty() { NO_OUTPUT.to_owned() } else { text };
    SentMessage::new(Role::Tool, text)
}

/// A call of the history. Its arguments are text, as the model wrote them.
pub(super) fn sent_call(place: &str, name: &str, arguments: Option<&Value>) -> ApiResult<FunctionCall> {
    if !is_function_name(name) {
        let message = format!("{place}: '{name}' is not the name of a function");
        return Err(ErrorResponse::invalid_parameter(place.split('[').next().unwrap_or(place), message));
    }
    let arguments = match arguments {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.trim().to_owned(),
        Some(other) => other.to_string(),
    };
    let arguments = if arguments.is_empty() { "{}".to_owned() } else { arguments };
    Ok(FunctionCall { name: name.to_owned(), arguments })
}

impl OpenAiChatRequest {
    pub fn parse(&self, context: &ChatParseContext) -> ApiResult<ParsedChatRequest> {
        self.parse_with(self.params.sampling(&context.sampling)?, context)
    }

    /// Parses the request with other sampling parameters than its own.
    pub fn parse_with(
        &self,
        requested: RequestedSampling,
        context: &ChatParseContext,
    ) -> ApiResult<ParsedChatRequest> {
        let input = self.messages.iter().enumerate().map(|(n, message)| message.parse(n));
        let input = input.collect::<ApiResult<Vec<InputMessage>>>()?;
        let parsed = ParsedChatRequest::from_messages(input, Vec::new(), context)?;
        let parsed = parsed.with_options(&self.tools, requested, context)?;
        let choice_count = self.params.choice_count()?;
        Ok(ParsedChatRequest { skip_reasoning: self.reasoning.skips_reasoning()?, choice_count, ..parsed })
    }
}

impl OpenAiChatMessage {
    fn parse(&self, n: usize) -> ApiResult<InputMessage> {
        let (role, text) = (self.role(n)?, self.text(n)?);
        let call_id: Vec<String> = self.tool_call_id.iter().cloned().collect();
        let (message, ids) = match role {
            Role::System | Role::User => (SentMessage::new(role, text), Vec::new()),
            Role::Tool => (result_message(text), call_id),
            Role::Assistant => {
                let place = format!("messages[{n}]");
                let calls = self.tool_calls.iter().flatten();
                let ids = calls.clone().map(|call| call.id.clone().unwrap_or_default()).collect();
                let functions = calls.map(|call| &call.function).chain(&self.function_call);
                let calls = functions
                    .map(|function| sent_call(&place, &function.name, function.arguments.as_ref()))
                    .collect::<ApiResult<Vec<FunctionCall>>>()?;
                let message = match calls.is_empty() {
                    true => SentMessage::new(role, text),
                    false => SentMessage::with_calls(text, calls),
                };
                (message, ids)
            }
        };
        Ok(InputMessage { message, ids, name: self.name.clone() })
    }

    fn role(&self, n: usize) -> ApiResult<Role> {
        match self.role.as_str() {
            "system" | "developer" => Ok(Role::System),
            "user" => Ok(Role::User),
            "tool" | "function" => Ok(Role::Tool),
            "assistant" => Ok(Role::Assistant),
            other => Err(ErrorResponse::invalid_parameter(
                "messages",
                format!(
                    "messages[{n}]: unknown role '{other}'; use system, developer, user, assistant or tool"
                ),
            )),
        }
    }

    fn text(&self, n: usize) -> ApiResult<String> {
        match &self.content {
            None => Ok(String::new()),
            Some(OpenAiChatContent::Text(text)) => Ok(text.clone()),
            Some(OpenAiChatContent::Parts(parts)) => match parts.iter().find(|part| part.r#type != "text") {
                Some(part) => Err(ErrorResponse::invalid_parameter(
                    "messages",
                    format!("messages[{n}]: content of type {} is not supported, only text", part.r#type),
                )),
                None => Ok(parts.iter().filter_map(|part| part.text.as_deref()).collect()),
            },
        }
    }
}
