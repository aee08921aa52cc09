//! The zip container: its members, validated against each other and against the file.
//!
//! The `zip` crate reads the central directory. It is made for any archive there is, so the checks
//! that leave one reading only are here: one end record, at the end; no member twice, none over
//! another or outside the file; local headers that agree with the central directory. Offsets and
//! field layouts follow PKWARE's APPNOTE 6.3, sections 4.3.7 (local header) to 4.3.16 (end record).

use std::collections::HashMap;

use zip::read::{ArchiveOffset, Config};
use zip::{CompressionMethod, ZipArchive};

use super::inflate::{check_crc, inflate};
use super::region::Region;
use super::Blob;
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::memory;
use crate::storage::SourceFile;

/// Most members accepted: a member is a storage, and the directory is held in memory.
pub(crate) const MAX_MEMBERS: u64 = 1 << 20;
/// Largest central directory accepted, in bytes.
const MAX_DIRECTORY: u64 = 256 << 20;
/// Deflate makes at most 1032 bytes from one (zlib's technical notes).
const MAX_RATIO: u64 = 1032;
/// Bytes of an end record without comment, and of the longest comment.
const END: usize = 22;
const MAX_COMMENT: usize = 0xffff;
/// Bytes of a zip64 end record locator, and of a zip64 end record without extension.
const LOCATOR: u64 = 20;
const END64: usize = 56;
/// Bytes of a local header, and of a header of the central directory, before the name.
const LOCAL: usize = 30;
const CENTRAL: usize = 46;
/// Bytes of the extra field of a local header: torch aligns data to 64 bytes by it.
const EXTRA: u64 = 96;
/// Flag bit: CRC and sizes follow the data, and the local header may leave them 0.
const DESCRIPTOR: u16 = 1 << 3;
/// What a 32-bit field holds if the zip64 extra field has the value.
const IN_ZIP64: u64 = 0xffff_ffff;

/// A member of the archive.
#[derive(Debug)]
pub(super) struct Member {
    /// Name with all folders.
    pub(super) name: String,
    /// CRC32 of the content; none in an archive that was saved without checksums.
    pub(super) crc32: Option<u32>,
    /// Bytes of the content.
    pub(super) len: u64,
    /// Bytes in the file.
    stored_len: u64,
    /// Offset of the stored bytes in the file.
    data: u64,
    /// Offset of the local header in the file.
    header: u64,
    /// Offset of its header in the central directory in the file.
    central: u64,
    deflated: bool,
}

impl Member {
    pub(super) fn blob(&self) -> Blob {
        Blob {
            offset: self.data,
            stored_len: self.stored_len,
            len: self.len,
            crc32: self.crc32,
            deflated: self.deflated,
            zstd: None,
            encoded: false,
            member: Some(self.name.as_str().into()),
        }
    }

    /// Where in the file the member's CRC32 stands, if it has one: its two headers, and the descriptor after its data.
    fn crc_at(&self, file: &SourceFile) -> Result<Vec<u64>> {
        if self.crc32.is_none() {
            return Ok(Vec::new());
        }
        let mut places = vec![self.central + 16];
        let fixed = file.read_vec(self.header, LOCAL)?;
        // With a descriptor the local header may leave the field 0, and readers want it so.
        if u32_at(&fixed, 14) != 0 || u16_at(&fixed, 6) & DESCRIPTOR == 0 {
            places.push(self.header + 14);
        }
        if u16_at(&fixed, 6) & DESCRIPTOR != 0 {
            let end = self.data + self.stored_len;
            let signed = file.read_vec(end, 4)? == b"PK\x07\x08";
            places.push(if signed { end + 4 } else { end });
        }
        Ok(places)
    }
}

/// A validated archive.
#[derive(Debug)]
pub(super) struct Archive {
    /// In the order of the file.
    members: Vec<Member>,
    by_name: HashMap<String, usize>,
}

impl Archive {
    /// All members in the order of the file.
    pub(super) fn members(&self) -> &[Member] {
        &self.members
    }

    pub(super) fn get(&self, name: &str) -> Option<&Member> {
        self.by_name.get(name).map(|&i| &self.members[i])
    }

    /// All members in the order of their names.
    pub(super) fn by_name(&self) -> Vec<&Member> {
        let mut members: Vec<&Member> = self.members.iter().collect();
        members.sort_by(|a, b| a.name.cmp(&b.name));
        members
    }

    /// Members whose content could be replaced in place, and where their checksums stand.
    pub(super) fn replaceable(&self, file: &SourceFile) -> Result<Vec<crate::format::Member>> {
        let stored = self.members.iter().filter(|m| !m.deflated);
        stored
            .map(|m| Ok(crate::format::Member { offset: m.data, len: m.len, crc_at: m.crc_at(file)? }))
            .collect()
    }

    /// Reads and validates the archive at bytes `start..start + len` of `file`.
    pub(super) fn read(file: &SourceFile, start: u64, len: u64) -> Result<Archive> {
        let in_file = start.checked_add(len).filter(|&end| end <= file.size());
        let end = in_file.ok_or_else(|| -> Error {
            let end = start.saturating_add(len);
            truncated(file).expected(format!("at least {end} bytes"), format!("{} bytes", file.size())).into()
        })?;
        let directory = Directory::find(file, start, end)?;
        let config = Config { archive_offset: ArchiveOffset::Known(0) };
        let mut zip = ZipArchive::with_config(config, Region::new(file, start, len))
            .map_err(|e| zip_error(file, "the zip container", e))?;
        if zip.central_directory_start() != directory.start {
            return Err(unsafe_zip(file, "start of the central directory")
                .expected(directory.start, zip.central_directory_start())
                .into());
        }
        if zip.len() != directory.names.len() {
            return Err(unsafe_zip(file, "distinct member names")
                .expected(directory.names.len(), zip.len())
                .into());
        }

        let mut members = Vec::with_capacity(zip.len());
        let mut summed = false;
        for (index, (at, name)) in directory.names.into_iter().enumerate() {
            let entry = zip.by_index_raw(index).map_err(|e| zip_error(file, &name, e))?;
            let unsupported = |what: String| -> Error {
                Finding::new(codes::UNSUPPORTED, format!("{name}: {what}")).file(file.path()).into()
            };
            if entry.encrypted() {
                return Err(unsupported("encrypted members are not supported".into()));
            }
            let deflated = match entry.compression() {
                CompressionMethod::Stored => false,
                CompressionMethod::Deflated => true,
                method => return Err(unsupported(format!("compression method {method} is not supported"))),
            };
            summed |= entry.crc32() != 0;
            let mut member = Member {
                crc32: Some(entry.crc32()),
                len: entry.size(),
                stored_len: entry.compressed_size(),
                data: 0,
                header: start.saturating_add(entry.header_start()),
                central: start + directory.start + at as u64,
                deflated,
                name,
            };
            member.data = local_header(file, &member, start + directory.start)?;
            check_sizes(file, &member)?;
            members.push(member);
        }

        if !summed {
            // `torch.serialization.set_crc32_options(False)`: zeros stand in every place. A pickle is never empty, so of
            // an archive with checksums one at least is not zero.
            members.iter_mut().for_each(|member| member.crc32 = None);
        }

        members.sort_by_key(|m| (m.header, m.data));
        let mut at = (start, "the start of the archive");
        for member in &members {
            if member.header < at.0 {
                return Err(unsafe_zip(file, &format!("{} overlaps {}", member.name, at.1))
                    .expected(format!("start at byte {} or later", at.0), format!("byte {}", member.header))
                    .into());
            }
            at = (member.data + member.stored_len, &member.name);
        }
        let by_name = members.iter().enumerate().map(|(i, m)| (m.name.clone(), i)).collect();
        Ok(Archive { members, by_name })
    }
}

/// The content of a small member, inflated within `cap` bytes and checked against its CRC.
pub(super) fn read_member(file: &SourceFile, member: &Member, cap: u64) -> Result<Vec<u8>> {
    if member.len > cap {
        return Err(Finding::new(codes::UNSAFE_ZIP, format!("size of {}", member.name))
            .file(file.path())
            .expected(format!("at most {cap} bytes"), format!("{} bytes", member.len))
            .into());
    }
    let blob = member.blob();
    if blob.deflated {
        file.room_for(member.len)?;
        let mut content = Vec::new();
        inflate(file, &blob, &mut |bytes| Ok(memory::append(&mut content, bytes)?))?;
        return Ok(content);
    }
    let content = file.read_vec(blob.offset, blob.len as usize)?;
    check_crc(file, &blob, crc32fast::hash(&content))?;
    Ok(content)
}

/// What the end records say of the central directory.
struct Directory {
    /// Offset from the start of the archive.
    start: u64,
    /// Names of the members in the order of the directory, and where in it their headers begin.
    names: Vec<(usize, String)>,
}

impl Directory {
    /// Reads the end record, which must be the last thing in `start..end`, and its zip64 part.
    fn find(file: &SourceFile, start: u64, end: u64) -> Result<Directory> {
        let tail_len = (end - start).min((END + MAX_COMMENT) as u64) as usize;
        let tail = file.read_vec(end - tail_len as u64, tail_len)?;
        let ends_here = |&i: &usize| {
            tail[i..].starts_with(b"PK\x05\x06") && i + END + usize::from(u16_at(&tail, i + 20)) == tail_len
        };
        let Some(at) = (0..(tail_len + 1).saturating_sub(END)).rev().find(ends_here) else {
            let is_whole = (start, end) == (0, file.size());
            if !is_whole {
                return Err(unsafe_zip(file, "no torch archive where the metadata has one")
                    .expected("a zip end record as the last bytes", format!("none at byte {end}"))
                    .help("copy the file again from the node that wrote it; it is damaged, or another rank's")
                    .into());
            }
            let follow =
                tail.windows(4).rposition(|bytes| bytes == b"PK\x05\x06").filter(|at| at + END < tail_len);
            let got = match follow {
                Some(at) => format!("one that ends {} bytes before the end", tail_len - at - END),
                None => format!("{end} bytes without it"),
            };
            return Err(truncated(file)
                .expected("the zip directory that ends a file of torch.save", got)
                .into());
        };
        let record = &tail[at..];
        let mut directory_end = end - start - (tail_len - at) as u64;
        let mut fields = [
            u64::from(u16_at(record, 4)),  // number of this disk
            u64::from(u16_at(record, 6)),  // disk of the directory
            u64::from(u16_at(record, 8)),  // members on this disk
            u64::from(u16_at(record, 10)), // members
            u64::from(u32_at(record, 12)), // bytes of the directory
            u64::from(u32_at(record, 16)), // start of the directory
        ];
        if let Some(at) = widen(file, start, directory_end, &mut fields)? {
            directory_end = at;
        }
        let [disk, directory_disk, here, members, len, offset] = fields;
        if disk != 0 || directory_disk != 0 || here != members {
            return Err(unsafe_zip(file, "an archive of several disks").into());
        }
        if offset.checked_add(len) != Some(directory_end) {
            return Err(unsafe_zip(file, "end of the central directory")
                .expected(format!("byte {directory_end}"), format!("byte {offset} + {len}"))
                .into());
        }
        if members > MAX_MEMBERS || len > MAX_DIRECTORY {
            return Err(unsafe_zip(file, "central directory")
                .expected(
                    format!("at most {MAX_MEMBERS} members in {MAX_DIRECTORY} bytes"),
                    format!("{members} members in {len} bytes"),
                )
                .into());
        }
        let content = file.read_vec(start + offset, len as usize)?;
        let names = member_names(file, &content, members)?;
        announce_local_headers(file, &content, start, start + offset)?;
        Ok(Directory { start: offset, names })
    }
}

/// Takes the fields of an end record from its zip64 part, if there is one before `end`; where that part begins.
fn widen(file: &SourceFile, start: u64, end: u64, fields: &mut [u64; 6]) -> Result<Option<u64>> {
    let locator = end.checked_sub(LOCATOR).map(|at| file.read_vec(start + at, LOCATOR as usize));
    let locator = locator.transpose()?.filter(|locator| locator.starts_with(b"PK\x06\x07"));
    let Some(locator) = locator else { return Ok(None) };
    let at = u64_at(&locator, 8);
    let inside = at.checked_add(END64 as u64 + LOCATOR).is_some_and(|inner| inner <= end);
    if !inside {
        return Err(unsafe_zip(file, "the zip64 end record is outside the archive").into());
    }
    let record = file.read_vec(start + at, END64)?;
    if !record.starts_with(b"PK\x06\x06") {
        return Err(unsafe_zip(file, "no zip64 end record where its locator points").into());
    }
    let wide = [
        u64::from(u32_at(&record, 16)),
        u64::from(u32_at(&record, 20)),
        u64_at(&record, 24),
        u64_at(&record, 32),
        u64_at(&record, 40),
        u64_at(&record, 48),
    ];
    for (i, (field, wide)) in fields.iter_mut().zip(wide).enumerate() {
        let in_wide = if i < 4 { 0xffff } else { IN_ZIP64 };
        if *field != wide && *field != in_wide {
            return Err(unsafe_zip(file, "the zip64 end record contradicts the end record")
                .expected(*field, wide)
                .into());
        }
        *field = wide;
    }
    Ok(Some(at))
}

/// Names of the members, and where in the directory their headers begin.
fn member_names(file: &SourceFile, directory: &[u8], members: u64) -> Result<Vec<(usize, String)>> {
    let names = names(directory)
        .ok_or_else(|| unsafe_zip(file, "the central directory holds bytes that are no headers"))?;
    if names.len() as u64 != members {
        return Err(unsafe_zip(file, "headers in the central directory")
            .expected(members, names.len())
            .into());
    }
    let text = |name: &[u8]| std::str::from_utf8(name).ok().filter(|n| !n.contains('\0')).map(str::to_string);
    let names: Option<Vec<_>> = names.into_iter().map(|(at, name)| Some((at, text(name)?))).collect();
    names.ok_or_else(|| unsafe_zip(file, "a member name that is not UTF-8").into())
}

/// Names in the headers of a central directory, `None` if something else is in it. Readers go by the
/// number of headers or by the size, so a directory that fits only one of them hides members.
fn names(directory: &[u8]) -> Option<Vec<(usize, &[u8])>> {
    let mut names = Vec::new();
    let mut at = 0;
    while at < directory.len() {
        let directory = &directory[at..];
        let fixed = directory.get(..CENTRAL).filter(|header| header.starts_with(b"PK\x01\x02"))?;
        let [name, extra, comment] = [28, 30, 32].map(|at| usize::from(u16_at(fixed, at)));
        names.push((at, directory.get(CENTRAL..CENTRAL + name)?));
        let len = CENTRAL + name + extra + comment;
        directory.get(len..)?;
        at += len;
    }
    Some(names)
}

/// Requests the local headers of all members at once of a store, where each request takes long.
fn announce_local_headers(file: &SourceFile, directory: &[u8], start: u64, end: u64) -> Result<()> {
    if !file.is_stored() {
        return Ok(());
    }
    let mut ranges: Vec<(u64, u64)> = names(directory)
        .into_iter()
        .flatten()
        .map(|(at, name)| {
            let header = start.saturating_add(local_header_offset(&directory[at..])).min(end);
            (header, header.saturating_add((LOCAL + name.len()) as u64 + EXTRA).min(end))
        })
        .filter(|(lo, hi)| lo < hi)
        .collect();
    ranges.sort_unstable();
    file.will_read(&ranges)
}

/// Where the local header of the first member of a central directory begins.
fn local_header_offset(central: &[u8]) -> u64 {
    let offset = u64::from(u32_at(central, 42));
    if offset != IN_ZIP64 {
        return offset;
    }
    let [name, extra] = [28, 30].map(|at| usize::from(u16_at(central, at)));
    let extra = central.get(CENTRAL + name..CENTRAL + name + extra).unwrap_or_default();
    // Sizes come before it, as far as they are there.
    let sizes = [20, 24].iter().filter(|&&at| u64::from(u32_at(central, at)) == IN_ZIP64).count();
    zip64_extra(extra).chunks_exact(8).nth(sizes).map_or(offset, |wide| u64_at(wide, 0))
}

/// Checks a member's local header against the central directory; returns the offset of its data.
fn local_header(file: &SourceFile, member: &Member, directory: u64) -> Result<u64> {
    let outside = || -> Error {
        unsafe_zip(file, &format!("{} reaches into the central directory", member.name))
            .expected(format!("an end up to byte {directory}"), format!("a start at byte {}", member.header))
            .into()
    };
    let name_at =
        member.header.checked_add(LOCAL as u64).filter(|&at| at <= directory).ok_or_else(outside)?;
    let fixed = file.read_vec(member.header, LOCAL)?;
    let (name_len, extra_len) = (usize::from(u16_at(&fixed, 26)), usize::from(u16_at(&fixed, 28)));
    let data = name_at + (name_len + extra_len) as u64;
    if data.checked_add(member.stored_len).is_none_or(|end| end > directory) {
        return Err(outside());
    }
    let rest = file.read_vec(name_at, name_len + extra_len)?;
    let (name, extra) = rest.split_at(name_len);
    let differs = |what: &str, central: String, local: String| -> Error {
        unsafe_zip(file, &format!("{}: {what} in the local header", member.name))
            .expected(central, local)
            .into()
    };
    if !fixed.starts_with(b"PK\x03\x04") {
        return Err(differs(
            "signature",
            "504b0304".into(),
            format!("{:08x}", u32_at(&fixed, 0).swap_bytes()),
        ));
    }
    if name != member.name.as_bytes() {
        return Err(differs("name", member.name.clone(), String::from_utf8_lossy(name).into_owned()));
    }
    let method = u16_at(&fixed, 8);
    if method != if member.deflated { 8 } else { 0 } {
        return Err(differs("compression method", u8::from(member.deflated).to_string(), method.to_string()));
    }
    // With a descriptor, writers leave the fields 0; torch's does so even in the zip64 extra field.
    let left_out = u16_at(&fixed, 6) & DESCRIPTOR != 0;
    let crc32 = u32_at(&fixed, 14);
    let central = member.crc32.unwrap_or(0);
    if crc32 != central && !(left_out && crc32 == 0) {
        return Err(differs("CRC32", format!("{central:08x}"), format!("{crc32:08x}")));
    }
    let mut wide = zip64_extra(extra).chunks_exact(8).map(|chunk| u64_at(chunk, 0));
    for (what, central, at) in [("size", member.len, 22), ("stored size", member.stored_len, 18)] {
        let local = u64::from(u32_at(&fixed, at));
        let local = if local == IN_ZIP64 { wide.next().unwrap_or(local) } else { local };
        if local != central && !(left_out && local == 0) {
            return Err(differs(what, central.to_string(), local.to_string()));
        }
    }
    Ok(data)
}

/// Sizes of one member that fit each other and the method.
fn check_sizes(file: &SourceFile, member: &Member) -> Result<()> {
    let possible = match member.deflated {
        false => member.len == member.stored_len,
        true => member.len / MAX_RATIO <= member.stored_len,
    };
    if possible {
        return Ok(());
    }
    Err(unsafe_zip(file, &format!("{}: size that its stored bytes cannot have", member.name))
        .expected(
            if member.deflated {
                format!("at most {MAX_RATIO} times {} bytes", member.stored_len)
            } else {
                format!("{} bytes", member.stored_len)
            },
            format!("{} bytes", member.len),
        )
        .into())
}

/// The content of the zip64 field (id 1) among the extra fields, empty if there is none.
fn zip64_extra(mut extra: &[u8]) -> &[u8] {
    while extra.len() >= 4 {
        let (id, len) = (u16_at(extra, 0), usize::from(u16_at(extra, 2)));
        let Some(content) = extra.get(4..4 + len) else { break };
        if id == 1 {
            return content;
        }
        extra = &extra[4 + len..];
    }
    &[]
}

fn truncated(file: &SourceFile) -> Finding {
    Finding::new(codes::TRUNCATED, "the file is truncated")
        .file(file.path())
        .help("copy the file again from the node that wrote it")
}

fn unsafe_zip(file: &SourceFile, message: &str) -> Finding {
    Finding::new(codes::UNSAFE_ZIP, message)
        .file(file.path())
        .help("copy the file again from the node that wrote it; it is damaged, or not written by torch")
}

fn zip_error(file: &SourceFile, what: &str, error: zip::result::ZipError) -> Error {
    let refuse = |e: &dyn std::fmt::Display| unsafe_zip(file, &format!("{what} cannot be read: {e}")).into();
    match error {
        zip::result::ZipError::Io(e) => e.downcast::<Error>().unwrap_or_else(|e| refuse(&e)),
        error => refuse(&error),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
