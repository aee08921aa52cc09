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
const COPIES: [&str; 22] = [
    "ema",
    "avg",
    "average",
    "averaged",
    "mean",
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
const BUFFERS: [&str; 19] = [
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
];
/// Words for the table of the vocabulary, and for the head.
const TABLES: [&str; 8] = ["embed", "embedding", "embeddings", "emb", "wte", "shared", "embedder", "vocab"];
const HEADS: [&str; 9] =
    ["head", "output", "out", "final", "logits", "softmax", "unembed", "unembedding", "decoder"];

/// The words of a name, in small letters.
fn words(name: &str) -> impl Iterator<Item = String> + '_ {
    name.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase)
}

fn has_word(name: &str, of: &[&str]) -> bool {
    words(name).any(|word| of.contains(&word.as_str()))
}

fn is_buffer(name: &str) -> bool {
    has_word(name, &BUFFERS)
}

pub(super) fn is_of_experts(name: &str) -> bool {
    words(name).any(|word| word.starts_with("expert") || word == "moe")
}

/// An embedding and a head by their names, in one order or the other; or the embedding once more, for the head of
/// another stage.
fn may_be_tied(a: &str, b: &str) -> bool {
    let pair = |table: &str, head: &str| {
        has_word(table, &TABLES) && !has_word(head, &TABLES[..1]) && has_word(head, &HEADS)
    };
    let again = has_word(a, &TABLES) && has_word(b, &TABLES) && renumbered(a, b).is_some();
    pair(a, b) || pair(b, a) || again
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
    let tells = |part: &&str| has_word(part, &COPIES) || part.ends_with("_m");
    a.len() <= 2 && b.len() <= 2 && (a.iter().any(tells) || b.iter().any(tells))
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

/// The numbers in which two names differ, if they do in nothing else.
fn renumbered(a: &str, b: &str) -> Option<(String, String)> {
    let digits = |c: char| !c.is_ascii_digit();
    let numbers = |name: &str| -> Vec<String> {
        name.split(digits).filter(|part| !part.is_empty()).map(String::from).collect()
    };
    let rest = |name: &str| -> String { name.chars().filter(|c| !c.is_ascii_digit()).collect() };
    let (x, y) = (numbers(a), numbers(b));
    if rest(a) != rest(b) || x.len() != y.len() {
        return None;
    }
    let mut differing = x.into_iter().zip(y).filter(|(x, y)| x != y);
    let first = differing.next()?;
    differing.next().is_none().then_some(first)
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
            // A table of positions may have been learned: then none of it repeats.
            return match has_word(&t.name, &TABLES) || has_word(&u.name, &TABLES) {
                true if a.stored == b.stored => Verdict::Copied,
                true => Verdict::Meant,
                false => Verdict::Innocent,
            };
        }
        if is_of_experts(&t.name) && is_of_experts(&u.name) && self.all_experts(a.stored, b.stored) {
            return Verdict::Meant;
        }
        if a.stored == b.stored || a.at != b.at || t.name == u.name {
            return Verdict::Copied;
        }
        let tied = !self.plan.untied && may_be_tied(&t.name, &u.name) && self.same(a.stored, b.stored);
        let doubled = || {
            let numbers = renumbered(&t.name, &u.name);
            alone && numbers.is_some_and(|(from, to)| self.doubled(from, to))
        };
        match of_copies(&t.name, &u.name) || tied || doubled() {
            true => Verdict::Meant,
            false => Verdict::Copied,
        }
    }

    /// True if the experts of a layer, three or more, hold the same: they were made of one.
    fn all_experts(&self, a: u32, b: u32) -> bool {
        let family = |i: u32| self.experts.get(&of_any_expert(&self.stored(i).name));
        if a == b {
            // All of them in one array.
            let contents = self.tensors.get(&a);
            return contents.is_some_and(|c| {
                c.len() > 2 && c.values().all(|content| Some(content) == c.values().next())
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

    /// True if all that is numbered so is equal to what is numbered otherwise, two tensors or more: a layer that was
    /// made of another.
    fn doubled(&self, from: String, to: String) -> bool {
        if let Some(known) = self.layers.borrow().get(&(from.clone(), to.clone())) {
            return *known;
        }
        let (mut equal, mut other) = (0u64, 0u64);
        for (name, own) in &self.names {
            let parts: Vec<&str> = name.split('.').collect();
            // `layers.3` and `layers_3`.
            let swapped: Vec<String> = parts.iter().map(|part| renumber(part, &from, &to)).collect();
            let Some(theirs) = self.names.get(swapped.join(".").as_str()).filter(|t| *t != own) else {
                continue;
            };
            for (&a, &b) in own.iter().zip(theirs) {
                match self.same(a, b) {
                    true => equal += 1,
                    false if self.says_nothing(a) && self.says_nothing(b) => {}
                    false => other += 1,
                }
            }
        }
        let doubled = equal > 1 && other == 0;
        self.layers.borrow_mut().insert((from, to), doubled);
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

/// A part of a name with its number exchanged, if it has that one.
fn renumber(part: &str, from: &str, to: &str) -> String {
    let start = part.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    match &part[start..] == from {
        true => format!("{}{to}", &part[..start]),
        false => part.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_a_model_are_told_by_words() {
        assert!(of_copies("model.layers.0.w", "ema.layers.0.w"));
        assert!(of_copies("params.layers.0.w", "ema.params.layers.0.w"));
        assert!(of_copies("text_encoder.w", "text_encoder_m.w"));
        assert!(!of_copies("encoder.layer.w", "decoder.layer.w"));
        assert!(!of_copies("layers.0.wk", "layers.0.wv"));
    }

    #[test]
    fn heads_are_tied_to_embeddings_and_nothing_else_is() {
        assert!(may_be_tied("model.embed_tokens.weight", "lm_head.weight"));
        assert!(may_be_tied("0.word_embeddings.weight", "9.final_linear.weight"));
        assert!(may_be_tied("embedding.word_embeddings.weight", "output_layer.weight"));
        assert!(!may_be_tied(
            "decoder.multihead_attention.query.kernel",
            "decoder.multihead_attention.key.kernel"
        ));
        assert!(!may_be_tied("ensemble.query", "ensemble.key"));
        assert!(may_be_tied("0.word_embeddings.weight", "9.word_embeddings.weight"));
        assert!(!may_be_tied("up.weight", "down.weight"));
    }

    #[test]
    fn numbers_in_names() {
        assert_eq!(renumbered("layers.3.w", "layers.12.w"), Some(("3".into(), "12".into())));
        assert_eq!(renumbered("layers.3.e.1", "layers.4.e.2"), None);
        assert_eq!(renumbered("layers.3.wk", "layers.3.wv"), None);
        assert_eq!(renumber("layers_3", "3", "5"), "layers_5");
        assert_eq!(renumber("13", "3", "5"), "13");
        assert_eq!(of_any_expert("layers.0.experts.3.w1"), "layers.0.experts.#.w1");
    }
}
