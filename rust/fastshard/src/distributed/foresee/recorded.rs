//! Files on another host that record reads and announcements, for tests.

use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::error::Result;
use crate::storage::remote::Ranges;
use crate::storage::{SourceFile, Stamp};

/// Reads and announcements of several files in their order: file, first byte, one past the last.
pub(crate) type Reads = Arc<Mutex<Vec<(u32, u64, u64)>>>;

#[derive(Debug)]
struct Recorded {
    file: u32,
    bytes: Vec<u8>,
    reads: Reads,
    announced: Reads,
}

impl Ranges for Recorded {
    fn is_lent(&self) -> bool {
        true
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        bytes.copy_from_slice(&self.bytes[offset as usize..][..bytes.len()]);
        self.reads.lock().unwrap().push((self.file, offset, offset + bytes.len() as u64));
        Ok(())
    }

    fn will_read(&self, ranges: &[(u64, u64)], _: bool) -> Result<()> {
        self.announced.lock().unwrap().extend(ranges.iter().map(|&(lo, hi)| (self.file, lo, hi)));
        Ok(())
    }
}

/// A file that records its reads in `reads`, and announcements in `announced`.
pub(crate) fn recorded(file: u32, bytes: Vec<u8>, reads: &Reads, announced: &Reads) -> SourceFile {
    let (reads, announced) = (Arc::clone(reads), Arc::clone(announced));
    let size = bytes.len() as u64;
    let stamp = Stamp { size, mtime_ns: 0, ctime_ns: 0, inode: 0, device: 0 };
    let path = format!("recorded {file}");
    SourceFile::at(Path::new(&path), stamp, Arc::new(Recorded { file, bytes, reads, announced }))
}
