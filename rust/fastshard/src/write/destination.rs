//! A store that a result is published in, whatever the store is.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::Path;

use super::file_parts::FileParts;
use crate::error::Result;

/// A prefix of a store that belongs to one run. Several threads use it at once.
///
/// Objects appear one by one under their final names, and the one that readers start from is the last: until it is there
/// nobody takes what lies there for a result.
pub trait Destination: Debug + Send + Sync {
    /// Names the objects that an earlier run of the same plan has completed, each with what was recorded of its content.
    ///
    /// # Errors
    /// What keeps the store from being read.
    fn list_complete(&self) -> Result<BTreeMap<String, String>>;

    /// Uploads the object `name`; returns once the store has it. Nothing appears under the name if it fails.
    ///
    /// # Errors
    /// What the store or the parts report.
    fn upload(&self, name: &str, parts: FileParts) -> Result<()>;

    /// Records that an object is complete, with what there is to know of its content.
    ///
    /// # Errors
    /// What the store reports.
    fn record(&self, name: &str, content: &str) -> Result<()>;

    /// Refuses to go on unless the prefix has exactly `files` (name and size in bytes), and still belongs to this run.
    ///
    /// # Errors
    /// What differs; what the store reports.
    fn check(&self, files: &[(&str, u64)]) -> Result<()>;

    /// Puts the small file at `path` under a name that nothing has yet.
    ///
    /// # Errors
    /// `FS504` if something has it; what the store reports.
    fn put_last(&self, name: &str, path: &Path) -> Result<()>;
}
