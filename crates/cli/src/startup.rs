//! What `halo` and `halo-bench` do before and after a command: logging, flags, workers, errors.

use crate::error::{self, CommandTopic};
use crate::model_probe;
use crate::output::{StdoutClosed, print_notice};
use anyhow::Result;
use halo_engine::tools::jq;
use halo_llama::template_runner;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::process::ExitCode;

/// Prepares the process. Returns an exit status if the arguments asked for a worker, which has run then.
pub fn prepare_process(args: &[OsString]) -> Option<ExitCode> {
    if let [_, worker] = args {
        if *worker == jq::SUBPROCESS_ARG {
            return Some(run_worker(jq::serve_subprocess));
        }
        if *worker == template_runner::SUBPROCESS_ARG {
            return Some(run_worker(template_runner::serve_subprocess));
        }
    }
    reexec_with_omp_spin_limit();
    if let [_, worker, file, options] = args
        && *worker == model_probe::SUBPROCESS_ARG
    {
        return Some(model_probe::run_worker(file, options));
    }
    None
}

/// The exit status of a command. An error is printed with its hint.
pub fn finish(result: Result<()>, topic: CommandTopic) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.downcast_ref::<StdoutClosed>().is_some() => ExitCode::SUCCESS,
        Err(error) => {
            print_notice(&error::error_text(&error));
            let kind = error::error_kind(&error);
            if let Some(hint) = kind.and_then(|kind| error::hint_for(kind, topic)) {
                print_notice(&format!("hint: {hint}"));
            }
            ExitCode::from(error::exit_status(kind))
        }
    }
}

/// Logs warnings to standard error, or more or less, as the flags say. llama.cpp warns of much that is harmless, and
/// its failures are returned as errors: its log is off by default.
pub fn init_logging(quiet: bool, verbose: u8) {
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::layer::SubscriberExt;
    let (level, llama) = match verbose {
        _ if quiet => (LevelFilter::ERROR, LevelFilter::OFF),
        0 => (LevelFilter::WARN, LevelFilter::OFF),
        1 => (LevelFilter::DEBUG, LevelFilter::WARN),
        _ => (LevelFilter::TRACE, LevelFilter::DEBUG),
    };
    let targets = Targets::new()
        .with_default(level)
        .with_target("llama", llama)
        // The library warns of each mistake of a client, which the client is told already.
        .with_target("rmcp", if verbose == 0 { LevelFilter::ERROR } else { level })
        .with_target("hyper", LevelFilter::WARN);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(verbose > 0)
        .with_ansi(false);
    let subscriber = tracing_subscriber::registry().with(targets).with(lines);
    // A second subscriber would be refused; this is the only one.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// Sets the OpenMP spin limit and starts the program again, since OpenMP reads the variable before `main`. The
/// model's threads wait for each other some hundred times per token. By default they spin without yielding, and with
/// another program on the same CPUs both nearly stop. A limit of 1000 costs nothing on an idle machine.
fn reexec_with_omp_spin_limit() {
    #[cfg(target_os = "linux")]
    if cfg!(feature = "openmp")
        && std::env::var_os("GOMP_SPINCOUNT").is_none()
        && std::env::var_os("OMP_WAIT_POLICY").is_none()
        && let Ok(program) = std::env::current_exe()
    {
        use std::os::unix::process::CommandExt;
        let mut command = std::process::Command::new(program);
        if let Some(name) = std::env::args_os().next() {
            command.arg0(name);
        }
        // `exec` returns only if it failed; then the program continues without the limit.
        let _ = command.args(std::env::args_os().skip(1)).env("GOMP_SPINCOUNT", "1000").exec();
    }
}

/// Reads a job from standard input, and writes its result to standard output.
type ServeJob = fn(&mut dyn Read, &mut dyn Write) -> std::io::Result<()>;

/// Runs one untrusted job, a jq filter of the model or the chat template of a model file, and exits: in a process of its
/// own, with limits on memory and time.
fn run_worker(serve: ServeJob) -> ExitCode {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, setrlimit};
        let most = |n: u64| Rlimit { current: Some(n), maximum: Some(n) };
        let memory = worker_memory_bytes();
        let limits = [(Resource::As, memory), (Resource::Cpu, 1), (Resource::Fsize, 0), (Resource::Core, 0)];
        for (what, n) in limits {
            if setrlimit(what, most(n)).is_err() {
                return ExitCode::FAILURE;
            }
        }
    }
    let done = serve(&mut std::io::stdin().lock(), &mut std::io::stdout().lock());
    if done.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The most address space of a worker: 512 MiB, or more where the libraries of the program take most of that, as those of
/// graphics cards do.
#[cfg(unix)]
fn worker_memory_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB"));
    let kilobytes: u64 = size.and_then(|size| size.parse().ok()).unwrap_or(0);
    (512 << 20).max((kilobytes << 10) + (384 << 20))
}

/// Moves every `--set KEY=VALUE` behind the command, in order: clap drops the values before a subcommand when a
/// repeated global flag stands on both sides of it.
pub fn move_set_flags_last(args: &[OsString]) -> Vec<OsString> {
    let end = args.iter().position(|a| a == "--").unwrap_or(args.len());
    let (mut rest, mut sets) = (Vec::new(), Vec::new());
    let mut given = args[..end].iter();
    while let Some(arg) = given.next() {
        match given.clone().next() {
            Some(value) if arg == "--set" => {
                sets.extend([arg.clone(), value.clone()]);
                given.next();
            }
            _ if arg.to_string_lossy().starts_with("--set=") => sets.push(arg.clone()),
            _ => rest.push(arg.clone()),
        }
    }
    [rest, sets, args[end..].to_vec()].concat()
}
