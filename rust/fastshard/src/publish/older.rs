//! What may be replaced: an older result whose manifest accounts for all that lies in its directory.
//!
//! Whatever the manifest does not name, and what was changed since it was written, is somebody's work. It
//! is found before anything is written, again before the exchange, and a third time where the older
//! result is taken away: file by file, each only if it is still what the manifest says.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use rustix::fs::{FileType, Stat};

use super::disk::{At, Dir};
use crate::error::Result;
use crate::manifest::{Manifest, ManifestFile, MANIFEST_NAME};
use crate::memory;

/// Deepest folder looked into; what lies deeper was not written by this program.
const MAX_DEPTH: usize = 64;
/// Entries named in a message; the rest is counted.
const NAMED: usize = 12;

/// What lies in a directory besides the result that its manifest names.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Besides {
    /// Why nothing at all is accounted for: no manifest, or not one of a result.
    pub(super) no_result: Option<String>,
    /// Entries that the manifest does not name.
    foreign: Vec<String>,
    /// Files that are not what the manifest says.
    changed: Vec<String>,
}

impl Besides {
    /// True if removing the directory's content loses nothing but the older result.
    pub(super) fn is_nothing(&self) -> bool {
        *self == Besides::default()
    }

    /// Describes what would be lost.
    pub(super) fn describe(&self) -> String {
        let mut parts = Vec::new();
        for (entries, what) in
            [(&self.foreign, ""), (&self.changed, " (not as it was written: content, size or time)")]
        {
            parts.extend(entries.iter().take(NAMED).map(|name| format!("{name}{what}")));
            if let Some(more) = entries.len().checked_sub(NAMED).filter(|n| *n > 0) {
                parts.push(format!("{more} more{what}"));
            }
        }
        parts.join(", ")
    }
}

/// What readers leave behind in a folder that they load from: nobody's work.
fn is_leaving(path: &str, kind: FileType) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    // A file that was removed while a client of NFS had it open.
    let nfs = |id: &str| id.len() >= 8 && id.bytes().all(|b| b.is_ascii_hexdigit());
    match kind {
        FileType::Directory => path == ".cache/huggingface" || name == "__pycache__",
        FileType::RegularFile => path == ".gitattributes" || name.strip_prefix(".nfs").is_some_and(nfs),
        _ => false,
    }
}

/// The files of the result that a directory holds, by path; in words why there is none.
fn recorded(directory: &Dir) -> Result<std::result::Result<BTreeMap<String, ManifestFile>, String>> {
    let path = directory.join(MANIFEST_NAME);
    let Some(stat) = directory.stat(OsStr::new(MANIFEST_NAME)).at(&path, "cannot stat")? else {
        return Ok(Err(format!("it has no {MANIFEST_NAME}")));
    };
    if !FileType::from_raw_mode(stat.st_mode).is_file() {
        return Ok(Err("its manifest is not a regular file".into()));
    }
    directory.read_only(MANIFEST_NAME).and_then(Manifest::published_files).at(&path, "cannot read")
}

/// Looks at all that lies in `directory` but the entry `except` (a staging folder).
///
/// Errors: what the system says of entries that cannot be looked at.
pub(super) fn besides(directory: &Dir, except: Option<&OsStr>) -> Result<Besides> {
    let files = match recorded(directory)? {
        Ok(files) => files,
        Err(why) => {
            let entries = directory.entries().at(directory.path(), "cannot list")?;
            let foreign = entries.into_iter().filter(|e| Some(&**e) != except);
            let foreign = foreign.map(|e| e.to_string_lossy().into_owned()).collect();
            return Ok(Besides { no_result: Some(why), foreign, changed: Vec::new() });
        }
    };
    let mut walk = Walk { folders: folders(&files), files: &files, found: Besides::default() };
    walk.look(directory, "", except, 0)?;
    Ok(walk.found)
}

/// True if a directory holds all files of the result that its manifest names.
pub(super) fn is_complete(directory: &Dir) -> Result<bool> {
    let Ok(files) = recorded(directory)? else { return Ok(false) };
    for (name, file) in &files {
        let path = directory.join(name);
        let stat = match directory.folder_of(name, false) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            found => found.and_then(|(folder, last)| folder.stat(last)).at(&path, "cannot stat")?,
        };
        if stat.is_none_or(|stat| stat.st_size as u64 != file.size) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Folders that hold files of the result.
fn folders(files: &BTreeMap<String, ManifestFile>) -> BTreeSet<&str> {
    files.keys().flat_map(|name| name.match_indices('/').map(|(end, _)| &name[..end])).collect()
}

struct Walk<'a> {
    files: &'a BTreeMap<String, ManifestFile>,
    folders: BTreeSet<&'a str>,
    found: Besides,
}

impl Walk<'_> {
    fn look(&mut self, directory: &Dir, prefix: &str, except: Option<&OsStr>, depth: usize) -> Result<()> {
        for name in directory.entries().at(directory.path(), "cannot list")? {
            if Some(&*name) == except {
                continue;
            }
            let path = format!("{prefix}{}", name.to_string_lossy());
            match self.kind(directory, &name, &path)? {
                Entry::Result | Entry::Leaving | Entry::Gone => {}
                Entry::Folder if depth < MAX_DEPTH => {
                    let sub = directory.sub(&name).at(&directory.join(&name), "cannot open")?;
                    self.look(&sub, &format!("{path}/"), None, depth + 1)?;
                }
                Entry::Folder | Entry::Foreign => self.found.foreign.push(path),
                Entry::Changed => self.found.changed.push(path),
            }
        }
        Ok(())
    }

    fn kind(&self, directory: &Dir, name: &OsStr, path: &str) -> Result<Entry> {
        let full = directory.join(name);
        let Some(stat) = directory.stat(name).at(&full, "cannot stat")? else {
            return Ok(Entry::Gone);
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        // A folder of the result is walked, and so looked at level by level; a leaving is not.
        let leaving = is_leaving(path, kind);
        let mounted = match (kind.is_dir(), leaving) {
            (false, _) => false,
            (true, true) => holds_mount(directory, name, MAX_DEPTH).at(&full, "cannot look into")?,
            (true, false) => directory.is_mount(name).at(&full, "cannot stat")?,
        };
        if mounted {
            return Ok(Entry::Foreign);
        }
        if path == MANIFEST_NAME && kind.is_file() {
            return Ok(Entry::Result);
        }
        if leaving {
            return Ok(Entry::Leaving);
        }
        if kind.is_dir() {
            // `.cache` is on the way to a leaving.
            return Ok(match self.folders.contains(path) || path == ".cache" {
                true => Entry::Folder,
                false => Entry::Foreign,
            });
        }
        // A name that is no text is in no manifest, though it may look like one that is.
        let Some(file) = name.to_str().and_then(|_| self.files.get(path)).filter(|_| kind.is_file()) else {
            return Ok(Entry::Foreign);
        };
        Ok(match is_as_written(directory, name, file, &stat).at(&full, "cannot read")? {
            true => Entry::Result,
            false => Entry::Changed,
        })
    }
}

/// True if something is mounted on the directory `name`, or below it. Deeper than `depth` nobody looks.
fn holds_mount(parent: &Dir, name: &OsStr, depth: usize) -> io::Result<bool> {
    if depth == 0 || parent.is_mount(name)? {
        return Ok(true);
    }
    let directory = parent.sub(name)?;
    for entry in directory.entries()? {
        let stat = directory.stat(&entry)?;
        let is_dir = stat.is_some_and(|s| FileType::from_raw_mode(s.st_mode).is_dir());
        if is_dir && holds_mount(&directory, &entry, depth - 1)? {
            return Ok(true);
        }
    }
    Ok(false)
}

enum Entry {
    /// Not there any more.
    Gone,
    /// A file of the result, as it was written.
    Result,
    /// A file of the result that was changed since.
    Changed,
    /// Of no value to anybody.
    Leaving,
    /// A folder that holds files of the result.
    Folder,
    /// Anything else.
    Foreign,
}

/// Time of the last change of a file's content, in nanoseconds since the epoch.
pub(super) fn mtime_ns(stat: &Stat) -> i64 {
    stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(stat.st_mtime_nsec as i64)
}

/// True if a file is the one that the manifest tells of: by content where its hash is recorded, else by
/// size and time.
fn is_as_written(directory: &Dir, name: &OsStr, file: &ManifestFile, stat: &Stat) -> io::Result<bool> {
    if stat.st_size as u64 != file.size {
        return Ok(false);
    }
    match (&file.blake3, file.mtime_ns) {
        (Some(hash), _) => Ok(hash_of(directory.read_only(name)?)? == *hash),
        (None, Some(time)) => Ok(mtime_ns(stat) == time),
        (None, None) => Ok(false),
    }
}

/// BLAKE3 of a file's bytes, hexadecimal.
pub(super) fn hash_of(mut file: File) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = memory::allocate(256 << 10)?;
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finalize().to_hex().to_string()),
            n => hasher.update(&buffer[..n]),
        };
    }
}

/// What became of an older result that was to be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Removed {
    /// It is gone.
    Whole,
    /// `go_on` said no; what is left can be removed by another call.
    Stopped,
    /// Something that it did not hold before lies in it, and stays.
    NotAll,
}

/// Removes the older result `name` from `parent`, if its manifest accounts for all that lies in it; else it
/// stays whole. Of what comes while it is removed nothing goes. The manifest goes last, so that a removal
/// that was cut short can be continued.
pub(super) fn remove(parent: &Dir, name: &OsStr, go_on: &dyn Fn() -> bool) -> Result<Removed> {
    let path = parent.join(name);
    let directory = match parent.sub(name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Removed::Whole),
        directory => directory.at(&path, "cannot open")?,
    };
    // Emptied by a removal that was cut short, or it was an empty folder.
    let empty = directory.entries().at(&path, "cannot list")?.is_empty();
    if !empty && !besides(&directory, None)?.is_nothing() {
        return Ok(Removed::NotAll);
    }
    let files = match recorded(&directory)? {
        Ok(files) => files,
        Err(_) if empty => BTreeMap::new(),
        Err(_) => return Ok(Removed::NotAll),
    };
    match clear(&directory, &files, go_on)? {
        Removed::Whole => {}
        left => return Ok(left),
    }
    directory.remove_file(MANIFEST_NAME).at(&directory.join(MANIFEST_NAME), "cannot remove")?;
    match parent.remove_dir(name) {
        Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(Removed::NotAll),
        done => done.at(&path, "cannot remove").map(|()| Removed::Whole),
    }
}

/// Removes what `files` accounts for from a directory, but its manifest.
pub(super) fn clear(
    directory: &Dir,
    files: &BTreeMap<String, ManifestFile>,
    go_on: &dyn Fn() -> bool,
) -> Result<Removed> {
    let walk = Walk { folders: folders(files), files, found: Besides::default() };
    let mut removal = Removal { walk, go_on, kept: false };
    Ok(match removal.below(directory, "", 0)? {
        false => Removed::Stopped,
        true if removal.kept => Removed::NotAll,
        true => Removed::Whole,
    })
}

struct Removal<'a> {
    walk: Walk<'a>,
    go_on: &'a dyn Fn() -> bool,
    /// Something stays.
    kept: bool,
}

impl Removal<'_> {
    /// Removes what may go below `directory`; false if it was told to stop.
    fn below(&mut self, directory: &Dir, prefix: &str, depth: usize) -> Result<bool> {
        for name in directory.entries().at(directory.path(), "cannot list")? {
            if !(self.go_on)() {
                return Ok(false);
            }
            let path = format!("{prefix}{}", name.to_string_lossy());
            let full = directory.join(&name);
            match self.walk.kind(directory, &name, &path)? {
                Entry::Result if path == MANIFEST_NAME => {}
                Entry::Gone => {}
                Entry::Result => directory.remove_file(&name).at(&full, "cannot remove")?,
                Entry::Leaving => directory.remove_tree(&name).at(&full, "cannot remove")?,
                Entry::Folder if depth < MAX_DEPTH => {
                    let sub = directory.sub(&name).at(&full, "cannot open")?;
                    if !self.below(&sub, &format!("{path}/"), depth + 1)? {
                        return Ok(false);
                    }
                    match directory.remove_dir(&name) {
                        Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => self.kept = true,
                        done => done.at(&full, "cannot remove")?,
                    }
                }
                Entry::Folder | Entry::Foreign | Entry::Changed => self.kept = true,
            }
        }
        Ok(true)
    }
}

/// True for the working directory of this process, or a directory that it lies in.
pub(super) fn holds_working_directory(directory: &Path) -> bool {
    std::env::current_dir().is_ok_and(|here| here.starts_with(directory))
}

/// True for a home directory, or a directory that one lies in.
pub(super) fn holds_home(directory: &Path) -> bool {
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let homes = users.lines().filter_map(|line| line.split(':').nth(5)).map(OsString::from);
    let own = std::env::var_os("HOME");
    homes
        .chain(own)
        .filter(|home| home != "/" && !home.is_empty())
        .any(|home| Path::new(&home).canonicalize().is_ok_and(|home| home.starts_with(directory)))
}
