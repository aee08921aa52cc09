"""What is said of damaged checkpoints, whole: nothing is lost from a report, and nothing is added, unseen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from damage import CASES, made
from helpers import cli
from reviewed import same, told

SNAPSHOTS = Path(__file__).parents[1] / "snapshots"


def reports(root: Path, out: Path) -> dict[str, Any]:
    """What `inspect` and `merge` say, and how they end."""
    found: dict[str, Any] = {}
    for command in (("inspect", root), ("merge", root, out)):
        ran = cli(*command)
        kept = ("exit_code", "complete", "written", "not_checked", "findings")
        assert ran.doc["exit_code"] == ran.code and out.exists() == bool(ran.doc.get("written"))
        found[str(command[0])] = {key: ran.doc[key] for key in kept if key in ran.doc}
    document: dict[str, Any] = told(found, {root: "CKPT", out: "OUT"})
    return document


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_checkpoint_is_told_of_as_reviewed(
    name: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    said = reports(made(name, tmp_path / "ckpt"), tmp_path / "out")
    same(SNAPSHOTS / f"{name}.json", said, pytestconfig.getoption("--renew-snapshots"))


def test_the_readme_shows_what_is_said() -> None:
    """All of it, but for the step in a path."""
    shown = " ".join((SNAPSHOTS.parents[1] / "README.md").read_text().split())
    said = json.loads((SNAPSHOTS / "neox_copied_shard.json").read_text())["merge"]["findings"][0]
    told = (
        f"{said['message']} ({said['rank']}) found {said['got']} expected {said['expected']} help "
        f"{said['help']}"
    )
    assert told in shown.replace("global_step0", "global_step4")
