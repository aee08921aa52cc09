//! Digests: BLAKE3 of a tensor's logical bytes from tiles in any order, CRC32 from segments in any order.

use std::collections::BTreeMap;

use blake3::hazmat::{merge_subtrees_non_root, merge_subtrees_root, HasherExt, Mode};

/// A tile's chaining value, or the root hash where one tile is the whole tensor.
pub type ChainingValue = [u8; 32];

/// Hashes tile `index` of a tensor of `total` bytes cut in tiles of `tile` bytes (a power of two of
/// at least 1024; the last one may be shorter).
pub fn tile_value(bytes: &[u8], index: u64, tile: u64, total: u64) -> ChainingValue {
    debug_assert!(tile.is_power_of_two() && tile >= 1024);
    let mut hasher = blake3::Hasher::new();
    if total <= tile {
        return *hasher.update(bytes).finalize().as_bytes();
    }
    hasher.set_input_offset(index * tile);
    hasher.update(bytes);
    hasher.finalize_non_root()
}

/// The BLAKE3 hash of a tensor from its tiles' values: equal to `blake3(bytes)`.
pub fn tensor_hash(values: &[ChainingValue], tile: u64, total: u64) -> [u8; 32] {
    if total <= tile {
        return values.first().copied().unwrap_or_else(|| *blake3::hash(b"").as_bytes());
    }
    // Chunks go to the left subtree in powers of two, so the split in tiles is the split in bytes.
    fn subtree(values: &[ChainingValue]) -> ChainingValue {
        if let [value] = values {
            return *value;
        }
        let left = values.len().next_power_of_two() / 2;
        merge_subtrees_non_root(&subtree(&values[..left]), &subtree(&values[left..]), Mode::Hash)
    }
    let left = values.len().next_power_of_two() / 2;
    *merge_subtrees_root(&subtree(&values[..left]), &subtree(&values[left..]), Mode::Hash).as_bytes()
}

/// Hexadecimal form of a hash.
pub fn hex(hash: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*hash).to_hex().to_string()
}

/// CRC32 of a byte.
pub fn crc32(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// CRC32 of a range of bytes, gathered from segments that come in any order.
#[derive(Debug, Default, Clone)]
pub struct Segments {
    /// offset -> (length, crc)
    seen: BTreeMap<u64, (u64, u32)>,
}

impl Segments {
    /// Records a segment. One that overlaps what is known is dropped: its bytes are read again as a gap.
    pub fn add(&mut self, offset: u64, len: u64, crc: u32) {
        if len == 0 {
            return;
        }
        let before = self.seen.range(..=offset).next_back().is_some_and(|(o, (l, _))| o + l > offset);
        let after = self.seen.range(offset..).next().is_some_and(|(o, _)| *o < offset + len);
        if !before && !after {
            self.seen.insert(offset, (len, crc));
        }
    }

    /// Makes one of the segment at `offset` and its neighbours, where they touch: what has come
    /// almost in order takes almost no memory.
    pub fn join(&mut self, offset: u64) {
        let touching = |(o, (l, _)): (&u64, &(u64, u32))| (o + l == offset).then_some(*o);
        let at = self.seen.range(..offset).next_back().and_then(touching).unwrap_or(offset);
        while let Some(&(len, crc)) = self.seen.get(&at) {
            let Some((more, next)) = self.seen.remove(&(at + len)) else { break };
            let mut combined = crc32fast::Hasher::new_with_initial_len(crc, len);
            combined.combine(&crc32fast::Hasher::new_with_initial_len(next, more));
            self.seen.insert(at, (len + more, combined.finalize()));
        }
    }

    /// Ranges of `lo..hi` that no segment covers.
    pub fn gaps(&self, lo: u64, hi: u64) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        let mut at = lo;
        let start = self.seen.range(..=lo).next_back().map_or(lo, |(o, _)| *o);
        for (&offset, &(len, _)) in self.seen.range(start..hi) {
            if offset > at {
                gaps.push((at, offset));
            }
            at = at.max(offset + len);
        }
        if at < hi {
            gaps.push((at, hi));
        }
        gaps
    }

    /// The CRC32 of `lo..hi`, if segments tile it exactly.
    pub fn crc(&self, lo: u64, hi: u64) -> Option<u32> {
        let mut combined = crc32fast::Hasher::new();
        let mut at = lo;
        for (&offset, &(len, crc)) in self.seen.range(lo..hi) {
            if offset != at {
                return None;
            }
            combined.combine(&crc32fast::Hasher::new_with_initial_len(crc, len));
            at += len;
        }
        (at == hi).then(|| combined.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tiles_make_the_plain_hash() {
        for tile in [1024u64, 2048, 4096] {
            for total in [0u64, 1, 1023, 1024, 1025, 2048, 4095, 4096, 4097, 8192, 10_000, 65_536, 65_537] {
                let bytes: Vec<u8> = (0..total).map(|i| (i % 251) as u8).collect();
                let values: Vec<ChainingValue> = bytes
                    .chunks(tile as usize)
                    .enumerate()
                    .map(|(i, chunk)| tile_value(chunk, i as u64, tile, total))
                    .collect();
                assert_eq!(
                    tensor_hash(&values, tile, total),
                    *blake3::hash(&bytes).as_bytes(),
                    "{tile} {total}"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn segments_in_any_order(bytes in proptest::collection::vec(any::<u8>(), 1..500), cuts in proptest::collection::vec(0usize..500, 0..8), seed in any::<u64>()) {
            let mut at: Vec<usize> = cuts.into_iter().map(|c| c % bytes.len()).chain([0, bytes.len()]).collect();
            at.sort_unstable();
            let mut pieces: Vec<(usize, usize)> = at.windows(2).map(|w| (w[0], w[1])).collect();
            let n = pieces.len();
            pieces.rotate_left(seed as usize % n);
            let mut segments = Segments::default();
            let skipped = pieces.pop().unwrap();
            for (lo, hi) in pieces {
                segments.add(lo as u64, (hi - lo) as u64, crc32(&bytes[lo..hi]));
                if seed % 2 == 0 {
                    segments.join(lo as u64);
                }
            }
            prop_assert!(seed % 2 == 1 || segments.seen.len() <= 2);
            for (lo, hi) in segments.gaps(0, bytes.len() as u64) {
                prop_assert!(lo as usize >= skipped.0 && hi as usize <= skipped.1);
                segments.add(lo, hi - lo, crc32(&bytes[lo as usize..hi as usize]));
            }
            prop_assert_eq!(segments.crc(0, bytes.len() as u64), Some(crc32(&bytes)));
        }
    }
}
