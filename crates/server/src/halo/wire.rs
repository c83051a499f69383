//! The types of Halo's own API.

use halo_core::prune::RankBy;
use halo_core::store::ConversationSummary as Kept;
use halo_core::timeline::{ChunkRef, Timeline};
use halo_core::token::{ChunkId, ContentKind};
use halo_engine::event::{Event, TurnStage, TurnSummary};
use halo_engine::history::ChunkHistoryEntry;
use halo_engine::memory::placement::PlacedMemory;
use halo_engine::snapshot::{AnswerProgress, ConversationState, SnapshotCell};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::ToSchema;

/// A conversation, as a list tells of it.
#[derive(Serialize, ToSchema)]
#[schema(as = ConversationSummary)]
pub(crate) struct ApiConversationSummary {
    pub name: String,
    /// The model whose tokens it is made of; empty where none has read it yet.
    pub model: String,
    /// When it began, in milliseconds since 1970.
    pub created: i64,
    /// When it last changed.
    pub updated: i64,
    pub turns: u64,
    pub tokens: u64,
    /// Tokens in the window.
    pub live: u64,
}

impl From<Kept> for ApiConversationSummary {
    fn from(kept: Kept) -> Self {
        let Kept { name, model, created, updated: used, turns, tokens, live, .. } = kept;
        Self { name, model, created, updated: used, turns, tokens, live }
    }
}

/// A conversation as it stands, and the answer that is being given.
#[derive(Serialize, ToSchema)]
#[schema(as = Conversation)]
pub(crate) struct ApiConversation {
    #[serde(flatten)]
    #[schema(inline)]
    pub snapshot: Arc<ApiSnapshot>,
    /// The number of the last event that this includes.
    pub last_event: u64,
    /// What the user should know of how it was opened.
    pub notices: Vec<String>,
    /// The answer that is being given.
    pub running: Option<ApiRunningAnswer>,
}

/// A conversation as it stands.
#[derive(Serialize, ToSchema)]
#[schema(as = ConversationSnapshot)]
pub(crate) struct ApiSnapshot {
    pub name: String,
    /// The model that speaks.
    pub model: String,
    /// Whether the model tells what it looks at.
    pub attention: bool,
    /// Tokens that may be in the window.
    pub limit: usize,
    /// Tokens that may stay in it after a turn: the rest is room for the next, and for what returns with it.
    pub budget_after_turn: usize,
    /// Tokens in the window, the standing instructions included.
    pub live: usize,
    pub tokens: usize,
    /// Chunks that have left the window and can come back.
    pub pruned: usize,
    /// The standing instructions, as the model sees them.
    pub system_prompt: String,
    /// How many tokens they are.
    pub system_prompt_tokens: usize,
    /// The greatest brightness that a token can have.
    pub max_brightness: f32,
    /// What is in the window, in order.
    pub chunks: Vec<ApiChunk>,
    /// The memories that stand in it, each where its range was.
    pub placed_memories: Vec<ApiPlacedMemory>,
    /// When each turn of the window began, in milliseconds since 1970.
    pub times: BTreeMap<u32, i64>,
    /// What was taken for granted in a question and is not so, by the turn of its answer.
    pub premises: BTreeMap<u32, String>,
    /// How the turns of the window ended, where it was not by themselves.
    pub finish_reasons: BTreeMap<u32, String>,
}

/// A memory in the window.
#[derive(Serialize, ToSchema)]
#[schema(as = PlacedMemory)]
pub(crate) struct ApiPlacedMemory {
    pub id: u64,
    /// Behind which birth index it stands.
    pub position: u64,
    /// The turn in whose place it stands.
    pub turn: u32,
    /// What it says there, the user's words included.
    pub text: String,
    /// How many tokens that is.
    pub tokens: usize,
}

/// The answer that is being given.
#[derive(Serialize, ToSchema)]
#[schema(as = RunningAnswer)]
pub(crate) struct ApiRunningAnswer {
    /// Its turn, once it has one.
    pub turn: Option<u32>,
    /// How many are ahead of it at the model.
    pub ahead: usize,
    /// What it says so far, chunk by chunk.
    pub chunks: Vec<(String, String)>,
}

#[derive(Clone, Serialize, ToSchema)]
#[schema(as = Chunk)]
pub(crate) struct ApiChunk {
    /// Its name: role, turn, sentence.
    pub id: String,
    pub turn: u32,
    /// Which of its turn it is.
    pub index: u32,
    /// Whose: user, assistant or system.
    pub role: &'static str,
    /// Its place on the timeline.
    pub position: u64,
    /// Its tokens, with those that frame it.
    pub tokens: usize,
    /// Whether it is in the window.
    pub live: bool,
    /// Whether it can never leave.
    pub pinned: bool,
    /// The brightest of its tokens.
    pub peak: f32,
    /// How bright it is among those of the window, from 0 to 1, by what decides who leaves; none where that is not known.
    pub relative_brightness: Option<f32>,
    pub text: String,
    /// Which characters of it are the results of tools.
    pub tool_ranges: Vec<(usize, usize)>,
    /// How many chunks between it and the one before it in the window have left.
    pub pruned_before: usize,
    /// The latest that happened to it, where that is known.
    pub reason: Option<String>,
}

impl ApiChunk {
    /// A chunk whose tokens are in memory.
    pub fn from_chunk(chunk: ChunkRef<'_>, timeline: &Timeline, gap: usize) -> Self {
        let (text, tools) = chunk_text(chunk, timeline);
        Self {
            id: chunk.id().to_string(),
            turn: chunk.id().turn.0,
            index: chunk.id().index,
            role: chunk.id().role.name(),
            position: chunk.start().0,
            tokens: chunk.len(),
            live: chunk.is_live(),
            pinned: chunk.is_pinned(),
            peak: chunk.peak().0,
            relative_brightness: None,
            text,
            tool_ranges: tools,
            pruned_before: gap,
            reason: None,
        }
    }
}

/// What a chunk says, and which characters of it are the results of tools. Characters are counted as JavaScript does.
fn chunk_text(chunk: ChunkRef<'_>, timeline: &Timeline) -> (String, Vec<(usize, usize)>) {
    let (mut text, mut tools, mut length): (String, Vec<(usize, usize)>, usize) = Default::default();
    for token in chunk.run().positions().filter_map(|position| timeline.token(position)) {
        let voice = token.flags.kind();
        if voice == ContentKind::Template {
            continue;
        }
        text.push_str(token.text);
        let end = length + token.text.encode_utf16().count();
        if voice == ContentKind::ToolResult {
            match tools.last_mut() {
                Some(last) if last.1 == length => last.1 = end,
                _ => tools.push((length, end)),
            }
        }
        length = end;
    }
    (text, tools)
}

/// What is in the window, in order.
pub(crate) fn context_window(timeline: &Timeline, rank: RankBy) -> Vec<ApiChunk> {
    let rows = with_pruned_before(timeline).zip(relative_brightness(timeline, rank));
    rows.map(|((chunk, gap), light)| ApiChunk {
        relative_brightness: Some(light),
        ..ApiChunk::from_chunk(chunk, timeline, gap)
    })
    .collect()
}

/// How bright each chunk of the window is among the others, from 0 to 1. Peaks have a scale of their own. Everything else is
/// told by its place in the order: a few chunks receive most of the attention, and beside those all others would be dark.
fn relative_brightness(timeline: &Timeline, rank: RankBy) -> Vec<f32> {
    let values: Vec<f64> = timeline.live_chunks().map(|chunk| rank.value_of(chunk)).collect();
    let mut sorted = values.clone();
    sorted.sort_by(f64::total_cmp);
    let (Some(&least), Some(&most)) = (sorted.first(), sorted.last()) else { return Vec::new() };
    let light = |&value: &f64| {
        if least == most {
            0.5
        } else if rank == RankBy::Peak {
            (value - least) / (most - least)
        } else {
            // Those that are alike stand in the middle of their places.
            let (below, upto) =
                (sorted.partition_point(|v| *v < value), sorted.partition_point(|v| *v <= value));
            (below + upto - 1) as f64 / 2.0 / (sorted.len() - 1) as f64
        }
    };
    values.iter().map(|value| light(value) as f32).collect()
}

/// The chunks of the window, and how many between each and the one before it have left.
fn with_pruned_before(timeline: &Timeline) -> impl Iterator<Item = (ChunkRef<'_>, usize)> {
    let mut next = 0;
    timeline.live_chunks().map(move |chunk| {
        let between = (next..chunk.row_index()).filter_map(|place| timeline.chunk_at_row(place));
        next = chunk.row_index() + 1;
        (chunk, between.filter(|c| is_pruned(*c)).count())
    })
}

/// Whether a chunk has left the window and can come back.
pub(crate) fn is_pruned(chunk: ChunkRef<'_>) -> bool {
    !chunk.is_live() && chunk.pruned_len() > 0
}

impl ApiSnapshot {
    /// A conversation as it stands. When its turns were, and how they ended, the store knows.
    pub fn from_state(standing: &ConversationState) -> Self {
        let timeline = &standing.timeline;
        Self {
            name: standing.name.clone(),
            model: standing.model.name.clone(),
            attention: standing.model.attention,
            limit: standing.token_limit,
            budget_after_turn: standing.budget_after_turn,
            live: standing.live_tokens(),
            tokens: timeline.len(),
            pruned: timeline.chunks().filter(|c| is_pruned(*c)).count(),
            system_prompt: standing.system_tokens.iter().map(|piece| piece.text.as_str()).collect(),
            system_prompt_tokens: standing.system_tokens.len(),
            max_brightness: standing.max_brightness.0,
            chunks: context_window(timeline, standing.rank),
            placed_memories: standing.placed_memories.iter().map(ApiPlacedMemory::from).collect(),
            times: BTreeMap::new(),
            finish_reasons: BTreeMap::new(),
            premises: BTreeMap::new(),
        }
    }
}

impl From<&PlacedMemory> for ApiPlacedMemory {
    fn from(stand: &PlacedMemory) -> Self {
        Self {
            id: stand.id,
            position: stand.position.0,
            turn: stand.turn.0,
            text: stand.text(),
            tokens: stand.len(),
        }
    }
}

impl From<&AnswerProgress> for ApiRunningAnswer {
    fn from(running: &AnswerProgress) -> Self {
        let mut parts: Vec<(ChunkId, String)> = Vec::new();
        for (chunk, _, text) in &running.tokens {
            match parts.last_mut() {
                Some((last, so_far)) if last == chunk => so_far.push_str(text),
                _ => parts.push((*chunk, text.clone())),
            }
        }
        Self {
            turn: running.turn.map(|turn| turn.0),
            ahead: running.ahead,
            chunks: parts.into_iter().map(|(chunk, text)| (chunk.to_string(), text)).collect(),
        }
    }
}

/// An event, where it happened, and its number there.
#[derive(Serialize, ToSchema)]
#[schema(as = Event)]
pub(crate) struct ApiEvent {
    pub conversation: String,
    /// Counts up in each conversation, from where it was opened.
    pub number: u64,
    #[serde(flatten)]
    pub kind: ApiEventKind,
}

#[derive(Serialize, ToSchema)]
#[schema(as = EventKind)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ApiEventKind {
    /// The model is busy.
    Queued {
        ahead: usize,
    },
    /// A message is stored.
    MessageStored {
        turn: u32,
        chunks: Vec<ApiChunk>,
        live: usize,
    },
    /// What the model would begin to say.
    Previewed {
        text: String,
    },
    /// A chunk came back to its own place.
    Resurrected {
        chunk: Option<ApiChunk>,
        reason: String,
        live: usize,
    },
    /// A chunk left the window.
    Pruned {
        chunk: String,
        tokens: usize,
        reason: String,
        live: usize,
    },
    /// The window is being read.
    Prefilling {
        done: usize,
        total: usize,
    },
    /// The window has been read.
    Prefilled {
        reused: usize,
        pruned: usize,
        restored: usize,
        recomputed: usize,
        prefilled: usize,
    },
    /// A token of the answer.
    Token {
        chunk: String,
        position: u64,
        text: String,
    },
    /// What the answer's attention came to.
    Scored {
        steps: u64,
        votes: usize,
        mean: f64,
        errors: Option<String>,
    },
    /// The model has called a tool.
    ToolCalled {
        command: String,
        ok: bool,
        result: String,
    },
    /// More is in the window than may be.
    BudgetExceeded {
        reason: String,
    },
    Notice {
        text: String,
    },
    /// The answer is complete.
    Done {
        summary: ApiTurnSummary,
        live: usize,
        pruned: usize,
        tokens: usize,
        chunks: Vec<ApiChunk>,
        window: Vec<(String, f32, usize, f32)>,
    },
    /// There is no answer, or no more of it.
    Failed {
        error: String,
    },
    /// The message takes something for granted that was said not to be so.
    FalsePremise {
        premise: String,
        reason: String,
        suggestion: String,
    },
    /// Something happened to a memory.
    MemoryChanged {
        id: u64,
        action: &'static str,
        live: usize,
    },
    /// Something was done by hand: the state is to be read again.
    Changed {
        action: &'static str,
        chunks: Vec<String>,
    },
    /// The settings have changed.
    SettingsChanged,
    /// Something happened in a world of rooms: what is named is to be read again.
    WorldChanged(ApiWorldEvent),
}

/// Something happened in a world of rooms: what is named is to be read again.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[schema(as = WorldEvent)]
pub(crate) struct ApiWorldEvent {
    pub name: String,
    pub rooms: Vec<u32>,
    pub agents: Vec<u32>,
    /// Whose heart has beaten.
    pub beat: Option<u32>,
    /// What that one read and said.
    pub usage: Option<ApiHeartbeatUsage>,
    /// What went wrong, or was refused.
    pub error: Option<String>,
    /// Whether the world was made or ended.
    pub worlds_changed: bool,
}

/// What a heartbeat read and said, in tokens.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[schema(as = HeartbeatUsage)]
pub(crate) struct ApiHeartbeatUsage {
    pub prompt_tokens: usize,
    /// What of it had to be read.
    pub prefilled_tokens: usize,
    pub completion_tokens: usize,
}

/// How a turn went.
#[derive(Serialize, ToSchema)]
#[schema(as = TurnSummary)]
pub(crate) struct ApiTurnSummary {
    pub turn: u32,
    /// Why it ended: end, stop, length or aborted.
    pub finish_reason: &'static str,
    /// Tokens of the answer.
    pub tokens: usize,
    /// Chunks that came back.
    pub resurrected: usize,
    pub pruned: usize,
    /// Tokens a second, while it spoke.
    pub tokens_per_second: f64,
    /// Seconds from the message to the first token.
    pub first_token_seconds: f64,
    /// What each part took, in milliseconds.
    pub ms: BTreeMap<&'static str, f64>,
}

impl From<&TurnSummary> for ApiTurnSummary {
    fn from(summary: &TurnSummary) -> Self {
        let before = [TurnStage::Store, TurnStage::Preview, TurnStage::Recall, TurnStage::Prefill];
        Self {
            turn: summary.turn.0,
            finish_reason: summary.finish.name(),
            tokens: summary.tokens,
            resurrected: summary.resurrected,
            pruned: summary.pruned,
            tokens_per_second: summary.tokens_per_second(),
            first_token_seconds: before
                .iter()
                .map(|&stage| summary.stage_duration(stage).as_secs_f64())
                .sum(),
            ms: TurnStage::ALL
                .iter()
                .map(|&s| (s.name(), summary.stage_duration(s).as_secs_f64() * 1e3))
                .collect(),
        }
    }
}

/// What there is to tell of an event; none: nothing that anybody outside would want to know.
pub(crate) fn api_event(event: &Event, board: &SnapshotCell) -> Option<ApiEventKind> {
    // A token is told without looking at anything: there are many of them.
    if let Event::Token { chunk, position, text } = event {
        return Some(ApiEventKind::Token {
            chunk: chunk.to_string(),
            position: position.0,
            text: text.clone(),
        });
    }
    let standing = board.get().state;
    let (timeline, live) = (&standing.timeline, standing.live_tokens());
    let rows = |turn| {
        let chunks = timeline.turn_chunks(turn).filter(|chunk| chunk.is_live());
        chunks.map(|chunk| ApiChunk::from_chunk(chunk, timeline, 0)).collect::<Vec<_>>()
    };
    Some(match event {
        Event::Queued { ahead } => ApiEventKind::Queued { ahead: *ahead },
        Event::MessageStored { turn, .. } => {
            ApiEventKind::MessageStored { turn: turn.0, chunks: rows(*turn), live }
        }
        Event::Previewed { text } => ApiEventKind::Previewed { text: text.clone() },
        Event::Resurrected { chunk, reason: why, .. } => {
            let here = timeline.chunk(*chunk).filter(|chunk| chunk.is_loaded());
            ApiEventKind::Resurrected {
                chunk: here.map(|c| ApiChunk::from_chunk(c, timeline, 0)),
                reason: why.clone(),
                live,
            }
        }
        Event::Pruned { chunk, tokens, reason: why } => {
            ApiEventKind::Pruned { chunk: chunk.to_string(), tokens: *tokens, reason: why.clone(), live }
        }
        Event::Prefilling { done, total: of } => ApiEventKind::Prefilling { done: *done, total: *of },
        Event::Prefilled(upkeep) => ApiEventKind::Prefilled {
            reused: upkeep.reused,
            pruned: upkeep.pruned,
            restored: upkeep.restored,
            recomputed: upkeep.recomputed,
            prefilled: upkeep.prefilled,
        },
        Event::Scored { steps, votes, mean, errors: faults } => ApiEventKind::Scored {
            steps: *steps,
            votes: *votes,
            mean: *mean,
            errors: faults.as_ref().map(|(times, why)| format!("{times} steps: {why}")),
        },
        Event::ToolCalled(done) => {
            ApiEventKind::ToolCalled { command: done.command.clone(), ok: done.ok, result: done.to_text() }
        }
        Event::BudgetExceeded(why) => ApiEventKind::BudgetExceeded { reason: why.clone() },
        Event::Notice(text) => ApiEventKind::Notice { text: text.clone() },
        Event::Done(summary) => ApiEventKind::Done {
            summary: summary.into(),
            live,
            pruned: timeline.chunks().filter(|c| is_pruned(*c)).count(),
            tokens: timeline.len(),
            chunks: rows(summary.turn),
            window: (with_pruned_before(timeline).zip(relative_brightness(timeline, standing.rank)))
                .map(|((chunk, gap), light)| (chunk.id().to_string(), chunk.peak().0, gap, light))
                .collect(),
        },
        Event::FalsePremise { premise, reason, suggestion } => ApiEventKind::FalsePremise {
            premise: premise.clone(),
            reason: reason.clone(),
            suggestion: suggestion.clone(),
        },
        Event::MemoryChanged { id, action } => {
            ApiEventKind::MemoryChanged { id: *id, action: action.as_str(), live }
        }
        Event::Failed(why) => ApiEventKind::Failed { error: why.clone() },
        Event::Changed { action, chunks } => ApiEventKind::Changed {
            action: action.as_str(),
            chunks: chunks.iter().map(ToString::to_string).collect(),
        },
        Event::Token { .. } | Event::StageFinished(..) => return None,
    })
}

#[derive(Deserialize, ToSchema)]
#[schema(as = NewMessage)]
pub(crate) struct ApiNewMessage {
    pub text: String,
    /// A number of the client's own for this message: sent again with the same one, it is taken once.
    #[serde(default)]
    pub id: Option<String>,
}

/// Something that was begun.
#[derive(Serialize, ToSchema)]
#[schema(as = TurnAccepted)]
pub(crate) struct ApiTurnAccepted {
    /// How many wait for the model before it.
    pub ahead: usize,
}

/// What the user wants done to chunks.
#[derive(Deserialize, ToSchema)]
#[schema(as = EditRequest)]
pub(crate) struct ApiEditRequest {
    /// pin, unpin, prune, resurrect, delete, undelete or merge.
    pub edit: String,
    /// The names of the chunks, such as `u4.0`.
    pub chunks: Vec<String>,
}

/// What was done to chunks.
#[derive(Serialize, ToSchema)]
#[schema(as = EditResult)]
pub(crate) struct ApiEditResult {
    /// pinned, unpinned, pruned, resurrected, deleted, undeleted or merged.
    pub action: &'static str,
    /// Of which: what hangs on those that were named is among them.
    pub chunks: Vec<String>,
    /// With this number it can be taken back.
    pub undo: u64,
}

/// The number of what is to be taken back.
#[derive(Deserialize, ToSchema)]
#[schema(as = UndoRequest)]
pub(crate) struct ApiUndoRequest {
    /// As it was told when it was done.
    pub undo: u64,
}

/// Something that happened to a chunk.
#[derive(Serialize, ToSchema)]
#[schema(as = ChunkHistoryEntry)]
pub(crate) struct ApiChunkHistoryEntry {
    /// When, in milliseconds since 1970.
    pub at: i64,
    /// pruned, resurrected, pinned, unpinned, deleted, undeleted, merged or split.
    pub action: &'static str,
    /// Empty where the log has none.
    pub reason: String,
}

impl From<ChunkHistoryEntry> for ApiChunkHistoryEntry {
    fn from(entry: ChunkHistoryEntry) -> Self {
        let ChunkHistoryEntry { at, action, reason, .. } = entry;
        Self { at, action: action.as_str(), reason }
    }
}

/// All that is known of a chunk.
#[derive(Serialize, ToSchema)]
#[schema(as = ChunkDetail)]
pub(crate) struct ApiChunkDetail {
    pub chunk: ApiChunk,
    /// Its tokens: number, text, brightness, whether each is live, and whether it only frames.
    pub tokens: Vec<ApiToken>,
    /// How often its tokens stood out.
    pub votes: u64,
    /// The attention that it has received in all.
    pub attention: f64,
    /// What share of the attention a token of it receives, on average.
    pub share: Option<f64>,
    /// What happened to it, the oldest first.
    pub history: Vec<ApiChunkHistoryEntry>,
    /// What it leaves and comes back with.
    pub pair: Option<String>,
    /// What is deleted with it, because it cannot stand without it.
    pub dependents: Vec<ApiChunk>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Token)]
pub(crate) struct ApiToken {
    /// Its place on the timeline.
    pub position: u64,
    /// The model's number for it.
    pub id: u32,
    pub text: String,
    /// How bright it is.
    pub brightness: f32,
    /// Whether it is in the window.
    pub live: bool,
    /// Whether it frames a message and was said by nobody.
    pub template: bool,
}

/// What has left the window.
#[derive(Serialize, ToSchema)]
#[schema(as = ChunkPage)]
pub(crate) struct ApiChunkPage {
    /// How many there are that fit the question.
    pub total: usize,
    pub chunks: Vec<ApiChunk>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = SearchHit)]
pub(crate) struct ApiSearchHit {
    pub chunk: ApiChunk,
    /// How well it answers.
    pub score: f64,
    /// Why it was found.
    pub reason: String,
}

/// How a turn went, and how the window stood after it.
#[derive(Serialize, ToSchema)]
#[schema(as = Turn)]
pub(crate) struct ApiTurn {
    pub turn: u32,
    /// When it ended, in milliseconds since 1970.
    pub at: i64,
    /// What was written down of it.
    #[schema(value_type = Object)]
    pub record: serde_json::Value,
}

/// What a token looked at when it was made. Shares of all attention, over all layers and heads.
#[derive(Serialize, ToSchema)]
#[schema(as = TokenAttention)]
pub(crate) struct ApiTokenAttention {
    pub turn: u32,
    pub text: String,
    /// The share of the standing instructions, the first token among them, which takes what is looked at nowhere else.
    pub system_prompt: f32,
    /// The share of what the answer had said already.
    pub answer: f32,
    /// The shares of paragraphs, the largest first.
    pub chunks: Vec<(String, f32)>,
    /// The tokens with the largest shares.
    pub tokens: Vec<ApiAttendedToken>,
}

/// A token that was looked at.
#[derive(Serialize, ToSchema)]
#[schema(as = AttendedToken)]
pub(crate) struct ApiAttendedToken {
    /// Its place on the timeline.
    pub position: u64,
    pub chunk: String,
    /// What it says; empty where it is not in memory.
    pub text: String,
    pub share: f32,
}

/// A window as it was.
#[derive(Serialize, ToSchema)]
#[schema(as = ContextAtTurn)]
pub(crate) struct ApiContextAtTurn {
    /// The turn that had just been said.
    pub turn: u32,
    /// Tokens in the window then, with the standing instructions as they are now.
    pub live: usize,
    /// The window then. How bright things were is not kept: peaks are those of birth.
    pub chunks: Vec<ApiChunk>,
    /// Those of them that are not in the window now.
    pub removed_since: Vec<String>,
}

/// A new conversation that shares the past of another.
#[derive(Deserialize, ToSchema)]
#[schema(as = BranchRequest)]
pub(crate) struct ApiBranchRequest {
    pub name: String,
    /// Up to which turn; all of it, where none is told.
    pub turn: Option<u32>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = RenameRequest)]
pub(crate) struct ApiRenameRequest {
    pub name: String,
}

/// A setting's new value.
#[derive(Deserialize, ToSchema)]
#[schema(as = SettingValue)]
pub(crate) struct ApiSettingValue {
    /// As it would be written in the settings file; null: back to what it is without.
    pub value: Option<String>,
}

#[derive(Serialize, Deserialize, ToSchema)]
#[schema(as = Note)]
pub(crate) struct ApiNote {
    pub file: String,
    /// What is in it.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::notation;

    #[test]
    fn relative_brightness_follows_prune_rank() {
        let timeline = notation::read("u0.0:3*900 a1.0:2*700 u2.0:4*700 a3.0:2*100").expect("a timeline");
        assert_eq!(
            relative_brightness(&timeline, RankBy::Peak),
            [1.0, 0.75, 0.75, 0.0],
            "peaks have a scale"
        );
        assert_eq!(
            relative_brightness(&timeline, RankBy::Mean),
            [1.0, 0.5, 0.5, 0.0],
            "everything else has places"
        );
        assert_eq!(
            relative_brightness(&timeline, RankBy::Share),
            [0.5; 4],
            "nobody has looked at any of them"
        );
        let one = notation::read("u0.0:3*900").expect("a timeline");
        assert_eq!(relative_brightness(&one, RankBy::Mean), [0.5]);
    }
}

/// An answer, or a version of the last exchange, that can be chosen.
#[derive(Serialize, ToSchema)]
#[schema(as = Variant)]
pub(crate) struct ApiVariant {
    /// Its first turn, by which it is chosen.
    pub turn: u32,
    /// What it says, message by message.
    pub messages: Vec<ApiVariantMessage>,
    /// Whether it is what stands in the conversation now.
    pub current: bool,
}

/// A message of a variant.
#[derive(Serialize, ToSchema)]
#[schema(as = VariantMessage)]
pub(crate) struct ApiVariantMessage {
    /// Who says it: user or assistant.
    pub role: String,
    pub text: String,
}

impl From<halo_engine::variant::VariantChoice> for ApiVariant {
    fn from(choice: halo_engine::variant::VariantChoice) -> Self {
        let message = |(role, text): (halo_core::token::Role, String)| ApiVariantMessage {
            role: role.name().to_owned(),
            text,
        };
        Self {
            turn: choice.turns.first().map_or(0, |turn| turn.0),
            messages: choice.messages.into_iter().map(message).collect(),
            current: choice.is_current,
        }
    }
}

/// Which variant is wanted.
#[derive(Deserialize, ToSchema)]
#[schema(as = VariantChoice)]
#[serde(deny_unknown_fields)]
pub(crate) struct ApiVariantChoice {
    pub turn: u32,
}
