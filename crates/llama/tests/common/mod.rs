//! What the tests on the real model have in common.
#![allow(dead_code, reason = "each test uses a part of it")]

use halo_core::seams::{Flow, Seen};
use halo_core::token::{Position, TokenId};
use halo_llama::attention::{Row, Rows, Want};
use halo_llama::ffi::{Context, Shape, Token, Weights};
use halo_llama::graveyard::{Graveyard, Room};
use halo_llama::key::keys;
use halo_llama::mirror::{Mirror, MirrorError, Mode, Ready, SEQUENCES};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

/// SmolLM2-135M-Instruct; `scripts/models` fetches it.
pub fn file() -> PathBuf {
    let named = std::env::var_os("HALO_TEST_MODEL").map(PathBuf::from);
    let fetched =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let path = named.unwrap_or(fetched);
    assert!(path.exists(), "{} is missing: `scripts/models` fetches it", path.display());
    path
}

/// The model, loaded once; on a graphics card as far as `HALO_TEST_GPU_LAYERS` says.
pub fn weights() -> Arc<Weights> {
    static WEIGHTS: LazyLock<Arc<Weights>> = LazyLock::new(|| {
        let layers = std::env::var("HALO_TEST_GPU_LAYERS").ok().and_then(|n| n.parse().ok());
        Arc::new(Weights::load(&file(), layers.unwrap_or(0)).expect("it loads"))
    });
    Arc::clone(&WEIGHTS)
}

/// A memory of so many tokens.
pub fn context(tokens: u32) -> Context {
    Context::new(&weights(), Shape { tokens, batch: 256, threads: 1, sequences: SEQUENCES })
        .expect("there is room")
}

/// A mirror that keeps its dead in memory.
pub fn mirror(tokens: u32) -> Mirror {
    let room = Room { ram: 1 << 30, disk: 0, folder: None };
    Mirror::new(context(tokens), Graveyard::open(room, 1), Mode::Keep)
}

/// A story of several paragraphs; each is a chunk.
pub const STORY: [&str; 7] = [
    "<|im_start|>system\nYou are a playwright.<|im_end|>\n",
    "<|im_start|>user\nThere is a gun on the wall above the fireplace, an old one, and nobody has touched it since the war.<|im_end|>\n",
    "<|im_start|>assistant\nA gun on the wall in the first act. Then it must be fired before the last one.<|im_end|>\n",
    "<|im_start|>user\nTell me about the weather on the day of the wedding, the guests and the old house by the sea.<|im_end|>\n",
    "<|im_start|>assistant\nIt rained from morning on. The guests came late and wet, and nobody spoke of the will.<|im_end|>\n",
    "<|im_start|>user\nAnd who is the man that waits in the hall?<|im_end|>\n",
    "<|im_start|>assistant\nHe is the brother",
];

/// Chunks as they stand on a timeline.
pub fn chunks(texts: &[&str]) -> Vec<Vec<Seen>> {
    let weights = weights();
    let mut position = 0;
    let chunk = |text: &&str| {
        let tokens = weights.tokenize(text, true);
        let seen = |(n, &token): (usize, &Token)| {
            let at = Position(position + n as u64);
            Seen { position: Some(at), behind: 0, id: TokenId(token.cast_unsigned()), begins: n == 0 }
        };
        let chunk: Vec<Seen> = tokens.iter().enumerate().map(seen).collect();
        position += chunk.len() as u64;
        chunk
    };
    texts.iter().map(chunk).collect()
}

/// What is wanted when every step is looked at.
pub fn looking() -> Want {
    Want { rows: Rows::Last, cells: true, ..Want::nothing() }
}

/// Follows a window and reads its end; returns what was done, what the last token looked at, and the guess.
pub fn guess(mirror: &mut Mirror, window: &[Seen]) -> Result<(Ready, Row, Vec<f32>), MirrorError> {
    let ready = mirror.follow("main", window, 1, &mut |_, _| Flow::Continue)?;
    let row = read(mirror, window, ready.from)?;
    Ok((ready, row, mirror.context().guess().to_vec()))
}

/// Reads the end of a window.
pub fn read(mirror: &mut Mirror, window: &[Seen], from: usize) -> Result<Row, MirrorError> {
    let names = keys(window).expect("in order");
    let tokens: Vec<_> =
        (from..window.len()).map(|n| (names[n], window[n].id.0.cast_signed(), window[n].begins)).collect();
    let mut row = Row::default();
    for part in tokens.chunks(256) {
        row = mirror.read(part, looking())?.pop().expect("a row");
    }
    Ok(row)
}
