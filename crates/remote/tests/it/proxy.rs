//! Proxies of the environment.

use crate::stub::StubServer;
use halo_core::model::Model;
use halo_remote::{RemoteModel, RemoteOptions};
use serde_json::json;
use std::process::Command;

/// A running program cannot change its environment, so the test runs itself as a child process.
#[test]
fn proxy_from_env_is_used_except_for_loopback() {
    let models = json!({"data": [{"id": "m", "context_length": 1000}]});
    let connect = |address: &str| RemoteModel::connect(address, &RemoteOptions::default());
    if let Ok(port) = std::env::var("HALO_TEST_DIRECT_PORT") {
        assert_eq!(connect("openai+http://models.invalid/v1#m").unwrap().info().context, 1000);
        assert_eq!(connect(&format!("openai+http://127.0.0.1:{port}/v1#m")).unwrap().info().context, 1000);
        let error = connect("openai+https://models.invalid/v1#m").unwrap_err().to_string();
        assert!(error.contains("no connection"), "{error}");
        return;
    }
    let direct = {
        let models = models.clone();
        StubServer::new(move |_, reply| reply.json(&models))
    };
    let proxy = StubServer::new(move |request, reply| match request.path.as_str() {
        "http://models.invalid/v1/models" => reply.json(&models),
        _ => reply.respond("403 Forbidden", "", ""),
    });
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "proxy::proxy_from_env_is_used_except_for_loopback"])
        .env("HALO_TEST_DIRECT_PORT", direct.port.to_string())
        .env("HTTP_PROXY", format!("http://127.0.0.1:{}", proxy.port))
        .env("HTTPS_PROXY", format!("http://127.0.0.1:{}", proxy.port))
        .env_remove("NO_PROXY")
        .env_remove("no_proxy")
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    assert_eq!(direct.requests("/v1/models").len(), 1);
    assert_eq!(proxy.requests("http://models.invalid/v1/models").len(), 1);
    assert!(!proxy.requests("models.invalid:443").is_empty(), "https goes through a CONNECT tunnel");
}
