"""What the commands print: results on stdout, findings on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import Finding

#: Findings of one code printed before the rest is counted.
_SHOWN = 20


def human(n: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def print_json(document: dict[str, Any]) -> None:
    """The one object of ``--json``."""
    json.dump(document, sys.stdout, indent=2, ensure_ascii=True)
    sys.stdout.write("\n")


def print_findings(findings: Iterable[Finding], *, verbose: int = 0, quiet: int = 0) -> None:
    """One line per finding and one ``help:`` line, on stderr, errors first."""
    shown: dict[str, int] = {}
    hidden: dict[str, int] = {}
    helped: set[str] = set()
    order = {"error": 0, "warning": 1, "note": 2}
    for finding in sorted(findings, key=lambda f: order.get(f.severity, 3)):
        if (finding.severity == "note" and not verbose) or (quiet and finding.severity != "error"):
            continue
        shown[finding.code] = shown.get(finding.code, 0) + 1
        if shown[finding.code] > _SHOWN and not verbose:
            hidden[finding.code] = hidden.get(finding.code, 0) + 1
            continue
        print(f"{finding.severity} {finding.code}: {finding}", file=sys.stderr)
        if finding.help and (finding.severity == "error" or verbose) and finding.help not in helped:
            helped.add(finding.help)
            print(f"  help: {printable(finding.help)}", file=sys.stderr)
    for code, count in hidden.items():
        print(f"... and {count} more of {code} (-v shows all)", file=sys.stderr)


def printable(text: str, keep: str = "") -> str:
    """Text that cannot drive a terminal: control and direction characters, and bytes that are no text, escaped."""
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )


def table(rows: Sequence[tuple[str, ...]], indent: str = "  ") -> str:
    """Columns padded to their widest cell."""
    rows = [tuple(printable(cell) for cell in row) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return "\n".join(
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
