//! Long calls: on a thread of their own, without the GIL, interruptible, with progress.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use fastshard::engine::Control;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// How often Python gets to look at signals and to draw progress.
const POLL: Duration = Duration::from_millis(20);

/// Wakes the waiting caller when the worker ends, by a panic too.
struct Ending<'a>(&'a Condvar);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.notify_all();
    }
}

/// Runs `work` on a thread and returns its result.
///
/// `progress` is called with (bytes done, bytes in all). A signal handler that raises, or a progress
/// callback that raises, cancels the work; the exception is raised once the work has stopped.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    work: impl FnOnce(&Control) -> T + Send + 'static,
) -> PyResult<T> {
    let control = Arc::new(Control::default());
    let slot: Arc<(Mutex<Option<T>>, Condvar)> = Arc::new((Mutex::new(None), Condvar::new()));
    let thread = std::thread::spawn({
        let (control, slot) = (Arc::clone(&control), Arc::clone(&slot));
        move || {
            let _ending = Ending(&slot.1);
            let result = work(&control);
            *slot.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        }
    });
    let mut stopped: Option<PyErr> = None;
    loop {
        let ended = py.detach(|| {
            let guard = slot.0.lock().unwrap_or_else(PoisonError::into_inner);
            if guard.is_some() {
                return true;
            }
            let (guard, _) = slot.1.wait_timeout(guard, POLL).unwrap_or_else(PoisonError::into_inner);
            guard.is_some() || thread.is_finished()
        });
        if ended {
            break;
        }
        if stopped.is_none() {
            let drawn = match &progress {
                Some(callback) => match control.total.load(Ordering::Relaxed) {
                    // Not begun: there is nothing yet to be a part of.
                    0 => Ok(()),
                    total => callback.call1(py, (control.done.load(Ordering::Relaxed), total)).map(|_| ()),
                },
                None => Ok(()),
            };
            if let Err(error) = py.check_signals().and(drawn) {
                control.cancel.store(true, Ordering::Relaxed);
                stopped = Some(error);
            }
        }
    }
    // A panic has been printed by the thread already; here it becomes an exception.
    let _ = py.detach(|| thread.join());
    let result = slot.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    match (result, stopped) {
        (Some(result), None) => {
            if let Some(callback) = &progress {
                let total = control.total.load(Ordering::Relaxed);
                // The work is done and perhaps published: a callback that raises now cannot undo it.
                if let Err(error) = callback.call1(py, (total, total)) {
                    error.write_unraisable(py, None);
                }
            }
            Ok(result)
        }
        (_, Some(error)) => Err(error),
        (None, None) => Err(PyRuntimeError::new_err(
            "a worker panicked: this is a bug in fastshard; nothing was published",
        )),
    }
}
