//! How the parts are put together: which model speaks, what it goes by, and where it keeps what it knows.

use crate::Common;
use crate::commands::progress::Progress;
use crate::commands::search;
use crate::models;
use crate::settings::Settings;
use crate::settings::value::{
    Auto, Heads, KvMode, Layers, ObservePrompt, PremiseCheck, RecallMode, ReturnBrightness, Text,
};
use anyhow::{Context, Result};
use halo_core::attention::{self, PromptRows, Watch};
use halo_core::seams::{Embedder, Model, Sampling};
use halo_engine::frame::Names;
use halo_engine::memory::{MemoryRules, Quiet};
use halo_engine::premise::Premises;
use halo_engine::rules::{ReturnLight, Rules};
use halo_engine::session::Session;
use halo_engine::tools::jq::Runner;
use halo_llama::gguf::Value;
use halo_llama::graveyard::Room;
use halo_llama::mirror::Mode;
use halo_llama::model::{Llama, Options as Running};
use halo_remote::Remote;
use halo_server::ModelFacts;
use std::time::Duration;

/// Opens a conversation with the model, the store and the embedder that the command line and the settings name.
pub fn session(common: &Common, settings: &Settings, name: &str) -> Result<Session> {
    let store = Box::new(common.open_store()?);
    let embedder = match settings.recall_mode {
        RecallMode::Lexical => None,
        _ => search::embedder(common, settings)?,
    };
    let embedder = embedder.map(|embedder| Box::new(embedder) as Box<dyn Embedder + Send>);
    let model = model(common, settings)?;
    let bar = std::cell::OnceCell::new();
    let session = Session::open(store, model, embedder, name, rules(settings), &mut |done, of| {
        bar.get_or_init(|| Progress::new("reading anew", of as u64)).at(done as u64);
    });
    Ok(session?)
}

/// The model that speaks: of this machine, or behind an address.
pub fn model(common: &Common, settings: &Settings) -> Result<Box<dyn Model + Send>> {
    if let Some(address) = common.model.as_deref().filter(|_| is_remote(common)) {
        let options = halo_remote::Options { context: context(settings), ..halo_remote::Options::default() };
        return Ok(Box::new(Remote::connect(address, &options)?));
    }
    Ok(Box::new(local(common, settings)?))
}

/// Whether the model is behind an address.
pub fn is_remote(common: &Common) -> bool {
    common.model.as_deref().is_some_and(Remote::is_address)
}

/// The model of this machine, which keeps what leaves its memory in the data folder.
pub fn local(common: &Common, settings: &Settings) -> Result<Llama> {
    let data = common.data_folder().context("this system names no data folder: give one with --data")?;
    let room = Room { ram: settings.kv_ram.0, disk: settings.kv_disk.0, folder: Some(data.join("kv")) };
    llama(common, settings, room)
}

/// What there is to tell of a model beyond what the engine needs.
pub fn facts(llama: &Llama) -> ModelFacts {
    let weights = llama.weights();
    let number = |key: &str| weights.header.of_kind(key).and_then(Value::number).unwrap_or(0.0);
    let token = |key: &str| {
        let found =
            weights.header.values.get(&format!("tokenizer.ggml.{key}_token_id")).and_then(Value::number);
        found.map_or(-1, |id| id as i64)
    };
    let count = |key: &str| number(key) as usize;
    let heads = count("attention.head_count");
    ModelFacts {
        vocabulary: weights.vocabulary(),
        layers: weights.layers(),
        heads,
        kv_heads: Some(count("attention.head_count_kv")).filter(|&n| n > 0).unwrap_or(heads),
        embedding: count("embedding_length"),
        trained_context: weights.trained_context() as usize,
        bos: token("bos"),
        eos: token("eos"),
        eot: token("eot"),
        rope_base: Some(number("rope.freq_base")).filter(|&n| n > 0.0).unwrap_or(10_000.0),
        rope_scale: 1.0,
    }
}

/// The model of this machine, which keeps what leaves its memory in `room`.
pub fn llama(common: &Common, settings: &Settings, room: Room) -> Result<Llama> {
    let path = models::find(common, common.model.as_deref())?;
    let running = Running {
        context: context(settings).map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
        threads: common.threads(),
        gpu_layers: u32::try_from(settings.gpu_layers.0).unwrap_or(0),
        mode: match settings.kv_mode {
            KvMode::Keep => Mode::Keep,
            KvMode::Reread => Mode::Reread,
        },
        room,
        ..Running::default()
    };
    Ok(Llama::open(&path, &running)?)
}

/// How many tokens the model is to hold, where the settings say so.
fn context(settings: &Settings) -> Option<usize> {
    match settings.model_context {
        Auto::Auto => None,
        Auto::Set(n) => Some(n.count()),
    }
}

/// What the settings have a conversation go by.
pub fn rules(settings: &Settings) -> Rules {
    Rules {
        context: settings.rules(),
        room: settings.room(),
        watch: watch(settings),
        sampling: Sampling {
            max_tokens: settings.answer_tokens.count(),
            temperature: settings.temperature.0 as f32,
            top_k: settings.top_k.count(),
            top_p: settings.top_p.0 as f32,
            min_p: settings.min_p.0 as f32,
            repetition: settings.repetition.0 as f32,
            seed: match settings.seed {
                Auto::Set(seed) => seed.0.unsigned_abs(),
                // Any other each time.
                Auto::Auto => jiff::Timestamp::now().as_nanosecond() as u64,
            },
            stop: Vec::new(),
            form: None,
        },
        recall: search::manner(settings, settings.candidates.count()),
        returns: match settings.return_brightness {
            ReturnBrightness::Earned => ReturnLight::Earned,
            ReturnBrightness::Mean => ReturnLight::Mean,
            ReturnBrightness::Full => ReturnLight::Full,
        },
        preview: settings.preview_tokens.count(),
        // This program runs filters in a process of its own; one that cannot be found has no tools.
        tools: std::env::current_exe().ok().filter(|_| settings.tools).map(Runner::Program),
        system: settings.system.0.clone(),
        dates: settings.dates,
        names: Names { user: name(&settings.user_name), assistant: name(&settings.assistant_name) },
        memory: settings.memory.then(|| memory(settings)),
        premises: match settings.premises {
            PremiseCheck::Off => None,
            PremiseCheck::Rules => Some(Premises::Rules),
            PremiseCheck::Model => Some(Premises::Model),
        },
    }
}

/// How memories are formed.
fn memory(settings: &Settings) -> MemoryRules {
    let quiet = Quiet {
        after: Duration::from_secs(60 * settings.memory_quiet.0.unsigned_abs()),
        messages: settings.memory_messages.count(),
    };
    MemoryRules {
        range: settings.memory_range.count(),
        most: settings.memory_most.count().max(settings.memory_range.count()),
        tokens: settings.memory_tokens.count(),
        delay: settings.memory_delay.count(),
        share: settings.memory_share.0,
        reflect: settings.memory_reflect.then_some(quiet),
    }
}

fn name(setting: &Auto<Text>) -> String {
    setting.text().unwrap_or_default().to_owned()
}

/// What is watched of a model while it reads and speaks.
pub fn watch(settings: &Settings) -> Watch {
    Watch {
        answer: true,
        prompt: match settings.observe_prompt {
            ObservePrompt::Off => PromptRows::Off,
            ObservePrompt::LastRow => PromptRows::Last,
            ObservePrompt::AllRows => PromptRows::All,
        },
        layers: match &settings.layers {
            Layers::Mean => attention::Layers::Mean,
            Layers::Last => attention::Layers::Last,
            Layers::Max => attention::Layers::Max,
            Layers::List(these) => {
                attention::Layers::These(these.iter().map(|&layer| layer as usize).collect())
            }
        },
        max: settings.heads == Heads::Max,
        full: false,
    }
}
