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
    /// Its extents, as far as they are known: `None` where not even their number is.
    pub shape: Option<Vec<Option<u64>>>,
    /// Its dtype, where it is known.
    pub dtype: Option<Dtype>,
    /// True if a model may be without it.
    pub optional: bool,
}

impl Entry {
    /// True if a tensor of this shape may be meant, as far as that is known.
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
    /// Of each group one is enough (tied tensors), by places in `entries`.
    any_of: Vec<Vec<usize>>,
}

/// A tensor that is there.
#[derive(Debug, Clone, Copy)]
pub struct PresentTensor<'a> {
    /// The name under which it is stored.
    pub stored: &'a str,
    /// The model's own name of it.
    pub own: &'a str,
    /// Shape of the whole.
    pub shape: &'a [u64],
    /// Its dtype.
    pub dtype: Dtype,
}

/// What differs, in the order of the names.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Comparison<'a> {
    /// Entries that nothing is there for.
    pub missing: Vec<&'a Entry>,
    /// Tensors of another shape: the name stored, the shape, and the entry.
    pub differing: Vec<(&'a str, &'a [u64], &'a Entry)>,
    /// Tensors of another dtype: the name stored, the dtype, and the one expected.
    pub dtypes: Vec<(&'a str, Dtype, Dtype)>,
    /// Names stored of tensors that the roster has not.
    pub further: Vec<&'a str>,
    /// How many tensors are as expected, in shape and in dtype.
    pub same: usize,
    /// How many tensors have each pair of dtypes: what is there, and what is expected.
    pub kinds: BTreeMap<(Dtype, Dtype), usize>,
}

impl Roster {
    /// A roster of these entries, in any order.
    ///
    /// # Errors
    /// `FS515` for a name that stands in it twice, and for a group with a name that it has not.
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

    /// Compares tensors with those of the roster. Of several with one own name the first is taken, the others are
    /// further ones.
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
