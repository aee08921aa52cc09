//! The journal of an interrupted run: which pieces of work are done.
//!
//! A file of frames, each `length u32 | crc32 of the payload u32 | payload`, little-endian. The
//! payload's first byte tells a record (the caller's bytes) from the start of a session. The first
//! frame that is cut short or fails its checksum ends the journal.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::disk::{self, At, Dir};
use crate::buffered::Buffered;
use crate::codes;
use crate::error::{Finding, Result};
use crate::memory;

const SESSION: u8 = 0;
const RECORD: u8 = 1;
const HEADER: usize = 8;
/// Bytes in which the first records of a journal lie.
const FIRST: u64 = 16 << 10;
/// Bytes of the payload that ends a journal: a kind twice, and a hash.
const LAST: usize = 34;
/// Largest payload, in bytes: what is longer was not written by this program.
const MAX_PAYLOAD: usize = 64 << 10;

/// Bytes of records that are written at a time.
const MOST_WRITTEN: usize = 1 << 20;

/// Append-only list of records that survives the process. Shared between threads.
///
/// Records stay on disk: a run of many terabytes has millions of them.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    durable: bool,
    file: File,
    /// Bytes of the earlier sessions of this run.
    earlier: u64,
    /// Offset (bytes) at which the next frame goes.
    end: Mutex<u64>,
    /// True once there is a record, of whatever session.
    holds_records: AtomicBool,
    /// What has to be on disk before the first record is written; none once it is.
    anchor: Mutex<Option<Anchor>>,
}

/// A plan that was written and not synced: a run that ends before its first record has nothing to be continued.
#[derive(Debug)]
pub(crate) struct Anchor {
    /// The folder that the plan and the journal lie in.
    pub(crate) folder: Dir,
    /// The directory that the folder lies in.
    pub(crate) base: Dir,
}

impl Anchor {
    /// Brings plan, journal and folder to disk.
    fn sync(&self) -> Result<()> {
        let plan = self.folder.join("plan");
        self.folder.sync_file(OsStr::new("plan")).at(&plan, "cannot bring to disk")?;
        for directory in [&self.folder, &self.base] {
            directory.sync().at(directory.path(), "cannot bring to disk")?;
        }
        Ok(())
    }
}

impl Journal {
    /// Opens or creates the journal `name` of a staging folder and cuts off a torn tail.
    pub(crate) fn open(folder: &Dir, name: &str, durable: bool) -> Result<Self> {
        let path = folder.join(name);
        let file = folder.open_or_create(OsStr::new(name)).at(&path, "cannot create")?;
        let len = file.metadata().at(&path, "cannot stat")?.len();
        let mut any = false;
        let good = replay(&file, len, &boot_id(), &mut |_, _| any = true).at(&path, "cannot read")?;
        if good < len {
            disk::set_len(&file, &path, good).at(&path, "cannot cut off a torn record")?;
        }
        let (end, holds_records) = (Mutex::new(good), AtomicBool::new(any));
        let journal =
            Journal { path, durable, file, earlier: good, end, holds_records, anchor: Mutex::default() };
        let session = [&[SESSION, u8::from(durable)], boot_id().as_bytes()].concat();
        journal.write(&journal.frame_of_payload(&session)?)?;
        Ok(journal)
    }

    /// The journal `name` of another process, as far as it goes now. Nothing is appended to it.
    pub(crate) fn read_only(folder: &Dir, name: &str) -> Result<Self> {
        let path = folder.join(name);
        let file = folder.read_only(name).at(&path, "cannot open")?;
        let earlier = file.metadata().at(&path, "cannot stat")?.len();
        let (end, holds_records) = (Mutex::new(earlier), AtomicBool::new(false));
        Ok(Journal { path, durable: true, file, earlier, end, holds_records, anchor: Mutex::default() })
    }

    /// The same, whose first record waits until `anchor` is on disk.
    pub(super) fn anchored(mut self, anchor: Anchor) -> Self {
        self.anchor = Mutex::new(Some(anchor));
        self
    }

    /// Brings to disk what has to be there before the first record: the plan, and the way to it.
    ///
    /// Errors: those of the system.
    pub(super) fn secure(&self) -> Result<()> {
        let mut anchor = self.anchor.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(unsynced) = &*anchor {
            unsynced.sync()?;
            *anchor = None;
        }
        Ok(())
    }

    /// True if the journal `name` is there and tells of anything that is done.
    pub(super) fn has_records(folder: &Dir, name: &str) -> Result<bool> {
        let mut any = false;
        if folder.has(name).at(&folder.join(name), "cannot stat")? {
            Journal::read_only(folder, name)?.replay(&mut |_, _| any = true)?;
        }
        Ok(any)
    }

    /// Calls `each` with the first records of the journal `name`; gives the last one if it is as long as those that end
    /// journals.
    pub(crate) fn glance(folder: &Dir, name: &str, each: &mut dyn FnMut(&[u8])) -> Result<Option<Vec<u8>>> {
        let path = folder.join(name);
        let file = folder.read_only(name).at(&path, "cannot open")?;
        let len = file.metadata().at(&path, "cannot stat")?.len();
        replay(&file, len.min(FIRST), &boot_id(), &mut |_, record| each(record)).at(&path, "cannot read")?;
        let Some(start) = len.checked_sub((HEADER + LAST) as u64) else { return Ok(None) };
        let mut reader = Reading(&file, start);
        let mut payload = Vec::new();
        let whole = frame(&mut reader, &mut payload).at(&path, "cannot read")?;
        Ok((whole && payload.len() == LAST && payload[0] == RECORD).then(|| payload.split_off(1)))
    }

    /// Calls `each` with the records of the journal `name` from byte `from` on, as far as they are whole now; where they
    /// end. For one that its process is still writing: whoever follows it opens it anew each time, since a file server's
    /// client looks for what is new then.
    pub(crate) fn follow(
        folder: &Dir,
        name: &str,
        from: u64,
        each: &mut dyn FnMut(&[u8]),
    ) -> io::Result<u64> {
        let file = folder.read_only(name)?;
        let len = file.metadata()?.len();
        let mut reader = Buffered::new(64 << 10, Reading(&file, from).take(len.saturating_sub(from)))?;
        let (mut at, mut payload) = (from, Vec::new());
        while frame(&mut reader, &mut payload)? {
            if payload[0] == RECORD {
                each(&payload[1..]);
            }
            at += (HEADER + payload.len()) as u64;
        }
        Ok(at)
    }

    /// Calls `each` with the records of the earlier sessions of this run, in order of appending, and where
    /// [`Journal::read`] finds them. Records that were never synced (`fsync` off) are left out if the
    /// machine was restarted since.
    ///
    /// Errors: those of the system.
    pub fn replay(&self, each: &mut dyn FnMut(u64, &[u8])) -> Result<()> {
        replay(&self.file, self.earlier, &boot_id(), each).at(&self.path, "cannot read").map(drop)
    }

    /// The record at `place`, as [`Journal::replay`] gave it, in `buffer`; of a longer one the beginning.
    ///
    /// Errors: those of the system.
    pub fn read<'b>(&self, place: u64, buffer: &'b mut [u8]) -> Result<&'b [u8]> {
        let mut header = [0; HEADER];
        let start = place.saturating_sub(1 + HEADER as u64);
        self.file.read_exact_at(&mut header, start).at(&self.path, "cannot read")?;
        let length = u32::from_le_bytes(header[..4].try_into().expect("four bytes")) as usize;
        let wanted = length.saturating_sub(1).min(buffer.len());
        let record = &mut buffer[..wanted];
        self.file.read_exact_at(record, place).at(&self.path, "cannot read")?;
        Ok(record)
    }

    /// Fills `bytes` with those of a record, from `place` on.
    ///
    /// Errors: those of the system.
    pub fn bytes_at(&self, place: u64, bytes: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(bytes, place).at(&self.path, "cannot read")
    }

    /// Lets others see what is appended: on one machine they do, on others once it is on the file server.
    ///
    /// Errors: those of the system.
    pub fn show(&self) -> Result<()> {
        if disk::is_network(&self.file) {
            self.file.sync_data().at(&self.path, "cannot bring to disk")?;
        }
        Ok(())
    }

    /// Appends one record, at most 64 KiB long. If it says that work is done, the data it speaks of has
    /// been synced.
    pub fn append(&self, record: &[u8]) -> Result<()> {
        self.append_all(&[record])
    }

    /// Appends records, as [`Journal::append`], in few writes.
    ///
    /// Errors: what the system says; the first of them may be there then.
    pub fn append_all(&self, records: &[impl AsRef<[u8]>]) -> Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        self.secure()?;
        let mut together = Vec::new();
        let mut first = 0;
        for (number, record) in records.iter().enumerate() {
            memory::append(&mut together, &self.frame_of(record.as_ref())?)?;
            if together.len() < MOST_WRITTEN && number + 1 < records.len() {
                continue;
            }
            if self.write(&together).is_err() {
                // A full disk may have room for some of them, by which the run can be continued.
                for record in &records[first..=number] {
                    self.write(&self.frame_of(record.as_ref())?)?;
                    self.holds_records.store(true, Ordering::Relaxed);
                }
            }
            self.holds_records.store(true, Ordering::Relaxed);
            together.clear();
            first = number + 1;
        }
        Ok(())
    }

    /// True if it tells of anything that is done.
    pub fn holds_records(&self) -> bool {
        self.holds_records.load(Ordering::Relaxed)
    }

    /// Waits until all records appended are on disk; nothing with `fsync` off.
    pub fn sync(&self) -> Result<()> {
        if !self.durable {
            return Ok(());
        }
        disk::sync_data(&self.file, &self.path).at(&self.path, "cannot bring to disk")
    }

    fn frame_of(&self, record: &[u8]) -> Result<Vec<u8>> {
        self.frame_of_payload(&[&[RECORD], record].concat())
    }

    fn frame_of_payload(&self, payload: &[u8]) -> Result<Vec<u8>> {
        if payload.len() > MAX_PAYLOAD {
            return Err(Finding::new(codes::INTERNAL, "journal record too long")
                .file(&self.path)
                .expected(format!("at most {MAX_PAYLOAD} bytes"), payload.len())
                .into());
        }
        let length = payload.len() as u32;
        Ok([&length.to_le_bytes(), &crc32fast::hash(payload).to_le_bytes(), payload].concat())
    }

    fn write(&self, frames: &[u8]) -> Result<()> {
        // The offset moves only on success: what was written in part is overwritten by the next.
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        disk::write_at(&self.file, &self.path, *end, frames).at(&self.path, "cannot write")?;
        *end += frames.len() as u64;
        Ok(())
    }
}

/// Calls `each` with the records among the first `len` bytes that can be trusted and where they begin; the
/// length in bytes of the part that is whole.
fn replay(file: &File, len: u64, boot: &str, each: &mut dyn FnMut(u64, &[u8])) -> io::Result<u64> {
    let mut reader = Buffered::new(1 << 20, Reading(file, 0).take(len))?;
    let mut trusted = false;
    let mut good = 0;
    let mut payload = Vec::new();
    while frame(&mut reader, &mut payload)? {
        match payload[0] {
            // Without syncs the order in which pages reached the disk is unknown, so such records
            // hold only as long as the machine keeps running.
            SESSION => trusted = same_boot(payload.get(1) == Some(&1), payload.get(2..).unwrap_or(&[]), boot),
            _ if trusted => each(good + HEADER as u64 + 1, &payload[1..]),
            _ => {}
        }
        good += (HEADER + payload.len()) as u64;
    }
    Ok(good)
}

/// Reads a file from an offset on, without moving the descriptor's own.
struct Reading<'f>(&'f File, u64);

impl Read for Reading<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n = self.0.read_at(bytes, self.1)?;
        self.1 += n as u64;
        Ok(n)
    }
}

/// Reads the next frame's payload; false if there is none that is whole.
fn frame(reader: &mut impl Read, payload: &mut Vec<u8>) -> io::Result<bool> {
    let mut header = [0; HEADER];
    if !filled(reader, &mut header)? {
        return Ok(false);
    }
    let (length, crc) = header.split_at(4);
    let length = u32::from_le_bytes(length.try_into().expect("four bytes")) as usize;
    let crc = u32::from_le_bytes(crc.try_into().expect("four bytes"));
    // Some filesystems leave zeros behind after a power failure: a length of zero is no frame.
    if length == 0 || length > MAX_PAYLOAD {
        return Ok(false);
    }
    memory::resize(payload, length)?;
    let whole = filled(reader, payload)? && crc32fast::hash(payload) == crc;
    Ok(whole && (payload[0] != SESSION || length >= 2))
}

/// Fills `bytes`; false if there are fewer.
fn filled(reader: &mut impl Read, bytes: &mut [u8]) -> io::Result<bool> {
    match reader.read_exact(bytes) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        done => done.map(|()| true),
    }
}

/// True if what was written under the given terms is still there for certain.
pub(crate) fn same_boot(durable: bool, then: &[u8], now: &str) -> bool {
    durable || (!now.is_empty() && then == now.as_bytes())
}

/// Identity of this run of the machine; empty if unknown.
pub(crate) fn boot_id() -> String {
    let id = std::fs::read_to_string(Path::new("/proc/sys/kernel/random/boot_id"));
    id.map(|id| id.trim().to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(folder: &Path, durable: bool) -> Journal {
        Journal::open(&Dir::open(folder).unwrap(), "journal", durable).unwrap()
    }

    /// The records in `bytes`, and how many of these are whole.
    fn replayed(bytes: &[u8], boot: &str) -> (Vec<Vec<u8>>, usize) {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        let mut records = Vec::new();
        let good = replay(&file, bytes.len() as u64, boot, &mut |place, record| {
            assert_eq!(&bytes[place as usize..place as usize + record.len()], record);
            records.push(record.to_vec());
        });
        (records, good.unwrap() as usize)
    }

    fn records(bytes: &[u8]) -> Vec<Vec<u8>> {
        replayed(bytes, &boot_id()).0
    }

    fn earlier(journal: &Journal) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        journal.replay(&mut |_, record| all.push(record.to_vec())).unwrap();
        all
    }

    #[test]
    fn replays_up_to_any_cut_or_flip() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let all: Vec<Vec<u8>> = (0..5u8).map(|i| vec![i; usize::from(i) * 7]).collect();
        let journal = open(dir.path(), true);
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
        assert_eq!(replayed(&zeros, ""), (all, bytes.len()));
    }

    #[test]
    fn a_disk_with_room_for_some_of_the_records_keeps_these() {
        use super::super::fault::{arm, disarm, Fault};
        let dir = tempfile::tempdir().unwrap();
        let journal = open(dir.path(), true);
        // The first write takes all records, and does not fit; the others fit one by one.
        arm(0, Fault::Once(libc::ENOSPC));
        journal.append_all(&[b"one", b"two"]).unwrap();
        arm(0, Fault::Gone);
        journal.append_all(&[b"three"]).unwrap_err();
        disarm();
        assert!(journal.holds_records());
        assert_eq!(earlier(&open(dir.path(), true)), [b"one".to_vec(), b"two".to_vec()]);
    }

    #[test]
    fn many_records_are_those_that_one_after_another_would_be() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let all: Vec<Vec<u8>> = (0..70_000u32).map(|i| i.to_le_bytes().repeat(1 + i as usize % 7)).collect();
        let (one, many) = (open(dir.path(), true), open(other.path(), true));
        all.iter().for_each(|record| one.append(record).unwrap());
        super::super::fault::disarm();
        many.append_all(&all).unwrap();
        many.append_all(&Vec::<Vec<u8>>::new()).unwrap();
        let writes = super::super::fault::disarm().len();
        let read = |dir: &tempfile::TempDir| std::fs::read(dir.path().join("journal")).unwrap();
        assert!(read(&dir) == read(&other));
        assert_eq!(writes, read(&other).len().div_ceil(MOST_WRITTEN));
    }

    #[test]
    fn appends_after_a_torn_tail() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        open(dir.path(), true).append(b"first").unwrap();
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, [&whole[..], &[9, 0, 0, 0, 1]].concat()).unwrap();
        let journal = open(dir.path(), true);
        journal.append(b"second").unwrap();
        assert_eq!(earlier(&journal), [b"first".to_vec()]);
        drop(journal);
        let journal = open(dir.path(), true);
        assert_eq!(earlier(&journal), [b"first".to_vec(), b"second".to_vec()]);
    }

    #[test]
    fn unsynced_records_do_not_outlive_the_machine() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        open(dir.path(), false).append(b"unsynced").unwrap();
        open(dir.path(), true).append(b"synced").unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(records(&bytes), [b"unsynced".to_vec(), b"synced".to_vec()]);
        assert_eq!(replayed(&bytes, "another boot").0, [b"synced".to_vec()]);
        assert_eq!(replayed(&bytes, "").0, [b"synced".to_vec()]);
    }
}
