//! What is sent for against what a share reads.

use super::recorded::{recorded, Reads};
use super::*;
use crate::distributed::share::all_tiles;
use crate::engine::{self, Discard, Options};
use crate::few::Few;
use crate::plan::{Combine, Fill, Output, Part, PartAxis, Pieces, PlanBlob, PlanFile, StoredTensor};
use crate::stats::Level;
use crate::tensor::{c_strides, Dtype};

/// A plan that takes these matrices, one in each file, turned, but for all columns after the first `columns`.
fn turned(matrices: &[([u64; 2], u64)], dtype: Dtype) -> Plan {
    let mut plan = Plan { rules: vec!["w".into()], non_finite_accepted: true, ..Plan::default() };
    for (file, &([rows, width], columns)) in (0u32..).zip(matrices) {
        let len = rows * width * dtype.size() as u64;
        let path = format!("file {file}");
        plan.sources.push(PlanFile { path, root: 0, size: len, mtime_ns: 0, header: String::new() });
        plan.blobs.push(PlanBlob {
            file,
            offset: 0,
            stored_len: len,
            len,
            crc32: None,
            deflated: false,
            zstd: None,
            encoded: false,
            member: None,
        });
        plan.stored.push(StoredTensor {
            name: format!("w.{file}").into(),
            dtype,
            shape: [rows, width].into(),
            pieces: Pieces::View { blob: file, offset: 0, strides: c_strides(&[rows, width]) },
            rank: None,
            rule: 0,
            index: [u64::from(file)].into(),
            shard: None,
            twins: Few::default(),
            changes: Box::default(),
        });
        let axes = [
            PartAxis { n: columns, dst: rows, dim: 1, step: 1 },
            PartAxis { n: rows, dst: 1, dim: 0, step: 1 },
        ];
        let part = Part {
            axes: axes.into(),
            dst_base: 0,
            src_base: [0; 2].into(),
            sources: [file].into(),
            combine: Combine::Equal,
            ops: Box::default(),
        };
        plan.outputs.push(Output {
            name: format!("w.{file}").into(),
            dtype,
            shape: [columns, rows].into(),
            parts: [part].into(),
            fill: Fill::None,
            file: 0,
            offset: 0,
            key: None,
        });
    }
    plan
}

/// Ranges by file and place, those that meet as one.
fn joined(ranges: &Reads) -> Vec<(u32, u64, u64)> {
    let mut ranges = ranges.lock().unwrap().clone();
    ranges.sort_unstable();
    let mut all: Vec<(u32, u64, u64)> = Vec::new();
    for (file, lo, hi) in ranges {
        match all.last_mut() {
            Some(last) if last.0 == file && last.2 >= lo => last.2 = last.2.max(hi),
            _ => all.push((file, lo, hi)),
        }
    }
    all
}

#[test]
fn what_is_sent_for_is_what_is_read() {
    // Ranges that fill what is sent together; a span; runs of whole tensors, in several tiles.
    let columns_apart = ([70_000, 16], 2);
    let plan = turned(&[columns_apart, ([300, 200], 150), ([1, 1_000_000], 1_000_000)], Dtype::Bf16);
    let (reads, announced) = (Reads::default(), Reads::default());
    let bytes = |n: u64| (0..n).map(|i| (i * 7 % 251) as u8).collect();
    let files: Vec<Arc<SourceFile>> = (0u32..)
        .zip(&plan.blobs)
        .map(|(file, blob)| Arc::new(recorded(file, bytes(blob.len), &reads, &announced)))
        .collect();
    let sizes = vec![256 << 10; plan.outputs.len()];
    let share = Share { tiles: all_tiles(&plan, &sizes, &|_| false), pads: Vec::new() };
    let control = Control::default();
    foresee(&plan, &files, &sizes, &share, &control).unwrap();
    assert_eq!(*reads.lock().unwrap(), [], "nothing is read for it");
    let options = Options {
        threads: 1,
        memory: 1 << 40,
        scratch_dir: std::env::temp_dir(),
        max_decoded: None,
        encodes: 0,
        stats: Level::Nothing,
    };
    engine::work(&plan, &files, &Discard, &options, &sizes, &share, &control).unwrap();
    assert!(announced.lock().unwrap().len() > RANGES);
    assert_eq!(joined(&announced), joined(&reads));
}
