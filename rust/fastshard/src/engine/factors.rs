//! Factors of the changes that adapters make: kept in memory, and applied to boxes of a tensor.

use std::sync::{Arc, Mutex, PoisonError};

use crate::boxes::SubBox;
use crate::error::Result;
use crate::kernel;
use crate::memory;
use crate::plan::change::{Change, Extents, Form, Window};
use crate::plan::{Part, Plan, StoredTensor};
use crate::tensor::{c_strides, element_count};

/// Bytes of factors that are kept for the next tile, or the largest.
const KEPT: u64 = 64 << 20;
/// Elements of a tensor that are processed together for the norms of its rows.
const ROWS: u64 = 64 << 10;

/// Memory that factors take, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Memory {
    /// Of all workers together.
    pub kept: u64,
    /// Of each worker: the factors it uses, and what it reads them from.
    pub each: u64,
}

/// A change with its factors as numbers.
pub enum Factors {
    /// Of a product.
    LowRank(Product),
    /// A vector.
    Vector(Vec<f32>),
    /// Rows, and their positions, ascending, each with its place among the rows.
    Rows { values: Vec<f32>, at: Vec<(u64, usize)> },
}

/// A product's factors.
pub struct Product {
    pub(super) extents: Extents,
    pub(super) rank: usize,
    /// `[experts, rank, in]`
    pub(super) a: Vec<f32>,
    /// `[experts, rank, out]`
    pub(super) b: Vec<f32>,
    /// The number with which each output's row is multiplied.
    pub(super) norms: Option<Vec<f32>>,
}

impl Factors {
    fn bytes(&self) -> u64 {
        let count = match self {
            Factors::LowRank(product) => {
                product.a.len() + product.b.len() + product.norms.as_ref().map_or(0, Vec::len)
            }
            Factors::Vector(values) => values.len(),
            Factors::Rows { values, at } => values.len() + at.len() * 4,
        };
        count as u64 * size_of::<f32>() as u64
    }

    /// Changes the values of a box of `stored`, which are in the order of the box.
    pub fn apply(
        &self,
        change: &Change,
        stored: &StoredTensor,
        part: &Part,
        sub: &SubBox,
        values: &mut [f32],
        sum: &mut Vec<f32>,
    ) -> Result<()> {
        let strides = c_strides(&stored.shape);
        let inner = sub.len.last().copied().unwrap_or(1).max(1) as usize;
        let (dim, step) = part.axes.last().map_or((0, 0), |axis| (axis.dim as usize, axis.step));
        let mut at = vec![0u64; sub.len.len().saturating_sub(1)];
        let mut place = part.src_base.clone();
        for values in values.chunks_mut(inner) {
            place.copy_from_slice(&part.src_base);
            let starts = sub.start.iter().zip(at.iter().chain(std::iter::once(&0)));
            for (axis, (first, i)) in part.axes.iter().zip(starts) {
                place[axis.dim as usize] += (first + i) * axis.step;
            }
            let along = Along { place: &place, strides: &strides, dim, step };
            match (self, change) {
                (Factors::Vector(vector), Change::Vector { scale, .. }) => {
                    add_vector(vector, *scale, &along, values)
                }
                (Factors::Rows { values: rows, at }, _) => replace_rows(rows, at, &along, values),
                (Factors::LowRank(product), Change::LowRank { form, scale, window, .. }) => {
                    product.add(*form, *scale, *window, &along, values, sum)?;
                }
                _ => unreachable!("factors are those of their change"),
            }
            for (i, n) in at.iter_mut().zip(&sub.len).rev() {
                *i += 1;
                if *i < *n {
                    break;
                }
                *i = 0;
            }
        }
        Ok(())
    }
}

/// The place of a run of values in its tensor: the first one is at `place`, and each further one is `step`
/// further along `dim`.
struct Along<'a> {
    place: &'a [u64],
    strides: &'a [u64],
    dim: usize,
    step: u64,
}

impl Along<'_> {
    /// The first value's place among the elements of the dimensions from `from` on.
    fn flat(&self, from: usize) -> u64 {
        self.place[from..].iter().zip(&self.strides[from..]).map(|(i, s)| i * s).sum()
    }

    /// The distance in elements between neighbouring values.
    fn by(&self) -> u64 {
        self.strides.get(self.dim).map_or(0, |stride| stride * self.step)
    }
}

fn add_vector(vector: &[f32], scale: f32, along: &Along, values: &mut [f32]) {
    let places = (along.flat(0)..).step_by(along.by().max(1) as usize);
    values.iter_mut().zip(places).for_each(|(value, at)| *value += vector[at as usize] * scale);
}

fn replace_rows(rows: &[f32], at: &[(u64, usize)], along: &Along, values: &mut [f32]) {
    let width = along.strides[0] as usize;
    for (t, value) in (0..).zip(values) {
        let (row, column) = match along.dim {
            0 => (along.place[0] + t * along.step, along.flat(1)),
            _ => (along.place[0], along.flat(1) + t * along.by()),
        };
        if let Ok(found) = at.binary_search_by_key(&row, |(row, _)| *row) {
            *value = rows[at[found].1 * width + column as usize];
        }
    }
}

impl Product {
    /// Adds the product to a run of values.
    fn add(
        &self,
        form: Form,
        scale: f32,
        window: Option<Window>,
        along: &Along,
        values: &mut [f32],
        sum: &mut Vec<f32>,
    ) -> Result<()> {
        let (place, dim) = (along.place, along.dim);
        // Expert, output and input of the first value, and which of them each next one is further on.
        let (mut expert, out, input) = match form {
            Form::Rows => {
                let (expert, first) = window.map_or((0, 0), |w| (w.expert, w.out));
                (expert, place[0] + first, along.flat(1))
            }
            Form::Columns => (0, place[1], place[0]),
            Form::Experts => (place[0], place[1], place[2]),
            Form::ExpertsByColumns => (place[0], place[2], place[1]),
        };
        let by_output = match form {
            Form::Rows => dim == 0,
            Form::Columns | Form::Experts => dim == 1,
            Form::ExpertsByColumns => dim == 2,
        };
        let by_expert = dim == 0 && matches!(form, Form::Experts | Form::ExpertsByColumns);
        let by = if form == Form::Rows && !by_output { along.by() } else { along.step };
        let by = by.max(1) as usize;
        let (outs, inputs, rank) = (self.extents.out as usize, self.extents.inputs as usize, self.rank);
        let (out, input) = (out as usize, input as usize);
        // Along experts each value is a product of its own.
        let each = if by_expert { 1 } else { values.len().max(1) };
        for values in values.chunks_mut(each) {
            let a = &self.a[expert as usize * rank * inputs..][..rank * inputs];
            let b = &self.b[expert as usize * rank * outs..][..rank * outs];
            memory::grow(sum, values.len())?;
            let sum = &mut sum[..values.len()];
            if by_output {
                let scalars = (0..rank).map(|k| a[k * inputs + input]);
                kernel::product(sum, b.chunks(outs), scalars, out, by);
            } else {
                let scalars = (0..rank).map(|k| b[k * outs + out]);
                kernel::product(sum, a.chunks(inputs), scalars, input, by);
            }
            values.iter_mut().zip(sum.iter()).for_each(|(value, product)| *value += product * scale);
            if let Some(norms) = &self.norms {
                let further = if by_output { by } else { 0 };
                values.iter_mut().enumerate().for_each(|(t, value)| *value *= norms[out + t * further]);
            }
            expert += along.step;
        }
        Ok(())
    }
}

/// The key of kept factors: their stored tensors, and the tensor whose norms they include.
pub type Key = (Vec<u32>, Option<u32>);

/// Makes the key of the factors of a stored tensor's change.
pub fn key_of(stored: u32, change: &Change) -> Key {
    let has_norms = matches!(change, Change::LowRank { magnitude: Some(_), .. });
    (change.needs(), has_norms.then_some(stored))
}

/// Calls `visit` with each box that is read for the factors of a stored tensor's change, which is all of them.
pub fn for_each_source_box(
    plan: &Plan,
    stored: u32,
    change: &Change,
    visit: &mut dyn FnMut(&StoredTensor, &SubBox) -> Result<()>,
) -> Result<()> {
    let (needs, norms_of) = key_of(stored, change);
    for index in needs {
        let tensor = &plan.stored[index as usize];
        visit(tensor, &SubBox::whole(&tensor.shape))?;
    }
    let Some(index) = norms_of else { return Ok(()) };
    let tensor = &plan.stored[index as usize];
    blocks_of_rows(&tensor.shape).try_for_each(|sub| visit(tensor, &sub))
}

/// Rows of a tensor that are processed together for their norms.
pub(super) fn blocks_of_rows(shape: &[u64]) -> impl Iterator<Item = SubBox> + '_ {
    let width = shape[1..].iter().product::<u64>().max(1);
    let rows = (ROWS / width).max(1);
    (0..shape[0]).step_by(rows as usize).map(move |first| {
        let mut sub = SubBox::whole(shape);
        sub.start[0] = first;
        sub.len[0] = rows.min(shape[0] - first);
        sub
    })
}

/// Factors, the most recently used ones last: experts share them.
#[derive(Default)]
pub struct Changes(Mutex<Vec<(Key, Arc<Factors>)>>);

impl Changes {
    /// Computes the maximum memory that the factors of a plan take.
    pub fn memory(plan: &Plan) -> Memory {
        let mut all = Memory::default();
        let mut largest = 0u64;
        for stored in &plan.stored {
            for change in &stored.changes {
                let of = |index: u32| {
                    let tensor = &plan.stored[index as usize];
                    (element_count(&tensor.shape).unwrap_or(0) * size_of::<f32>() as u64, tensor.nbytes())
                };
                let sizes: Vec<_> = change.needs().into_iter().map(of).collect();
                let values: u64 = sizes.iter().map(|(values, _)| values).sum();
                let reading = sizes.iter().map(|(values, bytes)| values + bytes).max().unwrap_or(0);
                largest = largest.max(values);
                all.kept += values;
                all.each = all.each.max(values + reading + ROWS * 12);
            }
        }
        all.kept = all.kept.min(KEPT.max(largest));
        all
    }

    /// The factors of a change, made by `read` unless they are kept.
    pub fn get(&self, of: Key, read: impl FnOnce() -> Result<Factors>) -> Result<Arc<Factors>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = kept.iter().position(|(known, _)| *known == of).map(|at| kept.remove(at).1);
        let factors = match found {
            Some(factors) => factors,
            None => Arc::new(read()?),
        };
        let mut all = factors.bytes();
        let older = kept.iter().rev().take_while(|(_, older)| {
            all += older.bytes();
            all <= KEPT
        });
        let gone = kept.len() - older.count();
        kept.drain(..gone);
        kept.push((of, Arc::clone(&factors)));
        Ok(factors)
    }
}
