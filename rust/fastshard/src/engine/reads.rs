//! The ranges of blobs that a box of a stored tensor takes, and the places of their elements, decided without
//! reading.

use crate::boxes::{Spread, SubBox};
use crate::error::Result;
use crate::plan::{PartAxis, Pieces, Plan, StoredTensor};
use crate::tensor::c_strides;

use super::windows;

/// Bytes read at a time where runs are short.
pub const SPAN: usize = 1 << 20;
/// Runs at least this long are read directly to their place; shorter ones through a span or a map.
const LONG_RUN: u64 = 32 << 10;

/// An axis of a box: its extent, and the steps between its elements in the blob and in the destination.
#[derive(Clone, Copy)]
pub struct Axis {
    pub n: u64,
    pub src: u64,
    pub dst: u64,
}

/// A box of elements in one blob.
pub struct BlobBox {
    pub blob: u32,
    /// Offset of the first element in the blob's data.
    pub offset: u64,
    /// Bytes of an element.
    pub item: usize,
    /// Where the first element goes, in elements.
    pub dst: u64,
    pub axes: Vec<Axis>,
}

/// One read of a blob's data.
pub struct Read<'a> {
    /// First byte in the blob's data.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// Where the first element goes, in elements.
    pub dst: u64,
    pub way: Way<'a>,
}

/// The way in which read data gets to its place.
pub enum Way<'a> {
    /// It has the same order there as in the blob.
    Run,
    /// It is read into a buffer, from which its elements are scattered.
    Span { axes: &'a [Axis], is_dense: bool },
    /// A map gathers its elements, since most data between them is not needed; without a map it is divided.
    Sparse { axes: &'a [Axis] },
}

/// A callback for reads in their order; by returning false it refuses a sparse read, and smaller reads of the
/// same elements follow.
pub type Visit<'a> = &'a mut dyn FnMut(Read) -> Result<bool>;

/// A callback for the blob, first byte and length of reads in their order.
pub type VisitRange<'a> = &'a mut dyn FnMut(u32, u64, u64) -> Result<()>;

/// Calls `visit` with the boxes of blobs that make up the box `part` of `axes` of a stored tensor, whose first element goes to
/// `dst` and the others on from there with `strides`. A coded tensor has none of its own ([`windows::for_each_source_box`]).
pub fn for_each_blob_box(
    stored: &StoredTensor,
    axes: &[PartAxis],
    src_base: &[u64],
    part: &SubBox,
    dst: u64,
    strides: &[u64],
    visit: &mut dyn FnMut(&BlobBox) -> Result<()>,
) -> Result<()> {
    let item = stored.dtype.size();
    if part.len.contains(&0) {
        return Ok(());
    }
    // Of a sub-box of `part`, which begins at byte `offset`.
    let blob_box = |blob: u32, offset: u64, steps: &[u64], sub: &SubBox| BlobBox {
        blob,
        offset,
        item,
        dst: dst + shift(part, sub, strides),
        axes: coalesced(&sub.len, steps, strides),
    };
    let steps_of = |of: &[u64]| -> Vec<u64> { axes.iter().map(|a| a.step * of[a.dim as usize]).collect() };
    match &stored.pieces {
        Pieces::Coded(_) => Ok(()),
        Pieces::View { blob, offset, strides: own } => {
            let spread = Spread::new(src_base.iter().zip(own).map(|(i, s)| i * s).sum(), steps_of(own));
            let first = offset + spread.first(part) * item as u64;
            visit(&blob_box(*blob, first, spread.strides(), part))
        }
        Pieces::Ranges(pieces) => {
            let own = c_strides(&stored.shape);
            let spread = Spread::new(src_base.iter().zip(&own).map(|(i, s)| i * s).sum(), steps_of(&own));
            let (first, end) = (spread.first(part), spread.end(part));
            let from = pieces.partition_point(|p| p.start + p.len <= first);
            for piece in pieces[from..].iter().take_while(|p| p.start < end) {
                let mut found = Vec::new();
                spread.cut(part, piece.start, piece.start + piece.len, &mut |sub| found.push(sub.clone()));
                for sub in found {
                    let offset = piece.offset + (spread.first(&sub) - piece.start) * item as u64;
                    visit(&blob_box(piece.blob, offset, spread.strides(), &sub))?;
                }
            }
            Ok(())
        }
        Pieces::Boxes(pieces) => {
            let rank = stored.shape.len();
            let dims: Vec<Spread> = (0..rank)
                .map(|d| {
                    let steps = axes.iter().map(|a| if a.dim as usize == d { a.step } else { 0 }).collect();
                    Spread::new(src_base[d], steps)
                })
                .collect();
            for piece in pieces {
                let outside = (0..rank).any(|d| {
                    dims[d].first(part) >= piece.lo[d] + piece.len[d] || dims[d].end(part) <= piece.lo[d]
                });
                if outside || piece.len.contains(&0) {
                    continue;
                }
                let mut found = vec![part.clone()];
                for (d, dim) in dims.iter().enumerate() {
                    let mut next = Vec::new();
                    for sub in &found {
                        let (lo, hi) = (piece.lo[d], piece.lo[d] + piece.len[d]);
                        dim.cut(sub, lo, hi, &mut |s| next.push(s.clone()));
                    }
                    found = next;
                }
                let own =
                    if piece.strides.is_empty() { c_strides(&piece.len) } else { piece.strides.clone() };
                let steps = steps_of(&own);
                for sub in found {
                    let at: u64 = (0..rank).map(|d| (dims[d].first(&sub) - piece.lo[d]) * own[d]).sum();
                    visit(&blob_box(piece.blob, piece.offset + at * item as u64, &steps, &sub))?;
                }
            }
            Ok(())
        }
    }
}

/// The distance of a sub-box's start from that of `part`, for elements with `strides`.
pub fn shift(part: &SubBox, sub: &SubBox, strides: &[u64]) -> u64 {
    sub.start.iter().zip(&part.start).zip(strides).map(|((s, p), d)| (s - p) * d).sum()
}

/// Axes by destination; axes that form one run on both sides are merged.
fn coalesced(len: &[u64], src: &[u64], dst: &[u64]) -> Vec<Axis> {
    let mut axes: Vec<Axis> = len
        .iter()
        .zip(src)
        .zip(dst)
        .filter(|((n, _), _)| **n != 1)
        .map(|((&n, &src), &dst)| Axis { n, src, dst })
        .collect();
    axes.sort_by_key(|a| (std::cmp::Reverse(a.dst), std::cmp::Reverse(a.src)));
    let mut out: Vec<Axis> = Vec::with_capacity(axes.len());
    for axis in axes {
        match out.last_mut() {
            Some(last) if last.src == axis.src * axis.n && last.dst == axis.dst * axis.n => {
                *last = Axis { n: last.n * axis.n, src: axis.src, dst: axis.dst };
            }
            _ => out.push(axis),
        }
    }
    out
}

impl BlobBox {
    /// Calls `visit` with the reads of the box; a buffer of `room` bytes takes data that is scattered.
    pub fn for_each_read(&self, room: u64, visit: Visit) -> Result<()> {
        self.visit_reads(self.offset, &self.axes, self.dst, room, visit)
    }

    fn visit_reads(&self, offset: u64, axes: &[Axis], dst: u64, room: u64, visit: Visit) -> Result<()> {
        let item = self.item as u64;
        let run = match axes.last() {
            None => 1,
            Some(a) if a.src == 1 && a.dst == 1 => a.n,
            Some(_) => 0,
        };
        let outer = &axes[..axes.len() - usize::from(run > 0 && !axes.is_empty())];
        if run > 0 && (outer.is_empty() || run * item >= LONG_RUN) {
            return self.visit_runs(offset, outer, run * item, dst, visit);
        }
        let volume: u64 = axes.iter().map(|a| a.n).product();
        let span: u64 = axes.iter().map(|a| (a.n - 1) * a.src).sum::<u64>() + 1;
        let len = span * item;
        if span <= 2 * volume && len <= room {
            let way = Way::Span { axes, is_dense: span == volume };
            return visit(Read { offset, len, dst, way }).map(drop);
        }
        if span > 2 * volume && visit(Read { offset, len, dst, way: Way::Sparse { axes } })? {
            return Ok(());
        }
        // Too much at a time: halve the axis that reaches furthest in the source.
        let widest = (0..axes.len()).filter(|&k| axes[k].n > 1).max_by_key(|&k| axes[k].src * axes[k].n);
        let k = widest.expect("one element is no span");
        let half = axes[k].n / 2;
        let mut part = axes.to_vec();
        for (skip, n) in [(0, half), (half, axes[k].n - half)] {
            part[k].n = n;
            let offset = offset + skip * axes[k].src * item;
            let dst = dst + skip * axes[k].dst;
            let trimmed: Vec<Axis> = part.iter().copied().filter(|a| a.n != 1).collect();
            self.visit_reads(offset, &trimmed, dst, room, visit)?;
        }
        Ok(())
    }

    /// Visits runs of `len` bytes, one for each position on `outer`.
    fn visit_runs(&self, offset: u64, outer: &[Axis], len: u64, dst: u64, visit: Visit) -> Result<()> {
        let Some((axis, inner)) = outer.split_first() else {
            return visit(Read { offset, len, dst, way: Way::Run }).map(drop);
        };
        for i in 0..axis.n {
            let offset = offset + i * axis.src * self.item as u64;
            self.visit_runs(offset, inner, len, dst + i * axis.dst, visit)?;
        }
        Ok(())
    }
}

/// Lists the reads of the box `part` of `axes` of a stored tensor, from files without a map, into a buffer
/// with `strides`. It leaves out scales and zero points that group indices choose.
pub fn list_box(
    plan: &Plan,
    stored: &StoredTensor,
    axes: &[PartAxis],
    src_base: &[u64],
    part: &SubBox,
    strides: &[u64],
    visit: VisitRange,
) -> Result<()> {
    if let Some(coded) = stored.coded() {
        return windows::for_each_source_box(
            plan,
            stored,
            coded,
            axes,
            src_base,
            part,
            &mut |tensor, sub| list_dense_box(plan, tensor, sub, visit),
        );
    }
    for_each_blob_box(stored, axes, src_base, part, 0, strides, &mut |found| {
        found.for_each_read(SPAN as u64, &mut |read| match read.way {
            Way::Sparse { .. } => Ok(false),
            _ => visit(found.blob, read.offset, read.len).map(|()| true),
        })
    })
}

/// Lists the reads of [`super::gather::Sources::read_box`].
pub fn list_dense_box(plan: &Plan, tensor: &StoredTensor, sub: &SubBox, visit: VisitRange) -> Result<()> {
    let (axes, base, strides) = dense_box(tensor, sub);
    list_box(plan, tensor, &axes, &base, sub, &strides, visit)
}

/// The parameters for reading a box of all axes of a tensor in C order: axes, base and strides.
pub fn dense_box(tensor: &StoredTensor, sub: &SubBox) -> (Vec<PartAxis>, Vec<u64>, Vec<u64>) {
    let strides = c_strides(&sub.len);
    (axes_of(&tensor.shape), vec![0; tensor.shape.len()], strides.to_vec())
}

/// All axes of a tensor in C order.
pub fn axes_of(shape: &[u64]) -> Vec<PartAxis> {
    let strides = c_strides(shape);
    (0..shape.len()).map(|d| PartAxis { n: shape[d], dst: strides[d], dim: d as u32, step: 1 }).collect()
}

#[cfg(test)]
mod tests;
