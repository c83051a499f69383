//! The listening socket, its connections, and shutdown.

use crate::access_control::PeerIp;
use crate::app::App;
use crate::backend::ServerLimits;
use crate::client_address::is_trusted;
use crate::connection::{ConnectionCounter, ConnectionState, GuardedBody, HalfCloseStream, PacedBody};
use crate::forgetting_loop::spawn_forgetting_loop;
use crate::router::routes;
use crate::tls::TlsConfig;
use axum::Router;
use halo_core::Error;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};

pub struct ListenOptions {
    /// Port 0 takes any free port.
    pub address: SocketAddr,
    pub tls: Option<TlsConfig>,
    /// Called with the address once the socket listens.
    pub on_ready: Box<dyn FnOnce(SocketAddr) + Send>,
}

/// How long the TLS handshake and the request headers may take.
const HEADER_TIMEOUT: Duration = Duration::from_secs(20);

/// The one response that never ends.
const EVENTS_PATH: &str = "/api/halo/v1/events";

/// How long open connections may take to finish on shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// Serves until a shutdown signal; then running answers are stopped and stored.
pub fn serve(app: &Arc<App>, options: ListenOptions) -> Result<(), Error> {
    let failed = |e: std::io::Error| {
        let message = match e.kind() {
            std::io::ErrorKind::AddrInUse => {
                "the address is in use; stop the other program, or set server.listen to another port".into()
            }
            std::io::ErrorKind::PermissionDenied => {
                "permission denied; choose a port of 1024 or above".into()
            }
            _ => e.to_string(),
        };
        Error::unavailable(format!("listening on {}", options.address), message)
    };
    // One worker is enough for I/O: all long work runs on other threads, and the model needs the processors.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(failed)?;
    let listener = runtime.block_on(TcpListener::bind(options.address)).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    (options.on_ready)(bound);
    let router = routes(app);
    spawn_forgetting_loop(app);
    runtime.block_on(async {
        let (shutdown, stopped) = watch::channel(false);
        tokio::select! {
            () = accept_connections(&listener, options.tls.as_ref(), &router, &app.limits, &stopped) => {}
            () = shutdown_signal() => {}
        }
        drop(listener);
        // Running answers are stored first; then the clients get the rest of their responses.
        let closing = Arc::clone(app);
        let closed = tokio::task::spawn_blocking(move || closing.shutdown());
        // A conversation may wait for a model that is being loaded. What was acknowledged is stored already.
        tokio::select! {
            _ = closed => {}
            () = shutdown_signal() => tracing::warn!("a second signal: the server ends without waiting for running answers"),
        }
        let _ = shutdown.send(true);
        let _ = timeout(SHUTDOWN_TIMEOUT, async {
            while shutdown.receiver_count() > 1 {
                sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

async fn accept_connections(
    listener: &TcpListener,
    tls: Option<&TlsConfig>,
    router: &Router,
    limits: &ServerLimits,
    stopped: &watch::Receiver<bool>,
) {
    let slots = Arc::new(Semaphore::new(limits.max_connections));
    let counter = ConnectionCounter::new(limits.max_connections_per_address);
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, peer)) => {
                let is_proxy = is_trusted(peer.ip(), &limits.trusted_proxies);
                let own_slot = counter.open(peer.ip());
                if own_slot.is_none() && !is_proxy {
                    refuse_connection(&stream, peer, tls.is_some());
                    continue;
                }
                let (router, stopped, tls) = (router.clone(), stopped.clone(), tls.cloned());
                let body_grace = limits.body_grace;
                let context = ConnectionContext { peer, router, body_grace, stopped };
                tokio::spawn(async move {
                    let _ = stream.set_nodelay(true);
                    match tls {
                        None => serve_connection(stream, context).await,
                        Some(TlsConfig(acceptor)) => {
                            match timeout(HEADER_TIMEOUT, acceptor.accept(stream)).await {
                                Ok(Ok(stream)) => serve_connection(stream, context).await,
                                Ok(Err(e)) => tracing::debug!("TLS handshake with {peer} failed: {e}"),
                                Err(_) => tracing::debug!("TLS handshake with {peer} timed out"),
                            }
                        }
                    }
                    drop((slot, own_slot));
                });
            }
            // Mostly too many open files, which is temporary.
            Err(e) => {
                tracing::warn!("accepting a connection failed: {e}");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Tells a client that it has too many connections, if that can be done at once.
fn refuse_connection(stream: &TcpStream, peer: SocketAddr, tls: bool) {
    tracing::debug!("refused a connection from {peer}: it has too many");
    if !tls {
        let body = r#"{"error":"too many connections from this address: close some, or try again later"}"#;
        let head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close";
        let _ =
            stream.try_write(format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).as_bytes());
    }
}

/// What a connection is served with.
struct ConnectionContext {
    peer: SocketAddr,
    router: Router,
    body_grace: Duration,
    stopped: watch::Receiver<bool>,
}

async fn serve_connection(stream: impl AsyncRead + AsyncWrite + Unpin, context: ConnectionContext) {
    let ConnectionContext { peer, router, body_grace, mut stopped } = context;
    let state = ConnectionState::new();
    let stream = HalfCloseStream::new(stream, Arc::clone(&state));
    let service = hyper::service::service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(PeerIp(peer.ip()));
        let (router, guard) = (router.clone(), state.begin_request());
        let is_finite = request.uri().path() != EVENTS_PATH;
        let paced = |body| PacedBody::new(body, Arc::clone(&state), body_grace);
        let request = request.map(|body| axum::body::Body::new(paced(body)));
        async move {
            let response = tower::ServiceExt::oneshot(router, request).await?;
            guard.begin_response(is_finite);
            Ok::<_, Infallible>(response.map(|body| GuardedBody::new(body, guard)))
        }
    });
    let mut connection = std::pin::pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .serve_connection(TokioIo::new(stream), service)
    );
    tokio::select! {
        done = connection.as_mut() => {
            if let Err(e) = done {
                tracing::debug!("connection from {peer} ended early: {e}");
            }
        }
        () = async { drop(stopped.wait_for(|stopped| *stopped).await) } => {
            connection.as_mut().graceful_shutdown();
            let _ = timeout(SHUTDOWN_TIMEOUT, connection).await;
        }
    }
}

/// Waits for SIGTERM or Ctrl-C.
async fn shutdown_signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut term) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = term.recv() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}
