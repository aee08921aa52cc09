//! One run by several processes: begun by one, its parts made by any, concluded by one. The protocol between them is
//! that of [`super::rounds`]; what the parts hold is put together as if one process had made all.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::foresee::foresee;
use super::member::{Edge, Log, Member, Who};
use super::pages::Pages;
use super::part_sink::PartSink;
use super::rounds::{Claimed, Joined, Round, Shared};
use super::share::{self, Share, TileRun};
use crate::codes;
use crate::engine::{self, Control, Evidence};
use crate::error::{Error, Finding, Result};
use crate::hash::TileHasher;
use crate::manifest::{Maker, Manifest, Provenance, MANIFEST_NAME};
use crate::plan::{Form, Plan};
use crate::publish::clock::{Clock, Patience};
use crate::publish::{self, Space, Staging};
use crate::storage::SourceFile;
use crate::write::records::{self, Claims, Told};
use crate::write::{
    self, document, engine_options, frames, go_on, is_running, needs, only_read, resumable, sink, Options,
    Roots,
};

/// Bytes that are read at a time.
const CHUNK: usize = 1 << 20;
/// Largest tile where ranks make what lies on their own disks, in bytes: the smaller, the fewer are made of several.
const NEAR_TILE: u64 = 256 << 10;
/// What the parts are called with: digests of the files of each rank, where these lie on their own disks.
const STAMPS: &str = "stamps";
/// Part of what others have written that is read back before it is published.
const SPOT_CHECKED: u64 = 256;

/// What is made, as it is written down once for all rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Work {
    /// Size of tiles, and how many outputs after one another have it.
    sizes: Vec<(u64, u32)>,
    /// What the parts are called with, in the words of whoever began.
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

/// Who makes what in a round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Division {
    shares: Vec<Share>,
    /// Members of earlier rounds whose work counts as it is, and what they have made.
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
                .help("it was begun by another version: remove the folder to start afresh"),
        )
    })
}

/// A run that has begun: its files are there, its first or next round is open.
#[derive(Debug)]
pub struct Begun {
    /// Held as long as nobody else may conclude the run.
    pub staging: Staging,
    /// The run.
    pub shared: Shared,
    /// The round that is open; none if the result is complete already and has only to be published.
    pub round: Option<Round>,
    /// Bytes that each part makes.
    pub bytes: Vec<u64>,
    /// What was noticed.
    pub findings: Vec<Finding>,
}

/// Begins a run of `parts` parts, or with `resume` the next round of one: checks the destination, makes all files at
/// their full size, and divides what is to be done.
///
/// `about` is what the parts are called with: it is kept for them. Members that may be at work are given `patience` of
/// the options to show a sign of life.
///
/// # Errors
/// As [`crate::write::write`]; `FS509` if processes are at work on the run; `FS515` if it would not be brought to disk.
#[allow(clippy::too_many_arguments)]
pub fn begin(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    roots: &Roots,
    out: &Path,
    options: &Options,
    parts: usize,
    about: serde_json::Value,
    control: &Control,
) -> Result<Begun> {
    let run = plan.digest();
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
    engine::admit(plan, &engine_options(plan, options, out))?;
    publish::preflight(out, roots, &run, &needs(plan, files, options), &options.publish)?;
    let mut staging = Staging::begin(out, &run, &document(plan), &options.publish)?;
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
            .help("the same command without --rank, with --resume, publishes it")
            .into());
        };
        return Ok(Begun { staging, shared, round: None, bytes: Vec::new(), findings });
    }
    let begun = prepare(plan, files, &mut staging, found, options, parts, about, control);
    match begun {
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

#[allow(clippy::too_many_arguments)]
fn prepare(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    staging: &mut Staging,
    found: Option<Shared>,
    options: &Options,
    parts: usize,
    about: serde_json::Value,
    control: &Control,
) -> Result<(Shared, Round, Vec<u64>)> {
    let shared = match found {
        Some(shared) => {
            refuse_living(&shared, &options.patience, control)?;
            refuse_touched(&shared, &about)?;
            shared
        }
        None => {
            let mut sizes = share::tiling(plan, &engine_options(plan, options, staging.folder()))?;
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
    let made = make_files(plan, files, staging, &member, options, control);
    member.leave();
    let remade = made?;
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
    Ok((shared, round, bytes))
}

/// Stores of arrays are written by whoever concludes: one process encodes and indexes them.
fn is_array(plan: &Plan, output: usize) -> bool {
    matches!(plan.files[plan.outputs[output].file as usize].form, Form::Arrays(_))
}

fn refuse_living(shared: &Shared, patience: &Patience, control: &Control) -> Result<()> {
    let alive = shared.alive(patience, &|| is_running(control))?;
    go_on(control)?;
    if alive.is_empty() {
        return Ok(());
    }
    let who: Vec<String> = alive.iter().map(Who::told).collect();
    Err(Finding::new(codes::LOCKED, "processes are at work on this run")
        .file(shared.path())
        .expected("none", who.join(", "))
        .help("wait for them, or stop them; then run again with --resume")
        .into())
}

/// Refuses to go on with what was made of files whose status was changed since, where nobody can read them all again.
fn refuse_touched(shared: &Shared, about: &serde_json::Value) -> Result<()> {
    let (then, now) = (work_of(shared)?.about.get(STAMPS).cloned(), about.get(STAMPS));
    match (then, now) {
        // Without, nobody knows what they were: it was begun on several hosts, and goes on with their files alone.
        (Some(then), now) if Some(&then) != now => Err(Finding::new(
            codes::LEFTOVER_RUN,
            "source files are not as they were when this run was begun, by their status: what was made of them may be of other content",
        )
        .file(shared.path())
        .help("remove the folder, and run again without --resume")
        .into()),
        _ => Ok(()),
    }
}

/// Makes all data files at their full size, with all that stands around the tensors; those that were not there. `member`
/// is this process: stopped here, it may go on when others have published what it has open.
fn make_files(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    staging: &Staging,
    member: &Member,
    options: &Options,
    control: &Control,
) -> Result<BTreeSet<u32>> {
    let data = || (0u32..).zip(&plan.files).filter(|(_, f)| !matches!(f.form, Form::Arrays(_)));
    member.note_open(data().map(|(number, _)| number))?;
    staging.keep_only(&data().map(|(_, f)| f.name.as_str()).collect())?;
    let frames = frames(plan, &plan.by_file(), files)?;
    let space = if options.sparse { Space::Sparse } else { Space::Reserved };
    let mut remade = BTreeSet::new();
    for (number, file) in data() {
        go_on(control)?;
        let made = staging.file(&file.name, file.size, space)?;
        if !made.kept() {
            remade.insert(number);
        }
        // Of one that was there too: whoever made it may have gone before it came to this.
        let frame = &frames[number as usize];
        frame.pieces.iter().try_for_each(|(at, bytes)| made.write_all_at(*at, bytes))?;
        made.sync()?;
    }
    member.note_closed(data().map(|(number, _)| number))?;
    Ok(remade)
}

/// What earlier rounds have made of a run, once nobody writes any more.
struct Earlier {
    claimed: Claimed,
    /// Members whose work counts as it is, and what they have made.
    adopted: Vec<(String, Share)>,
    /// Parts of the last round that nobody has done.
    missing: Vec<u32>,
}

impl Earlier {
    /// Adopted are members that have done all of their part, on which nobody else has worked, in files that nobody can
    /// have written to since.
    fn of(plan: &Plan, shared: &Shared, claimed: Claimed, remade: &BTreeSet<u32>) -> Result<Earlier> {
        let mut earlier = Earlier { claimed, adopted: Vec::new(), missing: Vec::new() };
        let Some(round) = shared.round()? else { return Ok(earlier) };
        let division = Division::of(&round)?;
        let (mut adopted, mut missing) = (division.adopted, Vec::new());
        for (part, share) in (0u32..).zip(division.shares) {
            let members: Vec<&Log> =
                earlier.claimed.logs.iter().filter(|log| is_of(log, round.number, part)).collect();
            match members[..] {
                [one] if one.is_done => adopted.push((one.nonce.clone(), share)),
                _ if members.iter().any(|log| log.is_done) => {}
                _ => missing.push(part),
            }
        }
        let doubted = |file: u32| remade.contains(&file) || earlier.claimed.renewed.contains(&file);
        adopted.retain(|(nonce, share)| {
            let mut files = share.tiles.iter().map(|run| plan.outputs[run.output as usize].file);
            earlier.log(nonce).is_some_and(|log| log.is_done) && !files.any(doubted)
        });
        (earlier.adopted, earlier.missing) = (adopted, missing);
        Ok(earlier)
    }

    fn log(&self, nonce: &str) -> Option<&Log> {
        self.claimed.logs.iter().find(|log| log.nonce == nonce)
    }
}

fn is_of(log: &Log, round: u32, part: u32) -> bool {
    log.who.as_ref().is_some_and(|who| (who.round, who.part) == (round, Some(part)))
}

/// Reads some of the tiles that a member has written back, as this process sees the destination.
///
/// # Errors
/// `FS517` if they are not what it wrote.
fn spot_check(plan: &Plan, shared: &Shared, claimed: &Claimed, log: &Log, sizes: &[u64]) -> Result<()> {
    let mut tiles = Vec::new();
    let (mut seen, mut quota) = (BTreeSet::new(), 0);
    log.journal.replay(&mut |_, record| {
        let Some((output, tile)) = records::tile_of(record) else { return };
        let Some(about) = plan.outputs.get(output as usize) else { return };
        quota += tile.size / SPOT_CHECKED;
        if seen.insert(about.file) || quota >= tile.size {
            quota = quota.saturating_sub(tile.size);
            tiles.push((output as usize, tile));
        }
    })?;
    let mut buffer = vec![0; CHUNK];
    for (output, tile) in tiles.into_iter().filter(|(output, tile)| tile.size == sizes[*output]) {
        let about = &plan.outputs[output];
        let (start, end) = (tile.index * tile.size, ((tile.index + 1) * tile.size).min(about.nbytes()));
        let (lo, hi) = (about.offset + start, about.offset + end);
        let is_edge = |e: &Edge| e.file == about.file && e.offset < hi && e.end() > lo;
        if start >= end || log.edges.iter().any(is_edge) {
            continue;
        }
        let file = &plan.files[about.file as usize];
        let held = shared.written(claimed, &file.name, file.size)?;
        let mut hasher = TileHasher::new(tile.index, tile.size, about.nbytes());
        let mut at = lo;
        while at < hi {
            let bytes = &mut buffer[..(CHUNK as u64).min(hi - at) as usize];
            held.read_at(at, bytes)?;
            hasher.update(bytes);
            at += bytes.len() as u64;
        }
        if hasher.value() != tile.value {
            let who = log.who.as_ref();
            let mut finding = Finding::new(codes::WRITTEN_DIFFERS, "what a part has written is not what is read here")
                .file(held.path())
                .tensor(&about.name)
                .help("the destination is not one storage for all that write to it, or it loses writes: `fastshard probe` tells which; --resume makes that part again");
            finding.rank = who.and_then(|who| who.part).map(|part| format!("rank {part}"));
            finding.host = who.map(|who| who.process.host.clone());
            return Err(finding.into());
        }
    }
    Ok(())
}

/// What came of making a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Made {
    /// This process has made it.
    Now,
    /// It was made before.
    Before,
}

/// Makes a part of a round. A process that had begun it is replaced if nothing was heard of it for the options' `patience`.
///
/// # Errors
/// As [`crate::write::write`]; `FS509` if another process makes this part, or if the round is over.
#[allow(clippy::too_many_arguments)]
pub fn make_part(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    roots: &Roots,
    out: &Path,
    shared: &Shared,
    round: &Round,
    part: u32,
    options: &Options,
    control: &Control,
) -> Result<Made> {
    let division = Division::of(round)?;
    let sizes = work_of(shared)?.sizes();
    let Some(share) = division.shares.get(part as usize) else {
        return Err(Finding::new(codes::USAGE, "there is no such part")
            .file(shared.path())
            .expected(format!("0 to {}", division.shares.len().saturating_sub(1)), part)
            .into());
    };
    publish::preflight_part(out, roots, &plan.digest(), &needs(plan, files, options))?;
    let logs = shared.logs()?;
    let is_fresh = round.number == 1 && !logs.iter().any(|log| is_of(log, 1, part));
    let member = match shared.join(round, part, &options.patience, &|| is_running(control))? {
        Joined::Done(_) => return Ok(Made::Before),
        Joined::Member(member) => member,
    };
    let by_file = plan.by_file();
    let frames = frames(plan, &by_file, files)?;
    let checksummed = sink::members_of(plan, &frames).into_iter().map(|member| member.is_some()).collect();
    drop(frames);
    let pages = Pages::of(plan, &sizes, &division.shares);
    // What others of this round are making is not this part's.
    let earlier = |log: &&Log| {
        log.who.as_ref().is_some_and(|who| who.round < round.number) || is_of(log, round.number, part)
    };
    let told =
        logs.iter().filter(earlier).map(|log| Told { journal: &log.journal, adopted: false }).collect();
    let claims = Claims::of(told, plan.outputs.len(), &|output| plan.outputs[output].file)?;
    let sparse = options.sparse && is_fresh;
    let sink = PartSink::new(plan, &member, &pages, claims, checksummed, &sizes, share, sparse);
    let engine_options = engine::Options { encodes: 0, ..engine_options(plan, options, shared.path()) };
    let made = foresee(plan, files, &sizes, share, control)
        .and_then(|()| engine::work(plan, files, &sink, &engine_options, &sizes, share, control))
        .and_then(|evidence| {
            files.iter().try_for_each(|f| f.unchanged())?;
            only_read(files)?;
            Ok(evidence)
        });
    // On the descriptors that wrote: others may not be told of a write that failed.
    let closed = sink.close();
    drop(sink);
    match made.and_then(|evidence| closed.map(|()| evidence)) {
        Ok(evidence) => {
            member.done(&serde_json::to_vec(&evidence).expect("plain data"))?;
            Ok(Made::Now)
        }
        Err(error) => {
            member.leave();
            Err(error)
        }
    }
}

/// Parts of a round that nobody has done yet, in order.
///
/// # Errors
/// What the system says.
pub fn missing_parts(shared: &Shared, round: &Round) -> Result<Vec<u32>> {
    let done = shared.done_parts(round.number)?;
    Ok((0..round.parts).filter(|part| !done.contains(part)).collect())
}

/// What others have made, for the one that concludes the run.
pub(crate) struct Prior {
    logs: Vec<Log>,
    adopted: BTreeSet<String>,
    pub(crate) evidence: Vec<Evidence>,
    pub(crate) sizes: Vec<u64>,
    /// Files to which nothing is to be written any more.
    pub(crate) complete: Vec<bool>,
    pub(crate) provenance: Provenance,
}

impl Prior {
    pub(crate) fn told(&self) -> Vec<Told<'_>> {
        let told = |log| -> Told<'_> {
            let log: &Log = log;
            Told { journal: &log.journal, adopted: self.adopted.contains(&log.nonce) }
        };
        self.logs.iter().map(told).collect()
    }
}

/// Concludes a run whose parts are all made: judges what they have learnt, makes what is left, and publishes.
///
/// # Errors
/// As [`crate::write::write`]; `FS523` if a part is missing.
pub fn conclude(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    staging: Staging,
    shared: &Shared,
    options: &Options,
    findings: Vec<Finding>,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let mut staging = staging;
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
    write::complete(plan, files, staging, options, Some(&prior), findings, control)
}

/// Goes on with a run of several processes as its only one: makes what is left of it, and publishes.
///
/// # Errors
/// As [`crate::write::write`].
#[allow(clippy::too_many_arguments)]
pub(crate) fn go_on_alone(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    roots: &Roots,
    mut staging: Staging,
    shared: Shared,
    out: &Path,
    options: &Options,
    findings: Vec<Finding>,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let folder = staging.folder().to_path_buf();
    let part = |staging: &mut Staging| -> Result<Shared> {
        let about = serde_json::Value::Null;
        let (shared, round, _) = prepare(plan, files, staging, Some(shared), options, 1, about, control)?;
        make_part(plan, files, roots, out, &shared, &round, 0, options, control)?;
        Ok(shared)
    };
    match part(&mut staging) {
        Ok(shared) => conclude(plan, files, staging, &shared, options, findings, control),
        Err(error) => Err(resumable(error, &folder)),
    }
}

/// Concludes the run called `nonce`, as a process that has not begun it.
///
/// # Errors
/// As [`conclude`]; `FS501` if the run is not there.
pub fn commit(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    out: &Path,
    nonce: &str,
    options: &Options,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let shared = Shared::enter(out, &plan.digest(), &document(plan), Some(nonce))?;
    let done = commit_found(plan, files, out, &shared, options, control);
    done.or_else(|error| unless_published(out, &shared.run.nonce, error))
}

/// An error of this process, unless others have published the run called `nonce` without it: it was away, and was
/// given up, or they were faster.
pub(crate) fn unless_published(out: &Path, nonce: &str, error: Error) -> Result<(Manifest, Vec<Finding>)> {
    let ours = |manifest: &Manifest| manifest.provenance.as_ref().is_some_and(|made| made.run == nonce);
    match Manifest::read(&out.join(MANIFEST_NAME)) {
        Ok(manifest) if !error.is_interrupt() && !error.is_after_publishing() && ours(&manifest) => {
            let told = "other processes have published the result without this one";
            Ok((manifest, vec![Finding::new(codes::PUBLISHED, told).file(out)]))
        }
        _ => Err(error),
    }
}

fn commit_found(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    out: &Path,
    shared: &Shared,
    options: &Options,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let run = plan.digest();
    engine::admit(plan, &engine_options(plan, options, shared.path()))?;
    let publish = publish::Options { resume: true, ..options.publish };
    let staging = Staging::begin(out, &run, &document(plan), &publish)?;
    let findings = staging.left_beside(plan.version);
    if staging.sealed() {
        return write::roll_forward(staging, plan, out, findings, control);
    }
    if staging.shared()?.is_none_or(|now| now.run.nonce != shared.run.nonce) {
        // Another process has published it since it was looked at, and what is here now was made just now.
        if !staging.resumed() {
            staging.discard()?;
        }
        Shared::enter(out, &run, &document(plan), Some(&shared.run.nonce))?;
        return Err(Finding::new(codes::LOCKED, "the run was published by another process, and begun anew")
            .file(shared.path())
            .into());
    }
    refuse_living(shared, &options.patience, control)?;
    conclude(plan, files, staging, shared, options, findings, control)
}

/// Takes the run over, and puts together what its parts have made.
fn gather(plan: &Plan, staging: &mut Staging, shared: &Shared, clock: &Clock) -> Result<Prior> {
    let sizes = work_of(shared)?.sizes();
    if let Some(round) = shared.round()? {
        refuse_missing(shared, &missing_parts(shared, &round)?)?;
    }
    let claimed = shared.claim()?;
    let member = shared.preside(&claimed, clock)?;
    staging.enter(&claimed, Some(&member));
    let mut remade = BTreeSet::new();
    for (number, file) in (0u32..).zip(&plan.files).filter(|(_, f)| !matches!(f.form, Form::Arrays(_))) {
        if !staging.has(&file.name, file.size)? {
            remade.insert(number);
        }
    }
    let earlier = Earlier::of(plan, shared, claimed, &remade)?;
    refuse_missing(shared, &earlier.missing)?;
    let adopted: Vec<&Log> = earlier.adopted.iter().filter_map(|(nonce, _)| earlier.log(nonce)).collect();
    let mut evidence = Vec::with_capacity(adopted.len());
    for log in &adopted {
        let bytes = shared.evidence(log)?;
        evidence.push(serde_json::from_slice(&bytes).map_err(|e| {
            Error::from(Finding::new(
                codes::LEFTOVER_RUN,
                format!("what a part has learnt cannot be read ({e})"),
            ))
        })?);
    }
    let mut made = vec![0; plan.files.len()];
    for run in earlier.adopted.iter().flat_map(|(_, share)| &share.tiles) {
        let output = &plan.outputs[run.output as usize];
        let (lo, hi) = run.span(sizes[run.output as usize], output.nbytes());
        made[output.file as usize] += hi - lo;
    }
    let mut wanted = vec![0; plan.files.len()];
    plan.outputs.iter().for_each(|output| wanted[output.file as usize] += output.nbytes());
    let edged: BTreeSet<u32> = adopted.iter().flat_map(|log| &log.edges).map(|edge| edge.file).collect();
    let complete: Vec<bool> = (0u32..)
        .zip(&plan.files)
        .map(|(number, file)| {
            let i = number as usize;
            // Files that name checksums of their members get these at the end.
            matches!(file.form, Form::Safetensors)
                && made[i] == wanted[i]
                && !edged.contains(&number)
                && !remade.contains(&number)
        })
        .collect();
    let open = (0u32..).zip(&complete).filter(|(number, complete)| {
        !**complete && !matches!(plan.files[*number as usize].form, Form::Arrays(_))
    });
    member.note_open(open.map(|(number, _)| number))?;
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
    let maker = |log: &Log, share: &Share| {
        let who = log.who.as_ref();
        Maker {
            part: who.and_then(|who| who.part),
            round: who.map_or(0, |who| who.round),
            host: who.map(|who| who.process.host.clone()).unwrap_or_default(),
            bytes: share.bytes(plan, &sizes),
        }
    };
    let made_by = earlier.adopted.iter().filter_map(|(nonce, share)| Some(maker(earlier.log(nonce)?, share)));
    let about = work_of(shared)?.about;
    let asked = about.get("asked").and_then(|asked| serde_json::from_value(asked.clone()).ok());
    let provenance = Provenance {
        run: shared.run.nonce.clone(),
        parts: made_by.collect(),
        asked: asked.unwrap_or_default(),
    };
    let adopted = adopted.iter().map(|log| log.nonce.clone()).collect();
    let Claimed { logs, .. } = earlier.claimed;
    staging.accompany(member);
    Ok(Prior { logs, adopted, evidence, sizes, complete, provenance })
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
            .help("make it (run-part), or run again with --resume");
        finding.host = last.map(|who| who.process.host.clone());
        finding
    };
    Err(missing.iter().map(finding).collect::<Vec<_>>().into())
}
