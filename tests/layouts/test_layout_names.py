"""Names of a whole table: what precedes them, and what passes beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastshard import _core
from safetensors.numpy import save_file

TABLE = """
layout = "vision"
family = "toy"
prefix = "(model.language_model.|model.)"
keep = ["model.visual.*"]
[[tensor]]
name = "model.layers.{L}.q"
shape = "[h, H]"
as = "q"
[[tensor]]
name = "lm_head"
shape = "[V, H]"
as = "head"
"""


def model(prefix: str) -> dict[str, np.ndarray]:
    shapes = {
        f"{prefix}layers.0.q": (2, 3),
        f"{prefix}layers.1.q": (2, 3),
        "lm_head": (5, 3),
        "model.visual.patch": (4, 7),
    }
    return {
        name: np.random.default_rng(i).random(s, np.float32) for i, (name, s) in enumerate(shapes.items())
    }


def plan(
    folder: Path, tensors: dict[str, np.ndarray], target: str | None = None
) -> tuple[list[Any], dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "a.safetensors")
    request: dict[str, Any] = {"source": {"files": {"units": [{"file": 0}]}}}
    if target is not None:
        request["target"] = {"name": "toy"}
    to = None if target is None else _core.Table(target)
    catalog = _core.Catalog([folder], [(0, "a.safetensors")], 1)
    draft = catalog.draft(request, _core.Table(TABLE), to)
    core = draft.place({"max_shard_size": 1 << 40})
    made = {}
    for i, (name, _, shape, _, _) in enumerate(core.outputs()):
        made[name] = np.empty(shape, np.float32)
        core.read(i, 0, made[name].reshape(-1).view(np.uint8))
    return [f.to_dict() for f in core.findings()], made


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_a_merge_keeps_the_prefix_that_is_there(prefix: str, tmp_path: Path) -> None:
    tensors = model(prefix)
    found, made = plan(tmp_path, tensors)
    assert found == [] and sorted(made) == sorted(tensors)
    assert all(np.array_equal(made[name], tensors[name]) for name in tensors)


def test_a_conversion_writes_the_first(tmp_path: Path) -> None:
    """What is kept goes along, where the target keeps it too."""
    tensors = model("model.")
    found, made = plan(tmp_path, tensors, TABLE)
    assert found == []
    assert sorted(made) == sorted(model("model.language_model."))
    assert np.array_equal(made["model.language_model.layers.1.q"], tensors["model.layers.1.q"])
    assert np.array_equal(made["model.visual.patch"], tensors["model.visual.patch"])
    found, _ = plan(tmp_path, tensors, TABLE.replace("keep", "#"))
    assert [(f["code"], f["severity"]) for f in found] == [("FS212", "warning")]


def test_what_is_not_kept_is_refused(tmp_path: Path) -> None:
    found, _ = plan(tmp_path, model("model.") | {"model.audio.patch": np.zeros(3, np.float32)})
    assert [(f["code"], f["tensor"]) for f in found if f["severity"] == "error"] == [
        ("FS207", "model.audio.patch")
    ]
