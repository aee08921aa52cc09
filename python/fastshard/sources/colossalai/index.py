"""Indexes of the model and the optimizer in ColossalAI's saves: one, or one per pipeline stage.

source: colossalai/checkpoint_io/index_file.py, hybrid_parallel_checkpoint_io.py
"""

from __future__ import annotations

import re

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.listing import File, Listing
from ..index_files import read_json, safe_relative

#: Where stages write their indexes until the first stage merges and removes them.
PARTIAL = "tmp_index_files"


def coords_of(match: re.Match[str] | None) -> dict[str, int]:
    """Return the ranks that wrote a shard, from its file name; stages and expert groups count from 1."""
    if match is None or not match["stage"]:
        return {}
    stage = {"pp": int(match["stage"]) - 1}
    return {**stage, "ep": int(match["ep"]) - 1} if match["ep"] else stage


def join(folder: str, name: str) -> str:
    """Join a name to a folder, which may be the root directory."""
    return f"{folder}/{name}" if folder else name


def read_indexes(listing: Listing, files: list[File], findings: list[Finding]) -> dict[str, str]:
    """Combine the weight maps of several indexes: name (or number) -> file name."""
    weight_map: dict[str, str] = {}
    for index in files:
        content = read_json(listing, index)
        named = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(named, dict):
            raise FastshardError.of(codes.BAD_VALUE, "the index has no weight_map", file=index.path)
        for key, name in named.items():
            if not safe_relative(name):
                findings.append(
                    Finding.of(
                        codes.UNSAFE_PATH,
                        "a file name in the index points outside the directory",
                        file=index.path,
                        tensor=str(key),
                        got=repr(name),
                        help="do not use this checkpoint: the index may be an attempt to read other files",
                    )
                )
            elif weight_map.setdefault(str(key), name) != name:
                findings.append(
                    Finding.of(
                        codes.RANKS_DISAGREE,
                        "two indexes name different files for a tensor",
                        file=index.path,
                        tensor=str(key),
                        expected=weight_map[str(key)],
                        got=name,
                        help="pass only the directories of one save",
                    )
                )
    return weight_map
