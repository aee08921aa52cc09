//! Runs that a test holds at named places, and waiting that ends.

use std::io::{BufRead, BufReader, ErrorKind};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time after which something has got stuck. No test is to pass or fail by it while the code is right.
pub const HANG: Duration = Duration::from_secs(240);

/// Waits until something is so.
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < HANG, "stuck before {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Calls `run` in a thread of its own, which is given up if it never ends.
#[track_caller]
pub fn within_hang<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || drop(sender.send(run())));
    match receiver.recv_timeout(HANG) {
        Ok(result) => result,
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("it never ends"),
        Err(_) => std::panic::resume_unwind(thread.join().unwrap_err()),
    }
}

/// This test program, to run `test` of it alone, which is ignored otherwise.
pub fn child_of_its_own(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]);
    command
}

/// Where a run stops at each place (see [`fastshard::steps`]) until it is let go.
pub struct Steps {
    listener: UnixListener,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

/// A run that waits at a place until this is dropped.
pub struct Paused {
    pub place: String,
    _stream: UnixStream,
}

impl Steps {
    pub fn new() -> Steps {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steps");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        Steps { listener, path, _folder: folder }
    }

    /// Lets a process be held.
    pub fn hold<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        command.env("FASTSHARD_STEPS", &self.path)
    }

    /// The next place that a process comes to; none if it has ended.
    pub fn next(&self, child: &mut Child) -> Option<Paused> {
        let begun = Instant::now();
        loop {
            // Asked first: who has ended may have come to a place before.
            let ended = child.try_wait().unwrap().is_some();
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).unwrap();
                    let mut line = String::new();
                    BufReader::new(&stream).read_line(&mut line).unwrap();
                    let place = line.trim_end().split_once(' ').map(|(_, place)| place.to_string());
                    // Of a process that was killed before it said where it is.
                    let Some(place) = place else { continue };
                    return Some(Paused { place, _stream: stream });
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => panic!("{error}"),
            }
            if ended {
                return None;
            }
            assert!(begun.elapsed() < HANG, "the process comes to no place");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Lets the process go on until it comes to `place`, and holds it there.
    #[track_caller]
    pub fn until(&self, child: &mut Child, place: &str) -> Paused {
        let mut passed = Vec::new();
        while let Some(paused) = self.next(child) {
            if paused.place == place {
                return paused;
            }
            passed.push(paused.place.clone());
        }
        panic!("it ended before it came to {place}, by way of {passed:?}");
    }

    /// Lets the process go on to its end; the places that it came by.
    pub fn all(&self, child: &mut Child) -> Vec<String> {
        std::iter::from_fn(|| self.next(child).map(|paused| paused.place.clone())).collect()
    }
}

/// The clock of processes, which is a file (see [`fastshard::publish::clock`]).
pub struct FileClock {
    file: std::fs::File,
    nanos: AtomicU64,
}

impl FileClock {
    /// A new file at `path`, where some time has passed already.
    pub fn new(path: &Path) -> FileClock {
        let clock = FileClock { file: std::fs::File::create(path).unwrap(), nanos: AtomicU64::new(0) };
        clock.advance(Duration::from_secs(1));
        clock
    }

    pub fn advance(&self, time: Duration) {
        let nanos = self.nanos.fetch_add(time.as_nanos() as u64, Ordering::SeqCst) + time.as_nanos() as u64;
        self.file.write_all_at(&nanos.to_le_bytes(), 0).unwrap();
    }
}

/// Ranks that meet at a folder, and how time passes for them by a clock that stands still otherwise.
pub struct Time<'a> {
    advance: Box<dyn Fn(Duration) + 'a>,
    /// The folder with their cards.
    folder: PathBuf,
}

impl<'a> Time<'a> {
    /// For ranks that meet before `out`, with what moves their clock.
    pub fn new(out: &Path, advance: impl Fn(Duration) + 'a) -> Time<'a> {
        let name = format!(".{}.fastshard-ranks", out.file_name().unwrap().to_str().unwrap());
        Time { advance: Box::new(advance), folder: out.with_file_name(name) }
    }

    /// How often a rank has shown that it lives.
    pub fn beat(&self, rank: u32) -> u64 {
        let read = || {
            let card = std::fs::read(self.folder.join(format!("rank-{rank:05}.json"))).ok()?;
            serde_json::from_slice::<serde_json::Value>(&card).ok()?["beat"].as_u64()
        };
        read().unwrap_or(0)
    }

    /// Lets the time between two signs of life pass; returns once each of the ranks `alive` has shown one.
    pub fn step(&self, alive: &[u32]) {
        self.jump(Duration::from_millis(500), alive);
    }

    /// Lets time pass at once; returns once each of the ranks `alive` has shown that it lives.
    pub fn jump(&self, time: Duration, alive: &[u32]) {
        let before: Vec<u64> = alive.iter().map(|rank| self.beat(*rank)).collect();
        (self.advance)(time);
        let moved = |(rank, before): (&u32, &u64)| self.beat(*rank) > *before;
        until("a sign of life", || alive.iter().zip(&before).all(moved));
    }
}
