//! The attention of a token in the events of a stream.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use halo_core::model::AttentionRow;
use serde::Deserialize;
use serde_json::{Value, json};

/// How the attention of a token is sent.
#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum AttentionFormat {
    /// One row: the mean over all layers and heads.
    #[default]
    Aggregated,
    /// The row of every head of every layer.
    PerLayer,
}

/// The attention of a token. A model without the rows of its heads is sent in the aggregated format, which every client reads.
pub(super) fn attention_json(row: AttentionRow<'_>, format: AttentionFormat, layers: usize) -> Value {
    let context_length = row.mean.len();
    let heads = row.per_head.len() / (context_length * layers).max(1);
    let has_heads = heads > 0 && heads * layers * context_length == row.per_head.len();
    let (format, shape, values) = match format {
        AttentionFormat::PerLayer if has_heads => {
            ("per_layer", vec![layers, heads, context_length], row.per_head)
        }
        _ => ("aggregated", vec![context_length], row.mean),
    };
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    json!({
        "format": format,
        "shape": shape,
        "context_length": context_length,
        "encoding": "base64",
        "dtype": "float32",
        "data": BASE64_STANDARD.encode(bytes),
    })
}
