//! The parts of files that go to a store: they are taken in order, as soon as they are made.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::FallocateFlags;

use crate::codes;
use crate::engine::{Control, TileDone};
use crate::error::{Error, Finding, Result};
use crate::hash::TileHashes;
use crate::memory;
use crate::plan::Output;
use crate::publish::content::HASHED;

/// Bytes that are made and not taken at which workers wait, if an upload has something to send.
const MOST_WAITING: u64 = 256 << 20;
/// The time between two looks at whether a run was stopped.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// How far a file has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nobody uploads it yet.
    Waiting,
    /// It is being uploaded.
    Sending,
    /// The store has it.
    Stored,
}

/// A file that is made and uploaded at the same time.
#[derive(Debug)]
pub(super) struct MadeFile {
    name: String,
    size: u64,
    file: Arc<File>,
    /// Bytes from its start that are made.
    frontier: u64,
    /// Ranges beyond that are made: end by start.
    ahead: BTreeMap<u64, u64>,
    /// Bytes from its start that were taken.
    taken: u64,
    /// Bytes of outputs that are not made.
    left: u64,
    /// Whether some of its outputs' bytes are made.
    is_begun: bool,
    /// Whether its end waits until all else of the result is stored.
    is_pointer: bool,
    stage: Stage,
    /// The outputs in it: their tiles' hashes, and the hash of each that is complete.
    hashes: BTreeMap<usize, (Option<TileHashes>, Option<[u8; 32]>)>,
    /// Whether bytes are final once they are made. Others are once the file is finished: checksums are written then.
    is_final: bool,
    /// The identity of a file that is finished.
    identity: Option<String>,
    /// The digest that an earlier run recorded, which has stored the file.
    recorded: Option<String>,
}

impl MadeFile {
    /// A file of which all is made but `outputs` (number and description).
    pub(super) fn new(
        name: &str,
        size: u64,
        file: File,
        outputs: &[(usize, &Output)],
        (is_final, is_pointer): (bool, bool),
        recorded: Option<&String>,
    ) -> MadeFile {
        let (recorded, identity) = match recorded.map(|content| content.split_once(' ')) {
            // Of a small file the bytes are hashed here: it is made again.
            _ if size <= HASHED => (None, None),
            Some(Some((digest, identity))) => (Some(digest.to_string()), Some(identity.to_string())),
            Some(None) if is_final => (recorded.cloned(), None),
            _ => (None, None),
        };
        let empty = TileHashes::new(1, 0).finish();
        let hash = |output: &Output| (None, if output.nbytes() == 0 { empty } else { None });
        let mut made = MadeFile {
            name: name.to_string(),
            size,
            file: Arc::new(file),
            frontier: 0,
            ahead: BTreeMap::new(),
            taken: 0,
            left: outputs.iter().map(|(_, output)| output.nbytes()).sum(),
            is_begun: false,
            is_pointer,
            stage: if recorded.is_some() { Stage::Stored } else { Stage::Waiting },
            hashes: outputs.iter().map(|(number, output)| (*number, hash(output))).collect(),
            is_final,
            identity,
            recorded,
        };
        let mut taken: Vec<(u64, u64)> = outputs
            .iter()
            .map(|(_, o)| (o.offset, o.offset + o.nbytes()))
            .filter(|(lo, hi)| lo < hi)
            .collect();
        taken.push((size, size));
        taken.sort_unstable();
        let mut at = 0;
        for (lo, hi) in taken {
            if at < lo {
                made.add(at, lo);
            }
            at = at.max(hi);
        }
        made
    }

    /// Takes note that bytes `lo` to `hi` are made.
    fn add(&mut self, lo: u64, hi: u64) {
        self.ahead.insert(lo, hi);
        while let Some(entry) = self.ahead.first_entry() {
            if *entry.key() > self.frontier {
                break;
            }
            self.frontier = self.frontier.max(entry.remove());
        }
    }

    /// The digest of its tensors, once all are made.
    fn digest(&self) -> Option<String> {
        let mut hasher = blake3::Hasher::new();
        for (_, hash) in self.hashes.values() {
            hasher.update(hash.as_ref()?);
        }
        Some(hasher.finalize().to_hex().to_string())
    }

    /// Whether an upload finds something to send.
    fn may_begin(&self) -> bool {
        self.stage == Stage::Waiting && self.is_final && (self.is_begun || self.left == 0)
    }
}

#[derive(Debug, Default)]
struct State {
    /// By their place in the plan; none for files that are uploaded once they are complete.
    files: Vec<Option<MadeFile>>,
    /// Bytes that are made and not taken.
    waiting: u64,
    /// Uploads that do not wait for bytes.
    busy: usize,
    /// True once a pointer may appear.
    may_appear: bool,
    /// What ended the uploads.
    failed: Option<Error>,
}

/// The files that are made and uploaded at the same time. Shared by those who make them and those who upload them.
#[derive(Debug, Default)]
pub(super) struct MadeFiles {
    state: Mutex<State>,
    changed: Condvar,
}

impl MadeFiles {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'s>(&self, state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
        self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Sets the files, by their place in the plan.
    pub(super) fn set(&self, files: Vec<Option<MadeFile>>) {
        self.lock().files = files;
        self.changed.notify_all();
    }

    /// True if file `number` is uploaded while it is made.
    pub(super) fn holds(&self, number: usize) -> bool {
        self.lock().files.get(number).is_some_and(Option::is_some)
    }

    /// True if an earlier run has stored file `number`, so that its bytes are only hashed.
    pub(super) fn is_stored(&self, number: usize) -> bool {
        let state = self.lock();
        state.files.get(number).and_then(Option::as_ref).is_some_and(|file| file.recorded.is_some())
    }

    /// Waits while much is made that no upload has taken.
    ///
    /// # Errors
    /// What ended the uploads.
    pub(super) fn wait_for_room(&self, control: &Control) -> Result<()> {
        let mut state = self.lock();
        // Where all uploads wait for bytes, only making more of them helps.
        while state.failed.is_none() && state.waiting > MOST_WAITING && state.busy > 0 {
            control.check_running()?;
            state = self.wait(state);
        }
        state.failed.clone().map_or(Ok(()), Err)
    }

    /// Takes note of a tile that is written to its file. True if that completes a file that is to be finished.
    ///
    /// # Errors
    /// What ended the uploads; `FS506` if an object that an earlier run has stored holds something else.
    pub(super) fn add_tile(&self, output: usize, about: &Output, tile: &TileDone) -> Result<bool> {
        let mut state = self.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let Some(file) = state.files.get_mut(about.file as usize).and_then(Option::as_mut) else {
            return Ok(false);
        };
        let start = tile.index * tile.size;
        let len = tile.size.min(about.nbytes() - start);
        if let Some((tiles, hash)) = file.hashes.get_mut(&output) {
            let tiles = tiles.get_or_insert_with(|| TileHashes::new(tile.size, about.nbytes()));
            tiles.add(tile.index, tile.value);
            *hash = tiles.finish();
        }
        file.add(about.offset + start, about.offset + start + len);
        file.left -= len;
        file.is_begun = true;
        if let (0, Some(recorded)) = (file.left, &file.recorded) {
            if file.digest().as_ref() != Some(recorded) {
                return Err(Finding::new(
                    codes::SOURCE_CHANGED,
                    "holds other tensors than the sources: they changed after the interrupted run had stored it",
                )
                .file(&file.name)
                .expected(recorded.clone(), file.digest().unwrap_or_default())
                .help("run again: the files of the interrupted run are gone")
                .into());
            }
        }
        let is_to_be_finished = file.left == 0 && !file.is_final && file.recorded.is_none();
        if file.recorded.is_none() {
            state.waiting += len;
        }
        drop(state);
        self.changed.notify_all();
        Ok(is_to_be_finished)
    }

    /// The hashes of the outputs in file `number`, all of which are made.
    pub(super) fn hashes(&self, number: usize) -> BTreeMap<usize, [u8; 32]> {
        let state = self.lock();
        let file = state.files[number].as_ref().expect("it is made here");
        file.hashes.iter().filter_map(|(output, (_, hash))| Some((*output, (*hash)?))).collect()
    }

    /// Lets file `number` be uploaded, all of which is written.
    pub(super) fn finish(&self, number: usize, identity: String) {
        let mut state = self.lock();
        let file = state.files[number].as_mut().expect("it is made here");
        (file.is_final, file.identity) = (true, Some(identity));
        drop(state);
        self.changed.notify_all();
    }

    /// The identity of file `number`, if it is finished.
    pub(super) fn identity(&self, number: usize) -> Option<String> {
        self.lock().files.get(number)?.as_ref()?.identity.clone()
    }

    /// Chooses a file to upload, and waits for one; none once each is taken or the uploads have ended. Returns its number,
    /// its name and its parts.
    pub(super) fn choose(self: &Arc<Self>) -> Option<(usize, String, FileParts)> {
        let mut state = self.lock();
        loop {
            let of_any = |state: &State, is: fn(&MadeFile) -> bool| {
                state.files.iter().position(|file| file.as_ref().is_some_and(is))
            };
            if state.failed.is_some() || of_any(&state, |file| file.stage == Stage::Waiting).is_none() {
                return None;
            }
            if let Some(number) = of_any(&state, MadeFile::may_begin) {
                state.busy += 1;
                let file = state.files[number].as_mut().expect("it was chosen");
                file.stage = Stage::Sending;
                let parts = FileParts { size: file.size, source: Source::Made(Arc::clone(self), number) };
                return Some((number, file.name.clone(), parts));
            }
            state = self.wait(state);
        }
    }

    /// Returns what is recorded of file `number`, all of which was taken: the digest of its tensors, and its identity if it was
    /// finished. None for a pointer, which no later run finds complete.
    ///
    /// # Errors
    /// `FS520` if some of it was not taken.
    pub(super) fn content(&self, number: usize) -> Result<Option<String>> {
        let state = self.lock();
        let file = state.files[number].as_ref().expect("it was uploaded");
        if file.taken != file.size {
            let unread = Finding::new(codes::INTERNAL, "an upload ended before it had taken all parts");
            return Err(unread.file(&file.name).into());
        }
        let content = file.digest().map(|digest| match &file.identity {
            Some(identity) => format!("{digest} {identity}"),
            None => digest,
        });
        Ok(content.filter(|_| !file.is_pointer))
    }

    /// Ends the upload of file `number`.
    pub(super) fn end_upload(&self, number: usize, done: Result<()>) {
        let mut state = self.lock();
        state.busy -= 1;
        if let Err(error) = done {
            state.failed.get_or_insert(error);
        } else {
            state.files[number].as_mut().expect("it was uploaded").stage = Stage::Stored;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends all uploads.
    pub(super) fn stop(&self, error: Error) {
        self.lock().failed.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Waits until the store has all files, without the pointer unless it `may_appear`.
    ///
    /// # Errors
    /// What ended the uploads.
    pub(super) fn wait_until_stored(&self, may_appear: bool, control: &Control) -> Result<()> {
        let mut state = self.lock();
        state.may_appear |= may_appear;
        self.changed.notify_all();
        let is_open = |file: &MadeFile| file.stage != Stage::Stored && (may_appear || !file.is_pointer);
        while state.failed.is_none() && state.files.iter().flatten().any(is_open) {
            control.check_running()?;
            state = self.wait(state);
        }
        state.failed.clone().map_or(Ok(()), Err)
    }

    /// Takes the next `len` bytes of a file, and waits until they are made.
    fn take(&self, number: usize, len: usize) -> Result<Option<Vec<u8>>> {
        let mut state = self.lock();
        let (file, start, end) = loop {
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            let may_appear = state.may_appear;
            let file = state.files[number].as_ref().expect("it is being uploaded");
            let end = file.size.min(file.taken + len as u64);
            if file.taken == file.size && file.size > 0 {
                return Ok(None);
            }
            if file.frontier >= end && (end < file.size || !file.is_pointer || may_appear) {
                break (Arc::clone(&file.file), file.taken, end);
            }
            state.busy -= 1;
            state = self.wait(state);
            state.busy += 1;
        };
        let is_hashed_whole = state.files[number].as_ref().is_some_and(|file| file.size <= HASHED);
        drop(state);
        let bytes = read_range(&file, start, end)?;
        if end > start && !is_hashed_whole {
            // What was taken needs no room here; where a file system knows no holes it stays.
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(&*file, how, start, end - start);
        }
        let mut state = self.lock();
        state.waiting = state.waiting.saturating_sub(end - start);
        let file = state.files[number].as_mut().expect("it is being uploaded");
        file.taken = end;
        drop(state);
        self.changed.notify_all();
        Ok((end > start).then_some(bytes))
    }
}

fn read_range(file: &File, start: u64, end: u64) -> Result<Vec<u8>> {
    let mut bytes = memory::allocate((end - start) as usize)?;
    file.read_exact_at(&mut bytes, start).map_err(|error| {
        Error::io(std::path::Path::new("the staging directory"), "cannot read back", &error)
    })?;
    Ok(bytes)
}

#[derive(Debug)]
enum Source {
    /// A file that is made meanwhile.
    Made(Arc<MadeFiles>, usize),
    /// A complete file, the bytes of it that were taken, and whether the run has ended meanwhile.
    Complete(File, Mutex<u64>, Arc<AtomicBool>),
}

/// The bytes of a file for its upload, in order.
#[derive(Debug)]
pub struct FileParts {
    size: u64,
    source: Source,
}

impl FileParts {
    /// The parts of a complete file of `size` bytes, whose upload is to end once `has_ended` says so.
    pub(super) fn of_file(file: File, size: u64, has_ended: &Arc<AtomicBool>) -> FileParts {
        FileParts { size, source: Source::Complete(file, Mutex::new(0), Arc::clone(has_ended)) }
    }

    /// True once the run has ended, so that nobody waits for the upload any more.
    pub fn has_ended(&self) -> bool {
        match &self.source {
            Source::Made(files, _) => files.lock().failed.is_some(),
            Source::Complete(_, _, has_ended) => has_ended.load(Ordering::Relaxed),
        }
    }

    /// Bytes of the file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Takes the next `len` bytes, fewer at the end and none after it. Waits until they are made.
    ///
    /// # Errors
    /// What ended the run; those of the system.
    pub fn take(&self, len: usize) -> Result<Option<Vec<u8>>> {
        match &self.source {
            Source::Made(files, number) => files.take(*number, len),
            Source::Complete(file, taken, _) => {
                let mut taken = taken.lock().unwrap_or_else(PoisonError::into_inner);
                let end = self.size.min(*taken + len as u64);
                let bytes = read_range(file, *taken, end)?;
                *taken = end;
                Ok((!bytes.is_empty()).then_some(bytes))
            }
        }
    }
}
