//! Values of codes, made box by box: only the codes and scales of one box are in memory.

use crate::boxes::SubBox;
use crate::codes;
use crate::error::{Finding, Result};
use crate::kernel::{self, StridedBox};
use crate::memory;
use crate::plan::{Coded, Grid, Numbers, Packing, PartAxis, StoredTensor};
use crate::tensor::Dtype;

use super::gather::{Into, Sources};
use super::pool::Buffers;
use super::reads::shift;
use super::windows::{box_of, for_each_box, for_each_window, groups_box, Window};

/// Values made at a time: they stay in the first-level cache.
const RUN: usize = 4096;
/// Minimum length of contiguous runs in the result for writing values run by run.
const LONG: u64 = 64;
/// Numbers for the blocks of a window.
struct Cells {
    values: Vec<f32>,
    /// Numbers of one row of blocks.
    width: usize,
    /// Where those of each row begin.
    rows: Vec<usize>,
    columns: Columns,
}

/// The number in a row of blocks for each column.
enum Columns {
    /// Blocks of this length; `first` is the offset of the first column in its block.
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

    /// Calls `apply` with each number and the values of a row, from a column on, to which it applies.
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

/// The places of values that are made in the order of the codes, if long runs of them are contiguous in the
/// result: the axes of the box, those with long steps first, each with its length, its step in that order and
/// its step in the result; and the length of the runs.
struct Runs {
    axes: Vec<(u64, u64, u64)>,
    len: u64,
}

impl Runs {
    /// The mapping of a box to `into`, if the box is a full window and its runs are long enough.
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

    /// Writes values, which begin at place `at` in the order of the codes, to the result as `to`.
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

impl Sources<'_> {
    /// Reads the box `part` of `axes` of the values of codes, which are float32, as `to`.
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
        let mut buffers = self.coded.take();
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

    /// Makes a box of a tensor's values, and passes them to `put` in the order of the codes, with the place
    /// of the first one.
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

    /// The numbers for the blocks of a window.
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

    /// The numbers that the codes represent.
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
