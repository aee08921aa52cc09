"""A converter leaves all experts as they were built, and says nothing: what the files show of it.

The damage of NVIDIA/Megatron-LM#5844, by megatron-core itself. Needs `pip install '.[megatron]'`.
"""

from __future__ import annotations

from pathlib import Path

import moe_maker
import pytest
from helpers import cli
from megatron_ranks import launch


def leave(kind: str, tmp_path: Path) -> Path:
    out = tmp_path / kind
    launch("leave_experts.py", [out, kind], [tmp_path / f"{kind}.log"])
    return out


def test_experts_of_fresh_memory_are_told(tmp_path: Path) -> None:
    folder = leave("empty", tmp_path)
    for command in (
        ("verify", folder),
        ("merge", folder, tmp_path / "merged"),
        ("convert", folder, tmp_path / "hf", "--to", "hf", "--vocab-size", "250"),
    ):
        ran = cli(*command)
        found = ran.having("FS313", severity="warning")
        assert ran.code == 0 and len(found) in (16, 24), ran.out
        assert all("experts." in one["tensor"] for one in found)
    assert cli("verify", folder, "--fail-on", "warning").code == 1


@pytest.mark.parametrize("kind", ["random", "empty"])
def test_random_experts_are_found_with_the_original_alone(kind: str, tmp_path: Path) -> None:
    """A model that was just initialised is a good one, and so is a part of it for all that the files say."""
    folder = leave(kind, tmp_path)
    moe_maker.model().save_pretrained(tmp_path / "original")
    ran = cli("verify", folder)
    assert ran.code == 0 and (kind == "empty" or not ran.having("FS313")), ran.out
    assert cli("convert", folder, tmp_path / "hf", "--to", "hf", "--vocab-size", "250").code == 0
    ran = cli("diff", tmp_path / "original", tmp_path / "hf")
    assert ran.code == 1 and len(ran.errors) == 24, ran.out
    assert all(".experts." in found["tensor"] for found in ran.errors)
    assert cli("manifest", tmp_path / "original", "-o", tmp_path / "good.json").code == 0
    ran = cli("verify", tmp_path / "hf", "--expect", tmp_path / "good.json")
    assert ran.code == 1 and ran.having("FS308", tensor=".experts."), ran.out
