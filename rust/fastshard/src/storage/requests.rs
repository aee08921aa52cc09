//! Files of a store, read by requests that each take long.
//!
//! What a request brings beyond a read is kept for the next ones. Where reading goes on for long, the following requests are
//! made ahead, by threads that only wait.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use super::remote::{Provider, Ranges};
use super::BlockBytes;
use crate::codes;
use crate::error::{Finding, Result};

/// Minimum bytes of a request, and its maximum if reading continues.
const LEAST: u64 = 256 << 10;
const MOST: u64 = 8 << 20;
/// Bytes of a read from which a request brings nothing beyond it.
const LONG: u64 = 1 << 20;
/// Requests that are made ahead at the same time, and of them those for one reader that reads on.
const AHEAD: usize = 32;
const AHEAD_OF_ONE: usize = 2;
/// Bytes between two announced ranges at which one request brings both.
const GAP: u64 = 64 << 10;
/// Requests of the longest kind that fit into the room.
const PARTS_OF_ROOM: u64 = 16;
/// Places in a file at which readers continue, at most.
const STREAMS: usize = 16;

/// Requests bytes of a store.
pub trait Requests: Debug + Send + Sync {
    /// Returns `len` bytes of a file from `offset`. Several threads call it.
    ///
    /// # Errors
    /// The reason why they do not arrive; `FS506` for a file that is not the listed one any more.
    fn request(&self, file: u32, offset: u64, len: usize) -> Result<Box<dyn BlockBytes>>;
}

/// A file as a store lists it.
#[derive(Debug, Clone)]
pub struct Listed {
    /// Its path below the root.
    pub path: String,
    /// Size in bytes.
    pub size: u64,
    /// Modification time in nanoseconds since the epoch.
    pub mtime_ns: i64,
}

/// Bytes of a file that one request brings; none while it is under way.
#[derive(Debug)]
struct Segment {
    len: u64,
    bytes: Option<Arc<dyn BlockBytes>>,
    /// When it was last read, as a count of reads.
    used: u64,
    /// True while it is requested ahead of its readers.
    is_ahead: bool,
    /// True once somebody has read its end.
    is_read: bool,
}

/// A place up to which a file was requested, and the length of that request.
#[derive(Debug, Clone, Copy)]
struct Stream {
    end: u64,
    step: u64,
}

#[derive(Debug, Default)]
struct State {
    /// Segments by file and first byte; they do not overlap.
    segments: BTreeMap<(u32, u64), Segment>,
    /// Bytes of all segments that are here, and of those that are requested ahead.
    kept: u64,
    coming: u64,
    reads: u64,
    streams: HashMap<u32, Vec<Stream>>,
}

/// The files of a root in a store.
#[derive(Debug)]
pub struct StoreFiles {
    requests: Box<dyn Requests>,
    folder: PathBuf,
    name: String,
    files: Vec<Listed>,
    numbers: HashMap<PathBuf, u32>,
    /// Maximum of bytes that are kept.
    room: u64,
    state: Mutex<State>,
    arrived: Condvar,
    ahead: Mutex<Ahead>,
    /// The process that made requests last: what is under way in its parent never arrives in a forked one.
    process: AtomicU32,
    /// The longest request.
    most: u64,
    count: AtomicU64,
    bytes: AtomicU64,
}

/// A request to make ahead: a file, its first byte, and one past the last.
type Wanted = (u32, u64, u64);

/// Threads that make requests ahead.
#[derive(Debug, Default)]
enum Ahead {
    #[default]
    NotYet,
    Begun {
        wanted: Sender<Wanted>,
        threads: Vec<JoinHandle<()>>,
    },
    Stopped,
}

impl StoreFiles {
    /// The `files` of a store with placeholders below `folder`, a path without links. `name` is their root for
    /// users; `room` limits the bytes that are kept between reads.
    pub fn new(
        folder: PathBuf,
        name: String,
        files: Vec<Listed>,
        room: u64,
        requests: Box<dyn Requests>,
    ) -> Arc<StoreFiles> {
        let numbers = files.iter().enumerate().map(|(i, file)| (folder.join(&file.path), i as u32)).collect();
        let state = Mutex::default();
        let (count, bytes) = Default::default();
        Arc::new(StoreFiles {
            requests,
            folder,
            name,
            files,
            numbers,
            room,
            state,
            arrived: Condvar::new(),
            ahead: Mutex::default(),
            process: AtomicU32::new(std::process::id()),
            most: (room / PARTS_OF_ROOM).clamp(LEAST, MOST),
            count,
            bytes,
        })
    }

    /// Number of requests so far, and the bytes that they asked for.
    pub fn counts(&self) -> (u64, u64) {
        (self.count.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the threads that make requests ahead; reads go on without them.
    pub fn stop(&self) {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let Ahead::Begun { wanted, threads } = std::mem::replace(&mut *ahead, Ahead::Stopped) else { return };
        drop((ahead, wanted));
        if self.process.load(Ordering::Relaxed) != std::process::id() {
            // They are threads of the parent.
            return std::mem::forget(threads);
        }
        threads.into_iter().for_each(|thread| drop(thread.join()));
    }

    /// Releases the bytes that are kept between reads.
    pub fn forget(&self) {
        let mut state = self.lock();
        state.segments.retain(|_, segment| segment.bytes.is_none());
        state.kept = 0;
    }

    /// Forgets what the process that this one was forked from has under way.
    fn leave_parent(&self) {
        let process = std::process::id();
        if self.process.swap(process, Ordering::Relaxed) == process {
            return;
        }
        let mut state = self.lock();
        state.segments.retain(|_, segment| segment.bytes.is_some());
        state.coming = 0;
        drop(state);
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(std::mem::take(&mut *ahead));
    }

    /// Fills `into` from `offset` of a file.
    fn read(self: &Arc<Self>, file: u32, offset: u64, into: &mut [u8]) -> Result<()> {
        self.leave_parent();
        let end = offset + into.len() as u64;
        let mut at = offset;
        while at < end {
            let (first, bytes) = self.segment(file, at, end)?;
            let until = (first + bytes.bytes().len() as u64).min(end);
            let part = &bytes.bytes()[(at - first) as usize..(until - first) as usize];
            into[(at - offset) as usize..(until - offset) as usize].copy_from_slice(part);
            at = until;
        }
        Ok(())
    }

    /// The segment with byte `at` of a file, requested if it is not here, for a read up to `end`.
    fn segment(self: &Arc<Self>, file: u32, at: u64, end: u64) -> Result<(u64, Arc<dyn BlockBytes>)> {
        let size = self.files[file as usize].size;
        let mut state = self.lock();
        loop {
            state.reads += 1;
            let now = state.reads;
            let before = state.segments.range_mut((file, 0)..=(file, at)).next_back();
            match before.filter(|(key, segment)| at < key.1 + segment.len) {
                Some((&(_, first), segment)) => match &segment.bytes {
                    Some(bytes) => {
                        segment.used = now;
                        segment.is_read |= end >= first + segment.len;
                        let found = (first, Arc::clone(bytes));
                        let wanted = state.choose_ahead(
                            file,
                            first + segment_len(&found.1),
                            size,
                            self.room,
                            self.most,
                        );
                        drop(state);
                        self.request_ahead(wanted);
                        return Ok(found);
                    }
                    None => state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner),
                },
                None => break,
            }
        }
        let hi = state.choose_end(file, at, end, size, self.most);
        state.segments.insert(
            (file, at),
            Segment { len: hi - at, bytes: None, used: u64::MAX, is_ahead: false, is_read: false },
        );
        let wanted = state.choose_ahead(file, hi, size, self.room, self.most);
        drop(state);
        self.request_ahead(wanted);
        let bytes = self.request(file, at, hi, hi > end || hi - at < LEAST)?;
        Ok((at, bytes))
    }

    /// Makes requests for ranges of a file (first byte, one past the last) that are read soon, as far as there is room.
    fn will_read(self: &Arc<Self>, file: u32, ranges: &[(u64, u64)]) {
        self.leave_parent();
        let size = self.files[file as usize].size;
        let mut state = self.lock();
        let wanted = state.choose_announced(file, ranges, size, self.room, self.most);
        drop(state);
        self.request_ahead(wanted);
    }

    /// Requests the bytes of a segment that is under way, and hands them to those who wait for them.
    fn request(&self, file: u32, at: u64, hi: u64, keep: bool) -> Result<Arc<dyn BlockBytes>> {
        // Other readers wait for its end, even if this thread panics.
        let waiting = Waiting { store: self, key: (file, at) };
        self.count.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(hi - at, Ordering::Relaxed);
        let bytes: Arc<dyn BlockBytes> = self.requests.request(file, at, (hi - at) as usize)?.into();
        if segment_len(&bytes) != hi - at {
            let what = "the store sent another number of bytes";
            return Err(Finding::new(codes::INTERNAL, what)
                .file(&self.files[file as usize].path)
                .expected(hi - at, segment_len(&bytes))
                .into());
        }
        waiting.arrive(Arc::clone(&bytes), keep);
        Ok(bytes)
    }

    /// Has threads make requests whose segments are under way.
    fn request_ahead(self: &Arc<Self>, wanted: Vec<Wanted>) {
        if wanted.is_empty() {
            return;
        }
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*ahead, Ahead::NotYet) {
            *ahead = Ahead::begin(self);
        }
        for one in wanted {
            let is_sent = match &*ahead {
                Ahead::Begun { wanted, threads } => !threads.is_empty() && wanted.send(one).is_ok(),
                Ahead::NotYet | Ahead::Stopped => false,
            };
            if !is_sent {
                drop(Waiting { store: self, key: (one.0, one.1) });
            }
        }
    }
}

fn segment_len(bytes: &Arc<dyn BlockBytes>) -> u64 {
    bytes.bytes().len() as u64
}

impl Ahead {
    fn begin(store: &Arc<StoreFiles>) -> Ahead {
        let (wanted, receiver) = channel();
        let receiver = Arc::new(Mutex::new(receiver));
        let threads = (0..AHEAD).filter_map(|_| {
            let (store, receiver) = (Arc::downgrade(store), Arc::clone(&receiver));
            let thread = std::thread::Builder::new().name("fastshard-ahead".into());
            thread.spawn(move || work_ahead(&store, &receiver)).ok()
        });
        Ahead::Begun { wanted, threads: threads.collect() }
    }
}

/// Makes requests until nobody wants more. Whoever reads the bytes makes a request that failed again, and gets the reason.
fn work_ahead(store: &Weak<StoreFiles>, receiver: &Mutex<Receiver<Wanted>>) {
    loop {
        let wanted = receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((file, at, hi)) = wanted else { return };
        let Some(store) = store.upgrade() else { return };
        drop(store.request(file, at, hi, true));
    }
}

/// A segment under way, which is taken back unless it arrives.
struct Waiting<'a> {
    store: &'a StoreFiles,
    key: (u32, u64),
}

impl Waiting<'_> {
    /// Hands the bytes to those who wait for them; keeps them for later reads if `keep`.
    fn arrive(self, bytes: Arc<dyn BlockBytes>, keep: bool) {
        let mut state = self.store.lock();
        let now = state.reads;
        if let Some(segment) = state.segments.get_mut(&self.key).filter(|_| keep) {
            let len = segment.len;
            let was_ahead = std::mem::take(&mut segment.is_ahead);
            (segment.bytes, segment.used) = (Some(bytes), now);
            state.kept += len;
            state.coming -= if was_ahead { len } else { 0 };
            state.make_room(self.store.room);
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.store.lock();
        if let Some(segment) = state.segments.get(&self.key).filter(|segment| segment.bytes.is_none()) {
            state.coming -= if segment.is_ahead { segment.len } else { 0 };
            state.segments.remove(&self.key);
        }
        drop(state);
        self.store.arrived.notify_all();
    }
}

impl State {
    /// Chooses the end of a request for byte `at` of a file, for a read up to `end`: the longer, the longer reading has gone
    /// on from there.
    fn choose_end(&mut self, file: u32, at: u64, end: u64, size: u64, most: u64) -> u64 {
        let next = self.segments.range((file, at)..=(file, u64::MAX)).next().map_or(size, |(key, _)| key.1);
        let streams = self.streams.entry(file).or_default();
        // A reader that leaves out less than it asked for last reads on, unless it takes long parts of something else.
        let is_long = end - at >= LONG;
        let gap = |s: &Stream| if is_long { 0 } else { s.step };
        let known = streams.iter().position(|s| s.end <= at && at - s.end <= gap(s));
        let step = known.map_or(LEAST, |i| (streams.remove(i).step * 2).min(most));
        let until = if is_long { end } else { end.max(at + step) };
        let hi = until.min(at + most).min(next).min(size);
        if streams.len() == STREAMS {
            streams.remove(0);
        }
        streams.push(Stream { end: hi, step });
        hi
    }

    /// Chooses the requests to make ahead of a reader that has come to a segment which ends at `next`, if reading has gone on
    /// for long: their segments are under way from now on.
    fn choose_ahead(&mut self, file: u32, mut next: u64, size: u64, room: u64, most: u64) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        let is_long =
            |s: &Stream| s.step >= most && s.end <= next + AHEAD_OF_ONE as u64 * most && s.end >= next;
        let Some(at) = self.streams.get(&file).and_then(|streams| streams.iter().position(is_long)) else {
            return wanted;
        };
        for _ in 0..AHEAD_OF_ONE {
            if let Some(segment) = self.segments.get(&(file, next)) {
                next += segment.len;
                continue;
            }
            let begins = |(key, _): (&(u32, u64), &Segment)| key.1;
            let until = self.segments.range((file, next)..=(file, u64::MAX)).next().map_or(size, begins);
            let hi = (next + most).min(until).min(size);
            // Half of the room is for what readers come back to.
            if hi <= next || self.coming + (hi - next) > room / 2 {
                break;
            }
            self.coming += hi - next;
            self.segments.insert(
                (file, next),
                Segment { len: hi - next, bytes: None, used: u64::MAX, is_ahead: true, is_read: false },
            );
            wanted.push((file, next, hi));
            next = hi;
        }
        if let Some(stream) = self.streams.get_mut(&file).and_then(|streams| streams.get_mut(at)) {
            stream.end = stream.end.max(next);
        }
        wanted
    }

    /// Chooses the requests for announced ranges of a file, which come in their order: their segments are under way from now
    /// on. What is here or under way is left out, and what finds no room.
    fn choose_announced(
        &mut self,
        file: u32,
        ranges: &[(u64, u64)],
        size: u64,
        room: u64,
        most: u64,
    ) -> Vec<Wanted> {
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for &(lo, hi) in ranges {
            match joined.last_mut() {
                Some(last) if lo >= last.0 && lo <= last.1 + GAP && hi - last.0 <= most => {
                    last.1 = last.1.max(hi)
                }
                _ => joined.push((lo, hi)),
            }
        }
        let mut wanted = Vec::new();
        for (lo, hi) in joined {
            let before = self.segments.range((file, 0)..=(file, lo)).next_back();
            let at = before.map_or(lo, |(key, segment)| lo.max(key.1 + segment.len));
            let next =
                self.segments.range((file, at)..=(file, u64::MAX)).next().map_or(size, |(key, _)| key.1);
            let hi = hi.min(next).min(size);
            if at >= hi || self.coming + (hi - at) > room / 2 {
                continue;
            }
            self.coming += hi - at;
            self.segments.insert(
                (file, at),
                Segment { len: hi - at, bytes: None, used: u64::MAX, is_ahead: true, is_read: false },
            );
            wanted.push((file, at, hi));
        }
        wanted
    }

    /// Removes the segments that were not read for the longest time, until the others take no more than `room`.
    fn make_room(&mut self, room: u64) {
        while self.kept > room {
            let here = self.segments.iter().filter(|(_, segment)| segment.bytes.is_some());
            let Some((&key, _)) = here.min_by_key(|(_, segment)| (!segment.is_read, segment.used)) else {
                return;
            };
            let len = self.segments.remove(&key).map_or(0, |segment| segment.len);
            self.kept -= len;
        }
    }
}

/// A file of a store, for its readers.
#[derive(Debug)]
struct StoreFile {
    store: Arc<StoreFiles>,
    number: u32,
}

impl Ranges for StoreFile {
    fn identity(&self) -> Option<(u64, i64)> {
        let listed = &self.store.files[self.number as usize];
        Some((listed.size, listed.mtime_ns))
    }

    fn is_lent(&self) -> bool {
        false
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.store.read(self.number, offset, bytes)
    }

    fn will_read(&self, ranges: &[(u64, u64)], _now: bool) -> Result<()> {
        self.store.will_read(self.number, ranges);
        Ok(())
    }
}

/// Provides the files of a store to those who open their placeholders.
#[derive(Debug)]
pub struct StoreProvider(pub Arc<StoreFiles>);

impl Provider for StoreProvider {
    fn file(&self, path: &Path) -> Option<Arc<dyn Ranges>> {
        let number = *self.0.numbers.get(path)?;
        Some(Arc::new(StoreFile { store: Arc::clone(&self.0), number }))
    }

    fn name(&self, folder: &Path) -> Option<String> {
        (folder == self.0.folder).then(|| self.0.name.clone())
    }

    fn interrupt(&self) {}
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// The bytes of one file, and the requests for them (offset, length).
    #[derive(Debug)]
    struct Memory {
        content: Vec<u8>,
        asked: Asked,
        fails: AtomicBool,
    }

    impl Requests for Memory {
        fn request(&self, _: u32, offset: u64, len: usize) -> Result<Box<dyn BlockBytes>> {
            self.asked.lock().unwrap().push((offset, len));
            if self.fails.swap(false, Ordering::Relaxed) {
                return Err(Finding::new(codes::SOURCE_CHANGED, "replaced").into());
            }
            Ok(Box::new(self.content[offset as usize..offset as usize + len].to_vec()))
        }
    }

    type Asked = Arc<Mutex<Vec<(u64, usize)>>>;

    fn store(size: usize, room: u64, fails: bool) -> (Arc<dyn Ranges>, Vec<u8>, Asked) {
        let content: Vec<u8> = (0..size).map(|i| ((i * 2_654_435_761) >> 7) as u8).collect();
        let asked = Asked::default();
        let requests = Memory { content: content.clone(), asked: Arc::clone(&asked), fails: fails.into() };
        let listed = Listed { path: "a/b".into(), size: size as u64, mtime_ns: 5 };
        let files = StoreFiles::new("/r".into(), "s3://x".into(), vec![listed], room, Box::new(requests));
        (StoreProvider(files).file(Path::new("/r/a/b")).unwrap(), content, asked)
    }

    #[test]
    fn reads_are_exact_and_requests_grow() {
        let (file, content, asked) = store(20 << 20, 64 << 20, false);
        assert_eq!(file.identity(), Some((20 << 20, 5)));
        let mut at = 0;
        while at < content.len() {
            let mut bytes = vec![0; 5000.min(content.len() - at)];
            file.read(at as u64, &mut bytes).unwrap();
            assert!(bytes == content[at..at + bytes.len()]);
            at += bytes.len();
        }
        let asked = asked.lock().unwrap();
        assert_eq!(asked[0], (0, 256 << 10));
        assert!(asked.len() < 10, "{asked:?}");
        // No byte is asked for twice.
        assert_eq!(asked.iter().map(|(_, len)| len).sum::<usize>(), content.len());
    }

    #[test]
    fn strided_reads_by_threads_are_exact_in_little_room() {
        let (file, content, _) = store(6 << 20, 1 << 20, false);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (file, content) = (&file, &content);
                scope.spawn(move || {
                    for row in 0..700 {
                        let at = row * 8192 + thread * 2048;
                        let mut bytes = [0; 2048];
                        file.read(at as u64, &mut bytes).unwrap();
                        assert!(bytes[..] == content[at..at + 2048]);
                    }
                });
            }
        });
    }

    #[test]
    fn announced_ranges_are_requested_once_and_no_more_than_they_are() {
        let (file, content, asked) = store(8 << 20, 4 << 20, false);
        // The second begins in the first, the third joins it, the fifth ends beyond the file.
        let end = 8 << 20;
        let ranges = [(0, 100), (50, 200), (1000, 1100), (3 << 20, (3 << 20) + 10), (end - 5, end + 50)];
        file.will_read(&ranges, true).unwrap();
        for &(lo, hi) in &ranges {
            let hi = hi.min(end);
            let mut bytes = vec![0; (hi - lo) as usize];
            file.read(lo, &mut bytes).unwrap();
            assert!(bytes == content[lo as usize..hi as usize]);
        }
        // What is here is not requested again.
        file.will_read(&ranges, true).unwrap();
        let mut asked = asked.lock().unwrap().clone();
        asked.sort_unstable();
        assert_eq!(asked, [(0, 1100), (3 << 20, 10), (end - 5, 5)]);
    }

    #[test]
    fn announced_ranges_that_find_no_room_are_requested_when_they_are_read() {
        let (file, content, asked) = store(8 << 20, 1 << 20, false);
        file.will_read(&[(0, 4 << 20)], true).unwrap();
        assert!(asked.lock().unwrap().is_empty());
        let mut bytes = [0; 8];
        file.read(1 << 20, &mut bytes).unwrap();
        assert!(bytes == content[1 << 20..(1 << 20) + 8]);
    }

    #[test]
    fn a_failed_request_is_made_again_by_the_next_reader() {
        // In little room the next request would be made ahead, and be the one that fails.
        let (file, content, asked) = store(1 << 20, 64 << 20, true);
        let mut bytes = [0; 8];
        let error = file.read(0, &mut bytes).unwrap_err();
        assert_eq!(error.findings()[0].code, codes::SOURCE_CHANGED);
        file.read(0, &mut bytes).unwrap();
        assert!(bytes == content[..8] && asked.lock().unwrap().len() == 2);
    }
}
