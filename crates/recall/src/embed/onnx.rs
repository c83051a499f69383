//! Whether an ONNX file is whole, before rten sees it: rten 0.27 reads for ever where a number in it never ends, as
//! happens when damage sends it into the weights. Only lengths are checked, down to those of the weights.

/// The fields of a message that lead to the weights.
const GRAPH: u64 = 7;
const WEIGHTS: u64 = 5;

/// Whether a model's fields fill it exactly, and so its graph's and those of all weights.
pub(super) fn is_whole(model: &[u8]) -> bool {
    let graphs = |model| fields(model).map(|fields| named(fields, GRAPH));
    let weights = |graph| fields(graph).map(|fields| named(fields, WEIGHTS));
    let whole = |weight| fields(weight).is_some();
    graphs(model).is_some_and(|mut graphs| {
        graphs.all(|graph| weights(graph).is_some_and(|mut weights| weights.all(whole)))
    })
}

fn named(fields: Vec<(u64, &[u8])>, name: u64) -> impl Iterator<Item = &[u8]> {
    fields.into_iter().filter(move |field| field.0 == name).map(|field| field.1)
}

/// The fields of a message, each with its name; none where they do not fill it.
fn fields(mut rest: &[u8]) -> Option<Vec<(u64, &[u8])>> {
    let mut fields = Vec::new();
    while !rest.is_empty() {
        let head = number(&mut rest)?;
        let length = match head & 7 {
            0 => number(&mut rest).map(|_| 0)?,
            1 => 8,
            2 => number(&mut rest)?,
            5 => 4,
            _ => return None,
        };
        let (content, behind) = rest.split_at_checked(usize::try_from(length).ok()?)?;
        fields.push((head >> 3, content));
        rest = behind;
    }
    Some(fields)
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
