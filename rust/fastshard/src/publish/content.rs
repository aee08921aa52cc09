//! Files of a result besides the engine's data files: companions, and the list of all files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;

use rustix::fs::{FileType, OFlags};

use super::disk::{At, Dir};
use super::older;
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::manifest::{ManifestFile, MANIFEST_NAME};
use crate::storage::remote;

/// Largest file whose hash is computed from disk for the manifest, in bytes: larger ones are identified by
/// their time.
pub(crate) const HASHED: u64 = 256 << 10;

/// Opens a companion of a result.
pub(super) fn companion(path: &Path) -> Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    remote::bring(path, 0, u64::MAX)?;
    // A pipe would keep the run waiting for ever.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let opened = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = opened.at(path, "cannot open")?;
    if !file.metadata().at(path, "cannot stat")?.is_file() {
        return Err(Finding::new(codes::UNSUPPORTED, "not a regular file").file(path).into());
    }
    Ok(file)
}

/// BLAKE3 of the bytes of a companion of a result, hexadecimal.
///
/// Errors: what [`Staging::copy_in`] says of such a file.
pub fn hash_of_file(path: &Path) -> Result<String> {
    older::hash_of(companion(path)?).at(path, "cannot read")
}

/// Removes all files below `directory` that are not among `names`, and the folders that this empties.
pub(super) fn prune(directory: &Dir, prefix: &str, names: &BTreeSet<&str>) -> Result<()> {
    for name in directory.entries().at(directory.path(), "cannot list")? {
        let (path, full) = (format!("{prefix}{}", name.to_string_lossy()), directory.join(&name));
        let kept_below =
            names.range(&*format!("{path}/")..).next().is_some_and(|n| n.starts_with(&format!("{path}/")));
        if kept_below {
            prune(&directory.sub(&name).at(&full, "cannot open")?, &format!("{path}/"), names)?;
        } else if !names.contains(&*path) {
            directory.remove_tree(&name).at(&full, "cannot remove")?;
        }
    }
    Ok(())
}

/// Lists all files below `directory`, with the hashes that are known by name.
pub(super) fn list(
    directory: &Dir,
    prefix: &str,
    hashes: &BTreeMap<String, String>,
    files: &mut Vec<ManifestFile>,
) -> Result<()> {
    for name in directory.entries().at(directory.path(), "cannot list")? {
        let full = directory.join(&name);
        let text = name.to_str().ok_or_else(|| {
            Error::from(Finding::new(codes::UNSUPPORTED, "a file name that is not UTF-8").file(&full))
        })?;
        let path = format!("{prefix}{text}");
        let Some(stat) = directory.stat(&name).at(&full, "cannot stat")? else { continue };
        if FileType::from_raw_mode(stat.st_mode).is_dir() {
            let sub = directory.sub(&name).at(&full, "cannot open")?;
            list(&sub, &format!("{path}/"), hashes, files)?;
        } else if path != MANIFEST_NAME {
            let size = stat.st_size as u64;
            let blake3 = match hashes.get(&path) {
                Some(hash) => Some(hash.clone()),
                None if size <= HASHED => {
                    let read = directory.read_only(&name).and_then(older::hash_of);
                    Some(read.at(&full, "cannot read back")?)
                }
                None => None,
            };
            let mtime_ns = blake3.is_none().then(|| older::mtime_ns(&stat));
            files.push(ManifestFile { name: path, size, identity: None, blake3, mtime_ns, from: None });
        }
    }
    Ok(())
}
