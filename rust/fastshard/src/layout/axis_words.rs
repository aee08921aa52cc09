//! What axes are called in messages. The letters are those of the layout tables; an axis of a table of one's own is called as it
//! is there.

use std::fmt;

/// The size of an axis, in words.
#[derive(Clone, Copy)]
pub(crate) struct Size<'a>(pub(crate) &'a str);

impl fmt::Display for Size<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            "H" => "the hidden size",
            "F" => "the width of the MLP",
            "V" => "the size of the vocabulary",
            "P" => "the size of the padded vocabulary",
            "L" => "the number of layers",
            "E" => "the number of experts",
            "M" => "the width of an expert",
            "S" => "the width of the shared experts",
            "a" => "the number of attention heads",
            "g" => "the number of key and value heads",
            "r" => "the number of attention heads for each key and value head",
            "d" => "the size of a head",
            other => return write!(f, "axis {other}"),
        })
    }
}

/// A position on an axis, e.g. `layer 3`.
pub(crate) fn position(axis: &str, at: u64) -> String {
    match noun(axis) {
        Some(noun) => format!("{noun} {at}"),
        None => format!("position {at} on axis {axis}"),
    }
}

/// What is counted along an axis.
pub(crate) fn noun(axis: &str) -> Option<&'static str> {
    match axis {
        "L" => Some("layer"),
        "E" => Some("expert"),
        _ => None,
    }
}
