//! Kernels against the shortest obviously right code, and against torch.

use std::panic::{catch_unwind, AssertUnwindSafe};

use fastshard::kernel::{
    convert, copy, count_non_finite, from_f32, is_constant, is_zero, to_f32, StridedBox,
};
use fastshard::tensor::Dtype;
use proptest::prelude::*;
use proptest::sample::select;

/// A box with everything needed to run it.
#[derive(Debug, Clone)]
struct Case {
    item: usize,
    extents: Vec<u64>,
    src_strides: Vec<u64>,
    dst_strides: Vec<u64>,
    src_base: u64,
    dst_base: u64,
    /// Bytes by which the slices are shifted off their allocation's alignment.
    shift: (usize, usize),
}

impl Case {
    fn shape(&self) -> StridedBox<'_> {
        StridedBox { extents: &self.extents, src_strides: &self.src_strides, dst_strides: &self.dst_strides }
    }

    /// Elements that a slice needs to hold the box.
    fn span(&self, base: u64, strides: &[u64]) -> usize {
        if self.extents.contains(&0) {
            return 0;
        }
        (base + 1 + self.extents.iter().zip(strides).map(|(n, s)| (n - 1) * s).sum::<u64>()) as usize
    }

    fn src_span(&self) -> usize {
        self.span(self.src_base, &self.src_strides)
    }

    fn dst_span(&self) -> usize {
        self.span(self.dst_base, &self.dst_strides)
    }

    /// Element offsets (source, destination) of the whole box, by an index loop.
    fn naive(&self) -> Vec<(usize, usize)> {
        let count: u64 = self.extents.iter().product();
        let pair = |flat: u64| {
            let (mut rest, mut s, mut d) = (flat, self.src_base, self.dst_base);
            for axis in (0..self.extents.len()).rev() {
                let at = rest % self.extents[axis];
                rest /= self.extents[axis];
                s += at * self.src_strides[axis];
                d += at * self.dst_strides[axis];
            }
            (s as usize, d as usize)
        };
        (0..count).map(pair).collect()
    }

    /// Runs the box on painted bytes and compares every byte of the destination, painted before too.
    fn check(&self) {
        let item = self.item;
        let (slack, (s_shift, d_shift)) = (40, self.shift);
        // Every element is painted with its flat index (mixed, so that all of its bytes tell).
        let paint =
            |i: usize| ((i / item) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (8 * (i % item % 8));
        let src: Vec<u8> = (0..s_shift + self.src_span() * item + slack)
            .map(|i| if i < s_shift { 0 } else { paint(i - s_shift) as u8 })
            .collect();
        let mut dst: Vec<u8> =
            (0..d_shift + self.dst_span() * item + slack).map(|i| (i % 251) as u8).collect();
        let mut want = dst.clone();
        for (s, d) in self.naive() {
            let (s, d) = (s_shift + s * item, d_shift + d * item);
            want[d..d + item].copy_from_slice(&src[s..s + item]);
        }
        let s_end = s_shift + self.src_span() * item;
        let d_end = d_shift + self.dst_span() * item;
        copy(
            &src[s_shift..s_end],
            self.src_base,
            &mut dst[d_shift..d_end],
            self.dst_base,
            &self.shape(),
            item,
        );
        assert!(dst == want, "wrong bytes: {self:?}");
    }
}

/// Sizes around the edges of every block in the kernels.
const EDGES: &[u64] = &[1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 127, 128, 129, 257];

/// Strides of a layout that stores the axes in the order `order` (last fastest) with gaps.
fn strides(extents: &[u64], order: &[usize], gaps: &[u64]) -> Vec<u64> {
    let mut out = vec![0; extents.len()];
    let mut next = 1;
    for (&axis, gap) in order.iter().rev().zip(gaps) {
        next += gap;
        out[axis] = next;
        next *= extents[axis].max(1);
    }
    out
}

fn gaps(rank: usize) -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(prop_oneof![6 => Just(0u64), 1 => 1u64..20], rank)
}

fn boxes(extents: Vec<u64>) -> impl Strategy<Value = Case> {
    let rank = extents.len();
    let axes: Vec<usize> = (0..rank).collect();
    let orders = (Just(axes.clone()).prop_shuffle(), Just(axes).prop_shuffle());
    let places = (select(vec![1usize, 2, 4, 8, 16]), 0u64..40, 0u64..40, (0usize..3, 0usize..3));
    (orders, gaps(rank), gaps(rank), places, prop::collection::vec(0u8..12, rank)).prop_map(
        move |((src_order, dst_order), src_gaps, dst_gaps, (item, src_base, dst_base, shift), expand)| {
            let mut src_strides = strides(&extents, &src_order, &src_gaps);
            for (stride, _) in src_strides.iter_mut().zip(&expand).filter(|(_, &e)| e == 0) {
                *stride = 0;
            }
            let dst_strides = strides(&extents, &dst_order, &dst_gaps);
            Case { item, extents: extents.clone(), src_strides, dst_strides, src_base, dst_base, shift }
        },
    )
}

fn small_box() -> impl Strategy<Value = Case> {
    let extent = prop_oneof![1 => Just(0u64), 60 => 1u64..6, 10 => 6u64..10];
    prop::collection::vec(extent, 0..=6).prop_flat_map(boxes)
}

fn edge_box() -> impl Strategy<Value = Case> {
    let edges = prop::collection::vec(select(EDGES), 1..=2);
    (edges, prop::collection::vec(1u64..4, 0..=2))
        .prop_map(|(mut extents, more)| {
            extents.extend(more);
            extents
        })
        .prop_flat_map(boxes)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn copy_of_small_boxes_equals_the_index_loop(case in small_box()) {
        case.check();
    }

    #[test]
    fn a_box_that_leaves_a_slice_panics_and_writes_nothing(
        case in small_box(), short in 1usize..40, source in any::<bool>(),
    ) {
        prop_assume!(!case.extents.contains(&0));
        let (src, mut dst) = (vec![1u8; case.src_span() * case.item], vec![0u8; case.dst_span() * case.item]);
        let cut = |len: usize, cut: bool| if cut { len.saturating_sub(short) } else { len };
        let (s, d) = (cut(src.len(), source), cut(dst.len(), !source));
        prop_assert!(panics(&src[..s], &mut dst[..d], &case));
        prop_assert!(is_zero(&dst));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn copy_at_block_edges_equals_the_index_loop(case in edge_box()) {
        case.check();
    }

    #[test]
    fn numbers_near_overflow_panic(
        extents in prop::collection::vec(select(vec![1u64, 2, 3, 1 << 32, u64::MAX / 2, u64::MAX]), 1..4),
        huge in prop::collection::vec(select(vec![0u64, 1, 2, 1 << 31, 1 << 63, u64::MAX]), 4),
        at_source in any::<bool>(),
    ) {
        let (far, near) = (huge[..extents.len()].to_vec(), vec![1; extents.len()]);
        let (src_strides, dst_strides) = if at_source { (far, near) } else { (near, far) };
        let case = Case { item: 16, extents, src_strides, dst_strides, src_base: huge[3], dst_base: 0, shift: (0, 0) };
        let inside = case.src_base == 0 && case.extents.iter().all(|&n| n == 1);
        prop_assert_eq!(panics(&[1; 16], &mut [0; 16], &case), !inside);
    }
}

fn panics(src: &[u8], dst: &mut [u8], case: &Case) -> bool {
    let run = || copy(src, case.src_base, dst, case.dst_base, &case.shape(), case.item);
    catch_unwind(AssertUnwindSafe(run)).is_err()
}

#[test]
fn copy_refuses_a_malformed_box() {
    let base = Case {
        item: 1,
        extents: vec![1],
        src_strides: vec![1],
        dst_strides: vec![1],
        src_base: 0,
        dst_base: 0,
        shift: (0, 0),
    };
    let refused = |case: Case| panics(&[0; 64], &mut [0; 64], &case);
    assert!(!refused(base.clone()));
    assert!(refused(Case { item: 3, ..base.clone() }));
    assert!(refused(Case { src_strides: vec![], ..base.clone() }));
    assert!(refused(Case { dst_strides: vec![1, 1], ..base.clone() }));
    assert!(refused(Case { extents: vec![2], dst_strides: vec![0], ..base.clone() }));
}

/// As many dimensions as torch has, and those that a tensor of them all longer than one can have here.
#[test]
fn boxes_of_many_axes_equal_the_index_loop() {
    let twos = |rank: usize| -> Vec<u64> { (0..rank).map(|k| 1 << k).collect() };
    for rank in [15, 16, 17, 18] {
        for turn in [0, 1, 5, rank - 1] {
            let (mut src_strides, dst_strides) = (twos(rank), twos(rank));
            src_strides.rotate_left(turn);
            let extents = vec![2; rank];
            for shift in [(0, 0), (1, 3)] {
                let (extents, src_strides, dst_strides) =
                    (extents.clone(), src_strides.clone(), dst_strides.clone());
                Case { item: 2, extents, src_strides, dst_strides, src_base: 0, dst_base: 0, shift }.check();
            }
        }
    }
    let mut extents = vec![1; 64];
    (extents[3], extents[60]) = (7, 5);
    let (mut src_strides, mut dst_strides) = (vec![9; 64], vec![4; 64]);
    (src_strides[3], src_strides[60], dst_strides[3], dst_strides[60]) = (5, 1, 1, 7);
    Case { item: 4, extents, src_strides, dst_strides, src_base: 2, dst_base: 1, shift: (0, 0) }.check();
}

/// Large enough for every fast path, including streaming stores; aligned and not.
#[test]
fn large_transposes_equal_the_index_loop() {
    for (item, rows, cols) in
        [(2, 2048, 4160), (2, 2050, 4097), (4, 2048, 2064), (4, 1031, 2047), (8, 1024, 1040)]
    {
        for shift in [(0, 0), (1, 0), (0, 2), (0, 8)] {
            let (src_strides, dst_strides) = (vec![cols, 1], vec![1, rows]);
            let extents = vec![rows, cols];
            Case { item, extents, src_strides, dst_strides, src_base: 0, dst_base: 0, shift }.check();
        }
    }
}

fn hex(text: &serde_json::Value) -> u64 {
    u64::from_str_radix(text.as_str().expect("hex string"), 16).expect("hex string")
}

/// Repeats the patterns so that they pass through vector bodies and tails at every position.
#[test]
fn conversions_equal_torch() {
    let golden: serde_json::Value = serde_json::from_str(include_str!("../data/cast_golden.json")).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 10);
    for case in cases {
        let dtype = |key: &str| Dtype::from_safetensors(case[key].as_str().unwrap()).unwrap();
        let (from, to) = (dtype("from"), dtype("to"));
        let (mut src, mut want) = (Vec::new(), Vec::new());
        for pair in case["pairs"].as_array().unwrap() {
            src.extend_from_slice(&hex(&pair[0]).to_le_bytes()[..from.size()]);
            want.extend_from_slice(&hex(&pair[1]).to_le_bytes()[..to.size()]);
        }
        let count = src.len() / from.size();
        for skip in (0..20).chain([count - 1]) {
            let mut got = vec![0xaa; (count - skip) * to.size()];
            convert(from, &src[skip * from.size()..], to, &mut got);
            for (i, (got, want)) in
                got.chunks(to.size()).zip(want[skip * to.size()..].chunks(to.size())).enumerate()
            {
                let bits = &src[(skip + i) * from.size()..][..from.size()];
                assert_eq!(got, want, "{from} to {to}: {bits:02x?} after {skip}");
            }
        }
    }
}

#[test]
fn every_half_pattern_survives_f32() {
    let patterns: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let (mut wide, mut back) = (vec![0f32; 1 << 16], vec![0u8; 1 << 17]);
        to_f32(dtype, &patterns, &mut wide);
        from_f32(dtype, &wide, &mut back);
        for (bits, back) in (0..=u16::MAX).zip(back.chunks(2)) {
            let want = match dtype {
                Dtype::F16 if bits & 0x7fff > 0x7c00 => bits | 0x0200,
                Dtype::Bf16 if bits & 0x7fff > 0x7f80 => 0x7fc0,
                _ => bits,
            };
            assert_eq!(u16::from_le_bytes([back[0], back[1]]), want, "{dtype} {bits:04x}");
        }
        // The same through f64, in which every half is exact too.
        let mut double = vec![0u8; 1 << 19];
        convert(dtype, &patterns, Dtype::F64, &mut double);
        let mut again = vec![0u8; 1 << 17];
        convert(Dtype::F64, &double, dtype, &mut again);
        assert!(again == back);
    }
}

#[test]
fn conversion_of_any_length_and_alignment_is_elementwise() {
    let src: Vec<u8> = (0..9000u32).flat_map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    for from in [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64] {
        for to in [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64] {
            let (a, b) = (from.size(), to.size());
            let one = |x: &[u8]| {
                let mut y = vec![0; b];
                convert(from, x, to, &mut y);
                y
            };
            for count in (0..70).chain([1023, 1024, 1025, 2500]) {
                let src = &src[1..][..count * a];
                let mut dst = vec![0xaa; count * b + 2];
                convert(from, src, to, &mut dst[1..][..count * b]);
                let want: Vec<u8> = src.chunks(a).flat_map(one).collect();
                assert!(dst[1..][..count * b] == want, "{from} to {to}, {count} elements");
                assert_eq!((dst[0], dst[count * b + 1]), (0xaa, 0xaa));
            }
        }
    }
}

#[test]
fn non_finite_elements_are_counted() {
    use Dtype::*;
    let whole: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    assert_eq!(count_non_finite(F16, &whole), 2048);
    assert_eq!(count_non_finite(Bf16, &whole), 256);
    assert_eq!(count_non_finite(F8E4m3, &whole), 2 * 512);
    assert_eq!(count_non_finite(F8E5m2, &whole), 8 * 512);
    assert_eq!(count_non_finite(I16, &whole), 0);
    let bad32 = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    let bad64 = [f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    for len in (0..200).chain([65_535, 65_536, 65_537, 200_000]) {
        let (mut x, mut y) = (vec![f32::MAX; len], vec![f64::MIN_POSITIVE; len]);
        let mut want = 0;
        for i in (0..len).step_by(3) {
            (x[i], y[i]) = (bad32[i % 4], bad64[i % 4]);
            want += 1;
        }
        let x: Vec<u8> = x.iter().flat_map(|v| v.to_le_bytes()).collect();
        let y: Vec<u8> = y.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(count_non_finite(F32, &x), want);
        assert_eq!(count_non_finite(F64, &y), want);
        let all_nan = vec![0xff; len * 2];
        for (dtype, elements) in [(F16, len), (Bf16, len), (F8E4m3, 2 * len), (F8E5m2, 2 * len)] {
            assert_eq!(count_non_finite(dtype, &all_nan), elements as u64, "{dtype}");
        }
    }
}

#[test]
fn constants_and_zeros_are_seen() {
    assert!(is_constant(&[], 4) && is_zero(&[]));
    assert!(is_constant(&[1, 2, 1, 2, 1, 2], 2));
    assert!(!is_constant(&[1, 2, 1, 2, 1, 2], 1));
    for len in 1..200 {
        let mut bytes = vec![0; len];
        assert!(is_zero(&bytes) && is_constant(&bytes, 1));
        for at in [0, len / 2, len - 1] {
            bytes[at] = 1;
            assert!(!is_zero(&bytes));
            assert_eq!(is_constant(&bytes, 1), len == 1);
            bytes[at] = 0;
        }
    }
    assert!(!is_zero(&[7; 100]));
}
