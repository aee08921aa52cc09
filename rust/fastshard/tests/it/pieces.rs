//! Stored tensors in pieces (views, boxes, flat ranges) under hand-made plans, against dense arrays.

use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::common::{cases, divided, element, errors, options, run_alone, temp, Dice};
use fastshard::engine;
use fastshard::error::Result;
use fastshard::few::Few;
use fastshard::plan::{
    BoxPiece, Combine, Fill, Output, Part, PartAxis, Pieces, Plan, PlanBlob, PlanFile, RangePiece,
    StoredTensor,
};
use fastshard::storage::{BlockBytes, BlockReader, SourceFile};
use fastshard::tensor::{c_strides, Dtype};
use proptest::prelude::*;

/// A stored tensor and what it holds.
struct Dense {
    shape: Vec<u64>,
    dtype: Dtype,
    bytes: Vec<u8>,
}

fn paint(seed: u64, shape: &[u64], dtype: Dtype) -> Dense {
    let n: u64 = shape.iter().product();
    Dense {
        shape: shape.to_vec(),
        dtype,
        bytes: (0..n).flat_map(|i| element(seed << 24 | i, dtype)).collect(),
    }
}

impl Dense {
    fn at(&self, index: &[u64]) -> &[u8] {
        let flat: u64 = index.iter().zip(&c_strides(&self.shape)).map(|(i, s)| i * s).sum();
        let item = self.dtype.size();
        &self.bytes[flat as usize * item..][..item]
    }
}

/// All indices of a box, the last axis fastest.
fn indices(extents: &[u64]) -> Vec<Vec<u64>> {
    let mut all = vec![vec![]];
    for &n in extents {
        all = all.iter().flat_map(|p: &Vec<u64>| (0..n).map(move |i| [&p[..], &[i]].concat())).collect();
    }
    all
}

/// A store of one block, and how often it was read.
#[derive(Debug)]
struct OneBlock {
    bytes: Vec<u8>,
    reads: Arc<Mutex<HashMap<String, u32>>>,
}

impl BlockReader for OneBlock {
    fn read(&self, key: &str, len: usize, spare: Option<Box<dyn BlockBytes>>) -> Result<Box<dyn BlockBytes>> {
        assert!(len == self.bytes.len() && spare.is_none_or(|b| b.bytes().len() == len));
        *self.reads.lock().unwrap().entry(key.to_string()).or_default() += 1;
        Ok(Box::new(self.bytes.clone()))
    }
}

/// Blobs in the making: each is the content of one source file, with something before and after.
#[derive(Default)]
struct Blobs {
    data: Vec<Vec<u8>>,
}

impl Blobs {
    /// Appends to a blob of choice; returns blob and offset.
    fn put(&mut self, dice: &mut Dice, bytes: &[u8], item: usize) -> (u32, u64) {
        if self.data.is_empty() || dice.one_in(3) {
            self.data.push(Vec::new());
        }
        let blob = dice.below(self.data.len() as u64) as usize;
        let data = &mut self.data[blob];
        let gap = dice.below(4) as usize * item;
        data.extend((0..gap).map(|i| i as u8));
        let offset = data.len() as u64;
        data.extend(bytes);
        (blob as u32, offset)
    }

    /// Writes one file per blob; some are compressed, some carry a checksum.
    fn write(
        self,
        dice: &mut Dice,
        dir: &Path,
        network: bool,
        reads: &Arc<Mutex<HashMap<String, u32>>>,
    ) -> (Vec<PlanFile>, Vec<PlanBlob>, Vec<Arc<SourceFile>>) {
        let (mut files, mut blobs, mut open) = (Vec::new(), Vec::new(), Vec::new());
        for (i, data) in self.data.into_iter().enumerate() {
            let encoded = dice.one_in(3);
            let deflated = !encoded && dice.one_in(5);
            let stored = if deflated {
                let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(&data).unwrap();
                encoder.finish().unwrap()
            } else {
                data.clone()
            };
            let before = dice.below(5000) as usize;
            let mut bytes = vec![0xee; before];
            bytes.extend(&stored);
            bytes.extend([0xdd; 7]);
            let path = dir.join(format!("blob_{i}"));
            std::fs::write(&path, &bytes).unwrap();
            let source = SourceFile::open(&path).unwrap();
            let source = if network { source.as_network() } else { source };
            let reader = OneBlock { bytes: data.clone(), reads: Arc::clone(reads) };
            open.push(Arc::new(if encoded { source.with_blocks(Arc::new(reader)) } else { source }));
            files.push(PlanFile {
                path: format!("blob_{i}"),
                root: 0,
                size: bytes.len() as u64,
                mtime_ns: 0,
                header: String::new(),
            });
            blobs.push(PlanBlob {
                file: i as u32,
                offset: before as u64,
                stored_len: stored.len() as u64,
                len: data.len() as u64,
                crc32: (!encoded && (deflated || dice.one_in(2))).then(|| crc32fast::hash(&data)),
                deflated,
                zstd: None,
                encoded,
                member: encoded.then(|| format!("block {i}").into()),
            });
        }
        (files, blobs, open)
    }
}

/// Cuts a box in two again and again.
fn tile_boxes(dice: &mut Dice, lo: &[u64], len: &[u64], depth: u32, out: &mut Vec<(Vec<u64>, Vec<u64>)>) {
    if depth > 0 && !lo.is_empty() && !dice.one_in(4) {
        let d = dice.below(lo.len() as u64) as usize;
        // At 0 or at the end one of the two is empty.
        let at = dice.below(len[d] + 1);
        let (mut first, mut second, mut rest) = (len.to_vec(), lo.to_vec(), len.to_vec());
        first[d] = at;
        second[d] += at;
        rest[d] -= at;
        tile_boxes(dice, lo, &first, depth - 1, out);
        tile_boxes(dice, &second, &rest, depth - 1, out);
    } else {
        out.push((lo.to_vec(), len.to_vec()));
    }
}

fn boxes(dice: &mut Dice, dense: &Dense, blobs: &mut Blobs) -> Pieces {
    let mut all = Vec::new();
    tile_boxes(dice, &vec![0; dense.shape.len()], &dense.shape, 4, &mut all);
    dice.shuffle(&mut all);
    let piece = |(lo, len): (Vec<u64>, Vec<u64>)| {
        let content: Vec<u8> = indices(&len)
            .iter()
            .flat_map(|i| dense.at(&i.iter().zip(&lo).map(|(a, b)| a + b).collect::<Vec<_>>()).to_vec())
            .collect();
        let (blob, offset) = blobs.put(dice, &content, dense.dtype.size());
        BoxPiece { lo: lo.into(), len: len.into(), blob, offset, strides: Few::default() }
    };
    Pieces::Boxes(all.into_iter().map(piece).collect())
}

/// A view with permuted strides, gaps between them, and dimensions of stride 0 where `dense` allows.
fn view(dice: &mut Dice, dense: &mut Dense, blobs: &mut Blobs) -> Pieces {
    let rank = dense.shape.len();
    let mut order: Vec<usize> = (0..rank).collect();
    dice.shuffle(&mut order);
    let mut strides = vec![0; rank];
    let mut next = 1u64;
    let mut expanded = Vec::new();
    for &d in order.iter().rev() {
        if dice.one_in(8) {
            expanded.push(d);
            continue;
        }
        next += dice.pick(&[0, 0, 0, 1, 5]);
        strides[d] = next;
        next *= dense.shape[d].max(1);
    }
    let item = dense.dtype.size();
    let all = indices(&dense.shape);
    // Along an expanded dimension all values are those of its first position.
    let original = Dense { shape: dense.shape.clone(), dtype: dense.dtype, bytes: dense.bytes.clone() };
    dense.bytes = all
        .iter()
        .flat_map(|i| {
            let i: Vec<u64> =
                i.iter().enumerate().map(|(d, &x)| if expanded.contains(&d) { 0 } else { x }).collect();
            original.at(&i).to_vec()
        })
        .collect();
    let span =
        all.iter().map(|i| i.iter().zip(&strides).map(|(a, b)| a * b).sum::<u64>() + 1).max().unwrap_or(0);
    let mut content = vec![0x77; span as usize * item];
    for i in &all {
        let at = i.iter().zip(&strides).map(|(a, b)| a * b).sum::<u64>() as usize * item;
        content[at..at + item].copy_from_slice(dense.at(i));
    }
    let (blob, offset) = blobs.put(dice, &content, item);
    Pieces::View { blob, offset, strides: strides.into() }
}

/// Tensors laid one after another in a flat buffer that is partitioned without regard to them.
fn ranges(dice: &mut Dice, all: &[&Dense], blobs: &mut Blobs) -> Vec<Pieces> {
    let item = all[0].dtype.size() as u64;
    let total: u64 = all.iter().map(|d| d.bytes.len() as u64 / item).sum();
    let flat: Vec<u8> = all.iter().flat_map(|d| d.bytes.clone()).collect();
    let mut cuts: Vec<u64> = (0..dice.below(6)).map(|_| dice.below(total + 1)).chain([0, total]).collect();
    cuts.sort_unstable();
    let places: Vec<(u64, u64, u32, u64)> = cuts
        .windows(2)
        .map(|w| {
            let (blob, offset) =
                blobs.put(dice, &flat[(w[0] * item) as usize..(w[1] * item) as usize], item as usize);
            (w[0], w[1], blob, offset)
        })
        .collect();
    let mut start = 0;
    all.iter()
        .map(|dense| {
            let end = start + dense.bytes.len() as u64 / item;
            let pieces = places
                .iter()
                .filter_map(|&(lo, hi, blob, offset)| {
                    let (a, b) = (lo.max(start), hi.min(end));
                    (a < b).then(|| RangePiece {
                        start: a - start,
                        len: b - a,
                        blob,
                        offset: offset + (a - lo) * item,
                    })
                })
                .collect();
            start = end;
            Pieces::Ranges(pieces)
        })
        .collect()
}

/// An output over one stored tensor: some dimensions stepped, sliced or split in two, all permuted.
/// Returns it with its bytes.
fn output(dice: &mut Dice, stored: u32, dense: &Dense) -> (Output, Vec<u8>) {
    let mut src_base = vec![0; dense.shape.len()];
    let mut axes: Vec<(u64, u32, u64)> = Vec::new();
    for (d, &n) in dense.shape.iter().enumerate() {
        let dim = d as u32;
        match dice.below(4) {
            1 if n > 1 => {
                src_base[d] = dice.below(n);
                axes.push((1 + dice.below(n - src_base[d]), dim, 1));
            }
            2 if n > 1 => {
                src_base[d] = dice.below(2);
                axes.push(((n - src_base[d]).div_ceil(2), dim, 2));
            }
            3 if n > 3 => {
                let inner = 2 + dice.below(n / 2 - 1);
                axes.push((n / inner, dim, inner));
                axes.push((inner, dim, 1));
            }
            _ => axes.push((n, dim, 1)),
        }
    }
    dice.shuffle(&mut axes);
    let shape: Vec<u64> = axes.iter().map(|a| a.0).collect();
    let bytes: Vec<u8> = indices(&shape)
        .iter()
        .flat_map(|index| {
            let mut at = src_base.clone();
            index.iter().zip(&axes).for_each(|(i, (_, dim, step))| at[*dim as usize] += i * step);
            dense.at(&at).to_vec()
        })
        .collect();
    let strides = c_strides(&shape);
    let part_axes = axes.iter().zip(&strides).map(|(&(n, dim, step), &dst)| PartAxis { n, dst, dim, step });
    let part = Part {
        axes: part_axes.filter(|a| a.n != 1 || a.step == 1).collect(),
        dst_base: 0,
        src_base: src_base.into(),
        sources: [stored].into(),
        combine: Combine::Equal,
        ops: Box::default(),
    };
    let output = Output {
        name: format!("out.{stored}").into(),
        dtype: dense.dtype,
        shape: shape.into(),
        parts: [part].into(),
        fill: Fill::None,
        file: 0,
        offset: 0,
        key: None,
    };
    (output, bytes)
}

fn check(dice: &mut Dice, shapes: &[Vec<u64>], dtype: Dtype, tile: u64, threads: usize, network: bool) {
    let mut all: Vec<Dense> = shapes.iter().enumerate().map(|(i, s)| paint(i as u64 + 1, s, dtype)).collect();
    let mut blobs = Blobs::default();
    let pieces: Vec<Pieces> = match dice.below(3) {
        0 => all.iter_mut().map(|d| view(dice, d, &mut blobs)).collect(),
        1 => all.iter().map(|d| boxes(dice, d, &mut blobs)).collect(),
        _ => ranges(dice, &all.iter().collect::<Vec<_>>(), &mut blobs),
    };
    let dir = temp();
    let reads = Arc::default();
    let (files, blobs, open) = blobs.write(dice, dir.path(), network, &reads);
    let stored = all.iter().zip(pieces).enumerate().map(|(i, (dense, pieces))| StoredTensor {
        name: format!("stored.{i}").into(),
        dtype,
        shape: dense.shape[..].into(),
        pieces,
        rank: None,
        rule: i as u32,
        index: Few::default(),
        shard: None,
        twins: Few::default(),
        changes: Box::default(),
    });
    let mut plan = Plan {
        sources: files,
        blobs,
        stored: stored.collect(),
        non_finite_accepted: true,
        ..Plan::default()
    };
    let mut want = Vec::new();
    for (i, dense) in all.iter().enumerate() {
        for _ in 0..1 + dice.below(2) {
            let (output, bytes) = output(dice, i as u32, dense);
            plan.outputs.push(output);
            want.push(bytes);
        }
    }
    plan.outputs.extend(plan.identity_outputs());
    want.extend(all.iter().map(|d| d.bytes.clone()));
    // With little room decoded blocks are put aside and read from there.
    let max_decoded = dice.pick(&[None, Some(0), Some(300)]);
    let options = engine::Options { max_decoded, ..options(threads, dir.path()) };
    let (got, report) = run_alone(&plan, &open, &options, Some(tile)).unwrap();
    assert!(reads.lock().unwrap().values().all(|n| *n == 1), "each block is decoded once: {reads:?}");
    divided(&plan, &open, &options, Some(tile), &got, &report);
    assert!(errors(&report.findings).is_empty(), "{:#?}", report.findings);
    for ((output, got), want) in plan.outputs.iter().zip(&got).zip(&want) {
        assert!(got == want, "{output:#?} of {:#?}", plan.stored[output.parts[0].sources[0] as usize]);
    }
}

fn dtypes() -> impl Strategy<Value = Dtype> {
    prop::sample::select(vec![Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F64, Dtype::C128])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(2500), ..ProptestConfig::default() })]

    #[test]
    fn pieces_equal_dense_arrays(
        shapes in prop::collection::vec(prop::collection::vec(prop_oneof![1 => Just(0u64), 12 => 1u64..9], 0..5), 1..4),
        data in prop::collection::vec(any::<u32>(), 0..160),
        dtype in dtypes(), tile in 0u32..3, threads in 1usize..3, network in any::<bool>(),
    ) {
        check(&mut Dice::new(&data), &shapes, dtype, 1024 << tile, threads, network);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(16), ..ProptestConfig::default() })]

    /// Runs longer than every buffer, spans wider than them.
    #[test]
    fn large_pieces_equal_dense_arrays(
        rows in prop::sample::select(vec![1u64, 3, 255, 700, 1031]), cols in prop::sample::select(vec![5u64, 640, 1025]),
        data in prop::collection::vec(any::<u32>(), 80),
        dtype in prop::sample::select(vec![Dtype::Bf16, Dtype::F32, Dtype::F64]),
        tile in 2u32..12, threads in 1usize..3, network in any::<bool>(),
    ) {
        check(&mut Dice::new(&data), &[vec![rows, cols], vec![cols / 5, 3, rows / 3]], dtype, 1024 << tile, threads, network);
    }
}

/// A reader that panics after a while.
#[derive(Debug)]
struct Panics;

impl BlockReader for Panics {
    fn read(&self, _: &str, _: usize, _: Option<Box<dyn BlockBytes>>) -> Result<Box<dyn BlockBytes>> {
        std::thread::sleep(std::time::Duration::from_millis(50));
        panic!("no block")
    }
}

#[test]
fn workers_that_wait_for_a_block_whose_reader_panics_stop() {
    let dir = temp();
    let path = dir.path().join("anchor");
    std::fs::write(&path, "x").unwrap();
    let len = 1 << 20;
    let files = vec![Arc::new(SourceFile::open(&path).unwrap().with_blocks(Arc::new(Panics)))];
    let mut plan = Plan {
        version: 1,
        sources: vec![PlanFile {
            path: "anchor".into(),
            root: 0,
            size: 1,
            mtime_ns: 0,
            header: String::new(),
        }],
        blobs: vec![PlanBlob {
            file: 0,
            offset: 0,
            stored_len: len,
            len,
            crc32: None,
            deflated: false,
            zstd: None,
            encoded: true,
            member: Some("b".into()),
        }],
        stored: vec![StoredTensor {
            name: "w".into(),
            dtype: Dtype::U8,
            shape: [len].into(),
            pieces: Pieces::View { blob: 0, offset: 0, strides: [1].into() },
            rank: None,
            rule: 0,
            index: Few::default(),
            shard: None,
            twins: Few::default(),
            changes: Box::default(),
        }],
        rules: vec!["w".into()],
        ..Plan::default()
    };
    plan.outputs = plan.identity_outputs();
    let (sender, receiver) = std::sync::mpsc::channel();
    // Not joined: a worker that waits for ever is what this is about.
    std::thread::spawn(move || {
        let _ = sender.send(run_alone(&plan, &files, &options(4, Path::new("")), Some(1024)).map(|_| ()));
    });
    let result = receiver.recv_timeout(crate::common::paused::HANG).expect("the run ends");
    assert_eq!(result.unwrap_err().findings()[0].code, fastshard::codes::INTERNAL);
}
