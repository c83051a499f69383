//! Opens a conversation for a session: loads it, retokenizes it where the model has changed, and marks a turn that was
//! interrupted when the program ended.

use crate::attention_history::AttentionHistory;
use crate::branch;
use crate::chat_format::ChatFormatter;
use crate::chat_model::ChatModel;
use crate::chat_options::{ChatDefaults, ChatOptions};
use crate::client_history::store_message_keys;
use crate::conversation::{Conversation, RUNNING_TURN_KEY, TEMPLATE_KEY};
use crate::memory::carry::carried_text;
use crate::memory::manager::MemoryManager;
use crate::memory::record::{Memory, load_memories};
use crate::parts::{AnswerBegin, SessionParts};
use crate::premise::PremiseChecker;
use crate::recorder::RecorderSlot;
use crate::retokenize::Retokenizer;
use crate::rules::ConversationRules;
use crate::snapshot::SnapshotPublisher;
use crate::tools;
use crate::turn_record::TurnRecord;
use crate::window_size::{automatic_window, load_speed};
use halo_core::Error;
use halo_core::embedder::Embedder;
use halo_core::model::Model;
use halo_core::store::{Access, RecordKind, Store};
use halo_core::token::{Role, TurnId};
use halo_recall::recall::Recall;

/// What a session is opened with.
pub(crate) struct OpenRequest<'a> {
    pub store: Box<dyn Store + Send>,
    pub model: Box<dyn Model + Send>,
    pub embedder: Option<Box<dyn Embedder + Send>>,
    pub name: &'a str,
    pub rules: ConversationRules,
    pub access: Access,
    pub indexing: SearchIndexing,
    /// Hears how many messages were retokenized, and of how many.
    pub progress: &'a mut dyn FnMut(usize, usize),
}

/// Whether the search index of a conversation is built when it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchIndexing {
    Build,
    /// Building it reads all of the text, and a reader that does not search needs none.
    Skip,
}

/// Opens a conversation. Returns its parts, and what the user should know.
pub(crate) fn open_parts(request: OpenRequest<'_>) -> Result<(SessionParts, Vec<String>), Error> {
    let OpenRequest { store, mut model, embedder, name, mut rules, access, indexing, progress } = request;
    let mut conversation = Conversation::open(store, name, access)?;
    let mut notices = Vec::new();
    let has_messages = !conversation.timeline().is_empty();
    let defaults =
        ChatDefaults { system_prompt: rules.system_prompt.clone(), sampling: rules.sampling.clone() };
    // A conversation without messages has no settings of its own yet.
    if has_messages {
        let options = ChatOptions::load(conversation.store(), name)?;
        rules.sampling = options.sampling.apply_to(&rules.sampling);
        rules.system_prompt = options.system_prompt.unwrap_or(rules.system_prompt);
        rules.persona = options.persona;
    }
    let prefill_speed = load_speed(&mut conversation, model.info())?;
    rules.set_auto_sizes(automatic_window(model.info().context, prefill_speed));
    let token_limit = rules.token_limit(model.info().context, 0);
    let format = ChatFormatter {
        template: model.info().template.clone(),
        system_prompt: build_system_prompt(&mut conversation, &rules, token_limit)?,
        show_dates: rules.show_dates,
        names: rules.speaker_names.clone(),
    };
    if has_messages {
        let mut retokenizer = Retokenizer::new(&mut *model, &format, &rules.context.strategy);
        notices.extend(adopt_model(&mut conversation, &mut retokenizer, access, progress)?);
    }
    conversation.set_origin(&model.info().name, &ChatFormatter::fingerprint(&format.template));
    if access == Access::Write
        && let Some(turn) = mark_interrupted_turn(&mut conversation)?
    {
        notices.push(format!("the answer of turn {} was cut off when the program ended", turn.0));
    }
    let (store, timeline) = conversation.store_and_timeline();
    let recall = match indexing {
        SearchIndexing::Build => Recall::open(store, name, timeline, embedder)?,
        SearchIndexing::Skip => Recall::without_index(name),
    };
    let last_user_turn = timeline.turns().iter().rev().find(|turn| turn.role == Role::User);
    let last_user_day = last_user_turn.and_then(|turn| recall.turn_date(turn.id));
    if let Some(parent) = branch::load_branch_parent(store, name)? {
        model.inherit_kv(conversation.kv_key(), &parent.kv_key, parent.shared_tokens);
    }
    let mut parts = SessionParts {
        model: ChatModel::new(model, format)?,
        recall,
        memories: MemoryManager::load(&mut conversation)?,
        premises: PremiseChecker {
            method: rules.premise_method,
            principles: rules.judge_principles.clone(),
            search_options: rules.recall,
        },
        recorder: RecorderSlot::default(),
        attention_history: AttentionHistory::default(),
        publisher: SnapshotPublisher::default(),
        conversation,
        rules,
        last_user_day,
        next_message_id: None,
        next_answer: AnswerBegin::default(),
        has_set_tools: false,
        unsaved_system_prompt: None,
        unsaved_sampling: None,
        unsaved_persona: None,
        unsaved_model: None,
        defaults,
        prefill_speed,
        #[cfg(feature = "testing")]
        announces_before_commit: false,
    };
    parts.memories.refresh_placement(&mut parts.conversation, &parts.rules);
    let token_limit = parts.token_limit();
    let SessionParts { conversation, model, memories, rules, .. } = &mut parts;
    let placed = memories.plan_placement(token_limit, conversation, model, rules)?;
    memories.set_placed(placed);
    if access == Access::Write {
        store_message_keys(&mut parts.conversation)?;
    }
    Ok((parts, notices))
}

/// The user's system prompt, followed by the instructions for tools with the notes so far and by carried memories. It is made when the conversation
/// is opened: if it changed with every note, the whole window would be prefilled again each time. A byte is at most one
/// token, so the notes take at most a quarter of the window (of a very small window, [`MIN_PREVIEW_BYTES`]).
pub(crate) fn build_system_prompt(
    conversation: &mut Conversation,
    rules: &ConversationRules,
    token_limit: usize,
) -> Result<String, Error> {
    let (store, name, _) = conversation.body_loader();
    let memories = load_memories(store, name)?;
    Ok(join_system_prompt(&base_system_prompt(conversation, rules, token_limit)?, &memories, token_limit))
}

/// A system prompt with the memories that were carried from other conversations. A token has about four bytes, so they take
/// about a quarter of the window.
pub(crate) fn join_system_prompt(base: &str, memories: &[Memory], token_limit: usize) -> String {
    match carried_text(memories, token_limit) {
        carried if carried.is_empty() => base.to_owned(),
        carried => format!("{}\n\n{carried}", base.trim()).trim().to_owned(),
    }
}

/// The system prompt without carried memories.
pub(crate) fn base_system_prompt(
    conversation: &mut Conversation,
    rules: &ConversationRules,
    token_limit: usize,
) -> Result<String, Error> {
    if rules.tools.is_none() {
        return Ok(rules.persona.complete_prompt(&rules.system_prompt));
    }
    let notes = conversation.records(RecordKind::Note)?;
    let notes = notes.into_iter().find(|record| record.key == tools::notes::NOTES_FILE);
    let notes: Option<serde_json::Value> = notes.and_then(|notes| serde_json::from_str(&notes.value).ok());
    let preview_bytes = (token_limit / 4).max(MIN_PREVIEW_BYTES);
    let instructions = tools::tool_instructions(notes.as_ref(), preview_bytes);
    let system_prompt = rules.persona.complete_prompt(&rules.system_prompt);
    Ok(format!("{}\n\n{instructions}", system_prompt.trim()))
}

/// Enough for the names of a few topics.
const MIN_PREVIEW_BYTES: usize = 512;

/// Retokenizes the conversation if its tokens are of another model or another template. A conversation that is open for
/// reading is left as it is. Returns a notice for the user.
fn adopt_model(
    conversation: &mut Conversation,
    retokenizer: &mut Retokenizer<'_>,
    access: Access,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Option<String>, Error> {
    let new_model = retokenizer.model.info().name.clone();
    let fingerprint = ChatFormatter::fingerprint(&retokenizer.format.template);
    let name = conversation.name().to_owned();
    let summary = conversation.store().find_conversation(&name)?;
    let old_model = summary.map(|summary| summary.model).filter(|model| !model.is_empty());
    let old_fingerprint = conversation.setting(TEMPLATE_KEY)?;
    if old_model.as_deref() == Some(new_model.as_str()) && old_fingerprint.as_deref() == Some(&fingerprint) {
        return Ok(None);
    }
    if access == Access::Read {
        return Ok(Some(format!("the next message retokenizes this conversation for {new_model}")));
    }
    let messages = conversation.timeline().turns().len();
    retokenizer.has_headers = old_model.is_some();
    let store = conversation.store();
    let kept_as = retokenize_copy(store, &name, retokenizer, old_model.as_deref(), messages, progress)?;
    conversation.reload(access)?;
    Ok(Some(match old_model {
        Some(old_model) => format!(
            "this conversation was written with {old_model} and was retokenized for {new_model}; brightness and pruned \
             chunks were carried over. The original is kept as '{kept_as}'"
        ),
        None => {
            format!("this conversation was tokenized for {new_model}; the original is kept as '{kept_as}'")
        }
    }))
}

/// Replaces a conversation with a retokenized copy. Returns the name under which the original is kept.
fn retokenize_copy(
    store: &mut dyn Store,
    name: &str,
    retokenizer: &mut Retokenizer<'_>,
    old_model: Option<&str>,
    messages: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<String, Error> {
    let model = retokenizer.model.info().name.clone();
    let fingerprint = ChatFormatter::fingerprint(&retokenizer.format.template);
    let taken: Vec<String> = store.list_conversations()?.into_iter().map(|summary| summary.name).collect();
    let free_name = |base: String| {
        let numbered = (2..).map(|n| format!("{base} {n}"));
        std::iter::once(base.clone()).chain(numbered).find(|name| !taken.contains(name)).unwrap_or(base)
    };
    let original = free_name(match old_model {
        Some(old_model) => format!("{name} ({old_model})"),
        None => format!("{name} (original)"),
    });
    let mut done = 0;
    store.replace_by_copy(name, &original, &model, &[(TEMPLATE_KEY, &fingerprint)], &mut |turn| {
        done += 1;
        progress(done, messages);
        retokenizer.retokenize_message(turn).map(Some)
    })?;
    Ok(original)
}

/// Marks a turn that was running when the program ended as interrupted. Returns it.
fn mark_interrupted_turn(conversation: &mut Conversation) -> Result<Option<TurnId>, Error> {
    let Some(turn) = conversation.setting(RUNNING_TURN_KEY)? else { return Ok(None) };
    let record = TurnRecord::interrupted().to_json();
    conversation.put_record(RecordKind::Turn, &turn, Some(&record))?;
    conversation.put_setting(RUNNING_TURN_KEY, None)?;
    Ok(turn.parse().ok().map(TurnId))
}
