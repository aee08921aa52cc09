//! Files that are copies of other files: all data taken from one is also in another, where it stands for
//! something else.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::meant::Verdict;
use super::{Equal, Reader, CHUNK};
use crate::codes;
use crate::engine::place;
use crate::error::{Finding, Result};
use crate::memory;
use crate::plan::{Pieces, Plan, StoredTensor};
use crate::standing::{mixed, Use};
use crate::tensor::c_strides;

/// Number of tensors with one content that are examined for the reason of the equality.
const MOST_PARTNERS: usize = 64;

/// A file that is a copy.
struct Copy {
    original: u32,
    file: u32,
    /// What stands there, in the original and here: those that must be something else, or all.
    tensors: Vec<(u32, u32)>,
    verdict: Verdict,
}

/// Files whose used data is all in another file as well, where it must be something else.
///
/// Digests of headers, and samples, find suspects; bytes decide.
pub(super) fn copied_files(equal: Equal) -> Result<Vec<Finding>> {
    let Equal { plan, standing, contents, uses, .. } = equal;
    let mut blobs: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let mut holders: HashMap<u32, Vec<u32>> = HashMap::new();
    let in_files = |i: &u32| !plan.blobs[*i as usize].encoded && contents.is_used(*i);
    for i in (0..plan.blobs.len() as u32).filter(in_files) {
        blobs.entry(plan.blobs[i as usize].file).or_default().push(i);
        if let Some(class) = contents.class(i) {
            holders.entry(class).or_default().push(i);
        }
    }
    let mut stands: HashMap<u32, u64> = HashMap::new();
    for (&file, inside) in &blobs {
        let all = inside.iter().filter_map(|blob| uses.get(blob)).flatten();
        let digest = all.fold(1, |digest, one| {
            let at = one.at.iter().fold(standing.digest(one.stored), |digest, n| mixed(digest, *n));
            mixed(mixed(digest, at), one.offset)
        });
        stands.insert(file, digest);
    }
    let search = Search { equal, blobs, holders, stands, hashes: RefCell::default() };
    let mut elsewhere = HashSet::new();
    for &file in search.blobs.keys() {
        let shares = search.blobs[&file].iter().any(|blob| contents.class(*blob).is_some());
        if shares && search.is_lent(file)? {
            elsewhere.insert(file);
        }
    }
    let mut found: Vec<Copy> = Vec::new();
    let mut copies = HashSet::new();
    let mut in_order: Vec<u32> = elsewhere.iter().copied().collect();
    in_order.sort_unstable();
    for file in in_order {
        if let Some(copy) = search.copy(file, &copies, &elsewhere)? {
            if copy.verdict == Verdict::Copied {
                copies.insert(file);
            }
            found.push(copy);
        }
    }
    search.double(&mut found);
    Ok(found
        .iter()
        .filter(|copy| copy.verdict != Verdict::Innocent)
        .map(|copy| finding(plan, copy))
        .collect())
}

struct Search<'a, 'p> {
    equal: Equal<'a, 'p>,
    /// File -> its blobs that something is made of.
    blobs: BTreeMap<u32, Vec<u32>>,
    /// Content -> blobs that hold it.
    holders: HashMap<u32, Vec<u32>>,
    /// File -> digest of what stands in it: replicas have the same.
    stands: HashMap<u32, u64>,
    /// Blob -> its hash, as far as it was asked for.
    hashes: RefCell<HashMap<u32, [u8; 32]>>,
}

impl Search<'_, '_> {
    fn file(&self, blob: u32) -> u32 {
        self.equal.plan.blobs[blob as usize].file
    }

    /// The contents at one place of two blobs, if they differ.
    fn differing(&self, a: u32, b: u32) -> Option<(&Use, &Use)> {
        let (a, b) = (self.equal.uses.get(&a)?, self.equal.uses.get(&b)?);
        b.iter().find_map(|other| {
            if a.iter().any(|own| self.equal.standing.same(own, other)) {
                return None;
            }
            Some((a.iter().find(|own| own.offset == other.offset)?, other))
        })
    }

    /// True if data is taken from the same place of two equal blobs. Files of layers can each hold the one
    /// storage of all layers, of which each takes its own part.
    fn alike(&self, a: u32, b: u32) -> bool {
        let (Some(a), Some(b)) = (self.equal.uses.get(&a), self.equal.uses.get(&b)) else { return false };
        b.iter().any(|other| a.iter().any(|own| own.offset == other.offset))
    }

    /// True if all significant data of a file is somewhere else too. Other files are not copies, and are not
    /// examined further. A file's own integers (a generator's state) do not count if they are few compared
    /// with floats that are somewhere else.
    fn is_lent(&self, file: u32) -> Result<bool> {
        let (mut floats, mut own) = (0, 0);
        for &blob in &self.blobs[&file] {
            let len = self.equal.plan.blobs[blob as usize].len;
            let is_float = self.equal.contents.is_float(blob);
            if self.equal.contents.class(blob).is_some() {
                floats += if is_float { len } else { 0 };
            }
            let alone = self.equal.contents.shared(blob).is_none();
            if alone && self.equal.contents.tells(self.equal.plan, self.equal.sources, blob)? {
                if is_float {
                    return Ok(false);
                }
                own += len;
            }
        }
        Ok(own * 2 <= floats)
    }

    /// The file of which this one is a copy, if it is one. `copies` are the known copies, `elsewhere` the
    /// possible ones.
    fn copy(&self, file: u32, copies: &HashSet<u32>, elsewhere: &HashSet<u32>) -> Result<Option<Copy>> {
        let holders =
            self.blobs[&file].iter().filter_map(|b| self.holders.get(&self.equal.contents.class(*b)?));
        // An original holds all of it: the content that the fewest hold too.
        let Some(fewest) = holders.min_by_key(|blobs| blobs.len()) else { return Ok(None) };
        let originals: BTreeSet<u32> = fewest.iter().map(|blob| self.file(*blob)).collect();
        let mut found: Option<Copy> = None;
        for original in originals {
            self.equal.sources.check_running()?;
            let same = original == file || self.stands[&original] == self.stands[&file];
            let copied = copies.contains(&original);
            if same || copied || !self.within(file, original) {
                continue;
            }
            // Of two that are the same the later one is named.
            if original > file && elsewhere.contains(&original) && self.within(original, file) {
                continue;
            }
            // Of several the kindest: what is the same for a reason is so with one of them.
            let kinder = |copy: &Copy| found.as_ref().is_none_or(|known| copy.verdict > known.verdict);
            found = self.judge(original, file)?.filter(kinder).or(found);
            if found.as_ref().is_some_and(|copy| copy.verdict > Verdict::Copied) {
                break;
            }
        }
        Ok(found)
    }

    /// True if all significant data of a file that is somewhere else is in one other file.
    fn within(&self, file: u32, other: u32) -> bool {
        let mut by_class: HashMap<u32, Vec<u32>> = HashMap::new();
        for &blob in &self.blobs[&other] {
            self.equal
                .contents
                .class(blob)
                .into_iter()
                .for_each(|class| by_class.entry(class).or_default().push(blob));
        }
        self.blobs[&file].iter().filter_map(|blob| Some((blob, self.equal.contents.class(*blob)?))).all(
            |(blob, class)| {
                by_class.get(&class).is_some_and(|theirs| theirs.iter().any(|&a| self.alike(a, *blob)))
            },
        )
    }

    fn judge(&self, original: u32, file: u32) -> Result<Option<Copy>> {
        let own: Vec<u32> =
            self.blobs[&file].iter().copied().filter(|b| self.equal.contents.class(*b).is_some()).collect();
        let mut at: HashMap<u32, Vec<u32>> = HashMap::new();
        for &blob in &self.blobs[&original] {
            if let Some(class) = self.equal.contents.class(blob) {
                at.entry(class).or_default().push(blob);
            }
        }
        let mut verdicts: BTreeMap<Verdict, Vec<(u32, u32)>> = BTreeMap::new();
        for &b in &own {
            let like = &at[&self.equal.contents.class(b).unwrap_or_default()];
            // Of very many that are the same, some are asked: those around the place of this one.
            let near = like.partition_point(|a| *a < b).saturating_sub(MOST_PARTNERS / 2);
            let partners: Vec<u32> = like[near.min(like.len().saturating_sub(MOST_PARTNERS))..]
                .iter()
                .take(MOST_PARTNERS)
                .copied()
                .filter(|&a| self.alike(a, b))
                .collect();
            if partners.iter().any(|&a| self.differing(a, b).is_none()) {
                continue; // Both hold it, as they should.
            }
            let pairs = partners.iter().filter_map(|&a| {
                let (x, y) = self.differing(a, b)?;
                Some((self.equal.meant.verdict(x, y, own.len() == 1), a, (x.stored, y.stored)))
            });
            let Some((mut verdict, a, pair)) = pairs.max_by_key(|(verdict, ..)| *verdict) else {
                continue;
            };
            if verdict == Verdict::Copied && self.holds_one_expert(b, pair)? {
                verdict = Verdict::Meant;
            }
            if !self.same_bytes(a, b)? {
                return Ok(None);
            }
            verdicts.entry(verdict).or_default().push(pair);
        }
        let worst = verdicts.into_iter().next();
        Ok(worst.map(|(verdict, tensors)| Copy { original, file, tensors, verdict }))
    }

    /// True if a part of an array of experts has several equal ones, like another part: they were made from
    /// one expert.
    fn holds_one_expert(&self, blob: u32, (original, own): (u32, u32)) -> Result<bool> {
        let plan = self.equal.plan;
        let (stored, name) = (&plan.stored[own as usize], &plan.stored[original as usize].name);
        if !plan.words.is_of_experts(&stored.name) || stored.name != *name {
            return Ok(false);
        }
        let mut reader = Reader::new(self.equal.sources)?;
        if original != own {
            return reader.repeats(stored);
        }
        let Pieces::Boxes(pieces) = &stored.pieces else { return Ok(false) };
        let Some(piece) = pieces.iter().find(|piece| piece.blob == blob) else { return Ok(false) };
        let shape = piece.len.clone();
        // Along the dimension of the experts it has fewer than there are, and more than one.
        let divided = |d: &usize| shape[*d] < stored.shape[*d] && shape[*d] > 1;
        let Some(along) = (0..shape.len()).find(divided) else { return Ok(false) };
        let pieces = Pieces::View { blob, offset: piece.offset, strides: c_strides(&shape) };
        reader.repeats_along(&StoredTensor { pieces, shape, ..stored.clone() }, along)
    }

    /// True if two blobs hold the same bytes.
    fn same_bytes(&self, a: u32, b: u32) -> Result<bool> {
        Ok(self.hash(a)? == self.hash(b)?)
    }

    /// BLAKE3 of a blob, which is read once for all comparisons.
    fn hash(&self, blob: u32) -> Result<[u8; 32]> {
        if let Some(hash) = self.hashes.borrow().get(&blob) {
            return Ok(*hash);
        }
        self.equal.sources.begin_comparison()?;
        let len = self.equal.plan.blobs[blob as usize].len;
        let mut hasher = blake3::Hasher::new();
        let mut bytes = memory::allocate(len.min(CHUNK as u64) as usize)?;
        for at in (0..len).step_by(CHUNK) {
            let part = &mut bytes[..(len - at).min(CHUNK as u64) as usize];
            self.equal.sources.read_blob(blob, at, part)?;
            hasher.update(part);
        }
        let hash = *hasher.finalize().as_bytes();
        self.hashes.borrow_mut().insert(blob, hash);
        Ok(hash)
    }

    /// Marks copies as intended if all layers were doubled, which no accident does: several of a kind exist,
    /// each equally often. Parts of one tensor are never equal on purpose.
    fn double(&self, found: &mut [Copy]) {
        let mut kinds: HashMap<u64, HashSet<u32>> = HashMap::new();
        for (&file, blobs) in &self.blobs {
            let kind = blobs.iter().fold(1, |kind, b| mixed(kind, self.equal.plan.blobs[*b as usize].len));
            kinds.entry(kind).or_default().insert(file);
        }
        let by_name = |&(a, b): &(u32, u32)| {
            let (a, b) = (&self.equal.plan.stored[a as usize], &self.equal.plan.stored[b as usize]);
            a.rule == b.rule && a.shard == b.shard && a.index != b.index
        };
        for files in kinds.values().filter(|files| files.len() > 3) {
            let mut classes: HashMap<u32, usize> = HashMap::new();
            let copies = found.iter().filter(|copy| files.contains(&copy.file));
            let mut named = true;
            for copy in copies {
                *classes.entry(copy.original).or_insert(1) += 1;
                named &= copy.tensors.iter().all(by_name);
            }
            let even = classes.values().collect::<HashSet<_>>().len() == 1;
            if named && even && classes.len() > 1 && classes.values().sum::<usize>() == files.len() {
                let those = found.iter_mut().filter(|copy| files.contains(&copy.file));
                those.for_each(|copy| copy.verdict = copy.verdict.max(Verdict::Meant));
            }
        }
    }
}

fn finding(plan: &Plan, copy: &Copy) -> Finding {
    let (original, own) = copy.tensors[0];
    let (of, stored) = (&plan.stored[original as usize], &plan.stored[own as usize]);
    let whose = match &of.rank {
        Some(rank) if stored.rank.as_ref() != Some(rank) => format!(", {rank}'s"),
        _ => String::new(),
    };
    let more = match copy.tensors.len() {
        1 => String::new(),
        n => format!(" (and {} more tensors)", n - 1),
    };
    let meant = copy.verdict == Verdict::Meant || plan.layers_may_repeat;
    let finding = Finding::new(
        if meant { codes::EQUAL_SHARDS } else { codes::DUPLICATED_SHARD },
        format!(
            "all data that is read from this file is a copy of data in {}: {}{whose}{more}",
            plan.label(copy.original),
            of.name
        ),
    )
    .count(copy.tensors.len() as u64)
    .expected("other contents", "a copy")
    .help("copy the file again from the node that wrote it; if it was copied on purpose, accept it")
    .run("--accept copies");
    let mut finding = place(plan, own, finding);
    finding.file = Some(plan.label(copy.file));
    finding
}
