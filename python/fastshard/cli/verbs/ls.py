"""``fastshard ls``: the tensors of a checkpoint, one by one, as a tree, or in groups."""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...checkpoint.planning import make_plan
from ...checkpoint.promised import with_promised
from ...checkpoint.tensor_rows import TensorRow, matching, rows_of
from ...common import codes
from ...common.errors import FastshardError
from ...common.formatting import counted
from ...models.tensor_roles import order_in_layer, order_of
from ..render import Tree, human, table, tree
from ..shared_arguments import add_common, add_exit_zero, add_opening
from ..shared_arguments import opened as opened_at
from ..verb import Outcome, Result, Verb

#: Maximum depth of the tree; names have only a few parts.
_DEPTH = 63
#: Sort keys for rows; without one, rows keep the order of the files.
_ORDERS: dict[str, Callable[[TensorRow], Any]] = {
    "model": lambda row: (order_of(row.name), order_in_layer(row.name)),
    "name": lambda row: row.name,
    "size": lambda row: -row.nbytes,
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ckpt",
        nargs="+",
        metavar="CKPT",
        help="checkpoint directory or file; pass several for the parts of one checkpoint",
    )
    parser.add_argument(
        "--glob",
        action="append",
        default=[],
        metavar="GLOB",
        help="tensors whose names match; the last argument needs no flag if no file has that name",
    )
    group = parser.add_argument_group("selection and display")
    group.add_argument(
        "--dtype", action="append", default=[], metavar="DTYPE", help="tensors of this dtype, e.g. BF16"
    )
    group.add_argument(
        "--layer", type=int, action="append", default=[], metavar="N", help="tensors of this layer"
    )
    group.add_argument("--larger-than", metavar="SIZE", help="tensors larger than this, e.g. 1GiB")
    group.add_argument(
        "--sort",
        choices=("model", "file", "name", "size"),
        default="model",
        help="order (default: model: embeddings first, then layers by number, each in the order of "
        "computation)",
    )
    group.add_argument("--offset", type=int, default=0, metavar="N", help="skip the first N")
    group.add_argument("--limit", type=int, metavar="N", help="show at most N")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--tree", action="store_true", help="show a tree; equal branches are merged")
    form.add_argument(
        "--csv",
        action="store_true",
        help="write CSV for a spreadsheet: name, dtype, shape, elements, bytes, ...",
    )
    form.add_argument(
        "--by", choices=("role", "layer", "dtype"), help="show the count and bytes of each group"
    )
    group.add_argument("--no-pager", action="store_true", help="do not use a pager")
    add_opening(parser)
    add_common(parser, run=False)
    add_exit_zero(parser)


def _run(a: argparse.Namespace) -> Outcome:
    globs = list(a.glob)
    if len(a.ckpt) > 1 and not Path(a.ckpt[-1]).exists():
        globs.append(a.ckpt.pop())
    if a.offset < 0 or (a.limit is not None and a.limit < 0):
        raise FastshardError.of(codes.USAGE, "--offset, --limit", expected="0 or more")
    plan = make_plan(with_promised(opened_at(a).opened, only_kept=True))
    all_rows = rows_of(plan)
    rows = matching(all_rows, globs, a.dtype, a.layer, a.larger_than)
    if a.sort in _ORDERS:
        rows.sort(key=_ORDERS[a.sort])
    document: dict[str, Any] = {
        "tensors": len(rows),
        "parameters": sum(r.elements for r in rows),
        "bytes": sum(r.nbytes for r in rows),
    }
    chosen = "" if len(rows) == len(all_rows) else f"{len(rows):,} of "
    total = (
        f"{chosen}{counted(len(all_rows), 'tensor')}, {document['parameters']:,} parameters, "
        f"{human(document['bytes'])}"
    )
    if a.by:
        groups = _groups(rows, a.by)
        shown: list[Any] = groups[a.offset : None if a.limit is None else a.offset + a.limit]
        document |= {"by": a.by, "groups": shown}
        text = _group_table(shown, a.by)
        of = len(groups)
    else:
        page = rows[a.offset : None if a.limit is None else a.offset + a.limit]
        document["outputs"] = [{**r.to_dict(), "layer": r.layer, "role": r.role} for r in page]
        shown, of = page, len(rows)
        if a.csv:
            return Result(_format_csv(page), document, product=True), plan.findings
        if a.tree:
            text = tree(("", _tree(page))).lstrip("\n")
        else:
            text = _table(page)
    left = of - len(shown)
    if left:
        last = a.offset + len(shown)
        total += f"; showing {a.offset + 1} to {last} of {of:,}" if shown else "; none shown"
        if last < of:
            total += f" (continue with --offset {last})"
    return Result(
        "\n".join(part for part in (text, total) if part), document, paged=not a.no_pager
    ), plan.findings


def _table(rows: Sequence[TensorRow]) -> str:
    """Format a line for each tensor, under a header.

    The table has the number of shards if a tensor has several.
    """
    header = ["TENSOR", "DTYPE", "SHAPE", "SIZE"]
    cells = [[row.name, row.dtype, str(list(row.shape)), human(row.nbytes)] for row in rows]
    if any(row.pieces != 1 for row in rows):
        header.append("SHARDS")
        for row, line in zip(rows, cells, strict=True):
            line.append(str(row.pieces))
    if any(row.weight is not None for row in rows):
        header.append("VALUES")
        for row, line in zip(rows, cells, strict=True):
            line.append("" if row.weight is None else str(row.weight))
    return table(
        list(map(tuple, (header, *cells))),
        indent="",
        right=("SIZE", "SHARDS"),
        drop=("SHARDS", "SIZE", "DTYPE"),
    )


def _format_csv(rows: Sequence[TensorRow]) -> str:
    """Format a comma-separated line for each tensor, under a header."""
    import csv

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("name", "dtype", "shape", "elements", "bytes", "shards", "layer", "role"))
    for row in rows:
        shape = "x".join(map(str, row.shape))
        writer.writerow(
            (row.name, row.dtype, shape, row.elements, row.nbytes, row.pieces, row.layer, row.role)
        )
    return text.getvalue().rstrip("\n")


def _group_table(groups: Sequence[Mapping[str, Any]], by: str) -> str:
    """Format a line for each group, under a header."""
    header = (by.upper(), "TENSORS", "PARAMETERS", "SIZE", "SHARE", "DTYPE")
    cells = [
        (
            str(g["group"]),
            f"{g['tensors']:,}",
            f"{g['parameters']:,}",
            human(g["bytes"]),
            f"{g['share']:.1%}",
            ", ".join(g["dtypes"]),
        )
        for g in groups
    ]
    return table([header, *cells], indent="", right=header[1:5])


def _groups(rows: Iterable[TensorRow], by: str) -> list[dict[str, Any]]:
    """Compute counts and bytes of each group: layers by number, others by size."""
    key: Callable[[TensorRow], Any] = {
        "role": lambda row: row.role,
        "layer": lambda row: row.layer,
        "dtype": lambda row: row.dtype,
    }[by]
    groups: dict[Any, list[TensorRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    whole = sum(row.nbytes for members in groups.values() for row in members)
    totals = [
        {
            "group": "none" if name is None else name,
            "tensors": len(members),
            "parameters": sum(row.elements for row in members),
            "bytes": (size := sum(row.nbytes for row in members)),
            "share": size / whole if whole else 0.0,
            "dtypes": sorted({row.dtype for row in members}),
        }
        for name, members in groups.items()
    ]
    if by == "layer":
        return sorted(totals, key=lambda group: -1 if group["group"] == "none" else group["group"])
    return sorted(totals, key=lambda group: -group["bytes"])


class _Node:
    """A part of a name, and the parts below it."""

    def __init__(self) -> None:
        self.below: dict[str, _Node] = {}
        self.row: TensorRow | None = None

    def add(self, parts: list[str], row: TensorRow) -> None:
        node = self
        for part in parts:
            node = node.below.setdefault(part, _Node())
        node.row = row


def _tree(rows: Iterable[TensorRow]) -> tuple[Tree, ...]:
    """Build a tree of names from their dots.

    Numbered branches of the same form are merged, with their numbers.
    """
    root = _Node()
    for row in rows:
        root.add(row.name.split(".", _DEPTH), row)
    return _branches(root)


def _branches(node: _Node) -> tuple[Tree, ...]:
    built: dict[tuple[str, tuple[Tree, ...], str | None], list[int]] = {}
    for name, inner in node.below.items():
        while inner.row is None and len(inner.below) == 1:
            ((more, inner),) = inner.below.items()
            name = f"{name}.{more}"
        leaf = "" if inner.row is None else f"  {inner.row.dtype} {list(inner.row.shape)}"
        first, dot, rest = name.partition(".")
        # Of what is no number by itself each is its own.
        numbered = re.fullmatch("0|[1-9][0-9]{0,17}", first) is not None
        build = (f"{dot}{rest}{leaf}", _branches(inner), None if numbered else first)
        numbers = built.setdefault(build, [])
        if numbered:
            numbers.append(int(first))
    return tuple(
        (f"{_numbers(numbers) if first is None else first}{rest}", branches)
        for (rest, branches, first), numbers in built.items()
    )


def _numbers(numbers: list[int]) -> str:
    """Format numbers, e.g. ``[0 to 4, 6 to 11]``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    return words[0] if len(numbers) == 1 else f"[{', '.join(words)}]"


LS = Verb(
    name="ls",
    help="list the tensors as a tree, or by role, layer or dtype",
    description="""\
        Lists the full tensors that merge would write; reads headers only. Layers and roles come from the
        tensor names, with the framework's own numbers (in GPT-NeoX's pipeline files layer 2 is first).""",
    arguments=_arguments,
    run=_run,
    often=("--glob", "--layer", "--dtype", "--sort", "--tree", "--csv", "--by", "--json"),
    examples=(
        "fastshard ls run --tree",
        "fastshard ls model --by role",
        "fastshard ls model --csv > tensors.csv",
    ),
)
