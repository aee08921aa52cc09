"""Options that environment variables state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from typing import Any

import pytest
from fastshard.cli.settings import apply_environment
from helpers import HF


def plan(*words: str, **variables: str) -> tuple[int, dict[str, Any]]:
    """A plan in a process of its own: that of the tests holds too much for small limits."""
    ran = subprocess.run(
        [sys.executable, "-m", "fastshard", "plan", str(HF), "--json", *words],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.returncode, json.loads(ran.stdout)


def test_the_command_line_goes_before_variables() -> None:
    variables = {"FASTSHARD_MEMORY": "1GiB", "FASTSHARD_THREADS": "3", "FASTSHARD_PROGRESS": "none"}
    code, document = plan(**variables)
    assert (code, document["memory"]["budget"], document["memory"]["threads"]) == (0, 1 << 30, 3)
    code, document = plan("--memory", "512MiB", "--threads", "1", **variables)
    assert (code, document["memory"]["budget"], document["memory"]["threads"]) == (0, 1 << 29, 1)


@pytest.mark.parametrize(("stated", "taken"), [(None, "plain"), ("auto", "auto"), ("none", "none")])
def test_progress(stated: str | None, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTSHARD_PROGRESS", "plain")
    arguments = Namespace(progress=stated)
    apply_environment(arguments)
    assert arguments.progress == taken


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FASTSHARD_MEMORY", "much"),
        ("FASTSHARD_MEMORY", "-1"),
        ("FASTSHARD_THREADS", "0"),
        ("FASTSHARD_THREADS", "many"),
        ("FASTSHARD_THREADS", "1.5"),
        ("FASTSHARD_PROGRESS", "loud"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_refused(variable: str, value: str) -> None:
    code, document = plan(**{variable: value})
    (finding,) = document["findings"]
    assert (code, finding["code"], finding["got"]) == (2, "FS515", repr(value))
    assert variable in finding["message"] and variable in finding["help"]


def test_a_variable_without_a_value_states_nothing() -> None:
    assert plan(FASTSHARD_MEMORY="", FASTSHARD_THREADS="", FASTSHARD_PROGRESS="")[0] == 0
