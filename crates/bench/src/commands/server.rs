//! `halo-bench server`: answer speed with and without concurrent readers and searches, and the throughput of several clients.

use super::halo_program;
use super::server_clients;
use anyhow::{Context, Result, bail, ensure};
use halo_cli::env::Env;
use halo_cli::output::{print_json, print_stdout};
use parking_lot::{Condvar, Mutex};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct ServerBenchOptions {
    /// Measure the throughput of so many clients at once instead, for example 1,4,8,16
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    clients: Vec<usize>,
    /// A llama-server program to measure in the same run, with as many slots
    #[arg(long, value_name = "FILE", requires = "clients")]
    llama_server: Option<std::path::PathBuf>,
    /// Whether that program uses flash attention; each is measured. Halo reads attention, so it never does
    #[arg(long, value_name = "off,on,auto", value_delimiter = ',', default_value = "off")]
    llama_flash: Vec<String>,
    /// Answers of each client
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Answers that are generated at once (`model.parallel`); without it as many as there are clients
    #[arg(long, value_name = "N")]
    parallel: Option<usize>,
    /// Number of clients that read and search beside one answer
    #[arg(long, value_name = "N", default_value_t = 200)]
    readers: usize,
    /// The clients only read
    #[arg(long)]
    no_searches: bool,
    /// Milliseconds between two requests of a client; every tenth is a search
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    pause: u64,
    /// Answers that are measured, with the clients and without
    #[arg(long, value_name = "N", default_value_t = 8)]
    answers: usize,
}

/// Milliseconds of the requests, by kind.
#[derive(Default)]
struct RequestTimes {
    reads: Vec<f64>,
    searches: Vec<f64>,
}

pub fn run(options: &ServerBenchOptions, env: &Env) -> Result<()> {
    if !options.clients.is_empty() {
        let plan = server_clients::ClientPlan {
            clients: options.clients.clone(),
            rounds: options.rounds,
            parallel: options.parallel,
            llama_server: options.llama_server.clone(),
            llama_flash: options.llama_flash.clone(),
        };
        return server_clients::run(&plan, env);
    }
    ensure!(options.readers > 0 && options.answers > 0, "--readers and --answers must be at least 1");
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let server = BenchServer::start(env, folder.path(), &[])?;
    let mut connection = BenchConnection::open(&server.address)?;
    for topic in ["cheese", "trains", "winter", "music"] {
        connection.send_message(&format!("Tell me something about {topic}."))?;
    }
    connection.send_message("Tell me a long story about a fisherman and his brother.")?;
    let mut pace = [Vec::new(), Vec::new()];
    let mut times = RequestTimes::default();
    // The same answer each time: alone, with clients, with clients, alone. Other load of the machine affects both.
    for n in 0..options.answers * 2 {
        let with_clients = n % 4 == 1 || n % 4 == 2;
        let clients = with_clients.then(|| BackgroundClients::start(options, &server.address));
        std::thread::sleep(Duration::from_millis(options.pause + 100));
        pace[usize::from(with_clients)].push(connection.regenerate()?);
        if let Some(clients) = clients {
            let more = clients.stop()?;
            times.reads.extend(more.reads);
            times.searches.extend(more.searches);
        }
    }
    let mut ratios: Vec<f64> =
        pace[0].iter().zip(&pace[1]).map(|(alone, with_clients)| with_clients / alone).collect();
    let [alone, with_clients] = pace.each_mut().map(|values| quantile(values, 0.5));
    let requests = times.reads.len() + times.searches.len();
    let figures = json!({
        "readers": options.readers,
        "pause_ms": options.pause,
        "requests": requests,
        "tok_s_alone": alone,
        "tok_s_with_clients": with_clients,
        "ratio": quantile(&mut ratios, 0.5),
        "read_p50_ms": quantile(&mut times.reads, 0.5),
        "read_p99_ms": quantile(&mut times.reads, 0.99),
        "search_p50_ms": quantile(&mut times.searches, 0.5),
        "search_p99_ms": quantile(&mut times.searches, 0.99),
    });
    if env.json {
        return print_json(&figures);
    }
    let mut out = String::new();
    for (key, value) in figures.as_object().into_iter().flatten() {
        let _ =
            writeln!(out, "{key:<20} {:>10}", value.as_f64().map_or_else(String::new, |n| format!("{n:.2}")));
    }
    print_stdout(&out)
}

pub(super) fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    values.get((last as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
}

/// A server process that ends with this value.
pub(super) struct BenchServer {
    process: Child,
    pub(super) address: String,
}

impl BenchServer {
    pub(super) fn start(env: &Env, data: &std::path::Path, settings: &[String]) -> Result<Self> {
        let mut command = Command::new(halo_program()?);
        let models = env.data_dir().map(|folder| folder.join("models")).filter(|folder| folder.exists());
        if let Some(models) = models {
            // It uses the models of this data folder, and nothing else of it.
            #[cfg(unix)]
            std::os::unix::fs::symlink(models, data.join("models"))?;
            #[cfg(not(unix))]
            drop(models);
        }
        command
            .args([
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--set",
                "generation.max_tokens=128",
                "--set",
                "generation.seed=1",
            ])
            .arg("--data")
            .arg(data);
        for setting in env.settings.set.iter().chain(settings) {
            command.args(["--set", setting]);
        }
        if let Some(model) = &env.models.name {
            command.arg("--model").arg(model);
        }
        command.args(["--threads", &env.models.thread_count().to_string()]);
        let mut process = command.stderr(Stdio::piped()).spawn().context("cannot start a server")?;
        let errors = process.stderr.take().context("it has no standard error")?;
        let mut startup_log = String::new();
        for line in BufReader::new(errors).lines() {
            let line = line?;
            if let Some((_, rest)) = line.split_once("listening on http://") {
                let address = rest.split_whitespace().next().unwrap_or_default().to_owned();
                return Ok(Self { process, address });
            }
            startup_log.push_str(&line);
        }
        let _ = process.wait();
        bail!("the server did not start: {startup_log}")
    }
}

impl Drop for BenchServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct BenchConnection {
    stream: BufReader<TcpStream>,
    address: String,
}

impl BenchConnection {
    fn open(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address).with_context(|| format!("cannot reach {address}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(120)))?;
        Ok(Self { stream: BufReader::new(stream), address: address.to_owned() })
    }

    /// Sends a request and reads the whole response.
    fn request(&mut self, method: &str, path: &str, body: &str) -> Result<Vec<u8>> {
        let (address, length) = (&self.address, body.len());
        let request =
            format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {length}\r\n\r\n{body}");
        self.stream.get_mut().write_all(request.as_bytes())?;
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let status: u16 = line.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        let mut length = 0;
        loop {
            line.clear();
            ensure!(self.stream.read_line(&mut line)? > 0, "the server closed the connection");
            if line.trim().is_empty() {
                break;
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().context("Content-Length is not a number")?;
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body)?;
        ensure!((200..300).contains(&status), "{method} {path}: {status} {}", String::from_utf8_lossy(&body));
        Ok(body)
    }

    /// Sends a message and waits for the end of the answer.
    fn send_message(&mut self, text: &str) -> Result<f64> {
        self.post_and_wait("messages", &json!({ "text": text }))
    }

    /// Regenerates the last answer; returns its tokens per second.
    fn regenerate(&mut self) -> Result<f64> {
        self.post_and_wait("regenerate", &json!({}))
    }

    fn post_and_wait(&mut self, what: &str, body: &Value) -> Result<f64> {
        self.request("POST", &format!("/api/halo/v1/conversations/main/{what}"), &body.to_string())?;
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let state: Value =
                serde_json::from_slice(&self.request("GET", "/api/halo/v1/conversations/main", "")?)?;
            if state["running"].is_null() {
                break;
            }
        }
        let turns: Value =
            serde_json::from_slice(&self.request("GET", "/api/halo/v1/conversations/main/turns", "")?)?;
        let last = turns.as_array().and_then(|turns| turns.last()).context("no turn was recorded")?;
        last["figures"]["tokens_per_second"].as_f64().context("the turn was interrupted")
    }
}

/// Clients that read and search.
struct BackgroundClients {
    stop_signal: Arc<StopSignal>,
    threads: Vec<std::thread::JoinHandle<Result<()>>>,
    times: Arc<Mutex<RequestTimes>>,
}

/// Wakes waiting clients when they are to stop: polling would cost more than their requests.
#[derive(Default)]
struct StopSignal(Mutex<bool>, Condvar);

impl StopSignal {
    /// Waits for the pause of a client; returns whether to stop.
    fn wait(&self, time: Duration) -> bool {
        let mut stopped = self.0.lock();
        self.1.wait_while_for(&mut stopped, |stopped| !*stopped, time);
        *stopped
    }

    fn stop(&self) {
        *self.0.lock() = true;
        self.1.notify_all();
    }
}

/// Search queries: no two clients send the same at the same time.
const SEARCH_TERMS: [&str; 12] = [
    "trains",
    "winter",
    "cheese",
    "a violin",
    "the mountains",
    "old letters",
    "my brother",
    "rain",
    "bread",
    "the sea",
    "a red bicycle",
    "school",
];

impl BackgroundClients {
    fn start(options: &ServerBenchOptions, address: &str) -> Self {
        let (enough, times) =
            (Arc::new(StopSignal::default()), Arc::new(Mutex::new(RequestTimes::default())));
        let (clients, pause, searches) = (options.readers, options.pause, !options.no_searches);
        let one = |number: usize| {
            let (enough, times, address) = (Arc::clone(&enough), Arc::clone(&times), address.to_owned());
            std::thread::spawn(move || {
                // The clients do not start at the same moment.
                let mut enough_now =
                    enough.wait(Duration::from_millis(pause * number as u64 / clients as u64));
                let mut connection = BenchConnection::open(&address)?;
                for n in number.. {
                    if enough_now {
                        break;
                    }
                    let search = n % 10 == 0 && searches;
                    let main = "/api/halo/v1/conversations/main";
                    let path = match n % 10 {
                        0 if searches => {
                            let word = |n: usize| SEARCH_TERMS[n % SEARCH_TERMS.len()].replace(' ', "%20");
                            format!("{main}/search?q={}%20and%20{}%20{n}", word(n), word(n / 7 + 1))
                        }
                        1 | 2 => format!("{main}/chunks/u0.0"),
                        3 => "/api/halo/v1/conversations".to_owned(),
                        _ => main.to_owned(),
                    };
                    let begin = Instant::now();
                    connection.request("GET", &path, "")?;
                    let took = begin.elapsed().as_secs_f64() * 1e3;
                    let mut times = times.lock();
                    if search {
                        times.searches.push(took);
                    } else {
                        times.reads.push(took);
                    }
                    drop(times);
                    enough_now = enough.wait(Duration::from_millis(pause));
                }
                Ok(())
            })
        };
        let threads = (0..clients).map(one).collect();
        Self { stop_signal: enough, threads, times }
    }

    fn stop(self) -> Result<RequestTimes> {
        self.stop_signal.stop();
        for thread in self.threads {
            thread.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
        }
        Ok(std::mem::take(&mut *self.times.lock()))
    }
}
