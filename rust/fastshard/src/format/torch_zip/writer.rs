//! Lays out a torch zip file as `torch.save` does, before a byte of tensor data is there.
//!
//! source: pytorch caffe2/serialize/inline_container.cc (`getPadding`, `writeRecord`) and
//! third_party/miniz-3.0.2/miniz.c (`mz_zip_writer_add_mem_ex_v2`, `mz_zip_writer_finalize_archive`).
//! Local headers hold no sizes and no CRC: a descriptor follows the data. Data starts at multiples
//! of 64 by way of an extra field `FB`. Sizes and offsets of 4 GiB and more are in a zip64 extra
//! field, in both headers, with a wide descriptor; the end records are always those of zip64. What
//! `torch.load` computes of a file's layout (`calculate_storage_offsets`) so holds here too.

use crate::format::{Frame, Member};

/// Data starts at multiples of this.
const ALIGNMENT: u64 = 64;
/// From here on a number does not fit its 32-bit field.
const WIDE: u64 = 0xffff_ffff;
/// CRC and sizes follow the data; names are UTF-8.
const DESCRIPTOR: u16 = 1 << 3;
const UTF8: u16 = 1 << 11;

/// A member to be written.
pub(crate) struct Record {
    /// Name below the archive's folder.
    pub(crate) name: String,
    /// Its bytes, or how many there will be.
    pub(crate) content: Result<Vec<u8>, u64>,
}

/// The records of a file in torch's order. `lens` are the bytes of the storages, by key.
pub(crate) fn records(pickle: Vec<u8>, lens: &[u64]) -> Vec<Record> {
    let known = |name: &str, content: &[u8]| Record { name: name.into(), content: Ok(content.to_vec()) };
    // torch makes the id of names and checksums; only that it tells files apart is used.
    let digest = blake3::hash(&pickle);
    let number =
        |at: usize| u64::from_le_bytes(digest.as_bytes()[at..at + 8].try_into().expect("eight bytes"));
    let id = format!("{:020}{:020}", number(0), number(8));
    let mut records = vec![
        Record { name: "data.pkl".into(), content: Ok(pickle) },
        known(".format_version", b"1"),
        known(".storage_alignment", ALIGNMENT.to_string().as_bytes()),
        known("byteorder", b"little"),
    ];
    records.extend(
        lens.iter().enumerate().map(|(key, &len)| Record { name: format!("data/{key}"), content: Err(len) }),
    );
    records.push(known("version", b"3\n"));
    records.push(known(".data/serialization_id", id.as_bytes()));
    records
}

/// Places all records below `folder`.
pub(crate) fn layout(folder: &str, records: Vec<Record>) -> Frame {
    let mut frame = Frame::default();
    let mut piece = (0u64, Vec::<u8>::new());
    let mut directory = Vec::<u8>::new();
    // Where in the directory the CRC of each member that is filled later stands.
    let mut crc_in_directory = Vec::new();
    let count = records.len() as u64;
    for record in records {
        let header = piece.0 + piece.1.len() as u64;
        let (len, content) = match record.content {
            Ok(content) => (content.len() as u64, Some(content)),
            Err(len) => (len, None),
        };
        let entry = Entry {
            name: format!("{folder}/{}", record.name),
            header,
            len,
            crc: content.as_deref().map_or(0, crc32fast::hash),
            zip64: zip64_extra(len, header),
        };
        let data = entry.local(&mut piece.1);
        let known = content.is_some();
        match content {
            Some(content) => piece.1.extend(content),
            None if len > 0 => {
                let done = std::mem::replace(&mut piece, (data + len, Vec::new()));
                frame.pieces.push(done);
            }
            None => {}
        }
        entry.descriptor(&mut piece.1);
        if !known {
            let crc_at = if len > 0 { vec![data + len + 4] } else { Vec::new() };
            crc_in_directory.push((frame.members.len(), directory.len() as u64 + 16));
            frame.members.push(Member { offset: data, len, crc_at });
        }
        entry.central(&mut directory);
    }
    let start = piece.0 + piece.1.len() as u64;
    for (member, at) in crc_in_directory {
        frame.members[member].crc_at.push(start + at);
    }
    let len = directory.len() as u64;
    piece.1.extend(directory);
    end_of_directory(&mut piece.1, count, start, len);
    frame.size = piece.0 + piece.1.len() as u64;
    frame.pieces.push(piece);
    frame
}

/// A member of the archive.
struct Entry {
    name: String,
    /// Where its header lies.
    header: u64,
    len: u64,
    crc: u32,
    zip64: Vec<u8>,
}

impl Entry {
    fn flags(&self) -> u16 {
        UTF8 | if self.len > 0 { DESCRIPTOR } else { 0 }
    }

    /// The header before the data, padded so that the data is aligned; where the data begins.
    fn local(&self, bytes: &mut Vec<u8>) -> u64 {
        bytes.extend(b"PK\x03\x04");
        bytes.extend([0, 0]);
        bytes.extend(self.flags().to_le_bytes());
        bytes.extend([0; 18]); // method, time, date, CRC, sizes
        bytes.extend((self.name.len() as u16).to_le_bytes());
        let fixed = self.header + 30 + (self.name.len() + self.zip64.len()) as u64 + 4;
        let padding = fixed.next_multiple_of(ALIGNMENT) - fixed;
        bytes.extend((self.zip64.len() as u16 + 4 + padding as u16).to_le_bytes());
        bytes.extend(self.name.as_bytes());
        bytes.extend(&self.zip64);
        bytes.extend(b"FB");
        bytes.extend((padding as u16).to_le_bytes());
        bytes.resize(bytes.len() + padding as usize, b'Z');
        fixed + padding
    }

    /// What stands after the data, if there is any.
    fn descriptor(&self, bytes: &mut Vec<u8>) {
        if self.len == 0 {
            return;
        }
        bytes.extend(b"PK\x07\x08");
        bytes.extend(self.crc.to_le_bytes());
        let wide = !self.zip64.is_empty();
        (0..2).for_each(|_| match wide {
            true => bytes.extend(self.len.to_le_bytes()),
            false => bytes.extend((self.len as u32).to_le_bytes()),
        });
    }

    /// The entry in the directory.
    fn central(&self, directory: &mut Vec<u8>) {
        directory.extend(b"PK\x01\x02");
        directory.extend([0; 4]); // versions
        directory.extend(self.flags().to_le_bytes());
        directory.extend([0; 6]); // method, time, date
        directory.extend(self.crc.to_le_bytes());
        directory.extend((self.len.min(WIDE) as u32).to_le_bytes());
        directory.extend((self.len.min(WIDE) as u32).to_le_bytes());
        directory.extend((self.name.len() as u16).to_le_bytes());
        directory.extend((self.zip64.len() as u16).to_le_bytes());
        directory.extend([0; 10]); // comment, disk, attributes
        directory.extend((self.header.min(WIDE) as u32).to_le_bytes());
        directory.extend(self.name.as_bytes());
        directory.extend(&self.zip64);
    }
}

/// What stands at the end: how many members there are, and where the directory of `len` bytes begins, in both widths.
fn end_of_directory(bytes: &mut Vec<u8>, count: u64, start: u64, len: u64) {
    bytes.extend(b"PK\x06\x06");
    bytes.extend(44u64.to_le_bytes());
    bytes.extend([0x1e, 3, 0x2d, 0]); // versions, as miniz
    bytes.extend([0; 8]); // disks
    for number in [count, count, len, start] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(b"PK\x06\x07");
    bytes.extend([0; 4]);
    bytes.extend((start + len).to_le_bytes());
    bytes.extend(1u32.to_le_bytes());
    bytes.extend(b"PK\x05\x06");
    bytes.extend([0; 4]);
    bytes.extend((count.min(0xffff) as u16).to_le_bytes());
    bytes.extend((count.min(0xffff) as u16).to_le_bytes());
    bytes.extend((len.min(WIDE) as u32).to_le_bytes());
    bytes.extend((start.min(WIDE) as u32).to_le_bytes());
    bytes.extend([0; 2]);
}

/// What does not fit in 32 bits: size and stored size, then the header's offset.
fn zip64_extra(len: u64, header: u64) -> Vec<u8> {
    let mut wide = Vec::new();
    if len >= WIDE {
        wide.extend([len, len]);
    }
    if header >= WIDE {
        wide.push(header);
    }
    if wide.is_empty() {
        return Vec::new();
    }
    let mut bytes = vec![1, 0];
    bytes.extend((8 * wide.len() as u16).to_le_bytes());
    wide.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
    bytes
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use super::*;
    use crate::format::pickle::writer::{pickle, Stored, Tree};
    use crate::storage::SourceFile;
    use crate::tensor::Dtype;

    /// CRC32 of `n` zeros, without `n` steps.
    fn crc_of_zeros(n: u64) -> u32 {
        let mut all = crc32fast::Hasher::new();
        let mut power = crc32fast::Hasher::new();
        power.update(&[0]);
        for bit in 0..40 {
            if n >> bit & 1 == 1 {
                all.combine(&power);
            }
            let again = power.clone();
            power.combine(&again);
        }
        all.finalize()
    }

    /// A file of zeros with tensors of these lengths; false where the system has no room for its size.
    fn write_sparse(path: &Path, lens: &[u64]) -> Option<Frame> {
        let tree = Tree::Ordered(
            (0..lens.len()).map(|i| (Tree::Str(format!("w{i}")), Tree::Tensor(i.to_string()))).collect(),
        );
        let shapes: Vec<[u64; 1]> = lens.iter().map(|&n| [n]).collect();
        let bytes = pickle(&tree, &|name| {
            let key: u32 = name.parse().ok()?;
            Some(Stored { dtype: Dtype::U8, shape: &shapes[key as usize], key })
        })
        .unwrap();
        let frame = layout("big", records(bytes, lens));
        let file = File::create(path).unwrap();
        file.set_len(frame.size).ok()?;
        for (at, bytes) in &frame.pieces {
            file.write_all_at(bytes, *at).unwrap();
        }
        for member in &frame.members {
            let crc = crc_of_zeros(member.len).to_le_bytes();
            member.crc_at.iter().for_each(|&at| file.write_all_at(&crc, at).unwrap());
        }
        Some(frame)
    }

    /// Sizes and offsets on both sides of 4 GiB. `FASTSHARD_SPARSE_FILE` names a place to keep the
    /// file at, for a look at it with other readers.
    #[test]
    fn sizes_and_offsets_beyond_4_gib() {
        let dir = tempfile::tempdir().unwrap();
        let kept = std::env::var_os("FASTSHARD_SPARSE_FILE");
        let path = kept.map_or(dir.path().join("big.pt"), Into::into);
        let lens = [3, WIDE - 1, 0, 5, WIDE, 7, 5 << 30, 0, 64];
        let Some(frame) = write_sparse(&path, &lens) else { return };
        let file = SourceFile::open(&path).unwrap();
        let parsed = crate::format::torch_zip::parse(&file).unwrap();
        assert_eq!(parsed.tensors.len(), lens.len());
        for (i, (&len, member)) in lens.iter().zip(&frame.members).enumerate() {
            let tensor = &parsed.tensors[i];
            let blob = &parsed.blobs[tensor.blob as usize];
            assert_eq!((tensor.path[0].as_str(), &tensor.shape[..]), (format!("w{i}").as_str(), &[len][..]));
            assert_eq!((blob.offset, blob.len, blob.crc32), (member.offset, len, Some(crc_of_zeros(len))));
            assert_eq!(blob.offset % ALIGNMENT, 0);
            assert_eq!(blob.member.as_deref(), Some(format!("big/data/{i}").as_str()));
        }
        let mut zip = zip::ZipArchive::new(File::open(&path).unwrap()).unwrap();
        for i in [0, 2, 3, 5, 7, 8] {
            // Reading to the end checks the CRC.
            let mut entry = zip.by_name(&format!("big/data/{i}")).unwrap();
            assert_eq!(std::io::copy(&mut entry, &mut std::io::sink()).unwrap(), lens[i]);
        }
    }

    #[test]
    fn crc_of_zeros_is_that_of_zeros() {
        for n in [0, 1, 2, 63, 64, 1000, 4096, 100_001] {
            assert_eq!(crc_of_zeros(n), crc32fast::hash(&vec![0; n as usize]));
        }
    }
}
