"""The GitHub Action's own script, run as the runner runs it; workflows are linted in CI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import NEOX, STEP, copy, layer_file

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())


def act(tmp_path: Path, checkpoint: str, **inputs: str) -> tuple[int, str, dict[str, str]]:
    """Exit code, log and outputs of the step that runs fastshard."""
    step = next(s for s in ACTION["runs"]["steps"] if s["name"] == "run")
    given = {name: str(about.get("default", "")) for name, about in ACTION["inputs"].items()}
    given |= {"checkpoint": checkpoint, **inputs}
    environment = dict(os.environ)
    for name, value in step["env"].items():
        assert value.startswith("${{ inputs.") and value.endswith(" }}")
        environment[name] = given[value[len("${{ inputs.") : -len(" }}")]]
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "fastshard").write_text(f'#!/bin/sh\nexec {sys.executable} -m fastshard "$@"\n')
    (tools / "fastshard").chmod(0o755)
    environment |= {
        "PATH": f"{tools}:{environment['PATH']}",
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
    }
    # source: GitHub's documentation, shell: bash is run so
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    outputs = dict(line.split("=", 1) for line in (tmp_path / "output").read_text().splitlines())
    return done.returncode, done.stdout + done.stderr, outputs


def test_a_good_checkpoint_passes(tmp_path: Path) -> None:
    assert act(tmp_path, str(NEOX))[::2] == (0, {"exit-code": "0"})


def test_a_broken_one_fails_with_an_annotation(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (ckpt / STEP / layer_file(3, 1)).unlink()
    code, log, outputs = act(tmp_path, str(ckpt))
    assert (code, outputs) == (3, {"exit-code": "3"})
    assert "\n::error title=FS101 Missing file::" in "\n" + log
    summary = (tmp_path / "summary").read_text()
    assert summary.startswith("### ❌ fastshard verify\n") and "| error FS101 Missing file | " in summary


def test_what_fails_is_an_input(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (ckpt / STEP / "layer_99-model_00-model_states.pt").write_bytes(
        (ckpt / STEP / layer_file(3, 0)).read_bytes()
    )
    codes = {
        fail_on: act(tmp_path, str(ckpt), **{"fail-on": fail_on})[0] for fail_on in ("", "error", "warning")
    }
    assert codes["warning"] == 1 and codes[""] == codes["error"]


def test_a_document_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    code, log, _ = act(
        tmp_path, str(NEOX), format="sarif", output="out.sarif", arguments="--step=global_step4\n\n-q"
    )
    assert code == 0 and "sarif" not in log
    assert json.loads((tmp_path / "out.sarif").read_text())["version"] == "2.1.0"


@pytest.mark.parametrize(
    "hostile", ["$(touch ran)", "; touch ran", "`touch ran`", "a\ntouch ran", '" && touch ran #']
)
def test_nothing_in_an_input_is_read_by_the_shell(hostile: str, tmp_path: Path) -> None:
    for inputs in ({"arguments": hostile}, {"command": hostile}, {"format": hostile}):
        assert act(tmp_path, str(NEOX), **inputs)[0] == 2
    assert act(tmp_path, hostile)[0] == 2
    assert not (tmp_path / "ran").exists()


def test_no_expression_stands_in_a_script() -> None:
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"]


def test_the_example_of_a_gate_calls_what_there_is() -> None:
    """Each fastshard command of it is parsed, and the action's inputs are its own."""
    import shlex

    from fastshard.cli.parser import parse

    gate = yaml.safe_load((ROOT / "examples/ci/publish.yml").read_text())
    steps = gate["jobs"]["publish"]["steps"]
    lines = [
        line for step in steps for line in step.get("run", "").splitlines() if line.startswith("fastshard ")
    ]
    assert len(lines) == 2
    for line in lines:
        assert parse(shlex.split(line)[1:]).command in ("convert", "attest")
    (used,) = (step for step in steps if str(step.get("uses", "")).startswith("fastshard/"))
    assert set(used["with"]) <= set(ACTION["inputs"])
