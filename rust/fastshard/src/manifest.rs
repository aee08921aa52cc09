//! The manifest: what was written, from what, and what that does not prove.

use std::collections::BTreeMap;
use std::io::Read;

use serde::{Deserialize, Serialize};

use crate::codes;
use crate::error::{Finding, Result};
use crate::plan::{Op, Plan, PlanFile};
use crate::stats::TensorStats;
use crate::tensor::Dtype;

/// Name of the manifest in a result.
pub const MANIFEST_NAME: &str = "fastshard.manifest.json";
/// Version of the manifest's JSON form.
pub const MANIFEST_VERSION: u32 = 1;
const FORMAT: &str = "fastshard.manifest";
/// Largest manifest read, in bytes.
pub(crate) const MAX_MANIFEST: u64 = 1 << 30;

/// Maximum bytes of a part of a file's name, on every filesystem of note.
const MAX_PART: usize = 255;
/// The text in the names of staging folders, which no listing looks into.
const STAGING: &str = ".fastshard-";

/// True for a valid name of a result's file. It has only plain parts, because a system could read any other
/// part in another way.
pub fn is_plain(name: &str) -> bool {
    let plain = |part: &str| {
        !matches!(part, "" | "." | "..") && part.len() <= MAX_PART && !part.contains(['\\', '\0'])
    };
    name.split('/').all(plain)
}

/// True if listings look into the folders in which a result's file lies.
pub(crate) fn is_listed(name: &str) -> bool {
    name.rsplit_once('/').is_none_or(|(folders, _)| !folders.contains(STAGING))
}

/// The limit of every manifest.
pub const NOT_CHECKED: &str =
    "a matching manifest proves that the bytes are exactly as planned and written; that the layout \
is right for the model is proven by the layout's tests and by logits, not by a hash";

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ManifestTensor {
    /// Name in its file (keys joined by dots).
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// File, relative to the manifest.
    pub file: String,
    /// Offset of the first byte in the file, if the tensor is one range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// BLAKE3 of the logical bytes (little-endian, C order), hexadecimal.
    pub blake3: String,
    /// Its statistics, if they were requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stats: Option<TensorStats>,
}

/// One file. A result's manifest lists every file that was published with it, except itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestFile {
    /// Name, relative to the manifest.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// BLAKE3 of the header and of the tensors' hashes in file order, hexadecimal; for files that hold tensors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// BLAKE3 of the bytes, hexadecimal; for small files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<String>,
    /// Modification time in nanoseconds since the epoch, for files whose bytes have no hash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtime_ns: Option<i64>,
    /// The origin of a file from a folder above the checkpoint, relative to the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
}

impl ManifestFile {
    /// True if readers find tensors in it.
    pub fn holds_tensors(&self) -> bool {
        self.identity.is_some()
    }
}

/// A run of several processes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// The id of the run: 32 hex digits.
    pub run: String,
    /// The makers of its parts.
    pub parts: Vec<Maker>,
    /// By rank, a digest of its request and its files, if each rank had a part of the sources.
    #[serde(rename = "asked", default, skip_serializing_if = "Vec::is_empty")]
    pub request_digests: Vec<String>,
}

/// The maker of a part.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Maker {
    /// Number of the part, from 0.
    pub part: Option<u32>,
    /// The round of the run in which it was made, from 1.
    pub round: u32,
    /// Name of the host.
    pub host: String,
    /// Bytes of tensors that it made.
    pub bytes: u64,
}

/// The manifest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Manifest {
    /// Always `fastshard.manifest`.
    pub format: String,
    /// [`MANIFEST_VERSION`].
    pub version: u32,
    /// Program and version that wrote it.
    pub tool: String,
    /// The kind of result: `merge`, `hf`, ..., or `inventory` for files that were found.
    pub kind: String,
    /// Digest of the plan; empty for an inventory.
    #[serde(default)]
    pub plan: String,
    /// Source files.
    #[serde(default)]
    pub sources: Vec<PlanFile>,
    /// Tensors.
    pub tensors: Vec<ManifestTensor>,
    /// Files.
    pub files: Vec<ManifestFile>,
    /// Parallel degrees of the source.
    #[serde(default)]
    pub topology: BTreeMap<String, u64>,
    /// Sizes of the model, by their names in configs.
    #[serde(default)]
    pub dimensions: BTreeMap<String, u64>,
    /// Value ops by output tensor.
    #[serde(default)]
    pub value_ops: BTreeMap<String, Vec<Op>>,
    /// Values of the source that are not tensors.
    #[serde(default)]
    pub values: serde_json::Value,
    /// Accepted warnings and notes.
    #[serde(default)]
    pub findings: Vec<Finding>,
    /// Its makers, if several processes made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provenance: Option<Provenance>,
    /// What was not checked when it was made, and what a matching manifest does not prove.
    pub not_checked: Vec<String>,
}

/// Identity of a file: BLAKE3 of its header's digest and its tensors' hashes in the header's order,
/// so that no byte is hashed twice.
pub fn file_identity<'a>(header: &[u8; 32], hashes: impl Iterator<Item = &'a [u8; 32]>) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(header);
    hashes.for_each(|h| {
        hasher.update(h);
    });
    hasher.finalize().to_hex().to_string()
}

/// The kind of a manifest, its plan, and the files that it lists.
#[derive(Deserialize)]
struct Outline {
    format: String,
    version: u32,
    kind: String,
    #[serde(default)]
    plan: String,
    files: Vec<ManifestFile>,
}

/// The kind of a manifest of files that were found.
pub const INVENTORY: &str = "inventory";

impl Outline {
    fn read(file: std::fs::File) -> std::io::Result<std::result::Result<Outline, String>> {
        let size = file.metadata()?.len();
        if size > MAX_MANIFEST {
            return Ok(Err(format!("its manifest has more than {MAX_MANIFEST} bytes")));
        }
        // Streamed: what it says of tensors is not looked at.
        let outline: Outline = match serde_json::from_reader(std::io::BufReader::new(file.take(size))) {
            Ok(outline) => outline,
            Err(e) if e.is_io() => return Err(e.into()),
            Err(e) => return Ok(Err(format!("its manifest cannot be read: {e}"))),
        };
        if outline.format != FORMAT || outline.version != MANIFEST_VERSION {
            return Ok(Err("its manifest is not of a version that this program reads".into()));
        }
        if outline.kind == INVENTORY {
            return Ok(Err("its manifest is an inventory of files that fastshard did not write".into()));
        }
        Ok(Ok(outline))
    }
}

impl Manifest {
    /// The files that were published with the result whose manifest `file` is, by name; or the reason why it
    /// is not the manifest of a result, in words.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn published_files(
        file: std::fs::File,
    ) -> std::io::Result<std::result::Result<BTreeMap<String, ManifestFile>, String>> {
        let by_name = |file: ManifestFile| (file.name.clone(), file);
        Ok(Outline::read(file)?.map(|outline| outline.files.into_iter().map(by_name).collect()))
    }

    /// Digest of the plan whose result the manifest `file` describes; empty if it describes no plan's result.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn published_plan(file: std::fs::File) -> std::io::Result<String> {
        Ok(Outline::read(file)?.map(|outline| outline.plan).unwrap_or_default())
    }

    /// An empty manifest of a kind.
    pub fn new(kind: &str) -> Manifest {
        Manifest {
            format: FORMAT.into(),
            version: MANIFEST_VERSION,
            tool: format!("fastshard {}", env!("CARGO_PKG_VERSION")),
            kind: kind.into(),
            plan: String::new(),
            sources: Vec::new(),
            tensors: Vec::new(),
            files: Vec::new(),
            topology: BTreeMap::new(),
            dimensions: BTreeMap::new(),
            value_ops: BTreeMap::new(),
            values: serde_json::Value::Null,
            findings: Vec::new(),
            provenance: None,
            not_checked: vec![NOT_CHECKED.into()],
        }
    }

    /// Value ops of a plan by output.
    pub fn ops_of(plan: &Plan) -> BTreeMap<String, Vec<Op>> {
        plan.outputs
            .iter()
            .filter_map(|o| {
                let mut ops: Vec<Op> = Vec::new();
                let all = o.parts.iter().flat_map(|part| &part.ops);
                all.for_each(|op| {
                    if !ops.contains(op) {
                        ops.push(*op)
                    }
                });
                (!ops.is_empty()).then(|| (o.name.to_string(), ops))
            })
            .collect()
    }

    /// Reads a manifest.
    ///
    /// # Errors
    /// `FS518` if the file is not a manifest of this version.
    pub fn read(path: &std::path::Path) -> Result<Manifest> {
        let file = crate::storage::SourceFile::open(path)?;
        let bad = |message: String| {
            Finding::new(codes::BAD_MANIFEST, message)
                .file(path)
                .help("make one")
                .run("fastshard manifest CKPT")
        };
        if file.size() > MAX_MANIFEST {
            return Err(bad(format!("a manifest of {} bytes", file.size())).into());
        }
        let bytes = file.read_vec(0, file.size() as usize)?;
        let manifest: Manifest =
            serde_json::from_slice(&bytes).map_err(|e| bad(format!("not a manifest: {e}")))?;
        if manifest.format != FORMAT || manifest.version != MANIFEST_VERSION {
            return Err(bad("not a manifest of a version that this program reads".into())
                .expected(
                    format!("{FORMAT} {MANIFEST_VERSION}"),
                    format!("{} {}", manifest.format, manifest.version),
                )
                .into());
        }
        for tensor in &manifest.tensors {
            let checked = tensor.stats.as_ref().map_or(Ok(()), |s| s.check(tensor.dtype, &tensor.shape));
            checked.map_err(|what| bad(format!("its statistics have {what}")).tensor(&tensor.name))?;
        }
        Ok(manifest)
    }
}
