//! Carries a plan out: preflight, staging, engine, manifest, publish.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::codes;
use crate::engine::{self, Control, Report, Sink, TileDone};
use crate::error::{Error, Finding, Result, Severity};
use crate::format::safetensors;
use crate::hash;
use crate::manifest::{file_identity, Manifest, ManifestFile, ManifestTensor, MANIFEST_NAME};
use crate::plan::{Output, Plan};
use crate::publish::{self, Needs, OutFile, Space, Staging};
use crate::storage::SourceFile;

/// Bytes written between two records of what is done.
const JOURNAL_EVERY: u64 = 256 << 20;
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
    /// True if holes need not take space (all-zero sparse sources).
    pub sparse: bool,
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
    files: Vec<OutFile>,
    staging: &'a Staging,
    pending: Mutex<Pending>,
    /// Held by the one who brings data to disk, so that the others go on writing meanwhile.
    flushing: Mutex<()>,
    written: Vec<Mutex<u64>>,
    fsync: bool,
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
    bytes
}

fn parse_record(bytes: &[u8]) -> Option<(u32, TileDone)> {
    let output = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?);
    let index = u64::from_le_bytes(bytes.get(4..12)?.try_into().ok()?);
    let size = u64::from_le_bytes(bytes.get(12..20)?.try_into().ok()?);
    let value = bytes.get(20..52)?.try_into().ok()?;
    let non_finite = u64::from_le_bytes(bytes.get(52..)?.try_into().ok()?);
    Some((output, TileDone { index, size, value, non_finite }))
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
            files.iter().try_for_each(|&f| self.files[f as usize].sync())?;
        }
        records.iter().try_for_each(|record| self.staging.journal().append(record))?;
        self.staging.journal().sync()
    }
}

impl Sink for StagedSink<'_> {
    fn write(&self, output: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let about = &self.outputs[output];
        let file = &self.files[about.file as usize];
        file.write_all_at(about.offset + offset, bytes)?;
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
    let manifest_estimate = 4096 + 400 * plan.outputs.len() as u64 + 200 * plan.sources.len() as u64;
    let needs = Needs {
        bytes: if options.sparse { 0 } else { plan.bytes() + copied + manifest_estimate },
        files: (plan.files.len() + plan.texts.len() + options.copies.len() + 2) as u64,
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

fn last_names(plan: &Plan) -> Vec<&str> {
    let mut last = vec![MANIFEST_NAME];
    if plan.texts.contains_key(INDEX_NAME) || plan.files.len() > 1 {
        last.push(INDEX_NAME);
    } else if let Some(file) = plan.files.first() {
        last.push(&file.name);
    }
    last
}

/// Name of the index that names each tensor's file.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

fn fill(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    staging: &Staging,
    run: &str,
    options: &Options,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let space = if options.sparse { Space::Sparse } else { Space::Reserved };
    let outs: Result<Vec<OutFile>> =
        plan.files.iter().map(|f| staging.file(&f.name, f.size, space)).collect();
    let outs = outs?;
    let headers: Vec<Vec<u8>> = (0..plan.files.len())
        .map(|f| {
            let inside = plan.outputs.iter().filter(|o| o.file as usize == f);
            safetensors::header(inside.map(|o| (o.name.as_str(), o.dtype, &o.shape[..])))
        })
        .collect();
    for (file, header) in outs.iter().zip(&headers) {
        file.write_all_at(0, header)?;
    }
    let finished = staging
        .journal()
        .replayed()
        .iter()
        .filter_map(|r| parse_record(r))
        .filter(|(output, _)| {
            plan.outputs.get(*output as usize).is_some_and(|o| outs[o.file as usize].kept())
        })
        .collect();
    let sink = StagedSink {
        outputs: &plan.outputs,
        written: outs.iter().map(|_| Mutex::new(0)).collect(),
        files: outs,
        staging,
        pending: Mutex::default(),
        flushing: Mutex::new(()),
        fsync: options.publish.fsync,
    };
    let engine_options = engine::Options {
        threads: options.threads,
        memory: options.memory,
        scratch_dir: staging.folder().to_path_buf(),
        finished,
    };
    let report = match engine::execute(plan, files, &sink, &engine_options, control) {
        Ok(report) => report,
        Err(error) => {
            if error.is_interrupt() {
                sink.flush()?;
            }
            return Err(error);
        }
    };
    if report.findings.iter().any(|f| f.severity == Severity::Error) {
        return Err(report.findings.into());
    }
    for (name, text) in &plan.texts {
        staging.write(name, text.as_bytes())?;
    }
    for (name, path) in &options.copies {
        staging.copy_in(name, path)?;
    }
    if plan.files.len() > 1 {
        staging.write(INDEX_NAME, &index(plan))?;
    }
    let manifest = manifest(plan, run, &report, &headers, options);
    staging.write(MANIFEST_NAME, &serde_json::to_vec_pretty(&manifest).expect("plain data"))?;
    Ok((manifest, report.findings))
}

fn index(plan: &Plan) -> Vec<u8> {
    let total: u64 = plan.outputs.iter().map(Output::nbytes).sum();
    let map: BTreeMap<&str, &str> =
        plan.outputs.iter().map(|o| (o.name.as_str(), plan.files[o.file as usize].name.as_str())).collect();
    let json = serde_json::json!({"metadata": {"total_size": total}, "weight_map": map});
    serde_json::to_vec_pretty(&json).expect("plain data")
}

fn manifest(plan: &Plan, run: &str, report: &Report, headers: &[Vec<u8>], options: &Options) -> Manifest {
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
            name: o.name.clone(),
            dtype: o.dtype,
            shape: o.shape.clone(),
            file: plan.files[o.file as usize].name.clone(),
            offset: Some(o.offset),
            blake3: hash::hex(&r.hash),
        })
        .collect();
    manifest.files = plan
        .files
        .iter()
        .zip(headers)
        .enumerate()
        .map(|(f, (file, header))| {
            let hashes = plan
                .outputs
                .iter()
                .zip(&report.outputs)
                .filter(|(o, _)| o.file as usize == f)
                .map(|(_, r)| &r.hash);
            let header = blake3::hash(&header[8..]);
            ManifestFile {
                name: file.name.clone(),
                size: file.size,
                identity: file_identity(header.as_bytes(), hashes),
            }
        })
        .collect();
    manifest
}
