//! The strided box copy: the one primitive that every view of a tensor lowers to.

use super::transpose::{self, Axis};

/// One strided box of elements: extents and, per axis, source and destination strides, in elements.
///
/// A source stride may be 0 (an expanded view). Destination elements must be distinct: where two axes
/// reach the same element, which source element it gets is unspecified.
#[derive(Debug, Clone, Copy)]
pub struct StridedBox<'a> {
    /// Number of elements along each axis. Any 0 makes the box empty; no axes is a single element.
    pub extents: &'a [u64],
    /// Source stride of each axis, in elements.
    pub src_strides: &'a [u64],
    /// Destination stride of each axis, in elements.
    pub dst_strides: &'a [u64],
}

/// Copies a box of elements from `src[src_base..]` to `dst[dst_base..]`.
///
/// Bases and strides count elements of `item` bytes (1, 2, 4, 8 or 16); neither slice needs any
/// alignment. Bytes of `dst` outside the box keep their value. An empty box does nothing.
///
/// # Panics
/// Before any byte is written: if the box would leave either slice, if the three lists of `shape` differ
/// in length, if `item` is not one of the five sizes, or if a destination axis longer than 1 has stride 0.
#[allow(unsafe_code)]
pub fn copy(src: &[u8], src_base: u64, dst: &mut [u8], dst_base: u64, shape: &StridedBox, item: usize) {
    let rank = shape.extents.len();
    assert!(matches!(item, 1 | 2 | 4 | 8 | 16), "unsupported item size {item}");
    assert!(
        shape.src_strides.len() == rank && shape.dst_strides.len() == rank,
        "box of rank {rank} needs {rank} strides on both sides"
    );
    if shape.extents.contains(&0) {
        return;
    }
    let from = start_within(src.len(), src_base, shape.extents, shape.src_strides, item);
    let to = start_within(dst.len(), dst_base, shape.extents, shape.dst_strides, item);
    let (Some(from), Some(to)) = (from, to) else {
        panic!(
            "{shape:?} of {item}-byte items at {src_base} -> {dst_base} leaves {} -> {} bytes",
            src.len(),
            dst.len()
        );
    };

    let mut axes = Vec::with_capacity(rank);
    for ((&len, &s), &d) in shape.extents.iter().zip(shape.src_strides).zip(shape.dst_strides) {
        if len > 1 {
            assert!(d > 0, "a destination axis of {len} elements has stride 0");
            // No cast truncates and no product overflows: (len - 1) * stride * item is within a slice.
            axes.push(Axis { len: len as usize, src: s as usize * item, dst: d as usize * item });
        }
    }
    let (axes, item) = coalesce(&mut axes, item);
    // SAFETY: the two checks above proved that every element of the box lies inside its slice, `src` and
    // `dst` are borrowed for the whole call and cannot overlap, and coalescing keeps the element pairs.
    unsafe {
        let (src, dst) = (src.as_ptr().add(from), dst.as_mut_ptr().add(to));
        match item {
            1 => run::<u8>(axes, src, dst),
            2 => run::<u16>(axes, src, dst),
            4 => run::<u32>(axes, src, dst),
            8 => run::<u64>(axes, src, dst),
            _ => run::<u128>(axes, src, dst),
        }
    }
}

/// Byte offset of the box's first element if its last one ends within `bytes`; extents are not 0.
fn start_within(bytes: usize, base: u64, extents: &[u64], strides: &[u64], item: usize) -> Option<usize> {
    let last = extents
        .iter()
        .zip(strides)
        .try_fold(base, |at, (&n, &stride)| at.checked_add((n - 1).checked_mul(stride)?))?;
    let end = last.checked_add(1)?.checked_mul(item as u64)?;
    (end <= bytes as u64).then(|| base as usize * item)
}

/// Orders axes by falling destination stride and merges neighbours that are contiguous on both sides.
/// A short innermost run that makes up a wider item becomes that item.
fn coalesce(axes: &mut [Axis], mut item: usize) -> (&[Axis], usize) {
    axes.sort_unstable_by_key(|a| std::cmp::Reverse((a.dst, a.src)));
    let mut kept = 0;
    for i in 0..axes.len() {
        let inner = axes[i];
        if kept > 0 {
            let outer = &mut axes[kept - 1];
            if outer.src == inner.len * inner.src && outer.dst == inner.len * inner.dst {
                *outer = Axis { len: outer.len * inner.len, ..inner };
                continue;
            }
        }
        axes[kept] = inner;
        kept += 1;
    }
    if let Some(&Axis { len, src, dst }) = axes[..kept].last() {
        if src == item && dst == item && matches!(len * item, 2 | 4 | 8 | 16) {
            kept -= 1;
            item *= len;
        }
    }
    (&axes[..kept], item)
}

/// Copies a coalesced box of `T`s.
///
/// # Safety
/// Every element of the box is readable from `src` and writable at `dst`, and the two do not overlap.
#[allow(unsafe_code)]
unsafe fn run<T: transpose::Item>(axes: &[Axis], src: *const u8, dst: *mut u8) {
    let item = size_of::<T>();
    // SAFETY: every address formed below is that of an element of the box.
    unsafe {
        let Some((inner, outer)) = axes.split_last() else {
            dst.cast::<T>().write_unaligned(src.cast::<T>().read_unaligned());
            return;
        };
        if inner.src == item && inner.dst == item {
            let bytes = inner.len * item;
            if bytes > SHORT_ROW {
                walk(outer, src, dst, &mut |s, d| s.copy_to_nonoverlapping(d, bytes));
            } else {
                walk(outer, src, dst, &mut |s, d| copy_short(s, d, bytes));
            }
            return;
        }
        // The axis along which the source is densest; where that is not the innermost one, blocks of both
        // keep every cache line in use until it is done with.
        let dense = (0..outer.len()).filter(|&i| outer[i].src > 0).min_by_key(|&i| outer[i].src);
        match dense.filter(|&i| outer[i].src < inner.src) {
            Some(i) => {
                let mut rest = outer.to_vec();
                let cols = rest.remove(i);
                walk(&rest, src, dst, &mut |s, d| {
                    transpose::transpose::<T>(*inner, cols, s, d);
                });
            }
            None => {
                let inner = *inner;
                walk(outer, src, dst, &mut |s, d| {
                    for i in 0..inner.len {
                        let value = s.add(i * inner.src).cast::<T>().read_unaligned();
                        d.add(i * inner.dst).cast::<T>().write_unaligned(value);
                    }
                });
            }
        }
    }
}

/// Calls `leaf` with the addresses of every combination of `axes`, the last one fastest.
///
/// # Safety
/// The addresses of all combinations lie within the allocations of `src` and `dst`.
#[allow(unsafe_code)]
#[inline]
unsafe fn walk(axes: &[Axis], src: *const u8, dst: *mut u8, leaf: &mut impl FnMut(*const u8, *mut u8)) {
    // SAFETY: the caller's promise covers every sub-combination.
    unsafe {
        match axes {
            [] => leaf(src, dst),
            [last] => {
                for i in 0..last.len {
                    leaf(src.add(i * last.src), dst.add(i * last.dst));
                }
            }
            [first, rest @ ..] => {
                for i in 0..first.len {
                    walk(rest, src.add(i * first.src), dst.add(i * first.dst), leaf);
                }
            }
        }
    }
}

/// Rows up to this many bytes are copied inline: a call to memcpy costs more than they do.
const SHORT_ROW: usize = 128;

/// Copies `len` bytes, `0 < len <= SHORT_ROW`, with moves that may overlap each other at the end.
///
/// # Safety
/// `len` bytes are readable from `src` and writable at `dst`, and the two do not overlap.
#[allow(unsafe_code)]
#[inline]
unsafe fn copy_short(src: *const u8, dst: *mut u8, len: usize) {
    #[inline]
    unsafe fn ends<T: Copy>(src: *const u8, dst: *mut u8, len: usize) {
        let tail = len - size_of::<T>();
        // SAFETY: `len` is at least the size of `T`.
        unsafe {
            let (a, b) = (src.cast::<T>().read_unaligned(), src.add(tail).cast::<T>().read_unaligned());
            dst.cast::<T>().write_unaligned(a);
            dst.add(tail).cast::<T>().write_unaligned(b);
        }
    }
    // SAFETY: each branch stays within `len` bytes.
    unsafe {
        if len >= 16 {
            let mut at = 0;
            while at + 32 <= len {
                dst.add(at).cast::<[u8; 16]>().write(src.add(at).cast::<[u8; 16]>().read());
                at += 16;
            }
            ends::<[u8; 16]>(src.add(at), dst.add(at), len - at);
        } else if len >= 8 {
            ends::<u64>(src, dst, len);
        } else if len >= 4 {
            ends::<u32>(src, dst, len);
        } else {
            for i in 0..len {
                *dst.add(i) = *src.add(i);
            }
        }
    }
}
