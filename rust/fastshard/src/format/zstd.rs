//! Zstandard streams (RFC 8878), read frame by frame within bounded memory.
//!
//! torch writes a record through a compressor (`torch/distributed/checkpoint/_extension.py`): one frame, or with pyzstd
//! one more that is empty. Neither keeps a checksum of its content; what lies in it has its own.

use std::io::{self, Cursor, Read};

use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use serde::{Deserialize, Serialize};

/// Where in what a stream holds the data lie, and what it takes to get there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Zstd {
    /// Bytes that the stream holds before the data.
    pub start: u64,
    /// Bytes that a decoder keeps of what it has made, since later ones refer to them.
    pub window: u64,
}

impl Zstd {
    /// Bytes of memory that decoding takes: a window that is kept while the next part is made.
    pub fn memory(&self) -> u64 {
        self.window.saturating_mul(2).saturating_add(TABLES)
    }
}

/// Tables, a block and its literals.
const TABLES: u64 = 2 << 20;
/// Largest window that is accepted: that of zstd's own decoders unless they are told otherwise.
pub const MAX_WINDOW: u64 = 128 << 20;
/// First bytes of a frame.
const FRAME: u32 = 0xfd2f_b528;
/// First bytes of a frame that decoders skip, less their lowest four bits.
const SKIPPABLE: u32 = 0x184d_2a50;
/// Bytes of the longest header of a frame.
const MAX_HEADER: usize = 18;

/// True for the first bytes of a stream.
pub fn begins(bytes: [u8; 4]) -> bool {
    let magic = u32::from_le_bytes(bytes);
    magic == FRAME || magic & !0xf == SKIPPABLE
}

/// What the frames of a stream hold, one after another.
pub struct Decoder<R> {
    source: R,
    frame: FrameDecoder,
    within: bool,
    frames: u64,
    window: u64,
}

impl<R: Read> Decoder<R> {
    /// Decodes all that `source` holds. It is read in small parts.
    pub fn new(source: R) -> Self {
        let mut frame = FrameDecoder::new();
        frame.set_max_window_size(MAX_WINDOW);
        Decoder { source, frame, within: false, frames: 0, window: 0 }
    }

    /// The largest window of the frames so far.
    pub fn window(&self) -> u64 {
        self.window
    }

    /// Goes to the next frame; false at the end of the stream.
    fn next(&mut self) -> io::Result<bool> {
        loop {
            let mut magic = [0; 4];
            match fill(&mut self.source, &mut magic)? {
                0 if self.frames > 0 => return Ok(false),
                4 if begins(magic) => {}
                n if n < 4 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => return Err(io::Error::other("no frame begins where one should")),
            }
            if u32::from_le_bytes(magic) != FRAME {
                let mut len = [0; 4];
                self.source.read_exact(&mut len)?;
                let len = u64::from(u32::from_le_bytes(len));
                if io::copy(&mut self.source.by_ref().take(len), &mut io::sink())? < len {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                continue;
            }
            let mut header = magic.to_vec();
            let window = header_of(&mut self.source, &mut header)?;
            if window > MAX_WINDOW {
                return Err(io::Error::other(format!(
                    "it takes a window of {window} bytes, and at most {MAX_WINDOW} are accepted"
                )));
            }
            self.window = self.window.max(window);
            self.frame.reset(Cursor::new(header)).map_err(io::Error::other)?;
            self.frames += 1;
            self.within = true;
            return Ok(true);
        }
    }
}

impl<R: Read> Read for Decoder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.within && !self.next()? {
                return Ok(0);
            }
            while self.frame.can_collect() == 0 && !self.frame.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.frame.decode_blocks(&mut self.source, one).map_err(to_io_error)?;
            }
            match self.frame.read(buffer)? {
                0 => {
                    let kept = self.frame.get_checksum_from_data();
                    if kept.is_some() && kept != self.frame.get_calculated_checksum() {
                        return Err(io::Error::other("the checksum of its content differs"));
                    }
                    self.within = false;
                }
                n => return Ok(n),
            }
        }
    }
}

/// Makes the decoder's error one of reading; one of the source lies within it, and counts.
fn to_io_error(error: ruzstd::decoding::errors::FrameDecoderError) -> io::Error {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    let mut short = false;
    while let Some(one) = cause {
        short |= one.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::UnexpectedEof);
        cause = one.source();
    }
    match short {
        true => io::ErrorKind::UnexpectedEof.into(),
        false => io::Error::other(error.to_string()),
    }
}

/// Reads the rest of a frame's header, and returns its window. source: RFC 8878, 3.1.1.1
fn header_of(source: &mut impl Read, header: &mut Vec<u8>) -> io::Result<u64> {
    let mut take = |header: &mut Vec<u8>, n: usize| -> io::Result<usize> {
        let at = header.len();
        header.resize(at + n, 0);
        source.read_exact(&mut header[at..])?;
        Ok(at)
    };
    let at = take(header, 1)?;
    let descriptor = header[at];
    let single = descriptor & 0x20 != 0;
    let mut window = 0;
    if !single {
        let at = take(header, 1)?;
        let base = 1u64 << (10 + (header[at] >> 3));
        window = base + base / 8 * u64::from(header[at] & 7);
    }
    take(header, [0, 1, 2, 4][usize::from(descriptor & 3)])?;
    let size = match descriptor >> 6 {
        0 => usize::from(single),
        flag => 1 << flag,
    };
    let at = take(header, size)?;
    if single {
        let mut bytes = [0; 8];
        bytes[..size].copy_from_slice(&header[at..]);
        window = u64::from_le_bytes(bytes) + if size == 2 { 256 } else { 0 };
    }
    debug_assert!(header.len() <= MAX_HEADER);
    Ok(window)
}

/// Reads until the buffer is full or the source ends; the bytes read.
fn fill(source: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut at = 0;
    while at < buffer.len() {
        match source.read(&mut buffer[at..])? {
            0 => break,
            n => at += n,
        }
    }
    Ok(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruzstd::encoding::{compress_to_vec, CompressionLevel};

    fn content() -> Vec<u8> {
        (0..300_000u32).flat_map(|i| (i / 7).wrapping_mul(2_654_435_761).to_le_bytes()).collect()
    }

    fn frame(content: &[u8]) -> Vec<u8> {
        compress_to_vec(content, CompressionLevel::Fastest)
    }

    fn decoded(stream: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        Decoder::new(stream).read_to_end(&mut out).map(|_| out)
    }

    #[test]
    fn frames_follow_one_another_with_what_is_skipped_between_them() {
        let content = content();
        let mut stream = frame(&content);
        stream.extend([0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3]);
        stream.extend(frame(b"more"));
        stream.extend(frame(b""));
        assert_eq!(decoded(&stream).unwrap(), [&content[..], b"more"].concat());
    }

    #[test]
    fn a_stream_that_ends_anywhere_within_is_refused() {
        let stream = frame(&content());
        for len in (0..64).chain((64..stream.len()).step_by(997)).chain(stream.len() - 8..stream.len()) {
            assert!(decoded(&stream[..len]).is_err(), "{len} of {}", stream.len());
        }
        let trailing = [&stream[..], b"PK"].concat();
        assert!(decoded(&trailing).is_err());
    }

    #[test]
    fn a_flipped_bit_is_an_error_and_never_a_panic() {
        let content = content()[..40_000].to_vec();
        let stream = frame(&content);
        for at in (0..40).chain((40..stream.len()).step_by(101)) {
            for bit in 0..8 {
                let mut bad = stream.clone();
                bad[at] ^= 1 << bit;
                // This encoder keeps a checksum, so that what is made of a damaged stream is never taken.
                if let Ok(output) = decoded(&bad) {
                    assert_eq!(output, content, "byte {at}, bit {bit}");
                }
            }
        }
    }

    #[test]
    fn a_window_beyond_what_is_accepted_is_refused_before_it_is_taken() {
        // A frame of no known size whose window is 2^41 bytes, and one whose content is said to be 2^40 bytes.
        let wide = [&FRAME.to_le_bytes()[..], &[0x00, 31 << 3, 1, 0, 0]].concat();
        let long = [&FRAME.to_le_bytes()[..], &[0xe0], &(1u64 << 40).to_le_bytes(), &[1, 0, 0]].concat();
        for stream in [wide, long] {
            assert!(decoded(&stream).unwrap_err().to_string().contains("window"));
        }
    }
}
