"""Transformer Engine's FP8 state is told of and left out, and never unpickled; FP8 weights are refused by
name."""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FIXTURES, assert_refused, cli, edit_pt, layer_file, read_result
from neox_maker import Spec, make_shards, merge, write
from test_neox_parallel import same_bits


class Format(enum.Enum):
    """As in transformer_engine.common.recipe, less its numbers."""

    HYBRID = (448, 57344)


@dataclasses.dataclass
class DelayedScaling:
    """As in transformer_engine.common.recipe."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> DelayedScaling:
    """An instance that is pickled under Transformer Engine's name."""
    for name in ("transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for kind in (Format, DelayedScaling):
        monkeypatch.setattr(kind, "__module__", name)
        monkeypatch.setattr(sys.modules[name], kind.__name__, kind, raising=False)
    return DelayedScaling(amax_history_len=16)


def state(recipe: Any, largest: float = 64.0) -> dict[str, Any]:
    """What get_extra_state makes."""
    return {
        "recipe": recipe,
        "scale_fwd": torch.tensor([0.5, 1.0, largest]),
        "scale_bwd": torch.tensor([2.0, 4.0]),
        "amax_history_fwd": torch.zeros(16, 3),
        "amax_history_bwd": torch.zeros(16, 2),
        "extra_fp8_variables": {"num_gemms": 1},
    }


def packed(form: str, content: Any) -> Any:
    """As `pickle.dumps` in a uint8 tensor, or as `torch.save` in one or in an io.BytesIO."""
    if form == "pickle":
        return torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer if form == "bytesio" else torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


TE: dict[str, Any] = {"te_mha": True, "te_mlp": True, "residual": False}


@pytest.mark.parametrize("pipeline", [True, False], ids=["pipeline", "sequential"])
@pytest.mark.parametrize("form", ["pickle", "zip", "bytesio"])
def test_fp8_state_is_told_of(
    form: str, pipeline: bool, recipe: DelayedScaling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Spec(**TE, extra_state=packed(form, state(recipe)))
    shards = make_shards(spec)
    shards[1]["3.mlp._extra_state"] = packed(form, state(recipe, 512.0))
    shards[1]["2.mlp._extra_state"] = packed(form, None)
    root = write(tmp_path / "ckpt", spec, shards, pipeline=pipeline)
    monkeypatch.undo()
    assert "transformer_engine" not in sys.modules
    ran = cli("inspect", root)
    assert (ran.code, ran.errors) == (0, [])
    assert ran.doc["metadata"]["features"]["fp8"] == {
        "states": 15,
        "recipe": "DelayedScaling",
        "margin": 0,
        "amax_history_len": 16,
        "amax_compute_algo": "max",
        "amax_history": [16],
        "scale_bwd": [2.0, 4.0],
        "scale_fwd": [0.5, 512.0],
    }
    shown = cli("inspect", root, json_output=False).out
    assert "DelayedScaling" in shown and "512" in shown
    assert cli("merge", root, tmp_path / "out").code == 0
    same_bits(read_result(tmp_path / "out"), merge(shards, residual=False, spec=spec))
    manifest = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())
    assert manifest["values"]["features"]["fp8"]["amax_history"] == [16]


def test_no_fp8_is_said_as_none(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec(**TE))
    assert cli("inspect", root).doc["metadata"]["features"]["fp8"] is None
    root = write(tmp_path / "own", Spec())
    assert "fp8" not in cli("inspect", root).doc["metadata"]["features"]


class Call:
    """Unpickled, this would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", ["pickle", "zip", "bytesio"])
def test_nothing_of_a_state_is_executed(form: str, tmp_path: Path) -> None:
    hostile = {"recipe": Call(tmp_path / "made"), "scale_fwd": torch.ones(1)}
    root = write(tmp_path / "ckpt", Spec(**TE, extra_state=packed(form, hostile)))
    for command in (("inspect", root), ("merge", root, tmp_path / "out")):
        assert cli(*command).code == 0
        assert not (tmp_path / "made").exists()
    pickle.loads(pickle.dumps(Call(tmp_path / "made")))
    assert (tmp_path / "made").exists(), "the case shows nothing"


@pytest.mark.parametrize("damage", ["cut", "noise", "not_bytes", "large"])
def test_state_that_cannot_be_read_is_left_out_all_the_same(damage: str, tmp_path: Path) -> None:
    whole = packed("pickle", {"scale_fwd": torch.ones(3)})
    broken = {
        "cut": whole[: len(whole) // 2].clone(),
        "noise": torch.arange(200, dtype=torch.uint8) ^ 0x5A,
        "not_bytes": torch.zeros(3),
        "large": torch.zeros((16 << 20) + 1, dtype=torch.uint8),
    }[damage]
    root = write(tmp_path / "ckpt", Spec(layers=1, tp=1, te_mlp=True, residual=False, extra_state=broken))
    ran = cli("merge", root, tmp_path / "out")
    assert (ran.code, ran.errors) == (0, [])
    (said,) = [f for f in ran.findings if "cannot be read" in f["message"]]
    assert (said["severity"], said["tensor"]) == ("warning", "2.mlp._extra_state")
    assert ran.having("FS212", tensor="2.mlp._extra_state")


@pytest.mark.parametrize("index", [999, -1, "x", None, {}])
def test_key_that_reads_like_a_tensor_is_none(index: Any, tmp_path: Path) -> None:
    """Neither in a state nor in a layer's file does a dict of the file's own stand for a tensor."""
    state = packed("pickle", {"scale_fwd": {"__tensor__": index}, "scale_bwd": torch.ones(2)})
    root = write(tmp_path / "ckpt", Spec(layers=1, tp=1, te_mlp=True, residual=False, extra_state=state))
    edit_pt(
        root / "global_step7" / layer_file(2, 0),
        lambda c: c.update({"own": {"__tensor__": index}, "other": {"__class__": index}}),
    )
    ran = cli("inspect", root)
    assert (ran.code, ran.errors) == (0, [])
    assert ran.doc["metadata"]["features"]["fp8"] == {"states": 1, "scale_bwd": [1.0, 1.0]}


def test_fp8_weights_are_refused_by_name(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec(tp=1, te_mlp=True, residual=False))

    def change(content: dict) -> None:
        content["mlp.fc1_weight"] = content["mlp.fc1_weight"].to(torch.float8_e4m3fn)

    edit_pt(root / "global_step7" / layer_file(2, 0), change)
    for command in (("merge",), ("convert", "--to", "hf")):
        ran = assert_refused(
            root, tmp_path / "out", "FS514", exit=2, command=command, tensor="2.mlp.fc1_weight"
        )
        assert ran.having("FS514")[0]["got"] == "F8_E4M3"


def test_a_checkpoint_may_not_hide_tensors_in_nested_bytes(tmp_path: Path) -> None:
    """In a layer file itself a tensor over bytes of the pickle is refused, not left out."""
    import shutil
    import zipfile

    shutil.copytree(FIXTURES / "gpt_neox/neox_pp_tp1", tmp_path / "ckpt")
    file = next((tmp_path / "ckpt").glob("global_step*")) / layer_file(2, 0)
    content = torch.load(file, weights_only=True)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3")
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out")
    assert ran.code == 2 and not (tmp_path / "out").exists()
    assert ran.having("FS514", file=file.name)
