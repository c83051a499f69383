//! Attention rows of the KoboldCPP fork, decoded and validated.

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use halo_core::attention::{AttentionRequest, LayerReduction};
use halo_core::model::AttentionRow;
use serde_json::Value;

const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);
/// One, with a tolerance for rounding.
const MAX_PROBABILITY: f32 = 1.001;
/// The largest sum of a row. A smaller sum is valid: some models attend partly to a sink that has no slot.
const MAX_ROW_SUM: f32 = 1.01;

/// The owned form of an [`AttentionRow`].
#[derive(Debug, PartialEq)]
pub(crate) struct DecodedAttention {
    pub mean: Vec<f32>,
    pub max: Vec<f32>,
    pub per_head: Vec<f32>,
}

impl DecodedAttention {
    pub fn as_row(&self) -> AttentionRow<'_> {
        AttentionRow { mean: &self.mean, max: &self.max, per_head: &self.per_head, probability: None }
    }
}

/// Decodes the attention of a decode step over `slots` tokens. A longer row is padded with zeros, except for the slots
/// of up to `hidden` tokens that the server may have generated without reporting them. The error says what is wrong.
pub(crate) fn decode_attention(
    value: &Value,
    slots: usize,
    hidden: usize,
    watch: &AttentionRequest,
) -> Result<DecodedAttention, String> {
    let field = |name: &str| value.get(name).and_then(Value::as_str);
    if !value.is_object() {
        return Err("it is not an object".into());
    }
    for (name, expected) in [("encoding", "base64"), ("dtype", "float32")] {
        if let Some(other) = value.get(name).filter(|v| v.as_str() != Some(expected)) {
            return Err(format!("its {name} is {other}, not {expected}"));
        }
    }
    let data = field("data").ok_or("it has no data")?;
    let bytes = BASE64.decode(data).map_err(|e| format!("its data is not base64 ({e})"))?;
    let (quads, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(format!("its data has {} bytes, which is not a multiple of 4", bytes.len()));
    }
    let values: Vec<f32> = quads.iter().map(|quad| f32::from_le_bytes(*quad)).collect();
    let aggregated = field("format") == Some("aggregated");
    let [layers, heads, n] = parse_shape(value.get("shape"), aggregated, values.len())?;
    if n < slots || slots == 0 {
        return Err(format!("it covers {n} slots, but the window has {slots}"));
    }
    for row in values.chunks_exact(n) {
        check_row(row, slots, hidden)?;
    }
    let head = |layer: usize, head: usize| &values[(layer * heads + head) * n..][..slots];
    let rows = reduce_layers(layers, heads, &head, slots, watch)?;
    let sum: f32 = rows.mean.iter().sum();
    if sum <= 0.0 || (sum > MAX_ROW_SUM && watch.layers != LayerReduction::Max) {
        return Err(format!("it sums to {sum}, which is not above 0 and at most 1"));
    }
    let (max, per_head) = match (aggregated, watch.per_head) {
        // An aggregated row has no heads.
        (true, _) => (Vec::new(), Vec::new()),
        (false, false) => (rows.max, Vec::new()),
        (false, true) => {
            (rows.max, (0..layers * heads).flat_map(|i| head(i / heads, i % heads)).copied().collect())
        }
    };
    Ok(DecodedAttention { mean: rows.mean, max, per_head })
}

/// The numbers of layers, heads and slots. An aggregated row counts as one layer with one head.
fn parse_shape(shape: Option<&Value>, aggregated: bool, values: usize) -> Result<[usize; 3], String> {
    let dimensions = match shape {
        None | Some(Value::Null) if aggregated => return Ok([1, 1, values]),
        Some(Value::Array(dimensions)) => dimensions,
        _ => return Err("it has no shape".into()),
    };
    let dimensions: Vec<usize> =
        dimensions.iter().filter_map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok())).collect();
    let shape = match (aggregated, dimensions.as_slice()) {
        (true, &[n]) => [1, 1, n],
        (false, &[layers, heads, n]) => [layers, heads, n],
        _ => return Err(format!("its shape {dimensions:?} does not match its format")),
    };
    let product = shape.iter().try_fold(1usize, |product, n| product.checked_mul(*n));
    if product != Some(values) || values == 0 {
        return Err(format!("its shape is {dimensions:?}, but it has {values} values"));
    }
    Ok(shape)
}

fn check_row(row: &[f32], slots: usize, hidden: usize) -> Result<(), String> {
    if let Some(slot) = row.iter().position(|a| !(0.0..=MAX_PROBABILITY).contains(a)) {
        return Err(format!("at slot {slot} it is {}, which is not a probability", row[slot]));
    }
    match row.iter().skip(slots + hidden).position(|&a| a != 0.0) {
        Some(_) => Err(format!("the window has {slots} tokens, and the values after them are not zero")),
        None => Ok(()),
    }
}

/// Reduces heads and layers to one row, as the local model does: `mean` is the mean over all heads; `max` is the largest
/// head of each layer, averaged over the layers. With [`LayerReduction::Max`] both are the largest value of all.
fn reduce_layers<'a>(
    layers: usize,
    heads: usize,
    head: &dyn Fn(usize, usize) -> &'a [f32],
    slots: usize,
    watch: &AttentionRequest,
) -> Result<DecodedAttention, String> {
    let chosen: Vec<usize> = match &watch.layers {
        _ if layers == 1 => vec![0],
        LayerReduction::Mean | LayerReduction::Max => (0..layers).collect(),
        LayerReduction::Last => vec![layers - 1],
        LayerReduction::Selected(layers) => layers.clone(),
    };
    if chosen.is_empty() || chosen.iter().any(|&layer| layer >= layers) {
        return Err(format!("layers {chosen:?} are selected, but it has {layers}"));
    }
    let reduce_by_max = watch.layers == LayerReduction::Max;
    let mut mean = vec![0.0f32; slots];
    let mut max = vec![0.0f32; if watch.max { slots } else { 0 }];
    let mut largest = vec![0.0f32; slots];
    for &layer in &chosen {
        largest.fill(0.0);
        for h in 0..heads {
            let row = head(layer, h);
            max_into(&mut largest, row);
            if !reduce_by_max {
                mean.iter_mut().zip(row).for_each(|(sum, a)| *sum += a);
            }
        }
        if reduce_by_max {
            max_into(&mut mean, &largest);
            max_into(&mut max, &largest);
        } else {
            max.iter_mut().zip(&largest).for_each(|(sum, a)| *sum += a);
        }
    }
    if !reduce_by_max {
        let rows = (chosen.len() * heads) as f32;
        mean.iter_mut().for_each(|a| *a /= rows);
        max.iter_mut().for_each(|a| *a /= chosen.len() as f32);
    }
    Ok(DecodedAttention { mean, max, per_head: Vec::new() })
}

fn max_into(max: &mut [f32], row: &[f32]) {
    max.iter_mut().zip(row).for_each(|(max, a)| *max = max.max(*a));
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn encode(values: &[f32]) -> String {
        BASE64.encode(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
    }

    /// Two layers of two heads over three slots and one of padding.
    fn per_layer_sample() -> Value {
        let rows = [0.5, 0.25, 0.25, 0., 1., 0., 0., 0., 0., 0.5, 0.5, 0., 0., 0., 1., 0.];
        json!({"format": "per_layer", "shape": [2, 2, 4], "data": encode(&rows)})
    }

    #[test]
    fn attention_reduces_layers_as_requested() {
        let cases: [(LayerReduction, [f32; 3], [f32; 3]); 4] = [
            (LayerReduction::Mean, [0.375, 0.1875, 0.4375], [0.5, 0.375, 0.625]),
            (LayerReduction::Last, [0., 0.25, 0.75], [0., 0.5, 1.]),
            (LayerReduction::Selected(vec![0]), [0.75, 0.125, 0.125], [1., 0.25, 0.25]),
            (LayerReduction::Max, [1., 0.5, 1.], [1., 0.5, 1.]),
        ];
        for (layers, mean, max) in cases {
            let watch = AttentionRequest {
                layers: layers.clone(),
                max: true,
                per_head: true,
                ..AttentionRequest::default()
            };
            let rows = decode_attention(&per_layer_sample(), 3, 0, &watch).unwrap();
            assert_eq!((rows.mean.as_slice(), rows.max.as_slice()), (&mean[..], &max[..]), "{layers:?}");
            assert_eq!(rows.per_head, [0.5, 0.25, 0.25, 1., 0., 0., 0., 0.5, 0.5, 0., 0., 1.], "{layers:?}");
        }
        let plain = decode_attention(&per_layer_sample(), 3, 0, &AttentionRequest::default()).unwrap();
        assert!(plain.max.is_empty() && plain.per_head.is_empty(), "only the requested values are computed");
        let missing =
            AttentionRequest { layers: LayerReduction::Selected(vec![2]), ..AttentionRequest::default() };
        assert!(decode_attention(&per_layer_sample(), 3, 0, &missing).unwrap_err().contains("[2]"));
    }

    #[test]
    fn attention_tail_must_be_padding_or_hidden_tokens() {
        let row = json!({"format": "aggregated", "data": encode(&[0.5, 0.25, 0.25, 0.])});
        assert_eq!(
            decode_attention(&row, 3, 0, &AttentionRequest::default()).unwrap().mean,
            [0.5, 0.25, 0.25]
        );
        assert!(decode_attention(&row, 2, 0, &AttentionRequest::default()).unwrap_err().contains("not zero"));
        assert_eq!(decode_attention(&row, 2, 1, &AttentionRequest::default()).unwrap().mean, [0.5, 0.25]);
        assert!(decode_attention(&row, 5, 0, &AttentionRequest::default()).unwrap_err().contains("covers 4"));
        assert!(decode_attention(&row, 0, 0, &AttentionRequest::default()).is_err());
    }
}
