//! Reads a box of a stored tensor into memory, as `reads` decides, and takes checksums on the way.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::boxes::SubBox;
use crate::error::Result;
use crate::format::inflate::inflate;
use crate::format::Blob;
use crate::kernel::{self, StridedBox};
use crate::plan::{PartAxis, Plan, PlanBlob, StoredTensor};
use crate::steps::Step;
use crate::storage::SourceFile;

use super::blocks::{Block, Blocks};
use super::checksums::{Checksums, Note};
use super::factors::Changes;
use super::learnt::Segment;
use super::pool::Pool;
use super::reads::{self, Axis, BlobBox, Read, Way};
use super::Control;

/// The source files of a plan, with the state that reading them accumulates.
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

/// The file with a blob's data.
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

/// The destination of a box's elements: a buffer, the first element's index and the steps per axis.
pub struct Into<'a> {
    /// Buffer.
    pub bytes: &'a mut [u8],
    /// Index of the box's first element in the buffer, in elements.
    pub base: u64,
    /// Step per axis, in elements.
    pub strides: &'a [u64],
}

impl<'p> Sources<'p> {
    /// Sources of a plan. `files` are in the order of [`Plan::sources`]; Compressed data is unpacked to
    /// unnamed files in `scratch_dir`. Up to `block_capacity` bytes of decoded blocks are kept.
    pub fn new(
        plan: &'p Plan,
        files: &'p [Arc<SourceFile>],
        scratch_dir: PathBuf,
        checksums: Checksums,
        block_capacity: u64,
        control: Option<&'p Control>,
    ) -> Self {
        let n = plan.blobs.len();
        Sources {
            plan,
            files,
            blocks: Blocks::new(plan, scratch_dir.clone(), block_capacity),
            scratch_dir,
            unpacked: (0..n).map(|_| Mutex::default()).collect(),
            checksums,
            coded: Pool::default(),
            changes: Changes::default(),
            control,
            compared: AtomicU64::new(0),
        }
    }

    /// Reports that data is about to be read once more for a comparison.
    ///
    /// # Errors
    /// `FS510` once the run must stop.
    pub fn begin_comparison(&self) -> Result<()> {
        self.check_running()?;
        let number = self.compared.fetch_add(1, Ordering::Relaxed);
        if let Some(control) = self.control {
            control.reach(Step::Compare(number));
        }
        Ok(())
    }

    /// Returns an error once the run must stop. All reading functions call it; loops that read nothing call
    /// it themselves.
    ///
    /// # Errors
    /// `FS510` then.
    pub fn check_running(&self) -> Result<()> {
        self.control.map_or(Ok(()), Control::check_running)
    }

    /// The file and offset of a blob's data, which is first unpacked if it is compressed.
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

    /// Reads bytes of a blob's data from `at`, unchanged.
    pub fn read_blob(&self, blob: u32, at: u64, bytes: &mut [u8]) -> Result<()> {
        self.check_running()?;
        let (file, base) = self.locate(blob)?;
        file.read_at(base + at, bytes)
    }

    /// True if a blob is in a file of another host, which lends its bytes.
    pub fn is_lent(&self, blob: u32) -> bool {
        self.files[self.plan.blobs[blob as usize].file as usize].is_lent()
    }

    /// Decodes a block once more for `look`, at the end of a run, when no worker needs memory.
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

    /// Releases the unpacked data of a blob: its last reader is done.
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
            zstd: blob.zstd.clone(),
            encoded: false,
            member: blob.member.clone(),
        };
        SourceFile::unpacked(&self.scratch_dir, file.path(), |write| {
            inflate(file, &blob, &mut |bytes| {
                self.check_running()?;
                write(bytes)
            })
        })
    }

    /// The CRC32 of a range of a blob, if it is known from reading.
    pub fn crc(&self, blob: u32, lo: u64, hi: u64) -> Option<u32> {
        self.checksums.crc(blob, lo, hi)
    }

    /// The checksums of a blob that are known from reading.
    pub fn segments(&self, blob: u32) -> Vec<Segment> {
        self.checksums.segments(blob)
    }

    /// Takes over the checksums of another process.
    pub fn know(&self, blob: u32, segments: &[Segment]) {
        self.checksums.know(blob, segments);
    }

    /// Whether checksums are kept for a blob.
    pub fn is_tracked(&self, blob: u32) -> bool {
        self.checksums.is_tracked(blob)
    }

    /// Reads the parts of a tracked blob that no view has read, so that its checksum is complete.
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

    /// Reads the box `part` of `axes` of a stored tensor into `into`. `scratch` limits a single read if runs
    /// are short.
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
        if let Some(coded) = stored.coded() {
            return self.read_coded(stored, coded, axes, src_base, part, stored.dtype, into, scratch);
        }
        let Into { bytes, base, strides } = into;
        reads::for_each_blob_box(stored, axes, src_base, part, *base, strides, &mut |found| {
            self.read_blob_box(found, bytes, scratch)
        })
    }

    /// Reads a box of all axes of a stored tensor, in C order.
    pub fn read_box(
        &self,
        tensor: &StoredTensor,
        sub: &SubBox,
        bytes: &mut [u8],
        scratch: &mut [u8],
    ) -> Result<()> {
        let (axes, base, strides) = reads::dense_box(tensor, sub);
        let mut into = Into { bytes, base: 0, strides: &strides };
        self.read(tensor, &axes, &base, sub, &mut into, scratch)
    }

    /// Reads a box in one blob.
    fn read_blob_box(&self, found: &BlobBox, bytes: &mut [u8], scratch: &mut [u8]) -> Result<()> {
        let (blob, item) = (found.blob, found.item);
        let about = &self.plan.blobs[blob as usize];
        let (file, data) = if about.encoded {
            match self.blocks.get(self.plan, blob, &self.files[about.file as usize])? {
                Block::InMemory(block) => {
                    scatter(&block.bytes()[found.offset as usize..], bytes, found.dst, &found.axes, item);
                    return Ok(());
                }
                Block::Aside(file, place) => (Located::Source(file), place),
            }
        } else {
            self.locate(blob)?
        };
        found.for_each_read(scratch.len() as u64, &mut |Read { offset, len, dst, way }| {
            let at = data + offset;
            match way {
                Way::Run => {
                    let target = &mut bytes[dst as usize * item..][..len as usize];
                    file.read_at(at, target)?;
                    self.checksums.add(blob, offset, target, Note::Spare);
                }
                Way::Span { axes, is_dense } => {
                    let buffer = &mut scratch[..len as usize];
                    file.read_at(at, buffer)?;
                    if is_dense {
                        self.checksums.add(blob, offset, buffer, Note::Spare);
                    }
                    scatter(buffer, bytes, dst, axes, item);
                }
                Way::Sparse { axes } => {
                    return file.mapped(at, at + len, |window| scatter(window, bytes, dst, axes, item))
                }
            }
            Ok(true)
        })
    }
}

fn scatter(src: &[u8], dst: &mut [u8], dst_base: u64, axes: &[Axis], item: usize) {
    let extents: Vec<u64> = axes.iter().map(|a| a.n).collect();
    let src_strides: Vec<u64> = axes.iter().map(|a| a.src).collect();
    let dst_strides: Vec<u64> = axes.iter().map(|a| a.dst).collect();
    let shape = StridedBox { extents: &extents, src_strides: &src_strides, dst_strides: &dst_strides };
    kernel::copy(src, 0, dst, dst_base, &shape, item);
}
