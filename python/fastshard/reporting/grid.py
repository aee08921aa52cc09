"""The completeness grid: what of each tensor lies on each rank, and what of it is missing, damaged or copied.

It is judged from what the sources declare and from findings, so that a cell never says more than a finding does. Rows that are
alike are one band and columns may stand for whole layers; a band or a column shows the worst that is in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..checkpoint.checkpoint import Checkpoint
from ..common.errors import Finding
from ..models.tensor_roles import layer_of, place_of

__all__ = ["STATES", "Band", "Cell", "Column", "Grid", "Problem", "State", "grid"]


@dataclass(frozen=True)
class State:
    """What a cell can say. It is told by mark and word, not by its colour alone."""

    name: str
    mark: str
    told: str


#: From the worst to the best.
STATES: tuple[State, ...] = (
    State("missing", "✕", "missing: in no file that is here"),
    State("damaged", "!", "damaged: cut short, malformed, or bytes that do not fit their checksum"),
    State("copied", "=", "copied: the bytes of another place, where something else must be"),
    State("misfit", "≠", "does not fit: shape, dtype or content contradicts the rest"),
    State("doubtful", "?", "doubtful: a warning is about it"),
    State("unexpected", "+", "not called for: nothing names it, it was not read"),
    State("there", "·", "there"),
)  # fmt: skip
MISSING, DAMAGED, COPIED, MISFIT, DOUBTFUL, UNEXPECTED, THERE = range(len(STATES))
_BY_CODE = {
    **dict.fromkeys(("FS101", "FS102", "FS103", "FS104", "FS105", "FS111", "FS205"), MISSING),
    **dict.fromkeys(("FS301", "FS308", "FS312", "FS502", "FS506", "FS507", "FS601", "FS602", "FS603", "FS604"), DAMAGED),
    **dict.fromkeys(("FS113", "FS303", "FS304", "FS305"), COPIED),
    "FS108": UNEXPECTED,
}  # fmt: skip
#: Findings of the core about single tensors, which are not said where their cause is: a file that is missing.
_ECHOES = ("FS102", "FS205")

#: Columns for each role of each layer at most; beyond, a column is a layer.
_COLUMNS = 64
#: Columns at most in any case.
_MOST_COLUMNS = 160
#: Cells at most: beyond, neighbouring bands are shown together.
_CELLS = 12_000
#: The part of a stored name that says which chunk of the tensor it is. source: DCP records as they are named here, zarr 3, zarr 2
_CHUNK = re.compile(r"(?:\[[0-9,]*\]|/c(?:/[0-9/]+)?|/[0-9]+(?:\.[0-9]+)*)$")
_DIGITS = re.compile(r"[0-9]+")

#: What a column is before columns are put together: the layer, and the role; a role that begins so is none of a tensor.
Key = tuple[int | None, str]
_FILE: Key = (None, "\0the file itself")
_OPTIMIZER: Key = (None, "\0optimizer state")
_OTHER: Key = (None, "\0other values")
#: The role of a layer of which nothing is there.
_WHOLE = "\0all of it"
#: The axis of the layers.
_LAYERS = "L"
#: Layers of a run that are shown; no model has more.
_MOST_LAYERS = 1 << 14
#: The part of a rank in which ranks differ that hold the same tensors.
_TENSOR_RANK = re.compile(r"\b(?:tp|mp) [0-9]+")


@dataclass(frozen=True)
class Column:
    """One tensor, or all of a layer."""

    #: What stands above several columns: the layer; empty for what is in none.
    group: str
    label: str


@dataclass(frozen=True)
class Cell:
    """What is known of a column on a row."""

    #: Index in :data:`STATES`; the worst that is there.
    state: int
    #: How many tensors (or chunks) are in that state, and how many there are in all.
    count: int
    of: int


@dataclass(frozen=True)
class Band:
    """A row, or neighbouring ones: all alike unless it says otherwise."""

    label: str
    #: How many rows.
    rows: int
    #: The rows' files; the first few.
    files: tuple[str, ...]
    #: How many there are.
    file_count: int
    cells: tuple[Cell | None, ...]
    #: False where rows that differ had to be put together.
    alike: bool = True

    @property
    def worst(self) -> int:
        """The worst state of its cells."""
        return min((cell.state for cell in self.cells if cell), default=THERE)


@dataclass(frozen=True)
class Problem:
    """A line of the list of all that is not there as it should be."""

    where: str
    #: How many rows that is.
    rows: int
    state: int
    count: int
    columns: tuple[str, ...]
    files: tuple[str, ...]
    #: True if these are all columns of the row.
    whole: bool


@dataclass(frozen=True)
class Grid:
    """Ranks (or files) by tensors (or layers)."""

    columns: tuple[Column, ...]
    bands: tuple[Band, ...]
    #: Rows in all.
    rows: int
    #: How many of them are ranks; the others are files that are of no rank.
    ranks: int
    problems: tuple[Problem, ...]
    #: True if so much is missing that the core does not name all of it: the rest is told by ranks that are alike.
    inferred: bool = False

    @property
    def states(self) -> list[int]:
        """The states that occur."""
        return sorted({cell.state for band in self.bands for cell in band.cells if cell})


@dataclass
class _Row:
    """A row while it is filled."""

    files: list[str] = field(default_factory=list)
    #: What its files hold, shared with other rows: ranks mostly hold the same.
    held: list[Counter[Key]] = field(default_factory=list)
    #: Numbers of tensors by column and state, once anything is to be said of them.
    _cells: dict[Key, Counter[int]] | None = None

    @property
    def cells(self) -> dict[Key, Counter[int]]:
        """Numbers of tensors by column and state, the row's own."""
        if self._cells is None:
            self._cells = {}
            for counts in self.held:
                for key, count in counts.items():
                    self._cells.setdefault(key, Counter())[THERE] += count
        return self._cells

    @property
    def like(self) -> tuple[int, ...] | None:
        """The same for rows that are alike; None for a row of which something is said."""
        return None if self._cells is not None else tuple(map(id, self.held))

    def named(self) -> Iterable[Key]:
        """Its columns."""
        return self._cells if self._cells is not None else (key for counts in self.held for key in counts)

    def add(self, key: Key, state: int, count: int = 1) -> None:
        """Counts what is not among what is there."""
        self.cells.setdefault(key, Counter())[state] += count

    def mark(self, key: Key, state: int) -> None:
        """Says of what is there that it is not as it should be: of all of it, as nothing says of how much."""
        counts = self.cells.setdefault(key, Counter())
        if state == MISSING:
            counts[state] += not counts[state]
        elif counts[THERE]:
            counts[state] += counts.pop(THERE)
        elif not any(counts[worse] for worse in range(state + 1)):
            counts[state] += 1


def grid(checkpoint: Checkpoint, findings: Iterable[Finding], echoes: Iterable[Finding] = ()) -> Grid:
    """The grid of an opened checkpoint.

    Args:
        checkpoint: the checkpoint.
        findings: all that was found of it.
        echoes: what the core found of tensors whose file is the cause, and is not said again: the cells of that file.
    """
    return _Filling(checkpoint).judged(list(findings), list(echoes))


class _Filling:
    """The rows while they are filled."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.rows: dict[str, _Row] = {}
        #: Rows by file.
        self.row_of: dict[str, str] = {}
        #: Files that hold tensors of the model, by path: their columns, and how many tensors each.
        self.held: dict[str, Counter[Key]] = {}
        source, catalog = checkpoint.opened.source, checkpoint.opened.catalog
        readable = checkpoint._files
        paths = [file.path for file in checkpoint.opened.files]
        state_files = {paths[s.file] for s in source.optimizer.state_files} | source.optimizer.files
        # Ranks hold tensors of the same names.
        counted: dict[tuple[object, ...], Counter[Key]] = {}
        units = {unit.file for unit in source.units}
        for unit in source.units:
            path = paths[unit.file]
            row = self._row(unit.rank or path, path)
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
        assembled = bool(source.assembled) and not source.units
        #: Tensors of which files of optimizer state hold a range.
        partitions: dict[int, list[Key]] = {}
        for group in source.assembled:
            if group.slot is None and not assembled:
                for name, _, pieces in group.tensors:
                    # A range is (elements, file, ...), a box (first index, extent, file, ...).
                    for file in {piece[1] if isinstance(piece[1], int) else piece[2] for piece in pieces}:
                        partitions.setdefault(file, []).append(self._key(name))
        for index, path in enumerate(paths):
            if index in units:
                continue
            row = self._row(_store(path), path)
            if readable[index] is None:
                continue
            if path in state_files:
                self._put(row, path, Counter(partitions.get(index) or [_OPTIMIZER]))
            elif source.units and not assembled:
                self._put(row, path, Counter([_OTHER]))
            else:
                self._put(row, path, Counter(self._key(_CHUNK.sub("", n)) for n in catalog.names(index)))
        self.ranks = {unit.rank for unit in source.units if unit.rank}
        #: Ranks without their numbers: what a rank of this checkpoint is called.
        self.forms = {_form(rank) for rank in self.ranks}
        self.inferred = False

    def _row(self, name: str, path: str) -> _Row:
        row = self.rows.setdefault(name, _Row())
        if path not in self.row_of:
            self.row_of[path] = name
            row.files.append(path)
        return row

    def _put(self, row: _Row, path: str, counts: Counter[Key]) -> None:
        if path in self.held:
            self.held[path] = self.held[path] + counts
        else:
            self.held[path] = counts
        row.held.append(counts)

    def _key(self, name: str, base: int = 0) -> Key:
        key = place_of(name)
        return (key[0] + base, key[1]) if base and key[0] is not None else key

    def judged(self, findings: list[Finding], echoes: list[Finding]) -> Grid:
        """The grid, once all that was found is put into the rows."""
        told = [
            # What says nothing of a place is of the whole checkpoint.
            f for f in findings if f.severity in ("error", "warning") and (f.file not in (None, ".") or f.rank or f.tensor)
        ]  # fmt: skip
        #: Files of a row that are missing or cannot be read, by row: the causes of what the core misses.
        causes: dict[str, list[tuple[str, int]]] = {}
        self.forms |= {
            _form(echo.rank) for echo in echoes if echo.code in _ECHOES and echo.rank and not self.forms
        }
        for finding in told:
            state = _state(finding)
            unread = state in (MISSING, DAMAGED) and finding.file not in self.held
            if unread and finding.file and not finding.tensor and finding.code != "FS103":
                causes.setdefault(self._row_for(finding), []).append((finding.file, state))
        said = {(f.tensor, f.rank) for f in told}
        explained: set[str] = set()
        #: Layers of which something is said already.
        layers = {layer_of(f.tensor) for f in told if f.tensor}
        if any(f.code == "FS103" for f in told):
            layers |= {echo.layers[0] for echo in echoes if echo.layers and echo.axis == _LAYERS}
        for echo in echoes:
            if echo.code in _ECHOES and echo.tensor and (echo.tensor, echo.rank) not in said:
                said.add((echo.tensor, echo.rank))
                self._lose(echo, self._key(echo.tensor), 1, causes, explained)
            elif echo.layers and echo.axis == _LAYERS and echo.layers[0] not in layers:
                self._lose(echo, (echo.layers[0], _WHOLE), echo.count or 1, causes, explained)
        self.inferred = any(echo.code == "FS102" and not echo.tensor and echo.count for echo in echoes)
        if self.inferred:
            self._infer(causes)
        single = {(f.code, f.rank, f.file) for f in told if f.tensor}
        for finding in told:
            if finding.code == "FS103":
                self._lose_layer(finding)
            # The sum of what is said of each array.
            elif finding.tensor or (finding.code, finding.rank, finding.file) not in single:
                self._mark(finding, explained)
        return self._grid()

    def _row_for(self, finding: Finding) -> str:
        """The row that a finding is about."""
        if finding.file in self.row_of:
            return self.row_of[finding.file or ""]
        name = finding.rank if finding.rank in self.rows or _form(finding.rank) in self.forms else None
        if name is None and finding.file and not finding.rank:
            within = {row for path, row in self.row_of.items() if path.startswith(f"{finding.file}/")}
            name = within.pop() if len(within) == 1 else None
        if name is None:
            name = finding.rank or finding.file or _NOWHERE
            if finding.rank and finding.file and finding.code != "FS111":
                name = f"{finding.rank}: {finding.file.rpartition('/')[2]}"
        elif finding.rank == name:
            self.ranks.add(name)
        row = self.rows.setdefault(name, _Row())
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
        """Puts what the core misses where it is missing: the row of its rank, or of the one file that can have held it."""
        rows = [row for row in causes if row == echo.rank]
        if not rows and echo.rank not in self.ranks:
            # The core names as much of the rank as decides: that of a stage is not among it.
            parts = set((echo.rank or "").split(", ")) - {""}
            rows = [row for row in causes if parts <= set(row.partition(":")[0].split(", "))]
        if len(rows) == 1 and (echo.rank or len(causes[rows[0]]) == 1):
            files = causes[rows[0]]
            path, state = files[0] if len(files) == 1 else self._likeliest(key, files)
            self.rows[rows[0]].add(key, state, count)
            explained.add(path)
            return
        name = echo.rank or _NOWHERE
        if echo.rank:
            self.ranks.add(name)
        self.rows.setdefault(name, _Row()).add(key, MISSING, count)

    def _infer(self, causes: dict[str, list[tuple[str, int]]]) -> None:
        """What ranks lack that the core does not name one by one: what those hold that differ in their tensor parallel rank
        alone."""
        alike: dict[str, Counter[Key]] = {}
        for name in self.ranks:
            for counts in self.rows[name].held:
                of = alike.setdefault(_TENSOR_RANK.sub("", name), Counter())
                if of is not counts:
                    of |= counts
        for name in sorted(self.ranks):
            row = self.rows[name]
            have = set(row.named())
            if row.like is not None and have:
                continue  # Nothing is missed of it.
            states = {state for _, state in causes.get(name, ())} or {min(c) for c in row.cells.values()}
            state = min(states, default=MISSING)
            for key, count in alike.get(_TENSOR_RANK.sub("", name), {}).items():
                if key not in have:
                    row.add(key, state, count)

    def _likeliest(self, key: Key, files: list[tuple[str, int]]) -> tuple[str, int]:
        """Of several files of a rank the one whose name is nearest to that of a file of another rank that has the tensor."""
        like = next((path for path, keys in self.held.items() if key in keys), "")
        return min(files, key=lambda file: _apart(file[0], like))

    def _mark(self, finding: Finding, explained: set[str]) -> None:
        state = _state(finding)
        if finding.tensor and not finding.file and not finding.rank:
            key = self._key(finding.tensor)
            rows = [row for row in self.rows.values() if key in set(row.named())]
            if state == MISSING or not rows:
                rows = [self.rows.setdefault(_NOWHERE, _Row())]
            for row in rows:
                row.mark(key, state)
            return
        row = self.rows[self._row_for(finding)]
        # Of several tensors of a file one is named.
        if finding.tensor and not ((finding.count or 1) > 1 and finding.file in self.held):
            row.mark(self._key(finding.tensor), state)
        elif finding.file in self.held:
            for key in self.held[finding.file]:
                row.mark(key, state)
        elif finding.file not in explained:
            row.mark(_FILE, state)

    def _lose_layer(self, finding: Finding) -> None:
        """Layers of which nothing is there: they are missing on each rank, unless ranks have layers of their own."""
        keys: list[Key] = [(number, _WHOLE) for number in (finding.layers or range(0))[:_MOST_LAYERS]]
        keys = keys or [_FILE]
        whole = finding.layers and self.ranks and not any("pp" in rank for rank in self.ranks)
        names = sorted(self.ranks) if whole else [self._row_for(finding)]
        for name in names:
            for key in keys:
                self.rows[name].mark(key, MISSING)

    def _grid(self) -> Grid:
        distinct = {row.like or name: row for name, row in self.rows.items()}
        keys = sorted({key for row in distinct.values() for key in row.named()}, key=_order)
        columns, where = _columns(keys)
        names = sorted(self.rows, key=lambda name: (name not in self.ranks, _natural(name)))
        bands: list[Band] = []
        made: dict[tuple[int, ...], tuple[Cell | None, ...]] = {}
        for name in names:
            row = self.rows[name]
            like = row.like
            cells = made.get(like) if like is not None else None
            if cells is None:
                cells = _row_cells(row, where, len(columns))
                if like is not None:
                    made[like] = cells
            last = bands[-1] if bands else None
            if last is not None and last.cells == cells:
                bands[-1] = _together(last, name, row, cells)
            else:
                bands.append(Band(name, 1, tuple(row.files[:3]), len(row.files), cells))
        problems = tuple(_problems(bands, columns))
        return Grid(
            columns,
            tuple(_fewer(bands, len(columns))),
            len(names),
            len(self.ranks & self.rows.keys()),
            problems,
            self.inferred,
        )


#: The row of what is in no file, where nothing says which rank's it was.
_NOWHERE = "in no file"


def _state(finding: Finding) -> int:
    state = _BY_CODE.get(finding.code)
    if state is None or (finding.severity == "warning" and state != UNEXPECTED):
        return DOUBTFUL if finding.severity == "warning" else MISFIT if state is None else state
    return state


def _store(path: str) -> str:
    """The folder of a store of arrays, by the file that stands for it; of other files their own path."""
    folder, _, name = path.rpartition("/")
    if name in ("_METADATA", "manifest.ocdbt"):
        return folder or path
    return folder.rpartition("/")[0] or folder or path if name in (".zarray", "zarr.json") else path


def _form(rank: str | None) -> str:
    return _DIGITS.sub("#", rank or "")


def _apart(a: str, b: str) -> int:
    """In how many of their numbers two names differ; many for names of another form."""
    if _DIGITS.sub("0", a) != _DIGITS.sub("0", b):
        return 1 << 10
    return sum(x != y for x, y in zip(_DIGITS.findall(a), _DIGITS.findall(b), strict=True))


def _natural(name: str) -> tuple[bool, list[tuple[bool, int, str]]]:
    parts = re.split(r"([0-9]+)", name)
    return name == _NOWHERE, [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts if p]


def _order(key: Key) -> tuple[int, int, str]:
    """Embeddings, layers, what comes behind them, and last what is no tensor."""
    layer, role = key
    if role.startswith("\0") and layer is None:
        return 3, 0, role
    if layer is not None:
        return 1, layer, role
    return (0 if re.search(r"embed|wte|wpe", role) else 2), 0, role


def _columns(keys: Sequence[Key]) -> tuple[tuple[Column, ...], dict[Key, int]]:
    """The columns, and the one of each key."""
    labels: dict[Key, Column] = {}
    layers = sorted({layer for layer, _ in keys if layer is not None})
    outside = [key for key in keys if key[0] is None]
    single = len(keys) <= _COLUMNS
    # Several layers are a column where there are too many.
    step = 1
    while not single and len(layers) / step + min(len(outside), 40) > _MOST_COLUMNS:
        step += 1
    for key in keys:
        layer, role = key
        if layer is None:
            few = single or len(outside) <= 40 or role.startswith("\0")
            labels[key] = Column("", role.lstrip("\0") if few else "others")
        elif single:
            labels[key] = Column(f"layer {layer}", role.lstrip("\0"))
        else:
            first = layers[layers.index(layer) // step * step] if step > 1 else layer
            last = layers[min(layers.index(first) + step, len(layers)) - 1] if step > 1 else layer
            labels[key] = Column("layers", str(layer) if first == last else f"{first}-{last}")
    columns = tuple(dict.fromkeys(labels.values()))
    index = {column: i for i, column in enumerate(columns)}
    return columns, {key: index[column] for key, column in labels.items()}


def _row_cells(row: _Row, where: dict[Key, int], count: int) -> tuple[Cell | None, ...]:
    tallies: list[Counter[int] | None] = [None] * count
    for key, counts in row.cells.items():
        tally = tallies[where[key]]
        if tally is None:
            tallies[where[key]] = Counter(counts)
        else:
            tally.update(counts)
    return tuple(_cell(tally) for tally in tallies)


def _cell(tally: Counter[int] | None) -> Cell | None:
    if not tally:
        return None
    state = min(state for state, count in tally.items() if count)
    return Cell(state, tally[state], sum(tally.values()))


def _together(band: Band, name: str, row: _Row, cells: tuple[Cell | None, ...]) -> Band:
    first = band.label.partition(" … ")[0] if band.rows > 1 else band.label
    return Band(f"{first} … {name}", band.rows + 1, band.files[:3], band.file_count + len(row.files), cells)


def _fewer(bands: list[Band], columns: int) -> list[Band]:
    """No more bands than can be looked at: neighbours are put together, each cell the worst of theirs."""
    most = max(40, _CELLS // max(1, columns))
    size = -(-len(bands) // most)
    if size <= 1:
        return bands
    fewer = []
    for start in range(0, len(bands), size):
        group = bands[start : start + size]
        cells: list[Cell | None] = []
        for column in zip(*(band.cells for band in group), strict=True):
            known = [cell for cell in column if cell is not None]
            if not known:
                cells.append(None)
                continue
            state = min(cell.state for cell in known)
            count = sum(cell.count for cell in known if cell.state == state)
            cells.append(Cell(state, count, sum(cell.of for cell in known)))
        last = group[-1].label.rpartition(" … ")[2]
        label = f"{group[0].label.partition(' … ')[0]} … {last}"
        rows, files = sum(b.rows for b in group), sum(b.file_count for b in group)
        fewer.append(Band(label, rows, group[0].files, files, tuple(cells), alike=len(group) == 1))
    return fewer


def _problems(bands: Iterable[Band], columns: Sequence[Column]) -> Iterable[Problem]:
    """All that is not there as it should be, the worst first."""
    found = []
    for band in bands:
        for state in range(THERE):
            hit = [i for i, cell in enumerate(band.cells) if cell and cell.state == state]
            if hit:
                names = tuple(_called(columns[i]) for i in hit)
                count = band.rows * sum(cell.count for cell in (band.cells[i] for i in hit) if cell)
                whole = len(hit) == sum(cell is not None for cell in band.cells) > 1
                found.append(Problem(band.label, band.rows, state, count, names, band.files, whole))
    return sorted(found, key=lambda p: p.state)


def _called(column: Column) -> str:
    return f"layer {column.label}" if column.group == "layers" else f"{column.group} {column.label}".strip()
