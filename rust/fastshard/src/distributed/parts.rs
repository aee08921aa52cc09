//! One run by several processes: begun by one, its parts made by any, committed by one. The protocol between them is
//! that of [`super::rounds`]; what the parts hold is put together as if one process had made all.

mod commit;
mod earlier;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::foresee::foresee;
use super::member::{Log, Member, Who};
use super::pages::Pages;
use super::part_sink::PartSink;
use super::rounds::{Joined, Round, Shared};
use super::share;
use crate::codes;
use crate::engine::{self, Control};
use crate::error::{Error, Finding, Result};
use crate::manifest::Manifest;
use crate::plan::tiles::{Share, TileRun};
use crate::plan::{Form, OutFile, Plan};
use crate::publish::clock::Patience;
use crate::publish::{self, Staging};
use crate::storage::only_read;
use crate::topics;
use crate::write::frames::frames;
use crate::write::options::{document, engine_options, needs, Run};
use crate::write::records::{Claims, TileJournal};
use crate::write::resume::resumable;
pub(crate) use commit::unless_published;
pub use commit::{commit, conclude};
use earlier::{is_of, spot_check, Earlier};

/// Bytes that are read at a time.
const CHUNK: usize = 1 << 20;
/// Largest tile if ranks make tiles from their own disks, in bytes: the smaller, the fewer tiles need several
/// disks.
const NEAR_TILE: u64 = 256 << 10;
/// The arguments of the parts: digests of the files of each rank, if the files are on the ranks' own disks.
const STAMPS: &str = "stamps";

/// The work, as it is recorded once for all rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Work {
    /// Size of tiles, and the number of consecutive outputs that have it.
    sizes: Vec<(u64, u32)>,
    /// The arguments of the parts, in the form of the process that began the run.
    about: serde_json::Value,
}

impl Work {
    fn sizes(&self) -> Vec<u64> {
        self.sizes.iter().flat_map(|&(size, n)| std::iter::repeat_n(size, n as usize)).collect()
    }
}

fn in_runs(sizes: &[u64]) -> Vec<(u64, u32)> {
    sizes.chunk_by(|a, b| a == b).map(|same| (same[0], same.len() as u32)).collect()
}

/// The division of work in a round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Division {
    shares: Vec<Share>,
    /// Members of earlier rounds whose work counts unchanged, and their work.
    adopted: Vec<(String, Share)>,
}

impl Division {
    fn of(round: &Round) -> Result<Division> {
        serde_json::from_value(round.work.clone()).map_err(|e| {
            Finding::new(codes::INTERNAL, format!("the division of the work cannot be read ({e})")).into()
        })
    }
}

fn work_of(shared: &Shared) -> Result<Work> {
    serde_json::from_value(shared.run.work.clone()).map_err(|e| {
        Error::from(
            Finding::new(codes::LEFTOVER_RUN, format!("what is made cannot be read ({e})"))
                .file(shared.path())
                .help("start afresh: remove the directory, which another version wrote"),
        )
    })
}

/// A run that has begun: its files exist, and its first or next round is open.
#[derive(Debug)]
pub struct Begun {
    /// The staging folder, held while nobody else may conclude the run.
    pub staging: Staging,
    /// The run.
    pub shared: Shared,
    /// The open round; none if the result is already complete and must only be published.
    pub round: Option<Round>,
    /// Bytes that each part makes.
    pub bytes: Vec<u64>,
    /// The findings.
    pub findings: Vec<Finding>,
}

/// Begins a run of `parts` parts, or with `resume` the next round of one: checks the destination, makes all
/// files at their full size, and divides the work.
///
/// `about` has the arguments of the parts and is stored for them. Members that may be at work have the
/// options' `patience` to show a sign of life.
///
/// # Errors
/// As [`crate::write::write`]; `FS509` if processes are at work on the run; `FS515` without syncing to disk.
pub fn begin(run: &Run<'_>, parts: usize, about: serde_json::Value) -> Result<Begun> {
    let Run { plan, roots, out, options, .. } = *run;
    let digest = plan.digest();
    if !options.publish.fsync {
        return Err(Finding::new(codes::USAGE, "what several processes write is brought to disk")
            .expected("--fsync full", "none")
            .into());
    }
    if plan.files.iter().any(|f| matches!(f.form, Form::Overlay(_))) {
        return Err(Finding::new(
            codes::UNSUPPORTED,
            "files with a few bytes replaced are made by one process",
        )
        .into());
    }
    engine::admit(plan, &engine_options(run, out))?;
    publish::preflight(out, roots, &digest, &needs(run), &options.publish)?;
    let mut staging = Staging::begin(out, &digest, &document(plan), &options.publish)?;
    let mut findings = staging.left_beside(plan.version);
    findings.extend(staging.forecast());
    let found = staging.shared()?;
    if staging.sealed() {
        let Some(shared) = found else {
            return Err(Finding::new(
                codes::LEFTOVER_RUN,
                "the run is complete already and was made by one process",
            )
            .file(staging.folder())
            .help("run the same command without --rank, with --resume, to put it in place")
            .into());
        };
        return Ok(Begun { staging, shared, round: None, bytes: Vec::new(), findings });
    }
    match prepare(run, &mut staging, found, parts, about) {
        Ok((shared, round, bytes)) => Ok(Begun { staging, shared, round: Some(round), bytes, findings }),
        Err(error) => {
            // What an earlier run has made stays; a folder made just now holds nothing of value.
            let resumed = staging.resumed();
            match if resumed { Ok(()) } else { staging.discard() } {
                Ok(()) => Err(error),
                Err(second) => {
                    let mut all = error.into_findings();
                    all.extend(second.into_findings());
                    Err(all.into())
                }
            }
        }
    }
}

fn prepare(
    run: &Run<'_>,
    staging: &mut Staging,
    found: Option<Shared>,
    parts: usize,
    about: serde_json::Value,
) -> Result<(Shared, Round, Vec<u64>)> {
    let Run { plan, files, options, control, .. } = *run;
    let shared = match found {
        Some(shared) => {
            refuse_living(&shared, &options.patience, control)?;
            refuse_touched(&shared, &about)?;
            shared
        }
        None => {
            let mut sizes = share::tiling(plan, &engine_options(run, staging.folder()))?;
            if options.near.is_some() {
                sizes.iter_mut().for_each(|size| *size = (*size).min(NEAR_TILE));
            }
            let named = plan.files.iter().map(|f| (f.name.clone(), f.size)).collect();
            let work = Work { sizes: in_runs(&sizes), about };
            staging.share(named, serde_json::to_value(work).expect("plain data"))?
        }
    };
    let sizes = work_of(&shared)?.sizes();
    let claimed = shared.claim()?;
    staging.enter(&claimed, None);
    let member = shared.preside(&claimed, &options.patience.clock)?;
    let result = make_files(run, staging, &member);
    member.leave();
    let remade = result?;
    let earlier = Earlier::of(plan, &shared, claimed, &remade)?;
    let sound = |log: &Log| spot_check(plan, &shared, &earlier.claimed, log, &sizes).is_ok();
    let mut adopted = earlier.adopted.clone();
    adopted.retain(|(nonce, _)| earlier.log(nonce).is_some_and(sound));
    let done: Vec<TileRun> = adopted.iter().flat_map(|(_, share)| share.tiles.iter().copied()).collect();
    let all = share::all_tiles(plan, &sizes, &|output| is_array(plan, output));
    let left = share::without(&all, &done);
    let mut shares = match &options.near {
        Some(ranks) => share::divide_near(plan, files, &sizes, &left, ranks, parts),
        None => share::divide(plan, &sizes, &left, parts),
    };
    if !adopted.is_empty() {
        // Those who are adopted have looked at theirs; whoever concludes looks at the rest, which is little.
        shares.iter_mut().for_each(|share| share.pads.clear());
    }
    let bytes: Vec<u64> = shares.iter().map(|share| share.bytes(plan, &sizes)).collect();
    let work = serde_json::to_value(Division { shares, adopted }).expect("plain data");
    let round = shared.open_round(&earlier.claimed, parts as u32, work)?;
    log::debug!(
        target: topics::PROCESSES,
        "begins round {} of run {} in {:?}: {parts} parts of {bytes:?} bytes",
        round.number,
        shared.run.nonce,
        shared.path(),
    );
    Ok((shared, round, bytes))
}

/// Files that are made before any part begins, with their numbers.
fn data_files(plan: &Plan) -> impl Iterator<Item = (u32, &OutFile)> {
    (0u32..).zip(&plan.files).filter(|(_, file)| !matches!(file.form, Form::Arrays(_)))
}

/// True for stores of arrays, which the process that concludes the run writes: one process encodes and
/// indexes them.
fn is_array(plan: &Plan, output: usize) -> bool {
    matches!(plan.files[plan.outputs[output].file as usize].form, Form::Arrays(_))
}

fn refuse_living(shared: &Shared, patience: &Patience, control: &Control) -> Result<()> {
    let alive = shared.alive(patience, &|| control.is_running())?;
    control.check_running()?;
    if alive.is_empty() {
        return Ok(());
    }
    let who: Vec<String> = alive.iter().map(Who::describe).collect();
    Err(Finding::new(codes::LOCKED, "processes are at work on this run")
        .file(shared.path())
        .expected("none", who.join(", "))
        .help("wait for them, or stop them; then continue the run")
        .run("--resume")
        .into())
}

/// Refuses to continue with work on files whose status has changed since, if nobody can read them all again.
fn refuse_touched(shared: &Shared, about: &serde_json::Value) -> Result<()> {
    let (then, now) = (work_of(shared)?.about.get(STAMPS).cloned(), about.get(STAMPS));
    match (then, now) {
        // Without, nobody knows what they were: it was begun on several hosts, and goes on with their files alone.
        (Some(then), now) if Some(&then) != now => Err(Finding::new(
            codes::LEFTOVER_RUN,
            "source files are not as they were when this run was begun, by their status: what was made of them may be of other content",
        )
        .file(shared.path())
        .help("start afresh: remove the directory, and run again without --resume")
        .into()),
        _ => Ok(()),
    }
}

/// Makes all data files at their full size, with the content around the tensors, and returns the new ones.
/// `member` is this process: if it is stopped here, it may continue after others have published the files
/// that it has open.
fn make_files(run: &Run<'_>, staging: &Staging, member: &Member) -> Result<BTreeSet<u32>> {
    let Run { plan, files, options, control, .. } = *run;
    let data = || data_files(plan);
    member.note_open(data().map(|(number, _)| number))?;
    staging.keep_only(&data().map(|(_, f)| f.name.as_str()).collect())?;
    let frames = frames(plan, &plan.by_file(), files)?;
    let space = options.publish.space();
    let mut remade = BTreeSet::new();
    for (number, file) in data() {
        control.check_running()?;
        let staged_file = staging.file(&file.name, file.size, space)?;
        if !staged_file.kept() {
            remade.insert(number);
        }
        // Of one that was there too: whoever made it may have gone before it came to this.
        let frame = &frames[number as usize];
        frame.pieces.iter().try_for_each(|(at, bytes)| staged_file.write_all_at(*at, bytes))?;
        staged_file.sync()?;
    }
    member.note_closed(data().map(|(number, _)| number))?;
    Ok(remade)
}

/// Whether a part was made now or before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartOutcome {
    /// This process has made it.
    Now,
    /// It was made before.
    Before,
}

/// Makes a part of a round. A process that had begun it is replaced if it shows no sign of life for the
/// options' `patience`.
///
/// # Errors
/// As [`crate::write::write`]; `FS509` if another process makes this part, or if the round is over.
pub fn make_part(run: &Run<'_>, shared: &Shared, round: &Round, part: u32) -> Result<PartOutcome> {
    let Run { plan, files, roots, out, options, control } = *run;
    let division = Division::of(round)?;
    let sizes = work_of(shared)?.sizes();
    let Some(share) = division.shares.get(part as usize) else {
        return Err(Finding::new(codes::USAGE, "there is no such part")
            .file(shared.path())
            .expected(format!("0 to {}", division.shares.len().saturating_sub(1)), part)
            .into());
    };
    publish::preflight_part(out, roots, &plan.digest(), &needs(run))?;
    let logs = shared.logs()?;
    let is_first = round.number == 1 && !logs.iter().any(|log| is_of(log, 1, part));
    let member = match shared.join(round, part, &options.patience, &|| control.is_running())? {
        Joined::Done(_) => return Ok(PartOutcome::Before),
        Joined::Member(member) => member,
    };
    log::debug!(
        target: topics::PROCESSES,
        "makes part {part} of round {} of run {}: {} bytes",
        round.number,
        shared.run.nonce,
        share.bytes(plan, &sizes),
    );
    let pages = Pages::of(plan, &sizes, &division.shares);
    // What others of this round are making is not this part's.
    let earlier = |log: &&Log| {
        log.who.as_ref().is_some_and(|who| who.round < round.number) || is_of(log, round.number, part)
    };
    let journals = logs
        .iter()
        .filter(earlier)
        .map(|log| TileJournal { journal: &log.journal, adopted: false })
        .collect();
    let claims = Claims::of(journals, plan.outputs.len(), &|output| plan.outputs[output].file)?;
    let sink = PartSink::new(run, &member, &pages, claims, &sizes, share, is_first)?;
    let engine_options = engine::Options { encodes: 0, ..engine_options(run, shared.path()) };
    let result = foresee(plan, files, &sizes, share, control)
        .and_then(|()| {
            sink.flush_during(control, || {
                engine::work(plan, files, &sink, &engine_options, &sizes, share, control)
            })
        })
        .and_then(|evidence| {
            files.iter().try_for_each(|f| f.unchanged())?;
            only_read(files)?;
            Ok(evidence)
        });
    // On the descriptors that wrote: others may not be told of a write that failed.
    let closed = sink.close();
    drop(sink);
    match result.and_then(|evidence| closed.map(|()| evidence)) {
        Ok(evidence) => {
            member.done(&serde_json::to_vec(&evidence).expect("plain data"))?;
            log::debug!(target: topics::PROCESSES, "part {part} is complete");
            Ok(PartOutcome::Now)
        }
        Err(error) => {
            member.leave();
            Err(error)
        }
    }
}

/// Parts of a round that nobody has finished yet, in order.
///
/// # Errors
/// Errors of the system.
pub fn missing_parts(shared: &Shared, round: &Round) -> Result<Vec<u32>> {
    let done = shared.done_parts(round.number)?;
    Ok((0..round.parts).filter(|part| !done.contains(part)).collect())
}

/// Continues a run of several processes as its only process: makes the remaining tiles, and publishes.
///
/// # Errors
/// As [`crate::write::write`].
pub(crate) fn go_on_alone(
    run: &Run<'_>,
    mut staging: Staging,
    shared: Shared,
    findings: Vec<Finding>,
) -> Result<(Manifest, Vec<Finding>)> {
    let folder = staging.folder().to_path_buf();
    log::debug!(target: topics::PROCESSES, "goes on alone with run {} of several processes", shared.run.nonce);
    let part = |staging: &mut Staging| -> Result<Shared> {
        let about = serde_json::Value::Null;
        let (shared, round, _) = prepare(run, staging, Some(shared), 1, about)?;
        make_part(run, &shared, &round, 0)?;
        Ok(shared)
    };
    match part(&mut staging) {
        Ok(shared) => conclude(run, staging, &shared, findings),
        Err(error) => Err(resumable(error, &folder)),
    }
}
