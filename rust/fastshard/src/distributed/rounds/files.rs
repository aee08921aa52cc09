//! The files of a round: moved into a directory that nobody else has opened, and copied if somebody may still
//! write to them.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;

use rustix::fs::FileType;

use super::super::member;
use super::Shared;
use crate::codes;
use crate::error::{Finding, Result};
use crate::publish::disk::{self, At, Dir};
use crate::publish::folder::{entries, is_data};

/// Number of times that older folders are emptied, because another process may be moving files as well.
const TIMES: usize = 100;

impl Shared {
    /// Moves all files into a directory that nobody holds, and removes their old directories.
    pub(super) fn gather(&self, number: u32, data: &str) -> Result<()> {
        let path = self.folder.join(data);
        self.folder.create_dir(OsStr::new(data), disk::BY_UMASK).at(&path, "cannot create")?;
        let to = self.folder.sub(OsStr::new(data)).at(&path, "cannot open")?;
        for _ in 0..TIMES {
            let older: Vec<String> =
                entries(&self.folder)?.into_iter().filter(|name| is_data(name) && name != data).collect();
            if older.is_empty() {
                return to.sync().at(&path, "cannot bring to disk");
            }
            // A later round makes its directory after its claim: without one, what was listed is of earlier ones.
            self.refuse_later(number)?;
            for name in older {
                let from = match self.folder.sub(OsStr::new(&name)) {
                    Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                    from => from.at(&self.folder.join(&name), "cannot open")?,
                };
                move_all(&from, &to)?;
                remove_emptied(&self.folder, OsStr::new(&name))?;
            }
        }
        Err(Finding::new(codes::LOCKED, "another process moves files of this run about")
            .file(self.folder.path())
            .into())
    }

    /// Copies the files that another process may still have open: those in `renewed`, and those that have
    /// another name too.
    pub(super) fn renew(&self, data: &str, renewed: &mut BTreeSet<u32>) -> Result<()> {
        let data_dir = self.folder.sub(OsStr::new(data)).at(&self.folder.join(data), "cannot open")?;
        for (file, (name, _)) in (0u32..).zip(&self.run.files) {
            let (folder, last) = match data_dir.folder_of(name, false) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                found => found.at(&data_dir.join(name), "cannot open the folder of")?,
            };
            // One that has another name too is somebody's file as well.
            if folder.is_linked(last).at(&folder.join(last), "cannot stat")? {
                renewed.insert(file);
            }
            if renewed.contains(&file) && folder.has(last).at(&folder.join(last), "cannot stat")? {
                member::renew(&folder, last)?;
            }
        }
        Ok(())
    }
}

fn move_all(from: &Dir, to: &Dir) -> Result<()> {
    for name in from.entries().at(from.path(), "cannot list")? {
        let path = from.join(&name);
        let Some(stat) = from.stat(&name).at(&path, "cannot stat")? else { continue };
        if FileType::from_raw_mode(stat.st_mode).is_dir() {
            match to.create_dir(&name, disk::BY_UMASK) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                created => created.at(&to.join(&name), "cannot create")?,
            }
            let (from, to) = (
                from.sub(&name).at(&path, "cannot open")?,
                to.sub(&name).at(&to.join(&name), "cannot open")?,
            );
            move_all(&from, &to)?;
        } else {
            match from.rename_over(&name, to, &name) {
                // Somebody who takes over the run as well was faster.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                moved => moved.at(&path, "cannot move")?,
            }
        }
    }
    Ok(())
}

/// Removes a directory that contains only directories; one that has received something meanwhile stays.
fn remove_emptied(base: &Dir, name: &OsStr) -> Result<()> {
    let path = base.join(name);
    let directory = match base.sub(name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        directory => directory.at(&path, "cannot open")?,
    };
    for entry in directory.entries().at(&path, "cannot list")? {
        let stat = directory.stat(&entry).at(&path, "cannot stat")?;
        if stat.is_some_and(|s| FileType::from_raw_mode(s.st_mode).is_dir()) {
            remove_emptied(&directory, &entry)?;
        }
    }
    match base.remove_dir(name) {
        Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => removed.at(&path, "cannot remove"),
    }
}
