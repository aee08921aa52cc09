//! Files of a store, read by requests that each take long.
//!
//! What a plan reads is scheduled: it is requested by threads that only wait, and goes when it is read. What a request brings
//! beyond any other read is kept for the next ones, and where reading goes on for long, the following requests are made ahead.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::remote::{Provider, Ranges, Readers};
use super::BlockBytes;
use crate::codes;
use crate::error::{Error, Finding, Result};

/// Minimum bytes of a request, and its maximum if reading continues.
const LEAST: u64 = 256 << 10;
const MOST: u64 = 8 << 20;
/// Bytes of a read from which a request brings nothing beyond it.
const LONG: u64 = 1 << 20;
/// Requests that are made ahead at the same time, and of them those for one reader that reads on.
const AHEAD: usize = 64;
const AHEAD_OF_ONE: usize = 2;
/// Bytes between two announced or scheduled ranges at which one request brings both.
pub(crate) const GAP: u64 = 64 << 10;
/// Requests of the longest kind that fit into the room: at first, and once bytes had to be requested twice.
const FEWEST_IN_ROOM: u64 = 4;
const MOST_IN_ROOM: u64 = 16;
/// Requests after which one that was made ahead, and whose bytes nobody has read, was made in vain.
const PATIENCE: u64 = 64;
/// How long to wait for room before the readers are looked at again.
const WAIT: Duration = Duration::from_millis(20);
/// Ranges that are remembered after they had to go.
const EVICTED: usize = 64;
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

/// Why a segment is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// A reader waits for it.
    Demanded,
    /// Readers may come to it.
    Ahead,
    /// Reads of so many bytes follow.
    Scheduled(u64),
}

/// Bytes of a file that one request brings; none while it is under way.
#[derive(Debug)]
struct Segment {
    /// Its number: another one may come to its place.
    id: u64,
    len: u64,
    bytes: Option<Arc<dyn BlockBytes>>,
    /// When it was last read, as a count of reads.
    used: u64,
    /// True if it was requested ahead of its readers, until one comes.
    is_ahead: bool,
    /// True if a reader asked for it, until it comes.
    is_demanded: bool,
    /// True once its request is made.
    is_begun: bool,
    /// When its bytes came, as a count of requests.
    came: u64,
    /// True once somebody has read its end.
    is_read: bool,
    /// Bytes of scheduled reads that have not come yet. It goes when they have.
    due: Option<u64>,
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
    /// Bytes of the segments that are here and wait for nobody, of those that wait for scheduled reads, here or not, and of
    /// those that were requested ahead of their readers, here or not.
    kept: u64,
    scheduled: u64,
    ahead: u64,
    /// Bytes of those under way that a reader asked for.
    demanded: u64,
    reads: u64,
    requests: u64,
    /// The longest request.
    most: u64,
    /// What had to go before all of it was read, the last first: file, first byte, one past the last.
    evicted: VecDeque<(u32, u64, u64)>,
    streams: HashMap<u32, Vec<Stream>>,
    /// Files whose content is another one than the store states, as a request that nobody waited for has shown.
    wrong: HashMap<u32, Error>,
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
    has_stopped: AtomicBool,
    count: AtomicU64,
    bytes: AtomicU64,
}

/// A request to make ahead, for a segment.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    file: u32,
    at: u64,
    hi: u64,
    id: u64,
}

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
        let most = (room / FEWEST_IN_ROOM).clamp(LEAST, MOST);
        let state = Mutex::new(State { most, ..State::default() });
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
            has_stopped: AtomicBool::new(false),
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

    /// Ends the threads that make requests ahead, and leaves out what they have not begun; reads go on without them.
    pub fn stop(&self) {
        self.has_stopped.store(true, Ordering::Relaxed);
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
        state.retain(|segment| segment.bytes.is_none());
    }

    /// Forgets what the process that this one was forked from has under way.
    fn leave_parent(&self) {
        let process = std::process::id();
        if self.process.swap(process, Ordering::Relaxed) == process {
            return;
        }
        let mut state = self.lock();
        state.retain(|segment| segment.bytes.is_some());
        state.unschedule();
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
            let State { segments, ahead, .. } = &mut *state;
            let before = segments.range_mut((file, 0)..=(file, at)).next_back();
            match before.filter(|(key, segment)| at < key.1 + segment.len) {
                Some((&(_, first), segment)) => {
                    if std::mem::take(&mut segment.is_ahead) {
                        *ahead -= segment.len;
                    }
                    let Some(bytes) = &segment.bytes else {
                        state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
                        continue;
                    };
                    segment.used = now;
                    segment.is_read |= end >= first + segment.len;
                    let found = (first, Arc::clone(bytes));
                    if let Some(due) = &mut segment.due {
                        *due = due.saturating_sub(end.min(first + segment.len) - at);
                        if *due == 0 {
                            state.remove((file, first));
                            self.arrived.notify_all();
                        }
                        return Ok(found);
                    }
                    let wanted = state.choose_ahead(file, first + segment_len(&found.1), size, self.room);
                    drop(state);
                    self.request_ahead(wanted);
                    return Ok(found);
                }
                None => break,
            }
        }
        let hi = state.choose_end(file, at, end, size, self.room);
        let one = state.expect(file, at, hi, Why::Demanded);
        let wanted = state.choose_ahead(file, hi, size, self.room);
        drop(state);
        self.request_ahead(wanted);
        let bytes = self.request(one, hi > end || hi - at < LEAST)?;
        Ok((at, bytes))
    }

    /// Makes requests for ranges of a file (first byte, one past the last) that are read soon, as far as there is room.
    fn will_read(self: &Arc<Self>, file: u32, ranges: &[(u64, u64)]) {
        self.leave_parent();
        let size = self.files[file as usize].size;
        let mut state = self.lock();
        let wanted = state.choose_announced(file, ranges, size, self.room);
        drop(state);
        self.request_ahead(wanted);
    }

    /// Requests what reads of a file take, all at once, when there is room for it.
    fn schedule(self: &Arc<Self>, file: u32, mut reads: Vec<(u64, u64)>, readers: &dyn Fn() -> Readers) {
        self.leave_parent();
        reads.sort_unstable();
        let size = self.files[file as usize].size;
        let (mut state, room) = (self.lock(), self.schedule_room());
        let mut bytes = 0;
        let covered = loop {
            let readers = readers();
            if readers == Readers::Stopped {
                return;
            }
            if state.scheduled + bytes <= room {
                let covered = state.cover(file, &reads, size);
                bytes = covered.iter().map(|(lo, hi, _)| hi - lo).sum();
                if bytes > room {
                    return;
                }
                if state.scheduled + bytes <= room {
                    break covered;
                }
            }
            if readers == Readers::Idle {
                // They have read other bytes than were listed.
                state.unschedule();
            }
            state = self.arrived.wait_timeout(state, WAIT).unwrap_or_else(PoisonError::into_inner).0;
        };
        state.add_due(file, &reads);
        let expect = |(lo, hi, due)| state.expect(file, lo, hi, Why::Scheduled(due));
        let wanted = covered.into_iter().map(expect).collect();
        state.make_room(self.room);
        drop(state);
        self.request_ahead(wanted);
    }

    /// Bytes of the room that scheduled reads may take: the rest is for others.
    fn schedule_room(&self) -> u64 {
        self.room / 4 * 3
    }

    /// Leaves what is scheduled to those who come across it, and requests no more of it.
    fn end_schedule(&self) {
        let mut state = self.lock();
        if state.scheduled > 0 {
            state.retain(|segment| segment.due.is_none() || segment.is_begun);
            state.unschedule();
            state.make_room(self.room);
        }
        drop(state);
        self.arrived.notify_all();
    }

    /// Requests the bytes of a segment that is under way, and hands them to those who wait for them.
    fn request(&self, one: Wanted, keep: bool) -> Result<Arc<dyn BlockBytes>> {
        let Wanted { file, at, hi, id } = one;
        // Other readers wait for its end, even if this thread panics.
        let waiting = Waiting { store: self, key: (file, at), id };
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

    /// True if a request is still to be made: not where nobody wants its segment any more, or requests have ended.
    fn begin(&self, one: Wanted) -> bool {
        let mut state = self.lock();
        let key = (one.file, one.at);
        match state.segments.get_mut(&key).filter(|segment| segment.id == one.id) {
            Some(segment) if !self.has_stopped.load(Ordering::Relaxed) => segment.is_begun = true,
            Some(_) => {
                drop(state);
                drop(Waiting { store: self, key, id: one.id });
                return false;
            }
            None => return false,
        }
        true
    }

    /// Keeps the error of a request that was made ahead, if it is one about the content of a file.
    fn note(&self, file: u32, error: Error) {
        if error.findings().iter().any(|finding| finding.code == codes::HASH) {
            self.lock().wrong.entry(file).or_insert(error);
        }
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
                drop(Waiting { store: self, key: (one.file, one.at), id: one.id });
            }
        }
    }
}

/// Joins ranges that follow each other in their order into those of requests: where little lies between them, and up to
/// `most` bytes. Longer ones are divided.
fn join_ranges(ranges: &[(u64, u64)], most: u64) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for &(lo, hi) in ranges {
        let mut at = lo;
        if let Some(last) = joined.last_mut().filter(|last| last.0 <= lo) {
            if lo <= last.1 + GAP && hi.max(last.1) - last.0 <= most {
                last.1 = last.1.max(hi);
                continue;
            }
            at = lo.max(last.1);
        }
        while at < hi {
            let end = hi.min(at + most);
            joined.push((at, end));
            at = end;
        }
    }
    joined
}

/// Bytes of reads, sorted by their first byte, between `lo` and `hi`; what several read counts for each.
fn count_read(reads: &[(u64, u64)], lo: u64, hi: u64) -> u64 {
    let until = reads.partition_point(|read| read.0 < hi);
    reads[..until].iter().map(|read| read.1.min(hi).saturating_sub(read.0.max(lo))).sum()
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
        let Ok(one) = wanted else { return };
        let Some(store) = store.upgrade() else { return };
        if !store.begin(one) {
            continue;
        }
        if let Err(error) = store.request(one, true) {
            store.note(one.file, error);
        }
    }
}

/// A segment under way, which is taken back unless it arrives.
struct Waiting<'a> {
    store: &'a StoreFiles,
    key: (u32, u64),
    id: u64,
}

impl Waiting<'_> {
    /// Hands the bytes to those who wait for them; keeps them for later reads if `keep`.
    fn arrive(self, bytes: Arc<dyn BlockBytes>, keep: bool) {
        let mut state = self.store.lock();
        let (now, requests) = (state.reads, state.requests);
        if let Some(segment) =
            state.segments.get_mut(&self.key).filter(|segment| keep && segment.id == self.id)
        {
            let len = segment.len;
            (segment.bytes, segment.used, segment.came) = (Some(bytes), now, requests);
            let (is_due, was_demanded) = (segment.due.is_some(), std::mem::take(&mut segment.is_demanded));
            state.kept += if is_due { 0 } else { len };
            state.demanded -= if was_demanded { len } else { 0 };
            state.make_room(self.store.room);
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.store.lock();
        let own = state.segments.get(&self.key).filter(|segment| segment.id == self.id);
        if own.is_some_and(|segment| segment.bytes.is_none()) {
            state.remove(self.key);
        }
        drop(state);
        self.store.arrived.notify_all();
    }
}

impl State {
    /// Adds a segment whose bytes are under way; returns the request to make.
    fn expect(&mut self, file: u32, at: u64, hi: u64, why: Why) -> Wanted {
        let len = hi - at;
        self.requests += 1;
        let id = self.requests;
        let (is_ahead, is_demanded) = (why == Why::Ahead, why == Why::Demanded);
        let due = match why {
            Why::Scheduled(due) => Some(due),
            _ => None,
        };
        self.ahead += if is_ahead { len } else { 0 };
        self.demanded += if is_demanded { len } else { 0 };
        self.scheduled += if due.is_some() { len } else { 0 };
        let segment = Segment {
            id,
            len,
            bytes: None,
            used: u64::MAX,
            is_ahead,
            is_demanded,
            is_begun: is_demanded,
            came: u64::MAX,
            is_read: false,
            due,
        };
        self.segments.insert((file, at), segment);
        Wanted { file, at, hi, id }
    }

    /// The segments with which scheduled reads of a file, sorted, are covered: each with the bytes that are read from it.
    /// What is under way or here is left out.
    fn cover(&self, file: u32, reads: &[(u64, u64)], size: u64) -> Vec<(u64, u64, u64)> {
        let mut found = Vec::new();
        for (lo, hi) in join_ranges(reads, self.most) {
            for (at, end) in self.list_missing(file, lo, hi.min(size)) {
                let due = count_read(reads, at, end);
                if due > 0 {
                    found.push((at, end, due));
                }
            }
        }
        found
    }

    /// The parts of a range of a file that are neither here nor under way.
    fn list_missing(&self, file: u32, lo: u64, hi: u64) -> Vec<(u64, u64)> {
        let (mut found, mut at) = (Vec::new(), lo);
        let before = self.segments.range((file, 0)..(file, lo)).next_back();
        let inside = self.segments.range((file, lo)..(file, hi.max(lo)));
        for (key, segment) in before.into_iter().chain(inside) {
            if at < key.1 {
                found.push((at, key.1));
            }
            at = at.max(key.1 + segment.len);
        }
        if at < hi {
            found.push((at, hi));
        }
        found
    }

    /// Adds reads of a file to what is scheduled of it already.
    fn add_due(&mut self, file: u32, reads: &[(u64, u64)]) {
        for (key, segment) in self.segments.range_mut((file, 0)..=(file, u64::MAX)) {
            if let Some(due) = &mut segment.due {
                *due += count_read(reads, key.1, key.1 + segment.len);
            }
        }
    }

    /// Leaves what is scheduled to those who come across it.
    fn unschedule(&mut self) {
        for segment in self.segments.values_mut().filter(|segment| segment.due.is_some()) {
            segment.due = None;
            self.scheduled -= segment.len;
            self.kept += if segment.bytes.is_some() { segment.len } else { 0 };
        }
    }

    fn remove(&mut self, key: (u32, u64)) -> Option<Segment> {
        let segment = self.segments.remove(&key)?;
        match &segment {
            Segment { due: Some(_), .. } => self.scheduled -= segment.len,
            Segment { bytes: Some(_), .. } => self.kept -= segment.len,
            _ => {}
        }
        self.ahead -= if segment.is_ahead { segment.len } else { 0 };
        self.demanded -= if segment.is_demanded { segment.len } else { 0 };
        Some(segment)
    }

    fn retain(&mut self, stays: impl Fn(&Segment) -> bool) {
        let removed: Vec<_> =
            self.segments.iter().filter(|(_, segment)| !stays(segment)).map(|(key, _)| *key).collect();
        removed.into_iter().for_each(|key| drop(self.remove(key)));
    }

    /// True if `len` more bytes may be requested ahead: half of the room is for what readers come back to. What was requested
    /// in vain goes first.
    fn has_room_ahead(&mut self, len: u64, room: u64) -> bool {
        if self.ahead + len > room / 2 {
            let requests = self.requests;
            self.retain(|segment| !segment.is_ahead || segment.came.saturating_add(PATIENCE) > requests);
        }
        self.ahead + len <= room / 2
    }

    /// Chooses the end of a request for byte `at` of a file, for a read up to `end`: the longer, the longer reading has gone
    /// on from there.
    fn choose_end(&mut self, file: u32, at: u64, end: u64, size: u64, room: u64) -> u64 {
        if let Some(i) = self.evicted.iter().position(|&(of, lo, hi)| of == file && (lo..hi).contains(&at)) {
            // There are more readers than room for long requests.
            self.evicted.remove(i);
            self.most = (self.most / 2).max(room / MOST_IN_ROOM).max(LEAST);
        }
        let most = self.most;
        let next = self.segments.range((file, at)..=(file, u64::MAX)).next().map_or(size, |(key, _)| key.1);
        let streams = self.streams.entry(file).or_default();
        // A reader that leaves out less than it asked for last reads on, unless it takes long parts of something else.
        let is_long = end - at >= LONG;
        let gap = |s: &Stream| if is_long { 0 } else { s.step };
        let known = streams.iter().position(|s| s.end <= at && at - s.end <= gap(s));
        let step = known.map_or(LEAST, |i| (streams.remove(i).step * 2).min(most));
        let until = if is_long { end } else { end.max(at + step) };
        // All requests of readers together take half of the room, or little each.
        let left = (room / 2).saturating_sub(self.demanded).max(LEAST);
        let hi = until.min(at + most.min(left)).min(next).min(size);
        if streams.len() == STREAMS {
            streams.remove(0);
        }
        streams.push(Stream { end: hi, step });
        hi
    }

    /// Chooses the requests to make ahead of a reader that has come to a segment which ends at `next`, if reading has gone on
    /// for long: their segments are under way from now on.
    fn choose_ahead(&mut self, file: u32, mut next: u64, size: u64, room: u64) -> Vec<Wanted> {
        let most = self.most;
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
            if hi <= next || !self.has_room_ahead(hi - next, room) {
                break;
            }
            wanted.push(self.expect(file, next, hi, Why::Ahead));
            next = hi;
        }
        if let Some(stream) = self.streams.get_mut(&file).and_then(|streams| streams.get_mut(at)) {
            stream.end = stream.end.max(next);
        }
        wanted
    }

    /// Chooses the requests for announced ranges of a file, which come in their order: their segments are under way from now
    /// on. What is here or under way is left out, and what finds no room.
    fn choose_announced(&mut self, file: u32, ranges: &[(u64, u64)], size: u64, room: u64) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        for (lo, hi) in join_ranges(ranges, self.most) {
            for (at, end) in self.list_missing(file, lo, hi.min(size)) {
                if self.has_room_ahead(end - at, room) {
                    wanted.push(self.expect(file, at, end, Why::Ahead));
                }
            }
        }
        wanted
    }

    /// Removes the segments that were not read for the longest time, until the others take no more than `room`.
    fn make_room(&mut self, room: u64) {
        while self.kept + self.scheduled > room {
            let here =
                self.segments.iter().filter(|(_, segment)| segment.bytes.is_some() && segment.due.is_none());
            let Some((&key, _)) = here.min_by_key(|(_, segment)| (!segment.is_read, segment.used)) else {
                return;
            };
            let Some(removed) = self.remove(key) else { return };
            if !removed.is_read && removed.len > room / MOST_IN_ROOM {
                self.evicted.truncate(EVICTED - 1);
                self.evicted.push_front((key.0, key.1, key.1 + removed.len));
            }
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

    fn is_as_stated(&self) -> Result<()> {
        self.store.lock().wrong.get(&self.number).map_or(Ok(()), |error| Err(error.clone()))
    }

    fn schedule_room(&self) -> Option<u64> {
        Some(self.store.schedule_room())
    }

    fn schedule(&self, reads: Vec<(u64, u64)>, readers: &dyn Fn() -> Readers) {
        self.store.schedule(self.number, reads, readers);
    }

    fn end_schedule(&self) {
        self.store.end_schedule();
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
mod tests;
