//! Codes that represent values: the storage of quantised weights, and the tensors that give the codes their
//! values.
//!
//! The value of an element is `(number of its code - zero point) * scale + term`, each step in float32 and the product
//! rounded as its reference rounds it. Scales, zero points and tables are stored tensors of the plan, and may be coded
//! themselves. All of them have three dimensions: leading ones as one, rows, columns.

use serde::{Deserialize, Serialize};

use super::{Pieces, StoredTensor};
use crate::tensor::{c_strides, element_count, Dtype};

/// The description of values that are made from codes. `R` names a tensor: in a plan its index into
/// [`super::Plan::stored`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Coded<R = u32> {
    /// The codes.
    pub codes: R,
    /// Where the code of an element lies.
    pub packing: Packing,
    /// The number that a code represents.
    pub numbers: Numbers<R>,
    /// True if elements, and blocks of them, are counted over the full tensor instead of by row and column.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub flat: bool,
    /// True if the codes are transposed: their rows are the tensor's last dimension.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub turned: bool,
    /// The number that is subtracted from the number of a code.
    #[serde(default = "nothing", skip_serializing_if = "Option::is_none")]
    pub zero: Option<Grid<R>>,
    /// The factors of the difference.
    #[serde(default = "no_scales", skip_serializing_if = "Vec::is_empty")]
    pub scales: Vec<Scale<R>>,
    /// Groups that rows or columns belong to, if these are not in order.
    #[serde(default = "no_groups", skip_serializing_if = "Option::is_none")]
    pub groups: Option<Groups<R>>,
    /// The dtype to which the product is rounded; `F32` for no rounding.
    pub rounded: Dtype,
    /// The number that is added at the end.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub term: f32,
}

/// One number for each block of elements.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Grid<R = u32> {
    /// The numbers.
    pub of: R,
    /// Extents of a block: leading dimensions, rows, columns. The last block of each may be short.
    pub block: [u64; 3],
}

/// Factors of blocks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Scale<R = u32> {
    /// The factors.
    pub grid: Grid<R>,
    /// True to divide the product of the earlier scales by them; else they multiply it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub divides: bool,
    /// The dtype to which the scale is rounded with them; `F32` for no rounding.
    pub rounded: Dtype,
}

/// Groups that rows or columns belong to: of each the number of its group, a 32-bit integer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Groups<R = u32> {
    /// The numbers.
    pub of: R,
    /// True for rows; else columns.
    pub rows: bool,
}

/// Where the code of an element lies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// It is an element of its own.
    None,
    /// Among the bits of its row, the lowest first.
    Row {
        /// Bits of a code.
        bits: u32,
        /// The place of each code of a word among the codes of that word, where they are not in order.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        lanes: Vec<u8>,
    },
    /// Among the bits of its column, the lowest first.
    Column {
        /// Bits of a code.
        bits: u32,
    },
}

/// The number that a code represents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Numbers<R = u32> {
    /// A float of 8 bits.
    Float(Dtype),
    /// An unsigned integer minus this number.
    Less(u32),
    /// An integer in two's complement with this number of bits.
    Signed(u32),
    /// A float of 4 bits: sign, two of exponent, one of fraction (OCP MX, E2M1).
    E2m1 {
        /// False where the code of the sign alone is a positive zero.
        negative_zero: bool,
    },
    /// A float of 6 bits: sign, two of exponent, three of fraction (OCP MX, E2M3).
    E2m3,
    /// An entry of a table.
    Table(R),
}

fn nothing<R>() -> Option<Grid<R>> {
    None
}

fn no_scales<R>() -> Vec<Scale<R>> {
    Vec::new()
}

fn no_groups<R>() -> Option<Groups<R>> {
    None
}

fn is_zero(term: &f32) -> bool {
    *term == 0.0
}

impl<R> Grid<R> {
    fn map<S, E>(&self, found: &mut dyn FnMut(&R) -> Result<S, E>) -> Result<Grid<S>, E> {
        Ok(Grid { of: found(&self.of)?, block: self.block })
    }
}

impl<R> Coded<R> {
    /// The same with other names of tensors.
    ///
    /// # Errors
    /// The first of `found`.
    pub(crate) fn map<S, E>(&self, found: &mut dyn FnMut(&R) -> Result<S, E>) -> Result<Coded<S>, E> {
        Ok(Coded {
            codes: found(&self.codes)?,
            packing: self.packing.clone(),
            numbers: match &self.numbers {
                Numbers::Float(dtype) => Numbers::Float(*dtype),
                Numbers::Less(offset) => Numbers::Less(*offset),
                Numbers::Signed(bits) => Numbers::Signed(*bits),
                Numbers::E2m1 { negative_zero } => Numbers::E2m1 { negative_zero: *negative_zero },
                Numbers::E2m3 => Numbers::E2m3,
                Numbers::Table(table) => Numbers::Table(found(table)?),
            },
            flat: self.flat,
            turned: self.turned,
            zero: self.zero.as_ref().map(|grid| grid.map(found)).transpose()?,
            scales: self
                .scales
                .iter()
                .map(|scale| {
                    let (divides, rounded) = (scale.divides, scale.rounded);
                    Ok(Scale { grid: scale.grid.map(found)?, divides, rounded })
                })
                .collect::<Result<_, E>>()?,
            groups: match &self.groups {
                Some(groups) => Some(Groups { of: found(&groups.of)?, rows: groups.rows }),
                None => None,
            },
            rounded: self.rounded,
            term: self.term,
        })
    }

    /// The tensors that it is made from, the codes first.
    pub fn needs(&self) -> impl Iterator<Item = &R> {
        let table = match &self.numbers {
            Numbers::Table(table) => Some(table),
            _ => None,
        };
        let grids = self.zero.iter().chain(self.scales.iter().map(|scale| &scale.grid));
        std::iter::once(&self.codes)
            .chain(grids.map(|grid| &grid.of))
            .chain(table)
            .chain(self.groups.iter().map(|groups| &groups.of))
    }

    /// A tensor's extents in the arrangement of its codes: leading dimensions as one, rows, columns.
    pub fn extents(&self, shape: &[u64]) -> [u64; 3] {
        if self.flat {
            return [1, 1, element_count(shape).unwrap_or(0)];
        }
        let (last, rest) = shape.split_last().map_or((1, shape), |(n, rest)| (*n, rest));
        let (other, lead) = rest.split_last().map_or((1, rest), |(n, lead)| (*n, lead));
        let lead = element_count(lead).unwrap_or(0);
        if self.turned {
            [lead, last, other]
        } else {
            [lead, other, last]
        }
    }

    /// Step in the order of the codes per step along each dimension of a tensor.
    pub fn strides(&self, shape: &[u64]) -> Vec<u64> {
        let mut strides = c_strides(shape);
        if let (true, [.., rows, columns]) = (self.turned, &mut strides[..]) {
            (*rows, *columns) = (1, shape[shape.len() - 2]);
        }
        strides.to_vec()
    }

    /// The number of blocks of a tensor.
    fn blocks(&self, shape: &[u64], grid: &Grid<R>) -> [u64; 3] {
        let extents = self.extents(shape);
        std::array::from_fn(|d| extents[d].div_ceil(grid.block[d].max(1)))
    }
}

impl Coded {
    /// Renumbers the stored tensors that it is made from.
    pub(crate) fn renumber(&mut self, mut new: impl FnMut(u32) -> u32) {
        let renumbered: Result<Coded, std::convert::Infallible> = self.map(&mut |old| Ok(new(*old)));
        *self = renumbered.unwrap_or_else(|never| match never {});
    }

    /// The reason why it cannot make a tensor of `shape`: message, expected, got.
    pub(crate) fn misfit(&self, shape: &[u64], stored: &[StoredTensor]) -> Option<Misfit> {
        let tensors = self.needs().map(|of| stored.get(*of as usize)).collect::<Option<Vec<_>>>();
        let Some(tensors) = tensors else {
            return Some(Misfit::of("codes or scales", "stored tensors", "none"));
        };
        if let Some(flat) = tensors.iter().find(|tensor| tensor.shape.len() != 3) {
            return Some(Misfit::of("extents of codes or scales", "three", format!("{:?}", flat.shape)));
        }
        let extents = self.extents(shape);
        let codes = tensors[0];
        let rounds = |dtype: &Dtype| matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32);
        let mut roundings =
            std::iter::once(&self.rounded).chain(self.scales.iter().map(|scale| &scale.rounded));
        if let Some(dtype) = roundings.find(|dtype| !rounds(dtype)) {
            return Some(Misfit::of("rounding", "F16, BF16 or F32", dtype.to_string()));
        }
        if let Numbers::Float(dtype) = &self.numbers {
            if !dtype.is_f8() {
                return Some(Misfit::of("numbers of codes", "a float of 8 bits", dtype.to_string()));
            }
        }
        if !self.packing.fits(extents, codes) || (self.turned && shape.len() < 2) {
            let got = format!("{} {:?}", codes.dtype, codes.shape);
            return Some(Misfit::of("codes", format!("those of {extents:?}"), got));
        }
        if let Some(groups) = &self.groups {
            let numbers = &stored[groups.of as usize];
            let wanted = [1, 1, extents[if groups.rows { 1 } else { 2 }]];
            if numbers.dtype != Dtype::I32 || numbers.shape != wanted || self.flat {
                let got = format!("{} {:?}", numbers.dtype, numbers.shape);
                return Some(Misfit::of("group indices", format!("I32 {wanted:?}"), got));
            }
        }
        if let Numbers::Table(table) = &self.numbers {
            let table = &stored[*table as usize];
            let count = element_count(&table.shape).unwrap_or(u64::MAX);
            let wanted = 1u64 << self.packing.bits().unwrap_or(8);
            if !table.dtype.is_float() || count != wanted {
                let got = format!("{} {:?}", table.dtype, table.shape);
                return Some(Misfit::of("table of values", format!("{wanted} floats"), got));
            }
        }
        let mut grids = self.zero.iter().chain(self.scales.iter().map(|scale| &scale.grid));
        grids.find_map(|grid| {
            let numbers = &stored[grid.of as usize];
            let wanted = self.blocks(shape, grid);
            let is_number = numbers.dtype.is_float() || numbers.dtype.is_f8();
            let fits = is_number && grid.block.iter().all(|n| *n > 0) && numbers.shape == wanted;
            (!fits).then(|| {
                let got = format!("{} {:?}", numbers.dtype, numbers.shape);
                Misfit::of("scales", format!("floats {wanted:?}"), got)
            })
        })
    }
}

/// A mismatch.
pub(crate) struct Misfit {
    pub(crate) what: &'static str,
    pub(crate) expected: String,
    pub(crate) got: String,
}

impl Misfit {
    fn of(what: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Misfit {
        Misfit { what, expected: expected.into(), got: got.into() }
    }
}

impl Packing {
    /// Bits of a code; `None` if it is an element.
    pub fn bits(&self) -> Option<u32> {
        match self {
            Packing::None => None,
            Packing::Row { bits, .. } | Packing::Column { bits } => Some(*bits),
        }
    }

    /// True if a tensor has room for the codes of so many leading indices, rows and columns.
    fn fits(&self, [lead, rows, columns]: [u64; 3], codes: &StoredTensor) -> bool {
        let &[e, r, c] = &codes.shape[..] else { return false };
        let word = codes.dtype.size() as u64 * 8;
        let room = |bits: u32, n: u64| n.saturating_mul(word) / u64::from(bits);
        let is_word = codes.dtype == Dtype::I32 || word == 8;
        is_word
            && match self {
                Packing::None => [e, r, c] == [lead, rows, columns] && word == 8,
                Packing::Row { bits, lanes } => {
                    let in_order = lanes.is_empty();
                    let whole = lanes.len() as u64 * u64::from(*bits) == word
                        && lanes.iter().all(|lane| usize::from(*lane) < lanes.len());
                    (1..=8).contains(bits)
                        && [e, r] == [lead, rows]
                        && room(*bits, c) >= columns
                        && (in_order || whole)
                }
                Packing::Column { bits } => {
                    (1..=8).contains(bits) && [e, c] == [lead, columns] && room(*bits, r) >= rows
                }
            }
    }
}

impl StoredTensor {
    /// The description of its values, if they are made from codes.
    pub fn coded(&self) -> Option<&Coded> {
        match &self.pieces {
            Pieces::Coded(coded) => Some(coded),
            _ => None,
        }
    }
}
