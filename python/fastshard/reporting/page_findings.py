"""The findings of a report's page: one article for each cause."""

from __future__ import annotations

from collections.abc import Sequence

from ..common.errors import Finding
from ..common.finding_facts import effect_of
from ..common.formatting import counted
from ..common.ranks import is_within
from ..common.records import dataclass
from .grid import state_of
from .grid_cells import Band
from .page_markup import Limits
from .report_data import Report
from .statement import sentence

__all__ = ["Article", "articles", "links"]

#: Maximum number of files and tensors in an article.
_LISTED = 24


@dataclass(frozen=True)
class Article:
    """One cause: an error, a warning or a note, with everything that it concerns."""

    number: int
    code: str
    severity: str
    #: Number of its state in the grid; None for a note.
    state: int | None
    title: str
    facts: tuple[tuple[str, str], ...]
    fix: str
    #: Its subjects: a file or a tensor, and its place.
    places: tuple[tuple[str, str], ...]
    #: Total number of places.
    count: int
    effect: str
    findings: tuple[Finding, ...]


def articles(report: Report, limits: Limits) -> list[Article]:
    """List the causes by weight, as many as fit into the page."""
    made: list[Article] = []
    for group in report.findings:
        alike: dict[str, list[Finding]] = {}
        for finding in group.findings:
            alike.setdefault(finding.message, []).append(finding)
        for of in alike.values():
            if len(made) < limits.findings:
                made.append(_article(len(made) + 1, of, limits))
    return made


def _article(number: int, of: Sequence[Finding], limits: Limits) -> Article:
    first = of[0]
    if len(of) == 1:
        title = sentence(first)
    else:
        title = (
            f"{counted(len(of), 'tensor' if first.tensor else 'file' if first.file else 'place')}: "
            f"{first.message}"
        )
    facts = (
        [("found", first.got), ("expected", first.expected), ("evidence", first.evidence)]
        if len(of) == 1
        else []
    )
    places = [place for finding in of for place in _places(finding)]
    fixes = list(dict.fromkeys(f.advice for f in of if f.advice))
    more = f"; and {counted(len(fixes) - 3, 'more place')} alike" if len(fixes) > 3 else ""
    return Article(
        number,
        first.code,
        first.severity,
        None if first.severity == "note" else state_of(first),
        title,
        tuple((label, text) for label, text in facts if text),
        "; ".join(fixes[:3]) + more,
        tuple(places[: min(_LISTED, 3 * limits.findings)]),
        len(places),
        effect_of(first) or "" if len(of) == 1 else "",
        tuple(of),
    )


def _places(finding: Finding) -> list[tuple[str, str]]:
    """List the files of a finding, or its tensor, each with other facts about the place."""
    if finding.parts:
        return [(part.tensor or part.file or "", part.message) for part in finding.parts]
    where = [finding.rank or "", f"host {finding.host}" if finding.host else ""]
    if len(finding.files) < 2 and finding.tensor:
        return [(finding.tensor, ", ".join(filter(None, [finding.file or "", *where])))]
    return [(file, ", ".join(filter(None, where))) for file in finding.files if file != "."]


def links(articles: Sequence[Article], band: Band, state: int) -> tuple[int, ...]:
    """List the articles about a cell of a band.

    These are articles of its state about its files or its rank, else all of its state.
    """
    alike = [article for article in articles if article.state == state]
    names = set(band.names) | set(band.files)
    near = [a for a in alike if any(f.rank in names or names.intersection(f.files) for f in a.findings)]
    if not near:
        near = [
            a
            for a in alike
            if any(f.coords and any(is_within(rank, f.coords) for rank in band.ranks) for f in a.findings)
        ]
    return tuple(a.number for a in near or alike)[:8]
