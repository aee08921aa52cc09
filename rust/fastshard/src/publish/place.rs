//! Where a result goes, where it is staged, and what is at the destination now.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, FileType};

use super::disk::{At, Dir};
use super::older;
use crate::codes;
use crate::error::{Finding, Result};

/// Bytes of a destination's name in that of its staging folder.
const MAX_SHOWN: usize = 200;
/// What the folder in which ranks meet is called, after the destination's name.
const MEETING: &str = ".fastshard-ranks";

/// A destination and its staging folder.
#[derive(Debug)]
pub(crate) struct Place {
    /// Destination, links resolved.
    pub(crate) out: PathBuf,
    /// Its name in `base`, unless `inside`.
    pub(crate) name: OsString,
    /// Directory in which the staging folder is created: the destination's parent, or itself.
    pub(crate) base: Dir,
    /// Name of the run's staging folder in `base`.
    pub(crate) folder: OsString,
    /// True if the folder lies inside the destination, which cannot be renamed.
    pub(crate) inside: bool,
}

/// What is at the destination, the staging folder not counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Occupied {
    /// Nothing.
    Absent,
    /// An empty directory.
    Empty { inode: u64, mode: u32 },
    /// A directory with entries, one of them named.
    Full { inode: u64, mode: u32, entry: OsString },
}

impl Place {
    /// Resolves `out` and places the staging folder of the run.
    pub(crate) fn find(out: &Path, run_id: &str) -> Result<Place> {
        if run_id.len() < 16 || !run_id.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(Finding::new(codes::USAGE, "run id")
                .expected("16 or more hex digits", run_id)
                .into());
        }
        let run = &run_id[..16];
        refuse_address(out)?;
        let Some(target) = existing(out)? else {
            let parent = match out.parent() {
                Some(parent) if parent != Path::new("") => parent,
                _ => Path::new("."),
            };
            let name = out
                .file_name()
                .ok_or_else(|| Finding::new(codes::NO_SUCH_PATH, "the destination has no name").file(out))?;
            let parent = parent.canonicalize().at(parent, "the destination's parent directory")?;
            if !is_directory(&parent)? {
                return Err(not_a_directory(&parent));
            }
            return Self::beside(parent.join(name), &parent, name, run);
        };
        let (parent, name) = match (target.parent(), target.file_name()) {
            (Some(parent), Some(name)) => (parent.to_path_buf(), name.to_os_string()),
            _ => (target.clone(), OsString::new()),
        };
        // A working directory that is replaced is gone for whoever works there.
        let inside = parent == target
            || is_mount_root(&target, &parent, &name)?
            || !may_be_written(&parent)?
            || older::holds_working_directory(&target);
        if !inside {
            return Self::beside(target, &parent, &name, run);
        }
        let base = Dir::open(&target).at(&target, "cannot open")?;
        Ok(Place { out: target, name, base, folder: format!(".fastshard-{run}").into(), inside })
    }

    /// Staged in the hidden sibling of `name`; long names are cut so that it stays a valid file name.
    fn beside(out: PathBuf, parent: &Path, name: &OsStr, run: &str) -> Result<Place> {
        let base = Dir::open(parent).at(parent, "cannot open")?;
        let shown = &name.as_bytes()[..name.len().min(MAX_SHOWN)];
        let folder = [b".", shown, b".fastshard-", run.as_bytes()].concat();
        let folder = OsStr::from_bytes(&folder).to_os_string();
        Ok(Place { out, name: name.to_os_string(), base, folder, inside: false })
    }

    /// True if the staging folder is that of the run with this digest.
    pub(crate) fn is_of(&self, digest: &str) -> bool {
        let run = digest.as_bytes().get(..16);
        run.is_some_and(|run| self.folder.as_bytes().ends_with(&[b".fastshard-", run].concat()))
    }

    /// Path of the staging folder.
    pub(crate) fn folder_path(&self) -> PathBuf {
        self.base.join(&self.folder)
    }

    /// The destination itself, opened; `None` if it is not there.
    pub(crate) fn open_out(&self) -> Result<Option<Dir>> {
        if self.inside {
            return Dir::open(&self.out).at(&self.out, "cannot open").map(Some);
        }
        match self.base.stat(&self.name).at(&self.out, "cannot stat")? {
            None => Ok(None),
            Some(stat) if !FileType::from_raw_mode(stat.st_mode).is_dir() => Err(not_a_directory(&self.out)),
            Some(_) => self.base.sub(&self.name).at(&self.out, "cannot open").map(Some),
        }
    }

    /// Looks at the destination.
    pub(crate) fn occupied(&self) -> Result<Occupied> {
        let Some(out) = self.open_out()? else { return Ok(Occupied::Absent) };
        let meta = out.meta().at(&self.out, "cannot stat")?;
        let (inode, mode) = (meta.st_ino, meta.st_mode);
        let entries = out.entries().at(&self.out, "cannot list")?;
        let mut others = entries.into_iter().filter(|e| !self.is_own(e));
        Ok(match others.next() {
            Some(entry) => Occupied::Full { inode, mode, entry },
            None => Occupied::Empty { inode, mode },
        })
    }

    /// The entry of the destination that is the staging folder.
    pub(crate) fn own(&self) -> Option<&OsStr> {
        self.inside.then_some(&*self.folder)
    }

    /// True for entries of the destination that are this program's: the staging folder, and that in which ranks meet.
    pub(crate) fn is_own(&self, entry: &OsStr) -> bool {
        self.inside && (entry == self.folder || entry == MEETING)
    }

    /// The entry of the base in which ranks of a run towards this destination meet, whatever the run.
    pub(crate) fn meeting_name(&self) -> OsString {
        if self.inside {
            return MEETING.into();
        }
        let shown = &self.name.as_bytes()[..self.name.len().min(MAX_SHOWN)];
        OsStr::from_bytes(&[b".", shown, MEETING.as_bytes()].concat()).to_os_string()
    }

    /// True if the staging folder has all of the destination's name.
    pub(crate) fn is_named_whole(&self) -> bool {
        self.name.len() <= MAX_SHOWN
    }
}

/// Refuses the address of a store.
fn refuse_address(out: &Path) -> Result<()> {
    let text = out.to_string_lossy();
    let scheme = text.split_once(":/").map_or("", |(scheme, _)| scheme);
    // Python's paths have one slash where the address has two.
    if scheme.len() < 2 || !scheme.bytes().all(|b| b.is_ascii_alphanumeric()) || out.exists() {
        return Ok(());
    }
    Err(Finding::new(codes::UNSUPPORTED, "only `merge` and `convert` publish results in stores")
        .file(out)
        .expected("a path on this machine", format!("an address of {scheme}://"))
        .help("write the result here, then copy the folder; fastshard.manifest.json goes along")
        .into())
}

/// `out` with links resolved if something is there; it has to be a directory.
fn existing(out: &Path) -> Result<Option<PathBuf>> {
    match out.canonicalize() {
        Ok(target) => match is_directory(&target)? {
            true => Ok(Some(target)),
            false => Err(not_a_directory(out)),
        },
        Err(e) if e.kind() == io::ErrorKind::NotFound => match std::fs::symlink_metadata(out) {
            Ok(_) => Err(Finding::new(codes::NO_SUCH_PATH, "a symbolic link to a path that does not exist")
                .file(out)
                .help("create the directory it names, or choose another destination")
                .into()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e).at(out, "cannot stat"),
        },
        Err(e) => Err(e).at(out, "cannot resolve the destination"),
    }
}

fn is_directory(path: &Path) -> Result<bool> {
    std::fs::metadata(path).at(path, "cannot stat").map(|meta| meta.is_dir())
}

fn not_a_directory(path: &Path) -> crate::error::Error {
    Finding::new(codes::OUT_EXISTS, "exists and is not a directory")
        .file(path)
        .help("choose another destination; fastshard does not replace a file")
        .into()
}

/// True if `path` is where a filesystem or a bind mount begins.
fn is_mount_root(path: &Path, parent: &Path, name: &OsStr) -> Result<bool> {
    #[cfg(test)]
    if super::fault::lacking("replacing").is_err() {
        return Ok(true);
    }
    Dir::open(parent).and_then(|parent| parent.is_mount(name)).at(path, "cannot stat")
}

fn may_be_written(directory: &Path) -> Result<bool> {
    match writable(directory) {
        Err(e)
            if [io::ErrorKind::PermissionDenied, io::ErrorKind::ReadOnlyFilesystem].contains(&e.kind()) =>
        {
            Ok(false)
        }
        done => done.at(directory, "cannot look at").map(|()| true),
    }
}

/// Checks that entries of a directory may be created and removed.
pub(crate) fn writable(directory: &Path) -> io::Result<()> {
    Ok(rustix::fs::access(directory, Access::WRITE_OK | Access::EXEC_OK)?)
}
