//! What a tensor is, by the words of its name: a table, a head, a projection, a buffer, one of several experts.

/// Words for copies of a model beside it: averages, frozen and older ones.
const COPIES: [&str; 21] = [
    "ema",
    "avg",
    "average",
    "averaged",
    "momentum",
    "target",
    "ref",
    "reference",
    "teacher",
    "student",
    "shadow",
    "swa",
    "polyak",
    "policy",
    "actor",
    "critic",
    "reward",
    "original",
    "old",
    "copy",
    "online",
];
/// Words for buffers that are computed from sizes alone, so that layers and towers hold the same.
const BUFFERS: [&str; 20] = [
    "rotary",
    "rope",
    "freq",
    "freqs",
    "sinusoid",
    "sinusoidal",
    "sin",
    "cos",
    "pos",
    "pe",
    "positional",
    "position",
    "positions",
    "ids",
    "index",
    "alibi",
    "slopes",
    "mask",
    "alphas",
    "betas",
];
/// Those of them that repeat themselves: angles of both halves, masks of all heads.
const PERIODIC: [&str; 10] =
    ["rotary", "rope", "freq", "freqs", "sin", "cos", "ids", "alibi", "mask", "sinusoid"];
/// Words for what is learned, whatever it is called besides.
const LEARNED: [&str; 22] = [
    "weight",
    "weights",
    "kernel",
    "bias",
    "proj",
    "linear",
    "table",
    "embedding",
    "embeddings",
    "embed",
    "embeds",
    "emb",
    "rel",
    "relative",
    "var",
    "w",
    "b",
    "u",
    "v",
    "gate",
    "up",
    "down",
];
/// Words for what an optimizer keeps of a parameter: never what a parameter is, nor what another one is.
const MOMENTS: [&str; 10] =
    ["mu", "nu", "m", "v", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "trace", "velocity"];
/// Words for tables of something else than the vocabulary.
const OTHER_TABLES: [&str; 9] =
    ["position", "positions", "positional", "pos", "time", "type", "segment", "rel", "relative"];
/// Words for the table of the vocabulary, and for the head.
const TABLES: [&str; 7] = ["embed", "embedding", "embeddings", "emb", "wte", "embedder", "vocab"];
const HEADS: [&str; 9] =
    ["head", "output", "out", "final", "logits", "softmax", "unembed", "unembedding", "decoder"];

/// Words for matrices that a layer multiplies with.
const PROJECTIONS: [&str; 20] = [
    "dense", "query", "key", "value", "qkv", "q", "k", "v", "o", "wq", "wk", "wv", "wo", "wi", "w1", "w2",
    "w3", "fc", "fc1", "fc2",
];
/// Words for what begins as zeros, or is computed.
const ZEROS: [&str; 13] = [
    "ln",
    "rel",
    "relative",
    "position",
    "positions",
    "positional",
    "pos",
    "time",
    "type",
    "b",
    "scale",
    "shift",
    "mask",
];
/// Words for vectors that stand in the place of inputs, which may begin as zeros.
const TOKENS: [&str; 2] = ["token", "tokens"];

/// The words of a name, in small letters.
fn words(name: &str) -> impl Iterator<Item = String> + '_ {
    name.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase)
}

fn has_word(name: &str, of: &[&str]) -> bool {
    words(name).any(|word| of.contains(&word.as_str()))
}

/// The last parts of a name.
fn tail(name: &str, parts: usize) -> &str {
    let start = name.rmatch_indices('.').nth(parts - 1).map_or(0, |(dot, _)| dot + 1);
    &name[start..]
}

/// The same buffer of two layers or towers, by their names.
pub(crate) fn are_one_buffer(a: &str, b: &str) -> bool {
    let last = tail(a, 1);
    last == tail(b, 1) && has_word(last, &BUFFERS) && !has_word(last, &LEARNED)
}

/// True if a tensor's parts are equal by what is computed there.
pub(crate) fn is_periodic(name: &str) -> bool {
    has_word(tail(name, 1), &PERIODIC) && !has_word(tail(name, 1), &LEARNED)
}

/// What an optimizer keeps, as a name tells.
pub(crate) fn moments(name: &str) -> impl Iterator<Item = &str> {
    name.split('.').filter(|part| MOMENTS.contains(part))
}

pub(crate) fn is_of_experts(name: &str) -> bool {
    words(name).any(|word| word.starts_with("expert") || word.contains("moe"))
}

/// An embedding and a head by their names, in one order or the other.
pub(crate) fn may_be_tied(a: &str, b: &str) -> bool {
    let pair = |table: &str, head: &str| is_table(table) && !is_table(head) && is_head(head);
    pair(a, b) || pair(b, a)
}

/// Two tables of one vocabulary, or two heads: of an encoder and a decoder, of stages, of models side by side.
pub(crate) fn are_one_table(a: &str, b: &str) -> bool {
    let further = |name: &str| name.contains("shared_head");
    let heads = is_head(a) && is_head(b) && (tail(a, 2) == tail(b, 2) || further(a) || further(b));
    // The bias of a head that is there under the head's name too.
    let without =
        |name: &str| name.split('.').filter(|part| *part != "decoder").collect::<Vec<_>>().join(".");
    (is_table(a) && is_table(b))
        || heads
        || (a.ends_with(".bias") && is_head(a) | is_head(b) && without(a) == without(b))
}

fn is_table(name: &str) -> bool {
    let last = tail(name, 2);
    let shared = last.split('.').any(|part| part == "shared");
    // A further head may have the table of the first one beside it.
    let own = !in_layer(name) || last.contains("embed_tokens");
    own && !is_of_experts(name) && !has_word(last, &OTHER_TABLES) && (shared || has_word(last, &TABLES))
}

fn is_head(name: &str) -> bool {
    let last = tail(name, 2);
    let own = !in_layer(name) || name.contains("shared_head");
    own && !is_of_experts(name) && (has_word(last, &HEADS) || last.contains("lm_head"))
}

/// True for a tensor of one of several layers: a part of its name is numbered, besides the first (a stage of a
/// pipeline) and what an optimizer numbers.
fn in_layer(name: &str) -> bool {
    let parts = name.split('.').enumerate();
    let state = |part: &str| part.starts_with("opt") || part.starts_with("no_prefix");
    let mut of_state = false;
    for (i, part) in parts {
        let number = part.bytes().all(|b| b.is_ascii_digit());
        of_state = state(part) || (of_state && number);
        let of_layers = part.starts_with("layer") || part.starts_with("block") || part == "h";
        let numbered = part.contains(|c: char| c.is_ascii_digit()) && !(i == 0 && number);
        if !of_state && (of_layers || numbered) {
            return true;
        }
    }
    false
}

/// A name up to the number of its layer, that included: the same for all tensors of a layer. None outside all layers.
pub(crate) fn layer(name: &str) -> Option<&str> {
    let mut end = 0;
    for part in name.split('.') {
        end += part.len();
        let number = part.rsplit('_').next().unwrap_or(part);
        if end < name.len() && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) {
            return Some(&name[..end]);
        }
        end += 1;
    }
    None
}

/// A name without its numbers: the same for one tensor of all layers, and of all experts.
pub(crate) fn without_numbers(name: &str) -> String {
    name.chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// True for a matrix that training fills, by its name: a table of the vocabulary, a head or a projection.
pub(crate) fn is_table_head_or_projection(name: &str) -> bool {
    is_table(name) || is_head(name) || words(tail(name, 2)).any(|word| is_projection(&word))
}

fn is_projection(word: &str) -> bool {
    word.contains("proj") || PROJECTIONS.contains(&word)
}

/// True for what may be zero throughout in a good model, by its name: what is added and begins with nothing (biases, tokens,
/// tables of relative positions, the second factor of an adapter), norms, buffers, and what an optimizer keeps.
pub(crate) fn may_be_zero(name: &str, dimensions: usize) -> bool {
    let last = tail(name, 2);
    has_word(last, &ZEROS)
        || has_word(tail(name, 1), &TOKENS)
        || words(last).any(|word| word.contains("norm") || word.ends_with("bias"))
        || name.contains("lora_B")
        || is_buffer(name, dimensions)
        || moments(name).next().is_some()
}

/// What is different in the middle of two names, in whole parts.
pub(crate) fn middles<'n>(a: &'n str, b: &'n str) -> (Vec<&'n str>, Vec<&'n str>) {
    let (a, b): (Vec<&str>, Vec<&str>) = (a.split('.').collect(), b.split('.').collect());
    let start = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
    let most = a.len().min(b.len()) - start;
    let end = a.iter().rev().zip(b.iter().rev()).take(most).take_while(|(x, y)| x == y).count();
    (a[start..a.len() - end].to_vec(), b[start..b.len() - end].to_vec())
}

/// True if two names are one tensor's in a model and in a copy of it beside it.
pub(crate) fn of_copies(a: &str, b: &str) -> bool {
    let (x, y) = middles(a, b);
    if tail(a, 1) != tail(b, 1) || moments(a).ne(moments(b)) {
        return false;
    }
    // A tower and the one that follows it slowly: text_encoder, text_encoder_m.
    if let ([one], [other]) = (&x[..], &y[..]) {
        if other.strip_suffix("_m") == Some(one) || one.strip_suffix("_m") == Some(other) {
            return true;
        }
    }
    // Moments of an optimizer are no averages of weights.
    let tells = |part: &&str| has_word(part, &COPIES) && !part.contains("exp_avg");
    // What follows the word is the model's own name, on both sides; before it is the way to the copy.
    let own = |parts: &[&str]| parts.iter().rposition(tells).map(|at| parts[at + 1..].join("."));
    let is_way = |parts: &[&str]| {
        parts.len() < 3 && !parts.iter().any(|part| part.contains(|c: char| c.is_ascii_digit()))
    };
    let follows = |all: &[&str], rest: &str| {
        let all_names = all.join(".");
        let way = if rest.is_empty() { Some(all_names.as_str()) } else { all_names.strip_suffix(rest) };
        way.is_some_and(|way| is_way(&way.split('.').filter(|part| !part.is_empty()).collect::<Vec<_>>()))
    };
    match (own(&x), own(&y)) {
        (Some(one), Some(other)) => one == other,
        (Some(rest), None) => follows(&y, &rest),
        (None, Some(rest)) => follows(&x, &rest),
        (None, None) => false,
    }
}

/// A name without the numbers that follow a word for experts: the same for all of a layer.
pub(crate) fn of_any_expert(name: &str) -> String {
    let (mut of_experts, mut before) = (false, false);
    let parts = name.split('.').map(|part| {
        let rest = part.trim_end_matches(|c: char| c.is_ascii_digit());
        // `experts.3.w1`, and `experts.linear_fc1.weight3`.
        let numbered = (before && rest.is_empty()) || (of_experts && matches!(rest, "weight" | "bias"));
        before = is_of_experts(part);
        of_experts |= before;
        if numbered {
            format!("{rest}#")
        } else {
            part.to_string()
        }
    });
    parts.collect::<Vec<_>>().join(".")
}

/// True if two parts of names differ in their numbers alone.
pub(crate) fn renumbered(a: &str, b: &str) -> bool {
    a != b && without_numbers(a) == without_numbers(b)
}

/// True for a tensor that a module computes and does not train, by its name: masks, tables of biases by position, rotary
/// frequencies. source: register_buffer in transformers models/{gpt2,gptj,gpt_neo,gpt_neox,mpt,bloom}
pub(crate) fn is_buffer(name: &str, dimensions: usize) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    let words = ["mask", "inv_freq", "rotary", "alibi", "slopes", "cos_cached", "sin_cached"];
    words.iter().any(|word| last.contains(word))
        || matches!(last, "masked_bias" | "position_bias")
        || last.ends_with("bias") && dimensions > 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_a_model_are_told_by_words() {
        for (a, b) in [
            ("model.layers.0.w", "ema.layers.0.w"),
            ("params.layers.0.w", "ema.params.layers.0.w"),
            ("params.layers.0.w", "opt_state.1.0.ema.layers.0.w"),
            ("text_encoder.w", "text_encoder_m.w"),
            ("actor.fc1.weight", "critic.fc1.weight"),
            ("base.w", "policy.w"),
        ] {
            assert!(of_copies(a, b) && of_copies(b, a), "{a} {b}");
        }
        for (a, b) in [
            ("encoder.layer.w", "decoder.layer.w"),
            ("layers.0.wk", "layers.0.wv"),
            ("model.0.weight", "ema.1.weight"),
            ("actor.fc1.weight", "critic.fc2.weight"),
            ("actor.q_proj.weight", "critic.k_proj.weight"),
            ("policy.up.w", "policy.old.down.w"),
            ("state.w.exp_avg", "state.w.exp_avg_sq"),
            ("fc_mean.weight", "fc_logvar.weight"),
            ("opt.layers.0.w_m", "opt.layers.0.w_v"),
            ("enc.fc_m.weight", "enc.fc_v.weight"),
            ("layers.0.w", "ema.w"),
        ] {
            assert!(!of_copies(a, b) && !of_copies(b, a), "{a} {b}");
        }
    }

    #[test]
    fn heads_are_tied_to_embeddings_and_nothing_else_is() {
        let tied = |a: &str, b: &str| may_be_tied(a, b) || are_one_table(a, b);
        for (a, b) in [
            ("model.embed_tokens.weight", "lm_head.weight"),
            ("0.word_embeddings.weight", "9.final_linear.weight"),
            ("0.word_embeddings.weight", "9.word_embeddings.weight"),
            ("embedding.word_embeddings.weight", "output_layer.weight"),
            ("shared.weight", "encoder.embed_tokens.weight"),
            ("eagle.lm_head.weight", "lm_head.weight"),
            ("cls.predictions.bias", "cls.predictions.decoder.bias"),
            ("model.embed_tokens.weight", "model.layers.61.embed_tokens.weight"),
            ("lm_head.weight", "model.layers.61.shared_head.head.weight"),
            ("params.token_embedder.embedding", "params.decoder.logits_dense.kernel"),
        ] {
            assert!(tied(a, b) && tied(b, a), "{a} {b}");
        }
        for (a, b) in [
            ("decoder.multihead_attention.query.kernel", "decoder.multihead_attention.key.kernel"),
            ("ensemble.query", "ensemble.key"),
            ("up.weight", "down.weight"),
            ("layers_0.shared_experts.wi_0.kernel", "layers_1.shared_experts.wi_0.kernel"),
            ("bert.embeddings.LayerNorm.weight", "bert.encoder.layer.0.output.LayerNorm.weight"),
            ("Transformer.encoderblock_0.attn.out.kernel", "Transformer.encoderblock_1.attn.out.kernel"),
            ("decoder.dense_layers_0.attention.out.kernel", "decoder.dense_layers_1.attention.out.kernel"),
            ("visual.resblocks.0.attn.out_proj.weight", "visual.resblocks.1.attn.out_proj.weight"),
            ("down.0.resnets.0.time_emb_proj.weight", "down.0.resnets.1.time_emb_proj.weight"),
            ("decoder.layers_0.mlp.shared.kernel", "decoder.layers_1.mlp.shared.kernel"),
            ("word_embeddings.weight", "position_embeddings.weight"),
            ("img.pos_embed", "txt.pos_embed"),
        ] {
            assert!(!tied(a, b) && !tied(b, a), "{a} {b}");
        }
    }

    #[test]
    fn what_training_fills_is_never_zero() {
        for name in [
            "model.embed_tokens.weight",
            "transformer.wte.weight",
            "lm_head.weight",
            "model.layers.3.self_attn.q_proj.weight",
            "model.layers.3.mlp.gate_proj.weight",
            "h.0.attn.c_attn.c_proj.weight",
            "encoder.layer.1.attention.self.query.weight",
            "decoder.layers.wi_0.wi.kernel",
            "transformer.layers.0.attention.query_key_value.weight",
        ] {
            assert!(is_table_head_or_projection(name) && !may_be_zero(name, 2), "{name}");
        }
        for name in [
            "layers.0.q_proj.bias",
            "layers.0.self_attn.q_proj.lora_B.weight",
            "base_model.model.layers.0.q_proj.lora_B.default.weight",
            "embeddings.cls_token",
            "embeddings.mask_token",
            "vit.embeddings.register_tokens",
            "layers.0.attn.relative_position_bias_table",
            "blocks.0.attn.rel_pos_h",
            "img.pos_embed",
            "layers.0.input_layernorm.weight",
            "embeddings.token_type_embeddings.weight",
            "layers.0.attn.bias_mask",
            "state.layers.0.q_proj.weight.exp_avg",
        ] {
            assert!(may_be_zero(name, 2), "{name}");
        }
    }

    #[test]
    fn layers_by_their_names() {
        for (name, found) in [
            ("model.layers.3.mlp.up.weight", Some("model.layers.3")),
            ("params.decoder.layers_12.mlp.wi.kernel", Some("params.decoder.layers_12")),
            ("2.attention.dense.weight", Some("2")),
            ("lm_head.weight", None),
            ("head.0", None),
            ("a._.b", None),
        ] {
            assert_eq!(layer(name), found, "{name}");
        }
    }

    #[test]
    fn buffers_are_what_is_computed() {
        for (a, b) in [
            ("layers.0.rotary_emb.inv_freq", "layers.1.rotary_emb.inv_freq"),
            ("encoder.pos.pe", "decoder.pos.pe"),
            ("sched.alphas_cumprod", "ema.sched.alphas_cumprod"),
        ] {
            assert!(are_one_buffer(a, b), "{a}");
        }
        assert!(is_periodic("rotary_emb.cos_cached") && !is_periodic("pos_embed"));
        for (a, b) in [
            ("mask_decoder.layers.0.q_proj", "mask_decoder.layers.1.q_proj"),
            ("layers.0.attn.relative_position_bias_table", "layers.1.attn.relative_position_bias_table"),
            ("layers.0.attn.q_rope_proj.kernel", "layers.1.attn.q_rope_proj.kernel"),
            ("blocks.0.attn.rel_pos_h", "blocks.1.attn.rel_pos_h"),
            ("img.pos_embed", "txt.pos_embed"),
            ("layers.0.position_embeddings", "layers.1.position_embeddings"),
            ("layers.0.A_inv", "layers.1.A_inv"),
            ("layers.0.index.q", "layers.1.index.k"),
            ("layers.0.mask.gate", "layers.1.mask.up"),
            ("position_emb.emb_var", "position_emb.emb_var"),
        ] {
            assert!(!are_one_buffer(a, b), "{a}");
        }
    }

    #[test]
    fn numbers_in_names() {
        assert!(renumbered("layers_3", "layers_12") && renumbered("3", "12"));
        assert!(!renumbered("wk", "wv") && !renumbered("3", "3"));
        assert_eq!(of_any_expert("layers.0.experts.3.w1"), "layers.0.experts.#.w1");
        assert_eq!(of_any_expert("0.experts.linear_fc1.weight3"), "0.experts.linear_fc1.weight#");
    }
}
