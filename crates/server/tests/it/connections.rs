//! The limits of a real socket: connections of an address, slow and half-closed clients, wrong keys.

use crate::chat::chat_body;
use crate::fake::FakeServer;
use crate::request_log::LogLines;
use halo_server::{ListenOptions, ServerLimits, serve};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};

const KEY: &str = "a key of sixteen letters";

/// A server on a socket. It listens until the test process ends.
struct SocketServer {
    fake: FakeServer,
    address: SocketAddr,
}

impl SocketServer {
    fn start(limits: ServerLimits) -> Self {
        let fake = FakeServer::with_limits(limits);
        let (sender, ready) = std::sync::mpsc::channel();
        let app = std::sync::Arc::clone(&fake.app);
        std::thread::spawn(move || {
            let on_ready = Box::new(move |address| sender.send(address).expect("the test waits"));
            let address = SocketAddr::from(([127, 0, 0, 1], 0));
            serve(&app, ListenOptions { address, tls: None, on_ready }).expect("the server listens");
        });
        Self { fake, address: ready.recv().expect("the server listens") }
    }

    /// A connection from an address of the loopback network.
    async fn connect_from(&self, last: u8) -> TcpStream {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(SocketAddr::from(([127, 0, 0, last], 0))).expect("an address of this machine");
        socket.connect(self.address).await.expect("the server accepts connections")
    }

    async fn connect(&self) -> TcpStream {
        self.connect_from(1).await
    }

    /// Sends one request; returns the status and the body of the response.
    async fn call(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> (u16, String) {
        let mut stream = self.connect().await;
        stream.write_all(request(method, path, headers, body).as_bytes()).await.expect("it is sent");
        read_response(stream).await
    }

    async fn is_busy(&self) -> bool {
        let (_, body) = self.call("GET", "/api/halo/v1/status", &[], "").await;
        let status: Value = serde_json::from_str(&body).unwrap_or_default();
        status["busy"] == true
    }

    async fn wait_until_idle(&self, limit: Duration) {
        let started = Instant::now();
        loop {
            let (_, body) = self.call("GET", "/api/halo/v1/status", &[], "").await;
            let status: Value = serde_json::from_str(&body).unwrap_or_default();
            if status["busy"] == false && status["queued"] == 0 {
                return;
            }
            assert!(started.elapsed() < limit, "the model is still busy: {body}");
            sleep(Duration::from_millis(10)).await;
        }
    }
}

fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> String {
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n{body}"
    )
}

async fn read_response(mut stream: TcpStream) -> (u16, String) {
    let mut text = Vec::new();
    // A connection that was refused may be reset after the response.
    let read =
        timeout(Duration::from_secs(20), stream.read_to_end(&mut text)).await.expect("a response in time");
    let text = String::from_utf8_lossy(&text).into_owned();
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.unwrap_or_else(|| panic!("no response: {text} {read:?}"));
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (status, body.to_owned())
}

/// Sends the first half of a request, and leaves it there.
async fn send_slowly(mut stream: TcpStream) -> TcpStream {
    let _ = stream.write_all(b"GET /health HTTP/1.1\r\nhost: local").await;
    stream
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn slow_connections_of_one_address_do_not_starve_others() {
    let limits =
        ServerLimits { max_connections: 30, max_connections_per_address: 10, ..ServerLimits::default() };
    let server = SocketServer::start(limits);
    let mut slow = Vec::new();
    for _ in 0..50 {
        slow.push(send_slowly(server.connect_from(2).await).await);
    }
    let started = Instant::now();
    assert_eq!(server.call("GET", "/health", &[], "").await.0, 200, "another address");
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    let refused = slow.pop().expect("a connection");
    let (status, body) = read_response(refused).await;
    assert!(status == 503 && body.contains("too many connections from this address"), "{status} {body}");
    drop(slow);
    for _ in 0..100 {
        let again = send_slowly(server.connect_from(2).await).await;
        let mut byte = [0];
        if timeout(Duration::from_millis(50), async { again.peek(&mut byte).await }).await.is_err() {
            return;
        }
    }
    panic!("the address is refused for ever");
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn trusted_proxies_may_have_more_connections() {
    let limits = ServerLimits {
        max_connections_per_address: 3,
        trusted_proxies: vec!["127.0.0.2".parse().expect("an address")],
        ..ServerLimits::default()
    };
    let server = SocketServer::start(limits);
    let mut open = Vec::new();
    for _ in 0..10 {
        open.push(send_slowly(server.connect_from(2).await).await);
    }
    let mut stream = server.connect_from(2).await;
    stream.write_all(request("GET", "/health", &[], "").as_bytes()).await.expect("it is sent");
    assert_eq!(read_response(stream).await.0, 200);
}

#[tokio::test]
async fn slow_bodies_are_cut() {
    let limits = ServerLimits { body_grace: Duration::from_millis(300), ..ServerLimits::default() };
    let server = SocketServer::start(limits);
    for path in ["/v1/completions", "/api/halo/v1/conversations/main/messages", "/mcp"] {
        let stream = server.connect().await;
        let (read, mut write) = stream.into_split();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\naccept: application/json, text/event-stream\r\n\
             content-type: application/json\r\ncontent-length: 1000\r\n\r\n"
        );
        write.write_all(head.as_bytes()).await.expect("the head is sent");
        let dribble = tokio::spawn(async move {
            while write.write_all(b" ").await.is_ok() {
                sleep(Duration::from_millis(20)).await;
            }
        });
        let started = Instant::now();
        let mut text = Vec::new();
        let mut read = read;
        let end = timeout(Duration::from_secs(10), read.read_to_end(&mut text)).await;
        assert!(end.is_ok(), "{path}: the connection was not cut");
        let text = String::from_utf8_lossy(&text);
        assert!(path == "/mcp" || text.starts_with("HTTP/1.1 408"), "{path}: {text}");
        assert!(started.elapsed() < Duration::from_secs(3), "{path}: {:?}", started.elapsed());
        dribble.abort();
    }
    let long = json!({ "text": "x".repeat(200_000) }).to_string();
    assert_eq!(server.call("POST", "/api/v1/tokenize", &[], &long).await.0, 200, "a large body is not slow");
}

fn streamed_chat() -> String {
    let mut body = chat_body(&["u Hello"]);
    body["stream"] = json!(true);
    body["max_tokens"] = json!(1000);
    body.to_string()
}

#[tokio::test]
async fn half_closed_client_gets_its_whole_streamed_answer() {
    let server = SocketServer::start(ServerLimits::default());
    server.fake.script().token_delay = Duration::from_millis(20);
    server.fake.script_answers(&[&vec!["word"; 60].join(" ")]);
    let mut stream = server.connect().await;
    let request = request("POST", "/v1/chat/completions", &[], &streamed_chat());
    stream.write_all(request.as_bytes()).await.expect("it is sent");
    stream.shutdown().await.expect("the writing half is closed");
    let (status, body) = read_response(stream).await;
    assert_eq!(status, 200);
    assert_eq!(body.matches("word").count(), 60, "{body}");
    assert!(body.contains("data: [DONE]"), "{body}");
}

/// Nothing more can come on such a connection, although the client did not ask to close it.
#[tokio::test]
async fn half_closed_connection_is_closed_after_the_answer() {
    let server = SocketServer::start(ServerLimits::default());
    for (method, path, body) in
        [("POST", "/v1/chat/completions", streamed_chat()), ("GET", "/health", String::new())]
    {
        let mut stream = server.connect().await;
        let request = request(method, path, &[], &body).replace("connection: close\r\n", "");
        stream.write_all(request.as_bytes()).await.expect("it is sent");
        stream.shutdown().await.expect("the writing half is closed");
        let started = Instant::now();
        assert_eq!(read_response(stream).await.0, 200, "{path}");
        assert!(started.elapsed() < Duration::from_secs(5), "{path}: {:?}", started.elapsed());
    }
}

#[tokio::test]
async fn half_close_in_the_middle_of_an_answer_changes_nothing() {
    let server = SocketServer::start(ServerLimits::default());
    server.fake.script().token_delay = Duration::from_millis(20);
    server.fake.script_answers(&[&vec!["word"; 80].join(" ")]);
    let mut stream = server.connect().await;
    let request = request("POST", "/v1/chat/completions", &[], &streamed_chat());
    stream.write_all(request.as_bytes()).await.expect("it is sent");
    sleep(Duration::from_millis(800)).await;
    stream.shutdown().await.expect("the writing half is closed");
    let (_, body) = read_response(stream).await;
    assert_eq!(body.matches("word").count(), 80, "{body}");
}

#[tokio::test]
async fn client_that_leaves_cancels_its_answer() {
    let server = SocketServer::start(ServerLimits::default());
    server.fake.script().token_delay = Duration::from_millis(50);
    let long = vec!["word"; 900].join(" ");
    server.fake.script_answers(&[&long, &long]);
    let mut not_streamed = chat_body(&["u Hello"]);
    not_streamed["max_tokens"] = json!(1000);
    for body in [streamed_chat(), not_streamed.to_string()] {
        let mut stream = server.connect().await;
        stream
            .write_all(request("POST", "/v1/chat/completions", &[], &body).as_bytes())
            .await
            .expect("it is sent");
        let begun = Instant::now();
        while !server.is_busy().await {
            assert!(begun.elapsed() < Duration::from_secs(30), "it is being answered");
            sleep(Duration::from_millis(50)).await;
        }
        sleep(Duration::from_millis(900)).await;
        drop(stream);
        // The whole answer would take forty-five seconds.
        server.wait_until_idle(Duration::from_secs(20)).await;
    }
}

#[tokio::test]
async fn closed_page_ends_its_event_stream() {
    let server = SocketServer::start(ServerLimits::default());
    let mut stream = server.connect().await;
    stream.write_all(request("GET", "/api/halo/v1/events", &[], "").as_bytes()).await.expect("it is sent");
    let mut bytes = [0; 256];
    assert!(stream.read(&mut bytes).await.is_ok_and(|n| n > 0));
    let subscribers = async || {
        let (_, metrics) = server.call("GET", "/metrics", &[], "").await;
        metrics.contains("halo_event_subscribers 1")
    };
    assert!(subscribers().await);
    drop(stream);
    for _ in 0..100 {
        if !subscribers().await {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("the subscriber is still there");
}

#[tokio::test]
async fn wrong_keys_are_slowed_down_on_loopback_and_behind_proxies() {
    let limits = ServerLimits {
        api_key: Some(KEY.into()),
        trusted_proxies: vec!["127.0.0.1".parse().expect("an address")],
        ..ServerLimits::default()
    };
    let server = SocketServer::start(limits);
    let status = async |key: &str, client: Option<&str>| {
        let mut headers = vec![("x-api-key", key)];
        headers.extend(client.map(|client| ("x-forwarded-for", client)));
        let started = Instant::now();
        let (status, body) = server.call("GET", "/v1/models", &headers, "").await;
        assert!(status == 200 || !body.contains("scripted"), "{body}");
        (status, started.elapsed() > Duration::from_millis(900))
    };
    for client in [None, Some("192.0.2.1")] {
        for _ in 0..20 {
            assert_eq!(status("a wrong key of mine", client).await.0, 401);
        }
        let late = [status("another wrong key", client).await, status(KEY, client).await];
        assert_eq!(late, [(401, true), (200, true)], "{client:?}");
    }
    assert_eq!(status(KEY, Some("192.0.2.2")).await, (200, false), "another client of the proxy");
    let guesses = (0..40).map(|n| {
        let headers = [("x-api-key", format!("guess number {n} of many"))];
        let server = &server;
        async move { server.call("GET", "/health", &[(headers[0].0, &headers[0].1)], "").await.0 }
    });
    let statuses = futures_util::future::join_all(guesses).await;
    assert!(statuses.iter().filter(|status| **status == 429).count() >= 20, "{statuses:?}");
    assert!(statuses.iter().all(|status| [401, 429].contains(status)), "{statuses:?}");
}

#[tokio::test]
async fn rate_limit_counts_addresses_and_keys() {
    let limits = ServerLimits {
        api_key: Some(KEY.into()),
        requests_per_second: 2,
        trusted_proxies: vec!["127.0.0.1".parse().expect("an address")],
        ..ServerLimits::default()
    };
    let server = SocketServer::start(limits);
    let accepted = async |clients: &[String]| {
        let mut accepted = 0;
        for client in clients {
            let headers = [("x-api-key", KEY), ("x-forwarded-for", client)];
            accepted += usize::from(server.call("GET", "/v1/models", &headers, "").await.0 == 200);
        }
        accepted
    };
    let one_client = vec!["192.0.2.1".to_owned(); 12];
    let count = accepted(&one_client).await;
    assert!((4..7).contains(&count), "a burst of twice the rate: {count}");
    let many_clients: Vec<String> = (0..60).map(|n| format!("198.51.100.{n}")).collect();
    let count = accepted(&many_clients).await;
    assert!((8..40).contains(&count), "the key has four times the rate: {count}");
}

/// The same for the APIs of Ollama, llama-server and KoboldCPP, whole and as a stream.
#[tokio::test]
async fn client_of_another_api_that_leaves_cancels_its_answer() {
    let server = SocketServer::start(ServerLimits::default());
    server.fake.script().token_delay = Duration::from_millis(50);
    let long = vec!["word"; 900].join(" ");
    let messages = json!([{ "role": "user", "content": "Hello" }]);
    let options = json!({ "num_predict": 1000 });
    for (path, body, streams) in [
        ("/api/chat", json!({ "messages": messages, "options": options }), true),
        ("/api/generate", json!({ "prompt": "Hello", "options": options }), true),
        ("/api/generate", json!({ "prompt": "Hello", "options": options, "raw": true }), true),
        ("/completion", json!({ "prompt": "Hello", "n_predict": 1000 }), true),
        ("/api/extra/generate/stream", json!({ "prompt": "Hello", "max_length": 1000 }), true),
        ("/api/chat", json!({ "messages": messages, "options": options }), false),
        ("/api/generate", json!({ "prompt": "Hello", "options": options }), false),
        ("/completion", json!({ "prompt": "Hello", "n_predict": 1000 }), false),
        ("/api/v1/generate", json!({ "prompt": "Hello", "max_length": 1000 }), false),
    ] {
        server.fake.script_answers(&[&long]);
        let mut body = body;
        body["stream"] = json!(streams);
        let mut stream = server.connect().await;
        stream.write_all(request("POST", path, &[], &body.to_string()).as_bytes()).await.expect("it is sent");
        if streams {
            let mut received = [0; 4096];
            let mut text = String::new();
            while !text.contains("word") {
                let count = stream.read(&mut received).await.expect("the answer begins");
                assert!(count > 0, "{path}: {text}");
                text.push_str(&String::from_utf8_lossy(&received[..count]));
            }
        }
        let begun = Instant::now();
        while !server.is_busy().await {
            assert!(begun.elapsed() < Duration::from_secs(30), "{path}: it is being answered");
            sleep(Duration::from_millis(50)).await;
        }
        // A client that leaves right after its request cannot be told from one that only stops writing.
        sleep(Duration::from_millis(if streams { 0 } else { 900 })).await;
        drop(stream);
        // The whole answer would take forty-five seconds.
        server.wait_until_idle(Duration::from_secs(20)).await;
    }
}

/// What a client of KoboldCPP generates without a key belongs to its address.
#[tokio::test]
async fn generations_without_a_key_belong_to_the_address_of_their_client() {
    let limits = ServerLimits {
        trusted_proxies: vec!["127.0.0.1".parse().expect("an address")],
        ..ServerLimits::default()
    };
    let server = SocketServer::start(limits);
    server.fake.script().token_delay = Duration::from_millis(20);
    let long = vec!["word"; 400].join(" ");
    let from = async |client: &str, method: &str, path: &str, body: &str| -> Value {
        let (status, text) = server.call(method, path, &[("x-forwarded-for", client)], body).await;
        assert_eq!(status, 200, "{path}: {text}");
        serde_json::from_str(&text).expect("JSON")
    };
    let (mine, other) = ("192.0.2.1", "192.0.2.2");
    let checked = async |client: &str, method: &str| {
        let body = if method == "POST" { "{}" } else { "" };
        let json = from(client, method, "/api/extra/generate/check", body).await;
        json["results"][0]["text"].as_str().expect("a text").to_owned()
    };
    let chat = json!({ "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 400 });
    let unstored = json!({ "messages": chat["messages"], "max_tokens": 400, "store": false });
    let generate = json!({ "prompt": "Hello", "max_length": 400 });
    for (path, body, is_watched) in [
        ("/api/v1/generate", generate.to_string(), true),
        ("/v1/chat/completions", unstored.to_string(), true),
        ("/v1/chat/completions", chat.to_string(), false),
    ] {
        server.fake.script_answers(&[&long]);
        let answers = server.fake.script().samplings.len();
        let watch = async {
            while server.fake.script().samplings.len() == answers {
                sleep(Duration::from_millis(10)).await;
            }
            sleep(Duration::from_millis(200)).await;
            for method in ["GET", "POST"] {
                assert_eq!(checked(mine, method).await.starts_with("word word"), is_watched, "{path}");
                assert_eq!(checked(other, method).await, "", "{path}: another client sees nothing of it");
            }
            let stopped = from(other, "POST", "/api/extra/abort", "{}").await;
            assert_eq!(stopped["success"], "false", "{path}: another client does not stop it");
            let stopped = from(mine, "POST", "/api/extra/abort", "{}").await;
            assert_eq!(stopped["success"], "true", "{path}");
        };
        let started = Instant::now();
        let (answer, ()) = tokio::join!(from(mine, "POST", path, &body), watch);
        assert!(started.elapsed() < Duration::from_secs(5), "{path}: it was not stopped");
        assert!(answer.to_string().contains("word word"), "{path}: {answer}");
        // Nothing of a completion that ended is left for the next one.
        let forget = json!({ "prompt": "Hello", "max_length": 1 }).to_string();
        server.fake.script_answers(&["end"]);
        from(mine, "POST", "/api/v1/generate", &forget).await;
    }
}

/// The status of these is 200, so the line of a refused request does not cover them.
#[tokio::test]
async fn log_lines_of_mcp_and_of_streams_name_the_client() {
    let lines = LogLines::of_process();
    let limits = ServerLimits {
        trusted_proxies: vec!["127.0.0.1".parse().expect("an address")],
        ..ServerLimits::default()
    };
    let server = SocketServer::start(limits);
    let call = json!({ "name": "recall", "arguments": { "query": 7 } });
    let call = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call });
    let question = json!([{ "role": "user", "content": "Hello" }]);
    let chat = json!({ "messages": question, "stream": true });
    for (path, body, client, expected) in [
        ("/mcp", call, "192.0.2.71", "MCP request refused: recall: InvalidInput"),
        (
            "/v1/chat/completions",
            chat.clone(),
            "192.0.2.72",
            "a stream failed after its headers: POST /v1/chat/completions: Internal",
        ),
        ("/api/chat", chat, "192.0.2.73", "a stream failed after its headers: POST /api/chat: Internal"),
    ] {
        server.fake.script_failure_after("a word");
        let accept = "application/json, text/event-stream";
        let headers = [("x-forwarded-for", client), ("content-type", "application/json"), ("accept", accept)];
        let (status, text) = server.call("POST", path, &headers, &body.to_string()).await;
        assert_eq!(status, 200, "{path}: {text}");
        let expected = format!("{expected}, client {client}");
        let own: Vec<String> = lines.lines().into_iter().filter(|line| line.contains(client)).collect();
        assert_eq!(own, [expected], "{path}: {text}");
    }
}
