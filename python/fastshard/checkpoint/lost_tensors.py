"""How many elements the tensors have that are missing or incomplete, as far as anything says so."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from ..layouts.declaration import Source
from ..models.tensor_roles import parts_of, place_of

__all__ = ["as_stored", "sized"]


def as_stored(lost: Mapping[str, int | None], source: Source) -> dict[str, int | None]:
    """Tensors that the layout calls for and are not whole, each under the name that a lost file has it by.

    Nothing that can be read tells which of the layout's spellings that is.
    """
    table = source.usual_table if source.table is None else source.table
    if table is None or not source.lost:
        return dict(lost)

    def place(name: str) -> tuple[str, tuple[int, ...]] | None:
        rule = table.rule_of(name)
        return None if rule is None else (rule.name, tuple(parts_of(name)[1]))

    stored = {at: name for name in source.lost if (at := place(name)) is not None}
    return {stored.get(at, name) if (at := place(name)) else name: of for name, of in lost.items()}


def sized(
    lost: Collection[str], by_layout: Mapping[str, int | None], whole: Iterable[tuple[str, tuple[int, ...]]]
) -> dict[str, int | None]:
    """The elements of each tensor that is not whole; None where nothing says how many.

    Args:
        lost: names of the tensors, in order.
        by_layout: the elements that the layout gives them.
        whole: the tensors that are whole, with their shapes. One of a layer has as many elements as those of the same
            role in other layers, if these all have as many.
    """
    found = {name: by_layout.get(name) for name in lost}
    if all(count is not None for count in found.values()):
        return found
    alike: dict[str, set[int]] = {}
    for name, shape in whole:
        layer, role = place_of(name)
        if layer is not None:
            alike.setdefault(role, set()).add(math.prod(shape))
    for name, count in found.items():
        layer, role = place_of(name)
        of_role = alike.get(role, set())
        if count is None and layer is not None and len(of_role) == 1:
            (found[name],) = of_role
    return found
