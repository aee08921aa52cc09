"""An adapter is imported where a name says that it may find something, and never missed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import fastshard.sources.registry as registry
import pytest
from fastshard.common.listing import list_roots
from fastshard.sources.base import Options
from fastshard.sources.colossalai import adapter as colossalai
from fastshard.sources.colossalai import missing_shards
from fastshard.sources.dcp import metadata as dcp
from fastshard.sources.deepspeed import adapter as deepspeed
from fastshard.sources.deepspeed import universal
from fastshard.sources.easylm import adapter as easylm
from fastshard.sources.fsdp import find_files as fsdp
from fastshard.sources.huggingface import rank_shards, tp_safetensors
from fastshard.sources.megatron import adapter as megatron
from fastshard.sources.orbax import find_items, partial_stores
from fastshard.sources.peft import adapter_config
from fastshard.sources.torch_checkpointing import metadata as torch_checkpointing
from helpers import FIXTURES
from hypothesis import assume, given
from hypothesis import strategies as st

#: What each adapter looks for in a path, by its own patterns, and names that it compares.
PATTERNS: dict[str, list[Any]] = {
    "universal": [r"(?s)\A(?:(.*)/)?zero/([^/]+)/fp32\.pt\Z"],
    "deepspeed": [deepspeed._LAYER, deepspeed._RANK, deepspeed._ZERO3, deepspeed._OPTIM],
    "dcp": [dcp.OF_RANK, r"(?s)\A.*\.distcp\Z", r"\A\.metadata\Z"],
    "fsdp_ranks": [fsdp._WORLD, fsdp._ACCELERATE],
    "easylm": [easylm._STREAM],
    "megatron": [megatron._RANK],
    "orbax": [
        find_items._CHUNK,
        "|".join(rf"\A{re.escape(mark)}\Z" for mark in sorted(partial_stores._MARKS)),
    ],
    "tp_safetensors": [tp_safetensors._RANK],
    "rank_shards": [rank_shards._SHARD],
    "colossalai": [missing_shards.SHARD, rf"\A(.*/)?{colossalai.PARTIAL}/[a-z]*\Z"],
    "peft": [rf"\A{re.escape(adapter_config.FILE)}\Z"],
    "torch_checkpointing": [rf"\A{re.escape(torch_checkpointing.METADATA)}\Z"],
    "any_ranks": [fsdp._ANY, fsdp._ITEM, fsdp._WORLD, fsdp._ACCELERATE],
}
ENTRIES = {entry.load.__name__.removeprefix("_load_"): entry for entry in registry._ENTRIES}


def test_every_mark_is_compared() -> None:
    assert set(PATTERNS) == {name for name, entry in ENTRIES.items() if entry.mark is not None}
    # The universal adapter's pattern is the one above, for the file that makes a folder one of its own.
    assert universal._PARAMETER.match("a/zero/w/fp32.pt")[3] == universal._VALUES


@pytest.mark.parametrize(
    ("name", "at"), [(name, at) for name, every in PATTERNS.items() for at in range(len(every))]
)
@given(data=st.data())
def test_a_mark_matches_whatever_its_adapter_looks_for(name: str, at: int, data: st.DataObject) -> None:
    pattern = PATTERNS[name][at]
    source = pattern if isinstance(pattern, str) else pattern.pattern
    path = data.draw(st.from_regex(source))
    # A pattern without slashes is for names.
    assume("/" in source or "/" not in path)
    assert ENTRIES[name].may_find(set(path.split("/")))


def folders() -> list[Path]:
    return sorted(
        path for kind in FIXTURES.iterdir() if kind.is_dir() for path in kind.iterdir() if path.is_dir()
    )


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_an_adapter_whose_mark_is_not_there_finds_nothing(folder: Path) -> None:
    listing = list_roots([folder])
    names = registry.names_of(listing)
    marked = [entry.may_find(names) for entry in registry._ENTRIES]
    assert not all(marked)
    for entry, there in zip(registry._ENTRIES, marked, strict=True):
        assert there or entry.load().detect(listing, Options()) is None
