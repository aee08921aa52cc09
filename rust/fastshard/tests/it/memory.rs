//! The memory budget: each test in a process of its own, so that nobody else changes the memory that is looked at.

use std::path::Path;
use std::sync::Arc;

use crate::common::paused::child_of_its_own;
use crate::common::{make_plan, open, options, sources, temp, units, write_ranks, RankFile, Tensor};
use fastshard::codes;
use fastshard::engine::{self, Control, Discard, Report};
use fastshard::memory::anonymous_memory;
use fastshard::plan::{Pieces, Plan, PlanBlob, PlanFile, RangePiece, StoredTensor};
use fastshard::storage::SourceFile;
use fastshard::tensor::Dtype;
use serde_json::json;

const CHECKSUMS: &str = "memory::child_checksums";
const HASHES: &str = "memory::child_hashes";
const BUDGETS: &str = "memory::child_budgets";

/// A plan of one tensor of bytes, as it lies in a file of zeros of which nothing is on disk.
fn hole(dir: &Path, len: u64, pieces: Pieces, crc32: Option<u32>) -> (Plan, Vec<Arc<SourceFile>>) {
    let path = dir.join("hole");
    std::fs::File::create(&path).unwrap().set_len(len).unwrap();
    let file = PlanFile { path: "hole".into(), root: 0, size: len, mtime_ns: 0, header: String::new() };
    let blob = PlanBlob {
        file: 0,
        offset: 0,
        stored_len: len,
        len,
        crc32,
        deflated: false,
        zstd: None,
        encoded: false,
        member: None,
    };
    let stored = StoredTensor {
        name: "w".into(),
        dtype: Dtype::U8,
        shape: [len].into(),
        pieces,
        rank: None,
        rule: 0,
        index: Default::default(),
        shard: None,
        twins: Default::default(),
        changes: Box::default(),
    };
    let mut plan = Plan {
        version: 1,
        sources: vec![file],
        blobs: vec![blob],
        stored: vec![stored],
        rules: vec!["w".into()],
        ..Plan::default()
    };
    plan.outputs = plan.identity_outputs();
    (plan, vec![Arc::new(SourceFile::open(&path).unwrap())])
}

/// Most memory of the process that was in use since [`forget_peak`], as the kernel has counted it at each page.
fn peak_memory() -> u64 {
    resident("VmHWM:")
}

fn resident(what: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(what)).unwrap();
    1024 * line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
}

/// Lets the peak be what is in use now.
fn forget_peak() {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    assert!(peak_memory() <= resident("VmRSS:") + (1 << 20));
}

/// Runs within 8 MiB more than there is; with the most anonymous memory that was in use meanwhile.
fn peak(plan: &Plan, files: &[Arc<SourceFile>], tile: Option<u64>) -> (Report, u64) {
    // Before, a little of the same, so that the pages of the program that it takes are in use already.
    let (dir, each) = (temp(), 2048);
    let piece = |i: u64| RangePiece { start: i * each, len: each, blob: 0, offset: (1 - i) * each };
    let right = crc32fast::hash(&vec![0; 2 * each as usize]);
    let (little, little_files) =
        hole(dir.path(), 2 * each, Pieces::Ranges((0..2).map(piece).collect()), Some(right));
    let once = options(2, Path::new(""));
    engine::execute_tiled(&little, &little_files, &Discard, &once, Some(1024), &Control::default()).unwrap();
    let options = engine::Options { memory: anonymous_memory() + (8 << 20), ..once };
    forget_peak();
    let others = resident("RssFile:") + resident("RssShmem:");
    let report = engine::execute_tiled(plan, files, &Discard, &options, tile, &Control::default());
    // The pages of files are no part of it: those of the program, for the source is not mapped.
    (report.unwrap(), peak_memory() - others)
}

/// Runs a test of this file in a process of its own, so that nobody else changes the memory that is looked at.
fn in_a_child(test: &str) {
    let ended = child_of_its_own(test).output().unwrap();
    let printed =
        String::from_utf8_lossy(&ended.stdout).into_owned() + &String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success() && printed.contains("1 passed"), "{printed}");
}

#[test]
fn checksums_of_what_is_read_out_of_order_stay_within_the_budget() {
    in_a_child(CHECKSUMS);
}

#[test]
fn hashes_of_tiles_stay_within_the_budget() {
    in_a_child(HASHES);
}

#[test]
#[ignore = "run by checksums_of_what_is_read_out_of_order_stay_within_the_budget"]
fn child_checksums() {
    let dir = temp();
    let (n, each) = (200_003u64, 256);
    // A prime number of pieces, none beside the one before it.
    let piece = |i: u64| RangePiece { start: i * each, len: each, blob: 0, offset: i * 7919 % n * each };
    let pieces = Pieces::Ranges((0..n).map(piece).collect());
    let right = crc32fast::hash(&vec![0; (n * each) as usize]);
    let (mut plan, files) = hole(dir.path(), n * each, pieces, Some(right));
    let (report, peak) = peak(&plan, &files, None);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert!(report.memory.checksums > 0);
    assert!(peak <= report.memory.bound, "{peak} bytes, {:?}", report.memory);
    plan.blobs[0].crc32 = Some(right ^ 1);
    let report = engine::execute(&plan, &files, &Discard, &options(2, dir.path()), &Control::default());
    assert_eq!(report.unwrap().findings[0].code, codes::CRC);
}

#[test]
#[ignore = "run by hashes_of_tiles_stay_within_the_budget"]
fn child_hashes() {
    let dir = temp();
    let len = 300 << 20;
    let pieces = Pieces::View { blob: 0, offset: 0, strides: [1].into() };
    let (plan, files) = hole(dir.path(), len, pieces, None);
    let (report, peak) = peak(&plan, &files, Some(1024));
    assert!(peak <= report.memory.bound, "{peak} bytes, {:?}", report.memory);
    let mut zeros = blake3::Hasher::new();
    (0..300).for_each(|_| {
        zeros.update(&vec![0; 1 << 20]);
    });
    assert_eq!(report.outputs[0].hash, *zeros.finalize().as_bytes());
}

const TABLE: &str = "layout = \"t\"\nfamily = \"t\"\n[shard]\ntp = [\"F\"]\n\
    [[tensor]]\nname = \"big\"\nshape = \"[K, F]\"\n";

#[test]
fn a_budget_too_small_is_refused_with_both_numbers() {
    in_a_child(BUDGETS);
}

#[test]
#[ignore = "run by a_budget_too_small_is_refused_with_both_numbers"]
fn child_budgets() {
    let dir = temp();
    let rank = |r: u64| RankFile {
        coords: [("tp".to_string(), r)].into(),
        tensors: vec![Tensor::painted("big", &[30_000, 16], r)],
        ..RankFile::default()
    };
    let ranks: Vec<RankFile> = (0..2).map(rank).collect();
    write_ranks(dir.path(), &ranks);
    let catalog = open(dir.path(), 2);
    let request = json!({
        "source": {"toml": TABLE, "units": units(&ranks), "degrees": {"tp": 2}}, "max_shard_size": 1u64 << 40,
    });
    let plan = make_plan(&catalog, request).unwrap().plan;
    let files = sources(&catalog, &plan);
    for memory in [0, 1 << 20, anonymous_memory()] {
        let options = engine::Options { memory, ..options(2, dir.path()) };
        let error = engine::execute(&plan, &files, &Discard, &options, &Control::default()).unwrap_err();
        let finding = &error.findings()[0];
        assert_eq!(finding.code, codes::MEMORY_BUDGET);
        assert!(finding.expected.is_some() && finding.got.is_some());
    }
    for more in [6u64 << 20, 9 << 20, 40 << 20] {
        let options = engine::Options { memory: anonymous_memory() + more, ..options(8, dir.path()) };
        let report = engine::execute(&plan, &files, &Discard, &options, &Control::default()).unwrap();
        assert!(report.memory.bound <= options.memory, "{:?} within {}", report.memory, options.memory);
    }
}
