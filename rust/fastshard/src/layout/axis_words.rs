//! What axes are called in messages and documents. The letters are those of the layout tables; an axis of a table of one's own is called as it
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

/// The size of an axis as configs call it: by transformers' key, if it has one. Layers that predict further tokens
/// count as layers.
pub(crate) fn config_key(axis: &str) -> &str {
    match axis {
        "H" => "hidden_size",
        "F" => "intermediate_size",
        "V" => "vocab_size",
        "P" => "padded_vocab_size",
        "L" => "num_layers",
        "E" => "num_experts",
        "M" => "moe_intermediate_size",
        "S" => "shared_expert_intermediate_size",
        "a" => "num_attention_heads",
        "g" => "num_key_value_heads",
        "r" => "num_attention_heads_per_key_value_head",
        "d" => "head_dim",
        "nope" => "qk_nope_head_dim",
        "rope" => "qk_rope_head_dim",
        "vd" => "v_head_dim",
        "Q" => "q_lora_rank",
        "K" => "kv_lora_rank",
        "k" => "linear_num_key_heads",
        "u" => "linear_num_value_heads_per_key_head",
        "kd" => "linear_key_head_dim",
        "ud" => "linear_value_head_dim",
        "C" => "linear_conv_kernel_dim",
        other => other,
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
