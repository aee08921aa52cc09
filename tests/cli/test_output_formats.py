"""What CI services are told: each format read by somebody else's reader, whatever the names in it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import junitparser
import pytest
from fastshard.cli import output_formats
from fastshard.cli.output_formats import RunReport
from fastshard.cli.verbs import VERBS
from fastshard.common.codes import CODES
from fastshard.common.errors import Finding
from helpers import HF, NEOX, STEP, TP4, cli, copy, layer_file
from sarif_pydantic import Sarif

#: Names that end a syntax somewhere.
HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "]]></failure><x/>",
    "a%0A::error::injected",
    "a\n::error title=x::injected",
    "::add-path::/tmp",
    "##[error]injected",
    "a\r\n\x00\x1b[31m",
    "tp 1, with: commas, and: colons",
    "\u202edetrever \ufffe \ud800",
    '"quoted" \\ & <',
]


def told(name: str, *, code: int = 1, severity: str = "error") -> RunReport:
    finding = Finding(
        "FS303",
        severity,
        f"message {name}",
        file=f"dir/{name}",
        rank=name,
        host=name,
        tensor=name,
        expected=name,
        got=name,
        help=f"help {name}",
    )
    return RunReport("verify", ["verify", name], code, [finding, finding.replace(file=None)])


def commands(text: str) -> list[tuple[str, dict[str, str], str]]:
    """Workflow commands in a log, as the runner reads them: at the start of a line, unless they are
    stopped."""
    found = []
    stopped: str | None = None
    for line in re.split(r"\r\n|\r|\n", text):
        line = line.lstrip()
        if stopped is not None:
            stopped = None if line == f"::{stopped}::" else stopped
            continue
        given = re.match(r"::([\w-]+)( [^:]*)?::(.*)$", line)
        # The form from before, which may stand anywhere.
        assert given or "##[" not in line, line
        if given is None:
            continue
        if given[1] == "stop-commands":
            stopped = given[3]
            continue
        pairs = (pair.split("=", 1) for pair in (given[2] or "").strip().split(",") if pair)
        found.append((given[1], {k: decoded(v) for k, v in pairs}, decoded(given[3])))
    return found


def decoded(text: str) -> str:
    for code, sign in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        text = text.replace(code, sign)
    return text


@pytest.mark.parametrize("name", HOSTILE)
def test_sarif_says_what_the_findings_say(name: str) -> None:
    given = told(name)
    text = output_formats.as_sarif(given)
    assert text.isascii()
    document = json.loads(text)
    Sarif.model_validate(document)
    (run,) = document["runs"]
    rules = run["tool"]["driver"]["rules"]
    for result, finding in zip(run["results"], given.findings, strict=True):
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == "FS303"
        assert result["level"] == "error" and "message" in result["message"]["text"]
        (place,) = result["locations"]
        uri = place["physicalLocation"]["artifactLocation"]["uri"]
        # Nothing but what a relative reference may hold.
        assert re.fullmatch(r"[A-Za-z0-9._~/%-]+", uri)
        assert unquote(uri) == (finding.file or ".")
    marks = [r["partialFingerprints"]["fastshardFinding/v1"] for r in run["results"]]
    assert len(set(marks)) == 2
    reworded = given.findings[0].replace(message="in other words", got=None)
    again = json.loads(output_formats.as_sarif(dataclasses.replace(given, findings=[reworded])))
    assert again["runs"][0]["results"][0]["partialFingerprints"]["fastshardFinding/v1"] == marks[0]


@pytest.mark.parametrize("code, ran", [(0, True), (1, True), (3, True), (2, False), (130, False)])
def test_sarif_tells_a_verdict_from_a_run_that_failed(code: int, ran: bool) -> None:
    document = json.loads(output_formats.as_sarif(told("x", code=code)))
    (invocation,) = document["runs"][0]["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (ran, code)


@pytest.mark.parametrize("name", HOSTILE)
def test_junit_says_what_the_findings_say(name: str, tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    file.write_text(output_formats.as_junit(told(name)), encoding="utf-8")
    suites = junitparser.JUnitXml.fromfile(str(file))
    (suite,) = suites
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (7, 1, 0, 0)
    failed = [case for case in suite if not case.is_passed]
    ((case,), (result,)) = failed, failed[0].result
    assert case.name == "contents" and isinstance(result, junitparser.Failure) and result.type == "FS303"
    assert result.text.count("help: help") == 2


def test_junit_counts_what_it_holds(tmp_path: Path) -> None:
    """Warnings pass; what could not run is an error; a bad exit code is never a suite that passes."""
    warned = dataclasses.replace(told("x"), code=0, findings=[told("x", severity="warning").findings[0]])
    unable = told("x", code=2)
    for given, counts in (
        (warned, (7, 0, 0)),
        (unable, (7, 0, 1)),
        (dataclasses.replace(warned, code=130), (7, 0, 1)),
        (dataclasses.replace(warned, findings=[], code=0), (7, 0, 0)),
    ):
        file = tmp_path / "junit.xml"
        file.write_text(output_formats.as_junit(given), encoding="utf-8")
        suites = junitparser.JUnitXml.fromfile(str(file))
        said = (suites.tests, suites.failures, suites.errors)
        suites.update_statistics()
        assert said == counts == (suites.tests, suites.failures, suites.errors)


@pytest.mark.parametrize("name", HOSTILE)
def test_annotations_hold_what_the_findings_say_and_no_other_command(name: str) -> None:
    found = commands(output_formats.as_annotations(told(name)))
    assert [(kind, properties) for kind, properties, _ in found] == [
        ("error", {"title": "FS303 Copied shard"})
    ] * 2
    for _, _, message in found:
        assert "help: help" in message
    assert commands(output_formats.without_commands(f"{name}\n  {name}")) == []


def test_annotations_are_few_where_findings_are_many() -> None:
    many = dataclasses.replace(told("x"), findings=told("x").findings * 30)
    found = commands(output_formats.as_annotations(many))
    assert len(found) == 21 and found[-1][2] == "and 40 more of FS303 (-v shows all)"
    assert len(commands(output_formats.as_annotations(dataclasses.replace(many, verbose=1)))) == 60


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (ckpt / STEP / layer_file(3, 1)).unlink()
    return ckpt


def test_each_format_of_a_real_run(broken: Path, tmp_path: Path) -> None:
    ran = {
        name: cli("verify", broken, "--output-format", name, json_output=False)
        for name in output_formats.FORMATS
    }
    assert {name: r.code for name, r in ran.items()} == dict.fromkeys(output_formats.FORMATS, 3)
    missing = f"{STEP}/{layer_file(3, 1)}"
    assert "FS101" in ran["text"].out and ran["text"].err == ""
    assert ran["json"].doc == cli("verify", broken).doc and ran["json"].err == ""
    (result,) = json.loads(ran["sarif"].out)["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == missing
    (tmp_path / "junit.xml").write_text(ran["junit"].out)
    assert junitparser.JUnitXml.fromfile(str(tmp_path / "junit.xml")).failures == 1
    (annotation,) = commands(ran["github"].out)
    assert annotation[0] == "error" and missing in annotation[2] and "help: copy" in annotation[2]
    # People who look at the log of a document see what they would see without it.
    said = ran["sarif"].err
    assert ran["junit"].err == said and {*said.splitlines()} <= {*ran["text"].out.splitlines()}
    assert ran["github"].err.startswith(f"{broken}: INCOMPLETE, ")


def test_tensors_cannot_drive_the_log(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"::error::injected": torch.zeros(4), "ok": torch.ones(3)}, tmp_path / "model.safetensors")
    ran = cli("stats", tmp_path, "--output-format", "github", json_output=False)
    assert ran.code == 0 and "\n::error::injected " in ran.out
    assert commands(ran.out) == []


@pytest.mark.parametrize("words", [["--output-format", "sarif"], ["--output-format=junit"], ["--json"]])
def test_bad_usage_is_told_in_the_format_that_was_asked_for(words: list[str]) -> None:
    ran = cli("verify", *words, "--no-such-flag", json_output=False)
    assert ran.code == 2
    if "--output-format=junit" in words:
        assert junitparser.JUnitXml.fromstring(ran.out.encode()).errors == 1
    else:
        document = json.loads(ran.out)
        findings: list[Any] = document.get("findings") or document["runs"][0]["results"]
        assert len(findings) == 1


@pytest.mark.parametrize(("options", "code"), [((), 3), (("--exit-zero",), 0)])
def test_what_is_found_is_a_failure_and_no_error(options: tuple[str, ...], code: int, broken: Path) -> None:
    ran = cli("ls", broken, *options, "--output-format", "junit", json_output=False)
    suites = junitparser.JUnitXml.fromstring(ran.out.encode())
    assert (ran.code, suites.failures, suites.errors) == (code, 1, 0)


def test_json_is_short_for_its_format() -> None:
    assert cli("inspect", TP4).doc == cli("inspect", TP4, "--output-format=json", json_output=False).doc
    assert "did you mean sarif?" in cli("inspect", TP4, "--output-format", "sarf", json_output=False).err


def test_every_code_makes_a_rule() -> None:
    findings = [Finding.of(code, "x") for code in CODES]
    document = json.loads(output_formats.as_sarif(RunReport("verify", [], 1, findings)))
    Sarif.model_validate(document)
    assert len(document["runs"][0]["tool"]["driver"]["rules"]) == len(CODES)


def test_a_document_is_all_that_stdout_holds(broken: Path) -> None:
    command = [sys.executable, "-m", "fastshard", "verify", str(broken), "--output-format", "sarif"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and json.loads(done.stdout)["version"] == "2.1.0"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_summary_holds_what_it_says_and_nothing_else(name: str) -> None:
    text = output_formats.as_markdown(told(name), f"{name}: BROKEN, something (exit 1)")
    lines = text.splitlines()
    assert lines[0] == "### ❌ fastshard verify" and len(lines) == 9
    assert all(line.startswith(("<code>", "| ", "|---")) for line in lines[2:] if line)
    assert "<" not in re.sub(r"</?code>", "", text)
    # A bar would begin a cell.
    assert {line.count("|") for line in lines if line.startswith("|")} == {5}


def test_a_summary_is_appended_where_it_is_asked_for(tmp_path: Path) -> None:
    for _ in range(2):
        assert cli("verify", HF, "--summary", tmp_path / "summary.md").code == 0
    assert (tmp_path / "summary.md").read_text().count("### ✅ fastshard verify") == 2
    ran = cli("verify", HF, "--summary", tmp_path, json_output=False)
    assert ran.code == 2 and "cannot be written to" in ran.err


#: What each verb is called with, so that it finds something or cannot run; None for one that takes no
#: checkpoint.
_FAILING: dict[str, tuple[object, ...] | None] = {
    "completion": None,
    "man": None,
    "explain": ("FS999",),
    "expected": ("nowhere/config.json",),
    "commit": ("nowhere/out", "--run", "0" * 32),
    "make-part": ("nowhere/out", "--part", "0", "--run", "0" * 32),
    "clean": ("nowhere/out",),
    "diff": ("nowhere", "nowhere"),
    "trace": ("nowhere", "w"),
}


@pytest.mark.parametrize("name", [verb.name for verb in VERBS if _FAILING.get(verb.name, ()) is not None])
def test_json_holds_all_findings_and_no_other_text_does(name: str, tmp_path: Path) -> None:
    argv = _FAILING.get(name) or ("nowhere", *(("out",) if VERBS[name].publishes is not None else ()))
    ran = cli(name, *argv)
    assert ran.err == ""
    assert ran.code == 2 and ran.doc["findings"], ran.out


@pytest.mark.parametrize("name", ["verify", "inspect", "ls", "stats", "plan", "report", "merge", "manifest"])
def test_several_findings_are_in_the_document_alone(name: str, tmp_path: Path) -> None:
    root = copy(NEOX, tmp_path / "run")
    for rank in (0, 1):
        (root / STEP / layer_file(3, rank)).unlink()
    (root / STEP / "leftover.safetensors").write_bytes(b"")
    out = {
        "merge": [tmp_path / "out"],
        "report": ["-o", tmp_path / "page.html"],
        "manifest": ["-o", tmp_path / "m.json"],
    }
    ran = cli(name, root, *out.get(name, []))
    assert ran.err == "" and json.loads(ran.out)["findings"], ran.err


def test_a_finding_that_is_shown_before_the_work_is_in_the_document_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli("split", HF, out, "--parts", 2).code == 0
    text = cli("merge", TP4, out, "--progress", "plain", json_output=False)
    assert "an interrupted run of another plan" in text.err
    shutil.rmtree(out)
    ran = cli("merge", TP4, out, "--progress", "plain")
    assert ran.code == 0 and ran.having("FS508", severity="warning"), ran.out
    assert ran.err == ""
