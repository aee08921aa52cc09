"""Adapters: how each framework names its files, and what its metadata says.

An adapter only declares; it reads no tensor and computes nothing.
"""

from __future__ import annotations

from ..discover import Listing
from ..errors import FastshardError, raise_errors
from .base import Adapter, Found, Options, Source, Unit
from .colossalai import ColossalAI
from .dcp import Dcp
from .deepspeed import DeepSpeed
from .hf import HuggingFace
from .hf_shards import HfRankShards
from .megatron import Megatron
from .orbax import Orbax
from .orbax.parts import refuse_parts
from .steps import no_steps, refuse_lone_trackers
from .strangers import looks_like
from .tp_safetensors import TpSafetensors
from .universal import Universal

__all__ = ["ADAPTERS", "Adapter", "Found", "Options", "Source", "Unit", "detect"]

#: In the order in which they are asked: the more telling names first.
ADAPTERS: list[Adapter] = [
    Universal(),
    DeepSpeed(),
    Dcp(),
    Megatron(),
    Orbax(),
    TpSafetensors(),
    HfRankShards(),
    ColossalAI(),
    HuggingFace(),
]


def detect(listing: Listing, options: Options) -> Found:
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
            return found
    refuse_parts(listing)
    refuse_lone_trackers(listing)
    raise_errors(listing.findings)
    roots = ", ".join(str(root) for root in listing.roots)
    known = looks_like(listing)
    raise FastshardError.of(
        "FS513",
        "no checkpoint that fastshard knows",
        file=roots,
        got=known[0] if known else f"{len(listing.files)} files",
        help=known[1]
        if known
        else "point at the directory that holds the shards or the steps; `fastshard explain FS513` lists the formats",
    )
