//! `halo-bench server --clients 1,4,8`: tokens per second of several clients at once, beside one answer after the other, and
//! beside llama-server with as many slots.

use super::server::{BenchServer, quantile};
use anyhow::{Context, Result, bail, ensure};
use halo_cli::env::Env;
use halo_cli::output::{print_json, print_stdout};
use halo_cli::wiring;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(super) struct ClientPlan {
    pub clients: Vec<usize>,
    pub rounds: usize,
    pub parallel: Option<usize>,
    pub llama_server: Option<PathBuf>,
    /// Whether llama-server uses flash attention: off, on or auto. Each is measured.
    pub llama_flash: Vec<String>,
}

/// Tokens of an answer.
const ANSWER_TOKENS: usize = 96;

/// The context of each conversation, and of each slot of llama-server.
const CONTEXT_TOKENS: usize = 2048;

/// What one client measures of one answer.
struct AnswerTimes {
    first_token: Duration,
    whole: Duration,
    tokens: usize,
}

/// The figures of a number of clients.
struct ClientFigures {
    tokens_per_second: f64,
    first_token_p50: f64,
    first_token_p99: f64,
    /// The speed of the slowest client, as a share of the fastest one's.
    fairness: f64,
}

impl ClientFigures {
    fn to_json(&self, server: &str, clients: usize, parallel: usize) -> Value {
        json!({
            "server": server,
            "clients": clients,
            "parallel": parallel,
            "tok_s": self.tokens_per_second,
            "first_token_p50_ms": self.first_token_p50,
            "first_token_p99_ms": self.first_token_p99,
            "slowest_of_fastest": self.fairness,
        })
    }
}

/// Adds how fast Halo is beside the others of one number of clients: with several answers at once, as a share of one at a time
/// and of llama-server.
fn add_shares(rows: &mut [Value]) {
    let speed = |row: &Value| row["tok_s"].as_f64().unwrap_or(f64::NAN);
    let Some(halo) = rows.iter().rposition(|row| row["server"] == HALO) else { return };
    let own = speed(&rows[halo]);
    for (_, row) in rows.iter_mut().enumerate().filter(|(n, _)| *n != halo) {
        row["halo_share"] = (own / speed(row)).into();
    }
}

const HALO: &str = "halo";

pub(super) fn run(plan: &ClientPlan, env: &Env) -> Result<()> {
    ensure!(plan.rounds > 0 && !plan.clients.contains(&0), "--clients and --rounds must be at least 1");
    let mut rows = Vec::new();
    for &clients in &plan.clients {
        let parallel = plan.parallel.unwrap_or(clients);
        let mut measured = Vec::new();
        for limit in if parallel > 1 { vec![1, parallel] } else { vec![1] } {
            let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
            let settings = [format!("model.parallel={limit}"), format!("model.context={CONTEXT_TOKENS}")];
            let server = BenchServer::start(env, folder.path(), &settings)?;
            measured.push(measure(&server.address, clients, plan.rounds)?.to_json(HALO, clients, limit));
        }
        for flash in plan.llama_flash.iter().filter(|_| plan.llama_server.is_some()) {
            let Some(program) = &plan.llama_server else { continue };
            let server = LlamaServer::start(program, env, parallel, flash)?;
            let figures = measure(&server.address, clients, plan.rounds)?;
            measured.push(figures.to_json(&format!("llama-server -fa {flash}"), clients, parallel));
        }
        add_shares(&mut measured);
        rows.extend(measured);
    }
    if env.json {
        return print_json(&Value::from(rows));
    }
    let mut out = format!(
        "{:<22}{:>8}{:>9}{:>10}{:>12}{:>12}{:>10}{:>12}\n",
        "server", "clients", "parallel", "tokens/s", "first p50", "first p99", "fairness", "halo is"
    );
    for row in &rows {
        let number = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
        let _ = writeln!(
            out,
            "{:<22}{:>8.0}{:>9.0}{:>10.1}{:>9.0} ms{:>9.0} ms{:>10.2}{:>12}",
            row["server"].as_str().unwrap_or_default(),
            number("clients"),
            number("parallel"),
            number("tok_s"),
            number("first_token_p50_ms"),
            number("first_token_p99_ms"),
            number("slowest_of_fastest"),
            row["halo_share"].as_f64().map_or_else(String::new, |share| format!("× {share:.2}")),
        );
    }
    print_stdout(&out)
}

/// All clients ask at the same time, each in a conversation of its own, as often as there are rounds.
fn measure(address: &str, clients: usize, rounds: usize) -> Result<ClientFigures> {
    ask(address, "Say hello.", 0)?;
    let started = Instant::now();
    let threads: Vec<_> = (0..clients)
        .map(|client| {
            let address = address.to_owned();
            std::thread::spawn(move || -> Result<Vec<AnswerTimes>> {
                let question = |round: usize| {
                    let topic = TOPICS[(client + round * clients) % TOPICS.len()];
                    format!("Tell me a long story about {topic}, as client {client} in round {round}.")
                };
                (0..rounds).map(|round| ask(&address, &question(round), client)).collect()
            })
        })
        .collect();
    let mut answers = Vec::new();
    for thread in threads {
        answers.push(thread.join().map_err(|_| anyhow::anyhow!("a client panicked"))??);
    }
    let elapsed = started.elapsed().as_secs_f64();
    let all = || answers.iter().flatten();
    let mut first: Vec<f64> = all().map(|answer| answer.first_token.as_secs_f64() * 1e3).collect();
    let speeds: Vec<f64> = answers
        .iter()
        .map(|answers| {
            let tokens: usize = answers.iter().map(|answer| answer.tokens).sum();
            tokens as f64 / answers.iter().map(|answer| answer.whole.as_secs_f64()).sum::<f64>()
        })
        .collect();
    let fastest = speeds.iter().copied().fold(0.0, f64::max);
    Ok(ClientFigures {
        tokens_per_second: all().map(|answer| answer.tokens).sum::<usize>() as f64 / elapsed,
        first_token_p50: quantile(&mut first, 0.5),
        first_token_p99: quantile(&mut first, 0.99),
        fairness: speeds.iter().copied().fold(f64::INFINITY, f64::min) / fastest,
    })
}

const TOPICS: [&str; 8] = [
    "a fisherman and his brother",
    "an old gun on a wall",
    "two cats in winter",
    "the last train to the sea",
    "a violin that nobody plays",
    "bread and the baker's daughter",
    "a letter that came late",
    "the house on the hill",
];

/// Streams one answer of a fixed length over the OpenAI API.
fn ask(address: &str, question: &str, client: usize) -> Result<AnswerTimes> {
    let body = json!({
        "model": "any",
        "stream": true,
        "stream_options": {"include_usage": true},
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": true,
        "seed": client + 1,
        "user": format!("client {client}"),
        "messages": [{"role": "user", "content": question}],
    })
    .to_string();
    let started = Instant::now();
    let mut stream = TcpStream::connect(address).with_context(|| format!("cannot reach {address}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(300)))?;
    let length = body.len();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all((head + &body).as_bytes())?;
    let mut times = AnswerTimes { first_token: Duration::ZERO, whole: Duration::ZERO, tokens: 0 };
    for line in BufReader::new(stream).lines() {
        let line = line?;
        if line.starts_with("HTTP/1.1") {
            ensure!(line.contains(" 200 "), "{line}");
        }
        let Some(event) = line.strip_prefix("data: ") else { continue };
        if event.trim() == "[DONE]" {
            break;
        }
        let event: Value = serde_json::from_str(event).context("an event is not JSON")?;
        let has_text = event["choices"][0]["delta"]["content"].as_str().is_some_and(|text| !text.is_empty());
        if has_text && times.first_token.is_zero() {
            times.first_token = started.elapsed();
        }
        if let Some(tokens) = event["usage"]["completion_tokens"].as_u64() {
            times.tokens = tokens as usize;
        }
    }
    times.whole = started.elapsed();
    ensure!(times.tokens == ANSWER_TOKENS, "an answer has {} tokens, not {ANSWER_TOKENS}", times.tokens);
    Ok(times)
}

/// llama-server with the same model, threads and context per slot.
struct LlamaServer {
    process: Child,
    address: String,
}

impl LlamaServer {
    fn start(program: &Path, env: &Env, slots: usize, flash: &str) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut command = Command::new(program);
        command.arg("-m").arg(env.model_file()?).args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["-np", &slots.to_string(), "-c", &(CONTEXT_TOKENS * slots).to_string()]);
        command.args(["-t", &env.models.thread_count().to_string(), "-fa", flash]);
        let gpu_layers = wiring::gpu_layers(&env.load_settings()?.settings).count();
        command.args(["-ngl", &gpu_layers.map_or("auto".into(), |layers| layers.to_string())]);
        let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let process = process.with_context(|| format!("cannot start {}", program.display()))?;
        let server = Self { process, address: format!("127.0.0.1:{port}") };
        for _ in 0..600 {
            std::thread::sleep(Duration::from_millis(100));
            if is_healthy(&server.address) {
                return Ok(server);
            }
        }
        bail!("llama-server did not start")
    }
}

/// Whether the model is loaded.
fn is_healthy(address: &str) -> bool {
    let status = || -> Result<String> {
        let mut stream = TcpStream::connect(address)?;
        write!(stream, "GET /health HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        Ok(line)
    };
    status().is_ok_and(|line| line.contains(" 200 "))
}

impl Drop for LlamaServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
