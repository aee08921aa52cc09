//! Writes tensors one by one, for conversion scripts: hashed as they come, published whole or not at all.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::codes;
use crate::error::{Error, Finding, Result, Severity};
use crate::format::safetensors::{self, entry_room, padded, HEADER_FIXED};
use crate::hash;
use crate::kernel;
use crate::manifest::{file_identity, Manifest, ManifestTensor, MANIFEST_NAME};
use crate::memory;
use crate::publish::{self, Needs, Staging};
use crate::stats::{self, Accumulator, ZeroSlab};
use crate::tensor::{element_count, Dtype};
use crate::words::{without_numbers, Words};
use crate::write::{Companion, INDEX_NAME};

/// Bytes kept free for a file's header, which is only known at its end: the format allows spaces.
const HEADER_ROOM: usize = 64 << 10;
/// Bytes handled at a time: they stay in a core's cache until they are hashed and written.
const PIECE: usize = 256 << 10;

/// A file that tensors are added to.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: File,
    bytes: u64,
    header: serde_json::Map<String, serde_json::Value>,
    header_bytes: usize,
    tensors: Vec<ManifestTensor>,
    hashes: Vec<[u8; 32]>,
}

/// A complete file, under its name until the number of files is known.
#[derive(Debug)]
struct Whole {
    path: PathBuf,
    bytes: u64,
    identity: String,
    tensors: Vec<ManifestTensor>,
}

/// An oddity in the values of a tensor.
#[derive(Debug)]
enum Odd {
    /// This number of elements is NaN or infinite.
    NonFinite(u64),
    /// All are zero.
    Zero,
    /// These blocks are zero.
    ZeroSlabs(Vec<ZeroSlab>),
}

/// A result that is written tensor by tensor.
#[derive(Debug)]
pub struct ResultWriter {
    staging: Option<Staging>,
    done: Vec<Whole>,
    open: Option<Shard>,
    max_shard: u64,
    names: std::collections::HashSet<String>,
    /// Floating tensors with odd values: name, dimensions, and the oddity.
    odd: Vec<(String, Vec<u64>, Odd)>,
    /// Names without their numbers of floating tensors that hold other values than zero.
    filled: std::collections::HashSet<String>,
}

/// The content of a result besides its tensors, and the rules for judging its values.
#[derive(Debug, Default)]
pub struct Ending {
    /// Contents of small files, by name.
    pub texts: BTreeMap<String, String>,
    /// Files that are copied.
    pub copies: Vec<Companion>,
    /// The values that the manifest records.
    pub values: serde_json::Value,
    /// The words that distinguish buffers from parameters.
    pub words: Words,
    /// True to accept NaN and infinite values.
    pub non_finite_accepted: bool,
}

impl ResultWriter {
    /// Begins a result at `out`. `max_shard` is the most bytes of tensor data per file.
    ///
    /// # Errors
    /// Errors of preflight and staging.
    pub fn begin(out: &Path, bytes: u64, max_shard: u64, options: &publish::Options) -> Result<ResultWriter> {
        // A script's result has no plan; its run is itself.
        let mut run = blake3::Hasher::new();
        run.update(out.as_os_str().as_encoded_bytes());
        run.update(&std::process::id().to_le_bytes());
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        run.update(&now.as_nanos().to_le_bytes());
        let run = run.finalize().to_hex().to_string();
        publish::preflight(out, &[], &run, &Needs { bytes, files: 4, open_files: 16 }, options)?;
        let staging = Staging::begin(out, &run, b"writer", options)?;
        Ok(ResultWriter {
            staging: Some(staging),
            done: Vec::new(),
            open: None,
            max_shard,
            names: std::collections::HashSet::new(),
            odd: Vec::new(),
            filled: std::collections::HashSet::new(),
        })
    }

    fn staging(&self) -> Result<&Staging> {
        self.staging.as_ref().ok_or_else(|| Finding::new(codes::USAGE, "the writer is closed").into())
    }

    /// Adds a tensor: its bytes are little-endian, in C order. Each of them is read once, so that the hash is
    /// that of the written bytes even if the caller changes them meanwhile.
    ///
    /// # Errors
    /// A name twice, or too long for a header; a size that does not fit the shape; I/O.
    pub fn add(&mut self, name: &str, dtype: Dtype, shape: &[u64], bytes: &[u8]) -> Result<()> {
        let room = self.check(name, dtype, shape, bytes)?;
        let full = self.open.as_ref().is_some_and(|s| {
            !s.tensors.is_empty()
                && (s.bytes + bytes.len() as u64 > self.max_shard || s.header_bytes + room > HEADER_ROOM)
        });
        if full {
            self.close_shard()?;
        }
        if self.open.is_none() {
            self.open = Some(self.shard()?);
        }
        let shard = self.open.as_mut().expect("opened above");
        let at = HEADER_ROOM as u64 + shard.bytes;
        let mut hasher = blake3::Hasher::new();
        let mut own = memory::allocate(PIECE.min(bytes.len()))?;
        let (mut non_finite, mut is_zero) = (0, !bytes.is_empty());
        let is_floating = dtype.is_float() || dtype.is_f8();
        let slabs = is_floating.then(|| Accumulator::of_slabs(dtype, shape));
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            let own = &mut own[..piece.len()];
            own.copy_from_slice(piece);
            hasher.update(own);
            non_finite += kernel::count_non_finite(dtype, own);
            is_zero = is_zero && kernel::is_zero(own);
            slabs.iter().for_each(|slabs| slabs.add((i * PIECE) as u64, own));
            let at = at + (i * PIECE) as u64;
            shard.file.write_all_at(own, at).map_err(|e| Error::io(&shard.path, "cannot write", &e))?;
        }
        let end = shard.bytes + bytes.len() as u64;
        shard.header.insert(
            name.into(),
            serde_json::json!({"dtype": dtype.safetensors_name(), "shape": shape, "data_offsets": [shard.bytes, end]}),
        );
        shard.header_bytes += room;
        let digest = *hasher.finalize().as_bytes();
        shard.tensors.push(ManifestTensor {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
            file: String::new(),
            offset: Some(at),
            blake3: hash::hex(&digest),
            stats: None,
        });
        shard.hashes.push(digest);
        shard.bytes = end;
        self.names.insert(name.to_string());
        let Some(slabs) = slabs else { return Ok(()) };
        let odd = match (non_finite, is_zero, slabs.zero_slabs()) {
            (0, true, _) => Some(Odd::Zero),
            (0, false, slabs) if slabs.is_empty() => None,
            (0, false, slabs) => Some(Odd::ZeroSlabs(slabs)),
            (count, ..) => Some(Odd::NonFinite(count)),
        };
        self.odd.extend(odd.map(|odd| (name.to_string(), shape.to_vec(), odd)));
        if !is_zero {
            self.filled.insert(without_numbers(name));
        }
        Ok(())
    }

    /// Bytes of a tensor's entry in the header, if the tensor can be added.
    fn check(&self, name: &str, dtype: Dtype, shape: &[u64], bytes: &[u8]) -> Result<usize> {
        let wanted = element_count(shape).and_then(|n| n.checked_mul(dtype.size() as u64));
        if wanted != Some(bytes.len() as u64) {
            return Err(Finding::new(codes::SHAPE, "bytes of the tensor")
                .tensor(name)
                .expected(format!("{} for {dtype} {shape:?}", wanted.unwrap_or(0)), bytes.len())
                .into());
        }
        safetensors::holds(name, dtype)?;
        if self.names.contains(name) {
            return Err(Finding::new(codes::OVERLAP, "written twice").tensor(name).into());
        }
        let room = entry_room(name, shape.len());
        if room > HEADER_ROOM - HEADER_FIXED {
            return Err(Finding::new(codes::UNSUPPORTED, "its entry is too large for a file's header")
                .tensor(name)
                .expected(format!("{} bytes at most", HEADER_ROOM - HEADER_FIXED), room)
                .help("give it a shorter name")
                .into());
        }
        Ok(room)
    }

    /// A new file.
    fn shard(&self) -> Result<Shard> {
        let path = self.staging()?.path().join(format!("shard-{:05}", self.done.len()));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&path)
            .map_err(|e| Error::io(&path, "cannot create", &e))?;
        let mut header = serde_json::Map::new();
        header.insert("__metadata__".into(), serde_json::json!({"format": "pt"}));
        let (tensors, hashes) = (Vec::new(), Vec::new());
        Ok(Shard { path, file, bytes: 0, header, header_bytes: HEADER_FIXED, tensors, hashes })
    }

    /// Completes the open file: a writer of many files holds one descriptor.
    fn close_shard(&mut self) -> Result<()> {
        let Some(shard) = self.open.take() else { return Ok(()) };
        let header = padded(serde_json::to_vec(&shard.header).expect("plain data"), HEADER_ROOM);
        assert_eq!(header.len(), HEADER_ROOM, "entries were measured when they were added");
        let io = |e: std::io::Error| Error::io(&shard.path, "cannot write", &e);
        shard.file.write_all_at(&header, 0).map_err(io)?;
        // A write that failed half way may have left more.
        shard.file.set_len(HEADER_ROOM as u64 + shard.bytes).map_err(io)?;
        // Here, where errors of earlier writes are told: a network filesystem keeps them for this descriptor.
        self.staging()?.sync(&shard.file, &shard.path)?;
        self.done.push(Whole {
            path: shard.path,
            bytes: shard.bytes,
            identity: file_identity(blake3::hash(&header[8..]).as_bytes(), shard.hashes.iter()),
            tensors: shard.tensors,
        });
        Ok(())
    }

    /// The findings about the values, as in a conversion.
    fn judge(&self, ending: &Ending) -> Vec<Finding> {
        let words = &ending.words;
        let findings = self.odd.iter().filter_map(|(name, shape, odd)| match odd {
            Odd::Zero => stats::zero_tensor(words, name, shape, self.filled.contains(&without_numbers(name))),
            Odd::ZeroSlabs(slabs) => stats::zero_slabs(words, name, shape, slabs),
            Odd::NonFinite(count) => {
                Some(stats::non_finite(words, name, shape, *count, ending.non_finite_accepted))
            }
        });
        findings.collect()
    }

    /// Judges the values, writes texts, index and manifest, and publishes.
    ///
    /// # Errors
    /// Values that are not numbers; I/O; a destination that appeared meanwhile. Nothing is published then.
    pub fn finish(&mut self, ending: Ending) -> Result<(Manifest, Vec<Finding>)> {
        let mut findings = self.judge(&ending);
        if findings.iter().any(|finding| finding.severity == Severity::Error) {
            return Err(Error::from(findings));
        }
        let Ending { texts, copies, values, .. } = ending;
        self.close_shard()?;
        let count = self.done.len();
        let mut manifest = Manifest::new("writer");
        manifest.values = values;
        let (mut weight_map, mut identities) = (BTreeMap::new(), BTreeMap::new());
        let mut total = 0;
        for (i, whole) in std::mem::take(&mut self.done).into_iter().enumerate() {
            let name = if count == 1 {
                "model.safetensors".to_string()
            } else {
                format!("model-{:05}-of-{count:05}.safetensors", i + 1)
            };
            let target = self.staging()?.path().join(&name);
            std::fs::rename(&whole.path, &target).map_err(|e| Error::io(&target, "cannot rename", &e))?;
            total += whole.bytes;
            identities.insert(name.clone(), whole.identity);
            for mut tensor in whole.tensors {
                tensor.file.clone_from(&name);
                weight_map.insert(tensor.name.clone(), name.clone());
                manifest.tensors.push(tensor);
            }
        }
        let staging = self.staging()?;
        for (name, text) in &texts {
            staging.write(name, text.as_bytes())?;
        }
        for file in &copies {
            staging.copy_in(&file.name, &file.path, file.blake3.as_deref(), &|_| Ok(()))?;
        }
        let mut last = vec![MANIFEST_NAME.to_string()];
        if count > 1 {
            let index = serde_json::json!({"metadata": {"total_size": total}, "weight_map": weight_map});
            staging.write(INDEX_NAME, &serde_json::to_vec_pretty(&index).expect("plain data"))?;
            last.push(INDEX_NAME.into());
        } else {
            last.extend(identities.keys().next().cloned());
        }
        manifest.files = staging.listing()?;
        for file in &mut manifest.files {
            file.identity = identities.remove(&file.name);
        }
        staging.write(MANIFEST_NAME, &serde_json::to_vec_pretty(&manifest).expect("plain data"))?;
        let staging = self.staging.take().expect("checked above");
        let names: Vec<&str> = last.iter().map(String::as_str).collect();
        findings.extend(staging.publish(&names, &|| true)?);
        Ok((manifest, findings))
    }

    /// Removes everything that was written.
    ///
    /// # Errors
    /// I/O.
    pub fn abort(&mut self) -> Result<()> {
        self.open = None;
        self.done.clear();
        match self.staging.take() {
            Some(staging) => staging.discard(),
            None => Ok(()),
        }
    }
}
