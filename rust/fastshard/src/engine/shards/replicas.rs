//! Replicas that differ, and which of them the others contradict.

use std::collections::BTreeMap;

use super::Reader;
use crate::engine::gather::Sources;
use crate::error::Result;
use crate::plan::Plan;

/// The copies that differ from a majority of equal copies; none without such a majority, e.g. for two copies.
pub(in crate::engine) fn odd_ones(plan: &Plan, sources: &Sources, copies: &[u32]) -> Result<Vec<u32>> {
    if copies.len() < 3 {
        return Ok(Vec::new());
    }
    let mut reader = Reader::new(sources)?;
    // Copies that are alike, by their hash.
    let mut kinds: BTreeMap<[u8; 32], Vec<u32>> = BTreeMap::new();
    for &copy in copies {
        kinds.entry(reader.hash(&plan.stored[copy as usize])?).or_default().push(copy);
    }
    let mut kinds: Vec<Vec<u32>> = kinds.into_values().collect();
    let Some(most) = kinds.iter().position(|kind| 2 * kind.len() > copies.len()) else {
        return Ok(Vec::new());
    };
    kinds.swap_remove(most);
    let mut odd: Vec<u32> = kinds.into_iter().flatten().collect();
    odd.sort_unstable();
    Ok(odd)
}
