"""What docs/stability.md promises is what there is."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from fastshard.cli.help_text import EXIT_CODES
from fastshard.cli.parser import build
from fastshard.cli.verbs import VERBS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/stability.md").read_text(encoding="utf-8")


def test_every_schema_is_named() -> None:
    schemas = {path.name for path in (ROOT / "python/fastshard/schemas").iterdir()}
    assert set(re.findall(r"`(\S+\.schema\.json)`", PAGE)) == schemas
    assert set(re.findall(r"`(\w+\.v\d)`", PAGE)) == {name.removesuffix(".schema.json") for name in schemas}


def test_every_exit_code_means_what_help_says() -> None:
    rows = dict(re.findall(r"^\| ([\d, ]+) \| (.*) \|$", PAGE, re.MULTILINE))
    assert list(rows) == [code for code, _ in EXIT_CODES]
    for code, meaning in EXIT_CODES:
        # The first words; help adds a bracket or a sentence behind them.
        first = re.split(r"[;:(]", meaning)[0].strip()
        assert rows[code].startswith(first), code


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_help_lists_every_option(verb: object) -> None:
    own = next(a for a in build()._actions if isinstance(a, argparse._SubParsersAction)).choices
    hidden = {
        flag
        for action in own[verb.name]._actions  # type: ignore[attr-defined]
        if action.help is argparse.SUPPRESS
        for flag in action.option_strings
    }
    assert hidden == set()
