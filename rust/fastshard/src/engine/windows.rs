//! The boxes of codes, scales and zero points that make up a box of coded values, decided without reading.

use crate::boxes::SubBox;
use crate::error::Result;
use crate::plan::{Coded, Grid, Groups, Numbers, Packing, PartAxis, Plan, StoredTensor};
use crate::tensor::c_strides;

/// Maximum number of elements whose codes are read at a time.
pub(super) const MOST: u64 = 128 << 10;

/// A box of a matrix of codes: leading index, first row and column, and their numbers.
#[derive(Clone, Copy)]
pub(super) struct Window {
    pub(super) lead: u64,
    pub(super) row: u64,
    pub(super) rows: usize,
    pub(super) column: u64,
    pub(super) columns: usize,
}

impl Window {
    /// The box of `codes` with the window's codes, and the bit of its first word at which the first code of a
    /// row or column begins.
    pub(super) fn codes(&self, packing: &Packing, codes: &StoredTensor) -> (SubBox, u64) {
        let Window { lead, row, rows, column, columns } = *self;
        let word = codes.dtype.size() as u64 * 8;
        // The words that hold `n` codes from the `first` on, and where in the first of them the first code begins.
        let words = |first: u64, n: usize, bits: u32| {
            let (at, end) = (first * u64::from(bits), (first + n as u64) * u64::from(bits));
            (at / word, end.div_ceil(word) - at / word, at % word)
        };
        match *packing {
            Packing::None => (box_of([lead, row, column], [1, rows as u64, columns as u64]), 0),
            Packing::Row { bits, .. } => {
                let (at, n, bit) = words(column, columns, bits);
                (box_of([lead, row, at], [1, rows as u64, n]), bit)
            }
            Packing::Column { bits } => {
                let (at, n, bit) = words(row, rows, bits);
                (box_of([lead, at, column], [1, n, columns as u64]), bit)
            }
        }
    }

    /// The last row and column.
    pub(super) fn last(&self) -> (u64, u64) {
        let last = |first: u64, n: usize| (first + n as u64).max(1) - 1;
        (last(self.row, self.rows), last(self.column, self.columns))
    }

    /// The box of the numbers for the window's blocks.
    pub(super) fn cells(&self, grid: &Grid) -> SubBox {
        let [of_lead, of_rows, of_columns] = grid.block;
        let (last_row, last_column) = self.last();
        let blocks = |first: u64, last: u64, block: u64| (first / block, last / block - first / block + 1);
        let (top, high) = blocks(self.row, last_row, of_rows);
        let (left, wide) = blocks(self.column, last_column, of_columns);
        box_of([self.lead / of_lead, top, left], [1, high, wide])
    }

    /// The groups that the numbers `of` are of, if they are: the first row or column, and how many there are.
    pub(super) fn groups<'c>(&self, coded: &'c Coded, of: &StoredTensor) -> Option<(&'c Groups, u64, usize)> {
        let groups = coded.groups.as_ref()?;
        // What one number stands for has no groups.
        let (count, first, n) = match groups.rows {
            true => (of.shape[1], self.row, self.rows),
            false => (of.shape[2], self.column, self.columns),
        };
        (count > 1).then_some((groups, first, n))
    }
}

/// Calls `visit` with boxes that make up the box `part` of `axes`, each with the box of the tensor that it reaches over, which
/// has few enough codes.
pub(super) fn for_each_box(
    stored: &StoredTensor,
    coded: &Coded,
    axes: &[PartAxis],
    src_base: &[u64],
    part: &SubBox,
    visit: &mut dyn FnMut(&SubBox, &SubBox) -> Result<()>,
) -> Result<()> {
    let steps = coded.strides(&stored.shape);
    let mut ahead = vec![part.clone()];
    while let Some(mut sub) = ahead.pop() {
        if sub.len.contains(&0) {
            continue;
        }
        let (mut lo, mut len) = (src_base.to_vec(), vec![1u64; stored.shape.len()]);
        for ((axis, start), n) in axes.iter().zip(&sub.start).zip(&sub.len) {
            lo[axis.dim as usize] += start * axis.step;
            len[axis.dim as usize] += (n - 1) * axis.step;
        }
        if len.iter().product::<u64>() <= MOST || sub.volume() <= 1 {
            visit(&sub, &SubBox { start: lo, len })?;
            continue;
        }
        let far = |k: &usize| (sub.len[*k] - 1) * axes[*k].step * steps[axes[*k].dim as usize];
        let axis = (0..axes.len()).filter(|&k| sub.len[k] > 1).max_by_key(far).unwrap_or(0);
        let mut after = sub.clone();
        sub.len[axis] /= 2;
        after.start[axis] += sub.len[axis];
        after.len[axis] -= sub.len[axis];
        ahead.extend([after, sub]);
    }
    Ok(())
}

/// Calls `visit` with the windows that make up a box of a tensor's values: the place of its first value, and the window.
pub(super) fn for_each_window(
    shape: &[u64],
    coded: &Coded,
    over: &SubBox,
    visit: &mut dyn FnMut(usize, Window) -> Result<()>,
) -> Result<()> {
    let SubBox { start: lo, len } = over;
    let count = over.volume() as usize;
    let rank = shape.len();
    let strides = c_strides(shape);
    // What lies around a window: all indices before its rows, or before what is read in one run.
    let mut outer = rank.saturating_sub(2);
    if coded.flat {
        outer = rank.saturating_sub(1);
        while outer > 0 && len[outer] == shape[outer] {
            outer -= 1;
        }
    }
    let each: usize = len[outer..].iter().product::<u64>() as usize;
    let mut at = vec![0u64; outer];
    for begin in (0..count).step_by(each.max(1)) {
        let first = |to: usize| -> u64 {
            (0..to).map(|d| (lo[d] + at.get(d).copied().unwrap_or(0)) * strides[d]).sum()
        };
        let window = if coded.flat {
            Window { lead: 0, row: 0, rows: 1, column: first(rank), columns: each }
        } else {
            let matrix: u64 = shape[outer..].iter().product();
            let of = |d: usize| (lo.get(d).copied().unwrap_or(0), len.get(d).copied().unwrap_or(1));
            let (mut row, mut column) = if rank < 2 { ((0, 1), of(0)) } else { (of(outer), of(outer + 1)) };
            if coded.turned {
                std::mem::swap(&mut row, &mut column);
            }
            let lead = first(outer) / matrix.max(1);
            let (rows, columns) = (row.1 as usize, column.1 as usize);
            Window { lead, row: row.0, rows, column: column.0, columns }
        };
        visit(begin, window)?;
        for (i, n) in at.iter_mut().zip(&len[..outer]).rev() {
            *i += 1;
            if *i < *n {
                break;
            }
            *i = 0;
        }
    }
    Ok(())
}

/// Calls `visit` with each box of other tensors that the box `part` of `axes` of a coded tensor is made of, in the order in
/// which they are read, but for numbers that group indices choose.
pub(super) fn for_each_source_box(
    plan: &Plan,
    stored: &StoredTensor,
    coded: &Coded,
    axes: &[PartAxis],
    src_base: &[u64],
    part: &SubBox,
    visit: &mut dyn FnMut(&StoredTensor, &SubBox) -> Result<()>,
) -> Result<()> {
    let of = |index: u32| &plan.stored[index as usize];
    for_each_box(stored, coded, axes, src_base, part, &mut |_, over| {
        if let Numbers::Table(table) = coded.numbers {
            visit(of(table), &SubBox::whole(&of(table).shape))?;
        }
        for_each_window(&stored.shape, coded, over, &mut |_, window| {
            let codes = of(coded.codes);
            visit(codes, &window.codes(&coded.packing, codes).0)?;
            let scales = coded.scales.iter().map(|scale| &scale.grid);
            coded.zero.iter().chain(scales).try_for_each(|grid| match window.groups(coded, of(grid.of)) {
                Some((groups, first, n)) => visit(of(groups.of), &groups_box(first, n)),
                None => visit(of(grid.of), &window.cells(grid)),
            })
        })
    })
}

/// The box of the group indices of `n` rows or columns from the `first` on.
pub(super) fn groups_box(first: u64, n: usize) -> SubBox {
    box_of([0, 0, first], [1, 1, n as u64])
}

/// A box of three dimensions.
pub(super) fn box_of(lo: [u64; 3], len: [u64; 3]) -> SubBox {
    SubBox { start: lo.to_vec(), len: len.to_vec() }
}
