//! The borrower's side: files of other ranks, read by asking their owners.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::others::Given;
use super::{bytes_of, Shared, LOOK};
use crate::codes;
use crate::distributed::meeting::Pauses;
use crate::error::{Finding, Result};
use crate::memory;
use crate::publish::clock::Watched;
use crate::publish::disk::At;
use crate::steps::{self, Step};
use crate::storage::remote::{Provider, Ranges};

/// Minimum bytes of a request for a read that was not announced, and its maximum if reading continues.
const ASKED_LEAST: u64 = 256 << 10;
const ASKED_MOST: u64 = 8 << 20;
/// Time limit for lent bytes to arrive unchanged.
pub(super) const ARRIVAL: Duration = Duration::from_secs(10);

/// A file of another rank, for its readers.
#[derive(Debug)]
struct RemoteFile {
    shared: Arc<Shared>,
    rank: u32,
    file: u32,
}

/// Ends the waiting of borrowers.
pub(super) struct Giver {
    pub(super) shared: Weak<Shared>,
    /// Roots here, and their names for users.
    pub(super) names: HashMap<PathBuf, String>,
}

impl RemoteFile {
    /// Requests data that was not announced, and more of it if reading continues from there.
    fn ask_ahead(&self, lo: u64, hi: u64) -> Result<()> {
        let more = {
            let mut state = self.shared.lock();
            let Some(file) =
                state.others.get_mut(&self.rank).and_then(|o| o.files.get_mut(self.file as usize))
            else {
                return Ok(());
            };
            let (end, step) = file.ahead;
            let step = if lo == end { (step * 2).min(ASKED_MOST) } else { ASKED_LEAST };
            let until = hi.max(lo + step).min(file.listed.size);
            file.ahead = (until, step);
            until
        };
        self.shared.ask(self.rank, self.file, &[(lo, more)], true)
    }

    /// The pieces with bytes `lo..hi`, once they have arrived.
    fn wait_for(&self, lo: u64, hi: u64) -> Result<Vec<(u64, Given)>> {
        let mut is_requested = false;
        loop {
            let missing = {
                let state = self.shared.lock();
                let other = state.others.get(&self.rank).filter(|o| (self.file as usize) < o.files.len());
                let Some(other) = other else {
                    return Err(Finding::new(codes::INTERNAL, "a file that no rank has named").into());
                };
                match other.pieces(self.file, lo, hi) {
                    Ok(pieces) => return Ok(pieces),
                    Err(_) if is_requested => {
                        drop(self.shared.arrived.wait_timeout(state, LOOK));
                        None
                    }
                    Err(missing) => Some(missing),
                }
            };
            match missing {
                Some((lo, hi)) => {
                    self.ask_ahead(lo, hi)?;
                    steps::reach(Step::Waits(self.rank));
                }
                None => self.shared.check()?,
            }
            is_requested = true;
        }
    }

    /// The lent bytes of the owner's process, opened anew if `again`; none if they are gone: an owner that
    /// stops removes them, and announces that.
    fn bytes(&self, process: u64, again: bool) -> Result<Option<Arc<File>>> {
        let mut state = self.shared.lock();
        let Some(other) = state.others.get_mut(&self.rank) else {
            return Err(Finding::new(codes::INTERNAL, "a rank that is missing").into());
        };
        if other.process != process {
            return Ok(None);
        }
        if let Some(bytes) = other.bytes.as_ref().filter(|_| !again) {
            return Ok(Some(Arc::clone(bytes)));
        }
        let name = bytes_of(&other.nonce);
        let file = match self.shared.folder.read_only(&name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.at(&self.shared.folder.join(&name), "cannot open")?,
        };
        Ok(Some(Arc::clone(other.bytes.insert(Arc::new(file)))))
    }

    /// True as long as the process that has lent a piece holds its rank.
    fn is_current(&self, piece: Given) -> bool {
        self.shared.lock().others.get(&self.rank).is_some_and(|other| other.process == piece.process)
    }

    /// Reads a piece and compares it with its checksum until it has arrived; none if another process has
    /// taken over the rank, and lends it anew.
    fn checked(&self, first: u64, piece: Given) -> Result<Option<Vec<u8>>> {
        let clock = &self.shared.clock;
        let mut watched = Watched::begin(clock.now(), ARRIVAL);
        let mut bytes = memory::allocate(piece.len as usize)?;
        let mut pauses = Pauses::new(clock, LOOK);
        let mut again = false;
        loop {
            if !self.is_current(piece) {
                return Ok(None);
            }
            let now = clock.now();
            let file = self.bytes(piece.process, again)?;
            let read = file.is_some_and(|file| file.read_exact_at(&mut bytes, piece.place).is_ok());
            if read && crc32fast::hash(&bytes) == piece.crc32 {
                let mut state = self.shared.lock();
                let file = state.others.get_mut(&self.rank).and_then(|o| o.files.get_mut(self.file as usize));
                if let Some(given) = file.and_then(|file| file.given.get_mut(&first)) {
                    given.checked |= (given.process, given.place, given.len, given.crc32)
                        == (piece.process, piece.place, piece.len, piece.crc32);
                }
                return Ok(Some(bytes));
            }
            if watched.look(now) > ARRIVAL {
                let state = self.shared.lock();
                let nonce = state.others.get(&self.rank).map(|o| o.nonce.clone()).unwrap_or_default();
                return Err(Finding::new(
                    codes::WRITTEN_DIFFERS,
                    "what a rank has lent is not what is read here",
                )
                .file(self.shared.folder.join(bytes_of(&nonce)))
                .rank(format!("rank {}", self.rank))
                .expected(format!("CRC32 {:08x} of {} bytes", piece.crc32, piece.len), "others, or fewer")
                .help("run `fastshard check-storage`; the destination is not one storage for all, or it loses writes")
                .into());
            }
            self.shared.check()?;
            pauses.sleep();
            again = true;
        }
    }
}

impl Ranges for RemoteFile {
    fn identity(&self) -> Option<(u64, i64)> {
        let state = self.shared.lock();
        let listed = &state.others.get(&self.rank)?.files.get(self.file as usize)?.listed;
        Some((listed.size, listed.mtime_ns))
    }

    fn is_lent(&self) -> bool {
        true
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let end = offset + bytes.len() as u64;
        let mut at = offset;
        while at < end {
            for (first, piece) in self.wait_for(at, end)? {
                let until = (first + piece.len).min(end);
                let into = &mut bytes[(at - offset) as usize..(until - offset) as usize];
                let shift = at - first;
                let spool = if piece.checked { self.bytes(piece.process, false)? } else { None };
                let direct = spool.is_some_and(|file| file.read_exact_at(into, piece.place + shift).is_ok());
                if !direct {
                    // Lent anew by another process: what is asked for is waited for again.
                    let Some(whole) = self.checked(first, piece)? else { break };
                    into.copy_from_slice(&whole[shift as usize..shift as usize + into.len()]);
                }
                at = until;
            }
        }
        Ok(())
    }

    fn will_read(&self, ranges: &[(u64, u64)], now: bool) -> Result<()> {
        self.shared.ask(self.rank, self.file, ranges, now)
    }
}

impl Provider for Giver {
    fn file(&self, path: &Path) -> Option<Arc<dyn Ranges>> {
        let shared = self.shared.upgrade()?;
        let &(rank, file) = shared.lock().places.get(path)?;
        Some(Arc::new(RemoteFile { shared, rank, file }))
    }

    fn name(&self, folder: &Path) -> Option<String> {
        self.names.get(folder).cloned()
    }

    fn interrupt(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.interrupted.store(true, Ordering::Relaxed);
            shared.arrived.notify_all();
        }
    }
}
