//! The types of Halo's own API.

use halo_core::prune::Rank;
use halo_core::seams::Summary as Kept;
use halo_core::timeline::{ChunkRef, Timeline};
use halo_core::token::{ChunkId, Voice};
use halo_engine::board::{Board, Running, Standing};
use halo_engine::event::{Event, Stage, Summary};
use halo_engine::history::Happened;
use halo_engine::memory::stand::Stand;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::ToSchema;

/// A conversation, as a list tells of it.
#[derive(Serialize, ToSchema)]
pub(crate) struct Conversation {
    /// Its name.
    pub name: String,
    /// The model whose tokens it is made of; empty where none has read it yet.
    pub model: String,
    /// When it began, in milliseconds since 1970.
    pub created: i64,
    /// When it last changed.
    pub used: i64,
    /// Messages.
    pub turns: u64,
    /// Tokens ever spoken.
    pub tokens: u64,
    /// Tokens in the window.
    pub live: u64,
}

impl From<Kept> for Conversation {
    fn from(kept: Kept) -> Self {
        let Kept { name, model, created, used, turns, tokens, live, .. } = kept;
        Self { name, model, created, used, turns, tokens, live }
    }
}

/// A conversation as it stands, and the answer that is being given.
#[derive(Serialize, ToSchema)]
pub(crate) struct State {
    /// How it stands.
    #[serde(flatten)]
    #[schema(inline)]
    pub stood: Arc<Stood>,
    /// The number of the last event that this includes.
    pub events: u64,
    /// What the user should know of how it was opened.
    pub notices: Vec<String>,
    /// The answer that is being given.
    pub running: Option<Answering>,
}

/// A conversation as it stands.
#[derive(Serialize, ToSchema)]
pub(crate) struct Stood {
    /// Its name.
    pub name: String,
    /// The model that speaks.
    pub model: String,
    /// Whether the model tells what it looks at.
    pub attention: bool,
    /// Tokens that may be in the window.
    pub limit: usize,
    /// Tokens that may stay in it after a turn: the rest is room for the next, and for what returns with it.
    pub stays: usize,
    /// Tokens in the window, the standing instructions included.
    pub live: usize,
    /// Tokens ever spoken.
    pub tokens: usize,
    /// Chunks that have left the window and can come back.
    pub dead: usize,
    /// The standing instructions, as the model sees them.
    pub instructions: String,
    /// How many tokens they are.
    pub instruction_tokens: usize,
    /// The greatest brightness that a token can have.
    pub cap: f32,
    /// What is in the window, in order.
    pub chunks: Vec<Chunk>,
    /// The memories that stand in it, each where its range was.
    pub standing: Vec<StandingMemory>,
    /// When each turn of the window began, in milliseconds since 1970.
    pub times: BTreeMap<u32, i64>,
    /// What was taken for granted in a question and is not so, by the turn of its answer.
    pub premises: BTreeMap<u32, String>,
    /// How the turns of the window ended, where it was not by themselves.
    pub ends: BTreeMap<u32, String>,
}

/// A memory in the window.
#[derive(Serialize, ToSchema)]
pub(crate) struct StandingMemory {
    /// Its number.
    pub memory: u64,
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
pub(crate) struct Answering {
    /// Its turn, once it has one.
    pub turn: Option<u32>,
    /// How many are ahead of it at the model.
    pub ahead: usize,
    /// What it says so far, chunk by chunk.
    pub parts: Vec<(String, String)>,
}

/// A chunk.
#[derive(Clone, Serialize, ToSchema)]
pub(crate) struct Chunk {
    /// Its name: role, turn, sentence.
    pub chunk: String,
    /// Its turn.
    pub turn: u32,
    /// Which of its turn it is.
    pub sentence: u32,
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
    pub light: Option<f32>,
    /// What it says.
    pub text: String,
    /// Which characters of it are the results of tools.
    pub tools: Vec<(usize, usize)>,
    /// How many chunks between it and the one before it in the window have left.
    pub gap: usize,
    /// The latest that happened to it, where that is known.
    pub why: Option<String>,
}

impl Chunk {
    /// A chunk whose tokens are in memory.
    pub fn of(chunk: ChunkRef<'_>, timeline: &Timeline, gap: usize) -> Self {
        let (text, tools) = spoken(chunk, timeline);
        Self {
            chunk: chunk.id().to_string(),
            turn: chunk.id().turn.0,
            sentence: chunk.id().sentence,
            role: chunk.id().role.name(),
            position: chunk.start().0,
            tokens: chunk.len(),
            live: chunk.is_live(),
            pinned: chunk.is_pinned(),
            peak: chunk.peak().0,
            light: None,
            text,
            tools,
            gap,
            why: None,
        }
    }
}

/// What a chunk says, and which characters of it are the results of tools. Characters are counted as JavaScript does.
fn spoken(chunk: ChunkRef<'_>, timeline: &Timeline) -> (String, Vec<(usize, usize)>) {
    let (mut text, mut tools, mut length): (String, Vec<(usize, usize)>, usize) = Default::default();
    for token in chunk.run().positions().filter_map(|position| timeline.token(position)) {
        let voice = token.flags.voice();
        if voice == Voice::Frame {
            continue;
        }
        text.push_str(token.text);
        let end = length + token.text.encode_utf16().count();
        if voice == Voice::Tool {
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
pub(crate) fn window(timeline: &Timeline, rank: Rank) -> Vec<Chunk> {
    let rows = with_gaps(timeline).zip(lights(timeline, rank));
    rows.map(|((chunk, gap), light)| Chunk { light: Some(light), ..Chunk::of(chunk, timeline, gap) })
        .collect()
}

/// How bright each chunk of the window is among the others, from 0 to 1. Peaks have a scale of their own. Everything else is
/// told by its place in the order: a few chunks receive most of the attention, and beside those all others would be dark.
fn lights(timeline: &Timeline, rank: Rank) -> Vec<f32> {
    let values: Vec<f64> = timeline.live_chunks().map(|chunk| rank.of(chunk)).collect();
    let mut sorted = values.clone();
    sorted.sort_by(f64::total_cmp);
    let (Some(&least), Some(&most)) = (sorted.first(), sorted.last()) else { return Vec::new() };
    let light = |&value: &f64| {
        if least == most {
            0.5
        } else if rank == Rank::Peak {
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
fn with_gaps(timeline: &Timeline) -> impl Iterator<Item = (ChunkRef<'_>, usize)> {
    let mut next = 0;
    timeline.live_chunks().map(move |chunk| {
        let between = (next..chunk.index()).filter_map(|place| timeline.chunk_at_place(place));
        next = chunk.index() + 1;
        (chunk, between.filter(|c| is_dead(*c)).count())
    })
}

/// Whether a chunk has left the window and can come back.
pub(crate) fn is_dead(chunk: ChunkRef<'_>) -> bool {
    !chunk.is_live() && chunk.dead_len() > 0
}

impl Stood {
    /// A conversation as it stands. When its turns were, and how they ended, the store knows.
    pub fn of(standing: &Standing) -> Self {
        let timeline = &standing.timeline;
        Self {
            name: standing.name.clone(),
            model: standing.model.name.clone(),
            attention: standing.model.attention,
            limit: standing.limit,
            stays: standing.stays,
            live: standing.live(),
            tokens: timeline.len(),
            dead: timeline.chunks().filter(|c| is_dead(*c)).count(),
            instructions: standing.instructions.iter().map(|piece| piece.text.as_str()).collect(),
            instruction_tokens: standing.instructions.len(),
            cap: standing.full.0,
            chunks: window(timeline, standing.rank),
            standing: standing.stands.iter().map(StandingMemory::from).collect(),
            times: BTreeMap::new(),
            ends: BTreeMap::new(),
            premises: BTreeMap::new(),
        }
    }
}

impl From<&Stand> for StandingMemory {
    fn from(stand: &Stand) -> Self {
        Self {
            memory: stand.id,
            position: stand.at.0,
            turn: stand.turn.0,
            text: stand.text(),
            tokens: stand.len(),
        }
    }
}

impl From<&Running> for Answering {
    fn from(running: &Running) -> Self {
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
            parts: parts.into_iter().map(|(chunk, text)| (chunk.to_string(), text)).collect(),
        }
    }
}

/// An event, where it happened, and its number there.
#[derive(Serialize, ToSchema)]
pub(crate) struct Numbered {
    /// The conversation.
    pub conversation: String,
    /// Counts up in each conversation, from where it was opened.
    pub number: u64,
    #[serde(flatten)]
    pub told: Told,
}

/// What happened.
#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Told {
    /// The model is busy.
    Waiting { ahead: usize },
    /// A message is stored.
    Said { turn: u32, chunks: Vec<Chunk>, live: usize },
    /// What the model would begin to say.
    Previewed { text: String },
    /// A chunk came back to its own place.
    Returned { chunk: Option<Chunk>, why: String, live: usize },
    /// A chunk left the window.
    Left { chunk: String, tokens: usize, why: String, live: usize },
    /// The window is being read.
    Reading { done: usize, of: usize },
    /// The window has been read.
    Ready { kept: usize, left: usize, returned: usize, reread: usize, read: usize },
    /// A token of the answer.
    Token { chunk: String, position: u64, text: String },
    /// What the answer's attention came to.
    Scored { steps: u64, votes: usize, mean: f64, faults: Option<String> },
    /// The model has called a tool.
    Tool { command: String, ok: bool, told: String },
    /// More is in the window than may be.
    Exceeded { why: String },
    /// Something to know.
    Notice { text: String },
    /// The answer is complete.
    Done {
        summary: Ended,
        live: usize,
        dead: usize,
        tokens: usize,
        chunks: Vec<Chunk>,
        window: Vec<(String, f32, usize, f32)>,
    },
    /// There is no answer, or no more of it.
    Failed { why: String },
    /// The message takes something for granted that was said not to be so.
    Premise { premise: String, reason: String, suggestion: String },
    /// Something happened to a memory.
    Memory { id: u64, what: String, live: usize },
    /// Something was done by hand: the state is to be read again.
    Changed { what: String, chunks: Vec<String> },
    /// The settings have changed.
    Settings,
    /// Something happened in a world of rooms: what is named is to be read again.
    World(WorldNews),
}

/// Something happened in a world of rooms: what is named is to be read again.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub(crate) struct WorldNews {
    /// Where.
    pub name: String,
    /// In these rooms.
    pub rooms: Vec<u32>,
    /// To these agents.
    pub agents: Vec<u32>,
    /// Whose heart has beaten.
    pub beat: Option<u32>,
    /// What that one read and said.
    pub thought: Option<Thought>,
    /// What went wrong, or was refused.
    pub failed: Option<String>,
    /// Whether the world was made or ended.
    pub listed: bool,
}

/// What a heartbeat read and said, in tokens.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct Thought {
    /// What was shown.
    pub shown: usize,
    /// What of it had to be read.
    pub read: usize,
    /// What was answered.
    pub answered: usize,
}

/// How a turn went.
#[derive(Serialize, ToSchema)]
pub(crate) struct Ended {
    /// The answer's turn.
    pub turn: u32,
    /// Why it ended: end, stop, length or aborted.
    pub finish: &'static str,
    /// Tokens of the answer.
    pub tokens: usize,
    /// Chunks that came back.
    pub returned: usize,
    /// Chunks that left.
    pub left: usize,
    /// Tokens a second, while it spoke.
    pub pace: f64,
    /// Seconds from the message to the first token.
    pub first: f64,
    /// What each part took, in milliseconds.
    pub ms: BTreeMap<&'static str, f64>,
}

impl From<&Summary> for Ended {
    fn from(summary: &Summary) -> Self {
        let before = [Stage::Store, Stage::Preview, Stage::Recall, Stage::Read];
        Self {
            turn: summary.turn.0,
            finish: summary.finish.name(),
            tokens: summary.tokens,
            returned: summary.returned,
            left: summary.left,
            pace: summary.pace(),
            first: before.iter().map(|&stage| summary.took(stage).as_secs_f64()).sum(),
            ms: Stage::ALL.iter().map(|&s| (s.name(), summary.took(s).as_secs_f64() * 1e3)).collect(),
        }
    }
}

/// What there is to tell of an event; none: nothing that anybody outside would want to know.
pub(crate) fn told(event: &Event, board: &Board) -> Option<Told> {
    // A token is told without looking at anything: there are many of them.
    if let Event::Token { chunk, position, text } = event {
        return Some(Told::Token { chunk: chunk.to_string(), position: position.0, text: text.clone() });
    }
    let standing = board.look().standing;
    let (timeline, live) = (&standing.timeline, standing.live());
    let rows = |turn| {
        let chunks = timeline.turn_chunks(turn).filter(|chunk| chunk.is_live());
        chunks.map(|chunk| Chunk::of(chunk, timeline, 0)).collect::<Vec<_>>()
    };
    Some(match event {
        Event::Waiting { ahead } => Told::Waiting { ahead: *ahead },
        Event::Said { turn, .. } => Told::Said { turn: turn.0, chunks: rows(*turn), live },
        Event::Previewed { text } => Told::Previewed { text: text.clone() },
        Event::Returned { chunk, why, .. } => {
            let here = timeline.chunk(*chunk).filter(|chunk| chunk.is_here());
            Told::Returned { chunk: here.map(|c| Chunk::of(c, timeline, 0)), why: why.clone(), live }
        }
        Event::Left { chunk, tokens, why } => {
            Told::Left { chunk: chunk.to_string(), tokens: *tokens, why: why.clone(), live }
        }
        Event::Reading { done, of } => Told::Reading { done: *done, of: *of },
        Event::Ready(upkeep) => Told::Ready {
            kept: upkeep.kept,
            left: upkeep.left,
            returned: upkeep.returned,
            reread: upkeep.reread,
            read: upkeep.read,
        },
        Event::Scored { steps, votes, mean, faults } => Told::Scored {
            steps: *steps,
            votes: *votes,
            mean: *mean,
            faults: faults.as_ref().map(|(times, why)| format!("{times} steps: {why}")),
        },
        Event::Tool(done) => Told::Tool { command: done.command.clone(), ok: done.ok, told: done.told() },
        Event::Exceeded(why) => Told::Exceeded { why: why.clone() },
        Event::Notice(text) => Told::Notice { text: text.clone() },
        Event::Done(summary) => Told::Done {
            summary: summary.into(),
            live,
            dead: timeline.chunks().filter(|c| is_dead(*c)).count(),
            tokens: timeline.len(),
            chunks: rows(summary.turn),
            window: (with_gaps(timeline).zip(lights(timeline, standing.rank)))
                .map(|((chunk, gap), light)| (chunk.id().to_string(), chunk.peak().0, gap, light))
                .collect(),
        },
        Event::Premise { premise, reason, suggestion } => {
            Told::Premise { premise: premise.clone(), reason: reason.clone(), suggestion: suggestion.clone() }
        }
        Event::Memory { id, what } => Told::Memory { id: *id, what: (*what).to_owned(), live },
        Event::Failed(why) => Told::Failed { why: why.clone() },
        Event::Changed { what, chunks } => Told::Changed {
            what: (*what).to_owned(),
            chunks: chunks.iter().map(ToString::to_string).collect(),
        },
        Event::Token { .. } | Event::Stage(..) => return None,
    })
}

/// Something to say.
#[derive(Deserialize, ToSchema)]
pub(crate) struct Message {
    /// What is said.
    pub text: String,
    /// A number of the client's own for this message: sent again with the same one, it is taken once.
    #[serde(default)]
    pub id: Option<String>,
}

/// Something that was begun.
#[derive(Serialize, ToSchema)]
pub(crate) struct Begun {
    /// How many wait for the model before it.
    pub ahead: usize,
}

/// What the user wants done to chunks.
#[derive(Deserialize, ToSchema)]
pub(crate) struct Signals {
    /// pin, unpin, prune, resurrect, delete, restore or merge.
    pub signal: String,
    /// The names of the chunks, such as `u4.0`.
    pub chunks: Vec<String>,
}

/// What was done to chunks.
#[derive(Serialize, ToSchema)]
pub(crate) struct SignalsDone {
    /// What is true now.
    pub done: String,
    /// Of which: what hangs on those that were named is among them.
    pub chunks: Vec<String>,
    /// With this number it can be taken back.
    pub undo: u64,
}

/// The number of what is to be taken back.
#[derive(Deserialize, ToSchema)]
pub(crate) struct Undo {
    /// As it was told when it was done.
    pub undo: u64,
}

/// Something that happened to a chunk.
#[derive(Serialize, ToSchema)]
pub(crate) struct Story {
    /// When, in milliseconds since 1970.
    pub at: i64,
    /// What.
    pub what: String,
    /// Why.
    pub why: String,
}

impl From<Happened> for Story {
    fn from(happened: Happened) -> Self {
        let Happened { at, what, why, .. } = happened;
        Self { at, what: what.to_owned(), why }
    }
}

/// All that is known of a chunk.
#[derive(Serialize, ToSchema)]
pub(crate) struct Close {
    /// The chunk.
    pub chunk: Chunk,
    /// Its tokens: number, text, brightness, whether each is live, and whether it only frames.
    pub words: Vec<Word>,
    /// How often its tokens stood out.
    pub votes: u64,
    /// The attention that it has received in all.
    pub attention: f64,
    /// What share of the attention a token of it receives, on average.
    pub share: Option<f64>,
    /// What happened to it, the oldest first.
    pub history: Vec<Story>,
    /// What it leaves and comes back with.
    pub pair: Option<String>,
    /// What is deleted with it, because it cannot stand without it.
    pub goes_along: Vec<Chunk>,
}

/// A token.
#[derive(Serialize, ToSchema)]
pub(crate) struct Word {
    /// Its place on the timeline.
    pub position: u64,
    /// The model's number for it.
    pub id: u32,
    /// What it says.
    pub text: String,
    /// How bright it is.
    pub light: f32,
    /// Whether it is in the window.
    pub live: bool,
    /// Whether it frames a message and was said by nobody.
    pub frame: bool,
}

/// What has left the window.
#[derive(Serialize, ToSchema)]
pub(crate) struct Graveyard {
    /// How many there are that fit the question.
    pub of: usize,
    /// Some of them.
    pub chunks: Vec<Chunk>,
}

/// What was found.
#[derive(Serialize, ToSchema)]
pub(crate) struct Found {
    /// The chunk.
    pub chunk: Chunk,
    /// How well it answers.
    pub score: f64,
    /// Why it was found.
    pub because: String,
}

/// How a turn went, and how the window stood after it.
#[derive(Serialize, ToSchema)]
pub(crate) struct TurnRecord {
    /// The turn.
    pub turn: u32,
    /// When it ended, in milliseconds since 1970.
    pub at: i64,
    /// What was written down of it.
    #[schema(value_type = Object)]
    pub record: serde_json::Value,
}

/// What a token looked at when it was made. Shares of all attention, over all layers and heads.
#[derive(Serialize, ToSchema)]
pub(crate) struct Attended {
    /// The answer's turn.
    pub turn: u32,
    /// The token.
    pub text: String,
    /// The share of the standing instructions, the first token among them, which takes what is looked at nowhere else.
    pub instructions: f32,
    /// The share of what the answer had said already.
    pub itself: f32,
    /// The shares of paragraphs, the largest first.
    pub chunks: Vec<(String, f32)>,
    /// The tokens with the largest shares.
    pub tokens: Vec<AttendedToken>,
}

/// A token that was looked at.
#[derive(Serialize, ToSchema)]
pub(crate) struct AttendedToken {
    /// Its place on the timeline.
    pub position: u64,
    /// Its chunk.
    pub chunk: String,
    /// What it says; empty where it is not in memory.
    pub text: String,
    /// Its share.
    pub share: f32,
}

/// A window as it was.
#[derive(Serialize, ToSchema)]
pub(crate) struct Past {
    /// The turn that had just been said.
    pub turn: u32,
    /// Tokens in the window then, with the standing instructions as they are now.
    pub live: usize,
    /// The window then. How bright things were is not kept: peaks are those of birth.
    pub chunks: Vec<Chunk>,
    /// Those of them that are not in the window now.
    pub gone: Vec<String>,
}

/// A new conversation that shares the past of another.
#[derive(Deserialize, ToSchema)]
pub(crate) struct Branch {
    /// Its name.
    pub name: String,
    /// Up to which turn; all of it, where none is told.
    pub turn: Option<u32>,
}

/// A new name.
#[derive(Deserialize, ToSchema)]
pub(crate) struct Name {
    /// The name.
    pub name: String,
}

/// A setting's new value.
#[derive(Deserialize, ToSchema)]
pub(crate) struct NewValue {
    /// As it would be written in the settings file; null: back to what it is without.
    pub value: Option<String>,
}

/// The model's notes.
#[derive(Serialize, Deserialize, ToSchema)]
pub(crate) struct Note {
    /// Which file.
    pub file: String,
    /// What is in it.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_core::notation;

    #[test]
    fn lights_are_told_apart_by_what_decides() {
        let timeline = notation::read("u0.0:3*900 a1.0:2*700 u2.0:4*700 a3.0:2*100").expect("a timeline");
        assert_eq!(lights(&timeline, Rank::Peak), [1.0, 0.75, 0.75, 0.0], "peaks have a scale");
        assert_eq!(lights(&timeline, Rank::Mean), [1.0, 0.5, 0.5, 0.0], "everything else has places");
        assert_eq!(lights(&timeline, Rank::Share), [0.5; 4], "nobody has looked at any of them");
        let one = notation::read("u0.0:3*900").expect("a timeline");
        assert_eq!(lights(&one, Rank::Mean), [0.5]);
    }
}

/// An answer, or a version of the last exchange, that can be chosen.
#[derive(Serialize, ToSchema)]
pub(crate) struct Variant {
    /// Its first turn, by which it is chosen.
    pub turn: u32,
    /// What it says, message by message.
    pub messages: Vec<VariantMessage>,
    /// Whether it is what stands in the conversation now.
    pub stands: bool,
}

/// A message of a variant.
#[derive(Serialize, ToSchema)]
pub(crate) struct VariantMessage {
    /// Who says it: user or assistant.
    pub role: String,
    /// What it says.
    pub text: String,
}

impl From<halo_engine::variant::Choice> for Variant {
    fn from(choice: halo_engine::variant::Choice) -> Self {
        let message = |(role, text): (halo_core::token::Role, String)| VariantMessage {
            role: role.name().to_owned(),
            text,
        };
        Self {
            turn: choice.turns.first().map_or(0, |turn| turn.0),
            messages: choice.messages.into_iter().map(message).collect(),
            stands: choice.stands,
        }
    }
}

/// Which variant is wanted.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Chosen {
    /// Its first turn.
    pub turn: u32,
}
