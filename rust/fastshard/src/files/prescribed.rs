//! Files that a target prescribes: which tensor goes into which.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use serde::Deserialize;

use super::{laid_out, record_frames, Placed, Ranked};
use crate::codes;
use crate::error::{Error, Finding};
use crate::few::Few;
use crate::format::dcp::writer as dcp;
use crate::format::pickle::writer::Tree;
use crate::name::Name;
use crate::plan::{ArrayStore, Fill, Form, OutFile, Output};
use crate::tensor::{element_count, Dtype};

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

/// The content of a prescribed file.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// (name in the file, tensor), in this order.
    Safetensors(Vec<(String, String)>),
    /// A value in the form in which `torch.save` takes it.
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

    /// Shapes of tensors in the file, if they differ.
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

/// Scalars that come from no tensor of the source: element type and value by name.
pub type Constants = BTreeMap<String, (Dtype, u32)>;

/// Puts outputs and constants into the files that the target prescribes: each into exactly one.
pub fn place(outputs: Ranked, sides: &[FileSide], constants: &Constants) -> Placed {
    let dimensions = outputs.iter().flat_map(|(coords, _)| coords.keys().cloned()).collect();
    let mut placing = Placing { dimensions, ..Placing::default() };
    placing.take(outputs, constants);
    let mut names = BTreeSet::new();
    for side in sides {
        if names.insert(&side.name) {
            let inside = placing.tensors_of(side);
            placing.lay_out(side, inside);
        } else {
            let twice = Finding::new(codes::OVERLAP, "the target names this file twice");
            placing.findings.push(twice.file(&side.name));
        }
    }
    placing.refuse_left();
    let Placing { outputs, files, findings, .. } = placing;
    Placed { outputs, files, has_index: false, findings }
}

/// An output's name, and the number of its rank.
type Place = (Name, u32);

/// Outputs on their way into files.
#[derive(Default)]
struct Placing {
    /// Parallel dimensions of the target.
    dimensions: BTreeSet<String>,
    /// Numbers of ranks, by their coordinates on these dimensions.
    ranks: HashMap<Box<[u64]>, u32>,
    /// The outputs as they came, without those that have a file.
    waiting: Vec<Option<Output>>,
    /// Where each output is among them.
    places: HashMap<Place, usize>,
    /// Where the records lie that a `.metadata` may name.
    records: HashMap<String, dcp::Place>,
    outputs: Vec<Output>,
    files: Vec<OutFile>,
    findings: Vec<Finding>,
}

impl Placing {
    /// Takes the outputs, and constants as outputs of the first rank.
    fn take(&mut self, outputs: Ranked, constants: &Constants) {
        let unfit = constants.iter().filter(|(_, (dtype, number))| dtype.element(*number).is_none());
        self.findings.extend(unfit.map(|(name, (dtype, number))| {
            Finding::new(codes::UNSUPPORTED, "a number that the element type does not have")
                .tensor(name)
                .expected(format!("a number of {dtype}"), number)
        }));
        let first = Arc::default();
        let constants = constants.iter().map(|(name, value)| (Arc::clone(&first), constant(name, *value)));
        for (coords, output) in outputs.into_iter().chain(constants) {
            let place = (output.name.clone(), self.number_rank(&coords));
            if self.places.insert(place, self.waiting.len()).is_some() {
                let twice = Finding::new(codes::OVERLAP, "two outputs of the result have one name");
                self.findings.push(twice.tensor(&output.name));
            }
            self.waiting.push(Some(output));
        }
    }

    /// The number of a rank; on a dimension that `coords` does not name it is rank 0.
    fn number_rank(&mut self, coords: &BTreeMap<String, u64>) -> u32 {
        let ranks: Box<[u64]> = self.dimensions.iter().map(|d| coords.get(d).copied().unwrap_or(0)).collect();
        let next = self.ranks.len() as u32;
        *self.ranks.entry(ranks).or_insert(next)
    }

    /// The outputs that a file names, in its order.
    fn tensors_of(&mut self, side: &FileSide) -> Vec<Output> {
        let rank = self.number_rank(&side.coords);
        let shapes = side.content.shapes();
        let mut inside: Vec<Output> = Vec::new();
        for (key, name) in side.content.tensors() {
            let place = self.places.get(&(Name::from(name), rank)).copied();
            match place.and_then(|place| self.waiting[place].take()) {
                Some(output) => {
                    let shape = shapes.get(key.as_str()).map_or(output.shape.clone(), |s| Few::from(*s));
                    if element_count(&shape) != element_count(&output.shape) {
                        let fits = format!("{:?} with axes of extent 1", output.shape);
                        self.findings.push(
                            Finding::new(codes::SHAPE, "shape of the tensor in a record")
                                .file(&side.name)
                                .tensor(&key)
                                .expected(fits, format!("{shape:?}")),
                        );
                    }
                    inside.push(Output { key: (key != name).then(|| key.into()), shape, ..output });
                }
                // A second name of a tensor in the same file: one storage, as tied weights are saved.
                None if inside.iter().any(|o| o.name == name) => {}
                None => {
                    let (code, what) = match place.is_some() {
                        true => (codes::OVERLAP, "two files of the result name it"),
                        false => (codes::MISSING_TENSOR, "a file of the result names it, nothing makes it"),
                    };
                    self.findings.push(Finding::new(code, what).file(&side.name).tensor(name));
                }
            }
        }
        inside
    }

    /// Lays out a file, unless there is an error.
    fn lay_out(&mut self, side: &FileSide, mut inside: Vec<Output>) {
        if self.findings.is_empty() {
            let form = match &side.content {
                Content::DcpMetadata(entries) => dcp::metadata(entries, &self.records, &side.name)
                    .map(Form::Pickle)
                    .map_err(Error::into_findings),
                content => Ok(content.form()),
            };
            let laid = form.and_then(|form| {
                laid_out(side.name.clone(), form, &BTreeMap::new(), &mut inside, self.files.len() as u32)
                    .map_err(|error| error.into_findings().into_iter().map(|f| f.file(&side.name)).collect())
            });
            match laid {
                Ok(file) => {
                    if let Content::Records(records) = &side.content {
                        self.note_records(records, &file, &inside);
                    }
                    self.files.push(file);
                }
                Err(findings) => self.findings.extend(findings),
            }
        }
        self.outputs.extend(inside);
    }

    /// Records the places of a file's records, for the `.metadata` that names them.
    fn note_records(&mut self, records: &[RecordSide], file: &OutFile, inside: &[Output]) {
        let spans = record_frames(file, &inside.iter().collect::<Vec<_>>()).expect("laid out before");
        let by_key: HashMap<&str, &Output> = inside.iter().map(|o| (o.key(), o)).collect();
        for ((start, frame), record) in spans.iter().zip(records) {
            let tensor = by_key.get(record.key.as_str());
            let place = dcp::Place {
                file: file.name.clone(),
                offset: *start,
                len: frame.size,
                tensor: tensor.map(|o| (o.dtype, o.shape.to_vec())),
            };
            self.records.insert(record.key.clone(), place);
        }
    }

    /// Refuses outputs that no file names.
    fn refuse_left(&mut self) {
        for output in self.waiting.iter().flatten() {
            let finding = Finding::new(codes::UNKNOWN_TENSOR, "no file of the result has a place for it");
            self.findings.push(finding.tensor(&output.name));
        }
    }
}

/// A scalar that comes from no tensor of the source.
fn constant(name: &str, (dtype, number): (Dtype, u32)) -> Output {
    Output {
        name: name.into(),
        dtype,
        shape: Default::default(),
        parts: Default::default(),
        fill: Fill::Number(number),
        file: 0,
        offset: 0,
        key: None,
    }
}
