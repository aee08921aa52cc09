"""The parts of the grid of ranks and layers: states, columns, cells and bands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..common.ranks import Rank
from ..common.records import dataclass, field


@dataclass(frozen=True)
class State:
    """A state of a cell. It is shown by mark and word, not only by colour."""

    name: str
    mark: str
    meaning: str


#: From the worst to the best.
STATES: tuple[State, ...] = (
    State("missing", "✕", "expected, and in none of the files"),
    State("damaged", "!", "truncated, malformed, or a checksum mismatch"),
    State("copied", "=", "the bytes of another place, where something else must be"),
    State("misfit", "≠", "shape, dtype or content contradicts the rest"),
    State("doubtful", "?", "a warning is about it"),
    State("unexpected", "+", "nothing names it; it was not read"),
    State("complete", "", "here, as far as it was checked"),
)


MISSING, DAMAGED, COPIED, MISFIT, DOUBTFUL, UNEXPECTED, THERE = range(len(STATES))


#: Maximum number of columns for roles of layers; with more, a column is a layer.
MOST_SHOWN = 64


#: Maximum number of columns in any case.
MOST_COLUMNS = 160


#: Maximum number of cells; with more, adjacent bands are merged.
MOST_CELLS = 12_000


#: Maximum number of bands.
MOST_BANDS = 64


#: A column before merging: the layer, and the role. A role with this prefix is not a tensor's.
Key = tuple[int | None, str]


FILE: Key = (None, "\0the file itself")


OPTIMIZER: Key = (None, "\0optimizer state")


OTHER: Key = (None, "\0other values")


#: The role for a completely missing layer.
WHOLE = "\0all of it"


@dataclass(frozen=True)
class Column:
    """One tensor, or all tensors of a layer."""

    #: The heading above several columns: the layer; empty for tensors outside of all layers.
    group: str
    label: str


@dataclass(frozen=True)
class Cell:
    """The state of a column in a row."""

    #: Index in :data:`STATES` of the worst state.
    state: int
    #: Number of tensors (or chunks) in that state, and their total number.
    count: int
    of: int


@dataclass(frozen=True)
class Band:
    """A row, or adjacent rows that are similar unless the band states otherwise."""

    label: str
    #: Number of rows.
    rows: int
    #: The rows' files; the first few.
    files: tuple[str, ...]
    #: Total number of files.
    file_count: int
    cells: tuple[Cell | None, ...]
    #: False if different rows had to be merged.
    alike: bool = True
    #: The rows, in order, and the rank of each.
    names: Sequence[str] = ()
    ranks: Sequence[Rank] = ()

    @property
    def worst(self) -> int:
        """The worst state of its cells."""
        return min((cell.state for cell in self.cells if cell), default=THERE)


@dataclass(frozen=True)
class Problem:
    """A line in the list of problems."""

    where: str
    #: Number of rows with the problem.
    rows: int
    state: int
    count: int
    columns: tuple[str, ...]
    files: tuple[str, ...]
    #: True if these are all columns of the row.
    whole: bool


@dataclass
class Row:
    """A row while it is filled."""

    #: Its rank; empty for files that belong to no rank.
    rank: Rank = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    #: The contents of its files, shared with other rows because most ranks have the same.
    counts: list[Counter[Key]] = field(default_factory=list)
    #: Numbers of tensors by column and state; None without findings.
    _cells: dict[Key, Counter[int]] | None = None

    @property
    def cells(self) -> dict[Key, Counter[int]]:
        """The row's own numbers of tensors, by column and state."""
        if self._cells is None:
            self._cells = {}
            for counts in self.counts:
                for key, count in counts.items():
                    self._cells.setdefault(key, Counter())[THERE] += count
        return self._cells

    @property
    def like(self) -> tuple[int, ...] | None:
        """A value that is equal for similar rows; None for a row with findings."""
        return None if self._cells is not None else tuple(map(id, self.counts))

    def named(self) -> Iterable[Key]:
        """Return the keys of the columns in which the row has something; keys may repeat."""
        return self._cells if self._cells is not None else (key for counts in self.counts for key in counts)

    def add(self, key: Key, state: int, count: int = 1) -> None:
        """Count tensors in a state other than existing."""
        self.cells.setdefault(key, Counter())[state] += count

    def mark(self, key: Key, state: int) -> None:
        """Mark all existing tensors as faulty, because the number of faulty ones is unknown."""
        counts = self.cells.setdefault(key, Counter())
        if state == MISSING:
            counts[state] += not counts[state]
        elif counts[THERE]:
            counts[state] += counts.pop(THERE)
        elif not any(counts[worse] for worse in range(state + 1)):
            counts[state] += 1


#: The row for tensors in no file whose rank is unknown.
NOWHERE = "missing"
