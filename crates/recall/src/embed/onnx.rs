//! Checks and edits an ONNX file (protobuf) before rten loads it.
//!
//! Integrity: rten 0.27 loops forever on a varint without end, which damage can produce. So the lengths of all messages
//! down to the weights are checked first; contents are not.
//!
//! Precision: a quantized model rounds the input of a matrix product to 255 steps between its minimum and its maximum.
//! Where one value in a thousand is far larger than all others, the others are lost. Such products are few; they are
//! rewritten to use dequantized weights and the exact input.

// Field numbers of onnx.proto: ModelProto, GraphProto.
const MODEL_GRAPH: u64 = 7;
const GRAPH_INITIALIZER: u64 = 5;
const GRAPH_NODE: u64 = 1;

// NodeProto.
const NODE_INPUT: u64 = 1;
const NODE_OUTPUT: u64 = 2;
const NODE_NAME: u64 = 3;
const NODE_OP_TYPE: u64 = 4;

/// Whether the fields fill their messages exactly: the model, its graphs and all weights.
pub(super) fn is_intact(model: &[u8]) -> bool {
    let graphs = |model| parse_fields(model).map(|fields| field_contents(fields, MODEL_GRAPH));
    let weights = |graph| parse_fields(graph).map(|fields| field_contents(fields, GRAPH_INITIALIZER));
    let intact = |weight| parse_fields(weight).is_some();
    graphs(model).is_some_and(|mut graphs| {
        graphs.all(|graph| weights(graph).is_some_and(|mut weights| weights.all(intact)))
    })
}

/// Rewrites the named quantized matrix products to compute in floats. An error if one of them does not exist.
pub(super) fn dequantize_matmuls(model: &[u8], names: &[String]) -> Result<Vec<u8>, String> {
    let damaged = || "it is cut off or damaged".to_owned();
    let mut edited = Vec::with_capacity(model.len());
    for field in parse_fields(model).ok_or_else(damaged)? {
        if field.number == MODEL_GRAPH {
            let graph = parse_fields(field.content).ok_or_else(damaged)?;
            let nodes: Option<Vec<OnnxNode>> =
                graph.iter().filter(|f| f.number == GRAPH_NODE).map(|f| OnnxNode::read(f.content)).collect();
            let nodes = nodes.ok_or_else(damaged)?;
            let products: Option<Vec<DequantizedMatMul>> =
                names.iter().map(|name| DequantizedMatMul::find(name, &nodes)).collect();
            let products = products.ok_or("it has no quantized product of a name that config.json lists")?;
            let mut content = Vec::with_capacity(field.content.len());
            for inner in &graph {
                let output = (inner.number == GRAPH_NODE)
                    .then(|| OnnxNode::read(inner.content)?.output.first().copied());
                match products.iter().find(|product| output.flatten() == Some(product.output)) {
                    Some(product) => product.write(&mut content),
                    None => content.extend_from_slice(inner.raw),
                }
            }
            write_field(&mut edited, MODEL_GRAPH, &content);
        } else {
            edited.extend_from_slice(field.raw);
        }
    }
    Ok(edited)
}

struct OnnxNode<'a> {
    name: &'a str,
    op_type: &'a str,
    input: Vec<&'a str>,
    output: Vec<&'a str>,
}

impl<'a> OnnxNode<'a> {
    fn read(message: &'a [u8]) -> Option<Self> {
        let mut node = Self { name: "", op_type: "", input: Vec::new(), output: Vec::new() };
        for field in parse_fields(message)? {
            let text = || str::from_utf8(field.content).ok();
            match field.number {
                NODE_INPUT => node.input.push(text()?),
                NODE_OUTPUT => node.output.push(text()?),
                NODE_NAME => node.name = text()?,
                NODE_OP_TYPE => node.op_type = text()?,
                _ => {}
            }
        }
        Some(node)
    }
}

/// A dynamically quantized matrix product. `weights` are the names of the weights, their scale and their zero point.
struct DequantizedMatMul<'a> {
    name: &'a str,
    input: &'a str,
    weights: [&'a str; 3],
    output: &'a str,
}

impl<'a> DequantizedMatMul<'a> {
    /// Finds the six nodes of such a product: quantize the input, multiply integers, cast to float, multiply the scales of
    /// both sides, and multiply the result with them. The sixth is the product of the cast and the scales.
    fn find(name: &str, nodes: &[OnnxNode<'a>]) -> Option<Self> {
        let producer = |value: &str| nodes.iter().find(|node| node.output.contains(&value));
        let consumer = |operation: &str, value: &str| {
            nodes.iter().find(|node| node.op_type == operation && node.input.contains(&value))
        };
        let other =
            |node: &OnnxNode<'a>, value: &str| node.input.iter().copied().find(|&input| input != value);
        let product = nodes.iter().find(|node| node.name == name && node.op_type == "MatMulInteger")?;
        let &[quantized, weights, _, zero] = product.input.as_slice() else { return None };
        let quantize = producer(quantized).filter(|node| node.op_type == "DynamicQuantizeLinear")?;
        let cast = consumer("Cast", product.output.first()?)?.output.first()?;
        let result = consumer("Mul", cast)?;
        let scales = producer(other(result, cast)?).filter(|node| node.op_type == "Mul")?;
        let scale = other(scales, quantize.output.get(1)?)?;
        Some(Self {
            name: product.name,
            input: quantize.input.first()?,
            weights: [weights, scale, zero],
            output: result.output.first()?,
        })
    }

    /// Writes two nodes in place of the last of the six. The other nodes stay; rten does not run unused nodes.
    fn write(&self, graph: &mut Vec<u8>) {
        let floats = format!("{}_floats", self.name);
        let mut node = |operation: &str, input: &[&str], output: &str| {
            let mut message = Vec::new();
            input.iter().for_each(|name| write_field(&mut message, NODE_INPUT, name.as_bytes()));
            write_field(&mut message, NODE_OUTPUT, output.as_bytes());
            write_field(&mut message, NODE_NAME, format!("{output}_of").as_bytes());
            write_field(&mut message, NODE_OP_TYPE, operation.as_bytes());
            write_field(graph, GRAPH_NODE, &message);
        };
        node("DequantizeLinear", &self.weights, &floats);
        node("MatMul", &[self.input, &floats], self.output);
    }
}

/// A field of a protobuf message: its number, its content, and all its bytes with tag and length.
struct ProtoField<'a> {
    number: u64,
    content: &'a [u8],
    raw: &'a [u8],
}

fn field_contents(fields: Vec<ProtoField<'_>>, number: u64) -> impl Iterator<Item = &[u8]> {
    fields.into_iter().filter(move |field| field.number == number).map(|field| field.content)
}

/// The fields of a message. None if they do not fill it exactly.
fn parse_fields(mut rest: &[u8]) -> Option<Vec<ProtoField<'_>>> {
    let mut fields = Vec::new();
    while !rest.is_empty() {
        let start = rest;
        let tag = read_varint(&mut rest)?;
        let length = match tag & 7 {
            0 => read_varint(&mut rest).map(|_| 0)?,
            1 => 8,
            2 => read_varint(&mut rest)?,
            5 => 4,
            _ => return None,
        };
        let (content, after) = rest.split_at_checked(usize::try_from(length).ok()?)?;
        rest = after;
        let raw = &start[..start.len() - rest.len()];
        fields.push(ProtoField { number: tag >> 3, content, raw });
    }
    Some(fields)
}

/// Appends a length-delimited field.
fn write_field(message: &mut Vec<u8>, number: u64, content: &[u8]) {
    for mut varint in [number << 3 | 2, content.len() as u64] {
        while varint >= 0x80 {
            message.push(varint as u8 | 0x80);
            varint >>= 7;
        }
        message.push(varint as u8);
    }
    message.extend_from_slice(content);
}

/// Reads a varint: seven bits per byte, the lowest first.
fn read_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for n in 0..10 {
        let (&byte, after) = rest.split_first()?;
        *rest = after;
        value |= u64::from(byte & 0x7f) << (7 * n);
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A graph with a dynamically quantized product, as ONNX quantizers write it, and one more node.
    fn quantized_model() -> Vec<u8> {
        let mut graph = Vec::new();
        write_field(&mut graph, 2, b"graph");
        for (operation, name, input, output) in [
            ("DynamicQuantizeLinear", "q", &["x"][..], &["x_q", "x_scale", "x_zero"][..]),
            ("Gelu", "g", &["x"], &["other"]),
            ("MatMulInteger", "p", &["x_q", "w", "x_zero", "w_zero"], &["y_int"]),
            ("Cast", "c", &["y_int"], &["y_float"]),
            ("Mul", "s", &["x_scale", "w_scale"], &["scales"]),
            ("Mul", "m", &["y_float", "scales"], &["y"]),
        ] {
            let mut node = Vec::new();
            input.iter().for_each(|name| write_field(&mut node, NODE_INPUT, name.as_bytes()));
            output.iter().for_each(|name| write_field(&mut node, NODE_OUTPUT, name.as_bytes()));
            write_field(&mut node, NODE_NAME, name.as_bytes());
            write_field(&mut node, NODE_OP_TYPE, operation.as_bytes());
            write_field(&mut graph, GRAPH_NODE, &node);
        }
        let mut weight = Vec::new();
        write_field(&mut weight, 9, &[7; 300]);
        write_field(&mut graph, GRAPH_INITIALIZER, &weight);
        let mut model = vec![0x08, 9];
        write_field(&mut model, MODEL_GRAPH, &graph);
        model
    }

    fn list_operations(model: &[u8]) -> Vec<String> {
        let graph =
            field_contents(parse_fields(model).expect("intact"), MODEL_GRAPH).next().expect("a graph");
        let nodes = field_contents(parse_fields(graph).expect("intact"), GRAPH_NODE);
        let describe = |message| {
            let OnnxNode { op_type: operation, input, output, .. } = OnnxNode::read(message).expect("intact");
            format!("{} = {operation}({})", output.join(" "), input.join(" "))
        };
        nodes.map(describe).collect()
    }

    #[test]
    fn onnx_dequantizes_named_matmuls() {
        let model = quantized_model();
        let edited = dequantize_matmuls(&model, &["p".to_owned()]).expect("the product exists");
        let (before, after) = (list_operations(&model), list_operations(&edited));
        assert_eq!(after[..5], before[..5], "all other nodes stay");
        assert_eq!(after[5..], ["p_floats = DequantizeLinear(w w_scale w_zero)", "y = MatMul(x p_floats)"]);
        assert!(is_intact(&edited));
        assert_eq!(dequantize_matmuls(&model, &[]).as_ref(), Ok(&model), "byte for byte");
        for name in ["g", "z"] {
            let error = dequantize_matmuls(&model, &[name.to_owned()]).expect_err("no such product");
            assert!(error.starts_with("it has no quantized product"), "{error}");
        }
        assert!(dequantize_matmuls(&model[..40], &["p".to_owned()]).is_err_and(|e| e.contains("cut off")));
    }

    #[test]
    fn onnx_integrity_check_finds_truncation_and_damage() {
        // A version, and a graph with a name and one weight of three bytes.
        let file = [0x08, 9, 0x3a, 10, 0x12, 1, b'g', 0x2a, 5, 0x4a, 3, 0xff, 0xff, 0xff];
        assert!(is_intact(&file));
        for end in 1..file.len() {
            assert!(!is_intact(&file[..end]) || end == 2, "cut off after {end} bytes");
        }
        for length in [3, 5, 8, 10] {
            for by in [1, 0x80] {
                let mut damaged = file;
                damaged[length] ^= by;
                assert!(!is_intact(&damaged), "damaged by {by} at {length}");
            }
        }
        assert!(!is_intact(&[0xff; 64]), "a varint without end");
        assert!(!is_intact(b"<!doctype html>"));
    }
}
