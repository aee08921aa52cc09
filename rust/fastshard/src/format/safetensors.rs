//! safetensors files: header validation, naming file, tensor and both numbers in each refusal.

use std::collections::HashSet;
use std::fmt;
use std::io::{self, Write};

use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};

use super::{Blob, Distributed, FileTensor, ParsedFile, Role};
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::name::{Keys, Name};
use crate::plan::Metadata;
use crate::storage::SourceFile;
use crate::tensor::{c_strides, element_count, Dtype};
use crate::value::{Value, Values};

/// Largest header accepted, in bytes; the format's own limit.
pub const MAX_HEADER: u64 = 100_000_000;
/// Most dimensions accepted.
const MAX_DIMS: usize = 64;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header's entries in order, with duplicate names refused: JSON readers disagree on which of
/// two equal keys wins, so such a header means different things to different tools.
#[derive(Default)]
struct Header {
    metadata: Vec<(String, String)>,
    tensors: Vec<(Name, Entry)>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a safetensors header")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Header, A::Error> {
                let mut header = Header::default();
                let mut metadata = false;
                let twice = |name: &str| de::Error::custom(format!("the name {name:?} appears twice"));
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        if std::mem::replace(&mut metadata, true) {
                            return Err(twice(&name));
                        }
                        let map: serde_json::Map<String, serde_json::Value> = map.next_value()?;
                        for (k, v) in map {
                            let serde_json::Value::String(v) = v else {
                                return Err(de::Error::custom(
                                    "__metadata__ holds a value that is not a string",
                                ));
                            };
                            header.metadata.push((k, v));
                        }
                    } else {
                        let entry =
                            map.next_value().map_err(|e| de::Error::custom(format!("{name}: {e}")))?;
                        header.tensors.push((name.into(), entry));
                    }
                }
                let mut seen = HashSet::new();
                if let Some((name, _)) = header.tensors.iter().find(|(name, _)| !seen.insert(name)) {
                    return Err(twice(name));
                }
                Ok(header)
            }
        }
        d.deserialize_map(V)
    }
}

/// Reads and validates the header: names unique, dtypes known, bytes = shape x dtype, data without
/// hole or overlap, data end = file end. No payload byte is read.
pub fn parse(file: &SourceFile) -> Result<ParsedFile> {
    let bytes = read_header(file)?;
    let data_start = 8 + bytes.len() as u64;
    let header: Header = serde_json::from_slice(&bytes)
        .map_err(|e| unsafe_header(file, format!("the header cannot be read: {e}")))?;
    let header_digest = *blake3::hash(&bytes).as_bytes();
    drop(bytes);

    let mut blobs = Vec::with_capacity(header.tensors.len());
    let mut tensors = Vec::with_capacity(header.tensors.len());
    for (name, entry) in header.tensors {
        let (dtype, offset, len) = entry.placed(file, &name, data_start)?;
        blobs.push(Blob {
            offset,
            stored_len: len,
            len,
            crc32: None,
            deflated: false,
            zstd: None,
            encoded: false,
            member: None,
        });
        tensors.push(FileTensor {
            path: Keys::One([name]),
            dtype,
            strides: c_strides(&entry.shape),
            shape: entry.shape.into(),
            blob: (blobs.len() - 1) as u32,
            offset: 0,
            role: Role::Whole,
        });
    }
    check_tiling(file, &blobs, &tensors, data_start)?;

    let mut values = Values::default();
    let items = header
        .metadata
        .into_iter()
        .map(|(k, v)| (values.push(Value::Str(k)), values.push(Value::Str(v))))
        .collect();
    let root = values.push(Value::Dict(items));
    values.set_root(root);
    Ok(ParsedFile {
        format: "safetensors",
        blobs,
        tensors,
        values,
        distributed: Distributed::default(),
        archive: None,
        header_digest,
    })
}

fn unsafe_header(file: &SourceFile, message: String) -> Error {
    Finding::new(codes::UNSAFE_HEADER, message)
        .file(file.path())
        .help("copy or download the file again: it is damaged, or no safetensors file")
        .into()
}

/// The header's bytes, from its first brace on.
fn read_header(file: &SourceFile) -> Result<Vec<u8>> {
    if file.size() < 8 {
        return Err(truncated(file, "at least 8 bytes".into()));
    }
    let mut prefix = [0; 8];
    file.read_at(0, &mut prefix)?;
    let header_len = u64::from_le_bytes(prefix);
    if header_len > MAX_HEADER && header_len > file.size() {
        // What lies there is no length: the file begins in another way.
        let bytes: Vec<String> = prefix.iter().map(|byte| format!("{byte:02x}")).collect();
        return Err(Finding::new(
            codes::UNSAFE_HEADER,
            "the file begins neither as safetensors nor as torch files do",
        )
        .file(file.path())
        .expected(
            "a safetensors header, or an archive or a pickle of torch",
            format!("bytes {}", bytes.join(" ")),
        )
        .help("copy or download the file again: it is damaged, or of another format")
        .into());
    }
    if header_len > MAX_HEADER {
        let message = format!("header of {header_len} bytes announced, {MAX_HEADER} allowed");
        return Err(unsafe_header(file, message));
    }
    let data_start = 8 + header_len;
    if data_start > file.size() {
        return Err(truncated(file, format!("a header up to byte {data_start}")));
    }
    let bytes = file.read_vec(8, header_len as usize)?;
    if bytes.first() != Some(&b'{') {
        return Err(unsafe_header(file, "the header does not start with '{'".into()));
    }
    Ok(bytes)
}

impl Entry {
    /// Element type, place in the file and length of a tensor's data, where they agree with its shape.
    fn placed(&self, file: &SourceFile, name: &str, data_start: u64) -> Result<(Dtype, u64, u64)> {
        let refuse = |what: &str, expected: String, got: String| -> Error {
            Finding::new(codes::UNSAFE_HEADER, what)
                .file(file.path())
                .tensor(name)
                .expected(expected, got)
                .into()
        };
        let dtype = Dtype::from_safetensors(&self.dtype).ok_or_else(|| -> Error {
            Finding::new(codes::UNSUPPORTED, format!("dtype {:?} is not supported", self.dtype))
                .file(file.path())
                .tensor(name)
                .into()
        })?;
        if self.shape.len() > MAX_DIMS {
            return Err(refuse("dimensions", format!("at most {MAX_DIMS}"), self.shape.len().to_string()));
        }
        let (start, end) = self.data_offsets;
        let range = || format!("{start}..{end}");
        let len =
            end.checked_sub(start).ok_or_else(|| refuse("data_offsets", "start <= end".into(), range()))?;
        let want = element_count(&self.shape).and_then(|n| n.checked_mul(dtype.size() as u64));
        if want != Some(len) {
            let want = want
                .map_or("a size below 2^64".into(), |w| format!("{w} bytes for {dtype} {:?}", self.shape));
            return Err(refuse("size of the data", want, format!("{len} bytes")));
        }
        let offset = data_start.checked_add(start).filter(|o| o.checked_add(len).is_some());
        let offset = offset.ok_or_else(|| refuse("data_offsets", "offsets below 2^64".into(), range()))?;
        Ok((dtype, offset, len))
    }
}

/// Checks that the data begins after the header, ends with the file, and has neither holes nor overlaps.
fn check_tiling(file: &SourceFile, blobs: &[Blob], tensors: &[FileTensor], data_start: u64) -> Result<()> {
    let mut order: Vec<usize> = (0..blobs.len()).collect();
    order.sort_by_key(|&i| (blobs[i].offset, blobs[i].len));
    let mut at = data_start;
    for &i in &order {
        if blobs[i].offset != at {
            let what = match blobs[i].offset < at {
                true => "data overlaps the tensor before it",
                false => "hole before the data",
            };
            return Err(Finding::new(codes::UNSAFE_HEADER, what)
                .file(file.path())
                .tensor(&tensors[i].path[0])
                .expected(format!("start at byte {at}"), format!("byte {}", blobs[i].offset))
                .into());
        }
        at += blobs[i].len;
    }
    if at == file.size() {
        return Ok(());
    }
    let what = if at > file.size() { "the file is truncated" } else { "bytes follow the last tensor" };
    Err(Finding::new(codes::TRUNCATED, what)
        .file(file.path())
        .expected(format!("{at} bytes"), format!("{} bytes", file.size()))
        .help("copy the file again from the node that wrote it")
        .into())
}

fn truncated(file: &SourceFile, expected: String) -> Error {
    Finding::new(codes::TRUNCATED, "the file is truncated")
        .file(file.path())
        .expected(expected, format!("{} bytes", file.size()))
        .help("copy the file again from the node that wrote it")
        .into()
}

/// The entry of a header that is no tensor.
const METADATA: &str = "__metadata__";
/// Bytes of a header that are no tensor's: its length and its metadata.
pub(crate) const HEADER_FIXED: usize = 64;

/// Bytes at most of a tensor's entry in a header, whatever its place in the file.
pub(crate) fn entry_room(name: &str, dimensions: usize) -> usize {
    let quoted = serde_json::to_string(name).expect("text").len();
    // The longest dtype, two offsets of 20 digits, and the words between.
    quoted + 21 * dimensions + 96
}

/// Bytes of the header that a reader finds announced.
pub(crate) fn announced(header: &[u8]) -> u64 {
    header.len() as u64 - 8
}

/// Refuses what readers of the format would not take: its readers know no complex128, and one name is its own.
///
/// # Errors
/// `FS514`, naming the tensor.
pub fn holds(name: &str, dtype: Dtype) -> Result<()> {
    let what = match (name, dtype) {
        (METADATA, _) => "safetensors keeps this name for itself",
        (_, Dtype::C128) => "safetensors has no complex128",
        _ => return Ok(()),
    };
    let finding = Finding::new(codes::UNSUPPORTED, what).tensor(name);
    Err(finding.help("leave the tensor out: --exclude").into())
}

/// The bytes before the data of a safetensors file: length prefix and header, padded with spaces
/// so that the data starts on a page. Tensors follow each other in the order given; `metadata` goes beside the format's word.
pub fn header<'a>(
    metadata: &Metadata,
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [u64])>,
) -> Vec<u8> {
    let mut bytes = vec![0; 8];
    write_entries(&mut bytes, metadata, tensors);
    bytes.resize(bytes.len().next_multiple_of(4096), b' ');
    let announced = announced(&bytes);
    bytes[..8].copy_from_slice(&announced.to_le_bytes());
    bytes
}

/// Bytes of the header that [`header`] makes, which it does not keep: there may be millions of tensors.
pub fn header_len<'a>(
    metadata: &Metadata,
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [u64])>,
) -> u64 {
    let mut bytes = Counter(8);
    write_entries(&mut bytes, metadata, tensors);
    bytes.0.next_multiple_of(4096)
}

/// Counts what is written.
struct Counter(u64);

impl Write for Counter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes the JSON of a header, entry by entry: as one value it would take ten times its bytes.
fn write_entries<'a>(
    to: &mut impl Write,
    metadata: &Metadata,
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [u64])>,
) {
    let mut texts = serde_json::Map::from_iter([("format".to_string(), "pt".into())]);
    texts.extend(metadata.iter().map(|(key, text)| (key.clone(), text.as_str().into())));
    let mut json = serde_json::Serializer::new(to);
    let write = || -> serde_json::Result<()> {
        let mut map = json.serialize_map(None)?;
        map.serialize_entry(METADATA, &texts)?;
        let mut at = 0u64;
        for (name, dtype, shape) in tensors {
            let end = at + element_count(shape).unwrap_or(0) * dtype.size() as u64;
            let entry = Written { dtype: dtype.safetensors_name(), shape, data_offsets: (at, end) };
            map.serialize_entry(name, &entry)?;
            at = end;
        }
        map.end()
    };
    write().expect("plain data");
}

/// A tensor's entry in a header that is written.
#[derive(Serialize)]
struct Written<'a> {
    dtype: &'static str,
    shape: &'a [u64],
    data_offsets: (u64, u64),
}

/// Adds the length prefix and pads to whole pages, `least` bytes at least.
pub fn padded(mut json: Vec<u8>, least: usize) -> Vec<u8> {
    let total = (8 + json.len()).next_multiple_of(4096).max(least);
    json.resize(total - 8, b' ');
    let mut bytes = ((total - 8) as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_readers_of_the_format_do_not_take_is_refused() {
        assert!(holds("w", Dtype::C64).is_ok());
        assert!(holds("metadata", Dtype::F32).is_ok());
        for (name, dtype) in [("w", Dtype::C128), ("__metadata__", Dtype::F32)] {
            let error = holds(name, dtype).unwrap_err();
            assert_eq!(error.findings()[0].code, codes::UNSUPPORTED);
            assert_eq!(error.findings()[0].tensor.as_deref(), Some(name));
        }
    }
}
