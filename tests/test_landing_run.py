"""The landing run itself: a step that fails anywhere fails the run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("wrong", ["lint", "quickstart", None])
def test_a_command_that_fails_in_the_middle_of_a_step_fails_the_run(
    wrong: str | None, tmp_path: Path
) -> None:
    """In a condition bash ignores `set -e`, and only the last command of a step would count."""
    steps, runs, rest = (ROOT / ".ci/run").read_text().partition("# --- running them")
    harness, order, _ = rest.partition("order=(build")
    body = {name: "true; false; echo went on" if name == wrong else "true" for name in ("lint", "quickstart")}
    replaced = "\n".join(f"step_{name}() {{ {commands}; }}" for name, commands in body.items())
    assert runs and order
    folder = tmp_path / ".ci"
    folder.mkdir()
    shutil.copy(ROOT / ".ci/table.py", folder)
    (folder / "run").write_text(
        f"{steps}\n{replaced}\n{harness}\norder=(lint quickstart)\nbeside lint\nrun quickstart\nawait\n"
    )
    ran = subprocess.run(["bash", folder / "run"], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode != 0) == (wrong is not None), ran.stdout + ran.stderr
    assert "went on" not in ran.stdout and ("FAILED" in ran.stdout) == (wrong is not None), ran.stdout
