//! Peak memory of a run with tracked checksums over sparse files: `memory_bench merge|split GB DIR [THREADS]`.
//!
//! Shapes of a model of 175 B parameters, in bf16, in 96 layers. `merge` puts rows together from the columns
//! of two ranks; `split` divides the columns of whole rows over four ranks, one rank's file after another. Both
//! read runs of 32 KiB; every blob carries a CRC32, which is verified.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastshard::engine::{self, Control, Discard, Options};
use fastshard::memory::anonymous_memory;
use fastshard::plan::{
    Combine, Fill, Output, Part, PartAxis, Pieces, Plan, PlanBlob, PlanFile, StoredTensor,
};
use fastshard::stats::Level;
use fastshard::storage::SourceFile;
use fastshard::tensor::Dtype;

const LAYERS: u64 = 96;
/// Elements of 32 KiB.
const RUN: u64 = 16 << 10;
const ITEM: u64 = 2;

fn crc_of_zeros(len: u64) -> u32 {
    let block = vec![0; 1 << 20];
    let mut one = crc32fast::Hasher::new();
    let mut all = crc32fast::Hasher::new();
    one.update(&block);
    for bit in 20..64 {
        if len >> bit & 1 == 1 {
            all.combine(&one);
        }
        let twice = one.clone();
        one.combine(&twice);
    }
    all.update(&block[..(len & 0xf_ffff) as usize]);
    all.finalize()
}

fn columns(rows: u64, width: u64, dst_base: u64, src_base: u64, source: u64) -> Part {
    Part {
        axes: [
            PartAxis { n: rows, dst: width, dim: 0, step: 1 },
            PartAxis { n: RUN, dst: 1, dim: 1, step: 1 },
        ]
        .into(),
        dst_base,
        src_base: [0, src_base].into(),
        sources: [source as u32].into(),
        combine: Combine::Equal,
        ops: Box::default(),
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let [_, mode, gb, dir, rest @ ..] = &args[..] else {
        panic!("memory_bench merge|split GB DIR [THREADS]")
    };
    let total = gb.parse::<u64>().expect("a number of GB") * 1_000_000_000;
    let threads = rest.first().map_or(2, |n| n.parse().expect("a number of threads"));
    let ranks = if mode == "merge" { 2 } else { 4 };
    let rows = total / LAYERS / (ranks * RUN * ITEM);
    // One blob a layer and source rank, as torch.save has it.
    let (sources, width) = if mode == "merge" { (ranks, RUN) } else { (1, ranks * RUN) };
    let len = rows * width * ITEM;
    let crc32 = Some(crc_of_zeros(len));
    let mut plan = Plan { version: 1, target: "bench".into(), rules: vec!["w".into()], ..Plan::default() };
    let mut files = Vec::new();
    for rank in 0..sources {
        let path = std::path::Path::new(dir).join(format!("rank{rank}"));
        let file = std::fs::File::create(&path).expect("a file");
        file.set_len(len * LAYERS).expect("a sparse file");
        files.push(Arc::new(SourceFile::open(&path).expect("a file")));
        std::fs::remove_file(&path).expect("a file");
        plan.sources.push(PlanFile {
            path: format!("rank{rank}"),
            root: 0,
            size: len * LAYERS,
            mtime_ns: 0,
            header: String::new(),
        });
        for layer in 0..LAYERS {
            plan.blobs.push(PlanBlob {
                file: rank as u32,
                offset: layer * len,
                stored_len: len,
                len,
                crc32,
                deflated: false,
                zstd: None,
                encoded: false,
                member: None,
            });
            plan.stored.push(StoredTensor {
                name: format!("w.{layer}").into(),
                dtype: Dtype::Bf16,
                shape: [rows, width].into(),
                pieces: Pieces::View {
                    blob: (rank * LAYERS + layer) as u32,
                    offset: 0,
                    strides: [width, 1].into(),
                },
                rank: None,
                rule: 0,
                index: [layer].into(),
                shard: None,
                twins: Default::default(),
                changes: Box::default(),
            });
        }
    }
    let output = |name: String, width: u64, parts: Vec<Part>| Output {
        name: name.into(),
        dtype: Dtype::Bf16,
        shape: [rows, width].into(),
        parts: parts.into(),
        fill: Fill::None,
        file: 0,
        offset: 0,
        key: None,
    };
    plan.outputs = if mode == "merge" {
        let parts = |l| (0..ranks).map(|r| columns(rows, ranks * RUN, r * RUN, 0, r * LAYERS + l)).collect();
        (0..LAYERS).map(|l| output(format!("w.{l}"), ranks * RUN, parts(l))).collect()
    } else {
        let one = |r, l| output(format!("{r}.w.{l}"), RUN, vec![columns(rows, RUN, 0, r * RUN, l)]);
        (0..ranks).flat_map(|r| (0..LAYERS).map(move |l| one(r, l))).collect()
    };

    let (peak, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let before = anonymous_memory();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                peak.fetch_max(anonymous_memory(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let options = Options {
            threads,
            memory: 256 << 20,
            scratch_dir: dir.into(),
            max_decoded: None,
            encodes: 0,
            stats: Level::Nothing,
        };
        let start = Instant::now();
        let report = engine::execute(&plan, &files, &Discard, &options, &Control::default());
        let seconds = start.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        let report = report.expect("a run");
        assert!(report.findings.is_empty(), "{:?}", report.findings);
        let bytes: u64 = plan.outputs.iter().map(Output::nbytes).sum();
        println!(
            "{mode} {:.1} GB in {} runs: {seconds:.1} s, {:.2} GB/s; before {} KiB, peak {} KiB, bound {} KiB",
            bytes as f64 / 1e9,
            bytes / (RUN * ITEM),
            bytes as f64 / 1e9 / seconds,
            before >> 10,
            peak.load(Ordering::Relaxed) >> 10,
            report.memory.bound >> 10,
        );
    });
}
