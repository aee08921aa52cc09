//! Evidence about sources that making tiles yields: differences of copies, checksums of runs.

use serde::{Deserialize, Serialize};

/// Bytes of a blob whose checksum is known: offset, length, CRC32.
pub(super) type Segment = (u64, u64, u32);

/// Differences that were seen while a part's sources were combined.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Drift {
    /// Elements in which copies differ.
    pub differing: u64,
    /// Largest absolute difference.
    #[serde(with = "bits")]
    pub largest: f32,
    /// Index (in the part's sources) of the first copy that differs.
    pub source: usize,
}

impl Drift {
    /// Adds the evidence of another tile.
    pub fn merge(&mut self, other: &Drift) {
        if other.differing > 0 && (self.differing == 0 || other.source < self.source) {
            self.source = other.source;
        }
        self.differing += other.differing;
        self.largest = self.largest.max(other.largest);
    }
}

/// A float by its bits: it may be infinite.
mod bits {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(x: &f32, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u32(x.to_bits())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<f32, D::Error> {
        u32::deserialize(d).map(f32::from_bits)
    }
}
