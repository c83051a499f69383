//! Attention as it comes over the wire, checked before anyone relies on it.

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use halo_core::attention::{Layers, Watch};
use halo_core::seams::Look;
use serde_json::Value;

const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);
/// One, and room for rounding.
const CERTAIN: f32 = 1.001;
/// What a row may sum to. Less is well: some models give part of theirs to a sink that has no slot.
const WHOLE: f32 = 1.01;

/// One step's attention, by slot.
#[derive(Debug, PartialEq)]
pub(crate) struct Rows {
    pub mean: Vec<f32>,
    pub max: Vec<f32>,
    pub full: Vec<f32>,
}

impl Rows {
    pub fn look(&self) -> Look<'_> {
        Look { mean: &self.mean, max: &self.max, full: &self.full }
    }
}

/// Reads the attention of a pass that saw `slots` tokens. What is longer is padding, and must then be zero, but for the
/// `hidden` tokens that a server may have made without naming them. Says what is wrong with it, otherwise.
pub(crate) fn decode(value: &Value, slots: usize, hidden: usize, watch: &Watch) -> Result<Rows, String> {
    let field = |name: &str| value.get(name).and_then(Value::as_str);
    if !value.is_object() {
        return Err("it is no object".into());
    }
    for (name, expected) in [("encoding", "base64"), ("dtype", "float32")] {
        if let Some(other) = value.get(name).filter(|v| v.as_str() != Some(expected)) {
            return Err(format!("its {name} is {other}, not {expected}"));
        }
    }
    let data = field("data").ok_or("it has no data")?;
    let bytes = BASE64.decode(data).map_err(|e| format!("its data is no base64 ({e})"))?;
    let (quads, over) = bytes.as_chunks::<4>();
    if !over.is_empty() {
        return Err(format!("its data has {} bytes, which is no multiple of 4", bytes.len()));
    }
    let values: Vec<f32> = quads.iter().map(|quad| f32::from_le_bytes(*quad)).collect();
    let aggregated = field("format") == Some("aggregated");
    let [layers, heads, n] = shape(value.get("shape"), aggregated, values.len())?;
    if n < slots || slots == 0 {
        return Err(format!("it covers {n} slots, but the pass saw {slots}"));
    }
    for row in values.chunks_exact(n) {
        check(row, slots, hidden)?;
    }
    let head = |layer: usize, head: usize| &values[(layer * heads + head) * n..][..slots];
    let rows = merge(layers, heads, &head, slots, watch)?;
    let sum: f32 = rows.mean.iter().sum();
    if sum <= 0.0 || (sum > WHOLE && watch.layers != Layers::Max) {
        return Err(format!("it sums to {sum}, so it is no share of anything"));
    }
    let (max, full) = match (aggregated, watch.full) {
        // What has been made one already has no heads to tell apart.
        (true, _) => (Vec::new(), Vec::new()),
        (false, false) => (rows.max, Vec::new()),
        (false, true) => {
            (rows.max, (0..layers * heads).flat_map(|i| head(i / heads, i % heads)).copied().collect())
        }
    };
    Ok(Rows { mean: rows.mean, max, full })
}

/// Layers, heads and slots. What is aggregated is one layer of one head.
fn shape(shape: Option<&Value>, aggregated: bool, values: usize) -> Result<[usize; 3], String> {
    let given = match shape {
        None | Some(Value::Null) if aggregated => return Ok([1, 1, values]),
        Some(Value::Array(given)) => given,
        _ => return Err("it has no shape".into()),
    };
    let given: Vec<usize> =
        given.iter().filter_map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok())).collect();
    let whole = match (aggregated, given.as_slice()) {
        (true, &[n]) => [1, 1, n],
        (false, &[layers, heads, n]) => [layers, heads, n],
        _ => return Err(format!("its shape {given:?} is not of its format")),
    };
    let product = whole.iter().try_fold(1usize, |product, n| product.checked_mul(*n));
    if product != Some(values) || values == 0 {
        return Err(format!("its shape is {given:?}, but it has {values} values"));
    }
    Ok(whole)
}

fn check(row: &[f32], slots: usize, hidden: usize) -> Result<(), String> {
    if let Some(slot) = row.iter().position(|a| !(0.0..=CERTAIN).contains(a)) {
        return Err(format!("at slot {slot} it is {}, which is no probability", row[slot]));
    }
    match row.iter().skip(slots + hidden).position(|&a| a != 0.0) {
        Some(_) => Err(format!("the pass saw {slots} tokens, and what lies behind them is no padding")),
        None => Ok(()),
    }
}

/// Makes heads and layers one, as the model in this process does: the mean of all heads; of the largest heads the mean
/// over layers; the largest of everything where layers are made one by that.
fn merge<'a>(
    layers: usize,
    heads: usize,
    head: &dyn Fn(usize, usize) -> &'a [f32],
    slots: usize,
    watch: &Watch,
) -> Result<Rows, String> {
    let chosen: Vec<usize> = match &watch.layers {
        _ if layers == 1 => vec![0],
        Layers::Mean | Layers::Max => (0..layers).collect(),
        Layers::Last => vec![layers - 1],
        Layers::These(these) => these.clone(),
    };
    if chosen.is_empty() || chosen.iter().any(|&layer| layer >= layers) {
        return Err(format!("layers {chosen:?} are wanted, but it has {layers}"));
    }
    let largest_of_all = watch.layers == Layers::Max;
    let mut mean = vec![0.0f32; slots];
    let mut max = vec![0.0f32; if watch.max { slots } else { 0 }];
    let mut largest = vec![0.0f32; slots];
    for &layer in &chosen {
        largest.fill(0.0);
        for h in 0..heads {
            let row = head(layer, h);
            raise(&mut largest, row);
            if !largest_of_all {
                mean.iter_mut().zip(row).for_each(|(sum, a)| *sum += a);
            }
        }
        if largest_of_all {
            raise(&mut mean, &largest);
            raise(&mut max, &largest);
        } else {
            max.iter_mut().zip(&largest).for_each(|(sum, a)| *sum += a);
        }
    }
    if !largest_of_all {
        let rows = (chosen.len() * heads) as f32;
        mean.iter_mut().for_each(|a| *a /= rows);
        max.iter_mut().for_each(|a| *a /= chosen.len() as f32);
    }
    Ok(Rows { mean, max, full: Vec::new() })
}

fn raise(most: &mut [f32], row: &[f32]) {
    most.iter_mut().zip(row).for_each(|(most, a)| *most = most.max(*a));
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn encode(values: &[f32]) -> String {
        BASE64.encode(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
    }

    /// Two layers of two heads over three slots and one of padding.
    fn layered() -> Value {
        let rows = [0.5, 0.25, 0.25, 0., 1., 0., 0., 0., 0., 0.5, 0.5, 0., 0., 0., 1., 0.];
        json!({"format": "per_layer", "shape": [2, 2, 4], "data": encode(&rows)})
    }

    #[test]
    fn layers_are_made_one_as_was_asked() {
        let cases: [(Layers, [f32; 3], [f32; 3]); 4] = [
            (Layers::Mean, [0.375, 0.1875, 0.4375], [0.5, 0.375, 0.625]),
            (Layers::Last, [0., 0.25, 0.75], [0., 0.5, 1.]),
            (Layers::These(vec![0]), [0.75, 0.125, 0.125], [1., 0.25, 0.25]),
            (Layers::Max, [1., 0.5, 1.], [1., 0.5, 1.]),
        ];
        for (layers, mean, max) in cases {
            let watch = Watch { layers: layers.clone(), max: true, full: true, ..Watch::default() };
            let rows = decode(&layered(), 3, 0, &watch).unwrap();
            assert_eq!((rows.mean.as_slice(), rows.max.as_slice()), (&mean[..], &max[..]), "{layers:?}");
            assert_eq!(rows.full, [0.5, 0.25, 0.25, 1., 0., 0., 0., 0.5, 0.5, 0., 0., 1.], "{layers:?}");
        }
        let plain = decode(&layered(), 3, 0, &Watch::default()).unwrap();
        assert!(plain.max.is_empty() && plain.full.is_empty(), "nothing that was not asked for");
        let missing = Watch { layers: Layers::These(vec![2]), ..Watch::default() };
        assert!(decode(&layered(), 3, 0, &missing).unwrap_err().contains("[2]"));
    }

    #[test]
    fn what_lies_behind_must_be_padding_or_hidden_tokens() {
        let row = json!({"format": "aggregated", "data": encode(&[0.5, 0.25, 0.25, 0.])});
        assert_eq!(decode(&row, 3, 0, &Watch::default()).unwrap().mean, [0.5, 0.25, 0.25]);
        assert!(decode(&row, 2, 0, &Watch::default()).unwrap_err().contains("no padding"));
        assert_eq!(decode(&row, 2, 1, &Watch::default()).unwrap().mean, [0.5, 0.25]);
        assert!(decode(&row, 5, 0, &Watch::default()).unwrap_err().contains("covers 4"));
        assert!(decode(&row, 0, 0, &Watch::default()).is_err());
    }
}
