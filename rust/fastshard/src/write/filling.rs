//! A run with its staging folder: what those share who fill it.

use super::options::Run;
use super::uploads::Uploads;
use crate::distributed::prior::Prior;
use crate::publish::Staging;

/// A run in its staging folder.
pub(super) struct Filling<'a> {
    pub(super) run: &'a Run<'a>,
    pub(super) staging: &'a Staging,
    /// What parts of the run have made before.
    pub(super) prior: Option<&'a Prior>,
    /// The uploads of a result that is published in a store.
    pub(super) uploads: Option<&'a Uploads>,
}
