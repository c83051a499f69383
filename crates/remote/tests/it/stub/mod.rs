//! A scripted HTTP server. The script writes each response as bytes; the server records the requests.

use serde_json::Value;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct StubRequest {
    pub path: String,
    /// The request line and the headers; reqwest sends header names in lower case.
    pub headers: String,
    pub body: Value,
}

impl StubRequest {
    /// The value of a header; empty where there is none.
    pub fn header(&self, name: &str) -> &str {
        let line = self.headers.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
        line.unwrap_or("").trim()
    }
}

/// The connection that a script writes its response to.
pub struct StubReply {
    stream: TcpStream,
    closed: Sender<bool>,
}

impl StubReply {
    /// Writes bytes as they are. Returns whether the client is still connected.
    pub fn write_raw(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).and_then(|()| self.stream.flush()).is_ok()
    }

    pub fn respond(&mut self, status: &str, headers: &str, body: &str) {
        let length = body.len();
        self.write_raw(format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n{headers}\r\n{body}"));
    }

    pub fn json(&mut self, body: &Value) {
        self.respond("200 OK", "content-type: application/json\r\n", &body.to_string());
    }

    pub fn not_found(&mut self) {
        self.respond("404 Not Found", "", "{\"error\": \"no such thing\"}");
    }

    /// Begins a stream that ends with the connection, as KoboldCPP's streams do.
    pub fn begin_stream(&mut self) {
        self.write_raw("HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n");
    }

    /// Writes an event in KoboldCPP's form.
    pub fn event(&mut self, value: &Value) -> bool {
        self.write_raw(format!("event: message\ndata: {value}\n\n"))
    }

    /// Waits until the client closes the connection, and reports to the test whether it did.
    pub fn wait_for_close(&mut self) {
        self.stream.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
        let closed = match self.stream.read(&mut [0; 16]) {
            Ok(n) => n == 0,
            Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
        };
        let _ = self.closed.send(closed);
    }

    /// Reports to the test whether writing found the connection closed.
    pub fn report_closed(&mut self, closed: bool) {
        let _ = self.closed.send(closed);
    }
}

pub struct StubServer {
    pub port: u16,
    requests: Arc<Mutex<Vec<StubRequest>>>,
    closed: Receiver<bool>,
}

impl StubServer {
    pub fn new(script: impl Fn(&StubRequest, &mut StubReply) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (sender, closed) = channel();
        let (log, script) = (Arc::clone(&requests), Arc::new(script));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (log, script, closed) = (Arc::clone(&log), Arc::clone(&script), sender.clone());
                std::thread::spawn(move || {
                    let mut reply = StubReply { stream, closed };
                    if let Some(request) = read_request(&mut reply.stream) {
                        log.lock().unwrap().push(request.clone());
                        script(&request, &mut reply);
                    }
                });
            }
        });
        Self { port, requests, closed }
    }

    /// The requests for a path, in order.
    pub fn requests(&self, path: &str) -> Vec<StubRequest> {
        self.requests.lock().unwrap().iter().filter(|request| request.path == path).cloned().collect()
    }

    /// Whether the client closed the connection, as the script reported.
    pub fn saw_close(&self) -> bool {
        self.closed.recv_timeout(Duration::from_secs(4)).unwrap_or(false)
    }
}

fn read_request(stream: &mut TcpStream) -> Option<StubRequest> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 65536];
    let head = loop {
        if let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            break end;
        }
        match stream.read(&mut buffer) {
            Ok(n) if n > 0 => bytes.extend_from_slice(&buffer[..n]),
            _ => return None,
        }
    };
    let text = String::from_utf8(bytes[..head].to_vec()).unwrap();
    let mut words = text.split_whitespace();
    let path = words.nth(1)?.to_owned();
    let length = text.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length: usize = length.map_or(0, |n| n.parse().unwrap());
    while bytes.len() < head + 4 + length {
        match stream.read(&mut buffer) {
            Ok(n) if n > 0 => bytes.extend_from_slice(&buffer[..n]),
            _ => return None,
        }
    }
    let body = serde_json::from_slice(&bytes[head + 4..]).unwrap_or_default();
    Some(StubRequest { path, headers: text, body })
}
