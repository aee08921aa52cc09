//! Long calls: on a thread of their own, without the GIL, interruptible, with progress.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{sync_channel, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use fastshard::codes;
use fastshard::engine::Control;
use fastshard::error::{Error, Finding, Result};
use fastshard::steps::{self, Step};
use pyo3::prelude::*;

use crate::{findings, logging};

/// How often Python gets to look at signals and to draw progress.
const POLL: Duration = Duration::from_millis(20);

/// Wakes the waiting caller when the worker ends, by a panic too.
struct Ending<'a>(&'a Condvar);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.notify_all();
    }
}

/// How a piece of work ended.
pub(crate) struct Ended<T> {
    /// What it came to; `None` after a panic, which its thread has printed.
    result: Option<Result<T>>,
    /// What a signal handler or the progress callback raised meanwhile.
    stopped: Option<PyErr>,
}

/// Runs `work`, which changes nothing outside of its result, on a thread, and waits for its result.
///
/// A signal handler that raises ends the waiting at once: the thread goes on alone, and nobody gets its result.
pub(crate) fn compute<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    logging::follow_level(py)?;
    let (sender, mut receiver) = sync_channel(1);
    let started = Builder::new().spawn(move || drop(sender.send(work())));
    started.map_err(|error| crate::raise(Error::thread(&error)))?;
    loop {
        let received;
        (received, receiver) = py.detach(move || (receiver.recv_timeout(POLL), receiver));
        py.check_signals().and(logging::pass_records(py))?;
        match received {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(crate::raise(panicked(None).into())),
        }
    }
}

/// Runs `work` on a thread and waits for its end.
///
/// `progress` is called with (bytes done, bytes in all), at the end with all of them done. A signal
/// handler or a progress callback that raises cancels the work; what it raised is kept until the work
/// has stopped. It may have been done by then.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    work: impl FnOnce(&Control) -> Result<T> + Send + 'static,
) -> Ended<T> {
    run_telling(py, progress, None, work)
}

/// The same; `tell` is called with each finding that is to be said before the end.
pub(crate) fn run_telling<T: Send + 'static>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    tell: Option<Py<PyAny>>,
    work: impl FnOnce(&Control) -> Result<T> + Send + 'static,
) -> Ended<T> {
    let mut stopped: Option<PyErr> = logging::follow_level(py).err();
    let control = Arc::new(Control { cancel: stopped.is_some().into(), ..Control::default() });
    let slot: Arc<(Mutex<Option<Result<T>>>, Condvar)> = Arc::new((Mutex::new(None), Condvar::new()));
    let thread = Builder::new().spawn({
        let (control, slot) = (Arc::clone(&control), Arc::clone(&slot));
        move || {
            let _ending = Ending(&slot.1);
            let result = work(&control);
            *slot.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        }
    });
    let thread = match thread {
        Ok(thread) => thread,
        Err(error) => return Ended { result: Some(Err(Error::thread(&error))), stopped },
    };
    loop {
        let ended = py.detach(|| {
            let guard = slot.0.lock().unwrap_or_else(PoisonError::into_inner);
            if guard.is_some() {
                return true;
            }
            let (guard, _) = slot.1.wait_timeout(guard, POLL).unwrap_or_else(PoisonError::into_inner);
            guard.is_some() || thread.is_finished()
        });
        // Handlers run while the work stops too: a further signal may mean to end the process.
        let signals = py.check_signals();
        let drawn = match (&progress, &stopped, ended) {
            (Some(callback), None, false) => match control.total.load(Ordering::Relaxed) {
                // Not begun: there is nothing yet to be a part of.
                0 => Ok(()),
                total => callback.call1(py, (control.done.load(Ordering::Relaxed), total)).map(|_| ()),
            },
            _ => Ok(()),
        };
        let outcome = match (&tell, &stopped) {
            (Some(tell), None) => pass_notices(py, tell, &control),
            _ => Ok(()),
        };
        if let Err(error) = signals.and(drawn).and(outcome).and(logging::pass_records(py)) {
            control.cancel.store(true, Ordering::Relaxed);
            fastshard::storage::remote::interrupt(std::thread::current().id());
            if stopped.is_none() {
                py.detach(|| steps::reach(Step::Cancelled));
            }
            stopped.get_or_insert(error);
        }
        if ended {
            break;
        }
    }
    let _ = py.detach(|| thread.join());
    let result = slot.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let (Some(callback), Some(Ok(_)), None) = (&progress, &result, &stopped) {
        let total = control.total.load(Ordering::Relaxed);
        stopped = callback.call1(py, (total, total)).err();
    }
    Ended { result, stopped }
}

/// Runs short `work` on this thread without the GIL.
pub(crate) fn detach<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    logging::follow_level(py)?;
    let result = py.detach(work);
    logging::pass_records(py)?;
    Ok(result)
}

/// Hands on what is to be said by now.
fn pass_notices(py: Python<'_>, tell: &Py<PyAny>, control: &Control) -> PyResult<()> {
    let notices = std::mem::take(&mut *control.notices.lock().unwrap_or_else(PoisonError::into_inner));
    findings::list(notices).into_iter().try_for_each(|finding| tell.call1(py, (finding,)).map(|_| ()))
}

impl<T> Ended<T> {
    /// Collects what there is to say of a result at `out`, in case that the exception which [`Ended::settle`] raises
    /// does not: that it is published, or why not. `warnings` are those of a result.
    pub(crate) fn collect_findings(
        &self,
        out: &Path,
        warnings: impl FnOnce(&T) -> Vec<Finding>,
    ) -> Vec<Finding> {
        match &self.result {
            Some(Ok(result)) => {
                let mut findings =
                    vec![Finding::new(codes::PUBLISHED, "the result is complete here").file(out)];
                findings.extend(warnings(result));
                findings
            }
            Some(Err(error)) => error.findings().to_vec(),
            None => vec![panicked(Some(out))],
        }
    }

    /// The result, or the exception that takes its place: what was raised meanwhile before all else.
    pub(crate) fn settle(self, out: Option<&Path>) -> PyResult<T> {
        match (self.stopped, self.result) {
            (Some(error), _) => Err(error),
            (None, Some(result)) => result.map_err(crate::raise),
            (None, None) => Err(crate::raise(panicked(out).into())),
        }
    }
}

/// A panic of the thread itself: nobody can say how far it came.
fn panicked(out: Option<&Path>) -> Finding {
    let finding = Finding::new(codes::INTERNAL, "the work ended by a panic");
    match out {
        Some(out) => finding.file(out).help(
            "look at this folder, and for a hidden one beside it, before you run again, and report the \
             message that was printed; it is not known whether the result is complete",
        ),
        None => finding.help("report it with the message that was printed"),
    }
}
