//! Uploads a result to a store: files while they are made, what goes along once it is complete, and last what makes it
//! appear.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Builder, JoinHandle};

use super::backlog::lock;
use super::destination::Destination;
use super::file_parts::{FileParts, MadeFile, MadeFiles, LOOK};
use crate::codes;
use crate::engine::Control;
use crate::error::{without_panic, Error, Finding, Result};
use crate::format::Frame;
use crate::manifest::{Manifest, MANIFEST_NAME};
use crate::plan::{Form, Output, Plan};
use crate::publish::{OutFile, Staging};

/// Files that are uploaded at a time while they are made: tiles come in the order of files.
const MADE_AT_ONCE: usize = 2;
/// Complete files that are uploaded at a time; most are small.
const COMPLETE_AT_ONCE: usize = 8;
/// Name of the file by which Orbax knows a complete folder in a bucket.
/// source: orbax/checkpoint/_src/path/atomicity.py
const COMMIT_MARKER: &str = "commit_success.txt";

/// The uploads of one run.
#[derive(Debug)]
pub(super) struct Uploads {
    destination: Arc<dyn Destination>,
    files: Arc<MadeFiles>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Uploads {
    /// No uploads yet.
    pub(super) fn new(destination: &Arc<dyn Destination>) -> Uploads {
        let (files, threads) = (Arc::default(), Mutex::default());
        Uploads { destination: Arc::clone(destination), files, threads }
    }

    /// Begins to upload the files whose bytes are final as they are made.
    ///
    /// # Errors
    /// What the store reports; those of the system.
    pub(super) fn begin(
        &self,
        plan: &Plan,
        by_file: &[Vec<usize>],
        frames: &[Frame],
        outs: &[Option<OutFile>],
    ) -> Result<()> {
        let complete = self.destination.list_complete()?;
        let mut files = Vec::with_capacity(outs.len());
        for (((about, inside), frame), out) in plan.files.iter().zip(by_file).zip(frames).zip(outs) {
            let outputs: Vec<(usize, &Output)> = inside.iter().map(|&i| (i, &plan.outputs[i])).collect();
            let has_bytes = outputs.iter().any(|(_, output)| output.nbytes() > 0);
            let Some(out) = out.as_ref().filter(|_| has_bytes) else {
                // It goes along once all is made.
                files.push(None);
                continue;
            };
            // Others get their checksums, and are read back, once all of them is made.
            let is_final = matches!(about.form, Form::Safetensors) && frame.members.is_empty();
            let kinds = (is_final, plan.pointers.contains(&about.name));
            let recorded = complete.get(&about.name);
            files.push(Some(MadeFile::new(
                &about.name,
                about.size,
                out.for_upload()?,
                &outputs,
                kinds,
                recorded,
            )));
        }
        let count = files.iter().flatten().count().min(MADE_AT_ONCE);
        self.files.set(files);
        let mut threads = lock(&self.threads);
        for _ in 0..count {
            let (files, destination) = (Arc::clone(&self.files), Arc::clone(&self.destination));
            let thread = Builder::new()
                .name("fastshard-upload".into())
                .spawn(move || upload_made(&files, &*destination));
            threads.push(thread.map_err(|error| Error::thread(&error))?);
        }
        Ok(())
    }

    /// The files that are made and uploaded at the same time.
    pub(super) fn files(&self) -> &MadeFiles {
        &self.files
    }

    /// Stores all of the result in `staging` that is not stored yet, and makes it appear: the names in `last` in their order
    /// after all others, and then the markers of Orbax.
    ///
    /// # Errors
    /// What the store reports, or finds otherwise than it was put there; `FS510`.
    pub(super) fn commit(
        self,
        staging: &Staging,
        plan: &Plan,
        manifest: &Manifest,
        last: &[&str],
        control: &Control,
    ) -> Result<()> {
        self.files.wait_until_stored(false, control)?;
        let made_names: BTreeSet<&str> = plan
            .files
            .iter()
            .enumerate()
            .filter(|(number, _)| self.files.holds(*number))
            .map(|(_, file)| file.name.as_str())
            .collect();
        let is_made = |name: &str| made_names.contains(name);
        let last: Vec<&str> = last.iter().copied().chain(list_markers(manifest)).collect();
        let last_names: BTreeSet<&str> = last.iter().copied().collect();
        let before_last: Vec<(&str, u64)> = manifest
            .files
            .iter()
            .map(|file| (file.name.as_str(), file.size))
            .filter(|(name, _)| !last_names.contains(name))
            .collect();
        let rest: Vec<(&str, u64)> = before_last.iter().filter(|(name, _)| !is_made(name)).copied().collect();
        upload_complete(staging, &rest, &*self.destination, control)?;
        control.check_running()?;
        self.destination.check(&before_last)?;
        for name in last {
            if is_made(name) {
                self.files.wait_until_stored(true, control)?;
            } else if name == MANIFEST_NAME || manifest.files.iter().any(|file| file.name == name) {
                // A name of a folder: what is in it is stored already.
                self.destination.put_last(name, &staging.path().join(name))?;
            }
        }
        Ok(())
    }
}

/// Orbax's markers of complete folders, the outermost last.
fn list_markers(manifest: &Manifest) -> Vec<&str> {
    let names = manifest.files.iter().map(|file| file.name.as_str());
    let mut markers: Vec<&str> =
        names.filter(|name| name.rsplit('/').next() == Some(COMMIT_MARKER)).collect();
    markers.sort_by_key(|name| Reverse(name.matches('/').count()));
    markers
}

impl Drop for Uploads {
    fn drop(&mut self) {
        self.files.stop(Finding::new(codes::INTERRUPTED, "the run has ended").into());
        for thread in lock(&self.threads).drain(..) {
            let _ = thread.join();
        }
    }
}

/// Uploads files that are made meanwhile, one after another.
fn upload_made(files: &Arc<MadeFiles>, destination: &dyn Destination) {
    while let Some((number, name, parts)) = files.choose() {
        let upload = || {
            destination.upload(&name, parts)?;
            files.content(number)?.map_or(Ok(()), |content| destination.record(&name, &content))
        };
        files.end_upload(number, without_panic(upload));
    }
}

/// Uploads complete files, several at a time.
fn upload_complete(
    staging: &Staging,
    files: &[(&str, u64)],
    destination: &dyn Destination,
    control: &Control,
) -> Result<()> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Ok(())));
    let (has_ended, is_done) = (Arc::new(AtomicBool::new(false)), AtomicBool::new(false));
    let upload = |name: &str, size: u64| {
        control.check_running()?;
        let file = staging.read_only(name, size)?.for_upload()?;
        destination.upload(name, FileParts::of_file(file, size, &has_ended))
    };
    let work = || {
        while let Some((name, size)) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            if lock(&failed).is_err() {
                return;
            }
            if let Err(error) = without_panic(|| upload(name, *size)) {
                *lock(&failed) = Err(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..COMPLETE_AT_ONCE.min(files.len()) {
            // Where the system starts no more threads, those that it has started do the work.
            let _ = Builder::new().spawn_scoped(scope, work);
        }
        let _ = Builder::new().spawn_scoped(scope, || {
            // Who uploads may wait for a server for long.
            while !is_done.load(Ordering::Relaxed) && control.is_running() {
                thread::sleep(LOOK);
            }
            has_ended.store(!control.is_running(), Ordering::Relaxed);
        });
        work();
        is_done.store(true, Ordering::Relaxed);
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner)
}
