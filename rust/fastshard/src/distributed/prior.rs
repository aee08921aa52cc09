//! The work of finished processes, as the one that concludes their run takes it over.

use std::collections::BTreeSet;

use super::member::Log;
use crate::engine::Evidence;
use crate::manifest::Provenance;
use crate::write::records::TileJournal;

/// The work of others, for the one that concludes the run.
pub(crate) struct Prior {
    pub(super) logs: Vec<Log>,
    pub(super) adopted: BTreeSet<String>,
    pub(crate) evidence: Vec<Evidence>,
    pub(crate) sizes: Vec<u64>,
    /// Files that need no more writing.
    pub(crate) complete: Vec<bool>,
    pub(crate) provenance: Provenance,
}

impl Prior {
    /// Lists the journals of all who wrote.
    pub(crate) fn list_journals(&self) -> Vec<TileJournal<'_>> {
        let tile_journal = |log| -> TileJournal<'_> {
            let log: &Log = log;
            TileJournal { journal: &log.journal, adopted: self.adopted.contains(&log.nonce) }
        };
        self.logs.iter().map(tile_journal).collect()
    }
}
