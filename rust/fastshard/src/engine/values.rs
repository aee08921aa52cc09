//! The significance of equal contents.

use std::collections::HashSet;

use crate::kernel;

/// Minimum number of different values in equal contents: with fewer, they may be equal by chance or by
/// construction.
pub(crate) const MIN_VALUES: usize = 64;

/// Different elements that were seen, up to the required number.
pub(super) struct Values {
    seen: HashSet<u64>,
    wanted: usize,
}

impl Default for Values {
    fn default() -> Self {
        Values::at_least(MIN_VALUES)
    }
}

impl Values {
    /// None yet; [`MIN_VALUES`] are enough, or fewer of a small tensor.
    pub(super) fn at_least(wanted: usize) -> Self {
        Values { seen: HashSet::new(), wanted: wanted.min(MIN_VALUES) }
    }

    /// Records elements of `item` bytes, up to 8.
    pub(super) fn add(&mut self, bytes: &[u8], item: usize) {
        // Most of what tells nothing is one value throughout.
        let bytes = &bytes[..bytes.len() / item * item];
        let bytes = if kernel::is_constant(bytes, item) { &bytes[..bytes.len().min(item)] } else { bytes };
        for element in bytes.chunks_exact(item) {
            if self.enough() {
                return;
            }
            let mut value = [0; 8];
            value[..item.min(8)].copy_from_slice(&element[..item.min(8)]);
            self.seen.insert(u64::from_le_bytes(value));
        }
    }

    pub(super) fn enough(&self) -> bool {
        self.seen.len() >= self.wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_up_to_the_limit() {
        let mut values = Values::default();
        let bytes: Vec<u8> = (0..63u16).flat_map(u16::to_le_bytes).collect();
        values.add(&bytes, 2);
        values.add(&bytes, 2);
        assert!(!values.enough());
        values.add(&99u16.to_le_bytes(), 2);
        assert!(values.enough());
    }
}
