//! Cards of ranks that are gone.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::path::Path;

use super::table::{Card, MAX_CARD};
use super::LOOK;
use crate::distributed::lending;
use crate::error::Result;
use crate::publish::clock::{Patience, Watched};
use crate::publish::disk::{At, Dir};
use crate::publish::folder::{check_owner, entries};
use crate::publish::gc::{Fate, Leaving};
use crate::publish::place::Place;

/// True for the name of a card, or of what belongs to one.
pub(super) fn is_ours(name: &str) -> bool {
    ["rank-", "sources-"].iter().any(|prefix| name.starts_with(prefix)) && name.ends_with(".json")
        || name.strip_suffix(".new").is_some_and(|nonce| nonce.len() == 32)
        || lending::is_ours(name)
}

/// Removes the remains of ranks towards `out` if all of them are proven dead, after a single process has
/// finished their run. It leaves what it cannot remove to [`crate::publish::gc`].
pub fn forget_dead(out: &Path) {
    let Ok(place) = Place::find(out, "0000000000000000") else { return };
    let Ok(folder) = place.base.sub(&place.meeting_name()) else { return };
    if check_owner(&place, &folder).is_ok() {
        remove_if_dead(&place.base, &place.meeting_name(), &folder);
    }
}

/// Removes the folder `name`, in which ranks met, if no rank with a card there is alive, as far as this is
/// known.
pub(super) fn remove_if_dead(base: &Dir, name: &OsStr, folder: &Dir) {
    let Ok(names) = entries(folder) else { return };
    let is_dead = |name: &String| {
        let card = folder.read_small(name, MAX_CARD).ok().flatten();
        card.and_then(|bytes| serde_json::from_slice::<Card>(&bytes).ok())
            .is_some_and(|c| c.process.is_dead())
    };
    if names.iter().filter(|name| name.starts_with("rank-")).all(is_dead) {
        names.iter().filter(|name| is_ours(name)).for_each(|name| drop(folder.remove_file(name)));
        let _ = base.remove_dir(name);
    }
}

/// Removes the cards of ranks that are gone, and the folder if none is left.
pub(crate) fn collect(
    place: &Place,
    patience: &Patience,
    dry: bool,
    go_on: &dyn Fn() -> bool,
) -> Result<Option<Leaving>> {
    let name = place.meeting_name();
    let path = place.base.join(&name);
    let folder = match place.base.sub(&name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        folder => folder.at(&path, "cannot open")?,
    };
    let bytes = folder.stored_bytes();
    let left = |fate| Some(Leaving { path: path.clone(), run: None, fate, bytes, results: Vec::new() });
    if check_owner(place, &folder).is_err() {
        return Ok(left(Fate::Foreign));
    }
    let cards = || -> Result<BTreeMap<String, (String, u64, bool)>> {
        let names = entries(&folder)?.into_iter().filter(|name| name.starts_with("rank-"));
        let read = |name: String| {
            let card: Card = serde_json::from_slice(&folder.read_small(&name, MAX_CARD).ok()??).ok()?;
            Some((name, (card.nonce, card.beat, card.process.is_dead())))
        };
        Ok(names.filter_map(read).collect())
    };
    let Patience { time, clock } = patience;
    let first = cards()?;
    let mut watched = Watched::begin(clock.now(), *time);
    while first.values().any(|(.., dead)| !dead) && watched.look(clock.now()) < *time && go_on() {
        clock.sleep(LOOK);
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
