//! The settings: one table of typed keys, from which come the struct that the program reads, the errors that
//! the user reads, and the reference page.

pub mod keep;
pub mod load;
pub mod reference;
pub mod value;

use halo_core::brightness as core_brightness;
use halo_core::chunk::ChunkSize;
use halo_core::prune;
use halo_core::replay::Rules;
use halo_core::token::Brightness;
use halo_core::ttl::{Seeds, Ttl};
use std::collections::BTreeMap;
use std::net::ToSocketAddrs;
use value::{
    Auto, Bytes, Heads, Int, KvMode, Layers, List, ObservePrompt, PremiseCheck, Preset, PrunePolicy, Rank,
    Raw, Real, RecallMode, ReturnBrightness, Secret, Sink, Strategy, Text, Ties, Value,
};

/// What is known of a key.
pub struct Key {
    /// Its name.
    pub name: &'static str,
    /// What it does.
    pub doc: &'static str,
    /// What may be written.
    pub allowed: fn() -> String,
    /// The words that may be written, where they are fixed.
    pub words: fn() -> Vec<&'static str>,
}

type Tokens = Int<0, 100_000_000>;
type Light = Int<-100_000, 100_000>;

macro_rules! settings {
    ($($(#[doc = $doc:literal])+ $name:literal $field:ident: $type:ty = $default:expr;)+) => {
        /// All settings, as the program reads them.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Settings { $($(#[doc = $doc])+ pub $field: $type,)+ }

        impl Default for Settings {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        /// All keys, in the order of the reference page.
        pub const KEYS: &[Key] = &[$(Key {
            name: $name,
            doc: concat!($($doc, "\n"),+),
            allowed: <$type as Value>::allowed,
            words: <$type as Value>::words,
        },)+];

        impl Settings {
            /// Sets a key; false where the value is not allowed.
            ///
            /// # Panics
            /// Where there is no such key.
            fn set(&mut self, key: &str, raw: &Raw) -> bool {
                match key {
                    $($name => <$type as Value>::read(raw).map(|v| self.$field = v).is_some(),)+
                    _ => unreachable!("{key} was looked up before"),
                }
            }

            /// A key's value, as it is written and as JSON.
            #[must_use]
            pub fn get(&self, key: &str) -> Option<(String, serde_json::Value)> {
                match key {
                    $($name => Some((self.$field.to_string(), self.$field.json())),)+
                    _ => None,
                }
            }
        }
    };
}

settings! {
    /// A set of defaults: what measurement favours, the founding documents' values and rules, or the first engine.
    /// What is set beside it still counts.
    "preset" preset: Preset = Preset::Halo;

    /// Tokens that the window may hold after a turn; 0 never prunes. In v0 `ttl.target` says it instead.
    "context.max_tokens" max_tokens: Tokens = Int(2000);
    /// The first tokens of the context, which never leave.
    "context.sink_tokens" sink_tokens: Tokens = Int(4);
    /// The latest tokens, which never leave; auto is a quarter of `context.max_tokens`.
    "context.recent_tokens" recent_tokens: Auto<Tokens> = Auto::Auto;

    /// Tokens of `context.max_tokens` that are kept free after a turn for what comes back, beside those of an answer;
    /// auto is a quarter of it.
    "context.room_tokens" room_tokens: Auto<Tokens> = Auto::Auto;

    /// Tokens that the model holds, the window and the answer; auto is what it was trained for, up to 8192.
    "model.context" model_context: Auto<Int<64, 10_000_000>> = Auto::Auto;
    /// Layers of the model that go to a graphics card, where the program was built for one.
    "model.gpu_layers" gpu_layers: Int<0, 10_000> = Int(0);

    /// The longest answer, in tokens.
    "generation.max_tokens" answer_tokens: Int<1, 1_000_000> = Int(50);
    /// How freely the next token is drawn; 0 takes the likeliest.
    "generation.temperature" temperature: Real<0, 5> = Real(0.7);
    /// How many of the likeliest tokens are drawn from; 0 draws from all.
    "generation.top_k" top_k: Int<0, 1_000_000> = Int(40);
    /// The share of probability that is drawn from.
    "generation.top_p" top_p: Real<0, 1> = Real(0.9);
    /// The least probability, as a share of the likeliest token's, that is drawn from.
    "generation.min_p" min_p: Real<0, 1> = Real(0.0);
    /// How much less likely a token of the recent past is; 1 is no less.
    "generation.repetition" repetition: Real<1, 10> = Real(1.0);
    /// The same seed draws the same answer; auto draws another each time.
    "generation.seed" seed: Auto<Int<0, { i64::MAX }>> = Auto::Auto;

    /// The standing instructions, before everything that is said; they never leave the window.
    "chat.system" system: Text = Text("You are a helpful assistant.".into());
    /// Whether the model is told the day, at the first message of each.
    "chat.dates" dates: bool = true;
    /// What the user is called before each message; auto: nothing.
    "chat.user_name" user_name: Auto<Text> = Auto::Auto;
    /// What the model is called before each answer; auto: nothing.
    "chat.assistant_name" assistant_name: Auto<Text> = Auto::Auto;

    /// Whether the model may keep notes, with jq and patches, in the middle of an answer. Small models cannot.
    "tools.enabled" tools: bool = false;

    /// A chunk boundary counts only from this many tokens on.
    "chunk.min_tokens" chunk_min: Int<1, 100_000> = Int(64);
    /// A chunk never grows past this many tokens.
    "chunk.max_tokens" chunk_max: Int<1, 100_000> = Int(512);

    /// How attention becomes brightness: magnitude voting, or time to live (v0).
    "brightness.strategy" strategy: Strategy = Strategy::Magnitude;
    /// What a new token starts with.
    "brightness.initial" initial: Light = Int(10_000);
    /// No token is brighter. There is no floor.
    "brightness.cap" cap: Light = Int(10_000);
    /// What a token below the threshold loses at each step.
    "brightness.decay" decay: Int<0, 10_000> = Int(1);
    /// The attention sink: the first slot, which is not scored, as the documents say; or the largest value, with
    /// nobody exempt, as their program did.
    "brightness.sink" sink: Sink = Sink::First;
    /// Whether tokens of the running turn are scored.
    "brightness.score_current_turn" score_current_turn: bool = false;
    /// How layers are reduced to one row.
    "brightness.layers" layers: Layers = Layers::Mean;
    /// How the heads of a layer are reduced to one row.
    "brightness.heads" heads: Heads = Heads::Mean;
    /// Which rows of the prompt's own attention are scored.
    "brightness.observe_prompt" observe_prompt: ObservePrompt = ObservePrompt::LastRow;
    /// What chunks are ranked by.
    "brightness.rank" rank: Rank = Rank::Share;
    /// Which of two chunks that rank alike leaves first.
    "brightness.ties" ties: Ties = Ties::Dimmer;

    /// What a token of the user is born with (v0).
    "ttl.seed.user" seed_user: Real<0, 1_000_000> = Real(255.0);
    /// What a token of the system is born with (v0).
    "ttl.seed.system" seed_system: Real<0, 1_000_000> = Real(255.0);
    /// What a token of a tool's result is born with (v0).
    "ttl.seed.tool" seed_tool: Real<0, 1_000_000> = Real(255.0);
    /// What a token of the model is born with (v0).
    "ttl.seed.llm" seed_llm: Real<0, 1_000_000> = Real(200.0);
    /// What any other token is born with (v0).
    "ttl.seed.default" seed_default: Real<0, 1_000_000> = Real(200.0);
    /// No token is brighter (v0).
    "ttl.max" ttl_max: Real<0, 1_000_000> = Real(255.0);
    /// Lost at every step (v0).
    "ttl.decay" ttl_decay: Real<0, 1_000_000> = Real(2.0);
    /// Gained for one whole unit of attention (v0).
    "ttl.gain" ttl_gain: Real<0, 1_000_000> = Real(10.0);
    /// Whether a gain is cut to a whole number (v0).
    "ttl.whole_gain" whole_gain: bool = true;
    /// Tokens that the window should hold (v0).
    "ttl.target" ttl_target: Int<1, 100_000_000> = Int(500);

    /// Every how many steps the shape of the attention is recorded; 0 never.
    "trace.interval" trace_interval: Int<0, 1_000_000_000> = Int(50);

    /// How the chunks that leave are chosen; all but brightness are there to compare with.
    "prune.policy" prune_policy: PrunePolicy = PrunePolicy::Brightness;
    /// Whether the brightest of what was to leave stays where there is room for it after all.
    "prune.fill" fill: bool = true;
    /// The lots that `prune.policy` random draws.
    "prune.seed" prune_seed: Int<0, { i64::MAX }> = Int(0);

    /// What a chunk that search brings back shines with.
    "resurrect.brightness" return_brightness: ReturnBrightness = ReturnBrightness::Earned;
    /// How much the user's own words are raised among hits.
    "resurrect.user_boost" user_boost: Real<0, 100> = Real(1.0);
    /// How many hits are considered.
    "resurrect.candidates" candidates: Int<0, 100_000> = Int(128);
    /// How many tokens of its answer the model begins, unseen, to search with; 0 searches with the message alone.
    "resurrect.preview_tokens" preview_tokens: Int<0, 1000> = Int(0);

    /// How the past is searched.
    "recall.mode" recall_mode: RecallMode = RecallMode::Hybrid;
    /// The embedder: a name of `halo models`, or the path of a folder with model.onnx; auto is the default one.
    "recall.embedder" recall_embedder: Auto<Text> = Auto::Auto;
    /// How much being like what was found already counts against a chunk.
    "recall.diversity" recall_diversity: Real<0, 1> = Real(0.0);

    /// Who holds what a question takes for granted against what was said, and tells where it is not so: nobody, rules that go
    /// by words, or the model. It is answered all the same.
    "premise.check" premises: PremiseCheck = PremiseCheck::Off;

    /// Whether the model writes down, after an answer and unseen, what it will need of what was said: such a memory stands
    /// where its range was, once that has left. Worth it with a model that can.
    "memory.enabled" memory: bool = false;
    /// A range is remembered when it has so many tokens.
    "memory.range_tokens" memory_range: Int<1, 1_000_000> = Int(500);
    /// One memory is of no more tokens than these.
    "memory.most_tokens" memory_most: Int<1, 1_000_000> = Int(2000);
    /// A memory has no more tokens than these.
    "memory.tokens" memory_tokens: Int<8, 2000> = Int(200);
    /// A memory is used after so many further answers.
    "memory.delay" memory_delay: Int<0, 1000> = Int(3);
    /// Memories take no more of the window than this share.
    "memory.share" memory_share: Real<0, 1> = Real(0.25);
    /// Whether the model also looks back over all of it, when it has been quiet for a while.
    "memory.reflect" memory_reflect: bool = false;
    /// For how many minutes nothing must have been said before it looks back.
    "memory.quiet_minutes" memory_quiet: Int<0, 10_000> = Int(5);
    /// How many messages must have come since it last looked back.
    "memory.quiet_messages" memory_messages: Int<1, 10_000> = Int(5);

    /// Whether what is old is forgotten by itself, when `halo chat` or `halo serve` begins: the words go for good.
    "lethe.enabled" lethe: bool = false;
    /// Up to this age, in days, everything is kept; then what the model has saved of it and what was recorded goes.
    "lethe.hot_days" lethe_hot: Int<0, 100_000> = Int(30);
    /// Up to this age, in days, the words are kept; then only a sketch of how much there was.
    "lethe.warm_days" lethe_warm: Int<0, 100_000> = Int(365);
    /// Up to this age, in days, that is kept.
    "lethe.compost_days" lethe_compost: Int<0, 100_000> = Int(730);
    /// For how many days what `halo forget` was told to forget can be taken back.
    "lethe.grace_days" lethe_grace: Int<0, 3650> = Int(7);

    /// The longest answer of an agent on a heartbeat, in tokens.
    "rooms.max_tokens" rooms_tokens: Int<16, 100_000> = Int(320);
    /// How much less likely agents are to say again what they have just read or said; 1 is no less.
    "rooms.repetition" rooms_repetition: Real<1, 2> = Real(1.1);
    /// Models, by name, file or address, that worlds which come over the network or from a file of exports may think with, beside the program's own.
    "rooms.models" rooms_models: List = List(Vec::new());
    /// A file with what agents are told, in the place of the program's own (`halo rooms prompts` prints that).
    "rooms.prompts" rooms_prompts: Auto<Text> = Auto::Auto;

    /// What happens to the KV cache when the window changes.
    "kv.mode" kv_mode: KvMode = KvMode::Keep;
    /// Memory for the KV cells of dead chunks.
    "kv.ram" kv_ram: Bytes = Bytes(512 << 20);
    /// Disk space for the KV cells of dead chunks.
    "kv.disk" kv_disk: Bytes = Bytes(8 << 30);

    /// Where `halo serve` listens; beyond this machine only with `server.key`.
    "server.listen" listen: Text = Text("127.0.0.1:5001".into());
    /// What clients must show to be let in, as `Authorization: Bearer KEY`; auto lets in whoever is on this machine.
    "server.key" key: Auto<Secret> = Auto::Auto;
    /// A certificate in PEM, with those that vouch for it; then `halo serve` speaks TLS. Needs `server.cert_key`.
    "server.cert" cert: Auto<Text> = Auto::Auto;
    /// The key to `server.cert`, a file in PEM.
    "server.cert_key" cert_key: Auto<Text> = Auto::Auto;
    /// Names that this machine is called by, beside its addresses and localhost.
    "server.hosts" hosts: List = List(Vec::new());
    /// Pages of other origins that may use it, such as `https://chat.example`.
    "server.origins" origins: List = List(Vec::new());
    /// The largest request.
    "server.max_body" max_body: Bytes = Bytes(16 << 20);
    /// Requests a second from one address, this machine aside; 0 is any number.
    "server.rate" rate: Int<0, 1_000_000> = Int(50);
    /// How many requests may wait for the model.
    "server.queue" queue: Int<1, 10_000> = Int(64);
    /// After how many seconds a conversation that nobody wants anything of is closed, and a world where nobody's heart beats:
    /// then another program may have it.
    "server.idle" idle: Int<1, 1_000_000> = Int(600);
    /// How many conversations are open at once. The one that was used least recently is closed for another; what was said is
    /// stored, and it opens again when it is wanted. The system's limit on open files may allow fewer.
    "server.open" max_open: Int<1, 10_000> = Int(32);
    /// Where traces of the turns go: the address of an OpenTelemetry collector, such as `http://127.0.0.1:4318`. What was
    /// said is not in them.
    "server.otlp" otlp: Auto<Text> = Auto::Auto;
}

/// What a preset changes of the defaults.
fn changes(preset: Preset) -> &'static [(&'static str, &'static str)] {
    match preset {
        Preset::Halo => &[],
        Preset::HaloWeave => &[
            ("context.sink_tokens", "0"),
            ("context.recent_tokens", "0"),
            ("context.room_tokens", "0"),
            ("chunk.max_tokens", "100000"),
            ("brightness.rank", "peak"),
            ("brightness.observe_prompt", "off"),
            ("prune.fill", "false"),
            ("resurrect.preview_tokens", "0"),
            ("recall.mode", "dense"),
            ("resurrect.user_boost", "1.5"),
            ("tools.enabled", "true"),
        ],
        Preset::HaloV0 => {
            &[("context.sink_tokens", "0"), ("context.recent_tokens", "0"), ("brightness.strategy", "ttl")]
        }
    }
}

/// What a preset sets: all that any preset changes, so that naming one leaves nothing of another.
#[must_use]
pub fn preset(preset: Preset) -> Vec<(&'static str, String)> {
    let defaults = Settings::default();
    let any = [Preset::HaloWeave, Preset::HaloV0].into_iter().flat_map(changes);
    let mut set: BTreeMap<_, _> = any.filter_map(|(key, _)| Some((*key, defaults.get(key)?.0))).collect();
    set.extend(changes(preset).iter().map(|(key, value)| (*key, (*value).to_owned())));
    set.into_iter().collect()
}

impl Settings {
    /// What two settings contradict each other in, if any do; `of` tells a key with where it came from.
    fn contradiction(&self, of: impl Fn(&str) -> String) -> Option<String> {
        if self.chunk_min.0 > self.chunk_max.0 {
            let (min, max) = (of("chunk.min_tokens"), of("chunk.max_tokens"));
            return Some(format!("{min} is larger than {max}: no chunk could ever end"));
        }
        if self.initial.0 > self.cap.0 {
            let (initial, cap) = (of("brightness.initial"), of("brightness.cap"));
            return Some(format!("{initial} is above {cap}: raise the cap or lower the start"));
        }
        let seeds = ["user", "system", "tool", "llm", "default"].map(|name| format!("ttl.seed.{name}"));
        let values = [self.seed_user, self.seed_system, self.seed_tool, self.seed_llm, self.seed_default];
        let over = seeds.iter().zip(values).find(|(_, seed)| seed.0 > self.ttl_max.0);
        if let (Strategy::Ttl, Some((seed, _))) = (self.strategy, over) {
            return Some(format!(
                "{} is above {}: raise the maximum or lower the seed",
                of(seed),
                of("ttl.max")
            ));
        }
        let (recent, max) = (self.recent(), self.max_tokens.count());
        (max > 0 && recent + self.sink_tokens.count() > max).then(|| {
            let (recent, sinks) = (of("context.recent_tokens"), of("context.sink_tokens"));
            format!("{recent} and {sinks} do not fit {}: lower them or raise it", of("context.max_tokens"))
        })
    }

    /// Why a program with these settings would not start, or would forget everything at once. Asked when a setting is changed;
    /// a settings file that is there already is read as it is.
    #[must_use]
    pub fn unworkable(&self) -> Option<String> {
        if self.listen.0.to_socket_addrs().is_err() {
            return Some(format!(
                "server.listen: '{}' is not an address to listen on; write one such as 127.0.0.1:5001",
                self.listen.0
            ));
        }
        let (max, room, answer) = (self.max_tokens.count(), self.room(), self.answer_tokens.count());
        let rest = max.saturating_sub(room + answer);
        (max > 0 && room > 0 && rest < max / 8).then(|| {
            format!(
                "no room is left for the conversation: of {max} tokens (context.max_tokens), {answer} are kept for the answer \
                 (generation.max_tokens) and {room} for what returns (context.room_tokens), which leaves {rest}; lower the \
                 answer or raise the context"
            )
        })
    }

    /// What stays free after a turn, in tokens.
    #[must_use]
    pub fn room(&self) -> usize {
        match self.room_tokens {
            Auto::Auto => self.max_tokens.count() / 4,
            Auto::Set(n) => n.count(),
        }
    }

    /// The recent window, in tokens.
    #[must_use]
    pub fn recent(&self) -> usize {
        match self.recent_tokens {
            Auto::Auto => self.max_tokens.count() / 4,
            Auto::Set(n) => n.count(),
        }
    }

    /// The rules of scoring and pruning.
    #[must_use]
    pub fn rules(&self) -> Rules {
        Rules {
            strategy: self.core_strategy(),
            chunks: ChunkSize { min: self.chunk_min.0 as u32, max: self.chunk_max.0 as u32 },
            policy: self.core_policy(),
            max_tokens: self.max_tokens.count(),
            sinks: self.sink_tokens.count(),
            recent: self.recent(),
            fill: self.fill,
            trace_interval: self.trace_interval.0.unsigned_abs(),
        }
    }

    fn core_strategy(&self) -> core_brightness::Strategy {
        let light = |n: f64| Brightness(n as f32);
        match self.strategy {
            Strategy::Magnitude => core_brightness::Strategy::Magnitude(core_brightness::Magnitude {
                initial: light(self.initial.0 as f64),
                cap: light(self.cap.0 as f64),
                decay: self.decay.0 as f32,
                sink: match self.sink {
                    Sink::First => core_brightness::Sink::First,
                    Sink::Max => core_brightness::Sink::Max,
                },
                score_current_turn: self.score_current_turn,
                mass: match (self.heads, &self.layers) {
                    (Heads::Max, _) | (_, Layers::Max) => core_brightness::Mass::Sum,
                    _ => core_brightness::Mass::One,
                },
            }),
            Strategy::Ttl => core_brightness::Strategy::Ttl(Ttl {
                seeds: Seeds {
                    user: light(self.seed_user.0),
                    system: light(self.seed_system.0),
                    tool: light(self.seed_tool.0),
                    llm: light(self.seed_llm.0),
                    other: light(self.seed_default.0),
                },
                max: light(self.ttl_max.0),
                decay: self.ttl_decay.0 as f32,
                gain: self.ttl_gain.0 as f32,
                whole_gain: self.whole_gain,
                target: self.ttl_target.count(),
            }),
        }
    }

    fn core_policy(&self) -> prune::Policy {
        match self.prune_policy {
            PrunePolicy::Fifo => prune::Policy::Fifo,
            PrunePolicy::Window => prune::Policy::Window,
            PrunePolicy::Random => prune::Policy::Random { seed: self.prune_seed.0.unsigned_abs() },
            PrunePolicy::Brightness => prune::Policy::Brightness {
                rank: match self.rank {
                    Rank::Peak => prune::Rank::Peak,
                    Rank::Mean => prune::Rank::Mean,
                    Rank::Top4 => prune::Rank::Top4,
                    Rank::Votes => prune::Rank::Votes,
                    Rank::Sum => prune::Rank::Sum,
                    Rank::Share => prune::Rank::Share,
                },
                ties: match self.ties {
                    Ties::Dimmer => prune::Ties::Dimmer,
                    Ties::Older => prune::Ties::Older,
                },
            },
        }
    }
}
