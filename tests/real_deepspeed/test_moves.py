"""Optimizer state moved to another framework: a run that goes on there has the losses that the first one
would have had."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import cli
from launching import launch

BEFORE, AFTER = 12, 20
#: How far losses may be apart, relative; and how far they are at least if moments are lost.
SAME, LOST = 1e-4, 1e-2


def run(folder: Path, what: str, jobs: dict[str, dict[str, Any]]) -> None:
    """Trains each, one after another in the same two processes."""
    usual = {
        "stage": None,
        "tied": False,
        "fused": False,
        "forget": False,
        "seed": 1,
        "load": None,
        "save": None,
        "begin": 0,
        "steps": 0,
        "then": AFTER,
    }
    (folder / f"{what}.json").write_text(json.dumps({name: usual | job for name, job in jobs.items()}))
    launch(what, folder, "moving.py")


def losses(folder: Path, name: str) -> list[float]:
    return json.loads((folder / f"{name}.losses.json").read_text())


def apart(some: list[float], others: list[float]) -> float:
    """The largest relative difference."""
    assert len(some) == len(others) == AFTER
    return max(abs(a - b) / a for a, b in zip(some, others, strict=True))


#: source, its job, target, and the job that goes on.
MOVES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "zero2_to_fsdp2": ("zero2", "dcp", {}),
    "zero1_tied_to_fsdp2": ("zero1_tied", "dcp", {"tied": True}),
    "fsdp2_to_zero2": ("fsdp2", "universal", {"stage": 2}),
    "fsdp2_tied_to_zero1": ("fsdp2_tied", "universal", {"stage": 1, "tied": True}),
    "zero3_to_zero2": ("zero3", "universal", {"stage": 2}),
    "zero3_to_zero3": ("zero3_fused", "universal", {"stage": 3, "fused": True}),
    "universal_to_fsdp2": ("zero3", "universal dcp", {}),
}
SOURCES: dict[str, dict[str, Any]] = {
    "zero1_tied": {"stage": 1, "tied": True},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero3_fused": {"stage": 3, "fused": True},
    "fsdp2": {},
    "fsdp2_tied": {"tied": True},
}


#: One; the others are slow.
QUICK = ("zero2_to_fsdp2",)


@pytest.fixture(scope="module")
def moved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The losses of the runs of these moves, `NAME.losses.json`, and of those that go on without moments,
    `NAME_lost.losses.json`."""
    moves = {name: MOVES[name] for name in request.param}
    sources = {source for source, _, _ in moves.values()}
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install '.[deepspeed]' (CONTRIBUTING.md)")
    folder = tmp_path_factory.mktemp("moves")
    first = {name: job for name, job in SOURCES.items() if name in sources}
    saved = {name: {"save": str(folder / f"{name}_saved"), "steps": BEFORE} for name in first}
    run(folder, "first", {name: job | saved[name] for name, job in first.items()})
    follow: dict[str, dict[str, Any]] = {}
    for name, (source, targets, job) in moves.items():
        at = folder / f"{source}_saved"
        config = at / "config.json"
        for target in targets.split():
            out = folder / f"{name}_{target}"
            converted = cli("convert", at, out, "--to", target, "--optimizer", "--config", config)
            assert converted.code == 0, converted.out
            at = out
        # Its own values of weights and groups are all others.
        follow[name] = {**job, "load": str(at), "begin": BEFORE, "seed": 9}
        follow[f"{name}_lost"] = {**follow[name], "forget": True}
    run(folder, "follow", follow)
    return folder


@pytest.mark.parametrize(
    ("moved", "name"),
    [(QUICK, name) for name in QUICK]
    + [
        pytest.param(tuple(m for m in MOVES if m not in QUICK), name, marks=pytest.mark.slow)
        for name in MOVES
        if name not in QUICK
    ],
    indirect=["moved"],
    ids=[*QUICK, *(name for name in MOVES if name not in QUICK)],
)
def test_losses_go_on_as_they_would_have(moved: Path, name: str) -> None:
    wanted, got = losses(moved, MOVES[name][0]), losses(moved, name)
    without = losses(moved, f"{name}_lost")
    told = f"{name}: {apart(wanted, got):.1e} with moments, {apart(wanted, without):.1e} without"
    print(told)
    assert apart(wanted, got) <= SAME, told
    assert apart(wanted, without) >= LOST, told
    assert sum(without) > sum(wanted) * (1 + 10 * SAME), told
