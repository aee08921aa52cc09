"""Pieces of a checkpoint that are not here, and how to get them from the hosts that have them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from .errors import Finding
from .options import StrPath

__all__ = ["absent", "commands", "told"]

#: Files named of each rank.
_NAMED = 3


def absent(findings: Iterable[Finding], roots: Sequence[StrPath]) -> dict[str, list[str]]:
    """Files that findings (``FS101``) miss and that are in none of the roots, by the rank that wrote them."""
    missing: dict[str, list[str]] = {}
    for finding in findings:
        if finding.code != "FS101" or finding.severity != "error" or not finding.file:
            continue
        # Links that lead nowhere are there, and to be mended here.
        if not any(os.path.lexists(Path(root) / finding.file) for root in roots):
            missing.setdefault(finding.rank or "", []).append(finding.file)
    return missing


def commands(root: StrPath) -> tuple[str, str]:
    """What brings the pieces of another host (``HOST``) to this one, and what makes a result of all without that."""
    path = Path(root).absolute()
    folder = shlex.quote(str(path if path.is_dir() else path.parent))
    # What is here already stays as it is.
    return (
        f"rsync -a --ignore-existing HOST:{folder}/ {folder}/",
        f"fastshard merge {folder} OUT --node-local --rank I --world N",
    )


def told(missing: dict[str, list[str]], root: StrPath) -> str:
    """The same for people."""
    count = sum(map(len, missing.values()))
    lines = ["1 file of it is not here:" if count == 1 else f"{count} files of it are not here:"]
    for rank, files in sorted(missing.items()):
        more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
        lines.append(f"  {rank or 'of any rank'}: {', '.join(files[:_NAMED])}{more}")
    copy, spread = commands(root)
    lines += [
        "if they lie on other hosts' disks, bring them here from each of these hosts:",
        f"  {copy}",
        "or make the result where they are, with OUT on storage that all see: on host I of N",
        f"  {spread}",
    ]
    return "\n".join(lines)
