"""Checks of a report: a fixed list, so that a skipped check does not look like a passed one."""

from __future__ import annotations

from collections.abc import Sequence

from ..common import codes
from ..common.errors import Finding
from ..common.formatting import counted
from ..common.records import dataclass

__all__ = ["FAILED", "NOT_CHECKED", "PASSED", "Check", "Read", "checks"]

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"


@dataclass(frozen=True)
class Check:
    """One line of the list."""

    name: str
    #: ``passed``, ``failed`` or ``not checked``.
    state: str
    #: The result, or the reason why it was not checked.
    text: str
    #: The command that checks it; empty if it was checked, or if no command does.
    command: str = ""


@dataclass(frozen=True)
class Read:
    """The extent to which a checkpoint was read."""

    #: The checkpoint as an argument of a command.
    named: str
    files: int
    tensors: int
    #: True if the required files and tensors are known.
    provable: bool
    #: True if all data was read.
    data: bool
    #: True if there is a manifest next to it.
    manifest: bool
    #: True if the manifest has statistics.
    recorded: bool = False
    #: Description of the loss that the conversion computed; empty if it computed none.
    loss: str = ""


def checks(findings: Sequence[Finding], read: Read) -> tuple[Check, ...]:
    """List the checks of an open checkpoint."""
    failed: dict[str, list[Finding]] = {}
    notes = {f.code for f in findings if f.severity == "note"}
    for finding in findings:
        if finding.severity in ("error", "warning"):
            failed.setdefault(codes.CODES[finding.code].check, []).append(finding)
    rows = [
        ("files", "Files present", *_files(read)),
        ("names", "Names and shapes", PASSED, f"{counted(read.tensors, 'tensor')}, by the headers.", ""),
        ("step", "One step", PASSED, "No file of another step was found.", ""),
        ("copies", "No copies or swaps", *_copies(read, codes.LOOKALIKES in notes)),
        ("data", "Data readable, checksums", *_data(read, codes.NO_CHECKSUMS in notes)),
        ("replicas", "Equal replicas", *_by_data(read, "The copies on several ranks are equal.")),
        ("values", "Values", *_values(read)),
        ("manifest", "Hashes of the manifest", *_manifest(read)),
    ]
    list_of_checks = [
        Check(name, FAILED, _name_problems(failed[key])) if key in failed else Check(name, *rest)
        for key, name, *rest in rows
    ]
    layout = "No hash shows this. Compare the loss with the trainer's own, or logits with a known-good model."
    if read.loss:
        layout = f"No hash shows this. When it was written: {read.loss}."
    return (*list_of_checks, Check("Layout right for the model", NOT_CHECKED, layout))


def _name_problems(found: list[Finding]) -> str:
    """Name the problems that failed a check, the first few in full."""
    titles = list(dict.fromkeys(f"{f.title} ({f.code})" for f in found))
    more = f" and {counted(len(titles) - 3, 'more problem')}" if len(titles) > 3 else ""
    return f"{', '.join(titles[:3])}{more}."


def _files(read: Read) -> tuple[str, str, str]:
    if read.provable:
        return PASSED, f"All expected files are here: {read.files:,}.", ""
    return NOT_CHECKED, "The checkpoint does not state all files and tensors that must exist.", ""


def _copies(read: Read, alike: bool) -> tuple[str, str, str]:
    if alike:
        return NOT_CHECKED, "Files that were swapped would go unnoticed (FS114).", ""
    if read.data:
        return PASSED, "None was found.", ""
    return NOT_CHECKED, "None was found by the headers. No data was read.", f"fastshard verify {read.named}"


def _data(read: Read, unsummed: bool) -> tuple[str, str, str]:
    if not read.data:
        return NOT_CHECKED, "No data was read.", f"fastshard verify {read.named}"
    if unsummed:
        return NOT_CHECKED, "All data was read. The files have no checksums (FS314).", ""
    return PASSED, "All data was read. No checksum differs.", ""


def _by_data(read: Read, passed: str) -> tuple[str, str, str]:
    if read.data:
        return PASSED, passed, ""
    return NOT_CHECKED, "No data was read.", f"fastshard verify {read.named}"


def _values(read: Read) -> tuple[str, str, str]:
    if read.data:
        return PASSED, "No NaN, no infinity, no unexpected all-zero block.", ""
    if read.recorded:
        return (
            NOT_CHECKED,
            "The statistics are those of the manifest.",
            f"fastshard report {read.named} --stats",
        )
    return NOT_CHECKED, "NaN, infinities and all-zero blocks.", f"fastshard report {read.named} --stats"


def _manifest(read: Read) -> tuple[str, str, str]:
    if read.manifest:
        return (
            NOT_CHECKED,
            "A manifest is here. Its hashes were not compared.",
            f"fastshard verify {read.named}",
        )
    return NOT_CHECKED, "There is no manifest. This makes one:", f"fastshard manifest {read.named}"
