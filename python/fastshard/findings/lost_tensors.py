"""Missing and incomplete tensors, with the number of elements of each if anything states it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..common.errors import Finding
from ..layouts.declaration import Source
from ..models.tensor_roles import parts_of

__all__ = ["find_lost_tensors"]


def find_lost_tensors(
    by_layout: Mapping[str, int | None], source: Source, broken: Iterable[Finding]
) -> dict[str, int | None]:
    """Return the number of elements of each incomplete tensor; None if nothing states it.

    No size is derived from other layers, as they may differ.

    Args:
        by_layout: tensors that the layout requires, with the number of elements that it gives.
        source: the checkpoint.
        broken: errors about single incomplete tensors.
    """
    known = _as_stored(by_layout, source)
    for name, elements in source.index.lost_elements.items():
        if known.get(name) is None:
            known[name] = elements
    respelled = by_layout.keys() - known.keys()
    named = (f.tensor for f in broken if f.tensor and f.tensor not in respelled)
    return {name: known.get(name) for name in dict.fromkeys([*known, *source.index.lost, *named])}


def _as_stored(lost: Mapping[str, int | None], source: Source) -> dict[str, int | None]:
    """Return the incomplete tensors that the layout requires, each under its name in a lost file.

    A tensor in no lost file keeps the layout's own name.

    No readable file shows which of the layout's spellings the checkpoint uses.
    """
    table = source.binding.usual_table if source.binding.table is None else source.binding.table
    if table is None or not source.index.lost:
        return dict(lost)

    def place(name: str) -> tuple[str, tuple[int, ...]] | None:
        rule = table.rule_of(name)
        return None if rule is None else (rule.name, tuple(parts_of(name)[1]))

    stored = {at: name for name in source.index.lost if (at := place(name)) is not None}
    return {stored.get(at, name) if (at := place(name)) else name: of for name, of in lost.items()}
