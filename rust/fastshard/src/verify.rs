//! Verifying: the content of a checkpoint against itself and against a manifest.

mod published;
mod whole;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use crate::catalog::{Catalog, CatalogFile};
use crate::codes;
use crate::engine::{self, Control, Discard, Options, Report};
use crate::error::{Finding, Result, Severity};
use crate::hash;
use crate::manifest::{file_identity, Manifest, ManifestFile, ManifestTensor, INVENTORY};
use crate::memory;
use crate::plan::{Output, Pieces, Plan, PlanBlob, StoredTensor};
use crate::storage::SourceFile;

pub use published::{entry, files};

/// One of `of` parts of a checkpoint, counted from 1.
#[derive(Debug, Clone, Copy)]
pub struct Subset {
    /// Which part.
    pub part: u64,
    /// Of how many.
    pub of: u64,
}

impl Subset {
    fn holds(self, name: &str) -> bool {
        let digest = blake3::hash(name.as_bytes());
        let number = u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("eight bytes"));
        number % self.of.max(1) == self.part.saturating_sub(1)
    }
}

/// The tensors whose content is compared.
#[derive(Debug, Clone, Copy, Default)]
pub struct Selection<'a> {
    /// A part of them.
    pub subset: Option<Subset>,
    /// Those with these names. Nothing is said of other bytes of their files then.
    pub only: Option<&'a HashSet<String>>,
}

impl Selection<'_> {
    fn holds(&self, name: &str) -> bool {
        self.subset.is_none_or(|part| part.holds(name)) && self.only.is_none_or(|names| names.contains(name))
    }
}

/// Runs a plan without writing: checksums, replicas, duplicates, padding, NaN, and all-zero blocks if they
/// are requested.
///
/// # Errors
/// The reason why the run cannot finish.
pub fn content(
    mut plan: Arc<Plan>,
    files: &[Arc<SourceFile>],
    subset: Option<Subset>,
    options: &Options,
    control: &Control,
) -> Result<(Arc<Plan>, Report)> {
    if let Some(subset) = subset {
        Arc::make_mut(&mut plan).outputs.retain(|o| subset.holds(&o.name));
    }
    let report = engine::execute(&plan, files, &Discard, options, control)?;
    Ok((plan, report))
}

/// Bytes of a file that were hashed: (root, path, offset, length).
pub type Place = (u32, String, u64, u64);

/// Hashes of runs of bytes, by their place.
pub type Hashed = HashMap<Place, [u8; 32]>;

fn place_of(plan: &Plan, output: &Output) -> Option<Place> {
    let (file, offset) = plan.contiguous(output)?;
    let file = &plan.sources[file as usize];
    Some((file.root, file.path.clone(), offset, output.nbytes()))
}

/// The outputs of a run that are unchanged bytes of a file, which need not be hashed again.
pub fn hashed(plan: &Plan, report: &Report) -> Hashed {
    let pairs = plan.outputs.iter().zip(&report.outputs);
    pairs.filter_map(|(output, result)| Some((place_of(plan, output)?, result.hash))).collect()
}

/// Every tensor of a catalog as its file holds it.
pub fn inventory_plan(catalog: &Catalog) -> Plan {
    plan_of_files(catalog, catalog.files.iter().flatten())
}

fn plan_of_files<'f>(catalog: &Catalog, files: impl Iterator<Item = &'f CatalogFile>) -> Plan {
    let mut plan = Plan {
        version: crate::plan::PLAN_VERSION,
        target: "inventory".into(),
        words: catalog.words.clone(),
        ..Plan::default()
    };
    for file in files {
        let first_blob = plan.blobs.len() as u32;
        let source = plan.sources.len() as u32;
        plan.sources.push(file.plan_file());
        plan.blobs.extend(file.parsed.blobs.iter().map(|b| PlanBlob::of(source, b)));
        plan.stored.extend(file.parsed.tensors.iter().map(|t| StoredTensor {
            name: t.path.joined(),
            dtype: t.dtype,
            shape: t.shape.clone(),
            pieces: Pieces::View { blob: first_blob + t.blob, offset: t.offset, strides: t.strides.clone() },
            rank: None,
            rule: 0,
            index: Default::default(),
            shard: None,
            twins: Default::default(),
            changes: Default::default(),
        }));
    }
    plan.outputs = plan.identity_outputs();
    plan
}

fn file_of(plan: &Plan, stored: &StoredTensor) -> u32 {
    match &stored.pieces {
        Pieces::View { blob, .. } => plan.blobs[*blob as usize].file,
        Pieces::Boxes(p) => p.first().map_or(0, |p| plan.blobs[p.blob as usize].file),
        Pieces::Ranges(p) => p.first().map_or(0, |p| plan.blobs[p.blob as usize].file),
        // An inventory has what is in files alone.
        Pieces::Coded(_) => 0,
    }
}

/// Headers that differ from the manifest: names, metadata, values. Their description of tensors and the
/// manifest's hashes of the content make up the file's identity, so no tensor has to be read.
fn headers(manifest: &Manifest, opened: &[&CatalogFile]) -> Vec<Finding> {
    // Joined names of two tensors can be equal: they are told apart by their order.
    let mut hashes: HashMap<&str, HashMap<String, VecDeque<[u8; 32]>>> = HashMap::new();
    for tensor in &manifest.tensors {
        if let Ok(hash) = blake3::Hash::from_hex(&tensor.blake3) {
            let of_file = hashes.entry(tensor.file.as_str()).or_default();
            of_file.entry(tensor.name.clone()).or_default().push_back(*hash.as_bytes());
        }
    }
    let by_path: HashMap<&str, &&CatalogFile> = opened.iter().map(|f| (f.path.as_str(), f)).collect();
    let mut findings = Vec::new();
    for file in &manifest.files {
        let (Some(identity), Some(opened)) = (&file.identity, by_path.get(file.name.as_str())) else {
            continue;
        };
        if opened.source.size() != file.size {
            continue; // Reported already.
        }
        // A second name of a tensor has no entry of its own.
        let own = opened.parsed.tensors.iter().map(|t| t.path.join("."));
        let own: Vec<[u8; 32]> =
            own.filter_map(|name| hashes.get_mut(file.name.as_str())?.get_mut(&name)?.pop_front()).collect();
        let got = file_identity(&opened.parsed.header_digest, own.iter());
        if got != *identity {
            findings.push(
                Finding::new(codes::HASH, "its header (names, metadata, values) differs from the manifest")
                    .file(&file.name)
                    .expected(format!("identity {identity}"), got)
                    .help(RESTORE),
            );
        }
    }
    findings
}

/// Hashes the tensors and files that exist.
///
/// # Errors
/// The reason why the run cannot finish.
pub fn inventory(
    catalog: &Catalog,
    options: &Options,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let plan = inventory_plan(catalog);
    let files: Vec<Arc<SourceFile>> = catalog.files.iter().flatten().map(|f| f.source.clone()).collect();
    let report = engine::execute(&plan, &files, &Discard, options, control)?;
    let mut manifest = Manifest::new(INVENTORY);
    let mut hashes: BTreeMap<u32, Vec<[u8; 32]>> = BTreeMap::new();
    for (stored, result) in plan.stored.iter().zip(&report.outputs) {
        let file = file_of(&plan, stored);
        hashes.entry(file).or_default().push(result.hash);
        manifest.tensors.push(ManifestTensor {
            name: stored.name.to_string(),
            dtype: stored.dtype,
            shape: stored.shape.to_vec(),
            file: plan.sources[file as usize].path.clone(),
            offset: None,
            blake3: hash::hex(&result.hash),
            stats: result.seen.stats().cloned(),
        });
    }
    for (i, (file, opened)) in plan.sources.iter().zip(catalog.files.iter().flatten()).enumerate() {
        let hashes = hashes.remove(&(i as u32)).unwrap_or_default();
        manifest.files.push(ManifestFile {
            name: file.path.clone(),
            size: file.size,
            identity: Some(file_identity(&opened.parsed.header_digest, hashes.iter())),
            blake3: None,
            mtime_ns: None,
            from: None,
        });
    }
    manifest.findings = report.findings.clone();
    Ok((manifest, report.findings))
}

/// Compares a catalog's content with a manifest made of the same files: every file and tensor that the
/// manifest names, by hash. Files below further roots than the first `own_roots` are of other models, whose parts are taken.
/// `selection` limits the tensors to read; those in `known` are not read again.
///
/// # Errors
/// The reason why the run cannot finish.
pub fn against(
    catalog: &Catalog,
    manifest: &Manifest,
    own_roots: u32,
    selection: &Selection,
    known: &Hashed,
    options: &Options,
    control: &Control,
) -> Result<Vec<Finding>> {
    let opened: Vec<_> = catalog.files.iter().flatten().filter(|file| file.root < own_roots).collect();
    let mut findings = differing_files(manifest, &opened);
    findings.extend(headers(manifest, &opened));
    if let Some(names) = selection.only {
        // A file with none of these tensors may have changed.
        let tensors = manifest.tensors.iter().filter(|tensor| names.contains(tensor.name.as_str()));
        let files: HashSet<&str> = tensors.map(|tensor| tensor.file.as_str()).collect();
        findings.retain(|finding| finding.file.as_deref().is_none_or(|file| files.contains(file)));
    }
    let mut plan = plan_of_files(catalog, opened.iter().copied());
    let (checks, differing) = differing_tensors(manifest, &plan, &opened, selection);
    findings.extend(differing);
    let before: Vec<Option<[u8; 32]>> =
        checks.iter().map(|(i, _)| known.get(&place_of(&plan, &plan.outputs[*i])?).copied()).collect();
    let unread = checks.iter().zip(&before).filter(|(_, hash)| hash.is_none());
    plan.outputs = unread.map(|((i, _), _)| plan.outputs[*i].clone()).collect();
    let files: Vec<Arc<SourceFile>> = opened.iter().map(|f| f.source.clone()).collect();
    let report = engine::execute(&plan, &files, &Discard, options, control)?;
    let mut read = report.outputs.iter().map(|o| o.hash);
    for ((i, tensor), before) in checks.iter().zip(before) {
        let got = hash::hex(&before.or_else(|| read.next()).expect("read if not known"));
        if got != tensor.blake3 {
            let file = &plan.sources[file_of(&plan, &plan.stored[*i]) as usize].path;
            findings.push(
                Finding::new(codes::HASH, "content differs from the manifest")
                    .file(file)
                    .tensor(&tensor.name)
                    .expected(format!("BLAKE3 {}", &tensor.blake3), got)
                    .help(RESTORE),
            );
        }
    }
    findings.extend(report.findings);
    let reported_files: HashSet<&str> = findings.iter().filter_map(|f| f.file.as_deref()).collect();
    if selection.only.is_none() {
        findings.extend(between(manifest, &opened, &reported_files, control)?);
    }
    Ok(findings)
}

/// The advice about a file that has changed.
const RESTORE: &str =
    "restore the file from a good copy; it was changed or damaged since the manifest was made";

/// Files that are missing, that have another size than the manifest states, or that it does not name.
fn differing_files(manifest: &Manifest, opened: &[&CatalogFile]) -> Vec<Finding> {
    let by_path: HashMap<&str, u64> = opened.iter().map(|f| (f.path.as_str(), f.source.size())).collect();
    let mut findings = Vec::new();
    for file in manifest.files.iter().filter(|f| f.holds_tensors()) {
        match by_path.get(file.name.as_str()) {
            None => findings.push(
                Finding::new(codes::MISSING_FILE, "the file is missing: the manifest names it")
                    .file(&file.name)
                    .help("copy it from the host that made the manifest"),
            ),
            Some(&size) if size != file.size => findings.push(
                Finding::new(codes::HASH, "size differs from the manifest")
                    .file(&file.name)
                    .expected(format!("{} bytes", file.size), format!("{size} bytes"))
                    .help("restore the file from a good copy"),
            ),
            Some(_) => {}
        }
    }
    let named: HashSet<&str> = manifest.files.iter().map(|f| f.name.as_str()).collect();
    // What it does not name is read as a part of the checkpoint, and nothing says what it should hold.
    findings.extend(opened.iter().filter(|f| !named.contains(f.path.as_str())).map(|file| {
        Finding::new(codes::UNEXPECTED_FILE, "the manifest does not name this file, which readers load")
            .severity(Severity::Error)
            .file(&file.path)
            .help("move it away if it does not belong here; else record it in a new manifest")
            .run("fastshard manifest CKPT")
    }));
    findings
}

/// The tensors whose content must be compared, by their index in the plan, and those that differ or are
/// missing by their headers.
fn differing_tensors<'m>(
    manifest: &'m Manifest,
    plan: &Plan,
    opened: &[&CatalogFile],
    selection: &Selection,
) -> (Vec<(usize, &'m ManifestTensor)>, Vec<Finding>) {
    let mut wanted: HashMap<(&str, &str), VecDeque<&ManifestTensor>> = HashMap::new();
    for tensor in &manifest.tensors {
        wanted.entry((tensor.file.as_str(), tensor.name.as_str())).or_default().push_back(tensor);
    }
    let (mut checks, mut findings) = (Vec::new(), Vec::new());
    for (i, stored) in plan.stored.iter().enumerate() {
        let file = plan.sources[file_of(plan, stored) as usize].path.as_str();
        let named = wanted.get_mut(&(file, stored.name.as_str()));
        let Some(tensor) = named.and_then(VecDeque::pop_front) else { continue };
        if tensor.dtype != stored.dtype || tensor.shape != stored.shape {
            findings.push(
                Finding::new(codes::HASH, "dtype or shape differs from the manifest")
                    .file(file)
                    .tensor(&stored.name)
                    .expected(
                        format!("{} {:?}", tensor.dtype, tensor.shape),
                        format!("{} {:?}", stored.dtype, stored.shape),
                    ),
            );
        } else if selection.holds(&stored.name) {
            checks.push((i, tensor));
        }
    }
    let paths: HashSet<&str> = opened.iter().map(|f| f.path.as_str()).collect();
    let absent = wanted.values().flatten().filter(|t| paths.contains(t.file.as_str()));
    findings.extend(absent.map(|tensor| {
        Finding::new(codes::MISSING_TENSOR, "named in the manifest, but missing in this file")
            .file(&tensor.file)
            .tensor(&tensor.name)
    }));
    (checks, findings)
}

/// Files whose headers and tensors are unchanged, and whose other bytes have changed: the padding and the
/// records of an archive. A manifest has a hash of all bytes only for small files.
fn between(
    manifest: &Manifest,
    opened: &[&CatalogFile],
    reported_files: &HashSet<&str>,
    control: &Control,
) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for file in
        manifest.files.iter().filter(|f| f.holds_tensors() && !reported_files.contains(f.name.as_str()))
    {
        let (Some(expected), Some(opened)) = (&file.blake3, opened.iter().find(|o| o.path == file.name))
        else {
            continue;
        };
        let got = hash_of(&opened.source, control)?;
        if got != *expected {
            findings.push(
                Finding::new(codes::HASH, "bytes between its tensors differ from the manifest")
                    .file(&file.name)
                    .expected(format!("BLAKE3 {expected}"), got)
                    .help(RESTORE),
            );
        }
    }
    Ok(findings)
}

/// BLAKE3 of all bytes of a file.
fn hash_of(source: &SourceFile, control: &Control) -> Result<String> {
    let (size, mut at) = (source.size(), 0);
    let mut buffer = memory::allocate(size.min(1 << 20) as usize)?;
    let mut hasher = blake3::Hasher::new();
    while at < size {
        control.check_running()?;
        let part = &mut buffer[..(size - at).min(1 << 20) as usize];
        source.read_at(at, part)?;
        hasher.update(part);
        at += part.len() as u64;
    }
    Ok(hasher.finalize().to_hex().to_string())
}
