//! Carries a plan out: preflight, staging, engine, manifest, publish.

mod arrays;
mod piece;
pub(crate) mod records;
pub(crate) mod sink;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use crate::codes;
use crate::distributed::meeting;
use crate::distributed::parts::{self, Prior};
use crate::engine::{self, Control, Discard, Report};
use crate::error::{Error, Finding, Result, Severity};
use crate::files;
use crate::format::{dcp, torch_zip, Frame, Member};
use crate::gate::Gate;
use crate::hash;
use crate::manifest::{file_identity, Manifest, ManifestTensor, MANIFEST_NAME};
use crate::plan::{Form, Output, Plan};
use crate::publish::clock::Patience;
use crate::publish::{self, Needs, OutFile, Space, Staging};
use crate::stats::Level;
use crate::storage::SourceFile;

pub use crate::files::INDEX_NAME;
use arrays::Arrays;
pub use arrays::{Array, ArrayWriter};
pub use piece::write_piece;
use sink::StagedSink;

/// Bytes copied at a time.
const CHUNK: u64 = 1 << 20;

/// How to write.
#[derive(Debug, Clone)]
pub struct Options {
    /// Worker threads.
    pub threads: usize,
    /// Anonymous memory that must not be exceeded, in bytes.
    pub memory: u64,
    /// How to publish.
    pub publish: publish::Options,
    /// Files copied to the result: (name, path).
    pub copies: Vec<(String, PathBuf)>,
    /// Files of the result that come from a folder above the checkpoint: where from, by name.
    pub above: BTreeMap<String, String>,
    /// Values of the source for the manifest.
    pub values: serde_json::Value,
    /// True to leave holes where the result holds zeros; no space is reserved for it then.
    pub sparse: bool,
    /// Writes the arrays of a result that holds some.
    pub arrays: Option<Arc<dyn ArrayWriter>>,
    /// True if the manifest is to carry statistics of each tensor.
    pub stats: bool,
    /// True if the sources were compared with a manifest of theirs, so that nothing in them can be swapped.
    pub expected: bool,
    /// How long other processes of the same run are given to show a sign of life.
    pub patience: Patience,
    /// Which rank has each root of the sources on its own disk, where not all see all of them.
    pub near: Option<Vec<u32>>,
    /// How findings are judged before the result is published.
    pub gate: Gate,
}

/// Roots of the sources, for the check that the destination is not among them.
pub type Roots = [PathBuf];

/// Stops a run that was cancelled.
pub(crate) fn go_on(control: &Control) -> Result<()> {
    match is_running(control) {
        true => Ok(()),
        false => Err(Finding::new(codes::INTERRUPTED, "stopped by the user").into()),
    }
}

pub(crate) fn is_running(control: &Control) -> bool {
    !control.cancel.load(std::sync::atomic::Ordering::Relaxed)
}

/// Writes and publishes a plan's result.
///
/// # Errors
/// All findings that keep the result from being published. Nothing is published then, unless the error
/// says so ([`Error::is_after_publishing`]). After an interrupt, or when the system failed, the staging
/// folder stays for `resume`; otherwise it is removed.
pub fn write(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    roots: &Roots,
    out: &Path,
    options: &Options,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let written = write_alone(plan, files, roots, out, options, control)?;
    if options.publish.resume {
        meeting::forget_dead(out);
    }
    Ok(written)
}

fn write_alone(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    roots: &Roots,
    out: &Path,
    options: &Options,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let run = plan.digest();
    // Before anything is made for it, on disk or in memory.
    engine::admit(plan, &engine_options(plan, options, out))?;
    publish::preflight(out, roots, &run, &needs(plan, files, options), &options.publish)?;
    let mut staging = Staging::begin(out, &run, &document(plan), &options.publish)?;
    let mut findings = staging.left_beside(plan.version);
    let notices = || control.notices.lock().unwrap_or_else(PoisonError::into_inner);
    notices().extend(findings.iter().cloned());
    if staging.sealed() {
        let stale = stale_files(&staging, plan, options)?;
        let folder = staging.folder().to_path_buf();
        if stale.is_empty() || !staging.unseal().map_err(|error| resumable(error, &folder))? {
            findings.extend(stale.iter().map(|name| stale_finding(out, name)));
            return roll_forward(staging, plan, out, findings, control);
        }
    }
    if let Some(shared) = staging.shared()? {
        return parts::go_on_alone(plan, files, roots, staging, shared, out, options, findings, control);
    }
    notices().extend(staging.forecast());
    complete(plan, files, staging, options, None, findings, control)
}

/// Makes what is not made yet, judges all of it, and publishes.
pub(crate) fn complete(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    staging: Staging,
    options: &Options,
    prior: Option<&Prior>,
    mut findings: Vec<Finding>,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let folder = staging.folder().to_path_buf();
    let done = fill(plan, files, &staging, options, prior, control).and_then(|filled| {
        // The last look at the sources: what was read is what is there.
        files.iter().try_for_each(|f| f.unchanged())?;
        let (manifest, found) = filled;
        findings.extend(found);
        // What was noticed at the destination too.
        Ok((manifest, options.gate.pass(std::mem::take(&mut findings))?))
    });
    match done {
        Ok((manifest, mut findings)) => {
            let published = staging.publish(&last_names(plan), &|| is_running(control));
            findings.extend(published.map_err(|error| match error.is_after_publishing() {
                true => error,
                false => resumable(error, &folder),
            })?);
            Ok((manifest, findings))
        }
        Err(error)
            if keeps(&error, options) && (error.is_interrupt() || staging.journal().holds_records()) =>
        {
            Err(resumable(error, &folder))
        }
        Err(error) => {
            // What cannot be removed must not hide why it should be.
            match staging.discard() {
                Ok(()) => Err(error),
                Err(second) => {
                    let mut findings = error.into_findings();
                    findings.extend(second.into_findings());
                    Err(Error::from(findings))
                }
            }
        }
    }
}

/// What a staging folder says of its plan.
pub fn document(plan: &Plan) -> Vec<u8> {
    let document = serde_json::json!({
        "plan": plan.digest(), "version": plan.version, "target": plan.target, "outputs": plan.outputs.len(), "records": RECORDS_VERSION,
    });
    serde_json::to_vec(&document).expect("plain data")
}

/// Version of the journal's records: those of another are not continued.
const RECORDS_VERSION: u32 = 2;

/// What the run will need at its destination.
pub(crate) fn needs(plan: &Plan, files: &[Arc<SourceFile>], options: &Options) -> Needs {
    let copied: u64 =
        options.copies.iter().filter_map(|(_, p)| std::fs::metadata(p).ok()).map(|m| m.len()).sum();
    let each = if options.stats { 2400 } else { 400 };
    let blocks: u64 = match plan.files.iter().any(|f| matches!(f.form, Form::Arrays(_))) {
        // The manifest lists the store's files, each of a MiB or more but for the last of an array.
        true => plan.bytes() / CHUNK + plan.outputs.len() as u64,
        false => 0,
    };
    let named = plan.files.len() as u64 + blocks + options.copies.len() as u64;
    let names: u64 = plan.outputs.iter().map(|o| 2 * o.name.len() as u64).sum();
    let manifest =
        4096 + names + each * plan.outputs.len() as u64 + 200 * plan.sources.len() as u64 + 250 * named;
    let bytes = match options.sparse {
        true => 0,
        false => plan.bytes() + copied + manifest + aside(plan, options),
    };
    Needs {
        bytes,
        files: (plan.files.len() + plan.texts.len() + folders(plan) + options.copies.len() + 2) as u64,
        open_files: (files.len() + plan.files.len() + 64) as u64,
    }
}

/// True for errors that say nothing against what is written so far: the system's, and a companion's.
fn keeps(error: &Error, options: &Options) -> bool {
    let of_system =
        [codes::IO, codes::NO_SPACE, codes::PERMISSION, codes::TOO_MANY_FILES, codes::INTERRUPTED];
    let of_companion = |f: &Finding| {
        let named = |(_, path): &(String, PathBuf)| f.file.as_deref() == Some(&*path.display().to_string());
        options.copies.iter().any(named)
    };
    let errors = error.findings().iter().filter(|f| f.severity == Severity::Error);
    errors.into_iter().all(|f| of_system.contains(&f.code) || of_companion(f))
}

/// What is said of a run that ended before its result appeared. Another run may have published meanwhile.
const UNPUBLISHED: &str = "this run wrote nothing to OUT";

/// Says how a run that stopped can be continued.
pub(crate) fn resumable(error: Error, folder: &Path) -> Error {
    let mut findings = error.into_findings();
    if findings.iter().any(|f| f.code == codes::PUBLISH_CONFLICT) {
        return Error::from(findings); // It says itself where things are.
    }
    let way = |f: &Finding| match f.code {
        // Of the sources as they are now it is another run.
        codes::SOURCE_CHANGED => format!("{UNPUBLISHED}; remove {}", folder.display()),
        _ => {
            format!("{UNPUBLISHED}; the same command with --resume continues, or remove {}", folder.display())
        }
    };
    // Where another process is at work it may have published, and its folder is not to be removed. What another rank
    // stopped for says it already.
    let says = |f: &Finding| f.help.as_ref().is_some_and(|help| help.ends_with(&way(f)));
    let told = |f: &&mut Finding| f.severity == Severity::Error && f.code != codes::LOCKED && !says(f);
    for f in findings.iter_mut().filter(told) {
        f.help = Some(match f.help.take().filter(|_| f.code != codes::INTERRUPTED) {
            Some(help) => format!("{help}; {}", way(f)),
            None => way(f),
        });
    }
    Error::from(findings)
}

/// Finishes publishing what an earlier run has completed.
pub(crate) fn roll_forward(
    staging: Staging,
    plan: &Plan,
    out: &Path,
    mut findings: Vec<Finding>,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    findings.extend(staging.publish(&last_names(plan), &|| is_running(control))?);
    match Manifest::read(&out.join(MANIFEST_NAME)) {
        Ok(manifest) => Ok((manifest, findings)),
        Err(error) => {
            // What was said on the way, of what is kept for one, is not said again.
            let mut told = error.after_publishing(out).into_findings();
            told.extend(findings);
            Err(Error::from(told))
        }
    }
}

/// Companions of a sealed result that are not what they are now: changed, added or gone since.
fn stale_files(staging: &Staging, plan: &Plan, options: &Options) -> Result<Vec<String>> {
    if !staging.holds_sealed()? {
        return Ok(Vec::new());
    }
    // Moved to its place already, as one of the last.
    let Ok(manifest) = Manifest::read(&staging.path().join(MANIFEST_NAME)) else { return Ok(Vec::new()) };
    let of_plan = |name: &str| {
        plan.index.as_deref() == Some(name)
            || plan.texts.contains_key(name)
            || plan.files.iter().any(|f| f.name == name || name.starts_with(&format!("{}/", f.name)))
    };
    let mut sealed: BTreeMap<&str, Option<&String>> = manifest
        .files
        .iter()
        .filter(|f| !of_plan(&f.name))
        .map(|f| (f.name.as_str(), f.blake3.as_ref()))
        .collect();
    let mut stale = Vec::new();
    for (name, path) in &options.copies {
        let now = publish::hash_of_file(path)?;
        if sealed.remove(name.as_str()).flatten() != Some(&now) {
            stale.push(name.clone());
        }
    }
    stale.extend(sealed.into_keys().map(String::from));
    Ok(stale)
}

fn stale_finding(out: &Path, name: &str) -> Finding {
    Finding::new(
        codes::SOURCE_CHANGED,
        "changed since the interrupted run completed its result, which was published as it was",
    )
    .severity(Severity::Warning)
    .file(out.join(name))
    .help("run again with --overwrite to have it as it is now")
}

/// Bytes of decoded blocks that may have to lie on disk at a time.
fn aside(plan: &Plan, options: &Options) -> u64 {
    // What memory will hold of them is known only once the run has begun: half of the budget at least is not theirs.
    engine::decoding(plan).live.saturating_sub(options.memory / 4)
}

/// Number of folders of the result.
fn folders(plan: &Plan) -> usize {
    let names = plan.files.iter().map(|f| &f.name).chain(plan.texts.keys());
    let folders: BTreeSet<&str> =
        names.flat_map(|name| name.match_indices('/').map(|(end, _)| &name[..end])).collect();
    folders.len()
}

/// Top-level names that appear after all others; the last one is where readers start.
fn last_names(plan: &Plan) -> Vec<&str> {
    std::iter::once(MANIFEST_NAME).chain(plan.pointers.iter().map(String::as_str)).collect()
}

/// What stands around the outputs of each file.
pub(crate) fn frames(plan: &Plan, by_file: &[Vec<usize>], sources: &[Arc<SourceFile>]) -> Result<Vec<Frame>> {
    let frame = |(file, inside): (&crate::plan::OutFile, &Vec<usize>)| {
        let outputs: Vec<&Output> = inside.iter().map(|&i| &plan.outputs[i]).collect();
        if let Form::Overlay(source) = file.form {
            return overlay(&sources[source as usize], &outputs, &file.zeros);
        }
        let (frame, offsets) = files::frame(file, &outputs)?;
        if frame.size != file.size || outputs.iter().zip(&offsets).any(|(o, at)| o.offset != *at) {
            return Err(Finding::new(codes::BAD_VALUE, "the plan does not fit the file's format")
                .file(&file.name)
                .into());
        }
        Ok(frame)
    };
    plan.files.iter().zip(by_file).map(frame).collect()
}

/// A copy of `source`: only the members that outputs and zeros lie in get another checksum.
fn overlay(source: &SourceFile, outputs: &[&Output], zeros: &[(u64, u64)]) -> Result<Frame> {
    let mut members = torch_zip::replaceable(source)?;
    let replaced: Vec<(u64, u64)> =
        outputs.iter().map(|o| (o.offset, o.nbytes())).chain(zeros.iter().copied()).collect();
    let within = |m: &Member, (at, len): (u64, u64)| m.offset <= at && at + len <= m.offset + m.len;
    if let Some(i) = replaced.iter().position(|r| !members.iter().any(|m| within(m, *r))) {
        return Err(Finding::new(codes::UNSUPPORTED, "its bytes cannot be replaced in place")
            .file(source.path())
            .tensor(outputs.get(i).map_or("data.pkl", |o| o.key()))
            .help("the member is compressed: save the file again with torch.save")
            .into());
    }
    members.retain(|m| replaced.iter().any(|r| within(m, *r)));
    let pieces = zeros.iter().map(|&(at, len)| (at, vec![0; len as usize])).collect();
    Ok(Frame { pieces, members, size: source.size() })
}

/// Copies what nothing replaces from the source of an overlay.
fn underlay(
    source: &SourceFile,
    outputs: &[&Output],
    zeros: &[(u64, u64)],
    out: &OutFile,
    control: &Control,
) -> Result<()> {
    let mut taken: Vec<(u64, u64)> = outputs.iter().map(|o| (o.offset, o.offset + o.nbytes())).collect();
    taken.extend(zeros.iter().map(|&(at, len)| (at, at + len)));
    taken.push((source.size(), source.size()));
    taken.sort_unstable();
    let mut bytes = vec![0; CHUNK as usize];
    let mut at = 0;
    for (lo, hi) in taken {
        while at < lo {
            go_on(control)?;
            let n = CHUNK.min(lo - at) as usize;
            source.read_at(at, &mut bytes[..n])?;
            out.write_all_at(at, &bytes[..n])?;
            at += n as u64;
        }
        at = at.max(hi);
    }
    Ok(())
}

pub(crate) fn engine_options(plan: &Plan, options: &Options, scratch: &Path) -> engine::Options {
    engine::Options {
        threads: options.threads,
        memory: options.memory,
        scratch_dir: scratch.to_path_buf(),
        held: None,
        encodes: largest_block(plan),
        stats: if options.stats { Level::Full } else { Level::Nothing },
    }
}

fn fill(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    staging: &Staging,
    options: &Options,
    prior: Option<&Prior>,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let space = if options.sparse { Space::Sparse } else { Space::Reserved };
    let is_complete = |file: usize| prior.is_some_and(|prior| prior.complete[file]);
    let out = |(i, f): (usize, &crate::plan::OutFile)| match f.form {
        Form::Arrays(_) => Ok(None),
        _ if is_complete(i) => staging.read_only(&f.name, f.size).map(Some),
        _ => staging.file(&f.name, f.size, space).map(Some),
    };
    if staging.resumed() || prior.is_some() {
        forget_lost(plan, staging)?;
    }
    let outs: Vec<Option<OutFile>> = plan.files.iter().enumerate().map(out).collect::<Result<_>>()?;
    let arrays = Arrays::begin(plan, &staging.path(), options.arrays.as_ref())?;
    let by_file = plan.by_file();
    let frames = frames(plan, &by_file, files)?;
    let framed = outs.iter().zip(&frames).enumerate().filter(|(i, _)| !is_complete(*i));
    for (file, frame) in framed.filter_map(|(_, (file, frame))| Some((file.as_ref()?, frame))) {
        frame.pieces.iter().try_for_each(|(at, bytes)| file.write_all_at(*at, bytes))?;
    }
    for ((about, inside), file) in plan.files.iter().zip(&by_file).zip(&outs) {
        if let (Form::Overlay(source), Some(file)) = (&about.form, file) {
            let outputs: Vec<&Output> = inside.iter().map(|&i| &plan.outputs[i]).collect();
            underlay(&files[*source as usize], &outputs, &about.zeros, file, control)?;
        }
    }
    let sink = StagedSink::new(plan, staging, &frames, outs, arrays, prior, options)?;
    let engine_options = engine_options(plan, options, staging.folder());
    let executed = match prior {
        Some(Prior { sizes, evidence, .. }) => {
            engine::conclude(plan, files, &sink, &engine_options, sizes, evidence, control)
        }
        None => engine::execute(plan, files, &sink, &engine_options, control),
    };
    let done = executed.and_then(|report| sink.finish(&frames, control).map(|()| report));
    // Only what may be published is completed.
    let clean = |report: &Report| {
        let mut findings = report.findings.clone();
        // What may yet turn out to be no change is judged once that is known.
        findings.retain(|f| f.code != codes::SOURCE_CHANGED || f.severity == Severity::Error);
        options.gate.pass(findings).is_ok()
    };
    let done = done.and_then(|report| match &sink.arrays {
        Some(arrays) if clean(&report) => arrays.finish().map(|()| report),
        _ => Ok(report),
    });
    if let (Some(arrays), false) = (&sink.arrays, done.as_ref().is_ok_and(clean)) {
        arrays.abort();
    }
    let report = match done {
        Ok(report) => report,
        Err(error) => {
            if keeps(&error, options) {
                // What cannot be noted is made again; the first error counts.
                let _ = sink.flush();
            }
            return Err(error);
        }
    };
    if !clean(&report) {
        return Err(options.gate.pass(report.findings).map_or_else(|error| error, Error::from));
    }
    let mut report = read_again(plan, files, report, &engine_options, control)?;
    report.findings = options.gate.pass(report.findings)?;
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
        go_on(control)
    };
    for (i, (name, path)) in options.copies.iter().enumerate() {
        staging.copy_in(name, path, &copied)?;
        if plan.target == piece::PIECE {
            piece::still_named(path, &files[i])?;
        }
    }
    if let Some(name) = &plan.index {
        staging.write(name, &index(plan))?;
    }
    // On the descriptors that wrote: others may not be told of a write that failed.
    sink.files.iter().flatten().try_for_each(OutFile::sync)?;
    let mut manifest = manifest(plan, &report, options);
    manifest.provenance = prior.map(|prior| prior.provenance.clone());
    let mut identities = HashMap::new();
    for (((file, inside), frame), out) in plan.files.iter().zip(&by_file).zip(&frames).zip(&sink.files) {
        let identity = match &file.form {
            Form::Safetensors => {
                let header = blake3::hash(&frame.pieces[0].1[8..]);
                file_identity(header.as_bytes(), inside.iter().map(|&i| &report.outputs[i].hash))
            }
            // It names the other files' records, which are read back by their places.
            Form::Pickle(_) => continue,
            // Its tensors are checked whole: how a store divides them into files is its own affair.
            Form::Arrays(_) => continue,
            Form::Records(_) | Form::TorchZip(_) | Form::Overlay(_) => {
                read_back(plan, file, inside, &report, out.as_ref().expect("no array"))?
            }
        };
        identities.insert(file.name.as_str(), identity);
    }
    manifest.files = staging.listing()?;
    for file in &mut manifest.files {
        file.identity = identities.remove(file.name.as_str());
        file.from = options.above.get(&file.name).cloned();
    }
    if let Some(name) = identities.into_keys().next() {
        return Err(Finding::new(codes::WRITTEN_DIFFERS, "the file just written is not there")
            .file(name)
            .into());
    }
    staging.write(MANIFEST_NAME, &serde_json::to_vec_pretty(&manifest).expect("plain data"))?;
    Ok((manifest, report.findings))
}

/// Times that sources are read again because their status changed.
const MOST_READINGS: u32 = 3;

/// Reads sources again whose status alone changed while they were read. That is other permissions or a link;
/// or they were written to and their modification time was set back: only the content tells.
fn read_again(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    mut report: Report,
    options: &engine::Options,
    control: &Control,
) -> Result<Report> {
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

/// Errors if the status of a file alone changed, where some lie on other hosts: these would give what they have lent once
/// more, which proves nothing.
pub(crate) fn only_read(files: &[Arc<SourceFile>]) -> Result<()> {
    match files.iter().any(|file| file.is_elsewhere() || file.blocks_apart().is_some()) {
        true => files.iter().try_for_each(|file| file.untouched()),
        false => Ok(()),
    }
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

/// Bytes of the largest block of the arrays that are written.
fn largest_block(plan: &Plan) -> u64 {
    let block = |o: &Output| match &plan.files[o.file as usize].form {
        Form::Arrays(store) => {
            let block = store.blocks.get(o.key())?;
            let elements: u64 = block.iter().zip(&o.shape).map(|(b, n)| b.min(n)).product();
            Some(elements * o.dtype.size() as u64)
        }
        _ => None,
    };
    plan.outputs.iter().filter_map(block).max().unwrap_or(0)
}

fn index(plan: &Plan) -> Vec<u8> {
    let total: u64 = plan.outputs.iter().map(Output::nbytes).sum();
    let map: BTreeMap<&str, &str> =
        plan.outputs.iter().map(|o| (o.name.as_str(), plan.files[o.file as usize].name.as_str())).collect();
    let json = serde_json::json!({"metadata": {"total_size": total}, "weight_map": map});
    serde_json::to_vec_pretty(&json).expect("plain data")
}

fn manifest(plan: &Plan, report: &Report, options: &Options) -> Manifest {
    let mut manifest = Manifest::new(&plan.target);
    manifest.plan = plan.digest();
    if plan.target == piece::PIECE {
        // Its files are the sources.
        manifest.not_proven = piece::NOT_PROVEN.into();
    } else {
        manifest.sources = plan.sources.clone();
    }
    manifest.topology = plan.topology.clone();
    manifest.axes = plan.axes.clone();
    manifest.value_ops = Manifest::ops_of(plan);
    manifest.values = options.values.clone();
    let settled = |note: &&Finding| options.expected && codes::UNPROVEN.contains(&note.code);
    let notes: Vec<&Finding> = plan.notes.iter().filter(|note| !settled(note)).collect();
    for note in notes.iter().filter(|note| codes::UNPROVEN.contains(&note.code)) {
        manifest.not_proven += &format!("; {}", note.message);
    }
    let decided = &options.gate.decided;
    let same = |a: &Finding, b: &Finding| *a == Finding { decided: a.decided.clone(), ..b.clone() };
    let own = notes.into_iter().filter(|note| !decided.iter().any(|other| same(note, other)));
    manifest.findings = own.chain(&report.findings).chain(decided).cloned().collect();
    manifest.tensors = plan
        .outputs
        .iter()
        .zip(&report.outputs)
        .map(|(o, r)| ManifestTensor {
            name: o.key().to_string(),
            dtype: o.dtype,
            shape: o.shape.clone(),
            file: plan.files[o.file as usize].name.clone(),
            offset: match plan.files[o.file as usize].form {
                Form::Arrays(_) => None,
                _ => Some(o.offset),
            },
            blake3: hash::hex(&r.hash),
            stats: r.seen.stats().cloned(),
        })
        .collect();
    manifest
}

/// Identity of a torch file, from what a reader finds in it; so it is also known to be readable.
fn read_back(
    plan: &Plan,
    file: &crate::plan::OutFile,
    inside: &[usize],
    report: &Report,
    out: &OutFile,
) -> Result<String> {
    let source = SourceFile::open(out.path())?;
    let parsed = match &file.form {
        Form::Records(_) => {
            let outputs: Vec<&Output> = inside.iter().map(|&i| &plan.outputs[i]).collect();
            dcp::records(&source, &files::tensor_records(file, &outputs)?)?
        }
        _ => torch_zip::parse(&source)?,
    };
    let by_key: HashMap<&str, usize> = inside.iter().map(|&i| (plan.outputs[i].key(), i)).collect();
    let mut hashes = Vec::with_capacity(inside.len());
    for tensor in &parsed.tensors {
        let key = tensor.path.join(".");
        let place = parsed.blobs[tensor.blob as usize].offset + tensor.offset;
        // A second name of a tensor has no output of its own.
        if let Some(&i) = by_key.get(key.as_str()) {
            let want = &plan.outputs[i];
            if (tensor.dtype, &tensor.shape, place) != (want.dtype, &want.shape, want.offset) {
                return Err(Finding::new(codes::IO, "the file just written reads back otherwise")
                    .file(out.path())
                    .tensor(key)
                    .expected(
                        format!("{} {:?} at {}", want.dtype, want.shape, want.offset),
                        format!("{} {:?} at {place}", tensor.dtype, tensor.shape),
                    )
                    .into());
            }
            hashes.push(&report.outputs[i].hash);
        }
    }
    if hashes.len() != inside.len() {
        return Err(Finding::new(codes::IO, "tensors of the file just written")
            .file(out.path())
            .expected(inside.len(), hashes.len())
            .into());
    }
    Ok(file_identity(&parsed.header_digest, hashes.into_iter()))
}
