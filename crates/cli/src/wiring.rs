//! Construction: settings become the model, the embedder, the session and the rules of the engine.

use crate::env::Env;
use crate::models::quantization_name;
use crate::output::print_notice;
use crate::progress::Progress;
use crate::script_model::{ScriptFileModel, script_file};
use crate::settings::Settings;
use crate::settings::value::{AutoOr, HeadReduction, IntInRange, TextSetting};
use anyhow::Result;
use halo_core::attention::AttentionRequest;
use halo_core::brightness::ScoringKind;
use halo_core::embedder::Embedder;
use halo_core::model::{Model, Sampling};
use halo_engine::chat_format::SpeakerNames;
use halo_engine::chat_options::Persona;
use halo_engine::cooled_model::CooledModel;
use halo_engine::memory::{MemoryRules, ReflectionRules};
use halo_engine::rules::{ConversationRules, ForgettingRules};
use halo_engine::session::Session;
use halo_engine::tools::jq::JqRunner;
use halo_llama::ffi::AttentionSource;
use halo_llama::gguf::GgufValue;
use halo_llama::gpu_layers::GpuLayers;
use halo_llama::kv_archive::KvArchiveLimits;
use halo_llama::model::{Llama, LlamaOptions as Running};
use halo_llama::template_runner::TemplateRunner;
use halo_recall::embed::EmbedderHandle;
use halo_recall::rank::SearchMode;
use halo_recall::recall::SearchOptions;
use halo_remote::RemoteModel;
use halo_server::ModelDetails;
use halo_store::database::Database;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

/// Opens a conversation with the model, the store and the embedder that flags and settings name.
pub fn open_session(env: &Env, settings: &Settings, name: &str) -> Result<Session> {
    let store = env.open_store()?;
    open_conversation(store, open_model(env, settings)?, env, settings, name)
}

/// Opens a conversation with a model that is loaded.
pub fn open_session_with(
    model: Box<dyn Model + Send>,
    env: &Env,
    settings: &Settings,
    name: &str,
) -> Result<Session> {
    open_conversation(env.open_store()?, model, env, settings, name)
}

fn open_conversation(
    store: Database,
    model: Box<dyn Model + Send>,
    env: &Env,
    settings: &Settings,
    name: &str,
) -> Result<Session> {
    let embedder = match settings.recall_mode {
        SearchMode::Lexical => None,
        _ => open_embedder(env, settings)?,
    };
    let embedder = embedder.map(|embedder| Box::new(embedder) as Box<dyn Embedder + Send>);
    let rules = conversation_rules(settings);
    let bar = std::cell::OnceCell::new();
    let session = Session::open(Box::new(store), model, embedder, name, rules, &mut |done, total| {
        bar.get_or_init(|| Progress::new("prefilling", total as u64)).set_position(done as u64);
    });
    Ok(session?)
}

/// How to search, by the settings.
pub fn search_options(settings: &Settings, limit: usize) -> SearchOptions {
    SearchOptions {
        mode: settings.recall_mode,
        user_boost: settings.resurrect_user_boost.0,
        diversity: settings.recall_diversity.0,
        limit,
        floor: settings.resurrect_floor.0,
    }
}

/// The embedder, if it is installed.
pub fn open_embedder(env: &Env, settings: &Settings) -> Result<Option<EmbedderHandle>> {
    let folder = env.model_library()?.find_embedder(settings.recall_embedder.as_text())?;
    Ok(folder.map(|folder| EmbedderHandle::new(folder, env.models.thread_count())).transpose()?)
}

/// Opens the chat model: a local one, one behind a URL, or a script.
pub fn open_model(env: &Env, settings: &Settings) -> Result<Box<dyn Model + Send>> {
    if let Some(address) = env.models.name.as_deref().filter(|_| uses_remote_model(env)) {
        let options = halo_remote::RemoteOptions {
            context: context_length(settings),
            send_key: !env.models.chosen_by_client,
            ..halo_remote::RemoteOptions::default()
        };
        let model: Box<dyn Model + Send> = Box::new(RemoteModel::connect(address, &options)?);
        return Ok(match settings.model_cooling_tokens.as_usize() {
            0 => model,
            threshold => Box::new(CooledModel::new(model, threshold)),
        });
    }
    if let Some(script) = open_script(env, settings)? {
        return Ok(Box::new(script));
    }
    Ok(Box::new(open_local_model(env, &one_answer_at_a_time(settings))?))
}

/// The model of `scripted:FILE`, if that is what runs.
pub fn open_script(env: &Env, settings: &Settings) -> Result<Option<ScriptFileModel>> {
    let file = env.models.name.as_deref().and_then(script_file);
    file.map(|file| ScriptFileModel::open(file, context_length(settings))).transpose()
}

/// Whether the model runs on another server.
pub fn uses_remote_model(env: &Env) -> bool {
    env.models.name.as_deref().is_some_and(RemoteModel::is_address)
}

/// The settings for a program that has one conversation.
pub fn one_answer_at_a_time(settings: &Settings) -> Settings {
    Settings { model_parallel: IntInRange(1), ..settings.clone() }
}

/// Opens the local model with its KV archive in the data folder.
pub fn open_local_model(env: &Env, settings: &Settings) -> Result<Llama> {
    open_llama(env, settings, kv_archive_limits(env, settings)?)
}

/// The KV archive in the data folder.
pub fn kv_archive_limits(env: &Env, settings: &Settings) -> Result<KvArchiveLimits> {
    let folder = Some(env.require_data_dir()?.join("kv"));
    Ok(KvArchiveLimits { ram: settings.kv_ram.0, disk: settings.kv_disk.0, folder })
}

/// What the API reports about a model beyond what the engine needs.
pub fn model_facts(llama: &Llama, file: &Path) -> ModelDetails {
    let weights = llama.weights();
    let number = |key: &str| weights.header.arch_value(key).and_then(GgufValue::as_f64).unwrap_or(0.0);
    let token = |key: &str| {
        let found = weights
            .header
            .metadata
            .get(&format!("tokenizer.ggml.{key}_token_id"))
            .and_then(GgufValue::as_f64);
        found.map_or(-1, |id| id as i64)
    };
    let count = |key: &str| number(key) as usize;
    let text = |key: &str| match weights.header.metadata.get(key) {
        Some(GgufValue::Text(text)) => text.clone(),
        _ => String::new(),
    };
    let modified = std::fs::metadata(file).and_then(|metadata| metadata.modified()).ok();
    let modified = modified.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let heads = count("attention.head_count");
    ModelDetails {
        vocab_size: weights.vocab_size(),
        layers: weights.layer_count(),
        heads,
        kv_heads: Some(count("attention.head_count_kv")).filter(|&n| n > 0).unwrap_or(heads),
        embedding_size: count("embedding_length"),
        trained_context: weights.trained_context() as usize,
        bos: token("bos"),
        eos: token("eos"),
        eot: token("eot"),
        rope_base: Some(number("rope.freq_base")).filter(|&n| n > 0.0).unwrap_or(10_000.0),
        rope_scale: 1.0,
        architecture: weights.header.architecture().unwrap_or_default().to_owned(),
        parameters: text("general.size_label"),
        quantization: quantization_name(&weights.header).unwrap_or_default().to_owned(),
        file_name: file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
        file_bytes: weights.header.file_bytes,
        modified: modified.map_or(0, |age| age.as_secs() as i64),
        chat_template: weights.chat_template().unwrap_or_default(),
    }
}

/// Opens the local model with this KV archive.
pub fn open_llama(env: &Env, settings: &Settings, kv_archive: KvArchiveLimits) -> Result<Llama> {
    let model = Llama::open(&env.model_file()?, &llama_options(env, settings, kv_archive))?;
    announce_gpu(&model);
    Ok(model)
}

/// Says where the layers of a model are, if a GPU may have them.
pub fn announce_gpu(model: &Llama) {
    if let Some(placement) = model.gpu_placement() {
        print_notice(&placement.to_string());
    }
}

/// The options of the local model, by flags and settings.
pub fn llama_options(env: &Env, settings: &Settings, kv_archive: KvArchiveLimits) -> Running {
    Running {
        context: context_length(settings).map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
        parallel: u32::try_from(settings.model_parallel.0).unwrap_or(1),
        threads: env.models.thread_count(),
        gpu_layers: gpu_layers(settings),
        kv_mode: settings.kv_mode,
        kv_key_type: settings.kv_type,
        attention: settings.model_attention.source(),
        kv_archive,
        check_cells: settings.kv_check,
        self_tests: env.data_dir().map(|data| data.join("self-tests")),
        template_runner: template_runner(),
        ..Running::default()
    }
}

/// The chat template of a model file is untrusted: it is rendered in a subprocess of this program.
pub fn template_runner() -> TemplateRunner {
    std::env::current_exe().map_or(TemplateRunner::InProcess, TemplateRunner::Subprocess)
}

/// How many layers of the model are on the GPU.
pub fn gpu_layers(settings: &Settings) -> GpuLayers {
    match settings.model_gpu_layers {
        AutoOr::Auto => GpuLayers::Auto,
        AutoOr::Value(count) => GpuLayers::Count(u32::try_from(count.0).unwrap_or(0)),
    }
}

/// The context length of the model, if the settings name one.
pub fn context_length(settings: &Settings) -> Option<usize> {
    match settings.model_context {
        AutoOr::Auto => None,
        AutoOr::Value(n) => Some(n.as_usize()),
    }
}

/// The rules of a conversation, by the settings.
pub fn conversation_rules(settings: &Settings) -> ConversationRules {
    ConversationRules {
        context: settings.context_rules(),
        auto_sizes: settings.auto_sizes(),
        reserved_tokens: settings.reserved_tokens(),
        watch: attention_config(settings),
        sampling: Sampling {
            max_tokens: settings.generation_max_tokens.as_usize(),
            temperature: settings.generation_temperature.0 as f32,
            top_k: settings.generation_top_k.as_usize(),
            top_p: settings.generation_top_p.0 as f32,
            min_p: settings.generation_min_p.0 as f32,
            repetition_penalty: settings.generation_repetition.0 as f32,
            seed: match settings.generation_seed {
                AutoOr::Value(seed) => seed.0.unsigned_abs(),
                // A new seed each time.
                AutoOr::Auto => jiff::Timestamp::now().as_nanosecond() as u64,
            },
            ..Sampling::default()
        },
        recall: search_options(settings, settings.resurrect_candidates.as_usize()),
        resurrect_brightness: settings.resurrect_brightness,
        resurrect_limit: settings.resurrect_limit,
        preview_tokens: settings.resurrect_preview_tokens.as_usize(),
        // jq filters run in a subprocess of this program. Without its path there are no tools.
        tools: std::env::current_exe().ok().filter(|_| settings.tools_enabled).map(JqRunner::Subprocess),
        system_prompt: settings.chat_system.0.clone(),
        persona: Persona::default(),
        show_dates: settings.chat_dates,
        speaker_names: SpeakerNames {
            user: name_or_empty(&settings.chat_user_name),
            assistant: name_or_empty(&settings.chat_assistant_name),
        },
        memory: settings.memory_enabled.then(|| memory_config(settings)),
        premise_method: settings.premise_check.as_option(),
        judge_principles: settings.judge_principles(),
        keep_reasoning: settings.reasoning_keep,
        attention_history_bytes: usize::try_from(settings.trace_attention.0).unwrap_or(usize::MAX),
        forgetting: settings.lethe_cycle.then_some(ForgettingRules { threshold: settings.lethe_pressure.0 }),
    }
}

fn memory_config(settings: &Settings) -> MemoryRules {
    let quiet = ReflectionRules {
        idle_for: Duration::from_secs(60 * settings.memory_quiet_minutes.0.unsigned_abs()),
        min_messages: settings.memory_quiet_messages.as_usize(),
    };
    MemoryRules {
        range_tokens: settings.memory_range_tokens.as_usize(),
        max_range_tokens: settings.memory_most_tokens.as_usize().max(settings.memory_range_tokens.as_usize()),
        max_tokens: settings.memory_tokens.as_usize(),
        delay_answers: settings.memory_delay.as_usize(),
        window_share: settings.memory_share.0,
        overlap_tokens: settings.memory_overlap_tokens.as_usize(),
        reflection: settings.memory_reflect.then_some(quiet),
    }
}

fn name_or_empty(setting: &AutoOr<TextSetting>) -> String {
    setting.as_text().unwrap_or_default().to_owned()
}

/// Rows of every 8th token prune like rows of every token (LOG.md), and cost a GPU a twentieth of its speed at most.
const GPU_STRIDE: u32 = 8;

fn attention_stride(settings: &Settings) -> u32 {
    if settings.brightness_strategy == ScoringKind::Ttl {
        return 1;
    }
    let on_gpu = || {
        let (gpu_layers, attention) = (gpu_layers(settings), settings.model_attention.source());
        let options = Running { gpu_layers, attention, ..Running::default() };
        options.allows_gpu() && options.attention_source() == AttentionSource::Queries
    };
    match settings.brightness_stride {
        AutoOr::Value(stride) => stride.0 as u32,
        AutoOr::Auto if on_gpu() => GPU_STRIDE,
        AutoOr::Auto => 1,
    }
}

/// Which attention the model returns.
pub fn attention_config(settings: &Settings) -> AttentionRequest {
    AttentionRequest {
        answer: true,
        stride: attention_stride(settings),
        prompt: settings.brightness_observe_prompt,
        layers: settings.brightness_layers.clone(),
        max: settings.brightness_heads == HeadReduction::Max,
        per_head: false,
        probability: settings.brightness_min_confidence.0 > 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::value::AttentionChoice;
    use halo_llama::ffi::{AttentionSource, KvKeyType};

    #[test]
    fn settings_reach_the_options_of_the_model() {
        let folder = tempfile::tempdir().expect("a folder");
        let settings = Settings {
            model_gpu_layers: AutoOr::Value(IntInRange(17)),
            model_context: AutoOr::Value(IntInRange(4096)),
            kv_type: KvKeyType::Q8_0,
            model_attention: AttentionChoice::Queries,
            kv_check: true,
            ..Settings::default()
        };
        let options = llama_options(&Env::for_tests(folder.path()), &settings, KvArchiveLimits::disabled());
        assert_eq!((options.gpu_layers, options.context), (GpuLayers::Count(17), Some(4096)));
        assert_eq!((options.kv_key_type, options.check_cells), (KvKeyType::Q8_0, true));
        assert_eq!(options.attention, Some(AttentionSource::Queries));
        assert_eq!(options.self_tests, Some(folder.path().join("self-tests")));
    }
}
