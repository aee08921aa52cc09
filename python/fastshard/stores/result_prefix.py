"""A result's prefix in a store: one run claims it and fills it, and its last object makes the result appear.

=================================  =================================================================
``.fastshard/claim``               put before all else, where nothing has the name: the run that owns
                                   the prefix, its plan, its process, the names that it writes, and a
                                   beat that shows that it is alive
the result's files                 under their final names
``.fastshard/done/NAME``           a file that is complete: its size, the store's mark of it, and the
                                   digest of its tensors
``fastshard.manifest.json``        put once all files are there, where nothing has the name
the index, pointer or only file    put last: readers start from it
=================================  =================================================================

After the last object, the claim and the records are removed. Until then readers refuse the prefix.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from ..common import codes
from ..common.errors import FastshardError, Finding, from_core
from ..common.log import log
from . import claims
from .claims import CLAIM, OWN_FOLDER, Claim, Lease, find_claim, is_own
from .retries import TRIES, look_again, repeat
from .store import NEW, ConditionFailed, Mark, StoredFile, WritableStore

if TYPE_CHECKING:
    from .._core import FileParts

__all__ = ["ResultPrefix", "part_bytes", "upload_memory"]

_DONE = OWN_FOLDER + "done/"
#: Minimum size of a part of an upload in bytes.
_PART = 8 << 20
#: Maximum number of parts of an upload, with a reserve.
_MOST_PARTS = 9_000
#: Number of files that are uploaded at a time while they are written; as in the core.
_UPLOADS = 2
#: A resumed run uploads smaller files again.
_WORTH_RECORDING = 1 << 20
#: Seconds between two listings of the prefix; a difference counts only if it persists.
_PAUSE = 1.0
#: Seconds between two checks whether the run continues, and seconds in which an upload may end by itself.
_LOOK = 0.1
_GRACE = 3.0
#: Requests for records at a time.
_PARALLEL = 8


def part_bytes(size: int) -> int:
    """Return the part size in bytes for an upload of ``size`` bytes."""
    return max(_PART, -(-size // _MOST_PARTS >> 20) << 20)


def upload_memory(at_once: int) -> int:
    """Return the memory in bytes for uploads that each send ``at_once`` parts at a time."""
    return _UPLOADS * (at_once + 2) * _PART


def _answers(method: Callable[..., None]) -> Callable[..., list[Finding] | None]:
    """Make a method return the findings of its exceptions, in the form that the core reads."""

    def answer(self: ResultPrefix, *args: Any) -> list[Finding] | None:
        try:
            method(self, *args)
        except FastshardError as error:
            return error.findings
        except MemoryError:
            raise
        except Exception as error:
            about = f"{self.address}/{args[0]}" if isinstance(args[0], str) else self.address
            return _unexpected(error, about).findings
        return None

    return answer


class ResultPrefix:
    """A prefix of a store that one run has claimed, and at which it publishes its result.

    Methods that the core calls return None, or the findings that end the run.
    """

    def __init__(
        self,
        store: WritableStore,
        plan: str,
        names: Sequence[str],
        last: str,
        *,
        resume: bool = False,
        unconditional: bool = False,
        at_once: int = 4,
        beat: float | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Claim the prefix.

        Args:
            store: the prefix.
            plan: digest of the run's plan.
            names: names of the result's files; a name with a trailing slash is a folder.
            last: the name from which readers start.
            resume: take over the claim of an ended run of the same plan.
            unconditional: accept a store that does not honour conditions.
            at_once: number of parts that an upload sends at a time.
            beat: seconds between two heartbeats; default :data:`BEAT`.
            sleep: called with the seconds to wait.

        Raises:
            FastshardError: ``FS504`` if the prefix has objects; ``FS508`` if a run has left its claim there;
                ``FS509`` if it is alive; ``FS514`` for a store without conditions; otherwise as the methods
                of the store.
        """
        self._store, self._at_once, self._sleep = store, at_once, sleep
        self._beat = claims.BEAT if beat is None else beat
        self._written: set[str] = set()
        #: Uploads that the server had not answered when the run ended.
        self._silent: list[threading.Thread] = []
        #: Marks of the files that are recorded as complete.
        self._recorded: dict[str, str] = {}
        #: Record of each file that an earlier run completed.
        self.complete: dict[str, str] = {}
        #: Findings for the result.
        self.findings: list[Finding] = []
        #: True if an earlier run published the result and left only its claim.
        self.is_published = False
        found = store.list_objects()
        claim = find_claim(store) if any(file.path == CLAIM for file in found) else None
        if claim is None:
            self._refuse_occupied(found)
            self._lease = self._begin(Claim.make(plan, names, last), unconditional)
        else:
            self._lease = self._take_over(*claim, plan, found, resume, unconditional)

    @property
    def address(self) -> str:
        """The address for messages."""
        return self._store.address

    @property
    def run(self) -> str:
        """The identity of the run."""
        return self._lease.claim.run

    # --- what the core calls

    @_answers
    def upload(self, name: str, parts: FileParts) -> None:
        """Upload a file under its final name."""
        size = parts.size
        part_size = part_bytes(size)
        self._written.add(name)
        left = TRIES
        while True:
            self._lease.refuse_lost()
            left -= 1
            taken: list[int] = []
            try:
                content = _read_parts(parts, part_size, taken)
                return self._wait_for_upload(
                    parts, partial(self._store.upload, name, content, size, part_size, self._at_once)
                )
            except Exception as error:
                # The answer may be lost after the store has put the object, whole: nobody else writes here.
                if sum(taken) == size and self._has_appeared(name, size):
                    return None
                passes = isinstance(error, FastshardError) and error.code == codes.IO
                if taken or not passes or not left:
                    raise

    @_answers
    def record(self, name: str, content: str) -> None:
        """Record that a file is complete, with the digest of its tensors."""
        file = self._find(name)
        self._recorded[name] = file.identity
        if file.size >= _WORTH_RECORDING:
            record = json.dumps({"size": file.size, "identity": file.identity, "content": content})
            repeat(lambda: self._store.put(f"{_DONE}{name}", record.encode()))

    @_answers
    def check(self, files: list[tuple[str, int]]) -> None:
        """Refuse to publish unless exactly ``files`` exist and this run still owns the prefix."""
        self._lease.confirm()
        findings = look_again(lambda: self._compare(dict(files)), lambda findings: not findings, self._pause)
        if findings:
            raise FastshardError(findings)

    @_answers
    def put_last(self, name: str, path: Path) -> None:
        """Put a small file under a free name."""
        self._lease.confirm()
        content = path.read_bytes()
        self._written.add(name)
        if len(content) > part_bytes(0) or not self._lease.has_conditions:
            # A put with a condition is one request.
            part_size = part_bytes(len(content))
            parts = (content[at : at + part_size] for at in range(0, len(content), part_size))
            try:
                self._store.upload(name, parts, len(content), part_size, self._at_once)
            except Exception:
                if not self._has_appeared(name, len(content)):
                    raise
            return
        self._put_new(name, content)

    def _wait_for_upload(self, parts: FileParts, upload: Callable[[], None]) -> None:
        """Wait for an upload while the run continues, so that a silent server does not block an interrupt.

        Raises:
            FastshardError: ``FS510`` once the run has ended; otherwise the errors of the upload.
        """
        raised: list[BaseException] = []

        def work() -> None:
            try:
                upload()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=work, name="fastshard-put", daemon=True)
        thread.start()
        while thread.is_alive() and not parts.has_ended:
            thread.join(_LOOK)
        # An upload that ends by itself is taken back by the store's client.
        thread.join(_GRACE if parts.has_ended else None)
        if thread.is_alive():
            self._silent.append(thread)
            raise FastshardError.of(codes.INTERRUPTED, "the run has ended", file=self.address)
        if raised:
            raise raised[0]

    # --- the end

    def finish(self) -> list[Finding]:
        """Remove the claim and the records of a published result; return warnings about objects that remain.

        Raises:
            FastshardError: ``FS509`` if another run has taken over the destination meanwhile.
        """
        try:
            own = {file.path for file in self._store.list_objects() if is_own(file.path)}
            self._lease.remove({*own, CLAIM})
        except Exception as error:
            self._lease.refuse_lost()
            return [_left(self.address, error, "complete, but its claim could not be removed")]
        finally:
            self._lease.stop()
        return []

    def abandon(self) -> list[Finding]:
        """Remove the run's objects if it still owns the prefix; return warnings about objects that remain."""
        for thread in self._silent:
            # It may put an object still.
            thread.join()
        try:
            # A list may be late: what was written is removed whether it is listed or not.
            own = {file.path for file in self._store.list_objects() if is_own(file.path)}
            files = self._written | {*self.complete}
            records = {_DONE + name for name in {*self._recorded, *self.complete}}
            self._lease.remove({CLAIM, *own, *files, *records})
        except Exception as error:
            if self._lease.is_lost:
                return []
            return [_left(self.address, error, "objects of the failed run could not be removed")]
        finally:
            self._lease.stop()
        return []

    def leave(self) -> list[str]:
        """Keep everything for a run that continues this one; return the names of complete files."""
        self._lease.stop()
        return sorted({*self._recorded, *self.complete})

    # --- claims

    def _refuse_occupied(self, found: list[StoredFile]) -> None:
        others = [file.path for file in found if not is_own(file.path)]
        if others:
            raise FastshardError.of(
                codes.OUT_EXISTS,
                "the destination is not empty",
                file=self.address,
                expected="no objects",
                got=f"{others[0]} and {len(others) - 1} more" if others[1:] else others[0],
                help="choose another prefix: fastshard does not replace a result in a store",
            )

    def _begin(self, claim: Claim, unconditional: bool) -> Lease:
        """Put a claim on an unclaimed prefix, and determine whether the store honours conditions."""
        content = claim.to_bytes()
        try:
            lease = Lease(self._store, claim, self._put_new(CLAIM, content), self._beat)
        except FastshardError:
            raise
        except BaseException:
            # A signal that came when it was there already.
            with contextlib.suppress(Exception):
                found = find_claim(self._store)
                if found is not None and found[0].run == claim.run:
                    self._store.remove(CLAIM)
            raise
        try:
            self._probe(lease, unconditional)
            # Whoever listed before this claim was put may have put objects since.
            self._refuse_occupied(self._store.list_objects())
        except BaseException:
            lease.stop()
            with contextlib.suppress(Exception):
                self._store.remove(CLAIM)
            raise
        return lease

    def _probe(self, lease: Lease, unconditional: bool) -> None:
        """Check that the store refuses to put a claim a second time."""
        content = lease.claim.to_bytes()
        if repeat(lambda: self._put_if_new(CLAIM, content)) is None:
            return
        lease.has_conditions = False
        if not unconditional:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "the store overwrites an object although the write required that none exists: two runs "
                "could publish here at the same time",
                file=self.address,
                expected="a store that honours If-None-Match",
                help="make sure that nothing else writes here, and accept it",
                run=["--accept unconditional"],
            )
        self.findings.append(
            Finding.of(
                codes.NOT_PROVABLE,
                "the store ignores conditional writes, so fastshard cannot check whether another run wrote "
                "to the prefix at the same time",
                severity="warning",
                file=self.address,
                unnoticed="a second run that wrote to the same prefix",
            )
        )

    def _take_over(
        self,
        claim: Claim,
        mark: Mark,
        plan: str,
        found: list[StoredFile],
        resume: bool,
        unconditional: bool,
    ) -> Lease:
        """Take over the claim of an ended run, and read its records of complete files."""
        dead, process = _core.is_process_dead(claim.process)
        is_same = claim.plan == plan
        if not is_same or not resume:
            clean = f"fastshard clean {shlex.quote(self.address)} --abandon {claim.run[:16]}"
            raise FastshardError.of(
                codes.LEFTOVER_RUN,
                f"{'an interrupted run of this plan' if is_same else 'another run'} has claimed the "
                f"destination ({process})",
                file=self.address,
                help="continue it, or remove what it left behind"
                if is_same
                else "wait until the run has ended, then clean the destination",
                run=[*(["--resume"] if is_same else []), clean],
            )
        if not dead:
            mark = self._wait_for_beat(claim, mark, process)
        holds = claim.make_holds()
        stray = [file.path for file in found if not is_own(file.path) and not holds(file.path)]
        if stray:
            raise FastshardError.of(
                codes.OUT_EXISTS,
                "the prefix has an object that the interrupted run did not write",
                file=f"{self.address}/{stray[0]}",
                help="move the object away, then continue the run",
                run=["--resume"],
            )
        try:
            lease = claims.seize(self._store, claim, mark, plan, self._beat)
        except ConditionFailed:
            raise self._locked(process) from None
        try:
            self._read_records(lease, {file.path: file for file in found}, unconditional)
        except BaseException:
            lease.stop()
            raise
        return lease

    def _read_records(self, lease: Lease, present: dict[str, StoredFile], unconditional: bool) -> None:
        """Read the records of files that an interrupted run completed, and remove its other objects."""
        if lease.claim.last in present:
            self.is_published = True
            return
        self._probe(lease, unconditional)
        records = [path for path in present if path.startswith(_DONE)]
        with ThreadPoolExecutor(_PARALLEL) as pool:
            for path, record in zip(records, pool.map(self._store.fetch, records), strict=True):
                name = path.removeprefix(_DONE)
                if record is not None and (content := _parse_record(record[0], present.get(name))):
                    self.complete[name] = content
                    self._recorded[name] = present[name].identity
        kept = {CLAIM, *self.complete, *(_DONE + name for name in self.complete)}
        # The rest is written again; without the last object nobody has read it as a result.
        lease.remove([path for path in present if path not in kept])

    def _wait_for_beat(self, claim: Claim, mark: Mark, process: str) -> Mark:
        """Wait for a heartbeat of a run whose process is not known to have ended.

        Raises:
            FastshardError: ``FS509`` if there is one.
        """
        for _ in range(claims.MISSED):
            self._sleep(self._beat)
            now = find_claim(self._store)
            if now is None or now[0] != claim:
                raise self._locked(process)
            mark = now[1]
        return mark

    def _locked(self, process: str) -> FastshardError:
        return FastshardError.of(
            codes.LOCKED,
            f"another run is working here: {process}",
            file=self.address,
            help="wait until the other run has ended",
        )

    # --- objects

    def _put_if_new(self, path: str, content: bytes) -> Mark | None:
        """Put an object under a free name; return its mark, or None if the store refuses."""
        try:
            return self._store.put(path, content, NEW)
        except ConditionFailed:
            return None

    def _put_new(self, path: str, content: bytes) -> Mark:
        """Put an object under a free name. If the answer is lost, reading the object shows the outcome.

        Raises:
            FastshardError: ``FS504`` if another object has the name.
        """
        failed: FastshardError | None = None
        for _ in range(TRIES):
            try:
                return self._store.put(path, content, NEW)
            except ConditionFailed:
                failed = None
            except FastshardError as error:
                if error.code != codes.IO:
                    raise
                failed = error
            except Exception as error:
                failed = _unexpected(error, f"{self.address}/{path}")
            found = self._store.fetch(path)
            if found is not None:
                if found[0] == content:
                    return found[1]
                raise FastshardError.of(
                    codes.OUT_EXISTS if path == CLAIM else codes.PUBLISH_CONFLICT,
                    "another run has claimed the destination"
                    if path == CLAIM
                    else "an object appeared under a name of the result",
                    file=f"{self.address}/{path}",
                    help="choose another prefix, or wait until the other run has ended",
                )
        if failed is not None and path != CLAIM:
            failed = FastshardError.of(
                codes.IO,
                "the store did not answer, so it is unknown whether the object exists",
                file=f"{self.address}/{path}",
                help="continue the run, which checks this",
                run=["--resume"],
            )
        raise failed or self._locked("its claim appears and disappears")

    def _has_appeared(self, name: str, size: int) -> bool:
        """Return True if an object of this size exists; also return False if the store does not answer."""
        try:
            found = self._store.find(name)
        except Exception:
            return False
        return found is not None and found.size == size

    def _pause(self) -> None:
        self._sleep(_PAUSE)

    def _find(self, name: str) -> StoredFile:
        file = look_again(lambda: self._store.find(name), lambda file: file is not None, self._pause)
        if file is not None:
            return file
        raise FastshardError.of(
            codes.WRITTEN_DIFFERS,
            "the object just written is missing",
            file=f"{self.address}/{name}",
            help="check what else writes to the bucket, and continue the run",
            run=["--resume"],
        )

    def _compare(self, files: dict[str, int]) -> list[Finding]:
        """Compare the objects in the store with the files that were written."""
        present = {file.path: file for file in self._store.list_objects() if not is_own(file.path)}
        findings = []

        def find(code: str, message: str, name: str, **fields: str) -> None:
            findings.append(Finding.of(code, message, file=f"{self.address}/{name}", **fields))

        for name, size in files.items():
            file = present.pop(name, None)
            identity = self._recorded.get(name)
            if file is None:
                find(codes.WRITTEN_DIFFERS, "the object just written is missing", name)
            elif file.size != size:
                find(
                    codes.WRITTEN_DIFFERS,
                    "the object just written has another size",
                    name,
                    expected=f"{size} bytes",
                    got=f"{file.size} bytes",
                )
            elif identity is not None and file.identity != identity:
                find(codes.PUBLISH_CONFLICT, "the object was replaced after it was written", name)
        for name in present:
            find(codes.PUBLISH_CONFLICT, "an object appeared that this run did not write", name)
        return findings


def _unexpected(error: Exception, about: str) -> FastshardError:
    """Make the error for an unexpected exception from a store's client."""
    # Its text may hold an address with a signature.
    log("stores", "%s: %s", about, type(error).__name__)
    return FastshardError.of(
        codes.IO,
        f"the store's writer failed: {type(error).__name__}",
        file=about,
        help="continue the run",
        run=["--resume"],
    )


def _read_parts(parts: FileParts, length: int, taken: list[int]) -> Iterator[bytes]:
    """Yield the parts of a file; the length of each is added to ``taken``."""
    try:
        while (part := parts.take(length)) is not None:
            taken.append(len(part))
            yield part
    except _core.CoreError as error:
        raise from_core(error) from None


def _parse_record(content: bytes, file: StoredFile | None) -> str | None:
    """Return the digest of a file's tensors from its record; None if the file has changed since."""
    try:
        record = json.loads(content)
        if file is None or (record["size"], record["identity"]) != (file.size, file.identity):
            return None
        return str(record["content"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _left(address: str, error: Exception, message: str) -> Finding:
    if not isinstance(error, FastshardError):
        error = _unexpected(error, address)
    return Finding.of(
        codes.LEFTOVER_RUN,
        f"{message}: {error.findings[0].message}",
        severity="warning",
        file=f"{address}/{OWN_FOLDER}",
        help="run the command that removes it",
        run=[f"fastshard clean {shlex.quote(address)}"],
    )
