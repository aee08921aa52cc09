"""Rank files: trainers' names for them, and the choice among several saves.

source: verl utils/checkpoint/fsdp_checkpoint_manager.py, SkyRL fsdp_strategy.py, accelerate
    utils/fsdp_utils.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.listing import File, Listing
from ...common.records import dataclass, field, replace
from ...common.regex import compile_when_used
from ..base import Options, counted
from ..choose_step import folder_of, within_this
from ..dcp.metadata import one_of
from ..step_names import is_step

#: For each rank: the model, and next to it the optimizer and the rest of the trainer's state. verl, SkyRL
_WORLD = compile_when_used(r"^(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt$")
#: accelerate's names, for saves without torch.distributed.checkpoint.
_ACCELERATE = compile_when_used(r"^(pytorch_model_fsdp|optimizer)(?:_(\d+))?_rank_?(\d+)\.bin$")
#: Names of other trainers.
_ANY = compile_when_used(r"^(.*?[._-])?rank[_-]?(\d+)\.(?:pt|pth|bin)$")
#: torch_checkpointing's names for an item without a resharder. source: torch_checkpointing
#: checkpoint_layout.py
_ITEM = compile_when_used(r"^(model|optimizer)_(\d+)\.pt$")
_KINDS = {"pytorch_model_fsdp": "model", "optimizer": "optim"}
#: source: verl trainer; Megatron-LM has the same name for it
_TRACKERS = ("latest_checkpointed_iteration.txt",)


@dataclass(frozen=True)
class Named:
    """The parts of a file's name."""

    file: File
    kind: str
    rank: int
    #: Number of ranks in the run.
    world: int | None


@dataclass(frozen=True)
class FsdpFiles:
    """Rank files, by rank: their numbers in ``Found.files``."""

    #: Files of the model.
    model: Mapping[int, int]
    #: Files of the optimizer.
    optim: Mapping[int, int]
    #: Files of the rest of the trainer's state.
    extra: Mapping[int, int]
    #: Number of ranks in the run, according to the file names.
    world: int | None


@dataclass
class Saved:
    """The files of one save."""

    folder: str
    step: str | None
    #: Files of each kind, by rank.
    model: dict[int, File] = field(default_factory=dict)
    optim: dict[int, File] = field(default_factory=dict)
    extra: dict[int, File] = field(default_factory=dict)
    #: Number of ranks in the run, according to the file names.
    world: int | None = None
    findings: list[Finding] = field(default_factory=list)


def named(file: File, *, any_name: bool = False) -> Named | None:
    """Parse the name of a rank file; None for other files.

    Raises:
        FastshardError: ``FS106`` for a rank higher than in any run.
    """
    if match := _WORLD.match(file.name):
        return Named(file, match[1], counted(match[3], file), counted(match[2], file))
    if match := _ACCELERATE.match(file.name):
        # Of several models of one trainer each has its own number.
        kind, index = _KINDS[match[1]], match[2] or "0"
        return Named(file, kind if index == "0" else f"{kind} {index}", counted(match[3], file), None)
    if any_name and (match := _ITEM.match(file.name)):
        return Named(file, _kind(match[1]).partition(" ")[0], counted(match[2], file), None)
    if any_name and (match := _ANY.match(file.name)):
        return Named(file, _kind(match[1] or ""), counted(match[2], file), None)
    return None


def is_item(file: File) -> bool:
    """Return True for names that files of single models and torch_checkpointing's rank files may have."""
    return _ITEM.match(file.name) is not None


def _kind(stem: str) -> str:
    """Return the kind of another trainer's file: the model, unless its name states otherwise."""
    if "optim" in stem.lower():
        return "optim"
    return (
        "extra_state"
        if re.search(r"rng|random|sched|extra|scaler|data", stem.lower())
        else f"model {stem}".strip()
    )


def saved(listing: Listing, options: Options, *, any_name: bool = False) -> Saved | None:
    """Choose the save to read; None if there is none.

    Raises:
        FastshardError: ``FS106`` if nothing determines which of several models or runs to use; as
            :func:`fastshard.sources.choose_step.choose`.
    """
    found = [one for f in listing.files if (one := named(f, any_name=any_name)) is not None]
    models = [one for one in found if one.kind.partition(" ")[0] == "model"]
    if not models or listing.single:
        return None
    places = {(one.file.root, one.file.folder) for one in models}
    folder, chosen, within = folder_of(listing, places, options, _TRACKERS)
    step = chosen.name if is_step(chosen.name) else None
    findings = [*chosen.findings, *within_this(within)]
    inside = [one for one in found if one.file.folder == folder]
    kinds: dict[str, str] = {}
    for one in sorted(inside, key=lambda one: one.file.name):
        if one.kind.partition(" ")[0] == "model":
            kinds.setdefault(one.kind, one.file.name)
    if len(kinds) > 1:
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "the directory holds several sets of rank files",
            file=folder or None,
            got=", ".join(f"{name.rpartition('rank')[0]}rank*" for name in kinds.values()),
            help="keep the files of the model, and move the others away",
        )
    if any_name:
        inside = [replace(one, kind=one.kind.partition(" ")[0]) for one in inside]
    save = Saved(folder, step, findings=findings)
    worlds = {one.world for one in inside if one.kind == "model"}
    if len(worlds) > 1:
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "the directory holds files of runs with different numbers of ranks: a run was continued with "
            "another number",
            file=folder or None,
            got=", ".join(f"model_world_size_{world}_rank_*.pt" for world in sorted(worlds, key=str)),
            help="keep the files of one run and move the others away; by the file times, the newer run is "
            "more likely",
        )
    save.world = worlds.pop()
    for kind, files in (("model", save.model), ("optim", save.optim), ("extra_state", save.extra)):
        copies: dict[int, list[File]] = {}
        for one in inside:
            if one.kind == kind and one.world == save.world:
                copies.setdefault(one.rank, []).append(one.file)
        files.update({rank: one_of(listing, copies[rank]) for rank in sorted(copies)})
    return save
