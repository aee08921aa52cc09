"""What is proven of a checkpoint or a result, and what is not, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..common import codes
from ..common.errors import Finding
from ..common.records import asdict, dataclass, field

__all__ = ["Checked", "checked", "listed_by", "not_checked", "not_proven"]

#: How the verification of a checkpoint ends in which nothing wrong was found.
CONTENTS, COMPLETE, PARTLY = "contents_checked", "complete", "partly_checked"


@dataclass(frozen=True)
class Checked:
    """How far a checkpoint was checked."""

    #: ``contents_checked``: against hashes of a manifest, a signature or a download; ``complete``: all that
    #: must be there is, its contents were compared with nothing; ``partly_checked``: something could be
    #: missing unnoticed.
    ending: str
    #: What the contents were checked against, in words.
    against: list[str] = field(default_factory=list)
    #: What would not be noticed, in words.
    unnoticed: list[str] = field(default_factory=list)
    #: Which part of it was looked at, where that is not all.
    part: str | None = None
    #: Who lists what must be there, where that is none of fastshard's own tables.
    by: str | None = None

    def told(self) -> str:
        """How far, for people."""
        part = f" ({self.part})" if self.part else ""
        if self.ending == CONTENTS:
            return f"contents checked{part}: {', '.join(self.against)}"
        if self.ending == COMPLETE:
            return f"complete{part}" + (f" by {self.by}" if self.by else "")
        return f"nothing is wrong as far as it was checked{part}"

    def left(self) -> tuple[str, ...]:
        """What was not checked, for people."""
        if self.ending == CONTENTS:
            return ()
        by = ", ".join(self.against)
        contents = f"the contents (only against {by})" if by else "the contents (no checksums here)"
        return (*self.unnoticed, contents)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, without empty fields."""
        return {key: value for key, value in asdict(self).items() if value}


def checked(
    findings: Iterable[Finding],
    vouched: Iterable[str],
    partial: Iterable[str] = (),
    unnoticed: Iterable[str] = (),
    part: str | None = None,
) -> Checked:
    """How far a checkpoint was checked that has no error.

    Args:
        findings: all that was found.
        vouched: what all contents were compared with.
        partial: checksums that say less than a hash, or not of all files.
        unnoticed: what no finding says that would not be noticed.
        part: which part was looked at; None for all.
    """
    vouched = list(vouched)
    findings = list(findings)
    unnoticed = [*(text for f in _unnoticed(findings) if (text := _left_open(f)) is not None), *unnoticed]
    if vouched:
        return Checked(CONTENTS, vouched, part=part)
    return Checked(
        PARTLY if unnoticed else COMPLETE,
        list(partial),
        list(dict.fromkeys(unnoticed)),
        part,
        listed_by(findings),
    )


def listed_by(findings: Iterable[Finding]) -> str | None:
    """Who listed the tensors that are all there; None where no list was compared, or something differs."""
    return next((f.evidence for f in findings if f.code == codes.NOT_PROVABLE and f.evidence), None)


def _left_open(finding: Finding) -> str | None:
    """What a finding says may be missing, or lie elsewhere, unnoticed; None for others."""
    if finding.code == codes.LOOKALIKES:
        return "files or chunks that were swapped would not be noticed"
    return finding.unnoticed


def _unproven(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that say what could not be checked."""
    findings = list(findings)
    unprovable = [f for f in findings if f.code == codes.NOT_PROVABLE and f.file is None]
    return [*unprovable[:1], *(f for f in _unnoticed(findings) if f.is_a("unproven"))]


def _unnoticed(findings: list[Finding]) -> list[Finding]:
    """The findings; where a swap was noticed, without that which says that one would not be."""
    noticed = any(f.severity != "note" and f.is_a("swapped") for f in findings)
    return [f for f in findings if not (noticed and f.code == codes.LOOKALIKES)]


def not_checked(findings: Iterable[Finding]) -> list[str]:
    """What could not be checked of this checkpoint."""
    return [_left_open(f) or f.message for f in _unproven(findings)]


def not_proven(findings: Iterable[Finding]) -> list[str]:
    """What no run that reads a checkpoint can prove, and what this one could not, each with what would
    help."""
    left = _unproven(findings)
    lines = [f"{f.message}; {f.advice}" for f in left]
    if all(f.code != codes.NOT_PROVABLE for f in left):
        lines.insert(0, "that the layout is right for the model: no hash shows that, logits do")
    return lines
