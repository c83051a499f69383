//! Loads a model file in a process of its own before a server loads it: llama.cpp ends the process on some damaged files, and
//! the server must go on.
//!
//! The process loads the file with the options of the server, tests whether KV cells can be edited, and computes one token.
//! The result of that test is stored in the folder of the self-tests, where the server reads it. That the file was loaded is
//! stored there too, so that the next start does not load it twice.

use crate::env::Env;
use crate::settings::Settings;
use crate::wiring;
use anyhow::{Context, Result};
use halo_agents::agent::Agent;
use halo_core::model::{Model, Sampling};
use halo_core::{Error, ErrorKind};
use halo_engine::agent::{CompletionAgent, poll_ready};
use halo_llama::gpu_layers::GpuLayers;
use halo_llama::kv_archive::KvArchiveLimits;
use halo_llama::model::{Llama, LlamaOptions};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// The argument with which the program loads one model file and exits. The next arguments are the file and the options.
pub const SUBPROCESS_ARG: &str = "__load";

/// The exit status of a process that has loaded the model.
const LOADED: u8 = 0;

/// The exit status of a process that has refused the model with an error on standard error.
const REFUSED: u8 = 3;

/// The longest time to wait. A large model on a slow disk takes minutes.
const TIMEOUT: Duration = Duration::from_secs(600);

/// How much of standard error is kept. llama.cpp can print a line per tensor.
const MAX_ERROR_BYTES: u64 = 64 << 10;

/// The content of a file that says that a model was loaded.
const LOADED_MARK: &[u8] = b"1 loaded\n";

/// The files that were loaded while this process runs.
static LOADED_FILES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// The options of the server, as far as they decide what llama.cpp does.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct ProbeOptions {
    context: Option<u32>,
    parallel: u32,
    batch: u32,
    threads: u32,
    /// None: as many as fit.
    gpu_layers: Option<u32>,
    kv_mode: String,
    kv_key_type: String,
    attention: Option<String>,
    self_tests: Option<PathBuf>,
}

impl ProbeOptions {
    fn new(options: &LlamaOptions) -> Self {
        Self {
            context: options.context,
            parallel: options.parallel,
            batch: options.batch,
            threads: options.threads,
            gpu_layers: options.gpu_layers.count(),
            kv_mode: options.kv_mode.to_string(),
            kv_key_type: options.kv_key_type.to_string(),
            attention: options.attention.map(|source| source.to_string()),
            self_tests: options.self_tests.clone(),
        }
    }

    fn to_llama_options(&self) -> Result<LlamaOptions> {
        Ok(LlamaOptions {
            context: self.context,
            parallel: self.parallel,
            batch: self.batch,
            threads: self.threads,
            gpu_layers: GpuLayers::of_count(self.gpu_layers),
            kv_mode: self.kv_mode.parse().context("the KV cache mode")?,
            kv_key_type: self.kv_key_type.parse().context("the type of the keys")?,
            attention: self
                .attention
                .as_deref()
                .map(str::parse)
                .transpose()
                .context("the source of attention")?,
            self_tests: self.self_tests.clone(),
            kv_archive: KvArchiveLimits::disabled(),
            check_cells: false,
            template_runner: wiring::template_runner(),
        })
    }
}

/// Opens the local model for a server: it is loaded in a process of its own first.
pub fn open_probed_model(env: &Env, settings: &Settings) -> Result<Llama> {
    let kv_archive = wiring::kv_archive_limits(env, settings)?;
    let (file, options) = (env.model_file()?, wiring::llama_options(env, settings, kv_archive));
    check_loadable(&file, &options)?;
    let model = Llama::open(&file, &options)?;
    wiring::announce_gpu(&model);
    Ok(model)
}

/// Whether a variable of the environment has settings of this program, or is named like a key.
fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    let endings = ["KEY", "KEYS", "TOKEN", "SECRET", "PASSWORD", "PASSPHRASE", "CREDENTIALS", "DSN"];
    let last = name.rsplit('_').next().unwrap_or_default();
    name.starts_with("HALO_") || endings.contains(&last) || name.starts_with("PG")
}

/// Loads a file in a process of its own, unless this version of the program has loaded it before with the same options.
///
/// # Errors
/// When the file cannot be loaded, or ends the process that loads it.
fn check_loadable(file: &Path, options: &LlamaOptions) -> Result<(), Error> {
    let operation = format!("testing {}", file.display());
    let failed = |why: String| Error::new(ErrorKind::Unavailable, operation.as_str(), why);
    let options = ProbeOptions::new(options);
    let name = mark_name(file, &options);
    if name.as_deref().is_some_and(|name| is_marked(name, &options)) {
        return Ok(());
    }
    let text = serde_json::to_string(&options).map_err(|error| failed(error.to_string()))?;
    let program = std::env::current_exe().map_err(|e| failed(e.to_string()))?;
    let mut command = Command::new(program);
    command.arg(SUBPROCESS_ARG).arg(file).arg(text);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    // Where gdb is installed, ggml would start it for each abort.
    command.env("GGML_NO_BACKTRACE", "1");
    // A damaged file may run code. What the process needs of the environment, drivers and libraries, is not listed anywhere.
    for (name, _) in std::env::vars_os().filter(|(name, _)| is_secret(&name.to_string_lossy())) {
        command.env_remove(name);
    }
    let mut child = command.spawn().map_err(|e| failed(e.to_string()))?;
    // Read while the process runs: with a full pipe it would wait forever.
    let errors = child.stderr.take().map(|mut stderr| {
        std::thread::spawn(move || {
            let mut kept = Vec::new();
            let _ = (&mut stderr).take(MAX_ERROR_BYTES).read_to_end(&mut kept);
            let _ = std::io::copy(&mut stderr, &mut std::io::sink());
            String::from_utf8_lossy(&kept).into_owned()
        })
    });
    let status = wait_for(&mut child).map_err(failed)?;
    let errors = errors.and_then(|thread| thread.join().ok()).unwrap_or_default();
    match status.code() {
        Some(code) if code == i32::from(LOADED) => {
            if let Some(name) = name {
                mark_loaded(name, &options);
            }
            Ok(())
        }
        Some(code) if code == i32::from(REFUSED) => {
            Err(Error::new(ErrorKind::InvalidInput, operation, errors.trim().to_owned()))
        }
        _ => {
            tracing::debug!("{operation}: the process ended with {status}: {}", errors.trim());
            let why = "llama.cpp cannot load it: the file is damaged, or of a kind that it does not support; download it \
                       again, or choose another model";
            Err(Error::new(ErrorKind::InvalidInput, operation, why))
        }
    }
}

/// Waits for the process, and ends it after [`TIMEOUT`].
fn wait_for(child: &mut Child) -> Result<ExitStatus, String> {
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if start.elapsed() > TIMEOUT => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("it was not loaded within {} minutes", TIMEOUT.as_secs() / 60));
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// The name of the mark: a hash over the file's path, length and time, the options and the version of the program. None if
/// the file cannot be read.
fn mark_name(file: &Path, options: &ProbeOptions) -> Option<String> {
    let file = file.canonicalize().ok()?;
    let metadata = fs::metadata(&file).ok()?;
    let modified = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    let described = format!(
        "{}\n{}\n{}\n{}\n{options:?}",
        env!("CARGO_PKG_VERSION"),
        halo_llama::ENGINE_VERSION,
        metadata.len(),
        modified.as_nanos()
    );
    let mut hash = Sha256::new();
    hash.update(file.as_os_str().as_encoded_bytes());
    hash.update(described);
    let bytes = hash.finalize();
    Some(format!("loaded-{}", bytes[..16].iter().map(|byte| format!("{byte:02x}")).collect::<String>()))
}

fn is_marked(name: &str, options: &ProbeOptions) -> bool {
    let on_disk = || {
        let folder = options.self_tests.as_ref()?;
        Some(fs::read(folder.join(name)).ok()? == LOADED_MARK)
    };
    LOADED_FILES.lock().contains(name) || on_disk().unwrap_or(false)
}

/// Stores that a file was loaded. If that fails, the next start tests it again.
fn mark_loaded(name: String, options: &ProbeOptions) {
    if let Some(folder) = &options.self_tests
        && let Err(error) =
            fs::create_dir_all(folder).and_then(|()| fs::write(folder.join(&name), LOADED_MARK))
    {
        tracing::debug!("that the model was loaded is not stored in {}: {error}", folder.display());
    }
    LOADED_FILES.lock().insert(name);
}

/// The worker: loads the file and lets the model compute one token.
pub fn run_worker(file: &OsStr, options: &OsStr) -> ExitCode {
    limit_damage();
    match load_and_compute(Path::new(file), options) {
        Ok(()) => ExitCode::from(LOADED),
        Err(error) => {
            eprintln!("{}", crate::error::error_text(&error));
            ExitCode::from(REFUSED)
        }
    }
}

/// If memory runs out, the system ends this process and not the server. A crash writes no core file.
fn limit_damage() {
    #[cfg(target_os = "linux")]
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, setrlimit};
        let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    }
}

fn load_and_compute(file: &Path, options: &OsStr) -> Result<()> {
    let options: ProbeOptions = serde_json::from_slice(options.as_encoded_bytes())?;
    let model: Box<dyn Model + Send> = Box::new(Llama::open(file, &options.to_llama_options()?)?);
    let sampling = Sampling { max_tokens: 1, temperature: 0.0, ..Sampling::default() };
    let agent = CompletionAgent::new(model, "", sampling);
    poll_ready(Agent::<String>::invoke(&agent, "Hello.".to_owned()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo_llama::ffi::{AttentionSource, KvKeyType};
    use halo_llama::kv_cache::KvCacheMode;

    #[test]
    fn probe_passes_the_options_of_the_server_to_the_worker() {
        let options = LlamaOptions {
            context: Some(4096),
            threads: 3,
            gpu_layers: GpuLayers::Count(17),
            kv_mode: KvCacheMode::Recompute,
            kv_key_type: KvKeyType::Q8_0,
            attention: Some(AttentionSource::Queries),
            self_tests: Some("/data/self-tests".into()),
            template_runner: wiring::template_runner(),
            ..LlamaOptions::default()
        };
        let text = serde_json::to_string(&ProbeOptions::new(&options)).expect("JSON");
        let read: ProbeOptions = serde_json::from_str(&text).expect("options");
        assert_eq!(read.to_llama_options().expect("options"), options);
    }

    #[test]
    fn probe_does_not_get_the_keys_of_the_environment() {
        for name in [
            "HALO_SERVER_API_KEY",
            "HALO_MODEL_KEY",
            "OPENAI_API_KEY",
            "HF_TOKEN",
            "PGPASSWORD",
            "aws_secret",
        ] {
            assert!(is_secret(name), "{name}");
        }
        for name in
            ["PATH", "HOME", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "GGML_CUDA_NO_PINNED", "KEYBOARD"]
        {
            assert!(!is_secret(name), "{name}");
        }
    }

    #[test]
    fn probe_mark_belongs_to_file_and_options() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("model.gguf");
        fs::write(&file, "GGUF").expect("written");
        let options = |count| {
            let gpu_layers = GpuLayers::Count(count);
            let self_tests = Some(folder.path().join("self-tests"));
            ProbeOptions::new(&LlamaOptions { gpu_layers, self_tests, ..LlamaOptions::default() })
        };
        let name = mark_name(&file, &options(0)).expect("a name");
        assert!(!is_marked(&name, &options(0)));
        mark_loaded(name.clone(), &options(0));
        LOADED_FILES.lock().clear();
        assert!(is_marked(&name, &options(0)), "it is on disk");
        assert_ne!(mark_name(&file, &options(1)).as_deref(), Some(name.as_str()));
        fs::write(&file, "GGUF, changed").expect("written");
        assert_ne!(mark_name(&file, &options(0)).as_deref(), Some(name.as_str()));
        assert_eq!(mark_name(&folder.path().join("missing.gguf"), &options(0)), None);
    }
}
