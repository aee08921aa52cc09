//! Where a result goes, where it is staged, and what is at the destination now.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, StatxAttributes, StatxFlags, CWD};

use super::disk::At;
use crate::codes;
use crate::error::{Finding, Result};

/// A destination and its staging folder.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// Destination, links resolved.
    pub(super) out: PathBuf,
    /// Directory that holds the destination, or the root itself.
    pub(super) parent: PathBuf,
    /// Staging folder of the run.
    pub(super) folder: PathBuf,
    /// True if the folder lies inside the destination, which cannot be renamed.
    pub(super) inside: bool,
}

/// What is at the destination, the staging folder not counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Occupied {
    /// Nothing.
    Absent,
    /// An empty directory.
    Empty { inode: u64, mode: u32 },
    /// A directory with entries, one of them named.
    Full { inode: u64, mode: u32, entry: OsString },
}

impl Place {
    /// Resolves `out` and places the staging folder of the run.
    pub(super) fn find(out: &Path, run_id: &str) -> Result<Place> {
        if run_id.len() < 16 || !run_id.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(Finding::new(codes::USAGE, "run id")
                .expected("16 or more hex digits", run_id)
                .into());
        }
        let run = &run_id[..16];
        let Some(target) = existing(out)? else {
            let parent = match out.parent() {
                Some(parent) if parent != Path::new("") => parent,
                _ => Path::new("."),
            };
            let name = out
                .file_name()
                .ok_or_else(|| Finding::new(codes::NO_SUCH_PATH, "the destination has no name").file(out))?;
            let parent = parent.canonicalize().at(parent, "the destination's parent directory")?;
            if !parent.is_dir() {
                return Err(not_a_directory(&parent));
            }
            let (target, folder) = (parent.join(name), beside(&parent, name, run));
            return Ok(Place { out: target, parent, folder, inside: false });
        };
        let (parent, name) = match (target.parent(), target.file_name()) {
            (Some(parent), Some(name)) => (parent.to_path_buf(), name),
            _ => (target.clone(), OsStr::new("")),
        };
        let inside = parent == target || is_mount_root(&target, &parent)? || writable(&parent).is_err();
        let folder = match inside {
            true => target.join(format!(".fastshard-{run}")),
            false => beside(&parent, name, run),
        };
        Ok(Place { out: target, parent, folder, inside })
    }

    /// The directory in which the staging folder is created.
    pub(super) fn base(&self) -> &Path {
        if self.inside {
            &self.out
        } else {
            &self.parent
        }
    }

    /// The result while it is written.
    pub(super) fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    /// Looks at the destination.
    pub(super) fn occupied(&self) -> Result<Occupied> {
        let meta = match std::fs::symlink_metadata(&self.out) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Occupied::Absent),
            meta => meta.at(&self.out, "cannot stat")?,
        };
        if !meta.is_dir() {
            return Err(not_a_directory(&self.out));
        }
        let (inode, mode) = (meta.ino(), meta.mode());
        let own = self.folder.file_name();
        for entry in std::fs::read_dir(&self.out).at(&self.out, "cannot list")? {
            let entry = entry.at(&self.out, "cannot list")?.file_name();
            if !self.inside || Some(&*entry) != own {
                return Ok(Occupied::Full { inode, mode, entry });
            }
        }
        Ok(Occupied::Empty { inode, mode })
    }

    /// The finding for a destination that may not be replaced, if it is one.
    pub(super) fn refused(&self, occupied: &Occupied, overwrite: bool) -> Option<Finding> {
        let Occupied::Full { entry, .. } = occupied else { return None };
        let held = format!("it holds {}", entry.to_string_lossy());
        let finding = Finding::new(codes::OUT_EXISTS, "the destination exists and is not empty")
            .file(&self.out)
            .expected("an empty or absent directory", held);
        match (overwrite, self.inside) {
            (false, _) => Some(finding.help("choose another destination or pass --overwrite")),
            (true, false) => None,
            (true, true) => Some(finding.help(
                "it is a mount point or its parent may not be written, so it cannot be replaced in one step: \
                 empty it or choose a new directory inside",
            )),
        }
    }
}

/// `out` with links resolved if something is there; it has to be a directory.
fn existing(out: &Path) -> Result<Option<PathBuf>> {
    match out.canonicalize() {
        Ok(target) if target.is_dir() => Ok(Some(target)),
        Ok(_) => Err(not_a_directory(out)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => match std::fs::symlink_metadata(out) {
            Ok(_) => Err(Finding::new(codes::NO_SUCH_PATH, "a symbolic link to a path that does not exist")
                .file(out)
                .help("create the directory it names, or choose another destination")
                .into()),
            Err(_) => Ok(None),
        },
        Err(e) => Err(e).at(out, "cannot resolve the destination"),
    }
}

fn not_a_directory(path: &Path) -> crate::error::Error {
    Finding::new(codes::OUT_EXISTS, "exists and is not a directory")
        .file(path)
        .help("choose another destination; fastshard does not replace a file")
        .into()
}

/// The hidden sibling of `name`; long names are cut so that it stays a valid file name.
fn beside(parent: &Path, name: &OsStr, run: &str) -> PathBuf {
    let name = &name.as_bytes()[..name.len().min(200)];
    let folder = [b".", name, b".fastshard-", run.as_bytes()].concat();
    parent.join(OsStr::from_bytes(&folder))
}

/// True if `path` is where a filesystem or a bind mount begins.
fn is_mount_root(path: &Path, parent: &Path) -> Result<bool> {
    #[cfg(test)]
    if super::fault::lacking("replacing").is_err() {
        return Ok(true);
    }
    let device = |p: &Path| std::fs::metadata(p).map(|m| m.dev()).at(p, "cannot stat");
    if device(path)? != device(parent)? {
        return Ok(true);
    }
    // A bind mount of the same filesystem has the same device number. Old kernels do not say.
    let attributes = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::empty());
    Ok(attributes.is_ok_and(|s| s.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)))
}

/// Checks that entries of a directory may be created and removed.
pub(super) fn writable(directory: &Path) -> io::Result<()> {
    Ok(rustix::fs::access(directory, Access::WRITE_OK | Access::EXEC_OK)?)
}

/// Inode number of what is at `path`, links not followed.
pub(super) fn inode(path: &Path) -> Result<Option<u64>> {
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        meta => Ok(Some(meta.at(path, "cannot stat")?.ino())),
    }
}
