//! The journal of an interrupted run: which pieces of work are done.
//!
//! A file of frames, each `length u32 | crc32 of the payload u32 | payload`, little-endian. The
//! payload's first byte tells a record (the caller's bytes) from the start of a session. The first
//! frame that is cut short or fails its checksum ends the journal.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::disk::{self, At};
use crate::codes;
use crate::error::{Finding, Result};

const SESSION: u8 = 0;
const RECORD: u8 = 1;
const HEADER: usize = 8;

/// Append-only list of records that survives the process. Shared between threads.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    durable: bool,
    replayed: Vec<Vec<u8>>,
    /// The file and the offset (bytes) at which the next frame goes.
    end: Mutex<(File, u64)>,
}

impl Journal {
    /// Opens or creates the journal, replays it and cuts off a torn tail.
    pub(super) fn open(path: PathBuf, durable: bool) -> Result<Self> {
        let bytes = match std::fs::read(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read.at(&path, "cannot read")?,
        };
        let (replayed, good) = replay(&bytes, &boot_id());
        let file = disk::open(&path).at(&path, "cannot create")?;
        if good < bytes.len() {
            disk::set_len(&file, &path, good as u64).at(&path, "cannot cut off a torn record")?;
        }
        let journal = Journal { path, durable, replayed, end: Mutex::new((file, good as u64)) };
        let session = [&[SESSION, u8::from(durable)], boot_id().as_bytes()].concat();
        journal.write(&session)?;
        Ok(journal)
    }

    /// The records of the earlier sessions of this run, in order of appending. Records that were
    /// never synced (`fsync` off) are left out if the machine was restarted since.
    pub fn replayed(&self) -> &[Vec<u8>] {
        &self.replayed
    }

    /// Appends one record. It says that work is done, so the data it speaks of is synced first.
    pub fn append(&self, record: &[u8]) -> Result<()> {
        self.write(&[&[RECORD], record].concat())
    }

    /// Waits until all records appended are on disk; nothing with `fsync` off.
    pub fn sync(&self) -> Result<()> {
        if !self.durable {
            return Ok(());
        }
        let end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        disk::sync_data(&end.0, &self.path).at(&self.path, "cannot bring to disk")
    }

    fn write(&self, payload: &[u8]) -> Result<()> {
        let length = u32::try_from(payload.len()).map_err(|_| {
            Finding::new(codes::IO, "journal record too long")
                .file(&self.path)
                .expected("less than 4 GiB", payload.len())
        })?;
        let frame = [&length.to_le_bytes(), &crc32fast::hash(payload).to_le_bytes(), payload].concat();
        // The offset moves only on success: a frame written in part is overwritten by the next.
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        disk::write_at(&end.0, &self.path, end.1, &frame).at(&self.path, "cannot write")?;
        end.1 += frame.len() as u64;
        Ok(())
    }
}

/// The records that can be trusted, and the length in bytes of the part that is whole.
fn replay(bytes: &[u8], boot: &str) -> (Vec<Vec<u8>>, usize) {
    let mut records = Vec::new();
    let mut trusted = false;
    let mut good = 0;
    while let Some(payload) = frame(&bytes[good..]) {
        match payload[0] {
            // Without syncs the order in which pages reached the disk is unknown, so such records
            // hold only as long as the machine keeps running.
            SESSION => trusted = same_boot(payload[1..].first() == Some(&1), &payload[2..], boot),
            _ if trusted => records.push(payload[1..].to_vec()),
            _ => {}
        }
        good += HEADER + payload.len();
    }
    (records, good)
}

/// The payload of the frame that `bytes` starts with, if it is whole.
fn frame(bytes: &[u8]) -> Option<&[u8]> {
    let header = bytes.get(..HEADER)?;
    let length = u32::from_le_bytes(header[..4].try_into().ok()?) as usize;
    let crc = u32::from_le_bytes(header[4..].try_into().ok()?);
    // Some filesystems leave zeros behind after a power failure: a length of zero is no frame.
    let least = if *bytes.get(HEADER)? == SESSION { 2 } else { 1 };
    let payload = bytes.get(HEADER..HEADER.checked_add(length)?)?;
    (length >= least && crc32fast::hash(payload) == crc).then_some(payload)
}

/// True if what was written under the given terms is still there for certain.
pub(super) fn same_boot(durable: bool, then: &[u8], now: &str) -> bool {
    durable || (!now.is_empty() && then == now.as_bytes())
}

/// Identity of this run of the machine; empty if unknown.
pub(super) fn boot_id() -> String {
    let id = std::fs::read_to_string(Path::new("/proc/sys/kernel/random/boot_id"));
    id.map(|id| id.trim().to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(bytes: &[u8]) -> Vec<Vec<u8>> {
        replay(bytes, &boot_id()).0
    }

    #[test]
    fn replays_up_to_any_cut_or_flip() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let all: Vec<Vec<u8>> = (0..5u8).map(|i| vec![i; usize::from(i) * 7]).collect();
        let journal = Journal::open(path.clone(), true).unwrap();
        for record in &all {
            journal.append(record).unwrap();
        }
        journal.sync().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(records(&bytes), all);
        for cut in 0..bytes.len() {
            let seen = records(&bytes[..cut]);
            assert!(seen.len() < all.len() && all.starts_with(&seen), "cut at {cut}");
        }
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x10;
            let seen = records(&flipped);
            assert!(seen.len() < all.len() && all.starts_with(&seen), "flip at {at}");
        }
        let zeros = [bytes.clone(), vec![0; 4096]].concat();
        assert_eq!(replay(&zeros, ""), (all, bytes.len()));
    }

    #[test]
    fn appends_after_a_torn_tail() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        Journal::open(path.clone(), true).unwrap().append(b"first").unwrap();
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, [&whole[..], &[9, 0, 0, 0, 1]].concat()).unwrap();
        let journal = Journal::open(path.clone(), true).unwrap();
        journal.append(b"second").unwrap();
        assert_eq!(journal.replayed(), [b"first".to_vec()]);
        drop(journal);
        let journal = Journal::open(path, true).unwrap();
        assert_eq!(journal.replayed(), [b"first".to_vec(), b"second".to_vec()]);
    }

    #[test]
    fn unsynced_records_do_not_outlive_the_machine() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        Journal::open(path.clone(), false).unwrap().append(b"unsynced").unwrap();
        Journal::open(path.clone(), true).unwrap().append(b"synced").unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(records(&bytes), [b"unsynced".to_vec(), b"synced".to_vec()]);
        assert_eq!(replay(&bytes, "another boot").0, [b"synced".to_vec()]);
        assert_eq!(replay(&bytes, "").0, [b"synced".to_vec()]);
    }
}
