"""The landing run itself: a step that fails anywhere fails the run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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


def test_a_step_that_was_stopped_while_it_ended_did_not_run(tmp_path: Path) -> None:
    (tmp_path / "lint.ended").write_text("lint 3 0\n")
    (tmp_path / "docs.ended").touch()
    words = [sys.executable, ROOT / ".ci/table.py", tmp_path, "lint", "docs"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and re.search(r"^docs +-  +FAILED \(not run\)$", ran.stdout, re.M), ran.stdout


@pytest.mark.skipif(shutil.which("cargo") is None, reason="the package is installed without Cargo")
def test_the_wheel_and_the_tests_of_the_core_share_what_is_compiled() -> None:
    """A dependency with another feature in one of them is compiled twice, and the core after it."""

    def compiled(*which: str) -> dict[str, str]:
        """Packages that the core is built with, and their features."""
        words = ["cargo", "tree", "--offline", "--quiet", "--prefix=none", "--format={p} {f}", *which]
        ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        found = (
            re.fullmatch(r"(\S+ v\S+)(?: \([^*].*\))? (\S*)(?: \(\*\))?", line)
            for line in ran.stdout.splitlines()
        )
        return {match[1]: match[2] for match in found if match}

    wheel = compiled("--package=fastshard", "--edges=normal", "--features=steps")
    tests = compiled("--package=fastshard", "--edges=normal,dev")
    assert len(wheel) > 10
    assert {package: tests.get(package) for package in wheel} == wheel


def test_what_was_skipped_is_named_for_another_run(tmp_path: Path) -> None:
    """Tests, cases with brackets, and modules that are skipped while they are collected."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_some.py").write_text(
        "import pytest\n"
        "def test_runs(): pass\n"
        "@pytest.mark.parametrize('case', ['a.b', 'c::d'])\n"
        "def test_lacks(case): pytest.importorskip('no_such_package')\n"
    )
    (tmp_path / "tests/test_none.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    # The run that this test is part of may have options of its own.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    for options in ((), ("-n", "1")):
        record = tmp_path / f"record{len(options)}.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--rootdir",
            tmp_path,
            "--junit-xml",
            record,
            *options,
            "tests",
        ]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=100, env=environment)
        command = [sys.executable, ROOT / ".ci/skipped.py", record]
        ran = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60)
        assert sorted(ran.stdout.splitlines()) == [
            "tests/test_none.py",
            "tests/test_some.py::test_lacks[a.b]",
            "tests/test_some.py::test_lacks[c::d]",
        ]
