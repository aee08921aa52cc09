//! Reading in large pieces.

use std::io::{BufRead, Read, Result};

use crate::memory::{self, NoMemory};

/// Like [`std::io::BufReader`], but returns an error instead of aborting the process if the system has no
/// memory left.
pub(crate) struct Buffered<R> {
    inner: R,
    buffer: Vec<u8>,
    at: usize,
    end: usize,
}

impl<R: Read> Buffered<R> {
    /// Reads from `inner`, `capacity` bytes at a time.
    ///
    /// # Errors
    /// [`NoMemory`] if the system has none left.
    pub(crate) fn new(capacity: usize, inner: R) -> std::result::Result<Self, NoMemory> {
        Ok(Buffered { inner, buffer: memory::allocate(capacity)?, at: 0, end: 0 })
    }
}

impl<R: Read> Read for Buffered<R> {
    fn read(&mut self, bytes: &mut [u8]) -> Result<usize> {
        if self.at == self.end && bytes.len() >= self.buffer.len() {
            return self.inner.read(bytes);
        }
        let n = self.fill_buf()?.read(bytes)?;
        self.consume(n);
        Ok(n)
    }
}

impl<R: Read> BufRead for Buffered<R> {
    fn fill_buf(&mut self) -> Result<&[u8]> {
        if self.at == self.end {
            // Nothing is there as long as the reading fails.
            (self.at, self.end) = (0, 0);
            self.end = self.inner.read(&mut self.buffer)?;
        }
        Ok(&self.buffer[self.at..self.end])
    }

    fn consume(&mut self, n: usize) {
        self.at = (self.at + n).min(self.end);
    }
}
