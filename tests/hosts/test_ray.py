"""What is said of runs on a Ray cluster where there is none, or no Ray: tests/real_ray holds what it does
where there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastshard
import pytest
from helpers import TP4, cli


def python(script: str, *argv: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(fastshard.__file__).parents[1])}
    command = [sys.executable, "-c", script, *map(str, argv)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_ray_is_imported_when_it_is_needed() -> None:
    done = python(
        "import fastshard, fastshard.cli, sys; print(fastshard.ray.convert and 'ray' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr


def test_without_ray_it_is_said_how_to_get_it(tmp_path: Path) -> None:
    script = "import sys; sys.modules['ray'] = None; from fastshard.cli import main; sys.exit(main())"
    done = python(script, "merge", TP4, tmp_path / "out", "--ray", "local")
    assert done.returncode == 2
    assert "FS514" in done.stderr and "pip install 'ray>=2.40,<3'" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rank", "auto"], "--ray cannot be combined with --rank"),
        (["--world", "2", "--timeout", "5"], "--ray cannot be combined with --world, --timeout"),
        (["--fsync", "none"], "several processes always flush their output to disk"),
        (["--threads", "0"], "threads"),
    ],
)
def test_words_that_do_not_go_together(words: list[str], said: str, tmp_path: Path) -> None:
    ran = cli("merge", TP4, tmp_path / "out", "--ray", "local", *words)
    assert ran.code == 2
    assert [f["message"] for f in ran.having("FS515")] == [said]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"address": ""}, "address"),
        ({"address": "ray://head:10001"}, "address"),
        ({"address": 3}, "address"),
        ({"parts": 0}, "parts"),
        ({"cpus": 1.5}, "cpus"),
        ({"retries": -1}, "retries"),
        ({"retries": True}, "retries"),
        ({"fsync": False}, "several processes always flush their output to disk"),
    ],
)
def test_values_that_cannot_be_meant(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(fastshard.CannotRunError) as raised:
        fastshard.ray.merge(TP4, tmp_path / "out", **options)
    assert (raised.value.code, raised.value.findings[0].message) == ("FS515", said)


def test_an_opened_checkpoint_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(fastshard.CannotRunError, match="an opened checkpoint"):
        fastshard.ray.merge(fastshard.open(TP4), tmp_path / "out")


def test_ranks_are_not_for_ray(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="does not take it"):
        fastshard.ray.convert(TP4, tmp_path / "out", rank="auto")  # type: ignore[call-arg]
