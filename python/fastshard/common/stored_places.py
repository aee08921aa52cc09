"""Local paths of placeholders for stores, and the addresses that they represent."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from .._core import Finding

__all__ = ["is_stored", "record_place", "show_findings", "show_text"]

#: Addresses, by the local paths that represent them.
_ADDRESSES: dict[str, str] = {}


def record_place(path: Path, address: str) -> None:
    """Record that a path, with everything below it, represents an address."""
    _ADDRESSES[os.fspath(path)] = address
    _compile_paths.cache_clear()


def is_stored(path: str | os.PathLike[str]) -> bool:
    """Return True for a path that represents a file or a folder of a store."""
    return bool(_ADDRESSES) and any(os.fspath(one) in _ADDRESSES for one in (Path(path), *Path(path).parents))


def show_text(text: str) -> str:
    """Replace the paths of placeholders in a text by the addresses that they represent."""
    return _compile_paths().sub(lambda match: _ADDRESSES[match[0]], text) if _ADDRESSES else text


@functools.cache
def _compile_paths() -> re.Pattern[str]:
    """Compile the pattern of all paths, the longest first, because a process may open very many stores."""
    return re.compile("|".join(map(re.escape, sorted(_ADDRESSES, key=len, reverse=True))))


def show_findings(findings: list[Finding]) -> list[Finding]:
    """Replace the paths of placeholders in findings by the addresses of their stores."""
    if not _ADDRESSES:
        return findings

    def show(text: str | None) -> str | None:
        return text and show_text(text)

    return [
        finding.replace(
            message=show_text(finding.message),
            file=show(finding.file),
            expected=show(finding.expected),
            got=show(finding.got),
            help=show(finding.help),
            run=[show_text(line) for line in finding.run],
        )
        for finding in findings
    ]
