//! Hostile and damaged torch files: refused by name or read inertly, never run, never a panic.

use std::path::Path;
use std::time::Duration;

use fastshard::codes::{self, Code};
use fastshard::error::{Error, Result};
use fastshard::format::pickle::{self, Limits, Pickle, LIMITS};
use fastshard::format::{self, ParsedFile};
use fastshard::storage::SourceFile;
use fastshard::value::{Value, Values};
use proptest::prelude::*;

/// Time of the processor that none of the small inputs here may take.
const BOUND: Duration = Duration::from_secs(10);

/// What a thread has worked so far: what the machine does besides takes none of it.
fn worked() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn unpickle(stream: impl AsRef<[u8]>) -> Result<Pickle> {
    let start = worked();
    let result = pickle::parse_bytes(stream.as_ref(), Path::new("evil.pt"));
    assert!(worked() - start < BOUND);
    result
}

/// Asserts the code of a refusal and that its text holds `words`; returns nothing of use otherwise.
fn refused<T: std::fmt::Debug>(result: Result<T>, code: Code, words: &[&str]) {
    let error: Error = result.expect_err("a refusal");
    assert_eq!(error.findings()[0].code, code, "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{error} lacks {word:?}");
    }
}

fn record<'a>(values: &'a Values, value: &'a Value) -> (&'a str, &'a Value, Option<&'a Value>) {
    let Value::Record { class, args, state } = value else { panic!("{value:?}") };
    let Value::Global(class) = values.get(*class) else { panic!() };
    (class, values.get(*args), state.map(|state| values.get(state)))
}

#[test]
fn calls_are_records() {
    for (stream, class) in [
        (&b"cos\nsystem\n(S'touch /tmp/owned'\ntR."[..], "os.system"),
        (b"(S'touch /tmp/owned'\nios\nsystem\n.", "os.system"),
        (b"(cos\nsystem\nS'touch /tmp/owned'\no.", "os.system"),
        (b"\x80\x02c__builtin__\neval\nq\x00X\x03\x00\x00\x001+1q\x01\x85q\x02Rq\x03.", "__builtin__.eval"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93\x8c\x01x\x85R.", "builtins.exec"),
        (b"\x80\x02csubprocess\nPopen\n)\x81.", "subprocess.Popen"),
        (b"\x80\x04csubprocess\nPopen\n)}\x92.", "subprocess.Popen"),
    ] {
        let pickle = unpickle(stream).unwrap();
        let (got, args, state) = record(&pickle.values, pickle.values.get(pickle.values.root()));
        assert_eq!((got, state), (class, None));
        assert!(matches!(args, Value::Tuple(_)));
    }
    // getattr(getattr(...)) chains: the outer call's class is itself a record.
    let pickle = unpickle(b"c__builtin__\ngetattr\n(cos\npath\nS'system'\ntR)R.").unwrap();
    assert!(matches!(pickle.values.get(pickle.values.root()), Value::Record { .. }));
    // A state with __setstate__ or __dict__ in it is only a state.
    let pickle = unpickle(b"cfoo\nBar\n)\x81}X\x0c\x00\x00\x00__setstate__cos\nsystem\nsb.").unwrap();
    let (_, _, state) = record(&pickle.values, pickle.values.get(pickle.values.root()));
    assert!(matches!(state, Some(Value::Dict(items)) if items.len() == 1));
}

#[test]
fn malformed_streams_are_refused_with_opcode_and_position() {
    for (stream, words) in [
        (&b"."[..], &["STOP at byte 0", "evil.pt"][..]),
        (b"NN.", &["STOP at byte 2"]),
        (b"N.N", &["1 bytes follow"]),
        (b"N", &["ends too early"]),
        (b"", &["ends too early"]),
        (b"\xffN.", &["0xff at byte 0"]),
        (b"h\x05.", &["BINGET at byte 0", "under 5"]),
        (b"t.", &["TUPLE", "mark"]),
        (b"(N\x86.", &["TUPLE2", "too little"]),
        (b"N(0\x85N\x86a.", &["APPEND"]),
        (b"}(Nu.", &["without a value"]),
        (b"NNb.", &["BUILD at byte 2"]),
        (b"]}b.", &["BUILD"]),
        (b"cfoo\nBar\n)R}b}b.", &["set twice"]),
        (b"cfoo\nBar\n]R", &["ends too early"]),
        (b"Nr\xff\xff\xff\x01.", &["LONG_BINPUT at byte 1", "memo"]),
        (b"Nr\xff\xff\xff\xff.", &["memo", "at most 33554432"]),
        (b"Np99999999999999999999\n.", &["PUT"]),
        (b"\x8b\xff\xff\xff\x7f.", &["LONG4 at byte 0", "at most 1024", "2147483647"]),
        (b"L1\x0b.", &["LONG", "line"]),
        (b"L999999999999999999999999999999999999999999L\n.", &["LONG"]),
        (
            b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc",
            &["BINUNICODE8", "18446744073709551615 bytes", "3 bytes"],
        ),
        (b"\x96\xff\xff\xff\xff\xff\xff\xff\xffabc", &["BYTEARRAY8"]),
        (b"B\xff\xff\xff\xffabc", &["BINBYTES"]),
        (b"\x95\xff\xff\xff\xff\xff\xff\xff\xffN.", &["FRAME"]),
        (b"X\x02\x00\x00\x00\xed\xa0.", &["UTF-8"]),
        (b"V\\ud800\n.", &["UNICODE"]),
        (b"S'a\n.", &["STRING"]),
        (b"S'\\x1'\n.", &["STRING"]),
        (b"NN\x93.", &["STACK_GLOBAL"]),
        (b"c\n.", &["GLOBAL"]),
        (b"(o.", &["OBJ"]),
        (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", &["REDUCE", "arguments"]),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00))\x89NtR.", &["not a storage"]),
        (b"ctorch._utils\n_rebuild_parameter\n)R.", &["without data"]),
        (b"ctorch._tensor\n_rebuild_from_type_v2\n)R.", &["subclass"]),
    ] {
        refused(unpickle(stream), codes::UNSAFE_PICKLE, words);
    }
    for stream in [&b"\x80\x06N."[..], b"\x82\x01.", b"\x97.", b"N\x98."] {
        refused(unpickle(stream), codes::UNSUPPORTED, &["evil.pt"]);
    }
}

fn json_is_small(pickle: &Pickle) {
    let start = worked();
    assert!(pickle.values.to_json().to_string().len() < 32 << 20);
    assert!(worked() - start < BOUND);
}

#[test]
fn bombs_are_bounded() {
    // Billion laughs: a value stored once and mentioned often stays small.
    let mut laughs = b"]q\x00".to_vec();
    for i in 0..100u8 {
        laughs.extend(b"0](");
        laughs.extend([b'h', i].repeat(10));
        laughs.extend([b'e', b'q', i + 1]);
    }
    laughs.push(b'.');
    let pickle = unpickle(&laughs).unwrap();
    assert_eq!(pickle.values.len(), 101);
    json_is_small(&pickle);

    // Keys in keys, whose text would double with each level of quotes; one long text in many places.
    let mut keys = b"}q\x00(U\x01aU\x01bu".to_vec();
    for i in 0..100u8 {
        keys.extend([b'}', b'h', i, b'N', b's', b'q', i + 1]);
    }
    let keys = [&b"("[..], &keys, b"t."].concat();
    json_is_small(&unpickle(&keys).unwrap());
    let mut long = b"]q\x00(X\x00\x00\x10\x00".to_vec();
    long.extend(vec![b'k'; 1 << 20]);
    long.extend(b"q\x01");
    long.extend(b"h\x01".repeat(100_000));
    long.extend(b"}h\x01h\x01sh\x01\x85e.");
    json_is_small(&unpickle(&long).unwrap());

    let marks = vec![b'('; 1_000_000];
    refused(unpickle(marks), codes::UNSAFE_PICKLE, &["MARK at byte 1000", "marks open"]);
    let mut nested = b"N".to_vec();
    nested.extend(vec![0x85; 1_000_000]);
    nested.push(b'.');
    refused(unpickle(&nested), codes::UNSAFE_PICKLE, &["TUPLE1 at byte 1001", "nested"]);
    let mut calls = b"cfoo\nBar\nq\x00)".to_vec();
    for _ in 0..100_000 {
        calls.extend(b"R\x85h\x00q\x0100h\x00");
    }
    assert!(unpickle(calls).is_err());
    refused(unpickle(b"N".repeat(5_000_000)), codes::UNSAFE_PICKLE, &["on the stack", "at most 4194304"]);

    // One string encoded over and over.
    let mut encode = b"c_codecs\nencode\nq\x00X\x00\x00\x10\x00".to_vec();
    encode.extend(vec![b'a'; 1 << 20]);
    encode.extend(b"X\x06\x00\x00\x00latin1\x86q\x01");
    encode.extend(b"0h\x00h\x01R".repeat(100_000));
    refused(unpickle(encode), codes::UNSAFE_PICKLE, &["REDUCE", "derived"]);

    // One list copied over and over.
    let mut copies = b"c__builtin__\nset\nq\x00](".to_vec();
    copies.extend(b"N".repeat(1_000_000));
    copies.extend(b"e\x85q\x01");
    copies.extend(b"0h\x00h\x01R".repeat(100_000));
    refused(unpickle(copies), codes::UNSAFE_PICKLE, &["REDUCE", "values"]);
}

#[test]
fn each_limit_is_enforced() {
    let within = |stream: &[u8], limits: Limits, word: &str| {
        assert!(unpickle(stream).is_ok());
        let result = pickle::parse_within(stream, Path::new("evil.pt"), &limits);
        refused(result, codes::UNSAFE_PICKLE, &[word, "at most 2"]);
    };
    within(b"K\x01.", Limits { stream: 2, ..LIMITS }, "bytes of the stream");
    within(b"N\x85\x85\x85.", Limits { depth: 2, ..LIMITS }, "nested");
    within(b"(((lll.", Limits { depth: 2, ..LIMITS }, "marks open");
    within(b"Nq\x00q\x01q\x02.", Limits { memo: 2, ..LIMITS }, "memo");
    within(b"N\x85\x85.", Limits { nodes: 2, ..LIMITS }, "values");
    within(b"NNN\x87.", Limits { stack: 2, ..LIMITS }, "stack");
    within(b"\x8a\x03\x01\x02\x03.", Limits { long: 2, ..LIMITS }, "integer");
    let encode = b"c_codecs\nencode\n(U\x03abcU\x06latin1tR.";
    let result = pickle::parse_within(encode, Path::new("evil.pt"), &Limits { derived: 0, ..LIMITS });
    refused(result, codes::UNSAFE_PICKLE, &["derived", "at most 0, got 3"]);
}

/// A small stream with tensors, containers, strings and objects, as torch writes them.
fn stream() -> Vec<u8> {
    tensor_stream("0", 6, 0, &[2, 3], &[3, 1])
}

fn tensor_stream(key: &str, numel: u32, offset: u32, shape: &[u32], strides: &[u32]) -> Vec<u8> {
    let tuple = |values: &[u32]| {
        let items: Vec<u8> = values.iter().flat_map(|v| [&b"J"[..], &v.to_le_bytes()].concat()).collect();
        [&b"("[..], &items, b"t"].concat()
    };
    let text = |text: &str| [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
    [
        b"\x80\x02}q\x00(".to_vec(),
        text("args"),
        b"cargparse\nNamespace\n)\x81}".to_vec(),
        text("lr"),
        b"G?PbM\xd2\xf1\xa9\xfcsb".to_vec(),
        text("weight"),
        b"ctorch._utils\n_rebuild_tensor_v2\n((".to_vec(),
        text("storage"),
        b"ctorch\nFloatStorage\n".to_vec(),
        text(key),
        text("cpu"),
        [&b"J"[..], &numel.to_le_bytes()].concat(),
        b"tQ".to_vec(),
        [&b"J"[..], &offset.to_le_bytes()].concat(),
        tuple(shape),
        tuple(strides),
        b"\x89ccollections\nOrderedDict\n)RtR".to_vec(),
        text("set"),
        b"c__builtin__\nset\n](K\x01K\x02e\x85R".to_vec(),
        text("big"),
        b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x40".to_vec(),
        b"u.".to_vec(),
    ]
    .concat()
}

#[test]
fn truncated_at_every_byte() {
    let good = stream();
    assert_eq!(unpickle(&good).unwrap().tensors.len(), 1);
    for end in 0..good.len() {
        refused(unpickle(&good[..end]), codes::UNSAFE_PICKLE, &["evil.pt"]);
    }
}

/// A zip file under construction, and where its parts lie.
#[derive(Default)]
struct Zip {
    bytes: Vec<u8>,
    directory: Vec<u8>,
    local: Vec<usize>,
    central: Vec<usize>,
}

impl Zip {
    fn add(&mut self, name: &str, data: &[u8]) {
        self.add_as(name, data, 0, data.len(), crc32fast::hash(data));
    }

    /// Adds a member of stored bytes `data` with compression `method` and content of `len` bytes.
    fn add_as(&mut self, name: &str, data: &[u8], method: u16, len: usize, crc32: u32) {
        let mut common = [20u16, 0, method, 0, 0].map(u16::to_le_bytes).concat();
        common.extend([crc32, data.len() as u32, len as u32].map(u32::to_le_bytes).concat());
        common.extend([name.len() as u16, 0].map(u16::to_le_bytes).concat());
        self.local.push(self.bytes.len());
        self.central.push(self.directory.len());
        self.directory.extend(b"PK\x01\x02\x14\x00");
        self.directory.extend(&common);
        self.directory.extend([0; 10]);
        self.directory.extend((self.bytes.len() as u32).to_le_bytes());
        self.directory.extend(name.as_bytes());
        self.bytes.extend(b"PK\x03\x04");
        self.bytes.extend(&common);
        self.bytes.extend(name.as_bytes());
        self.bytes.extend(data);
    }

    /// The file, with the offsets of the central headers made absolute.
    fn finish(mut self) -> Zip {
        let (start, count) = (self.bytes.len(), self.central.len() as u16);
        self.central.iter_mut().for_each(|at| *at += start);
        self.bytes.extend(&self.directory);
        self.bytes.extend(b"PK\x05\x06\x00\x00\x00\x00");
        self.bytes.extend([count, count].map(u16::to_le_bytes).concat());
        self.bytes.extend([self.directory.len() as u32, start as u32].map(u32::to_le_bytes).concat());
        self.bytes.extend([0, 0]);
        self
    }

    fn patch(mut self, at: usize, bytes: &[u8]) -> Zip {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }
}

/// `a/data.pkl` and `a/data/0`, the latter with six floats.
fn good_zip() -> Zip {
    let mut zip = Zip::default();
    zip.add("a/data.pkl", &stream());
    zip.add("a/data/0", &[7; 24]);
    zip.finish()
}

fn parse(bytes: &[u8]) -> Result<ParsedFile> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("evil.pt");
    std::fs::write(&path, bytes).unwrap();
    let start = worked();
    let result = format::parse(&SourceFile::open(&path).unwrap());
    assert!(worked() - start < BOUND);
    result
}

fn with_pickle(pickle: &[u8]) -> Result<ParsedFile> {
    let mut zip = Zip::default();
    zip.add("a/data.pkl", pickle);
    zip.add("a/data/0", &[7; 24]);
    parse(&zip.finish().bytes)
}

#[test]
fn good_zip_is_good() {
    let parsed = parse(&good_zip().bytes).unwrap();
    assert_eq!(parsed.tensors.len(), 1);
    assert_eq!((parsed.blobs[0].len, parsed.blobs[0].crc32), (24, Some(crc32fast::hash(&[7; 24]))));
}

#[test]
fn zip_cut_short_at_every_byte() {
    let good = good_zip().bytes;
    for end in 0..good.len() {
        let error = parse(&good[..end]).expect_err("cut short");
        if end >= 4 {
            refused(Err::<(), _>(error), codes::TRUNCATED, &["evil.pt", "truncated"]);
        }
    }
    refused(parse(&[&good[..], b"x"].concat()), codes::TRUNCATED, &["evil.pt"]);
}

#[test]
fn zip_attacks_are_refused() {
    let unsafe_zip = |zip: Zip, words: &[&str]| refused(parse(&zip.bytes), codes::UNSAFE_ZIP, words);
    let zip = good_zip();
    let (central, local, end) = (zip.central.clone(), zip.local.clone(), zip.bytes.len() - 22);

    // A second member whose header lies within the first one's data.
    let inner = {
        let mut inner = Zip::default();
        inner.add("a/data/0", &[7; 24]);
        inner.bytes
    };
    let mut overlap = Zip::default();
    overlap.add("a/data.pkl", &stream());
    overlap.add("a/data/1", &inner);
    let at = overlap.bytes.len() - inner.len();
    overlap.add("a/data/0", &[7; 24]);
    let header = overlap.central[2];
    let overlap = overlap.finish();
    let directory = overlap.central[0];
    unsafe_zip(
        overlap.patch(directory + header + 42, &(at as u32).to_le_bytes()),
        &["a/data/0 overlaps a/data/1"],
    );

    let mut twice = Zip::default();
    twice.add("a/data.pkl", &stream());
    twice.add("a/data/0", &[7; 24]);
    twice.add("a/data/0", &[8; 24]);
    unsafe_zip(twice.finish(), &["distinct member names: expected 3, got 2"]);

    unsafe_zip(
        good_zip().patch(end + 8, &[1, 0, 1, 0]),
        &["headers in the central directory: expected 1, got 2"],
    );
    unsafe_zip(good_zip().patch(end + 8, &[3, 0, 3, 0]), &["central directory: expected 3, got 2"]);
    unsafe_zip(good_zip().patch(end + 8, &[1, 0]), &["disks"]);
    unsafe_zip(good_zip().patch(end + 12, &[1]), &["end of the central directory"]);
    unsafe_zip(good_zip().patch(end + 19, &[0x7f]), &["end of the central directory"]);
    unsafe_zip(good_zip().patch(central[1] + 45, &[0x7f]), &["cannot be read"]);
    unsafe_zip(good_zip().patch(central[1] + 42, &[0xff]), &["a/data/0"]);
    for size in [23u32, 25, u32::MAX - 1] {
        let size = size.to_le_bytes();
        unsafe_zip(good_zip().patch(central[1] + 20, &size), &["a/data/0"]);
        unsafe_zip(good_zip().patch(central[1] + 24, &size), &["a/data/0"]);
        let both = good_zip().patch(central[1] + 20, &size).patch(central[1] + 24, &size);
        unsafe_zip(both, &["a/data/0"]);
    }
    for (at, what) in
        [(0, "file header"), (8, "method"), (14, "CRC32"), (18, "stored size"), (22, "size"), (30, "name")]
    {
        unsafe_zip(good_zip().patch(local[1] + at, &[9]), &["a/data/0", what, "local"]);
    }
    // Shifts where the data would start.
    unsafe_zip(good_zip().patch(local[1] + 26, &[7]), &["a/data/0"]);
    unsafe_zip(good_zip().patch(local[0] + 28, &[7]), &["data.pkl"]);
    unsafe_zip(good_zip().patch(central[1] + 46, &[0xff]).patch(local[1] + 30, &[0xff]), &["UTF-8"]);

    let encrypted = good_zip().patch(central[1] + 8, &[1]).patch(local[1] + 6, &[1]);
    refused(parse(&encrypted.bytes), codes::UNSUPPORTED, &["a/data/0", "encrypted"]);
    let lzma = good_zip().patch(central[1] + 10, &[14]).patch(local[1] + 8, &[14]);
    refused(parse(&lzma.bytes), codes::UNSUPPORTED, &["a/data/0", "compression"]);

    let flipped = good_zip().patch(local[0] + 40 + 8, b"z");
    refused(parse(&flipped.bytes), codes::CRC, &["a/data.pkl"]);
}

#[test]
fn deflate_bombs_are_refused() {
    let deflated = |bytes: &[u8]| {
        let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
        std::io::Write::write_all(&mut encoder, bytes).unwrap();
        encoder.finish().unwrap()
    };
    let bomb = deflated(&vec![b'N'; 50 << 20]);
    let announced =
        [(1 << 30, "size that its stored bytes cannot have"), (1000, "expected 1000 bytes, got more")];
    for (len, words) in announced {
        let mut zip = Zip::default();
        zip.add_as("a/data.pkl", &bomb, 8, len, 0);
        refused(parse(&zip.finish().bytes), codes::UNSAFE_ZIP, &["a/data.pkl", words]);
    }
    let small = deflated(&stream());
    let mut good = Zip::default();
    good.add_as("a/data.pkl", &small, 8, stream().len(), crc32fast::hash(&stream()));
    good.add("a/data/0", &[7; 24]);
    assert_eq!(parse(&good.finish().bytes).unwrap().tensors.len(), 1);
    let mut longer = Zip::default();
    longer.add_as("a/data.pkl", &small, 8, stream().len() + 1, crc32fast::hash(&stream()));
    refused(parse(&longer.finish().bytes), codes::CRC, &["a/data.pkl"]);
}

#[test]
fn archives_of_other_kinds() {
    let zip = |members: &[(&str, &[u8])]| {
        let mut zip = Zip::default();
        members.iter().for_each(|(name, data)| zip.add(name, data));
        parse(&zip.finish().bytes)
    };
    let pickle: &[u8] = &stream();
    refused(zip(&[]), codes::NOT_A_CHECKPOINT, &["data.pkl"]);
    refused(zip(&[("weights.npy", b"x")]), codes::NOT_A_CHECKPOINT, &["data.pkl"]);
    refused(zip(&[("a/b/data.pkl", pickle)]), codes::NOT_A_CHECKPOINT, &[]);
    refused(zip(&[("a/data.pkl", pickle), ("b/data.pkl", pickle)]), codes::UNSAFE_ZIP, &["more than one"]);
    refused(zip(&[("a/data.pkl", pickle), ("a/byteorder", b"big")]), codes::UNSUPPORTED, &["got big"]);
    refused(zip(&[("a/data.pkl", pickle), ("a/byteorder", &[b'x'; 100])]), codes::UNSAFE_ZIP, &["byteorder"]);
    refused(zip(&[("a/data.pkl", pickle), ("a/constants.pkl", b"")]), codes::UNSUPPORTED, &["TorchScript"]);
    refused(zip(&[("a/data.pkl", pickle), ("a/code/x.py", b"")]), codes::UNSUPPORTED, &["TorchScript"]);
    refused(zip(&[("a/data.pkl", pickle)]), codes::UNSAFE_ZIP, &["weight", "data/0"]);
    refused(parse(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."), codes::UNSUPPORTED, &["torch 1.6"]);
}

#[test]
fn tensors_must_lie_inside_their_storage() {
    let good = |numel, offset, shape: &[u32], strides: &[u32]| {
        with_pickle(&tensor_stream("0", numel, offset, shape, strides))
    };
    for (offset, shape, strides) in [
        (0, &[2, 3][..], &[3, 1][..]),
        (5, &[], &[]),
        (5, &[1000, 1000], &[0, 0]),
        (100, &[0, 5], &[1, 1]),
        (1, &[2, 2], &[1, 3]),
    ] {
        assert!(good(6, offset, shape, strides).is_ok(), "{offset} {shape:?} {strides:?}");
    }
    let max = i32::MAX as u32;
    for (offset, shape, strides) in [
        (1, &[2, 3][..], &[3, 1][..]),
        (6, &[], &[]),
        (0, &[2, 3], &[4, 1]),
        (max, &[max, max, max], &[max, max, max]),
    ] {
        refused(
            good(6, offset, shape, strides),
            codes::UNSAFE_PICKLE,
            &["weight", "data/0", "at most 24 bytes"],
        );
    }
    refused(good(6, 0, &[max; 3], &[0; 3]), codes::UNSAFE_PICKLE, &["weight", "below 2^63 bytes"]);
    refused(good(6, 0, &[0, max, max, max], &[1; 4]), codes::UNSAFE_PICKLE, &["below 2^63 bytes"]);
    refused(good(6, 0, &[6], &[1, 1]), codes::UNSAFE_PICKLE, &["strides"]);
    refused(good(6, u32::MAX, &[6], &[1]), codes::UNSAFE_PICKLE, &["offset"]);
    refused(good(6, 0, &[6], &[u32::MAX]), codes::UNSAFE_PICKLE, &["stride"]);
    refused(good(6, 0, &[1; 65], &[1; 65]), codes::UNSAFE_PICKLE, &["dimensions"]);
    refused(good(5, 0, &[5], &[1]), codes::UNSAFE_ZIP, &["weight", "expected 20 bytes", "24 bytes"]);
    refused(good(u32::MAX, 0, &[5], &[1]), codes::UNSAFE_PICKLE, &["-1 elements"]);
    refused(with_pickle(&tensor_stream("9", 6, 0, &[6], &[1])), codes::UNSAFE_ZIP, &["data/9"]);
}

/// A pickle expression of a float tensor over the first `numel` elements of storage 0.
fn tensor(class: &str) -> Vec<u8> {
    let pid = format!("((U\x07storagectorch\n{class}\nU\x010U\x03cpuK\x06tQ");
    [b"ctorch._utils\n_rebuild_tensor_v2\n", pid.as_bytes(), b"K\x00K\x06\x85K\x01\x85\x89}tR"].concat()
}

#[test]
fn names_that_stand_for_two_values_are_refused() {
    let float = tensor("FloatStorage");
    let twice = |first: &[u8], second: &[u8]| {
        with_pickle(&[&b"}(U\x01a"[..], first, b"U\x01a", second, b"u."].concat())
    };
    for (first, second) in [(&float[..], &float[..]), (&float, b"N"), (b"N", &float), (b"}", b"N")] {
        refused(twice(first, second), codes::UNSAFE_PICKLE, &["a: ", "two values"]);
    }
    assert!(twice(b"N", b"K\x01").is_ok());
    let number = [&b"}(K\x01"[..], &float, b"U\x011", &float, b"u."].concat();
    refused(with_pickle(&number), codes::UNSAFE_PICKLE, &["two values"]);
}

#[test]
fn one_storage_has_one_class() {
    let mixed = |second: &str| {
        let second = tensor(second);
        with_pickle(&[&b"}(U\x01a"[..], &tensor("FloatStorage"), b"U\x01b", &second, b"u."].concat())
    };
    assert_eq!(mixed("FloatStorage").unwrap().tensors.len(), 2);
    refused(mixed("IntStorage"), codes::UNSAFE_PICKLE, &["torch.FloatStorage", "torch.IntStorage"]);
    refused(mixed("QInt8Storage"), codes::UNSUPPORTED, &["qint8"]);
    refused(mixed("NoSuchStorage"), codes::UNSUPPORTED, &["torch.NoSuchStorage"]);
}

#[test]
fn shared_and_cyclic_containers_end() {
    // A dict in itself, and a ladder of lists with 2^60 paths to its one tensor.
    let mut ladder = [&b"]q\x00("[..], &tensor("FloatStorage"), b"e"].concat();
    for i in 0..60u8 {
        ladder.extend([b'0', b']', b'(', b'h', i, b'h', i, b'e', b'q', i + 1]);
    }
    ladder.push(b'.');
    let parsed = with_pickle(&ladder).unwrap();
    assert_eq!(parsed.tensors.len(), 1);
    assert_eq!(parsed.tensors[0].path.len(), 61);
    let own = [&b"}q\x00(U\x04selfh\x00U\x01a"[..], &tensor("FloatStorage"), b"u."].concat();
    assert_eq!(with_pickle(&own).unwrap().tensors[0].path[..], ["a"]);
}

#[test]
fn one_tensor_under_very_many_names_is_bounded() {
    let mut stream = [&b"]q\x00"[..], &tensor("FloatStorage"), b"q\x010("].concat();
    stream.extend(b"h\x01".repeat(4_000_000));
    stream.extend(b"e.");
    refused(with_pickle(&stream), codes::UNSAFE_PICKLE, &["names of the tensors"]);

    // One long key in a chain of dicts: each tensor's name would repeat it.
    let mut long = b"}q\x00(X\x00\x00\x10\x00".to_vec();
    long.extend(vec![b'k'; 1 << 20]);
    long.extend(b"q\x01}q\x02u");
    for _ in 0..900 {
        long.extend(b"h\x02(h\x01}q\x02u0");
    }
    long.extend(b"h\x02(");
    for i in 0..200u8 {
        long.extend([b'K', i]);
        long.extend(tensor("FloatStorage"));
    }
    long.extend(b"u0.");
    refused(with_pickle(&long), codes::UNSAFE_PICKLE, &["names of the tensors"]);
}

/// A storage of more than 4 GiB, as a hole in a sparse file, with the zip64 fields that torch writes.
#[test]
fn zip64_sizes_and_offsets() {
    use std::os::unix::fs::FileExt;
    const LEN: u64 = (4 << 30) + 4;
    let wide = |fields: &[u64]| {
        let fields: Vec<u8> = fields.iter().flat_map(|v| v.to_le_bytes()).collect();
        [&1u16.to_le_bytes()[..], &(fields.len() as u16).to_le_bytes(), &fields].concat()
    };
    let folder = tempfile::tempdir().unwrap();
    for descriptor in [false, true] {
        let path = folder.path().join("large.pt");
        let file = std::fs::File::create(&path).unwrap();
        let mut zip = Zip::default();
        zip.add("a/data/0", b"");
        // torch leaves the local fields 0 and sets the descriptor flag.
        let (flag, local) = if descriptor { (8, 0u32) } else { (0, u32::MAX) };
        zip = zip.patch(6, &[flag]).patch(18, &local.to_le_bytes()).patch(22, &local.to_le_bytes());
        let extra = wide(&[LEN, LEN]);
        zip = zip.patch(28, &[extra.len() as u8]);
        zip.bytes.extend(&extra);
        file.write_all_at(&zip.bytes, 0).unwrap();
        let data = zip.bytes.len() as u64;
        let second = data + LEN;

        let mut tail = Zip::default();
        let mut pickle = stream();
        let at = pickle.windows(5).position(|w| w == [b'J', 6, 0, 0, 0]).unwrap();
        pickle.splice(at..at + 5, [&b"\x8a\x05"[..], &(LEN / 4).to_le_bytes()[..5]].concat());
        tail.add("a/data.pkl", &pickle);
        file.write_all_at(&tail.bytes, second).unwrap();
        let start = second + tail.bytes.len() as u64;
        let mut directory = zip.directory.clone();
        directory[20..28].fill(0xff);
        directory[8] = flag;
        let extra = wide(&[LEN, LEN]);
        directory[30] = extra.len() as u8;
        directory.extend(extra);
        let mut header = tail.directory.clone();
        header[42..46].fill(0xff);
        let extra = wide(&[second]);
        header[30] = extra.len() as u8;
        directory.extend(header);
        directory.extend(extra);
        let record: Vec<u8> = [&b"PK\x06\x06"[..], &44u64.to_le_bytes(), &[45, 0, 45, 0], &[0; 8]]
            .concat()
            .into_iter()
            .chain([2, 2, directory.len() as u64, start].iter().flat_map(|v| v.to_le_bytes()))
            .collect();
        let record_at = start + directory.len() as u64;
        let ends = [
            &directory[..],
            &record,
            b"PK\x06\x07\x00\x00\x00\x00",
            &record_at.to_le_bytes(),
            &[1, 0, 0, 0],
            b"PK\x05\x06\x00\x00\x00\x00\x02\x00\x02\x00",
            &(directory.len() as u32).to_le_bytes(),
            &[0xff; 4],
            &[0, 0],
        ]
        .concat();
        file.write_all_at(&ends, start).unwrap();
        let parsed = format::parse(&SourceFile::open(&path).unwrap()).unwrap();
        assert_eq!((parsed.blobs[0].offset, parsed.blobs[0].len), (data, LEN));
        assert_eq!(parsed.tensors[0].path[..], ["weight"]);
        // The zip64 record may not contradict the end record.
        file.write_all_at(&[3], start + directory.len() as u64 + 24).unwrap();
        let changed = format::parse(&SourceFile::open(&path).unwrap());
        refused(changed, codes::UNSAFE_ZIP, &["zip64 end record contradicts"]);
    }
}

/// Opcodes with small arguments, so that random streams get somewhere.
fn instruction() -> impl Strategy<Value = Vec<u8>> {
    let plain: Vec<&[u8]> = vec![
        b"(",
        b"0",
        b"1",
        b"2",
        b"N",
        b"R",
        b"a",
        b"b",
        b"d",
        b"}",
        b"e",
        b"l",
        b"]",
        b"o",
        b"s",
        b"t",
        b")",
        b"u",
        b"Q",
        b"\x81",
        b"\x85",
        b"\x86",
        b"\x87",
        b"\x88",
        b"\x8f",
        b"\x90",
        b"\x91",
        b"\x92",
        b"\x93",
        b"\x94",
        b"q\x00",
        b"q\x01",
        b"h\x00",
        b"h\x01",
        b"K\x01",
        b"K\x06",
        b"U\x010",
        b"U\x03cpu",
        b"U\x07storage",
        b"ctorch\nFloatStorage\n",
        b"ctorch\nfloat8_e5m2\n",
        b"ctorch\nSize\n",
        b"c__builtin__\nset\n",
        b"c__builtin__\ndict\n",
        b"ccollections\nOrderedDict\n",
        b"cos\nsystem\n",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch._utils\n_rebuild_tensor_v3\n",
        b"ctorch._tensor\n_rebuild_from_type_v2\n",
        b"ctorch._utils\n_rebuild_sparse_tensor\n",
        b"\x8a\x01\xff",
    ];
    prop_oneof![
        9 => proptest::sample::select(plain).prop_map(<[u8]>::to_vec),
        1 => Just(tensor("FloatStorage")),
        1 => proptest::collection::vec(any::<u8>(), 1..4),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_streams_do_not_panic(program in proptest::collection::vec(instruction(), 0..60)) {
        let stream = [program.concat(), b".".to_vec()].concat();
        if let Ok(pickle) = unpickle(&stream) {
            pickle.values.to_json();
            let _ = with_pickle(&stream);
        }
    }

    #[test]
    fn mutated_streams_do_not_panic(edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut stream = stream();
        for (at, byte) in edits {
            let at = at.index(stream.len());
            stream[at] = byte;
        }
        let _ = unpickle(&stream);
    }

    #[test]
    fn mutated_zips_keep_their_tensors_inside(edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = good_zip().bytes;
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(parsed) = parse(&bytes) {
            for blob in &parsed.blobs {
                prop_assert!(blob.offset + blob.stored_len <= bytes.len() as u64);
            }
            for t in &parsed.tensors {
                let blob = &parsed.blobs[t.blob as usize];
                if !t.shape.contains(&0) {
                    let last: u64 = t.shape.iter().zip(&t.strides).map(|(d, s)| (d - 1) * s).sum();
                    prop_assert!(t.offset + (last + 1) * t.dtype.size() as u64 <= blob.len);
                }
            }
        }
    }
}
