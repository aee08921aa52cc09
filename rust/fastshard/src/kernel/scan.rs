//! Scans of dense tensors for values that make a checkpoint suspect.

use crate::tensor::Dtype;

/// Number of NaN or infinite elements of a dense tensor; 0 for dtypes that this build does not scan.
///
/// Scans F16, BF16, F32, F64, F8_E4M3 (which has no infinity) and F8_E5M2.
///
/// # Panics
/// If `bytes` is not a whole number of elements.
pub fn count_non_finite(dtype: Dtype, bytes: &[u8]) -> u64 {
    assert!(bytes.len() % dtype.size() == 0, "{} bytes are not whole {dtype} elements", bytes.len());
    match dtype {
        Dtype::F16 => count16(bytes, 0x7c00),
        Dtype::Bf16 => count16(bytes, 0x7f80),
        Dtype::F32 => sum_chunks::<4>(bytes, |x| (u32::from_le_bytes(x) & 0x7f80_0000 == 0x7f80_0000).into()),
        Dtype::F64 => {
            const EXPONENT: u64 = 0x7ff << 52;
            sum_chunks::<8>(bytes, |x| (u64::from_le_bytes(x) & EXPONENT == EXPONENT).into())
        }
        Dtype::F8E4m3 => sum_chunks::<1>(bytes, |[x]| (x & 0x7f == 0x7f).into()),
        Dtype::F8E5m2 => sum_chunks::<1>(bytes, |[x]| (x & 0x7c == 0x7c).into()),
        _ => 0,
    }
}

fn count16(bytes: &[u8], exponent: u16) -> u64 {
    sum_chunks::<2>(bytes, |x| (u16::from_le_bytes(x) & exponent == exponent).into())
}

/// Sums `test` over all elements of `N` bytes.
fn sum_chunks<const N: usize>(bytes: &[u8], test: impl Fn([u8; N]) -> u32) -> u64 {
    bytes.chunks(N << 16).fold(0, |total, chunk| {
        let hits: u32 = chunk.chunks_exact(N).map(|x| test(x.try_into().expect("whole element"))).sum();
        total + u64::from(hits)
    })
}

/// True if all elements of `item` bytes are bit-equal to the first one, as in an empty tensor.
///
/// # Panics
/// If `item` is 0 or `bytes` is not a whole number of items.
pub fn is_constant(bytes: &[u8], item: usize) -> bool {
    assert!(item > 0 && bytes.len() % item == 0, "{} bytes are not whole {item}-byte items", bytes.len());
    // Equal to itself shifted by one element: memcmp does the work, and stops at the first difference.
    bytes.is_empty() || bytes[item..] == bytes[..bytes.len() - item]
}

/// True if every byte is zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    bytes.first().is_none_or(|&first| first == 0) && is_constant(bytes, 1)
}
