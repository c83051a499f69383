//! `halo key`: a new random API key for `server.key`.

use crate::env::Env;
use crate::output::{print_json, print_stdout};
use anyhow::Result;
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;

/// The random bytes of a key: too many to guess.
const KEY_BYTES: usize = 32;

pub fn run(env: &Env) -> Result<()> {
    let mut bytes = [0; KEY_BYTES];
    getrandom::fill(&mut bytes).map_err(|e| anyhow::anyhow!("the system has no random numbers: {e}"))?;
    let key = BASE64_URL_SAFE_NO_PAD.encode(bytes);
    match env.json {
        true => print_json(&serde_json::json!({ "key": key })),
        false => print_stdout(&format!("{key}\n")),
    }
}
