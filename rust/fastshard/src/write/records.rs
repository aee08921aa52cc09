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
pub(super) fn tile(output: usize, tile: &TileDone) -> Vec<u8> {
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
pub(super) fn anew(file: usize) -> Vec<u8> {
    [&[ANEW][..], &(file as u32).to_le_bytes()].concat()
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

/// The tiles that earlier runs have written, and where the journal tells of each: 16 bytes a tile.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// By output: index of the tile and place of its record, ascending.
    places: Vec<Vec<(u64, u64)>>,
}

impl Claims {
    /// What the journal claims of `outputs` outputs, `file_of` telling the file of each.
    ///
    /// Errors: what the system says.
    pub(super) fn of(journal: &Journal, outputs: usize, file_of: &dyn Fn(usize) -> u32) -> Result<Claims> {
        let mut places: Vec<Vec<(u64, u64)>> = vec![Vec::new(); outputs];
        journal.replay(&mut |place, record| match parse(record) {
            Some(Record::Tile(output, tile)) => {
                if let Some(places) = places.get_mut(output as usize) {
                    places.push((tile.index, place));
                }
            }
            Some(Record::Anew(file)) => {
                for (_, places) in places.iter_mut().enumerate().filter(|(o, _)| file_of(*o) == file) {
                    places.clear();
                }
            }
            None => {}
        })?;
        for places in &mut places {
            // Of several records of one index the last counts: tiles may have been of another size before.
            places.sort_by_key(|(index, place)| (*index, std::cmp::Reverse(*place)));
            places.dedup_by_key(|(index, _)| *index);
            places.shrink_to_fit();
        }
        Ok(Claims { places })
    }

    /// The record of a tile of `size` bytes.
    ///
    /// Errors: what the system says.
    pub(super) fn get(
        &self,
        journal: &Journal,
        output: usize,
        index: u64,
        size: u64,
    ) -> Result<Option<TileDone>> {
        let Some(places) = self.places.get(output) else { return Ok(None) };
        let Ok(at) = places.binary_search_by_key(&index, |(index, _)| *index) else { return Ok(None) };
        let mut bytes = [0; LONGEST];
        let record = journal.read(places[at].1, &mut bytes)?;
        Ok(match parse(record) {
            Some(Record::Tile(of, tile)) if (of as usize, tile.index, tile.size) == (output, index, size) => {
                Some(tile)
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
        let claims = Claims::of(again.journal(), 3, &|output| u32::from(output == 2)).unwrap();
        let get = |output, index, size| claims.get(again.journal(), output, index, size).unwrap();
        assert_eq!(get(0, 0, 1024), None);
        assert_eq!(get(0, 0, 4096), Some(done(0, 4096, 4)));
        assert_eq!(get(1, 0, 1024), Some(done(0, 1024, 2)));
        assert_eq!(get(1, 1, 1024), Some(done(1, 1024, 5)));
        assert_eq!(get(2, 5, 1024), None, "its file was made anew after that");
        assert_eq!(get(2, 6, 1024), Some(done(6, 1024, 6)));
        assert_eq!(get(3, 0, 1024), None);
    }
}
