//! How a plan's work is divided among processes: runs of tiles of equal size in bytes, and of paddings to look at.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::engine::{budget, release, Options};
use crate::error::Result;
use crate::plan::blobs::{blobs_of_output, each_blob, first_blob};
use crate::plan::tiles::{bytes, Share, TileRun};
use crate::plan::{Output, Part, Pieces, Plan, StoredTensor};
use crate::storage::SourceFile;

/// The size in bytes of each output's tiles, as the budget of `options` allows them.
///
/// # Errors
/// `FS512` with the minimum that is needed.
pub fn tiling(plan: &Plan, options: &Options) -> Result<Vec<u64>> {
    budget::divide(plan, options, None).map(|(sizes, _)| sizes)
}

/// All tiles of a plan in the order in which they are made, without the outputs that `left_out` names.
pub fn all_tiles(plan: &Plan, sizes: &[u64], left_out: &dyn Fn(usize) -> bool) -> Vec<TileRun> {
    let blobs_of: Vec<Vec<u32>> = plan.outputs.iter().map(|o| blobs_of_output(plan, o)).collect();
    let whole = |output: usize| TileRun {
        output: output as u32,
        first: 0,
        end: plan.outputs[output].nbytes().div_ceil(sizes[output]),
    };
    let order = release::order(plan, &blobs_of).into_iter().filter(|output| !left_out(*output));
    order.map(whole).filter(|run| run.end > 0).collect()
}

/// Divides runs of tiles into `parts` of equal bytes, up to half a tile at each cut; the tiles of a part are
/// consecutive in the order of `tiles`.
pub fn divide(plan: &Plan, sizes: &[u64], tiles: &[TileRun], parts: usize) -> Vec<Share> {
    let total = u128::from(bytes(plan, sizes, tiles));
    let cut = |part: usize| (total * part as u128 / parts as u128) as u64;
    let pad = |part: usize| (plan.pads.len() * part / parts) as u32;
    let mut shares: Vec<Share> =
        (0..parts).map(|k| Share { tiles: Vec::new(), pads: vec![(pad(k), pad(k + 1))] }).collect();
    // Bytes before the run, and the part that takes what comes next.
    let (mut at, mut part) = (0, 0);
    for run in tiles {
        let size = sizes[run.output as usize];
        let (lo, hi) = run.span(size, plan.outputs[run.output as usize].nbytes());
        let mut first = run.first;
        while first < run.end {
            let end = if part + 1 == parts {
                run.end
            } else {
                let wanted = cut(part + 1).saturating_sub(at) + size / 2;
                (run.first + wanted / size).clamp(first, run.end)
            };
            if end > first {
                shares[part].tiles.push(TileRun { output: run.output, first, end });
            }
            // A run that ends before the cut leaves the rest of the part to the next one.
            if end < run.end || (part + 1 < parts && at + (hi - lo) >= cut(part + 1)) {
                part += 1;
            }
            first = end;
        }
        at += hi - lo;
    }
    shares
}

/// Divides runs of tiles among ranks so that each makes what lies on its own disk: `ranks` has one for each
/// root of the plan's sources, which are `files`, `parts` of them. A tile whose bytes are on several disks
/// goes to the rank that has most of them.
pub fn divide_near(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    sizes: &[u64],
    tiles: &[TileRun],
    ranks: &[u32],
    parts: usize,
) -> Vec<Share> {
    let mut shares = vec![Share::default(); parts];
    let mut loads = vec![0u64; parts];
    let rank_of = |blob: u32| {
        let about = &plan.blobs[blob as usize];
        let store = files.get(about.file as usize).and_then(|file| file.blocks_apart());
        let root = store
            .and_then(|store| store.root(about.member.as_deref()?))
            .unwrap_or(plan.sources[about.file as usize].root);
        ranks.get(root as usize).map_or(0, |rank| (*rank as usize).min(parts - 1))
    };
    let mut bytes_by_rank = vec![0.0f64; parts];
    for run in tiles {
        let output = &plan.outputs[run.output as usize];
        let (size, total) = (sizes[run.output as usize], output.nbytes());
        let mut reaches: Vec<(Reach, usize)> = reaches(plan, output)
            .into_iter()
            .map(|r| {
                let rank = rank_of(r.blob);
                (r, rank)
            })
            .collect();
        reaches.sort_by_key(|(reach, _)| reach.lo);
        // Those that begin before the tile's end, without those that end before its begin.
        let (mut begun, mut meeting) = (0, Vec::new());
        for tile in run.first..run.end {
            let (lo, hi) = (tile * size, ((tile + 1) * size).min(total));
            bytes_by_rank.fill(0.0);
            while begun < reaches.len() && reaches[begun].0.lo < hi {
                meeting.push(begun);
                begun += 1;
            }
            meeting.retain(|&i| reaches[i].0.hi > lo);
            for (reach, rank) in meeting.iter().map(|&i| (&reaches[i].0, reaches[i].1)) {
                let both = reach.hi.min(hi) - reach.lo.max(lo);
                bytes_by_rank[rank] += reach.bytes as f64 * both as f64 / (reach.hi - reach.lo) as f64;
            }
            // Where several have as much, whoever has least to do.
            let most = bytes_by_rank.iter().copied().fold(0.0, f64::max) * 0.999;
            let nearest =
                (0..parts).filter(|&rank| bytes_by_rank[rank] >= most).min_by_key(|&rank| loads[rank]);
            let rank = nearest.expect("one of them has most");
            loads[rank] += hi - lo;
            match shares[rank].tiles.last_mut() {
                Some(last) if (last.output, last.end) == (run.output, tile) => last.end = tile + 1,
                _ => shares[rank].tiles.push(TileRun { output: run.output, first: tile, end: tile + 1 }),
            }
        }
    }
    for (pad, region) in (0u32..).zip(&plan.pads) {
        let blob = first_blob(&plan.stored[region.stored as usize]);
        let pads = &mut shares[blob.map_or(0, rank_of)].pads;
        match pads.last_mut() {
            Some(last) if last.1 == pad => last.1 += 1,
            _ => pads.push((pad, pad + 1)),
        }
    }
    shares
}

/// Bytes of an output that are made from a blob, and their range.
pub(crate) struct Reach {
    pub(crate) blob: u32,
    lo: u64,
    hi: u64,
    bytes: u64,
}

impl Reach {
    pub(crate) fn meets(&self, lo: u64, hi: u64) -> bool {
        self.lo < hi && self.hi > lo
    }
}

/// Source files that an output is read from, by their numbers.
pub fn files_of(plan: &Plan, output: &Output) -> BTreeSet<u32> {
    reaches(plan, output).iter().map(|reach| plan.blobs[reach.blob as usize].file).collect()
}

/// The blobs from which the bytes of an output are made, as far as this is known without reading.
pub(crate) fn reaches(plan: &Plan, output: &Output) -> Vec<Reach> {
    let mut found = Vec::new();
    for part in output.parts.iter().filter(|part| part.volume() > 0) {
        for &source in &part.sources {
            let stored = &plan.stored[source as usize];
            let mut add = |blob: u32, lo: &[u64], len: &[u64]| {
                let reach = reach(output, part, stored, lo, len);
                found.extend(reach.map(|(lo, hi, bytes)| Reach { blob, lo, hi, bytes }));
            };
            match &stored.pieces {
                Pieces::View { blob, .. } => add(*blob, &vec![0; stored.shape.len()], &stored.shape),
                Pieces::Boxes(pieces) => pieces.iter().for_each(|p| add(p.blob, &p.lo, &p.len)),
                Pieces::Ranges(pieces) => {
                    let row = stored.shape.iter().skip(1).product::<u64>().max(1);
                    for piece in pieces.iter().filter(|piece| piece.len > 0) {
                        // The rows that it touches.
                        let (mut lo, mut len) = (vec![0; stored.shape.len()], stored.shape.clone());
                        if let (Some(lo), Some(len)) = (lo.first_mut(), len.first_mut()) {
                            *lo = piece.start / row;
                            *len = (piece.start + piece.len).div_ceil(row) - *lo;
                        }
                        add(piece.blob, &lo, &len);
                    }
                }
                Pieces::Coded(_) => {
                    for operand in plan.made_of(source) {
                        each_blob(&plan.stored[operand as usize], |blob| {
                            add(blob, &vec![0; stored.shape.len()], &stored.shape);
                        });
                    }
                }
            }
        }
    }
    found
}

/// First byte, end and number of the bytes of an output that `part` makes of the box `lo`, `len` of a stored tensor.
fn reach(
    output: &Output,
    part: &Part,
    stored: &StoredTensor,
    lo: &[u64],
    len: &[u64],
) -> Option<(u64, u64, u64)> {
    let item = output.dtype.size() as u64;
    let mut alone = vec![0usize; stored.shape.len()];
    let mut ends = part.src_base.clone();
    for axis in &part.axes {
        alone[axis.dim as usize] += 1;
        ends[axis.dim as usize] += (axis.n - 1) * axis.step;
    }
    // The part lies beside the box in a dimension: in that of the layers, say, where it has no axis.
    if (0..ends.len()).any(|d| part.src_base[d] >= lo[d] + len[d] || ends[d] < lo[d]) {
        return None;
    }
    let (mut first, mut last, mut count) = (part.dst_base, part.dst_base, 1);
    for axis in &part.axes {
        let d = axis.dim as usize;
        let (mut low, mut high) = (0, axis.n - 1);
        // An axis that shares its dimension with others may reach its ends.
        if alone[d] == 1 && axis.step > 0 {
            let end = (lo[d] + len[d]).checked_sub(part.src_base[d] + 1)?;
            high = high.min(end / axis.step);
            low = lo[d].saturating_sub(part.src_base[d]).div_ceil(axis.step);
            if low > high {
                return None;
            }
        }
        first += low * axis.dst;
        last += high * axis.dst;
        count *= high - low + 1;
    }
    Some((first * item, (last + 1) * item, count * item))
}

/// The tiles that are in `tiles` and not in `done`.
pub fn without(tiles: &[TileRun], done: &[TileRun]) -> Vec<TileRun> {
    let mut by_output: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
    for run in done {
        by_output.entry(run.output).or_default().push((run.first, run.end));
    }
    by_output.values_mut().for_each(|runs| runs.sort_unstable());
    let mut left = Vec::new();
    for run in tiles {
        let mut at = run.first;
        for &(first, end) in by_output.get(&run.output).into_iter().flatten() {
            if first > at && first < run.end {
                left.push(TileRun { output: run.output, first: at, end: first });
            }
            at = at.max(end);
        }
        if at < run.end {
            left.push(TileRun { output: run.output, first: at, end: run.end });
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Fill, Output};
    use crate::tensor::Dtype;
    use proptest::prelude::*;

    fn plan(lengths: &[u64]) -> Plan {
        let output = |(i, n): (usize, &u64)| Output {
            name: format!("t{i}").into(),
            dtype: Dtype::U8,
            shape: [*n].into(),
            parts: Box::default(),
            fill: Fill::Zero,
            file: 0,
            offset: 0,
            key: None,
        };
        Plan { outputs: lengths.iter().enumerate().map(output).collect(), ..Plan::default() }
    }

    proptest! {
        #[test]
        fn shares_tile_the_work_evenly(
            lengths in prop::collection::vec((0u64..200_000, 10u32..16), 1..12),
            parts in 1usize..9,
        ) {
            let (lengths, sizes): (Vec<u64>, Vec<u64>) =
                lengths.into_iter().map(|(n, log)| (n, 1u64 << log)).unzip();
            let plan = plan(&lengths);
            let all = all_tiles(&plan, &sizes, &|_| false);
            let shares = divide(&plan, &sizes, &all, parts);
            prop_assert_eq!(shares.len(), parts);
            // Put together, the shares are all tiles in their order, none twice.
            let tiles = |runs: &[TileRun]| -> Vec<(u32, u64)> {
                runs.iter().flat_map(|r| (r.first..r.end).map(|t| (r.output, t))).collect()
            };
            let divided: Vec<TileRun> = shares.iter().flat_map(|s| s.tiles.clone()).collect();
            prop_assert_eq!(tiles(&divided), tiles(&all));
            // What some have made is taken out, and nothing else.
            let (done, left): (Vec<_>, Vec<_>) = shares.iter().enumerate().partition(|(i, _)| i % 2 == 0);
            let done: Vec<TileRun> = done.into_iter().rev().flat_map(|(_, s)| s.tiles.clone()).collect();
            let left: Vec<TileRun> = left.into_iter().flat_map(|(_, s)| s.tiles.clone()).collect();
            prop_assert_eq!(tiles(&without(&all, &done)), tiles(&left));
            let each = lengths.iter().sum::<u64>() / parts as u64;
            let largest = sizes.iter().copied().max().unwrap();
            for share in &shares {
                let bytes = share.bytes(&plan, &sizes);
                prop_assert!(bytes.abs_diff(each) <= largest + 1, "{} of {}", bytes, each);
            }
        }
    }
}
