"""What an adapter finds is a frozen record of its own type: nobody adds keys to it on the way to the
declaration."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest
from fastshard.sources.base import Adapter, Found
from fastshard.sources.registry import load_adapters

ADAPTERS = load_adapters()
#: What may be changed in place, or says nothing of what it holds.
LOOSE = (Any, dict, list, set)


def seen_by(adapter: Adapter[Any]) -> Any:
    """The type of what ``detect`` returns; ``NoneType`` where names tell no more than which files there
    are."""
    returned = typing.get_type_hints(adapter.detect)["return"]
    (found,) = (one for one in typing.get_args(returned) if typing.get_origin(one) is Found)
    return typing.get_args(found)[0]


def loose(record: Any) -> list[str]:
    """Fields of a record that may be changed in place, or have no type."""
    told = []
    for name, hint in typing.get_type_hints(record).items():
        kinds = [hint, *(typing.get_args(hint) if type(None) in typing.get_args(hint) else ())]
        told += [name for kind in kinds if kind in LOOSE or typing.get_origin(kind) in LOOSE]
    return told


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_each_adapter_has_a_frozen_record(adapter: Adapter[Any]) -> None:
    seen = seen_by(adapter)
    assert typing.get_type_hints(adapter.declare)["found"] == Found[seen]
    if seen is not type(None):
        assert dataclasses.is_dataclass(seen) and seen.__dataclass_params__.frozen
        assert loose(seen) == []


def test_what_was_found_is_frozen() -> None:
    assert loose(Found) == []
    found = Found(ADAPTERS[0], "DeepSpeed", [], None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.framework = "GPT-NeoX"  # type: ignore[misc]


def test_loose_fields_are_seen() -> None:
    hints = {
        "notes": dict[str, Any],
        "ranks": list[int] | None,
        "anything": Any,
        "folder": str,
        "at": tuple[list[int], ...],
    }
    assert loose(type("Bag", (), {"__annotations__": hints})) == ["notes", "ranks", "anything"]
