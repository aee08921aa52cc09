//! The loops that touch every byte: strided box copies, dtype conversion and value scans.
//!
//! Everything here is single-threaded; callers split work into tiles. These modules and `storage` are the
//! only ones in which `unsafe` is allowed. Each public function proves its bounds once, before the first byte
//! moves, and the loops below rely on that proof.

mod codes;
mod convert;
mod copy;
mod heap;
mod low_rank;
mod recount;
mod scan;
mod tally;
mod transpose;

pub use codes::{by_blocks, look_up, mini_float, unpack_column, unpack_lanes, unpack_row};
pub use convert::{bytes, convert, f8_value, f8_values, from_f32, round, to_f32};
pub use copy::{copy, StridedBox};
pub use heap::{allocate_zeros, trim};
pub use low_rank::product;
pub use recount::recount;
pub use scan::{count_non_finite, filled, is_constant, is_zero};
pub use tally::{count_bytes, float_block, FloatBlock};

/// Elements of any float dtype, 8-bit ones included, as f32.
pub fn values(dtype: crate::tensor::Dtype, bytes: &[u8], out: &mut [f32]) {
    if dtype.is_f8() {
        f8_values(dtype, bytes, out);
    } else {
        to_f32(dtype, bytes, out);
    }
}

#[cfg(target_endian = "big")]
compile_error!("tensor bytes are little endian and are viewed as native numbers");
