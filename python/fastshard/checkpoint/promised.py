"""What the installed transformers says that the config of an opened checkpoint promises, where no layout table tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.errors import FastshardError, Finding
from .drafting import Merged, Opened, Promised

if TYPE_CHECKING:
    from ..layouts.declaration import Source
    from ..targets.request import Request

__all__ = ["beside_list", "judged", "with_promised"]

#: Memory that building a model takes, most of it the import of torch and transformers.
_NEEDED = 1 << 30


_MISSING = ("FS102", "FS103")


def with_promised(opened: Opened) -> Opened:
    """The opened checkpoint with the list of what its config promises, where that is asked for and nothing says more."""
    if not _is_wanted(opened):
        return opened
    from ..expected.from_transformers import list_for

    config, file = opened.source.model.config or {}, opened.source.model.config_file
    if (free := _available()) is not None and free < _NEEDED:
        return replace(
            opened, promised=Promised(None, "transformers was not asked: less than 1 GiB of memory is free")
        )
    try:
        listed = list_for(config, str(file or "config.json"))
    except FastshardError as error:
        return replace(opened, promised=Promised(None, error.findings[0].message))
    return replace(opened, promised=Promised(listed))


def _is_wanted(opened: Opened) -> bool:
    """True for a whole model of Hugging Face whose config names a class and no table tells of it."""
    source, model = opened.source, opened.source.model
    config = model.config or {}
    return (
        opened.asks_transformers
        and opened.promised is None
        and opened.reference is None
        and source.layout is None
        and not model.is_part
        and bool(model.hf_names or model.no_table)
        and bool(config.get("architectures"))
        and isinstance(config.get("model_type"), str)
        and not any(config.get(key) for key in ("quantization_config", "compression_config"))
    )


def _available() -> int | None:
    """Bytes of memory that the system has left; None where it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


def judged(
    opened: Opened, source: Source, request: Request, merged: Merged, named: list[str | None]
) -> list[Finding]:
    """What differs from the list, under the names on disk or those in memory; and, where nothing does, that it was compared.

    An unexpected tensor is a warning: a loader ignores it. Names that are none of the class's prove nothing.
    """
    from ..expected.from_transformers import complaints, roster_of
    from ..expected.reference import Reference
    from .reference_sides import compared

    listed = None if opened.promised is None else opened.promised.listed
    if listed is None or request.is_narrowed:
        return []
    called = f"{listed.model_class} of transformers {listed.transformers}"
    best: list[Finding] | None = None
    for in_memory in (False, True):
        roster = roster_of(listed, in_memory)
        reference = Reference(
            called, roster, opened.source.model.config, opened.source.model.config_file, listed=listed
        )
        told = [
            _softened(f)
            for f in compared(replace(opened, reference=reference), reference, request, merged, named)
        ]
        if best is None or _weight(told) < _weight(best):
            best = told
        if not any(f.severity == "error" for f in told):
            proven = _proven(called, len(roster), "by their names in memory" if in_memory else "")
            return [*(f for f in told if f.code != "FS109"), proven]
    assert best is not None
    # A load knows more spellings than the list, those of earlier versions among them: an error is what it misses, too.
    config = opened.source.model.config or {}
    stored = [(name, kind, whole) for name, kind, _, _, whole, _ in merged.draft.tensors()]
    missed = complaints(config, str(opened.source.model.config_file or "config.json"), stored)
    if missed == []:
        return [_proven(called, len(stored), "as from_pretrained reads their names")]
    if missed is None:
        return [f.replace(severity="warning") if f.severity == "error" else f for f in best]
    # Of other names than the class has it says nothing.
    return [] if any(f.code == "FS207" and f.severity == "error" for f in best) else best


def _proven(called: str, count: int, spelling: str = "") -> Finding:
    return Finding.of(
        "FS109",
        f"checked against {called}: {count:,} tensors" + (f", {spelling}" if spelling else ""),
        severity="note",
        file="config.json",
        evidence=f"{called} ({count:,} tensors)",
    )


def _weight(findings: list[Finding]) -> int:
    return sum(f.severity == "error" for f in findings)


def _softened(finding: Finding) -> Finding:
    """An unexpected tensor as a warning; names that are all others stay what they are."""
    if finding.code == "FS207" and finding.severity == "error" and finding.expected is None:
        return finding.replace(severity="warning")
    return finding


def beside_list(seen: list[Finding], by_list: list[Finding]) -> list[Finding]:
    """What a model's own layers say, where a list speaks that knows more.

    What the list finds missing is not told twice. An error that it does not share is a warning.
    """
    if not by_list:
        return seen
    missing = any(f.severity == "error" and f.code in _MISSING for f in by_list)
    kept = [f for f in seen if not (missing and f.code in _MISSING)]
    return [f.replace(severity="warning") if f.severity == "error" else f for f in kept]
