//! Records that went through Zstandard when they were written: each a torch zip in a stream of its own.
//!
//! Of a stream its beginning and its end are looked at, where what describes the tensor lies; between them are the
//! data, which are decoded where they are needed.

use std::io::Read;

use crate::buffered::Buffered;
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::format::inflate::undecodable;
use crate::format::region::Region;
use crate::format::zstd::{self, Decoder, Zstd};
use crate::format::{torch_zip, ParsedFile};
use crate::memory;
use crate::storage::SourceFile;

/// Bytes that are kept of each end of what a stream holds.
const KEPT: u64 = 4 << 20;
/// Bytes of which all is kept, where what describes the tensors lies among the data.
const MAX_WHOLE: u64 = 1 << 32;
/// Bytes decoded at a time.
const CHUNK: usize = 256 << 10;

/// True if a stream begins at `offset`.
pub(super) fn begins(file: &SourceFile, offset: u64) -> Result<bool> {
    let mut first = [0; 4];
    if file.size().saturating_sub(offset) < first.len() as u64 {
        return Ok(false);
    }
    file.read_at(offset, &mut first)?;
    Ok(zstd::begins(first))
}

/// The torch zip in the stream at bytes `offset..offset + len` of a file. Its blobs are that range of the file.
///
/// # Errors
/// `FS312` for a file that ends before the stream does, `FS301` for a stream that is damaged; as for any torch zip.
pub(super) fn parse(file: &SourceFile, offset: u64, len: u64) -> Result<ParsedFile> {
    let end = offset.saturating_add(len);
    if end > file.size() {
        return Err(Finding::new(codes::TRUNCATED, "the file is truncated")
            .file(file.path())
            .expected(format!("at least {end} bytes"), format!("{} bytes", file.size()))
            .help("copy the file again from the node that wrote it")
            .into());
    }
    file.room_for(KEPT)?;
    let mut stream = Stream { file, offset, len, decoded: 0, window: 0 };
    let ends = SourceFile::in_memory(file.path(), |write| {
        stream.decode(|at, bytes| write(at, bytes, (at > 2 * KEPT).then(|| (KEPT, at - KEPT))))
    })?;
    let mut parsed = match torch_zip::parse_range(&ends, 0, stream.decoded) {
        Err(error) if stream.decoded > 2 * KEPT && !error.is_interrupt() => {
            // A tensor of several storages has headers in its midst.
            if stream.decoded > MAX_WHOLE {
                return Err(error);
            }
            let whole = SourceFile::unpacked(&std::env::temp_dir(), file.path(), |write| {
                stream.decode(|_, bytes| write(bytes))
            })?;
            torch_zip::parse_range(&whole, 0, stream.decoded)?
        }
        parsed => parsed?,
    };
    for blob in &mut parsed.blobs {
        if blob.deflated {
            return Err(Finding::new(
                codes::UNSUPPORTED,
                "a member that is compressed in a compressed record",
            )
            .file(file.path())
            .help("save it again with one of them")
            .into());
        }
        blob.zstd = Some(Box::new(Zstd { start: blob.offset, window: stream.window }));
        (blob.offset, blob.stored_len, blob.deflated) = (offset, len, true);
    }
    Ok(parsed)
}

struct Stream<'a> {
    file: &'a SourceFile,
    offset: u64,
    len: u64,
    /// Bytes decoded.
    decoded: u64,
    window: u64,
}

impl Stream<'_> {
    /// Decodes all of it; `take` is given each part with its place.
    fn decode(&mut self, mut take: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        let stored = Buffered::new(CHUNK, Region::new(self.file, self.offset, self.len))?;
        let mut decoder = Decoder::new(stored);
        let mut buffer = memory::allocate(CHUNK)?;
        self.decoded = 0;
        loop {
            let n = decoder.read(&mut buffer).map_err(|e| self.damaged(e))?;
            if n == 0 {
                break;
            }
            if self.window != decoder.window() {
                self.window = decoder.window();
                self.file.room_for(self.window)?;
            }
            take(self.decoded, &buffer[..n])?;
            self.decoded += n as u64;
        }
        Ok(())
    }

    fn damaged(&self, error: std::io::Error) -> Error {
        error.downcast::<Error>().unwrap_or_else(|error| undecodable(self.file, None, &error).into())
    }
}
