"""All adapters, in the order in which they are asked."""

from __future__ import annotations

from typing import Any

from ..common.errors import FastshardError, raise_errors
from ..common.formatting import some
from ..common.listing import Listing
from ..common.records import replace
from .base import Adapter, Found, Options
from .choose_step import no_steps
from .colossalai.adapter import ColossalAI
from .dcp.adapter import Dcp
from .deepspeed.adapter import DeepSpeed
from .deepspeed.universal import Universal
from .fsdp.adapter import FsdpRanks
from .gpt_neox.adapter import GptNeox
from .huggingface.adapter import HuggingFace
from .huggingface.rank_shards import HfRankShards
from .huggingface.tp_safetensors import TpSafetensors
from .megatron.adapter import Megatron
from .megatron.torch_dist import TorchDist
from .orbax import Orbax
from .orbax.partial_stores import refuse_parts
from .peft.adapter import PeftAdapter
from .single_files import refuse_rank_folder
from .step_trackers import refuse_lone_trackers, warn_of_lone_trackers
from .unsupported_formats import looks_like

__all__ = ["ADAPTERS", "detect"]

#: In the order in which they are asked: the more telling names first.
ADAPTERS: list[Adapter[Any]] = [
    Universal(),
    DeepSpeed([GptNeox()]),
    Dcp([TorchDist()]),
    FsdpRanks(),
    Megatron(),
    Orbax(),
    TpSafetensors(),
    HfRankShards(),
    ColossalAI(),
    HuggingFace(),
    PeftAdapter(),
    FsdpRanks("any_ranks", any_name=True),
]


def detect(listing: Listing, options: Options) -> Found[Any]:
    """The files of the checkpoint below the listing's roots.

    Raises:
        FastshardError: ``FS513`` if nothing there is a checkpoint, ``FS514`` if it is a
            part of one, ``FS105`` if the name of one is all that is there, or what the adapter found out by names alone.
    """
    if listing.single and options.step is not None:
        raise no_steps(options.step)
    for adapter in ADAPTERS:
        found = adapter.detect(listing, options)
        if found is not None:
            if found.step is None and not listing.single:
                warnings = warn_of_lone_trackers(listing, found.folder)
                found = replace(found, findings=[*found.findings, *warnings])
            return found
    refuse_parts(listing)
    refuse_lone_trackers(listing)
    refuse_rank_folder(listing)
    raise_errors(listing.findings)
    named = some(list(dict.fromkeys(listing.given())), 3)
    known = looks_like(listing)
    raise FastshardError.of(
        "FS513",
        "no checkpoint that fastshard knows"
        if len(listing.roots) == 1
        else f"{named}: no checkpoint that fastshard knows",
        file=named if len(listing.roots) == 1 else None,
        got=known[0] if known else f"{len(listing.files)} files",
        help=known[1]
        if known
        else "point at the directory that holds the shards or the steps; `fastshard explain FS513` lists the formats",
    )
