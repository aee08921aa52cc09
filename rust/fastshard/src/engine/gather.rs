//! Reads a box of a stored tensor into memory: pieces found, runs read, checksums taken on the way.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::boxes::{Spread, SubBox};
use crate::error::Result;
use crate::format::{torch_zip, Blob};
use crate::kernel::{self, StridedBox};
use crate::plan::{PartAxis, Pieces, Plan, PlanBlob, StoredTensor};
use crate::steps::Step;
use crate::storage::SourceFile;
use crate::tensor::c_strides;

use super::blocks::{Block, Blocks};
use super::changes::Changes;
use super::checksums::{Checksums, Note};
use super::coded::Pool;
use super::evidence::Segment;
use super::Control;

/// Runs at least this long are read straight to where they belong; shorter ones by way of a span or a map.
const LONG_RUN: u64 = 32 << 10;

/// The source files of a plan, with the state that reading them builds up.
pub struct Sources<'p> {
    pub(super) plan: &'p Plan,
    files: &'p [Arc<SourceFile>],
    /// Where compressed blobs are unpacked to.
    scratch_dir: PathBuf,
    unpacked: Vec<Mutex<Option<Arc<SourceFile>>>>,
    checksums: Checksums,
    /// Blocks that their store's reader decodes.
    pub blocks: Blocks,
    /// Buffers for values of codes.
    pub(super) coded: Pool,
    /// Factors of adapters.
    pub(super) changes: Changes,
    /// What stops reading; none where nobody can.
    control: Option<&'p Control>,
    /// How often something was read once more to be compared.
    compared: AtomicU64,
}

/// The file that a blob's data lies in.
enum Located<'a> {
    Source(&'a SourceFile),
    Unpacked(Arc<SourceFile>),
}

impl Deref for Located<'_> {
    type Target = SourceFile;

    fn deref(&self) -> &SourceFile {
        match self {
            Located::Source(file) => file,
            Located::Unpacked(file) => file,
        }
    }
}

/// Where the elements of a box go: a buffer, the first element's index and the steps per axis.
pub struct Into<'a> {
    /// Buffer.
    pub bytes: &'a mut [u8],
    /// Index of the box's first element in the buffer, in elements.
    pub base: u64,
    /// Step per axis, in elements.
    pub strides: &'a [u64],
}

impl<'p> Sources<'p> {
    /// Sources of a plan. `files` are in the order of [`Plan::sources`]; what is compressed is
    /// unpacked to unnamed files in `scratch_dir`. Up to `held` bytes of decoded blocks are kept.
    pub fn new(
        plan: &'p Plan,
        files: &'p [Arc<SourceFile>],
        scratch_dir: PathBuf,
        checksums: Checksums,
        held: u64,
        control: Option<&'p Control>,
    ) -> Self {
        let n = plan.blobs.len();
        Sources {
            plan,
            files,
            blocks: Blocks::new(plan, scratch_dir.clone(), held),
            scratch_dir,
            unpacked: (0..n).map(|_| Mutex::default()).collect(),
            checksums,
            coded: Pool::default(),
            changes: Changes::default(),
            control,
            compared: AtomicU64::new(0),
        }
    }

    /// Says that something is about to be read once more, to be compared.
    ///
    /// # Errors
    /// `FS510` once the run is told to stop.
    pub fn begin_comparison(&self) -> Result<()> {
        self.check_running()?;
        let number = self.compared.fetch_add(1, Ordering::Relaxed);
        if let Some(control) = self.control {
            control.reach(Step::Compare(number));
        }
        Ok(())
    }

    /// Ends what reads, compares or searches once the run is told to stop. Whatever reads asks here; loops that read
    /// nothing ask themselves.
    ///
    /// # Errors
    /// `FS510` then.
    pub fn check_running(&self) -> Result<()> {
        self.control.map_or(Ok(()), Control::check_running)
    }

    /// The file and offset at which a blob's data lies, unpacked first if it is compressed.
    fn locate(&self, index: u32) -> Result<(Located<'_>, u64)> {
        let blob = &self.plan.blobs[index as usize];
        let file = &self.files[blob.file as usize];
        if !blob.deflated {
            return Ok((Located::Source(file), blob.offset));
        }
        let mut slot = self.unpacked(index);
        let unpacked = match &*slot {
            Some(unpacked) => Arc::clone(unpacked),
            None => Arc::clone(slot.insert(Arc::new(self.unpack(file, blob)?))),
        };
        Ok((Located::Unpacked(unpacked), 0))
    }

    /// Reads bytes of a blob's data from `at`, as they are.
    pub fn read_blob(&self, blob: u32, at: u64, bytes: &mut [u8]) -> Result<()> {
        self.check_running()?;
        let (file, base) = self.locate(blob)?;
        file.read_at(base + at, bytes)
    }

    /// True if a blob lies in a file of another host, of which this one reads what is lent to it.
    pub fn is_elsewhere(&self, blob: u32) -> bool {
        self.files[self.plan.blobs[blob as usize].file as usize].is_elsewhere()
    }

    /// Decodes a block once more, for what `look` sees in it: at the end of a run, when no worker needs memory.
    pub fn decode<T>(&self, blob: u32, look: impl FnOnce(&[u8]) -> T) -> Result<T> {
        self.check_running()?;
        let about = &self.plan.blobs[blob as usize];
        let key = about.member.as_deref().unwrap_or("");
        let bytes = self.files[about.file as usize].read_block(key, about.len as usize, None)?;
        Ok(look(bytes.bytes()))
    }

    fn unpacked(&self, blob: u32) -> MutexGuard<'_, Option<Arc<SourceFile>>> {
        self.unpacked[blob as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets go of what was unpacked of a blob: its last reader is done.
    pub fn release(&self, blob: u32) {
        self.unpacked(blob).take();
    }

    fn unpack(&self, file: &SourceFile, blob: &PlanBlob) -> Result<SourceFile> {
        let blob = Blob {
            offset: blob.offset,
            stored_len: blob.stored_len,
            len: blob.len,
            crc32: blob.crc32,
            deflated: true,
            zstd: blob.zstd,
            encoded: false,
            member: blob.member.clone(),
        };
        SourceFile::unpacked(&self.scratch_dir, file.path(), |write| {
            torch_zip::inflate(file, &blob, &mut |bytes| {
                self.check_running()?;
                write(bytes)
            })
        })
    }

    /// The CRC32 of a range of a blob, as far as reading has told it.
    pub fn crc(&self, blob: u32, lo: u64, hi: u64) -> Option<u32> {
        self.checksums.crc(blob, lo, hi)
    }

    /// What reading has told of a blob's checksums.
    pub fn segments(&self, blob: u32) -> Vec<Segment> {
        self.checksums.segments(blob)
    }

    /// Takes over what another process has read.
    pub fn know(&self, blob: u32, segments: &[Segment]) {
        self.checksums.know(blob, segments);
    }

    /// Whether checksums are kept for a blob.
    pub fn is_tracked(&self, blob: u32) -> bool {
        self.checksums.is_tracked(blob)
    }

    /// Reads what no view has read of a tracked blob, so that its checksum is whole.
    pub fn finish(&self, blob: u32, buffer: &mut [u8]) -> Result<()> {
        let (file, base) = self.locate(blob)?;
        // Another worker that reads padding may note a part of a gap first: it is looked for anew each time.
        let mut at = 0;
        while let Some((lo, n)) = self.checksums.gap(blob, at, self.plan.blobs[blob as usize].len) {
            self.check_running()?;
            let n = n.min(buffer.len() as u64) as usize;
            let bytes = &mut buffer[..n];
            file.read_at(base + lo, bytes)?;
            self.checksums.add(blob, lo, bytes, Note::Needed);
            at = lo;
        }
        Ok(())
    }

    /// Reads the box `part` of `axes` of a stored tensor into `into`. `scratch` bounds what is read
    /// at a time where runs are short.
    pub fn read(
        &self,
        stored: &StoredTensor,
        axes: &[PartAxis],
        src_base: &[u64],
        part: &SubBox,
        into: &mut Into,
        scratch: &mut [u8],
    ) -> Result<()> {
        self.check_running()?;
        let item = stored.dtype.size();
        match &stored.pieces {
            Pieces::Coded(coded) => {
                self.read_coded(stored, coded, axes, src_base, part, stored.dtype, into, scratch)
            }
            Pieces::View { blob, offset, strides } => {
                let steps: Vec<u64> = axes.iter().map(|a| a.step * strides[a.dim as usize]).collect();
                let base = src_base.iter().zip(strides).map(|(i, s)| i * s).sum();
                let spread = Spread::new(base, steps);
                self.copy(*blob, *offset, item, &spread, part, into, scratch)
            }
            Pieces::Ranges(pieces) => {
                let strides = c_strides(&stored.shape);
                let steps: Vec<u64> = axes.iter().map(|a| a.step * strides[a.dim as usize]).collect();
                let base = src_base.iter().zip(&strides).map(|(i, s)| i * s).sum();
                let spread = Spread::new(base, steps.clone());
                if part.len.contains(&0) {
                    return Ok(());
                }
                let (first, end) = (spread.first(part), spread.end(part));
                let from = pieces.partition_point(|p| p.start + p.len <= first);
                for piece in pieces[from..].iter().take_while(|p| p.start < end) {
                    let mut found = Vec::new();
                    spread
                        .cut(part, piece.start, piece.start + piece.len, &mut |sub| found.push(sub.clone()));
                    for sub in found {
                        // Positions count from the piece's first element.
                        let inside = Spread::new(0, steps.clone());
                        let shift = spread.first(&sub) - piece.start;
                        let local = SubBox { start: vec![0; sub.len.len()], len: sub.len.clone() };
                        let offset = piece.offset + shift * item as u64;
                        let mut rest = into.shifted(part, &sub);
                        self.copy(piece.blob, offset, item, &inside, &local, &mut rest, scratch)?;
                    }
                }
                Ok(())
            }
            Pieces::Boxes(pieces) => {
                let rank = stored.shape.len();
                let dims: Vec<Spread> = (0..rank)
                    .map(|d| {
                        let steps =
                            axes.iter().map(|a| if a.dim as usize == d { a.step } else { 0 }).collect();
                        Spread::new(src_base[d], steps)
                    })
                    .collect();
                if part.len.contains(&0) {
                    return Ok(());
                }
                for piece in pieces {
                    let outside = (0..rank).any(|d| {
                        dims[d].first(part) >= piece.lo[d] + piece.len[d] || dims[d].end(part) <= piece.lo[d]
                    });
                    if outside || piece.len.contains(&0) {
                        continue;
                    }
                    let mut found = vec![part.clone()];
                    for (d, dim) in dims.iter().enumerate() {
                        let mut next = Vec::new();
                        for sub in &found {
                            let (lo, hi) = (piece.lo[d], piece.lo[d] + piece.len[d]);
                            dim.cut(sub, lo, hi, &mut |s| next.push(s.clone()));
                        }
                        found = next;
                    }
                    let strides =
                        if piece.strides.is_empty() { c_strides(&piece.len) } else { piece.strides.clone() };
                    let steps: Vec<u64> = axes.iter().map(|a| a.step * strides[a.dim as usize]).collect();
                    for sub in found {
                        let shift: u64 =
                            (0..rank).map(|d| (dims[d].first(&sub) - piece.lo[d]) * strides[d]).sum();
                        let inside = Spread::new(0, steps.clone());
                        let local = SubBox { start: vec![0; sub.len.len()], len: sub.len.clone() };
                        let offset = piece.offset + shift * item as u64;
                        let mut rest = into.shifted(part, &sub);
                        self.copy(piece.blob, offset, item, &inside, &local, &mut rest, scratch)?;
                    }
                }
                Ok(())
            }
        }
    }

    /// Copies a box that lies in one blob.
    #[allow(clippy::too_many_arguments)]
    fn copy(
        &self,
        blob: u32,
        offset: u64,
        item: usize,
        spread: &Spread,
        part: &SubBox,
        into: &mut Into,
        scratch: &mut [u8],
    ) -> Result<()> {
        let item64 = item as u64;
        let mut axes: Vec<Axis> = part
            .len
            .iter()
            .zip(spread.strides())
            .zip(into.strides)
            .filter(|((n, _), _)| **n != 1)
            .map(|((&n, &src), &dst)| Axis { n, src, dst })
            .collect();
        if axes.iter().any(|a| a.n == 0) {
            return Ok(());
        }
        coalesce(&mut axes);
        let first = offset + spread.first(part) * item64;
        let about = &self.plan.blobs[blob as usize];
        let (file, data) = if about.encoded {
            match self.blocks.get(self.plan, blob, &self.files[about.file as usize])? {
                Block::Held(bytes) => {
                    scatter(&bytes.bytes()[first as usize..], 0, into.bytes, into.base, &axes, item);
                    return Ok(());
                }
                Block::Aside(file, place) => (Located::Source(file), place),
            }
        } else {
            self.locate(blob)?
        };
        self.copy_axes(Place { file: &file, data, blob, item }, first, &axes, into.base, into.bytes, scratch)
    }

    fn copy_axes(
        &self,
        place: Place,
        first: u64,
        axes: &[Axis],
        dst: u64,
        bytes: &mut [u8],
        scratch: &mut [u8],
    ) -> Result<()> {
        let item = place.item as u64;
        let run = match axes.last() {
            None => 1,
            Some(a) if a.src == 1 && a.dst == 1 => a.n,
            Some(_) => 0,
        };
        let outer = &axes[..axes.len() - usize::from(run > 0 && !axes.is_empty())];
        if run > 0 && (outer.is_empty() || run * item >= LONG_RUN) {
            return self.read_runs(&place, first, outer, run, dst, bytes);
        }
        let volume: u64 = axes.iter().map(|a| a.n).product();
        let span: u64 = axes.iter().map(|a| (a.n - 1) * a.src).sum::<u64>() + 1;
        if span <= 2 * volume && span * item <= scratch.len() as u64 {
            let buffer = &mut scratch[..(span * item) as usize];
            place.file.read_at(place.data + first, buffer)?;
            if span == volume {
                self.checksums.add(place.blob, first, buffer, Note::Spare);
            }
            scatter(buffer, 0, bytes, dst, axes, place.item);
            return Ok(());
        }
        if span > 2 * volume {
            // Sparse: a map gathers without reading what lies between.
            let (lo, hi) = (place.data + first, place.data + first + span * item);
            let gather = |window: &[u8]| scatter(window, 0, bytes, dst, axes, place.item);
            if place.file.mapped(lo, hi, gather)? {
                return Ok(());
            }
        }
        // Too much at a time: halve the axis that reaches furthest in the source.
        let widest = (0..axes.len()).filter(|&k| axes[k].n > 1).max_by_key(|&k| axes[k].src * axes[k].n);
        let k = widest.expect("one element is no span");
        let half = axes[k].n / 2;
        let mut part = axes.to_vec();
        for (skip, n) in [(0, half), (half, axes[k].n - half)] {
            part[k].n = n;
            let first = first + skip * axes[k].src * item;
            let dst = dst + skip * axes[k].dst;
            let trimmed: Vec<Axis> = part.iter().copied().filter(|a| a.n != 1).collect();
            self.copy_axes(place, first, &trimmed, dst, bytes, scratch)?;
        }
        Ok(())
    }

    /// Reads runs of `run` elements, one per position on `outer`, straight to where they belong.
    fn read_runs(
        &self,
        place: &Place,
        first: u64,
        outer: &[Axis],
        run: u64,
        dst: u64,
        bytes: &mut [u8],
    ) -> Result<()> {
        let item = place.item as u64;
        if let Some((axis, inner)) = outer.split_first() {
            for i in 0..axis.n {
                self.read_runs(place, first + i * axis.src * item, inner, run, dst + i * axis.dst, bytes)?;
            }
            return Ok(());
        }
        let (start, len) = ((dst * item) as usize, (run * item) as usize);
        let target = &mut bytes[start..start + len];
        place.file.read_at(place.data + first, target)?;
        self.checksums.add(place.blob, first, target, Note::Spare);
        Ok(())
    }
}

impl Into<'_> {
    /// The same destination for a sub-box of `part`.
    pub(super) fn shifted(&mut self, part: &SubBox, sub: &SubBox) -> Into<'_> {
        let shift: u64 =
            sub.start.iter().zip(&part.start).zip(self.strides).map(|((s, p), d)| (s - p) * d).sum();
        Into { bytes: self.bytes, base: self.base + shift, strides: self.strides }
    }
}

#[derive(Clone, Copy)]
struct Place<'a> {
    file: &'a SourceFile,
    data: u64,
    blob: u32,
    item: usize,
}

#[derive(Clone, Copy)]
struct Axis {
    n: u64,
    src: u64,
    dst: u64,
}

/// Orders axes by destination and merges those that are one run on both sides.
fn coalesce(axes: &mut Vec<Axis>) {
    axes.sort_by_key(|a| (std::cmp::Reverse(a.dst), std::cmp::Reverse(a.src)));
    let mut out: Vec<Axis> = Vec::with_capacity(axes.len());
    for axis in axes.drain(..) {
        match out.last_mut() {
            Some(last) if last.src == axis.src * axis.n && last.dst == axis.dst * axis.n => {
                *last = Axis { n: last.n * axis.n, src: axis.src, dst: axis.dst };
            }
            _ => out.push(axis),
        }
    }
    *axes = out;
}

fn scatter(src: &[u8], src_base: u64, dst: &mut [u8], dst_base: u64, axes: &[Axis], item: usize) {
    let extents: Vec<u64> = axes.iter().map(|a| a.n).collect();
    let src_strides: Vec<u64> = axes.iter().map(|a| a.src).collect();
    let dst_strides: Vec<u64> = axes.iter().map(|a| a.dst).collect();
    let shape = StridedBox { extents: &extents, src_strides: &src_strides, dst_strides: &dst_strides };
    kernel::copy(src, src_base, dst, dst_base, &shape, item);
}
