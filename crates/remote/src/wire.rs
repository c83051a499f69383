//! One connection, and the answer that comes over it.

use crate::address::Base;
use http_body_util::Full;
use hyper::StatusCode;
use hyper::body::{Body, Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{self, HeaderMap, HeaderName};
use hyper_util::rt::TokioIo;
use std::error::Error;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

/// Why an attempt came to nothing.
pub(crate) enum Trouble {
    /// No connection, or it broke before an answer began: worth another attempt.
    Unreachable(String),
    /// Not worth one.
    Hopeless(String),
}

/// The connection and the request, up to where the answer begins.
pub(crate) async fn exchange(
    base: &Base,
    tls: Option<TlsConnector>,
    patience: Duration,
    message: hyper::Request<Full<Bytes>>,
    deadline: Option<Instant>,
) -> Result<Answer, Trouble> {
    let dialled = timeout(patience, dial(base, tls)).await;
    let stream = dialled.unwrap_or_else(|_| {
        let why = format!("no connection within {} s", patience.as_secs_f32());
        Err(Trouble::Unreachable(format!("{why}; check the address, and that the server runs")))
    })?;
    let broke = |e: hyper::Error| Trouble::Unreachable(format!("the connection broke ({})", reason(&e)));
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broke)?;
    let mut wire = Wire(Some(Box::pin(connection)));
    let mut reply = pin!(sender.send_request(message));
    // The connection does its work only while it is polled, and is closed when it is dropped: nothing runs behind
    // our back.
    let reply = poll_fn(|cx| {
        wire.poll(cx);
        reply.as_mut().poll(cx)
    });
    let (head, body) = reply.await.map_err(broke)?.into_parts();
    Ok(Answer {
        status: head.status,
        headers: head.headers,
        body,
        wire,
        _sender: sender,
        begun: false,
        deadline,
    })
}

/// What bytes go over.
trait Channel: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> Channel for T {}

async fn dial(base: &Base, tls: Option<TlsConnector>) -> Result<Box<dyn Channel>, Trouble> {
    let plain = TcpStream::connect((base.host.as_str(), base.port)).await.map_err(|e| {
        Trouble::Unreachable(format!("no connection ({e}); check the address, and that the server runs"))
    })?;
    // Tokens are small and should not wait for company. Without it they come as well, only later.
    let _ = plain.set_nodelay(true);
    let Some(tls) = tls else { return Ok(Box::new(plain)) };
    let name = ServerName::try_from(base.host.clone())
        .map_err(|_| Trouble::Hopeless(format!("'{}' is no name that a certificate can have", base.host)))?;
    match tls.connect(name, plain).await {
        Ok(stream) => Ok(Box::new(stream)),
        Err(e) if e.kind() == std::io::ErrorKind::InvalidData => Err(Trouble::Hopeless(format!(
            "no safe connection ({e}); check that the server speaks https, and its certificate"
        ))),
        Err(e) => Err(Trouble::Unreachable(format!("the connection broke ({e})"))),
    }
}

type Connection = http1::Connection<TokioIo<Box<dyn Channel>>, Full<Bytes>>;

/// A connection, until it is at its end.
struct Wire(Option<Pin<Box<Connection>>>);

impl Wire {
    fn poll(&mut self, cx: &mut Context<'_>) {
        // What went wrong is told to whoever waits for the answer.
        if let Some(connection) = &mut self.0
            && connection.as_mut().poll(cx).is_ready()
        {
            self.0 = None;
        }
    }
}

/// An answer that has begun. Dropping it closes the connection.
pub(crate) struct Answer {
    pub status: StatusCode,
    headers: HeaderMap,
    body: Incoming,
    wire: Wire,
    _sender: http1::SendRequest<Full<Bytes>>,
    /// Whether any of the body has come.
    pub begun: bool,
    pub deadline: Option<Instant>,
}

impl Answer {
    /// A header as text; empty where there is none.
    pub fn header(&self, name: &HeaderName) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("")
    }

    pub fn asks_for_patience(&self) -> bool {
        matches!(self.status.as_u16(), 429 | 502 | 503 | 504)
    }

    pub fn retry_after(&self) -> Option<Duration> {
        self.header(&header::RETRY_AFTER).trim().parse().ok().map(Duration::from_secs)
    }

    /// The next bytes; none at the end. Whoever polls this does all the work there is.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, String>> {
        loop {
            self.wire.poll(cx);
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(Ok(None)),
                Poll::Ready(Some(Err(e))) => return Poll::Ready(Err(reason(&e))),
                Poll::Ready(Some(Ok(frame))) => {
                    // Trailers say nothing to us, and empty chunks are not the end.
                    if let Ok(data) = frame.into_data()
                        && !data.is_empty()
                    {
                        return Poll::Ready(Ok(Some(data)));
                    }
                }
            }
        }
    }
}

/// An error and what lies beneath it.
fn reason(error: &dyn Error) -> String {
    let mut reason = error.to_string();
    let mut source = error.source();
    while let Some(beneath) = source {
        reason.push_str(": ");
        reason.push_str(&beneath.to_string());
        source = beneath.source();
    }
    reason
}
