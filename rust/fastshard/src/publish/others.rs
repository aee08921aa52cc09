//! What interrupted runs of other plans have left at the same destination: never continued, and named, since it takes up
//! space and may hold what was there before.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use super::disk::{At, Dir};
use super::lock;
use super::place::Place;
use super::seal::Seal;
use super::stored::{self, Version};
use crate::codes;
use crate::error::{Finding, Result, Severity};

/// Digits of a run in the name of its folder.
const DIGITS: usize = 16;
/// Bytes at most of a plan's own words.
const MAX_PLAN: u64 = 1 << 20;
/// Folders named; the rest is left for another time.
const NAMED: usize = 8;

/// A warning for each folder of another run whose owner is gone. What cannot be looked at is passed over: this run does
/// not depend on it.
pub(super) fn left(place: &Place, version: Option<u32>) -> Vec<Finding> {
    if !place.inside && !place.is_named_whole() {
        // Another destination's folders may begin alike.
        return Vec::new();
    }
    let names = folders(place).unwrap_or_default();
    let folders =
        names.iter().filter(|name| **name != place.folder).filter_map(|name| place.base.sub(name).ok());
    folders
        .filter(|folder| matches!(lock::is_held(folder), Ok(Some(false))))
        .take(NAMED)
        .filter_map(|folder| warning(place, &folder, version))
        .collect()
}

/// Names of the staging folders of a destination, those of all runs.
pub(crate) fn folders(place: &Place) -> Result<Vec<OsString>> {
    let own = place.folder.as_bytes();
    let (prefix, _) = own.split_at(own.len() - DIGITS);
    let is_run = |name: &OsStr| {
        let digits = name.as_bytes().strip_prefix(prefix);
        digits.is_some_and(|run| run.len() == DIGITS && run.iter().all(u8::is_ascii_hexdigit))
    };
    let mut names = place.base.entries().at(place.base.path(), "cannot list")?;
    names.retain(|name| is_run(name));
    Ok(names)
}

fn warning(place: &Place, folder: &Dir, version: Option<u32>) -> Option<Finding> {
    let plan = folder.read_small("plan", MAX_PLAN).ok()?;
    let plan: Option<serde_json::Value> = plan.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    // Plans of the first version did not say so.
    let plan_version =
        plan.as_ref().map(|plan| plan.get("version").and_then(serde_json::Value::as_u64).unwrap_or(1));
    let why = match (plan_version, version) {
        (Some(plan_version), Some(version)) if plan_version != u64::from(version) => {
            format!(" (made by version {plan_version} of the plan; this is version {version})")
        }
        _ => String::new(),
    };
    // Of a warning, people are told the message alone.
    let (what, help) = match Seal::is_on(folder).ok()? {
        true => (
            format!("{}: look before you remove it", results_in(place, folder)),
            "run its command again with --resume to finish it; `fastshard clean` shows how to get a result back",
        ),
        false => (
            "; it takes up space until it is removed".to_string(),
            "run its command again with --resume to continue it, or remove it if it is not needed",
        ),
    };
    let message = format!("an interrupted run of another plan is not continued{why}{what}");
    let finding = Finding::new(codes::LEFTOVER_RUN, message).severity(Severity::Warning);
    Some(finding.file(folder.path()).help(help))
}

/// Which results a sealed folder holds, in words.
fn results_in(place: &Place, folder: &Dir) -> String {
    let seal = Seal::find(folder).ok().flatten();
    let results = seal.and_then(|seal| stored::results(place, folder, &seal).ok()).unwrap_or_default();
    let words = results.iter().map(|result| match result.version {
        Version::Newer => "its result",
        Version::Older => "what was at the destination before",
    });
    match words.collect::<Vec<_>>()[..] {
        [] => "; it is sealed".into(),
        ref words => format!("; it holds {}", words.join(" and ")),
    }
}
