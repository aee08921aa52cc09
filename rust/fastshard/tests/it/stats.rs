//! Statistics against a naive oracle: one loop over all elements, element by element.

use fastshard::kernel;
use fastshard::stats::{edges, Accumulator, Number, TensorStats, ZeroSlab, BINS, MAX_RANGES};
use fastshard::tensor::Dtype;
use proptest::prelude::*;

const DTYPES: [Dtype; 20] = [
    Dtype::Bool,
    Dtype::U8,
    Dtype::I8,
    Dtype::U16,
    Dtype::I16,
    Dtype::U32,
    Dtype::I32,
    Dtype::U64,
    Dtype::I64,
    Dtype::F16,
    Dtype::Bf16,
    Dtype::F32,
    Dtype::F64,
    Dtype::C64,
    Dtype::C128,
    Dtype::F8E4m3,
    Dtype::F8E5m2,
    Dtype::F8E4m3fnuz,
    Dtype::F8E5m2fnuz,
    Dtype::F8E8m0,
];

/// The numbers of an element: (as f64, exactly where it is an integer).
fn numbers(dtype: Dtype, x: &[u8]) -> Vec<(f64, Option<i128>)> {
    fn int(x: i128) -> Vec<(f64, Option<i128>)> {
        vec![(x as f64, Some(x))]
    }
    fn array<const N: usize>(x: &[u8]) -> [u8; N] {
        x.try_into().unwrap()
    }
    let f32s = |x: &[u8]| (f64::from(f32::from_le_bytes(array(x))), None);
    let f64s = |x: &[u8]| (f64::from_le_bytes(array(x)), None);
    match dtype {
        Dtype::Bool => int(i128::from(x[0] != 0)),
        Dtype::U8 => int(x[0].into()),
        Dtype::I8 => int((x[0] as i8).into()),
        Dtype::U16 => int(u16::from_le_bytes(array(x)).into()),
        Dtype::I16 => int(i16::from_le_bytes(array(x)).into()),
        Dtype::U32 => int(u32::from_le_bytes(array(x)).into()),
        Dtype::I32 => int(i32::from_le_bytes(array(x)).into()),
        Dtype::U64 => int(u64::from_le_bytes(array(x)).into()),
        Dtype::I64 => int(i64::from_le_bytes(array(x)).into()),
        Dtype::F16 => vec![(half::f16::from_le_bytes(array(x)).to_f64(), None)],
        Dtype::Bf16 => vec![(half::bf16::from_le_bytes(array(x)).to_f64(), None)],
        Dtype::F32 => vec![f32s(x)],
        Dtype::F64 => vec![f64s(x)],
        Dtype::C64 => vec![f32s(&x[..4]), f32s(&x[4..])],
        Dtype::C128 => vec![f64s(&x[..8]), f64s(&x[8..])],
        f8 => vec![(f64::from(kernel::f8_value(f8, x[0])), None)],
    }
}

fn oracle(dtype: Dtype, shape: &[u64], bytes: &[u8]) -> TensorStats {
    let elements: Vec<_> = bytes.chunks(dtype.size()).map(|x| numbers(dtype, x)).collect();
    let all: Vec<_> = elements.iter().flatten().copied().collect();
    let finite: Vec<_> = all.iter().filter(|(x, _)| x.is_finite()).copied().collect();
    let edges = edges();
    let mut histogram = vec![0; BINS];
    for (x, _) in finite.iter().filter(|(x, _)| *x != 0.0) {
        // A positive number lies at or above its lower edge, a negative one at or below its upper edge.
        let bin = edges.iter().filter(|e| if *x > 0.0 { *e <= x } else { *e < x }).count();
        histogram[bin] += 1;
    }
    let n = finite.len() as f64;
    let mean = finite.iter().map(|x| x.0 / n).sum::<f64>();
    let std = finite.iter().map(|x| (x.0 - mean) * (x.0 - mean) / n).sum::<f64>().sqrt();
    let number = |x: &(f64, Option<i128>)| x.1.map_or(Number::Float(x.0 + 0.0), Number::Int);
    let is_zero: Vec<bool> = elements.iter().map(|e| e.iter().all(|x| x.0 == 0.0)).collect();
    let mut zero_slabs = Vec::new();
    if shape.iter().filter(|n| **n > 1).count() > 1 && is_zero.contains(&false) {
        for (dim, &extent) in shape.iter().enumerate().filter(|(_, n)| **n > 1) {
            let inner: u64 = shape[dim + 1..].iter().product();
            let zero = |i: u64| {
                let of = |e: usize| e as u64 / inner % extent == i;
                is_zero.iter().enumerate().filter(|(e, _)| of(*e)).all(|(_, zero)| *zero)
            };
            let indices: Vec<u64> = (0..extent).filter(|&i| zero(i)).collect();
            let mut ranges: Vec<[u64; 2]> = Vec::new();
            for &i in &indices {
                match ranges.last_mut() {
                    Some(last) if last[1] == i => last[1] += 1,
                    _ => ranges.push([i, i + 1]),
                }
            }
            if !indices.is_empty() {
                zero_slabs.push(ZeroSlab { dim, indices: indices.len() as u64, ranges });
            }
        }
    }
    TensorStats {
        count: all.len() as u64,
        zeros: all.iter().filter(|(x, _)| *x == 0.0).count() as u64,
        nan: all.iter().filter(|(x, _)| x.is_nan()).count() as u64,
        inf: all.iter().filter(|(x, _)| x.is_infinite()).count() as u64,
        min: finite.iter().map(number).reduce(Number::min),
        max: finite.iter().map(number).reduce(Number::max),
        mean: (n > 0.0 && mean.is_finite()).then_some(mean),
        std: (n > 0.0 && std.is_finite()).then_some(std),
        histogram,
        zero_slabs,
    }
}

/// Equal but for the rounding of sums.
fn assert_same(got: &TensorStats, want: &TensorStats, about: &str) {
    let close = |a: Option<f64>, b: Option<f64>| match (a, b) {
        (Some(a), Some(b)) => {
            let scale =
                want.max.map_or(0.0, |x| x.to_f64().abs()).max(want.min.map_or(0.0, |x| x.to_f64().abs()));
            (a - b).abs() <= 1e-9 * scale
        }
        (a, b) => a.is_none() == b.is_none(),
    };
    // Squares of numbers near f64's end overflow in one order and not in another.
    let huge = want.max.is_some_and(|x| x.to_f64() > 1e150) || want.min.is_some_and(|x| x.to_f64() < -1e150);
    assert!(huge || close(got.mean, want.mean), "{about}: mean {:?}, not {:?}", got.mean, want.mean);
    assert!(huge || close(got.std, want.std), "{about}: std {:?}, not {:?}", got.std, want.std);
    let exact = |s: &TensorStats| TensorStats { mean: None, std: None, ..s.clone() };
    assert_eq!(exact(got), exact(want), "{about}");
}

fn in_tiles(dtype: Dtype, shape: &[u64], bytes: &[u8], tile: usize, order: &[usize]) -> TensorStats {
    let accumulator = Accumulator::new(dtype, shape);
    let mut tiles: Vec<(usize, &[u8])> = bytes.chunks(tile).enumerate().collect();
    for (i, &pick) in order.iter().enumerate().take(tiles.len()) {
        let last = tiles.len() - 1;
        tiles.swap(i, pick % (last + 1));
    }
    for (i, bytes) in tiles {
        accumulator.add((i * tile) as u64, bytes);
    }
    accumulator.finish().unwrap()
}

/// Bytes with what matters in them: zeros of both signs, NaN, infinities, and whole slabs of zeros.
fn content(dtype: Dtype, shape: &[u64], seed: u64, wild: bool, slabs: &[(usize, u64, u64)]) -> Vec<u8> {
    let n = shape.iter().product::<u64>();
    let item = dtype.size();
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes = Vec::new();
    for e in 0..n {
        let mut element: Vec<u8> = (0..item).map(|_| (next() >> 24) as u8).collect();
        let within = |&(dim, start, len): &(usize, u64, u64)| {
            let inner: u64 = shape[dim + 1..].iter().product();
            let i = e / inner % shape[dim];
            (start..start + len).contains(&i)
        };
        if slabs.iter().any(within) || next() % 16 == 0 {
            element.fill(0);
            let signed = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64, Dtype::F8E4m3];
            if signed.contains(&dtype) && next() % 2 == 0 {
                element[item - 1] = 0x80;
            }
        } else if !wild {
            // Numbers of usual size, for which sums are exact enough to be compared.
            let x = (next() % 2001) as f32 / 1000.0 - 1.0;
            match dtype {
                Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64 => {
                    kernel::from_f32(dtype, &[x], &mut element);
                }
                _ => {}
            }
        }
        bytes.extend(element);
    }
    bytes
}

fn shapes() -> impl Strategy<Value = Vec<u64>> {
    prop_oneof![
        prop::collection::vec(0u64..9, 0..5),
        prop::collection::vec(1u64..14, 2..5),
        (1u64..5, 60u64..200).prop_map(|(a, b)| vec![a, b]),
        (60u64..200, 1u64..5).prop_map(|(a, b)| vec![a, b]),
        (100u64..300, 30u64..140).prop_map(|(a, b)| vec![a, b]),
        (1u64..4, 100u64..300, 1u64..20).prop_map(|(a, b, c)| vec![a, b, c]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn statistics_are_those_of_the_oracle(
        dtype in prop::sample::select(&DTYPES[..]),
        shape in shapes(),
        seed in any::<u64>(),
        wild in any::<bool>(),
        cuts in prop::collection::vec((any::<usize>(), any::<u64>(), any::<u64>()), 0..3),
        tile in 1usize..5000,
        order in prop::collection::vec(any::<usize>(), 0..64),
    ) {
        let slabs: Vec<(usize, u64, u64)> = cuts
            .iter()
            .filter(|_| !shape.is_empty() && !shape.contains(&0))
            .map(|(d, start, len)| {
                let dim = d % shape.len();
                (dim, start % shape[dim], len % shape[dim] + 1)
            })
            .collect();
        let bytes = content(dtype, &shape, seed, wild, &slabs);
        let got = in_tiles(dtype, &shape, &bytes, tile * dtype.size(), &order);
        let want = oracle(dtype, &shape, &bytes);
        assert_same(&got, &want, &format!("{dtype} {shape:?}"));
        got.check(dtype, &shape).unwrap();
        // What a manifest keeps of them is them, but for the last bit of a fraction.
        let text = serde_json::to_string(&got).unwrap();
        let read: TensorStats = serde_json::from_str(&text).unwrap();
        read.check(dtype, &shape).unwrap();
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-15 * a.abs();
        for (a, b) in [(got.min, read.min), (got.max, read.max)] {
            let same = match (a, b) {
                (Some(Number::Float(a)), Some(Number::Float(b))) => near(a, b),
                (a, b) => a == b,
            };
            prop_assert!(same, "{:?} {:?}", a, b);
        }
        for (a, b) in [(got.mean, read.mean), (got.std, read.std)] {
            prop_assert!(a.is_some() == b.is_some() && a.zip(b).is_none_or(|(a, b)| near(a, b)));
        }
        let exact = |s: &TensorStats| TensorStats { min: None, max: None, mean: None, std: None, ..s.clone() };
        prop_assert_eq!(exact(&read), exact(&got));
        let alone = Accumulator::of_slabs(dtype, &shape);
        bytes.chunks(tile * dtype.size()).enumerate().for_each(|(i, b)| {
            alone.add((i * tile * dtype.size()) as u64, b);
        });
        prop_assert_eq!(alone.zero_slabs(), want.zero_slabs);
        prop_assert!(alone.finish().is_none());
    }

    #[test]
    fn the_order_of_tiles_changes_no_bit(seed in any::<u64>(), order in prop::collection::vec(any::<usize>(), 0..64)) {
        let shape = [97, 211];
        let bytes = content(Dtype::F32, &shape, seed, false, &[]);
        let tile = 1024 * 4;
        prop_assert_eq!(
            in_tiles(Dtype::F32, &shape, &bytes, tile, &order),
            in_tiles(Dtype::F32, &shape, &bytes, tile, &[])
        );
    }
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

#[test]
fn bins_are_where_the_documentation_says() {
    let edges = edges();
    assert_eq!((edges.len(), edges[31]), (BINS - 1, 0.0));
    assert_eq!((edges[32], edges[62]), (2f64.powi(-24), 64.0));
    let tiny = 2f32.powi(-24);
    for (x, bin) in [
        (tiny, 33),
        (tiny / 2.0, 32),
        (f32::from_bits(1), 32),
        (-tiny, 30),
        (-f32::from_bits(1), 31),
        (64.0, 63),
        (63.99, 62),
        (f32::MAX, 63),
        (f32::MIN, 0),
        (0.5, 56),
        (-0.5, 7),
    ] {
        let stats = in_tiles(Dtype::F32, &[1], &floats(&[x]), 4, &[]);
        assert_eq!(stats.histogram.iter().position(|n| *n == 1), Some(bin), "{x:e}");
    }
}

#[test]
fn a_constant_has_no_deviation_and_sums_do_not_cancel() {
    let stats = in_tiles(Dtype::F32, &[10_000], &floats(&[1e8; 10_000]), 4096, &[]);
    assert_eq!((stats.mean, stats.std), (Some(1e8), Some(0.0)));
    // Steps of 8 around 1e8: a sum of plain squares would lose them.
    let values: Vec<f32> = (0..10_000).map(|i| 1e8 + 8.0 * (i % 2) as f32).collect();
    let stats = in_tiles(Dtype::F32, &[10_000], &floats(&values), 4096, &[]);
    assert!((stats.std.unwrap() - 4.0).abs() < 1e-9, "{stats:?}");
}

#[test]
fn integers_keep_their_extremes() {
    let bytes: Vec<u8> = [u64::MAX, u64::MAX - 1, 1].iter().flat_map(|x| x.to_le_bytes()).collect();
    let stats = in_tiles(Dtype::U64, &[3], &bytes, 8, &[2, 1]);
    assert_eq!((stats.min, stats.max), (Some(Number::Int(1)), Some(Number::Int(u64::MAX.into()))));
    assert!(serde_json::to_string(&stats).unwrap().contains("\"max\":18446744073709551615"));
    let bytes: Vec<u8> = [i64::MIN, i64::MIN + 1].iter().flat_map(|x| x.to_le_bytes()).collect();
    let stats = in_tiles(Dtype::I64, &[2], &bytes, 8, &[]);
    assert!(serde_json::to_string(&stats).unwrap().contains("\"min\":-9223372036854775808"));
}

#[test]
fn many_ranges_are_counted_and_the_longest_kept() {
    let (rows, columns) = (4, 1000u64);
    // Every other column is zero, and the last hundred.
    let value = |i: u64| if i % columns % 2 == 1 || i % columns >= 900 { 0.0 } else { 1.0 };
    let bytes = floats(&(0..rows * columns).map(value).collect::<Vec<f32>>());
    let stats = in_tiles(Dtype::F32, &[rows, columns], &bytes, 1 << 20, &[]);
    let [slab] = &stats.zero_slabs[..] else { panic!("{stats:?}") };
    assert_eq!((slab.dim, slab.indices, slab.ranges.len()), (1, 550, MAX_RANGES));
    assert_eq!(slab.ranges.last(), Some(&[899, 1000]));
    assert!(slab.text(2).starts_with("columns 1, 3, 5, 7 and 546 more"), "{}", slab.text(2));
    assert!(slab.text(3).ends_with("of dim 1"), "{}", slab.text(3));
}

#[test]
fn threads_may_add_at_once() {
    let shape = [512, 300];
    let bytes = content(Dtype::Bf16, &shape, 7, false, &[(1, 100, 50), (0, 0, 3)]);
    let accumulator = Accumulator::new(Dtype::Bf16, &shape);
    let tiles: Vec<_> = bytes.chunks(2048).enumerate().collect();
    std::thread::scope(|scope| {
        for t in 0..4 {
            let (accumulator, tiles) = (&accumulator, &tiles);
            scope.spawn(move || {
                tiles.iter().skip(t).step_by(4).for_each(|(i, b)| accumulator.add(*i as u64 * 2048, b));
            });
        }
    });
    assert_eq!(accumulator.finish().unwrap(), in_tiles(Dtype::Bf16, &shape, &bytes, 2048, &[]));
}

#[test]
fn statistics_that_cannot_be_are_refused() {
    let shape = [4, 6];
    let good = in_tiles(Dtype::F32, &shape, &content(Dtype::F32, &shape, 3, false, &[(1, 2, 2)]), 16, &[]);
    good.check(Dtype::F32, &shape).unwrap();
    type Change = fn(&mut TensorStats);
    let changes: &[(&str, Change)] = &[
        ("count", |s| s.count += 1),
        ("zeros", |s| s.zeros = u64::MAX),
        ("bins", |s| s.histogram.push(0)),
        ("sum", |s| s.histogram[40] += 1),
        ("order", |s| std::mem::swap(&mut s.min, &mut s.max)),
        ("extremes", |s| s.min = None),
        ("std", |s| s.std = Some(-1.0)),
        ("mean", |s| s.mean = Some(f64::INFINITY)),
        ("dim", |s| s.zero_slabs[0].dim = 2),
        ("order of dims", |s| s.zero_slabs.push(s.zero_slabs[0].clone())),
        ("range", |s| s.zero_slabs[0].ranges = vec![[2, 7]]),
        ("empty range", |s| s.zero_slabs[0].ranges = vec![[2, 2]]),
        ("no range", |s| s.zero_slabs[0].ranges.clear()),
        ("overlap", |s| s.zero_slabs[0].ranges = vec![[2, 4], [3, 4]]),
        ("too many", |s| s.zero_slabs[0].ranges = vec![[2, 3]; MAX_RANGES + 1]),
        ("all", |s| s.zero_slabs[0].indices = 6),
    ];
    for (what, change) in changes {
        let mut bad = good.clone();
        change(&mut bad);
        assert!(bad.check(Dtype::F32, &shape).is_err(), "{what}");
    }
    assert!(good.check(Dtype::F32, &[4, 7]).is_err());
    assert!(good.check(Dtype::C64, &shape).is_err());
    assert!(good.check(Dtype::F32, &[u64::MAX, 6]).is_err());
}

/// Bytes per second of one thread, printed: `cargo test --release --test it stats:: -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn speed() {
    let n = 64 << 20;
    for (dtype, shape, what) in [
        (Dtype::F32, vec![4096, 4096], "dense"),
        (Dtype::Bf16, vec![8192, 4096], "dense"),
        (Dtype::F16, vec![8192, 4096], "dense"),
        (Dtype::F8E4m3, vec![8192, 8192], "dense"),
        (Dtype::F64, vec![2048, 4096], "dense"),
        (Dtype::I64, vec![2048, 4096], "dense"),
        (Dtype::F32, vec![4 << 20, 4], "short rows, one column zero"),
        (Dtype::Bf16, vec![16 << 20, 2], "short rows, one column zero"),
        (Dtype::Bf16, vec![8192, 4096], "half of the columns zero"),
        (Dtype::Bf16, vec![8192, 4096], "every other column zero"),
        (Dtype::F32, vec![4096, 4096], "zero but for one element"),
    ] {
        let columns = *shape.last().unwrap();
        let mut bytes = content(dtype, &[(n / dtype.size()) as u64], 11, false, &[]);
        let zero = |column: u64| match what {
            "dense" => false,
            "half of the columns zero" => column >= columns / 2,
            "every other column zero" => column % 2 == 1,
            "zero but for one element" => true,
            _ => column == 1,
        };
        bytes.chunks_mut(dtype.size()).enumerate().for_each(|(i, x)| {
            if zero(i as u64 % columns) {
                x.fill(0);
            }
        });
        if what == "zero but for one element" {
            bytes[n - 1] = 1;
        }
        let rate = |accumulator: Accumulator| {
            let start = std::time::Instant::now();
            bytes.chunks(1 << 20).enumerate().for_each(|(i, b)| accumulator.add((i as u64) << 20, b));
            std::hint::black_box((accumulator.zero_slabs(), accumulator.finish()));
            n as f64 / start.elapsed().as_secs_f64() / 1e9
        };
        let best = |make: &dyn Fn() -> Accumulator| (0..3).map(|_| rate(make())).fold(0.0, f64::max);
        println!(
            "{dtype} {shape:?} {what}: {:.1} GB/s, slabs alone {:.1} GB/s",
            best(&|| Accumulator::new(dtype, &shape)),
            best(&|| Accumulator::of_slabs(dtype, &shape))
        );
    }
}
