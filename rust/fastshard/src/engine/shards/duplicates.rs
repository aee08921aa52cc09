//! Files copied over others: shards, layers and pieces that hold the same bytes where they must not.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{blobs_of, crc_of, Reader, MIN_BYTES};
use crate::codes;
use crate::engine::gather::Sources;
use crate::engine::place;
use crate::error::{Finding, Result};
use crate::plan::{Plan, StoredTensor};

/// Position of a tensor on the axes bound by its name.
type Layer<'p> = &'p [u64];

/// Shards of one tensor on two ranks that hold the same bytes.
///
/// Equality that is the same over all ranks and layers of a rule can be meant and warns; equality of
/// some ranks or layers only, of a tensor that no layer repeats (an embedding), or of everything that
/// two ranks hold, is a file copied over another. What repeats inside its own rank (the experts of a model
/// made of a dense one) tells nothing of other ranks.
pub(in crate::engine) fn duplicates(plan: &Plan, sources: &Sources) -> Result<Vec<Finding>> {
    let mut reader = Reader::new(sources);
    // (rule, index) -> shards
    let mut groups: BTreeMap<(u32, &[u64]), Vec<u32>> = BTreeMap::new();
    for (i, stored) in plan.stored.iter().enumerate() {
        if stored.shard.is_some() && stored.nbytes() >= MIN_BYTES {
            groups.entry((stored.rule, &stored.index)).or_default().push(i as u32);
        }
    }
    // pair of ranks -> (equal, different) shards that are not constant
    let mut pairs: BTreeMap<(u64, u64), (u64, u64)> = BTreeMap::new();
    // rule -> pairs seen equal and not
    let mut rules: HashMap<u32, (u64, u64)> = HashMap::new();
    let mut equal: Vec<(u32, u32)> = Vec::new();
    let mut repeats: HashMap<u32, u64> = HashMap::new();
    for ((rule, _), shards) in &groups {
        *repeats.entry(*rule).or_default() += 1;
        let sums: Vec<Option<u32>> =
            shards.iter().map(|&s| crc_of(sources, &plan.stored[s as usize])).collect();
        if plan.words.is_of_experts(&plan.stored[shards[0] as usize].name) {
            // Experts that were made of one are the same on all ranks, or each part of them is on all that have it.
            let mut parts: HashMap<u32, Vec<u32>> = HashMap::new();
            for (sum, &shard) in sums.iter().zip(shards) {
                sum.iter().for_each(|sum| parts.entry(*sum).or_default().push(shard));
            }
            let each = parts.values().next().map_or(0, Vec::len);
            let alike = sums.iter().all(Option::is_some) && parts.values().all(|part| part.len() == each);
            // Of three that is no accident; of two it is none if each holds several that are the same.
            if alike && (each > 2 || (each > 1 && reader.repeats(&plan.stored[shards[0] as usize])?)) {
                continue;
            }
        }
        // checksum -> whether what has it tells nothing
        let mut nothing: HashMap<u32, bool> = HashMap::new();
        for a in 0..shards.len() {
            for b in a + 1..shards.len() {
                let (x, y) = (&plan.stored[shards[a] as usize], &plan.stored[shards[b] as usize]);
                let (Some(r), Some(s)) = (x.shard, y.shard) else { continue };
                if r == s || x.shape != y.shape {
                    continue;
                }
                // Checksums that are known and differ settle it without reading.
                let differ = matches!((sums[a], sums[b]), (Some(p), Some(q)) if p != q);
                let known = sums[a].filter(|_| sums[a] == sums[b]);
                // Content that tells nothing need not be compared, nor be read for each rank.
                if let Some(sum) = known {
                    let says_nothing = match nothing.get(&sum) {
                        Some(known) => *known,
                        None => *nothing.entry(sum).or_insert(reader.says_nothing(x)?),
                    };
                    if says_nothing {
                        continue;
                    }
                }
                let same = !differ && reader.equal(x, y)?;
                if same && known.is_none() && reader.says_nothing(x)? {
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
    let repeated = repeated_inside(plan, sources, equal.iter().map(|&(a, _)| a));
    // One finding per pair of files, naming the first tensor.
    let mut files: BTreeMap<(u32, u32), (u32, u32, u64, bool)> = BTreeMap::new();
    for (a, b) in equal {
        let (x, y) = (&plan.stored[a as usize], &plan.stored[b as usize]);
        let (r, s) = (x.shard.unwrap_or(0), y.shard.unwrap_or(0));
        let symmetric = rules[&x.rule].1 == 0 && repeats[&x.rule] > 1;
        let whole_rank = pairs[&(r.min(s), r.max(s))].1 == 0;
        let bad = (!symmetric || whole_rank) && !repeated.contains(&a);
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
                "a copy of {}'s shard in {}{more}",
                x.rank.as_deref().unwrap_or("another rank"),
                plan.label(original)
            ),
        )
        .count(count)
        .expected("another part of the tensor", "a copy")
        .help("copy the file of this rank from the node that ran it; --accept copies if it was copied on purpose");
        findings.push(place(plan, b, finding));
    }
    Ok(findings)
}

/// Those of `tensors` whose checksum another tensor of their rule and rank has as well.
fn repeated_inside(plan: &Plan, sources: &Sources, tensors: impl Iterator<Item = u32>) -> BTreeSet<u32> {
    let asked: BTreeSet<u32> = tensors.collect();
    let rules: BTreeSet<u32> = asked.iter().map(|&t| plan.stored[t as usize].rule).collect();
    // (rule, rank, checksum, bytes) -> positions
    let mut alike: HashMap<(u32, u64, u32, u64), BTreeSet<Layer>> = HashMap::new();
    let key = |s: &StoredTensor| Some((s.rule, s.shard?, crc_of(sources, s)?, s.nbytes()));
    for stored in plan.stored.iter().filter(|s| rules.contains(&s.rule)) {
        if let Some(key) = key(stored) {
            alike.entry(key).or_default().insert(&stored.index);
        }
    }
    let repeated = |s: &StoredTensor| key(s).is_some_and(|k| alike[&k].len() > 1);
    asked.into_iter().filter(|&t| repeated(&plan.stored[t as usize])).collect()
}

/// Pieces that two roots hold and that are not the same.
pub(in crate::engine) fn copies(plan: &Plan, sources: &Sources) -> Result<Vec<Finding>> {
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
pub(in crate::engine) fn repeated_layers(plan: &Plan, sources: &Sources) -> Result<Vec<Finding>> {
    let mut reader = Reader::new(sources);
    let whole = plan.topology.values().all(|&degree| degree == 1);
    // (rule, rank, checksum, bytes) -> tensors of different layers
    let mut alike: BTreeMap<(u32, u64, u32, u64), Vec<u32>> = BTreeMap::new();
    let mut ranks: HashMap<u32, BTreeSet<u64>> = HashMap::new();
    // What another directory holds once more is compared with the first, and counts once.
    let again: BTreeSet<u32> = plan.copies.iter().map(|(_, copy)| *copy).collect();
    for (i, stored) in plan.stored.iter().enumerate().filter(|(i, _)| !again.contains(&(*i as u32))) {
        let comparable = !stored.index.is_empty() && (stored.shard.is_some() || whole);
        if !comparable || stored.nbytes() < MIN_BYTES {
            continue;
        }
        let rank = stored.shard.unwrap_or(0);
        ranks.entry(stored.rule).or_default().insert(rank);
        if let Some(crc) = crc_of(sources, stored) {
            alike.entry((stored.rule, rank, crc, stored.nbytes())).or_default().push(i as u32);
        }
    }
    // (rule, layer, layer) -> pairs of tensors that are the same, one per rank
    let mut layers: BTreeMap<(u32, Layer, Layer), Vec<(u32, u32)>> = BTreeMap::new();
    for ((rule, ..), tensors) in &alike {
        let first = &plan.stored[tensors[0] as usize];
        if tensors.len() == 1 || reader.says_nothing(first)? {
            continue;
        }
        for &other in &tensors[1..] {
            let copy = &plan.stored[other as usize];
            if copy.index != first.index && reader.equal(first, copy)? {
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
        let finding = Finding::new(
            code,
            format!("a copy of {original}, another layer or expert{more}"),
        )
        .count(count)
        .expected("one of its own", if all { "a copy on all ranks" } else { "a copy on this rank only" })
        .help(
            "copy the file of this rank from the node that ran it; --accept copies if the layer was copied on purpose",
        );
        findings.push(place(plan, b, finding));
    }
    Ok(findings)
}
