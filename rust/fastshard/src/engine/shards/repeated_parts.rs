//! Ranks that were copied over others before a merge: parts of a layer's matrices have equal bytes.

use std::collections::HashMap;

use super::{read_range, runs_of_part, Reader};
use crate::codes;
use crate::engine::gather::Sources;
use crate::engine::part_samples::{divisions, groups, holds_layers, FIRST, SHORTEST};
use crate::engine::place;
use crate::engine::values::Values;
use crate::error::{Finding, Result};
use crate::kernel;
use crate::plan::blobs::each_blob;
use crate::plan::{Plan, StoredTensor};
use crate::standing::{digest_of, Standing};

/// Elements of a part that are compared first.
const SAMPLE: u64 = 16;

/// Two equal parts of a matrix.
#[derive(Clone, Copy)]
struct Repeated {
    stored: u32,
    dim: usize,
    /// Indices of each part along the dimension, and which of the parts the two are.
    len: u64,
    parts: (u64, u64),
}

/// Layers most of whose matrices have equal bytes in two of 2, 3, ... parts of equal size along a dimension.
///
/// A merge leaves such layers if it takes one tensor-parallel rank's file for another's. A single matrix may
/// repeat itself for a reason (heads of keys that were copied for each group of queries).
pub(in crate::engine) fn repeated_parts(
    plan: &Plan,
    sources: &Sources,
    standing: &Standing,
) -> Result<Option<Finding>> {
    let mut search = Search { plan, sources, reader: Reader::new(sources)? };
    let mut found: Vec<Vec<Repeated>> = Vec::new();
    for matrices in groups(plan, standing) {
        let mut repeated = Vec::new();
        for (n, &i) in matrices.iter().enumerate() {
            if n == FIRST && repeated.is_empty() {
                break;
            }
            repeated.extend(search.repeated(i)?);
        }
        if repeated.len() > 1 && 2 * repeated.len() > matrices.len() {
            found.push(repeated);
        }
    }
    Ok(finding(plan, &found))
}

/// True for a tensor that would have to be decoded once more.
fn is_encoded(plan: &Plan, stored: &StoredTensor) -> bool {
    let mut encoded = false;
    each_blob(stored, |blob| encoded |= plan.blobs[blob as usize].encoded);
    encoded
}

struct Search<'a, 'p> {
    plan: &'p Plan,
    sources: &'a Sources<'p>,
    reader: Reader<'a, 'p>,
}

impl Search<'_, '_> {
    /// Two equal parts of a matrix, for the smallest number of parts with such a pair.
    fn repeated(&mut self, i: u32) -> Result<Option<Repeated>> {
        let stored = &self.plan.stored[i as usize];
        let most = if is_encoded(self.plan, stored) { SHORTEST } else { SAMPLE };
        let mut samples: HashMap<(u64, u64), Option<u64>> = HashMap::new();
        for (dim, parts) in divisions(stored) {
            let len = stored.shape[dim] / parts;
            let inner: u64 = stored.shape[dim + 1..].iter().product();
            let mut like: HashMap<u64, Vec<u64>> = HashMap::new();
            for part in 0..parts {
                let at = (part * len * inner, most.min(len * inner));
                let sample = match samples.get(&at) {
                    Some(known) => *known,
                    None => *samples.entry(at).or_insert(self.sample(i, at)?),
                };
                sample.into_iter().for_each(|sample| like.entry(sample).or_default().push(part));
            }
            let mut pairs: Vec<(u64, u64)> =
                like.values().flat_map(|like| like.windows(2).map(|pair| (pair[0], pair[1]))).collect();
            pairs.sort_unstable();
            for pair in pairs {
                if self.same(stored, dim, parts, pair)? {
                    return Ok(Some(Repeated { stored: i, dim, len, parts: pair }));
                }
            }
        }
        Ok(None)
    }

    /// A digest of `n` elements from `first` on; none if they are all the same.
    fn sample(&mut self, i: u32, (first, n): (u64, u64)) -> Result<Option<u64>> {
        if let Some(seen) = self.sources.blocks.parts.get(i, first) {
            return Ok(seen);
        }
        let stored = &self.plan.stored[i as usize];
        let item = stored.dtype.size();
        let bytes = &mut self.reader.a[..n as usize * item];
        read_range(self.reader.sources, stored, first, bytes, &mut self.reader.scratch)?;
        Ok((!kernel::is_constant(bytes, item)).then(|| digest_of(bytes)))
    }

    /// True if two parts are equal, and have enough different values for that to mean something.
    fn same(&mut self, stored: &StoredTensor, dim: usize, times: u64, pair: (u64, u64)) -> Result<bool> {
        if !self.reader.same_parts(stored, dim, times, pair)? {
            return Ok(false);
        }
        let mut values = Values::default();
        for (first, n) in runs_of_part(stored, dim, times, pair.0) {
            self.reader.add_values(stored, first, n, &mut values)?;
        }
        Ok(values.enough())
    }
}

/// One finding for all layers, about the repetition in the first of them.
fn finding(plan: &Plan, layers: &[Vec<Repeated>]) -> Option<Finding> {
    let first = layers.first()?;
    let &Repeated { stored, dim, len, parts: (a, b) } = first.first()?;
    let tensor = &plan.stored[stored as usize];
    let range = |part: u64| format!("{}-{}", part * len, (part + 1) * len - 1);
    let what = match (tensor.shape.len(), dim) {
        (2, 0) => format!("rows {}", range(b)),
        (2, 1) => format!("columns {}", range(b)),
        (_, dim) => format!("indices {} of dimension {dim}", range(b)),
    };
    let of = if holds_layers(tensor) { "all layers" } else { "this layer" };
    let more = match layers.len() {
        1 => String::new(),
        n => format!(", and so in {} more layers", n - 1),
    };
    let finding = Finding::new(
        codes::DUPLICATED_SHARD,
        format!(
            "{what} are copies of {}, and {} more matrices of {of} repeat themselves{more}",
            range(a),
            first.len() - 1,
        ),
    )
    .expected("different parts", "one rank's part in another's place")
    .help("merge the ranks' files again; one was taken for another rank's before this file was written; if the model was widened by copying, accept it")
    .run("--accept copies");
    Some(place(plan, stored, finding))
}
