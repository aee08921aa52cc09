"""Formats of ``--output-format`` for a run: JSON, and the formats that CI services read.

Names in findings are untrusted: each format escapes what would end its own syntax.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import _core
from ..common import json_text
from ..common.codes import CODES
from ..common.errors import Finding
from ..common.finding_facts import effect_of, files_of
from ..common.gate import accepted, ignored
from ..common.records import dataclass, field
from .render import printable, shown

if TYPE_CHECKING:
    from xml.etree import ElementTree

#: Base address of the documentation pages of codes.
_PAGES = "https://fastshard.github.io/fastshard/reference/findings/"
FORMATS = ("text", "json", "github", "sarif", "junit")
#: Severities in SARIF and GitHub annotations.
_LEVELS = {"error": "error", "warning": "warning", "note": "note"}
_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


#: Subjects of findings, by the prefix of their codes.
_KINDS = {
    "completeness": "FS1",
    "layout": "FS2",
    "contents": "FS3",
    "optimizer state": "FS4",
    "files and options": "FS5",
    "well-formed files": "FS6",
}


@dataclass(frozen=True)
class RunReport:
    """The outcome of a run, for all output formats."""

    #: None if the command line names none.
    command: str | None
    arguments: Sequence[str]
    code: int
    findings: list[Finding]
    #: Fields of the result.
    document: dict[str, Any] = field(default_factory=dict)
    #: True if a result was written; None for a command that writes none.
    written: bool | None = None
    #: The verdict, in a word.
    verdict: str = ""
    #: Checks that could not be made for this checkpoint.
    not_checked: Sequence[str] = ()
    #: The same with advice, for a document; None for a command that does not report it.
    not_checked_with_advice: Sequence[str] | None = None
    #: Duration of the run.
    seconds: float = 0.0
    verbose: int = 0
    quiet: int = 0


def find_requested_format(argv: Sequence[str]) -> str:
    """Find the output format that a command line requests, even if it cannot be parsed."""
    named = [word.partition("=")[2] for word in argv if word.startswith("--output-format=")]
    named += [after for word, after in itertools.pairwise(argv) if word == "--output-format"]
    return next((name for name in named if name in FORMATS), "json" if "--json" in argv else "text")


def as_json(report: RunReport) -> str:
    """Format the outcome of a run and all findings as one JSON object."""
    document: dict[str, Any] = {
        "schema": f"fastshard.cli.{report.command or 'usage'}.v1",
        "tool": f"fastshard {_core.__version__}",
        "command": report.command,
        "exit_code": report.code,
        "verdict": report.verdict,
    }
    if report.written is not None:
        document["written"] = report.written
    document |= report.document
    if report.not_checked_with_advice is not None:
        document["not_checked"] = list(report.not_checked_with_advice)
    document["findings"] = [f.to_dict() for f in report.findings]
    return json.dumps(_numbers(document), indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _numbers(value: Any) -> Any:
    """Replace NaN and infinities in a value by null, because JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _numbers(part) for key, part in value.items()}
    return [_numbers(part) for part in value] if isinstance(value, (list, tuple)) else value


def as_sarif(report: RunReport) -> str:
    """Format a SARIF 2.1.0 log of one run: a result per finding, the codes as rules."""
    found_codes = sorted({f.code for f in report.findings})
    rules = [
        {
            "id": code,
            "name": "".join(word.capitalize() for word in CODES[code].name.split("_")),
            "shortDescription": {"text": CODES[code].title},
            "fullDescription": {"text": CODES[code].meaning},
            "helpUri": f"{_PAGES}{code}/",
            "help": {"text": f"{CODES[code].help}\n\nfastshard explain {code}".lstrip()},
            "defaultConfiguration": {"level": _LEVELS[CODES[code].severity]},
        }
        for code in found_codes
    ]
    run = {
        "tool": {"driver": {"name": "fastshard", "semanticVersion": _core.__version__, "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "arguments": [printable(word) for word in report.arguments],
                "exitCode": report.code,
                # A checkpoint that is found wanting is what the tool is for.
                "executionSuccessful": report.code in (0, 1, 3),
            }
        ],
        "results": [_sarif_result(f, found_codes.index(f.code)) for f in report.findings],
    }
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [run],
    }
    return json_text.indented(log, by=2)


def _sarif_result(finding: Finding, rule: int) -> dict[str, Any]:
    import hashlib
    from urllib.parse import quote

    # What makes it the same finding in the next run, whatever its words are by then.
    place = (finding.code, finding.file, finding.rank, finding.host, finding.tensor)
    mark = hashlib.blake2b(json_text.canonical(place).encode(), digest_size=16).hexdigest()
    location: dict[str, Any] = {
        # Services show only what has a place; for the whole checkpoint that is its folder.
        "physicalLocation": {"artifactLocation": {"uri": quote(finding.file or ".", safe="/")}}
    }
    if finding.tensor:
        location["logicalLocations"] = [{"fullyQualifiedName": printable(finding.tensor), "kind": "member"}]
    properties = {
        key: value
        for key in ("rank", "host", "expected", "got")
        if (value := getattr(finding, key)) is not None
    }
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": rule,
        "level": _LEVELS[finding.severity],
        "message": {"text": _sentence(finding)},
        "locations": [location],
        "partialFingerprints": {"fastshardFinding/v1": mark},
    }
    if accepted(finding) or ignored(finding):
        result["suppressions"] = [{"kind": "external", "justification": printable(finding.decided or "")}]
    return result | ({"properties": properties} if properties else {})


def as_junit(report: RunReport) -> str:
    """Format JUnit XML: a fixed list of tests, one for each kind of finding, and one for the run."""
    from xml.etree import ElementTree as tree

    name = f"fastshard {report.command or ''}".strip()
    shown = [f for f in report.findings if (f.severity != "note" and not ignored(f)) or report.verbose]
    # Could not run, or was stopped: an error of the run and not a failure of what it looked at.
    kind = "error" if report.code == 2 or report.code >= 128 else "failure"
    unexplained = report.code != 0 and not any(f.severity == "error" for f in shown)
    seconds = f"{report.seconds:.3f}"
    suites = tree.Element("testsuites", {"name": name, "time": seconds})
    suite = tree.SubElement(suites, "testsuite", {"name": name, "skipped": "0", "time": seconds})
    run = _junit_case(suite, name, printable(" ".join(report.arguments)), seconds)
    if unexplained:
        tree.SubElement(run, kind, {"message": f"exit code {report.code}", "type": "exit"})
    if report.not_checked:
        lines = "\n".join(f"not checked: {line}" for line in report.not_checked)
        tree.SubElement(run, "system-out").text = printable(lines, keep="\n")
    wrong = 0
    for title, first in _KINDS.items():
        found = [f for f in shown if f.code.startswith(first)]
        errors = [f for f in found if f.severity == "error"]
        case = _junit_case(suite, name, title)
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            attributes = {"message": printable(str(errors[0])) + more, "type": errors[0].code}
            tree.SubElement(case, kind, attributes).text = "\n\n".join(map(_sentence, errors))
            wrong += 1
        if others := [f for f in found if f.severity != "error"]:
            tree.SubElement(case, "system-out").text = "\n\n".join(
                f"{f.severity}: {_sentence(f)}" for f in others
            )
    counts = {"tests": len(_KINDS) + 1, "failures": 0, "errors": 0}
    counts[f"{kind}s"] = wrong + unexplained
    for element in (suites, suite):
        element.attrib.update({key: str(value) for key, value in counts.items()})
    tree.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tree.tostring(suites, encoding="unicode") + "\n"


def _junit_case(
    suite: ElementTree.Element, classname: str, name: str, seconds: str = "0"
) -> ElementTree.Element:
    from xml.etree import ElementTree as tree

    return tree.SubElement(suite, "testcase", {"classname": classname, "name": name, "time": seconds})


def as_annotations(report: RunReport) -> str:
    """Format GitHub's workflow commands: an annotation per finding."""
    lines = []
    findings, hidden = shown(report.findings, verbose=report.verbose, quiet=report.quiet)
    for finding in findings:
        title = _property(f"{finding.code} {finding.title}")
        lines.append(f"::{_COMMANDS[finding.severity]} title={title}::{_data(_sentence(finding))}")
    lines += [
        f"::notice title=fastshard::{_data(f'and {count} more of {code} (-v shows all)')}"
        for code, count in hidden.items()
    ]
    return "".join(f"{line}\n" for line in lines)


def without_commands(text: str) -> str:
    """Neutralise workflow commands in text for GitHub's log, because a tensor may be named
    ``::add-path::``."""
    import secrets

    token = secrets.token_hex(16)
    return f"::stop-commands::{token}\n{text}\n::{token}::\n"


def _sentence(finding: Finding) -> str:
    """Format a finding with its effect and advice, for outputs with a single field."""
    rest = {
        "where": files_of(finding.files) if len(finding.files) > 1 else None,
        "effect": effect_of(finding),
        "help": finding.advice,
    }
    return "\n".join(
        [printable(str(finding)), *(f"{key}: {printable(text)}" for key, text in rest.items() if text)]
    )


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_markdown(report: RunReport, ending: str) -> str:
    """Format a summary for the page of a job: the verdict, and a table of errors and warnings."""
    found = [f for f in report.findings if f.severity != "note" and not ignored(f)]
    mark = "❌" if report.code else "⚠️" if found else "✅"
    lines = [f"### {mark} fastshard {report.command or ''}".rstrip(), "", _cell(ending), ""]
    if found:
        lines += ["| finding | what | effect | help |", "|---|---|---|---|"]
        for finding in sorted(found, key=lambda f: f.severity):
            texts = (finding.headline, effect_of(finding) or "", finding.advice or "")
            cells = " | ".join(map(_cell, texts))
            lines.append(f"| {finding.severity} {finding.code} {finding.title} | {cells} |")
        lines.append("")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Escape text for a cell of a Markdown table, so that it cannot end the cell, link, or mention a user."""
    from html import escape

    return f"<code>{escape(printable(text)).replace('|', '&#124;')}</code>" if text else ""


#: Formats that write a single document to stdout.
DOCUMENTS: dict[str, Callable[[RunReport], str]] = {"json": as_json, "sarif": as_sarif, "junit": as_junit}
