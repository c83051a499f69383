//! One connection: how many of them an address may have, how slowly a request may arrive, and when its client counts as
//! gone.

use crate::client_address::client_network;
use axum::BoxError;
use axum::body::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// Counts the connections of each client.
pub(crate) struct ConnectionCounter {
    max_per_client: usize,
    by_client: Mutex<HashMap<IpAddr, usize>>,
}

/// The place of an open connection among those of its client.
pub(crate) struct ConnectionSlot {
    counter: Arc<ConnectionCounter>,
    client: IpAddr,
}

impl ConnectionCounter {
    pub fn new(max_per_client: usize) -> Arc<Self> {
        Arc::new(Self { max_per_client, by_client: Mutex::default() })
    }

    /// A place for another connection; none if the client has too many.
    pub fn open(self: &Arc<Self>, address: IpAddr) -> Option<ConnectionSlot> {
        let client = client_network(address);
        let mut by_client = self.by_client.lock();
        let count = by_client.entry(client).or_default();
        if *count >= self.max_per_client {
            return None;
        }
        *count += 1;
        Some(ConnectionSlot { counter: Arc::clone(self), client })
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut by_client = self.counter.by_client.lock();
        if let Some(count) = by_client.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                by_client.remove(&self.client);
            }
        }
    }
}

/// How soon after its request a client that sends no more counts as half-closed, and not as gone. The two look the same
/// until something is written; programs that half-close do it with their request.
const HALF_CLOSE_WINDOW: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, PartialEq, Eq)]
enum RequestPhase {
    /// No request is being processed.
    Idle,
    /// The response has not begun.
    Waiting,
    /// The response is being sent. If `finite`, a client that is gone is noticed by the next writes.
    Responding { finite: bool },
}

/// What a connection does now.
pub(crate) struct ConnectionState(Mutex<ConnectionProgress>);

struct ConnectionProgress {
    phase: RequestPhase,
    /// When the last part of the request arrived.
    last_received: Instant,
    half_closed: bool,
    /// Waits for the end of the response, to read on.
    reader: Option<Waker>,
}

/// Marks a request as being processed, until its response is sent or dropped.
pub(crate) struct RequestGuard(Arc<ConnectionState>);

impl ConnectionState {
    pub fn new() -> Arc<Self> {
        let last_received = Instant::now();
        Arc::new(Self(Mutex::new(ConnectionProgress {
            phase: RequestPhase::Idle,
            last_received,
            half_closed: false,
            reader: None,
        })))
    }

    pub fn begin_request(self: &Arc<Self>) -> RequestGuard {
        let mut progress = self.0.lock();
        (progress.phase, progress.last_received) = (RequestPhase::Waiting, Instant::now());
        RequestGuard(Arc::clone(self))
    }

    fn record_received(&self) {
        self.0.lock().last_received = Instant::now();
    }

    /// Whether a client that sends no more gets its response all the same. Then the reader is woken at its end.
    fn is_half_closed(&self, reader: &Waker) -> bool {
        let mut progress = self.0.lock();
        let ends_with_request = progress.last_received.elapsed() < HALF_CLOSE_WINDOW;
        match progress.phase {
            RequestPhase::Idle => return false,
            RequestPhase::Waiting => progress.half_closed |= ends_with_request,
            RequestPhase::Responding { finite } => progress.half_closed |= finite,
        }
        progress.reader = progress.half_closed.then(|| reader.clone());
        progress.half_closed
    }
}

impl RequestGuard {
    /// The response begins; if it is not `finite`, it goes on until the client leaves.
    pub fn begin_response(&self, finite: bool) {
        self.0.0.lock().phase = RequestPhase::Responding { finite };
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        let mut progress = self.0.0.lock();
        progress.phase = RequestPhase::Idle;
        if let Some(reader) = progress.reader.take() {
            reader.wake();
        }
    }
}

/// A connection that hides the end of the client's data while the client may still read. hyper would take it for a
/// disconnect and drop the response.
pub(crate) struct HalfCloseStream<S> {
    stream: S,
    state: Arc<ConnectionState>,
}

impl<S> HalfCloseStream<S> {
    pub fn new(stream: S, state: Arc<ConnectionState>) -> Self {
        Self { stream, state }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for HalfCloseStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = std::task::ready!(Pin::new(&mut self.stream).poll_read(cx, buf));
        let is_end = result.is_ok() && buf.filled().len() == before && buf.remaining() > 0;
        if is_end && self.state.is_half_closed(cx.waker()) { Poll::Pending } else { Poll::Ready(result) }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for HalfCloseStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// The lowest rate at which a body may arrive, in bytes per second.
const MIN_BODY_RATE: u64 = 4096;

/// The body of a request; it fails if it arrives too slowly, so that a slow client cannot hold a connection for long.
pub(crate) struct PacedBody {
    body: Incoming,
    state: Arc<ConnectionState>,
    /// How long it may take beyond the time that [`MIN_BODY_RATE`] gives it.
    grace: Duration,
    started: Option<Instant>,
    received: u64,
    timer: Option<Pin<Box<Sleep>>>,
}

/// The body of a request arrived too slowly.
#[derive(Debug)]
pub(crate) struct SlowBodyError;

impl fmt::Display for SlowBodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request body did not arrive in time")
    }
}

impl std::error::Error for SlowBodyError {}

impl PacedBody {
    pub fn new(body: Incoming, state: Arc<ConnectionState>, grace: Duration) -> Self {
        Self { body, state, grace, started: None, received: 0, timer: None }
    }

    /// How long the body may take, by what has arrived of it.
    fn allowed_time(&self) -> Duration {
        self.grace + Duration::from_secs(self.received / MIN_BODY_RATE)
    }
}

impl Body for PacedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let started = *self.started.get_or_insert_with(Instant::now);
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            self.state.record_received();
            if let Some(Ok(frame)) = &frame {
                self.received += frame.data_ref().map_or(0, |data| data.len() as u64);
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(BoxError::from)));
        }
        let deadline = tokio::time::Instant::from_std(started + self.allowed_time());
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        if timer.deadline() != deadline {
            timer.as_mut().reset(deadline);
        }
        timer.as_mut().poll(cx).map(|()| Some(Err(Box::new(SlowBodyError) as BoxError)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of a response, which ends its request when it is dropped.
pub(crate) struct GuardedBody {
    body: axum::body::Body,
    _guard: RequestGuard,
}

impl GuardedBody {
    pub fn new(body: axum::body::Body, guard: RequestGuard) -> Self {
        Self { body, _guard: guard }
    }
}

impl Body for GuardedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_counted_by_client() {
        let counter = ConnectionCounter::new(2);
        let (one, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let (first, second) = (counter.open(one), counter.open(one));
        assert!(first.is_some() && second.is_some());
        assert!(counter.open(one).is_none(), "the client has too many");
        assert!(counter.open(other).is_some(), "another client has its own");
        drop(first);
        assert!(counter.open(one).is_some(), "a connection was closed");
        drop(second);
        assert!(counter.by_client.lock().is_empty());
    }

    #[test]
    fn half_close_is_told_from_disconnect_by_its_time() {
        let state = ConnectionState::new();
        assert!(
            !state.is_half_closed(Waker::noop()),
            "between requests the client has closed the connection"
        );
        let guard = state.begin_request();
        let progress = |change: fn(&mut ConnectionProgress)| change(&mut state.0.lock());
        progress(|p| p.last_received = Instant::now().checked_sub(HALF_CLOSE_WINDOW).expect("a while ago"));
        assert!(!state.is_half_closed(Waker::noop()), "long after the request, the client is gone");
        state.record_received();
        assert!(state.is_half_closed(Waker::noop()), "with the end of the request");
        progress(|p| p.last_received = Instant::now().checked_sub(HALF_CLOSE_WINDOW).expect("a while ago"));
        assert!(state.is_half_closed(Waker::noop()), "and from then on");
        drop(guard);
        assert!(!state.is_half_closed(Waker::noop()), "the response is sent");
        let state = ConnectionState::new();
        let guard = state.begin_request();
        guard.begin_response(false);
        assert!(!state.is_half_closed(Waker::noop()), "an endless response ends when the client leaves");
        guard.begin_response(true);
        assert!(state.is_half_closed(Waker::noop()));
    }
}
