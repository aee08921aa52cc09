//! The time by which processes wait for one another.
//!
//! A run's clock is handed in with what says how long it waits ([`crate::distributed::meeting::About`], [`Patience`]). By default it
//! is the system's monotonic one. With the feature `steps`, which no released build has, tests have two others. Neither
//! moves by itself, so that nobody is ever early or late because a machine is slow:
//! - `Clock::manual()`, for threads of one process, which `advance` moves;
//! - the default clock of a process whose environment names a file in `FASTSHARD_CLOCK`: the file's first 8 bytes are the
//!   time, in nanoseconds, little-endian. Who writes there moves time for all ranks of a run at once.
//!
//! What sleeps by such a clock looks again every [`NAP`], whatever the time. A test moves time by steps of no more than
//! half a second, the time between two signs of life, and waits after each step until the card of each rank that is to
//! live (`beat` in `rank-00000.json`) has moved. Then these are never silent, and those that do not move are so after as
//! many steps as their timeout holds. No single step, however long, makes anybody silent ([`Watched`]).

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde::{Deserialize, Deserializer};

#[cfg(feature = "steps")]
use std::sync::atomic::{AtomicU64, Ordering};
#[cfg(feature = "steps")]
use std::sync::Arc;

/// Time in which somebody who waits by a clock that stands still looks again.
#[cfg(feature = "steps")]
pub const NAP: Duration = Duration::from_millis(2);

/// Most that counts of the time between two looks: twice what signs of life take at the latest, and no less than the
/// usual time between two looks.
const GAP: Duration = Duration::from_secs(2);
const GAP_LEAST: Duration = Duration::from_millis(100);

/// A clock that moves forward only.
#[derive(Clone, Debug, Default)]
pub struct Clock(Kind);

#[derive(Clone, Debug, Default)]
enum Kind {
    #[default]
    System,
    #[cfg(feature = "steps")]
    Manual { nanos: Arc<AtomicU64>, leaps: bool },
}

impl Clock {
    /// Time since some instant, which is the same for all clones.
    pub fn now(&self) -> Duration {
        static START: OnceLock<Instant> = OnceLock::new();
        match &self.0 {
            #[cfg(feature = "steps")]
            Kind::Manual { nanos, .. } => Duration::from_nanos(nanos.load(Ordering::SeqCst)),
            #[cfg(feature = "steps")]
            Kind::System if file::is_given() => file::now(),
            Kind::System => START.get_or_init(Instant::now).elapsed(),
        }
    }

    /// Time since `since`.
    pub fn elapsed(&self, since: Duration) -> Duration {
        self.now().saturating_sub(since)
    }

    /// Sleeps for that time; by a clock of tests, which stands still, for an instant.
    pub fn sleep(&self, time: Duration) {
        #[cfg(feature = "steps")]
        if let Kind::Manual { leaps: true, .. } = self.0 {
            self.advance(time);
        }
        std::thread::sleep(self.nap(time));
    }

    /// What whoever waits for `time` to pass may really sleep until it looks at the clock again.
    pub(crate) fn nap(&self, time: Duration) -> Duration {
        match &self.0 {
            #[cfg(feature = "steps")]
            Kind::Manual { .. } => time.min(NAP),
            #[cfg(feature = "steps")]
            Kind::System if file::is_given() => time.min(NAP),
            Kind::System => time,
        }
    }
}

#[cfg(feature = "steps")]
impl Clock {
    /// A clock that [`Clock::advance`] alone moves, for all clones.
    pub fn manual() -> Clock {
        Clock(Kind::Manual { nanos: Arc::default(), leaps: false })
    }

    /// A clock that whoever sleeps moves: for one who waits alone, for what never comes.
    pub fn leaping() -> Clock {
        Clock(Kind::Manual { nanos: Arc::default(), leaps: true })
    }

    /// Moves a clock of tests on.
    ///
    /// # Panics
    /// If it is the system's.
    pub fn advance(&self, time: Duration) {
        let Kind::Manual { nanos, .. } = &self.0 else { panic!("nobody moves the system's clock") };
        let time = u64::try_from(time.as_nanos()).expect("less than centuries");
        nanos.fetch_add(time, Ordering::SeqCst);
    }
}

/// The clock that a file is.
#[cfg(feature = "steps")]
mod file {
    use std::env::var_os;
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::OnceLock;
    use std::time::Duration;

    fn given() -> Option<&'static File> {
        static FILE: OnceLock<Option<File>> = OnceLock::new();
        let open = || var_os("FASTSHARD_CLOCK").map(|path| File::open(path).expect("a file that is a clock"));
        FILE.get_or_init(open).as_ref()
    }

    pub(crate) fn is_given() -> bool {
        given().is_some()
    }

    pub(crate) fn now() -> Duration {
        let mut nanos = [0; 8];
        let file = given().expect("asked before");
        file.read_exact_at(&mut nanos, 0).expect("a clock of 8 bytes");
        Duration::from_nanos(u64::from_le_bytes(nanos))
    }
}

/// How long others are waited for, and by which clock.
#[derive(Clone, Debug, Default)]
pub struct Patience {
    /// How long.
    pub time: Duration,
    /// By which clock.
    pub clock: Clock,
}

/// Reads the seconds of the system's clock; more than a duration can be is for ever.
impl<'de> Deserialize<'de> for Patience {
    fn deserialize<D: Deserializer<'de>>(seconds: D) -> Result<Patience, D::Error> {
        let time = Duration::try_from_secs_f64(f64::deserialize(seconds)?);
        Ok(time.unwrap_or(Duration::MAX).into())
    }
}

impl From<Duration> for Patience {
    fn from(time: Duration) -> Patience {
        Patience { time, clock: Clock::default() }
    }
}

/// For how long something was watched in vain.
///
/// Of the time between two looks no more than a part counts. A watcher that was stopped itself, or whose machine was
/// suspended, has seen nothing meanwhile: the others, stopped as well perhaps, get the time for a sign of life until
/// it has looked again and again. To who looks as often as is usual it makes no difference.
#[derive(Clone, Debug)]
pub(crate) struct Watched {
    looked: Duration,
    time: Duration,
    most: Duration,
}

impl Watched {
    /// From now on, for a verdict after `patience`.
    pub(crate) fn begin(now: Duration, patience: Duration) -> Watched {
        Watched { looked: now, time: Duration::ZERO, most: (patience / 4).clamp(GAP_LEAST, GAP) }
    }

    /// A look that has found nothing new; the time that was watched by now.
    pub(crate) fn look(&mut self, now: Duration) -> Duration {
        // Of two threads that look, the slower one comes with an earlier time.
        self.time += now.saturating_sub(self.looked).min(self.most);
        self.looked = self.looked.max(now);
        self.time
    }

    /// A look that has found something.
    pub(crate) fn found(&mut self, now: Duration) {
        (self.looked, self.time) = (self.looked.max(now), Duration::ZERO);
    }

    /// The time that was watched by the last look.
    pub(crate) fn time(&self) -> Duration {
        self.time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_systems_clock_moves_and_sleeps() {
        let clock = Clock::default();
        let begun = clock.now();
        clock.sleep(Duration::from_millis(3));
        assert!(clock.elapsed(begun) >= Duration::from_millis(3));
        assert_eq!(clock.nap(SECOND * 60), SECOND * 60);
        assert_eq!(clock.elapsed(clock.now() + SECOND * 60), Duration::ZERO);
    }

    #[test]
    fn a_manual_clock_stands_still_until_it_is_moved() {
        let (clock, leaping) = (Clock::manual(), Clock::leaping());
        let other = clock.clone();
        // Hours go by in an instant, or this test never ends.
        clock.sleep(SECOND * 3600 * 24);
        leaping.sleep(SECOND * 3600 * 24);
        assert_eq!((clock.now(), leaping.now()), (Duration::ZERO, SECOND * 3600 * 24));
        other.advance(SECOND * 5);
        assert_eq!((clock.now(), clock.elapsed(SECOND * 2)), (SECOND * 5, SECOND * 3));
    }

    #[test]
    fn usual_looks_count_in_full() {
        for (patience, looks) in [(SECOND * 60, 4), (SECOND * 4, 100), (SECOND, 100), (SECOND * 8, 1000)] {
            let mut watched = Watched::begin(SECOND, patience);
            let looks = Duration::from_millis(looks);
            let mut now = SECOND;
            while watched.look(now) < patience {
                now += looks;
            }
            assert!(now - SECOND >= patience && now - SECOND < patience + looks, "{patience:?} {looks:?}");
        }
    }

    #[test]
    fn a_watcher_that_was_stopped_for_an_hour_condemns_nobody_at_its_first_look() {
        let timeout = SECOND * 4;
        let mut watched = Watched::begin(Duration::ZERO, timeout);
        let mut now = SECOND * 3600;
        assert_eq!(watched.look(now), timeout / 4);
        // The other one lives: it was stopped too, and goes on.
        now += SECOND / 2;
        watched.found(now);
        assert_eq!(watched.time(), Duration::ZERO);
        // Many hours, of which one always comes before the other: still it lives.
        for _ in 0..100 {
            now += SECOND * 3600;
            assert!(watched.look(now) < timeout);
            watched.found(now);
        }
        // A dead one is condemned once it was watched for all of the time.
        let dead = now;
        while watched.look(now) < timeout {
            now += SECOND / 10;
        }
        assert!(now - dead >= timeout && now - dead < timeout + SECOND / 10);
    }

    #[test]
    fn of_two_who_look_none_counts_twice() {
        let mut watched = Watched::begin(Duration::ZERO, SECOND * 60);
        watched.look(SECOND);
        assert_eq!(watched.look(SECOND / 2), SECOND);
        assert_eq!(watched.look(SECOND * 2), SECOND * 2);
    }
}
