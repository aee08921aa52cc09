"""Output of the commands: results on stdout, findings on stderr."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from ..common import codes
from ..common.formatting import human, printable
from ..common.gate import ignored
from . import finding_text
from .styles import Paint, plain

if TYPE_CHECKING:
    from typing import TextIO

    from ..common.errors import Finding

__all__ = [
    "Tree",
    "alike",
    "encodable",
    "fields",
    "human",
    "print_findings",
    "printable",
    "shown",
    "table",
    "tree",
]

#: Maximum width of a line of a finding, in columns.
_WIDEST = 100
#: Findings with the same message.
Group = list["Finding"]
#: Maximum number of groups of one code to print; the others are counted.
_SHOWN = 20


def shown(
    findings: Iterable[Finding], *, verbose: int = 0, quiet: int = 0
) -> tuple[list[Finding], dict[str, int]]:
    """Return the findings to print, errors first, and the number of hidden ones by code."""
    chosen = _for_people(findings, verbose, quiet)
    if verbose:
        return chosen, {}
    groups, hidden = _first([finding] for finding in chosen)
    return [finding for (finding,) in groups], hidden


def print_findings(
    findings: Collection[Finding],
    *,
    verbose: int = 0,
    quiet: int = 0,
    file: TextIO | None = None,
    paint: Paint = plain,
) -> None:
    """Print findings, errors first, on ``file`` or stderr; print shared advice only once."""
    if not findings:
        return
    file = file or sys.stderr
    # Where there is no terminal, as in a log, lines are as wide as most are.
    width = min(_columns(), _WIDEST)
    helped: set[object] = set()
    groups = alike(_for_people(findings, verbose, quiet))
    hidden: dict[str, int] = {}
    if not verbose:
        groups, hidden = _first(groups)
    for group in groups:
        help_ = finding_text.help_of(group[0]), group[0].run
        helps = help_ not in helped
        helped.add(help_)
        wraps = file.isatty() and not quiet
        text = finding_text.lines(group, verbose=verbose, helps=helps, width=width, wraps=wraps, paint=paint)
        print("\n".join(text[:1] if quiet else text), file=file)
    for code, count in hidden.items():
        print(f"... and {count} more of {code} (-v shows all)", file=file)
    aside = Counter(f.code for f in findings if ignored(f))
    if aside and not (verbose or quiet):
        counts = ", ".join(f"{count} of {code}" for code, count in aside.items())
        print(f"ignored as requested: {counts} (-v shows them)", file=file)


def _for_people(findings: Iterable[Finding], verbose: int, quiet: int) -> list[Finding]:
    """Select findings to print, errors first.

    Notes and ignored findings are printed only with -v. If a step has errors, a note about other steps is
    printed too.
    """
    findings = list(findings)
    is_broken = any(f.severity == "error" for f in findings)
    order = {"error": 0, "warning": 1, "note": 2}
    return [
        f
        for f in sorted(findings, key=lambda f: order.get(f.severity, 3))
        if not (quiet and f.severity != "error")
        and (
            verbose or (is_broken and f.code == codes.STEP_TAKEN) or not (f.severity == "note" or ignored(f))
        )
    ]


def _first(groups: Iterable[Group]) -> tuple[list[Group], dict[str, int]]:
    """Return the first groups of each code, and the number of findings in the others by code."""
    chosen: list[Group] = []
    counts: Counter[str] = Counter()
    hidden: Counter[str] = Counter()
    for group in groups:
        code = group[0].code
        counts[code] += 1
        if counts[code] <= _SHOWN:
            chosen.append(group)
        else:
            hidden[code] += len(group)
    return chosen, hidden


def alike(findings: Iterable[Finding]) -> Iterable[Group]:
    """Group findings with the same message about different tensors; others are groups of one."""
    found: dict[object, list[Finding]] = {}
    for finding in findings:
        key = (finding.code, finding.severity, finding.message, finding.decided, finding.advice)
        found.setdefault(key if finding.tensor else finding, []).append(finding)
    return found.values()


def table(
    rows: Sequence[tuple[str, ...]],
    indent: str = "  ",
    right: Collection[str] = (),
    drop: Sequence[str] = (),
) -> str:
    """Pad columns to their widest cell.

    Args:
        rows: the cells, of the header first.
        indent: text before each row.
        right: headers of right-aligned columns.
        drop: headers of columns to omit if the terminal is too narrow, in this order.
    """
    rows = [tuple(printable(cell) for cell in row) for row in rows]
    if not rows:
        return ""
    if drop and sys.stdout.isatty():
        rows = _fit_columns(rows, _columns() - len(indent), drop)
    widths = _column_widths(rows)
    pads = [str.rjust if title in right else str.ljust for title in rows[0]]
    return "\n".join(
        indent
        + "  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)).rstrip()
        for row in rows
    )


def _column_widths(rows: Sequence[tuple[str, ...]]) -> list[int]:
    return [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]


def _fit_columns(
    rows: Sequence[tuple[str, ...]], width: int, drop: Sequence[str]
) -> Sequence[tuple[str, ...]]:
    """Omit columns until the rows fit into a width, or no more columns may be omitted."""
    for title in drop:
        widths = _column_widths(rows)
        if sum(widths) + 2 * (len(widths) - 1) <= width:
            break
        if title in rows[0]:
            at = rows[0].index(title)
            rows = [row[:at] + row[at + 1 :] for row in rows]
    return rows


def _columns() -> int:
    """Return the width of the terminal in columns; 80 without one."""
    import shutil

    return shutil.get_terminal_size().columns


def fields(rows: Sequence[tuple[str, str]]) -> str:
    """Format values after their names; in a terminal, long values wrap."""
    if not sys.stdout.isatty():
        return table(rows, indent="")
    label = max((len(name) for name, _ in rows), default=0) + 2
    width = max(_columns(), 2 * label)
    return "\n".join(
        textwrap.fill(
            printable(value),
            width,
            initial_indent=name.ljust(label),
            subsequent_indent=" " * label,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, value in rows
    )


#: A line, and its children.
Tree = tuple[str, "Sequence[Tree]"]


def tree(root: Tree, *, wraps: bool = False) -> str:
    """Format a tree as lines, in ASCII if the terminal's encoding requires it.

    If ``wraps`` is true, lines wider than the terminal are wrapped between words.
    """
    joint, last, through = ("├─ ", "└─ ", "│  ") if encodable("├└│") else ("|- ", "`- ", "|  ")
    width = _columns()
    lines: list[str] = []

    def add(line: str, before: str, after: str) -> None:
        line = before + printable(line)
        if not wraps or len(line) <= width:
            lines.append(line)
            return
        words = textwrap.wrap(
            line, width, subsequent_indent=after, break_long_words=False, break_on_hyphens=False
        )
        lines.extend(words)

    def below(branches: Sequence[Tree], indent: str) -> None:
        for number, (line, inner) in enumerate(branches, 1):
            ends = number == len(branches)
            under = indent + ("   " if ends else through)
            add(line, indent + (last if ends else joint), under + (through if inner else "   "))
            below(inner, under)

    add(root[0], "", through if root[1] else "   ")
    below(root[1], "")
    return "\n".join(lines)


def encodable(text: str) -> bool:
    """Return True if stdout's encoding has these characters."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except (UnicodeError, LookupError):
        return False
    return True
