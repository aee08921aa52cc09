//! Which results the staging folder of a run that is over holds: the newer one, and the older one that it replaces.

use std::ffi::OsStr;
use std::path::PathBuf;

use super::disk::{At, Dir};
use super::folder::OLD;
use super::older;
use super::place::Place;
use super::seal::{subdirectory, Seal};
use crate::error::Result;

/// Which of two results towards one destination it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// What was at the destination before the run.
    Older,
    /// What the run has made.
    Newer,
}

/// A result that lies in a staging folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Its directory.
    pub path: PathBuf,
    /// Which one it is.
    pub version: Version,
    /// True if all of it is there, so that it can be taken as it is.
    pub is_complete: bool,
}

/// The results in the folder of a run that was sealed; none where nothing but its clean-up is left.
///
/// Errors: what the system says of entries that cannot be looked at.
pub(super) fn results(place: &Place, folder: &Dir, seal: &Seal) -> Result<Vec<Stored>> {
    let mut results = Vec::new();
    for name in [&*seal.data, OLD] {
        let Some(directory) = subdirectory(folder, name)? else { continue };
        // After an exchange the older result has the name of the newer one.
        let is_newer = name != OLD && seal.is_in(folder, place.inside)?;
        let (version, is_complete) = match is_newer {
            true => (Version::Newer, seal.is_of_this_boot() && seal.all_wait(&directory)?),
            false => (Version::Older, older::is_complete(&directory)?),
        };
        if is_complete || !directory.entries().at(directory.path(), "cannot list")?.is_empty() {
            results.push(Stored { path: folder.join(OsStr::new(name)), version, is_complete });
        }
    }
    Ok(results)
}
