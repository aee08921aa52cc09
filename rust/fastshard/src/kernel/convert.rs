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

/// The value of a code of an 8-bit float.
///
/// # Panics
/// If `dtype` is none.
pub fn f8_value(dtype: Dtype, code: u8) -> f32 {
    let mut value = [0.0];
    f8_values(dtype, &[code], &mut value);
    value[0]
}

/// The values of codes of an 8-bit float. All of its NaN become one.
///
/// # Panics
/// If `dtype` is none, or the two slices do not have one length.
pub fn f8_values(dtype: Dtype, codes: &[u8], out: &mut [f32]) {
    assert_eq!(codes.len(), out.len());
    let out = bytes_mut(out);
    match dtype {
        Dtype::F8E4m3 => e4m3_to_f32(codes, out),
        Dtype::F8E5m2 => e5m2_to_f32(codes, out),
        Dtype::F8E4m3fnuz => e4m3fnuz_to_f32(codes, out),
        Dtype::F8E5m2fnuz => e5m2fnuz_to_f32(codes, out),
        Dtype::F8E8m0 => e8m0_to_f32(codes, out),
        other => panic!("{other} is no 8-bit float"),
    }
}

/// Rounds f32 to a float dtype (F16, BF16, F32, F64) in little-endian bytes.
///
/// # Panics
/// If `dtype` is another one, or `dst` does not hold exactly `src.len()` elements.
pub fn from_f32(dtype: Dtype, src: &[f32], dst: &mut [u8]) {
    convert(Dtype::F32, bytes(src), dtype, dst);
}

/// Rounds f32 to the values of a narrower float dtype (F16, BF16).
///
/// # Panics
/// If `dtype` is no float of 16 or more bits.
pub fn round(dtype: Dtype, values: &mut [f32]) {
    if dtype == Dtype::F32 {
        return;
    }
    let mut narrow = [0u8; BUFFER * 2];
    for values in values.chunks_mut(BUFFER) {
        let narrow = &mut narrow[..values.len() * dtype.size()];
        from_f32(dtype, values, narrow);
        to_f32(dtype, narrow, values);
    }
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
        src.len().is_multiple_of(wide) && src.len() / wide * narrow == dst.len(),
        "{} bytes of {from} do not become {} bytes of {to}",
        src.len(),
        dst.len()
    );
    match (from, to) {
        _ if from == to => dst.copy_from_slice(src),
        (F32, Bf16) => f32_to_bf16(src, dst),
        (Bf16, F32) => bf16_to_f32(src, dst),
        (F32, F16) => f32_to_f16(src, dst),
        (F16, F32) => f16_to_f32(src, dst),
        (F32, F64) => f32_to_f64(src, dst),
        (F64, F32) => f64_to_f32(src, dst),
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

/// Defines a conversion of all elements, compiled for AVX2 too and run so where the CPU has it.
macro_rules! conversion {
    ($name:ident, $element:expr) => {
        #[allow(unsafe_code)]
        fn $name(src: &[u8], dst: &mut [u8]) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                unsafe fn avx2(src: &[u8], dst: &mut [u8]) {
                    map(src, dst, $element);
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the CPU has it.
                    return unsafe { avx2(src, dst) };
                }
            }
            map(src, dst, $element);
        }
    };
}
conversion!(f32_to_bf16, |x| bf16_bits(u32::from_le_bytes(x)).to_le_bytes());
conversion!(bf16_to_f32, |x| (u32::from(u16::from_le_bytes(x)) << 16).to_le_bytes());
conversion!(f32_to_f64, |x| f64::from(f32::from_le_bytes(x)).to_le_bytes());
conversion!(f64_to_f32, |x| (f64::from_le_bytes(x) as f32).to_le_bytes());
// "fn" (E4M3): no infinities, and NaN is all ones; "fnuz": no negative zero either, its bits are NaN.
conversion!(e4m3_to_f32, |[x]: [u8; 1]| nan_if(x & 0x7f == 0x7f, widen::<3, 7>(x)).to_le_bytes());
conversion!(e4m3fnuz_to_f32, |[x]: [u8; 1]| nan_if(x == 0x80, widen::<3, 8>(x)).to_le_bytes());
conversion!(e5m2fnuz_to_f32, |[x]: [u8; 1]| nan_if(x == 0x80, widen::<2, 16>(x)).to_le_bytes());
conversion!(e5m2_to_f32, |[x]: [u8; 1]| e5m2(x).to_le_bytes());
conversion!(e8m0_to_f32, |[x]: [u8; 1]| e8m0(x).to_le_bytes());

fn f32_to_f16(src: &[u8], dst: &mut [u8]) {
    let done = arch::f32_to_f16(src, dst);
    map(&src[done * 4..], &mut dst[done * 2..], |x| f16::from_f32(f32::from_le_bytes(x)).to_le_bytes());
}

fn f16_to_f32(src: &[u8], dst: &mut [u8]) {
    let done = arch::f16_to_f32(src, dst);
    map(&src[done * 2..], &mut dst[done * 4..], |x| f16::from_le_bytes(x).to_f32().to_le_bytes());
}

/// The bits of the f32 that a byte of sign, exponent and `FRACTION` bits stands for.
///
/// No operand is a denormal, which costs many processors over a hundred cycles. A number with an exponent is `normal`; one
/// without is made as if it had the least, less the power of two that this begins with. Either is the lesser of the two.
#[inline(always)]
fn widen<const FRACTION: u32, const BIAS: u32>(byte: u8) -> u32 {
    let bits = u32::from(byte);
    let (sign, magnitude) = ((bits & 0x80) << 24, (bits & 0x7f) << (23 - FRACTION));
    let normal = magnitude + ((127 - BIAS) << 23);
    let least = (128 - BIAS) << 23;
    let small = f32::from_bits(magnitude + least) - f32::from_bits(least);
    sign | normal.min(small.to_bits())
}

/// The bits of a NaN if `is_nan`, else `bits`.
#[inline(always)]
fn nan_if(is_nan: bool, bits: u32) -> u32 {
    if is_nan {
        f32::NAN.to_bits()
    } else {
        bits
    }
}

/// The bits of the f32 that a code of E5M2 stands for, which has infinities as f16 has them.
#[inline(always)]
fn e5m2(byte: u8) -> u32 {
    let sign = u32::from(byte & 0x80) << 24;
    let bits = if byte & 0x7f == 0x7c { sign | f32::INFINITY.to_bits() } else { widen::<2, 15>(byte) };
    nan_if(byte & 0x7f > 0x7c, bits)
}

/// The bits of the f32 that a code of E8M0 stands for: an exponent alone.
#[inline(always)]
fn e8m0(byte: u8) -> u32 {
    // The least of f32's exponents has no normal number.
    let bits = if byte == 0 { 1 << 22 } else { u32::from(byte) << 23 };
    nan_if(byte == 0xff, bits)
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

/// Applies `f` to every element. Always inlined, so that it is compiled for its caller's instruction set.
#[inline(always)]
fn map<const A: usize, const B: usize>(src: &[u8], dst: &mut [u8], f: impl Fn([u8; A]) -> [u8; B]) {
    for (x, y) in src.chunks_exact(A).zip(dst.chunks_exact_mut(B)) {
        y.copy_from_slice(&f(x.try_into().expect("whole element")));
    }
}

/// The f16 conversions of the CPU. Both return the number of leading elements done, in whole vectors.
#[cfg(target_arch = "x86_64")]
mod arch {
    use core::arch::x86_64::{
        _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_storeu_ps, _mm_loadu_si128,
        _mm_storeu_si128, _MM_FROUND_TO_NEAREST_INT,
    };

    #[allow(unsafe_code)]
    pub(super) fn f32_to_f16(src: &[u8], dst: &mut [u8]) -> usize {
        #[target_feature(enable = "avx,f16c")]
        unsafe fn f16c(src: &[u8], dst: &mut [u8]) {
            for (x, y) in src.chunks_exact(32).zip(dst.chunks_exact_mut(16)) {
                // SAFETY: 8 f32 become 8 f16, the sizes of the chunks; neither needs to be aligned.
                unsafe {
                    let half =
                        _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(x.as_ptr().cast()));
                    _mm_storeu_si128(y.as_mut_ptr().cast(), half);
                }
            }
        }
        if !(is_x86_feature_detected!("avx") && is_x86_feature_detected!("f16c")) {
            return 0;
        }
        // SAFETY: the CPU has both.
        unsafe { f16c(src, dst) };
        src.len() / 32 * 8
    }

    #[allow(unsafe_code)]
    pub(super) fn f16_to_f32(src: &[u8], dst: &mut [u8]) -> usize {
        #[target_feature(enable = "avx,f16c")]
        unsafe fn f16c(src: &[u8], dst: &mut [u8]) {
            for (x, y) in src.chunks_exact(16).zip(dst.chunks_exact_mut(32)) {
                // SAFETY: 8 f16 become 8 f32, the sizes of the chunks; neither needs to be aligned.
                unsafe {
                    let wide = _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast()));
                    _mm256_storeu_ps(y.as_mut_ptr().cast(), wide);
                }
            }
        }
        if !(is_x86_feature_detected!("avx") && is_x86_feature_detected!("f16c")) {
            return 0;
        }
        // SAFETY: the CPU has both.
        unsafe { f16c(src, dst) };
        src.len() / 16 * 8
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod arch {
    pub(super) fn f32_to_f16(_src: &[u8], _dst: &mut [u8]) -> usize {
        0
    }

    pub(super) fn f16_to_f32(_src: &[u8], _dst: &mut [u8]) -> usize {
        0
    }
}

/// The bytes of native floats, which are little endian (see the check in `kernel.rs`).
#[allow(unsafe_code)]
pub fn bytes(values: &[f32]) -> &[u8] {
    // SAFETY: an f32 has no padding, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// As [`bytes`], to write.
#[allow(unsafe_code)]
fn bytes_mut(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: as above, and every bit pattern is an f32.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a code by the definition of its format.
    fn f8_by_definition(dtype: Dtype, byte: u8) -> f32 {
        let (exponent_bits, bias, finite) = match dtype {
            // "fn": no infinities, NaN is all ones; "fnuz": no negative zero either, its bits are NaN.
            Dtype::F8E4m3 => (4, 7, byte & 0x7f != 0x7f),
            Dtype::F8E5m2 => (5, 15, byte & 0x7f <= 0x7c),
            Dtype::F8E4m3fnuz => (4, 8, byte != 0x80),
            Dtype::F8E5m2fnuz => (5, 16, byte != 0x80),
            Dtype::F8E8m0 => {
                return if byte == 0xff { f32::NAN } else { (f64::from(byte) - 127.0).exp2() as f32 }
            }
            other => panic!("{other} is no 8-bit float"),
        };
        if !finite {
            return f32::NAN;
        }
        let mantissa_bits = 7 - exponent_bits;
        let exponent = i32::from(byte >> mantissa_bits & ((1 << exponent_bits) - 1));
        let mantissa = f32::from(byte & ((1 << mantissa_bits) - 1)) / f32::from(1u8 << mantissa_bits);
        let sign = if byte & 0x80 != 0 { -1.0 } else { 1.0 };
        if dtype == Dtype::F8E5m2 && byte & 0x7f == 0x7c {
            return sign * f32::INFINITY;
        }
        match exponent {
            0 => sign * mantissa * 2f32.powi(1 - bias),
            _ => sign * (1.0 + mantissa) * 2f32.powi(exponent - bias),
        }
    }

    #[test]
    fn all_codes_of_8_bits_have_their_values() {
        let codes: Vec<u8> = (0..=255).collect();
        for dtype in [Dtype::F8E4m3, Dtype::F8E5m2, Dtype::F8E4m3fnuz, Dtype::F8E5m2fnuz, Dtype::F8E8m0] {
            let mut values = vec![1.0; 256];
            f8_values(dtype, &codes, &mut values);
            for (code, value) in codes.iter().zip(values) {
                let want = f8_by_definition(dtype, *code);
                assert_eq!(value.to_bits(), want.to_bits(), "{dtype} {code:#04x}: {value}, not {want}");
            }
        }
    }
}
