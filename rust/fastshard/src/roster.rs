//! Rosters: the tensors that a model must hold, with what is known of shape and dtype, compared with those that there are.
//! Where it comes from (another checkpoint, a model's config) a roster does not know.

use std::collections::BTreeMap;

use crate::codes;
use crate::error::{Error, Finding};
use crate::tensor::Dtype;

/// A tensor that a model holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its own name.
    pub name: String,
    /// Its extents, as far as they are known; `None` if not even their number is known.
    pub shape: Option<Vec<Option<u64>>>,
    /// Its dtype, if it is known.
    pub dtype: Option<Dtype>,
    /// True if a model may lack it.
    pub optional: bool,
}

impl Entry {
    /// True if a tensor of this shape may be this entry, as far as the shape is known.
    pub fn fits(&self, shape: &[u64]) -> bool {
        self.shape.as_ref().is_none_or(|known| {
            known.len() == shape.len()
                && known.iter().zip(shape).all(|(known, &got)| known.is_none_or(|n| n == got))
        })
    }
}

/// The tensors that a model must hold.
#[derive(Debug, Clone, Default)]
pub struct Roster {
    entries: Vec<Entry>,
    /// Groups of tied tensors, by places in `entries`; one tensor of each group is enough.
    any_of: Vec<Vec<usize>>,
}

/// A tensor that exists.
#[derive(Debug, Clone, Copy)]
pub struct PresentTensor<'a> {
    /// The name under which it is stored.
    pub stored: &'a str,
    /// The model's own name of it.
    pub own: &'a str,
    /// Shape of the full tensor.
    pub shape: &'a [u64],
    /// Its dtype.
    pub dtype: Dtype,
}

/// The differences, in the order of the names.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Comparison<'a> {
    /// Entries without a tensor.
    pub missing: Vec<&'a Entry>,
    /// Tensors of another shape: the name stored, the shape, and the entry.
    pub differing: Vec<(&'a str, &'a [u64], &'a Entry)>,
    /// Tensors of another dtype: the name stored, the dtype, and the one expected.
    pub dtypes: Vec<(&'a str, Dtype, Dtype)>,
    /// Stored names of tensors that the roster lacks.
    pub further: Vec<&'a str>,
    /// The number of tensors with the expected shape and dtype.
    pub same: usize,
    /// The number of tensors for each pair of dtypes: the existing and the expected one.
    pub kinds: BTreeMap<(Dtype, Dtype), usize>,
}

impl Roster {
    /// A roster of these entries, in any order.
    ///
    /// # Errors
    /// `FS515` for a name that occurs twice, and for a group with an unknown name.
    pub fn new(mut entries: Vec<Entry>, any_of: &[Vec<String>]) -> Result<Roster, Error> {
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(pair) = entries.windows(2).find(|pair| pair[0].name == pair[1].name) {
            let finding = Finding::new(codes::USAGE, "a roster names a tensor twice");
            return Err(finding.tensor(&pair[0].name).into());
        }
        let place = |name: &String| {
            entries.binary_search_by(|entry| entry.name.cmp(name)).map_err(|_| {
                let finding =
                    Finding::new(codes::USAGE, "a group of a roster names a tensor that it has not");
                Error::from(finding.tensor(name))
            })
        };
        let groups = any_of.iter().map(|group| group.iter().map(place).collect());
        let any_of = groups.collect::<Result<_, _>>()?;
        Ok(Roster { entries, any_of })
    }

    /// The entries, in the order of their names.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Compares tensors with those of the roster. If several have the same own name, the first counts, and
    /// the others are unexpected.
    pub fn compared<'a>(&'a self, present: impl IntoIterator<Item = PresentTensor<'a>>) -> Comparison<'a> {
        let mut there = vec![false; self.entries.len()];
        // Tensors come in the order of their names, most of them: each is looked for behind the one before.
        let mut next = 0;
        let mut found = Comparison::default();
        for one in present {
            let place = match self.entries.get(next) {
                Some(entry) if entry.name == one.own => Some(next),
                _ => self.entries.binary_search_by(|entry| entry.name.as_str().cmp(one.own)).ok(),
            };
            let Some(at) = place.filter(|&at| !there[at]) else {
                found.further.push(one.stored);
                continue;
            };
            there[at] = true;
            next = at + 1;
            let entry = &self.entries[at];
            let fits = entry.fits(one.shape);
            if !fits {
                found.differing.push((one.stored, one.shape, entry));
            }
            if let Some(dtype) = entry.dtype {
                *found.kinds.entry((one.dtype, dtype)).or_default() += 1;
                if dtype != one.dtype {
                    found.dtypes.push((one.stored, one.dtype, dtype));
                    continue;
                }
            }
            found.same += usize::from(fits);
        }
        let mut needed: Vec<bool> = self.entries.iter().map(|entry| !entry.optional).collect();
        for group in self.any_of.iter().filter(|group| group.iter().any(|&at| there[at])) {
            group.iter().for_each(|&at| needed[at] = false);
        }
        let missing = self.entries.iter().enumerate().filter(|&(at, _)| needed[at] && !there[at]);
        found.missing = missing.map(|(_, entry)| entry).collect();
        found.differing.sort_by_key(|&(name, ..)| name);
        found.dtypes.sort_by_key(|&(name, ..)| name);
        found.further.sort_unstable();
        found
    }
}

#[cfg(test)]
mod tests;
