//! The only code that reads sources: files of this host by descriptors and maps, others by ranges.

mod guard;
pub mod remote;
pub mod requests;
mod temporary;

use std::any::Any;
use std::fmt::Debug;
use std::fs::File;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use memmap2::Mmap;
use rustix::fs::SeekFrom;

use self::remote::{Ranges, Readers};
use crate::codes;
use crate::error::{Error, Finding, Result, Severity};
use crate::memory::{self, HeaderRoom};

/// Identity of a file's content, as far as the filesystem states it without reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Size in bytes.
    pub size: u64,
    /// Modification time in nanoseconds since the epoch.
    pub mtime_ns: i128,
    /// Time of the last change of content or status, likewise. It is only valid during a run: a copy, a link
    /// or other permissions change it.
    pub ctime_ns: i128,
    /// Inode number.
    pub inode: u64,
    /// Number of the device that the inode is on.
    pub device: u64,
}

impl Stamp {
    pub(crate) fn of(meta: &std::fs::Metadata) -> Self {
        let nanoseconds = |seconds, rest| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
        Stamp {
            size: meta.len(),
            mtime_ns: nanoseconds(meta.mtime(), meta.mtime_nsec()),
            ctime_ns: nanoseconds(meta.ctime(), meta.ctime_nsec()),
            inode: meta.ino(),
            device: meta.dev(),
        }
    }

    /// True unless the content is certainly different.
    fn same_content(&self, other: &Stamp) -> bool {
        *self == Stamp { ctime_ns: self.ctime_ns, ..*other }
    }
}

/// The bytes of a decoded block, in the memory of its reader, which nobody writes to any more.
pub trait BlockBytes: Any + Debug + Send + Sync {
    /// The elements in C order, little-endian.
    fn bytes(&self) -> &[u8];
}

impl BlockBytes for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// Decodes blocks of arrays (zarr chunks), which no map or ranged read can provide.
pub trait BlockReader: Debug + Send + Sync {
    /// Block `key`, of `len` bytes. `spare` is an unused buffer of the same length from an earlier call, to
    /// be filled anew, since fresh pages cost more than decoding. Several threads call the function.
    ///
    /// # Errors
    /// The reason why the block cannot be read completely.
    fn read(&self, key: &str, len: usize, spare: Option<Box<dyn BlockBytes>>) -> Result<Box<dyn BlockBytes>>;

    /// The root of the sources that holds block `key`, if some blocks are on other hosts.
    fn root(&self, _key: &str) -> Option<u32> {
        None
    }

    /// True if some blocks are on other hosts.
    fn lie_apart(&self) -> bool {
        false
    }

    /// Errors if a file with the blocks has changed; with `status`, even if only its status has changed.
    ///
    /// # Errors
    /// `FS506`.
    fn unchanged(&self, _status: bool) -> Result<()> {
        Ok(())
    }

    /// Announces that blocks will be read, in this order, so that those on other hosts are requested.
    ///
    /// # Errors
    /// The reason why the announcement fails.
    fn will_read(&self, _keys: &[&str]) -> Result<()> {
        Ok(())
    }
}

/// A source file: opened once, read through one descriptor, never written.
///
/// Short strided reads go through a map on local filesystems; on network filesystems, where a page
/// fault costs a round trip, and for long runs everywhere, ranged reads are used.
#[derive(Debug)]
pub struct SourceFile {
    path: PathBuf,
    bytes: Bytes,
    stamp: Stamp,
    network: bool,
    /// True for a file that this process writes and nobody else can see.
    own: bool,
    map: OnceLock<Mmap>,
    /// True once a page of the map was missing.
    faulted: AtomicBool,
    blocks: Option<Arc<dyn BlockReader>>,
    /// The memory for headers while they are read.
    room: Option<Arc<HeaderRoom>>,
}

/// Where the bytes of a file come from.
#[derive(Debug)]
enum Bytes {
    /// An open file.
    File(File),
    /// Another host.
    Remote(Arc<dyn Ranges>),
}

/// `statfs` magic numbers of filesystems on which a page fault is a network round trip.
const NETWORK_FILESYSTEMS: &[u32] = &[
    0x6969,      // NFS
    0x0BD0_0BD0, // Lustre
    0x6573_5546, // FUSE (gcsfuse, s3 mounts)
    0xFF53_4D42, // CIFS
    0xFE53_4D42, // SMB2
    0x00C3_6400, // Ceph
    0x4750_4653, // GPFS
    0x0102_1997, // 9p
    0x1983_0326, // BeeGFS
    0xAAD7_AAEA, // PanFS
];

/// True for the `statfs` magic number of a filesystem behind a network.
pub(crate) fn is_network_filesystem(magic: u32) -> bool {
    NETWORK_FILESYSTEMS.contains(&magic)
}

impl SourceFile {
    /// Opens `path` for reading, without blocking.
    ///
    /// # Errors
    /// `FS513` for anything except a regular file (a FIFO, socket, device or directory); other errors of
    /// opening.
    pub fn open(path: &Path) -> Result<Self> {
        let cannot_open = |e: std::io::Error| Error::io(path, "cannot open", &e);
        // Looked at first: opening a device may do something. And once more when it is open.
        let meta = std::fs::metadata(path).map_err(cannot_open)?;
        regular(path, &meta)?;
        if let Some(ranges) = remote::find(path)? {
            let mut stamp = Stamp::of(&meta);
            // A filesystem for temporary files may know times less exactly.
            if let Some((size, mtime_ns)) = ranges.identity() {
                (stamp.size, stamp.mtime_ns) = (size, i128::from(mtime_ns));
            }
            return Ok(Self::at(path, stamp, ranges));
        }
        let file = open_at_once(path).map_err(cannot_open)?;
        let meta = file.metadata().map_err(|e| Error::io(path, "cannot stat", &e))?;
        regular(path, &meta)?;
        // An unknown filesystem counts as local: maps work there, only perhaps slowly.
        let network =
            rustix::fs::fstatfs(&file).map(|s| is_network_filesystem(s.f_type as u32)).unwrap_or(false);
        Ok(SourceFile {
            path: path.to_path_buf(),
            bytes: Bytes::File(file),
            stamp: Stamp::of(&meta),
            network,
            own: false,
            map: OnceLock::new(),
            faulted: AtomicBool::new(false),
            blocks: None,
            room: None,
        })
    }

    /// A file on another host, with its known `stamp`.
    pub(crate) fn at(path: &Path, stamp: Stamp, bytes: Arc<dyn Ranges>) -> Self {
        SourceFile {
            path: path.to_path_buf(),
            bytes: Bytes::Remote(bytes),
            stamp,
            network: true,
            // Its owner looks whether it is as it was.
            own: true,
            map: OnceLock::new(),
            faulted: AtomicBool::new(false),
            blocks: None,
            room: None,
        }
    }

    /// True for a file that another host lends, once and in an announced order.
    pub fn is_lent(&self) -> bool {
        matches!(&self.bytes, Bytes::Remote(ranges) if ranges.is_lent())
    }

    /// True for a file of a store.
    pub fn is_stored(&self) -> bool {
        matches!(&self.bytes, Bytes::Remote(ranges) if !ranges.is_lent())
    }

    /// Announces that ranges (first byte, one past the last) will be read, in this order, so that those on
    /// another host are requested.
    ///
    /// # Errors
    /// The reason why the announcement fails.
    pub fn will_read(&self, ranges: &[(u64, u64)]) -> Result<()> {
        match &self.bytes {
            Bytes::File(_) => Ok(()),
            Bytes::Remote(file) => file.will_read(ranges, true),
        }
    }

    /// Maximum bytes that [`Self::schedule`] has under way and here at a time; none for files that are not in a store.
    pub fn schedule_room(&self) -> Option<u64> {
        match &self.bytes {
            Bytes::File(_) => None,
            Bytes::Remote(file) => file.schedule_room(),
        }
    }

    /// Requests what certain reads (first byte, one past the last) take; see [`Ranges::schedule`].
    pub fn schedule(&self, reads: Vec<(u64, u64)>, readers: &dyn Fn() -> Readers) {
        if let Bytes::Remote(file) = &self.bytes {
            file.schedule(reads, readers);
        }
    }

    /// Ends the schedules of its store.
    pub fn end_schedule(&self) {
        if let Bytes::Remote(file) = &self.bytes {
            file.end_schedule();
        }
    }

    /// The same file, with a limit: [`Self::read_vec`] then reads no more than there is room for.
    #[must_use]
    pub fn within(mut self, room: Option<Arc<HeaderRoom>>) -> Self {
        self.room = room;
        self
    }

    /// Asks for room for `bytes` of a header.
    ///
    /// # Errors
    /// `FS512`, naming the file.
    pub(crate) fn room_for(&self, bytes: u64) -> Result<()> {
        let Some(room) = &self.room else { return Ok(()) };
        room.ask(&self.path, bytes)
    }

    /// The same file, as the representative of a store whose blocks `reader` decodes.
    #[must_use]
    pub fn with_blocks(mut self, reader: Arc<dyn BlockReader>) -> Self {
        self.blocks = Some(reader);
        self
    }

    /// An encoded block of `len` bytes of the store that this file represents; see [`BlockReader::read`].
    ///
    /// # Errors
    /// `FS506` if the store returned another number of bytes; errors of the reader.
    pub fn read_block(
        &self,
        key: &str,
        len: usize,
        spare: Option<Box<dyn BlockBytes>>,
    ) -> Result<Box<dyn BlockBytes>> {
        let Some(reader) = &self.blocks else {
            return Err(Finding::new(codes::UNSUPPORTED, "no reader for the blocks of this store")
                .file(&self.path)
                .tensor(key)
                .into());
        };
        let block = reader.read(key, len, spare)?;
        match block.bytes().len() {
            n if n == len => Ok(block),
            n => Err(self.changed(format!("{len} bytes in {key}"), n)),
        }
    }

    /// The reader of its blocks, for a file that represents a store with some blocks on other hosts.
    pub fn blocks_apart(&self) -> Option<&dyn BlockReader> {
        self.blocks.as_deref().filter(|reader| reader.lie_apart())
    }

    /// Path as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size in bytes when opened.
    pub fn size(&self) -> u64 {
        self.stamp.size
    }

    /// Size, modification time and inode when opened.
    pub fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// True if page faults on this file cross a network.
    pub fn is_network(&self) -> bool {
        self.network
    }

    /// A separate descriptor of the open file, for a map that may outlive this object; `None` on a network
    /// filesystem, where reading is better, and if the process may have no more descriptors.
    ///
    /// # Errors
    /// `FS506` if the file changed since it was opened.
    pub fn descriptor(&self) -> Result<Option<File>> {
        if self.network {
            return Ok(None);
        }
        self.unchanged()?;
        Ok(self.file().and_then(|file| file.try_clone().ok()))
    }

    /// Treats the file as one on a network filesystem: for tests of that way of reading.
    #[doc(hidden)]
    #[must_use]
    pub fn as_network(mut self) -> Self {
        self.network = true;
        self
    }

    /// Fills `buffer` from `offset`; a short file is an error that names it.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let file = match &self.bytes {
            Bytes::File(file) => file,
            Bytes::Remote(_) if offset + buffer.len() as u64 > self.stamp.size => {
                return Err(self.changed(format!("at least {} bytes", offset + buffer.len() as u64), "fewer"))
            }
            Bytes::Remote(file) => return file.read(offset, buffer),
        };
        file.read_exact_at(buffer, offset).map_err(|e| {
            if e.kind() == std::io::ErrorKind::UnexpectedEof {
                self.changed(format!("at least {} bytes", offset + buffer.len() as u64), "fewer")
            } else {
                Error::io(&self.path, "cannot read", &e)
            }
        })
    }

    /// Reads `len` bytes from `offset` into a fresh buffer. The caller has bounded `len`.
    pub fn read_vec(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.room_for(len as u64)?;
        let mut buffer = memory::allocate(len)?;
        self.read_at(offset, &mut buffer)?;
        Ok(buffer)
    }

    /// Calls `each` with the holes of a sparse file (first byte, one past the last), in their order, until it
    /// returns false; with none if the filesystem does not state them. On a network filesystem, it only looks
    /// for holes if a file takes less space than its length.
    pub fn each_hole(&self, mut each: impl FnMut(u64, u64) -> bool) {
        let Some(file) = self.file() else { return };
        let is_dense = || file.metadata().is_ok_and(|meta| meta.blocks().saturating_mul(512) >= meta.len());
        if self.network && is_dense() {
            return;
        }
        let mut at = 0;
        while let Ok(hole) = rustix::fs::seek(file, SeekFrom::Hole(at)) {
            if hole >= self.size() {
                return;
            }
            // None behind the last hole.
            at = rustix::fs::seek(file, SeekFrom::Data(hole)).unwrap_or(self.size()).min(self.size());
            if at <= hole || !each(hole, at) {
                return;
            }
        }
    }

    /// The complete file as a read-only map, made on first use; none if the filesystem supports no map.
    fn map(&self) -> Option<&Mmap> {
        if self.map.get().is_none() {
            let file = self.file()?;
            // SAFETY: the map is private to this process and read-only. Rust requires that the bytes do
            // not change underneath; files under conversion are not written by anybody (checked by
            // `unchanged`), and a racing writer could only change plain bytes that carry no invariant.
            #[allow(unsafe_code)]
            let map = unsafe { Mmap::map(file) }.ok()?;
            let _ = self.map.set(map);
        }
        self.map.get()
    }

    /// Runs `work` on bytes `lo..hi` of the file in a map. It releases the pages afterwards, except those of
    /// a temporary file, which further reading would fault in anew. Returns false if there is no map, or if a
    /// page is missing, as in a truncated file: then the data that `work` saw is invalid, and
    /// [`SourceFile::read_at`] returns the bytes or the reason.
    ///
    /// # Errors
    /// `FS506` if the file has changed since it was opened.
    pub fn mapped(&self, lo: u64, hi: u64, work: impl FnOnce(&[u8])) -> Result<bool> {
        if self.network || self.faulted.load(Ordering::Relaxed) {
            return Ok(false);
        }
        self.unchanged()?;
        // A map of a file that was longer or shorter by then would be another.
        let window = self.map().and_then(|map| map.get(lo as usize..hi as usize));
        let Some(window) = window else { return Ok(false) };
        let whole = guard::read(window, &self.faulted, work);
        if !self.own {
            self.forget(lo, hi - lo);
        }
        Ok(whole)
    }

    /// Releases the resident pages of a range of the map; the page cache keeps them.
    fn forget(&self, offset: u64, len: u64) {
        let Some(map) = self.map.get() else { return };
        let page = 4096;
        let start = offset.next_multiple_of(page);
        let end = (offset + len).min(map.len() as u64) / page * page;
        if start < end {
            // SAFETY: MADV_DONTNEED on a read-only file mapping only drops clean pages; the next
            // access faults the same bytes in again, so no reference into the map is invalidated.
            #[allow(unsafe_code)]
            let _ = unsafe {
                map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    start as usize,
                    (end - start) as usize,
                )
            };
        }
    }

    fn file(&self) -> Option<&File> {
        match &self.bytes {
            Bytes::File(file) => Some(file),
            Bytes::Remote(_) => None,
        }
    }

    /// Its current stamp.
    ///
    /// # Errors
    /// The reason why it cannot be examined.
    pub fn now(&self) -> Result<Stamp> {
        let Some(file) = self.file() else { return Ok(self.stamp) };
        let meta = file.metadata().map_err(|e| Error::io(&self.path, "cannot stat", &e))?;
        Ok(Stamp::of(&meta))
    }

    /// Errors if the file's size, modification time, inode or device has changed since it was opened, or if its store states
    /// another content.
    ///
    /// # Errors
    /// `FS506`, and the finding about the content.
    pub fn unchanged(&self) -> Result<()> {
        if let Bytes::Remote(file) = &self.bytes {
            file.is_as_stated()?;
        }
        if self.own {
            return Ok(());
        }
        let now = self.now()?;
        if now.same_content(&self.stamp) {
            return Ok(());
        }
        let (was, is) = if now.size == self.stamp.size {
            ("the modification time of the start".to_string(), "another one".to_string())
        } else {
            (format!("{} bytes", self.stamp.size), format!("{} bytes", now.size))
        };
        Err(self.changed(was, is))
    }

    /// The same for the files with the blocks, for a file that represents a store.
    ///
    /// # Errors
    /// `FS506`.
    pub fn blocks_unchanged(&self) -> Result<()> {
        self.blocks.as_ref().map_or(Ok(()), |blocks| blocks.unchanged(false))
    }

    /// A warning if the file's status alone changed since it was opened: other permissions or another name,
    /// or content that was written before its modification time was set back.
    ///
    /// # Errors
    /// The reason why it cannot be examined.
    pub fn touched(&self) -> Result<Option<Finding>> {
        let now = self.now()?;
        if self.own || now.ctime_ns == self.stamp.ctime_ns || !now.same_content(&self.stamp) {
            return Ok(None);
        }
        let finding = Finding::new(codes::SOURCE_CHANGED, "its status was changed while it was read")
            .severity(Severity::Warning)
            .file(&self.path)
            .expected("the change time of the start", "a newer one")
            .help("run again if something wrote to it and set its time back; changed permissions or links do no harm");
        Ok(Some(finding))
    }

    /// Errors if [`Self::touched`] warns: for files that nobody can read again to check that their content is
    /// the same.
    ///
    /// # Errors
    /// `FS506`.
    pub fn untouched(&self) -> Result<()> {
        self.unchanged()?;
        self.blocks.as_ref().map_or(Ok(()), |blocks| blocks.unchanged(true))?;
        let Some(finding) = self.touched()? else { return Ok(()) };
        let help = "leave the files of all hosts as they are until the run has ended, then run again; changed permissions or links do no harm, and nobody reads the files again to check";
        Err(finding.severity(Severity::Error).help(help).into())
    }

    fn changed(&self, expected: impl std::fmt::Display, got: impl std::fmt::Display) -> Error {
        Finding::new(codes::SOURCE_CHANGED, "changed while it was read")
            .file(&self.path)
            .expected(expected, got)
            .help("wait until the save is complete, then run again")
            .into()
    }
}

/// Refuses anything except a regular file.
fn regular(path: &Path, meta: &std::fs::Metadata) -> Result<()> {
    let kind = meta.file_type();
    let what = match kind {
        _ if kind.is_file() => return Ok(()),
        _ if kind.is_dir() => "a directory",
        _ if kind.is_fifo() => "a FIFO",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(Finding::new(codes::NOT_A_CHECKPOINT, "not a regular file")
        .file(path)
        .expected("a regular file", what)
        .help("name the checkpoint's own files")
        .into())
}

/// Opens a file for reading without blocking, even if it has become a FIFO without a writer meanwhile.
fn open_at_once(path: &Path) -> std::io::Result<File> {
    use rustix::fs::{fcntl_getfl, fcntl_setfl, openat, Mode, OFlags, CWD};
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = match openat(CWD, path, flags | OFlags::NONBLOCK, Mode::empty()) {
        Ok(fd) => File::from(fd),
        // Somebody holds a lease on it and lets go when asked, or it lies on a tape: that is worth a wait.
        Err(rustix::io::Errno::AGAIN) => return Ok(File::from(openat(CWD, path, flags, Mode::empty())?)),
        Err(e) => return Err(e.into()),
    };
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}

/// Errors if only the status of a file changed, if some files are on other hosts: these would lend the same
/// bytes once more, which proves nothing.
pub(crate) fn only_read(files: &[Arc<SourceFile>]) -> Result<()> {
    match files.iter().any(|file| file.is_lent() || file.blocks_apart().is_some()) {
        true => files.iter().try_for_each(|file| file.untouched()),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_given_only_of_a_local_file_that_is_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"content").unwrap();
        let source = SourceFile::open(&path).unwrap();
        assert!(source.descriptor().unwrap().is_some());
        assert!(SourceFile::open(&path).unwrap().as_network().descriptor().unwrap().is_none());
        std::fs::write(&path, b"other content").unwrap();
        let error = source.descriptor().unwrap_err();
        assert_eq!(error.findings()[0].code, codes::SOURCE_CHANGED);
    }

    #[test]
    fn a_fifo_is_refused_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        assert_eq!(SourceFile::open(&path).unwrap_err().findings()[0].code, codes::NOT_A_CHECKPOINT);
    }
}
