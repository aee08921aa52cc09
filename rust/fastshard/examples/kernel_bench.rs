//! Throughput of the kernels on one thread, in GB/s of source bytes: `cargo run --release --example
//! kernel_bench [filter]`. Buffers are touched before timing; the figure is the median of the rounds.

use std::hint::black_box;
use std::time::Instant;

use fastshard::kernel::{convert, copy, count_non_finite, is_constant, is_zero, StridedBox};
use fastshard::tensor::Dtype;

const ROUNDS: usize = 9;

fn bench(name: &str, bytes: usize, mut run: impl FnMut()) {
    if std::env::args().nth(1).is_some_and(|filter| !name.contains(&filter)) {
        return;
    }
    run();
    let mut seconds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    println!("{name:34} {:8.2} GB/s", bytes as f64 / seconds[ROUNDS / 2] / 1e9);
}

/// Bits that do not compress and are finite in every float dtype.
fn painted(bytes: usize) -> Vec<u8> {
    let word = |i: usize| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) & 0xbbbb_bbbb_bbbb_bbbb;
    let mut out: Vec<u8> = (0..bytes.div_ceil(8)).flat_map(|i| word(i).to_le_bytes()).collect();
    out.truncate(bytes);
    out
}

fn transpose(item: usize, rows: u64, cols: u64) {
    let bytes = (rows * cols) as usize * item;
    let (src, mut dst) = (painted(bytes), vec![1u8; bytes]);
    let shape = StridedBox { extents: &[rows, cols], src_strides: &[cols, 1], dst_strides: &[1, rows] };
    // Small matrices are repeated, so that a round is long enough to time.
    let repeat = (1 << 26) / bytes.min(1 << 26);
    bench(&format!("transpose {item} B {rows}x{cols}"), bytes * repeat, || {
        for _ in 0..repeat {
            copy(&src, 0, black_box(&mut dst), 0, &shape, item);
        }
    });
}

fn columns(row: u64) {
    let bytes = 1 << 27;
    let (src, mut dst) = (painted(bytes), vec![1u8; 2 * bytes]);
    let shape = StridedBox {
        extents: &[bytes as u64 / row, row / 2],
        src_strides: &[row / 2, 1],
        dst_strides: &[row, 1],
    };
    bench(&format!("column concat {row} B rows"), bytes, || copy(&src, 0, black_box(&mut dst), 0, &shape, 2));
}

fn conversion(from: Dtype, to: Dtype, elements: usize) {
    let (src, mut dst) = (painted(elements * from.size()), vec![1u8; elements * to.size()]);
    let repeat = (1 << 25) / elements.min(1 << 25);
    bench(&format!("convert {from} {to} {elements}"), src.len() * repeat, || {
        for _ in 0..repeat {
            convert(from, &src, to, black_box(&mut dst));
        }
    });
}

fn main() {
    for item in [1, 2, 4, 8] {
        for (rows, cols) in [(4096, 12288), (12288, 4096), (4099, 12281), (1024, 1024)] {
            transpose(item, rows, cols);
        }
    }
    for row in [48, 256, 2048, 8192] {
        columns(row);
    }
    use Dtype::{Bf16, F16, F32, F64};
    for (from, to) in
        [(F32, Bf16), (Bf16, F32), (F32, F16), (F16, F32), (F64, F32), (F32, F64), (F64, Bf16), (Bf16, F16)]
    {
        conversion(from, to, 1 << 26);
        conversion(from, to, 1 << 18);
    }
    // Written to, as an untouched allocation is one page of zeros, mapped many times.
    let mut zeros = vec![1u8; 1 << 27];
    zeros.fill(0);
    let finite = painted(1 << 27);
    for dtype in [F16, Bf16, F32, F64, Dtype::F8E4m3, Dtype::F8E5m2] {
        bench(&format!("count_non_finite {dtype}"), finite.len(), || {
            black_box(count_non_finite(dtype, black_box(&finite)));
        });
    }
    bench("is_zero", zeros.len(), || assert!(is_zero(black_box(&zeros))));
    bench("is_constant", zeros.len(), || assert!(is_constant(black_box(&zeros), 4)));
}
