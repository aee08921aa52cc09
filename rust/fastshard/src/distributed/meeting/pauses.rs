//! Pauses between looks.

use std::time::Duration;

use super::FIRST_LOOK;
use crate::publish::clock::Clock;

/// Pauses between looks, short at first.
#[derive(Debug)]
pub struct Pauses {
    clock: Clock,
    next: Duration,
    most: Duration,
}

impl Pauses {
    /// Pauses up to this length, by this clock.
    pub fn new(clock: &Clock, most: Duration) -> Pauses {
        Pauses { clock: clock.clone(), next: FIRST_LOOK.min(most), most }
    }

    /// Sleeps, each time a little longer.
    pub fn sleep(&mut self) {
        self.clock.sleep(self.next);
        self.next = (self.next * 5 / 4).min(self.most);
    }
}
