//! Ranks that were copied over others before they were merged: parts of a layer's matrices hold the same bytes.

use std::collections::{BTreeMap, HashMap};

use super::values::{Values, MIN_VALUES};
use super::{read_range, runs_of_part, Reader};
use crate::codes;
use crate::engine::gather::Sources;
use crate::engine::place;
use crate::error::{Finding, Result};
use crate::kernel;
use crate::plan::blobs::each_blob;
use crate::plan::{Plan, StoredTensor};
use crate::standing::{digest_of, Standing};
use crate::tensor::element_count;
use crate::words::layer;

/// Most tensor-parallel ranks whose parts are told apart.
const MOST_RANKS: u64 = 32;
/// Matrices of a layer that are looked at before all of them are: the largest.
pub(super) const FIRST: usize = 2;
/// Elements of a part that are looked at before all of it is, and the fewest of a run that say something.
const SAMPLE: u64 = 16;
pub(super) const SHORTEST: u64 = 4;

/// Two parts of a matrix that hold the same.
#[derive(Clone, Copy)]
struct Repeated {
    stored: u32,
    dim: usize,
    /// Indices of each part along the dimension, and which of the parts the two are.
    len: u64,
    parts: (u64, u64),
}

/// Layers of which most matrices hold, in two of 2, 3, ... equal parts along a dimension, the same bytes.
///
/// That is what a merge leaves which took one tensor-parallel rank's file for another's. One matrix alone may repeat
/// itself for a reason (heads of keys that were copied for each group of queries).
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

/// The matrices of each layer, and those that hold all layers at once; the largest first.
pub(super) fn groups(plan: &Plan, standing: &Standing) -> impl Iterator<Item = Vec<u32>> {
    let mut groups: BTreeMap<(Option<&str>, Option<&str>), Vec<u32>> = BTreeMap::new();
    for (i, stored) in (0u32..).zip(&plan.stored).filter(|(i, _)| standing.is_used(*i)) {
        // Shards are compared as files.
        let of = if holds_layers(stored) { Some(None) } else { layer(&stored.name).map(Some) };
        if let Some(of) = of.filter(|_| stored.shard.is_none() && is_matrix(plan, stored)) {
            groups.entry((stored.rank.as_deref(), of)).or_default().push(i);
        }
    }
    let mut groups: Vec<Vec<u32>> = groups.into_values().filter(|matrices| matrices.len() > 1).collect();
    for matrices in &mut groups {
        matrices.sort_by_key(|&i| std::cmp::Reverse(plan.stored[i as usize].nbytes()));
    }
    groups.into_iter()
}

fn long_dims(stored: &StoredTensor) -> usize {
    stored.shape.iter().filter(|n| **n > 1).count()
}

/// True for what may be the matrices of all layers in one array.
fn holds_layers(stored: &StoredTensor) -> bool {
    long_dims(stored) == 3
}

fn is_matrix(plan: &Plan, stored: &StoredTensor) -> bool {
    let words = &plan.words;
    matches!(long_dims(stored), 2 | 3)
        && !words.is_of_experts(&stored.name)
        && !words.is_buffer(&stored.name, stored.shape.len())
        && words.moments(&stored.name).next().is_none()
}

/// Dimensions of a matrix, and the numbers of equal parts that ranks can divide each into.
pub(super) fn divisions(stored: &StoredTensor) -> impl Iterator<Item = (usize, u64)> + '_ {
    let total = element_count(&stored.shape).unwrap_or(0);
    let long = || (0..stored.shape.len()).filter(|d| stored.shape[*d] > 1);
    // Of an array of all layers the shortest is that of the layers.
    let of_layers = long().min_by_key(|d| stored.shape[*d]).filter(|_| holds_layers(stored));
    long().filter(move |d| Some(*d) != of_layers).flat_map(move |dim| {
        let n = stored.shape[dim];
        let inner: u64 = stored.shape[dim + 1..].iter().product();
        (2..=MOST_RANKS.min(n))
            .take_while(move |parts| n / parts * inner >= SHORTEST && total / parts >= MIN_VALUES as u64)
            .filter(move |parts| n.is_multiple_of(*parts))
            .map(move |parts| (dim, parts))
    })
}

/// True for what would have to be decoded once more.
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
    /// Two parts of a matrix that hold the same, of the fewest parts that have such.
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

    /// A digest of `n` elements from `first` on; none where they are all the same.
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

    /// True if two parts hold the same, and enough different values for that to say something.
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

/// One finding for all layers: what repeats itself in the first of them.
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
