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
    // (rule, index) -> shards
    let mut groups: BTreeMap<(u32, &[u64]), Vec<u32>> = BTreeMap::new();
    for (i, stored) in plan.stored.iter().enumerate() {
        if stored.shard.is_some() && stored.nbytes() >= MIN_BYTES {
            groups.entry((stored.rule, &stored.index)).or_default().push(i as u32);
        }
    }
    let mut compared = Compared {
        plan,
        sources,
        reader: Reader::new(sources),
        pairs: BTreeMap::new(),
        rules: HashMap::new(),
        repeats: HashMap::new(),
        equal: Vec::new(),
    };
    for ((rule, _), shards) in &groups {
        compared.group(*rule, shards)?;
    }
    Ok(compared.findings())
}

/// What two files hold alike.
#[derive(Default)]
struct Alike {
    /// Pairs of stored tensors.
    equal: Vec<(u32, u32)>,
    /// True if one file is a copy that nobody meant.
    bad: bool,
}

/// Shards of one tensor on several ranks, compared with each other.
struct Compared<'a> {
    plan: &'a Plan,
    sources: &'a Sources<'a>,
    reader: Reader<'a, 'a>,
    /// Pair of ranks -> (equal, different) shards that are not constant.
    pairs: BTreeMap<(u64, u64), (u64, u64)>,
    /// Rule -> pairs seen (equal, different).
    rules: HashMap<u32, (u64, u64)>,
    /// Rule -> tensors that it names.
    repeats: HashMap<u32, u64>,
    /// Pairs of stored tensors that are equal.
    equal: Vec<(u32, u32)>,
}

impl Compared<'_> {
    /// Compares the shards of one tensor, each with each.
    fn group(&mut self, rule: u32, shards: &[u32]) -> Result<()> {
        *self.repeats.entry(rule).or_default() += 1;
        let sums: Vec<Option<u32>> =
            shards.iter().map(|&s| crc_of(self.sources, &self.plan.stored[s as usize])).collect();
        if self.is_made_of_one(shards, &sums)? {
            return Ok(());
        }
        // checksum -> whether what has it tells nothing
        let mut nothing: HashMap<u32, bool> = HashMap::new();
        for a in 0..shards.len() {
            for b in a + 1..shards.len() {
                self.pair(rule, (shards[a], sums[a]), (shards[b], sums[b]), &mut nothing)?;
            }
        }
        Ok(())
    }

    /// True for experts that were made of one: they are the same on all ranks, or each part of them is on all that have it.
    fn is_made_of_one(&mut self, shards: &[u32], sums: &[Option<u32>]) -> Result<bool> {
        let first = &self.plan.stored[shards[0] as usize];
        if !self.plan.words.is_of_experts(&first.name) || sums.iter().any(Option::is_none) {
            return Ok(false);
        }
        let mut parts: HashMap<u32, usize> = HashMap::new();
        sums.iter().flatten().for_each(|sum| *parts.entry(*sum).or_default() += 1);
        let each = parts.values().next().copied().unwrap_or(0);
        let alike = parts.values().all(|part| *part == each);
        // Of three that is no accident; of two it is none if each holds several that are the same.
        Ok(alike && (each > 2 || (each > 1 && self.reader.repeats(first)?)))
    }

    /// Compares two shards, each given with its checksum where that is known.
    fn pair(
        &mut self,
        rule: u32,
        (a, a_sum): (u32, Option<u32>),
        (b, b_sum): (u32, Option<u32>),
        nothing: &mut HashMap<u32, bool>,
    ) -> Result<()> {
        let (x, y) = (&self.plan.stored[a as usize], &self.plan.stored[b as usize]);
        let (Some(r), Some(s)) = (x.shard, y.shard) else { return Ok(()) };
        if r == s || x.shape != y.shape {
            return Ok(());
        }
        // Checksums that are known and differ settle it without reading.
        let differ = matches!((a_sum, b_sum), (Some(p), Some(q)) if p != q);
        let known = a_sum.filter(|_| a_sum == b_sum);
        // Content that tells nothing need not be compared, nor be read for each rank.
        if let Some(sum) = known {
            let says_nothing = match nothing.get(&sum) {
                Some(known) => *known,
                None => *nothing.entry(sum).or_insert(self.reader.says_nothing(x)?),
            };
            if says_nothing {
                return Ok(());
            }
        }
        let same = !differ && self.reader.equal(x, y)?;
        if same && known.is_none() && self.reader.says_nothing(x)? {
            return Ok(());
        }
        let of_pair = self.pairs.entry((r.min(s), r.max(s))).or_default();
        let of_rule = self.rules.entry(rule).or_default();
        if same {
            of_pair.0 += 1;
            of_rule.0 += 1;
            self.equal.push((a, b));
        } else {
            of_pair.1 += 1;
            of_rule.1 += 1;
        }
        Ok(())
    }

    /// One finding for files that are copies of one another, naming the first tensor. Which is the copy they do not tell.
    fn findings(&self) -> Vec<Finding> {
        let plan = self.plan;
        let repeated = repeated_inside(plan, self.sources, self.equal.iter().map(|&(a, _)| a));
        let mut pairs: BTreeMap<(u32, u32), Alike> = BTreeMap::new();
        for &(a, b) in &self.equal {
            let (x, y) = (&plan.stored[a as usize], &plan.stored[b as usize]);
            let (r, s) = (x.shard.unwrap_or(0), y.shard.unwrap_or(0));
            let symmetric = self.rules[&x.rule].1 == 0 && self.repeats[&x.rule] > 1;
            let whole_rank = self.pairs[&(r.min(s), r.max(s))].1 == 0;
            let alike = pairs.entry((file_of(plan, x), file_of(plan, y))).or_default();
            alike.equal.push((a, b));
            alike.bad |= (!symmetric || whole_rank) && !repeated.contains(&a);
        }
        let mut found = Vec::new();
        for bad in [true, false] {
            let like: Vec<_> = pairs.iter().filter(|(_, alike)| alike.bad == bad).collect();
            for files in joined(like.iter().map(|(pair, _)| **pair)) {
                let inside = like.iter().filter(|((a, _), _)| files.contains(a));
                let equal: Vec<(u32, u32)> = inside.flat_map(|(_, alike)| &alike.equal).copied().collect();
                found.push(self.copied(&files, &equal, bad));
            }
        }
        found
    }

    fn copied(&self, files: &BTreeSet<u32>, equal: &[(u32, u32)], bad: bool) -> Finding {
        let plan = self.plan;
        let code = if bad { codes::DUPLICATED_SHARD } else { codes::EQUAL_SHARDS };
        let holders: BTreeSet<u32> = equal.iter().flat_map(|&(a, b)| [a, b]).collect();
        let ranks: BTreeSet<&str> =
            holders.iter().filter_map(|&s| plan.stored[s as usize].rank.as_deref()).collect();
        let ranks = match ranks.len() {
            1..=4 => {
                let mut ranks = Vec::from_iter(ranks);
                let last = ranks.pop().unwrap_or_default();
                if ranks.is_empty() {
                    last.into()
                } else {
                    format!("{} and {last}", ranks.join(", "))
                }
            }
            _ => format!("{} ranks", files.len()),
        };
        let tensors: BTreeSet<(u32, Layer)> = equal
            .iter()
            .map(|&(a, _)| (plan.stored[a as usize].rule, &plan.stored[a as usize].index[..]))
            .collect();
        let count = tensors.len() as u64;
        let what = if count == 1 { "shard".into() } else { format!("{count} shards") };
        let finding = Finding::new(code, format!("{ranks} hold the same {what}: one file is a copy of another"))
            .count(count)
            .expected("another part of the tensor on each rank", "the same bytes")
            .help("copy the files of these ranks again from the nodes that ran them; nothing here says which file is the copy; if they were copied on purpose, accept them")
            .run("--accept copies");
        // The later rank is what was written last, if ranks were copied in their order.
        let mut finding = place(plan, equal[0].1, finding);
        finding.rank = None;
        finding.files = files.iter().map(|&file| plan.label(file)).collect();
        finding
    }
}

/// Files that pairs join, directly or by way of others.
fn joined(pairs: impl Iterator<Item = (u32, u32)>) -> Vec<BTreeSet<u32>> {
    let mut sets: Vec<BTreeSet<u32>> = Vec::new();
    for (a, b) in pairs {
        let (with, mut others): (Vec<_>, Vec<_>) =
            sets.into_iter().partition(|set| set.contains(&a) || set.contains(&b));
        let mut one: BTreeSet<u32> = with.into_iter().flatten().collect();
        one.extend([a, b]);
        others.push(one);
        sets = others;
    }
    sets
}

/// The file that a stored tensor begins in.
fn file_of(plan: &Plan, stored: &StoredTensor) -> u32 {
    blobs_of(stored).first().map_or(0, |b| plan.blobs[*b as usize].file)
}

fn and_more(count: u64) -> String {
    match count {
        0 | 1 => String::new(),
        _ => format!(" (and {} more tensors)", count - 1),
    }
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
                        "pass only parts of one checkpoint; the two directories hold different steps or runs",
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
            let file = |t: u32| file_of(plan, &plan.stored[t as usize]);
            files.entry((file(a), file(b), all)).or_insert((a, b, 0)).2 += 1;
        }
    }
    let mut findings = Vec::new();
    for ((_, _, all), (a, b, count)) in files {
        let code = if all { codes::EQUAL_SHARDS } else { codes::DUPLICATED_SHARD };
        let more = and_more(count);
        let original = &plan.stored[a as usize].name;
        let finding = Finding::new(
            code,
            format!("a copy of {original}, another layer or expert{more}"),
        )
        .count(count)
        .expected("another shard", if all { "a copy on all ranks" } else { "a copy on this rank only" })
        .help("copy the file of this rank from the node that ran it; if the layer was copied on purpose, accept it")
        .run("--accept copies");
        findings.push(place(plan, b, finding));
    }
    Ok(findings)
}
