"""Leftovers of a run at a prefix of a store."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import _core
from ..common import codes
from ..common.addresses import normalise_address
from ..common.errors import FastshardError
from ..stores import claims, registry
from ..stores.claims import CLAIM, OWN_FOLDER, find_claim, is_own
from ..stores.store import ConditionFailed
from .leftovers import Leftover

if TYPE_CHECKING:
    from ..stores.claims import Claim
    from ..stores.store import Mark, StoredFile, WritableStore

__all__ = ["collect"]

#: Seconds between two reads of a claim.
_LOOK = 1.0
#: Minimum number of digits of a run's id that identify it.
_LEAST_DIGITS = 8


def collect(
    scheme: str,
    address: str,
    settings: Mapping[str, str],
    abandon: str | None,
    patience: float,
    dry_run: bool,
) -> list[Leftover]:
    """Remove the leftovers of ended runs at a prefix, unless a run can continue them.

    Args:
        scheme: the scheme of the address.
        address: the destination of the runs.
        settings: settings of the store.
        abandon: a resumable run to remove: its id, or at least 8 digits of it.
        patience: seconds within which a running process shows a sign of life.
        dry_run: report what would be removed, and remove nothing.

    Returns:
        The leftovers and their fate; at most one run has claimed a prefix.

    Raises:
        FastshardError: ``FS501`` if the run to remove does not exist; otherwise as the methods of the store.
    """
    store = registry.open_writable_store(scheme, normalise_address(address), settings)
    found = store.list_objects()
    claimed = find_claim(store) if any(file.path == CLAIM for file in found) else None
    if abandon is not None and (
        claimed is None or len(abandon) < _LEAST_DIGITS or not claimed[0].run.startswith(abandon)
    ):
        raise FastshardError.of(
            codes.NO_SUCH_PATH,
            "no run with this id has claimed the destination",
            file=store.address,
            got=abandon,
            expected="no run" if claimed is None else claimed[0].run,
            help="name a run that `fastshard clean` lists",
        )
    own = [file for file in found if is_own(file.path)]
    if claimed is None:
        return _remove(store, None, own, dry_run) if own else []
    claim, mark = claimed
    if any(file.path == claim.last for file in found):
        # The result is in place.
        return _remove(store, claim, own, dry_run, mark)
    holds = claim.make_holds()
    files = [file for file in found if holds(file.path)]
    if _is_alive(store, claim, mark, max(patience, 2 * claims.BEAT)):
        return [_describe(store, claim, [*own, *files], "at_work")]
    if abandon is None and any(file.path != CLAIM for file in own):
        return [_describe(store, claim, [*own, *files], "resumable")]
    return _remove(store, claim, [*own, *files], dry_run, mark)


def _is_alive(store: WritableStore, claim: Claim, mark: Mark, patience: float) -> bool:
    """Return True if a run shows a sign of life, or another run takes its claim over."""
    if _core.is_process_dead(claim.process)[0]:
        return False
    end = time.monotonic() + patience
    while time.monotonic() < end:
        time.sleep(_LOOK)
        now = find_claim(store)
        if now is None or now != (claim, mark):
            return True
    return False


def _remove(
    store: WritableStore, claim: Claim | None, files: list[StoredFile], dry_run: bool, mark: Mark = None
) -> list[Leftover]:
    """Remove objects once no other run can take over their claim."""
    paths = {file.path for file in files}
    if dry_run:
        pass
    elif claim is None:
        for path in paths:
            store.remove(path)
    else:
        try:
            # Nobody continues the run from now on.
            lease = claims.seize(store, claim, mark)
        except ConditionFailed:
            return [_describe(store, claim, files, "at_work")]
        try:
            lease.remove({*paths, CLAIM})
        finally:
            lease.stop()
    return [_describe(store, claim, files, "removed")]


def _describe(store: WritableStore, claim: Claim | None, files: list[StoredFile], fate: str) -> Leftover:
    size = sum(file.size for file in files)
    run = None if claim is None else claim.run
    return Leftover(f"{store.address}/{OWN_FOLDER}", run, fate, size)
