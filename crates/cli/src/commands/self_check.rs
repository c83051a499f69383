//! `halo self-check`: what this machine has, and what is missing to chat. Damage of the store is a matter of `halo doctor`.

use super::pull::hub_endpoint;
use super::serve::parse_listen_address;
use crate::disk::free_space;
use crate::env::{Env, create_private_dir};
use crate::models::memory_estimate;
use crate::output::{group_digits, pluralize, print_json, print_stdout, sanitize_terminal_text};
use crate::script_model::{ScriptFileModel, script_file};
use crate::settings::Settings;
use crate::wiring;
use anyhow::{Context, Result, bail};
use halo_core::store::Store;
use halo_llama::ffi::{ModelWeights, free_gpu_bytes};
use halo_llama::system_memory;
use halo_server::fits_memory;
use indicatif::HumanBytes;
use serde_json::json;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// A server that does not answer within this time is away.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, PartialEq, Eq)]
enum CheckState {
    Good,
    /// Something that is not needed for a chat.
    Warning,
    Missing,
}

impl CheckState {
    fn name(self) -> &'static str {
        match self {
            CheckState::Good => "ok",
            CheckState::Warning => "warn",
            CheckState::Missing => "missing",
        }
    }
}

struct CheckedItem {
    name: &'static str,
    state: CheckState,
    text: String,
}

pub fn run(env: &Env) -> Result<()> {
    let settings = env.load_settings()?.settings;
    let mut checks = vec![
        ("program", (CheckState::Good, format!("halo {}", env!("CARGO_PKG_VERSION")))),
        ("cpu", (CheckState::Good, cpu_text(env))),
        ("memory", check_memory()),
        ("gpu", check_gpu()),
        ("data", check_data_folder(env)),
        ("store", check_store(env)),
        ("model", check_model(env)),
        ("search", check_embedder(env, &settings)),
        ("server", check_listen_address(&settings)),
    ];
    if !wiring::uses_remote_model(env) {
        checks.push(("network", check_hub()));
    }
    let item = |(name, (state, text))| CheckedItem { name, state, text };
    report(&checks.into_iter().map(item).collect::<Vec<_>>(), env)
}

fn report(items: &[CheckedItem], env: &Env) -> Result<()> {
    let missing = items.iter().filter(|item| item.state == CheckState::Missing).count();
    if env.json {
        let item =
            |item: &CheckedItem| json!({ "check": item.name, "state": item.state.name(), "text": item.text });
        print_json(&json!({
            "ready": missing == 0,
            "checks": items.iter().map(item).collect::<Vec<_>>(),
        }))?;
    } else {
        let line = |item: &CheckedItem| {
            format!("{:<8} {:<8} {}\n", item.state.name(), item.name, sanitize_terminal_text(&item.text))
        };
        print_stdout(&items.iter().map(line).collect::<String>())?;
    }
    if missing > 0 {
        bail!("{} to chat", pluralize(missing as u64, "thing is missing").replace("things is", "things are"));
    }
    Ok(())
}

fn cpu_text(env: &Env) -> String {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = pluralize(u64::from(env.models.thread_count()), "thread");
    format!("{}, {threads} for the model{}", pluralize(cores as u64, "core"), cpu_features())
}

/// The vector instructions that llama.cpp can use.
#[cfg(target_arch = "x86_64")]
fn cpu_features() -> String {
    let found = [
        (is_x86_feature_detected!("avx2"), "AVX2"),
        (is_x86_feature_detected!("fma"), "FMA"),
        (is_x86_feature_detected!("f16c"), "F16C"),
        (is_x86_feature_detected!("avx512f"), "AVX-512"),
        (is_x86_feature_detected!("avx512vnni"), "VNNI"),
    ];
    found.iter().filter(|(has, _)| *has).map(|(_, name)| format!(" · {name}")).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu_features() -> String {
    format!(" · {}", std::env::consts::ARCH)
}

fn check_memory() -> (CheckState, String) {
    match system_memory::available_bytes() {
        None => (CheckState::Warning, "the free memory is not known on this system".into()),
        Some(free) => (CheckState::Good, format!("{} free", HumanBytes(free))),
    }
}

fn check_gpu() -> (CheckState, String) {
    let built = cfg!(any(feature = "cuda", feature = "vulkan", feature = "metal"));
    match (ModelWeights::gpu_is_usable(), free_gpu_bytes()) {
        (true, Some(free)) => (CheckState::Good, format!("{} free", HumanBytes(free))),
        (true, None) => (CheckState::Good, "usable".into()),
        (false, _) if built => (CheckState::Warning, "this program can use one, and none was found".into()),
        (false, _) => (CheckState::Good, "none: this program was built for the CPU (docs/gpu.md)".into()),
    }
}

fn check_data_folder(env: &Env) -> (CheckState, String) {
    let written = env.require_data_dir().and_then(|folder| {
        create_private_dir(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        tempfile::tempfile_in(folder).with_context(|| format!("cannot write to {}", folder.display()))?;
        Ok(folder)
    });
    match written {
        Err(error) => (CheckState::Missing, format!("{error:#}: name another folder with --data")),
        Ok(folder) => {
            let free = free_space(&folder.join("halo.db"));
            let free = free.map_or_else(String::new, |free| format!(", {} free", HumanBytes(free)));
            (CheckState::Good, format!("{}{free}", folder.display()))
        }
    }
}

fn check_store(env: &Env) -> (CheckState, String) {
    let opened = env.open_store_read_only();
    let listed =
        opened.and_then(|store| Ok(store.map(|mut store| store.list_conversations()).transpose()?));
    match listed {
        Err(error) => (CheckState::Missing, format!("{error:#}: `halo doctor` says more")),
        Ok(None) => (CheckState::Good, "none yet: the first message creates it".into()),
        Ok(Some(all)) => {
            let tokens: u64 = all.iter().map(|one| one.tokens).sum();
            let conversations = pluralize(all.len() as u64, "conversation");
            (CheckState::Good, format!("{conversations}, {} tokens", group_digits(tokens as usize)))
        }
    }
}

fn check_model(env: &Env) -> (CheckState, String) {
    if wiring::uses_remote_model(env) {
        let address = env.models.name.clone().unwrap_or_default();
        let opened = env.load_settings().and_then(|loaded| wiring::open_model(env, &loaded.settings));
        return match opened {
            Ok(model) => (CheckState::Good, format!("{} at {address}", model.info().name)),
            Err(error) => (CheckState::Missing, format!("{error:#}")),
        };
    }
    if let Some(file) = env.models.name.as_deref().and_then(script_file) {
        return match ScriptFileModel::open(file, None) {
            Ok(_) => (CheckState::Good, format!("the answers in {}", file.display())),
            Err(error) => (CheckState::Missing, format!("{error:#}")),
        };
    }
    let path = match env.model_file() {
        Ok(path) => path,
        Err(error) => return (CheckState::Missing, format!("{error:#}")),
    };
    match halo_llama::gguf::read_header(&path) {
        Err(error) => (CheckState::Missing, format!("{}: {error}", path.display())),
        Ok(header) => {
            let need = memory_estimate(&header, None);
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let text = format!("{name}, about {} of memory", HumanBytes(need));
            match fits_memory(need, system_memory::available_bytes()) {
                Some(false) => (CheckState::Warning, format!("{text}, which is more than is free")),
                _ => (CheckState::Good, text),
            }
        }
    }
}

fn check_embedder(env: &Env, settings: &Settings) -> (CheckState, String) {
    let library = env.model_library();
    match library.and_then(|library| library.find_embedder(settings.recall_embedder.as_text())) {
        Ok(Some(folder)) => {
            let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            (CheckState::Good, format!("{name}, and words"))
        }
        Ok(None) => {
            let pull = format!("`halo models pull{}`", env.data_flag());
            (CheckState::Warning, format!("by words only: {pull} downloads a model for the meaning"))
        }
        Err(error) => (CheckState::Warning, format!("{error:#}")),
    }
}

fn check_listen_address(settings: &Settings) -> (CheckState, String) {
    let address = match parse_listen_address(&settings.server_listen.0) {
        Ok(address) => address,
        Err(error) => return (CheckState::Warning, format!("{error:#}")),
    };
    match TcpListener::bind(address) {
        Ok(_) => (CheckState::Good, format!("{address} is free")),
        Err(error) => {
            (CheckState::Warning, format!("{address}: {error}; `halo serve --listen` names another address"))
        }
    }
}

/// Whether models can be downloaded.
fn check_hub() -> (CheckState, String) {
    let hub = hub_endpoint();
    let host = hub.split("://").last().unwrap_or_default().split('/').next().unwrap_or_default().to_owned();
    let port = if hub.starts_with("http://") { 80 } else { 443 };
    let with_port = if host.contains(':') { host.clone() } else { format!("{host}:{port}") };
    let mut addresses = with_port.to_socket_addrs().into_iter().flatten();
    let reached = addresses.any(|at: SocketAddr| TcpStream::connect_timeout(&at, CONNECT_TIMEOUT).is_ok());
    match reached {
        true => (CheckState::Good, format!("{host} answers: models can be downloaded")),
        false => (
            CheckState::Warning,
            format!(
                "{host} does not answer: models come from a mirror (HF_ENDPOINT), through pip, or from a file"
            ),
        ),
    }
}
