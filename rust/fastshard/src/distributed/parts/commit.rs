//! Commits a run: judges the output of its parts, makes the remaining tiles, and publishes.

use std::collections::BTreeSet;
use std::path::Path;

use super::super::foresee::foresee;
use super::super::member::Log;
use super::super::prior::Prior;
use super::super::rounds::{Claimed, Shared};
use super::super::share;
use super::earlier::{spot_check, Earlier};
use super::{data_files, is_array, missing_parts, refuse_living, work_of};
use crate::codes;
use crate::engine::{self, Evidence};
use crate::error::{Error, Finding, Result};
use crate::manifest::{Maker, Manifest, Provenance, MANIFEST_NAME};
use crate::plan::tiles::Share;
use crate::plan::{Form, OutFile, Plan};
use crate::publish::clock::Clock;
use crate::publish::{self, Space, Staging};
use crate::topics;
use crate::write::complete::{complete, roll_forward};
use crate::write::options::{document, engine_options, Run};
use crate::write::resume::resumable;

/// Concludes a run whose parts are all made: judges their evidence, makes the remaining tiles, and publishes.
///
/// # Errors
/// As [`crate::write::write`]; `FS523` if a part is missing.
pub fn conclude(
    run: &Run<'_>,
    staging: Staging,
    shared: &Shared,
    findings: Vec<Finding>,
) -> Result<(Manifest, Vec<Finding>)> {
    let Run { plan, files, options, control, .. } = *run;
    let mut staging = staging;
    log::debug!(target: topics::PROCESSES, "concludes run {}", shared.run.nonce);
    let gathered = gather(plan, &mut staging, shared, &options.patience.clock).and_then(|prior| {
        // What nobody had a part of: stores of arrays.
        let tiles = share::all_tiles(plan, &prior.sizes, &|output| !is_array(plan, output));
        foresee(plan, files, &prior.sizes, &Share { tiles, pads: Vec::new() }, control)?;
        Ok(prior)
    });
    let prior = match gathered {
        Ok(prior) => prior,
        Err(error) => return Err(resumable(error, staging.folder())),
    };
    complete(run, staging, Some(&prior), findings)
}

/// Concludes the run called `nonce`, as a process that has not begun it.
///
/// # Errors
/// As [`conclude`]; `FS501` if the run does not exist.
pub fn commit(run: &Run<'_>, nonce: &str) -> Result<(Manifest, Vec<Finding>)> {
    let Run { plan, out, .. } = *run;
    let shared = Shared::enter(out, &plan.digest(), &document(plan), Some(nonce))?;
    let done = commit_found(run, &shared);
    done.or_else(|error| unless_published(out, &shared.run.nonce, error))
}

/// An error of this process, unless others have published the run called `nonce` without it, because it was
/// abandoned or slower.
pub(crate) fn unless_published(out: &Path, nonce: &str, error: Error) -> Result<(Manifest, Vec<Finding>)> {
    let ours =
        |manifest: &Manifest| manifest.provenance.as_ref().is_some_and(|provenance| provenance.run == nonce);
    match Manifest::read(&out.join(MANIFEST_NAME)) {
        Ok(manifest) if !error.is_interrupt() && !error.is_after_publishing() && ours(&manifest) => {
            let message = "other processes completed the result without this one";
            Ok((manifest, vec![Finding::new(codes::PUBLISHED, message).file(out)]))
        }
        _ => Err(error),
    }
}

fn commit_found(run: &Run<'_>, shared: &Shared) -> Result<(Manifest, Vec<Finding>)> {
    let Run { plan, out, options, control, .. } = *run;
    let digest = plan.digest();
    engine::admit(plan, &engine_options(run, shared.path()))?;
    let publish = publish::Options { resume: true, ..options.publish };
    let staging = Staging::begin(out, &digest, &document(plan), &publish)?;
    let findings = staging.left_beside(plan.version);
    if staging.sealed() {
        return roll_forward(run, staging, findings);
    }
    if staging.shared()?.is_none_or(|now| now.run.nonce != shared.run.nonce) {
        // Another process has published it since it was looked at, and what is here now was made just now.
        if !staging.resumed() {
            staging.discard()?;
        }
        Shared::enter(out, &digest, &document(plan), Some(&shared.run.nonce))?;
        return Err(Finding::new(codes::LOCKED, "another process finished this run and began it again")
            .file(shared.path())
            .into());
    }
    refuse_living(shared, &options.patience, control)?;
    conclude(run, staging, shared, findings)
}

/// Takes over the run, and combines the output of its parts.
fn gather(plan: &Plan, staging: &mut Staging, shared: &Shared, clock: &Clock) -> Result<Prior> {
    let sizes = work_of(shared)?.sizes();
    if let Some(round) = shared.round()? {
        refuse_missing(shared, &missing_parts(shared, &round)?)?;
    }
    let claimed = shared.claim()?;
    let member = shared.preside(&claimed, clock)?;
    staging.enter(&claimed, Some(&member));
    let mut remade = BTreeSet::new();
    for (number, file) in data_files(plan) {
        if !staging.has(&file.name, file.size)? {
            remade.insert(number);
        }
    }
    let earlier = Earlier::of(plan, shared, claimed, &remade)?;
    refuse_missing(shared, &earlier.missing)?;
    let adopted = earlier.adopted_logs();
    let evidence = adopted.iter().map(|log| evidence_of(shared, log)).collect::<Result<_>>()?;
    let complete = complete_files(plan, &sizes, &earlier, &remade);
    let open = data_files(plan).map(|(number, _)| number).filter(|number| !complete[*number as usize]);
    member.note_open(open)?;
    for log in &adopted {
        for edge in &log.edges {
            let file = &plan.files[edge.file as usize];
            let bytes = log.edge(edge)?;
            staging.file(&file.name, file.size, Space::Sparse)?.write_all_at(edge.offset, &bytes)?;
        }
    }
    for log in &adopted {
        spot_check(plan, shared, &earlier.claimed, log, &sizes)?;
    }
    let provenance = provenance(plan, &sizes, shared, &earlier)?;
    let adopted = adopted.iter().map(|log| log.nonce.clone()).collect();
    let Claimed { logs, .. } = earlier.claimed;
    staging.accompany(member);
    Ok(Prior { logs, adopted, evidence, sizes, complete, provenance })
}

fn evidence_of(shared: &Shared, log: &Log) -> Result<Evidence> {
    serde_json::from_slice(&shared.evidence(log)?).map_err(|e| {
        let what = format!("what a part has learnt cannot be read ({e})");
        Finding::new(codes::LEFTOVER_RUN, what).into()
    })
}

/// The complete files, all of whose tensors parts made in pages that no two parts share.
fn complete_files(plan: &Plan, sizes: &[u64], earlier: &Earlier, remade: &BTreeSet<u32>) -> Vec<bool> {
    let mut done = vec![0; plan.files.len()];
    for run in earlier.adopted.iter().flat_map(|(_, share)| &share.tiles) {
        let output = &plan.outputs[run.output as usize];
        let (lo, hi) = run.span(sizes[run.output as usize], output.nbytes());
        done[output.file as usize] += hi - lo;
    }
    let mut wanted = vec![0; plan.files.len()];
    plan.outputs.iter().for_each(|output| wanted[output.file as usize] += output.nbytes());
    let adopted = earlier.adopted_logs();
    let edged: BTreeSet<u32> = adopted.iter().flat_map(|log| &log.edges).map(|edge| edge.file).collect();
    let is_complete = |(number, file): (u32, &OutFile)| {
        let i = number as usize;
        // Files that name checksums of their members get these at the end.
        matches!(file.form, Form::Safetensors)
            && done[i] == wanted[i]
            && !edged.contains(&number)
            && !remade.contains(&number)
    };
    (0u32..).zip(&plan.files).map(is_complete).collect()
}

/// The makers of the parts, for the manifest.
fn provenance(plan: &Plan, sizes: &[u64], shared: &Shared, earlier: &Earlier) -> Result<Provenance> {
    let maker = |log: &Log, share: &Share| {
        let who = log.who.as_ref();
        Maker {
            part: who.and_then(|who| who.part),
            round: who.map_or(0, |who| who.round),
            host: who.map(|who| who.process.host.clone()).unwrap_or_default(),
            bytes: share.bytes(plan, sizes),
        }
    };
    let made_by = earlier.adopted.iter().filter_map(|(nonce, share)| Some(maker(earlier.log(nonce)?, share)));
    let about = work_of(shared)?.about;
    let digests = about.get("asked").and_then(|digests| serde_json::from_value(digests.clone()).ok());
    Ok(Provenance {
        run: shared.run.nonce.clone(),
        parts: made_by.collect(),
        request_digests: digests.unwrap_or_default(),
    })
}

fn refuse_missing(shared: &Shared, missing: &[u32]) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    let logs = shared.logs()?;
    let finding = |part: &u32| {
        let last = logs.iter().filter_map(|log| log.who.as_ref()).rfind(|who| who.part == Some(*part));
        let mut finding = Finding::new(codes::PART_MISSING, "this part of the run did not finish")
            .file(shared.path())
            .rank(format!("rank {part}"))
            .help("make it (make-part)");
        finding.host = last.map(|who| who.process.host.clone());
        finding
    };
    Err(missing.iter().map(finding).collect::<Vec<_>>().into())
}
