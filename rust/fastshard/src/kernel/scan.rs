//! Scans of dense tensors for values that make a checkpoint suspect.

use crate::tensor::Dtype;

/// Number of NaN or infinite elements of a dense tensor; 0 for dtypes that this build does not scan.
///
/// Scans F16, BF16, F32, F64, F8_E4M3 (which has no infinity) and F8_E5M2.
///
/// # Panics
/// If `bytes` is not an integer of elements.
#[allow(unsafe_code)]
pub fn count_non_finite(dtype: Dtype, bytes: &[u8]) -> u64 {
    assert!(bytes.len().is_multiple_of(dtype.size()), "{} bytes are not whole {dtype} elements", bytes.len());
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        unsafe fn avx2(dtype: Dtype, bytes: &[u8]) -> u64 {
            count(dtype, bytes)
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has it.
            return unsafe { avx2(dtype, bytes) };
        }
    }
    count(dtype, bytes)
}

/// Always inlined, so that it is compiled for its caller's instruction set.
#[inline(always)]
fn count(dtype: Dtype, bytes: &[u8]) -> u64 {
    const F64_EXPONENT: u64 = 0x7ff << 52;
    // Counts in the width of the element, over as many elements as that holds: lanes then stay whole.
    macro_rules! count {
        ($uint:ty, $chunk:expr, $test:expr) => {{
            const SIZE: usize = size_of::<$uint>();
            bytes.chunks($chunk * SIZE).fold(0, |total, chunk| {
                let test =
                    |x: &[u8]| <$uint>::from($test(<$uint>::from_le_bytes(x.try_into().expect("whole"))));
                total + chunk.chunks_exact(SIZE).map(test).sum::<$uint>() as u64
            })
        }};
    }
    match dtype {
        Dtype::F16 => count!(u16, 1 << 15, |x| x & 0x7c00 == 0x7c00),
        Dtype::Bf16 => count!(u16, 1 << 15, |x| x & 0x7f80 == 0x7f80),
        Dtype::F32 => count!(u32, 1 << 15, |x| x & 0x7f80_0000 == 0x7f80_0000),
        Dtype::F64 => count!(u64, 1 << 15, |x| x & F64_EXPONENT == F64_EXPONENT),
        Dtype::F8E4m3 => count!(u8, 128, |x| x & 0x7f == 0x7f),
        Dtype::F8E5m2 => count!(u8, 128, |x| x & 0x7c == 0x7c),
        _ => 0,
    }
}

/// True if all elements of `item` bytes are bit-equal to the first one, as in an empty tensor.
///
/// # Panics
/// If `item` is 0 or `bytes` is not an integer of items.
pub fn is_constant(bytes: &[u8], item: usize) -> bool {
    assert!(
        item > 0 && bytes.len().is_multiple_of(item),
        "{} bytes are not whole {item}-byte items",
        bytes.len()
    );
    // Equal to itself shifted by one element: memcmp does the work, and stops at the first difference.
    bytes.is_empty() || bytes[item..] == bytes[..bytes.len() - item]
}

/// True if every byte is zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    bytes.first().is_none_or(|&first| first == 0) && is_constant(bytes, 1)
}
/// A page of zeros, and no less, is left out.
const HOLE: usize = 4096;

/// The bytes without their pages of zeros, which a file that begins as a hole need not be given: (offset, bytes).
pub fn filled(bytes: &[u8]) -> Vec<(u64, &[u8])> {
    let mut runs: Vec<(u64, &[u8])> = Vec::new();
    let mut start = None;
    for (number, page) in bytes.chunks(HOLE).enumerate() {
        let at = number * HOLE;
        match (is_zero(page), start) {
            (false, None) => start = Some(at),
            (true, Some(first)) => {
                runs.push((first as u64, &bytes[first..at]));
                start = None;
            }
            _ => {}
        }
    }
    if let Some(first) = start {
        runs.push((first as u64, &bytes[first..]));
    }
    runs
}
