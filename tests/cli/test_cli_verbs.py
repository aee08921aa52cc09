"""A verb is one record: what the command line says and does of it follows from that."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from typing import Any

import pytest
from fastshard.cli import main, parser
from fastshard.cli.shared_arguments import add_common, add_source, opened
from fastshard.cli.verb import Outcome, Result, Verb
from fastshard.cli.verbs import VERBS
from fastshard.errors import FastshardError, Finding
from fastshard.sources.registry import load_adapters
from helpers import NEOX, TP4, cli


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("--below", type=int, metavar="N", help="count files below N bytes only")
    add_common(parser, run=False)


def _run(a: argparse.Namespace) -> Outcome:
    if a.below == 0:
        raise FastshardError.of("FS515", "--below", expected="a size", got="0")
    sizes = [file["size"] for file in opened(a).files]
    count = sum(a.below is None or size < a.below for size in sizes)
    found = [] if count == len(sizes) else [Finding.of("FS303", "a finding of the new verb")]
    return Result(f"{count} files", {"count": count}), found


#: A verb that no file of the package knows.
COUNT = Verb(name="count", help="how many files there are", arguments=_arguments, run=_run)


def run(capsys: pytest.CaptureFixture[str], *argv: object, **changes: Any) -> tuple[int, str, str]:
    code = main([str(a) for a in argv], VERBS.and_also(dataclasses.replace(COUNT, **changes)))
    return code, *capsys.readouterr()


def as_json(capsys: pytest.CaptureFixture[str], *argv: object, **changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run(capsys, *argv, "--json", **changes)[1])
    return document


def test_names_are_unique() -> None:
    assert len({verb.name for verb in VERBS}) == len(VERBS)


def test_a_new_verb_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"^  count +how many files there are$", run(capsys, "--help")[1], re.MULTILINE)
    own = run(capsys, "count", "--help")[1]
    assert "usage: fastshard count CKPT... [OPTIONS]" in own and "--below N" in own
    with pytest.raises(SystemExit):
        parser.parse(["--help"])
    assert "  count " not in capsys.readouterr().out


def test_a_new_verb_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "count", TP4)
    assert (code, out, err) == (0, "4 files\n", "")
    document = as_json(capsys, "count", TP4)
    assert (document["command"], document["exit_code"], document["count"]) == ("count", 0, 4)
    assert document["findings"] == [] and "not_checked" not in document and "written" not in document


def test_a_new_verb_fails_as_all_do(capsys: pytest.CaptureFixture[str]) -> None:
    document = as_json(capsys, "count", TP4, "--below", 0)
    assert (document["command"], document["exit_code"]) == ("count", 2)
    assert document["findings"][0]["code"] == "FS515"
    assert as_json(capsys, "count", "--below")["command"] == "count"
    assert "did you mean count?" in run(capsys, "cuont")[2]
    assert "it is an option of count" in run(capsys, "stats", TP4, "--below", "9")[2]
    assert "did you mean --below?" in run(capsys, "count", TP4, "--belwo", "9")[2]


def test_what_a_record_says_of_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    found = ("count", TP4, "--below", 1)
    assert run(capsys, *found)[0] == as_json(capsys, *found)["exit_code"] == 1
    assert run(capsys, *found, judges=lambda a: False)[0] == 0
    assert run(capsys, "count", TP4, "-q")[1].startswith("4 files")
    assert run(capsys, "count", TP4, "-q", silent=True)[1] == ""
    assert as_json(capsys, "count", TP4, tells_unchecked=True)["not_checked"] == []
    assert as_json(capsys, "count", TP4, publishes=lambda a: "there")["written"] is True
    assert run(capsys, *found, publishes=lambda a: "there")[2].endswith(
        "; the result at there is complete (exit 1)\n"
    )


def test_a_verb_may_take_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    none: dict[str, Any] = {
        "arguments": lambda parser: None,
        "run": lambda a: (Result("done"), []),
    }
    assert run(capsys, "count", **none) == (0, "done\n", "")


def test_a_verb_that_publishes_says_so_of_bad_usage_too() -> None:
    """By its name: the arguments are not there."""
    published = {verb.name: cli(verb.name, "--no-such-flag").doc.get("written") for verb in VERBS}
    assert {name for name, said in published.items() if said is not None} == {
        "merge",
        "convert",
        "zero-to-fp32",
        "consolidate",
        "commit",
        "copy-local",
    }
    assert not any(published.values())
    assert "written" not in cli("master-weights", NEOX).doc


def test_the_formats_that_are_explained_are_those_that_are_read() -> None:
    text = cli("explain", "FS513", json_output=False).out
    assert f"fastshard reads: {', '.join(adapter.name for adapter in load_adapters())}." in text
