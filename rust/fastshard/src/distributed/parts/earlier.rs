//! The work of members of earlier rounds: which work counts, and whether it is unchanged on disk.

use std::collections::BTreeSet;

use super::super::member::{Edge, Log};
use super::super::rounds::{Claimed, Shared};
use super::{Division, CHUNK};
use crate::codes;
use crate::error::{Finding, Result};
use crate::hash::TileHasher;
use crate::memory;
use crate::plan::tiles::Share;
use crate::plan::Plan;
use crate::write::records;

/// Share of the others' output that is read back before it is published.
const SPOT_CHECKED: u64 = 256;

/// The work of earlier rounds, once nobody writes any more.
pub(super) struct Earlier {
    pub(super) claimed: Claimed,
    /// Members whose work counts unchanged, and their work.
    pub(super) adopted: Vec<(String, Share)>,
    /// Parts of the last round that nobody has finished.
    pub(super) missing: Vec<u32>,
}

impl Earlier {
    /// Adopts members that have finished their part, if nobody else has worked on the part or can have
    /// written to its files since.
    pub(super) fn of(
        plan: &Plan,
        shared: &Shared,
        claimed: Claimed,
        remade: &BTreeSet<u32>,
    ) -> Result<Earlier> {
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

    /// The journals of members whose work counts.
    pub(super) fn adopted_logs(&self) -> Vec<&Log> {
        self.adopted.iter().filter_map(|(nonce, _)| self.log(nonce)).collect()
    }

    pub(super) fn log(&self, nonce: &str) -> Option<&Log> {
        self.claimed.logs.iter().find(|log| log.nonce == nonce)
    }
}

pub(super) fn is_of(log: &Log, round: u32, part: u32) -> bool {
    log.who.as_ref().is_some_and(|who| (who.round, who.part) == (round, Some(part)))
}

/// Reads some of the tiles that a member has written back, as this process sees the destination.
///
/// # Errors
/// `FS517` if they differ from what it wrote.
pub(super) fn spot_check(
    plan: &Plan,
    shared: &Shared,
    claimed: &Claimed,
    log: &Log,
    sizes: &[u64],
) -> Result<()> {
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
    let mut buffer = memory::allocate(CHUNK)?;
    for (output, tile) in tiles.into_iter().filter(|(output, tile)| tile.size == sizes[*output]) {
        let about = &plan.outputs[output];
        let (start, end) = (tile.index * tile.size, ((tile.index + 1) * tile.size).min(about.nbytes()));
        let (lo, hi) = (about.offset + start, about.offset + end);
        let is_edge = |e: &Edge| e.file == about.file && e.offset < hi && e.end() > lo;
        if start >= end || log.edges.iter().any(is_edge) {
            continue;
        }
        let file = &plan.files[about.file as usize];
        let written_file = shared.written(claimed, &file.name, file.size)?;
        let mut hasher = TileHasher::new(tile.index, tile.size, about.nbytes());
        let mut at = lo;
        while at < hi {
            let bytes = &mut buffer[..(CHUNK as u64).min(hi - at) as usize];
            written_file.read_at(at, bytes)?;
            hasher.update(bytes);
            at += bytes.len() as u64;
        }
        if hasher.value() != tile.value {
            let who = log.who.as_ref();
            let mut finding = Finding::new(codes::WRITTEN_DIFFERS, "what a part has written is not what is read here")
                .file(written_file.path())
                .tensor(&about.name)
                .help("run `fastshard check-storage`, then again with --resume, which makes that part again; the destination is not one storage for all that write to it, or it loses writes");
            finding.rank = who.and_then(|who| who.part).map(|part| format!("rank {part}"));
            finding.host = who.map(|who| who.process.host.clone());
            return Err(finding.into());
        }
    }
    Ok(())
}
