//! Strided boxes cut at a range: the one geometric operation under everything.
//!
//! A box of extents `e` placed in a linear space by `base + sum(i[k] * stride[k])` is cut at
//! `lo..hi` of that space into at most `2 * rank - 1` boxes. Output tiles, tensor dimensions and
//! flat partitions are all such ranges.

/// Axes of a box in one linear space. `order` lists the axes by falling stride.
#[derive(Debug, Clone)]
pub struct Spread {
    base: u64,
    strides: Vec<u64>,
    order: Vec<usize>,
}

/// A part of a box: first index and extent per axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubBox {
    /// First index on each axis.
    pub start: Vec<u64>,
    /// Extent on each axis.
    pub len: Vec<u64>,
}

impl SubBox {
    /// The whole of a box.
    pub fn whole(extents: &[u64]) -> SubBox {
        SubBox { start: vec![0; extents.len()], len: extents.to_vec() }
    }

    /// Number of elements.
    pub fn volume(&self) -> u64 {
        self.len.iter().product()
    }

    /// Divides the box into boxes of at most `most` elements. It cuts the axis of the longest of `steps`
    /// first, so that elements a short step apart stay together.
    pub fn divide(&self, steps: &[u64], most: u64, out: &mut Vec<SubBox>) {
        let volume = self.volume();
        let longest = (0..steps.len()).filter(|&k| self.len[k] > 1).max_by_key(|&k| steps[k]);
        let (true, Some(axis)) = (volume > most, longest) else {
            out.push(self.clone());
            return;
        };
        let n = self.len[axis];
        let each = (most / (volume / n)).max(1);
        let mut piece = self.clone();
        for at in (0..n).step_by(each as usize) {
            piece.start[axis] = self.start[axis] + at;
            piece.len[axis] = each.min(n - at);
            piece.divide(steps, most, out);
        }
    }
}

impl Spread {
    /// Places axes at `base` with `strides`. Cuts do not constrain axes of stride 0.
    pub fn new(base: u64, strides: Vec<u64>) -> Spread {
        let mut order: Vec<usize> = (0..strides.len()).filter(|&k| strides[k] > 0).collect();
        order.sort_by_key(|&k| std::cmp::Reverse(strides[k]));
        Spread { base, strides, order }
    }

    /// Position of the first element of `part`.
    pub fn first(&self, part: &SubBox) -> u64 {
        self.base + part.start.iter().zip(&self.strides).map(|(i, s)| i * s).sum::<u64>()
    }

    /// One past the position of the last element of `part`, which must not be empty.
    pub fn end(&self, part: &SubBox) -> u64 {
        self.first(part) + part.len.iter().zip(&self.strides).map(|(n, s)| (n - 1) * s).sum::<u64>() + 1
    }

    /// Strides per axis.
    pub fn strides(&self) -> &[u64] {
        &self.strides
    }

    /// Calls `emit` with boxes that hold exactly the elements of `part` at positions `lo..hi`, in
    /// the order of their first position.
    pub fn cut(&self, part: &SubBox, lo: u64, hi: u64, emit: &mut dyn FnMut(&SubBox)) {
        if part.len.contains(&0) || lo >= hi {
            return;
        }
        let mut current = part.clone();
        self.cut_from(0, self.first(part), &mut current, lo, hi, emit);
    }

    fn cut_from(
        &self,
        depth: usize,
        first: u64,
        part: &mut SubBox,
        lo: u64,
        hi: u64,
        emit: &mut dyn FnMut(&SubBox),
    ) {
        // Reach of the axes from `depth` inwards; the outer ones are already narrowed to one index.
        let reach = |from: usize, part: &SubBox| -> u64 {
            self.order[from..].iter().map(|&k| (part.len[k] - 1) * self.strides[k]).sum()
        };
        let span = reach(depth, part);
        if first >= hi || first + span < lo {
            return;
        }
        if first >= lo && first + span < hi {
            emit(part);
            return;
        }
        // A single element is either inside or outside, so an axis is left here.
        let axis = self.order[depth];
        let (stride, start, len) = (self.strides[axis], part.start[axis], part.len[axis]);
        let inner = reach(depth + 1, part);
        // Indices whose inner box lies wholly inside, and those that only touch the range.
        let whole_lo = lo.saturating_sub(first).div_ceil(stride).min(len);
        let whole_hi = if hi > first + inner { ((hi - 1 - inner - first) / stride + 1).min(len) } else { 0 };
        let touch_lo = lo.saturating_sub(first + inner).div_ceil(stride).min(len);
        let touch_hi = ((hi - 1 - first) / stride + 1).min(len);
        let (whole_lo, whole_hi) =
            if whole_lo < whole_hi { (whole_lo, whole_hi) } else { (touch_hi, touch_hi) };
        for i in touch_lo..whole_lo.min(touch_hi) {
            (part.start[axis], part.len[axis]) = (start + i, 1);
            self.cut_from(depth + 1, first + i * stride, part, lo, hi, emit);
        }
        if whole_lo < whole_hi {
            (part.start[axis], part.len[axis]) = (start + whole_lo, whole_hi - whole_lo);
            emit(part);
        }
        for i in whole_hi.max(touch_lo)..touch_hi {
            (part.start[axis], part.len[axis]) = (start + i, 1);
            self.cut_from(depth + 1, first + i * stride, part, lo, hi, emit);
        }
        (part.start[axis], part.len[axis]) = (start, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_divided_box_is_the_same_box() {
        for (len, steps) in [
            (vec![2048, 2048], vec![1, 131_072]),
            (vec![2048, 2048], vec![2048, 1]),
            (vec![3, 100_000, 7], vec![0, 7, 1]),
            (vec![70_000], vec![1]),
            (vec![5, 1, 70_001], vec![70_001, 0, 1]),
        ] {
            let whole = SubBox { start: vec![3; len.len()], len: len.clone() };
            let mut parts = Vec::new();
            whole.divide(&steps, 65_536, &mut parts);
            assert!(parts.iter().all(|p| p.volume() <= 65_536 && p.volume() > 0));
            assert_eq!(parts.iter().map(SubBox::volume).sum::<u64>(), whole.volume());
            let overlap = |a: &SubBox, b: &SubBox| {
                (0..len.len())
                    .all(|k| a.start[k] < b.start[k] + b.len[k] && b.start[k] < a.start[k] + a.len[k])
            };
            for (i, a) in parts.iter().enumerate() {
                let inside = |k: usize| a.start[k] >= 3 && a.start[k] + a.len[k] <= 3 + len[k];
                assert!((0..len.len()).all(inside) && !parts[i + 1..].iter().any(|b| overlap(a, b)));
            }
        }
        // A transposed matrix: runs of the source stay whole.
        let mut parts = Vec::new();
        SubBox::whole(&[2048, 2048]).divide(&[1, 131_072], 65_536, &mut parts);
        assert!(parts.iter().all(|p| p.len[0] == 2048));
    }

    fn indices(part: &SubBox) -> Vec<Vec<u64>> {
        let mut all = vec![vec![]];
        for (start, len) in part.start.iter().zip(&part.len) {
            all = all
                .into_iter()
                .flat_map(|prefix: Vec<u64>| {
                    (*start..start + len).map(move |i| prefix.iter().copied().chain([i]).collect())
                })
                .collect();
        }
        all
    }

    /// Nested strides as layouts make them: each axis steps over a whole inner box, with gaps.
    fn arb_box() -> impl Strategy<Value = (Vec<u64>, Vec<u64>, u64)> {
        (proptest::collection::vec((1u64..5, 0u64..4), 0..5), 0u64..10, any::<u64>()).prop_map(
            |(axes, base, seed)| {
                let (mut extents, mut strides, mut size) = (vec![], vec![], 1u64);
                for (extent, gap) in axes {
                    extents.push(extent);
                    strides.push(size);
                    size = size * extent + gap;
                }
                let n = extents.len();
                if n > 1 {
                    extents.rotate_left(seed as usize % n);
                    strides.rotate_left(seed as usize % n);
                }
                (extents, strides, base)
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn cut_equals_the_naive_filter((extents, strides, base) in arb_box(), lo in 0u64..200, len in 0u64..200) {
            let spread = Spread::new(base, strides.clone());
            let whole = SubBox::whole(&extents);
            let hi = lo + len;
            let at = |i: &Vec<u64>| base + i.iter().zip(&strides).map(|(i, s)| i * s).sum::<u64>();
            let want: BTreeSet<Vec<u64>> =
                indices(&whole).into_iter().filter(|i| (lo..hi).contains(&at(i))).collect();
            let mut got = BTreeSet::new();
            let (mut boxes, mut last) = (0, None);
            spread.cut(&whole, lo, hi, &mut |part| {
                boxes += 1;
                let first = spread.first(part);
                assert!(last.is_none_or(|l| l < first), "boxes come in order");
                last = Some(first);
                for i in indices(part) {
                    assert!(got.insert(i), "an element twice");
                }
            });
            prop_assert_eq!(got, want);
            prop_assert!(boxes <= (2 * extents.len()).max(1));
        }
    }
}
