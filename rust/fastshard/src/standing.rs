//! What pieces of files stand for, to tell a copy that is meant from one that is not.

use crate::plan::{Form, Pieces, Plan, StoredTensor};

/// A run of a blob, and what stands there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Use {
    /// Index into [`Plan::stored`].
    pub stored: u32,
    /// First byte in the blob's data.
    pub offset: u64,
    /// Where it begins in the stored tensor: in each dimension, or in its elements.
    pub at: Vec<u64>,
}

/// Per stored tensor, a digest of all that is made of it; 0 if nothing is. Tensors of which the same is made are
/// copies of each other, which the run has compared.
pub(crate) struct Standing(Vec<u64>);

impl Standing {
    /// None where a plan does not say what tensors stand for: an inventory has no rules, and a repair writes each
    /// file anew for itself.
    pub(crate) fn of(plan: &Plan) -> Option<Standing> {
        let repairs = plan.files.iter().any(|file| matches!(file.form, Form::Overlay(_)));
        if plan.rules.is_empty() || repairs {
            return None;
        }
        let mut digests = vec![0u64; plan.stored.len()];
        for (o, output) in plan.outputs.iter().enumerate() {
            for (p, part) in output.parts.iter().enumerate().filter(|(_, part)| part.volume() > 0) {
                for &source in &part.sources {
                    let digest = &mut digests[source as usize];
                    *digest = mixed(mixed(*digest, o as u64), p as u64).max(1);
                }
            }
        }
        Some(Standing(digests))
    }

    /// What is made of the tensor, as a number.
    pub(crate) fn digest(&self, stored: u32) -> u64 {
        self.0[stored as usize]
    }

    /// True if something is made of the tensor.
    pub(crate) fn is_used(&self, stored: u32) -> bool {
        self.0[stored as usize] != 0
    }

    /// True if two runs stand for one thing.
    pub(crate) fn same(&self, a: &Use, b: &Use) -> bool {
        self.0[a.stored as usize] == self.0[b.stored as usize] && a.at == b.at
    }
}

/// Calls `each` with every blob that holds elements of a tensor.
pub(crate) fn each_blob(tensor: &StoredTensor, mut each: impl FnMut(u32)) {
    match &tensor.pieces {
        Pieces::View { blob, .. } => each(*blob),
        Pieces::Boxes(pieces) => pieces.iter().for_each(|p| each(p.blob)),
        Pieces::Ranges(pieces) => pieces.iter().for_each(|p| each(p.blob)),
    }
}

/// Calls `each` with every blob that holds elements of a tensor, and what stands there.
pub(crate) fn each_use(stored: u32, tensor: &StoredTensor, mut each: impl FnMut(u32, Use)) {
    let found = |offset: u64, at: &[u64]| Use { stored, offset, at: at.to_vec() };
    match &tensor.pieces {
        Pieces::View { blob, offset, .. } => each(*blob, found(*offset, &[])),
        Pieces::Boxes(pieces) => pieces.iter().for_each(|p| each(p.blob, found(p.offset, &p.lo))),
        Pieces::Ranges(pieces) => pieces.iter().for_each(|p| each(p.blob, found(p.offset, &[p.start]))),
    }
}

/// True if two tensors can be taken for each other: parts or layers of one kind.
pub(crate) fn alike(a: &StoredTensor, b: &StoredTensor) -> bool {
    a.rule == b.rule || numbered(&a.name).eq(numbered(&b.name))
}

/// A name, with what its numbers are left out.
fn numbered(name: &str) -> impl Iterator<Item = char> + '_ {
    let mut before = ' ';
    name.chars().filter_map(move |c| {
        let digit = if c.is_ascii_digit() { '#' } else { c };
        let first = !(digit == '#' && before == '#');
        before = digit;
        first.then_some(digit)
    })
}

/// Where two names differ, if they do in one part alone: its position, and what stands there.
pub(crate) fn renamed<'n>(a: &'n str, b: &'n str) -> Option<(usize, &'n str, &'n str)> {
    let (a, b): (Vec<&str>, Vec<&str>) = (a.split('.').collect(), b.split('.').collect());
    let mut differing = (0..a.len()).filter(|&i| a.len() == b.len() && a[i] != b[i]);
    let position = differing.next()?;
    differing.next().is_none().then_some((position, a[position], b[position]))
}

/// True if two tensors can be an embedding and the head that is tied to it, by their names.
pub(crate) fn may_be_tied(a: &str, b: &str) -> bool {
    let numbered = |name: &str| name.contains(char::is_numeric);
    let of_vocabulary = |name: &str| {
        let name = name.to_lowercase();
        ["emb", "wte", "head", "vocab", "logits"].iter().any(|word| name.contains(word))
    };
    !numbered(a) && !numbered(b) && (of_vocabulary(a) || of_vocabulary(b))
}

/// A digest with one more number in it.
pub(crate) fn mixed(digest: u64, number: u64) -> u64 {
    let mut x = digest.rotate_left(23) ^ number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

/// A digest of bytes.
pub(crate) fn digest_of(bytes: &[u8]) -> u64 {
    let hash = blake3::hash(bytes);
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_differ_in_numbers_alone_are_alike() {
        let same = |a: &str, b: &str| numbered(a).eq(numbered(b));
        assert!(same("layers.3.mlp.weight", "layers.12.mlp.weight"));
        assert!(!same("layers.3.wk", "layers.3.wv"));
        assert!(!same("layers.mlp", "layers.3.mlp"));
        assert!(!same("model.w", "ema.w"));
    }

    #[test]
    fn names_that_differ_in_one_part() {
        assert_eq!(renamed("a.l_0.w", "a.l_1.w"), Some((1, "l_0", "l_1")));
        assert_eq!(renamed("params.a.w", "ema.a.w"), Some((0, "params", "ema")));
        assert_eq!(renamed("a.b.w", "c.d.w"), None);
        assert_eq!(renamed("a.w", "a.b.w"), None);
    }

    #[test]
    fn heads_are_tied_to_embeddings_and_layers_are_not() {
        assert!(may_be_tied("model.embed_tokens.weight", "lm_head.weight"));
        assert!(!may_be_tied("up.weight", "down.weight"));
        assert!(!may_be_tied("layers.0.head.weight", "layers.1.head.weight"));
    }
}
