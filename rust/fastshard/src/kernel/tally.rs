//! Sums and counts over a block of numbers, for statistics.

/// What [`float_block`] found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FloatBlock {
    /// The first finite number, around which sums are taken; 0 without one.
    pub around: f64,
    /// Sum of the finite numbers' differences to `around`.
    pub sum: f64,
    /// Sum of the squares of these differences.
    pub squares: f64,
    /// Smallest finite number; `around` without one.
    pub min: f64,
    /// Largest finite number; `around` without one.
    pub max: f64,
    /// Positive and negative zeros.
    pub zeros: [u64; 2],
    /// NaN and infinities.
    pub non_finite: u64,
}

/// Sums that run side by side. Their number is fixed, so that results do not hang on the CPU.
const LANES: usize = 16;

/// Sums up a block of numbers, and counts them by the nine bits of sign and exponent. The sums are the same
/// on every CPU.
#[allow(unsafe_code)]
pub fn float_block(values: &[f32], counts: &mut [u64; 512]) -> FloatBlock {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        unsafe fn avx2(values: &[f32], counts: &mut [u64; 512]) -> FloatBlock {
            block(values, counts)
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has it.
            return unsafe { avx2(values, counts) };
        }
    }
    block(values, counts)
}

/// Always inlined, so that it is compiled for its caller's instruction set.
#[inline(always)]
fn block(values: &[f32], counts: &mut [u64; 512]) -> FloatBlock {
    const INFINITY: u32 = 0x7f80_0000;
    let around = values.iter().copied().find(|x| x.is_finite()).unwrap_or(0.0);
    let centre = f64::from(around);
    let (mut sums, mut squares) = ([0f64; LANES], [0f64; LANES]);
    let (mut min, mut max) = ([around; LANES], [around; LANES]);
    let (mut zeros, mut negative, mut non_finite) = ([0u32; LANES], [0u32; LANES], [0u32; LANES]);
    let mut add = |lanes: &[f32; LANES], real: &[bool; LANES]| {
        for l in 0..LANES {
            let bits = lanes[l].to_bits();
            let size = bits & 0x7fff_ffff;
            let finite = size < INFINITY;
            zeros[l] += u32::from(bits == 0 && real[l]);
            negative[l] += u32::from(bits == 1 << 31 && real[l]);
            non_finite[l] += u32::from(!finite);
            // What stands at the centre changes nothing.
            let x = if finite { lanes[l] } else { around };
            min[l] = if x < min[l] { x } else { min[l] };
            max[l] = if x > max[l] { x } else { max[l] };
            let apart = f64::from(x) - centre;
            sums[l] += apart;
            squares[l] += apart * apart;
        }
    };
    let whole = values.chunks_exact(LANES);
    let rest = whole.remainder();
    for lanes in whole {
        add(lanes.try_into().expect("a whole group"), &[true; LANES]);
    }
    if !rest.is_empty() {
        let mut last = [around; LANES];
        last[..rest.len()].copy_from_slice(rest);
        add(&last, &std::array::from_fn(|l| l < rest.len()));
    }
    count_exponents(values, counts);
    FloatBlock {
        around: centre,
        sum: sums.iter().sum(),
        squares: squares.iter().sum(),
        min: min.iter().fold(centre, |a, b| a.min(f64::from(*b))),
        max: max.iter().fold(centre, |a, b| a.max(f64::from(*b))),
        zeros: [zeros, negative].map(|lanes| lanes.iter().map(|n| u64::from(*n)).sum()),
        non_finite: non_finite.iter().map(|n| u64::from(*n)).sum(),
    }
}

#[inline(always)]
fn count_exponents(values: &[f32], counts: &mut [u64; 512]) {
    // Four tables: neighbours are often alike, and one counter would wait for itself.
    let mut tables = [[0u32; 512]; 4];
    let mut groups = values.chunks_exact(4);
    for group in &mut groups {
        for (x, table) in group.iter().zip(&mut tables) {
            table[(x.to_bits() >> 23) as usize] += 1;
        }
    }
    groups.remainder().iter().for_each(|x| tables[0][(x.to_bits() >> 23) as usize] += 1);
    for (i, n) in counts.iter_mut().enumerate() {
        *n += tables.iter().map(|table| u64::from(table[i])).sum::<u64>();
    }
}

/// How often each byte stands in `bytes`.
pub fn count_bytes(bytes: &[u8]) -> [u64; 256] {
    let mut counts = [0u64; 256];
    for chunk in bytes.chunks(1 << 20) {
        let mut tables = [[0u32; 256]; 4];
        let mut groups = chunk.chunks_exact(4);
        for group in &mut groups {
            for (x, table) in group.iter().zip(&mut tables) {
                table[usize::from(*x)] += 1;
            }
        }
        groups.remainder().iter().for_each(|x| tables[0][usize::from(*x)] += 1);
        for (i, n) in counts.iter_mut().enumerate() {
            *n += tables.iter().map(|table| u64::from(table[i])).sum::<u64>();
        }
    }
    counts
}
