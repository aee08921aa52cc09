//! Named places of a run at which a test holds it, instead of racing it.
//!
//! A process whose environment names a Unix socket in `FASTSHARD_STEPS` connects to it at each place, writes
//! its `PID NAME` line, and continues once the other end closes the connection. A test that holds the
//! connection holds the run; nobody polls. The feature `steps` compiles this in; released builds come without
//! it, and then [`reach`] does nothing.

use std::fmt;

/// A place of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The header of this file is about to be read: its number among those of its checkpoint.
    File(usize),
    /// The contents of a checkpoint are about to be combined.
    Draft,
    /// The drafted outputs are about to get their places in files.
    Place,
    /// The sources are open, and no tile is made.
    Opened,
    /// A tile is about to be made: the number of tiles that this process began before.
    Tile(u64),
    /// All tiles of this process are made.
    TilesMade,
    /// Data is about to be read once more for a comparison: the number of such readings before.
    Compare(u64),
    /// This piece of complete files is about to be hashed: its number among those of this process.
    Hash(u64),
    /// This rank has made its part, and still watches the others.
    PartMade,
    /// The ranks of a run have met.
    Met,
    /// This rank has announced what it lends, and waits for the announcements of the others.
    Listed,
    /// This rank has requested bytes from that one, and waits for them.
    Waits(u32),
    /// The run must stop, and threads at work will notice it.
    Cancelled,
    /// The result is complete and sealed, and not published.
    Sealed,
    /// The result is published, and the remains of the run are not cleaned up.
    Published,
    /// A rank has stated how its run ended, and waits for the others to read it.
    Farewell,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::File(number) => write!(f, "file-{number}"),
            Step::Draft => f.write_str("draft"),
            Step::Place => f.write_str("place"),
            Step::Opened => f.write_str("opened"),
            Step::Tile(number) => write!(f, "tile-{number}"),
            Step::TilesMade => f.write_str("made"),
            Step::Compare(number) => write!(f, "compare-{number}"),
            Step::Hash(number) => write!(f, "hash-{number}"),
            Step::PartMade => f.write_str("part-made"),
            Step::Met => f.write_str("met"),
            Step::Listed => f.write_str("listed"),
            Step::Waits(rank) => write!(f, "waits-{rank}"),
            Step::Cancelled => f.write_str("cancelled"),
            Step::Sealed => f.write_str("sealed"),
            Step::Published => f.write_str("published"),
            Step::Farewell => f.write_str("farewell"),
        }
    }
}

/// Says that the run has come to a place, and waits there as long as a test holds it.
#[cfg(not(feature = "steps"))]
#[inline(always)]
pub fn reach(_step: Step) {}

#[cfg(feature = "steps")]
pub use held::reach;

#[cfg(feature = "steps")]
pub use failing::Failing;

#[cfg(feature = "steps")]
mod failing {
    use std::alloc::{GlobalAlloc, Layout, System};
    use std::ffi::CStr;
    use std::ptr::null_mut;
    use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

    /// How many allocations are left, before the environment is read.
    const UNREAD: i64 = i64::MAX;

    /// The system's allocator. With `FASTSHARD_FAIL_ALLOCATION=N:SIZE` in the environment it fails once: at the N-th allocation
    /// of at least SIZE bytes, counted from 1 over all threads.
    #[derive(Debug)]
    pub struct Failing {
        /// Allocations until the one that fails, that one included; none fails once it is not positive.
        left: AtomicI64,
        least: AtomicUsize,
    }

    impl Failing {
        /// The allocator of a process.
        #[allow(clippy::new_without_default)]
        pub const fn new() -> Failing {
            Failing { left: AtomicI64::new(UNREAD), least: AtomicUsize::new(0) }
        }

        fn fails(&self, size: usize) -> bool {
            if self.left.load(Ordering::Relaxed) == UNREAD {
                let (left, least) = requested().unwrap_or((0, 0));
                self.least.store(least, Ordering::Relaxed);
                let _ = self.left.compare_exchange(UNREAD, left, Ordering::Relaxed, Ordering::Relaxed);
            }
            self.left.load(Ordering::Relaxed) > 0
                && size >= self.least.load(Ordering::Relaxed)
                && self.left.fetch_sub(1, Ordering::Relaxed) == 1
        }
    }

    /// The request in the environment; nothing here allocates.
    #[allow(unsafe_code)]
    fn requested() -> Option<(i64, usize)> {
        // SAFETY: the name ends with a zero byte.
        let value = unsafe { libc::getenv(c"FASTSHARD_FAIL_ALLOCATION".as_ptr()) };
        if value.is_null() {
            return None;
        }
        // SAFETY: what is found ends with a zero byte, and stays while nobody changes the environment.
        let (left, least) = unsafe { CStr::from_ptr(value) }.to_str().ok()?.split_once(':')?;
        Some((left.parse().ok()?, least.parse().ok()?))
    }

    // SAFETY: it passes all on to the system's allocator, or gives null, as an allocator may.
    #[allow(unsafe_code)]
    unsafe impl GlobalAlloc for Failing {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            if self.fails(layout.size()) {
                return null_mut();
            }
            System.alloc(layout)
        }

        unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
            if self.fails(layout.size()) {
                return null_mut();
            }
            System.alloc_zeroed(layout)
        }

        unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
            if self.fails(size) {
                return null_mut();
            }
            System.realloc(memory, layout, size)
        }

        unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
            System.dealloc(memory, layout);
        }
    }
}

#[cfg(feature = "steps")]
mod held {
    use std::env::var_os;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;
    use std::sync::OnceLock;

    use super::Step;

    /// Says that the run has come to a place, and waits there as long as a test holds it.
    pub fn reach(step: Step) {
        // A test that has ended holds nobody.
        let Some(mut stream) = socket().and_then(|path| UnixStream::connect(path).ok()) else { return };
        if writeln!(stream, "{} {step}", std::process::id()).is_ok() {
            let _ = stream.read_to_end(&mut Vec::new());
        }
    }

    fn socket() -> Option<&'static PathBuf> {
        static SOCKET: OnceLock<Option<PathBuf>> = OnceLock::new();
        SOCKET.get_or_init(|| var_os("FASTSHARD_STEPS").map(PathBuf::from)).as_ref()
    }
}
