//! What must be known of an ONNX file before rten sees it, and what is changed in it.
//!
//! Whether it is whole: rten 0.27 reads for ever where a number in it never ends, as happens when damage sends it into
//! the weights. Only lengths are checked, down to those of the weights.
//!
//! And that some products are not quantised on the way. A quantised model rounds what goes into a product to 255 steps,
//! from its least number to its greatest; where one number in a thousand is far greater than all others, the others are
//! rounded away. Such products are few, and computed with the same weights but from what really goes in.

/// The fields of a message that lead to the weights and the nodes.
const GRAPH: u64 = 7;
const WEIGHTS: u64 = 5;
const NODE: u64 = 1;

/// The fields of a node.
const INPUT: u64 = 1;
const OUTPUT: u64 = 2;
const NAME: u64 = 3;
const OPERATION: u64 = 4;

/// Whether a model's fields fill it exactly, and so its graph's and those of all weights.
pub(super) fn is_whole(model: &[u8]) -> bool {
    let graphs = |model| fields(model).map(|fields| named(fields, GRAPH));
    let weights = |graph| fields(graph).map(|fields| named(fields, WEIGHTS));
    let whole = |weight| fields(weight).is_some();
    graphs(model).is_some_and(|mut graphs| {
        graphs.all(|graph| weights(graph).is_some_and(|mut weights| weights.all(whole)))
    })
}

/// The model with these of its quantised products computed from what really goes in; an error, where it has no such
/// product.
pub(super) fn unquantised(model: &[u8], products: &[String]) -> Result<Vec<u8>, String> {
    let damaged = || "it is cut off or damaged".to_owned();
    let mut written = Vec::with_capacity(model.len());
    for field in fields(model).ok_or_else(damaged)? {
        if field.name == GRAPH {
            let graph = fields(field.content).ok_or_else(damaged)?;
            let nodes: Option<Vec<Node>> =
                graph.iter().filter(|f| f.name == NODE).map(|f| Node::read(f.content)).collect();
            let nodes = nodes.ok_or_else(damaged)?;
            let exact: Option<Vec<Exact>> = products.iter().map(|name| Exact::of(name, &nodes)).collect();
            let exact = exact.ok_or("it lacks a quantised product that config.json names")?;
            let mut content = Vec::with_capacity(field.content.len());
            for inner in &graph {
                let output = (inner.name == NODE).then(|| Node::read(inner.content)?.output.first().copied());
                match exact.iter().find(|exact| output.flatten() == Some(exact.result)) {
                    Some(exact) => exact.write(&mut content),
                    None => content.extend_from_slice(inner.whole),
                }
            }
            put(&mut written, GRAPH, &content);
        } else {
            written.extend_from_slice(field.whole);
        }
    }
    Ok(written)
}

/// An operation of the graph.
struct Node<'a> {
    name: &'a str,
    operation: &'a str,
    input: Vec<&'a str>,
    output: Vec<&'a str>,
}

impl<'a> Node<'a> {
    fn read(message: &'a [u8]) -> Option<Self> {
        let mut node = Self { name: "", operation: "", input: Vec::new(), output: Vec::new() };
        for field in fields(message)? {
            let text = || str::from_utf8(field.content).ok();
            match field.name {
                INPUT => node.input.push(text()?),
                OUTPUT => node.output.push(text()?),
                NAME => node.name = text()?,
                OPERATION => node.operation = text()?,
                _ => {}
            }
        }
        Some(node)
    }
}

/// A product that is quantised on the way: what goes in, its weights with their scale and zero, and what comes out.
struct Exact<'a> {
    name: &'a str,
    enters: &'a str,
    weights: [&'a str; 3],
    result: &'a str,
}

impl<'a> Exact<'a> {
    /// Such a product is written as six nodes: what goes in is quantised, multiplied and made a float again, the scales
    /// of both sides are multiplied, and then that with this.
    fn of(name: &str, nodes: &[Node<'a>]) -> Option<Self> {
        let made_by = |value: &str| nodes.iter().find(|node| node.output.contains(&value));
        let takes = |operation: &str, value: &str| {
            nodes.iter().find(|node| node.operation == operation && node.input.contains(&value))
        };
        let other = |node: &Node<'a>, value: &str| node.input.iter().copied().find(|&input| input != value);
        let product = nodes.iter().find(|node| node.name == name && node.operation == "MatMulInteger")?;
        let &[quantised, weights, _, zero] = product.input.as_slice() else { return None };
        let quantise = made_by(quantised).filter(|node| node.operation == "DynamicQuantizeLinear")?;
        let cast = takes("Cast", product.output.first()?)?.output.first()?;
        let last = takes("Mul", cast)?;
        let scales = made_by(other(last, cast)?).filter(|node| node.operation == "Mul")?;
        let scale = other(scales, quantise.output.get(1)?)?;
        Some(Self {
            name: product.name,
            enters: quantise.input.first()?,
            weights: [weights, scale, zero],
            result: last.output.first()?,
        })
    }

    /// Two nodes in the place of the last of the six; nothing asks for the others any more.
    fn write(&self, graph: &mut Vec<u8>) {
        let floats = format!("{}_floats", self.name);
        let mut node = |operation: &str, input: &[&str], output: &str| {
            let mut message = Vec::new();
            input.iter().for_each(|name| put(&mut message, INPUT, name.as_bytes()));
            put(&mut message, OUTPUT, output.as_bytes());
            put(&mut message, NAME, format!("{output}_of").as_bytes());
            put(&mut message, OPERATION, operation.as_bytes());
            put(graph, NODE, &message);
        };
        node("DequantizeLinear", &self.weights, &floats);
        node("MatMul", &[self.enters, &floats], self.result);
    }
}

/// A field of a message: its name, what it holds, and all of it with its name and length.
struct Field<'a> {
    name: u64,
    content: &'a [u8],
    whole: &'a [u8],
}

fn named(fields: Vec<Field<'_>>, name: u64) -> impl Iterator<Item = &[u8]> {
    fields.into_iter().filter(move |field| field.name == name).map(|field| field.content)
}

/// The fields of a message; none where they do not fill it.
fn fields(mut rest: &[u8]) -> Option<Vec<Field<'_>>> {
    let mut fields = Vec::new();
    while !rest.is_empty() {
        let begin = rest;
        let head = number(&mut rest)?;
        let length = match head & 7 {
            0 => number(&mut rest).map(|_| 0)?,
            1 => 8,
            2 => number(&mut rest)?,
            5 => 4,
            _ => return None,
        };
        let (content, behind) = rest.split_at_checked(usize::try_from(length).ok()?)?;
        rest = behind;
        let whole = &begin[..begin.len() - rest.len()];
        fields.push(Field { name: head >> 3, content, whole });
    }
    Some(fields)
}

/// Writes a field that has a length.
fn put(message: &mut Vec<u8>, name: u64, content: &[u8]) {
    for mut number in [name << 3 | 2, content.len() as u64] {
        while number >= 0x80 {
            message.push(number as u8 | 0x80);
            number >>= 7;
        }
        message.push(number as u8);
    }
    message.extend_from_slice(content);
}

/// A number, seven bits a byte, the lowest first.
fn number(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for n in 0..10 {
        let (&byte, behind) = rest.split_first()?;
        *rest = behind;
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

    /// A graph of a product that is quantised on the way, as quantisers write it, and of one more node.
    fn quantised() -> Vec<u8> {
        let mut graph = Vec::new();
        put(&mut graph, 2, b"graph");
        for (operation, name, input, output) in [
            ("DynamicQuantizeLinear", "q", &["x"][..], &["x_q", "x_scale", "x_zero"][..]),
            ("Gelu", "g", &["x"], &["other"]),
            ("MatMulInteger", "p", &["x_q", "w", "x_zero", "w_zero"], &["y_int"]),
            ("Cast", "c", &["y_int"], &["y_float"]),
            ("Mul", "s", &["x_scale", "w_scale"], &["scales"]),
            ("Mul", "m", &["y_float", "scales"], &["y"]),
        ] {
            let mut node = Vec::new();
            input.iter().for_each(|name| put(&mut node, INPUT, name.as_bytes()));
            output.iter().for_each(|name| put(&mut node, OUTPUT, name.as_bytes()));
            put(&mut node, NAME, name.as_bytes());
            put(&mut node, OPERATION, operation.as_bytes());
            put(&mut graph, NODE, &node);
        }
        let mut weight = Vec::new();
        put(&mut weight, 9, &[7; 300]);
        put(&mut graph, WEIGHTS, &weight);
        let mut model = vec![0x08, 9];
        put(&mut model, GRAPH, &graph);
        model
    }

    fn operations(model: &[u8]) -> Vec<String> {
        let graph = named(fields(model).expect("whole"), GRAPH).next().expect("a graph");
        let nodes = named(fields(graph).expect("whole"), NODE);
        let told = |message| {
            let Node { operation, input, output, .. } = Node::read(message).expect("whole");
            format!("{} = {operation}({})", output.join(" "), input.join(" "))
        };
        nodes.map(told).collect()
    }

    #[test]
    fn a_product_is_computed_from_what_goes_in() {
        let model = quantised();
        let exact = unquantised(&model, &["p".to_owned()]).expect("there is one");
        let (before, after) = (operations(&model), operations(&exact));
        assert_eq!(after[..5], before[..5], "all others stay");
        assert_eq!(after[5..], ["p_floats = DequantizeLinear(w w_scale w_zero)", "y = MatMul(x p_floats)"]);
        assert!(is_whole(&exact));
        assert_eq!(unquantised(&model, &[]).as_ref(), Ok(&model), "byte for byte");
        for (names, why) in [(["g"], "it lacks a quantised product"), (["z"], "it lacks a quantised product")]
        {
            let error = unquantised(&model, &names.map(str::to_owned)).expect_err("there is none");
            assert!(error.starts_with(why), "{error}");
        }
        assert!(unquantised(&model[..40], &["p".to_owned()]).is_err_and(|e| e.contains("cut off")));
    }

    #[test]
    fn a_file_is_whole_or_it_is_not() {
        // A version, and a graph with a name and one weight of three bytes.
        let file = [0x08, 9, 0x3a, 10, 0x12, 1, b'g', 0x2a, 5, 0x4a, 3, 0xff, 0xff, 0xff];
        assert!(is_whole(&file));
        for end in 1..file.len() {
            assert!(!is_whole(&file[..end]) || end == 2, "cut off after {end} bytes");
        }
        for length in [3, 5, 8, 10] {
            for by in [1, 0x80] {
                let mut damaged = file;
                damaged[length] ^= by;
                assert!(!is_whole(&damaged), "damaged by {by} at {length}");
            }
        }
        assert!(!is_whole(&[0xff; 64]), "a number that never ends");
        assert!(!is_whole(b"<!doctype html>"));
    }
}
