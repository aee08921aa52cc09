//! Access to maps of files that somebody else may cut short meanwhile.
//!
//! A page of a map that its file no longer has faults with SIGBUS; so does one that the disk cannot give. While a
//! window of a map is guarded, such a fault puts a page of zeros over the rest of the window and raises
//! its owner's flag, and the access goes on; the owner looks at the flag afterwards and reads the file instead,
//! which tells the reason. Faults outside of all windows go to the handler that was there before.

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};

/// Windows that can be guarded at a time: one for each worker. Beyond that, files are read.
const WINDOWS: usize = 256;

struct Window {
    /// What is raised; null for a window that nobody has.
    faulted: AtomicPtr<AtomicBool>,
    start: AtomicUsize,
    /// 0 while the window is set up or taken down, so that it holds no address then.
    end: AtomicUsize,
}

static GUARDED: [Window; WINDOWS] = [const {
    Window { faulted: AtomicPtr::new(null_mut()), start: AtomicUsize::new(0), end: AtomicUsize::new(0) }
}; WINDOWS];

/// The handler before ours. What it points to is never freed: a fault may be on its way to it.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(null_mut());
/// The thread that is in that handler.
static PASSING_ON: AtomicI32 = AtomicI32::new(0);

/// A window that is guarded until this is dropped.
struct GuardedWindow(&'static Window);

impl Drop for GuardedWindow {
    fn drop(&mut self) {
        self.0.end.store(0, SeqCst);
        self.0.faulted.store(null_mut(), SeqCst);
    }
}

/// Runs `work`, which may read from `window` of a map; false if that cannot be guarded, or if a page of it was
/// not there: then `faulted` is raised, and what `work` read is worth nothing.
pub(super) fn read(window: &[u8], faulted: &AtomicBool, work: impl FnOnce(&[u8])) -> bool {
    if faulted.load(SeqCst) || !installed() {
        return false;
    }
    let flag = std::ptr::from_ref(faulted).cast_mut();
    let free = |w: &&Window| w.faulted.compare_exchange(null_mut(), flag, SeqCst, SeqCst).is_ok();
    let Some(guarded) = GUARDED.iter().find(free).map(GuardedWindow) else { return false };
    let start = window.as_ptr() as usize;
    guarded.0.start.store(start, SeqCst);
    guarded.0.end.store(start + window.len(), SeqCst);
    work(window);
    drop(guarded);
    // Another worker's fault in the same map counts too: its page of zeros may have been read.
    !faulted.load(SeqCst)
}

/// Sees to it that our handler is the first one; false if the system refuses.
fn installed() -> bool {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let ours = |action: &libc::sigaction| action.sa_sigaction == on_fault as *const () as usize;
    // SAFETY: `sigaction` is called with valid pointers or null; an all-zero `sigaction` is a valid value.
    #[allow(unsafe_code)]
    let current = || unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        (libc::sigaction(libc::SIGBUS, null(), &mut action) == 0).then_some(action)
    };
    if current().is_some_and(|action| ours(&action)) {
        return true;
    }
    let _one = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(before) = current() else { return false };
    if ours(&before) {
        return true;
    }
    // Others (faulthandler, say) may have come after us and know ours as the one before: see `pass_on`.
    BEFORE.store(Box::into_raw(Box::new(before)), SeqCst);
    // SAFETY: as above; the handler calls nothing that is not async-signal-safe, and runs on the alternative
    // stack where the thread has one. Not deferred: a handler that we call and that raises the signal once
    // more is to find us while we can still tell that we go round in a circle.
    #[allow(unsafe_code)]
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_fault as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &action, null_mut()) == 0
    }
}

/// Handles SIGBUS. Async-signal-safe: atomics and system calls alone.
extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a valid `info`; the thread's errno is left as it was.
    #[allow(unsafe_code)]
    unsafe {
        let errno = *libc::__errno_location();
        // Sent by somebody, it has no address.
        let fault = (*info).si_code > 0;
        let mended = fault && mend((*info).si_addr() as usize);
        *libc::__errno_location() = errno;
        if !mended {
            pass_on(signal, info, context);
        }
    }
}

/// Puts zeros over the rest of the window that holds `address`; false if there is none.
fn mend(address: usize) -> bool {
    for window in &GUARDED {
        let flag = window.faulted.load(SeqCst);
        let (start, end) = (window.start.load(SeqCst), window.end.load(SeqCst));
        if flag.is_null() || address < start || address >= end {
            continue;
        }
        // SAFETY: the window is set up, so its owner is in `read`, where the flag lives; it is raised before
        // a zero can be read. The pages from the fault to the window's end are of the owner's map, which it
        // borrows; new pages of the same place are unmapped with it.
        #[allow(unsafe_code)]
        unsafe {
            (*flag).store(true, SeqCst);
            let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
            let first = address / page * page;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
            let at = libc::mmap(first as *mut c_void, end - first, libc::PROT_READ, flags, -1, 0);
            return at != libc::MAP_FAILED;
        }
    }
    false
}

/// Gives a signal that is not ours to the handler that was there before.
///
/// # Safety
/// The arguments are those of a signal handler.
#[allow(unsafe_code)]
unsafe fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: `BEFORE` is null or points to an action that is never freed; its handler is called in the way
    // that its flags say.
    unsafe {
        let before = BEFORE.load(SeqCst).as_ref();
        let handler = before.map_or(libc::SIG_DFL, |b| b.sa_sigaction);
        let thread = libc::syscall(libc::SYS_gettid) as i32;
        // A handler that calls us as the one before it would go round in a circle.
        let round = PASSING_ON.load(SeqCst) == thread;
        if handler == libc::SIG_DFL || handler == libc::SIG_IGN || round {
            // Ends the process as if nobody had handled it: once more by the same access, or by this.
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
            if (*info).si_code <= 0 {
                libc::raise(signal);
            }
            return;
        }
        PASSING_ON.store(thread, SeqCst);
        if before.is_some_and(|b| b.sa_flags & libc::SA_SIGINFO != 0) {
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                std::mem::transmute(handler);
            handler(signal, info, context);
        } else {
            let handler: extern "C" fn(c_int) = std::mem::transmute(handler);
            handler(signal);
        }
        PASSING_ON.store(0, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::MutexGuard;

    use super::*;

    /// One test at a time: one of them takes all windows.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A map of `pages` pages of ones, and its file.
    fn mapped(pages: usize) -> (std::fs::File, memmap2::Mmap) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; pages << 12]).unwrap();
        // SAFETY: a file of this test; what it does with it is the point.
        #[allow(unsafe_code)]
        let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
        (file, map)
    }

    fn sum(bytes: &[u8]) -> usize {
        bytes.iter().map(|b| usize::from(std::hint::black_box(*b))).sum()
    }

    #[test]
    fn a_map_that_is_whole_is_read() {
        let _alone = alone();
        let (_file, map) = mapped(8);
        let (faulted, mut seen) = (AtomicBool::new(false), 0);
        assert!(read(&map, &faulted, |bytes| seen = sum(bytes)));
        assert_eq!(seen, 8 << 12);
    }

    #[test]
    fn a_fault_raises_the_flag_and_the_map_is_not_read_again() {
        let _alone = alone();
        for left in [0, 1, 5000, (8 << 12) - 1] {
            let (file, map) = mapped(8);
            let (faulted, other) = (AtomicBool::new(false), AtomicBool::new(false));
            let whole = read(&map[100..(8 << 12) - 100], &faulted, |bytes| {
                assert_eq!(sum(&bytes[..10]), 10);
                file.set_len(left).unwrap();
                sum(bytes);
            });
            // The last page is there still, with zeros beyond the end: the file's stamp tells of that.
            assert_eq!(!whole, left <= 7 << 12, "{left} bytes left");
            assert_eq!(faulted.load(SeqCst), !whole);
            assert!(!faulted.load(SeqCst) || !read(&map, &faulted, |_| unreachable!("faulted before")));
            let (_file, map) = mapped(2);
            assert!(read(&map, &other, |bytes| assert_eq!(sum(bytes), 2 << 12)), "another map is whole");
        }
    }

    #[test]
    fn many_threads_fault_in_maps_of_their_own_and_of_others() {
        let _alone = alone();
        let shared = mapped(64);
        let faulted = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for i in 0..8u64 {
                let (shared, faulted) = (&shared, &faulted);
                scope.spawn(move || {
                    for n in 0..50 {
                        let (file, map) = mapped(4);
                        let own = AtomicBool::new(false);
                        let cut = (i + n) % 2 == 0;
                        let whole = read(&map, &own, |bytes| {
                            if cut {
                                file.set_len(1 << 12).unwrap();
                            }
                            sum(bytes);
                        });
                        assert_eq!(whole, !cut);
                        if i == 3 && n == 25 {
                            shared.0.set_len(0).unwrap();
                        }
                        let mut seen = 0;
                        if read(&shared.1, faulted, |bytes| seen = sum(bytes)) {
                            assert_eq!(seen, 64 << 12, "zeros of another thread's fault");
                        }
                    }
                });
            }
        });
        assert!(faulted.load(SeqCst));
    }

    #[test]
    fn windows_beyond_those_that_can_be_guarded_are_not_read() {
        let _alone = alone();
        let (_file, map) = mapped(1);
        let faulted = AtomicBool::new(false);
        fn nested(map: &[u8], faulted: &AtomicBool) -> usize {
            let mut deeper = 0;
            let is_intact = read(map, faulted, |bytes| {
                assert_eq!(sum(bytes), 1 << 12);
                deeper = nested(map, faulted);
            });
            usize::from(is_intact) + deeper
        }
        let depth = nested(&map, &faulted);
        // Tests of other modules may hold a few meanwhile.
        assert!((WINDOWS - 16..=WINDOWS).contains(&depth), "{depth}");
    }
}
