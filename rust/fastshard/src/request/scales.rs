//! Tensors that are stored with scales beside them: each has its own, and only such have any.

use std::collections::{BTreeMap, HashMap};

use super::assembled::Gathered;
use super::SourceSide;
use crate::codes;
use crate::error::Finding;
use crate::layout::table::StoredForm;
use crate::plan::{BlockScale, StoredTensor};
use crate::tensor::Dtype;

/// What the names of scales end with where no table says so.
const USUAL: [&str; 2] = ["_scale_inv", "_scale"];

/// A quantised tensor: its place in the pass, its index, the extents of a block, and its scales.
struct Quantised {
    at: usize,
    index: u32,
    block: Option<Vec<u64>>,
    scales: u32,
}

impl Gathered {
    /// Looks for the scales of quantised tensors, of the same rank: where their values are wanted, and always where the
    /// layout says that they are stored so. Returns those that are no outputs, since the values are.
    pub(super) fn scales(&mut self, side: &SourceSide) -> Vec<u32> {
        let table = side.layout.as_deref().filter(|table| !table.stored.is_empty());
        if side.dequantise.is_none() && table.is_none() {
            return Vec::new();
        }
        let form_of = |dtype: Dtype| table.and_then(|table| table.form_of(dtype));
        let units = &self.units;
        let mut by_name: HashMap<(&str, &BTreeMap<String, u64>), u32> = HashMap::new();
        for (seen, &index) in self.passes[0].seen.iter().zip(&self.passes[0].tensors) {
            by_name.insert((&seen.name, &units[seen.unit as usize].coords), index);
        }
        let (mut found, mut lacking) = (Vec::new(), Vec::new());
        for (at, (seen, &index)) in self.passes[0].seen.iter().zip(&self.passes[0].tensors).enumerate() {
            let unit = &units[seen.unit as usize];
            let named =
                |end: &str| by_name.get(&(format!("{}{end}", seen.name).as_str(), &unit.coords)).copied();
            let form = form_of(seen.dtype);
            let scales = match form {
                Some((_, form)) => form.scales.iter().find_map(|end| named(end)),
                None if seen.dtype.is_f8() && side.dequantise.is_some() => {
                    USUAL.iter().find_map(|end| named(end))
                }
                None => None,
            };
            let stated = form.and_then(|(name, _)| side.stored.get(name));
            let block = stated.or(side.dequantise.as_ref()).filter(|block| !block.is_empty()).cloned();
            match (scales, form) {
                (Some(scales), _) => found.push(Quantised { at, index, block, scales }),
                (None, Some((_, form))) => {
                    lacking.push(without(&seen.name, seen.dtype, form).file(&unit.file))
                }
                (None, None) => {}
            }
        }
        self.findings.extend(lacking);
        let mut taken = Vec::new();
        for Quantised { at, index, block, scales } in found {
            let (tensor, values) = (&self.stored[index as usize], &self.stored[scales as usize]);
            let readable = values.dtype.is_float() || values.dtype == Dtype::F8E8m0;
            match BlockScale::of(scales, &tensor.shape, &values.shape, block.as_deref()).filter(|_| readable)
            {
                Some(scale) if side.dequantise.is_some() => {
                    self.stored[index as usize].scale = Some(scale);
                    // To the layout it is the tensor of floats that it stands for.
                    self.passes[0].seen[at].dtype = Dtype::F32;
                    taken.push(scales);
                }
                Some(_) => _ = self.beside.insert(values.name.clone()),
                None => self.findings.push(no_fit(tensor, values)),
            }
        }
        self.useless(table.map(|table| &table.stored), &taken);
        taken
    }

    /// Scales of tensors that have no use for them: what is stored otherwise would be scaled by whoever reads them.
    fn useless(&mut self, forms: Option<&BTreeMap<String, StoredForm>>, taken: &[u32]) {
        let pass = &self.passes[0];
        let dtypes: HashMap<&str, Dtype> =
            pass.seen.iter().map(|seen| (seen.name.as_str(), seen.dtype)).collect();
        let ends = || forms.into_iter().flat_map(BTreeMap::values).flat_map(|form| &form.scales);
        let mut found = Vec::new();
        for (seen, index) in pass.seen.iter().zip(&pass.tensors) {
            if self.beside.contains(&seen.name) || taken.contains(index) {
                continue;
            }
            let of = ends().find_map(|end| dtypes.get_key_value(seen.name.strip_suffix(end.as_str())?));
            let Some((of, dtype)) = of else { continue };
            if forms.is_some_and(|forms| forms.values().any(|form| form.dtypes.contains(dtype))) {
                continue;
            }
            let message = format!("scales of {of}, which is stored as {dtype} and has none");
            let finding = Finding::new(codes::UNKNOWN_TENSOR, message).tensor(&seen.name);
            let help = "leave the stale one out of the checkpoint; it is from the model before or after it was quantised";
            found.push(finding.file(&self.units[seen.unit as usize].file).help(help));
        }
        self.findings.extend(found);
    }
}

/// The finding for scales that are not one for each block of a tensor.
fn no_fit(tensor: &StoredTensor, scales: &StoredTensor) -> Finding {
    Finding::new(codes::UNSUPPORTED, "scales that fit no blocks of the quantised tensor")
        .tensor(&tensor.name)
        .expected(
            format!("one, one per row, or one per block of {:?}", tensor.shape),
            format!("{} {:?} in {}", scales.dtype, scales.shape, scales.name),
        )
        .help("pass the config.json that names weight_block_size, or leave out --dtype")
}

fn without(name: &str, dtype: Dtype, form: &StoredForm) -> Finding {
    Finding::new(
        codes::MISSING_TENSOR,
        format!("scales without which the {dtype} elements of {name} have no value"),
    )
    .tensor(format!("{name}{}", form.scales[0]))
    .help("copy the file that holds them from the node that wrote the checkpoint")
}
