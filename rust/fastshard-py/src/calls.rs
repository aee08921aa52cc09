//! Long calls: on a thread of their own, without the GIL, interruptible, with progress.

use std::sync::atomic::Ordering;
use std::sync::{mpsc, Arc};
use std::time::Duration;

use fastshard::engine::Control;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// How often Python gets to look at signals and to draw progress.
const POLL: Duration = Duration::from_millis(100);

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
    let (sender, receiver) = mpsc::channel();
    let shared = Arc::clone(&control);
    let thread = std::thread::spawn(move || {
        // The receiver is gone only if this frame is, and then nobody wants the result.
        let _ = sender.send(work(&shared));
    });
    let mut stopped: Option<PyErr> = None;
    let result = loop {
        // `Receiver` is not Sync; the loop owns it and lends it for the wait alone.
        let (received, back) = py.detach({
            let waiting = Waiting(&receiver);
            move || (waiting.wait(), ())
        });
        let () = back;
        match received {
            Ok(result) => break Some(result),
            Err(mpsc::RecvTimeoutError::Disconnected) => break None,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if stopped.is_none() {
            let drawn = match &progress {
                Some(callback) => {
                    let done = control.done.load(Ordering::Relaxed);
                    let total = control.total.load(Ordering::Relaxed);
                    callback.call1(py, (done, total)).map(|_| ())
                }
                None => Ok(()),
            };
            if let Err(error) = py.check_signals().and(drawn) {
                control.cancel.store(true, Ordering::Relaxed);
                stopped = Some(error);
            }
        }
    };
    let panicked = py.detach(|| thread.join().is_err());
    match (result, stopped) {
        (Some(result), None) => {
            if let Some(callback) = &progress {
                let total = control.total.load(Ordering::Relaxed);
                callback.call1(py, (total, total))?;
            }
            Ok(result)
        }
        (_, Some(error)) => Err(error),
        (None, None) => {
            debug_assert!(panicked);
            Err(PyRuntimeError::new_err("a worker panicked: this is a bug in fastshard; nothing was published"))
        }
    }
}

struct Waiting<'a, T>(&'a mpsc::Receiver<T>);

// SAFETY: `run` blocks in `detach` until the closure returns, so exactly one thread uses the receiver.
#[allow(unsafe_code)]
unsafe impl<T: Send> Send for Waiting<'_, T> {}

impl<T> Waiting<'_, T> {
    fn wait(self) -> Result<T, mpsc::RecvTimeoutError> {
        self.0.recv_timeout(POLL)
    }
}
