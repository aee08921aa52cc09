//! Sources on the disks of several hosts: each rank lends what the others request, through the destination.
//!
//! Each rank writes two files into the folder in which ranks meet, and reads those of the others; nobody writes to
//! another's:
//! - `lent-NONCE.journal`: the files it has, what it asks others for, what it has lent;
//! - `lent-NONCE.bytes`: the bytes that it has lent, each of them once, whoever asked.
//!
//! ```text
//! borrower                          owner
//! ASK rank, file, range  --------->  reads its file, appends to its bytes,
//!                        <---------  GIVEN file, range, place, CRC32
//! ```
//!
//! What was lent counts once its CRC32 is right, so that pages which a file server's client has kept do no harm. An
//! owner lends from files that are as they were when it listed them; one that changes stops the run.

mod borrow;
mod others;
mod own;
mod ranges;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::meeting::{Meeting, Pauses};
use crate::codes;
use crate::error::{without_panic, Error, Finding, Result};
use crate::publish::clock::Clock;
use crate::publish::disk::{At, Dir};
use crate::publish::journal::Journal;
use crate::publish::process::Process;
use crate::steps::{self, Step};
use crate::storage::remote::{time_of, Provider, Registration};
use borrow::Giver;
use others::Other;
use own::Owner;
use ranges::Ranges;

/// First bytes of records.
const FILE: u8 = 1;
const LISTED: u8 = 2;
const ASK: u8 = 3;
const GIVEN: u8 = 4;
const ROOT: u8 = 5;

/// Files of this lending.
const PREFIX: &str = "lent-";

/// Half of the bytes that are requested from the beginning of a file, which has its header.
const HEAD: u64 = 8 << 10;
/// Time between two looks at the requests and the loans of others.
const LOOK: Duration = Duration::from_millis(50);
/// Ranks that are looked at in that time.
const MANY: u32 = 16;
/// A path that a rank got as the checkpoint, or as a part of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    /// The folder.
    pub folder: PathBuf,
    /// The file in it, if one was named.
    pub file: Option<String>,
    /// The names of the folder and of the one above it, by which steps are recognised.
    #[serde(default)]
    pub called: PathBuf,
}

/// A file below one of a rank's roots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Listed {
    root: u32,
    path: String,
    size: u64,
    mtime_ns: i64,
    /// Time of the last change of content or status, which shows a changed content whose time was set back.
    ctime_ns: i64,
}

/// The host of a rank, and the roots of its sources there.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HostRoots {
    host: String,
    roots: Vec<Root>,
}

impl HostRoots {
    /// Names the folder that represents one of its roots here.
    fn here(&self, folder: &Path, rank: u32, root: usize) -> PathBuf {
        let base = folder.join(format!("rank-{rank}"));
        self.roots[root].below(&base, root).unwrap_or_else(|| base.join(root.to_string()))
    }
}

/// One of the checkpoint's roots, as this process sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The rank that it belongs to.
    pub rank: u32,
    /// Its host.
    pub host: String,
    /// The folder there.
    pub there: PathBuf,
    /// The folder here: the same one for this rank, else one with placeholders.
    pub here: PathBuf,
    /// The file in it, if one was named.
    pub file: Option<String>,
}

/// A rank that lends its own files, and borrows those of others.
pub struct Lending {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    sources: Vec<Source>,
    /// The files of this rank.
    own: Vec<Listed>,
    registration: Option<Registration>,
}

#[derive(Debug, Default)]
struct State {
    others: BTreeMap<u32, Other>,
    /// Path here -> rank and number of the file.
    places: HashMap<PathBuf, (u32, u32)>,
}

#[derive(Debug)]
struct Shared {
    /// Gone once the ranks have parted, though files that were lent may be held still.
    meeting: Weak<Meeting>,
    rank: u32,
    world: u32,
    nonce: String,
    clock: Clock,
    folder: Dir,
    journal: Journal,
    state: Mutex<State>,
    arrived: Condvar,
    ended: AtomicBool,
    interrupted: AtomicBool,
    /// Bytes that this rank has given to others.
    served: AtomicU64,
    /// Looks by waiting borrowers.
    #[cfg(test)]
    looks: AtomicU64,
    /// The error that ended the lending thread, after which nothing arrives any more.
    broken: OnceLock<Error>,
}

/// A request: number of the file, first byte, one past the last.
type Ask = (u32, u64, u64);

fn journal_of(nonce: &str) -> String {
    format!("{PREFIX}{nonce}.journal")
}

fn bytes_of(nonce: &str) -> String {
    format!("{PREFIX}{nonce}.bytes")
}

/// True for the name of a file that a rank lends by.
pub(crate) fn is_ours(name: &str) -> bool {
    name.starts_with(PREFIX) && (name.ends_with(".journal") || name.ends_with(".bytes"))
}

impl Root {
    fn name(&mut self) {
        let real = self.folder.canonicalize().unwrap_or_else(|_| self.folder.clone());
        let names: Vec<_> = real.components().filter(is_plain).collect();
        let called: PathBuf = names[names.len().saturating_sub(2)..].iter().collect();
        // What is no text cannot be told to others, and is no step's name.
        self.called = called.to_str().map(PathBuf::from).unwrap_or_default();
    }

    /// The place of its placeholder, below the folder of its rank; none if it would be elsewhere.
    fn below(&self, base: &Path, number: usize) -> Option<PathBuf> {
        let plain = self.called.components().all(|part| is_plain(&part));
        (plain && self.called.components().count() <= 2)
            .then(|| base.join(number.to_string()).join(&self.called))
    }
}

fn is_plain(part: &Component) -> bool {
    matches!(part, Component::Normal(_))
}

impl Lending {
    /// Lends `files` (root and relative path) below `roots`, and makes folders below the empty `folder` that
    /// represent the roots of the other ranks. Returns once all ranks have listed their files. Stopping
    /// thread `by` also stops the lending.
    ///
    /// # Errors
    /// The reason why a file cannot be examined; the errors for which another rank stopped.
    pub fn begin(
        meeting: &Arc<Meeting>,
        mut roots: Vec<Root>,
        files: &[(u32, String)],
        folder: &Path,
        by: ThreadId,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Lending> {
        let shared = Shared::join(meeting)?;
        // From now on its end takes away what it has written.
        let mut lending = Lending {
            shared: Arc::clone(&shared),
            thread: None,
            sources: Vec::new(),
            own: Vec::new(),
            registration: None,
        };
        let host = Process::own().host;
        roots.iter_mut().for_each(Root::name);
        let host_roots = HostRoots { host, roots };
        let (owner, listed) = Owner::begin(&shared, &host_roots, files)?;
        lending.own = listed;
        lending.thread = Some(lend_in_thread(owner, folder)?);
        steps::reach(Step::Listed);
        let all = shared.wait_for_lists(go_on)?;
        let folder = folder.canonicalize().map_err(|e| Error::io(folder, "cannot open", &e))?;
        lending.sources = shared.stand(&host_roots, &all, &folder)?;
        let name = |s: &Source| (s.here.clone(), format!("{}:{}", s.host, s.there.display()));
        let names = lending.sources.iter().map(name).collect();
        let giver: Arc<dyn Provider> = Arc::new(Giver { shared: Arc::downgrade(&shared), names });
        lending.registration = Some(Registration::of_run(folder, giver, by));
        Ok(lending)
    }

    /// The roots of all ranks, in the order of these.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// A digest of files (rank, number of its root, path) as their ranks listed them: a run on other files is
    /// not continued.
    pub fn stamp(&self, wanted: &[(u32, u32, String)]) -> String {
        let state = self.shared.lock();
        let others =
            state.others.iter().flat_map(|(rank, o)| o.files.iter().map(move |f| (*rank, &f.listed)));
        let all = others.chain(self.own.iter().map(|file| (self.shared.rank, file)));
        let known: HashMap<(u32, u32, &str), &Listed> =
            all.map(|(rank, file)| ((rank, file.root, file.path.as_str()), file)).collect();
        let files: Vec<_> =
            wanted.iter().map(|(rank, root, path)| known.get(&(*rank, *root, path))).collect();
        blake3::hash(&serde_json::to_vec(&files).expect("plain data")).to_hex().to_string()
    }

    /// Counts the bytes that each rank has lent to others so far.
    pub fn count_served(&self) -> BTreeMap<u32, u64> {
        let state = self.shared.lock();
        let mut served: BTreeMap<u32, u64> = state.others.iter().map(|(rank, o)| (*rank, o.served)).collect();
        served.insert(self.shared.rank, self.shared.served.load(Ordering::Relaxed));
        served
    }
}

impl Drop for Lending {
    fn drop(&mut self) {
        self.registration.take();
        self.shared.ended.store(true, Ordering::Relaxed);
        self.shared.arrived.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        for name in [journal_of(&self.shared.nonce), bytes_of(&self.shared.nonce)] {
            let _ = self.shared.folder.remove_file(&name);
        }
    }
}

/// Lends in a thread until the lending ends or fails; on a failure the run stops.
fn lend_in_thread(mut owner: Owner, folder: &Path) -> Result<JoinHandle<()>> {
    let clock = owner.shared().clock.clone();
    let pause = LOOK * owner.shared().world.div_ceil(MANY);
    let turns = move || {
        let mut pauses = Pauses::new(&clock, pause);
        while !owner.shared().ended.load(Ordering::Relaxed) {
            match without_panic(|| owner.turn()) {
                Ok(true) => pauses = Pauses::new(&clock, pause),
                Ok(false) => pauses.sleep(),
                Err(error) => {
                    let _ = owner.shared().broken.set(error.clone());
                    owner.shared().meeting.upgrade().into_iter().for_each(|m| m.fail(error.clone()));
                    return;
                }
            }
        }
    };
    let spawned = std::thread::Builder::new().name("fastshard-lends".into()).spawn(turns);
    spawned.map_err(|e| Error::io(folder, "cannot start a thread", &e))
}

impl Shared {
    /// Begins a journal in the folder in which ranks meet.
    fn join(meeting: &Arc<Meeting>) -> Result<Arc<Shared>> {
        let table = meeting.folder();
        let folder = table.again().at(table.path(), "cannot open")?;
        let nonce = meeting.nonce();
        let journal = Journal::open(&folder, &journal_of(&nonce), true)?;
        Ok(Arc::new(Shared {
            meeting: Arc::downgrade(meeting),
            rank: meeting.rank(),
            world: meeting.world(),
            nonce,
            clock: meeting.clock().clone(),
            folder,
            journal,
            state: Mutex::default(),
            arrived: Condvar::new(),
            ended: AtomicBool::new(false),
            interrupted: AtomicBool::new(false),
            served: AtomicU64::new(0),
            #[cfg(test)]
            looks: AtomicU64::new(0),
            broken: OnceLock::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks whether waiting still makes sense.
    fn check(&self) -> Result<()> {
        #[cfg(test)]
        self.looks.fetch_add(1, Ordering::Relaxed);
        if self.interrupted.load(Ordering::Relaxed) {
            return Err(Finding::new(codes::INTERRUPTED, "stopped by the user").into());
        }
        if let Some(error) = self.broken.get() {
            return Err(error.clone());
        }
        match self.meeting.upgrade().filter(|_| !self.ended.load(Ordering::Relaxed)) {
            Some(meeting) => meeting.watch(&|_| false),
            None => Err(Finding::new(codes::PART_MISSING, "the ranks have parted that had this file").into()),
        }
    }

    /// Waits until all other ranks have listed what they have.
    fn wait_for_lists(&self, go_on: &dyn Fn() -> bool) -> Result<BTreeMap<u32, HostRoots>> {
        loop {
            {
                let state = self.lock();
                let by_rank: BTreeMap<u32, HostRoots> = state
                    .others
                    .iter()
                    .filter_map(|(rank, o)| Some((*rank, o.host_roots.clone()?)))
                    .collect();
                if by_rank.len() + 1 == self.world as usize {
                    return Ok(by_rank);
                }
                drop(self.arrived.wait_timeout(state, LOOK));
            }
            if !go_on() {
                return Err(Finding::new(codes::INTERRUPTED, "stopped by the user").into());
            }
            self.check()?;
        }
    }

    /// Makes folders that represent the roots of the other ranks, and returns all roots in the order of the
    /// ranks.
    fn stand(
        &self,
        own: &HostRoots,
        others: &BTreeMap<u32, HostRoots>,
        folder: &Path,
    ) -> Result<Vec<Source>> {
        let mut sources = Vec::new();
        for rank in 0..self.world {
            let host_roots = if rank == self.rank { own } else { &others[&rank] };
            for (number, root) in host_roots.roots.iter().enumerate() {
                let here = match rank == self.rank {
                    true => root.folder.clone(),
                    false => host_roots.here(folder, rank, number),
                };
                sources.push(Source {
                    rank,
                    host: host_roots.host.clone(),
                    there: root.folder.clone(),
                    here,
                    file: root.file.clone(),
                });
            }
        }
        let mut state = self.lock();
        let mut places = HashMap::new();
        for (rank, other) in &state.others {
            let host_roots = &others[rank];
            for root in 0..host_roots.roots.len() {
                let root = host_roots.here(folder, *rank, root);
                std::fs::create_dir_all(&root).map_err(|e| Error::io(&root, "cannot create", &e))?;
            }
            for (number, file) in (0u32..).zip(&other.files) {
                let path = host_roots.here(folder, *rank, file.listed.root as usize).join(&file.listed.path);
                stand_for(&path, &file.listed).map_err(|e| Error::io(&path, "cannot create", &e))?;
                places.insert(path, (*rank, number));
            }
        }
        state.places = places;
        Ok(sources)
    }

    /// Records the entries of another rank's journal, and returns its requests to this rank.
    fn learn(&self, rank: u32, records: &[Vec<u8>]) -> Result<Vec<Ask>> {
        let mut asks = Vec::new();
        let mut state = self.lock();
        let other = state.others.entry(rank).or_default();
        for record in records {
            let learnt = match record.split_first() {
                Some((&FILE, json)) => other.name(json),
                Some((&ROOT, json)) => serde_json::from_slice(json).ok().map(|root| other.roots.push(root)),
                Some((&LISTED, host)) => other.tell(host)?,
                Some((&ASK, fields)) => numbers::<4>(fields).map(|[to, file, lo, hi]| {
                    if to == u64::from(self.rank) {
                        asks.push((file as u32, lo, hi));
                    }
                }),
                Some((&GIVEN, fields)) => numbers::<5>(fields).and_then(|given| other.take(given)),
                _ => None,
            };
            if learnt.is_none() {
                return Err(Finding::new(codes::INTERNAL, "what a rank says of its files cannot be read")
                    .rank(format!("rank {rank}"))
                    .file(self.folder.path())
                    .into());
            }
        }
        Ok(asks)
    }

    /// Follows the journals of the other ranks, and returns their requests to this one, and whether there was
    /// anything new.
    fn follow(&self) -> Result<(Vec<Ask>, bool)> {
        let (mut asks, mut moved) = (Vec::new(), false);
        let nonces = self.meeting.upgrade().map(|meeting| meeting.nonces()).unwrap_or_default();
        for (rank, nonce) in nonces.into_iter().filter(|(rank, _)| *rank != self.rank) {
            let from = {
                let mut state = self.lock();
                let other = state.others.entry(rank).or_default();
                if other.nonce != nonce {
                    other.restart(nonce.clone());
                }
                other.read
            };
            let mut records = Vec::new();
            let name = journal_of(&nonce);
            let end = match Journal::follow(&self.folder, &name, from, &mut |r| records.push(r.to_vec())) {
                // It has not begun yet, or has ended.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                end => end.at(&self.folder.join(&name), "cannot read")?,
            };
            if end > from {
                asks.extend(self.learn(rank, &records)?);
                self.lock().others.entry(rank).or_default().read = end;
                moved = true;
            }
        }
        if moved {
            self.arrived.notify_all();
        }
        Ok((asks, moved))
    }

    /// Requests ranges of a file from a rank, except those requested before; others see the request once
    /// `now` is true.
    fn ask(&self, rank: u32, file: u32, ranges: &[(u64, u64)], now: bool) -> Result<()> {
        let mut wanted = Vec::new();
        {
            let mut state = self.lock();
            let Some(about) = state.others.get_mut(&rank).and_then(|o| o.files.get_mut(file as usize)) else {
                return Ok(());
            };
            for &(lo, hi) in ranges {
                let hi = hi.min(about.listed.size);
                wanted.extend(about.requested.missing(lo, hi));
                about.requested.insert(lo, hi);
            }
        }
        for (lo, hi) in &wanted {
            let fields = [u64::from(rank), u64::from(file), *lo, *hi];
            self.journal.append(&record(ASK, &fields))?;
        }
        if now {
            self.journal.show()?;
        }
        Ok(())
    }
}

/// Makes an empty placeholder for `listed`, with its size and time.
fn stand_for(path: &Path, listed: &Listed) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let file = File::create_new(path)?;
    file.set_len(listed.size)?;
    file.set_modified(time_of(listed.mtime_ns))?;
    // Whoever does not know what it stands for is not to take its holes for content.
    file.set_permissions(Permissions::from_mode(0o000))
}

fn record(kind: u8, fields: &[u64]) -> Vec<u8> {
    let mut record = vec![kind];
    fields.iter().for_each(|field| record.extend(field.to_le_bytes()));
    record
}

fn numbers<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    let mut numbers = [0; N];
    for (i, number) in numbers.iter_mut().enumerate() {
        *number = u64::from_le_bytes(bytes.get(8 * i..8 * i + 8)?.try_into().ok()?);
    }
    Some(numbers)
}
