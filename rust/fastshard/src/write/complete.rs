//! Completes a result in its staging folder, and publishes it.

use super::filling::Filling;
use super::options::Run;
use super::resume::{keeps, resumable};
use super::uploads::Uploads;
use crate::distributed::prior::Prior;
use crate::error::{Error, Finding, Result, Severity};
use crate::manifest::{Manifest, MANIFEST_NAME};
use crate::plan::Plan;
use crate::publish::Staging;
use crate::topics;

/// Makes what is not made yet, judges all of it, and publishes.
pub(crate) fn complete(
    run: &Run<'_>,
    staging: Staging,
    prior: Option<&Prior>,
    mut findings: Vec<Finding>,
) -> Result<(Manifest, Vec<Finding>)> {
    let Run { plan, files, options, control, .. } = *run;
    let folder = staging.folder().to_path_buf();
    let uploads = options.store.as_ref().map(Uploads::new);
    let done =
        Filling { run, staging: &staging, prior, uploads: uploads.as_ref() }.fill().and_then(|filled| {
            // The last look at the sources: what was read is what is there.
            files.iter().try_for_each(|f| f.unchanged())?;
            let (manifest, found) = filled;
            findings.extend(found);
            // What was noticed at the destination too.
            Ok((manifest, options.gate.pass(std::mem::take(&mut findings))?))
        });
    if let Some(uploads) = uploads {
        let committed = done.and_then(|(manifest, findings)| {
            uploads.commit(&staging, plan, &manifest, &last_names(plan), control)?;
            Ok((manifest, findings))
        });
        // What the store has needs no copy here, and nothing is continued from one.
        return discard(staging, committed);
    }
    match done {
        Ok((manifest, mut findings)) => {
            let published = staging.publish(&last_names(plan), &|| control.is_running());
            findings.extend(published.map_err(|error| match error.is_after_publishing() {
                true => error,
                false => resumable(error, &folder),
            })?);
            Ok((manifest, findings))
        }
        Err(error)
            if keeps(&error, options) && (error.is_interrupt() || staging.journal().holds_records()) =>
        {
            Err(resumable(error, &folder))
        }
        Err(error) => discard(staging, Err(error)),
    }
}

/// Removes a staging folder. What cannot be removed must not hide how the run ended.
fn discard(staging: Staging, ended: Result<(Manifest, Vec<Finding>)>) -> Result<(Manifest, Vec<Finding>)> {
    match (staging.discard(), ended) {
        (Ok(()), ended) => ended,
        (Err(left), Ok((manifest, mut findings))) => {
            let left = left.into_findings().into_iter();
            findings.extend(left.map(|finding| finding.severity(Severity::Warning)));
            Ok((manifest, findings))
        }
        (Err(left), Err(error)) => {
            let mut findings = error.into_findings();
            findings.extend(left.into_findings());
            Err(Error::from(findings))
        }
    }
}

/// Finishes publishing what an earlier run has completed.
pub(crate) fn roll_forward(
    run: &Run<'_>,
    staging: Staging,
    mut findings: Vec<Finding>,
) -> Result<(Manifest, Vec<Finding>)> {
    let Run { plan, out, control, .. } = *run;
    log::debug!(target: topics::PUBLISH, "an earlier run has sealed its result: it is only put in place");
    findings.extend(staging.publish(&last_names(plan), &|| control.is_running())?);
    match Manifest::read(&out.join(MANIFEST_NAME)) {
        Ok(manifest) => Ok((manifest, findings)),
        Err(error) => {
            // What was said on the way, of what is kept for one, is not said again.
            let mut all_findings = error.after_publishing(out).into_findings();
            all_findings.extend(findings);
            Err(Error::from(all_findings))
        }
    }
}

/// Top-level names that appear after all others; the last one is where readers start.
fn last_names(plan: &Plan) -> Vec<&str> {
    std::iter::once(MANIFEST_NAME).chain(plan.pointers.iter().map(String::as_str)).collect()
}
