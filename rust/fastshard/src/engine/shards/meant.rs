//! Equal contents that are meant, as far as names and the rest of the checkpoint tell.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

use super::contents::Contents;
use super::values::MIN_VALUES;
use crate::plan::{Plan, StoredTensor};
use crate::standing::{each_blob, each_use, mixed, Standing, Use};

/// More layers than any model has: all there are.
const ALL: usize = usize::MAX;

/// Why two contents are equal, the kindest last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Verdict {
    /// One was put in the place of the other.
    Copied,
    /// It can be meant: it is told.
    Meant,
    /// It is so in every good checkpoint of the kind.
    Innocent,
}

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
fn are_one_buffer(a: &str, b: &str) -> bool {
    let last = tail(a, 1);
    last == tail(b, 1) && has_word(last, &BUFFERS) && !has_word(last, &LEARNED)
}

/// True if a tensor's parts are equal by what is computed there.
fn is_periodic(name: &str) -> bool {
    has_word(tail(name, 1), &PERIODIC) && !has_word(tail(name, 1), &LEARNED)
}

/// What an optimizer keeps, as a name tells.
fn moments(name: &str) -> impl Iterator<Item = &str> {
    name.split('.').filter(|part| MOMENTS.contains(part))
}

pub(super) fn is_of_experts(name: &str) -> bool {
    words(name).any(|word| word.starts_with("expert") || word.contains("moe"))
}

/// An embedding and a head by their names, in one order or the other.
fn may_be_tied(a: &str, b: &str) -> bool {
    let pair = |table: &str, head: &str| is_table(table) && !is_table(head) && is_head(head);
    pair(a, b) || pair(b, a)
}

/// Two tables of one vocabulary, or two heads: of an encoder and a decoder, of stages, of models side by side.
fn are_one_table(a: &str, b: &str) -> bool {
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

/// What is different in the middle of two names, in whole parts.
fn middles<'n>(a: &'n str, b: &'n str) -> (Vec<&'n str>, Vec<&'n str>) {
    let (a, b): (Vec<&str>, Vec<&str>) = (a.split('.').collect(), b.split('.').collect());
    let start = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
    let most = a.len().min(b.len()) - start;
    let end = a.iter().rev().zip(b.iter().rev()).take(most).take_while(|(x, y)| x == y).count();
    (a[start..a.len() - end].to_vec(), b[start..b.len() - end].to_vec())
}

/// True if two names are one tensor's in a model and in a copy of it beside it.
fn of_copies(a: &str, b: &str) -> bool {
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
fn of_any_expert(name: &str) -> String {
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
fn renumbered(a: &str, b: &str) -> bool {
    let rest = |part: &str| -> String { part.chars().filter(|c| !c.is_ascii_digit()).collect() };
    a != b && rest(a) == rest(b)
}

/// Equal contents by tensor and name.
pub(super) struct Meant<'p> {
    plan: &'p Plan,
    contents: &'p Contents,
    /// Stored tensor of which others hold all -> where its contents lie in it, and which they are.
    tensors: HashMap<u32, BTreeMap<Vec<u64>, u64>>,
    /// Tensors of a name, in the plan's order.
    names: HashMap<&'p str, Vec<u32>>,
    /// Tensors of the experts of one layer.
    experts: HashMap<String, Vec<u32>>,
    /// Whether all tensors of two parts of names are equal, as far as it was asked.
    layers: RefCell<HashMap<(String, String), bool>>,
    /// Whether all experts of a layer are equal: by the first of their tensors, or by the array that holds all.
    all_experts: RefCell<HashMap<(u32, bool), bool>>,
    /// How many layers hold what the tensors of a name without its layer's number do.
    everywhere: RefCell<HashMap<String, usize>>,
}

impl<'p> Meant<'p> {
    pub(super) fn of(plan: &'p Plan, standing: &Standing, contents: &'p Contents) -> Self {
        let mut tensors: HashMap<u32, BTreeMap<Vec<u64>, u64>> = HashMap::new();
        let mut names: HashMap<&str, Vec<u32>> = HashMap::new();
        let mut experts: HashMap<String, Vec<u32>> = HashMap::new();
        for (i, stored) in plan.stored.iter().enumerate().filter(|(i, _)| standing.is_used(*i as u32)) {
            let (mut all, mut told) = (true, false);
            each_blob(stored, |blob| {
                all &= contents.shared(blob).is_some();
                told |= contents.class(blob).is_some();
            });
            if all && told {
                let held = tensors.entry(i as u32).or_default();
                each_use(i as u32, stored, |blob, found| {
                    let content = u64::from(contents.shared(blob).unwrap_or_default());
                    held.insert(
                        found.at,
                        mixed(content, if contents.is_empty(blob) { 0 } else { found.offset }),
                    );
                });
            }
            names.entry(&stored.name).or_default().push(i as u32);
            if is_of_experts(&stored.name) {
                experts.entry(of_any_expert(&stored.name)).or_default().push(i as u32);
            }
        }
        Meant {
            plan,
            contents,
            tensors,
            names,
            experts,
            layers: RefCell::default(),
            all_experts: RefCell::default(),
            everywhere: RefCell::default(),
        }
    }

    fn stored(&self, i: u32) -> &'p StoredTensor {
        &self.plan.stored[i as usize]
    }

    /// True if two tensors of one shape hold the same.
    fn same(&self, a: u32, b: u32) -> bool {
        let (x, y) = (self.stored(a), self.stored(b));
        (&x.shape, x.dtype) == (&y.shape, y.dtype)
            && self.tensors.get(&a).is_some_and(|content| self.tensors.get(&b) == Some(content))
    }

    /// Why two contents are equal. `alone`: whether each lies in a file or block of its own, so that those of one
    /// layer were not copied all at once.
    pub(super) fn verdict(&self, a: &Use, b: &Use, alone: bool) -> Verdict {
        let (t, u) = (self.stored(a.stored), self.stored(b.stored));
        let of_experts = is_of_experts(&t.name) && is_of_experts(&u.name);
        if of_experts && self.all_experts(a.stored, b.stored) {
            return Verdict::Meant;
        }
        if a.stored == b.stored && is_periodic(&t.name) {
            return Verdict::Innocent;
        }
        if a.stored == b.stored || a.at != b.at || t.name == u.name {
            return Verdict::Copied;
        }
        let layers = self.everywhere(a.stored, b.stored);
        if are_one_buffer(&t.name, &u.name) && self.same(a.stored, b.stored) {
            return if layers > 2 { Verdict::Innocent } else { Verdict::Meant };
        }
        let untied = self.plan.untied || moments(&t.name).ne(moments(&u.name));
        let one = (!untied && may_be_tied(&t.name, &u.name))
            || (moments(&t.name).eq(moments(&u.name)) && are_one_table(&t.name, &u.name));
        let whole = t.shape.len() > 1 || t.name.ends_with(".bias");
        let tied = one && whole && self.same(a.stored, b.stored);
        let doubled = || alone && self.doubled(&t.name, &u.name);
        match of_copies(&t.name, &u.name) || tied || (alone && layers == ALL) || doubled() {
            true => Verdict::Meant,
            false => Verdict::Copied,
        }
    }

    /// In how many layers the tensor is that of the two, where the layer's number is all that tells their names apart;
    /// [`ALL`] if that is in all of them, three or more.
    fn everywhere(&self, a: u32, b: u32) -> usize {
        let (one, other) = (&self.stored(a).name, &self.stored(b).name);
        let position = one.split('.').zip(other.split('.')).take_while(|(x, y)| x == y).count();
        match &middles(one, other) {
            (x, y) if x.len() == 1 && y.len() == 1 && renumbered(x[0], y[0]) => {}
            _ => return 0,
        }
        let pattern = |name: &str| {
            let parts = name.split('.').enumerate().map(|(i, part)| match i == position {
                true => part.chars().filter(|c| !c.is_ascii_digit()).collect(),
                false => part.to_string(),
            });
            parts.collect::<Vec<String>>().join(".")
        };
        let wanted = pattern(one);
        let key = format!("{position}:{wanted}");
        if let Some(known) = self.everywhere.borrow().get(&key) {
            return *known;
        }
        let (mut equal, mut others) = (0, 0);
        for (name, tensors) in &self.names {
            if name.len() + 8 > wanted.len() && pattern(name) == wanted {
                match tensors.iter().all(|&i| self.same(i, a)) {
                    true => equal += 1,
                    false => others += 1,
                }
            }
        }
        let found = if others == 0 && equal > 2 { ALL } else { equal };
        self.everywhere.borrow_mut().insert(key, found);
        found
    }

    /// True if the experts of a layer, three or more, hold the same: they were made of one. What all tokens go through
    /// beside them may have been made of it too.
    fn all_experts(&self, a: u32, b: u32) -> bool {
        let family = |i: u32| self.experts.get(&of_any_expert(&self.stored(i).name));
        let (Some(own), Some(other)) = (family(a), family(b)) else { return false };
        if !std::ptr::eq(own, other) {
            let made_of_one = |family: &[u32]| family.len() > 2 && self.all_experts(family[0], family[1]);
            return self.same(a, b) && (made_of_one(own) || made_of_one(other));
        }
        let key = (if a == b { a } else { own[0] }, a == b);
        if let Some(known) = self.all_experts.borrow().get(&key) {
            return *known;
        }
        let found = if a == b { self.all_in_one_array(a) } else { self.all_of_a_family(own) };
        self.all_experts.borrow_mut().insert(key, found);
        found
    }

    /// All experts in one array: equal along one of its dimensions.
    fn all_in_one_array(&self, array: u32) -> bool {
        let Some(contents) = self.tensors.get(&array) else { return false };
        let rank = contents.keys().map(Vec::len).min().unwrap_or(0);
        (0..rank).any(|dim| {
            let mut lines: HashMap<Vec<u64>, Vec<u64>> = HashMap::new();
            for (at, content) in contents {
                let mut line = at.clone();
                line[dim] = 0;
                lines.entry(line).or_default().push(*content);
            }
            lines.values().all(|line| line.len() > 2 && line.iter().all(|content| *content == line[0]))
        })
    }

    /// All experts in tensors of their own. Ranks that divide an expert hold a part each: as many of one part as of
    /// another.
    fn all_of_a_family(&self, family: &[u32]) -> bool {
        let mut parts: HashMap<&BTreeMap<Vec<u64>, u64>, usize> = HashMap::new();
        for i in family {
            let Some(content) = self.tensors.get(i) else { return false };
            *parts.entry(content).or_default() += 1;
        }
        let each = family.len() / parts.len();
        each > 2 && parts.values().all(|n| *n == each)
    }

    /// True if all of one layer, or of one part of the model, is equal to all of another: where the two names differ.
    /// Of layers, whose numbers differ, two tensors or more; of others four, which no accident copies one by one.
    fn doubled(&self, a: &str, b: &str) -> bool {
        let (x, y) = middles(a, b);
        let of_layers = x.len() == 1 && y.len() == 1 && renumbered(x[0], y[0]);
        let position = a.split('.').zip(b.split('.')).take_while(|(x, y)| x == y).count();
        let at_end = position + x.len() == a.split('.').count();
        let (start, end) = match at_end {
            // One of two things that are kept of each parameter: `X.exp_avg_sq`, `X.max_exp_avg_sq`.
            true => (String::new(), [".", &x.join(".")].concat()),
            false => {
                let start: String = a.split('.').take(position).map(|part| format!("{part}.")).collect();
                (start + &x.iter().map(|part| format!("{part}.")).collect::<String>(), String::new())
            }
        };
        let key = (format!("{start}|{end}"), y.join("."));
        if let Some(known) = self.layers.borrow().get(&key) {
            return *known;
        }
        let theirs: String = a.split('.').take(position).map(|part| format!("{part}.")).collect();
        let (mut equal, mut other) = (0u64, 0u64);
        for (name, tensors) in &self.names {
            let partner = match (at_end, name.strip_prefix(start.as_str()), name.strip_suffix(end.as_str())) {
                (true, _, Some(rest)) => format!("{rest}.{}", key.1),
                (false, Some(rest), _) if y.is_empty() => format!("{theirs}{rest}"),
                (false, Some(rest), _) => format!("{theirs}{}.{rest}", key.1),
                _ => continue,
            };
            let Some(others) = self.names.get(partner.as_str()) else { continue };
            for (&a, &b) in tensors.iter().zip(others) {
                match self.same(a, b) {
                    true => equal += 1,
                    false if self.says_nothing(a) && self.says_nothing(b) => {}
                    false => other += 1,
                }
            }
        }
        let doubled = other == 0 && equal >= if of_layers { 2 } else { 4 };
        self.layers.borrow_mut().insert(key, doubled);
        doubled
    }

    /// True if a tensor is constant, or too small.
    fn says_nothing(&self, stored: u32) -> bool {
        let tensor = self.stored(stored);
        let small = crate::tensor::element_count(&tensor.shape).unwrap_or(0) < MIN_VALUES as u64;
        let mut empty = true;
        each_blob(tensor, |blob| empty &= self.contents.is_empty(blob));
        small || empty
    }
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
