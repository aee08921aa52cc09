//! Reads the factors of the changes that adapters make.

use std::sync::Arc;

use crate::boxes::SubBox;
use crate::error::Result;
use crate::few::Few;
use crate::kernel;
use crate::memory;
use crate::plan::change::{Change, Extents, Form};
use crate::plan::Part;
use crate::tensor::element_count;

use super::factors::{blocks_of_rows, key_of, Factors, Product};
use super::gather::Sources;
use super::reads::axes_of;

impl Sources<'_> {
    /// The factors of a stored tensor's change.
    pub fn factors(&self, stored: u32, change: &Change, scratch: &mut [u8]) -> Result<Arc<Factors>> {
        self.changes.get(key_of(stored, change), || {
            let tensor = &self.plan.stored[stored as usize];
            Ok(match change {
                Change::Vector { of, .. } => Factors::Vector(self.whole(*of, scratch)?),
                Change::Rows { of, at } => {
                    let mut at: Vec<_> = at.iter().copied().zip(0..).collect();
                    at.sort_unstable();
                    Factors::Rows { values: self.whole(*of, scratch)?, at }
                }
                Change::LowRank { a, b, rank, form, window, magnitude, .. } => {
                    let own = form.extents(&tensor.shape).expect("a plan that was validated");
                    let (extents, rank) = (own.of_product(*window), *rank as usize);
                    let a = self.whole(*a, scratch)?;
                    let b = turned(&self.whole(*b, scratch)?, extents, rank)?;
                    let mut factors = Factors::LowRank(Product { extents, rank, a, b, norms: None });
                    if let Some(magnitude) = magnitude {
                        let mut wanted = self.whole(*magnitude, scratch)?;
                        let have = self.norms(stored, change, *form, &factors, extents, scratch)?;
                        wanted.iter_mut().zip(have).for_each(|(m, norm)| *m /= norm);
                        if let Factors::LowRank(product) = &mut factors {
                            product.norms = Some(wanted);
                        }
                    }
                    factors
                }
            })
        })
    }

    /// All values of a stored tensor, C-ordered.
    fn whole(&self, index: u32, scratch: &mut [u8]) -> Result<Vec<f32>> {
        let tensor = &self.plan.stored[index as usize];
        let mut bytes = memory::allocate(tensor.nbytes() as usize)?;
        let whole = SubBox::whole(&tensor.shape);
        self.read_box(tensor, &whole, &mut bytes, scratch)?;
        let mut values = memory::allocate_values(element_count(&tensor.shape).unwrap_or(0) as usize)?;
        kernel::values(tensor.dtype, &bytes, &mut values);
        Ok(values)
    }

    /// The norm of each output's row after the change, summed in double precision.
    fn norms(
        &self,
        stored: u32,
        change: &Change,
        form: Form,
        factors: &Factors,
        extents: Extents,
        scratch: &mut [u8],
    ) -> Result<Vec<f32>> {
        let tensor = &self.plan.stored[stored as usize];
        let mut squares = memory::allocate_values::<f64>((extents.experts * extents.out) as usize)?;
        let width = tensor.shape[1..].iter().product::<u64>().max(1);
        let part = Part {
            axes: axes_of(&tensor.shape).into(),
            dst_base: 0,
            src_base: Few::repeat(0, tensor.shape.len()),
            sources: [stored].into(),
            combine: crate::plan::Combine::Equal,
            ops: Default::default(),
        };
        let (mut bytes, mut values, mut sum) = (Vec::new(), Vec::new(), Vec::new());
        for sub in blocks_of_rows(&tensor.shape) {
            let n = sub.volume() as usize;
            memory::resize(&mut bytes, n * tensor.dtype.size())?;
            memory::resize(&mut values, n)?;
            self.read_box(tensor, &sub, &mut bytes, scratch)?;
            kernel::values(tensor.dtype, &bytes, &mut values[..n]);
            factors.apply(change, tensor, &part, &sub, &mut values[..n], &mut sum)?;
            for (row, run) in (sub.start[0]..).zip(values[..n].chunks(width as usize)) {
                match form {
                    Form::Columns => {
                        squares.iter_mut().zip(run).for_each(|(s, x)| *s += f64::from(*x) * f64::from(*x));
                    }
                    _ => {
                        squares[row as usize] +=
                            run.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>()
                    }
                }
            }
        }
        Ok(squares.into_iter().map(|s| s.sqrt() as f32).collect())
    }
}

/// `B`, `[out, rank, experts]`, as `[experts, rank, out]`.
fn turned(b: &[f32], extents: Extents, rank: usize) -> Result<Vec<f32>> {
    let (experts, outs) = (extents.experts as usize, extents.out as usize);
    let mut turned = memory::allocate_values(b.len())?;
    for (o, row) in b.chunks(rank * experts).enumerate() {
        for (k, column) in row.chunks(experts).enumerate() {
            for (e, value) in column.iter().enumerate() {
                turned[(e * rank + k) * outs + o] = *value;
            }
        }
    }
    Ok(turned)
}
