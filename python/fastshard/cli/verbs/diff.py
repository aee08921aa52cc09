"""``fastshard diff``: two checkpoints, tensor by tensor."""

from __future__ import annotations

import argparse

from ...common import codes
from ...common.formatting import counted
from ...common.gate import Gate
from ...verification.diff import Difference, Differences
from ...verification.diff import diff as diff_checkpoints
from ..render import table
from ..shared_arguments import add_choosing, add_common, add_exit_zero, add_opening, opening, progress
from ..verb import Outcome, Result, Verb

#: Maximum number of differences to show without ``-v``.
_SHOWN = 20
_KINDS = {"only_a": "only in A", "only_b": "only in B"}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="the first checkpoint, in any format")
    parser.add_argument("b", metavar="B", help="the second checkpoint, in any format")
    group = parser.add_argument_group("tolerance")
    group.add_argument(
        "--atol",
        type=float,
        default=0.0,
        metavar="X",
        help="elements are close if |A-B| <= X + Y * |B| (default: 0)",
    )
    group.add_argument("--rtol", type=float, default=0.0, metavar="Y", help="see --atol (default: 0)")
    group.add_argument("--ignore-dtype", action="store_true", help="compare values where dtypes differ")
    add_opening(parser)
    add_choosing(parser)
    add_common(parser)
    add_exit_zero(parser)


def _run(a: argparse.Namespace) -> Outcome:
    differences = diff_checkpoints(
        a.a,
        a.b,
        include=a.include,
        exclude=a.exclude,
        memory=a.memory,
        progress=progress(a),
        atol=a.atol,
        rtol=a.rtol,
        ignore_dtype=a.ignore_dtype,
        **opening(a),
    )
    document = {
        "equal": not differences,
        "compared": differences.compared,
        "close": len(differences.close),
        "differences": [d.to_dict() for d in differences],
    }
    decided = [f for f in differences.findings if f.decided is not None]
    gate = Gate.of(a.fail_on, a.error, a.ignore)
    result = Result(
        _table(differences, a.verbose),
        document,
        reason=_reason(differences),
        word="DIFFERENT" if differences else "EQUAL",
        tells=frozenset({codes.DIFFERENT}),
    )
    return result, gate.evaluate([*(d.to_finding() for d in differences), *decided])


def _reason(differences: Differences) -> str:
    of = f"of {counted(differences.compared, 'tensor')}"
    close = f"{len(differences.close)} {of} within the tolerance"
    if differences:
        return ", ".join([f"{len(differences)} {of}", *([close] if differences.close else [])])
    if not differences.close:
        return "every tensor has the same bytes"
    return close if len(differences.close) == differences.compared else f"{close}, the others byte for byte"


def _table(differences: Differences, verbose: int) -> str:
    """Format a row for each difference, the largest first.

    Lines below a row report values that are zero or not numbers on one side only.
    """
    if not differences:
        return ""
    ordered = sorted(differences, key=lambda d: (d.kind in ("values", "dtype"), -(d.relative or d.largest)))
    shown = ordered if verbose else ordered[:_SHOWN]
    rows = [("TENSOR", "WHAT", "CHANGED", "MAX DIFF", "REL DIFF", "COSINE"), *map(_row, shown)]
    lines = table(rows, indent="", drop=("COSINE", "CHANGED", "REL DIFF")).splitlines()
    zeros = [[f"  {note}" for note in (d.not_numbers, d.zeros) if note] for d in shown]
    below = [line for row, more in zip(lines[1:], zeros, strict=True) for line in (row, *more)]
    left = len(ordered) - len(shown)
    return "\n".join([lines[0], *below, *([f"... and {left} more (-v)"] if left else [])])


def _row(d: Difference) -> tuple[str, ...]:
    what = _KINDS.get(d.kind, f"{d.kind} {d.a} / {d.b}" if d.a else d.kind)
    if d.kind not in ("values", "dtype"):
        return (d.tensor, what, "", "", "", "")
    count = d.a_stats.count if d.a_stats else 0
    share = _share(d.differing, count) if count else ""
    if d.not_numbers:
        # Of these no distance says anything.
        return (d.tensor, what, share, "nan", "nan", "nan")
    return (d.tensor, what, share, f"{d.largest:.3g}", _figure(d.relative), _figure(d.cosine))


def _share(differing: int, count: int) -> str:
    """Format the share of elements that differ; only exact values become 0% and 100%."""
    if 0 < differing < count / 2000:
        return "< 0.1%"
    return "> 99.9%" if count * (1 - 1 / 2000) <= differing < count else f"{differing / count:.1%}"


def _figure(x: float | None) -> str:
    return "-" if x is None else f"{x:.3g}"


DIFF = Verb(
    name="diff",
    help="compare two checkpoints, across formats and shardings",
    description="""\
        Compares two checkpoints tensor by tensor, across formats and shardings. CHANGED is the share of
        elements that differ, MAX DIFF the largest |A-B|, and REL DIFF |A-B| / |A|, by the norms of the
        full tensors. With --atol or --rtol, tensors within the tolerance do not count as different, so the
        command can check recomputed weights.""",
    arguments=_arguments,
    run=_run,
    silent=True,
    finds=True,
    often=("--atol", "--rtol", "--ignore-dtype", "--include", "--exclude", "--json"),
    examples=("fastshard diff run merged", "fastshard diff merged merged_bf16 --ignore-dtype --rtol 0.01"),
)
