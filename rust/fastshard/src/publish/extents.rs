//! Where the blocks of a file end and others begin.

use std::fs::File;
use std::os::fd::AsRawFd;

/// Extents asked for at a time.
const COUNT: usize = 256;
/// Extents beyond which a file is taken for one whose blocks are not known: each takes memory.
const MOST: usize = 64 << 10;
/// The request, and flags of its answer. source: linux/fs.h, linux/fiemap.h
const FS_IOC_FIEMAP: u64 = 0xC020_660B;
const FIEMAP_EXTENT_LAST: u32 = 1;

/// `struct fiemap_extent`: one run of blocks.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap` with room for extents.
#[repr(C)]
struct Request {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [Extent; COUNT],
}

/// Finds where an extent of a file begins, in bytes from the start of the file, ascending: nothing on file systems that do
/// not say, and of files in very many pieces.
pub(super) fn find_extents(file: &File) -> Vec<u64> {
    let mut starts = Vec::new();
    let mut start = 0;
    while let Some(extents) = read_extents(file, start) {
        let Some(last) = extents.last() else { return starts };
        starts.extend(extents.iter().map(|extent| extent.logical));
        let end = last.logical.saturating_add(last.length);
        if last.flags & FIEMAP_EXTENT_LAST != 0 || end <= start {
            return starts;
        }
        if starts.len() > MOST {
            return Vec::new();
        }
        start = end;
    }
    Vec::new()
}

/// The first extents of a file from byte `start` on; none where the file system does not say.
fn read_extents(file: &File, start: u64) -> Option<Vec<Extent>> {
    let mut request = Request {
        start,
        length: u64::MAX - start,
        flags: 0,
        mapped: 0,
        count: COUNT as u32,
        reserved: 0,
        extents: [Extent::default(); COUNT],
    };
    // SAFETY: the kernel writes `count` extents at most into the request, which has room for as many.
    #[allow(unsafe_code)]
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP as _, &mut request) };
    let count = (request.mapped as usize).min(COUNT);
    (answer == 0).then(|| request.extents[..count].to_vec())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn extents_of_a_file_begin_where_something_is() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 << 20).unwrap();
        for megabyte in [3, 9, 20] {
            file.write_all_at(&[1; 8192], megabyte << 20).unwrap();
        }
        file.sync_all().unwrap();
        let starts = find_extents(&file);
        // Nothing on a file system that does not say.
        if !starts.is_empty() {
            assert_eq!(starts, [3 << 20, 9 << 20, 20 << 20]);
        }
    }

    #[test]
    fn more_extents_than_one_answer_holds() {
        let file = tempfile::tempfile().unwrap();
        let count = 3 * COUNT as u64 + 5;
        (0..count).for_each(|i| file.write_all_at(&[1; 4096], i * (64 << 10)).unwrap());
        file.sync_all().unwrap();
        let starts = find_extents(&file);
        if !starts.is_empty() {
            assert_eq!(starts, (0..count).map(|i| i * (64 << 10)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_file_without_blocks_has_none() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        assert!(find_extents(&file).is_empty());
    }
}
