//! Tiles that are written and not yet on disk, and the thread that brings them there: no worker waits for a sync.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Builder};
use std::time::Duration;

use crate::engine::Control;
use crate::error::{Error, Result};
use crate::publish::Journal;

/// Bytes written after which they are brought to disk and recorded.
const JOURNAL_EVERY: u64 = 1 << 30;
/// The same, in time: what a run that is killed makes again.
const FLUSH_AFTER: Duration = Duration::from_secs(2);
/// Bytes written and not recorded at which workers wait for the disk.
const MOST_PENDING: u64 = 2 * JOURNAL_EVERY;

/// Brings a file of the result to disk.
pub(crate) type Sync<'a> = &'a (dyn Fn(u32) -> Result<()> + std::marker::Sync);

/// Tiles that are written and not yet recorded.
#[derive(Default)]
struct Pending {
    records: Vec<Vec<u8>>,
    /// Files that the records speak of.
    files: BTreeSet<u32>,
    bytes: u64,
    /// True while a thread flushes; without one, whoever comes to the limit does.
    has_thread: bool,
    /// What kept that thread from it.
    failed: Option<Error>,
}

/// What is written and not yet on disk.
pub(crate) struct Backlog<'a> {
    journal: &'a Journal,
    pending: Mutex<Pending>,
    changed: Condvar,
    /// Held by the one who flushes.
    flushing: Mutex<()>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Backlog<'a> {
    /// Nothing is written yet; what is brought to disk is recorded in `journal`.
    pub(crate) fn new(journal: &'a Journal) -> Self {
        Backlog { journal, pending: Mutex::default(), changed: Condvar::new(), flushing: Mutex::new(()) }
    }

    /// Takes the record of a tile of `bytes` bytes that was written to a file. Waits where the disk is far behind.
    ///
    /// # Errors
    /// What keeps earlier ones from being brought to disk.
    pub(crate) fn add(&self, record: Vec<u8>, file: u32, bytes: u64, sync: Sync) -> Result<()> {
        let mut pending = lock(&self.pending);
        while pending.has_thread && pending.failed.is_none() && pending.bytes >= MOST_PENDING {
            pending = self.changed.wait(pending).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(error) = pending.failed.take() {
            return Err(error);
        }
        pending.records.push(record);
        pending.files.insert(file);
        pending.bytes += bytes;
        let (is_full, has_thread) = (pending.bytes >= JOURNAL_EVERY, pending.has_thread);
        drop(pending);
        match (is_full, has_thread) {
            (true, true) => self.changed.notify_all(),
            (true, false) => self.flush(sync)?,
            (false, _) => {}
        }
        Ok(())
    }

    /// Takes a record of what is on disk already.
    pub(crate) fn add_synced(&self, record: Vec<u8>) {
        lock(&self.pending).records.push(record);
    }

    /// Brings data to disk, then says so: never the other way round.
    ///
    /// # Errors
    /// What keeps it from being brought there, or recorded.
    pub(crate) fn flush(&self, sync: Sync) -> Result<()> {
        let _one = lock(&self.flushing);
        let (records, files) = {
            let mut pending = lock(&self.pending);
            pending.bytes = 0;
            (std::mem::take(&mut pending.records), std::mem::take(&mut pending.files))
        };
        self.changed.notify_all();
        if records.is_empty() {
            return Ok(());
        }
        // What is in these records was written before they were taken, so these syncs cover it.
        files.into_iter().try_for_each(sync)?;
        self.journal.append_all(&records)?;
        self.journal.sync()
    }

    /// Does `work`, whose tiles a thread brings to disk meanwhile, now and then, until the run is stopped.
    ///
    /// # Errors
    /// What `work` says, or what keeps its tiles from being brought to disk.
    pub(crate) fn flush_during<T>(
        &self,
        sync: Sync,
        control: &Control,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let done = thread::scope(|scope| {
            lock(&self.pending).has_thread = true;
            let ending = Ending(self);
            // Where the system starts no more threads, those that write do it.
            if Builder::new()
                .name("fastshard-flush".into())
                .spawn_scoped(scope, || self.flush_often(sync, control))
                .is_err()
            {
                drop(ending);
                return work();
            }
            let done = work();
            drop(ending);
            done
        });
        match (done, lock(&self.pending).failed.take()) {
            (Ok(_), Some(failed)) => Err(failed),
            // A run that was stopped would go on with what the disk has lost.
            (Err(error), Some(failed)) if error.is_interrupt() => Err(failed),
            (done, _) => done,
        }
    }

    fn flush_often(&self, sync: Sync, control: &Control) {
        let _ending = Ending(self);
        loop {
            let waits = |pending: &mut Pending| pending.has_thread && pending.bytes < JOURNAL_EVERY;
            let waited = self.changed.wait_timeout_while(lock(&self.pending), FLUSH_AFTER, waits);
            let (pending, _) = waited.unwrap_or_else(PoisonError::into_inner);
            let has_ended = !pending.has_thread || !control.is_running();
            drop(pending);
            if has_ended {
                return;
            }
            if let Err(error) = self.flush(sync) {
                lock(&self.pending).failed = Some(error);
                return;
            }
        }
    }
}

/// Says that no thread flushes any more, after a panic too.
struct Ending<'a>(&'a Backlog<'a>);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        lock(&self.0.pending).has_thread = false;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::mpsc;

    use super::*;
    use crate::codes;
    use crate::error::Finding;
    use crate::publish::{Options, Staging};

    /// Bytes of a tile.
    const TILE: u64 = 64 << 20;

    fn begin(folder: &Path) -> Staging {
        let options = Options { resume: true, ..Options::default() };
        Staging::begin(&folder.join("out"), "0123456789abcdef0123456789abcdef", b"{}", &options).unwrap()
    }

    /// The records that an interrupted run left.
    fn find_recorded(folder: &Path) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        begin(folder).journal().replay(&mut |_, record| records.push(record.to_vec())).unwrap();
        records
    }

    #[test]
    fn writing_goes_on_while_a_file_is_brought_to_disk() {
        let folder = tempfile::tempdir().unwrap();
        let staging = begin(folder.path());
        let backlog = Backlog::new(staging.journal());
        let (begun, has_begun) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let may_go_on = Mutex::new(may_go_on);
        let sync = |file: u32| {
            begun.send(file).unwrap();
            // Until the sender is gone.
            let _ = lock(&may_go_on).recv();
            Ok(())
        };
        backlog
            .flush_during(&sync, &Control::default(), || {
                (0..JOURNAL_EVERY / TILE).try_for_each(|i| backlog.add(vec![i as u8], 7, TILE, &sync))?;
                assert_eq!(has_begun.recv().unwrap(), 7);
                // Nobody waits for this file, up to the bound.
                (0..MOST_PENDING / TILE).try_for_each(|i| backlog.add(vec![i as u8], 8, TILE, &sync))?;
                drop(go_on);
                backlog.add(vec![99], 8, TILE, &sync)
            })
            .unwrap();
    }

    #[test]
    fn nothing_is_recorded_before_it_is_on_disk() {
        let folder = tempfile::tempdir().unwrap();
        let staging = begin(folder.path());
        let backlog = Backlog::new(staging.journal());
        let fails = |_: u32| Err(Finding::new(codes::IO, "the disk is gone").into());
        let add = || (0..4 * MOST_PENDING / TILE).try_for_each(|_| backlog.add(vec![1], 0, TILE, &fails));
        let error = backlog.flush_during(&fails, &Control::default(), add).unwrap_err();
        assert_eq!(error.findings()[0].code, codes::IO);
        drop(staging);
        assert_eq!(find_recorded(folder.path()), Vec::<Vec<u8>>::new());
    }

    #[test]
    fn without_a_thread_whoever_comes_to_the_limit_flushes() {
        let folder = tempfile::tempdir().unwrap();
        let staging = begin(folder.path());
        let backlog = Backlog::new(staging.journal());
        let synced = Mutex::new(Vec::new());
        let sync = |file: u32| {
            lock(&synced).push(file);
            Ok(())
        };
        (0..JOURNAL_EVERY / TILE - 1).for_each(|_| backlog.add(vec![1], 3, TILE, &sync).unwrap());
        assert!(lock(&synced).is_empty());
        backlog.add(vec![1], 4, TILE, &sync).unwrap();
        assert_eq!(*lock(&synced), [3, 4]);
        drop(staging);
        assert_eq!(find_recorded(folder.path()).len() as u64, JOURNAL_EVERY / TILE);
    }
}
