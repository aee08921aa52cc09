//! The tensors that a request speaks of: those of the files, and those put together from ranges.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::Deserialize;

use crate::catalog::{Catalog, CatalogFile};
use crate::codes;
use crate::compose::first_overlap;
use crate::error::{Finding, Severity};
use crate::few::Few;
use crate::format::{FileTensor, Role};
use crate::layout::resolve::{Stored, Unit};
use crate::name::{self, Name};
use crate::plan::{
    BoxPiece, Coded, Grid, Numbers, Packing, Pieces, PlanBlob, PlanFile, RangePiece, Scale, StoredTensor,
};
use crate::tensor::{c_strides, element_count, Dtype};

use super::{Request, SourceSide, UnitSide, Weights};

/// Tensors of one rank that lie in ranges of other tensors: partitions of a flat optimizer state.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AssembledSide {
    /// File that messages name (index in the catalog).
    pub file: u32,
    /// Rank per parallel dimension.
    #[serde(default)]
    pub coords: BTreeMap<String, u64>,
    /// Index of the first layer (or expert) that the names count from; as the unit has it that holds the parameters.
    #[serde(default)]
    pub bases: BTreeMap<String, u64>,
    /// Rank in the field's words.
    #[serde(default)]
    pub rank: Option<String>,
    /// What of a parameter they are, e.g. `exp_avg`; absent for its values.
    #[serde(default)]
    pub slot: Option<String>,
    /// True for parameters that are not trained, so that no file need hold them besides.
    #[serde(default)]
    pub frozen: bool,
    /// True for further names, wanted only where the masters are taken.
    #[serde(default)]
    pub masters_only: bool,
    /// The tensors.
    pub tensors: Vec<AssembledTensor>,
}

/// One tensor: name, shape, and the pieces that tile it: ranges of its C-ordered elements one after
/// another, or boxes.
#[derive(Debug, Deserialize)]
pub struct AssembledTensor(pub String, pub Vec<u64>, pub Parts);

/// Pieces of an assembled tensor.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Parts {
    /// Ranges.
    Ranges(Vec<Range>),
    /// Boxes.
    Boxes(Vec<Chunk>),
}

/// First index and extent in each dimension, file (index in the catalog), and the tensor in it: it has that
/// extent; or, where the last is given, it is flat, and the box lies in C order from this element on.
#[derive(Debug, Deserialize)]
pub struct Chunk(pub Vec<u64>, pub Vec<u64>, pub u32, pub u32, #[serde(default)] pub Option<u64>);

/// Elements taken, file (index in the catalog), tensor in it, and the first element there.
#[derive(Debug, Deserialize)]
pub struct Range(pub u64, pub u32, pub u32, pub u64);

/// The number of a blob that the plan does not have.
const UNSEEN: u32 = u32::MAX;

/// All tensors of a request, in the order in which they were declared.
#[derive(Default)]
pub(crate) struct Gathered {
    pub(crate) sources: Vec<PlanFile>,
    pub(crate) blobs: Vec<PlanBlob>,
    pub(crate) stored: Vec<StoredTensor>,
    pub(super) units: Vec<Unit>,
    pub(super) passes: Vec<Pass>,
    pub(crate) findings: Vec<Finding>,
    /// Tensors that are codes and a scale in the files, and parameters whose master weights are not compared with such.
    eights: u64,
    uncompared: u64,
    source_index: HashMap<u32, u32>,
    /// The plan's number of each blob of a file; [`UNSEEN`] for one that it does not have.
    blob_index: HashMap<u32, Vec<u32>>,
}

/// Tensors that are composed together: the weights, or one slot of the optimizer's state.
#[derive(Default)]
pub(crate) struct Pass {
    /// Slot; none for the weights.
    pub(super) slot: Option<String>,
    /// The tensors as the rules see them.
    pub(super) seen: Vec<Stored>,
    /// Of each, its index in [`Gathered::stored`].
    pub(super) tensors: Vec<u32>,
}

/// Which tensors hold the same parameter: (unit, index in [`Gathered::stored`]) by name.
#[derive(Default)]
struct Twins {
    of_files: HashMap<Name, Vec<(u32, u32)>>,
    /// Of assembled tensors that no file need hold besides: a container keeps its parameters as boxes too.
    whole: HashMap<Name, Vec<(u32, u32)>>,
    /// Those in whose place an assembled tensor stands.
    replaced: HashSet<u32>,
}

impl Gathered {
    /// Gathers what the source of a request declares, as far as it is asked for. Where a file and the assembled tensors hold
    /// one tensor both, it is taken from the assembled ones if those are `preferred`; the other becomes its twin.
    pub(crate) fn new(catalog: &Catalog, request: &Request, preferred: bool) -> Gathered {
        let side = &request.source;
        let wanted = |group: &&AssembledSide| {
            (group.slot.is_none() || request.optimizer)
                && (!group.masters_only || request.taken() == Weights::Masters)
        };
        let assembled: Vec<&AssembledSide> = side.files.assembled.iter().filter(wanted).collect();
        let mut all = Gathered { passes: vec![Pass::default()], ..Gathered::default() };
        let files = side.files.units.iter().filter_map(|unit| file_of(catalog, unit.file));
        let count = files.map(|file| file.parsed.named_count()).sum();
        all.stored.reserve_exact(count);
        all.passes[0].seen.reserve_exact(count);
        all.passes[0].tensors.reserve_exact(count);
        for unit in &side.files.units {
            all.unit(catalog, unit, &side.names.own);
        }
        let mut twins = Twins::default();
        if assembled.iter().any(|group| group.slot.is_none()) {
            for (stored, seen) in all.passes[0].tensors.iter().zip(&all.passes[0].seen) {
                twins.of_files.entry(seen.name.clone()).or_default().push((seen.unit, *stored));
            }
        }
        for group in assembled {
            all.group(catalog, side, group, preferred, &mut twins);
        }
        all.tell_eights();
        all.decode(&request.coded);
        let mut replaced = twins.replaced;
        let hidden = side.names.hidden.union(&request.left_out).map(String::as_str).collect();
        replaced.extend(all.adapt(&side.files.adapted, &hidden));
        let Pass { seen, tensors, .. } = &mut all.passes[0];
        let keep: Vec<bool> = tensors.iter().map(|t| !replaced.contains(t)).collect();
        let mut kept = keep.iter();
        seen.retain(|_| *kept.next().expect("as long as the tensors"));
        let mut kept = keep.iter();
        tensors.retain(|_| *kept.next().expect("as long as itself"));
        all
    }

    /// Puts the tensors of one rank's partitions together, each in its pass.
    fn group(
        &mut self,
        catalog: &Catalog,
        side: &SourceSide,
        group: &AssembledSide,
        preferred: bool,
        twins: &mut Twins,
    ) {
        let Some(file) = file_of(catalog, group.file) else { return };
        self.units.push(Unit {
            coords: group.coords.clone(),
            bases: group.bases.clone(),
            root: file.root,
            file: catalog.label(file),
            rank: group.rank.clone(),
        });
        let unit = (self.units.len() - 1) as u32;
        for tensor in &group.tensors {
            let Some(stored) = self.assemble(catalog, group, tensor) else { continue };
            let index = self.stored.len() as u32;
            let name = side.names.own.get(&*stored.name).map_or_else(|| stored.name.clone(), Name::from);
            let seen = Stored { name, shape: stored.shape.clone(), dtype: stored.dtype, unit };
            self.stored.push(stored);
            match &group.slot {
                None if !self.pair(preferred, group, &seen, index, twins) => {}
                None => {
                    if group.frozen {
                        twins.whole.entry(seen.name.clone()).or_default().push((unit, index));
                    }
                    self.passes[0].add(seen, index);
                }
                Some(slot) => self.pass_of(slot).add(seen, index),
            }
        }
    }

    /// Pairs an assembled parameter with the tensors of files that hold the same. True if it takes their place, or if no file
    /// need hold it.
    fn pair(
        &mut self,
        preferred: bool,
        group: &AssembledSide,
        seen: &Stored,
        index: u32,
        known: &mut Twins,
    ) -> bool {
        // A layer file says nothing of the stage that the partition comes from.
        let on_rank = |unit: u32| {
            let Unit { coords, bases, .. } = &self.units[unit as usize];
            coords.iter().all(|(d, r)| group.coords.get(d).copied().unwrap_or(0) == *r)
                && (group.bases.is_empty() || group.bases == *bases)
        };
        let among = [Some(&known.of_files), (!group.frozen).then_some(&known.whole)];
        let others = among.into_iter().flatten().filter_map(|m| m.get(&seen.name)).flatten();
        let twins: Vec<u32> = others
            .filter(|(u, o)| on_rank(*u) && self.stored[*o as usize].shape == seen.shape)
            .map(|(_, o)| *o)
            .collect();
        // What a parameter was rounded to in eight bits depends on more than its master weight.
        let of_codes = |all: &Self, twin: u32| matches!(all.stored[twin as usize].pieces, Pieces::Coded(_));
        let compared: Vec<u32> = twins.iter().copied().filter(|twin| !of_codes(self, *twin)).collect();
        self.uncompared += (compared.len() < twins.len()) as u64;
        if preferred {
            known.replaced.extend(twins.iter().copied());
            self.stored[index as usize].twins = compared.into();
            return true;
        }
        if twins.is_empty() && !group.frozen {
            let finding = Finding::new(
                codes::MISSING_TENSOR,
                "the optimizer holds this parameter, no model file does",
            )
            .tensor(&seen.name)
            .help("copy the model or layer file that holds it from the node that wrote it; --weights masters takes the master weights");
            self.findings.push(finding.of_rank(&group.coords, &group.rank));
            return false;
        }
        for twin in compared {
            self.stored[twin as usize].twins.push(index);
        }
        twins.is_empty()
    }

    /// The pass of a slot.
    fn pass_of(&mut self, slot: &str) -> &mut Pass {
        let known = self.passes.iter().position(|p| p.slot.as_deref() == Some(slot));
        let at = known.unwrap_or_else(|| {
            self.passes.push(Pass { slot: Some(slot.into()), ..Pass::default() });
            self.passes.len() - 1
        });
        &mut self.passes[at]
    }

    fn unit(&mut self, catalog: &Catalog, unit: &UnitSide, names: &HashMap<String, String>) {
        let Some(file) = file_of(catalog, unit.file) else { return };
        self.source(unit.file, file);
        self.units.push(Unit {
            coords: unit.coords.clone(),
            bases: unit.bases.clone(),
            root: file.root,
            file: catalog.label(file),
            rank: unit.rank.clone(),
        });
        let mut scales = file.parsed.tensors.iter().filter(|tensor| tensor.role == Role::Scale);
        for tensor in file.parsed.named() {
            let scale = matches!(tensor.role, Role::Codes(_)).then(|| scales.next()).flatten();
            let Some(rest) = tensor.path.below(&unit.under) else { continue };
            let key = name::join(rest);
            if unit.only.as_ref().is_some_and(|only| !only.contains(&*key)) {
                continue;
            }
            let name = match key.strip_prefix(&unit.strip).unwrap_or(&key) {
                all if all.len() == key.len() && unit.prefix.is_empty() => key,
                rest => format!("{}{rest}", unit.prefix).into(),
            };
            let pieces = self.pieces(unit, file, tensor, scale, &name);
            let seen = Stored {
                name: names.get(&*name).map_or_else(|| name.clone(), Name::from),
                shape: tensor.shape.clone(),
                dtype: tensor.value_dtype(),
                unit: (self.units.len() - 1) as u32,
            };
            self.passes[0].add(seen, self.stored.len() as u32);
            self.stored.push(stored(
                name,
                tensor.value_dtype(),
                tensor.shape.clone(),
                pieces,
                unit.rank.as_deref(),
            ));
        }
    }

    /// Says what weights in eight bits are read as.
    fn tell_eights(&mut self) {
        if self.eights > 0 {
            let message = format!(
                "{} tensors of Transformer Engine's Float8Tensor are read as the values that they stand for",
                self.eights
            );
            self.findings.push(Finding::new(codes::LOSSY, message));
        }
        if self.uncompared > 0 {
            let message = format!(
                "the fp32 master weights of {} parameters are not compared: these are stored in eight bits",
                self.uncompared
            );
            self.findings.push(Finding::new(codes::MASTERS_NOT_CHECKABLE, message).severity(Severity::Note));
        }
    }

    /// What a tensor of a file is made of.
    fn pieces(
        &mut self,
        unit: &UnitSide,
        file: &CatalogFile,
        tensor: &FileTensor,
        scale: Option<&FileTensor>,
        name: &str,
    ) -> Pieces {
        let view = |all: &mut Self, tensor: &FileTensor, strides: Few<u64>| {
            let blob = all.blob(unit.file, file, tensor.blob);
            Pieces::View { blob, offset: tensor.offset, strides }
        };
        let Some(scale) = scale else { return view(self, tensor, tensor.strides.clone()) };
        self.eights += 1;
        let shape = Few::from([1, 1, elements(tensor)]);
        let mut add = |tensor: &FileTensor, shape: Few<u64>| {
            let pieces = view(self, tensor, c_strides(&shape));
            self.stored.push(stored(name.into(), tensor.dtype, shape, pieces, unit.rank.as_deref()));
            self.stored.len() as u32 - 1
        };
        let codes = add(tensor, shape.clone());
        let of = add(scale, [1, 1, 1].into());
        let all = [1, 1, shape[2].max(1)];
        Pieces::Coded(Box::new(Coded {
            codes,
            packing: Packing::None,
            numbers: Numbers::Float(tensor.dtype),
            flat: true,
            turned: false,
            zero: None,
            scales: vec![Scale { grid: Grid { of, block: all }, divides: false, rounded: Dtype::F32 }],
            groups: None,
            rounded: Dtype::F32,
            term: 0.0,
        }))
    }

    /// The file's index among the plan's sources.
    pub(crate) fn source(&mut self, index: u32, file: &CatalogFile) -> u32 {
        *self.source_index.entry(index).or_insert_with(|| {
            self.sources.push(file.plan_file());
            (self.sources.len() - 1) as u32
        })
    }

    /// The blob's index among the plan's blobs.
    pub(crate) fn blob(&mut self, index: u32, file: &CatalogFile, blob: u32) -> u32 {
        let source = self.source(index, file);
        let of_file = self.blob_index.entry(index).or_insert_with(|| vec![UNSEEN; file.parsed.blobs.len()]);
        let known = &mut of_file[blob as usize];
        if *known == UNSEEN {
            *known = self.blobs.len() as u32;
            self.blobs.push(PlanBlob::of(source, &file.parsed.blobs[blob as usize]));
        }
        *known
    }

    /// A tensor made of ranges; `None` with a finding where they do not tile it, and without one where
    /// a file of it could not be read (which is a finding already).
    fn assemble(
        &mut self,
        catalog: &Catalog,
        group: &AssembledSide,
        tensor: &AssembledTensor,
    ) -> Option<StoredTensor> {
        let AssembledTensor(name, shape, parts) = tensor;
        let ranges = match parts {
            Parts::Ranges(ranges) => ranges,
            Parts::Boxes(chunks) => return self.assemble_boxes(catalog, group, name, shape, chunks),
        };
        let mut pieces: Vec<RangePiece> = Vec::with_capacity(ranges.len());
        let mut dtype: Option<Dtype> = None;
        let mut at = 0u64;
        let total = element_count(shape).unwrap_or(u64::MAX);
        for &Range(len, index, number, first) in ranges {
            let file = file_of(catalog, index)?;
            let part = file.parsed.tensors.get(number as usize)?;
            let fits = flat(part)
                && part.role == Role::Whole
                && first.checked_add(len).is_some_and(|end| end <= elements(part));
            if !fits || dtype.is_some_and(|d| d != part.dtype) {
                self.findings.push(
                    Finding::new(codes::PARTITION, "a partition does not hold what its place calls for")
                        .file(catalog.label(file))
                        .tensor(name)
                        .expected(
                            format!("elements {first}..{} of one dtype", first.saturating_add(len)),
                            format!("{} {:?} in {}", part.dtype, part.shape, part.path.join(".")),
                        )
                        .help("copy the file of this rank again: it is from another run"),
                );
                return None;
            }
            dtype = Some(part.dtype);
            if len > 0 {
                let blob = self.blob(index, file, part.blob);
                let offset = part.offset + first * part.dtype.size() as u64;
                pieces.push(RangePiece { start: at, len, blob, offset });
            }
            at = at.saturating_add(len);
        }
        if at != total {
            let finding = Finding::new(codes::HOLE, "elements that the ranks' partitions hold")
                .tensor(name)
                .expected(total, at)
                .help("copy the files of all ranks again; a partition is missing, or belongs to a run with another number of ranks");
            self.findings.push(finding.of_rank(&group.coords, &group.rank));
            return None;
        }
        Some(stored(name.into(), dtype?, shape[..].into(), Pieces::Ranges(pieces), group.rank.as_deref()))
    }

    /// A tensor made of boxes, which must cover each element once. Boxes without elements are nothing.
    fn assemble_boxes(
        &mut self,
        catalog: &Catalog,
        group: &AssembledSide,
        name: &str,
        shape: &[u64],
        chunks: &[Chunk],
    ) -> Option<StoredTensor> {
        let mut pieces: Vec<BoxPiece> = Vec::with_capacity(chunks.len());
        let mut boxes: Vec<(Vec<u64>, Vec<u64>)> = Vec::with_capacity(chunks.len());
        let mut dtype: Option<Dtype> = None;
        let mut covered = 0u64;
        for chunk in chunks {
            let Chunk(lo, len, index, number, first) = chunk;
            let file = file_of(catalog, *index)?;
            let part = file.parsed.tensors.get(*number as usize)?;
            if let Some(problem) = chunk.misfit(part, shape, dtype) {
                let finding = problem
                    .file(catalog.label(file))
                    .tensor(name)
                    .help("copy the metadata and the files from one save; these are of different saves");
                self.findings.push(finding.of_rank(&group.coords, &group.rank));
                return None;
            }
            dtype = Some(part.dtype);
            let count = element_count(len).unwrap_or(u64::MAX);
            if count > 0 {
                covered += count;
                let blob = self.blob(*index, file, part.blob);
                boxes.push((lo.clone(), lo.iter().zip(len).map(|(l, n)| l + n).collect()));
                let strides = if flat(part) { Few::default() } else { part.strides.clone() };
                let offset = part.offset + first.unwrap_or(0) * part.dtype.size() as u64;
                pieces.push(BoxPiece { lo: lo[..].into(), len: len[..].into(), blob, offset, strides });
            }
        }
        if let Some(finding) = not_tiled(shape, &boxes, covered) {
            self.findings.push(finding.tensor(name));
            return None;
        }
        let pieces = Pieces::Boxes(pieces);
        Some(stored(name.into(), dtype?, shape.into(), pieces, group.rank.as_deref()))
    }
}

impl Chunk {
    /// Why `part` cannot be this chunk of a tensor of `shape`, whose other chunks are of `dtype`.
    fn misfit(&self, part: &FileTensor, shape: &[u64], dtype: Option<Dtype>) -> Option<Finding> {
        let Chunk(lo, len, _, _, first) = self;
        let count = element_count(len).unwrap_or(u64::MAX);
        let is_inside = lo.len() == shape.len()
            && len.len() == shape.len()
            && (0..shape.len()).all(|d| lo[d].checked_add(len[d]).is_some_and(|end| end <= shape[d]));
        let holds =
            |first: u64| flat(part) && first.checked_add(count).is_some_and(|end| end <= elements(part));
        let finding = match (first, dtype) {
            _ if part.role != Role::Whole => {
                let message =
                    "a part of Transformer Engine's Float8Tensor is not read: each part has a separate scale";
                Finding::new(codes::UNSUPPORTED, message)
            }
            _ if !is_inside => Finding::new(codes::HOLE, "a chunk that leaves the tensor")
                .expected(format!("within {shape:?}"), format!("{len:?} from {lo:?}")),
            (Some(first), _) if !holds(*first) => {
                Finding::new(codes::PARTITION, "a flat vector does not hold what its place calls for")
                    .expected(format!("{count} elements from {first}"), format!("{:?}", part.shape))
            }
            (None, _) if part.shape != *len => Finding::new(codes::SHAPE, "shape of the chunk's record")
                .expected(format!("{len:?}"), format!("{:?}", part.shape)),
            (_, Some(dtype)) if dtype != part.dtype => {
                Finding::new(codes::DTYPE, "a chunk has the wrong dtype").expected(dtype, part.dtype)
            }
            _ => return None,
        };
        Some(finding)
    }
}

/// Why boxes with `covered` elements do not tile a tensor of `shape`.
fn not_tiled(shape: &[u64], boxes: &[(Vec<u64>, Vec<u64>)], covered: u64) -> Option<Finding> {
    if let Some((a, b)) = first_overlap(boxes) {
        return Some(
            Finding::new(codes::OVERLAP, "two chunks hold the same elements")
                .expected(
                    "each element in one chunk",
                    format!("chunks at {:?} and {:?}", boxes[a].0, boxes[b].0),
                )
                .help("copy the file again from the node that wrote it; the metadata is of two saves"),
        );
    }
    let total = element_count(shape).unwrap_or(u64::MAX);
    if covered == total {
        return None;
    }
    let starts: Vec<String> = boxes.iter().take(8).map(|b| format!("{:?}", b.0)).collect();
    Some(
        Finding::new(
            codes::HOLE,
            format!("{} of {total} elements are missing: no chunk covers them", total - covered),
        )
        .expected(format!("chunks that tile {shape:?}"), format!("chunks at {}", starts.join(", ")))
        .help("use another step: a rank's part was not saved, or the metadata was written before all ranks had saved"),
    )
}

impl Pass {
    fn add(&mut self, seen: Stored, index: u32) {
        self.seen.push(seen);
        self.tensors.push(index);
    }
}

fn file_of(catalog: &Catalog, index: u32) -> Option<&CatalogFile> {
    catalog.files.get(index as usize).and_then(Option::as_ref)
}

pub(super) fn stored(
    name: Name,
    dtype: Dtype,
    shape: Few<u64>,
    pieces: Pieces,
    rank: Option<&str>,
) -> StoredTensor {
    StoredTensor {
        name,
        dtype,
        shape,
        pieces,
        rank: rank.map(Box::from),
        rule: 0,
        index: Few::default(),
        shard: None,
        twins: Few::default(),
        changes: Box::default(),
    }
}

fn elements(tensor: &FileTensor) -> u64 {
    element_count(&tensor.shape).unwrap_or(0)
}

/// True if the tensor's elements lie one after another.
fn flat(tensor: &FileTensor) -> bool {
    tensor.strides == c_strides(&tensor.shape) || elements(tensor) <= 1
}
