//! Codes of quantised weights: taken out of the words that they are packed in, and made numbers of.

/// Takes codes of `bits` (1 to 8) out of a row in which they lie one after another, the lowest bits first.
///
/// # Panics
/// If `row` ends before the last code, which begins at bit `first + (out.len() - 1) * bits`.
pub fn unpack_row(row: &[u8], first: u64, bits: u32, out: &mut [u8]) {
    if out.is_empty() {
        return;
    }
    let mask = ((1u16 << bits) - 1) as u8;
    if bits == 8 && first.is_multiple_of(8) {
        let first = (first / 8) as usize;
        let n = out.len();
        return out.copy_from_slice(&row[first..first + n]);
    }
    if bits == 4 && first.is_multiple_of(8) {
        let row = &row[(first / 8) as usize..];
        let (pairs, rest) = out.split_at_mut(out.len() / 2 * 2);
        for (pair, byte) in pairs.chunks_exact_mut(2).zip(row) {
            pair[0] = byte & 15;
            pair[1] = byte >> 4;
        }
        if let [last] = rest {
            *last = row[pairs.len() / 2] & 15;
        }
        return;
    }
    for (k, code) in (0u64..).zip(out) {
        let at = first + k * u64::from(bits);
        let (byte, shift) = ((at / 8) as usize, (at % 8) as u32);
        let mut word = u16::from(row[byte]);
        if shift + bits > 8 {
            word |= u16::from(row[byte + 1]) << 8;
        }
        *code = (word >> shift) as u8 & mask;
    }
}

/// The same where the codes of a word are not in order: the code `k` of a word lies at place `lanes[k]` of it.
///
/// # Panics
/// As [`unpack_row`].
pub fn unpack_lanes(row: &[u8], first: u64, bits: u32, lanes: &[u8], out: &mut [u8]) {
    let mask = ((1u16 << bits) - 1) as u8;
    let period = lanes.len() as u64;
    for (k, code) in (first..).zip(out) {
        let place = k / period * period + u64::from(lanes[(k % period) as usize]);
        let at = place * u64::from(bits);
        *code = row[(at / 8) as usize] >> (at % 8) & mask;
    }
}

/// Takes one row of codes out of words that hold those of several rows: the lowest bits first, the row's own at bit `first`
/// of the words of its columns. `words` begins with a row of words, each of `size` bytes (1 or 4).
///
/// # Panics
/// If `words` ends before the last code.
pub fn unpack_column(words: &[u8], size: usize, first: u64, bits: u32, out: &mut [u8]) {
    let mask = (1u32 << bits) - 1;
    let word = size as u64 * 8;
    let (row, shift) = ((first / word) as usize, (first % word) as u32);
    let stride = out.len() * size;
    let straddles = u64::from(shift + bits) > word;
    let low = &words[row * stride..][..stride];
    if size == 1 && !straddles {
        out.iter_mut().zip(low).for_each(|(code, byte)| *code = byte >> shift & mask as u8);
        return;
    }
    let at = |bytes: &[u8], c: usize| match size {
        4 => u32::from_le_bytes(bytes[c * 4..c * 4 + 4].try_into().expect("four bytes")),
        _ => u32::from(bytes[c]),
    };
    if !straddles {
        out.iter_mut().enumerate().for_each(|(c, code)| *code = (at(low, c) >> shift & mask) as u8);
        return;
    }
    let high = &words[(row + 1) * stride..][..stride];
    for (c, code) in out.iter_mut().enumerate() {
        let both = at(low, c) >> shift | at(high, c) << (word as u32 - shift);
        *code = (both & mask) as u8;
    }
}

/// The values of the codes of E2M1 (4 bits) or E2M3 (6 bits), of which the highest is the sign.
pub fn mini_float(bits: u32, negative_zero: bool) -> [f32; 256] {
    let fraction = bits - 3;
    std::array::from_fn(|code| {
        let code = code as u32 & ((1 << bits) - 1);
        let (sign, exponent) = (code >> (bits - 1), code >> fraction & 3);
        let part = (code & ((1 << fraction) - 1)) as f32 / (1 << fraction) as f32;
        let value = match exponent {
            0 => part,
            _ => (1.0 + part) * (1 << (exponent - 1)) as f32,
        };
        match sign {
            1 if value > 0.0 || negative_zero => -value,
            _ => value,
        }
    })
}

/// Codes as numbers.
pub fn look_up(table: &[f32; 256], codes: &[u8], out: &mut [f32]) {
    codes.iter().zip(out).for_each(|(code, value)| *value = table[usize::from(*code)]);
}

/// Calls `apply` with the number of each block, and the values of a row that lie in it: the first value is `first` into its
/// block, of which each has `block` values. There may be further numbers.
pub fn by_blocks(
    values: &mut [f32],
    numbers: &[f32],
    block: u64,
    first: u64,
    apply: impl Fn(f32, &mut [f32]),
) {
    let mut rest = values;
    let mut left = block - first;
    for number in numbers {
        if rest.is_empty() {
            break;
        }
        let n = left.min(rest.len() as u64) as usize;
        let (here, after) = rest.split_at_mut(n);
        apply(*number, here);
        rest = after;
        left = block;
    }
    debug_assert!(rest.is_empty(), "fewer blocks than values");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A bit of a stream, the lowest of each byte first.
    fn bit(bytes: &[u8], at: u64) -> u8 {
        bytes[(at / 8) as usize] >> (at % 8) & 1
    }

    fn code(bytes: &[u8], first: u64, bits: u32) -> u8 {
        (0..bits).map(|b| bit(bytes, first + u64::from(b)) << b).sum()
    }

    proptest! {
        #[test]
        fn rows_are_streams_of_bits(
            bytes in prop::collection::vec(any::<u8>(), 1..40), bits in 1u32..=8, skip in 0u64..20,
        ) {
            let first = skip * u64::from(bits);
            let n = (bytes.len() as u64 * 8).saturating_sub(first) / u64::from(bits);
            let mut out = vec![0; n as usize];
            unpack_row(&bytes, first, bits, &mut out);
            let want: Vec<u8> = (0..n).map(|k| code(&bytes, first + k * u64::from(bits), bits)).collect();
            prop_assert_eq!(out, want);
        }

        #[test]
        fn columns_are_streams_of_bits(
            words in prop::collection::vec(any::<u8>(), 24..200), bits in 1u32..=8, wide in any::<bool>(), columns in 1usize..4,
        ) {
            let size = if wide { 4 } else { 1 };
            let rows = words.len() / size / columns;
            let each = |c: usize| -> Vec<u8> {
                (0..rows).flat_map(|r| words[(r * columns + c) * size..][..size].to_vec()).collect()
            };
            for k in 0..(rows * size) as u64 * 8 / u64::from(bits) {
                let mut out = vec![0; columns];
                unpack_column(&words, size, k * u64::from(bits), bits, &mut out);
                let want: Vec<u8> = (0..columns).map(|c| code(&each(c), k * u64::from(bits), bits)).collect();
                prop_assert_eq!(out, want);
            }
        }
    }

    #[test]
    fn lanes_are_places_in_a_word() {
        let mut out = [0; 8];
        // AutoAWQ: nibble n holds column [0, 2, 4, 6, 1, 3, 5, 7][n].
        unpack_lanes(&0x7654_3210u32.to_le_bytes(), 0, 4, &[0, 4, 1, 5, 2, 6, 3, 7], &mut out);
        assert_eq!(out, [0, 4, 1, 5, 2, 6, 3, 7]);
        // bitsandbytes: the high nibble first.
        let mut out = [0; 3];
        unpack_lanes(&[0x21, 0xf8], 1, 4, &[1, 0], &mut out);
        assert_eq!(out, [1, 15, 8]);
    }

    #[test]
    fn small_floats_have_the_values_of_their_standard() {
        let e2m1 = mini_float(4, true);
        assert_eq!(e2m1[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert_eq!((e2m1[8].to_bits(), e2m1[15]), ((-0.0f32).to_bits(), -6.0));
        assert_eq!(mini_float(4, false)[8].to_bits(), 0);
        let e2m3 = mini_float(6, true);
        assert_eq!((e2m3[1], e2m3[7], e2m3[8], e2m3[31], e2m3[63]), (0.125, 0.875, 1.0, 7.5, -7.5));
    }

    #[test]
    fn the_last_block_may_be_short() {
        let mut values = [1.0; 7];
        by_blocks(&mut values, &[2.0, 3.0, 4.0], 3, 1, |n, v| v.iter_mut().for_each(|v| *v *= n));
        assert_eq!(values, [2.0, 2.0, 3.0, 3.0, 3.0, 4.0, 4.0]);
    }
}
