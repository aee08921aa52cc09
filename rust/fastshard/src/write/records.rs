//! What the journal of a run says: which tiles are written, and which files were made anew.

use crate::engine::TileDone;
use crate::error::Result;
use crate::publish::Journal;

/// First byte of the record of a tile.
const TILE: u8 = 1;
/// First byte of the record of a file that was made anew: what was said of its tiles before is void.
const ANEW: u8 = 2;
/// Bytes of the longest record.
const LONGEST: usize = 65;

/// The record of a tile: kind, output (u32), index and size (u64), chaining value, elements that are not
/// finite (u64), and its CRC32 (u32) where there is one.
pub(crate) fn tile(output: usize, tile: &TileDone) -> Vec<u8> {
    let mut bytes = vec![TILE];
    bytes.extend((output as u32).to_le_bytes());
    bytes.extend(tile.index.to_le_bytes());
    bytes.extend(tile.size.to_le_bytes());
    bytes.extend(tile.value);
    bytes.extend(tile.non_finite.to_le_bytes());
    bytes.extend(tile.crc32.iter().flat_map(|crc| crc.to_le_bytes()));
    bytes
}

/// The record of a data file (by its place in the plan) that is about to be made anew.
pub(crate) fn anew(file: usize) -> Vec<u8> {
    [&[ANEW][..], &(file as u32).to_le_bytes()].concat()
}

/// The output and the tile of a record, if it is one of a tile.
pub(crate) fn tile_of(record: &[u8]) -> Option<(u32, TileDone)> {
    match parse(record) {
        Some(Record::Tile(output, tile)) => Some((output, tile)),
        _ => None,
    }
}

enum Record {
    Tile(u32, TileDone),
    Anew(u32),
}

fn parse(bytes: &[u8]) -> Option<Record> {
    let (kind, rest) = bytes.split_first()?;
    let u32_at = |at: usize| Some(u32::from_le_bytes(rest.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(rest.get(at..at + 8)?.try_into().ok()?));
    match *kind {
        TILE => Some(Record::Tile(
            u32_at(0)?,
            TileDone {
                index: u64_at(4)?,
                size: u64_at(12)?,
                value: rest.get(20..52)?.try_into().ok()?,
                non_finite: u64_at(52)?,
                crc32: if rest.len() > 60 { Some(u32_at(60)?) } else { None },
            },
        )),
        ANEW => Some(Record::Anew(u32_at(0)?)),
        _ => None,
    }
}

/// A journal that tells of tiles.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileJournal<'j> {
    /// The journal.
    pub(crate) journal: &'j Journal,
    /// True if what it says is taken as it is: its process has done all of its part, and nobody else wrote there.
    pub(crate) adopted: bool,
}

/// Where a tile is told of.
#[derive(Debug, Clone, Copy)]
struct Claim {
    index: u64,
    /// Its journal, by its place among them.
    journal: u32,
    place: u64,
}

/// The tiles that others have written, and where their journals tell of each: 24 bytes a tile.
#[derive(Debug, Default)]
pub(crate) struct Claims<'j> {
    journals: Vec<TileJournal<'j>>,
    /// By output, the tiles in order.
    claims: Vec<Vec<Claim>>,
}

impl<'j> Claims<'j> {
    /// What journals claim of `outputs` outputs, `file_of` telling the file of each; of two that claim the same tile
    /// the adopted one counts, else the later one.
    ///
    /// Errors: those of the system.
    pub(crate) fn of(
        journals: Vec<TileJournal<'j>>,
        outputs: usize,
        file_of: &dyn Fn(usize) -> u32,
    ) -> Result<Claims<'j>> {
        let mut claims: Vec<Vec<Claim>> = vec![Vec::new(); outputs];
        for (journal, each) in (0u32..).zip(&journals) {
            each.journal.replay(&mut |place, record| match parse(record) {
                Some(Record::Tile(output, tile)) => {
                    if let Some(claims) = claims.get_mut(output as usize) {
                        claims.push(Claim { index: tile.index, journal, place });
                    }
                }
                Some(Record::Anew(file)) => {
                    for (_, claims) in claims.iter_mut().enumerate().filter(|(o, _)| file_of(*o) == file) {
                        claims.retain(|claim| claim.journal != journal);
                    }
                }
                None => {}
            })?;
        }
        for claims in &mut claims {
            // Of several records of one index the last counts: tiles may have been of another size before.
            let adopted = |claim: &Claim| journals[claim.journal as usize].adopted;
            claims.sort_by_key(|c| (c.index, std::cmp::Reverse((adopted(c), c.journal, c.place))));
            claims.dedup_by_key(|claim| claim.index);
            claims.shrink_to_fit();
        }
        Ok(Claims { journals, claims })
    }

    /// True if any of the journals is adopted.
    pub(crate) fn adopts(&self) -> bool {
        self.journals.iter().any(|each| each.adopted)
    }

    /// The record of a tile of `size` bytes, and whether it is adopted.
    ///
    /// Errors: those of the system.
    pub(crate) fn get(&self, output: usize, index: u64, size: u64) -> Result<Option<(TileDone, bool)>> {
        let Some(claims) = self.claims.get(output) else { return Ok(None) };
        let Ok(at) = claims.binary_search_by_key(&index, |claim| claim.index) else { return Ok(None) };
        let tile_journal = &self.journals[claims[at].journal as usize];
        let mut bytes = [0; LONGEST];
        let record = tile_journal.journal.read(claims[at].place, &mut bytes)?;
        Ok(match parse(record) {
            Some(Record::Tile(of, tile)) if (of as usize, tile.index, tile.size) == (output, index, size) => {
                Some((tile, tile_journal.adopted))
            }
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::publish::{Options, Staging};

    fn done(index: u64, size: u64, value: u8) -> TileDone {
        TileDone {
            index,
            size,
            value: [value; 32],
            non_finite: 7,
            crc32: index.is_multiple_of(2).then_some(9),
        }
    }

    #[test]
    fn the_last_word_on_a_tile_counts() {
        let dir = tempfile::tempdir().unwrap();
        let begin = |resume| {
            let options = Options { resume, ..Options::default() };
            Staging::begin(&dir.path().join("out"), &"0a".repeat(32), b"plan", &options).unwrap()
        };
        let first = begin(false);
        let records = [
            tile(0, &done(0, 1024, 1)),
            tile(1, &done(0, 1024, 2)),
            tile(2, &done(5, 1024, 3)),
            // Another budget cut larger tiles.
            tile(0, &done(0, 4096, 4)),
            tile(1, &done(1, 1024, 5)),
            anew(1),
            tile(2, &done(6, 1024, 6)),
            b"of another version".to_vec(),
        ];
        records.iter().for_each(|r| first.journal().append(r).unwrap());
        drop(first);
        let again = begin(true);
        // Outputs 0 and 1 lie in files 0 and 0, output 2 in file 1, which was made anew.
        let journals = vec![TileJournal { journal: again.journal(), adopted: false }];
        let claims = Claims::of(journals, 3, &|output| u32::from(output == 2)).unwrap();
        let get = |output, index, size| claims.get(output, index, size).unwrap().map(|(tile, _)| tile);
        assert_eq!(get(0, 0, 1024), None);
        assert_eq!(get(0, 0, 4096), Some(done(0, 4096, 4)));
        assert_eq!(get(1, 0, 1024), Some(done(0, 1024, 2)));
        assert_eq!(get(1, 1, 1024), Some(done(1, 1024, 5)));
        assert_eq!(get(2, 5, 1024), None, "its file was made again after that");
        assert_eq!(get(2, 6, 1024), Some(done(6, 1024, 6)));
        assert_eq!(get(3, 0, 1024), None);
    }
}
