//! Vocabularies of tokenizers: the largest id, and the ids of a few tokens. Nothing else of them is kept: a file has
//! tens of megabytes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufRead, BufReader, Read};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::Serialize;

use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::memory;
use crate::storage::SourceFile;

/// What a file of a vocabulary is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `tokenizer.json` of the library tokenizers. source: tokenizers/src/{tokenizer,models}/*/serialization.rs
    Tokenizers,
    /// A JSON object of tokens and ids: `vocab.json`, `added_tokens.json`.
    Ids,
    /// `tokenizer.model`, `spiece.model`: protobuf. source: sentencepiece/src/sentencepiece_model.proto
    SentencePiece,
    /// A token a line: `vocab.txt`.
    Lines,
}

/// What is kept of a vocabulary.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct Vocabulary {
    /// The largest id; none of an empty one.
    pub largest: Option<u64>,
    /// Ids of the tokens asked for, as far as they are there.
    pub ids: BTreeMap<String, u64>,
}

/// Reads a vocabulary in bounded memory.
///
/// # Errors
///
/// `FS211` for a file that is no such vocabulary, or what the system says.
pub fn read(file: &SourceFile, kind: Kind, wanted: &[String]) -> Result<Vocabulary> {
    let wanted = wanted.iter().map(String::as_str).collect();
    let mut found = Found { wanted, vocabulary: Vocabulary::default() };
    let mut reader = BufReader::with_capacity(32 << 10, Sequential { file, at: 0 });
    let read = match kind {
        Kind::Tokenizers => json(&mut reader, Whole(&mut found)),
        Kind::Ids => json(&mut reader, Ids(&mut found)),
        Kind::SentencePiece => pieces(&mut reader, file.size(), &mut found),
        Kind::Lines => lines(&mut reader, &mut found),
    };
    match read {
        Ok(()) => Ok(found.vocabulary),
        Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {
            Err(Error::io(file.path(), "cannot read", &error))
        }
        Err(error) => {
            Err(Finding::new(codes::BAD_VALUE, format!("not a vocabulary: {error}")).file(file.path()).into())
        }
    }
}

/// A file from its beginning to its end.
struct Sequential<'a> {
    file: &'a SourceFile,
    at: u64,
}

impl Read for Sequential<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = (self.file.size() - self.at).min(buffer.len() as u64) as usize;
        self.file
            .read_at(self.at, &mut buffer[..len])
            .map_err(|error| io::Error::other(error.to_string()))?;
        self.at += len as u64;
        Ok(len)
    }
}

struct Found<'w> {
    wanted: BTreeSet<&'w str>,
    vocabulary: Vocabulary,
}

impl Found<'_> {
    fn add(&mut self, token: &str, id: u64) {
        self.vocabulary.largest = self.vocabulary.largest.max(Some(id));
        if self.wanted.contains(token) {
            self.vocabulary.ids.insert(token.to_string(), id);
        }
    }
}

fn json<'de, 'f>(reader: impl Read, seed: impl DeserializeSeed<'de, Value = ()> + 'f) -> io::Result<()> {
    let mut deserializer = serde_json::Deserializer::from_reader(reader);
    seed.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(())
}

/// The file itself: `added_tokens`, and `vocab` below `model`.
struct Whole<'f, 'w>(&'f mut Found<'w>);
/// What `model` is.
struct Model<'f, 'w>(&'f mut Found<'w>);
/// An object of tokens and ids, or a list of tokens with their scores, whose ids count on.
struct Ids<'f, 'w>(&'f mut Found<'w>);
/// A list of tokens that were added, each an object.
struct Added<'f, 'w>(&'f mut Found<'w>);

macro_rules! seeds {
    ($($name:ident),*) => {$(
        impl<'de> DeserializeSeed<'de> for $name<'_, '_> {
            type Value = ();
            fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<(), D::Error> {
                deserializer.deserialize_any(self)
            }
        }
    )*};
}
seeds!(Whole, Model, Ids, Added);

impl<'de> Visitor<'de> for Whole<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("an object with a model")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "model" => map.next_value_seed(Model(self.0))?,
                "added_tokens" => map.next_value_seed(Added(self.0))?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

impl<'de> Visitor<'de> for Model<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("a model with a vocab")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "vocab" => map.next_value_seed(Ids(self.0))?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

impl<'de> Visitor<'de> for Ids<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("tokens with their ids")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        while let Some((token, id)) = map.next_entry::<String, u64>()? {
            self.0.add(&token, id);
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<(), A::Error> {
        let mut id = 0;
        while let Some((token, _)) = list.next_element::<(String, f64)>()? {
            self.0.add(&token, id);
            id += 1;
        }
        Ok(())
    }
}

#[derive(serde::Deserialize)]
struct Token {
    id: u64,
    content: String,
}

impl<'de> Visitor<'de> for Added<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("a list of tokens")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<(), A::Error> {
        while let Some(token) = list.next_element::<Token>()? {
            self.0.add(&token.content, token.id);
        }
        Ok(())
    }
}

/// Longest token that is looked at; none is as long.
const MAX_TOKEN: u64 = 1 << 20;

/// `repeated SentencePiece pieces = 1`, each with `string piece = 1`; the rest is passed over.
fn pieces(reader: &mut impl BufRead, size: u64, found: &mut Found) -> io::Result<()> {
    let mut message = Message { reader, left: size };
    let mut id = 0;
    while let Some((field, wire)) = message.tag()? {
        let len = message.length(wire)?;
        if (field, wire) != (1, 2) {
            message.skip(len)?;
            continue;
        }
        let after = message.left - len;
        let mut piece = Message { reader: &mut *message.reader, left: len };
        let mut token = Vec::new();
        while let Some((field, wire)) = piece.tag()? {
            let len = piece.length(wire)?;
            if (field, wire) == (1, 2) && len <= MAX_TOKEN {
                token = piece.bytes(len)?;
            } else {
                piece.skip(len)?;
            }
        }
        message.left = after;
        found.add(&String::from_utf8_lossy(&token), id);
        id += 1;
    }
    match id {
        0 => Err(io::Error::other("it holds no pieces")),
        _ => Ok(()),
    }
}

/// A protobuf message that is read from its beginning.
struct Message<'r, R> {
    reader: &'r mut R,
    left: u64,
}

impl<R: BufRead> Message<'_, R> {
    /// Number and wire type of the next field; none at the end.
    fn tag(&mut self) -> io::Result<Option<(u64, u8)>> {
        if self.left == 0 {
            return Ok(None);
        }
        let tag = self.varint()?;
        match tag >> 3 {
            // No message has such a field: a file of zeros would be read to its end.
            0 => Err(io::Error::other("no protobuf of SentencePiece")),
            field => Ok(Some((field, (tag & 7) as u8))),
        }
    }

    /// Bytes of the field's value that follow.
    fn length(&mut self, wire: u8) -> io::Result<u64> {
        let len = match wire {
            0 => self.varint().map(|_| 0)?,
            1 => 8,
            2 => self.varint()?,
            5 => 4,
            _ => return Err(io::Error::other("no protobuf of SentencePiece")),
        };
        match len <= self.left {
            true => Ok(len),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn varint(&mut self) -> io::Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.bytes(1)?[0];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(io::Error::other("no protobuf of SentencePiece"))
    }

    fn bytes(&mut self, len: u64) -> io::Result<Vec<u8>> {
        if len > self.left {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut bytes = memory::allocate(len as usize)?;
        self.reader.read_exact(&mut bytes)?;
        self.left -= len;
        Ok(bytes)
    }

    fn skip(&mut self, len: u64) -> io::Result<()> {
        let skipped = io::copy(&mut (&mut *self.reader).take(len), &mut io::sink())?;
        self.left -= skipped;
        match skipped == len {
            true => Ok(()),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

fn lines(reader: &mut impl BufRead, found: &mut Found) -> io::Result<()> {
    let (mut id, mut line) = (0, Vec::new());
    loop {
        line.clear();
        if (&mut *reader).take(MAX_TOKEN).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        let token = line.strip_suffix(b"\n").unwrap_or(&line);
        found.add(&String::from_utf8_lossy(token.strip_suffix(b"\r").unwrap_or(token)), id);
        id += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(content: &[u8], kind: Kind, wanted: &[&str]) -> Result<Vocabulary> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vocabulary");
        std::fs::write(&path, content).unwrap();
        let wanted: Vec<String> = wanted.iter().map(ToString::to_string).collect();
        read(&SourceFile::open(&path).unwrap(), kind, &wanted)
    }

    fn found(largest: u64, ids: &[(&str, u64)]) -> Vocabulary {
        let ids = ids.iter().map(|(token, id)| (token.to_string(), *id)).collect();
        Vocabulary { largest: Some(largest), ids }
    }

    #[test]
    fn tokenizers() {
        let text = br#"{"version": "1.0", "added_tokens": [{"id": 9, "content": "<eos>", "special": true}],
            "model": {"type": "BPE", "merges": [["a", "b"]], "vocab": {"a": 0, "b": 1, "ab": 7}}}"#;
        assert_eq!(
            of(text, Kind::Tokenizers, &["<eos>", "b", "c"]).unwrap(),
            found(9, &[("<eos>", 9), ("b", 1)])
        );
        let unigram = br#"{"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0], ["x", -1.5]]}}"#;
        assert_eq!(of(unigram, Kind::Tokenizers, &["x"]).unwrap(), found(1, &[("x", 1)]));
        assert_eq!(of(b"{}", Kind::Tokenizers, &[]).unwrap(), Vocabulary::default());
        for bad in [&b"[]"[..], b"", b"{\"model\": 3}", b"{\"model\": {\"vocab\": {\"a\": -1}}}", b"{} {}"] {
            assert!(of(bad, Kind::Tokenizers, &[]).is_err(), "{}", String::from_utf8_lossy(bad));
        }
        assert!(of("[".repeat(100_000).as_bytes(), Kind::Tokenizers, &[]).is_err());
    }

    #[test]
    fn ids_and_lines() {
        assert_eq!(of(br#"{"a": 3, "b": 1}"#, Kind::Ids, &["a"]).unwrap(), found(3, &[("a", 3)]));
        assert_eq!(
            of(b"[PAD]\r\n[UNK]\r\nthe", Kind::Lines, &["the", "[PAD]"]).unwrap(),
            found(2, &[("[PAD]", 0), ("the", 2)])
        );
        assert_eq!(of(b"", Kind::Lines, &[]).unwrap(), Vocabulary::default());
    }

    #[test]
    fn sentence_pieces() {
        let piece = |text: &str, kind: u8| {
            let mut inner = vec![0x0a, text.len() as u8];
            inner.extend(text.bytes());
            inner.extend([0x15, 0, 0, 0x80, 0x3f, 0x18, kind]);
            [&[0x0a, inner.len() as u8][..], &inner].concat()
        };
        let trainer = [&[0x12, 0x03][..], &[0x18, 0xac, 0x02]].concat();
        let model = [piece("<unk>", 2), piece("</s>", 3), piece("a", 1), trainer].concat();
        assert_eq!(of(&model, Kind::SentencePiece, &["</s>"]).unwrap(), found(2, &[("</s>", 1)]));
        for cut in [1, model.len() - 4] {
            assert!(of(&model[..cut], Kind::SentencePiece, &[]).is_err(), "{cut}");
        }
        assert!(of(b"", Kind::SentencePiece, &[]).is_err());
        assert!(of(&[0xff; 40], Kind::SentencePiece, &[]).is_err());
        // Zeros after a whole model are no fields either.
        assert!(of(&[&model[..], &[0; 40]].concat(), Kind::SentencePiece, &[]).is_err());
    }
}
