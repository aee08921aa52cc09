"""Records of DCP that are no tensors, and modules' own state: told, and never in the way."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed.checkpoint as dcp
from helpers import assert_refused, cli, read_result

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def extra(form: str) -> Any:
    """What get_extra_state of Transformer Engine gives, in the forms of its versions."""
    buffer = io.BytesIO()
    torch.save({"recipe": 1, "scale_fwd": torch.rand(3), "amax_history_fwd": torch.rand(16, 3)}, buffer)
    match form:
        case "BytesIO":
            return buffer
        case "bytes":
            return buffer.getvalue()
        case "uint8":
            return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        case "empty":
            return torch.empty(0, dtype=torch.uint8)
        case "dict":
            return {"recipe": 1, "scale": torch.rand(3)}
        case _:
            return None


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("form", ["BytesIO", "bytes", "uint8", "empty", "dict", "None"])
def test_state_of_modules_is_told_and_never_in_the_way(form: str, prefix: str, tmp_path: Path) -> None:
    weights = tiny_models.model("llama", tmp_path / "model").state_dict()
    modules = [
        f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    ]
    states = {f"{module}._extra_state": extra(form) for module in modules}
    held = {**weights, **states}
    dcp.save({"model": held} if prefix else held, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (tmp_path / "ckpt/config.json").write_bytes((tmp_path / "model/config.json").read_bytes())
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "hf")
    assert ran.code == 0, ran.out
    assert any("_extra_state" in (f.get("tensor") or "") for f in ran.having("FS212"))
    have = read_result(tmp_path / "out")
    assert set(have) == set(weights) and all(torch.equal(have[n], t) for n, t in weights.items())
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "merged")
    assert ran.code == 0, ran.out
    merged = read_result(tmp_path / "merged")
    carried = {name for name in merged if "_extra_state" in name}
    assert all(torch.equal(merged[n], t) for n, t in weights.items())
    if form in ("uint8", "empty"):
        assert carried == set(states)
        assert all(torch.equal(merged[name], tensor) for name, tensor in states.items())
    elif form == "dict":
        assert carried == {f"{name}.scale" for name in states}
        assert ran.having("FS212", message="(_extra_state) and not tensors")
    else:
        assert not carried
        (told,) = ran.having("FS212", message="(_extra_state) and not tensors")
        assert all(prefix + name in told["got"] for name in states)


def test_tensors_that_lie_in_objects_are_told(tmp_path: Path) -> None:
    """torch flattens dicts and lists; what lies in a tuple is one record."""
    held = {
        "w": torch.arange(6.0),
        "pair": (torch.ones(3), 2),
        "listed": [torch.ones(2)],
        "lr": 0.1,
        "betas": (0.9, 1),
    }
    dcp.save(held, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out")
    assert ran.code == 0, ran.out
    (told,) = ran.having("FS212")
    assert (told["severity"], told["tensor"], told["got"]) == ("warning", "pair", "pair")
    assert set(read_result(tmp_path / "out")) == {"w", "listed.0"}
    values = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())["values"]
    assert set(values["objects"]) == {"pair", "lr", "betas"}


def test_a_state_dict_that_was_not_flattened_is_refused_in_words_of_its_own(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "ckpt")
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"model": {"w": torch.ones(4)}, "step": 1}, storage_writer=writer, planner=planner, no_dist=True)
    assert_refused(
        tmp_path / "ckpt",
        tmp_path / "out",
        "FS514",
        exit=2,
        tensor="model",
        message="flatten_state_dict=False",
    )


def test_what_cannot_be_looked_into_is_not_in_the_way(tmp_path: Path) -> None:
    """An object that is damaged, or of a class that nothing is known of."""
    held = {"w": torch.ones(4), "o": Path("x"), "big": list(range(3000))}
    dcp.save(held, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    file = tmp_path / "ckpt/__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[40:80] = bytes(40)
    file.write_bytes(data)
    assert cli("merge", tmp_path / "ckpt", tmp_path / "out").code == 0
