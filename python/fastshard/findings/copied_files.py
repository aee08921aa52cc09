"""Files with another file's data, as the cause of missing and differing tensors that verify finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..common import codes
from ..common.errors import Finding
from .causes import Causes
from .effects import effect_on

__all__ = ["drop_copied"]

#: Derives causes from errors about files of a checkpoint.
Explain = Callable[[Sequence[Finding]], Causes]


def drop_copied(findings: Sequence[Finding], differing: Sequence[Finding], explain: Explain) -> list[Finding]:
    """Drop the findings that misplaced or copied files explain, and put the findings about these files first.

    Args:
        findings: the findings from the headers.
        differing: the findings from reading the data.
        explain: derives causes from errors about files.

    Returns:
        Both lists without consequences: the findings from the headers first. A copied file that explains
        missing tensors is an error, and comes before all others.
    """
    copied, explained = _explain_missing(findings, differing, explain)
    findings = [*copied, *(f for f in findings if f not in explained)]
    misplaced = [f for f in findings if f.is_a("misplaced") and f.severity == "error"]
    elsewhere = {file for finding in misplaced for file in finding.files}
    named = {file for f in misplaced if f.code == codes.DUPLICATED_SHARD for file in f.files}

    def is_known(finding: Finding) -> bool:
        files = {finding.file, *finding.files}
        if finding.is_a("comparison"):
            return not elsewhere.isdisjoint(files)
        # All but the original are named.
        is_copy = codes.CODES[finding.code].check == "copies"
        return is_copy and not named.isdisjoint(files) and len(files - named) < 2

    return [*findings, *(finding for finding in differing if not is_known(finding))]


def _explain_missing(
    findings: Sequence[Finding], differing: Sequence[Finding], explain: Explain
) -> tuple[list[Finding], set[Finding]]:
    """Find copied files that replace missing ones, and the findings that they explain.

    Each copied file comes with its effect. Files may be equal on purpose. A copy from another stage is wrong
    if the tensors of the file's own stage are missing.
    """
    missing = [f for f in findings if f.severity == "error" and f.is_a("missing_tensor") and f.tensor]
    suspects: dict[str, Finding] = {}
    for finding in differing:
        is_copy = codes.CODES[finding.code].check == "copies" and finding.severity != "note"
        if is_copy and finding.file and len(finding.files) == 1:
            suspects.setdefault(finding.file, finding)
    if not missing or not suspects:
        return [], set()
    # As an error about a whole file each: what the file should hold is what its rank lacks.
    lost = {
        Finding.of(codes.DUPLICATED_SHARD, finding.message, file=file, coords=finding.coords): finding
        for file, finding in suspects.items()
    }
    causes = explain(list(lost))
    effects: dict[Finding, list[Finding]] = {}
    for finding in missing:
        cause = causes.of(finding)
        if cause is not None:
            effects.setdefault(cause, []).append(finding)
    copied = []
    for cause, explained in effects.items():
        effect = effect_on(sorted({f.tensor for f in explained if f.tensor}), None)
        finding = lost[cause]
        copied.append(
            finding.replace(
                code=codes.DUPLICATED_SHARD,
                severity="error",
                decided=None,
                tensor=None,
                effect=effect,
                help="copy the file again from the node that wrote it: tensors of this rank are missing",
            )
        )
    return copied, {finding for explained in effects.values() for finding in explained}
