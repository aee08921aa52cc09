//! Carries a plan out: preflight, staging, engine, manifest, publish.

mod arrays;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::codes;
use crate::engine::{self, Control, Report, Sink, TileDone};
use crate::error::{Error, Finding, Result, Severity};
use crate::files;
use crate::format::{dcp, torch_zip, Frame, Member};
use crate::hash::{self, Segments};
use crate::manifest::{file_identity, Manifest, ManifestFile, ManifestTensor, MANIFEST_NAME};
use crate::plan::{Form, Output, Plan};
use crate::publish::{self, Needs, OutFile, Space, Staging};
use crate::stats::Level;
use crate::storage::SourceFile;

use arrays::Arrays;
pub use arrays::{Array, ArrayWriter};

/// Bytes written between two records of what is done.
const JOURNAL_EVERY: u64 = 256 << 20;
/// Bytes read back at a time, for a checksum over what an earlier run has written.
const CHUNK: u64 = 1 << 20;
/// Bytes written to a file before the system is asked to start writing them out.
const WRITEBACK_EVERY: u64 = 32 << 20;

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
    /// Values of the source for the manifest.
    pub values: serde_json::Value,
    /// True to leave holes where the result holds zeros; no space is reserved for it then.
    pub sparse: bool,
    /// Writes the arrays of a result that holds some.
    pub arrays: Option<Arc<dyn ArrayWriter>>,
    /// True if the manifest is to carry statistics of each tensor.
    pub stats: bool,
}

/// Tiles that are written and not yet journalled.
#[derive(Default)]
struct Pending {
    records: Vec<Vec<u8>>,
    /// Files that the records speak of.
    files: BTreeSet<u32>,
    bytes: u64,
}

struct StagedSink<'a> {
    outputs: &'a [Output],
    /// Files by their place in the plan; none for a store of arrays.
    files: Vec<Option<OutFile>>,
    arrays: Option<Arrays>,
    staging: &'a Staging,
    /// Tiles that earlier runs have journalled, by output, index and size.
    claims: HashMap<(u32, u64, u64), TileDone>,
    pending: Mutex<Pending>,
    /// Held by the one who brings data to disk, so that the others go on writing meanwhile.
    flushing: Mutex<()>,
    written: Vec<Mutex<u64>>,
    /// The member of its file that an output lies in, where that file names its checksum.
    member_of: Vec<Option<usize>>,
    /// Checksums of what is written so far, by file and member.
    sums: Vec<Vec<Mutex<Segments>>>,
    fsync: bool,
    sparse: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn record(output: usize, tile: &TileDone) -> Vec<u8> {
    let mut bytes = (output as u32).to_le_bytes().to_vec();
    bytes.extend(tile.index.to_le_bytes());
    bytes.extend(tile.size.to_le_bytes());
    bytes.extend(tile.value);
    bytes.extend(tile.non_finite.to_le_bytes());
    bytes.extend(tile.crc32.iter().flat_map(|crc| crc.to_le_bytes()));
    bytes
}

fn parse_record(bytes: &[u8]) -> Option<(u32, TileDone)> {
    let output = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?);
    let index = u64::from_le_bytes(bytes.get(4..12)?.try_into().ok()?);
    let size = u64::from_le_bytes(bytes.get(12..20)?.try_into().ok()?);
    let value = bytes.get(20..52)?.try_into().ok()?;
    let non_finite = u64::from_le_bytes(bytes.get(52..60)?.try_into().ok()?);
    let crc32 = match &bytes[60..] {
        [] => None,
        crc => Some(u32::from_le_bytes(crc.try_into().ok()?)),
    };
    Some((output, TileDone { index, size, value, non_finite, crc32 }))
}

impl StagedSink<'_> {
    /// Brings data to disk, then says so: never the other way round.
    fn flush(&self) -> Result<()> {
        let _one = lock(&self.flushing);
        // What is in these records was written before they were taken, so the syncs below cover it.
        let Pending { records, files, .. } = std::mem::take(&mut *lock(&self.pending));
        if records.is_empty() {
            return Ok(());
        }
        if self.fsync {
            files.iter().try_for_each(|&f| self.files[f as usize].as_ref().map_or(Ok(()), OutFile::sync))?;
        }
        records.iter().try_for_each(|record| self.staging.journal().append(record))?;
        self.staging.journal().sync()
    }

    /// Takes the checksum of a tile into that of its member.
    fn sum(&self, output: usize, tile: &TileDone) {
        let about = &self.outputs[output];
        if let (Some(member), Some(crc)) = (self.member_of[output], tile.crc32) {
            let start = tile.index * tile.size;
            let len = tile.size.min(about.nbytes() - start);
            let mut sums = lock(&self.sums[about.file as usize][member]);
            sums.add(about.offset + start, len, crc);
            sums.join(about.offset + start);
        }
    }

    /// Writes the checksums of all members into their files. What no tile of this run or of the
    /// journal covers is read back.
    fn finish(&self, frames: &[Frame], control: &Control) -> Result<()> {
        for ((frame, file), sums) in frames.iter().zip(&self.files).zip(&self.sums) {
            let Some(file) = file else { continue };
            for (member, sums) in frame.members.iter().zip(sums) {
                let (lo, hi) = (member.offset, member.offset + member.len);
                let mut sums = lock(sums);
                for (start, end) in sums.gaps(lo, hi) {
                    let mut at = start;
                    while at < end {
                        if control.cancel.load(std::sync::atomic::Ordering::Relaxed) {
                            return Err(Finding::new(codes::INTERRUPTED, "stopped by the user").into());
                        }
                        let mut bytes = vec![0; CHUNK.min(end - at) as usize];
                        file.read_at(at, &mut bytes)?;
                        sums.add(at, bytes.len() as u64, hash::crc32(&bytes));
                        sums.join(at);
                        at += bytes.len() as u64;
                    }
                }
                let crc = sums.crc(lo, hi).expect("no gap is left");
                member.crc_at.iter().try_for_each(|&at| file.write_all_at(at, &crc.to_le_bytes()))?;
            }
        }
        Ok(())
    }
}

impl Sink for StagedSink<'_> {
    fn write(&self, output: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        if let Some(arrays) = &self.arrays {
            if arrays.write(output, offset, bytes)? {
                return Ok(());
            }
        }
        let about = &self.outputs[output];
        let file = self.files[about.file as usize].as_ref().expect("no array");
        // What an earlier run left is no hole.
        if self.sparse && !file.kept() {
            for (at, run) in crate::kernel::filled(bytes) {
                file.write_all_at(about.offset + offset + at, run)?;
            }
        } else {
            file.write_all_at(about.offset + offset, bytes)?;
        }
        if self.fsync {
            let mut since = lock(&self.written[about.file as usize]);
            *since += bytes.len() as u64;
            if *since >= WRITEBACK_EVERY {
                *since = 0;
                drop(since);
                let end = about.offset + offset + bytes.len() as u64;
                file.start_writeback(end.saturating_sub(2 * WRITEBACK_EVERY), 2 * WRITEBACK_EVERY);
            }
        }
        Ok(())
    }

    fn done(&self, output: usize, tile: &TileDone) -> Result<()> {
        self.sum(output, tile);
        // An encoded block cannot be continued in its midst: arrays are made anew.
        if self.arrays.as_ref().is_some_and(|arrays| arrays.holds(output)) {
            return Ok(());
        }
        let mut pending = lock(&self.pending);
        pending.records.push(record(output, tile));
        pending.files.insert(self.outputs[output].file);
        pending.bytes += tile.size;
        if pending.bytes < JOURNAL_EVERY {
            return Ok(());
        }
        drop(pending);
        self.flush()
    }

    fn claimed(&self, output: usize, index: u64, size: u64) -> Result<Option<TileDone>> {
        let kept = self.files[self.outputs[output].file as usize].as_ref().is_some_and(OutFile::kept);
        Ok(self.claims.get(&(output as u32, index, size)).filter(|_| kept).copied())
    }

    fn read_back(&self, output: usize, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let about = &self.outputs[output];
        let file = self.files[about.file as usize].as_ref().expect("no array");
        file.read_at(about.offset + offset, bytes)
    }

    fn kept(&self, output: usize, tile: &TileDone) {
        self.sum(output, tile);
    }

    fn checksummed(&self, output: usize) -> bool {
        self.member_of[output].is_some()
    }
}

/// Roots of the sources, for the check that the destination is not among them.
pub type Roots = [PathBuf];

/// Writes and publishes a plan's result.
///
/// # Errors
/// All findings that keep the result from being published. Nothing is published then; after an
/// interrupt the staging folder stays for `resume`, otherwise it is removed.
pub fn write(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    roots: &Roots,
    out: &Path,
    options: &Options,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let run = plan.digest();
    let copied: u64 =
        options.copies.iter().filter_map(|(_, p)| std::fs::metadata(p).ok()).map(|m| m.len()).sum();
    let each = if options.stats { 2400 } else { 400 };
    let manifest_estimate = 4096 + each * plan.outputs.len() as u64 + 200 * plan.sources.len() as u64;
    let needs = Needs {
        bytes: if options.sparse {
            0
        } else {
            plan.bytes() + copied + manifest_estimate + aside(plan, options)
        },
        files: (plan.files.len() + plan.texts.len() + folders(plan) + options.copies.len() + 2) as u64,
        open_files: (files.len() + plan.files.len() + 64) as u64,
    };
    publish::preflight(out, roots, &run, &needs, &options.publish)?;
    let document = serde_json::to_vec(
        &serde_json::json!({"plan": run, "target": plan.target, "outputs": plan.outputs.len()}),
    )
    .expect("plain data");
    let staging = Staging::begin(out, &run, &document, &options.publish)?;
    if staging.sealed() {
        let manifest = Manifest::read(&staging.path().join(MANIFEST_NAME));
        let warnings = staging.publish(&last_names(plan))?;
        let manifest = manifest.or_else(|_| Manifest::read(&out.join(MANIFEST_NAME)))?;
        return Ok((manifest, warnings));
    }
    match fill(plan, files, &staging, &run, options, control) {
        Ok((manifest, mut findings)) => {
            // The last look at the sources: what was read is what is there.
            if let Err(error) = files.iter().try_for_each(|f| f.unchanged()) {
                staging.discard()?;
                return Err(error);
            }
            findings.extend(staging.publish(&last_names(plan))?);
            Ok((manifest, findings))
        }
        Err(error) if error.is_interrupt() => {
            let mut findings = error.into_findings();
            for f in &mut findings {
                if f.code == codes::INTERRUPTED {
                    f.help = Some(format!(
                        "nothing was published; the same command with --resume continues, or remove {}",
                        staging.folder().display()
                    ));
                }
            }
            Err(Error::from(findings))
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
    let mut last = vec![MANIFEST_NAME];
    if let Some(name) = TRACKER_NAMES.into_iter().find(|name| plan.texts.contains_key(*name)) {
        last.push(name);
    } else if let Some(file) = plan.files.iter().find(|f| matches!(f.form, Form::Pickle(_))) {
        last.extend(file.name.split('/').next());
    } else if has_index(plan) {
        last.push(INDEX_NAME);
    } else if let Some(file) = plan.files.first() {
        last.extend(file.name.split('/').next());
    }
    last
}

/// Names of the text that names the step to be loaded (DeepSpeed, Megatron-LM).
const TRACKER_NAMES: [&str; 2] = ["latest", "latest_checkpointed_iteration.txt"];
/// Name of the index that names each tensor's file.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

/// True for safetensors files that share the tensors of one model.
fn has_index(plan: &Plan) -> bool {
    plan.files.len() > 1 && plan.files.iter().all(|f| f.form == Form::Safetensors)
}

/// What stands around the outputs of each file.
fn frames(plan: &Plan, by_file: &[Vec<usize>], sources: &[Arc<SourceFile>]) -> Result<Vec<Frame>> {
    let frame = |(file, inside): (&crate::plan::OutFile, &Vec<usize>)| {
        let outputs: Vec<&Output> = inside.iter().map(|&i| &plan.outputs[i]).collect();
        if let Form::Overlay(source) = file.form {
            return overlay(&sources[source as usize], &outputs);
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

/// A copy of `source`: only the members that outputs lie in get another checksum.
fn overlay(source: &SourceFile, outputs: &[&Output]) -> Result<Frame> {
    let mut members = torch_zip::replaceable(source)?;
    let within = |m: &Member, o: &Output| m.offset <= o.offset && o.offset + o.nbytes() <= m.offset + m.len;
    if let Some(output) = outputs.iter().find(|o| !members.iter().any(|m| within(m, o))) {
        return Err(Finding::new(codes::UNSUPPORTED, "its bytes cannot be replaced in place")
            .file(source.path())
            .tensor(output.key())
            .help("the member is compressed: save the file again with torch.save")
            .into());
    }
    members.retain(|m| outputs.iter().any(|o| within(m, o)));
    Ok(Frame { pieces: Vec::new(), members, size: source.size() })
}

/// Copies what no output replaces from the source of an overlay.
fn underlay(source: &SourceFile, outputs: &[&Output], out: &OutFile, control: &Control) -> Result<()> {
    let mut taken: Vec<(u64, u64)> = outputs.iter().map(|o| (o.offset, o.offset + o.nbytes())).collect();
    taken.push((source.size(), source.size()));
    taken.sort_unstable();
    let mut bytes = vec![0; CHUNK as usize];
    let mut at = 0;
    for (lo, hi) in taken {
        while at < lo {
            if control.cancel.load(std::sync::atomic::Ordering::Relaxed) {
                return Err(Finding::new(codes::INTERRUPTED, "stopped by the user").into());
            }
            let n = CHUNK.min(lo - at) as usize;
            source.read_at(at, &mut bytes[..n])?;
            out.write_all_at(at, &bytes[..n])?;
            at += n as u64;
        }
        at = at.max(hi);
    }
    Ok(())
}

/// The member of its file that each output lies in.
fn members_of(plan: &Plan, frames: &[Frame]) -> Vec<Option<usize>> {
    let member = |output: &Output| {
        let members = &frames[output.file as usize].members;
        let (lo, hi) = (output.offset, output.offset + output.nbytes());
        let at = members.partition_point(|m| m.offset <= lo).checked_sub(1)?;
        (hi > lo && hi <= members[at].offset + members[at].len).then_some(at)
    };
    plan.outputs.iter().map(member).collect()
}

fn fill(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    staging: &Staging,
    run: &str,
    options: &Options,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let space = if options.sparse { Space::Sparse } else { Space::Reserved };
    let out = |f: &crate::plan::OutFile| match f.form {
        Form::Arrays(_) => Ok(None),
        _ => staging.file(&f.name, f.size, space).map(Some),
    };
    let outs: Vec<Option<OutFile>> = plan.files.iter().map(out).collect::<Result<_>>()?;
    let arrays = Arrays::begin(plan, &staging.path(), options.arrays.as_ref())?;
    let by_file = plan.by_file();
    let frames = frames(plan, &by_file, files)?;
    for (file, frame) in outs.iter().zip(&frames).filter_map(|(file, frame)| Some((file.as_ref()?, frame))) {
        frame.pieces.iter().try_for_each(|(at, bytes)| file.write_all_at(*at, bytes))?;
    }
    for ((about, inside), file) in plan.files.iter().zip(&by_file).zip(&outs) {
        if let (Form::Overlay(source), Some(file)) = (&about.form, file) {
            let outputs: Vec<&Output> = inside.iter().map(|&i| &plan.outputs[i]).collect();
            underlay(&files[*source as usize], &outputs, file, control)?;
        }
    }
    let claims = staging
        .journal()
        .replayed()
        .iter()
        .filter_map(|r| parse_record(r))
        .map(|(output, tile)| ((output, tile.index, tile.size), tile))
        .collect();
    let sink = StagedSink {
        outputs: &plan.outputs,
        written: outs.iter().map(|_| Mutex::new(0)).collect(),
        member_of: members_of(plan, &frames),
        sums: frames.iter().map(|f| f.members.iter().map(|_| Mutex::default()).collect()).collect(),
        files: outs,
        arrays,
        staging,
        claims,
        pending: Mutex::default(),
        flushing: Mutex::new(()),
        fsync: options.publish.fsync,
        sparse: options.sparse,
    };
    let engine_options = engine::Options {
        threads: options.threads,
        memory: options.memory,
        scratch_dir: staging.folder().to_path_buf(),
        held: None,
        encodes: largest_block(plan),
        stats: if options.stats { Level::Full } else { Level::Nothing },
    };
    let done = engine::execute(plan, files, &sink, &engine_options, control)
        .and_then(|report| sink.finish(&frames, control).map(|()| report));
    // Only what may be published is completed.
    let clean = |report: &Report| report.findings.iter().all(|f| f.severity != Severity::Error);
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
            if error.is_interrupt() {
                sink.flush()?;
            }
            return Err(error);
        }
    };
    if !clean(&report) {
        return Err(report.findings.into());
    }
    for (name, text) in &plan.texts {
        staging.write(name, text.as_bytes())?;
    }
    for (name, path) in &options.copies {
        staging.copy_in(name, path)?;
    }
    if has_index(plan) {
        staging.write(INDEX_NAME, &index(plan))?;
    }
    let mut manifest = manifest(plan, run, &report, options);
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
        manifest.files.push(ManifestFile { name: file.name.clone(), size: file.size, identity });
    }
    staging.write(MANIFEST_NAME, &serde_json::to_vec_pretty(&manifest).expect("plain data"))?;
    Ok((manifest, report.findings))
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

fn manifest(plan: &Plan, run: &str, report: &Report, options: &Options) -> Manifest {
    let mut manifest = Manifest::new(&plan.target);
    manifest.plan = run.into();
    manifest.sources = plan.sources.clone();
    manifest.topology = plan.topology.clone();
    manifest.axes = plan.axes.clone();
    manifest.value_ops = Manifest::ops_of(plan);
    manifest.values = options.values.clone();
    manifest.findings = plan.notes.iter().chain(&report.findings).cloned().collect();
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
