//! Blobs with equal contents, as far as their headers and samples show.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use super::{spread_runs, CHUNK, SAMPLE};
use crate::engine::blocks::{sample_of, CONSTANT};
use crate::engine::gather::Sources;
use crate::engine::values::Values;
use crate::error::Result;
use crate::memory;
use crate::plan::blobs::each_blob;
use crate::plan::Plan;
use crate::standing::{digest_of, mixed, Standing};

/// Number of blobs in a file without checksums whose samples are compared first.
const SAMPLES: usize = 16;

/// The contents of those blobs of a plan from which something is made.
pub(super) struct Contents {
    /// Bytes of an element, per blob; 0 for blobs of which nothing is made.
    items: Vec<u8>,
    /// Whether the elements are floats.
    floats: Vec<bool>,
    /// Which content a blob holds, where another holds it too; 0 for others.
    classes: Vec<u32>,
}

/// Contents without significance: they are equal by chance or by construction.
const EMPTY: u32 = u32::MAX;

impl Contents {
    pub(super) fn of(plan: &Plan, sources: &Sources, standing: &Standing) -> Result<Contents> {
        let mut items = vec![0u8; plan.blobs.len()];
        let mut floats = vec![false; plan.blobs.len()];
        for (_, stored) in plan.stored.iter().enumerate().filter(|(i, _)| standing.is_used(*i as u32)) {
            each_blob(stored, |blob| {
                let about = &plan.blobs[blob as usize];
                items[blob as usize] = if about.len > 0 { stored.dtype.size() as u8 } else { 0 };
                floats[blob as usize] |= !stored.dtype.is_integer();
            });
        }
        let mut found = Contents { items, floats, classes: vec![0; plan.blobs.len()] };
        let mut sums = found.sums(plan, sources)?;
        sums.sort_unstable();
        let mut class = 0;
        for same in sums.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)).filter(|same| same.len() > 1) {
            let mut tells = false;
            // Samples can be equal where not all of it is: one that tells is enough to look.
            for (_, _, blob) in same.iter().filter(|(_, sample, _)| *sample != CONSTANT) {
                tells = found.tells(plan, sources, *blob)?;
                if tells || plan.blobs[*blob as usize].crc32.is_some() {
                    break;
                }
            }
            class += u32::from(tells);
            let class = if tells { class } else { EMPTY };
            same.iter().for_each(|(_, _, blob)| found.classes[*blob as usize] = class);
        }
        Ok(found)
    }

    /// Length, digest and number of each blob whose digest is known or cheap.
    fn sums(&self, plan: &Plan, sources: &Sources) -> Result<Vec<(u64, u64, u32)>> {
        let mut sums = Vec::new();
        // File -> its blobs without a checksum.
        let mut blobs: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (i, blob) in plan.blobs.iter().enumerate().filter(|(i, _)| self.items[*i] > 0) {
            let i = i as u32;
            if blob.encoded {
                // What was not decoded in this run (a result that is continued) is so now.
                let sample = match sources.blocks.sample(i) {
                    Some(sample) => sample,
                    None => sources.decode(i, sample_of)?,
                };
                sums.push((blob.len, sample, i));
            } else if let Some(crc) = blob.crc32 {
                sums.push((blob.len, mixed(1, u64::from(crc)), i));
            } else {
                blobs.entry(blob.file).or_default().push(i);
            }
        }
        // The largest of each file first: of small ones, which ranks hold alike, one rank's alone is used.
        let mut like: BTreeMap<Vec<u64>, Vec<(u32, Vec<u32>)>> = BTreeMap::new();
        for (file, blobs) in &blobs {
            let len = |blob: &u32| plan.blobs[*blob as usize].len;
            let mut largest = blobs.clone();
            largest.sort_by_key(|blob| Reverse(len(blob)));
            largest.truncate(SAMPLES);
            let lens = largest.iter().map(len).collect();
            like.entry(lens).or_default().push((*file, largest));
        }
        // Then all of those that look the same.
        for files in like.into_values().filter(|files| files.len() > 1) {
            let mut looks: HashMap<u64, Vec<u32>> = HashMap::new();
            for (file, largest) in files {
                let mut look = 1;
                for blob in largest {
                    look = mixed(look, sample(plan, sources, blob)?);
                }
                looks.entry(look).or_default().push(file);
            }
            for file in looks.into_values().filter(|files| files.len() > 1).flatten() {
                for &blob in &blobs[&file] {
                    sums.push((plan.blobs[blob as usize].len, sample(plan, sources, blob)?, blob));
                }
            }
        }
        Ok(sums)
    }

    /// The content of a blob that others hold too, if it is significant.
    pub(super) fn class(&self, blob: u32) -> Option<u32> {
        self.shared(blob).filter(|class| *class != EMPTY)
    }

    /// The content of a blob that others hold too; one value for all contents without significance.
    pub(super) fn shared(&self, blob: u32) -> Option<u32> {
        Some(self.classes[blob as usize]).filter(|class| *class > 0)
    }

    /// True if equality of a blob's content has no significance.
    pub(super) fn is_empty(&self, blob: u32) -> bool {
        self.classes[blob as usize] == EMPTY
    }

    /// True if a blob holds floats.
    pub(super) fn is_float(&self, blob: u32) -> bool {
        self.floats[blob as usize]
    }

    /// True if something is made from the blob.
    pub(super) fn is_used(&self, blob: u32) -> bool {
        self.items[blob as usize] > 0
    }

    /// True if no two blobs have equal significant contents.
    pub(super) fn all_differ(&self) -> bool {
        self.classes.iter().all(|class| *class == 0 || *class == EMPTY)
    }

    /// True if a blob has enough different values for equality to mean something.
    pub(super) fn tells(&self, plan: &Plan, sources: &Sources, blob: u32) -> Result<bool> {
        let (about, item) = (&plan.blobs[blob as usize], usize::from(self.items[blob as usize]));
        let mut values = Values::default();
        if about.encoded {
            sources.decode(blob, |bytes| values.add(bytes, item))?;
            return Ok(values.enough());
        }
        let mut buffer = Vec::new();
        for (first, n) in spread_runs(about.len / item as u64, item) {
            let (mut at, end) = (first * item as u64, (first + n) * item as u64);
            while at < end && !values.enough() {
                // Whoever has not told by then is long.
                let most = if buffer.is_empty() { SAMPLE } else { CHUNK };
                memory::resize(&mut buffer, (end - at).min(most as u64) as usize)?;
                sources.read_blob(blob, at, &mut buffer)?;
                values.add(&buffer, item);
                at += buffer.len() as u64;
            }
        }
        Ok(values.enough())
    }
}

/// A digest of the middle of a blob.
fn sample(plan: &Plan, sources: &Sources, blob: u32) -> Result<u64> {
    let len = plan.blobs[blob as usize].len;
    let mut bytes = vec![0; len.min(SAMPLE as u64) as usize];
    sources.read_blob(blob, (len - bytes.len() as u64) / 2, &mut bytes)?;
    Ok(digest_of(&bytes))
}
