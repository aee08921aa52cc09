"""Rows of the grid as bands: similar rows form one band, so that only a few remain."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ..common.formatting import natural
from .grid_cells import (
    MOST_BANDS,
    MOST_CELLS,
    MOST_COLUMNS,
    MOST_SHOWN,
    NOWHERE,
    THERE,
    Band,
    Cell,
    Column,
    Key,
    Problem,
    Row,
)


def nowhere_last(name: str) -> tuple[bool, list[tuple[bool, int, str]]]:
    """Sort names naturally, with numbers by value, and tensors in no file last."""
    return name == NOWHERE, natural(name)


def order_of(key: Key) -> tuple[int, int, str]:
    """Sort columns: embeddings, layers, tensors after them, and entries that are not tensors last."""
    layer, role = key
    if role.startswith("\0") and layer is None:
        return 3, 0, role
    if layer is not None:
        return 1, layer, role
    return (0 if re.search(r"embed|wte|wpe", role) else 2), 0, role


def columns_of(keys: Sequence[Key]) -> tuple[tuple[Column, ...], dict[Key, int]]:
    """Return the columns, and the column of each key."""
    labels: dict[Key, Column] = {}
    layers = sorted({layer for layer, _ in keys if layer is not None})
    outside = [key for key in keys if key[0] is None]
    single = len(keys) <= MOST_SHOWN
    # Several layers are a column where there are too many.
    step = 1
    while not single and len(layers) / step + min(len(outside), 40) > MOST_COLUMNS:
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


def cells_of(row: Row, where: dict[Key, int], count: int) -> tuple[Cell | None, ...]:
    """Put the content of a row into the columns."""
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


def joined_band(band: Band, name: str, row: Row, cells: tuple[Cell | None, ...]) -> Band:
    """Add a similar row to a band."""
    first = band.label.partition(" … ")[0] if band.rows > 1 else band.label
    names, ranks = band.names, band.ranks
    assert isinstance(names, list) and isinstance(ranks, list)
    names.append(name)
    ranks.append(row.rank)
    return Band(
        f"{first} … {name}",
        band.rows + 1,
        band.files[:3],
        band.file_count + len(row.files),
        cells,
        names=names,
        ranks=ranks,
    )


def fewer(bands: list[Band], columns: int) -> list[Band]:
    """Reduce the number of bands to what a page can show.

    The function merges neighbours; each cell has their worst state.
    """
    most = min(MOST_BANDS, max(40, MOST_CELLS // max(1, columns)))
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
        names = [name for band in group for name in band.names]
        ranks = [rank for band in group for rank in band.ranks]
        alike = len(group) == 1
        fewer.append(
            Band(label, rows, group[0].files, files, tuple(cells), alike=alike, names=names, ranks=ranks)
        )
    return fewer


def problems_of(bands: Iterable[Band], columns: Sequence[Column]) -> Iterable[Problem]:
    """List all problems, the worst first."""
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
