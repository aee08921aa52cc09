"""Copies that the user declares intentional. They become warnings, which the manifest records."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from ..common import codes
from ..common.errors import Finding


def patterns(accept: Iterable[str]) -> list[str]:
    """Return the glob patterns of files that ``copies`` and ``copies=GLOB`` accept."""
    entries = [what.partition("=") for what in sorted(accept)]
    return [glob if is_given else "*" for word, is_given, glob in entries if word == "copies"]


def accepted(findings: list[Finding], globs: Sequence[str]) -> list[Finding]:
    """Return the findings, with those of accepted copies as warnings."""
    return [_accepted(finding, globs) for finding in findings]


def _accepted(finding: Finding, globs: Sequence[str]) -> Finding:
    by = next((glob for glob in globs if fnmatch.fnmatchcase(finding.file or "", glob)), None)
    if finding.code != codes.DUPLICATED_SHARD or by is None:
        return finding
    decided = "accept copies" if by == "*" else f"accept copies={by}"
    return finding.replace(severity="warning", help=None, decided=decided)
