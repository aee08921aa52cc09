//! torch zip files (`.pt`, `.bin`), as `torch.save` writes them since torch 1.6.
//!
//! A zip archive `<name>/data.pkl` (a pickle of everything but the tensor data), `<name>/data/<key>`
//! (the bytes of one storage each), `<name>/byteorder`, `<name>/version`; see
//! `torch/serialization.py::_save`. torch does not check the CRC of the data when it loads; the
//! checksums are kept in the blobs so that a caller can.

use super::zip::{read_member, Archive, Member};
use super::{pickle, ParsedFile};
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::storage::SourceFile;

mod distributed;
mod float8;
mod tensors;
pub(crate) mod writer;

/// Bytes accepted in `byteorder`, which holds `little` or `big`.
const MAX_BYTEORDER: u64 = 16;

/// Reads what a torch zip file says and validates it: container, pickle, and that each tensor lies
/// inside its storage. The only payload read is the pickle.
///
/// Refused with `FS312` if the file is truncated, `FS604` for the container, `FS602` for the
/// pickle, `FS301` if its bytes are damaged, `FS513`/`FS514` for zip files of other kinds.
pub fn parse(file: &SourceFile) -> Result<ParsedFile> {
    parse_range(file, 0, file.size())
}

/// Like [`parse`], for a torch zip file that lies at bytes `start..start + len` of another file, as
/// in the `.distcp` files of torch's distributed checkpoints. Blob offsets are those of `file`.
pub fn parse_range(file: &SourceFile, start: u64, len: u64) -> Result<ParsedFile> {
    parse_archive(file, &Archive::read(file, start, len)?)
}

/// Like [`parse`], for an archive whose directory was read.
pub(super) fn parse_archive(file: &SourceFile, archive: &Archive) -> Result<ParsedFile> {
    let prefix = prefix(file, archive)?;
    if let Some(member) = archive.get(&format!("{prefix}byteorder")) {
        let order = read_member(file, member, MAX_BYTEORDER)?;
        if order.trim_ascii() != b"little" {
            let order = String::from_utf8_lossy(&order).into_owned();
            return Err(Finding::new(codes::UNSUPPORTED, "the byte order is not supported")
                .file(file.path())
                .expected("little", order)
                .help("load the file and save it again on a little-endian machine")
                .into());
        }
    }
    let pkl = archive.get(&format!("{prefix}data.pkl")).expect("the prefix was found by it");
    let pkl = read_member(file, pkl, pickle::LIMITS.stream as u64)?;
    let pickle = pickle::parse_bytes(&pkl, file.path())?;

    let mut digest = blake3::Hasher::new();
    digest.update(&pkl);
    for member in archive.by_name() {
        digest.update(member.name.as_bytes());
        digest.update(&member.crc32.unwrap_or(0).to_le_bytes());
        digest.update(&member.len.to_le_bytes());
    }
    let header_digest = *digest.finalize().as_bytes();
    tensors::assemble(file, archive, &prefix, pickle, header_digest)
}

/// Members of a torch zip file whose content can be replaced by other bytes of the same length, by
/// rising offset, and where their checksums stand.
pub fn replaceable(file: &SourceFile) -> Result<Vec<super::Member>> {
    Archive::read(file, 0, file.size())?.replaceable(file)
}

/// Where numbers of a torch zip file lie, by the keys that lead to them from its root: offsets in the file of ranges
/// whose bytes, all set to zero, spell zero. Nothing else changes with them.
///
/// # Errors
/// `FS514` for a number that cannot be set to zero so: one that is written as text, that lies in a compressed member, or
/// that something else of the file refers to as well.
pub fn numbers(file: &SourceFile, paths: &[Vec<String>]) -> Result<Vec<(u64, u64)>> {
    let archive = Archive::read(file, 0, file.size())?;
    let name = format!("{}data.pkl", prefix(file, &archive)?);
    let member = archive.get(&name).expect("the prefix was found by it");
    let pkl = read_member(file, member, pickle::LIMITS.stream as u64)?;
    let (pickle, numbers) = pickle::parse_with_numbers(&pkl, file.path())?;
    let values = &pickle.values;
    let references = values.references();
    let place = |path: &Vec<String>| -> Result<(u64, u64)> {
        let refuse = |why: &str| -> Error {
            Finding::new(
                codes::UNSUPPORTED,
                format!("a number in the pickle that cannot be set to zero in place: {why}"),
            )
            .file(file.path())
            .tensor(path.join("."))
            .into()
        };
        let node = values.at(path).ok_or_else(|| refuse("it is missing"))?;
        let range = numbers.get(&node).ok_or_else(|| refuse("it is no number of a binary opcode"))?;
        if references.get(node as usize) != Some(&1) {
            return Err(refuse("something else refers to it too"));
        }
        let blob = member.blob();
        if blob.deflated {
            return Err(refuse("the pickle is compressed"));
        }
        Ok((blob.offset + range.start as u64, range.len() as u64))
    };
    paths.iter().map(place).collect()
}

/// The refusal of a legacy (non-zip) torch file.
pub fn legacy_refusal(file: &SourceFile) -> Error {
    Finding::new(
        codes::UNSUPPORTED,
        "a torch file of the format before torch 1.6, which is not a zip archive",
    )
    .file(file.path())
    .help("save it again with torch >= 1.6: `torch.save(torch.load(f, weights_only=True), f)`")
    .into()
}

/// The folder of the archive, with its slash: where the one `data.pkl` is.
fn prefix(file: &SourceFile, archive: &Archive) -> Result<String> {
    let refuse = |code, message: &str, help: &str| -> Error {
        Finding::new(code, message).file(file.path()).help(help).into()
    };
    let mut found = archive.members().iter().filter_map(|member| {
        let prefix = member.name.strip_suffix("data.pkl")?;
        (prefix.find('/') == Some(prefix.len().wrapping_sub(1))).then_some(prefix)
    });
    let Some(prefix) = found.next() else {
        let help = "name the checkpoint's own files; this one was not written by torch.save";
        return Err(refuse(codes::NOT_A_CHECKPOINT, "a zip archive without data.pkl", help));
    };
    if found.next().is_some() {
        return Err(refuse(
            codes::UNSAFE_ZIP,
            "more than one data.pkl",
            "keep to files that torch.save wrote",
        ));
    }
    let script = |m: &Member| {
        m.name.strip_prefix(prefix).is_some_and(|name| name == "constants.pkl" || name.starts_with("code/"))
    };
    if archive.members().iter().any(script) {
        let help = "load it with torch.jit.load and save its state_dict() with torch.save";
        return Err(refuse(codes::UNSUPPORTED, "a TorchScript archive", help));
    }
    Ok(prefix.to_string())
}
