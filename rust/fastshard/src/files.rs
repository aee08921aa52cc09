//! Output files: which outputs go into which, and what stands around their bytes.

mod prescribed;

use std::cmp::Ordering;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::format::pickle::writer::{pickle, Stored, Tree};
use crate::format::pickle::{parse_bytes, LIMITS};
use crate::format::torch_zip::writer as torch_zip;
use crate::format::zip::MAX_MEMBERS;
use crate::format::{safetensors, Frame, Member};
use crate::manifest::{is_listed, is_plain, MANIFEST_NAME, MAX_MANIFEST};
use crate::plan::{Form, Metadata, OutFile, Output, Plan};
use crate::tensor::Dtype;

pub use prescribed::{place, ArraysSide, Constants, Content, FileSide, RecordSide};

/// Name of the index that names each tensor's file.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

/// Maximum bytes of entries in a file's header: the complete pages of what the format allows.
const HEADER_ROOM: usize = safetensors::MAX_HEADER as usize - 4096;
/// Maximum bytes of the texts besides tensors, and of an index, as `safe_files.py` reads them.
const MAX_TEXT: u64 = 64 << 20;
const MAX_INDEX: u64 = 512 << 20;
/// A file in an array's folder, for stores that keep arrays as folders.
const ARRAY: &str = ".zarray";
/// Minimum bytes of a tensor's entry in a manifest, without names.
const MANIFEST_ENTRY: u64 = 250;

/// Outputs with their ranks.
pub type Ranked = Vec<(Arc<BTreeMap<String, u64>>, Output)>;

/// Outputs in their files.
#[derive(Debug, Default)]
pub struct Placed {
    /// Outputs, in file order.
    pub outputs: Vec<Output>,
    /// The files.
    pub files: Vec<OutFile>,
    /// True for files that share the tensors of one model, so that an index must state the file of each
    /// tensor.
    pub has_index: bool,
    /// The findings.
    pub findings: Vec<Finding>,
}

/// Sets the outputs' offsets, and returns the file with its size.
fn laid_out(
    name: String,
    form: Form,
    metadata: &Metadata,
    outputs: &mut [Output],
    index: u32,
) -> Result<OutFile> {
    let mut file = OutFile { name, header_len: 0, size: 0, form, zeros: Vec::new() };
    if file.form == Form::Safetensors {
        // Of the header only its length matters here.
        let entries = outputs.iter().map(|o| (o.key(), o.dtype, &o.shape[..]));
        file.header_len = safetensors::header_len(metadata, entries);
        within("header", file.header_len - 8, safetensors::MAX_HEADER, &file.name)?;
        file.size = file.header_len;
        for output in outputs {
            (output.file, output.offset) = (index, file.size);
            file.size += output.nbytes();
        }
        return Ok(file);
    }
    let all: Vec<&Output> = outputs.iter().collect();
    let (size, offsets) = match &file.form {
        // Of records only their sizes matter here.
        Form::Records(_) => measure_records(&record_frames(&file, &all)?),
        _ => frame(&file, metadata, &all).map(|(frame, offsets)| (frame.size, offsets))?,
    };
    for (output, offset) in outputs.iter_mut().zip(&offsets) {
        (output.file, output.offset) = (index, *offset);
    }
    file.size = size;
    file.header_len = offsets.first().copied().unwrap_or(size);
    Ok(file)
}

/// Outputs for which the format of their file has no place: they can be read, but not be written.
pub fn unwritable(plan: &Plan) -> Vec<Finding> {
    let outputs = plan.outputs.iter().filter(|o| plan.files[o.file as usize].form == Form::Safetensors);
    outputs
        .filter_map(|o| safetensors::holds(o.key(), o.dtype).err())
        .flat_map(Error::into_findings)
        .collect()
}

/// The content of a file around its outputs, and the offset of each output. A safetensors header includes the
/// metadata.
///
/// # Errors
/// Outputs that the file's format cannot hold.
pub fn frame(file: &OutFile, metadata: &Metadata, outputs: &[&Output]) -> Result<(Frame, Vec<u64>)> {
    match &file.form {
        Form::Safetensors => {
            let header =
                safetensors::header(metadata, outputs.iter().map(|o| (o.key(), o.dtype, &o.shape[..])));
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
                all.pieces.extend(frame.pieces.iter().map(|(at, bytes)| (start + at, bytes.clone())));
                all.members.extend(frame.members.iter().map(|m| Member {
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

/// Checks that a written file can be read again by this program, whose limits are those of the format or
/// higher.
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

/// The pickle of `tree`, in a form that the inert machine can read.
fn pickled<'a>(tree: &Tree, stored: &dyn Fn(&str) -> Option<Stored<'a>>, file: &str) -> Result<Vec<u8>> {
    let bytes = pickle(tree, stored)?;
    within("bytes of the pickle", bytes.len() as u64, LIMITS.stream as u64, file)?;
    match parse_bytes(&bytes, Path::new(file)) {
        Ok(_) => Ok(bytes),
        Err(error) if error.is_of_memory() => Err(error),
        Err(error) => {
            let message = format!("the pickle of the result is beyond what is read again: {error}");
            Err(Finding::new(codes::UNSUPPORTED, message).file(file).into())
        }
    }
}

/// Findings for companions of a result that exceed the limits for reading them again: its index, its
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

/// Findings for names that no file of a result can have, and for files that would take each other's place. In
/// some formats tensors name files, and a file that cannot be read again is not written.
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
            findings.push(refused("another file is in the folder of an array", name, Some(key)));
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

/// Start of each record of a file, and its content around the tensors. Records of one tensor are the same if the tensors
/// are alike, because a record does not name its tensor.
fn record_frames(file: &OutFile, outputs: &[&Output]) -> Result<Vec<(u64, Rc<Frame>)>> {
    let Form::Records(values) = &file.form else { return Ok(Vec::new()) };
    let (mut at, mut rest) = (0, outputs);
    let mut all = Vec::with_capacity(values.len());
    let mut of_tensors: HashMap<(Dtype, &[u64]), Rc<Frame>> = HashMap::new();
    for value in values {
        let (mine, others) = rest.split_at(value.tensors().len().min(rest.len()));
        // The folder in the zips that torch.save makes of streams.
        let make = || zipped("archive", value, mine, &file.name).map(Rc::new);
        let frame = match (value, mine) {
            (Tree::Tensor(name), [output]) if output.name.as_str() == name => {
                match of_tensors.entry((output.dtype, &output.shape)) {
                    Entry::Occupied(frame) => Rc::clone(frame.get()),
                    Entry::Vacant(place) => Rc::clone(place.insert(make()?)),
                }
            }
            _ => make()?,
        };
        let next = at + frame.size;
        all.push((at, frame));
        (at, rest) = (next, others);
    }
    Ok(all)
}

/// Bytes of records in all, and the offset of each tensor.
fn measure_records(frames: &[(u64, Rc<Frame>)]) -> (u64, Vec<u64>) {
    let size = frames.last().map_or(0, |(start, frame)| start + frame.size);
    let members =
        frames.iter().flat_map(|(start, frame)| frame.members.iter().map(move |m| start + m.offset));
    (size, members.collect())
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

/// The file's name without folders and ending, which is torch's name of the archive.
fn stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    match name.rsplit_once('.') {
        Some((stem, _)) if !stem.is_empty() => stem,
        _ => name,
    }
}

/// Parts of a name for comparison, with numbers as numbers, so that layer 10 follows layer 9.
fn natural(name: &str) -> impl Iterator<Item = (&str, u64)> {
    let mut rest = name;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let text = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let digits = rest[text..].find(|c: char| !c.is_ascii_digit()).map_or(rest.len(), |n| text + n);
        let part = (&rest[..text], rest[text..digits].parse().unwrap_or(u64::MAX));
        rest = &rest[digits..];
        Some(part)
    })
}

/// Compares names by their natural parts, from the part in which they begin to differ.
fn compare_naturally(a: &str, b: &str) -> Ordering {
    let (x, y) = (a.as_bytes(), b.as_bytes());
    let same = x.iter().zip(y).take_while(|(x, y)| x == y).count();
    let begins = |at: &usize| x[at - 1].is_ascii_digit() && !x[*at].is_ascii_digit();
    let start = (1..same).rev().find(begins).unwrap_or(0);
    natural(&a[start..]).cmp(natural(&b[start..]))
}

/// Distributes outputs over safetensors files and lays them out in each. A rank's tensors stay in one file,
/// whose header may then exceed the format's limit; this is a finding.
pub fn pack(mut outputs: Ranked, max_bytes: u64, metadata: &Metadata) -> Placed {
    let room = |(key, text): (&String, &String)| serde_json::json!([key, text]).to_string().len();
    let fixed = safetensors::HEADER_FIXED + metadata.iter().map(room).sum::<usize>();
    // In place, here and below: there may be millions.
    outputs.sort_by(|(at, a), (other, b)| at.cmp(other).then_with(|| compare_naturally(&a.name, &b.name)));
    let units: Vec<_> =
        outputs.chunk_by(|(a, _), (b, _)| a == b).map(|all| (all[0].0.clone(), all.len())).collect();
    let mut all: Vec<Output> = outputs.into_iter().map(|(_, output)| output).collect();
    let sharded = units.len() > 1;
    let (mut files, mut refused, mut findings) = (Vec::new(), Vec::new(), Vec::new());
    let mut start = 0;
    for (coords, count) in units {
        let mut groups = vec![0];
        let (mut bytes, mut header) = (0, fixed);
        for output in &all[start..start + count] {
            let n = output.nbytes();
            let entry = safetensors::entry_room(output.key(), output.shape.len());
            let last = groups.last_mut().expect("never empty");
            // A rank's tensors stay in one file: that is what the next tool reads.
            if !sharded && *last > 0 && (bytes + n > max_bytes || header + entry > HEADER_ROOM) {
                groups.push(1);
                (bytes, header) = (n, fixed + entry);
            } else {
                *last += 1;
                bytes += n;
                header += entry;
            }
        }
        let count = groups.len();
        for (i, len) in groups.into_iter().enumerate() {
            let range = start..start + len;
            start = range.end;
            let group = &mut all[range.clone()];
            // Whole pages first, so that as many tensors as can be lie on page boundaries.
            group.sort_by_key(|o| o.nbytes() % 4096 != 0);
            let name = match (sharded, count) {
                (true, _) => format!("{}.safetensors", of_rank(&coords)),
                (false, 1) => "model.safetensors".to_string(),
                (false, _) => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
            };
            match laid_out(name, Form::Safetensors, metadata, group, files.len() as u32) {
                Ok(file) => files.push(file),
                Err(error) => {
                    findings.extend(error.into_findings());
                    refused.push(range);
                }
            }
        }
    }
    for range in refused.into_iter().rev() {
        all.drain(range);
    }
    // Files of ranks hold slices under one name: an index would name one slice as the whole.
    let has_index = !sharded && files.len() > 1;
    Placed { outputs: all, files, has_index, findings }
}

/// The name of a rank's file, e.g. `tp_rank_01`.
fn of_rank(coords: &BTreeMap<String, u64>) -> String {
    let each: Vec<String> = coords.iter().map(|(by, rank)| format!("{by}_rank_{rank:02}")).collect();
    each.join("_")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// What two names have in common decides nothing.
        #[test]
        fn names_are_compared_by_all_of_their_parts(a in "[a.0é]{0,3}[a-c.0-9é]{0,6}", b in "[a.0é]{0,3}[a-c.0-9é]{0,6}") {
            prop_assert_eq!(compare_naturally(&a, &b), natural(&a).cmp(natural(&b)));
        }
    }
}
