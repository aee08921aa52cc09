"""Runs that are split into parts: a run is started once, any process on any host can write a part at any
time, and the run is committed once. Parts do the work of ranks
(:mod:`fastshard.conversion.distributed.rendezvous`), but do not wait for one another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import _core
from ...checkpoint.manifests import Manifest
from ...common import codes, memory_budget
from ...common.addresses import is_address
from ...common.errors import FastshardError, Finding, from_core
from ...common.option_checks import refused
from ...common.options import StrPath, WriteRequest, split_request
from ...common.progress import Progress, Report
from ...common.records import asdict, dataclass, replace
from ...zarr import array_writer
from ..convert import carrying, prepared
from ..job import Job

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...common.options import WriteOptions

__all__ = ["SplitRun", "commit", "make_part", "split"]

Source = StrPath | Iterable[StrPath]


@dataclass(frozen=True)
class SplitRun:
    """A run that was split into parts.

    Examples:
        >>> run = fastshard.split("run", "out", to="hf", parts=2, vocab_size=500)
        >>> len(run.id), len(run.bytes), sum(run.bytes)
        (32, 2, 280704)
    """

    #: Id of the run: 32 hexadecimal digits.
    id: str
    #: The destination, absolute.
    out: str
    #: The staging folder.
    folder: str
    #: Number of bytes that each part writes; empty if the result is complete and only needs the commit.
    bytes: list[int]
    #: Warnings and notes.
    findings: list[Finding]
    #: Memory limit of a part, in bytes.
    memory: int


@memory_budget.kept
def split(
    source: Source,
    out: StrPath,
    to: str | None = "hf",
    *,
    parts: int,
    expect: StrPath | Mapping[str, Any] | None = None,
    tokenizer: StrPath | None = None,
    memory: str | int | None = None,
    threads: int | None = None,
    **options: Unpack[WriteOptions],
) -> SplitRun:
    """Splits a run into parts and writes no tensor.

    The function checks source and destination, creates all files, and divides the work.

    Args:
        source: a path, or several node-local ones; all processes that write parts must see them at the same
            paths.
        out: destination directory, on storage that all processes can access.
        parts: number of parts, of equal size.
        options: as for :func:`fastshard.convert`, like the other arguments; with ``resume``, the rest of an
            earlier run of the same plan is divided.

    Raises:
        FastshardError: as :func:`fastshard.convert`; ``FS509`` if processes are working on the run.

    Examples:
        >>> run = fastshard.split("run", "out", to="hf", parts=2, vocab_size=500)
        >>> [fastshard.make_part("out", part, run.id) for part in range(2)]  # a process for each part
        [True, True]
        >>> fastshard.commit("out", run.id)
        <fastshard.Manifest hf: 40 tensors in 3 files>
    """
    request, others = split_request(options)
    if isinstance(parts, bool) or not isinstance(parts, int) or not 1 <= parts <= 100_000:
        raise refused("parts", "an integer from 1 to 100000", parts)
    if others.pop("storage_options", None):
        # The options are kept in a file that all processes read.
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "storage_options cannot be used with several processes",
            help="set the environment of each process instead",
        )
    if isinstance(source, (str, os.PathLike)):
        source = [source]
    about = {
        "source": [_absolute(path) for path in source],
        "to": to,
        "expect": _kept("expect", expect),
        "tokenizer": _kept("tokenizer", tokenizer),
        "options": {name: _kept(name, value) for name, value in others.items()},
        # Whoever makes a part of it continues nothing.
        "writing": asdict(replace(request, resume=False)),
    }
    with Progress(False) as bar:
        job = prepared(about["source"], to, expect, tokenizer, memory, threads, others, bar, None)
    if job.checkpoint.opened.reference is not None:
        job.checkpoint.opened.reference.refuse_inside(out)
    given = job.checkpoint.read_from
    with carrying(job.plan.core):
        nonce, folder, _, sizes, found = _core.begin_parts(
            job.plan.core,
            os.fspath(out),
            job.set_up(request),
            parts,
            _written(about),
            (job.copies, given),
        )
    return SplitRun(nonce, _absolute(out), folder, sizes, [*job.findings, *found], job.run["memory"])


#: The JSON key for a name that is not valid UTF-8.
_BYTES = "fastshard:bytes"


def _written(value: Any) -> Any:
    """Convert a value for JSON; names that are not UTF-8 become their bytes."""
    if isinstance(value, str):
        return value if value.isascii() or not _is_broken(value) else {_BYTES: os.fsencode(value).hex()}
    if isinstance(value, Mapping):
        return {key: _written(part) for key, part in value.items()}
    return [_written(part) for part in value] if isinstance(value, (list, tuple)) else value


def _is_broken(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _read(value: Any) -> Any:
    """Convert the output of :func:`_written` back into the value."""
    if isinstance(value, dict):
        if value.keys() == {_BYTES}:
            return os.fsdecode(bytes.fromhex(value[_BYTES]))
        return {key: _read(part) for key, part in value.items()}
    return [_read(part) for part in value] if isinstance(value, list) else value


def _absolute(path: StrPath) -> str:
    return os.fspath(path) if is_address(path) else str(Path(path).absolute())


#: Options that name files.
_FILES = ("expect", "tokenizer", "config", "layout", "like", "adapter", "fill_from")


def _kept(name: str, value: Any) -> Any:
    """Convert a value into the form that is stored for the processes that write the parts."""
    if value is None or isinstance(value, Mapping):
        return value
    if name in _FILES:
        return _absolute(value)
    return list(value) if isinstance(value, tuple) else value


def _found(out: StrPath, run: str) -> dict[str, Any]:
    if not isinstance(run, str) or not run:
        raise refused("run", "the id that was printed when the run was split", run)
    try:
        found = _core.shared_run(os.fspath(out), run)
    except _core.CoreError as error:
        raise from_core(error) from None
    if not isinstance(found["about"], dict) or "source" not in found["about"]:
        raise FastshardError.of(
            codes.USAGE,
            "this run was started with ranks, not with parts",
            file=found["folder"],
            help="run the ranks again",
            run=["--resume"],
        )
    found["about"] = _read(found["about"])
    return found


def _prepare(
    about: Mapping[str, Any],
    memory: str | int | None,
    threads: int | None,
    bar: Progress,
    share: tuple[int, int] | None,
) -> Job:
    """Prepare the job that the record of a run describes; ``share`` as for :func:`.convert.prepared`."""
    source, to, expect, tokenizer = about["source"], about["to"], about["expect"], about["tokenizer"]
    return prepared(source, to, expect, tokenizer, memory, threads, about["options"], bar, share)


@memory_budget.kept
def make_part(
    out: StrPath,
    part: int,
    run: str,
    *,
    memory: str | int | None = None,
    threads: int | None = None,
    progress: Report = False,
) -> bool:
    """Writes one part of a run, or finishes a part that was interrupted.

    Args:
        out: the destination of the run.
        part: number of the part, from 0.
        run: the run's id, or at least its first 8 digits.
        memory: as for :func:`fastshard.convert`.
        threads: as for :func:`fastshard.convert`.
        progress: as for :func:`fastshard.convert`.

    Returns:
        False if the part was already complete.

    Raises:
        FastshardError: ``FS501`` if the run does not exist, and then nothing is written; ``FS509`` if another
            process is writing this part.

    Examples:
        >>> run = fastshard.split("run", "out", to="hf", parts=2, vocab_size=500)
        >>> fastshard.make_part("out", 0, run.id)
        True
        >>> fastshard.make_part("out", 0, run.id)  # it is already complete
        False
    """
    found = _found(out, run)
    about, parts = found["about"], found["parts"]
    if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part < (parts or 0):
        raise refused("part", f"an integer from 0 to {(parts or 1) - 1}", part)
    with Progress(progress) as bar:
        job = _prepare(about, memory, threads, bar, (part + 1, parts))
        with carrying(job.plan.core):
            return _core.make_part(
                job.plan.core,
                os.fspath(out),
                job.set_up(WriteRequest.of(**about["writing"])),
                found["run"],
                part,
                (job.copies, job.checkpoint.read_from),
                bar.phase("writing"),
            )


@memory_budget.kept
def commit(
    out: StrPath,
    run: str,
    *,
    memory: str | int | None = None,
    threads: int | None = None,
    progress: Report = False,
) -> Manifest:
    """Checks the output of a run's parts, and publishes the result.

    Args:
        out: the destination of the run.
        run: the run's id, or at least its first 8 digits.
        memory: as for :func:`fastshard.convert`.
        threads: as for :func:`fastshard.convert`.
        progress: as for :func:`fastshard.convert`.

    Raises:
        FastshardError: ``FS523`` with the missing parts; otherwise as :func:`fastshard.convert`.

    Examples:
        >>> run = fastshard.split("run", "out", to="hf", parts=1, vocab_size=500)
        >>> fastshard.make_part("out", 0, run.id)
        True
        >>> fastshard.commit("out", run.id)
        <fastshard.Manifest hf: 40 tensors in 3 files>
    """
    found = _found(out, run)
    about = found["about"]
    with Progress(progress) as bar:
        job = _prepare(about, memory, threads, bar, None)
        with carrying(job.plan.core):
            written = _core.commit(
                job.plan.core,
                os.fspath(out),
                job.set_up(WriteRequest.of(**about["writing"])),
                found["run"],
                array_writer.writer() if job.plan.writes_arrays else None,
                (job.copies, job.checkpoint.read_from),
                bar.phase("writing"),
                bar.tell,
            )
            return job.manifest(written)
