//! Rebuilds fp32 master weights from the parameters, in the optimizer files' own layout.
//!
//! The files stay what they are: the original zip with the payloads of some storages, and their checksums,
//! replaced. Pickles are only read inertly; of their bytes only numbers that count steps change, to zero in
//! the same width.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;

use crate::catalog::{Catalog, CatalogFile};
use crate::codes;
use crate::draft::Planned;
use crate::error::{Finding, Result, Severity};
use crate::format::torch_zip;
use crate::plan::{
    Combine, Fill, Form, OutFile, Output, Part, PartAxis, Pieces, Plan, StoredTensor, PLAN_VERSION,
};
use crate::request::{Gathered, Request};
use crate::tensor::{c_strides, element_count, Dtype};
use crate::unwritten::find_unwritten;

/// The data to rebuild.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repair {
    /// Files with master weights.
    pub files: Vec<RepairFile>,
    /// Small text files to write in addition.
    #[serde(default)]
    pub texts: BTreeMap<String, String>,
    /// Top-level names that appear after all others, the last of them the one that readers start from; by default the
    /// first file's.
    #[serde(default)]
    pub pointers: Vec<String>,
}

/// A file to rebuild.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RepairFile {
    /// Index in the catalog.
    pub file: u32,
    /// Path in the result.
    pub name: String,
    /// Tensors that hold master weights: all their elements come from parameters, and padding is zero.
    pub masters: Vec<u32>,
    /// Tensors to set to zero: moments and steps.
    pub zero: Vec<u32>,
    /// Numbers to set to zero: keys that lead to steps in the pickle itself.
    #[serde(default)]
    pub numbers: Vec<Vec<String>>,
}

/// A range of a master weight's storage, in bytes, and the place of its values.
#[derive(Clone, Copy)]
struct Source {
    len: u64,
    stored: u32,
    first: u64,
}

/// Plans the repair of a checkpoint whose parameters and master weights `request` declares.
///
/// # Errors
/// A request that cannot be used. What is wrong with the checkpoint comes as findings.
pub fn plan(catalog: &Catalog, request: &Request, repair: &Repair) -> Result<Planned> {
    let mut all = Gathered::new(catalog, request, false);
    let mut findings = std::mem::take(&mut all.findings);
    let values = values_of_masters(&mut all, &mut findings);
    let mut plan = Plan {
        version: PLAN_VERSION,
        target: "repair".into(),
        words: catalog.words.clone(),
        ..Plan::default()
    };
    for side in &repair.files {
        let Some(Some(file)) = catalog.files.get(side.file as usize) else { continue };
        let label = catalog.label(file);
        let source = all.source(side.file, file);
        let outputs = side.outputs(file, &label, &mut all, &values, plan.files.len() as u32, &mut findings);
        let zeros = match side.numbers.is_empty() {
            true => Ok(Vec::new()),
            false => torch_zip::numbers(&file.source, &side.numbers),
        };
        let zeros = zeros.unwrap_or_else(|error| {
            findings.extend(error.findings().iter().cloned().map(|mut finding| {
                finding.file = Some(label.clone());
                finding.help = Some("leave the optimizer's state out (--drop-optimizer) and load with load_module_only=True: zero moments with a step that is not zero would make the first updates too large".into());
                finding
            }));
            Vec::new()
        });
        plan.files.push(OutFile {
            name: side.name.clone(),
            header_len: outputs.first().map_or(0, |o| o.offset),
            size: file.source.size(),
            form: Form::Overlay(source),
            zeros,
        });
        plan.outputs.extend(outputs);
    }
    plan.rules = vec!["masters".into()];
    (plan.sources, plan.blobs, plan.stored) = (all.sources, all.blobs, all.stored);
    plan.texts = repair.texts.clone();
    plan.point(repair.pointers.clone());
    plan.topology = request.source.binding.degrees.clone();
    plan.roots = catalog.root_names();
    findings.extend(find_unwritten(catalog, &plan, request.source.allowances.holes));
    findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
    plan.notes = findings.iter().filter(|f| f.severity != Severity::Error).cloned().collect();
    Ok(Planned { plan, findings })
}

/// The places of the values of master weights: for each storage, the ranges that parameters hold, by their
/// first byte.
type Values = HashMap<u32, BTreeMap<u64, Source>>;

/// Adds flat views of the parameters, as master weights are flat, and returns the ranges of master weights
/// that they hold.
fn values_of_masters(all: &mut Gathered, findings: &mut Vec<Finding>) -> Values {
    let mut values = Values::new();
    for index in 0..all.stored.len() {
        let twins = std::mem::take(&mut all.stored[index].twins);
        if twins.is_empty() {
            continue;
        }
        let Some(flat) = flat(&all.stored[index]) else {
            let tensor = &all.stored[index];
            findings.push(
                Finding::new(codes::UNSUPPORTED, "a parameter whose elements do not lie one after another")
                    .tensor(&tensor.name)
                    .help("save the checkpoint with contiguous parameters"),
            );
            continue;
        };
        let stored = all.stored.len() as u32;
        all.stored.push(flat);
        for &master in &twins {
            let Pieces::Ranges(ranges) = &all.stored[master as usize].pieces else { continue };
            for range in ranges {
                let source = Source { len: range.len, stored, first: range.start };
                // A tied parameter has one master under all its names.
                values.entry(range.blob).or_default().entry(range.offset).or_insert(source);
            }
        }
    }
    values
}

impl RepairFile {
    /// The replaced tensors of the file, in its order. `number` is the file's number in the plan.
    fn outputs(
        &self,
        file: &CatalogFile,
        label: &str,
        all: &mut Gathered,
        values: &Values,
        number: u32,
        findings: &mut Vec<Finding>,
    ) -> Vec<Output> {
        let wanted = self.masters.iter().map(|t| (*t, true)).chain(self.zero.iter().map(|t| (*t, false)));
        let mut outputs = Vec::new();
        for (tensor, is_master) in wanted {
            let Some(tensor) = file.parsed.tensors.get(tensor as usize) else { continue };
            let blob = all.blob(self.file, file, tensor.blob);
            let shape = tensor.shape.clone();
            let key = tensor.path.join(".");
            let elements = element_count(&shape).unwrap_or(0);
            let refused = |code, what: &str| Finding::new(code, what).file(label).tensor(&key);
            if elements > 1 && tensor.strides != c_strides(&shape) {
                let what = "a view whose elements do not lie one after another";
                findings.push(refused(codes::UNSUPPORTED, what));
                continue;
            }
            let parts = match values.get(&blob) {
                Some(ranges) if is_master => parts(ranges, tensor.offset, elements, tensor.dtype),
                _ => Vec::new(),
            };
            if is_master && parts.is_empty() && elements > 0 {
                let what = "no stored parameter is the source of this master";
                let help = "copy the model file of this rank again; it is missing, or holds other parameters";
                findings.push(refused(codes::MISSING_TENSOR, what).help(help));
                continue;
            }
            outputs.push(Output {
                name: format!("{}: {key}", self.name).into(),
                key: Some(key.into()),
                dtype: tensor.dtype,
                shape,
                parts: parts.into(),
                fill: Fill::Zero,
                file: number,
                offset: file.parsed.blobs[tensor.blob as usize].offset + tensor.offset,
            });
        }
        outputs.sort_by_key(|o| (o.offset, o.nbytes()));
        let overlap =
            |pair: &[Output]| pair[0].offset + pair[0].nbytes() > pair[1].offset && pair[0].nbytes() > 0;
        findings.extend(outputs.windows(2).filter(|pair| overlap(pair)).map(|pair| {
            Finding::new(codes::OVERLAP, "two tensors of the optimizer share their elements")
                .file(label)
                .tensor(pair[1].key())
                .expected("a separate element", format!("those of {}", pair[0].key()))
        }));
        outputs
    }
}

/// Plans the comparison of every parameter with its master weights, whatever the model's layout is.
pub fn compare(catalog: &Catalog, request: &Request) -> Planned {
    let all = Gathered::new(catalog, request, false);
    let mut plan = Plan {
        version: PLAN_VERSION,
        target: "masters".into(),
        sources: all.sources,
        blobs: all.blobs,
        stored: all.stored,
        layers_may_repeat: request.source.allowances.layers_may_repeat,
        untied: false,
        copies_accepted: request.source.allowances.copies.clone(),
        non_finite_accepted: request.source.allowances.non_finite,
        roots: catalog.root_names(),
        words: catalog.words.clone(),
        ..Plan::default()
    };
    let compared: Vec<bool> = plan.stored.iter().map(|t| !t.twins.is_empty()).collect();
    let outputs = plan.identity_outputs().into_iter().zip(compared);
    plan.outputs = outputs.filter(|(_, twins)| *twins).map(|(output, _)| output).collect();
    let mut findings = all.findings;
    findings.extend(find_unwritten(catalog, &plan, request.source.allowances.holes));
    Planned { plan, findings }
}

/// A parameter as one dimension, if its elements lie one after another.
fn flat(tensor: &StoredTensor) -> Option<StoredTensor> {
    let Pieces::View { blob, offset, strides } = &tensor.pieces else { return None };
    let elements = element_count(&tensor.shape)?;
    if elements > 1 && *strides != c_strides(&tensor.shape) {
        return None;
    }
    let pieces = Pieces::View { blob: *blob, offset: *offset, strides: [1].into() };
    Some(StoredTensor {
        shape: [elements].into(),
        pieces,
        twins: Default::default(),
        shard: None,
        ..tensor.clone()
    })
}

/// The parts of a flat master weight at byte `offset` of its storage.
fn parts(ranges: &BTreeMap<u64, Source>, offset: u64, elements: u64, dtype: Dtype) -> Vec<Part> {
    let item = dtype.size() as u64;
    let within = ranges.range(offset..offset + elements * item);
    within
        .map(|(at, source)| Part {
            axes: [PartAxis { n: source.len, dst: 1, dim: 0, step: 1 }].into(),
            dst_base: (at - offset) / item,
            src_base: [source.first].into(),
            sources: [source.stored].into(),
            combine: Combine::Equal,
            ops: Default::default(),
        })
        .collect()
}
