//! A process that takes part in a shared run: its journal, which nobody else writes to.

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::memory;
use crate::publish::clock::Clock;
use crate::publish::direct::Io;
use crate::publish::disk::{self, At, Dir};
use crate::publish::file::OutFile;
use crate::publish::folder::{EVIDENCE, MAX_OWN, MEMBER, STATE};
use crate::publish::journal::Journal;
use crate::publish::process::Process;

/// Largest of these, in bytes.
const MAX_EVIDENCE: u64 = 1 << 30;

/// First bytes of the records of a member's journal; records of callers begin with others.
const WHO: u8 = 64;
const OPEN: u8 = 65;
const CLOSE: u8 = 66;
const EDGE: u8 = 67;
const DONE: u8 = 68;
const LEFT: u8 = 69;
const BEAT: u8 = 70;

/// Bytes of an edge in one record.
const EDGE_BYTES: usize = 32 << 10;
/// Time between two signs of life.
pub(crate) const BEAT_EVERY: Duration = Duration::from_millis(500);

/// A random name: 32 hex digits.
pub(crate) fn nonce() -> String {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the system gives random bytes");
    format!("{:032x}", u128::from_ne_bytes(bytes))
}

/// A member's identity and task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Who {
    /// Its round.
    pub round: u32,
    /// Its part of that round; none for the member that begins the round or concludes the run.
    pub part: Option<u32>,
    /// The process.
    pub process: Process,
}

impl Who {
    /// Describes the process for people.
    pub fn describe(&self) -> String {
        match self.part {
            Some(part) => format!("part {part} ({})", self.process.describe()),
            None => format!("beginning or concluding it ({})", self.process.describe()),
        }
    }
}

/// A working member. Dropping it ends its signs of life.
#[derive(Debug)]
pub struct Member {
    folder: Dir,
    nonce: String,
    journal: Arc<Journal>,
    /// The round whose files may be opened, and the folder they lie in.
    round: String,
    data: String,
    beats: Option<Beats>,
}

impl Member {
    /// Takes up a part of a round in a run's staging folder, with a separate journal.
    ///
    /// Errors: those of the system.
    pub(crate) fn begin(folder: &Dir, round: &str, who: &Who, clock: &Clock) -> Result<Member> {
        let nonce = nonce();
        let folder = folder.again().at(folder.path(), "cannot open")?;
        let journal = Arc::new(Journal::open(&folder, &format!("{MEMBER}{nonce}"), true)?);
        journal.append(&[&[WHO][..], &serde_json::to_vec(who).expect("plain data")].concat())?;
        journal.sync()?;
        folder.sync().at(folder.path(), "cannot bring to disk")?;
        let beats = Beats::start(&journal, clock);
        Ok(Member {
            folder,
            nonce,
            journal,
            round: round.into(),
            data: format!("data.{round}"),
            beats: Some(beats),
        })
    }

    /// The journal in which it records finished work.
    pub fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// Name of its journal, without the prefix.
    pub fn nonce(&self) -> &str {
        &self.nonce
    }

    /// True if its data files are written around the page cache.
    pub fn is_direct(&self, io: Io) -> bool {
        io.is_direct(&self.folder, true)
    }

    /// Records that data files will be opened for writing, and checks that this is still allowed.
    ///
    /// Errors: `LOCKED` if another round has begun; errors of the system.
    pub fn note_open(&self, numbers: impl IntoIterator<Item = u32>) -> Result<()> {
        for number in numbers {
            self.journal.append(&[&[OPEN][..], &number.to_le_bytes()].concat())?;
        }
        self.journal.sync()?;
        self.still_writes()
    }

    /// Opens data file `number`, which exists with this size. It first records on disk that the file may be
    /// written to, then checks that the round still writes, and then opens the file: so the process that ends
    /// the round knows every descriptor that may be left.
    ///
    /// Errors: `LOCKED` if another round has begun; errors of the system.
    pub fn open_file(&self, number: u32, name: &str, size: u64, io: Io) -> Result<OutFile> {
        self.note_open([number])?;
        let data = self.folder.sub(OsStr::new(&self.data));
        let (folder, last) = match data.and_then(|data| data.folder_of(name, false)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(self.fenced()),
            found => found.at(&self.folder.join(&self.data), "cannot open")?,
        };
        OutFile::existing(&folder, last, size, io)
    }

    /// Syncs a data file to disk, closes it, and records that.
    ///
    /// Errors: those of the system.
    pub fn close_file(&self, number: u32, file: OutFile) -> Result<()> {
        file.sync()?;
        drop(file);
        self.journal.append(&[&[CLOSE][..], &number.to_le_bytes()].concat())
    }

    /// Records that data files of [`Member::note_open`] are closed, and that their data is on disk.
    ///
    /// Errors: those of the system.
    pub fn note_closed(&self, numbers: impl IntoIterator<Item = u32>) -> Result<()> {
        for number in numbers {
            self.journal.append(&[&[CLOSE][..], &number.to_le_bytes()].concat())?;
        }
        self.journal.sync()
    }

    /// Checks that no other round has begun.
    ///
    /// Errors: `LOCKED` if one has; errors of the system.
    pub fn still_writes(&self) -> Result<()> {
        let path = self.folder.join(STATE);
        let state = self.folder.read_small(STATE, MAX_OWN).at(&path, "cannot read")?;
        match state.is_some_and(|state| state.starts_with(self.round.as_bytes())) {
            true => Ok(()),
            false => Err(self.fenced()),
        }
    }

    fn fenced(&self) -> Error {
        Finding::new(
            codes::LOCKED,
            "another process has taken this run over: nothing that this one writes is used any more",
        )
        .file(self.folder.path())
        .help("check the output of the other run, and continue this one when it has ended")
        .run("--resume")
        .into()
    }

    /// Records bytes of data file `file` in a page that others write to as well: the process that ends the
    /// round writes them.
    ///
    /// Errors: those of the system.
    pub fn edge(&self, file: u32, offset: u64, bytes: &[u8]) -> Result<()> {
        for (i, chunk) in bytes.chunks(EDGE_BYTES).enumerate() {
            let at = offset + (i * EDGE_BYTES) as u64;
            self.journal.append(&[&[EDGE][..], &file.to_le_bytes(), &at.to_le_bytes(), chunk].concat())?;
        }
        Ok(())
    }

    /// Records that everything is done: the data is on disk, and the files are closed.
    ///
    /// Errors: those of the system.
    pub fn done(mut self, evidence: &[u8]) -> Result<()> {
        self.folder.write_whole(&format!("{EVIDENCE}{}", self.nonce), evidence, true)?;
        // The last record of all, so that a look at the end of the journal tells.
        self.beats.take();
        self.journal.append(&[&[DONE][..], blake3::hash(evidence).as_bytes()].concat())?;
        self.journal.sync()
    }

    /// Records that it has ended before everything was done.
    pub fn leave(self) {
        // Who cannot say so is seen by its silence.
        let _ = self.journal.append(&[LEFT]).and_then(|()| self.journal.sync());
    }
}

/// Signs of life in a journal.
#[derive(Debug)]
struct Beats {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Beats {
    fn start(journal: &Arc<Journal>, clock: &Clock) -> Beats {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let (journal, stopped, clock) = (Arc::clone(journal), Arc::clone(&stop), clock.clone());
        let beat = move || {
            let (stop, woken) = &*stopped;
            let mut ended = stop.lock().unwrap_or_else(PoisonError::into_inner);
            let mut next = clock.now();
            while !*ended {
                let now = clock.now();
                if now >= next {
                    // One that fails is one that is missed.
                    let _ = journal.append(&[BEAT]).and_then(|()| journal.show());
                    next = now + BEAT_EVERY;
                }
                let nap = clock.nap(next.saturating_sub(clock.now()));
                ended = woken.wait_timeout(ended, nap).unwrap_or_else(PoisonError::into_inner).0;
            }
        };
        let thread = std::thread::Builder::new().name("fastshard-beat".into()).spawn(beat).ok();
        Beats { stop, thread }
    }
}

impl Drop for Beats {
    fn drop(&mut self) {
        *self.stop.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A range of a data file that is only in a journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edge {
    /// The file's number.
    pub file: u32,
    /// Its place in the file, in bytes.
    pub offset: u64,
    /// The number of bytes.
    len: u64,
    /// Their place in the journal.
    place: u64,
}

impl Edge {
    /// One past its last byte.
    pub fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// The content of a member's journal, up to its end when it was opened.
#[derive(Debug)]
pub struct Log {
    /// Name of the journal, without the prefix.
    pub nonce: String,
    /// The journal.
    pub journal: Journal,
    /// The member's identity; none if not even this was written.
    pub who: Option<Who>,
    /// Files that it may still write to.
    pub open: BTreeSet<u32>,
    /// Bytes that are only in the journal.
    pub edges: Vec<Edge>,
    /// True if it has finished its part.
    pub is_done: bool,
    /// True if it recorded that it ended.
    has_left: bool,
    evidence: Option<[u8; 32]>,
}

impl Log {
    /// The journal `name` of a staging folder as it is now.
    ///
    /// Errors: those of the system.
    pub(crate) fn read(folder: &Dir, name: &str) -> Result<Log> {
        let journal = Journal::read_only(folder, name)?;
        let (mut who, mut open, mut edges) = (None, BTreeSet::new(), Vec::new());
        let (mut evidence, mut has_left) = (None, false);
        let number = |rest: &[u8]| Some(u32::from_le_bytes(rest.get(..4)?.try_into().ok()?));
        journal.replay(&mut |place, record| {
            let Some((kind, rest)) = record.split_first() else { return };
            match *kind {
                WHO => who = serde_json::from_slice(rest).ok(),
                OPEN => open.extend(number(rest)),
                CLOSE => {
                    number(rest).map(|file| open.remove(&file));
                }
                EDGE => {
                    let at = rest.get(4..12).and_then(|at| at.try_into().ok()).map(u64::from_le_bytes);
                    if let (Some(file), Some(offset)) = (number(rest), at) {
                        edges.push(Edge { file, offset, len: rest.len() as u64 - 12, place: place + 13 });
                    }
                }
                DONE => evidence = rest.try_into().ok(),
                LEFT => has_left = true,
                _ => {}
            }
        })?;
        let nonce = name.strip_prefix(MEMBER).unwrap_or(name).to_string();
        Ok(Log { nonce, journal, who, open, edges, is_done: evidence.is_some(), has_left, evidence })
    }

    /// True if it has certainly ended: its journal says so, or its process no longer exists.
    pub fn has_ended(&self) -> bool {
        self.is_done || self.has_left || self.is_dead()
    }

    /// True if nothing of it can write any more.
    pub(crate) fn is_dead(&self) -> bool {
        self.who.as_ref().is_some_and(|who| who.process.is_dead())
    }

    /// The bytes of an edge.
    ///
    /// Errors: those of the system.
    pub fn edge(&self, edge: &Edge) -> Result<Vec<u8>> {
        let mut bytes = memory::allocate(edge.len as usize)?;
        self.journal.bytes_at(edge.place, &mut bytes)?;
        Ok(bytes)
    }

    /// Its evidence.
    ///
    /// Errors: `IO` if the evidence is not as it was written; errors of the system.
    pub(crate) fn evidence(&self, folder: &Dir) -> Result<Vec<u8>> {
        let name = format!("{EVIDENCE}{}", self.nonce);
        let found = folder.read_small(&name, MAX_EVIDENCE).at(&folder.join(&name), "cannot read")?;
        let wanted = self.evidence.map(blake3::Hash::from_bytes);
        found.filter(|bytes| Some(blake3::hash(bytes)) == wanted).ok_or_else(|| {
            Finding::new(codes::IO, "what a part noted at its end is not what is read here")
                .file(folder.join(&name))
                .help("run again with --resume, which makes that part again; the destination is not the storage it seems to be")
                .into()
        })
    }
}

/// A member's identity, and whether it has finished its part, by the two ends of its journal.
///
/// Errors: those of the system.
pub(crate) fn glance(folder: &Dir, name: &str) -> Result<(Option<Who>, bool)> {
    let mut who = None;
    let end = Journal::glance(folder, name, &mut |record| {
        if let Some((&WHO, rest)) = record.split_first() {
            who = serde_json::from_slice(rest).ok();
        }
    })?;
    Ok((who, end.is_some_and(|record| record.len() == 33 && record[0] == DONE)))
}

/// Watches journals for signs of life.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    lengths: HashMap<String, u64>,
}

impl Watch {
    /// True if the journal of a member has changed since the last look.
    pub(crate) fn moves(&mut self, folder: &Dir, nonce: &str) -> bool {
        // Opened anew each time: a file server's client tells the length then.
        let name = format!("{MEMBER}{nonce}");
        let length = folder.read_only(&name).and_then(|file| Ok(file.metadata()?.len())).unwrap_or(0);
        let before = self.lengths.insert(nonce.into(), length);
        before.is_some_and(|before| before != length)
    }
}

/// Copies a data file to a new file, so that descriptors of the old one do not reach the published file.
///
/// Errors: those of the system.
pub(crate) fn renew(folder: &Dir, name: &OsStr) -> Result<()> {
    let path = folder.join(name);
    let mut fresh = name.to_os_string();
    fresh.push(".fastshard-new");
    let to_path = folder.join(&fresh);
    let from = folder.read_only(name).at(&path, "cannot open")?;
    let to = folder.create(&fresh).at(&to_path, "cannot create")?;
    let size = from.metadata().at(&path, "cannot stat")?.len();
    disk::copy(&from, &to, &to_path, size).at(&to_path, "cannot copy")?;
    disk::sync_data(&to, &to_path).at(&to_path, "cannot bring to disk")?;
    folder.rename_over(&fresh, folder, name).at(&path, "cannot rename into place")
}
