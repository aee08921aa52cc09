//! Codes that are wanted as values: what an adapter says of them, found among the tensors of files.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;

use super::assembled::Gathered;
use super::seen_as::seen_as;
use crate::codes;
use crate::error::Finding;
use crate::layout::resolve::Stored;
use crate::name::Name;
use crate::plan::{Coded, Pieces, StoredTensor};
use crate::tensor::{element_count, Dtype};

/// A tensor whose values are made of codes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CodedSide {
    /// Name of the tensor of values.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// What makes it.
    pub coded: Coded<Operand>,
}

/// A tensor that values are made of: codes, scales, tables.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operand {
    /// Name of the tensor in the files, as the model calls it.
    pub name: String,
    /// Its shape as it is looked at: of the same number of bytes.
    pub shape: Vec<u64>,
    /// Its dtype as it is looked at; the one that it is stored in if absent.
    #[serde(default)]
    pub dtype: Option<Dtype>,
    /// What makes its values of codes, if they are coded themselves; the codes have the name.
    #[serde(default)]
    pub coded: Option<Box<Coded<Operand>>>,
}

/// Places in the pass of the weights by name, of one rank.
type Places<'a> = HashMap<&'a str, usize>;

impl Gathered {
    /// Puts tensors of values in the place of those of codes; what else they are made of is hidden by whoever asks for them.
    pub(super) fn decode(&mut self, sides: &[CodedSide]) {
        if sides.is_empty() {
            return;
        }
        let seen: Vec<(Name, u32)> =
            self.passes[0].seen.iter().map(|seen| (seen.name.clone(), seen.unit)).collect();
        let mut of_ranks: BTreeMap<&BTreeMap<String, u64>, Places> = BTreeMap::new();
        let coords: Vec<BTreeMap<String, u64>> = self.units.iter().map(|unit| unit.coords.clone()).collect();
        for (at, (name, unit)) in seen.iter().enumerate() {
            of_ranks.entry(&coords[*unit as usize]).or_default().entry(name).or_insert(at);
        }
        for side in sides {
            let mut found = false;
            for places in of_ranks.values() {
                let Some(&at) = places.get(side.coded.codes.name.as_str()) else { continue };
                found = true;
                match self.values(side, places) {
                    Ok(index) => {
                        let unit = self.passes[0].seen[at].unit;
                        let computed = Stored {
                            name: side.name.as_str().into(),
                            shape: side.shape[..].into(),
                            dtype: Dtype::F32,
                            unit,
                        };
                        self.passes[0].seen[at] = computed;
                        self.passes[0].tensors[at] = index;
                    }
                    Err(finding) => {
                        let unit = &self.units[self.passes[0].seen[at].unit as usize];
                        self.findings.push((*finding).file(&unit.file));
                    }
                }
            }
            if !found {
                self.findings.push(missing(&side.coded.codes.name));
            }
        }
    }

    /// Adds a tensor of values.
    fn values(&mut self, side: &CodedSide, places: &Places) -> Result<u32, Box<Finding>> {
        let coded = side.coded.map(&mut |operand| self.operand(operand, places))?;
        self.add_values(&side.name, &side.shape, coded)
    }

    fn add_values(&mut self, name: &str, shape: &[u64], coded: Coded) -> Result<u32, Box<Finding>> {
        if let Some(misfit) = coded.misfit(shape, &self.stored) {
            return Err(Finding::new(codes::SHAPE, format!("{} that make no {shape:?}", misfit.what))
                .tensor(name)
                .expected(misfit.expected, misfit.got)
                .help("restore the file that the quantiser wrote")
                .into());
        }
        let rank = self.stored[coded.codes as usize].rank.clone();
        let pieces = Pieces::Coded(Box::new(coded));
        self.stored.push(super::assembled::stored(
            name.into(),
            Dtype::F32,
            shape.into(),
            pieces,
            rank.as_deref(),
        ));
        Ok(self.stored.len() as u32 - 1)
    }

    /// Adds a stored tensor as it is looked at.
    fn operand(&mut self, operand: &Operand, places: &Places) -> Result<u32, Box<Finding>> {
        if let Some(coded) = &operand.coded {
            let coded = coded.map(&mut |inner| self.operand(inner, places))?;
            return self.add_values(&operand.name, &operand.shape, coded);
        }
        let at = *places.get(operand.name.as_str()).ok_or_else(|| Box::new(missing(&operand.name)))?;
        let tensor = &self.stored[self.passes[0].tensors[at] as usize];
        let dtype = operand.dtype.unwrap_or(tensor.dtype);
        let bytes = element_count(&operand.shape).and_then(|n| n.checked_mul(dtype.size() as u64));
        if bytes != Some(tensor.nbytes()) {
            return Err(Finding::new(codes::SHAPE, "codes or scales of another size")
                .tensor(&operand.name)
                .expected(
                    format!("{dtype} {:?}", operand.shape),
                    format!("{} {:?}", tensor.dtype, tensor.shape),
                )
                .help("restore the file that the quantiser wrote")
                .into());
        }
        let pieces = seen_as(tensor, &operand.shape, dtype).ok_or_else(|| Box::new(in_pieces(tensor)))?;
        let (name, rank) = (tensor.name.clone(), tensor.rank.clone());
        self.stored.push(super::assembled::stored(
            name,
            dtype,
            operand.shape[..].into(),
            pieces,
            rank.as_deref(),
        ));
        Ok(self.stored.len() as u32 - 1)
    }
}

fn missing(name: &str) -> Finding {
    Finding::new(codes::MISSING_TENSOR, "without it a weight has no values")
        .tensor(name)
        .help("copy the file that holds it from the original checkpoint")
}

fn in_pieces(tensor: &StoredTensor) -> Finding {
    Finding::new(codes::UNSUPPORTED, "codes or scales whose elements do not lie one after another")
        .tensor(&tensor.name)
        .help("merge the checkpoint without --dtype first, then convert the result")
}
