//! What is listed against what is read: random plans over files that note each read.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use proptest::prelude::*;

use crate::distributed::foresee::recorded::{recorded, Reads};
use crate::engine::checksums::Checksums;
use crate::engine::gather::Sources;
use crate::engine::tile::{self, Twins, Workspace};
use crate::few::Few;
use crate::plan::change::Form;
use crate::plan::{
    BoxPiece, Change, Coded, Combine, Fill, Grid, Groups, Numbers, Op, Output, Packing, Part, PartAxis,
    Pieces, Plan, PlanBlob, RangePiece, Scale, StoredTensor,
};
use crate::tensor::{c_strides, Dtype};

/// Files of a plan; each has one blob, which begins at this byte.
const FILES: usize = 3;
const BEFORE: u64 = 13;

/// Choices from a list of numbers; beyond its end every choice is the first one.
struct Dice<'a>(std::slice::Iter<'a, u32>);

impl Dice<'_> {
    fn below(&mut self, n: u64) -> u64 {
        self.0.next().map_or(0, |x| u64::from(*x)) % n.max(1)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == n - 1
    }

    fn pick<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize].clone()
    }

    fn shuffle<T>(&mut self, all: &mut [T]) {
        (1..all.len()).rev().for_each(|i| all.swap(i, i - self.below(i as u64 + 1) as usize));
    }
}

/// A plan in the making, and what its files hold.
struct Case<'a> {
    dice: Dice<'a>,
    plan: Plan,
    data: [Vec<u8>; FILES],
}

fn count(shape: &[u64]) -> u64 {
    shape.iter().product()
}

impl Case<'_> {
    /// Appends bytes to a blob of choice; blob and offset.
    fn put(&mut self, len: u64, item: u64) -> (u32, u64) {
        let blob = self.dice.below(FILES as u64) as usize;
        let gap = self.dice.pick(&[0, 0, 1, 5]) * item;
        let data = &mut self.data[blob];
        let offset = (data.len() as u64).next_multiple_of(item) + gap;
        data.resize(offset as usize, 0);
        data.extend((0..len).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 11) as u8));
        (blob as u32, offset)
    }

    fn add(&mut self, dtype: Dtype, shape: &[u64], pieces: Pieces) -> u32 {
        self.plan.stored.push(StoredTensor {
            name: format!("stored.{}", self.plan.stored.len()).into(),
            dtype,
            shape: shape.into(),
            pieces,
            rank: None,
            rule: 0,
            index: Few::default(),
            shard: None,
            twins: Few::default(),
            changes: Box::default(),
        });
        self.plan.stored.len() as u32 - 1
    }

    /// A stored tensor as a view, ranges or boxes.
    fn plain(&mut self, dtype: Dtype, shape: &[u64]) -> u32 {
        let item = dtype.size() as u64;
        let pieces = match self.dice.below(3) {
            0 => {
                let mut order: Vec<usize> = (0..shape.len()).rev().collect();
                if self.dice.one_in(2) {
                    self.dice.shuffle(&mut order);
                }
                let (mut strides, mut next) = (vec![0; shape.len()], 1);
                for d in order {
                    next += self.dice.pick(&[0, 0, 0, 1, 7]);
                    strides[d] = next;
                    next *= shape[d];
                }
                let (blob, offset) = self.put(next * item, item);
                Pieces::View { blob, offset, strides: strides.into() }
            }
            1 => {
                let total = count(shape);
                let mut cuts: Vec<u64> = (0..3).map(|_| self.dice.below(total + 1)).collect();
                cuts.extend([0, total]);
                cuts.sort_unstable();
                cuts.dedup();
                let piece = |range: &[u64]| {
                    let (start, len) = (range[0], range[1] - range[0]);
                    let (blob, offset) = self.put(len * item, item);
                    RangePiece { start, len, blob, offset }
                };
                Pieces::Ranges(cuts.windows(2).map(piece).collect())
            }
            _ => {
                let d = self.dice.below(shape.len() as u64) as usize;
                let at = self.dice.below(shape[d] + 1);
                let piece = |(first, n): (u64, u64)| {
                    let (mut lo, mut len) = (vec![0; shape.len()], shape.to_vec());
                    (lo[d], len[d]) = (first, n);
                    let (blob, offset) = self.put(count(&len) * item, item);
                    BoxPiece { lo: lo.into(), len: len.into(), blob, offset, strides: Few::default() }
                };
                Pieces::Boxes([(0, at), (at, shape[d] - at)].map(piece).into())
            }
        };
        self.add(dtype, shape, pieces)
    }

    /// 32-bit integers below `n`.
    fn indices(&mut self, shape: &[u64], n: u64) -> u32 {
        let values: Vec<u8> =
            (0..count(shape)).flat_map(|i| ((i * 7 % 31 % n) as i32).to_le_bytes()).collect();
        let (blob, offset) = self.put(values.len() as u64, 4);
        self.data[blob as usize][offset as usize..].copy_from_slice(&values);
        self.add(Dtype::I32, shape, Pieces::View { blob, offset, strides: c_strides(shape) })
    }

    /// A tensor of codes; scales of some are codes themselves.
    fn coded(&mut self, shape: &[u64], is_grouped: bool, depth: u32) -> u32 {
        let packing = match self.dice.below(4) {
            0 => Packing::None,
            1 => Packing::Column { bits: 4 },
            2 => Packing::Row { bits: 4, lanes: vec![0, 2, 4, 6, 1, 3, 5, 7] },
            _ => Packing::Row { bits: 4, lanes: Vec::new() },
        };
        let flat = !is_grouped && self.dice.one_in(4);
        let mut coded = Coded {
            codes: 0,
            packing,
            numbers: Numbers::Less(8),
            flat,
            turned: !flat && self.dice.one_in(3),
            zero: None,
            scales: Vec::new(),
            groups: None,
            rounded: Dtype::F32,
            term: 0.0,
        };
        let [lead, rows, columns] = coded.extents(shape);
        coded.codes = match coded.packing {
            Packing::None => {
                coded.numbers = Numbers::Float(Dtype::F8E4m3);
                self.plain(Dtype::F8E4m3, &[lead, rows, columns])
            }
            Packing::Row { .. } => self.plain(Dtype::I32, &[lead, rows, columns.div_ceil(8)]),
            Packing::Column { .. } => self.plain(Dtype::I32, &[lead, rows.div_ceil(8), columns]),
        };
        if coded.packing != Packing::None && self.dice.one_in(2) {
            coded.numbers = Numbers::Table(self.plain(Dtype::F32, &[1, 1, 16]));
        }
        let grid = |case: &mut Self| {
            let block: [u64; 3] = match flat {
                true => [1, 1, case.dice.pick(&[1, 64, 100_000])],
                false => [1, 0, 0].map(|n| if n == 1 { 1 } else { case.dice.pick(&[1, 4, 128]) }),
            };
            let extents = [lead, rows, columns];
            let shape: Vec<u64> = extents.iter().zip(block).map(|(n, block)| n.div_ceil(block)).collect();
            let of = match depth == 0 && !is_grouped && case.dice.one_in(4) {
                true => case.coded(&shape, false, 1),
                false => case.plain(Dtype::Bf16, &shape),
            };
            Grid { of, block }
        };
        coded.zero = self.dice.one_in(2).then(|| grid(self));
        for _ in 0..self.dice.below(3) {
            coded.scales.push(Scale { grid: grid(self), divides: false, rounded: Dtype::F32 });
        }
        if is_grouped {
            let by_rows = self.dice.one_in(2);
            let counts = coded.needs().skip(1).map(|of| {
                let shape = &self.plan.stored[*of as usize].shape;
                if by_rows {
                    shape[1]
                } else {
                    shape[2]
                }
            });
            let n = counts.filter(|n| *n > 1).min().unwrap_or(1);
            let of = self.indices(&[1, 1, if by_rows { rows } else { columns }], n);
            coded.groups = Some(Groups { of, rows: by_rows });
        }
        self.add(Dtype::F32, shape, Pieces::Coded(Box::new(coded)))
    }

    /// A change of a matrix.
    fn change(&mut self, shape: &[u64]) -> Change {
        let (rows, columns) = (shape[0], shape[1]);
        match self.dice.below(3) {
            0 => Change::Vector { of: self.plain(Dtype::Bf16, shape), scale: 0.5 },
            1 => Change::Rows { of: self.plain(Dtype::F32, &[2, columns]), at: vec![rows - 1, 0] },
            _ => Change::LowRank {
                a: self.plain(Dtype::F32, &[2, columns]),
                b: self.plain(Dtype::Bf16, &[rows, 2]),
                rank: 2,
                scale: 0.5,
                form: Form::Rows,
                window: None,
                magnitude: self.dice.one_in(2).then(|| self.plain(Dtype::F32, &[rows])),
            },
        }
    }

    /// An output of parts of tensors of one shape: stepped, sliced, split in two, turned, one behind another.
    fn output(&mut self, dtype: Dtype, shape: &[u64], parts: Vec<(Vec<u32>, Combine, Vec<Op>)>) {
        let mut src_base = vec![0; shape.len()];
        let mut axes: Vec<(u64, u32, u64)> = Vec::new();
        for (d, &n) in shape.iter().enumerate() {
            let dim = d as u32;
            match self.dice.below(6) {
                1 => {
                    src_base[d] = self.dice.below(n);
                    axes.push((1 + self.dice.below(n - src_base[d]), dim, 1));
                }
                2 => {
                    let step = self.dice.pick(&[2, 3, 90]);
                    axes.push((n.div_ceil(step), dim, step));
                }
                3 if n > 3 => axes.extend([(n / 2, dim, 2), (2, dim, 1)]),
                _ => axes.push((n, dim, 1)),
            }
        }
        if self.dice.one_in(2) {
            self.dice.shuffle(&mut axes);
        }
        let mut out: Vec<u64> = axes.iter().map(|axis| axis.0).collect();
        let axes: Vec<PartAxis> = axes
            .iter()
            .zip(&c_strides(&out))
            .map(|(&(n, dim, step), &dst)| PartAxis { n, dst, dim, step })
            .collect();
        let each = count(&out);
        out.insert(0, parts.len() as u64);
        let part = |(k, (sources, combine, ops)): (u64, (Vec<u32>, Combine, Vec<Op>))| Part {
            axes: axes.clone().into(),
            dst_base: k * each,
            src_base: src_base[..].into(),
            sources: sources.into(),
            combine,
            ops: ops.into(),
        };
        self.plan.outputs.push(Output {
            name: format!("output.{}", self.plan.outputs.len()).into(),
            dtype,
            shape: out.into(),
            parts: (0..).zip(parts).map(part).collect(),
            fill: Fill::None,
            file: 0,
            offset: 0,
            key: None,
        });
    }

    /// An output of one kind: how it is made of what.
    fn make(&mut self, shape: &[u64]) {
        let float = [Dtype::Bf16, Dtype::F32, Dtype::F64];
        let stored = self.dice.pick(&float);
        let to = if self.dice.one_in(2) { stored } else { self.dice.pick(&float) };
        let alone = |of: u32| (vec![of], Combine::Equal, Vec::new());
        let parts = match self.dice.below(6) {
            0 => vec![alone(self.plain(stored, shape))],
            1 => {
                let copies: Vec<u32> = (0..3).map(|_| self.plain(stored, shape)).collect();
                for &copy in &copies {
                    let twins = (0..self.dice.below(3)).map(|_| self.plain(Dtype::F32, shape)).collect();
                    self.plan.stored[copy as usize].twins = twins;
                }
                let zero = Combine::Zero("fact".into());
                let combine = self.dice.pick(&[Combine::Equal, Combine::Mean, Combine::Sum, zero]);
                vec![(copies, combine, Vec::new()), alone(self.plain(stored, shape))]
            }
            2 => vec![(vec![self.plain(stored, shape)], Combine::Equal, vec![Op::Scale(3.0)])],
            3 if shape.len() == 2 => {
                let of = self.plain(stored, shape);
                let changes = (0..1 + self.dice.below(2)).map(|_| self.change(shape)).collect();
                self.plan.stored[of as usize].changes = changes;
                vec![alone(of), alone(of)]
            }
            4 => vec![alone(self.coded(shape, false, 0))],
            _ => vec![alone(self.coded(shape, true, 0))],
        };
        self.output(to, shape, parts);
    }

    fn check(mut self, tile: u64, twins: Twins) {
        let reads = Reads::default();
        let mut files = Vec::new();
        for (file, data) in (0u32..).zip(self.data) {
            let len = data.len() as u64;
            let stored_len = len;
            self.plan.blobs.push(PlanBlob {
                file,
                offset: BEFORE,
                stored_len,
                len,
                crc32: None,
                deflated: false,
                zstd: None,
                encoded: false,
                member: None,
            });
            files.push(Arc::new(recorded(
                file,
                [vec![0; BEFORE as usize], data].concat(),
                &reads,
                &Reads::default(),
            )));
        }
        let plan = &self.plan;
        let sources = Sources::new(plan, &files, PathBuf::new(), Checksums::none(plan), 0, None);
        let (mut work, mut factors) = (Workspace::new().unwrap(), BTreeSet::new());
        for output in &plan.outputs {
            let has_groups = plan.stored.iter().any(|s| s.coded().is_some_and(|c| c.groups.is_some()));
            for start in (0..output.nbytes()).step_by(tile as usize) {
                let end = (start + tile).min(output.nbytes());
                let mut listed = Vec::new();
                tile::list_reads(plan, output, start, end, twins, &mut factors, &mut |blob, offset, len| {
                    listed.push((blob, BEFORE + offset, BEFORE + offset + len));
                    Ok(())
                })
                .unwrap();
                tile::make(plan, &sources, output, start, end, twins, &mut work).unwrap();
                assert!(!listed.is_empty());
                let read = std::mem::take(&mut *reads.lock().unwrap());
                if has_groups {
                    // Scales that indices choose are read and not listed.
                    let mut left = read.iter();
                    assert!(listed.iter().all(|each| left.any(|read| read == each)), "{listed:?}: {read:?}");
                } else {
                    assert_eq!(listed, read, "{start}..{end} of {output:#?}, {:#?}", plan.stored);
                }
            }
        }
    }
}

fn check(data: &[u32], shape: &[u64], tile: u64) {
    let mut case = Case { dice: Dice(data.iter()), plan: Plan::default(), data: Default::default() };
    let twins = case.dice.pick(&[Twins::Compare, Twins::Compare, Twins::Leave]);
    case.make(shape);
    case.check(tile, twins);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]
    #[test]
    fn what_is_listed_is_read(
        shape in prop::collection::vec(1u64..40, 1..4),
        data in prop::collection::vec(any::<u32>(), 60),
        tile in prop::sample::select(vec![64u64, 4096, 1 << 20]),
    ) {
        check(&data, &shape, tile);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    /// Runs longer than every buffer, spans wider than them, windows of more codes than are read at a time.
    #[test]
    fn what_is_listed_of_large_tensors_is_read(
        shape in prop::sample::select(vec![vec![300u64, 1025], vec![9000, 41], vec![7, 200, 160], vec![400_000]]),
        data in prop::collection::vec(any::<u32>(), 60),
        tile in prop::sample::select(vec![100_000u64 / 8 * 8, 1 << 20, 1 << 24]),
    ) {
        check(&data, &shape, tile);
    }
}
