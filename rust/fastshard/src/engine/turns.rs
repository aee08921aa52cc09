//! Turns of workers: the number of threads limits those that compute at a time, and workers that wait for a
//! disk let others continue.

use std::sync::{Condvar, Mutex};

use super::lock;

/// The remaining turns.
#[derive(Debug)]
pub(super) struct Turns {
    free: Mutex<u64>,
    returned: Condvar,
}

/// A turn; dropping it lets another worker continue.
#[must_use]
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    pub(super) fn new(count: u64) -> Self {
        Turns { free: Mutex::new(count), returned: Condvar::new() }
    }

    /// Waits for a turn.
    pub(super) fn begin(&self) -> Turn<'_> {
        self.take();
        Turn(self)
    }

    /// Runs `work`, which waits for something other than a processor, while others have this thread's turn.
    pub(super) fn wait<T>(&self, work: impl FnOnce() -> T) -> T {
        /// Takes the turn again, after a panic too.
        struct Away<'a>(&'a Turns);
        impl Drop for Away<'_> {
            fn drop(&mut self) {
                self.0.take();
            }
        }
        self.give();
        let _away = Away(self);
        work()
    }

    fn take(&self) {
        let mut free = lock(&self.free);
        while *free == 0 {
            free = self.returned.wait(free).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        *free -= 1;
    }

    fn give(&self) {
        *lock(&self.free) += 1;
        self.returned.notify_one();
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.give();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{catch_unwind, AssertUnwindSafe};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn who_waits_lets_others_go_on() {
        let turns = Turns::new(1);
        let (done, is_done) = mpsc::channel();
        std::thread::scope(|scope| {
            let _turn = turns.begin();
            scope.spawn(|| {
                let _turn = turns.begin();
                done.send(()).unwrap();
            });
            turns.wait(|| is_done.recv().unwrap());
        });
        assert_eq!(*lock(&turns.free), 1);
    }

    #[test]
    fn a_panic_keeps_no_turn() {
        let turns = Turns::new(1);
        let panics = || {
            let _turn = turns.begin();
            turns.wait(|| panic!("as a test"))
        };
        catch_unwind(AssertUnwindSafe(panics)).unwrap_err();
        assert_eq!(*lock(&turns.free), 1);
    }
}
