//! Values of codes, made box by box: codes and their scales are read for a box, and no more of them is held.

use std::sync::{Mutex, PoisonError};

use crate::boxes::SubBox;
use crate::codes;
use crate::error::{Finding, Result};
use crate::kernel::{self, StridedBox};
use crate::memory;
use crate::plan::{Coded, Grid, Groups, Numbers, Packing, PartAxis, Plan, StoredTensor};
use crate::tensor::{c_strides, Dtype};

use super::gather::{Into, Sources};
use super::reads::shift;

/// Elements whose codes are read at a time, at most.
const MOST: u64 = 128 << 10;
/// Bytes that a worker holds for each of them: codes as they are stored, as bytes, numbers, scales, zero points.
const EACH: u64 = 4 + 1 + 4 + 4 + 4;
/// Values that are made at a time: they stay in the first-level cache.
const RUN: usize = 4096;
/// Values that lie together in the result, at least, for them to be written there one run after another.
const LONG: u64 = 64;
/// Codes that are made of others at the same time: zero points and scales may be.
const DEPTH: u64 = 2;

/// Buffers that are used again.
#[derive(Default)]
struct Buffers {
    bytes: Vec<u8>,
    codes: Vec<u8>,
    values: Vec<f32>,
    narrow: Vec<u8>,
}

/// Buffers of all workers that are not in use.
#[derive(Default)]
pub(super) struct Pool(Mutex<Vec<Buffers>>);

impl Pool {
    /// Bytes that each worker needs, at most.
    pub(super) fn memory(plan: &Plan) -> u64 {
        match plan.stored.iter().any(|stored| stored.coded().is_some()) {
            true => MOST * EACH * DEPTH,
            false => 0,
        }
    }

    fn taken(&self) -> Buffers {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    fn put(&self, buffers: Buffers) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffers);
    }
}

/// A box of a matrix of codes: leading index, first row and column, and how many there are.
#[derive(Clone, Copy)]
struct Window {
    lead: u64,
    row: u64,
    rows: usize,
    column: u64,
    columns: usize,
}

impl Window {
    /// The box of `codes` that holds the window's, and the bit of its first word in which the first code of a row or column
    /// begins.
    fn codes(&self, packing: &Packing, codes: &StoredTensor) -> (SubBox, u64) {
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
    fn last(&self) -> (u64, u64) {
        let last = |first: u64, n: usize| (first + n as u64).max(1) - 1;
        (last(self.row, self.rows), last(self.column, self.columns))
    }

    /// The box of the numbers of the blocks that the window lies in.
    fn cells(&self, grid: &Grid) -> SubBox {
        let [of_lead, of_rows, of_columns] = grid.block;
        let (last_row, last_column) = self.last();
        let blocks = |first: u64, last: u64, block: u64| (first / block, last / block - first / block + 1);
        let (top, high) = blocks(self.row, last_row, of_rows);
        let (left, wide) = blocks(self.column, last_column, of_columns);
        box_of([self.lead / of_lead, top, left], [1, high, wide])
    }

    /// The groups that the numbers `of` are of, if they are: the first row or column, and how many there are.
    fn groups<'c>(&self, coded: &'c Coded, of: &StoredTensor) -> Option<(&'c Groups, u64, usize)> {
        let groups = coded.groups.as_ref()?;
        // What one number stands for has no groups.
        let (count, first, n) = match groups.rows {
            true => (of.shape[1], self.row, self.rows),
            false => (of.shape[2], self.column, self.columns),
        };
        (count > 1).then_some((groups, first, n))
    }
}

/// Numbers of the blocks that a window lies in.
struct Cells {
    values: Vec<f32>,
    /// Numbers of one row of blocks.
    width: usize,
    /// Where those of each row begin.
    rows: Vec<usize>,
    columns: Columns,
}

/// Which number of a row of blocks is a column's.
enum Columns {
    /// Blocks of this length; the first column is so far into its own.
    Blocks { len: u64, first: u64 },
    /// Of each column.
    Groups(Vec<usize>),
}

impl Cells {
    fn row(&self, row: usize) -> &[f32] {
        &self.values[self.rows[row]..][..self.width]
    }

    fn at(&self, row: usize, column: usize) -> f32 {
        let block = match &self.columns {
            Columns::Blocks { len, first } => ((first + column as u64) / len) as usize,
            Columns::Groups(groups) => groups[column],
        };
        self.row(row)[block]
    }

    /// The first column of a block.
    fn first_of(&self, block: usize) -> usize {
        match &self.columns {
            Columns::Blocks { len, first } => (block as u64 * len).saturating_sub(*first) as usize,
            Columns::Groups(_) => 0,
        }
    }

    /// Calls `apply` with each number and the values of a row, from a column on, that it is of.
    fn apply(&self, row: usize, column: usize, values: &mut [f32], apply: impl Fn(f32, &mut [f32])) {
        let numbers = self.row(row);
        match &self.columns {
            Columns::Blocks { len: 1, .. } => {
                let each = values.iter_mut().zip(&numbers[column..]);
                each.for_each(|(value, n)| apply(*n, std::slice::from_mut(value)));
            }
            Columns::Blocks { len, first } => {
                let at = first + column as u64;
                kernel::by_blocks(values, &numbers[(at / len) as usize..], *len, at % len, apply);
            }
            Columns::Groups(groups) => {
                let each = values.iter_mut().zip(&groups[column..]);
                each.for_each(|(value, group)| apply(numbers[*group], std::slice::from_mut(value)));
            }
        }
    }
}

/// Where values go that are made in the order of the codes, if many of them lie together there: the axes of the box, those a
/// long step apart first, each with its length, its step in that order and its step in the result; and how many lie together.
struct Runs {
    axes: Vec<(u64, u64, u64)>,
    len: u64,
}

impl Runs {
    /// How a box goes into `into`, if it is all of a window and enough values lie together.
    fn of(axes: &[PartAxis], sub: &SubBox, own: &[u64], into: &Into) -> Option<Runs> {
        let steps = axes.iter().zip(&sub.len).zip(into.strides);
        let mut axes: Vec<(u64, u64, u64)> = steps
            .filter(|((_, n), _)| **n > 1)
            .map(|((axis, &n), &dst)| (n, axis.step * own[axis.dim as usize], dst))
            .collect();
        axes.sort_by_key(|(_, step, _)| std::cmp::Reverse(*step));
        let mut all = 1;
        for (n, step, _) in axes.iter().rev() {
            if *step != all {
                return None;
            }
            all *= n;
        }
        let mut len = 1;
        while let Some(&(n, _, dst)) = axes.last() {
            if dst != len {
                break;
            }
            len *= n;
            axes.pop();
        }
        (len >= LONG || axes.is_empty()).then_some(Runs { axes, len })
    }

    /// Puts values, which begin at place `at` in the order of the codes, into the result as `to`.
    fn put(&self, mut at: u64, mut values: &[f32], to: Dtype, base: u64, bytes: &mut [u8]) {
        while !values.is_empty() {
            let (here, after) = values.split_at(values.len().min((self.len - at % self.len) as usize));
            let place = self.axes.iter().map(|(n, step, dst)| at / step % n * dst).sum::<u64>();
            let first = (base + place + at % self.len) as usize * to.size();
            kernel::from_f32(to, here, &mut bytes[first..][..here.len() * to.size()]);
            at += here.len() as u64;
            values = after;
        }
    }
}

/// Calls `visit` with boxes that make up the box `part` of `axes`, each with the box of the tensor that it reaches over, which
/// has few enough codes.
fn for_each_box(
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
fn for_each_window(
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
fn groups_box(first: u64, n: usize) -> SubBox {
    box_of([0, 0, first], [1, 1, n as u64])
}

fn box_of(lo: [u64; 3], len: [u64; 3]) -> SubBox {
    SubBox { start: lo.to_vec(), len: len.to_vec() }
}

impl Sources<'_> {
    /// Reads the box `part` of `axes` of the values that codes stand for, which are float32, as `to`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn read_coded(
        &self,
        stored: &StoredTensor,
        coded: &Coded,
        axes: &[PartAxis],
        src_base: &[u64],
        part: &SubBox,
        to: Dtype,
        into: &mut Into,
        scratch: &mut [u8],
    ) -> Result<()> {
        let mut buffers = self.coded.taken();
        for_each_box(stored, coded, axes, src_base, part, &mut |sub, over| {
            let own = coded.strides(&over.len);
            let dst = into.base + shift(part, sub, into.strides);
            if let Some(runs) = Runs::of(axes, sub, &own, into) {
                let bytes = &mut *into.bytes;
                let mut put = |at: usize, values: &[f32]| runs.put(at as u64, values, to, dst, bytes);
                return self.make_box(stored, coded, over, &mut buffers, scratch, &mut put);
            }
            let mut narrow = std::mem::take(&mut buffers.narrow);
            let size = to.size();
            memory::resize(&mut narrow, over.volume() as usize * size)?;
            let mut put = |at: usize, values: &[f32]| {
                kernel::from_f32(to, values, &mut narrow[at * size..][..values.len() * size]);
            };
            self.make_box(stored, coded, over, &mut buffers, scratch, &mut put)?;
            let strides: Vec<u64> = axes.iter().map(|axis| axis.step * own[axis.dim as usize]).collect();
            let shape = StridedBox { extents: &sub.len, src_strides: &strides, dst_strides: into.strides };
            kernel::copy(&narrow, 0, into.bytes, dst, &shape, size);
            buffers.narrow = narrow;
            Ok(())
        })?;
        self.coded.put(buffers);
        Ok(())
    }

    /// Makes a box of a tensor's values, and hands them to `put` in the order of the codes: the place of the first, and values.
    #[allow(clippy::too_many_arguments)]
    fn make_box(
        &self,
        stored: &StoredTensor,
        coded: &Coded,
        over: &SubBox,
        buffers: &mut Buffers,
        scratch: &mut [u8],
        put: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        let table = self.table(&coded.numbers, scratch)?;
        for_each_window(&stored.shape, coded, over, &mut |begin, window| {
            let mut place = |at: usize, values: &[f32]| put(begin + at, values);
            self.make_window(stored, coded, window, &table, buffers, scratch, &mut place)
        })
    }

    /// Makes the values of a window, run by run.
    #[allow(clippy::too_many_arguments)]
    fn make_window(
        &self,
        stored: &StoredTensor,
        coded: &Coded,
        window: Window,
        table: &[f32; 256],
        buffers: &mut Buffers,
        scratch: &mut [u8],
        put: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        self.take_codes(coded, window, buffers, scratch)?;
        let zeros = coded.zero.as_ref().map(|grid| self.cells(stored, coded, grid, window, scratch));
        let zeros = zeros.transpose()?;
        let scales = self.scales_of(stored, coded, window, scratch)?;
        let Buffers { codes, values, .. } = buffers;
        memory::resize(values, RUN)?;
        for (row, codes) in codes.chunks(window.columns.max(1)).enumerate() {
            for (run, codes) in codes.chunks(RUN).enumerate() {
                let (column, values) = (run * RUN, &mut values[..codes.len()]);
                match coded.numbers {
                    Numbers::Float(dtype) => kernel::values(dtype, codes, values),
                    _ => kernel::look_up(table, codes, values),
                }
                if let Some(zeros) = &zeros {
                    zeros.apply(row, column, values, |zero, values| {
                        values.iter_mut().for_each(|v| *v -= zero)
                    });
                }
                if let Some(scales) = &scales {
                    scales.apply(row, column, values, |n, values| values.iter_mut().for_each(|v| *v *= n));
                    kernel::round(coded.rounded, values);
                }
                if coded.term != 0.0 {
                    values.iter_mut().for_each(|v| *v += coded.term);
                }
                put(row * window.columns + column, values);
            }
        }
        Ok(())
    }

    /// Puts the codes of a window into `buffers.codes`, row by row.
    fn take_codes(
        &self,
        coded: &Coded,
        window: Window,
        buffers: &mut Buffers,
        scratch: &mut [u8],
    ) -> Result<()> {
        let codes = &self.plan.stored[coded.codes as usize];
        let Window { rows, columns, .. } = window;
        let (sub, bit) = window.codes(&coded.packing, codes);
        memory::resize(&mut buffers.codes, rows * columns)?;
        if coded.packing == Packing::None {
            return self.read_box(codes, &sub, &mut buffers.codes, scratch);
        }
        let size = codes.dtype.size();
        memory::resize(&mut buffers.bytes, sub.volume() as usize * size)?;
        self.read_box(codes, &sub, &mut buffers.bytes, scratch)?;
        match &coded.packing {
            Packing::None => {}
            Packing::Row { bits, lanes } => {
                let each = sub.len[2] as usize * size;
                let both = buffers.bytes.chunks(each.max(1)).zip(buffers.codes.chunks_mut(columns.max(1)));
                for (bytes, out) in both {
                    match lanes.is_empty() {
                        true => kernel::unpack_row(bytes, bit, *bits, out),
                        false => kernel::unpack_lanes(bytes, bit / u64::from(*bits), *bits, lanes, out),
                    }
                }
            }
            Packing::Column { bits } => {
                for (k, out) in (0u64..).zip(buffers.codes.chunks_mut(columns.max(1))) {
                    kernel::unpack_column(&buffers.bytes, size, bit + k * u64::from(*bits), *bits, out);
                }
            }
        }
        Ok(())
    }

    /// The product of all scales of a window, by the blocks of the first.
    fn scales_of(
        &self,
        stored: &StoredTensor,
        coded: &Coded,
        window: Window,
        scratch: &mut [u8],
    ) -> Result<Option<Cells>> {
        let Some((first, others)) = coded.scales.split_first() else { return Ok(None) };
        let mut all = self.cells(stored, coded, &first.grid, window, scratch)?;
        kernel::round(first.rounded, &mut all.values);
        for scale in others {
            let other = self.cells(stored, coded, &scale.grid, window, scratch)?;
            let mut done = vec![false; all.values.len()];
            for row in 0..window.rows {
                let begins = all.rows[row];
                if std::mem::replace(&mut done[begins], true) {
                    continue;
                }
                for block in 0..all.width {
                    let factor = other.at(row, all.first_of(block));
                    let value = &mut all.values[begins + block];
                    *value = if scale.divides { *value / factor } else { *value * factor };
                }
            }
            kernel::round(scale.rounded, &mut all.values);
        }
        Ok(Some(all))
    }

    /// The numbers of the blocks that a window lies in.
    fn cells(
        &self,
        stored: &StoredTensor,
        coded: &Coded,
        grid: &Grid,
        window: Window,
        scratch: &mut [u8],
    ) -> Result<Cells> {
        let of = &self.plan.stored[grid.of as usize];
        let [_, of_rows, of_columns] = grid.block;
        let sub = window.cells(grid);
        let (lead, top, left, high, wide) =
            (sub.start[0], sub.start[1], sub.start[2], sub.len[1], sub.len[2]);
        let column = window.column;
        let places = |wide: u64| -> Vec<usize> {
            (window.row..=window.last().0).map(|r| ((r / of_rows - top) * wide) as usize).collect()
        };
        let Some((groups, first, n)) = window.groups(coded, of) else {
            let mut values = memory::allocate_values((high * wide) as usize)?;
            self.numbers(of, &sub, &mut values, scratch)?;
            let columns = Columns::Blocks { len: of_columns, first: column % of_columns };
            return Ok(Cells { values, width: wide as usize, rows: places(wide), columns });
        };
        let count = of.shape[if groups.rows { 1 } else { 2 }];
        let named = self.groups(groups.of, first, n, count, stored, scratch)?;
        if groups.rows {
            let mut known: Vec<u64> = named.clone();
            known.sort_unstable();
            known.dedup();
            let mut values = memory::allocate_values(known.len() * wide as usize)?;
            for (group, values) in known.iter().zip(values.chunks_mut(wide as usize)) {
                self.numbers(of, &box_of([lead, *group, left], [1, 1, wide]), values, scratch)?;
            }
            let place = |group| known.binary_search(group).unwrap_or(0) * wide as usize;
            let columns = Columns::Blocks { len: of_columns, first: column % of_columns };
            let rows = named.iter().map(place).collect();
            return Ok(Cells { values, width: wide as usize, rows, columns });
        }
        let (low, most) = (named.iter().min().copied(), named.iter().max().copied());
        let (low, wide) = (low.unwrap_or(0), most.unwrap_or(0) - low.unwrap_or(0) + 1);
        let mut values = memory::allocate_values((high * wide) as usize)?;
        self.numbers(of, &box_of([lead, top, low], [1, high, wide]), &mut values, scratch)?;
        let columns = Columns::Groups(named.iter().map(|group| (group - low) as usize).collect());
        Ok(Cells { values, width: wide as usize, rows: places(wide), columns })
    }

    /// The groups of `n` rows or columns from the `first` on, of `count`.
    fn groups(
        &self,
        of: u32,
        first: u64,
        n: usize,
        count: u64,
        stored: &StoredTensor,
        scratch: &mut [u8],
    ) -> Result<Vec<u64>> {
        let tensor = &self.plan.stored[of as usize];
        let mut bytes = memory::allocate(n * 4)?;
        self.read_box(tensor, &groups_box(first, n), &mut bytes, scratch)?;
        let read = |bytes: &[u8]| i32::from_le_bytes(bytes.try_into().expect("four bytes"));
        let named: Vec<i32> = bytes.chunks_exact(4).map(read).collect();
        if let Some(outside) = named.iter().find(|group| !(0..count as i64).contains(&i64::from(**group))) {
            let what = format!("the group indices of {} are not those of its groups", stored.name);
            return Err(Finding::new(codes::BAD_VALUE, what)
                .tensor(&tensor.name)
                .expected(format!("0 to {}", count.saturating_sub(1)), outside)
                .help("restore the file that the quantiser wrote")
                .into());
        }
        Ok(named.into_iter().map(|group| group as u64).collect())
    }

    /// What the codes are as numbers.
    fn table(&self, numbers: &Numbers, scratch: &mut [u8]) -> Result<[f32; 256]> {
        Ok(match *numbers {
            // Computed, which is faster.
            Numbers::Float(_) => [0.0; 256],
            Numbers::Less(offset) => std::array::from_fn(|code| code as f32 - offset as f32),
            Numbers::Signed(bits) => std::array::from_fn(|code| {
                let shift = 32 - bits.clamp(1, 8);
                f32::from(((code as i32) << shift >> shift) as i16)
            }),
            Numbers::E2m1 { negative_zero } => kernel::mini_float(4, negative_zero),
            Numbers::E2m3 => kernel::mini_float(6, true),
            Numbers::Table(table) => {
                let tensor = &self.plan.stored[table as usize];
                let whole = SubBox::whole(&tensor.shape);
                let mut values = memory::allocate_values(whole.volume() as usize)?;
                self.numbers(tensor, &whole, &mut values, scratch)?;
                let mut table = [0.0; 256];
                table[..values.len()].copy_from_slice(&values);
                table
            }
        })
    }

    /// A box of a tensor, as float32.
    fn numbers(
        &self,
        tensor: &StoredTensor,
        sub: &SubBox,
        values: &mut [f32],
        scratch: &mut [u8],
    ) -> Result<()> {
        let mut bytes = memory::allocate(values.len() * tensor.dtype.size())?;
        self.read_box(tensor, sub, &mut bytes, scratch)?;
        kernel::values(tensor.dtype, &bytes, values);
        Ok(())
    }
}
