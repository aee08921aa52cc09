"""The completeness grid: which parts of tensors each rank has, and which are missing, damaged or copied.

The grid is derived from the declarations of the sources and from findings, so that a cell never states more
than a finding. Similar rows form one band, and a column may stand for a complete layer; a band or a column
shows its worst state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from ..checkpoint.checkpoint import Checkpoint
from ..common import codes
from ..common.errors import Finding
from ..common.listing import store_of
from ..common.ranks import Rank, is_within
from ..common.records import dataclass
from ..common.regex import compile_when_used
from ..models.tensor_roles import layer_of, place_of
from .grid_bands import cells_of, columns_of, fewer, joined_band, nowhere_last, order_of, problems_of
from .grid_cells import (
    COPIED,
    DAMAGED,
    DOUBTFUL,
    FILE,
    MISFIT,
    MISSING,
    NOWHERE,
    OPTIMIZER,
    OTHER,
    STATES,
    UNEXPECTED,
    WHOLE,
    Band,
    Cell,
    Column,
    Key,
    Problem,
    Row,
    State,
)
from .grid_order import in_order

__all__ = ["STATES", "Band", "Cell", "Column", "Grid", "Problem", "State", "banded", "grid", "state_of"]


#: The part of a stored name that identifies the chunk of the tensor. source: DCP records as they are named
#: here, zarr 3, zarr 2
_CHUNK = compile_when_used(r"(?:\[[0-9,]*\]|/c(?:/[0-9/]+)?|/[0-9]+(?:\.[0-9]+)*)$")
_DIGITS = compile_when_used(r"[0-9]+")

#: The axis of the layers.
_LAYERS = "L"
#: Maximum number of layers to show; no model has more.
_MOST_LAYERS = 1 << 14
#: Dimensions in which ranks with the same tensors differ.
_TENSOR_DIMENSIONS = frozenset({"tp", "mp"})


@dataclass(frozen=True)
class Grid:
    """The grid: a row for each rank (or file), a column for each tensor (or layer)."""

    columns: tuple[Column, ...]
    bands: tuple[Band, ...]
    #: Total number of rows.
    rows: int
    #: Number of rows that are ranks; the others are files that belong to no rank.
    ranks: int
    problems: tuple[Problem, ...]
    #: True if the core does not name all missing tensors because there are too many; similar ranks then show
    #: the rest.
    inferred: bool = False
    #: The noun for what a cell counts.
    word: str = "tensor"

    @property
    def states(self) -> list[int]:
        """The states that occur."""
        return sorted({cell.state for band in self.bands for cell in band.cells if cell})


def grid(checkpoint: Checkpoint, findings: Iterable[Finding], echoes: Iterable[Finding] = ()) -> Grid:
    """Make the grid of an open checkpoint.

    Args:
        checkpoint: the checkpoint.
        findings: all its findings.
        echoes: findings of the core about tensors whose file is the cause. The page does not repeat them, but
            they fill the cells of that file.
    """
    return _Filling(checkpoint).place_findings(list(findings), list(echoes))


class _Filling:
    """The rows while they are filled."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.rows: dict[str, Row] = {}
        #: Rows by file.
        self.row_of: dict[str, str] = {}
        #: Files with tensors of the model, by path: their columns, with the number of tensors in each.
        self.tensors_of: dict[str, Counter[Key]] = {}
        source, catalog = checkpoint.opened.source, checkpoint.opened.catalog
        readable = checkpoint._files
        paths = [file.path for file in checkpoint.opened.files]
        state_files = {paths[s.file] for s in source.optimizer.state_files} | source.optimizer.files
        # Ranks hold tensors of the same names.
        counted: dict[tuple[object, ...], Counter[Key]] = {}
        units = {unit.file for unit in source.files.units}
        for unit in source.files.units:
            path = paths[unit.file]
            row = self._row(unit.rank or path, path)
            row.rank = {**unit.coords, **source.files.ranks.get(unit.file, {})} if unit.rank else {}
            if readable[unit.file] is None:
                continue
            names = tuple(catalog.names(unit.file))
            how = (
                names,
                tuple(unit.under),
                unit.strip,
                unit.prefix,
                unit.bases.get("L", 0),
                tuple(unit.only or ()),
            )
            if how not in counted:
                under = "".join(f"{key}." for key in unit.under)
                only = None if unit.only is None else set(unit.only)
                kept = (name[len(under) :] for name in names if name.startswith(under))
                counted[how] = Counter(
                    self._key(unit.prefix + name.removeprefix(unit.strip), unit.bases.get("L", 0))
                    for name in kept
                    if only is None or name in only
                )
            self._put(row, path, counted[how])
        assembled = bool(source.files.assembled) and not source.files.units
        #: Tensors of which optimizer-state files contain a range.
        partitions: dict[int, list[Key]] = {}
        for group in source.files.assembled:
            if group.slot is None and not assembled:
                for name, _, pieces in group.tensors:
                    # A range is (elements, file, ...), a box (first index, extent, file, ...).
                    for file in {piece[1] if isinstance(piece[1], int) else piece[2] for piece in pieces}:
                        partitions.setdefault(file, []).append(self._key(name))
        for index, path in enumerate(paths):
            if index in units:
                continue
            row = self._row(store_of(path) or path, path)
            if readable[index] is None:
                continue
            if path in state_files:
                self._put(row, path, Counter(partitions.get(index) or [OPTIMIZER]))
            elif source.files.units and not assembled:
                self._put(row, path, Counter([OTHER]))
            else:
                self._put(row, path, Counter(self._key(_CHUNK.sub("", n)) for n in catalog.names(index)))
        self.ranks = {unit.rank for unit in source.files.units if unit.rank}
        #: Dimensions of the ranks, which distinguish ranks of this checkpoint from others.
        self.forms = {frozenset(self.rows[rank].rank) for rank in self.ranks}
        self.inferred = False

    def _row(self, name: str, path: str) -> Row:
        row = self.rows.setdefault(name, Row())
        if path not in self.row_of:
            self.row_of[path] = name
            row.files.append(path)
        return row

    def _put(self, row: Row, path: str, counts: Counter[Key]) -> None:
        if path in self.tensors_of:
            self.tensors_of[path] = self.tensors_of[path] + counts
        else:
            self.tensors_of[path] = counts
        row.counts.append(counts)

    def _key(self, name: str, base: int = 0) -> Key:
        key = place_of(name)
        return (key[0] + base, key[1]) if base and key[0] is not None else key

    def place_findings(self, findings: list[Finding], echoes: list[Finding]) -> Grid:
        """Place all findings in the rows and return the grid."""
        placed = [
            # What says nothing of a place is of the whole checkpoint.
            f
            for f in findings
            if f.severity in ("error", "warning") and (f.file not in (None, ".") or f.rank or f.tensor)
        ]
        #: Missing or unreadable files, by row: the causes of tensors that the core misses.
        causes: dict[str, list[tuple[str, int]]] = {}
        self.forms |= {
            frozenset(echo.coords)
            for echo in echoes
            if echo.is_a("missing_tensor", "incomplete") and echo.coords and not self.forms
        }
        for finding in placed:
            state = state_of(finding)
            unread = state in (MISSING, DAMAGED) and finding.file not in self.tensors_of
            if unread and finding.file and not finding.tensor and finding.code != codes.MISSING_LAYER:
                causes.setdefault(self._row_for(finding), []).append((finding.file, state))
        named = {(f.tensor, f.rank) for f in placed}
        explained: set[str] = set()
        #: Layers with a finding.
        layers = {layer_of(f.tensor) for f in placed if f.tensor}
        if any(f.code == codes.MISSING_LAYER for f in placed):
            layers |= {echo.layers[0] for echo in echoes if echo.layers and echo.axis == _LAYERS}
        for echo in echoes:
            if (
                echo.is_a("missing_tensor", "incomplete")
                and echo.tensor
                and (echo.tensor, echo.rank) not in named
            ):
                named.add((echo.tensor, echo.rank))
                self._lose(echo, self._key(echo.tensor), 1, causes, explained)
            elif echo.layers and echo.axis == _LAYERS and echo.layers[0] not in layers:
                self._lose(echo, (echo.layers[0], WHOLE), echo.count or 1, causes, explained)
        self.inferred = any(
            echo.code == codes.MISSING_TENSOR and not echo.tensor and echo.count for echo in echoes
        )
        if self.inferred:
            self._infer(causes)
        single = {(f.code, f.rank, f.file) for f in placed if f.tensor}
        for finding in placed:
            if finding.code == codes.MISSING_LAYER:
                self._lose_layer(finding)
            # The sum of what is said of each array.
            elif finding.tensor or (finding.code, finding.rank, finding.file) not in single:
                self._mark(finding, explained)
        return banded(self.rows, self.ranks, self.inferred)

    def _row_for(self, finding: Finding) -> str:
        """Return the row of a finding."""
        if finding.file in self.row_of:
            return self.row_of[finding.file or ""]
        is_rank = bool(finding.coords) and frozenset(finding.coords) in self.forms
        name = finding.rank if finding.rank in self.rows or is_rank else None
        if name is None and finding.file and not finding.rank:
            within = {row for path, row in self.row_of.items() if path.startswith(f"{finding.file}/")}
            name = within.pop() if len(within) == 1 else None
        if name is None:
            name = finding.rank or finding.file or NOWHERE
            if finding.rank and finding.file and finding.code != codes.MISSING_CHUNKS:
                name = f"{finding.rank}: {finding.file.rpartition('/')[2]}"
        elif finding.rank == name:
            self.ranks.add(name)
        row = self.rows.setdefault(name, Row(rank=_rank_of(finding)))
        if finding.file and finding.file not in row.files:
            row.files.append(finding.file)
        return name

    def _lose(
        self,
        echo: Finding,
        key: Key,
        count: int,
        causes: dict[str, list[tuple[str, int]]],
        explained: set[str],
    ) -> None:
        """Mark tensors that the core misses in the row of their rank, or of their only possible file."""
        rows = [row for row in causes if row == echo.rank]
        if not rows and echo.rank not in self.ranks:
            # The core names as much of the rank as decides: that of a stage is not among it.
            rows = [row for row in causes if is_within(self.rows[row].rank, echo.coords)]
        if len(rows) == 1 and (echo.rank or len(causes[rows[0]]) == 1):
            files = causes[rows[0]]
            path, state = files[0] if len(files) == 1 else self._likeliest(key, files)
            self.rows[rows[0]].add(key, state, count)
            explained.add(path)
            return
        name = echo.rank or NOWHERE
        if echo.rank:
            self.ranks.add(name)
        self.rows.setdefault(name, Row(rank=_rank_of(echo))).add(key, MISSING, count)

    def _infer(self, causes: dict[str, list[tuple[str, int]]]) -> None:
        """Infer what is missing for ranks if the core does not name each of them.

        Ranks that differ only in their tensor-parallel rank should have the same tensors.
        """
        alike: dict[tuple[tuple[str, int], ...], Counter[Key]] = {}
        for name in self.ranks:
            for counts in self.rows[name].counts:
                of = alike.setdefault(_without_tensor_rank(self.rows[name].rank), Counter())
                if of is not counts:
                    of |= counts
        for name in sorted(self.ranks):
            row = self.rows[name]
            have = set(row.named())
            if row.like is not None and have:
                continue  # Nothing is missed of it.
            states = {state for _, state in causes.get(name, ())} or {min(c) for c in row.cells.values()}
            state = min(states, default=MISSING)
            for key, count in alike.get(_without_tensor_rank(row.rank), {}).items():
                if key not in have:
                    row.add(key, state, count)

    def _likeliest(self, key: Key, files: list[tuple[str, int]]) -> tuple[str, int]:
        """Return the file of a rank that most likely contains a tensor.

        It is the file whose name is most similar to another rank's file with the tensor.
        """
        like = next((path for path, keys in self.tensors_of.items() if key in keys), "")
        return min(files, key=lambda file: _apart(file[0], like))

    def _mark(self, finding: Finding, explained: set[str]) -> None:
        state = state_of(finding)
        if finding.tensor and not finding.file and not finding.rank:
            key = self._key(finding.tensor)
            rows = [row for row in self.rows.values() if key in set(row.named())]
            if state == MISSING or not rows:
                rows = [self.rows.setdefault(NOWHERE, Row())]
            for row in rows:
                row.mark(key, state)
            return
        row = self.rows[self._row_for(finding)]
        # Of several tensors of a file one is named.
        if finding.tensor and not ((finding.count or 1) > 1 and finding.file in self.tensors_of):
            row.mark(self._key(finding.tensor), state)
        elif finding.file in self.tensors_of:
            for key in self.tensors_of[finding.file]:
                row.mark(key, state)
        elif finding.file not in explained:
            if state == MISSING:
                # Each missing file of a rank counts.
                row.add(FILE, state)
            else:
                row.mark(FILE, state)

    def _lose_layer(self, finding: Finding) -> None:
        """Mark layers that are missing completely: on each rank, unless ranks have different layers."""
        keys: list[Key] = [(number, WHOLE) for number in (finding.layers or range(0))[:_MOST_LAYERS]]
        keys = keys or [FILE]
        whole = finding.layers and self.ranks and not any("pp" in self.rows[name].rank for name in self.ranks)
        names = sorted(self.ranks) if whole else [self._row_for(finding)]
        for name in names:
            for key in keys:
                self.rows[name].mark(key, MISSING)


def banded(rows: Mapping[str, Row], of_ranks: Collection[str], inferred: bool = False) -> Grid:
    """Make the grid of rows; similar neighbours form one band.

    Args:
        rows: the content of each rank or file, by its name.
        of_ranks: the rows that are ranks; they come first.
        inferred: as in :class:`Grid`.
    """
    distinct = {row.like or name: row for name, row in rows.items()}
    keys = sorted({key for row in distinct.values() for key in row.named()}, key=order_of)
    columns, where = columns_of(keys)
    cells_by = _cells(rows, where, len(columns))
    by_name = {name: row.rank for name, row in rows.items()}
    ranks = in_order([name for name in rows if name in of_ranks], by_name, cells_by)
    names = [*ranks, *sorted((name for name in rows if name not in of_ranks), key=nowhere_last)]
    bands: list[Band] = []
    for name in names:
        row, cells = rows[name], cells_by[name]
        last = bands[-1] if bands else None
        if last is not None and last.cells == cells:
            bands[-1] = joined_band(last, name, row, cells)
        else:
            bands.append(
                Band(name, 1, tuple(row.files[:3]), len(row.files), cells, names=[name], ranks=[row.rank])
            )
    problems = tuple(problems_of(bands, columns))
    return Grid(columns, tuple(fewer(bands, len(columns))), len(names), len(ranks), problems, inferred)


def _cells(rows: Mapping[str, Row], where: dict[Key, int], count: int) -> dict[str, tuple[Cell | None, ...]]:
    """Return the cells of each row; similar rows share them."""
    made: dict[object, tuple[Cell | None, ...]] = {}
    cells_by = {}
    for name, row in rows.items():
        like = row.like or name
        if like not in made:
            made[like] = cells_of(row, where, count)
        # Rows of other files that hold the same are alike too.
        cells_by[name] = made.setdefault(made[like], made[like])
    return cells_by


def state_of(finding: Finding) -> int:
    """Return the state that a finding implies for its subject."""
    if finding.code == codes.UNEXPECTED_FILE:
        return UNEXPECTED
    if finding.severity == "warning":
        return DOUBTFUL
    if finding.is_a("missing_file", "missing_tensor", "incomplete"):
        return MISSING
    if finding.is_a("damaged", "unreadable"):
        return DAMAGED
    return COPIED if codes.CODES[finding.code].check == "copies" else MISFIT


def _rank_of(finding: Finding) -> Rank:
    """Return the rank of a finding; empty if it concerns several ranks, or none."""
    is_one = all(len(runs) == 1 == len(runs[0]) for runs in finding.coords.values())
    return {d: runs[0][0] for d, runs in finding.coords.items()} if is_one else {}


def _without_tensor_rank(rank: Rank) -> tuple[tuple[str, int], ...]:
    return tuple((d, n) for d, n in rank.items() if d not in _TENSOR_DIMENSIONS)


def _apart(a: str, b: str) -> int:
    """Count the numbers in which two names differ; return a large count for names of different forms."""
    if _DIGITS.sub("0", a) != _DIGITS.sub("0", b):
        return 1 << 10
    return sum(x != y for x, y in zip(_DIGITS.findall(a), _DIGITS.findall(b), strict=True))
