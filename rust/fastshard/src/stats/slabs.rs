//! Indices of each dimension at which a tensor is zero throughout.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{ZeroSlab, MAX_INDICES, MAX_RANGES};
use crate::tensor::Dtype;

/// Open columns of a word up to which each is looked at by itself.
const FEW: u32 = 8;

/// One dimension: a bit for each index at which something is not zero.
struct Dim {
    dim: usize,
    extent: u64,
    seen: Vec<AtomicU64>,
    /// Indices whose bit is not set; 0 for a dimension too long to be looked at.
    open: AtomicU64,
}

impl Dim {
    fn is_seen(&self, index: u64) -> bool {
        self.seen
            .get((index / 64) as usize)
            .is_none_or(|word| word.load(Ordering::Relaxed) >> (index % 64) & 1 == 1)
    }

    fn see(&self, word: usize, bits: u64) {
        let before = self.seen[word].fetch_or(bits, Ordering::Relaxed);
        self.open.fetch_sub(u64::from((bits & !before).count_ones()), Ordering::Relaxed);
    }

    fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed) > 0
    }

    fn slab(&self) -> Option<ZeroSlab> {
        let indices = self.open.load(Ordering::Relaxed);
        if indices == 0 || indices == self.extent {
            return None;
        }
        let mut ranges: Vec<[u64; 2]> = Vec::new();
        let longest = |ranges: &mut Vec<[u64; 2]>| {
            ranges.sort_by_key(|[start, end]| (std::cmp::Reverse(end - start), *start));
            ranges.truncate(MAX_RANGES);
        };
        // The range that may go on in the next word.
        let mut last: Option<[u64; 2]> = None;
        for (word, seen) in self.seen.iter().enumerate() {
            let mut zero = !seen.load(Ordering::Relaxed);
            while zero != 0 {
                let start = word as u64 * 64 + u64::from(zero.trailing_zeros());
                let n = u64::from((zero >> (start % 64)).trailing_ones());
                let end = (start + n).min(self.extent);
                if start < end {
                    match &mut last {
                        Some(last) if last[1] == start => last[1] = end,
                        _ => ranges.extend(last.replace([start, end])),
                    }
                }
                // There may be millions, of which the longest are told.
                if ranges.len() > 16 * MAX_RANGES {
                    longest(&mut ranges);
                }
                let above = start % 64 + n;
                zero = if above >= 64 { 0 } else { zero >> above << above };
            }
        }
        ranges.extend(last);
        longest(&mut ranges);
        ranges.sort_unstable();
        Some(ZeroSlab { dim: self.dim, indices, ranges })
    }
}

/// An index that moves along a dimension. What it finds goes to the dimension a word at a time: setting
/// shared bits one by one would cost more than finding them.
struct Cursor<'a> {
    dim: &'a Dim,
    at: u64,
    /// The bits of this word when the cursor came, and those found since.
    before: u64,
    found: u64,
}

impl Cursor<'_> {
    fn new(dim: &Dim, at: u64) -> Cursor<'_> {
        let mut cursor = Cursor { dim, at, before: 0, found: 0 };
        cursor.load();
        cursor
    }

    fn load(&mut self) {
        let word = self.dim.seen.get((self.at / 64) as usize);
        self.before = word.map_or(u64::MAX, |word| word.load(Ordering::Relaxed));
    }

    #[inline(always)]
    fn is_seen(&self) -> bool {
        (self.before | self.found) >> (self.at % 64) & 1 == 1
    }

    #[inline(always)]
    fn see(&mut self) {
        self.found |= 1 << (self.at % 64) & !self.before;
    }

    fn flush(&mut self) {
        if self.found != 0 {
            self.dim.see((self.at / 64) as usize, self.found);
            self.found = 0;
        }
    }

    /// Moves on; true if that was the last index and the next outer dimension moves too.
    #[inline(always)]
    fn step(&mut self) -> bool {
        let end = self.at + 1 == self.dim.extent;
        let next = if end { 0 } else { self.at + 1 };
        if next / 64 == self.at / 64 {
            self.at = next;
        } else {
            self.flush();
            self.at = next;
            self.load();
        }
        end
    }
}

/// What has been seen of a tensor's dimensions; tiles may be added by several threads at once.
pub struct Slabs {
    item: usize,
    /// The bits of eight bytes that are set in no zero.
    pattern: u64,
    /// Dimensions longer than 1, outermost first; at least two.
    dims: Vec<Dim>,
}

/// The bits that make an element another one than zero, over eight bytes; none if no element is zero.
fn pattern(dtype: Dtype) -> Option<u64> {
    Some(match dtype {
        Dtype::F16 | Dtype::Bf16 => 0x7fff_7fff_7fff_7fff,
        Dtype::F32 | Dtype::C64 => 0x7fff_ffff_7fff_ffff,
        Dtype::F64 | Dtype::C128 => 0x7fff_ffff_ffff_ffff,
        Dtype::F8E4m3 | Dtype::F8E5m2 => 0x7f7f_7f7f_7f7f_7f7f,
        // It has powers of two only.
        Dtype::F8E8m0 => return None,
        // In the "fnuz" forms 0x80 is NaN.
        _ => u64::MAX,
    })
}

impl Slabs {
    /// None where slabs say nothing: fewer than two dimensions longer than 1, no elements, no zeros.
    pub fn new(dtype: Dtype, shape: &[u64]) -> Option<Slabs> {
        let pattern = pattern(dtype)?;
        let dims: Vec<Dim> = shape
            .iter()
            .enumerate()
            .filter(|(_, extent)| **extent > 1)
            .map(|(dim, &extent)| {
                let tracked = if extent > MAX_INDICES { 0 } else { extent };
                let seen = (0..tracked.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
                Dim { dim, extent, seen, open: AtomicU64::new(tracked) }
            })
            .collect();
        (dims.len() > 1 && !shape.contains(&0)).then_some(Slabs { item: dtype.size(), pattern, dims })
    }

    /// Looks at elements from `first` (an index into the elements in C order) on.
    pub fn add(&self, first: u64, bytes: &[u8]) {
        match self.item {
            1 => self.add_items::<1>(first, bytes),
            2 => self.add_items::<2>(first, bytes),
            4 => self.add_items::<4>(first, bytes),
            8 => self.add_items::<8>(first, bytes),
            _ => self.add_items::<16>(first, bytes),
        }
    }

    fn add_items<const ITEM: usize>(&self, first: u64, bytes: &[u8]) {
        let (last, outer) = self.dims.split_last().expect("at least two dimensions");
        if last.is_open() {
            self.columns::<ITEM>(last, first, bytes);
        }
        // What lies inside the innermost dimension that is open needs no telling apart.
        let Some(open) = outer.iter().rposition(Dim::is_open) else { return };
        let run: u64 = self.dims[open + 1..].iter().map(|d| d.extent).product();
        let (mut row, mut column) = (first / run, first % run);
        let mut cursors: Vec<Cursor> = Vec::with_capacity(open + 1);
        for dim in outer[..=open].iter().rev() {
            cursors.push(Cursor::new(dim, row % dim.extent));
            row /= dim.extent;
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let n = (run - column).min((rest.len() / ITEM) as u64);
            let (segment, after) = rest.split_at(n as usize * ITEM);
            if cursors.iter().any(|c| !c.is_seen()) && self.any::<ITEM>(segment) {
                cursors.iter_mut().for_each(Cursor::see);
            }
            (rest, column) = (after, 0);
            // From the innermost dimension outwards, as far as they are through.
            let _ = cursors.iter_mut().all(Cursor::step);
        }
        cursors.iter_mut().for_each(Cursor::flush);
    }

    /// Marks the indices of the last dimension that are not zero.
    fn columns<const ITEM: usize>(&self, dim: &Dim, first: u64, bytes: &[u8]) {
        if dim.extent >= 64 {
            let (mut column, mut rest) = (first % dim.extent, bytes);
            while !rest.is_empty() {
                let n = (dim.extent - column).min((rest.len() / ITEM) as u64);
                let (segment, after) = rest.split_at(n as usize * ITEM);
                self.row::<ITEM>(dim, column, segment);
                (rest, column) = (after, 0);
            }
            return;
        }
        // Rows are short: each column by itself, all the way down.
        let found = (0..dim.extent).filter(|&column| !dim.is_seen(column)).fold(0, |found, column| {
            let skip = ((dim.extent + column - first % dim.extent) % dim.extent) as usize;
            let mut below = bytes.chunks_exact(ITEM).skip(skip).step_by(dim.extent as usize);
            found | u64::from(below.any(|x| self.element::<ITEM>(x))) << column
        });
        if found != 0 {
            dim.see(0, found);
        }
    }

    /// Marks the columns from `first` on that are not zero in part of a row.
    fn row<const ITEM: usize>(&self, dim: &Dim, first: u64, segment: &[u8]) {
        let end = first + (segment.len() / ITEM) as u64;
        let mut at = first;
        while at < end {
            let word = (at / 64) as usize;
            let stop = end.min((at / 64 + 1) * 64);
            let mask = (u64::MAX >> (64 - (stop - at))) << (at % 64);
            let mut open = mask & !dim.seen[word].load(Ordering::Relaxed);
            let piece = &segment[(at - first) as usize * ITEM..(stop - first) as usize * ITEM];
            if open != 0 && (open.count_ones() <= FEW || self.any::<ITEM>(piece)) {
                let mut found = 0;
                while open != 0 {
                    let bit = u64::from(open.trailing_zeros());
                    open &= open - 1;
                    let element = (bit - at % 64) as usize * ITEM;
                    found |= u64::from(self.element::<ITEM>(&piece[element..element + ITEM])) << bit;
                }
                if found != 0 {
                    dim.see(word, found);
                }
            }
            at = stop;
        }
    }

    /// True if an element is not zero.
    #[inline(always)]
    fn element<const ITEM: usize>(&self, bytes: &[u8]) -> bool {
        bytes[..ITEM].chunks(8).fold(0, |all, x| {
            let mut word = [0; 8];
            word[..x.len()].copy_from_slice(x);
            all | u64::from_le_bytes(word)
        }) & self.pattern
            != 0
    }

    /// True if one of several elements is not zero.
    #[inline(always)]
    fn any<const ITEM: usize>(&self, bytes: &[u8]) -> bool {
        // Most often the first one tells.
        if bytes.len() >= ITEM && self.element::<ITEM>(bytes) {
            return true;
        }
        let word = |x: &[u8]| u64::from_le_bytes(x.try_into().expect("eight bytes"));
        let mut wide = bytes.chunks_exact(64);
        if wide.any(|chunk| chunk.chunks_exact(8).fold(0, |all, x| all | word(x)) & self.pattern != 0) {
            return true;
        }
        wide.remainder().chunks_exact(ITEM).any(|x| self.element::<ITEM>(x))
    }

    /// The bits of each dimension.
    pub fn words(&self) -> Vec<Vec<u64>> {
        let words = |dim: &Dim| dim.seen.iter().map(|word| word.load(Ordering::Relaxed)).collect();
        self.dims.iter().map(words).collect()
    }

    /// Adds bits that others have seen; none if they are of another tensor.
    pub fn join(&self, words: &[Vec<u64>]) -> Option<()> {
        let fits = |(dim, seen): (&Dim, &Vec<u64>)| dim.seen.len() == seen.len();
        if self.dims.len() != words.len() || !self.dims.iter().zip(words).all(fits) {
            return None;
        }
        for (dim, seen) in self.dims.iter().zip(words) {
            seen.iter()
                .enumerate()
                .filter(|(_, bits)| **bits != 0)
                .for_each(|(word, &bits)| dim.see(word, bits));
        }
        Some(())
    }

    /// True if all of the tensor is zero.
    pub fn is_zero(&self) -> bool {
        // Of dimensions that are too long to be looked at nothing is known; one that is not is enough.
        self.dims.iter().any(|dim| dim.open.load(Ordering::Relaxed) == dim.extent)
    }

    /// The slabs that are zero; none if all of the tensor is.
    pub fn finish(&self) -> Vec<ZeroSlab> {
        self.dims.iter().filter_map(Dim::slab).collect()
    }
}
