//! Scales of quantised tensors: those in use, and a few more.

use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Result;
use crate::plan::Plan;

/// Bytes of scales that are kept for the next tile.
const KEPT: u64 = 4 << 20;

/// Memory that scales take, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    /// Of all workers together.
    pub kept: u64,
    /// Of each worker: the scales it uses, and what it reads them from.
    pub each: u64,
}

/// Scales by stored tensor, those used last at the end.
#[derive(Default)]
pub struct Scales(Mutex<Vec<(u32, Arc<Vec<f32>>)>>);

fn bytes(values: &[f32]) -> u64 {
    size_of_val(values) as u64
}

impl Scales {
    /// What the scales of a plan take at most.
    pub fn memory(plan: &Plan) -> Memory {
        let scales = plan.stored.iter().filter_map(|s| s.scale.as_ref());
        let sizes = scales.map(|scale| {
            let stored = &plan.stored[scale.stored as usize];
            let values = stored.nbytes() / stored.dtype.size() as u64 * size_of::<f32>() as u64;
            (values, values + stored.nbytes())
        });
        sizes.fold(Memory { kept: 0, each: 0 }, |all, (values, reading)| Memory {
            kept: (all.kept + values).min(KEPT),
            each: all.each.max(reading),
        })
    }

    /// The scales of a stored tensor, read by `read` unless they are kept.
    pub fn get(&self, stored: u32, read: impl FnOnce() -> Result<Vec<f32>>) -> Result<Arc<Vec<f32>>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let values = match kept.iter().position(|(s, _)| *s == stored) {
            Some(at) => kept.remove(at).1,
            None => {
                let values = Arc::new(read()?);
                let mut all = bytes(&values);
                let older = kept.iter().rev().take_while(|(_, v)| {
                    all += bytes(v);
                    all <= KEPT
                });
                let gone = kept.len() - older.count();
                kept.drain(..gone);
                values
            }
        };
        if bytes(&values) <= KEPT {
            kept.push((stored, Arc::clone(&values)));
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_bounded_and_what_was_used_last() {
        let scales = Scales::default();
        let each = (KEPT / 4 / 4) as usize;
        let reads = std::cell::Cell::new(0);
        let read = |n| {
            reads.set(reads.get() + 1);
            Ok(vec![1.0; n])
        };
        for (stored, n, want) in [
            (0, each, 1),
            (1, each, 2),
            (2, each, 3),
            (3, each, 4),
            (0, each, 4),
            (4, each, 5),
            (0, each, 5),
            (1, each, 6),
            (9, 5 * each, 7),
            (9, 5 * each, 8),
        ] {
            assert_eq!(scales.get(stored, || read(n)).unwrap().len(), n);
            assert_eq!(reads.get(), want, "{stored}");
            let kept: u64 = scales.0.lock().unwrap().iter().map(|(_, v)| bytes(v)).sum();
            assert!(kept <= KEPT, "{kept}");
        }
    }
}
