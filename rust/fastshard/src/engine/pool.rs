//! Buffers for the values of codes.

use std::sync::{Mutex, PoisonError};

use super::windows::MOST;
use crate::plan::Plan;

/// Bytes that a worker holds for each element of a window: codes as they are stored, as bytes, numbers, scales, zero points.
const EACH: u64 = 4 + 1 + 4 + 4 + 4;
/// Nesting of codes: zero points and scales may be codes themselves.
const DEPTH: u64 = 2;

/// Reusable buffers of one worker.
#[derive(Default)]
pub(super) struct Buffers {
    pub(super) bytes: Vec<u8>,
    pub(super) codes: Vec<u8>,
    pub(super) values: Vec<f32>,
    pub(super) narrow: Vec<u8>,
}

/// Buffers of all workers that are not in use.
#[derive(Default)]
pub(super) struct Pool(Mutex<Vec<Buffers>>);

impl Pool {
    /// Computes the maximum bytes that each worker needs.
    pub(super) fn memory(plan: &Plan) -> u64 {
        match plan.stored.iter().any(|stored| stored.coded().is_some()) {
            true => MOST * EACH * DEPTH,
            false => 0,
        }
    }

    /// Takes buffers that nobody uses, or new ones.
    pub(super) fn take(&self) -> Buffers {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    /// Gives buffers back.
    pub(super) fn put(&self, buffers: Buffers) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffers);
    }
}
