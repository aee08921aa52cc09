//! Conversion between the float dtypes, bit-identical to torch's `Tensor.to(dtype)`.
//!
//! Every narrowing rounds to nearest even and goes through f32, as in torch: f64 to bf16 or f16 rounds
//! twice. Denormals are kept. torch 2.15 disagrees with itself on NaN (by CPU capability, memory layout
//! and position in the tensor); these are the rules here, each one that torch follows somewhere:
//!
//! | conversion | NaN becomes | torch |
//! |---|---|---|
//! | to bf16 | 0x7fc0 | its scalar code; its AVX2 and AVX-512 code writes 0xffff |
//! | f32, f64 to f16 | sign and leading payload bits, quiet | its vector code; scalar f64 drops the payload |
//! | f16 to f32, f64 | sign and payload, quiet | its vector code; the last 0 to 7 elements become 0x7fffffff |
//! | bf16 to f32 | all bits kept, also of a signalling NaN | always |
//! | f32 to f64, f64 to f32 | sign and leading payload bits, quiet | always |

use half::f16;

use crate::tensor::Dtype;

/// What a NaN becomes in bf16.
const BF16_NAN: u16 = 0x7fc0;

/// Elements that a conversion without a direct path buffers as f32; 4 KiB stay in the first-level cache.
const BUFFER: usize = 1024;

/// Reads little-endian elements of a float dtype (F16, BF16, F32, F64) as f32.
///
/// # Panics
/// If `dtype` is another one, or `src` does not hold exactly `out.len()` elements.
pub fn to_f32(dtype: Dtype, src: &[u8], out: &mut [f32]) {
    convert(dtype, src, Dtype::F32, bytes_mut(out));
}

/// Rounds f32 to a float dtype (F16, BF16, F32, F64) in little-endian bytes.
///
/// # Panics
/// If `dtype` is another one, or `dst` does not hold exactly `src.len()` elements.
pub fn from_f32(dtype: Dtype, src: &[f32], dst: &mut [u8]) {
    convert(Dtype::F32, bytes(src), dtype, dst);
}

/// Converts a dense slice of one float dtype (F16, BF16, F32, F64) to another one, in little-endian bytes.
///
/// # Panics
/// If a dtype is another one, or the two slices do not hold the same whole number of elements.
pub fn convert(from: Dtype, src: &[u8], to: Dtype, dst: &mut [u8]) {
    use Dtype::{Bf16, F16, F32, F64};
    assert!(from.is_float() && to.is_float(), "cannot convert {from} to {to}");
    let (wide, narrow) = (from.size(), to.size());
    assert!(
        src.len() % wide == 0 && src.len() / wide * narrow == dst.len(),
        "{} bytes of {from} do not become {} bytes of {to}",
        src.len(),
        dst.len()
    );
    match (from, to) {
        _ if from == to => dst.copy_from_slice(src),
        (F32, Bf16) => map(src, dst, |x| bf16_bits(u32::from_le_bytes(x)).to_le_bytes()),
        (Bf16, F32) => map(src, dst, |x| (u32::from(u16::from_le_bytes(x)) << 16).to_le_bytes()),
        (F32, F16) => map(src, dst, |x| f16::from_f32(f32::from_le_bytes(x)).to_le_bytes()),
        (F16, F32) => map(src, dst, |x| f16::from_le_bytes(x).to_f32().to_le_bytes()),
        (F32, F64) => map(src, dst, |x| f64::from(f32::from_le_bytes(x)).to_le_bytes()),
        (F64, F32) => map(src, dst, |x| (f64::from_le_bytes(x) as f32).to_le_bytes()),
        _ => {
            let mut buffer = [0u8; BUFFER * 4];
            for (src, dst) in src.chunks(BUFFER * wide).zip(dst.chunks_mut(BUFFER * narrow)) {
                let buffer = &mut buffer[..src.len() / wide * 4];
                convert(from, src, F32, buffer);
                convert(F32, buffer, to, dst);
            }
        }
    }
}

/// Rounds the bits of an f32 to those of a bf16.
#[inline]
fn bf16_bits(x: u32) -> u16 {
    let rounded = (x.wrapping_add(0x7fff + ((x >> 16) & 1)) >> 16) as u16;
    if x & 0x7fff_ffff > 0x7f80_0000 {
        BF16_NAN
    } else {
        rounded
    }
}

/// Applies `f` to every element.
#[inline]
fn map<const A: usize, const B: usize>(src: &[u8], dst: &mut [u8], f: impl Fn([u8; A]) -> [u8; B]) {
    for (x, y) in src.chunks_exact(A).zip(dst.chunks_exact_mut(B)) {
        y.copy_from_slice(&f(x.try_into().expect("whole element")));
    }
}

/// The bytes of native floats, which are little endian (see the check in `kernel.rs`).
#[allow(unsafe_code)]
fn bytes(values: &[f32]) -> &[u8] {
    // SAFETY: an f32 has no padding, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// As [`bytes`], to write.
#[allow(unsafe_code)]
fn bytes_mut(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: as above, and every bit pattern is an f32.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
