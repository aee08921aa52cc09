//! Data of compressed blobs: deflated members of archives, and what lies in Zstandard streams.

use std::io::Read;

use super::region::Region;
use super::zstd::Decoder;
use super::Blob;
use crate::buffered::Buffered;
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::memory;
use crate::storage::SourceFile;

/// Bytes that [`inflate`] hands on at a time.
const CHUNK: usize = 256 << 10;

/// Streams the data of a compressed blob to `sink`, in pieces of 256 KiB at most.
///
/// Never hands on more than `blob.len` bytes (`FS604` beyond that). The length and the CRC32 are
/// checked at the end (`FS301`), so the pieces count only once this has returned.
pub fn inflate(file: &SourceFile, blob: &Blob, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let stored = Region::new(file, blob.offset, blob.stored_len);
    let mut stored = Buffered::new(CHUNK, stored)?;
    if let Some(zstd) = &blob.zstd {
        return unstream(file, blob, zstd.start, Decoder::new(stored), sink);
    }
    let mut decoder = flate2::bufread::DeflateDecoder::new(&mut stored);
    let mut buffer = memory::allocate(CHUNK)?;
    let mut crc = crc32fast::Hasher::new();
    let mut len = 0u64;
    loop {
        let n = decoder.read(&mut buffer).map_err(|e| unreadable(file, blob, e))?;
        if n == 0 {
            break;
        }
        len += n as u64;
        if len > blob.len {
            return Err(Finding::new(codes::UNSAFE_ZIP, format!("data of {}", name(blob)))
                .file(file.path())
                .expected(format!("{} bytes", blob.len), "more")
                .into());
        }
        crc.update(&buffer[..n]);
        sink(&buffer[..n])?;
    }
    if len != blob.len || decoder.total_in() != blob.stored_len {
        return Err(damaged(file, blob, "data").expected(format!("{} bytes", blob.len), len).into());
    }
    check_crc(file, blob, crc.finalize())
}

/// The data of a blob in a Zstandard stream, which is read to its end: what follows the data is part of it.
fn unstream(
    file: &SourceFile,
    blob: &Blob,
    start: u64,
    mut decoder: impl Read,
    sink: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let end = start.saturating_add(blob.len);
    let mut buffer = memory::allocate(CHUNK)?;
    let mut crc = crc32fast::Hasher::new();
    let mut at = 0u64;
    loop {
        let n = decoder.read(&mut buffer).map_err(|e| unreadable(file, blob, e))?;
        if n == 0 {
            break;
        }
        let (lo, hi) = (start.max(at), end.min(at + n as u64));
        if lo < hi {
            let data = &buffer[(lo - at) as usize..(hi - at) as usize];
            crc.update(data);
            sink(data)?;
        }
        at += n as u64;
    }
    if at < end {
        return Err(damaged(file, blob, "data").expected(format!("{} bytes", blob.len), "fewer").into());
    }
    check_crc(file, blob, crc.finalize())
}

fn unreadable(file: &SourceFile, blob: &Blob, error: std::io::Error) -> Error {
    error.downcast::<Error>().unwrap_or_else(|error| undecodable(file, Some(blob), &error).into())
}

/// The finding for compressed bytes that cannot be decoded.
pub(super) fn undecodable(file: &SourceFile, blob: Option<&Blob>, error: &std::io::Error) -> Finding {
    let why = match error.kind() {
        std::io::ErrorKind::UnexpectedEof => "they end too early".to_string(),
        _ => error.to_string(),
    };
    let what = blob.map_or("a record", name);
    Finding::new(codes::CRC, format!("{what}: the compressed data cannot be read: {why}"))
        .file(file.path())
        .help("copy the file again from the node that wrote it; it was damaged after it was written")
}

/// Compares the CRC32 of a blob's data with the one that the container keeps, if it keeps one.
pub(super) fn check_crc(file: &SourceFile, blob: &Blob, got: u32) -> Result<()> {
    match blob.crc32 {
        Some(want) if want != got => {
            let finding = damaged(file, blob, "CRC32");
            Err(finding.expected(format!("{want:08x}"), format!("{got:08x}")).into())
        }
        _ => Ok(()),
    }
}

fn damaged(file: &SourceFile, blob: &Blob, what: &str) -> Finding {
    Finding::new(codes::CRC, format!("{}: {what}", name(blob)))
        .file(file.path())
        .help("copy the file again from the node that wrote it; it was damaged after it was written")
}

fn name(blob: &Blob) -> &str {
    blob.member.as_deref().unwrap_or("a deflated blob")
}
