//! Calls of a test at the places of a run in its own process; see [`crate::steps`].

use std::sync::Arc;

use super::Control;
use crate::steps::Step;

type Call = dyn Fn(&Control, Step) + Send + Sync;

/// The call that a test makes in this process where a run that it controls comes to a place of the engine.
#[derive(Clone, Default)]
pub struct At(Option<Arc<Call>>);

impl At {
    /// Calls `call` at each place, in the thread that has come there.
    pub fn new(call: impl Fn(&Control, Step) + Send + Sync + 'static) -> At {
        At(Some(Arc::new(call)))
    }

    /// Says that a run has come to a place.
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
