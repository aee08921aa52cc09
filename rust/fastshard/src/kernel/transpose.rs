//! Blocked transposes: the box copies where source and destination run along different axes.

use super::copy::Axis;

/// An element that moves as one word; neither side needs to be aligned.
pub(super) trait Item: Copy {
    /// Edge of the square that [`Item::square`] moves, or 0 where there is no such kernel.
    #[allow(dead_code)]
    const EDGE: usize = 0;

    /// Transposes one `EDGE` x `EDGE` square: row `r`, column `c` of the source is at `src + r * src_row`
    /// + `c` items, and goes to `dst + c * dst_row` + `r` items.
    ///
    /// # Safety
    /// The square is readable at `src` and writable at `dst`.
    #[allow(unsafe_code)]
    unsafe fn square(_src: *const u8, _src_row: usize, _dst: *mut u8, _dst_row: usize) {
        unreachable!("no square kernel for this item")
    }
}

impl Item for u8 {}
impl Item for u64 {}
impl Item for u128 {}
#[cfg(not(target_arch = "x86_64"))]
impl Item for u16 {}
#[cfg(not(target_arch = "x86_64"))]
impl Item for u32 {}

/// Copies a two-axis box: `rows` is dense in the destination, `cols` in the source.
///
/// # Safety
/// Every element of the box is readable from `src` and writable at `dst`, and the two do not overlap.
#[allow(unsafe_code)]
pub(super) unsafe fn transpose<T: Item>(rows: Axis, cols: Axis, src: *const u8, dst: *mut u8) {
    // SAFETY: every block is a part of the box.
    unsafe {
        let block = 64 / size_of::<T>();
        for r in (0..rows.len).step_by(block) {
            for c in (0..cols.len).step_by(block) {
                let r_len = block.min(rows.len - r);
                let c_len = block.min(cols.len - c);
                let s = src.add(r * rows.src + c * cols.src);
                let d = dst.add(r * rows.dst + c * cols.dst);
                scalar::<T>(Axis { len: r_len, ..rows }, Axis { len: c_len, ..cols }, s, d);
            }
        }
    }
}

/// Moves one block, element by element.
///
/// # Safety
/// As [`transpose`].
#[allow(unsafe_code)]
#[inline]
unsafe fn scalar<T: Item>(rows: Axis, cols: Axis, src: *const u8, dst: *mut u8) {
    for c in 0..cols.len {
        for r in 0..rows.len {
            // SAFETY: (r, c) is an element of the box.
            unsafe {
                let value = src.add(r * rows.src + c * cols.src).cast::<T>().read_unaligned();
                dst.add(r * rows.dst + c * cols.dst).cast::<T>().write_unaligned(value);
            }
        }
    }
}
#[cfg(target_arch = "x86_64")]
impl Item for u16 {}
#[cfg(target_arch = "x86_64")]
impl Item for u32 {}
