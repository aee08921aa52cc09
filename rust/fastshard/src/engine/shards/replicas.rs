//! Replicas that differ: which of them the others contradict.

use super::Reader;
use crate::engine::gather::Sources;
use crate::error::Result;
use crate::plan::Plan;

/// The copies that are unlike a majority of copies that are alike; none where there is no such majority, as of two.
pub(in crate::engine) fn odd_ones(plan: &Plan, sources: &Sources, copies: &[u32]) -> Result<Vec<u32>> {
    if copies.len() < 3 {
        return Ok(Vec::new());
    }
    let mut reader = Reader::new(sources);
    // Copies that are alike, each kind by its first one.
    let mut kinds: Vec<Vec<u32>> = Vec::new();
    'copies: for &copy in copies {
        for kind in &mut kinds {
            if reader.equal(&plan.stored[kind[0] as usize], &plan.stored[copy as usize])? {
                kind.push(copy);
                continue 'copies;
            }
        }
        kinds.push(vec![copy]);
    }
    let Some(most) = kinds.iter().position(|kind| 2 * kind.len() > copies.len()) else {
        return Ok(Vec::new());
    };
    kinds.swap_remove(most);
    Ok(kinds.into_iter().flatten().collect())
}
