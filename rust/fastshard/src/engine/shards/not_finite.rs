//! The shards of a tensor with NaN or infinite values.

use super::Reader;
use crate::engine::gather::Sources;
use crate::error::Result;
use crate::kernel;
use crate::plan::blobs::blobs_of_tensor;
use crate::plan::{Output, Plan};

/// Stored tensors that make up an output, in order, and those of them with values that are not finite. None
/// if one of them is on another host, which does not lend it again.
pub(in crate::engine) fn not_finite(
    plan: &Plan,
    sources: &Sources,
    output: &Output,
) -> Result<Option<(Vec<u32>, Vec<u32>)>> {
    let mut all: Vec<u32> = output.parts.iter().flat_map(|part| &part.sources).copied().collect();
    all.sort_unstable();
    all.dedup();
    let mut reader = Reader::new(sources)?;
    let mut found = Vec::new();
    for &i in &all {
        let stored = &plan.stored[i as usize];
        if blobs_of_tensor(stored).iter().any(|&blob| sources.is_lent(blob)) {
            return Ok(None);
        }
        for (at, len) in Reader::chunks(stored) {
            if kernel::count_non_finite(stored.dtype, reader.read(stored, at, len)?) > 0 {
                found.push(i);
                break;
            }
        }
    }
    Ok(Some((all, found)))
}
