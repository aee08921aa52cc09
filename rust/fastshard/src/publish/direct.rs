//! Writing around the page cache where the file system can: no copy into it, no page to find, and threads that write to one
//! file do not wait for one another.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use serde::Deserialize;

use super::disk;
use super::extents::find_extents;

/// Bytes that offsets, lengths and addresses of direct writes are multiples of: a page, and the block of any disk.
pub const ALIGNMENT: u64 = 4096;
/// Shorter writes go through the page cache, where the system joins them.
pub(crate) const LEAST: u64 = 256 << 10;
/// Useful number of concurrent direct writes, besides those of the threads that compute.
pub(crate) const DEPTH: u64 = 8;

/// Magic numbers of `statfs` for file systems whose direct writes of reserved blocks neither lock the file nor pass the page
/// cache: ext4 and XFS.
const CAPABLE: [u32; 2] = [0xEF53, 0x5846_5342];

/// How data files are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Io {
    /// Around the page cache if the result is synced to disk anyway and the file system benefits from it.
    #[default]
    Auto,
    /// Through the page cache.
    Buffered,
    /// Around the page cache, or not at all.
    Direct,
}

impl Io {
    /// True if files of the file system of `at` are written around the page cache; `durable` if they are
    /// synced to disk.
    pub(crate) fn is_direct(self, at: impl AsFd, durable: bool) -> bool {
        let is_capable = || rustix::fs::fstatfs(at).is_ok_and(|s| CAPABLE.contains(&(s.f_type as u32)));
        match self {
            Io::Auto => durable && is_capable(),
            Io::Buffered => false,
            Io::Direct => true,
        }
    }
}

/// A data file, opened once more, to be written around the page cache.
#[derive(Debug)]
pub(super) struct Direct {
    file: File,
    /// Whether the file system has refused such a write.
    is_refused: AtomicBool,
    /// Where its extents begin: a write into two of them takes ext4 the lock of the file, for which all other writes have to
    /// end.
    extents: Vec<u64>,
}

impl Direct {
    /// A file whose blocks are reserved.
    pub(super) fn new(file: File) -> Self {
        let extents = find_extents(&file);
        Direct { file, is_refused: AtomicBool::new(false), extents }
    }

    /// Writes whole pages to `offset`, each extent's apart.
    fn write_pages(&self, path: &Path, offset: u64, pages: &[u8]) -> io::Result<()> {
        let (mut at, end) = (offset, offset + pages.len() as u64);
        let first = self.extents.partition_point(|start| *start <= offset);
        let inside = self.extents[first..].iter().copied().take_while(|start| *start < end);
        for stop in inside.filter(|start| start.is_multiple_of(ALIGNMENT)).chain([end]) {
            disk::write_at(&self.file, path, at, &pages[(at - offset) as usize..(stop - offset) as usize])?;
            at = stop;
        }
        Ok(())
    }

    /// Writes all of `bytes` to where `buffered`, the same file, has `offset`: whole pages around the page cache, what is
    /// left of a page at either end through it.
    pub(super) fn write_at(&self, buffered: &File, path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let Some((head, len)) =
            find_pages(offset, bytes).filter(|_| !self.is_refused.load(Ordering::Relaxed))
        else {
            return disk::write_at(buffered, path, offset, bytes);
        };
        let (first, rest) = bytes.split_at(head);
        let (pages, last) = rest.split_at(len);
        let at = offset + head as u64;
        match self.write_pages(path, at, pages) {
            // Some file systems open a file so, and refuse to write so; what a full disk cuts short is no whole block either.
            Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                self.is_refused.store(true, Ordering::Relaxed);
                return disk::write_at(buffered, path, offset, bytes);
            }
            written => written?,
        }
        if !first.is_empty() {
            disk::write_at(buffered, path, offset, first)?;
        }
        if !last.is_empty() {
            disk::write_at(buffered, path, at + len as u64, last)?;
        }
        Ok(())
    }
}

/// The whole pages of a file in `bytes`, which go to `offset`: where they begin in `bytes`, and how many bytes they are. None
/// where they are few, or where they do not begin at a page of memory.
fn find_pages(offset: u64, bytes: &[u8]) -> Option<(usize, usize)> {
    let head = (offset.next_multiple_of(ALIGNMENT) - offset) as usize;
    let len = bytes.len().checked_sub(head)? as u64 / ALIGNMENT * ALIGNMENT;
    let is_placed = (bytes.as_ptr() as usize + head).is_multiple_of(ALIGNMENT as usize);
    (len >= LEAST && is_placed).then_some((head, len as usize))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::super::disk::Dir;
    use super::super::fault;
    use super::super::file::{OutFile, Space};
    use super::*;
    use crate::memory::PageBuffer;

    #[test]
    fn pages_are_found_wherever_a_write_begins() {
        let mut buffer = PageBuffer::default();
        for offset in [0, 1, 4095, 4096, 4097, 123_456_789] {
            for len in [LEAST - 1, LEAST, LEAST + 1, LEAST + 8191] {
                buffer.place(len as usize, offset).unwrap();
                let bytes = &buffer[..len as usize];
                assert_eq!(find_pages(offset + 1, bytes), None, "not at a page of memory");
                let Some((head, pages)) = find_pages(offset, bytes) else {
                    assert!(len < LEAST + 2 * ALIGNMENT - 2, "{offset} {len}");
                    continue;
                };
                assert!((offset + head as u64).is_multiple_of(ALIGNMENT) && head < ALIGNMENT as usize);
                let rest = len as usize - head - pages;
                assert!((pages as u64).is_multiple_of(ALIGNMENT) && rest < ALIGNMENT as usize);
            }
        }
    }

    #[test]
    fn a_write_into_several_extents_is_one_for_each() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        let file = File::create_new(&path).unwrap();
        let extents = vec![0, 2 * LEAST, 2 * LEAST + 512, 3 * LEAST, 9 * LEAST];
        let direct = Direct { file, is_refused: AtomicBool::new(false), extents };
        let bytes: Vec<u8> = (0..4 * LEAST).map(|i| (i / 251) as u8).collect();
        fault::disarm();
        direct.write_pages(&path, LEAST, &bytes).unwrap();
        let writes = fault::disarm().iter().filter(|(call, _)| *call == "write").count();
        assert_eq!(writes, 3, "no page is cut");
        assert_eq!(std::fs::read(&path).unwrap()[LEAST as usize..], bytes);
    }

    /// Writes numbers in pieces of which some begin in the midst of a page; what lies in the file then, and the number of
    /// writes.
    fn write_pieces(io: Io, refuses_at: Option<usize>) -> (Vec<u8>, usize) {
        let folder = tempfile::tempdir().unwrap();
        let dir = Dir::open(folder.path()).unwrap();
        let bytes: Vec<u8> = (0..3 * LEAST + 5001).map(|i| (i * 7 + i / 251) as u8).collect();
        let size = bytes.len() as u64;
        let file = OutFile::open(&dir, OsStr::new("data"), size, Space::Reserved, true, io).unwrap();
        fault::disarm();
        if let Some(call) = refuses_at {
            fault::arm(call, fault::Fault::Once(libc::EINVAL));
        }
        let mut buffer = PageBuffer::default();
        let (mut at, mut lengths) = (0, [10, LEAST + 4096, 4090, LEAST + 9000].into_iter().cycle());
        while at < size {
            let len = lengths.next().unwrap().min(size - at) as usize;
            buffer.place(len, at).unwrap();
            buffer[..len].copy_from_slice(&bytes[at as usize..][..len]);
            file.write_all_at(at, &buffer[..len]).unwrap();
            at += len as u64;
        }
        let writes = fault::disarm().iter().filter(|(call, _)| *call == "write").count();
        let mut written = vec![0; bytes.len()];
        file.read_at(0, &mut written).unwrap();
        assert_eq!(written, bytes);
        assert_eq!(std::fs::read(folder.path().join("data")).unwrap(), bytes);
        (written, writes)
    }

    #[test]
    fn the_file_is_the_same_whichever_way_it_is_written() {
        let (buffered, writes) = write_pieces(Io::Buffered, None);
        let (auto, _) = write_pieces(Io::Auto, None);
        assert_eq!(auto, buffered);
        let folder = tempfile::tempdir().unwrap();
        let is_capable = Io::Auto.is_direct(Dir::open(folder.path()).unwrap(), true);
        if is_capable {
            let (direct, more) = write_pieces(Io::Direct, None);
            assert_eq!(direct, buffered);
            assert!(more > writes, "ends of pages are written apart");
            // The second write is the first that goes around the cache: none does from then on.
            let (refused, count) = write_pieces(Io::Direct, Some(1));
            assert_eq!((refused, count), (buffered, writes + 1));
        }
    }

    #[test]
    fn what_cannot_be_written_so_is_buffered_or_refused_as_was_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let dir = Dir::open(folder.path()).unwrap();
        let open = |io| {
            OutFile::open(&dir, OsStr::new("data"), LEAST, Space::Reserved, true, io)
                .map(|file| file.is_direct())
        };
        open(Io::Buffered).unwrap();
        // What follows the last call that opens it so.
        let last = |io| {
            fault::disarm();
            open(io).unwrap();
            fault::disarm().iter().rposition(|(call, _)| *call == "open").unwrap()
        };
        let at = last(Io::Direct);
        fault::arm(at, fault::Fault::Once(libc::EINVAL));
        let error = open(Io::Direct).unwrap_err();
        assert_eq!(error.findings()[0].code, crate::codes::USAGE);
        if Io::Auto.is_direct(&dir, true) {
            fault::arm(at, fault::Fault::Once(libc::EINVAL));
            assert!(!open(Io::Auto).unwrap());
        }
        fault::disarm();
    }

    #[test]
    fn only_what_is_brought_to_disk_goes_around_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let dir = Dir::open(folder.path()).unwrap();
        assert!(!Io::Auto.is_direct(&dir, false));
        assert!(!Io::Buffered.is_direct(&dir, true));
        assert!(Io::Direct.is_direct(&dir, false));
        // Nothing goes around a file system that is a cache itself.
        if let Ok(memory) = tempfile::tempdir_in("/dev/shm") {
            let dir = Dir::open(memory.path()).unwrap();
            assert!(disk::is_in_memory(&dir) && !Io::Auto.is_direct(&dir, true));
        }
    }

    #[test]
    fn holes_are_left_by_way_of_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let dir = Dir::open(folder.path()).unwrap();
        let open = |space| OutFile::open(&dir, OsStr::new("data"), LEAST, space, true, Io::Auto).unwrap();
        assert!(!open(Space::Sparse).is_direct());
        assert_eq!(open(Space::Reserved).is_direct(), Io::Auto.is_direct(&dir, true));
    }
}
