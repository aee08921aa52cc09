//! The same bytes as a tensor of another shape and dtype.

use crate::few::Few;
use crate::plan::{BoxPiece, Pieces, RangePiece, StoredTensor};
use crate::tensor::{c_strides, element_count, Dtype};

/// Most boxes of a view, which bounds the memory that damaged or hostile shapes take.
const MOST_BOXES: usize = 1 << 20;

/// Returns the places of a tensor's bytes as those of a tensor of another shape and dtype with as many bytes; None if
/// these are too many boxes, or boxes of elements of another size.
pub(super) fn seen_as(tensor: &StoredTensor, shape: &[u64], dtype: Dtype) -> Option<Pieces> {
    let own = c_strides(&tensor.shape);
    let (from, to) = (tensor.dtype.size() as u64, dtype.size() as u64);
    let boxes = match &tensor.pieces {
        Pieces::Coded(_) => return None,
        Pieces::Ranges(ranges) => return scaled(ranges.clone(), from, to),
        Pieces::View { blob, offset, strides } if *strides == own || element_count(&tensor.shape)? <= 1 => {
            return Some(Pieces::View { blob: *blob, offset: *offset, strides: c_strides(shape) });
        }
        Pieces::View { blob, offset, strides } => &vec![BoxPiece {
            lo: Few::repeat(0, tensor.shape.len()),
            len: tensor.shape.clone(),
            blob: *blob,
            offset: *offset,
            strides: strides.clone(),
        }],
        Pieces::Boxes(boxes) => boxes,
    };
    let as_range = |piece: &BoxPiece| {
        let len = element_count(&piece.len)?;
        let is_complete = piece.len.iter().zip(&tensor.shape).skip(1).all(|(n, all)| n == all);
        let is_run = piece.strides.is_empty() || piece.strides == c_strides(&piece.len) || len <= 1;
        let start = piece.lo.iter().zip(&own).map(|(at, step)| at * step).sum();
        (is_complete && is_run).then_some(RangePiece { start, len, blob: piece.blob, offset: piece.offset })
    };
    if let Some(mut ranges) = boxes.iter().map(as_range).collect::<Option<Vec<_>>>() {
        ranges.retain(|range| range.len > 0);
        ranges.sort_by_key(|range| range.start);
        return scaled(ranges, from, to);
    }
    if from != to {
        return None;
    }
    let groups = equal_groups(&tensor.shape, shape)?;
    let mut seen = Vec::with_capacity(boxes.len());
    for piece in boxes.iter().filter(|piece| !piece.len.contains(&0)) {
        add_boxes(&tensor.shape, shape, &groups, from, piece, &mut seen)?;
    }
    Some(Pieces::Boxes(seen))
}

/// Ranges in elements of another size.
fn scaled(ranges: Vec<RangePiece>, from: u64, to: u64) -> Option<Pieces> {
    let in_elements = |n: u64| (n * from).is_multiple_of(to).then_some(n * from / to);
    let range = |range: RangePiece| {
        Some(RangePiece { start: in_elements(range.start)?, len: in_elements(range.len)?, ..range })
    };
    Some(Pieces::Ranges(ranges.into_iter().map(range).collect::<Option<Vec<_>>>()?))
}

/// The shortest groups of dimensions that have as many elements in both shapes: the end of each in both.
fn equal_groups(from: &[u64], to: &[u64]) -> Option<Vec<(usize, usize)>> {
    let mut groups = Vec::new();
    let (mut at, mut other) = (0, 0);
    while at < from.len() || other < to.len() {
        let (mut own, mut theirs) = (1u64, 1u64);
        loop {
            if own <= theirs && at < from.len() {
                own = own.checked_mul(from[at])?;
                at += 1;
            } else if other < to.len() {
                theirs = theirs.checked_mul(to[other])?;
                other += 1;
            } else {
                return None;
            }
            if own == theirs {
                break;
            }
        }
        groups.push((at, other));
    }
    Some(groups)
}

/// Elements of a group of dimensions that follow each other, in their order and with one step in the blob.
struct Run {
    start: u64,
    len: u64,
    /// Elements from each to the next.
    step: u64,
    /// Elements before the first, from the start of its box.
    skipped: u64,
}

/// Adds the boxes of the view that are a box of the tensor.
fn add_boxes(
    from: &[u64],
    to: &[u64],
    groups: &[(usize, usize)],
    size: u64,
    piece: &BoxPiece,
    found: &mut Vec<BoxPiece>,
) -> Option<()> {
    let own = if piece.strides.is_empty() { c_strides(&piece.len) } else { piece.strides.clone() };
    // First indices, extents and strides of each box so far, and its offset.
    let mut boxes = vec![(Vec::new(), Vec::new(), Vec::new(), piece.offset)];
    let (mut at, mut other) = (0, 0);
    for &(end, other_end) in groups {
        let mut runs = Vec::new();
        let group = at..end;
        let (lo, len) = (&piece.lo[group.clone()], &piece.len[group.clone()]);
        add_runs(&from[group.clone()], lo, len, &own[group], 0, 0, &mut runs)?;
        let dims = &to[other..other_end];
        let steps = c_strides(dims);
        let mut next = Vec::new();
        for (lo, len, strides, offset) in &boxes {
            for run in &runs {
                for_each_box(dims, run.start, run.len, &mut |first, extent| {
                    let place: u64 = first.iter().zip(steps.iter()).map(|(at, step)| at * step).sum();
                    next.push((
                        [lo, first].concat(),
                        [len, extent].concat(),
                        strides.iter().copied().chain(steps.iter().map(|n| n * run.step)).collect::<Vec<_>>(),
                        offset + (run.skipped + (place - run.start) * run.step) * size,
                    ));
                });
                if next.len() + found.len() > MOST_BOXES {
                    return None;
                }
            }
        }
        boxes = next;
        (at, other) = (end, other_end);
    }
    found.extend(boxes.into_iter().map(|(lo, len, strides, offset)| BoxPiece {
        lo: lo.into(),
        len: len.into(),
        blob: piece.blob,
        offset,
        strides: strides.into(),
    }));
    Some(())
}

/// Adds the runs of a box in a group of dimensions.
fn add_runs(
    dims: &[u64],
    lo: &[u64],
    len: &[u64],
    strides: &[u64],
    start: u64,
    skipped: u64,
    runs: &mut Vec<Run>,
) -> Option<()> {
    let Some(((first, lo), (n, len), (stride, strides))) =
        lo.split_first().and_then(|lo| Some((lo, len.split_first()?, strides.split_first()?)))
    else {
        runs.push(Run { start, len: 1, step: 1, skipped });
        return (runs.len() <= MOST_BOXES).then_some(());
    };
    let dims = &dims[1..];
    let inner: u64 = dims.iter().product();
    let steps = c_strides(dims);
    let step = strides.last().copied().unwrap_or(*stride);
    let is_even =
        strides.iter().zip(steps.iter()).all(|(own, n)| *own == n * step) && *stride == inner * step;
    if len == dims && is_even {
        runs.push(Run { start: start + first * inner, len: n * inner, step, skipped });
        return (runs.len() <= MOST_BOXES).then_some(());
    }
    for i in 0..*n {
        add_runs(dims, lo, len, strides, start + (first + i) * inner, skipped + i * stride, runs)?;
    }
    Some(())
}

/// Calls `each` with the first indices and extents of the boxes that are a run of a shape's elements.
fn for_each_box(shape: &[u64], start: u64, len: u64, each: &mut dyn FnMut(&[u64], &[u64])) {
    let Some((_, rest)) = shape.split_first() else { return each(&[], &[]) };
    let inner: u64 = rest.iter().product();
    let (mut at, end) = (start, start + len);
    while at < end {
        let (row, within) = (at / inner, at % inner);
        if within == 0 && end - at >= inner {
            let rows = (end - at) / inner;
            each(&[&[row], &vec![0; rest.len()][..]].concat(), &[&[rows], rest].concat());
            at += rows * inner;
        } else {
            let n = (inner - within).min(end - at);
            for_each_box(rest, within, n, &mut |lo, len| each(&[&[row], lo].concat(), &[&[1], len].concat()));
            at += n;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Where each element lies: blob and byte offset by the number of the element.
    fn places(shape: &[u64], pieces: &Pieces, size: u64) -> BTreeMap<u64, (u32, u64)> {
        let own = c_strides(shape);
        let mut found = BTreeMap::new();
        let mut add =
            |element, place| assert!(found.insert(element, place).is_none(), "an element in two places");
        let mut add_box = |lo: &[u64], len: &[u64], blob: u32, offset: u64, strides: &[u64]| {
            for i in 0..len.iter().product() {
                let steps = c_strides(len);
                let index: Vec<u64> = steps.iter().zip(len).map(|(step, n)| i / step % n).collect();
                let element =
                    index.iter().zip(lo).zip(own.iter()).map(|((i, lo), step)| (i + lo) * step).sum();
                let place: u64 = index.iter().zip(strides).map(|(i, step)| i * step).sum();
                add(element, (blob, offset + place * size));
            }
        };
        match pieces {
            Pieces::View { blob, offset, strides } => {
                add_box(&vec![0; shape.len()], shape, *blob, *offset, strides);
            }
            Pieces::Boxes(boxes) => boxes.iter().for_each(|piece| {
                let c_order = c_strides(&piece.len);
                let strides = if piece.strides.is_empty() { &c_order } else { &piece.strides };
                add_box(&piece.lo, &piece.len, piece.blob, piece.offset, strides);
            }),
            Pieces::Ranges(ranges) => ranges.iter().for_each(|range| {
                (0..range.len).for_each(|i| add(range.start + i, (range.blob, range.offset + i * size)));
            }),
            Pieces::Coded(_) => unreachable!(),
        }
        found
    }

    /// A shape whose dimensions are products of neighbours: `cuts` says which belong together.
    fn joined(factors: &[u64], cuts: u32) -> Vec<u64> {
        let mut shape = vec![];
        for (i, n) in factors.iter().enumerate() {
            match shape.last_mut() {
                Some(last) if cuts >> i & 1 == 1 => *last *= n,
                _ => shape.push(*n),
            }
        }
        shape
    }

    /// Boxes that tile a shape, each cut in two as often as there are cuts; some in Fortran order.
    fn tiles(shape: &[u64], cuts: &[(usize, u64, u64)]) -> Vec<BoxPiece> {
        let mut boxes = vec![(vec![0; shape.len()], shape.to_vec())];
        for (which, dim, at) in cuts {
            let (lo, len) = boxes.swap_remove(which % boxes.len());
            let dim = *dim as usize % shape.len();
            let at = at % (len[dim] + 1);
            let (mut other, mut left, mut right) = (lo.clone(), len.clone(), len.clone());
            (left[dim], right[dim]) = (at, len[dim] - at);
            other[dim] += at;
            boxes.extend([(lo, left), (other, right)]);
        }
        let mut offset = 3;
        let piece = |(i, (lo, len)): (usize, (Vec<u64>, Vec<u64>))| {
            let backwards: Few<u64> = len
                .iter()
                .scan(1, |all, n| Some(std::mem::replace(all, *all * n)))
                .collect::<Vec<_>>()
                .into();
            let begin = offset;
            offset += len.iter().product::<u64>() * 2;
            let strides = if i % 3 == 2 { backwards } else { Few::default() };
            BoxPiece { lo: lo.into(), len: len.into(), blob: i as u32 % 2, offset: begin, strides }
        };
        boxes.into_iter().enumerate().map(piece).collect()
    }

    proptest! {
        #[test]
        fn a_view_has_each_element_where_the_tensor_has_it(
            factors in prop::collection::vec(1u64..5, 1..6),
            (from_cuts, to_cuts) in any::<(u32, u32)>(),
            cuts in prop::collection::vec(any::<(usize, u64, u64)>(), 0..5),
            turned in any::<bool>(),
        ) {
            let (shape, seen_shape) = (joined(&factors, from_cuts), joined(&factors, to_cuts));
            let mut boxes = tiles(&shape, &cuts);
            let pieces = if boxes.len() == 1 && turned {
                let first = boxes.remove(0);
                Pieces::View { blob: 0, offset: 8, strides: if first.strides.is_empty() { c_strides(&shape) } else { first.strides } }
            } else {
                Pieces::Boxes(boxes)
            };
            let tensor = super::super::assembled::stored("w".into(), Dtype::Bf16, shape[..].into(), pieces, None);
            let seen = seen_as(&tensor, &seen_shape, Dtype::F16).expect("elements of one size");
            let want = places(&shape, &tensor.pieces, 2);
            prop_assert_eq!(places(&seen_shape, &seen, 2), want);
        }
    }

    #[test]
    fn elements_of_another_size_are_seen_in_runs_alone() {
        let tensor = |cuts: &[(usize, u64, u64)]| {
            let pieces = Pieces::Boxes(tiles(&[4, 6], cuts));
            super::super::assembled::stored("w".into(), Dtype::Bf16, vec![4, 6].into(), pieces, None)
        };
        let rows = seen_as(&tensor(&[(0, 0, 2)]), &[4, 12], Dtype::U8).expect("runs");
        assert_eq!(places(&[4, 12], &rows, 1).len(), 48);
        assert!(seen_as(&tensor(&[(0, 1, 2)]), &[4, 12], Dtype::U8).is_none());
    }

    #[test]
    fn a_view_of_too_many_boxes_is_none() {
        let n = MOST_BOXES as u64 + 1;
        let pieces = Pieces::Boxes(tiles(&[n, 4], &[(0, 1, 2)]));
        let tensor = super::super::assembled::stored("w".into(), Dtype::U8, vec![n, 4].into(), pieces, None);
        assert!(seen_as(&tensor, &[4 * n], Dtype::U8).is_none());
        assert!(seen_as(&tensor, &[1, n, 4], Dtype::U8).is_some());
    }
}
