"""A source is built step by step, and then nobody changes it."""

from __future__ import annotations

import json
from pathlib import Path

import fastshard
import pytest
from fastshard.common.records import replace
from fastshard.layouts.declaration import Binding, Source, SourceNames, Unit


def _make_source() -> Source:
    return Source("torch", names=SourceNames(own={"a": "b"}), binding=Binding(axes={"H": 4}))


def test_a_frozen_source_and_its_records_are_not_changed() -> None:
    source = _make_source()
    source.files.units.append(Unit(file=0))
    source.binding.axes["V"] = 8
    source.freeze()
    with pytest.raises(TypeError, match="frozen"):
        source.step = "1"
    with pytest.raises(TypeError, match="frozen"):
        source.names.prefix = "model."
    with pytest.raises(TypeError, match="frozen"):
        source.files.units.append(Unit(file=1))
    with pytest.raises(TypeError, match="frozen"):
        source.binding.axes["V"] = 9
    with pytest.raises(TypeError, match="frozen"):
        source.binding.axes |= {"V": 9}
    with pytest.raises(AttributeError):
        source.names.hidden.add("c")
    assert source.binding.axes == {"H": 4, "V": 8} and json.dumps(source.binding.axes)
    assert source.files.units == [Unit(file=0)]


def test_what_is_made_of_a_frozen_source_is_frozen_too() -> None:
    source = _make_source()
    source.freeze()
    other = replace(source, names=replace(source.names, prefix="model."))
    assert (source.names.prefix, other.names.prefix) == ("", "model.")
    for record in (other, other.names, other.binding):
        with pytest.raises(TypeError, match="frozen"):
            record.freeze_me = 1  # type: ignore[attr-defined]


def test_a_copy_may_be_changed_and_the_frozen_one_stays() -> None:
    source = _make_source()
    source.freeze()
    copy = source.thaw()
    copy.names.own["c"] = "d"
    copy.names.hidden.add("c")
    copy.binding.axes |= {"V": 9}
    assert source.names.own == {"a": "b"} and source.names.hidden == set()
    assert copy.binding.axes == {"H": 4, "V": 9}


def test_an_opened_checkpoint_has_a_frozen_source(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"w": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    source = fastshard.open(tmp_path).opened.source
    with pytest.raises(TypeError, match="frozen"):
        source.findings.append(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="frozen"):
        source.index.path = "other"
