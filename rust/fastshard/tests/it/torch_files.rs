//! torch files as torch writes them, against what torch says they hold (`data/torch/make.py`).

use std::path::{Path, PathBuf};

use fastshard::codes;
use fastshard::error::{Finding, Result};
use fastshard::format::inflate::inflate;
use fastshard::format::{self, pickle, torch_zip, Blob, FileTensor, ParsedFile};
use fastshard::storage::SourceFile;
use fastshard::value::{Node, Value, Values};
use serde_json::{json, Value as Json};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/torch").join(name)
}

fn open(name: &str) -> SourceFile {
    SourceFile::open(&data(name)).unwrap()
}

fn expected() -> serde_json::Map<String, Json> {
    serde_json::from_slice(&std::fs::read(data("expected.json")).unwrap()).unwrap()
}

fn inflated(file: &SourceFile, blob: &Blob) -> Result<Vec<u8>> {
    let mut data = Vec::new();
    inflate(file, blob, &mut |bytes| {
        data.extend_from_slice(bytes);
        Ok(())
    })?;
    Ok(data)
}

/// The data of a blob, checked against its CRC.
fn blob(file: &SourceFile, parsed: &ParsedFile, index: u32) -> Vec<u8> {
    let blob = &parsed.blobs[index as usize];
    let data = if blob.deflated {
        inflated(file, blob).unwrap()
    } else {
        file.read_vec(blob.offset, blob.stored_len as usize).unwrap()
    };
    assert_eq!(data.len() as u64, blob.len);
    assert_eq!(Some(crc32fast::hash(&data)), blob.crc32);
    data
}

/// The values in C order, one element at a time.
fn logical_bytes(file: &SourceFile, parsed: &ParsedFile, tensor: &FileTensor) -> Vec<u8> {
    let data = blob(file, parsed, tensor.blob);
    let count: u64 = tensor.shape.iter().product();
    let mut bytes = Vec::new();
    for flat in 0..count {
        let (mut rest, mut at) = (flat, 0);
        for (d, s) in tensor.shape.iter().zip(&tensor.strides).rev() {
            at += rest % d * s;
            rest /= d;
        }
        let size = tensor.dtype.size();
        let start = tensor.offset as usize + at as usize * size;
        bytes.extend_from_slice(&data[start..start + size]);
    }
    bytes
}

fn listing(file: &SourceFile, parsed: &ParsedFile) -> Json {
    let row = |tensor: &FileTensor| {
        let hex: String = logical_bytes(file, parsed, tensor).iter().map(|b| format!("{b:02x}")).collect();
        json!({
            "path": tensor.path, "dtype": tensor.dtype.torch_name(), "shape": tensor.shape,
            "strides": tensor.strides, "hex": hex,
        })
    };
    parsed.tensors.iter().map(row).collect()
}

#[test]
fn every_file_holds_what_torch_says() {
    for (name, want) in expected() {
        let file = open(&name);
        let parsed = match want["range"].as_array() {
            Some(range) => {
                torch_zip::parse_range(&file, range[0].as_u64().unwrap(), range[1].as_u64().unwrap())
            }
            None => format::parse(&file),
        };
        match want["refused"].as_str() {
            None => {
                let parsed = parsed.unwrap_or_else(|e| panic!("{name}: {e}"));
                assert_eq!(parsed.format, "torch_zip");
                assert_eq!(listing(&file, &parsed), want["tensors"], "{name}");
            }
            Some(code) => {
                let error = parsed.expect_err(&name);
                assert_eq!(error.findings()[0].code.to_string(), code, "{error}");
                let word = want["word"].as_str().unwrap();
                let text = format!("{error} {:?}", error.findings()[0].help);
                assert!(text.contains(word) && text.contains(&name), "{text}");
            }
        }
    }
}

#[test]
fn tensors_of_one_storage_share_a_blob() {
    let parsed = torch_zip::parse(&open("views.pt")).unwrap();
    let blob = |name: &str| parsed.tensors.iter().find(|t| t.path[..] == [name]).unwrap().blob;
    for name in ["row", "block", "transposed", "stepped", "tied"] {
        assert_eq!(blob(name), blob("base"), "{name}");
    }
    assert_ne!(blob("base"), blob("permuted"));
    let members: Vec<_> = parsed.blobs.iter().map(|b| b.member.as_deref().unwrap()).collect();
    assert_eq!(members[..2], ["views/data/0", "views/data/1"]);
}

fn at<'a>(values: &'a Values, path: &[&str]) -> &'a Value {
    let step = |node: Node, key: &&str| values.lookup(node, key).unwrap_or_else(|| panic!("{key}"));
    values.get(path.iter().fold(values.root(), step))
}

fn class(values: &Values, value: &Value) -> String {
    let Value::Record { class, .. } = value else { panic!("{value:?}") };
    let Value::Global(name) = values.get(*class) else { panic!("{class}") };
    name.clone()
}

#[test]
fn other_objects_are_inert_values() {
    for protocol in 1..=5 {
        let parsed = torch_zip::parse(&open(&format!("protocol{protocol}.pt"))).unwrap();
        let values = &parsed.values;
        assert_eq!(at(values, &["big"]), &Value::BigInt(vec![0, 0, 0, 0, 0, 0, 0, 0, 64]));
        assert_eq!(at(values, &["negative"]), &Value::Int(-(1 << 40)));
        assert_eq!(at(values, &["float"]), &Value::Float(0.1));
        assert_eq!(at(values, &["text"]), &Value::Str("münchen 😀".into()));
        assert_eq!(at(values, &["bytes"]), &Value::Bytes(vec![0, 0x80, 0xff]));
        assert_eq!(at(values, &["array"]), &Value::Bytes(vec![1, 2]));
        assert_eq!(at(values, &["dtype"]), &Value::Global("torch.bfloat16".into()));
        let Value::Tuple(size) = at(values, &["size"]) else { panic!() };
        assert_eq!(values.get(size[1]), &Value::Int(3));
        assert!(matches!(at(values, &["set"]), Value::Set(v) if values.get(v[0]) == &Value::Int(1)));
        assert!(matches!(at(values, &["frozen"]), Value::Set(v) if v.len() == 1));
        assert!(matches!(at(values, &["itself"]), Value::Dict(_)));
        assert_eq!(values.lookup(values.root(), "itself"), Some(values.root()));
        assert_eq!(at(values, &["again"]), at(values, &["once"]));
        // Protocol 1 spells objects `copyreg._reconstructor(class, base, state)`.
        if protocol > 1 {
            assert_eq!(class(values, at(values, &["args"])), "argparse.Namespace");
            let Value::Record { state: Some(state), .. } = at(values, &["args"]) else { panic!() };
            let name = values.lookup(*state, "name").unwrap();
            assert_eq!(values.get(name), &Value::Str("tiny".into()));
            assert_eq!(class(values, at(values, &["enum"])), "__main__.Colour");
            assert_eq!(class(values, at(values, &["_extra_state"])), "_io.BytesIO");
            let Value::Record { state: Some(items), .. } = at(values, &["settings"]) else { panic!() };
            assert_eq!(values.get(values.lookup(*items, "depth").unwrap()), &Value::Int(2));
            // The tensor of a dataclass is not in the listing; its dtype and shape are kept.
            let Value::Record { state: Some(state), .. } = at(values, &["point"]) else { panic!() };
            let inner = values.get(values.lookup(*state, "where").unwrap());
            assert_eq!(class(values, inner), "torch.Tensor");
        }
        let Value::Tuple(rng) = at(values, &["rng"]) else { panic!() };
        let Value::Record { args, state, .. } = values.get(rng[1]) else { panic!() };
        // numpy hands the bytes to the array's state, from protocol 5 on to its constructor.
        let (holder, at) = state.map_or((*args, 0), |state| (state, 4));
        let Value::Tuple(holder) = values.get(holder) else { panic!() };
        assert!(matches!(values.get(holder[at]), Value::Bytes(b) if b.len() == 624 * 4));
        let json = values.to_json();
        let index = json["module"]["weight"]["__tensor__"].as_u64().unwrap() as usize;
        assert_eq!(parsed.tensors[index].path[..], ["module", "weight"]);
    }
}

#[test]
fn the_header_digest_covers_pickle_and_checksums() {
    let digest = |name| torch_zip::parse(&open(name)).unwrap().header_digest;
    assert_eq!(digest("protocol2.pt"), digest("zip64.pt"));
    assert_ne!(digest("protocol2.pt"), digest("protocol3.pt"));
    let mut bytes = std::fs::read(data("root_tensor.pt")).unwrap();
    let file = open("root_tensor.pt");
    let parsed = torch_zip::parse(&file).unwrap();
    let mut hasher = blake3::Hasher::new();
    let mut zip = zip::ZipArchive::new(std::io::Cursor::new(&mut bytes)).unwrap();
    let mut names: Vec<String> = (0..zip.len())
        .map(|i| String::from_utf8(zip.by_index(i).unwrap().name_raw().to_vec()).unwrap())
        .collect();
    names.sort();
    let mut pkl = Vec::new();
    std::io::Read::read_to_end(&mut zip.by_name("root_tensor/data.pkl").unwrap(), &mut pkl).unwrap();
    hasher.update(&pkl);
    for name in names {
        let member = zip.by_name(&name).unwrap();
        hasher.update(name.as_bytes());
        hasher.update(&member.crc32().to_le_bytes());
        hasher.update(&member.size().to_le_bytes());
    }
    assert_eq!(&parsed.header_digest, hasher.finalize().as_bytes());
}

#[test]
fn the_index_of_a_distributed_checkpoint_is_a_plain_pickle() {
    let bytes = std::fs::read(data("dcp.metadata")).unwrap();
    let pickle = pickle::parse_bytes(&bytes, Path::new(".metadata")).unwrap();
    let values = &pickle.values;
    assert_eq!(class(values, values.get(values.root())), "torch.distributed.checkpoint.metadata.Metadata");
    let Value::Record { state: Some(state), .. } = values.get(values.root()) else { panic!() };
    let entries = values.lookup(*state, "state_dict_metadata").unwrap();
    assert!(values.lookup(entries, "weight").is_some() && values.lookup(entries, "step").is_some());
}

#[test]
fn damage_to_a_deflated_blob_is_found() {
    let parsed = torch_zip::parse(&open("deflated.pt")).unwrap();
    let blob = parsed.blobs.iter().find(|b| b.deflated && b.len > 64).unwrap();
    let content = inflated(&open("deflated.pt"), blob).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.pt");
    let good = std::fs::read(data("deflated.pt")).unwrap();
    for at in blob.offset..blob.offset + blob.stored_len {
        for bit in 0..8 {
            let mut bytes = good.clone();
            bytes[at as usize] ^= 1 << bit;
            std::fs::write(&path, &bytes).unwrap();
            let file = SourceFile::open(&path).unwrap();
            match inflated(&file, blob) {
                Err(error) => {
                    assert!([codes::CRC, codes::UNSAFE_ZIP].contains(&error.findings()[0].code), "{error}");
                }
                // The bits that pad the last byte mean nothing.
                Ok(data) => assert!(at + 1 == blob.offset + blob.stored_len && data == content),
            }
        }
    }
    let shorter = Blob { len: blob.len - 1, ..blob.clone() };
    let error = inflated(&open("deflated.pt"), &shorter).unwrap_err();
    assert_eq!(error.findings()[0].code, codes::UNSAFE_ZIP);
}

#[test]
fn errors_of_the_sink_pass_through() {
    let file = open("deflated.pt");
    let parsed = torch_zip::parse(&file).unwrap();
    let blob = parsed.blobs.iter().find(|b| b.deflated && b.len > 0).unwrap();
    let stop = || Finding::new(codes::INTERRUPTED, "stopped").into();
    assert!(inflate(&file, blob, &mut |_| Err(stop())).unwrap_err().is_interrupt());
}

/// Reads every torch file below the folder that `FASTSHARD_FIXTURES` names, but for folders named
/// `broken`; run with `--ignored`.
#[test]
#[ignore = "needs FASTSHARD_FIXTURES"]
fn real_checkpoints_are_not_refused() {
    let root = std::env::var("FASTSHARD_FIXTURES").expect("FASTSHARD_FIXTURES names a folder");
    let mut folders = vec![PathBuf::from(root)];
    let (mut files, mut tensors, mut refused) = (0, 0, Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if !path.ends_with("broken") {
                    folders.push(path);
                }
                continue;
            }
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let result = if name == ".metadata" {
                pickle::parse_bytes(&std::fs::read(&path).unwrap(), &path).map(|_| 0)
            } else if name.ends_with(".pt") {
                let file = SourceFile::open(&path).unwrap();
                format::parse(&file).map(|parsed| {
                    parsed.tensors.iter().for_each(|t| drop(logical_bytes(&file, &parsed, t)));
                    parsed.tensors.len()
                })
            } else {
                continue;
            };
            files += 1;
            match result {
                Ok(n) => tensors += n,
                Err(error) => refused.push(error.to_string()),
            }
        }
    }
    println!("{files} files, {tensors} tensors, {} refused", refused.len());
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}
