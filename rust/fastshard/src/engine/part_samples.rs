//! Samples of the equal parts of matrices, taken while blocks are decoded, so that nothing is decoded twice.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};

use super::values::MIN_VALUES;
use crate::plan::{BoxPiece, Pieces, Plan, StoredTensor};
use crate::standing::{digest_of, Standing};
use crate::tensor::{c_strides, element_count};
use crate::words::layer;

/// Maximum number of tensor-parallel ranks whose parts are distinguished.
const MOST_RANKS: u64 = 32;
/// Matrices of a layer that are examined first: the largest.
pub(super) const FIRST: usize = 2;
/// The minimum elements of a run for a meaningful sample.
pub(super) const SHORTEST: u64 = 4;

/// The digest of a sample that shows only one value.
const CONSTANT: u64 = 1;

/// A sample's place in its block, in bytes, and its number.
struct Place {
    first: usize,
    len: usize,
    number: u32,
}

/// Samples of the first elements of parts of matrices, for matrices in encoded blocks that are compared in
/// any case.
#[derive(Default)]
pub(super) struct PartSamples {
    /// Stored tensor, first element -> number of the sample.
    numbers: HashMap<(u32, u64), u32>,
    of_block: HashMap<u32, Vec<Place>>,
    /// By number; 0 where the block was not decoded.
    digests: Vec<AtomicU64>,
}

impl PartSamples {
    pub(super) fn of(plan: &Plan) -> PartSamples {
        let mut samples = PartSamples::default();
        if !plan.blobs.iter().any(|blob| blob.encoded) {
            return samples;
        }
        let Some(standing) = Standing::of(plan) else { return samples };
        for group in groups(plan, &standing) {
            for &i in group.iter().take(FIRST) {
                samples.add(plan, i);
            }
        }
        samples.digests.resize_with(samples.numbers.len(), AtomicU64::default);
        samples
    }

    fn add(&mut self, plan: &Plan, i: u32) {
        let stored = &plan.stored[i as usize];
        let strides = c_strides(&stored.shape);
        let mut starts: Vec<u64> = divisions(stored)
            .flat_map(|(dim, parts)| (0..parts).map(move |part| (dim, part * (stored.shape[dim] / parts))))
            .map(|(dim, at)| at * strides[dim])
            .collect();
        starts.sort_unstable();
        starts.dedup();
        for start in starts {
            let at: Vec<u64> =
                strides.iter().zip(&stored.shape).map(|(stride, n)| start / stride % n.max(&1)).collect();
            let Some((blob, first)) = place_of(stored, &at) else { continue };
            if plan.blobs[blob as usize].encoded {
                let number = self.numbers.len() as u32;
                let len = SHORTEST as usize * stored.dtype.size();
                self.numbers.insert((i, start), number);
                self.of_block.entry(blob).or_default().push(Place { first: first as usize, len, number });
            }
        }
    }

    /// Takes the samples of a block.
    pub(super) fn take(&self, blob: u32, bytes: &[u8]) {
        for Place { first, len, number } in self.of_block.get(&blob).into_iter().flatten() {
            if let Some(sample) = bytes.get(*first..first + len) {
                self.digests[*number as usize]
                    .store(digest(sample, len / SHORTEST as usize), Ordering::Relaxed);
            }
        }
    }

    /// The digest of the first elements of a part, if they were seen; the inner value is none if they are all
    /// the same.
    pub(super) fn get(&self, stored: u32, start: u64) -> Option<Option<u64>> {
        let number = self.numbers.get(&(stored, start))?;
        match self.digests[*number as usize].load(Ordering::Relaxed) {
            0 => None,
            digest => Some(Some(digest).filter(|digest| *digest != CONSTANT)),
        }
    }

    /// All samples that were seen, by number.
    pub(super) fn seen(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        let digests = self.digests.iter().map(|digest| digest.load(Ordering::Relaxed));
        (0u32..).zip(digests).filter(|(_, digest)| *digest != 0)
    }

    /// Takes over a sample of another process; returns false if there is no such sample.
    pub(super) fn know(&self, number: u32, digest: u64) -> bool {
        let known = self.digests.get(number as usize);
        known.inspect(|known| known.store(digest, Ordering::Relaxed)).is_some()
    }
}

fn digest(sample: &[u8], item: usize) -> u64 {
    match sample[item..] == sample[..sample.len() - item] {
        true => CONSTANT,
        false => digest_of(sample).max(CONSTANT + 1),
    }
}

/// The block, and the byte in it, of an element that as many contiguous elements follow as a sample has.
fn place_of(stored: &StoredTensor, at: &[u64]) -> Option<(u32, u64)> {
    let item = stored.dtype.size() as u64;
    let within = |lo: &[u64], len: &[u64], strides: &[u64]| {
        let last = at.len().checked_sub(1)?;
        let inside = (0..at.len()).all(|d| (lo[d]..lo[d] + len[d]).contains(&at[d]));
        let fits = inside && strides[last] == 1 && at[last] + SHORTEST <= lo[last] + len[last];
        fits.then(|| (0..at.len()).map(|d| (at[d] - lo[d]) * strides[d]).sum::<u64>() * item)
    };
    match &stored.pieces {
        Pieces::View { blob, offset, strides } => {
            within(&vec![0; at.len()], &stored.shape, strides).map(|byte| (*blob, offset + byte))
        }
        Pieces::Boxes(pieces) => pieces.iter().find_map(|piece| {
            let BoxPiece { lo, len, blob, offset, strides } = piece;
            let own = if strides.is_empty() { c_strides(len) } else { strides.clone() };
            within(lo, len, &own).map(|byte| (*blob, offset + byte))
        }),
        Pieces::Ranges(_) | Pieces::Coded(_) => None,
    }
}

/// Groups the matrices of each layer, and those with all layers; the largest first.
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

/// True for an array that may have the matrices of all layers.
pub(super) fn holds_layers(stored: &StoredTensor) -> bool {
    long_dims(stored) == 3
}

fn is_matrix(plan: &Plan, stored: &StoredTensor) -> bool {
    let words = &plan.words;
    matches!(long_dims(stored), 2 | 3)
        && !words.is_of_experts(&stored.name)
        && !words.is_buffer(&stored.name, stored.shape.len())
        && words.moments(&stored.name).next().is_none()
}

/// Lists the dimensions of a matrix, and the numbers of equal parts that ranks can divide each into.
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
