//! A run by ranks that have met: rank 0 begins and concludes it, all make parts, and none continues alone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use super::meeting::{Meeting, Opened, Pauses, Seen};
use super::parts::{self, Begun};
use super::rounds::{Round, Shared};
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::manifest::{Manifest, MANIFEST_NAME};
use crate::publish::{self, Staging};
use crate::steps::Step;
use crate::topics;
use crate::write::complete::roll_forward;
use crate::write::options::{document, Run};
use crate::write::resume::resumable;

/// Time between two looks at the progress of the others.
const LOOK: Duration = Duration::from_millis(100);

/// Writes and publishes a plan's result together with the other ranks of `meeting`, which hold the same plan.
///
/// # Errors
/// As [`crate::write::write`], for this rank and for others that stopped; `FS523` if one is gone; `FS524` if
/// ranks hold different plans.
pub fn write_together(
    run: &Run<'_>,
    meeting: &Meeting,
    about: serde_json::Value,
) -> Result<(Manifest, Vec<Finding>)> {
    let role = if meeting.rank() == 0 { "leads" } else { "follows" };
    log::debug!(target: topics::PROCESSES, "rank {} of {} {role}", meeting.rank(), meeting.world());
    let together = Together { run, meeting, nonce: OnceLock::new() };
    let done = together.agree().and_then(|()| match meeting.rank() {
        0 => together.lead(about),
        _ => together.follow(),
    });
    let done = done.or_else(|error| match together.nonce.get() {
        Some(nonce) => parts::unless_published(run.out, nonce, error),
        None => Err(error),
    });
    match &done {
        Err(error) if !error.is_after_publishing() => meeting.stop(error.findings()),
        _ => meeting.published(),
    }
    done
}

struct Together<'a> {
    run: &'a Run<'a>,
    meeting: &'a Meeting,
    /// The name of the run, once it is known.
    nonce: OnceLock<String>,
}

impl Together<'_> {
    fn agree(&self) -> Result<()> {
        let Run { plan, control, .. } = *self.run;
        let sources = plan.sources.iter().map(|s| Seen {
            name: if s.root == 0 { s.path.clone() } else { format!("{} of CKPT {}", s.path, s.root + 1) },
            size: s.size,
            mtime_ns: s.mtime_ns,
        });
        let sources: Vec<Seen> = sources.collect();
        self.meeting.agree(&plan.digest(), &sources, &|| control.is_running())
    }

    /// Rank 0.
    fn lead(&self, about: serde_json::Value) -> Result<(Manifest, Vec<Finding>)> {
        let Together { run, meeting, .. } = *self;
        let parts = meeting.world() as usize;
        if let Some(done) = self.finish()? {
            return Ok(done);
        }
        let Begun { staging, shared, round, findings, .. } = parts::begin(run, parts, about)?;
        let _ = self.nonce.set(shared.run.nonce.clone());
        let Some(round) = round else {
            // It was sealed since that was asked.
            return roll_forward(run, staging, findings);
        };
        // Nobody has begun a part yet: what was made just now for ranks that are gone is worth nothing.
        if let Err(error) = meeting.watch(&|_| false) {
            if !staging.resumed() {
                staging.discard()?;
            }
            return Err(error);
        }
        let folder = staging.folder().to_path_buf();
        let make_parts = || -> Result<()> {
            meeting.open_run(Opened { run: shared.run.nonce.clone(), round: round.number });
            self.part(&shared, &round, 0)?;
            let mut pauses = Pauses::new(meeting.clock(), LOOK);
            loop {
                run.control.check_running()?;
                let missing = parts::missing_parts(&shared, &round)?;
                if missing.is_empty() {
                    return Ok(());
                }
                meeting.watch(&|rank| !missing.contains(&rank))?;
                pauses.sleep();
            }
        };
        make_parts().map_err(|error| resumable(error, &folder))?;
        parts::conclude(run, staging, &shared, findings)
    }

    /// Publishes the result that an earlier run has completed, or ends its clean-up, which may have removed
    /// all records of parts.
    fn finish(&self) -> Result<Option<(Manifest, Vec<Finding>)>> {
        let Run { plan, out, options, .. } = *self.run;
        let digest = plan.digest();
        if !options.publish.resume || !publish::waits_sealed(out, &digest)? {
            return Ok(None);
        }
        let staging = Staging::begin(out, &digest, &document(plan), &options.publish)?;
        if !staging.sealed() {
            return Ok(None);
        }
        let mut findings = staging.left_beside(plan.version);
        let message = "the result was complete already: it is only put in place now";
        findings.push(
            Finding::new(codes::LEFTOVER_RUN, message).severity(crate::error::Severity::Note).file(out),
        );
        roll_forward(self.run, staging, findings).map(Some)
    }

    /// Any other rank.
    fn follow(&self) -> Result<(Manifest, Vec<Finding>)> {
        let Together { run: &Run { plan, out, control, .. }, meeting, .. } = *self;
        let opened = meeting.wait_for_run(&|| control.is_running())?;
        let manifest = || Manifest::read(&out.join(MANIFEST_NAME));
        if let Some(opened) = &opened {
            let _ = self.nonce.set(opened.run.clone());
            let shared = match Shared::enter(out, &plan.digest(), &document(plan), Some(&opened.run)) {
                // A rank that was started again comes late: it may be over.
                Err(_) if self.is_published(&opened.run) => return Ok((manifest()?, Vec::new())),
                entered => entered?,
            };
            let round = shared.round()?.filter(|round| round.number == opened.round).ok_or_else(|| {
                Finding::new(codes::LOCKED, "another round of this run has begun").file(shared.path())
            })?;
            let folder = shared.path().to_path_buf();
            self.part(&shared, &round, meeting.rank()).map_err(|error| resumable(error, &folder))?;
        }
        let is_published = || opened.as_ref().is_some_and(|opened| self.is_published(&opened.run));
        meeting.wait_for_result(&is_published, &|| control.is_running())?;
        Ok((manifest()?, Vec::new()))
    }

    fn is_published(&self, run: &str) -> bool {
        let manifest = Manifest::read(&self.run.out.join(MANIFEST_NAME));
        manifest.is_ok_and(|manifest| manifest.provenance.is_some_and(|provenance| provenance.run == run))
    }

    /// Makes a part, and stops if another rank does.
    fn part(&self, shared: &Shared, round: &Round, part: u32) -> Result<()> {
        let Together { run, meeting, .. } = *self;
        let control = run.control;
        let ended = AtomicBool::new(false);
        let stopped: Mutex<Option<Error>> = Mutex::new(None);
        let result = std::thread::scope(|scope| {
            let watch = || {
                let mut pauses = Pauses::new(meeting.clock(), LOOK);
                while !ended.load(Ordering::Relaxed) {
                    if let Err(error) = meeting.watch(&|_| false) {
                        *stopped.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                        control.cancel.store(true, Ordering::Relaxed);
                        return;
                    }
                    pauses.sleep();
                }
            };
            Builder::new().spawn_scoped(scope, watch).map_err(|error| Error::thread(&error))?;
            let part_result = parts::make_part(run, shared, round, part);
            control.reach(Step::PartMade);
            ended.store(true, Ordering::Relaxed);
            part_result
        });
        match (result, stopped.into_inner().unwrap_or_else(PoisonError::into_inner)) {
            (Err(error), Some(stopped)) if error.is_interrupt() => Err(stopped),
            // The part was made before that was seen. `cancel` is set all the same: who goes on would blame the user.
            (Ok(_), Some(stopped)) => Err(stopped),
            (result, _) => result.map(drop),
        }
    }
}
