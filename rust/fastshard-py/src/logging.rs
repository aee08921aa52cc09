//! The core's log, in Python's logging where that has a listener.
//!
//! Threads of the core keep records for the caller's thread, which hands them on whenever it has the GIL: a thread that logs
//! may have a lock that the caller waits for, so it must not wait for the caller.

use std::sync::{Mutex, PoisonError};

use fastshard::topics;
use log::{LevelFilter, Log, Metadata, Record};
use pyo3::intern;
use pyo3::prelude::*;

/// The level DEBUG of Python's logging.
const DEBUG: u8 = 10;

/// Records that Python has not got yet: logger and message of each.
struct Records(Mutex<Vec<(String, String)>>);

static RECORDS: Records = Records(Mutex::new(Vec::new()));

impl Log for Records {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        topics::ALL.contains(&metadata.target())
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let message = record.args().to_string();
            let mut records = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            records.push((record.target().to_string(), message));
        }
    }

    fn flush(&self) {}
}

/// Takes the core's records from here on; none before [`follow_level`] finds a listener.
pub(crate) fn begin() {
    // A second interpreter of the process has the same records.
    let _ = log::set_logger(&RECORDS);
}

/// Has the core log if some topic has a listener. A program that does not import logging has none.
pub(crate) fn follow_level(py: Python<'_>) -> PyResult<()> {
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    let mut level = LevelFilter::Off;
    if let Ok(logging) = modules.get_item(intern!(py, "logging")) {
        for topic in topics::ALL {
            let logger = logging.call_method1(intern!(py, "getLogger"), (topic,))?;
            if logger.call_method1(intern!(py, "isEnabledFor"), (DEBUG,))?.is_truthy()? {
                level = LevelFilter::Debug;
            }
        }
    }
    log::set_max_level(level);
    Ok(())
}

/// Hands on the records so far.
pub(crate) fn pass_records(py: Python<'_>) -> PyResult<()> {
    let records = std::mem::take(&mut *RECORDS.0.lock().unwrap_or_else(PoisonError::into_inner));
    if records.is_empty() {
        return Ok(());
    }
    let logging = py.import(intern!(py, "logging"))?;
    for (logger, message) in records {
        let logger = logging.call_method1(intern!(py, "getLogger"), (logger,))?;
        logger.call_method1(intern!(py, "log"), (DEBUG, "%s", message))?;
    }
    Ok(())
}
