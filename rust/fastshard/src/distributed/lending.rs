//! Sources that lie on the disks of several hosts: each rank lends what the others ask for, by way of the destination.
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

mod own;
mod ranges;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::elsewhere::{time_of, Elsewhere, Lender, Standing};
use super::meeting::{Meeting, Pauses};
use crate::codes;
use crate::error::{without_panic, Error, Finding, Result};
use crate::publish::clock::{Clock, Watched};
use crate::publish::disk::{At, Dir};
use crate::publish::journal::Journal;
use crate::steps::{self, Step};
use own::Owner;
use ranges::Ranges;

/// First bytes of records.
const FILE: u8 = 1;
const LISTED: u8 = 2;
const ASK: u8 = 3;
const GIVEN: u8 = 4;
const ROOT: u8 = 5;

/// Files of this lending, for whoever takes away what ranks have left.
pub(crate) const PREFIX: &str = "lent-";

/// Half of what is asked for of a file's beginning, where its header lies.
const HEAD: u64 = 8 << 10;
/// Bytes that are asked for at least, where nobody knew before what would be read, and at most, where reading goes on.
const ASKED_LEAST: u64 = 256 << 10;
const ASKED_MOST: u64 = 8 << 20;
/// Time between two looks at what others ask for and have lent.
const LOOK: Duration = Duration::from_millis(50);
/// Ranks that are looked at in that time.
const MANY: u32 = 16;
/// Time that bytes are given to arrive as they were lent.
const ARRIVAL: Duration = Duration::from_secs(10);

/// A path that a rank was given as the checkpoint, or as a part of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    /// The folder.
    pub folder: PathBuf,
    /// The file in it, if one was named.
    pub file: Option<String>,
    /// What the folder, and the one above it, are called: steps are known by that.
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
    /// Time of the last change of content or status: it tells content whose time was set back from what it was.
    ctime_ns: i64,
}

/// All that a rank has.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Told {
    host: String,
    roots: Vec<Root>,
}

impl Told {
    /// What stands here for one of its roots.
    fn here(&self, folder: &Path, rank: u32, root: usize) -> PathBuf {
        let base = folder.join(format!("rank-{rank}"));
        self.roots[root].below(&base, root).unwrap_or_else(|| base.join(root.to_string()))
    }
}

/// One of the checkpoint's roots, as this process sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Whose it is.
    pub rank: u32,
    /// Its host.
    pub host: String,
    /// The folder there.
    pub there: PathBuf,
    /// The folder here: the same for this rank, else one whose files stand for those.
    pub here: PathBuf,
    /// The file in it, if one was named.
    pub file: Option<String>,
}

/// A rank that lends what it has, and borrows what others have.
pub struct Lending {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    sources: Vec<Source>,
    /// The files of this rank.
    own: Vec<Listed>,
    standing: Option<Standing>,
}

/// Bytes of a file that another rank has lent.
#[derive(Debug, Clone, Copy)]
struct Given {
    len: u64,
    place: u64,
    crc32: u32,
    /// Which process of the rank has lent them: one that has taken its rank over writes another file.
    process: u64,
    /// True once they were read and found right.
    checked: bool,
}

/// A file of another rank.
#[derive(Debug)]
struct Borrowed {
    listed: Listed,
    given: BTreeMap<u64, Given>,
    asked: Ranges,
    /// Where the last reading that nobody had foreseen ended, and how much was asked for then.
    ahead: (u64, u64),
}

/// Another rank.
#[derive(Debug, Default)]
struct Other {
    nonce: String,
    /// Counts the processes that have held the rank.
    process: u64,
    /// How far its journal was read.
    read: u64,
    /// Roots and files it has named since its journal was begun.
    roots: Vec<Root>,
    named: Vec<Listed>,
    told: Option<Told>,
    files: Vec<Borrowed>,
    /// Its bytes, opened anew when what is there is not what was lent.
    bytes: Option<Arc<File>>,
    lent: u64,
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
    /// Bytes that this rank has lent.
    lent: AtomicU64,
    /// Looks of those who wait.
    #[cfg(test)]
    looks: AtomicU64,
    /// What has ended the thread that lends: nothing comes any more.
    broken: OnceLock<Error>,
}

/// A file of another rank, for those who read it.
#[derive(Debug)]
struct Lent {
    shared: Arc<Shared>,
    rank: u32,
    file: u32,
}

/// What is asked for: number of the file, first byte, one past the last.
type Ask = (u32, u64, u64);

/// Ends the waiting of those who borrow.
struct Giver {
    shared: Weak<Shared>,
    /// Roots here, and what people call them.
    names: HashMap<PathBuf, String>,
}

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

    /// Where what stands for it lies, below the folder of its rank; none if it would lie elsewhere.
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
    /// Lends `files` (root and relative path) below `roots`, and makes folders below `folder`, which is empty, that stand
    /// for the roots of the other ranks. Returns once all have said what they have. What the user stops in thread `by` is
    /// this too.
    ///
    /// # Errors
    /// What keeps a file from being looked at; what another rank stopped for.
    pub fn begin(
        meeting: &Arc<Meeting>,
        mut roots: Vec<Root>,
        files: &[(u32, String)],
        folder: &Path,
        by: ThreadId,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Lending> {
        let table = meeting.folder();
        let inside = table.again().at(table.path(), "cannot open")?;
        let nonce = meeting.nonce();
        let journal = Journal::open(&inside, &journal_of(&nonce), true)?;
        let shared = Arc::new(Shared {
            meeting: Arc::downgrade(meeting),
            rank: meeting.rank(),
            world: meeting.world(),
            nonce,
            clock: meeting.clock().clone(),
            folder: inside,
            journal,
            state: Mutex::default(),
            arrived: Condvar::new(),
            ended: AtomicBool::new(false),
            interrupted: AtomicBool::new(false),
            lent: AtomicU64::new(0),
            #[cfg(test)]
            looks: AtomicU64::new(0),
            broken: OnceLock::new(),
        });
        let mut lending = Lending {
            shared: Arc::clone(&shared),
            thread: None,
            sources: Vec::new(),
            own: Vec::new(),
            standing: None,
        };
        let host = crate::publish::process::Process::own().host;
        roots.iter_mut().for_each(Root::name);
        let told = Told { host, roots };
        let (owner, listed) = Owner::begin(&shared, &told, files)?;
        let pause = LOOK * shared.world.div_ceil(MANY);
        let clock = shared.clock.clone();
        let turns = move || {
            let (mut owner, clock) = (owner, clock);
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
        lending.thread = Some(spawned.map_err(|e| Error::io(folder, "cannot start a thread", &e))?);
        steps::reach(Step::Listed);
        let all = shared.wait_for_lists(go_on)?;
        let folder = folder.canonicalize().map_err(|e| Error::io(folder, "cannot open", &e))?;
        lending.sources = shared.stand(&told, &all, &folder)?;
        lending.own = listed;
        let name = |s: &Source| (s.here.clone(), format!("{}:{}", s.host, s.there.display()));
        let names = lending.sources.iter().map(name).collect();
        let giver: Arc<dyn Lender> = Arc::new(Giver { shared: Arc::downgrade(&shared), names });
        lending.standing = Some(Standing::register(folder, giver, by));
        Ok(lending)
    }

    /// The roots of all ranks, in the order of these.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// A digest of files (rank, number of its root, path) as they were when their ranks listed them: what was made of others
    /// is not continued.
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

    /// Bytes that each rank has lent by now.
    pub fn lent(&self) -> BTreeMap<u32, u64> {
        let state = self.shared.lock();
        let mut lent: BTreeMap<u32, u64> = state.others.iter().map(|(rank, o)| (*rank, o.lent)).collect();
        lent.insert(self.shared.rank, self.shared.lent.load(Ordering::Relaxed));
        lent
    }
}

impl Drop for Lending {
    fn drop(&mut self) {
        self.standing.take();
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

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks whether waiting makes sense still.
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

    /// What the other ranks have, once all have said it.
    fn wait_for_lists(&self, go_on: &dyn Fn() -> bool) -> Result<BTreeMap<u32, Told>> {
        loop {
            {
                let state = self.lock();
                let told: BTreeMap<u32, Told> =
                    state.others.iter().filter_map(|(rank, o)| Some((*rank, o.told.clone()?))).collect();
                if told.len() + 1 == self.world as usize {
                    return Ok(told);
                }
                drop(self.arrived.wait_timeout(state, LOOK));
            }
            if !go_on() {
                return Err(Finding::new(codes::INTERRUPTED, "stopped by the user").into());
            }
            self.check()?;
        }
    }

    /// Makes folders that stand for the roots of the other ranks: all roots in the order of the ranks.
    fn stand(&self, own: &Told, others: &BTreeMap<u32, Told>, folder: &Path) -> Result<Vec<Source>> {
        let mut sources = Vec::new();
        for rank in 0..self.world {
            let told = if rank == self.rank { own } else { &others[&rank] };
            for (number, root) in told.roots.iter().enumerate() {
                let here = match rank == self.rank {
                    true => root.folder.clone(),
                    false => told.here(folder, rank, number),
                };
                sources.push(Source {
                    rank,
                    host: told.host.clone(),
                    there: root.folder.clone(),
                    here,
                    file: root.file.clone(),
                });
            }
        }
        let mut state = self.lock();
        let mut places = HashMap::new();
        for (rank, other) in &state.others {
            let told = &others[rank];
            for root in 0..told.roots.len() {
                let root = told.here(folder, *rank, root);
                std::fs::create_dir_all(&root).map_err(|e| Error::io(&root, "cannot create", &e))?;
            }
            for (number, file) in (0u32..).zip(&other.files) {
                let path = told.here(folder, *rank, file.listed.root as usize).join(&file.listed.path);
                stand_for(&path, &file.listed).map_err(|e| Error::io(&path, "cannot create", &e))?;
                places.insert(path, (*rank, number));
            }
        }
        state.places = places;
        Ok(sources)
    }

    /// Takes note of the records of another rank's journal; those that ask this rank for something.
    fn learn(&self, rank: u32, records: &[Vec<u8>]) -> Result<Vec<Ask>> {
        let mut asked = Vec::new();
        let mut state = self.lock();
        let other = state.others.entry(rank).or_default();
        for record in records {
            let learnt = match record.split_first() {
                Some((&FILE, json)) => other.name(json),
                Some((&ROOT, json)) => serde_json::from_slice(json).ok().map(|root| other.roots.push(root)),
                Some((&LISTED, host)) => other.tell(host)?,
                Some((&ASK, fields)) => numbers::<4>(fields).map(|[to, file, lo, hi]| {
                    if to == u64::from(self.rank) {
                        asked.push((file as u32, lo, hi));
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
        Ok(asked)
    }

    /// Follows the journals of the other ranks; what they ask this one for, and whether there was anything new.
    fn follow(&self) -> Result<(Vec<Ask>, bool)> {
        let (mut asked, mut moved) = (Vec::new(), false);
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
                asked.extend(self.learn(rank, &records)?);
                self.lock().others.entry(rank).or_default().read = end;
                moved = true;
            }
        }
        if moved {
            self.arrived.notify_all();
        }
        Ok((asked, moved))
    }

    /// Asks a rank for ranges of a file, of what was not asked for yet; that it may be seen by others once `now` is true.
    fn ask(&self, rank: u32, file: u32, ranges: &[(u64, u64)], now: bool) -> Result<()> {
        let mut wanted = Vec::new();
        {
            let mut state = self.lock();
            let Some(about) = state.others.get_mut(&rank).and_then(|o| o.files.get_mut(file as usize)) else {
                return Ok(());
            };
            for &(lo, hi) in ranges {
                let hi = hi.min(about.listed.size);
                wanted.extend(about.asked.missing(lo, hi));
                about.asked.insert(lo, hi);
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

impl Other {
    /// Another process has taken this rank over: it says anew what it has.
    fn restart(&mut self, nonce: String) {
        (self.nonce, self.read, self.bytes) = (nonce, 0, None);
        self.process += 1;
        self.named.clear();
        self.roots.clear();
        self.files.iter_mut().for_each(|file| file.given.clear());
    }

    fn name(&mut self, json: &[u8]) -> Option<()> {
        let listed: Listed = serde_json::from_slice(json).ok()?;
        let plain = |part: Component| matches!(part, Component::Normal(_));
        let is_below = Path::new(&listed.path).components().all(plain) && !listed.path.is_empty();
        self.named.push(listed);
        is_below.then_some(())
    }

    fn tell(&mut self, host: &[u8]) -> Result<Option<()>> {
        let host = String::from_utf8_lossy(host).into_owned();
        let told = Told { host, roots: std::mem::take(&mut self.roots) };
        let named = std::mem::take(&mut self.named);
        let is_named = |(root, file): (usize, &Root)| match &file.file {
            Some(file) => named.iter().any(|f| f.root as usize == root && f.path == *file),
            None => true,
        };
        if named.iter().any(|file| file.root as usize >= told.roots.len())
            || !told.roots.iter().enumerate().all(is_named)
        {
            return Ok(None);
        }
        if self.told.is_none() {
            let borrowed = |listed| Borrowed {
                listed,
                given: BTreeMap::new(),
                asked: Ranges::default(),
                ahead: (0, HEAD),
            };
            self.files = named.into_iter().map(borrowed).collect();
        } else if !self.files.iter().map(|file| &file.listed).eq(&named) {
            return Err(Finding::new(codes::RANKS_DIFFER, "a rank that was started again has other files")
                .expected("the files that it had before", format!("others on {}", told.host))
                .help("run again with --resume, all ranks")
                .into());
        }
        self.told = Some(told);
        Ok(Some(()))
    }

    /// Takes note of what it has lent.
    fn take(&mut self, [file, lo, len, place, crc32]: [u64; 5]) -> Option<()> {
        let file = self.files.get_mut(usize::try_from(file).ok()?)?;
        let is_inside = len <= own::PIECE && lo.checked_add(len)? <= file.listed.size;
        let given =
            Given { len, place, crc32: u32::try_from(crc32).ok()?, process: self.process, checked: false };
        file.given.insert(lo, given);
        self.lent += len;
        is_inside.then_some(())
    }

    /// The pieces that hold bytes `lo..hi` of a file; what of these is missing.
    fn pieces(&self, file: u32, lo: u64, hi: u64) -> std::result::Result<Vec<(u64, Given)>, (u64, u64)> {
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

impl Lent {
    /// Asks for what nobody had foreseen, and more where reading goes on from there.
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

    /// The pieces that hold bytes `lo..hi`, once they are there.
    fn wait_for(&self, lo: u64, hi: u64) -> Result<Vec<(u64, Given)>> {
        let mut asked = false;
        loop {
            let missing = {
                let state = self.shared.lock();
                let other = state.others.get(&self.rank).filter(|o| (self.file as usize) < o.files.len());
                let Some(other) = other else {
                    return Err(Finding::new(codes::INTERNAL, "a file that no rank has named").into());
                };
                match other.pieces(self.file, lo, hi) {
                    Ok(pieces) => return Ok(pieces),
                    Err(_) if asked => {
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
            asked = true;
        }
    }

    /// The bytes of the owner's process, opened anew if `again`; none if they are gone: an owner that stops takes them away,
    /// and says so.
    fn bytes(&self, process: u64, again: bool) -> Result<Option<Arc<File>>> {
        let mut state = self.shared.lock();
        let Some(other) = state.others.get_mut(&self.rank) else {
            return Err(Finding::new(codes::INTERNAL, "a rank that is not there").into());
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

    /// Reads a piece and compares it with its checksum, until it has arrived; none if another process has taken the rank
    /// over, which lends it anew.
    fn checked(&self, first: u64, piece: Given) -> Result<Option<Vec<u8>>> {
        let clock = &self.shared.clock;
        let mut watched = Watched::begin(clock.now(), ARRIVAL);
        let mut bytes = vec![0; piece.len as usize];
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
                if let Some(held) = file.and_then(|file| file.given.get_mut(&first)) {
                    held.checked |= (held.process, held.place, held.len, held.crc32)
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
                .help("the destination is not one storage for all, or it loses writes: `fastshard probe` tells which")
                .into());
            }
            self.shared.check()?;
            pauses.sleep();
            again = true;
        }
    }
}

impl Elsewhere for Lent {
    fn identity(&self) -> Option<(u64, i64)> {
        let state = self.shared.lock();
        let listed = &state.others.get(&self.rank)?.files.get(self.file as usize)?.listed;
        Some((listed.size, listed.mtime_ns))
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

impl Lender for Giver {
    fn file(&self, path: &Path) -> Option<Arc<dyn Elsewhere>> {
        let shared = self.shared.upgrade()?;
        let &(rank, file) = shared.lock().places.get(path)?;
        Some(Arc::new(Lent { shared, rank, file }))
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

/// Makes an empty file that stands for `listed`: of its size and time.
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
