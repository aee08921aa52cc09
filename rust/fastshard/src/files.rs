//! Output files: which outputs go into which, and what stands around their bytes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use serde::Deserialize;

use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::format::dcp::writer as dcp;
use crate::format::pickle::writer::{pickle, Stored, Tree};
use crate::format::pickle::{parse_bytes, LIMITS};
use crate::format::torch_zip::writer as torch_zip;
use crate::format::torch_zip::MAX_MEMBERS;
use crate::format::{safetensors, Frame, Member};
use crate::manifest::{is_listed, is_plain, MANIFEST_NAME, MAX_MANIFEST};
use crate::plan::{ArrayStore, Fill, Form, OutFile, Output, Plan};
use crate::tensor::{element_count, Dtype};

/// Name of the index that names each tensor's file.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

/// Bytes of entries that a file's header is given at most: whole pages of what the format allows.
const HEADER_ROOM: usize = safetensors::MAX_HEADER as usize - 4096;
/// Bytes at most of the texts beside tensors, and of an index; as `regular.py` reads them.
const MAX_TEXT: u64 = 64 << 20;
const MAX_INDEX: u64 = 512 << 20;
/// A file of an array's folder, in stores that keep arrays as folders.
const ARRAY: &str = ".zarray";
/// Bytes at least of a tensor's entry in a manifest, without names.
const MANIFEST_ENTRY: u64 = 250;

/// Outputs with their ranks.
pub type Ranked = Vec<(BTreeMap<String, u64>, Output)>;

/// A file that the target prescribes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSide {
    /// Path, relative to the result.
    pub name: String,
    /// Rank per parallel dimension; what is not named is rank 0.
    #[serde(default)]
    pub coords: BTreeMap<String, u64>,
    /// What it holds; tensors by the names of the target's layout.
    pub content: Content,
}

/// What a prescribed file holds.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// (name in the file, tensor), in this order.
    Safetensors(Vec<(String, String)>),
    /// A value as `torch.save` would be given it.
    TorchZip(Tree),
    /// Records of torch.distributed.checkpoint.
    Records(Vec<RecordSide>),
    /// Its `.metadata`: names the records of files prescribed before it in the same folder.
    DcpMetadata(Vec<dcp::Entry>),
    /// A store of arrays.
    Arrays(ArraysSide),
}

/// A store of arrays.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArraysSide {
    /// What its writer must know.
    pub how: serde_json::Value,
    /// (name in the store, tensor, extent of a block).
    pub arrays: Vec<(String, String, Vec<u64>)>,
}

/// A record.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordSide {
    /// What it is called in `.metadata` and in messages.
    pub key: String,
    /// A tensor, or a value without any.
    pub value: Tree,
    /// Shape of the tensor there, where axes of extent 1 come on top.
    #[serde(default)]
    pub shape: Option<Vec<u64>>,
}

impl Content {
    /// (name in the file, tensor), in the file's order; a tensor may have several names.
    fn tensors(&self) -> Vec<(String, &str)> {
        match self {
            Content::Safetensors(names) => names.iter().map(|(k, n)| (k.clone(), n.as_str())).collect(),
            Content::TorchZip(tree) => {
                tree.tensors().into_iter().map(|(path, name)| (path.join("."), name)).collect()
            }
            Content::Records(records) => records
                .iter()
                .flat_map(|r| r.value.tensors().into_iter().map(|(_, name)| (r.key.clone(), name)))
                .collect(),
            Content::DcpMetadata(_) => Vec::new(),
            Content::Arrays(side) => side.arrays.iter().map(|(k, n, _)| (k.clone(), n.as_str())).collect(),
        }
    }

    /// Shapes of tensors as the file has them, where they are others.
    fn shapes(&self) -> HashMap<&str, &[u64]> {
        let Content::Records(records) = self else { return HashMap::new() };
        records.iter().filter_map(|r| Some((r.key.as_str(), r.shape.as_deref()?))).collect()
    }

    fn form(&self) -> Form {
        match self {
            Content::Safetensors(_) => Form::Safetensors,
            Content::TorchZip(tree) => Form::TorchZip(tree.clone()),
            Content::Records(records) => Form::Records(records.iter().map(|r| r.value.clone()).collect()),
            // What it says follows from the other files.
            Content::DcpMetadata(_) => Form::Pickle(Tree::None),
            Content::Arrays(side) => Form::Arrays(ArrayStore {
                how: side.how.clone(),
                blocks: side.arrays.iter().map(|(key, _, block)| (key.clone(), block.clone())).collect(),
            }),
        }
    }
}

/// Outputs in their files.
#[derive(Debug, Default)]
pub struct Placed {
    /// Outputs, in file order.
    pub outputs: Vec<Output>,
    /// The files.
    pub files: Vec<OutFile>,
    /// True for files that share the tensors of one model, so that an index must say which has which.
    pub has_index: bool,
    /// What was found.
    pub findings: Vec<Finding>,
}

/// Scalars that no tensor of the source gives: element type and value by name.
pub type Constants = BTreeMap<String, (Dtype, u32)>;

/// Puts outputs and constants into the files that the target prescribes: each into exactly one.
pub fn place(outputs: Ranked, sides: &[FileSide], constants: &Constants) -> Placed {
    let mut findings = Vec::new();
    let mut by_name: HashMap<(String, BTreeMap<String, u64>), Output> = HashMap::new();
    let mut dimensions = BTreeSet::new();
    for (coords, _) in &outputs {
        dimensions.extend(coords.keys().cloned());
    }
    let first: BTreeMap<String, u64> = dimensions.iter().map(|d| (d.clone(), 0)).collect();
    let mut order = Vec::with_capacity(outputs.len() + constants.len());
    for (name, (dtype, number)) in constants.iter().filter(|(_, (dtype, n))| dtype.element(*n).is_none()) {
        findings.push(
            Finding::new(codes::UNSUPPORTED, "a number that the element type does not have")
                .tensor(name)
                .expected(format!("a number of {dtype}"), number),
        );
    }
    let constants = constants.iter().map(|(name, value)| (first.clone(), constant(name, *value)));
    for (coords, output) in outputs.into_iter().chain(constants) {
        let place = (output.name.clone(), coords);
        order.push(place.clone());
        if by_name.insert(place, output).is_some() {
            findings.push(
                Finding::new(codes::OVERLAP, "two outputs of the result have one name")
                    .tensor(&order[order.len() - 1].0),
            );
        }
    }
    let mut placed = BTreeSet::new();
    let mut names = BTreeSet::new();
    let (mut all, mut files) = (Vec::new(), Vec::<OutFile>::new());
    let mut records = HashMap::new();
    for side in sides {
        if !names.insert(&side.name) {
            findings.push(Finding::new(codes::OVERLAP, "the target names this file twice").file(&side.name));
            continue;
        }
        let coords: BTreeMap<String, u64> =
            dimensions.iter().map(|d| (d.clone(), side.coords.get(d).copied().unwrap_or(0))).collect();
        let mut inside: Vec<Output> = Vec::new();
        let shapes = side.content.shapes();
        for (key, name) in side.content.tensors() {
            let place = (name.to_string(), coords.clone());
            match by_name.remove(&place) {
                Some(output) => {
                    placed.insert(place);
                    let shape = shapes.get(key.as_str()).map_or(output.shape.clone(), |s| s.to_vec());
                    if element_count(&shape) != element_count(&output.shape) {
                        findings.push(
                            Finding::new(codes::SHAPE, "shape of the tensor in a record")
                                .file(&side.name)
                                .tensor(&key)
                                .expected(
                                    format!("{:?} with axes of extent 1", output.shape),
                                    format!("{shape:?}"),
                                ),
                        );
                    }
                    inside.push(Output { key: (key != name).then_some(key), shape, ..output });
                }
                // A second name of a tensor in the same file: one storage, as tied weights are saved.
                None if inside.iter().any(|o| o.name == name) => {}
                None => {
                    let (code, what) = match placed.contains(&place) {
                        true => (codes::OVERLAP, "two files of the result name it"),
                        false => (codes::MISSING_TENSOR, "a file of the result names it, nothing makes it"),
                    };
                    findings.push(Finding::new(code, what).file(&side.name).tensor(name));
                }
            }
        }
        let mut form = side.content.form();
        if let (Content::DcpMetadata(entries), true) = (&side.content, findings.is_empty()) {
            match dcp::metadata(entries, &records, &side.name) {
                Ok(tree) => form = Form::Pickle(tree),
                Err(error) => findings.extend(error.into_findings()),
            }
        }
        if findings.is_empty() {
            match laid_out(side.name.clone(), form, &mut inside, files.len() as u32) {
                Ok(file) => {
                    if let Content::Records(sides) = &side.content {
                        let spans = record_frames(&file, &inside.iter().collect::<Vec<_>>());
                        let spans = spans.expect("laid out before");
                        let by_key: HashMap<&str, &Output> = inside.iter().map(|o| (o.key(), o)).collect();
                        for ((start, frame), record) in spans.iter().zip(sides) {
                            let tensor = by_key.get(record.key.as_str());
                            let place = dcp::Place {
                                file: file.name.clone(),
                                offset: *start,
                                len: frame.size,
                                tensor: tensor.map(|o| (o.dtype, o.shape.clone())),
                            };
                            records.insert(record.key.clone(), place);
                        }
                    }
                    files.push(file);
                }
                Err(error) => {
                    findings.extend(error.into_findings().into_iter().map(|f| f.file(&side.name)));
                }
            }
        }
        all.extend(inside);
    }
    for place in order {
        if let Some(output) = by_name.remove(&place) {
            findings.push(
                Finding::new(codes::UNKNOWN_TENSOR, "no file of the result has a place for it")
                    .tensor(&output.name),
            );
        }
    }
    Placed { outputs: all, files, has_index: false, findings }
}

/// A scalar that no tensor of the source gives.
fn constant(name: &str, (dtype, number): (Dtype, u32)) -> Output {
    Output {
        name: name.into(),
        dtype,
        shape: Vec::new(),
        parts: Vec::new(),
        fill: Fill::Number(number),
        file: 0,
        offset: 0,
        key: None,
    }
}

/// Sets the outputs' offsets; the file with its size.
fn laid_out(name: String, form: Form, outputs: &mut [Output], index: u32) -> Result<OutFile> {
    let mut file = OutFile { name, header_len: 0, size: 0, form, zeros: Vec::new() };
    let (frame, offsets) = frame(&file, &outputs.iter().collect::<Vec<_>>())?;
    for (output, offset) in outputs.iter_mut().zip(&offsets) {
        (output.file, output.offset) = (index, *offset);
    }
    file.size = frame.size;
    file.header_len = offsets.first().copied().unwrap_or(frame.size);
    Ok(file)
}

/// Outputs that the format of their file has no place for: they can be looked at, and not be written.
pub fn unwritable(plan: &Plan) -> Vec<Finding> {
    let told = plan.outputs.iter().filter(|o| plan.files[o.file as usize].form == Form::Safetensors);
    told.filter_map(|o| safetensors::holds(o.key(), o.dtype).err()).flat_map(Error::into_findings).collect()
}

/// What stands in a file around its outputs, and the offset of each output.
///
/// # Errors
/// Outputs that the file's format cannot hold.
pub fn frame(file: &OutFile, outputs: &[&Output]) -> Result<(Frame, Vec<u64>)> {
    match &file.form {
        Form::Safetensors => {
            let header = safetensors::header(outputs.iter().map(|o| (o.key(), o.dtype, &o.shape[..])));
            let announced = safetensors::announced(&header);
            within("header", announced, safetensors::MAX_HEADER, &file.name)?;
            let mut at = header.len() as u64;
            let mut offsets = Vec::with_capacity(outputs.len());
            for output in outputs {
                offsets.push(at);
                at += output.nbytes();
            }
            Ok((Frame { pieces: vec![(0, header)], members: Vec::new(), size: at }, offsets))
        }
        Form::TorchZip(tree) => {
            let frame = zipped(stem(&file.name), tree, outputs, &file.name)?;
            let offsets = frame.members.iter().map(|m| m.offset).collect();
            Ok((frame, offsets))
        }
        Form::Records(_) => {
            let mut all = Frame::default();
            for (start, frame) in record_frames(file, outputs)? {
                all.pieces.extend(frame.pieces.into_iter().map(|(at, bytes)| (start + at, bytes)));
                all.members.extend(frame.members.into_iter().map(|m| Member {
                    offset: start + m.offset,
                    len: m.len,
                    crc_at: m.crc_at.iter().map(|at| start + at).collect(),
                }));
                all.size = start + frame.size;
            }
            let offsets = all.members.iter().map(|m| m.offset).collect();
            Ok((all, offsets))
        }
        Form::Pickle(tree) => {
            let bytes = pickled(tree, &|_| None, &file.name)?;
            let size = bytes.len() as u64;
            Ok((Frame { pieces: vec![(0, bytes)], members: Vec::new(), size }, Vec::new()))
        }
        Form::Arrays(_) => {
            // There is no one file: places only tell the outputs apart.
            let mut size = 0;
            let offsets = outputs.iter().map(|o| {
                size += o.nbytes();
                size - o.nbytes()
            });
            let offsets = offsets.collect();
            Ok((Frame { size, ..Frame::default() }, offsets))
        }
        Form::Overlay(_) => Err(Finding::new(codes::BAD_VALUE, "an overlay is laid out by its source")
            .file(&file.name)
            .into()),
    }
}

/// What is written must be read again: by this program, whose limits are those of the format or beyond it.
fn within(what: &str, got: u64, limit: u64, file: &str) -> Result<()> {
    if got <= limit {
        return Ok(());
    }
    Err(Finding::new(
        codes::UNSUPPORTED,
        format!("{what} of a file of the result, beyond what is read again"),
    )
    .file(file)
    .expected(format!("{limit} at most"), got)
    .help("write fewer tensors at a time (--include, --exclude), or divide the result among more ranks")
    .into())
}

/// The pickle of `tree`, which the inert machine is known to read.
fn pickled<'a>(tree: &Tree, stored: &dyn Fn(&str) -> Option<Stored<'a>>, file: &str) -> Result<Vec<u8>> {
    let bytes = pickle(tree, stored)?;
    within("bytes of the pickle", bytes.len() as u64, LIMITS.stream as u64, file)?;
    parse_bytes(&bytes, Path::new(file)).map_err(|error| {
        Finding::new(
            codes::UNSUPPORTED,
            format!("the pickle of the result is beyond what is read again: {error}"),
        )
        .file(file)
    })?;
    Ok(bytes)
}

/// Findings for what goes with the files of a result and would be beyond what is read again: its index, its
/// manifest, and the texts of the target.
pub fn beyond(plan: &Plan) -> Vec<Finding> {
    let named = |each: u64| -> u64 {
        let file = |o: &Output| plan.files.get(o.file as usize).map_or(0, |f| f.name.len());
        plan.outputs.iter().map(|o| (o.name.len() + file(o)) as u64 + each).sum()
    };
    let mut all: Vec<(&str, u64, u64)> = vec![(MANIFEST_NAME, named(MANIFEST_ENTRY), MAX_MANIFEST)];
    all.extend(plan.index.as_deref().map(|name| (name, named(12), MAX_INDEX)));
    all.extend(plan.texts.iter().map(|(name, text)| (name.as_str(), text.len() as u64, MAX_TEXT)));
    let refused =
        all.into_iter().filter_map(|(name, bytes, limit)| within("bytes", bytes, limit, name).err());
    refused.flat_map(crate::error::Error::into_findings).collect()
}

/// Findings for names that no file of a result can have, and for files of which one has the place of another: tensors
/// name files in some formats, and what cannot be read again is not written.
pub fn misnamed(plan: &Plan) -> Vec<Finding> {
    // A file, and the tensor that it has its name from.
    let mut names: BTreeMap<String, Option<&str>> = BTreeMap::new();
    let mut folders: Vec<(String, &str)> = Vec::new();
    let mut findings = Vec::new();
    let texts = plan.texts.keys().chain(&plan.index).cloned().chain([MANIFEST_NAME.to_string()]);
    let files = plan.files.iter().zip(plan.by_file());
    let mut all: Vec<(String, Option<&str>)> = texts.map(|name| (name, None)).collect();
    for (file, inside) in files {
        let outputs = inside.iter().map(|&i| &plan.outputs[i]);
        match &file.form {
            Form::Arrays(store) if store.how.get("ocdbt") == Some(&serde_json::Value::Bool(false)) => {
                for output in outputs {
                    let folder = format!("{}/{}", file.name, output.key());
                    all.push((format!("{folder}/{ARRAY}"), Some(output.key())));
                    folders.push((folder, output.key()));
                }
            }
            // The files of such a store have names of its own.
            Form::Arrays(_) => {}
            _ => all.push((file.name.clone(), inside.first().map(|&i| plan.outputs[i].name.as_str()))),
        }
    }
    let refused = |what: &str, name: &str, tensor: Option<&str>| {
        let finding = Finding::new(codes::UNSUPPORTED, what).file(name);
        match tensor {
            Some(tensor) => finding.tensor(tensor).help(
                "leave the tensor out (--exclude), or choose a target that keeps names inside its files",
            ),
            None => finding,
        }
    };
    for (name, tensor) in all {
        if !is_plain(&name) || !is_listed(&name) {
            findings.push(refused("a name that no file of a result can have", &name, tensor).expected(
                "parts of 1 to 255 bytes between slashes, without a backslash, NUL, `..` or `.fastshard-`",
                &name,
            ));
        } else if let Some(other) = names.insert(name.clone(), tensor) {
            findings.push(refused("two files of the result have one name", &name, tensor.or(other)));
        }
    }
    let below = |folder: &str| {
        let prefix = format!("{folder}/");
        names.range(prefix.clone()..).take_while(move |(name, _)| name.starts_with(&prefix))
    };
    for (name, tensor) in &names {
        if let Some((_, other)) = below(name).next() {
            let what = "a file of the result has the name of a folder of it";
            findings.push(refused(what, name, tensor.or(*other)));
        }
    }
    for (folder, key) in folders {
        if let Some((name, _)) = below(&folder).find(|(name, _)| **name != format!("{folder}/{ARRAY}")) {
            findings.push(refused("another file lies in the folder of an array", name, Some(key)));
        }
    }
    findings
}

/// A torch zip that holds `tree`, whose tensors are `outputs` in this order.
fn zipped(folder: &str, tree: &Tree, outputs: &[&Output], file: &str) -> Result<Frame> {
    let keys: HashMap<&str, usize> = outputs.iter().enumerate().map(|(i, o)| (o.name.as_str(), i)).collect();
    let stored = |name: &str| {
        let &i = keys.get(name)?;
        Some(Stored { dtype: outputs[i].dtype, shape: &outputs[i].shape, key: i as u32 })
    };
    let bytes = pickled(tree, &stored, file)?;
    let lens: Vec<u64> = outputs.iter().map(|o| o.nbytes()).collect();
    let records = torch_zip::records(bytes, &lens);
    within("members", records.len() as u64, MAX_MEMBERS, file)?;
    Ok(torch_zip::layout(folder, records))
}

/// Start of each record of a file, and what stands in it around its tensors.
fn record_frames(file: &OutFile, outputs: &[&Output]) -> Result<Vec<(u64, Frame)>> {
    let Form::Records(values) = &file.form else { return Ok(Vec::new()) };
    let (mut at, mut rest) = (0, outputs);
    let mut all = Vec::with_capacity(values.len());
    for value in values {
        let (mine, others) = rest.split_at(value.tensors().len().min(rest.len()));
        // The folder in the zips that torch.save makes of streams.
        let frame = zipped("archive", value, mine, &file.name)?;
        let next = at + frame.size;
        all.push((at, frame));
        (at, rest) = (next, others);
    }
    Ok(all)
}

/// Records of a file that hold tensors, as a reader asks for them.
///
/// # Errors
/// Outputs that the file's format cannot hold.
pub fn tensor_records(file: &OutFile, outputs: &[&Output]) -> Result<Vec<crate::format::dcp::Range>> {
    let Form::Records(values) = &file.form else { return Ok(Vec::new()) };
    let frames = record_frames(file, outputs)?;
    let with_tensor = frames.into_iter().zip(values).filter(|(_, value)| !value.tensors().is_empty());
    let named = with_tensor.zip(outputs);
    Ok(named.map(|(((start, frame), _), o)| (start, frame.size, o.key().to_string(), false)).collect())
}

/// The file's name without folders and ending: what torch calls the archive.
fn stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    match name.rsplit_once('.') {
        Some((stem, _)) if !stem.is_empty() => stem,
        _ => name,
    }
}

/// Names compared with their numbers as numbers, so that layer 10 follows layer 9.
fn natural(name: &str) -> Vec<(String, u64)> {
    let mut out = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let text = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let digits = rest[text..].find(|c: char| !c.is_ascii_digit()).map_or(rest.len(), |n| text + n);
        out.push((rest[..text].to_string(), rest[text..digits].parse().unwrap_or(u64::MAX)));
        rest = &rest[digits..];
    }
    out
}

/// Distributes outputs over safetensors files and lays them out in each. A rank's tensors stay in one
/// file, so that its header may be beyond the format's limit: that is a finding.
pub fn pack(outputs: Ranked, max_bytes: u64) -> Placed {
    let mut units: BTreeMap<BTreeMap<String, u64>, Vec<Output>> = BTreeMap::new();
    for (coords, output) in outputs {
        units.entry(coords).or_default().push(output);
    }
    let sharded = units.len() > 1;
    let (mut all, mut files, mut findings) = (Vec::new(), Vec::new(), Vec::new());
    for (coords, mut outputs) in units {
        outputs.sort_by_cached_key(|o| natural(&o.name));
        let mut groups: Vec<Vec<Output>> = vec![Vec::new()];
        let (mut bytes, mut header) = (0, safetensors::HEADER_FIXED);
        for output in outputs {
            let n = output.nbytes();
            let entry = safetensors::entry_room(output.key(), output.shape.len());
            let last = groups.last_mut().expect("never empty");
            // A rank's tensors stay in one file: that is what the next tool reads.
            if !sharded && !last.is_empty() && (bytes + n > max_bytes || header + entry > HEADER_ROOM) {
                groups.push(vec![output]);
                (bytes, header) = (n, safetensors::HEADER_FIXED + entry);
            } else {
                last.push(output);
                bytes += n;
                header += entry;
            }
        }
        let count = groups.len();
        for (i, mut group) in groups.into_iter().enumerate() {
            // Whole pages first, so that as many tensors as can be lie on page boundaries.
            group.sort_by_key(|o| o.nbytes() % 4096 != 0);
            let name = match (sharded, count) {
                (true, _) => format!("{}.safetensors", of_rank(&coords)),
                (false, 1) => "model.safetensors".to_string(),
                (false, _) => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
            };
            match laid_out(name, Form::Safetensors, &mut group, files.len() as u32) {
                Ok(file) => {
                    files.push(file);
                    all.extend(group);
                }
                Err(error) => findings.extend(error.into_findings()),
            }
        }
    }
    // Files of ranks hold slices under one name: an index would name one slice as the whole.
    let has_index = !sharded && files.len() > 1;
    Placed { outputs: all, files, has_index, findings }
}

/// What a rank's file is called, e.g. `tp_rank_01`.
fn of_rank(coords: &BTreeMap<String, u64>) -> String {
    let each: Vec<String> = coords.iter().map(|(by, rank)| format!("{by}_rank_{rank:02}")).collect();
    each.join("_")
}
