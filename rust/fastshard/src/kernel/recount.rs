//! Integers in another integer type, refused where they do not fit.

use crate::tensor::Dtype;

/// Turns integers of one type into another; the first that does not fit is the error.
///
/// # Panics
/// If one of the types is no integer, or the lengths do not fit each other.
pub fn recount(from: Dtype, src: &[u8], to: Dtype, dst: &mut [u8]) -> Result<(), i128> {
    assert!(from.is_integer() && to.is_integer(), "cannot count {from} as {to}");
    let (wide, narrow) = (from.size(), to.size());
    assert!(src.len().is_multiple_of(wide) && src.len() / wide * narrow == dst.len());
    let (low, high) = range(to);
    for (value, place) in src.chunks_exact(wide).zip(dst.chunks_exact_mut(narrow)) {
        let negative = is_signed(from) && value[wide - 1] >= 0x80;
        let mut bytes = [if negative { 0xff } else { 0 }; 16];
        bytes[..wide].copy_from_slice(value);
        let number = i128::from_le_bytes(bytes);
        if !(low..=high).contains(&number) {
            return Err(number);
        }
        place.copy_from_slice(&number.to_le_bytes()[..narrow]);
    }
    Ok(())
}

fn is_signed(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64)
}

fn range(dtype: Dtype) -> (i128, i128) {
    let bits = dtype.size() as u32 * 8;
    match is_signed(dtype) {
        true => (-(1 << (bits - 1)), (1 << (bits - 1)) - 1),
        false => (0, (1 << bits) - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_fit_or_are_refused() {
        let ints =
            [Dtype::I8, Dtype::U8, Dtype::I16, Dtype::U16, Dtype::I32, Dtype::U32, Dtype::I64, Dtype::U64];
        for from in ints {
            for to in ints {
                let ((low, high), (least, most)) = (range(from), range(to));
                for number in
                    [low, high, 0, 1, -1, 127, 128, 255, 256, i128::from(u32::MAX), i128::from(i32::MAX)]
                {
                    if !(low..=high).contains(&number) {
                        continue;
                    }
                    let mut out = vec![0; to.size()];
                    let result = recount(from, &number.to_le_bytes()[..from.size()], to, &mut out);
                    if (least..=most).contains(&number) {
                        assert_eq!(result, Ok(()), "{number} {from} {to}");
                        assert_eq!(out, &number.to_le_bytes()[..to.size()]);
                    } else {
                        assert_eq!(result, Err(number), "{number} {from} {to}");
                    }
                }
            }
        }
    }
}
