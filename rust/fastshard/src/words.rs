//! What a tensor is, by the words of its name: a table, a head, a projection, a buffer, one of several experts. The words are
//! declared by whoever opens the checkpoint; without them no name says anything.

use serde::Deserialize;

/// Words by what they tell, in small letters; `*` at the beginning or the end stands for anything. One with `_` in it is of a
/// part of a name (between dots), as it is spelled; others are of a word of a part.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Words {
    /// Tables of the vocabulary.
    tables: Vec<String>,
    /// Tables of something else.
    other_tables: Vec<String>,
    /// Tables that several parts of a model share.
    shared_tables: Vec<String>,
    /// Tables that a further head in a layer has of its own.
    further_tables: Vec<String>,
    /// Output layers over the vocabulary.
    heads: Vec<String>,
    /// Such heads in a layer.
    further_heads: Vec<String>,
    /// What may stand between the name of a head and its bias.
    inside_heads: Vec<String>,
    /// Matrices that a layer multiplies with.
    projections: Vec<String>,
    /// Experts, and what holds them.
    experts: Vec<String>,
    /// Layers, whether they are numbered or not.
    layers: Vec<String>,
    /// An optimizer's state.
    states: Vec<String>,
    /// Parameters that may be numbered by experts.
    parameters: Vec<String>,
    /// Biases.
    biases: Vec<String>,
    /// Buffers that are computed from sizes alone, so that layers and towers hold the same.
    buffers: Vec<String>,
    /// Those of them that repeat themselves: angles of both halves, masks of all heads.
    periodic: Vec<String>,
    /// The end of names of what a module computes and does not train.
    computed: Vec<String>,
    /// What is learned, whatever it is called besides.
    learned: Vec<String>,
    /// What begins as zeros, or is computed.
    zeros: Vec<String>,
    /// Factors of adapters that begin as zeros.
    zero_factors: Vec<String>,
    /// Vectors that stand in the place of inputs, which may begin as zeros.
    tokens: Vec<String>,
    /// What an optimizer keeps of a parameter: never what a parameter is, nor what another one is.
    moments: Vec<String>,
    /// Copies of a model beside it: averages, frozen and older ones.
    copies: Vec<String>,
    /// What looks like such a copy and is an average of gradients.
    averages: Vec<String>,
    /// Ends of the name of a tower that follows another slowly.
    followers: Vec<String>,
    /// The first part of names below which a trainer keeps numbers of its own: its callbacks' best scores.
    trainers: Vec<String>,
}

/// The words of a name, in small letters.
fn words(name: &str) -> impl Iterator<Item = String> + '_ {
    name.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase)
}

fn fits(text: &str, pattern: &str) -> bool {
    match (pattern.strip_prefix('*'), pattern.strip_suffix('*')) {
        (None, None) => text == pattern,
        (Some(end), None) => text.ends_with(end),
        (None, Some(start)) => text.starts_with(start),
        (Some(rest), Some(_)) => text.contains(rest.strip_suffix('*').unwrap_or(rest)),
    }
}

/// True if a name, or a part of one, has one of these words.
fn has(name: &str, of: &[String]) -> bool {
    let (part, word) = (|word: &&String| word.contains('_'), |word: &&String| !word.contains('_'));
    words(name).any(|one| of.iter().filter(word).any(|pattern| fits(&one, pattern)))
        || name.split('.').any(|one| of.iter().filter(part).any(|pattern| fits(one, pattern)))
}

/// True for a part of a name, as it is spelled.
fn is_one(part: &str, of: &[String]) -> bool {
    of.iter().any(|pattern| fits(part, pattern))
}

/// The last parts of a name.
fn tail(name: &str, parts: usize) -> &str {
    let start = name.rmatch_indices('.').nth(parts - 1).map_or(0, |(dot, _)| dot + 1);
    &name[start..]
}

impl Words {
    /// The same buffer of two layers or towers, by their names.
    pub(crate) fn are_one_buffer(&self, a: &str, b: &str) -> bool {
        let last = tail(a, 1);
        last == tail(b, 1) && has(last, &self.buffers) && !has(last, &self.learned)
    }

    /// True if a tensor's parts are equal by what is computed there.
    pub(crate) fn is_periodic(&self, name: &str) -> bool {
        has(tail(name, 1), &self.periodic) && !has(tail(name, 1), &self.learned)
    }

    /// What an optimizer keeps, as a name tells.
    pub(crate) fn moments<'n>(&'n self, name: &'n str) -> impl Iterator<Item = &'n str> {
        name.split('.').filter(|part| is_one(part, &self.moments))
    }

    pub(crate) fn is_of_experts(&self, name: &str) -> bool {
        has(name, &self.experts)
    }

    pub(crate) fn is_bias(&self, name: &str) -> bool {
        name.contains('.') && is_one(tail(name, 1), &self.biases)
    }

    /// An embedding and a head by their names, in one order or the other.
    pub(crate) fn may_be_tied(&self, a: &str, b: &str) -> bool {
        let pair =
            |table: &str, head: &str| self.is_table(table) && !self.is_table(head) && self.is_head(head);
        pair(a, b) || pair(b, a)
    }

    /// Two tables of one vocabulary, or two heads: of an encoder and a decoder, of stages, of models side by side.
    pub(crate) fn are_one_table(&self, a: &str, b: &str) -> bool {
        let further = |name: &str| has(name, &self.further_heads);
        let (x, y) = (self.is_head(a), self.is_head(b));
        let heads = x && y && (tail(a, 2) == tail(b, 2) || further(a) || further(b));
        // The bias of a head that is there under the head's name too.
        let without = |name: &str| {
            name.split('.').filter(|part| !is_one(part, &self.inside_heads)).collect::<Vec<_>>().join(".")
        };
        (self.is_table(a) && self.is_table(b))
            || heads
            || (self.is_bias(a) && x | y && without(a) == without(b))
    }

    fn is_table(&self, name: &str) -> bool {
        let last = tail(name, 2);
        let shared = last.split('.').any(|part| is_one(part, &self.shared_tables));
        // A further head may have the table of the first one beside it.
        let own = !self.in_layer(name) || has(last, &self.further_tables);
        own && !self.is_of_experts(name)
            && !has(last, &self.other_tables)
            && (shared || has(last, &self.tables))
    }

    fn is_head(&self, name: &str) -> bool {
        let own = !self.in_layer(name) || has(name, &self.further_heads);
        own && !self.is_of_experts(name) && has(tail(name, 2), &self.heads)
    }

    /// True for a tensor of one of several layers: a part of its name is numbered, besides the first (a stage of a
    /// pipeline) and what an optimizer numbers.
    fn in_layer(&self, name: &str) -> bool {
        let mut of_state = false;
        for (i, part) in name.split('.').enumerate() {
            let number = part.bytes().all(|b| b.is_ascii_digit());
            of_state = is_one(part, &self.states) || (of_state && number);
            let numbered = part.contains(|c: char| c.is_ascii_digit()) && !(i == 0 && number);
            if !of_state && (is_one(part, &self.layers) || numbered) {
                return true;
            }
        }
        false
    }

    /// Where the word ends that stands for all layers in a name: of a tensor that holds what all of them have.
    pub(crate) fn stack(&self, name: &str) -> Option<usize> {
        let mut end = 0;
        for part in name.split('.') {
            end += part.len();
            if end < name.len() && is_one(part, &self.layers) && !part.contains("norm") {
                return Some(end);
            }
            end += 1;
        }
        None
    }

    /// True for a matrix that training fills, by its name: a table of the vocabulary, a head or a projection.
    pub(crate) fn is_table_head_or_projection(&self, name: &str) -> bool {
        self.is_table(name) || self.is_head(name) || has(tail(name, 2), &self.projections)
    }

    /// True for what may be zero throughout in a good model, by its name: what is added and begins with nothing (biases,
    /// tokens, tables of relative positions, the second factor of an adapter), norms, buffers, and what an optimizer keeps.
    pub(crate) fn may_be_zero(&self, name: &str, dimensions: usize) -> bool {
        has(tail(name, 2), &self.zeros)
            || has(tail(name, 1), &self.tokens)
            || has(name, &self.zero_factors)
            || self.is_buffer(name, dimensions)
            || self.moments(name).next().is_some()
    }

    /// True if two names are one tensor's in a model and in a copy of it beside it.
    pub(crate) fn of_copies(&self, a: &str, b: &str) -> bool {
        let (x, y) = middles(a, b);
        if tail(a, 1) != tail(b, 1) || self.moments(a).ne(self.moments(b)) {
            return false;
        }
        if let ([one], [other]) = (&x[..], &y[..]) {
            let follows = |one: &str, other: &str| {
                self.followers.iter().any(|end| other.strip_suffix(&**end) == Some(one))
            };
            if follows(one, other) || follows(other, one) {
                return true;
            }
        }
        // Moments of an optimizer are no averages of weights.
        let tells = |part: &&str| has(part, &self.copies) && !is_one(part, &self.averages);
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
    pub(crate) fn of_any_expert(&self, name: &str) -> String {
        let (mut of_experts, mut before) = (false, false);
        let parts = name.split('.').map(|part| {
            let rest = part.trim_end_matches(|c: char| c.is_ascii_digit());
            // `experts.3.w1`, and `experts.linear_fc1.weight3`.
            let numbered = (before && rest.is_empty()) || (of_experts && is_one(rest, &self.parameters));
            before = self.is_of_experts(part);
            of_experts |= before;
            if numbered {
                format!("{rest}#")
            } else {
                part.to_string()
            }
        });
        parts.collect::<Vec<_>>().join(".")
    }

    /// True for a tensor that a module computes and does not train, by its name: masks, tables of biases by position, rotary
    /// frequencies; and for a number that a trainer keeps for itself, such as a best score that is infinite before the first.
    pub(crate) fn is_buffer(&self, name: &str, dimensions: usize) -> bool {
        let last = tail(name, 1);
        is_one(last, &self.computed)
            || dimensions > 2 && self.biases.iter().any(|bias| last.ends_with(&**bias))
            || dimensions == 0 && name.split_once('.').is_some_and(|(first, _)| is_one(first, &self.trainers))
    }
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

/// What is different in the middle of two names, in whole parts.
pub(crate) fn middles<'n>(a: &'n str, b: &'n str) -> (Vec<&'n str>, Vec<&'n str>) {
    let (a, b): (Vec<&str>, Vec<&str>) = (a.split('.').collect(), b.split('.').collect());
    let start = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
    let most = a.len().min(b.len()) - start;
    let end = a.iter().rev().zip(b.iter().rev()).take(most).take_while(|(x, y)| x == y).count();
    (a[start..a.len() - end].to_vec(), b[start..b.len() - end].to_vec())
}

/// True if two parts of names differ in their numbers alone.
pub(crate) fn renumbered(a: &str, b: &str) -> bool {
    a != b && without_numbers(a) == without_numbers(b)
}

#[cfg(test)]
#[path = "../tests/it/common/words.rs"]
mod declared;

#[cfg(test)]
mod tests {
    use super::*;

    fn of_python() -> Words {
        declared::words()
    }

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
            assert!(of_python().of_copies(a, b) && of_python().of_copies(b, a), "{a} {b}");
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
            assert!(!of_python().of_copies(a, b) && !of_python().of_copies(b, a), "{a} {b}");
        }
    }

    #[test]
    fn heads_are_tied_to_embeddings_and_nothing_else_is() {
        let tied = |a: &str, b: &str| of_python().may_be_tied(a, b) || of_python().are_one_table(a, b);
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
            assert!(
                of_python().is_table_head_or_projection(name) && !of_python().may_be_zero(name, 2),
                "{name}"
            );
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
            assert!(of_python().may_be_zero(name, 2), "{name}");
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
            assert!(of_python().are_one_buffer(a, b), "{a}");
        }
        assert!(of_python().is_periodic("rotary_emb.cos_cached") && !of_python().is_periodic("pos_embed"));
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
            assert!(!of_python().are_one_buffer(a, b), "{a}");
        }
    }

    #[test]
    fn numbers_in_names() {
        assert!(renumbered("layers_3", "layers_12") && renumbered("3", "12"));
        assert!(!renumbered("wk", "wv") && !renumbered("3", "3"));
        assert_eq!(of_python().of_any_expert("layers.0.experts.3.w1"), "layers.0.experts.#.w1");
        assert_eq!(of_python().of_any_expert("0.experts.linear_fc1.weight3"), "0.experts.linear_fc1.weight#");
    }
}
