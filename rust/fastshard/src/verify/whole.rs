//! BLAKE3 of complete files: of many, or of a few large ones, on several threads.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

use crate::codes;
use crate::engine::Control;
use crate::error::{Error, Finding, Result};
use crate::hash::{hex, TileHasher, TileHashes};
use crate::memory;
use crate::steps::Step;
use crate::storage::SourceFile;

/// Bytes that a thread hashes at a time; a power of two.
const TILE: u64 = if cfg!(test) { 4 << 10 } else { 4 << 20 };
/// Bytes that are read at a time.
const CHUNK: u64 = 1 << 20;

/// A file with remaining tiles.
struct Part {
    path: PathBuf,
    size: u64,
    /// Tiles of the files before it.
    first: u64,
    tiles: u64,
    /// Open from the first tile that is begun to the last one that is done.
    open: Mutex<Open>,
}

struct Open {
    source: Option<Arc<SourceFile>>,
    hashes: TileHashes,
    left: u64,
}

/// The hash of each of `files` (path, size), hexadecimal, in their order.
///
/// # Errors
/// What keeps a file from being read; `FS506` for one of another size, or that changes meanwhile; `FS510` once
/// `control` says to stop.
pub(super) fn hashes(files: Vec<(PathBuf, u64)>, threads: usize, control: &Control) -> Result<Vec<String>> {
    control.done.store(0, Ordering::Relaxed);
    control.total.store(files.iter().map(|(_, size)| size).sum(), Ordering::Relaxed);
    let mut first = 0;
    let parts: Vec<Part> = files
        .into_iter()
        .map(|(path, size)| {
            // An empty file is opened too: it is there and can be read.
            let tiles = size.div_ceil(TILE).max(1);
            let hashes = TileHashes::new(TILE, size);
            let open = Mutex::new(Open { source: None, hashes, left: tiles });
            let part = Part { path, size, first, tiles, open };
            first += tiles;
            part
        })
        .collect();
    let (next, ended, failed) = (AtomicU64::new(0), AtomicBool::new(false), Mutex::new(None));
    let work = || {
        let mut buffer = Vec::new();
        while !ended.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let after = parts.partition_point(|part| part.first <= number);
            let Some(part) = parts[..after].last().filter(|part| number < part.first + part.tiles) else {
                return;
            };
            control.reach(Step::Hash(number));
            if let Err(error) = part.take(number - part.first, &mut buffer, control) {
                ended.store(true, Ordering::Relaxed);
                lock(&failed).get_or_insert(error);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.clamp(1, first.max(1) as usize) {
            // Where the system starts no more threads, those that it has started do the work.
            let _ = Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    parts.iter().map(Part::hash).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Part {
    fn source(&self) -> Result<Arc<SourceFile>> {
        let mut open = lock(&self.open);
        if let Some(source) = &open.source {
            return Ok(Arc::clone(source));
        }
        let source = Arc::new(SourceFile::open(&self.path)?);
        if source.size() != self.size {
            return Err(Finding::new(codes::SOURCE_CHANGED, "changed while it was read")
                .file(&self.path)
                .expected(format!("{} bytes", self.size), format!("{} bytes", source.size()))
                .help("wait until it is complete, then run again")
                .into());
        }
        source.will_read(&[(0, self.size)])?;
        open.source = Some(Arc::clone(&source));
        Ok(source)
    }

    /// Hashes tile `index`.
    fn take(&self, index: u64, buffer: &mut Vec<u8>, control: &Control) -> Result<()> {
        let source = self.source()?;
        let (mut at, end) = (index * TILE, ((index + 1) * TILE).min(self.size));
        let mut hasher = TileHasher::new(index, TILE, self.size);
        while at < end {
            control.check_running()?;
            let n = (end - at).min(CHUNK);
            memory::resize(buffer, n as usize)?;
            source.read_at(at, buffer)?;
            hasher.update(buffer);
            control.done.fetch_add(n, Ordering::Relaxed);
            at += n;
        }
        let mut open = lock(&self.open);
        if self.size > 0 {
            open.hashes.add(index, hasher.value());
        }
        open.left -= 1;
        if open.left == 0 {
            open.source = None;
            source.unchanged()?;
        }
        Ok(())
    }

    fn hash(&self) -> Result<String> {
        let hash = lock(&self.open).hashes.finish();
        let hash = hash.ok_or_else(|| Error::from(Finding::new(codes::INTERNAL, "a tile was not hashed")))?;
        Ok(hex(&hash))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control() -> Control {
        Control::default()
    }

    #[test]
    fn they_are_those_of_the_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let sizes = [0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE, 3 * TILE, 5 * TILE + 7, 16 * TILE, 1];
        let content =
            |i: usize, size: u64| (0..size).map(|at| (at.wrapping_mul(31) >> i) as u8).collect::<Vec<u8>>();
        let files: Vec<(PathBuf, u64)> = (0..sizes.len())
            .map(|i| {
                let path = folder.path().join(i.to_string());
                std::fs::write(&path, content(i, sizes[i])).unwrap();
                (path, sizes[i])
            })
            .collect();
        let expected: Vec<String> =
            (0..sizes.len()).map(|i| blake3::hash(&content(i, sizes[i])).to_hex().to_string()).collect();
        for threads in [1, 2, 7] {
            let control = control();
            assert_eq!(hashes(files.clone(), threads, &control).unwrap(), expected, "{threads} threads");
            let (done, total) = (control.done.into_inner(), control.total.into_inner());
            assert_eq!((done, total), (sizes.iter().sum(), sizes.iter().sum()));
        }
        assert!(hashes(Vec::new(), 2, &control()).unwrap().is_empty());
    }

    #[test]
    fn what_cannot_be_read_is_named_and_the_user_may_stop() {
        let folder = tempfile::tempdir().unwrap();
        let (there, gone) = (folder.path().join("there"), folder.path().join("gone"));
        std::fs::write(&there, vec![1; 100]).unwrap();
        let code = |files: Vec<(PathBuf, u64)>, control: &Control| {
            let error = hashes(files, 2, control).unwrap_err();
            (error.findings()[0].code, error.findings()[0].file.clone())
        };
        let named = |path: &PathBuf| Some(path.display().to_string());
        assert_eq!(code(vec![(there.clone(), 100), (gone.clone(), 1)], &control()).1, named(&gone));
        assert_eq!(code(vec![(there.clone(), 101)], &control()), (codes::SOURCE_CHANGED, named(&there)));
        let stopped = control();
        stopped.cancel.store(true, Ordering::Relaxed);
        assert_eq!(code(vec![(there, 100)], &stopped).0, codes::INTERRUPTED);
    }
}
