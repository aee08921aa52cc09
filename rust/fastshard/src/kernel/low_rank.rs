//! Products of narrow matrices, row by row.

/// `sum[i] = sum over k of scalars(k) * vectors[k][first + i * step]`, each term added by a fused multiply-add in the order
/// of `k`: what a matrix product of BLAS gives for a rank that it does not divide.
///
/// # Panics
/// If a vector ends before the last element.
#[allow(unsafe_code)]
pub fn product<'a>(
    sum: &mut [f32],
    vectors: impl Iterator<Item = &'a [f32]>,
    scalars: impl Iterator<Item = f32>,
    first: usize,
    step: usize,
) {
    sum.fill(0.0);
    for (vector, scalar) in vectors.zip(scalars) {
        let vector = &vector[first..];
        if step != 1 {
            sum.iter_mut().zip(vector.iter().step_by(step)).for_each(|(s, x)| *s = scalar.mul_add(*x, *s));
            assert!(sum.is_empty() || vector.len() > (sum.len() - 1) * step, "a vector that is too short");
            continue;
        }
        let vector = &vector[..sum.len()];
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,fma")]
            unsafe fn fused(sum: &mut [f32], vector: &[f32], scalar: f32) {
                add(sum, vector, scalar);
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: the CPU has both.
                unsafe { fused(sum, vector, scalar) };
                continue;
            }
        }
        add(sum, vector, scalar);
    }
}

/// Always inlined, so that it is compiled for its caller's instruction set.
#[inline(always)]
fn add(sum: &mut [f32], vector: &[f32], scalar: f32) {
    sum.iter_mut().zip(vector).for_each(|(s, x)| *s = scalar.mul_add(*x, *s));
}
