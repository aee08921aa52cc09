//! Deals the tiles of a run to its workers.
//!
//! Threads that write to one file lock it in turn. So each worker has separate files as long as there are
//! any: a stripe of the tiles, cut where the file changes.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::plan::tiles::TileRun;

/// Consecutive tiles, by their places among all tiles of a run.
#[derive(Debug)]
struct Stripe {
    next: AtomicU64,
    end: u64,
}

impl Stripe {
    fn count_left(&self) -> u64 {
        self.end.saturating_sub(self.next.load(Ordering::Relaxed))
    }
}

/// The tiles of a run; each is dealt once.
#[derive(Debug)]
pub(super) struct Deal {
    runs: Vec<TileRun>,
    /// The number of tiles before each run.
    first: Vec<u64>,
    stripes: Vec<Stripe>,
    /// Stripes that a worker has begun.
    begun: AtomicUsize,
}

/// The stripe of a worker; none at first.
#[derive(Debug, Default)]
pub(super) struct Hand(Option<usize>);

impl Deal {
    /// Deals `runs` to `workers`: by the files of the outputs, or in one order if there are no files.
    pub(super) fn new(runs: Vec<TileRun>, workers: u64, file_of: Option<&dyn Fn(usize) -> u32>) -> Deal {
        let (mut first, mut total) = (Vec::with_capacity(runs.len()), 0);
        for run in &runs {
            first.push(total);
            total += run.end - run.first;
        }
        let mut ends = Vec::new();
        let mut longest = u64::MAX;
        if let Some(file_of) = file_of {
            let file = |run: &TileRun| file_of(run.output as usize);
            let changes = runs.windows(2).zip(first.iter().skip(1));
            ends.extend(changes.filter(|(two, _)| file(&two[0]) != file(&two[1])).map(|(_, &at)| at));
            if (ends.len() as u64) + 1 < workers {
                longest = total.div_ceil(workers).max(1);
            }
        }
        ends.push(total);
        let mut stripes = Vec::new();
        let mut start = 0;
        for end in ends.into_iter().filter(|end| *end > 0) {
            // Where there are more workers than files, a file is cut in equal pieces.
            let pieces = (end - start).div_ceil(longest);
            let piece = (end - start).div_ceil(pieces);
            while start < end {
                let stop = (start + piece).min(end);
                stripes.push(Stripe { next: AtomicU64::new(start), end: stop });
                start = stop;
            }
        }
        Deal { runs, first, stripes, begun: AtomicUsize::new(0) }
    }

    /// The place of the next tile for a worker. It is from the worker's own
    /// stripe, else from a stripe that nobody has begun, else from the stripe with the most remaining tiles.
    pub(super) fn take(&self, hand: &mut Hand) -> Option<u64> {
        loop {
            if let Some(stripe) = hand.0.map(|number| &self.stripes[number]) {
                let place = stripe.next.fetch_add(1, Ordering::Relaxed);
                if place < stripe.end {
                    return Some(place);
                }
            }
            let untouched = self.begun.fetch_add(1, Ordering::Relaxed);
            hand.0 = match untouched < self.stripes.len() {
                true => Some(untouched),
                false => Some(self.find_fullest()?),
            };
        }
    }

    /// The number of all tiles.
    pub(super) fn count_tiles(&self) -> u64 {
        self.stripes.last().map_or(0, |stripe| stripe.end)
    }

    fn find_fullest(&self) -> Option<usize> {
        let left = self.stripes.iter().enumerate().map(|(number, stripe)| (stripe.count_left(), number));
        left.max().filter(|(count, _)| *count > 0).map(|(_, number)| number)
    }

    /// The tile at a place: its output, and its number in the output.
    pub(super) fn tile(&self, place: u64) -> (usize, u64) {
        // The last run that starts at or before this tile.
        let at = self.first.partition_point(|first| *first <= place) - 1;
        let run = self.runs[at];
        (run.output as usize, run.first + place - self.first[at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Deals outputs, given by their file and the number of their tiles.
    fn deal(outputs: &[(u32, u64)], workers: u64, in_order: bool) -> Deal {
        let runs = (0..).zip(outputs).map(|(output, &(_, end))| TileRun { output, first: 0, end });
        let file_of = |output: usize| outputs[output].0;
        Deal::new(runs.collect(), workers, (!in_order).then_some(&file_of))
    }

    fn take(deal: &Deal, hand: &mut Hand) -> Option<(usize, u64)> {
        deal.take(hand).map(|place| deal.tile(place))
    }

    fn take_all(deal: &Deal, hand: &mut Hand) -> Vec<(usize, u64)> {
        std::iter::from_fn(|| take(deal, hand)).collect()
    }

    #[test]
    fn each_tile_is_dealt_once_whoever_takes_it() {
        for workers in 1..6 {
            for in_order in [false, true] {
                let deal = deal(&[(0, 3), (0, 1), (1, 5), (2, 2), (0, 4)], workers, in_order);
                let mut hands: Vec<Hand> = (0..workers).map(|_| Hand::default()).collect();
                let mut dealt = Vec::new();
                // Whoever comes last takes what the others leave.
                for hand in &mut hands {
                    dealt.extend((0..2).filter_map(|_| take(&deal, hand)));
                }
                dealt.extend(take_all(&deal, hands.last_mut().unwrap()));
                dealt.sort_unstable();
                let all = [3, 1, 5, 2, 4].iter().enumerate();
                let all: Vec<_> = all.flat_map(|(output, &n)| (0..n).map(move |t| (output, t))).collect();
                assert_eq!(dealt, all, "{workers} workers");
            }
        }
    }

    #[test]
    fn workers_begin_in_files_of_their_own() {
        let deal = deal(&[(0, 9), (0, 1), (1, 5), (2, 2)], 3, false);
        let mut hands: Vec<Hand> = (0..3).map(|_| Hand::default()).collect();
        let firsts: Vec<_> = hands.iter_mut().map(|hand| take(&deal, hand).unwrap()).collect();
        assert_eq!(firsts, [(0, 0), (2, 0), (3, 0)]);
        assert_eq!(take(&deal, &mut hands[2]), Some((3, 1)));
        assert_eq!(take(&deal, &mut hands[2]), Some((0, 1)), "of the file of which most is left");
    }

    #[test]
    fn fewer_files_than_workers_are_cut_in_equal_pieces() {
        let deal = deal(&[(0, 6), (1, 2)], 4, false);
        let mut hands: Vec<Hand> = (0..4).map(|_| Hand::default()).collect();
        let firsts: Vec<_> = hands.iter_mut().map(|hand| take(&deal, hand).unwrap()).collect();
        assert_eq!(firsts, [(0, 0), (0, 2), (0, 4), (1, 0)]);
    }

    #[test]
    fn what_is_dealt_in_order_is_one_sequence() {
        let deal = deal(&[(0, 2), (1, 2)], 2, true);
        let (mut a, mut b) = (Hand::default(), Hand::default());
        let dealt: Vec<_> = (0..4).map(|i| take(&deal, if i % 2 == 0 { &mut a } else { &mut b })).collect();
        assert_eq!(dealt, [Some((0, 0)), Some((0, 1)), Some((1, 0)), Some((1, 1))]);
        assert_eq!(take(&deal, &mut a), None);
    }

    #[test]
    fn nothing_to_deal_ends_at_once() {
        assert_eq!(deal(&[], 3, false).take(&mut Hand::default()), None);
    }
}
