//! Fills a staging folder: what the engine makes, what goes along, and what is said of it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Builder};

use super::arrays::Arrays;
use super::backlog::lock;
use super::filling::Filling;
use super::frames::{frames, underlay};
use super::options::{engine_options, Run};
use super::resume::keeps;
use super::sink::StagedSink;
use super::{outcome, piece, records};
use crate::codes;
use crate::distributed::prior::Prior;
use crate::engine::{self, Discard, Report};
use crate::error::{Error, Finding, Result, Severity};
use crate::format::Frame;
use crate::manifest::{Manifest, MANIFEST_NAME};
use crate::plan::{Form, Output, Plan};
use crate::publish::{OutFile, Staging};
use crate::stats::Level;
use crate::storage::only_read;
use crate::topics;

/// The files of a result, opened.
struct Opened {
    /// None where a file is a store of arrays.
    outs: Vec<Option<OutFile>>,
    arrays: Option<Arrays>,
    frames: Vec<Frame>,
}

impl Filling<'_> {
    /// Makes all of the result but its appearance.
    pub(super) fn fill(&self) -> Result<(Manifest, Vec<Finding>)> {
        let Filling { run, staging, .. } = *self;
        let Run { plan, options, .. } = *run;
        if staging.resumed() || self.prior.is_some() {
            forget_lost(plan, staging)?;
        }
        let by_file = plan.by_file();
        let Opened { outs, arrays, frames } = self.open(&by_file)?;
        if let Some(uploads) = self.uploads {
            uploads.begin(plan, &by_file, &frames, &outs)?;
        }
        let sink = StagedSink::new(self, &by_file, &frames, outs, arrays)?;
        let engine_options = engine_options(run, staging.folder());
        let report = self.execute(&sink, &engine_options)?;
        let mut report = read_again(run, report, &engine_options)?;
        report.findings = options.gate.pass(report.findings)?;
        self.write_companions()?;
        // On the descriptors that wrote: others may not be told of a write that failed.
        sync_all(&sink.files, options.threads)?;
        let written = plan.files.iter().zip(&sink.files).filter(|(_, file)| file.is_some());
        written.for_each(|(about, _)| staging.note_synced(&about.name));
        let mut manifest = outcome::manifest(plan, &report, options);
        manifest.provenance = self.prior.map(|prior| prior.provenance.clone());
        let mut identities =
            outcome::identities(plan, &by_file, &frames, &sink.files, self.uploads, &report)?;
        manifest.files = staging.listing()?;
        for file in &mut manifest.files {
            file.identity = identities.remove(file.name.as_str());
            file.from = options.above.get(&file.name).cloned();
        }
        if let Some(name) = identities.into_keys().next() {
            return Err(Finding::new(codes::WRITTEN_DIFFERS, "the file just written is missing")
                .file(name)
                .into());
        }
        staging.write(MANIFEST_NAME, &serde_json::to_vec_pretty(&manifest).expect("plain data"))?;
        Ok((manifest, report.findings))
    }

    /// Opens the files of the result, and writes into them what stands around the tensors.
    fn open(&self, by_file: &[Vec<usize>]) -> Result<Opened> {
        let Filling { run: &Run { plan, files, options, control, .. }, staging, prior, .. } = *self;
        let space = options.publish.space();
        let is_complete = |file: usize| prior.is_some_and(|prior| prior.complete[file]);
        let out = |(i, f): (usize, &crate::plan::OutFile)| match f.form {
            Form::Arrays(_) => Ok(None),
            _ if is_complete(i) => staging.read_only(&f.name, f.size).map(Some),
            _ => staging.file(&f.name, f.size, space).map(Some),
        };
        let outs: Vec<Option<OutFile>> = plan.files.iter().enumerate().map(out).collect::<Result<_>>()?;
        let arrays = Arrays::begin(plan, &staging.path(), options.arrays.as_ref())?;
        log::debug!(
            target: topics::PUBLISH,
            "{} data files: {} written around the page cache, {} continued; {space:?} space{}",
            outs.len(),
            outs.iter().flatten().filter(|file| file.is_direct()).count(),
            outs.iter().flatten().filter(|file| file.kept()).count(),
            if arrays.is_some() { "; arrays by their library" } else { "" },
        );
        let frames = frames(plan, by_file, files)?;
        let framed = outs.iter().zip(&frames).enumerate().filter(|(i, _)| !is_complete(*i));
        for (file, frame) in framed.filter_map(|(_, (file, frame))| Some((file.as_ref()?, frame))) {
            frame.pieces.iter().try_for_each(|(at, bytes)| file.write_all_at(*at, bytes))?;
        }
        for ((about, inside), file) in plan.files.iter().zip(by_file).zip(&outs) {
            if let (Form::Overlay(source), Some(file)) = (&about.form, file) {
                let outputs: Vec<&Output> = inside.iter().map(|&i| &plan.outputs[i]).collect();
                underlay(&files[*source as usize], &outputs, &about.zeros, file, control)?;
            }
        }
        Ok(Opened { outs, arrays, frames })
    }

    /// Has the engine make the tensors. Arrays are completed only if the result may be published.
    fn execute(&self, sink: &StagedSink, with: &engine::Options) -> Result<Report> {
        let Run { plan, files, options, control, .. } = *self.run;
        let executed = sink.flush_during(control, || match self.prior {
            Some(Prior { sizes, evidence, .. }) => {
                engine::conclude(plan, files, sink, with, sizes, evidence, control)
            }
            None => engine::execute(plan, files, sink, with, control),
        });
        let done = executed.and_then(|report| sink.finish().map(|()| report));
        let is_clean = |report: &Report| {
            let mut findings = report.findings.clone();
            // What may yet turn out to be no change is judged once that is known.
            findings.retain(|f| f.code != codes::SOURCE_CHANGED || f.severity == Severity::Error);
            options.gate.pass(findings).is_ok()
        };
        let done = done.and_then(|report| match &sink.arrays {
            Some(arrays) if is_clean(&report) => arrays.finish().map(|()| report),
            _ => Ok(report),
        });
        if let (Some(arrays), false) = (&sink.arrays, done.as_ref().is_ok_and(is_clean)) {
            arrays.abort();
        }
        match done {
            Ok(report) if is_clean(&report) => Ok(report),
            Ok(report) => Err(options.gate.pass(report.findings).map_or_else(|error| error, Error::from)),
            Err(error) => {
                if keeps(&error, options) {
                    // What cannot be noted is made again; the first error counts.
                    let _ = sink.flush();
                }
                Err(error)
            }
        }
    }

    /// Writes what goes along with the tensors: texts, copied files, the index.
    fn write_companions(&self) -> Result<()> {
        let Filling { run: &Run { plan, files, options, control, .. }, staging, .. } = *self;
        for (name, text) in &plan.texts {
            staging.write(name, text.as_bytes())?;
        }
        if plan.outputs.is_empty() {
            control.total.store(plan.sources.iter().map(|file| file.size).sum(), Ordering::Relaxed);
        }
        let copied = |bytes| {
            if plan.outputs.is_empty() {
                control.done.fetch_add(bytes, Ordering::Relaxed);
            }
            control.check_running()
        };
        for (i, file) in options.copies.iter().enumerate() {
            staging.copy_in(&file.name, &file.path, file.blake3.as_deref(), &copied)?;
            if plan.target == piece::PIECE {
                piece::still_named(&file.path, &files[i])?;
            }
        }
        match &plan.index {
            Some(name) => staging.write(name, &outcome::index(plan)),
            None => Ok(()),
        }
    }
}

/// Brings files to disk, several at once: a filesystem commits them together.
fn sync_all(files: &[Option<OutFile>], threads: usize) -> Result<()> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Ok(())));
    let work = || {
        while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = file.as_ref().map_or(Ok(()), OutFile::sync_with_times) {
                *lock(&failed) = Err(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(files.len()) {
            // Where the system starts no more threads, those that it has started do the work.
            let _ = Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Times that sources are read again because their status changed.
const MOST_READINGS: u32 = 3;

/// Reads sources again whose status alone changed while they were read. That is other permissions or a link;
/// or they were written to and their modification time was set back: only the content tells.
fn read_again(run: &Run<'_>, mut report: Report, options: &engine::Options) -> Result<Report> {
    let Run { plan, files, control, .. } = *run;
    let touched = |report: &Report| report.findings.iter().any(|f| f.code == codes::SOURCE_CHANGED);
    if !touched(&report) {
        return Ok(report);
    }
    only_read(files)?;
    let options = engine::Options { stats: Level::Nothing, encodes: 0, ..options.clone() };
    for _ in 0..MOST_READINGS {
        let before = files.iter().map(|f| f.now()).collect::<Result<Vec<_>>>()?;
        let again = match engine::execute(plan, files, &Discard, &options, control) {
            // What is held by now leaves no room for it: the warning stays.
            Err(error) if error.findings().iter().all(|f| f.code == codes::MEMORY_BUDGET) => {
                return Ok(report)
            }
            again => again?,
        };
        let differs = report.outputs.iter().zip(&again.outputs).position(|(a, b)| a.hash != b.hash);
        if let Some(output) = differs {
            let changed = report.findings.into_iter().find(|f| f.code == codes::SOURCE_CHANGED);
            let finding = changed.unwrap_or_else(|| Finding::new(codes::SOURCE_CHANGED, ""));
            return Err(Finding {
                message: "changed while it was read, and its time set back".into(),
                ..finding
            }
            .severity(Severity::Error)
            .tensor(&plan.outputs[output].name)
            .help("wait until the save is complete, then run again")
            .into());
        }
        if files.iter().map(|f| f.now()).collect::<Result<Vec<_>>>()? == before {
            for finding in report.findings.iter_mut().filter(|f| f.code == codes::SOURCE_CHANGED) {
                finding.severity = Severity::Note;
                finding.message =
                    "its status was changed while it was read; read again, it holds the same".into();
                finding.help = None;
            }
            return Ok(report);
        }
    }
    Ok(report)
}

/// Removes what an interrupted run left and this one does not write, and voids what the journal says of
/// data files that have to be made anew, before they are.
fn forget_lost(plan: &Plan, staging: &Staging) -> Result<()> {
    let data = plan.files.iter().enumerate().filter(|(_, f)| !matches!(f.form, Form::Arrays(_)));
    staging.keep_only(&data.clone().map(|(_, f)| f.name.as_str()).collect())?;
    for (i, file) in data {
        if !staging.has(&file.name, file.size)? {
            staging.journal().append(&records::anew(i))?;
        }
    }
    staging.journal().sync()
}
