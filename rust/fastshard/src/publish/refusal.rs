//! Refuses a destination that may not be replaced, and names the runs that wait for it.

use super::place::{Occupied, Place};
use super::seal::Seal;
use super::{lock, older, others};
use crate::codes;
use crate::error::{Finding, Result};

/// What is said of another run's folder in a destination.
const IN_THE_WAY: &str =
    "an interrupted run of another plan: run its command again with --resume to continue it; remove it to make room";

impl Place {
    /// The finding for a destination that may not be replaced, if it is one. An interrupted run that waits for
    /// it is named.
    ///
    /// Errors: what the system says of files that have to be looked at.
    pub(super) fn refused(&self, occupied: &Occupied, overwrite: bool) -> Result<Option<Finding>> {
        let refused = self.not_to_be_replaced(occupied, overwrite)?;
        Ok(refused.map(|mut finding| {
            for note in self.waiting() {
                finding.help = Some(finding.help.map_or(note.clone(), |help| format!("{help}; {note}")));
            }
            finding
        }))
    }

    /// Runs that wait for the destination, in words: this one, and others where they stand in the way.
    fn waiting(&self) -> Vec<String> {
        let folder = self.base.sub(&self.folder).ok().filter(|_| !self.inside);
        let own = folder.and_then(|folder| {
            // Of what cannot be looked at nothing is said, nor where nothing but the folder itself is left of a run.
            if !lock::is_there(&folder).ok()? && !Seal::is_on(&folder).ok()? {
                return None;
            }
            let path = folder.path().display();
            Some(match lock::is_held(&folder).ok()? {
                Some(true) => format!("another process is writing this in {path}"),
                _ => format!("an interrupted run of this is kept in {path}, for --resume"),
            })
        });
        let others = if self.inside { others::left(self, None) } else { Vec::new() };
        let others = others.into_iter().filter_map(|f| Some(format!("{} holds {}", f.file?, IN_THE_WAY)));
        own.into_iter().chain(others).collect()
    }

    fn not_to_be_replaced(&self, occupied: &Occupied, overwrite: bool) -> Result<Option<Finding>> {
        let Occupied::Full { entry, .. } = occupied else { return Ok(None) };
        let got = format!("it holds {}", entry.to_string_lossy());
        let finding = Finding::new(codes::OUT_EXISTS, "the destination exists and is not empty")
            .file(&self.out)
            .expected("an empty or absent directory", got);
        if !overwrite {
            return Ok(Some(
                finding
                    .help("choose another destination, or replace it if it holds only an older result of fastshard")
                    .run("--overwrite"),
            ));
        }
        if older::holds_working_directory(&self.out) || older::holds_home(&self.out) {
            return Ok(Some(
                finding
                    .help("choose a new directory inside; a working directory or a home is never replaced"),
            ));
        }
        if self.inside {
            return Ok(Some(finding.help(
                "choose a new directory inside or empty it; it is a mount point or its parent may not be \
                 written, so it cannot be replaced in one step",
            )));
        }
        let Some(out) = self.open_out()? else { return Ok(None) };
        let besides = older::besides(&out, None)?;
        Ok((!besides.is_nothing()).then(|| self.would_lose(&besides)))
    }

    /// The finding for what would be lost if the destination were replaced.
    fn would_lose(&self, besides: &older::Besides) -> Finding {
        let what = match &besides.no_result {
            Some(why) => {
                format!("the destination is no older result of fastshard ({why}): all of it would be lost")
            }
            None => "the destination holds more than an older result of fastshard: this would be lost".into(),
        };
        Finding::new(codes::OUT_EXISTS, what)
            .file(&self.out)
            .expected("a folder whose manifest accounts for all that it holds, unedited", besides.describe())
            .help("move it away, or choose another destination; --overwrite replaces nothing else")
    }
}
