//! Blocks of stores (zarr chunks) that hold what another block holds, at another place.

use std::collections::{BTreeMap, HashMap};

use super::values::Values;
use crate::codes;
use crate::engine::blocks::{sample_of, CONSTANT};
use crate::engine::gather::Sources;
use crate::engine::place;
use crate::error::{Finding, Result};
use crate::plan::{BoxPiece, Pieces, Plan, StoredTensor};
use crate::standing::{alike, each_use, may_be_tied, renamed, Standing, Use};

/// A block and what it stands for.
#[derive(Debug, Clone)]
struct Block {
    blob: u32,
    stands: Use,
}

/// What a block holds, found by decoding it once more.
#[derive(Debug, PartialEq, Eq)]
struct Content {
    digest: [u8; 32],
    /// Dimensions along which all of it is repeated.
    repeats: Vec<bool>,
}

/// Why two blocks are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// One was put in the place of the other.
    Copied,
    /// More than a block is equal: it can be meant.
    Meant,
    /// The tensor repeats itself there.
    Innocent,
}

/// Blocks that are equal to another block of which something else is made.
///
/// Samples of what was decoded find suspects; a digest of all of it decides.
pub(in crate::engine) fn repeated_blocks(plan: &Plan, sources: &Sources) -> Result<Vec<Finding>> {
    if !plan.blobs.iter().any(|blob| blob.encoded) {
        return Ok(Vec::new());
    }
    let Some(standing) = Standing::of(plan) else { return Ok(Vec::new()) };
    let store = Store::of(plan, sources, &standing)?;
    let mut found: BTreeMap<(u32, u32), Vec<(u32, u32)>> = BTreeMap::new();
    let mut meant: BTreeMap<(u32, u32), Vec<(u32, u32)>> = BTreeMap::new();
    for equal in store.equal(sources, &standing)? {
        for (k, (block, _)) in equal.iter().enumerate().skip(1) {
            let verdicts =
                equal[..k].iter().map(|(first, content)| (store.verdict(first, block, content), first));
            // The kindest of all: one that it may repeat is enough.
            let Some((verdict, first)) = verdicts.max_by_key(|(verdict, _)| *verdict as u8) else { continue };
            let pair = (first.stands.stored, block.stands.stored);
            match verdict {
                Verdict::Copied => found.entry(pair).or_default().push((first.blob, block.blob)),
                Verdict::Meant => meant.entry(pair).or_default().push((first.blob, block.blob)),
                Verdict::Innocent => {}
            }
        }
    }
    let mut findings: Vec<Finding> =
        found.iter().map(|(&pair, blocks)| finding(plan, pair, blocks, false)).collect();
    // One line for all that is equal in the same way.
    let count: usize = meant.values().map(Vec::len).sum();
    if let Some((&pair, blocks)) = meant.first_key_value() {
        let tensors = meant.len();
        let mut finding = finding(plan, pair, blocks, true);
        if tensors > 1 {
            finding.message += &format!("; {count} chunks of {tensors} tensors repeat others like this");
        }
        findings.push(finding);
    }
    Ok(findings)
}

/// The store's blocks, by tensor.
struct Store<'p> {
    plan: &'p Plan,
    /// Stored tensor -> its blocks by their first index, with the sample of each.
    tensors: HashMap<u32, BTreeMap<Vec<u64>, (u32, u64)>>,
    /// Names of tensors -> them.
    names: HashMap<&'p str, u32>,
}

impl<'p> Store<'p> {
    fn of(plan: &'p Plan, sources: &Sources, standing: &Standing) -> Result<Self> {
        let mut tensors: HashMap<u32, BTreeMap<Vec<u64>, (u32, u64)>> = HashMap::new();
        let mut names = HashMap::new();
        for (i, stored) in plan.stored.iter().enumerate() {
            if !stored.dtype.is_float() || !standing.is_used(i as u32) {
                continue;
            }
            let mut blocks = Vec::new();
            each_use(i as u32, stored, |blob, stands| {
                if plan.blobs[blob as usize].encoded {
                    blocks.push(Block { blob, stands });
                }
            });
            for block in blocks {
                // What was not decoded in this run (a result that is continued) is so now.
                let sample = match sources.blocks.sample(block.blob) {
                    Some(sample) => sample,
                    None => sources.decode(block.blob, sample_of)?,
                };
                tensors.entry(i as u32).or_default().insert(block.stands.at, (block.blob, sample));
                names.insert(stored.name.as_str(), i as u32);
            }
        }
        Ok(Store { plan, tensors, names })
    }
}

impl Store<'_> {
    /// Groups of blocks that hold the same, enough of it to tell something.
    fn equal(&self, sources: &Sources, standing: &Standing) -> Result<Vec<Vec<(Block, Content)>>> {
        let mut samples: BTreeMap<(u64, u64), Vec<Block>> = BTreeMap::new();
        let mut tensors: Vec<_> = self.tensors.iter().collect();
        tensors.sort_unstable_by_key(|(stored, _)| **stored);
        for (&stored, blocks) in tensors {
            for (at, &(blob, sample)) in blocks.iter().filter(|(_, (_, sample))| *sample != CONSTANT) {
                let stands = Use { stored, offset: 0, at: at.clone() };
                let key = (self.plan.blobs[blob as usize].len, sample);
                samples.entry(key).or_default().push(Block { blob, stands });
            }
        }
        let mut groups = Vec::new();
        for blocks in samples.into_values() {
            let first = &blocks[0].stands;
            if blocks[1..].iter().all(|block| standing.same(first, &block.stands)) {
                continue;
            }
            let mut contents: BTreeMap<[u8; 32], Vec<(Block, Content)>> = BTreeMap::new();
            for block in blocks {
                let stored = &self.plan.stored[block.stands.stored as usize];
                let shape = shape_of(stored, block.blob);
                let content =
                    sources.decode(block.blob, |bytes| Content::of(bytes, shape, stored.dtype.size()))?;
                if let Some(content) = content {
                    contents.entry(content.digest).or_default().push((block, content));
                }
            }
            groups.extend(contents.into_values().filter(|blocks| blocks.len() > 1));
        }
        Ok(groups)
    }

    fn verdict(&self, a: &Block, b: &Block, content: &Content) -> Verdict {
        let (t, u) = (a.stands.stored, b.stands.stored);
        if t == u {
            let moved: Vec<usize> =
                (0..a.stands.at.len()).filter(|&d| a.stands.at[d] != b.stands.at[d]).collect();
            if moved.iter().any(|&d| content.repeats.get(d).is_some_and(|repeats| *repeats)) {
                return Verdict::Innocent;
            }
            return match moved[..] {
                [d] if self.is_periodic(t, d, &a.stands.at) => Verdict::Meant,
                _ => Verdict::Copied,
            };
        }
        let same = |a: u32, b: u32| self.same(a, b);
        if !same(t, u) {
            return Verdict::Copied;
        }
        let stored = |i: u32| &self.plan.stored[i as usize];
        if self.tensors[&t].len() > 1 || may_be_tied(&stored(t).name, &stored(u).name) {
            return Verdict::Meant;
        }
        let family: Vec<u32> =
            self.names.values().copied().filter(|&i| alike(stored(i), stored(t))).collect();
        if family.len() > 2 && family.contains(&u) && family.iter().all(|&other| same(t, other)) {
            return Verdict::Meant;
        }
        let (t, u) = (&stored(t).name, &stored(u).name);
        match renamed(t, u) {
            Some((position, from, to)) => {
                let pairs = self.names.iter().filter_map(|(name, &own)| {
                    let mut parts: Vec<&str> = name.split('.').collect();
                    *parts.get_mut(position).filter(|part| **part == from)? = to;
                    Some((own, *self.names.get(parts.join(".").as_str())?))
                });
                let pairs: Vec<(u32, u32)> = pairs.filter(|&(own, _)| !self.is_constant(own)).collect();
                match pairs.len() > 1 && pairs.iter().all(|&(own, other)| same(own, other)) {
                    true => Verdict::Meant,
                    false => Verdict::Copied,
                }
            }
            None => Verdict::Copied,
        }
    }

    /// True if two tensors of one shape look the same in all their blocks.
    fn same(&self, a: u32, b: u32) -> bool {
        let stored = |i: u32| &self.plan.stored[i as usize];
        if (&stored(a).shape, stored(a).dtype) != (&stored(b).shape, stored(b).dtype) {
            return false;
        }
        let (Some(a), Some(b)) = (self.tensors.get(&a), self.tensors.get(&b)) else { return false };
        let look = |blocks: &BTreeMap<Vec<u64>, (u32, u64)>| -> Vec<(Vec<u64>, u64, u64)> {
            let len = |blob: u32| self.plan.blobs[blob as usize].len;
            blocks.iter().map(|(at, &(blob, sample))| (at.clone(), len(blob), sample)).collect()
        };
        a.len() == b.len() && look(a) == look(b)
    }

    fn is_constant(&self, stored: u32) -> bool {
        self.tensors[&stored].values().all(|(_, sample)| *sample == CONSTANT)
    }

    /// True if along a dimension of a tensor each block is there equally often, side by side: three times or
    /// more, or each of several.
    fn is_periodic(&self, stored: u32, dim: usize, at: &[u64]) -> bool {
        let here = |other: &[u64]| (0..at.len()).all(|d| d == dim || other[d] == at[d]);
        let line = self.tensors[&stored].iter().filter(|(other, _)| here(other));
        let samples: Vec<u64> = line.map(|(_, (_, sample))| *sample).collect();
        let runs: Vec<usize> = samples.chunk_by(|a, b| a == b).map(<[u64]>::len).collect();
        samples.len() > 2 && runs[0] > 1 && runs.iter().all(|run| *run == runs[0])
    }
}

impl Content {
    /// What a block holds; none if too few values are different.
    fn of(bytes: &[u8], shape: &[u64], item: usize) -> Option<Content> {
        let mut values = Values::default();
        values.add(bytes, item);
        if !values.enough() {
            return None;
        }
        let repeats = (0..shape.len()).map(|d| {
            let inner = shape[d + 1..].iter().product::<u64>() as usize * item;
            let n = shape[d] as usize;
            let same = |outer: &[u8]| outer.chunks_exact(inner).all(|slice| *slice == outer[..inner]);
            n > 1 && inner > 0 && bytes.chunks_exact(inner * n).all(same)
        });
        Some(Content { digest: *blake3::hash(bytes).as_bytes(), repeats: repeats.collect() })
    }
}

/// Extent of the block that a blob is of a tensor.
fn shape_of(stored: &StoredTensor, blob: u32) -> &[u64] {
    let of_piece = |pieces: &[BoxPiece]| pieces.iter().position(|piece| piece.blob == blob);
    match &stored.pieces {
        Pieces::Boxes(pieces) => of_piece(pieces).map_or(&stored.shape, |i| &pieces[i].len),
        _ => &stored.shape,
    }
}

fn finding(plan: &Plan, (a, b): (u32, u32), blocks: &[(u32, u32)], meant: bool) -> Finding {
    let key = |blob: u32| plan.blobs[blob as usize].member.clone().unwrap_or_default();
    let (first, copy) = blocks[0];
    let of = match a == b {
        true => String::new(),
        false => format!(" of {}", plan.stored[a as usize].name),
    };
    let more =
        if blocks.len() > 1 { format!(" (and {} more chunks)", blocks.len() - 1) } else { String::new() };
    let code = if meant { codes::EQUAL_SHARDS } else { codes::DUPLICATED_SHARD };
    let message = format!("chunk {} holds the same bytes as chunk {}{of}{more}", key(copy), key(first));
    let finding = Finding::new(code, message).expected("another part", "a copy").help(
        "copy the right chunk from the host that wrote it; --accept copies if it was copied on purpose",
    );
    place(plan, b, finding)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_repeats_inside_a_block_is_seen() {
        let row: Vec<u8> = (0..128u16).flat_map(u16::to_le_bytes).collect();
        let twice = [row.clone(), row.clone()].concat();
        assert_eq!(Content::of(&twice, &[2, 128], 2).unwrap().repeats, [true, false]);
        assert_eq!(Content::of(&twice, &[1, 256], 2).unwrap().repeats, [false, false]);
        assert_eq!(Content::of(&[0; 512], &[2, 128], 2), None, "constants tell nothing");
    }
}
