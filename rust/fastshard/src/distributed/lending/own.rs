//! The owner's side: listing and lending its files.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use super::{bytes_of, record, Ask, HostRoots, Listed, Ranges, Shared, FILE, GIVEN, LISTED, ROOT};
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::memory;
use crate::publish::disk::{self, At};
use crate::storage::{SourceFile, Stamp};

/// Bytes that carry one checksum.
pub(super) const PIECE: u64 = 1 << 20;
/// Pieces that are lent before the requests of others are read again.
const TURN: usize = 8;
/// Files up to this size are lent completely from the start: texts, small tensors.
const SMALL: u64 = 64 << 10;
/// Number of first and last bytes that are lent of larger files, which have headers and directories there.
const END: u64 = 16 << 10;
/// Maximum bytes that are lent in this way.
const UNASKED: u64 = 256 << 20;
/// The rank's own files that are held open.
const OPEN: usize = 256;

struct OwnFile {
    path: PathBuf,
    /// As it was when it was listed.
    stamp: Stamp,
    given: Ranges,
}

pub(super) struct Owner {
    shared: Arc<Shared>,
    files: Vec<OwnFile>,
    open: VecDeque<(u32, Arc<SourceFile>)>,
    bytes: File,
    path: PathBuf,
    end: u64,
    asks: VecDeque<Ask>,
    /// Ranges that others will ask for most likely: given where nothing keeps them from being.
    unasked: VecDeque<Ask>,
}

impl Owner {
    /// Lists the files of this rank, and lends the parts that every rank reads.
    pub(super) fn begin(
        shared: &Arc<Shared>,
        host_roots: &HostRoots,
        files: &[(u32, String)],
    ) -> Result<(Owner, Vec<Listed>)> {
        let name = bytes_of(&shared.nonce);
        let path = shared.folder.join(&name);
        let bytes = shared.folder.create(OsStr::new(&name)).at(&path, "cannot create")?;
        let mut owner = Owner {
            shared: Arc::clone(shared),
            files: Vec::with_capacity(files.len()),
            open: VecDeque::new(),
            bytes,
            path,
            end: 0,
            asks: VecDeque::new(),
            unasked: VecDeque::new(),
        };
        let mut all = Vec::with_capacity(files.len());
        for (root, path) in files {
            let Some(folder) = host_roots.roots.get(*root as usize) else {
                return Err(Finding::new(codes::USAGE, format!("there is no root {root}")).into());
            };
            let full = folder.folder.join(path);
            let meta = std::fs::metadata(&full).map_err(|e| Error::io(&full, "cannot stat", &e))?;
            let stamp = Stamp::of(&meta);
            let listed = Listed {
                root: *root,
                path: path.clone(),
                size: stamp.size,
                mtime_ns: stamp.mtime_ns as i64,
                ctime_ns: stamp.ctime_ns as i64,
            };
            let json = serde_json::to_vec(&listed).expect("plain data");
            shared.journal.append(&[&[FILE][..], &json].concat())?;
            owner.files.push(OwnFile { path: full, stamp, given: Ranges::default() });
            all.push(listed);
        }
        for root in &host_roots.roots {
            let json = serde_json::to_vec(root).expect("plain data");
            shared.journal.append(&[&[ROOT][..], &json].concat())?;
        }
        shared.journal.append(&[&[LISTED][..], host_roots.host.as_bytes()].concat())?;
        shared.journal.show()?;
        let mut unasked = 0;
        for (number, file) in (0u32..).zip(&owner.files) {
            unasked += file.stamp.size.min(SMALL);
            match file.stamp.size {
                0 => {}
                // A store has as many files as chunks, most of which nobody but this rank reads.
                _ if unasked > UNASKED => break,
                size if size <= SMALL => owner.unasked.push_back((number, 0, size)),
                size => owner.unasked.extend([(number, 0, END), (number, size - END, size)]),
            }
        }
        Ok((owner, all))
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Reads the requests of others once, and lends some of the data; returns whether there was anything to
    /// do.
    pub(super) fn turn(&mut self) -> Result<bool> {
        let (asks, moved) = self.shared.follow()?;
        self.asks.extend(asks);
        // What is expected first: who waits for a header asks for more than it.
        let mut records = Vec::new();
        for _ in 0..TURN {
            let Some((number, lo, hi)) = self.unasked.pop_front() else { break };
            for (lo, hi) in self.files[number as usize].given.missing(lo, hi) {
                // A log that grows, somebody else's file: whoever needs it asks for it, and learns what is wrong.
                records.extend(self.write((number, lo, hi)).ok());
            }
        }
        for piece in self.next_pieces() {
            records.push(self.write(piece)?);
        }
        self.tell(&records)?;
        Ok(moved || !records.is_empty() || !self.unasked.is_empty())
    }

    /// The next pieces that others have requested.
    fn next_pieces(&mut self) -> Vec<Ask> {
        let mut pieces = Vec::new();
        while let Some((number, lo, hi)) = self.asks.pop_front() {
            let Some(file) = self.files.get(number as usize) else { continue };
            let missing = file.given.missing(lo, hi.min(file.stamp.size));
            let mut missing = missing.into_iter().flat_map(|(lo, hi)| {
                (lo..hi).step_by(PIECE as usize).map(move |at| (at, (at + PIECE).min(hi)))
            });
            for (lo, hi) in missing.by_ref().take(TURN - pieces.len()) {
                pieces.push((number, lo, hi));
            }
            if let Some((at, _)) = missing.next() {
                self.asks.push_front((number, at, hi));
            }
            if pieces.len() == TURN {
                break;
            }
            // Two that ask for the same: what is about to be lent counts as lent.
            pieces.iter().for_each(|&(n, lo, hi)| self.files[n as usize].given.insert(lo, hi));
        }
        pieces
    }

    /// Appends bytes of a file to the lent ones; returns the record for them.
    fn write(&mut self, (number, lo, hi): Ask) -> Result<Vec<u8>> {
        let mut bytes = memory::allocate((hi - lo) as usize)?;
        let file = self.file(number)?;
        file.read_at(lo, &mut bytes)?;
        file.untouched()?;
        disk::write_at(&self.bytes, &self.path, self.end, &bytes).at(&self.path, "cannot write")?;
        let crc = crc32fast::hash(&bytes);
        let entry = record(GIVEN, &[u64::from(number), lo, hi - lo, self.end, u64::from(crc)]);
        self.end += hi - lo;
        self.files[number as usize].given.insert(lo, hi);
        self.shared.served.fetch_add(hi - lo, Ordering::Relaxed);
        Ok(entry)
    }

    /// Announces lent bytes, once others can read them.
    fn tell(&self, records: &[Vec<u8>]) -> Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        if disk::is_network(&self.bytes) {
            disk::sync_data(&self.bytes, &self.path).at(&self.path, "cannot bring to disk")?;
        }
        self.shared.journal.append_all(records)?;
        self.shared.journal.show()
    }

    fn file(&mut self, number: u32) -> Result<Arc<SourceFile>> {
        if let Some((_, file)) = self.open.iter().find(|(open, _)| *open == number) {
            return Ok(Arc::clone(file));
        }
        let about = &self.files[number as usize];
        let file = Arc::new(SourceFile::open(&about.path)?);
        let stamp = file.stamp();
        if stamp != about.stamp {
            let describe = |stamp: &Stamp| format!("{} bytes", stamp.size);
            let (then, now) = match stamp.size == about.stamp.size {
                true => ("the inode and the times of then".into(), "others".into()),
                false => (describe(&about.stamp), describe(&stamp)),
            };
            return Err(Finding::new(codes::SOURCE_CHANGED, "changed since the ranks have met")
                .file(&about.path)
                .expected(then, now)
                .help("leave the files as they are until the run has ended, then run again")
                .into());
        }
        if self.open.len() == OPEN {
            self.open.pop_front();
        }
        self.open.push_back((number, Arc::clone(&file)));
        Ok(file)
    }
}
