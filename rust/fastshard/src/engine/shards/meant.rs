//! Equal contents that are meant, as far as names and the rest of the checkpoint tell.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

use super::contents::Contents;
use super::values::MIN_VALUES;
use crate::plan::{Plan, StoredTensor};
use crate::standing::{each_blob, each_use, mixed, Standing, Use};

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
const BUFFERS: [&str; 22] = [
    "rotary",
    "rope",
    "inv",
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
    "sigmas",
];
/// Words for what is learned, whatever it is called besides.
const LEARNED: [&str; 13] = [
    "weight",
    "weights",
    "kernel",
    "bias",
    "proj",
    "linear",
    "table",
    "embedding",
    "var",
    "w",
    "b",
    "u",
    "v",
];
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

fn is_buffer(name: &str) -> bool {
    has_word(tail(name, 2), &BUFFERS) && !has_word(tail(name, 1), &LEARNED)
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
    let heads = is_head(a) && is_head(b) && tail(a, 2).rsplit('.').eq(tail(b, 2).rsplit('.'));
    // The bias of a head that is there under the head's name too.
    let without =
        |name: &str| name.split('.').filter(|part| *part != "decoder").collect::<Vec<_>>().join(".");
    (is_table(a) && is_table(b))
        || heads
        || (a.ends_with(".bias") && is_head(a) | is_head(b) && without(a) == without(b))
}

fn is_table(name: &str) -> bool {
    let shared = tail(name, 2).split('.').any(|part| part == "shared");
    !is_of_experts(name) && (shared || has_word(tail(name, 2), &TABLES))
}

fn is_head(name: &str) -> bool {
    let of_layers = |part: &str| part.starts_with("layer") || part.starts_with("block") || part == "h";
    let in_layer = name.split('.').any(of_layers);
    let last = tail(name, 2);
    !in_layer && !is_of_experts(name) && (has_word(last, &HEADS) || last.contains("lm_head"))
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
    let (a, b) = middles(a, b);
    // Moments of an optimizer are no averages of weights.
    let tells = |part: &&str| (has_word(part, &COPIES) && !part.contains("exp_avg")) || part.ends_with("_m");
    let rest =
        |parts: &[&str]| parts.iter().filter(|part| !tells(part)).map(|p| p.to_string()).collect::<Vec<_>>();
    let numbered = |parts: &[String]| parts.iter().any(|part| part.contains(|c: char| c.is_ascii_digit()));
    let (x, y) = (rest(&a), rest(&b));
    // What differs besides is the way to the copy, not another layer of it.
    (a.iter().any(tells) || b.iter().any(tells))
        && (x == y || !(numbered(&x) && numbered(&y)) && x.len().min(y.len()) < 2)
}

/// A name without the numbers that follow a word for experts: the same for all of a layer.
fn of_any_expert(name: &str) -> String {
    let mut after = false;
    let parts = name.split('.').map(|part| {
        let number = part.bytes().all(|b| b.is_ascii_digit());
        let shown = if number && after { "#" } else { part };
        after = is_of_experts(part);
        shown
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
    /// Whether all tensors of two numbers are equal, as far as it was asked.
    layers: RefCell<HashMap<(String, String), bool>>,
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
        Meant { plan, contents, tensors, names, experts, layers: RefCell::default() }
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
        if is_buffer(&t.name) && is_buffer(&u.name) {
            return Verdict::Innocent;
        }
        if is_of_experts(&t.name) && is_of_experts(&u.name) && self.all_experts(a.stored, b.stored) {
            return Verdict::Meant;
        }
        if a.stored == b.stored || a.at != b.at || t.name == u.name {
            return Verdict::Copied;
        }
        let one = (!self.plan.untied && may_be_tied(&t.name, &u.name)) || are_one_table(&t.name, &u.name);
        let whole = t.shape.len() > 1 || t.name.ends_with(".bias");
        let tied = one && whole && self.same(a.stored, b.stored);
        let doubled = || alone && self.doubled(&t.name, &u.name);
        match of_copies(&t.name, &u.name) || tied || doubled() {
            true => Verdict::Meant,
            false => Verdict::Copied,
        }
    }

    /// True if the experts of a layer, three or more, hold the same: they were made of one.
    fn all_experts(&self, a: u32, b: u32) -> bool {
        let family = |i: u32| self.experts.get(&of_any_expert(&self.stored(i).name));
        if a == b {
            // All of them in one array: along one of its dimensions.
            let Some(contents) = self.tensors.get(&a) else { return false };
            let rank = contents.keys().map(Vec::len).min().unwrap_or(0);
            return (0..rank).any(|dim| {
                let mut lines: HashMap<Vec<u64>, Vec<u64>> = HashMap::new();
                for (at, content) in contents {
                    let mut line = at.clone();
                    line[dim] = 0;
                    lines.entry(line).or_default().push(*content);
                }
                lines.values().all(|line| line.len() > 2 && line.iter().all(|content| *content == line[0]))
            });
        }
        let (Some(own), Some(other)) = (family(a), family(b)) else { return false };
        if !std::ptr::eq(own, other) {
            return false;
        }
        // Ranks that divide an expert hold a part each: as many of one part as of another.
        let mut parts: HashMap<&BTreeMap<Vec<u64>, u64>, usize> = HashMap::new();
        for i in own {
            let Some(content) = self.tensors.get(i) else { return false };
            *parts.entry(content).or_default() += 1;
        }
        let each = own.len() / parts.len();
        each > 2 && parts.values().all(|n| *n == each)
    }

    /// True if all of one layer is equal to all of another, two tensors or more: the layers' numbers are where the two
    /// names differ.
    fn doubled(&self, a: &str, b: &str) -> bool {
        let (from, to) = match &middles(a, b) {
            (x, y) if x.len() == 1 && y.len() == 1 && renumbered(x[0], y[0]) => (x[0], y[0]),
            _ => return false,
        };
        let position = a.split('.').zip(b.split('.')).take_while(|(x, y)| x == y).count();
        let start: String = a.split('.').take(position).map(|part| format!("{part}.")).collect();
        let key = (format!("{start}{from}"), to.to_string());
        if let Some(known) = self.layers.borrow().get(&key) {
            return *known;
        }
        let (own, theirs) = (format!("{start}{from}."), format!("{start}{to}."));
        let (mut equal, mut other) = (0u64, 0u64);
        for (name, tensors) in &self.names {
            let Some(rest) = name.strip_prefix(own.as_str()) else { continue };
            let Some(others) = self.names.get(format!("{theirs}{rest}").as_str()) else { continue };
            for (&a, &b) in tensors.iter().zip(others) {
                match self.same(a, b) {
                    true => equal += 1,
                    false if self.says_nothing(a) && self.says_nothing(b) => {}
                    false => other += 1,
                }
            }
        }
        let doubled = equal > 1 && other == 0;
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
        assert!(of_copies("model.layers.0.w", "ema.layers.0.w"));
        assert!(of_copies("params.layers.0.w", "ema.params.layers.0.w"));
        assert!(of_copies("params.layers.0.w", "opt_state.1.0.ema.layers.0.w"));
        assert!(of_copies("text_encoder.w", "text_encoder_m.w"));
        assert!(!of_copies("encoder.layer.w", "decoder.layer.w"));
        assert!(!of_copies("layers.0.wk", "layers.0.wv"));
        assert!(!of_copies("model.0.weight", "ema.1.weight"));
        assert!(!of_copies("actor.fc1.weight", "critic.fc2.weight"));
        assert!(!of_copies("state.w.exp_avg", "state.w.exp_avg_sq"));
        assert!(!of_copies("fc_mean.weight", "fc_logvar.weight"));
    }

    #[test]
    fn heads_are_tied_to_embeddings_and_nothing_else_is() {
        let tied = |a: &str, b: &str| may_be_tied(a, b) || are_one_table(a, b);
        assert!(tied("model.embed_tokens.weight", "lm_head.weight"));
        assert!(tied("0.word_embeddings.weight", "9.final_linear.weight"));
        assert!(tied("0.word_embeddings.weight", "9.word_embeddings.weight"));
        assert!(tied("embedding.word_embeddings.weight", "output_layer.weight"));
        assert!(tied("shared.weight", "encoder.embed_tokens.weight"));
        assert!(tied("eagle.lm_head.weight", "lm_head.weight"));
        assert!(tied("cls.predictions.bias", "cls.predictions.decoder.bias"));
        assert!(!tied("decoder.multihead_attention.query.kernel", "decoder.multihead_attention.key.kernel"));
        assert!(!tied("ensemble.query", "ensemble.key"));
        assert!(!tied("up.weight", "down.weight"));
        assert!(!tied("layers_0.shared_experts.wi_0.kernel", "layers_1.shared_experts.wi_0.kernel"));
        assert!(!tied("bert.embeddings.LayerNorm.weight", "bert.encoder.layer.0.output.LayerNorm.weight"));
    }

    #[test]
    fn buffers_are_what_is_computed() {
        for name in [
            "layers.0.rotary_emb.inv_freq",
            "rotary_emb.cos_cached",
            "encoder.pos.pe",
            "sched.alphas_cumprod",
        ] {
            assert!(is_buffer(name), "{name}");
        }
        for name in [
            "mask_decoder.transformer.layers.0.q_proj",
            "encoder.layers.0.self_attn.linear_pos.weight",
            "layers.0.attn.relative_position_bias_table",
            "layers.0.attn.q_rope_proj.kernel",
            "position_emb.emb_var",
        ] {
            assert!(!is_buffer(name), "{name}");
        }
    }

    #[test]
    fn numbers_in_names() {
        assert!(renumbered("layers_3", "layers_12") && renumbered("3", "12"));
        assert!(!renumbered("wk", "wv") && !renumbered("3", "3"));
        assert_eq!(of_any_expert("layers.0.experts.3.w1"), "layers.0.experts.#.w1");
    }
}
