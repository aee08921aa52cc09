//! Files that are copies of other files: all that one holds is what another holds, which stands for something else.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::values::Values;
use super::{Reader, CHUNK};
use crate::codes;
use crate::engine::gather::Sources;
use crate::engine::place;
use crate::error::{Finding, Result};
use crate::plan::Plan;
use crate::standing::{digest_of, each_blob, each_use, may_be_tied, mixed, renamed, Standing, Use};

/// Runs of a file without checksums that are looked at before all of it is, and bytes of each.
const SAMPLES: usize = 16;
const SAMPLE: u64 = 4096;

/// Files whose floating contents are all another's, of which something else is made.
///
/// Digests of what their headers tell, and of samples, find suspects; bytes decide.
pub(in crate::engine) fn copied_files(plan: &Plan, sources: &Sources) -> Result<Vec<Finding>> {
    let Some(standing) = Standing::of(plan) else { return Ok(Vec::new()) };
    let floats = floats(plan);
    let groups = suspects(plan, sources, &floats)?;
    if groups.is_empty() {
        return Ok(Vec::new());
    }
    let contents = Contents::of(plan, &standing, &floats, &groups);
    let mut search = Search { plan, sources, contents, a: vec![0; CHUNK], b: vec![0; CHUNK] };
    let mut found = Vec::new();
    for group in &groups {
        let mut leaders: Vec<u32> = Vec::new();
        'files: for &file in group {
            for &leader in &leaders {
                if let Some(copy) = search.copy(leader, file)? {
                    found.push(copy);
                    continue 'files;
                }
            }
            leaders.push(file);
        }
    }
    let meant = meant(plan, &floats, &found);
    Ok(found.iter().map(|copy| finding(plan, copy, meant.contains(&copy.file))).collect())
}

/// Bytes of an element, per blob that holds floating tensors as they are; 0 for others.
fn floats(plan: &Plan) -> Vec<u8> {
    let mut items = vec![0u8; plan.blobs.len()];
    for stored in plan.stored.iter().filter(|s| s.dtype.is_float()) {
        each_blob(stored, |blob| {
            let about = &plan.blobs[blob as usize];
            if !about.encoded && about.len > 0 {
                items[blob as usize] = stored.dtype.size() as u8;
            }
        });
    }
    items
}

/// Groups of files that look the same.
fn suspects(plan: &Plan, sources: &Sources, floats: &[u8]) -> Result<Vec<Vec<u32>>> {
    let mut digests = vec![(0u64, false); plan.sources.len()];
    for (blob, _) in plan.blobs.iter().zip(floats).filter(|(_, item)| **item > 0) {
        let (digest, unknown) = &mut digests[blob.file as usize];
        *digest = mixed(mixed(*digest, blob.len), u64::from(blob.crc32.unwrap_or(0)));
        *unknown |= blob.crc32.is_none();
    }
    let groups = grouped(digests.iter().map(|(digest, _)| *digest));
    let sampled: HashSet<u32> =
        groups.iter().flatten().copied().filter(|&file| digests[file as usize].1).collect();
    if sampled.is_empty() {
        return Ok(groups);
    }
    for (file, blobs) in blobs_of(plan, floats, &sampled) {
        let step = blobs.len().div_ceil(SAMPLES).max(1);
        for &blob in blobs.iter().step_by(step) {
            let len = plan.blobs[blob as usize].len;
            let mut bytes = vec![0; len.min(SAMPLE) as usize];
            sources.read_blob(blob, (len - bytes.len() as u64) / 2, &mut bytes)?;
            let digest = &mut digests[file as usize].0;
            *digest = mixed(*digest, digest_of(&bytes));
        }
    }
    Ok(grouped(digests.into_iter().map(|(digest, _)| digest)))
}

/// Files with equal digests, two or more; 0 is none.
fn grouped(digests: impl Iterator<Item = u64>) -> Vec<Vec<u32>> {
    let mut groups: HashMap<u64, Vec<u32>> = HashMap::new();
    for (file, digest) in digests.enumerate().filter(|(_, digest)| *digest != 0) {
        groups.entry(digest).or_default().push(file as u32);
    }
    let mut groups: Vec<Vec<u32>> = groups.into_values().filter(|files| files.len() > 1).collect();
    groups.sort_unstable();
    groups
}

/// The blobs with floats of each of `files`.
fn blobs_of(plan: &Plan, floats: &[u8], files: &HashSet<u32>) -> BTreeMap<u32, Vec<u32>> {
    let mut blobs: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (i, blob) in plan.blobs.iter().enumerate().filter(|(i, _)| floats[*i] > 0) {
        if files.contains(&blob.file) {
            blobs.entry(blob.file).or_default().push(i as u32);
        }
    }
    blobs
}

/// What suspects hold.
struct Contents<'a> {
    standing: &'a Standing,
    /// Bytes of an element, per blob.
    floats: &'a [u8],
    /// File -> blobs.
    blobs: BTreeMap<u32, Vec<u32>>,
    /// Blob -> what stands there, of what is used.
    uses: HashMap<u32, Vec<Use>>,
}

impl<'a> Contents<'a> {
    fn of(plan: &Plan, standing: &'a Standing, floats: &'a [u8], groups: &[Vec<u32>]) -> Self {
        let files: HashSet<u32> = groups.iter().flatten().copied().collect();
        let mut uses: HashMap<u32, Vec<Use>> = HashMap::new();
        for (i, stored) in plan.stored.iter().enumerate() {
            if standing.is_used(i as u32) && stored.dtype.is_float() {
                each_use(i as u32, stored, |blob, found| {
                    if files.contains(&plan.blobs[blob as usize].file) {
                        uses.entry(blob).or_default().push(found);
                    }
                });
            }
        }
        Contents { standing, floats, blobs: blobs_of(plan, floats, &files), uses }
    }

    /// What stands in two blobs at one place, and is not one thing.
    fn differing(&self, a: u32, b: u32) -> Option<(&Use, &Use)> {
        let (Some(a), Some(b)) = (self.uses.get(&a), self.uses.get(&b)) else { return None };
        b.iter().find_map(|other| {
            let same_place = a.iter().filter(|u| u.offset == other.offset);
            let mut own = same_place.peekable();
            let first = *own.peek()?;
            own.all(|u| !self.standing.same(u, other)).then_some((first, other))
        })
    }
}

/// A file that is a copy.
struct Copy {
    original: u32,
    file: u32,
    /// Stored tensors of the two: what was made of which.
    tensors: Vec<(u32, u32)>,
    /// True if names say that it can be meant.
    named: bool,
}

struct Search<'a, 'p> {
    plan: &'p Plan,
    sources: &'a Sources<'p>,
    contents: Contents<'a>,
    a: Vec<u8>,
    b: Vec<u8>,
}

impl Search<'_, '_> {
    /// Whether `file` holds what `original` holds, and should not.
    fn copy(&mut self, original: u32, file: u32) -> Result<Option<Copy>> {
        let pairs: Vec<(u32, u32)> = self.pairs(original, file);
        let mut differing = Vec::new();
        for &(a, b) in &pairs {
            if let Some((own, other)) = self.contents.differing(a, b) {
                differing.push((b, (own.stored, other.stored)));
            }
        }
        self.leave_out_repeated(&mut differing)?;
        if differing.is_empty() {
            return Ok(None);
        }
        for &(a, b) in &pairs {
            if !self.equal(a, b)? {
                return Ok(None);
            }
        }
        if !self.tells(differing.iter().map(|(blob, _)| *blob))? {
            return Ok(None);
        }
        let tensors: Vec<(u32, u32)> = differing.into_iter().map(|(_, stored)| stored).collect();
        let named = self.meant_by_name(&tensors)?;
        Ok(Some(Copy { original, file, tensors, named }))
    }

    /// True if all tensors are those of another copy of the model (an average of the weights, at its beginning),
    /// or one is the head that is tied to the embedding.
    fn meant_by_name(&self, tensors: &[(u32, u32)]) -> Result<bool> {
        let stored = |i: u32| &self.plan.stored[i as usize];
        if let [(a, b)] = *tensors {
            if a == b {
                return Ok(false);
            }
            let (a, b) = (stored(a), stored(b));
            let same_size = a.shape == b.shape && a.dtype == b.dtype;
            return Ok(same_size
                && may_be_tied(&a.name, &b.name)
                && Reader::new(self.sources).equal(a, b)?);
        }
        let mut words = tensors.iter().map(|&(a, b)| {
            let (_, from, to) = renamed(&stored(a).name, &stored(b).name)?;
            let word = |part: &str| !part.contains(char::is_numeric);
            (word(from) && word(to)).then_some((from, to))
        });
        let first = words.next().flatten();
        Ok(first.is_some() && words.all(|pair| pair == first))
    }

    fn pairs(&self, a: u32, b: u32) -> Vec<(u32, u32)> {
        let blobs = |file: u32| self.contents.blobs.get(&file).map_or(&[][..], |blobs| blobs);
        let (a, b) = (blobs(a), blobs(b));
        if a.len() != b.len() {
            return Vec::new();
        }
        a.iter().copied().zip(b.iter().copied()).collect()
    }

    /// Drops what the file holds several times: experts that were made of one tell nothing of files.
    fn leave_out_repeated(&self, differing: &mut Vec<(u32, (u32, u32))>) -> Result<()> {
        if differing.len() < 2 {
            return Ok(());
        }
        let mut times: HashMap<(u64, u64), u64> = HashMap::new();
        let mut keys = Vec::with_capacity(differing.len());
        for (blob, _) in differing.iter() {
            let about = &self.plan.blobs[*blob as usize];
            let sum = match about.crc32 {
                Some(crc) => u64::from(crc),
                None => {
                    let mut bytes = vec![0; about.len.min(SAMPLE) as usize];
                    self.sources.read_blob(*blob, (about.len - bytes.len() as u64) / 2, &mut bytes)?;
                    digest_of(&bytes)
                }
            };
            *times.entry((about.len, sum)).or_default() += 1;
            keys.push((about.len, sum));
        }
        let mut keys = keys.into_iter();
        differing.retain(|_| keys.next().is_some_and(|key| times[&key] == 1));
        Ok(())
    }

    fn equal(&mut self, a: u32, b: u32) -> Result<bool> {
        let len = self.plan.blobs[a as usize].len;
        if len != self.plan.blobs[b as usize].len {
            return Ok(false);
        }
        for at in (0..len).step_by(CHUNK) {
            let n = (len - at).min(CHUNK as u64) as usize;
            self.sources.read_blob(a, at, &mut self.a[..n])?;
            self.sources.read_blob(b, at, &mut self.b[..n])?;
            if self.a[..n] != self.b[..n] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// True if there are enough different values for equality to say something.
    fn tells(&mut self, blobs: impl Iterator<Item = u32>) -> Result<bool> {
        let mut values = Values::default();
        for blob in blobs {
            let (len, item) =
                (self.plan.blobs[blob as usize].len, usize::from(self.contents.floats[blob as usize]));
            for at in (0..len).step_by(CHUNK) {
                let n = (len - at).min(CHUNK as u64) as usize;
                self.sources.read_blob(blob, at, &mut self.a[..n])?;
                values.add(&self.a[..n], item);
                if values.enough() {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}

/// Copies that are the same over all files of their kind: layers or experts that were all doubled, which no
/// accident does. Parts of one tensor are never meant to be equal.
fn meant(plan: &Plan, floats: &[u8], found: &[Copy]) -> HashSet<u32> {
    let mut kinds: HashMap<u64, Vec<u32>> = HashMap::new();
    let mut lens = vec![0u64; plan.sources.len()];
    for (blob, _) in plan.blobs.iter().zip(floats).filter(|(_, item)| **item > 0) {
        let digest = &mut lens[blob.file as usize];
        *digest = mixed(*digest, blob.len);
    }
    for (file, digest) in lens.iter().enumerate().filter(|(_, digest)| **digest != 0) {
        kinds.entry(*digest).or_default().push(file as u32);
    }
    let by_name = |&(a, b): &(u32, u32)| {
        let (a, b) = (&plan.stored[a as usize], &plan.stored[b as usize]);
        a.rule == b.rule && a.shard == b.shard && a.index != b.index
    };
    let mut meant = HashSet::new();
    for files in kinds.values().filter(|files| files.len() > 2) {
        let copies: Vec<&Copy> = found.iter().filter(|copy| files.contains(&copy.file)).collect();
        // Original -> how many files are the same.
        let mut classes: HashMap<u32, usize> = HashMap::new();
        copies.iter().for_each(|copy| *classes.entry(copy.original).or_insert(1) += 1);
        let covered: usize = classes.values().sum();
        let even = classes.values().collect::<HashSet<_>>().len() == 1;
        if covered == files.len() && even && copies.iter().all(|copy| copy.tensors.iter().all(by_name)) {
            meant.extend(copies.iter().map(|copy| copy.file));
        }
    }
    meant
}

fn finding(plan: &Plan, copy: &Copy, meant: bool) -> Finding {
    let (original, own) = copy.tensors[0];
    let of = &plan.stored[original as usize];
    let whose = match &of.rank {
        Some(rank) if *rank != plan.stored[own as usize].rank.clone().unwrap_or_default() => {
            format!(", {rank}'s")
        }
        _ => String::new(),
    };
    let n = copy.tensors.len();
    let more = if n > 1 { format!(" (and {} more tensors)", n - 1) } else { String::new() };
    let innocent = meant || copy.named || plan.layers_may_repeat;
    let finding = Finding::new(
        if innocent { codes::EQUAL_SHARDS } else { codes::DUPLICATED_SHARD },
        format!(
            "all that the file holds is the same bytes as {} in {}{whose}{more}",
            of.name,
            plan.label(copy.original)
        ),
    )
    .expected("contents of its own", "a copy")
    .help("copy the right file from the node that wrote it; --accept copies if it was copied on purpose");
    let mut finding = place(plan, own, finding);
    finding.file = Some(plan.label(copy.file));
    finding
}
