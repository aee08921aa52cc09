//! The changes that an adapter makes to a stored tensor's values: products of two narrow matrices, vectors,
//! rows.
//!
//! Changes are computed in float32 and rounded once to the tensor's dtype in the result. Factors are stored
//! tensors of the plan like any other, and are not outputs.

use serde::{Deserialize, Serialize};

use super::StoredTensor;
use crate::tensor::element_count;

/// One change, applied to the values of the full stored tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// `scale * (B A)` is added; with a magnitude, each output row is then brought to the norm that it states.
    LowRank {
        /// `A` (index into [`super::Plan::stored`]): `[rank, in]`, of experts `[experts * rank, in]`.
        a: u32,
        /// `B`: `[out, rank]`, of experts `[out, rank * experts]`.
        b: u32,
        /// Columns of `B`, of one expert.
        rank: u64,
        /// Factor of the product.
        scale: f32,
        /// How the tensor has outputs and inputs.
        form: Form,
        /// Which part of the product it is, where the tensor is one expert's or a half of its outputs.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        window: Option<Window>,
        /// Norm of each output's row, `[out]` (DoRA).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        magnitude: Option<u32>,
    },
    /// `scale * vector` is added.
    Vector {
        /// The vector.
        of: u32,
        /// Factor.
        scale: f32,
    },
    /// Rows are replaced.
    Rows {
        /// The new rows, in the order of `at`.
        of: u32,
        /// Their positions in the tensor.
        at: Vec<u64>,
    },
}

/// The arrangement of outputs and inputs in a tensor that is a factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// `[out, in, ...]`
    Rows,
    /// `[in, out]`: an embedding, or a layer that keeps its weight the other way round.
    Columns,
    /// `[experts, out, in]`
    Experts,
    /// `[experts, in, out]`
    ExpertsByColumns,
}

/// The part of a product over stacked experts that is added to a tensor of one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Experts of the product.
    pub experts: u64,
    /// The expert of the tensor.
    pub expert: u64,
    /// Outputs of the product, of one expert.
    pub outs: u64,
    /// The first output of the tensor.
    pub out: u64,
}

/// Extents of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extents {
    /// Experts; 1 where there are none.
    pub experts: u64,
    /// Outputs.
    pub out: u64,
    /// Inputs.
    pub inputs: u64,
}

impl Extents {
    /// The extents of the full product, of which a tensor of these extents takes a part.
    pub fn of_product(self, window: Option<Window>) -> Extents {
        window.map_or(self, |w| Extents { experts: w.experts, out: w.outs, ..self })
    }
}

impl Form {
    /// Extents of a tensor of this form; `None` for an impossible shape.
    pub fn extents(self, shape: &[u64]) -> Option<Extents> {
        let of = |experts, out, inputs| Some(Extents { experts, out, inputs });
        match (self, shape) {
            (Form::Rows, [out, rest @ ..]) if !rest.is_empty() => of(1, *out, element_count(rest)?),
            (Form::Columns, &[inputs, out]) => of(1, out, inputs),
            (Form::Experts, &[experts, out, inputs]) | (Form::ExpertsByColumns, &[experts, inputs, out]) => {
                of(experts, out, inputs)
            }
            _ => None,
        }
    }
}

impl Change {
    /// The stored tensors that it needs.
    pub fn needs(&self) -> Vec<u32> {
        match self {
            Change::LowRank { a, b, magnitude, .. } => {
                [Some(*a), Some(*b), *magnitude].into_iter().flatten().collect()
            }
            Change::Vector { of, .. } | Change::Rows { of, .. } => vec![*of],
        }
    }

    /// Renumbers the stored tensors that it needs.
    pub fn renumber(&mut self, mut new: impl FnMut(u32) -> u32) {
        match self {
            Change::LowRank { a, b, magnitude, .. } => {
                (*a, *b) = (new(*a), new(*b));
                *magnitude = magnitude.map(new);
            }
            Change::Vector { of, .. } | Change::Rows { of, .. } => *of = new(*of),
        }
    }

    /// The change in words.
    pub fn words(&self) -> String {
        match self {
            Change::LowRank { rank, scale, magnitude: None, .. } => {
                format!("add a product of rank {rank} x {scale}")
            }
            Change::LowRank { rank, scale, .. } => {
                format!("add a product of rank {rank} x {scale}, rows to their norms")
            }
            Change::Vector { scale, .. } => format!("add a vector x {scale}"),
            Change::Rows { at, .. } => format!("replace {} rows", at.len()),
        }
    }

    /// The factor that does not fit a tensor of this shape, with its expected and its actual shape.
    pub fn misfit(&self, shape: &[u64], stored: &[StoredTensor]) -> Option<(u32, String, String)> {
        let of = |index: u32| &stored[index as usize];
        let wrong = |index: u32, want: Vec<u64>| {
            let have = element_count(&of(index).shape);
            let is_float = of(index).dtype.is_float();
            let fits = have == element_count(&want) && is_float;
            let got = format!("{} {:?}", of(index).dtype, of(index).shape);
            (!fits).then(|| (index, format!("floats that make up {want:?}"), got))
        };
        match self {
            Change::LowRank { a, b, rank, form, magnitude, window, .. } => {
                let Some(own) = form.extents(shape) else {
                    return Some((
                        *a,
                        format!("a factor of a tensor of shape {shape:?}"),
                        format!("{form:?}"),
                    ));
                };
                let Extents { experts, out, inputs } = own.of_product(*window);
                let within = window.is_none_or(|w| w.expert < experts && w.out + own.out <= out);
                if !within || (window.is_some() && (*form != Form::Rows || magnitude.is_some())) {
                    return Some((*a, format!("a part of {experts} experts x {out}"), format!("{window:?}")));
                }
                // A product without terms, outputs or inputs is no change that anybody saves.
                if [*rank, experts, own.experts, own.out, out, inputs].contains(&0) {
                    let got = format!("{} {:?}", of(*a).dtype, of(*a).shape);
                    return Some((*a, format!("factors of rank 1 or more, for {shape:?}"), got));
                }
                wrong(*a, vec![experts * rank, inputs])
                    .or_else(|| wrong(*b, vec![out, rank * experts]))
                    .or_else(|| wrong((*magnitude)?, vec![out]))
            }
            Change::Vector { of, .. } | Change::Rows { of, .. } if shape.is_empty() || shape.contains(&0) => {
                let got = format!("{} {:?}", stored[*of as usize].dtype, stored[*of as usize].shape);
                Some((*of, "a tensor of at least one row and column".into(), got))
            }
            Change::Vector { of, .. } => wrong(*of, shape.to_vec()),
            Change::Rows { of, at } => {
                let width = shape.get(1..).map(<[u64]>::to_vec).unwrap_or_default();
                let want = [vec![at.len() as u64], width].concat();
                let beyond = at.iter().find(|row| **row >= shape.first().copied().unwrap_or(0));
                wrong(*of, want).or_else(|| {
                    let row = beyond?;
                    Some((*of, format!("rows of {shape:?}"), format!("row {row}")))
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Pieces;
    use crate::tensor::Dtype;

    fn stored(shape: &[u64]) -> StoredTensor {
        StoredTensor {
            name: format!("{shape:?}").into(),
            dtype: Dtype::F32,
            shape: shape.into(),
            pieces: Pieces::Ranges(Vec::new()),
            rank: None,
            rule: 0,
            index: Default::default(),
            shard: None,
            twins: Default::default(),
            changes: Box::default(),
        }
    }

    /// What has no values is no change: the engine divides by its extents.
    #[test]
    fn extents_of_zero_fit_nothing() {
        let product = |form, rank, window| Change::LowRank {
            a: 0,
            b: 1,
            rank,
            scale: 1.0,
            form,
            window,
            magnitude: None,
        };
        let none = Some(Window { experts: 0, expert: 0, outs: 0, out: 0 });
        for (form, shape, rank, window) in [
            (Form::Rows, vec![4, 3], 0, None),
            (Form::Rows, vec![0, 3], 2, None),
            (Form::Rows, vec![4, 0], 2, None),
            (Form::Columns, vec![4, 0], 2, None),
            (Form::Experts, vec![0, 4, 3], 2, None),
            (Form::ExpertsByColumns, vec![2, 0, 3], 2, None),
            (Form::Rows, vec![0, 3], 2, none),
        ] {
            let factors = [stored(&[0]), stored(&[0])];
            assert!(product(form, rank, window).misfit(&shape, &factors).is_some(), "{form:?} {shape:?}");
        }
        let factors = [stored(&[2, 3]), stored(&[4, 2])];
        assert_eq!(product(Form::Rows, 2, None).misfit(&[4, 3], &factors), None);
        for shape in [vec![], vec![0], vec![0, 3], vec![3, 0]] {
            let empty = [stored(&[0])];
            assert!(Change::Rows { of: 0, at: vec![] }.misfit(&shape, &empty).is_some(), "{shape:?}");
            assert!(Change::Vector { of: 0, scale: 1.0 }.misfit(&shape, &empty).is_some(), "{shape:?}");
        }
    }
}
