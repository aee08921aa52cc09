//! Pages of data files that several parts write to.

use crate::plan::tiles::Share;
use crate::plan::Plan;

/// The largest page that a client of a network filesystem may write as a whole, in bytes.
const PAGE: u64 = 64 << 10;

/// Per file, the pages that more than one part writes to, sorted.
#[derive(Debug)]
pub(super) struct Pages(Vec<Vec<u64>>);

impl Pages {
    pub(super) fn of(plan: &Plan, sizes: &[u64], shares: &[Share]) -> Pages {
        let mut ranges: Vec<Vec<(u64, u64, usize)>> = vec![Vec::new(); plan.files.len()];
        for (part, share) in shares.iter().enumerate() {
            for run in &share.tiles {
                let output = &plan.outputs[run.output as usize];
                let (lo, hi) = run.span(sizes[run.output as usize], output.nbytes());
                if lo < hi {
                    ranges[output.file as usize].push((output.offset + lo, output.offset + hi, part));
                }
            }
        }
        let shared = |mut ranges: Vec<(u64, u64, usize)>| {
            ranges.sort_unstable();
            let mut pages: Vec<u64> = Vec::new();
            // The last page written to so far, and by whom.
            let mut last: Option<(u64, usize)> = None;
            for (lo, hi, part) in ranges {
                if last.is_some_and(|(page, other)| page == lo / PAGE && other != part) {
                    pages.push(lo / PAGE);
                }
                last = Some(((hi - 1) / PAGE, part));
            }
            pages.dedup();
            pages
        };
        Pages(ranges.into_iter().map(shared).collect())
    }

    /// Cuts bytes for `offset` of a file at the bounds of pages that several parts write to. It calls `each`
    /// with the offset, the bytes, and whether they are in such a page.
    pub(super) fn split<'b, E>(
        &self,
        file: u32,
        offset: u64,
        bytes: &'b [u8],
        mut each: impl FnMut(u64, &'b [u8], bool) -> Result<(), E>,
    ) -> Result<(), E> {
        let pages = &self.0[file as usize];
        let end = offset + bytes.len() as u64;
        let mut at = offset;
        let mut next = pages.partition_point(|page| (page + 1) * PAGE <= at);
        while at < end {
            let (stop, shared) = match pages.get(next) {
                Some(page) if page * PAGE <= at => {
                    next += 1;
                    ((page + 1) * PAGE, true)
                }
                Some(page) => (page * PAGE, false),
                None => (end, false),
            };
            let stop = stop.min(end);
            each(at, &bytes[(at - offset) as usize..(stop - offset) as usize], shared)?;
            at = stop;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::share::{all_tiles, divide};
    use super::*;
    use crate::plan::{Fill, Form, OutFile, Output};
    use crate::tensor::Dtype;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_page_of_several_parts_is_written_by_none(
            lengths in prop::collection::vec(0u64..300_000, 1..12), parts in 1usize..6, log in 10u32..16,
        ) {
            let mut at = 777;
            let outputs: Vec<Output> = lengths.iter().enumerate().map(|(i, &n)| {
                let offset = at;
                at += n;
                let (name, shape, parts) = (format!("t{i}"), [n].into(), Box::default());
                Output { name: name.into(), dtype: Dtype::U8, shape, parts, fill: Fill::Zero, file: 0, offset, key: None }
            }).collect();
            let file = OutFile { name: "f".into(), size: at, form: Form::Safetensors, header_len: 777, zeros: Vec::new() };
            let plan = Plan { outputs, files: vec![file], ..Plan::default() };
            let sizes = vec![1u64 << log; plan.outputs.len()];
            let shares = divide(&plan, &sizes, &all_tiles(&plan, &sizes, &|_| false), parts);
            let pages = Pages::of(&plan, &sizes, &shares);
            let mut owners = vec![Vec::new(); (at / PAGE + 1) as usize];
            let mut written = vec![0u8; at as usize];
            for (part, share) in shares.iter().enumerate() {
                for run in &share.tiles {
                    let output = &plan.outputs[run.output as usize];
                    let (lo, hi) = run.span(sizes[run.output as usize], output.nbytes());
                    let bytes = vec![1; (hi - lo) as usize];
                    pages.split(0, output.offset + lo, &bytes, |offset, bytes, shared| {
                        written[offset as usize..][..bytes.len()].iter_mut().for_each(|w| *w += 1);
                        if !shared {
                            for page in offset / PAGE..=(offset + bytes.len() as u64 - 1) / PAGE {
                                owners[page as usize].push(part);
                            }
                        }
                        Ok::<(), ()>(())
                    }).unwrap();
                }
            }
            prop_assert!(written[777..].iter().all(|w| *w == 1));
            for owners in owners {
                prop_assert!(owners.windows(2).all(|pair| pair[0] == pair[1]), "{owners:?}");
            }
        }
    }
}
