//! Processes, told apart from those that had the same number before.

use fastshard::publish::Process;
use pyo3::prelude::*;

/// Returns the identity of this process as JSON, for [`is_process_dead`].
#[pyfunction]
pub(crate) fn identify_process() -> PyResult<String> {
    crate::to_json(&Process::own())
}

/// Returns True if a process has certainly ended, and its description for people.
///
/// One of another machine, or one that is not visible here, may be alive.
#[pyfunction]
pub(crate) fn is_process_dead(identity: &str) -> (bool, String) {
    let process: Process = serde_json::from_str(identity).unwrap_or_default();
    (process.is_dead(), process.describe())
}
