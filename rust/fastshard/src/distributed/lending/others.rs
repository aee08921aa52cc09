//! The files that another rank has listed, and the bytes that it has lent.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Component, Path};
use std::sync::Arc;

use super::{own, HostRoots, Listed, Ranges, Root, HEAD};
use crate::codes;
use crate::error::{Finding, Result};

/// Bytes of a file that another rank has lent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Given {
    pub(super) len: u64,
    pub(super) place: u64,
    pub(super) crc32: u32,
    /// The process of the rank that has lent them: one that takes over the rank writes another file.
    pub(super) process: u64,
    /// True once they were read and found right.
    pub(super) checked: bool,
}

/// A file of another rank.
#[derive(Debug)]
pub(super) struct Borrowed {
    pub(super) listed: Listed,
    pub(super) given: BTreeMap<u64, Given>,
    pub(super) requested: Ranges,
    /// The end of the last read that was not announced, and the number of bytes requested for it.
    pub(super) ahead: (u64, u64),
}

/// Another rank.
#[derive(Debug, Default)]
pub(super) struct Other {
    pub(super) nonce: String,
    /// Counts the processes that have held the rank.
    pub(super) process: u64,
    /// The position up to which its journal was read.
    pub(super) read: u64,
    /// Roots and files it has named since its journal was begun.
    pub(super) roots: Vec<Root>,
    pub(super) named: Vec<Listed>,
    pub(super) host_roots: Option<HostRoots>,
    pub(super) files: Vec<Borrowed>,
    /// Its lent bytes, opened anew if they are not as they were lent.
    pub(super) bytes: Option<Arc<File>>,
    pub(super) served: u64,
}

impl Other {
    /// Resets the rank, because another process has taken it over and lists its files anew.
    pub(super) fn restart(&mut self, nonce: String) {
        (self.nonce, self.read, self.bytes) = (nonce, 0, None);
        self.process += 1;
        self.named.clear();
        self.roots.clear();
        self.files.iter_mut().for_each(|file| file.given.clear());
    }

    pub(super) fn name(&mut self, json: &[u8]) -> Option<()> {
        let listed: Listed = serde_json::from_slice(json).ok()?;
        let plain = |part: Component| matches!(part, Component::Normal(_));
        let is_below = Path::new(&listed.path).components().all(plain) && !listed.path.is_empty();
        self.named.push(listed);
        is_below.then_some(())
    }

    pub(super) fn tell(&mut self, host: &[u8]) -> Result<Option<()>> {
        let host = String::from_utf8_lossy(host).into_owned();
        let host_roots = HostRoots { host, roots: std::mem::take(&mut self.roots) };
        let named = std::mem::take(&mut self.named);
        let is_named = |(root, file): (usize, &Root)| match &file.file {
            Some(file) => named.iter().any(|f| f.root as usize == root && f.path == *file),
            None => true,
        };
        if named.iter().any(|file| file.root as usize >= host_roots.roots.len())
            || !host_roots.roots.iter().enumerate().all(is_named)
        {
            return Ok(None);
        }
        if self.host_roots.is_none() {
            let borrowed = |listed| Borrowed {
                listed,
                given: BTreeMap::new(),
                requested: Ranges::default(),
                ahead: (0, HEAD),
            };
            self.files = named.into_iter().map(borrowed).collect();
        } else if !self.files.iter().map(|file| &file.listed).eq(&named) {
            return Err(Finding::new(codes::RANKS_DIFFER, "a rank that was started again has other files")
                .expected("the files that it had before", format!("others on {}", host_roots.host))
                .help("run again with --resume, all ranks")
                .into());
        }
        self.host_roots = Some(host_roots);
        Ok(Some(()))
    }

    /// Records what it has lent.
    pub(super) fn take(&mut self, [file, lo, len, place, crc32]: [u64; 5]) -> Option<()> {
        let file = self.files.get_mut(usize::try_from(file).ok()?)?;
        let is_inside = len <= own::PIECE && lo.checked_add(len)? <= file.listed.size;
        let given =
            Given { len, place, crc32: u32::try_from(crc32).ok()?, process: self.process, checked: false };
        file.given.insert(lo, given);
        self.served += len;
        is_inside.then_some(())
    }

    /// The pieces with bytes `lo..hi` of a file, and the missing ranges.
    pub(super) fn pieces(
        &self,
        file: u32,
        lo: u64,
        hi: u64,
    ) -> std::result::Result<Vec<(u64, Given)>, (u64, u64)> {
        let given = &self.files[file as usize].given;
        let (mut found, mut at) = (Vec::new(), lo);
        while at < hi {
            match given.range(..=at).next_back() {
                Some((&first, piece)) if first + piece.len > at => {
                    found.push((first, *piece));
                    at = first + piece.len;
                }
                _ => return Err((at, hi)),
            }
        }
        Ok(found)
    }
}
