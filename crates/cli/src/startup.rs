//! What `halo` and `halo-bench` do before and after a command: logging, flags, the jq worker, errors.

use crate::error::{self, CommandTopic};
use crate::output::{StdoutClosed, print_notice};
use anyhow::Result;
use std::ffi::OsString;
use std::process::ExitCode;

/// Prepares the process. Returns an exit status if the arguments asked for the jq worker, which has run then.
pub fn prepare_process(args: &[OsString]) -> Option<ExitCode> {
    if args.len() == 2 && args[1] == halo_engine::tools::jq::SUBPROCESS_ARG {
        return Some(run_jq_worker());
    }
    reexec_with_omp_spin_limit();
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

/// What the parts of the program have to tell goes to standard error: warnings, or more or less, as the user likes.
/// llama.cpp warns of much that is as it should be, and what fails there is told as an error anyway: it is heard only
/// when more is asked for.
pub fn init_logging(quiet: bool, verbose: u8) {
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::layer::SubscriberExt;
    let (ours, llama) = match verbose {
        _ if quiet => (LevelFilter::ERROR, LevelFilter::OFF),
        0 => (LevelFilter::WARN, LevelFilter::OFF),
        1 => (LevelFilter::DEBUG, LevelFilter::WARN),
        _ => (LevelFilter::TRACE, LevelFilter::DEBUG),
    };
    let which =
        Targets::new().with_default(ours).with_target("llama", llama).with_target("hyper", LevelFilter::WARN);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(verbose > 0)
        .with_ansi(false);
    let told = tracing_subscriber::registry().with(which).with(lines);
    // Only the first to say how may; there is nobody else.
    let _ = tracing::subscriber::set_global_default(told);
}

/// The model's threads wait for each other some hundred times a token. By default they do so without giving way, and where
/// another program wants the same processors, both all but stand still. How long they wait before they give way is read from
/// the environment before a program begins, so it begins once more; a thousand looks cost nothing where nobody else is.
fn reexec_with_omp_spin_limit() {
    #[cfg(target_os = "linux")]
    if std::env::var_os("GOMP_SPINCOUNT").is_none()
        && std::env::var_os("OMP_WAIT_POLICY").is_none()
        && let Ok(program) = std::env::current_exe()
    {
        use std::os::unix::process::CommandExt;
        let mut again = std::process::Command::new(program);
        if let Some(name) = std::env::args_os().next() {
            again.arg0(name);
        }
        // It comes back only if that cannot be done; then it goes on as it is.
        let _ = again.args(std::env::args_os().skip(1)).env("GOMP_SPINCOUNT", "1000").exec();
    }
}

/// Runs one filter of the model's, from standard input, and ends: a process of its own, with little memory and time, so
/// that whatever the filter does, it does here.
fn run_jq_worker() -> ExitCode {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, setrlimit};
        let most = |n: u64| Rlimit { current: Some(n), maximum: Some(n) };
        let limits =
            [(Resource::As, 512 << 20), (Resource::Cpu, 1), (Resource::Fsize, 0), (Resource::Core, 0)];
        for (what, n) in limits {
            if setrlimit(what, most(n)).is_err() {
                return ExitCode::FAILURE;
            }
        }
    }
    let done =
        halo_engine::tools::jq::serve_subprocess(&mut std::io::stdin().lock(), &mut std::io::stdout().lock());
    if done.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Moves every `--set KEY=VALUE` behind the command, in order: of a flag that may be repeated and stands on both
/// sides of the command, the parser would keep only the later ones.
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
