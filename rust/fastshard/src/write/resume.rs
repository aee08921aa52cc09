//! Which errors leave a run that can be continued, and how it is.

use std::path::Path;

use super::options::{Companion, Options};
use crate::codes::{self, Kind};
use crate::error::{Error, Finding, Severity};

/// True for errors that say nothing against what is written so far: the system's, and a companion's.
pub(super) fn keeps(error: &Error, options: &Options) -> bool {
    let of_companion = |f: &Finding| {
        let named = |c: &Companion| f.file.as_deref() == Some(&*c.path.display().to_string());
        options.copies.iter().any(named)
    };
    let errors = error.findings().iter().filter(|f| f.severity == Severity::Error);
    errors.into_iter().all(|f| f.code.is_a(Kind::Resumable) || of_companion(f))
}

/// Says how a run that stopped can be continued.
pub(crate) fn resumable(error: Error, folder: &Path) -> Error {
    let mut findings = error.into_findings();
    if findings.iter().any(|f| f.code == codes::PUBLISH_CONFLICT) {
        return Error::from(findings); // It says itself where things are.
    }
    let way = |f: &Finding| match f.code {
        // Of the sources as they are now it is another run.
        codes::SOURCE_CHANGED => format!("start afresh by removing {}", folder.display()),
        _ => format!("remove {}, or continue the run", folder.display()),
    };
    // Where another process is at work it may have published, and its folder is not to be removed. What another rank
    // stopped for says it already.
    let says = |f: &Finding| f.help.as_ref().is_some_and(|help| help.ends_with(&way(f)));
    let needs_help = |f: &&mut Finding| f.severity == Severity::Error && f.code != codes::LOCKED && !says(f);
    for f in findings.iter_mut().filter(needs_help) {
        f.help = Some(match f.help.take().filter(|_| f.code != codes::INTERRUPTED) {
            Some(help) => format!("{help}; {}", way(f)),
            None => way(f),
        });
        if f.code != codes::SOURCE_CHANGED {
            f.run = vec!["--resume".into()];
        }
    }
    Error::from(findings)
}
