//! What files do not tell of themselves: which of them is which, whether they are as they were written.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::catalog::{Catalog, CatalogFile};
use crate::codes;
use crate::error::Finding;
use crate::plan::Plan;
use crate::standing::{digest_of, each_use, mixed, Standing};

/// Files named in a message.
const NAMED: usize = 4;

/// What two of a kind could be swapped without its being seen: a note, if there are any.
///
/// Files are of a kind where they hold tensors of the same names and shapes (records: of the same sizes), of
/// which different things are made; a torch file that kept its own name inside, or one whose values say which rank it is
/// of (`placed`), is not one of them.
pub(crate) fn lookalikes(catalog: &Catalog, plan: &Plan, placed: &BTreeSet<usize>) -> Option<Finding> {
    if plan.sources.len() < 2 && !plan.blobs.iter().any(|blob| blob.encoded) {
        return None;
    }
    let standing = Standing::of(plan)?;
    let mut stands = vec![0u64; plan.sources.len()];
    let mut blocks = 0u64;
    for (i, stored) in plan.stored.iter().enumerate().filter(|(i, _)| standing.is_used(*i as u32)) {
        each_use(i as u32, stored, |blob, found| {
            let about = &plan.blobs[blob as usize];
            let at = found.at.iter().fold(standing.digest(i as u32), |digest, n| mixed(digest, *n));
            if about.encoded {
                blocks += 1;
            } else {
                let file = &mut stands[about.file as usize];
                *file = file.wrapping_add(mixed(at, found.offset));
            }
        });
    }
    let mut kinds: HashMap<u64, Vec<(u32, u64)>> = HashMap::new();
    let unplaced = catalog.files.iter().enumerate().filter(|(i, _)| !placed.contains(i));
    let files = unplaced.filter_map(|(_, file)| file.as_ref()).map(|file| ((file.root, &*file.path), file));
    let files: HashMap<(u32, &str), &CatalogFile> = files.collect();
    let mut archives: HashMap<&str, u32> = HashMap::new();
    let named = catalog.files.iter().flatten().filter_map(|file| file.parsed.archive.as_deref());
    named.for_each(|archive| *archives.entry(archive).or_default() += 1);
    for (i, source) in plan.sources.iter().enumerate().filter(|(i, _)| stands[*i] != 0) {
        let file = files.get(&(source.root, &*source.path));
        if let Some(file) = file.filter(|file| !names_itself(file, &archives)) {
            kinds.entry(kind_of(file)).or_default().push((i as u32, stands[i]));
        }
    }
    let differ = |files: &Vec<(u32, u64)>| files.iter().any(|(_, stands)| *stands != files[0].1);
    let mut files: Vec<u32> = kinds.into_values().filter(differ).flatten().map(|(file, _)| file).collect();
    files.sort_unstable();
    let mut of_what = Vec::new();
    if !files.is_empty() {
        of_what.push(counted(plan, &files));
    }
    if blocks > 1 {
        of_what.push(format!("{blocks} chunks"));
    }
    let of_what = of_what.join(" and ");
    let message = format!("a swap among {of_what} would go unnoticed: nothing in them names their rank");
    let help = "pass a manifest that was made where they were written with --expect; a copy with fewer than 64 different \
                values goes unnoticed too";
    (!of_what.is_empty()).then(|| Finding::new(codes::LOOKALIKES, message).help(help))
}

/// The torch files that were saved without checksums: a note, if there are any.
pub(crate) fn unsummed(catalog: &Catalog, plan: &Plan) -> Option<Finding> {
    let without = |file: &&CatalogFile| {
        matches!(file.parsed.format, "torch_zip" | "dcp")
            && file.parsed.blobs.iter().any(|blob| blob.crc32.is_none())
    };
    let found: HashSet<(u32, &str)> =
        catalog.files.iter().flatten().filter(without).map(|file| (file.root, &*file.path)).collect();
    let found =
        (0u32..).zip(&plan.sources).filter(|(_, source)| found.contains(&(source.root, &*source.path)));
    let found: Vec<u32> = found.map(|(i, _)| i).collect();
    let message = format!("{} saved without checksums", counted(plan, &found));
    let help =
        "pass a manifest that was made where they were written with --expect; bytes that were damaged since \
                are not seen";
    (!found.is_empty()).then(|| Finding::new(codes::NO_CHECKSUMS, message).help(help))
}

/// How many files, and the names of the first.
fn counted(plan: &Plan, files: &[u32]) -> String {
    let named: Vec<String> = files.iter().take(NAMED).map(|file| plan.label(*file)).collect();
    let more = match files.len() - named.len() {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    let plural = if files.len() == 1 { "" } else { "s" };
    format!("{} file{plural} ({}{more})", files.len(), named.join(", "))
}

/// True for a file that was given its own name when it was saved, and no other the same: if it were another's, the two
/// would differ.
fn names_itself(file: &CatalogFile, archives: &HashMap<&str, u32>) -> bool {
    let name = file.path.rsplit('/').next().unwrap_or_default();
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    let archive = file.parsed.archive.as_deref();
    archive == Some(stem) && archives.get(stem) == Some(&1)
}

/// What a file looks like to a reader, whatever its values.
fn kind_of(file: &CatalogFile) -> u64 {
    let parsed = &file.parsed;
    let mut kind = digest_of(parsed.format.as_bytes());
    if parsed.format == "dcp" {
        // Names come from another file, and what no record covers is not looked at.
        return kind;
    }
    for tensor in &parsed.tensors {
        kind = mixed(kind, digest_of(tensor.dtype.to_string().as_bytes()));
        kind = tensor.shape.iter().fold(kind, |kind, n| mixed(kind, *n));
        kind = tensor.path.iter().fold(kind, |kind, key| mixed(kind, digest_of(key.as_bytes())));
    }
    kind
}
