"""What docs/stability.md promises is what there is."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from fastshard.cli.help_text import EXIT_CODES
from fastshard.cli.parser import build
from fastshard.cli.verbs import VERBS
from fastshard.common import options

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/stability.md").read_text(encoding="utf-8")
#: Names that still work, and the ones that take their place.
OLD = dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| before", PAGE, re.MULTILINE))


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


def test_every_name_that_still_works_is_listed() -> None:
    commands = {old.split()[1]: new.split()[1] for old, new in OLD.items() if re.fullmatch(r"\S+ \S+", old)}
    assert commands == VERBS._aliases
    kinds = [kind for kind in vars(options).values() if hasattr(kind, "__total__")]
    aliases = {
        f"--{option.alias}": option.flag
        for kind in kinds
        for option in options.table(kind).values()
        if option.alias
    }
    assert {old: new for old, new in OLD.items() if old.startswith("--")} == aliases


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_what_help_does_not_list_is_an_old_name(verb: object) -> None:
    own = next(a for a in build()._actions if isinstance(a, argparse._SubParsersAction)).choices
    hidden = {
        flag
        for action in own[verb.name]._actions  # type: ignore[attr-defined]
        if action.help is argparse.SUPPRESS
        for flag in action.option_strings
    }
    listed = {"--under"} | ({"--parts", "--out", "--emit"} if verb.name == "plan" else set())  # type: ignore[attr-defined]
    listed |= {"--expect"} if verb.name == "loss" else set()  # type: ignore[attr-defined]
    assert hidden <= listed
