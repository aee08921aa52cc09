//! Layouts as the optimizer's state has them: beside each weight a moment of its shape, at the same places.

use crate::codes;
use crate::error::Finding;
use crate::layout::table::Table;

/// The power of the factor that its weight is stored with which a slot is stored with: a gradient scales inversely.
/// `None` for slots of which nothing is known.
///
/// source: torch/optim (adam.py, sgd.py, adagrad.py, rmsprop.py)
fn power(slot: &str) -> Option<f64> {
    Some(match slot {
        "exp_avg" | "momentum_buffer" | "mu" => -1.0,
        "exp_avg_sq" | "max_exp_avg_sq" | "sum" | "square_avg" | "nu" => -2.0,
        _ => return None,
    })
}

/// Makes a table say what it says of the weights of one slot. Each rank's moments belong to the gradient of the whole,
/// which all ranks see: copies, not terms of a sum; and a constant that is added has no gradient.
pub(super) fn keep(table: &mut Table, slot: &str) {
    for entry in &mut table.entries {
        entry.partial = None;
        entry.add = 0.0;
        entry.scale = entry.scale.as_ref().map(|scale| scale.to_the(power(slot).unwrap_or(1.0)));
        // A moment has the type that the optimizer gave it, whatever its weight's.
        entry.keep_dtype = true;
        entry.is_moment = true;
    }
}

/// That a slot of which nothing is known would have to be scaled with its weight.
pub(super) fn scaled(slot: &str, source: &Table, target: Option<&Table>) -> Option<Finding> {
    let target = target?;
    let scales = |table: &Table| table.entries.iter().any(|entry| entry.scale.is_some());
    if power(slot).is_some() || !(scales(source) || scales(target)) {
        return None;
    }
    let message = format!("the optimizer's {slot} next to weights that one layout scales");
    Some(
        Finding::new(codes::UNSUPPORTED, message)
            .expected("exp_avg, exp_avg_sq, momentum_buffer", slot)
            .help("leave out --optimizer, or convert to a layout that stores the weights as they are"),
    )
}
