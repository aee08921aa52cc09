//! The blobs that tensors and outputs of a plan read.

use super::{Output, Pieces, Plan, StoredTensor};
use crate::tensor::c_strides;

/// Calls `each` with every blob that holds elements of a tensor.
pub(crate) fn each_blob(tensor: &StoredTensor, mut each: impl FnMut(u32)) {
    match &tensor.pieces {
        Pieces::View { blob, .. } => each(*blob),
        Pieces::Boxes(pieces) => pieces.iter().for_each(|p| each(p.blob)),
        Pieces::Ranges(pieces) => pieces.iter().for_each(|p| each(p.blob)),
        Pieces::Coded(_) => {}
    }
}

/// Lists the blobs that a stored tensor reads.
pub(crate) fn blobs_of_tensor(stored: &StoredTensor) -> Vec<u32> {
    let mut blobs = Vec::with_capacity(1);
    each_blob(stored, |blob| blobs.push(blob));
    blobs
}

/// Finds the first blob that a stored tensor reads.
pub(crate) fn first_blob(stored: &StoredTensor) -> Option<u32> {
    match &stored.pieces {
        Pieces::View { blob, .. } => Some(*blob),
        Pieces::Boxes(pieces) => pieces.first().map(|p| p.blob),
        Pieces::Ranges(pieces) => pieces.first().map(|p| p.blob),
        Pieces::Coded(_) => None,
    }
}

/// Lists the byte ranges (blob, first, one past the last) that hold a tensor's elements in C order.
pub(crate) fn runs_of(stored: &StoredTensor) -> Option<Vec<(u32, u64, u64)>> {
    match &stored.pieces {
        Pieces::View { blob, offset, strides } if *strides == c_strides(&stored.shape) => {
            Some(vec![(*blob, *offset, *offset + stored.nbytes())])
        }
        Pieces::Ranges(pieces) => {
            let item = stored.dtype.size() as u64;
            Some(pieces.iter().map(|p| (p.blob, p.offset, p.offset + p.len * item)).collect())
        }
        _ => None,
    }
}

/// Lists the blobs that an output reads, in order, each once.
pub(crate) fn blobs_of_output(plan: &Plan, output: &Output) -> Vec<u32> {
    let mut blobs: Vec<u32> = output
        .parts
        .iter()
        .flat_map(|p| &p.sources)
        .flat_map(|&s| plan.read_with(s))
        .flat_map(|s| blobs_of_tensor(&plan.stored[s as usize]))
        .collect();
    blobs.sort_unstable();
    blobs.dedup();
    blobs
}

/// Marks the blobs whose checksum is needed: those that carry one, and those of shards to compare.
pub(crate) fn tracked_blobs(plan: &Plan) -> Vec<bool> {
    let mut tracked: Vec<bool> = plan.blobs.iter().map(|b| b.crc32.is_some()).collect();
    for stored in plan.stored.iter().filter(|s| s.shard.is_some()) {
        for blob in blobs_of_tensor(stored) {
            // What is decoded is looked at only where it is wanted.
            tracked[blob as usize] = !plan.blobs[blob as usize].encoded;
        }
    }
    tracked
}

/// Lists, for each blob, the sorted starts and ends of tensors whose checksums are compared: segments stop
/// there.
pub(crate) fn cuts(plan: &Plan, tracked: &[bool]) -> Vec<Vec<u64>> {
    let mut cuts = vec![Vec::new(); plan.blobs.len()];
    for stored in plan.stored.iter().filter(|s| s.shard.is_some() || !s.index.is_empty()) {
        for (blob, lo, hi) in runs_of(stored).into_iter().flatten().filter(|r| tracked[r.0 as usize]) {
            cuts[blob as usize].extend([lo, hi]);
        }
    }
    for cuts in &mut cuts {
        cuts.sort_unstable();
        cuts.dedup();
        cuts.shrink_to_fit();
    }
    cuts
}
