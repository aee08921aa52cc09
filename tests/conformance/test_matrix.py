"""Every source under every target: proven from detection to the way back, or refused as it was reviewed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cells import ALL, TABLE, cells, outcome, renew, sheet
from helpers import cli, state_of
from origins import ORIGINS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Each source once, made when it is asked for first; none is changed by what is done with it."""
    folder = tmp_path_factory.mktemp("origins")

    class Made(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            ORIGINS[name].make(folder / name)
            self[name] = folder / name
            states[name] = state_of(folder / name)
            return self[name]

    states: dict[str, dict[str, tuple[int, str]]] = {}
    made = Made()
    yield made
    assert {name: state_of(made[name]) for name in states} == states
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ORIGINS)
def test_a_source_is_known(name: str, checkpoints: dict[str, Path]) -> None:
    ran = cli("inspect", checkpoints[name])
    assert ran.code == 0 and ran.doc["complete"] is True, ran.out
    assert ran.doc["framework"] == ORIGINS[name].framework


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ALL)
@pytest.mark.parametrize("name", ORIGINS)
def test_a_cell_is_what_was_reviewed(
    name: str, to: str, checkpoints: dict[str, Path], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    got = outcome(name, checkpoints[name], to, tmp_path)
    shutil.rmtree(tmp_path)
    if pytestconfig.getoption("--renew-snapshots"):
        renew(name, to, got)
    assert got == cells(sheet()[name]).get(to), f"{name} to {to}: review {TABLE.name}"


def test_the_table_has_each_cell_once() -> None:
    have = {name: sorted(cells(row)) for name, row in sheet().items()}
    assert have == {name: sorted(ALL) for name in ORIGINS}


def test_the_page_is_made_of_the_table() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "docs/make_matrix.py", "--print"], capture_output=True, text=True, check=True
    )
    assert (ROOT / "docs/matrix.md").read_text() == made.stdout, "run python docs/make_matrix.py"
