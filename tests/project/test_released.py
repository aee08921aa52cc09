"""What is released has no steps and no clock of tests; scripts/wheel.sh looks for them in the wheel itself,
every night."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fastshard import _core

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SEAMS = ("FASTSHARD_STEPS", "FASTSHARD_CLOCK", "FASTSHARD_FAIL_ALLOCATION")


def test_a_build_that_asks_for_nothing_has_no_steps() -> None:
    """Neither pip nor maturin turns the feature on, and no other feature brings it."""
    maturin = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["maturin"]
    assert maturin["features"] == ["pyo3/extension-module"] and "cargo-extra-args" not in maturin
    for crate, steps in (("fastshard", []), ("fastshard-py", ["fastshard/steps"])):
        manifest = tomllib.loads((ROOT / f"rust/{crate}/Cargo.toml").read_text())
        assert manifest["features"] == {"steps": steps}
    dependencies = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["dependencies"]
    assert dependencies["fastshard"] == {"path": "rust/fastshard"}


def test_what_tests_hold_a_run_by_is_compiled_for_them_alone() -> None:
    """The names of the seam stand in items that the feature guards, and nowhere in Python."""
    holders = {
        path.relative_to(ROOT).as_posix()
        for place in ("rust/fastshard/src", "rust/fastshard-py/src", "python")
        for path in (ROOT / place).rglob("*")
        if path.suffix in (".rs", ".py", ".pyi") and any(f'"{seam}"' in path.read_text() for seam in SEAMS)
    }
    assert holders == {"rust/fastshard/src/steps.rs", "rust/fastshard/src/publish/clock.rs"}
    for file, module in (("steps.rs", "held"), ("steps.rs", "failing"), ("publish/clock.rs", "file")):
        text = (ROOT / "rust/fastshard/src" / file).read_text()
        assert re.search(rf'#\[cfg\(feature = "steps"\)\]\nmod {module} \{{.*"FASTSHARD_', text, re.S)


@pytest.mark.skipif(not _core.STEPS, reason="this build has no steps")
def test_a_build_with_steps_goes_on_where_nobody_holds_it(tmp_path: Path) -> None:
    """Without the variable, and with one that names no socket."""
    for environment in ({}, {"FASTSHARD_STEPS": str(tmp_path / "nobody")}):
        script = (
            "import sys, fastshard; fastshard.merge(sys.argv[1], sys.argv[2], fsync=False, overwrite=True)"
        )
        source = ROOT / "tests/fixtures/sharded/hf_sharded"
        subprocess.run(
            [sys.executable, "-c", script, source, tmp_path / "out"],
            check=True,
            env={"PATH": "", **environment},
        )
        assert (tmp_path / "out/fastshard.manifest.json").is_file()
