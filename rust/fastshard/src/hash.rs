//! Digests: BLAKE3 of a tensor's logical bytes from tiles in any order, CRC32 from segments in any order.

use std::collections::BTreeMap;

use blake3::hazmat::{merge_subtrees_non_root, merge_subtrees_root, HasherExt, Mode};

/// A tile's chaining value, or the root hash if one tile is the full tensor.
pub type ChainingValue = [u8; 32];

/// Hashes tile `index` of a tensor of `total` bytes cut in tiles of `tile` bytes (a power of two of
/// at least 1024; the last one may be shorter).
pub fn tile_value(bytes: &[u8], index: u64, tile: u64, total: u64) -> ChainingValue {
    debug_assert!(tile.is_power_of_two() && tile >= 1024);
    let mut hasher = TileHasher::new(index, tile, total);
    hasher.update(bytes);
    hasher.value()
}

/// [`tile_value`] of bytes that come one after another.
#[derive(Debug)]
pub struct TileHasher {
    hasher: blake3::Hasher,
    is_root: bool,
}

impl TileHasher {
    /// For tile `index` of a tensor of `total` bytes cut in tiles of `tile` bytes.
    pub fn new(index: u64, tile: u64, total: u64) -> Self {
        let mut hasher = blake3::Hasher::new();
        let is_root = total <= tile;
        if !is_root {
            hasher.set_input_offset(index * tile);
        }
        TileHasher { hasher, is_root }
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
    }

    /// The value of all of them.
    pub fn value(&self) -> ChainingValue {
        match self.is_root {
            true => *self.hasher.finalize().as_bytes(),
            false => self.hasher.finalize_non_root(),
        }
    }
}

/// The BLAKE3 hash of a tensor from its tiles' values, in any order. Subtrees are merged as soon as they are
/// complete, so the memory for tiles that come almost in order is logarithmic in their number.
#[derive(Debug)]
pub struct TileHashes {
    tiles: u64,
    /// Values of the largest complete subtrees: (log2 of the tiles, index among those) -> value.
    subtrees: BTreeMap<(u32, u64), ChainingValue>,
}

impl TileHashes {
    /// For a tensor of `total` bytes cut in tiles of `tile` bytes.
    pub fn new(tile: u64, total: u64) -> Self {
        TileHashes { tiles: total.div_ceil(tile), subtrees: BTreeMap::new() }
    }

    /// Takes the value of tile `index`.
    pub fn add(&mut self, index: u64, value: ChainingValue) {
        let (mut level, mut index, mut value) = (0, index, value);
        // The root is merged in another way, once all is there; what is cut short at the end, too.
        while self.merges(level, index | 1) {
            let Some(other) = self.subtrees.remove(&(level, index ^ 1)) else { break };
            let (left, right) = if index % 2 == 0 { (value, other) } else { (other, value) };
            value = merge_subtrees_non_root(&left, &right, Mode::Hash);
            (level, index) = (level + 1, index / 2);
        }
        self.subtrees.insert((level, index), value);
    }

    /// True if subtree `right` of a level and its left neighbour are complete, and are not the full tree.
    fn merges(&self, level: u32, right: u64) -> bool {
        let end = (right + 1) << level;
        end <= self.tiles && (right > 1 || end < self.tiles)
    }

    /// Counts the values in memory: those out of order, and those at the seams.
    pub fn count_values(&self) -> usize {
        self.subtrees.len()
    }

    /// The hash, equal to `blake3(bytes)`; none unless every tile was added.
    pub fn finish(&self) -> Option<[u8; 32]> {
        match self.tiles {
            0 => Some(*blake3::hash(b"").as_bytes()),
            // The only tile's value is a root's already.
            1 => self.subtrees.get(&(0, 0)).copied(),
            n => {
                let left = n.next_power_of_two() / 2;
                let (left, right) = (self.subtree(0, left)?, self.subtree(left, n - left)?);
                Some(*merge_subtrees_root(&left, &right, Mode::Hash).as_bytes())
            }
        }
    }

    /// The value of `n` tiles from `first` on. Chunks go to the left subtree in powers of two, so the split
    /// in tiles is the split in bytes.
    fn subtree(&self, first: u64, n: u64) -> Option<ChainingValue> {
        if n.is_power_of_two() {
            if let Some(value) = self.subtrees.get(&(n.trailing_zeros(), first / n)) {
                return Some(*value);
            }
        }
        if n == 1 {
            return None;
        }
        let left = n.next_power_of_two() / 2;
        Some(merge_subtrees_non_root(
            &self.subtree(first, left)?,
            &self.subtree(first + left, n - left)?,
            Mode::Hash,
        ))
    }
}

/// Hexadecimal form of a hash.
pub fn hex(hash: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*hash).to_hex().to_string()
}

/// CRC32 of a byte.
pub fn crc32(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// CRC32 of the first `len` bytes of `pattern`, repeated. It takes as many steps as `len` has digits.
///
/// # Panics
/// If `pattern` is empty.
pub fn crc32_of_constant(pattern: &[u8], len: u64) -> u32 {
    assert!(!pattern.is_empty(), "nothing, again and again");
    let mut times = len / pattern.len() as u64;
    let mut doubled = crc32fast::Hasher::new();
    doubled.update(pattern);
    let mut all = crc32fast::Hasher::new();
    while times > 0 {
        if times % 2 == 1 {
            all.combine(&doubled);
        }
        let same = doubled.clone();
        doubled.combine(&same);
        times /= 2;
    }
    all.update(&pattern[..(len % pattern.len() as u64) as usize]);
    all.finalize()
}

/// CRC32 of a range of bytes, gathered from segments that come in any order.
#[derive(Debug, Default, Clone)]
pub struct Segments {
    /// offset -> (length, crc)
    seen: BTreeMap<u64, (u64, u32)>,
}

impl Segments {
    /// Records a segment. A segment that overlaps a known one is dropped, and its bytes are read again as a
    /// gap.
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

    /// Merges the segment at `offset` with neighbours that touch it, so segments that come almost in order
    /// take almost no memory.
    pub fn join(&mut self, offset: u64) {
        self.join_between(offset, &[]);
    }

    /// [`Segments::join`], but never across one of `cuts`, which are sorted: the checksum between two of them
    /// stays known.
    pub fn join_between(&mut self, offset: u64, cuts: &[u64]) {
        let is_cut = |at: u64| cuts.binary_search(&at).is_ok();
        let at = self.ends_at(offset).filter(|_| !is_cut(offset)).unwrap_or(offset);
        while let Some(&(len, crc)) = self.seen.get(&at) {
            if is_cut(at + len) {
                break;
            }
            let Some((more, next)) = self.seen.remove(&(at + len)) else { break };
            let mut combined = crc32fast::Hasher::new_with_initial_len(crc, len);
            combined.combine(&crc32fast::Hasher::new_with_initial_len(next, more));
            self.seen.insert(at, (len + more, combined.finalize()));
        }
    }

    /// The start of the segment that ends at `offset`, if there is one.
    fn ends_at(&self, offset: u64) -> Option<u64> {
        let (start, (len, _)) = self.seen.range(..offset).next_back()?;
        (start + len == offset).then_some(*start)
    }

    /// True if a segment of `len` bytes at `offset` would merge with another one.
    pub fn would_join(&self, offset: u64, len: u64, cuts: &[u64]) -> bool {
        let joins = |at: u64, there: bool| there && cuts.binary_search(&at).is_err();
        joins(offset, self.ends_at(offset).is_some())
            || joins(offset + len, self.seen.contains_key(&(offset + len)))
    }

    /// All of them: offset, length, CRC32.
    pub fn all(&self) -> impl Iterator<Item = (u64, u64, u32)> + '_ {
        self.seen.iter().map(|(&offset, &(len, crc))| (offset, len, crc))
    }

    /// Number of segments.
    pub fn len(&self) -> usize {
        self.seen.len()
    }

    /// True if there are no segments.
    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// Ranges of `lo..hi` that no segment covers.
    pub fn gaps(&self, lo: u64, hi: u64) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        let mut at = lo;
        while let Some((start, end)) = self.gap(at, hi) {
            gaps.push((start, end));
            at = end;
        }
        gaps
    }

    /// The first range of `lo..hi` that no segment covers.
    pub fn gap(&self, lo: u64, hi: u64) -> Option<(u64, u64)> {
        let mut at = lo;
        let start = self.seen.range(..=lo).next_back().map_or(lo, |(o, _)| *o);
        for (&offset, &(len, _)) in self.seen.range(start..hi) {
            if offset > at {
                return Some((at, offset));
            }
            at = at.max(offset + len);
        }
        (at < hi).then_some((at, hi))
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
                let mut hashes = TileHashes::new(tile, total);
                for (i, chunk) in bytes.chunks(tile as usize).enumerate() {
                    assert_eq!(hashes.finish(), None, "{tile} {total}: a tile is missing");
                    hashes.add(i as u64, tile_value(chunk, i as u64, tile, total));
                }
                assert_eq!(hashes.finish(), Some(*blake3::hash(&bytes).as_bytes()), "{tile} {total}");
                assert!(
                    hashes.count_values() <= 8,
                    "{tile} {total}: {} values for 65 tiles at most",
                    hashes.count_values()
                );
            }
        }
    }

    proptest! {
        #[test]
        fn constants_have_the_checksum_of_their_bytes(
            pattern in proptest::collection::vec(any::<u8>(), 1..9), len in 0usize..5000,
        ) {
            let bytes: Vec<u8> = pattern.iter().copied().cycle().take(len).collect();
            prop_assert_eq!(crc32_of_constant(&pattern, len as u64), crc32(&bytes));
        }

        #[test]
        fn tiles_in_any_order(total in 0u64..70_000, seed in any::<u64>()) {
            let bytes: Vec<u8> = (0..total).map(|i| (i * i % 251) as u8).collect();
            let mut tiles: Vec<(u64, &[u8])> = (0..).zip(bytes.chunks(1024)).collect();
            let mix = |i: u64| (i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
            tiles.sort_by_key(|(i, _)| mix(*i));
            let mut hashes = TileHashes::new(1024, total);
            for (i, tile) in tiles {
                hashes.add(i, tile_value(tile, i, 1024, total));
            }
            prop_assert_eq!(hashes.finish(), Some(*blake3::hash(&bytes).as_bytes()));
        }

        /// Joined as they come, in any order, between cuts: what lies between two cuts can still be told.
        #[test]
        fn segments_are_joined_between_cuts(n in 1u64..60, cuts in proptest::collection::btree_set(0u64..61, 0..6), seed in any::<u64>()) {
            let bytes: Vec<u8> = (0..n * 10).map(|i| (i * 7 % 251) as u8).collect();
            let crc = |lo: u64, hi: u64| crc32(&bytes[lo as usize..hi as usize]);
            let cuts: Vec<u64> = cuts.into_iter().filter(|c| *c <= n).map(|c| c * 10).collect();
            let mut order: Vec<u64> = (0..n).collect();
            order.sort_by_key(|i| (i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let mut segments = Segments::default();
            for i in order {
                let before = segments.len();
                let joins = segments.would_join(i * 10, 10, &cuts);
                segments.add(i * 10, 10, crc(i * 10, i * 10 + 10));
                segments.join_between(i * 10, &cuts);
                prop_assert_eq!(joins, segments.len() <= before);
            }
            let mut ends = cuts.clone();
            ends.extend([0, n * 10]);
            ends.sort_unstable();
            ends.dedup();
            prop_assert_eq!(segments.len(), ends.len() - 1);
            for (i, &lo) in ends.iter().enumerate() {
                for &hi in &ends[i + 1..] {
                    prop_assert_eq!(segments.crc(lo, hi), Some(crc(lo, hi)));
                }
            }
        }

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
