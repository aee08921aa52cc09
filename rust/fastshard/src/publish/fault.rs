//! Faults for the tests: the k-th changing call of this thread fails, or the process dies there.

use std::cell::RefCell;
use std::io;
use std::path::{Path, PathBuf};

/// What happens at the chosen call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    /// This call alone fails with the error number.
    Once(i32),
    /// This call is done in part, then it and all later ones fail: the process as good as died here.
    Gone,
    /// This call is done in part, then the process dies.
    Abort,
}

#[derive(Default)]
struct State {
    fault: Option<(usize, Fault)>,
    calls: Vec<(&'static str, PathBuf)>,
    lacking: Vec<&'static str>,
    unseen: Option<(Unseen, i32)>,
}

/// Chooses a path that cannot be looked at.
type Unseen = Box<dyn Fn(&Path) -> bool>;

thread_local!(static STATE: RefCell<State> = RefCell::default());

/// Arms a fault at call `at` (counted from 0) and forgets the calls seen so far.
pub(crate) fn arm(at: usize, fault: Fault) {
    STATE.with_borrow_mut(|s| {
        s.fault = Some((at, fault));
        s.calls.clear();
    });
}

/// Disarms; the calls seen since the last `arm` or `disarm`, in order.
pub(crate) fn disarm() -> Vec<(&'static str, PathBuf)> {
    STATE.with_borrow_mut(|s| {
        s.fault = None;
        std::mem::take(&mut s.calls)
    })
}

/// Names what the filesystem shall not know: `noreplace`, `exchange`, `replacing` OUT at all, or `moving` it.
pub(super) fn lack(what: &[&'static str]) {
    STATE.with_borrow_mut(|s| s.lacking = what.to_vec());
}

/// Lets looking at each path that `chosen` takes fail with an error number.
pub(super) fn hide(code: i32, chosen: impl Fn(&Path) -> bool + 'static) {
    STATE.with_borrow_mut(|s| s.unseen = Some((Box::new(chosen), code)));
}

/// Lets all be seen again.
pub(super) fn show() {
    STATE.with_borrow_mut(|s| s.unseen = None);
}

/// An error if the path shall not be seen.
pub(super) fn look(path: &Path) -> io::Result<()> {
    STATE.with_borrow(|s| match &s.unseen {
        Some((chosen, code)) if chosen(path) => Err(io::Error::from_raw_os_error(*code)),
        _ => Ok(()),
    })
}

/// An error if the filesystem shall not know it.
pub(super) fn lacking(what: &str) -> io::Result<()> {
    let lacks = STATE.with_borrow(|s| s.lacking.contains(&what));
    if lacks {
        Err(rustix::io::Errno::INVAL.into())
    } else {
        Ok(())
    }
}

/// What overlayfs says to moving a directory of a lower layer, if OUT shall be one.
pub(super) fn other_layer(moved: &Path) -> io::Result<()> {
    match moved.ends_with("out") && lacking("moving").is_err() {
        true => Err(rustix::io::Errno::XDEV.into()),
        false => Ok(()),
    }
}

/// Counts a call and fails it if its turn has come.
pub(super) fn gate(call: &'static str, path: &Path, partial: impl FnOnce()) -> io::Result<()> {
    let (now, fault) = STATE.with_borrow_mut(|s| {
        s.calls.push((call, path.to_path_buf()));
        (s.calls.len() - 1, s.fault)
    });
    match fault {
        Some((at, Fault::Once(code))) if now == at => Err(io::Error::from_raw_os_error(code)),
        Some((at, fault @ (Fault::Gone | Fault::Abort))) if now >= at => {
            if now == at {
                partial();
            }
            if matches!(fault, Fault::Abort) {
                std::process::abort();
            }
            Err(rustix::io::Errno::IO.into())
        }
        _ => Ok(()),
    }
}
