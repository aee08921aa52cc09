//! The description of a result: its index, its manifest, and the identities of its files.

use std::collections::{BTreeMap, HashMap};

use super::options::Options;
use super::piece;
use super::uploads::Uploads;
use crate::codes::{self, Kind};
use crate::engine::Report;
use crate::error::{Finding, Result};
use crate::files;
use crate::format::{dcp, torch_zip, Frame};
use crate::hash;
use crate::manifest::{file_identity, Manifest, ManifestTensor};
use crate::plan::{Form, Output, Plan};
use crate::publish::OutFile;
use crate::storage::SourceFile;

/// The identity of each file, unless it is identified by its bytes. Torch files are read back for it.
pub(super) fn identities<'p>(
    plan: &'p Plan,
    by_file: &[Vec<usize>],
    frames: &[Frame],
    outs: &[Option<OutFile>],
    uploads: Option<&Uploads>,
    report: &Report,
) -> Result<HashMap<&'p str, String>> {
    let mut identities = HashMap::new();
    let files = plan.files.iter().zip(by_file).zip(frames).zip(outs).enumerate();
    for (number, (((file, inside), frame), out)) in files {
        if let Some(identity) = uploads.and_then(|uploads| uploads.files().identity(number)) {
            identities.insert(file.name.as_str(), identity);
            continue;
        }
        let identity = match &file.form {
            Form::Safetensors => {
                let header = blake3::hash(&frame.pieces[0].1[8..]);
                file_identity(header.as_bytes(), inside.iter().map(|&i| &report.outputs[i].hash))
            }
            // It names the other files' records, which are read back by their places.
            Form::Pickle(_) => continue,
            // Its tensors are checked whole: how a store divides them into files is its own affair.
            Form::Arrays(_) => continue,
            Form::Records(_) | Form::TorchZip(_) | Form::Overlay(_) => {
                let out = out.as_ref().expect("no array");
                read_back(plan, file, inside, &|i| report.outputs[i].hash, out)?
            }
        };
        identities.insert(file.name.as_str(), identity);
    }
    Ok(identities)
}

/// The index that names the file of each tensor.
pub(super) fn index(plan: &Plan) -> Vec<u8> {
    let total: u64 = plan.outputs.iter().map(Output::nbytes).sum();
    let map: BTreeMap<&str, &str> =
        plan.outputs.iter().map(|o| (o.name.as_str(), plan.files[o.file as usize].name.as_str())).collect();
    let json = serde_json::json!({"metadata": {"total_size": total}, "weight_map": map});
    serde_json::to_vec_pretty(&json).expect("plain data")
}

/// The manifest, except the list of files.
pub(super) fn manifest(plan: &Plan, report: &Report, options: &Options) -> Manifest {
    let mut manifest = Manifest::new(&plan.target);
    manifest.plan = plan.digest();
    if plan.target == piece::PIECE {
        // Its files are the sources.
        manifest.not_checked = vec![piece::NOT_CHECKED.into()];
    } else {
        manifest.sources = plan.sources.clone();
    }
    manifest.topology = plan.topology.clone();
    manifest.dimensions = plan.dimensions();
    manifest.value_ops = Manifest::ops_of(plan);
    manifest.values = options.values.clone();
    let settled = |note: &&Finding| options.expected && note.code.is_a(Kind::Unproven);
    let notes: Vec<&Finding> = plan.notes.iter().filter(|note| !settled(note)).collect();
    for note in notes.iter().filter(|note| note.code.is_a(Kind::Unproven)) {
        manifest.not_checked.push(note.message.clone());
    }
    let decided = &options.gate.decided;
    let same = |a: &Finding, b: &Finding| *a == Finding { decided: a.decided.clone(), ..b.clone() };
    let own = notes.into_iter().filter(|note| !decided.iter().any(|other| same(note, other)));
    manifest.findings = own.chain(&report.findings).chain(decided).cloned().collect();
    manifest.tensors = plan
        .outputs
        .iter()
        .zip(&report.outputs)
        .map(|(o, r)| ManifestTensor {
            name: o.key().to_string(),
            dtype: o.dtype,
            shape: o.shape.to_vec(),
            file: plan.files[o.file as usize].name.clone(),
            offset: match plan.files[o.file as usize].form {
                Form::Arrays(_) => None,
                _ => Some(o.offset),
            },
            blake3: hash::hex(&r.hash),
            stats: r.seen.stats().cloned(),
        })
        .collect();
    manifest
}

/// Identity of a torch file, from what a reader finds in it; so it is also known to be readable. `hash_of` gives the hash of
/// an output.
pub(super) fn read_back(
    plan: &Plan,
    file: &crate::plan::OutFile,
    inside: &[usize],
    hash_of: &dyn Fn(usize) -> [u8; 32],
    out: &OutFile,
) -> Result<String> {
    let source = SourceFile::open(out.path())?;
    let parsed = match &file.form {
        Form::Records(_) => {
            let outputs: Vec<&Output> = inside.iter().map(|&i| &plan.outputs[i]).collect();
            dcp::records(&source, &files::tensor_records(file, &outputs)?)?
        }
        _ => torch_zip::parse(&source)?,
    };
    let by_key: HashMap<&str, usize> = inside.iter().map(|&i| (plan.outputs[i].key(), i)).collect();
    let mut hashes = Vec::with_capacity(inside.len());
    for tensor in &parsed.tensors {
        let key = tensor.path.join(".");
        let place = parsed.blobs[tensor.blob as usize].offset + tensor.offset;
        // A second name of a tensor has no output of its own.
        if let Some(&i) = by_key.get(key.as_str()) {
            let want = &plan.outputs[i];
            if (tensor.dtype, &tensor.shape, place) != (want.dtype, &want.shape, want.offset) {
                return Err(Finding::new(codes::IO, "the file just written reads back otherwise")
                    .file(out.path())
                    .tensor(key)
                    .expected(
                        format!("{} {:?} at {}", want.dtype, want.shape, want.offset),
                        format!("{} {:?} at {place}", tensor.dtype, tensor.shape),
                    )
                    .into());
            }
            hashes.push(hash_of(i));
        }
    }
    if hashes.len() != inside.len() {
        return Err(Finding::new(codes::IO, "tensors of the file just written")
            .file(out.path())
            .expected(inside.len(), hashes.len())
            .into());
    }
    Ok(file_identity(&parsed.header_digest, hashes.iter()))
}
