//! Shards against each other: duplicated and swapped files show in what ranks and layers share.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::boxes::SubBox;
use crate::codes;
use crate::error::{Finding, Result, Severity};
use crate::kernel;
use crate::plan::{Combine, PartAxis, Pieces, Plan, StoredTensor};
use crate::tensor::{c_strides, element_count};

use super::gather::{Into, Sources};
use super::place;

/// Smaller shards are equal by chance or by construction too often to say anything.
const MIN_BYTES: u64 = 32;
/// Bytes compared at a time.
const CHUNK: usize = 256 << 10;

/// Blobs that a stored tensor reads.
pub(super) fn blobs_of(stored: &StoredTensor) -> Vec<u32> {
    match &stored.pieces {
        Pieces::View { blob, .. } => vec![*blob],
        Pieces::Boxes(pieces) => pieces.iter().map(|p| p.blob).collect(),
        Pieces::Ranges(pieces) => pieces.iter().map(|p| p.blob).collect(),
    }
}

/// Byte range in its blob of a tensor stored as one C-ordered run.
fn run_of(stored: &StoredTensor) -> Option<(u32, u64, u64)> {
    match &stored.pieces {
        Pieces::View { blob, offset, strides } if *strides == c_strides(&stored.shape) => {
            Some((*blob, *offset, *offset + stored.nbytes()))
        }
        _ => None,
    }
}

/// Blobs whose checksum is wanted: those that carry one, and those of shards to be compared.
pub(super) fn tracked(plan: &Plan) -> Vec<bool> {
    let mut tracked: Vec<bool> = plan.blobs.iter().map(|b| b.crc32.is_some()).collect();
    for stored in plan.stored.iter().filter(|s| s.shard.is_some()) {
        for blob in blobs_of(stored) {
            tracked[blob as usize] = true;
        }
    }
    tracked
}

/// Per blob, where tensors begin and end: checksums of gaps stop there.
pub(super) fn cuts(plan: &Plan) -> Vec<Vec<u64>> {
    let mut cuts = vec![Vec::new(); plan.blobs.len()];
    for stored in plan.stored.iter().filter(|s| s.shard.is_some()) {
        if let Some((blob, lo, hi)) = run_of(stored) {
            cuts[blob as usize].extend([lo, hi]);
        }
    }
    cuts
}

/// Reads elements `at..at + n` (C order) of a stored tensor.
fn read_range(
    sources: &Sources,
    stored: &StoredTensor,
    at: u64,
    buffer: &mut [u8],
    scratch: &mut [u8],
) -> Result<()> {
    let strides = c_strides(&stored.shape);
    let axes: Vec<PartAxis> = stored
        .shape
        .iter()
        .zip(&strides)
        .enumerate()
        .map(|(dim, (&n, &dst))| PartAxis { n, dst, dim: dim as u32, step: 1 })
        .collect();
    let spread = crate::boxes::Spread::new(0, strides.clone());
    let n = (buffer.len() / stored.dtype.size()) as u64;
    let mut found = Vec::new();
    spread.cut(&SubBox::whole(&stored.shape), at, at + n, &mut |sub| found.push(sub.clone()));
    for sub in found {
        let mut into = Into { bytes: buffer, base: spread.first(&sub) - at, strides: &strides };
        sources.read(stored, &axes, &vec![0; stored.shape.len()], &sub, &mut into, scratch)?;
    }
    Ok(())
}

struct Reader<'a, 'p> {
    sources: &'a Sources<'p>,
    scratch: Vec<u8>,
    a: Vec<u8>,
    b: Vec<u8>,
}

impl<'a, 'p> Reader<'a, 'p> {
    fn new(sources: &'a Sources<'p>) -> Self {
        Reader { sources, scratch: vec![0; CHUNK], a: vec![0; CHUNK], b: vec![0; CHUNK] }
    }

    fn chunks(stored: &StoredTensor) -> impl Iterator<Item = (u64, usize)> {
        let item = stored.dtype.size();
        let per = (CHUNK / item) as u64;
        let total = element_count(&stored.shape).unwrap_or(0);
        (0..total.div_ceil(per)).map(move |i| (i * per, ((total - i * per).min(per)) as usize * item))
    }

    fn equal(&mut self, a: &StoredTensor, b: &StoredTensor) -> Result<bool> {
        for (at, bytes) in Self::chunks(a) {
            read_range(self.sources, a, at, &mut self.a[..bytes], &mut self.scratch)?;
            read_range(self.sources, b, at, &mut self.b[..bytes], &mut self.scratch)?;
            if self.a[..bytes] != self.b[..bytes] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn constant(&mut self, stored: &StoredTensor) -> Result<bool> {
        let item = stored.dtype.size();
        let mut first: Option<Vec<u8>> = None;
        for (at, bytes) in Self::chunks(stored) {
            read_range(self.sources, stored, at, &mut self.a[..bytes], &mut self.scratch)?;
            let value = first.get_or_insert_with(|| self.a[..item].to_vec());
            if !kernel::is_constant(&self.a[..bytes], item) || self.a[..item] != value[..] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn floats(&mut self, stored: &StoredTensor) -> Result<Vec<f32>> {
        let mut all = Vec::new();
        for (at, bytes) in Self::chunks(stored) {
            read_range(self.sources, stored, at, &mut self.a[..bytes], &mut self.scratch)?;
            let mut out = vec![0.0; bytes / stored.dtype.size()];
            kernel::to_f32(stored.dtype, &self.a[..bytes], &mut out);
            all.extend(out);
        }
        Ok(all)
    }
}

/// Shards of one tensor on two ranks that hold the same bytes.
///
/// Equality that is the same over all ranks and layers of a rule can be meant and warns; equality of
/// some ranks or layers only, of a tensor that no layer repeats (an embedding), or of everything that
/// two ranks hold, is a file copied over another.
pub(super) fn duplicates(plan: &Plan, sources: &Sources) -> Result<Vec<Finding>> {
    let mut reader = Reader::new(sources);
    // (rule, index) -> shards
    let mut groups: BTreeMap<(u32, &[u64]), Vec<u32>> = BTreeMap::new();
    for (i, stored) in plan.stored.iter().enumerate() {
        if stored.shard.is_some() && stored.nbytes() >= MIN_BYTES {
            groups.entry((stored.rule, &stored.index)).or_default().push(i as u32);
        }
    }
    let crc = |i: u32| -> Option<u32> {
        let (blob, lo, hi) = run_of(&plan.stored[i as usize])?;
        sources.segments(blob).crc(lo, hi)
    };
    // pair of ranks -> (equal, different) shards that are not constant
    let mut pairs: BTreeMap<(u64, u64), (u64, u64)> = BTreeMap::new();
    // rule -> pairs seen equal and not
    let mut rules: HashMap<u32, (u64, u64)> = HashMap::new();
    let mut equal: Vec<(u32, u32)> = Vec::new();
    let mut repeats: HashMap<u32, u64> = HashMap::new();
    for ((rule, _), shards) in &groups {
        *repeats.entry(*rule).or_default() += 1;
        let sums: Vec<Option<u32>> = shards.iter().map(|&s| crc(s)).collect();
        for a in 0..shards.len() {
            for b in a + 1..shards.len() {
                let (x, y) = (&plan.stored[shards[a] as usize], &plan.stored[shards[b] as usize]);
                let (Some(r), Some(s)) = (x.shard, y.shard) else { continue };
                if r == s || x.shape != y.shape {
                    continue;
                }
                // Checksums that are known and differ settle it without reading.
                let differ = matches!((sums[a], sums[b]), (Some(p), Some(q)) if p != q);
                let same = !differ && reader.equal(x, y)?;
                if same && reader.constant(x)? {
                    continue;
                }
                let pair = pairs.entry((r.min(s), r.max(s))).or_default();
                let of_rule = rules.entry(*rule).or_default();
                if same {
                    pair.0 += 1;
                    of_rule.0 += 1;
                    equal.push((shards[a], shards[b]));
                } else {
                    pair.1 += 1;
                    of_rule.1 += 1;
                }
            }
        }
    }
    // One finding per pair of files, naming the first tensor.
    let mut files: BTreeMap<(u32, u32), (u32, u32, u64, bool)> = BTreeMap::new();
    for (a, b) in equal {
        let (x, y) = (&plan.stored[a as usize], &plan.stored[b as usize]);
        let (r, s) = (x.shard.unwrap_or(0), y.shard.unwrap_or(0));
        let symmetric = rules[&x.rule].1 == 0 && repeats[&x.rule] > 1;
        let whole_rank = pairs[&(r.min(s), r.max(s))].1 == 0;
        let bad = !symmetric || whole_rank;
        let file = |t: &StoredTensor| blobs_of(t).first().map_or(0, |b| plan.blobs[*b as usize].file);
        let entry = files.entry((file(x), file(y))).or_insert((a, b, 0, false));
        entry.2 += 1;
        entry.3 |= bad;
    }
    let mut findings = Vec::new();
    for ((original, _), (a, b, count, bad)) in files {
        let code = if bad { codes::DUPLICATED_SHARD } else { codes::EQUAL_SHARDS };
        let x = &plan.stored[a as usize];
        let more = if count > 1 { format!(" (and {} more tensors)", count - 1) } else { String::new() };
        let finding = Finding::new(
            code,
            format!(
                "the same bytes as {}'s shard in {}{more}",
                x.rank.as_deref().unwrap_or("another rank"),
                plan.label(original)
            ),
        )
        .expected("another part of the tensor", "a copy")
        .help("copy the right file from the node that ran this rank");
        findings.push(place(plan, b, finding));
    }
    Ok(findings)
}

/// Pieces that two roots hold and that are not the same.
pub(super) fn copies(plan: &Plan, sources: &Sources) -> Result<Vec<Finding>> {
    let mut reader = Reader::new(sources);
    let mut findings = Vec::new();
    for &(first, copy) in &plan.copies {
        let (a, b) = (&plan.stored[first as usize], &plan.stored[copy as usize]);
        let same = a.dtype == b.dtype && a.shape == b.shape && reader.equal(a, b)?;
        if !same {
            let file =
                blobs_of(a).first().map_or_else(String::new, |b| plan.label(plan.blobs[*b as usize].file));
            let finding =
                Finding::new(codes::REPLICAS_DIFFER, format!("not what {file} holds of the same piece"))
                    .expected("equal bytes", "other bytes")
                    .help(
                        "the two directories hold different steps or runs: give only parts of one checkpoint",
                    );
            findings.push(place(plan, copy, finding));
        }
    }
    Ok(findings)
}

/// Layers that hold the same bytes as another layer, by checksums that are known, confirmed on bytes.
///
/// All ranks of a layer alike are a copied layer, which can be meant (depth up-scaling) and warns; some
/// ranks only are a file copied over another.
pub(super) fn repeated_layers(plan: &Plan, sources: &Sources) -> Result<Vec<Finding>> {
    let mut reader = Reader::new(sources);
    let whole = plan.topology.values().all(|&degree| degree == 1);
    // (rule, rank, checksum, bytes) -> tensors of different layers
    let mut alike: BTreeMap<(u32, u64, u32, u64), Vec<u32>> = BTreeMap::new();
    let mut ranks: HashMap<u32, BTreeSet<u64>> = HashMap::new();
    for (i, stored) in plan.stored.iter().enumerate() {
        let comparable = !stored.index.is_empty() && (stored.shard.is_some() || whole);
        if !comparable || stored.nbytes() < MIN_BYTES {
            continue;
        }
        let rank = stored.shard.unwrap_or(0);
        ranks.entry(stored.rule).or_default().insert(rank);
        let Some((blob, lo, hi)) = run_of(stored) else { continue };
        if let Some(crc) = sources.segments(blob).crc(lo, hi) {
            alike.entry((stored.rule, rank, crc, stored.nbytes())).or_default().push(i as u32);
        }
    }
    // (rule, layer, layer) -> pairs of tensors that are the same, one per rank
    let mut layers: BTreeMap<(u32, &[u64], &[u64]), Vec<(u32, u32)>> = BTreeMap::new();
    for ((rule, ..), tensors) in &alike {
        let first = &plan.stored[tensors[0] as usize];
        for &other in &tensors[1..] {
            let copy = &plan.stored[other as usize];
            if copy.index != first.index && reader.equal(first, copy)? && !reader.constant(first)? {
                layers.entry((*rule, &first.index, &copy.index)).or_default().push((tensors[0], other));
            }
        }
    }
    // One finding per pair of files, naming the first tensor.
    let mut files: BTreeMap<(u32, u32, bool), (u32, u32, u64)> = BTreeMap::new();
    for ((rule, ..), pairs) in layers {
        let all = pairs.len() == ranks[&rule].len();
        for (a, b) in pairs {
            let file = |t: u32| {
                blobs_of(&plan.stored[t as usize]).first().map_or(0, |b| plan.blobs[*b as usize].file)
            };
            files.entry((file(a), file(b), all)).or_insert((a, b, 0)).2 += 1;
        }
    }
    let mut findings = Vec::new();
    for ((_, _, all), (a, b, count)) in files {
        let code = if all { codes::EQUAL_SHARDS } else { codes::DUPLICATED_SHARD };
        let more = if count > 1 { format!(" (and {} more tensors)", count - 1) } else { String::new() };
        let original = &plan.stored[a as usize].name;
        let finding = Finding::new(code, format!("the same bytes as {original}, another layer{more}"))
            .expected("a layer of its own", if all { "a copy on all ranks" } else { "a copy on this rank only" })
            .help("copy the right file from the node that ran this rank, unless the layer was copied on purpose");
        findings.push(place(plan, b, finding));
    }
    Ok(findings)
}

/// Replicas that were to be averaged but belong to another layer: closer to another layer's copies
/// than to their own layer's.
pub(super) fn swapped(plan: &Plan, sources: &Sources, findings: &[Finding]) -> Result<Vec<Finding>> {
    let drifted = |name: &str| {
        findings.iter().any(|f| f.code == codes::REPLICAS_AVERAGED && f.tensor.as_deref() == Some(name))
    };
    let mut rules: BTreeMap<u32, Vec<&crate::plan::Part>> = BTreeMap::new();
    for output in &plan.outputs {
        for part in &output.parts {
            if part.combine == Combine::Mean && part.sources.len() > 1 {
                rules.entry(plan.stored[part.sources[0] as usize].rule).or_default().push(part);
            }
        }
    }
    let mut reader = Reader::new(sources);
    let mut out = Vec::new();
    for parts in rules.values() {
        let any = plan
            .outputs
            .iter()
            .any(|o| drifted(&o.name) && o.parts.iter().any(|p| parts.iter().any(|q| std::ptr::eq(p, *q))));
        if !any || !plan.stored[parts[0].sources[0] as usize].dtype.is_float() {
            continue;
        }
        // All layers' copies of one small tensor: [layer][rank].
        let mut copies: Vec<Vec<Vec<f32>>> = Vec::new();
        for part in parts {
            let layer: Result<Vec<Vec<f32>>> =
                part.sources.iter().map(|&s| reader.floats(&plan.stored[s as usize])).collect();
            copies.push(layer?);
        }
        for (l, layer) in copies.iter().enumerate() {
            for r in 0..layer.len() {
                let own = distance_to_others(&layer[r], layer, Some(r));
                if own == 0.0 {
                    continue;
                }
                let scale = layer.iter().flatten().map(|x| f64::from(x.abs())).sum::<f64>()
                    / layer.iter().map(Vec::len).sum::<usize>().max(1) as f64;
                let closest = (0..copies.len())
                    .filter(|&other| other != l && copies[other][0].len() == layer[r].len())
                    .map(|other| (distance_to_others(&layer[r], &copies[other], Some(r)), other))
                    .min_by(|a, b| a.0.total_cmp(&b.0));
                let stored = parts[l].sources[r];
                match closest {
                    Some((distance, other)) if distance < own => {
                        let theirs = &plan.stored[parts[other].sources[0] as usize].name;
                        let finding = Finding::new(
                            codes::SWAPPED_SHARD,
                            format!("this copy is closer to {theirs} than to the other ranks' copies"),
                        )
                        .expected(
                            format!("a mean difference of {distance:.3e} or less"),
                            format!("{own:.3e}"),
                        )
                        .help("files were swapped: copy the right one from the node that ran this rank");
                        out.push(place(plan, stored, finding));
                    }
                    _ if own > 0.5 * scale => {
                        let finding = Finding::new(
                            codes::REPLICAS_DIFFER,
                            "this copy is too far from the others to be drift",
                        )
                        .severity(Severity::Error)
                        .expected(
                            format!("a mean difference below half the mean magnitude {scale:.3e}"),
                            format!("{own:.3e}"),
                        )
                        .help("the file belongs to another run or step; averaging would hide it");
                        out.push(place(plan, stored, finding));
                    }
                    _ => {}
                }
            }
        }
    }
    Ok(out)
}

/// Mean absolute difference between `copy` and the mean of `layer` without rank `skip`.
fn distance_to_others(copy: &[f32], layer: &[Vec<f32>], skip: Option<usize>) -> f64 {
    let others: Vec<&Vec<f32>> =
        layer.iter().enumerate().filter(|(r, _)| Some(*r) != skip).map(|(_, c)| c).collect();
    if others.is_empty() || copy.is_empty() {
        return 0.0;
    }
    let sum: f64 = (0..copy.len())
        .map(|i| {
            let mean = others.iter().map(|o| f64::from(o[i])).sum::<f64>() / others.len() as f64;
            (f64::from(copy[i]) - mean).abs()
        })
        .sum();
    sum / copy.len() as f64
}
