"""Checkpoints of a few dozen megabytes, made once per run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import synthetic

SIZE = 48 << 20
TP = 4


@pytest.fixture(scope="session")
def row(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[synthetic.Spec]]:
    return _merged(tmp_path_factory.mktemp("row"), "row")


@pytest.fixture(scope="session")
def column(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[synthetic.Spec]]:
    return _merged(tmp_path_factory.mktemp("column"), "column")


def _merged(folder: Path, kind: str) -> tuple[Path, list[synthetic.Spec]]:
    specs = synthetic.model(SIZE, kind)
    synthetic.tp_safetensors(folder, specs, TP)
    for file in folder.iterdir():
        file.read_bytes()
    return folder, specs
