"""All adapters, in the order in which they are tried. Each one is imported only if a name shows that it may
apply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from ..common import codes
from ..common.errors import FastshardError, raise_errors
from ..common.formatting import some
from ..common.listing import READABLE_ALONE, Listing
from ..common.log import log
from ..common.plugins import ADAPTERS, explain_failure, find_plugins, load_plugin
from ..common.records import dataclass, replace
from ..common.regex import compile_when_used
from ..common.stored_places import show_text
from .base import Adapter, Found, Options
from .choose_step import no_steps
from .huggingface.adapter import HuggingFace
from .single_files import refuse_rank_folder
from .step_trackers import refuse_lone_trackers, warn_of_lone_trackers

__all__ = ["detect", "list_formats", "load_adapters"]


def _load_universal() -> Adapter[Any]:
    from .deepspeed.universal import Universal

    return Universal()


def _load_deepspeed() -> Adapter[Any]:
    from .deepspeed.adapter import DeepSpeed
    from .gpt_neox.adapter import GptNeox

    return DeepSpeed([GptNeox()])


def _load_dcp() -> Adapter[Any]:
    from .dcp.adapter import Dcp
    from .megatron.torch_dist import TorchDist

    return Dcp([TorchDist()])


def _load_fsdp_ranks() -> Adapter[Any]:
    from .fsdp.adapter import FsdpRanks

    return FsdpRanks()


def _load_any_ranks() -> Adapter[Any]:
    from .fsdp.adapter import FsdpRanks

    return FsdpRanks("any_ranks", any_name=True)


def _load_megatron() -> Adapter[Any]:
    from .megatron.adapter import Megatron

    return Megatron()


def _load_orbax() -> Adapter[Any]:
    from .orbax.adapter import Orbax

    return Orbax()


def _load_tp_safetensors() -> Adapter[Any]:
    from .huggingface.tp_safetensors import TpSafetensors

    return TpSafetensors()


def _load_rank_shards() -> Adapter[Any]:
    from .huggingface.rank_shards import HfRankShards

    return HfRankShards()


def _load_colossalai() -> Adapter[Any]:
    from .colossalai.adapter import ColossalAI

    return ColossalAI()


def _load_torch_checkpointing() -> Adapter[Any]:
    from .torch_checkpointing.adapter import TorchCheckpointing

    return TorchCheckpointing()


def _load_easylm() -> Adapter[Any]:
    from .easylm.adapter import EasyLM

    return EasyLM()


def _load_peft() -> Adapter[Any]:
    from .peft.adapter import PeftAdapter

    return PeftAdapter()


@dataclass(frozen=True)
class Entry:
    """An adapter, and the names without which it does not find or refuse anything."""

    load: Callable[[], Adapter[Any]]
    #: Matches the name of a file, or of a folder in its path; None for an adapter that is always tried.
    mark: re.Pattern[str] | None = None
    #: Matches the name of a file that is passed alone.
    mark_alone: re.Pattern[str] | None = None
    #: The name of its entry point, for another package's adapter.
    plugin: str | None = None

    def may_find(self, names: Collection[str], is_single: bool = False) -> bool:
        """Return True if one of the names is a reason to try the adapter."""
        marks = (self.mark, self.mark_alone if is_single else None)
        return self.mark is None or any(mark.match(name) for mark in marks if mark for name in names)


def _marked(pattern: str) -> re.Pattern[str]:
    # A name may hold a line break, too.
    return compile_when_used(pattern, re.DOTALL)


#: In the order in which they are tried: more specific names first.
_ENTRIES: list[Entry] = [
    Entry(_load_universal, _marked(r"fp32\.pt$")),
    Entry(_load_deepspeed, _marked(r".*(?:model|optim)_states\.pt$")),
    Entry(_load_dcp, _marked(r".*\.(?:metadata|distcp)$")),
    # A stream that is given may have any name but those of other formats.
    Entry(
        _load_easylm,
        _marked(r"streaming_(?:train_state|params)(?:_\d+)?$"),
        _marked(rf"(?!.*(?:{'|'.join(map(re.escape, READABLE_ALONE))})$)"),
    ),
    Entry(_load_torch_checkpointing, _marked(r"metadata\.pkl$")),
    Entry(_load_fsdp_ranks, _marked(r".*_rank_?\d+\.(?:pt|bin)$")),
    Entry(_load_megatron, _marked(r"model_(?:optim_)?rng\.pt$")),
    # Chunks of arrays may be all that there is.
    Entry(
        _load_orbax,
        _marked(
            r"(?:_METADATA|_CHECKPOINT_METADATA|manifest\.ocdbt|metadata\.json|\.zarray|zarr\.json"
            r"|c(?:\.\d+)*|\d+(?:\.\d+)*)$"
        ),
    ),
    Entry(_load_tp_safetensors, _marked(r".*(?:rank|tp)[_-]?\d+\.safetensors$")),
    Entry(_load_rank_shards, _marked(r"shard-.*\.safetensors$")),
    Entry(
        _load_colossalai,
        _marked(r".*tmp_index_files$|(?:pytorch_)?model(?:\..*|-stage-.*)?-\d{5}\.(?:safetensors|bin)$"),
    ),
    Entry(HuggingFace),
    Entry(_load_peft, _marked(r"adapter_config\.json$")),
    Entry(
        _load_any_ranks,
        _marked(r"(?:(?:.*[._-])?rank[_-]?\d+\.(?:pt|pth|bin)|(?:model|optimizer)_\d+\.pt)$"),
    ),
]


def _list_entries() -> list[Entry]:
    """List the entries of installed packages, followed by fastshard's own."""
    installed = (Entry(partial(_load_installed, name), plugin=name) for name in find_plugins(ADAPTERS))
    return [*installed, *_ENTRIES]


def _load_installed(name: str) -> Adapter[Any]:
    with explain_failure(ADAPTERS, name):
        adapter: Adapter[Any] = load_plugin(ADAPTERS, name)()
        return adapter


#: Words for the step that is used by default.
_LATEST = ("latest", "newest", "last")


def list_formats() -> list[str]:
    """List the names of fastshard's own adapters, and of those registered by installed packages."""
    return [*(entry.load().name for entry in _ENTRIES), *find_plugins(ADAPTERS)]


def load_adapters() -> list[Adapter[Any]]:
    """Load all adapters, in the order in which they are tried."""
    return [entry.load() for entry in _list_entries()]


def names_of(listing: Listing) -> set[str]:
    """Return the names of all files, and of the folders in their paths."""
    return {name for file in listing.files for name in file.path.split("/")}


def _in_order(listing: Listing) -> list[Entry]:
    """Return the entries whose marks occur among the names, followed by all others.

    All of them are tried before anything is refused.
    """
    names = names_of(listing)
    return sorted(_list_entries(), key=lambda entry: not entry.may_find(names, listing.single))


def _ask(entry: Entry, listing: Listing, options: Options) -> Found[Any] | None:
    """Let an adapter look for a checkpoint."""
    if entry.plugin is None:
        return entry.load().detect(listing, options)
    with explain_failure(ADAPTERS, entry.plugin):
        return entry.load().detect(listing, options)


def detect(listing: Listing, options: Options) -> Found[Any]:
    """Find the files of the checkpoint below the listing's root directories.

    Raises:
        FastshardError: ``FS513`` if there is no checkpoint, ``FS514`` if there is only part of one, ``FS105``
            if only a checkpoint's name exists, or an error that an adapter derives from names alone.
    """
    if options.step in _LATEST and not any(options.step in folder.split("/") for folder in listing.folders()):
        options = replace(options, step=None)
    if listing.single and options.step is not None:
        raise no_steps(options.step)
    for entry in _in_order(listing):
        found = _ask(entry, listing, options)
        if found is not None:
            log("sources", "%s: %d files, step %s", found.framework, len(found.files), found.step)
            if found.step is None and not listing.single:
                warnings = warn_of_lone_trackers(listing, found.folder)
                found = replace(found, findings=[*found.findings, *warnings])
            return found
    # What follows knows what a folder is that holds no checkpoint.
    from .dcp.state_alone import refuse_state_alone
    from .orbax.partial_stores import refuse_parts
    from .unsupported_formats import looks_like

    refuse_parts(listing)
    refuse_state_alone(listing)
    refuse_lone_trackers(listing)
    refuse_rank_folder(listing)
    raise_errors(listing.findings)
    named = some(list(dict.fromkeys(map(show_text, listing.given()))), 3)
    known = looks_like(listing)
    raise FastshardError.of(
        codes.NOT_A_CHECKPOINT,
        "unknown checkpoint format" if len(listing.roots) == 1 else f"{named}: unknown checkpoint format",
        file=named if len(listing.roots) == 1 else None,
        got=known[0] if known else f"{len(listing.files)} files",
        help=known[1]
        if known
        else "pass the directory that holds the shards or the steps; `fastshard explain FS513` lists the "
        "formats",
    )
