"""What is said of the damaged checkpoints of `--fixtures-dir DIR`, whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reviewed import same
from test_snapshots import SNAPSHOTS, reports


def test_a_broken_fixture_is_told_of_as_reviewed(
    broken_case: dict[str, Any], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    said = reports(broken_case["path"], tmp_path / "out")
    file = SNAPSHOTS / "broken" / f"{broken_case['name']}.json"
    same(file, said, pytestconfig.getoption("--renew-snapshots"))
