//! Publishing: a result is written beside its destination and appears there whole or not at all.
//!
//! ```text
//!             begin                 seal                 rename              clean up
//!  (nothing) -------> open folder -------> sealed folder -------> result at OUT -------> (nothing else)
//!                     |   ^   |               |     ^                 |
//!              discard|   |   |process died   |     |process died     |process died before the
//!                     v   +---+ begin(resume) |     |or conflict      |clean-up: begin(resume),
//!                 (nothing)                   +-----+ begin(resume)   +publish cleans up
//! ```
//!
//! The staging folder holds `lock` (flock of the live process), `plan` (what is being written),
//! `journal` (what is already done), `data/` (the result as it will appear) and, from the moment on
//! which the result is complete and on disk, `sealed` (what publishing still has to do). Sealing is
//! the point of no return: a sealed run is only ever rolled forward, so that whoever resumes it calls
//! [`Staging::publish`] at once. The folder is created exclusively, which decides between two runs of
//! the same plan; its `sealed` file is removed last, so that a clean-up cut short is recognised.
//!
//! | OUT at the start       | how the result appears                                                 |
//! |------------------------|------------------------------------------------------------------------|
//! | absent                 | one rename that replaces nothing                                       |
//! | an empty directory     | one rename over it; its mode is kept                                   |
//! | an older result, `overwrite` | one exchange, then the older result is removed; see below         |
//! | a mount point, the working directory, or in a directory that may not be written | staged inside OUT: files are moved one by one, the pointer files last |
//!
//! What each sync is for, of a run that ends before it has recorded anything:
//!
//! | synced                      | or a power failure                                                   |
//! |-----------------------------|----------------------------------------------------------------------|
//! | each file, with its times   | leaves a complete result with other bytes, or that its manifest disowns |
//! | the data directory          | leaves a result that lacks files                                       |
//! | `sealed` and the folder     | leaves a result at OUT of which nobody knows that it is complete       |
//! | the destination's directory | takes a result back whose run has ended well                           |
//!
//! Where something is at OUT the destination's directory is synced before the exchange too: the older result goes through
//! the folder. A run that records what is done syncs plan and folder before its first record, then data, then the journal. The
//! plan is removed with the sync of the seal: one that outlived it would look like that of a run that has made nothing yet.
//!
//! `overwrite` replaces an older result and nothing else: its manifest must account for all that is there,
//! unedited ([`older`]). That is asked before anything is written, again before the exchange, and of each
//! file that is removed afterwards; what came meanwhile is kept, and named ([`kept`]).
//!
//! Where the filesystem cannot exchange (NFS), the old tree is moved into the staging folder and the
//! new one to OUT: a crash between the two leaves OUT absent and both trees whole in the folder;
//! `begin` with `resume` and `publish` finish it. Where the directory cannot be moved at all (it belongs to
//! a lower layer of overlayfs), the older result's files are removed from OUT, its manifest first, and the new
//! ones moved in, their pointers last; the seal says so, and a crash on the way is finished likewise. [`Staging::forecast`]
//! tells of it before the work.
//!
//! The staging folder is its owner's alone (mode 0700) and is reached through held descriptors, no link in
//! it followed; one that somebody else could have written to is refused.
//!
//! Limits: where `flock` is not supported (some Lustre mounts) the exclusive creation of the folder
//! is the only guard, so that two processes must not resume one run. Errors that NFS reports only at
//! `close` are seen through `fsync`, which network filesystems get in any case.

pub mod clock;
pub(crate) mod content;
pub(crate) mod direct;
pub(crate) mod disk;
mod extents;
#[cfg(test)]
pub(crate) mod fault;
pub(crate) mod file;
pub(crate) mod folder;
pub mod gc;
pub(crate) mod journal;
mod kept;
mod lock;
pub(crate) mod mounts;
mod older;
pub(crate) mod others;
pub(crate) mod place;
mod preflight;
pub(crate) mod process;
mod refusal;
mod rename;
pub(crate) mod seal;
mod staging;
pub mod stored;
#[cfg(test)]
mod tests;

use serde::Deserialize;

pub use crate::manifest::is_plain;
pub use content::hash_of_file;
pub use direct::Io;
pub use file::{OutFile, Space};
pub use journal::Journal;
pub use mounts::describe_storage;
pub use preflight::{preflight, preflight_part, Needs};
pub use process::Process;
pub use staging::{waits_sealed, Staging};

/// The caller's options for writing and publishing a result, read by the names of their fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Replace a destination that is not empty. The old content stays until the new result is in place.
    pub overwrite: bool,
    /// Continue an interrupted run of the same plan, if there is one.
    pub resume: bool,
    /// Sync everything to disk before it appears; without it, a power failure may lose a published result.
    pub fsync: bool,
    /// Leave holes for zeros in the result; then no space is reserved for it.
    pub sparse: bool,
    /// The way in which data files are written.
    pub io: Io,
    /// Put statistics of each tensor into the manifest.
    pub stats: bool,
}

impl Options {
    /// The options of a caller who chooses none.
    pub const DEFAULT: Options =
        Options { overwrite: false, resume: false, fsync: true, sparse: false, io: Io::Auto, stats: false };

    /// Whether bytes of data files are reserved before they are written.
    pub fn space(&self) -> Space {
        match self.sparse {
            true => Space::Sparse,
            false => Space::Reserved,
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Options::DEFAULT
    }
}
