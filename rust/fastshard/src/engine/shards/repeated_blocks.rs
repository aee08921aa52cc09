//! Blocks of stores (zarr chunks) that equal another block at another place.

use std::collections::{BTreeMap, HashMap};

use super::meant::Verdict;
use super::Equal;
use crate::codes;
use crate::engine::place;
use crate::error::{Finding, Result};
use crate::plan::{Pieces, Plan};
use crate::standing::Use;

/// Two stored tensors, and the blocks of each that are equal.
type Pairs = BTreeMap<(u32, u32), Vec<(u32, u32)>>;

/// The content of a block, found by decoding it once more.
struct Content {
    digest: [u8; 32],
    /// Dimensions along which all of it is repeated.
    repeats: Vec<bool>,
}

/// Blocks that are equal to another block from which something else is made.
///
/// Samples of the decoded data find suspects; a digest of all of it decides.
pub(super) fn repeated_blocks(equal: Equal) -> Result<Vec<Finding>> {
    let Equal { plan, sources, standing, contents, uses, meant } = equal;
    let mut classes: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for i in (0..plan.blobs.len() as u32).filter(|i| plan.blobs[*i as usize].encoded) {
        if let Some(class) = contents.class(i) {
            classes.entry(class).or_default().push(i);
        }
    }
    let shapes = shapes(plan, |blob| plan.blobs[blob as usize].encoded && contents.class(blob).is_some());
    let mut found: BTreeMap<Verdict, Pairs> = BTreeMap::new();
    for blocks in classes.values() {
        let mut seen: HashMap<[u8; 32], Vec<(u32, &Use)>> = HashMap::new();
        for (blob, stands) in blocks.iter().filter_map(|b| Some((*b, uses.get(b)?.first()?))) {
            let stored = &plan.stored[stands.stored as usize];
            let shape = shapes.get(&blob).copied().unwrap_or(&stored.shape);
            let content = sources.decode(blob, |bytes| Content::of(bytes, shape, stored.dtype.size()))?;
            let before = seen.entry(content.digest).or_default();
            // The first of all, the first of the same tensor and the last: an excuse holds for one of them.
            let same = before.iter().find(|(_, other)| other.stored == stands.stored);
            let compared = before.first().into_iter().chain(same).chain(before.last());
            let verdicts = compared.filter(|(_, other)| !standing.same(other, stands)).map(|&(other, of)| {
                let moved = |d: usize| of.stored == stands.stored && of.at.get(d) != stands.at.get(d);
                match content.repeats.iter().enumerate().any(|(d, repeats)| *repeats && moved(d)) {
                    true => (Verdict::Innocent, other, of),
                    false => (meant.verdict(of, stands, true), other, of),
                }
            });
            if let Some((verdict, other, of)) = verdicts.max_by_key(|(verdict, ..)| *verdict) {
                let pairs = found.entry(verdict).or_default();
                pairs.entry((of.stored, stands.stored)).or_default().push((other, blob));
            }
            before.push((blob, stands));
        }
    }
    let copied = found.get(&Verdict::Copied).into_iter().flatten();
    let mut findings: Vec<Finding> =
        copied.map(|(&pair, blocks)| finding(plan, pair, blocks, plan.layers_may_repeat)).collect();
    // One line for all that is equal in the same way.
    if let Some((&pair, blocks)) = found.get(&Verdict::Meant).and_then(Pairs::first_key_value) {
        let all = &found[&Verdict::Meant];
        let mut finding = finding(plan, pair, blocks, true);
        if all.len() > 1 {
            let count: usize = all.values().map(Vec::len).sum();
            finding.message += &format!("; {count} chunks of {} tensors repeat others like this", all.len());
        }
        findings.push(finding);
    }
    Ok(findings)
}

impl Content {
    fn of(bytes: &[u8], shape: &[u64], item: usize) -> Content {
        let repeats = (0..shape.len()).map(|d| {
            let inner = shape[d + 1..].iter().product::<u64>() as usize * item;
            let n = shape[d] as usize;
            let same = |outer: &[u8]| outer.chunks_exact(inner).all(|slice| *slice == outer[..inner]);
            n > 1 && inner > 0 && bytes.chunks_exact(inner * n).all(same)
        });
        Content { digest: *blake3::hash(bytes).as_bytes(), repeats: repeats.collect() }
    }
}

/// Extents of the requested blocks.
fn shapes(plan: &Plan, is_wanted: impl Fn(u32) -> bool) -> HashMap<u32, &[u64]> {
    let mut shapes: HashMap<u32, &[u64]> = HashMap::new();
    for stored in &plan.stored {
        match &stored.pieces {
            Pieces::Boxes(pieces) => {
                for piece in pieces.iter().filter(|piece| is_wanted(piece.blob)) {
                    shapes.entry(piece.blob).or_insert(&piece.len);
                }
            }
            Pieces::View { blob, .. } if is_wanted(*blob) => {
                shapes.entry(*blob).or_insert(&stored.shape);
            }
            _ => {}
        }
    }
    shapes
}

fn finding(plan: &Plan, (a, b): (u32, u32), blocks: &[(u32, u32)], meant: bool) -> Finding {
    let key = |blob: u32| plan.blobs[blob as usize].member.clone().unwrap_or_default();
    let (first, copy) = blocks[0];
    let of = match a == b {
        true => String::new(),
        false => format!(" of {}", plan.stored[a as usize].name),
    };
    let more = match blocks.len() {
        1 => String::new(),
        n => format!(" (and {} more chunks)", n - 1),
    };
    let code = if meant { codes::EQUAL_SHARDS } else { codes::DUPLICATED_SHARD };
    let message = format!("chunk {} is a copy of chunk {}{of}{more}", key(copy), key(first));
    let finding = Finding::new(code, message)
        .expected("another part", "a copy")
        .help("copy the chunk again from the host that wrote it; if it was copied on purpose, accept it")
        .run("--accept copies");
    let mut finding = place(plan, b, finding);
    finding.file = Some(path_of(plan, copy, &key(copy)));
    finding
}

/// The path of a block: below the folder of the file that represents the store, or above it if that file is
/// of one array.
fn path_of(plan: &Plan, blob: u32, key: &str) -> String {
    let file = plan.blobs[blob as usize].file;
    let anchor = plan.label(file);
    let Some((folder, _)) = anchor.rsplit_once('/') else { return key.to_string() };
    let (above, last) = folder.rsplit_once('/').unwrap_or(("", folder));
    let within = |member: &str| member.strip_prefix(last).is_some_and(|rest| rest.starts_with('/'));
    let blocks = plan.blobs.iter().filter(|blob| blob.file == file);
    let is_array = blocks.filter_map(|blob| blob.member.as_deref()).any(within);
    match (is_array, above) {
        (true, "") => key.to_string(),
        (true, above) => format!("{above}/{key}"),
        (false, _) => format!("{folder}/{key}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_repeats_inside_a_block_is_seen() {
        let row: Vec<u8> = (0..128u16).flat_map(u16::to_le_bytes).collect();
        let twice = [row.clone(), row.clone()].concat();
        assert_eq!(Content::of(&twice, &[2, 128], 2).repeats, [true, false]);
        assert_eq!(Content::of(&twice, &[1, 256], 2).repeats, [false, false]);
    }
}
