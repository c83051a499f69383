//! The socket: connections come in, and end when the program does.

use crate::access_control::PeerIp;
use crate::app::App;
use crate::routes;
use crate::tls::TlsConfig;
use axum::Router;
use halo_core::Error;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};

/// Where to listen, and what to tell when it does.
pub struct ListenOptions {
    /// The address; port 0 takes any that is free.
    pub address: SocketAddr,
    /// How to speak so that nobody else understands it.
    pub tls: Option<TlsConfig>,
    /// Hears where it really listens.
    pub on_ready: Box<dyn FnOnce(SocketAddr) + Send>,
}

/// How long a client may take to say what it wants.
const HEADER_TIMEOUT: Duration = Duration::from_secs(20);

/// How long those who are being answered may take to hear the end of it.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// How many connections there may be.
const MAX_CONNECTIONS: usize = 2048;

/// Serves until the program is told to end; then the answers that are being given end, and are stored.
pub fn serve(app: &Arc<App>, address: ListenOptions) -> Result<(), Error> {
    let failed = |e: std::io::Error| {
        let why = match e.kind() {
            std::io::ErrorKind::AddrInUse => {
                "another program listens there: stop it, or choose a port with --listen".into()
            }
            std::io::ErrorKind::PermissionDenied => {
                "that port needs rights that you do not have: choose one from 1024 on".into()
            }
            _ => e.to_string(),
        };
        Error::unavailable(format!("listening on {}", address.address), why)
    };
    // One thread is enough to pass things on: whatever takes long is done elsewhere, and the model wants the processors.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(failed)?;
    let listener = runtime.block_on(TcpListener::bind(address.address)).map_err(failed)?;
    let here = listener.local_addr().map_err(failed)?;
    (address.on_ready)(here);
    let router = routes(app);
    runtime.block_on(async {
        let (end, ended) = watch::channel(false);
        tokio::select! {
            () = accept_connections(&listener, address.tls.as_ref(), &router, &ended) => {}
            () = shutdown_signal() => {}
        }
        drop(listener);
        // Whoever asked hears the end of their answer, and what was said is stored before anything else.
        let closing = Arc::clone(app);
        let closed = tokio::task::spawn_blocking(move || closing.shutdown());
        let _ = closed.await;
        let _ = end.send(true);
        let _ = timeout(SHUTDOWN_TIMEOUT, async {
            while end.receiver_count() > 1 {
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
    ended: &watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, peer)) => {
                let (router, ended, tls) = (router.clone(), ended.clone(), tls.cloned());
                tokio::spawn(async move {
                    let _ = stream.set_nodelay(true);
                    match tls {
                        None => serve_connection(stream, peer, router, ended).await,
                        Some(TlsConfig(acceptor)) => {
                            match timeout(HEADER_TIMEOUT, acceptor.accept(stream)).await {
                                Ok(Ok(stream)) => serve_connection(stream, peer, router, ended).await,
                                Ok(Err(why)) => tracing::debug!("{peer} speaks no TLS: {why}"),
                                Err(_) => tracing::debug!("{peer} said nothing"),
                            }
                        }
                    }
                    drop(place);
                });
            }
            // Mostly too many open files: it passes.
            Err(why) => {
                tracing::warn!("a connection could not be taken: {why}");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    peer: SocketAddr,
    router: Router,
    mut ended: watch::Receiver<bool>,
) {
    let service = hyper::service::service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(PeerIp(peer.ip()));
        let router = router.clone();
        async move { tower::ServiceExt::oneshot(router, request).await }
    });
    let mut connection = std::pin::pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .serve_connection(TokioIo::new(stream), service)
    );
    tokio::select! {
        done = connection.as_mut() => {
            if let Err(why) = done {
                tracing::debug!("a connection ended early: {why}");
            }
        }
        () = async { drop(ended.wait_for(|ended| *ended).await) } => {
            connection.as_mut().graceful_shutdown();
            let _ = timeout(SHUTDOWN_TIMEOUT, connection).await;
        }
    }
}

/// Ctrl-C, or whatever else ends programs here.
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
