"""Manifests of checkpoints that fastshard did not write: hashes of all tensors and files."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .. import _core
from ..checkpoint import manifest_files
from ..checkpoint.manifests import (
    MANIFEST_NAME,
    Manifest,
    is_manifest,
    run_options,
)
from ..checkpoint.open_checkpoint import CheckpointSource, as_checkpoint
from ..checkpoint.planning import make_plan
from ..common import codes, json_text, memory_budget, safe_files
from ..common.errors import FastshardError, from_core, raise_errors
from ..common.options import Opening, StrPath
from ..common.progress import Progress, Report
from ..common.stored_places import show_text
from ..targets.request import Request

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["manifest"]


@memory_budget.kept
def manifest(
    source: CheckpointSource,
    out: StrPath | None = None,
    *,
    exclude: Iterable[str] = (),
    stats: bool = False,
    memory: str | int | None = None,
    threads: int | None = None,
    progress: Report = False,
    **opening: Unpack[Opening],
) -> Manifest:
    """Records hashes of a checkpoint, so that later damage can be detected.

    Args:
        source: an opened checkpoint, a path, or several node-local paths.
        out: file to write; default ``fastshard.manifest.json`` in the checkpoint's (first) root.
        exclude: glob patterns of names of arrays to omit because they cannot be read; everything else is
            hashed.
        stats: include statistics of each stored tensor (see :class:`fastshard.TensorStats`).
        memory: as for :func:`fastshard.convert`.
        threads: worker threads.
        progress: as for :func:`fastshard.convert`.
        opening: as for :func:`fastshard.open`.

    Raises:
        FastshardError: if the checkpoint is damaged (its own checksums do not match, or files are missing),
            or if ``out`` exists and is not a manifest.

    Examples:
        >>> fastshard.manifest("run")  # writes run/fastshard.manifest.json
        <fastshard.Manifest inventory: 80 tensors in 14 files>
        >>> fastshard.verify("run")
        <fastshard.Verdict ok: contents checked: against the manifest fastshard.manifest.json, 0 warnings>
    """
    checkpoint = as_checkpoint(source, **opening)
    if out is None and _core.is_remote(checkpoint.roots[0]):
        raise FastshardError.of(
            codes.USAGE,
            "fastshard cannot write a manifest to a store yet",
            help="name a file on this host",
            run=[f"fastshard manifest {shlex.join(map(show_text, checkpoint.listing.given()))} -o FILE"],
        )
    path = safe_files.replaceable(out if out is not None else checkpoint.roots[0] / MANIFEST_NAME)
    if safe_files.is_file(path) and path.stat().st_size and not is_manifest(path):
        raise FastshardError.of(
            codes.OUT_EXISTS,
            "exists and is not a manifest",
            file=str(path),
            help="choose another file with -o FILE",
        )
    plan = make_plan(checkpoint.opened, Request(exclude=exclude))
    raise_errors(plan.findings)
    gate, findings = checkpoint.opened.gate, list(plan.findings)
    try:
        with Progress(progress) as bar:
            run = run_options(memory, threads, checkpoint.opened.catalog)
            findings += gate.passed(plan.core.check(run, bar.phase("verifying"))[0])
            run["stats"] = "full" if stats else "nothing"
            made, found = checkpoint.opened.catalog.inventory(run, bar.phase("hashing"))
    except _core.CoreError as error:
        raise from_core(error) from None
    # What the plan takes nothing of is read here for the first time.
    findings = list(dict.fromkeys([*findings, *gate.passed(found)]))
    manifest = Manifest.written(made, findings)
    del made
    document = manifest.document
    # What was decided holds for the files as they are now: `verify` takes it from there.
    decided = [f for f in findings if f.decided is not None]
    as_found = [f.replace(decided=None).to_dict() for f in decided]
    document["findings"] = [
        *(f for f in document["findings"] if f not in as_found),
        *(f.to_dict() for f in decided),
    ]
    document["files"] += manifest_files.companions(checkpoint)
    safe_files.replace(path, json_text.indented_pieces(document))
    return manifest
