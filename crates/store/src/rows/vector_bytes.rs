//! The bytes of an embedding vector. Values that a 16-bit float holds exactly take two bytes each, after a byte that says so;
//! other vectors, and those of earlier versions, take four bytes a value. Both read back exactly.

use half::f16;

/// The first byte of a vector of 16-bit floats. Its length is odd, and that of 32-bit floats is even.
const HALF_PRECISION: u8 = 1;

pub(super) fn encode_vector(vector: &[f32]) -> Vec<u8> {
    let halves: Vec<f16> = vector.iter().map(|&value| f16::from_f32(value)).collect();
    let is_exact = vector.iter().zip(&halves).all(|(value, half)| half.to_f32().to_bits() == value.to_bits());
    if is_exact {
        let bytes = halves.iter().flat_map(|half| half.to_le_bytes());
        std::iter::once(HALF_PRECISION).chain(bytes).collect()
    } else {
        vector.iter().flat_map(|value| value.to_le_bytes()).collect()
    }
}

/// The vector of these bytes; none if they are no vector.
pub(super) fn decode_vector(bytes: &[u8]) -> Option<Vec<f32>> {
    if let [HALF_PRECISION, halves @ ..] = bytes
        && halves.len() % 2 == 0
    {
        let (pairs, _) = halves.as_chunks::<2>();
        return Some(pairs.iter().map(|&pair| f16::from_le_bytes(pair).to_f32()).collect());
    }
    let (quads, rest) = bytes.as_chunks::<4>();
    rest.is_empty().then(|| quads.iter().map(|&quad| f32::from_le_bytes(quad)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn vector_of_half_precision_takes_two_bytes_a_value() {
        for (vector, bytes) in [
            (vec![], 1),
            (vec![0.5, -0.25, 1.0], 7),
            (vec![0.1, 0.5], 8),
            (vec![f32::NAN, f32::INFINITY], 5),
            (vec![1e30], 4),
            (vec![-0.0], 3),
        ] {
            assert_eq!(encode_vector(&vector).len(), bytes, "{vector:?}");
        }
    }

    #[test]
    fn vector_of_torn_bytes_is_refused() {
        for bytes in [&[2u8][..], &[0, 0], &[1, 0], &[2, 0, 0], &[1, 0, 0, 0, 0, 0]] {
            assert_eq!(decode_vector(bytes), None, "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn vector_bytes_read_back_exactly(bits in prop::collection::vec(any::<u32>(), 0..40), half: bool) {
            let round = |value: f32| if half { f16::from_f32(value).to_f32() } else { value };
            let vector: Vec<f32> = bits.into_iter().map(|bits| round(f32::from_bits(bits))).collect();
            let decoded = decode_vector(&encode_vector(&vector)).expect("a vector");
            let bits = |vector: &[f32]| vector.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
            prop_assert_eq!(bits(&decoded), bits(&vector));
        }
    }
}
