//! A checkpoint's files, opened and parsed: what is there, before any layout is put on it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::Instant;

use crate::codes;
use crate::engine::Control;
use crate::error::{Error, Finding, Result};
use crate::format::inflate::inflate;
use crate::format::{self, stand_in, ParsedFile};
use crate::hash;
use crate::memory::{self, HeaderRoom, Room};
use crate::plan::PlanFile;
use crate::steps::{self, Step};
use crate::storage::remote;
use crate::storage::SourceFile;
use crate::tensor::{c_strides, element_count};
use crate::topics;
use crate::words::Words;

/// One file of a checkpoint.
#[derive(Debug)]
pub struct CatalogFile {
    /// Index of its root.
    pub root: u32,
    /// Path relative to the root.
    pub path: String,
    /// The open file.
    pub source: Arc<SourceFile>,
    /// What its header says.
    pub parsed: ParsedFile,
}

impl CatalogFile {
    /// The file in the form that a plan records.
    pub fn plan_file(&self) -> PlanFile {
        let stamp = self.source.stamp();
        PlanFile {
            path: self.path.clone(),
            root: self.root,
            size: stamp.size,
            mtime_ns: stamp.mtime_ns as i64,
            header: hash::hex(&self.parsed.header_digest),
        }
    }
}

/// The requested content of a file.
#[derive(Debug, Clone, Default)]
pub enum Wanted {
    /// Everything that its header names.
    #[default]
    Whole,
    /// These records of a file of records (`.distcp`).
    Records(Vec<format::dcp::Range>),
    /// The blocks of the store that the file represents.
    Blocks(format::blocks::Store),
}

/// A file to open: root, relative path, and the requested content.
pub type FilePart = (u32, String, Wanted);

/// Files of one checkpoint, from one or more roots.
#[derive(Debug)]
pub struct Catalog {
    /// Directories (or the parents of single files) that were given.
    pub roots: Vec<PathBuf>,
    /// Files in the given order; `None` for a file that could not be read, for which a finding states the
    /// reason.
    pub files: Vec<Option<CatalogFile>>,
    /// Files that could not be read.
    pub findings: Vec<Finding>,
    /// Words that show what tensors are by their names.
    pub words: Arc<Words>,
    /// The memory that planning may use, if it is limited.
    room: Mutex<Option<Room>>,
}

impl Catalog {
    /// The name of a file in messages, with its root if there are several.
    pub fn label(&self, file: &CatalogFile) -> String {
        match self.roots.get(file.root as usize) {
            Some(root) if self.roots.len() > 1 => format!("{}/{}", name_of(root), file.path),
            _ => file.path.clone(),
        }
    }

    /// The names of the roots in messages.
    pub fn root_names(&self) -> Vec<String> {
        self.roots.iter().map(|root| name_of(root)).collect()
    }

    /// The same catalog, with words that show what tensors are.
    pub fn told_by(self, words: Words) -> Catalog {
        Catalog { words: Arc::new(words), ..self }
    }

    /// Opens complete files, given by root and relative path; see [`Catalog::open_parts`].
    pub fn open(roots: Vec<PathBuf>, files: &[(u32, String)], threads: usize) -> Catalog {
        let files: Vec<_> = files.iter().map(|(root, path)| (*root, path.clone(), Wanted::Whole)).collect();
        Self::open_parts(roots, &files, threads, None, &Control::default())
            .expect("any amount of memory may be used, and nobody stops it")
    }

    /// Opens files, given by root, relative path and requested content, and reads their headers on `threads`
    /// threads. It reads no payload byte. A file that cannot be read becomes a finding.
    ///
    /// # Errors
    /// `FS512` if the headers take more than `memory` bytes, if given; `FS510` if the user stops it.
    pub fn open_parts(
        roots: Vec<PathBuf>,
        files: &[FilePart],
        threads: usize,
        memory: Option<u64>,
        control: &Control,
    ) -> Result<Catalog> {
        let begun = Instant::now();
        let room = memory.map(|limit| Arc::new(Room::up_to(limit)));
        let full = AtomicBool::new(false);
        raise_open_files(files.len() as u64);
        let next = AtomicUsize::new(0);
        let slots: Vec<Mutex<Option<Result<Option<CatalogFile>>>>> =
            files.iter().map(|_| Mutex::new(None)).collect();
        let work = || loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some((root, path, wanted)) = files.get(i) else { break };
            if full.load(Ordering::Relaxed) || !control.is_running() {
                break;
            }
            steps::reach(Step::File(i));
            let opened = open_one(&roots, *root, path, wanted, room.as_ref());
            let refused = opened.as_ref().err().is_some_and(Error::is_of_memory);
            full.fetch_or(refused, Ordering::Relaxed);
            *slots[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.clamp(1, files.len().max(1)) {
                // Where the system starts no more threads, those that it has started do the work.
                let _ = Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        control.check_running()?;
        let mut findings = Vec::new();
        let mut opened = Vec::with_capacity(slots.len());
        for slot in slots {
            opened.push(match slot.into_inner().unwrap_or_else(PoisonError::into_inner) {
                Some(Ok(file)) => file,
                // Nothing is wrong with the file.
                Some(Err(error)) if error.is_of_memory() => return Err(error),
                Some(Err(error)) => {
                    // What keeps other hosts' files from coming is the same for all of them.
                    let new: Vec<_> =
                        error.into_findings().into_iter().filter(|f| findings.last() != Some(f)).collect();
                    findings.extend(new);
                    None
                }
                None => None,
            });
        }
        if let Some(room) = &room {
            room.plan_all()?;
        }
        let catalog =
            Catalog { roots, files: opened, findings, words: Arc::default(), room: Mutex::new(None) };
        // A plan is to be made within the same limit: what it takes is refused before more is made of the names.
        if let Some(room) = memory.map(Room::up_to) {
            let (tensors, names) = catalog.named();
            room.plan(tensors, names)?;
        }
        log::debug!(
            target: topics::CATALOG,
            "opened {} of {} files with {} tensors in {:.3} s on {threads} threads; {} findings",
            catalog.files.iter().flatten().count(),
            catalog.files.len(),
            catalog.named().0,
            begun.elapsed().as_secs_f64(),
            catalog.findings.len(),
        );
        Ok(catalog)
    }
}

/// The name of a root in messages, with its host if the roots are on several hosts.
fn name_of(root: &Path) -> String {
    remote::name(root).unwrap_or_else(|| root.display().to_string())
}

impl Catalog {
    /// Limits plans of this catalog to `limit` bytes of anonymous memory.
    ///
    /// # Errors
    /// `FS512` if the names of its tensors alone take more.
    pub fn within(&self, limit: Option<u64>) -> Result<()> {
        let mut slot = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        *slot = limit.map(Room::up_to);
        let Some(room) = &*slot else { return Ok(()) };
        let (tensors, names) = self.named();
        room.plan(tensors, names)
    }

    /// Number of tensors, and bytes of their names.
    pub fn named(&self) -> (u64, u64) {
        let tensors = || self.files.iter().flatten().flat_map(|file| &file.parsed.tensors);
        let names = tensors().flat_map(|t| &t.path).map(|key| key.len() as u64).sum();
        (tensors().count() as u64, names)
    }

    /// Refuses to continue planning if the memory in use exceeds the limit, or would exceed it with `more`
    /// bytes.
    ///
    /// # Errors
    /// `FS512` then.
    pub fn look(&self, more: u64) -> Result<()> {
        let slot = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        slot.as_ref().map_or(Ok(()), |room| room.look(more))
    }

    /// Bytes of a small tensor (a step counter, a buffer), in C order.
    ///
    /// # Errors
    /// `FS515` for a tensor that does not exist, is larger than `limit` bytes, or is not a plain run of
    /// bytes.
    pub fn tensor_bytes(&self, file: usize, tensor: usize, limit: u64) -> Result<Vec<u8>> {
        let refuse =
            |what: &str| Finding::new(codes::USAGE, format!("tensor {tensor} of file {file}: {what}"));
        let Some(Some(file)) = self.files.get(file) else { return Err(refuse("no such file").into()) };
        let Some(tensor) = file.parsed.tensors.get(tensor) else {
            return Err(refuse("no such tensor").into());
        };
        if tensor.role != format::Role::Whole {
            return Err(refuse("codes of eight bits").into());
        }
        let blob = &file.parsed.blobs[tensor.blob as usize];
        let count = element_count(&tensor.shape).unwrap_or(u64::MAX);
        let len = count.saturating_mul(tensor.dtype.size() as u64);
        if len > limit
            || (blob.deflated && blob.len > limit)
            || (count > 1 && tensor.strides != c_strides(&tensor.shape))
        {
            return Err(refuse("not a small plain tensor").file(self.label(file)).into());
        }
        if blob.encoded {
            let key = blob.member.as_deref().unwrap_or("");
            let whole = file.source.read_block(key, blob.len as usize, None)?;
            let start = tensor.offset as usize;
            return Ok(whole.bytes()[start..start + len as usize].to_vec());
        }
        if blob.deflated {
            let mut whole = Vec::new();
            inflate(&file.source, blob, &mut |bytes| Ok(memory::append(&mut whole, bytes)?))?;
            let start = tensor.offset as usize;
            return Ok(whole[start..start + len as usize].to_vec());
        }
        let mut bytes = memory::allocate(len as usize)?;
        file.source.read_at(blob.offset + tensor.offset, &mut bytes)?;
        Ok(bytes)
    }
}

/// Opens and parses a file; none if the memory does not suffice for the contents of its header.
fn open_one(
    roots: &[PathBuf],
    root: u32,
    path: &str,
    wanted: &Wanted,
    room: Option<&Arc<Room>>,
) -> Result<Option<CatalogFile>> {
    let full = roots.get(root as usize).map_or_else(|| PathBuf::from(path), |r| r.join(Path::new(path)));
    let room = room.map(|room| Arc::new(HeaderRoom::of(room)));
    let mut source = SourceFile::open(&full)?.within(room.clone());
    let parsed = match wanted {
        Wanted::Whole => format::parse(&source).map_err(|e| stand_in::explained(&source, e))?,
        Wanted::Records(records) => {
            format::dcp::records(&source, records).map_err(|e| stand_in::explained(&source, e))?
        }
        Wanted::Blocks(store) => {
            source = source.with_blocks(Arc::clone(&store.reader));
            format::blocks::parse(store)?
        }
    };
    if let Some(room) = room {
        let names = parsed.tensors.iter().flat_map(|t| &t.path).map(|key| key.len() as u64).sum();
        // The others are counted all the same, so that the finding says what all of them need.
        if !room.keep(parsed.tensors.len() as u64, names) {
            return Ok(None);
        }
    }
    Ok(Some(CatalogFile { root, path: path.to_string(), source: Arc::new(source.within(None)), parsed }))
}

/// Raises the soft limit on open files towards the hard one, if more are needed.
pub(crate) fn raise_open_files(needed: u64) {
    use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = needed + 256;
    if limit.current.is_some_and(|now| now < wanted) {
        let current = limit.maximum.map_or(wanted, |max| max.min(wanted));
        // Where it cannot be raised, opening says so by name.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum: limit.maximum });
    }
}
