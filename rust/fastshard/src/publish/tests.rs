//! A small scripted run, and what may be seen of it from outside; used by all tests of publishing.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::stored::Version;
use super::{fault, gc, Options, Space, Staging};
use crate::codes::{self, Code};
use crate::error::{Error, Finding, Result};

mod crash;
mod mounts;
mod older;
mod owners;
mod paths;

const RUN: &str = "0123456789abcdef0123456789abcdef";
const OTHER_RUN: &str = "fedcba9876543210fedcba9876543210";
const PLAN: &[u8] = b"{\"plan\": 1}";
const LAST: [&str; 2] = ["fastshard.manifest.json", "model.safetensors.index.json"];

type Tree = BTreeMap<String, Vec<u8>>;

/// Bytes that show where they belong.
fn painted(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| ((i + seed * 31) % 251) as u8).collect()
}

/// The tree with a manifest that accounts for its files.
fn with_manifest(plan: &str, mut tree: Tree) -> Tree {
    let files: Vec<_> = tree
        .iter()
        .map(|(name, bytes)| {
            serde_json::json!({"name": name, "size": bytes.len(), "blake3": blake3::hash(bytes).to_hex().to_string()})
        })
        .collect();
    let manifest = serde_json::json!({
        "format": "fastshard.manifest", "version": 1, "kind": "merge", "plan": plan, "files": files,
    });
    tree.insert(LAST[0].into(), serde_json::to_vec(&manifest).unwrap());
    tree
}

/// The result of the scripted run.
fn result() -> Tree {
    let files = [
        ("model-1.safetensors", painted(1, 5000)),
        ("model-2.safetensors", painted(2, 4096)),
        ("model-3.safetensors", painted(3, 1)),
        ("tokenizer.json", painted(4, 300)),
        (LAST[1], painted(6, 50)),
    ];
    with_manifest(RUN, files.into_iter().map(|(name, bytes)| (name.to_string(), bytes)).collect())
}

/// What was at the destination before: an older result.
fn old() -> Tree {
    let files = [("model.safetensors", painted(7, 700)), ("tokenizer.json", b"older".to_vec())];
    with_manifest(OTHER_RUN, files.into_iter().map(|(name, bytes)| (name.to_string(), bytes)).collect())
}

fn put(directory: &Path, tree: &Tree) {
    fs::create_dir_all(directory).unwrap();
    for (name, bytes) in tree {
        fs::write(directory.join(name), bytes).unwrap();
    }
}

/// The files of a directory, staging folders not counted; `None` if it is not there.
fn tree(directory: &Path) -> Option<Tree> {
    let entries = fs::read_dir(directory).ok()?.map(|e| e.unwrap().path());
    let files = entries.filter(|p| !p.file_name().unwrap().to_string_lossy().contains(".fastshard-"));
    Some(
        files
            .map(|p| (p.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&p).unwrap()))
            .collect(),
    )
}

/// The records of earlier sessions.
fn noted(staging: &Staging) -> Vec<String> {
    let mut names = Vec::new();
    staging.journal().replay(&mut |_, r| names.push(String::from_utf8(r.to_vec()).unwrap())).unwrap();
    names
}

/// Writes the result, leaving out what the journal says is done, which must be true.
fn fill(staging: &Staging, source: &Path) -> Result<()> {
    let names = noted(staging);
    for (name, bytes) in result() {
        if name.starts_with("model-") {
            let file = staging.file(&name, bytes.len() as u64, Space::Reserved)?;
            if file.kept() && names.contains(&name) {
                assert_eq!(fs::read(file.path()).unwrap(), bytes, "{name} is journalled but not whole");
                continue;
            }
            let (head, tail) = bytes.split_at(bytes.len() / 2);
            file.write_all_at(head.len() as u64, tail)?;
            file.write_all_at(0, head)?;
            file.start_writeback();
            file.sync()?;
            staging.journal().append(name.as_bytes())?;
            staging.journal().sync()?;
        } else if name == "tokenizer.json" {
            staging.copy_in(&name, source, None, &|_| Ok(()))?;
        } else {
            staging.write(&name, &bytes)?;
        }
    }
    Ok(())
}

/// One scripted run to `out`.
fn run(out: &Path, source: &Path, options: &Options) -> Result<Vec<Finding>> {
    let staging = Staging::begin(out, RUN, PLAN, options)?;
    if !staging.sealed() {
        fill(&staging, source)?;
    }
    staging.publish(&LAST, &|| true)
}

/// A directory with a source file and room for `out`.
struct Setting {
    _guard: Option<tempfile::TempDir>,
    root: PathBuf,
}

impl Setting {
    fn new() -> Self {
        let guard = tempfile::tempdir().unwrap();
        let setting = Self::at(guard.path());
        Setting { _guard: Some(guard), ..setting }
    }

    /// In memory where the system allows, for the tests that sync thousands of times.
    fn in_memory() -> Self {
        let Ok(guard) = tempfile::tempdir_in("/dev/shm") else { return Self::new() };
        let setting = Self::at(guard.path());
        Setting { _guard: Some(guard), ..setting }
    }

    fn at(root: &Path) -> Self {
        let setting = Setting { _guard: None, root: root.to_path_buf() };
        fs::create_dir_all(root.join("source")).unwrap();
        fs::write(setting.source(), painted(4, 300)).unwrap();
        setting
    }

    fn out(&self) -> PathBuf {
        self.root.join("out")
    }

    fn source(&self) -> PathBuf {
        self.root.join("source").join("tokenizer.json")
    }

    /// Staging folders beside and inside the destination.
    fn folders(&self) -> Vec<PathBuf> {
        let entries = [self.root.clone(), self.out()].into_iter().filter_map(|d| fs::read_dir(d).ok());
        let paths = entries.flatten().map(|e| e.unwrap().path());
        paths.filter(|p| p.file_name().unwrap().to_string_lossy().contains(".fastshard-")).collect()
    }
}

/// The codes of a refusal.
fn refusal<T>(result: Result<T>) -> Vec<Code> {
    let error: Error = result.err().expect("this should be refused");
    for finding in error.findings() {
        assert!(finding.file.is_some() || finding.code == codes::TOO_MANY_FILES, "no path in: {finding}");
    }
    error.findings().iter().map(|f| f.code).collect()
}
