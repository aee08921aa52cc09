"""Descriptions of the extent of a check: what is verified about a checkpoint or a result, and what is not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..common import codes
from ..common.errors import Finding
from ..common.records import asdict, dataclass, field

__all__ = ["Checked", "checked", "list_unchecked", "listed_by"]

#: What cannot be checked by reading a checkpoint.
LIMIT = "whether the layout is right for the model: no hash shows that, but logits do"

#: Possible outcomes of a verification without errors.
CONTENTS, COMPLETE, PARTLY = "contents_checked", "complete", "partly_checked"


@dataclass(frozen=True)
class Checked:
    """The extent to which a checkpoint was checked."""

    #: ``contents_checked``: the contents match the hashes of a manifest, a signature or a download;
    #: ``complete``: everything that must exist does, but the contents were not compared with anything;
    #: ``partly_checked``: something could be missing unnoticed.
    ending: str
    #: Descriptions of what the contents were checked against.
    against: list[str] = field(default_factory=list)
    #: Descriptions of problems that would not be noticed.
    unnoticed: list[str] = field(default_factory=list)
    #: The part that was checked; None for all of the checkpoint.
    part: str | None = None
    #: The source of the list of required tensors, if it is not one of fastshard's own tables.
    by: str | None = None

    def told(self) -> str:
        """Describe for users how far the checkpoint was checked."""
        part = f" ({self.part})" if self.part else ""
        if self.ending == CONTENTS:
            return f"contents checked{part}: {', '.join(self.against)}"
        if self.ending == COMPLETE:
            return f"complete{part}" + (f" by {self.by}" if self.by else "")
        return f"no problem was found in what was checked{part}"

    def left(self) -> tuple[str, ...]:
        """Return descriptions for users of what was not checked."""
        if self.ending == CONTENTS:
            return ()
        by = ", ".join(self.against)
        contents = (
            f"the contents (only compared with {by})" if by else "the contents (there are no checksums)"
        )
        return (*self.unnoticed, contents)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without empty fields."""
        return {key: value for key, value in asdict(self).items() if value}


def checked(
    findings: Iterable[Finding],
    vouched: Iterable[str],
    partial: Iterable[str] = (),
    unnoticed: Iterable[str] = (),
    part: str | None = None,
) -> Checked:
    """Determine how far a checkpoint without errors was checked.

    Args:
        findings: all findings.
        vouched: descriptions of what all contents were compared with.
        partial: checksums that are weaker than a hash, or do not cover all files.
        unnoticed: descriptions of problems that would not be noticed, beyond those in findings.
        part: the part that was checked; None for all of the checkpoint.
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
    """Return the source of the list of tensors, if all of them exist.

    Return None if no list was compared, or if something differs.
    """
    return next((f.evidence for f in findings if f.code == codes.NOT_PROVABLE and f.evidence), None)


def _left_open(finding: Finding) -> str | None:
    """Return what may be missing or misplaced unnoticed according to a finding; None for other findings."""
    if finding.code == codes.LOOKALIKES:
        return "files or chunks that were swapped would not be noticed"
    return finding.unnoticed


def _unproven(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that report what could not be checked."""
    findings = list(findings)
    unprovable = [f for f in findings if f.code == codes.NOT_PROVABLE and f.file is None]
    return [*unprovable[:1], *(f for f in _unnoticed(findings) if f.is_a("unproven"))]


def _unnoticed(findings: list[Finding]) -> list[Finding]:
    """Return the findings, without the one about unnoticed swaps if a swap was noticed."""
    noticed = any(f.severity != "note" and f.is_a("swapped") for f in findings)
    return [f for f in findings if not (noticed and f.code == codes.LOOKALIKES)]


def list_unchecked(findings: Iterable[Finding], *, with_advice: bool = False) -> list[str]:
    """Describe what could not be checked in this checkpoint; ``with_advice`` adds what to do about it."""
    if with_advice:
        return [f"{finding.message}; {finding.advice}" for finding in _unproven(findings)]
    return [_left_open(finding) or finding.message for finding in _unproven(findings)]
