//! Halo over HTTP: the page, Halo's own API, and the APIs of KoboldCPP, OpenAI and MCP. Async code and wire types exist only here;
//! the engine does all the work, on threads of its own.

mod access_control;
mod answer_source;
mod api_name;
mod app;
mod backend;
mod chat_dispatcher;
mod cl100k;
mod client_address;
mod completion;
mod completion_history;
mod connection;
mod embedding;
mod error;
mod events;
mod forgetting_loop;
mod generation_log;
mod generation_usage;
mod halo;
mod json_grammar;
mod json_schema;
mod kobold;
mod kobold_info;
mod listen;
mod llama_server;
mod mcp;
mod metrics;
mod model_choice;
mod monitoring;
mod ollama;
mod open_worlds;
mod openai;
mod originals;
mod otlp;
mod page;
mod raw_prompt;
mod request_log;
mod response_index;
mod router;
mod running_completions;
mod sampling;
mod search;
mod session_job;
mod sse;
mod state_cache;
mod stop_sequences;
mod store_probe;
mod tls;
mod transcript_cache;
mod wire;
mod world_loop;

pub use app::App;
pub use backend::{
    AttentionCapture, Backend, CaptureSegment, CaptureStep, ImportResult, ModelDetails, ServerLimits,
    Setting, SettingRange,
};
pub use client_address::{AddressRange, AddressRangeError};
pub use halo::capture_folder_names;
pub use listen::{ListenOptions, serve};
pub use mcp::serve_mcp_stdio;
pub use model_choice::{
    DownloadableModelChoice, InstalledModelChoice, ModelChoices, ModelServerReport, RemoteModelChoice,
    fits_memory,
};
pub use otlp::TraceExporter;
pub use router::routes;
pub use tls::{PemFile, TlsConfig};
