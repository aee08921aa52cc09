//! Files copied over others: shards, layers and pieces with equal bytes that must differ.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::{crc_of, Reader, MIN_BYTES};
use crate::codes;
use crate::engine::gather::Sources;
use crate::engine::place;
use crate::error::{Finding, Result};
use crate::plan::blobs::blobs_of_tensor;
use crate::plan::{Plan, StoredTensor};

/// Position of a tensor on the axes bound by its name.
type Layer<'p> = &'p [u64];

/// Shards of one tensor on two ranks that hold the same bytes.
///
/// Equality that is the same over all ranks and layers of a rule can be intended, and is a warning; equality
/// of some ranks or layers only, of a tensor that no layer repeats (an embedding), or of everything that two
/// ranks hold, is a file copied over another. Data that repeats inside its own rank (the experts of a model
/// made from a dense one) shows nothing about other ranks.
///
/// Each shard is read at most once more; for a shard that the run does not read, only a sample.
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
        reader: Reader::new(sources)?,
        is_read: plan.tensors_read(),
        class_of: vec![NO_CLASS; plan.stored.len()],
        classes: 0,
        repeats: HashMap::new(),
        equal: Vec::new(),
    };
    for ((rule, _), shards) in &groups {
        compared.sort_into_classes(*rule, shards)?;
    }
    if compared.equal.is_empty() {
        return Ok(Vec::new());
    }
    let differing = compared.find_differing(groups.values())?;
    compared.findings(&differing)
}

/// The class of a shard without a comparison.
const NO_CLASS: u32 = 0;

/// The equal contents of two files.
struct Alike {
    /// The first two stored tensors that are equal.
    first: (u32, u32),
    /// True if one file is a copy that nobody meant.
    bad: bool,
}

/// Files of two ranks, and their equal contents.
type FilePairs = BTreeMap<(u32, u32), Alike>;

/// The differences between ranks with equal contents.
#[derive(Default)]
struct Differing {
    /// Pairs of ranks of which a shard differs.
    ranks: HashSet<(u64, u64)>,
    /// Rules of which a shard differs on two ranks.
    rules: HashSet<u32>,
}

/// Shards of one tensor on several ranks, compared with each other.
struct Compared<'a> {
    plan: &'a Plan,
    sources: &'a Sources<'a>,
    reader: Reader<'a, 'a>,
    /// Whether the run reads a stored tensor.
    is_read: Vec<bool>,
    /// Stored tensor -> its class: those of one tensor in one class are the same, or not told apart.
    class_of: Vec<u32>,
    /// How many classes there are.
    classes: u32,
    /// Rule -> tensors that it names.
    repeats: HashMap<u32, u64>,
    /// Stored tensors of each class that are proven to be equal, and not constant.
    equal: Vec<Vec<u32>>,
}

/// The property that distinguishes shards before they are hashed.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Look {
    Checksum(u32),
    /// None if it is constant.
    Sample(Option<u64>),
}

impl Compared<'_> {
    /// Sorts the shards of one tensor by their contents.
    fn sort_into_classes(&mut self, rule: u32, shards: &[u32]) -> Result<()> {
        self.sources.check_running()?;
        *self.repeats.entry(rule).or_default() += 1;
        let sums: Vec<Option<u32>> =
            shards.iter().map(|&s| crc_of(self.sources, &self.plan.stored[s as usize])).collect();
        if self.is_made_of_one(shards, &sums)? {
            return Ok(());
        }
        let all_known = sums.iter().all(Option::is_some);
        let mut looks: BTreeMap<(&[u64], Look), Vec<u32>> = BTreeMap::new();
        for (&shard, sum) in shards.iter().zip(&sums) {
            let stored = &self.plan.stored[shard as usize];
            let look = match sum {
                Some(sum) if all_known => Look::Checksum(*sum),
                _ => Look::Sample(self.reader.sample(stored)?),
            };
            looks.entry((&stored.shape, look)).or_default().push(shard);
        }
        for alike in looks.into_values() {
            if !self.are_of_several_ranks(&alike) || !alike.iter().all(|&shard| self.is_read[shard as usize])
            {
                self.add_class(&alike);
                continue;
            }
            // Content that tells nothing need not be read for each rank.
            if all_known && self.reader.says_nothing(&self.plan.stored[alike[0] as usize])? {
                self.add_class(&alike);
                continue;
            }
            let mut contents: BTreeMap<[u8; 32], Vec<u32>> = BTreeMap::new();
            for shard in alike {
                let hash = self.reader.hash(&self.plan.stored[shard as usize])?;
                contents.entry(hash).or_default().push(shard);
            }
            for same in contents.into_values() {
                self.add_class(&same);
                let tells = self.are_of_several_ranks(&same)
                    && (all_known || !self.reader.says_nothing(&self.plan.stored[same[0] as usize])?);
                if tells {
                    self.equal.push(same);
                }
            }
        }
        Ok(())
    }

    fn add_class(&mut self, shards: &[u32]) {
        self.classes += 1;
        shards.iter().for_each(|&shard| self.class_of[shard as usize] = self.classes);
    }

    fn rank(&self, stored: u32) -> u64 {
        self.plan.stored[stored as usize].shard.unwrap_or(0)
    }

    fn are_of_several_ranks(&self, shards: &[u32]) -> bool {
        shards.iter().any(|&shard| self.rank(shard) != self.rank(shards[0]))
    }

    /// Pairs of shards on different ranks, in their order.
    fn pairs<'s>(&'s self, shards: &'s [u32]) -> impl Iterator<Item = (u32, u32)> + 's {
        let after = move |n: usize| shards[n + 1..].iter().map(move |&b| (shards[n], b));
        (0..shards.len()).flat_map(after).filter(|&(a, b)| self.rank(a) != self.rank(b))
    }

    fn rank_pair(&self, (a, b): (u32, u32)) -> (u64, u64) {
        let (a, b) = (self.rank(a), self.rank(b));
        (a.min(b), a.max(b))
    }

    /// True for experts that were made from one: they are equal on all ranks, or each part of them is equal
    /// on all ranks that have it.
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

    /// Finds the differences between ranks with equal contents, and the rules that name them.
    fn find_differing<'g>(&self, groups: impl Iterator<Item = &'g Vec<u32>>) -> Result<Differing> {
        let ranks: HashSet<(u64, u64)> =
            self.equal.iter().flat_map(|same| self.pairs(same)).map(|pair| self.rank_pair(pair)).collect();
        let rules: HashSet<u32> =
            self.equal.iter().map(|same| self.plan.stored[same[0] as usize].rule).collect();
        let mut found = Differing::default();
        for shards in groups {
            self.sources.check_running()?;
            let rule = self.plan.stored[shards[0] as usize].rule;
            let differs = |&(a, b): &(u32, u32)| {
                let classes = (self.class_of[a as usize], self.class_of[b as usize]);
                classes.0 != classes.1
                    && classes.0 != NO_CLASS
                    && classes.1 != NO_CLASS
                    && self.plan.stored[a as usize].shape == self.plan.stored[b as usize].shape
            };
            for pair in self.pairs(shards).filter(differs) {
                if rules.contains(&rule) {
                    found.rules.insert(rule);
                }
                let pair = self.rank_pair(pair);
                if ranks.contains(&pair) {
                    found.ranks.insert(pair);
                }
            }
        }
        Ok(found)
    }

    /// One finding for files that are copies of one another, naming the first tensor. The files do not show
    /// which one is the copy.
    fn findings(&self, differing: &Differing) -> Result<Vec<Finding>> {
        let plan = self.plan;
        let repeated = repeated_inside(plan, self.sources, self.equal.iter().flatten().copied());
        let file = |stored: u32| file_of(plan, &plan.stored[stored as usize]);
        let mut pairs = FilePairs::new();
        for same in &self.equal {
            self.sources.check_running()?;
            let rule = plan.stored[same[0] as usize].rule;
            let symmetric = !differing.rules.contains(&rule) && self.repeats[&rule] > 1;
            for (a, b) in self.pairs(same) {
                let whole_rank = !differing.ranks.contains(&self.rank_pair((a, b)));
                let alike = pairs.entry((file(a), file(b))).or_insert(Alike { first: (a, b), bad: false });
                alike.bad |= (!symmetric || whole_rank) && !repeated.contains(&a);
            }
        }
        let mut found = Vec::new();
        for bad in [true, false] {
            let like = || pairs.iter().filter(move |(_, alike)| alike.bad == bad);
            for files in joined(like().map(|(pair, _)| *pair)) {
                self.sources.check_running()?;
                let first = like().find(|((a, _), _)| files.contains(a)).map(|(_, alike)| alike.first);
                let is_inside = |&(a, b): &(u32, u32)| {
                    let pair = (file(a), file(b));
                    files.contains(&pair.0) && pairs.get(&pair).is_some_and(|alike| alike.bad == bad)
                };
                let mut holders = BTreeSet::new();
                let mut tensors: BTreeSet<(u32, Layer)> = BTreeSet::new();
                for same in &self.equal {
                    for (a, b) in self.pairs(same).filter(is_inside) {
                        holders.extend([a, b]);
                        let stored = &plan.stored[a as usize];
                        tensors.insert((stored.rule, &stored.index));
                    }
                }
                if let Some((_, copy)) = first {
                    found.push(self.copied(&files, &holders, tensors.len() as u64, copy, bad));
                }
            }
        }
        Ok(found)
    }

    /// `holders` are the equal shards, of `count` tensors, and `copy` is one of them.
    fn copied(
        &self,
        files: &BTreeSet<u32>,
        holders: &BTreeSet<u32>,
        count: u64,
        copy: u32,
        bad: bool,
    ) -> Finding {
        let plan = self.plan;
        let code = if bad { codes::DUPLICATED_SHARD } else { codes::EQUAL_SHARDS };
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
        let what = if count == 1 { "shard".into() } else { format!("{count} shards") };
        let finding = Finding::new(code, format!("{ranks} hold the same {what}: one file is a copy of another"))
            .count(count)
            .expected("another part of the tensor on each rank", "the same bytes")
            .help("copy the files of these ranks again from the nodes that ran them; nothing here says which file is the copy; if they were copied on purpose, accept them")
            .run("--accept copies");
        // The later rank is what was written last, if ranks were copied in their order.
        let mut finding = place(plan, copy, finding);
        finding.rank = None;
        finding.files = files.iter().map(|&file| plan.label(file)).collect();
        finding
    }
}

/// Files that pairs join, directly or through others.
fn joined(pairs: impl Iterator<Item = (u32, u32)>) -> Vec<BTreeSet<u32>> {
    let mut parents: BTreeMap<u32, u32> = BTreeMap::new();
    fn root(parents: &mut BTreeMap<u32, u32>, file: u32) -> u32 {
        let parent = *parents.entry(file).or_insert(file);
        if parent == file {
            return file;
        }
        let root = root(parents, parent);
        parents.insert(file, root);
        root
    }
    for (a, b) in pairs {
        let (a, b) = (root(&mut parents, a), root(&mut parents, b));
        parents.insert(a.max(b), a.min(b));
    }
    let files: Vec<u32> = parents.keys().copied().collect();
    let mut sets: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for file in files {
        sets.entry(root(&mut parents, file)).or_default().insert(file);
    }
    sets.into_values().collect()
}

/// The file that a stored tensor begins in.
fn file_of(plan: &Plan, stored: &StoredTensor) -> u32 {
    blobs_of_tensor(stored).first().map_or(0, |b| plan.blobs[*b as usize].file)
}

fn and_more(count: u64) -> String {
    match count {
        0 | 1 => String::new(),
        _ => format!(" (and {} more tensors)", count - 1),
    }
}

/// Those of `tensors` whose checksum another tensor of their rule and rank has as well.
fn repeated_inside(plan: &Plan, sources: &Sources, tensors: impl Iterator<Item = u32>) -> BTreeSet<u32> {
    let tensors: BTreeSet<u32> = tensors.collect();
    let rules: BTreeSet<u32> = tensors.iter().map(|&t| plan.stored[t as usize].rule).collect();
    // (rule, rank, checksum, bytes) -> positions
    let mut alike: HashMap<(u32, u64, u32, u64), BTreeSet<Layer>> = HashMap::new();
    let key = |s: &StoredTensor| Some((s.rule, s.shard?, crc_of(sources, s)?, s.nbytes()));
    for stored in plan.stored.iter().filter(|s| rules.contains(&s.rule)) {
        if let Some(key) = key(stored) {
            alike.entry(key).or_default().insert(&stored.index);
        }
    }
    let repeated = |s: &StoredTensor| key(s).is_some_and(|k| alike[&k].len() > 1);
    tensors.into_iter().filter(|&t| repeated(&plan.stored[t as usize])).collect()
}

/// Pieces that two roots hold and that differ.
pub(in crate::engine) fn copies(plan: &Plan, sources: &Sources) -> Result<Vec<Finding>> {
    let mut reader = Reader::new(sources)?;
    let mut findings = Vec::new();
    for &(first, copy) in &plan.copies {
        let (a, b) = (&plan.stored[first as usize], &plan.stored[copy as usize]);
        let same = a.dtype == b.dtype && a.shape == b.shape && reader.equal(a, b)?;
        if !same {
            let file = blobs_of_tensor(a)
                .first()
                .map_or_else(String::new, |b| plan.label(plan.blobs[*b as usize].file));
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

/// Layers with the same bytes as another layer, by known checksums, confirmed on bytes.
///
/// If all ranks of a layer are equal, the layer was copied, which can be intended (depth up-scaling) and is a
/// warning. If only some ranks are, a file was copied over another.
pub(in crate::engine) fn repeated_layers(plan: &Plan, sources: &Sources) -> Result<Vec<Finding>> {
    let mut reader = Reader::new(sources)?;
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
