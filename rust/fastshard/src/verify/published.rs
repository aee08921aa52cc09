//! A result's files against its manifest: those that hold no tensors by their bytes, the others by size.

use std::io;
use std::path::{Path, PathBuf};

use super::whole;
use crate::codes;
use crate::engine::Control;
use crate::error::{Error, Finding, Result};
use crate::manifest::{Manifest, ManifestFile};
use crate::publish;

/// Compares the files that `manifest` lists with those below the first of `roots` that has each. Files that hold tensors are left to
/// [`super::against`], which reads them; a store's large files are compared by size, their arrays by content.
///
/// # Errors
/// What the system says of a file that is there and cannot be read; `FS510` once `control` says to stop.
pub fn files(
    manifest: &Manifest,
    roots: &[PathBuf],
    threads: usize,
    control: &Control,
) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    // Those of the right size, and where they lie.
    let mut there: Vec<(&ManifestFile, PathBuf)> = Vec::new();
    for file in manifest.files.iter().filter(|f| !f.holds_tensors()) {
        if !publish::is_plain(&file.name) {
            return Err(Finding::new(
                codes::BAD_MANIFEST,
                "the manifest names a file that leaves its folder",
            )
            .file(&file.name)
            .into());
        }
        let mut found = None;
        for path in roots.iter().map(|root| root.join(&file.name)) {
            match std::fs::metadata(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                meta => {
                    let size = meta.map_err(|e| Error::io(&path, "cannot stat", &e))?.len();
                    found = Some((path, size));
                    break;
                }
            }
        }
        match found {
            None => findings.push(
                Finding::new(codes::MISSING_FILE, "the file is missing: the manifest names it")
                    .file(&file.name)
                    .help("copy it from the host that made the manifest"),
            ),
            Some((_, size)) if size != file.size => findings.push(
                changed(file, "size differs from the manifest")
                    .expected(format!("{} bytes", file.size), format!("{size} bytes")),
            ),
            Some((path, _)) => there.push((file, path)),
        }
    }
    there.retain(|(file, _)| file.blake3.is_some());
    let whole = there.iter().map(|(file, path)| (path.clone(), file.size)).collect();
    let hashes = whole::hashes(whole, threads, control)?;
    for ((file, _), got) in there.iter().zip(hashes) {
        if let Some(expected) = file.blake3.as_ref().filter(|expected| **expected != got) {
            findings.push(
                changed(file, "content differs from the manifest")
                    .expected(format!("BLAKE3 {expected}"), got),
            );
        }
    }
    Ok(findings)
}

/// The entry of a file without tensors in an inventory of what is there.
///
/// # Errors
/// Errors of the system.
pub fn entry(root: &Path, name: &str) -> Result<ManifestFile> {
    let path = root.join(name);
    let size = std::fs::metadata(&path).map_err(|e| Error::io(&path, "cannot stat", &e))?.len();
    let blake3 = Some(publish::hash_of_file(&path)?);
    Ok(ManifestFile { name: name.into(), size, identity: None, blake3, mtime_ns: None, from: None })
}

fn changed(file: &ManifestFile, what: &str) -> Finding {
    Finding::new(codes::HASH, what).file(&file.name).help(
        "restore it from a good copy; if it was changed on purpose, record the new content with `fastshard manifest`",
    )
}
