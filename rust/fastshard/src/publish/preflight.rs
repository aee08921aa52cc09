//! Checks for failures that are known before the first byte is written.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};

use super::disk::At;
use super::folder::is_data;
use super::mounts;
use super::place::{self, Place};
use super::{staging, Options};
use crate::codes;
use crate::error::{sizes, Error, Finding, Result};

/// The needs of a run at its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Bytes of all files.
    pub bytes: u64,
    /// Number of files.
    pub files: u64,
    /// Files held open at once, sources included.
    pub open_files: u64,
}

/// Entries of the staging folder besides the result's files.
const BOOKKEEPING: u64 = 6;

/// Checks the destination; all problems come as findings of one error.
///
/// Raises the process's soft open-file limit towards the hard one where `needs` asks for it. On
/// `resume`, what the earlier run of `run_id` has reserved counts as free.
///
/// Errors: `OUT_EXISTS`, `NO_SUCH_PATH`, `PERMISSION`, `OUT_INSIDE_SOURCE`, `NO_SPACE`,
/// `TOO_MANY_FILES`, or what the system says of `out`.
pub fn preflight(
    out: &Path,
    sources: &[PathBuf],
    run_id: &str,
    needs: &Needs,
    options: &Options,
) -> Result<()> {
    let mut findings = Vec::new();
    let mut gather = |result: Result<()>| findings.extend(result.err().map_or(vec![], Error::into_findings));
    gather(open_files(needs.open_files));
    match Place::find(out, run_id) {
        Ok(place) => {
            let together = sources.iter().map(|source| apart(&place, source));
            let together: Vec<Error> = together.filter_map(Result::err).collect();
            // A source is no older result: that it is a source says it all.
            let elsewhere = together.is_empty();
            together.into_iter().for_each(|error| gather(Err(error)));
            if !(options.resume && staging::is_sealed(&place)?) {
                if elsewhere {
                    gather(place.occupied().and_then(|o| match place.refused(&o, options.overwrite)? {
                        Some(finding) => Err(finding.into()),
                        None => Ok(()),
                    }));
                }
                gather(space(&place, needs, options));
            }
            gather(permission(&place));
        }
        Err(error) => gather(Err(error)),
    }
    if findings.is_empty() {
        Ok(())
    } else {
        Err(findings.into())
    }
}

/// [`preflight`] of a process that makes a part of what another has begun.
///
/// Errors: `OUT_INSIDE_SOURCE`, `TOO_MANY_FILES`, what the system says.
pub fn preflight_part(out: &Path, sources: &[PathBuf], run_id: &str, needs: &Needs) -> Result<()> {
    open_files(needs.open_files)?;
    let place = Place::find(out, run_id)?;
    sources.iter().try_for_each(|source| apart(&place, source))
}

fn permission(place: &Place) -> Result<()> {
    let base = place.base.path();
    place::writable(base).at(base, "the directory may not be written")?;
    if place.out.try_exists().at(&place.out, "cannot stat")? {
        // Moving a directory to another parent rewrites its `..` entry.
        place::writable(&place.out).at(&place.out, "the destination may not be written")?;
    }
    Ok(())
}

fn space(place: &Place, needs: &Needs, options: &Options) -> Result<()> {
    let base = place.base.path();
    let fs = rustix::fs::statvfs(base).at(base, "cannot ask for free space")?;
    let staged = if options.resume { staged(place) } else { (0, 0) };
    let mut findings = Vec::new();
    let mut short = |what: &str, needed: u64, free: u64, (needs, has): (String, String)| {
        if free < needed {
            let message = format!("not enough {what}: the result needs {needs}, {has} are free");
            findings.push(
                Finding::new(codes::NO_SPACE, message)
                    .file(base)
                    .expected(format!("{needed} free"), free)
                    .help(match options.overwrite {
                        true => "free space or choose another destination; the old result stays until the new one is complete",
                        false => "free space or choose another destination",
                    }),
            );
        }
    };
    // FUSE and object stores answer zero blocks, several filesystems zero inodes: unlimited.
    if fs.f_blocks > 0 {
        let needed = needs.bytes.saturating_sub(staged.0);
        let free = fs.f_bavail.saturating_mul(fs.f_frsize);
        short("space", needed, free, sizes(needed, free));
    }
    if fs.f_files > 0 {
        let needed = (needs.files + BOOKKEEPING).saturating_sub(staged.1);
        short("inodes", needed, fs.f_favail, (needed.to_string(), fs.f_favail.to_string()));
    }
    if findings.is_empty() {
        Ok(())
    } else {
        Err(findings.into())
    }
}

/// Bytes on disk and number of the files that an earlier run left.
fn staged(place: &Place) -> (u64, u64) {
    let folder = place.folder_path();
    let names = std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let data = names.filter(|name| name.to_str().is_some_and(is_data));
    data.map(|name| below(&folder.join(name))).fold((0, 0), |sum, each| (sum.0 + each.0, sum.1 + each.1))
}

fn below(data: &Path) -> (u64, u64) {
    let mut sum = (0, 0);
    for entry in std::fs::read_dir(data).into_iter().flatten().flatten() {
        let Ok(meta) = entry.metadata() else { continue };
        let each = if meta.is_dir() { below(&entry.path()) } else { (meta.blocks() * 512, 0) };
        sum = (sum.0 + each.0, sum.1 + each.1 + 1);
    }
    sum
}

fn open_files(needed: u64) -> Result<()> {
    // What is open already counts too; without /proc, a guess of the usual number.
    let open = std::fs::read_dir("/proc/self/fd").map_or(32, |d| d.count() as u64);
    let needed = needed.saturating_add(open);
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|soft| soft >= needed) {
        return Ok(());
    }
    let raised = Rlimit { current: Some(needed), maximum: limit.maximum };
    if limit.maximum.is_none_or(|hard| hard >= needed) && setrlimit(Resource::Nofile, raised).is_ok() {
        return Ok(());
    }
    let shown = |l: Option<u64>| l.map_or("unlimited".to_string(), |l| l.to_string());
    let got = format!("{} (hard limit {})", shown(limit.current), shown(limit.maximum));
    Err(Finding::new(codes::TOO_MANY_FILES, "open-file limit too low")
        .expected(needed, got)
        .help("raise it (ulimit -n, LimitNOFILE), or write fewer, larger files")
        .into())
}

/// Checks that neither of destination and source lies inside the other.
fn apart(place: &Place, source: &Path) -> Result<()> {
    let real = source.canonicalize().at(source, "cannot resolve the source")?;
    let nested = |what: &str| {
        Err(Finding::new(codes::OUT_INSIDE_SOURCE, what)
            .file(&place.out)
            .expected("a directory apart from the source", real.display())
            .help("choose a destination outside of the source")
            .into())
    };
    // Identities see through links and mounts of a whole directory; places on the filesystem also
    // through a bind mount of a part of it.
    let (out_id, source_id) = (identity(&place.out), identity(&real));
    let (out_at, source_at) = (mounts::location(&place.out), mounts::location(&real));
    let within = |inner: &Option<(String, PathBuf)>, outer: &Option<(String, PathBuf)>| match (inner, outer) {
        (Some(inner), Some(outer)) => inner.0 == outer.0 && inner.1.starts_with(&outer.1),
        _ => false,
    };
    if out_id.is_some() && out_id == source_id {
        nested("the destination is the source")
    } else if has_ancestor(&place.out, source_id) || within(&out_at, &source_at) {
        nested("the destination is inside a source")
    } else if has_ancestor(&real, out_id) || within(&source_at, &out_at) {
        nested("a source is inside the destination")
    } else {
        Ok(())
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

fn has_ancestor(path: &Path, ancestor: Option<(u64, u64)>) -> bool {
    ancestor.is_some() && path.ancestors().skip(1).any(|p| identity(p) == ancestor)
}
