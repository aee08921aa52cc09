"""Comparison of fp32 master weights with parameters, and rebuilding of master weights for finetuning."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.drafting import CoreRequest
from ..checkpoint.manifests import MANIFEST_NAME, Manifest, run_options
from ..checkpoint.open_checkpoint import CheckpointSource, as_checkpoint
from ..common import codes, memory_budget
from ..common.errors import FastshardError, Finding, from_core, raise_errors
from ..common.listing import File, Folder, is_utf8
from ..common.options import Opening, StrPath, WriteRequest
from ..common.progress import Progress, Report
from ..common.records import dataclass, field
from ..layouts.declaration import Optimizer
from ..layouts.declaration import Source as Declaration
from .companion_files import hash_copies
from .convert import carrying

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._core import WriteSettings

__all__ = ["MasterWeightsReport", "master_weights", "repair_master_weights"]

#: Files from which DeepSpeed reads the step, the last one first. source: DeepSpeed runtime/engine.py
_TRACKERS = ("latest_universal", "latest")
#: source: DeepSpeed runtime/engine.py at tags 0.10.0 to 0.19.8 (load_checkpoint, refresh_fp32_params)
_LOADING = """\
how to load the parameters for a finetune (DeepSpeed, bf16):
  0.10.2 to 0.12.6    load_optimizer_states=False keeps the initial master weights, and the first step
                      overwrites the weights with them: load a repaired checkpoint as usual instead
  0.13.0 and later    load_module_only=True, or load_optimizer_states=False, rebuilds them
  2025-09 to 0.19.8   ZeRO stage 0 with load_optimizer_states=False needs load_module_only=True as well
  any version         a repaired checkpoint loads as usual, and its optimizer starts afresh"""
#: source: megatron/training/checkpointing.py (load_checkpoint), core 0.16
_LOADING_MEGATRON = """\
how to load the parameters for a finetune (Megatron-LM):
  --no-load-optim (or --finetune) ignores the optimizer state and makes the master weights from the
  parameters"""


@dataclass(frozen=True)
class MasterWeightsReport:
    """The result of comparing fp32 master weights with parameters.

    Examples:
        >>> report = fastshard.master_weights("stale")
        >>> report.findings[0].code, report.findings[0].tensor
        ('FS401', 'embed.weight')
    """

    #: Number of parameters that were compared with their master weights.
    compared: int
    #: Number of elements in these parameters.
    elements: int
    #: Names of parameters whose master weights differ.
    differing: list[str]
    #: Optimizer steps that the ranks' files state; more than one means that files of several steps are mixed.
    steps: list[float]
    findings: list[Finding] = field(default_factory=list)
    #: Advice on which way of loading is safe in which version.
    advice: str = _LOADING

    @property
    def ok(self) -> bool:
        """True if all master weights were compared and none differs."""
        return not any(f.severity == "error" for f in self.findings)


@memory_budget.kept
def master_weights(
    source: CheckpointSource,
    *,
    memory: str | int | None = None,
    threads: int | None = None,
    progress: Report = False,
    **opening: Unpack[Opening],
) -> MasterWeightsReport:
    """Checks that fp32 master weights, rounded to the parameters' dtype, equal the parameters bit by bit.

    Args:
        source: an opened checkpoint, a path, or several node-local paths.
        memory: as for :func:`fastshard.convert`.
        threads: worker threads.
        progress: as for :func:`fastshard.convert`.
        opening: as for :func:`fastshard.open`.

    Raises:
        FastshardError: ``FS402`` if the checkpoint has no master weights.

    Examples:
        >>> report = fastshard.master_weights("stale")
        >>> report.ok, report.compared, len(report.differing)
        (False, 9, 9)
    """
    checkpoint = as_checkpoint(source, **opening)
    declared = _with_masters(checkpoint)
    optimizer = declared.optimizer
    findings = [*checkpoint.opened.findings, *optimizer.findings]
    plan = _plan(checkpoint, lambda: checkpoint.opened.catalog.compare(CoreRequest(declared)))
    outputs = plan.outputs()
    if optimizer.params_stored:
        findings += plan.findings()
        if not outputs and not any(f.severity == "error" for f in findings):
            why = "not checkable: no master weight could be compared"
            findings.append(Finding.of(codes.MASTERS_NOT_CHECKABLE, why, severity="error"))
    else:
        findings.append(
            Finding.of(
                codes.MASTERS_NOT_CHECKABLE,
                "not checkable: ZeRO-3 stores the parameters only as fp32 master weights",
                severity="error",
                help="compare a 16-bit copy of this step, if there is one, with `fastshard diff`",
            )
        )
    try:
        with Progress(progress) as bar:
            run = run_options(memory, threads, checkpoint.opened.catalog)
            differing_ones, _, _ = plan.check(run, bar.phase("comparing"))
    except _core.CoreError as error:
        raise from_core(error) from None
    findings += differing_ones
    findings = checkpoint.opened.gate.evaluate(dict.fromkeys(findings))
    differing = [f.tensor for f in findings if f.code == codes.MASTERS_DIFFER and f.tensor]
    steps = sorted({step for each in optimizer.steps.values() for step in each})
    elements = sum(_count(shape) for _, _, shape, _, _ in outputs)
    advice = _LOADING_MEGATRON if declared.framework.startswith("Megatron") else _LOADING
    return MasterWeightsReport(len(outputs), elements, differing, steps, findings, advice)


def _count(shape: list[int]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def _with_masters(checkpoint: Checkpoint) -> Declaration:
    declared = checkpoint.opened.source
    if not declared.optimizer.masters:
        raise FastshardError.of(
            codes.MASTERS_NOT_CHECKABLE,
            "the checkpoint holds no fp32 master weights",
            severity="error",
            file=os.fspath(checkpoint.roots[0]),
            help="name the directory that holds the optimizer files, or several node-local directories",
        )
    return declared


def _plan(checkpoint: Checkpoint, make: Any) -> _core.Plan:
    try:
        checkpoint.opened.catalog.within(memory_budget.get_limit())
        plan: _core.Plan = make()
    except _core.CoreError as error:
        raise from_core(error) from None
    return plan


@memory_budget.kept
def repair_master_weights(
    source: CheckpointSource,
    out: StrPath,
    *,
    drop_optimizer: bool = False,
    memory: str | int | None = None,
    threads: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    fsync: bool = True,
    progress: Report = False,
    **opening: Unpack[Opening],
) -> Manifest:
    """Writes a copy of a checkpoint, in its layout, whose master weights are rebuilt from the parameters.

    The function assumes that the parameters are correct. It sets the moments and the step to zero, even if
    the step is a number in the pickle. Files remain zip archives with new payloads and checksums; no object
    in them is pickled again.

    Args:
        source: an opened checkpoint, a path, or several node-local paths.
        out: destination directory.
        drop_optimizer: omit the optimizer files instead, for loading with ``load_module_only=True``.
        memory: as for :func:`fastshard.convert`.
        threads: worker threads.
        resume: continue an interrupted run.
        overwrite: replace ``out`` if it exists.
        fsync: sync everything to disk before the result is published.
        progress: as for :func:`fastshard.convert`.
        opening: as for :func:`fastshard.open`.

    Raises:
        FastshardError: ``FS402`` if the checkpoint has no copy of the parameters, ``FS514`` for an optimizer
            whose step cannot be set to zero in place (in a pickle that torch did not write), and other codes
            for damaged files.

    Examples:
        >>> fastshard.repair_master_weights("stale", "repaired")
        <fastshard.Manifest repair: 2 tensors in 4 files>
        >>> fastshard.master_weights("repaired").ok
        True
    """
    checkpoint = as_checkpoint(source, **opening)
    declared = _with_masters(checkpoint)
    optimizer = declared.optimizer
    if not optimizer.params_stored:
        raise FastshardError.of(
            codes.MASTERS_NOT_CHECKABLE,
            "ZeRO stage 3 stores the parameters only as fp32 master weights, so there is nothing to rebuild "
            "from",
            severity="error",
        )
    if declared.framework.startswith("Megatron"):
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "fastshard does not rebuild master weights in Megatron-LM's own files",
            help="load the checkpoint with --no-load-optim, which makes them from the parameters; --weights "
            "params converts the parameters",
        )
    opened, gate = checkpoint.opened.findings, checkpoint.opened.gate
    if drop_optimizer:
        if any(s.file not in _indices(checkpoint, optimizer.files) for s in optimizer.state_files):
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "the optimizer state is in the model files (ZeRO stage 0)",
                help="rebuild the master weights instead (--repair without --drop-optimizer)",
            )
        gated = gate.passed(f for f in opened if f.file not in optimizer.files)
    else:
        gated = gate.passed([*opened, *optimizer.findings])
        # A step that was not looked at would be kept.
        read_in_part = {f.file: f for f in opened if f.code == codes.NOT_PROVABLE}
        paths = [checkpoint.opened.files[s.file].path for s in optimizer.state_files]
        raise_errors([read_in_part[p].replace(severity="error") for p in paths if p in read_in_part])
        if not optimizer.state_files:
            raise FastshardError.of(
                codes.MASTERS_NOT_CHECKABLE, "there are no master weights to rebuild", severity="error"
            )
    files, texts, copies, left = _files(checkpoint, optimizer, drop_optimizer)
    hashed = hash_copies(copies, [Folder(root, checkpoint.listing.links_within) for root in checkpoint.roots])
    pointers = [name for name in _TRACKERS if name in texts]
    repair = {"files": files, "texts": texts, "pointers": pointers}
    plan = _plan(checkpoint, lambda: checkpoint.opened.catalog.repair(CoreRequest(declared), repair))
    findings = gate.passed(left + plan.findings())
    run = run_options(memory, threads, checkpoint.opened.catalog)
    settings: WriteSettings = {
        "threads": run["threads"],
        "memory": run["memory"],
        "publish": WriteRequest.of(resume=resume, overwrite=overwrite, fsync=fsync).to_dict(),
        "values": {
            **declared.files.values,
            "repaired": "optimizer left out" if drop_optimizer else "master weights from parameters",
        },
        "gate": gate.to_dict([*gated, *findings]),
    }
    with carrying(plan), Progress(progress) as bar:
        apart = checkpoint.read_from
        document, found = plan.write(
            os.fspath(out), settings, bar.phase("writing"), None, (hashed, apart), bar.tell
        )
        if not drop_optimizer:
            raise_errors(master_weights(out, memory=memory, threads=threads).findings)
        decided = [f for f in gated if f.decided is not None]
        return Manifest.written(document, list(dict.fromkeys([*decided, *findings, *found])))


def _indices(checkpoint: Checkpoint, paths: set[str]) -> set[int]:
    return {i for i, file in enumerate(checkpoint.opened.files) if file.path in paths}


def _files(
    checkpoint: Checkpoint, optimizer: Optimizer, drop_optimizer: bool
) -> tuple[list[dict[str, Any]], dict[str, str], list[tuple[str, str]], list[Finding]]:
    """Return the files of the result (files of the catalog, tracker files, copies), and the findings.

    The findings report files that are left out.
    """
    state = {s.file: s for s in optimizer.state_files}
    files: list[dict[str, Any]] = []
    taken: set[str] = {MANIFEST_NAME}
    folders: set[tuple[int, str]] = set()
    for i, file in enumerate(checkpoint.opened.files):
        folders.add((file.root, file.folder))
        if file.path in taken:
            continue
        taken.add(file.path)
        if drop_optimizer and file.path in optimizer.files:
            continue
        part = state.get(i)
        masters_of = part.masters if part else []
        zero = [t for t in part.state if t not in part.masters] if part else []
        numbers = part.numbers if part else []
        files.append({"file": i, "name": file.path, "masters": masters_of, "zero": zero, "numbers": numbers})
    texts: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    left: list[Finding] = []
    for other in checkpoint.listing.files:
        if other.path in taken or (drop_optimizer and other.path in optimizer.files):
            continue
        if _belongs(other, folders):
            taken.add(other.path)
            if not is_utf8(other.path):
                # The manifest, which is UTF-8, could not name it; nobody who loads the step asks for it.
                left.append(
                    Finding.of(
                        codes.UNEXPECTED_FILE,
                        "file not copied: its name is not UTF-8",
                        file=os.fsencode(other.path).decode(errors="backslashreplace"),
                        help="rename the file, or copy it yourself if you need it",
                    )
                )
                continue
            if other.name in _TRACKERS:
                texts[other.path] = checkpoint.listing.read_text(other)
            else:
                copies.append((other.path, os.fspath(checkpoint.roots[other.root] / other.path)))
    return files, texts, copies, left


def _belongs(file: File, folders: set[tuple[int, str]]) -> bool:
    """Return True for files next to, below or above the step's files, in the same branch."""

    def below(inner: str, outer: str) -> bool:
        return outer == "" or inner == outer or inner.startswith(outer + "/")

    return any(
        root == file.root and (below(file.folder, folder) or below(folder, file.folder))
        for root, folder in folders
    )
