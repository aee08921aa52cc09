//! Cards of ranks that are gone.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use super::table::{Card, MAX_CARD};
use super::LOOK;
use crate::error::Result;
use crate::publish::disk::At;
use crate::publish::folder::{check_owner, entries};
use crate::publish::gc::{Fate, Leaving};
use crate::publish::place::Place;

/// Takes away the cards of ranks that are gone, and the folder if none is left.
pub(in crate::publish) fn collect(
    place: &Place,
    patience: Duration,
    dry: bool,
    go_on: &dyn Fn() -> bool,
) -> Result<Option<Leaving>> {
    let name = place.meeting_name();
    let path = place.base.join(&name);
    let folder = match place.base.sub(&name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        folder => folder.at(&path, "cannot open")?,
    };
    let left = |fate| Some(Leaving { path: path.clone(), run: None, fate });
    if check_owner(place, &folder).is_err() {
        return Ok(left(Fate::Foreign));
    }
    let is_ours = |name: &String| {
        ["rank-", "sources-"].iter().any(|prefix| name.starts_with(prefix)) && name.ends_with(".json")
            || name.strip_suffix(".new").is_some_and(|nonce| nonce.len() == 32)
    };
    let cards = || -> Result<BTreeMap<String, (String, u64, bool)>> {
        let names = entries(&folder)?.into_iter().filter(|name| name.starts_with("rank-"));
        let read = |name: String| {
            let card: Card = serde_json::from_slice(&folder.read_small(&name, MAX_CARD).ok()??).ok()?;
            Some((name, (card.nonce, card.beat, card.process.is_dead())))
        };
        Ok(names.filter_map(read).collect())
    };
    let (first, begun) = (cards()?, Instant::now());
    while first.values().any(|(.., dead)| !dead) && begun.elapsed() < patience && go_on() {
        std::thread::sleep(LOOK);
        let moved = |(name, card): (&String, &(String, u64, bool))| first.get(name) != Some(card);
        if cards()?.iter().any(moved) {
            return Ok(left(Fate::AtWork));
        }
    }
    if !dry {
        for name in entries(&folder)?.iter().filter(|name| is_ours(name)) {
            folder.remove_file(name).at(&folder.join(name), "cannot remove")?;
        }
        match place.base.remove_dir(&name) {
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => return Ok(left(Fate::Foreign)),
            removed => removed.at(&path, "cannot remove")?,
        }
    }
    Ok(left(Fate::Removed))
}
