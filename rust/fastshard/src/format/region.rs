//! Bytes of a file as a reader.

use std::io::{self, Read, Seek, SeekFrom};

use crate::storage::SourceFile;

/// A range of a file as a reader. Errors of the file travel inside the I/O errors.
pub(super) struct Region<'a> {
    file: &'a SourceFile,
    start: u64,
    len: u64,
    at: u64,
}

impl<'a> Region<'a> {
    /// The caller has checked that `start + len` lies in the file.
    pub(super) fn new(file: &'a SourceFile, start: u64, len: u64) -> Self {
        Region { file, start, len, at: 0 }
    }
}

impl Read for Region<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.len.saturating_sub(self.at).min(buffer.len() as u64) as usize;
        self.file.read_at(self.start + self.at.min(self.len), &mut buffer[..n]).map_err(io::Error::other)?;
        self.at += n as u64;
        Ok(n)
    }
}

impl Seek for Region<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.len.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}
