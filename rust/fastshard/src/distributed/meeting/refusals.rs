//! Findings of ranks about one another: which one is missing, is gone, or was started with other options.

use std::collections::{BTreeMap, BTreeSet};

use super::table::{sources_of, Card, Heard, Phase, Seen};
use super::Meeting;
use crate::codes;
use crate::error::{Finding, Result};

/// Largest list of a rank's sources, in bytes.
const MAX_SOURCES: u64 = 1 << 30;
/// Maximum number of differing files that a finding names.
const NAMED: usize = 8;

impl Meeting {
    /// Findings for ranks that rank 0 has not seen, according to its card.
    pub(super) fn absent(&self, zero: &Card, others: &BTreeMap<u32, Heard>) -> Vec<Finding> {
        let seen = zero.seen.keys().map(|rank| match others.get(rank) {
            Some(heard) => place_of(&heard.card),
            None => format!("rank {rank}"),
        });
        let seen: Vec<String> = std::iter::once(place_of(zero)).chain(seen).collect();
        let seconds = self.about.timeout.as_secs_f64();
        let finding = |rank: u32| {
            let mut finding =
                Finding::new(codes::NOT_SHARED, format!("rank {rank} never appeared within {seconds} s"))
                    .file(self.table.folder.path())
                    .rank(format!("rank {rank}"))
                    .expected(format!("{} ranks on one storage", self.about.world), seen.join(", "))
                    .help("check the output of that rank: it was not started, or its host has a separate disk at this path; `fastshard check-storage` with the same ranks finds that before the work");
            finding.host = self.about.hosts.get(rank as usize).cloned();
            finding
        };
        (1..self.about.world).filter(|rank| !zero.seen.contains_key(rank)).map(finding).collect()
    }

    /// Findings of a rank that rank 0 has not seen, or that has not seen rank 0.
    pub(super) fn stray(&self, own: &Card, others: &BTreeMap<u32, Heard>) -> Vec<Finding> {
        let zero = others.get(&0).filter(|zero| zero.lives);
        let what = match zero {
            None => "rank 0 was never seen here",
            Some(zero) if !zero.card.seen.contains_key(&own.rank) => "rank 0 has not seen this rank",
            Some(zero) => return self.absent(&zero.card, others),
        };
        let message = format!("{what} within {} s", self.about.timeout.as_secs_f64());
        let mut finding = Finding::new(codes::NOT_SHARED, message)
            .file(self.table.folder.path())
            .rank(format!("rank {}", own.rank))
            .expected(
                match zero {
                    Some(zero) => format!("the storage of {}", place_of(&zero.card)),
                    None => format!("one storage for all {} ranks", own.world),
                },
                own.storage.clone(),
            )
            .help("mount the shared storage at this path, or choose a destination on it; this host may have a separate disk there; --timeout SECONDS waits longer for ranks that start late");
        finding.host = Some(own.process.host.clone());
        vec![finding]
    }

    /// Refuses ranks that were started with other options than rank 0.
    pub(super) fn alike(&self) -> Result<()> {
        let state = self.table.lock();
        let differing = state.others.values().filter_map(|heard| differing(&state.card, &heard.card));
        let findings: Vec<Finding> = differing.collect();
        match findings.is_empty() {
            true => Ok(()),
            false => Err(findings.into()),
        }
    }

    /// The differences of the sources from those that rank 0 sees.
    pub(super) fn other_plan(&self, files: &[Seen]) -> Finding {
        let bytes =
            self.table.folder.read_small(&sources_of(0), MAX_SOURCES).ok().flatten().unwrap_or_default();
        let theirs: Vec<Seen> = serde_json::from_slice(&bytes).unwrap_or_default();
        let by_name = |files: &[Seen]| -> BTreeMap<String, Seen> {
            files.iter().map(|file| (file.name.clone(), file.clone())).collect()
        };
        let (theirs, ours) = (by_name(&theirs), by_name(files));
        let names: BTreeSet<&String> = theirs.keys().chain(ours.keys()).collect();
        let differing: Vec<String> = names
            .into_iter()
            .filter_map(|name| match (theirs.get(name), ours.get(name)) {
                (Some(there), Some(here)) if there.size != here.size => {
                    Some(format!("{name}: {} bytes there, {} bytes here", there.size, here.size))
                }
                (Some(there), Some(here)) if there.mtime_ns != here.mtime_ns => {
                    Some(format!("{name}: of another time than there"))
                }
                (Some(_), Some(_)) => None,
                (Some(_), None) => Some(format!("{name}: absent here")),
                (None, _) => Some(format!("{name}: absent there")),
            })
            .collect();
        let got = match (differing.len(), differing.len().checked_sub(NAMED)) {
            (0, _) => "the same files, with another config or other tokenizer files beside them".to_string(),
            (_, Some(more)) if more > 0 => format!("{}; and {more} more", differing[..NAMED].join("; ")),
            _ => differing.join("; "),
        };
        let mut finding = Finding::new(codes::RANKS_DIFFER, "this rank comes to another plan than rank 0")
            .rank(format!("rank {}", self.about.rank))
            .expected("the sources that rank 0 sees", got)
            .help("pass all ranks the same CKPT, on storage that all of them see; copies on separate disks must keep the times of their files (cp -p, rsync -a)");
        finding.host = Some(self.table.lock().card.process.host.clone());
        finding
    }

    /// The finding for a rank that has shown no sign of life for the whole timeout, or is proven dead.
    pub(super) fn silent(&self, others: &BTreeMap<u32, Heard>, rank: u32) -> Option<Vec<Finding>> {
        let heard = others.get(&rank)?;
        let dead = heard.card.process.is_dead() && heard.card.phase < Phase::Stopped;
        let silent = heard.silent.time();
        if !dead && silent < self.about.timeout {
            return None;
        }
        let mut finding = Finding::new(
            codes::PART_MISSING,
            match dead {
                true => format!("rank {rank} has ended without a word"),
                false => {
                    format!("rank {rank} has shown no sign of life for {} s", silent.as_secs())
                }
            },
        )
        .rank(format!("rank {rank}"))
        .expected("a process at work", heard.card.process.describe())
        .help("run again with --resume, with as many ranks as there are hosts");
        finding.host = Some(heard.card.process.host.clone());
        Some(vec![finding])
    }
}

/// A rank and its place, for users.
fn place_of(card: &Card) -> String {
    format!("rank {} on {} ({})", card.rank, card.process.host, card.storage)
}

/// The finding for two ranks that were not started alike, named for the first one.
pub(super) fn differing(own: &Card, other: &Card) -> Option<Finding> {
    let finding_of = |expected: String, got: String| {
        let named = if own.rank == 0 { other } else { own };
        let mut finding =
            Finding::new(codes::RANKS_DIFFER, "the ranks of this run were not started with one command")
                .rank(format!("rank {}", named.rank))
                .expected(expected, got)
                .help("start all ranks with the same command and the same version");
        finding.host = Some(named.process.host.clone());
        finding
    };
    let (zero, rank) = if own.rank == 0 { (own, other) } else { (other, own) };
    if zero.world != rank.world {
        return Some(finding_of(
            format!("{} ranks, as rank 0 says", zero.world),
            format!("{} ranks", rank.world),
        ));
    }
    let names: BTreeSet<&String> = zero.words.keys().chain(rank.words.keys()).collect();
    let shown = |value: Option<&serde_json::Value>| value.map_or("nothing".into(), ToString::to_string);
    let differing: Vec<(String, String)> = names
        .into_iter()
        .filter(|name| zero.words.get(*name) != rank.words.get(*name))
        .map(|name| {
            (
                format!("{name} {}", shown(zero.words.get(name))),
                format!("{name} {}", shown(rank.words.get(name))),
            )
        })
        .collect();
    if differing.is_empty() {
        return None;
    }
    let (expected, got): (Vec<String>, Vec<String>) = differing.into_iter().unzip();
    Some(finding_of(format!("as rank 0: {}", expected.join(", ")), got.join(", ")))
}
