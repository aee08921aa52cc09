//! Calls of a test at the places of a run in its own process; see [`crate::steps`].

use std::sync::Arc;

use super::Control;
use crate::steps::Step;

type Call = dyn Fn(&Control, Step) + Send + Sync;

/// A test's callback in this process, called when a run reaches a place of the engine.
#[derive(Clone, Default)]
pub struct At(Option<Arc<Call>>);

impl At {
    /// Calls `call` at each place, in the thread that reached it.
    pub fn new(call: impl Fn(&Control, Step) + Send + Sync + 'static) -> At {
        At(Some(Arc::new(call)))
    }

    /// Reports that a run has reached a place.
    pub(crate) fn call(&self, control: &Control, step: Step) {
        if let Some(call) = &self.0 {
            call(control, step);
        }
    }
}

impl std::fmt::Debug for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "At(a test)" } else { "At(nobody)" })
    }
}
