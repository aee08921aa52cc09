"""Claims on prefixes of stores: one run owns a prefix as long as it shows signs of life."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from .. import _core
from ..common import codes
from ..common.errors import FastshardError
from ..common.log import log
from ..common.records import dataclass, replace
from ..common.regex import compile_when_used
from .retries import repeat
from .store import ConditionFailed, Mark, WritableStore

__all__ = ["BEAT", "CLAIM", "OWN_FOLDER", "Claim", "Lease", "find_claim", "is_own", "seize"]

#: The folder for objects that are not part of a result.
OWN_FOLDER = ".fastshard/"
CLAIM = OWN_FOLDER + "claim"
#: Seconds between two heartbeats of a run.
BEAT = 10.0
#: Number of heartbeats that a run may miss before it counts as dead.
MISSED = 3
#: Maximum size of a claim in bytes; it contains the names of a result's files.
MOST_BYTES = 64 << 20
#: Number of objects that are removed at a time, between two checks of the claim.
_BATCH = 64
_PARALLEL = 8
_RUN = compile_when_used(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Claim:
    """The claim of a run on a prefix."""

    #: Identity of the run in 32 hexadecimal digits.
    run: str
    #: Digest of its plan; empty for a run that only removes objects.
    plan: str
    #: Identity of its process.
    process: str
    #: Names of its files; a name with a trailing slash is a folder.
    names: tuple[str, ...]
    #: The object that is written last.
    last: str
    #: Number of its heartbeats.
    beat: int = 0

    @classmethod
    def make(cls, plan: str, names: Iterable[str], last: str) -> Claim:
        """Make a claim of this process."""
        return cls(secrets.token_hex(16), plan, _core.identify_process(), tuple(names), last)

    @classmethod
    def parse(cls, content: bytes, about: str) -> Claim:
        """Read a claim.

        Raises:
            FastshardError: ``FS504`` if the object is not a claim.
        """
        try:
            if len(content) > MOST_BYTES:
                raise ValueError
            read = json.loads(content)
            texts = [read[name] for name in ("run", "plan", "process", "last")]
            names, beat = read["names"], read["beat"]
            are_texts = isinstance(names, list) and all(isinstance(text, str) for text in [*texts, *names])
            if read["version"] != 1 or not are_texts or type(beat) is not int:
                raise ValueError
            run, plan, process, last = texts
            if not _RUN.fullmatch(run):
                raise ValueError
            return cls(run, plan, process, tuple(names), last, beat)
        except (KeyError, TypeError, ValueError, RecursionError):
            raise FastshardError.of(
                codes.OUT_EXISTS,
                "the claim is not from this version of fastshard",
                file=about,
                help="choose another destination",
            ) from None

    def to_bytes(self) -> bytes:
        """Return the object's content."""
        record = {
            "version": 1,
            "run": self.run,
            "plan": self.plan,
            "process": self.process,
            "last": self.last,
            "beat": self.beat,
            "names": list(self.names),
        }
        return json.dumps(record).encode()

    def make_holds(self) -> Callable[[str], bool]:
        """Return a function that returns True for an object of the run."""
        files = {name for name in self.names if not name.endswith("/")}
        folders = tuple(name for name in self.names if name.endswith("/"))
        return lambda path: path in files or path.startswith(folders)

    def touches(self, path: str) -> bool:
        """Return True for an object of the run, and for a folder that contains one."""
        return self.make_holds()(path) or any(name.startswith(f"{path}/") for name in self.names)


def is_own(path: str) -> bool:
    """Return True for a record of the run, which is not part of a result."""
    return path.startswith(OWN_FOLDER)


def find_claim(store: WritableStore) -> tuple[Claim, Mark] | None:
    """Return the claim on a prefix and its mark; None if nobody has claimed it."""
    found = store.fetch(CLAIM)
    return None if found is None else (Claim.parse(found[0], f"{store.address}/{CLAIM}"), found[1])


class Lease:
    """A claim that this process owns. It sends heartbeats until it is stopped or lost."""

    def __init__(self, store: WritableStore, claim: Claim, mark: Mark, beat: float | None = None) -> None:
        """Start to send heartbeats.

        Args:
            store: the prefix.
            claim: the existing claim.
            mark: its mark.
            beat: seconds between two heartbeats; default :data:`BEAT`.
        """
        self._store, self.claim, self._mark = store, claim, mark
        self._beat = BEAT if beat is None else beat
        #: False for a store that ignores the condition of a put.
        self.has_conditions = True
        self.is_lost = False
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._show_life, name="fastshard-claim", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Send a heartbeat if this run still owns the claim.

        Raises:
            FastshardError: ``FS507`` if the store does not answer.
        """
        with self._lock:
            if not self.is_lost:
                repeat(self._put_beat)

    def refuse_lost(self) -> None:
        """Raise an exception if another run is known to have taken over the claim.

        Raises:
            FastshardError: ``FS509``.
        """
        if self.is_lost:
            raise FastshardError.of(
                codes.LOCKED,
                "another run has taken over the destination",
                file=f"{self._store.address}/{CLAIM}",
                help="let the other run finish; then verify its result",
            )

    def confirm(self) -> None:
        """Check that this run still owns the claim.

        Raises:
            FastshardError: ``FS509`` if it does not; ``FS507`` if the store does not answer.
        """
        self.renew()
        self.refuse_lost()

    def stop(self) -> None:
        """Stop sending heartbeats."""
        self._ends.set()
        self._thread.join()

    def remove(self, paths: Iterable[str]) -> None:
        """Remove objects while this run owns the claim; the claim itself, if among them, is removed last.

        Raises:
            FastshardError: ``FS509`` if another run has taken it over; otherwise the errors of the store.
        """
        wanted = set(paths)
        others = sorted(wanted - {CLAIM})
        with ThreadPoolExecutor(_PARALLEL) as pool:
            for at in range(0, len(others), _BATCH):
                self.confirm()
                list(pool.map(self._store.remove, others[at : at + _BATCH]))
        if CLAIM in wanted:
            self.confirm()
            # A beat after this would put the claim again.
            self.stop()
            self._store.remove(CLAIM)

    def _show_life(self) -> None:
        while not self._ends.wait(self._beat) and not self.is_lost:
            try:
                self.renew()
            except Exception as error:
                # Whether the prefix is still this run's is asked again before it publishes.
                log("stores", "%s: no beat: %s", self._store.address, type(error).__name__)

    def _put_beat(self) -> None:
        now = replace(self.claim, beat=self.claim.beat + 1)
        try:
            if not self.has_conditions and not self._owns_claim():
                self.is_lost = True
                return
            condition = self._mark if self.has_conditions else None
            self._mark, self.claim = self._store.put(CLAIM, now.to_bytes(), condition), now
        except ConditionFailed:
            found = find_claim(self._store)
            if found is None or found[0].run != self.claim.run:
                self.is_lost = True
            else:
                # The answer to an earlier put was lost.
                self.claim, self._mark = found

    def _owns_claim(self) -> bool:
        found = find_claim(self._store)
        return found is not None and found[0].run == self.claim.run


def seize(store: WritableStore, claim: Claim, mark: Mark, plan: str = "", beat: float | None = None) -> Lease:
    """Replace the claim of an ended run by a claim of this process.

    Args:
        store: the prefix.
        claim: the existing claim.
        mark: its mark.
        plan: digest of the plan that this process carries out; empty for a process that only removes objects,
            so that no other process continues the run meanwhile.
        beat: as for :class:`Lease`.

    Raises:
        ConditionFailed: the claim no longer has this mark.
    """
    own = Claim.make(plan, claim.names, claim.last)
    return Lease(store, own, store.put(CLAIM, own.to_bytes(), mark), beat)
