//! The page and the documentation: static files, embedded in the program.

use crate::app::App;
use axum::Router;
use axum::http::HeaderValue;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use rust_embed::{Embed, EmbeddedFile};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// The files of `web/`. A debug build reads them from the folder, so an edit of the page needs no build.
#[derive(Embed)]
#[folder = "../../web"]
#[include = "*.html"]
#[include = "*.css"]
#[include = "*.svg"]
#[include = "*.png"]
#[include = "*.webmanifest"]
#[include = "js/*.js"]
#[include = "vendor/*.js"]
#[include = "vendor/*.woff2"]
struct PageFiles;

/// The documentation, which `docs.html` shows.
#[derive(Embed)]
#[folder = "../../docs"]
#[include = "*.md"]
#[include = "*.svg"]
#[include = "*.webp"]
struct DocFiles;

/// Only files of this server, no inline scripts or styles, no framing.
const CSP: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; \
                      connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(crate) fn routes() -> Router<Arc<App>> {
    let mut router = Router::new();
    for path in PageFiles::iter() {
        let serve = {
            let path = path.clone();
            move |headers: HeaderMap| async move { serve_file(&path, PageFiles::get(&path), &headers) }
        };
        if path == "index.html" {
            router = router.route("/", get(serve.clone()));
        }
        router = router.route(&format!("/{path}"), get(serve));
    }
    for path in DocFiles::iter() {
        let address = format!("/docs/{path}");
        let serve =
            move |headers: HeaderMap| async move { serve_file(&path, DocFiles::get(&path), &headers) };
        router = router.route(&address, get(serve));
    }
    router.route("/docs", get(|| async { Redirect::temporary("/docs.html") }))
}

fn serve_file(path: &str, file: Option<EmbeddedFile>, headers: &HeaderMap) -> Response {
    let Some(file) = file else { return StatusCode::NOT_FOUND.into_response() };
    let content_type = match path.rsplit('.').next() {
        Some("html") => "text/html; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        Some("png") => "image/png",
        Some("webp") => "image/webp",
        Some("md") => "text/markdown; charset=utf-8",
        Some("webmanifest") => "application/manifest+json",
        Some("woff2") => "font/woff2",
        _ => "text/javascript; charset=utf-8",
    };
    let etag = format!("\"{:016x}\"", xxh3_64(&file.data));
    let cached = headers.get(IF_NONE_MATCH).is_some_and(|value| value.as_bytes() == etag.as_bytes());
    let mut response =
        if cached { StatusCode::NOT_MODIFIED.into_response() } else { file.data.into_response() };
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(CSP));
    if let Ok(etag) = HeaderValue::from_str(&etag) {
        headers.insert(ETAG, etag);
    }
    response
}
