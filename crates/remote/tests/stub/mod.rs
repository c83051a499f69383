//! A server of the tests' own: a script answers each request, byte by byte if it likes, and everything that was asked
//! can be looked at.

#![allow(dead_code)]

use serde_json::Value;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// One request.
#[derive(Clone, Debug)]
pub struct Asked {
    pub method: String,
    pub path: String,
    /// The lines of its head, in lower case.
    pub head: String,
    pub body: Value,
}

impl Asked {
    /// The value of a header; empty where there is none.
    pub fn header(&self, name: &str) -> &str {
        let line = self.head.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
        line.unwrap_or("").trim()
    }
}

/// What a script writes its answer to.
pub struct Reply {
    stream: TcpStream,
    closed: Sender<bool>,
}

impl Reply {
    /// Writes bytes as they are. Whether anyone still listens is asked with `closed`.
    pub fn raw(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).and_then(|()| self.stream.flush()).is_ok()
    }

    pub fn answer(&mut self, status: &str, headers: &str, body: &str) {
        let length = body.len();
        self.raw(format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n{headers}\r\n{body}"));
    }

    pub fn json(&mut self, body: &Value) {
        self.answer("200 OK", "content-type: application/json\r\n", &body.to_string());
    }

    pub fn not_found(&mut self) {
        self.answer("404 Not Found", "", "{\"error\": \"no such thing\"}");
    }

    /// Begins a stream that ends when the connection does, as KoboldCPP's do.
    pub fn begin(&mut self) {
        self.raw("HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n");
    }

    /// One event, as KoboldCPP writes them.
    pub fn event(&mut self, value: &Value) -> bool {
        self.raw(format!("event: message\ndata: {value}\n\n"))
    }

    /// Waits until the other side closes the connection, and tells the test whether it did.
    pub fn wait_for_close(&mut self) {
        self.stream.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
        let closed = match self.stream.read(&mut [0; 16]) {
            Ok(n) => n == 0,
            Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
        };
        let _ = self.closed.send(closed);
    }

    /// Tells the test that the connection was closed, as found while writing.
    pub fn was_closed(&mut self, closed: bool) {
        let _ = self.closed.send(closed);
    }
}

/// A server that answers as its script says.
pub struct Stub {
    pub port: u16,
    asked: Arc<Mutex<Vec<Asked>>>,
    closed: Receiver<bool>,
}

impl Stub {
    pub fn new(script: impl Fn(&Asked, &mut Reply) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (sender, closed) = channel();
        let (log, script) = (Arc::clone(&asked), Arc::new(script));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (log, script, closed) = (Arc::clone(&log), Arc::clone(&script), sender.clone());
                std::thread::spawn(move || {
                    let mut reply = Reply { stream, closed };
                    if let Some(asked) = read(&mut reply.stream) {
                        log.lock().unwrap().push(asked.clone());
                        script(&asked, &mut reply);
                    }
                });
            }
        });
        Self { port, asked, closed }
    }

    /// What was asked of a path, in order.
    pub fn asked(&self, path: &str) -> Vec<Asked> {
        self.asked.lock().unwrap().iter().filter(|asked| asked.path == path).cloned().collect()
    }

    /// Whether the other side closed the connection, as the script has found.
    pub fn saw_close(&self) -> bool {
        self.closed.recv_timeout(Duration::from_secs(4)).unwrap_or(false)
    }
}

fn read(stream: &mut TcpStream) -> Option<Asked> {
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
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    // The names of headers are in lower case as they come from us; their values stay as they are.
    let length = text.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length: usize = length.map_or(0, |n| n.parse().unwrap());
    while bytes.len() < head + 4 + length {
        match stream.read(&mut buffer) {
            Ok(n) if n > 0 => bytes.extend_from_slice(&buffer[..n]),
            _ => return None,
        }
    }
    let body = serde_json::from_slice(&bytes[head + 4..]).unwrap_or_default();
    Some(Asked { method, path, head: text, body })
}
