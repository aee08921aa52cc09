//! What pieces of files stand for, to tell a copy that is meant from one that is not.

use crate::plan::{Form, Pieces, Plan, StoredTensor};

/// A run of a blob, and its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Use {
    /// Index into [`Plan::stored`].
    pub stored: u32,
    /// First byte in the blob's data.
    pub offset: u64,
    /// Its beginning in the stored tensor: in each dimension, or in its elements.
    pub at: Vec<u64>,
}

/// Per stored tensor, a digest of everything that is made from it; 0 if nothing is. Tensors from which the
/// same is made are copies of each other, which the run has compared.
pub(crate) struct Standing(Vec<u64>);

impl Standing {
    /// None if a plan does not state what tensors stand for: an inventory has no rules, and a repair writes
    /// each file anew separately.
    pub(crate) fn of(plan: &Plan) -> Option<Standing> {
        let repairs = plan.files.iter().any(|file| matches!(file.form, Form::Overlay(_)));
        if plan.rules.is_empty() || repairs {
            return None;
        }
        let mut digests = vec![0u64; plan.stored.len()];
        for (o, output) in plan.outputs.iter().enumerate() {
            for (p, part) in output.parts.iter().enumerate().filter(|(_, part)| part.volume() > 0) {
                for (n, stored) in part.sources.iter().flat_map(|s| plan.made_of(*s).into_iter().enumerate())
                {
                    let digest = &mut digests[stored as usize];
                    *digest = mixed(mixed(*digest, o as u64), (p + n) as u64).max(1);
                }
            }
        }
        Some(Standing(digests))
    }

    /// A number for everything that is made from the tensor.
    pub(crate) fn digest(&self, stored: u32) -> u64 {
        self.0[stored as usize]
    }

    /// True if something is made from the tensor.
    pub(crate) fn is_used(&self, stored: u32) -> bool {
        self.0[stored as usize] != 0
    }

    /// True if two runs stand for the same content.
    pub(crate) fn same(&self, a: &Use, b: &Use) -> bool {
        self.0[a.stored as usize] == self.0[b.stored as usize] && a.at == b.at
    }
}

/// Calls `each` with every blob that holds elements of a tensor, and its content.
pub(crate) fn each_use(stored: u32, tensor: &StoredTensor, mut each: impl FnMut(u32, Use)) {
    let found = |offset: u64, at: &[u64]| Use { stored, offset, at: at.to_vec() };
    match &tensor.pieces {
        Pieces::View { blob, offset, .. } => each(*blob, found(*offset, &[])),
        Pieces::Boxes(pieces) => pieces.iter().for_each(|p| each(p.blob, found(p.offset, &p.lo))),
        Pieces::Ranges(pieces) => pieces.iter().for_each(|p| each(p.blob, found(p.offset, &[p.start]))),
        Pieces::Coded(_) => {}
    }
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
