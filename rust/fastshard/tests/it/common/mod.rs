//! What the tests share: dice for structured random cases, checkpoints on disk, runs in memory.
#![allow(dead_code)] // each test file uses its own part

pub mod paused;
pub mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use fastshard::catalog::Catalog;
use fastshard::codes::Code;
use fastshard::distributed::share;
use fastshard::draft::{Placement, Planned};
use fastshard::engine::{self, Control, Evidence, Options, Report, Sink, TileDone};
use fastshard::error::{Error, Finding, Result, Severity};
use fastshard::format::safetensors;
use fastshard::plan::Plan;
use fastshard::request::{self, Request};
use fastshard::storage::SourceFile;
use fastshard::tensor::Dtype;

/// Structured choices from a list of numbers. Beyond its end every choice is the first one, so that
/// a shorter list, to which a failing case is shrunk, is a simpler case.
pub struct Dice<'a> {
    data: &'a [u32],
    at: usize,
}

impl<'a> Dice<'a> {
    pub fn new(data: &'a [u32]) -> Self {
        Dice { data, at: 0 }
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        let value = self.data.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        u64::from(value) % n.max(1)
    }

    /// True in one of `n` cases.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == n - 1
    }

    pub fn pick<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize].clone()
    }

    pub fn shuffle<T>(&mut self, all: &mut [T]) {
        for i in (1..all.len()).rev() {
            all.swap(i, i - self.below(i as u64 + 1) as usize);
        }
    }
}

/// A budget that no run here comes up to, whatever other tests of this process hold at the same time.
pub const AMPLE: u64 = 1 << 40;

/// Cases of a property; `FASTSHARD_CASES=10` runs ten times as many.
pub fn cases(n: u32) -> u32 {
    let factor: f64 = std::env::var("FASTSHARD_CASES").ok().and_then(|f| f.parse().ok()).unwrap_or(1.0);
    (f64::from(n) * factor) as u32
}

/// A number that looks random and is never the same for two inputs.
pub fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^= z >> 27;
    z = z.wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The bytes of an element, never the same for two seeds where the type is wide enough.
pub fn element(seed: u64, dtype: Dtype) -> Vec<u8> {
    let both = [mix(seed).to_le_bytes(), mix(!seed).to_le_bytes()].concat();
    both[..dtype.size()].to_vec()
}

/// A tensor in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn new(name: &str, dtype: Dtype, shape: &[u64], bytes: Vec<u8>) -> Tensor {
        Tensor { name: name.into(), dtype, shape: shape.to_vec(), bytes }
    }

    pub fn f32(name: &str, shape: &[u64], values: impl IntoIterator<Item = f32>) -> Tensor {
        let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        assert_eq!(bytes.len() as u64, 4 * shape.iter().product::<u64>(), "{name}");
        Tensor::new(name, Dtype::F32, shape, bytes)
    }

    /// Painted with values that occur nowhere else for another `seed`.
    pub fn painted(name: &str, shape: &[u64], seed: u64) -> Tensor {
        let n = shape.iter().product::<u64>();
        Tensor::f32(name, shape, (0..n).map(|i| (mix(seed << 20 | i) % 1_000_003) as f32 / 1024.0 - 300.0))
    }
}

/// A file of a rank: where it lies in the topology and what it holds.
#[derive(Debug, Clone, Default)]
pub struct RankFile {
    pub coords: BTreeMap<String, u64>,
    pub bases: BTreeMap<String, u64>,
    pub tensors: Vec<Tensor>,
}

pub fn write_safetensors(path: &Path, tensors: &[Tensor]) {
    let mut bytes = safetensors::header(
        &Default::default(),
        tensors.iter().map(|t| (t.name.as_str(), t.dtype, &t.shape[..])),
    );
    tensors.iter().for_each(|t| bytes.extend(&t.bytes));
    std::fs::write(path, bytes).unwrap();
}

pub fn file_name(i: usize) -> String {
    format!("rank_{i:02}.safetensors")
}

/// Writes the files of a checkpoint, `rank_00.safetensors` and so on.
pub fn write_ranks(dir: &Path, ranks: &[RankFile]) {
    for (i, rank) in ranks.iter().enumerate() {
        write_safetensors(&dir.join(file_name(i)), &rank.tensors);
    }
}

/// The `units` of a request, in the words of a run.
pub fn units(ranks: &[RankFile]) -> serde_json::Value {
    ranks
        .iter()
        .enumerate()
        .map(|(i, rank)| {
            let words: Vec<String> = rank.coords.iter().map(|(d, r)| format!("{d} {r}")).collect();
            serde_json::json!({
                "file": i, "coords": rank.coords, "bases": rank.bases, "rank": words.join(", "),
            })
        })
        .collect()
}

pub fn open(dir: &Path, files: usize) -> Catalog {
    let names: Vec<(u32, String)> = (0..files).map(|i| (0, file_name(i))).collect();
    Catalog::open(vec![dir.to_path_buf()], &names, 1)
}

/// The record of a source that each field stands in; tests write all fields side by side.
const RECORDS: [(&str, &[&str]); 4] = [
    ("files", &["units", "assembled", "adapted", "placed"]),
    ("names", &["prefix", "own", "hidden", "beside"]),
    ("binding", &["toml", "generic", "degrees", "axes", "facts", "sets", "vocab_size", "pass_unknown"]),
    ("allowances", &["layers_may_repeat", "copies", "non_finite", "holes"]),
];

/// Drafts and places: what is said of places stands in the request, or in its target. Painted values may be any bits, so NaN
/// is accepted unless the source says otherwise.
pub fn make_plan(catalog: &Catalog, mut request: serde_json::Value) -> Result<Planned> {
    let mut placement = serde_json::Map::new();
    for (within, keys) in
        [("", &["max_shard_size", "texts", "pointers"][..]), ("/target", &["files", "dtypes"])]
    {
        let Some(serde_json::Value::Object(side)) = request.pointer_mut(within) else { continue };
        placement.extend(keys.iter().filter_map(|key| side.remove_entry(*key)));
    }
    if let Some(serde_json::Value::Object(source)) = request.get_mut("source") {
        source.entry("non_finite").or_insert(true.into());
        for (record, keys) in RECORDS {
            let fields = keys.iter().filter_map(|key| source.remove_entry(*key)).collect();
            source.insert(record.into(), serde_json::Value::Object(fields));
        }
    }
    let request: Request = serde_json::from_value(request).expect("a request");
    let placement: Placement = serde_json::from_value(placement.into()).expect("a placement");
    Ok(request::draft(catalog, &request)?.placed(catalog, placement))
}

/// The open files of a catalog in the order of a plan's sources.
pub fn sources(catalog: &Catalog, plan: &Plan) -> Vec<Arc<SourceFile>> {
    plan.sources
        .iter()
        .map(|s| {
            let file = catalog.files.iter().flatten().find(|f| f.root == s.root && f.path == s.path);
            Arc::clone(&file.expect("planned from this catalog").source)
        })
        .collect()
}

/// Keeps what is written, and that each byte is written once.
#[derive(Default)]
pub struct Memory {
    pub outputs: Vec<Mutex<(Vec<u8>, Vec<bool>)>>,
    pub tiles: AtomicU64,
}

impl Memory {
    pub fn new(plan: &Plan) -> Memory {
        let empty = |n: u64| Mutex::new((vec![0xa5; n as usize], vec![false; n as usize]));
        Memory { outputs: plan.outputs.iter().map(|o| empty(o.nbytes())).collect(), ..Memory::default() }
    }

    pub fn into_bytes(self) -> Vec<Vec<u8>> {
        let whole = |m: Mutex<(Vec<u8>, Vec<bool>)>| {
            let (bytes, written) = m.into_inner().unwrap();
            assert!(written.iter().all(|w| *w), "every byte is written");
            bytes
        };
        self.outputs.into_iter().map(whole).collect()
    }
}

impl Sink for Memory {
    fn write(&self, output: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut slot = self.outputs[output].lock().unwrap();
        let range = offset as usize..offset as usize + bytes.len();
        slot.0[range.clone()].copy_from_slice(bytes);
        for w in &mut slot.1[range] {
            assert!(!std::mem::replace(w, true), "a byte is written twice");
        }
        self.tiles.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

pub fn options(threads: usize, scratch_dir: &Path) -> Options {
    Options {
        threads,
        memory: AMPLE,
        scratch_dir: scratch_dir.to_path_buf(),
        max_decoded: None,
        encodes: 0,
        stats: Default::default(),
    }
}

/// Runs a plan; the reported hashes are checked against the bytes.
pub fn run(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    threads: usize,
    tile: Option<u64>,
    scratch_dir: &Path,
) -> Result<(Vec<Vec<u8>>, Report)> {
    run_with(plan, files, &options(threads, scratch_dir), tile)
}

/// [`run`] with options of choice.
pub fn run_with(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    options: &Options,
    tile: Option<u64>,
) -> Result<(Vec<Vec<u8>>, Report)> {
    let (outputs, report) = run_alone(plan, files, options, tile)?;
    divided(plan, files, options, tile, &outputs, &report);
    Ok((outputs, report))
}

/// A run by one process.
pub fn run_alone(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    options: &Options,
    tile: Option<u64>,
) -> Result<(Vec<Vec<u8>>, Report)> {
    let sink = Memory::new(plan);
    let report = engine::execute_tiled(plan, files, &sink, options, tile, &Control::default())?;
    let outputs = sink.into_bytes();
    for (bytes, about) in outputs.iter().zip(&report.outputs) {
        assert_eq!(about.hash, *blake3::hash(bytes).as_bytes(), "the reported hash is that of the bytes");
    }
    Ok((outputs, report))
}

/// A result that several processes write, and the records of their tiles.
struct Shared {
    memory: Memory,
    records: Mutex<BTreeMap<(usize, u64), TileDone>>,
    /// Whether the records are those of others by now.
    adopts: AtomicBool,
}

impl Sink for Shared {
    fn write(&self, output: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.memory.write(output, offset, bytes)
    }

    fn done(&self, output: usize, tile: &TileDone) -> Result<()> {
        self.records.lock().unwrap().insert((output, tile.index), *tile);
        Ok(())
    }

    fn adopted(&self, output: usize, index: u64, _size: u64) -> Result<Option<TileDone>> {
        let records = self.records.lock().unwrap();
        Ok(records.get(&(output, index)).copied().filter(|_| self.adopts.load(Ordering::Relaxed)))
    }
}

/// Makes the plan once more in shares, some of which fail to come, and judges them together: it comes to the same.
pub fn divided(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    options: &Options,
    tile: Option<u64>,
    outputs: &[Vec<u8>],
    report: &Report,
) {
    let mut sizes = share::tiling(plan, options).unwrap();
    if let Some(tile) = tile {
        sizes.fill(tile.next_power_of_two().max(1024));
    }
    let control = Control::default();
    let parts = 2 + plan.outputs.iter().map(|o| o.nbytes()).sum::<u64>() % 4;
    for comes in [parts, parts / 2] {
        let sink =
            Shared { memory: Memory::new(plan), records: Mutex::default(), adopts: AtomicBool::new(false) };
        let shares = share::divide(plan, &sizes, &share::all_tiles(plan, &sizes, &|_| false), parts as usize);
        let mut evidence: Vec<Evidence> = Vec::new();
        for share in shares.iter().take(comes as usize) {
            let one = engine::work(plan, files, &sink, options, &sizes, share, &control).unwrap();
            // As it is written down and read again.
            let text = serde_json::to_string(&one).unwrap();
            evidence.insert(evidence.len() / 2, serde_json::from_str(&text).unwrap());
            assert_eq!(evidence[(evidence.len() - 1) / 2], one);
        }
        sink.adopts.store(true, Ordering::Relaxed);
        let together = engine::conclude(plan, files, &sink, options, &sizes, &evidence, &control).unwrap();
        let all = |report: &Report| -> BTreeSet<String> {
            report.findings.iter().map(|f| serde_json::to_string(f).unwrap()).collect()
        };
        assert_eq!(all(&together), all(report), "{comes} of {parts} shares");
        assert_eq!(together.findings.len(), report.findings.len());
        for (a, b) in together.outputs.iter().zip(&report.outputs) {
            assert_eq!((a.hash, a.non_finite, &a.seen), (b.hash, b.non_finite, &b.seen));
        }
        assert!(sink.memory.into_bytes() == outputs, "{comes} of {parts} shares");
    }
}

pub fn errors(findings: &[Finding]) -> Vec<&Finding> {
    findings.iter().filter(|f| f.severity == Severity::Error).collect()
}

/// A request, carried as far as it goes: all findings, of planning or of the content.
pub struct Outcome {
    pub findings: Vec<Finding>,
    pub outputs: BTreeMap<String, Tensor>,
}

impl Outcome {
    pub fn failed(&self) -> bool {
        !errors(&self.findings).is_empty()
    }

    pub fn of(&self, code: Code) -> Vec<&Finding> {
        self.findings.iter().filter(|f| f.code == code).collect()
    }

    #[track_caller]
    pub fn expect(&self, code: Code, severity: Severity) -> &Finding {
        let found = self.findings.iter().find(|f| f.code == code && f.severity == severity);
        found.unwrap_or_else(|| panic!("no {code} among {:#?}", self.findings))
    }

    #[track_caller]
    pub fn clean(&self) {
        assert!(!self.failed(), "{:#?}", self.findings);
    }
}

fn all(found: Result<()>, mut before: Vec<Finding>) -> Vec<Finding> {
    if let Err(error) = found {
        before.extend(error.into_findings());
    }
    before
}

/// Opens, plans and, if the plan may be executed, runs a request over the files in `dir`.
pub fn carry_out(dir: &Path, files: &[String], request: serde_json::Value, tile: Option<u64>) -> Outcome {
    let names: Vec<(u32, String)> = files.iter().map(|f| (0, f.clone())).collect();
    let catalog = Catalog::open(vec![dir.to_path_buf()], &names, 1);
    let mut findings = catalog.findings.clone();
    let planned = match make_plan(&catalog, request) {
        Ok(planned) => planned,
        Err(error) => {
            return Outcome { findings: all(Err(error), findings), outputs: BTreeMap::new() };
        }
    };
    findings.extend(planned.findings.clone());
    if !errors(&findings).is_empty() {
        return Outcome { findings, outputs: BTreeMap::new() };
    }
    let plan = planned.plan;
    match run(&plan, &sources(&catalog, &plan), 2, tile, dir) {
        Ok((bytes, report)) => {
            findings.extend(report.findings);
            let outputs = plan
                .outputs
                .iter()
                .zip(bytes)
                .map(|(o, bytes)| (o.name.to_string(), Tensor::new(&o.name, o.dtype, &o.shape, bytes)))
                .collect();
            Outcome { findings, outputs }
        }
        Err(error) => Outcome { findings: all(Err::<(), Error>(error), findings), outputs: BTreeMap::new() },
    }
}

/// A temporary folder, in memory where the system has one.
pub fn temp() -> tempfile::TempDir {
    let shm = PathBuf::from("/dev/shm");
    if shm.is_dir() {
        if let Ok(dir) = tempfile::tempdir_in(&shm) {
            return dir;
        }
    }
    tempfile::tempdir().unwrap()
}
