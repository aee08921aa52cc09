//! Comparison of shards: duplicated and swapped files show in data that ranks and layers share.

mod contents;
mod copied;
mod duplicates;
mod meant;
mod not_finite;
mod repeated_blocks;
mod repeated_parts;
mod replicas;
mod swapped;

use std::collections::HashMap;

use crate::boxes::SubBox;
use crate::codes;
use crate::error::{Finding, Result, Severity};
use crate::kernel;
use crate::memory;
use crate::plan::blobs::runs_of;
use crate::plan::{PartAxis, Plan, StoredTensor};
use crate::standing::{digest_of, each_use, Standing, Use};
use crate::tensor::{c_strides, element_count};

use contents::Contents;
use meant::Meant;

use super::gather::{Into, Sources};
use super::values::Values;

pub(super) use duplicates::{copies, duplicates, repeated_layers};
pub(super) use not_finite::not_finite;
pub(super) use repeated_parts::repeated_parts;
pub(super) use replicas::odd_ones;
pub(super) use swapped::swapped;

/// Minimum size of a meaningful shard: smaller ones are too often equal by chance or by construction.
const MIN_BYTES: u64 = 32;
/// Runs in which a large tensor is sampled.
const RUNS: u64 = 16;
/// Bytes compared at a time.
pub(super) const CHUNK: usize = 256 << 10;
/// Bytes of a sample.
const SAMPLE: usize = 4 << 10;

/// Merges the findings about complete files with those about their tensors.
pub(super) fn told_once(findings: &mut Vec<Finding>, files: Vec<Finding>) {
    for file in files {
        let same =
            |f: &Finding| f.file == file.file || file.file.as_ref().is_some_and(|one| f.files.contains(one));
        if findings.iter().any(|f| f.code == codes::DUPLICATED_SHARD && same(f)) {
            continue;
        }
        findings.retain(|f| f.code != codes::EQUAL_SHARDS || !same(f));
        findings.push(file);
    }
}

/// Knowledge about contents of a plan that occur twice, once everything is read.
#[derive(Clone, Copy)]
struct Equal<'a, 'p> {
    plan: &'p Plan,
    sources: &'a Sources<'p>,
    standing: &'a Standing,
    contents: &'a Contents,
    /// Blob -> what stands there, of those that hold what others hold.
    uses: &'a HashMap<u32, Vec<Use>>,
    meant: &'a Meant<'a>,
}

/// Complete files and blocks that are copies of others.
pub(super) fn copied<'p>(
    plan: &'p Plan,
    sources: &Sources<'p>,
    standing: &Standing,
) -> Result<(Vec<Finding>, Vec<Finding>)> {
    let contents = Contents::of(plan, sources, standing)?;
    if contents.all_differ() {
        return Ok((Vec::new(), Vec::new()));
    }
    let mut uses: HashMap<u32, Vec<Use>> = HashMap::new();
    for (i, stored) in plan.stored.iter().enumerate().filter(|(i, _)| standing.is_used(*i as u32)) {
        each_use(i as u32, stored, |blob, found| {
            if contents.class(blob).is_some() {
                uses.entry(blob).or_default().push(found);
            }
        });
    }
    let meant = Meant::of(plan, standing, &contents);
    let equal = Equal { plan, sources, standing, contents: &contents, uses: &uses, meant: &meant };
    Ok((copied::copied_files(equal)?, repeated_blocks::repeated_blocks(equal)?))
}

/// Turns the finding about a copy into a warning if the user declares the copy intentional.
pub(super) fn accept(plan: &Plan, finding: &mut Finding) {
    if finding.code != codes::DUPLICATED_SHARD {
        return;
    }
    let files =
        if finding.files.is_empty() { Vec::from_iter(&finding.file) } else { finding.files.iter().collect() };
    // What is no pattern was refused before there was a plan.
    let matches = |p: &String, file: &str| glob::Pattern::new(p).is_ok_and(|pattern| pattern.matches(file));
    let named = |file: &&&String| plan.copies_accepted.iter().any(|p| matches(p, file));
    // Nothing says which of several is the original: any may be, but one only.
    if files.len() > 1 && files.iter().filter(named).count() + 1 < files.len() {
        return;
    }
    let pattern = plan.copies_accepted.iter().find(|p| files.iter().any(|file| matches(p, file)));
    if let Some(pattern) = pattern {
        finding.severity = Severity::Warning;
        finding.help = None;
        finding.run.clear();
        finding.decided = Some(match pattern.as_str() {
            "*" => "accept copies".into(),
            glob => format!("accept copies={glob}"),
        });
    }
}

/// The CRC32 of a tensor's bytes in C order, if it is known from reading.
fn crc_of(sources: &Sources, stored: &StoredTensor) -> Option<u32> {
    let mut whole = crc32fast::Hasher::new();
    for (blob, lo, hi) in runs_of(stored)? {
        let crc = sources.crc(blob, lo, hi)?;
        whole.combine(&crc32fast::Hasher::new_with_initial_len(crc, hi - lo));
    }
    Some(whole.finalize())
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
    let spread = crate::boxes::Spread::new(0, strides.to_vec());
    let n = (buffer.len() / stored.dtype.size()) as u64;
    let mut found = Vec::new();
    spread.cut(&SubBox::whole(&stored.shape), at, at + n, &mut |sub| found.push(sub.clone()));
    for sub in found {
        let mut into = Into { bytes: buffer, base: spread.first(&sub) - at, strides: &strides };
        sources.read(stored, &axes, &vec![0; stored.shape.len()], &sub, &mut into, scratch)?;
    }
    Ok(())
}

/// Runs of elements in C order, each as first and number, of one of `times` equal parts along dimension `d`.
fn runs_of_part(stored: &StoredTensor, d: usize, times: u64, part: u64) -> impl Iterator<Item = (u64, u64)> {
    let n = stored.shape[d];
    let inner: u64 = stored.shape[d + 1..].iter().product();
    let outer: u64 = stored.shape[..d].iter().product();
    let run = n / times * inner;
    (0..outer).map(move |o| (o * n * inner + part * run, run))
}

/// Runs of elements, each as first and number, for the search of values: in a large tensor they are spread
/// evenly, and include its first and last elements.
fn spread_runs(total: u64, item: usize) -> impl Iterator<Item = (u64, u64)> {
    let each = (CHUNK / item) as u64;
    let (runs, each) = if total <= RUNS * each { (1, total) } else { (RUNS, each) };
    (0..runs).map(move |run| ((total - each) / (runs - 1).max(1) * run, each))
}

struct Reader<'a, 'p> {
    sources: &'a Sources<'p>,
    scratch: Vec<u8>,
    a: Vec<u8>,
    b: Vec<u8>,
}

impl<'a, 'p> Reader<'a, 'p> {
    fn new(sources: &'a Sources<'p>) -> Result<Self> {
        let [scratch, a, b] = [(); 3].map(|()| memory::allocate(CHUNK));
        Ok(Reader { sources, scratch: scratch?, a: a?, b: b? })
    }

    fn chunks(stored: &StoredTensor) -> impl Iterator<Item = (u64, usize)> {
        let item = stored.dtype.size();
        let per = (CHUNK / item) as u64;
        let total = element_count(&stored.shape).unwrap_or(0);
        (0..total.div_ceil(per)).map(move |i| (i * per, ((total - i * per).min(per)) as usize * item))
    }

    /// A number of bytes of a tensor's elements from `at` on, in C order, within one of its
    /// [`Reader::chunks`].
    fn read(&mut self, stored: &StoredTensor, at: u64, bytes: usize) -> Result<&[u8]> {
        read_range(self.sources, stored, at, &mut self.a[..bytes], &mut self.scratch)?;
        Ok(&self.a[..bytes])
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

    /// BLAKE3 of a tensor's elements, in C order.
    fn hash(&mut self, stored: &StoredTensor) -> Result<[u8; 32]> {
        self.sources.begin_comparison()?;
        let mut hasher = blake3::Hasher::new();
        for (at, bytes) in Self::chunks(stored) {
            hasher.update(self.read(stored, at, bytes)?);
        }
        Ok(*hasher.finalize().as_bytes())
    }

    /// A digest of the middle of a tensor; none if that is constant.
    fn sample(&mut self, stored: &StoredTensor) -> Result<Option<u64>> {
        let item = stored.dtype.size();
        let total = element_count(&stored.shape).unwrap_or(0);
        let n = total.min((SAMPLE / item) as u64);
        let bytes = self.read(stored, (total - n) / 2, n as usize * item)?;
        Ok((!kernel::is_constant(bytes, item)).then(|| digest_of(bytes)))
    }

    /// True if a tensor has too few different values for equality to mean something.
    fn says_nothing(&mut self, stored: &StoredTensor) -> Result<bool> {
        let mut values = Values::default();
        for (first, n) in spread_runs(element_count(&stored.shape).unwrap_or(0), stored.dtype.size()) {
            self.add_values(stored, first, n, &mut values)?;
        }
        Ok(!values.enough())
    }

    /// Records the values of `n` elements from `first` on, in C order, until there are enough.
    fn add_values(&mut self, stored: &StoredTensor, first: u64, n: u64, values: &mut Values) -> Result<()> {
        let item = stored.dtype.size();
        let per = (CHUNK / item) as u64;
        for at in (0..n).step_by(per as usize) {
            if values.enough() {
                break;
            }
            let bytes = ((n - at).min(per)) as usize * item;
            read_range(self.sources, stored, first + at, &mut self.a[..bytes], &mut self.scratch)?;
            values.add(&self.a[..bytes], item);
        }
        Ok(())
    }

    /// True if a tensor repeats itself along one of its dimensions.
    fn repeats(&mut self, stored: &StoredTensor) -> Result<bool> {
        (0..stored.shape.len()).try_fold(false, |found, d| Ok(found || self.repeats_along(stored, d)?))
    }

    /// True if a tensor repeats itself along a dimension.
    fn repeats_along(&mut self, stored: &StoredTensor, d: usize) -> Result<bool> {
        let n = stored.shape[d];
        for times in [2, 3, 5, 7].into_iter().filter(|times| n > 0 && n.is_multiple_of(*times)) {
            let mut others = 1..times;
            if others
                .try_fold(true, |all, t| Result::Ok(all && self.same_parts(stored, d, times, (0, t))?))?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// True if two of `times` equal parts along a dimension are the same.
    fn same_parts(
        &mut self,
        stored: &StoredTensor,
        d: usize,
        times: u64,
        (a, b): (u64, u64),
    ) -> Result<bool> {
        for (one, other) in runs_of_part(stored, d, times, a).zip(runs_of_part(stored, d, times, b)) {
            if !self.same_run(stored, one.0, other.0, one.1)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// True if `n` elements from `a` on are those from `b` on, in C order.
    fn same_run(&mut self, stored: &StoredTensor, a: u64, b: u64, n: u64) -> Result<bool> {
        let item = stored.dtype.size();
        let per = (CHUNK / item) as u64;
        for at in (0..n).step_by(per as usize) {
            let bytes = ((n - at).min(per)) as usize * item;
            read_range(self.sources, stored, a + at, &mut self.a[..bytes], &mut self.scratch)?;
            read_range(self.sources, stored, b + at, &mut self.b[..bytes], &mut self.scratch)?;
            if self.a[..bytes] != self.b[..bytes] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The values of a tensor; for a larger one, `most` of them in evenly spread runs.
    fn floats(&mut self, stored: &StoredTensor, most: u64) -> Result<Vec<f32>> {
        let item = stored.dtype.size();
        let total = element_count(&stored.shape).unwrap_or(0);
        let (runs, each) = if total <= most { (1, total) } else { (RUNS, (most / RUNS).max(1)) };
        let mut all = memory::allocate_values((runs * each) as usize)?;
        let mut first = 0;
        for run in 0..runs {
            let (mut at, end) = (total / runs * run, total / runs * run + each);
            while at < end {
                let n = ((CHUNK / item) as u64).min(end - at);
                let bytes = &mut self.a[..n as usize * item];
                read_range(self.sources, stored, at, bytes, &mut self.scratch)?;
                kernel::to_f32(stored.dtype, bytes, &mut all[first..][..n as usize]);
                first += n as usize;
                at += n;
            }
        }
        Ok(all)
    }
}
