//! The settings: one table of typed keys. The struct that the program reads, the error messages and the reference
//! page are generated from it.

pub mod load;
pub mod persist;
pub mod reference;
pub mod value;

use halo_agents::principle::JudgePrinciple;
use halo_core::attention::{LayerReduction, PromptRows};
use halo_core::brightness::{AttentionSink, MagnitudeRules, RowMass, ScoringKind, ScoringStrategy};
use halo_core::chunker::ChunkSize;
use halo_core::prune::{PrunePolicy, PrunePolicyKind, RankBy, TieBreak};
use halo_core::rules::ContextRules;
use halo_core::token::Brightness;
use halo_core::ttl::{InitialBrightness, TtlRules};
use halo_engine::premise::PremiseMethod;
use halo_engine::rules::{AutoSizes, ResurrectBrightness, ResurrectLimit};
use halo_engine::window_size;
use halo_llama::ffi::KvKeyType;
use halo_llama::kv_cache::KvCacheMode;
use halo_recall::rank::SearchMode;
use halo_worlds::agent_wrappers::SummaryMethod;
use std::collections::BTreeMap;
use value::{
    AttentionChoice, AutoOr, ByteSize, FetchModels, FloatInRange, HeadReduction, IntInRange, ListSetting,
    NumberRange, OffOr, Preset, SecretSetting, SettingValue, TextSetting, TomlValue,
};

pub struct SettingKey {
    pub name: &'static str,
    pub doc: &'static str,
    /// Allowed values, as a phrase.
    pub allowed: fn() -> String,
    /// Allowed words, if they are fixed.
    pub choices: fn() -> Vec<&'static str>,
    /// The smallest and the largest number, where numbers are allowed.
    pub range: fn() -> Option<NumberRange>,
    /// Whether a value must not be printed.
    pub is_secret: fn() -> bool,
    pub access: SettingAccess,
}

/// Who may change a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettingAccess {
    /// Also clients of the server.
    Http,
    /// Only somebody with access to the settings file, the environment or the command line: the setting decides who
    /// can reach the server, or names a file, an address or a model.
    ByHand,
}

impl SettingKey {
    /// The part before the first dot: `kv` of `kv.ram`.
    #[must_use]
    pub fn section(&self) -> &'static str {
        self.name.split('.').next().unwrap_or(self.name)
    }
}

/// The headings of the reference page, by section.
const SECTION_TITLES: &[(&str, &str)] = &[
    ("preset", "Preset"),
    ("context", "Context window"),
    ("model", "Model"),
    ("generation", "Generation"),
    ("chat", "Chat"),
    ("tools", "Tools"),
    ("reasoning", "Reasoning"),
    ("chunk", "Chunks"),
    ("brightness", "Scoring"),
    ("ttl", "Scoring by time to live (v0)"),
    ("trace", "Attention statistics"),
    ("prune", "Pruning"),
    ("resurrect", "Resurrection"),
    ("recall", "Search"),
    ("premise", "Premises"),
    ("memory", "Memories"),
    ("lethe", "Forgetting"),
    ("rooms", "Rooms of agents"),
    ("kv", "KV cache"),
    ("server", "Server"),
];

/// The heading of a section.
#[must_use]
pub fn section_title(section: &str) -> &str {
    SECTION_TITLES.iter().find(|(name, _)| *name == section).map_or(section, |(_, title)| title)
}

type TokenCountSetting = IntInRange<0, 100_000_000>;
type BrightnessSetting = IntInRange<-100_000, 100_000>;

/// `[http]` after the name of a setting lets clients of the server change it. Settings without it are changed by hand.
macro_rules! setting_access {
    () => {
        SettingAccess::ByHand
    };
    (http) => {
        SettingAccess::Http
    };
}

macro_rules! define_settings {
    ($($(#[doc = $doc:literal])+ $name:literal $([$access:ident])? $field:ident: $type:ty = $default:expr;)+) => {
        #[derive(Clone, Debug, PartialEq)]
        pub struct Settings { $($(#[doc = $doc])+ pub $field: $type,)+ }

        impl Default for Settings {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        /// All keys, in the order of the reference page.
        pub const KEYS: &[SettingKey] = &[$(SettingKey {
            name: $name,
            doc: concat!($($doc, "\n"),+),
            allowed: <$type as SettingValue>::allowed,
            choices: <$type as SettingValue>::choices,
            range: <$type as SettingValue>::range,
            is_secret: <$type as SettingValue>::is_secret,
            access: setting_access!($($access)?),
        },)+];

        impl Settings {
            /// Sets a key; false if the value is not allowed.
            fn set(&mut self, key: &str, raw: &TomlValue) -> bool {
                match key {
                    $($name => <$type as SettingValue>::from_toml(raw).map(|v| self.$field = v).is_some(),)+
                    _ => unreachable!("{key} was looked up before"),
                }
            }

            /// The value of a key, as text and as JSON.
            #[must_use]
            pub fn get(&self, key: &str) -> Option<(String, serde_json::Value)> {
                match key {
                    $($name => Some((self.$field.to_string(), self.$field.to_json())),)+
                    _ => None,
                }
            }
        }
    };
}

define_settings! {
    /// Set of defaults: `halo` (tuned by measurement), `halo_weave` (values and rules of the founding documents) or
    /// `halo_v0` (the first engine). Other settings override it.
    "preset" [http] preset: Preset = Preset::Halo;

    /// Size of the context window after a turn, in tokens; 0 disables pruning; auto: what the model prefills in 30 seconds
    /// at the fastest speed measured in the conversation, as a power of two from 2048 to 8192 tokens, within
    /// `model.context`. With `brightness.strategy = ttl` (v0), `ttl.target` is used instead.
    "context.max_tokens" [http] context_max_tokens: AutoOr<TokenCountSetting> = AutoOr::Auto;
    /// Attention sinks: the first tokens of the context, which are never pruned.
    "context.sink_tokens" [http] context_sink_tokens: TokenCountSetting = IntInRange(4);
    /// Recent window: the latest tokens, which are never pruned; auto: a quarter of `context.max_tokens`.
    "context.recent_tokens" [http] context_recent_tokens: AutoOr<TokenCountSetting> = AutoOr::Auto;

    /// Tokens of `context.max_tokens` reserved after a turn for resurrected chunks, in addition to those for the
    /// answer; auto: a quarter of `context.max_tokens`.
    "context.room_tokens" [http] context_room_tokens: AutoOr<TokenCountSetting> = AutoOr::Auto;

    /// Context length of the model in tokens (size of the KV cache), for the context window and the answer; auto: the
    /// trained context length, at most 8192.
    "model.context" [http] model_context: AutoOr<IntInRange<64, 10_000_000>> = AutoOr::Auto;
    /// Maximum length of a prompt in tokens for a model behind a chat API: above it, the model's earlier answers are
    /// shortened, messages of the user never; 0: no such limit.
    "model.cooling_tokens" [http] model_cooling_tokens: TokenCountSetting = IntInRange(0);
    /// Number of model layers on the GPU, in builds with GPU support; auto: all that fit its free memory together with the KV
    /// cells of one conversation. Where the memory is not enough after all, fewer are tried. 0: the GPU is not used.
    "model.gpu_layers" [http] model_gpu_layers: AutoOr<IntInRange<0, 10_000>> = AutoOr::Auto;
    /// Where attention is read in a local model: `softmax` (flash attention off), `queries` (flash attention on; attention is
    /// computed from the queries and the keys, which on a GPU is several times faster), or `auto`: `queries` with layers on a
    /// GPU, else `softmax`. KV cells that were saved with one are not restored with the other.
    "model.attention" [http] model_attention: AttentionChoice = AttentionChoice::Auto;
    /// Number of answers that `halo serve` generates at once, in one batch; the model's KV cache has cells for as many
    /// conversations where a quarter of the free memory is enough. In company the last bits of an answer may differ: with 1 the
    /// same seed gives the same answer at any time.
    "model.parallel" [http] model_parallel: IntInRange<1, 64> = IntInRange(4);
    /// The model, where no `--model` names one: a name from `halo models`, the path of a GGUF file, the URL of a server, or
    /// scripted:FILE; auto: the default chat model.
    "model.path" model_path: AutoOr<TextSetting> = AutoOr::Auto;
    /// Minutes after which a server unloads a local model that nobody uses; it is loaded again when it is needed. 0: never.
    "model.unload_after" [http] model_unload_after: FloatInRange<0, 100_000> = FloatInRange(30.0);
    /// The most memory of all local models that a server has loaded at once, with their KV caches; auto: what the machine
    /// has free.
    "model.memory" [http] model_memory: AutoOr<ByteSize> = AutoOr::Auto;
    /// Whether `halo chat` and `halo serve` download the default models where they are missing: `ask` (in a terminal),
    /// `always` or `never`.
    "model.fetch" model_fetch: FetchModels = FetchModels::Ask;
    /// Model servers that clients may test, and choose for a chat: hosts, for all of their ports, or hosts with a port.
    /// `localhost` is every loopback address.
    "model.servers" model_servers: ListSetting = ListSetting(vec!["localhost".to_owned()]);

    /// Maximum length of an answer, in tokens. So many tokens of the context window stay free for it, but at least half of
    /// the window stays for the conversation; a longer answer may exceed the window until the turn ends.
    "generation.max_tokens" [http] generation_max_tokens: IntInRange<1, 1_000_000> = IntInRange(1024);
    /// Sampling temperature; 0 is greedy decoding.
    "generation.temperature" [http] generation_temperature: FloatInRange<0, 5> = FloatInRange(0.7);
    /// Top-k sampling: sample from the k most likely tokens; 0 disables it.
    "generation.top_k" [http] generation_top_k: IntInRange<0, 1_000_000> = IntInRange(40);
    /// Top-p (nucleus) sampling: sample from the most likely tokens whose probabilities add up to p; 1 disables it.
    "generation.top_p" [http] generation_top_p: FloatInRange<0, 1> = FloatInRange(0.9);
    /// Min-p sampling: exclude tokens less likely than this fraction of the most likely token; 0 disables it.
    "generation.min_p" [http] generation_min_p: FloatInRange<0, 1> = FloatInRange(0.0);
    /// Repetition penalty for recent tokens; 1 disables it.
    "generation.repetition" [http] generation_repetition: FloatInRange<1, 10> = FloatInRange(1.0);
    /// Random seed: the same seed gives the same answer; auto: a new seed each time.
    "generation.seed" [http] generation_seed: AutoOr<IntInRange<0, { i64::MAX }>> = AutoOr::Auto;

    /// System prompt; never pruned.
    "chat.system" [http] chat_system: TextSetting = TextSetting("You are a helpful assistant.".into());
    /// Tell the model when messages are written: the time at each, and the date at the first of each day. Only for messages of the page and the terminal: into those of clients nothing is written.
    "chat.dates" [http] chat_dates: bool = true;
    /// Name of the user, written before each message; auto: none.
    "chat.user_name" [http] chat_user_name: AutoOr<TextSetting> = AutoOr::Auto;
    /// Name of the assistant, written before each answer; auto: none.
    "chat.assistant_name" [http] chat_assistant_name: AutoOr<TextSetting> = AutoOr::Auto;

    /// Let the model call tools while answering: jq and JSON Patch on its own notes. Small models cannot use them.
    "tools.enabled" [http] tools_enabled: bool = false;

    /// Keep the reasoning of finished answers in the context window. Otherwise it is pruned when the answer is complete; it
    /// stays in the conversation and in exports.
    "reasoning.keep" [http] reasoning_keep: bool = false;

    /// Minimum chunk size in tokens; boundaries before it are ignored.
    "chunk.min_tokens" [http] chunk_min_tokens: IntInRange<1, 100_000> = IntInRange(64);
    /// Maximum chunk size in tokens.
    "chunk.max_tokens" [http] chunk_max_tokens: IntInRange<1, 100_000> = IntInRange(512);

    /// How attention becomes brightness: `magnitude` (magnitude voting) or `ttl` (time to live, v0).
    "brightness.strategy" [http] brightness_strategy: ScoringKind = ScoringKind::Magnitude;
    /// Initial brightness of a token.
    "brightness.initial" [http] brightness_initial: BrightnessSetting = IntInRange(10_000);
    /// Maximum brightness of a token. There is no minimum.
    "brightness.cap" [http] brightness_cap: BrightnessSetting = IntInRange(10_000);
    /// Brightness that a token below the attention threshold loses per step.
    "brightness.decay" [http] brightness_decay: IntInRange<0, 10_000> = IntInRange(1);
    /// Which slot is the attention sink: `first` is the first slot, which is not scored (founding documents); `max`
    /// is the slot with the most attention, and all slots are scored (their program).
    "brightness.sink" [http] brightness_sink: AttentionSink = AttentionSink::First;
    /// Score tokens of the current turn too.
    "brightness.score_current_turn" [http] brightness_score_current_turn: bool = false;
    /// Do not score steps in which the model gave its token a lower probability than this; 0: score every step.
    "brightness.min_confidence" [http] brightness_min_confidence: FloatInRange<0, 1> = FloatInRange(0.0);
    /// How attention is reduced over layers: `mean`, `last`, `max`, or the mean of the listed layers.
    "brightness.layers" [http] brightness_layers: LayerReduction = LayerReduction::Mean;
    /// Attention is read for every Nth token of an answer; `auto`: for every one on a CPU, where it costs nothing, and for
    /// every 8th one where it is computed on a GPU. The `ttl` strategy needs every token.
    "brightness.stride" [http] brightness_stride: AutoOr<IntInRange<1, 1000>> = AutoOr::Auto;
    /// How attention is reduced over the heads of a layer: `mean` or `max`.
    "brightness.heads" [http] brightness_heads: HeadReduction = HeadReduction::Mean;
    /// Which attention rows of the prompt (prefill) are scored: `last_row` of each batch, `all_rows` or `off`.
    "brightness.observe_prompt" [http] brightness_observe_prompt: PromptRows = PromptRows::Last;
    /// How chunks are ranked for pruning: brightness of the brightest token (`peak`), `mean` of all tokens or of the
    /// four brightest (`top4`), number of `votes`, total attention (`sum`), or attention per token and step
    /// (`share`).
    "brightness.rank" [http] brightness_rank: RankBy = RankBy::Share;
    /// Which of two equally ranked chunks is pruned first: `dimmer` (lower mean of the four brightest tokens, then
    /// lower mean, then older) or `older`.
    "brightness.ties" [http] brightness_ties: TieBreak = TieBreak::Dimmer;

    /// Initial brightness of user tokens (v0).
    "ttl.seed.user" [http] ttl_seed_user: FloatInRange<0, 1_000_000> = FloatInRange(255.0);
    /// Initial brightness of system tokens (v0).
    "ttl.seed.system" [http] ttl_seed_system: FloatInRange<0, 1_000_000> = FloatInRange(255.0);
    /// Initial brightness of tool result tokens (v0).
    "ttl.seed.tool" [http] ttl_seed_tool: FloatInRange<0, 1_000_000> = FloatInRange(255.0);
    /// Initial brightness of generated tokens (v0).
    "ttl.seed.llm" [http] ttl_seed_llm: FloatInRange<0, 1_000_000> = FloatInRange(200.0);
    /// Initial brightness of all other tokens (v0).
    "ttl.seed.default" [http] ttl_seed_default: FloatInRange<0, 1_000_000> = FloatInRange(200.0);
    /// Maximum brightness of a token (v0).
    "ttl.max" [http] ttl_max: FloatInRange<0, 1_000_000> = FloatInRange(255.0);
    /// Brightness lost per step (v0).
    "ttl.decay" [http] ttl_decay: FloatInRange<0, 1_000_000> = FloatInRange(2.0);
    /// Brightness gained per unit of attention (v0).
    "ttl.gain" [http] ttl_gain: FloatInRange<0, 1_000_000> = FloatInRange(10.0);
    /// Truncate gains to integers (v0).
    "ttl.whole_gain" [http] ttl_whole_gain: bool = true;
    /// Size of the context window in tokens, without the system prompt (v0).
    "ttl.target" [http] ttl_target: IntInRange<1, 100_000_000> = IntInRange(500);

    /// Record the attention of every Nth step of an answer: statistics and a histogram, for `halo stats` and the page; 0
    /// disables it.
    "trace.interval" [http] trace_interval: IntInRange<0, 1_000_000_000> = IntInRange(50);
    /// Size limit for the stored attention of one conversation: what each word of an answer attended to, which the page
    /// shows. A token takes about 50 bytes; beyond the limit, the oldest answers lose theirs; 0 stores none.
    "trace.attention" [http] trace_attention: ByteSize = ByteSize(4 << 20);

    /// How chunks are chosen for pruning: `brightness`; `salience` (of their text: recency, names, references to the
    /// user, structure) for models that report no attention; or as baselines `fifo` (oldest first), `window` (keep the
    /// first and the latest) and `random`.
    "prune.policy" [http] prune_policy: PrunePolicyKind = PrunePolicyKind::Brightness;
    /// Keep the brightest of the chunks chosen for pruning where they still fit.
    "prune.fill" [http] prune_fill: bool = true;
    /// Random seed for `prune.policy = random`.
    "prune.seed" [http] prune_seed: IntInRange<0, { i64::MAX }> = IntInRange(0);

    /// Brightness of a chunk resurrected by search: `earned` (as when pruned), `mean` (of the context window) or
    /// `full` (the cap).
    "resurrect.brightness" [http] resurrect_brightness: ResurrectBrightness = ResurrectBrightness::Previous;
    /// What limits the context window while a message is answered: `window` (`context.max_tokens`, also for chunks that
    /// are resurrected) or `model` (the model's context, as in the founding documents; after the turn the window has its
    /// size again).
    "resurrect.limit" [http] resurrect_limit: ResurrectLimit = ResurrectLimit::Window;
    /// Factor on the search score of user messages; 1: none.
    "resurrect.user_boost" [http] resurrect_user_boost: FloatInRange<0, 100> = FloatInRange(1.0);
    /// Relevance floor: search hits that answer the message with a lower probability are not resurrected. `halo search`
    /// prints the probability and marks these hits; `halo-bench recall` measures what a floor keeps out. 0: every hit with a
    /// score above 0 is considered.
    "resurrect.floor" [http] resurrect_floor: FloatInRange<0, 1> = FloatInRange(0.005);
    /// Number of search hits considered for resurrection.
    "resurrect.candidates" [http] resurrect_candidates: IntInRange<0, 100_000> = IntInRange(128);
    /// Length of a hidden draft answer that is added to the search query, in tokens; 0: search with the message only.
    "resurrect.preview_tokens" [http] resurrect_preview_tokens: IntInRange<0, 1000> = IntInRange(0);

    /// Search mode: `hybrid` (embeddings and words), `dense` (embeddings) or `lexical` (words).
    "recall.mode" [http] recall_mode: SearchMode = SearchMode::Hybrid;
    /// Embedding model: a name from `halo models`, or the path of a folder with model.onnx; auto: the default one.
    "recall.embedder" recall_embedder: AutoOr<TextSetting> = AutoOr::Auto;
    /// Diversity of search results (as in MMR): penalty for similarity to hits already chosen; 0 disables it.
    "recall.diversity" [http] recall_diversity: FloatInRange<0, 1> = FloatInRange(0.0);

    /// Check whether a question assumes something that was contradicted, and warn: `off`, `rules` (word-based) or
    /// `model`. It is answered either way.
    "premise.check" [http] premise_check: OffOr<PremiseMethod> = OffOr::Off;

    /// Principles that premises are judged by, in order: `accuracy` (a fact denies it), `honesty` (it puts words into
    /// somebody's mouth that were not said), `consistency` (another value was given).
    "premise.principles" [http] premise_principles: ListSetting = ListSetting(vec!["accuracy".into(), "honesty".into()]);

    /// Let the model write memories (summaries) in the background after an answer; a memory replaces its range in the
    /// context window once that is pruned. Needs a capable model.
    "memory.enabled" [http] memory_enabled: bool = false;
    /// Tokens after which a memory of a range is formed.
    "memory.range_tokens" [http] memory_range_tokens: IntInRange<1, 1_000_000> = IntInRange(500);
    /// Maximum length of the range that one memory covers, in tokens.
    "memory.most_tokens" [http] memory_most_tokens: IntInRange<1, 1_000_000> = IntInRange(2000);
    /// Maximum length of a memory, in tokens.
    "memory.tokens" [http] memory_tokens: IntInRange<8, 2000> = IntInRange(200);
    /// Number of answers before a new memory is used.
    "memory.delay" [http] memory_delay: IntInRange<0, 1000> = IntInRange(3);
    /// Maximum share of the context window for memories.
    "memory.share" [http] memory_share: FloatInRange<0, 1> = FloatInRange(0.25);
    /// Tokens of the messages before its range that a memory also summarizes, so that memories overlap and none begins
    /// in the middle of a topic; 0: none.
    "memory.overlap_tokens" [http] memory_overlap_tokens: IntInRange<0, 100_000> = IntInRange(0);
    /// Also write a reflection on the whole conversation when idle.
    "memory.reflect" [http] memory_reflect: bool = false;
    /// Minutes without a message before a reflection.
    "memory.quiet_minutes" [http] memory_quiet_minutes: IntInRange<0, 10_000> = IntInRange(5);
    /// Number of messages since the last reflection before the next one.
    "memory.quiet_messages" [http] memory_quiet_messages: IntInRange<1, 10_000> = IntInRange(5);

    /// Erase old text permanently, by age: when `halo chat` or `halo serve` starts, every `lethe.interval_minutes` in a
    /// server, and in a forgetting cycle.
    "lethe.enabled" [http] lethe_enabled: bool = false;
    /// Run a forgetting cycle when the context pressure after a turn is above `lethe.pressure`: prune the least attended
    /// tenth of the context window, erase what is due (old text only with `lethe.enabled`), and disable memories of low
    /// salience.
    "lethe.cycle" [http] lethe_cycle: bool = true;
    /// Context pressure (tokens in the context window divided by its size) above which a forgetting cycle runs.
    "lethe.pressure" [http] lethe_pressure: FloatInRange<0, 1> = FloatInRange(0.8);
    /// Minutes between two scheduled erasures in a server that stays up; 0: only when it starts.
    "lethe.interval_minutes" [http] lethe_interval_minutes: FloatInRange<0, 100_000> = FloatInRange(60.0);
    /// Age in days up to which everything is kept; after it, saved KV cells and attention recordings are deleted.
    "lethe.hot_days" [http] lethe_hot_days: IntInRange<0, 100_000> = IntInRange(30);
    /// Age in days up to which the text is kept; after it, only statistics are.
    "lethe.warm_days" [http] lethe_warm_days: IntInRange<0, 100_000> = IntInRange(365);
    /// Age in days up to which these statistics are kept.
    "lethe.compost_days" [http] lethe_compost_days: IntInRange<0, 100_000> = IntInRange(730);
    /// Grace period of `halo forget` in days, during which it can be cancelled.
    "lethe.grace_days" [http] lethe_grace_days: IntInRange<0, 3650> = IntInRange(7);

    /// Maximum length of an agent's answer per heartbeat, in tokens.
    "rooms.max_tokens" [http] rooms_max_tokens: IntInRange<16, 100_000> = IntInRange(320);
    /// Repetition penalty for agents; 1 disables it.
    "rooms.repetition" [http] rooms_repetition: FloatInRange<1, 2> = FloatInRange(1.1);
    /// Random deviation of heartbeats from their interval: 0.2 is up to 20 % earlier or later; 0 disables it.
    "rooms.jitter" [http] rooms_jitter: FloatInRange<0, 1> = FloatInRange(0.2);
    /// Send each paragraph of an agent's answer as a message of its own, one after the other at the speed of the room.
    "rooms.split_paragraphs" [http] rooms_split_paragraphs: bool = true;
    /// Heartbeats of each agent whose tokens, by section and by format, stay stored; 0 stores none.
    "rooms.telemetry" [http] rooms_telemetry: IntInRange<0, 100_000> = IntInRange(200);
    /// Maximum length of an agent's HUD in tokens: above it, messages of other agents are shortened, those of the
    /// person never; 0: the model's context is the only limit.
    "rooms.cooling_tokens" [http] rooms_cooling_tokens: TokenCountSetting = IntInRange(0);
    /// How an agent's messages are shortened to a fifth when its HUD fills more than 80 % of its budget: `off`,
    /// `truncate`, or `model` (the agent's model summarizes them).
    "rooms.summaries" [http] rooms_summaries: OffOr<SummaryMethod> = OffOr::Off;
    /// Models (name, file or URL) that worlds created over the network or imported from a file may use, besides the
    /// program's own.
    "rooms.models" rooms_models: ListSetting = ListSetting(Vec::new());
    /// File with the agents' prompts, instead of the built-in ones (`halo rooms prompts` prints those).
    "rooms.prompts" rooms_prompts: AutoOr<TextSetting> = AutoOr::Auto;

    /// What happens to the KV cache when the context window changes: `keep` saves and restores cells; `reread`
    /// prefills the window again.
    "kv.mode" [http] kv_mode: KvCacheMode = KvCacheMode::EditCells;
    /// Type of the keys in the KV cache: `f16`, or smaller and less exact `q8_0` or `q4_0`. Values stay f16: llama.cpp
    /// quantises them only without reading attention. Saved cells of another type are not used.
    "kv.type" [http] kv_type: KvKeyType = KvKeyType::F16;
    /// RAM limit for the KV archive (cells of pruned chunks).
    "kv.ram" [http] kv_ram: ByteSize = ByteSize(512 << 20);
    /// Disk limit for the KV archive (cells of pruned chunks).
    "kv.disk" [http] kv_disk: ByteSize = ByteSize(8 << 30);
    /// Compare Halo's table of cells with llama.cpp's after each batch, for tests: a difference is logged as an error.
    "kv.check" kv_check: bool = false;

    /// Address and port of `halo serve`; addresses other than loopback require `server.key`.
    "server.listen" server_listen: TextSetting = TextSetting("127.0.0.1:5001".into());
    /// API key that clients send as `Authorization: Bearer KEY`; auto: none, for loopback only.
    "server.key" server_key: AutoOr<SecretSetting> = AutoOr::Auto;
    /// TLS certificate with its chain, PEM file; enables HTTPS. Requires `server.cert_key`.
    "server.cert" server_cert: AutoOr<TextSetting> = AutoOr::Auto;
    /// Private key of `server.cert`, PEM file.
    "server.cert_key" server_cert_key: AutoOr<TextSetting> = AutoOr::Auto;
    /// Additional host names accepted in the Host header, besides this machine's addresses and localhost.
    "server.hosts" server_hosts: ListSetting = ListSetting(Vec::new());
    /// Allowed origins of web pages (CORS), such as `https://chat.example`.
    "server.origins" server_origins: ListSetting = ListSetting(Vec::new());
    /// Maximum size of a request body, except of files to import.
    "server.max_body" server_max_body: ByteSize = ByteSize(16 << 20);
    /// Maximum size of a file that is imported on the page or over the API. It is kept in the data folder while it is read. In a
    /// SQLite store, nothing else is written meanwhile: about 5 s for each 20 MiB, and other chats wait at most 30 s.
    "server.max_import" server_max_import: ByteSize = ByteSize(128 << 20);
    /// Rate limit: requests per second and client address, and four times as many in all with the same API key;
    /// loopback exempt; 0 disables it.
    "server.rate" server_rate: IntInRange<0, 1_000_000> = IntInRange(50);
    /// Maximum number of open connections. The system's limit on open files may allow fewer.
    "server.connections" server_connections: IntInRange<1, 100_000> = IntInRange(2048);
    /// Maximum number of open connections from one client address, trusted proxies exempt.
    "server.connections_per_address" server_connections_per_address: IntInRange<1, 100_000> = IntInRange(512);
    /// Addresses of reverse proxies, such as `127.0.0.1` or `10.0.0.0/8`: requests from there count for the client that
    /// `X-Forwarded-For` or `Forwarded` names.
    "server.trusted_proxies" server_trusted_proxies: ListSetting = ListSetting(Vec::new());
    /// Maximum number of requests that wait for the model, or for an earlier request in their conversation.
    "server.queue" server_queue: IntInRange<1, 10_000> = IntInRange(64);
    /// Seconds until an unused conversation, or a world without running heartbeats, is closed, so that another
    /// process can open it.
    "server.idle" server_idle: IntInRange<1, 1_000_000> = IntInRange(600);
    /// Maximum number of open conversations; the least recently used one is closed for another. The system's limit on
    /// open files may allow fewer.
    "server.open" server_open: IntInRange<1, 10_000> = IntInRange(32);
    /// URL of an OpenTelemetry collector (OTLP over HTTP) for traces, such as `http://127.0.0.1:4318`. Traces contain
    /// no text of a conversation and no names, only ids.
    "server.otlp" server_otlp: AutoOr<TextSetting> = AutoOr::Auto;
}

/// The defaults that a preset changes.
fn preset_overrides(preset: Preset) -> &'static [(&'static str, &'static str)] {
    match preset {
        Preset::Halo => &[],
        Preset::HaloWeave => &[
            ("context.max_tokens", "2000"),
            ("generation.max_tokens", "50"),
            ("resurrect.limit", "model"),
            ("resurrect.floor", "0"),
            ("context.sink_tokens", "0"),
            ("context.recent_tokens", "0"),
            ("context.room_tokens", "0"),
            ("chunk.max_tokens", "100000"),
            ("brightness.rank", "peak"),
            ("brightness.observe_prompt", "off"),
            ("brightness.stride", "1"),
            ("prune.fill", "false"),
            ("resurrect.preview_tokens", "0"),
            ("recall.mode", "dense"),
            ("resurrect.user_boost", "1.5"),
            ("tools.enabled", "true"),
            ("lethe.cycle", "false"),
        ],
        Preset::HaloV0 => &[
            ("context.max_tokens", "2000"),
            ("generation.max_tokens", "50"),
            ("context.sink_tokens", "0"),
            ("context.recent_tokens", "0"),
            ("resurrect.floor", "0"),
            ("brightness.strategy", "ttl"),
            ("lethe.cycle", "false"),
        ],
    }
}

/// The values that a preset sets: every key that any preset changes, so that one preset replaces another completely.
#[must_use]
pub fn preset_values(preset: Preset) -> Vec<(&'static str, String)> {
    let defaults = Settings::default();
    let any = [Preset::HaloWeave, Preset::HaloV0].into_iter().flat_map(preset_overrides);
    let mut set: BTreeMap<_, _> = any.filter_map(|(key, _)| Some((*key, defaults.get(key)?.0))).collect();
    set.extend(preset_overrides(preset).iter().map(|(key, value)| (*key, (*value).to_owned())));
    set.into_iter().collect()
}

impl Settings {
    /// The principles that premises are judged by.
    #[must_use]
    pub fn judge_principles(&self) -> Vec<JudgePrinciple> {
        self.premise_principles.0.iter().filter_map(|name| JudgePrinciple::from_name(name)).collect()
    }

    /// Why two settings contradict each other; `of` formats a key with its source.
    fn conflict_error(&self, describe: impl Fn(&str) -> String) -> Option<String> {
        let unknown = self.premise_principles.0.iter().find(|name| JudgePrinciple::from_name(name).is_none());
        if let Some(name) = unknown {
            let all = JudgePrinciple::ALL.map(JudgePrinciple::name).join(", ");
            return Some(format!(
                "{}: '{name}' is no principle; there are {all}",
                describe("premise.principles")
            ));
        }
        if self.chunk_min_tokens.0 > self.chunk_max_tokens.0 {
            let (min, max) = (describe("chunk.min_tokens"), describe("chunk.max_tokens"));
            return Some(format!("{min} is larger than {max}: no chunk could ever end"));
        }
        if self.brightness_initial.0 > self.brightness_cap.0 {
            let (initial, cap) = (describe("brightness.initial"), describe("brightness.cap"));
            return Some(format!("{initial} is above {cap}: raise the cap or lower the initial brightness"));
        }
        let seeds = ["user", "system", "tool", "llm", "default"].map(|name| format!("ttl.seed.{name}"));
        let values = [
            self.ttl_seed_user,
            self.ttl_seed_system,
            self.ttl_seed_tool,
            self.ttl_seed_llm,
            self.ttl_seed_default,
        ];
        let over = seeds.iter().zip(values).find(|(_, seed)| seed.0 > self.ttl_max.0);
        if let (ScoringKind::Ttl, Some((seed, _))) = (self.brightness_strategy, over) {
            return Some(format!(
                "{} is above {}: raise the maximum or lower the initial brightness",
                describe(seed),
                describe("ttl.max")
            ));
        }
        let AutoOr::Value(max) = self.context_max_tokens else { return None };
        let (recent, max) = (self.recent_window_tokens(), max.as_usize());
        (max > 0 && recent + self.context_sink_tokens.as_usize() > max).then(|| {
            let (recent, sinks) = (describe("context.recent_tokens"), describe("context.sink_tokens"));
            format!(
                "{recent} and {sinks} do not fit {}: lower them or raise it",
                describe("context.max_tokens")
            )
        })
    }

    /// Why less than half of the context window would be left for the conversation, with the arithmetic. Checked when a
    /// setting is changed and for `--set`; an existing settings file is accepted as it is, and the reserve for the answer is
    /// clamped. `answer_is_chosen`: a default length of the answer is clamped, a chosen one is not.
    #[must_use]
    pub fn window_error(&self, answer_is_chosen: bool) -> Option<String> {
        let AutoOr::Value(max) = self.context_max_tokens else { return None };
        let (max, room) = (max.as_usize(), self.reserved_tokens());
        let answer = if answer_is_chosen { self.generation_max_tokens.as_usize() } else { 0 };
        let (left, half) = (max.saturating_sub(room + answer), max / 2);
        if max == 0 || self.brightness_strategy == ScoringKind::Ttl || left >= half {
            return None;
        }
        let needed = match self.context_room_tokens {
            // A quarter of the window is for resurrected chunks, so the answer has the other quarter.
            AutoOr::Auto => 4 * answer,
            AutoOr::Value(room) => 2 * (answer + room.as_usize()),
        };
        let advice = match half.saturating_sub(room) {
            0 => format!("lower context.room_tokens, or set context.max_tokens to at least {needed}"),
            fits => format!(
                "set generation.max_tokens to at most {fits}, or context.max_tokens to at least {needed}"
            ),
        };
        Some(format!(
            "the context window is too small: of {max} tokens (context.max_tokens), {answer} are reserved for the answer \
             (generation.max_tokens) and {room} for resurrected chunks (context.room_tokens), which leaves {left} for the \
             conversation, less than half ({half}); {advice}"
        ))
    }

    /// The size of the context window. An automatic one has its smallest size here, until the model is known.
    #[must_use]
    pub fn window_tokens(&self) -> usize {
        match self.context_max_tokens {
            AutoOr::Auto => window_size::MIN_TOKENS,
            AutoOr::Value(max) => max.as_usize(),
        }
    }

    /// The sizes that depend on the model.
    #[must_use]
    pub fn auto_sizes(&self) -> AutoSizes {
        AutoSizes {
            window: self.context_max_tokens == AutoOr::Auto,
            recent: self.context_recent_tokens == AutoOr::Auto,
            reserved: self.context_room_tokens == AutoOr::Auto,
        }
    }

    /// Tokens that stay free after a turn.
    #[must_use]
    pub fn reserved_tokens(&self) -> usize {
        match self.context_room_tokens {
            AutoOr::Auto => self.window_tokens() / 4,
            AutoOr::Value(n) => n.as_usize(),
        }
    }

    #[must_use]
    pub fn recent_window_tokens(&self) -> usize {
        match self.context_recent_tokens {
            AutoOr::Auto => self.window_tokens() / 4,
            AutoOr::Value(n) => n.as_usize(),
        }
    }

    #[must_use]
    pub fn context_rules(&self) -> ContextRules {
        ContextRules {
            strategy: self.scoring_strategy(),
            chunks: ChunkSize { min: self.chunk_min_tokens.0 as u32, max: self.chunk_max_tokens.0 as u32 },
            policy: self.policy(),
            max_tokens: self.window_tokens(),
            sinks: self.context_sink_tokens.as_usize(),
            recent: self.recent_window_tokens(),
            fill: self.prune_fill,
            trace_interval: self.trace_interval.0.unsigned_abs(),
        }
    }

    fn scoring_strategy(&self) -> ScoringStrategy {
        let brightness = |n: f64| Brightness(n as f32);
        match self.brightness_strategy {
            ScoringKind::Magnitude => ScoringStrategy::Magnitude(MagnitudeRules {
                initial: brightness(self.brightness_initial.0 as f64),
                cap: brightness(self.brightness_cap.0 as f64),
                decay: self.brightness_decay.0 as f32,
                sink: self.brightness_sink,
                score_current_turn: self.brightness_score_current_turn,
                row_mass: match (self.brightness_heads, &self.brightness_layers) {
                    (HeadReduction::Max, _) | (_, LayerReduction::Max) => RowMass::Measured,
                    _ => RowMass::One,
                },
                min_confidence: self.brightness_min_confidence.0 as f32,
            }),
            ScoringKind::Ttl => ScoringStrategy::Ttl(TtlRules {
                initial: InitialBrightness {
                    user: brightness(self.ttl_seed_user.0),
                    system: brightness(self.ttl_seed_system.0),
                    tool: brightness(self.ttl_seed_tool.0),
                    llm: brightness(self.ttl_seed_llm.0),
                    other: brightness(self.ttl_seed_default.0),
                },
                max: brightness(self.ttl_max.0),
                decay: self.ttl_decay.0 as f32,
                gain: self.ttl_gain.0 as f32,
                whole_gain: self.ttl_whole_gain,
                target: self.ttl_target.as_usize(),
            }),
        }
    }

    fn policy(&self) -> PrunePolicy {
        match self.prune_policy {
            PrunePolicyKind::Fifo => PrunePolicy::Fifo,
            PrunePolicyKind::Window => PrunePolicy::Window,
            PrunePolicyKind::Salience => PrunePolicy::Salience,
            PrunePolicyKind::Random => PrunePolicy::Random { seed: self.prune_seed.0.unsigned_abs() },
            PrunePolicyKind::Brightness => {
                PrunePolicy::Brightness { rank: self.brightness_rank, ties: self.brightness_ties }
            }
        }
    }
}
